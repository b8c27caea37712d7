"""Laws of layouts: each gives the product of one process and its adjoint, and moves the words that its closed form says."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
from layout_words import words_of_product
from rare import rare
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SimpleConv

from salientpp.fullgraph import DistAdjacency, LocalGraph, distribute, local
from salientpp.fullgraph.cut import minimum_cover
from salientpp.fullgraph.layouts import Layout

N, F = 48, 7
LAYOUTS = {
    1: ["halo", "cover", "1d", "1.5d:1", "2d", "3d", "grid:1x1"],
    2: ["halo", "cover", "1d", "1.5d", "grid:1x2", "grid:2x1"],
    3: ["halo", "cover", "1d", "grid:1x3", "grid:3x1", "1.5d:3"],
    4: ["halo", "cover", "1d", "1.5d", "1.5d:4", "2d", "grid:2x2", "grid:4x1", "grid:1x4"],
    8: ["halo", "cover", "1d", "1.5d", "1.5d:4", "3d", "grid:2x4", "grid:4x2", "grid:8x1"],
}
_OF_NONZEROS = ("nonzeros", "ids of nonzeros")
EVEN = {size: [N * rank // size for rank in range(size + 1)] for size in LAYOUTS}
UNEVEN = {
    1: [0, N],
    2: [0, 5, N],
    3: [0, 0, 31, N],
    4: [0, 11, 11, 40, N],
    8: [0, 1, 9, 9, 20, 33, 34, N, N],
}


def graph() -> Data:
    draw = torch.Generator().manual_seed(2)
    edge_index = torch.stack(
        [(torch.rand(260, generator=draw).square() * N).long(), torch.randint(N - 3, (260,), generator=draw)]
    )
    edge_index[:, :4] = edge_index[:, 4:8]
    x = torch.randn(N, F, generator=draw).double()
    return Data(edge_index=edge_index, x=x, edge_weight=torch.randn(260, generator=draw).double())


def expected(data: Data, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the product and the gradient of its sum with weights 0, 1, 2, ..."""
    x = data.x.clone().requires_grad_()
    source, target = data.edge_index
    rows = x[source] * (data.edge_weight[:, None] if kind == "weighted" else 1)
    index = target[:, None].expand(-1, F)
    reduce = {"weighted": "sum", "sum": "sum", "mean": "mean", "max": "amax"}[kind]
    out = x.new_zeros(N, F).scatter_reduce(0, index, rows, reduce, include_self=False)
    (out * torch.arange(N * F).view(N, F)).sum().backward()
    return out.detach(), x.grad


def compare(rank: int, offsets: list[int], layouts: list[str]) -> list[str]:
    data, wrong = graph(), []
    part = local(data, offsets=offsets)
    ranks, number = part.ranks, part.n_id.numel()
    begin = offsets[rank]
    own = slice(begin, begin + number)
    x_here = part.x[:number]
    draw = torch.Generator().manual_seed(9)
    y = torch.randn(N, F, generator=draw).double()[own]
    for name in layouts:
        for kind in ("sum", "weighted", "mean", "max"):
            if kind == "max" and name in ("halo", "cover", "2d", "3d"):
                continue
            weight = part.edge_weight if kind == "weighted" else None
            operand = DistAdjacency(part, name, weight=weight, reduce="sum" if kind == "weighted" else kind)
            ranks.received.clear()
            x = x_here.clone().requires_grad_()
            out = operand.spmm(x)
            words = {key: value for key, value in ranks.received.items() if key not in ("ties", *_OF_NONZEROS)}
            if sum(words.values()) != words_of_product(name, offsets, F, rank, operand.rows_received):
                wrong.append(f"{name} moved {words}")
            (out * torch.arange(N * F).view(N, F)[own]).sum().backward()
            product, gradient = expected(data, kind)
            for what, a, b in (("product", product[own], out), ("gradient", gradient[own], x.grad)):
                if not torch.allclose(a, b, rtol=1e-10, atol=1e-10):
                    wrong.append(f"{name}: {what} of {kind} is off by {float((a - b).abs().max())} on rank {rank}")
            if kind != "max":
                back = operand.spmm_transposed(y)
                sides = torch.stack([(out.detach() * y).sum(), (x_here * back).sum()])
                left, right = ranks.sum_up(sides, "test").tolist()
                if abs(left - right) > 1e-9:
                    wrong.append(f"{name}: <Ax, y> = {left}, <x, A'y> = {right}")
    return wrong


