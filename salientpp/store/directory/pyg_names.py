"""Gives a partitioned graph those attributes of PyG's ``Data`` and ``HeteroData`` that need no rows, so that scripts can make models from it.

Errors for PyG's other attributes say what to use instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from salientpp.graph.from_pyg import full_edge_type
from salientpp.store.directory.description import Description, EdgeName, EdgeType, VertexType, words_of_type
from salientpp.store.frames import FEATURES
from salientpp.suggestions import did_you_mean

#: Name of an attribute of PyG's data -> why a partitioned graph lacks it, and what to do instead.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("is_undirected", "is_directed", "has_isolated_nodes", "contains_isolated_nodes", "has_self_loops", "contains_self_loops", "is_coalesced",
         "is_sorted", "is_sorted_by_time", "validate", "connected_components"),
        "it would read every edge; ask the Data or HeteroData before you partition it",
    ),
    **dict.fromkeys(
        ("to_homogeneous", "to_heterogeneous", "subgraph", "edge_subgraph", "node_type_subgraph", "edge_type_subgraph", "coalesce", "sort", "clone",
         "rename", "update", "set_value_dict"),
        "the directory does not change; change the Data or HeteroData, and partition it again",
    ),
    **dict.fromkeys(
        ("to", "cpu", "cuda", "pin_memory", "share_memory_", "contiguous", "apply", "record_stream", "is_cuda"),
        "its rows stay on disk; pass device= to a NeighborLoader, whose batches are then on that device",
    ),
    **dict.fromkeys(
        ("stores", "node_stores", "edge_stores", "node_items", "edge_items", "get_node_store", "get_edge_store", "collect", "to_dict", "to_namedtuple"),
        "part[type] describes a type; part.rows(part_id) has the rows of one part, and batches of a NeighborLoader carry them",
    ),
    **dict.fromkeys(
        ("num_node_types", "num_edge_types"),
        "it is the largest node_type or edge_type plus 1, and these attributes are on disk; ask the Data before you partition it",
    ),
    "key_table": "part.keys_of(n_id, type) has the keys of vertices, and part.ids_of(keys, type) the vertices of keys",
}  # fmt: skip


class PygNames:
    """Attributes of ``Data`` and ``HeteroData`` that scripts use to make models. They read no rows and no edges.

    As in PyG, numbers per type are dictionaries if types have names.
    """

    root: Path
    description: Description
    is_hetero: bool
    node_types: list[str | None]
    edge_types: list[EdgeName]
    num_vertices: int
    num_edges: int

    #: None, since ``part[type]`` would make a graph iterable otherwise.
    __iter__: Any = None

    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Returns the names of the types, as ``HeteroData.metadata()`` does. ValueError if the graph has one type, without a name."""
        if not self.is_hetero:
            raise ValueError(f"{self.root} has one type of vertices, without a name; metadata() needs named types")
        return list(self.node_types), list(self.edge_types)  # type: ignore[arg-type]

    @property
    def num_nodes(self) -> int:
        """Number of vertices of all types."""
        return self.num_vertices

    @property
    def num_features(self) -> int | dict[str | None, int]:
        """Number of columns of ``x`` or else of the table ``tf``, 0 without both; per type if types have names."""
        columns = {type_.name: _num_columns(type_, FEATURES) for type_ in self.description.node_types}
        return columns if self.is_hetero else columns[None]

    @property
    def num_node_features(self) -> int | dict[str | None, int]:
        """The same as ``num_features``."""
        return self.num_features

    @property
    def num_edge_features(self) -> int | dict[EdgeName, int]:
        """Number of columns of ``edge_attr``, 0 without it; per type if types have names."""
        columns = {type_.name: _num_columns(type_, ("edge_attr",)) for type_ in self.description.edge_types}
        return columns if self.is_hetero else columns[None]

    @property
    def num_node_types(self) -> int:
        """Number of vertex types; 1 in a homogeneous graph. AttributeError if the data has the attribute ``node_type``, because it is not read."""
        return self._number_of_types("node_type", self.node_types)

    @property
    def num_edge_types(self) -> int:
        """Number of edge types; 1 in a homogeneous graph. AttributeError if the data has the attribute ``edge_type``, because it is not read."""
        return self._number_of_types("edge_type", self.edge_types)

    def _number_of_types(self, attribute: str, names: Sequence[Any]) -> int:
        if not self.is_hetero and attribute in self:
            raise AttributeError(f"num_{attribute}s")  # __getattr__ then gives the text
        return len(names)

    @property
    def num_classes(self) -> int | dict[str | None, int]:
        """Number of classes of ``y``, counted as in PyG's datasets: 0 without ``y``, and a number for each type if types have names.

        Warns, as PyG does, if ``y`` has more than 2 distinct real values.
        """
        for type_ in self.description.node_types:
            _warn_of_real_labels(type_)
        classes = {type_.name: type_.num_classes for type_ in self.description.node_types}
        return classes if self.is_hetero else classes[None]

    def node_attrs(self) -> list[str]:
        """Returns the names of the vertices' attributes, without masks (``train_mask``), which became splits."""
        return [*dict.fromkeys(name for type_ in self.description.node_types for name in _keys(type_))]

    def edge_attrs(self) -> list[str]:
        """Returns ``'edge_index'`` and the names of the edges' attributes."""
        return [*dict.fromkeys(name for type_ in self.description.edge_types for name in _keys(type_))]

    def keys(self) -> list[str]:
        """Returns the names of the attributes of vertices and edges."""
        return [*dict.fromkeys([*self.node_attrs(), *self.edge_attrs()])]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, type_: Any) -> StoredType:
        """Describes a type, as ``HeteroData[type]`` does.

        Args:
            type_: a vertex type, an edge type, or a pair (source type, target type).

        Raises:
            KeyError: the graph has no such type.
        """
        name = full_edge_type(type_, self.edge_types)
        for each in self.description.types if self.is_hetero and name is not None else ():
            if each.name == name:
                return StoredType(each, str(self.root))
        words = words_for_missing(self.description, self.is_hetero, str(name))
        known = ", ".join(map(repr, [*self.node_types, *self.edge_types])) if self.is_hetero else "one, without a name"
        raise KeyError(f"{self.root} has no type {name!r}{words or f'; its types are {known}'}")

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes. For PyG's names the error says what to use instead.
        is_known = not name.startswith("_") and "description" in self.__dict__
        words = words_for_missing(self.description, self.is_hetero, name) if is_known else ""
        if is_known and not words:
            masks = [f"{split}_mask" for type_ in self.description.node_types for split in type_.splits]
            words = did_you_mean(name, [*masks, *(known for known in dir(self) if not known.startswith("_"))])
        raise AttributeError(f"a {type(self).__name__} has no {name!r}{words}")


