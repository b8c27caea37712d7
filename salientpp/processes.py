"""Threads, locks and connections that survive a fork: :class:`Lock`, :class:`Threads` with :class:`Task`, :func:`in_order` and :func:`connecting`.

A forked child has the parent's memory and a single thread. The other threads vanish in the middle of their work, and their locks stay held. The locks and
threads of this module can be copied and pickled; a copy has its own.

OpenMP does not survive a fork either. If the forking thread has run a parallel region before the fork, its first region in the child never ends. Threads
that were started in the child do not have this problem, so parallel work runs in such threads.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar, cast

import torch


class _Owner(Protocol):
    def _after_fork(self) -> None: ...


_forks = 0
_of_thread = threading.local()
_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()
_connections: dict[int, int] = {}  # descriptor -> inode of the socket


def forks() -> int:
    """Returns the number of forks between the first process that imported this module and the current process. It is 0 except in a forked child."""
    return _forks


def after_fork(owner: _Owner) -> None:
    """Registers ``owner`` so that every child forked during its lifetime calls ``owner._after_fork()``."""
    _owners.add(owner)


def may_compute_in_parallel() -> bool:
    """True if OpenMP works in the calling thread. False in the first thread of a forked child, where OpenMP may not work."""
    return not getattr(_of_thread, "was_forked", False)


def _in_child() -> None:
    global _forks
    _forks += 1
    _of_thread.was_forked = True
    _close_connections()
    for owner in list(_owners):
        owner._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


# --- locks ------------------------------------------------------------------------------------------------


class Lock(_thread.RLock):  # type: ignore[misc]  # final for typeshed, but not in any Python
    """A reentrant lock. It inherits the class in C, because methods in Python would take ten times as long.

    Attributes:
        interrupted: True if this process was forked while another thread held the lock. The guarded data may then be inconsistent.
    """

    def __init__(self) -> None:
        self.interrupted = False
        after_fork(self)

    def _after_fork(self) -> None:
        # The thread that called fork continues in the child, and releases the locks that it holds. The other threads do not exist in the child.
        if not self.acquire(blocking=False):
            self._at_fork_reinit()  # type: ignore[attr-defined]
            self.interrupted = True
        else:
            self.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


T = TypeVar("T")
Made = TypeVar("Made", bound=Callable[..., Any])
In = TypeVar("In")
Out = TypeVar("Out")


class lazy(Generic[T]):
    """Value of a method, computed on first use and stored in the object.

    Like ``functools.cached_property``, but without a lock. Up to Python 3.11, that function has one lock for all objects. In a child that is forked while a
    thread holds that lock, the lock stays held. If several threads ask for the value before it is stored, each of them may compute it.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, owner: object, kind: type | None = None) -> T:
        value = owner.__dict__[self._function.__name__] = self._function(owner)
        return value


# --- modes --------------------------------------------------------------------------------------------------


def outside_inference(function: Made) -> Made:
    """Decorates a function whose tensors outlive the call. If the caller is in inference mode, the function runs without gradients instead.

    A tensor that is made in inference mode can be written to in inference mode only, and never be saved for a backward pass.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **options)

    return cast(Made, call)


# --- threads ----------------------------------------------------------------------------------------------


#: Held by a thread while it starts.
_beginning = Lock()


def _begin() -> None:
    """Initialises torch in a new thread, one thread at a time.

    A thread's first use of torch's threads sets their number, if the user has set one. In a forked child, the first such use also recreates the pool.
    Another thread that uses the pool meanwhile finds none and fails ("Invalid thread pool!", torch 2.13, caffe2/utils/threadpool/pthreadpool-cpp.cc).
    """
    with _beginning:
        torch.get_num_threads()


class Threads:
    """Threads, at most ``number``, that run functions in the order of submission.

    At the exit of the interpreter, when no thread can be started, the caller's thread runs the functions.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number, self._name = number, name
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._end: weakref.finalize | None = None
        after_fork(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Task:
        """Submits ``function(*args)``, and returns the submitted call."""
        return Task(self, function, args)

    def _start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future:
        try:
            with self._lock:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(self.number, thread_name_prefix=self._name, initializer=_begin)
                    self._end = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
                    self._end.atexit = False  # a rank whose script has ended may still be answering other ranks
                return self._executor.submit(function, *args)
        except RuntimeError:  # the interpreter is exiting
            return completed(function, *args)

    def _after_fork(self) -> None:
        if self._end is not None:
            self._end.detach()  # its locks may be held by threads that do not exist here
        self._executor = self._end = None

    def __reduce__(self) -> tuple[type[Threads], tuple[int, str]]:
        return Threads, (self.number, self._name)


class Task:
    """A function call submitted to :class:`Threads`. A child that is forked later runs the call again, so running it twice must be harmless."""

    def __init__(self, threads: Threads, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._threads, self._function, self._args = threads, function, args
        self._start()

    def _start(self) -> None:
        self._forks = _forks
        self._future = self._threads._start(self._function, self._args)

    def result(self) -> Any:
        """Waits for the call. Returns what the function returned, or raises what it raised."""
        if self._forks != _forks:
            self._start()
        return self._future.result()

    def done(self) -> bool:
        """Returns True if :meth:`result` does not wait."""
        return self._forks == _forks and self._future.done()

    def cancel(self) -> None:
        """Cancels the call, if it has not begun."""
        if self._forks == _forks:
            self._future.cancel()


class Undone:
    """Call that is not submitted to a thread: it runs when ``result()`` is called, in the caller's thread. Stands in for a :class:`Task`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function, self._args = function, args

    def result(self) -> Any:
        return self._function(*self._args)

    def cancel(self) -> None:
        """Does nothing: a call that nobody asks for never runs."""


def completed(function: Callable[..., Any], *args: Any) -> Future:
    """Runs ``function(*args)`` at once in the caller's thread. Returns a completed future with its result or exception."""
    future: Future = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


#: Number of items in progress per thread in :func:`in_order`.
_AHEAD = 4


def in_order(function: Callable[[In], Out], items: Iterable[In], name: str) -> Iterator[Out]:
    """Yields ``function(item)`` for every item, in the order of the items. As many threads as torch uses compute a little ahead.

    The caller may stop early. The garbage collector may then close this generator in any thread, also in one that is starting and holds locks of
    :mod:`threading`. So nothing here waits for the threads at the end: a pool in a ``with`` block would wait, possibly
    forever, for threads that need those locks.

    Args:
        items: arguments of the calls, read in the caller's thread.
        name: name of the threads.
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
    """Opens a context for a communication library. Forked children and started programs do not keep its sockets.

    If a forked process held a copy of a connection, the connection would stay open when the process that uses it is killed. The other end
    would not notice. This works only on Linux, and does nothing elsewhere. Sockets that other threads open meanwhile must not be affected. So a new socket
    counts only if it is watched by an epoll that is new too.
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
    """Returns {descriptor: inode} of the files that this process has open. Empty if the system does not tell."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    found = {}
    for name in names:
        with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed by now
            found[int(name)] = os.fstat(int(name)).st_ino
    return found


def _watched_by(descriptor: int) -> list[int]:
    """Returns the descriptors that an epoll instance watches. Empty if ``descriptor`` is no epoll instance."""
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
        if _is_socket(descriptor, inode):  # otherwise it was closed, and its number may now belong to another file
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _connections.clear()
