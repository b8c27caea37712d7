"""Reads the graph of an .npz archive."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch_geometric.data import Data

from salientpp.datasets.arrays import SPLITS, assemble, check_file, check_undirected, unreadable
from salientpp.files import first_line

Array = TypeVar("Array", bound=Any)


def load_npz(file: Path, undirected: bool | None = None) -> Data:
    """Loads ``npz:FILE``, see `load_dataset`."""
    check_undirected(undirected, f"npz:{file}")
    check_file(file)
    # numpy, zipfile and zlib do not document their errors for damaged files; nine types were counted.
    try:
        archive = np.load(file, allow_pickle=False)
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except Exception as error:
        raise ValueError(f"{file}: not an .npz archive ({first_line(error)})") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{file}: not an .npz archive but a single array; expected the output of numpy.savez")

    with archive:

        def read(key: str) -> np.ndarray:
            try:
                return archive[key]
            except OSError as error:
                raise unreadable(f"{file}: {key}", error) from error
            except Exception as error:
                raise ValueError(f"{file}: {key} cannot be read ({first_line(error)})") from error

        split_keys = npz_split_keys(file, archive.files)
        x, y = (read(key) if key in archive else None for key in ("x", "y"))
        directed = bool(scalar(f"{file}: directed", read("directed"), "biu").item()) if "directed" in archive else True
        rows = y if x is None else x
        if "num_nodes" in archive:
            num_vertices = int(scalar(f"{file}: num_nodes", read("num_nodes"), "iu").item())
        elif rows is not None:
            num_vertices = rows.shape[0] if rows.ndim else 0
        else:
            raise ValueError(
                f"{file}: the number of vertices is unknown: give num_nodes, x or y; the archive holds {', '.join(archive.files)}"
            )
        if y is not None and y.ndim != 1:
            raise ValueError(f"{file}: y must have shape [N], got {list(y.shape)}")
        splits = {split: (key, read(key)) for split, key in split_keys.items()}
        known = ("edge_index", "x", "y", "num_nodes", "directed", *split_keys.values())
        if left_out := [key for key in archive.files if key not in known]:
            warnings.warn(
                f"{', '.join(left_out)} of npz:{file} left out: the archive may have {', '.join(known)}; for other attributes save a Data object (pyg:FILE)",
                UserWarning,
                stacklevel=4,
            )
        symmetrise = not directed if undirected is None else undirected
        return assemble(str(file), read("edge_index"), num_vertices, x, y, splits, symmetrise)


def npz_split_keys(file: Path, held: Sequence[str]) -> dict[str, str]:
    """Returns the key of each split in an archive with the keys ``held``. ValueError names missing keys; an archive may lack all splits."""
    split_keys = {split: f"{split}_idx" for split in SPLITS}
    # A graph without splits can be analyzed. A single missing split is a mistake.
    if not any(key in held for key in split_keys.values()):
        split_keys = {}
    missing = [key for key in ("edge_index", *split_keys.values()) if key not in held]
    if missing:
        raise ValueError(f"{file}: missing {', '.join(missing)}; the archive holds {', '.join(held) or 'nothing'}")
    return split_keys


def scalar(name: str, array: Array, kinds: str) -> Array:
    """Returns ``array`` if it is a single number of one of numpy's ``kinds``, else raises ValueError. Only shape and dtype are read."""
    if math.prod(array.shape) != 1 or array.dtype.kind not in kinds:
        expected = "one true or false" if "b" in kinds else "one integer"
        raise ValueError(f"{name} must be {expected}, got {array.dtype} {list(array.shape)}")
    return array
