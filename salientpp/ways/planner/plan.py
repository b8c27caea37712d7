"""Choice of the ways and of their shares of memory: the combination with which the slowest rank's epoch is expected to take the least time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from salientpp.engine.basis import Basis
from salientpp.engine.way import TiersByType, Way
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.planner.choices import Budget, Choice
from salientpp.ways.planner.costs import Cost, cost_of
from salientpp.ways.planner.machines import Machines
from salientpp.ways.planner.trials import Batch, Trials

#: Smallest saving, as a fraction of the epoch, for which another combination is preferred to the static cache. Predictions err by more than this.
WORTH_IT = 0.03

#: Memory whose further saving a plan states.
MORE = 2**30


@dataclass(frozen=True)
class Line:
    """Expected cost of one combination of ways: of one rank, or of the slowest rank.

    Attributes:
        memory: bytes of a host, by name: cache, lookahead, topology_cache. device: bytes of a rank's device.
    """

    choice: Choice
    cost: Cost
    memory: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """A chosen combination of ways.

    Attributes:
        chosen: the combination.
        lines: the compared combinations, the fastest first.
        batch: mean size of a batch of this rank, and number of its batches.
        machines: the constants of the machines.
        memory, device_memory: the budget in bytes.
        saves, device_saves: seconds of an epoch that one more GiB would save. None: no budget was given.
    """

    chosen: Line
    lines: Sequence[Line]
    batch: Batch
    machines: Machines
    memory: int
    device_memory: int
    saves: float | None = None
    device_saves: float | None = None


def lines_of(
    basis: Basis, choices: Sequence[Choice], machines: Machines, policy: Any = "vip", weight: str | None = None
) -> tuple[list[Line], Batch]:
    """Returns the expected cost of each combination for one rank, and the mean size of the rank's batches. Collective. No rows move."""
    with basis.remembering():
        trials = Trials(basis)
        found = []
        for choice in choices:
            ways = choice.ways(policy, weight)
            price, tiers = trials.price(ways, machines.draw)
            found.append(Line(choice, cost_of(price, trials.batch, choice, machines), _memory(basis, ways, tiers)))
        return found, trials.batch


def slowest(by_rank: Sequence[Sequence[Line]]) -> list[Line]:
    """Returns, for each combination, the line of the rank whose epoch takes longest, with the largest memory of all ranks."""
    found = []
    for lines in zip(*by_rank, strict=True):
        longest = max(lines, key=lambda line: line.cost.seconds)
        names = dict.fromkeys(name for line in lines for name in line.memory)
        memory = {name: max(line.memory.get(name, 0) for line in lines) for name in names}
        found.append(dataclasses.replace(longest, memory=memory))
    return found


def best_of(lines: Sequence[Line]) -> Line:
    """Returns the line with the least seconds. The first line wins unless another one saves at least :data:`WORTH_IT`."""
    best = min(lines, key=lambda line: line.cost.seconds)
    return best if best.cost.seconds < (1 - WORTH_IT) * lines[0].cost.seconds else lines[0]


def plan_together(
    basis: Basis, budget: Budget, machines: Machines, policy: Any = "vip", weight: str | None = None
) -> Plan:
    """Plans for the ranks that make a loader together. Collective; every rank gets the same choice."""
    choices = budget.choices()
    richer = dataclasses.replace(budget, memory=budget.memory + MORE).choices()
    lines, batch = lines_of(basis, [*choices, *richer], machines, policy, weight)
    told = basis.comm.gather_facts({"lines": [_as_json(line) for line in lines]})
    everyone = slowest([[_from_json(line) for line in facts["lines"]] for facts in told])
    now, then = everyone[: len(choices)], everyone[len(choices) :]
    chosen = best_of(now)
    saves = max(0.0, chosen.cost.seconds - best_of(then).cost.seconds)
    ordered = sorted(now, key=lambda line: line.cost.seconds)
    return Plan(chosen, ordered, batch, machines, budget.memory, budget.device_memory, saves)


def _memory(basis: Basis, ways: Sequence[Way], tiers: TiersByType) -> dict[str, int]:
    """Returns the bytes that these ways will hold, by name."""
    row_bytes, found = basis.source.row_bytes, {"cache": 0, "lookahead": 0, "device": 0}
    for type_, of_type in tiers.items():
        for tier in [*of_type.near, *of_type.copies]:
            if tier.members is not None:
                name = "device" if tier.memory == "device" else "cache"
                found[name] += len(tier.members) * row_bytes[type_]
                found["cache"] += tier.members.words.nbytes
    for way in ways:
        for type_, planner in way.planners.items() if isinstance(way, Lookahead) else ():
            sharing = basis.host.size if basis.ranks_by_host else 1
            found["cache"] += planner.shape.num_slots * row_bytes[type_] * sharing
            found["lookahead"] += planner.shape.state_bytes * sharing
    return {name: number for name, number in found.items() if number}


def _as_json(line: Line) -> dict[str, Any]:
    return dataclasses.asdict(line)


def _from_json(values: Mapping[str, Any]) -> Line:
    return Line(Choice(**values["choice"]), Cost(**values["cost"]), values["memory"])
