"""Laws of a batch's contents: it holds the contents of the data at its delivery, cut to the sample as PyG's loaders cut them.

The peer is PyG's own ``NodeLoader`` and ``LinkLoader`` with our sampler. With all neighbours, both sample the same. So batches must be equal attribute by
attribute, in the same order, and both loaders must refuse the same data.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from graphs import RELATIONS, random_data, random_hetero
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler
from salientpp.loader.batch_loader import BatchLoader
from salientpp.store.directory import attributes as stored
from salientpp.store.fetch import Packed

N = 40
TYPE = ("a", "to", "b")


def graph(**attributes: Any) -> Data:
    """Returns 40 vertices and 120 unsorted edges, with no other attributes than the given ones."""
    data = Data(edge_index=random_data(N, 120, seed=1, directed=True).edge_index, num_nodes=N)
    for name, value in attributes.items():
        data[name] = value
    return data


def typed_graph(seed: int = 0) -> HeteroData:
    data, generator = HeteroData(), torch.Generator().manual_seed(seed)
    data["a"].num_nodes, data["b"].num_nodes = N, 30
    for source, relation, target in (TYPE, ("b", "of", "a"), ("a", "near", "a")):
        ends = [torch.randint(N if end == "a" else 30, (90,), generator=generator) for end in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)
    return data


# --- equality of batches ----------------------------------------------------------------------------------


def differs(ours: Any, theirs: Any) -> str:
    """Describes how two values differ, including dtype, layout and bits; '' if they are equal."""
    if type(ours) is not type(theirs):
        return f"{type(ours).__name__} is not {type(theirs).__name__}"
    if isinstance(ours, Tensor):
        kinds = [(t.dtype, t.layout, t.shape, t.device, t.requires_grad, t.is_quantized) for t in (ours, theirs)]
        if kinds[0] != kinds[1]:
            return f"{kinds[0]} is not {kinds[1]}"
        if ours.device.type == "meta":
            return ""
        return "" if torch.equal(*map(bits, (ours, theirs))) else "other values"
    if type(ours).__name__ == "SparseTensor":
        return "; ".join(filter(None, (differs(a, b) for a, b in zip(ours.coo(), theirs.coo()) if a is not None)))
    if isinstance(ours, np.ndarray):
        return "" if np.array_equal(ours, theirs) else "other values"
    if isinstance(ours, dict):
        return (
            "; ".join(filter(None, (differs(ours[k], theirs[k]) for k in ours)))
            if ours.keys() == theirs.keys()
            else "other keys"
        )
    if isinstance(ours, (list, tuple)):
        return "; ".join(filter(None, map(differs, ours, theirs))) if len(ours) == len(theirs) else "other length"
    return "" if ours == theirs else f"{ours!r} is not {theirs!r}"


def bits(value: Tensor) -> Tensor:
    value = value.detach()
    value = value.to_dense() if value.layout != torch.strided else value.as_subclass(Tensor)
    value = value.int_repr() if value.is_quantized else value.resolve_conj().resolve_neg()
    return value.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_alike(ours: Data | HeteroData, theirs: Data | HeteroData) -> None:
    """Compares presence, order and values of all attributes."""
    assert type(ours) is type(theirs)
    assert [store._key for store in ours.stores] == [store._key for store in theirs.stores]
    for mine, peer in zip(ours.stores, theirs.stores):
        assert list(mine.keys()) == list(peer.keys()), mine._key
        for name in mine.keys():
            assert not (what := differs(mine[name], peer[name])), (mine._key, name, what)


def result_of(make: Callable[[], Any]) -> tuple[list[Any] | None, Exception | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(make()), None
    except Exception as error:
        return None, error


def assert_as_in_pyg(data: Data | HeteroData, seeds: Any, link: bool = False, **options: Any) -> bool:
    """Compares batches with PyG's. Returns True if there were batches, False if both loaders refused."""
    peer, ours = (LinkLoader, LinkNeighborLoader) if link else (NodeLoader, NeighborLoader)
    own = {name: options.pop(name) for name in ("depth", "device_rows", "num_workers") if name in options}
    theirs, refusal = result_of(lambda: peer(data, NeighborSampler(data, [-1, -1]), seeds, batch_size=4, **options))
    batches, error = result_of(lambda: ours(data, [-1, -1], seeds, batch_size=4, **options, **own))
    if "meta tensor" in str(refusal):  # PyG cannot cut any other attribute beside one without values
        return batches is not None
    assert (batches is None) == (theirs is None), (error, refusal)
    if batches is None:
        assert "INTERNAL" not in str(error) and "aten::" not in str(error)[:60], error
        return False
    assert len(batches) == len(theirs)
    for mine, other in zip(batches, theirs):
        assert_alike(mine, other)
    return True


# --- names ------------------------------------------------------------------------------------------------

