"""Results of a plan, as JSON. docs/reference/analysis-files.md describes each field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Difference, as a fraction, up to which two epochs or costs count as equal.
ALIKE = 0.03

#: Methods that change batches, which a plan uses only if they are allowed: name -> values of loader options.
ALLOWED: Mapping[str, Mapping[str, Any]] = {
    "sums": {"partial_aggregation": "mean"},
    "int8": {"send_as": {"x": "int8"}},
    "shared_draws": {"shared_draws": {"vertices": "batch", "block": 64}},
}


@dataclass(frozen=True)
class Prediction:
    """Prediction for numbers of hosts, an amount of memory and a combination of methods. Times are seconds of the slowest rank, memory of the fullest host.

    ``hosts`` train. ``storage_hosts`` hold all rows if there are any: each is busy for ``storage_seconds`` of an epoch and needs ``storage_bytes`` of memory.
    """

    hosts: int
    ranks: int
    budget: int
    device_budget: int
    ways: str
    options: dict[str, Any]
    seconds: float
    training: float
    loading: float
    waiting: float
    link: float
    cpu: float
    steps: int
    network_bytes: float
    memory: dict[str, int]
    device_bytes: int
    cost: float | None
    chosen: bool = False
    storage_hosts: int = 0
    storage_seconds: float = 0.0
    storage_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """All memory of a host that the plan counts."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Planned:
    """All predictions for a job, and the inputs that they were computed from."""

    dataset: str
    num_vertices: dict[str, int]
    num_edges: int
    batch_size: int
    num_neighbors: Any
    seeds: str
    row_bytes: dict[str, int]
    epochs: int
    machines: dict[str, Any]
    notes: tuple[str, ...]
    predictions: tuple[Prediction, ...]

    @property
    def chosen(self) -> list[Prediction]:
        """The predictions that the planner chooses: one combination for each number of hosts and each amount of memory."""
        return [each for each in self.predictions if each.chosen]

    @property
    def recommended(self) -> Prediction:
        """The smallest job that is nearly the fastest.

        Of the epochs at most 3 % longer than the shortest, it needs the fewest hosts, then the fewest storage hosts, then the least memory.
        """
        limit = min(each.seconds for each in self.chosen) / (1 - ALIKE)
        good = [each for each in self.chosen if each.seconds <= limit]
        return min(
            good, key=lambda each: (each.hosts, each.storage_hosts, each.budget + each.device_budget, each.seconds)
        )

    @property
    def cheapest(self) -> Prediction | None:
        """The fastest epoch that costs at most 3 % more than the cheapest epoch. None without a price.

        If other such epochs take at most 3 % longer than the fastest, it is the one with the least memory, then the fewest storage hosts.
        """
        costs = [each.cost for each in self.chosen if each.cost is not None]
        if not costs:
            return None
        cheap = [each for each in self.chosen if each.cost is not None and each.cost <= min(costs) / (1 - ALIKE)]
        limit = min(each.seconds for each in cheap) / (1 - ALIKE)
        good = [each for each in cheap if each.seconds <= limit]
        return min(good, key=lambda each: (each.budget + each.device_budget, each.storage_hosts, each.seconds))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values; ``schema`` is the version of their format."""
        cheapest = self.cheapest
        found = {
            "recommended": self.predictions.index(self.recommended),
            "cheapest": None if cheapest is None else self.predictions.index(cheapest),
        }
        return {"schema": 1, **asdict(self), **found}
