"""Suites of tests (laws) that users run on their own classes. Needs pytest (``pip install salientpp[testing]``).

The classes may be sources of rows, forms of the topology, ways (methods that move fewer bytes, such as a cache), layers and models.

A test class inherits a suite and names the class under test. docs/how-to/own-storage.md and docs/how-to/training-step.md show each.
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

from salientpp.testing.loader import LoaderLaws  # noqa: E402
from salientpp.testing.model import ModelLaws  # noqa: E402
from salientpp.testing.ranks import run_ranks  # noqa: E402
from salientpp.testing.row_source import RowSourceLaws  # noqa: E402
from salientpp.testing.topology import TopologyLaws  # noqa: E402
from salientpp.testing.way import WayLaws  # noqa: E402

__all__ = ["LoaderLaws", "ModelLaws", "RowSourceLaws", "TopologyLaws", "WayLaws", "run_ranks"]
