"""Laws of models over batches that the ranks of a host compute together: several calls for one backward, evaluation, co-batches, and failures."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from graphs import random_data
from host_batches import batch_of, filled, loader_of, share_batch
from rare import rare
from torch import Tensor
from torch_geometric.data import Data

from salientpp.fullgraph import accuracy, distribute, loss_mean
from salientpp.nn import trim
from salientpp.nn.trim import MAX_PLANS

NUMBER, WIDTH, CLASSES = 90, 6, 5


def data_of() -> Data:
    data = random_data(NUMBER, 4 * NUMBER, directed=True)
    draw = torch.Generator().manual_seed(1)
    data.x = torch.randn(NUMBER, WIDTH, generator=draw).double()
    data.y = torch.arange(NUMBER) % CLASSES
    return data


class Net(torch.nn.Module):
    """Two layers with batch normalisation, and a residual connection."""

    def __init__(self, layer: Any, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = layer(WIDTH, 8), layer(8, CLASSES)
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.norm(self.first(x, edge_index)).relu()
        return self.second(rows, edge_index) + x[:, :CLASSES]


def losses_of(out: Tensor, batch: Data, label: Tensor | None = None) -> Tensor:
    y = batch.y if label is None else label
    return F.cross_entropy(out[: batch.batch_size], y[: batch.batch_size], reduction="none")


class Setting:
    """The hosts' batches for some seeds, whole and as this rank's share."""

    def __init__(self, ranks_per_host: int, seeds: Tensor, fanouts: list[int], steps: int = 2) -> None:
        self.loader = loader_of(ranks_per_host)
        cooperation = self.loader.cooperation
        size = cooperation.comm.size
        self.data, hosts = data_of(), size // ranks_per_host
        pieces = list(seeds.tensor_split(hosts * steps))
        self.whole: list[list[Data]] = []
        self.mine: list[Data] = []
        self.kept: list[Tensor] = []
        for step in range(steps):
            self.whole.append([])
            for host in range(hosts):
                mfg = batch_of(self.data, pieces[step * hosts + host], fanouts, step * hosts + host)
                self.whole[-1].append(filled(self.data, mfg))
                if host == cooperation.host:
                    owner = (mfg.node * 7 + step) % ranks_per_host
                    self.mine.append(share_batch(self.data, mfg, owner, ranks_per_host, cooperation.place))
                    self.kept.append(owner == cooperation.place)
        self.host = cooperation.host


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def co_batches(rank: int, ranks_per_host: int) -> None:
    for layer in (pyg.SAGEConv, pyg.GATConv, pyg.GINConv):
        make = (lambda i, o: pyg.GINConv(torch.nn.Linear(i, o))) if layer is pyg.GINConv else layer
        setting = Setting(ranks_per_host, torch.arange(7, 60), [-1, -1], steps=3)
        data = setting.data
        alone = Net(make, norm=False)
        F.cross_entropy(alone(data.x, data.edge_index)[7:60], data.y[7:60]).backward()
        module = Net(make, norm=False)
        model = distribute(module, setting.loader)
        for batch in setting.mine:
            (losses_of(model(batch.x, batch.edge_index), batch).sum() / 53).backward()
        for a, b in zip(gradients(alone), gradients(module), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (2, 1), *rare((1, 1), (4, 4), (4, 2))])
def test_gradients_of_co_batches_sum_to_those_of_one_process(size, ranks_per_host):
    """T5, with all neighbours. Gradients of three batches of each host are accumulated. The number of batches does not divide that of the seeds."""
    distributed.run(co_batches, size, ranks_per_host)


def several(rank: int, ranks_per_host: int, trims: bool) -> None:
    setting = Setting(ranks_per_host, torch.arange(40), [3, 2])
    others = [pyg.GCNConv, pyg.SAGEConv]
    alone, modules = [Net(layer) for layer in others], [Net(layer) for layer in others]
    models = [distribute(trim(module) if trims else module, setting.loader) for module in modules]
    total: Any = 0
    expected: Any = 0
    for step, mine in enumerate(setting.mine):
        number = sum(each.batch_size for each in setting.whole[step])
        for plain, model in zip(alone, models, strict=True):
            for host, whole in enumerate(setting.whole[step]):
                out = whole_out(plain, whole, keeps=host == setting.host)
                expected = expected + losses_of(out, whole).sum() / number
            out = model(mine.x, mine.edge_index)
            total = total + loss_mean(losses_of(out, mine), model)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    total.backward()
    expected.backward()
    for plain, module in zip(alone, modules, strict=True):
        for a, b in zip(gradients(plain), gradients(module), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        for a, b in zip(plain.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    right, number = 0, 0
    for plain, model in zip(alone, models, strict=True):
        plain.eval()
        model.eval()
        with torch.no_grad():
            whole, mine = setting.whole[0][setting.host], setting.mine[0]
            out, expected_out = model(mine.x, mine.edge_index), plain(whole.x, whole.edge_index)
            rows = slice(mine.batch_size if trims else out.size(0))
            torch.testing.assert_close(out[rows], expected_out[setting.kept[0]][rows], rtol=1e-10, atol=1e-10)
    outs = [Net(pyg.SAGEConv).eval()(each.x, each.edge_index) for each in setting.whole[0]]
    model = distribute(Net(pyg.SAGEConv).eval(), setting.loader)
    for out, whole in zip(outs, setting.whole[0], strict=True):
        right += int((out[: whole.batch_size].argmax(-1) == whole.y[: whole.batch_size]).sum())
        number += whole.batch_size
    mine = setting.mine[0]
    with torch.inference_mode():
        seeds = slice(mine.batch_size)
        assert accuracy(model(mine.x, mine.edge_index)[seeds], mine.y[seeds], model) == right / number


def whole_out(plain: Net, whole: Data, keeps: bool) -> Tensor:
    """Output for a joined batch. Only a host's own batches change its running statistics."""
    before = {name: value.clone() for name, value in plain.norm.named_buffers()}
    out = plain(whole.x, whole.edge_index)
    if not keeps:
        plain.norm._buffers.update(before)
    return out


