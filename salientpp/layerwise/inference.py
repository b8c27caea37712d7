"""A model's output rows for every vertex, computed layer by layer over all ranks.

For each layer, a rank visits the vertices of its part in order, in batches with all their in-neighbours. An :class:`~salientpp.engine.engine.Engine` over
the layer's input rows fetches the rows of other parts. A rank holds the rows of its part before and after one layer, and a few batches.

The layer runs on every finished batch. If it fails, every rank raises an error with the same text. The ranks agree on the model before the first batch. After
each layer they check that all of them have completed it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from salientpp.batch.template import PartitionTemplate
from salientpp.engine.agreement import Facts
from salientpp.engine.basis import Basis
from salientpp.engine.connected import connect_part, placement_of
from salientpp.engine.epochs import Epochs
from salientpp.engine.option import integer
from salientpp.engine.run import Epoch
from salientpp.engine.seeds import vertex_seeds
from salientpp.engine.source import BatchSource, open_data, open_partition
from salientpp.files import check_output, write_whole
from salientpp.graph.csc import runs_of_vertices
from salientpp.layerwise.layers import Network, device_of, digests_of, evaluating, network_of, try_out
from salientpp.layerwise.normalisation import Edges, Normalisation
from salientpp.layerwise.uses import CacheOfUses, count_transfers_saved
from salientpp.loader.construction import connect, engine_together, facts_of, prepare_together
from salientpp.loader.statistics import LoaderStats
from salientpp.loader.values import Options
from salientpp.progress import Progress
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.ranks.placement import Placement
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import topology_of_part
from salientpp.sampling.schedule import Schedule, Turns
from salientpp.sampling.seeds import part_nodes
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange
from salientpp.store.rows import TensorRows, empty_rows
from salientpp.store.target_lists import TargetLists

#: Engines' name for the rows that go through the layers.
ROWS = (None, "x")

NO_ROWS = torch.empty(0, device="cpu")


def inference(
    model: torch.nn.Module | Sequence[Callable[..., Tensor]],
    data: PartitionedGraph | Data,
    *,
    batch_size: int = 1024,
    batch_edges: int = 2**20,
    edge_weight: str | None = None,
    edge_attr: str | None = None,
    replication_factor: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    num_workers: int = 0,
    depth: int = 10,
    process_group: Any = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Computes a model's output for every vertex, layer by layer from all neighbours. On a partitioned graph each rank gets the rows of its part.

    The result equals that of ``model(x, edge_index)`` on the whole graph in evaluation mode, up to rounding. On several ranks the call is collective: every
    rank makes it with the same model, and in the same order relative to its loaders. The model and its mode stay as they were.

    Args:
        model: one of PyG's basic models (``GraphSAGE``, ``GCN``, ``GAT``, ``GIN``, ``PNA``, ``EdgeCNN``), also in DDP, or a list. A list holds layers, which
            are called with (x, edge_index) and read only the in-neighbours of a vertex. It also holds functions of single rows, such as ``torch.relu`` or a
            ``BatchNorm``. Modules are set to evaluation mode; other functions must compute as in evaluation already. Layers that need more than one hop, or
            the whole graph, raise an error.
        data: a PyG ``Data`` (one process only) or a :class:`~salientpp.PartitionedGraph`. It must have ``x``.
        batch_size: most vertices per batch.
        batch_edges: most edges into the vertices of a batch, unless a single vertex has more.
        edge_weight, edge_attr: names of edge attributes of ``data``. Layers with an argument ``edge_weight`` or ``edge_attr`` get them. None:
            nothing is passed to them.
        replication_factor: α >= 0; during each layer a rank caches up to ``floor(α N / K)`` remote rows, those that most batches need. A row that only
            one batch needs is not cached.
        device: device of the batches and layers; None: the model's device. Rows of whole parts are on the CPU.
        dtype: dtype that ``x`` is converted to, batch by batch; None: as stored.
        num_workers, depth, process_group, timeout: as in :class:`~salientpp.NeighborLoader`.
        out: a folder, created if needed. When all rows of part k are computed, they are written to ``part-<k in five digits>.npy`` in it.
        progress: an object that shows progress, such as a :class:`~salientpp.ProgressBar`. On rank 0 it is told the number of finished batches of all layers.

    Returns:
        [n, ...] on the CPU. For a ``Data``, row i belongs to vertex i. For a partitioned graph, the rows of this rank's part, in the order of
        ``part.split("all")``; ``part.original_id(part.split("all"))`` returns the ids of these vertices in the user's data.

    Raises:
        ValueError, TypeError: an argument is wrong, or a layer needs more than one hop. Every rank raises it, and the text
            names the rank at fault.
        RuntimeError: a layer failed (:class:`~salientpp.engine.pipeline.StageError`), or a rank failed. Every rank raises it.
    """
    if isinstance(data, HeteroData) or getattr(data, "is_hetero", False):
        raise TypeError(
            f"inference needs a graph with one type, got a {type(data).__name__} with several; convert it with to_homogeneous(), or apply the layers "
            "yourself with a NeighborLoader for each type"
        )
    options = {
        "batch_size": batch_size, "device": device_of(model) if device is None else device, "num_workers": num_workers, "depth": depth,
        "process_group": process_group, "timeout": timeout, "replication_factor": replication_factor,
    }  # fmt: skip
    names = {"edge_weight": edge_weight, "edge_attr": edge_attr}
    return Inference(
        model, data, batch_edges, names, dtype, None if out is None else Path(out), progress or Progress(), options
    ).run()


