"""Writes, opens and checks dataset directories, which are partitioned graphs on disk. docs/reference/dataset-directory.md describes the format."""
