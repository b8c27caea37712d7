"""Laws of layers that run as products: rows equal those of batches, each remote row travels once, and files hold what memory would hold."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from forked_python import python
from graphs import random_data
from rare import rare
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp.graph.csc import Graph
from salientpp.layerwise import scratch
from salientpp.layerwise.inference import Inference
from salientpp.layerwise.layer_run import LayerRun
from salientpp.layerwise.products import Places, Product
from salientpp.layerwise.scratch import count_reads, mapped_rows
from salientpp.layerwise.split import Split
from salientpp.store.rows import TensorRows
from salientpp.store.target_lists import TargetLists

WIDTH = 6

#: Models whose layers all split, so that every layer runs as a product.
SPLIT: dict[str, Any] = {
    "GraphSAGE": lambda: gnn.GraphSAGE(WIDTH, 8, 3, 5),
    "GraphSAGE, projected": lambda: gnn.GraphSAGE(WIDTH, 8, 2, 5, project=True, normalize=True),
    "GCN": lambda: gnn.GCN(WIDTH, 8, 3, 5),
    "GCN, other degrees": lambda: [gnn.GCNConv(WIDTH, 8), torch.relu, gnn.GCNConv(8, 5, add_self_loops=False)],
    "GIN": lambda: gnn.GIN(WIDTH, 8, 2, 5, norm="batch_norm"),
    "in place": lambda: [torch.tanh_, gnn.GraphConv(WIDTH, 8), torch.relu_, gnn.SimpleConv("mean"), torch.sigmoid_, gnn.LGConv()],
    "jk": lambda: gnn.GraphSAGE(WIDTH, 8, 3, 5, jk="cat"),
}  # fmt: skip


def graph() -> Data:
    """Makes a directed graph with self-loops, repeated edges and isolated vertices."""
    data = random_data(num_vertices=300, num_edges=1500, directed=True)
    loops = torch.arange(40)
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :30], torch.stack([loops, loops])], dim=1)
    data.edge_index = torch.cat([data.edge_index, torch.stack([loops[:7], loops[:7]])], dim=1)
    data.x = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(1))
    return data


def made(make: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    for part in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, torch.nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return model


@torch.no_grad()
def whole(model: Any, data: Data) -> Tensor:
    if not isinstance(model, list):
        return copy.deepcopy(model).eval()(data.x, data.edge_index)
    x = data.x.clone()
    for step in model:
        x = step(x, data.edge_index) if isinstance(step, gnn.MessagePassing) else step(x)
    return x


def inferred(model: Any, data: Any, **options: Any) -> tuple[Tensor, Inference]:
    """Returns the rows, and the call."""
    calls, run = [], Inference.run

    def noted(call: Inference) -> Tensor:
        calls.append(call)
        return run(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inference, "run", noted)
        return salientpp.inference(model, data, **options), calls[0]


# --- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLIT)
def test_sums_and_means_run_as_products_and_give_the_rows_of_the_whole_graph(name):
    data, model = graph(), made(SPLIT[name])
    got, call = inferred(model, data, batch_size=64)
    assert call.pushed == list(range(len(call.network.layers))) and not call.stats
    assert torch.allclose(got, whole(model, data), atol=1e-5)


class Own(gnn.SAGEConv):
    """User's own layer."""


def test_other_layers_run_in_batches():
    data = graph()
    hooked = gnn.SAGEConv(WIDTH, 5)
    hooked.register_forward_hook(lambda *_: None)
    for model in (
        gnn.GAT(WIDTH, 8, 2, 5),
        gnn.GraphSAGE(WIDTH, 8, 2, 5, aggr="max"),
        [gnn.ClusterGCNConv(WIDTH, 5)],
        [Own(WIDTH, 5)],
        [hooked],
    ):
        got, call = inferred(model, data)
        assert call.pushed == [] and len(call.stats) == len(call.network.layers) and got.isfinite().all(), model


def test_features_are_converted_block_by_block(monkeypatch):
    monkeypatch.setattr("salientpp.layerwise.products.BLOCK_BYTES", 1000)
    data, model = graph(), made(SPLIT["GCN"])
    data.x = data.x.half()
    got, call = inferred(model, data, dtype=torch.float32)
    data.x = data.x.float()
    assert call.pushed == [0, 1, 2] and torch.allclose(got, whole(model, data), atol=1e-5)