NAMES = sorted(stored.OWN_NAMES - {"edge_index", "adj_t", "num_nodes"})


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(
    "name", [*NAMES, "edge_label_index", "edge_label", "num_edges", "_orig_edge_index", "data", "x y", "time"]
)
def test_attributes_with_names_that_batches_use_are_handled_as_in_pyg(name, link):
    for size in (N, 120):
        data = graph(**{name: torch.arange(size) + 1000}) if name != "num_edges" else graph(num_edges=120)
        assert assert_as_in_pyg(data, torch.arange(20).view(2, 10) if link else torch.arange(10), link)
    data = typed_graph()
    data["a"][name], data[TYPE][name] = torch.arange(N) + 1000, torch.arange(90) + 1000
    if name != "num_edges":
        assert_as_in_pyg(data, (TYPE, torch.arange(20).view(2, 10)) if link else ("a", torch.arange(10)), link)


@pytest.mark.parametrize("size", [N, 120])
@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_directory_refuses_names_that_its_batches_use(tmp_path, name, size):
    data = graph(x=torch.rand(N, 2), **{name: torch.arange(size)})
    with pytest.raises(
        ValueError,
        match=rf"data\.{name} cannot be stored: batches .* data.my_{name} = data.{name}; del data.{name}",
    ):
        salientpp.partition(data, 1, tmp_path / "d", [2], 4)
    assert not (tmp_path / "d").exists()
    data[f"my_{name}"] = data[name]
    del data[name]
    part = salientpp.partition(data, 1, tmp_path / "d", [2], 4)
    for batch in NeighborLoader(part, [2], "all", batch_size=8, columns=["x", f"my_{name}"] if size == N else ["x"]):
        want = part.original_id(batch.n_id) if size == N else None
        assert want is None or torch.equal(batch[f"my_{name}"], want)
        assert batch.n_id.numel() == batch.x.size(0) and f"my_{name}" in batch


#: Two node types, and the names of the two relations between them.
SHARED_NAMES = [
    ("order", "customer", "customer", "rev"),
    ("order", "customer", "rev", "order"),
    ("a", "b", "a", "b"),
    ("a", "b", "b", "b"),
    ("to", "batch", "to", "batch"),
    ("x", "edge_index", "edge_index", "x"),
    ("num_nodes", "n_id", "x", "e_id"),
    ("u__v", "w", "a__b", "__"),
]


def types_with_names(first: str, second: str, there: str, back: str) -> HeteroData:
    data = HeteroData()
    data[first].x, data[second].x = torch.arange(8.0).view(4, 2), torch.arange(6.0).view(3, 2) + 100
    forth, back_store = data.get_edge_store(first, there, second), data.get_edge_store(second, back, first)
    forth.edge_index, forth.weight = torch.tensor([[0, 1, 3], [0, 1, 1]]), torch.tensor([1.0, 2.0, 3.0])
    back_store.edge_index, back_store.weight = torch.tensor([[1, 0], [0, 1]]), torch.tensor([4.0, 5.0])
    return data


@pytest.mark.filterwarnings("ignore:There exist type names")
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("names", SHARED_NAMES, ids="-".join)
def test_types_and_relations_of_a_partitioned_graph_can_share_names(tmp_path, names, link):
    data = types_with_names(*names)
    part = salientpp.partition(data, 1, tmp_path / "d", [-1], 2)
    make, of = (LinkNeighborLoader, (names[0], names[2], names[1])) if link else (NeighborLoader, names[0])
    whole = next(iter(make(data, [-1, -1], (of, None), batch_size=4)))
    batch = next(iter(make(part, [-1, -1], (of, None), batch_size=4)))
    assert batch.node_types == whole.node_types == data.node_types
    assert batch.edge_types == whole.edge_types == data.edge_types
    for mine, other in zip(batch.stores, whole.stores):
        assert set(mine.keys()) - {"num_nodes"} == set(other.keys())
    for type_ in data.node_types:
        assert torch.equal(batch[type_].x, data[type_].x[part.original_id(batch[type_].n_id, type_)])
    for type_ in data.edge_types:
        assert sorted(batch[type_].weight.tolist()) == sorted(whole[type_].weight.tolist())


def test_a_directory_with_attribute_names_that_batches_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "OWN_NAMES", frozenset())
    part = salientpp.partition(graph(x=torch.rand(N, 2), n_id=torch.arange(N)), 1, tmp_path / "d", [2], 4)
    with pytest.raises(ValueError, match="names that batches use themselves .n_id.; rename them and partition again"):
        NeighborLoader(part, [2], "all")


@pytest.mark.parametrize("name, rows", [("x", 38), ("x", 41), ("pos", 5), ("edge_attr", 119), ("edge_weight", 7)])
def test_a_directory_refuses_features_that_lack_rows(tmp_path, name, rows):
    of = "edge" if name.startswith("edge") else "vertex"
    with pytest.raises(
        ValueError, match=rf"data.{name} must be a tensor with one row per {of}, expected \d+ rows, got \[{rows}, 2\]"
    ):
        salientpp.partition(graph(**{name: torch.rand(rows, 2)}), 1, tmp_path / "d", [2], 4)


def test_features_that_lack_rows_are_delivered_whole_with_a_warning():
    data = graph(x=torch.rand(38, 2))
    with pytest.warns(
        UserWarning, match="data.x has 38 rows for 40 vertices, so every batch carries all of x, as in PyG"
    ):
        loader = NeighborLoader(data, [2])
    assert next(iter(loader)).x is data.x
    assert assert_as_in_pyg(data, torch.arange(10))


