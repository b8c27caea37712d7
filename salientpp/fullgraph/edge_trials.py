"""Tries layers, to find those that compute a target's row from edges into other targets too. Such layers are refused.

PyG's own layers compute a target's row only from the edges into this target. But a subclass, a module inside a layer or
a hook may look at all targets. For example, ``update`` of a subclass may subtract a mean. A rank has only the edges
into its own vertices. So the first call of a layer is repeated three times without effects: with all edges, with the
edges into even targets, and with the edges into odd targets. If the rows of these targets differ, the layer is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from salientpp.batch.edges import BatchEdges
from salientpp.fullgraph.outputs import output_tensors
from salientpp.fullgraph.pieces import EdgeCall
from salientpp.fullgraph.row_check import RowsMixed
from salientpp.fullgraph.row_trials import NoChance, is_close
from salientpp.nn.layers import Replaced, name_of
from salientpp.nn.rehearsal import rehearsal
from salientpp.nn.unchanged import change_of


class EdgeTrials:
    """Refuses layers that compute a target's row from edges into other targets.

    It tries each layer once in training and once in evaluation, and again after the layer was changed.

    Attributes:
        is_running: True during a trial. Only some ranks may run one, so a trial must not ask other ranks.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._tried: weakref.WeakKeyDictionary[MessagePassing, set[Any]] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: Any) -> EdgeTrials:
        return EdgeTrials()

    def check(self, model: torch.nn.Module, call: EdgeCall) -> None:
        """Raises RowsMixed if a layer of ``model`` computes a target's row from edges into other targets.

        :meth:`mixes` finds this out.
        """
        if self.mixes(call):
            path = next(path for path, each in model.named_modules() if each is call.conv)
            raise RowsMixed(
                f"this model cannot be trained over ranks: {name_of(call.conv, path)} depends on the rows of several vertices in a method, a hook or a "
                "module inside it. A rank has only the edges into its own vertices; compute each target separately"
            )

    @torch.no_grad()
    def mixes(self, call: EdgeCall) -> bool:
        """Tries a layer. Returns True if rows of a target or of an edge depend on edges into other targets.

        Returns False also if the layer was tried before, or cannot be tried.
        """
        conv, edge_index, given = call.conv, call.edge_index, call.given
        key = call.is_edge_level, conv.training, change_of(conv)
        tried = self._tried.setdefault(conv, set())
        edge_index = edge_index.plain() if isinstance(edge_index, BatchEdges) else edge_index
        if key in tried or type(edge_index) is not Tensor or any(isinstance(each, EdgeCall) for each in given.values()):
            return False
        tried.add(key)
        halves = [edge_index[1] % 2 == rest for rest in (0, 1)]
        if not all(bool(half.any()) for half in halves):
            tried.remove(key)
            return False
        # The call itself, which follows, raises what the user has to see.
        with Replaced([(vars(self), "is_running", True)]), contextlib.suppress(Exception):
            whole = self._called(replace(call, edge_index=edge_index))
            for rest, half in enumerate(halves):
                cut = {name: self._cut(value, half) if name in call.names else value for name, value in given.items()}
                found = self._called(replace(call, edge_index=edge_index[:, half], given=cut))
                if call.is_edge_level:
                    expected = [self._cut(each, half) for each in whole]
                else:
                    targets = torch.arange(rest, call.size[1], 2, device=edge_index.device)
                    expected, found = (
                        [each.index_select(conv.node_dim, targets) for each in out] for out in (whole, found)
                    )
                if not all(is_close(*pair) for pair in zip(expected, found, strict=True)):
                    return True
        return False

    @staticmethod
    def _cut(value: Any, edges: Tensor) -> Any:
        """Returns the rows of the edges that a mask [e] selects. A value without a row for each edge stays as it is."""
        return value[edges] if isinstance(value, Tensor) and value.dim() and value.size(0) == edges.numel() else value

    @staticmethod
    def _called(call: EdgeCall) -> list[Tensor]:
        with rehearsal(call.conv, (call.edge_index,), dict(call.given)) as effects, NoChance():
            return [*output_tensors(call.original(*effects.args, size=call.size, **effects.kwargs))]
