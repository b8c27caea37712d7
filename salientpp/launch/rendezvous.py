"""Brings the ranks of a job together: each finds the address of rank 0 and waits until all have come.

Under plain srun, no port has been chosen, and one computed from the job's number may be taken. So rank 0 asks its kernel for a free port, holds it, and
publishes host and port in a file that all ranks see. The file is removed as soon as all ranks have met. A rank that fails meanwhile writes the reason to a
file of its own, which rank 0 reads. Rank 0 passes the reason on through the key-value store, and leaves it in its own file. So no rank waits for ranks that
will not come.

torchrun's agents keep one key-value store for the whole job. After they restart all ranks, torch's keys in it still have values of the previous start, and a
rank could find the address of a process that is gone. So the ranks first make sure that they belong to the same start (:func:`meet`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from salientpp.files import first_line, replace_file
from salientpp.launch.environment import Launch, LaunchError, detect
from salientpp.launch.interfaces import address_of, addresses_of
from salientpp.ranks.greeting import (
    DifferentVersions,
    compare_greetings,
    describe_difference,
    greet,
    have_greeted,
    key_of,
)
from salientpp.suggestions import suggest_arguments

#: Number of the next meeting. Ranks may meet several times in one process, each time in a separate file.
_meetings = itertools.count()

#: Number of ranks that may be connecting at once.
_BACKLOG = 4096

_PREFIX = "salientpp/meeting"
#: Seconds between two reads of the store, at first and at most. A thousand ranks may read at the same time.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.3

#: Prefix of the text that rank 0 publishes instead of its address if the ranks could not meet.
_FAILED = "failed: "

#: Part of the name of a rank's own file, which consists of the name of rank 0's file, this text and the rank.
_OF_RANK = "-failed-"

#: Keys of the store: the reason why the ranks cannot meet, and the fact that all have come.
_REASON, _ALL = f"{_PREFIX}/failed", f"{_PREFIX}/all"

#: Number of times that a rank reads rank 0's file again after the file system has lost it (ESTALE).
_STALE_LOOKS = 5


@suggest_arguments
def init_process_group(
    backend: str | None = None, *, timeout: timedelta = timedelta(minutes=10), directory: str | Path | None = None
) -> Launch:
    """Identifies this process and initialises torch.distributed accordingly. Every rank calls it once.

    It works under torchrun and under srun. A single process gets no process group. The rank's GPU becomes the current device.

    Args:
        backend: torch's backend. None: gloo, and also NCCL for tensors on a GPU if the rank has a GPU.
        timeout: time-out for connecting and, by default, for collectives.
        directory: where rank 0 publishes its address if no port has been chosen (plain srun without ``MASTER_PORT``). All hosts must
            share it. None: ``SLURM_SUBMIT_DIR``, from which the job was submitted.

    Returns:
        The launch of this process; its ``device`` is the device for this rank's tensors.

    Raises:
        LaunchError: the environment is incomplete or contradicts itself, the directory is not shared, the ranks cannot
            reach each other, or they run different versions of this package. The text says what to do.
    """
    launch = detect()
    if launch.launcher == "none":
        return launch
    device = launch.device
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = backend or f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    backend = backend or "gloo"
    address = f"{launch.master_addr}:{launch.master_port}"
    if launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        _connect(launch, address, backend, timeout, _meet_at_agent(launch, address, timeout))
    elif launch.master_port is not None:
        _connect(launch, address, backend, timeout, "env://" if launch.launcher == "torchrun" else f"tcp://{address}")
    else:
        directory = Path(directory or os.environ.get("SLURM_SUBMIT_DIR") or ".").absolute()
        file = directory / f".salientpp-{launch.job}-{next(_meetings)}"
        with _telling(file, launch):
            store, address = _host(file, launch, timeout) if launch.rank == 0 else _find(file, launch, timeout)
            _await_all(store, file, launch, timeout)
            _connect(launch, address, backend, timeout, store)
        if launch.rank == 0:
            file.unlink(missing_ok=True)
    return launch


@contextlib.contextmanager
def _telling(file: Path, launch: Launch) -> Iterator[None]:
    """Wraps the block in which the ranks meet, so that the others need not wait if this rank fails.

    Rank 0 then writes the reason to ``file``. Any other rank writes it to a file of its own, which rank 0 reads.
    """
    try:
        yield
    except BaseException as error:
        text = str(error) or type(error).__name__
        if launch.rank == 0:  # ranks that come later would wait for an answer
            with contextlib.suppress(LaunchError):
                _publish(file, f"{_FAILED}{text}")
        elif not isinstance(error, _Told):
            with contextlib.suppress(OSError):
                own = file.with_name(f"{file.name}{_OF_RANK}{launch.rank}")
                replace_file(own, lambda new: new.write(f"{text}\n".encode()))
        if isinstance(error, _Told):
            raise LaunchError(text) from None
        raise


class _Told(Exception):
    """Raised if the ranks cannot meet and the other ranks have already been told. :func:`_telling` turns it into a LaunchError."""


def _told_by_others(file: Path) -> list[Path]:
    """Returns the files in which other ranks say why they cannot meet rank 0."""
    with contextlib.suppress(OSError):
        return sorted(
            file.with_name(name) for name in os.listdir(file.parent) if name.startswith(f"{file.name}{_OF_RANK}")
        )
    return []


def _await_all(store: dist.Store, file: Path, launch: Launch, timeout: timedelta) -> None:
    """Waits until every rank has reached the store. torch's own meeting would wait for a rank that has failed before.

    Raises:
        LaunchError: a rank has failed or did not come, or the ranks run different versions.
    """
    try:
        greet(store, launch.rank)
        deadline = time.monotonic() + timeout.total_seconds()
        reason = (
            _gather_all(store, file, launch, deadline) if launch.rank == 0 else _await_rank_0(store, launch, deadline)
        )
    except dist.DistError as error:  # the store is gone with rank 0, which has published the reason
        reason = _reason_in(file)
        if reason is None:
            raise LaunchError(_unreachable(launch, str(file), error)) from error
    if reason is not None:
        raise _Told(reason)


def _gather_all(store: dist.Store, file: Path, launch: Launch, deadline: float) -> str | None:
    """Waits for the greetings of all ranks, and tells the others whether the ranks can meet. Rank 0 calls it. Returns the reason if they cannot, or None."""
    missing: list[int] = []
    reason = None
    for _ in _looks(deadline):
        missing = [rank for rank in range(launch.world_size) if not have_greeted(store, [rank])]
        told = _told_by_others(file) if missing else []
        if told:
            words = told[0].read_text().strip()
            reason = f"rank {told[0].name.rpartition('-')[2]} ended while the ranks met: {words}"
            for path in told:
                path.unlink(missing_ok=True)
        elif not missing:
            texts = store.multi_get([key_of(rank) for rank in range(launch.world_size)])
            reason = describe_difference({rank: text.decode(errors="replace") for rank, text in enumerate(texts)})
        if reason is not None or not missing:
            break
    else:
        named = ", ".join(map(str, missing))
        reason = f"rank {named} did not come to rank 0 on {socket.gethostname()} in time; look at the output of the missing ranks first"
    store.set(*((_ALL, "") if reason is None else (_REASON, reason)))
    return reason


def _await_rank_0(store: dist.Store, launch: Launch, deadline: float) -> str | None:
    """Waits until rank 0 says that all ranks have come. The other ranks call it. Returns the reason if they cannot meet."""
    keys = [key_of(0), key_of(launch.rank)]
    for _ in _looks(deadline):
        if store.check([_REASON]):
            return store.get(_REASON).decode()
        if store.check([_ALL]):
            return None
        if store.check(keys):  # a rank 0 of another version may never answer
            texts = zip((0, launch.rank), store.multi_get(keys), strict=True)
            if (text := describe_difference({rank: text.decode(errors="replace") for rank, text in texts})) is not None:
                return text
    return f"rank {launch.rank}: not all ranks came to rank 0 in time; look at the output of rank 0 first"


def _reason_in(file: Path) -> str | None:
    """Returns the reason that rank 0 has published, or None."""
    with contextlib.suppress(OSError):
        text = file.read_text().strip()
        return text.removeprefix(_FAILED) if text.startswith(_FAILED) else None
    return None


def _meet_at_agent(launch: Launch, address: str, timeout: timedelta) -> dist.Store:
    """Returns the store of torchrun's agents, under a prefix that only the ranks of this start have."""
    try:
        store = _store_at(str(launch.master_addr), launch.master_port or 0, timeout)
        return meet(store, launch.rank, launch.world_size, timeout)
    except (RuntimeError, OSError) as error:
        raise LaunchError(_unreachable(launch, address, error)) from error


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Waits for all ranks of this start; collective.

    Every rank writes a random word. Rank 0 reads all words, some of which may be left from the previous start, and publishes the list. It publishes again if a
    word has changed, until every rank has answered the list. A rank answers only a list that has its own word. So once all
    ranks have answered a list, all its words are from this start.

    Returns the same store under a prefix that only the ranks of this start have. Raises TimeoutError if ranks have not come; rank 0's text names them.
    """
    word, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"{_PREFIX}/came/{rank}", word)
    words = _gather(store, world_size, deadline) if rank == 0 else _follow(store, rank, world_size, word, deadline)
    return dist.PrefixStore(f"salientpp/start/{words[0]}", store)


def _gather(store: dist.Store, world_size: int, deadline: float) -> list[str]:
    """Runs rank 0's side of :func:`meet`: publishes the list of all words until every rank has answered the same list. Returns the words."""
    came = [f"{_PREFIX}/came/{rank}" for rank in range(world_size)]
    answers = [f"{_PREFIX}/answer/{rank}" for rank in range(1, world_size)]
    published, missing = "", list(range(1, world_size))
    for _ in _looks(deadline):
        if absent := [rank for rank, key in enumerate(came) if not store.check([key])]:
            missing = absent
            continue
        words = [store.get(key).decode() for key in came]
        if (seen := json.dumps(words)) != published:
            store.set(f"{_PREFIX}/list", published := seen)
        missing = [
            rank
            for rank, key in enumerate(answers, 1)
            if not store.check([key]) or store.get(key).decode() != published
        ]
        if not missing:
            store.set(f"{_PREFIX}/agreed", published)
            return words
    raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come")


