"""Laws of the loader on one rank: contents of a batch, when batches are equal, and how an epoch runs and ends.

Rows identify their vertices, and PyG's own ``NodeLoader.filter_fn`` defines the contents of a batch. Laws of several ranks
are in tests/loader/test_ranks.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from batches import DTYPES, N, assert_same_batches, differences, known_data, make
from distributed import HANG
from graphs import identity_features, random_data, random_hetero, star
from peers import BACKENDS, peer, sampling_with
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import BaseSampler, SamplerOutput

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic
from salientpp.engine.pipeline import StageError
from salientpp.store.cache import FeatureCache

# torch warns about worker processes, but ours are threads.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def in_every_dtype() -> list[str]:
    return [f"x_{dtype}".replace("torch.", "") for dtype in DTYPES]


@pytest.fixture(scope="module")
def data() -> Data:
    return known_data()


@pytest.fixture(scope="module")
def part(data, tmp_path_factory) -> salientpp.PartitionedGraph:
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("loader") / "d", [4, 3], 16)


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> tuple[HeteroData, salientpp.PartitionedGraph]:
    data = random_hetero()
    return data, salientpp.partition(data, 1, tmp_path_factory.mktemp("typed") / "d", [4, 3], 16)


# --- law 1: features identify their vertices -------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 3, 10, 99])
@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
def test_features_identify_their_vertices(data, part, device_rows, depth, num_workers):
    options = {"device_rows": device_rows, "depth": depth, "num_workers": num_workers}
    for batch in make(data, **options):
        for name in ["x", "y", *in_every_dtype()]:
            assert torch.equal(batch[name], data[name][batch.n_id]), name
        assert torch.equal(batch.edge_attr.view(-1).long(), batch.e_id)
    for batch in make(part, columns=["x", *in_every_dtype()], **options):
        original = part.original_id(batch.n_id)
        for name in ["x", *in_every_dtype()]:
            assert torch.equal(batch[name], data[name][original]), name
        assert torch.equal(batch.y, data.y[original[: batch.batch_size]])
        number = batch.edge_attr.view(-1).long()
        assert torch.equal(original[batch.edge_index], data.edge_index[:, number])


def test_a_batch_is_a_sample_of_the_graph(data):
    """Seeds come first. Every edge exists and ends in a vertex of the hop before, and no vertex gets more than the fanout."""
    fanouts = [4, 3, 2]
    for batch in make(data, num_neighbors=fanouts):
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert batch.n_id.unique().numel() == batch.n_id.numel()
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert batch.e_id.unique().numel() == batch.e_id.numel(), "without replacement"
        assert batch.num_sampled_nodes[0] == batch.batch_size
        assert (sum(batch.num_sampled_nodes), sum(batch.num_sampled_edges)) == (batch.num_nodes, batch.num_edges)
        first_vertex = np.cumsum([0, *batch.num_sampled_nodes])
        first_edge = np.cumsum([0, *batch.num_sampled_edges])
        in_degree = torch.bincount(data.edge_index[1], minlength=N)
        for hop, fanout in enumerate(fanouts):
            targets = batch.edge_index[1, first_edge[hop] : first_edge[hop + 1]]
            drawn = torch.bincount(targets, minlength=batch.num_nodes)
            frontier = torch.arange(first_vertex[hop], first_vertex[hop + 1])
            assert torch.equal(drawn[frontier], in_degree[batch.n_id[frontier]].clamp(max=fanout))
            assert int(drawn.sum()) == int(drawn[frontier].sum())


def test_a_fanout_of_minus_one_takes_all_neighbours():
    data = Data(edge_index=star(40), x=identity_features(41))
    (batch,) = make(data, num_neighbors=[-1], input_nodes=[0])
    assert batch.n_id[0] == 0 and sorted(batch.n_id.tolist()) == list(range(41))
    assert sorted(batch.e_id.tolist()) == list(range(40))


def test_replace_gives_every_vertex_with_neighbours_its_fanout(data):
    in_degree = torch.bincount(data.edge_index[1], minlength=N)
    for batch in make(data, num_neighbors=[7], replace=True):
        drawn = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)[: batch.batch_size]
        assert torch.equal(drawn, torch.where(in_degree[batch.input_id] > 0, 7, 0))


def test_seeds_without_neighbours_bring_no_other_vertices():
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), x=identity_features(9), edge_attr=torch.empty(0, 2))
    for batch in make(data, batch_size=4):
        assert torch.equal(batch.x[:, 0].long(), batch.input_id)
        assert batch.edge_index.shape == (2, 0) and batch.edge_attr.shape == (0, 2)
        assert batch.num_sampled_nodes == [batch.batch_size, 0, 0] and batch.num_sampled_edges == [0, 0]


def test_a_repeated_seed_occurs_repeatedly_in_the_batch(data):
    (batch,) = make(data, input_nodes=[7, 7, 3], shuffle=False)
    assert batch.batch_size == 3 and batch.n_id[:3].tolist() == [7, 7, 3] and batch.input_id.tolist() == [0, 1, 2]
    assert torch.equal(batch.x[:, 0].long(), batch.n_id)


# --- law 3: a batch is a pure function of (seed, epoch, rank, index) -------------------------------------


@pytest.mark.parametrize("source", ["data", "part"])
def test_a_batch_depends_on_seed_epoch_and_index_alone(data, part, source):
    graph = {"data": data, "part": part}[source]
    reference = make(graph)
    epochs = [list(reference) for _ in range(3)]
    for depth, num_workers, device_rows in itertools.product([1, 2, 10, 99], [0, 1, 3], [0, 0.4]):
        loader = make(
            graph,
            depth=depth,
            num_workers=num_workers,
            prefetch_factor=7 if num_workers else None,
            device_rows=device_rows,
        )
        assert_same_batches(list(loader), epochs[0])
        loader.set_epoch(2)
        assert_same_batches(list(loader), epochs[2])
    again = make(graph)
    again.set_epoch(1)
    assert_same_batches(list(again), epochs[1])
    assert_same_batches(list(again), epochs[2])
    again.set_epoch(0)
    assert_same_batches(list(again), epochs[0])
    others = list(make(graph, seed=6))
    assert all("n_id" in differences(a, b) for a, b in zip(epochs[0], others)), "another seed, other batches"
    assert all("n_id" in differences(a, b) for a, b in zip(epochs[0], epochs[1])), "another epoch, other batches"


def test_epochs_without_shuffle_draw_other_neighbours_of_the_same_seeds(data):
    loader = make(data, shuffle=False, num_neighbors=[2])
    first, second = list(loader), list(loader)
    for a, b in zip(first, second):
        assert torch.equal(a.input_id, b.input_id)
        assert "e_id" in differences(a, b)


def test_batches_of_one_epoch_draw_independently():
    """The same seed occurs in 200 batches. All of its 40 neighbours are drawn, none much more often than the others."""
    data = Data(edge_index=star(40), num_nodes=41)
    loader = make(data, num_neighbors=[4], input_nodes=[0] * 200, batch_size=1, shuffle=False)
    print("seed 5")
    drawn = torch.bincount(torch.cat([batch.e_id for batch in loader]), minlength=40)
    # 200 draws with probability 1/10: mean 20, standard deviation 4.2.
    assert int(drawn.sum()) == 800 and int(drawn.min()) > 3 and int(drawn.max()) < 40, drawn


def test_a_resumed_run_gives_the_batches_it_would_have_given(data):
    whole = make(data)
    epochs = [list(whole) for _ in range(2)]
    resumed = make(data, num_workers=2)
    resumed.set_epoch(1)
    given = list(itertools.islice(resumed, 3, None))
    assert_same_batches(given, epochs[1][3:])


def test_torch_seeds_a_loader_without_a_seed(data):
    def batches(**options: Any) -> list[Data]:
        return list(make(data, seed=None, **options))

    torch.manual_seed(3)
    first = batches()
    other = batches()
    torch.manual_seed(3)
    assert_same_batches(first, batches())
    assert "n_id" in differences(first[0], other[0])
    given = [batches(generator=torch.Generator().manual_seed(8)) for _ in range(2)]
    assert_same_batches(*given)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    make(data, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "a given seed leaves torch's generator alone"


# --- contents of a batch ---------------------------------------------------------------------------------


def pyg_batch(data: Data, sampled: SamplerOutput, input_id: Tensor) -> Data:
    """Makes PyG's batch of a sample."""
    sampled.metadata = (input_id, None)
    loader = SimpleNamespace(
        data=data, transform=None, transform_sampler_output=None, node_sampler=SimpleNamespace(edge_permutation=None)
    )
    return NodeLoader.filter_fn(loader, sampled)


