"""Laws of the command: it does what the package does, exits with 0 or 2, and reports a mistake in one line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import inspect
import io
import json
import os
import queue
import random
import re
import resource
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from distributed import HANG
from rare import rare
from torch_geometric.data import Data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, cli, files
from salientpp.cli import terminal
from salientpp.cli.main import SUBCOMMANDS, _parser
from salientpp.datasets import load_dataset, synthetic
from salientpp.loader.options import OPTIONS
from salientpp.vip.names import POLICY_NAMES
from salientpp.vip.policies import POLICIES

ROOT = Path(__file__).parents[2]
DATASET = "synthetic:num_vertices=2000,num_features=8"


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory) -> Path:
    data = synthetic(num_vertices=2000, num_features=8)
    return salientpp.partition(data, 4, tmp_path_factory.mktemp("cli") / "d", [15, 10, 5], 1024).root


@pytest.fixture
def npz_file(tmp_path) -> Path:
    """A ring of 50 vertices, stored once per undirected edge."""
    ids = np.arange(50)
    np.savez(
        tmp_path / "ring.npz",
        edge_index=np.stack([ids, (ids + 1) % 50]),
        x=np.repeat(ids.astype(np.float16)[:, None], 2, axis=1),
        y=ids % 3,
        train_idx=ids[:20],
        val_idx=ids[20:30],
        test_idx=ids[30:],
        directed=np.array(False),
    )
    return tmp_path / "ring.npz"


# --- analyze ----------------------------------------------------------------------------------------------


def _analyzed(capsys, tmp_path, *arguments) -> dict:
    file = tmp_path / "figures.json"
    few = "--policies", "vip", "--replication-factors", "0,.1"
    assert run(capsys, "analyze", *arguments, *few, "--predict-only", "--json", file)[0] == 0
    return json.loads(file.read_text())


def test_analyze_takes_the_workload_of_a_dataset_directory_by_default(capsys, tmp_path):
    assert (
        run(capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, "--num-neighbors", "4,3", "--batch-size", 37)[0]
        == 0
    )
    found = _analyzed(capsys, tmp_path, tmp_path / "d")
    assert (found["batch_size"], found["seeds"], found["results"][0]["num_neighbors"]) == (37, "train", [4, 3])
    asked = _analyzed(capsys, tmp_path, tmp_path / "d", "--num-neighbors", "2", "--batch-size", 5, "--seeds", "val")
    assert (asked["batch_size"], asked["seeds"], asked["results"][0]["num_neighbors"]) == (5, "val", [2])
    plain = _analyzed(capsys, tmp_path, DATASET, "--parts", 2)
    assert (plain["batch_size"], plain["seeds"], plain["results"][0]["num_neighbors"]) == (1024, "train", [15, 10, 5])


def test_sums_are_counted_with_partial_aggregation_only(capsys, tmp_path, dataset_dir):
    call = [
        "analyze",
        str(dataset_dir),
        "--num-neighbors=5,5",
        "--batch-size=64",
        "--replication-factors=0,.2",
        "--policies=vip",
        "--epochs=1",
    ]
    assert cli.main([*call, "--partial-aggregation", "--json", str(tmp_path / "a.json")]) == 0
    shown, figures = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert "sums instead of rows" in shown and "partial_aggregation leaves" in shown
    bare, cached = (volume for volume in figures["results"] if volume["way"] == "sums")
    assert bare["replication_factor"] == 0
    assert cached["remote_bytes_per_epoch"] < bare["remote_bytes_per_epoch"] < bare["summed"]["bytes_without"]
    without = figures["results"][0]["remote_rows_per_epoch"] * (figures["row_bytes"][""] + 4)
    assert bare["summed"]["bytes_without"] == without
    whole, some, _ = figures["copies"]
    assert "rows and sums, share of rows without" in shown
    assert whole["device_fraction"] == 0 and some["rows_without"] < whole["rows_without"] and whole["share"] < 1
    assert cli.main([*call, "--json", str(tmp_path / "b.json")]) == 0
    without = json.loads((tmp_path / "b.json").read_text())
    ways = {volume["way"] for volume in without["results"]}
    assert "sums" not in ways and without["copies"] == [] and "sums" not in capsys.readouterr().out
    assert cli.main([*call, "--partial-aggregation", "--predict-only"]) == 2
    assert "leave predict_only out" in capsys.readouterr().err
    assert cli.main([*call, "--partial-aggregation", "--send-as", "x=int8"]) == 2
    assert "send_as sends them in another; leave one of them out" in capsys.readouterr().err
    assert cli.main([*call, "--partial-aggregation", "--replace"]) == 2
    assert "--partial-aggregation cannot be combined with --replace" in capsys.readouterr().err


def test_analyze_takes_a_graph_without_features(capsys, tmp_path):
    np.savez(tmp_path / "bare.npz", edge_index=np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    arguments = (f"npz:{tmp_path / 'bare.npz'}", "--parts", 2, "--method", "random", "--batch-size", 2)
    assert "seeds must be 'all' or a split of the data (it has none), got 'train'" in mistake(
        capsys, "analyze", *arguments, "--seeds", "train"
    )
    code, out, _ = run(capsys, "analyze", *arguments, "--epochs", 1)  # without a training split all vertices are seeds
    assert code == 0 and "4 vertices, 4 edges" in out


# --- partition and info ----------------------------------------------------------------------------------


def test_partition_writes_the_same_directory_as_the_function(capsys, tmp_path, dataset_dir):
    code, out, err = run(capsys, "partition", DATASET, tmp_path / "d", "--parts", 4)
    assert code == 0
    assert salientpp.load(tmp_path / "d", verify="full").fingerprint == salientpp.load(dataset_dir).fingerprint
    for word in (
        "loading synthetic",
        "assigning 2000 vertices to 4 parts by metis, refined",
        "computing inclusion probabilities",
        "done",
    ):
        assert word in err, "progress goes to stderr"
        assert word not in out
    assert "2,000 vertices, 40,000 edges" in out
    assert "x float32 [8], y int64" in out


@pytest.mark.parametrize(
    "words, options",
    [
        (["--method", "random", "--refine"], {"method": "random", "refine": True}),
        (["--method", "metis", "--edge-weights", "equal", "--no-refine"], {"method": "metis", "edge_weights": "equal", "refine": False}),
        (["--order", "original"], {"order": "original"}),
    ],
)  # fmt: skip
def test_options_of_partition_reach_the_function(capsys, tmp_path, words, options):
    code, _, _ = run(
        capsys,
        "partition",
        DATASET,
        tmp_path / "d",
        "--parts",
        3,
        *words,
        "--num-neighbors=-1,4",
        "--batch-size",
        64,
        "--tolerance",
        0.2,
        "--seed",
        9,
    )
    assert code == 0
    expected = salientpp.partition(
        synthetic(num_vertices=2000, num_features=8),
        3,
        tmp_path / "e",
        [-1, 4],
        64,
        tolerance=0.2,
        seed=9,
        **options,
    )
    part = salientpp.load(tmp_path / "d")
    assert part.description.partitioning == expected.description.partitioning
    assert part.fingerprint == expected.fingerprint
    assert part.manifest["workload"] == {"num_neighbors": [-1, 4], "batch_size": 64, "seeds": "train"}


def test_info_describes_the_directory(capsys, dataset_dir):
    code, out, err = run(capsys, "info", dataset_dir)
    assert code == 0 and err == ""
    part = salientpp.load(dataset_dir)
    assert str(dataset_dir) in out and "format version 1" in out
    assert "num_neighbors [15, 10, 5], batch size 1024, seeds 'train'" in out
    assert re.search("assigned by +metis, vip edge weights, refined *\n", out)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == 4
    splits = part.manifest["splits"].values()
    assert rows == [[str(p), str(part.book.size_of(p)), *(str(counts[p]) for counts in splits)] for p in range(4)]
    assert "sizes and sampled checksums match; --verify reads all" in out


MAG = "synthetic-mag:num_papers=300,num_features=4,community_size=60,papers_per_institution=100"


def test_a_graph_with_several_types_is_partitioned_described_and_copied(capsys, tmp_path):
    root = tmp_path / "d"
    options = [
        "--replicate",
        "institution",
        "--seeds",
        "paper:val",
        "--time-attr",
        "year",
        "--num-neighbors",
        "3,2",
        "--batch-size",
        16,
    ]
    code, out, err = run(capsys, "partition", MAG, root, "--parts", 2, *options)
    assert code == 0 and "assigning 603 vertices to 2 parts" in err
    expected = salientpp.partition(
        load_dataset(MAG),
        2,
        tmp_path / "e",
        [3, 2],
        16,
        replicate={"institution"},
        seeds=("paper", "val"),
        time_attr="year",
    )
    part = salientpp.load(root, verify="full")
    assert part.fingerprint == expected.fingerprint
    code, info, _ = run(capsys, "info", root)
    assert code == 0 and info.startswith(out.rstrip())
    assert "format version 2" in info and "lists ascend by      'year'" in info
    assert "num_neighbors [3, 2], batch size 16, seeds 'val' of 'paper'" in info
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in info.splitlines() if line.startswith("│")]
    assert rows[:3] == [
        ["paper", "300", "by part", "x float16 [4], y int64, year int64"],
        ["author", "300", "none", "none"],
        ["institution", "3", "none", "none"],
    ]
    assert rows[3] == ["author writes paper", "900", "none", "none"] and len(rows) == 3 + 6 + 2
    paper = part.description.vertices("paper")
    for p in range(2):
        counts = [part.books["paper"].size_of(p), *(counts[p] for counts in paper.splits.values())]
        assert rows[9 + p][:5] == [str(p), *map(str, counts)]
    code, path, _ = run(capsys, "copy-to-disk", root, "--to", tmp_path / "to", "--part", 1)
    assert code == 0
    code, info, _ = run(capsys, "info", path.strip(), "--verify")
    assert (
        code == 0 and "part 1 of 2; the figures describe the whole directory" in info and "every byte matches" in info
    )
    assert salientpp.load(path.strip(), part_id=1).typed_graph("year").node_time[0].numel() == 300


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--seeds", "author:train"], "seeds must be a split of 'author' ('all'), got 'train'"),
        (
            ["--seeds", "venue:train"],
            "seeds must name a node type of the data ('paper', 'author', 'institution'), got 'venue'",
        ),
        (
            ["--replicate", "venue"],
            "replicate must name node types of the data ('paper', 'author', 'institution'), got 'venue'",
        ),
        (["--replicate", "author", "--replicate-none"], "--replicate and --replicate-none exclude each other"),
        (["--time-attr", "month"], "The time attribute 'month' is neither a node-level or edge-level attribute"),
        (
            ["--method", "parts.npy"],
            "method must be 'auto', 'metis', 'kaminpar', 'random' or a mapping from node types",
        ),
    ],
)
def test_a_wrong_type_name_is_one_line_and_writes_nothing(capsys, monkeypatch, tmp_path, options, text):
    monkeypatch.chdir(tmp_path)
    np.save("parts.npy", np.zeros(603, dtype=np.int64))
    assert text in mistake(capsys, "partition", MAG, tmp_path / "d", "--parts", 2, *options)
    assert not (tmp_path / "d").exists()


def test_store_as_stores_rows_narrower_and_shows_the_error(capsys, tmp_path):
    wide = "synthetic:num_vertices=300,num_features=40"
    code, out, _ = run(capsys, "partition", wide, tmp_path / "d", "--parts", 2, "--store-as", "x=int8")
    assert code == 0
    part = salientpp.load(tmp_path / "d")
    stored = part.manifest["node_types"][0]["attributes"]["x"]["stored_as"]
    words = f"stored as int8: 48 bytes per row, not {part.description.node_types[0].narrow('x').wide_bytes}"
    assert words in " ".join(out.split()) and 0 < stored["relative_rms_error"] < 0.02
    assert f"root mean square {stored['relative_rms_error']:.2%} of the values'" in " ".join(out.split())
    code, info, _ = run(capsys, "info", tmp_path / "d")
    assert code == 0 and words in " ".join(info.split()) and "format version 3" in info
    code, said, _ = run(capsys, "analyze", tmp_path / "d", "--predict-only", "--replication-factors", "0,.1")
    assert code == 0 and "48 bytes per row" in said
    text = mistake(capsys, "partition", MAG, tmp_path / "e", "--parts", 2, "--store-as", "author:x=int4")
    assert "store_as must name node or edge attributes" in text and "got ('author', 'x')" in text
    for wrong in ("x", "=int8", "x="):
        with pytest.raises(SystemExit) as end:
            run(capsys, "partition", DATASET, tmp_path / "e", "--parts", 2, f"--store-as={wrong}")
        assert end.value.code == 2 and "expected an attribute and a format such as x=int8" in capsys.readouterr().err


def test_options_of_types_are_refused_for_a_homogeneous_graph(capsys, tmp_path):
    for options, text in (
        (["--replicate", "paper"], "replicate names types of a HeteroData, got 'paper'"),
        (
            ["--seeds", "paper:train"],
            "seeds of a homogeneous graph must be the name of a split, got ('paper', 'train')",
        ),
    ):
        assert text in mistake(capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, *options)
    code, out, _ = run(capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, "--seeds", "val", "--method=random")
    assert code == 0 and "seeds 'val'" in out and "format version 1" in out


def test_analyze_takes_several_types_only_as_a_dataset_directory(capsys):
    text = mistake(capsys, "analyze", MAG, "--parts", 2)
    assert "has several vertex types, which are counted only on a dataset directory" in text


def test_verify_reads_every_byte(capsys, tmp_path):
    """The file has 6 MiB, because the quick check reads smaller files completely."""
    data = Data(edge_index=torch.tensor([[0], [1]]), x=torch.zeros(12_000, 128))
    root = tmp_path / "d"
    salientpp.partition(data, 1, root, [2], 4)
    code, out, _ = run(capsys, "info", root, "--verify")
    assert code == 0 and "every byte matches its checksum" in out
    with (root / "part-00000" / "node_x.npy").open("r+b") as file:
        file.seek(64 * 1024 + 100)
        file.write(b"\1")
    assert run(capsys, "info", root)[0] == 0
    assert "node_x.npy was altered: its checksum does not match the manifest" in mistake(
        capsys, "info", root, "--verify"
    )


def test_partition_takes_an_npz_file(capsys, tmp_path, npz_file):
    code, out, _ = run(
        capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 2, "--num-neighbors", "3", "--batch-size", 4
    )
    assert code == 0
    assert "50 vertices, 100 edges" in out and "x float16 [2], y int64" in out
    part = salientpp.load(tmp_path / "d")
    x = torch.cat([part.node_rows(p)["x"] for p in range(2)])
    assert torch.equal(x[:, 0].long(), part.original_id(torch.arange(50)))
    assert {name: sum(counts) for name, counts in part.manifest["splits"].items()} == {
        "train": 20,
        "val": 10,
        "test": 20,
    }


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16])
def test_partition_keeps_a_given_assignment(capsys, tmp_path, npz_file, dtype):
    given = (np.arange(50) % 3).astype(dtype)
    np.save(tmp_path / "parts.npy", given)
    code, _, _ = run(
        capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 3, "--method", tmp_path / "parts.npy"
    )
    assert code == 0
    part = salientpp.load(tmp_path / "d")
    ids = torch.arange(50)
    assert torch.equal(part.book.owner(ids), torch.from_numpy(given.astype(np.int64))[part.original_id(ids)])


def test_overwrite_replaces_a_dataset_directory(capsys, tmp_path, npz_file):
    assert run(capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 2)[0] == 0
    line = mistake(capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 3)
    assert line.startswith(f"salientpp partition: {tmp_path / 'd'} exists; ")
    assert salientpp.load(tmp_path / "d").num_parts == 2
    assert run(capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 3, "--overwrite")[0] == 0
    assert salientpp.load(tmp_path / "d").num_parts == 3


def test_brackets_in_a_path_are_printed_as_they_are(capsys, tmp_path, npz_file):
    root = tmp_path / "[bold]run[" / "v2]"
    code, out, err = run(capsys, "partition", f"npz:{npz_file}", root, "--parts", 2)
    assert code == 0 and str(root) in out
    odd = tmp_path / "[red]ring[" / "red].npz"
    odd.parent.mkdir()
    shutil.copy(npz_file, odd)
    code, _, err = run(capsys, "partition", f"npz:{odd}", tmp_path / "d", "--parts", 2)
    assert code == 0 and f"loading npz:{odd}" in err
    assert str(root) in run(capsys, "info", root)[1]


# --- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        ("npz:nowhere.npz", [], "nowhere.npz: no such file"),
        ("ogbn-nothing", [], "ogbn-nothing"),
        ("debian", [], "debian: no such file, directory or dataset"),
        ("synthetik", [], "Did you mean synthetic or synthetic-mag?"),
        ("synthetik:num_vertices=9", [], "Did you mean synthetic or synthetic-mag?"),
        ("synthetic:num_vertices=0", [], "num_vertices must be an integer >= 2, got 0"),
        ("synthetic:vertices=10", [], "synthetic has no parameter 'vertices'"),
        (
            DATASET,
            ["--num-neighbors", "5,-2"],
            r"num_neighbors[1] must be an integer >= 0, or -1 for all neighbours, got -2",
        ),
        (DATASET, ["--batch-size", "0"], "batch_size must be >= 1, got 0"),
        (DATASET, ["--parts", "2001"], "num_parts must be at most the number of vertices, 2000, got 2001"),
        (DATASET, ["--parts", "0"], "num_parts must be an integer >= 1, got 0"),
        (DATASET, ["--tolerance", "-1"], "tolerance must be a number >= 0, got -1.0"),
        (DATASET, ["--seed", "-1"], "seed must be an integer >= 0, got -1"),
        (DATASET, ["--method", "nowhere.npy"], "given or an .npy file of part ids, got nowhere.npy ("),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, dataset, options, text):
    line = mistake(capsys, "partition", dataset, tmp_path / "d", "--data", tmp_path / "data", "--parts", 2, *options)
    assert line.startswith("salientpp partition: ") and text in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["empty", "text", "strings", "objects", "archive", "broken archive", "folder"])
def test_a_file_without_part_ids_is_refused_as_a_method(capsys, tmp_path, kind):
    path = tmp_path / "parts.npy"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("0 1 0 1")
    elif kind == "strings":
        np.save(path, np.array(["a", "b"]))
    elif kind == "objects":
        np.save(path, np.array([None, {}], dtype=object), allow_pickle=True)
    elif kind == "archive":
        with path.open("wb") as file:
            np.savez(file, parts=np.zeros(3))
    elif kind == "broken archive":
        path.write_bytes(b"PK\x03\x04nonsense")
    else:
        path.mkdir()
    line = mistake(capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, "--method", path)
    assert line.startswith("salientpp partition: --method must be auto, ")
    assert f"given or an .npy file of part ids, got {path} (" in line


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(1999, dtype=np.int64), "assignment must have shape [2000], one part per vertex, got [1999]"),
        (np.full(2000, 2), "assignment[0] must be in [0, 2), got 2"),
        (np.zeros(2000), "assignment must have an integer dtype, got torch.float64"),
    ],
)
def test_a_wrong_assignment_is_refused(capsys, tmp_path, array, text):
    np.save(tmp_path / "parts.npy", array)
    assert text in mistake(
        capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, "--method", tmp_path / "parts.npy"
    )
    assert not (tmp_path / "d").exists()


def test_a_root_that_cannot_be_written_is_refused(capsys, tmp_path, npz_file):
    line = mistake(capsys, "partition", f"npz:{npz_file}", npz_file / "d", "--parts", 2)
    assert (
        f"{npz_file}/d cannot be written (Not a directory); choose a root in a directory that you may write to" in line
    )


def test_info_refuses_other_directories(capsys, tmp_path, dataset_dir):
    assert "nowhere is not a dataset directory: it has no manifest.json" in mistake(
        capsys, "info", tmp_path / "nowhere"
    )
    shutil.copytree(dataset_dir, tmp_path / "d")
    (tmp_path / "d" / "indices.npy").unlink()
    line = mistake(capsys, "info", tmp_path / "d")
    assert line.startswith("salientpp info: ") and "indices.npy cannot be read (No such file or directory)" in line


def test_a_bug_shows_its_traceback(monkeypatch, dataset_dir):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(salientpp.store.directory.load, "load", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["info", str(dataset_dir)])


@pytest.mark.parametrize("step", ["_assign", "write_vertices"])
def test_after_ctrl_c_the_same_command_continues(capsys, monkeypatch, tmp_path, npz_file, step):
    def interrupt(*args):
        raise KeyboardInterrupt

    command = ["partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 2]
    with monkeypatch.context() as patched:
        patched.setattr(salientpp.store.directory.writer, step, interrupt)
        code, out, err = run(capsys, *command)
    assert code == 130 and out == ""
    assert err.splitlines()[-1] == (
        "salientpp partition: interrupted; the same command goes on after the last finished step"
    )
    done = step == "write_vertices"
    assert sorted(path.name for path in tmp_path.iterdir()) == [*([".d.writing"] if done else []), "ring.npz"]
    other = run(capsys, *command, "--seed", 1)
    if done:
        assert other[0] == 2 and "seed was 0, is 1. Repeat that command" in other[2]
        code, out, err = run(capsys, *command)
        assert code == 0 and "assigning" not in err and "computing" not in err
    else:
        assert other[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "ring.npz"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["partition", DATASET, "d"], "the following arguments are required: --parts"),
        (["partition", DATASET, "d", "--parts", "two"], "argument --parts: invalid int value: 'two'"),
        (
            ["partition", DATASET, "d", "--parts", "2", "--num-neighbors", "3,x"],
            "expected integers separated by commas such as 15,10,5, got '3,x'",
        ),
        (["info"], "the following arguments are required: root"),
    ],
)
def test_a_malformed_command_ends_in_2_with_usage(capsys, arguments, text):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: salientpp") and text in err


# --- help ------------------------------------------------------------------------------------------------


def subcommands() -> dict[str, argparse.ArgumentParser]:
    actions = _parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [[], ["partition"], ["analyze"], ["calibrate"], ["plan"], ["info"], ["rewrite"], ["copy-to-disk"], ["slurm"]],
)
def test_help_does_not_import_torch(command):
    """Help takes a few tenths of a second; importing torch and PyG takes several seconds."""
    code = (
        f"import resource, sys; from salientpp import cli\ntry: cli.main({[*command, '--help']})\nexcept SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF); heavy = {'torch', 'numpy', 'torch_geometric'} & sys.modules.keys()\n"
        "print(used.ru_utime + used.ru_stime, *heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True)
    seconds, *heavy = done.stderr.split()
    assert not heavy and "usage: salientpp" in done.stdout
    assert float(seconds) < 3.0, "help must not take the ten CPU seconds of importing torch and PyG"


def test_help_names_every_policy():
    assert set(POLICIES) == set(POLICY_NAMES)


def test_the_page_of_inclusion_probability_has_a_row_for_every_policy():
    page = (ROOT / "docs" / "explanation" / "vip.md").read_text()
    table = page.split("\n| policy | ")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)
    assert sorted(rows) == sorted([*POLICY_NAMES, "oracle", "oracle-heldout"])


def test_help_names_every_subcommand(capsys):
    text = help_of(capsys)
    assert {"partition", "info"} <= set(subcommands())
    for name in subcommands():
        assert f"\n    {name}" in text


@pytest.mark.parametrize("command", sorted(subcommands()))
def test_help_explains_every_argument(capsys, command):
    text = help_of(capsys, command)
    for action in subcommands()[command]._actions:
        assert action.help and action.help is not argparse.SUPPRESS, action.dest
        assert all(option in text for option in action.option_strings or [action.dest])


def test_every_module_of_a_subcommand_is_in_the_table():
    folder = Path(cli.__file__).parent
    files_with_help = {
        path.stem for path in folder.glob("*.py") if re.search("^HELP = ", path.read_text(), re.MULTILINE)
    }
    assert {name.replace("_", "-") for name in files_with_help} == set(SUBCOMMANDS) == set(subcommands())


def test_the_tables_in_the_docs_match_the_parsers():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    found = page.split("<!-- cli -->\n\n")[1].split("\n<!-- /cli -->")[0]
    written = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))["tables_of_subcommands"]()
    assert found == written, "run `python docs/write_reference.py`"
    for name, parser in subcommands().items():
        section = written.split(f"## {name}\n")[1].split("\n## ")[0]
        for action in parser._actions:
            assert isinstance(action, argparse._HelpAction) or all(
                f"`{option}" in section for option in action.option_strings
            )


#: Options of `analyze` that no loader has.
OF_THE_ANALYSIS = {
    "dataset", "parts", "epochs", "seeds", "link", "predict_only", "details", "json", "csv", "plot", "html", "ranks_per_part", "parts_per_rank", "data", "help",
    "method", "edge_weights", "order", "refine", "tolerance", "storage_hosts",
}  # fmt: skip


def test_options_of_analyze_are_named_after_the_arguments_of_the_loaders():
    signatures = map(inspect.signature, (NeighborLoader, LinkNeighborLoader))
    of_loaders = {name for of_loader in signatures for name in of_loader.parameters} | {"batch_size"}  # torch's
    several = {"replication_factors": "replication_factor", "policies": "policy", "draw_block": "shared_draws"}
    names = {several.get(action.dest, action.dest) for action in subcommands()["analyze"]._actions} - OF_THE_ANALYSIS
    assert names - of_loaders == set() and {"lookahead", "partial_aggregation", "send_as", "policy"} < names


@pytest.mark.parametrize(
    ("option", "text", "name", "value"),
    [
        ("--lookahead", "-1", "lookahead", -1),
        ("--lookahead", "9000", "lookahead", 9000),
        ("--draw-block", "0", "shared_draws_block", 0),
        ("--policies", "hottest", "policy", "hottest"),
        ("--replication-factors", "-0.5", "replication_factor", -0.5),
    ],
)
def test_analyze_and_the_loaders_refuse_the_same_values(capsys, option, text, name, value):
    code, _, error = run(capsys, "analyze", DATASET, "--parts", 2, f"{option}={text}")
    assert code == 2 and text in error
    with pytest.raises(ValueError, match=re.escape(text)):
        OPTIONS[name].check(name, value)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "partition",
            "dataset root --parts --method --edge-weights --refine --order --num-neighbors --batch-size --tolerance --seed --data --overwrite",
        ),
        ("partition", "--seeds --replicate --replicate-none --time-attr --store-as"),
        ("info", "root --verify"),
    ],
)
def test_help_has_the_promised_options(capsys, command, options):
    text = help_of(capsys, command)
    for option in options.split():
        assert option in text


def test_the_command_is_installed():
    (entry,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "salientpp"]
    assert entry.load() is cli.main


def test_the_command_prints_the_version_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"salientpp {importlib.metadata.version('salientpp')}\n"
    assert salientpp.__version__ == importlib.metadata.version("salientpp")


def test_help_works_with_a_percent_sign_in_the_path_of_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/100%sure/python")
    assert "/opt/100%sure/python" in help_of(capsys, "slurm").replace("\n", "").replace(" ", "")


# --- outputs --------------------------------------------------------------------------------------------

ANALYZE = ["analyze", "synthetic:num_vertices=200,average_degree=4,num_features=2", "--parts", "2", "--num-neighbors", "2", "--batch-size", "8",
           "--epochs", "1", "--policies", "vip", "--replication-factors", "0,1", "--method", "random"]  # fmt: skip


def test_a_symbolic_link_stays_and_its_target_is_written(capsys, tmp_path):
    real, link, dangling = tmp_path / "results" / "real.json", tmp_path / "link.json", tmp_path / "link.csv"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "results" / "new.csv")
    assert run(capsys, *ANALYZE, "--json", link, "--csv", dangling)[0] == 0
    assert link.is_symlink() and json.loads(real.read_text())["schema"] == 3
    assert real.stat().st_mode & 0o777 == 0o600, "a file keeps its mode"
    assert dangling.is_symlink() and (tmp_path / "results" / "new.csv").read_text().startswith(
        "num_neighbors,way,policy"
    )
    assert sorted(path.name for path in real.parent.iterdir()) == ["new.csv", "real.json"]


def test_pipes_are_written_and_not_replaced(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    pipes = {
        option: tmp_path / f"pipe.{suffix}"
        for option, suffix in (("--json", "json"), ("--csv", "csv"), ("--plot", "png"))
    }
    for pipe in pipes.values():
        os.mkfifo(pipe)
    read = {option: queue.SimpleQueue() for option in pipes}
    for option, pipe in pipes.items():  # daemons, because a reader of a pipe without writer never ends
        threading.Thread(target=lambda o=option, p=pipe: read[o].put(p.read_bytes()), daemon=True).start()
    assert run(capsys, *ANALYZE, *(word for pair in pipes.items() for word in pair))[0] == 0
    assert json.loads(read["--json"].get(timeout=HANG))["schema"] == 3
    assert read["--csv"].get(timeout=HANG).startswith(b"num_neighbors,way,policy")
    assert read["--plot"].get(timeout=HANG).startswith(b"\x89PNG")
    assert all(pipe.is_fifo() for pipe in pipes.values())


def test_a_device_is_written_and_not_replaced(capsys, tmp_path):
    node = tmp_path / "null"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        node.write_bytes(b"")
    except OSError:
        pytest.skip("device nodes are made by root, and on some file systems only")
    code, _, err = run(capsys, "slurm", "--parts", 1, "--time", 1, "--output", node, "--", "t.py")
    assert code == 0, err
    assert run(capsys, *ANALYZE, "--json", node, "--csv", node)[0] == 0
    assert node.is_char_device() and [path.name for path in tmp_path.iterdir()] == ["null"]


def test_a_pipe_needs_no_writable_directory(tmp_path, monkeypatch):
    """An ordinary user cannot write in /dev, for example."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    files.check_output(tmp_path / "pipe")


