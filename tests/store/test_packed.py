"""Laws of batches that are assembled on a device: they equal the batches of the CPU.

Without a GPU, the packed path runs on the CPU: streams do nothing, "pinned" memory is ordinary memory, and the device's rows are an ordinary
tensor. Tests on a device are in tests/device.
"""

from __future__ import annotations

import weakref

import distributed
import pytest
import torch
from batches import assert_same_batches, known_data, make, packed
from graphs import RELATIONS, random_data, random_hetero
from rare import rare
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.arguments import as_amount

N = 250


@pytest.fixture(scope="module")
def data() -> Data:
    return known_data()


@pytest.fixture(scope="module")
def part(data, tmp_path_factory) -> salientpp.PartitionedGraph:
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("packed") / "d", [4, 3], 16)


# --- laws 1 to 3 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_rows", [0, 0.3, 1.0])
@pytest.mark.parametrize("source", ["data", "part"])
def test_packed_batches_equal_cpu_batches(data, part, source, device_rows):
    graph, nodes = (data, data.train_mask) if source == "data" else (part, "train")
    want = list(make(graph, input_nodes=nodes))
    for depth, num_workers, zero_copy in [(1, 0, False), (1, 2, True), (4, 2, False), (10, 0, True), (10, 2, False)]:
        options = {
            "device_rows": {"part": device_rows, "zero_copy": zero_copy},
            "depth": depth,
            "num_workers": num_workers,
        }
        assert_same_batches(list(packed(make(graph, input_nodes=nodes, **options))), want)


@pytest.mark.parametrize("device_rows", [0, 0.4])
def test_packed_batches_of_several_types_equal_cpu_batches(device_rows):
    graph = random_hetero(paper=60, author=40, venue=5)
    options = {
        "num_neighbors": dict.fromkeys(RELATIONS, [3, 2]),
        "input_nodes": "paper",
        "batch_size": 8,
        "seed": 1,
        "device_rows": device_rows,
    }
    for one, other in zip(NeighborLoader(graph, **options), packed(NeighborLoader(graph, **options)), strict=True):
        assert one.to_dict().keys() == other.to_dict().keys()
        for store, same in zip(one.stores, other.stores, strict=True):
            assert list(store.keys()) == list(same.keys()), "attributes have the same order"
            for name, value in store.items():
                assert torch.equal(value, same[name]) if isinstance(value, torch.Tensor) else value == same[name], name


def test_packed_batches_of_links_equal_cpu_batches(data):
    options = {"num_neighbors": [3, 2], "batch_size": 64, "neg_sampling": "binary", "seed": 2}
    loaders = (
        LinkNeighborLoader(data, device_rows=0.2, **options),
        packed(LinkNeighborLoader(data, device_rows=0.2, **options)),
    )
    assert_same_batches(*map(list, loaders))


def _compare_on_ranks(rank: int, root: str, grid: list[dict]) -> int:
    part = salientpp.load(root)
    common = {"batch_size": 16, "shuffle": True, "seed": 3}
    plain = NeighborLoader(part, [4, 3], "train", replication_factor=0.3, **common)
    want, compared = list(plain), 0
    sent = plain.stats().bytes_sent
    for options in grid:
        serves = options.pop("serves")
        loader = packed(NeighborLoader(part, [4, 3], "train", replication_factor=0.3, **common, **options), serves)
        batches = list(loader)
        assert_same_batches(batches, want)
        assert torch.equal(batches[0].x[:, 0].long(), part.original_id(batches[0].n_id))
        assert loader.stats().bytes_sent == sent, "the method of assembly changes nothing on the wire"
        compared += len(batches)
    return compared


@pytest.mark.parametrize("world_size", [2, *rare(4)])
def test_packed_batches_of_several_ranks_equal_cpu_batches(tmp_path, world_size):
    salientpp.partition(random_data(), world_size, tmp_path / "d", [4, 3], 16)
    row_bytes = 3 * 4
    grid = [
        {"depth": depth, "device_rows": {"part": own, "cache": cached, "zero_copy": in_place}, "serves": serves}
        for depth, own, cached, in_place, serves in [
            (1, 0, 0, False, False),
            (10, 0.3, 0, False, True),
            (10, 0.3, 7 * row_bytes, False, False),
            (4, 0.5, 10**6, True, True),
            (10, 1.0, 7 * row_bytes, True, False),
        ]
    ]
    assert all(count > len(grid) for count in distributed.run(_compare_on_ranks, world_size, str(tmp_path / "d"), grid))


