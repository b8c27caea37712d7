"""Loads all vertices that a host needs before the training, and divides them among the host's ranks.

The host's graph is the subgraph that its inner vertices and the picked vertices of other hosts induce (:mod:`salientpp.fullgraph.expansion`). The host's
ranks divide this graph. In a training step, rows travel between the ranks of a host only. Hosts exchange sums: gradients of parameters, losses and statistics
of batch normalisation. The idea is shared preloading in GraNNDis (Song et al., PACT 2024, arXiv:2311.06837).

A host numbers its vertices from 0, rank after rank. The inner vertices of a rank come before its picked vertices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Ranks, Route, width_of
from salientpp.fullgraph.expansion import Expansion, Preload, expanded, gathered
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.rank_graph import Summing
from salientpp.graph.csc import Graph
from salientpp.partitioning.assign import assign_parts
from salientpp.store.rows import TensorRows, take_rows
from salientpp.store.target_lists import TargetLists


@dataclass(eq=False, kw_only=True)
class PreloadedGraph(LocalGraph):
    """One rank's part of a host's graph. :func:`salientpp.fullgraph.local` makes it if ``preload`` is given.

    ``offsets``, ``outer`` and ``global_ids`` use the host's numbers of vertices. ``n_id`` and ``e_id`` are global ids.

    Attributes:
        ranks: the ranks of the host, which exchange rows in a step.
        whole: the part of the whole graph over all ranks of the job, without rows of vertices.
        preload: the user's options, which decide what vertices of other hosts the host keeps.
        vertex_ids: int64 [n], global ids of this rank's vertices.
        edge_ids: int64 [e], ids of the edges in ``lists``.
        counted: number of this rank's inner vertices, which come first. Losses and statistics count only these.
        route: brings rows of this rank's vertices, by ascending id, from their owners in ``whole``.
        preloaded_rows: number of this rank's vertices whose rows came from other hosts.
    """

    whole: LocalGraph = field(repr=False)
    preload: Preload
    vertex_ids: Tensor = field(repr=False)
    edge_ids: Tensor = field(repr=False)
    counted: int
    route: Route = field(repr=False)
    preloaded_rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_id, self.e_id = self.vertex_ids, self.edge_ids

    @property
    def job(self) -> Ranks:
        return self.whole.ranks

    @property
    def num_counted(self) -> int:
        return self.counted

    @property
    def num_vertices(self) -> int:
        return self.whole.num_vertices

    def over_all_edges(
        self, compute: Summing, edge_index: Tensor, edge_weight: Tensor | None, what: Hashable
    ) -> Tensor:
        whole = self.whole
        wrong = None if _is_unwritten(edge_index, self.edge_index) else "edges"
        names = [name for name, column in self.edge_tensors.items() if _is_unwritten(edge_weight, column)]
        if wrong is None and edge_weight is not None and not names:
            wrong = "weights"
        if wrong is not None:
            raise ValueError(
                f"a preloaded part normalises by degrees of the whole graph, which are known only for its edges and edge attributes as loaded, but the model "
                f"got other {wrong}; pass part.edge_index and an edge attribute of the part, never written to, or open the part without preload"
            )
        weight = None if edge_weight is None else getattr(whole, names[0])
        values = compute(whole.edge_index, weight, whole.num_own)
        arrived = self.job.fetch(values, self.route, "normalisation")
        if not arrived.numel():
            return values.new_ones(self.num_own)  # the row of a rank without vertices
        return arrived[self.n_id.argsort().argsort().to(arrived.device)]


def _is_unwritten(tensor: Tensor | None, own: Tensor) -> bool:
    """True if ``tensor`` is the part's tensor ``own`` with the contents that were loaded: never written to, and without a gradient."""
    return tensor is own and not own.requires_grad and (own.is_inference() or own._version == 0)