def assert_batches_are_pygs(data: Data, **options: Any) -> list[Data]:
    samples = []

    def keep(sampled: SamplerOutput) -> SamplerOutput:
        samples.append(sampled)
        return sampled

    batches = list(make(data, transform_sampler_output=keep, **options))
    assert len(batches) == len(samples) > 0
    for batch, sampled in zip(batches, samples):
        expected = pyg_batch(data, sampled, batch.input_id)
        assert type(batch) is type(expected)
        assert differences(batch, expected) == []
        assert batch.num_nodes == expected.num_nodes and batch.num_edges == expected.num_edges
        assert batch.validate()
    return batches


GRAPH_LEVEL = {
    "name": "cora",
    "scale": torch.tensor(3.0),
    "table": torch.zeros(4, 2),
    "options": {"a": 1},
    "sizes": [1, 2],
}


@pytest.mark.parametrize("device_rows", [0, 0.5])
def test_a_batch_equals_pygs_of_the_same_sample(device_rows):
    generator = torch.Generator().manual_seed(4)
    print("seed 4")
    data = known_data(
        array=np.arange(3 * N).reshape(N, 3),
        transposed=torch.arange(2 * N).view(2, N).t(),
        every_other=torch.rand(N, 6, generator=generator)[:, ::2],
        learned=torch.rand(N, 2, requires_grad=True, generator=generator),
        cube=torch.rand(N, 2, 3, generator=generator),
        flat=torch.arange(N),
        narrow=torch.zeros(N, 0),
        pair_index=torch.arange(2 * N).view(2, N),
        n_id=torch.arange(N) + 1000,
        edge_weight=torch.rand(random_data(N, 1500, seed=1, directed=True).num_edges, generator=generator),
        **GRAPH_LEVEL,
    )
    data.edge_array = data.edge_weight.numpy()
    data.edge_pair_index = torch.stack([data.edge_weight, -data.edge_weight])
    data.edge_strided = torch.rand(data.num_edges, 4, generator=generator)[:, 1::2]
    batches = assert_batches_are_pygs(data, device_rows=device_rows, input_nodes=data.train_mask)
    for batch in batches:
        ids = batch.n_id - 1000
        assert torch.equal(batch.x[:, 0].long(), ids), "the user's own n_id has the rows of the batch's vertices"
        assert torch.equal(batch.pair_index, data.pair_index[:, ids]), "vertices in the second dimension"
        assert torch.equal(batch.edge_pair_index, data.edge_pair_index[:, batch.e_id])
        assert batch.learned.requires_grad
        for name, value in GRAPH_LEVEL.items():
            assert batch[name] is value, name