def test_packed_batches_carry_a_csr_adjacency():
    data = Data(x=torch.randn(30, 2), adj_t=torch.eye(30).roll(1, 0).to_sparse_csr())
    for one, other in zip(make(data, batch_size=7), packed(make(data, batch_size=7)), strict=True):
        assert torch.equal(one.adj_t.to_dense(), other.adj_t.to_dense()) and one.adj_t.values().numel() > 0
        assert torch.equal(one.x, other.x)


# --- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "stored, delivered", [(torch.float16, torch.float32), (torch.int8, torch.bfloat16), (torch.float32, torch.float16)]
)
def test_x_is_delivered_in_the_dtype_that_was_asked_for(stored, delivered, on_device):
    data = random_data(100, 600)
    data.x, data.other = data.x.to(stored), data.x.to(torch.float64)
    want = list(make(data))
    loader = make(data, dtype=delivered, device_rows=0.5)
    got = list(packed(loader) if on_device else loader)
    for one, other in zip(want, got, strict=True):
        assert other.x.dtype == delivered and torch.equal(one.x.to(delivered), other.x)
        assert other.other.dtype == torch.float64, "only x is converted"
    assert loader.memory_used()["host"] == make(data).memory_used()["host"], "rows are kept in the stored dtype"


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"device_rows": {"cache": -1}},
            r"device_rows\['cache'\] must be a fraction in \[0, 1\] of the cached rows, or bytes, .*, got -1",
        ),
        (
            {"device_rows": {"cache": 1e9}},
            r"device_rows\['cache'\] must be a fraction in \[0, 1\] of the cached rows, or bytes, .*, got 1000000000.0",
        ),
        ({"device_rows": {"zero_copy": "yes"}}, r"device_rows\['zero_copy'\] must be True or False, got 'yes'"),
        ({"dtype": "half"}, r"dtype must be a torch.dtype .*, got 'half'"),
    ],
)
def test_invalid_arguments_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        make(data, **options)


def _share_a_cache(rank: int, root: str) -> None:
    part = salientpp.load(root)
    make_loader = lambda **options: NeighborLoader(part, [4, 3], "train", batch_size=16, seed=3, **options)  # noqa: E731
    owner = make_loader(replication_factor=0.5, device_rows={"cache": 120})
    assert owner.memory_used()["device"] == 120 and len(owner.cache.device_members) == 10
    other = packed(make_loader(cache=owner.cache))
    assert other.cache.device_rows is owner.cache.device_rows
    assert_same_batches(list(other), list(owner))
    both = packed(make_loader(cache=owner.cache, replication_factor=0.4, device_rows={"cache": 60}))
    assert len(both.cache.device_members) == 5 and len(both.cache) > 0
    assert not set(both.cache.members.ids.tolist()) & set(owner.cache.members.ids.tolist()), (
        "the cache has rows that the other rank lacks"
    )
    assert_same_batches(list(both), list(make_loader()))
    assert 0 < both.stats().rows_remote < owner.stats().rows_remote


def _of_bytes(rank: int, root: str) -> list[int]:
    part = salientpp.load(root)
    caches = [
        NeighborLoader(part, [4, 3], "train", batch_size=16, replication_factor=amount).cache
        for amount in ("120B", 10 * part.num_parts / part.num_vertices, "1GB", part.num_parts)
    ]
    return [len(cache) for cache in caches]


def test_the_size_of_a_cache_can_be_given_in_bytes(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16)
    for some, same, all_, as_well in distributed.run(_of_bytes, 2, str(tmp_path / "d")):
        assert some == same == 10 and all_ == as_well > 10


def test_a_shared_cache_brings_its_device_rows(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16)
    distributed.run(_share_a_cache, 2, str(tmp_path / "d"))


# --- memory and the training loop -------------------------------------------------------------------------


@pytest.mark.parametrize("zero_copy", [False, True])
def test_only_packed_rows_are_pinned_unless_the_device_reads_in_place(data, monkeypatch, zero_copy):
    pinned = []

    def pin(tensor):
        pinned.append(tensor.nbytes)
        return tensor

    for module in ("tiers", "cache", "fetch"):
        monkeypatch.setattr(f"salientpp.store.{module}.pinned", pin)
    data = Data(x=torch.zeros(N, 500), edge_index=data.edge_index)
    loader = packed(make(data, device_rows={"zero_copy": zero_copy}))
    assert pinned == ([data.x.nbytes] if zero_copy else []), "no rows are pinned before the first batch"
    pinned.clear()
    largest = max(batch.edge_index.nbytes for batch in loader)
    assert 0 < max(pinned) <= largest


