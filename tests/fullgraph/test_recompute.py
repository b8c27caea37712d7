"""Laws of layers that are computed again in the backward: rows of edges and of the halo are not kept, and no rank waits."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any

import distributed
import pytest
import torch
import torch_geometric.nn as pyg
from fullgraph_training import data_of, network, train, train_alone
from own_pages import has_own_pages, needs_counts_of_blocks
from rare import rare
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from salientpp.fullgraph import distribute, local, loss_mean, pieces, plan_for, rows_file

#: Bytes of a piece that holds some edges of the small graph.
SMALL = 6000


F, H, N = 6, 12, 41
OFFSETS = {1: [0, N], 2: [0, 7, N]}


def graph() -> Data:
    draw = torch.Generator().manual_seed(5)
    source = (torch.rand(170, generator=draw).square() * N).long()
    edge_index = torch.stack([source, torch.randint(N - 2, (170,), generator=draw)])
    x = torch.randn(N, F, generator=draw).double()
    return Data(edge_index=edge_index, x=x, train_mask=torch.rand(N, generator=draw) < 0.5)


# --- what is kept -------------------------------------------------------------------------------------------


class Tracked(TorchDispatchMode):
    """Records the memory of every tensor of floats that an operation returns, and the largest one.

    Args:
        before: tensors that existed before and do not count.
    """

    def __init__(self, before: Set[int] = frozenset()) -> None:
        super().__init__()
        self.before = before
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor) and each.layout == torch.strided and each.is_floating_point():
                storage = each.untyped_storage()
                if storage.data_ptr() not in self.before:
                    self.largest = max(self.largest, storage.nbytes())
                    self.found[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def kept(self) -> dict[int, int]:
        """Returns the tensors that are still in memory: address -> bytes."""
        return {at: size for at, (storage, size) in self.found.items() if not storage.expired()}


#: If all layers kept rows of the halo, these would exceed the rows that are kept anyway.
LAYERS = 10
#: Without a halo, rows of edges exceed those in fewer layers.
FEW = 4


class Deep(torch.nn.Module):
    def __init__(self, kind: str, number: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(1)
        make = {
            "sage": lambda: pyg.SAGEConv(F, F),
            "gat": lambda: pyg.GATConv(F, F // 2, heads=2),
            "gatv2": lambda: pyg.GATv2Conv(F, F // 2, heads=2),
            "transformer": lambda: pyg.TransformerConv(F, F // 2, heads=2),
        }
        self.convs = torch.nn.ModuleList([make[kind]() for _ in range(number)])
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


def persisting(model: Any, part: Any) -> set[int]:
    """Trains a step. Returns the addresses of tensors that exist after it: rows, parameters, gradients, and values that are made once."""
    with Tracked() as tracked:
        model(part.x, part.edge_index).sum().backward()
    return {*tracked.kept()}


def kept_bytes(rank: int, size: int, kind: str, number: int) -> list[tuple[int, int, int]]:
    """Returns :func:`kept_bytes_of` of training with and without ``recompute``."""
    return [kept_bytes_of(size, kind, number, recompute) for recompute in ("layers", None)]


def kept_bytes_of(size: int, kind: str, number: int, recompute: str | None) -> tuple[int, int, int]:
    """Returns the bytes of a table of own rows, those kept between forward and backward, and those of the largest tensor."""
    pieces.PIECE_BYTES = SMALL
    part = local(graph(), offsets=OFFSETS[size])
    model = distribute(Deep(kind, number), part, recompute=recompute)
    with Tracked(persisting(model, part)) as tracked:
        out = model(part.x, part.edge_index)
        kept = sum(tracked.kept().values())
        out.sum().backward()
    return part.x.nbytes, kept, tracked.largest


@pytest.mark.parametrize(
    ("size", "kind", "number"),
    [
        *((2, "sage", LAYERS), (2, "gat", LAYERS), (1, "gatv2", FEW), (1, "transformer", FEW)),
        *rare((1, "sage", LAYERS), (1, "gat", LAYERS), (2, "gatv2", LAYERS), (2, "transformer", LAYERS)),
    ],
)
def test_only_rows_of_own_vertices_are_kept_and_edges_exist_in_pieces(size, kind, number):
    small = 4 * N * F * 8  # the connection has the rows of the last two exchanges
    found = distributed.run(kept_bytes, size, size, kind, number)
    for (rows, kept, largest), _ in found:
        assert kept <= number * rows + small  # the inputs of all layers but the first, and the output
        assert size > 1 or largest <= SMALL  # several ranks also sum up the gradients of all parameters
    rows, kept, largest = found[-1][1]  # the rank with most vertices
    assert kept > number * rows + small
    assert largest > SMALL or kind == "sage"


# --- random numbers and statistics --------------------------------------------------------------------------


class Always(torch.nn.Module):
    """Dropout that draws in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