@pytest.mark.parametrize("form", ["num_nodes only", "no x", "E == N", "int32", "sorted", "subclass"])
def test_data_of_every_form_gives_pygs_batches(form):
    data = known_data()
    options: dict[str, Any] = {}
    if form == "num_nodes only":
        data = Data(edge_index=data.edge_index, num_nodes=N)
    elif form == "no x":
        del data.x
        data.num_nodes = N
    elif form == "E == N":
        ring = torch.arange(N)
        data = Data(edge_index=torch.stack([ring, ring.roll(1)]), x=identity_features(N), edge_attr=-ring, weight=ring)
    elif form == "int32":
        data.edge_index = data.edge_index.int()
    elif form == "sorted":
        data = data.sort(sort_by_row=False)
        options["is_sorted"] = True
    else:

        class Citations(Data):
            pass

        data = Citations(**data.to_dict())
    for batch in assert_batches_are_pygs(data, **options):
        assert batch.edge_index.dtype == torch.int64
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id].long())
        assert ("x" in batch) == ("x" in data)


def test_attributes_that_pyg_sets_to_none_are_absent(data):
    batch = next(iter(make(data)))
    for name in ("seed_time", "time", "edge_label"):
        assert name not in batch
    assert "batch" not in batch and batch.batch is None


def test_input_id_is_a_vertex_for_masks_and_a_position_for_ids(data):
    chosen = data.train_mask.nonzero().flatten()
    for nodes, expected in (
        (data.train_mask, chosen),
        (chosen, torch.arange(chosen.numel())),
        (chosen.tolist(), torch.arange(chosen.numel())),
        (chosen.numpy(), torch.arange(chosen.numel())),
        (chosen.int(), torch.arange(chosen.numel())),
        (tuple(chosen.tolist()), torch.arange(chosen.numel())),
        (chosen.flip(0), torch.arange(chosen.numel())),
        (None, torch.arange(N)),
        (range(10), torch.arange(10)),
    ):
        loader = make(data, input_nodes=nodes, shuffle=False)
        seeds = (
            torch.arange(N) if nodes is None else chosen if nodes is data.train_mask else torch.as_tensor(nodes).long()
        )
        assert torch.equal(torch.cat([batch.input_id for batch in loader]), expected)
        assert torch.equal(torch.cat([batch.n_id[: batch.batch_size] for batch in loader]), seeds)
        assert len(loader.dataset) == seeds.numel()


def test_seeds_of_a_partitioned_graph_are_named_or_given(data, part):
    everyone = torch.arange(N)
    train = part.split("train")
    mask = torch.zeros(N, dtype=torch.bool)
    mask[train] = True
    for nodes, seeds, input_id in (
        ("train", train, train),
        ("test", part.split("test"), part.split("test")),
        ("all", everyone, everyone),
        (None, everyone, everyone),
        (mask, train, train),
        (train, train, torch.arange(train.numel())),
        (train.flip(0).tolist(), train.flip(0), torch.arange(train.numel())),
    ):
        batches = list(make(part, input_nodes=nodes, shuffle=False))
        assert torch.equal(torch.cat([batch.n_id[: batch.batch_size] for batch in batches]), seeds)
        assert torch.equal(torch.cat([batch.input_id for batch in batches]), input_id)
    assert set(part.original_id(train).tolist()) == set(data.train_mask.nonzero().flatten().tolist())


def test_columns_select_the_attributes_that_every_vertex_gets(data, part):
    others = {"y", *in_every_dtype()}
    for gather, every_vertex in ((("x",), {"x"}), ("y", {"y"}), (["x", "y"], {"x", "y"}), ((), set())):
        for batch in make(part, columns=gather, device_rows=0.5):
            original = part.original_id(batch.n_id)
            for name in {"x"} | others:
                ids = original if name in every_vertex else original[: batch.batch_size]
                assert torch.equal(batch[name], data[name][ids]), name
            assert batch.num_nodes == batch.n_id.numel()
            assert set(batch.keys()) == {
                "x",
                *others,
                "edge_attr",
                "edge_index",
                "num_nodes",
                "n_id",
                "e_id",
                "input_id",
                "batch_size",
                "num_sampled_nodes",
                "num_sampled_edges",
            }
    with pytest.raises(TypeError, match="columns must be the names of node attributes of .*, got int"):
        make(part, columns=5)


def test_a_partitioned_graph_without_features_is_loaded(tmp_path):
    data = random_data(60, 200)
    del data.x
    data.num_nodes = 60
    part = salientpp.partition(data, 1, tmp_path / "d", [3], 8)
    for batch in make(part, input_nodes="train"):
        assert "x" not in batch and torch.equal(batch.y, part.original_id(batch.input_id) % 7)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_adj_t_as_a_csr_tensor_gives_batches():
    indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0])
    data = Data(
        x=identity_features(3), adj_t=torch.sparse_csr_tensor(indptr, indices, torch.tensor([5.0, 6.0, 7.0]), (3, 3))
    )
    (batch,) = make(data, num_neighbors=[-1], shuffle=False)
    assert torch.equal(batch.x[:, 0].long(), batch.n_id)
    everything = data.adj_t.to_dense()[batch.n_id][:, batch.n_id]
    assert torch.equal(batch.adj_t.to_dense(), everything), (
        "rows are targets, columns sources, values go with their edges"
    )


# --- transforms ------------------------------------------------------------------------------------------


def test_the_transform_sees_the_finished_batch_and_its_result_is_given(data):
    def double(batch: Data) -> Data:
        assert batch.batch_size and "input_id" in batch and "n_id" in batch
        batch.x = batch.x * 2
        return batch

    for batch in make(data, transform=double):
        assert torch.equal(batch.x[:, 0].long(), batch.n_id * 2)
    assert [*make(data, transform=lambda batch: batch.batch_size)] == [32] * 7 + [26]


