"""Tests (laws) that every form must pass in which ranks hold a topology, such as in parts.

The test of a form subclasses :class:`TopologyLaws` and sets ``stored``, the form of the directory, and ``sampler``. The laws
compare its loader with one over a directory whose topology every rank maps as a whole: batches are equal, element for element.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler, PartitionedGraph
from salientpp.sampling.topology import Mfg
from salientpp.testing.comparison import compare, differences
from salientpp.testing.graphs import TYPED_FANOUTS, random_data, typed_data
from salientpp.testing.ranks import run_ranks

FANOUTS, BATCH = [4, 3], 8

#: Numbers of parts and of ranks: one rank, a part per rank, two ranks per part, and several parts per rank.
LAYOUTS = [(2, 1), (2, 2), (4, 4), (2, 4), (4, 2), (4, 3)]

#: A loader over a directory: kind of seeds, and arguments.
Case = tuple[str, dict[str, Any]]


# --- graphs -----------------------------------------------------------------------------------------------


def one_type(num_vertices: int = 240, num_edges: int = 1300, seed: int = 3) -> Data:
    """Makes a graph with times, and edge attributes of several dtypes. Its parts get different numbers of seeds."""
    data = random_data(num_vertices, num_edges, seed=seed, directed=True, edge_attributes=True)
    generator = torch.Generator().manual_seed(1)
    data.time = torch.randint(20, (data.num_nodes,), generator=generator)
    data.edge_time = torch.randint(20, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator).mul_(torch.arange(data.num_edges) % 7 > 0)
    data.code = (torch.arange(data.num_edges) % 2**15).to(torch.int16)
    data.flag = torch.arange(data.num_edges) % 3 == 0
    data.wide = torch.rand(data.num_edges, 2, 3, generator=generator).to(torch.bfloat16)
    return data


def directories(folder: Path, num_parts: int, form: str) -> Path:
    """Writes a graph of one type and one of several types, each whole and in ``form``."""
    for stored in {"whole", form}:
        salientpp.partition(one_type(), num_parts, folder / "one" / stored, FANOUTS, BATCH, refine=False, topology=stored)  # fmt: skip
        salientpp.partition(
            typed_data(), num_parts, folder / "typed" / stored, TYPED_FANOUTS, BATCH, seeds=("paper", "train"),
            replicate=["author"], topology=stored, refine=False,
        )  # fmt: skip
    return folder


# --- cases ------------------------------------------------------------------------------------------------


def fewer_edges(mfg: Mfg) -> Mfg:
    """Returns a copy of a sample without every third edge."""
    keep = torch.arange(mfg.row.numel()) % 3 > 0
    return type(mfg)(mfg.node, mfg.row[keep], mfg.col[keep], mfg.edge[keep], mfg.batch)


def with_note(batch: Data) -> Data:
    batch.note = sum(store.n_id.sum() for store in batch.node_stores if "n_id" in store)
    return batch


TIMES: dict[str, Any] = {"time_attr": "edge_time", "input_time": "by position"}

NODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "replace": {"replace": True, "num_workers": 2},
    "all": {"num_neighbors": [-1, 2]},
    "zero": {"num_neighbors": [3, 0, 2]},
    "no hops": {"num_neighbors": []},
    "one hop": {"num_neighbors": [4], "subgraph_type": "induced"},
    "undirected": {"num_neighbors": [4], "directed": False},
    "three hops": {"num_neighbors": [3, 2, 2], "depth": 1, "num_workers": 1},
    "weights": {"weight_attr": "weight", "depth": 3},
    "weights with replacement": {"weight_attr": "weight", "replace": True},
    "node times": {"time_attr": "time"},
    "last": {"time_attr": "time", "temporal_strategy": "last", "weight_attr": "weight"},
    "edge times": TIMES,
    "last edges": {**TIMES, "temporal_strategy": "last"},
    "window": {**TIMES, "time_window": 6},
    "last in a window": {"time_attr": "time", "temporal_strategy": "last", "time_window": 5, "subgraph_type": "induced"},
    "trees": {"disjoint": True, "num_workers": 1},
    "shared draws": {"shared_draws": {"vertices": "batch", "block": 2}},
    "shared trees": {"shared_draws": "batch", "disjoint": True},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced", "depth": 1},
    "induced trees": {"subgraph_type": "induced", "disjoint": True},
    "induced times": {"subgraph_type": "induced", "time_attr": "time"},
    "transforms": {"transform": with_note, "transform_sampler_output": fewer_edges, "num_workers": 1},
    "buckets": {"pad": "bucket"},
    "one size": {"pad": {"static": True}},
    "cache": {"replication_factor": 0.3},
    "cache by degree": {"replication_factor": 0.3, "policy": "degree", "device_rows": 0.4},
    "mean": {"partial_aggregation": "mean"},
    "weighted sum": {"partial_aggregation": {"reduce": "sum", "weight": "weight"}},
    "logical ranks": {"logical_ranks": 4},
    "joined logical ranks": {"logical_ranks": {"number": 4, "join": True}, "num_workers": 1},
    "joined trees": {"logical_ranks": {"number": 4, "join": True}, "disjoint": True, "subgraph_type": "induced"},
    "exact": {"uneven": "exact", "drop_last": True},
    "drop": {"uneven": "drop"},
    "few seeds": {"input_nodes": "by rank", "uneven": "exact", "depth": 3},
    "no order": {"shuffle": False, "columns": ["x", "y"]},
}  # fmt: skip

LINKS: dict[str, dict[str, Any]] = {
    "links": {},
    "binary": {"neg_sampling": "binary", "edge_label": "code"},
    "triplet": {"neg_sampling": "triplet", "disjoint": True, "num_workers": 1},
    "amount": {"neg_sampling": {"mode": "binary", "amount": 1.5}, "subgraph_type": "induced"},
    "link times": {"time_attr": "time", "edge_label_time": "edge_time", "neg_sampling": "binary"},
    "link window": {"time_attr": "time", "edge_label_time": "edge_time", "time_window": 4, "neg_sampling": "triplet"},
    "pairs": {"edge_label_index": "by rank", "num_neighbors": [3], "batch_size": 4, "weight_attr": "weight"},
}

TYPED: dict[str, Case] = {
    "papers": ("node", {}),
    "authors": ("node", {"input_nodes": ("author", "train"), "subgraph_type": "induced", "num_workers": 1}),
    "typed weights": ("node", {"weight_attr": "weight", "replace": True}),
    "typed times": ("node", {"time_attr": "time", "temporal_strategy": "last"}),
    "typed window": ("node", {"time_attr": "time", "time_window": 3, "replication_factor": 0.3}),
    "typed trees": ("node", {"disjoint": True, "subgraph_type": "bidirectional"}),
    "typed shared": ("node", {"shared_draws": "batch", "replication_factor": 0.3}),
    "typed joined": ("node", {"logical_ranks": {"number": 4, "join": True}}),
    "typed links": ("link", {"neg_sampling": "triplet"}),
    "typed binary": ("link", {"neg_sampling": "binary", "subgraph_type": "induced", "replication_factor": 0.3}),
    "typed link times": ("link", {"time_attr": "time", "edge_label_time": "edge_time"}),
}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: ("one", "node", options) for name, options in NODES.items()},
    **{name: ("one", "link", options) for name, options in LINKS.items()},
    **{name: ("typed", *case) for name, case in TYPED.items()},
}

#: Cases that run on every layout. The other cases run only on two ranks with a part each.
SOME = [
    "plain", "three hops", "edge times", "window",
    "shared draws", "induced trees", "cache", "weighted sum", "joined logical ranks", "few seeds",
    "binary", "triplet", "pairs", "authors", "typed binary", "typed joined",
]  # fmt: skip


# --- loaders ----------------------------------------------------------------------------------------------

#: Arguments that a sampler takes instead of the loader.
DRAWS = ("replace", "directed", "subgraph_type", "disjoint", "temporal_strategy", "shared_draws", "time_window")


def in_memory(part: PartitionedGraph, num_neighbors: Any, options: dict[str, Any]) -> NeighborSampler:
    """Returns a sampler over the whole topology in the memory of this process."""
    graph = part.typed_graph(options.get("time_attr"), options.get("weight_attr"))
    draws = {name: options[name] for name in DRAWS if name in options}
    if isinstance(shared := draws.get("shared_draws"), Mapping):
        draws["shared_draws"] = shared.get("vertices")  # the loader joins batches to blocks
    return NeighborSampler(graph, num_neighbors, **draws)


#: Makes the sampler of a loader over the form: ``sampler(part, num_neighbors, options)``. None: the loader makes it.
MakeSampler = Callable[[PartitionedGraph, Any, dict[str, Any]], NeighborSampler] | None


def make(
    root: Path,
    case: tuple[str, str, dict[str, Any]],
    form: str,
    sampler: MakeSampler = None,
    storage_ranks: int = 0,
    hosts: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """Makes the loader of a case.

    Args:
        root: folder with a dataset directory for each graph and form of topology, ``root/GRAPH/FORM``.
        case: (graph, ``"node"`` or ``"link"``, options of the loader).
        form: form of topology, for example ``"parts"``.
        sampler: makes the sampler; None lets the loader make it.
        storage_ranks: number of ranks that only store, as in :func:`salientpp.load`.
        hosts: addresses of storage hosts by the name of the graph, if they serve it.
        more: options that replace those of the case.
    """
    of, kind, given = case
    place = root / of / form if hosts is None else hosts[of]
    part = salientpp.load(place, storage_ranks=storage_ranks)
    num_neighbors = FANOUTS if of == "one" else TYPED_FANOUTS
    options = {"batch_size": BATCH, "shuffle": True, "seed": 5, "num_neighbors": num_neighbors, **given, **more}
    return loader_over(part, of, kind, options, sampler)


def loader_over(data: Any, of: str, kind: str, options: dict[str, Any], sampler: MakeSampler = None) -> Any:
    """Makes a loader of vertices or of links, with default seeds, over a graph of one type or of several."""
    options = {**options}
    if kind == "node":
        options.setdefault("input_nodes", "train" if of == "one" else ("paper", "train"))
        made: Any = NeighborLoader
    else:
        edges = None if of == "one" else ("author", "writes", "paper")
        options = {"edge_label_index": edges, **options, "batch_size": options["batch_size"] * 16}
        made = LinkNeighborLoader
    for name, value in options.items():
        if isinstance(value, str) and value.startswith("by "):
            options[name] = _own(data, name)
    num_neighbors = options.pop("num_neighbors")
    if sampler is not None:
        options["neighbor_sampler"] = sampler(data, num_neighbors, options)
    return made(data, num_neighbors, **options)


def _own(part: PartitionedGraph, name: str) -> Tensor:
    """Returns a value for the loader argument ``name`` that differs from part to part. For ``input_nodes``, part 0 gets no seeds."""
    if name == "input_time":
        ids = (
            part.split("train")
            if part.part_id is not None
            else torch.cat([part.split("train", at) for at in range(part.num_parts)])
        )
        return torch.arange(ids.numel()) % 20
    if name == "edge_label_index":
        generator = torch.Generator().manual_seed(part.part_id or 0)
        return torch.randint(part.num_vertices, (2, 90), generator=generator)
    begin, end = (0, part.num_vertices) if part.part_id is None else part.book.range_of(part.part_id)
    return torch.arange(begin, begin if part.part_id == 0 else min(end, begin + 30))


# --- on ranks ---------------------------------------------------------------------------------------------


def check_cases(rank: int, root: Path, form: str, sampler: MakeSampler, names: list[str]) -> dict[str, list[str]]:
    """Compares an epoch of a loader over the form with one over the whole topology, for each case in ``names``. Returns the differences by case."""
    found = {}
    for name in names:
        ours, want = make(root, CASES[name], form, sampler), make(root, CASES[name], "whole")
        found[name] = compare(ours, want)
        rows, expected = ours.stats().rows_remote, want.stats().rows_remote
        found[name] += [] if rows == expected else [f"{rows} remote rows instead of {expected}"]
    return found


def check_uses(rank: int, root: Path, form: str, sampler: MakeSampler) -> dict[str, list[str]]:
    """Compares the two loaders in unusual uses: loops that end early, several loaders at once, ``rounds()`` and resumed runs. Returns differences by use."""
    plain = CASES["plain"]

    def both(**options: Any) -> tuple[Any, Any]:
        return make(root, plain, form, sampler, **options), make(root, plain, "whole", **options)

    return {use.__name__: use(rank, both) for use in (_ends_early, _in_turn, _at_once, _in_rounds, _resumed)}


def _ends_early(rank: int, both: Any) -> list[str]:
    wrong, mine = [], random.Random(rank)
    for depth, workers in ((1, 0), (10, 0), (4, 2)):
        ours, want = both(depth=depth, num_workers=workers)
        for stop in (0, mine.randint(1, 3), mine.randint(1, 9), 100):
            wrong += compare(itertools.islice(iter(ours), stop), itertools.islice(list(want), stop))
    return wrong


def _in_turn(rank: int, both: Any) -> list[str]:
    train, val = both(), both(input_nodes="val", shuffle=False, num_neighbors=[3, 2, 2], num_workers=1)
    return [line for ours, want in (train, val) * 2 for line in compare(ours, want)]


def _at_once(rank: int, both: Any) -> list[str]:
    (ours, want), (other, expected) = both(num_workers=1), both(input_nodes="val", num_neighbors=[3, 2, 2])
    wrong = []
    for ours_, want_ in zip(ours, want, strict=True):
        wrong += differences(ours_, want_) + compare(itertools.islice(other, 2), itertools.islice(expected, 2))
    return wrong


def _in_rounds(rank: int, both: Any) -> list[str]:
    ours, want = both(logical_ranks=4)
    return compare(ours.rounds(), want.rounds())


def _resumed(rank: int, both: Any) -> list[str]:
    """Saves a loader in the middle of an epoch, and continues with another one over the same directory."""
    wrong, (ours, want), expected = [], both(num_workers=1), list(both()[1])
    for saved in (ours, want):
        for _ in itertools.islice(iter(saved), 2):
            pass
    resumed = both(depth=2)[0]
    resumed.load_state_dict(ours.state_dict())
    wrong += compare(resumed, expected[2:])
    with pytest.raises(ValueError, match=r"it belongs to a loader with other data or arguments .dataset: expected"):
        resumed.load_state_dict(want.state_dict())
    return wrong


def saved(rank: int, root: Path, form: str, sampler: MakeSampler) -> tuple[Any, Any]:
    """Returns saved states of a loader over the form and of one over the whole topology, after two steps of ``rounds()``."""
    states = []
    for stored, own in ((form, sampler), ("whole", None)):
        loader = make(root, CASES["logical ranks"], stored, own)
        for _ in itertools.islice(loader.rounds(), 2):
            pass
        states.append(loader.state_dict())
    return states[0], states[1]


def check_resumed(rank: int, root: Path, form: str, sampler: MakeSampler, states: tuple[Any, Any]) -> list[str]:
    """Loads the states of :func:`saved` into two new loaders, and compares two epochs of them. Returns the differences."""
    ours, want = make(root, CASES["plain"], form, sampler), make(root, CASES["plain"], "whole")
    ours.load_state_dict(states[0])
    want.load_state_dict(states[1])
    return [line for _ in range(2) for line in compare(ours.rounds(), want.rounds())]


# --- laws -------------------------------------------------------------------------------------------------


class TopologyLaws:
    """Tests of one form of topology. Subclass it and set ``stored``.

    Attributes:
        stored: form of the topology in the directory.
        sampler: see :data:`MakeSampler`.
        layouts: pairs (number of parts, number of ranks) to test.
    """

    stored: ClassVar[str]
    sampler: ClassVar[MakeSampler] = None
    layouts: ClassVar[Sequence[tuple[int, int]]] = LAYOUTS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "layout" in metafunc.fixturenames:
            ids = [f"{num_parts}-parts-{world}-ranks" for num_parts, world in self.layouts]
            metafunc.parametrize("layout", self.layouts, indirect=True, scope="class", ids=ids)

    @pytest.fixture(scope="class")
    @classmethod
    def layout(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
        num_parts, world = request.param
        return directories(tmp_path_factory.mktemp("topology"), num_parts, cls.stored), num_parts, world

    def test_batches_equal_those_of_the_whole_topology(self, layout: tuple[Path, int, int]) -> None:
        root, num_parts, world = layout
        names = [name for name in CASES if num_parts == world == 2 or name in SOME]
        if world == 3:  # a multiple of the ranks
            names = [name for name in names if "logical_ranks" not in CASES[name][2]]
        found = run_ranks(check_cases, world, root, self.stored, type(self).sampler, names)
        assert found == [{name: [] for name in names}] * world

    def test_loops_loaders_and_states_may_be_used_as_with_the_whole_topology(
        self, layout: tuple[Path, int, int]
    ) -> None:
        root, _, world = layout
        found = run_ranks(check_uses, world, root, self.stored, type(self).sampler)
        assert [list(filter(None, of_rank.values())) for of_rank in found] == [[]] * world, found

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_a_run_continues_on_another_number_of_ranks(
        self, saved_states: tuple[Path, tuple[Any, Any]], world: int
    ) -> None:
        root, states = saved_states
        found = run_ranks(check_resumed, world, root, self.stored, type(self).sampler, states)
        assert found == [[]] * world

    @pytest.fixture(scope="class")
    @classmethod
    def saved_states(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, Any]]:
        root = directories(tmp_path_factory.mktemp("resumed"), 4, cls.stored)
        return root, run_ranks(saved, 4, root, cls.stored, cls.sampler)[0]