def test_memory_of_batches_in_flight_is_counted_and_bounded(data):
    data = Data(x=torch.zeros(N, 16), edge_index=data.edge_index)
    for depth, most in [(1, 2), (3, 3), (10, 6)]:
        loader = packed(make(data, depth=depth, device_rows=0.5))
        assert loader.memory_used()["batches"] == 0
        sizes = [batch.x.nbytes + batch.edge_index.nbytes + batch.n_id.nbytes + batch.e_id.nbytes for batch in loader]
        # A batch, its inputs (packed rows, places), and its other attributes.
        assert most * max(sizes) < loader.memory_used()["batches"] < most * 2.5 * max(sizes)


def test_the_device_holds_no_more_batches_than_memory_reports(data):
    alive, most = weakref.WeakSet(), 0
    loader = packed(make(data, depth=10))  # every row is packed, and the batch's x is the packed tensor
    original = loader.engine.producer.stages.copy_to_device

    def copy_to_device(state):
        nonlocal most
        result = original(state)
        alive.add(result.taken.own[None, "x"])
        most = max(most, len(alive))
        return result

    loader.engine.producer.stages.copy_to_device = copy_to_device
    for _ in loader:
        pass
    assert 2 <= most <= loader.engine.producer.pipeline().num_past("copy_to_device") + 1


@pytest.mark.parametrize("on_device", [False, True])
def test_torch_compile_compiles_a_model_once(data, on_device):
    torch.compiler.reset()
    compiled_frames = 0

    def backend(module, inputs):
        nonlocal compiled_frames
        compiled_frames += 1
        return module.forward

    model = GraphSAGE(3, 8, num_layers=2, out_channels=4)
    compiled = torch.compile(model, backend=backend)
    loader = make(Data(x=torch.randn(N, 3), edge_index=data.edge_index), batch_size=48)
    sizes = set()
    for batch in packed(loader) if on_device else loader:
        sizes.add((batch.x.size(0), batch.edge_index.size(1)))
        torch.testing.assert_close(compiled(batch.x, batch.edge_index), model(batch.x, batch.edge_index))
    assert len(sizes) > 3, "batches differ in size"
    graphs_of_one_call = compiled_frames
    for batch in loader:
        compiled(batch.x, batch.edge_index)
    assert compiled_frames == graphs_of_one_call <= 1 + 3, (
        "a second epoch compiles nothing, and the first one only its own frames"
    )


def test_autocast_works_on_batches(data):
    model = GraphSAGE(3, 8, num_layers=2, out_channels=4)
    for batch in packed(make(Data(x=torch.randn(N, 3), edge_index=data.edge_index), dtype=torch.bfloat16)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch.x, batch.edge_index)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and all(p.grad.isfinite().all() for p in model.parameters())


def _train_sharded(rank: int, root: str) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    part = salientpp.load(root)
    torch.manual_seed(0)
    model = GraphSAGE(3, 8, num_layers=2, out_channels=7)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for batch in packed(NeighborLoader(part, [4, 3], "train", batch_size=16, replication_factor=0.2, seed=1)):
        loss = torch.nn.functional.cross_entropy(model(batch.x / 400, batch.edge_index)[: batch.batch_size], batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_sharded_model_trains_on_batches(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16)
    losses = distributed.run(_train_sharded, 2, str(tmp_path / "d"))
    assert len(losses[0]) == len(losses[1]) > 2 and all(0 < loss < 10 for loss in losses[0] + losses[1])


@pytest.mark.parametrize(
    ("given", "amount"),
    [(0, 0.0), (1, 1.0), (0.25, 0.25), (2, 2), (2_000_000, 2_000_000), ("2GiB", 2**31), ("1.5 kB", 1500), ("0B", 0)],
)
def test_an_amount_of_memory_is_a_fraction_or_bytes(given, amount):
    found = as_amount(given)
    assert found == amount and type(found) is type(amount)


@pytest.mark.parametrize("given", [-1, 1.5, 1e9, float("nan"), True, "half", "2", "2 parsecs", None])
def test_values_that_are_not_an_amount_of_memory_give_none(given):
    assert as_amount(given) is None


def test_device_memory_is_a_fraction_or_bytes():
    part = NeighborLoader(random_data(), [3], batch_size=8)
    whole = NeighborLoader(random_data(), [3], batch_size=8, device_rows=1).memory_used()["device"]
    assert part.memory_used()["device"] == 0 < whole
    row_bytes = part.engine.basis.source.row_bytes[None]
    for given in (0.25, 100 * row_bytes, f"{100 * row_bytes}B"):
        loader = NeighborLoader(random_data(), [3], batch_size=8, device_rows=given)
        list(loader)
        (near,) = loader.engine.producer.fetch.tiers[None].near
        assert near.num_rows == 100
