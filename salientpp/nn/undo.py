"""Notes what the running call of a trimmed model changes, so that an interrupt at any moment can be undone.

A handler of a signal may raise at any line: before a ``try`` begins, or within ``finally``. So each change is noted before it is made, and its note is removed
after it was undone. The next call undoes what is still noted. Undoing a change twice, or one that was not made, has no effect.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _pop_mode as _pop_torch_dispatch_stack

Undo = Callable[[], object]


class _Calls(threading.local):
    """Outermost running call of a trimmed model, per thread: its Python frame (or None), and notes of its changes."""

    frame: Any = None

    def __init__(self) -> None:
        self.notes: list[Undo] = []


_calls = _Calls()


def begin(frame: Any) -> None:
    """Begins a call, which ends with :func:`end` or when ``frame`` does."""
    _calls.frame = frame
    guard = torch._C.DisableTorchFunction()
    with guard:  # it then holds whether torch functions are enabled, and its exit restores this
        note(functools.partial(guard.__exit__, None, None, None))


def end() -> None:
    """Ends the running call of a trimmed model in this thread. Undoes the changes that it noted and did not undo, the last one first."""
    notes = _calls.notes
    while notes:
        notes[-1]()
        notes.pop()
    _calls.frame = None


def is_running() -> bool:
    """Returns True if a trimmed model is being called in this thread. Ends a call that an interrupt left behind, because torch calls no hooks then."""
    begun = _calls.frame
    if begun is None:
        return False
    frame: Any = sys._getframe()
    while frame is not None and frame is not begun:
        frame = frame.f_back
    if frame is None:
        end()
    return frame is not None


def runs_in(files: Collection[str], until: Any = None) -> bool:
    """Returns True if a function of one of these files is running in this thread, inside frame ``until`` if this is given."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame is not until:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def note(undo: Undo) -> None:
    """Notes how to undo the change that the caller makes next. Does nothing outside a call."""
    if _calls.frame is not None:
        _calls.notes.append(undo)


def undo_noted(undo: Undo) -> None:
    """Undoes a change and removes its note. Before that, it undoes later changes whose notes an interrupt has left."""
    notes = _calls.notes
    if undo not in notes:
        undo()
        return
    while undo in notes:
        notes[-1]()
        notes.pop()


class Noted:
    """Base class of torch modes that :func:`undo_noted` can remove after an interrupt. List it before torch's class."""

    def __enter__(self) -> Any:
        if not isinstance(self, TorchFunctionMode):
            # torch's flags that tell whether a dispatch mode is active. An interrupted __enter__ leaves them set.
            self._flags = {name: value for name, value in vars(_python_dispatch).items() if type(value) is bool}
        note(self._remove)
        return super().__enter__()  # type: ignore[misc]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[misc]
        undo_noted(self._remove)  # torch removes the mode on top, which may be another one that an interrupt left

    def _remove(self) -> None:
        """Removes the mode from torch's stack, wherever it is."""
        if isinstance(self, TorchFunctionMode):
            number, at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
            pop, push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
        else:
            number, at = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at
            pop, push = _pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack
        above: list[Any] = []
        while any(at(k) is self for k in range(number())):
            mode = pop()
            if mode is not self:
                above.append(mode)
        while above:
            push(above.pop())
        if isinstance(self, TorchFunctionMode):
            return
        vars(_python_dispatch).update(self._flags)
        told = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
        if told is not None:
            told(self._flags.get("_is_in_any_mode_without_ignore_compile_internals", False))


class NotedDispatch(Noted, _python_dispatch.TorchDispatchMode):
    """Dispatch mode that calls ``_dispatch(func, args, kwargs)`` for each operation.

    Function modes, which record what the model calls, do not see the functions that ``_dispatch`` calls.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError
