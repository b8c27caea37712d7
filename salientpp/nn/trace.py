"""Finds out, from one forward pass, how many hops of a batch each layer of a model needs.

A recorder follows the outputs of layers through every operation of torch. An operation that works on each row by itself keeps rows where they are. Any other
one (a mean over all rows, a gather, a value that Python reads) needs all rows of what it is given. The result is a :class:`Plan`: for each call of a layer, in
order, within how many hops of the seeds its outputs and its inputs are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

#: More hops than any batch has: all rows are needed.
ALL = 1 << 30


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: its path in the model.
        out_hops, in_hops: its outputs and its inputs are needed within so many hops of the seeds.
        is_whole: the layer gets all rows and edges, as if the batch had no hops.
    """

    layer: str
    out_hops: int
    in_hops: int
    is_whole: bool


Plan = Sequence[Call]


@dataclass
class _Node:
    """A step of the forward pass.

    Attributes:
        length: hops that it reaches: 1 for a call of ``propagate``, 0 for the ends of a layer's call.
        parents: a bit for each node whose rows it uses.
    """

    length: int
    parents: int
    hops: int = -1  # outputs are needed within so many; -1: nobody needs them


@dataclass
class _Rows:
    """What is known of a storage: which nodes its rows come from, and how many rows it has. A tensor may have several in place of each, next to each other."""

    nodes: int
    number: int


@dataclass
class _CallNodes:
    layer: str
    begin: int
    end: int = -1
    is_whole: bool = False


class Recorder(TorchDispatchMode):
    """Follows rows through a forward pass.

    Args:
        num_seeds: rows of every type that are needed at the end at most; a slice of so many first rows keeps rows where they are.
        frame: Python's frame that calls the model.
    """

    def __init__(self, num_seeds: int, frame: Any) -> None:
        super().__init__()
        self.frame = frame
        self._num_seeds = num_seeds
        self._nodes: list[_Node] = []
        self._rows: dict[StorageWeakRef, _Rows] = {}
        self._leads: dict[Any, int] = {}  # of views: dimensions before the one that counts rows, where there are any
        self._calls: list[_CallNodes] = []
        self._suspended = 0

    @property
    def is_inside(self) -> bool:
        """Whether a layer is being called."""
        return self._suspended > 0 or any(call.end < 0 for call in self._calls[-1:])

    # --- what the layers tell -------------------------------------------------------------------------------

    def begin_call(self, layer: str, inputs: Any, rows: Any) -> int:
        """A layer is called with ``inputs``, of which ``rows`` have a row for each vertex; gives the number of the call, for :meth:`end_call`."""
        node = self._new_node(0, self._nodes_of(inputs))
        for tensor in tensors_of(rows):
            if tensor.is_floating_point():
                self._mark(tensor, 1 << node | self._nodes_of([tensor]))
        self._calls.append(_CallNodes(layer, node))
        return len(self._calls) - 1

    def end_call(self, number: int, rows: Any, out: Any) -> None:
        """It gave ``out``, which should be a tensor with a row for each vertex, or a dictionary of such."""
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
        """A layer that needs all rows, whatever is needed of its outputs."""
        self._need_all(self._nodes_of(inputs))
        self._calls.append(_CallNodes(layer, self._new_node(0, 0), self._new_node(0, 0), True))
        return self.unseen(run)

    def propagate(self, inputs: Any, run: Callable[[], Any], length: int = 1) -> Any:
        """One hop or several: rows of targets from rows of sources."""
        node = self._new_node(length, self._nodes_of(inputs))
        out = self.unseen(run)
        for tensor in tensors_of(out):
            self._rows[_key(tensor)] = _Rows(1 << node, tensor.size(0))
        return out

    def edge_updater(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """Rows of edges from rows of vertices."""
        found = self._nodes_of(inputs)
        out = self.unseen(run)
        for tensor in tensors_of(out):
            self._rows[_key(tensor)] = _Rows(found, tensor.size(0))
        return out

    def read(self, inputs: Any) -> None:
        """Values leave torch."""
        if not self._suspended:
            self._need_all(self._nodes_of(inputs))

    def part(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """A module of a layer. Where messages are made, it gets rows of edges; the layer needs all edges if it mixes them, as normalisations do."""
        if not self._suspended:
            return run()
        node = self._new_node(0, 0)
        for tensor in tensors_of(inputs):
            self._mark(tensor, 1 << node)
        before, self._suspended, self._num_seeds = (self._suspended, self._num_seeds), 0, 0
        try:
            out = run()
        finally:
            self._suspended, self._num_seeds = before
        if self._nodes[node].hops == ALL:
            self._calls[-1].is_whole = True
        return out

    def unseen(self, run: Callable[[], Any]) -> Any:
        """Run what is no business of the recorder's."""
        self._suspended += 1
        try:
            return run()
        finally:
            self._suspended -= 1

    def plan(self, out: Any) -> Plan:
        """The plan of a model that gave ``out``."""
        self._new_node(0, self._nodes_of(out))
        self._nodes[-1].hops = 0
        for call in self._calls:  # outputs may also leave by ways that are not seen, as in an object or an attribute
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_of([args, kwargs]) if _key(tensor) in self._rows]
        if not given:
            return func(*args, **kwargs)
        if func._schema.name not in _RULES and torch.Tag.pointwise not in func.tags:
            with self:  # in inference mode, operations arrive here that are made of others
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        found = self._nodes_of(given)
        out = func(*args, **kwargs)
        verdict = self._verdict(func, given, args, kwargs, out)
        written = [
            args[k] for k, argument in enumerate(func._schema.arguments) if _is_written(argument) and k < len(args)
        ]
        if isinstance(verdict, _RowWise):
            base = self._rows[_key(given[0])].number
            for tensor in tensors_of([out, written]):
                lead = verdict.lead if tensor.dim() > verdict.lead else 0
                self._mark(tensor, found, base if tensor.dim() and tensor.size(lead) % max(1, base) == 0 else None)
                if lead:
                    self._leads[_view_key(tensor)] = lead
        elif verdict is _SEEDS:
            self._new_node(0, found)
            self._nodes[-1].hops = 0
        elif verdict is _MIXES:
            self._need_all(found)
        return out

    def _verdict(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any, out: Any) -> str | _RowWise:
        """What an operation does with the rows of its arguments."""
        leads = {self._leads.get(_view_key(tensor), 0) for tensor in given}
        lead = leads.pop()
        numbers = {tensor.size(lead) if tensor.dim() > lead else -1 for tensor in given}
        bases = {self._rows[_key(tensor)].number for tensor in given}
        number, base = numbers.pop(), max(1, bases.pop())
        if leads or numbers or bases or number < 0 or (number % base and number > self._num_seeds):
            return _MIXES
        rule = _RULES.get(func._schema.name, _pointwise if torch.Tag.pointwise in func.tags else None)
        if rule is None:
            return _MIXES
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args)) | kwargs
        operation = _Operation(given, named, out, lead, number, base, self._num_seeds)
        if lead and rule not in _LEADING:
            return _MIXES
        verdict = rule(operation)
        if isinstance(verdict, bool):
            return _RowWise(lead) if verdict else _MIXES
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


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


