"""Loader that chooses its caches and other methods within a memory budget, if ``memory`` is given."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from salientpp.engine.agreement import Facts
from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.run import Run
from salientpp.engine.way import Way
from salientpp.loader.announcement import Announced
from salientpp.loader.construction import engine_together, free_working_memory, reported, ways_of
from salientpp.loader.padded_loader import PaddedLoader
from salientpp.loader.values import EXCLUDED, Options, is_given
from salientpp.processes import outside_inference
from salientpp.ranks.comm import Comm
from salientpp.ranks.facts import check_same
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.vip.policies import PROBABILITIES
from salientpp.ways.cache import Cache, GivenCache
from salientpp.ways.lookahead.planner import prior_bytes
from salientpp.ways.planner.calibrate import measure_few
from salientpp.ways.planner.choices import Beside, Budget, Choice, index_bytes
from salientpp.ways.planner.plan import lines_together, plan_together
from salientpp.ways.planner.result import MemoryPlan
from salientpp.ways.sums.check import why_no_sums


@dataclass(eq=False)
class Planning:
    """Holds the plan that a loader follows, and the plan of a loaded state that the next epoch will follow.

    Attributes:
        options: as the user gave them, checked.
        everyone: the facts of all ranks (:class:`~salientpp.engine.agreement.Facts`).
        loaded: the choice in a loaded state, until the next epoch begins.
    """

    plan: MemoryPlan
    options: Options
    everyone: Sequence[Facts]
    loaded: Choice | None = None

    @classmethod
    def together(cls, data: Any, basis: Basis, options: Options, everyone: Sequence[Facts]) -> Planning:
        """Chooses caches and other methods for the ranks that construct a loader together. Collective."""
        machines = options.memory_machines or measure_few(basis)
        budget = budget_together(data, basis, options)
        plan = plan_together(basis, budget, machines, partial(_ways_with, options))
        if options.memory is None:
            plan = dataclasses.replace(plan, saves=None)
        return cls(plan, options, everyone)

    @property
    def ways(self) -> list[Way]:
        """The methods of the plan, such as a cache, and those that the user gave, in the order in which they act."""
        return ways_of(self.options.with_choice(self.plan.chosen.choice), self.everyone)

    # --- saved states -------------------------------------------------------------------------------------

    def read(self, plan: Any) -> Choice | None:
        """Returns the choices in a saved plan. None: there is no plan, or it needs more than this loader's budget.

        Raises:
            ValueError: the plan is damaged, or uses a method that this loader does not allow.
        """
        if plan is None:
            return None
        try:
            choice = dataclasses.replace(Choice.of(plan), **self.options.given_choice)
        except ValueError as error:
            raise ValueError(f"cannot load this state: {error}") from None
        if choice.sums and "sums" not in self.options.memory_allow and self.options.partial_aggregation is None:
            raise ValueError(
                "cannot load this state: its plan uses sums, which change batches; make the loader with memory={'host': ..., 'allow': ['sums']}"
            )
        amounts = choice.cache + self.plan.beside, choice.device_rows + choice.device_cache
        budgets = self.options.memory, self.options.memory_device
        fits = all(budget is None or amount <= budget for amount, budget in zip(amounts, budgets))
        return choice if fits else None

    def follows_another(self, comm: Comm) -> bool:
        """Returns True if an epoch must use the plan of a loaded state instead of the present one. Collective.

        Raises:
            RuntimeError: only some ranks have loaded a state with this plan. Every rank raises it.
        """
        own = None if self.loaded is None else self.loaded.values
        told = [facts["plan"] for facts in comm.gather_facts({"plan": own}, task="begin an epoch", kind=RuntimeError)]
        advice = "call load_state_dict on every rank, each with its own state or all with one rank's"
        check_same([{"plan": _shown(theirs)} for theirs in told], comm.of, "load states of", RuntimeError, advice)
        differs = self.loaded is not None and self.loaded != self.plan.chosen.choice
        if not differs:
            self.loaded = None
        return differs

    def followed(self, basis: Basis) -> Engine:
        """Makes an engine that follows the plan of the loaded state. Collective."""
        assert self.loaded is not None  # follows_another has returned True
        options, plan = self.options, self.plan
        with basis.remembering():
            (line,), _ = lines_together(basis, [self.loaded], plan.machines, partial(_ways_with, options))
            others = [each for each in plan.lines if each.choice != line.choice]
            lines = sorted([line, *others], key=lambda each: each.cost.seconds)
            reason = "the loaded state was saved under this plan"
            self.plan, self.loaded = dataclasses.replace(plan, chosen=line, lines=lines, reason=reason), None
            return Engine(basis, self.ways)


def _shown(plan: Any) -> str:
    return "loaded none" if plan is None else ", ".join(f"{name}={value!r}" for name, value in plan.items() if value)


def _ways_with(options: Options, choice: Choice) -> list[Way]:
    """Returns the methods whose time the planner estimates for ``choice``: the user's cache (``cache=``), then the methods of the choice, but no ``ways=``."""
    given: list[Way] = [] if options.cache is None else [GivenCache(options.cache)]
    return [*given, *choice.ways(options.policy, options.partial_aggregation_weight)]


