"""Laws of cooperative batches: the shares of a host's ranks are the batch of one rank, and each of its rows is loaded once."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Sequence
from typing import Any

import distributed
import pytest
import torch
from distributed import NEVER
from graphs import random_data, random_hetero
from rare import rare
from torch import Tensor

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, PPRSampler
from salientpp.ways.lookahead.way import Lookahead

FANOUTS, BATCH = [4, 3, 2], 8
GRAPH: dict[str, Any] = {"num_vertices": 400, "num_edges": 2400, "train_fraction": 0.5}

#: Number of parts, and ranks of each host.
HOSTS = {
    "one-rank": (4, [1]),
    "1x2": (4, [2]),
    "2x1": (4, [1, 1]),
    "2x2": (4, [2, 2]),
    "1x4": (4, [4]),
    "2x2-of-2-parts": (2, [2, 2]),
}
#: How vertices are divided between the ranks of a host.
SPLITS = ["rows", "vip"]


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[int, str]:
    folder, made = tmp_path_factory.mktemp("cooperate"), {}
    for num_parts in (2, 4):
        data = random_data(**GRAPH, edge_attributes=True)
        salientpp.partition(data, num_parts, folder / str(num_parts), FANOUTS, BATCH)
        made[num_parts] = str(folder / str(num_parts))
    return made


def places_of(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Host and place of each rank."""
    return [(host, place) for host, ranks in enumerate(hosts) for place in range(ranks)]


def loader_of(
    part: salientpp.PartitionedGraph, hosts: Any, fanouts: Sequence[int] = FANOUTS, **options: Any
) -> NeighborLoader:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 5, "num_workers": 1, "ranks_per_host": hosts, **options}
    return NeighborLoader(part, fanouts, "train", **{"cooperate": "host", **options})


def content(batch: Any) -> dict[str, Any]:
    """Everything that a batch has, and its share."""
    found = {name: value for name, value in batch.to_dict().items() if name != "edge_index"}
    share = getattr(getattr(batch.edge_index, "hops", None), "share", None)
    return {**found, "edge_index": batch.edge_index.clone().as_subclass(Tensor), "share": share}


def epochs_of(rank: int, root: str, hosts: Any, fanouts: Sequence[int], options: dict, epochs: int = 1) -> Any:
    """The batches of some epochs, and the rows that were loaded for them."""
    part = salientpp.load(root)
    loader = loader_of(part, hosts, fanouts, **options)
    batches = []
    for _ in range(epochs):
        for batch in loader:
            assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))  # law 1
            batches.append(content(batch))
        assert len(batches) % len(loader) == 0
    return pickle.dumps((batches, loader.stats().rows))  # tensors as bytes, because their memory ends with the rank


def run(function: Any, world_size: int, *args: Any) -> list[Any]:
    return [pickle.loads(result) for result in distributed.run(function, world_size, *args)]


def shares_by_host(results: Sequence[Any], hosts: Sequence[int]) -> list[list[tuple]]:
    """Shares of the ranks of a host, by host and batch."""
    found: list[list] = [[] for _ in hosts]
    for (host, _), result in zip(places_of(hosts), results, strict=True):
        found[host].append(result)
    assert all(len({len(of_rank) for of_rank in of_host}) == 1 for of_host in found), "equally many batches"
    return [list(zip(*of_host)) for of_host in found]


def ids_of(shares: Sequence[dict], place: int) -> Tensor:
    """Ids of the vertices in the numbering of a share: own ones, then those that the other ranks say they send."""
    ids = [shares[place]["n_id"]]
    for other in shares:
        share = other["share"]
        ids.append(other["n_id"][share.send.split(share.send_counts)[place]])
    return torch.cat(ids)