def test_a_transform_may_return_anything_even_none(data):
    """PyG returns it unchanged. The test takes only three batches, because an epoch would never end if None meant "no batch yet"."""
    results = {0: "first", 1: None}
    calls = itertools.count()
    loader = make(data, transform=lambda batch: results.get(next(calls), "later"), depth=1)
    assert list(itertools.islice(loader, 3)) == ["first", None, "later"]


def test_transform_sampler_output_changes_the_sample(data):
    def drop_edges(sampled: SamplerOutput) -> SamplerOutput:
        keep = sampled.edge % 2 == 0
        sampled.row, sampled.col, sampled.edge = sampled.row[keep], sampled.col[keep], sampled.edge[keep]
        return sampled

    for batch in make(data, transform_sampler_output=drop_edges, num_workers=2):
        assert bool((batch.e_id % 2 == 0).all()) and torch.equal(batch.edge_attr.view(-1).long(), batch.e_id)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])


def test_transform_sampler_output_sees_the_fields_of_pygs_sampler(data):
    seen = []

    def look(sampled: SamplerOutput) -> SamplerOutput:
        seen.append(sampled.metadata)
        return sampled

    batches = list(make(data, transform_sampler_output=look, input_nodes=data.train_mask))
    for batch, (input_id, seed_time) in zip(batches, seen, strict=True):
        assert torch.equal(input_id, batch.input_id) and seed_time is None


def test_transform_sampler_output_may_drop_the_edge_ids(data):
    def forget(sampled: SamplerOutput) -> SamplerOutput:
        sampled.edge = None
        return sampled

    for batch in make(data, transform_sampler_output=forget):
        assert "e_id" not in batch and "edge_attr" not in batch and batch.edge_index.size(1) > 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_functions_that_return_no_sample_are_named(data, num_workers):
    class ReturnsNothing(BaseSampler):
        def sample_from_nodes(self, index: Any, **kwargs: Any) -> Any:
            return None

        def sample_from_edges(self, index: Any, **kwargs: Any) -> Any:
            return None

    for name, given in (("transform_sampler_output", lambda sampled: None), ("neighbor_sampler", ReturnsNothing())):
        text = f"stage sample: {name} must return a SamplerOutput or HeteroSamplerOutput, got a NoneType$"
        with pytest.raises(StageError, match=text):
            list(make(data, num_workers=num_workers, **{name: given}))


class Boom(Exception):
    pass


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 4, 10])
@pytest.mark.parametrize(("argument", "stage"), [("transform", "assemble"), ("transform_sampler_output", "sample")])
def test_a_raising_transform_names_rank_batch_and_stage(data, argument, stage, depth, num_workers):
    def raise_at_3(value: Any) -> Any:
        # The seeds identify the batch, because several threads may call this.
        ids = value.node if isinstance(value, SamplerOutput) else value.n_id
        if int(ids[0]) == 3 * 32:
            raise Boom("no luck")
        return value

    loader = make(data, shuffle=False, depth=depth, num_workers=num_workers, **{argument: raise_at_3})
    epoch = iter(loader)
    given = [next(epoch) for _ in range(3)] if depth == 1 or argument == "transform" else []
    text = f"^rank 0, batch 3, stage {stage}: no luck$"
    with pytest.raises(StageError, match=text) as raised:
        for batch in epoch:
            given.append(batch)
    assert isinstance(raised.value.__cause__, Boom), "the cause is chained"
    assert len(given) <= 3
    with pytest.raises(StageError, match=text):
        next(epoch)
    with pytest.raises(StageError, match=text):
        list(loader)


def test_after_an_error_the_next_epoch_is_whole(data):
    fail = [True]

    def sometimes(batch: Data) -> Data:
        if fail[0]:
            raise Boom
        return batch

    loader = make(data, transform=sometimes)
    with pytest.raises(StageError):
        list(loader)
    fail[0] = False
    loader.set_epoch(0)
    assert_same_batches(list(loader), list(make(data)))


# --- epochs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 25, 50, 51])
def test_len_is_the_number_of_batches_of_an_epoch(data, batch_size, drop_last):
    loader = make(data, input_nodes=torch.arange(50), batch_size=batch_size, drop_last=drop_last)
    sizes = [batch.batch_size for batch in loader]
    whole, rest = divmod(50, batch_size)
    assert sizes == [batch_size] * whole + [rest] * (rest > 0 and not drop_last)
    assert len(loader) == len(sizes)


#: Wrong values of input_nodes, and the text of the error.
NO_NODES = [
    ([None], "list (Could not infer dtype of NoneType)"),
    (print, "builtin_function_or_method ("),
    ({"a": 1}, "dict ("),
    ({1, 2}, "set ("),
    (b"x", "bytes ("),
    ([1, "a"], "list ("),
    ([2**70], "list ("),
    (iter([1]), "list_iterator ("),
    (np.array([None]), "a NumPy array of object"),
    (np.array(["a"]), "a NumPy array of <U1"),
    (np.array([1], "M8[s]"), "a NumPy array of datetime64[s]"),
    (np.array([1], np.longdouble), f"a NumPy array of {np.dtype(np.longdouble)}"),
    (np.array([(1,)], [("a", int)]), "a NumPy array of [('a', '<i8')]"),
]


@pytest.mark.parametrize(("nodes", "got"), NO_NODES, ids=[got for _, got in NO_NODES])
def test_wrong_input_nodes_raise_a_clear_error(data, part, typed, nodes, got):
    for source, given, of in (
        (data, nodes, "a homogeneous graph"),
        (part, nodes, "a homogeneous graph"),
        *((each, ("paper", nodes), "'paper'") for each in typed),
    ):
        with pytest.raises(ValueError) as caught:
            NeighborLoader(source, [2], given)
        assert str(caught.value).startswith(f"input_nodes of {of} must be a mask, integer ids or None, got {got}")


