"""Computes layers again in the backward, so that a rank keeps only their input rows in between.

Each message-passing layer is a section of :func:`torch.utils.checkpoint.checkpoint`. The forward keeps the layer's input rows. The backward calls the layer
again, which exchanges rows of the halo again, and frees what it computed before the backward of the layer below begins. The section uses the same
stand-ins of parameters in both calls, so gradients of parameters are summed once. Edge-wise work within a section runs in pieces
(:mod:`salientpp.fullgraph.pieces`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch_geometric.nn.conv import MessagePassing

from salientpp.fullgraph.pieces import EdgeCall, propagated, unchanged
from salientpp.fullgraph.rows_file import RowsFile
from salientpp.nn.layers import EDGE_ATTENTION, Replaced, name_of
from salientpp.nn.undo import runs_in
from salientpp.ops import end_return_of_freed_blocks, return_freed_blocks

#: Values of ``recompute`` in :func:`salientpp.distribute`.
KINDS = ("layers",)

#: Argument of attention layers that asks for a row for each edge.
_ASKS_FOR_EDGES = "return_attention_weights"


@dataclass(frozen=True, eq=False)
class _Call:
    """Call of a layer that the backward will repeat, or is repeating.

    Attributes:
        stand_ins: stand-ins of the model's trained parameters, by the ``id`` of the parameter.
        substituting: makes a context in which the model computes with given stand-ins.
        asks_for_edges: True if the caller wants a result with a row for each edge, which pieces cannot give.
        is_again: True in the backward.
    """

    stand_ins: Mapping[int, Tensor]
    substituting: Callable[[Mapping[int, Tensor]], contextlib.AbstractContextManager[None]]
    asks_for_edges: bool
    is_again: bool = False


class _Reentered(contextlib.AbstractContextManager[None]):
    """Context that can be entered several times. A user may call backward twice, and each backward computes the layers again."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


