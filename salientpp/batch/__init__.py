"""From what was sampled and gathered to the batch that the user gets."""