def preloaded(whole: LocalGraph, preload: Preload, sizes: Sequence[int]) -> PreloadedGraph:
    """Loads the host's graph and divides it among the host's ranks. Collective over all ranks of the job.

    Args:
        whole: this rank's part of the whole graph. Its rows of vertices are removed.
        sizes: number of ranks on each host, in the order of the ranks.
    """
    job = whole.ranks
    with job.reporting("preloading"):
        bounds = next(each for each in pairwise(accumulate(sizes, initial=0)) if job.rank in range(*each))
        host = job.among(range(*bounds))
        inner = range(whole.offsets[bounds[0]], whole.offsets[bounds[1]])
        found = expanded(whole, host, inner, preload)
        edges = _Induced.of(found)
        owner = _divided(job, host, edges, max(sizes) > 1, preload.seed)
        # The numbers of the host's vertices: by rank, then inner vertices first, then by id.
        ids, is_picked = edges.vertices, edges.is_picked
        order = (2 * owner + is_picked).argsort(stable=True)
        offsets = [0, *torch.bincount(owner, minlength=host.size).cumsum(0).tolist()]
        edges = edges.sent(host, owner, order)
        own = order[offsets[host.rank] : offsets[host.rank + 1]]
        wanted = ids[own].sort().values
        route = Route.asking(job, wanted, whole.offsets)
        rows, splits = _loaded(whole, host, bounds, route, ids[own])
        counted = int((~is_picked[own]).sum())
        for name, each in rows.items():
            if name.endswith("_mask") and each.dtype == torch.bool:
                each[counted:] = False  # a picked vertex counts on its own host
        others = [count for rank, count in enumerate(route.recv_counts) if rank not in range(*bounds)]
        whole.node_rows = {}
        return PreloadedGraph(
            host,
            edges.lists(offsets[host.rank : host.rank + 2], whole.lists.num_edges),
            tuple(offsets),
            rows,
            {name: mask[:counted].nonzero().flatten() for name, mask in splits.items()},
            whole=whole,
            preload=preload,
            vertex_ids=ids[own],
            edge_ids=edges.e_id,
            counted=counted,
            route=route,
            preloaded_rows=sum(others),
        )


