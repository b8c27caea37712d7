"""The command does what the package does, ends in 0 or 2, and a mistake is one line that says what was wrong."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import salientpp
from salientpp import cli
from salientpp.datasets import synthetic

DATASET = "synthetic:num_vertices=2000,num_features=8"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """So that no line is broken where a test looks for words."""
    monkeypatch.setenv("COLUMNS", "300")


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


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def mistake(capsys, *arguments: object) -> str:
    """The one line on stderr after the steps, which end in 's  <step>'."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    said = [line for line in err.splitlines() if not line[:9].endswith(" s")]
    assert len(said) == 1, err
    assert "Traceback" not in err
    return said[0]


# --- partition and info ----------------------------------------------------------------------------------


def test_partition_writes_what_the_package_writes(capsys, tmp_path, dataset_dir):
    code, out, err = run(capsys, "partition", DATASET, tmp_path / "d", "--parts", 4)
    assert code == 0
    assert salientpp.load(tmp_path / "d", verify="full").fingerprint == salientpp.load(dataset_dir).fingerprint
    for word in ("loading synthetic", "assigning 2000 vertices to 4 parts", "computing inclusion probabilities", "done"):
        assert word in err, "progress goes to stderr"
        assert word not in out
    assert "2,000 vertices, 40,000 edges" in out
    assert "x float32 [8], y int64" in out


def test_every_option_reaches_the_package(capsys, tmp_path):
    code, _, _ = run(
        capsys, "partition", DATASET, tmp_path / "d", "--parts", 3, "--partition", "random", "--fanouts=-1,4",
        "--batch-size", 64, "--tolerance", 0.2, "--seed", 9,
    )  # fmt: skip
    assert code == 0
    expected = salientpp.partition(
        synthetic(num_vertices=2000, num_features=8), 3, tmp_path / "e", [-1, 4], 64, method="random", tolerance=0.2, seed=9
    )
    part = salientpp.load(tmp_path / "d")
    assert part.fingerprint == expected.fingerprint
    assert part.manifest["workload"] == {"num_neighbors": [-1, 4], "batch_size": 64, "seeds": "train"}


def test_info_says_what_the_directory_holds(capsys, dataset_dir):
    code, out, err = run(capsys, "info", dataset_dir)
    assert code == 0 and err == ""
    part = salientpp.load(dataset_dir)
    assert str(dataset_dir) in out and "format version 1" in out
    assert "fanouts [15, 10, 5], batch size 1024, seeds 'train'" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == 4
    splits = part.manifest["splits"].values()
    assert rows == [[str(p), str(part.book.size_of(p)), *(str(counts[p]) for counts in splits)] for p in range(4)]
    assert "sizes and sampled checksums match; --verify reads all" in out


def test_verify_reads_every_byte(capsys, tmp_path):
    """In a file of 6 MiB the quick check has gaps."""
    data = Data(edge_index=torch.tensor([[0], [1]]), x=torch.zeros(12_000, 128))
    root = tmp_path / "d"
    salientpp.partition(data, 1, root, [2], 4)
    code, out, _ = run(capsys, "info", root, "--verify")
    assert code == 0 and "every byte matches its checksum" in out
    with (root / "part-00000" / "node_x.npy").open("r+b") as file:
        file.seek(64 * 1024 + 100)
        file.write(b"\1")
    assert run(capsys, "info", root)[0] == 0
    assert "node_x.npy was altered: its checksum does not match the manifest" in mistake(capsys, "info", root, "--verify")


def test_an_npz_file_is_partitioned(capsys, tmp_path, npz_file):
    code, out, _ = run(capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 2, "--fanouts", "3", "--batch-size", 4)
    assert code == 0
    assert "50 vertices, 100 edges" in out and "x float16 [2], y int64" in out
    part = salientpp.load(tmp_path / "d")
    x = torch.cat([part.node_rows(p)["x"] for p in range(2)])
    assert torch.equal(x[:, 0].long(), part.original_id(torch.arange(50)))
    assert {name: sum(counts) for name, counts in part.manifest["splits"].items()} == {"train": 20, "val": 10, "test": 20}


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16])
def test_a_given_assignment_is_kept(capsys, tmp_path, npz_file, dtype):
    given = (np.arange(50) % 3).astype(dtype)
    np.save(tmp_path / "parts.npy", given)
    code, _, _ = run(capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 3, "--partition", tmp_path / "parts.npy")
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


