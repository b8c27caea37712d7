"""Writes, opens and checks dataset directories: partitioned graphs on disk. The format is described in docs/dataset-directory.md."""
