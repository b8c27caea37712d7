"""The page of threads and global state names every thread that the sources start, and every file that keeps state of the process."""

import ast
import re
from pathlib import Path

import salientpp

PACKAGE = Path(salientpp.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

PAGE = (ROOT / "docs" / "design" / "threads.md").read_text()

#: Calls whose results are changed later: containers that begin empty, locks, counters.
CHANGING = {
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "count", "Lock", "RLock", "deque", "defaultdict", "Counter", "set", "dict", "list",
}  # fmt: skip


def bodies(tree):
    """Yields the bodies that run once for a process: the module's and those of its classes."""
    yield tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.body


def is_changing(value):
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).partition("[")[0].rpartition(".")[2]
    return name in CHANGING and (not value.args or name == "count")


def keeps_state(source):
    tree = ast.parse(source)
    assigned = [
        node.value
        for body in bodies(tree)
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    ]
    return any(map(is_changing, assigned)) or any(isinstance(node, ast.Global) for node in ast.walk(tree))


def thread_names(source):
    """Names of threads that the source passes to a call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            texts = [
                each for each in [*node.args, *(word.value for word in node.keywords)] if isinstance(each, ast.Constant)
            ]
            if function in ("Thread", "Threads", "in_order"):
                yield from (each.value for each in texts if isinstance(each.value, str) and "-" in each.value)


def named_files(section):
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return {*re.findall(r"`([\w/]+\.py)`", text)}


def test_the_page_lists_every_thread():
    found = {
        (name, str(path.relative_to(PACKAGE)))
        for path in SOURCES
        for name in thread_names(path.read_text())
        if "testing" not in path.parts
    }
    listed = {
        (name, file)
        for line in PAGE.splitlines()
        for name in re.findall(r"^\| `(salientpp-\w+)`", line)
        for file in re.findall(r"`([\w/]+\.py)`", line.split("|")[2])
    }
    assert len(found) > 15
    assert listed == found, "docs/design/threads.md must list each thread with the file that starts it"


def test_the_page_lists_every_file_with_state_of_the_process():
    found = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if "testing" not in path.parts and keeps_state(path.read_text())
    }
    assert (
        named_files("State of the process")
        - {"launch/preemption.py", "ways/planner/calibrate.py", "sessions/opening.py"}
        == found
    )


def test_every_file_of_the_page_exists():
    missing = [
        name
        for name in re.findall(r"`([\w/]+\.py)`", PAGE)
        if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ]
    assert not missing
