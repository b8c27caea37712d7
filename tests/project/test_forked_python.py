"""Laws of the interpreters that tests fork: a script behaves as in a fresh interpreter, and ends with its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import distributed
import forked_python
import huge_pages
import pytest
import torch
from distributed import HANG
from forked_python import python

SHOWS = """
import os, sys
print(__name__, __spec__, sys.argv, os.getcwd(), os.environ.get("TOLD"), sys.path[0] or os.getcwd(), sys.stdin.read())
print("to stderr", file=sys.stderr)
"""
ENDS = """
import atexit, threading, time
class Held:
    def __del__(self):
        print("held by __main__")
held = Held()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""
SCRIPTS = {
    "shows": SHOWS,
    "ends": ENDS,
    "number": "print('said'); raise SystemExit(7)",
    "words": "raise SystemExit('words')",
    "error": "def f():\n    1 / 0\nf()",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "aborted": "import os; os.abort()",
    "interrupted": "raise KeyboardInterrupt",
    "excepthook": "import sys; sys.excepthook = lambda kind, *_: print(kind); raise LookupError",
    "errors": "import sys; sys.stdout.reconfigure(errors='replace'); print('said')",
    "forks": "import os\nif os.fork():\n    os.wait()\nprint('end')",
}


#: First words of nanobind's report at exit. Triton is built with nanobind, and its frozen objects are not freed.
NANOBIND = ("nanobind: ", "See https://nanobind.")


def ended(executable: str, *arguments: object, **options: object) -> tuple:
    """Exit code, stdout, and stderr without the frames of a traceback and without nanobind's report."""
    environment = {**os.environ, "TOLD": "it"}
    done = subprocess.run(
        [executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        input="input",
        env=environment,
        timeout=HANG,
        **options,
    )
    return (
        done.returncode,
        done.stdout,
        [line for line in done.stderr.splitlines() if line[:1] != " " and not line.startswith(NANOBIND)],
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_in_a_fresh_interpreter(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    forms = [[script, "a", "-b"], ["-u", script], ["-c", SCRIPTS[name], "c"]]
    for arguments in forms if name in ("shows", "ends", "error") else forms[:1]:
        found = ended(python(), *arguments, cwd=tmp_path)
        assert found == ended(sys.executable, *arguments, cwd=tmp_path)


def test_a_module_runs_as_in_a_fresh_interpreter(tmp_path):
    (tmp_path / "module.py").write_text("import sys; print(__name__, __file__, sys.argv); sys.exit(3)")
    for executable in (python(), sys.executable):
        assert ended(executable, "-m", "module", "a", cwd=tmp_path) == (
            3,
            f"__main__ {tmp_path / 'module.py'} {[str(tmp_path / 'module.py'), 'a']}\n",
            [],
        )


def test_slow_imports_are_already_done():
    code = "import sys; print('preloaded' in sys.modules, 'salientpp.loader.node_loader' in sys.modules)"
    assert ended(python(), "-c", code)[:2] == (0, "True True\n")
    assert distributed.run(_preloaded, 1) == [not torch.cuda.is_available()]


#: A script whose fork server is a fork. It prints whether the fork server is, and how often it holds the file of the first argument.
FORKS_A_SERVER = """
import multiprocessing.forkserver, os, sys
import forked_python
held = open(sys.argv[1], "w")
forked_python.fork_helpers()
context = multiprocessing.get_context("forkserver")
process = context.Process(target=print, args=("printed",))
process.start()
process.join()
of_server = f"/proc/{multiprocessing.forkserver._forkserver._forkserver_pid}"
files = [os.readlink(f"{of_server}/fd/{number}") for number in os.listdir(f"{of_server}/fd")]
print(open(f"{of_server}/cmdline").read() == open("/proc/self/cmdline").read(), files.count(sys.argv[1]))
"""


def test_a_fork_server_that_is_a_fork_holds_no_other_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(forked_python.__file__))
    assert ended(python(), "-c", FORKS_A_SERVER, tmp_path / "held") == (0, "printed\nTrue 0\n", [])


#: A script with 8 MB in memory, and 8 MB of which few pages are. It prints whether its memory grew by less than 1 MB, and whether it kept its values.
COLLAPSES = """
import mmap
import huge_pages
def pages():
    return int(open("/proc/self/statm").read().split()[1])
block, values = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), bytes(range(256)) * (8 << 12)
block[: 8 << 20] = values
block[8 << 20 :: 1 << 20] = bytes(8)
before = pages()
huge_pages.collapse()
print((pages() - before) * mmap.PAGESIZE < 1 << 20, block[: 8 << 20] == values)
"""


def test_huge_pages_change_no_value_and_no_resident_memory(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(huge_pages.__file__))
    assert ended(sys.executable, "-c", COLLAPSES) == (0, "True True\n", [])


@pytest.mark.rare
def test_ranks_are_new_interpreters_where_torch_finds_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert distributed.run(_preloaded, 1) == [False]


def _preloaded(rank: int) -> bool:
    return "preloaded" in sys.modules


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_caller_ends_the_script(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    with subprocess.Popen(
        [python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as asking:
        pid = int(asking.stdout.readline())
        asking.send_signal(number)
        assert asking.wait(HANG) == -number
    while os.path.exists(f"/proc/{pid}"):  # if the script survived, the test would hang here
        time.sleep(0.01)
