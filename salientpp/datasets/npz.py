"""What graph does an .npz archive hold?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch_geometric.data import Data

from salientpp.datasets.arrays import SPLITS, assemble, check_file, check_undirected, first_line, unreadable


def load_npz(file: Path, undirected: bool | None = None) -> Data:
    """See `load_dataset`."""
    check_undirected(undirected, f"npz:{file}")
    check_file(file)
    # What a damaged file makes numpy, zipfile and zlib raise is documented nowhere: nine types were counted.
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

        split_keys = {split: f"{split}_idx" for split in SPLITS}
        # A graph without splits is one to analyze; a single one that is missing is a mistake.
        needed = ["edge_index", *(split_keys.values() if any(key in archive for key in split_keys.values()) else [])]
        missing = [key for key in needed if key not in archive]
        if missing:
            raise ValueError(f"{file}: missing {', '.join(missing)}; it holds {', '.join(archive.files) or 'nothing'}")

        x, y = (read(key) if key in archive else None for key in ("x", "y"))
        directed = bool(_scalar(file, "directed", read("directed"), "biu")) if "directed" in archive else True
        if "num_nodes" in archive:
            num_vertices = int(_scalar(file, "num_nodes", read("num_nodes"), "iu"))
        else:
            rows = y if x is None else x
            if rows is None:
                raise ValueError(
                    f"{file}: the number of vertices is unknown: give num_nodes, x or y; it holds {', '.join(archive.files)}"
                )
            num_vertices = rows.shape[0] if rows.ndim else 0
        if y is not None and y.ndim != 1:
            raise ValueError(f"{file}: y must have shape [N], got {list(y.shape)}")
        return assemble(
            str(file),
            read("edge_index"),
            num_vertices,
            x,
            y,
            {split: (key, read(key)) for split, key in split_keys.items() if key in archive},
            symmetrise=not directed if undirected is None else undirected,
        )


def _scalar(file: Path, key: str, value: np.ndarray, kinds: str) -> Any:
    if value.size != 1 or value.dtype.kind not in kinds:
        expected = "one true or false" if "b" in kinds else "one integer"
        raise ValueError(f"{file}: {key} must be {expected}, got {value.dtype} {list(value.shape)}")
    return value.item()
