"""Partial aggregation: owners send sums instead of rows."""
