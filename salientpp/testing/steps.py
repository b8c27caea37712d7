"""Steps of a model on a small graph, in float64: its outputs, gradients, buffers and inputs by name, and the comparison of two models by them."""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput

from salientpp.ways.sums.marked import EDGE_WEIGHTS, EDGES, ROWS, Delivered, mark
from salientpp.ways.sums.plan import Wire, plan_sums
from salientpp.ways.sums.way import Partial

#: Attributes whose gradients are compared, if the model reads them.
LEARNT = ("x", "edge_weight", "edge_attr", "pos")

#: Contexts in which a step has no backward pass.
_WITHOUT_GRADIENTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def graph() -> Data:
    """Makes a graph with self-loops, repeated edges and isolated vertices, and the attributes that PyG's layers read."""
    draw = torch.Generator().manual_seed(1)
    ends = torch.randint(110, (2, 300), generator=draw)
    ends[0, :15] = ends[1, :15]  # self-loops
    ends[:, 20:40] = ends[:, 40:60]  # repeated edges
    rows = {
        name: torch.randn(120, size, generator=draw).double() for name, size in (("x", 6), ("pos", 3), ("normal", 3))
    }
    edges = {
        "edge_weight": torch.rand(300, generator=draw).double() + 0.1,
        "edge_attr": torch.rand(300, 3, generator=draw).double(),
    }
    kinds = {
        "edge_type": torch.randint(3, (300,), generator=draw),
        "node_type": torch.randint(2, (120,), generator=draw),
    }
    return Data(edge_index=ends, **rows, **edges, **kinds)


