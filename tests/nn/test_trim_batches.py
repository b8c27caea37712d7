"""Laws of batches for trimmed models: a batch whose edges are as they were sampled is trimmed. On all others the plain model runs."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from torch_geometric.loader import NeighborLoader as PygLoader
from trimmed import FANOUTS, WIDTH, assert_same, batch_of, call_x, compare, graph, loader, seeds_of, step, within

import salientpp


@pytest.fixture(scope="module")
def data():
    return graph(5)


def network(kind: str = "gcn") -> torch.nn.Module:
    torch.manual_seed(1)
    made = {"gcn": pyg.GCN, "sage": pyg.GraphSAGE, "gat": pyg.GAT, "gin": pyg.GIN}
    return made[kind](WIDTH, 8, 3, 4).double()


def is_trimmed(batch, call=call_x, kind: str = "gcn", seeds: int | None = None) -> bool:
    """Returns True if the layers give fewer rows. Results equal the plain model's in both cases."""
    expected, got = compare(network(kind), batch, call, seeds=seeds)
    assert expected.rows == [expected.num_out] * 3
    return got.rows[-1] < expected.num_out


# --- trimmed ---------------------------------------------------------------------------------------------------


class Marks:
    """Transform that adds attributes."""

    def __call__(self, batch):
        batch.centre = batch.x.mean(0)
        batch.x = batch.x + 1
        return batch


def in_file(batch):
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "to": lambda batch: batch.to("cpu"),
    "to, of an attribute": lambda batch: batch.to("cpu", "edge_index", non_blocking=True),
    "cpu": lambda batch: batch.cpu(),
    "clone": lambda batch: batch.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "torch.save": in_file,
    "contiguous": lambda batch: batch.contiguous(),
    "detach": lambda batch: batch.detach(),
    "apply": lambda batch: batch.apply(lambda value: value.to(batch.x.device)),
    "of a dictionary": lambda batch: type(batch)(batch_size=batch.batch_size, num_sampled_nodes=batch.num_sampled_nodes, **{
        name: batch[name] for name in ("x", "edge_index")
    }),
    "float": lambda batch: batch.update({"x": batch.x.float().double()}),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_trimmed(name, data):
    assert is_trimmed(COPIES[name](batch_of(data)))


LOADERS = {
    "threads": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    "transform": {"transform": Marks()},
    "shuffle": {"shuffle": True, "batch_size": 5},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "temporal": {"time_attr": "time", "input_time": torch.full((13,), 6), "disjoint": True},
    "temporal, last": {"time_attr": "time", "temporal_strategy": "last", "input_time": torch.full((13,), 6)},
    "weighted": {"weight_attr": "edge_weight"},
    "dtype": {"dtype": torch.float64},
    "depth": {"depth": 3},
    "directed": {"directed": True},
}


@pytest.mark.parametrize("kind", ["gcn", "gat", "sage"])
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_of_all_kinds_are_trimmed(name, kind, data):
    batches = list(loader_of(data, **LOADERS[name]))
    assert all(is_trimmed(batch, kind=kind) for batch in batches)


def loader_of(data, **options):
    salientpp.nn.trim(network())
    return loader(data, **options)


def test_repeated_seeds_are_exact(data):
    compare(network(), batch_of(data, input_nodes=torch.tensor([3, 3, 5, 299, 3])))


# --- links -----------------------------------------------------------------------------------------------------


def links(data, **options):
    salientpp.nn.trim(network())
    options = {
        "batch_size": 8,
        "neg_sampling_ratio": 1.0,
        "seed": 2,
        "edge_label_index": data.edge_index[:, :16],
        **options,
    }
    return next(iter(salientpp.LinkNeighborLoader(data, FANOUTS, **options)))


