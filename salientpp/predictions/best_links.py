"""Finds the k targets with the largest scores for each source, by products of blocks of rows.

The score of a source and a target is the inner product of their rows, in float32. No matrix with all scores exists at once. Among equal scores, the target with
the smaller id comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Id of a place without a target, because fewer than k remain.
NONE = -1


@dataclass(frozen=True, eq=False)
class LinkScores:
    """Best targets of this rank's sources.

    Attributes:
        source: ids of the sources, int64 [n].
        target: ids of their best targets, int64 [n, k], the best first. -1: fewer than k targets remain.
        score: scores of these targets, float32 [n, k]; -inf where ``target`` is -1.
    """

    source: Tensor
    target: Tensor
    score: Tensor

    @property
    def links(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source, target and score of each link that exists: [m] each, source by source, the best first."""
        exists = self.target != NONE
        return self.source[:, None].expand_as(self.target)[exists], self.target[exists], self.score[exists]


@dataclass(frozen=True, eq=False)
class Excluded:
    """Pairs of a source and a target that are no candidates.

    Attributes:
        place: positions of the sources, int64 [p], ascending.
        target: ids of the targets, int64 [p].
    """

    place: Tensor
    target: Tensor

    @classmethod
    def of(cls, pairs: Tensor, sources: Tensor) -> Excluded:
        """Makes the pairs [2, p] of source and target ids searchable. Pairs of sources that are not in ``sources`` [n] are dropped."""
        ordered, order = torch.sort(sources)
        found = torch.searchsorted(ordered, pairs[0]).clamp_(max=max(0, len(sources) - 1))
        is_there = ordered[found] == pairs[0] if len(sources) else torch.zeros_like(pairs[0], dtype=torch.bool)
        place, by_place = torch.sort(order[found[is_there]])
        return cls(place, pairs[1][is_there][by_place])

    def mark(self, scores: Tensor, first: int, targets: Tensor) -> None:
        """Sets the scores of these pairs to -inf: scores [s, t] of the sources from position ``first`` on and of ``targets`` [t], which ascend."""
        ends = torch.tensor([first, first + len(scores)], device="cpu")
        begin, end = torch.searchsorted(self.place, ends).tolist()
        if begin == end or not len(targets):
            return
        wanted = self.target[begin:end]
        column = torch.searchsorted(targets, wanted).clamp_(max=len(targets) - 1)
        here = targets[column] == wanted
        rows = (self.place[begin:end] - first)[here].to(scores.device)
        scores[rows, column[here].to(scores.device)] = -torch.inf


def add_candidates(best: LinkScores, first: int, scores: Tensor, targets: Tensor) -> None:
    """Updates the best targets of some sources with further candidates.

    Args:
        first: position of the first source.
        scores: [s, t], scores of the sources from ``first`` on; -inf for pairs that are no candidates.
        targets: [t], ids of the candidates, ascending.
    """
    k, here = best.target.size(1), slice(first, first + len(scores))
    values, columns = _largest(scores, min(k, scores.size(1)))
    found = targets[columns.cpu()]
    values = values.cpu()
    found[values == -torch.inf] = NONE
    values, found = torch.cat([best.score[here], values], 1), torch.cat([best.target[here], found], 1)
    # Places without a target have the score -inf, so they come last.
    found, order = torch.sort(found, dim=1, stable=True)
    values, by_score = torch.sort(values.gather(1, order), dim=1, descending=True, stable=True)
    best.score[here], best.target[here] = values[:, :k], found.gather(1, by_score)[:, :k]


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest scores of each row and their columns. Among equal scores, the smaller column is taken."""
    is_all = k == scores.size(1)
    values, columns = torch.topk(scores, k if is_all else k + 1, dim=1)
    if is_all:
        return values, columns
    # topk may take any of the scores that equal the k-th. Sorting takes as much memory as the scores, so a few rows are sorted at a time.
    tied = (values[:, k - 1] == values[:, k]).nonzero().flatten()
    values, columns = values[:, :k].contiguous(), columns[:, :k].contiguous()
    for some in tied.split(max(1, len(scores) // 4)) if len(tied) else ():
        ordered, order = torch.sort(scores[some], dim=1, descending=True, stable=True)
        values[some], columns[some] = ordered[:, :k], order[:, :k]
    return values, columns
