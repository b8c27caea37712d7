"""Rank and number of ranks of this process, read from the environment variables of torchrun and SLURM. Nothing is written to the environment.

torchrun's variables take precedence; they may also be set by hand. If SLURM's are set too, both must agree. ``SLURM_STEP_ID`` tells tasks from the batch
script. The script has most other variables of SLURM too, with the values of task 0, but is no task.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing torch takes seconds, and `salientpp --help` does not need it
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

#: Maximum number of ranks, and of hosts, of a job. Larger numbers are mistakes.
_MOST_RANKS, _MOST_HOSTS = 2**31 - 1, 2**20
_LAST_PORT = 2**16 - 1

#: Name or address of a host: without blanks, and without the characters of lists and paths.
_HOST = r"[^\s,/\[\]]{1,255}"
#: Number of characters of a wrong value that an error shows.
_MOST_SHOWN = 80


class LaunchError(RuntimeError):
    """The environment does not identify this process, or contradicts itself. The text says what was expected and what to do."""


@dataclass(frozen=True)
class Launch:
    """Rank of a process among the processes that were started together.

    Attributes:
        launcher: 'torchrun' (its variables, even if set by hand), 'slurm' (a task of srun), or 'none': a single process.
        rank, world_size: number of this process in [0, world_size), and number of processes.
        local_rank, ranks_per_host: number of this process among the processes of its host, and number of these processes.
        master_addr: the host of rank 0; None for a single process.
        master_port: the port at which the ranks meet there; None if none has been chosen yet, as under srun.
        job: under SLURM, a name that no other run has, made of cluster, job, step, and number of restarts.
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
        """Device of this rank: its GPU, or the CPU. If SLURM shows each task only its own GPU (``--gpus-per-task``), the GPU has number 0."""
        import torch

        accelerator, number = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        if accelerator is None or number == 0:
            return torch.device("cpu")
        return torch.device(accelerator.type, self.local_rank % number)


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Identifies this process.

    Args:
        environ: the environment; None is this process's.

    Raises:
        LaunchError: variables are missing or out of range, torchrun's and SLURM's contradict each other, or this is the batch
            script of a job with several tasks.
    """
    environ = os.environ if environ is None else environ
    slurm = _from_slurm(environ) if "SLURM_STEP_ID" in environ else None
    # MASTER_ADDR and MASTER_PORT alone name the meeting point, but not the rank.
    if any(name in environ for name in _TORCHRUN[:4]):
        launch = _from_torchrun(environ, slurm)
        if slurm is not None:
            _check_agreement(launch, slurm, environ)
        _check_most("LOCAL_WORLD_SIZE", launch.ranks_per_host, "WORLD_SIZE", launch.world_size)
        return launch
    if slurm is not None:
        return slurm
    tasks = _number(environ, "SLURM_NTASKS", 1) if {"SLURM_JOB_ID", "SLURM_NTASKS"} <= environ.keys() else 1
    if tasks > 1:
        raise LaunchError(
            f"this process runs in the shell of SLURM's job {environ['SLURM_JOB_ID']}, which has {tasks} tasks, but it is not one of the tasks; "
            "start it with srun (`srun python ...`), or unset SLURM_NTASKS to run it as a single process"
        )
    return Launch("none")


def _from_torchrun(environ: Mapping[str, str], slurm: Launch | None) -> Launch:
    # Users often set only the variables that torch itself reads; SLURM's have the rest.
    if slurm is not None:
        environ = {"LOCAL_RANK": str(slurm.local_rank), "LOCAL_WORLD_SIZE": str(slurm.ranks_per_host), **environ}
    _check_present(environ, _TORCHRUN, "torchrun", "start with torchrun, or set all of them on every rank")
    world_size = _number(environ, "WORLD_SIZE", 1)
    launch = Launch(
        "torchrun",
        rank=_number(environ, "RANK"),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        ranks_per_host=_number(environ, "LOCAL_WORLD_SIZE", 1),
        master_addr=_address(environ),
        master_port=_port(environ, world_size),
        job=None if slurm is None else slurm.job,
    )
    _check_range("RANK", launch.rank, "WORLD_SIZE", launch.world_size)
    _check_range("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.ranks_per_host)
    return launch


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    advice = "start with srun, and pass its variables on to the process (containers may drop them)"
    _check_present(environ, (*_SLURM, size), "srun", advice)
    per_host = tasks_per_host(environ["SLURM_STEP_TASKS_PER_NODE"])
    host = _number(environ, "SLURM_NODEID")
    _check_range("SLURM_NODEID", host, "the number of hosts in SLURM_STEP_TASKS_PER_NODE", len(per_host))
    world_size = _number(environ, size, 1)
    digits = (r"[0-9]{1,20}", "a number, in digits alone")
    job = [  # becomes part of a file's name
        _matching(environ, "SLURM_CLUSTER_NAME", r"[\w.-]{1,128}", "letters, digits, '.', '-' and '_'", "cluster"),
        _matching(environ, "SLURM_JOB_ID", *digits),
        _matching(environ, "SLURM_STEP_ID", *digits),
        _matching(environ, "SLURM_RESTART_COUNT", *digits, "0"),
    ]
    launch = Launch(
        "slurm",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        ranks_per_host=per_host[host],
        master_addr=_address(environ) if environ.get("MASTER_ADDR") else first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=_port(environ, world_size) if "MASTER_PORT" in environ else None,
        job="-".join(job),
    )
    _check_range("SLURM_PROCID", launch.rank, size, launch.world_size)
    _check_range(
        "SLURM_LOCALID", launch.local_rank, "its host's entry in SLURM_STEP_TASKS_PER_NODE", launch.ranks_per_host
    )
    _check_most("this host's entry in SLURM_STEP_TASKS_PER_NODE", launch.ranks_per_host, size, launch.world_size)
    return launch


def _check_agreement(launch: Launch, slurm: Launch, environ: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun itself: one agent per task, each with its own ranks
        agents = launch.world_size // launch.ranks_per_host
        if "GROUP_WORLD_SIZE" in environ:
            agents = _number(environ, "GROUP_WORLD_SIZE", 1)
        if agents != slurm.world_size:
            raise LaunchError(
                f"srun has started {slurm.world_size} tasks (SLURM_NTASKS), but the torchrun of this task has {agents} in its group "
                "(GROUP_WORLD_SIZE), so the ranks would train in separate groups; give torchrun "
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
            f"torchrun's variables and SLURM's disagree: {' and '.join(wrong)}; unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE to "
            "use SLURM's, or set them to SLURM's values in every task"
        )


def first_host(hosts: str) -> str:
    """Returns the first host of SLURM's list, such as ``rack[0-1]n[01-16,20],login``; raises LaunchError if the text is no such list."""
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])
    if re.fullmatch(_HOST, first) is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST must be a list of hosts such as gpu[07-08],login, got {_shown(hosts)}; start with srun"
        )
    return first


