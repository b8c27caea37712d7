"""Reads a partitioned graph from disk on behalf of one part: its rows, neighbour lists, splits and inclusion probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from salientpp.display import Table, format_bytes, html
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import full_edge_type
from salientpp.graph.part import PartGraph
from salientpp.graph.typed import TypedGraph
from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.directory.columns import (
    StoredRows,
    edge_split,
    named_vertices,
    take,
    vertex_rows,
    vertex_split,
    whole,
)
from salientpp.store.directory.description import PARTS, Description, EdgeName, EdgeType, VertexType
from salientpp.store.directory.files import Arrays
from salientpp.store.directory.manifest import check_is_there, fingerprint
from salientpp.store.directory.part_topology import PartEdgeRows, part_edge_rows, read_part_graph
from salientpp.store.directory.pyg_names import PygNames, attributes_in_words
from salientpp.store.directory.roles import OpenedBy, WithRoles
from salientpp.store.directory.stored_keys import StoredKeys, WithKeys
from salientpp.store.directory.stored_vip import StoredVip
from salientpp.store.directory.topology import Topology
from salientpp.store.frames import with_tables
from salientpp.vip.list_sums import ListSums
from salientpp.vip.policies import Workload


class PartitionedGraph(PygNames, WithRoles, WithKeys):
    """A partitioned graph on disk, which loaders and users read for one of its parts.

    :func:`load` creates it. Arrays are memory maps, opened when first used; a copy, or a pickle in another process, opens its own. Any process may read
    any part by its number. In a homogeneous graph the single vertex type and the single edge type are named None.

    With fewer ranks than parts on disk, a rank serves several parts as one, in a view made by :meth:`joined`. Views share topology and memory maps.

    Attributes:
        root, manifest: the directory, and its manifest as in the file.
        description: the manifest's contents, in classes that are the same for all versions of the format. Its parts are the parts on disk.
        arrays: opens the directory's files.
        fingerprint: a checksum of all checksums, equal for equal contents.
        is_hetero, node_types, edge_types: True if types have names, and the names of all types, as in a ``HeteroData``.
        topology: 'whole' if every rank opens the neighbour lists of all parts, 'parts' if each part stores the lists of its own vertices.
        replicated: vertex types whose rows every part has.
        num_vertices, num_edges: totals over all types, as PyG's ``num_nodes`` and ``num_edges``.
        num_parts: K of this view.
        part_id: the part that this process serves. None: not known, because there is no process group and K > 1.
        books: per vertex type, the partition book that maps global ids to owners.
        row_books: per vertex type, the partition book of its rows. For a replicated type it has one part with all rows.
        offsets: for each part of this view, its first part on disk; then the number of parts on disk.
        whole: the view whose parts are the parts on disk.
        opened_by: the ranks that opened it. If some of them only store, views end with an empty part, for ranks without rows or seeds.
    """

    def __init__(
        self,
        root: Path,
        manifest: dict[str, Any],
        part_id: int | None,
        offsets: Sequence[int] = (),
        whole: PartitionedGraph | None = None,
        opened_by: OpenedBy = OpenedBy(),  # noqa: B008  # frozen
        arrays: Arrays | None = None,
    ) -> None:
        root = root.absolute()  # files are opened later
        self.root, self.manifest, self.fingerprint = root, manifest, fingerprint(manifest)
        if whole is None:
            self.description = Description.of(manifest)
            self.arrays = arrays or Arrays(root, manifest["files"])
            self._topology = Topology(self.arrays, self.description)
            self.stored_vip = StoredVip(self.arrays, self.description, self._topology, self.fingerprint)
            self._keys = StoredKeys(self.arrays, self.description)
        else:
            self.description, self.arrays, self._keys = whole.description, whole.arrays, whole._keys
            self._topology, self.stored_vip = whole._topology, whole.stored_vip
        vertices, edges = self.description.node_types, self.description.edge_types
        self.node_types, self.is_hetero = [type_.name for type_ in vertices], vertices[0].name is not None
        self.edge_types, self.topology = [type_.name for type_ in edges], self.description.topology
        self.replicated = frozenset(type_.name for type_ in vertices if type_.replicated)
        self.num_vertices = sum(type_.num_vertices for type_ in vertices)
        self.num_edges = sum(type_.num_edges for type_ in edges)
        self.offsets = tuple(offsets) or tuple(range(self.description.num_parts + 1))
        self.num_parts, self.part_id = len(self.offsets) - 1, part_id
        self.books = {type_.name: PartitionBook(type_.book.offsets[list(self.offsets)]) for type_ in vertices}
        self.row_books = {**self.books, **{type_.name: type_.row_book for type_ in vertices if type_.replicated}}
        self.opened_by = opened_by if whole is None else whole.opened_by
        self._whole, self._is_made = whole, True

    @property
    def whole(self) -> PartitionedGraph:
        return self if self._whole is None else self._whole

    def joined(self, offsets: Sequence[int], part_id: int | None) -> PartitionedGraph:
        """Returns the view whose part i consists of the parts ``offsets[i]`` to ``offsets[i + 1] - 1`` on disk.

        Args:
            offsets: ascending numbers. The first is 0, and the last is the number of parts on disk. The last part may be empty.
            part_id: the part of the view that this process serves.
        """
        whole, offsets = self.whole, tuple(offsets)
        _check_offsets(whole, offsets)
        if offsets == whole.offsets and part_id == whole.part_id:
            return whole
        return PartitionedGraph(self.root, self.manifest, part_id, offsets, whole)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__:
            raise AttributeError(
                f"{name!r} cannot be set on a {type(self).__name__}: batches carry the attributes on disk. Set it on the data and partition the data again, or "
                f"pass columns={{{name!r}: ...}} to the NeighborLoader"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        self.arrays.check_can_be_pickled()
        return _reopened, (self.root, self.manifest, self.part_id, self.offsets, self.num_storage_ranks)

    def check_sizes(self) -> None:
        """Raises :class:`DatasetError` if a file behind an open memory map was cut short. Reading such a map would kill the process."""
        self.arrays.check_sizes()

    @property
    def book(self) -> PartitionBook:
        """Partition book of a homogeneous graph: the owners of global ids."""
        _check_is_homogeneous(self, "books")
        return self.books[None]

    @property
    def lists(self) -> dict[EdgeName, tuple[Tensor, Tensor]]:
        """Neighbour lists per edge type: ``indptr`` int64 [N of the target type + 1], ``indices`` [E] of source ids. They were validated when written.

        Lists that are stored in parts are concatenated, so they take the memory of all edges, also for :attr:`graph` and :meth:`typed_graph`. DatasetError if
        a part is missing.
        """
        return self._topology.lists

    @property
    def graph(self) -> Graph:
        """The whole topology of a homogeneous graph."""
        _check_is_homogeneous(self, "typed_graph()")
        return self._topology.graph

    def typed_graph(self, time_attr: str | None = None, weight_attr: str | None = None) -> TypedGraph:
        """Returns the whole topology, under global ids. Edge ids are positions in the lists on disk. Memory maps are shared unless lists must be sorted.

        Args:
            time_attr: name of node or edge times; some types may lack them. If the directory was partitioned with these times, the lists are
                sorted already, and each rank has the times of all vertices.
            weight_attr: name of edge weights; some relations may lack them.

        Raises:
            ValueError: the attribute does not exist, or is not a valid weight or time.
            DatasetError: a copy lacks parts whose times are needed, or lists that should ascend by time do not.
        """
        return self._topology.typed_graph(time_attr, weight_attr)

    def rows(self, part_id: int | None = None) -> dict[str | None, dict[str, Any]]:
        """Returns a part's node attributes: vertex type -> attribute name -> rows [n, ...] or ``TensorFrame``.

        A replicated type gives its rows of all parts. Rows of several parts on disk, encoded rows and tables are read
        into memory. :meth:`sources` leaves them on disk.
        """
        sources = self.sources(part_id).items()
        return {type_: _whole(self, type_, named, part_id) for type_, named in sources}

    def sources(self, part_id: int | None = None) -> dict[str | None, dict[str, StoredRows]]:
        """Returns the rows of :meth:`rows` as sources, which leave them on disk. Each column of a table is a source."""
        stored = self._stored(part_id)
        return {
            type_.name: {name: vertex_rows(self.arrays, type_, name, stored) for name in type_.attributes}
            for type_ in self.description.node_types
        }

    def edge_rows_by_type(self) -> dict[EdgeName, dict[str, Tensor]]:
        """Returns all edge attributes: edge type -> attribute name -> rows [E, ...], in the order of the neighbour lists.

        Rows in parts and encoded rows are read into memory; :meth:`edge_sources` leaves them on disk. DatasetError if
        the directory is a host's copy that lacks a part.
        """
        sources = self.edge_sources()
        return {type_: {name: whole(rows) for name, rows in named.items()} for type_, named in sources.items()}

    def edge_sources(self) -> dict[EdgeName, dict[str, StoredRows]]:
        """Returns the rows of :meth:`edge_rows_by_type` as sources, which leave the rows on disk until they are taken."""
        types, column = self.description.edge_types, self._topology.column
        return {type_.name: {name: column(type_, name) for name in type_.attributes} for type_ in types}

    def part_graph(
        self, time_attr: str | None = None, weight_attr: str | None = None, part_id: int | None = None
    ) -> PartGraph:
        """Returns the neighbour lists of the vertices that a part owns. Each part on disk gives a separate piece.

        With topology 'parts', the files with other parts' edges are not opened.

        Args:
            time_attr, weight_attr: as for :meth:`typed_graph`.

        Raises:
            ValueError: an attribute does not exist, or is not a valid weight or time. Times of edges must all be integers, or all be floats.
            DatasetError: a copy lacks the part, or parts whose times are needed; or lists that should ascend by time do not.
        """
        return read_part_graph(self._topology, self._stored(part_id), time_attr, weight_attr)

    def part_edge_rows(self, part_id: int | None = None) -> dict[EdgeName, PartEdgeRows]:
        """Returns, per edge type, the attributes of the edges into a part, and the number of the first of these edges in the graph."""
        stored = self._stored(part_id)
        return {type_.name: part_edge_rows(self._topology, type_, stored) for type_ in self.description.edge_types}

    def node_rows(self, part_id: int | None = None) -> dict[str, Any]:
        """Returns a part's node attributes in a homogeneous graph: attribute name -> rows [n, ...], as :meth:`rows`."""
        _check_is_homogeneous(self, "rows()")
        return self.rows(part_id)[None]

    def take(self, name: str, n_id: Tensor, type_: str | None = None) -> Any:
        """Reads a node attribute of any vertices, of all parts, from the files: rows [n, ...], or a ``TensorFrame``.

        ``n_id``: global ids, int64 [n]. No other rank takes part. Use it to look at data.

        Args:
            type_: vertex type of the attribute and ids, if types have names.
        """
        return take(self.arrays, _vertices(self, type_), name, n_id)

    def edge_rows(self) -> dict[str, Tensor]:
        """Returns the edge attributes of a homogeneous graph: name -> rows [E, ...], as :meth:`edge_rows_by_type`."""
        _check_is_homogeneous(self, "edge_rows_by_type()")
        return self.edge_rows_by_type()[None]

    @overload
    def original_id(self, n_id: Tensor, type_: str | None = None) -> Tensor: ...
    @overload
    def original_id(self, n_id: Mapping[str, Tensor], type_: None = None) -> dict[str, Tensor]: ...
    def original_id(self, n_id: Tensor | Mapping[str, Tensor], type_: str | None = None) -> Tensor | dict[str, Tensor]:
        """Translates global ids of this graph (such as ``batch.n_id``) to ids of the user's data, int64.

        The id -1 of padding stays -1. ValueError for any other id that is not in the graph.

        Args:
            n_id: ids, or if types have names a mapping from types to ids.
            type_: vertex type of the ids, if types have names.
        """
        if isinstance(n_id, Mapping):
            return {name: self.original_id(ids, name) for name, ids in n_id.items()}
        return self._topology.user_ids(n_id, _vertices(self, type_).name)

    @overload
    def directory_id(self, ids: Tensor, type_: str | None = None) -> Tensor: ...
    @overload
    def directory_id(self, ids: Mapping[str, Tensor], type_: None = None) -> dict[str, Tensor]: ...
    def directory_id(self, ids: Tensor | Mapping[str, Tensor], type_: str | None = None) -> Tensor | dict[str, Tensor]:
        """Translates ids of the user's data to global ids of this graph, int64 of the same shape.

        Reverses :meth:`original_id`. The first call makes a table, which stays in memory: 8 bytes per vertex of the
        type.

        Args:
            ids: integers of any shape, or if types have names a mapping from types to ids.
            type_: vertex type of the ids, if types have names.

        Raises:
            ValueError: an id is not in the data.
        """
        if isinstance(ids, Mapping):
            return {name: self.directory_id(of_type, name) for name, of_type in ids.items()}
        return self._topology.global_ids(ids, _vertices(self, type_).name)

    def split(self, name: str, part_id: int | None = None, type_: str | None = None) -> Tensor:
        """Returns a part's vertices of one type that are in the split ``name`` (or 'all'), as global ids, int64."""
        return vertex_split(self.arrays, _vertices(self, type_), name, self._stored(part_id))

    def edge_split(self, name: str, part_id: int | None = None, type_: EdgeName = None) -> Tensor:
        """Returns a part's edges of one type that are in the split ``name`` (or 'all'), as positions in the neighbour lists, int64.

        An edge belongs to the part that owns its target.
        """
        stored, edges = self._stored(part_id), _edges(self, type_)
        return edge_split(self.arrays, edges, name, stored, self._topology.edges_into(edges, stored))

    def vip(self, part_id: int | None = None, type_: str | None = None) -> Tensor:
        """Returns, for each vertex of a type, the probability that a batch of a part samples it: float32 [N].

        It is for the workload that the graph was partitioned with. Being a seed does not count. If the part joins
        several parts on disk, the probabilities are computed once, and kept in the directory if it can be written.
        """
        return self.stored_vip.of(_vertices(self, type_), self._stored(part_id))

    def vip_of(self, part_id: int, *workload: Any) -> dict[str | None, Tensor] | None:
        """Returns :meth:`vip` of every type if the stored values are for ``workload``, else None.

        ``workload`` has the arguments of :meth:`StoredVip.is_of` after ``stored``. With topology 'parts', nothing is
        computed: the result is also None if the directory has no probabilities of joined parts.
        """
        return self.stored_vip.of_workload(self._stored(part_id), *workload)

    def keep_vip(self, part_id: int, vip: Mapping[str | None, Tensor], *workload: Any) -> None:
        """Stores probabilities for later :meth:`vip` calls, if ``workload`` is the one that the graph was partitioned with."""
        if self.stored_vip.is_of(self._stored(part_id), *workload):
            self.stored_vip.keep(self._stored(part_id), vip)

    def workload(
        self, part_id: int, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False, sums: ListSums | None = None
    ) -> Workload:  # fmt: skip
        """Returns what cache policies need to rank the vertices for a part's batches. Only for a homogeneous graph.

        It includes the stored :meth:`vip` if that is for these arguments. The loader and the analysis both plan caches
        with this workload, so they cache the same rows.

        Args:
            sums: sums over the neighbour lists, instead of the whole topology.
        """
        _check_is_homogeneous(self, "vip(), books and typed_graph()")
        vip = self.vip_of(part_id, None, seeds, [num_neighbors], batch_size, replace)
        stored = None if vip is None else vip[None]
        graph = self.graph if sums is None else sums
        return Workload(graph, self.book, part_id, seeds, num_neighbors, batch_size, replace, stored)

    def _stored(self, part_id: int | None) -> range:
        """Returns the parts on disk that make up a part of this view. None means the part that this process serves."""
        return _parts_on_disk(self, self.part_id if part_id is None else part_id)

    def __repr__(self) -> str:
        return "\n".join(_shown(self))

    def _repr_html_(self) -> str:
        first, *_, last = _shown(self)
        return html(f"{first} {last.strip()}", _table_of_types(self))


