"""Loader that chooses its caches and other methods within a memory budget, if ``memory`` is given."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from salientpp.engine.agreement import Facts
from salientpp.engine.basis import Basis
from salientpp.engine.engine import Engine
from salientpp.engine.run import Run
from salientpp.loader.construction import engine_together, free_working_memory, reported, ways_of
from salientpp.loader.padded_loader import PaddedLoader
from salientpp.loader.planning import Planning
from salientpp.loader.values import Options
from salientpp.processes import outside_inference
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.ways.planner.result import MemoryPlan


class PlannedLoader(PaddedLoader):
    """Loader that makes its engine from options, some of which a plan may choose. A saved state carries the plan."""

    _planning: Planning | None

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
        basis = self.engine.basis
        basis.comm.check_process()
        if self._planning is not None:
            self.engine.close()
            if not self._continues():
                self._planning.loaded = None  # set_epoch has discarded the state
            elif self._planning.follows_another(basis.comm):
                planning = self._planning
                del self.engine  # its copies are freed before others are fetched
                followed = outside_inference(planning.followed)
                self.engine = reported(basis.comm, lambda: followed(basis), "follow the plan of its state")
                free_working_memory(self.data)
        return super()._begin_epoch()

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