#: Arrays and tensors of one seed or none, with the strides of the larger array that they were cut from, or with other unusual strides.
STRIDED = {
    "an empty array": lambda: np.array([], dtype=np.int64),
    "an empty array of floats": lambda: np.array([]),
    "nothing of an array": lambda: np.arange(6)[6::3],
    "one of an array": lambda: np.arange(6)[5::3],
    "nothing of a tensor": lambda: torch.arange(6)[6::3],
    "one of a tensor": lambda: torch.arange(6)[5::3],
    "one broadcast": lambda: torch.tensor(5).expand(1),
    "a reversed array": lambda: np.arange(5, 6)[::-1],
    "an array of another byte order": lambda: np.array([5], ">i8"),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_one_seed_or_none_may_have_unusual_strides(data, part, kind):
    for source in (data, part):
        loader = NeighborLoader(source, [2], STRIDED[kind](), batch_size=4)
        loader.load_state_dict(loader.state_dict())
        assert [batch.n_id[0].item() for batch in loader] == loader.input_data.node.tolist()
        assert loader.input_data.node.tolist() in ([], [5])


@pytest.mark.parametrize("nodes", [[], torch.zeros(N, dtype=torch.bool), torch.empty(0, dtype=torch.int64)])
def test_no_seeds_give_no_batches(data, nodes):
    loader = make(data, input_nodes=nodes)
    assert len(loader) == 0 and list(loader) == []


def test_shuffle_visits_every_seed_once_in_a_new_order_each_epoch(data):
    loader = make(data, input_nodes=data.train_mask)
    orders = [torch.cat([batch.input_id for batch in loader]) for _ in range(4)]
    for order in orders:
        assert torch.equal(order.sort().values, data.train_mask.nonzero().flatten())
    for a, b in itertools.combinations(orders, 2):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_early_break_leaves_the_next_epoch_whole(data, num_workers):
    loader = make(data, num_workers=num_workers)
    for _ in range(3):
        for _ in loader:
            break
    assert_same_batches(list(loader), [*_epoch_of(data, 3)])


def _epoch_of(data: Data, epoch: int) -> list[Data]:
    loader = make(data)
    loader.set_epoch(epoch)
    return list(loader)


def test_two_simultaneous_iterators_are_two_epochs(data):
    loader = make(data, num_workers=2)
    pairs = list(zip(iter(loader), iter(loader), strict=True))
    assert_same_batches([first for first, _ in pairs], _epoch_of(data, 0))
    assert_same_batches([second for _, second in pairs], _epoch_of(data, 1))


def test_an_exhausted_or_closed_epoch_gives_no_more_batches(data):
    loader = make(data)
    epoch = iter(loader)
    assert iter(epoch) is epoch
    assert len(list(epoch)) == 8
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(epoch)
    epoch = iter(loader)
    next(epoch)
    epoch.close()
    assert list(epoch) == []


@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
@pytest.mark.parametrize("source", ["data", "part"])
def test_kept_batches_do_not_change(data, part, source, device_rows):
    loader = make({"data": data, "part": part}[source], device_rows=device_rows, num_workers=2)
    kept, copies = [], []
    for batch in itertools.chain(loader, loader):
        kept.append(batch)
        copies.append(batch.clone())
    assert_same_batches(kept, copies)


@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
@pytest.mark.parametrize("source", ["data", "part"])
def test_writing_into_a_batch_changes_neither_data_nor_later_batches(data, part, source, device_rows):
    graph = {"data": data, "part": part}[source]
    before = data.clone()
    for nodes, batch_size in itertools.product((None, torch.arange(N)), (32, N)):
        expected = list(make(graph, input_nodes=nodes, batch_size=batch_size))
        loader = make(graph, input_nodes=nodes, batch_size=batch_size, device_rows=device_rows, num_workers=2)
        for _ in range(2):
            loader.set_epoch(0)
            for batch, untouched in zip(loader, expected, strict=True):
                assert differences(batch, untouched) == []
                for value in batch.to_dict().values():
                    if isinstance(value, Tensor):
                        value.zero_()
    assert differences(data, before) == []


def test_a_loader_is_a_torch_data_loader(data):
    loader = make(data, input_nodes=data.train_mask, drop_last=True, num_workers=2)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert len(loader.dataset) == int(data.train_mask.sum())
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (32, True, 2)
    assert loader.data is data and loader.num_neighbors == [4, 3]
    assert repr(loader) == f"NeighborLoader({len(loader)} batches of 32, num_neighbors [4, 3])"


# --- training --------------------------------------------------------------------------------------------


def test_pygs_graphsage_trains_on_the_batches():
    torch.manual_seed(0)
    print("seed 0")
    data = synthetic(num_vertices=3000, num_features=16, signal=3.0)
    loader = NeighborLoader(data, [5, 3], data.train_mask, batch_size=64, shuffle=True, num_workers=2, seed=1)
    model = GraphSAGE(16, 32, num_layers=2, out_channels=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(logits, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    steps = len(loader)
    assert sum(losses[-steps:]) < 0.7 * sum(losses[:steps]), losses


def test_pygs_trimming_to_the_hop_changes_no_row_of_seeds(data):
    """Trimming relies on vertices and edges being ordered by hop, and on their counts."""
    torch.manual_seed(1)
    model = GraphSAGE(3, 8, num_layers=3).eval()
    for batch in make(data, num_neighbors=[4, 3, 2]):
        full = model(batch.x, batch.edge_index)[: batch.batch_size]
        trimmed = model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )
        torch.testing.assert_close(trimmed[: batch.batch_size], full)


# --- tiers, statistics, memory, threads ------------------------------------------------------------------


@pytest.mark.parametrize("source", ["data", "part"])
@pytest.mark.parametrize("device_rows", [0, 0.1, 0.5, 1.0])
def test_the_hottest_rows_are_kept_on_the_device(data, part, source, device_rows):
    num_hot = int(device_rows * N)
    if source == "data":
        seeds = data.train_mask.nonzero().flatten()
        graph = salientpp.Graph.from_data(data)
        vip = salientpp.inclusion_probability(graph, seeds, [4, 3], 16, include_seeds=True)
        hot = torch.sort(vip, descending=True, stable=True).indices[:num_hot]
        loader = make(data, input_nodes=data.train_mask, batch_size=16, device_rows=device_rows)
    else:
        hot = torch.arange(num_hot)
        loader = make(part, input_nodes="train", batch_size=16, device_rows=device_rows)
    rows = torch.cat([batch.n_id for _ in range(3) for batch in loader])
    stats = loader.stats()
    assert stats.rows_device == int(torch.isin(rows, hot).sum())
    assert stats.rows_device + stats.rows_host == rows.numel()
    if 0 < device_rows < 1:
        assert stats.rows_device > 1.2 * device_rows * rows.numel(), "hot rows are asked for more often than others"


def test_stats_add_up(data):
    loader = make(data, device_rows=0.3, num_workers=1)
    assert loader.stats().batches == loader.stats().rows == 0
    started = time.perf_counter()
    rows = sum(batch.n_id.numel() for _ in range(2) for batch in loader)
    elapsed = time.perf_counter() - started
    stats = loader.stats()
    assert stats.batches == 2 * len(loader) == 16
    assert stats.rows == stats.rows_device + stats.rows_host + stats.rows_cache + stats.rows_remote == rows
    assert stats.rows_cache == stats.rows_remote == stats.bytes_sent == stats.bytes_received == 0
    assert list(stats.seconds_by_stage) == [
        "sample",
        "exchange_counts",
        "read_counts",
        "exchange_ids",
        "localize_ids",
        "gather_host_rows",
        "copy_to_device",
        "gather_device_rows",
        "exchange_rows",
        "assemble",
    ]
    spent = {name for name, seconds in stats.seconds_by_stage.items() if seconds > 0}
    assert spent == {"sample"}, "the caller's thread waits for the worker, which makes whole batches"
    assert sum(stats.seconds_by_stage.values()) <= stats.seconds_waiting <= elapsed
    loader.reset_stats()
    assert loader.stats().batches == loader.stats().rows == loader.stats().seconds_waiting == 0
    assert stats.batches == 16, "what was reported does not change"
    next(iter(loader))
    assert loader.stats().batches == 1
    loader = make(data)
    list(loader)
    spent = {name for name, seconds in loader.stats().seconds_by_stage.items() if seconds > 0}
    assert spent == {"sample", "gather_host_rows", "assemble"}, "nothing is exchanged and nothing copied"


@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
def test_memory_adds_up(device_rows):
    data = Data(edge_index=random_data(N, 1500).edge_index, x=torch.zeros(N, 16), y=torch.zeros(N, dtype=torch.int64))
    memory = make(data, device_rows=device_rows).memory_used()
    row_bytes = 16 * 4 + 8
    assert memory["host"] == N * row_bytes
    assert memory["cache"] == 0
    assert memory["graph"] == salientpp.Graph.from_data(data).nbytes
    num_hot = int(device_rows * N)
    packed_set = memory["device"] - num_hot * row_bytes
    assert 0 < packed_set <= 8 * (N // 32 + 1) if num_hot else packed_set == 0


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


@pytest.mark.parametrize("ending", ["not begun", "in the middle", "finished", "raised"])
def test_a_deleted_loader_ends_its_threads(data, ending):
    gc.collect()
    before = set(threading.enumerate())

    def run() -> tuple[weakref.ref, int]:
        def transform(batch: Data) -> Data:
            if ending == "raised":
                raise Boom
            return batch

        loader = make(data, num_workers=3, transform=transform)
        if ending == "in the middle":
            epoch = iter(loader)
            next(epoch)
        elif ending == "finished":
            list(loader)
        elif ending == "raised":
            with pytest.raises(StageError):
                list(loader)
        return weakref.ref(loader), len(_new_threads(before))

    gone, num_threads = run()
    assert (num_threads > 0) == (ending != "not begun"), "the test must not be vacuous"
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + HANG
    while _new_threads(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _new_threads(before)


# --- arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"replication_factor": -0.1}, ValueError, "replication_factor must be >= 0 .*, got -0.1"),
        ({"replication_factor": float("nan")}, ValueError, "replication_factor must be >= 0 .*, got nan"),
        ({"replication_factor": float("inf")}, ValueError, "replication_factor must be >= 0 .*, got inf"),
        ({"replication_factor": "much"}, ValueError, "replication_factor must be >= 0 .*, got 'much'"),
        ({"device": "nonsense"}, ValueError, "device must be the CPU.*, got 'nonsense'"),
        ({"device": "gpu"}, ValueError, "device must be the CPU.*, got 'gpu'. Did you mean cuda"),
        ({"memory": {"device": 9, "machines": "no.json"}}, ValueError, r"machines.*calibrate wrote, got 'no.json' \(No such file"),
        ({"device": "meta"}, ValueError, "device must be the CPU.*, got 'meta'"),
        ({"device": "cuda:99"}, ValueError, "device must be the CPU.*, got 'cuda:99'"),
        ({"device_rows": 1.5}, ValueError, r"device_rows must be a fraction in \[0, 1\] of the part.s rows, or bytes, .*, got 1.5"),
        ({"device_rows": -0.1}, ValueError, r"device_rows must be a fraction in \[0, 1\] of the part.s rows, or bytes, .*, got -0.1"),
        ({"device_rows": float("nan")}, ValueError, r"device_rows must be a fraction in \[0, 1\] of the part.s rows, or bytes, .*, got nan"),
        ({"device_rows": "half"}, ValueError, r"device_rows must be a fraction in \[0, 1\] of the part.s rows, or bytes, .*, got 'half'"),
        ({"depth": 0}, ValueError, "depth must be an integer >= 1 .*, got 0"),
        ({"depth": 2.5}, ValueError, "depth must be an integer >= 1 .*, got 2.5"),
        ({"depth": True}, ValueError, "depth must be an integer >= 1 .*, got True"),
        ({"uneven": "pad"}, ValueError, "uneven must be one of 'wrap', 'drop', 'exact', 'error', got 'pad'"),
        ({"policy": "lru"}, ValueError, "policy must be one of .*degree.*random.*vip.*vip-hop.*, got 'lru'"),
        ({"num_neighbors": [5, -2]}, ValueError, r"num_neighbors\[1\] must be an integer >= 0, or -1 for all neighbours, got -2"),
        ({"num_neighbors": [2.5]}, ValueError, r"num_neighbors\[0\] must be an integer >= 0, .*, got 2.5"),
        ({"num_neighbors": ["a"]}, ValueError, r"num_neighbors\[0\] must be an integer >= 0, .*, got 'a'"),
        ({"num_neighbors": [None]}, ValueError, r"num_neighbors\[0\] must be an integer >= 0, .*, got None"),
        ({"num_neighbors": [float("nan")]}, ValueError, r"num_neighbors\[0\] must be an integer >= 0, .*, got nan"),
        ({"num_neighbors": "15,10"}, ValueError, "num_neighbors must be a list of integers, one per hop, got '15,10'"),
        ({"num_neighbors": 15}, ValueError, "num_neighbors must be a list of integers, one per hop, got 15"),
        ({"num_neighbors": {("a", "to", "a"): [3]}}, ValueError, "num_neighbors must be a list of integers, one per hop, got {"),
        ({"batch_size": 0}, ValueError, "batch_size.*got.*0"),
        ({"batch_size": -3}, ValueError, "batch_size.*got.*-3"),
        ({"batch_size": None}, ValueError, "batch_size must be 1 to 2,147,483,647, got None"),
        ({"batch_size": 2**70}, ValueError, "batch_size must be 1 to 2,147,483,647, got 1180591620717411303424"),
        ({"input_nodes": [0, N]}, ValueError, rf"input_nodes must be in \[0, {N}\), got {N} at position 1"),
        ({"input_nodes": torch.tensor([3, -1])}, ValueError, rf"input_nodes must be in \[0, {N}\), got -1 at position 1"),
        ({"input_nodes": torch.tensor([0, N], dtype=torch.uint16)}, ValueError, rf"input_nodes must be in \[0, {N}\), got {N} at position 1"),
        ({"input_nodes": torch.empty(3, device="meta", dtype=torch.int64)}, ValueError, "input_nodes must be an ordinary tensor with values, got .* on meta"),
        ({"input_nodes": torch.tensor([0, 1]).to_sparse()}, ValueError, "input_nodes must be an ordinary tensor with values, got torch.sparse_coo"),
        ({"input_nodes": torch.tensor([0.5])}, ValueError, "input_nodes must be a mask or integer ids, got torch.float32"),
        ({"input_nodes": torch.zeros(2, 2).long()}, ValueError, r"input_nodes must have 1 dimension, got shape \[2, 2\]"),
        ({"input_nodes": torch.tensor(3)}, ValueError, r"input_nodes must have 1 dimension, got shape \[\]"),
        ({"input_nodes": torch.ones(N - 1).bool()}, ValueError, rf"input_nodes as a mask must have shape \[{N}\], got \[{N - 1}\]"),
        ({"input_nodes": "train"}, ValueError, "input_nodes of a homogeneous graph must be a mask, integer ids or None, got 'train'"),
        ({"input_nodes": ("paper", None)}, ValueError, r"input_nodes of a homogeneous graph must be a mask, integer ids or None, got \('paper', None\)"),
        ({"cache": {}}, TypeError, r"cache must be the cache of another loader \(loader.cache\), got dict"),
        ({"num_worker": 2}, TypeError, "has no argument 'num_worker'. Did you mean num_workers"),
        ({"is_sorted": True}, ValueError, "is_sorted=True, but edge_index is not sorted by target"),
    ],
)  # fmt: skip
def test_a_wrong_argument_raises_a_clear_error(data, options, error, text):
    with pytest.raises(error, match=text):
        make(data, **options)


@pytest.mark.parametrize("graph", [{"x": 1}, None, "cora", (1, 2)])
def test_only_pygs_data_and_partitioned_graphs_are_taken(graph):
    text = f"data must be a torch_geometric.data.Data, .* or the result of salientpp.load, got {type(graph).__name__}$"
    with pytest.raises(TypeError, match=text):
        make(graph)


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (Data(), "data must give the number of vertices of the graph; set num_nodes, or an attribute such as x"),
        (
            Data(edge_index=torch.tensor([[0, 9], [1, 1]]), num_nodes=3),
            r"edge_index\[0, 1\] must be in \[0, 3\), got 9; the graph has 3 vertices",
        ),
        (
            Data(edge_index=torch.tensor([[0, 1], [-1, 1]]), num_nodes=3),
            r"edge_index\[1, 0\] must be in \[0, 3\), got -1",
        ),
        (
            Data(edge_index=torch.zeros(2, 3), num_nodes=3),
            "edge_index must have dtype int64 or int32, got torch.float32",
        ),
        (
            Data(edge_index=torch.zeros(3, 2).long(), num_nodes=3),
            r"edge_index must be a tensor of shape \[2, E\], got \[3, 2\]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
def test_a_wrong_graph_raises_a_clear_error(graph, text):
    with pytest.raises(ValueError, match=text):
        make(graph)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": "z"}, r"columns must name node attributes of .*d \(.*x.*y\), got 'z'"),
        ({"columns": ["x", "train_mask"]}, "columns must name node attributes of .*, got 'train_mask'"),
        ({"input_nodes": "trian"}, "d has the splits 'test', 'train', 'val', 'all', got 'trian'"),
        ({"input_nodes": [0, N]}, rf"input_nodes must be in \[0, {N}\), got {N} at position 1"),
        ({"input_nodes": torch.ones(N + 1).bool()}, rf"input_nodes as a mask must have shape \[{N}\], got \[{N + 1}\]"),
    ],
)
def test_a_wrong_argument_for_a_partitioned_graph_raises_a_clear_error(part, options, text):
    with pytest.raises(ValueError, match=text):
        make(part, **options)


def test_the_cache_of_another_loader_is_used(data):
    loader = make(data)
    assert isinstance(loader.cache, FeatureCache)
    assert_same_batches(list(make(data, cache=loader.cache)), list(loader))


# --- calling the loader -----------------------------------------------------------------------------------


def test_calling_the_loader_gives_the_batch_of_the_given_seeds(data):
    loader = make(data, input_nodes=data.train_mask)
    seeds = data.train_mask.nonzero().flatten()
    for index in ([0, 3], torch.tensor([5]), [2, 2]):
        batch = loader(index)
        assert torch.equal(batch.n_id[: batch.batch_size], seeds[torch.as_tensor(index)])
        assert torch.equal(batch.x[:, 0].long(), batch.n_id) and torch.equal(
            batch.input_id, seeds[torch.as_tensor(index)]
        )
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])


