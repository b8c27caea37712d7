"""Laws of the drop-in promise: given the same arguments, our loaders do what PyG's loaders do.

Every scenario runs over our classes, and over PyG's with each library that they sample with, pyg-lib and torch-sparse. All must satisfy the same
recorded facts. Times, trees and weights are compared with PyG's own code around the sampler, and checked by laws that need no peer.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
import torch_geometric.loader
import torch_geometric.sampler
from distributed import HANG
from graphs import RELATIONS, random_data, random_hetero, star
from peers import BACKENDS, peer, sampling_with
from reference import FALSE_ALARM, p_of_chances
from scipy import stats
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ImbalancedSampler, LinkLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, NegativeSampling, NodeSamplerInput, NumNeighbors, SamplerOutput
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.engine.pipeline import StageError
from salientpp.sampling import negatives

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib' installation"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:Cannot convert to bidirectional graph"),
    pytest.mark.filterwarnings("ignore:Unable to accurately infer"),
]
BUYS = ("paper", "by", "author")
FORWARD_AND_BACK = [("paper", "to", "author"), ("author", "rev_to", "paper"), ("paper", "cites", "paper")]


def graph(**changes: Any) -> Data:
    """Makes 150 vertices, sparse enough for two whole hops to stay small. The rows of edges and vertices are their ids."""
    data = random_data(150, 260, seed=2, directed=True, edge_attributes=True)
    data.edge_weight = torch.arange(data.num_edges).double()
    return data.update(changes)


@functools.cache
def hetero() -> HeteroData:
    return random_hetero(120, seed=3, paper=90, author=70, venue=9)


@functools.cache
def there_and_back() -> HeteroData:
    """Makes a relation with its reverse, and one inside a type."""
    data, base = HeteroData(), random_hetero(100, seed=4)
    for name in ("paper", "author"):
        data[name].x = base[name].x
    for name, other in zip(FORWARD_AND_BACK, (RELATIONS[0], RELATIONS[0], RELATIONS[2])):
        edges = base[other].edge_index
        data[name].edge_index = edges.flip(0) if name[1] == "rev_to" else edges
        data[name].edge_attr = base[other].edge_attr
    return data


def stores(data: Data | HeteroData) -> tuple[MyFeatureStore, MyGraphStore]:
    """Puts the same graph behind PyG's interfaces, with features ``x``."""
    features, topology = MyFeatureStore(), MyGraphStore()
    if isinstance(data, Data):
        features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
        topology.put_edge_index(data.edge_index, edge_type=None, layout="coo", size=(data.num_nodes, data.num_nodes))
        return features, topology
    for name in data.node_types:
        features.put_tensor(data[name].x, group_name=name, attr_name="x", index=None)
    for name in data.edge_types:
        size = (data[name[0]].num_nodes, data[name[2]].num_nodes)
        topology.put_edge_index(data[name].edge_index, edge_type=name, layout="coo", size=size)
    return features, topology


OURS = SimpleNamespace(
    name="salientpp",
    NeighborLoader=NeighborLoader,
    LinkNeighborLoader=LinkNeighborLoader,
    NeighborSampler=NeighborSampler,
)
PYGS = SimpleNamespace(
    name="pyg",
    NeighborLoader=torch_geometric.loader.NeighborLoader,
    LinkNeighborLoader=torch_geometric.loader.LinkNeighborLoader,
    NeighborSampler=torch_geometric.sampler.NeighborSampler,
)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A library that PyG samples with during the test."""
    with sampling_with(request.param):
        yield request.param


@pytest.fixture(params=["salientpp", *BACKENDS])
def side(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """Our classes, and PyG's with each of its libraries."""
    if request.param == "salientpp":
        yield OURS
        return
    with sampling_with(request.param):
        yield SimpleNamespace(**{**vars(PYGS), "name": request.param})


