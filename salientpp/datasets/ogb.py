"""Reads the graphs of the Open Graph Benchmark from its files."""

from __future__ import annotations

import contextlib
import csv
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from salientpp.datasets.arrays import SPLITS, assemble, check_undirected
from salientpp.files import first_line
from salientpp.suggestions import did_you_mean


def load_ogb(name: str, root: Path, undirected: bool | None = None, download: bool = False) -> Data:
    """Loads an OGB dataset, see `load_dataset`.

    The raw files are read with the functions that ogb's `NodePropPredDataset` calls. The class itself (ogb 1.3.6) asks on standard input,
    and keeps a pickled copy that `torch.load` refuses since torch 2.6.
    """
    check_undirected(undirected, name)
    if not isinstance(download, bool):
        raise ValueError(f"{name}: download must be True or False, got {download!r}")
    meta = ogb_meta(name)
    folder = root / name.replace("-", "_")
    provide_ogb_files(name, meta, folder, download)

    raw, splits = folder / "raw", folder / "split" / meta["split"]
    # OGB's definition. ogbn-products and ogbn-proteins are stored with each edge once.
    add_inverse_edge = meta["add_inverse_edge"] == "True" and undirected is not False
    try:
        graph, labels = _read_ogb_files(raw, meta, add_inverse_edge)
        split_ids = {
            split: (ogb_split, np.loadtxt(splits / f"{ogb_split}.csv.gz", dtype=np.int64, ndmin=1))
            for split, ogb_split in zip(SPLITS, ("train", "valid", "test"))
        }
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # ogb, pandas, numpy and gzip do not document their errors
        raise ValueError(
            f"{name}: a file in {folder} is damaged or not in its format ({type(error).__name__}: {first_line(error)}). Remove the folder, "
            f"and fetch it again from {meta['url']}"
        ) from error

    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f":
        labels = np.nan_to_num(labels, nan=-1.0)
        if (labels != np.trunc(labels)).any():
            raise ValueError(f"{name}: the labels in {raw} must be whole numbers (nan for an unlabelled vertex)")
        labels = labels.astype(np.int64)

    symmetrise = bool(undirected) and not add_inverse_edge
    if symmetrise and graph["edge_feat"] is not None:
        raise ValueError(f"{name}: undirected=True would merge edges, but this dataset has edge features")
    x = None if graph["node_feat"] is None else _writable(graph["node_feat"])
    # The edges are taken out of `graph`, so that they can be freed while the inverse edges are added.
    num_vertices = int(graph["num_nodes"])
    data = assemble(str(folder), graph.pop("edge_index"), num_vertices, x, labels, split_ids, symmetrise)
    if graph["edge_feat"] is not None:
        data.edge_attr = torch.from_numpy(_writable(graph["edge_feat"]))
    for key, value in graph.items():
        if key.startswith("node_") and value is not None and key != "node_feat":
            data[key] = torch.from_numpy(_writable(value))
    return data