def _check_offsets(whole: PartitionedGraph, offsets: Sequence[int]) -> None:
    named = offsets[:-1] if whole.num_storage_ranks and offsets[-2:-1] == offsets[-1:] else offsets
    inside = all(first < last for first, last in pairwise(named))
    if not inside or len(offsets) < 2 or (offsets[0], offsets[-1]) != (0, whole.num_parts):
        raise ValueError(
            f"offsets must ascend from 0 to the {whole.num_parts} parts of {whole.root}, got {list(offsets)}"
        )


def _parts_on_disk(part: PartitionedGraph, part_id: int | None) -> range:
    if part_id is None:
        raise ValueError(
            f"{part.root} has {part.num_parts} parts and this process serves none of them; to read one, name it with part_id=; to train, "
            f"initialise torch.distributed before salientpp.load (torchrun --nproc-per-node {part.num_parts})"
        )
    next(iter(part.books.values())).range_of(part_id)
    stored = range(part.offsets[part_id], part.offsets[part_id + 1])
    for on_disk in stored:
        check_is_there(part.root, on_disk)
    return stored


def _shown(part: PartitionedGraph) -> list[str]:
    """Returns the lines of a part's ``repr``: sizes, attributes and splits of each type, and bytes on disk."""
    form = f", topology={part.topology!r}" if part.topology == PARTS else ""
    lines = [
        f"PartitionedGraph({str(part.root)!r}, num_parts={part.num_parts}, part_id={part.part_id}, "
        f"num_vertices={part.num_vertices}, num_edges={part.num_edges}{form},"
    ]
    for type_ in part.description.types:
        words = [
            *attributes_in_words(type_),
            *_keys(type_),
            *([f"splits {splits}"] if (splits := _splits(type_)) else []),
        ]
        name, number = _name_and_number(type_)
        if part.is_hetero:
            lines.append(f"  {name}: {number}{''.join(f', {word}' for word in words)},")
        elif words:
            lines.append(f"  {', '.join(words)},")
    size = sum(entry["bytes"] for entry in part.manifest["files"].values())
    return [*lines, f"  {format_bytes(size)} on disk)"]