# --- scenarios: the same facts for both --------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A loader, and facts about its batches.

    Attributes:
        make: makes a loader of either side's classes.
        data: makes the loader's data. Batches hold its attributes, and the ids ``n_id`` and ``e_id``.
        added: further attributes of the batch, by store; the key None stands for a Data.
        lost: the edge stores whose attributes and ids are missing.
        turned: True if an edge may have the other direction.
        fails: libraries with which PyG fails on this scenario, and the reasons.
    """

    make: Callable[[SimpleNamespace], torch.utils.data.DataLoader]
    data: Callable[[], Data | HeteroData] = graph
    added: dict[Any, str] = field(default_factory=lambda: {None: "input_id batch_size"})
    lost: tuple = ()
    turned: bool = False
    fails: dict[str, str] = field(default_factory=dict)


def node(**options: Any) -> Callable:
    """Makes a loader with seeds 0 .. 19 of a ``Data``, in batches of 8, with two whole hops."""
    data = options.pop("data", graph)
    options = {"num_neighbors": [-1, -1], "input_nodes": torch.arange(20), "batch_size": 8, **options}
    return lambda side: side.NeighborLoader(data(), **options)


def link(**options: Any) -> Callable:
    data = options.pop("data", graph)
    options = {
        "num_neighbors": [-1],
        "edge_label_index": data().edge_index[:, :20] if data is graph else None,
        "batch_size": 8,
        **options,
    }
    return lambda side: side.LinkNeighborLoader(data(), **options)


def coated(batch: Data) -> Data:
    batch.coat = batch.x * 2
    return batch


def mask_of(size: int, number: int) -> Tensor:
    return torch.arange(size) < number


def edge_index_class() -> Data:
    data = graph()
    data.edge_index = EdgeIndex(data.edge_index, sparse_size=(150, 150))
    return data


def narrow() -> Data:
    return graph(edge_index=graph().edge_index.int())


def featureless() -> Data:
    return Data(edge_index=graph().edge_index, num_nodes=150)


INT64_ONLY = {"torch-sparse": "takes int64 tensors only"}
REPEATED = {
    "pyg-lib": "0.9.0 miscounts vertices behind a seed that is twice in a batch, so that edges lead to others than in the graph"
}
PAPERS = {"paper": "input_id batch_size"}
EDGES = {None: "input_id edge_label_index"}
LABELS = {None: "input_id edge_label_index edge_label"}
TRIPLET = {None: "input_id src_index dst_pos_index dst_neg_index"}
ON_BUYS = {BUYS: "input_id edge_label_index"}
TEN = torch.arange(10)

SCENARIOS = {
    "ids": Scenario(node()),
    "mask": Scenario(node(input_nodes=mask_of(150, 20))),
    "list": Scenario(node(input_nodes=[3, 1, 4, 15, 9])),
    "all": Scenario(node(input_nodes=None, batch_size=50)),
    "int32 ids": Scenario(node(input_nodes=torch.arange(20).int()), fails=INT64_ONLY),
    "one hop": Scenario(node(num_neighbors=[-1])),
    "replace": Scenario(node(replace=True)),
    "bidirectional": Scenario(node(subgraph_type="bidirectional"), turned=True),
    "induced": Scenario(node(subgraph_type="induced")),
    "induced, no hops beyond the first": Scenario(node(subgraph_type="induced", num_neighbors=[-1])),
    "transform": Scenario(node(transform=coated), added={None: "input_id batch_size coat"}),
    "EdgeIndex": Scenario(node(data=edge_index_class), data=edge_index_class, fails=INT64_ONLY),
    "int32 edges": Scenario(node(data=narrow), data=narrow, fails=INT64_ONLY),
    "no features": Scenario(node(data=featureless), data=featureless),
    "filter_per_worker": Scenario(node(filter_per_worker=True)),
    "filter in the main process": Scenario(node(filter_per_worker=False)),
    "input_id": Scenario(node(input_id=torch.arange(100, 120))),
    "drop_last": Scenario(node(drop_last=True)),
    "batch_sampler": Scenario(node(batch_size=1, batch_sampler=[[0, 3], [5], [19, 19, 2]]), fails=REPEATED),
    "sampler": Scenario(node(sampler=[4, 4, 2, 0, 19, 7, 1, 5, 6]), fails=REPEATED),
    "NodeLoader with a sampler object": Scenario(
        lambda side: NodeLoader(graph(), side.NeighborSampler(graph(), [-1, -1]), torch.arange(20), batch_size=8)
    ),
    "neighbor_sampler": Scenario(
        lambda side: side.NeighborLoader(graph(), [1], TEN, neighbor_sampler=side.NeighborSampler(graph(), [-1, -1]), batch_size=8)
    ),
    "hetero": Scenario(node(data=hetero, input_nodes=("paper", TEN)), data=hetero, added=PAPERS),
    "hetero, mask": Scenario(node(data=hetero, input_nodes=("paper", mask_of(90, 12))), data=hetero, added=PAPERS),
    "hetero, a type": Scenario(node(data=hetero, input_nodes="author", batch_size=40), data=hetero, added={"author": "input_id batch_size"}),
    "hetero, none of a type": Scenario(node(data=hetero, input_nodes=("venue", None)), data=hetero, added={"venue": "input_id batch_size"}),
    "hetero, fanouts by relation": Scenario(
        node(data=hetero, input_nodes=("paper", TEN), num_neighbors=dict(zip(RELATIONS, ([-1, -1], [-1, 0], [0, 0], [0, -1])))),
        data=hetero, added=PAPERS,
    ),
    "hetero, NumNeighbors": Scenario(
        node(data=hetero, input_nodes=("paper", TEN), num_neighbors=NumNeighbors({RELATIONS[2]: [0, -1]}, default=[-1, 0])),
        data=hetero, added=PAPERS,
    ),
    "hetero, induced": Scenario(node(data=hetero, input_nodes=("paper", TEN), subgraph_type="induced"), data=hetero, added=PAPERS),
    "hetero, bidirectional": Scenario(
        node(data=there_and_back, input_nodes=("paper", TEN), subgraph_type="bidirectional", num_neighbors=[-1]),
        data=there_and_back, added=PAPERS, lost=tuple(FORWARD_AND_BACK),
    ),
    "hetero, NodeLoader with a sampler object": Scenario(
        lambda side: NodeLoader(hetero(), side.NeighborSampler(hetero(), [-1, -1]), ("paper", TEN), batch_size=8), data=hetero, added=PAPERS
    ),
    "edges": Scenario(link(), added=EDGES),
    "edges, all": Scenario(link(edge_label_index=None, batch_size=200), added=EDGES),
    "edges, labels": Scenario(link(edge_label=torch.arange(20) % 3), added=LABELS),
    "edges, binary": Scenario(link(neg_sampling="binary"), added=LABELS),
    "edges, ratio": Scenario(link(neg_sampling_ratio=1.5), added=LABELS),
    "edges, labels and negatives": Scenario(link(edge_label=torch.arange(20) % 3, neg_sampling=dict(mode="binary", amount=2)), added=LABELS),
    "edges, triplet": Scenario(link(neg_sampling="triplet"), added=TRIPLET),
    "edges, triplets of three": Scenario(link(neg_sampling=NegativeSampling("triplet", 3)), added=TRIPLET),
    "edges, induced": Scenario(link(subgraph_type="induced"), added=EDGES),
    "edges, LinkLoader with a sampler object": Scenario(
        lambda side: LinkLoader(graph(), side.NeighborSampler(graph(), [-1]), graph().edge_index[:, :20], batch_size=8), added=EDGES
    ),
    "hetero edges": Scenario(link(data=hetero, edge_label_index=BUYS, batch_size=30), data=hetero, added=ON_BUYS),
    "hetero edges, some": Scenario(link(data=hetero, edge_label_index=(BUYS, torch.stack([TEN, TEN]))), data=hetero, added=ON_BUYS),
    "hetero edges, binary": Scenario(
        link(data=hetero, edge_label_index=BUYS, neg_sampling="binary"), data=hetero, added={BUYS: "input_id edge_label_index edge_label"}
    ),
    "hetero edges, triplet": Scenario(
        link(data=hetero, edge_label_index=BUYS, neg_sampling=NegativeSampling("triplet", 2)),
        data=hetero, added={BUYS: "input_id", "paper": "src_index", "author": "dst_pos_index dst_neg_index"},
    ),
    "hetero edges inside a type": Scenario(
        link(data=hetero, edge_label_index=RELATIONS[2], batch_size=30), data=hetero, added={RELATIONS[2]: "input_id edge_label_index"}
    ),
    "hetero edges inside a type, triplet": Scenario(
        link(data=hetero, edge_label_index=RELATIONS[2], neg_sampling="triplet"),
        data=hetero, added={RELATIONS[2]: "input_id", "paper": "src_index dst_pos_index dst_neg_index"},
    ),
}  # fmt: skip

#: Numbers of vertices and edges in all batches of those scenarios that draw nothing at random.
TOTALS = {
    "ids": (77, 76), "mask": (77, 76), "list": (19, 15), "all": (318, 458), "int32 ids": (77, 76), "one hop": (46, 35),
    "replace": (77, 76), "bidirectional": (77, 151), "induced": (77, 90), "induced, no hops beyond the first": (46, 43),
    "transform": (77, 76), "EdgeIndex": (77, 76), "int32 edges": (77, 76), "no features": (77, 76), "filter_per_worker": (77, 76),
    "filter in the main process": (77, 76), "input_id": (77, 76), "drop_last": (48, 45), "batch_sampler": (30, 31), "sampler": (43, 49),
    "NodeLoader with a sampler object": (77, 76), "neighbor_sampler": (39, 39), "hetero": (76, 106), "hetero, mask": (89, 124),
    "hetero, a type": (240, 404), "hetero, none of a type": (9, 0), "hetero, fanouts by relation": (49, 49),
    "hetero, NumNeighbors": (39, 48), "hetero, induced": (76, 147), "hetero, bidirectional": (35, 58),
    "hetero, NodeLoader with a sampler object": (76, 106), "edges": (78, 74), "edges, all": (248, 414), "edges, labels": (78, 74),
    "edges, induced": (78, 94), "edges, LinkLoader with a sampler object": (78, 74), "hetero edges": (406, 655),
    "hetero edges, some": (60, 64), "hetero edges inside a type": (375, 708),
}  # fmt: skip
SCENARIO = pytest.mark.parametrize("name", SCENARIOS)

BOOKS = {
    "n_id": torch.int64,
    "e_id": torch.int64,
    "input_id": torch.int64,
    "edge_label_index": torch.int64,
    "src_index": torch.int64,
    "dst_pos_index": torch.int64,
    "dst_neg_index": torch.int64,
    "edge_index": torch.int64,
}
COUNTS = {"num_sampled_nodes", "num_sampled_edges"}  # torch-sparse does not give them


def expect_failure(request: pytest.FixtureRequest, scenario: Scenario, name: str) -> None:
    """Marks scenarios that the other side cannot do as expected failures. If the other side is repaired, the test reports it."""
    if name in scenario.fails:
        request.applymarker(pytest.mark.xfail(strict=True, reason=f"{name} {scenario.fails[name]}"))


def key_of(store: Any) -> Any:
    return getattr(store, "_key", None)


def ids_of_ends(batch: Data | HeteroData, key: Any) -> tuple[Tensor, Tensor]:
    """Returns ``n_id`` of the sources and targets of the edges of this type."""
    return (batch.n_id, batch.n_id) if key is None else (batch[key[0]].n_id, batch[key[2]].n_id)


def names_of(store: Any) -> set[str]:
    return set(store.keys()) - COUNTS


@SCENARIO
def test_batches_hold_the_datas_values_for_the_sample(request, name, side):
    scenario, data = SCENARIOS[name], SCENARIOS[name].data()
    expect_failure(request, scenario, side.name)
    batches = list(scenario.make(side))
    assert batches
    for batch in batches:
        assert type(batch) is type(data)
        assert batch.validate()
        for store in batch.stores:
            key = key_of(store)
            if isinstance(data, HeteroData) and key is None:
                continue
            whole = data if key is None else data[key]
            is_edges, is_nodes = key is None or isinstance(key, tuple), key is None or isinstance(key, str)
            expected = set(whole.keys()) | set(scenario.added.get(key, "").split())
            expected |= ({"n_id"} if is_nodes else set()) | ({"e_id"} if is_edges else set())
            if key in scenario.lost:
                expected -= {"e_id", *(n for n in whole.keys() if n != "edge_index" and whole.is_edge_attr(n))}
            assert names_of(store) == expected, key
            for attribute in expected & set(whole.keys()) - {"edge_index", "num_nodes"}:
                ids = store.n_id if whole.is_node_attr(attribute) else store.e_id
                assert store[attribute].dtype == whole[attribute].dtype
                assert torch.equal(store[attribute], whole[attribute][ids]), attribute
            # With pyg-lib, PyG numbers vertices in the dtype of the edges; ours are always int64.
            narrowed = (name, side.name) == ("int32 edges", "pyg-lib")
            for attribute, dtype in BOOKS.items():
                if attribute in store:
                    assert store[attribute].dtype in ({dtype, torch.int32} if narrowed else {dtype}), attribute
                    assert type(store[attribute]) is Tensor, attribute
            if is_edges:
                source, target = ids_of_ends(batch, key)
                ends = torch.stack([source[store.edge_index[0]], target[store.edge_index[1]]])
                if "e_id" in store:
                    given = whole.edge_index[:, store.e_id].as_subclass(Tensor).long()
                    order = (lambda edges: edges.sort(0).values) if scenario.turned else (lambda edges: edges)
                    assert torch.equal(order(ends), order(given))
                else:
                    given = {*map(tuple, whole.edge_index.t().tolist())}
                    back = {(v, u) for u, v in given} if key is None or key[0] == key[2] else set()
                    assert {*map(tuple, ends.t().tolist())} <= given | back
    if name in TOTALS:
        assert (sum(b.num_nodes for b in batches), sum(b.num_edges for b in batches)) == TOTALS[name]


def canonical(batch: Data | HeteroData) -> dict:
    """Returns the sample in terms of ids of the data, independent of its order."""
    out = {}
    for store in batch.stores:
        key = key_of(store)
        if "n_id" in store:
            out[key, "n_id"] = sorted(store.n_id.tolist())
        if "edge_index" in store:
            source, target = ids_of_ends(batch, key)
            out[key, "edges"] = sorted(zip(source[store.edge_index[0]].tolist(), target[store.edge_index[1]].tolist()))
        for name in ("input_id", "edge_label", "batch_size", "e_id"):
            if name in store:
                value = store[name].tolist() if isinstance(store[name], Tensor) else store[name]
                out[key, name] = sorted(value) if name == "e_id" else value
        if "edge_label_index" in store:
            source, target = ids_of_ends(batch, key)
            out[key, "edge_label_index"] = [
                source[store.edge_label_index[0]].tolist(),
                target[store.edge_label_index[1]].tolist(),
            ]
        if store.get("batch_size") is not None:
            out[key, "seeds"] = store.n_id[: store.batch_size].tolist()
    return out


@pytest.mark.parametrize("name", TOTALS)
def test_with_all_neighbours_batches_equal_pygs(request, name, backend):
    """Vertices, edges, seeds and labels are equal, batch by batch, because nothing is drawn at random."""
    expect_failure(request, SCENARIOS[name], backend)
    ours, theirs = (list(map(canonical, SCENARIOS[name].make(side))) for side in (OURS, PYGS))
    assert ours == theirs


def test_with_replacement_neighbours_are_drawn_as_often_as_by_pyg(backend):
    """Draws are uniform on both sides. (Without replacement, those of torch_sparse are not.)"""
    data = Data(edge_index=star(6), num_nodes=7)
    counts = []
    for side in (OURS, PYGS):
        loader = side.NeighborLoader(data, [3], [0] * 1500, replace=True, batch_size=1)
        counts.append(np.bincount(torch.cat([batch.e_id for batch in loader]), minlength=6))
    assert [c.sum() for c in counts] == [4500, 4500]
    assert stats.chi2_contingency(np.stack(counts)).pvalue > FALSE_ALARM, counts


def test_a_sparse_adj_t_gives_pygs_batches(backend):
    peer("torch_sparse")  # needed to make adj_t
    from torch_geometric.transforms import ToSparseTensor

    plain = there_and_back().clone()
    homogeneous = ToSparseTensor(attr="edge_weight")(graph())
    plain = ToSparseTensor(attr="edge_attr")(plain)
    for data, seeds in ((homogeneous, TEN), (plain, ("paper", TEN))):
        ours, theirs = (list(side.NeighborLoader(data, [-1, -1], seeds, batch_size=4)) for side in (OURS, PYGS))
        for a, b in zip(ours, theirs, strict=True):
            for store in [b] if isinstance(data, Data) else [*b.node_stores, *b.edge_stores]:
                mine = a if key_of(store) is None else a[key_of(store)]
                assert names_of(mine) == names_of(store)
                if "adj_t" not in store:
                    continue
                dense = []
                for batch, of in ((a, mine), (b, store)):
                    source, target = ids_of_ends(batch, key_of(store))
                    row, col, value = of.adj_t.coo()
                    assert of.adj_t.sizes()[:2] == [len(target), len(source)]
                    dense.append(sorted(zip(target[row].tolist(), source[col].tolist(), value.tolist())))
                assert dense[0] == dense[1]


# --- the same sample, built by PyG -------------------------------------------------------------------------


def as_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), list(value.shape), value.tolist())
    return {str(key): as_plain(v) for key, v in value.items()} if isinstance(value, dict) else value


def assert_batches_are_pygs(loader_class: type, data: Any, *args: Any, **options: Any) -> list:
    """Checks that every batch equals PyG's batch of the same sample."""
    samples = []

    def keep(sampled: Any) -> Any:
        samples.append(copy.deepcopy(sampled))
        return sampled

    loader = loader_class(data, *args, transform_sampler_output=keep, seed=1, **options)
    batches = list(loader)
    assert len(batches) == len(samples) > 0
    sampler = SimpleNamespace(edge_permutation=None)
    seeds = options.get("input_nodes", options.get("edge_label_index"))
    if isinstance(seeds, (tuple, list)) and isinstance(seeds[0], (tuple, list)):
        seeds = seeds[0]  # (edge type, ids)
    elif isinstance(seeds, tuple) and len(seeds) == 2:
        seeds = seeds[0]  # (node type, ids)
    input_type = None if isinstance(seeds, Tensor) else seeds
    pygs = SimpleNamespace(
        data=data,
        transform=None,
        transform_sampler_output=None,
        node_sampler=sampler,
        link_sampler=sampler,
        custom_cls=None,
        neg_sampling=getattr(loader, "neg_sampling", None),
        input_data=SimpleNamespace(input_type=input_type),
    )
    make = NodeLoader if loader_class is NeighborLoader else LinkLoader
    for batch, sampled in zip(batches, samples):
        expected = make.filter_fn(pygs, sampled)
        assert type(batch) is type(expected)
        assert as_plain(batch.to_dict()) == as_plain(expected.to_dict())
    return batches


