"""Laws of random models: converted, they give the outputs, all gradients and all effects of the plain model, or say why not."""

from __future__ import annotations

import pytest
import torch_geometric.nn.conv
from random_cases.choices import CONVS, WITHOUT
from random_cases.models import Failure, Invalid, Refused, script_of, shrunk
from random_cases.targets import TARGETS, fails
from rare import rare

#: Models in each test. `make test` runs the first ones, `make test-rare` some more, and `make test-random CASES=...` any number.
CASES = 20


@pytest.mark.parametrize("first", [0, CASES, *rare(*range(2 * CASES, 100, CASES))])
def test_trimmed_models_compute_what_plain_models_compute(first):
    check("trim", first, first + CASES)


@pytest.mark.parametrize("first", [0, *rare(10, 20)])
def test_trimmed_typed_models_compute_what_plain_models_compute(first):
    check("typed", first, first + 10)


@pytest.mark.parametrize("first", [0, *rare(CASES, 2 * CASES)])
def test_models_over_sums_compute_what_plain_models_compute(first):
    check("merged", first, first + CASES)


@pytest.mark.parametrize("first", [0, *rare(CASES, 2 * CASES)])
def test_inference_computes_what_plain_models_compute(first):
    check("inferred", first, first + CASES)


@pytest.mark.parametrize("first", [0, *rare(CASES, 2 * CASES)])
def test_models_over_ranks_compute_what_plain_models_compute(first):
    check("distributed", first, first + CASES)


def check(name, first, last):
    """Runs the cases of some integers. At most four fifths of the valid models may be refused, and at most a fifth of all may be invalid."""
    target, invalid, refused = TARGETS[name], 0, 0
    for seed in range(first, last):
        case = target.case_of(seed)
        try:
            outcome = target.outcome_of(case)
        except Invalid:
            invalid += 1
            continue
        refused += isinstance(outcome, Refused)
        if isinstance(outcome, Failure):
            small = shrunk(case, fails)
            pytest.fail(
                f"model {seed} differs: {outcome}\nThe script below shows it.\n\n{script_of(small)}", pytrace=False
            )
    assert invalid <= (last - first) // 5
    assert refused <= (last - first) * 2 // 3


def test_every_layer_of_pyg_has_a_strategy():
    """A new layer needs a line in CONVS, with the values of its options, or in WITHOUT, with the reason why random models lack it."""
    layers = {
        name
        for name in torch_geometric.nn.conv.__all__
        if isinstance(getattr(torch_geometric.nn.conv, name, None), type)
    }
    assert layers - {"DataParallel"} == CONVS.keys() | WITHOUT.keys()
    assert not CONVS.keys() & WITHOUT.keys()
