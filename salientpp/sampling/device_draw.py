"""Draws neighbourhoods on an accelerator: the samples of :func:`salientpp.ops.sample_neighbors`, bit for bit.

Kernels draw and number the vertices (:mod:`salientpp.sampling.device_kernels`), and torch's operators do the rest. The host waits for the device once or
twice per hop, to learn how many edges and new vertices the hop has. So only sampling threads should call this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.ids import first_outside
from salientpp.store.assembly import has_kernel, has_triton

#: Arrays of a graph take at most this share of the device's free memory. Larger graphs stay in pinned host memory.
SHARE_OF_FREE_MEMORY = 0.5


def can_draw_on(device: torch.device) -> bool:
    """Returns True if this module can draw on the device: a CUDA device with Triton, or any device if Triton interprets kernels (``TRITON_INTERPRET=1``)."""
    return has_kernel(device) or (has_triton() and os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True, eq=False)
class DeviceGraph:
    """Arrays of a graph in memory that the kernels can read: on the device, or in pinned memory of the host.

    Attributes:
        indptr: int64 [N + 1]. The edges into vertex v have the positions indptr[v] to indptr[v + 1] - 1 in the arrays below.
        lists: [E], the source of each edge, int32 or int64. If ``is_linked``, int64 links: the source in the lower 32 bits, the edge's id in the upper 32.
        ids: int64 [E], the id of each edge; if ``is_linked``, the same tensor as ``lists``. None: an edge's position is its id.
        is_linked: True if ``lists`` holds links.
        device: device of the kernels.
    """

    indptr: Tensor
    lists: Tensor
    ids: Tensor | None
    is_linked: bool
    device: torch.device

    @classmethod
    def of(cls, graph: Graph, device: torch.device) -> DeviceGraph:
        """Copies the arrays of a graph to the device, or to pinned memory if they take more than half of the device's free memory.

        Raises:
            ValueError: an array of a memory-mapped graph is corrupt, or a vertex has too many neighbours.
        """
        lists = graph.indices if graph.links is None else graph.links
        ids = graph.edge_id if graph.links is None else graph.links
        _check(graph)
        arrays = [graph.indptr, lists] if ids is None or ids is lists else [graph.indptr, lists, ids]
        if device.type == "cpu":
            there = arrays
        elif sum(array.nbytes for array in arrays) > SHARE_OF_FREE_MEMORY * _free_memory(device):
            there = [array.pin_memory() for array in arrays]
        else:
            there = [array.to(device) for array in arrays]
        return cls(there[0], there[1], None if ids is None else there[-1], graph.links is not None, device)

    @property
    def num_vertices(self) -> int:
        return self.indptr.numel() - 1

    @property
    def nbytes(self) -> int:
        arrays = {id(array): array for array in (self.indptr, self.lists, self.ids) if array is not None}
        return sum(array.nbytes for array in arrays.values())

    def new_table(self) -> Tensor:
        """Returns scratch memory for one thread's :func:`sample_neighbors`: int32 [N], the index of each vertex in the batch while it is drawn."""
        from salientpp.sampling.device_kernels import UNSEEN

        return torch.full((self.num_vertices,), UNSEEN, dtype=torch.int32, device=self.device)


def _free_memory(device: torch.device) -> int:
    return torch.get_device_module(device).mem_get_info(device)[0]


def _check(graph: Graph) -> None:
    """Checks that kernels read nothing outside the arrays. Kernels cannot report an array that was altered on disk."""
    graph.check_lists()
    if graph.num_edges >= 2**31 and int(graph.in_degree().max()) >= 2**31:
        raise ValueError("a vertex has 2^31 neighbours or more, too many to draw from on a device; sample on the host")


def check_device_fanouts(fanouts: Sequence[int]) -> None:
    """Raises ValueError if a fanout is larger than kernels can draw."""
    from salientpp.sampling.device_kernels import MOST_DRAWS

    for hop, fanout in enumerate(fanouts):
        if not -1 <= fanout <= MOST_DRAWS:
            raise ValueError(
                f"a device draws 0 to {MOST_DRAWS} neighbours per vertex, or all (-1), got {fanout} at hop {hop}; use a smaller fanout, or sample on the host"
            )


