"""Laws of rewriting: the result has the bytes that ``partition`` writes in that form, a stopped run continues, and a damaged directory is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import BATCH_SIZE, FANOUTS, contents, edit_manifest, names_in
from forked_python import python
from graphs import random_data, random_hetero
from steps import Told, stopped_after_each_step
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import cli
from salientpp.store.directory import files, rewrite
from salientpp.store.directory.files import DatasetError

ROOT = Path(__file__).parents[3]
CITES = ("paper", "cites", "paper")


def hetero() -> HeteroData:
    data = random_hetero(seed=3)
    data["paper"].train_mask = torch.arange(60) % 3 == 0
    data["paper"].half = torch.rand(60, 64).bfloat16()
    data["nobody"].num_nodes = 0
    data["nobody", "reads", "paper"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    data[CITES].half, data[CITES].far = torch.rand(300, 2).bfloat16(), torch.rand(300, 32)
    return data


def one_type() -> Data:
    data = random_data(60, 300, directed=True, edge_attributes=True)
    data.age, data.when = torch.arange(60) % 9, torch.arange(300) % 11
    data.wide, data.far = torch.rand(60, 32), torch.rand(300, 3, 8)
    return data


def write(data: Data | HeteroData, num_parts: int, root: Path, topology: str, **options: Any) -> Path:
    salientpp.partition(data, num_parts, root, FANOUTS, BATCH_SIZE, topology=topology, **options)
    return root


CASES = {
    "one type": (one_type, {}),
    "one part": (one_type, {}),
    "edge split": (one_type, {"edge_split": {"train": torch.arange(0, 300, 7)}}),
    "vertex times": (one_type, {"time_attr": "age"}),
    "edge times": (one_type, {"time_attr": "when"}),
    "narrow": (one_type, {"store_as": {"wide": "int8"}}),
    "narrow edges": (one_type, {"store_as": {"far": "int8", "wide": "bf16"}}),
    "no edges": (lambda: Data(x=torch.rand(9, 2), edge_index=torch.empty(2, 0, dtype=torch.int64)), {}),
    "several types": (hetero, {"replicate": ("venue", "author"), "edge_split": {CITES: {"train": torch.arange(9)}}}),
    "types with times": (
        hetero,
        {"time_attr": "time", "store_as": {("paper", "half"): "int8", (CITES, "far"): "int4"}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rewriting_gives_the_bytes_that_partition_writes(tmp_path, monkeypatch, case):
    make, options = CASES[case]
    num_parts = 1 if case == "one part" else 3
    data = make()
    whole, parts = (write(data, num_parts, tmp_path / form, form, **options) for form in ("whole", "parts"))
    before = contents(whole)
    sizes = (64 * 2**20, 40) if case in ("one type", "several types") else (40,)
    for piece_bytes in sizes:
        monkeypatch.setattr(rewrite, "_PIECE_BYTES", piece_bytes)
        folder = tmp_path / f"pieces of {piece_bytes}"
        folder.mkdir()
        part = salientpp.rewrite_topology(whole, folder / "a", "parts")
        assert part.topology == "parts" and part.part_id == (0 if num_parts == 1 else None)
        assert contents(part.root) == contents(parts), piece_bytes
        again = salientpp.rewrite_topology(part.root, folder / "b", "whole")
        assert again.topology == "whole" and contents(again.root) == before == contents(whole), piece_bytes
        salientpp.load(folder / "a", verify="full")
        assert names_in(folder) == ["a", "b"]
    assert names_in(tmp_path) == sorted(["parts", *(f"pieces of {size}" for size in sizes), "whole"])


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_no_step_runs_twice(tmp_path, monkeypatch, form):
    """Each run finishes one step and is stopped in the next."""
    options = CASES["several types"][1]
    data = hetero()
    other = "whole" if form == "parts" else "parts"
    source, wanted = (
        write(data, 2, tmp_path / other, other, **options),
        write(data, 2, tmp_path / form, form, **options),
    )

    def only_the_unfinished_folder_exists(runs):
        assert (tmp_path / ".d.writing").exists() == (runs > 0) and not (tmp_path / "d").exists()

    steps = stopped_after_each_step(
        monkeypatch,
        lambda: salientpp.rewrite_topology(source, tmp_path / "d", form),
        only_the_unfinished_folder_exists,
    )
    assert len(steps) == len(set(steps)) > 15
    assert contents(tmp_path / "d") == contents(wanted)


def test_a_stopped_partition_in_parts_continues(tmp_path, monkeypatch):
    data, options = hetero(), CASES["several types"][1]
    wanted = write(data, 2, tmp_path / "whole run", "parts", **options)

    def another_form_is_refused(runs):
        if runs == 5:
            with pytest.raises(ValueError, match='topology was "parts", is "whole"'):
                write(data, 2, tmp_path / "d", "whole", **options)

    steps = stopped_after_each_step(
        monkeypatch, lambda: write(data, 2, tmp_path / "d", "parts", **options), another_form_is_refused
    )
    assert len(steps) == len(set(steps)) and contents(tmp_path / "d") == contents(wanted)


_KILLED = """
import sys
sys.path.insert(0, "tests/support")
from pathlib import Path
import salientpp
from killed import killed_at
from salientpp.store.directory import journal, unfinished
from salientpp.store.directory.step_writer import StepWriter