def drawing(kind: str) -> Any:
    """Returns a layer that drops at random. "DropoutInEval" has only its dropout in training mode, and "AlwaysInEval" no module."""
    if not kind.endswith("InEval"):
        return getattr(pyg, kind)(F, H // 2, heads=2, dropout=0.5)
    dropout = Always() if kind == "AlwaysInEval" else torch.nn.Dropout(0.5)
    conv = pyg.EdgeConv(torch.nn.Sequential(torch.nn.Linear(2 * F, H), dropout, torch.nn.Linear(H, H)), aggr="sum")
    conv.eval()
    if kind == "DropoutInEval":
        dropout.train()
    return conv


def slopes(rank: int, size: int, kind: str) -> list[tuple[float, float]]:
    """Returns, for each parameter, the slope that its gradient gives in one direction, and the measured slope with the same random numbers."""
    pieces.PIECE_BYTES = SMALL
    part = local(graph(), offsets=OFFSETS[size])
    torch.manual_seed(4)
    model = distribute(drawing(kind).double(), part, recompute="layers")

    def loss() -> Tensor:
        torch.manual_seed(100 + rank)
        out = model(part.x, part.edge_index)[part.train_mask]
        torch.manual_seed(rank)  # the backward must draw the forward's numbers again
        return loss_mean(out.square().sum(1), part)

    loss().backward()
    found: list[tuple[float, float]] = []
    for parameter in model.parameters():
        direction = torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view(parameter.shape)
        given = float((parameter.grad * direction).sum())
        with torch.no_grad():
            values = []
            for step in (1e-6, -1e-6):
                parameter.add_(direction, alpha=step)
                values.append(float(loss()))
                parameter.add_(direction, alpha=-step)
        found.append((given, (values[0] - values[1]) / 2e-6))
    return found


@pytest.mark.parametrize(
    ("size", "kind"),
    [(2, "GATConv"), (1, "TransformerConv"), (2, "DropoutInEval"), (1, "AlwaysInEval"), *rare((2, "GATv2Conv"))],
)
def test_pieces_draw_the_same_dropout_again(size, kind):
    for found in distributed.run(slopes, size, size, kind):
        for given, measured in found:
            assert given == pytest.approx(measured, rel=1e-4, abs=1e-6)


class Normalised(torch.nn.Module):
    """Layer with batch normalisation inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = pyg.GINConv(torch.nn.Sequential(torch.nn.Linear(F, H), torch.nn.BatchNorm1d(H), torch.nn.ReLU()))
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def statistics(rank: int) -> list[dict[str, Tensor]]:
    return [statistics_of(recompute) for recompute in (None, "layers")]


def statistics_of(recompute: str | None) -> dict[str, Tensor]:
    part = local(graph(), offsets=OFFSETS[2])
    model = distribute(Normalised(), part, recompute=recompute)
    for _ in range(2):
        model(part.x, part.edge_index).square().sum().backward()
    return {**model.state_dict(), **{f"gradient of {name}": each.grad for name, each in model.named_parameters()}}


def test_running_statistics_inside_a_layer_count_each_step_once():
    for plain, again in distributed.run(statistics, 2):
        assert all(torch.allclose(plain[name], again[name], rtol=1e-10, atol=1e-10) for name in plain)


def gradients_under_spectral_norm(recompute: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    conv = pyg.GATConv(F, H).double()
    torch.nn.utils.parametrizations.spectral_norm(conv.lin)
    part = local(graph())
    model, found = distribute(conv, part, recompute=recompute), []
    for _ in range(2):
        model.zero_grad()
        model(part.x, part.edge_index).square().sum().backward()
        found += [*(each.grad.clone() for each in conv.parameters()), *(each.clone() for each in conv.buffers())]
    return found


def test_a_layer_is_computed_again_with_the_buffers_of_its_forward():
    """Each call of a layer under spectral_norm in training changes the vectors by which its weight is divided."""
    distributed.run(compare_under_spectral_norm, 1)


def compare_under_spectral_norm(rank: int) -> None:
    for one, other in zip(gradients_under_spectral_norm(None), gradients_under_spectral_norm("layers"), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def counted(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return out * module.calls


def gradients_of_a_counting_layer(recompute: str | None) -> list[Tensor]:
    """Returns the gradients of two steps. A hook inside the layer counts its calls, and the mode changes between forward and backward."""
    torch.manual_seed(0)
    conv = pyg.GINConv(nn.Sequential(nn.Linear(F, H), nn.BatchNorm1d(H), nn.Linear(H, H))).double()
    conv.nn[0].register_forward_hook(counted)
    part = local(graph())
    model, found = distribute(conv, part, recompute=recompute), []
    for step in range(2):
        model.zero_grad()
        model.train()
        loss = model(part.x, part.edge_index).square().sum()
        model.eval()
        loss.backward()
        assert conv.nn[0].calls == step + 1 and not conv.nn[1].training
        found += [each.grad.clone() for each in conv.parameters()]
    return found


def test_a_layer_is_computed_again_with_the_numbers_and_the_mode_of_its_forward():
    plain, again = map(gradients_of_a_counting_layer, (None, "layers"))
    torch.testing.assert_close(again, plain, rtol=1e-9, atol=1e-12)


class Measured(nn.Module):
    """Module that keeps a tensor in place of a number, after the last operation of which autograd keeps results."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = 0.0

    def forward(self, rows: Tensor) -> Tensor:
        out = rows.tanh()
        self.last = out.detach().mean()
        return out


class Noting(pyg.MessagePassing):
    """Layer that puts a number in place of None in its first call, and has a module that replaces a number."""

    def __init__(self) -> None:
        super().__init__()
        self.width: int | None = None
        self.measured = Measured()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.width is None:
            self.width = x.size(1)
        return self.measured(self.propagate(edge_index, x=x) / self.width)


def test_a_layer_that_is_computed_again_keeps_attributes_that_become_numbers_or_were_numbers():
    part, conv = local(graph()), Noting()
    model, x = distribute(conv, part, recompute="layers"), part.x.clone().requires_grad_()
    out = model(x, part.edge_index)
    last = conv.measured.last
    out.sum().backward()
    assert conv.width == F and conv.measured.last is last


class Scaled(pyg.MessagePassing):
    """Layer that halves a buffer in each call and multiplies its rows with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.lin = kind, nn.Linear(F, F).double()
        if kind != "registered in the first call":
            self.register_buffer("scale", None if kind == "None" else torch.ones(F).double())
        if kind == "shared":
            self.inner = nn.Module()
            self.inner.register_buffer("scale", self.scale)
        if kind == "of inference":
            with torch.inference_mode():
                self.scale = self.scale.clone()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.kind in ("None", "registered in the first call"):
            if getattr(self, "scale", None) is None:
                self.register_buffer("scale", torch.full((F,), 2.0).double())
            else:
                self.scale = self.scale / 2
        elif self.kind == "written through data":
            self.scale.data.mul_(0.5)
        elif self.kind == "shared":
            self.scale.mul_(0.5)
        scale = self.inner.scale if self.kind == "shared" else self.scale
        return self.lin(self.propagate(edge_index, x=x) * scale.clone())


class TwiceScaled(nn.Module):
    """Calls one layer twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = Scaled(kind)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index).tanh()
        if self.conv.kind == "written between calls":
            self.conv.scale.mul_(0.5)
        return self.conv(h, edge_index)