def _read_ogb_files(raw: Path, meta: dict[str, str], add_inverse_edge: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the graph as the dictionary that ogb's readers make, and the labels."""
    from ogb.io.read_graph_raw import read_binary_graph_raw, read_csv_graph_raw

    with contextlib.redirect_stdout(sys.stderr):  # the readers print, and stdout is for results
        if meta["binary"] == "True":
            graph = read_binary_graph_raw(str(raw), add_inverse_edge=add_inverse_edge)[0]
            with np.load(raw / "node-label.npz", allow_pickle=False) as labels_file:
                return graph, labels_file["node_label"]
        graph = read_csv_graph_raw(
            str(raw),
            add_inverse_edge=add_inverse_edge,
            additional_node_files=listed(meta["additional node files"]),
            additional_edge_files=listed(meta["additional edge files"]),
        )[0]
        return graph, np.loadtxt(raw / "node-label.csv.gz", delimiter=",", ndmin=2)


def is_link(name: str) -> bool:
    """True if `name` is a dataset of link prediction, false if it is one of node properties."""
    return name.startswith("ogbl-")


def ogb_meta(name: str) -> dict[str, str]:
    """Returns OGB's description of the dataset `name`: name, version, url, split, text or binary storage, ..."""
    folder, task = ("linkproppred", "link-prediction") if is_link(name) else ("nodeproppred", "node-property")
    try:
        import ogb
    except ImportError as error:
        raise ImportError(
            f'{name} is read with the "ogb" package, which is not installed: pip install salientpp[ogb]'
        ) from error
    # The table that ogb's own dataset class reads: one row per property, one column per dataset.
    with open(Path(ogb.__file__).parent / folder / "master.csv", newline="") as table:
        header, *rows = csv.reader(table)
    datasets = {column: {row[0]: row[i] for row in rows} for i, column in enumerate(header) if column}
    if name not in datasets:
        known = [key for key, meta in datasets.items() if meta["is hetero"] != "True"]
        raise ValueError(
            f"{name} is not a {task} dataset of the installed ogb {ogb.__version__}, which has "
            f"{', '.join(known)}{did_you_mean(name, known)}"
        )
    if datasets[name]["is hetero"] == "True":
        raise ValueError(f"{name} has several types of vertices; only homogeneous graphs can be loaded")
    return {"name": name, **datasets[name]}


def listed(names: str) -> list[str]:
    """Splits an entry of OGB's description into the names of files; "None" means no files."""
    return [] if names == "None" else names.split(",")


def _writable(array: np.ndarray) -> np.ndarray:
    """Returns `array` in C order and writable, as torch needs it. Copies only if necessary; pandas returns read-only arrays."""
    return np.require(array, requirements=["C", "W"])


def provide_ogb_files(name: str, meta: dict[str, str], folder: Path, download: bool) -> None:
    """Makes sure that `folder` has the raw files. Downloads them if that is allowed and `folder` does not exist."""
    url = meta["url"]
    if download and not folder.exists():
        from ogb.utils.url import download_url, extract_zip

        unpacked, own = folder.parent / meta["download_name"], folder.parent / url.rpartition("/")[2]
        if unpacked.exists():
            raise ValueError(
                f"{name}: the archive would be unpacked over {unpacked}; rename this to {folder} if it is the dataset, or move it"
            )
        was_there = own.exists()  # then ogb takes this archive, which somebody else may need
        with contextlib.redirect_stdout(sys.stderr):
            archive = download_url(url, str(folder.parent))
            extract_zip(archive, str(folder.parent))
        if not was_there:
            Path(archive).unlink()
        shutil.move(unpacked, folder)

    if meta["binary"] == "True":
        needed = ["raw/data.npz"] + ([] if is_link(name) else ["raw/node-label.npz"])
    else:
        attributes = [end for end in ("node", "edge") if meta[f"has_{end}_attr"] == "True"]
        parts = [
            "edge",
            "num-node-list",
            "num-edge-list",
            *([] if is_link(name) else ["node-label"]),
            *(f"{end}-feat" for end in attributes),
        ]
        needed = [f"raw/{part}.csv.gz" for part in parts]
    suffix = "pt" if is_link(name) else "csv.gz"
    needed += [f"split/{meta['split']}/{part}.{suffix}" for part in ("train", "valid", "test")]
    missing = [part for part in needed if not (folder / part).exists()]
    if missing and folder.exists():
        raise FileNotFoundError(
            f"{name}: {folder} lacks {', '.join(missing)}. Complete it from {url}, or remove the folder and pass download=True"
        )
    if missing:
        raise FileNotFoundError(
            f"{name} is not in {folder}. Pass download=True to fetch it from {url}, or unpack the archive at this address "
            f"and rename its folder {meta['download_name']} to {folder}"
        )
    releases = sorted(path.name for path in folder.glob("RELEASE_v*.txt"))
    expected = f"RELEASE_v{meta['version']}.txt"
    if releases and expected not in releases:
        raise ValueError(
            f"{name}: {folder} has another version: expected {expected}, got {', '.join(releases)}. Remove the folder and pass download=True"
        )
