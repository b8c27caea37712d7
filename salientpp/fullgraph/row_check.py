"""Checks that a model computes each vertex's row separately between its layers.

A rank has the rows of its own vertices. Layers exchange rows and norms exchange sums, but ``h - h.mean(0)`` in a model would take the mean over one rank's
vertices. So while a distributed model runs, this mode follows rows of vertices through torch's functions. A function that is new to it is first tried twice
on a few of the rows, among other rows and in another order. If the results for a row differ, the function depends on other rows, on a row's position or
on the number of rows, and is refused. The findings are kept, so later steps pay for a look-up only.

Functions inside ``propagate`` and in PyG's own layers are not tried. The first see rows of edges. ``tests/fullgraph/test_layers.py`` compares the second.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch_geometric
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.data.data import BaseData

import salientpp
from salientpp.fullgraph import parameters
from salientpp.fullgraph.outputs import tensors_of
from salientpp.fullgraph.rank_graph import RankGraph
from salientpp.fullgraph.row_counts import Count, shape_of, without_counts
from salientpp.fullgraph.row_trials import SIZES, Call, Family, Mixes, Rows, compared, results_of
from salientpp.nn import record
from salientpp.nn.layers import name_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Numbers of rows whose trials are remembered.
_MOST_FAMILIES = 64


class RowsMixed(ValueError):
    """Raised if a function between the layers of a distributed model depends on the rows of several vertices."""


#: Functions whose results have values of rows in another form than tensors.
_READS = _words(
    "item tolist numpy __array__ __dlpack__ __bool__ __int__ __float__ __index__ __complex__ __contains__ equal allclose is_nonzero __len__"
)

#: Functions that look at no values, or whose results the graph of gradients does not follow.
_HARMLESS = _words(
    "dim ndimension stride storage_offset data_ptr untyped_storage storage element_size type get_device requires_grad_ retain_grad backward is_contiguous "
    "is_floating_point is_complex is_pinned is_shared is_inference is_same_size is_signed has_names result_type can_cast promote_types is_tensor share_memory_ "
    "__repr__ __format__ __hash__ __set__ __delete__ __setstate__ __reduce_ex__ __deepcopy__ register_post_accumulate_grad_hook"
)

#: Properties that are tensors.
_TENSORS = frozenset(["T", "mT", "H", "mH", "data", "real", "imag"])

#: Functions that sum rows of edges by their targets, or write them there.
_SCATTERS = frozenset(
    f"{name}{end}"
    for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce")
    for end in ("", "_")
)

_TORCH, _PYG, _OURS = (
    f"{Path(each).parent}/" for each in (torch.__file__, torch_geometric.__file__, salientpp.__file__)
)
_KERNELS = ("pyg_lib", "torch_scatter", "torch_sparse", "torch_cluster", "torch_spline_conv")
_LIBRARIES = _TORCH, _PYG, _OURS, *(f"{Path(_PYG).parent}/{name}/" for name in _KERNELS)

#: PyG's layers, and its linear maps, one of which sorts rows by their type.
_LAYERS = f"{_PYG}nn/conv/", f"{_PYG}nn/dense/linear.py"

#: Files that lie between a caller and this mode.
_ENTRIES = __file__, parameters.__file__, record.__file__, torch.overrides.__file__, f"{_TORCH}_tensor.py"


class RowCheck(TorchFunctionMode):
    """Follows rows through a model, and refuses functions that depend on several vertices.

    Args:
        module: the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._followed: dict[int, tuple[weakref.ref[Tensor], Rows | None]] = {}
        self._families: dict[tuple[str, int], Family] = {}
        self._verdicts: dict[Any, list[Rows | None] | None] = {}  # None: depends on other rows
        self._edge_index: Tensor | None = None
        self._number = 0  # of vertices; 0 between calls
        self._off = self._assumes = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCheck:
        return RowCheck(copy.deepcopy(self._module, memo))

    # --- calls ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, x: Tensor, given: Any, graph: RankGraph) -> Iterator[None]:
        """Context of a call of the model on a rank's graph. Followed are ``x``, tensors in ``given`` with a row for each vertex, and attributes of edges."""
        before = self._number, self._edge_index
        number, num_edges = graph.num_inner, graph.edge_index.size(1)
        self._number, self._edge_index = number, graph.edge_index
        self.follow(x)
        of_edges = {id(each) for each in graph.edge_tensors.values()}
        for tensor in tensors_in([given, graph.edge_tensors]):
            # If a rank has as many edges as vertices, nobody says which of them a tensor describes.
            if type(tensor) is not Tensor or tensor is graph.edge_index or not tensor.dim() or number == num_edges:
                continue
            if tensor.size(0) == number and id(tensor) not in of_edges:
                self.follow(tensor)
            elif tensor.size(0) == num_edges and tensor.is_floating_point():
                self._mark(tensor, Rows(self._family("edges", num_edges)))
        try:
            with self:
                yield
        finally:
            self._number, self._edge_index = before

    def follow(self, out: Any, dim: int = 0) -> None:
        """Follows tensors with a row for each vertex along ``dim``."""
        for tensor in tensors_of(out):
            if tensor.dim() > dim >= -tensor.dim() and tensor.size(dim) == self._number:
                self._mark(tensor, Rows(self._family("vertices", self._number), dim % tensor.dim()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context of functions that are not followed."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def unfollowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs within :meth:`paused`."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*without_counts(args), **without_counts(kwargs))

        return run

    def _family(self, what: str, number: int) -> Family:
        key = what, number
        if len(self._families) > _MOST_FAMILIES:
            self._families.clear()
        if key not in self._families:
            self._families[key] = Family.of(number, what, SIZES if what == "vertices" else (4, 11))
        return self._families[key]

    def _note_made(self, out: Any) -> None:
        """Notes that tensors were made in this call of the model. If they have a row for each vertex, nobody else says which."""
        for tensor in [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ():
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.size(0) == self._number and not _is_ours():
                self._mark(tensor, None)

    def _is_older(self, tensor: Tensor) -> bool:
        """Returns True for a tensor with as many rows as vertices that was not made in this call. The user may have made it for the rank's vertices."""
        if not tensor.dim() or tensor.size(0) != self._number:
            return False
        found = self._followed.get(id(tensor))
        return found is None or found[0]() is not tensor

    def _older_rows(self, tensor: Tensor) -> Rows | None:
        return Rows(self._family("vertices", self._number)) if self._is_older(tensor) else None

    def _mark(self, tensor: Tensor, rows: Rows | None) -> None:
        key = id(tensor)
        forget = functools.partial(_forget, self._followed, key)
        self._followed[key] = weakref.ref(tensor, forget), rows

    def _rows_of(self, value: Any) -> Rows | None:
        found = self._followed.get(id(value))
        if found is not None and found[0]() is value:
            return found[1]
        if self._assumes and isinstance(value, Tensor) and value.dim() and value.size(0) == self._number:
            return Rows(self._family("vertices", self._number))
        return None

    # --- functions ------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off or not self._number:
            return func(*without_counts(args), **without_counts(kwargs))
        call = Call(func, args, kwargs, self._rows_of)
        is_known = self._describe(args, call) & self._describe(kwargs, call)
        if not call.rows and not call.counts:
            out = func(*args, **kwargs)
            if not call.has_older:
                self._note_made(out)
            return out
        name = call.name
        if name in _HARMLESS or (call.is_property and name != "shape" and name not in _TENSORS):
            return func(*without_counts(args), **without_counts(kwargs))
        if name in ("shape", "size", "numel", "nelement", "__len__"):
            return self._sizes(name, func, args, kwargs)
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if name == "register_hook":
            return func(args[0], self._checked_hook(*args[1:], **kwargs))
        if name in _READS and call.rows:
            self.refuse(f"{name}, which reads values of rows,")
        verdict = self._verdict(call, tuple(call.key) if is_known else None)
        args, kwargs = without_counts(args), without_counts(kwargs)
        out = func(*args, **kwargs)
        results = [*results_of(name, out, args, kwargs)]
        self._note_made(results)
        if verdict is None:  # called by a layer of PyG
            self.follow(results)
            return out
        families = {family.what: family for family in call.families()}
        for tensor, rows in zip(results, verdict):
            if rows is not None:
                family = families.get(rows.family.what, rows.family)
                self._mark(tensor, rows if rows.family is family else replace(rows, family=family))
        return out

    def _verdict(self, call: Call, key: Any) -> list[Rows | None] | None:
        """Returns the rows of each tensor of a function's result, and of each that it writes; None if a layer of PyG calls a function that depends on more.

        Args:
            key: what the verdict depends on; None: on values of tensors.

        Raises:
            RowsMixed: the function depends on other rows.
        """
        if key is None and _is_exempt():
            return None
        if key not in self._verdicts:
            found = self._tried(call)
            if key is None or call.selects:
                if found is None:
                    self._refuse_unless_exempt(call.name)
                return found
            self._verdicts[key] = found
        found = self._verdicts[key]
        if found is None:
            self._refuse_unless_exempt(call.name)
        return found

    def _refuse_unless_exempt(self, name: str) -> None:
        if not _is_exempt():
            self.refuse(name)

    def _describe(self, value: Any, call: Call) -> bool:
        """Adds what a verdict depends on to a call. Returns False if it depends on values of tensors."""
        key = call.key
        if isinstance(value, Tensor):
            rows = self._rows_of(value)
            if rows is not None:
                call.rows.append(rows)
                sizes = value.shape[: rows.lead], value.shape[rows.lead + 1 :]
                key += [rows.family.what, min(rows.family.number, 4), rows.factor, rows.marks, sizes, value.dtype]
                return True
            key += [value.shape, value.dtype]
            if self._is_older(value):
                call.has_older = True
                return False
            return value.is_floating_point() or not value.dim()
        if isinstance(value, Count):
            call.counts.append(value)
            key += [value.family.what, value.form]
            return value.form is not None
        if isinstance(value, (list, tuple)):
            key.append(len(value))
            return False not in [self._describe(each, call) for each in value]
        if isinstance(value, dict):
            key += value
            return False not in [self._describe(each, call) for each in value.values()]
        if isinstance(value, slice):
            return self._describe((value.start, value.stop, value.step), call)
        key += [type(value), value if getattr(value, "__hash__", None) else id(value)]
        return True

    def _sizes(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns sizes of a followed tensor. The user's code gets a :class:`Count` for the number of rows."""
        rows = self._rows_of(args[0])
        out = func(*args, **kwargs)
        if rows is None or rows.marks or not _is_of_user():
            return out
        if name == "__len__":
            if rows.lead:
                return out
            self.refuse("len(), a number of rows that is used as a number (use size(0) for sizes),")
        count = Count.rows(rows.family, rows.factor, self.refuse)
        if name in ("numel", "nelement"):
            return count * (out // max(1, count.value))
        if isinstance(out, int):
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return count if dim % args[0].dim() == rows.lead else out
        return shape_of(count if dim == rows.lead else size for dim, size in enumerate(out))

    # --- trials ---------------------------------------------------------------------------------------------

    def _tried(self, call: Call) -> list[Rows | None] | None:
        """Tries a function. Returns the rows of each tensor of its result, and of each that it writes; None if it depends on other rows."""
        name, rows = call.name, call.rows
        if name in ("any", "all") and rows and rows[0].marks:
            return []
        found = self._known(call)
        if found is not None:
            return found
        try:
            return compared(call, self._number, self._older_rows)
        except Mixes as error:
            is_reduced = bool(error.args) and error.args[0] == "reduced"
            if not rows and not is_reduced:  # positions, such as arange(n), which no rows can be combined with
                return []
            if not error.args and all(each.family.what == "edges" for each in rows):
                return []
            return None

    def _known(self, call: Call) -> list[Rows | None] | None:
        """Returns the rows of results of functions that refer to edges or select rows; None for other functions."""
        name, args = call.name, call.args
        tensors = [*tensors_of([args, call.kwargs])]
        index = [each for each in tensors if each.dtype in (torch.int64, torch.int32) and self._rows_of(each) is None]
        rows = self._rows_of(args[0]) if args else None
        if rows is None or rows.lead or rows.family.what == "edges":
            return None
        if name in _SCATTERS and index:
            is_pooling = any(
                (other := self._rows_of(each)) is not None and other.family.what != "edges" for each in tensors[1:]
            )
            return None if is_pooling or not self._is_of_targets(index[0]) else [rows]
        if name in ("index_select", "__getitem__") and index:
            last = args[-1] if name == "__getitem__" else index[0]
            return [None] if last is index[0] and self._is_of_targets(last) else None
        mask = args[1] if name in ("__getitem__", "__setitem__") else None
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 1 and rows.factor == 1:
            theirs = self._rows_of(mask) or self._older_rows(mask)
            if theirs is not None and theirs.family.what == rows.family.what and theirs.factor == 1:
                selected = self._selected(rows.family, mask)
                given = None if name == "__getitem__" else self._rows_of(args[2])
                call.selects = name == "__getitem__" or given is not None
                if name == "__getitem__":
                    return [Rows(selected)]
                if given is not None and given.family.what == selected.what and not given.lead and given.factor == 1:
                    return [rows]
        return None

    def _is_of_targets(self, index: Tensor) -> bool:
        """Returns True if ``index`` has the targets of the graph's edges, perhaps followed by those of self-loops."""
        assert self._edge_index is not None
        own = self._edge_index[1]
        index = index.select(1, 0) if index.dim() == 2 and index.size(1) else index
        return (
            index.dim() == 1 and index.numel() >= own.numel() and torch.equal(index[: own.numel()], own.to(index.dtype))
        )

    def _selected(self, family: Family, mask: Tensor) -> Family:
        """Returns the family of the rows that a mask selects."""
        what = f"{family.what}, selected by {hash(mask.detach().cpu().numpy().tobytes())}"
        number = int(mask.sum())
        return Family.of(number, what, (5, 13))

    # --- gradients ------------------------------------------------------------------------------------------

    def _checked_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a hook that runs under the check. A hook that returns nothing changes no gradient, and may compute anything."""
        checked = self._checked(f"a hook of gradients ({getattr(hook, '__name__', hook)})", hook)

        def run(gradient: Tensor) -> Any:
            try:
                return checked(gradient)
            except RowsMixed:
                if hook(gradient) is None:
                    return None
                raise

        return run

    def check_functions(self, nodes: list[Any]) -> None:
        """Makes the backward of the user's ``torch.autograd.Function`` run under the check, for nodes of the graph of gradients."""
        for node in nodes:
            kind = getattr(type(node), "_forward_cls", None)
            if kind is not None and not kind.__module__.startswith(("salientpp.", "torch.", "torch_geometric.")):
                node.apply = self._checked(f"the backward of {kind.__name__}", node.apply)

    def _checked(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of gradients that runs under the check. All tensors in it with as many rows as this rank has vertices have rows of vertices."""
        state = self._number, self._edge_index, True

        def run(*gradients: Any) -> Any:
            before = self._number, self._edge_index, self._assumes
            self._number, self._edge_index, self._assumes = state
            try:
                with self:
                    return function(*gradients)
            except RowsMixed as error:
                raise RowsMixed(f"{error}. It was called in {what}") from None
            finally:
                self._number, self._edge_index, self._assumes = before

        return run

    # --- errors ---------------------------------------------------------------------------------------------

    def refuse(self, what: str) -> NoReturn:
        owner, place = self._caller()
        name = "the model's forward"
        if owner is not None:
            path = next((path for path, module in self._module.named_modules() if module is owner), "")
            name = name_of(owner, path)
        raise RowsMixed(
            f"this model cannot be trained over ranks: {what} in {name}{place} depends on the rows of several vertices, or on their number or order. A rank "
            "has only the rows of its own vertices. Between layers, compute each row separately, or use torch.nn.BatchNorm1d or torch.nn.LayerNorm; steps over "
            "all vertices belong outside the model's forward"
        )

    def _caller(self) -> tuple[torch.nn.Module | None, str]:
        """Returns the module that is running, and the line of the user's code in it that called the function."""
        frame: Any = sys._getframe(1)
        place = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not place and not file.startswith(_LIBRARIES):
                place = f" (line {frame.f_lineno} of {Path(file).name})"
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and not file.startswith(_OURS):
                return module, place
            frame = frame.f_back
        return None, place


def _is_exempt() -> bool:
    """Returns True if code of this package or of one of PyG's layers has called the function, perhaps through functions of PyG and torch."""
    frame = _calling_frame()
    if frame is not None and frame.f_code.co_filename.startswith(_OURS):
        return True
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LAYERS):
            return True
        is_module = isinstance(frame.f_locals.get("self"), torch.nn.Module)
        if not file.startswith(_OURS) and (is_module or not file.startswith(_LIBRARIES)):
            return False
        frame = frame.f_back
    return False


def _is_of_user() -> bool:
    """Returns True if the user's code, and no library, has called the function."""
    frame = _calling_frame()
    return frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES)


def _is_ours() -> bool:
    """Returns True if code of this package called the function: attributes of a graph are of its vertices."""
    frame = _calling_frame()
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def _calling_frame() -> FrameType | None:
    """Returns the frame of the code that called the function which the running mode handles."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _ENTRIES:
        frame = frame.f_back
    return frame


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yields the tensors in the arguments of a model: in containers, and in objects of PyG."""
    for value in given:
        if isinstance(value, BaseData):
            yield from tensors_of([[*store.values()] for store in value.stores])
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        else:
            yield from tensors_of(value)


def _forget(
    followed: dict[int, tuple[weakref.ref[Tensor], Rows | None]], key: int, reference: weakref.ref[Tensor]
) -> None:
    if key in followed and followed[key][0] is reference:
        del followed[key]
