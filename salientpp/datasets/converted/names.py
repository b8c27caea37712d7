"""Checks the names of attributes before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable

from salientpp.datasets.converted.pieces import EdgeName
from salientpp.store.directory.attributes import OWN_NAMES

#: Names that an attribute of vertices cannot have, because PyG uses them otherwise. PyG takes the last three for attributes of edges. In a homogeneous graph
#: it does so with every name that contains "edge".
_TAKEN = ("adj_t", "edge_index", "num_nodes", "key_table", "edge_attr", "edge_weight", "edge_type")

#: Names that an attribute of edges cannot have.
_TAKEN_BY_TOPOLOGY = ("edge_index", "adj_t", "edge_label_index", "indptr", "indices")

#: Most bytes of an attribute's name, so that the names of its files are not too long.
_LONGEST = 200


def check_vertex_names(source: str, type_: str | None, names: Iterable[str], splits: Iterable[str]) -> None:
    """Raises ValueError if an attribute of vertices has a name that it cannot have, beside masks of ``splits``. ``source`` names the graph."""
    of = "" if type_ is None else f" of {type_!r}"
    masks = [f"{split}_mask" for split in splits]
    for name in names:
        if name in _TAKEN or name in masks or (type_ is None and "edge" in name):
            raise ValueError(
                f"{source}: the attribute {name!r}{of} cannot have this name, which stands for something else in a graph; rename it"
            )
        _check_file_name(source, name, of)


def check_edge_names(source: str, relation: EdgeName, names: Iterable[str]) -> None:
    """Raises ValueError if an attribute of edges has a name that it cannot have."""
    of = "" if relation is None else f" of {relation}"
    for name in names:
        if name in _TAKEN_BY_TOPOLOGY or name in OWN_NAMES or (relation is None and "edge" not in name):
            raise ValueError(
                f"{source}: the attribute {name!r}{of} cannot have this name, which stands for something else in a graph; rename it"
                + (", with 'edge' in the new name" if relation is None else "")
            )
        _check_file_name(source, name, of)


def _check_file_name(source: str, name: str, of: str) -> None:
    if not name or set(name) & {"/", "\0"} or len(os.fsencode(name)) > _LONGEST:
        raise ValueError(
            f"{source}: the attribute {name!r}{of} cannot have this name, because a file is called after it; rename it, without '/' and with at "
            f"most {_LONGEST} bytes"
        )
