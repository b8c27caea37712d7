"""Let owners send sums in place of rows."""