@pytest.mark.parametrize(
    ("size", "ranks_per_host", "trims"),
    [
        (2, 2, False),
        (2, 2, True),
        (2, 1, False),
        (4, 2, True),
        *rare((1, 1, False), (1, 1, True), (2, 1, True), (4, 4, False), (4, 4, True), (4, 2, False)),
    ],
)
def test_several_calls_before_one_backward_and_evaluation_equal_one_process(size, ranks_per_host, trims):
    distributed.run(several, size, ranks_per_host, trims)


def lower_precision(rank: int) -> None:
    setting = Setting(2, torch.arange(40), [3, 2])
    model = distribute(Net(pyg.SAGEConv).float(), setting.loader)
    for batch in setting.mine:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch.x.float(), edge_index=batch.edge_index)
        loss_mean(losses_of(out.float(), batch), model).backward()
    assert all(bool(grad.isfinite().all()) for grad in gradients(model))
    copied = copy.deepcopy(model)
    batch = setting.mine[0]
    torch.testing.assert_close(copied(batch.x.float(), batch.edge_index), model(batch.x.float(), batch.edge_index))


def test_autocast_and_copies_work():
    distributed.run(lower_precision, 4)


# --- failures -----------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FloatingPointError("no gradient here")


def raises(module: Any, given: Any) -> None:
    raise FloatingPointError("no rows here")


def failing(rank: int, where: str) -> None:
    setting = Setting(2, torch.arange(40), [3, 2])
    model = distribute(Net(pyg.SAGEConv), setting.loader)
    batch = setting.mine[0]
    if rank == 2 and where == "forward":
        model.module.second.register_forward_pre_hook(raises)
    if rank == 2 and where == "backward":
        model.module.norm.register_forward_hook(lambda module, given, out: Fails.apply(out))
    edges = batch.edge_index
    if rank == 2 and where == "edges":
        edges = torch.stack([*edges])
    if rank == 2 and where == "differing":
        model.eval()
    loss_mean(losses_of(model(batch.x, edges), batch), model).backward()
    loss_mean(losses_of(model(batch.x, edges), batch), model).backward()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("forward", "no rows here"),
        ("backward", "no gradient here"),
        ("edges", "needs the edges of one batch of a loader with cooperate='host'"),
        ("differing", "in training mode on rank"),
    ],
)
def test_a_failure_on_one_rank_reaches_the_ranks_of_all_hosts(where, words):
    results = distributed.run(failing, 4, where, may_fail=True)
    for rank, result in enumerate(results):
        assert isinstance(result, distributed.Failed), rank
        assert words in result.text or (where == "backward" and "rank 2" in result.text), result.text