HOW = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"subgraph_type": "bidirectional"},
    {"subgraph_type": "induced", "disjoint": True},
    {"weight_attr": "weight"},
    {"time_attr": "time"},
    {"time_attr": "edge_time", "temporal_strategy": "last"},
]


def timed(data: Data | HeteroData, how: dict[str, Any], name: str, size: int) -> dict[str, Any]:
    return {name: torch.arange(size) % 9, **how} if "time_attr" in how else how


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_batch_of_several_types_equals_pygs_of_the_same_sample(how):
    data = random_hetero(seed=5)
    how = timed(data, how, "input_time", 20)
    for batch in assert_batches_are_pygs(
        NeighborLoader, data, [3, 2], input_nodes=("paper", torch.arange(20)), batch_size=8, **how
    ):
        assert ("batch" in batch["paper"]) == (how.get("disjoint", False) or "time_attr" in how)
        assert ("seed_time" in batch["paper"]) == ("time_attr" in how)


@pytest.mark.parametrize(
    "negatives", [None, "binary", NegativeSampling("triplet", 2)], ids=["none", "binary", "triplet"]
)
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("edge_type", [None, BUYS, RELATIONS[2]], ids=["homogeneous", "two types", "one type"])
def test_a_batch_of_edges_equals_pygs_of_the_same_sample(edge_type, how, negatives):
    if edge_type is None:
        data = graph(weight=torch.rand(260), time=torch.arange(150) % 9, edge_time=torch.arange(260) % 9)
        seeds = data.edge_index[:, :20]
    else:
        data = random_hetero(seed=5)
        seeds = (edge_type, data[edge_type].edge_index[:, :20])
    how = timed(data, how, "edge_label_time", 20)
    batches = assert_batches_are_pygs(
        LinkNeighborLoader, data, [3, 2], edge_label_index=seeds, neg_sampling=negatives, batch_size=8, **how
    )
    assert sum((batch if edge_type is None else batch[edge_type]).input_id.numel() for batch in batches) == 20


@pytest.mark.parametrize("how", [{}, {"disjoint": True}, {"subgraph_type": "induced"}], ids=str)
def test_a_batch_from_stores_equals_pygs_of_the_same_sample(how):
    for data, seeds in ((graph(), torch.arange(20)), (hetero(), ("paper", torch.arange(20)))):
        assert_batches_are_pygs(NeighborLoader, stores(data), [3, 2], input_nodes=seeds, batch_size=8, **how)
        kept, plain = (
            list(NeighborLoader(form, [-1, -1], seeds, batch_size=8, **how)) for form in (stores(data), data)
        )
        assert list(map(canonical, kept)) == list(map(canonical, plain)), "the same graph, however it is kept"


@pytest.mark.parametrize("kind", ["one type", "several types"])
def test_stores_are_read_whole_and_give_their_features(side, kind):
    data, seeds = (graph(), TEN) if kind == "one type" else (hetero(), ("paper", TEN))
    for batch in side.NeighborLoader(stores(data), [-1, -1], seeds, batch_size=4):
        assert type(batch) is type(data)
        for store in batch.node_stores if kind != "one type" else [batch]:
            whole = data if kind == "one type" else data[store._key]
            assert torch.equal(store.x, whole.x[store.n_id]) and store.num_nodes == len(store.n_id)


#: Names that a feature store may use for the group of edges of a graph with one type.
EDGE_GROUPS = [None, (None, None)]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("group", EDGE_GROUPS, ids=str)
@pytest.mark.parametrize("size", [40, 20])
def test_edge_features_of_a_feature_store_belong_to_the_edges(group, size, link):
    generator = torch.Generator().manual_seed(size)
    edge_index = torch.randint(20, (2, size), generator=generator)
    features, topology = MyFeatureStore(), MyGraphStore()
    features.put_tensor(torch.arange(size), group_name=group, attr_name="edge_attr", index=None)
    features.put_tensor(torch.arange(20) + 100, group_name=None, attr_name="x", index=None)
    topology.put_edge_index(edge_index, edge_type=None, layout="coo", size=(20, 20))
    make, seeds = (LinkNeighborLoader, None) if link else (NeighborLoader, TEN)
    for batch in make((features, topology), [2, 2], seeds, batch_size=4):
        assert torch.equal(batch.edge_attr, batch.e_id) and torch.equal(batch.x, batch.n_id + 100)
        assert torch.equal(batch.n_id[batch.edge_index], edge_index[:, batch.edge_attr])


@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
def test_edge_features_have_the_order_of_the_graph_stores_edges(layout):
    source, target = torch.tensor([[2, 1, 0, 2], [1, 0, 1, 0]])
    order = torch.sort(target if layout == "csc" else source, stable=True).indices
    edges = (source, target)
    if layout != "coo":
        source, target = source[order], target[order]
        counted = torch.bincount(target if layout == "csc" else source, minlength=3).cumsum(0)
        pointer = torch.cat([torch.zeros(1, dtype=torch.int64), counted])
        edges = (source, pointer) if layout == "csc" else (pointer, target)
    features, topology = MyFeatureStore(), MyGraphStore()
    features.put_tensor(source * 10 + target, group_name=None, attr_name="ends", index=None)
    features.put_tensor(torch.arange(3), group_name=None, attr_name="x", index=None)
    topology.put_edge_index(edges, edge_type=None, layout=layout, size=(3, 3))
    (batch,) = NeighborLoader((features, topology), [-1], torch.arange(3), batch_size=3)
    row, col = batch.n_id[batch.edge_index]
    assert batch.ends.numel() == 4 and torch.equal(batch.ends, row * 10 + col)