def test_brackets_in_a_path_are_no_markup(capsys, tmp_path, npz_file):
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
        ("debian", [], 'dataset must be a homogeneous torch_geometric Data object, "npz:FILE"'),
        ("synthetik", [], "Did you mean synthetic?"),
        ("synthetic:num_vertices=0", [], "num_vertices must be an integer >= 2, got 0"),
        ("synthetic:vertices=10", [], "synthetic has no parameter 'vertices'"),
        (DATASET, ["--fanouts", "5,-2"], r"num_neighbors[1] must be an integer >= 0, or -1 for all neighbours, got -2"),
        (DATASET, ["--batch-size", "0"], "batch_size must be >= 1, got 0"),
        (DATASET, ["--parts", "2001"], "num_parts must be at most the number of vertices, 2000, got 2001"),
        (DATASET, ["--parts", "0"], "num_parts must be an integer >= 1, got 0"),
        (DATASET, ["--tolerance", "-1"], "tolerance must be a number >= 0, got -1.0"),
        (DATASET, ["--seed", "-1"], "seed must be an integer >= 0, got -1"),
        (DATASET, ["--partition", "nowhere.npy"], "random or an .npy file of part ids, got nowhere.npy ("),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(capsys, tmp_path, dataset, options, text):
    line = mistake(capsys, "partition", dataset, tmp_path / "d", "--data", tmp_path / "data", "--parts", 2, *options)
    assert line.startswith("salientpp partition: ") and text in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["empty", "text", "strings", "objects", "archive", "broken archive", "folder"])
def test_a_partition_file_that_is_no_array_of_part_ids_is_refused(capsys, tmp_path, kind):
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
    line = mistake(capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, "--partition", path)
    assert line.startswith("salientpp partition: --partition must be metis, ")
    assert f"random or an .npy file of part ids, got {path} (" in line


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
    assert text in mistake(capsys, "partition", DATASET, tmp_path / "d", "--parts", 2, "--partition", tmp_path / "parts.npy")
    assert not (tmp_path / "d").exists()


def test_a_root_that_cannot_be_written_is_refused(capsys, tmp_path, npz_file):
    line = mistake(capsys, "partition", f"npz:{npz_file}", npz_file / "d", "--parts", 2)
    assert f"{npz_file}/d cannot be written (Not a directory); choose a root in a directory that you may write to" in line


def test_info_refuses_what_is_no_dataset_directory(capsys, tmp_path, dataset_dir):
    assert "nowhere is not a dataset directory: it has no manifest.json" in mistake(capsys, "info", tmp_path / "nowhere")
    shutil.copytree(dataset_dir, tmp_path / "d")
    (tmp_path / "d" / "indices.npy").unlink()
    line = mistake(capsys, "info", tmp_path / "d")
    assert line.startswith("salientpp info: ") and "indices.npy cannot be read (No such file or directory)" in line


def test_a_bug_is_not_disguised_as_a_mistake(monkeypatch, dataset_dir):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "load", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["info", str(dataset_dir)])


def test_ctrl_c_ends_in_130_and_writes_nothing(capsys, monkeypatch, tmp_path, npz_file):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(salientpp.store.dataset_dir, "_write_parts", interrupt)
    code, out, err = run(capsys, "partition", f"npz:{npz_file}", tmp_path / "d", "--parts", 2)
    assert code == 130 and out == ""
    assert err.splitlines()[-1] == "salientpp partition: interrupted; nothing was written"
    assert [path.name for path in tmp_path.iterdir()] == ["ring.npz"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["partition", DATASET, "d"], "the following arguments are required: --parts"),
        (["partition", DATASET, "d", "--parts", "two"], "argument --parts: invalid int value: 'two'"),
        (["partition", DATASET, "d", "--parts", "2", "--fanouts", "3,x"], "expected integers separated by commas such as 15,10,5, got '3,x'"),
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
    actions = cli._parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_help_names_every_subcommand(capsys):
    text = help_of(capsys)
    assert {"partition", "info"} <= set(subcommands())
    for name in subcommands():
        assert f"\n    {name}" in text


@pytest.mark.parametrize("command", sorted(subcommands()))
def test_the_help_of_a_subcommand_explains_every_argument(capsys, command):
    text = help_of(capsys, command)
    for action in subcommands()[command]._actions:
        assert action.help and action.help is not argparse.SUPPRESS, action.dest
        assert all(option in text for option in action.option_strings or [action.dest])


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("partition", "dataset root --parts --partition --fanouts --batch-size --tolerance --seed --data --overwrite"),
        ("info", "root --verify"),
    ],
)
def test_the_promised_options_exist(capsys, command, options):
    text = help_of(capsys, command)
    for option in options.split():
        assert option in text


def test_the_command_is_installed():
    (entry,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "salientpp"]
    assert entry.load() is cli.main
