"""Computes a layer piece by piece to save memory for rows of edges.

A piece is a range of targets and the edges into them. The forward computes a piece, writes its rows and frees it. The
backward computes each piece again, with the same random numbers, and propagates its gradient before the next piece. So
rows of edges exist for one piece at a time, and only rows of vertices are kept. Sequential aggregation and
rematerialisation (Mostafa, MLSys 2022, arXiv:2111.06483) does the same with the rows that come from one other machine
as a piece. Ranges of targets also suit layers that normalise over all edges into a target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from salientpp.fullgraph.once import once_differentiable
from salientpp.nn.layers import layer_of, pair_of
from salientpp.nn.rehearsal import same_draws

#: Bytes that the rows of a piece's edges may take. A target with more edges is a piece of its own.
PIECE_BYTES = 32 << 20

#: Tensors of an edge's width that a piece holds at a time, forward and backward together.
_COPIES = 6

#: Arguments of a layer's methods whose values refer to rows or edges by number.
_NUMBERED = {"edge_index", "edge_index_i", "edge_index_j", "adj_t", "size", "size_j"}


@dataclass(frozen=True, eq=False)
class EdgeCall:
    """Call of a layer's ``propagate`` or ``edge_updater``.

    In the arguments of ``propagate``, it may stand for the result of an ``edge_updater``, which is then computed piece by piece.

    Attributes:
        original: PyG's method of the layer ``conv``.
        is_edge_level: True for ``edge_updater``.
        edge_index: the edges int64 [2, e], in local numbers.
        size: numbers of rows of sources (with the halo) and of targets.
        given: the method's other arguments. Those that edges look up by source are pairs, whose tables of sources include rows of the halo.
    """

    conv: MessagePassing
    original: Callable[..., Any]
    is_edge_level: bool
    edge_index: Any
    size: tuple[int, int]
    given: dict[str, Any]

    @property
    def names(self) -> Sequence[str]:
        """Names of the arguments that the layer's own methods (``message``, ``edge_update``, ...) take."""
        return self.conv._edge_user_args if self.is_edge_level else self.conv._user_args

    def compute(self) -> Any:
        """Returns the method's result. ValueError if the method fails on a rank without edges."""
        try:
            return self.original(self.edge_index, size=self.size, **self.given)
        except Exception as error:
            has_edges = not isinstance(self.edge_index, Tensor) or self.edge_index.size(1)
            if has_edges or type(error) not in (RuntimeError, IndexError):  # others are errors of this package
                raise
            raise ValueError(
                f"this rank has no edges into its vertices, and {type(self.conv).__name__} failed without edges: {error}. Use fewer ranks or another division, "
                "so that each rank has edges, or let the layer add self-loops"
            ) from error


def propagated(
    call: EdgeCall,
    stand_ins: Mapping[int, Tensor],
    substituting: Callable[[Mapping[int, Tensor]], contextlib.AbstractContextManager[Any]],
) -> Any:
    """Computes a layer's ``propagate``, in pieces to save memory if the layer allows it.

    Args:
        stand_ins: stand-ins of the model's trained parameters, by the ``id`` of the parameter.
        substituting: makes a context in which the model uses given stand-ins.
    """
    waiting = {name: value for name, value in call.given.items() if isinstance(value, EdgeCall)}
    slots, edge_index = _slots(call, waiting), call.edge_index
    bounds = [] if slots is None else _bounds(slots, edge_index[1], call.size[1])
    if slots is None or len(bounds) <= 2:
        values = {name: value.compute() for name, value in waiting.items()}
        return replace(call, given={**call.given, **values}).compute()
    calls = {
        "": replace(call, given={name: value for name, value in call.given.items() if name not in waiting}),
        **waiting,
    }
    calls = {owner: replace(part, edge_index=None, given=_without_tensors(part.given)) for owner, part in calls.items()}
    work = _Work(slots, calls, bounds, stand_ins, substituting)
    token = _Hold.apply(work, edge_index, *(slot.tensor for slot in slots), *stand_ins.values())
    return _Run.apply(token, work, edge_index, [slot.tensor for slot in slots])