folder = Path(sys.argv[1])
run = lambda: salientpp.rewrite_topology(folder / "whole", folder / "d", "parts")
points = [(journal.Journal, "_save", 1, False), (StepWriter, "write", 3, True), (journal.os, "replace", 3, True), (journal.Journal, "note", 1, True),
          (journal.Journal, "note", 2, False), (journal.Journal, "_add", 1, True), (StepWriter, "write", 5, True), (journal.Journal, "finish", 1, False),
          (journal.Journal, "finish", 1, True), (unfinished, "move_into_place", 1, False)]
for point in points:
    killed_at(*point, run)
    assert not (folder / "d").exists() and (folder / ".d.writing").exists()
run()
"""


def test_a_rewriting_killed_again_and_again_ends_in_the_same_bytes(tmp_path):
    options = CASES["several types"][1]
    data = hetero()
    for form in ("whole", "parts"):
        write(data, 3, tmp_path / form, form, **options)
    done = subprocess.run([python(), "-c", _KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "d") == contents(tmp_path / "parts")
    assert names_in(tmp_path) == ["d", "parts", "whole"]


def test_a_wrong_request_is_refused_without_leaving_files(tmp_path):
    root = write(one_type(), 2, tmp_path / "d", "whole")
    copy = salientpp.copy_to_disk(root, tmp_path / "disk", parts=[1])
    mixed = hetero()
    mixed[CITES].edge_time = mixed[CITES].edge_time.float()
    write(mixed, 2, tmp_path / "mixed", "whole", time_attr="edge_time")
    (tmp_path / "file").write_text("")
    before = names_in(tmp_path)
    for source, to, form, error, text in [
        (root, tmp_path / "new", "part", ValueError, "topology must be 'whole' or 'parts', got 'part'"),
        (root, tmp_path / "new", "whole", ValueError, "d has topology='whole' already; copy the directory"),
        (root, tmp_path / "disk" / ".." / "d", "parts", ValueError, "cannot be rewritten onto itself"),
        (root, tmp_path / "mixed", "parts", ValueError, "mixed exists; pass overwrite=True"),
        (root, tmp_path / "file", "parts", ValueError, "file exists; pass overwrite=True"),
        (copy, tmp_path / "new", "parts", DatasetError, "is a copy without part 0; its parts are 1"),
        (tmp_path / "mixed", tmp_path / "new", "parts", ValueError, "times of edges in parts must be integers in all"),
        (tmp_path / "file", tmp_path / "new", "parts", DatasetError, "is not a dataset directory"),
    ]:
        with pytest.raises(error, match=text):
            salientpp.rewrite_topology(source, to, form)
        assert names_in(tmp_path) == before


def test_a_damaged_file_is_named(tmp_path):
    root = write(one_type(), 2, tmp_path / "d", "parts")
    for number, name in enumerate(("part-00001/e0.indices.npy", "part-00000/n0.node_x.npy", "n0.original_id.npy")):
        damaged = shutil.copytree(root, tmp_path / "damaged", dirs_exist_ok=True)
        raw = bytearray((damaged / name).read_bytes())
        raw[-1] ^= 1
        (damaged / name).write_bytes(raw)
        # Sampled checksums miss the change, as they may in a large file.
        quick = files.quick_checksum(damaged / name)
        edit_manifest(damaged, lambda m: m["files"][name].update(quick=quick), checksum=True)
        with pytest.raises(DatasetError, match=f"{name} was altered: its checksum does not match"):
            salientpp.rewrite_topology(damaged, tmp_path / f"to {number}", "whole")
        assert not (tmp_path / f"to {number}").exists()


def test_an_existing_directory_is_replaced_on_request(tmp_path):
    data = one_type()
    whole, parts = (write(data, 2, tmp_path / form, form) for form in ("whole", "parts"))
    wanted, steps = contents(parts), []
    write(random_data(20, 40), 2, tmp_path / "d", "whole")
    salientpp.rewrite_topology(whole, tmp_path / "d", "parts", overwrite=True, progress=Told(steps.append))
    assert contents(tmp_path / "d") == wanted and "writing e0.indices.npy" in steps


def test_the_command_rewrites_a_directory(tmp_path, capsys):
    data = one_type()
    whole, parts = (write(data, 2, tmp_path / form, form) for form in ("whole", "parts"))
    assert cli.main(["rewrite", str(whole), str(tmp_path / "d"), "--topology", "parts"]) == 0
    assert "in parts" in capsys.readouterr().out
    assert contents(tmp_path / "d") == contents(parts)
    assert cli.main(["rewrite", str(whole), str(tmp_path / "d"), "--topology", "parts"]) == 2
    assert "exists; pass --overwrite to replace it" in capsys.readouterr().err
    assert cli.main(["info", str(whole)]) == 0 and "topology             whole" in capsys.readouterr().out