def _table_of_types(part: PartitionedGraph) -> Table:
    lines = [
        [*map(str, _name_and_number(type_)), ", ".join(attributes_in_words(type_)), _splits(type_)]
        for type_ in part.description.types
    ]
    return Table(["type", "number", "attributes", "splits"], lines)


def _name_and_number(type_: VertexType | EdgeType) -> tuple[str, int]:
    if isinstance(type_, VertexType):
        return "vertices" if type_.name is None else type_.name, type_.num_vertices
    return "edges" if type_.name is None else " ".join(type_.name), type_.num_edges


def _keys(type_: VertexType | EdgeType) -> list[str]:
    """Returns words that name the key columns of a type, if it has keys."""
    keys = type_.keys if isinstance(type_, VertexType) else None
    return [] if keys is None else [f"keys {', '.join(column['name'] for column in keys)}"]


def _splits(type_: VertexType | EdgeType) -> str:
    return ", ".join(f"{name} {sum(counts):,}" for name, counts in type_.splits.items())


def _reopened(
    root: Path, manifest: dict[str, Any], part_id: int | None, offsets: tuple[int, ...], num_storage_ranks: int
) -> PartitionedGraph:
    opened_by = OpenedBy(num_storage_ranks)
    whole = PartitionedGraph(root, manifest, part_id, opened_by=opened_by)
    if offsets == whole.offsets:
        return whole
    return PartitionedGraph(root, manifest, None, opened_by=opened_by).joined(offsets, part_id)


