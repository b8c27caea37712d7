"""Opens the sources that can be converted."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.datasets.arrays import SPLITS, check_file, check_undirected, form
from salientpp.datasets.converted.arrays import (
    StoredArray,
    array_edges,
    array_rows,
    members_of,
    saved_edges,
    saved_rows,
)
from salientpp.datasets.converted.parquet import parquet_edges, parquet_rows
from salientpp.datasets.converted.pieces import EdgeName, Edges, RowPiece, Rows, Source, Split, Vertices, first_row
from salientpp.datasets.converted.text import tables, text_edges, text_rows
from salientpp.datasets.npz import npz_split_keys, scalar
from salientpp.datasets.ogb import listed, ogb_meta, provide_ogb_files
from salientpp.datasets.own_objects import read_pyg, says_damaged
from salientpp.datasets.spec import did_you_mean, with_spec
from salientpp.datasets.torch_files import is_archive
from salientpp.store.directory.attributes import edge_stores, node_stores

_TEXT = (".txt", ".tsv", ".csv", ".el", ".edges")


def open_source(source: str, data: Path, undirected: bool | None) -> Source:
    """Opens the source that a name stands for. Only headers are read."""
    check_undirected(undirected, str(source))
    name, _, rest = source.partition(":") if isinstance(source, str) else ("", "", "")
    if name == "npz" and rest:
        return _open_npz(source, Path(rest), undirected)
    if name == "pyg" and rest:
        return _open_pyg(source, Path(rest), undirected)
    if name == "edges" and rest:
        return _open_edges(source, rest, undirected)
    if name.startswith("ogbn-"):
        parameters = with_spec(source, rest, {} if undirected is None else {"undirected": undirected})
        return _open_ogb(name, data, **parameters)
    known = ("npz", "pyg", "edges", "ogbn-arxiv", "ogbn-products", "ogbn-papers100M")
    raise ValueError(
        'source must be "npz:FILE", "pyg:FILE", "edges:FILES,x=FILES,..." or the name of an OGB node-property dataset such as ogbn-papers100M, '
        f"got {source!r}{did_you_mean(name, known) if name else ''}"
    )


def _open_npz(name: str, file: Path, undirected: bool | None) -> Source:
    """Opens an archive with the keys that ``load_npz`` reads."""
    held = members_of(file)
    split_keys = npz_split_keys(file, held)
    wanted = ("edge_index", *split_keys.values(), "x", "y", "num_nodes", "directed")
    arrays = {key: StoredArray.of(file, key) for key in held if key in wanted}
    columns: dict[str, Rows] = {key: _checked_column(key, arrays[key]) for key in ("x", "y") if key in held}
    directed = bool(_scalar(arrays["directed"], "biu")) if "directed" in arrays else True
    if "num_nodes" not in arrays and not columns:
        raise ValueError(
            f"{file}: the number of vertices is unknown: give num_nodes, x or y; the archive holds {', '.join(held)}"
        )
    edge_index = arrays["edge_index"]
    if edge_index.shape[:1] != (2,) or len(edge_index.shape) != 2:
        raise ValueError(f"{edge_index.name} must have shape [2, E], got {list(edge_index.shape)}")
    num_vertices = int(_scalar(arrays["num_nodes"], "iu")) if "num_nodes" in arrays else None
    splits = {split: Split(_ids(arrays[key])) for split, key in split_keys.items()}
    return Source(
        name,
        {None: Vertices(num_vertices, columns, splits)},
        {None: array_edges([edge_index])},
        undirected=not directed if undirected is None else undirected,
        files=(file,),
    )


def _checked_column(key: str, array: StoredArray) -> Rows:
    if key == "x" and (array.dtype not in (np.float16, np.float32, np.float64) or len(array.shape) != 2):
        raise ValueError(
            f"{array.name} must be float16, float32 or float64 [N, F], got {array.dtype} {list(array.shape)}"
        )
    if key == "y" and (array.dtype.kind not in "iu" or len(array.shape) != 1):
        raise ValueError(
            f"{array.name} must be integers [N] (-1 for an unlabelled vertex), got {array.dtype} {list(array.shape)}"
        )
    return _labels(array_rows([array])) if key == "y" else array_rows([array])


def _ids(array: StoredArray) -> Rows:
    if len(array.shape) != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{array.name} must be a list of vertex ids, shape [*], got {array.dtype} {list(array.shape)}")
    return array_rows([array])


def _scalar(array: StoredArray, kinds: str) -> Any:
    with scalar(array.name, array, kinds).reader() as read:
        return read(1)[0].item()


# --- files of edges ---------------------------------------------------------------------------------------


def _open_edges(name: str, rest: str, undirected: bool | None) -> Source:
    pattern, _, spec = rest.partition(",")
    given = with_spec(name, spec, {}, as_text=True)
    numbers = {}
    for key in ("num_vertices", "skip"):
        text = given.pop(key, "")
        if text and not text.isdecimal():
            raise ValueError(f"{name}: {key} must be an integer >= 0, got {text!r}")
        numbers[key] = int(text) if text else None
    skip = numbers["skip"] or 0
    known = ("x", "y", *SPLITS)
    for key in given:
        if key not in known:
            raise ValueError(
                f"{name} has no parameter {key!r}; it has {', '.join((*known, 'num_vertices', 'skip'))}{did_you_mean(key, known)}"
            )
    files = {key: _files(name, text) for key, text in (("edges", pattern), *given.items())}
    columns: dict[str, Rows] = {}
    if "x" in files:
        columns["x"] = _rows_of(files["x"], float, skip)
    if "y" in files:
        columns["y"] = _labels(_rows_of(files["y"], int, skip))
    splits = {key: Split(_rows_of(files[key], int, skip)) for key in SPLITS if key in files}
    kind, paths = _kind(files["edges"][0]), files["edges"]
    if kind == "npy":
        edges = array_edges([StoredArray.of(path) for path in paths])
    else:
        edges = parquet_edges(paths) if kind == "parquet" else text_edges(paths, skip)
    return Source(
        name,
        {None: Vertices(numbers["num_vertices"], columns, splits)},
        {None: edges},
        undirected=bool(undirected),
        files=tuple(path for paths in files.values() for path in paths),
    )


def _files(name: str, pattern: str) -> list[Path]:
    """Finds files of one kind, ordered by the numbers in their names."""
    found = [pattern] if Path(pattern).exists() or not glob.has_magic(pattern) else glob.glob(pattern)
    if not found:
        raise FileNotFoundError(f"{name}: no file matches {pattern}")
    paths = [Path(path) for path in sorted(found, key=_by_numbers)]
    for path in paths:
        check_file(path)
    kinds = {_kind(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"{name}: files of {pattern} must all be of one kind, got {', '.join(sorted(kinds))}")
    return paths


def _by_numbers(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def _kind(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in _TEXT:
        return "text"
    if path.suffix in (".npy", ".parquet"):
        return path.suffix[1:]
    raise ValueError(f"the name of {path} must end in {', '.join(_TEXT)} (also with .gz), .npy or .parquet")


def _rows_of(paths: Sequence[Path], dtype: type, skip: int) -> Rows:
    kind = _kind(paths[0])
    if kind == "npy":
        return array_rows([StoredArray.of(path) for path in paths])
    return parquet_rows(paths) if kind == "parquet" else text_rows(paths, dtype, skip=skip)


# --- labels -----------------------------------------------------------------------------------------------


def _labels(rows: Rows, are_classes: bool = False) -> Rows:
    """Returns the same rows, with their values converted to labels by `_read_labels`."""
    return replace(
        rows,
        pieces=lambda most_bytes: (
            replace(piece, values=_read_labels(piece, are_classes)) for piece in rows.pieces(most_bytes)
        ),
    )


def _read_labels(piece: RowPiece, are_classes: bool) -> Tensor:
    """Returns labels [n] or [n, labels per vertex]; a single column becomes [n]. Integers become int64. Real numbers keep their dtype.

    With ``are_classes`` real numbers stand for classes, as in the Open Graph Benchmark. They become int64, and NaN becomes -1.
    """
    values = piece.values
    if values.dim() == 2 and values.size(1) == 1:
        values = values[:, 0]
    if values.is_floating_point() and not are_classes:
        return values
    if values.is_floating_point():
        values = values.nan_to_num(nan=-1.0)
        classes = values.to(torch.int64)
        wrong = classes != values
        if bool(wrong.any()):
            raise ValueError(
                f"{piece.where(first_row(wrong))}: y must hold whole numbers (nan for an unlabelled vertex), got {float(values[wrong][0]):g}"
            )
        return classes
    if values.dtype.is_complex or values.dtype == torch.bool:
        raise ValueError(f"{piece.where(0)}: y must hold integers or real numbers, got {form(values)}")
    if values.dtype == torch.uint64:
        too_large = values.view(torch.int64) < 0
        if bool(too_large.any()):
            raise ValueError(f"{piece.where(first_row(too_large))}: y must hold numbers below 2^63, got a larger one")
    return values.to(torch.int64)


# --- the Open Graph Benchmark -----------------------------------------------------------------------------


def _open_ogb(name: str, root: Path, undirected: bool | None = None, download: bool = False) -> Source:
    meta = ogb_meta(name)
    folder = root / name.replace("-", "_")
    provide_ogb_files(name, meta, folder, download)
    raw = folder / "raw"
    if meta["binary"] == "True":
        files = [raw / "data.npz", raw / "node-label.npz"]
        held = members_of(files[0])
        num_vertices = int(_scalar(StoredArray.of(files[0], "num_nodes_list"), "iu"))
        edges = array_edges([StoredArray.of(files[0], "edge_index")])
        columns = {
            "x" if key == "node_feat" else key: array_rows([StoredArray.of(files[0], key)])
            for key in held
            if key.startswith("node_")
        }
        columns["y"] = _labels(array_rows([StoredArray.of(files[1], "node_label")]), are_classes=True)
        left_out = [key for key in held if key.startswith("edge_") and key != "edge_index"]
    else:
        files = [raw / f"{part}.csv.gz" for part in ("edge", "node-label", "num-node-list")]
        table = next(tables(files[2], 2**16, int, 1), None)
        if table is None:
            raise ValueError(f"{files[2]}: expected the number of vertices, got an empty file")
        num_vertices = int(table.values[0, 0])
        edges = text_edges([files[0]])
        columns = {"y": _labels(text_rows([files[1]], float, num_vertices), are_classes=True)}
        if meta["has_node_attr"] == "True":
            files.append(raw / "node-feat.csv.gz")
            columns["x"] = text_rows([files[-1]], float, num_vertices)
        for key in listed(meta["additional node files"]):
            files.append(raw / f"{key}.csv.gz")
            columns[key] = text_rows([files[-1]], int, num_vertices)
        left_out = ["edge_attr"] if meta["has_edge_attr"] == "True" else []
    splits = {}
    for split, ogb_split in zip(SPLITS, ("train", "valid", "test")):
        files.append(folder / "split" / meta["split"] / f"{ogb_split}.csv.gz")
        splits[split] = Split(text_rows([files[-1]], int))
    # OGB's definition. ogbn-products and ogbn-proteins are stored with each edge once.
    add_inverse_edge = meta["add_inverse_edge"] == "True" and undirected is not False
    return Source(
        name,
        {None: Vertices(num_vertices, columns, splits)},
        {None: edges},
        both_directions=add_inverse_edge,
        undirected=bool(undirected) and not add_inverse_edge,
        files=tuple(files),
        left_out=tuple(left_out),
    )


# --- PyG's objects ----------------------------------------------------------------------------------------


def _open_pyg(name: str, file: Path, undirected: bool | None) -> Source:
    check_file(file)
    if not is_archive(file):
        raise ValueError(
            f"{file}: damaged, or written by torch before 1.6 in a form that cannot be read in pieces; load it and save it with torch.save again"
        )
    data = read_pyg(file, map_tensors=True)
    with says_damaged(file):
        return _source_of(name, file, data, undirected)


def _source_of(name: str, file: Path, data: Data | HeteroData, undirected: bool | None) -> Source:
    if isinstance(data, HeteroData) and undirected:
        raise ValueError(
            f"{file}: undirected=True is only for graphs with one type of vertices; add the inverse relations before torch.save"
        )
    vertices = {}
    left_out = []
    for type_, store in node_stores(data).items():
        vertices[type_], more = _vertices_of(store, str(file) if type_ is None else f"{file}: {type_!r}", data)
        left_out += more
    relations: dict[EdgeName, Edges] = {}
    for edge_type, store in edge_stores(data).items():
        where = str(file) if edge_type is None else f"{file}: {edge_type!r}"
        if not isinstance(store.get("edge_index"), Tensor):
            raise ValueError(
                f"{where}: expected edge_index, got {', '.join(store.keys()) or 'nothing'}; save it with edge_index"
            )
        for end in () if edge_type is None else (edge_type[0], edge_type[2]):
            if end not in vertices:
                raise ValueError(f"{where} must join node types ({', '.join(map(repr, vertices))}), got {end!r}")
        relations[edge_type] = saved_edges(store["edge_index"], f"{where}: edge_index")
        left_out += [key for key in store.keys() if edge_type is not None and key != "edge_index"]  # noqa: SIM118
    return Source(
        name, vertices, relations, undirected=bool(undirected), files=(file,), left_out=tuple(dict.fromkeys(left_out))
    )


def _vertices_of(store: Any, where: str, data: Data | HeteroData) -> tuple[Vertices, list[str]]:
    """Returns the attributes and splits that have a row per vertex, and the names of other attributes."""
    num_vertices = _num_vertices(store, where)
    columns: dict[str, Rows] = {}
    splits: dict[str, Split] = {}
    left_out = []
    for key, value in store.items():
        split, _, kind = key.rpartition("_")
        if key in ("num_nodes", "edge_index"):
            continue
        if not isinstance(value, Tensor) or value.dim() == 0:
            left_out.append(key)
        elif split in SPLITS and kind in ("mask", "idx", "index"):
            splits.setdefault(split, Split(saved_rows(value, f"{where}: {key}"), kind == "mask"))
        elif value.size(0) == num_vertices and (isinstance(data, HeteroData) or store.is_node_attr(key)):
            columns[key] = saved_rows(value, f"{where}: {key}")
        elif key in ("x", "y"):
            raise ValueError(
                f"{where}: {key} must have one row per vertex, expected {num_vertices} rows, got {list(value.shape)}"
            )
        else:
            left_out.append(key)
    return Vertices(num_vertices, columns, splits, keeps_unlabelled=True), left_out


def _num_vertices(store: Any, where: str) -> int:
    # To infer the number of vertices, PyG would read all edges.
    given = store.get("num_nodes")
    for key in ("x", "y", "train_mask"):
        if given is None and isinstance(store.get(key), Tensor) and store[key].dim():
            given = store[key].size(0)
    if isinstance(given, Tensor) and given.numel() == 1:
        given = int(given)
    if not isinstance(given, int):
        raise ValueError(f"{where}: the number of vertices is unknown; set num_nodes, and save it again")
    return given