@pytest.mark.parametrize("link", [False, True])
def test_edge_features_of_a_typed_feature_store_belong_to_the_edges(link):
    data = hetero()
    features, topology = stores(data)
    for name in data.edge_types:
        features.put_tensor(torch.arange(data[name].num_edges), group_name=name, attr_name="edge_attr", index=None)
    features.put_tensor(torch.arange(3), group_name=("no", "such", "edges"), attr_name="edge_attr", index=None)
    make, seeds = (LinkNeighborLoader, (BUYS, None)) if link else (NeighborLoader, ("paper", TEN))
    for batch in make((features, topology), [2, 2], seeds, batch_size=4):
        assert batch.edge_types == data.edge_types and set(batch.node_types) == set(data.node_types)
        for source, name, target in data.edge_types:
            store, whole = batch[source, name, target], data[source, name, target]
            assert torch.equal(store.edge_attr, store.e_id)
            ends = torch.stack([batch[source].n_id[store.edge_index[0]], batch[target].n_id[store.edge_index[1]]])
            assert torch.equal(ends, whole.edge_index[:, store.edge_attr])


def test_edge_features_of_a_feature_store_vanish_with_the_edge_ids():
    features, topology = stores(graph())
    features.put_tensor(torch.arange(graph().num_edges), group_name=(None, None), attr_name="w", index=None)

    def without_ids(mfg):
        mfg.edge = None
        return mfg

    batch = next(iter(NeighborLoader((features, topology), [2], TEN, transform_sampler_output=without_ids)))
    assert "w" not in batch and "e_id" not in batch and "x" in batch


@pytest.mark.parametrize("group", EDGE_GROUPS, ids=str)
def test_edge_features_of_only_some_edges_raise_a_clear_error(group):
    features, topology = stores(graph())
    features.put_tensor(torch.arange(7), group_name=group, attr_name="edge_attr", index=None)
    with pytest.raises(
        ValueError,
        match=rf"'edge_attr'.* must have one row per edge, expected {graph().num_edges} rows, got 7; store one row for every",
    ):
        NeighborLoader((features, topology), [2], TEN)


def test_a_type_without_features_may_have_the_name_of_a_relation():
    data = HeteroData()
    data["order"].x = torch.arange(8.0).view(4, 2)
    data["customer"].x = torch.arange(6.0).view(3, 2)
    data["order", "customer", "customer"].edge_index = torch.tensor([[0, 1, 3], [0, 1, 1]])
    data["customer", "rev", "order"].edge_index = torch.tensor([[1, 0], [0, 1]])
    features, topology = stores(data)
    features.remove_tensor(group_name="customer", attr_name="x", index=None)
    batch = next(iter(NeighborLoader((features, topology), [-1, -1], ("order", None), batch_size=4)))
    assert batch.node_types == ["order", "customer"] and sorted(batch["customer"].n_id.tolist()) == [0, 1]
    assert "n_id" not in batch["order", "customer", "customer"]


class Citations(Data):
    pass


class Papers(HeteroData):
    pass


def test_custom_cls_is_the_class_of_batches_from_stores():
    assert type(next(iter(NeighborLoader(stores(graph()), [2], TEN, custom_cls=Citations)))) is Citations
    assert type(next(iter(NeighborLoader(stores(hetero()), [2], "paper", custom_cls=Papers)))) is Papers
    with pytest.raises(ValueError, match="custom_cls is for a pair of FeatureStore and GraphStore"):
        NeighborLoader(graph(), [2], TEN, custom_cls=Citations)
    made = next(iter(NeighborLoader(stores(graph()), [2], TEN, custom_cls=lambda: Citations(name="cora"))))
    assert type(made) is Citations and made.name == "cora", "PyG calls it, so it may be a function"
    for other in ({"x": None}, True, dict, Citations()):
        with pytest.raises(ValueError, match="custom_cls must be Data, HeteroData, a class that derives from one of"):
            NeighborLoader(stores(graph()), [2], TEN, custom_cls=other)


# --- features identify their vertices, for all threads and tiers --------------------------------------------


def differences(a: Data | HeteroData, b: Data | HeteroData) -> list[str]:
    one, other = as_plain(a.to_dict()), as_plain(b.to_dict())
    return [key for key in {*one, *other} if one.get(key) != other.get(key)]


SEEDED = {
    "hetero": lambda **options: NeighborLoader(
        hetero(), [3, 2], ("paper", None), batch_size=16, shuffle=True, seed=5, **options
    ),
    "times": lambda **options: NeighborLoader(
        hetero(), [3, 2], ("paper", None), batch_size=16, time_attr="time", shuffle=True, seed=5, **options
    ),
    "edges": lambda **options: LinkNeighborLoader(
        graph(), [3, 2], batch_size=32, neg_sampling="binary", shuffle=True, seed=5, **options
    ),
    "hetero edges": lambda **options: LinkNeighborLoader(
        hetero(),
        [3, 2],
        BUYS,
        batch_size=16,
        neg_sampling=NegativeSampling("triplet", 2),
        shuffle=True,
        seed=5,
        **options,
    ),
    "stores": lambda **options: NeighborLoader(
        stores(hetero()), [3, 2], ("paper", None), batch_size=16, shuffle=True, seed=5, **options
    ),
}


@pytest.mark.parametrize("kind", SEEDED)
def test_a_batch_depends_on_seed_epoch_and_index_alone(kind):
    make = SEEDED[kind]
    reference = make()
    epochs = [list(reference) for _ in range(2)]
    assert all(differences(a, b) for a, b in zip(*epochs)), "another epoch, other batches"
    tiers = [0, 0.5] if kind != "stores" else [0]
    for num_workers, depth, device_rows in itertools.product([0, 2], [1, 10], tiers):
        loader = make(num_workers=num_workers, depth=depth, device_rows=device_rows)
        for want in epochs:
            for a, b in zip(loader, want, strict=True):
                assert differences(a, b) == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 10])
@pytest.mark.parametrize("device_rows", [0, 0.5, 1.0])
def test_rows_of_every_type_identify_their_vertex_or_edge(device_rows, depth, num_workers):
    options = {"device_rows": device_rows, "depth": depth, "num_workers": num_workers}
    for kind in ("hetero", "times", "hetero edges"):
        for batch in SEEDED[kind](**options):
            for number, store in enumerate(batch.node_stores):
                assert torch.equal(store.x, torch.stack([torch.full_like(store.n_id, number), store.n_id], 1).float())
            for number, store in enumerate(batch.edge_stores):
                assert torch.equal(
                    store.edge_attr, torch.stack([torch.full_like(store.e_id, number), store.e_id], 1).float()
                )


def test_negatives_repeat_with_the_seed_and_differ_between_batches_and_epochs():
    for data, edges in ((graph(), None), (hetero(), BUYS)):
        drawn = []
        for seed, workers in ((5, 0), (5, 2), (6, 0)):
            loader = LinkNeighborLoader(
                data, [], edges, batch_size=40, neg_sampling="binary", seed=seed, num_workers=workers
            )
            drawn.append([canonical(batch)[edges, "edge_label_index"] for _ in range(2) for batch in loader])
        assert drawn[0] == drawn[1] and drawn[0] != drawn[2]
        assert len(set(map(str, drawn[0]))) == len(drawn[0])


@pytest.mark.parametrize("most", [2**24, 0], ids=["torch's", "cumulative sums"])
def test_negatives_are_uniform_or_by_weight(most, monkeypatch):
    monkeypatch.setattr(negatives, "_MOST_MULTINOMIAL", most)
    data = Data(edge_index=star(5), num_nodes=6)
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 4.0])
    shares = (weight.double() / 10).tolist()
    for given, chances in ((None, [1 / 6] * 6), (weight, shares), (weight.long(), shares)):
        sampling = NegativeSampling("binary", 100, src_weight=given, dst_weight=given)
        loader = LinkNeighborLoader(data, [], batch_size=5, neg_sampling=sampling, seed=1)
        for side in range(2):
            ends = Counter(
                itertools.chain(*(canonical(b)[None, "edge_label_index"][side][5:] for _ in range(6) for b in loader))
            )
            assert sum(ends.values()) == 3000 and all(chances[v] > 0 for v in ends)
            assert p_of_chances(ends.elements(), dict(enumerate(chances))) > FALSE_ALARM


def test_weighted_negatives_have_no_limit_of_2_to_the_24_vertices():
    size = 2**24 + 3
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=size)
    weight = torch.zeros(size)
    weight[[7, size - 1]] = torch.tensor([1.0, 3.0])
    loader = LinkNeighborLoader(
        data, [], batch_size=2, neg_sampling=NegativeSampling("triplet", 1000, dst_weight=weight), seed=1
    )
    first, again = (loader(torch.arange(2)) for _ in range(2))
    ends = first.n_id[first.dst_neg_index].flatten()
    assert set(ends.tolist()) == {7, size - 1} and 1300 < int((ends == size - 1).sum()) < 1700
    assert not torch.equal(ends, again.n_id[again.dst_neg_index].flatten()), "every batch draws independently"
    other = LinkNeighborLoader(
        data, [], batch_size=2, neg_sampling=NegativeSampling("triplet", 1000, dst_weight=weight), seed=1
    )
    same = other(torch.arange(2))
    assert torch.equal(ends, same.n_id[same.dst_neg_index].flatten()), "the key fixes the draws"
    weight[7] = 0
    later = loader(torch.arange(2))
    assert later.n_id[later.dst_neg_index].unique().tolist() == [size - 1], "current weights are used"
    for value in (-1.0, float("nan"), float("inf")):
        weight[5] = value
        with pytest.raises(ValueError, match="dst_weight of neg_sampling must hold numbers >= 0, finite and not all 0"):
            loader(torch.arange(2))
    weight.zero_()
    with pytest.raises(ValueError, match="dst_weight of neg_sampling must hold numbers >= 0, finite and not all 0"):
        loader(torch.arange(2))