# --- how arguments are cut ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Slot:
    """Describes a tensor argument of ``propagate``, or of an ``edge_updater`` that is computed piece by piece: which of its rows a piece gets.

    Attributes:
        owner: the argument of ``propagate`` that an ``edge_updater`` computes from this tensor; "" for an argument of ``propagate`` itself.
        name: the argument that the tensor belongs to.
        kind: "source" and "target" for rows of vertices, "edge" for rows of edges, "whole" for a tensor that is not cut.
        dim: the dimension of the rows.
    """

    owner: str
    name: str
    kind: str
    dim: int
    tensor: Tensor

    def bytes_of_edge(self) -> int:
        if self.kind == "whole" or not self.tensor.size(self.dim):
            return 0
        return self.tensor.numel() // self.tensor.size(self.dim) * self.tensor.element_size()


def _slots(call: EdgeCall, waiting: Mapping[str, EdgeCall]) -> list[_Slot] | None:
    """Describes how pieces cut the tensor arguments of a layer. None if it cannot be computed in pieces."""
    conv, edge_index = call.conv, call.edge_index
    if layer_of(conv) is None or type(edge_index) is not Tensor or conv.explain or conv.decomposed_layers > 1:
        return None
    found: list[_Slot] = []
    for owner, part in {"": call, **waiting}.items():
        if part.edge_index is not edge_index or _NUMBERED & {*part.names}:
            return None
        for name, value in part.given.items():
            slots = _slots_of(owner, name, value, part.names, conv.node_dim, edge_index.size(1), call.size)
            if slots is None:
                return None
            found += slots
    return found


def _slots_of(
    owner: str, name: str, value: Any, names: Sequence[str], dim: int, num_edges: int, size: tuple[int, int]
) -> list[_Slot] | None:
    by_source, by_target, is_bare = f"{name}_j" in names, f"{name}_i" in names, name in names
    if by_source or by_target:
        found: list[_Slot] = []
        for kind, is_used, tensor, number in zip(
            ("source", "target"), (by_source, by_target), pair_of(value), size, strict=True
        ):
            if is_used and isinstance(tensor, Tensor):
                if tensor.size(dim) != number:
                    return None
                found.append(_Slot(owner, name, kind, dim, tensor))
        return None if is_bare else found
    if is_bare and (isinstance(value, (tuple, list)) or (name.endswith("ptr") and value is not None)):
        return None
    if not isinstance(value, Tensor):
        return []
    if value.dim() and value.size(0) == num_edges and num_edges not in size:
        return [_Slot(owner, name, "edge", 0, value)]
    # The tensor may refer to vertices in another way, or may belong to vertices and not to edges.
    return None if {num_edges, *size} & {*value.shape} else [_Slot(owner, name, "whole", 0, value)]


