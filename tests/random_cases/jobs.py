"""Random jobs: a loader of any data with any options, on 1 to 4 ranks, used in any way.

A job is a function of one integer.

The law: a job either is refused on every rank (:mod:`random_cases.refusals`). Or it gives, for every logical rank, the batches of the
plainest loader of one process (:mod:`random_cases.plain`), bit for bit, after what its options are documented to change. Counted rows and bytes
equal the predicted ones, memory stays within its budget, and nothing is left (:mod:`salientpp.testing.leftovers`).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import re
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_cases.data import Graph, directory, graph_of, simpler
from random_cases.options import apart, arguments_of, unfolded
from random_cases.pool import HANG, Failed, Place, Pool
from random_cases.refusals import is_right
from random_cases.scene import CONSTANTS, OF_SEEDS, Scene
from random_cases.use import Report, Use

from salientpp.loader import forecast
from salientpp.ranks.failure import RankFailure
from salientpp.testing.leftovers import Leftovers

#: Ways of using a loader, and their chances. ``N`` is a small number.
STEPS = {
    "epoch": 8, "leave N": 2, "set N": 2, "rounds": 3, "resume N": 3, "share state N": 2, "copy": 2, "pickle": 1, "fork": 1, "two": 2, "again N": 1,
    "call": 1, "lend": 1, "disagree": 1, "memory": 2, "reset": 1, "meet": 3, "change N": 6,
}  # fmt: skip

#: Numbers of trial batches of ``pad="fixed"``. Those of the package would take longer than all else in a job.
_TRIAL = {"LEAST_TRIAL": 16, "MOST_TRIAL": 64}

#: Steps for data in memory only.
_IN_MEMORY = ("copy", "pickle", "fork", "change")


@dataclass(frozen=True)
class Job:
    """Random job.

    Attributes:
        arguments: of the loader, as source text.
        odd: names of arguments with an odd value.
        steps: ways of using the loader, one after another.
        mode: context of torch in which the loader is made and used.
        apart: name of an argument that differs between the ranks.
    """

    seed: int = 0
    graph: Graph = field(default_factory=Graph)
    ranks: int = 1
    link: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    steps: tuple[str, ...] = ("epoch",)
    mode: str = "enable_grad"
    apart: str | None = None

    @property
    def is_odd(self) -> bool:
        return any(name in self.arguments for name in self.odd)

    @functools.cached_property
    def unfolded(self) -> dict[str, str]:
        """The arguments, with the entries of mappings under names such as ``pad_static``."""
        found: dict[str, str] = {}
        for name, text in self.arguments.items():
            found |= {name: text} if name in self.odd else unfolded(name, text)
        return found

    def value(self, name: str, default: Any = None) -> Any:
        """Returns a simple value of an argument, or of an entry such as ``pad_static``. An odd value counts as none."""
        return eval(self.unfolded[name], CONSTANTS) if name in self.unfolded and name not in self.odd else default

    def text(self, name: str) -> str:
        """Returns the text of the seeds, which are all vertices or edges if it is odd."""
        return self.arguments[name] if name in self.arguments and name not in self.odd else "None"


def job_of(seed: int) -> Job:
    """Returns the random job of an integer. Eight consecutive jobs share a graph, because partitioning takes as long as a job."""
    graph = graph_of(random.Random(f"graph {seed // 8}"))
    r = random.Random(f"job {seed}")
    parts = graph.parts
    ranks = r.choice([w for w in (1, 2, 2, 2, 3, 4) if w <= parts or w % parts == 0]) if graph.is_directory else 1
    link = r.random() < 0.25
    arguments, odd = arguments_of(r, graph, ranks, link)
    steps = [
        r.choices(list(STEPS), list(STEPS.values()))[0].replace("N", str(r.randrange(5)))
        for _ in range(r.choices((1, 2, 3), (6, 3, 1))[0])
    ]
    fitting = tuple(step for step in steps if step.split()[0] not in _IN_MEMORY or not graph.is_directory)
    if "Endless" in arguments.get("batch_sampler", ""):
        fitting = ("leave 2", "leave 0")
    mode = r.choices(("enable_grad", "no_grad", "inference_mode"), (20, 1, 2))[0]
    different = apart(r, graph, ranks, link, arguments) if ranks > 1 and r.random() < 0.04 else None
    if different is not None:
        odd = (*odd, different)
    return Job(seed, graph, ranks, link, arguments, odd, fitting or ("epoch",), mode, different)


# --- on the ranks --------------------------------------------------------------------------------------------------


def run_job(place: Place, job: Job, folder: Path) -> Report:
    """Runs a job on a rank."""
    left = Leftovers()
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with getattr(torch, job.mode)(), unittest.mock.patch.multiple(forecast, **_TRIAL):
                _use(place, job, folder, report)
        except Exception as error:
            error.__traceback__ = _described(report, error)
    gc.collect()
    if place.size > 1:
        dist.barrier(place.group)
    report.faults += left.found()
    return report


def _described(report: Report, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error)[-4:])[-1500:]
    report.faults.append(f"{type(error).__name__}: {error}\n{text}"[:3000])


def _use(place: Place, job: Job, folder: Path, report: Report) -> None:
    scene = Scene(job, place, folder)
    arguments = scene.arguments()
    try:
        loader = scene.loader(arguments)
    except (ValueError, TypeError, NotImplementedError, RankFailure) as error:
        report.refused, report.kind = str(error), type(error).__name__
        return
    if job.apart in job.arguments:  # ranks need not agree on it
        for _ in loader:
            pass
        return
    if {*job.odd} & {*OF_SEEDS, "pad", "transform", "transform_sampler_output"} & job.arguments.keys():
        return  # an odd value that is valid after all; such seeds, sizes and functions are not modelled
    try:
        plain = scene.plain(loader.seed)
        plain.turns(0)
        if {"sampler", "batch_sampler"} & {*job.odd}:  # whose items may be no positions or batches
            plain.batches(0)
    except Exception as error:
        if job.is_odd:
            return
        raise AssertionError(
            f"the loader takes what the plainest loader refuses: {type(error).__name__}: {error}"
        ) from error
    Use(scene, loader, plain, report).run()


# --- in the caller -------------------------------------------------------------------------------------------------


def failure_of(job: Job, pool: Pool, folder: Path, seconds: float = HANG) -> str | None:
    """Runs a job. Returns None if the law holds, else what is wrong. A rank that has not ended after ``seconds`` counts as hung."""
    return outcome_of(job, pool, folder, seconds)[0]


def outcome_of(job: Job, pool: Pool, folder: Path, seconds: float = HANG) -> tuple[str | None, list[Any]]:
    """Returns what is wrong, and what the ranks report."""
    if job.graph.is_directory:
        try:
            directory(job.graph, folder)
        except Exception as error:
            return f"the graph cannot be partitioned: {type(error).__name__}: {error}", []
    reports = pool.run(run_job, job.ranks, job, folder, seconds=seconds)
    return _judged(job, reports), reports


def _judged(job: Job, reports: list[Any]) -> str | None:
    failed = [f"rank {rank}: {each.kind}: {each.text}" for rank, each in enumerate(reports) if isinstance(each, Failed)]
    if failed:
        return "\n".join(failed)
    faults = [f"rank {rank}: {words}" for rank, each in enumerate(reports) for words in each.faults]
    if faults:
        return "\n".join(faults)
    refused = [each.refused for each in reports]
    if all(words is None for words in refused):
        return _unlike_traffic([each.traffic for each in reports])
    if any(words is None for words in refused):
        return f"only some ranks refuse: {refused}"
    odd = [name for name in job.odd if name in job.arguments]
    for rank, words in enumerate(refused):
        if not is_right(words, odd):
            why = f"an error that does not name {' or '.join(odd)}" if odd else "no argument being odd"
            return f"rank {rank} refuses with {why}: {reports[rank].kind}: {words}"
    return None


def _unlike_traffic(of_ranks: list[tuple[int, ...] | None]) -> str | None:
    """Compares what all ranks have sent with what they have received. A rank with fewer batches may still answer the others."""
    known = [each for each in of_ranks if each is not None]
    if len(known) < len(of_ranks) or len({batches for batches, *_ in known}) > 1:
        return None
    if len({tuple(messages) for _, _, _, *messages in known}) > 1:
        return f"the ranks count different numbers of messages: {known}"
    sent, received = sum(each[1] for each in known), sum(each[2] for each in known)
    return None if sent == received else f"the ranks count {sent} bytes sent and {received} received"


# --- shrinking and scripts -----------------------------------------------------------------------------------------


def shrunk(job: Job, pool: Pool, folder: Path, tries: int = 150, seconds: float = 200.0) -> Job:
    """Leaves out arguments and steps of a failing job, and makes its graph smaller, while it still fails.

    Ends after ``tries`` smaller jobs or ``seconds``, because each job that hangs takes ``HANG / 8`` seconds.
    """
    ends = time.monotonic() + seconds
    kind = _kind_of(failure_of(job, pool, folder, seconds=HANG / 8))
    while tries > 0:
        for other in _simpler(job):
            tries -= 1
            if _kind_of(failure_of(other, pool, folder, seconds=HANG / 8)) == kind is not None:
                job = other
                break
            if tries <= 0 or time.monotonic() > ends:
                return job
        else:
            return job
    return job


def _kind_of(why: str | None) -> str | None:
    """Returns the beginning of a description without its numbers. A smaller job must fail in the same way."""
    if why is None:
        return None
    words = why.partition("Error: ")[2] if " refuses with " in why else why
    return re.sub(r"[^a-zA-Z ]|rank|step|step.*?:", "", words)[:25]


def _simpler(job: Job) -> Iterator[Job]:
    if len(job.steps) > 1:
        yield dataclasses.replace(job, steps=job.steps[-1:])
        yield dataclasses.replace(job, steps=job.steps[:-1])
    if job.steps != ("epoch",):
        yield dataclasses.replace(job, steps=("epoch",))
    for name in job.arguments:
        if name not in ("num_neighbors", "input_nodes", "edge_label_index") or (
            name == "edge_label_index" and not job.graph.is_typed
        ):
            yield dataclasses.replace(
                job, arguments={other: text for other, text in job.arguments.items() if other != name}
            )
    for ranks in range(1, job.ranks):
        if ranks <= job.graph.parts or ranks % job.graph.parts == 0:
            yield dataclasses.replace(job, ranks=ranks)
    for graph in simpler(job.graph):
        if job.ranks <= graph.parts or job.ranks % graph.parts == 0:
            yield dataclasses.replace(job, graph=graph)
    if not job.graph.is_typed and job.arguments.get("num_neighbors") not in ("[2]", "[2, 2]"):
        yield dataclasses.replace(job, arguments={**job.arguments, "num_neighbors": "[2, 2]"})


def script_of(job: Job, why: str) -> str:
    """Returns a script that runs a job by itself."""
    tests = Path(__file__).parents[1]
    lines = [line[:150] for line in why.splitlines()[:6]]
    return f'''"""Random job {job.seed}: {lines[0] if lines else ""}"""
import sys
sys.path.insert(0, {str(tests)!r})
import random_cases
from random_cases.data import Graph
from random_cases.jobs import Job, show

if __name__ == "__main__":
    show({_text(job)})
'''


def _text(value: Any) -> str:
    """Source of a dataclass without the fields that have their default."""
    given = []
    for each in dataclasses.fields(value):
        default = each.default if each.default is not dataclasses.MISSING else each.default_factory()  # type: ignore[misc]
        own = getattr(value, each.name)
        if own != default:
            given.append(f"{each.name}={_text(own) if dataclasses.is_dataclass(own) else repr(own)}")
    return f"{type(value).__name__}({', '.join(given)})"


def show(job: Job) -> None:
    """Runs a job and prints what is wrong."""
    pool = Pool()
    with tempfile.TemporaryDirectory() as folder:
        print(failure_of(job, pool, Path(folder)) or "the law holds")
    pool.close()
