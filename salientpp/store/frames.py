"""Stores tables of PyTorch Frame (``TensorFrame``) as ordinary columns, so that caches and exchanges need not know about tables.

Rows of vertices travel, are cached, encoded and counted as columns: tensors [N, ...] with a name. :func:`take_apart` makes columns of a table, and
:meth:`Frame.put_together` makes the table of a batch from the columns of its vertices. Each tensor of a table is a :class:`TablePiece`. A piece becomes one
column, or two if its rows have different lengths:

* ``dense``: a tensor [N, C, ...], such as numerical, categorical and timestamp columns, or the target ``y`` [N, ...].
* ``embedding``: a ``MultiEmbeddingTensor``. Its values are [N, W] already.
* ``ragged``: a ``MultiNestedTensor``, such as multicategorical columns, sequences and tokens. The values of a row are stored one cell after the other, and
  zeros fill the row up to the longest row of the table. A second column [N, C] has the lengths of the cells.

Integers are stored in the shortest dtype that holds all values of the piece, and get their own dtype back in the batch. So nothing is rounded.
PyG's ``torch_geometric.typing`` has the class ``TensorFrame``, also without PyTorch Frame, so only making a table imports ``torch_frame``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import TensorFrame

from salientpp.store.narrow import WIDE, Column, Narrow

#: Dtypes that integers may be stored in, the shortest first.
_SHORT = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

#: Names of attributes that batches get for all their vertices unless the user chooses others.
FEATURES = ("x", "tf")


@dataclass(frozen=True)
class TablePiece:
    """Describes one tensor of a table, and makes it again from rows of its columns.

    Attributes:
        stype: name of the semantic type. None: the target ``y``.
        key: key of the tensor, if the semantic type has a dictionary of tensors, as tokens have.
        kind: 'dense', 'embedding' or 'ragged'.
        dtype: torch's name of the dtype in the table.
        offset: of an embedding, C + 1 numbers: the values of column c are ``offset[c]`` to ``offset[c + 1] - 1`` of a row. Otherwise empty.
        column: name of the column with the values.
    """

    stype: str | None
    key: str | None
    kind: str
    dtype: str
    offset: tuple[int, ...]
    column: str

    @property
    def lengths(self) -> str:
        """Name of the second column of a ragged piece: the lengths of its cells."""
        return f"{self.column}.lengths"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.lengths) if self.kind == "ragged" else (self.column,)

    def of(self, rows: Mapping[str, Tensor]) -> Any:
        """Makes this tensor of a batch's table from the rows [n, ...] of its columns, on the device of the rows."""
        values = rows[self.column]
        dtype = getattr(torch, self.dtype)
        if self.kind == "dense":
            return values.to(dtype)
        if self.kind == "embedding":
            from torch_frame.data import MultiEmbeddingTensor

            offset = torch.tensor(self.offset, device=values.device)
            return MultiEmbeddingTensor(len(values), len(offset) - 1, values.to(dtype), offset)
        from torch_frame.data import MultiNestedTensor

        lengths = rows[self.lengths].to(torch.int64)
        offset = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(lengths.flatten(), 0, out=offset[1:])
        is_value = torch.arange(values.size(1), device=values.device) < lengths.sum(1, keepdim=True)
        return MultiNestedTensor(len(values), lengths.size(1), values[is_value].to(dtype), offset)


@dataclass(frozen=True)
class Frame:
    """Describes a table without its rows, so that a table can be made again from rows of its columns.

    Attributes:
        pieces: the tensors, in the order of the table. ``y`` comes last.
        names: (semantic type, names of its columns), in the order of the table.
    """

    pieces: tuple[TablePiece, ...]
    names: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def columns(self) -> list[str]:
        """Names under which the rows of the table's pieces are stored."""
        return [name for piece in self.pieces for name in piece.columns]

    @property
    def num_cols(self) -> int:
        """Number of columns of the table, as PyG's ``num_features`` counts them."""
        return sum(len(names) for _, names in self.names)

    def put_together(self, rows: Mapping[str, Tensor], num_rows: int) -> TensorFrame:
        """Returns the table of a batch, from the rows that the pipeline moved as plain tensors.

        Args:
            rows: for each of :attr:`columns`, rows [n, ...] on any device.
            num_rows: n.
        """
        import torch_frame

        y: Any = None
        features: dict[Any, Any] = {}
        for piece in self.pieces:
            value = piece.of(rows)
            if piece.stype is None:
                y = value
            elif piece.key is None:
                features[torch_frame.stype(piece.stype)] = value
            else:
                features.setdefault(torch_frame.stype(piece.stype), {})[piece.key] = value
        names = {torch_frame.stype(stype): list(named) for stype, named in self.names}
        return torch_frame.TensorFrame(features, names, y, None if features else num_rows)

    def to_json(self) -> dict[str, Any]:
        pieces = [{**asdict(piece), "offset": list(piece.offset)} for piece in self.pieces]
        return {"pieces": pieces, "names": [[stype, list(names)] for stype, names in self.names]}

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Frame:
        pieces = (TablePiece(**{**piece, "offset": tuple(piece["offset"])}) for piece in said["pieces"])
        return cls(tuple(pieces), tuple((stype, tuple(names)) for stype, names in said["names"]))