def _key(tensor: Tensor) -> Any:
    """Names a storage, also after it is gone. All tensors that are not strided have one name."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None


def _view_key(tensor: Tensor) -> Any:
    return _key(tensor), tensor.shape, tensor.stride() if tensor.layout == torch.strided else None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


# --- rules: what operations do with the rows of their arguments ----------------------------------------------

#: Rows of the result come from other rows too; from no values; from rows of seeds.
_MIXES, _NO_VALUES, _SEEDS = "mixes", "no values", "seeds"


@dataclass(frozen=True)
class _RowWise:
    """Each row of the result comes from the same rows of the arguments; ``lead`` dimensions stand before the one that counts them."""

    lead: int


@dataclass(frozen=True, eq=False)
class _Operation:
    """An operation on tensors whose rows are followed.

    Attributes:
        lead: dimensions before the one that counts rows.
        given: these tensors; all have ``number`` rows, in place of each of ``base`` rows the same number.
        named: its arguments, by name.
    """

    given: Sequence[Tensor]
    named: dict[str, Any]
    out: Any
    lead: int
    number: int
    base: int
    num_seeds: int

    def keeps_rows(self, lead: int | None = None) -> bool:
        lead = self.lead if lead is None else lead
        return all(tensor.dim() > lead and tensor.size(lead) == self.number for tensor in tensors_of(self.out))

    def is_given(self, name: str) -> bool:
        return any(self.named.get(name) is tensor for tensor in self.given)


_Rule = Callable[[_Operation], "bool | str | _RowWise"]


#: Rules for rows that are counted by any dimension; the others take the first.
_LEADING: list[_Rule] = []


def _pointwise(op: _Operation) -> bool:
    """Elementwise with broadcasting: rows stay rows if no argument has more dimensions than those that are followed."""
    tensors = list(tensors_of(op.out))
    return op.keeps_rows() and all(each.dim() == tensor.dim() for tensor in tensors for each in op.given)


def _along(name: str, default: Any = None) -> _Rule:
    """Works along one dimension or several, which must not be that of the rows. Reductions take them away."""

    def rule(op: _Operation) -> str | _RowWise:
        ndim = op.given[0].dim()
        value = op.named.get(name, default)
        given = value if isinstance(value, (list, tuple)) else [value]
        if not given or not all(isinstance(each, int) and each % ndim != op.lead for each in given):
            return _MIXES
        is_removed = next(tensors_of(op.out)).dim() < ndim
        lead = op.lead - sum(each % ndim < op.lead for each in given) if is_removed else op.lead
        return _RowWise(lead) if op.keeps_rows(lead) else _MIXES

    _LEADING.append(rule)
    return rule


def _new_dimension(op: _Operation) -> str | _RowWise:
    """Adds a dimension."""
    lead = op.lead + (op.named.get("dim", 0) % (op.given[0].dim() + 1) <= op.lead)
    return _RowWise(lead) if op.keeps_rows(lead) else _MIXES


def _view(op: _Operation) -> bool:
    """Rows may be split into several, or put together again."""
    return op.keeps_rows() or (op.out.dim() > 0 and op.number % op.base == 0 and op.out.size(0) % op.base == 0)


def _slice(op: _Operation) -> bool | str:
    if op.named.get("dim", 0) % op.given[0].dim():
        return op.keeps_rows()
    out = op.out.size(0)
    is_prefix = op.named.get("start") in (None, 0) and op.named.get("step", 1) == 1
    return is_prefix and (out == op.number or out <= op.num_seeds)


def _select(op: _Operation) -> bool:
    return op.named["dim"] % op.given[0].dim() != 0 and op.keeps_rows()


def _permute(op: _Operation) -> bool:
    return op.named["dims"][0] % op.given[0].dim() == 0


def _transpose(op: _Operation) -> bool:
    ndim = op.given[0].dim()
    return op.named["dim0"] % ndim != 0 and op.named["dim1"] % ndim != 0


def _expand(op: _Operation) -> bool:
    return op.given[0].dim() == op.out.dim() and op.keeps_rows()


def _product(name: str, others: Sequence[str]) -> _Rule:
    """A matrix product whose left factor has the rows."""
    return lambda op: (
        op.is_given(name) and not any(map(op.is_given, others)) and op.named[name].dim() > 1 and op.keeps_rows()
    )


def _sum_of_product(op: _Operation) -> bool:
    """``self`` + mat1 @ mat2, where ``self`` may have the rows too."""
    return (
        op.is_given("mat1")
        and not op.is_given("mat2")
        and not (op.is_given("self") and op.named["self"].dim() < 2)
        and op.keeps_rows()
    )


def _repeat(op: _Operation) -> bool:
    """Repeats along other dimensions."""
    return op.out.dim() == op.given[0].dim() and op.named["repeats"][0] == 1 and op.keeps_rows()


def _layer_norm(op: _Operation) -> bool:
    return op.is_given("input") and len(op.given) == 1 and len(op.named["normalized_shape"]) < op.given[0].dim()


def _batch_norm(op: _Operation) -> bool:
    return op.is_given("input") and len(op.given) == 1 and not op.named.get("training", False)


def _rows_of_seeds(op: _Operation) -> str:
    """Takes rows by number: of the seeds, or of anyone."""
    index = op.named.get("index") if op.named.get("dim", 0) == 0 else None
    indices = op.named.get("indices") or [index]
    first = indices[0]
    is_of_seeds = (
        op.is_given("self")
        and len(op.given) == 1
        and op.number > op.num_seeds  # else it says nothing about other batches
        and all(each is None for each in indices[1:])
        and isinstance(first, Tensor)
        and first.dtype in (torch.int64, torch.int32)
        and (not first.numel() or (int(first.min()) >= 0 and int(first.max()) < op.num_seeds))
    )
    return _SEEDS if is_of_seeds else _MIXES


def _names(names: str, rule: _Rule) -> Iterable[tuple[str, _Rule]]:
    return ((f"aten::{name}", rule) for name in names.split())


_LEADING += [_pointwise, _new_dimension]
_RULES: dict[str, _Rule] = dict(
    [
        *_names("copy_", lambda op: op.is_given("self") and _pointwise(op)),
        *_names(
            "clone _to_copy detach alias lift_fresh contiguous dropout native_dropout relu_ masked_fill masked_fill_",
            _pointwise,
        ),
        *_names(
            "empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full",
            lambda op: _NO_VALUES,
        ),
        *_names("new_empty_strided sym_size sym_numel sym_stride is_same_size", lambda op: _NO_VALUES),
        *_names(
            "_softmax _log_softmax sum mean amax amin max min var std var_mean linalg_vector_norm norm cumsum logsumexp argmax prod cat",
            _along("dim"),
        ),
        *_names("glu", _along("dim", -1)),
        *_names("split split_with_sizes unsafe_split unsafe_chunk unbind", _along("dim", 0)),
        *_names("unsqueeze stack", _new_dimension),
        *_names("view _unsafe_view reshape squeeze _reshape_alias", _view),
        *_names("slice", _slice),
        *_names("select", _select),
        *_names("permute", _permute),
        *_names("transpose", _transpose),
        *_names("expand", _expand),
        *_names("repeat", _repeat),
        *_names("mm", _product("self", ["mat2"])),
        *_names("addmm", _sum_of_product),
        *_names("bmm", lambda op: op.keeps_rows()),
        *_names("native_layer_norm _fused_rms_norm", _layer_norm),
        *_names("native_group_norm", lambda op: op.is_given("input") and len(op.given) == 1),
        *_names("native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm", _batch_norm),
        *_names("index index_select", _rows_of_seeds),
    ]
)