def check_is_divided(shares: Sequence[dict], whole: dict) -> None:
    """Checks that the shares together are the batch of one rank, with every vertex and edge once."""
    of_vertex = {int(v): at for at, v in enumerate(whole["n_id"])}
    seen, edges = [], []
    for place, mine in enumerate(shares):
        share, ids = mine["share"], ids_of(shares, place)
        at = torch.tensor([of_vertex[int(v)] for v in mine["n_id"]], dtype=torch.int64)
        assert (at.diff() > 0).all(), "own vertices are in the order of the batch"
        seen += at.tolist()
        assert share.num_vertices == whole["n_id"].numel()
        assert share.num_own == at.numel() == mine["x"].size(0) == mine["num_nodes"]
        assert torch.equal(mine["x"], whole["x"][at])
        seeds = at[: mine["batch_size"]]
        assert mine["batch_size"] == share.own[0] == int((at < whole["batch_size"]).sum())
        assert torch.equal(mine["y"], whole["y"][seeds]) and torch.equal(mine["input_id"], whole["input_id"][seeds])
        pairs = ids[mine["edge_index"]]
        edges += list(zip(mine["e_id"].tolist(), mine["edge_attr"].flatten().tolist(), *pairs.tolist()))
        assert sum(mine["num_sampled_nodes"]) == share.num_own and sum(mine["num_sampled_edges"]) == share.edges[-1]
    assert sorted(seen) == list(range(len(of_vertex))), "each vertex belongs to one rank"
    pairs = whole["n_id"][whole["edge_index"]]
    theirs = zip(whole["e_id"].tolist(), whole["edge_attr"].flatten().tolist(), *pairs.tolist())
    assert sorted(edges) == sorted(theirs), "each edge belongs to one rank"


#: Each division, and each number of hosts and ranks.
DIVIDED = [
    ("rows", "1x2"),
    ("rows", "2x1"),
    ("rows", "1x4"),
    ("vip", "one-rank"),
    ("vip", "2x2"),
    ("vip", "2x2-of-2-parts"),
]


@pytest.mark.parametrize(
    "split_by, hosts",
    [*DIVIDED, *rare(*((by, hosts) for by in SPLITS for hosts in HOSTS if (by, hosts) not in DIVIDED))],
)
def test_the_shares_of_a_host_are_the_batch_of_one_rank(roots, hosts, split_by):
    num_parts, per_host = HOSTS[hosts]
    options = {"cooperate": {"split_by": split_by}, "uneven": "wrap"}
    shared = run(epochs_of, sum(per_host), roots[num_parts], per_host, FANOUTS, options, 2)
    alone = {"cooperate": None, "batch_size": BATCH * per_host[0], "uneven": "wrap"}
    whole = run(epochs_of, len(per_host), roots[num_parts], 1, FANOUTS, alone, 2)
    rows = 0
    for shares, (batches, _) in zip(shares_by_host([batches for batches, _ in shared], per_host), whole, strict=True):
        for of_host, batch in zip(shares, batches, strict=True):
            check_is_divided(of_host, batch)
            rows += batch["n_id"].numel()
    assert sum(loaded for _, loaded in shared) == rows, "each row of a batch is loaded by one rank of the host"


def reached(data: Any, seeds: Tensor, hops: int) -> set[int]:
    """The vertices within some hops of the seeds, against the direction of the edges."""
    source, target = data.edge_index
    found = torch.zeros(data.num_nodes, dtype=torch.bool)
    found[seeds] = True
    for _ in range(hops):
        found[source[found[target]]] = True
    return set(found.nonzero().flatten().tolist())


def test_with_all_neighbours_a_host_loads_the_union_and_private_batches_load_more(roots):
    data, ranks = random_data(**GRAPH), 2
    part = salientpp.load(roots[4])
    results = run(
        epochs_of, 2 * ranks, roots[4], [ranks, ranks], [-1, -1], {"cooperate": {"batches": 20}, "batch_size": 1}
    )
    union = private = 0
    for of_host in shares_by_host([batches for batches, _ in results], [ranks, ranks]):
        assert len(of_host) == 20
        for shares in of_host:
            of_ranks = [part.original_id(mine["n_id"][: mine["batch_size"]]) for mine in shares]
            union += len(reached(data, torch.cat(of_ranks), 2))
            private += sum(len(reached(data, seeds, 2)) for seeds in of_ranks)
    assert sum(rows for _, rows in results) == union < private