def test_a_layer_that_is_computed_again_finds_each_buffer_as_it_was():
    assert distributed.run(scaled, 1) == [[]]


def scaled(rank: int) -> list[str]:
    part, wrong = local(graph()), []
    for kind in (
        "None",
        "registered in the first call",
        "written through data",
        "written between calls",
        "shared",
        "of inference",
    ):
        found = []
        for recompute in (None, "layers"):
            model = distribute(TwiceScaled(kind), part, recompute=recompute)
            out = model(part.x, part.edge_index).square().sum()
            out.backward(retain_graph=True)
            out.backward()
            found.append([*(each.grad for each in model.parameters()), *model.buffers()])
        if not all(torch.allclose(*each, rtol=1e-10, atol=0) for each in zip(*found, strict=True)):
            wrong.append(kind)
    return wrong


def weights_of_attention(rank: int) -> list[list[Tensor]]:
    return [weights_of_attention_with(recompute) for recompute in (None, "layers")]


def weights_of_attention_with(recompute: str | None) -> list[Tensor]:
    pieces.PIECE_BYTES = SMALL
    part = local(graph(), offsets=OFFSETS[2])
    found = []
    for kind in ("GATConv", "TransformerConv"):
        torch.manual_seed(4)
        conv = getattr(pyg, kind)(F, H).double()
        model = distribute(conv, part, recompute=recompute)
        out, (edges, weights) = model(part.x, part.edge_index, return_attention_weights=True)
        (out.sum() + weights.square().sum()).backward()
        found += [edges, weights.detach(), *(each.grad for each in conv.parameters())]
    return found