def test_fanouts_of_zero_draw_nothing_on_partitioned_graphs(tmp_path):
    data = graph(x=torch.rand(N, 2))
    part = salientpp.partition(data, 1, tmp_path / "d", [2], 4)
    for fanouts in ([0], [3, 0], [0, 3]):
        mine, parts = (next(iter(NeighborLoader(source, fanouts, None, batch_size=8))) for source in (data, part))
        theirs = next(iter(torch_geometric_loader(data, fanouts)))
        for batch in (mine, parts):
            assert [count == 0 for count in batch.num_sampled_edges] == [
                count == 0 for count in theirs.num_sampled_edges
            ]
            assert len(batch.num_sampled_nodes) == len(fanouts) + 1 and batch.num_sampled_nodes[0] == 8


def torch_geometric_loader(data: Data, fanouts: list[int]) -> Any:
    pytest.importorskip("pyg_lib")
    from torch_geometric.loader import NeighborLoader as Peer

    return Peer(data, fanouts, None, batch_size=8)


# --- edge_index and adj_t ---------------------------------------------------------------------------------


def matrix_of(edge_index: Tensor, size: tuple[int, int], value: Tensor | None, kind: str) -> Any:
    """Returns a matrix of targets by sources; entry [t, s] holds the value of the edge from s to t."""
    if kind == "SparseTensor":
        sparse = pytest.importorskip("torch_sparse")
        return sparse.SparseTensor(row=edge_index[1], col=edge_index[0], value=value, sparse_sizes=size)
    value = torch.ones(edge_index.size(1)) if value is None else value
    return torch.sparse_coo_tensor(edge_index.flip(0), value, size).coalesce().to_sparse_csr()


