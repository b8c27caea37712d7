"""Batch scripts for SLURM that start one rank per part and continue after preemption, see docs/how-to/slurm.md.

``--signal=USR1@120`` without ``B:`` sends the signal to all processes of the job's steps, but not to the batch shell, so the ranks receive it themselves. The
signal ends a process without a handler, such as torchrun or a rank that is still importing. So everything that srun starts ignores the signal, and
children inherit this, until a rank installs a handler (:class:`salientpp.Preemption`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from salientpp.launch.storage_script import Storage

LAUNCHERS = ("srun", "torchrun")

#: Largest number of tasks, hosts or CPUs that SLURM accepts.
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Partitioning:
    """SLURM job that runs before the training job: ``salientpp partition`` writes the directory ``root`` from a dataset.

    Attributes:
        dataset, root: paths relative to the directory of submission.
        options: further arguments of ``salientpp partition``, such as ``['--num-neighbors', '15,10,5']``.
        cpus, time, partition: CPUs, time limit and SLURM partition of this job. ``partition`` None: the training job's.
    """

    dataset: str
    root: str
    options: Sequence[str] = ()
    cpus: int = 4
    time: str | None = None
    partition: str | None = None


@dataclass(frozen=True)
class Batch:
    """Settings of a training job, from which :func:`script` writes a batch script for SLURM.

    Attributes:
        command: the training script and its arguments; without ``python``.
        parts, ranks_per_part: number of parts, and of ranks for each part. Their product is the number of ranks.
        ranks_per_node, gpus_per_node, cpus_per_task: ranks and GPUs on each host (0 requests no GPU), and CPUs of each rank.
        time: time limit, such as '2:00:00'.
        partition: SLURM partition; None is the cluster's default.
        launcher: 'srun' or 'torchrun'.
        python: the interpreter; all hosts must see it.
        options: further options of sbatch, such as '--account=physics'.
        first: job that partitions the dataset before this job begins; None: no such job.
        storage: hosts that hold all rows; None: the hosts that train hold them.
    """

    command: Sequence[str]
    parts: int
    time: str
    python: str
    ranks_per_part: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int = 4
    partition: str | None = None
    launcher: str = "srun"
    job_name: str = "salientpp"
    options: Sequence[str] = ()
    first: Partitioning | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        first, storage = self.first, self.storage
        for name, least, number in (
            ("--parts", 1, self.parts),
            ("--ranks-per-part", 1, self.ranks_per_part),
            ("--ranks-per-node", 1, self.ranks_per_node),
            ("--cpus-per-task", 1, self.cpus_per_task),
            ("--gpus-per-node", 0, self.gpus_per_node),
            ("--partition-cpus", 1, first.cpus if first else 1),
            ("--storage-hosts", 1, storage.hosts if storage else 1),
            ("--storage-cpus", 1, storage.cpus if storage else 1),
        ):
            if not least <= number <= _MOST:
                raise ValueError(f"{name} must be an integer from {least} to {_MOST}, got {number}")
        if self.ranks % self.ranks_per_node:
            raise ValueError(
                f"{self.ranks} ranks ({self.parts} parts, {self.ranks_per_part} per part) do not fill hosts of {self.ranks_per_node} ranks: choose "
                "a divisor of the number of ranks as --ranks-per-node (by default --gpus-per-node)"
            )
        for name, text in (
            ("--job-name", self.job_name),
            ("--partition", self.partition),
            ("--partition-queue", first.partition if first else None),
            ("--storage-partition", storage.partition if storage else None),
        ):
            if text is not None and not re.fullmatch(r"(?!-)[\w.,+-]+", text):
                raise ValueError(f"{name} must be a name without blanks and must not begin with -, got {text!r}")
        for name, text in (
            ("--python", self.python),
            ("--dataset", first.dataset if first else None),
            ("--root", first.root if first else storage.root if storage else None),
        ):
            if text is not None and not text.strip():
                raise ValueError(f"{name} must not be empty")
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"--launcher must be srun or torchrun, got {self.launcher!r}")
        if not self.command or self.command[0] in ("", "--", "python", "python3", "srun", "torchrun"):
            raise ValueError(
                "after -- expected the training script and its arguments, as in `-- train.py --epochs 10`, got "
                f"{shlex.join(self.command) or 'nothing'}"
            )
        for name, time in (("--time", self.time), ("--partition-time", self.first.time if self.first else None)):
            if time is not None and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time, re.ASCII):
                raise ValueError(f"{name} must be minutes, H:MM:SS or D-HH:MM:SS as sbatch takes them, got {time!r}")
        if storage is not None:
            self._check_storage(storage)
        for option in self.options:
            if not re.match(r"-\w|--\w", option) or not option.isprintable():
                raise ValueError(f"--sbatch needs an option of sbatch such as --sbatch=--account=NAME, got {option!r}")

    def _check_storage(self, storage: Storage) -> None:
        if storage.hosts > self.parts and storage.hosts % self.parts:
            raise ValueError(
                f"--storage-hosts={storage.hosts} does not fit {self.parts} parts: use at most {self.parts} storage hosts or a multiple of {self.parts}"
            )
        if storage.memory is not None and not re.fullmatch(r"\d+[KMGT]?", storage.memory, re.ASCII):
            raise ValueError(
                f"--storage-memory must be a size as sbatch's --mem takes it, such as 256G, got {storage.memory!r}"
            )

    @property
    def ranks(self) -> int:
        return self.parts * self.ranks_per_part

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


def script(batch: Batch, made_by: str) -> str:
    """Returns the batch script; ``made_by`` is the command that made it, for the comments at the top."""
    by_srun = batch.launcher == "srun"
    tasks, cpus = (
        (batch.ranks_per_node, batch.cpus_per_task) if by_srun else (1, batch.ranks_per_node * batch.cpus_per_task)
    )
    submit = "`sbatch THIS_FILE`."
    if batch.first:
        submit = "`bash THIS_FILE`: it submits a partitioning job first, unless the dataset is already partitioned."
    directives = [
        f"--job-name={batch.job_name}",
        *([f"--partition={batch.partition}"] if batch.partition else []),
        f"--time={batch.time}",
        f"--nodes={batch.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
        *([f"--gpus-per-node={batch.gpus_per_node}"] if batch.gpus_per_node else []),
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=USR1@120",
        *batch.options,
        *(batch.storage.directives(batch.partition) if batch.storage else []),
    ]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {directive}" for directive in directives),
        "#",
        f"# Trains with {batch.ranks} ranks on {batch.nodes} hosts: {batch.parts} parts, {batch.ranks_per_part} rank(s) per part.",
        *([f"# {batch.storage.hosts} further host(s) hold all rows."] if batch.storage else []),
        *(f"# {line}" for line in f"Made by: {made_by}".splitlines()),
        f"# Submit it with {submit}",
        "# The signal USR1 comes 120 s before the end: time to save and to requeue. The log is appended to.",
        "set -euo pipefail",
        "",
        "# The Python with salientpp installed; every host must see it.",
        f"python={shlex.quote(batch.python)}",
    ]
    if batch.first is not None:
        lines += ["", *_chain(batch, batch.first)]
    lines += [
        "",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{batch.cpus_per_task}}}"  # per rank',
        "export PYTHONUNBUFFERED=1  # writes lines to the log at once",
        *(batch.storage.lines() if batch.storage else []),
    ]
    command = " ".join(shlex.quote(word) for word in batch.command)
    if by_srun:
        start = ['"$python" ' + command]
    else:
        lines += [
            "# The ranks meet at this host, the job's first, at a port that its kernel reports as free.",
            """port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')""",
            "# Lines in the log begin with the rank's number.",
            "export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '",
        ]
        lines.insert(-1, "# shellcheck disable=SC2016  # torchrun fills in the number")
        start = [
            '"$python" -m torch.distributed.run',
            f'    --nnodes="$SLURM_NNODES" --nproc-per-node={batch.ranks_per_node} --tee=3 --log-dir="${{TMPDIR:-/tmp}}/torchrun-$SLURM_JOB_ID"',
            '    --rdzv-backend=c10d --rdzv-endpoint="$(hostname):$port" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
            "    " + command,
        ]
    lines += [
        "# The numbers are explicit: srun may not take the CPUs of a task from the job, and a requeued job may have fewer hosts than it asked for.",
        "# If one task fails, all end. Processes started here ignore the signal until the training script installs a handler for it.",
        "# shellcheck disable=SC2016  # expanded by the inner bash",
        " \\\n    ".join(
            [
                f'srun{" --het-group=0" if batch.storage else ""} --ntasks="$((SLURM_NNODES * {tasks}))" --ntasks-per-node={tasks} --cpus-per-task={cpus}',
                f"    --kill-on-bad-exit=1{' --label' if by_srun else ''}",
                """bash -c 'trap "" USR1; exec "$@"' rank""",
                *start,
            ]
        ),
    ]
    return "\n".join(lines) + "\n"


