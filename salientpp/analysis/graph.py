"""Opens the graph of an analysis: a dataset directory, or a graph in memory, which is partitioned here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.analysis.batches import Batches
from salientpp.graph.csc import Graph
from salientpp.partitioning.numbering import number_vertices, relabel
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.progress import Progress
from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.directory.contents import collect_splits
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.roles import OpenedBy
from salientpp.store.frames import feature_columns, features_of, formats_of_columns
from salientpp.store.narrow import Column, Narrow, read_formats
from salientpp.suggestions import did_you_mean
from salientpp.vip.policies import Workload


@dataclass(frozen=True, eq=False)
class MemoryGraph:
    """Partitioned graph in memory that stands in for a :class:`~salientpp.PartitionedGraph`, so that a ``Data`` needs no files. It has one vertex type.

    Attributes:
        graph: the graph under the ids of the parts.
        parts: partition book of these ids.
        seeds: by part, int64 global ids.
        vip: by part, float32 [N], the inclusion probabilities for ``known_for`` (fanouts and batch size).
        order: int64 [N], the user's id of every vertex.
        quality: quality of the partition.
        offsets: for each part of this view, which may join several consecutive parts, the first of these; at the end, the number of all parts.
        part_id: number of the part of this view that the view's rank visits; None: no rank.
    """

    graph: Graph
    parts: PartitionBook
    seeds: Sequence[Tensor]
    vip: Sequence[Tensor]
    known_for: tuple[list[int], int | None]
    order: Tensor
    quality: Mapping[str, Any]
    offsets: Sequence[int]
    part_id: int | None = None

    is_hetero, topology = False, "whole"
    replicated: ClassVar[frozenset[str | None]] = frozenset()

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges

    @property
    def books(self) -> dict[str | None, PartitionBook]:
        return {None: PartitionBook(self.parts.offsets[list(self.offsets)])}

    row_books = books

    @property
    def whole(self) -> MemoryGraph:
        return self.joined(range(self.parts.num_parts + 1), None)

    def joined(self, offsets: Sequence[int], part_id: int | None) -> MemoryGraph:
        """Returns a view with fewer parts, for jobs with fewer ranks than parts. Its part i joins the parts ``offsets[i]`` to ``offsets[i + 1] - 1``."""
        return replace(self, offsets=offsets, part_id=part_id)

    def original_id(self, n_id: Tensor) -> Tensor:
        return self.order[n_id]

    def split(self, name: str, part_id: int, type_: None = None) -> Tensor:
        """Returns the seeds of a part, int64 global ids. ``name`` has no effect, because this graph holds the seeds of one split."""
        return torch.cat(list(self.seeds[self.offsets[part_id] : self.offsets[part_id + 1]]))

    def workload(
        self, part_id: int, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False
    ) -> Workload:
        """Returns the seeds, fanouts and probabilities of a part, from which its cache is planned."""
        first, last = self.offsets[part_id], self.offsets[part_id + 1]
        is_known = last - first == 1 and (list(num_neighbors), batch_size) == self.known_for
        vip = self.vip[first] if is_known else None
        return Workload(self.graph, self.books[None], part_id, seeds, num_neighbors, batch_size, replace, vip)


def open_graph(
    data: Data | PartitionedGraph, parts: int | None, batches: Batches, send_as: Mapping[Any, str] | None = None
) -> tuple[PartitionedGraph | Callable[[PartitionOptions, Progress], MemoryGraph], dict[str | None, int]]:
    """Opens a graph. Returns the graph, and by vertex type the bytes of a row of ``x`` as it travels.

    For a ``Data``, a function that partitions the graph is returned instead of the graph. The function holds only what it needs of the ``Data``, so that the
    rest can be freed while METIS needs the memory.

    Raises:
        ValueError: ``parts``, ``batches`` or ``send_as`` do not fit the graph.
    """
    if isinstance(data, PartitionedGraph):
        if parts not in (None, data.num_parts):
            raise ValueError(
                f"{data.root} has {data.num_parts} parts, got parts={parts}; leave it out, or partition again"
            )
        return data, sent_row_bytes(data, send_as)
    if parts is None:
        raise ValueError("parts must be given for a graph that is not partitioned yet")
    if not batches.is_plain:
        raise ValueError(
            "batches with edges as seeds, times, weights, separate trees or draws with replacement are counted only on a dataset directory; "
            "write one with salientpp.partition first"
        )
    seeds, graph = batches.seeds, Graph.from_data(data)
    graph = Graph.trusted(graph.indptr, graph.indices)  # drops the user's edge ids, 8 bytes per edge
    splits = collect_splits(data, None, data.get("y"), graph.num_vertices)
    if seeds != "all" and seeds not in splits:
        raise ValueError(
            f"seeds must be 'all' or a split of the data ({', '.join(splits) or 'it has none'}), got {seeds!r}{did_you_mean(seeds, splits)}"
        )
    frames, columns = features_of(data)
    known: dict[Column, Any] = {(None, name): (rows.dtype, rows.shape[1:]) for name, rows in columns.items()}
    sizes: dict[Column, int] = {(None, name): rows[:1].nbytes for name, rows in columns.items()}
    given = formats_of_columns("send_as", send_as, {(None, name): frame for name, frame in frames.items()}, known)
    sizes |= {column: narrow.row_bytes for column, narrow in read_formats("send_as", given, known).items()}
    row_bytes = sum(sizes.values())
    chosen = None if seeds == "all" else splits[seeds]
    workload: dict[str, Any] = {"num_neighbors": batches.num_neighbors, "batch_size": batches.batch_size}

    def partitioned(options: PartitionOptions, progress: Progress) -> MemoryGraph:
        num_seeds = graph.num_vertices if chosen is None else chosen.numel()
        options, _ = options.decided(num_parts=parts, num_edges=graph.num_edges, num_seeds=num_seeds)
        # METIS blocks all other Python threads, so a clock on the screen stops.
        is_metis = isinstance(options.method, str) and options.method == "metis"
        progress.begin("partitioning (METIS shows no progress)" if is_metis else "partitioning")
        assigned = assign_for(graph, parts, options, splits=splits, seeds=chosen, **workload)
        numbering = number_vertices(graph, assigned, chosen, **workload)
        ids = torch.arange(graph.num_vertices, device="cpu") if chosen is None else numbering.new_id()[chosen]
        own = ids.sort().values
        owner = numbering.book.owner(own)
        return MemoryGraph(
            graph=relabel(graph, numbering),
            parts=numbering.book,
            seeds=[own[owner == part_id] for part_id in range(parts)],
            vip=list(numbering.vip),
            known_for=(list(batches.num_neighbors), batches.batch_size),
            order=numbering.order,
            quality={"edge_cut_fraction": assigned.edge_cut_fraction, "balance": assigned.balance},
            offsets=range(parts + 1),
        )

    return partitioned, {None: row_bytes}


def with_storage(graph: Any, storage_hosts: int) -> Any:
    """Returns the same graph for a job with this number of storage ranks: the last part of its views may then be empty."""
    if isinstance(graph, PartitionedGraph) and storage_hosts:
        return PartitionedGraph(graph.root, graph.manifest, None, opened_by=OpenedBy(storage_hosts))
    return graph


def _read_sent(part: PartitionedGraph, send_as: Mapping[Any, str] | None) -> dict[Column, Narrow]:
    """Returns the formats in which features travel. Features are ``x`` and the columns of a table ``tf``."""
    types = part.description.node_types
    tables = {(type_.name, name): frame for type_ in types for name, frame in type_.tables.items()}
    known = {
        (type_.name, each): (getattr(torch, type_.attributes[each]["dtype"]), type_.attributes[each]["row_shape"])
        for type_ in types
        for each in feature_columns(type_.attributes, type_.tables)
    }
    return read_formats("send_as", formats_of_columns("send_as", send_as, tables, known), known)


def sent_row_bytes(part: PartitionedGraph, send_as: Mapping[Any, str] | None) -> dict[str | None, int]:
    """Returns, by vertex type, the bytes of a row of the features as a run sends and caches it; 0 for types without features."""
    types = {type_.name: type_ for type_ in part.description.node_types}
    row_bytes = {
        name: sum(type_.row_bytes(each) for each in feature_columns(type_.attributes, type_.tables))
        for name, type_ in types.items()
    }
    for (name, attribute), format in _read_sent(part, send_as).items():
        narrow = types[name].narrow(attribute)
        if narrow is not None:
            words = attribute if name is None else str((name, attribute))
            raise ValueError(
                f"send_as names {words!r}, which {part.root} stores and sends as {narrow.format}; leave it out"
            )
        if not types[name].replicated:
            row_bytes[name] += format.row_bytes - types[name].row_bytes(attribute)
    return row_bytes
