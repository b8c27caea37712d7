"""Trimmed models in lower precision, compiled, and in processes that start or resume."""

from __future__ import annotations

import copy
import math
import subprocess
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from forked_python import python
from torch import nn
from trimmed import WIDTH, Between, assert_same, batch_of, graph, network, step

import salientpp

SCRIPT = Path(__file__).parent / "trimmed_script.py"


@pytest.fixture(scope="module")
def data():
    return graph(6)


@pytest.fixture(scope="module")
def batch(data):
    return batch_of(data)


# --- other modes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pyg.GraphSAGE, pyg.GCN, pyg.GAT, pyg.GIN])
def test_autocast_is_close_to_the_plain_model_under_autocast(kind, batch):
    torch.manual_seed(1)
    model = kind(WIDTH, 8, 3, 4)
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    gradients = []
    for each in (model, trimmed):
        with torch.autocast("cpu", torch.bfloat16):
            out = each(batch.x.float(), batch.edge_index)[:13]
        out.float().square().mean().backward()
        gradients.append([out.float(), *(value.grad for value in each.parameters())])
        assert out.dtype in (torch.bfloat16, torch.float32)
    for expected, got in zip(*gradients):
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.05)


def test_layers_of_one_table_may_share_its_cast_under_autocast(batch):
    """torch keeps the cast of a leaf that needs a gradient. The second layer then casts nothing, but needs the rows of its neighbours too."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([pyg.GATConv(WIDTH, 4), pyg.GATConv(WIDTH, 4)])

        def forward(self, x, edge_index):
            return self.layers[0](x, edge_index) + self.layers[1](x, edge_index)

    found = []
    for model in (Parallel(), salientpp.nn.trim(Parallel(), check=False)):
        x = batch.x.detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, batch.edge_index)[: batch.batch_size]
        out.sum().backward()
        found.append((out.detach(), x.grad))
    for expected, got in zip(*found):
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.05)


def test_a_number_of_rows_that_becomes_a_value_needs_all_rows_under_autocast(batch):
    """The comparison with the plain model cannot see in 16 bits what the number does."""
    model = Between(lambda m, x, e: (lambda h: h * math.log(h.size(0)))(m.first(x, e)))
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (each(batch.x.float(), batch.edge_index)[:13] for each in (model, trimmed))
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0.05)


def test_modules_inside_layers_that_mix_edges_are_seen_in_inference_mode(batch):
    """Linear maps are composite operations there."""

    class Mixes(nn.Linear):
        def forward(self, rows):
            return super().forward(rows).softmax(0)

    model = Between(lambda m, x, e: m.last(m.extra(x, e), e))
    model.extra = pyg.EdgeConv(Mixes(2 * WIDTH, WIDTH))
    trimmed = salientpp.nn.trim(copy.deepcopy(model.double()), check=False)
    with torch.inference_mode():
        expected, got = (each(batch.x, batch.edge_index)[:13] for each in (model, trimmed))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_the_first_call_with_an_rnn_over_rows_is_not_repeated(batch):
    calls = []
    model = Between(lambda m, x, e: m.gru(calls.append(1) or m.first(x, e))[0]).double()
    trimmed = salientpp.nn.trim(model)
    trimmed(batch.x, batch.edge_index)
    assert len(calls) == 3  # recorded, compared and run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [pyg.GraphSAGE, pyg.GCN, pyg.GAT])
def test_other_dtypes_are_close(kind, dtype, batch):
    torch.manual_seed(1)
    model = kind(WIDTH, 8, 2, 4).to(dtype)
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    try:
        expected = model(batch.x.to(dtype), batch.edge_index)[:13]
    except RuntimeError as error:
        pytest.skip(f"the plain model: {error}")
    got = trimmed(batch.x.to(dtype), batch.edge_index)[:13]
    assert got.dtype == expected.dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("order", ["trim(compile)", "compile(trim)"])
def test_compiled_models_are_exact(order, batch):
    torch.compiler.reset()
    model = network()
    expected = step(model, batch)
    if order == "compile(trim)":
        other = torch.compile(salientpp.nn.trim(copy.deepcopy(model)), backend="eager")
    else:
        other = salientpp.nn.trim(torch.compile(copy.deepcopy(model), backend="eager"))
    for _ in range(2):
        got = step(other, batch)
        got.tensors = {name.removeprefix("_orig_mod."): value for name, value in got.tensors.items()}
        assert_same(expected, got)
    torch.compiler.reset()


def test_a_compiled_part_between_layers_is_exact(batch):
    torch.compiler.reset()
    model = network()
    expected = step(model, batch)
    model.act = torch.compile(nn.ReLU(), backend="eager")
    got = step(salientpp.nn.trim(model), batch)
    assert_same(expected, got)
    torch.compiler.reset()


class Nested(nn.Module):
    """A model within a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = pyg.GraphSAGE(WIDTH, 8, 2), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        return self.last(self.inner(x, edge_index))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_within_a_trimmed_one_gives_the_same_rows(in_place, batch):
    """Compiled code then calls the functions that cut rows, and does not contain them."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = Nested().to(batch.x.dtype)
    expected = step(model, batch)
    if in_place:
        model.inner.compile(backend="eager")
    else:
        model.inner = torch.compile(model.inner, backend="eager")
    for _ in range(2):
        got = step(salientpp.nn.trim(model), batch)
        got.tensors = {name.replace("_orig_mod.", ""): value for name, value in got.tensors.items()}
        assert_same(expected, got)
        with torch.no_grad():
            torch.testing.assert_close(model(batch.x, batch.edge_index), expected.out)
    torch.compiler.reset()


# --- processes -------------------------------------------------------------------------------------------------


def printed(*arguments: str) -> list[str]:
    ran = subprocess.run([python(), str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_runs_are_the_same_bit_for_bit_also_resumed(tmp_path):
    state = str(tmp_path / "state.pt")
    whole = printed("0", "6", state)
    assert printed("0", "3", state) == whole[:3]
    assert printed("3", "6", state) == whole[3:]
    assert all(line.split()[1] == line.split()[2] for line in whole), "the output has only the rows of the seeds"


def test_batches_drawn_before_trim_run_the_plain_model(tmp_path):
    (line,) = printed("before")
    assert line == "True 0"
