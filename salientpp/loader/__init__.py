"""What users iterate: PyG's loaders over the engine."""
