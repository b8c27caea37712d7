"""What does a model say of every vertex? Its layers are applied one after the other, each to all vertices."""
