"""Makes batches in one call, if no other rank and no other device takes part.

The ten stages let the network, copies and the host work on several batches at once. If all rows are in this process's memory and batches stay there, stages
only add cost. Statistics and errors name the three stages that remain: sample, gather_host_rows and assemble.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.batch.builder import BatchBuilder
from salientpp.batch.contents import Contents
from salientpp.engine.pipeline import StageError
from salientpp.engine.request import Request
from salientpp.engine.stages import Finished, current_rows
from salientpp.engine.trace import Trace, in_stage
from salientpp.sampling.topology import Mfg, ids_by_type
from salientpp.store.fetch import Column, Fetch
from salientpp.store.tiers import Places


@dataclass(eq=False, slots=True)  # not frozen: to construct it would take longer
class Made:
    """A complete batch that a sampling thread has made, with what is needed to notice later changes of the data.

    Attributes:
        mfg: the sample. None if the user's code made the batch.
        rows, places: the gathered rows, and their places by vertex type. Empty if the user's code made the batch.
        contents: contents of the data when the batch was made. None: the data cannot change.
        seconds: time spent in gather_host_rows and in assemble.
        seconds_drawing: time spent before.
    """

    index: int
    batch: Data | HeteroData
    mfg: Any = None
    rows: Mapping[Column, Tensor] = field(default_factory=dict)
    places: Mapping[str | None, Places] = field(default_factory=dict)
    contents: Contents | None = None
    seconds: tuple[float, float] = (0.0, 0.0)
    seconds_drawing: float = 0.0


@dataclass
class BatchMaker:
    """Makes complete batches of one loader, without the pipeline."""

    fetch: Fetch
    builder: BatchBuilder
    trace: Trace | None = None

    def make(self, index: int, mfg: Mfg, num_seeds: int) -> Made:
        """Gathers the rows of the sampled vertices, and builds the batch. Any thread may call it.

        Raises:
            StageError: gathering failed.
        """
        fetch, contents = self.fetch, self.builder.contents()
        columns = self.builder.current(contents)
        started = time.perf_counter()
        with in_stage("gather_host_rows", index, self.trace):
            try:
                n_id = ids_by_type(mfg.node)
                rows, places = fetch.take_all(columns, n_id)
                seeds = fetch.seed_rows(n_id, num_seeds) if fetch.seed_columns else {}
            except Exception as error:
                raise StageError.of(error, 0, index, "gather_host_rows") from error
        gathered = time.perf_counter()
        batch = self.builder.build(mfg, {**rows, **seeds}, contents)
        built = time.perf_counter()
        with in_stage("assemble", index, self.trace):
            batch = self.builder.finish(batch)
        return Made(index, batch, mfg, rows, places, contents, (gathered - started, time.perf_counter() - built))

    def count_draw(self, made: Made, seconds: float) -> None:
        made.seconds_drawing = seconds - sum(made.seconds)

    def as_it_is_now(self, made: Made) -> Data | HeteroData:
        """Returns the batch. If the data has changed since the batch was made, builds it again, with those gathered rows that are still current."""
        now = None if made.contents is None else self.builder.contents()
        if now is None or self.builder.is_current(made.contents, now):
            return made.batch
        rows = current_rows(self.builder, made.rows, made.contents, now)
        return self.builder.finish(self.builder.build_anew(made.mfg, rows, now))


class Direct:
    """Stands in for a :class:`~salientpp.engine.pipeline.Pipeline` where stages only add cost. Each ``tick`` returns the batch of its own request.

    Args:
        is_ahead: True if other threads make the batches. The data may then change before a batch is delivered.
    """

    in_flight = 0

    def __init__(self, maker: BatchMaker, is_ahead: bool) -> None:
        self._maker, self._is_ahead = maker, is_ahead
        self.seconds = dict.fromkeys(("sample", "gather_host_rows", "assemble", "draw", "gather"), 0.0)
        self.failure: StageError | None = None

    def tick(self, request: Request | None = None) -> Finished | None:
        """Returns the batch of a request.

        Raises:
            StageError: this batch or an earlier one failed.
        """
        if self.failure is not None:
            raise self.failure
        if request is None:
            return None
        started = time.perf_counter()
        try:
            with in_stage("sample", request.index, self._maker.trace):
                made = request.sampling.result()
                batch = self._maker.as_it_is_now(made) if self._is_ahead else made.batch
        except BaseException as error:
            if isinstance(error, StageError):
                self.failure = error
                raise
            self.failure = failure = StageError.of(error, 0, request.index, "sample")
            if isinstance(error, Exception):
                raise failure from error
            raise
        spent, seconds = time.perf_counter() - started, self.seconds
        gather, assemble = made.seconds
        if not self._is_ahead:  # otherwise another thread spent that time, and this one only waited
            seconds["gather_host_rows"] += gather
            seconds["assemble"] += assemble
            spent -= gather + assemble
        seconds["sample"] += spent
        seconds["draw"] += made.seconds_drawing
        seconds["gather"] += gather
        self._maker.fetch.count(made.places)
        return Finished(request.index, batch, False, False)
