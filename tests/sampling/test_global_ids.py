"""Laws of the global ids that PyG's properties derive from a sample: they are ids of the user's data, or of the dataset directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data as featured
from graphs import random_hetero
from odd_samples import random_data
from one_process import TYPED_FANOUTS, typed_data
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler


def ends(out: Any, name: Any = None) -> Tensor:
    row, col = out.global_row, out.global_col
    return torch.stack([row, col] if name is None else [row[name], col[name]])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "options", [{}, {"disjoint": True}, {"subgraph_type": "induced"}, {"weight_attr": "weight"}], ids=str
)
def test_global_ends_of_edges_are_the_users_edges(options, direction):
    data, seeds = random_data(2), torch.tensor([7, 3, 30])
    sampler = NeighborSampler(data, [4, 3], sample_direction=direction, **options)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=1)
    assert out.edge.numel() > 10 and torch.equal(ends(out), data.edge_index[:, out.edge])
    assert out.seed_node is None if out.batch is None else torch.equal(out.seed_node, seeds[out.batch])
    assert out.global_orig_row is None and out.global_orig_col is None


def test_the_edges_that_were_drawn_have_global_ids_beside_their_reverses():
    data = random_data(2)
    one, both = (NeighborSampler(data, [4, 3], kind) for kind in ("directional", "bidirectional"))
    both.keep_orig_edges = True
    drawn, out = (each.sample_from_nodes(NodeSamplerInput(None, torch.arange(5)), key=1) for each in (one, both))
    assert torch.equal(out.global_orig_row, drawn.global_row) and torch.equal(out.global_orig_col, drawn.global_col)
    found, want = (set(map(tuple, ends(each).t().tolist())) for each in (out, drawn))
    assert found == want | {(v, u) for u, v in want}


@pytest.mark.parametrize("options", [{}, {"subgraph_type": "induced"}, {"time_attr": "time"}], ids=str)
def test_samples_of_several_types_know_their_edges_and_the_seeds_of_their_trees(options):
    data = random_hetero(seed=3)
    for name, ids in (("paper", torch.tensor([50, 3, 59])), ("author", torch.tensor([30, 2]))):
        sampler = NeighborSampler(data, [4, 3], disjoint=True, **options)
        out = sampler.sample_from_nodes(NodeSamplerInput(None, ids, input_type=name), key=1)
        for relation in data.edge_types:
            assert torch.equal(ends(out, relation), data[relation].edge_index[:, out.edge[relation]])
        assert out.seed_node.keys() == set(data.node_types)
        for type_, seed in out.seed_node.items():
            assert torch.equal(seed, ids[out.batch[type_]])
        assert sum(out.batch[type_].numel() for type_ in data.node_types if type_ != name) > 5
    plain = NeighborSampler(data, [4]).sample_from_nodes(NodeSamplerInput(None, torch.arange(3), input_type="paper"))
    assert plain.seed_node is None


def test_trees_of_negative_examples_have_the_source_of_their_positive_edge():
    data, relation = random_hetero(seed=3), ("author", "writes", "paper")
    source, target = data[relation].edge_index[:, :6]
    sampler = NeighborSampler(data, [3], disjoint=True)
    out = sampler.sample_from_edges(
        EdgeSamplerInput(None, source, target, input_type=relation), NegativeSampling("binary", 2), key=2
    )
    for type_, seed in out.seed_node.items():
        assert torch.equal(seed, source[out.batch[type_]]) and int(out.batch[type_].max()) < 6
    one = NeighborSampler(random_data(1), [3], disjoint=True)
    edges = random_data(1).edge_index[:, :6]
    out = one.sample_from_edges(EdgeSamplerInput(None, *edges), NegativeSampling("binary", 2), key=2)
    assert torch.equal(out.seed_node, edges[0][out.batch])


# --- partitioned graphs -----------------------------------------------------------------------------------


def _check_own_ids(rank: int, root: Path, options: dict[str, Any]) -> int:
    """Compares the ids of samples on a rank with the user's edges, and returns the number of edges."""
    data, part, samples = featured(200, 1200, seed=2), salientpp.load(root), []

    def keep(sample: Any) -> Any:
        samples.append(sample)
        return sample

    loader = NeighborLoader(
        part, [4, 3], "train", batch_size=8, transform_sampler_output=keep, disjoint=True, **options
    )
    edges, own = set(map(tuple, data.edge_index.t().tolist())), part.original_id
    seeds = [own(batch.n_id[: batch.input_id.numel()]) for batch in loader]
    for sample, of_batch in zip(samples, seeds, strict=True):
        assert set(zip(own(sample.global_row).tolist(), own(sample.global_col).tolist())) <= edges
        assert torch.equal(own(sample.seed_node), of_batch[sample.batch])
    return sum(sample.row.numel() for sample in samples)


@pytest.mark.parametrize("topology", ["whole", "parts"])
def test_ranks_translate_global_ids_to_ids_of_the_users_data(tmp_path, topology):
    data = featured(200, 1200, seed=2)
    salientpp.partition(data, 2, tmp_path / "parts", [4, 3], 8, refine=False, topology=topology)
    for options in ({"depth": 1}, {"depth": 1, "logical_ranks": {"number": 4, "join": True}}):
        found = distributed.run(_check_own_ids, 2, tmp_path / "parts", options)
        assert min(found) > 100


def test_joined_batches_of_several_types_keep_the_seeds_of_their_trees(tmp_path):
    part = salientpp.partition(
        typed_data(), 1, tmp_path / "parts", TYPED_FANOUTS, 8, seeds=("paper", "train"), refine=False
    )
    samples: list[Any] = []
    joined = {"logical_ranks": {"number": 2, "join": True}, "disjoint": True, "batch_size": 4}
    keep = {"transform_sampler_output": lambda sample: samples.append(sample) or sample}
    batches = list(NeighborLoader(part, TYPED_FANOUTS, ("paper", "train"), **joined, **keep))
    for batch, sample in zip(batches, samples, strict=True):
        seeds = batch["paper"].n_id[: batch["paper"].batch_size]
        for type_, seed in sample.seed_node.items():
            assert torch.equal(seed, seeds[sample.batch[type_]])
    samples.clear()
    edges = ("author", "writes", "paper")
    list(LinkNeighborLoader(part, TYPED_FANOUTS, edges, **joined, **keep))
    for sample in samples:
        source = sample.node["author"][sample.metadata[1][0]]
        for type_, seed in sample.seed_node.items():
            assert torch.equal(seed, source[sample.batch[type_]])
    assert len(samples) > 5
