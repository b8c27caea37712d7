"""Laws of full-graph training by layer: on any number of ranks, outputs and all gradients equal those of one process with the whole graph.

The table of layers is complete: every class of ``torch_geometric.nn.conv`` is either compared here or refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
import torch_geometric
import torch_geometric.nn as pyg
from layer_graph import Called, F, H, N, differences, gradients, graph
from pyg_layers import CASES, NAMES, words_of
from rare import rare
from torch.nn import Linear, Sequential
from torch_geometric.data import Data

from salientpp.fullgraph import Preload, distribute, local, loss_mean, pieces
from salientpp.fullgraph.layers import REFUSED, refusals
from salientpp.nn.layers import LAYERS

#: Very uneven blocks, some of them empty. On several ranks some have no training vertices.
OFFSETS = {1: [0, N], 2: [0, 7, N], 3: [0, 0, 30, N], 4: [0, 3, 3, 30, N]}


def compare(rank: int, size: int, names: list[str], ranks_per_host: int | None = None, **options: Any) -> list[str]:
    """Describes the differences from one process with the whole graph. With ``ranks_per_host``, hosts preload the vertices that the layers need."""
    torch_geometric.backend.use_segment_matmul = False  # some builds of pyg-lib lack it
    data, wrong = graph(), []
    parts = {
        hops: local(
            data,
            offsets=OFFSETS[size],
            preload=Preload(hops) if ranks_per_host else None,
            ranks_per_host=ranks_per_host,
        )
        for hops in {CASES[name].hops for name in names}
    }
    for name in names:
        case = CASES[name]
        part = parts[case.hops]
        try:
            whole = Called(case)
            whole.conv.train(whole.conv.training)
            x = data.x.clone().requires_grad_()
            expected = whole(x, data)
            target = torch.linspace(-1, 1, expected[0].numel(), dtype=torch.float64).view(expected[0].shape)
            (expected[data.train_mask] - target).square().flatten(1).sum(1).mean().backward()
            torch.manual_seed(rank)  # gives other ranks other values, which rank 0's must replace
            mine = Called(case)
            if rank:
                with torch.no_grad():
                    for parameter in mine.parameters():
                        parameter.add_(1)
            model = distribute(mine, part, **options)
            own = part.x.clone().requires_grad_()
            out = model(own, part)
            losses = (out[part.train_mask] - target).square().flatten(1).sum(1)
            loss_mean(losses, part).backward()
            # Without the placeholder row of a rank without vertices. The gradients of all copies of a row add up.
            inner, number = part.num_counted, part.n_id.numel()
            of_x = torch.zeros_like(x).index_add_(0, part.n_id, own.grad[:number])
            dist.all_reduce(of_x)
            pairs = {"output": (expected[part.n_id[:inner]], out[:inner]), "input": (x.grad, of_x)}
            found = gradients(mine)
            pairs.update({key: (value, found[key]) for key, value in gradients(whole).items()})
            wrong += differences(pairs, name, rank, size)
        except Exception as error:
            if type(error).__name__ == "RankFailure":
                raise
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            raise RuntimeError("; ".join(wrong)) from error
    return wrong


@pytest.mark.parametrize(
    ("size", "names"),
    [(2, NAMES), (1, NAMES[::8]), (3, NAMES[1::8]), (4, NAMES[2::8]), *rare((1, NAMES), (3, NAMES), (4, NAMES))],
    ids=words_of,
)
def test_each_layer_equals_the_whole_graph(size, names):
    wrong = distributed.run(compare, size, size, names)
    assert [words for each in wrong for words in each] == []


@pytest.mark.parametrize(
    ("size", "ranks_per_host", "names"),
    [(2, 1, NAMES[::2]), (4, 2, NAMES[1::8]), *rare((2, 1, NAMES), (4, 2, NAMES))],
    ids=words_of,
)
def test_each_layer_on_preloaded_vertices_equals_the_whole_graph(size, ranks_per_host, names):
    # The weights that PDNConv normalises are computed from parameters, so their sums over the edges of other hosts are unknown.
    wrong = distributed.run(compare, size, size, sorted({*names} - {"PDNConv"}), ranks_per_host)
    assert [words for each in wrong for words in each] == []


def compare_in_pieces(rank: int, size: int, names: list[str], piece_bytes: int) -> list[str]:
    pieces.PIECE_BYTES = piece_bytes
    return compare(rank, size, names, recompute="layers")


@pytest.mark.parametrize(
    ("size", "piece_bytes", "names"),
    [
        (2, 6000, NAMES[::3]),
        (1, 1, NAMES[1::3]),
        (1, 6000, NAMES[2::3]),
        (4, pieces.PIECE_BYTES, NAMES[::16]),
        *rare((2, 6000, NAMES), (1, 1, NAMES), (4, 6000, NAMES), (4, pieces.PIECE_BYTES, NAMES)),
    ],
    ids=words_of,
)
def test_each_layer_equals_the_whole_graph_if_it_is_computed_again(size, piece_bytes, names):
    """A piece of one byte holds one target. A piece of the default size holds all targets."""
    wrong = distributed.run(compare_in_pieces, size, size, names, piece_bytes)
    assert [words for each in wrong for words in each] == []


def without_edges(rank: int, recompute: str | None) -> str:
    data = graph()
    part = local(data, offsets=[0, 0, N], timeout=distributed.NEVER)
    looped, bare = (pyg.FeaStConv(F, H, add_self_loops=adds).double() for adds in (True, False))
    out = distribute(looped, part, recompute=recompute)(part.x, part.edge_index)
    assert torch.allclose(out[: part.n_id.numel()], looped(data.x, data.edge_index)[part.n_id])
    with pytest.raises((ValueError, RuntimeError)) as raised:
        distribute(bare, part, recompute=recompute)(part.x, part.edge_index).sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("recompute", [None, "layers"])
def test_a_layer_that_needs_an_edge_is_named_on_a_rank_without_edges(recompute):
    for text in distributed.run(without_edges, 2, recompute):
        assert "this rank has no edges into its vertices, and FeaStConv failed without edges: cannot reshape" in text
        assert "Use fewer ranks or another division" in text


def test_every_layer_of_pyg_is_compared_or_refused():
    known = {name.split()[0] for name in CASES}
    assert known == LAYERS.keys()
    assert set(pyg.conv.classes) - {"MessagePassing"} == known | set(REFUSED)


class Scaled(pyg.GraphSizeNorm):
    """Subclass that changes nothing."""


class Doubled(torch.nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def with_forward(norm: torch.nn.Module) -> torch.nn.Module:
    inherited = norm.forward
    norm.forward = lambda x: 2 * inherited(x)
    return norm


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pyg.ChebConv(F, H, 2), "ChebConv rescales by the largest weight"),
        (lambda: Sequential(Linear(F, F), pyg.GraphNorm(F)), r"GraphNorm \(1\) looks at all vertices"),
        (lambda: pyg.LayerNorm(F), "LayerNorm looks at all vertices of the graph at once; mode='node' does not"),
        (lambda: pyg.SAGEConv(-1, H), "has parameters without a shape"),
        (lambda: pyg.SAGEConv(F, H, "lstm"), "depends on the order of the edges"),
        (lambda: pyg.SAGEConv(F, H, flow="target_to_source"), "flow='target_to_source'"),
        (lambda: pyg.SuperGATConv(F, H), "it works in evaluation"),
        (lambda: pyg.MeanSubtractionNorm(), "MeanSubtractionNorm looks at all vertices of the graph at once"),
        (lambda: Scaled(), "Scaled looks at all vertices of the graph at once"),
        (
            lambda: Doubled(F),
            r"Doubled has a forward\(\) of its own, which would normalise .*; call a torch.nn.BatchNorm1d",
        ),
        (lambda: with_forward(torch.nn.BatchNorm1d(F)), r"BatchNorm1d has a forward\(\) of its own"),
        (lambda: pyg.SumAggregation(), "SumAggregation looks at all vertices of the graph at once if used outside"),
    ],
)
def test_modules_that_read_further_vertices_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        distribute(make(), local(graph()))


def test_norms_of_single_rows_and_of_batches_are_not_refused():
    model = Sequential(pyg.LayerNorm(F, mode="node"), pyg.BatchNorm(F), torch.nn.LayerNorm(F))
    assert list(refusals(model)) == []


def without(norm: torch.nn.Module, *names: str) -> torch.nn.Module:
    """Sets attributes to None; ``track_running_stats`` to False."""
    for name in names:
        setattr(norm, name, False if name == "track_running_stats" else None)
    return norm


#: Normalisations over all vertices. Those that are "not tracked any more" still have running statistics.
BATCH_NORMS = {
    "tracked": lambda: torch.nn.BatchNorm1d(F),
    "not tracked": lambda: torch.nn.BatchNorm1d(F, track_running_stats=False),
    "not tracked any more": lambda: without(torch.nn.BatchNorm1d(F), "track_running_stats"),
    "cumulative": lambda: torch.nn.BatchNorm1d(F, momentum=None, affine=False, eps=0.1),
    "cumulative, not tracked any more": lambda: without(torch.nn.BatchNorm1d(F, momentum=None), "track_running_stats"),
    "cumulative, not counted": lambda: without(torch.nn.BatchNorm1d(F, momentum=None), "num_batches_tracked"),
    "counted only": lambda: without(torch.nn.BatchNorm1d(F), "running_mean", "running_var"),
    "single elements": lambda: pyg.BatchNorm(F, allow_single_element=True),
    "groups": lambda: pyg.DiffGroupNorm(F, 2),
}

#: Normalisations that torch refuses to compute.
WRONG_NORMS = {
    "half a state": lambda: without(torch.nn.BatchNorm1d(F), "running_mean"),
    "half a state, not tracked any more": lambda: without(
        torch.nn.BatchNorm1d(F), "running_var", "track_running_stats"
    ),
    "one column": lambda: torch.nn.BatchNorm1d(1, track_running_stats=False),
    "images": lambda: torch.nn.BatchNorm2d(F, track_running_stats=False),
}


def after_steps(model: torch.nn.Module, net: torch.nn.Module, x: torch.Tensor, own: Any, counted: Any) -> Any:
    """Returns the error of two steps of training and one of evaluation; and the outputs, the gradients and the buffers.

    Args:
        own, counted: this rank's rows of the results, and the rows that the loss sums.
    """
    outputs, x = [], x.clone().requires_grad_()
    try:
        for trains in (True, True, False):
            out = model.train(trains)(x)
            out[counted].square().sum().backward()
            outputs.append(out[own])
    except (ValueError, RuntimeError) as error:
        return str(error).partition(", got")[0], []
    return "", [*outputs, x.grad[own], *gradients(net).values(), *net.buffers()]


def normalised_otherwise(rank: int, size: int, names: list[str], offsets: list[list[int]]) -> list[str]:
    """Describes the differences of normalisations from one process."""
    wrong = []
    for each in offsets:
        draw = torch.Generator().manual_seed(1)
        data = Data(
            x=torch.randn(each[-1], F, generator=draw).double(), edge_index=torch.empty(2, 0, dtype=torch.int64)
        )
        for name in names:
            part = local(data, offsets=each, timeout=distributed.NEVER)  # after an error, ranks need another
            torch.manual_seed(3)
            alone = Sequential(Linear(F, F), (BATCH_NORMS | WRONG_NORMS)[name](), Linear(F, F)).double()
            mine = copy.deepcopy(alone)
            error, expected = after_steps(alone, alone, data.x, part.n_id, slice(None))
            assert bool(error) == (name in WRONG_NORMS or (each[-1] == 1 and name != "single elements"))
            own = slice(part.n_id.numel())  # a rank without vertices has a row too
            found = after_steps(distribute(mine, part), mine, part.x, own, own)
            try:
                assert found[0] == error
                torch.testing.assert_close(found[1], expected, rtol=1e-10, atol=1e-10)
            except AssertionError as difference:
                wrong.append(f"{name} with {each} on rank {rank} of {size}: {difference}")
    return wrong


@pytest.mark.parametrize(
    ("size", "names", "offsets"),
    [
        (1, [*BATCH_NORMS], [[0, 12], [0, 1], [0, 0]]),
        (2, [*BATCH_NORMS], [[0, 1, 3], [0, 0, 12], [0, 0, 0]]),
        (2, [*WRONG_NORMS], [[0, 1, 3]]),
        *rare(
            (2, [*BATCH_NORMS], [[0, 7, 12], [0, 0, 2], [0, 1, 2], [0, 0, 1]]), (4, [*BATCH_NORMS], [[0, 0, 1, 3, 5]])
        ),
    ],
    ids=words_of,
)
def test_batch_normalisation_equals_the_whole_graph_in_each_setting(size, names, offsets):
    wrong = distributed.run(normalised_otherwise, size, size, names, offsets)
    assert [words for each in wrong for words in each] == []


def errors_over_one_vertex(rank: int, size: int, trains: bool, tracks: bool) -> list[str]:
    """Returns the errors of batch normalisation of one vertex, in one process and over ranks; "" without an error."""
    data, found = Data(x=torch.ones(1, F), edge_index=torch.zeros(2, 1, dtype=torch.int64)), []
    part = local(data, offsets=[0, *[1] * size])
    norm = torch.nn.BatchNorm1d(F, track_running_stats=tracks).train(trains)
    for model, x in ((norm, data.x), (distribute(norm, part), part.x)):
        try:
            model(x)
            found.append("")
        except ValueError as error:
            found.append(str(error).partition(", got")[0])
    return found


@pytest.mark.parametrize(
    ("size", "trains", "tracks"), [(1, True, True), (1, False, True), (2, False, False), *rare((1, False, False))]
)
def test_batch_normalisation_of_one_vertex_fails_without_running_statistics_in_evaluation_too(size, trains, tracks):
    for alone, over_ranks in distributed.run(errors_over_one_vertex, size, size, trains, tracks):
        assert over_ranks == alone
        assert bool(alone) == (trains or not tracks)


def test_compiled_layers_are_refused_and_other_compiled_modules_are_not():
    model = torch.nn.ModuleList([pyg.GCN(4, 4, 2), torch.nn.Linear(4, 4)])
    assert [*refusals(torch.nn.ModuleList(torch.compile(each, backend="eager") for each in model))] == [
        "OptimizedModule (0) is compiled, and compiled layers cannot exchange rows; distribute the model without torch.compile"
    ]
    for each in model:
        each.compile(backend="eager")
    (refusal,) = refusals(model)
    assert refusal.startswith("GCN (0) is compiled")
