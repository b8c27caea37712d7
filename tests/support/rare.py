"""Cases of a law that ``make test`` leaves out and ``make test-rare`` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rare(*values: Any) -> list[Any]:
    """Returns parameters of a test, each marked ``rare``. A tuple holds the values of several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.rare) for value in values
    ]


def some_of(some: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Returns the parameters ``some``, and the others of ``every`` marked ``rare``."""
    return [*some, *rare(*(each for each in every if each not in some))]
