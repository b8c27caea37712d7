"""Checks the options of partitioning, and replaces 'auto' and an unset ``refine`` by a choice that suits the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from salientpp.partitioning.kaminpar import has_kaminpar
from salientpp.suggestions import did_you_mean

#: Methods that assign vertices to parts; instead of a method, an assignment may be given.
METHODS = ("auto", "metis", "kaminpar", "random")
#: Weights of edges that METIS and KaMinPar can use.
EDGE_WEIGHTS = ("vip", "equal")
#: Orders of the vertices inside a part.
ORDERS = ("vip", "original")

#: Larger graphs are thinned for METIS, so 'auto' gives them to KaMinPar. Refinement of such graphs is off unless it is asked for. On 92.9 M edges refinement
#: changed the predicted rows by -1 to +1 % and took 30 s. With KaMinPar, it doubled the memory.
MOST_EDGES_OF_METIS = 2**26


@dataclass(frozen=True, eq=False)
class PartitionOptions:
    """Options for assigning vertices to parts and numbering them: the arguments of :func:`salientpp.partition` with these names."""

    method: str | Tensor | Mapping[str, Tensor] = "auto"
    edge_weights: str = "vip"
    order: str = "vip"
    refine: bool | None = None
    tolerance: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            _check_name("method", self.method, METHODS, " or an assignment")
        _check_name("edge_weights", self.edge_weights, EDGE_WEIGHTS)
        _check_name("order", self.order, ORDERS)
        if self.refine not in (None, False, True):
            raise ValueError(f"refine must be True, False or None, got {self.refine!r}")

    def decided(
        self, num_parts: int, num_edges: int, num_seeds: int, is_hetero: bool = False
    ) -> tuple[PartitionOptions, str | None]:
        """Replaces 'auto' and an unset ``refine`` by choices that suit a graph. Returns the options, and why ``refine`` became False, or None.

        Raises:
            ValueError: ``refine`` is True, and the graph cannot be refined.
        """
        method: Any = self.method
        is_large = num_edges > MOST_EDGES_OF_METIS
        if isinstance(method, str) and method == "auto":
            method = "kaminpar" if is_large and has_kaminpar() else "metis"
        impossible = None
        if is_hetero:
            impossible = "one type of vertices and edges", "a graph with types"
        elif num_seeds == 0:
            impossible = "vertices that batches start from", "no seeds"
        if self.refine and impossible:
            raise ValueError(
                f"refine=True needs {impossible[0]}, got {impossible[1]}; leave refine out, or pass refine=False"
            )
        why = None
        if self.refine is None and num_parts > 1:
            if impossible:
                why = f"refinement needs {impossible[0]}"
            elif not isinstance(method, str):
                why = "the assignment is given"
            elif method == "random":
                why = "the assignment is random"
            elif is_large:
                why = "the graph has more than 2^26 edges"
        refine = num_parts > 1 and self.refine is not False and why is None
        return replace(self, method=method, refine=refine), why

    @property
    def weights_used(self) -> str | None:
        """The ``edge_weights`` that METIS or KaMinPar uses for its cut; None for other methods. Needs decided options."""
        return self.edge_weights if isinstance(self.method, str) and self.method in ("metis", "kaminpar") else None

    @property
    def words(self) -> str:
        """Text for progress lines that names the method, such as `` by metis``. Empty if the user gave the part of each vertex."""
        if not isinstance(self.method, str):
            return ""
        return f" by {self.method}{' with equal edge weights' if self.weights_used == 'equal' else ''}"

    def to_json(self) -> dict[str, Any]:
        """Returns the entry about the partitioning for the manifest of a dataset directory. Needs decided options."""
        named = self.method if isinstance(self.method, str) else "given"
        return {"method": named, "edge_weights": self.weights_used, "refine": self.refine, "order": self.order}


def _check_name(option: str, given: Any, names: tuple[str, ...], more: str = "") -> None:
    if not isinstance(given, str) or given not in names:
        raise ValueError(
            f"{option} must be {', '.join(map(repr, names[:-1]))}{',' if more else ' or'} {names[-1]!r}{more}, got {given!r}{did_you_mean(given, names)}"
        )