def entries_of(adj_t: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns target, source and value of every entry."""
    if not isinstance(adj_t, Tensor):
        return adj_t.coo()
    target = torch.repeat_interleave(torch.arange(adj_t.size(0)), adj_t.crow_indices().diff())
    return target, adj_t.col_indices(), adj_t.values()


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("kind", ["SparseTensor", "csr"])
def test_adj_t_beside_edge_index_keeps_its_values(kind, with_values, typed, link):
    data = typed_graph() if typed else graph()
    for store in data.edge_stores:
        edges = store.edge_index.unique(dim=1)
        store.edge_index = edges[:, torch.randperm(edges.size(1), generator=torch.Generator().manual_seed(3))]
        store.edge_attr = store.edge_index[0] * 100 + store.edge_index[1]  # identifies the ends of each edge
        store.adj_t = matrix_of(
            store.edge_index, tuple(store.size())[::-1], store.edge_attr.float() if with_values else None, kind
        )
    ends = torch.randint(30, (2, 12), generator=torch.Generator().manual_seed(0))
    if link:
        loader = LinkNeighborLoader(data, [3, 2], (TYPE, ends) if typed else ends, batch_size=4)
    else:
        loader = NeighborLoader(data, [3, 2], ("a", None) if typed else None, batch_size=4)
    seen = 0
    for batch in loader:
        for store in batch.edge_stores:
            source_ids, target_ids = (
                (batch.n_id,) * 2 if not typed else (batch[store._key[0]].n_id, batch[store._key[2]].n_id)
            )
            assert torch.equal(store.edge_attr, source_ids[store.edge_index[0]] * 100 + target_ids[store.edge_index[1]])
            target, source, value = entries_of(store.adj_t)
            seen += target.numel()
            assert target.numel() == store.edge_index.size(1)
            if with_values:
                assert torch.equal(value.long(), source_ids[source] * 100 + target_ids[target])
    assert seen > 50


def test_repeated_edges_keep_the_order_of_their_values():
    pytest.importorskip("torch_sparse")
    data = graph(edge_attr=torch.arange(120))
    order = torch.sort(data.edge_index[1] * N + data.edge_index[0], stable=True).indices
    in_order = data.edge_index[:, order]
    data.adj_t = matrix_of(in_order, (N, N), data.edge_attr[order], "SparseTensor")
    for batch in NeighborLoader(data, [-1], batch_size=4):
        assert sorted(entries_of(batch.adj_t)[2].tolist()) == sorted(batch.edge_attr.tolist())


@pytest.mark.parametrize("kind", ["SparseTensor", "csr"])
def test_adj_t_with_other_edges_than_edge_index_is_refused(tmp_path, kind):
    data = graph()
    data.edge_index = data.edge_index.unique(dim=1)
    data.adj_t = matrix_of(data.edge_index.flip(0), (N, N), None, kind)
    words = "edge_index and adj_t of the edges must hold the same edges, .* delete the one that is not meant"
    for make in (
        lambda: NeighborLoader(data, [2]),
        lambda: LinkNeighborLoader(data, [2]),
        lambda: salientpp.partition(data, 1, tmp_path / "d"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    typed = typed_graph()
    typed[TYPE].adj_t = matrix_of(typed[TYPE].edge_index[:, 1:], (30, N), None, kind)
    with pytest.raises(ValueError, match=r"edge_index and adj_t of \('a', 'to', 'b'\) must hold the same edges"):
        NeighborLoader(typed, [2], "a")


@pytest.mark.parametrize("kind", ["SparseTensor", "csr"])
def test_a_directory_refuses_adj_t_with_values_beside_edge_index(tmp_path, kind):
    data = graph()
    data.edge_index = data.edge_index.unique(dim=1)
    data.adj_t = matrix_of(data.edge_index, (N, N), torch.rand(data.num_edges) + 2, kind)
    with pytest.raises(ValueError, match="data.adj_t has values other than 1, but only its topology is stored"):
        salientpp.partition(data, 1, tmp_path / "d")


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("attr", [None, "edge_weight"])
@pytest.mark.parametrize("keep", [False, True])
def test_graphs_after_to_sparse_tensor_are_cut_as_in_pyg(typed, attr, keep, link):
    pytest.importorskip("torch_sparse")
    data = typed_graph() if typed else graph()
    for store in data.edge_stores:
        store.edge_weight, store.edge_attr = torch.rand(store.num_edges), torch.rand(store.num_edges, 2)
    data = T.ToSparseTensor(attr=attr, remove_edge_index=not keep)(data)
    ends = torch.arange(20).view(2, 10)
    seeds = ((TYPE, ends) if typed else ends) if link else (("a", torch.arange(10)) if typed else torch.arange(10))
    assert assert_as_in_pyg(data, seeds, link)


def test_adj_t_in_coo_layout_is_refused():
    data = graph()
    data.adj_t = torch.sparse_coo_tensor(data.edge_index.flip(0), torch.ones(120), (N, N))
    for broken in (data, data.clone()):
        with pytest.raises(ValueError, match="must be a SparseTensor or a CSR tensor, got layout torch.sparse_coo"):
            NeighborLoader(broken, [2])
        del data.edge_index


# --- data that changes ------------------------------------------------------------------------------------

LOADERS = {
    "default": {},
    "depth 1": {"depth": 1},
    "workers": {"num_workers": 2},
    "rows on the device": {"device_rows": 0.5},
    "workers, device rows": {"device_rows": 1.0, "num_workers": 1},
    "zero copy": {"device_rows": {"zero_copy": True}},
    **(
        {"cuda": {"device": "cuda"}, "cuda, rows there": {"device": "cuda", "device_rows": 0.5, "num_workers": 1}}
        if torch.cuda.is_available()
        else {}
    ),
}
LOADER = pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)


def known(typed: bool) -> Data | HeteroData:
    data = random_hetero(200, paper=90, author=70) if typed else random_data(300, 900, edge_attributes=True)
    if not typed:
        data.edge_time = torch.arange(data.num_edges)
    return data


def packed(loader: BatchLoader) -> BatchLoader:
    """Makes a loader assemble batches as for a device, where a batch waits for one step before delivery."""
    loader.engine.producer.fetch.own = Packed(loader.device)
    return loader


def assert_is_current(batch: Data | HeteroData, data: Data | HeteroData) -> None:
    """Checks that every attribute equals the data's current contents."""
    batch = batch.clone().to("cpu")
    for store in batch.stores:
        whole = (
            data._store
            if store._key is None and isinstance(data, Data)
            else None
            if store._key is None
            else data[store._key]
        )
        for name, value in () if whole is None else whole.items():
            if name in ("edge_index", "num_nodes"):
                continue
            ids = store.n_id if whole.is_node_attr(name) else store.e_id if whole.is_edge_attr(name) else None
            assert not differs(store[name].detach(), (value if ids is None else value[ids]).detach()), (
                store._key,
                name,
            )
        assert not [
            name
            for name in store.keys()
            if whole is not None and name in ("x", "y", "extra", "edge_attr") and name not in whole
        ]


def in_place(data: Data, step: int) -> None:
    store = data.node_stores[0]
    store.x[step % store.num_nodes] = -step
    store.x += 1


def other_attributes_in_place(data: Data, step: int) -> None:
    store = data.edge_stores[0]
    store.edge_attr += 1
    (data if isinstance(data, Data) else data["author"]).x.mul_(2)
    if "y" in data.node_stores[0]:
        data.y[step] = 1000 + step
        data.train_mask.logical_not_()


def replaced(data: Data, step: int) -> None:
    if step % 3 == 1:
        data.node_stores[0].x = torch.rand(data.node_stores[0].num_nodes, 3)
    if step == 5:
        data.node_stores[0].x = torch.rand(data.node_stores[0].num_nodes, 7, dtype=torch.float64)


def added_and_removed(data: Data, step: int) -> None:
    store = data.node_stores[0]
    if step == 2:
        store.extra = torch.arange(store.num_nodes)
    if step == 4:
        store.num_nodes = store.num_nodes
        del store["x"]
    if step == 6:
        store.x = torch.rand(store.num_nodes, 2)
        del store["extra"]


def memory_swapped(data: Data, step: int) -> None:
    store = data.node_stores[0]
    store.x.data = torch.rand_like(store.x)


CHANGES = [in_place, other_attributes_in_place, replaced, added_and_removed, memory_swapped]


@pytest.mark.parametrize(
    "options, typed, change",
    [  # a third of the cases
        pytest.param(
            options,
            typed,
            change,
            id=f"{change.__name__}-{typed}-{name}",
            marks=[pytest.mark.rare] * ((i + j + typed) % 3),
        )
        for i, (name, options) in enumerate(LOADERS.items())
        for j, change in enumerate(CHANGES)
        for typed in (False, True)
    ],
)
def test_a_batch_holds_the_contents_of_the_data_at_its_delivery(options, typed, change):
    for prepare in (lambda loader: loader, packed):
        data = known(typed)
        loader = prepare(NeighborLoader(data, [4, 3], "paper" if typed else torch.arange(100), batch_size=8, **options))
        step = 0
        for _ in range(2):
            for batch in loader:
                assert_is_current(batch, data)
                change(data, step)
                step += 1
        assert step > 20


class Interrupted:
    """Changes the object while the next batch of it is built, between two attributes, as another thread could do."""

    happens: ClassVar[list[Callable[[], None]]] = []

    def __cat_dim__(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if key == "middle" and self.happens:
            self.happens.pop()()
        return super().__cat_dim__(key, *args, **kwargs)


class InterruptedData(Interrupted, Data):
    pass


class InterruptedHeteroData(Interrupted, HeteroData):
    pass


def deleted(data: Data | HeteroData) -> None:
    del data.node_stores[0].last


def no_more_of_the_vertices(data: Data | HeteroData) -> None:
    data.node_stores[0].middle = torch.arange(5)


def extended(data: Data | HeteroData) -> None:
    data.node_stores[0].more = torch.arange(data.node_stores[0].num_nodes)
    data.edge_stores[0].more_of_edges = torch.arange(data.edge_stores[0].num_edges)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 1, "device_rows": 0.5}], ids=["one call", "threads", "stages"]
)
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("change", [deleted, no_more_of_the_vertices, extended])
def test_the_data_can_change_while_a_thread_builds_a_batch(options, typed, change):
    data = (InterruptedHeteroData if typed else InterruptedData).from_dict(known(typed).to_dict())
    store = data.node_stores[0]
    store.middle, store.last = torch.rand(store.num_nodes, 2).unbind(
        1
    )  # not contiguous, so it is cut when a batch is built, and not gathered before
    batches = iter(NeighborLoader(data, [4, 3], "paper" if typed else None, batch_size=2, **options))
    assert_is_current(next(batches), data)
    store.middle = torch.rand(store.num_nodes, 2)[:, 0]  # PyG must find out again whether it belongs to vertices
    Interrupted.happens.append(functools.partial(change, data))
    later = itertools.dropwhile(lambda _: Interrupted.happens, batches)
    next(later)  # may have been delivered during the change
    count = 0
    for batch in later:
        assert_is_current(batch, data)
        count += 1
    assert count > 5


