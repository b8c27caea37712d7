"""Laws of layer-wise inference over a topology in parts: results equal those of the whole form, and no list of another part is read."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
import torch_geometric.nn as gnn
from graphs import random_data
from rare import rare
from torch_geometric.data import Data
from two_forms import in_both_forms, own_copy

import salientpp
from salientpp.layerwise.inference import Inference

PARTS, WIDTH = 4, 6

#: name -> function that makes a model or layers, and its edge attributes
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "GraphSAGE": (lambda: gnn.GraphSAGE(WIDTH, 8, 3, 5), {}),
    "GCN": (lambda: gnn.GCN(WIDTH, 8, 3, 5), {}),
    "GCN, improved, weights": (lambda: gnn.GCN(WIDTH, 8, 2, 5, improved=True), {"edge_weight": "weight"}),
    "GAT, attributes": (lambda: gnn.GAT(WIDTH, 8, 2, 5, heads=2, edge_dim=3, jk="cat"), {"edge_attr": "attr"}),
    "degrees of two kinds": (
        lambda: [gnn.GCNConv(WIDTH, 8), torch.relu, gnn.GCNConv(8, 5, add_self_loops=False)],
        {},
    ),
}


def graph() -> Data:
    data = random_data(num_vertices=200, num_edges=1000, directed=True)
    generator, loops = torch.Generator().manual_seed(1), torch.arange(30)
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :30], torch.stack([loops, loops])], dim=1)
    data.x = torch.randn(data.num_nodes, WIDTH, generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator) + 0.1
    data.attr = torch.randn(data.num_edges, 3, generator=generator)
    return data


def outputs(rank: int, root: str, num_parts: int, is_copy: bool) -> dict[str, list[Any]]:
    part = own_copy(root, num_parts) if is_copy else salientpp.load(root)
    found = {}
    for name, (make, names) in MODELS.items():
        torch.manual_seed(0)
        options = {"batch_size": 16, "batch_edges": 100, **names}
        found[name] = salientpp.inference(make(), part, **options).tolist()
    return found


@pytest.mark.parametrize(("num_parts", "world_size"), [(PARTS, 2), (2, 4), *rare((PARTS, 1), (PARTS, 4))])
def test_both_forms_give_the_same_rows_and_a_rank_needs_no_list_of_another_part(tmp_path, num_parts, world_size):
    whole, parts = in_both_forms(tmp_path, graph(), num_parts)
    expected = distributed.run(outputs, world_size, whole, num_parts, False)
    assert distributed.run(outputs, world_size, parts, num_parts, False) == expected
    if num_parts >= world_size:
        assert distributed.run(outputs, world_size, parts, num_parts, True) == expected


def traffic(rank: int, root: str, is_copy: bool) -> list[Any]:
    """Returns the rows of each tier in each layer of a model that counts degrees and has a cache."""
    part, stats = own_copy(root, 2) if is_copy else salientpp.load(root), []
    run = Inference.run

    def remembered(call: Inference) -> Any:
        out = run(call)
        stats.extend(call.stats)
        return out

    Inference.run = remembered
    torch.manual_seed(0)
    model = gnn.GCN(WIDTH, 8, 2, 5)  # with weights it runs in batches
    salientpp.inference(model, part, batch_size=16, replication_factor=0.3, edge_weight="weight")
    return [(each.rows_host, each.rows_cache, each.rows_remote, each.bytes_received) for each in stats]


def test_both_forms_cache_and_move_the_same_rows(tmp_path):
    whole, parts = in_both_forms(tmp_path, graph(), 2)
    expected = distributed.run(traffic, 2, whole, False)
    assert distributed.run(traffic, 2, parts, True) == expected
    assert all(min(of_layer) > 0 for rank in expected for of_layer in rank)