def copy_values(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Copies parameters and buffers: some layers of PyG leave parameters without values. A state dictionary would also read parametrised weights."""
    for value, copied in zip([*model.parameters(), *model.buffers()], [*other.parameters(), *other.buffers()]):
        copied.data.copy_(value.data)


class Rows:
    """Graph of a rank in place of a batch of :func:`run_step`.

    Attributes:
        batch_size: number of rows that count.
        n_id: ids of their vertices in the whole graph.
    """

    def __init__(self, part: Any, n_id: Tensor, batch_size: int) -> None:
        self.part, self.n_id, self.batch_size, self.edge_index = part, n_id, batch_size, part.edge_index

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self.part, name)


def run_step(
    model: torch.nn.Module,
    batch: Any,
    names: Sequence[str],
    seed: int,
    mode: str = "train",
    given: str = "leaf",
    penalty: str = "none",
    *,
    begin: Callable[[], None] = lambda: None,
    more: Sequence[Any] = (),
) -> dict[str, Tensor]:
    """Returns the seeds' outputs, gradients, buffers and inputs of one call by name. Gradients are of a fixed sum over seeds.

    Args:
        names: attributes of the batch that the model is called with.
        seed: of the model's random numbers.
        mode: 'train', 'eval', 'no_grad' or 'inference'.
        given: attributes are leaves with gradients ('leaf'), computed from such ('computed'), without gradients ('constant'), or the batch's own ('stored').
        penalty: 'gradient' or 'hessian' adds first derivatives to the loss.
        begin: is called before the model.
        more: further arguments of the model.
    """
    torch.manual_seed(seed)
    model.train(mode == "train")
    begin()
    tensors = {
        name: batch[name] if given == "stored" else batch[name].clone() for name in names if name != "edge_index"
    }
    floating = [name for name in LEARNT if name in tensors and given in ("leaf", "computed")]
    learnt = {name: tensors[name].requires_grad_() for name in floating}
    if given == "computed":
        tensors.update({name: value * 1 for name, value in learnt.items()})
    with _WITHOUT_GRADIENTS.get(mode, contextlib.nullcontext)():
        whole = model(*({**tensors, "edge_index": batch.edge_index}[name] for name in names), *more)
    outputs = (
        list(whole.values())
        if isinstance(whole, dict)
        else list(whole)
        if isinstance(whole, (tuple, list))
        else [whole]
    )
    is_rows = [out.dim() == 2 or (out.dim() == 1 and isinstance(whole, Tensor)) for out in outputs]
    outputs = [out[: batch.batch_size] if rows else out for out, rows in zip(outputs, is_rows)]
    found = {f"output {k}": out.detach().clone() for k, out in enumerate(outputs)}
    loss = _loss(outputs, is_rows, batch.n_id[: batch.batch_size])
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    wanted = {**parameters, **learnt}
    steps_back = mode not in _WITHOUT_GRADIENTS and loss.requires_grad
    if steps_back and penalty == "hessian" and wanted:
        firsts = torch.autograd.grad(loss, list(wanted.values()), create_graph=True, allow_unused=True)
        loss = sum((first * first.detach().cos()).sum() for first in firsts if first is not None)
    elif steps_back and penalty == "gradient" and learnt:
        first = torch.autograd.grad(loss, learnt["x"], create_graph=True, allow_unused=True)[0]
        loss = loss if first is None else loss + first.square().sum()
    for value in wanted.values():
        value.grad = None
    if steps_back and getattr(loss, "requires_grad", False):
        loss.backward()
    found.update({f"gradient of {name}": value.grad for name, value in wanted.items() if value.grad is not None})
    found.update({f"buffer {name}": value.detach().clone() for name, value in model.named_buffers()})
    found.update({f"input {name}": value.detach().clone() for name, value in tensors.items()})
    return found


def _loss(outputs: Sequence[Tensor], is_rows: Sequence[bool], ids: Tensor) -> Any:
    """Returns a sum over outputs, in which the weight of a row depends on its vertex only."""
    loss: Any = 0
    for out, rows in zip(outputs, is_rows):
        number = torch.arange(out.numel()).view(out.shape)
        if rows and len(out):
            number = ids[: len(out)].view(-1, *[1] * (out.dim() - 1)) * out[0].numel() + number[:1]
        loss = loss + (out * (number + 1.0).double().cos()).sum() + out.square().sum()
    return loss


def difference(expected: dict[str, Tensor], got: dict[str, Tensor]) -> tuple[str, Any] | None:
    """Returns the name of the first tensor that differs, and by how much relative to its largest value; None if all are equal.

    Values that are infinite or no numbers must be so in both. If a gradient has some, no gradients are compared.
    """
    gradients = [value for name, value in expected.items() if name.startswith("gradient")]
    has_gradients = all(bool(value.isfinite().all()) for value in gradients)
    # A gradient that is nearly 0 is a sum of large terms, which are rounded.
    largest = max(map(_largest, gradients), default=0)
    seeds = max((_largest(value) for name, value in expected.items() if name.startswith("output")), default=0)
    for name in [*expected, *(got.keys() - expected.keys())]:
        if name.startswith("gradient") and not has_gradients:
            continue
        one, other = (found.get(name, torch.zeros(())).double() for found in (expected, got))
        if name in expected and name in got and one.shape != other.shape:
            return name, f"{tuple(one.shape)} and {tuple(other.shape)}"
        one, other = torch.broadcast_tensors(one, other)
        if not torch.equal(one.isfinite(), other.isfinite()):
            return name, "infinite or no numbers in one of them only"
        off = _largest(one - other)
        scale = largest if name.startswith("gradient") else max(_largest(one), 1e-5 * seeds)
        if not off <= 1e-9 * scale:
            return name, float(off / scale)
    return None


def _largest(value: Tensor) -> Any:
    """Returns the largest magnitude among the finite values; 0 if there are none."""
    finite = value.abs()[value.isfinite()]
    return finite.max() if finite.numel() else 0


def summed(batch: Any, data: Data, seed: int, reduction: str, weight: str | None) -> Any:
    """Returns a batch in which sums of rows replace rows, as a loader with ``partial_aggregation`` gives it.

    Some of the batch's last vertices are left out, as if other ranks owned them.
    """
    sampled, edges = list(batch.num_sampled_nodes), list(batch.num_sampled_edges)
    mfg = SamplerOutput(batch.n_id, batch.edge_index[0], batch.edge_index[1], batch.e_id, None, sampled, edges)
    draw = torch.Generator().manual_seed(seed)
    owner = torch.randint(-1, 2, (sampled[-1],), generator=draw)
    left, sums = plan_sums(mfg, owner, 2, Wire(40, 1))
    rows = data.x[sums.source]
    if weight is not None:
        rows = rows * data[weight][sums.edge].view(-1, 1)
    reduce: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
    values = [reduce[reduction](each, 0) for each in rows.split(sums.size.tolist())]
    value = torch.stack(values) if values else rows[:0]
    partial = Partial(sums.target, value, sums.size, reduction, weight)
    counts = left.num_sampled_edges
    delivered = Delivered(
        partial, len(counts), batch.batch_size, left.node.numel(), tuple(itertools.accumulate(counts))
    )
    made = batch.clone()
    for name, value_of_all in data:
        if name != "edge_index":
            made[name] = value_of_all[left.node if data.is_node_attr(name) else left.edge].clone()
    made.edge_index, made.n_id, made.e_id = torch.stack([left.row, left.col]), left.node, left.edge
    made.partial = partial
    for name, role in (("edge_index", EDGES), ("x", ROWS), (weight, EDGE_WEIGHTS)):
        if name is not None:
            made[name] = mark(made[name], delivered, role, given=True)
    return made


def is_in_words(error: BaseException, model: torch.nn.Module, arguments: Sequence[str] = ()) -> bool:
    """Returns True if the package raised an error on purpose, and the text names the model, one of its modules or an argument."""
    if not isinstance(error, (ValueError, TypeError, RuntimeError)):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "salientpp" not in Path(last.filename).parts or not (last.line or "").startswith("raise"):
        return False
    names = {type(each).__name__ for each in model.modules()} - {"Model"}
    return any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in {*names, "model", *arguments})