@dataclass(frozen=True)
class StoredType:
    """Result of ``part[type]``: one type of a partitioned graph, with the attributes of PyG's stores that need no rows.

    A vertex type has ``num_nodes``, and an edge type ``num_edges``.

    Attributes:
        stored: the type as the directory describes it.
        root: the directory.
    """

    stored: VertexType | EdgeType
    root: str

    @property
    def num_features(self) -> int:
        """Number of columns of ``x`` or ``tf``, or of an edge type's ``edge_attr``; 0 without it."""
        return _num_columns(self.stored, FEATURES if isinstance(self.stored, VertexType) else ("edge_attr",))

    num_node_features = num_edge_features = num_features

    def keys(self) -> list[str]:
        return _keys(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copies ask before the fields are set
        own, other = ("num_nodes", "num_edges") if isinstance(self.stored, VertexType) else ("num_edges", "num_nodes")
        if name == own:
            return _number(self.stored)
        if name == other:
            raise AttributeError(f"{self.stored.name!r} of {self.root} has no {other}, but {own}")
        words = _words_for_missing_of_type(self.stored, name)
        raise AttributeError(f"{self.stored.name!r} of {self.root} has no {name!r}{words}")

    def __repr__(self) -> str:
        words = f"num_{'nodes' if isinstance(self.stored, VertexType) else 'edges'}={_number(self.stored)}"
        return f"StoredType({', '.join([repr(self.stored.name), words, *attributes_in_words(self.stored)])})"


def attributes_in_words(type_: VertexType | EdgeType) -> list[str]:
    """Returns the shapes of a type's attributes as PyG prints them, such as ``x=[150, 3]``. A table has one entry."""
    number, tables = _number(type_), type_.tables
    inside = {column for table in tables.values() for column in table.columns}
    shapes = {name: [number, *entry["row_shape"]] for name, entry in type_.attributes.items() if name not in inside}
    shapes |= {name: [number, table.num_cols] for name, table in tables.items()}
    return [f"{name}={shape}" for name, shape in shapes.items()]


def words_for_missing(description: Description, is_hetero: bool, name: str) -> str:
    """Returns the end of an error text: what to use instead of the attribute ``name`` of PyG's data."""
    types = [*description.types]
    if name in _INSTEAD:
        return f": {_INSTEAD[name]}"
    if is_hetero and name.endswith("_dict") and name != "edge_index_dict":
        name = name.removesuffix("_dict")
        sizes = {"num_nodes": "part[type].num_nodes", "num_edges": "part[type].num_edges"}
        if name in sizes:
            return f": {sizes[name]} has the number of one type"
    if name.removesuffix("_dict") == "edge_index":
        return f": part.{'typed_graph()' if is_hetero else 'graph'} has the edges, as indptr and indices"
    return next((words for type_ in types if (words := _words_for_missing_of_type(type_, name))), "")


def _words_for_missing_of_type(type_: VertexType | EdgeType, name: str) -> str:
    split, is_typed = name.removesuffix("_mask"), type_.name is not None
    if isinstance(type_, EdgeType):
        rows = f"edge_rows_by_type()[{type_.name!r}]" if is_typed else "edge_rows()"
        if name in type_.attributes or name in type_.frames:
            return f": part.{rows}[{name!r}] has the rows of all edges, and batches of a NeighborLoader carry those of their edges"
        if name in ("edge_index", "adj_t"):
            return ": part.typed_graph() has the edges, as indptr and indices"
        return f": use part.edge_split({split!r}, part_id, {type_.name!r})" if split in type_.splits else ""
    if name in type_.attributes or name in type_.frames:
        rows = "rows(part_id)" if is_typed else f"node_rows(part_id)[{name!r}]"
        of_type = f", {type_.name!r}" if is_typed else ""
        number = {"x": "part.num_features is their width; ", "y": "part.num_classes is known; "}.get(name, "")
        return (
            f": its rows are divided into parts. {number}part.{rows} has the rows of one part, part.take({name!r}, n_id{of_type}) those of any "
            "vertices, and batches of a NeighborLoader carry them"
        )
    if split in type_.splits:
        nodes = f"({type_.name!r}, {split!r})" if is_typed else repr(split)
        of_type = f", type_={type_.name!r}" if is_typed else ""
        return f": it became the split {split!r}; use part.split({split!r}, part_id{of_type}), or input_nodes={nodes} of a NeighborLoader"
    return ""


def _number(type_: VertexType | EdgeType) -> int:
    return type_.num_vertices if isinstance(type_, VertexType) else type_.num_edges


def _keys(type_: VertexType | EdgeType) -> list[str]:
    first = ["edge_index"] if isinstance(type_, EdgeType) else []
    return [*first, *(words.split("=")[0] for words in attributes_in_words(type_))]


def _num_columns(type_: VertexType | EdgeType, names: tuple[str, ...]) -> int:
    """Returns the number of columns of the first attribute in ``names`` that the type has, or 0."""
    tables = type_.tables
    for name in names:
        if name in tables:
            return tables[name].num_cols
        if name in type_.attributes:
            return [1, *type_.attributes[name]["row_shape"]][-1]
    return 0


def _warn_of_real_labels(type_: VertexType) -> None:
    """Warns, as PyG does, that the number of classes of real labels is their number of distinct values."""
    y = type_.attributes.get("y")
    is_real = y is not None and getattr(torch, y["dtype"]).is_floating_point and math.prod(y["row_shape"]) == 1
    if y is not None and is_real and type_.num_classes > 2:
        warnings.warn(
            f"y{words_of_type(type_.name)} holds {y['dtype']}, so num_classes is the number of distinct values, {type_.num_classes:,}, as in PyG; "
            "store integers if they are classes",
            UserWarning,
            stacklevel=3,
        )