@LOADER
def test_batches_of_links_and_single_batches_hold_the_current_contents(options):
    data = known(False)
    loader = LinkNeighborLoader(data, [4, 3], batch_size=100, **options)
    for step, batch in enumerate(loader):
        assert_is_current(batch, data)
        in_place(data, step)
        other_attributes_in_place(data, step)
    assert_is_current(loader(torch.arange(5)), data)
    in_place(data, 0)
    assert_is_current(loader([3, 4]), data)


@LOADER
def test_learnable_features_get_the_same_gradients_as_with_pygs_loader(options):
    """Compares rows, and the table after optimizer steps, with one process without a pipeline. So gradients must reach the right rows."""
    tables = []
    for make in (
        lambda d: NodeLoader(d, NeighborSampler(d, [-1, -1]), batch_size=16),
        lambda d: NeighborLoader(d, [-1, -1], batch_size=16, **options),
    ):
        torch.manual_seed(0)
        data = known(False)
        data.x = torch.nn.Parameter(torch.rand(300, 3))
        data.z = torch.rand(300, 2, requires_grad=True)
        optimizer = torch.optim.Adam([data.x, data.z], lr=0.1)
        for batch in make(data):
            loss = (batch.x.square() * batch.y.view(-1, 1)).sum() + batch.z.sin().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tables.append((data.x.detach(), data.z.detach()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*tables))


def test_a_run_with_learnable_features_can_be_resumed():
    data = known(False)
    data.x.requires_grad_()
    loader = NeighborLoader(data, [2], batch_size=16, seed=0)
    next(iter(loader))
    state = loader.state_dict()
    with torch.no_grad():
        data.x += 1
    again = NeighborLoader(data, [2], batch_size=16, seed=0)
    again.load_state_dict(state)
    assert next(iter(again)).input_id[0] == 16
    data.x = torch.rand(300, 2, requires_grad=True)
    with pytest.raises(ValueError, match="cannot load this state"):
        NeighborLoader(data, [2], batch_size=16, seed=0).load_state_dict(state)


