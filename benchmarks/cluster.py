"""Emulates several hosts on one machine: a network namespace per host, joined by links of a set rate.

    with Cluster(4, bytes_per_second=10e6) as cluster:
        results = cluster.run(function, *args)      # function(rank, *args) on every host, one rank each, gloo between them

Every host has one interface, ``eth0``: a veth whose other end is a port of a bridge. Both ends pass a token-bucket filter (tc-tbf). The host's end limits what
it sends, and the port limits what it receives, so a link has the set rate in each direction. A link can also be cut. The ranks still share this machine's cores
and memory: the network is slowed, computation is not.

**Nothing is left behind.** Namespaces have no names; each lives as long as a process in it. The first such process is a ``cat`` that reads a pipe from this
process and ends with it, however it ends. The ranks end with that ``cat``. The bridge lives in a namespace of its own, so it touches neither the machine's
interfaces nor its firewall, and clusters side by side use the same addresses.

Needs root (to make network namespaces), iproute2 and util-linux. :func:`unavailable` says what is missing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_INTERFACE = "eth0"
_STORE_PORT = 29500
_CLONE_NEWNET = 0x40000000  # <sched.h>

#: Bytes that may pass at once after a pause, and the longest wait of a packet before it is dropped.
_BURST_BYTES = 256 * 1024
_QUEUE_MILLISECONDS = 5

#: Interfaces with a delay have large frames, of which the process that delays them passes more bytes in a second, and room for what is under way.
_DELAYED = "mtu 16000 txqueuelen 4000"

#: Settings as in a data centre, where a round trip is short. With the defaults, which suit the Internet, a short message behind a long one (gradients behind
#: features) sometimes loses a packet, and TCP notices only after 200 ms. Congestion control is Linux's default, not this machine's: with BBR an exchange
#: between four hosts took up to half as long again.
_TUNING = f"""
ip route replace 10.0.0.0/24 dev {_INTERFACE} rto_min 5ms congctl cubic
echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle
"""


def unavailable() -> str | None:
    """Returns the reason why this machine cannot have a :class:`Cluster`; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    try:
        with Cluster(1, bytes_per_second=1e6):
            return None
    except RuntimeError as error:
        return str(error)


