"""Writes small graphs in the layouts of public datasets, and returns the same graphs in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import HeteroData


def _graph(
    sizes: dict[str, int], relations: dict[tuple[str, str, str], int], rng: np.random.Generator
) -> tuple[HeteroData, dict[tuple[str, str, str], np.ndarray]]:
    data, arrays = HeteroData(), {}
    for type_, size in sizes.items():
        data[type_].num_nodes = size
    for relation, count in relations.items():
        edges = np.stack([rng.integers(0, sizes[end], count) for end in (relation[0], relation[2])])
        arrays[relation], data[relation].edge_index = edges, torch.from_numpy(edges)
    return data, arrays


def _save(folder: Path, **arrays: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def _mask(size: int, ids: np.ndarray) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(ids)] = True
    return mask


def write_mag240m(root: Path, seed: int = 0, papers: int = 300, features: int = 24) -> HeteroData:
    """Writes the files of MAG240M: float16 features and float64 labels (NaN if there is none) of papers, edges [2, E], and two files of torch.save."""
    rng = np.random.default_rng(seed)
    sizes = {"author": 70, "institution": 9, "paper": papers}
    relations = {
        ("author", "affiliated_with", "institution"): 90,
        ("author", "writes", "paper"): 900,
        ("paper", "cites", "paper"): 4000,
    }
    data, arrays = _graph(sizes, relations, rng)
    x, year = rng.standard_normal((papers, features)).astype(np.float16), rng.integers(2010, 2022, papers)
    label, order = rng.integers(0, 5, papers).astype(np.float64), rng.permutation(papers)
    splits = {"train": order[:100], "valid": order[100:150], "test": order[150:180]}
    label[order[150:]] = np.nan  # the test set's labels are hidden
    _save(root / "processed" / "paper", node_feat=x, node_label=label, node_year=year)
    for relation, edges in arrays.items():
        _save(root / "processed" / "___".join(relation), edge_index=edges)
    torch.save({**sizes, "num_classes": 5}, root / "meta.pt")
    torch.save(splits, root / "split_dict.pt")
    data["paper"].x, data["paper"].year = torch.from_numpy(x), torch.from_numpy(year)
    data["paper"].y = torch.from_numpy(np.nan_to_num(label, nan=-1).astype(np.int64))
    is_dev = np.arange(30) % 5 < 3
    ids = {"train": splits["train"], "val": splits["valid"], "test": splits["test"]}
    ids |= {"test_dev": splits["test"][is_dev], "test_challenge": splits["test"][~is_dev]}
    for split, chosen in ids.items():
        data["paper"][f"{split}_mask"] = _mask(papers, chosen)
    return data


#: Numbers of vertices and edges of a small graph with all types of IGB.
IGB_SIZES = {"author": 80, "conference": 6, "fos": 20, "institute": 9, "journal": 7, "paper": 200}
IGB_RELATIONS = {
    ("author", "affiliated_to", "institute"): 90,
    ("paper", "cites", "paper"): 2000,
    ("paper", "published", "journal"): 200,
    ("paper", "topic", "fos"): 500,
    ("paper", "venue", "conference"): 150,
    ("paper", "written_by", "author"): 700,
}


def write_igb(root: Path, seed: int = 0, full: bool = False) -> HeteroData:
    """Writes the files of IGB: float32 features [N, 1024] and labels, edges [E, 2], and the mapping of ids, which is a pickled dictionary.

    With ``full`` papers and authors are stored as the two largest graphs store them: without numpy's header, labels as float32.
    """
    rng = np.random.default_rng(seed)
    data, arrays = _graph(IGB_SIZES, IGB_RELATIONS, rng)
    for type_, size in IGB_SIZES.items():
        x = rng.standard_normal((size, 1024)).astype(np.float32)
        folder = root / "processed" / type_
        _save(folder, node_feat=x, **{f"{type_}_id_index_mapping": np.array({5: 0}, dtype=object)})
        if full and type_ in ("paper", "author"):
            x.tofile(folder / "node_feat.npy")
        data[type_].x = torch.from_numpy(x)
    papers = IGB_SIZES["paper"]
    labels = {"19": rng.integers(0, 19, papers), "2K": rng.integers(0, 2983, papers)}
    for name, label in labels.items():
        _save(root / "processed" / "paper", **{f"node_label_{name}": label})
        if full:
            label.astype(np.float32).tofile(root / "processed" / "paper" / f"node_label_{name}.npy")
    for relation, edges in arrays.items():
        _save(root / "processed" / "__".join(relation), edge_index=np.ascontiguousarray(edges.T))
    data["paper"].y, data["paper"].y_2983 = (torch.from_numpy(label) for label in labels.values())
    for split, ids in zip(("train", "val", "test"), np.split(np.arange(papers), [120, 160])):
        data["paper"][f"{split}_mask"] = _mask(papers, ids)
    return data
