"""Layer-wise inference: each layer is applied to all vertices before the next."""