def test_each_call_draws_independently_and_does_not_change_epochs(data):
    first, second = make(data, seed=1), make(data, seed=1)
    drawn = {tuple(first([0, 1, 2, 3, 4, 5, 6, 7]).e_id.tolist()) for _ in range(5)}
    assert len(drawn) > 1
    assert all(torch.equal(a.e_id, b.e_id) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 1.5}, "seed must be an integer or None, got 1.5"),
        ({"timeout": -1}, "timeout must be > 0 and finite, .*, got -1"),
        ({"timeout": float("nan")}, "timeout must be .*, got nan"),
        ({"timeout": float("inf")}, "timeout must be .*, got inf"),
        ({"timeout": "a minute"}, "timeout must be .*, got 'a minute'"),
        ({"timeout": timedelta(0)}, r"timeout must be .*, got datetime.timedelta\(0\)"),
        ({"policy": []}, r"policy must be one of .*, got \[\]"),
    ],
)
def test_more_wrong_arguments_raise_a_clear_error(data, options, text):
    with pytest.raises(ValueError, match=text):
        make(data, **options)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_repeated_edges_of_a_csr_adj_t_stay_apart():
    adj_t = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([3.0, 5.0]), (2, 2))
    batch = next(
        iter(NeighborLoader(Data(adj_t=adj_t, x=torch.zeros(2, 1)), [4], torch.tensor([0]), batch_size=1, replace=True))
    )
    assert batch.adj_t.values().tolist() == [3.0] * 4


