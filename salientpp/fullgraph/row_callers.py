"""Says who called a torch function that the check of rows handles: the user's code, a layer of PyG, or this package."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType

import torch
import torch_geometric

from salientpp.fullgraph import parameters
from salientpp.nn import record, sizes
from salientpp.nn.undo import runs_in

OURS = f"{Path(__file__).parents[1]}/"
_TORCH, _PYG = (f"{Path(each).parent}/" for each in (torch.__file__, torch_geometric.__file__))
_KERNELS = ("pyg_lib", "torch_scatter", "torch_sparse", "torch_cluster", "torch_spline_conv")
LIBRARIES = _TORCH, _PYG, OURS, *(f"{Path(_PYG).parent}/{name}/" for name in _KERNELS)

#: PyG's layers, and its linear maps, one of which sorts rows by their type.
_LAYERS = f"{_PYG}nn/conv/", f"{_PYG}nn/dense/linear.py"

#: Files whose functions lie between a caller and the mode that checks its calls. They do not count as callers.
_ENTRIES = (
    __file__,
    contextlib.__file__,
    f"{OURS}fullgraph/row_check.py",
    f"{OURS}fullgraph/row_counts.py",
    parameters.__file__,
    record.__file__,
    sizes.__file__,
    torch.overrides.__file__,
    f"{_TORCH}_tensor.py",
    f"{_PYG}data/data.py",  # num_nodes of a batch reads a size
    f"{_PYG}data/storage.py",
)

#: Files whose functions call a part of a model, which the backward calls again.
_REPEATING = f"{OURS}fullgraph/recompute.py", f"{_TORCH}utils/checkpoint.py"


def is_exempt() -> bool:
    """True if the check need not try the function: this package or PyG's layers called it, maybe through libraries."""
    frame = _calling_frame()
    if frame is not None and frame.f_code.co_filename.startswith(OURS):
        return True
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LAYERS):
            return True
        is_module = isinstance(frame.f_locals.get("self"), torch.nn.Module)
        if not file.startswith(OURS) and (is_module or not file.startswith(LIBRARIES)):
            return False
        frame = frame.f_back
    return False


def is_of_user() -> bool:
    """True if the user's own code called the checked function, and no library in between."""
    frame = _calling_frame()
    return frame is not None and not frame.f_code.co_filename.startswith(LIBRARIES)


def is_of_template() -> bool:
    """True if a layer's method called the checked function that PyG has written from a template, into a file of its own."""
    frame = _calling_frame()
    return frame is not None and str(frame.f_globals.get("__name__")).endswith(("_propagate", "_edge_updater"))


def is_ours() -> bool:
    """True if this package's code called the checked function, for example to read attributes of a graph."""
    frame = _calling_frame()
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def is_repeated() -> bool:
    """True if the backward will run this code again. Ranks cannot ask each other there."""
    return runs_in(_REPEATING)


def running_module() -> tuple[torch.nn.Module | None, str]:
    """Returns the innermost module, outside this package, whose method is running, or None; and text for errors.

    The text names the innermost line of the user's code in this method or below it, such as `` (line 12 of model.py)``.
    It is empty without such a line.
    """
    frame: FrameType | None = sys._getframe(1)
    place = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not place and not file.startswith(LIBRARIES):
            place = f" (line {frame.f_lineno} of {Path(file).name})"
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and not file.startswith(OURS):
            return module, place
        frame = frame.f_back
    return None, place


def _calling_frame() -> FrameType | None:
    """Returns the stack frame that called the checked function, without the frames of the check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _ENTRIES:
        frame = frame.f_back
    return frame
