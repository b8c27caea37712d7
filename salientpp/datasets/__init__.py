"""Where does a graph come from? One way in, :func:`load_dataset`, and generated graphs, :func:`synthetic` and :func:`synthetic_mag`."""

from salientpp.datasets.generated import synthetic
from salientpp.datasets.generated_mag import synthetic_mag
from salientpp.datasets.load import load_dataset

__all__ = ["load_dataset", "synthetic", "synthetic_mag"]
