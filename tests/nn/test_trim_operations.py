"""Laws of operations between the layers of a trimmed model: rows that stay separate are cut, and operations over several rows get all rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from trimmed import WIDTH, Between, batch_of, compare, graph, within

import salientpp


@pytest.fixture(scope="module")
def data():
    return graph(3)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


def skip(m, x, e):
    h = m.first(x, e).relu()
    h = h + m.second(h, e)
    return h + m.last(h, e)


def dense(m, x, e):
    h = m.first(x, e)
    h = m.mixed(torch.cat([h, m.second(h, e)], -1))
    return m.mixed(torch.cat((m.last(h, e), x), dim=1))


def twice(m, x, e):
    for _ in range(3):
        x = m.same(x, e).tanh()
    return x


def parallel(m, x, e):
    return m.first(m.second(x, e), e) * m.last(x, e) - m.lin(x)


def columns(m, x, e):
    h = m.first(x, e)
    return m.mixed(torch.hstack([m.second(h, e), h])) + m.mixed(torch.column_stack((m.last(h, e), x)))


def in_place(m, x, e):
    h = m.first(x, e)
    h += x
    h = m.second(h, e)
    h.add_(m.lin(x)).mul_(2).relu_()
    h = h * m.scale
    h -= x
    return m.last(h, e)


def views(m, x, e):
    h = m.first(x, e).view(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH)
    h = m.second(h.unsqueeze(1).squeeze(1), e)
    a, b = h.chunk(2, dim=-1)
    return m.last(torch.cat([b, a], 1), e)


def stacks(m, x, e):
    h = m.first(x, e)
    k = m.second(h, e)
    return m.last(torch.stack([h, k, x], dim=0).mean(0), e) + torch.stack([x, k], dim=-1).amax(-1)


def three_dimensions(m, x, e):
    h = torch.stack([m.first(x, e), m.second(x, e)], 1)
    h = m.lin(h).softmax(-1)
    return m.last((h @ m.gate).sum(1), e)


def attention(m, x, e):
    h = m.first(x, e)
    h = torch.stack([h, x, m.second(h, e)], 1)
    return m.last(m.attention(h, h, h, need_weights=False)[0][:, 0], e)


def recurrent(m, x, e):
    h = m.first(x, e)
    return m.last(m.gru(torch.stack([x, h], 1))[0][:, -1], e)


def cells(m, x, e):
    h = m.cell(m.first(x, e), x)
    h, c = m.lstm_cell(m.second(h, e), (h, x))
    return m.cell(m.last(h, e), c)


def bilinear(m, x, e):
    h = m.first(x, e)
    return m.last(m.bilinear(h, x), e) + m.bilinear(m.second(h, e), h)


def detached(m, x, e):
    h = m.first(x, e)
    return m.last(m.second(h.detach(), e), e) + h.detach() + m.lin(h)


def choices(m, x, e):
    h = m.first(x, e)
    h = torch.where(h > x, h, x.sin())
    h = torch.lerp(h, m.second(h, e), 0.3).clamp(min=-1)
    return m.last(torch.maximum(h, x), e)


def residual_of_input(m, x, e):
    h = x
    for layer in (m.first, m.second, m.last):
        h = torch.addcmul(0.9 * layer(h, e), x, h).div(2) + 0.1 * x
    return h


def norms(m, x, e):
    h = F.normalize(m.first(x, e), dim=1)
    h = F.layer_norm(m.second(h, e), (WIDTH,))
    return F.log_softmax(m.last(h, e), dim=-1)


def seeds_sliced(m, x, e):
    return m.lin(m.last(m.second(m.first(x, e), e), e)[:13])


def seeds_taken(m, x, e):
    h = m.last(m.second(m.first(x, e), e), e)
    return torch.cat([h[torch.arange(13)], h.index_select(0, torch.arange(12, -1, -1))], -1)


CUT = [
    *(
        skip,
        dense,
        twice,
        parallel,
        in_place,
        views,
        stacks,
        three_dimensions,
        attention,
        recurrent,
        cells,
        bilinear,
        detached,
        choices,
    ),
    *(residual_of_input, norms, seeds_sliced, seeds_taken),
]


@pytest.mark.parametrize("function", CUT, ids=lambda function: function.__name__)
def test_rows_that_stay_apart_are_cut(function, batch):
    _, got = compare(Between(function).double(), batch)
    assert min(got.rows) == within(batch, 0) and sorted(got.rows)[1] < batch.num_nodes


@pytest.mark.parametrize("function", CUT, ids=lambda function: function.__name__)
def test_a_batch_of_one_seed_is_exact(function, data):
    if function in (seeds_sliced, seeds_taken):
        return
    compare(Between(function).double(), batch_of(data, batch_size=1))


# --- operations over all rows ---------------------------------------------------------------------------------


def mean(m, x, e):
    h = m.first(x, e)
    return m.last(h - h.mean(0), e)


def maximum(m, x, e):
    h = m.second(m.first(x, e), e)
    return m.last(h / h.abs().max(), e)


def item(m, x, e):
    h = m.first(x, e)
    return m.second(h, e) if h.sum().item() > 0 else m.last(m.second(h, e), e)


def items(m, x, e):
    h = m.second(m.first(x, e), e)
    return m.last(h * float(h.norm()), e) + h.tolist()[-1][0]


def gathered(m, x, e):
    h = m.first(x, e)
    return m.last(h.flip(0) + h[torch.arange(x.size(0) - 1, -1, -1)], e)


def softmax_over_rows(m, x, e):
    return m.last(m.first(x, e).softmax(0), e)


def product_of_rows(m, x, e):
    h = m.first(x, e)
    return m.last(h @ (h.t() @ h) / h.size(0), e)


def array(m, x, e):
    h = m.first(x, e)
    return m.last(h + torch.as_tensor(np.asarray(h.detach())[::-1].copy()), e)


def of_dlpack(m, x, e):
    h = m.first(x, e)
    return m.last(h + torch.from_dlpack(h.detach()).flip(0), e)


def sorted_rows(m, x, e):
    h = m.first(x, e)
    return m.last(h + h.sort(0).values.cumsum(0), e)


def padded(m, x, e):
    h = m.first(x, e)
    return m.last(torch.cat([h[1:], h[:1]]), e)


def strided(m, x, e):
    h = m.first(x, e)
    return m.last(h, e)[:13] + h.t().reshape(-1)[: 13 * WIDTH].view(13, WIDTH)


def numpy_rows(m, x, e):
    h = m.first(x, e)
    return m.last(h + torch.from_numpy(h.detach().numpy().mean(0)), e)


def scattered(m, x, e):
    h = m.first(x, e)
    sums = torch.zeros_like(h).index_add_(0, e[0], h[e[1]])
    return m.last(sums, e)


def joined_rows(m, x, e):
    h = m.first(x, e)
    k = m.last(h, e)
    rows = torch.cat([h, h[:13], k[:13]], dim=-2)
    return rows[-13:] + rows[:13] * rows.sum()


ALL = [
    joined_rows,
    mean,
    maximum,
    item,
    items,
    gathered,
    softmax_over_rows,
    product_of_rows,
    sorted_rows,
    padded,
    strided,
    numpy_rows,
    scattered,
]


@pytest.mark.parametrize("function", ALL, ids=lambda function: function.__name__)
def test_operations_over_all_rows_get_them(function, batch):
    _, got = compare(Between(function).double(), batch)
    assert got.rows[0] == batch.num_nodes


@pytest.mark.parametrize("size", [lambda h: h.nbytes, lambda h: h.untyped_storage().size()], ids=["bytes", "storage"])
def test_a_model_that_reads_the_memory_of_rows_gets_all_rows(size, batch):
    model = Between(lambda m, x, e: (lambda h: h / size(h))(m.first(x, e))).double()
    trimmed = salientpp.nn.trim(copy.deepcopy(model), check=False)
    expected, got = (each(batch.x, batch.edge_index)[:13] for each in (model, trimmed))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def made_by_size(m, x, e):
    h = m.first(x, e)
    noise = torch.linspace(0, 1, h.size(0), dtype=x.dtype).view(-1, 1)  # its values depend on the number of rows
    return m.last(h, e) + torch.zeros(h.shape[0], WIDTH, dtype=x.dtype) + 0 * noise


def test_tensors_made_by_the_number_of_rows_fit(batch):
    compare(Between(made_by_size).double(), batch)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_exact(use_reentrant, batch):
    def function(m, x, e):
        for layer in (m.first, m.second, m.last):
            x = checkpoint(layer, x, e, use_reentrant=use_reentrant).relu()
        return x

    _, got = compare(Between(function).double(), batch)
    assert got.rows[0] == batch.num_nodes


def test_a_checkpoint_of_a_whole_model_is_exact(batch):
    model = Between(skip).double()
    compare(model, batch, lambda model, batch: checkpoint(model, batch.x, batch.edge_index, use_reentrant=False))