@pytest.mark.parametrize(
    "weight", [[-1.0] * 60, [float("nan")] * 60, [0.0] * 60, [-1] * 60], ids=["negative", "NaN", "zero", "integers"]
)
def test_impossible_weights_of_negatives_are_refused_by_name(weight):
    given = NegativeSampling("binary", src_weight=torch.tensor(weight), dst_weight=torch.ones(60))
    loader = LinkNeighborLoader(random_data(60, 300), [2], batch_size=4, neg_sampling=given)
    with pytest.raises(
        ValueError, match="src_weight of neg_sampling must hold numbers >= 0, finite and not all 0, got"
    ):
        loader([0, 1])


# --- times, trees, weights: laws without a peer -------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("time_attr", ["time", "edge_time"])
def test_batches_never_look_into_the_future(time_attr, strategy):
    data = random_hetero(seed=6)
    now = torch.arange(60) % 11 - 1
    loader = NeighborLoader(
        data,
        [4, 4],
        "paper",
        time_attr=time_attr,
        input_time=now,
        temporal_strategy=strategy,
        batch_size=16,
        shuffle=True,
        seed=1,
    )
    seen = 0
    for batch in loader:
        seeds = batch["paper"].n_id[: batch["paper"].batch_size]
        assert torch.equal(batch["paper"].seed_time, now[seeds])
        assert batch["paper"].batch[: len(seeds)].tolist() == list(range(len(seeds)))
        for name in RELATIONS:
            tree = batch[name[2]].batch[batch[name].edge_index[1]]
            time = batch[name].edge_time if time_attr == "edge_time" else batch[name[0]].time[batch[name].edge_index[0]]
            assert bool((time <= now[seeds][tree]).all())
            seen += len(time)
    assert seen > 300


def test_seeds_without_input_time_have_their_own_times():
    data = random_hetero(seed=7)
    for batch in NeighborLoader(data, [-1], "paper", time_attr="time", batch_size=16):
        assert "seed_time" not in batch["paper"], "as in PyG"
        own = batch["paper"].time[: batch["paper"].batch_size]
        for name in RELATIONS:
            edges = batch[name].edge_index
            assert bool((batch[name[0]].time[edges[0]] <= own[batch[name[2]].batch[edges[1]]]).all())


@pytest.mark.parametrize("edge_type", [None, BUYS, RELATIONS[2]], ids=["homogeneous", "two types", "one type"])
@pytest.mark.parametrize(
    "negatives",
    [None, NegativeSampling("binary", 1), NegativeSampling("triplet", 2)],
    ids=["none", "binary", "triplet"],
)
def test_edges_with_times_see_no_newer_vertices_and_no_newer_negatives(edge_type, negatives):
    if edge_type is None:
        data = graph(time=torch.arange(150) % 9)
        source = target = data.time
        edges = data.edge_index
    else:
        data = random_hetero(seed=8)
        source, target = data[edge_type[0]].time, data[edge_type[2]].time
        edges = data[edge_type].edge_index
    now = torch.maximum(source[edges[0]], target[edges[1]])
    seeds = edges if edge_type is None else (edge_type, edges)
    loader = LinkNeighborLoader(
        data, [3], seeds, edge_label_time=now, time_attr="time", neg_sampling=negatives, batch_size=32, seed=1
    )
    for batch in loader:
        of = batch if edge_type is None else batch[edge_type]
        ends = (batch, batch) if edge_type is None else (batch[edge_type[0]], batch[edge_type[2]])
        times = now[of.input_id]
        if negatives is None or negatives.is_binary():
            copies = 1 if negatives is None else 2
            assert torch.equal(of.edge_label_time, times.repeat(copies))
            for end, positions in zip(ends, of.edge_label_index):
                assert bool((end.time[positions] <= times.repeat(copies)).all())
        else:
            assert torch.equal(ends[0].seed_time, times) and torch.equal(ends[1].seed_time, times)
            assert bool((ends[1].time[ends[1].dst_neg_index] <= times[:, None]).all())
        for store in batch.node_stores:  # vertices of a tree are not newer than its edge
            assert bool((store.time <= times[store.batch]).all())


def test_a_neighbour_of_greater_weight_is_drawn_more_often():
    weight = torch.tensor([1.0, 0.0, 3.0, 6.0])
    loader = NeighborLoader(
        Data(edge_index=star(4), num_nodes=5, weight=weight),
        [1],
        [0] * 4000,
        weight_attr="weight",
        batch_size=1,
        seed=1,
    )
    drawn = Counter(int(batch.e_id) for batch in loader)
    assert p_of_chances(drawn.elements(), {0: 0.1, 1: 0.0, 2: 0.3, 3: 0.6}) > FALSE_ALARM


# --- our sampler in other libraries -------------------------------------------------------------------------


def test_pygs_loaders_draw_with_our_sampler_in_worker_processes():
    sampler = NeighborSampler(graph(), [2])
    loader = NodeLoader(graph(), sampler, input_nodes=[7] * 8, batch_size=1, num_workers=2)
    for batch in loader:
        assert torch.equal(batch.n_id[batch.edge_index], graph().edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr.view(-1).long(), batch.e_id)


def test_a_sampler_draws_from_torchs_generator_unless_it_gets_a_key():
    sampler, seeds = NeighborSampler(graph(), [1]), NodeSamplerInput(None, torch.arange(150))
    torch.manual_seed(3)
    first, second = (sampler.sample_from_nodes(seeds).edge for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(sampler.sample_from_nodes(seeds).edge, first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    assert torch.equal(sampler.sample_from_nodes(seeds, key=1).edge, sampler.sample_from_nodes(seeds, key=1).edge)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copied_sampler_takes_other_fanouts_as_lightning_sets_them():
    for data, seeds in (
        (graph(), NodeSamplerInput(None, TEN)),
        (hetero(), NodeSamplerInput(None, TEN, input_type="paper")),
    ):
        sampler = NeighborSampler(data, [1, 1])
        other = copy.copy(sampler)
        for name, value in {
            "num_neighbors": [-1],
            "subgraph_type": "directional",
            "replace": False,
            "disjoint": True,
        }.items():
            setattr(other, name, value)
        assert sampler.num_neighbors.values == [1, 1] and not sampler.disjoint
        assert other.num_neighbors.values == [-1] and other.disjoint
        counts = other.sample_from_nodes(seeds).num_sampled_edges
        assert all(len(c) == 1 for c in (counts.values() if isinstance(counts, dict) else [counts]))
        assert sampler.sample_from_nodes(seeds).batch is None


def with_names(first: str, second: str, *relations: str) -> HeteroData:
    data = HeteroData()
    data[first].x, data[second].x = torch.arange(6.0).view(-1, 1), torch.arange(4.0).view(-1, 1)
    for relation in relations:
        data[first, relation, second].edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]])
    return data


@pytest.mark.filterwarnings("ignore:There exist type names")
@pytest.mark.parametrize("form", [dict, NumNeighbors])
@pytest.mark.parametrize("on", ["data", "parts"])
def test_fanouts_may_be_given_for_edge_types_with_any_names(on, form, tmp_path):
    peer("pyg_lib")  # PyG's loader samples with it
    data = with_names("u__v", "__i", "my__rel", "to")
    fanouts = {("u__v", "my__rel", "__i"): [1], ("u__v", "to", "__i"): [2]}
    source = data if on == "data" else salientpp.partition(data, 1, tmp_path / "d", fanouts, 4)
    loader = NeighborLoader(source, form(fanouts), ("__i", None), batch_size=2)
    theirs = next(iter(torch_geometric.loader.NeighborLoader(data, fanouts, ("__i", None), batch_size=2)))
    batch = next(iter(loader))
    for type_, (fanout,) in fanouts.items():
        assert batch[type_].edge_index.size(1) == theirs[type_].edge_index.size(1) == 2 * fanout
    assert loader.state_dict()["fingerprint"]["num_neighbors"] == [[1], [2]]


@pytest.mark.filterwarnings("ignore:There exist type names")
def test_fanouts_of_edge_types_that_pyg_confuses_raise_a_clear_error():
    data = with_names("u", "i", "x")
    data["u", "x__i", "i"].edge_index = data["u", "x", "i"].edge_index
    data["u", "x", "i__i"].edge_index = data["u", "x", "i"].edge_index
    data["i__i"].num_nodes = 4
    fanouts = {("u", "x", "i"): [1], ("u", "x__i", "i"): [1], ("u", "x", "i__i"): [2]}
    with pytest.raises(
        ValueError,
        match=r"cannot tell \('u', 'x__i', 'i'\) and \('u', 'x', 'i__i'\) apart, .*; rename one, or pass a list",
    ):
        NeighborLoader(data, fanouts, ("i", None))
    NeighborLoader(data, [2], ("i", None))


def only_edges(declared: bool) -> HeteroData:
    """Makes a graph in which ``b`` has no attributes, and 7 vertices by its edges."""
    data = HeteroData()
    data["a"].x = torch.arange(6.0).view(3, 2)
    if declared:
        data.get_node_store("b")
    data["b", "to", "a"].edge_index = torch.tensor([[0, 4, 2], [0, 1, 2]])
    data["a", "of", "b"].edge_index = torch.tensor([[0, 1], [3, 6]])
    return data


