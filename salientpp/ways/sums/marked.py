"""Marks the tensors of a batch in which sums replace rows, so that every use that would give wrong results raises an error.

A loader with ``partial_aggregation`` marks ``x``, ``edge_index`` and the weights of its batches. Moves and copies keep the mark, and so do operations that
work on each row separately. An operation that combines several rows, and every computation on ``edge_index``, is an error.
:func:`salientpp.nn.merge_partial` gives the layers of a model the plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor

from salientpp.containers import found, mapped, tensors_of

EDGES, ROWS, EDGE_WEIGHTS = "edge_index", "x", "weights"

#: Attributes and methods that describe a tensor; a model computes nothing from their results.
_DESCRIBES = frozenset([
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "ndim", "names", "output_nr", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "itemsize", "nbytes", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_mkldnn", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested",
    "retains_grad", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "is_pinned", "is_shared",
    "element_size", "data_ptr", "untyped_storage", "__len__", "__repr__", "__format__", "__hash__", "is_floating_point", "is_complex", "is_same_size",
    "is_inference", "is_signed", "is_neg", "is_conj", "get_device", "record_stream", "register_hook", "retain_grad", "equal", "allclose"
])  # fmt: skip
#: Methods that give the same values, perhaps in other memory.
_COPIES = frozenset([
    "to", "cpu", "cuda", "clone", "detach", "detach_", "contiguous", "pin_memory", "share_memory_", "alias", "requires_grad_"
])  # fmt: skip
#: Operations on single elements of several tensors, which broadcast.
BROADCASTING = (
    "add sub subtract mul multiply div divide true_divide truediv pow maximum minimum lerp addcmul addcdiv where masked_fill "
    "eq ne lt le gt ge and or logical_and logical_or"
)
#: Operations on single elements, named without the underscores of special methods and of operations in place.
_ELEMENTWISE = frozenset([
    *BROADCASTING.split(),
    "abs", "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tanh", "sigmoid", "logsigmoid", "log_sigmoid",
    "relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "tanhshrink", "softshrink",
    "hardshrink", "hardtanh", "hardsigmoid", "hardswish", "threshold", "erf", "sign", "clamp", "clip", "nan_to_num", "radd", "iadd", "rsub", "isub",
    "rmul", "imul", "rdiv", "rtruediv", "itruediv", "rpow", "isnan", "isfinite", "isinf", "logical_not", "invert", "dropout", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "native_dropout", "zeros_like", "ones_like", "rand_like", "randn_like", "empty_like", "full_like",
    "float", "double", "half", "bfloat16", "type", "type_as", "to"
])  # fmt: skip
#: Operations along dimensions: the position of ``dim`` among the arguments, and its default. The first dimension is refused.
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(["softmax", "log_softmax", "sum", "mean", "amax", "amin", "max", "min", "logsumexp", "prod", "cumsum", "std", "var", "argmax"], (1, None)),
    **dict.fromkeys(["cat", "concat", "concatenate", "unsqueeze", "squeeze", "stack", "narrow", "select", "unbind"], (1, None)),
    **dict.fromkeys(["norm", "vector_norm", "linalg_vector_norm"], (2, None)),
    **dict.fromkeys(["chunk", "split"], (2, 0)),
    "normalize": (2, 1),
    "glu": (1, -1),
    "flatten": (1, 0),
}  # fmt: skip
_VIEWS = frozenset({"view", "reshape", "view_as"})


@dataclass(frozen=True, eq=False)
class Delivered:
    """Facts about a batch that its marked tensors need to check operations.

    Attributes:
        partial: the batch's :class:`~salientpp.ways.sums.way.Partial`.
        hops: number of hops of the sampler, which limits the layers between ``x`` and the seeds.
        seeds: number of seeds, which are the batch's first vertices; a model's outputs are right only for them.
        num_nodes: number of vertices of the batch.
        edges_to: number of edges of the first hop, of the first two hops together, and so on.
    """

    partial: Any
    hops: int
    seeds: int
    num_nodes: int
    edges_to: tuple[int, ...]


class Marked(Tensor):
    """Tensor of a batch of a loader with ``partial_aggregation``, where one sum may stand for several rows.

    An operation on it whose result may be wrong for that reason raises an error.

    Attributes:
        delivered: sizes, hops and sums of the tensor's batch.
        role: :data:`EDGES`, :data:`ROWS` or :data:`EDGE_WEIGHTS`.
        level: for rows, the number of layers that computed them from ``x``.
    """

    delivered: Delivered
    role: str
    level: int
    _version_given: int | None

    def plain(self) -> Tensor:
        """Returns the tensor as a plain one, for inspection. Operations on the plain tensor are not checked."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def is_given(self) -> bool:
        """True if the values are still the ones that the loader gave."""
        return self._version_given == _version_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Marked:
        memo[id(self)] = copied = mark(
            self.plain().detach().clone(), self.delivered, self.role, self.level, self.is_given
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the tensor, which is marked again when it is loaded, because its version counter restarts."""
        return mark, (self.plain().detach(), self.delivered, self.role, self.level, self.is_given)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        marked = list(marked_in([args, kwargs]))
        with torch._C.DisableTorchFunctionSubclass():
            if name in _DESCRIBES:
                return func(*args, **kwargs)
            first = marked[0]
            if name in _COPIES and first is args[0] and len(marked) == 1:
                out = func(*args, **kwargs)
                same = first.is_given and out.dtype == first.dtype
                return out if out is first else mark(out, first.delivered, first.role, first.level, given=same)
            if name in ("__getitem__", "narrow") and first is args[0]:
                cut = _first_of(first, name, args, kwargs)
                if cut is not None:
                    return cut
            _check(func, name, marked, args, kwargs)
            return _mark_all(func(*args, **kwargs), name, marked)


def leave_to_python() -> None:
    """Makes ``torch.compile`` leave operations on marked tensors to Python, where they are checked. torch keeps this setting for each thread."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(Marked)


def mark(value: Tensor, delivered: Delivered, role: str, level: int = 0, given: bool = False) -> Marked:
    """Makes a tensor :class:`Marked`, so that its operations are checked. ``given``: its values are still those that the loader gave."""
    if given:
        leave_to_python()
    with torch._C.DisableTorchFunctionSubclass():
        marked = value if isinstance(value, Marked) else value.as_subclass(Marked)
        marked.delivered, marked.role, marked.level = delivered, role, level
        marked._version_given = _version_of(marked) if given else None
    return marked


def marked_in(value: Any) -> Iterator[Marked]:
    """Yields each :class:`Marked` tensor in a value, also inside containers."""
    return found(value, Marked)


def unmarked(value: Any) -> Any:
    """Returns a value with plain tensors instead of :class:`Marked` ones, also inside containers."""
    return mapped(value, lambda each: each.plain() if isinstance(each, Marked) else each)


def _version_of(tensor: Tensor) -> int:
    """Returns the number of writes in place. -1 for inference tensors, for which torch refuses such writes."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if tensor.is_inference() else tensor._version


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = func.__self__.__name__
        return attribute if attribute in _DESCRIBES else f".{attribute}"
    return name


def _refuse(name: str, role: str, why: str) -> RuntimeError:
    called = name.strip("_") if name.startswith("__") else name
    subject = f"the {role}" if role == EDGES else f"values from the {role}"
    return RuntimeError(f"{called} was called on {subject} of a batch with sums (partial_aggregation), {why}")


def _first_of(value: Marked, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Applies an index that selects the batch's first vertices, or the edges of its first hops. Returns None for any other index."""
    size, dim = value.size(), 1 if value.role == EDGES else 0
    index: Any
    if name == "narrow":
        given = dict(zip(("self", "dim", "start", "length"), args)) | kwargs
        if given["dim"] % len(size) != dim or given["start"] != 0:
            return None
        index, end = (slice(None),) * dim + (slice(0, given["length"]),), int(given["length"])
    else:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(not isinstance(each, (slice, int, type(None))) and each is not Ellipsis for each in index):
            return None
        if not all(isinstance(each, slice) for each in index[: dim + 1]) or len(index) <= dim:
            return None
        begin, end, step = index[dim].indices(size[dim])
        if (begin, step) != (0, 1):
            return None
    cut = value.as_subclass(Tensor)[index]
    if value.role == EDGES:
        if index[0] != slice(None) or len(index) != 2:
            return None
        if end == size[1]:
            return mark(cut, value.delivered, EDGES, given=value.is_given)
        return mark(cut, value.delivered, EDGES) if end in value.delivered.edges_to else None
    if value.role == ROWS and end <= value.delivered.seeds:
        return cut
    return mark(cut, value.delivered, value.role, value.level)


def _check(func: Any, name: str, marked: list[Marked], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises an error if an operation does not work on each row separately."""
    roles = {each.role for each in marked}
    if EDGES in roles:
        raise _refuse(
            name,
            EDGES,
            "which lacks the edges that sums replace; only layers of PyG's MessagePassing can use it; call salientpp.nn.merge_partial(model) on the whole "
            "model and pass batch.edge_index to the layers unchanged, or leave the loader's partial_aggregation out",
        )
    role = marked[0].role
    if len(roles) > 1 or len({id(each.delivered) for each in marked}) > 1:
        raise _refuse(name, role, "together with other tensors of such batches, whose rows belong to other vertices")
    if name == "batch_norm" and kwargs.get("training", args[5] if len(args) > 5 else False):
        raise _refuse(
            name,
            role,
            "while training: the batch mean would lack the rows that sums replace; use LayerNorm, or leave partial_aggregation out",
        )
    in_place = (
        name.endswith("_") and not name.startswith("__")
    ) or (name.startswith("__i") and name != "__invert__") or kwargs.get("inplace") or kwargs.get("out") is not None  # fmt: skip
    if in_place and any(each.is_given for each in marked):
        raise _refuse(
            name, role, "in place: the rows inside sums would not change; change the stored rows instead"
        )  # fmt: skip
    if not _is_row_wise(name.strip("_"), marked, args, kwargs):
        raise _refuse(
            name,
            role,
            "and is not known to work on each row separately. The batch lacks the rows that sums replace. Take the rows of the seeds first, "
            "out[:batch.batch_size]; inspect values with .plain(); or leave the loader's partial_aggregation out",
        )


def _is_row_wise(name: str, marked: list[Marked], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    first, ndim = marked[0], marked[0].dim()
    if name in _ELEMENTWISE or name in _VIEWS:
        # With different numbers of dimensions, broadcasting would put rows along another dimension.
        across = max(each.dim() for each in tensors_of([args, kwargs])) > min(each.dim() for each in marked)
        return not across and all(each.dim() == 0 or each.size(0) == first.size(0) for each in marked)
    if name in _ALONG:
        position, default = _ALONG[name]
        dim = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else default))
        if name == "flatten":
            dim = kwargs.get("start_dim", dim)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        most = ndim + (name in ("unsqueeze", "stack"))
        return bool(dims) and all(type(each) is int and each % most != 0 for each in dims)
    if name in ("transpose", "swapaxes"):
        return all(type(each) is int and each % ndim != 0 for each in args[1:]) and len(args) == 3
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return len(marked) == 1 and index[0] in (slice(None), Ellipsis) and len(index) <= ndim and index[0] is not Ellipsis  # fmt: skip
    if name == "linear":
        return len(marked) == 1 and args[0] is first and ndim > 1
    if name in ("matmul", "mm"):
        return len(marked) == 1 and args[0] is first and ndim > 1 and args[1].dim() <= 2
    if name == "addmm":
        return len(marked) == 1 and args[1] is first and args[0].dim() == 1
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return len(marked) == 1 and len(shape) < ndim
    return name in ("batch_norm", "group_norm") and ndim > 1


def _mark_all(out: Any, name: str, marked: list[Marked]) -> Any:
    first, level = marked[0], max(each.level for each in marked)
    if any(out is each for each in marked):  # an operation in place, or dropout with p = 0
        out.level = level
        return out
    if isinstance(out, Tensor):
        if not out.dim() or out.size(0) != first.size(0):
            raise _refuse(name, first.role, "and its result does not have one row for each input row")
        reshaped = first.role == EDGE_WEIGHTS and first.is_given and name in (*_VIEWS, "squeeze", "unsqueeze")
        return mark(out, first.delivered, first.role, level, given=reshaped)
    return mapped(out, lambda each: _mark_all(each, name, marked)) if isinstance(out, (list, tuple)) else out
