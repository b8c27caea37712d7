"""Writes small link-prediction datasets in the layout of OGB: raw text files, and splits that torch.save wrote."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Folder of the splits of each dataset.
SPLIT = {
    "ogbl-collab": "time",
    "ogbl-citation2": "time",
    "ogbl-ppa": "throughput",
    "ogbl-wikikg2": "time",
    "ogbl-ddi": "target",
}

N = 120


def _text(path: Path, table: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write("".join(",".join(f"{value:.9g}" for value in np.atleast_1d(row)) + "\n" for row in table))


def splits_of(name: str, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Returns the arrays of each split, under OGB's names."""
    rng = np.random.default_rng(seed)
    splits: dict[str, dict[str, Any]] = {}
    for split, count in (("train", 400), ("valid", 40), ("test", 50)):
        edges, negatives = rng.integers(0, N, (count, 2)), rng.integers(0, N, (60, 2))
        held_out = split != "train"
        if name == "ogbl-citation2":
            splits[split] = {"source_node": edges[:, 0], "target_node": edges[:, 1]}
            if held_out:
                splits[split]["target_node_neg"] = rng.integers(0, N, (count, 10))
        elif name == "ogbl-wikikg2":
            splits[split] = {"head": edges[:, 0], "relation": rng.integers(0, 5, count), "tail": edges[:, 1]}
            if held_out:
                splits[split] |= {f"{end}_neg": rng.integers(0, N, (count, 8)) for end in ("head", "tail")}
        else:
            splits[split] = {"edge": edges}
            if name == "ogbl-collab":
                splits[split] |= {"weight": rng.integers(1, 5, count), "year": rng.integers(2000, 2020, count)}
            if held_out:
                splits[split]["edge_neg"] = negatives
    return splits


def write_ogbl(root: Path, name: str, form: str = "numpy") -> dict[str, dict[str, Any]]:
    """Writes a dataset below ``root``. ``form`` is numpy, tensors, or old, the format of torch before 1.6. Returns the arrays of the splits."""
    folder, splits = root / name.replace("-", "_"), splits_of(name)
    rng = np.random.default_rng(1)
    train = splits["train"]
    pairs = [train[key] for key in ("source_node", "target_node", "head", "tail") if key in train]
    edges = np.stack(pairs, 1) if pairs else train["edge"]
    _text(folder / "raw" / "edge.csv.gz", edges)
    _text(folder / "raw" / "num-node-list.csv.gz", np.array([N]))
    _text(folder / "raw" / "num-edge-list.csv.gz", np.array([len(edges)]))
    if name not in ("ogbl-wikikg2", "ogbl-ddi"):
        _text(folder / "raw" / "node-feat.csv.gz", rng.standard_normal((N, 6)).astype(np.float32))
    if name == "ogbl-citation2":
        _text(folder / "raw" / "node_year.csv.gz", rng.integers(1990, 2020, (N, 1)))
    for split, arrays in splits.items():
        path = folder / "split" / SPLIT[name] / f"{split}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = {key: torch.from_numpy(array) for key, array in arrays.items()} if form == "tensors" else arrays
        torch.save(saved, path, _use_new_zipfile_serialization=form != "old")
    (folder / "RELEASE_v1.txt").touch()
    return splits
