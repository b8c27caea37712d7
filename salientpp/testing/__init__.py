"""Suites of tests (laws) that users run on their own classes. Needs pytest (``pip install salientpp[testing]``).

The classes may be sources of rows, forms of the topology, or ways: methods that move fewer bytes, such as a cache.

A test class inherits the suite of a protocol and names the class under test. docs/how-to/test-own-classes.md shows each.
"""

from __future__ import annotations

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"salientpp.testing needs pytest ({error}): pip install 'salientpp[testing]'", name=error.name
    ) from None

# A failed assertion of a suite then shows its values, as in a test file.
pytest.register_assert_rewrite(f"{__name__}.row_source", f"{__name__}.topology", f"{__name__}.way")

from salientpp.testing.ranks import run_ranks  # noqa: E402
from salientpp.testing.row_source import RowSourceLaws  # noqa: E402
from salientpp.testing.topology import TopologyLaws  # noqa: E402
from salientpp.testing.way import WayLaws  # noqa: E402

__all__ = ["RowSourceLaws", "TopologyLaws", "WayLaws", "run_ranks"]