def count_draws(rank: int, root: str, hosts: list[int], options: list[dict]) -> Any:
    found = []
    for each in options:
        loader = loader_of(salientpp.load(root), hosts, **each)
        for _ in range(3):
            for _ in loader:
                pass
        counts = loader.engine.basis.source.drawing.division.once.counts
        found.append((len(loader), counts.drawn, counts.taken, counts.in_vain))
    return found


def test_a_host_draws_each_batch_once(roots):
    options = [{"num_workers": 0}, {"num_workers": 2}]
    for each, results in zip(options, zip(*distributed.run(count_draws, 4, roots[4], [2, 2], options)), strict=True):
        for of_host in (results[:2], results[2:]):
            (batches, *_), _ = of_host
            assert sum(drawn for _, drawn, _, _ in of_host) == 3 * batches, each
            assert sum(taken for _, _, taken, _ in of_host) == 3 * batches, each
            assert not any(in_vain for *_, in_vain in of_host), each


# --- what is refused -------------------------------------------------------------------------------------


def refusals(rank: int, root: str, typed: str, parts: str) -> list[str]:
    """The texts of errors, one for each case."""

    def text(make: Any) -> str:
        try:
            make()
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    def over(where: str, **options: Any) -> Any:
        part = salientpp.load(where)
        nodes = ("paper", "all") if where == typed else "train"
        return lambda: NeighborLoader(
            part, [3, 2], nodes, **{"cooperate": "host", "ranks_per_host": 2, "seed": 1, **options}
        )

    part, data = salientpp.load(root), random_data()
    cases = [
        over(root, cooperate="hosts"),
        over(root, cooperate={"batch": 3}),
        over(root, cooperate={"split_by": "size"}),
        over(root, cooperate={"batches": 0}),
        over(root, cooperate={"batches": 3}, batch_size=8),
        over(root, cooperate={"batches": 3}, drop_last=True),
        over(root, cooperate={"batches": 1000}),
        over(root, partial_aggregation="sum"),
        over(root, pad="bucket"),
        over(root, transform_sampler_output=dict),
        over(root, logical_ranks={"join": True}),
        over(root, memory={"host": "1MiB", "allow": ["sums"]}),
        over(root, subgraph_type="induced"),
        over(root, subgraph_type="bidirectional"),
        over(root, disjoint=True),
        over(root, ranks_per_host=[1, 2, 1]),
        over(root, neighbor_sampler=PPRSampler(part.graph, 8)),
        over(typed),
        over(parts),
        lambda: LinkNeighborLoader(part, [3, 2], cooperate="host"),
        lambda: NeighborLoader(data, [3, 2], cooperate="host"),
    ]  # fmt: skip
    return [text(case) for case in cases]


REFUSALS = [
    "cooperate must be 'host', a mapping with entries batches and split_by, or None, got 'hosts'",
    "cooperate may be a mapping with the entries batches, split_by; got the entry 'batch'. Did you mean batches?",
    "cooperate['split_by'] must be 'rows' or 'vip', got 'size'",
    "cooperate['batches'] must be an integer >= 1 (batches of a host in an epoch) or None, got 0",
    "cooperate['batches']=3 divides the seeds of a host into equal batches, so it excludes batch_size=8; leave one of them out",
    "cooperate['batches']=3 divides the seeds of a host into equal batches, so it excludes drop_last=True; leave one of them out",
    "cooperate['batches']=1000 is more than the ",
    "cooperate='host' excludes partial_aggregation=: ",
    "cooperate='host' excludes pad=: ",
    "cooperate='host' excludes transform_sampler_output=: ",
    "cooperate='host' excludes logical_ranks['join']: ",
    "memory['allow']=('sums',) permits a plan to send sums instead of rows; leave 'sums' out",
    "subgraph_type='induced' adds edges that do not follow hops; pass subgraph_type='directional'",
    "subgraph_type='bidirectional' adds edges that do not follow hops; pass subgraph_type='directional'",
    "each seed grows a tree of its own, and a vertex may be in several trees; leave disjoint and time_attr out",
    "hosts whose ranks cooperate need equally many ranks, got [1, 2, 1] ranks; start the same number of ranks on every host",
    "neighbor_sampler is a PPRSampler, whose batches are not drawn hop by hop; leave one of them out",
    "the graph has several vertex types; leave cooperate out",
    "the topology is stored in parts, and draws over several hosts are not divided; partition with topology='whole'",
    "cooperate= is for a NeighborLoader; LinkNeighborLoader makes batches of edges, and each rank computes those alone; leave it out",
    "cooperate='host' applies only to a partitioned graph, whose ranks know which of them share a host; leave it out",
]


