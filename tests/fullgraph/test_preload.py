"""Laws of preloading: the vertices that a host keeps, exact training with enough hops, and no rows between hosts during a step.

T1 to T4 and T6 are the names of the laws. A case (K, R) has K ranks on hosts of R ranks each, or of the numbers in the list R.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from fullgraph_training import CLASSES, WIDTH, data_of, network, train, train_alone
from rare import rare, some_of
from torch import Tensor
from torch_geometric.data import Data
from two_forms import in_both_forms, own_copy

import salientpp
from salientpp.fullgraph import (
    Preload,
    PreloadedGraph,
    accuracy,
    distribute,
    expansion,
    local,
    loss_mean,
    plan_for,
    preload,
)

HOSTS: list[tuple[int, Any]] = [(1, 1), (2, 1), (2, 2), (4, 2), (4, [1, 3])]
EVERY_STEP = [*((*each, "halo") for each in HOSTS), (4, 2, "cover"), (4, 2, "1d")]
#: Further cases of the laws are rare tests.
STEPS = [(2, 1, "halo"), (2, 2, "cover"), (2, 2, "1d"), (4, [1, 3], "halo")]
SETS: list[tuple[int, Any]] = [(2, 1), (4, [1, 3])]
N = 120
LAYERS = {"sage": 3, "gat": 3, "gcn": 2, "weighted gcn": 2}


def graph() -> Data:
    """Makes a directed graph with self-loops, repeated edges, and attributes of edges that identify them."""
    data = data_of(N)
    data.edge_index[:, :4] = data.edge_index[:1, :4]
    data.edge_index[:, 4:9] = data.edge_index[:, 9:14]
    data.edge_attr = torch.arange(data.num_edges).view(-1, 1).double()
    return data


def starts(size: int) -> list[int]:
    """Returns uneven ranges of vertices; of four ranks one has none."""
    return {1: [0, N], 2: [0, 30, N], 4: [0, 30, 30, 75, N]}[size]


def inner_sets(size: int, per_host: Any) -> list[set[int]]:
    """Returns the inner vertices of each host."""
    sizes = [per_host] * (size // per_host) if isinstance(per_host, int) else per_host
    bounds = starts(size)
    return [set(range(bounds[a], bounds[b])) for a, b in pairwise(accumulate(sizes, initial=0))]


def hosts_of(found: list[Any], size: int, per_host: Any) -> list[list[Any]]:
    """Groups what the ranks returned by host."""
    sizes = [per_host] * (size // per_host) if isinstance(per_host, int) else per_host
    return [found[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def opened(size: int, per_host: Any, given: Preload) -> PreloadedGraph:
    part = local(graph(), offsets=starts(size), preload=given, ranks_per_host=per_host)
    assert isinstance(part, PreloadedGraph)
    return part


# --- T1: with enough hops, training is exact ------------------------------------------------------------------


def whole_step(name: str) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Returns logits, gradients of parameters and the gradient of x of one process with the whole graph."""
    data, model = graph(), network(name)
    x = data.x.requires_grad_()
    out = model(x, data.edge_index, *([data.edge_weight] if "weighted" in name else []))
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    return out.detach(), {key: p.grad for key, p in model.named_parameters()}, x.grad


