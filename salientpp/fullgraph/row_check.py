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
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.data.data import BaseData

from salientpp.fullgraph.outputs import tensors_of
from salientpp.fullgraph.rank_graph import RankGraph
from salientpp.fullgraph.row_callers import is_exempt, is_of_user, is_ours, running_module
from salientpp.fullgraph.row_counts import Count, shape_of, without_counts
from salientpp.fullgraph.row_findings import found_rows
from salientpp.fullgraph.row_trials import SIZES, Call, Family, Rows, results_of
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
        """Context of a call of the model on a rank's graph. Followed are ``x``, tensors in ``given`` with a row for each vertex, and attributes of edges.

        A rank that exchanges rows with no other has all rows, so nothing is checked there.
        """
        if graph.ranks.size == 1:
            yield
            return
        before = self._number, self._edge_index
        number, num_edges = graph.num_inner, graph.edge_index.size(1)
        self._number, self._edge_index = number, graph.edge_index
        self.follow(x)
        of_edges = {id(each) for each in graph.edge_tensors.values()}
        for tensor in tensors_given([given, graph.edge_tensors]):
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
            if self._number and tensor.dim() > dim >= -tensor.dim() and tensor.size(dim) == self._number:
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
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.size(0) == self._number and not is_ours():
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
        if key is None and is_exempt():
            return None
        if key not in self._verdicts:
            assert self._edge_index is not None
            found = found_rows(call, self._number, self._edge_index, self._older_rows)
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
        if not is_exempt():
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
        if rows is None or rows.marks or not is_of_user():
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
        owner, place = running_module()
        name = "the model's forward"
        if owner is not None:
            path = next((path for path, module in self._module.named_modules() if module is owner), "")
            name = name_of(owner, path)
        raise RowsMixed(
            f"this model cannot be trained over ranks: {what} in {name}{place} depends on the rows of several vertices, or on their number or order. A rank "
            "has only the rows of its own vertices. Between layers, compute each row separately, or use torch.nn.BatchNorm1d or torch.nn.LayerNorm; steps over "
            "all vertices belong outside the model's forward"
        )


def tensors_given(given: Any) -> Iterator[Tensor]:
    """Yields the tensors in the arguments of a model: in containers, and in objects of PyG."""
    for value in given:
        if isinstance(value, BaseData):
            yield from tensors_of([[*store.values()] for store in value.stores])
        elif isinstance(value, (list, tuple)):
            yield from tensors_given(value)
        elif isinstance(value, dict):
            yield from tensors_given(value.values())
        else:
            yield from tensors_of(value)


def _forget(
    followed: dict[int, tuple[weakref.ref[Tensor], Rows | None]], key: int, reference: weakref.ref[Tensor]
) -> None:
    if key in followed and followed[key][0] is reference:
        del followed[key]