def test_weights_of_attention_have_every_edge():
    for plain, again in distributed.run(weights_of_attention, 2):
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(plain, again, strict=True))


# --- layouts, plans and the file ----------------------------------------------------------------------------

CASES_OF_TRAINING = [
    ("sage", "halo"),
    ("gat", "halo"),
    ("gcn", "cover"),
    ("weighted gcn", "halo"),
    ("gcn", "1d"),
    ("sage", "a plan"),
    ("gat", "a plan"),
    ("sage", "grid:1x2"),
]


def losses(rank: int, cases: list[tuple[str, str]], folder: str | None) -> list[list[float]]:
    pieces.PIECE_BYTES = 4 * SMALL  # there are more edges, and wider rows
    rows_file.SMALLEST = 1
    part = local(data_of())
    found = []
    for name, layout in cases:
        net = network(name)
        given: Any = plan_for(net, part, kind="recompute") if layout == "a plan" else layout
        model = distribute(net, part, given, recompute="layers", rows_file=folder)
        found.append(train(model, part, 2))
    return found


@pytest.mark.parametrize(
    ("with_file", "cases"),
    [
        (False, CASES_OF_TRAINING[::2]),
        (True, CASES_OF_TRAINING[1::2]),
        *rare((False, CASES_OF_TRAINING), (True, CASES_OF_TRAINING)),
    ],
    ids=lambda value: f"{len(value)} cases" if isinstance(value, list) else str(value),
)
def test_layouts_and_plans_train_as_one_process(with_file, cases, tmp_path):
    data = data_of()
    expected = [train_alone(network(name), data, 2) for name, _ in cases]
    for found in distributed.run(losses, 2, cases, str(tmp_path) if with_file else None):
        for case, one, other in zip(cases, expected, found, strict=True):
            assert other == pytest.approx(one, abs=1e-8), case
    assert [*tmp_path.iterdir()] == []  # the file has no name


def test_a_file_holds_the_rows_and_its_places_are_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_file, "SMALLEST", 1)
    part = local(graph())
    model = distribute(Deep("sage"), part, recompute="layers", rows_file=tmp_path)
    file, sizes, before = model._recompute._file, [], persisting(model, part)
    for _ in range(3):
        with Tracked(before) as tracked:
            out = model(part.x, part.edge_index)
            kept = sum(tracked.kept().values())
        assert kept < 2 * part.x.nbytes  # the output, and no rows of layers
        out.sum().backward()
        sizes.append(file.size)
    pages = -(-part.x.nbytes // 4096) * 4096
    assert (
        sizes == [LAYERS * pages] * 3
    )  # each table is written once: as the result of one layer and the input of the next


def test_conjugates_of_stored_rows_are_kept_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_file, "SMALLEST", 1)
    x = torch.randn(10, 3, dtype=torch.complex64, requires_grad=True)

    def gradient() -> Tensor:
        rows = 2 * x
        return torch.autograd.grad((rows.conj() * rows * rows).abs().sum(), x)[0]

    expected = gradient()
    with rows_file.RowsFile(tmp_path).storing(torch.empty(1), 10):
        assert torch.equal(gradient(), expected)