class Given(Net):
    """Gets a tensor of its vertices, and numbers."""

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor, numbers: Any) -> Tensor:
        return super().forward(x, edge_index) + y[:, None]


#: What a rank passes besides rows of its share, by the number of the call.
NUMBERS: dict[str, Any] = {
    "nothing": lambda share, call: None,
    "integer": lambda share, call: share.batch_size,
    "tensor": lambda share, call: torch.tensor(float(share.batch_size)),
    "list": lambda share, call: [share.batch_size, {"of vertices": share.num_nodes}],
    "changing": lambda share, call: call,
}


def differing_shares(rank: int) -> list[int]:
    """Divides batches in several ways. A rank has none, one, some or all of the vertices. Returns the number of warnings for each of NUMBERS."""
    data, loader, found = data_of(), loader_of(2), []
    owners = (lambda n: n % 2, lambda n: n == n[-1], lambda n: 0 * n, lambda n: n > n[0], lambda n: 0 * n + 1)
    shares = []
    for key, owner in enumerate(owners):
        mfg = batch_of(data, torch.arange(3 * key, 3 * key + 3), [2, 2], key)
        mine = owner(mfg.node).long()
        shares.append((filled(data, mfg), share_batch(data, mfg, mine, 2, rank), mine == rank))
    for name, give in NUMBERS.items():
        plain, model = Given(pyg.SAGEConv, False), distribute(trim(Given(pyg.SAGEConv, False)), loader)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for call in range(MAX_PLANS + 2 if name in ("list", "changing") else len(shares) + 2):
                whole, share, rows = shares[call % len(shares)]
                expected = plain(whole.x, whole.edge_index, whole.y, None)[rows][: share.batch_size]
                out = model(share.x, share.edge_index, share.y, give(share, call))[: share.batch_size]
                torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        found.append(sum("combinations of modes and of numbers" in str(each.message) for each in warned))
    return found


def test_a_trimmed_model_takes_shares_of_any_size_and_numbers_that_differ_between_ranks():
    """The model runs untrimmed after MAX_PLANS numbers, and warns."""
    assert distributed.run(differing_shares, 2) == [[0, 0, 0, 0, 2]] * 2


def refused(rank: int) -> None:
    loader = loader_of(1)
    with pytest.raises(ValueError, match="layout must be 'halo' for a loader"):
        distribute(Net(pyg.SAGEConv), loader, layout="cover")
    loader.cooperation = None
    with pytest.raises(ValueError, match="add cooperate='host'"):
        distribute(Net(pyg.SAGEConv), loader)


def refused_batches(rank: int) -> None:
    data = data_of()
    mfg = batch_of(data, torch.arange(9), [3, 2])
    loader = loader_of(1)
    model = distribute(Net(pyg.SAGEConv), loader)
    batch = share_batch(data, mfg, mfg.node % 2, 2, 0)
    with pytest.raises(ValueError, match="hosts have 2 ranks, but the model was distributed over hosts with 1 ranks"):
        model(batch.x, batch.edge_index)
    batch = share_batch(data, mfg, mfg.node * 0, 1, 0)
    model = distribute(trim(Net(pyg.SAGEConv), norms="needed rows"), loader)
    with pytest.raises(ValueError, match="supports norms='all rows'"):
        model(batch.x, batch.edge_index)
    with pytest.raises(ValueError, match="must have a row for each of this rank's"):
        model(batch.x[:3], batch.edge_index)


def test_batches_of_other_hosts_and_norms_over_needed_rows_are_refused():
    distributed.run(refused_batches, 1)


def test_loaders_without_cooperation_and_layouts_are_refused():
    distributed.run(refused, 1)
