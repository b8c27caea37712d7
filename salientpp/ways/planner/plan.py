"""Chooses the combination of methods within a memory budget with which the slowest rank's epoch is expected to be fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from salientpp.engine.basis import Basis
from salientpp.engine.way import TiersByType, Way
from salientpp.ways.lookahead.way import Lookahead
from salientpp.ways.planner.choices import Budget, Choice
from salientpp.ways.planner.costs import Cost, cost_of
from salientpp.ways.planner.machines import Machines
from salientpp.ways.planner.result import Line, MemoryPlan
from salientpp.ways.planner.trials import Batch, Trials

#: Smallest saving, as a fraction of the epoch, for which another combination is preferred to the static cache. With 0.03, one of 108 measured plans was
#: slower than the static cache; with 0.08 none was (docs/results/plan.md).
WORTH_IT = 0.08

#: Extra bytes of memory. A plan states what they would save.
MORE = 2**30


def lines_of(
    basis: Basis,
    choices: Sequence[Choice],
    machines: Machines,
    ways_of: Callable[[Choice], Sequence[Way]] = Choice.ways,
) -> tuple[list[Line], Batch]:
    """Predicts each combination's cost on this rank. Also returns the mean size of this rank's batches. Collective.

    Args:
        ways_of: returns the methods of a combination, and those that act in every combination, such as a given cache.
    """
    with basis.remembering():
        trials = Trials(basis)
        found = []
        for choice in choices:
            ways = ways_of(choice)
            price, tiers = trials.price(ways, machines.draw)
            cost = cost_of(price, trials.batch, choice, machines, sends=not basis.epochs.placement.num_storage_ranks)
            found.append(Line(choice, cost, _memory(basis, ways, tiers)))
        return found, trials.batch


def slowest(by_rank: Sequence[Sequence[Line]]) -> list[Line]:
    """Joins the predictions of all ranks: for each combination, the costs of the slowest rank, and the largest memory of any rank."""
    found = []
    for lines in zip(*by_rank, strict=True):
        longest = max(lines, key=lambda line: line.cost.seconds)
        largest = max(lines, key=lambda line: (line.copies, line.memory.get("device", 0)))
        found.append(dataclasses.replace(longest, memory=largest.memory))
    return found


def best_of(lines: Sequence[Line]) -> Line:
    """Returns the fastest combination if it takes less than ``1 - WORTH_IT`` of the time of the first one, else the first one (the static cache)."""
    best = min(lines, key=lambda line: line.cost.seconds)
    return best if best.cost.seconds < (1 - WORTH_IT) * lines[0].cost.seconds else lines[0]


def lines_together(
    basis: Basis,
    choices: Sequence[Choice],
    machines: Machines,
    ways_of: Callable[[Choice], Sequence[Way]],
) -> tuple[list[Line], Batch]:
    """Predicts each combination's cost on its slowest rank, and returns it with the mean size of this rank's batches.

    Collective. See :func:`lines_of` for the arguments. Costs and choices are equal on all ranks.
    """
    lines, batch = lines_of(basis, choices, machines, ways_of)
    told = basis.comm.gather_facts({"lines": [dataclasses.asdict(line) for line in lines]}, task="plan its memory")
    by_rank = [
        [Line(Choice(**line["choice"]), Cost(**line["cost"]), line["memory"]) for line in facts["lines"]]
        for facts in told
    ]
    return slowest(by_rank), batch


def plan_together(
    basis: Basis,
    budget: Budget,
    machines: Machines,
    ways_of: Callable[[Choice], Sequence[Way]],
) -> MemoryPlan:
    """Chooses the combination that is expected to be fastest within a budget. Collective; every rank gets the same choice. See :func:`lines_of`."""
    choices = budget.choices()
    several = [choices, dataclasses.replace(budget, memory=budget.memory + MORE).choices()]
    if budget.device_memory:
        several.append(dataclasses.replace(budget, device_memory=budget.device_memory + MORE).choices())
    together = [*dict.fromkeys(choice for some in several for choice in some)]
    lines, batch = lines_together(basis, together, machines, ways_of)
    line_of = dict(zip(together, lines))
    now, *then = ([line_of[choice] for choice in some] for some in several)
    chosen = best_of(now)
    saves = [max(0.0, chosen.cost.seconds - best_of(more).cost.seconds) for more in then]
    ordered = sorted(now, key=lambda line: line.cost.seconds)
    device_saves = saves[1] if len(saves) > 1 else None
    of_budget = budget.memory, budget.device_memory, saves[0], device_saves
    return MemoryPlan(chosen, ordered, batch, machines, *of_budget, beside=budget.beside.bytes_of(budget.memory))


def _memory(basis: Basis, ways: Sequence[Way], tiers: TiersByType) -> dict[str, int]:
    """Returns the bytes that these methods will hold, by name."""
    row_bytes, found = basis.source.row_bytes, {"cache": 0, "lookahead": 0, "device": 0}
    for type_, of_type in tiers.items():
        for tier in [*of_type.near, *of_type.copies]:
            if tier.members is not None:
                found[tier.memory] += len(tier.members) * row_bytes[type_]
                found[tier.name] += tier.members.words.nbytes
    for way in ways:
        for type_, planner in way.planners.items() if isinstance(way, Lookahead) else ():
            sharing = basis.ranks_on_host
            found["cache"] += planner.shape.num_slots * row_bytes[type_] * sharing
            found["lookahead"] += planner.state_bytes * sharing
    return {name: number for name, number in found.items() if number}