class Scores(torch.nn.Module):
    """Model that contains its decoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = network(kind)

    def forward(self, x, edge_index, pairs):
        rows = self.inner(x, edge_index)
        return (rows[pairs[0]] * rows[pairs[1]]).sum(-1, keepdim=True)


@pytest.mark.parametrize("options", [{}, {"neg_sampling": "triplet"}, {"disjoint": True}], ids=str)
@pytest.mark.parametrize("kind", ["gcn", "gat", "sage"])
def test_links_are_decoded_outside_the_model_or_inside(kind, options, data):
    options = {**options, **({"neg_sampling_ratio": None} if "neg_sampling" in options else {})}
    batch = links(data, **options)
    if "neg_sampling" in options:
        pairs = torch.stack([batch.src_index, batch.dst_pos_index])
    else:
        pairs = batch.edge_label_index
    outside = lambda model, batch: (lambda rows: rows[pairs[0]] * rows[pairs[1]])(call_x(model, batch))  # noqa: E731
    expected, got = compare(network(kind), batch, outside, seeds=pairs.size(1))
    assert got.rows[-1] == within(batch, 0) < batch.num_nodes
    expected, got = compare(Scores(kind), batch, lambda m, b: m(b.x, b.edge_index, pairs), seeds=pairs.size(1))
    assert got.rows[-1] == within(batch, 0) < expected.rows[-1]


def test_rows_beyond_the_computed_ones_raise_an_index_error(data):
    model, batch = salientpp.nn.trim(network()), batch_of(data)
    out = model(batch.x, batch.edge_index)
    with pytest.raises(IndexError):
        out[batch.num_nodes - 1]


# --- the plain model -------------------------------------------------------------------------------------------


def permuted(batch):
    batch.edge_index = batch.edge_index[:, torch.randperm(batch.num_edges, generator=torch.Generator().manual_seed(1))]
    return batch


def dropped(batch):
    batch.edge_index = batch.edge_index[:, ::2]
    return batch


def written(batch):
    batch.edge_index[0, :20] = batch.num_nodes - 1
    return batch


def flipped(batch):
    batch.edge_index.copy_(batch.edge_index.flip(0))
    return batch


def seen_by_numpy(batch):
    batch.edge_index = torch.from_numpy(batch.edge_index.numpy().copy())
    return batch


CHANGED = {
    "permuted": permuted,
    "dropped": dropped,
    "written": written,
    "flipped": flipped,
    "undirected": T.ToUndirected(),
    "self-loops": T.AddSelfLoops(),
    "no self-loops": T.RemoveSelfLoops(),
    "relabelled": lambda batch: batch.subgraph(torch.arange(batch.num_nodes - 1, -1, -1)),
    "numpy": seen_by_numpy,
}


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("when", ["transform", "later"])
@pytest.mark.parametrize("name", CHANGED)
def test_changed_edges_run_the_plain_model(name, when, kind, data):
    change = CHANGED[name]
    batch = batch_of(data, transform=change) if when == "transform" else change(batch_of(data))
    assert not is_trimmed(batch, kind=kind)


def test_edges_that_a_copy_shares_are_changed_too(data):
    batch = batch_of(data)
    other = copy.copy(batch)
    moved = batch.to("cpu")
    written(batch)
    for each in (batch, other, moved):
        assert not is_trimmed(each)


def exposed(batch):
    batch.edge_index.numpy()[0, :20] = batch.num_nodes - 1
    return batch


def as_array(batch):
    np.asarray(batch.edge_index)[0, :20] = batch.num_nodes - 1
    return batch


def of_data(batch):
    batch.edge_index.data[0, :20] = batch.num_nodes - 1
    return batch


def of_dlpack(batch):
    torch.from_dlpack(batch.edge_index)[0, :20] = batch.num_nodes - 1
    return batch


@pytest.mark.parametrize("change", [exposed, as_array, of_data, of_dlpack])
def test_writes_that_torch_does_not_count_run_the_plain_model(change, data):
    for batch in (batch_of(data, transform=change), change(batch_of(data))):
        assert not is_trimmed(batch)


@pytest.mark.parametrize(
    "copied", [lambda batch: batch.clone(), copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))]
)
@pytest.mark.parametrize("change", [written, exposed])
def test_writes_to_a_batch_do_not_change_its_copies(change, copied, data):
    batch = batch_of(data)
    other = copied(batch)
    change(batch)
    compare(network(), other)
    compare(network(), batch)


def test_edges_may_be_written_to_between_two_calls(data):
    batch, model = batch_of(data), network()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    for change in (lambda batch: batch, written):
        batch = change(batch)
        assert_same(step(model, batch), step(trimmed, batch))


def test_masked_edges_run_the_plain_model(data):
    batch = batch_of(data)
    kept = torch.arange(batch.num_edges) % 3 > 0
    assert not is_trimmed(batch, lambda model, batch: model(batch.x, batch.edge_index[:, kept]))


def test_edges_of_another_batch_give_the_plain_result_or_an_error(data):
    """All ids of the other batch's edges are in range."""
    first, second = list(loader_of(data, batch_size=6))[:2]
    large, small = sorted((first, second), key=lambda batch: batch.num_nodes)[::-1]
    for kind in ("gcn", "sage", "gat"):
        try:
            expected, got = compare(network(kind), small, lambda model, _: model(large.x, small.edge_index))
        except RuntimeError as error:
            assert "rows" in str(error)
        else:
            assert torch.isfinite(got.out).all() and expected.out.shape == got.out.shape


