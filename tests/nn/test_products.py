"""Laws of the products over grouped edges: values and gradients equal those of one message per edge, on every path and for every dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATv2Conv
from torch_geometric.utils import scatter, softmax

from salientpp import ops
from salientpp.nn import composed_products as composed
from salientpp.nn import products
from salientpp.nn.products import (
    additive_scores,
    dot_edges,
    reduce_edges,
    reduce_sources,
    softmax_by_target,
    take_sources,
    take_targets,
)
from salientpp.sampling.edge_lists import EdgeLists, group_edges

REDUCTIONS = ("sum", "mean", "max", "min")
SLOPE = 0.2


@dataclass(frozen=True)
class Edges:
    """Edges by hand, of which the first ``used`` targets are used."""

    source: list[int]
    target: list[int]
    num_sources: int
    num_targets: int
    used: int

    @property
    def lists(self) -> EdgeLists:
        edge_index = torch.tensor([self.source, self.target], dtype=torch.int64).view(2, -1)
        lists = group_edges(edge_index, self.num_sources, self.num_targets)
        assert lists is not None
        return lists

    @property
    def places(self) -> list[tuple[int, int]]:
        """Returns (source, target) of the used edges."""
        return [(s, t) for s, t in zip(self.source, self.target) if t < self.used]

    @property
    def rows(self) -> int:
        """Returns the smallest number of rows of x that the used edges allow."""
        return 1 + max((s for s, _ in self.places), default=-1)


def random_edges(seed: int, num_sources: int, num_targets: int, num_edges: int, used: int) -> Edges:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    source = (torch.rand(num_edges, generator=generator).square() * num_sources).long().tolist()
    target = torch.randint(num_targets, (num_edges,), generator=generator).sort().values.tolist()
    return Edges(source, target, num_sources, num_targets, used)


EDGES = {
    "random": random_edges(1, 9, 7, 25, 7),
    "prefix": random_edges(2, 9, 7, 25, 4),
    "a prefix of nothing": random_edges(3, 5, 4, 9, 0),
    "no edges": Edges([], [], 4, 3, 3),
    "no targets": Edges([], [], 4, 0, 0),
    "no vertices": Edges([], [], 0, 0, 0),
    "one vertex": Edges([0], [0], 1, 1, 1),
    "isolated targets": Edges([2, 0, 1, 2], [1, 1, 4, 4], 3, 7, 6),
    "repeated edges": Edges([1, 1, 1, 0, 1, 1], [0, 0, 0, 2, 2, 2], 2, 3, 3),
    "self-loops": Edges([0, 1, 1, 0, 2], [0, 0, 1, 2, 2], 3, 3, 3),
    "a hub": Edges([3] * 12 + [0], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5], 4, 6, 5),
}


# --- slow reference: one message at a time ----------------------------------------------------------------------


def slow_reduce(edges: Edges, messages: list[Tensor], shape: tuple[int, ...], reduction: str) -> Tensor:
    out = []
    for t in range(edges.used):
        own = [message for message, (_, target) in zip(messages, edges.places) if target == t]
        rows = torch.stack(own) if own else torch.zeros(1, *shape, dtype=torch.float64)
        out.append(getattr(rows, {"max": "amax", "min": "amin"}.get(reduction, reduction))(0))
    return stacked(out, shape)


def stacked(rows: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)


def slow_softmax(edges: Edges, scores: Tensor) -> Tensor:
    total = slow_reduce(edges, list(scores.exp()), scores.shape[1:], "sum")
    return stacked([score.exp() / total[t] for score, (_, t) in zip(scores, edges.places)], scores.shape[1:])


def slow_additive(edges: Edges, a: Tensor, b: Tensor, att: Tensor) -> Tensor:
    leaky = torch.nn.functional.leaky_relu
    return stacked([(att * leaky(a[t] + b[s], SLOPE)).sum(-1) for s, t in edges.places], att.shape[:1])


@dataclass(frozen=True)
class Product:
    """Product with its slow reference, and the shapes of its arguments, in which "S", "T" and "E" are numbers of rows."""

    fast: Callable[..., Tensor]
    slow: Callable[..., Tensor]
    shapes: list[tuple]

    def arguments(self, edges: Edges, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        # x has only the used rows, and there is a row for every target: both must be allowed.
        sizes = {"S": edges.rows, "T": edges.num_targets, "E": len(edges.places)}
        shapes = [[sizes.get(size, size) for size in shape] for shape in self.shapes]
        return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]

    def run(self, edges: Edges, arguments: list[Tensor], lists: EdgeLists | None = None) -> Tensor:
        return self.fast(edges.lists if lists is None else lists, edges.used, *arguments)


PRODUCTS: dict[str, Product] = {}
for name in REDUCTIONS:
    PRODUCTS[name] = Product(
        lambda lists, n, x, r=name: reduce_sources(lists, x, n, r),
        lambda edges, x, r=name: slow_reduce(edges, [x[s] for s, _ in edges.places], x.shape[1:], r),
        [("S", 5)],
    )
    PRODUCTS[f"{name} of edges"] = Product(
        lambda lists, n, v, r=name: reduce_edges(lists, v, n, r),
        lambda edges, v, r=name: slow_reduce(edges, list(v), v.shape[1:], r),
        [("E", 2, 3)],
    )
for name in ("sum", "mean"):
    PRODUCTS[f"weighted {name}"] = Product(
        lambda lists, n, x, w, r=name: reduce_sources(lists, x, n, r, w),
        lambda edges, x, w, r=name: slow_reduce(
            edges, [w[p] * x[s] for p, (s, _) in enumerate(edges.places)], x.shape[1:], r
        ),
        [("S", 19), ("E",)],
    )
    PRODUCTS[f"{name} weighted by head"] = Product(
        lambda lists, n, x, w, r=name: reduce_sources(lists, x, n, r, w),
        lambda edges, x, w, r=name: slow_reduce(
            edges, [w[p][:, None] * x[s] for p, (s, _) in enumerate(edges.places)], x.shape[1:], r
        ),
        [("S", 3, 18), ("E", 3)],
    )
PRODUCTS |= {
    "rows of sources": Product(
        lambda lists, n, x: take_sources(lists, x, n),
        lambda edges, x: stacked([x[s] for s, _ in edges.places], x.shape[1:]),
        [("S", 2, 3)],
    ),
    "numbers of sources": Product(
        lambda lists, n, x: take_sources(lists, x, n),
        lambda edges, x: stacked([x[s] for s, _ in edges.places], ()),
        [("S",)],
    ),
    "rows of targets": Product(
        lambda lists, n, x: take_targets(lists, x, n),
        lambda edges, x: stacked([x[t] for _, t in edges.places], x.shape[1:]),
        [("T", 4)],
    ),
    "softmax": Product(lambda lists, n, s: softmax_by_target(lists, s, n), slow_softmax, [("E",)]),
    "softmax by head": Product(lambda lists, n, s: softmax_by_target(lists, s, n), slow_softmax, [("E", 3)]),
    "dot": Product(
        lambda lists, n, a, b: dot_edges(lists, a, b, n),
        lambda edges, a, b: stacked([(a[t] * b[s]).sum(-1) for s, t in edges.places], a.shape[1:2]),
        [("T", 2, 21), ("S", 2, 21)],
    ),
    "additive scores": Product(
        lambda lists, n, a, b, att: additive_scores(lists, a, b, att, SLOPE, n),
        slow_additive,
        [("T", 3, 18), ("S", 3, 18), (3, 18)],
    ),
}


def gradients(out: Tensor, arguments: list[Tensor], seed: int = 7) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    if not out.requires_grad:  # the slow reference without edges
        return [torch.zeros_like(argument) for argument in arguments]
    made = torch.autograd.grad((out * weight).sum(), arguments, allow_unused=True)
    return [torch.zeros_like(a) if grad is None else grad for a, grad in zip(arguments, made)]


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["kernels", "composed"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_equal_one_message_per_edge(name, path, monkeypatch):
    if path == "composed":
        monkeypatch.setattr(products, "_KERNEL_DTYPES", ())
    product = PRODUCTS[name]
    for seed, edges in enumerate(EDGES.values()):
        arguments = product.arguments(edges, seed)
        out, expected = product.run(edges, arguments), product.slow(edges, *arguments)
        assert_close(out, expected)
        for grad, slow in zip(gradients(out, arguments), gradients(expected, arguments)):
            assert_close(grad, slow)


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_match_finite_differences(name):
    edges = EDGES["prefix"]
    arguments = PRODUCTS[name].arguments(edges, 3)
    assert torch.autograd.gradcheck(lambda *given: PRODUCTS[name].run(edges, list(given)), arguments, fast_mode=True)


@pytest.mark.parametrize("path", ["kernels", "composed"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivatives_equal_one_message_per_edge(name, path, monkeypatch):
    """Second derivatives are taken for each pair of arguments, and for an argument and the outer gradient."""
    if path == "composed":
        monkeypatch.setattr(products, "_KERNEL_DTYPES", ())
    product = PRODUCTS[name]
    for seed, edges in enumerate(EDGES.values()):
        arguments = product.arguments(edges, seed)
        outer = torch.randn(product.run(edges, arguments).shape, dtype=torch.float64).requires_grad_()
        results = []
        for out in (product.run(edges, arguments), product.slow(edges, *arguments)):
            if not out.requires_grad:  # the slow reference without edges
                results.append([torch.zeros_like(each) for each in (*arguments, outer)])
                continue
            first = torch.autograd.grad(out, arguments, outer, create_graph=True, allow_unused=True)
            loss = sum((each.square() + each).sum() for each in first if each is not None)
            made = torch.autograd.grad(loss, [*arguments, outer], allow_unused=True)
            results.append(
                [torch.zeros_like(a) if grad is None else grad for a, grad in zip([*arguments, outer], made)]
            )
        for grad, slow in zip(*results):
            assert_close(grad, slow)


@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivatives_match_finite_differences(name):
    edges = EDGES["prefix"]
    arguments = PRODUCTS[name].arguments(edges, 3)
    run = lambda *given: PRODUCTS[name].run(edges, list(given))  # noqa: E731
    assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivatives_do_not_depend_on_strides(name):
    product, edges, results = PRODUCTS[name], EDGES["prefix"], []
    for is_transposed in (False, True):
        arguments = product.arguments(edges, 3)
        given = [each.t().contiguous().t() if is_transposed and each.dim() == 2 else each for each in arguments]
        if is_transposed:
            given = [each.movedim(0, -1).contiguous().movedim(-1, 0) if each.dim() == 3 else each for each in given]
        first = torch.autograd.grad(product.run(edges, given).square().sum(), arguments, create_graph=True)
        loss = sum(each.square().sum() for each in first)
        results.append([*first, *torch.autograd.grad(loss, arguments, allow_unused=True)])
    for expected, got in zip(*results):
        assert (expected is None) == (got is None)
        if expected is not None:
            assert_close(got, expected)


@pytest.mark.parametrize("of", ["edges", "sources"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_ties_at_zero_share_the_gradient_as_in_scatter_also_to_second_order(reduction, of):
    edges, results = EDGES["random"], []
    lists, number = edges.lists, edges.lists.num_targets
    count = lists.num_places(number) if of == "edges" else lists.num_sources
    x = torch.randint(-1, 2, (count, 4), generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    scale = torch.ones(number, 4, dtype=torch.float64).requires_grad_()
    reduce = products.reduce_edges if of == "edges" else reduce_sources
    for run in (reduce, getattr(composed, f"reduce_{of}")):
        out = run(lists, x, number, reduction, *([None] if run is composed.reduce_sources else []))
        (first,) = torch.autograd.grad((out * scale).sum(), [x], create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), [scale])])
    for got, expected in zip(*results):
        assert_close(got, expected)


def test_a_table_with_its_first_rows_has_second_derivatives():
    edges = EDGES["random"]
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(4)).double().requires_grad_()

    def squares(x: Tensor) -> Tensor:
        table, first = products.with_first_rows(x, 7)
        return reduce_sources(edges.lists, table, 7, "sum").square() * first

    assert torch.autograd.gradcheck(squares, [x], fast_mode=True)
    assert torch.autograd.gradgradcheck(squares, [x], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_16_bit_values_are_added_up_in_float32(name, dtype):
    product, edges = PRODUCTS[name], random_edges(5, 40, 30, 400, 25)
    arguments = product.arguments(edges, 5, dtype)
    wide = [argument.detach().float().requires_grad_() for argument in arguments]
    out, expected = product.run(edges, arguments), product.run(edges, wide)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype)), "rounded once, at the end"
    if name in ("max of edges", "min of edges", "max", "min"):
        return  # 16-bit values tie where wider values would not; see below
    scale = 8 * torch.finfo(dtype).eps
    for grad, right in zip(gradients(out, arguments), gradients(expected, wide)):
        torch.testing.assert_close(grad.float(), right, rtol=scale, atol=scale * float(right.abs().max()))


@pytest.mark.parametrize("name", PRODUCTS)
def test_sources_of_four_and_eight_bytes_give_the_same_bits(name):
    product, edges = PRODUCTS[name], EDGES["prefix"]
    arguments, lists = product.arguments(edges, 6), edges.lists
    narrow = EdgeLists(lists.indptr, lists.source.int(), None, lists.num_sources)
    out, other = product.run(edges, arguments), product.run(edges, arguments, narrow)
    assert torch.equal(out, other)
    assert all(map(torch.equal, gradients(out, arguments), gradients(other, arguments)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_do_not_depend_on_the_number_of_threads(name):
    """One source has a third of all edges, which threads divide by columns."""
    edges = random_edges(8, 300, 200, 12_000, 180)
    hub = [7 if p % 3 == 0 else s for p, s in enumerate(edges.source)]
    edges = Edges(hub, [0] * 4000 + edges.target[4000:], 300, 200, 180)
    product = PRODUCTS[name]
    wide = Product(product.fast, product.slow, [(*s[:-1], s[-1] * 8) if len(s) > 1 else s for s in product.shapes])
    if "head" in name:  # with a weight for each head
        wide = product
    arguments, lists, threads = wide.arguments(edges, 8, torch.float32), edges.lists, torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out = wide.run(edges, arguments, lists)
            results.append([out, *gradients(out, arguments)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_equal_scatter_also_for_ties(reduction, dtype):
    """Values are -1, 0 and 1. torch.scatter_reduce counts its initial zero among equal values."""
    edges = random_edges(9, 12, 8, 60, 8)
    generator = torch.Generator().manual_seed(9)
    x = torch.randint(-1, 2, (12, 6), generator=generator).to(dtype).requires_grad_()
    target, lists = torch.tensor(edges.target), edges.lists
    own = reduce_sources(lists, x, 8, reduction), reduce_edges(lists, take_sources(lists, x, 8), 8, reduction)
    peer = scatter(x[edges.source], target, 0, 8, reduction)
    tolerance, (right,) = 8 * torch.finfo(dtype).eps, gradients(peer, [x])
    for out in own:
        assert_close(out, peer, tolerance)
        assert_close(gradients(out, [x])[0], right, 4 * tolerance)


def test_a_nan_is_an_extreme():
    x = torch.tensor([[1.0, float("nan")], [2.0, 5.0]])
    lists = Edges([0, 1, 1, 0], [0, 0, 1, 1], 2, 2, 2).lists
    for reduction in ("max", "min"):
        out = reduce_sources(lists, x, 2, reduction)
        assert torch.isnan(out[:, 1]).all() and not torch.isnan(out[:, 0]).any()


def test_softmax_equals_pygs_also_for_large_scores():
    edges = random_edges(10, 12, 8, 60, 8)
    scores = (200 * torch.randn(60, 3, generator=torch.Generator().manual_seed(10)).double()).requires_grad_()
    own, peer = softmax_by_target(edges.lists, scores, 8), softmax(scores, torch.tensor(edges.target), num_nodes=8)
    assert_close(own, peer)
    assert_close(gradients(own, [scores])[0], gradients(peer, [scores])[0])


def test_attention_of_products_is_a_gatv2_layer():
    edges = random_edges(11, 12, 12, 50, 12)
    torch.manual_seed(11)
    layer = GATv2Conv(5, 4, heads=3, add_self_loops=False, bias=False).double()
    x, lists = torch.randn(12, 5).double(), edges.lists
    left, right = layer.lin_l(x).view(12, 3, 4), layer.lin_r(x).view(12, 3, 4)
    scores = additive_scores(lists, right, left, layer.att[0], layer.negative_slope, 12)
    out = reduce_sources(lists, left, 12, "sum", softmax_by_target(lists, scores, 12))
    assert_close(out.flatten(1), layer(x, torch.tensor([edges.source, edges.target])))


def test_a_backward_computes_only_requested_gradients():
    edges = EDGES["prefix"]
    for name, product in PRODUCTS.items():
        arguments = product.arguments(edges, 12)
        everything = gradients(product.run(edges, arguments), arguments)
        for i in range(len(arguments)):
            given = [a.detach().requires_grad_(j == i) for j, a in enumerate(arguments)]
            assert torch.equal(gradients(product.run(edges, given), [given[i]])[0], everything[i]), name


def test_dtypes_that_differ_are_promoted():
    lists = EDGES["random"].lists
    x, weight = torch.ones(9, 2, dtype=torch.bfloat16), torch.full((25,), 1 / 3)
    assert reduce_sources(lists, x, 7, "sum", weight).dtype == torch.float32


def test_integers_are_summed_without_a_kernel():
    edges = EDGES["random"]
    x = torch.arange(18).view(9, 2)
    out = reduce_sources(edges.lists, x, 7, "sum")
    assert torch.equal(out, scatter(x[edges.source], torch.tensor(edges.target), 0, 7, "sum"))


LISTS = EDGES["random"].lists  # 9 sources, 7 targets, 25 edges
X = torch.zeros(9, 2, 3)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: reduce_sources(LISTS, X, 8, "sum"), r"num_targets must be in \[0, 7\], the number of targets of the edges, got 8"),
        (lambda: take_targets(LISTS, X, -1), "num_targets must be in .* got -1"),
        (lambda: reduce_sources(LISTS, X, 7, "mul"), "reduction must be one of 'sum', 'mean', 'max', 'min', got 'mul'"),
        (lambda: reduce_sources(LISTS, torch.zeros(10, 2), 7, "sum"), "x must have at most 9 rows, .* got shape .10, 2"),
        (lambda: take_sources(LISTS, torch.tensor(1.0), 7), r"x must have at most 9 rows, .* got shape \[\]"),
        (lambda: reduce_sources(LISTS, X, 7, "max", torch.ones(25)), "'max' takes no weight; multiply take_sources"),
        (lambda: reduce_sources(LISTS, X, 7, "sum", torch.ones(24)), "weight must have 25 rows, .* got shape .24"),
        (lambda: reduce_sources(LISTS, X, 7, "sum", torch.ones(25, 3)), r"\[E', H\] for an x of .* got .25, 3. and .9, 2, 3"),
        (lambda: reduce_edges(LISTS, torch.zeros(26), 7, "sum"), "values must have 25 rows, .* got shape .26"),
        (lambda: softmax_by_target(LISTS, torch.zeros(3, 2), 7), "scores must have 25 rows"),
        (lambda: take_targets(LISTS, torch.zeros(6), 7), "x must have at least 7 rows, one for each of the targets"),
        (lambda: dot_edges(LISTS, X, X[:, 0], 7), r"must have shapes \[T', H, C\] and \[S', H, C\], got .* and .9, 3"),
        (lambda: additive_scores(LISTS, X, X, torch.zeros(3, 2), SLOPE, 7), r"att must have the shape .* \[2, 3\], got .3, 2"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise_a_clear_error(call, error):
    with pytest.raises(ValueError, match=error):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda lists, x: reduce_sources(lists, x, 2, "sum"),
        lambda lists, x: reduce_sources(lists, x, 2, "max"),
        lambda lists, x: reduce_sources(lists, x, 2, "mean", torch.ones(3)),
        lambda lists, x: take_sources(lists, x, 2),
        lambda lists, x: dot_edges(lists, x, x, 2),
        lambda lists, x: additive_scores(lists, x, x, x[0], SLOPE, 2),
    ],
)
def test_an_edge_whose_source_has_no_row_is_refused(call):
    lists = Edges([0, 1, 5], [0, 1, 1], 6, 2, 2).lists
    with pytest.raises(RuntimeError, match=r"index\[2\] must be in \[0, 3\), got 5"):
        call(lists, torch.zeros(3, 1, 4))


def test_kernels_refuse_lists_that_exceed_their_entries():
    x, index = torch.zeros(3, 2), torch.tensor([0, 1])
    for indptr, error in [([0, 3], "at most at the number of entries, 2, got 3"), ([0, 2, 1], "must not decrease"), ([1, 2], "start at 0")]:  # fmt: skip
        with pytest.raises(RuntimeError, match=error):
            ops.sum_listed_rows(torch.tensor(indptr), index, None, x, None)
    with pytest.raises(RuntimeError, match=r"place\[1\] must be in \[0, 2\), got 9"):
        ops.sum_listed_rows(torch.tensor([0, 2]), index, torch.tensor([0, 9]).int(), x, torch.ones(2))
