"""Opens datasets of the Open Graph Benchmark, from OGB's raw files.

A dataset of link prediction (ogbl-...) has no labels. Its splits are files of edges. The graph has the training edges only.
"""

from __future__ import annotations

from pathlib import Path

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.converted.arrays import StoredArray, array_edges, array_rows, members_of, scalar_of
from salientpp.datasets.converted.labels import labels_of
from salientpp.datasets.converted.link_files import link_file
from salientpp.datasets.converted.pieces import EdgeSource, Rows, Source, Split, Vertices
from salientpp.datasets.converted.text import tables, text_edges, text_rows
from salientpp.datasets.ogb import is_link, listed, ogb_meta, provide_ogb_files

#: OGB's name of each split.
_SPLITS = dict(zip(SPLITS, ("train", "valid", "test")))


def open_ogb(name: str, root: Path, undirected: bool | None = None, download: bool = False) -> Source:
    """Opens the dataset ``name`` in its folder below ``root``. Only headers are read."""
    meta = ogb_meta(name)
    folder = root / name.replace("-", "_")
    provide_ogb_files(name, meta, folder, download)
    opened = _binary if meta["binary"] == "True" else _text
    num_vertices, edges, columns, files, left_out = opened(folder / "raw", meta)
    split_files = {
        split: folder / "split" / meta["split"] / f"{of_ogb}{'.pt' if is_link(name) else '.csv.gz'}"
        for split, of_ogb in _SPLITS.items()
    }
    splits, links = {}, {}
    if is_link(name):
        links = {split: link_file(file) for split, file in split_files.items()}
    else:
        splits = {split: Split(text_rows([file], int)) for split, file in split_files.items()}
    # OGB's definition. ogbn-products and ogbn-proteins are stored with each edge once.
    add_inverse_edge = meta["add_inverse_edge"] == "True" and undirected is not False
    return Source(
        name,
        {None: Vertices(num_vertices, columns, splits)},
        {None: edges},
        links=links,
        both_directions=add_inverse_edge,
        undirected=bool(undirected) and not add_inverse_edge,
        files=(*files, *split_files.values()),
        left_out=tuple(left_out),
    )


_Opened = tuple[int, EdgeSource, dict[str, Rows], list[Path], list[str]]


def _binary(raw: Path, meta: dict[str, str]) -> _Opened:
    files = [raw / "data.npz"]
    held = members_of(files[0])
    num_vertices = int(scalar_of(StoredArray.of(files[0], "num_nodes_list"), "iu"))
    edges = array_edges([StoredArray.of(files[0], "edge_index")])
    columns = {
        "x" if key == "node_feat" else key: array_rows([StoredArray.of(files[0], key)])
        for key in held
        if key.startswith("node_")
    }
    if not is_link(meta["name"]):
        files.append(raw / "node-label.npz")
        columns["y"] = labels_of(array_rows([StoredArray.of(files[1], "node_label")]), are_classes=True)
    return num_vertices, edges, columns, files, [k for k in held if k.startswith("edge_") and k != "edge_index"]


def _text(raw: Path, meta: dict[str, str]) -> _Opened:
    files = [raw / f"{part}.csv.gz" for part in ("edge", "num-node-list")]
    table = next(tables(files[1], 2**16, int, 1), None)
    if table is None:
        raise ValueError(f"{files[1]}: expected the number of vertices, got an empty file")
    num_vertices = int(table.values[0, 0])
    columns: dict[str, Rows] = {}

    def add(key: str, part: str, dtype: type) -> None:
        files.append(raw / f"{part}.csv.gz")
        columns[key] = text_rows([files[-1]], dtype, num_vertices)

    if not is_link(meta["name"]):
        add("y", "node-label", float)
        columns["y"] = labels_of(columns["y"], are_classes=True)
    if meta["has_node_attr"] == "True":
        add("x", "node-feat", float)
    for key in listed(meta["additional node files"]):
        add(key, key, int)
    left_out = (["edge_attr"] if meta["has_edge_attr"] == "True" else []) + listed(meta["additional edge files"])
    return num_vertices, text_edges([files[0]]), columns, files, left_out
