"""Finds out, from one forward pass, how many hops of a batch each layer of a model needs.

A recorder follows the outputs of layers through every operation of torch. An operation on each row separately keeps rows in place. Any other
operation (a mean over all rows, a gather, a value that Python reads) needs all rows of its arguments. The result is a :class:`TrimPlan`. It lists
the calls of layers in order. Each call has two numbers of hops around the seeds: one for the outputs that are needed, one for the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from salientpp.containers import tensors_of
from salientpp.nn.layers import Replaced
from salientpp.nn.rehearsal import is_written
from salientpp.nn.rehearsal import key_of_storage as _key
from salientpp.nn.rules import LEADING, MIXES, RULES, SEEDS, Operation, RowWise, pointwise
from salientpp.nn.sizes import Reading, RowCount, Shape
from salientpp.nn.undo import NotedDispatch

#: Number of hops that no batch reaches; it means that all rows are needed.
ALL = 1 << 30


@dataclass(frozen=True)
class Call:
    """Call of a layer in a plan.

    Attributes:
        layer: path of the layer in the model.
        out_hops, in_hops: numbers of hops around the seeds within which its outputs and its inputs are needed.
        is_whole: the layer gets all rows and edges, as if the batch had no hops.
    """

    layer: str
    out_hops: int
    in_hops: int
    is_whole: bool


TrimPlan = Sequence[Call]


@dataclass
class _Node:
    """Step of the forward pass.

    Attributes:
        length: number of hops that the step adds: 1 for a call of ``propagate``, 0 for the begin and end of a layer's call.
        parents: bit mask of the nodes whose rows the step uses.
    """

    length: int
    parents: int
    hops: int = -1  # hops within which its outputs are needed; -1: nothing needs them


@dataclass
class _Rows:
    """Rows in a storage: bit mask of the steps that computed them (``nodes``), and their number before any reshape."""

    nodes: int
    number: int


@dataclass
class _CallNodes:
    layer: str
    begin: int
    end: int = -1
    is_whole: bool = False


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a recorder's method whose own operations must not be recorded."""

    @functools.wraps(method)
    def ignored(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        return self.unseen(lambda: method(self, *args, **kwargs))

    return ignored


class Recorder(NotedDispatch):
    """Follows rows through a forward pass and builds the plan.

    Args:
        num_seeds: number of first rows that are seeds in every vertex type. A slice of the first rows keeps rows in place if it is no longer than this.
        frame: Python frame that calls the model.
    """

    def __init__(self, num_seeds: int, frame: Any) -> None:
        super().__init__()
        self.frame = frame
        self._num_seeds = num_seeds
        self._nodes: list[_Node] = []
        self._rows: dict[StorageWeakRef, _Rows] = {}
        self._leads: dict[Any, int] = {}  # for views: number of dimensions before the one that counts rows, if not 0
        self._calls: list[_CallNodes] = []
        self._readings: list[Reading] = []
        self._suspended = 0
        self._parts = 0
        self._quiet = 0

    @property
    def is_suspended(self) -> bool:
        """True while the recorder ignores operations, as it does inside ``propagate``."""
        return self._suspended > 0

    @property
    def is_between(self) -> bool:
        """True while the model's own code runs, between two layers."""
        return self._parts == 0 and self._quiet == 0 and not self.is_inside

    def quietly(self, run: Callable[[], Any]) -> Any:
        """Runs a module that a trimmed model calls as a whole, without following its inner operations."""
        with Replaced([(vars(self), "_quiet", self._quiet + 1)]):
            return run()

    @property
    def counts_rows(self) -> bool:
        """True where a number of rows may do harm if the model reads it: between layers, and in modules inside layers."""
        return self._parts > 0 or not self.is_inside

    @property
    def is_inside(self) -> bool:
        """True while a layer is being called."""
        return self._suspended > 0 or any(call.end < 0 for call in self._calls[-1:])

    # --- reports from the layers ----------------------------------------------------------------------------

    @_unseen
    def begin_call(self, layer: str, inputs: Any, rows: Any) -> int:
        """Begins a layer's call with ``inputs``. ``rows`` are the inputs with a row for each vertex. Returns the number of the call, for :meth:`end_call`."""
        self.see_gradients(inputs)
        torch.clear_autocast_cache()  # so that this layer makes its own copy of rows that an earlier layer has cast
        node = self._new_node(0, self._nodes_of(inputs))
        for tensor in tensors_of(rows):
            if tensor.is_floating_point():
                self._mark(tensor, 1 << node | self._nodes_of([tensor]))
        self._calls.append(_CallNodes(layer, node))
        return len(self._calls) - 1

    @_unseen
    def end_call(self, number: int, rows: Any, out: Any) -> None:
        """Ends a call that returned ``out``, which should be a tensor with a row for each vertex, or a dictionary of such tensors."""
        call = self._calls[number]
        for tensor in tensors_of(rows):
            known = self._rows.get(_key(tensor))
            if known is not None:
                known.nodes &= ~(1 << call.begin)
        found = self._nodes_of(out)
        call.end = self._new_node(0, found)
        values = list(out.values()) if isinstance(out, dict) else [out]
        if call.is_whole or not all(isinstance(value, Tensor) for value in values):
            call.is_whole = True
            self._need_all(found | 1 << call.begin)
            return
        for value in values:
            self._rows[_key(value)] = _Rows(1 << call.end, value.size(0))

    def whole_call(self, layer: str, inputs: Any, run: Callable[[], Any]) -> Any:
        """Runs a layer that needs all rows, regardless of which outputs are needed."""
        self.read(inputs)
        self._calls.append(_CallNodes(layer, self._new_node(0, 0), self._new_node(0, 0), True))
        return self.unseen(run)

    @_unseen
    def propagate(self, inputs: Any, run: Callable[[], Any], length: int = 1) -> Any:
        """Runs a function that computes rows of targets from rows of sources, ``length`` hops away. Records that it does.

        With 0 hops, the function computes rows of edges, or each row from the same row.
        """
        found = self._nodes_of(inputs)
        found = 1 << self._new_node(length, found) if length else found
        out = self.unseen(run)
        for tensor in tensors_of(out):
            self._rows[_key(tensor)] = _Rows(found, tensor.size(0))
        return out

    @_unseen
    def are_rows(self, inputs: Any) -> bool:
        """Returns True if the first dimension counts rows in every followed tensor of ``inputs``."""
        return not any(self._leads.get(_view_key(tensor), 0) for tensor in tensors_of(inputs))

    def read(self, inputs: Any) -> None:
        """Records that Python reads values of tensors, so that all their rows are needed."""
        if not self._suspended:
            self.unseen(lambda: self._need_all(self._nodes_of(inputs)))

    @_unseen
    def see_gradients(self, inputs: Any) -> None:
        """Records that tensors from a user's ``autograd.Function`` need all rows, because its backward may mix them."""
        for tensor in tensors_of(inputs):
            function = tensor.grad_fn
            if isinstance(function, BackwardCFunction):
                home = getattr(function, "_forward_cls", type(function)).__module__
                if not home.startswith(_KEEP_ROWS):
                    self._need_all(self._nodes_of([tensor]))

    def shape_of(self, tensor: Tensor) -> Shape | None:
        """Returns a followed tensor's shape, which reports what becomes of the number of rows; None for other tensors."""
        nodes, lead = self._nodes_of([tensor]), self._leads.get(_view_key(tensor), 0)
        return Shape(tensor.shape, lead, nodes, self._count) if nodes and lead < tensor.dim() else None

    def _count(self, number: int, nodes: int) -> RowCount:
        self._readings.append(Reading(nodes))
        return RowCount(number, (self._readings[-1],), self._need_all)

    def follow_shaped(self, tensor: Tensor, count: RowCount) -> None:
        """Follows a new tensor that was made with ``count`` rows, such as ``torch.zeros(count)``."""
        if tensor.dim() and tensor.size(0) == int(count):
            count.use()
            self._rows[_key(tensor)] = _Rows(count.nodes, tensor.size(0))
        else:
            count.need_all()

    def part(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """Runs a module inside a layer, and records whether it mixes rows of edges, as norms do. The layer then needs all edges."""
        if not self.is_inside:  # it is used between layers too
            return run()
        with Replaced([(vars(self), "_parts", self._parts + 1)]):
            return self._part(inputs, run)

    def _part(self, inputs: Any, run: Callable[[], Any]) -> Any:
        if not self._suspended:
            return run()
        node = self._new_node(0, 0)
        for tensor in tensors_of(inputs):
            self._mark(tensor, 1 << node)
        with Replaced([(vars(self), "_suspended", 0), (vars(self), "_num_seeds", 0)]):
            out = run()
        if self._nodes[node].hops == ALL:
            self._calls[-1].is_whole = True
        return out

    def unseen(self, run: Callable[[], Any]) -> Any:
        """Runs a function whose operations the recorder ignores."""
        self._suspended += 1
        try:
            return run()
        finally:
            self._suspended -= 1

    def plan(self, out: Any, trusts_readings: bool = False) -> TrimPlan:
        """Returns the plan of a model that returned ``out``.

        If it is unknown how the model used a number of rows, the plan needs all rows there, unless ``trusts_readings``.
        """
        self.see_gradients(out)
        for reading in self._readings:
            if not reading.is_used and not trusts_readings:
                self._need_all(reading.nodes)
        self._new_node(0, self._nodes_of(out))
        self._nodes[-1].hops = 0
        for call in self._calls:  # outputs may also leave unseen, for example in an object or an attribute
            self._nodes[call.end].hops = max(0, self._nodes[call.end].hops)
        for node in reversed(self._nodes):
            if node.hops >= 0:
                for parent in _bits(node.parents):
                    needed = self._nodes[parent]
                    needed.hops = max(needed.hops, min(ALL, node.hops + node.length))
        return [
            Call(
                call.layer,
                ALL if call.is_whole else self._nodes[call.end].hops,
                ALL if call.is_whole else max(0, self._nodes[call.begin].hops),
                call.is_whole,
            )
            for call in self._calls
        ]

    # --- operations -----------------------------------------------------------------------------------------

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._suspended:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_of([args, kwargs]) if _key(tensor) in self._rows]
        if not given:
            return func(*args, **kwargs)
        if func._schema.name not in RULES and torch.Tag.pointwise not in func.tags:
            # Some composite operations arrive here undecomposed: all in inference mode, and RNNs.
            with _Decomposed(self):
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        found = self._nodes_of(given)
        out = func(*args, **kwargs)
        verdict = self._verdict(func, given, args, kwargs, out)
        written = [
            args[k] for k, argument in enumerate(func._schema.arguments) if is_written(argument) and k < len(args)
        ]
        if isinstance(verdict, RowWise):
            base = self._rows[_key(given[0])].number
            for tensor in tensors_of([out, written]):
                lead = verdict.lead if tensor.dim() > verdict.lead else 0
                self._mark(tensor, found, base if tensor.dim() and tensor.size(lead) % max(1, base) == 0 else None)
                if lead:
                    self._leads[_view_key(tensor)] = lead
        elif verdict is SEEDS:
            self._new_node(0, found)
            self._nodes[-1].hops = 0
        elif verdict is MIXES:
            self._need_all(found)
        return out

    def _verdict(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any, out: Any) -> str | RowWise:
        """Returns what an operation does with the rows of its arguments."""
        leads = {self._leads.get(_view_key(tensor), 0) for tensor in given}
        lead = leads.pop()
        numbers = {tensor.size(lead) if tensor.dim() > lead else -1 for tensor in given}
        bases = {self._rows[_key(tensor)].number for tensor in given}
        number, base = numbers.pop(), max(1, bases.pop())
        if leads or numbers or bases or number < 0 or (number % base and number > self._num_seeds):
            return MIXES
        rule = RULES.get(func._schema.name, pointwise if torch.Tag.pointwise in func.tags else None)
        if rule is None:
            return MIXES
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args)) | kwargs
        operation = Operation(given, named, out, lead, number, base, self._num_seeds)
        if lead and rule not in LEADING:
            return MIXES
        verdict = rule(operation)
        if isinstance(verdict, bool):
            return RowWise(lead) if verdict else MIXES
        return verdict

    # --- nodes ----------------------------------------------------------------------------------------------

    def _new_node(self, length: int, parents: int) -> int:
        self._nodes.append(_Node(length, parents))
        return len(self._nodes) - 1

    def _nodes_of(self, value: Any) -> int:
        found = 0
        for tensor in tensors_of(value):
            known = self._rows.get(_key(tensor))
            found |= known.nodes if known is not None else 0
        return found

    def _need_all(self, nodes: int) -> None:
        for node in _bits(nodes):
            self._nodes[node].hops = ALL

    def _mark(self, tensor: Tensor, nodes: int, base: int | None = None) -> None:
        known = self._rows.get(_key(tensor))
        if known is None:
            self._rows[_key(tensor)] = _Rows(nodes, base or (tensor.size(0) if tensor.dim() else -1))
        else:
            known.nodes |= nodes


class _Decomposed(NotedDispatch):
    """Passes the operations of a composite one on to a recorder. A second entry of the recorder itself would end the changes that it notes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._dispatch = recorder._dispatch  # type: ignore[method-assign]


#: Modules whose functions compute the gradient of each row separately.
_KEEP_ROWS = ("salientpp.", "torch.nn.parallel.")


def _view_key(tensor: Tensor) -> Any:
    return _key(tensor), tensor.shape, tensor.stride() if tensor.layout == torch.strided else None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
