"""Partial aggregation: the owners of rows send sums of rows instead of the rows, to move fewer bytes."""