def test_a_file_that_is_also_stdout_is_appended_to(tmp_path, monkeypatch):
    """`--json /dev/stdout > FILE` writes the JSON and then the table to the file."""
    with (tmp_path / "out").open("w+b", buffering=0) as file:
        monkeypatch.setattr(
            files,
            "_standard_stream",
            lambda found: file.fileno() if os.path.samestat(found, os.fstat(file.fileno())) else None,
        )
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        files.write_whole(tmp_path / "stdout", lambda out: out.write(b"results\n"))
        file.write(b"table\n")
    assert (tmp_path / "out").read_text() == "results\ntable\n"


def test_two_outputs_cannot_share_a_file(capsys, tmp_path):
    (tmp_path / "link").symlink_to("same")
    line = mistake(capsys, *ANALYZE, "--json", tmp_path / "same", "--csv", tmp_path / "link")
    assert "--json and --csv name the same file" in line


@pytest.mark.parametrize("command", ["slurm", "analyze"])
def test_a_full_disk_leaves_existing_files_unchanged(capsys, tmp_path, command):
    json_file, script = tmp_path / "out.json", tmp_path / "train.sbatch"
    json_file.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))  # Python ignores the signal
    try:
        if command == "slurm":
            code, out, err = run(capsys, "slurm", "--parts", 1, "--time", 1, "--output", script, "--", "t.py")
        else:
            code, out, err = run(capsys, *ANALYZE, "--json", json_file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and err.count("\n") == 1 and "cannot be written (File too large)" in err
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"] and json_file.read_text() == "old"
    if command == "slurm":
        assert run(capsys, "slurm", "--parts", 1, "--time", 1, "--output", script, "--", "t.py")[0] == 0, (
            "no partial file is left"
        )
    else:
        assert "200 vertices" in out, "the table is printed although the file could not be written"


@pytest.mark.parametrize("kind", ["closed", "full", "broken pipe"])
def test_files_are_written_if_the_table_cannot_be_printed(capsys, monkeypatch, tmp_path, kind):
    if kind == "broken pipe":
        read, write = os.pipe()
        os.close(read)
        out = os.fdopen(write, "w")
    else:
        out = None if kind == "closed" else open("/dev/full", "w")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main([*ANALYZE, "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the result could not be printed" in said
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == 3
    assert out is None or out.closed, "Python must not retry at exit"
    assert cli.main(["slurm", "--parts", "1", "--time", "1", "--", "t.py"]) == 2, "no script was given"


def test_help_on_a_full_stdout_is_one_line_and_exit_code_2(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "salientpp", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert (
        done.returncode == 2
        and done.stderr
        == "salientpp: the result could not be printed: stdout cannot be written (No space left on device)\n"
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", [ANALYZE, ["info"], ["analyze", "--help"]], ids=["analyze", "info", "help"])
def test_a_terminal_without_greek_letters_gets_replacements(monkeypatch, dataset_dir, encoding, command):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    try:
        assert cli.main([*command, *([str(dataset_dir)] if command == ["info"] else [])]) == 0
    except SystemExit as end:
        assert end.code == 0
    out.flush()
    text = out.buffer.getvalue().decode(encoding)
    assert ("?=0" in text or "factor ? " in text) or (command == ["info"] and "+---" in text)


def test_file_names_may_hold_any_bytes(capsysbinary, tmp_path, dataset_dir):
    odd = os.fsdecode(b"caf\xe9 \n \x1b[2J")
    assert cli.main(["info", odd]) == 2
    err = capsysbinary.readouterr().err
    assert err.count(b"\n") == 1 and b"\x1b" not in err and rb"caf\udce9 \n \x1b[2J is not a dataset directory" in err
    assert cli.main(["copy-to-disk", str(dataset_dir), "--to", str(tmp_path / odd), "--part", "0"]) == 0
    assert capsysbinary.readouterr().out == os.fsencode(tmp_path / odd / "d") + b"\n"
    script = [
        ("slurm", "--parts", "1", "--time", "1", "--", odd),
        ("slurm", "--parts", "1", "--time", "1", "--output", str(tmp_path / "s"), "--", odd),
    ]
    assert [cli.main(words) for words in script] == [0, 0]
    assert b"caf\xe9 \n" in capsysbinary.readouterr().out and b"caf\xe9 \n" in (tmp_path / "s").read_bytes()
    assert subprocess.run(["bash", "-n", tmp_path / "s"]).returncode == 0


def test_after_an_interrupt_the_written_files_are_named(capsys, monkeypatch, tmp_path):
    def interrupt(*what):
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "show", interrupt)
    code, _, err = run(capsys, *ANALYZE, "--json", tmp_path / "out.json")
    assert code == 130 and err == f"salientpp analyze: interrupted; {tmp_path / 'out.json'} was written before\n"


def test_commands_report_unlabelled_vertices_in_one_line(capsys, tmp_path):
    data = synthetic(num_vertices=40, num_features=2, num_classes=3, average_degree=4.0)
    data.y[data.train_mask.nonzero().flatten()[:2]] = -1
    total = int(data.train_mask.sum())
    torch.save(data, tmp_path / "g.pt")
    for command in (
        ("partition", f"pyg:{tmp_path / 'g.pt'}", tmp_path / "d", "--parts", 2, "--method", "random"),
        ("analyze", f"pyg:{tmp_path / 'g.pt'}", "--parts", 2, "--method", "random", "--predict-only"),
    ):
        code, _, err = run(capsys, *command, "--num-neighbors", "2", "--batch-size", 4)
        words = f"salientpp {command[0]}: the split 'train' of data: 2 of {total} vertices are left out, because their label y is -1"
        assert code == 0 and any(line.startswith(words) for line in err.splitlines()), err


def test_too_little_memory_is_one_line(capsys, monkeypatch, dataset_dir):
    def numpy_fails(*args, **kwargs):
        raise MemoryError("Unable to allocate 1.2 TiB for an array")

    for broken in (numpy_fails, lambda *args, **kwargs: torch.empty(2**55)):
        monkeypatch.setattr(salientpp.store.directory.load, "load", broken)
        assert mistake(capsys, "info", dataset_dir).startswith("salientpp info: not enough memory (")


# --- random values of every option -----------------------------------------------------------------------

ODD = ["nan", "inf", "-inf", "-1", "0", "1", "2", "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 400, "9" * 5000, "1e308",
       "-1e308", "5e-324", "0.1", "", "ü→α", "x" * 300, "x" * 5000, "--", "-", "a\nb", "\udcff", "\ud800", "..", "/proc", "/proc/x", "none", "true",
       "1,2", "0,nan", "0,1e308", ",", "1" + ",1" * 300, "１２", "{}", "%s", "[/red]", "$HOME", " 1 ", "1_0", "d", "d/manifest.json", "g.npz", "npz:g.npz",
       "npz:d", "npz:", "npz:g.pt", "pyg:g.pt", "pyg:g.npz", "pyg:d", "python:mod:f", "python:mod", "python::", "parts.npy", "train", "all", "vip",
       "oracle", "metis-vip", "lru", "a\0b", "new", "new/x", "out.png", "-h"]  # fmt: skip
KEYS = [*inspect.signature(synthetic).parameters, "no_such_key", ""]


def odd_command(rng: random.Random) -> list[str]:
    """Returns a valid command with random values for one to three of its arguments."""
    name = rng.choice(
        [
            "partition",
            "partition",
            "analyze",
            "analyze",
            "calibrate",
            "plan",
            "plan",
            "info",
            "rewrite",
            "copy-to-disk",
            "slurm",
        ]
    )
    of_graph = {"--num-neighbors": "2,2", "--batch-size": "8", "--method": rng.choice(["random", "metis"])}
    values = {
        "partition": {"dataset": "npz:g.npz", "root": f"root-{rng.random()}", "--parts": "2", **of_graph},
        "analyze": {"dataset": "npz:g.npz", "--parts": "2", "--epochs": "1", **of_graph},
        "plan": {"dataset": "npz:g.npz", "--machines": "10GbE", "--hosts": "1,2", **of_graph},
        "calibrate": {"root": "d", "--between": "1GbE", "--seconds": "0.1", "--json": "machines.json"},
        "info": {"root": "d"},
        "rewrite": {"root": "d", "to": f"to-{rng.random()}", "--topology": "parts"},
        "copy-to-disk": {"root": "d", "--to": f"to-{rng.randrange(5)}", "--part": "0"},
        "slurm": {"--parts": "2", "--time": "10", "script": "train.py"},
    }[name]
    flags = []
    actions = [action for action in subcommands()[name]._actions if not isinstance(action, argparse._HelpAction)]
    for action in rng.sample(actions, min(len(actions), rng.choice([1, 1, 1, 2, 3]))):
        key = action.option_strings[0] if action.option_strings else action.dest
        if action.nargs == 0:
            flags.append(key)
        elif key == "dataset" and rng.random() < 0.7:
            keys = rng.sample(KEYS, rng.choice([1, 1, 2, 3]))
            small = "" if {"num_vertices", "average_degree"} & set(keys) else "num_vertices=120,average_degree=6,"
            values[key] = f"synthetic:{small}" + ",".join(f"{key}={rng.choice(ODD)}" for key in keys)
        else:
            values[key] = rng.choice(ODD)
    words = [name, *(value for key, value in values.items() if not key.startswith("--") and key != "script")]
    for key, value in values.items():
        if key.startswith("--"):
            words += [f"{key}={value}"] if rng.random() < 0.6 else [key, value]
    return [*words, *flags, *(["--", values["script"]] if "script" in values else [])]


def check_odd_command(words: list[str], encoding: str) -> int:
    """Returns the exit code, and raises an exception if the command does not end as documented."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors, newline="")
        for errors in ("strict", "backslashreplace")
    )
    asked_for_help_or_malformed = False
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as end:
            asked_for_help_or_malformed, code = True, end.code
    out.flush(), err.flush()
    printed, said = (stream.buffer.getvalue().decode(encoding, "replace") for stream in (out, err))
    said = [line for line in said.splitlines() if line[7:9] != " s" and not line.startswith("copying ")]
    assert code in (0, 2), code
    if not asked_for_help_or_malformed:
        assert len(said) == (code == 2) and all(line.startswith(f"salientpp {words[0]}: ") for line in said), said
        assert code == 0 or printed == ""
    return code


def odd_files(root: Path) -> None:
    data = synthetic(num_vertices=120, average_degree=6, num_features=4, community_size=20)
    ids = {f"{split}_idx": data[f"{split}_mask"].nonzero().flatten().numpy() for split in ("train", "val", "test")}
    np.savez(root / "g.npz", edge_index=data.edge_index.numpy(), x=data.x.numpy(), y=data.y.numpy(), **ids)
    np.save(root / "parts.npy", np.arange(120) % 2)
    torch.save(data, root / "g.pt")
    (root / "mod.py").write_text("def f():\n    return 1\n")
    salientpp.partition(data, 2, root / "d", [2, 2], 8, method="random")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_cases", [50, *rare(150)])
def test_any_arguments_end_in_exit_code_0_or_2_and_one_line(tmp_path, monkeypatch, num_cases):
    place = tmp_path / "some" / "place"  # so that '..' stays inside tmp_path
    place.mkdir(parents=True)
    odd_files(place)
    monkeypatch.chdir(place)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    ended = Counter()
    for case in range(num_cases):
        words, encoding = odd_command(rng), rng.choice(["utf-8", "ascii", "latin-1"])
        try:
            ended[check_odd_command(words, encoding)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {[word[:100] for word in words]}, {encoding}") from error
    assert ended[0] and ended[2]
