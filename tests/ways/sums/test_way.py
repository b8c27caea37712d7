"""Laws of batches with sums instead of rows.

The first layer's outputs and gradients equal those of whole batches. A batch together with its sums equals the sample. Bytes are as planned, and impossible
combinations are refused.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data, random_hetero
from rare import rare, some_of
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, GraphSAGE, LEConv, MessagePassing, SAGEConv

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.nn import merge_partial
from salientpp.store.fetch import Packed
from salientpp.ways.sums.way import Partial, SumsOfRows

BATCH, WIDTH = 32, 12


class Plain(MessagePassing):
    """User's own layer, with PyG's messages and sum."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * 2


class Scaled(Plain):
    """Layer whose messages differ from the rows that it is given."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x.exp())


def gin() -> GINConv:
    return GINConv(torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6)))


#: Layers that can continue each of the loader's reductions.
LAYERS: dict[str, list[Any]] = {
    "sum": [
        gin, lambda: GraphConv(WIDTH, 6), lambda: GCNConv(WIDTH, 6, normalize=False), lambda: SAGEConv(WIDTH, 6),
        lambda: SAGEConv((WIDTH, WIDTH), 6, aggr="add"), Plain,
    ],
    "mean": [
        gin, lambda: SAGEConv(WIDTH, 6, normalize=True), lambda: GraphConv(WIDTH, 6, aggr="mean"),
        lambda: GCNConv(WIDTH, 6, normalize=False, aggr="mean"),
    ],
    "max": [lambda: SAGEConv(WIDTH, 6, aggr="max"), lambda: GraphConv(WIDTH, 6, aggr="max")],
}  # fmt: skip
LAYERS["auto"] = LAYERS["mean"]
#: Layers that can continue each reduction of weighted rows.
WEIGHTED: dict[str, list[Any]] = {
    "sum": [lambda: GraphConv(WIDTH, 6), lambda: GCNConv(WIDTH, 6, normalize=False), lambda: GraphConv(WIDTH, 6, aggr="mean")],
    "mean": [
        lambda: GraphConv(WIDTH, 6), lambda: GraphConv(WIDTH, 6, aggr="mean"), lambda: GCNConv(WIDTH, 6, normalize=False, aggr="mean"),
    ],
    "max": [lambda: GraphConv(WIDTH, 6, aggr="max")],
}  # fmt: skip


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[int, str]:
    """Partitions the same directed graph, in which some vertices have no neighbours, by number of parts. Rows are 64-bit floats."""
    data = random_data(2000, 7000, train_fraction=0.2, directed=True, dtype=torch.float64)
    data.x = torch.randn(2000, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data.edge_attr = torch.arange(data.num_edges)
    data.time = torch.zeros(2000, dtype=torch.int64)
    data.z = torch.arange(2000)
    data.w = torch.randn(data.num_edges, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    data.pairs = torch.rand(data.num_edges, 2)
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(2))
    folder = tmp_path_factory.mktemp("partial")
    found = {}
    for parts in (1, 2, 4):
        found[parts] = str(folder / str(parts))
        salientpp.partition(data, parts, found[parts], [5, 4], BATCH, refine=False)
    return found


def loader_of(root: str, **options: Any) -> NeighborLoader:
    given: dict[str, Any] = {
        "num_neighbors": [5, 4], "input_nodes": "train", "batch_size": BATCH, "shuffle": True, "seed": 3, **options
    }  # fmt: skip
    return NeighborLoader(salientpp.load(root), **given)


def as_for_a_device(loader: NeighborLoader) -> NeighborLoader:
    """Makes a loader put its batches together as for a device, with the host's sums. ``copied`` counts what it copies."""
    loader.engine.producer.fetch.own = Packed(torch.device("cpu"))
    loader.engine.way(SumsOfRows).sums_here = True
    loader.copied = Counter()
    to_device = loader.engine.producer.fetch.to_device

    def counted(taken: Any) -> Any:
        loader.copied += Counter(
            {"rows" if type_ is None else type_: len(rows) for (type_, _), rows in taken.own.items()}
        )
        return to_device(taken)

    loader.engine.producer.fetch.to_device = counted
    return loader


