"""Laws of the suite of models: right models pass, refusals are shown, and a layer that is wrong after a conversion fails within a few cases."""

from __future__ import annotations

import re
import traceback
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GraphConv, MessagePassing

from salientpp.testing import ModelLaws


class Gated(MessagePassing):
    """Layer of a user."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin, self.gate = nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(x) + self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.gate(torch.cat([x_i, x_j], 1)).sigmoid() * x_j


class WrongRows(Gated):
    """Its messages read wrong rows if a conversion of this package calls it."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        files = [frame.filename for frame in traceback.extract_stack()]
        wrong = any(re.search(r"salientpp/(nn|fullgraph|layerwise)/", file) for file in files)
        return x_j.roll(1, 0) if wrong else x_j


class WrongSums(GraphConv):
    """Adds to the sums of a batch with sums."""

    def update(self, inputs: Tensor) -> Tensor:
        files = [frame.filename for frame in traceback.extract_stack()]
        return inputs + any("salientpp/nn/merge" in file for file in files)


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor, *more: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, *more).relu(), edge_index, *more)


class ByRank(Two):
    """Each rank computes something else."""

    def forward(self, x: Tensor, edge_index: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x * (1 + dist.get_rank()), edge_index, *more)


class Laws(ModelLaws):
    cases = 6
    layer: ClassVar[type[nn.Module]]

    @classmethod
    def model(cls) -> nn.Module:
        return Two(cls.layer(), cls.layer())

    @classmethod
    def steps(cls, model: Any) -> Any:
        return [model.first, torch.relu, model.second]


class TestOwnLayer(Laws):
    layer = Gated
    test_a_model_over_sums_computes_the_same = None  # refused: the last test of this file


class TestLayersOfPyg(Laws):
    arguments = ("x", "edge_index", "edge_weight")

    @classmethod
    def model(cls) -> nn.Module:
        return Two(GraphConv(6, 6, aggr="mean"), GraphConv(6, 4))


class OfWrongRows(Laws):
    layer = WrongRows


class OfWrongSteps(Laws):
    layer = Gated

    @classmethod
    def steps(cls, model: Any) -> Any:
        return [model.second, torch.relu, model.first]


class OfWrongSums(Laws):
    @classmethod
    def model(cls) -> nn.Module:
        return WrongSums(6, 6)


class OfOtherRanks(Laws):
    @classmethod
    def model(cls) -> nn.Module:
        return ByRank(Gated(), Gated())


@pytest.mark.parametrize(
    ("laws", "test", "given"),
    [
        (OfWrongRows, "test_a_trimmed_model_computes_the_same", ()),
        (OfWrongSums, "test_a_model_over_sums_computes_the_same", ()),
        (OfOtherRanks, "test_a_model_over_ranks_computes_the_same", (2,)),
        (OfWrongSteps, "test_inference_computes_the_same", ()),
    ],
)
def test_a_fault_fails_within_a_few_cases_which_the_failure_names(
    laws: type[ModelLaws], test: str, given: tuple[Any, ...]
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)set first = \d+ .*options=.*rank \d: .* differs by"):
        getattr(laws(), test)(*given)


def test_a_model_that_is_always_refused_skips_the_test_with_the_words() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"merge_partial: WrongRows has its own message\(\)"):
        OfWrongRows().test_a_model_over_sums_computes_the_same()