@pytest.mark.parametrize("seeds", ["a", "b"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_type_that_has_only_edges_gets_its_size_from_them(declared, seeds, tmp_path):
    if declared:
        peer("pyg_lib")  # PyG's loader samples with it
    data = only_edges(declared)
    with pytest.warns(
        UserWarning,
        match=r"data\['b'\] has no attribute .* so 7 is assumed, one more than .*; set data\['b'\].num_nodes",
    ):
        loader = NeighborLoader(data, [-1, -1], (seeds, torch.arange(3)), batch_size=3)
    assert "b" in data.node_types if declared else data.node_types == ["a"], "the user's object is unchanged"
    if declared:  # otherwise PyG's libraries do not find the type
        theirs = torch_geometric.loader.NeighborLoader(data, [-1, -1], (seeds, torch.arange(3)), batch_size=3)
        assert canonical(next(iter(loader))) == canonical(next(iter(theirs)))
    with pytest.warns(UserWarning, match="so 7 is assumed"):
        part = salientpp.partition(data, 2, tmp_path / "d", [-1, -1], 2)
    assert {type_: book.num_vertices for type_, book in part.books.items()} == {"a": 3, "b": 7}
    part = salientpp.load(tmp_path / "d", part_id=0)
    assert sorted(torch.cat([part.split("all", p, "b") for p in range(2)]).tolist()) == list(range(7))


def test_a_type_without_edges_and_attributes_is_still_refused_by_name():
    with pytest.raises(ValueError, match="data must give the number of vertices of 'c'; set num_nodes"):
        data = only_edges(True)
        data.get_node_store("c")
        NeighborLoader(data, [2], "a")


SHORT = ("user", "item")


def rated(*more: tuple[str, str, str]) -> HeteroData:
    data = HeteroData()
    data["user"].x, data["item"].x = torch.arange(4.0).view(-1, 1), torch.arange(3.0).view(-1, 1)
    for name in more:
        data[name].edge_index = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])
    return data


@pytest.mark.parametrize("relation", ["rates", "to"])
def test_short_edge_types_mean_the_same_on_parts_as_in_pyg(relation, tmp_path):
    data, full = rated(("user", relation, "item")), ("user", relation, "item")
    edge_split = {SHORT: {"train": torch.tensor([1, 2])}}
    part = salientpp.partition(data, 1, tmp_path / "d", [2], 4, edge_split=edge_split)
    assert part.edge_split("train", type_=SHORT).numel() == 2
    for source in (data, part):
        for given in (SHORT, list(SHORT), full, (SHORT, None), (full, None)):
            (batch,) = LinkNeighborLoader(source, [2], given, batch_size=4)
            assert batch.edge_types == [full] and batch[full].edge_label_index.size(1) == 4
    for given in ((SHORT, "train"), (full, "train")):
        (batch,) = LinkNeighborLoader(part, [2], given, batch_size=4)
        assert batch[full].input_id.numel() == 2
    pairs = torch.tensor([[3], [2]])
    (batch,) = LinkNeighborLoader(part, [2], (SHORT, pairs), batch_size=4)
    ends = batch[full].edge_label_index
    assert [batch["user"].n_id[ends[0]].item(), batch["item"].n_id[ends[1]].item()] == [3, 2]


def test_ambiguous_short_edge_types_are_refused_with_all_meanings(tmp_path):
    part = salientpp.partition(rated(("user", "rates", "item"), ("user", "sees", "item")), 1, tmp_path / "d", [2], 4)
    with pytest.raises(
        ValueError, match=r"must be an edge type \(\('user', 'rates', 'item'\), \('user', 'sees', 'item'\)\)"
    ):
        LinkNeighborLoader(part, [2], SHORT)
    with pytest.raises(ValueError, match=r"type_ must be an edge type of .*, got \('user', 'item'\)"):
        part.edge_split("all", type_=SHORT)
    with pytest.raises(ValueError, match=r"must be an edge type .*, got \('item', 'user'\)"):
        LinkNeighborLoader(part, [2], ("item", "user"))


def test_lightnings_data_module_takes_our_sampler():
    from torch_geometric.data.lightning import LightningNodeData, datamodule

    if not datamodule._pl_is_available:
        pytest.skip("Lightning is not installed")
    data = graph()
    module = LightningNodeData(
        data, node_sampler=NeighborSampler(data, [2]), batch_size=8, eval_loader_kwargs={"num_neighbors": [-1]}
    )
    train, val = next(iter(module.train_dataloader())), next(iter(module.val_dataloader()))
    assert torch.equal(train.n_id[train.edge_index], data.edge_index[:, train.e_id])
    assert torch.bincount(val.edge_index[1]).max() > 2


