"""How is a partitioned graph on disk opened, and what does one part see of it?"""

from __future__ import annotations

import math
import mmap
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from salientpp import ops
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import full_edge_type
from salientpp.graph.typed import TypedGraph
from salientpp.ids import as_tensor, check_range, first_outside
from salientpp.processes import lazy
from salientpp.ranks.members import group_rank
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.store.directory.description import (
    Description,
    EdgeName,
    EdgeType,
    VertexType,
    part_folder,
    words_of_type,
)
from salientpp.store.directory.files import DatasetError, open_array, verify_file
from salientpp.store.directory.kept import kept
from salientpp.store.directory.manifest import check_is_there, fingerprint, parts_there, read_manifest
from salientpp.store.narrow import NarrowRows
from salientpp.store.rows import JoinedRows, TensorRows
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability, uniform_starts
from salientpp.vip.policies import Workload


class PartitionedGraph:
    """A partitioned graph on disk, seen from one part.

    Made by :func:`load`. Arrays are memory maps, opened when first used; a copy, or a pickle in another process, opens its own. Any process may look at
    any part by its number. In a homogeneous graph the one type of vertices and the one of edges are named None.

    Where there are fewer ranks than parts on disk, a rank serves several that follow one another, as one: :meth:`joined` gives the view in which these
    are the parts. Views of a directory share topology and memory maps.

    Attributes:
        root: the directory.
        manifest: its description, as it is in the file.
        description: the same, of either version of the format; its parts are those on disk.
        part_id: the part that this process serves, or None where that is not decided (no process group and K > 1).
        books: per type of vertices, which global ids each part owns.
        row_books: the same of rows: one part has all of a replicated type's.
        offsets: the first part on disk of each part, and at the end their number.
        whole: the view whose parts are those on disk.
    """

    def __init__(
        self,
        root: Path,
        manifest: dict[str, Any],
        part_id: int | None,
        offsets: Sequence[int] = (),
        whole: PartitionedGraph | None = None,
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.description: Description = Description.of(manifest) if whole is None else whole.description
        self.offsets = tuple(offsets) or tuple(range(self.description.num_parts + 1))
        self.books = {type_.name: self._joined_book(type_.book) for type_ in self.description.node_types}
        self.row_books = {type_.name: self._joined_book(type_.row_book) for type_ in self.description.node_types}
        self.part_id = part_id
        self._maps: weakref.WeakKeyDictionary[mmap.mmap, str] = (
            weakref.WeakKeyDictionary() if whole is None else whole._maps
        )  # those in use, and their files
        self._whole = whole
        self._is_made = True

    @property
    def whole(self) -> PartitionedGraph:
        return self if self._whole is None else self._whole

    def joined(self, offsets: Sequence[int], part_id: int | None) -> PartitionedGraph:
        """The view whose part i is the parts ``offsets[i]`` to ``offsets[i + 1] - 1`` on disk.

        Args:
            offsets: from 0 to the number of parts on disk, ascending.
            part_id: the part of the view that this process serves.
        """
        whole, offsets = self.whole, tuple(offsets)
        inside = all(first < last for first, last in pairwise(offsets))
        if not inside or len(offsets) < 2 or (offsets[0], offsets[-1]) != (0, whole.num_parts):
            raise ValueError(
                f"offsets must ascend from 0 to the {whole.num_parts} parts of {self.root}, got {list(offsets)}"
            )
        if offsets == whole.offsets and part_id == whole.part_id:
            return whole
        return PartitionedGraph(self.root, self.manifest, part_id, offsets, whole)

    def _joined_book(self, book: PartitionBook) -> PartitionBook:
        is_split = book.num_parts == self.description.num_parts
        return PartitionBook(book.offsets[list(self.offsets)]) if is_split else book

    def _stored_parts(self, part_id: int) -> range:
        """The parts on disk that are this one."""
        return range(self.offsets[part_id], self.offsets[part_id + 1])

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there. PyG's names get words.
        text = f"a {type(self).__name__} has no {name!r}"
        if not name.startswith("_") and "description" in self.__dict__:
            split = name.removesuffix("_mask")
            if any(name in type_.attributes for type_ in self.description.node_types):
                rows = "rows(part_id)" if self.is_hetero else f"node_rows(part_id)[{name!r}]"
                text += (
                    f": its rows lie in parts. part.{rows} has those of a part, part.take({name!r}, n_id) those of any "
                    "vertices, and batches of a NeighborLoader carry them"
                )
            elif any(split in type_.splits for type_ in self.description.node_types):
                text += (
                    f": it became a split, part.split({split!r}, part_id), or input_nodes={split!r} of a NeighborLoader"
                )
            elif name == "edge_index":
                text += f": part.{'typed_graph()' if self.is_hetero else 'graph'} has the edges, as indptr and indices"
        raise AttributeError(text)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__ and name not in self.__dict__:
            raise AttributeError(
                f"{name!r} cannot be set on a {type(self).__name__}: batches carry what is on disk. Set it on the data and partition that again, or pass "
                f"rows={{{name!r}: ...}} to the NeighborLoader"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.root, self.manifest, self.part_id, self.offsets)

    def check_sizes(self) -> None:
        """Look whether the files behind the open memory maps are still as long as the maps.

        Reading a map beyond the end of its file kills the process (SIGBUS). A file that was replaced by another, or deleted, is not cut short: the map
        keeps the one that it was made of.

        Raises:
            DatasetError: one was cut short.
        """
        for map_, name in list(self._maps.items()):
            size, expected = map_.size(), self.manifest["files"][name]["bytes"]
            if size < expected:
                raise DatasetError(
                    f"{self.root / name} was cut short while this process was reading it: it must have {expected} bytes, got {size}; copy it again, or "
                    "partition again, and start anew from the last state"
                )

    # --- what there is ------------------------------------------------------------------------------------

    @property
    def is_hetero(self) -> bool:
        """Whether types have names, as those of a ``HeteroData``."""
        return self.node_types != (None,)

    @property
    def node_types(self) -> tuple[str | None, ...]:
        return tuple(self.books)

    @property
    def edge_types(self) -> tuple[EdgeName, ...]:
        return tuple(type_.name for type_ in self.description.edge_types)

    @property
    def replicated(self) -> frozenset[str | None]:
        """The types of vertices whose rows every part has."""
        return frozenset(type_.name for type_ in self.description.node_types if type_.replicated)

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_vertices(self) -> int:
        """Of all types together, as PyG's ``num_nodes``."""
        return sum(type_.num_vertices for type_ in self.description.node_types)

    @property
    def num_edges(self) -> int:
        """Of all types together."""
        return sum(type_.num_edges for type_ in self.description.edge_types)

    @property
    def book(self) -> PartitionBook:
        """Which global ids of a homogeneous graph each part owns."""
        self._only_type("books")
        return self.books[None]

    @property
    def num_features(self) -> int | dict[str | None, int]:
        """Columns of ``x``, 0 without it; per type if types have names."""
        columns = {type_.name: _num_columns(type_.attributes.get("x")) for type_ in self.description.node_types}
        return columns if self.is_hetero else columns[None]

    @property
    def num_classes(self) -> int | dict[str | None, int]:
        """Classes of ``y``, as PyG's datasets count them; per type if types have names.

        One more than the largest integer label; the number of different real labels, with PyG's warning if they are more than 2; the number of labels per
        vertex if that is several; 0 without ``y``.
        """
        for type_ in self.description.node_types:
            y = type_.attributes.get("y")
            is_real = y is not None and getattr(torch, y["dtype"]).is_floating_point and math.prod(y["row_shape"]) == 1
            if y is not None and is_real and type_.num_classes > 2:
                warnings.warn(
                    f"y{words_of_type(type_.name)} holds {y['dtype']}, so num_classes is the number of different values, {type_.num_classes:,}, as in PyG; "
                    "store integers if they are classes",
                    UserWarning,
                    stacklevel=2,
                )
        classes = {type_.name: type_.num_classes for type_ in self.description.node_types}
        return classes if self.is_hetero else classes[None]

    @property
    def fingerprint(self) -> str:
        """Equal for equal contents: the checksum of all checksums."""
        return fingerprint(self.manifest)

    # --- topology -----------------------------------------------------------------------------------------

    @lazy
    def lists(self) -> dict[EdgeName, tuple[Tensor, Tensor]]:
        """Per edge type ``indptr`` int64 [N of the target type + 1] and ``indices`` [E], ids of the source type; validated when they were written."""
        if self._whole is not None:
            return self._whole.lists
        return {
            type_.name: (self._array(type_.indptr_file), self._array(type_.indices_file))
            for type_ in self.description.edge_types
        }

    @lazy
    def graph(self) -> Graph:
        """The whole topology of a homogeneous graph; validated when it was written, so not read again here."""
        self._only_type("typed_graph()")
        return Graph.trusted(*self.lists[None]) if self._whole is None else self._whole.graph

    def typed_graph(self, time_attr: str | None = None, weight_attr: str | None = None) -> TypedGraph:
        """The whole topology, under global ids; edge ids are positions in the lists of the files. Memory maps are shared where nothing has to be sorted.

        Args:
            time_attr: the name of node or edge times; they may be missing on some types. Where the directory was partitioned for these times,
                lists are as they have to be, and a rank has the times of all vertices.
            weight_attr: the name of edge weights; they may be missing on some relations.

        Raises:
            ValueError: there is no such attribute, or it is no weight or time.
            DatasetError: times of vertices in parts that are not there, or lists that do not ascend by the times that they should.
        """
        named, edges = self.description, self.description.edge_types
        is_sorted = time_attr is not None and time_attr == named.time_attr
        node_time = {} if time_attr is None else self._node_times(time_attr)
        edge_time = {}
        if time_attr is not None:
            edge_time = {
                type_.name: self._edge_column(type_, time_attr) for type_ in edges if time_attr in type_.attributes
            }
            if node_time and edge_time:
                raise ValueError(
                    f"time_attr={time_attr!r} is both a node-level and an edge-level attribute; give one of them another name"
                )
            if not node_time and not edge_time:
                raise ValueError(f"The time attribute {time_attr!r} is neither a node-level or edge-level attribute")
        weight = {}
        if weight_attr is not None:
            weight = {
                type_.name: self._edge_column(type_, weight_attr) for type_ in edges if weight_attr in type_.attributes
            }
        if weight_attr is not None and not weight:
            raise ValueError(f"weight_attr names the edge weights, but no edges have an attribute {weight_attr!r}")
        try:
            return TypedGraph.from_lists(
                {type_.name: type_.num_vertices for type_ in named.node_types},
                self.lists,
                time_attr=time_attr,
                node_time=node_time,
                edge_time=edge_time,
                weight=weight,
                is_sorted=is_sorted,
            )
        except ValueError as error:
            raise type(error)(f"{self.root}: {error}") from None

    def _node_times(self, time_attr: str) -> dict[str | None, Tensor]:
        """Per type that has them int or float [N], whole files, or put together from those of all parts."""
        there, times = parts_there(self.root), {}
        for type_ in self.description.node_types:
            if time_attr not in type_.attributes:
                continue
            if time_attr == self.description.time_attr:
                times[type_.name] = self._array(type_.time_file(time_attr), type_.attributes[time_attr]["dtype"])
                continue
            stored = range(self.description.num_parts)
            missing = sorted(set(stored) - there) if there is not None and not type_.replicated else []
            if missing:
                raise DatasetError(
                    f"{self.root} is a copy without part {missing[0]}, whose vertices{words_of_type(type_.name)} have times {time_attr!r} that every rank "
                    f"needs in order to draw; partition with time_attr={time_attr!r}, which stores them whole, or open the directory that it was copied from"
                )
            parts = range(1) if type_.replicated else stored
            times[type_.name] = torch.cat([self._node_column(type_, time_attr, part_id) for part_id in parts])
        return times

    # --- rows ---------------------------------------------------------------------------------------------

    def rows(self, part_id: int | None = None) -> dict[str | None, dict[str, Tensor]]:
        """Per type of vertices, attribute name -> rows [n, ...]: of a part's vertices, of a replicated type of all.

        Those of several parts on disk, and those that are stored narrower, are read into memory; :meth:`sources` leaves them where they are.
        """
        return {
            type_: {
                name: source.tensor if isinstance(source, TensorRows) else source.whole()
                for name, source in named.items()
            }
            for type_, named in self.sources(part_id).items()
        }

    def sources(self, part_id: int | None = None) -> dict[str | None, dict[str, TensorRows | JoinedRows | NarrowRows]]:
        """:meth:`rows` as sources, which are memory maps; rows that are stored narrower are decoded when they are taken."""
        stored = self._stored_parts(self._part(part_id))

        def source(type_: VertexType, name: str) -> TensorRows | JoinedRows | NarrowRows:
            parts = range(1) if type_.replicated else stored
            pieces = [self._node_column(type_, name, part) for part in parts]
            found = TensorRows(pieces[0]) if len(pieces) == 1 else JoinedRows(pieces)
            narrow = type_.narrow(name)
            return found if narrow is None else NarrowRows(found, narrow)

        return {
            type_.name: {name: source(type_, name) for name in type_.attributes}
            for type_ in self.description.node_types
        }

    def edge_rows_by_type(self) -> dict[EdgeName, dict[str, Tensor]]:
        """Per edge type, attribute name -> rows [E, ...] of all its edges, in list order."""
        return {
            type_.name: {name: self._edge_column(type_, name) for name in type_.attributes}
            for type_ in self.description.edge_types
        }

    def node_rows(self, part_id: int | None = None) -> dict[str, Tensor]:
        """:meth:`rows` of a homogeneous graph."""
        self._only_type("rows()")
        return self.rows(part_id)[None]

    def take(self, name: str, n_id: Tensor, type_: str | None = None) -> Tensor:
        """Rows [n, ...] of a node attribute for global ids int64 [n] of whatever parts, read from their files: for a look, without ranks.

        Args:
            type_: whose attribute and ids these are, if types have names.
        """
        vertices = self._vertices(type_)
        if name not in vertices.attributes:
            known = ", ".join(vertices.attributes) or "none"
            raise ValueError(f"{self.root} has the node attributes {known}{words_of_type(type_)}, got {name!r}")
        n_id, book = n_id.cpu(), vertices.row_book
        owner = book.owner(n_id)
        rows: Tensor | None = None
        for part_id in owner.unique().tolist() or [0]:
            own, at = self._node_column(vertices, name, part_id), owner == part_id
            rows = own.new_empty((n_id.numel(), *own.shape[1:])) if rows is None else rows
            rows[at] = own[n_id[at] - book.range_of(part_id)[0]]
        assert rows is not None  # there is a part
        narrow = vertices.narrow(name)
        return rows if narrow is None else narrow.decode(rows)

    def edge_rows(self) -> dict[str, Tensor]:
        """:meth:`edge_rows_by_type` of a homogeneous graph."""
        self._only_type("edge_rows_by_type()")
        return self.edge_rows_by_type()[None]

    def _node_column(self, type_: VertexType, name: str, part_id: int) -> Tensor:
        """Rows of a part, as they are stored."""
        dtype = type_.attributes[name]["dtype"] if type_.narrow(name) is None else "uint8"
        return self._array(type_.rows_file(name, part_id), dtype)

    def _edge_column(self, type_: EdgeType, name: str) -> Tensor:
        return self._array(type_.rows_file(name), type_.attributes[name]["dtype"])

    # --- ids ----------------------------------------------------------------------------------------------

    @lazy
    def _original_ids(self) -> dict[str | None, Tensor]:
        return {type_.name: self._array(type_.original_id_file) for type_ in self.description.node_types}

    @overload
    def original_id(self, n_id: Tensor, type_: str | None = None) -> Tensor: ...

    @overload
    def original_id(self, n_id: Mapping[str, Tensor], type_: None = None) -> dict[str, Tensor]: ...

    def original_id(self, n_id: Tensor | Mapping[str, Tensor], type_: str | None = None) -> Tensor | dict[str, Tensor]:
        """The ids that the user's data had, int64, for global ids of this graph (``batch.n_id``).

        Args:
            n_id: ids, or if types have names a mapping from types to ids.
            type_: whose ids these are, if types have names.
        """
        if isinstance(n_id, Mapping):
            return {name: self.original_id(ids, name) for name, ids in n_id.items()}
        return self._original_ids[self._vertices(type_).name][n_id.cpu()].to(n_id.device)

    @overload
    def directory_id(self, ids: Tensor, type_: str | None = None) -> Tensor: ...

    @overload
    def directory_id(self, ids: Mapping[str, Tensor], type_: None = None) -> dict[str, Tensor]: ...

    def directory_id(self, ids: Tensor | Mapping[str, Tensor], type_: str | None = None) -> Tensor | dict[str, Tensor]:
        """The reverse of :meth:`original_id`: global ids of this graph, int64 of the same shape, for ids that the user's data had.

        Takes 8 bytes per vertex of the type from the first call on.

        Args:
            ids: integers of any shape, or if types have names a mapping from types to ids.
            type_: whose ids these are, if types have names.

        Raises:
            ValueError: the data had no such id.
        """
        if isinstance(ids, Mapping):
            return {name: self.directory_id(of_type, name) for name, of_type in ids.items()}
        vertices, must = self._vertices(type_), "ids must be integer ids of the data that was partitioned"
        given = as_tensor(ids, must)
        if given.numel() and (given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex):
            raise ValueError(f"{must}, got {given.dtype}")
        flat = given.cpu().to(torch.int64).flatten()
        check_range(flat, vertices.num_vertices, f"{must}{words_of_type(type_)},")
        return self._directory_ids(vertices.name)[flat].view(given.shape).to(given.device)

    def _directory_ids(self, name: str | None) -> Tensor:
        """int64 [N]: by the user's id, the global one."""
        known = self.whole._inverse_ids
        if name not in known:
            original = self._original_ids[name]
            inverse = torch.empty_like(original)
            inverse[original] = torch.arange(original.numel(), device="cpu")
            known[name] = inverse
        return known[name]

    @lazy
    def _inverse_ids(self) -> dict[str | None, Tensor]:
        """Those in use, by type."""
        return {}

    def split(self, name: str, part_id: int | None = None, type_: str | None = None) -> Tensor:
        """Global ids int64 of a part's seeds of one type: a split of the data, or 'all'."""
        part_id, vertices = self._part(part_id), self._vertices(type_)
        if name == "all":
            begin, end = self.books[vertices.name].range_of(part_id)
            return torch.arange(begin, end, device="cpu")
        self._check_split(name, vertices)
        return _end_to_end(self._array(vertices.split_file(name, part)) for part in self._stored_parts(part_id))

    def edge_split(self, name: str, part_id: int | None = None, type_: EdgeName = None) -> Tensor:
        """Positions int64 in the lists of one edge type, of edges whose target a part owns: a split of the data, or 'all'."""
        part_id, edges = self._part(part_id), self._edges(type_)
        if name == "all":
            indptr = self.lists[edges.name][0]
            begin, end = (int(indptr[v]) for v in self.books[edges.target].range_of(part_id))
            return torch.arange(begin, end, device="cpu")
        self._check_split(name, edges)
        return _end_to_end(self._array(edges.split_file(name, part)) for part in self._stored_parts(part_id))

    def vip(self, part_id: int | None = None, type_: str | None = None) -> Tensor:
        """float32 [N] of one type: the inclusion probabilities of the workload that the directory was ordered by, without seeds.

        Those of several parts on disk are computed for the join, once, and kept beside the dataset where that can be written.
        """
        part_id, vertices = self._part(part_id), self._vertices(type_)
        stored = self._stored_parts(part_id)
        if len(stored) == 1:
            return self._array(vertices.vip_file(stored[0]))
        found = self._joined_vip.get(part_id)
        if found is None:
            found = self._joined_vip[part_id] = kept(
                self.root,
                f"vip-{stored.start}-{stored.stop - 1}-{self.fingerprint[:16]}",
                {f"n{number}": (each.num_vertices,) for number, each in enumerate(self.description.node_types)},
                lambda: self._compute_vip(part_id),
            )
        return found[f"n{self.description.node_types.index(vertices)}"]

    @lazy
    def _joined_vip(self) -> dict[int, dict[str, Tensor]]:
        """Those in use, by part."""
        return {}

    def _compute_vip(self, part_id: int) -> dict[str, Tensor]:
        """Of the workload of the directory, per number of a type."""
        of, (seed_type, split) = self.description, self.description.seeds
        if not self.is_hetero:
            seeds = self.split(split, part_id)
            return {"n0": inclusion_probability(self.graph, seeds, of.num_neighbors[0], of.batch_size)}
        types = self.node_types if seed_type is None else (seed_type,)
        starts = uniform_starts({type_: self.split(split, part_id, type_) for type_ in types}, of.batch_size)
        found = typed_inclusion_probability(self.typed_graph(), starts, of.num_neighbors)
        return {f"n{number}": found[type_] for number, type_ in enumerate(self.node_types)}

    def vip_of(
        self,
        part_id: int,
        type_: str | None,
        seeds: Tensor,
        fanouts: Sequence[Sequence[int]],
        batch_size: int,
        replace: bool,
    ) -> dict[str | None, Tensor] | None:
        """:meth:`vip` of every type, where it is of this very workload: these seeds of one type, and fanouts per edge type; else None."""
        stored = self.description
        same = not replace and [list(per_hop) for per_hop in fanouts] == stored.num_neighbors
        same = same and (batch_size, type_) == (stored.batch_size, stored.seeds[0])
        if not same or not torch.equal(seeds.sort().values, self.split(stored.seeds[1], part_id, type_)):
            return None
        return {name: self.vip(part_id, name) for name in self.node_types}

    def workload(
        self, part_id: int, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False
    ) -> Workload:
        """What policies rank by for a part's batches of these seeds; it knows the stored :meth:`vip` where that is of this very workload.

        The loader and the analysis both plan by it, so that they cache the same rows. Of a homogeneous graph.
        """
        self._only_type("vip(), books and typed_graph()")
        vip = self.vip_of(part_id, None, seeds, [num_neighbors], batch_size, replace)
        return Workload(
            self.graph,
            self.book,
            part_id,
            seeds,
            num_neighbors,
            batch_size,
            replace,
            None if vip is None else vip[None],
        )

    # --- arguments ----------------------------------------------------------------------------------------

    def _only_type(self, instead: str) -> None:
        """Raise ValueError if types have names."""
        if self.is_hetero:
            raise ValueError(
                f"{self.root} has several types of vertices ({', '.join(map(repr, self.node_types))}), so this is of none; use {instead}"
            )

    def _vertices(self, type_: str | None) -> VertexType:
        if type_ not in self.books:
            known = ", ".join(map(repr, self.node_types))
            raise ValueError(f"type_ must be a node type of {self.root} ({known}), got {type_!r}")
        return self.description.vertices(type_)

    def _edges(self, type_: EdgeName) -> EdgeType:
        name = full_edge_type(type_, self.edge_types)
        if name not in self.edge_types:
            known = ", ".join(map(repr, self.edge_types)) or "none"
            raise ValueError(f"type_ must be an edge type of {self.root} ({known}), got {type_!r}")
        return self.description.edges(name)

    def _check_split(self, name: str, type_: VertexType | EdgeType) -> None:
        if name not in type_.splits:
            known = ", ".join(repr(split) for split in [*type_.splits, "all"])
            of = "edges" if isinstance(type_, EdgeType) else ""
            words = words_of_type(type_.name) or (f" of {of}" if of else "")
            raise ValueError(f"{self.root} has the splits {known}{words}, got {name!r}")

    def _part(self, part_id: int | None) -> int:
        part_id = self.part_id if part_id is None else part_id
        if part_id is None:
            raise ValueError(
                f"{self.root} has {self.num_parts} parts and this process serves none of them: to look at one, name it with part_id=; to train, "
                f"initialise torch.distributed before salientpp.load (torchrun --nproc-per-node {self.num_parts})"
            )
        next(iter(self.books.values())).range_of(part_id)
        for part in self._stored_parts(part_id):
            check_is_there(self.root, part)
        return part_id

    def _array(self, name: str, dtype: str | None = None) -> Tensor:
        entry = self.manifest["files"][name]
        # Again, since the directory may have been overwritten after load: two of them must never be mixed.
        verify_file(self.root, name, entry, full=False)
        array, map_ = open_array(self.root, name, entry)
        if map_ is not None:
            self._maps[map_] = name
        tensor = torch.from_numpy(array)
        return tensor if dtype is None else tensor.view(getattr(torch, dtype))

    def __repr__(self) -> str:
        sizes: tuple[Any, Any] = (self.num_vertices, self.num_edges)
        if self.is_hetero:
            sizes = (
                {type_.name: type_.num_vertices for type_ in self.description.node_types},
                {type_.name: type_.num_edges for type_ in self.description.edge_types},
            )
        return (
            f"PartitionedGraph({str(self.root)!r}, num_parts={self.num_parts}, part_id={self.part_id}, "
            f"num_vertices={sizes[0]}, num_edges={sizes[1]})"
        )


def _reopened(root: Path, manifest: dict[str, Any], part_id: int | None, offsets: tuple[int, ...]) -> PartitionedGraph:
    whole = PartitionedGraph(root, manifest, part_id)
    return whole if offsets == whole.offsets else PartitionedGraph(root, manifest, None).joined(offsets, part_id)


def _end_to_end(pieces: Iterable[Tensor]) -> Tensor:
    first, *others = pieces
    return torch.cat([first, *others]) if others else first


def _num_columns(x: Mapping[str, Any] | None) -> int:
    return 0 if x is None else x["row_shape"][0] if x["row_shape"] else 1


def load(
    root: str | Path,
    *,
    part_id: int | None = None,
    verify: str = "quick",
    process_group: dist.ProcessGroup | None = None,
) -> PartitionedGraph:
    """Open a dataset directory; every rank calls it.

    Args:
        root: a directory that :func:`partition` wrote.
        part_id: the part to serve. None: rank r of an initialised process group serves part ``r // ranks_per_part``, or, where there are fewer ranks
            than parts, its share of them as one (:mod:`salientpp.ranks.placement`); in a process of its own, part 0 if it is the only one.
        verify: 'quick' checks the manifest, sizes, headers and sampled checksums; 'full' reads every byte, and checks that topology, ids, seeds
            and probabilities are such.
        process_group: the ranks that serve the parts, as given to the loaders; None: the default group.

    Raises:
        DatasetError: missing, half-written, truncated, altered, of a newer format, or a copy for one host without this part.
        ValueError: the number of ranks does not fit the number of parts, or no such part; or this rank is not in the group.
    """
    if verify not in ("quick", "full"):
        raise ValueError(f"verify must be 'quick' or 'full', got {verify!r}")
    root = Path(root)
    manifest = read_manifest(root)
    there = parts_there(root)
    folders = None if there is None else {part_folder(part) for part in there}
    for name, entry in manifest["files"].items():
        folder, slash, _ = name.partition("/")
        if folders is None or not slash or folder in folders:
            verify_file(root, name, entry, full=verify == "full")
    num_parts = manifest["num_parts"]
    if part_id is not None and not 0 <= part_id < num_parts:
        raise ValueError(f"part_id must be in [0, {num_parts}), got {part_id}")
    part = PartitionedGraph(root, manifest, part_id)
    rank, world_size = group_rank(process_group) if part_id is None else (0, 1)
    if world_size > 1 or num_parts == 1:
        try:
            placement = Placement(rank, world_size, num_parts)
        except ValueError as error:
            raise ValueError(f"{root}: {error}") from None
        part = PartitionedGraph(root, manifest, None).joined(placement.own_offsets, placement.own_part)
    if part_id is not None or part.part_id is not None:
        part._part(part.part_id)
    if verify == "full":
        _check_contents(part.whole, range(num_parts) if there is None else sorted(there & set(range(num_parts))))
    return part


def _check_contents(part: PartitionedGraph, part_ids: Iterable[int]) -> None:
    """Raise DatasetError unless the arrays hold what every step relies on: a graph, a renumbering, seeds of the parts, probabilities."""

    def expect(holds: bool, name: str, words: str) -> None:
        if not holds:
            raise DatasetError(f"{part.root / name} must hold {words}; copy it again, or partition again")

    described = part.description
    for edges in described.edge_types:
        try:
            _check_lists(*part.lists[edges.name], described.vertices(edges.source).num_vertices)
        except RuntimeError as error:
            raise DatasetError(
                f"{part.root} holds no graph{words_of_type(edges.name)}: {error}; copy {edges.indptr_file} and {edges.indices_file} again, or partition again"
            ) from None
        for part_id in part_ids:
            own = part.edge_split("all", part_id, edges.name)
            for split in edges.splits:
                inside = _ascends_in(part.edge_split(split, part_id, edges.name), own)
                expect(inside, edges.split_file(split, part_id), f"ascending ids in {_range_of(own)}")
    for vertices in described.node_types:
        name, size = vertices.name, vertices.num_vertices
        original = part._original_ids[name]
        expect(
            torch.equal(original.sort().values, torch.arange(size, device="cpu")),
            vertices.original_id_file,
            f"each of 0 to {size - 1} once" if size else "nothing",
        )
        for part_id in part_ids:
            own = part.split("all", part_id, name)
            for split in vertices.splits:
                inside = _ascends_in(part.split(split, part_id, name), own)
                expect(inside, vertices.split_file(split, part_id), f"ascending ids in {_range_of(own)}")
            vip = part.vip(part_id, name)
            expect(bool(((vip >= 0) & (vip <= 1)).all()), vertices.vip_file(part_id), "probabilities")
    if described.time_attr is not None:
        for vertices in described.timed_vertices:
            whole = part._array(vertices.time_file(described.time_attr))
            for part_id in part_ids:
                begin, end = vertices.row_book.range_of(0 if vertices.replicated else part_id)
                same = torch.equal(whole[begin:end], part._array(vertices.rows_file(described.time_attr, part_id)))
                expect(
                    same,
                    vertices.time_file(described.time_attr),
                    f"what {vertices.rows_file(described.time_attr, part_id)} holds",
                )
        try:
            part.typed_graph(described.time_attr)
        except ValueError as error:
            raise DatasetError(f"{error}; copy it again, or partition again") from None


def _check_lists(indptr: Tensor, indices: Tensor, num_sources: int) -> None:
    """Raise RuntimeError unless these are lists of ids in ``[0, num_sources)``."""
    num_targets = indptr.numel() - 1
    # The kernel knows one number of vertices, so there are as many lists as of the larger.
    more = indptr[-1:].expand(max(0, num_sources - num_targets))
    ops.check_csc(torch.cat([indptr, more]), indices)
    at = first_outside(indices, num_sources)
    if at is not None:
        raise RuntimeError(f"indices[{at}] must be in [0, {num_sources}), got {int(indices[at])}")


def _ascends_in(ids: Tensor, own: Tensor) -> bool:
    """Whether ids ascend inside the range of ids that a part has."""
    if not ids.numel():
        return True
    return own.numel() > 0 and bool(own[0] <= ids[0]) and bool(ids[-1] <= own[-1]) and bool((ids.diff() > 0).all())


def _range_of(own: Tensor) -> str:
    return f"[{int(own[0])}, {int(own[-1]) + 1})" if own.numel() else "[0, 0)"
