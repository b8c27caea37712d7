"""Law of random models: trimmed, they give the seeds' outputs, all gradients and all effects of the plain model, or refuse in the words that are documented."""

from __future__ import annotations

import pytest
import torch_geometric.nn.conv
from random_cases.choices import CONVS, WITHOUT
from random_cases.models import Invalid, case_of, failure_of, script_of, shrunk

import salientpp

#: Models in each test. `make test-random CASES=...` runs more.
CASES = 25


def failure(case):
    return failure_of(case, salientpp.nn.trim)


def fails(case):
    try:
        return failure(case) is not None
    except Invalid:
        return False


@pytest.mark.parametrize("first", range(0, 150, CASES))
def test_trimmed_models_compute_what_plain_models_compute(first):
    invalid = 0
    for seed in range(first, first + CASES):
        case = case_of(seed)
        try:
            wrong = failure(case)
        except Invalid:
            invalid += 1
            continue
        if wrong is not None:
            small = shrunk(case, fails)
            pytest.fail(
                f"model {seed} differs: {wrong}\nThe script below shows it.\n\n{script_of(small)}", pytrace=False
            )
    assert invalid <= CASES // 5


def test_every_layer_of_pyg_has_a_strategy():
    """A new layer needs a line in CONVS, with the values of its options, or in WITHOUT, with the reason why random models lack it."""
    layers = {
        name
        for name in torch_geometric.nn.conv.__all__
        if isinstance(getattr(torch_geometric.nn.conv, name, None), type)
    }
    assert layers - {"DataParallel"} == CONVS.keys() | WITHOUT.keys()
    assert not CONVS.keys() & WITHOUT.keys()
