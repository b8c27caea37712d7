"""Laws of the files of inference: one file for each part on disk, on any number of ranks, and no file of anything else."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
import torch
import torch_geometric.nn as gnn
from graphs import random_data
from torch import Tensor
from torch_geometric.data import Data

import salientpp

PARTS = 4


def graph() -> Data:
    data = random_data(num_vertices=60, num_edges=300, directed=True)
    data.x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return data


def model(factor: float = 1.0) -> gnn.GraphSAGE:
    torch.manual_seed(0)
    made = gnn.GraphSAGE(3, 4, 2, 2).eval()
    with torch.no_grad():
        made.convs[1].lin_r.weight.mul_(factor)
    return made


@torch.no_grad()
def rows_of_part(root: Path, part_id: int) -> Tensor:
    """Returns the rows that the whole graph gives, of the vertices of a part on disk."""
    part, data = salientpp.load(root, part_id=part_id), graph()
    return model()(data.x, data.edge_index)[part.original_id(part.split("all"))]


def parts_in(root: Path, **options: Any) -> Path:
    """Partitions the graph into parts of different sizes. One is empty."""
    assignment = torch.tensor([0, 1, 3]).repeat_interleave(torch.tensor([30, 20, 10]))
    split = {"train": torch.arange(60)}
    salientpp.partition(graph(), PARTS, root, [-1], 32, method=assignment, split=split, **options)
    return root


def infer(rank: int, root: str, out: str, full_on: int = -1) -> None:
    if rank == full_on:
        part = next(path for path in sorted(Path(out).glob("part-*.npy"), reverse=True))
        part.unlink()
        part.symlink_to("/dev/full")
    salientpp.inference(model(1.0 if full_on < 0 else 2.0), salientpp.load(root), out=out)


def contents(folder: Path) -> dict[str, Any]:
    return {path.name: np.load(path).tolist() for path in folder.glob("part-*.npy") if path.is_file()}


@pytest.mark.parametrize(("topology", "world_sizes"), [("whole", (4, 2, 3, 1)), ("parts", (2,))])
def test_each_part_has_its_file_on_any_number_of_ranks(tmp_path, topology, world_sizes):
    root, out = parts_in(tmp_path / "graph", topology=topology), tmp_path / "rows"
    expected = {f"part-{number:05d}.npy": rows_of_part(root, number) for number in range(PARTS)}
    for world_size in world_sizes:  # into the same folder
        distributed.run(infer, world_size, str(root), str(out))
        found = {path.name: torch.from_numpy(np.load(path)) for path in out.iterdir()}
        assert found.keys() == expected.keys(), world_size
        for name, rows in expected.items():
            assert found[name].shape == rows.shape and torch.allclose(found[name], rows, atol=1e-6), (world_size, name)


def test_files_of_other_parts_are_refused_and_others_stay(tmp_path):
    root = parts_in(tmp_path / "graph")
    for name, foreign in [
        ("part-00004.npy", True),
        ("part-00017.npy", True),
        ("part-100000.npy", True),
        ("part-4.npy", False),
        ("part-00004.npz", False),
        ("my-part-00004.npy", False),
        ("part-00003.npy", False),
    ]:
        out = tmp_path / name / "rows"
        out.mkdir(parents=True)
        (out / name).write_bytes(b"the user's own")
        if foreign:
            words = rf"the folder {out} must have no files of other parts than the 4 of this graph, but it has {name}; remove"
            for failed in distributed.run(infer, 2, str(root), str(out), may_fail=True):
                with pytest.raises(ValueError, match=words):
                    raise ValueError(failed.text)
        else:
            distributed.run(infer, 1, str(root), str(out))
        if name != "part-00003.npy":
            assert (out / name).read_bytes() == b"the user's own"
        assert len([*out.iterdir()]) == (1 if foreign else PARTS + (name != "part-00003.npy"))


def test_a_graph_in_memory_refuses_the_files_of_parts(tmp_path):
    out = tmp_path / "rows"
    distributed.run(infer, 2, str(parts_in(tmp_path / "graph")), str(out))
    with pytest.raises(ValueError, match="the 1 of this graph, but it has part-00001.npy and 2 more; remove them"):
        salientpp.inference(model(), graph(), out=out)


def test_a_rank_that_cannot_write_leaves_the_files_of_an_earlier_call_on_every_rank(tmp_path):
    root, out = parts_in(tmp_path / "graph"), tmp_path / "rows"
    distributed.run(infer, 2, str(root), str(out))
    before = contents(out)
    failed = distributed.run(infer, 2, str(root), str(out), 1, may_fail=True)
    words = f"{out}/part-00003.npy cannot be written (No space left on device); the disk is full: make room, or choose"
    assert all(words in each.text for each in failed), failed
    (out / "part-00003.npy").unlink()
    del before["part-00003.npy"]
    assert contents(out) == before and len([*out.iterdir()]) == PARTS - 1, "no temporary file stays"


@pytest.mark.parametrize("size", [1, 50_000])
def test_a_full_disk_is_named(tmp_path, size):
    data = Data(x=torch.ones(size, 3), edge_index=torch.zeros((2, 1), dtype=torch.int64))
    (tmp_path / "part-00000.npy").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"part-00000.npy cannot be written \(No space left on device\); the disk is full: make"
    ):
        salientpp.inference([gnn.SAGEConv(3, 2)], data, out=tmp_path)


def test_a_disk_that_fills_up_while_rows_are_written_is_named(tmp_path):
    data = Data(x=torch.ones(50_000, 3), edge_index=torch.zeros((2, 1), dtype=torch.int64))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"part-00000.npy cannot be written \(File too large\); choose another place"):
            salientpp.inference([gnn.SAGEConv(3, 2)], data, out=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
