"""A way of drawing is one class: the loader needs nothing else to draw, run ahead, resume and refuse options."""

from __future__ import annotations

import importlib
import operator
import pkgutil
from typing import Any

import pytest
import torch
from graphs import random_data
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from salientpp import NeighborLoader
from salientpp.engine import drawing
from salientpp.engine.drawing.choose import METHODS
from salientpp.engine.drawing.given import Given
from salientpp.engine.drawing.method import DrawingMethod
from salientpp.sampling.schedule import BatchKeys

NUM_VERTICES = 60


class RingSampler(BaseSampler):
    """Stands for a batch of the seeds, and for each seed v the vertex v + ``step``, without edges."""

    edge_permutation = None

    def __init__(self, step: int) -> None:
        self.step = step

    def sample_from_nodes(self, inputs: NodeSamplerInput) -> Any:
        raise AssertionError("the drawing method draws")

    sample_from_edges = sample_from_nodes


class Ring(DrawingMethod):
    @classmethod
    def suits(cls, sampler: BaseSampler) -> bool:
        return isinstance(sampler, RingSampler)

    def excludes(self) -> dict[str, str]:
        return {"shared_draws_block": "a ring has no draws"}

    def draw_piece(self, positions: torch.Tensor, keys: BatchKeys, only_vertices: bool = False) -> Any:
        seeds = self.seeds.inputs[positions]
        node = torch.cat([seeds.node, (seeds.node + self.sampler.step) % NUM_VERTICES])
        none = torch.empty(0, dtype=torch.int64)
        return SamplerOutput(node, none, none, none, metadata=(seeds.input_id, None))


@pytest.fixture(autouse=True)
def ring(monkeypatch):
    monkeypatch.setattr("salientpp.engine.drawing.choose.METHODS", [Ring, *METHODS])


def suits_by_itself(method: type[DrawingMethod]) -> bool:
    """True if a class has a ``suits`` of its own, or combines those of several classes, as `PagerankInRounds` does."""
    return "suits" in vars(method) or len(method.__bases__) > 1


def test_the_list_has_every_class_that_suits_a_sampler_and_ends_with_the_one_that_suits_all():
    names = [f"{drawing.__name__}.{file.name}" for file in pkgutil.iter_modules(drawing.__path__)]
    defined = {
        value
        for module in map(importlib.import_module, names)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, DrawingMethod) and value.__module__ == module.__name__
    }
    suiting = [method for method in defined - {DrawingMethod} if suits_by_itself(method)]
    name = operator.attrgetter("__name__")
    assert sorted(map(name, METHODS)) == sorted(map(name, suiting)), "see METHODS in salientpp/engine/drawing/choose.py"
    assert METHODS[-1] is Given  # no class after it would be asked


def loader(**options: Any) -> NeighborLoader:
    data = random_data(NUM_VERTICES, 300)
    return NeighborLoader(data, [2], batch_size=8, neighbor_sampler=RingSampler(7), seed=3, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_new_way_of_drawing_makes_all_batches(num_workers):
    made = loader(shuffle=True, num_workers=num_workers)
    seen = []
    for batch in made:
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(batch.n_id[batch.batch_size :], (seeds + 7) % NUM_VERTICES)
        assert torch.equal(batch.x, made.data.x[batch.n_id]) and batch.edge_index.size(1) == 0
        seen.append(seeds)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NUM_VERTICES))


def test_it_resumes():
    first, second = loader(shuffle=True), loader(shuffle=True)
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    for expected, got in zip(batches, second, strict=True):
        assert torch.equal(expected.n_id, got.n_id)


def test_it_excludes_options():
    with pytest.raises(
        ValueError, match=r"shared_draws\['block'\]=4 excludes a .*RingSampler: a ring has no draws; leave"
    ):
        loader(shared_draws={"block": 4})
