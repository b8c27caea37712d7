"""Describes layouts of folders of arrays: a general one and those of public datasets. Each is an entry of the table :data:`LAYOUTS`.

Sources:

* MAG240M: ``ogb.lsc.MAG240MDataset`` of ogb 1.3.6, and Hu et al., "OGB-LSC" (arXiv:2103.09430).
* IGB: ``igb/dataloader.py`` of github.com/IllinoisGraphBenchmark/IGB-Datasets, and Khatua et al. (arXiv:2302.13522).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salientpp.datasets.arrays import SPLITS, form
from salientpp.datasets.converted.link_files import numpy_classes
from salientpp.datasets.converted.pieces import RowPiece, Rows, Split, counted
from salientpp.datasets.torch_files import read_torch_file

#: A function that returns splits of a type by their names, given the dataset's folder, the type's number of vertices, and the values of the choices.
SplitsOf = Callable[[Path, int, Mapping[str, str]], Mapping[str, Split]]


#: File with the number of vertices of each type, in a folder of arrays.
SIZES = "num_nodes.json"


def _no_sizes(root: Path) -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Layout:
    """Describes which files a dataset's folders have, and which attribute or split each of them is.

    Attributes:
        names: maps the name of a file to the name of its attribute.
        takes_others: True if every other file is an attribute or split with the file's name.
        inside: the folder below the dataset's folder that has the folders of types; empty if it is the dataset's folder.
        sizes: function that takes the dataset's folder and returns the number of vertices of each type, if the dataset states it.
        splits: for each type without files of splits, the function that returns its splits.
        choices: parameters that the user may give, such as ``classes``, each with its possible values, the default first. A value maps further names
            of files to attributes, as ``names`` does.
        main: the type that ``homogeneous=true`` takes.
        without_header: for each name of a file, the dtype and the shape of a row, if the file lacks numpy's header.
        are_classes: True if real numbers as labels stand for classes.
        keeps_unlabelled: True if splits also have unlabelled vertices.
    """

    names: Mapping[str, str]
    takes_others: bool = False
    inside: str = ""
    sizes: Callable[[Path], Mapping[str, int]] = _no_sizes
    splits: Mapping[str, SplitsOf] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    main: str | None = None
    without_header: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    are_classes: bool = False
    keeps_unlabelled: bool = False


def _stated_sizes(root: Path) -> dict[str, int]:
    """Reads num_nodes.json: the number of vertices by type. The file may be missing, and may leave out types."""
    path = root / SIZES
    if not path.exists():
        return {}
    try:
        return _checked_sizes(path, json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} must be a JSON object such as {{"author": 70}}: {error}') from None


def _checked_sizes(path: Path, found: Any) -> dict[str, int]:
    if not isinstance(found, dict) or not all(type(size) is int and size >= 0 for size in found.values()):
        raise ValueError(f"{path} must map each type to its number of vertices, got {found!r}")
    return found


def _mag240m_sizes(root: Path) -> dict[str, int]:
    """Reads meta.pt: the number of vertices by type, and of classes."""
    path = root / "meta.pt"
    found = read_torch_file(
        path, more=numpy_classes(), refused=lambda needed: f"expected numbers of vertices, but it needs {needed}"
    )
    sizes = _checked_sizes(path, found)
    missing = [type_ for type_ in ("paper", "author", "institution") if type_ not in sizes]
    if missing:
        raise ValueError(f"{path} must have the number of {', '.join(missing)}, got {', '.join(sizes) or 'nothing'}")
    return sizes


def _mag240m_splits(root: Path, size: int, chosen: Mapping[str, str]) -> dict[str, Split]:
    """Reads the splits of MAG240M from split_dict.pt.

    The whole test set is the split ``test``. Of every five of its vertices, the first three are also in ``test_dev`` and the others in ``test_challenge``.
    """
    path = root / "split_dict.pt"
    found = read_torch_file(
        path, more=numpy_classes(), refused=lambda needed: f"expected arrays of vertex ids, but it needs {needed}"
    )
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a dictionary of splits, got {form(found)}")
    given = {
        name: torch.as_tensor(ids, device="cpu") for name, ids in found.items() if isinstance(ids, (np.ndarray, Tensor))
    }
    if "test" in given:
        whole = given.pop("test")
        is_dev = torch.arange(len(whole), device="cpu") % 5 < 3
        given |= {"test-whole": whole, "test-dev": whole[is_dev], "test-challenge": whole[~is_dev]}
    of = {
        "train": "train",
        "val": "valid",
        "test": "test-whole",
        "test_dev": "test-dev",
        "test_challenge": "test-challenge",
    }
    missing = [name for name in of.values() if name not in given]
    if missing:
        raise ValueError(
            f"{path} must have the splits {', '.join(of.values())}; {', '.join(missing)} missing; got {', '.join(found)}"
        )
    return {split: Split(_held_rows(given[name], f"{path}: {name}")) for split, name in of.items()}


def _held_rows(ids: Tensor, name: str) -> Rows:
    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // max(1, ids.element_size()))
        for first in range(0, max(1, len(ids)), most):
            yield RowPiece(ids[first : first + most], counted(f"{name}[", first, "]"), min(len(ids), first + most))

    return Rows(pieces, len(ids), len(ids))


#: Number of papers in the largest graph, and of labelled ones by number of classes. Labelled papers come first.
_IGB_FULL = 269_346_174
_IGB_LABELLED = {"19": 227_130_858, "2983": 157_675_969}


def _igb_splits(root: Path, size: int, chosen: Mapping[str, str]) -> dict[str, Split]:
    """Returns the splits of IGB's own loader: the first 60 % of the labelled papers, the next 20 %, and the rest. Nothing is drawn."""
    labelled = _IGB_LABELLED[chosen["classes"]] if size == _IGB_FULL else size
    train, val = int(labelled * 0.6), int(labelled * 0.2)
    bounds = ((0, train), (train, train + val), (train + val, labelled))
    return {split: Split(_range(*ends, f"the split {split}")) for split, ends in zip(SPLITS, bounds)}


def _range(begin: int, end: int, name: str) -> Rows:
    """Returns the vertex ids in [begin, end) as the rows of a split, to be read in pieces. ``name`` is for errors."""

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        most = max(1, most_bytes // 8)
        for first in range(begin, max(begin + 1, end), most):
            ids = torch.arange(first, max(first, min(first + most, end)), device="cpu")
            yield RowPiece(ids, counted(f"{name}[", first - begin, "]"), first - begin + len(ids))

    return Rows(pieces, end - begin, end - begin)


LAYOUTS = {
    "npy": Layout(names={"node_feat": "x", "node_label": "y"}, takes_others=True, sizes=_stated_sizes),
    "mag240m": Layout(
        names={"node_feat": "x", "node_label": "y", "node_year": "year"},
        inside="processed",
        sizes=_mag240m_sizes,
        splits={"paper": _mag240m_splits},
        main="paper",
        are_classes=True,
        keeps_unlabelled=True,  # the labels of the test set are hidden
    ),
    "igb": Layout(
        names={"node_feat": "x"},
        inside="processed",
        splits={"paper": _igb_splits},
        choices={"classes": {"19": {"node_label_19": "y"}, "2983": {"node_label_2K": "y"}}},
        main="paper",
        # Files of the two largest graphs are memory maps of float32.
        without_header={
            "node_feat": ("<f4", (1024,)),
            "node_label_19": ("<f4", ()),
            "node_label_2K": ("<f4", ()),
        },
        are_classes=True,
    ),
}
