"""Loads a graph and its assignment from the files of another partitioner."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.datasets.arrays import SPLITS, check_features, form
from salientpp.datasets.partitions import glt, pyg
from salientpp.datasets.partitions.pieces import COPY_AGAIN, Book, Files, PartRows, Type, named, read, tensor
from salientpp.ids import first_outside, read_ids
from salientpp.store.directory.kinds import MANIFEST
from salientpp.suggestions import did_you_mean

#: Maps the name of a format on the command line to the file that identifies it.
FORMATS = {"pyg-partition": pyg.META, "glt-partition": glt.META}


class GivenPartition(NamedTuple):
    """A graph with its original ids and order of edges, and the assignment of its vertices to parts."""

    data: Data | HeteroData
    #: Part of each vertex, int64 [N], or with several types a dictionary from type to such a tensor. `method=` of `salientpp.partition` takes it.
    assignment: Tensor | dict[str, Tensor]
    num_parts: int


def load_partition(
    root: str | Path,
    *,
    y: Tensor | str | Path | None = None,
    train: Tensor | str | Path | None = None,
    val: Tensor | str | Path | None = None,
    test: Tensor | str | Path | None = None,
    node_type: str | None = None,
) -> GivenPartition:
    """Loads a graph that `torch_geometric.distributed.Partitioner` or one of GLT's partitioners divided into parts.

    The result has edges, features, times and weights. These partitioners do not store labels and splits, so pass them here. Every vertex must
    be in the files once, in the part that the assignment says. No file can run code: files are read with ``weights_only=True``, and pickles of
    GLT by a reader that takes only tensors and plain values.

    Args:
        root: the partitioner's output directory, with the folders of all parts.
        y: labels [N] or [N, labels per vertex], or their `.pt` file.
        train, val, test: vertex ids or a mask, or their `.pt` file. A folder of files ``partition0.pt``, ``partition1.pt``, ... is joined.
        node_type: in a heterogeneous graph, the type of vertices to which y, train, val and test belong.

    Returns:
        The graph, the assignment, and the number of parts. The graph has ``x``, ``edge_attr``, ``time``, ``edge_time`` and ``edge_weight`` if they
        are stored, and ``y`` and masks of splits if they are given.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: the files are not as the partitioner writes them, or do not fit each other.
    """
    root = Path(root)
    files = _recognised(root)
    tables: dict[tuple[str, Type], _Table] = {}
    for kind, books in (("vertex", files.vertices), ("edge", files.edges)):
        tables |= {(kind, of): _Table(root, kind, of, book) for of, book in books.items()}
    for part in range(files.num_parts):
        for piece in files.pieces(part):
            tables[piece.kind, piece.type].put(part, piece)

    data: Data | HeteroData = Data() if None in files.vertices else HeteroData()
    for (kind, of), table in tables.items():
        store = data if of is None else data[of]
        if kind == "vertex":
            store.num_nodes = table.size
        for name, rows in table.whole().items():
            if rows is table.edge_index:
                source, target = (of[0], of[2]) if isinstance(of, tuple) else (None, None)
                _check_ends(root, of, rows, (files.vertices[source], files.vertices[target]))
            if files.fills_with_nan and _all_nan(rows):
                continue
            if name == "x":
                check_features(rows, table.size, str(root) if of is None else f"{root}: {of}")
            store[name] = rows
    given = {"y": y, "train": train, "val": val, "test": test}
    _attach(data, root, node_type, {name: value for name, value in given.items() if value is not None})
    parts = {str(of): book.parts for of, book in files.vertices.items()}
    return GivenPartition(data, parts if isinstance(data, HeteroData) else files.vertices[None].parts, files.num_parts)


def _recognised(root: Path) -> Files:
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such directory")
    if (root / pyg.META).is_file():
        return pyg.open_pyg(root)
    if (root / glt.META).is_file():
        return glt.open_glt(root)
    if not root.is_dir():
        raise ValueError(f"{root}: expected a directory that a partitioner wrote, got a file")
    there = sorted(path.name for path in root.iterdir())
    advice = (
        "it is a dataset directory; open it with salientpp.load"
        if MANIFEST in there
        else "that file is written last: give the partitioner's output directory, or partition again"
    )
    raise ValueError(
        f"{root}: expected {pyg.META}, which PyG's partitioner writes, or {glt.META}, which GLT's partitioners write, got "
        f"{', '.join(there[:8]) or 'nothing'}{', ...' if len(there) > 8 else ''}; {advice}"
    )


class _Table:
    """Puts the rows of all parts together: one tensor in the order of ids for each attribute of a type. Parts may be read in any order."""

    def __init__(self, root: Path, kind: str, of: Type, book: Book) -> None:
        self.size = book.parts.numel()
        self._root, self._of, self._book = root, named(kind, of), book
        self._columns: dict[str, Tensor] = {}
        self._stored_whole: set[str] = set()
        # The keys are the names of all attributes of a piece. The values are the rows found so far, bool [size], and their number with repeats.
        self._seen: dict[tuple[str, ...], Tensor] = defaultdict(
            lambda: torch.zeros(self.size, dtype=torch.bool, device="cpu")
        )
        self._rows: Counter[tuple[str, ...]] = Counter()
        self.edge_index: Tensor | None = None
        if kind == "edge":
            self.edge_index = torch.empty(2, self.size, dtype=torch.int64, device="cpu")
            self._columns = {"row": self.edge_index[0], "col": self.edge_index[1]}
            self._seen[_ENDS]  # every edge must have ends, even if no part has a file of edges

    def put(self, part: int, piece: PartRows) -> None:
        """Copies each row of ``piece`` to the position of its id. Raises ValueError if the id is out of range or belongs to another part."""
        if piece.ids is None:
            self._put_whole(piece)
            return
        ids = piece.ids
        for name, rows in piece.values.items():
            if rows.size(0) != ids.numel():
                raise ValueError(
                    f"{piece.file}: {name} must have a row for each of the {ids.numel()} ids beside it, got {rows.size(0)}{COPY_AGAIN}"
                )
        at = first_outside(ids, self.size)
        if at is not None:
            raise ValueError(
                f"{piece.file}: expected ids in [0, {self.size}), the size of {self._book.file.name}, got {self._of} {int(ids[at])}{COPY_AGAIN}"
            )
        elsewhere = self._book.parts[ids] != part
        if bool(elsewhere.any()):
            wrong = int(ids[elsewhere.nonzero()[0]])
            raise ValueError(
                f"{piece.file}: {self._of} {wrong} is in part {part} here, but {self._book.file} puts it in part "
                f"{int(self._book.parts[wrong])}{COPY_AGAIN}"
            )
        names = tuple(sorted(piece.values))  # may be empty: the ids of a part are checked even without attributes
        self._seen[names][ids] = True
        self._rows[names] += ids.numel()
        for name, rows in piece.values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = torch.empty((self.size, *rows.shape[1:]), dtype=rows.dtype, device="cpu")
            if (column.dtype, column.shape[1:]) != (rows.dtype, rows.shape[1:]):
                raise ValueError(
                    f"{piece.file}: expected {name} as in earlier parts, {form(column[:0])} with any number of rows, got {form(rows)}"
                    f"{COPY_AGAIN}"
                )
            column[ids] = rows

    def _put_whole(self, piece: PartRows) -> None:
        for name, rows in piece.values.items():
            if rows.size(0) != self.size:
                raise ValueError(
                    f"{piece.file}: expected {name} with {self.size} rows, the size of {self._book.file.name}, got {form(rows)}{COPY_AGAIN}"
                )
            if name not in self._columns:
                self._columns[name] = rows.clone()
                self._stored_whole.add(name)
            elif not torch.equal(self._columns[name], rows):
                raise ValueError(f"{piece.file}: expected {name} as in earlier parts, got other values{COPY_AGAIN}")

    def whole(self) -> dict[str, Tensor]:
        """Returns the attributes by name. Attributes of edges begin with ``edge_index``. Raises ValueError unless each row was found once."""
        for names, seen in self._seen.items():
            spoken = "the ends" if names == _ENDS else " and ".join(names) or "an id"
            if not bool(seen.all()):
                missing = int((~seen).nonzero()[0])
                raise ValueError(
                    f"{self._root}: expected {spoken} of each {self._of}, got none for {missing} in the files of part "
                    f"{int(self._book.parts[missing])}{COPY_AGAIN}"
                )
            if self._rows[names] != self.size:
                raise ValueError(
                    f"{self._root}: expected {spoken} of each {self._of} once, got {self._rows[names]} for {self.size}: "
                    f"some are repeated{COPY_AGAIN}"
                )
        if self.edge_index is None:
            return self._columns
        attributes = {name: rows for name, rows in self._columns.items() if name not in _ENDS}
        return {"edge_index": self.edge_index, **attributes}


_ENDS = ("col", "row")


def _check_ends(root: Path, of: Type, edge_index: Tensor, books: tuple[Book, Book]) -> None:
    for end, ids, book in zip(("source", "target"), edge_index, books):
        at = first_outside(ids, book.parts.numel())
        if at is not None:
            raise ValueError(
                f"{root}: {named('edge', of)} {at} must have a {end} in [0, {book.parts.numel()}), the size of {book.file.name}, got "
                f"{int(ids[at])}{COPY_AGAIN}"
            )


def _all_nan(rows: Tensor) -> bool:
    return rows.is_floating_point() and rows.numel() > 0 and bool(rows[:1].isnan().all() and rows.isnan().all())


# --- labels and splits -----------------------------------------------------------------------------------


def _attach(
    data: Data | HeteroData, root: Path, node_type: str | None, given: Mapping[str, Tensor | str | Path]
) -> None:
    if isinstance(data, Data):
        if node_type is not None:
            raise ValueError(
                f"{root}: node_type is for graphs with several types, but this graph has one; leave it out"
            )
        store, of = data, ""
    else:
        if not given:
            return
        if node_type not in data.node_types:
            raise ValueError(
                f"{root}: node_type must say which of the types {', '.join(data.node_types)} has {', '.join(given)}, got {node_type!r}"
                f"{did_you_mean(str(node_type), data.node_types)}"
            )
        store, of = data[node_type], f" of {node_type}"
    num_vertices = store.num_nodes
    for name, value in given.items():
        where = name if isinstance(value, Tensor) else f"{value}: {name}"
        if name in SPLITS:
            ids, _ = read_ids(_split(value), num_vertices, f"{where}{of}", "a mask or integer ids")
            mask = torch.zeros(num_vertices, dtype=torch.bool, device="cpu")
            mask[ids] = True
            if int(mask.sum()) < ids.numel():
                raise ValueError(
                    f"{where}{of} must hold each vertex id once, got one again; if it has a flag per vertex, save a bool mask: .bool()"
                )
            store[f"{name}_mask"] = mask
            continue
        labels = value if isinstance(value, Tensor) else tensor(read(Path(value)), Path(value)).clone()
        if labels.dim() == 0 or labels.size(0) != num_vertices:
            raise ValueError(f"{where}{of} must have a row for each of the {num_vertices} vertices, got {form(labels)}")
        store.y = labels


def _split(value: Tensor | str | Path) -> Tensor:
    if isinstance(value, Tensor):
        return value
    path = Path(value)
    if not path.is_dir():
        return tensor(read(path), path)
    numbered = {int(m[1]): p for p in path.iterdir() if (m := re.fullmatch(r"partition(\d+)\.pt", p.name))}
    if not numbered:
        raise ValueError(
            f"{path}: expected a .pt file, or a folder with partition0.pt, partition1.pt, ..., got neither"
        )
    return torch.cat([tensor(read(numbered[i]), numbered[i]) for i in sorted(numbered)])
