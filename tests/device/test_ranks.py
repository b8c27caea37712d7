"""Laws of two ranks that share one device: rows travel through pinned memory over gloo, and batches equal those on the CPU."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
from batches import differences
from graphs import random_data
from rare import rare
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import salientpp
from salientpp import NeighborLoader
from salientpp.nn import merge_partial
from salientpp.ways.planner.machines import Link, Machines

from .devices import ORDERS, SIMULATES, find_device, need_cuda, on_cpu

FANOUTS, BATCH, WIDTH = [4, 3], 16, 6
SAME = {"batch_size": BATCH, "shuffle": True, "seed": 3}
CACHE = {"replication_factor": 0.3}
SLOW = Machines(between=Link(1e5), to_device=1e5)
CASES: dict[str, dict[str, Any]] = {
    "depth 1": {**CACHE, "depth": 1},
    "device rows": {**CACHE, "device_rows": {"part": 0.3, "cache": 100}, "num_workers": 1},
    "zero copy": {
        **CACHE,
        "device_rows": {"part": 0.5, "cache": 10**6, "zero_copy": True},
    },
    "lookahead": {**CACHE, "lookahead": 4, "device_rows": 0.3},
    "sums": {"partial_aggregation": "mean", "device_rows": 0.3},
    "shared host": {**CACHE, "ranks_per_host": 2},
    # Owners by rows need no partitioner, which a machine with a GPU may lack.
    "shares": {
        **CACHE,
        "ranks_per_host": 2,
        "cooperate": {"split_by": "rows"},
        "device_rows": 0.3,
        "num_workers": 1,
    },
    "sent narrow": {"send_as": {"x": "int8"}, "device_rows": 0.3, "num_workers": 2},
    "stored narrow": {**CACHE, "device_rows": {"part": 0.3, "cache": 50}},
    "planned": {
        "memory": {"host": 5000, "device": 3000, "machines": SLOW},
    },
    "planned device": {"replication_factor": 0.2, "memory": {"device": 3000, "machines": SLOW}},
    "planned host": {"memory": {"host": 5000, "machines": SLOW}, "device_rows": 0.2},
}


def _first_layer(batch: Data, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    conv = merge_partial(SAGEConv(WIDTH, 3)).to(device)
    with torch.no_grad():
        return conv(batch.x, batch.edge_index)[: sum(batch.num_sampled_nodes[:-1])].cpu()


def _wrong(root: str, orders: list[int], options: dict[str, Any]) -> list[str]:
    """Runs an epoch on the device, in each order, and on the CPU. Lists the differences."""
    part, cpu = salientpp.load(root), torch.device("cpu")
    # Options that change batches.
    keeps = {name: options[name] for name in ("send_as", "cooperate") if name in options}
    hosts = options["ranks_per_host"] if "cooperate" in options else 1
    want = list(NeighborLoader(part, FANOUTS, "train", ranks_per_host=hosts, **keeps, **SAME))
    wrong = [] if len(want) >= 3 else [f"{len(want)} batches"]
    for order in orders:
        device = find_device(order)
        loader = NeighborLoader(part, FANOUTS, "train", device=device, **{"ranks_per_host": 1, **options}, **SAME)
        if len(loader) != len(want):
            wrong.append(f"order {order}: {len(loader)} batches instead of {len(want)}")
        if "partial_aggregation" in options:
            for index, (batch, plain) in enumerate(zip(loader, want)):
                if not torch.allclose(_first_layer(batch, device), _first_layer(plain, cpu), atol=1e-5):
                    wrong.append(f"order {order}, batch {index}: sums")
            continue
        for index, (batch, plain) in enumerate(zip(on_cpu(loader), want)):
            wrong += [f"order {order}, batch {index}: {name}" for name in differences(batch, plain)]
            if "cooperate" in options and batch.edge_index.hops.share.own != plain.edge_index.hops.share.own:
                wrong.append(f"order {order}, batch {index}: share")
    return wrong


def _compare(rank: int, roots: dict[str, str], orders: list[int]) -> dict[str, list[str]]:
    return {
        name: _wrong(roots["narrow" if name == "stored narrow" else "wide"], orders, options)
        for name, options in CASES.items()
    }


@pytest.mark.parametrize("orders", [[0], *(rare(*([order] for order in ORDERS[1:])) if SIMULATES else [])], ids=str)
def test_two_ranks_on_one_device_over_gloo_deliver_batches_of_the_cpu(tmp_path, orders):
    if not SIMULATES:
        need_cuda()
    data = random_data()
    data.x = torch.randn(data.num_nodes, WIDTH, generator=torch.Generator().manual_seed(1))
    options = {"method": "random", "num_neighbors": FANOUTS, "batch_size": BATCH}
    salientpp.partition(data, 2, tmp_path / "wide", **options)
    salientpp.partition(data, 2, tmp_path / "narrow", store_as={"x": "int8"}, **options)
    roots = {name: str(tmp_path / name) for name in ("wide", "narrow")}
    assert distributed.run(_compare, 2, roots, orders) == [dict.fromkeys(CASES, [])] * 2