class Cluster:
    """Hosts 0, 1, ... with a link each, while the ``with`` block lasts.

    Processes can be given the cluster and change its links too. It is pickled as the numbers of its namespaces.

    Args:
        num_hosts: 1 to 200.
        bytes_per_second: rate of every link in each direction; None: as fast as the machine can.
        ranks_per_host: ranks h R to h R + R - 1 are on host h, and reach each other without using the link.
        delay: seconds that a packet takes from host to host, beside the time of its bytes. None: links without delay. Links with a delay keep
            their first rate, and cannot be cut.

    Raises:
        RuntimeError: from ``__enter__``, if a tool fails; the error has the tool's message.
    """

    def __init__(
        self,
        num_hosts: int,
        bytes_per_second: float | None = None,
        ranks_per_host: int = 1,
        delay: float | None = None,
    ) -> None:
        if not 1 <= num_hosts <= 200:
            raise ValueError(f"num_hosts must be 1 to 200, got {num_hosts}")
        self.num_hosts, self.ranks_per_host = num_hosts, ranks_per_host
        self._bytes_per_second, self._delay = bytes_per_second, delay
        self._holders: list[subprocess.Popen] = []
        self._namespaces: list[int] = []  # a process in each namespace: first the bridge's, then those of the hosts
        self._pools: list[ProcessPoolExecutor] = []

    def __enter__(self) -> Cluster:
        try:
            for _ in range(1 + self.num_hosts):
                self._hold_namespace()
            if self._delay is None:
                _run_in(self._namespaces[0], "ip link add switch type bridge; ip link set switch up")
                for host in range(self.num_hosts):
                    self._connect(host)
            else:
                self._hold_delay_line(self._delay)
            for host in range(self.num_hosts):
                self._configure(host)
            if self._bytes_per_second is not None:
                self._set_rate(self._bytes_per_second, range(self.num_hosts))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_ranks()
        for holder in self._holders:
            holder.stdin.close()
            holder.stdout.close()
            holder.wait()
        self._holders, self._namespaces = [], []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holders": [], "_pools": []}

    # --- links --------------------------------------------------------------------------------------------

    def set_rate(self, bytes_per_second: float, host: int | None = None, *, receives: bool = True) -> None:
        """Sets the rate of every link, or of the link of one host. With ``receives=False``, it limits only what hosts send."""
        self._check_ports()
        self._set_rate(bytes_per_second, range(self.num_hosts) if host is None else [host], receives)

    def _set_rate(self, bytes_per_second: float, hosts: Iterable[int], receives: bool = True) -> None:
        # In tc, bps means bytes per second.
        limit = f"root tbf rate {int(bytes_per_second)}bps burst {_BURST_BYTES} latency {_QUEUE_MILLISECONDS}ms"
        for port in hosts if receives and self._delay is None else []:
            _run_in(self._namespaces[0], f"tc qdisc replace dev port{port} {limit}")
        for host in hosts:
            _run_in(self._namespaces[1 + host], f"tc qdisc replace dev {_INTERFACE} {limit}")

    def _check_ports(self) -> None:
        if self._delay is not None:
            raise RuntimeError(
                f"links with a delay ({self._delay:g} s) cannot be changed; make a cluster without a delay"
            )

    def cut(self, host: int) -> None:
        """Blocks all traffic of a host. Its connections do not close, so no process is told."""
        self._check_ports()
        _run_in(self._namespaces[0], f"ip link set port{host} down")

    def restore(self, host: int) -> None:
        """Restores a cut link."""
        _run_in(self._namespaces[0], f"ip link set port{host} up")

    # --- ranks --------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 600) -> list[Any]:
        """Returns the results of ``function(rank, *args)`` on every rank; see :meth:`start`.

        Raises:
            TimeoutError: a rank had not ended after ``seconds``; all were killed.
            Exception: the exception of the first rank that failed.
        """
        ranks = self.start(function, *args, seconds=seconds)
        _, running = wait(ranks, timeout=seconds)
        self._end_ranks()
        if running:
            names = ", ".join(str(rank) for rank, future in enumerate(ranks) if future in running)
            raise TimeoutError(f"rank {names} did not end within {seconds:g} s")
        return [rank.result() for rank in ranks]

    def start(self, function: Callable[..., Any], *args: Any, seconds: float = 600) -> list[Future[Any]]:
        """Starts ``function(rank, *args)`` in a fresh process for every rank, with one torch thread and a gloo group of all ranks.

        The group's key-value store is on host 0. Ranks that ran before are killed.

        Args:
            seconds: timeout of collectives of the default group.
        """
        self._end_ranks()
        context = multiprocessing.get_context("forkserver")
        self._pools = [
            ProcessPoolExecutor(1, context, initializer=self.enter, initargs=(host,))
            for host in range(self.num_hosts)
            for _ in range(self.ranks_per_host)
        ]
        return [pool.submit(_be_rank, self, rank, seconds, function, args) for rank, pool in enumerate(self._pools)]

    def enter(self, host: int) -> None:
        """Moves this process to a host and lets gloo use its interface. Must run before any other thread is started."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self._namespaces[1 + host]}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"could not enter the network namespace of host {host}")
        # This rank ends with the process that made the cluster, which multiprocessing's own parent of this rank may outlive.
        holder = os.pidfd_open(self._namespaces[1 + host])
        threading.Thread(target=_end_with, args=(holder,), name="cluster-end", daemon=True).start()
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    # --- making and ending --------------------------------------------------------------------------------

    def _hold_namespace(self) -> None:
        self._namespaces.append(
            self._hold("a network namespace", ["unshare", "--net", "sh", "-c", "echo made; exec cat"])
        )

    def _hold_delay_line(self, delay: float) -> None:
        script = str(Path(__file__).with_name("delay_line.py"))
        rate = self._bytes_per_second or 0
        self._hold("a delay line", [sys.executable, script, str(delay), str(rate), *map(str, self._namespaces[1:])])

    def _hold(self, made: str, command: list[str]) -> int:
        """Starts a process that lives until its standard input closes. Returns its number once it has ``made`` its part of the cluster."""
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders.append(holder)
        if holder.stdout.readline() != b"made\n":
            raise RuntimeError(f"could not make {made}: {holder.stderr.read().decode().strip()}")
        holder.stderr.close()
        return holder.pid

    def _connect(self, host: int) -> None:
        namespace = self._namespaces[1 + host]
        _run_in(
            self._namespaces[0],
            f"ip link add port{host} type veth peer name {_INTERFACE} netns {namespace}; ip link set port{host} master switch up",
        )

    def _configure(self, host: int) -> None:
        # No IPv6 address, because gloo might choose it.
        _run_in(
            self._namespaces[1 + host],
            f"ip link set lo up; ip link set {_INTERFACE} addrgenmode none; ip address add {_address(host)}/24 dev {_INTERFACE}; "
            f"ip link set {_INTERFACE} {'' if self._delay is None else _DELAYED} up\n{_TUNING}",
        )

    def _end_ranks(self) -> None:
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):  # `kill_workers` from Python 3.14 on
                process.kill()
            pool.shutdown()
        self._pools = []


@dataclass(frozen=True)
class LinkCounts:
    """Bytes, with all headers, and packets that a host has received and sent over its link."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    def since(self, earlier: LinkCounts) -> LinkCounts:
        """Returns the counts from an earlier moment on."""
        return LinkCounts(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


def link_counts() -> LinkCounts:
    """Returns the counts of this process's host so far, for all its ranks."""
    with open("/proc/self/net/dev") as devices:  # of the namespace of this thread's process
        line = next(line for line in devices if line.strip().startswith(_INTERFACE))
    numbers = [int(number) for number in line.split(":")[1].split()]  # eight about receiving, eight about sending
    return LinkCounts(*numbers[0:2], *numbers[8:10])


def bytes_received() -> int:
    """Bytes that this process's host has received over its link so far, for all its ranks and with all headers."""
    return link_counts().received_bytes


def _address(host: int) -> str:
    return f"10.0.0.{1 + host}"


def _run_in(namespace: int, script: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{namespace}/ns/net", "sh", "-ec", script], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script!r}: {done.stderr.strip()}")


def _end_with(holder: int) -> None:
    select.select([holder], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _be_rank(cluster: Cluster, rank: int, seconds: float, function: Callable[..., Any], args: tuple) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{_address(0)}:{_STORE_PORT}",
        rank=rank,
        world_size=cluster.num_hosts * cluster.ranks_per_host,
        timeout=timedelta(seconds=seconds),
    )
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()
