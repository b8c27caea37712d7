"""Opens the graphs that ``salientpp convert`` can read, from text, .npy, Parquet, .npz or .pt files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.addresses import without_passwords
from salientpp.datasets.arrays import SPLITS, check_file, check_undirected
from salientpp.datasets.converted.arrays import (
    StoredArray,
    array_edges,
    array_rows,
    members_of,
    saved_edges,
    saved_rows,
    scalar_of,
)
from salientpp.datasets.converted.column_names import Ends
from salientpp.datasets.converted.folders import open_folder
from salientpp.datasets.converted.labels import labels_of
from salientpp.datasets.converted.layouts import LAYOUTS
from salientpp.datasets.converted.named_files import FILES, ON_THIS_HOST, Finder, edges_of, kind_of, rows_of
from salientpp.datasets.converted.ogb_files import open_ogb
from salientpp.datasets.converted.pieces import EdgeName, EdgeSource, Rows, Source, Split, Vertices
from salientpp.datasets.converted.tables import parquet_table
from salientpp.datasets.npz import npz_split_keys
from salientpp.datasets.own_objects import read_pyg, says_damaged
from salientpp.datasets.spec import with_spec
from salientpp.datasets.torch_files import is_archive
from salientpp.store.directory.attributes import edge_stores, node_stores
from salientpp.suggestions import did_you_mean

#: Endings of files that may hold edges.
EDGE_FILES = (*FILES, ".gz")


def open_source(source: str, data: Path, undirected: bool | None, finder: Finder = ON_THIS_HOST) -> Source:
    """Opens the source that a name stands for. Of files on this host, only headers are read; ``finder`` fetches others."""
    name, _, rest = source.partition(":") if isinstance(source, str) else ("", "", "")
    source = without_passwords(source) if isinstance(source, str) else source
    check_undirected(undirected, str(source))
    if name == "npz" and rest:
        return _open_npz(source, finder.path(source, rest), undirected)
    if name == "pyg" and rest:
        return _open_pyg(source, finder.path(source, rest), undirected)
    if name == "edges" and rest:
        return _open_edges(source, rest, undirected, finder)
    if name in LAYOUTS and rest:
        return open_folder(source, LAYOUTS[name], rest, undirected, finder)
    if name.startswith(("ogbn-", "ogbl-")):
        parameters = with_spec(source, rest, {} if undirected is None else {"undirected": undirected})
        return open_ogb(name, data, **parameters)
    if Path(name).suffix in EDGE_FILES and not rest:
        raise ValueError(f'source must say what the files hold, got {source!r}. Did you mean "edges:{source}"?')
    if Path(name).suffix == ".toml" and not rest:
        raise ValueError(f'source must say what the file describes, got {source!r}. Did you mean "tables:{source}"?')
    known = (
        "npz",
        "pyg",
        "edges",
        "tables",
        *LAYOUTS,
        "ogbn-arxiv",
        "ogbn-products",
        "ogbn-papers100M",
        "ogbl-citation2",
    )
    folders = ", ".join(f"{layout}:DIR" for layout in LAYOUTS)
    raise ValueError(
        f'source must be "npz:FILE", "pyg:FILE", "edges:FILES,x=FILES,...", "tables:FILE.toml", a folder of arrays ({folders}) or an OGB dataset such as '
        f"ogbn-papers100M or ogbl-citation2, got {source!r}{did_you_mean(name, known) if name else ''}"
    )


def _open_npz(name: str, file: Path, undirected: bool | None) -> Source:
    """Opens an .npz archive as a source. It has the same keys as for :func:`~salientpp.datasets.npz.load_npz`."""
    held = members_of(file)
    split_keys = npz_split_keys(file, held)
    wanted = ("edge_index", *split_keys.values(), "x", "y", "num_nodes", "directed")
    arrays = {key: StoredArray.of(file, key) for key in held if key in wanted}
    columns: dict[str, Rows] = {key: _checked_column(key, arrays[key]) for key in ("x", "y") if key in held}
    directed = bool(scalar_of(arrays["directed"], "biu")) if "directed" in arrays else True
    if "num_nodes" not in arrays and not columns:
        raise ValueError(
            f"{file}: the number of vertices is unknown: give num_nodes, x or y; the archive holds {', '.join(held)}"
        )
    edge_index = arrays["edge_index"]
    if edge_index.shape[:1] != (2,) or len(edge_index.shape) != 2:
        raise ValueError(f"{edge_index.name} must have shape [2, E], got {list(edge_index.shape)}")
    num_vertices = int(scalar_of(arrays["num_nodes"], "iu")) if "num_nodes" in arrays else None
    splits = {split: Split(_ids(arrays[key])) for split, key in split_keys.items()}
    return Source(
        name,
        {None: Vertices(num_vertices, columns, splits)},
        {None: array_edges([edge_index])},
        undirected=not directed if undirected is None else undirected,
        files=(file,),
        left_out=tuple(key for key in held if key not in wanted),
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
    return labels_of(array_rows([array])) if key == "y" else array_rows([array])


def _ids(array: StoredArray) -> Rows:
    if len(array.shape) != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{array.name} must be a list of vertex ids, shape [*], got {array.dtype} {list(array.shape)}")
    return array_rows([array])


# --- files of edges ---------------------------------------------------------------------------------------


def _open_edges(name: str, rest: str, undirected: bool | None, finder: Finder) -> Source:
    pattern, _, spec = rest.partition(",")
    given = with_spec(name, spec, {}, as_text=True)
    numbers = {}
    for key in ("num_vertices", "skip"):
        text = given.pop(key, "")
        if text and not text.isdecimal():
            raise ValueError(f"{name}: {key} must be an integer >= 0, got {text!r}")
        numbers[key] = int(text) if text else None
    skip = numbers["skip"] or 0
    named = [given.pop(key, "") for key in ("source", "target")]
    known = ("x", "y", *SPLITS, "nodes")
    for key in given:
        if key not in known:
            raise ValueError(
                f"{name} has no parameter {key!r}; it has {', '.join((*known, 'num_vertices', 'skip', 'source', 'target'))}{did_you_mean(key, known)}"
            )
    files = {key: finder.files(name, text) for key, text in (("edges", pattern), *given.items())}
    kinds = {key: kind_of(paths[0]) for key, paths in files.items()}
    if skip and "text" not in kinds.values():
        raise ValueError(f"{name}: skip={skip} is for lines of text, and no file is text; leave skip out")
    if any(named) and (not all(named) or named[0] == named[1] or kinds["edges"] == "npy"):
        raise ValueError(
            f"{name}: source= and target= must name two different columns of Parquet files or of a header of text, got source={named[0]!r}, "
            f"target={named[1]!r} for {kinds['edges']} files; give both, or leave both out"
        )
    if kinds.get("nodes", "parquet") != "parquet":
        raise ValueError(
            f"{name}: nodes= must be Parquet tables, got {files['nodes'][0]}; give x=, y= and train= instead"
        )
    columns: dict[str, Rows] = {}
    splits: dict[str, Split] = {}
    if "nodes" in files:
        columns, splits = parquet_table(files["nodes"])
    for key in given:
        if key in columns or key in splits:
            raise ValueError(f"{name}: {key} is given twice, by {key}= and by a column of nodes=; leave out one")
    if "x" in files:
        columns["x"] = rows_of(files["x"], float, skip)
    if "y" in files:
        columns["y"] = labels_of(rows_of(files["y"], int, skip))
    splits |= {key: Split(rows_of(files[key], int, skip)) for key in SPLITS if key in files}
    edges = edges_of(files["edges"], numbers["skip"], Ends((named[0], named[1]) if all(named) else None), name)
    return Source(
        name,
        {None: Vertices(numbers["num_vertices"], columns, splits)},
        {None: edges},
        undirected=bool(undirected),
        files=tuple(path for paths in files.values() for path in paths),
        left_out=edges.left_out,
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
    if isinstance(data, HeteroData):
        left_out += list(data.to_dict()["_global_store"])
    relations: dict[EdgeName, EdgeSource] = {}
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
            if split in splits:
                left_out.append(key)
            else:
                splits[split] = Split(saved_rows(value, f"{where}: {key}"), kind == "mask")
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