def test_features_that_become_learnable_are_learnable_in_the_next_batch():
    data = known(False)
    for step, batch in enumerate(NeighborLoader(data, [2], batch_size=16)):
        assert batch.x.requires_grad == (step > 3)
        if step == 3:
            data.x.requires_grad_()


def test_features_replaced_between_epochs_are_gathered_in_the_pipeline_again():
    data = known(False)
    loader = NeighborLoader(data, [2], batch_size=16, device_rows=0.3)
    list(loader)
    data.x, data.extra = torch.rand(300, 5).bfloat16(), torch.arange(300)
    built = loader.engine.producer.builder.build_anew
    loader.engine.producer.builder.build_anew = lambda *_: pytest.fail("a batch was built twice")
    for batch in loader:
        assert_is_current(batch, data)
    assert (None, "extra") in loader.engine.producer.fetch.columns
    loader.engine.producer.builder.build_anew = built
    data.x += 1  # the device copies are made again too
    for batch in loader:
        assert_is_current(batch, data)


def test_several_iterators_of_one_loader_deliver_the_current_contents():
    data = known(False)
    loader = NeighborLoader(data, [3, 2], batch_size=16, device_rows=0.5)
    first, step = iter(loader), 0
    for _ in range(3):
        assert_is_current(next(first), data)
    data.x, data.extra = torch.rand(300, 5), torch.arange(300)
    for one, other in zip(first, iter(loader)):
        assert_is_current(one, data)
        assert_is_current(other, data)
        in_place(data, step := step + 1)


def test_a_transform_sees_every_batch_once_and_dtype_holds_for_changed_features():
    data, seen = known(False), []
    loader = NeighborLoader(
        data, [3], batch_size=16, dtype=torch.bfloat16, transform=lambda batch: seen.append(batch.x.clone()) or batch
    )
    for step, batch in enumerate(loader):
        assert batch.x.dtype == torch.bfloat16
        assert torch.equal(batch.x, data.x[batch.n_id].bfloat16()) and torch.equal(seen[-1], batch.x)
        in_place(data, step)
    assert len(seen) == step + 1


def test_inference_loops_that_delete_features_of_the_loaders_data_work():
    """Features are deleted and ids added after the loader was constructed."""
    data = random_data(300, 900)
    loader = NeighborLoader(data, [-1], batch_size=50)
    del loader.data.x, loader.data.y
    loader.data.num_nodes, loader.data.n_id = 300, torch.arange(300)
    for batch in loader:
        assert "x" not in batch and "y" not in batch and batch.num_nodes == batch.n_id.numel()
        assert batch.input_id.equal(batch.n_id[: batch.batch_size])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("options", [{}, {"device_rows": 0.5}])
def test_moving_the_data_to_shared_memory_is_not_a_change(typed, options):
    """torch moves tensors that are sent to another process to shared memory."""
    data, expected = (random_hetero() if typed else random_data() for _ in range(2))
    make = functools.partial(
        NeighborLoader, num_neighbors=[3, 2], input_nodes="paper" if typed else None, batch_size=30, seed=4, **options
    )
    loader = make(data)
    next(iter(loader))
    data.share_memory_()
    assert all(value.is_shared() for store in data.edge_stores for value in store.values())
    loader.set_epoch(0)
    for batch, other in zip(loader, make(expected), strict=True):
        assert batch.stores and all(
            torch.equal(value, getattr(others, name)) if isinstance(value, Tensor) else value == getattr(others, name)
            for store, others in zip(batch.stores, other.stores, strict=True)
            for name, value in store.items()
        )


def test_changed_edges_are_ignored_with_a_single_warning():
    data = known(False)
    loader = NeighborLoader(data, [-1], batch_size=100, seed=0)
    before = [batch.edge_index for batch in loader]
    data.edge_index = data.edge_index.clone()  # equal edges
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
    data.edge_index = data.edge_index.flip(0)
    with pytest.warns(
        UserWarning, match="the edges of data have changed since this loader was made; .* Construct a new loader"
    ):
        after = [batch.edge_index for batch in loader]
    assert all(map(torch.equal, before, after))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
    typed = known(True)
    loader = NeighborLoader(typed, [2], "paper", batch_size=32)
    typed[RELATIONS[0]].edge_index[0, 0] = 1
    with pytest.warns(UserWarning, match=r"the edges of data\[\('paper', 'by', 'author'\)\] have changed"):
        next(iter(loader))


# --- positions --------------------------------------------------------------------------------------------


def test_a_single_batch_is_made_from_positions_or_a_mask():
    seeds = torch.tensor([7, 3, 9, 1])
    for loader in (NeighborLoader(graph(), [2], seeds), LinkNeighborLoader(graph(), [2], torch.stack([seeds, seeds]))):
        for index, want in [
            (torch.tensor([True, False, True, False]), [0, 2]),
            ([False, False, False, True], [3]),
            (np.array([False, True, True, False]), [1, 2]),
            (torch.zeros(4, dtype=torch.bool), []),
            ([2, 2], [2, 2]),
            (torch.tensor([1], dtype=torch.uint8), [1]),
            (np.array([3, 0]), [3, 0]),
            (3, [3]),
            ([], []),
            (range(2), [0, 1]),
        ]:
            batch = loader(index)
            assert batch.input_id.tolist() == want
            assert {int(seeds[at]) for at in want} <= set(batch.n_id.tolist())