def take_apart(name: str, table: TensorFrame, where: str) -> tuple[Frame, dict[str, Tensor]]:
    """Divides a table into columns of rows. Returns its description without rows, and the columns, on the CPU.

    The columns are named after the attribute ``name``, the semantic type and the key: 'tf.numerical', 'tf.text_tokenized.input_ids', 'tf.y'.

    Args:
        where: storage of the table, for errors.

    Raises:
        ValueError: the table holds a value of another class than PyTorch Frame's.
    """
    pieces: list[TablePiece] = []
    columns: dict[str, Tensor] = {}
    for stype, key, value in _parts_of(table):
        column = ".".join(word for word in (name, "y" if stype is None else stype, key) if word is not None)
        piece, own = _piece(stype, key, value, column, where)
        pieces.append(piece)
        columns |= own
    names = tuple((str(stype), tuple(map(str, named))) for stype, named in table.col_names_dict.items())
    empty = {stype for stype, _ in names} - {piece.stype for piece in pieces}
    if empty:
        raise ValueError(
            f"{where}.{name} must have a tensor for each semantic type, got none for {', '.join(sorted(empty))}"
        )
    return Frame(tuple(pieces), names), columns


def tensors_of(table: TensorFrame) -> list[Tensor]:
    """Returns the tensors with a table's values. Offsets, which say where a cell begins, are left out."""
    return [
        getattr(value, "values", value) if not isinstance(value, Tensor) else value for *_, value in _parts_of(table)
    ]


def with_tables(rows: Mapping[str, Any], frames: Mapping[str, Frame], num_rows: int) -> dict[str, Any]:
    """Returns a copy of ``rows`` (by name) in which each table replaces its columns."""
    parts = {column for frame in frames.values() for column in frame.columns}
    tables = {name: frame.put_together(rows, num_rows) for name, frame in frames.items()}
    return {**{name: value for name, value in rows.items() if name not in parts}, **tables}


def put_tables_together(store: Any, frames: Mapping[str, Frame]) -> None:
    """Replaces columns by the tables that they make up, in a batch. If a column of a table is missing, its other columns stay.

    Args:
        store: PyG's storage of one type.
        frames: by attribute name, the tables that the storage may have.
    """
    mapping = store._mapping
    for name, frame in frames.items():
        if any(column not in mapping for column in frame.columns):
            continue
        rows = {column: mapping.pop(column) for column in frame.columns}
        num_rows = next(map(len, rows.values()), mapping.get("num_nodes", 0))
        mapping[name] = frame.put_together(rows, num_rows)


def feature_columns(columns: Container[str], frames: Mapping[str, Frame]) -> list[str]:
    """Returns the columns that batches get by default: ``x``, and the columns of a table named ``tf`` or ``x``.

    Args:
        columns: names of the type's columns.
        frames: the type's tables by attribute name.
    """
    of_tables = [column for name in FEATURES if name in frames for column in frames[name].columns]
    return [*(["x"] if "x" in columns else []), *of_tables]


def features_of(store: Any) -> tuple[dict[str, Frame], dict[str, Tensor]]:
    """Returns the features in a PyG storage: tables by name, and rows by column (see :func:`feature_columns`)."""
    frames: dict[str, Frame] = {}
    columns = {"x": store["x"]} if isinstance(store.get("x"), Tensor) else {}
    for name in FEATURES:
        if isinstance(store.get(name), TensorFrame):
            frames[name], own = take_apart(name, store[name], "data")
            columns |= own
    return frames, columns


def formats_of_columns(
    argument: str,
    given: Any,
    tables: Mapping[Column, Frame],
    known: Mapping[Column, tuple[torch.dtype, Sequence[int]]],
) -> Any:
    """Replaces tables by columns in an argument that gives formats, such as ``{'tf': 'fp16'}``.

    The result names those columns of the table that the format makes smaller.

    Args:
        argument: name of the user's argument, for errors.
        given: value of the user's argument.
        tables: (type, attribute name) -> description of the table.
        known: dtype and row shape of every column.

    Raises:
        ValueError: a table has no column that would become smaller.
    """
    if not isinstance(given, Mapping):
        return given
    of_tables: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, format in given.items():
        named = {table: frame for table, frame in tables.items() if key in (table, table[1])}
        columns = [(table[0], column) for table, frame in named.items() for column in frame.columns]
        shorter = [column for column in columns if _gets_shorter(format, *known[column])]
        if named and not shorter:
            raise ValueError(
                f"{argument}[{key!r}]: no rows of this TensorFrame would get shorter as {format}, since only floating-point numbers are encoded; leave it out"
            )
        of_tables |= dict.fromkeys(shorter, format)
        if not named or any(key in (column, column[1]) for column in known):
            others[key] = format
    return {**of_tables, **others}