def step(rank: int, size: int, per_host: Any, layout: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layers in LAYERS.items():
        if layout == "halo" or name != "gat":
            part = opened(size, per_host, Preload(layers))
            model = distribute(network(name), part, layout)
            x = part.x.requires_grad_()
            out = model(x, part.edge_index, *([part.edge_weight] if "weighted" in name else []))
            losses = F.cross_entropy(out[part.train_mask], part.y[part.train_mask], reduction="none")
            loss_mean(losses, part).backward()
            number, inner = part.n_id.numel(), part.num_counted
            gradients = {key: p.grad.numpy() for key, p in model.module.named_parameters()}
            found[name] = part.n_id.numpy(), out.detach()[:inner].numpy(), gradients, x.grad[:number].numpy()
    return found


@pytest.mark.parametrize(
    ("size", "per_host", "layout"),
    some_of(STEPS, EVERY_STEP),
)
def test_with_as_many_hops_as_layers_outputs_and_gradients_equal_one_process(size, per_host, layout):
    """T1. The gradients of copies of a row add up to the gradient of the row."""
    everyone = distributed.run(step, size, size, per_host, layout)
    for name in everyone[0]:
        expected, gradients, of_x = whole_step(name)
        total, seen = torch.zeros_like(of_x), []
        for found in everyone:
            n_id, out, theirs, x = found[name]
            n_id = torch.from_numpy(n_id)
            torch.testing.assert_close(torch.from_numpy(out), expected[n_id[: len(out)]], rtol=1e-10, atol=1e-10)
            for key, value in gradients.items():
                torch.testing.assert_close(torch.from_numpy(theirs[key]), value, rtol=1e-10, atol=1e-10)
            total.index_add_(0, n_id, torch.from_numpy(x))
            seen += n_id[: len(out)].tolist()
        torch.testing.assert_close(total, of_x, rtol=1e-10, atol=1e-10)
        assert sorted(seen) == list(range(N))  # each vertex is an inner vertex of one rank


def curves(rank: int, root: str, is_copy: bool, names: list[str]) -> dict[str, Any]:
    data = own_copy(root, 4) if is_copy else salientpp.load(root)
    part, found = local(data, preload=Preload(3), ranks_per_host=2), dict[str, Any]()
    for name in names:
        model = distribute(network(name, classes=part.num_classes), part)
        found[name] = train(model, part, 2)
        with torch.no_grad():
            out = model.eval()(part.x, part.edge_index)
        found[f"{name} accuracy"] = accuracy(out[part.val_mask], part.y[part.val_mask], part)
    small = local(data, preload=Preload(1, 2), ranks_per_host=1)
    return found | {"small": (small.n_id.tolist(), small.e_id.tolist(), small.edge_attr.tolist())}


@pytest.mark.parametrize(("names", "copies"), [(["sage"], [True]), *rare((["sage", "gcn"], [False, True]))], ids=str)
def test_both_forms_of_a_directory_train_as_one_process(tmp_path, names, copies):
    data = graph()
    whole, parts = in_both_forms(tmp_path, data, 4)
    expected = {name: train_alone(network(name), data, 2) for name in names}
    first = None
    for root, is_copy in ((whole, False), *((parts, is_copy) for is_copy in copies)):
        found = distributed.run(curves, 4, root, is_copy, names)
        for each in found:
            for name in names:
                assert each[name] == pytest.approx(expected[name], abs=1e-9)
        first = first or found
        assert [each["small"] for each in found] == [each["small"] for each in first]
        assert [each["sage accuracy"] for each in found] == pytest.approx([first[0]["sage accuracy"]] * 4)


# --- T2: the vertices and edges of a host ---------------------------------------------------------------------


def sets(rank: int, size: int, per_host: Any, cases: list[Preload]) -> list[dict[str, Any]]:
    found = []
    for given in cases:
        part = opened(size, per_host, given)
        number = part.n_id.numel()
        told = part.ranks.comm.gather_facts({"ids": part.n_id.tolist()})
        ids = torch.tensor([each for theirs in told for each in theirs["ids"]])
        rows = {name: getattr(part, name)[:number].numpy() for name in ("x", "y")}
        ends = part.edge_index.clone()
        ends[0] = ids[part.global_ids[ends[0]]]
        ends[1] = part.n_id[ends[1]]
        counts = {"counted": part.num_counted, "preloaded": part.preloaded_rows, "all": part.num_vertices}
        columns = {"e_id": part.e_id.numpy(), "attr": part.edge_attr.numpy(), "ends": ends.numpy()}
        found.append({"n_id": part.n_id.numpy(), **rows, **columns, **counts})
    return found


def slow_set(data: Data, inner: set[int], given: Preload) -> tuple[set[int], list[int]]:
    """Returns the vertices that a host keeps by the definition, and for each frontier vertex the number of its picks."""
    score = torch.rand(N, generator=torch.Generator().manual_seed(given.seed), dtype=torch.float64)
    kept, frontier, numbers = set(inner), sorted(inner), []
    for _ in range(given.hops):
        picked: set[int] = set()
        for v in frontier:
            candidates = set(data.edge_index[0, data.edge_index[1] == v].tolist()) - inner
            ranked = sorted(candidates, key=lambda u: (-float(score[u]), u))
            mine = ranked if given.fanout is None else ranked[: given.fanout]
            numbers.append(len(mine))
            picked |= set(mine)
        frontier = sorted(picked - kept)
        kept |= picked
    return kept, numbers


CASES = [Preload(hops, fanout, seed=3) for hops in (0, 1, 2, 4) for fanout in (1, 3, None)]


@pytest.mark.parametrize(("size", "per_host"), some_of(SETS, HOSTS))
def test_a_host_keeps_the_picked_vertices_and_all_edges_between_them(size, per_host):
    """T2 and T4: the sets, the edges that they induce, and the number of preloaded rows."""
    data = graph()
    found = distributed.run(sets, size, size, per_host, CASES)
    kept: dict[tuple[int, Preload], set[int]] = {}
    for number, given in enumerate(CASES):
        for host, (ranks, inner) in enumerate(zip(hosts_of(found, size, per_host), inner_sets(size, per_host))):
            pieces = [each[number] for each in ranks]
            ids = [each for piece in pieces for each in piece["n_id"].tolist()]
            expected, picks = slow_set(data, inner, given)
            assert sorted(ids) == sorted(expected) and inner <= expected  # each on one rank
            assert given.fanout is None or max(picks, default=0) <= given.fanout
            assert sum(piece["preloaded"] for piece in pieces) == len(expected - inner)
            kept[host, given] = expected
            is_in = torch.zeros(N, dtype=torch.bool)
            is_in[sorted(expected)] = True
            edges = is_in[data.edge_index].all(0).nonzero().flatten().tolist()
            assert sorted(each for piece in pieces for each in piece["e_id"].tolist()) == edges
            for piece in pieces:
                n_id, e_id = torch.from_numpy(piece["n_id"]), torch.from_numpy(piece["e_id"])
                flags = [v in inner for v in n_id.tolist()]
                assert flags == sorted(flags, reverse=True) and sum(flags) == piece["counted"]
                assert piece["all"] == N
                assert torch.equal(torch.from_numpy(piece["x"]), data.x[n_id])
                assert torch.equal(torch.from_numpy(piece["y"]), data.y[n_id])
                assert torch.equal(torch.from_numpy(piece["attr"]), data.edge_attr[e_id])
                assert torch.equal(torch.from_numpy(piece["ends"]), data.edge_index[:, e_id])
    for (host, given), ids in kept.items():  # the sets grow with hops and with the fanout
        more = {each: kept[host, each] for each in CASES}
        for other, others in more.items():
            wider = other.fanout is None or (given.fanout is not None and given.fanout <= other.fanout)
            if wider and given.hops <= other.hops:
                assert ids <= others


# --- T3 and T4: a step ----------------------------------------------------------------------------------------


def traffic(rank: int, size: int, per_host: Any, given: Preload) -> dict[str, Any]:
    part = opened(size, per_host, given)
    loaded = [part.job.received["preload"], part.preloaded_rows]
    model = distribute(network("sage"), part)
    gcn = distribute(network("gcn"), part)
    train(model, part, 1)
    train(gcn, part, 1)  # degrees travel once, before the first step
    before = part.job.received.copy(), part.ranks.received.copy()
    train(model, part, 2)
    train(gcn, part, 2)
    counts = {split: int(getattr(part, f"{split}_mask").sum()) for split in ("train", "val", "test")}
    seen = {split: part.n_id[getattr(part, f"{split}_mask")[: part.n_id.numel()]].tolist() for split in counts}
    weights = torch.ones(counts["train"], dtype=torch.float64, requires_grad=True)
    loss_mean(weights, part).backward()
    between, inside = ({**(now - then)} for now, then in zip((part.job.received, part.ranks.received), before))
    return {
        "loaded": loaded,
        "seen": seen,
        "between": between,
        "inside": inside,
        "weight": float(weights.grad.sum()),
    }


TRAFFIC = [(2, 1, Preload(3)), (2, 2, Preload(3)), (4, [1, 3], Preload(1, 2))]
EVERY_TRAFFIC = [(*hosts, given) for hosts in HOSTS for given in (Preload(3), Preload(1, 2))]


@pytest.mark.parametrize(("size", "per_host", "given"), some_of(TRAFFIC, EVERY_TRAFFIC))
def test_each_vertex_of_a_split_counts_once_and_no_rows_travel_between_hosts(size, per_host, given):
    """T3 and T4."""
    data = graph()
    found = distributed.run(traffic, size, size, per_host, given)
    for split in ("train", "val", "test"):
        seen = sorted(each for theirs in found for each in theirs["seen"][split])
        assert seen == data[f"{split}_mask"].nonzero().flatten().tolist()
    assert sum(theirs["weight"] for theirs in found) == pytest.approx(1)
    row = data.x.size(1) + 1 + 3  # x, y and the masks of three splits
    for theirs in found:
        words, rows = theirs["loaded"]
        assert words == rows * row
        assert set(theirs["between"]) <= {"gradients", "sums", "sums backward", "loss"}
        assert set(theirs["inside"]) <= {"forward", "backward"}
    for ranks in hosts_of(found, size, per_host):
        assert (sum(theirs["inside"].get("forward", 0) for theirs in ranks) > 0) == (len(ranks) > 1)


# --- T6: repeatable -------------------------------------------------------------------------------------------


def repeated(rank: int) -> list[Any]:
    found = []
    for seed in (0, 0, 1):
        part = opened(2, 1, Preload(2, 2, seed))
        found.append((part.n_id.tolist(), part.e_id.tolist(), train(distribute(network("gcn"), part), part, 2)))
    return found


def test_a_seed_repeats_the_vertices_and_the_losses():
    """T6."""
    for first, second, other in distributed.run(repeated, 2):
        assert first == second
        assert first[0] != other[0]


def separate(rank: int, size: int, per_host: Any) -> tuple[int, int, list[float]]:
    """Trains on a graph without edges between its halves."""
    half = data_of(60)
    both = Data(x=torch.cat([half.x, -half.x]), y=half.y.repeat(2), train_mask=half.train_mask.repeat(2))
    both.edge_index = torch.cat([half.edge_index, half.edge_index + 60], 1)
    part = local(both, preload=Preload(2), ranks_per_host=per_host)
    words = part.job.received["preload"]
    return part.preloaded_rows, words, train(distribute(network("gcn"), part), part, 2)


@pytest.mark.parametrize(("size", "per_host"), [(2, 1), (4, 2)])
def test_a_host_without_outside_vertices_loads_nothing(size, per_host):
    """T6."""
    found = distributed.run(separate, size, size, per_host)
    assert [each[:2] for each in found] == [(0, 0)] * size
    assert [each[2] for each in found] == [pytest.approx(found[0][2])] * size


def few(rank: int, bounds: list[int], per_host: Any) -> list[float]:
    part = local(graph(), offsets=bounds, preload=Preload(2), ranks_per_host=per_host)
    return train(distribute(network("gcn"), part), part, 2)


@pytest.mark.parametrize(("bounds", "per_host"), [([0, 0, 0, 60, N], 2), ([0, 0, 1, 1, N], [3, 1]), ([0, 0, N], 1)])
def test_hosts_may_have_no_vertices_or_fewer_vertices_than_ranks(bounds, per_host):
    expected = train_alone(network("gcn"), graph(), 2)
    for losses in distributed.run(few, len(bounds) - 1, bounds, per_host):
        assert losses == pytest.approx(expected, abs=1e-9)


def test_both_ranks_of_a_host_get_half_of_its_vertices_and_edges():
    found = distributed.run(sets, 4, 4, 2, [Preload(1)])
    for ranks in hosts_of(found, 4, 2):
        for name in ("n_id", "e_id"):
            counts = [len(each[0][name]) for each in ranks]
            assert max(counts) <= 1.15 * sum(counts) / 2, name


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hops": -1}, "hops of Preload must be an integer >= 0, got -1"),
        ({"hops": 1.5}, "hops of Preload must be an integer >= 0, got 1.5"),
        ({"hops": 1, "fanout": 0}, "fanout of Preload must be an integer >= 1, or None for all in-neighbours, got 0"),
        ({"hops": 1, "seed": -1}, "seed of Preload must be an integer >= 0, got -1"),
    ],
)
def test_wrong_values_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Preload(**given)