@dataclass(eq=False)
class Inference:
    """One call of :func:`inference` on one rank. Calling it with a batch computes and stores the next rows of the batch's targets.

    Attributes:
        names: 'edge_weight' and 'edge_attr' -> name of the edge attribute, or None.
        options: options for the engines.
        stats: statistics of the engine of each finished layer.
        present: rows of the part after the previous layer; empty before the first layer.
        following: rows of the part after the current layer.
        kept: rows of the part after each finished layer, if the network joins them at the end.
        uses: the result of :meth:`count_uses`; None before its first call.
        lists: the neighbour lists of the part's vertices, with the edge attributes that layers take, named 'edge_weight' and 'edge_attr'.

    Attributes that are set with the first engine:
        like: empty tensors [0, ...] with the shape and dtype of each layer's rows.
        num_vertices: number of vertices of the whole graph, N.
        begin: the first global id of the part.
        ranges: batches of the part, as ranges of its vertices. The ranks of a part take them in turn.
        same: name -> value that must be equal on all ranks.
    """

    model: Any
    data: PartitionedGraph | Data
    batch_edges: int
    names: Mapping[str, str | None]
    dtype: torch.dtype | None
    out: Path | None
    progress: Progress
    options: Mapping[str, Any]
    stats: list[LoaderStats] = field(default_factory=list)
    present: Tensor = NO_ROWS
    following: Tensor = NO_ROWS
    kept: list[Tensor] = field(default_factory=list)
    uses: Tensor | None = None
    network: Network = field(init=False)
    like: Sequence[Tensor] = field(init=False)
    lists: TargetLists = field(init=False)
    normalisation: Normalisation = field(init=False)
    num_vertices: int = field(init=False)
    begin: int = field(init=False)
    ranges: Sequence[tuple[int, int]] = field(init=False)
    placement: Placement = field(init=False)
    same: Mapping[str, Any] = field(init=False)

    def run(self) -> Tensor:
        """Computes the final rows of this rank's part."""
        sampler = _sampler(self.data)
        with evaluating(self.model):
            while not self.stats or self.number < len(self.network.layers):
                layer = LayerRun(self, sampler)
                if not self.stats:
                    if self.placement.rank != 0:
                        self.progress = Progress()
                    number = len(self.own_ranges) * len(self.network.layers)
                    self.progress.begin("inference", number, "batches")
                layer.run()
                if self.network.join is not None:
                    self.kept.append(self.following)
                self.present, self.following = self.following, NO_ROWS
                self.stats.append(LoaderStats.of(layer.engine))
                del layer  # frees the rows of the previous layer
        return self.present

    @property
    def number(self) -> int:
        """Number of the current layer, counted from 0."""
        return len(self.stats)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self.network.layers)

    @property
    def rows(self) -> dict[str, Tensor] | None:
        """Rows that the current layer begins with; None: the part's ``x``."""
        return {ROWS[1]: self.present} if self.stats else _features(self.data)

    @property
    def own_ranges(self) -> Sequence[tuple[int, int]]:
        """Batches of this rank."""
        return self.ranges[self.placement.place :: self.placement.ranks_per_part]

    def count_uses(self) -> Tensor:
        """Returns the scores of the cache, :func:`count_transfers_saved`."""
        if self.uses is None:
            self.uses = count_transfers_saved(self.lists, self.own_ranges, self.num_vertices)
        return self.uses

    @torch.no_grad()
    def __call__(self, batch: Data) -> None:
        edges = Edges(batch.edge_index, batch.n_id, batch.batch_size, batch.get("edge_weight"), batch.get("edge_attr"))
        layer = self.network.layers[self.number]
        rows = layer(batch.x, edges, self.normalisation)
        first = int(batch.n_id[0]) - self.begin
        here = slice(first, first + batch.batch_size)
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
        """Finds the layers, their edge attributes and the batches of the part, and tries the layers out. It does not communicate.

        ``held`` is the view whose part has this rank's rows; None for a ``Data``.
        """
        batch_size = integer("vertices of a batch", 1)("batch_size", self.options["batch_size"])
        batch_edges = integer("edges into the vertices of a batch", 1)("batch_edges", self.batch_edges)
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
        x = torch.empty((0, *given.shape[1:]), dtype=self.dtype or given.dtype, device="cpu")
        weight, attr = (empty_rows(edges[name], 0) if name in edges else None for name in ("edge_weight", "edge_attr"))
        with torch.no_grad():
            self.network, self.like = try_out(network, x, weight, attr, torch.device(self.options["device"]))
        if self.out is not None:
            _check_folder(self.out, source.exchange.part_id, self.like[-1].dtype)
        self.num_vertices, self.begin = source.books[None].num_vertices, self.lists.first_target
        self.ranges = [
            (first, min(first + batch_size, last))
            for run_first, last in runs_of_vertices(self.lists.indptr, batch_edges)
            for first in range(run_first, last, batch_size)
        ]
        self.normalisation = Normalisation(self.lists, self.network.degrees("edge_weight" in edges))
        self.placement = source.exchange.placement
        digests = digests_of(self.model)
        self.same = {
            "layers": list(map(str, self.network.layers)),
            "batch_edges": batch_edges,
            **self.names,
            "degrees": self.normalisation.kinds,
            "parameters of the model (their digest)": digests["parameters"],
            "buffers of the model (their digest; under DDP the statistics of BatchNorm differ: broadcast them from one rank)": digests["buffers"],
        }  # fmt: skip

    def meet(self, source: BatchSource) -> None:
        """Gets the degrees of other parts' vertices. Collective."""
        found = self.normalisation
        if found.kinds and source.travelling:
            exchange = Exchange(
                source.exchange.comm, source.books, source.exchange.placement
            )  # its traffic is no batch's
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


