"""Inference layer by layer: each layer is applied to all vertices before the next."""