def test_arguments_that_need_each_other_are_checked():
    with pytest.raises(ValueError, match="ranks_per_host= is for preload=, got no preload"):
        local(graph(), ranks_per_host=1)
    with pytest.raises(TypeError, match=r"preload must be a salientpp.fullgraph.Preload or None, got int"):
        local(graph(), preload=3)
    with pytest.raises(ValueError, match="ranks_per_host=3 does not fit 1 ranks"):
        local(graph(), preload=Preload(1), ranks_per_host=3)


def test_plans_are_refused():
    part = local(graph(), preload=Preload(1), ranks_per_host=1)
    with pytest.raises(ValueError, match="plan_for needs a part without preload"):
        plan_for(network("sage"), part)
    with pytest.raises(ValueError, match="plan_for needs a part without preload"):
        distribute(network("sage"), part, "auto")


def differing(rank: int, what: str) -> str:
    given = Preload(1 + (rank == 1) if what == "preload" else 1)
    per_host = [1, 1, 2] if what == "hosts" and rank == 3 else 2
    try:
        opened(4, per_host, given)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("preload", "all ranks must open a graph with the same preload, got Preload(hops=1"),
        ("hosts", "all ranks must have the same ranks_per_host, got 2 on rank 0 and [1, 1, 2] on rank 3"),
    ],
)
def test_ranks_that_ask_for_different_hosts_or_vertices_are_told(what, words):
    assert [words in text for text in distributed.run(differing, 4, what)] == [True] * 4


