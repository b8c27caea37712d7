"""Laws of a stopped partition: the same call continues after the last finished step, and produces the same bytes. No other call takes over its work."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from directories import contents
from forked_python import python
from graphs import random_data, random_hetero
from large_graph import generate
from steps import Told, stopped_after_each_step

import salientpp
from salientpp.datasets import load_dataset
from salientpp.store.directory import writer
from salientpp.store.directory.journal import JOURNAL, has_steps
from salientpp.store.directory.task import identify

ROOT = Path(__file__).parents[3]

_KILLED = """
import sys
sys.path.insert(0, "tests/support")
from pathlib import Path
import torch
import salientpp
from killed import killed_at
from steps import Told
from salientpp.datasets import load_dataset
from salientpp.store.directory import journal, unfinished, writer
from salientpp.store.directory.step_writer import StepWriter

dataset, method, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
torch.set_num_threads(1)  # KaMinPar's parts vary with more

def run(root):
    typed = {"seeds": ("paper", "train"), "replicate": ("institution",)} if dataset.startswith("synthetic-mag") else {}
    on_step = lambda step: print(step, flush=True)
    salientpp.partition(load_dataset(dataset), 3, root, [4, 3], 16, method=method, store_as={"x": "int8"}, progress=Told(on_step), **typed)

points = [(journal.Journal, "_save", 1, False), (writer, "_assign", 1, True), (journal.os, "replace", 2, False), (journal.Journal, "note", 1, True),
          (writer, "_number", 1, True), (StepWriter, "write", 2, True), (journal.os, "replace", 3, True), (journal.Journal, "note", 1, True),
          (journal.Journal, "drop", 1, True), (StepWriter, "write", 1, False), (journal.Journal, "note", 1, True), (journal.Journal, "_add", 2, False),
          (StepWriter, "write", 2, True), (journal.Journal, "note", 2, True), (journal.Journal, "finish", 1, False), (journal.Journal, "finish", 1, True),
          (unfinished, "move_into_place", 1, False)]
for point in points:
    killed_at(*point, lambda: run(folder / "d"))
    assert not (folder / "d").exists() and sorted(path.name for path in folder.iterdir()) == [".d.writing"]
    print("killed", flush=True)
