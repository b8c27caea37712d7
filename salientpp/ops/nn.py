"""Operators of message passing: they group a layer's edges, aggregate rows over the groups, and compute the gradients.

A list holds the edges of one target, or of one source; each edge is an entry. ``indptr`` int64 [n + 1] holds the first entry of each of n lists.
Entries beyond the last list are not read. ``index``, int32 or int64, has the row of x that each entry reads. Values are float32, float64, float16 or
bfloat16, with one dtype per call; 16-bit values are added up in float32. Results do not depend on the number of threads.
"""

from __future__ import annotations

from torch import Tensor

from salientpp.ops.library import operators


def group_by_target(source: Tensor, target: Tensor, num_sources: int, num_targets: int) -> Tensor:
    """Returns ``indptr`` int64 [num_targets + 1] of edges that are already sorted by target; ``source`` and ``target`` are int64 [E].

    It also checks the edges: the result is empty if ``target`` does not ascend or an id is out of range.
    """
    return operators.group_by_target(source, target, num_sources, num_targets)


def group_by_source(indptr: Tensor, source: Tensor, num_sources: int) -> tuple[Tensor, Tensor, Tensor]:
    """Transposes lists by target into lists by source: ``indptr`` int64 [num_sources + 1], and ``target`` and ``place`` int32 [E].

    ``place`` is the position that each edge has in the given lists; both ascend for each source. ``source`` is int32 or int64 [E], E < 2**31.
    Raises if a source is not in [0, num_sources).
    """
    return operators.group_by_source(indptr, source, num_sources)


def add_self_loops(indptr: Tensor, source: Tensor, edge: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lists by target with one self-loop at the end of each: ``indptr`` int64, ``source`` int32 and ``edge`` int32.

    Existing loops are removed first. ``edge`` int32 [E] has the number of each edge; None: its position. A loop takes the number of the last
    loop that was removed from its list, or -1.
    """
    return operators.add_self_loops(indptr, source, edge)


def sum_listed_rows(
    indptr: Tensor,
    index: Tensor | None,
    place: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: bool = False,
    prefix: bool = False,
) -> Tensor:
    """Sums listed rows: ``out[i]`` is the sum of ``weight[place[k]] * x[index[k]]`` over the entries k of list i; zeros for an empty list.

    Args:
        index: row of x for each entry; None: entry k has row k of x.
        place: int32, the row of ``weight`` of each entry; None: the entry's own number.
        x: [S, ...] or [S, H, ...].
        weight: [P], or [P, H] with a weight for each head; None: 1 each.
        mean: divide each sum by the number of the list's entries.
        prefix: end each list at the first entry that has no row in x. If False, such an entry raises.
    """
    return operators.sum_listed_rows(indptr, index, place, x, weight, mean, prefix)


def extreme_listed_rows(indptr: Tensor, index: Tensor | None, x: Tensor, largest: bool) -> Tensor:
    """Aggregates by maximum or minimum: returns the largest or smallest values of the rows ``x[index[k]]`` of each list.

    NaN counts as extreme. An empty list gives zeros.
    """
    return operators.extreme_listed_rows(indptr, index, x, largest)


def share_ties(indptr: Tensor, index: Tensor | None, x: Tensor, extreme: Tensor, grad: Tensor) -> Tensor:
    """Splits gradients of extremes among ties: divides ``grad`` [n, ...] by the number of entries of each list that equal ``extreme`` [n, ...].

    If the extreme is zero, the divisor is larger by one, as in ``torch.scatter_reduce`` over zeros.
    """
    return operators.share_ties(indptr, index, x, extreme, grad)


def pass_ties(indptr: Tensor, target: Tensor, x: Tensor, extreme: Tensor, share: Tensor) -> Tensor:
    """Passes gradients of extremes back to their sources.

    ``out[s]`` sums ``share[target[k]]`` over the entries k of list s with ``x[s] == extreme[target[k]]``. ``share`` is a result of
    :func:`share_ties`.

    Each list ends at the first target that has no row in ``extreme``.
    """
    return operators.pass_ties(indptr, target, x, extreme, share)


def pass_ties_to_entries(indptr: Tensor, values: Tensor, extreme: Tensor, share: Tensor) -> Tensor:
    """Passes gradients of extremes back to the entries k of each list i: ``out[k]`` is ``share[i]`` where ``values[k] == extreme[i]``, else zero."""
    return operators.pass_ties_to_entries(indptr, values, extreme, share)


def spread_rows(indptr: Tensor, x: Tensor) -> Tensor:
    """Copies rows to entries: ``out[k]`` is ``x[i]`` for the entries k of each list i."""
    return operators.spread_rows(indptr, x)


def dot_listed_rows(indptr: Tensor, index: Tensor, target_rows: Tensor, source_rows: Tensor, heads: int) -> Tensor:
    """Computes the dot product of the rows at the two ends of each edge, for each head; returns [E, heads].

    ``out[k, h]`` is the sum over c of ``target_rows[i, h, c] * source_rows[index[k], h, c]``, for the entries k of each list i.
    """
    return operators.dot_listed_rows(indptr, index, target_rows, source_rows, heads)


def softmax_of_lists(indptr: Tensor, scores: Tensor) -> Tensor:
    """Returns the softmax over the entries of each list, separately for each column of ``scores``. Sums are increased by 1e-16, as in PyG."""
    return operators.softmax_of_lists(indptr, scores)


def softmax_of_lists_backward(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of the scores, from the softmax ``out`` and its gradient ``grad``."""
    return operators.softmax_of_lists_backward(indptr, out, grad)


def additive_scores(
    indptr: Tensor, index: Tensor, target_rows: Tensor, source_rows: Tensor, att: Tensor, negative_slope: float
) -> Tensor:
    """Computes the attention scores of GATv2, [E, H].

    ``out[k, h]`` is the sum over c of ``att[h, c] * leaky_relu(target_rows[i, h, c] + source_rows[index[k], h, c])``. ``att`` is [H, C]; rows
    are [n or more, H, C] and [S, H, C].
    """
    return operators.additive_scores(indptr, index, target_rows, source_rows, att, negative_slope)


def additive_scores_by_target(
    indptr: Tensor,
    index: Tensor,
    target_rows: Tensor,
    source_rows: Tensor,
    att: Tensor,
    negative_slope: float,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Backward pass of :func:`additive_scores`: returns the gradients of ``target_rows`` and of ``att``. ``grad`` [E, H] is the scores' gradient."""
    return operators.additive_scores_by_target(indptr, index, target_rows, source_rows, att, negative_slope, grad)


def additive_scores_by_source(
    indptr: Tensor,
    target: Tensor,
    place: Tensor,
    target_rows: Tensor,
    source_rows: Tensor,
    att: Tensor,
    negative_slope: float,
    grad: Tensor,
) -> Tensor:
    """Backward pass of :func:`additive_scores`: returns the gradient of ``source_rows``.

    ``indptr``, ``target`` and ``place`` are a result of :func:`group_by_source`. A list ends at the first target that has no row in ``target_rows``.
    """
    return operators.additive_scores_by_source(
        indptr, target, place, target_rows, source_rows, att, negative_slope, grad
    )