def test_what_cannot_be_divided_is_refused_on_every_rank(roots, tmp_path):
    typed, parts = str(tmp_path / "typed"), str(tmp_path / "parts")
    salientpp.partition(random_hetero(), 4, typed, [3, 2], BATCH, seeds=("paper", "all"))
    salientpp.partition(random_data(), 4, parts, [3, 2], BATCH, topology="parts")
    first, *others = distributed.run(refusals, 4, roots[4], typed, parts)
    assert len(first) == len(REFUSALS)
    for text, words in zip(first, REFUSALS, strict=True):
        assert words in text, (words, text)
    assert all(bool(text) for texts in others for text in texts)


# --- seeds ------------------------------------------------------------------------------------------------


def epochs_of_each(rank: int, root: str, hosts: Any, fanouts: Sequence[int], cases: list[dict]) -> Any:
    return pickle.dumps([pickle.loads(epochs_of(rank, root, hosts, fanouts, options)) for options in cases])


def test_batches_is_the_number_of_batches_and_divides_the_seeds_evenly(roots):
    hosts, numbers = [2, 2], [(number, uneven) for number in (1, 7, 40) for uneven in ("exact", "wrap")]
    cases = [{"cooperate": {"batches": number}, "batch_size": 1, "uneven": uneven} for number, uneven in numbers]
    every_result = zip(*run(epochs_of_each, 4, roots[4], hosts, [2], cases))
    for (number, uneven), results in zip(numbers, every_result, strict=True):
        every = []
        for of_host in shares_by_host([batches for batches, _ in results], hosts):
            assert len(of_host) == number
            sizes = [sum(mine["batch_size"] for mine in shares) for shares in of_host]
            assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1, (number, uneven)
            every += [seed for shares in of_host for mine in shares for seed in mine["input_id"].tolist()]
        data = random_data(**GRAPH)
        assert len(set(every)) == int(data.train_mask.sum()), (number, uneven)
        assert uneven == "wrap" or len(every) == len(set(every)), f"each seed is in one batch; {number} batches"


def test_a_rank_without_vertices_gives_an_empty_share(roots):
    results = run(epochs_of, 4, roots[4], [4], [], {"batch_size": 1, "uneven": "exact", "num_workers": 2})
    (of_host,) = shares_by_host([batches for batches, _ in results], [4])
    empty = [mine for shares in of_host for mine in shares if not mine["n_id"].numel()]
    assert empty and all(
        mine["x"].shape == (0, mine["x"].size(1)) and mine["edge_index"].shape == (2, 0) for mine in empty
    )
    assert all(mine["batch_size"] == 0 and mine["y"].numel() == 0 for mine in empty)
    assert all(sum(mine["batch_size"] for mine in shares) in (1, 2, 3, 4) for shares in of_host)


# --- ways -------------------------------------------------------------------------------------------------

WAYS = {
    "cache": {"replication_factor": 0.3},
    "cache-and-device": {"replication_factor": 0.3, "device_rows": {"part": 0.4, "cache": 0.5}},
    "policy": {"replication_factor": 0.3, "policy": "degree"},
    "lookahead": {"replication_factor": 0.2, "lookahead": 4},
    "lookahead-of-blocks": {"replication_factor": 0.2, "lookahead": "auto", "shared_draws": {"block": 4}},
    "narrow": {"send_as": {"x": "fp16"}, "replication_factor": 0.2},
    "read-ahead": {"read_ahead": "1MiB"},
    "memory": {"memory": "20KiB"},
    "no-pipeline": {"depth": 1, "num_workers": 0},
    "columns": {"columns": ("x", "y"), "dtype": torch.float64},
    "shared-draws": {"shared_draws": "batch", "replication_factor": 0.2},
    "replace": {"replace": True},
    "float16": {"dtype": torch.float16},
}