run(folder / "d")
print("done", flush=True)
run(folder / "whole")
"""


@pytest.mark.parametrize(
    ("method", "typed"),
    [
        pytest.param("metis", False, id="metis-one type", marks=pytest.mark.rare),
        pytest.param("kaminpar", True, id="kaminpar-several types"),
        pytest.param("metis", True, id="metis-several types", marks=pytest.mark.rare),
        pytest.param("kaminpar", False, id="kaminpar-one type", marks=pytest.mark.rare),
    ],
)
def test_a_partition_killed_again_and_again_ends_in_the_same_bytes(tmp_path, method, typed):
    if method == "kaminpar":
        pytest.importorskip("kaminpar")
    dataset = "synthetic-mag:num_papers=300,num_features=32"
    if not typed:
        dataset = f"converted:{generate(tmp_path / 'graph', num_vertices=400, num_features=32, train_fraction=0.2)}"
    (tmp_path / "to").mkdir()
    done = subprocess.run(
        [python(), "-c", _KILLED, dataset, method, str(tmp_path / "to")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stopped, whole = done.stdout.split("done\n")
    runs = stopped.split("killed\n")
    assert len(runs) == 18
    assert [i for i, steps in enumerate(runs) if "assigning" in steps] == [1, 2, 3], (
        "the step never runs again once it is recorded"
    )
    assert [i for i, steps in enumerate(runs) if "computing inclusion" in steps] == [4, 5, 6, 7], (
        "the step never runs again once it is recorded"
    )
    assert "assigning" in whole and "computing inclusion" in whole
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["d", "whole"]
    assert contents(tmp_path / "to" / "d") == contents(tmp_path / "to" / "whole")
    salientpp.load(tmp_path / "to" / "d", verify="full")


def test_after_an_error_of_a_full_disk_the_same_command_continues(tmp_path, monkeypatch):
    data, root = random_data(60, 300), tmp_path / "d"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OSError,
            match=r"cannot be written \(No space left on device\); the disk is full: make room. Then repeat the same",
        ):
            salientpp.partition(data, 2, root, [3, 2], 8)
    steps = []
    salientpp.partition(data, 2, root, [3, 2], 8, progress=Told(steps.append))
    assert not [step for step in steps if "assigning" in step]
    assert contents(root) == contents(salientpp.partition(data, 2, tmp_path / "whole", [3, 2], 8).root)


def test_no_step_runs_twice(tmp_path, monkeypatch):
    """Each run finishes one step and is stopped in the next."""
    data, root = random_data(60, 300, edge_attributes=True), tmp_path / "d"

    def the_unfinished_folder_exists(runs):
        assert (tmp_path / ".d.writing").exists() == (runs > 0)

    steps = stopped_after_each_step(
        monkeypatch, lambda: salientpp.partition(data, 2, root, [3, 2], 8), the_unfinished_folder_exists
    )
    assert steps == ["assignment", "numbering", "indices.npy", "edge_edge_attr.npy", "part 0", "part 1"]
    assert contents(root) == contents(salientpp.partition(data, 2, tmp_path / "whole", [3, 2], 8).root)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Returns a function that stops a partition while it writes the files of parts."""

    def begin(data, root=tmp_path / "d", **options) -> None:
        def stop(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(writer, "write_vertices", stop)
            with pytest.raises(KeyboardInterrupt):
                salientpp.partition(data, 2, root, [3, 2], 8, **options)
        assert has_steps(root.parent / f".{root.name}.writing")

    return begin


@pytest.mark.parametrize(
    "change, text",
    [
        ({"num_parts": 3}, "num_parts was 2, is 3"),
        ({"num_neighbors": [3, 3]}, r"num_neighbors was \[\[3, 2\]\], is \[\[3, 3\]\]"),
        ({"batch_size": 9}, "batch_size was 8, is 9"),
        ({"seed": 1}, "seed was 0, is 1"),
        (
            {"tolerance": 0.1, "seeds": "val"},
            r'seeds was \[null, "train"\], is \[null, "val"\]; tolerance was 0.05, is 0.1',
        ),
        ({"method": "random"}, 'method was "metis", is "random"; refine was true, is false'),
        ({"method": torch.arange(60) % 2, "refine": True}, 'method was "metis", is '),
        ({"edge_weights": "equal"}, 'edge_weights was "vip", is "equal"'),
        ({"order": "original"}, 'order was "vip", is "original"'),
        ({"refine": False}, "refine was true, is false"),
        ({"store_as": {"x": "fp16"}}, r'store_as was \[\], is \[\[null, "x", "fp16"\]\]'),
        ({"store_as": {"far": "int8"}}, r'store_as was \[\], is \[\[null, "far", "int8"\]\]'),
        ({"x": ...}, "x of the data differ"),
        ({"edge_index": ...}, "edges, ends of edges, order of edges of the data differ"),
        ({"train_mask": ...}, "split train of the data differ"),
        ({"more": ...}, "more of the data differ"),
    ],
    ids=str,
)
def test_another_call_is_refused_or_starts_over(tmp_path, begun, change, text):
    data = random_data(60, 300, directed=True)
    data.far = torch.rand(300, 16)
    begun(data)
    before = contents(tmp_path / ".d.writing")
    arguments = {"num_parts": 2, "num_neighbors": [3, 2], "batch_size": 8}
    others = {"x": data.x + 1, "edge_index": data.edge_index.flip(0), "train_mask": ~data.train_mask, "more": data.x}
    if others.keys() & change:
        data = data.clone()
        data.update({name: others[name] for name in change})
    else:
        arguments |= change
    with pytest.raises(ValueError, match=rf"d was begun by another partition: {text}.*pass overwrite \(--overwrite\)"):
        salientpp.partition(data, root=tmp_path / "d", **arguments)
    assert contents(tmp_path / ".d.writing") == before
    salientpp.partition(data, root=tmp_path / "d", overwrite=True, **arguments)
    whole = salientpp.partition(data, root=tmp_path / "whole", **arguments)
    assert contents(tmp_path / "d") == contents(whole.root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "whole"]


def test_a_mapped_source_is_identified_by_its_files(tmp_path, begun):
    graph = generate(tmp_path / "graph", num_vertices=400, num_features=32, train_fraction=0.2)
    data = load_dataset(f"converted:{graph}")
    assert len(identify(data.x)) == 6 and identify(data.x) == identify(load_dataset(f"converted:{graph}").x)
    begun(data)
    steps = []
    salientpp.partition(load_dataset(f"converted:{graph}"), 2, tmp_path / "d", [3, 2], 8, progress=Told(steps.append))
    assert len(steps) == 2
    begun(data, tmp_path / "e")
    os.utime(graph / "n0.x.npy", (1, 1))
    with pytest.raises(ValueError, match="another partition: x of the data differ"):
        salientpp.partition(load_dataset(f"converted:{graph}"), 2, tmp_path / "e", [3, 2], 8)
    changed = load_dataset(f"converted:{graph}")
    before = identify(changed.x)
    changed.x[0, 0] += 1  # visible only in this process: the file stays unchanged
    assert len(before) == 6 and len(identify(changed.x)) == 3


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.float64]
)
def test_an_array_is_identified_by_its_values_dtype_and_shape(dtype, monkeypatch):
    from salientpp.store.directory import task

    array = torch.arange(60).view(20, 3).remainder(2).to(dtype)
    monkeypatch.setattr(task, "_PIECE_BYTES", 7)
    said = identify(array)
    assert said == identify(array.clone()) == identify(array.t().contiguous().t())
    others = [array.view(10, 6), array[1:], array.flip(0), array.to(torch.int32), torch.cat([array[:-1], array[:1]])]
    assert len({str(identify(other)) for other in [array, *others]}) == 6
    assert identify(array[:0]) != identify(array.view(10, 6)[:0])