class LayerRun:
    """Run of one layer over all vertices of a part, in order, in batches with all their in-neighbours. ``sampler`` is the sampler of a ``Data``, or None."""

    def __init__(self, call: Inference, sampler: NeighborSampler | None) -> None:
        self._call = call
        options = Options(
            seed=0, dtype=None if call.stats else call.dtype, columns=call.rows or (ROWS[1],),
            **{name: value for name, value in call.options.items() if name not in ("batch_size", "num_workers")},
        )  # fmt: skip
        words = "a torch_geometric.data.Data, or the result of salientpp.load"
        self._comm, self._device = connect(call.data, (Data, PartitionedGraph), words, options)
        prepared, everyone = prepare_together(self._comm, partial(self._prepare, options, sampler), "run a layer")
        source, options = prepared.source, prepared.options
        rank, size = self._comm.rank, self._comm.size
        by_rank = {first: number for facts in everyone for first, _, number, _ in facts.seeds}
        schedule = Ranges(
            num_seeds=source.seeds.number, unit=rank, place=0, logical_ranks_per_unit=1, seeds_per_logical_rank=[by_rank[other] for other in range(size)],
            logical_rank=rank, batch_size=1, shuffle=False, drop_last=False, uneven="exact", seed=0, ranges=call.own_ranges,
        )  # fmt: skip
        order = Turns([schedule], [range(other, other + 1) for other in range(size)])
        basis = Basis(
            self._comm, source, Epochs(0, source.exchange.placement, order), self._device, call.options["batch_size"], depth=options.depth,
            num_workers=call.options["num_workers"], dtype=options.dtype,
        )  # fmt: skip
        if not call.stats:
            self._reporting(partial(call.meet, source))
        fills_cache = any(facts.fills_cache for facts in everyone)
        ways = [CacheOfUses(options.replication_factor, call.count_uses)] if fills_cache else []
        self.engine = engine_together(basis, ways, "run a layer")

    # --- construction, together with the other ranks --------------------------------------------------------

    def _prepare(self, options: Options, sampler: NeighborSampler | None) -> Prepared:
        options, call = options.checked(self._device), self._call
        integer("threads", 0)("num_workers", call.options["num_workers"])
        source, held = self._open(sampler, options)
        if not call.stats:
            call.prepare(source, held)
        like = call.like[call.number]
        size = call.ranges[-1][1] if call.ranges else 0
        call.following = torch.empty((size, *like.shape[1:]), dtype=like.dtype, device="cpu")
        source = dataclasses.replace(
            source,
            template=PartitionTemplate({None: call.lists.columns}, {None: call.lists.first_edge}),
            rows={None: {ROWS[1]: source.rows_of(ROWS)}},
            exchanged=[ROWS],
            seed_columns=[],
        )
        # The schedule counts batches instead of seeds, because batches differ in size.
        seeds = [[self._comm.rank, self._comm.rank + 1, len(call.own_ranges), ""]]
        facts = facts_of(source, seeds, options, {"batch_size": call.options["batch_size"]}, ())
        return Prepared(source, dataclasses.replace(facts, same={**facts.same, **call.same}), options)

    def _open(self, sampler: NeighborSampler | None, options: Options) -> tuple[BatchSource, PartitionedGraph | None]:
        """Opens the data that batches are drawn from, and the view of it whose part has this rank's rows. Every vertex of the part is a seed."""
        data = self._call.data
        if sampler is not None:
            nodes = torch.arange(data.num_nodes, device="cpu")
            seeds = vertex_seeds(sampler, NodeSamplerInput(None, nodes, None, None))
            return open_data(data, self._comm, sampler, seeds, columns=options.columns), None
        connected = connect_part(data, self._comm, placement_of(data, self._comm))
        held = connected.held
        sampler = NeighborSampler(held.graph if held.topology == "whole" else topology_of_part(held, None, None), [-1])
        inputs, _ = part_nodes(connected.own, connected.own_part, "all", None, None)
        seeds = vertex_seeds(sampler, inputs)
        return open_partition(connected, sampler, seeds, columns=options.columns, custom_cls=None), held

    def _reporting(self, action: Callable[[], None]) -> None:
        """Calls a collective action. An error on this rank is reported to the others."""
        try:
            action()
        except BaseException as error:
            self._comm.report_failure(
                f"rank {self._comm.rank}{self._comm.of} could not run a layer: {type(error).__name__}: {error}"
            )
            raise

    # --- the layer ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Applies the layer to every vertex of the part."""
        call = self._call
        for _ in Epoch(self.engine.run(0, finish=call)):
            pass
        self.engine.close()  # answers the others, which may still need the current rows
        self._together(self._share_within_the_part)
        if call.is_last and call.out is not None:
            self._together(partial(self._write, call.out))

    def _together(self, action: Callable[[], None]) -> None:
        """Calls ``action``. If it raises on one rank, every rank raises."""
        error = None
        try:
            action()
        except Exception as raised:
            error = raised
        try:
            self._comm.gather_facts({}, error, f"end layer {self._call.number}", RuntimeError)
        finally:
            error = None  # otherwise this frame and the traceback would reference each other

    def _share_within_the_part(self) -> None:
        """Exchanges rows, batch by batch, between the ranks of one part, each of which has computed some of the part's batches."""
        placement, ranges, rows = self._call.placement, self._call.ranges, self._call.following
        places = placement.ranks_per_part
        if places == 1:
            return
        first_rank = placement.rank - placement.place
        before, after = [0] * first_rank, [0] * (self._comm.size - first_rank - places)
        for index in range(self.engine.basis.epochs.order.num_rounds or 0):
            batches = ranges[index * places : (index + 1) * places]
            lengths = [last - first for first, last in batches] + [0] * (places - len(batches))
            own = rows[slice(*batches[placement.place])] if placement.place < len(batches) else rows[:0]
            send = [*before, *[len(own)] * places, *after]
            arrived = self._comm.all_to_all(torch.cat([own] * places), send, [*before, *lengths, *after]).wait()
            for (first, last), piece in zip(batches, arrived.split(lengths)):
                rows[first:last] = piece

    def _write(self, folder: Path) -> None:
        placement, rows = self._call.placement, self._call.following.numpy()
        if placement.place == 0:
            write_whole(_file_of(folder, placement.part_id), lambda file: np.save(file, rows))