def test_a_tensor_that_dies_during_a_write_frees_no_place_in_use(tmp_path, monkeypatch):
    """Other threads and garbage collections run while the system writes."""
    file, write = rows_file.RowsFile(tmp_path), os.pwrite
    rows = [torch.full((8, 4), float(number)) for number in range(6)]
    for with_free_place in (False, True):
        kept = [file._stored(each) for each in rows[:3]]
        if with_free_place:
            kept.pop(0)

        def dying(*arguments: Any, kept: list[Any] = kept) -> int:
            kept and kept.pop(0)
            return write(*arguments)

        monkeypatch.setattr(os, "pwrite", dying)
        first = file._stored(rows[3])
        monkeypatch.setattr(os, "pwrite", write)
        others = [file._stored(each) for each in rows[4:]]
        for stored, expected in zip([first, *others], rows[3:], strict=True):
            assert torch.equal(file._read(stored), expected), with_free_place
        file._known.clear()


def test_a_failed_write_gives_its_place_back(tmp_path, monkeypatch):
    file = rows_file.RowsFile(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(OSError, match="must have room for the rows of all layers"):
            file._stored(torch.ones(8))
    size = file.size
    assert torch.equal(file._read(file._stored(torch.ones(8))), torch.ones(8))
    assert file.size == size


class Two(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        make = {"sage": pyg.SAGEConv, "gat": pyg.GATConv}[kind]
        self.first, self.second, self.norm = make(F, F), make(F, F), torch.nn.BatchNorm1d(F)
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x, edge_index)).tanh(), edge_index)


WAYS: list[dict[str, Any]] = [{}, {"recompute": "layers"}]


def slopes_of_two_losses(rank: int, kind: str, folder: str) -> tuple[list[list[Tensor]], list[str]]:
    """Returns gradients of two losses of one output, and the texts of errors of second derivatives."""
    rows_file.SMALLEST, pieces.PIECE_BYTES = 1, SMALL
    part = local(graph(), offsets=OFFSETS[2], timeout=distributed.NEVER)
    found, texts = [], []
    for options in (*WAYS, {"recompute": "layers", "rows_file": folder}):
        net = Two(kind)
        model = distribute(net, part, **options)
        out = model(part.x.double(), part.edge_index)
        loss_mean(out.square().sum(1), part).backward(retain_graph=True)
        loss_mean(out.sin().sum(1), part).backward()
        found.append([parameter.grad for parameter in net.parameters()])
        texts.append(raised(lambda: second_derivatives(model, part)))
    return found, texts


def second_derivatives(model: Any, part: Any) -> None:
    x = part.x.double().requires_grad_()
    loss = loss_mean(model(x, part.edge_index).square().sum(1), part)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(slope.square().sum(), [*model.parameters()], allow_unused=True)


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_a_forward_has_several_backwards_and_no_second_derivative(kind, tmp_path):
    data, net = graph(), Two(kind)
    out = net(data.x.double(), data.edge_index)
    (out.square().sum(1).mean() + out.sin().sum(1).mean()).backward()
    for found, texts in distributed.run(slopes_of_two_losses, 2, kind, str(tmp_path)):
        for gradients in found:
            for one, parameter in zip(gradients, net.parameters(), strict=True):
                assert torch.allclose(one, parameter.grad, rtol=0, atol=1e-9)
        assert all("second derivatives of a distributed model are not supported" in text for text in texts), texts


def _have_own_pages(rank: int) -> list[bool]:
    """Tells whether large blocks have pages of their own while a model lives, and after its end."""
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    part, found = local(graph()), []
    for _ in range(2):
        model = distribute(Deep("sage"), part, recompute="layers")
        copied = copy.deepcopy(model)
        del model
        gc.collect()
        found.append(has_own_pages(6 << 20))
        del copied
        gc.collect()
        found.append(has_own_pages(6 << 20))
    return found


@needs_counts_of_blocks
def test_freed_blocks_return_to_the_system_only_while_a_model_needs_it():
    # In a process of its own, because models of other tests may still live in this one.
    assert distributed.run(_have_own_pages, 1) == [[True, False, True, False]]


# --- errors -------------------------------------------------------------------------------------------------