class _Before:
    """Copies of a layer's buffers, and of the numbers among its attributes, before its forward. With them the backward calls the layer again.

    A forward may change buffers, such as the vectors of ``spectral_norm``, and count its calls. Between forward and backward the user may call ``eval()``.
    Buffers are copied before every forward, because writes through ``.data`` and later writes cannot be noticed.
    """

    def __init__(self, conv: torch.nn.Module) -> None:
        self._parts = [*conv.modules()]
        self._buffers = _copies([module._buffers for module in self._parts])
        self._attributes = [*map(_plain_attributes, self._parts)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the layer, inside the context, what it had before the forward. Afterwards it has what it has now."""
        now, copies = [dict(vars(part)) for part in self._parts], _copies(self._buffers)
        try:
            for part, attributes in zip(self._parts, self._attributes, strict=True):
                _restore_numbers(part, attributes)
            with Replaced((vars(part), "_buffers", copied) for part, copied in zip(self._parts, copies, strict=True)):
                yield
        finally:
            for part, own in zip(self._parts, now, strict=True):
                for name in vars(part).keys() - own.keys():
                    del vars(part)[name]
                vars(part).update(own)


#: Stands for an attribute that is neither None nor a number. Its value is not kept, because it may be large.
_OTHER = object()


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Returns all attributes of a module by name: None, numbers such as ``training`` and a count of calls, and :data:`_OTHER` for others."""
    return {name: value if value is None or _is_number(value) else _OTHER for name, value in vars(module).items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _restore_numbers(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Gives back the numbers among the attributes ``before``. An attribute that is a number now may have been None, or may not have existed."""
    own = vars(module)
    for name in [name for name, value in own.items() if _is_number(value)]:
        if name not in before:
            del own[name]
        elif before[name] is None:
            own[name] = None
    own.update({name: value for name, value in before.items() if _is_number(value)})


def _copies(buffers: Sequence[dict[str, Tensor | None]]) -> list[dict[str, Tensor | None]]:
    """Copies the buffers of several modules, by name. Modules that share a buffer share its copy."""
    copies = {id(each): each.clone() for of_module in buffers for each in of_module.values() if each is not None}
    return [{name: copies.get(id(each)) for name, each in of_module.items()} for of_module in buffers]


@dataclass(eq=False)
class Recompute:
    """Calls a distributed model's layers, and decides what the forward keeps for the backward, as the user's option says.

    Attributes:
        kind: 'layers', or None to keep everything.
        rows_file: folder of a file for the rows of layers; None: they stay in memory.
    """

    kind: str | None = None
    rows_file: str | os.PathLike[str] | None = None
    _file: RowsFile | None = None
    _call: _Call | None = None

    def prepare(self) -> dict[str, str]:
        """Checks the options on this rank. Returns the facts that must be equal on all ranks.

        Raises:
            ValueError: an argument is wrong.
        """
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"recompute must be None or 'layers', got {self.kind!r}")
        if self.rows_file is not None and self.kind is None:
            raise ValueError("rows_file needs recompute='layers', got recompute=None, which keeps more than rows")
        self._hold()
        if self.rows_file is not None:
            self._file = RowsFile(self.rows_file)
        return {"recompute": repr(self.kind), "rows_file": "no folder" if self._file is None else "a folder"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Recompute:
        copied = Recompute(self.kind, self.rows_file, copy.deepcopy(self._file, memo))
        copied._hold()
        return copied

    def _hold(self) -> None:
        """Makes freed memory go back to the system (:func:`return_freed_blocks`) until this object is deleted, if layers are recomputed."""
        if self.kind is None:
            return
        return_freed_blocks()
        weakref.finalize(self, end_return_of_freed_blocks).atexit = False

    @property
    def is_again(self) -> bool:
        """True while the backward computes a layer again."""
        return self._call is not None and self._call.is_again

    def storing(self, x: Tensor, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """Wraps a call of the model on ``x`` [num_rows, ...], so that rows which autograd keeps are written to the file, if there is one."""
        return contextlib.nullcontext() if self._file is None else self._file.storing(x, num_rows)

    def layer(
        self,
        conv: MessagePassing,
        forward: Callable[..., Any],
        stand_ins: Mapping[int, Tensor],
        substituting: Callable[[Mapping[int, Tensor]], contextlib.AbstractContextManager[None]],
        again: Callable[[], contextlib.AbstractContextManager[None]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns a layer's ``forward(*args, **kwargs)``. Autograd keeps only its arguments, and the backward calls it again.

        Args:
            stand_ins: stand-ins of the model's trained parameters, by the ``id`` of the parameter.
            substituting: makes a context in which the model computes with given stand-ins.
            again: makes the context in which the backward calls ``forward``.
        """
        if self._call is not None:  # inside another layer
            return forward(*args, **kwargs)
        call = _Call(stand_ins, substituting, _asks_for_edges(conv, args, kwargs))
        if not torch.is_grad_enabled():
            with self._calling(call):
                return forward(*args, **kwargs)
        values, number, names = [*args, *kwargs.values()], len(args), [*kwargs]
        # Autograd keeps tables of rows. Other arguments stay the same objects, because values that are made once are found by the object.
        tensors = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        tables = [at for at in tensors if values[at].dim() > 1 and values[at].is_floating_point()]

        def run(*rows: Tensor) -> Any:
            given = [*values]
            for at, table in zip(tables, rows, strict=True):
                given[at] = table
            return forward(*given[:number], **dict(zip(names, given[number:], strict=True)))

        rows = [values[at] for at in tables]
        for at in tables:
            values[at] = None  # `run` must not keep the tables

        before = _Before(conv)

        @contextlib.contextmanager
        def running_again() -> Iterator[None]:
            with self._calling(replace(call, is_again=True)), unchanged(conv), before.restored(), again():
                yield

        contexts = self._calling(call), _Reentered(running_again)
        return torch_checkpoint.checkpoint(run, *rows, use_reentrant=False, context_fn=lambda: contexts)

    def _calling(self, call: _Call) -> Replaced:
        return Replaced([(vars(self), "_call", call)])

    def over_edges(self, over: EdgeCall) -> Any:
        """Computes ``propagate`` or ``edge_updater``, in pieces if possible."""
        call = self._call
        if call is not None and not call.asks_for_edges:
            if not over.is_edge_level:
                return propagated(over, call.stand_ins, call.substituting)
            if type(over.conv) in EDGE_ATTENTION:  # only passes this result on
                return over
        return over.compute()

    def refuse_checkpoint(self, module: torch.nn.Module, root: torch.nn.Module) -> None:
        """Refuses to run ``module``, a part of ``root``, inside the user's ``torch.utils.checkpoint``.

        Raises:
            ValueError: it runs there. The backward would call it outside the model, where ranks exchange no rows.
        """
        if self._call is None and runs_in([torch_checkpoint.__file__]):
            _refuse(next(name_of(each, path) for path, each in root.named_modules() if each is module))


def _asks_for_edges(conv: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the arguments of a layer ask for a result with a row for each edge, such as attention weights."""
    if kwargs.get(_ASKS_FOR_EDGES) is not None:
        return True
    names = [*inspect.signature(type(conv).forward).parameters][1 : 1 + len(args)]
    return any(name == _ASKS_FOR_EDGES and value is not None for name, value in zip(names, args))


def refuse_checkpoint_of_model() -> None:
    """Raises ValueError if a distributed model is called inside a section of ``torch.utils.checkpoint``."""
    if runs_in([torch_checkpoint.__file__]):
        _refuse("a distributed model")


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"{what} cannot be called inside torch.utils.checkpoint, whose backward would call it outside the model's forward, where it cannot exchange rows "
        "with other ranks; remove the checkpoint, and pass recompute='layers' to salientpp.distribute to keep only the layers' input rows"
    )
