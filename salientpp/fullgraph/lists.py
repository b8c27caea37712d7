"""Neighbour lists of other ranks' vertices in full-graph training.

A rank holds the lists of its own vertices. Lists of other vertices come from their owners, and only a plan that recomputes layers needs them. A rank
with a ``Data`` holds all lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from salientpp.fullgraph.exchange import Ranks, Route
from salientpp.store.rows import TensorRows
from salientpp.store.target_lists import Edges, TargetLists, positions_of


class OtherLists:
    """Gets the neighbour lists of other ranks' vertices from their owners.

    Args:
        own: the lists of this rank's vertices. If every rank has the whole graph: the lists of all vertices.
        offsets: the first vertex of each rank, and N at the end.
    """

    def __init__(self, ranks: Ranks, own: TargetLists, offsets: tuple[int, ...]) -> None:
        self._ranks, self._own, self._offsets = ranks, own, offsets

    def into(self, targets: Tensor, with_rows: bool = False) -> Edges:
        """Gets all edges into the vertices ``targets`` of other ranks, distinct global ids int64 [m]. Collective.

        Args:
            with_rows: True: also get ids and attributes of edges. False: the result may lack them.
        """
        if self._own.is_whole:
            return self._own.into(targets)
        wanted, order = targets.sort()
        asked, route = self._ask(wanted)
        edges, numbers = self._own.into(asked), self._own.degrees(asked)
        counts = self._send(numbers, route.send_counts, route.recv_counts)
        send, receive = _sums(numbers, route.send_counts), _sums(counts, route.recv_counts)
        source, e_id, columns = self._send(edges.source, send, receive), None, {}
        if with_rows:
            e_id = self._send(edges.e_id, send, receive)
            columns = {name: TensorRows(self._send(edges.rows(name), send, receive)) for name in edges.columns}
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device="cpu")
        target, position = positions_of(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), place)
        none = position[:0]
        return Edges(source[position], target, none if e_id is None else e_id[position], position, columns)

    def degrees(self, targets: Tensor) -> Tensor:
        """Gets the in-degrees of other ranks' vertices ``targets``, ascending global ids int64 [m]. Collective."""
        if self._own.is_whole:
            return self._own.degrees(targets)
        asked, route = self._ask(targets)
        return self._send(self._own.degrees(asked), route.send_counts, route.recv_counts)

    def _ask(self, wanted: Tensor) -> tuple[Tensor, Route]:
        """Tells the owners which lists this rank wants. Returns the vertices whose lists other ranks want from this one, and the route."""
        route = Route.asking(self._ranks, wanted, self._offsets)
        return route.send.cpu() + self._own.first_target, route

    def _send(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._ranks.comm.all_to_all(rows.contiguous(), send, receive).wait()


def _sums(counts: Tensor, sizes: Sequence[int]) -> list[int]:
    """Returns the sum of each group of ``counts``: the first ``sizes[0]`` entries, the next ``sizes[1]``, and so on."""
    return [int(group.sum()) for group in counts.split(list(sizes))]
