"""Dataset directories, partitioned graphs on disk: written, opened and checked. docs/reference/dataset-directory.md describes the format."""