@pytest.mark.parametrize(
    ("size", "even", "layouts"),
    [
        *((size, False, LAYOUTS[size]) for size in (1, 2, 3, 4)),
        (8, False, ["3d", "grid:2x4", "1.5d:4"]),
        *rare((4, True, LAYOUTS[4]), (8, False, LAYOUTS[8])),
    ],
    ids=lambda value: f"{len(value)} layouts" if isinstance(value, list) else str(value),
)
def test_every_layout_gives_product_and_adjoint_and_moves_the_predicted_words(size, even, layouts):
    wrong = distributed.run(compare, size, (EVEN if even else UNEVEN)[size], layouts)
    assert [words for each in wrong for words in each] == []


def tied_rows(part: Any) -> Tensor:
    """Returns rows of 0 and 1, one of them -inf, so that most targets have several sources with the maximum, which is sometimes 0."""
    x = (torch.rand(N, F, generator=torch.Generator().manual_seed(4)) < 0.1).double()
    x[graph().edge_index[0, 0]] = -torch.inf
    return x[part.n_id] if isinstance(part, LocalGraph) else x


def compare_ties(rank: int, offsets: list[int], layouts: list[str]) -> list[str]:
    data, wrong = graph(), []
    part, weights = local(data, offsets=offsets), torch.arange(N * F).double().view(N, F)
    for name in layouts:
        found = []
        for conv, g, w in (
            (SimpleConv("max"), data, weights),
            (distribute(SimpleConv("max"), part, name), part, weights[part.n_id]),
        ):
            x = tied_rows(g).requires_grad_()
            out = conv(x, g.edge_index)
            (torch.where(out.isfinite(), out, 0) * w).sum().backward()
            found.append((out.detach(), x.grad))
        (out, gradient), (mine, own) = found
        total = torch.zeros(N, F).double().index_add_(0, part.n_id, own)
        torch.distributed.all_reduce(total)
        if not torch.equal(mine, out[part.n_id]) or not torch.allclose(total, gradient, rtol=0, atol=1e-9):
            wrong.append(f"{name}: off by {float((total - gradient).abs().max())}")
    return wrong


@pytest.mark.parametrize(
    ("size", "layouts"), [(2, ["halo", "1d", "1.5d", "grid:1x2"]), (4, ["1.5d", "grid:2x2", "grid:1x4"])]
)
def test_equal_maxima_share_the_gradient_as_in_pyg(size, layouts):
    wrong = distributed.run(compare_ties, size, EVEN[size], layouts)
    assert [words for each in wrong for words in each] == []