def sample_neighbors(
    graph: DeviceGraph, table: Tensor, seeds: Tensor, fanouts: Sequence[int], batch_key: int, replace: bool = False
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Samples the neighbourhood of ``seeds`` on the device's current stream. The host waits for this stream.

    Args:
        table: from :meth:`DeviceGraph.new_table`. It is unchanged on return. After an error it must not be used again.
        seeds: int64 [B], on the host.
        fanouts, batch_key, replace: as in :func:`salientpp.ops.sample_neighbors`.

    Returns:
        ``n_id`` int64 [n], and int64 [3, e] with local ids of sources, local ids of targets and ids of edges, both on the device. Then the numbers of
        vertices and of edges by hop, as :func:`salientpp.ops.sample_neighbors` returns them.

    Raises:
        ValueError: a fanout is too large.
        RuntimeError: a seed is out of range, or a batch is too large.
    """
    from salientpp.sampling.device_kernels import UNSEEN

    check_device_fanouts(fanouts)
    outside = first_outside(seeds, graph.num_vertices)
    if outside is not None:
        raise RuntimeError(f"seeds[{outside}] must be in [0, {graph.num_vertices}), got {int(seeds[outside])}")
    frontier = seeds.to(graph.device)
    # A repeated seed keeps its place in n_id; edges refer to its first place.
    places = torch.arange(frontier.numel(), dtype=torch.int32, device=graph.device)
    table.scatter_reduce_(0, frontier, places, "amin")
    found, edges = [frontier], [torch.empty((3, 0), dtype=torch.int64, device=graph.device)]
    first_target = 0
    for hop, fanout in enumerate(fanouts):
        num_found = first_target + frontier.numel()
        position, owner = _slots(graph, frontier, fanout, batch_key, hop, replace, num_found)
        frontier, drawn = _find(graph, table, position, owner, first_target, fanout, num_found)
        first_target = num_found
        found.append(frontier)
        edges.append(drawn)
    n_id = torch.cat(found)
    table.index_fill_(0, n_id, UNSEEN)
    num_nodes, num_edges = [ids.numel() for ids in found], [drawn.size(1) for drawn in edges[1:]]
    return n_id, torch.cat(edges, dim=1), num_nodes, num_edges


def _slots(
    graph: DeviceGraph, frontier: Tensor, fanout: int, batch_key: int, hop: int, replace: bool, num_found: int
) -> tuple[Tensor, Tensor | None]:
    """Draws the neighbours of a hop. Each vertex of the frontier has numbered slots, one for each neighbour that it may draw.

    Returns:
        The position in the graph's lists of the edge drawn in each slot, int32 or int64 [slots], with -1 in unused slots. Then the index in ``frontier``
        of each slot's vertex, int64 [slots], or None if each vertex has ``fanout`` slots.
    """
    from salientpp.sampling import device_kernels as kernels

    size, device = frontier.numel(), graph.device
    dtype = torch.int32 if graph.lists.numel() < 2**31 else torch.int64
    if size == 0 or fanout == 0:
        return torch.empty(0, dtype=dtype, device=device), None
    if fanout > 0:
        _check_slots(hop, size * fanout, num_found)
        position = torch.empty(size * fanout, dtype=dtype, device=device)
        kernels.draw(frontier, graph.indptr, position, fanout, batch_key, hop, replace)
        return position, None
    begin, degree = torch.empty((2, size), dtype=torch.int64, device=device)
    kernels.read_lists(frontier, graph.indptr, begin, degree)
    end = degree.cumsum(0)
    total = int(end[-1])
    _check_slots(hop, total, num_found)
    owner = torch.repeat_interleave(degree, output_size=total)
    position = torch.arange(total, device=device) + (begin - end + degree)[owner]
    return position, owner


def _check_slots(hop: int, num_slots: int, num_found: int) -> None:
    from salientpp.sampling.device_kernels import FIRST_MARK

    if num_found + num_slots >= FIRST_MARK:
        raise RuntimeError(
            f"a hop on a device must have fewer than {FIRST_MARK} edges and earlier vertices in all, got up to {num_slots} edges and {num_found} vertices at "
            f"hop {hop}; use a smaller batch_size or smaller fanouts, or sample on the host"
        )


def _find(
    graph: DeviceGraph,
    table: Tensor,
    position: Tensor,
    owner: Tensor | None,
    first_target: int,
    fanout: int,
    num_found: int,
) -> tuple[Tensor, Tensor]:
    """Returns the new vertices of a hop in order of discovery, int64 [n], and its edges, int64 [3, e].

    Args:
        position, owner: the drawn slots, as :func:`_slots` returns them.
        first_target: index in the batch of the first vertex of the frontier.
        num_found: number of vertices found in earlier hops, with the seeds.
    """
    from salientpp.sampling import device_kernels as kernels

    slots, device = position.numel(), graph.device
    num_edges = num_new = 0
    if slots:
        small = graph.is_linked or graph.num_vertices < 2**31
        source = torch.empty(slots, dtype=torch.int32 if small else torch.int64, device=device)
        kernels.mark(position, graph.lists, graph.is_linked, source, table)
        flags = torch.empty(slots, dtype=torch.int64, device=device)
        kernels.flag(position, source, table, flags)
        sums = flags.cumsum(0)
        num_edges, num_new = divmod(int(sums[-1]), 2**32)
    new = torch.empty(num_new, dtype=torch.int64, device=device)
    edges = torch.empty((3, num_edges), dtype=torch.int64, device=device)
    if num_edges:
        ids, linked = graph.ids, graph.is_linked
        kernels.finish(
            position, source, table, sums, owner, ids, linked, new, edges, first_target, fanout, num_found
        )  # fmt: skip
    return new, edges