class FirstNeighbours(BaseSampler):
    """User's own sampler: for every seed it draws the first edge into it, numbered in its own order."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.order = torch.arange(data.num_edges).flip(0)

    def sample_from_nodes(self, inputs: NodeSamplerInput) -> SamplerOutput:
        row, col = self.data.edge_index[:, self.order]
        edge = torch.cat([(col == v).nonzero().flatten()[:1] for v in inputs.node])
        node = torch.cat([inputs.node, row[edge]]).unique()
        node = torch.cat([inputs.node, node[~torch.isin(node, inputs.node)]])
        place = {int(v): i for i, v in enumerate(node)}
        local = lambda ids: torch.tensor([place[int(v)] for v in ids], dtype=torch.int64)  # noqa: E731
        return SamplerOutput(node, local(row[edge]), local(col[edge]), edge, metadata=(inputs.input_id, None))

    def sample_from_edges(self, inputs: Any, neg_sampling: Any = None) -> SamplerOutput:
        raise NotImplementedError

    @property
    def edge_permutation(self) -> Tensor:
        return self.order


def test_a_users_own_sampler_is_used():
    data = graph()
    ours = list(NeighborLoader(data, [99], TEN, neighbor_sampler=FirstNeighbours(data), batch_size=4, num_workers=2))
    theirs = list(NodeLoader(data, FirstNeighbours(data), TEN, batch_size=4))
    for a, b in zip(ours, theirs, strict=True):
        assert differences(a, b) == []
        assert torch.equal(a.n_id[a.edge_index], data.edge_index[:, a.e_id])
    with pytest.raises(
        ValueError, match="device_rows needs to know how batches are sampled, which a FirstNeighbours does not tell"
    ):
        NeighborLoader(data, [2], TEN, neighbor_sampler=FirstNeighbours(data), device_rows=0.5)
    with pytest.raises(
        TypeError,
        match="neighbor_sampler must be a torch_geometric.sampler.BaseSampler with sample_from_nodes, 'device' or None, got int",
    ):
        NeighborLoader(data, [2], TEN, neighbor_sampler=3)


def test_pygs_sampler_in_our_loader_gives_pygs_batches(backend):
    for data, seeds in ((graph(), TEN), (hetero(), ("paper", TEN))):
        sampler = PYGS.NeighborSampler(data, [-1, -1])
        ours = list(map(canonical, NeighborLoader(data, [1], seeds, neighbor_sampler=sampler, batch_size=4)))
        assert ours == list(map(canonical, PYGS.NeighborLoader(data, [-1, -1], seeds, batch_size=4)))


# --- torch's arguments ---------------------------------------------------------------------------------------


def test_a_sampler_orders_the_seeds(side):
    data, chosen = graph(), torch.arange(40, 100)
    make = functools.partial(side.NeighborLoader, data, [2], chosen, batch_size=8)
    print("torch seed 1")
    torch.manual_seed(1)
    balanced = make(sampler=ImbalancedSampler(data.y, input_nodes=chosen, num_samples=600))
    assert len(balanced) == 75
    classes_drawn = torch.cat([batch.y[: batch.batch_size] for batch in balanced])
    assert len(classes_drawn) == 600 and torch.bincount(classes_drawn).min() > 40, "every class equally often"
    generator = torch.Generator().manual_seed(2)
    shuffled = make(sampler=torch.utils.data.RandomSampler(range(60), generator=generator))
    seeds = [torch.cat([batch.n_id[: batch.batch_size] for batch in shuffled]) for _ in range(2)]
    assert all(torch.equal(order.sort().values, chosen) for order in seeds) and not torch.equal(*seeds)
    some = make(sampler=torch.utils.data.SubsetRandomSampler([3, 5, 7]), drop_last=False)
    assert sorted(torch.cat([b.n_id[: b.batch_size] for b in some]).tolist()) == [43, 45, 47]


def test_a_batch_sampler_makes_the_batches(side):
    batches = [[0, 3], [5], [59, 59, 2]]
    loader = side.NeighborLoader(graph(), [2], torch.arange(40, 100), batch_sampler=batches)
    assert len(loader) == 3
    for _ in range(2):
        assert [(b.n_id[: b.batch_size] - 40).tolist() for b in loader] == batches
    edges = side.LinkNeighborLoader(graph(), [2], batch_sampler=batches)
    assert [canonical(batch)[None, "edge_label_index"] for batch in edges] == [
        graph().edge_index[:, b].tolist() for b in batches
    ]


def test_samplers_are_refused_where_they_cannot_work(tmp_path):
    with pytest.raises(ValueError, match="sampler must give its items in every epoch, got a generator"):
        NeighborLoader(graph(), [2], TEN, sampler=(i for i in range(3)))
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        NeighborLoader(graph(), [2], TEN, sampler=[1, 2], shuffle=True)
    loader = NeighborLoader(graph(), [2], TEN, sampler=[1, 2])
    with pytest.raises(ValueError, match="a loader with a user's sampler or batch_sampler has no state"):
        loader.state_dict()
    part = salientpp.partition(random_data(60, 200), 1, tmp_path / "d", [3], 8)
    with pytest.raises(ValueError, match="sampler= is for a Data or HeteroData object"):
        NeighborLoader(part, [2], "train", sampler=[1, 2])


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_worker_init_fn_is_called_once_in_every_thread_and_epoch(persistent):
    calls = []
    gate = threading.Barrier(3)

    def greet(number: int) -> None:
        gate.wait(timeout=HANG)  # passes only when all three threads have come
        calls.append((number, threading.current_thread().name))

    loader = NeighborLoader(
        graph(), [2], batch_size=4, num_workers=3, worker_init_fn=greet, persistent_workers=persistent
    )
    for epoch in range(3):
        list(loader)
        epochs = 1 if persistent else epoch + 1
        assert len(calls) == 3 * epochs
        for k in range(epochs):
            numbers, names = zip(*calls[3 * k : 3 * k + 3])
            assert sorted(numbers) == [0, 1, 2] and len(set(names)) == 3


def test_worker_init_fn_needs_workers_and_its_errors_reach_the_user():
    def fail(number: int) -> None:
        raise RuntimeError(f"no luck in worker {number}")

    assert len(list(NeighborLoader(graph(), [2], TEN, worker_init_fn=fail))) == 10
    with pytest.raises(StageError, match="rank 0, batch 0, stage sample: no luck in worker [01]"):
        list(NeighborLoader(graph(), [2], TEN, worker_init_fn=fail, num_workers=2))


@pytest.mark.parametrize(
    "options",
    [
        {"pin_memory": torch.accelerator.is_available()}, {"timeout": 0}, {"timeout": 60}, {"filter_per_worker": True}, {"filter_per_worker": False},
        {"num_workers": 2, "persistent_workers": True}, {"num_workers": 2, "prefetch_factor": 5}, {"collate_fn": len, "dataset": [1]},
        {"pin_memory_device": ""}, {"in_order": True}, {"in_order": False},
    ],
    ids=str,
)  # fmt: skip
def test_these_arguments_change_no_batch(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = NeighborLoader(hetero(), [2, 2], "paper", batch_size=16, seed=1, **options)
        batches = list(loader)
    for a, b in zip(batches, NeighborLoader(hetero(), [2, 2], "paper", batch_size=16, seed=1), strict=True):
        assert differences(a, b) == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pin_memory_without_an_accelerator_changes_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (batch,) = NeighborLoader(graph(), [2], TEN, batch_size=10, pin_memory=True)
    assert not batch.x.is_pinned()


def test_a_multiprocessing_context_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="multiprocessing_context has no effect: workers are threads"):
        loader = NeighborLoader(graph(), [2], TEN, num_workers=2, multiprocessing_context="spawn")
    assert len(list(loader)) == 10


def test_the_generator_seeds_the_loader():
    first, second, other = (
        NeighborLoader(hetero(), [2], "paper", batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(k))
        for k in (8, 8, 9)
    )
    assert first.seed == second.seed != other.seed
    assert all(differences(a, b) == [] for a, b in zip(first, second, strict=True))


def test_a_loader_has_a_short_repr_and_gives_single_batches(side):
    loader = side.NeighborLoader(hetero(), [-1], ("paper", torch.arange(40, 60)), batch_size=3)
    assert str(loader).startswith("NeighborLoader(") and len(loader) == 7
    for index in ([0, 3], torch.tensor([0, 3])):
        batch = loader(index)
        assert batch["paper"].n_id[:2].tolist() == [40, 43] and batch["paper"].batch_size == 2
    edges = side.LinkNeighborLoader(graph(), [-1], batch_size=3)
    assert str(edges).startswith("LinkNeighborLoader(") and len(edges) == 87
    assert canonical(edges([0, 3]))[None, "edge_label_index"] == graph().edge_index[:, [0, 3]].tolist()


def test_transforms_may_be_set_later(side):
    loader = side.NeighborLoader(graph(), [2], TEN)
    loader.transform = lambda batch: "transformed"
    assert list(loader) == ["transformed"] * 10 and loader([0]) == "transformed"
    loader.transform, seen = None, []
    loader.transform_sampler_output = lambda sampled: seen.append(sampled) or sampled
    assert len(list(loader)) == len(seen) == 10


def test_a_sampler_describes_its_graph_in_one_line():
    assert (
        repr(NeighborSampler(graph(), [2]))
        == "NeighborSampler(num_neighbors=[2], graph=Graph(num_vertices=150, num_edges=260, indices=torch.int32))"
    )
    several = repr(NeighborSampler(there_and_back(), [2]))
    assert (
        "num_vertices={'paper': 60, 'author': 35}" in several
        and "('paper', 'cites', 'paper'): 100" in several
        and len(several) < 300
    )


def test_directed_false_is_the_old_name_for_induced():
    with pytest.warns(DeprecationWarning, match="directed=False is deprecated; pass subgraph_type='induced'"):
        old = NeighborLoader(graph(), [2], TEN, directed=False, batch_size=5, seed=1)
    new = NeighborLoader(graph(), [2], TEN, subgraph_type="induced", batch_size=5, seed=1)
    assert all(differences(a, b) == [] for a, b in zip(old, new, strict=True))


def test_warnings_of_samplers_name_the_users_line():
    with pytest.warns(DeprecationWarning, match="directed=False") as old:
        NeighborSampler(graph(), [2], directed=False)
    with pytest.warns(UserWarning, match="neither edge_index nor adj_t") as without:
        NeighborSampler(Data(x=torch.arange(6)), [2])
    assert [old[0].filename, without[0].filename] == [__file__] * 2


def test_a_graph_without_edges_warns_and_gives_only_seeds():
    with pytest.warns(UserWarning, match="data has neither edge_index nor adj_t, so batches hold their seeds only"):
        loader = NeighborLoader(Data(x=torch.arange(6)), [2], batch_size=3)
    assert [batch.x.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


# --- state, statistics, memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SEEDED)
def test_a_stopped_run_resumes_bit_for_bit(kind):
    make = SEEDED[kind]
    whole = make()
    epochs = [list(whole) for _ in range(2)]
    for stop in (0, 1, len(whole)):
        loader = make()
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        resumed = make(num_workers=2, depth=3)
        resumed.load_state_dict(loader.state_dict())
        for want in (epochs[0][stop:], epochs[1]):
            for a, b in zip(resumed, want, strict=True):
                assert differences(a, b) == []


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ("hetero", "times", "disjoint: expected True, got False"),
        ("hetero", lambda: NeighborLoader(hetero(), [3, 2], ("author", torch.arange(90) % 70), batch_size=16, shuffle=True), "input_nodes: expected 'author: "),
        ("hetero", lambda: NeighborLoader(hetero(), [3, 3], ("paper", None), batch_size=16, shuffle=True), r"num_neighbors: expected \[\[3, 3\], "),
        ("hetero", lambda: NeighborLoader(there_and_back(), [3, 2], ("paper", None), batch_size=16, shuffle=True), "dataset: expected"),
        ("edges", lambda: LinkNeighborLoader(graph(), [3, 2], batch_size=32, shuffle=True), r"neg_sampling: expected None, got \['binary', 1, None, None\]"),
        (
            "hetero edges",
            lambda: LinkNeighborLoader(
                hetero(), [3, 2], BUYS, batch_size=16, shuffle=True, neg_sampling=NegativeSampling("triplet", 2, dst_weight=torch.ones(70))
            ),
            r"neg_sampling: expected \['triplet', 2, None, '[0-9a-f]{16}'\], got \['triplet', 2, None, None\]",
        ),
        ("stores", lambda: NeighborLoader(stores(there_and_back()), [3, 2], ("paper", None), batch_size=16, shuffle=True), "dataset: expected"),
    ],
)  # fmt: skip
def test_the_state_of_another_loader_raises_a_clear_error(one, other, text):
    loader = (SEEDED[other] if isinstance(other, str) else other)()
    with pytest.raises(ValueError, match=text):
        loader.load_state_dict(SEEDED[one]().state_dict())


@pytest.mark.parametrize("device_rows", [0, 0.5, 1.0])
def test_statistics_and_memory_add_up_over_types(device_rows):
    data = hetero()
    loader = NeighborLoader(data, [3, 2], ("paper", TEN), batch_size=4, device_rows=device_rows, seed=1)
    rows = sum(batch.num_nodes for batch in loader)
    stats_ = loader.stats()
    assert stats_.batches == 3 and stats_.rows == stats_.rows_device + stats_.rows_host == rows
    assert (stats_.rows_device > 0) == (device_rows > 0) and (stats_.rows_host > 0) == (device_rows < 1)
    memory = loader.memory_used()
    row_bytes = 2 * 4 + 8  # bytes of x and time
    assert memory["host"] == row_bytes * data.num_nodes and memory["cache"] == 0
    assert memory["device"] >= row_bytes * sum(int(device_rows * data[name].num_nodes) for name in data.node_types)
    assert memory["graph"] == NeighborSampler(data, [1]).nbytes > 0


@pytest.mark.parametrize("kind", ["hetero", "edges", "hetero edges"])
def test_the_hottest_rows_are_kept_on_the_device(kind):
    loader = SEEDED[kind](device_rows=0.25)
    for _ in range(3):
        list(loader)
    stats_ = loader.stats()
    assert stats_.rows_device > 1.15 * 0.25 * stats_.rows, "hot rows are asked for more often than others"


# --- refusals ---------------------------------------------------------------------------------------------------


def without_features() -> HeteroData:
    data = hetero().clone()
    del data["venue"].x, data["venue"].time, data["venue", "prints", "paper"]
    return data


@pytest.mark.parametrize(
    ("loader", "error", "text"),
    [
        (node(data=hetero, input_nodes=None), ValueError, "input_nodes of a graph with several types must be a node type or .*, got None"),
        (node(data=hetero, input_nodes="book"), ValueError, r"input_nodes must be of a node type of the data \(paper, author, venue\), got 'book'"),
        (node(data=hetero, input_nodes=TEN), ValueError, "input_nodes of a graph with several types must be a node type"),
        (node(data=hetero, input_nodes=("paper", [0, 90])), ValueError, r"input_nodes must be in \[0, 90\), got 90 at position 1"),
        (node(data=hetero, input_nodes=("paper", mask_of(91, 2))), ValueError, r"input_nodes as a mask must have shape \[90\], got \[91\]"),
        (node(data=hetero, input_nodes="paper", num_neighbors={BUYS: [2]}), ValueError, "num_neighbors must .*: Missing number of neighbors for edge type"),
        (node(data=hetero, input_nodes="paper", num_neighbors={"x": [2]}), ValueError, "num_neighbors must have a list of .*, got {'x': .2.}: "),
        (node(data=hetero, input_nodes="paper", num_neighbors={("a", "b", "c"): [2]}), ValueError, "Not all edge types .* exist in the graph"),
        (
            node(data=hetero, input_nodes="paper", num_neighbors=dict(zip(RELATIONS, ([2], [-2], [1], [1])))), ValueError,
            r"edge type \('author', 'writes', 'paper'\): num_neighbors\[0\] must be an integer >= 0, .*, got -2",
        ),
        (node(data=without_features, input_nodes="paper"), ValueError, "data must give the number of vertices of 'venue'; set num_nodes"),
        (node(data=HeteroData, input_nodes="paper"), ValueError, r"input_nodes must be of a node type of the data \(\), got 'paper'"),
        (node(input_time=TEN), ValueError, "'input_time' is set while 'time_attr' is not set"),
        (node(time_attr="y", input_time=TEN), ValueError, r"input_time must have one entry per seed, expected shape \[20\], got \[10\]"),
        (node(input_id=TEN), ValueError, r"input_id must have one entry per seed, expected shape \[20\], got \[10\]"),
        (node(time_attr="age"), ValueError, "The time attribute 'age' is neither a node-level or edge-level attribute"),
        (node(data=hetero, input_nodes="paper", time_attr="age"), ValueError, "The time attribute 'age' is neither"),
        (node(weight_attr="mass"), ValueError, "weight_attr names the edge weights, but no edges have an attribute 'mass'"),
        (node(temporal_strategy="last"), ValueError, "temporal_strategy='last' needs times; pass time_attr too"),
        (node(temporal_strategy="first", time_attr="y"), ValueError, "temporal_strategy must be 'uniform' or 'last', got 'first'"),
        (node(subgraph_type="outer"), ValueError, r"subgraph_type must be one of \['directional', 'bidirectional', 'induced'\], got 'outer'"),
        (node(subgraph_type=0), ValueError, r"subgraph_type must be one of \['directional', 'bidirectional', 'induced'\], got 0"),
        (node(columns=("x", "y")), ValueError, "columns can choose attributes only of partitioned graphs"),
        (node(data=lambda: stores(graph()), weight_attr="w"), NotImplementedError, "weight_attr is for a Data or HeteroData"),
        (link(edge_label=TEN), ValueError, r"edge_label must have one entry per edge of edge_label_index, expected 20, got \[10\]"),
        (link(edge_label_time=TEN), ValueError, "'edge_label_time' is set while 'time_attr' is not set. Both arguments must"),
        (link(time_attr="y"), ValueError, "'edge_label_time' is not set while 'time_attr' is set. Both arguments must"),
        (link(edge_label=torch.ones(20), neg_sampling="triplet"), ValueError, "edge_label needs to be undefined for 'triplet'"),
        (link(edge_label_index=torch.tensor([[0, 1], [2, 150]])), ValueError, r"edge_label_index\[1, 1\] must be in \[0, 150\), got 150"),
        (link(edge_label_index=TEN), ValueError, r"edge_label_index must be a tensor of shape \[2, M\], got \[10\]"),
        (link(edge_label_index=torch.zeros(2, 3)), ValueError, "edge_label_index must have dtype int64 or int32, got torch.float32"),
        (link(data=hetero), ValueError, "edge_label_index of a graph with several types must be an edge type or"),
        (link(data=hetero, edge_label_index=[None]), ValueError, "edge_label_index of a graph with several types must be an edge type or"),
        (link(data=hetero, edge_label_index=("a", "b", "c")), ValueError, r"edge_label_index must be of an edge type of the data .*, got \('a', 'b', 'c'\)"),
        (link(data=hetero, edge_label_index=(("a", "b", "c"), None)), ValueError, "edge_label_index must be of an edge type of the data"),
        (link(data=hetero, edge_label_index=(("a", "b", "c"), graph().edge_index)), ValueError, "edge_label_index must join node types of the data"),
        (lambda side: side.LinkNeighborLoader("cora", [2]), TypeError, "data must be a torch_geometric.data.Data, a HeteroData, a pair .*, got str"),
        (lambda side: side.NeighborSampler("cora", [2]), TypeError, "data must be a torch_geometric.data.Data, a HeteroData or a pair .*, got str"),
        (lambda side: side.NeighborSampler(graph(), [2], sample_direction="up"), ValueError, "sample_direction must be 'forward' or 'backward', got 'up'"),
    ],
)  # fmt: skip
def test_a_wrong_argument_raises_a_clear_error(loader, error, text):
    with pytest.raises(error, match=text):
        loader(OURS)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"custom_cls": Citations}, "custom_cls is for a pair of FeatureStore and GraphStore"),
        (
            {"neighbor_sampler": FirstNeighbours(graph())},
            "neighbor_sampler= other than salientpp.NeighborSampler is for data in one process",
        ),
        ({"sampler": [1, 2]}, "sampler= is for a Data or HeteroData object"),
        ({"batch_sampler": [[1, 2]]}, "batch_sampler= is for a Data or HeteroData object"),
    ],
)
def test_an_argument_that_partitioned_graphs_lack_raises_a_clear_error(options, text, tmp_path):
    part = salientpp.partition(random_data(60, 200), 1, tmp_path / "d", [3], 8)
    for loader in (
        functools.partial(NeighborLoader, part, [2], "train"),
        functools.partial(LinkNeighborLoader, part, [2]),
    ):
        with pytest.raises(ValueError, match=text):
            loader(**options)


@pytest.mark.parametrize("kind", ["induced", "bidirectional"])
def test_a_partitioned_graph_gives_induced_and_bidirectional_subgraphs(kind, tmp_path):
    data = random_data(60, 200, edge_attributes=True)
    part = salientpp.partition(data, 1, tmp_path / "d", [3], 8)
    for batch in NeighborLoader(part, [2, 2], "train", subgraph_type=kind, batch_size=8, seed=1):
        ends = part.original_id(batch.n_id)[batch.edge_index]
        given = {*map(tuple, data.edge_index.t().tolist())}
        assert {*map(tuple, ends.t().tolist())} <= given
        if kind == "induced":
            inside = set(part.original_id(batch.n_id).tolist())
            assert sorted(map(tuple, ends.t().tolist())) == sorted(
                (u, v) for u, v in data.edge_index.t().tolist() if u in inside and v in inside
            )
        else:
            assert {(v, u) for u, v in map(tuple, ends.t().tolist())} == {*map(tuple, ends.t().tolist())}


# --- the page that lists every argument -------------------------------------------------------------------------

TABLES = {
    "NeighborLoader": (torch_geometric.loader.NeighborLoader, NeighborLoader),
    "LinkNeighborLoader": (torch_geometric.loader.LinkNeighborLoader, LinkNeighborLoader),
    "NeighborSampler": (torch_geometric.sampler.NeighborSampler, NeighborSampler),
    "BidirectionalNeighborSampler": (
        torch_geometric.sampler.BidirectionalNeighborSampler,
        salientpp.BidirectionalNeighborSampler,
    ),
    "DataLoader": (torch.utils.data.DataLoader, None),
}


def arguments_of(class_: type) -> dict[str, str]:
    """Returns names with their defaults as source text, in order; the default is empty if there is none."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [p for p in list(inspect.signature(class_.__init__).parameters.values())[1:] if p.kind not in kinds]
    return {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters}