def _follow(store: dist.Store, rank: int, world_size: int, word: str, deadline: float) -> list[str]:
    """Runs the other ranks' side of :func:`meet`: answers rank 0's list as soon as it has this rank's word. Returns the words."""
    answered = ""
    for _ in _looks(deadline):
        if not store.check([f"{_PREFIX}/list"]):
            continue
        published = store.get(f"{_PREFIX}/list").decode()
        words = json.loads(published)
        if len(words) != world_size or words[rank] != word:
            continue
        if published != answered:
            store.set(f"{_PREFIX}/answer/{rank}", answered := published)
        if store.check([f"{_PREFIX}/agreed"]) and store.get(f"{_PREFIX}/agreed").decode() == published:
            return words
    raise TimeoutError("rank 0 or another rank did not come" if not answered else "not all other ranks came")


def _looks(deadline: float, longest_pause: float = _LONGEST_PAUSE) -> Iterator[None]:
    """Paces a loop that reads the store again and again: pauses between its rounds, ever longer, and ends it after the deadline."""
    pause = _PAUSE
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)


def _host(file: Path, launch: Launch, timeout: timedelta) -> tuple[dist.Store, str]:
    """Starts the key-value store on rank 0 and publishes its address. The store listens at a free port, and only at the address that other ranks use."""
    listener, host = _listen(launch)
    bound, port = listener.getsockname()[:2]
    own = "127.0.0.1" if bound in ("0.0.0.0", "::") else bound  # a host may be unable to resolve its own name
    # The store takes over the socket, and connects to it like every other rank.
    store = dist.TCPStore(
        own, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    address = f"{host}:{port}"
    _publish(file, address)
    return store, address


def _listen(launch: Launch) -> tuple[socket.socket, str]:
    """Returns a socket that listens on this host, and the name or address by which the other ranks reach it. GLOO_SOCKET_IFNAME chooses the interface."""
    interface = (os.environ.get("GLOO_SOCKET_IFNAME") or "").partition(",")[0]
    if launch.ranks_per_host == launch.world_size:
        return _bound("127.0.0.1"), "127.0.0.1"
    name = socket.gethostname()
    for address in filter(None, [address_of(interface)] if interface else addresses_of(name)):
        with contextlib.suppress(OSError):
            return _bound(address), address
    return _bound(""), name


def _bound(address: str) -> socket.socket:
    """Returns a socket that listens at a free port of this address; '' means all addresses of this host."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


def _publish(file: Path, text: str) -> None:
    try:
        replace_file(file, lambda new: new.write(f"{text}\n".encode()))
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot publish its address in {file} ({error.strerror}); pass a writable directory= that all hosts share"
        ) from None


def _find(file: Path, launch: Launch, timeout: timedelta) -> tuple[dist.Store, str]:
    """Connects to the store at the address that rank 0 has published. All ranks except rank 0 call it."""
    address, stale = None, 0
    for _ in _looks(time.monotonic() + timeout.total_seconds(), 1.0):
        try:
            address = file.read_text().strip()
            break
        except FileNotFoundError:
            pass
        except OSError as error:
            stale += 1
            if error.errno != errno.ESTALE or stale > _STALE_LOOKS:
                raise LaunchError(
                    f"rank {launch.rank} on {socket.gethostname()} cannot read {file}, in which rank 0 publishes its address ({error.strerror or error}); "
                    "pass a directory= that all hosts can read"
                ) from None
        # Listing a directory makes a network file system ask its server. A look-up of the name alone may be answered from a local cache.
        with contextlib.suppress(OSError):
            os.listdir(file.parent)
    else:
        raise LaunchError(
            f"rank {launch.rank} on {socket.gethostname()} has waited {timeout.total_seconds():g} s for {file}, in which rank 0 (on "
            f"{launch.master_addr}) publishes its address. Either rank 0 has not come so far (see its output first), or the "
            "hosts do not share this directory; then pass another as directory=, or set MASTER_PORT to a port that is free there"
        )
    if address.startswith(_FAILED):
        raise _Told(f"rank {launch.rank}: rank 0 ended while the ranks met: {address.removeprefix(_FAILED)}")
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise LaunchError(
            f"rank {launch.rank} on {socket.gethostname()}: {file} must hold the address of rank 0 as HOST:PORT, got {address[:80]!r}; "
            "if rank 0 runs another version of salientpp, install the same version on every host; otherwise remove the file and start again"
        )
    try:
        # Some hosts do not know their own name as other hosts do. SLURM's name is then the second choice.
        host = _resolvable(host, launch.master_addr)
        return _store_at(host, int(port), timeout), address
    except (RuntimeError, OSError) as error:
        raise LaunchError(_unreachable(launch, address, error)) from error


def _store_at(host: str, port: int, timeout: timedelta) -> dist.Store:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _resolvable(*hosts: str | None) -> str:
    for host in hosts:
        if host and not host.startswith("localhost"):
            try:
                socket.getaddrinfo(host, None)
                return host
            except OSError:
                pass
    return hosts[0] or "localhost"


def _connect(launch: Launch, address: str, backend: str, timeout: timedelta, meeting: dist.Store | str) -> None:
    """Initialises torch.distributed.

    Args:
        meeting: a store of this module, in which the ranks also compare their package versions, or the text of torch's ``init_method``.
    """
    store, method = (None, meeting) if isinstance(meeting, str) else (meeting, None)
    try:
        if store is not None:
            greet(store, launch.rank)
        dist.init_process_group(backend, method, timeout, launch.world_size, launch.rank, store)
        if store is not None:
            # Old versions of the package, which write no greeting, are found when the first loader is made.
            compare_greetings(store, range(launch.world_size), launch.rank, all_came=False)
    except DifferentVersions as error:
        raise LaunchError(str(error)) from None
    except (RuntimeError, OSError) as error:
        raise LaunchError(_unreachable(launch, address, error)) from error


def _unreachable(launch: Launch, address: str, error: Exception) -> str:
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    chosen = "; ".join(
        f"{name} is {os.environ.get(name) or 'not set'}" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    )
    first = first_line(error)
    return (
        f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()} could not connect to the others (rank 0 is at {address}): {first}. "
        f"If another rank has ended with an error, look there first. {chosen}: they name the network interface to use, among {interfaces} "
        "here. If the hosts' names resolve to an interface that does not connect them, set GLOO_SOCKET_IFNAME (for NCCL also "
        "NCCL_SOCKET_IFNAME) to an interface that does, on every rank"
    )
