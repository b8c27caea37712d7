"""Starts SLURM for tests: two nodes on this machine, with munged, slurmctld and two slurmd in their own folder.

It shares nothing with an installed SLURM: key, socket, ports and state are its own. Daemons run in the foreground as
children of the tests, so the tests can stop them, and the processes that they started, by process id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from distributed import HANG

NODES = ("n1", "n2")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "setpriv", "shellcheck")

#: Nodes claim more CPUs than the machine has (config_overrides), and one unusable GPU each: only the numbers matter here.
#: A requeued job may start again only after the credential of its first run has expired, hence the short expiry.
CONFIGURATION = """
ClusterName=salientpp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
SchedulerParameters=sched_interval=2,sched_min_interval=100000,bf_interval=2
MinJobAge=600
KillWait=5
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 OverTimeLimit=0 State=UP
"""


def why_not() -> str | None:
    """Reason that no cluster can be started here; None if one can."""
    missing = [command for command in COMMANDS if find(command) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge shellcheck"
        return f"SLURM or other requirements of its tests are missing: {', '.join(missing)}; on Debian: apt-get install {packages}"
    if os.geteuid() != 0:
        return "the daemons of SLURM start jobs as their owners, which needs root"
    return None


def find(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class Job:
    """A job that has ended: its state, its facts and its log."""

    id: str
    state: str
    facts: dict[str, str]
    log: str


@dataclass
class Cluster:
    """A running SLURM; its commands need ``environment``."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        *command: object,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        seconds: float = HANG,
    ) -> str:
        """Output of one of SLURM's commands, or of a script that calls them."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def facts(self, job: str) -> dict[str, str]:
        """Fields that scontrol shows for a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, log: Path | None = None, seconds: float = HANG) -> Job:
        """Waits until the job has ended; if it does not, cancels it and fails the test."""
        deadline = time.monotonic() + seconds
        while True:
            facts = self.facts(job)
            if facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"):
                break
            if time.monotonic() > deadline:
                self.run("scancel", job)
                raise AssertionError(f"job {job} has not ended within {seconds:g} s: {facts}\n{self.logs(facts, log)}")
            time.sleep(0.2)
        return Job(job, facts["JobState"], facts, self.logs(facts, log))

    def logs(self, facts: dict[str, str], log: Path | None) -> str:
        path = log or Path(facts.get("StdOut", "/dev/null"))
        return path.read_text() if path.exists() else f"({path} was not written)"

    def wait_for(self, text: str, log: Path, seconds: float = HANG) -> None:
        """Returns once the file contains the text."""
        deadline = time.monotonic() + seconds
        while not (log.exists() and text in log.read_text()):
            assert time.monotonic() < deadline, (
                f"no {text!r} in {log} within {seconds:g} s:\n{log.read_text() if log.exists() else ''}"
            )
            time.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a cluster, waits until both nodes are idle, and stops it in the end, also after an error."""
    for name in ("state", "tmp", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    conf = folder / "slurm.conf"
    conf.write_text(
        CONFIGURATION.format(host=socket.gethostname().partition(".")[0], ports=_free_ports(3), folder=folder)
    )
    (folder / "gres.conf").write_text("NodeName=n1,n2 Name=gpu File=/dev/null\n")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    # The tests may themselves run under SLURM, whose variables must not be seen here.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))
    }
    environment |= {"SLURM_CONF": str(conf), "PATH": path, "TMPDIR": str(folder / "tmp")}
    made = Cluster(folder, environment)
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        ],
        ["slurmctld", "-D", "-c", "-f", conf],
        *(["slurmd", "-D", "-c", "-N", node, "-f", conf] for node in NODES),
    ]
    daemons: list[subprocess.Popen] = []
    try:
        for command in commands:
            # If the tests are killed, the kernel ends the daemons.
            words = ["setpriv", "--pdeathsig=TERM", find(command[0]), *map(str, command[1:])]
            with (folder / f"daemon-{len(daemons)}.out").open("wb") as out:
                daemons.append(
                    subprocess.Popen(
                        words,
                        env=environment,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                )
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), daemons, folder)
        idle = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
        _wait(lambda: _output(idle, environment).split("\n")[:2] == ["n1 idle", "n2 idle"], daemons, folder)
        yield made
    finally:
        _stop(daemons, made)


def _output(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG).stdout


def _wait(condition, daemons: list[subprocess.Popen], folder: Path, seconds: float = HANG) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [str(daemon.args[2]) for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                for path in sorted(folder.glob("daemon-*.out"))
            )
            raise RuntimeError(
                f"SLURM did not start ({', '.join(ended) or 'nodes are not idle'} after {seconds:g} s):\n{logs}"
            )
        time.sleep(0.1)


def _stop(daemons: list[subprocess.Popen], made: Cluster) -> None:
    if len(daemons) > 1:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            _output(["scancel", "--signal=KILL", "--user=root"], made.environment)
            deadline = time.monotonic() + 60
            while (
                _output(["squeue", "--noheader", "--states=RUNNING,COMPLETING"], made.environment).strip()
                and time.monotonic() < deadline
            ):
                time.sleep(0.2)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    # Steps detach from the daemon that started them; the cluster's configuration in their environment identifies them.
    mark = f"SLURM_CONF={made.environment['SLURM_CONF']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Ports that are free now; all sockets stay open until the last port is known, so that the ports differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