def _rows_and_fetches(rank: int, root: str, memory: int | None, folder: str) -> dict[str, Any]:
    part, data, found = salientpp.load(root), graph(), {}
    own = part.original_id(part.split("all"))
    for name, make in SPLIT.items():
        model, fetched, fetch = made(make), [], LayerRun._fetch

        def noted(
            run: LayerRun, source: Any, home: Any, ids: Tensor, fetched: Any = fetched, fetch: Any = fetch
        ) -> Tensor:
            fetched.append(ids.tolist())
            return fetch(run, source, home, ids)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerRun, "_fetch", noted)
            options = {} if memory is None else {"scratch": folder, "memory": memory}
            got, call = inferred(model, part, batch_size=16, **options)
        expected = whole(model, data)[own]
        far = float((got - expected).abs().max()) if got.numel() else 0.0
        found[name] = (far, fetched, len(call.network.layers), call.pushed)
    return found


@pytest.mark.parametrize(("num_parts", "world_size"), [(4, 4), (1, 2), *rare((1, 1), (2, 2), (2, 4))])
def test_a_remote_row_travels_once_for_each_layer(tmp_path, num_parts, world_size):
    root = tmp_path / "parts"
    salientpp.partition(graph(), num_parts, root, [-1], 32)
    for rank, found in enumerate(distributed.run(_rows_and_fetches, world_size, str(root), None, "")):
        part = salientpp.load(root, part_id=rank * num_parts // world_size)
        begin, end = part.book.range_of(part.part_id)
        sources = part.graph.indices[int(part.graph.indptr[begin]) : int(part.graph.indptr[end])].unique()
        outside = sources[(sources < begin) | (sources >= end)].tolist()
        for name, (far, fetched, layers, pushed) in found.items():
            assert far < 1e-5 and pushed == list(range(layers)), name
            ids = sorted(vertex for block in fetched for vertex in block)
            if num_parts >= world_size:
                assert ids == sorted(outside * layers), name
            else:  # each of the two ranks of a part fetches what its own batches need
                assert len(ids) <= len(outside) * layers and set(ids) <= set(outside), name


def _sent_columns(rank: int, root: str) -> dict[str, list[int]]:
    part, found = salientpp.load(root), {}
    for name in ("GraphSAGE", "GCN"):
        columns, fetch = [], LayerRun._fetch

        def noted(
            run: LayerRun, source: Any, home: Any, ids: Tensor, columns: Any = columns, fetch: Any = fetch
        ) -> Tensor:
            columns.append(home.shape[1])
            return fetch(run, source, home, ids)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerRun, "_fetch", noted)
            salientpp.inference(made(SPLIT[name]), part)
        found[name] = columns
    return found


def test_a_layer_that_narrows_rows_sends_them_narrowed(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [-1], 32)
    # Columns of the layers' rows: 6, 8, 8, 5.
    expected = {"GraphSAGE": [WIDTH, 8, 5], "GCN": [WIDTH, 8, 5]}
    assert distributed.run(_sent_columns, 2, str(tmp_path / "parts")) == [expected, expected]


def _fail_in_a_product(rank: int, root: str) -> str:
    part, finish = salientpp.load(root), Split.finish

    def failing(split: Split, x: Tensor, sums: Tensor) -> Tensor:
        if rank == 1 and x.size(0) == 50:  # not in the trial
            raise ArithmeticError("no rows")
        return finish(split, x, sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Split, "finish", failing)
        try:
            salientpp.inference(made(SPLIT["GCN"]), part, batch_size=50)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    assert torch.isfinite(salientpp.inference(made(SPLIT["GCN"]), part)).all()
    return said


def test_a_failure_in_a_product_raises_on_every_rank(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [-1], 32)
    first, second = distributed.run(_fail_in_a_product, 2, str(tmp_path / "parts"))
    assert "rank 1 of 2 could not run a layer: ArithmeticError: no rows" in first or "rank 1 could not" in first, first
    assert second == "ArithmeticError: no rows"


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [2, 500, 5000, "1GiB"])
@pytest.mark.parametrize("pushes", [True, False])
@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GCN, other degrees", "in place", "jk"])
def test_rows_in_files_equal_rows_in_memory(tmp_path, monkeypatch, name, pushes, memory):
    monkeypatch.setattr(
        "salientpp.layerwise.layer_run.count_reads", lambda _: scratch.Reads(int(not pushes), int(pushes))
    )
    data, model = graph(), made(SPLIT[name])
    expected, _ = inferred(model, data, batch_size=64)
    got, call = inferred(model, data, batch_size=64, scratch=tmp_path / "new" / "folder", memory=memory)
    assert call.pushed == (list(range(len(call.network.layers))) if pushes else [])
    assert torch.allclose(got, expected, atol=1e-5)
    assert list((tmp_path / "new" / "folder").iterdir()) == [], "files have no names"