#: Options that decide what a batch contains. The other options of a case only decide how it is made.
OF_BATCHES = ("columns", "dtype", "shared_draws", "replace", "send_as")


def with_ways(rank: int, root: str, hosts: list[int], cases: dict[str, dict]) -> Any:
    part, found = salientpp.load(root), {}
    for name, options in cases.items():
        plain = {key: value for key, value in options.items() if key in OF_BATCHES}
        ours, theirs = loader_of(part, hosts, **options), loader_of(part, hosts, **plain)
        for _ in range(2):
            for left, right in zip(ours, theirs, strict=True):
                left, right = content(left), content(right)
                for key, value in left.items():
                    same = torch.equal(value, right[key]) if isinstance(value, Tensor) else value == right[key]
                    assert same or key == "share", (name, key)
                assert torch.equal(left["x"][:, 0].long(), part.original_id(left["n_id"])), name
        stats = ours.stats()
        found[name] = (stats.rows, theirs.stats().rows, stats.rows_remote, theirs.stats().rows_remote)
    return found


@pytest.mark.parametrize("hosts", [*rare("1x2"), "2x2"])
def test_ways_change_bytes_and_never_shares(roots, hosts):
    num_parts, per_host = HOSTS[hosts]
    results = distributed.run(with_ways, sum(per_host), roots[num_parts], per_host, WAYS, seconds=600)
    for name in WAYS:
        assert all(of_rank[name][0] == of_rank[name][1] for of_rank in results), name
        remote, without = (sum(of_rank[name][at] for of_rank in results) for at in (2, 3))
        saves = "replication_factor" in WAYS[name] or "memory" in WAYS[name]
        assert (remote < without if saves else remote == without) or hosts == "1x2", name


def caches_of_each(rank: int, root: str, hosts: Any, cases: list[dict]) -> Any:
    return [caches_of(rank, root, hosts, options) for options in cases]


def caches_of(rank: int, root: str, hosts: Any, options: dict) -> Any:
    part = salientpp.load(root)
    loader = loader_of(part, hosts, replication_factor=0.25, device_rows=0.5, **options)
    for _ in loader:
        pass
    (tiers,) = loader.engine.producer.fetch.tiers.values()
    near = tiers.near[0].members.ids + tiers.book.range_of(tiers.part_id)[0]
    division = loader.engine.basis.source.drawing.division
    owners = None if division is None else division.owner[near].tolist()
    return loader.cache.members.ids.tolist(), owners, loader.stats().rows_remote, loader.stats().rows_device


def test_a_host_caches_what_one_rank_would_and_devices_keep_rows_of_their_rank(roots):
    cases = [{"cooperate": {"split_by": split_by}} for split_by in SPLITS]
    every = distributed.run(caches_of_each, 4, roots[4], [2, 2], cases)
    whole = distributed.run(caches_of, 2, roots[4], 1, {"cooperate": None, "batch_size": 2 * BATCH})
    for split_by, shared in zip(SPLITS, zip(*every), strict=True):
        for host, (members, _, remote, on_device) in enumerate(whole):
            of_host = shared[2 * host : 2 * host + 2]
            assert all(cached == members for cached, *_ in of_host), split_by
            assert sum(rows for _, _, rows, _ in of_host) == remote, split_by
            assert all(set(owners) == {place} for place, (_, owners, _, _) in enumerate(of_host)), split_by
            assert sum(rows for *_, rows in of_host) > on_device, f"two devices keep more rows than one; {split_by}"


def planned_rows(rank: int, root: str) -> Any:
    loader = loader_of(salientpp.load(root), [2, 2], replication_factor=0.2, lookahead=4)
    planner, division = loader.engine.way(Lookahead).planners[None], loader.engine.basis.source.drawing.division
    kept = [division.owner[planner.slot_id[planner.slot_id >= 0].long()]]
    for _ in loader:
        kept.append(division.owner[planner.slot_id[planner.slot_id >= 0].long()])
    likely = division.owner[planner.prior > 0]
    return rank % 2, [set(of.tolist()) for of in (likely, torch.cat(kept))]


