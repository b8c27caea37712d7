"""The storage hosts of a batch script for SLURM: the second component of a heterogeneous job, which runs ``salientpp serve`` while the first one trains.

The batch shell runs on the first host that trains. It starts the storage as a step in the background, waits until all storage hosts answer, and passes their
address and a secret to the ranks in the environment. The step of the ranks is the same as without storage hosts. When it has ended, the storage is told to end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """Storage hosts of a training job.

    Attributes:
        hosts: number of hosts.
        root: the dataset directory, as these hosts see it.
        options: further arguments of ``salientpp serve``, such as ``['--copy-to', '/scratch']``.
        cpus: CPUs of each host.
        memory: memory of each host as sbatch's ``--mem`` takes it, such as '256G'. None: the cluster's default.
        partition: SLURM partition; None: that of the ranks that train.
    """

    hosts: int
    root: str
    options: Sequence[str] = ()
    cpus: int = 4
    memory: str | None = None
    partition: str | None = None

    def directives(self, partition: str | None) -> list[str]:
        """Returns the ``#SBATCH`` lines of this component. The ranks that train use ``partition``. SLURM copies their time, log and account."""
        partition = self.partition or partition
        return [
            "hetjob",
            *([f"--partition={partition}"] if partition else []),
            f"--nodes={self.hosts}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self.cpus}",
            *([f"--mem={self.memory}"] if self.memory else []),
        ]

    def lines(self) -> Iterator[str]:
        """Yields the lines that start the storage and wait for it. They need the shell variable ``python``."""
        srun = f"srun --het-group=1 --ntasks={self.hosts} --ntasks-per-node=1 --cpus-per-task={self.cpus}"
        serve = " ".join(shlex.quote(word) for word in ("-m", "salientpp", "serve", self.root, *self.options))
        yield from [
            "",
            "# The second component of this job stores. Only processes with this job's secret can read from it.",
            """SALIENTPP_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(16))')""",
            "export SALIENTPP_TOKEN",
            "# Each storage host names its address, and a port that its kernel reports as free.",
            f'found=$({srun} "$python" -m salientpp.launch.free_address)',
            'SALIENTPP_HOSTS=$(sort -n <<< "$found" | cut -d " " -f 2 | paste -s -d " ")',
            "export SALIENTPP_HOSTS",
            "# The storage ignores the signal, because the ranks read from it until they have saved.",
            "# shellcheck disable=SC2016  # expanded by the inner bash",
            f"{srun} --kill-on-bad-exit=1 \\",
            """    bash -c 'trap "" USR1; read -ra hosts <<< "$SALIENTPP_HOSTS"; exec "$@" --listen "${hosts[SLURM_PROCID]}" --hosts "${hosts[@]}"' \\""",
            f'    storage "$python" {serve} &',
            "storage=$!",
            "# The storage ends with this script, whether training succeeds or not.",
            "# shellcheck disable=SC2317  # called by the trap",
            "stop_storage() {",
            '    scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1" 2> /dev/null || true  # refused if the job is being requeued',
            '    timeout 60 tail --pid="$storage" -f /dev/null || true',
            "}",
            "trap stop_storage EXIT",
            "for host in $SALIENTPP_HOSTS; do",
            "    tries=0",
            """    until words=$("$python" -m salientpp serve --status "$host" 2>&1); do""",
            '        if ! kill -0 "$storage" 2> /dev/null; then',
            '            echo "the storage ended before training began; see its lines above" >&2',
            "            exit 1",
            "        fi",
            '        if (( ++tries % 60 == 0 )); then echo "waiting for the storage at $host: $words" >&2; fi',
            "        sleep 1",
            "    done",
            "done",
            "# The ranks call salientpp.load with this address.",
            'export SALIENTPP_STORAGE="salientpp://${SALIENTPP_HOSTS%% *}"',
        ]
