"""Laws of tasks that predict a column of the seeds: the first `batch_size` rows are the only rows of a seed in its tree.

So a value that is hidden there does not change the seed's output, whatever the loader. Other seeds see it.
"""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
import torch_geometric.loader
from peers import sampling_with
from rare import rare
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero

import salientpp

RELATIONS = [("order", "by", "customer"), ("customer", "placed", "order")]
#: Column k + 1 of the prices differs from column 0 in the order CHANGED[k] only.
CHANGED = torch.arange(0, 240, 10)
TIMES = {"time_attr": "time"}
#: How batches are drawn, without and with trees and times.
DRAWS: dict[str, dict[str, Any]] = {
    "merged": {},
    "disjoint": {"disjoint": True},
    "times": TIMES,
    "last": {**TIMES, "temporal_strategy": "last", "time_window": 3},
    "replaced": {**TIMES, "replace": True},
}
#: Options of the loaders of several ranks.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cached": {"replication_factor": 0.3, "lookahead": 3},
    "joined": {"logical_ranks": {"number": 4, "join": True}},
    "narrow": {"send_as": {("order", "prices"): "bf16"}},
}


def shop() -> HeteroData:
    """Returns 240 orders of 30 customers at 6 times, so that an order comes back as a neighbour of its customer, also at its own time."""
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["order"].prices = torch.randn(240, 1, generator=generator).repeat(1, len(CHANGED) + 1)
    data["order"].prices[CHANGED, torch.arange(len(CHANGED)) + 1] += 100
    data["order"].time = torch.randint(6, (240,), generator=generator)
    data["customer"].x = torch.randn(30, 2, generator=generator)
    data["customer"].time = torch.zeros(30, dtype=torch.int64)
    data["order"].num_nodes, data["customer"].num_nodes = 240, 30
    ends = torch.stack([torch.arange(240), torch.randint(30, (240,), generator=generator)])
    for relation, edges in zip(RELATIONS, (ends, ends.flip(0))):
        data[relation].edge_index = edges
    return data


def plain_shop() -> Data:
    """Returns the same vertices as one type: the orders, then the customers, whose values are 0."""
    typed = shop()
    edges = typed[RELATIONS[0]].edge_index + torch.tensor([[0], [240]])
    prices = torch.cat([typed["order"].prices, torch.zeros(30, len(CHANGED) + 1)])
    time = torch.cat([typed["order"].time, typed["customer"].time])
    return Data(num_nodes=270, prices=prices, time=time, edge_index=torch.cat([edges, edges.flip(0)], 1))


@torch.no_grad()
def outputs(loader: Any, ids_of: Any, hides: bool = True) -> dict[int, Tensor]:
    """Returns a model's outputs [1 + changes] for each seed of an epoch, by the seed's id in the shop.

    Args:
        ids_of: returns the ids in the shop of vertices of a batch.
        hides: whether the prices of the first ``batch_size`` rows are hidden.
    """
    torch.manual_seed(0)
    model: Any = GraphSAGE((2, 2), 8, 2, 1)
    typed, found = to_hetero(model, (["order", "customer"], RELATIONS)), {}
    for batch in loader:
        rows = batch["order"] if isinstance(batch, HeteroData) else batch
        known = torch.arange(len(rows.n_id)) >= (rows.batch_size if hides else 0)
        of_columns = []
        for prices in rows.prices.unbind(1):
            x = torch.stack([torch.where(known, prices, 0), known.float()], 1)
            if rows is batch:
                out = model(x, batch.edge_index)
            else:
                out = typed({"order": x, "customer": batch["customer"].x}, batch.edge_index_dict)["order"]
            of_columns.append(out[: rows.batch_size, 0])
        found |= dict(zip(ids_of(rows.n_id[: rows.batch_size]).tolist(), torch.stack(of_columns, 1)))
    return found


def changes_of(found: dict[int, Tensor]) -> tuple[int, int]:
    """Returns how many changed values changed an output of their own order, and how many pairs of a changed value and the output of another order differ."""
    own = others = 0
    for column, order in enumerate(CHANGED.tolist(), start=1):
        differ = {seed for seed, out in found.items() if not torch.equal(out[0], out[column])}
        own += order in differ
        others += len(differ - {order})
    return own, others


def same(ids: Tensor) -> Tensor:
    return ids


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("draws", DRAWS)
def test_a_seed_does_not_see_its_own_value_and_others_do(typed, draws):
    data, seeds = (shop(), "order") if typed else (plain_shop(), torch.arange(240))
    loader = salientpp.NeighborLoader(data, [6, 6], seeds, batch_size=16, seed=0, **DRAWS[draws])
    found = outputs(loader, same)
    own, others = changes_of(found)
    assert len(found) == 240 and own == 0
    assert others > len(CHANGED), "no seed saw another's value, so nothing was tested"
    shown, _ = changes_of(outputs(loader, same, hides=False))
    assert shown == len(CHANGED)


def test_batches_of_pyg_have_the_seeds_in_the_same_rows():
    with sampling_with("pyg-lib"):
        loader = torch_geometric.loader.NeighborLoader(shop(), [6, 6], "order", batch_size=16, **TIMES)
        own, others = changes_of(outputs(loader, same))
    assert own == 0 and others


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Directories of the shop in two parts, by topology."""
    folder = tmp_path_factory.mktemp("shop")
    for topology in ("whole", "parts"):
        salientpp.partition(
            shop(), 2, folder / topology, [6, 6], 16, seeds=("order", "all"), topology=topology, replicate=(), time_attr="time"
        )  # fmt: skip
    return folder


def outputs_of_a_rank(rank: int, root: str, options: dict[str, Any]) -> dict[int, Tensor]:
    part = salientpp.load(root)
    loader = salientpp.NeighborLoader(
        part, [6, 6], ("order", "all"), columns=["x", "prices"], batch_size=16, shuffle=True, seed=0, **options
    )
    return outputs(loader, lambda ids: part.original_id(ids, "order"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("topology", "draws"),
    [("whole", "times"), ("parts", "times"), *rare(("whole", "disjoint"), ("parts", "merged"), ("parts", "last"))],
)
def test_a_seed_of_a_rank_does_not_see_its_own_value_and_others_do(roots, topology, draws, mode):
    both = distributed.run(outputs_of_a_rank, 2, str(roots / topology), {**DRAWS[draws], **MODES[mode]})
    found = {**both[0], **both[1]}
    own, others = changes_of(found)
    assert len(found) == 240 and own == 0
    assert others > len(CHANGED)