def _loaded(
    whole: LocalGraph, host: Ranks, bounds: tuple[int, int], route: Route, ids: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fetches attributes and splits (bool [n]), by name, of the vertices ``ids`` [n]. Collective over the job."""
    job, here = whole.ranks, range(*bounds)
    place = ids.argsort().argsort()
    masks = {name: getattr(whole, f"{name}_mask") for name in whole.splits}
    loaded: list[Tensor] = []
    for rows in [*whole.node_rows.values(), *masks.values()]:
        job.agree("to load rows")
        sent = rows.index_select(0, route.send).to(job.comm.device).contiguous()
        arrived = job.arrived(job.comm.all_to_all(sent, route.send_counts, route.recv_counts))
        for rank, count in enumerate(route.recv_counts):
            if rank != job.rank:
                (host if rank in here else job).received["preload"] += count * width_of(rows)
        loaded.append(arrived[place.to(arrived.device)])
    number = len(whole.node_rows)
    return dict(zip(whole.node_rows, loaded)), {name: mask.cpu() for name, mask in zip(masks, loaded[number:])}


def _divided(job: Ranks, host: Ranks, edges: _Induced, is_shared: bool, seed: int) -> Tensor:
    """Divides the host's graph among its ranks: returns the rank of each vertex, int64 [s]. Collective over the job.

    METIS divides it, balanced in vertices and edges.

    Args:
        is_shared: True if some host of the job has several ranks.
    """
    number = edges.vertices.numel()
    owner = torch.arange(number, device="cpu") * host.size // max(1, number)
    if not is_shared:
        return owner
    is_cut = 1 < host.size <= number
    ends = [gathered_at_first(host, each) for each in (edges.target, edges.source)]
    with job.comm.patient():  # hosts take different times
        job.agree("to divide the graphs of the hosts")
    with job.comm.patient(), job.comm.together("divide the graph of its host"):  # a partitioner may take minutes
        if is_cut and host.rank == 0:
            target, source = ends[0].sort(stable=True).values, ends[1][ends[0].argsort(stable=True)]
            indptr = torch.nn.functional.pad(torch.bincount(target, minlength=number).cumsum(0), (1, 0))
            owner = assign_parts(Graph(indptr, source), host.size, seed=seed).assignment
    if not is_cut:
        return owner
    return gathered(host, owner if host.rank == 0 else owner[:0])


def gathered_at_first(ranks: Ranks, values: Tensor) -> Tensor:
    """Returns the concatenated ``values`` [n] of all ranks on the first rank; empty on others. Collective."""
    counts = [number for (number,) in ranks.gather_numbers("to gather edges", [values.numel()])]
    nothing = [0] * (ranks.size - 1)
    come = counts if ranks.rank == 0 else [0] * ranks.size
    return ranks.comm.all_to_all(values, [values.numel(), *nothing], come).wait()


@dataclass(frozen=True, eq=False)
class _Induced:
    """Edges of the graph that one host computes on, as far as this rank holds them.

    Attributes:
        vertices: int64 [s], ascending ids of all vertices of the graph.
        is_picked: bool [s], True for vertices of other hosts.
        target, source: int64 [e], positions among ``vertices``; after :meth:`sent`, the host's numbers of vertices.
        e_id: int64 [e], ids of the edges.
        columns: name -> rows [e, ...].
    """

    vertices: Tensor
    is_picked: Tensor
    target: Tensor
    source: Tensor
    e_id: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, found: Expansion) -> _Induced:
        """Selects, from the edges that this rank has read, those between two vertices of the host's graph."""
        inner, picked = torch.arange(found.inner.start, found.inner.stop, device="cpu"), found.picked
        vertices, order = torch.cat([inner, picked]).sort()
        ends: list[Tensor] = []  # [3, e]
        columns: list[dict[str, Tensor]] = []
        for targets, edges in found.reads:
            source = torch.searchsorted(vertices, edges.source).clamp_(max=max(0, vertices.numel() - 1))
            kept = (vertices[source] == edges.source).nonzero().flatten()
            target = torch.searchsorted(vertices, targets)[edges.target[kept]]
            ends.append(torch.stack([target, source[kept], edges.e_id[kept]]))
            columns.append({name: take_rows(rows, edges.row[kept]) for name, rows in edges.columns.items()})
        whole = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
        target, source, e_id = torch.cat(ends, 1)
        return cls(vertices, order >= inner.numel(), target, source, e_id, whole)

    def sent(self, host: Ranks, owner: Tensor, order: Tensor) -> _Induced:
        """Sends each edge to the rank of its target. Collective over the host.

        Returns the edges that arrive, ordered by target. Their ends are the host's numbers of vertices.

        Args:
            owner: int64 [s], the rank that gets each vertex.
            order: int64 [s], for each of the host's numbers, the position of its vertex among ``vertices``.
        """
        number = torch.empty_like(order)
        number[order] = torch.arange(order.numel(), device="cpu")
        to = owner[self.target]
        going = to.argsort(stable=True)
        counts = torch.bincount(to, minlength=host.size).tolist()
        come = [numbers[host.rank] for numbers in host.gather_numbers("to send edges", counts)]
        moved: list[Tensor] = []
        for rows in (number[self.target], number[self.source], self.e_id, *self.columns.values()):
            host.agree("to send edges")
            moved.append(host.comm.all_to_all(rows[going].contiguous(), counts, come).wait())
        by_target = moved[0].argsort(stable=True)  # the order of a list stays
        target, source, e_id, *columns = (rows[by_target] for rows in moved)
        return _Induced(self.vertices, self.is_picked, target, source, e_id, dict(zip(self.columns, columns)))

    def lists(self, bounds: Sequence[int], num_edges: int) -> TargetLists:
        """Groups the edges by target, for the vertices with the host's numbers ``bounds[0]`` to ``bounds[1] - 1``."""
        begin, end = bounds
        counts = torch.bincount(self.target - begin, minlength=end - begin)
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        columns = {name: TensorRows(rows) for name, rows in self.columns.items()}
        return TargetLists(indptr, TensorRows(self.source), columns, num_edges, first_target=begin)
