"""Finds the statements of the package that order streams or keep memory, and removes one at a time.

The list is read from the source. So a new wait, event or record is on it without being named.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import salientpp

_ROOT = Path(salientpp.__file__).parent

#: Names of the functions whose calls order streams, keep memory, or make the host wait.
_CALLS = {
    "wait_event",
    "wait_stream",
    "record_stream",
    "record",
    "record_event",
    "synchronize",
    "_wait_for_default_stream",
    "hold_for_stream",
}

#: Statements that a module uses for something else, with the reason.
NO_GUARDS = {
    ("ways.planner.rates", "torch.accelerator.synchronize(device)"): "it measures time",
    ("launch.preemption", "self._work.wait()"): "it waits for another rank, on the host",
}


@dataclass(frozen=True)
class Guard:
    """A statement of a function, or a context that makes a stream current.

    Attributes:
        owner: class of the function, or ''.
        text: the statement, as ``ast.unparse`` writes it. For a context, the expression after ``with``.
        number: which of the function's guards with this text, from 0.
    """

    module: str
    owner: str
    function: str
    text: str
    number: int

    def __str__(self) -> str:
        place = ".".join(filter(None, [self.module, self.owner, self.function]))
        return f"{place}: {self.text}" + (f" ({self.number})" if self.number else "")


def guards() -> list[Guard]:
    """Returns all guards in the package."""
    found = []
    for path in sorted(_ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        source = path.read_text()
        if not any(name in source for name in (*_CALLS, "_default_stream", "tensors_in", "work.wait")):
            continue  # parsing all files would take seconds
        for owner, function in _functions(ast.parse(source)):
            numbers: Counter[str] = Counter()
            for node in ast.walk(function):
                text = _text(node, function.name)
                if text is not None:
                    found.append(Guard(module, owner, function.name, text, numbers[text]))
                    numbers[text] += 1
    return [guard for guard in found if (guard.module, guard.text) not in NO_GUARDS]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, inner) for inner in node.body if isinstance(inner, ast.FunctionDef))


def _text(node: ast.AST, function: str) -> str | None:
    """Returns the text of a guard, or None for any other node."""
    if isinstance(node, ast.With) and "_default_stream" in ast.unparse(node.items[0]):
        return ast.unparse(node.items[0])
    if not isinstance(node, ast.Expr):
        return None
    if function == "tensors_in" and isinstance(node.value, (ast.Yield, ast.YieldFrom)):
        return ast.unparse(node)
    called = node.value.func if isinstance(node.value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    if name == "to":  # a copy for the sake of torch's allocator of pinned memory
        return ast.unparse(node)
    return ast.unparse(node) if name in _CALLS or ast.unparse(node).endswith("work.wait()") else None


class _Removal(ast.NodeTransformer):
    def __init__(self, removed: ast.AST) -> None:
        self._removed = removed

    def visit(self, node: ast.AST) -> Any:
        if node is self._removed:
            return node.body if isinstance(node, ast.With) else ast.Pass()
        return self.generic_visit(node)


@contextlib.contextmanager
def removed(guard: Guard) -> Iterator[None]:
    """Removes a guard inside the ``with`` block."""
    module: Any = importlib.import_module(f"salientpp.{guard.module}")
    tree = ast.parse(Path(module.__file__).read_text())
    definition = next(node for owner, node in _functions(tree) if (owner, node.name) == (guard.owner, guard.function))
    nodes = [node for node in ast.walk(definition) if _text(node, guard.function) == guard.text]
    changed = _Removal(nodes[guard.number]).visit(definition)
    names: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(ast.Module([changed], [])), module.__file__, "exec")
    exec(code, module.__dict__, names)
    owners = [getattr(module, guard.owner)] if guard.owner else []
    before = (owners or [module])[0].__dict__[guard.function]
    # Other modules may have imported the function.
    package = [each for name, each in sys.modules.items() if name.startswith("salientpp.")]
    owners += [each for each in package if each.__dict__.get(guard.function) is before]
    for owner in owners:
        setattr(owner, guard.function, names[guard.function])
    try:
        yield
    finally:
        for owner in owners:
            setattr(owner, guard.function, before)