@dataclass(frozen=True, eq=False)
class Ranges(Schedule):
    """Schedule whose batches are given, as ranges of the part's vertices; ``seeds_per_logical_rank`` counts batches instead of seeds."""

    ranges: Sequence[tuple[int, int]] = ()

    def batches(self, epoch: int) -> list[Tensor]:
        return [torch.arange(*one, device="cpu") for one in self.ranges]


@dataclass(frozen=True, eq=False)
class Prepared:
    """Preparations of a layer on one rank, before it communicates with the others."""

    source: BatchSource
    facts: Facts
    options: Options


def _file_of(folder: Path, part_id: int) -> Path:
    return folder / f"part-{part_id:05d}.npy"


def _check_folder(folder: Path, part_id: int, dtype: torch.dtype) -> None:
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        raise ValueError(
            f"rows of {dtype} cannot be written to a .npy file; append a function to the layers that converts the rows to another dtype"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be created ({error.strerror}); choose another") from None
    check_output(_file_of(folder, part_id))


def _features(data: PartitionedGraph | Data) -> dict[str, Tensor] | None:
    """Returns ``x`` of a ``Data`` in a form that a loader can read; None for a partitioned graph, which has its own rows."""
    if not isinstance(data, Data) or not isinstance(data.get("x"), Tensor):
        return None
    x = data.x.detach().cpu()
    return {ROWS[1]: x.contiguous() if x.layout == torch.strided else x}


def _sampler(data: PartitionedGraph | Data) -> NeighborSampler | None:
    """Makes the sampler of a ``Data``, once for all layers. Returns None for a partitioned graph."""
    if not isinstance(data, Data):
        return None
    adj_t = data.get("adj_t")
    if data.get("edge_index") is None and adj_t is not None:
        values = adj_t.values() if isinstance(adj_t, Tensor) else adj_t.storage.value()
        if values is not None and bool((values != 1).any()):
            raise ValueError(
                "data.adj_t has values other than 1; pass the graph as edge_index, and the values as an attribute named by edge_weight="
            )
    return NeighborSampler(data, [-1])
