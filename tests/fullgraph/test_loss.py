"""Laws of loss and accuracy over all ranks: tensors of two shapes are never combined each with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from torch import Tensor

import salientpp
from salientpp.fullgraph import LocalGraph, accuracy, local, loss_mean

CLASSES = torch.tensor([2, 0, 1, 1, 2, 0])
PREDICTED = torch.tensor([2, 1, 1, 0, 2, 0])  # 4 of 6 are right
SCORES = torch.nn.functional.one_hot(PREDICTED, 3) + 0.25
BINARY = torch.tensor([1, 0, 1, 1, 0, 0])  # 4 of 6 are right, too
SEVERAL = torch.stack([CLASSES, PREDICTED], 1)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> LocalGraph:
    root = tmp_path_factory.mktemp("graph") / "parts"
    salientpp.partition(random_data(num_vertices=20, num_edges=60), 1, root, [-1], 4)
    return local(salientpp.load(root))


#: name -> prediction, y, and the right fraction
RIGHT: dict[str, tuple[Tensor, Tensor, float]] = {
    "classes": (PREDICTED, CLASSES, 4 / 6),
    "scores": (SCORES, CLASSES, 4 / 6),
    "classes, a column": (PREDICTED, CLASSES[:, None], 4 / 6),
    "scores, a column": (SCORES, CLASSES[:, None], 4 / 6),
    "a column of classes": (PREDICTED[:, None], CLASSES, 4 / 6),
    "a column of classes, a column": (PREDICTED[:, None], CLASSES[:, None], 4 / 6),
    "scores in a column, a column": (SCORES[:, None], CLASSES[:, None], 4 / 6),
    "classes as floats": (PREDICTED.float(), CLASSES, 4 / 6),
    "a column of floats, of which all are classes": (PREDICTED[:, None].double(), CLASSES[:, None], 4 / 6),
    "labels as floats": (SCORES, CLASSES[:, None].float(), 4 / 6),
    "answers": (BINARY > 0, torch.tensor([1, 1, 1, 0, 0, 0]), 4 / 6),
    "a column of answers": ((BINARY > 0)[:, None], torch.tensor([[1], [1], [1], [0], [0], [0]]), 4 / 6),
    "small integers": (PREDICTED.to(torch.uint8), CLASSES.to(torch.int32), 4 / 6),
    "several classes each": (SEVERAL.flip(1), SEVERAL, 8 / 12),
    "several scores each": (torch.nn.functional.one_hot(SEVERAL.flip(1), 3) + 0.5, SEVERAL, 8 / 12),
    "one vertex": (SCORES[:1], CLASSES[:1, None], 1.0),
    "as many classes as vertices": (torch.eye(6) + 0.5, torch.tensor([[0], [1], [2], [3], [5], [4]]), 4 / 6),
}

#: name -> prediction, y, and the error's words
WRONG: dict[str, tuple[Tensor, Tensor, str]] = {
    "a column of scores": (torch.randn(6, 1), BINARY, r"prediction has fractions in the shape of y.* y \[6\]; .* pass `prediction > 0`"),
    "a column of scores, a column": (torch.randn(6, 1), BINARY[:, None], r"has fractions .* prediction \[6, 1\] and y \[6, 1\]; "),
    "one score each": (torch.rand(6), BINARY, "prediction has fractions"),
    "several labels": (torch.randn(6, 3), torch.randint(2, (6, 3)), "prediction has fractions"),
    "several labels of other number": (torch.randn(6, 3), torch.randint(2, (6, 2)), r"got prediction \[6, 3\] and y \[6, 2\]"),
    "as many vertices as labels": (torch.randn(6, 3), torch.randint(2, (6, 6)), r"got prediction \[6, 3\] and y \[6, 6\]"),
    "fewer predictions": (PREDICTED[:1], CLASSES, r"prediction must be classes .*got prediction \[1\] and y \[6\]"),
    "fewer rows of scores": (SCORES[:1], CLASSES, r"got prediction \[1, 3\] and y \[6\]"),
    "one label": (SCORES, CLASSES[:1], r"got prediction \[6, 3\] and y \[1\]"),
    "a label without a dimension": (SCORES[0], CLASSES[0], r"got prediction \[3\] and y \[\]"),
    "labels as a row": (SCORES, CLASSES[None], r"got prediction \[6, 3\] and y \[1, 6\]"),
    "one of hot": (SCORES, torch.nn.functional.one_hot(CLASSES), "prediction has fractions"),
    "a dimension more": (SCORES[:, None], CLASSES, r"got prediction \[6, 1, 3\] and y \[6\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_prediction_is_compared_with_the_class_of_its_own_vertex(part, name):
    prediction, y, expected = RIGHT[name]
    assert accuracy(prediction, y, part) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", WRONG)
def test_a_prediction_that_fits_no_class_is_refused(part, name):
    prediction, y, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        accuracy(prediction, y, part)


WEIGHTS = torch.tensor([1.0, 0.5, 2, 4, 1, 3])
LOSSES = torch.tensor([0.5, 1, 2, 0.25, 4, 1])


def test_weights_belong_to_the_losses_one_by_one(part):
    expected = float((WEIGHTS * LOSSES).sum() / WEIGHTS.sum())
    for shape in ([6], [6, 1], [2, 3]):
        found = loss_mean(LOSSES.view(shape), part, WEIGHTS.view(shape))
        assert float(found) == pytest.approx(expected, rel=1e-6)


def test_weights_and_losses_get_the_gradients_of_the_mean(part):
    losses, weights = (each.clone().requires_grad_() for each in (LOSSES, WEIGHTS))
    found = torch.autograd.grad(loss_mean(losses, part, weights), [losses, weights])
    expected = torch.autograd.grad((weights * losses).sum() / weights.sum(), [losses, weights])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("losses", [PREDICTED != CLASSES, (PREDICTED != CLASSES).int()], ids=["bool", "int"])
def test_losses_whose_mean_would_be_rounded_are_refused(part, losses):
    with pytest.raises(ValueError, match=r"losses must be floating-point numbers, got torch\.(bool|int32)"):
        loss_mean(losses, part)


@pytest.mark.parametrize(
    ("losses", "weight"), [([6], [6, 1]), ([6, 1], [6]), ([6], []), ([6], [1]), ([2, 3], [2, 1]), ([1], [6])]
)
def test_weights_of_another_shape_are_refused(part, losses, weight):
    words = rf"weight must have the shape of losses, \{losses}, got \{weight}; torch would"
    with pytest.raises(ValueError, match=words):
        loss_mean(torch.ones(losses), part, torch.ones(weight))


def mistaken(rank: int, root: str, call: str) -> Any:
    part = local(salientpp.load(root))
    if call == "accuracy":
        return accuracy(SCORES, CLASSES if rank else CLASSES[:2], part)
    return loss_mean(LOSSES, part, WEIGHTS if rank else WEIGHTS[:1]).item()


@pytest.mark.parametrize("call", ["accuracy", "loss_mean"])
def test_a_mistake_of_one_rank_is_told_to_the_others(tmp_path: Path, call):
    salientpp.partition(random_data(num_vertices=20, num_edges=60), 2, tmp_path / "parts", [-1], 4)
    first, second = distributed.run(mistaken, 2, str(tmp_path / "parts"), call, may_fail=True)
    assert first.kind == "ValueError" and second.kind == "RanksDiffer"
    said = first.text.strip().splitlines()[-1].removeprefix("ValueError: ")
    assert f"{call}, which failed (ValueError: {said}) on rank 0" in second.text
