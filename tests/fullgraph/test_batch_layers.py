"""Laws of batches that the ranks of a host compute together: outputs and all gradients equal those of the joined batches in one process."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
import torch_geometric
from host_batches import batch_of, filled, loader_of, share_batch
from layer_graph import Called, F, H, differences, gradients, graph
from pyg_layers import CASES, NAMES, Case, words_of
from rare import rare
from torch import Tensor
from torch_geometric.nn import SAGEConv

from salientpp.fullgraph import distribute, loss_mean
from salientpp.nn import trim

#: Seeds of the batch of each host. The second host has fewer.
SEEDS = (torch.tensor([3, 8, 20, 14, 1]), torch.tensor([33, 20]))
FANOUTS = [4, -1]


def owners(mfg: Any, ranks: int) -> Tensor:
    """Places of the vertices. The last of four ranks has none, and the first of four has no seeds."""
    places = (mfg.node * 7 + 1) % max(1, ranks - (ranks == 4))
    places[: mfg.num_sampled_nodes[0]].clamp_(min=int(ranks == 4))
    return places


def target_of(rows: Tensor) -> Tensor:
    return torch.linspace(-1, 1, rows[:1].numel(), dtype=torch.float64).view(rows[:1].shape)


def joined(data: Any, hosts: int, fanouts: list[int]) -> list[tuple[Any, Any]]:
    mfgs = [batch_of(data, seeds, fanouts, key) for key, seeds in enumerate(SEEDS[:hosts])]
    return [(mfg, filled(data, mfg)) for mfg in mfgs]


class Deep(Called):
    """A layer between two others, the last of which needs fewer rows."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.first, self.last = SAGEConv(F, F), SAGEConv(F if case.keeps_width else H, 4)
        self.double()

    def forward(self, x: Tensor, g: Any) -> Tensor:
        rows = self.first(x, g.edge_index).relu() + x
        return self.last(super().forward(rows, g), g.edge_index)


def compare(
    rank: int, size: int, ranks_per_host: int, names: list[str], trims: bool, recompute: str | None = None
) -> list[str]:
    """Describes the differences from one process with the joined batches."""
    kind = Deep if trims else Called
    torch_geometric.backend.use_segment_matmul = False  # some builds of pyg-lib lack it
    data, wrong = graph(), []
    batches = joined(data, size // ranks_per_host, [3, 2, 2, 1, 1] if trims else FANOUTS)
    number = sum(batch.batch_size for _, batch in batches)
    loader = loader_of(ranks_per_host)
    host, place = loader.cooperation.host, loader.cooperation.place
    mfg, batch = batches[host]
    owner = owners(mfg, ranks_per_host)
    mine = share_batch(data, mfg, owner, ranks_per_host, place)
    for name in names:
        case = CASES[name]
        try:
            whole, total = kind(case), 0
            if getattr(whole.conv, "cached", False):
                whole.conv.cached = False  # the second batch has other edges
            outs = []
            for _, each in batches:
                each.x = each.x.detach().clone().requires_grad_()
                out = whole(each.x, each)
                outs.append(out.detach())
                total = total + (out[: each.batch_size] - target_of(out)).square().sum() / number
            total.backward()
            torch.manual_seed(rank)
            module = kind(case)
            if rank:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(1)
            model = distribute(trim(module) if trims else module, loader, recompute=recompute)
            own = mine.x.clone().requires_grad_()
            out = model(own, mine)
            losses = (out[: mine.batch_size] - target_of(outs[0])).square().flatten(1).sum(1)
            loss_mean(losses, model).backward()
            mine_of_host = outs[host][owner == place]
            if trims:
                out, mine_of_host = out[: mine.batch_size], mine_of_host[: mine.batch_size]
            pairs = {"output": (mine_of_host, out), "input": (batch.x.grad[owner == place], own.grad)}
            found = gradients(module)
            pairs.update({key: (value, found[key]) for key, value in gradients(whole).items()})
            wrong += differences(pairs, name, rank, size)
        except Exception as error:
            if type(error).__name__ == "RankFailure":
                raise
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            raise RuntimeError("; ".join(wrong)) from error
    return wrong


ALL = rare(*((*form, NAMES) for form in [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2)]))
#: Each layer is in one form of each list. Those of two ranks on one host in the one list are not in the other.
TRIMMED = [(2, 2, NAMES[::2]), (2, 1, NAMES[3::4]), (4, 2, NAMES[1::8]), (4, 4, NAMES[5::8])]
WHOLE = [(2, 2, NAMES[1::2]), (2, 1, NAMES[::8]), (1, 1, NAMES[2::8]), (4, 4, NAMES[4::8]), (4, 2, NAMES[6::8])]


@pytest.mark.parametrize(("size", "ranks_per_host", "names"), [*TRIMMED, *ALL], ids=words_of)
def test_each_layer_of_a_trimmed_model_equals_the_joined_batches_for_seeds(size, ranks_per_host, names):
    wrong = distributed.run(compare, size, size, ranks_per_host, names, True)
    assert [words for each in wrong for words in each] == []


@pytest.mark.parametrize(("size", "ranks_per_host", "names"), [*WHOLE, *ALL], ids=words_of)
def test_each_layer_equals_the_joined_batches(size, ranks_per_host, names):
    """T5 of a step: with one host and several, layers over shares give outputs and gradients of the joined batches."""
    wrong = distributed.run(compare, size, size, ranks_per_host, names, False)
    assert [words for each in wrong for words in each] == []


@pytest.mark.parametrize(
    ("size", "ranks_per_host", "names"), [(2, 2, NAMES[::4]), *rare((2, 2, NAMES), (4, 2, NAMES))], ids=words_of
)
def test_each_layer_that_is_computed_again_equals_the_joined_batches(size, ranks_per_host, names):
    wrong = distributed.run(compare, size, size, ranks_per_host, names, False, "layers")
    assert [words for each in wrong for words in each] == []


def trim_and_recompute(rank: int) -> None:
    with pytest.raises(ValueError, match="recompute must be None for a model of salientpp.nn.trim, got 'layers'"):
        distribute(trim(Called(CASES["SAGEConv"])), loader_of(2), recompute="layers")


def test_a_trimmed_model_is_not_computed_again():
    distributed.run(trim_and_recompute, 2)