def budget_together(data: Any, basis: Basis, options: Options) -> Budget:
    """Returns the memory that a plan may use, and the methods that every rank can use. Collective."""
    source, comm, given = basis.source, basis.comm, options.given_choice
    books = {type_: source.books[type_] for type_ in source.travelling}
    row_bytes = source.row_bytes
    all_rows = sum(
        row_bytes[type_] * (book.num_vertices - book.size_of(source.exchange.part_of(type_)))
        for type_, book in books.items()
    )
    looks_ahead = bool(books) and comm.size > 1 and options.policy in PROBABILITIES
    looks_ahead = looks_ahead and not _is_excluded("lookahead", options) and not given.get("sums")
    looks_ahead = looks_ahead and not any(way.finds_late for way in options.own_ways)
    sums = bool(books) and "sums" in options.memory_allow and why_no_sums(data, source) is None
    sums = sums and not _is_excluded("partial_aggregation", options)
    own = {"all_rows": all_rows, "looks_ahead": looks_ahead, "sums": sums, "beside": Beside.of(basis)}
    told = comm.gather_facts(own, task="plan its memory")
    looks_ahead, prior = all(facts["looks_ahead"] for facts in told), 0
    if looks_ahead and options.memory and given.get("cache", 1):
        scores = Cache(1.0, options.policy).scores(basis)  # the plan asks for them too
        prior = basis.ranks_on_host * sum(prior_bytes(scores[type_].to(torch.float32)) for type_ in books)
        own_prior = prior if basis.epochs.placement.logical_ranks else 0  # a storage rank caches nothing
        prior = max(of_rank for (of_rank,) in comm.gather_numbers([own_prior]))
    return Budget(
        memory=options.memory or 0,
        device_memory=options.memory_device or 0,
        all_rows=max(facts["all_rows"] for facts in told),
        index=index_bytes(books.values()),
        beside=Beside.largest(facts["beside"] for facts in told),
        looks_ahead=looks_ahead,
        prior=prior,
        sums="mean" if all(facts["sums"] for facts in told) else None,
        given=given,
    )


def _is_excluded(option: str, options: Options) -> bool:
    """True if ``option`` cannot be used together with an option that the user gave."""
    others = [other for one, other in EXCLUDED if one == option] + [one for one, other in EXCLUDED if other == option]
    return any(is_given(getattr(options, other)) for other in others)


class PlannedLoader(PaddedLoader):
    """Loader that makes its engine from options, some of which a plan may choose. A saved state carries the plan."""

    _planning: Planning | None
    _announced: Announced | None = None

    @outside_inference
    def _make_engine(self, basis: Basis, options: Options, everyone: Sequence[Facts]) -> None:
        """Makes the engine, after a plan if the options ask for one. Collective."""
        self._planning = None
        if not options.is_planned:
            self.engine = engine_together(basis, ways_of(options, everyone), "make its loader")
            free_working_memory(self.data)
            return

        def plan_and_make() -> tuple[Planning, Engine]:
            with basis.remembering():
                planning = Planning.together(self.data, basis, options, everyone)
                return planning, Engine(basis, planning.ways)

        self._planning, self.engine = reported(basis.comm, plan_and_make, "plan its memory")
        if exceeds := self._planning.plan.exceeds:
            warnings.warn(
                f"{exceeds}; pass a larger memory=, or leave the options to the plan", UserWarning, stacklevel=5
            )
        free_working_memory(self.data)

    def plan(self) -> MemoryPlan:
        """Returns the plan by which this loader uses its memory budget. ``print(loader.plan())`` prints a table.

        Before the first batch, the memory of batches in flight is expected from trial batches.

        Raises:
            ValueError: the loader has no memory budget.
        """
        if self._planning is None:
            raise ValueError("this loader has no plan, because it has no memory budget; pass memory=")
        plan, held = self._planning.plan, self.memory_used()
        expected = 0 if self.engine.producer.is_local else int(self.engine.basis.depth * plan.batch.row_bytes)
        return dataclasses.replace(plan, held={**held, "batches": held["batches"] or expected})

    def _facts(self) -> dict[str, tuple[str, str]]:
        planning = self.__dict__.get("_planning")
        if planning is None:
            return super()._facts()
        words = planning.plan.chosen.choice.words
        return super()._facts() | {"plan": (f"plan: {words}", words)}

    def _repr_html_(self) -> str:
        planning = self.__dict__.get("_planning")
        return super()._repr_html_() + ("" if planning is None else planning.plan._repr_html_())

    @property
    def cache(self) -> FeatureCache | TypedFeatureCache:
        """The cached rows; pass them to another loader as ``cache=``.

        Empty if the plan looks ahead, because such a cache follows the batches of its own loader. A script thus needs no case for each plan.

        Raises:
            RuntimeError: this loader looks ahead without a memory budget.
        """
        if self._planning is not None and self.looks_ahead:
            return FeatureCache.empty()
        return super().cache

    def _begin_epoch(self) -> Run:
        self.engine.basis.comm.check_process()
        if self._planning is not None:
            if self._announced is not None:
                self._announced.load_plan(self)
            self._follow_loaded_plan()
        if self._announced is not None:
            self.engine.on_open = self._announced.begin_epoch
        return super()._begin_epoch()

    def _follow_loaded_plan(self) -> None:
        """Makes another engine if a loaded state has another plan. Collective."""
        basis, planning = self.engine.basis, self._planning
        assert planning is not None
        self.engine.close()
        if not self._continues():
            planning.loaded = None  # set_epoch has discarded the state
        elif planning.follows_another(basis.comm):
            del self.engine  # its copies are freed before others are fetched
            followed = outside_inference(planning.followed)
            self.engine = reported(basis.comm, lambda: followed(basis), "follow the plan of its state")
            free_working_memory(self.data)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._planning is not None:
            state["plan"] = (self._planning.loaded or self._planning.plan.chosen.choice).values
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        planning = self._planning
        loaded = None if planning is None or not isinstance(state, dict) else planning.read(state.get("plan"))
        super().load_state_dict(state)
        if planning is not None:
            planning.loaded = loaded
