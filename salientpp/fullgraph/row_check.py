"""Checks that a model computes each vertex's row separately between its layers.

A rank has the rows of its own vertices. Layers exchange rows and norms exchange sums, but ``h - h.mean(0)`` in a model would take the mean over one rank's
vertices. So while a distributed model runs, this mode follows rows of vertices through torch's functions. A function that is new to it is first tried twice
on a few of the rows, among other rows and in another order. If the results for a row differ, the function depends on other rows, on a row's position or
on the number of rows, and is refused. The findings are kept, so later steps pay for a look-up only.

Questions about integers and booleans of all vertices, such as ``mask.any()``, get the answer for the vertices of all ranks. So all ranks take the same branch.

Functions inside ``propagate`` are not tried, because they see rows of edges. Functions in PyG's own layers are not tried either, because
``tests/fullgraph/test_layers.py`` tests these layers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.data.data import BaseData
from torch_geometric.nn.conv import MessagePassing

from salientpp.fullgraph.outputs import output_tensors
from salientpp.fullgraph.rank_graph import RankGraph
from salientpp.fullgraph.row_callers import is_exempt, is_of_user, is_ours, is_repeated, running_module
from salientpp.fullgraph.row_counts import Count, shape_of, without_counts
from salientpp.fullgraph.row_findings import SUMS, found_rows, number_of_edges, over_ranks
from salientpp.fullgraph.row_trials import SIZES, Call, Family, Rows, is_discrete, results_of
from salientpp.nn.layers import Replaced, name_of
from salientpp.nn.trim import trimming_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Most families of rows, and most findings, that are remembered. A model may give other numbers of rows to its functions in each step.
_MOST_FAMILIES, _MOST_VERDICTS = 64, 4096


_OF_OTHER_LAYER = "of a layer that is no module of the model (make it in __init__, and keep it as an attribute or in a ModuleList, not in a list)"
_ADVICE = (
    "A rank has only the rows of its own vertices. Between layers, compute each row separately, or use torch.nn.BatchNorm1d or torch.nn.LayerNorm; steps over "
    "all vertices, and numbers for logs, belong outside the model's forward. Return the rows that they need; salientpp.fullgraph.loss_mean gives the mean "
    "over all ranks"
)


class RowsMixed(ValueError):
    """Raised if a function between the layers of a distributed model depends on the rows of several vertices."""


#: Functions that return values of rows in another form than tensors.
_READS = _words(
    "item tolist numpy __array__ __dlpack__ __bool__ __int__ __float__ __index__ __complex__ __contains__ equal allclose is_nonzero __len__"
)

#: Functions and properties that tell how much memory the rows take. It depends on their number.
_BYTES = _words("nbytes storage untyped_storage")

#: Functions that look at no values, or whose results the graph of gradients does not follow.
_HARMLESS = _words(
    "dim ndimension stride storage_offset data_ptr untyped_storage storage element_size type get_device requires_grad_ retain_grad backward is_contiguous "
    "is_floating_point is_complex is_pinned is_shared is_inference is_same_size is_signed has_names result_type can_cast promote_types is_tensor share_memory_ "
    "__repr__ __format__ __hash__ __set__ __delete__ __setstate__ __reduce_ex__ __deepcopy__ register_post_accumulate_grad_hook"
)

#: Properties that are tensors.
_TENSORS = frozenset(["T", "mT", "H", "mH", "data", "real", "imag"])


class RowCheck(TorchFunctionMode):
    """Watches torch functions between a model's layers, and refuses those that depend on the rows of several vertices.

    Args:
        module: the model.

    Attributes:
        sums_edges, compares: True after the running call of the model has summed edges by their targets, or compared numbers of rows.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._followed: dict[int, tuple[weakref.ref[Tensor], Rows | None]] = {}
        self._families: dict[tuple[str, int], Family] = {}
        self._verdicts: dict[Any, list[Rows | None] | None] = {}  # None: depends on other rows
        self._edge_index: Tensor | None = None
        self._graph: RankGraph | None = None  # whose ranks answer questions about all vertices; None: nobody does
        self._number = 0  # of vertices; 0 between calls
        self._numbers: tuple[int, ...] = ()  # of rows in tables of vertices
        self._edge_tensors: dict[str, Tensor] = {}  # attributes of edges that were read so far
        self._num_followed = 0  # of these
        self._num_edges: int | None = None  # on all ranks, once it was asked for in this call
        self._called: dict[str, Any] = {}  # some of the above, in the last call
        self._seeds: int | None = None  # number of first rows that are of a batch's seeds
        self._off = self._assumes = self.sums_edges = self.compares = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCheck:
        return RowCheck(copy.deepcopy(self._module, memo))

    @contextlib.contextmanager
    def calling(self, x: Tensor, given: tuple[Sequence[Any], dict[str, Any]], graph: RankGraph) -> Iterator[None]:
        """Checks a call of the model on a rank's graph, inside the context, if several ranks have the vertices.

        It follows ``x``, tensors in ``given`` with a row for each vertex, and attributes of edges.
        """
        if graph.averaging.size == 1:
            self._called = {}
            yield
            return
        numbers = graph.num_inner, graph.num_own
        self._called = {"_number": graph.num_inner, "_numbers": numbers, "_edge_index": graph.edge_index}
        state = {**self._called, "_seeds": graph.num_seeds, "_edge_tensors": graph.edge_tensors, "_num_followed": 0}
        state |= {"_num_edges": None, "sums_edges": False, "compares": False}
        state["_graph"] = None if trimming_of(self._module) else graph  # its later calls compute other rows, unchecked
        with self._having(state):
            self.follow([x, getattr(graph, "node_rows", {})])
            for tensor, what in tensors_given(self._module.forward, given, graph):
                if what == "vertices":
                    self.follow(tensor)
                elif what == "edges":
                    self._mark(tensor, Rows(self._family("edges", tensor.size(0))))
                else:
                    self._mark(tensor, Rows(self._family("edges", tensor.size(1)), 1, ids=True))
            with self:
                yield

    def _having(self, state: dict[str, Any]) -> Replaced:
        """Returns a context in which this object has the attributes ``state``."""
        return Replaced((vars(self), *item) for item in state.items())

    def follow(self, out: Any, dim: int = 0) -> None:
        """Records that tensors in ``out`` have a row for each vertex along ``dim``, if their size there fits."""
        for tensor in output_tensors(out):
            if self._number and tensor.dim() > dim >= -tensor.dim() and tensor.size(dim) in self._numbers:
                self._mark(tensor, Rows(self._family("vertices", tensor.size(dim)), dim % tensor.dim()))

    def follow_layer(self, out: Any) -> None:
        """Records which tensors among the results of a layer have rows of vertices, and which have rows of edges, such as weights of attention."""
        self.follow(out)
        for tensor, rows in _rows_of_edges([*output_tensors(out)] if self._number else []):
            self._mark(tensor, rows)

    def paused(self) -> Replaced:
        """Switches the check off inside the context. Results of functions are then not followed either."""
        return self._having({"_off": True})

    def unfollowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs ``function`` with the check switched off."""

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
        """Records that this call of the model made these tensors, so that :meth:`_is_older` is False for them."""
        for tensor in [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ():
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.size(0) in self._numbers:
                if not is_ours():
                    self._mark(tensor, None)
                elif tensor.dtype == torch.bool:  # a mask, which the graph makes when it is read
                    self.follow(tensor)

    def _is_older(self, tensor: Tensor) -> bool:
        """True if a tensor with as many rows as there are vertices may be from before this call. It then counts as rows where it is combined with such rows."""
        if not tensor.dim() or tensor.size(0) != self._number:
            return False
        found = self._followed.get(id(tensor))
        return found is None or found[0]() is not tensor

    def _older_rows(self, tensor: Tensor) -> Rows | None:
        return Rows(self._family("vertices", self._number)) if self._is_older(tensor) else None

    def _mark(self, tensor: Tensor, rows: Rows | None) -> None:
        forget = functools.partial(_forget, self._followed, id(tensor))
        self._followed[id(tensor)] = weakref.ref(tensor, forget), rows

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
        if len(self._edge_tensors) > self._num_followed:
            self._num_followed = len(self._edge_tensors)
            for tensor in self._edge_tensors.values():
                self._mark(tensor, Rows(self._family("edges", tensor.size(0))))
        call = Call(func, args, kwargs, self._rows_of)
        is_known = _describe(args, call, self._is_older) & _describe(kwargs, call, self._is_older)
        is_alone = not call.rows or (call.is_of_discrete_edges and is_exempt())
        if is_alone and not call.counts:
            out = func(*args, **kwargs)
            if not call.has_older:
                self._note_made(out)
            return out
        name = call.name
        if name in _BYTES and call.rows and is_of_user():
            self.refuse(f"{name}, which tells how many bytes rows take,")
        if name in _HARMLESS or (call.is_property and name != "shape" and name not in _TENSORS):
            return func(*without_counts(args), **without_counts(kwargs))
        if name in ("shape", "size", "numel", "nelement", "__len__"):
            return self._sizes(name, func, args, kwargs)
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if name == "register_hook":
            return func(args[0], self.checked_hook(*args[1:], **kwargs))
        if name in _READS and call.rows and not is_ours():
            self.refuse(f"{name}, which reads values of rows,")
        verdict = self._verdict(call, tuple(call.key) if is_known else None)
        if isinstance(verdict, Tensor):
            self._note_made(verdict)
            return verdict
        args, kwargs = without_counts(args), without_counts(kwargs)
        out = func(*args, **kwargs)
        results = [*results_of(name, out, args, kwargs)]
        self._note_made(results)
        if verdict is None:  # called by a layer of PyG
            self.follow(results)
            return out
        self.sums_edges |= name in SUMS and not is_exempt()
        families = {family.what: family for family in call.families()}
        for tensor, rows in zip(results, verdict):
            if rows is not None:
                family = families.get(rows.family.what, rows.family)
                self._mark(tensor, rows if rows.family is family else replace(rows, family=family))
        return out

    def _verdict(self, call: Call, key: Any) -> list[Rows | None] | Tensor | None:
        """Decides whether a function may run.

        Returns a list: for each tensor that it returns or writes, its rows or None. If a row of the result depends on other
        rows, but the ranks can compute the function together, returns its result. None: a layer of PyG made the call.

        Args:
            key: what the verdict depends on; None if it depends on values of tensors.

        Raises:
            RowsMixed: a row of the result depends on other rows.
        """
        if key is None and is_exempt():
            return None
        if key not in self._verdicts:
            assert self._edge_index is not None
            found = found_rows(call, self._number, self._edge_index, self._older_rows, self._seeds)
            if key is None or call.selects:
                return self._joined(call) if found is None else found
            if len(self._verdicts) >= _MOST_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = found
        found = self._verdicts[key]
        return self._joined(call) if found is None else found

    def _joined(self, call: Call) -> list[Rows | None] | Tensor | None:
        """Handles a function whose result depends on several rows: computes it over all ranks if possible, else refuses it. Returns as :meth:`_verdict`."""
        if is_exempt():
            if _is_in_other_layer(self._module):
                self.refuse(f"{call.name} {_OF_OTHER_LAYER}")
            return None
        if call.rows and all(rows.ids for rows in call.rows) and not is_of_user():
            return []  # a helper of PyG sorts edges, or asks for their largest number
        if self._graph is not None and not is_repeated():
            joined = over_ranks(call, self._graph, running_module()[1])
            if joined is not None:
                return joined
        if call.name in ("any", "all") and call.rows and call.rows[0].marks:
            return []  # there the model may ask about this rank's rows
        self.refuse(call.name)

    def _sizes(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Answers ``shape``, ``size`` and so on. The user's code gets the number of rows as a :class:`Count`, which reports wrong uses."""
        rows = self._rows_of(args[0])
        out = func(*args, **kwargs)
        if rows is None or rows.marks or not is_of_user():
            return out
        if name == "__len__":
            if rows.lead:
                return out
            self.refuse(
                "len() of rows (pass size(0) itself where a size is needed, ask whether a mask selects rows by mask.any())"
            )
        count = Count.rows(rows.family, rows.factor, self)
        if name in ("numel", "nelement"):
            rest = [size for dim, size in enumerate(args[0].shape) if dim != rows.lead]
            return count * math.prod(rest)
        if isinstance(out, int):
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return count if dim % args[0].dim() == rows.lead else out
        return shape_of(count if dim == rows.lead else size for dim, size in enumerate(out))

    def whole_number(self, family: Family) -> int | None:
        """Returns the number of vertices or edges of the whole graph, or None if it is unknown, as for a selection of them.

        Collective for edges, once per call of the model.
        """
        if self._graph is None or family.is_selected:
            return None
        if family.what == "vertices":
            return self._graph.num_vertices
        if is_repeated():
            self.refuse("a number of edges, which is compared,")
        if self._num_edges is None:
            self._num_edges = number_of_edges(self._graph, running_module()[1])
        return self._num_edges

    # --- gradients ------------------------------------------------------------------------------------------

    def checked_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a gradient hook that checks ``hook``. A hook that returns nothing may compute anything."""
        checked = self._checked(f"a hook of gradients ({getattr(hook, '__name__', hook)})", hook)

        def run(*given: Any) -> Any:
            try:
                return checked(*given)
            except RowsMixed:
                if hook(*given) is None:
                    return None
                raise

        return run

    def check_functions(self, nodes: list[Any]) -> None:
        """Makes the backward of each ``autograd.Function`` of the user's among ``nodes`` run under the check."""
        for node in nodes:
            kind = getattr(type(node), "_forward_cls", None)
            if kind is not None and not kind.__module__.startswith(("salientpp.", "torch.", "torch_geometric.")):
                node.apply = self._checked(f"the backward of {kind.__name__}", node.apply)

    def _checked(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a ``function`` of gradients so that it runs under the check. A tensor with as many rows as vertices is taken for rows of vertices."""
        state = {**self._called, "_graph": None, "_assumes": True, "sums_edges": False}

        def run(*gradients: Any) -> Any:
            try:
                with self._having(state), self:
                    return function(*gradients)
            except RowsMixed as error:
                raise RowsMixed(f"{error}. This happened in {what}") from None

        return run

    # --- errors ---------------------------------------------------------------------------------------------

    def refuse(self, what: str) -> NoReturn:
        owner, place = running_module()
        name = "the model's forward"
        if owner is not None:
            path = next((path for path, module in self._module.named_modules() if module is owner), "")
            name = name_of(owner, path)
        raise RowsMixed(
            f"this model cannot be trained over ranks: {what} in {name}{place} depends on the rows of several vertices, or on their number or order. {_ADVICE}"
        )


def _describe(value: Any, call: Call, is_older: Callable[[Tensor], bool]) -> bool:
    """Adds to ``call`` the facts about an argument that decide whether the call may run. False if values of tensors matter too."""
    key = call.key
    if isinstance(value, Tensor):
        rows = call.rows_of(value)
        if rows is not None:
            call.rows.append(rows)
            call.is_of_discrete_edges &= rows.family.is_of_edges and is_discrete(value)
            sizes = value.shape[: rows.lead], value.shape[rows.lead + 1 :]
            key += [*rows.key, sizes, value.dtype]
            return True
        key += [value.shape, value.dtype]
        if is_older(value):
            call.has_older = True
            return False
        return value.is_floating_point() or not value.dim()
    if isinstance(value, Count):
        call.counts.append(value)
        key += [value.family.what, value.form]
        return value.form is not None
    if isinstance(value, (list, tuple)):
        key.append(len(value))
        return False not in [_describe(each, call, is_older) for each in value]
    if isinstance(value, dict):
        key += value
        return False not in [_describe(each, call, is_older) for each in value.values()]
    if isinstance(value, slice):
        return _describe((value.start, value.stop, value.step), call, is_older)
    key += [type(value), value if getattr(value, "__hash__", None) else id(value)]
    return True


def _is_in_other_layer(model: torch.nn.Module) -> bool:
    """Returns True if a layer is running that is no module of the model, so that no rows of other ranks arrive for it."""
    owner = running_module()[0]
    return isinstance(owner, MessagePassing) and not any(each is owner for each in model.modules())


def _rows_of_edges(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Rows]]:
    """Yields edges [2, e] among the results of a layer, and tensors [e, ...] with a row for each of them."""
    for ends in tensors:
        if ends.dtype == torch.int64 and ends.dim() == 2 and ends.size(0) == 2:
            family = Family.of(ends.size(1), "edges, joined to others", (5, 13))  # maybe with self-loops
            yield ends, Rows(family, 1, ids=True)
            fitting = (each for each in tensors[1:] if each.is_floating_point() and each.shape[:1] == ends.shape[1:])
            yield from ((each, Rows(family)) for each in fitting)


def checked_hooks(rows: RowCheck, own: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields replacements (attributes of a module, name, value) by which the module's backward hooks are checked."""
    for name in ("_backward_hooks", "_backward_pre_hooks"):
        if own[name]:
            yield own, name, OrderedDict((key, rows.checked_hook(hook)) for key, hook in own[name].items())


def tensors_given(
    forward: Callable[..., Any], given: tuple[Sequence[Any], dict[str, Any]], graph: RankGraph
) -> Iterator[tuple[Tensor, str]]:
    """Yields tensors of a model's other arguments, and what their rows are: "vertices", "edges" or "ends" ([2, e])."""
    args, num_edges, known = given[0], graph.edge_index.size(1), {id(each) for each in graph.edge_tensors.values()}
    numbers = graph.num_inner, graph.num_own
    names = [*inspect.signature(forward).parameters][1 : 1 + len(args)] if num_edges in numbers else []
    named = [*zip_longest(names, args, fillvalue=""), *given[1].items(), *graph.edge_tensors.items()]
    yield graph.edge_index, "ends"
    for name, tensor in _named_tensors(named):
        if type(tensor) is not Tensor or tensor is graph.edge_index or not tensor.dim():
            continue
        if tensor.dtype == torch.int64 and tensor.shape == graph.edge_index.shape and 2 not in (*numbers, num_edges):
            yield tensor, "ends"
            continue
        is_of_edges, is_of_vertices = tensor.size(0) == num_edges, tensor.size(0) in numbers
        if id(tensor) in known or (is_of_edges and (not is_of_vertices or "edge" in name)):
            yield tensor, "edges"
        # If this rank has as many edges as vertices, it must still answer what other ranks ask about types, labels and masks.
        elif is_of_vertices and (not is_of_edges or is_discrete(tensor)):
            yield tensor, "vertices"


def _named_tensors(named: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for all tensors in named values, also inside containers and PyG's objects."""
    for name, value in named:
        if isinstance(value, BaseData):
            yield from _named_tensors(item for store in value.stores for item in store.items())
        elif isinstance(value, (list, tuple)):
            yield from _named_tensors((name, each) for each in value)
        elif isinstance(value, dict):
            yield from _named_tensors(value.items())
        else:
            yield from ((str(name), tensor) for tensor in output_tensors(value))


def _forget(
    followed: dict[int, tuple[weakref.ref[Tensor], Rows | None]], key: int, reference: weakref.ref[Tensor]
) -> None:
    if key in followed and followed[key][0] is reference:
        del followed[key]