def test_a_rank_that_looks_ahead_keeps_rows_of_its_own_vertices(roots):
    for place, owners in distributed.run(planned_rows, 4, roots[4]):
        assert owners == [{place}, {place}]


def priced(rank: int, root: str, cases: list[dict]) -> list[tuple[float, float]]:
    return [price_and_count(root, options) for options in cases]


def price_and_count(root: str, options: dict) -> tuple[float, float]:
    loader = loader_of(salientpp.load(root), [2, 2], batch_size=4, num_workers=0, **options)
    expected = loader.engine.price().fetched[None] / loader.engine.basis.source.row_bytes[None]
    for _ in loader:
        pass
    return expected, loader.stats().rows_remote / len(loader)


def test_prices_count_the_rows_of_shares(roots):
    cases = [{}, {"replication_factor": 0.2}]
    for of_rank in distributed.run(priced, 4, roots[4], cases):
        for options, (price, count) in zip(cases, of_rank, strict=True):
            assert price == pytest.approx(count, rel=0.15), options  # law 4


# --- resuming ---------------------------------------------------------------------------------------------


def stopped(rank: int, root: str, hosts: Any, options: dict, after: int) -> Any:
    """The state after some batches of the first epoch, and two whole epochs."""
    part = salientpp.load(root)
    loader = loader_of(part, hosts, **options)
    batches = iter(loader)
    for _ in range(after):
        next(batches)
    state = loader.state_dict()
    loader.engine.close()
    loader = loader_of(part, hosts, **options)
    return pickle.dumps((state, [content(batch) for _ in range(2) for batch in loader]))


def resumed(rank: int, root: str, hosts: Any, options: dict, cases: list[list[dict]]) -> Any:
    """The batches after the states of each case: the states of all ranks, or the state of one."""
    found = []
    for states in cases:
        loader = loader_of(salientpp.load(root), hosts, **options)
        loader.load_state_dict(states[rank % len(states)])
        found.append([content(batch) for _ in range(2) for batch in loader])
    return pickle.dumps(found)


@pytest.mark.parametrize("ways", [{}, {"lookahead": 3, "replication_factor": 0.2}], ids=["plain", "lookahead"])
def test_a_stopped_run_continues_with_the_next_batch(roots, ways):
    options = {"num_workers": 2, **ways}
    states, whole = zip(*run(stopped, 4, roots[4], [2, 2], options, 3))
    cases = {"own states": list(states), "the state of rank 0": [states[0]]}
    continued = run(resumed, 4, roots[4], [2, 2], options, list(cases.values()))
    for before, of_rank in zip(whole, continued, strict=True):
        for case, after in zip(cases, of_rank, strict=True):
            assert len(after) == len(before) - 3, case
            for ours, theirs in zip(after, before[3:], strict=True):
                for name in ("n_id", "x", "edge_index", "input_id", "y"):
                    assert torch.equal(ours[name], theirs[name]), (case, name)
    if ways:
        return
    # One rank per host continues with the whole batches.
    options |= {"batch_size": 2 * BATCH}
    for host, (batches,) in enumerate(run(resumed, 2, roots[4], 1, options, [[states[0]]])):
        for of_host, batch in zip(zip(*whole[2 * host : 2 * host + 2]), [None] * 3 + batches, strict=True):
            if batch is not None:
                check_is_divided(of_host, batch)


def refuse_states(rank: int, root: str, states: list[dict]) -> list[str]:
    part, texts = salientpp.load(root), []
    for options in ({"cooperate": None}, {"batch_size": 9}, {"batch_size": 1, "cooperate": {"batches": 10}}):
        try:
            loader_of(part, 2, **options).load_state_dict(states[rank])
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_state_of_other_batches_is_refused(roots):
    states = [state for state, _ in run(stopped, 4, roots[4], [2, 2], {}, 2)]
    for texts in distributed.run(refuse_states, 4, roots[4], states):
        assert len(texts) == 3 and all("other data or arguments" in text for text in texts)
        assert "cooperate: expected None, got 'host'" in texts[0]
        assert "batch_size: expected 18, got 16" in texts[1]