def test_a_file_that_was_altered_is_written_again(tmp_path, begun):
    data = random_data(60, 300)
    whole = contents(salientpp.partition(data, 2, tmp_path / "whole", [3, 2], 8).root)
    for name in ("indices.npy", "part-00001/vip.npy", "original_id.npy"):
        begun(data)
        (file,) = (tmp_path / ".d.writing").glob(name)
        altered = bytearray(file.read_bytes())
        altered[-3] ^= 1
        file.write_bytes(altered)
        salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8)
        assert contents(tmp_path / "d") == whole
        (tmp_path / "d").rename(tmp_path / f"d of {name.replace('/', ' ')}")


def test_an_incomplete_line_of_the_journal_is_ignored(tmp_path, begun):
    data = random_hetero()
    begun(data)
    journal = tmp_path / ".d.writing" / JOURNAL
    noted = journal.read_text()
    journal.write_text(f'{noted}{{"step": "n0.part 0", "files": {{"part')
    salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8)
    assert contents(tmp_path / "d") == contents(salientpp.partition(data, 2, tmp_path / "whole", [3, 2], 8).root)
    begun(data, tmp_path / "e")
    journal = tmp_path / ".e.writing" / JOURNAL
    journal.write_text(journal.read_text().replace('"files"', '"pile"', 1))
    with pytest.raises(ValueError, match=rf"{JOURNAL} cannot be read \('files'\); remove .*\.e\.writing"):
        salientpp.partition(data, 2, tmp_path / "e", [3, 2], 8)
    assert journal.exists(), "an unreadable journal is not removed"


def test_one_process_writes_a_directory_and_never_into_another_users_folder(tmp_path, begun):
    import fcntl

    data = random_data(60, 300)
    begun(data)
    held = os.open(tmp_path / ".d.writing", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    before = contents(tmp_path / ".d.writing")
    with pytest.raises(ValueError, match="another process is writing .*/d; wait for it"):
        salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8)
    os.close(held)
    assert contents(tmp_path / ".d.writing") == before
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".e.writing").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"\.e\.writing is not a directory that you own; remove it, or choose another root"
    ):
        salientpp.partition(data, 2, tmp_path / "e", [3, 2], 8)
    (tmp_path / ".f.writing").mkdir()
    (tmp_path / ".f.writing" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"\.f\.writing exists and is not empty"):
        salientpp.partition(data, 2, tmp_path / "f", [3, 2], 8)
    assert stat.S_ISREG((tmp_path / ".f.writing" / "thesis.txt").stat().st_mode)
