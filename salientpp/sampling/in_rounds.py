"""Draws PyG's samples from a graph that is divided among hosts. A batch waits in rounds while other ranks answer its requests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.neighbor_sampler import node_sample

from salientpp.sampling.held_lists import Reads
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.packets import NO_BYTES, pack, unpack
from salientpp.sampling.part_topology import Drawing, Packets, PartTopology
from salientpp.sampling.pyg_samples import Sample, sample_of_edges
from salientpp.sampling.topology import ByType, Mfg


class _Seeds(BaseException):
    """Carries the seeds that PyG's function makes out of that function. It is no ``Exception``, so that PyG does not catch it."""

    def __init__(self, seed: Tensor | ByType, time: Any) -> None:
        super().__init__()
        self.seed, self.time = seed, time


def _tell_seeds(seed: Tensor | ByType, time: Any) -> Any:
    raise _Seeds(seed, time)


def drawing_of(
    sampler: NeighborSampler,
    inputs: NodeSamplerInput | EdgeSamplerInput,
    negatives: NegativeSampling | None = None,
    *,
    key: int,
    draw_key: int | None = None,
    only_vertices: bool = False,
) -> Drawing:
    """Draws what ``sampler.sample_from_nodes`` or ``sample_from_edges`` would draw, with exchanges between ranks.

    The generator yields requests to other ranks, and is sent their answers.

    Args:
        sampler: a sampler over a :class:`~salientpp.sampling.part_topology.PartTopology`.
        negatives: as ``neg_sampling`` of :meth:`~salientpp.NeighborSampler.sample_from_edges`.
        key, draw_key, only_vertices: as in :meth:`~salientpp.NeighborSampler.sample_from_edges`.
    """
    topology, of_edges = sampler.topology, isinstance(inputs, EdgeSamplerInput)
    if not isinstance(topology, PartTopology):
        raise TypeError(
            f"the sampler's topology must be a PartTopology, whose batches several ranks draw together, got a {type(topology).__name__}"
        )

    def around(sample: Sample) -> Mfg:
        if isinstance(inputs, EdgeSamplerInput):
            return sample_of_edges(
                topology, sampler.disjoint, inputs, negatives, key, sample, sampler.window is not None
            )
        return node_sample(inputs, sample)

    # PyG's function makes seeds of the inputs, asks for their sample, and adds labels to it. So it is called twice: until it asks, and with the
    # sample. Negative examples depend only on the key.
    try:
        around(_tell_seeds)
    except _Seeds as seeds:
        seed, time = seeds.seed, seeds.time
    draw_key = key if draw_key is None else draw_key
    out = yield from sampler.drawing(seed, time, draw_key, of_edges, only_vertices)
    edge_rows, reads = getattr(out, "edge_rows", {}), getattr(out, "reads", Reads())
    list_bytes = getattr(out, "list_bytes", 0)
    found = sampler.finished(around(lambda seed, time: out), only_vertices)
    found.edge_rows, found.reads, found.list_bytes = (
        edge_rows,
        reads,
        list_bytes,
    )  # the sample may be another object now
    return found


@dataclass(frozen=True, eq=False)
class Round:
    """Batch that is being drawn and waits for other ranks' answers to its requests.

    Attributes:
        drawing: generator that continues when it is sent the answers.
        asks: requests, by part.
        finish: makes the result from the complete sample.
    """

    drawing: Drawing
    asks: Packets
    finish: Callable[[Mfg], Any]

    @classmethod
    def begin(cls, drawing: Drawing, finish: Callable[[Mfg], Any]) -> Any:
        """Draws until other ranks must be asked. Returns a :class:`Round` with the requests, or the result if nothing must be asked."""
        return cls._until_next(drawing, finish, None)

    def end(self, answers: Packets) -> Any:
        """Draws on with the answers. Returns a :class:`Round` if other ranks must be asked again, else the result."""
        return self._until_next(self.drawing, self.finish, answers)

    @classmethod
    def _until_next(cls, drawing: Drawing, finish: Callable[[Mfg], Any], answers: Packets | None) -> Any:
        try:
            asks = drawing.send(answers)
        except StopIteration as end:
            return finish(end.value)
        return cls(drawing, asks, finish)


def in_step(drawings: Sequence[Drawing]) -> Generator[Packets, Packets, list[Mfg]]:
    """Draws several samples at the same time, so that one packet has the requests of all of them. All must need the same number of rounds."""
    answers: list[Packets | None] = [None] * len(drawings)
    while True:
        asks: list[Packets] = []
        finished: list[Mfg] = []
        for drawing, answer in zip(drawings, answers):
            try:
                asks.append(drawing.send(answer))
            except StopIteration as end:
                finished.append(end.value)
        if finished:
            return finished
        parts = sorted({part for own in asks for part in own})
        arrived = yield {part: pack([own.get(part, NO_BYTES) for own in asks]) for part in parts}
        of_part = {part: unpack(packet) for part, packet in arrived.items()}
        answers = [{part: of_part[part][at] for part in own} for at, own in enumerate(asks)]


def answer_joined(topology: PartTopology, packet: Tensor) -> Tensor:
    """Answers requests to draw from this host's neighbour lists, which another rank's :func:`in_step` put into one packet.

    An empty packet gets an empty answer.
    """
    return (
        pack([topology.answer(own) if own.numel() else NO_BYTES for own in unpack(packet)])
        if packet.numel()
        else packet
    )