@pytest.mark.parametrize(("num_parts", "world_size"), [(2, 2), (3, 3), (1, 2)])
def test_ranks_with_little_memory_give_the_same_rows(tmp_path, num_parts, world_size):
    root = tmp_path / "parts"
    sizes = torch.tensor([280, 20, 0])[:num_parts] if num_parts > 1 else torch.tensor([300])
    assignment = torch.repeat_interleave(torch.arange(num_parts), sizes)
    salientpp.partition(graph(), num_parts, root, [-1], 32, method=assignment, split={"train": torch.arange(300)})
    for found in distributed.run(_rows_and_fetches, world_size, str(root), 700, str(tmp_path)):
        assert max(far for far, *_ in found.values()) < 1e-5


def test_out_and_scratch_may_be_given_together(tmp_path):
    data, model = graph(), made(SPLIT["GraphSAGE"])
    got = salientpp.inference(model, data, scratch=tmp_path / "s", out=tmp_path / "o")
    assert np.array_equal(np.load(tmp_path / "o" / "part-00000.npy"), got.numpy())


def product_of(num_columns: int, memory: int, source: Tensor, num_vertices: int) -> Product:
    """Makes a mean over a graph in which each vertex v has the in-neighbours ``source[v]``."""
    target = torch.arange(num_vertices).repeat_interleave(source.size(1))
    lists = TargetLists.of_graph(Graph.from_edge_index(torch.stack([source.flatten(), target]), num_vertices), {})
    ranges = [(first, first + 64) for first in range(0, num_vertices, 64)]
    places = Places.of(lists, ranges, num_vertices)
    split = Split(gnn.SAGEConv(num_columns, 8), (), (), True, True, None, False)
    rows = TensorRows(torch.zeros(num_vertices, num_columns))
    return Product(
        split, places, rows, torch.float32, None, ranges, memory, lambda sent, ids: rows.tensor[:0], torch.empty
    )


def test_the_order_that_reads_less_is_taken():
    number, columns = 4096, 256  # a page holds four rows
    near = (torch.arange(number)[:, None] + torch.arange(4)) % number
    far = torch.randint(number, (number, 4), generator=torch.Generator().manual_seed(0))
    row_bytes = 4 * columns
    rows = number * row_bytes
    reads = count_reads(product_of(columns, 4 * rows, near, number))
    entry = (reads.pushed - rows) // (4 * number)  # bytes of a source in the lists
    assert entry in (4, 8) and reads.pushed == rows + 4 * number * entry
    # Each batch of 64 targets reads its own 16 pages and the next one; the last batch wraps around.
    assert reads.pulled == 4 * number * entry + 64 * 17 * 4096
    little = count_reads(product_of(columns, rows // 4, near, number))
    assert little.pushed > 4 * rows > little.pulled, "neighbours that are near are pulled"
    distant = count_reads(product_of(columns, 4 * rows, far, number))
    assert distant.pushed == reads.pushed < distant.pulled, "neighbours anywhere are pushed"


def test_a_full_disk_is_an_error_before_a_row_is_written(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"9,600 bytes for rows of a layer cannot be reserved in .*No space.*make room"):
        salientpp.inference(made(SPLIT["GraphSAGE"]), graph(), scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_is_an_error(tmp_path):
    with pytest.raises(OSError, match="cannot be reserved in"):
        mapped_rows(tmp_path, (2**50, 2**10), torch.float32)


def test_a_killed_run_leaves_nothing(tmp_path):
    code = f"""
import os, signal, torch, torch_geometric.nn as gnn, salientpp
from salientpp.datasets import synthetic
from salientpp.layerwise.call import Call
count, store = [0], Call.store
def kill(call, first, last, rows):
    store(call, first, last, rows)
    count[0] += 1
    if count[0] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
Call.store = kill
data = synthetic(num_vertices=2000)
salientpp.inference(gnn.GCN(data.num_features, 8, 2, 5), data, batch_size=500, scratch={str(tmp_path)!r}, out={str(tmp_path)!r})
"""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(Path(tmp_path).iterdir()) == []


def test_wrong_memory_is_refused(tmp_path):
    for words, options in [
        ("memory must be a number of bytes", {"memory": 0.5, "scratch": tmp_path}),
        ("memory must be a number of bytes", {"memory": "much", "scratch": tmp_path}),
        ("applies only to rows in files; pass scratch= too", {"memory": "1GiB"}),
        ("the folder /dev/null/x cannot be created", {"scratch": "/dev/null/x"}),
    ]:
        with pytest.raises(ValueError, match=words):
            salientpp.inference(gnn.GraphSAGE(WIDTH, 8, 2, 5), graph(), **options)


def test_functional_steps_split_too():
    data = graph()
    model = [gnn.SAGEConv(WIDTH, 5), lambda x: F.log_softmax(x, dim=-1)]
    got, call = inferred(model, data)
    assert call.pushed == [0] and torch.allclose(got, whole(model, data), atol=1e-5)