def _chain(batch: Batch, first: Partitioning) -> list[str]:
    arguments = shlex.join([first.dataset, first.root, "--parts", str(batch.parts), *first.options])
    command = f"{shlex.quote(batch.python)} -m salientpp partition {arguments}"
    queue = first.partition or batch.partition
    options = [
        f"--job-name={batch.job_name}-partition",
        *([f"--partition={queue}"] if queue else []),
        f"--time={first.time or batch.time}",
        f"--nodes=1 --ntasks=1 --cpus-per-task={first.cpus}",
        "--output=%x-%j.log",
    ]
    manifest = shlex.quote(f"{first.root.rstrip('/')}/manifest.json")
    return [
        "# Without a job, on the login node: submit a partitioning job, and this script to begin after it has succeeded.",
        "if [[ -z ${SLURM_JOB_ID:-} ]]; then",
        f"    if [[ -e {manifest} ]]; then",
        '        exec sbatch "$0"',
        "    fi",
        "    job=$(sbatch --parsable \\",
        *(f"        {' '.join(shlex.quote(word) for word in option.split(' '))} \\" for option in options),
        f"        --wrap {shlex.quote(command)})",
        '    echo "job ${job%%;*} partitions"',
        '    exec sbatch --dependency="afterok:${job%%;*}" --kill-on-invalid-dep=yes "$0"',
        "fi",
    ]