def table_of(section: str) -> dict[str, str]:
    text = (ROOT / "docs" / "reference" / "pyg-arguments.md").read_text()
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\| (.+) \|$", body, re.MULTILINE)
    assert len(rows) == body.count("\n|") - 2, "every row of the table is read, except its two header lines"
    return {name: default for name, default, _ in rows}


@pytest.mark.parametrize("section", TABLES)
def test_the_page_of_arguments_lists_those_of_the_installed_release(section):
    theirs, _ = TABLES[section]
    assert table_of(section) == arguments_of(theirs), (
        "a new release has other arguments: describe them in docs/reference/pyg-arguments.md"
    )


def test_the_page_of_arguments_lists_arguments_that_pygs_loaders_pass_on():
    for base, loader in ((NodeLoader, "NeighborLoader"), (LinkLoader, "LinkNeighborLoader")):
        rest = {
            name: default for name, default in arguments_of(base).items() if name not in arguments_of(TABLES[loader][0])
        }
        assert table_of("NodeLoader and LinkLoader") == {
            k: v for k, v in rest.items() if k not in ("node_sampler", "link_sampler")
        }


@pytest.mark.parametrize("section", [name for name, (_, ours) in TABLES.items() if ours is not None])
def test_our_classes_take_pygs_arguments_in_pygs_order(section):
    theirs, ours = map(arguments_of, TABLES[section])
    assert dict(itertools.islice(ours.items(), len(theirs))) == theirs and list(ours)[: len(theirs)] == list(theirs)
