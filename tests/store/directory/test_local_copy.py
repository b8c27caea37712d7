"""Laws of a copy for one host: it has exactly the files that its ranks read, it is complete or absent, and several ranks may make it at once."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import distributed
import pytest
import torch
from graphs import random_data
from hypothesis import given
from hypothesis import strategies as st

import salientpp
from salientpp import NeighborLoader, cli, copy_to_disk
from salientpp.ranks.placement import parts_of
from salientpp.store.directory.files import DatasetError

NUM_PARTS = 3


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory) -> Path:
    return salientpp.partition(
        random_data(edge_attributes=True),
        NUM_PARTS,
        tmp_path_factory.mktemp("copies") / "parts",
        [5, 3],
        8,
        method="random",
    ).root


@pytest.fixture
def altered(dataset_dir, tmp_path) -> Path:
    """Returns a copy of the directory that a test may damage."""
    return Path(shutil.copytree(dataset_dir, tmp_path / "altered" / "parts"))


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# --- the copied files -------------------------------------------------------------------------------------


def test_a_copy_has_the_topology_and_its_parts_and_can_grow(dataset_dir, tmp_path):
    own = [name for name in files_of(dataset_dir) if "/" not in name or name.startswith("part-00001/")]
    copy = copy_to_disk(dataset_dir, tmp_path / "new" / "disk", parts=[1])
    assert copy == tmp_path / "new" / "disk" / "parts"
    assert files_of(copy) == sorted([*own, "parts.json"])
    copy_to_disk(dataset_dir, tmp_path / "new" / "disk", parts=[0])
    assert json.loads((copy / "parts.json").read_text()) == {"parts": [0, 1]}
    assert {path.name for path in copy.glob("part-*")} == {"part-00000", "part-00001"}


def test_a_copy_reads_as_the_original_directory(dataset_dir, tmp_path):
    part, copy = (
        salientpp.load(root, part_id=1, verify="full")
        for root in (dataset_dir, copy_to_disk(dataset_dir, tmp_path, parts=[1]))
    )
    assert copy.fingerprint == part.fingerprint
    assert torch.equal(copy.graph.indices, part.graph.indices) and torch.equal(copy.graph.indptr, part.graph.indptr)
    for rows, expected in ((copy.node_rows(), part.node_rows()), (copy.edge_rows(), part.edge_rows())):
        assert rows.keys() == expected.keys() and all(torch.equal(rows[name], expected[name]) for name in rows)
    assert torch.equal(copy.split("train"), part.split("train")) and torch.equal(copy.vip(), part.vip())
    assert torch.equal(copy.original_id(torch.arange(5)), part.original_id(torch.arange(5)))


def test_an_error_names_the_part_that_was_not_copied(dataset_dir, tmp_path):
    copy = copy_to_disk(dataset_dir, tmp_path, parts=[1, 2])
    with pytest.raises(DatasetError, match=r"parts is a copy without part 0; its parts are 1, 2; copy that part too"):
        salientpp.load(copy, part_id=0)
    with pytest.raises(DatasetError, match="is a copy without part 0"):
        salientpp.load(copy, part_id=1).node_rows(0)


@given(st.integers(1, 12), st.integers(1, 6))
def test_each_rank_stages_the_part_that_it_serves(num_parts, per_part):
    assert [list(parts_of(rank, num_parts * per_part, num_parts)) for rank in range(num_parts * per_part)] == [
        [rank // per_part] for rank in range(num_parts * per_part)
    ]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_one_call_per_host_stages_the_parts_of_all_its_ranks(hosts, ranks_per_host, ranks_per_part):
    num_parts, left = divmod(hosts * ranks_per_host, ranks_per_part)
    if left == 0:
        for host in range(hosts):
            serves = {rank // ranks_per_part for rank in range(host * ranks_per_host, (host + 1) * ranks_per_host)}
            assert set(parts_of(host, hosts, num_parts)) == serves


# --- several ranks ----------------------------------------------------------------------------------------


def _stage_and_load(rank, root, to):
    copied = copy_to_disk(root, to)
    batches = []
    for place in (root, copied):
        loader = NeighborLoader(salientpp.load(place), [5, 3], "train", batch_size=8, shuffle=True, seed=3)
        batches.append([[batch.n_id.tolist(), batch.x.tolist(), batch.y.tolist()] for batch in loader])
    return batches[0] == batches[1] and len(batches[0]) > 0, loader.state_dict()["fingerprint"]["dataset"]


def test_ranks_of_a_host_may_copy_their_parts_at_once(dataset_dir, tmp_path):
    results = distributed.run(_stage_and_load, NUM_PARTS, dataset_dir, tmp_path)
    assert results == NUM_PARTS * [(True, salientpp.load(dataset_dir, part_id=0).fingerprint)]
    copy = tmp_path / "parts"
    assert files_of(copy) == sorted([*files_of(dataset_dir), "parts.json"]), "no temporary file is left"


# --- complete or absent -----------------------------------------------------------------------------------


def test_an_interrupted_copy_is_not_a_dataset_and_is_copied_again(dataset_dir, altered, tmp_path):
    (altered / "part-00002" / "node_x.npy").unlink()
    with pytest.raises(DatasetError, match=r"part-00002/node_x.npy is missing"):
        copy_to_disk(altered, tmp_path, parts=[2])
    copy = tmp_path / "parts"
    with pytest.raises(DatasetError, match="it has no manifest.json"):
        salientpp.load(copy)
    (copy / "indices.npy").write_bytes(b"of another version")
    copy_to_disk(dataset_dir, tmp_path, parts=[2])
    salientpp.load(copy, part_id=2, verify="full")


def test_a_copy_that_was_interrupted_in_its_first_file_is_copied_again(dataset_dir, tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        copy_to_disk(dataset_dir, tmp_path, parts=[1])
    assert files_of(tmp_path / "parts") == ["parts.json.copying"]
    salientpp.load(copy_to_disk(dataset_dir, tmp_path, parts=[1]), part_id=1, verify="full")


def test_an_error_names_the_damaged_file(altered, tmp_path):
    path = altered / "part-00001" / "node_x.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"altered/parts/part-00001/node_x.npy was altered"):
        copy_to_disk(altered, tmp_path, parts=[1])
    assert not (tmp_path / "parts" / "manifest.json").exists()
    copy_to_disk(altered, tmp_path, parts=[0])


def test_a_file_that_is_damaged_while_it_is_copied_is_refused(dataset_dir, tmp_path, monkeypatch):
    whole = shutil.copyfileobj
    monkeypatch.setattr(shutil, "copyfileobj", lambda source, target, length: target.write(source.read()[:-1]))
    with pytest.raises(DatasetError, match=r"parts/.*npy.copying must have \d+ bytes"):
        copy_to_disk(dataset_dir, tmp_path, parts=[1])
    monkeypatch.setattr(shutil, "copyfileobj", whole)
    salientpp.load(copy_to_disk(dataset_dir, tmp_path, parts=[1]), part_id=1, verify="full")


# --- refusals ---------------------------------------------------------------------------------------------


def test_an_existing_path_is_left_unchanged(dataset_dir, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.txt").write_text("mine")
    with pytest.raises(DatasetError, match="is not a copy of a dataset directory, so nothing is written there"):
        copy_to_disk(dataset_dir, tmp_path, parts=[0])
    assert files_of(tmp_path / "parts") == ["mine.txt"]
    with pytest.raises(ValueError, match="cannot be copied onto itself"):
        copy_to_disk(dataset_dir, dataset_dir.parent, parts=[0])


def test_a_copy_of_other_contents_is_refused(dataset_dir, tmp_path):
    other = salientpp.partition(
        random_data(seed=1), NUM_PARTS, tmp_path / "other" / "parts", [5, 3], 8, method="random"
    ).root
    copy_to_disk(other, tmp_path, parts=[0])
    with pytest.raises(DatasetError, match="is a copy of other contents"):
        copy_to_disk(dataset_dir, tmp_path, parts=[0])


def test_a_disk_without_room_is_an_error_before_anything_is_copied(dataset_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DatasetError, match=r"needs \d+\.\d MB more, but its disk has only 0.0 MB left"):
        copy_to_disk(dataset_dir, tmp_path, parts=[0])
    assert files_of(tmp_path / "parts") == ["parts.json"]


def test_the_parts_to_copy_must_be_known_and_exist(dataset_dir, tmp_path):
    with pytest.raises(ValueError, match="has 3 parts and this process serves none of them"):
        copy_to_disk(dataset_dir, tmp_path)
    with pytest.raises(ValueError, match=r"parts must be in \[0, 3\), got 3"):
        copy_to_disk(dataset_dir, tmp_path, parts=[3])
    with pytest.raises(ValueError, match=r"parts must be in \[0, 3\), got none"):
        copy_to_disk(dataset_dir, tmp_path, parts=[])
    with pytest.raises(DatasetError, match="is not a dataset directory"):
        copy_to_disk(tmp_path, tmp_path / "there", parts=[0])


# --- a directory that other users can write to --------------------------------------------------------------


def test_a_lock_that_is_a_link_does_not_empty_its_target(dataset_dir, tmp_path):
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / ".parts.lock").symlink_to(victim)
    with pytest.raises(
        DatasetError, match=r"\.parts\.lock must be a regular file, because it is the lock of this copy"
    ):
        copy_to_disk(dataset_dir, tmp_path / "disk", parts=[0])
    assert victim.read_text() == "years of work" and not (tmp_path / "disk" / "parts").exists()


@pytest.mark.parametrize("kind", ["text", "hard link", "pipe", "socket", "folder"])
def test_an_existing_lock_file_is_neither_emptied_nor_waited_for(dataset_dir, tmp_path, kind):
    lock, victim = tmp_path / ".parts.lock", tmp_path / "victim"
    victim.write_text("kept")
    if kind == "text":
        lock.write_text("kept")
    elif kind == "hard link":
        lock.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "socket":
        os.mknod(lock, stat.S_IFSOCK | 0o600)
    else:
        lock.mkdir()
    if kind in ("text", "hard link"):
        salientpp.load(copy_to_disk(dataset_dir, tmp_path, parts=[0]), part_id=0, verify="full")
        assert lock.read_text() == "kept" and victim.read_text() == "kept"
    else:
        with pytest.raises(DatasetError, match="must be a regular file"):
            copy_to_disk(dataset_dir, tmp_path, parts=[0])


def test_nothing_is_written_through_a_link_planted_in_a_copy(dataset_dir, tmp_path):
    copy = copy_to_disk(dataset_dir, tmp_path / "disk", parts=[0])
    victim, elsewhere = tmp_path / "victim", tmp_path / "elsewhere"
    victim.write_text("kept")
    elsewhere.mkdir()
    for name in ("parts.json.copying", "manifest.json.copying", "part-00001/vip.npy.copying"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).symlink_to(victim)
    (copy / "part-00002").symlink_to(elsewhere)
    salientpp.load(copy_to_disk(dataset_dir, tmp_path / "disk", parts=[1]), part_id=1, verify="full")
    with pytest.raises(DatasetError, match="part-00002 is a symbolic link, and files are never written through a link"):
        copy_to_disk(dataset_dir, tmp_path / "disk", parts=[2])
    assert victim.read_text() == "kept" and list(elsewhere.iterdir()) == []


def test_a_copy_may_be_a_link_to_another_disk(dataset_dir, tmp_path):
    (tmp_path / "large" / "folder").mkdir(parents=True)
    (tmp_path / "parts").symlink_to(tmp_path / "large" / "folder")
    for _ in range(2):
        copy = copy_to_disk(dataset_dir, tmp_path, parts=[2])
        assert copy.is_symlink() and (tmp_path / "large" / "folder" / "manifest.json").is_file()
        salientpp.load(copy, part_id=2, verify="full")
        (copy / "manifest.json").unlink()  # so that the next call copies everything again


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_the_copys_path_and_info_describes_it(dataset_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", str(tmp_path), "--part", "0", "--part", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'parts'}\n" and "copying part-00002/node_x.npy" in err and "part-00001" not in err
    assert cli.main(["info", "--verify", str(tmp_path / "parts")]) == 0
    assert "part 0, 2 of 3" in capsys.readouterr().out


def test_the_command_takes_the_part_from_the_launcher(dataset_dir, tmp_path, capsys, monkeypatch):
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", str(tmp_path)]) == 2
    assert "this process is not a rank of a job" in capsys.readouterr().err
    for name, value in {
        "RANK": 1,
        "WORLD_SIZE": 3,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 3,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "parts" / "parts.json").read_text()) == {"parts": [1]}
    monkeypatch.delenv("RANK")
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", str(tmp_path)]) == 2
    assert "RANK is missing" in capsys.readouterr().err