def _gets_shorter(format: str, dtype: torch.dtype, row_shape: Sequence[int]) -> bool:
    if dtype not in WIDE:
        return False
    try:
        narrow = Narrow(format, dtype, tuple(row_shape))
    except (ValueError, TypeError):
        return True  # the caller refuses the format, and names it
    return narrow.row_bytes < narrow.wide_bytes


def check_installed(where: str, frames: Iterable[Frame]) -> None:
    """Raises an error unless PyTorch Frame is installed and can make these tables.

    Raises:
        ImportError: PyTorch Frame is not installed.
        ValueError: PyTorch Frame does not know a semantic type of the tables.
    """
    try:
        import torch_frame
    except ImportError:
        raise ImportError(
            f"{where} has TensorFrame attributes, which need PyTorch Frame; run `pip install 'salientpp[relational]'`"
        ) from None
    known = {str(stype) for stype in torch_frame.stype}
    for stype in sorted({stype for frame in frames for stype, _ in frame.names} - known):
        raise ValueError(
            f"{where} has columns of the semantic type {stype!r}, which PyTorch Frame {torch_frame.__version__} does not know; upgrade pytorch-frame"
        )


def _parts_of(table: TensorFrame) -> Iterator[tuple[str | None, str | None, Any]]:
    """Yields (semantic type, key, tensor) for all tensors of a table. The semantic type of ``y`` is None."""
    for stype, value in table.feat_dict.items():
        if isinstance(value, dict):
            yield from ((str(stype), key, each) for key, each in value.items())
        else:
            yield str(stype), None, value
    if table.y is not None:
        yield None, None, table.y


def _piece(
    stype: str | None, key: str | None, value: Any, column: str, where: str
) -> tuple[TablePiece, dict[str, Tensor]]:
    said: dict[str, Any] = {"stype": stype, "key": key, "offset": (), "column": column}
    kind, values = type(value).__name__, value if isinstance(value, Tensor) else getattr(value, "values", None)
    if kind not in ("MultiEmbeddingTensor", "MultiNestedTensor") and not isinstance(value, Tensor):
        raise ValueError(
            f"{where}.{column} must be a tensor, a MultiEmbeddingTensor or a MultiNestedTensor, got {kind}; delete it from the TensorFrame"
        )
    if not isinstance(values, Tensor) or values.is_meta or values.layout != torch.strided or not values.dim():
        got = (
            f"{values.layout} {list(values.shape)} on {values.device}"
            if isinstance(values, Tensor)
            else type(values).__name__
        )
        raise ValueError(
            f"{where}.{column} must be a dense tensor with values, one row per vertex or edge, got {got}; convert it"
        )
    said["dtype"], values = _name(values.dtype), shortened(values.detach().cpu())
    if isinstance(value, Tensor):
        return TablePiece(kind="dense", **said), {column: values}
    if kind == "MultiEmbeddingTensor":
        said["offset"] = tuple(value.offset.tolist())
        return TablePiece(kind="embedding", **said), {column: values.reshape(value.num_rows, said["offset"][-1])}
    lengths = value.offset.detach().cpu().diff().view(value.num_rows, value.num_cols)
    piece = TablePiece(kind="ragged", **said)
    return piece, {piece.column: _filled_up(values, lengths.sum(1)), piece.lengths: shortened(lengths)}


def _filled_up(values: Tensor, sizes: Tensor) -> Tensor:
    """Returns rows of equal length, [N, W]: row i has the next ``sizes[i]`` entries of ``values``, then zeros."""
    width = int(sizes.max()) if sizes.numel() else 0
    rows = values.new_zeros((len(sizes), width))
    rows[torch.arange(width, device="cpu") < sizes[:, None]] = values
    return rows


def shortened(values: Tensor) -> Tensor:
    """Returns integers in the shortest dtype that holds them all, and other values as they are."""
    if values.dtype not in _SHORT or not values.numel():
        return values
    least, most = (int(each) for each in values.aminmax())
    fitting = (dtype for dtype in _SHORT if torch.iinfo(dtype).min <= least and most <= torch.iinfo(dtype).max)
    return values.to(min((next(fitting), values.dtype), key=lambda dtype: dtype.itemsize))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
