"""Outputs of a model under the keys of the user's tables: Parquet files of parts and ranks, and scores of links."""
