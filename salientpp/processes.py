"""Threads, locks and connections that survive a fork: :class:`Lock`, :class:`Threads` with :class:`Task`, :func:`in_order` and :func:`connecting`.

A forked child has the parent's memory and one thread. The other threads are gone in the middle of what they did, and locks that they held stay held.
Locks and threads can be copied and pickled; the copy has its own.

OpenMP does not survive a fork either: a thread that has run a parallel region in the parent waits for ever in its first one in the child. Threads that
were started in the child do not, so what may compute in parallel is done there.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import torch


class _Owner(Protocol):
    def _after_fork(self) -> None: ...


_forks = 0
_thread = threading.local()
_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()
_connections: dict[int, int] = {}  # descriptor -> inode of the socket


def forks() -> int:
    """How many forks lie between the first process that imported this module and this one; what was made at another count was made before a fork."""
    return _forks


def after_fork(owner: _Owner) -> None:
    """Call ``owner._after_fork()`` in every child that is forked while ``owner`` lives."""
    _owners.add(owner)


def may_compute_in_parallel() -> bool:
    """Whether the calling thread has a working OpenMP; that of a forked child which was there before the fork need not have."""
    return not getattr(_thread, "was_forked", False)


def _in_child() -> None:
    global _forks
    _forks += 1
    _thread.was_forked = True
    _close_connections()
    for owner in list(_owners):
        owner._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# --- locks ------------------------------------------------------------------------------------------------


class Lock:
    """A reentrant lock.

    Attributes:
        interrupted: this process was forked while another thread held the lock, so what it guards may be half done.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._lock = threading.RLock()
        after_fork(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _after_fork(self) -> None:
        # The thread that forked goes on in the child, and gives back what it holds. Of others nothing is left.
        if not self._lock.acquire(blocking=False):
            self._lock, self.interrupted = threading.RLock(), True
        else:
            self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")


class lazy(Generic[T]):
    """A method's value, computed when it is first asked for and kept in the object.

    As ``functools.cached_property``, whose lock (one for all objects, up to Python 3.11) would stay held in a child that was forked meanwhile. Threads
    that ask at once may compute it several times.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, owner: object, kind: type | None = None) -> T:
        value = owner.__dict__[self._function.__name__] = self._function(owner)
        return value


# --- threads ----------------------------------------------------------------------------------------------


#: Held by a thread that begins.
_beginning = Lock()


def _begin() -> None:
    """What a thread does first, one thread at a time.

    A thread's first use of torch's threads sets their number, if the user has set one. In a forked child the first to do so also makes the pool anew,
    and another that asks meanwhile finds none and fails ("Invalid thread pool!", torch 2.13, caffe2/utils/threadpool/pthreadpool-cpp.cc).
    """
    with _beginning:
        torch.get_num_threads()


class Threads:
    """Up to ``number`` threads that do what they are given, in its order.

    At the exit of the interpreter, when no thread can be started any more, the caller's thread does it.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number, self._name = number, name
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._end: weakref.finalize | None = None
        after_fork(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Task:
        """Have ``function(*args)`` done."""
        return Task(self, function, args)

    def _start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future:
        try:
            with self._lock:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(self.number, thread_name_prefix=self._name, initializer=_begin)
                    self._end = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
                    self._end.atexit = False  # a rank whose script has ended may still be answering others
                return self._executor.submit(function, *args)
        except RuntimeError:  # the interpreter is exiting
            return completed(function, *args)

    def _after_fork(self) -> None:
        if self._end is not None:
            self._end.detach()  # its locks may be held by threads that are gone
        self._executor = self._end = None

    def __reduce__(self) -> tuple[type[Threads], tuple[int, str]]:
        return Threads, (self.number, self._name)


class Task:
    """What :class:`Threads` were given to do. In a child that was forked meanwhile it is done again, so it must not matter how often it is done."""

    def __init__(self, threads: Threads, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._threads, self._function, self._args = threads, function, args
        self._start()

    def _start(self) -> None:
        self._forks = _forks
        self._future = self._threads._start(self._function, self._args)

    def result(self) -> Any:
        """Wait for it; gives what the function returned, or raises what it raised."""
        if self._forks != _forks:
            self._start()
        return self._future.result()

    def cancel(self) -> None:
        """Leave it undone, if it has not begun."""
        if self._forks == _forks:
            self._future.cancel()


class Undone:
    """``function(*args)``, to be done by the thread that asks for the result; once."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function, self._args = function, args

    def result(self) -> Any:
        return self._function(*self._args)

    def cancel(self) -> None:
        """Nothing: nobody has begun."""


def completed(function: Callable[..., Any], *args: Any) -> Future:
    """``function(*args)``, done in the caller's thread, as the threads would hand it over."""
    future: Future = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


#: Items under way in :func:`in_order`, per thread.
_AHEAD = 4


def in_order(function: Callable[[In], Out], items: Iterable[In], name: str) -> Iterator[Out]:
    """``function`` of every item, computed by torch's number of threads a little ahead, in the order of the items.

    The caller may stop early. The garbage collector may then close this generator in any thread, also in one that begins and holds locks of
    :mod:`threading`. So nothing here waits for the threads at the end: a pool in a ``with`` block would, and both threads would wait forever.

    Args:
        items: taken in the caller's thread.
        name: of the threads.
    """
    threads = Threads(torch.get_num_threads(), name)
    under_way: deque[Task] = deque()
    for item in items:
        under_way.append(threads.submit(function, item))
        if len(under_way) > _AHEAD * threads.number:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


# --- connections ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Sockets that a communication library opens inside this block are closed in forked children and not handed to started programs.

    A process that holds a copy of a connection keeps it open when the one that uses it is killed, and then nobody notices. Linux only; else this
    does nothing. To take no socket of another thread for one of the library's, only those count that an epoll watches which appeared with them.
    """
    before = _open_files()
    yield
    new = {descriptor: inode for descriptor, inode in _open_files().items() if before.get(descriptor) != inode}
    watched = {target for descriptor in new for target in _watched_by(descriptor)}
    for descriptor, inode in new.items():
        if descriptor in watched and _is_socket(descriptor, inode):
            os.set_inheritable(descriptor, False)
            _connections[descriptor] = inode


def _open_files() -> dict[int, int]:
    """Descriptor -> inode."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    found = {}
    for name in names:
        with contextlib.suppress(OSError):  # that of the folder itself
            found[int(name)] = os.fstat(int(name)).st_ino
    return found


def _watched_by(descriptor: int) -> list[int]:
    """The descriptors that an epoll watches; of another file none."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            return [int(line.split()[1]) for line in file if line.startswith("tfd:")]
    except OSError:
        return []


def _is_socket(descriptor: int, inode: int) -> bool:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def _close_connections() -> None:
    for descriptor, inode in _connections.items():
        if _is_socket(descriptor, inode):  # else it was closed since, and the number may be another file's now
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _connections.clear()
