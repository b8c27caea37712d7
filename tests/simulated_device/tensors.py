"""Tensors of the device. An operation on them is queued on the current stream, and executed later on the CPU.

A :class:`SimulatedTensor` has the sizes, strides and dtype of its value, and a CPU tensor of the same form, ``host``, which lies in the device's memory. Meta
tensors give the form of a result. Views share the memory of their base, and need no queue. An operation whose result has a form or a
value that the host must know (``nonzero``, ``item``, ``equal``) synchronises.

The device reads pinned host memory in place, as CUDA kernels can. It reads the memory when the operation is executed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.simulated_device import copies
from tests.simulated_device.memory import Block, pinned_block_of
from tests.simulated_device.scheduler import scheduler
from tests.simulated_device.streams import NAME, Stream, current_stream

aten = torch.ops.aten

#: Operations that need the values of index tensors, and accept index tensors of the host.
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}

_wanted = threading.local()  # the class of the next result of an operation


class SimulatedTensor(Tensor):
    """A tensor on the device.

    Attributes:
        block: the memory. It is free when no tensor refers to it any more.
        host: CPU tensor of the same form in this memory.
    """

    block: Block
    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def record_stream(self, stream: Stream) -> None:
        """Keeps the memory, once it is free, until ``stream`` has executed what is then in its queue."""
        self.block.used_on.add(stream.queue)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        _wanted.cls = None if issubclass(SimulatedTensor, cls) else _simulated(cls)
        try:
            return torch.ops.aten.alias.default(self)
        finally:
            _wanted.cls = None

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # reading the values would synchronise
        return f"SimulatedTensor({list(self.shape)}, dtype={self.dtype}, device='{self.device}')"


@functools.cache
def _simulated(cls: type[Tensor]) -> type[SimulatedTensor]:
    """Returns a subclass of ``cls`` for tensors on the device."""
    return type(cls.__name__, (cls, SimulatedTensor), {})


def wrap(host: Tensor, block: Block) -> SimulatedTensor:
    """Returns the device tensor of a CPU tensor in the memory of ``block``."""
    tensor = Tensor._make_wrapper_subclass(
        getattr(_wanted, "cls", None) or SimulatedTensor,
        host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=torch.device(NAME, 0),
    )  # fmt: skip
    tensor.host, tensor.block = host, block
    return tensor


def allocate(size: Any, stride: Any, dtype: torch.dtype) -> SimulatedTensor:
    """Returns a device tensor in new memory of the current stream."""
    num_values = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
    block = Block(num_values * dtype.itemsize, current_stream().queue)
    with torch.inference_mode(False), torch.no_grad():
        host = torch.empty(0, dtype=dtype, device="cpu").set_(block.memory.untyped_storage(), 0, size, stride)
    return wrap(host, block)


def allocate_like(form: Tensor) -> SimulatedTensor:
    return allocate(form.size(), form.stride(), form.dtype)


def enqueue(operation: Callable[[], None]) -> None:
    """Queues an operation on the current stream."""
    scheduler.add(current_stream().queue, operation)


def synchronize() -> None:
    """Executes what the current stream has queued."""
    current_stream().synchronize()


# --- operations ---------------------------------------------------------------------------------------------


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Executes or queues one of torch's operators, of which at least one argument is on the device."""
    if func in copies.OPERATIONS:
        return copies.OPERATIONS[func](*args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # only in inference mode, because autograd has done so otherwise
    target = kwargs.get("device")
    if target is not None and torch.device(target).type != NAME:  # such as zeros_like(x, device="cpu")
        return func(*_on_meta(args), **_on_meta(kwargs))
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if func is aten.detach.default or _is_view(func):
        return _view(func, args, kwargs)
    inputs = _inputs(func, args, kwargs)
    if torch.Tag.data_dependent_output in func.tags:
        return _run_now(func, *inputs)
    returned = [r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns]
    if returned and all(returned):
        return _write(func, args, kwargs, inputs)
    is_dynamic = torch.Tag.dynamic_output_shape in func.tags
    try:
        forms = func(*_on_meta(args), **_on_meta(kwargs))
    except NotImplementedError:  # the operation has no meta kernel
        forms = None if is_dynamic else _tried(func, inputs)
    except RuntimeError:
        if not is_dynamic:
            raise
        forms = None
    return _run_now(func, *inputs) if forms is None else _run_later(func, inputs, forms)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    block = next(leaf.block for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SimulatedTensor))
    with torch.inference_mode(False), torch.no_grad():
        hosts = func(*_on_host(args), **_on_host(kwargs))
    return tree_map_only(Tensor, lambda host: wrap(host, block), hosts)


def _write(func: Any, args: Any, kwargs: Any, inputs: tuple[Any, Any]) -> Any:
    """Queues an operation that only writes to its arguments."""
    written = [
        value
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in [args[at] if at < len(args) else kwargs.get(argument.name)]
        if value is not None
    ]

    def run() -> None:
        func(*inputs[0], **inputs[1])
        for tensor_host, size in before:
            if tensor_host.size() != size:
                raise NotImplementedError(f"{func} resizes its output, which the simulated device does not support")

    leaves = [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, SimulatedTensor)]
    before = [(leaf.host, leaf.host.size()) for leaf in leaves]
    enqueue(run)
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _run_later(func: Any, inputs: tuple[Any, Any], forms: Any) -> Any:
    """Queues an operation. ``forms`` are tensors with the form of its results."""
    leaves, spec = tree_flatten(forms)
    outs = [allocate_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    hosts = [out.host if isinstance(out, SimulatedTensor) else None for out in outs]

    def run() -> None:
        for host, result in zip(hosts, tree_flatten(func(*inputs[0], **inputs[1]))[0], strict=True):
            if host is not None:
                host.copy_(result)

    enqueue(run)
    return tree_unflatten(outs, spec)


def _run_now(func: Any, args: Any, kwargs: Any) -> Any:
    """Synchronises, and executes an operation at once."""
    synchronize()
    with torch.inference_mode(False), torch.no_grad():
        results = func(*args, **kwargs)

    def moved(result: Tensor) -> SimulatedTensor:
        out = allocate_like(result)
        host = out.host  # the queue must not refer to the device tensor
        enqueue(lambda: host.copy_(result))  # type: ignore[arg-type, return-value]
        return out

    return tree_map_only(Tensor, moved, results)


def _tried(func: Any, inputs: tuple[Any, Any]) -> Any:
    """Returns results that have the right form: those of zeros. For operations that have no meta kernel."""
    args, kwargs = tree_map_only(Tensor, torch.zeros_like, inputs)
    return func(*args, **kwargs)


# --- arguments ----------------------------------------------------------------------------------------------


def _on_host(values: Any) -> Any:
    return tree_map_only(SimulatedTensor, lambda tensor: tensor.host, values)


def _on_meta(values: Any) -> Any:
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), values
    )


def _inputs(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments as CPU tensors.

    Raises:
        RuntimeError: an argument is on another device, and is neither a scalar nor pinned.
    """

    def of_host(tensor: Tensor) -> Tensor:
        if isinstance(tensor, SimulatedTensor):
            return tensor.host
        pinned = pinned_block_of(tensor)
        if pinned is not None and func not in _INDEXED:
            return pinned.view_of(tensor)
        if tensor.dim() == 0 or func in _INDEXED:
            return tensor.clone()
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and {tensor.device}"
        )

    return tree_map_only(Tensor, of_host, (args, kwargs))
