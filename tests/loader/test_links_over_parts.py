"""Laws of seeds that are edges, over a topology in parts: both forms give the same batches, and no list of another part is read."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data, random_hetero
from rare import rare
from torch import Tensor
from two_forms import in_both_forms, own_copy

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader

PARTS = 4
WRITES = ("author", "writes", "paper")
NEGATIVES = {"none": {}, "binary": {"neg_sampling": "binary"}, "triplet": {"neg_sampling": "triplet"}}


def digests(loader: Any) -> list[str]:
    """Returns a digest of each batch: names, dtypes, shapes and values of all tensors."""
    found = []
    for batch in loader:
        words = hashlib.sha256()
        for store in batch.stores:
            for name, value in sorted(store.items()):
                if isinstance(value, Tensor):
                    words.update(f"{store._key} {name} {value.dtype} {list(value.shape)} ".encode())
                    words.update(value.contiguous().numpy().tobytes())
        found.append(words.hexdigest())
    return found


def plain_batches_of_each(rank: int, cases: list[tuple[str, bool]]) -> list[dict[str, list[str]]]:
    """Digests of the batches over each directory, or over the rank's own copy of it."""
    return [plain_batches(rank, root, is_copy) for root, is_copy in cases]


def typed_batches_of_each(rank: int, cases: list[tuple[str, bool]]) -> list[dict[str, list[str]]]:
    return [typed_batches(rank, root, is_copy) for root, is_copy in cases]


def plain_batches(rank: int, root: str, is_copy: bool) -> dict[str, list[str]]:
    part, found = own_copy(root, PARTS) if is_copy else salientpp.load(root), {}
    pairs = torch.arange(40).view(2, 20)
    for seeds in ("train", "all", pairs):
        for name, options in NEGATIVES.items():
            label = "label" if name == "none" and isinstance(seeds, str) else None
            loader = LinkNeighborLoader(
                part, [4, 3], seeds, edge_label=label, batch_size=16, shuffle=True, seed=3, uneven="exact", **options
            )
            found[f"{seeds} {name}"] = digests(loader)
    return found


@pytest.mark.parametrize("world_size", [2, *rare(1, 4)])
def test_both_forms_give_the_same_batches_of_links(tmp_path, world_size):
    data = random_data(200, 1200, directed=True, edge_attributes=True)
    data.label = torch.arange(data.num_edges) % 5
    split = {"train": torch.arange(0, data.num_edges, 3)}
    whole, parts = in_both_forms(tmp_path, data, PARTS, edge_split=split)
    cases = [(whole, False), (parts, False), (parts, True)]
    for expected, found, copied in distributed.run(plain_batches_of_each, world_size, cases):
        assert all(expected.values())
        assert found == expected and copied == expected


def typed_batches(rank: int, root: str, is_copy: bool) -> dict[str, list[str]]:
    part, found = own_copy(root, PARTS) if is_copy else salientpp.load(root), {}
    for name, options in (
        ("plain", {"edge_label": "label"}),
        ("times", {"time_attr": "edge_time", "edge_label_time": "edge_time"}),
        ("weights", {"weight_attr": "weight"}),
    ):
        loader = LinkNeighborLoader(
            part, [4, 3], (WRITES, "train"), batch_size=8, shuffle=True, seed=3, uneven="exact", **options
        )
        found[name] = digests(loader)
    pairs = torch.arange(40).view(2, 20) % 35
    loader = LinkNeighborLoader(
        part, [4, 3], (("author", "likes", "paper"), pairs), batch_size=8, seed=3, neg_sampling="triplet"
    )
    found["of a relation that the graph lacks"] = digests(loader)
    return found


@pytest.mark.parametrize("world_size", [2, *rare(1, 4)])
def test_both_forms_give_the_same_batches_of_links_between_types(tmp_path, world_size):
    data = random_hetero()
    data["paper"].train_mask = torch.arange(60) % 3 == 0
    data[WRITES].label = torch.arange(data[WRITES].num_edges)
    split = {WRITES: {"train": torch.arange(0, data[WRITES].num_edges, 3)}}
    options = {"seeds": ("paper", "train"), "edge_split": split, "replicate": ("author",), "time_attr": "edge_time"}
    whole, parts = in_both_forms(tmp_path, data, PARTS, **options)
    cases = [(whole, False), (parts, False), (parts, True)]
    for expected, found, copied in distributed.run(typed_batches_of_each, world_size, cases):
        assert found == expected and copied == expected


# --- loaders that share a sampler -----------------------------------------------------------------------------


def _makers(part: salientpp.PartitionedGraph) -> dict[str, Any]:
    """Returns functions that make loaders with a given sampler. Each of them changes something about the lists."""
    plain = {"num_neighbors": [4, 3], "batch_size": 64, "shuffle": True, "seed": 3, "uneven": "exact"}
    vertices = functools.partial(NeighborLoader, part, input_nodes="all", **plain)
    links = functools.partial(LinkNeighborLoader, part, edge_label_index="all", **plain)
    return {
        "vertices": vertices,
        "links": links,
        "narrow": functools.partial(vertices, send_as={"edge_attr": "fp16"}),
        "narrower": functools.partial(links, send_as={"edge_attr": "int8"}),
    }


def _shared(rank: int, root: str) -> list[str]:
    makers = _makers(salientpp.load(root))
    want, wrong = {}, []
    for name, make in makers.items():
        loader = make()
        want[name] = [digests(loader) for _ in range(2)]
    for first, second in itertools.permutations(makers, 2):
        a = makers[first]()
        sampler = a.link_sampler if isinstance(a, LinkNeighborLoader) else a.node_sampler
        found = [digests(a)]
        b = makers[second](neighbor_sampler=sampler)
        found.append(digests(a))
        if found != want[first]:
            wrong.append(f"{first} after {second}")
        if [digests(b) for _ in range(2)] != want[second]:
            wrong.append(f"{second} with the sampler of {first}")
    return wrong


def test_loaders_that_share_a_sampler_do_not_change_each_others_batches(tmp_path):
    data = random_data(200, 1200, directed=True)
    data.edge_attr = torch.rand(data.num_edges, 5, generator=torch.Generator().manual_seed(1))
    _, root = in_both_forms(tmp_path, data, 2)
    assert distributed.run(_shared, 2, root) == [[], []]


def _of_other_hosts(rank: int, root: str) -> str:
    part = salientpp.load(root)
    plain = {"input_nodes": "all", "batch_size": 64, "uneven": "exact"}
    sampler = NeighborLoader(part, [4, 3], ranks_per_host=1, **plain).node_sampler
    with pytest.raises(ValueError) as caught:
        NeighborLoader(part, [], ranks_per_host=2, neighbor_sampler=sampler, **plain)
    return str(caught.value)


def test_a_sampler_with_the_lists_of_other_hosts_is_refused(tmp_path):
    _, root = in_both_forms(tmp_path, random_data(200, 1200, directed=True), 4)
    for text in distributed.run(_of_other_hosts, 2, root):
        assert (
            "the neighbour lists of other parts than this rank's host holds in this loader; pass the same ranks_per_host"
            in text
        )