def _bounds(slots: Sequence[_Slot], target: Tensor, number: int) -> list[int]:
    """Chooses the pieces: returns the first target of each piece, then the number of targets."""
    width = _COPIES * max(1, sum(slot.bytes_of_edge() for slot in slots))
    budget = max(1, PIECE_BYTES // width)
    if target.numel() + number <= budget:
        return [0, number]
    cost = (torch.bincount(target, minlength=number) + 1).cumsum(0).cpu()
    bounds, spent = [0], 0
    while bounds[-1] < number:
        end = int(torch.searchsorted(cost, spent + budget, right=True))
        bounds.append(max(end, bounds[-1] + 1))
        spent = int(cost[bounds[-1] - 1])
    return bounds


@dataclass(frozen=True, eq=False)
class _Piece:
    """Range of targets, and the edges into them, which are computed together.

    Attributes:
        begin, end: the targets are ``begin`` to ``end`` - 1.
        edges: int64 [m], numbers of the edges in the layer's list.
        sources: int64 [s], ascending, the rows of sources that the edges refer to.
        edge_index: int64 [2, m]; sources count in ``sources``, targets from ``begin``.
    """

    begin: int
    end: int
    edges: Tensor
    sources: Tensor
    edge_index: Tensor

    def of(self, slot: _Slot, tensor: Tensor) -> Tensor:
        """Returns the rows of an argument's ``tensor`` that the piece needs."""
        if slot.kind == "source":
            return tensor.index_select(slot.dim, self.sources)
        if slot.kind == "target":
            return tensor.narrow(slot.dim, self.begin, self.end - self.begin)
        return tensor.index_select(0, self.edges) if slot.kind == "edge" else tensor

    def add(self, slot: _Slot, total: Tensor, gradient: Tensor) -> None:
        """Adds a piece's ``gradient`` of an argument to ``total``, the gradient of the whole tensor."""
        if slot.kind == "source":
            total.index_add_(slot.dim, self.sources, gradient.to(total.dtype))
        elif slot.kind == "target":
            total.narrow(slot.dim, self.begin, self.end - self.begin).add_(gradient)
        elif slot.kind == "edge":
            total.index_copy_(0, self.edges, gradient.to(total.dtype))
        else:
            total.add_(gradient)


def _pieces(edge_index: Tensor, bounds: Sequence[int], num_rows: int) -> Iterator[_Piece]:
    target, order = edge_index[1].sort(stable=True)
    device = edge_index.device
    ends = torch.searchsorted(target, torch.tensor(bounds, device=device)).tolist()
    for at in range(len(bounds) - 1):
        edges = order[ends[at] : ends[at + 1]]
        named = edge_index[0, edges]
        is_named = torch.zeros(num_rows, dtype=torch.bool, device=device)
        is_named[named] = True
        sources = is_named.nonzero().flatten()
        place = torch.empty(num_rows, dtype=torch.int64, device=device)
        place[sources] = torch.arange(sources.numel(), device=device)
        local = torch.stack([place[named], target[ends[at] : ends[at + 1]] - bounds[at]])
        yield _Piece(bounds[at], bounds[at + 1], edges, sources, local)


# --- running the pieces -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Work:
    """Holds what a call of ``propagate`` in pieces needs in the forward and in the backward, except rows, which autograd keeps.

    Attributes:
        calls: the call under the name "", and under the name of an argument, the ``edge_updater`` call that computes it. They lack edges and tensors.
    """

    slots: list[_Slot]
    calls: Mapping[str, EdgeCall]
    bounds: Sequence[int]
    stand_ins: Mapping[int, Tensor]
    substituting: Callable[[Mapping[int, Tensor]], contextlib.AbstractContextManager[Any]]
    device: torch.device = field(init=False)
    autocast: tuple[bool, torch.dtype] = field(init=False)
    random: list[list[Tensor]] = field(default_factory=list)
    gradient: Tensor | None = None

    def __post_init__(self) -> None:
        self.device = self.slots[0].tensor.device if self.slots else torch.device("cpu")
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.conv, self.size, self.dim = self.calls[""].conv, self.calls[""].size, self.calls[""].conv.node_dim

    def release(self) -> None:
        """Forgets the arguments' rows after the forward. :class:`_Hold` has saved them for the backward."""
        for slot in self.slots:
            slot.tensor = slot.tensor.new_empty(0)

    def compute(self, piece: _Piece, rows: Sequence[Tensor]) -> Tensor:
        """Computes a piece: returns its rows of the result, from its ``rows`` of each argument."""
        given = {owner: dict(call.given) for owner, call in self.calls.items()}
        for slot, tensor in zip(self.slots, rows, strict=True):
            pair = given[slot.owner].get(slot.name) or (None, None)
            value: Any = tensor
            if slot.kind == "source":
                value = (tensor, pair[1])
            elif slot.kind == "target":
                value = (pair[0], tensor)
            given[slot.owner][slot.name] = value
        size = (piece.sources.numel(), piece.end - piece.begin)
        for owner in filter(None, self.calls):
            given[""][owner] = self.calls[owner].original(piece.edge_index, size=size, **given[owner])
        return self.calls[""].original(piece.edge_index, size=size, **given[""])


def _without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, Tensor)
        and not (isinstance(value, (tuple, list)) and any(isinstance(each, Tensor) for each in value))
    }