@pytest.mark.parametrize(
    "index, words",
    [
        (torch.tensor([True, False]), "index as a mask must have an entry per seed, expected 4, got 2"),
        ([0, 4], r"index must hold positions of seeds in \[0, 4\), got 4 at place 1"),
        (torch.tensor([-1]), r"index must hold positions of seeds in \[0, 4\), got -1 at place 0"),
        ([1.0], "index must hold integer positions of seeds, or a mask of them, got torch.float32"),
        (torch.tensor([1j]), "index must hold integer positions of seeds, or a mask of them, got torch.complex64"),
        ("ab", "index must hold positions of seeds, or a mask of them, got str"),
        (None, "index must hold positions of seeds, or a mask of them, got NoneType"),
    ],
)
def test_invalid_positions_are_refused(index, words):
    seeds = torch.tensor([7, 3, 9, 1])
    for loader in (NeighborLoader(graph(), [2], seeds), LinkNeighborLoader(graph(), [2], torch.stack([seeds, seeds]))):
        with pytest.raises(ValueError, match=words):
            loader(index)


def test_a_samplers_positions_are_checked_too(monkeypatch):
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(
        ValueError, match=r"a batch of the sampler must hold positions of seeds in \[0, 4\), got 9 at place 1"
    ):
        list(NeighborLoader(graph(), [2], torch.arange(4), batch_sampler=[[0, 9]]))
    gc.collect()
    assert not unraisable, "an epoch that no caller received ends silently"


# --- every kind of attribute that a Data can hold ---------------------------------------------------------


class Coloured(Tensor):
    """A tensor subclass."""


WHOLE = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
REAL = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def rows_of_dtype(dtype: torch.dtype) -> Callable[[int, torch.Generator], Tensor]:
    return lambda size, g: (
        torch.randint(100, (size, 3), generator=g).to(torch.float32 if dtype in REAL else torch.int64).to(dtype)
    )


def sparse_matrix(size: int, g: torch.Generator) -> Any:
    return pytest.importorskip("torch_sparse").SparseTensor.from_dense(sparse_rows(size, g))


def sparse_rows(size: int, g: torch.Generator) -> Tensor:
    return torch.rand(size, 5, generator=g).sub(0.5).relu()


#: Kinds of attributes with one entry per vertex or edge.
KINDS: dict[str, Callable[[int, torch.Generator], Any]] = {
    **{str(dtype).removeprefix("torch."): rows_of_dtype(dtype) for dtype in WHOLE + REAL},
    "flat": lambda size, g: torch.rand(size, generator=g),
    "zero-width": lambda size, g: torch.rand(size, 0),
    "cube": lambda size, g: torch.rand(size, 2, 3, generator=g),
    "square": lambda size, g: torch.rand(size, size, generator=g),
    "transposed": lambda size, g: torch.rand(4, size, generator=g).t(),
    "every other": lambda size, g: torch.rand(size, 8, generator=g)[:, ::2],
    "expanded": lambda size, g: torch.rand(1, 4, generator=g).expand(size, 4),
    "expanded flat": lambda size, g: torch.rand(1, generator=g).expand(size),
    "conjugate": lambda size, g: torch.randn(size, 2, dtype=torch.complex64, generator=g).conj(),
    "negated": lambda size, g: torch.randn(size, 2, dtype=torch.complex64, generator=g).conj().imag,
    "learnable": lambda size, g: torch.rand(size, 3, generator=g).requires_grad_(),
    "parameter": lambda size, g: torch.nn.Parameter(torch.rand(size, 3, generator=g)),
    "subclass": lambda size, g: torch.rand(size, 3, generator=g).as_subclass(Coloured),
    "meta": lambda size, g: torch.empty(size, 3, device="meta"),
    "quantized": lambda size, g: torch.quantize_per_tensor(torch.rand(size, 3, generator=g), 0.1, 0, torch.quint8),
    "coo": lambda size, g: sparse_rows(size, g).to_sparse(),
    "coo, one dimension": lambda size, g: sparse_rows(size, g)[:, 0].to_sparse(),
    "hybrid": lambda size, g: torch.rand(size, 3, 2, generator=g).to_sparse(1),
    "csr": lambda size, g: sparse_rows(size, g).to_sparse_csr(),
    "csc": lambda size, g: sparse_rows(size, g).to_sparse_csc(),
    "SparseTensor": sparse_matrix,
    "numpy": lambda size, g: torch.rand(size, 2, generator=g).numpy(),
    "numpy, whole": lambda size, g: np.arange(size),
    "numpy, words": lambda size, g: np.array([str(i) for i in range(size)]),
    "list": lambda size, g: list(range(size)),
    "words": lambda size, g: [f"vertex {i}" for i in range(size)],
    "tuple": lambda size, g: tuple(range(size)),
    "list of tensors": lambda size, g: [torch.rand(2, generator=g) for _ in range(size)],
    "too short": lambda size, g: torch.rand(size - 1, 2, generator=g),
    "scalar": lambda size, g: torch.tensor(3.0),
    "one": lambda size, g: torch.rand(1, 4, generator=g),
    "none": lambda size, g: None,
    "number": lambda size, g: 5,
    "word": lambda size, g: "word",
    "empty": lambda size, g: torch.empty(0),
    "dict": lambda size, g: {"a": torch.rand(size, generator=g)},
}
ODD = ["numpy, words", "list", "words", "tuple", "list of tensors", "csr", "csc"]
ODD_NAMES = [
    "x", "y", "pos", "z", "edge_attr", "edge_weight", "edge_type", "node_type", "time", "train_mask", "norm", "face", "index", "my_index", "batch",
    "n_id", "e_id", "ptr", "input_id", "batch_size", "num_sampled_nodes", "num_sampled_edges", "seed_time", "edge_label", "edge_label_index",
    "edge_label_time", "a name", "ünïcode", "stores", "_private", "keep_edge", "node_emb", "src_index", "num_things",
]  # fmt: skip


