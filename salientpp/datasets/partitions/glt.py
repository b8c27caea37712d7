"""Reads the files of GraphLearn-for-PyTorch's partitioners.

The features of a part are one tensor in ``feats.pt`` with ids in ``ids.pt``. Later versions pickle tensors one after another into ``feats.pkl`` and
``ids.pkl``. ``cache_feats.pt`` is not read, since it has copies of other parts' rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from salientpp.datasets.partitions.pieces import (
    Files,
    PartRows,
    Type,
    check_folders,
    integers,
    read,
    read_books,
    read_pickles,
    tensor,
)

META = "META"


def open_glt(root: Path) -> Files:
    """Opens a directory that one of GLT's partitioners wrote."""
    file = root / META
    meta: Any = next(read_pickles(file), None)
    try:
        num_parts, kind = int(meta["num_parts"]), meta["data_cls"]
        is_hetero = {"hetero": True, "homo": False}[kind]
        node_types = [str(t) for t in meta["node_types"]] if is_hetero else []
        edge_types = [(str(s), str(r), str(t)) for s, r, t in meta["edge_types"]] if is_hetero else []
        if num_parts < 1 or not {t for edge_type in edge_types for t in edge_type[::2]} <= {*node_types}:
            raise ValueError
    except (TypeError, KeyError, ValueError, IndexError):
        raise ValueError(
            f"{file}: expected num_parts above 0, data_cls 'homo' or 'hetero', node_types, and edge_types between these types, as GLT's partitioners "
            f"write them, got {meta!r}; copy it again, or partition again"
        ) from None
    check_folders(root, "part", num_parts, META)
    if (root / "graph").is_dir():
        raise ValueError(
            f"{root}: written with graph_caching=True, which loses the order of edges; partition again without it, or pass the graph "
            "itself to salientpp.partition, with method=torch.load('node_pb.pt')"
        )
    vertices = read_books(root / "node_pb", node_types if is_hetero else [None], num_parts)
    edges = read_books(root / "edge_pb", edge_types if is_hetero else [None], num_parts)

    def pieces(part: int) -> Iterator[PartRows]:
        folder = root / f"part{part}"
        for edge_type in edges:
            graph = _folder(folder / "graph", edge_type)
            row, col, ids = (integers(read(graph / name), graph / name) for name in ("rows.pt", "cols.pt", "eids.pt"))
            yield PartRows("edge", edge_type, graph, ids, {"row": row, "col": col})
            weights = graph / "weights.pt"
            if weights.exists():
                yield PartRows("edge", edge_type, weights, ids, {"edge_weight": tensor(read(weights), weights)})
            yield from _features("edge", edge_type, _folder(folder / "edge_feat", edge_type), "edge_attr")
        for node_type in vertices:
            yield from _features("vertex", node_type, _folder(folder / "node_feat", node_type), "x")

    return Files(num_parts, vertices, edges, pieces)


def _folder(folder: Path, of: Type) -> Path:
    return folder if of is None else folder / ("__".join(of) if isinstance(of, tuple) else of)


def _features(kind: str, of: Type, folder: Path, name: str) -> Iterator[PartRows]:
    if not folder.is_dir():
        return
    if (folder / "feats.pkl").exists():
        ids_of, rows_of = read_pickles(folder / "ids.pkl"), read_pickles(folder / "feats.pkl")
    else:
        ids_of, rows_of = iter([read(folder / "ids.pt")]), iter([read(folder / "feats.pt")])
    for rows in rows_of:
        ids = integers(next(ids_of, None), folder, "ids")
        yield PartRows(kind, of, folder, ids, {name: tensor(rows, folder, "feats")})