def tasks_per_host(text: str) -> list[int]:
    """Parses SLURM's tasks on each host: ``4(x2),1`` means 4, 4, 1. Raises LaunchError for any other text or a number out of range."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"([0-9]{1,10})(?:\(x([0-9]{1,7})\))?", entry)
        tasks, hosts = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (0 < tasks <= _MOST_RANKS and 0 < hosts <= _MOST_HOSTS - len(counts)):
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE must look like 4(x2),1, with 1 to {_MOST_RANKS} tasks on each of at most {_MOST_HOSTS} hosts, "
                f"got {_shown(text)}; start with srun"
            )
        counts += [tasks] * hosts
    return counts


def _check_present(environ: Mapping[str, str], names: tuple[str, ...], launcher: str, advice: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = ", ".join(name for name in names if name not in missing) or "nothing"
        raise LaunchError(f"{there} of {launcher}'s variables is set, but {', '.join(missing)} is missing; {advice}")


def _number(environ: Mapping[str, str], name: str, least: int = 0, most: int = _MOST_RANKS) -> int:
    """Returns the integer in a variable. Raises LaunchError unless it is in [least, most], written in the digits 0 to 9 alone, as torchrun and SLURM do."""
    text = environ[name]
    if re.fullmatch(r"[0-9]{1,10}", text) is None or not least <= int(text) <= most:
        raise LaunchError(f"{name} must be an integer from {least} to {most}, in digits alone, got {_shown(text)}")
    return int(text)


def _port(environ: Mapping[str, str], world_size: int) -> int:
    """Parses MASTER_PORT. With a single rank it may be 0: then the kernel chooses a port."""
    return _number(environ, "MASTER_PORT", 0 if world_size == 1 else 1, _LAST_PORT)


def _address(environ: Mapping[str, str]) -> str:
    return _matching(environ, "MASTER_ADDR", _HOST, "the name or address of a host, without blanks")


def _matching(environ: Mapping[str, str], name: str, pattern: str, words: str, default: str = "") -> str:
    """Returns the value of a variable, or ``default`` if it is empty or missing. Raises LaunchError if the value does not match ``pattern``."""
    text = environ.get(name)
    if not text and default:
        return default
    if text is None or re.fullmatch(pattern, text) is None:
        raise LaunchError(f"{name} must be {words}, got {_shown(text or '')}")
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def _check_range(name: str, value: int, of: str, size: int) -> None:
    if not 0 <= value < size:
        raise LaunchError(f"{name} must be in [0, {size}), as given by {of}, got {value}")


def _check_most(name: str, value: int, of: str, most: int) -> None:
    if value > most:
        raise LaunchError(f"{name} must be at most {most}, as given by {of}, got {value}")
