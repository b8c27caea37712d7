"""Who draws the batches of a loader, and when?

Sampling threads draw ahead of the training loop; without any, the caller's thread draws. A batch is a pure function of its seeds and its key, so neither
their number nor their order matters.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from salientpp.engine.direct import BatchMaker
from salientpp.engine.pipeline import traced
from salientpp.engine.source import Seeds
from salientpp.engine.stages import BatchStages, Request
from salientpp.processes import Task, Threads, Undone, after_fork
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import BatchKeys
from salientpp.sampling.union import disjoint_union

#: The user's ``transform_sampler_output``.
MfgTransform = Callable[[Any], Any]


class SamplingWorkers:
    """What turns positions among the seeds into a sampled batch, in threads of its own or in the caller's.

    Args:
        number: of threads; 0: the caller's.
        seeds: all of them.
        sampler: what draws.
        stages: make the batch of what was drawn, all but its rows.
        maker: makes whole batches, where that can be done here.
    """

    def __init__(
        self,
        number: int,
        seeds: Seeds,
        sampler: BaseSampler,
        stages: BatchStages,
        maker: BatchMaker,
    ) -> None:
        self._threads = Threads(number, "salientpp-sample") if number else None
        self._seeds, self._sampler, self._stages, self._maker = seeds, sampler, stages, maker
        self._initialiser: _OncePerThread | None = None

    def initialise(self, function: Callable[[int], None], anew: bool) -> None:
        """Call ``worker_init_fn`` in every thread before it next draws; where that was asked for before, only if ``anew``."""
        if self._initialiser is None or anew:
            self._initialiser = _OncePerThread(function)

    def request(
        self, index: int, pieces: Sequence[tuple[Tensor, BatchKeys]], transform: MfgTransform | None
    ) -> Request:
        """Have batch ``index`` of an epoch drawn.

        Args:
            pieces: int64 [B] positions of its seeds, and the keys of its draws; of several the batches become one.
            transform: called with what was drawn.
        """
        submit: Callable[..., Any] = Undone if self._threads is None else self._threads.submit
        return Request(index, submit(self._work, index, pieces, transform))

    def scout(self, function: Callable[..., Any], *args: Any) -> Task | Undone:
        """Have ``function(*args)`` done where batches are drawn."""
        return (
            Undone(function, *args)
            if self._threads is None
            else self._threads.submit(self._initialised, function, *args)
        )

    def _initialised(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._initialiser is not None:
            self._initialiser()
        return function(*args)

    def _work(self, index: int, pieces: Sequence[tuple[Tensor, BatchKeys]], transform: MfgTransform | None) -> Any:
        if self._threads is not None and self._initialiser is not None:
            self._initialiser()
        with traced(self._stages.trace, f"worker: {threading.current_thread().name}", index):
            return self.sample(index, pieces, transform)

    def sample(self, index: int, pieces: Sequence[tuple[Tensor, BatchKeys]], transform: MfgTransform | None) -> Any:
        """Draw, in this thread, and make of it what a request hands on."""
        return self.prepare(
            index, self.draw_joined(pieces), sum(positions.numel() for positions, _ in pieces), transform
        )

    def prepare(self, index: int, mfg: Any, num_seeds: int, transform: MfgTransform | None) -> Any:
        """What a request hands on, of a batch that was drawn."""
        metadata = mfg.metadata
        if transform is not None:
            mfg = transform(mfg)
            mfg.metadata = metadata if mfg.metadata is None else mfg.metadata
        permutation = self._sampler.edge_permutation
        if permutation is not None:
            mfg.edge = _users_edge_ids(mfg.edge, permutation)
        make = self._maker.make if self._maker.fetch.is_local else self._stages.prepare
        return make(index, mfg, num_seeds)

    def draw_joined(self, pieces: Sequence[tuple[Tensor, BatchKeys]]) -> SamplerOutput | HeteroSamplerOutput:
        """The MFG of the seeds at these positions, each piece drawn by its keys, as one."""
        if len(pieces) == 1:
            return self.draw(*pieces[0])
        inputs = self._seeds.inputs
        mfgs = [self.draw(positions, keys) for positions, keys in pieces]
        return disjoint_union(mfgs, inputs.input_type, of_edges=isinstance(inputs, EdgeSamplerInput))

    def draw(self, positions: Tensor, keys: BatchKeys) -> SamplerOutput | HeteroSamplerOutput:
        """The MFG of the seeds at these positions."""
        return draw(self._seeds, self._sampler, positions, keys)

    def draw_vertices(self, positions: Tensor, keys: BatchKeys) -> SamplerOutput | HeteroSamplerOutput:
        """The same, of which nothing but ``node`` counts."""
        return draw(self._seeds, self._sampler, positions, keys, only_vertices=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_initialiser": None}  # threads of a copy are new ones


def draw(
    seeds: Seeds, sampler: BaseSampler, positions: Tensor, keys: BatchKeys, only_vertices: bool = False
) -> SamplerOutput | HeteroSamplerOutput:
    """The MFG of the seeds at these positions; a sampler of the user's takes no key.

    Args:
        only_vertices: its edges are not wanted, and may be missing.
    """
    inputs = _chosen(seeds.inputs, positions)
    if not isinstance(sampler, NeighborSampler):
        mfg = seeds.draw(inputs)
    else:
        named: dict[str, Any] = {} if keys.draws == keys.batch else {"draw_key": keys.draws}
        if only_vertices and type(sampler) is NeighborSampler:  # one of the user's may override what takes this
            named["only_vertices"] = True
        mfg = seeds.draw(inputs, key=keys.batch, **named)
    if mfg.metadata is None and isinstance(inputs, NodeSamplerInput):
        mfg.metadata = (inputs.input_id, inputs.time)
    return mfg


def _chosen(inputs: NodeSamplerInput | EdgeSamplerInput, positions: Tensor) -> NodeSamplerInput | EdgeSamplerInput:
    """``inputs[positions]``; of plain seeds without PyG's indexing, which takes longer than many a batch."""
    if type(inputs) is not NodeSamplerInput or inputs.time is not None:
        return inputs[positions]
    input_id = positions if inputs.input_id is None else inputs.input_id.index_select(0, positions)
    return NodeSamplerInput(input_id, inputs.node.index_select(0, positions), None, inputs.input_type)


class _OncePerThread:
    """Calls ``worker_init_fn`` in every thread that asks, once, with the number of the thread."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._numbers = itertools.count()
        self._done = threading.local()

    def __call__(self) -> None:
        if not getattr(self._done, "yes", False):
            self._function(next(self._numbers))
            self._done.yes = True


def _users_edge_ids(edge: Any, permutation: Any) -> Any:
    """The user's edge ids of a sampler that has put the edges in another order."""
    if isinstance(edge, dict):
        return {
            name: ids if ids is None or permutation.get(name) is None else permutation[name][ids.to(torch.int64)]
            for name, ids in edge.items()
        }
    return None if edge is None else permutation[edge.to(torch.int64)]
