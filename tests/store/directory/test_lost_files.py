"""Laws of deleting: only files that this package wrote are removed or replaced. Other files beside them stay, and an error names them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from directories import all_original_ids, contents, names_in
from graphs import random_data

import salientpp
from salientpp import copy_to_disk
from salientpp.datasets import convert, load_dataset
from salientpp.store.directory import unfinished, writer
from salientpp.store.directory.files import DatasetError
from salientpp.store.directory.journal import JOURNAL, Journal
from salientpp.store.directory.rewrite import rewrite_topology

MINE = {
    "thesis.txt": b"years",
    "mine.npy": b"own",
    "part-00000/mine.npy": b"own",
    "kept/notes": b"n",
    "work/a.npy": b"a",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return partition(tmp_path_factory.mktemp("whole") / "d")


def partition(root: Path, seed: int = 0, **options) -> Path:
    return salientpp.partition(random_data(60, 300), 2, root, [3, 2], 8, method="random", seed=seed, **options).root


def conversion(root: Path, **options) -> Path:
    source = root.parent / "g.npz"
    if not source.exists():
        np.savez(source, edge_index=np.array([[0, 1], [1, 2]]), x=np.ones((3, 2), np.float32))
    return convert(f"npz:{source}", root, **options)


def rewrite(root: Path, **options) -> Path:
    return rewrite_topology(root.parent / "of", root, "parts", **options).root


def add(root: Path, name: str, value: bytes = b"mine") -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(value)
    return root / name


COMMANDS: dict[str, Callable[..., Path]] = {"partition": partition, "convert": conversion, "rewrite": rewrite}


@pytest.mark.parametrize("name", [*MINE, ".manifest.json.swp", "n0.mine.npy", "indices.npy.bak"])
@pytest.mark.parametrize("command", COMMANDS)
def test_overwriting_refuses_a_directory_with_files_of_somebody_else(tmp_path, command, name):
    partition(tmp_path / "of")
    root = COMMANDS[command](tmp_path / "d")
    add(root, name)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"d also holds {name}, which no command of salientpp wrote"):
        COMMANDS[command](root, overwrite=True)
    assert contents(tmp_path) == before
    (root / name).unlink()
    if not any((root / name).parent.iterdir()):
        (root / name).parent.rmdir()
    COMMANDS[command](root, overwrite=True)
    assert {key: value for key, value in before.items() if not key.endswith(name)} == contents(tmp_path)


def test_overwriting_refuses_a_link_and_does_not_follow_it(tmp_path):
    root = partition(tmp_path / "d")
    precious = add(tmp_path / "elsewhere", "a.npy")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="d also holds linked"):
        partition(root, overwrite=True)
    assert precious.exists()


@pytest.mark.parametrize(
    "manifest", ["{}", '{"name": "a web page"}', '{"format": "salientpp-converted-graph", "files": {}}']
)
def test_a_manifest_of_another_program_is_not_a_dataset_directory(tmp_path, manifest):
    (tmp_path / "d").mkdir()
    add(tmp_path / "d", "manifest.json", manifest.encode())
    with pytest.raises(ValueError, match="is not a dataset directory, so it is not replaced"):
        partition(tmp_path / "d", overwrite=True)
    if "converted" not in manifest:
        with pytest.raises(ValueError, match="is not a converted graph, so it is not replaced"):
            conversion(tmp_path / "d", overwrite=True)
    assert names_in(tmp_path / "d") == ["manifest.json"]


def test_a_forged_manifest_removes_nothing_elsewhere(tmp_path):
    root, precious = partition(tmp_path / "d"), add(tmp_path, "precious.npy")
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["files"]["../precious.npy"] = manifest["files"]["original_id.npy"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is not a dataset directory"):
        partition(root, overwrite=True)
    assert precious.exists()


def test_a_file_that_appears_while_a_directory_is_replaced_is_kept(tmp_path, monkeypatch):
    root, move = partition(tmp_path / "d"), unfinished.move_into_place

    def moves(*arguments):
        add(root, "part-00001/late.txt")
        move(*arguments)

    monkeypatch.setattr(unfinished, "move_into_place", moves)
    with pytest.warns(UserWarning, match=r"\.d\.replaced-.* keeps the files of the replaced directory"):
        partition(root, seed=1, overwrite=True)
    (kept,) = tmp_path.glob(".d.replaced-*")
    assert contents(kept) == {"part-00001/late.txt": b"mine"}
    salientpp.load(root, verify="full")


def test_what_a_directory_keeps_is_replaced_with_it(tmp_path):
    root = partition(tmp_path / "d")
    add(root, "kept/vip-0-1-0123456789abcdef.n0.0123456789abcdef.npy")
    add(root, "kept/.vip-0-1-0123456789abcdef.n0.0123456789a.01234567")
    add(root, ".manifest.json.01234567")
    partition(root, seed=1, overwrite=True)
    assert names_in(tmp_path) == ["d"] and "kept" not in names_in(root)


def test_files_beside_unfinished_work_stay(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    conversion(tmp_path / "whole")
    for method in ("note", "finish"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Journal, method, stop)
            conversion(tmp_path / "c")
        add(tmp_path / "c", "mine.npy")
    conversion(tmp_path / "c")
    assert contents(tmp_path / "c") == {**contents(tmp_path / "whole"), "mine.npy": b"mine"}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(writer, "_assign", lambda job: add(tmp_path / ".d.writing", "mine.npy") and stop())
        partition(tmp_path / "d")
    assert contents(tmp_path / ".d.writing") == {"mine.npy": b"mine"}


def test_files_in_the_folder_of_unfinished_steps_stay(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Journal, "finish", stop)
        conversion(tmp_path / "c")
    mine = add(tmp_path / "c", "work/mine.txt")
    for overwrite in (False, True):
        with pytest.raises(
            ValueError, match=r"work/mine\.txt was not written by this command; move it away, then repeat"
        ):
            conversion(tmp_path / "c", overwrite=overwrite)
    mine.rename(tmp_path / "mine.txt")
    conversion(tmp_path / "c")
    assert not (tmp_path / "c" / "work").exists()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(writer, "_assign", lambda job: add(tmp_path / ".d.writing", "work/mine.txt") and stop())
        partition(tmp_path / "d")
    assert contents(tmp_path / ".d.writing") == {"work/mine.txt": b"mine"}


# --- copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MINE, "thesis/chapter.tex"])
@pytest.mark.parametrize("parts", ['{"parts": []}', '{"parts": [1], "of": "a bicycle"}', "[]", "wheels"])
def test_a_folder_with_a_file_called_parts_json_is_not_emptied(whole, tmp_path, name, parts):
    add(tmp_path / "d", "parts.json", parts.encode())
    add(tmp_path / "d", name)
    before = contents(tmp_path / "d")
    words = (
        "also holds .* does not belong to it" if parts == '{"parts": []}' else "is not a copy of a dataset directory"
    )
    with pytest.raises(DatasetError, match=words):
        copy_to_disk(whole, tmp_path, parts=[0])
    assert contents(tmp_path / "d") == before


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["indices.npy", "part-00000/node_x.npy", "part-00000/vip.npy", "manifest.json"])
@pytest.mark.parametrize("damage", [_flip, lambda path: os.truncate(path, path.stat().st_size - 8), Path.unlink])
def test_damaged_files_of_a_copy_are_copied_again(whole, tmp_path, damage, name):
    copy = copy_to_disk(whole, tmp_path, parts=[0])
    before = contents(copy)
    damage(copy / name)
    assert copy_to_disk(whole, tmp_path, parts=[0]) == copy
    assert contents(copy) == before


def test_every_byte_of_a_copy_is_compared_on_request(tmp_path):
    data = random_data(60, 300)
    data.wide = torch.zeros(60, 200_000)
    root = salientpp.partition(data, 1, tmp_path / "d", [3, 2], 8).root
    copy = copy_to_disk(root, tmp_path / "to")
    rows = copy / "part-00000" / "node_wide.npy"
    with rows.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\1")
    with pytest.raises(DatasetError, match="was altered: .* copy it again"):
        salientpp.load(copy, verify="full")
    assert copy_to_disk(root, tmp_path / "to", verify="full") == copy
    salientpp.load(copy, verify="full")
    with pytest.raises(ValueError, match="verify must be 'quick' or 'full', got 'some'"):
        copy_to_disk(root, tmp_path / "to", verify="some")


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [190, 220, 240, 251, 255])
@pytest.mark.parametrize("letter", ["d", "é"])
def test_a_root_may_have_any_name_that_the_disk_allows(whole, tmp_path, length, letter):
    root = tmp_path / (letter * (length // len(letter.encode())))
    partition(root)
    partition(root, seed=1, overwrite=True)
    assert names_in(tmp_path) == [root.name]
    salientpp.load(copy_to_disk(root, tmp_path / "to", parts=[0]), part_id=0)


# --- steps that follow from a repeated step --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["original_id.npy", "part-00001/vip.npy", "part-00000/vip.npy"])
@pytest.mark.parametrize("again", [False, True], ids=["stopped once", "stopped again"])
def test_steps_after_a_repeated_step_are_repeated(tmp_path, monkeypatch, name, again):
    """A partitioner with several threads gives other parts for the same seed. Here, every call does."""
    data, assigned = random_data(60, 300, edge_attributes=True), []

    def assigns(job):
        assigned.append(torch.randint(2, (60,), generator=torch.Generator().manual_seed(len(assigned))))
        job.options.__dict__["method"] = assigned[-1]
        return assign(job)

    def stop(*arguments):
        raise KeyboardInterrupt

    assign, task = writer._assign, {"method": "kaminpar"}
    monkeypatch.setattr(writer, "_assign", assigns)
    monkeypatch.setattr(writer.Job, "task", lambda job: task)

    def run(**patches) -> salientpp.PartitionedGraph | None:
        with monkeypatch.context() as patched:
            for each, value in patches.items():
                patched.setattr(writer, each, value)
            if not patches:
                return salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8, method="random")
            with pytest.raises(KeyboardInterrupt):
                salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8, method="random")
        return None

    run(write_vertices=stop)
    os.truncate(tmp_path / ".d.writing" / name, (tmp_path / ".d.writing" / name).stat().st_size - 8)
    if again:
        run(write_edges=stop)
    part = run()
    assert part is not None and len(assigned) == 2
    ids = all_original_ids(part)
    indptr, indices = part.graph.indptr, part.graph.indices
    targets = torch.repeat_interleave(torch.arange(60), indptr.diff())
    got = sorted(zip(ids[indices.long()].tolist(), ids[targets].tolist()))
    assert got == sorted(zip(*data.edge_index.tolist()))
    salientpp.load(tmp_path / "d", verify="full")


def test_a_journal_of_an_earlier_release_that_repeated_a_step_is_not_believed(tmp_path, monkeypatch):
    """It noted a repeated step again, and kept the steps after it."""

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Journal, "finish", stop)
        conversion(tmp_path / "c")
    journal = tmp_path / "c" / JOURNAL
    lines = [line for line in journal.read_text().splitlines() if '"known"' not in line]
    (first,) = (line for line in lines if '"step": "n0.x"' in line)
    journal.write_text("\n".join([*lines, first]) + "\n")
    steps = []
    monkeypatch.setattr(Journal, "note", lambda self, step, *rest: steps.append(step) or note(self, step, *rest))
    conversion(tmp_path / "c")
    assert "e0.lists" in steps and "n0.x" not in steps
    assert load_dataset(f"converted:{tmp_path / 'c'}").num_nodes == 3


note = Journal.note