# --- faults -----------------------------------------------------------------------------------------------


def leave_early_with_each(rank: int, root: str, stops: list[int | None], ways: list[dict]) -> Any:
    return [leave_early(rank, root, stops, each) for each in ways]


def leave_early(rank: int, root: str, stops: list[int | None], ways: dict) -> Any:
    """Shares of three epochs. In the second, some ranks leave after some batches."""
    loader = loader_of(salientpp.load(root), [2, 2], num_workers=2, **ways)
    epochs = []
    for epoch in range(3):
        epochs.append([])
        for number, batch in enumerate(loader):
            if epoch == 1 and number == stops[rank]:
                break
            epochs[-1].append(batch.n_id.tolist())
    return epochs


def test_ranks_that_leave_an_epoch_early_change_no_share_of_the_others(roots):
    stops, ways = [2, None, 0, 1], [{}, {"replication_factor": 0.2, "lookahead": 4}]
    every = distributed.run(leave_early_with_each, 4, roots[4], [None] * 4, ways)
    early = distributed.run(leave_early_with_each, 4, roots[4], stops, ways)
    for stop, whole, left in zip(stops, every, early, strict=True):
        for each, before, after in zip(ways, whole, left, strict=True):
            assert after[0] == before[0] and after[2] == before[2], each
            assert after[1] == before[1][:stop], each


def fail_at(rank: int, root: str, how: str) -> int:
    part, number = salientpp.load(root), 0

    def transform(batch: Any) -> Any:
        nonlocal number
        number += 1
        if rank == 1 and number == 4:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 cannot go on")
        return batch

    for _ in range(3):
        for batch in loader_of(part, [2, 2], transform=transform, timeout=NEVER):
            assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
    return number


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_fault_of_one_rank_ends_all_ranks_with_its_name(roots, how):
    results = distributed.run(fail_at, 4, roots[4], how, may_fail=True)
    words = "rank 1 went away" if how == "killed" else "rank 1 cannot go on"
    assert results[1].kind == ("Died" if how == "killed" else "StageError")
    for rank in (0, 2, 3):
        assert results[rank].kind == "StageError" and words in results[rank].text, results[rank]


# --- batches ----------------------------------------------------------------------------------------------


def copies(rank: int, root: str) -> int:
    number = 0
    for batch in loader_of(salientpp.load(root), 2):
        share = batch.edge_index.hops.share
        others = [batch.clone(), copy.copy(batch), copy.deepcopy(batch), batch.to("cpu"), batch.contiguous()]
        others += [batch.pin_memory()] if torch.accelerator.is_available() else []
        assert all(other.edge_index.hops.share is share for other in others)
        again = pickle.loads(pickle.dumps(batch)).edge_index.hops.share
        assert (again.own, again.received) == (share.own, share.received) and torch.equal(again.send, share.send)
        lists = batch.edge_index.hops.lists(None)
        assert lists.num_targets == share.num_own
        assert lists.num_sources == share.num_own + sum(share.recv_counts)
        assert torch.equal(lists.source.long(), batch.edge_index[0]) and lists.edge is None
        number += 1
    return number


def test_copies_of_a_batch_know_its_share(roots):
    assert min(distributed.run(copies, 2, roots[4])) > 0


def cooperation(rank: int, root: str) -> Any:
    part = salientpp.load(root)
    assert loader_of(part, 2, cooperate=None).cooperation is None
    loader = loader_of(part, 2)
    found = loader.cooperation
    assert loader.cooperation is found, "models of one loader share connections"
    assert found.comm.rank == rank and found.comm.size == 4
    return found.ranks_of_host, found.host, found.place


def test_a_loader_says_which_ranks_cooperate(roots):
    results = distributed.run(cooperation, 4, roots[4])
    assert results == [(range(0, 2), 0, 0), (range(0, 2), 0, 1), (range(2, 4), 1, 0), (range(2, 4), 1, 1)]