def test_fewer_rows_than_the_batch_has_raise_a_clear_error(data):
    batch, model = batch_of(data), salientpp.nn.trim(network("sage"))
    model(batch.x, batch.edge_index)
    with pytest.raises((RuntimeError, IndexError), match="rows"):
        model(batch.x[: batch.num_nodes // 3], batch.edge_index)


@pytest.mark.parametrize("subgraph_type", ["induced", "bidirectional"])
def test_other_kinds_of_subgraphs_run_the_plain_model(subgraph_type, data):
    assert not is_trimmed(batch_of(data, subgraph_type=subgraph_type))


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("layout", [torch.sparse_csr, None])
def test_models_on_adj_t_are_trimmed(data, kind, layout, monkeypatch):
    monkeypatch.setattr(torch_geometric.typing, "WITH_SOFTMAX", False)  # some builds of pyg-lib lack it
    if layout is None:
        pytest.importorskip("torch_sparse")
    data = data.clone()
    del data.edge_attr, data.edge_weight, data.edge_type
    given = T.ToSparseTensor(layout=layout)(data)
    if layout is not None:
        given.adj_t = given.adj_t.double()
    batch, call = batch_of(given), lambda model, batch: model(batch.x, batch.adj_t)
    # PyG's degrees count a self-loop of a CSR tensor twice.
    assert is_trimmed(batch, call, kind=kind) == (kind != "gcn" or layout is None)


def test_adj_t_with_weights_gives_what_the_plain_model_gives(data):
    given = T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data.clone())
    assert not is_trimmed(batch_of(given), lambda model, batch: model(batch.x, batch.adj_t), kind="sage")


def test_adj_t_that_was_written_to_gives_what_the_plain_model_gives(data):
    given = T.ToSparseTensor(layout=torch.sparse_csr)(data.clone())
    given.adj_t = given.adj_t.double()
    batch = batch_of(given)
    batch.adj_t.values().mul_(2)
    assert not is_trimmed(batch, lambda model, batch: model(batch.x, batch.adj_t), kind="sage")


def test_padded_batches_are_exact(data):
    for batch in loader_of(data, pad="bucket"):
        compare(network(), batch)


def test_pygs_batches_and_whole_graphs_run_the_plain_model(data):
    pytest.importorskip("pyg_lib")
    assert not is_trimmed(next(iter(PygLoader(data, FANOUTS, seeds_of(data), batch_size=13))))
    whole = data.clone()
    whole.batch_size = data.num_nodes
    assert not is_trimmed(whole)


# --- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("drawn_inside", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_evaluation_without_gradients_is_exact(mode, drawn_inside, changed, data):
    given = loader_of(data)
    batch = None if drawn_inside else next(iter(given))
    model = network().eval()
    trimmed = salientpp.nn.trim(copy.deepcopy(model))
    with mode():
        batch = next(iter(given)) if batch is None else batch
        if changed:
            written(batch)
        expected, got = model(batch.x, batch.edge_index), trimmed(batch.x, batch.edge_index)
    torch.testing.assert_close(got[:13], expected[:13], rtol=1e-10, atol=1e-10)
    assert changed or got.size(0) == 13
