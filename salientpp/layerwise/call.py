"""State of one inference on one rank: layers, batches of the part, and the rows before and after the current layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.arguments import as_amount
from salientpp.engine.option import integer
from salientpp.engine.source import BatchSource
from salientpp.graph.csc import runs_of_vertices
from salientpp.layerwise.layers import TRIED_ROWS, Network, digests_of, network_of, try_out
from salientpp.layerwise.normalisation import LayerEdges, Normalisation
from salientpp.layerwise.parts import (
    ROWS,
    ArrayParts,
    features_of,
    make_folder,
)
from salientpp.layerwise.products import Places
from salientpp.layerwise.scratch import MEMORY, mapped_rows
from salientpp.layerwise.uses import count_transfers_saved
from salientpp.loader.statistics import LoaderStats
from salientpp.predictions.part_files import ParquetParts
from salientpp.progress import Progress
from salientpp.ranks.placement import Placement
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange
from salientpp.store.rows import TensorRows, empty_rows, take_rows
from salientpp.store.target_lists import TargetLists

NO_ROWS = torch.empty(0, device="cpu")


@dataclass(eq=False)
class Call:
    """One call of :func:`inference` on one rank. Calling it with a batch computes and stores the next rows of the batch's targets.

    Attributes:
        names: 'edge_weight' and 'edge_attr' -> name of the edge attribute, or None.
        options: options for the engines.
        scratch, memory: as in :func:`inference`.
        number: position of the current layer in the network, from 0.
        stats: statistics of the engine of each finished layer that ran in batches.
        pushed: positions of the layers that ran as a :class:`~salientpp.layerwise.products.Product`, not in batches.
        present: rows of the part after the previous layer; empty before the first layer.
        following: rows of the part after the current layer.
        kept: rows of the part after each finished layer, if the network joins them at the end.
        uses: the result of :meth:`count_uses`; None before its first call.
        places: for layers that run as a ``Product``, the edges into the vertices of this rank's batches; None before the first such layer.
        lists: the neighbour lists of the part's vertices, with the edge attributes that layers take, named 'edge_weight' and 'edge_attr'.

    Attributes that are set with the first engine:
        like: empty tensors [0, ...] with the shape and dtype of each layer's rows.
        num_vertices: number of vertices of the whole graph, N.
        begin: the first global id of the part.
        ranges: batches of the part, as ranges of its vertices. The ranks of a part take them in turn.
        files: parts on disk whose rows this rank writes to ``out``: number of the part -> range [first, last) of its rows in :attr:`following`.
        same: values that the ranks compare, because they must be equal on all: name -> value.
    """

    model: Any
    data: PartitionedGraph | Data
    batch_edges: int
    names: Mapping[str, str | None]
    dtype: torch.dtype | None
    out: ArrayParts | ParquetParts | None
    progress: Progress
    options: Mapping[str, Any]
    scratch: Path | None = None
    memory: Any = None
    number: int = 0
    stats: list[LoaderStats] = field(default_factory=list)
    pushed: list[int] = field(default_factory=list)
    present: Tensor = NO_ROWS
    following: Tensor = NO_ROWS
    kept: list[Tensor] = field(default_factory=list)
    uses: Tensor | None = None
    places: Places | None = None
    network: Network = field(init=False)
    like: Sequence[Tensor] = field(init=False)
    lists: TargetLists = field(init=False)
    normalisation: Normalisation = field(init=False)
    num_vertices: int = field(init=False)
    begin: int = field(init=False)
    ranges: Sequence[tuple[int, int]] = field(init=False)
    placement: Placement = field(init=False)
    files: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    same: Mapping[str, Any] = field(init=False)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self.network.layers)

    @property
    def rows(self) -> dict[str, Tensor] | None:
        """Input rows of the current layer, by name; None: ``x`` of the partitioned graph."""
        return {ROWS[1]: self.present} if self.number else features_of(self.data)

    @property
    def own_ranges(self) -> Sequence[tuple[int, int]]:
        """The batches that this rank computes, as ranges of the part's vertices."""
        return self.ranges[self.placement.place :: self.placement.ranks_per_part]

    @property
    def most_memory(self) -> int:
        """Most bytes that sums and blocks of rows may take together, if layers keep their rows in files. Raises ValueError if ``memory`` is wrong."""
        amount = MEMORY if self.memory is None else as_amount(self.memory)
        if not isinstance(amount, int) or amount < 1:
            raise ValueError(f"memory must be a number of bytes or text such as '2GiB', got {self.memory!r}")
        if self.memory is not None and self.scratch is None:
            raise ValueError(
                f"memory={self.memory!r} applies only to rows in files; pass scratch= too, or leave memory out"
            )
        return amount

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory, or a mapped file, for the part's rows after a layer."""
        if self.scratch is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return mapped_rows(self.scratch, shape, dtype)

    def count_uses(self) -> Tensor:
        """Returns the scores by which the cache chooses rows, from :func:`count_transfers_saved`. Only the first call counts; later calls return the result."""
        if self.uses is None:
            self.uses = count_transfers_saved(self.lists, self.own_ranges, self.num_vertices)
        return self.uses

    @torch.no_grad()
    def __call__(self, batch: Data) -> None:
        layer = self.network.layers[self.number]
        edges = LayerEdges(
            batch.edge_index, batch.n_id, batch.batch_size, batch.get("edge_weight"), batch.get("edge_attr")
        )
        first = int(batch.n_id[0]) - self.begin
        try:
            rows = layer(batch.x, edges, self.normalisation)
        except Exception as error:  # for example, some layers of PyG need at least one edge
            raise ValueError(
                f"layer {self.number} ({layer}) failed for {batch.batch_size} vertices and {batch.edge_index.size(1)} edges into them: "
                f"{type(error).__name__}: {error}; another batch_size gives other batches"
            ) from error
        self.store(first, first + batch.batch_size, rows)

    def store(self, first: int, last: int, rows: Tensor) -> None:
        """Stores the next rows of the part's vertices [first, last)."""
        layer, here = self.network.layers[self.number], slice(first, last)
        if self.is_last and self.network.join is not None:
            rows = self.network.join([*(kept[here].to(rows.device) for kept in self.kept), rows])
        expected = self.following[here]
        if rows.dtype != expected.dtype or rows.shape != expected.shape:
            raise ValueError(
                f"layer {self.number} ({layer}) must return rows as in the trial, expected {expected.dtype} {list(expected.shape)}, "
                f"got {rows.dtype} {list(rows.shape)}"
            )
        self.following[here] = rows.to("cpu")
        self.progress.advance()

    def prepare(self, source: BatchSource, held: PartitionedGraph | None) -> None:
        """Prepares the inference on this rank: finds the layers, their edge attributes and the part's batches, and tries the layers. Not collective.

        ``held`` is the view whose part has this rank's rows; None for a ``Data``.
        """
        batch_size = integer("vertices of a batch", 1)("batch_size", self.options["batch_size"])
        batch_edges = integer("edges into the vertices of a batch", 1)("batch_edges", self.batch_edges)
        _ = self.most_memory  # raises
        if ROWS[1] not in source.rows[None]:
            raise ValueError(
                "inference begins with x, but the data has none; add x to the data before it is partitioned"
            )
        network = network_of(self.model)
        self.lists = self._lists(source, held)
        edges = self.lists.columns
        for name in [name for name in edges if name not in network.takes]:
            raise ValueError(
                f"{name}={self.names[name]!r} is given, but no layer of the model takes {name}; leave it out"
            )
        given = source.delivered(ROWS)
        size = self.lists.indptr.numel() - 1
        tried = torch.arange(min(size, TRIED_ROWS), device="cpu") * size // min(max(1, size), TRIED_ROWS)
        x = take_rows(given, tried).to(self.dtype or given.dtype)
        weight, attr = (empty_rows(edges[name], 0) if name in edges else None for name in ("edge_weight", "edge_attr"))
        with torch.no_grad():
            self.network, self.like = try_out(network, x, weight, attr, torch.device(self.options["device"]))
        if self.scratch is not None:
            make_folder(self.scratch)
        if self.out is not None:
            self.files = {0: (0, size)} if held is None else _places_of_parts(held, source.exchange.part_id)
            num_parts = 1 if held is None else held.whole.num_parts
            self.out.check(self.files, num_parts, self.like[-1])
        self.num_vertices, self.begin = source.books[None].num_vertices, self.lists.first_target
        self.ranges = [
            (first, min(first + batch_size, last))
            for run_first, last in runs_of_vertices(self.lists.indptr, batch_edges)
            for first in range(run_first, last, batch_size)
        ]
        self.normalisation = Normalisation(self.lists, self.network.degrees("edge_weight" in edges))
        self.placement = source.exchange.placement
        self.same = {
            "layers": list(map(str, self.network.layers)),
            "batch_edges": batch_edges,
            **self.names,
            "degrees": self.normalisation.kinds,
            **digests_of(self.model),
        }

    def meet(self, source: BatchSource) -> None:
        """Gets the degrees of other parts' vertices from their owners, for layers that divide by degrees. Collective."""
        found = self.normalisation
        if found.kinds and source.travelling:
            # Its traffic is no batch's.
            exchange = Exchange(source.exchange.comm, source.books, source.exchange.placement)
            degrees = torch.empty((found.halo.numel(), len(found.kinds)), dtype=torch.float64, device="cpu")
            exchange.fetch_rows(None, {ROWS[1]: TensorRows(found.own)}, found.halo, {ROWS[1]: degrees})
            found.add_halo(degrees)

    def _lists(self, source: BatchSource, held: PartitionedGraph | None) -> TargetLists:
        """Returns :attr:`lists`. ``held`` is the view whose part has this rank's rows; None for a ``Data``."""
        names = {name: key for name, key in self.names.items() if key is not None}
        if held is not None:
            lists = TargetLists.of_part(held, source.exchange.part_id)
            known: dict[str, Any] = dict(lists.columns)
        else:
            lists = TargetLists.of_graph(source.sampler.topology.graph, {}, keeps_ids=bool(names))
            known = self.data.to_dict()
        columns = {}
        for name, key in names.items():
            value = known.get(str(key))
            if isinstance(value, Tensor) and value.dim() and value.size(0) == lists.num_edges:
                value = TensorRows(value.detach().cpu().contiguous())
            elif held is None or value is None:
                raise ValueError(
                    f"{name} must be the name of an edge attribute, a tensor with {lists.num_edges} rows, got {key!r}; the data has "
                    f"{', '.join(known) or 'none'}"
                )
            columns[name] = value
        return dataclasses.replace(lists, columns=columns)


def _places_of_parts(held: PartitionedGraph, part_id: int) -> dict[int, tuple[int, int]]:
    """Finds the parts on disk that are joined in part ``part_id`` of ``held``. Returns, for each, the range of its rows in the joined part."""
    parts, book = range(held.offsets[part_id], held.offsets[part_id + 1]), held.whole.book
    begin = book.range_of(parts.start)[0]
    return {part: (first - begin, last - begin) for part in parts for first, last in [book.range_of(part)]}
