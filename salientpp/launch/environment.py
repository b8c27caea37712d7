"""Which rank is this process, and of how many? What torchrun and SLURM say about it in environment variables, in one place.

* **torchrun** gives every rank ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; they
  may also be set by hand. They come first.
* **srun** gives every task of a job step ``SLURM_PROCID``, ``SLURM_NTASKS`` (of the step: ``SLURM_STEP_NUM_TASKS``), ``SLURM_LOCALID``,
  ``SLURM_STEP_NODELIST`` and others. A batch script has most of them too, with the numbers of a task 0, though it is no task: what it starts
  without srun must not take itself for rank 0 of a job. Only a job step has ``SLURM_STEP_ID``.
* Where both speak (srun starts torchrun, or the variables were set by hand), they must agree.

Nothing is written to the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes seconds, which `salientpp --help` need not wait for
    import torch

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)


class LaunchError(RuntimeError):
    """The environment does not say who this process is, or contradicts itself; the text says what was expected and what to do."""


@dataclass(frozen=True)
class Launch:
    """Who a process is among those that were started together.

    Attributes:
        launcher: 'torchrun' (its variables, whoever set them), 'slurm' (a task of srun), or 'none': a process of its own.
        rank, world_size: this process's number in [0, world_size), and how many there are.
        local_rank, ranks_per_host: its number among those of this host, and how many there are.
        master_addr: the host of rank 0; None for a process of its own.
        master_port: a port there for the ranks to meet at; None where nobody has chosen one yet, as under srun.
        job: under SLURM a name that no other run has: cluster, job, step, and how often the job was restarted.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks_per_host: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    job: str | None = None

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU. Where SLURM shows each task only its own GPU (``--gpus-per-task``), that is number 0."""
        import torch

        return (
            torch.device("cuda", self.local_rank % torch.cuda.device_count())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Who this process is.

    Args:
        environ: the environment; None is this process's.

    Raises:
        LaunchError: variables are missing, are no numbers in their range, or those of torchrun and of SLURM contradict each other; or this
            is the batch script of a job with several tasks, rather than one of them.
    """
    environ = os.environ if environ is None else environ
    slurm = _from_slurm(environ) if "SLURM_STEP_ID" in environ else None
    # MASTER_ADDR and MASTER_PORT alone say where to meet, not who one is.
    if any(name in environ for name in _TORCHRUN[:4]):
        launch = _from_torchrun(environ, slurm)
        _check_agreement(launch, slurm, environ)
        return launch
    if slurm is not None:
        return slurm
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and tasks != "1":
        raise LaunchError(
            f"this process runs in the shell of SLURM's job {environ['SLURM_JOB_ID']}, which has {tasks} tasks, but is none of them; "
            "start it with srun (`srun python ...`), or clear SLURM_NTASKS if it is to run alone"
        )
    return Launch("none")


def _from_torchrun(environ: Mapping[str, str], slurm: Launch | None) -> Launch:
    # By hand one often sets only what torch itself reads; SLURM knows the rest.
    known = (
        {} if slurm is None else {"LOCAL_RANK": str(slurm.local_rank), "LOCAL_WORLD_SIZE": str(slurm.ranks_per_host)}
    )
    environ = {**known, **environ}
    _check_present(environ, _TORCHRUN, "torchrun", "start with torchrun, or set all of them on every rank")
    launch = Launch(
        "torchrun",
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        ranks_per_host=_number(environ, "LOCAL_WORLD_SIZE"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        job=None if slurm is None else slurm.job,
    )
    _check_range("RANK", launch.rank, "WORLD_SIZE", launch.world_size)
    _check_range("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.ranks_per_host)
    return launch


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _check_present(
        environ,
        (*_SLURM, size),
        "srun",
        "start with srun, and pass its variables on to the process (containers may drop them)",
    )
    per_host = tasks_per_host(environ["SLURM_STEP_TASKS_PER_NODE"])
    host = _number(environ, "SLURM_NODEID")
    _check_range("SLURM_NODEID", host, "the number of hosts in SLURM_STEP_TASKS_PER_NODE", len(per_host))
    launch = Launch(
        "slurm",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=_number(environ, size),
        local_rank=_number(environ, "SLURM_LOCALID"),
        ranks_per_host=per_host[host],
        master_addr=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        job="-".join(
            [
                environ.get("SLURM_CLUSTER_NAME", "cluster"),
                environ["SLURM_JOB_ID"],
                environ["SLURM_STEP_ID"],
                environ.get("SLURM_RESTART_COUNT", "0"),
            ]
        ),
    )
    _check_range("SLURM_PROCID", launch.rank, size, launch.world_size)
    _check_range(
        "SLURM_LOCALID", launch.local_rank, "its host's entry in SLURM_STEP_TASKS_PER_NODE", launch.ranks_per_host
    )
    return launch


def _check_agreement(launch: Launch, slurm: Launch | None, environ: Mapping[str, str]) -> None:
    if slurm is None:
        return
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun itself: one agent per task, each with ranks of its own
        agents = (
            _number(environ, "GROUP_WORLD_SIZE")
            if "GROUP_WORLD_SIZE" in environ
            else launch.world_size // launch.ranks_per_host
        )
        if agents != slurm.world_size:
            raise LaunchError(
                f"srun has started {slurm.world_size} tasks (SLURM_NTASKS), but the torchrun of this one has {agents} in its group "
                "(GROUP_WORLD_SIZE), so that ranks would train apart; give torchrun "
                f"--nnodes {slurm.world_size} and the same --rdzv-backend c10d --rdzv-endpoint HOST:PORT in every task, or srun --ntasks {agents}"
            )
        return
    pairs = [
        ("RANK", launch.rank, "SLURM_PROCID", slurm.rank),
        ("WORLD_SIZE", launch.world_size, "SLURM_NTASKS", slurm.world_size),
    ]
    wrong = [f"{ours}={value} but {theirs}={other}" for ours, value, theirs, other in pairs if value != other]
    if wrong:
        raise LaunchError(
            f"torchrun's variables and SLURM's disagree: {' and '.join(wrong)}; unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and "
            "SLURM's are taken, or set them to SLURM's in every task"
        )


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts, such as ``rack[0-1]n[01-16,20],login``."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def tasks_per_host(text: str) -> list[int]:
    """Tasks on each host from ``4(x2),1``, which is SLURM's way to write 4, 4, 1."""
    counts = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE must look like 4(x2),1, got {text!r}; start with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_present(environ: Mapping[str, str], names: tuple[str, ...], launcher: str, advice: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [name for name in names if name not in missing]
        raise LaunchError(
            f"{', '.join(there) or 'nothing'} of {launcher}'s variables is set, but {', '.join(missing)} is missing; {advice}"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"{name} must be an integer, got {environ[name]!r}") from None


def _check_range(name: str, value: int, of: str, size: int) -> None:
    if not 0 <= value < size:
        raise LaunchError(f"{name} must be in [0, {size}), by {of}, got {value}")
