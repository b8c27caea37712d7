"""Methods that move fewer bytes for the same batches."""