# --- profile ----------------------------------------------------------------------------------------------


def test_a_profile_has_tracks_for_stages_and_workers_and_spans_for_batches(data, tmp_path):
    loader = make(data, num_workers=2)
    with loader.profile(tmp_path / "trace.json"):
        count = sum(1 for _ in loader)
    for _ in loader:  # outside the profile
        pass
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    wanted = {f"batch {index}" for index in range(count)}
    for stage in ("sample", "gather_host_rows", "assemble"):
        assert {name for track, name in spans if track == stage} == wanted
    assert {name for track, name in spans if track.startswith("worker: salientpp-sample")} == wanted


# --- comparison with a peer, if it is installed ------------------------------------------------------------


def _pyg_batches(data, **options):
    from torch_geometric.loader import NeighborLoader as PyGLoader

    return list(PyGLoader(data, num_neighbors=[-1, -1], batch_size=32, **options))


@pytest.mark.parametrize("form", ["edge_index", "adj_t"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_all_neighbours_our_batches_equal_pygs(data, form, backend):
    """Vertices, edges and attributes are equal, except for the order of discovery, because nothing is drawn at random."""
    if form == "adj_t":
        peer("torch_sparse")
        from torch_geometric.transforms import ToSparseTensor

        data = ToSparseTensor(remove_edge_index=True)(data.clone())
    with sampling_with(backend):
        theirs = _pyg_batches(data, input_nodes=data.train_mask)
    ours = list(NeighborLoader(data, [-1, -1], input_nodes=data.train_mask, batch_size=32))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        counts = (
            set() if backend == "pyg-lib" else {"num_sampled_nodes", "num_sampled_edges"}
        )  # with torch-sparse, PyG does not count by hop
        assert set(a.keys()) - counts == set(b.keys())
        assert a.batch_size == b.batch_size and torch.equal(a.input_id, b.input_id)
        assert torch.equal(a.n_id[: a.batch_size], b.n_id[: b.batch_size])
        assert a.n_id.sort().values.equal(b.n_id.sort().values)
        assert sum(a.num_sampled_nodes) == b.n_id.numel()
        for name in ("x", "y", "train_mask"):
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name][a.n_id.argsort()], b[name][b.n_id.argsort()])
        edges = [_global_edges(batch, form) for batch in (a, b)]
        assert torch.equal(*edges)


def _global_edges(batch, form):
    """Returns [2, e] original ends of the edges, sorted."""
    edge_index = torch.stack(batch.adj_t.t().coo()[:2]) if form == "adj_t" else batch.edge_index
    ends = batch.n_id[edge_index]
    return ends[:, (ends[0] * 10**6 + ends[1]).argsort()]
