"""Runs whole scripts in tests without waiting seconds for each to import torch and PyG.

``python()`` is the path of an executable that replaces ``sys.executable``: ``[python(), "script.py", ...]``, also with
``-u``, ``-c`` and ``-m``. Each pytest process starts one server that has done the imports, and the executable asks
it for a fork. The fork takes the caller's arguments, environment, working directory and files 0 to 2, and runs the
script as ``__main__``. It ends as every interpreter does: threads, ``atexit``, objects held by ``__main__``, exit code.
The caller ends with the fork's exit code or signal, and passes SIGTERM and SIGINT on. If the caller is killed, so is the
script.

Some tests still need ``sys.executable``. They test how the interpreter starts, the effects of an import, variables that C
libraries read when they are loaded, or memory use. A process with threads must not fork, so the server starts none, and
``OMP_NUM_THREADS`` is applied to torch after the fork. The server does not support ``-W`` and ``PYTHONWARNINGS``, and
gives ``__main__`` no ``__loader__``. Its traceback of a script that does not compile has more lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1


# --- in a script -----------------------------------------------------------------------------------------------


def fork_helpers() -> None:
    """Makes the fork server and the resource tracker of ``multiprocessing`` forks of this process, instead of new interpreters.

    The process must have no threads at this time. As in a new interpreter, the helpers keep only the files that they are given.
    """
    from multiprocessing import util

    util.spawnv_passfds = _fork_helper


def _fork_helper(path: str, arguments: list[str], files: list[int]) -> int:
    import gc
    import traceback

    if pid := os.fork():
        return pid
    gc.freeze()  # a socket object of the script that was collected here would close a file that now has its number
    end = 3
    for number in sorted({*files, os.sysconf("SC_OPEN_MAX")}):
        os.closerange(end, number)
        end = max(end, number + 1)
    try:
        exec(arguments[arguments.index("-c") + 1], {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


# --- the process that asks for a script ------------------------------------------------------------------------


def python() -> str:
    """Path of the executable; the first call starts the server."""
    if not _started:
        _started.extend(_start())
    return os.path.join(_started[0].name, "python")


_started: list = []  # the temporary folder of the executable, and the server


def _start() -> tuple:
    import stat
    import subprocess
    import tempfile
    from pathlib import Path

    folder = tempfile.TemporaryDirectory(prefix="forked-python-")
    name = f"\0{folder.name}"  # an abstract socket, which has no file
    file = Path(folder.name) / "python"
    here = Path(__file__).parent
    file.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(here)!r})\n"
        f"from forked_python import ask\nask({name!r}, sys.argv[1:])\n"
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    paths = filter(None, [str(here.parents[1]), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    read, write = os.pipe()  # never read. Unlike /dev/null it cannot seek, and the stdout of most forks cannot either.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=write,
            pass_fds=[listener.fileno()],
        )
    os.close(read)
    os.close(write)
    return folder, server


def ask(name: str, arguments: list[str]) -> None:
    """Main function of the executable: has the server run the script, and ends as the script does."""
    # Signals are blocked until the script's process id is known here. The script may run and print before that.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(name)
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        server.sendall(json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n")
        answers = server.makefile()
        pid = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# --- the server ----------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> list[str]:
    """Forks for each request.

    Returns only in the forks, which act as new interpreters, and gives them the arguments that follow ``python``.
    """
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _bury)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        arguments, environment, folder = json.loads(connection.makefile().readline())
        if pid := os.fork():
            for file in files:
                os.close(file)
            _wait(pid, connection)
        connection.close()
        _die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        return arguments


def _bury(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _wait(pid: int, connection: socket.socket) -> None:
    """Sends the caller the process id and the exit code of the script; kills the script if the caller is gone."""
    import select

    end = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % pid)
    if end not in select.select([end, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % code)
    os._exit(0)


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def run(arguments: list[str], installed: list[str]) -> None:
    """Does what the interpreter does with its command line, in the namespace of ``__main__``."""
    import builtins
    import runpy
    import types

    import numpy
    import torch

    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count()))
    if arguments[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    arguments = arguments[arguments[0] == "-u" :]
    folder = os.path.dirname(os.path.abspath(arguments[0])) if arguments[0][:1] != "-" else ""
    sys.path[:] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        code, file = compile(arguments[1], "<string>", "exec"), {}
    else:
        sys.argv = arguments
        with open(arguments[0], "rb") as script:
            code, file = compile(script.read(), arguments[0], "exec"), {"__file__": arguments[0]}
    # A new module: older objects are frozen, and at exit the garbage collector must find the objects that the script holds.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    namespace = main.__dict__
    namespace.update(__builtins__=builtins, **file)
    exec(code, namespace)


if __name__ == "__main__":
    from pathlib import Path

    import uncollected  # noqa: F401  first

    import preloaded  # noqa: F401  isort: skip

    threads = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")}
    if len(threads - {"jemalloc_bg_thd"}) > 1:  # this thread is pyarrow's and stops for a fork
        raise RuntimeError(f"expected only the main thread in the process that forks scripts, got {threads}")
    own = len(os.environ["PYTHONPATH"].split(os.pathsep))
    run(serve(socket.socket(fileno=int(sys.argv[1]))), sys.path[1 + own :])