def mistaken(rank: int, mistake: str) -> str:
    part = opened(4, 2, Preload(2))
    edges, weight = part.edge_index, part.edge_weight
    model = distribute(network("weighted gcn"), part)
    if mistake == "edges":
        edges = edges.clone()
    elif mistake == "weights":
        weight = weight * 2
    elif mistake == "a write":
        weight.mul_(2)
    elif mistake == "a gradient":
        weight.requires_grad_()
    elif mistake == "one rank":
        if rank == 3:
            weight = weight[:-1]
    else:
        model(part.x, edges, weight)  # so that the next exchange is one inside the hosts
        model.train(rank != 2)
    try:
        loss_mean(model(part.x, edges, weight)[part.train_mask], part).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("edges", "ValueError: a preloaded part normalises by degrees of the whole graph"),
        ("weights", "as loaded, but the model got other weights; pass part.edge_index and an edge attribute"),
        ("a write", "as loaded, but the model got other weights"),
        ("a gradient", "as loaded, but the model got other weights"),
    ],
)
def test_normalisation_by_other_edges_or_weights_is_refused(mistake, words):
    for text in distributed.run(mistaken, 4, mistake):
        assert words in text or "failed in the model's forward" in text
        assert "no error" not in text


def test_a_layer_that_computes_its_weights_and_normalises_them_is_refused():
    part = local(graph(), preload=Preload(1), ranks_per_host=1)
    model = distribute(pyg.PDNConv(WIDTH, 4, 1, 5).double(), part)
    with pytest.raises(ValueError, match="the model got other weights"):
        model(part.x, part.edge_index, part.edge_attr)