class _Hold(torch.autograd.Function):
    """Saves the arguments' rows for the backward, which computes each piece again and adds up its gradients.

    It saves the rows before :class:`_Run` computes the pieces. So a checkpoint, which repeats the forward only to get the saved rows, can stop there.
    """

    @staticmethod
    def forward(ctx: Any, work: _Work, edge_index: Tensor, *tensors: Tensor) -> Tensor:
        rows = tensors[: len(work.slots)]
        ctx.work = work
        ctx.save_for_backward(edge_index, *rows)
        return torch.zeros((), device=work.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        edge_index, *tensors = ctx.saved_tensors
        ctx.others = [*tensors, *work.stand_ins.values()]
        assert work.gradient is not None  # _Run.backward runs before
        back, work.gradient = work.gradient, None
        needed = ctx.needs_input_grad[2 : 2 + len(tensors)]
        totals = [torch.zeros_like(each) if need else None for each, need in zip(tensors, needed, strict=True)]
        leaves = {key: value.detach().requires_grad_() for key, value in work.stand_ins.items()}
        sums: list[Tensor | None] = [None] * len(leaves)
        kind = work.device.type
        with (
            same_draws(tensors),  # a repeated call must not change later draws
            unchanged(work.conv),
            work.substituting(leaves),
            torch.enable_grad(),
            torch.autocast(kind, enabled=work.autocast[0], dtype=work.autocast[1]),
        ):
            for number, piece in enumerate(_pieces(edge_index, work.bounds, work.size[0])):
                _set_random_state(work.device, work.random[number])
                rows = [
                    piece.of(slot, each).detach().requires_grad_(need)
                    for slot, each, need in zip(work.slots, tensors, needed, strict=True)
                ]
                out = work.compute(piece, rows)
                if not out.requires_grad:
                    continue
                wanted = [each for each, need in zip(rows, needed, strict=True) if need]
                part = back.narrow(work.dim, piece.begin, piece.end - piece.begin)
                found = [*torch.autograd.grad(out, [*wanted, *leaves.values()], part, allow_unused=True)]
                with torch.no_grad():
                    for slot, total in zip(work.slots, totals, strict=True):
                        if total is not None and (gradient := found.pop(0)) is not None:
                            piece.add(slot, total, gradient)
                    sums = [_added(total, gradient) for total, gradient in zip(sums, found, strict=True)]
        return None, None, *totals, *sums


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if total is None else total if gradient is None else total + gradient


class _Run(torch.autograd.Function):
    """Computes all pieces in the forward. Its backward only hands the gradient to :class:`_Hold`."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, work: _Work, edge_index: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        ctx.work = work
        out: Tensor | None = None
        for piece in _pieces(edge_index, work.bounds, work.size[0]):
            work.random.append(_random_state(work.device))  # in evaluation too: a network in the layer may still draw
            rows = work.compute(piece, [piece.of(slot, each) for slot, each in zip(work.slots, tensors)])
            if out is None:
                shape = [*rows.shape]
                shape[work.dim] = work.size[1]
                out = rows.new_empty(shape)
            out.narrow(work.dim, piece.begin, piece.end - piece.begin).copy_(rows)
        work.release()
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.work.gradient = gradient
        return torch.zeros((), device=gradient.device), None, None, None


@contextlib.contextmanager
def unchanged(conv: torch.nn.Module) -> Iterator[None]:
    """Restores, at the end of the context, attributes of layers in ``conv``. Some layers store rows of edges there."""
    before = [(vars(each), dict(vars(each))) for each in conv.modules() if isinstance(each, MessagePassing)]
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)


def _random_state(device: torch.device) -> list[Tensor]:
    """Returns the states of the CPU's random generator and, if it is another device, of the one of ``device``."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)