@pytest.mark.parametrize("place", ["x", "note", "edge_attr", "typed"])
@pytest.mark.parametrize("kind", KINDS)
def test_attributes_of_any_kind_are_cut_or_refused_as_in_pyg(kind, place):
    g = torch.Generator().manual_seed(0)
    if place == "typed":
        data = typed_graph()
        data["a"].x, data[TYPE].edge_attr = KINDS[kind](N, g), KINDS[kind](90, g)
        has_batches = assert_as_in_pyg(data, ("a", torch.arange(10)))
    else:
        has_batches = assert_as_in_pyg(
            graph(**{place: KINDS[kind](120 if place == "edge_attr" else N, g)}), torch.arange(10)
        )
    assert has_batches != (kind in ODD)


@pytest.mark.parametrize("options", [{}, {"device_rows": 0.5}, {"depth": 1}])
def test_types_can_have_attributes_that_the_first_type_lacks(options):
    data = typed_graph()
    data["b"].y, data["b"].z = torch.arange(30), torch.rand(30, 2)
    data["a"].x = torch.rand(N, 3)
    assert assert_as_in_pyg(data, ("a", torch.arange(10)), **options)


@pytest.mark.parametrize("kind", ODD)
def test_an_error_names_an_attribute_that_cannot_be_cut(kind):
    data = graph(note=KINDS[kind](N, torch.Generator()))
    with pytest.raises(
        RuntimeError,
        match=r"data\.note has one entry per vertex or edge, .* of length 40 .*; make it a dense or COO tensor, or delete it",
    ):
        list(NeighborLoader(data, [2]))


def odd_object(number: int) -> tuple[Data | HeteroData, Any, bool, dict[str, Any]]:
    """Returns an object for this number, seeds, whether they are edges, and arguments of a loader."""
    draw, g = random.Random(number), torch.Generator().manual_seed(number)
    typed, link = draw.random() < 0.4, draw.random() < 0.3
    # Only a few kinds are refused, so that most objects give batches.
    kinds = [kind for kind in KINDS if kind not in ODD]
    data = typed_graph(number) if typed else graph()
    if not typed and draw.random() < 0.2:
        del data.num_nodes
        data.x = torch.rand(N, 3, generator=g)
    for _ in range(draw.randint(1, 6)):
        kind = draw.choice(ODD) if draw.random() < 0.03 else draw.choice(kinds)
        name = draw.choice(ODD_NAMES)
        store = draw.choice(data.stores)
        of_edges = draw.random() < 0.5 if store._key is None else isinstance(store._key, tuple)
        if name == "x" and "num_nodes" not in store and not typed:
            continue
        size = (90 if typed else 120) if of_edges else 30 if store._key == "b" else N
        store[name] = KINDS[kind](size, g)
    form = draw.random()
    if form < 0.15:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            edges = draw.choice(data.edge_stores)
            rows, columns = edges.size()
            edges.adj_t = matrix_of(
                edges.edge_index, (columns, rows), torch.arange(edges.edge_index.size(1)), "SparseTensor"
            )
        del edges["edge_index"]
    seeds = torch.randint(30, (2, 9) if link else (9,), generator=g)
    if typed:
        seeds = (TYPE if link else draw.choice(["a", "b"]), seeds)
    options = {
        "depth": draw.choice([1, 3, 10]),
        "num_workers": draw.choice([0, 0, 1, 2]),
        "device_rows": draw.choice([0.0, 0.0, 0.5, 1.0]),
    }
    return data, seeds, link, options


@pytest.mark.parametrize("first", range(0, 30, 15))
def test_odd_objects_are_cut_as_in_pyg(first):
    """Draws names, kinds, layouts, edges and arguments at random. The error gives the number of an object that fails."""
    pytest.importorskip("torch_sparse")
    given = 0
    for number in range(first, first + 15):
        data, seeds, link, options = odd_object(number)
        try:
            given += assert_as_in_pyg(data, seeds, link, **options)
        except AssertionError as error:
            raise AssertionError(f"object {number}") from error
    assert given > 8