def test_an_error_on_one_rank_reaches_all_hosts():
    texts = distributed.run(mistaken, 4, "one rank")
    assert texts[3].startswith("ValueError")
    assert all("rank 3 failed in the model's forward: ValueError" in text for text in texts[:3])


def test_ranks_of_a_host_that_differ_are_named_by_their_numbers_in_the_job():
    texts = distributed.run(mistaken, 4, "a mode")
    words = "in evaluation mode on rank 2 and in training mode on rank 3"
    assert all(words in text for text in texts), texts
    assert [text.split(":")[0] for text in texts] == ["RankFailure", "RankFailure", "RanksDiffer", "RanksDiffer"]


def failing(rank: int, what: str) -> str:
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("no METIS here") if what == "METIS" else MemoryError("no memory here")

    if rank == 2 and what == "METIS":
        preload.assign_parts = refuse
    elif rank == 2:
        expansion.picks = refuse
    try:
        opened(4, 2, Preload(1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_host_that_cannot_divide_its_graph_tells_all_ranks():
    texts = distributed.run(failing, 4, "METIS")
    assert texts[2] == "ImportError: no METIS here"
    words = "ValueError: rank 2 could not divide the graph of its host: ImportError: no METIS here"
    assert [texts[rank] for rank in (0, 1, 3)] == [words] * 3


def test_a_rank_that_cannot_pick_vertices_tells_all_ranks():
    texts = distributed.run(failing, 4, "memory")
    assert texts[2] == "MemoryError: no memory here"
    words = "rank 2 failed in preloading: MemoryError: no memory here"
    assert all(words in texts[rank] for rank in (0, 1, 3)), texts


def test_the_models_of_this_file_have_the_stated_numbers_of_layers():
    for name, layers in LAYERS.items():
        convs = [each for each in network(name).modules() if isinstance(each, pyg.MessagePassing)]
        assert len(convs) == layers
    assert network("sage")(torch.zeros(3, WIDTH).double(), torch.empty(2, 0).long()).shape == (3, CLASSES)