def model_of(first: MessagePassing, hops: int) -> list[MessagePassing]:
    """Makes as many layers as hops. The first is the tested one, and gives 6 or WIDTH columns."""
    width = WIDTH if isinstance(first, Plain) else 6
    return [first, *(SAGEConv(width if i == 0 else 6, 6) for i in range(hops - 1))]


def outputs(layers: list[MessagePassing], batch: Any, weight: str | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the first layer's outputs for vertices found before the last hop, the outputs at the seeds, and the gradients of these.

    ``weight`` names the attribute that the first layer gets as its edge_weight.
    """
    early = batch.num_nodes - batch.num_sampled_nodes[-1]
    x = first = layers[0](batch.x, batch.edge_index, *([] if weight is None else [batch[weight]]))
    for layer in layers[1:]:
        x = layer(x.tanh(), batch.edge_index)
    out = x[: batch.batch_size]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    gradients = torch.autograd.grad((out * weight).sum(), parameters, allow_unused=True) if parameters else []
    return first[:early], out, [gradient for gradient in gradients if gradient is not None]


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def into(edge_index: Tensor, number: int) -> Tensor:
    return torch.bincount(edge_index[1], minlength=number)


def check_all(rank: int, root: str, reductions: list[str], options: dict[str, Any]) -> list[dict[str, int]]:
    return [check_layers(root, reduction, options) for reduction in reductions]


def check_layers(root: str, reduction: str, options: dict[str, Any]) -> dict[str, int]:
    torch.manual_seed(5)
    seen: Counter[str] = Counter()
    options, for_device = dict(options), "device" in options
    options.pop("device", None)
    weight = options.pop("weight", None)
    with_sums = loader_of(root, partial_aggregation={"reduce": reduction, "weight": weight}, **options)
    if for_device:
        as_for_a_device(with_sums)
    whole = loader_of(root, **options)
    hops = len(options.get("num_neighbors", [5, 4]))
    models = [model_of(make().double(), hops) for make in (WEIGHTED if weight else LAYERS)[reduction]]
    models = [[layer.double() for layer in layers] for layers in models]
    for layers in models:
        merge_partial(torch.nn.ModuleList(layers))
    for ours, full in itertools.islice(zip(with_sums, whole, strict=True), 12):
        early, sums = full.num_nodes - full.num_sampled_nodes[-1], ours.partial
        assert (
            isinstance(sums, Partial)
            and sums.weight == weight
            and sums.reduction == ("mean" if reduction == "auto" else reduction)
        )
        assert torch.equal(ours.n_id[:early], full.n_id[:early])
        if "logical_ranks" not in options:  # with it, a vertex may have several places
            assert torch.equal(ours.n_id, full.n_id[torch.isin(full.n_id, ours.n_id)]), "in the same order"
        assert (
            ours.num_sampled_nodes[:-1] == full.num_sampled_nodes[:-1] and sum(ours.num_sampled_nodes) == ours.num_nodes
        )
        assert sum(ours.num_sampled_edges) == ours.edge_index.size(1) == ours.e_id.numel() == ours.edge_attr.numel()
        assert torch.equal(ours.x, whole_rows(root, ours.n_id))
        own, theirs = into(ours.edge_index.plain(), early), into(full.edge_index, early)
        others = torch.zeros(early, dtype=torch.int64).index_add_(0, sums.target, sums.count)
        assert torch.equal(own + others, theirs)
        seen += Counter(
            batches=1, sums=sums.target.numel(), both=int((own * others > 0).sum()), only_sums=int(((own == 0) & (others > 0)).sum()),
            only_own=int(((others == 0) & (own > 0)).sum()), neither=int((theirs == 0).sum()),
        )  # fmt: skip
        for layers in models:
            got, want = outputs(layers, ours, weight), outputs(layers, full, weight)
            assert close(got[0], want[0]) and close(got[1], want[1]), type(layers[0]).__name__
            assert len(got[2]) == len(want[2]) and all(map(close, got[2], want[2]))
    for loader in (with_sums, whole):
        loader.reset_stats()
        if for_device and loader is with_sums:
            loader.copied.clear()
        for _ in loader:  # completes the epoch, for the counts
            pass
    if for_device:
        check_copies(with_sums, whole, seen)
    seen["rows"], seen["whole"] = with_sums.stats().rows_remote, whole.stats().rows_remote
    seen["bytes"], seen["whole bytes"] = with_sums.stats().bytes_received, whole.stats().bytes_received
    return dict(seen)


def check_copies(with_sums: NeighborLoader, whole: NeighborLoader, seen: Counter[str]) -> None:
    """Checks the counts of copies to the device, and records the numbers of rows and sums that are copied with sums and without."""
    ours, full = with_sums.stats(), whole.stats()
    seen["host sums"], seen["device rows"] = ours.rows_partial_host, ours.rows_device
    seen["copied"], seen["copied whole"] = ours.rows_host + ours.rows_cache, full.rows_host + full.rows_cache
    assert with_sums.copied["rows"] == seen["copied"] and with_sums.copied["(sums of the host)"] == seen["host sums"]
    assert ours.rows_device == full.rows_device, "rows on the device are delivered whole"


def whole_rows(root: str, n_id: Tensor) -> Tensor:
    part = salientpp.load(root)
    return torch.cat([part.rows(part_id)[None]["x"] for part_id in range(part.num_parts)])[n_id]


OF_WEIGHTS = {"weight": "w"}


@pytest.mark.parametrize(
    ("parts", "options"),
    [(1, {}), (2, {}), (4, OF_WEIGHTS), *rare((1, OF_WEIGHTS), (2, OF_WEIGHTS), (4, {}))],
    ids=str,
)
def test_the_first_layer_and_its_gradients_equal_those_of_whole_batches(roots, parts, options):
    for found in sum(distributed.run(check_all, parts, roots[parts], ["sum", "mean", "max"], options), []):
        assert found["batches"] > 2
        if parts == 1:
            assert not found.get("sums") and found["rows"] == found["whole"] == 0
        else:
            assert all(found[kind] > 0 for kind in ("sums", "both", "only_sums", "only_own", "neither"))
            assert found["rows"] < found["whole"] and found["bytes"] < found["whole bytes"]


@pytest.mark.parametrize(
    "options",
    [
        {"replication_factor": 0.2, "num_workers": 2}, {"replace": True, "depth": 1}, {"num_neighbors": [9]}, {"num_neighbors": [4, 3, 3]},
        {"shared_draws": {"vertices": "batch", "block": 4}}, {"num_neighbors": [-1, 2], "device_rows": 0.3}, {"num_neighbors": [5, 0]},
        {"weight_attr": "weight"}, {"weight": "w", "replace": True, "num_workers": 2, "replication_factor": 0.2},
        {"logical_ranks": {"number": 4, "join": True}},
    ],
    ids=str,
)  # fmt: skip
def test_sums_work_with_caches_replacement_and_other_hops(roots, options):
    for found in sum(
        distributed.run(check_all, 2, roots[2], ["mean" if "weight" in options else "auto", "max"], options), []
    ):
        assert found["batches"] > 2
        if options.get("num_neighbors") == [5, 0]:
            assert not found.get("sums")
        else:
            assert found["sums"] > 0 and found["bytes"] < found["whole bytes"]


@pytest.mark.parametrize(
    "parts, options",
    [
        (2, {"ranks_per_host": 1}),
        (4, {"ranks_per_host": 2, "replication_factor": 0.2}),
        (4, {"ranks_per_host": 2, "device": 0}),
    ],
    ids=str,
)
def test_ranks_may_share_a_part_or_a_host(roots, parts, options):
    for (found,) in distributed.run(check_all, 4, roots[parts], ["sum"], options):
        assert found["sums"] > 0 and found["bytes"] < found["whole bytes"]


ON_A_DEVICE = [
    *[(1, {}), (2, {"device_rows": 0.3, "replication_factor": 0.2, "num_workers": 2}), (1, {"replace": True})],
    (4, {"weight": "w", "replication_factor": 0.2}),
]
EVERY_ON_A_DEVICE = [*itertools.product((1, 2, 4), [options for _, options in ON_A_DEVICE])]


@pytest.mark.parametrize(
    ("parts", "options"),
    some_of(ON_A_DEVICE, EVERY_ON_A_DEVICE),
    ids=str,
)
def test_the_host_sums_rows_that_it_would_copy_to_its_device(roots, parts, options):
    for found in sum(
        distributed.run(check_all, parts, roots[parts], ["sum", "mean", "max"], {**options, "device": 0}), []
    ):
        assert found["batches"] > 2 and found["host sums"] > 0
        assert found["copied"] + found["host sums"] < found["copied whole"]
        assert all(found[kind] > 0 for kind in ("sums", "both", "only_sums", "neither"))
        assert (found["device rows"] > 0) == ("device_rows" in options)


def check_evaluation(rank: int, root: str) -> float:
    """Returns the largest difference at the seeds, without gradients and in inference mode, under DDP."""
    torch.manual_seed(5)
    whole = torch.nn.parallel.DistributedDataParallel(GraphSAGE(WIDTH, 8, 2, 6).double())
    merged = torch.nn.parallel.DistributedDataParallel(merge_partial(GraphSAGE(WIDTH, 8, 2, 6).double()))
    merged.load_state_dict(whole.state_dict())
    worst, sums = 0.0, 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for full, ours in zip(loader_of(root), loader_of(root, partial_aggregation="mean"), strict=True):
                outs = [model(each.x, each.edge_index) for model, each in ((whole, full), (merged, ours))]
                worst = max(worst, float((outs[0][: full.batch_size] - outs[1][: full.batch_size]).abs().max()))
                sums += ours.partial.target.numel()
    assert sums
    return worst


def test_evaluation_under_ddp_and_in_inference_mode_equals_whole_batches(roots):
    assert max(distributed.run(check_evaluation, 2, roots[2])) < 1e-12


def check_uneven(rank: int, root: str) -> tuple[bool, ...]:
    """Compares epochs that are left early, that other ranks continue, that resume from a state, and that run as on a device."""
    part = salientpp.load(root)
    ids = torch.arange(*part.book.range_of(rank))[: 100 if rank else 260]
    options = {"input_nodes": ids, "shuffle": False, "partial_aggregation": "sum", "replication_factor": 0.1}
    loader = loader_of(root, **options)
    whole = list(loader)
    assert len(whole) == (4 if rank else 9)
    state = None
    for number, _ in enumerate(loader):
        if number == 1 + rank:
            state = loader.state_dict()
            break
    again, device = loader_of(root, **options), loader_of(root, **options)
    again.load_state_dict(state)
    device.engine.producer.fetch.own = device.engine.producer.fetch.served = Packed(torch.device("cpu"))
    device.set_epoch(1)
    rest, as_device = list(again), list(device)
    assert len(rest) == len(as_device) - 2 - rank

    def same(ours: Any, theirs: Any) -> bool:
        tensors = [(ours[name], theirs[name]) for name in ("x", "n_id", "e_id", "edge_index")]
        return all(torch.equal(*pair) for pair in [*tensors, *zip(ours.partial[:3], theirs.partial[:3])])

    sums = sum(batch.partial.target.numel() for batch in as_device)
    return sums > 0, *(same(*pair) for pair in zip(rest, as_device[2 + rank :], strict=True))


def test_epochs_that_end_early_or_resume_and_devices_get_the_same_batches(roots):
    for found in distributed.run(check_uneven, 2, roots[2]):
        assert all(found) and len(found) > 1


# --- what moves -------------------------------------------------------------------------------------------


def check_traffic(rank: int, root: str, options: dict[str, Any]) -> tuple[int, ...]:
    loader = loader_of(root, **options)
    sums = sources = 0
    for batch in loader:
        sums += batch.partial.target.numel() if "partial" in batch else 0
        sources += int(batch.partial.count.sum()) if "partial" in batch else 0
    stats = loader.stats()
    assert stats.rows_partial == sums
    assert stats.by_type[None]["bytes_received"] == 8 * WIDTH * (stats.rows_remote + sums)
    return stats.bytes_sent, stats.bytes_received, stats.rows_remote, sums, sources


@pytest.mark.parametrize(
    ("alpha", "partial", "weight"),
    [
        *((0.2, None, None), (0.0, "sum", None), (0.2, "sum", "w")),
        *rare((0.0, None, None), (0.2, "sum", None), (0.0, "sum", "w")),
    ],
)
def test_bytes_are_the_sum_of_rows_sums_and_ids(roots, alpha, partial, weight):
    options = {
        "replication_factor": alpha,
        "partial_aggregation": {"reduce": partial, "weight": weight},
        "uneven": "drop",
    }
    asked_of_source = 4 if weight is None else 4 + 8
    found = distributed.run(check_traffic, 2, roots[2], options)
    for (sent, received, rows, sums, sources), (_, _, their_rows, their_sums, their_sources) in [found, found[::-1]]:
        answers, asked = 8 * WIDTH * (rows + sums), 4 * (their_rows + their_sums) + asked_of_source * their_sources
        counts = received - answers - asked
        # Each tick also sends counts to the other rank: of rows; with sums, of sums, sources and weights too; and a flag if the rank leaves.
        assert counts > 0 and counts % (16 if partial is None else 32 if weight is None else 40) == 0
        assert sent == counts + 8 * WIDTH * (their_rows + their_sums) + 4 * (rows + sums) + asked_of_source * sources


def check_counts(rank: int, root: str, options: dict[str, Any]) -> tuple[int, ...]:
    loader = loader_of(root, **options)
    sources = asked = 0
    for _ in range(2):
        for batch in loader:
            sources += int(batch.partial.count.sum())
            asked += batch.partial.target.numel()
    stats = loader.stats()
    return stats.rows_remote, stats.rows_partial, sources, asked


COUNTED = [
    (2, {"partial_aggregation": "max"}),
    (4, {"partial_aggregation": "auto", "replication_factor": 0.3}),
    (2, {"partial_aggregation": "auto", "shared_draws": {"vertices": "batch", "block": 4}}),
]


@pytest.mark.parametrize(
    ("parts", "options"), [*COUNTED, *rare(*((6 - parts, options) for parts, options in COUNTED))], ids=str
)
def test_fetched_rows_and_sums_equal_the_analysis(roots, parts, options):
    alpha = options.get("replication_factor", 0.0)
    found = distributed.run(check_counts, parts, roots[parts], options)
    draws = {"shared_draws": "batch", "draw_block": 4} if "shared_draws" in options else {}
    analysis = analyze(
        salientpp.load(roots[parts]),
        Batches(epochs=2, seed=3, num_neighbors=[5, 4], batch_size=BATCH, **draws),
        Ways(replication_factors=[alpha], policies=["vip"], sums=True),
    )
    (volume,) = analysis.of(way="sums")
    summed = volume.summed
    assert summed.auto == (True,) * parts
    assert [rows for rows, _, _, _ in found] == [2 * rows for rows in volume.remote_rows_per_rank]
    assert [sums for _, sums, _, _ in found] == [2 * sums for sums in summed.sums_per_rank]
    rows, sums, sources, asked = (sum(of_rank) for of_rank in zip(*found))
    assert asked == sums and sources == 2 * summed.sources_per_epoch
    assert (
        volume.remote_bytes_per_epoch * 2
        == summed.bytes_with * 2
        == 8 * WIDTH * (rows + sums) + 4 * (rows + sums + sources)
    )
    assert summed.bytes_without == (8 * WIDTH + 4) * analysis.results[0].remote_rows_per_epoch
    assert summed.share < 1 and analysis.to_dict()["results"][-1]["summed"]["share"] == summed.share


def check_copied(rank: int, root: str, beta: float) -> tuple[int, ...]:
    whole = loader_of(root, partial_aggregation="auto", device_rows=beta)
    ours = as_for_a_device(loader_of(root, partial_aggregation="auto", device_rows=beta))
    sources = 0
    for _ in range(2):
        for batch, full in zip(ours, whole, strict=True):
            sources += int(batch.partial.count.sum()) - int(full.partial.count.sum())
    return whole.stats().rows_host, ours.stats().rows_host, ours.stats().rows_partial_host, sources


@pytest.mark.parametrize("parts", [2, *rare(1)])
def test_copies_to_devices_equal_the_analysis(roots, parts):
    analysis = analyze(
        salientpp.load(roots[parts]),
        Batches(epochs=2, seed=3, num_neighbors=[5, 4], batch_size=BATCH),
        Ways(replication_factors=[0], policies=["vip"], sums=True),
    )
    for copies in analysis.copies:
        found = distributed.run(check_copied, parts, roots[parts], copies.device_fraction)
        counted = copies.rows_without, copies.rows_per_epoch, copies.sums_per_epoch, copies.sources_per_epoch
        assert [sum(of_rank) for of_rank in zip(*found)] == [2 * count for count in counted]
        assert copies.auto == (True,) * parts and copies.share < 1
    assert [copies.device_fraction for copies in analysis.copies] == [0, 0.04, 0.2]


def test_auto_asks_for_sums_only_if_they_save_bytes(tmp_path):
    # Rows take 2 bytes, half as many as an id, so sums save too few bytes.
    data = random_data(2000, 7000, directed=True)
    data.x = torch.zeros(2000, 1, dtype=torch.float16)
    salientpp.partition(data, 2, tmp_path / "parts", [5, 4], BATCH, refine=False)
    analysis = analyze(
        salientpp.load(tmp_path / "parts"),
        Batches(epochs=2, seed=3),
        Ways(replication_factors=[0], policies=["vip"], sums=True),
    )
    assert analysis.of(way="sums")[0].summed.auto == (False, False)
    for _, sums, sources, _ in distributed.run(
        check_counts, 2, str(tmp_path / "parts"), {"partial_aggregation": "auto"}
    ):
        assert sums == sources == 0


def run_half(rank: int, root: str, dtype: torch.dtype) -> float:
    """Returns the largest relative error of means of 16-bit rows that are converted to a wider dtype on delivery."""
    part = salientpp.load(root)
    begin, end = part.book.range_of(rank)
    rows = whole_rows(root, torch.arange(begin, end)).to(dtype)
    given = {"columns": {"x": rows}, "dtype": torch.float32}
    worst = 0.0
    conv = merge_partial(SAGEConv(WIDTH, 6))
    for ours, full in zip(loader_of(root, partial_aggregation="mean", **given), loader_of(root, **given), strict=True):
        assert ours.x.dtype == ours.partial.value.dtype == torch.float32
        got = conv(ours.x, ours.edge_index)[: ours.batch_size]
        want = conv(full.x, full.edge_index)[: ours.batch_size]
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return worst


@pytest.mark.parametrize("dtype, most", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)], ids=str)
def test_means_of_the_users_own_16_bit_rows_are_accurate(roots, dtype, most):
    assert max(distributed.run(run_half, 2, roots[2], dtype)) < most


# --- refusals ---------------------------------------------------------------------------------------------


def one(root: str, loader: Any = NeighborLoader, **options: Any) -> Any:
    given: dict[str, Any] = {"num_neighbors": [5, 4], "batch_size": BATCH, "partial_aggregation": "sum", **options}
    return loader(salientpp.load(root), **given)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"partial_aggregation": "median"}, "must be 'auto', 'sum', 'mean', 'max' or None, got 'median'"),
        ({"partial_aggregation": True}, "must be 'auto', 'sum', 'mean', 'max' or None, got True"),
        ({"lookahead": 3}, "excludes lookahead=: a cache that looks ahead chooses its rows after"),
        ({"pad": "bucket"}, "excludes pad="),
        ({"transform_sampler_output": lambda out: out}, "excludes transform_sampler_output="),
        ({"send_as": {"x": "fp16"}}, "excludes send_as=: sums are computed from rows as they are stored"),
        ({"subgraph_type": "induced"}, "replaces edges of the last hop .* subgraph_type='induced'"),
        ({"subgraph_type": "bidirectional"}, "replaces edges of the last hop"),
        ({"disjoint": True}, "excludes disjoint and time_attr"),
        ({"time_attr": "time"}, "excludes disjoint and time_attr"),
        ({"columns": ("x", "z")}, r"sums exactly one attribute .*got columns=\['x', 'z'\]"),
        ({"columns": ()}, r"sums exactly one attribute .*got columns=\[\]"),
        ({"columns": ("z",)}, "sums floating-point rows .* the rows of 'z' are int64"),
        (
            {"partial_aggregation": {"reduce": "sum", "weight": "no"}},
            r"partial_aggregation\['weight'\] must name an edge attribute of .*which has .*, w, .*; got 'no'",
        ),
        (
            {"partial_aggregation": {"reduce": "sum", "weight": "pairs"}},
            r"partial_aggregation\['weight'\]='pairs' must be one real number per edge, \[7000\], got float32 \[7000, 2\]",
        ),
        (
            {"partial_aggregation": {"reduce": None, "weight": "w"}},
            r"partial_aggregation\['weight'\]='w' applies only to sums of rows; give a reduction as partial_aggregation\['reduce'\] too",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unsupported_combination_raises_a_clear_error(roots, options, error):
    with pytest.raises(ValueError, match=error):
        one(roots[1], input_nodes="train", **options)


def test_other_data_and_loaders_raise_a_clear_error(tmp_path):
    data = random_data(100, 400)
    with pytest.raises(ValueError, match="partial_aggregation='sum' applies only to a partitioned graph"):
        NeighborLoader(data, [3], data.train_mask, partial_aggregation="sum")
    with pytest.raises(ValueError, match="is for a NeighborLoader; LinkNeighborLoader makes batches of edges"):
        LinkNeighborLoader(data, [3], partial_aggregation="sum")
    with pytest.raises(ValueError, match="partial_aggregation= is for a NeighborLoader"):
        LinkNeighborLoader(data, [3], partial_aggregation={"weight": "w"})
    hetero = random_hetero()
    hetero["paper"].train_mask = torch.ones(60, dtype=torch.bool)
    salientpp.partition(hetero, 1, tmp_path / "typed", [3], 8, seeds=("paper", "train"))
    with pytest.raises(ValueError, match="needs a graph with one type of vertices"):
        one(str(tmp_path / "typed"), num_neighbors=[3], input_nodes=("paper", "train"))
    salientpp.partition(data, 1, tmp_path / "narrow", [3], 8, store_as={"x": "fp16"})
    with pytest.raises(ValueError, match="the rows of 'x' travel as fp16"):
        one(str(tmp_path / "narrow"), num_neighbors=[3], input_nodes="train")


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: torch.nn.Linear(3, 3), "needs a model with layers of PyG's MessagePassing, got Linear"),
        (lambda: GATConv(WIDTH, 6), "GATConv weights its messages by attention, so its messages are not known"),
        (lambda: LEConv(WIDTH, 6), "LEConv has its own message.."),
        (lambda: SAGEConv(WIDTH, 6, project=True), "project=True sends relu"),
        (lambda: SAGEConv(WIDTH, 6, aggr="lstm"), "LSTMAggregation, which depends on the order of the messages"),
        (lambda: SAGEConv(WIDTH, 6, aggr="std"), "StdAggregation, which needs sums of squares"),
        (
            lambda: SAGEConv(WIDTH, 6, aggr=["mean", "max"]),
            "MultiAggregation, and one reduction cannot replace several",
        ),
        (lambda: SAGEConv(WIDTH, 6, aggr="softmax"), "SoftmaxAggregation, which weights each message by all others"),
        (lambda: SAGEConv(WIDTH, 6, aggr="min"), "MinAggregation, which is not a plain sum, mean or maximum"),
        (lambda: GCNConv(WIDTH, 6), "GCNConv normalises by the degrees of the batch"),
        (lambda: GCNConv(WIDTH, 6, normalize=False, aggr="max"), "does not follow from the maximum of x_j"),
        (lambda: SAGEConv(WIDTH, 6, flow="target_to_source"), "flow='source_to_target'"),
    ],
)
def test_a_layer_that_cannot_merge_sums_is_named_with_the_reason(make, error):
    with pytest.raises(ValueError, match=error):
        merge_partial(make())


def test_a_layer_that_would_be_silently_wrong_raises(roots):
    batch = one(roots[1], input_nodes="train")([0, 3, 5])
    assert batch.batch_size == 3
    conv = merge_partial(SAGEConv(WIDTH, 6).double())
    expected = conv(batch.x, batch.edge_index)
    for same in (batch.clone(), batch.to("cpu"), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(conv(same.x, same.edge_index), expected)
    assert torch.equal(
        conv(batch.x.plain() * 2, batch.edge_index.plain()), conv(2 * batch.x.plain(), batch.edge_index.plain())
    )
    with pytest.raises(RuntimeError, match="was given another x"):
        conv(batch.x * 2, batch.edge_index)
    with pytest.raises(RuntimeError, match="mul_ was called on values from the x of a batch with sums.* in place"):
        batch.x.mul_(2)
    batch = next(iter(one(roots[1], input_nodes="train", partial_aggregation="max")))
    with pytest.raises(ValueError, match="MeanAggregation, which needs partial_aggregation='sum' or 'mean', got 'max'"):
        conv(batch.x, batch.edge_index)
    batch = next(iter(one(roots[1], input_nodes="train")))
    scaled, weighted = merge_partial(Scaled().double()), merge_partial(GraphConv(WIDTH, 6).double())
    with pytest.raises(RuntimeError, match="Scaled merges sums of the batch's x, but was given another x"):
        scaled(batch.x, batch.edge_index)
    with pytest.raises(
        ValueError,
        match="was given edge_weight, but the partial sums have no weights; pass the name of the edge attribute",
    ):
        weighted(batch.x, batch.edge_index, torch.ones(batch.num_edges, dtype=torch.float64))
    weighted(batch.x, batch.edge_index)


def test_weights_other_than_those_in_the_sums_are_refused(roots):
    batch = next(iter(one(roots[1], input_nodes="train", partial_aggregation={"reduce": "sum", "weight": "w"})))
    conv = merge_partial(GraphConv(WIDTH, 6).double())
    plain = merge_partial(SAGEConv(WIDTH, 6, aggr="sum").double())
    expected = conv(batch.x, batch.edge_index, batch.w)
    assert torch.equal(conv(batch.x, batch.edge_index, edge_weight=batch.w.view(-1, 1)), expected)
    with pytest.raises(
        ValueError, match="GraphConv was given no edge_weight, but .*; pass batch.w as edge_weight, or leave"
    ):
        conv(batch.x, batch.edge_index)
    with pytest.raises(ValueError, match="SAGEConv takes no edge_weight, but rows in the sums"):
        plain(batch.x, batch.edge_index)
    for other in (batch.w * 2, batch.w.float(), batch.w[:-1], batch.w.plain()):
        with pytest.raises(RuntimeError, match="the batch's w, but was given another edge_weight"):
            conv(batch.x, batch.edge_index, other)
    moved = batch.clone()
    assert torch.equal(conv(moved.x, moved.edge_index, moved.w), expected)
    with pytest.raises(
        RuntimeError, match="mul_ was called on values from the weights of a batch with sums.* in place"
    ):
        batch.w.mul_(2)
    with pytest.raises(ValueError, match="requires a gradient, but the weights of edges"):
        conv(batch.x, batch.edge_index, batch.w.requires_grad_())
