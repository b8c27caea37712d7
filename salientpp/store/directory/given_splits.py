"""Reads the splits and seeds that a user gives, as masks or ids, in the data or as arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from salientpp.graph.from_pyg import full_edge_type
from salientpp.ids import as_tensor, read_ids
from salientpp.store.directory.attributes import SPLIT_ATTRIBUTES, place
from salientpp.store.directory.description import EdgeName
from salientpp.store.directory.labels import in_pieces, is_unlabelled, marks_unlabelled, warn_of_unlabelled
from salientpp.suggestions import did_you_mean


def collect_splits(
    store: Any, split: Mapping[str, Tensor] | None, labels: Tensor | None, num_vertices: int, type_: str | None = None
) -> dict[str, Tensor]:
    """Returns the splits of one vertex type, as split name -> ascending ids.

    Args:
        store: PyG's storage of the type. Its splits (``train_mask`` and so on) count if ``split`` is None. Unlabelled
            vertices are then left out, and a warning gives their number.
        split: the user's splits, name -> ids or mask.
        labels: [N] or [N, labels per vertex].
    """
    if split is not None:
        return read_splits(split, num_vertices, "split", "vertex", type_)
    splits = read_splits(_own_splits(store, type_), num_vertices, "split", "vertex", type_)
    if labels is None or not marks_unlabelled(in_pieces(labels)):
        return splits
    for name, ids in splits.items():
        unlabelled = is_unlabelled(labels[ids])
        splits[name] = ids[~unlabelled]
        warn_of_unlabelled(
            int(unlabelled.sum()),
            ids.numel(),
            f"the split {name!r} of {place(type_)}",
            "To keep them, name them in split= of salientpp.partition.",
            stacklevel=6,
        )
    return splits


def _own_splits(store: Any, type_: str | None) -> dict[str, Any]:
    """Returns the splits that PyG's storage has (``train_mask`` and so on): split name -> mask or ids."""
    split = {}
    for name, attributes in SPLIT_ATTRIBUTES.items():
        present = [attribute for attribute in attributes if store.get(attribute) is not None]
        if not present:
            continue
        split[name] = store[present[0]]
        dtype = as_tensor(split[name], f"{place(type_)}.{present[0]} must be a bool mask or integer ids").dtype
        if present[0].endswith("_mask") and dtype != torch.bool:
            raise ValueError(
                f"{place(type_)}.{name}_mask must be bool, got {dtype}; use .bool(), or pass split={{{name!r}: ids}}"
            )
        if len(present) > 1:
            warnings.warn(
                f"the split {name!r} comes from {place(type_)}.{present[0]}; "
                f"{', '.join(f'{place(type_)}.{other}' for other in present[1:])} left out",
                UserWarning,
                stacklevel=6,
            )
    return split


def read_splits(
    split: Mapping[str, Tensor], size: int, argument: str, of: str, type_: str | EdgeName = None
) -> dict[str, Tensor]:
    """Reads splits given as masks, or as ids in any order. Returns split name -> ascending ids in ``[0, size)``.

    ``argument``, ``of`` ('vertex' or 'edge') and ``type_`` are for errors.
    """
    owner = "" if type_ is None else f" of {type_!r}"
    if not isinstance(split, Mapping):
        raise TypeError(
            f"{argument}{owner} must be a mapping of names to {of} ids or masks, got {type(split).__name__}"
        )
    splits = {}
    for name, chosen in split.items():
        if name == "all" or not str(name).isidentifier():
            raise ValueError(f"a split's name must be an identifier other than 'all', got {name!r}{owner}")
        words = f"{argument} {name!r}{owner}"
        chosen = as_tensor(chosen, f"{words} must be a bool mask or integer ids")
        if chosen.is_meta:
            raise ValueError(f"{words} must be a bool mask or integer ids, got Tensor without values")
        ids, is_mask = read_ids(chosen, size, words, "a bool mask or integer ids", "must hold ids")
        if not is_mask and ids.numel() == size > 2 and int(ids.max()) <= 1:
            raise ValueError(
                f"{words} has a 0 or 1 for each {of}, which are not ids; pass a bool mask: {argument}.bool()"
            )
        splits[str(name)] = ids if is_mask else ids.unique()
    return splits


def by_type(given: Any, types: Sequence[Any], argument: str, kind: str) -> dict[Any, Any]:
    """Returns the user's splits by type. TypeError or ValueError if ``given`` does not map types of the data."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} of a HeteroData must map {kind} types to splits by name, got {type(given).__name__}"
        )
    given = {full_edge_type(name, types) if kind == "edge" else name: of_type for name, of_type in given.items()}
    for name in given:
        if name not in types:
            raise ValueError(
                f"the keys of {argument} must be {kind} types of the data ({', '.join(map(repr, types)) or 'none'}), got {name!r}"
            )
    return dict(given)


def find_seeds(
    seeds: Any, splits: Mapping[str | None, Mapping[str, Tensor]], is_hetero: bool
) -> tuple[str | None, str]:
    """Finds the split that the user's ``seeds`` selects. Returns (type, split).

    If no type has a split 'train', 'train' means (None, 'all'). ValueError if a name is unknown or ambiguous.
    """
    if not is_hetero and not isinstance(seeds, str):
        raise ValueError(f"seeds of a homogeneous graph must be the name of a split, got {seeds!r}")
    if isinstance(seeds, str):
        having = [name for name in splits if seeds in splits[name]]
        if not having and seeds not in ("train", "all"):
            known = [*dict.fromkeys(split for names in splits.values() for split in names)]
            raise ValueError(
                f"seeds must be 'all' or a split of the data ({', '.join(map(repr, known)) or 'none'}), got {seeds!r}{did_you_mean(seeds, [*known, 'all'])}"
            )
        if len(having) > 1:
            raise ValueError(
                f"seeds={seeds!r} is a split of {', '.join(map(repr, having))}; name the type: seeds=({having[0]!r}, {seeds!r})"
            )
        return (having[0], seeds) if having else (None, "all")
    if not (isinstance(seeds, (tuple, list)) and len(seeds) == 2 and all(isinstance(part, str) for part in seeds)):
        raise ValueError(f"seeds must be a split or (node type, split), got {seeds!r}")
    type_, split = seeds
    if type_ not in splits:
        raise ValueError(
            f"seeds must name a node type of the data ({', '.join(map(repr, splits))}), got {type_!r}{did_you_mean(type_, splits)}"
        )
    if split != "all" and split not in splits[type_]:
        of_type = [*splits[type_], "all"]
        raise ValueError(
            f"seeds must be a split of {type_!r} ({', '.join(map(repr, of_type))}), got {split!r}{did_you_mean(split, of_type)}"
        )
    return type_, split