def _check_is_homogeneous(part: PartitionedGraph, instead: str) -> None:
    if part.is_hetero:
        raise ValueError(
            f"{part.root} has several vertex types ({', '.join(map(repr, part.node_types))}); this attribute exists only for graphs with one type; "
            f"use {instead}"
        )


def _vertices(part: PartitionedGraph, type_: str | None) -> VertexType:
    return named_vertices(part.arrays, part.description, type_)


def _edges(part: PartitionedGraph, type_: EdgeName) -> EdgeType:
    name = full_edge_type(type_, part.edge_types)
    if name not in part.edge_types:
        known = ", ".join(map(repr, part.edge_types)) or "none"
        raise ValueError(f"type_ must be an edge type of {part.root} ({known}), got {type_!r}")
    return part.description.edges(name)


def _whole(
    part: PartitionedGraph, type_: str | None, sources: Mapping[str, Any], part_id: int | None
) -> dict[str, Any]:
    """Returns the rows of a type's ``sources`` as tensors, in memory where needed, and tables as ``TensorFrame``."""
    rows = {name: whole(source) for name, source in sources.items()}
    vertices, stored = part.description.vertices(type_), part._stored(part_id)
    begin, end = (0, -1) if vertices.replicated else (stored.start, stored.stop)
    return with_tables(rows, vertices.tables, vertices.offsets[end] - vertices.offsets[begin])
