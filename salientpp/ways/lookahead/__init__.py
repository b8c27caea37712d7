"""Keep the remote rows that the next batches need."""
