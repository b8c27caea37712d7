"""The comparison of two models' results sees every difference, also where values are infinite or no numbers."""

import pytest
import torch

from salientpp.testing.steps import difference

NAN, INFINITE = float("nan"), float("inf")


def of(*values, name="output"):
    return {name: torch.tensor(values, dtype=torch.float64)}


@pytest.mark.parametrize("value", [1.0, NAN, INFINITE])
def test_equal_results_do_not_differ(value):
    assert difference(of(value, 2.0), of(value, 2.0)) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1.0, 2.0), (1.0, 2.1)),
        ((NAN, 2.0), (1.0, 2.0)),
        ((1.0, 2.0), (NAN, 2.0)),
        ((NAN, 2.0), (NAN, 2.1)),
        ((1.0,), (1.0, 2.0)),
    ],
)
def test_results_that_differ_in_one_value_are_named(one, other):
    found = difference(of(*one), of(*other))
    assert found is not None and found[0] == "output"


def test_a_gradient_without_finite_values_hides_gradients_but_no_outputs():
    gradient, other = of(NAN, 1.0, name="gradient of x"), of(1.0, 1.0, name="gradient of x")
    assert difference(of(1.0) | gradient, of(1.0) | other) is None
    assert difference(of(1.0) | gradient, of(1.5) | other) is not None
