"""Laws of joined parts: a directory of K parts serves any number of ranks up to K, and every rank sees its consecutive parts as one."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from itertools import pairwise

import distributed
import pytest
import torch
import torch.distributed as dist
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from rare import rare

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.local_copy import copy_to_disk
from salientpp.store.rows import JoinedRows, take_rows
from salientpp.vip.inclusion import inclusion_probability, typed_inclusion_probability, uniform_starts

FANOUTS, BATCH = [5, 3], 8


@pytest.fixture
def root(tmp_path):
    salientpp.partition(random_data(300, 1500, edge_attributes=True), 5, tmp_path / "parts", FANOUTS, BATCH)
    return tmp_path / "parts"


@pytest.fixture
def typed_root(tmp_path):
    salientpp.partition(
        typed_data(), 4, tmp_path / "typed", TYPED_FANOUTS, BATCH, seeds=("paper", "train"), replicate=("venue",)
    )
    return tmp_path / "typed"


# --- the view -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [(0, 5), (0, 2, 5), (0, 1, 3, 4, 5), (0, 1, 2, 3, 4, 5)])
def test_a_joined_part_is_the_concatenation_of_its_parts(root, offsets):
    whole = salientpp.load(root)
    view = whole.joined(offsets, None)
    assert view.num_parts == len(offsets) - 1 and view.whole is whole
    assert view.num_vertices == whole.num_vertices and view.fingerprint == whole.fingerprint
    for part_id, (first, last) in enumerate(pairwise(offsets)):
        of = range(first, last)
        assert view.book.range_of(part_id) == (whole.book.range_of(first)[0], whole.book.range_of(last - 1)[1])
        for name in ("train", "all"):
            assert torch.equal(view.split(name, part_id), torch.cat([whole.split(name, part) for part in of]))
        assert torch.equal(view.edge_split("all", part_id), torch.cat([whole.edge_split("all", part) for part in of]))
        for name, rows in view.node_rows(part_id).items():
            assert torch.equal(rows, torch.cat([whole.node_rows(part)[name] for part in of]))


def test_views_share_topology_and_transpose(root):
    whole = salientpp.load(root)
    view = whole.joined((0, 2, 5), 1)
    assert view.graph is whole.graph and view.graph.transpose() is whole.graph.transpose()
    assert view.lists is whole.lists and view.joined((0, 2, 5), 0).whole is whole
    assert whole.joined(range(6), None) is whole


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])
def test_a_copy_of_a_view_is_the_same_view(root, duplicate):
    view = salientpp.load(root).joined((0, 2, 5), 1)
    again = duplicate(view)
    assert (again.offsets, again.part_id, again.num_parts) == (view.offsets, 1, 2)
    assert torch.equal(again.split("train"), view.split("train")) and again.whole.num_parts == 5


@pytest.mark.parametrize("offsets", [(), (0,), (0, 4), (1, 5), (0, 3, 3, 5), (0, 3, 2, 5)])
def test_offsets_that_do_not_ascend_over_all_parts_are_refused(root, offsets):
    with pytest.raises(ValueError, match=r"offsets must ascend from 0 to the 5 parts of .*parts, got "):
        salientpp.load(root).joined(offsets, None)


def test_rows_of_several_files_are_read_as_one_source(root):
    view = salientpp.load(root).joined((0, 2, 5), 1)
    source, rows = view.sources()[None]["x"], view.node_rows()["x"]
    assert isinstance(source, JoinedRows) and source.shape == rows.shape and source.nbytes == rows.nbytes
    index = torch.randint(len(rows), (500,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(take_rows(source, index), rows[index])
    out, place = torch.full((600, 3), -1.0), torch.randperm(600)[:500]
    source.take(index, out, place)
    assert torch.equal(out[place], rows[index])
    untouched = torch.ones(600, dtype=torch.bool)
    untouched[place] = False
    assert bool((out[untouched] == -1).all())


# --- VIP ----------------------------------------------------------------------------------------------------


def test_vip_of_a_join_is_computed_for_its_seeds_and_kept(root):
    view = salientpp.load(root).joined((0, 2, 5), 1)
    expected = inclusion_probability(view.graph, view.split("train"), FANOUTS, BATCH)
    assert torch.equal(view.vip(), expected)
    (file,) = (root / "kept").iterdir()
    before = file.stat()
    again = salientpp.load(root, verify="full").joined((0, 2, 5), 1)
    assert torch.equal(again.vip(), expected) and torch.equal(
        again.workload(1, again.split("train"), FANOUTS, BATCH).vip, expected
    )
    assert os.stat(file).st_ino == before.st_ino, "the file was read, not computed again"


def test_vip_of_a_join_covers_all_types(typed_root):
    view = salientpp.load(typed_root).joined((0, 3, 4), 0)
    seeds = uniform_starts({"paper": view.split("train", 0, "paper")}, BATCH)
    expected = typed_inclusion_probability(view.typed_graph(), seeds, view.description.num_neighbors)
    for type_ in view.node_types:
        assert torch.equal(view.vip(0, type_), expected[type_])
        again = salientpp.load(typed_root).joined((0, 3, 4), 0)
        assert torch.equal(again.vip(0, type_), expected[type_])


@pytest.mark.parametrize("damage", ["flip", "empty", "directory", "pickle"])
def test_an_altered_kept_file_is_computed_again(root, damage):
    view = salientpp.load(root).joined((0, 2, 5), 1)
    expected = view.vip().clone()  # the view maps the file, as it maps all files of the directory
    (file,) = (root / "kept").iterdir()
    if damage == "flip":
        text = bytearray(file.read_bytes())
        text[-1] ^= 1
        file.write_bytes(text)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "pickle":
        file.write_bytes(pickle.dumps(expected))
    else:
        file.unlink()
        file.mkdir()
    assert torch.equal(salientpp.load(root).joined((0, 2, 5), 1).vip(), expected)


def test_a_read_only_directory_keeps_no_probabilities(root):
    (root / "kept").write_text("in the way")
    view = salientpp.load(root).joined((0, 2, 5), 1)
    assert torch.equal(view.vip(), inclusion_probability(view.graph, view.split("train"), FANOUTS, BATCH))
    assert stat.S_ISREG((root / "kept").stat().st_mode)


def test_probabilities_kept_for_another_dataset_are_not_used(root):
    salientpp.load(root).joined((0, 2, 5), 1).vip()
    kept = {file.name: file.read_bytes() for file in (root / "kept").iterdir()}
    salientpp.partition(random_data(300, 1500, seed=5), 5, root, FANOUTS, BATCH, overwrite=True)
    (root / "kept").mkdir(exist_ok=True)
    for name, text in kept.items():
        (root / "kept" / name).write_bytes(text)
    view = salientpp.load(root).joined((0, 2, 5), 1)
    assert torch.equal(view.vip(), inclusion_probability(view.graph, view.split("train"), FANOUTS, BATCH))


# --- one process serves all parts ---------------------------------------------------------------------------


def test_one_process_draws_from_all_parts(root):
    part = salientpp.load(root)
    assert part.part_id is None and part.num_parts == 5
    loader = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=0, device_rows=0.2)
    seen = []
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
        seen += batch.n_id[: batch.batch_size].tolist()
    assert set(seen) == {v for part_id in range(5) for v in part.split("train", part_id).tolist()}
    stats = loader.stats()
    assert stats.rows_remote == stats.rows_cache == 0 < stats.rows_device


def test_one_process_that_loads_one_of_several_parts_is_refused(root):
    with pytest.raises(
        ValueError, match="rank 0 serves parts 0 to 4 of 5, but its graph was loaded with part_id=1; leave part_id out"
    ):
        NeighborLoader(salientpp.load(root, part_id=1), FANOUTS, "train", batch_size=BATCH)


# --- several ranks ------------------------------------------------------------------------------------------


def _epoch(rank: int, root: str, **options) -> dict:
    part = salientpp.load(root)
    loader = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=7, **options)
    batches = []
    for batch in loader:
        assert torch.equal(batch.x[:, 0].long(), part.original_id(batch.n_id))
        assert torch.equal(batch.y, part.original_id(batch.n_id[: batch.batch_size]) % 7)
        batches.append((batch.n_id.tolist(), batch.edge_index.tolist(), batch.e_id.tolist(), batch.x.tolist()))
    stats = loader.stats()
    return {
        "part": (part.part_id, part.offsets, part.split("train").tolist()),
        "batches": batches,
        "device": stats.rows_device,
        "cache": len(loader.cache),
        "remote": stats.rows_remote,
    }


@pytest.mark.parametrize(("world", "offsets"), [(2, (0, 2, 5)), (3, (0, 1, 3, 5))])
def test_caches_and_tiers_change_no_batch_and_counts_match_the_analysis(root, world, offsets):
    whole = salientpp.load(root)
    bare = distributed.run(_epoch, world, str(root))
    view = whole.joined(offsets, None)
    assert [each["part"] for each in bare] == [
        (rank, offsets, view.split("train", rank).tolist()) for rank in range(world)
    ]
    analysis = analyze(view, Batches(epochs=1, seed=7), Ways(replication_factors=[0, 0.3], policies=["vip"]))
    counted = {volume.replication_factor: list(volume.remote_rows_per_rank) for volume in analysis.of(way="cache")}
    assert [each["remote"] for each in bare] == counted[0.0]
    for options in (
        {"replication_factor": 0.3, "depth": 1},
        {"replication_factor": 0.3, "device_rows": {"part": 0.25, "zero_copy": True}},
    ):
        cached = distributed.run(_with_options, world, str(root), options)
        assert [each["batches"] for each in cached] == [each["batches"] for each in bare]
        assert [each["remote"] for each in cached] == counted[0.3]
        assert all(0 < each["cache"] <= int(0.3 * 300 / world) for each in cached)
        assert all((each["device"] > 0) == ("device_rows" in options) for each in cached)


def _with_options(rank: int, root: str, options: dict) -> dict:
    return _epoch(rank, root, **options)


def _staged(rank: int, root: str, to: str) -> bool:
    copied = copy_to_disk(root, to)
    dist.barrier()
    return _epoch(rank, root)["batches"] == _epoch(rank, str(copied))["batches"]


def test_ranks_stage_the_parts_that_they_serve(root, tmp_path):
    assert distributed.run(_staged, 2, str(root), str(tmp_path / "disk")) == [True, True]
    copied = copy_to_disk(root, tmp_path / "other", parts=[0, 1, 3, 4])
    with pytest.raises(DatasetError, match="is a copy without part 2"):
        salientpp.load(copied).joined((0, 2, 5), 1).split("train")


def _train(rank: int, root: str, epochs: int, ranks_per_host: int = 1) -> float:
    """Returns the accuracy on the test vertices after ``epochs`` epochs. The global batch is the same on any number of ranks."""
    part, world = salientpp.load(root), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    hosts = {"ranks_per_host": ranks_per_host, "replication_factor": 0.1}
    train = NeighborLoader(part, [4], "train", batch_size=48 // world, shuffle=True, seed=1, **hosts)
    for _ in range(epochs):
        for batch in train:
            mean = torch.zeros(batch.num_nodes, 8).index_reduce_(
                0, batch.edge_index[1], batch.x[batch.edge_index[0]], "mean", include_self=False
            )
            loss = torch.nn.functional.cross_entropy(model(mean[: batch.batch_size]), batch.y)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()
    right = torch.zeros(2)
    with torch.no_grad():
        for batch in NeighborLoader(part, [-1], "test", batch_size=64, seed=1, uneven="exact"):
            mean = torch.zeros(batch.num_nodes, 8).index_reduce_(
                0, batch.edge_index[1], batch.x[batch.edge_index[0]], "mean", include_self=False
            )
            found = model(mean[: batch.batch_size]).argmax(1)
            right += torch.tensor([float((found == batch.y).sum()), batch.batch_size])
    dist.all_reduce(right)
    return float(right[0] / right[1])


@pytest.mark.parametrize(("num_parts", "world", "ranks_per_host"), [(8, 3, 1), (4, 4, 2), *rare((4, 2, 1), (8, 8, 4))])
def test_any_placement_trains_to_the_same_accuracy(tmp_path, num_parts, world, ranks_per_host):
    data = random_data(800, 8000, seed=3)
    generator = torch.Generator().manual_seed(0)
    data.y = torch.randint(4, (800,), generator=generator)
    data.x = torch.nn.functional.one_hot(data.y, 8).float() + 0.5 * torch.randn(800, 8, generator=generator)
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    data.edge_index = data.edge_index[:, same | (torch.rand(data.num_edges, generator=generator) < 0.2)]
    draw = torch.rand(800, generator=generator)
    data.train_mask, data.val_mask, data.test_mask = draw < 0.5, (draw >= 0.5) & (draw < 0.6), draw >= 0.6
    salientpp.partition(data, num_parts, tmp_path / "d", [4], 16)
    one = distributed.run(_train, 1, str(tmp_path / "d"), 6)[0]
    accuracies = distributed.run(_train, world, str(tmp_path / "d"), 6, ranks_per_host)
    assert len(set(accuracies)) == 1 and one > 0.7  # chance is 0.25
    # The standard error of a share of some 320 vertices is at most 0.028.
    assert abs(accuracies[0] - one) < 0.06


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), r"torch\.float32 \[3\] in piece 0, torch\.int32 \[3\] in piece 1$"),
        (torch.zeros(0, 4), r"torch\.float32 \[3\] in piece 0, torch\.float32 \[4\] in piece 1$"),
    ],
)
def test_pieces_of_different_kinds_are_refused(second, words):
    with pytest.raises(
        ValueError, match=r"^rows of one attribute must have the same dtype and shape in every piece, got " + words
    ):
        JoinedRows([torch.zeros(5, 3), second])