class Checkpointed(torch.nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(F, H).double()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return checkpoint(self.conv, x, edge_index, use_reentrant=self.use_reentrant)


class CheckpointedNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(F).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def checkpoints(rank: int) -> list[str]:
    return [raised(lambda part=part, model=model: model(part.x, part.edge_index)) for part, model in _checkpointed()]


def _checkpointed() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yields models, each on a part of its own, because a part whose ranks have failed raises their error again."""

    def part_and_model(module: torch.nn.Module, recompute: str | None) -> tuple[Any, Any]:
        part = local(graph(), offsets=OFFSETS[2], timeout=distributed.NEVER)
        return part, distribute(module, part, recompute=recompute)

    for recompute in (None, "layers"):
        for use_reentrant in (False, True):
            yield part_and_model(Checkpointed(use_reentrant), recompute)
        yield part_and_model(CheckpointedNorm(), recompute)
        part, model = part_and_model(pyg.GCNConv(F, H).double(), recompute)
        yield part, lambda x, edge_index, model=model: checkpoint(model, x, edge_index, use_reentrant=False)


def test_checkpoints_of_the_users_around_layers_are_refused_on_every_rank():
    for found in distributed.run(checkpoints, 2):
        assert len(found) == 8
        for text in found:
            assert text.startswith(("ValueError", "RankFailure"))
            assert "cannot be called inside torch.utils.checkpoint" in text
            assert "pass recompute='layers' to salientpp.distribute" in text
        assert "GCNConv (conv)" in found[0]
        assert "BatchNorm1d (norm)" in found[2]


def test_wrong_arguments_are_refused(tmp_path):
    part = local(graph())
    for arguments, words in (
        ({"recompute": "all"}, "recompute must be None or 'layers', got 'all'"),
        ({"rows_file": tmp_path}, "rows_file needs recompute='layers'"),
        ({"recompute": "layers", "rows_file": tmp_path / "absent"}, "must be a folder in which a file can be made"),
    ):
        with pytest.raises(ValueError, match=words):
            distribute(pyg.GCNConv(F, H), part, **arguments)


def differing(rank: int, folder: str) -> list[str]:
    part = local(graph(), offsets=OFFSETS[2], timeout=distributed.NEVER)
    net = pyg.GCNConv(F, H)
    layers = "layers" if rank else None
    return [
        raised(lambda: distribute(net, part, recompute=layers)),
        raised(lambda: distribute(net, part, recompute="layers", rows_file=folder if rank else None)),
        raised(lambda: distribute(net, part, recompute="layers", rows_file=f"{folder}/absent" if rank else folder)),
    ]


def test_every_rank_raises_if_one_rank_differs(tmp_path):
    for first, second, third in distributed.run(differing, 2, str(tmp_path)):
        assert "all ranks must have the same recompute, got None on rank 0 and 'layers' on rank 1" in first
        assert "all ranks must have the same rows_file, got no folder on rank 0 and a folder on rank 1" in second
        assert "rows_file must be a folder in which a file can be made" in third


def without_space(rank: int, folder: str) -> str:
    rows_file.SMALLEST = 1
    part = local(graph(), offsets=OFFSETS[2], timeout=distributed.NEVER)
    model = distribute(Deep("gat"), part, recompute="layers", rows_file=folder)
    with contextlib.ExitStack() as stack:
        if rank == 1:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(os, "posix_fallocate", full_disk)
        return raised(lambda: model(part.x, part.edge_index))


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_every_rank_raises_if_one_disk_is_full(tmp_path):
    for text in distributed.run(without_space, 2, str(tmp_path)):
        assert "No space left on device" in text
        assert "must have room for the rows of all layers" in text
        assert "pass a folder on another disk" in text


def test_a_cut_layer_gives_every_edge_to_one_piece():
    edge_index = graph().edge_index
    for bounds in ([0, N], [0, 3, 4, 30, N], [*range(N + 1)]):
        found = [*pieces._pieces(edge_index, bounds, N)]
        assert torch.cat([piece.edges for piece in found]).sort().values.tolist() == [*range(edge_index.size(1))]
        for piece in found:
            source, target = edge_index[:, piece.edges]
            assert torch.equal(piece.sources[piece.edge_index[0]], source)
            assert torch.equal(piece.edge_index[1] + piece.begin, target)
            assert bool(((target >= piece.begin) & (target < piece.end)).all())


def test_layers_of_the_users_run_in_one_piece():
    class Own(pyg.MessagePassing):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j

    conv, size = Own(), (N, N)
    given = {"x": (torch.ones(N, 2), torch.ones(N, 2))}
    call = pieces.EdgeCall(conv, conv.propagate, False, graph().edge_index, size, given)
    assert pieces._slots(call, {}) is None
    assert pieces._slots(replace(call, conv=pyg.GATv2Conv(2, 2)), {}) is not None
