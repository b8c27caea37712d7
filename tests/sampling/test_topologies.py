"""Laws of the forms in which ranks hold a topology: in parts, and whole in the memory of each rank."""

from __future__ import annotations

import pytest

from salientpp.testing.topology import TopologyLaws, in_memory


class TestInParts(TopologyLaws):
    stored = "parts"
    layouts = ((2, 2), (2, 4), (4, 3))


@pytest.mark.rare
class TestInMoreParts(TopologyLaws):
    stored = "parts"
    layouts = ((2, 1), (4, 4), (4, 2))
    test_a_run_continues_on_another_number_of_ranks = None  # it has layouts of its own


class TestInMemory(TopologyLaws):
    """A sampler of the user holds the whole graph, although the directory stores it in parts."""

    stored = "parts"
    sampler = staticmethod(in_memory)
    layouts = ((4, 2),)


@pytest.mark.rare
class TestEveryLoaderInMemory(TestInMemory):
    """A part for each of two ranks, with which the laws have more loaders."""

    layouts = ((2, 2),)
    test_a_run_continues_on_another_number_of_ranks = None  # it has layouts of its own
