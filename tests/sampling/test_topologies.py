"""Laws of the forms in which ranks hold a topology: in parts, and whole in the memory of each rank."""

from __future__ import annotations

from salientpp.testing.topology import TopologyLaws, in_memory


class TestInParts(TopologyLaws):
    stored = "parts"


class TestInMemory(TopologyLaws):
    """A sampler of the user holds the whole graph, although the directory stores it in parts."""

    stored = "parts"
    sampler = staticmethod(in_memory)
    layouts = ((2, 2),)
