"""Mean and spread of the sizes of batches, known before the first batch (``pad='fixed'``).

Two sources are combined. Inclusion probabilities give, for every seed s, how much larger a batch with s is expected to
be: ``g(s)`` (:mod:`salientpp.vip.sizes`). The sum ``x = sum_s g(s)`` over the seeds of a batch is known for every
batch without sampling it. A trial samples some batches and counts their sizes ``y``. Then x is a control variate of y
(Lavenberg and Welch, Management Science 27, 1981). With a curve ``f`` that is fitted to the trial, and r the deviation
from it,

    mean = E[f(x)],        variance = Var[f(x)] + Var[r],        third central moment = E[(f(x) - E[f(x)])^3].

The curve is a line, or a parabola if the trial shows that the size grows less for larger x. If x explains the share R^2 of the variance, n trial batches give
the mean as exactly as ``n / (1 - R^2)`` batches would without x. The probabilities themselves are too inexact to give the mean, because they overestimate
from two hops on.

Sizes are treated as Pearson's type III (a shifted gamma distribution), which has the same three moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput

from salientpp.engine.basis import Basis
from salientpp.engine.epochs import Order
from salientpp.loader.batch_sizes import EDGES, TRIAL_EPOCH, sizes_of
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.schedule import Turn
from salientpp.sampling.seeds import list_sums_of
from salientpp.sampling.topology import Mfg
from salientpp.vip.sizes import ExpectedSizes, expected_sizes

#: Smallest and largest number of trial batches.
LEAST_TRIAL, MOST_TRIAL = 128, 1024

#: Wanted standard error of the size that is 3 standard deviations above the mean, in standard deviations. An error of this size changes the share of
#: larger batches by a factor of about exp(3 * 0.07) = 1.23.
_STANDARD_ERROR = 0.07

#: Number of turns from which the distribution of x is computed, and the number of seeds after which no further epoch is read for them.
_TURNS, _SEEDS = 2048, 2**24


@dataclass(frozen=True)
class Forecast:
    """Distribution of one size of a batch: mean, standard deviation and skewness."""

    mean: float
    deviation: float
    skewness: float = 0.0

    def above(self, sigmas: float) -> float:
        """Returns the size that lies ``sigmas`` standard deviations above the mean."""
        return self.mean + sigmas * self.deviation


def forecast_sizes(basis: Basis, order: Order, types: Sequence[Any], shuffled: bool) -> dict[Any, Forecast]:
    """Returns the distribution of every size of this rank's batches. The result depends only on the data, the seed and the arguments of the loader.

    Args:
        order: the order of the rank's batches.
        types: names of the sizes: types of vertices, and types of edges.
        shuffled: True if the order differs from epoch to epoch.
    """
    turns = _some_turns(order, shuffled)
    if not turns:
        if basis.source.drawing.is_collective:  # the other ranks sweep once, and draw in two steps
            _expected(basis, 1)
            for _ in range(2):
                _counted(basis, [], types, 0)
        return dict.fromkeys(types, Forecast(0.0, 0.0))
    by_seed = _by_seed(basis, turns, types)
    x = torch.stack([by_seed[_positions(turn)].sum(0) for turn in turns])
    tried = _spread(len(turns), LEAST_TRIAL)
    y = _counted(basis, [turns[i] for i in tried], types, 0)
    missing = max(_trial_size(x[tried, i], y[:, i]) for i in range(len(types))) - LEAST_TRIAL
    more = _spread(len(turns), max(0, missing))
    y = torch.cat(
        [y, _counted(basis, [turns[i] for i in more], types, LEAST_TRIAL)]
    )  # also without turns, because it may be collective
    tried += more
    return {type_: _forecast(x[:, i], x[tried, i], y[:, i]) for i, type_ in enumerate(types)}


def _some_turns(order: Order, shuffled: bool) -> list[Turn]:
    """Returns the seeds of evenly spaced batches of some epochs. Shorter batches, such as the last of an epoch, are left out, to not bias the sizes."""
    found: list[Turn] = []
    num_seeds = 0
    for epoch in count():
        turns = order.of_epoch(epoch)
        sizes = [_positions(turn).numel() for turn in turns]
        largest = max(sizes, default=0)
        found += [turn for turn, size in zip(turns, sizes) if size == largest]
        num_seeds += sum(sizes)
        enough = len(found) >= _TURNS or (num_seeds >= _SEEDS and len(found) >= LEAST_TRIAL)
        if enough or not turns or not shuffled:
            return [found[i] for i in _spread(len(found), min(_TURNS, len(found)))]
    raise AssertionError("unreachable")


def _positions(turn: Turn) -> Tensor:
    """Returns the positions of one batch's seeds, int64 [B]."""
    pieces = [positions for _, positions in turn.pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _spread(size: int, number: int) -> list[int]:
    """Returns ``number`` evenly spaced positions in [0, size), some of them repeatedly if ``size`` is smaller."""
    return [i * size // number for i in range(number)]


def _by_seed(basis: Basis, turns: Sequence[Turn], types: Sequence[Any]) -> Tensor:
    """Returns how much each seed adds to each expected size of a batch (``g`` above): float64 [seeds, types]."""
    expected = _expected(basis, round(sum(_positions(turn).numel() for turn in turns) / len(turns)))
    inputs = basis.source.seeds.inputs
    if isinstance(inputs, EdgeSamplerInput):
        source, _, target = (None, None, None) if inputs.input_type is None else inputs.input_type
        found = expected.by_seed[source][inputs.row] + expected.by_seed[target][inputs.col]
    else:
        found = expected.by_seed[inputs.input_type][inputs.node]
    names = [EDGES if name is None and i else name for i, name in enumerate(expected.names)]
    return found[:, [names.index(type_) for type_ in types]]


def _expected(basis: Basis, batch_size: int) -> ExpectedSizes:
    """Returns the formula of this rank's expected sizes. Collective if ranks hold different neighbour lists."""
    source = basis.source
    seeds, sampler = source.seeds, source.sampler
    assert isinstance(sampler, NeighborSampler) and seeds.start is not None  # other loaders are refused before
    sums = list_sums_of(sampler, source.exchange.comm)
    return expected_sizes(sums, seeds.start(batch_size), sampler.fanouts, replace=sampler.replace)


def _counted(basis: Basis, turns: Sequence[Turn], types: Sequence[Any], first: int) -> Tensor:
    """Samples a trial batch for each turn, numbered from ``first``. The number fixes the draws. Returns their sizes, float64 [turns, types]."""

    def counted(mfg: Mfg) -> list[int]:
        sizes = sizes_of(mfg)
        return [sizes.get(type_, 0) for type_ in types]

    # Batches of a block have the same draws, and the trial needs independent ones.
    batches = [
        basis.epochs.pieces(TRIAL_EPOCH, turn, number * basis.epochs.draw_block)
        for number, turn in enumerate(turns, first)
    ]
    return torch.tensor(basis.source.drawing.draw_each(batches, counted), dtype=torch.float64, device="cpu").view(
        -1, len(types)
    )


def _explained(x: Tensor, y: Tensor) -> float:
    """Returns the share of the variance of ``y`` [n] that ``x`` [n] explains."""
    x, y = x - x.mean(), y - y.mean()
    both = float((x @ x) * (y @ y))
    return 0.0 if both == 0.0 else float(x @ y) ** 2 / both


def _trial_size(x: Tensor, y: Tensor) -> int:
    """Returns the number of trial batches, at most :data:`MOST_TRIAL`, that reach :data:`_STANDARD_ERROR`.

    If x explains the share R^2, n batches give the mean with the variance ``(1 - R^2) / n``, and the standard
    deviation with ``(1 - R^4) / 2n``, in units of the size's variance. The second counts 3^2 times, because the
    size at mean + 3 standard deviations is wanted.
    """
    if not bool((y != y[0]).any()):
        return 0
    share = _explained(x, y)
    return min(MOST_TRIAL, math.ceil((1.0 - share + 4.5 * (1.0 - share**2)) / _STANDARD_ERROR**2))


def _forecast(population: Tensor, x: Tensor, y: Tensor) -> Forecast:
    """Returns the distribution of a size.

    Args:
        population: [turns], x of many turns.
        x, y: [n], control variate and counted sizes of the trial batches.
    """
    center, scale = population.mean(), population.std(correction=0)
    if float(scale) <= 1e-9 * float(center.abs()):  # all batches have the same x
        return Forecast(float(y.mean()), float(y.std()))
    curve, noise = _curve((x - center) / scale, y)
    explained = _powers((population - center) / scale, len(curve)) @ curve
    mean = explained.mean()
    deviation = math.sqrt(float((explained - mean).square().mean()) + noise)
    third = float((explained - mean).pow(3).mean())
    return Forecast(float(mean), deviation, third / deviation**3 if deviation > 0.0 else 0.0)


def _curve(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Fits y to x by least squares.

    Returns:
        The coefficients of a parabola if its quadratic term is at least three standard errors from 0, else those of a line; and the variance of the deviation.
    """
    for size in (3, 2):
        powers = _powers(x, size)
        inverse = torch.linalg.pinv(powers.T @ powers)
        coefficients = inverse @ (powers.T @ y)
        rest = y - powers @ coefficients
        noise = float(rest @ rest) / (y.numel() - size)
        if size == 3 and float(coefficients[2]) ** 2 >= 9.0 * noise * float(inverse[2, 2]):
            break
    return coefficients, noise


def _powers(x: Tensor, size: int) -> Tensor:
    """Returns ``x ** k`` for k < ``size``: float64 [n, size]."""
    return torch.stack([x**k for k in range(size)], 1)