def test_closed_forms_equal_the_papers_if_everything_divides():
    n, f = 64 * 12, 24
    for size in (4, 16, 64):
        offsets = [n * rank // size for rank in range(size + 1)]
        words = lambda name, at=offsets: words_of_product(name, at, f, 0)  # noqa: E731
        assert words("1d") == (n - n // size) * f
        for rows, columns in ((2, size // 2), (size // 2, 2), (size, 1)):
            assert words(f"grid:{rows}x{columns}") == n * f * (rows - 1) / size + n * f * (columns - 1) / size
        side = round(size**0.5)
        conversion = 2 * n * f * (side - 1) / side**3
        assert words("2d") == pytest.approx(n * f * (side - 1) / side**2 + conversion)
        for copies in (2, 4):
            if size % copies**2 == 0:
                # n f / c words arrive in stages, except the group's own block. Then the group exchanges rows and sums.
                block = n * copies // size
                staged = n // copies - block
                assert words(f"1.5d:{copies}") == (staged + 2 * (copies - 1) * n // size) * f
    offsets = [n * rank // 64 for rank in range(65)]
    dense, reduced, conversion = n * f * 3 / 64, n * f * 3 / 64, 2 * n * f * 3 / 4**4
    assert words_of_product("3d", offsets, f, 0) == pytest.approx(dense + reduced + conversion)


@pytest.mark.parametrize("size", [4, 8])
def test_every_entry_has_one_holder(size):
    for name in LAYOUTS[size][2:]:  # without 'halo' and 'cover', which have no blocks
        form = Layout.of(name, size)
        for target in range(size):
            for source, holder in enumerate(form.holders(target)):
                assert target in form.targets(holder) and source in form.sources(holder), name
            assert sum(len(form.sources(rank)) for rank in range(size) if target in form.targets(rank)) == size, name


def matching_by_hand(edges: list[tuple[int, int]]) -> int:
    """Returns the largest number of edges that share no end, by trying all choices."""
    if not edges:
        return 0
    (a, b), others = edges[0], edges[1:]
    apart = [(c, d) for c, d in others if c != a and d != b]
    return max(matching_by_hand(others), 1 + matching_by_hand(apart))


@pytest.mark.parametrize("seed", range(20))
def test_a_minimum_cover_covers_and_is_as_large_as_a_maximum_matching(seed):
    draw = torch.Generator().manual_seed(seed)
    left, right = torch.randint(3 + seed % 5, (2, 10), generator=draw)
    lefts, rights = minimum_cover(left, right)
    assert bool((torch.isin(left, lefts) | torch.isin(right, rights)).all())
    pairs = sorted(set(zip(left.tolist(), right.tolist())))
    assert lefts.numel() + rights.numel() == matching_by_hand(pairs)


def count_rows(rank: int) -> tuple[int, int]:
    part = local(graph(), offsets=UNEVEN[4])
    return tuple(DistAdjacency(part, name).rows_received for name in ("cover", "halo"))


def test_a_cover_needs_fewer_rows_than_the_halo():
    found = distributed.run(count_rows, 4)
    assert all(cover <= halo for cover, halo in found)
    assert sum(cover for cover, _ in found) < sum(halo for _, halo in found)


def count_nonzeros(rank: int, size: int, name: str) -> tuple[int, int]:
    part = local(graph(), offsets=EVEN[size])
    operand = DistAdjacency(part, name)
    part.ranks.received.clear()
    operand.spmm(part.x)
    return operand.num_values, part.ranks.received["nonzeros"]


@pytest.mark.parametrize(("size", "name", "side"), [(4, "2d", 2), (8, "3d", 2)])
def test_nonzeros_of_summa_go_to_all_but_their_holder(size, name, side):
    held, received = zip(*distributed.run(count_nonzeros, size, size, name))
    assert sum(held) == graph().num_edges
    assert sum(received) == (side - 1) * graph().num_edges


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layout": "2D"}, "layout must be one of 'halo', 'cover', '1d'"),
        ({"layout": "grid:2x2"}, "needs 4 ranks, got 1"),
        ({"layout": "1.5d"}, "replicates rows 2 times; this must divide the number of ranks, 1"),
        ({"layout": "2d", "reduce": "max"}, "needs layout '1d', '1.5d' or 'grid:RxC'"),
        ({"reduce": "median"}, "reduce must be 'sum', 'mean' or 'max'"),
    ],
)
def test_unsupported_arguments_of_layouts_are_refused(arguments: dict[str, Any], words):
    with pytest.raises(ValueError, match=words):
        DistAdjacency(local(graph()), **arguments)
