"""Laws of ``--json``, and of the command's answers to what new users try first."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name

from salientpp.cli import dataset_name
from salientpp.cli.main import GROUPS, SUBCOMMANDS, _parser
from salientpp.datasets import load, load_dataset

HINT = " (add --undirected if your edges have no direction)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["source,target", *(f"{i},{(i * 7 + 1) % 60}" for i in range(60))]
    (tmp_path / "edges.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "e2.csv").write_text("\n".join(["a,b", *lines[1:]]) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "g.npz").touch()
    (tmp_path / "x.bin").touch()
    (tmp_path / "names.csv").write_text("ann,bob\nbob,eve\n")
    return tmp_path


def written(capsys, *words) -> dict:
    code, _, err = run(capsys, *words, "--json", "out.json")
    assert code == 0, err
    with open("out.json") as file:
        return json.load(file)


def test_every_command_writes_json(capsys, folder):
    described = written(capsys, "describe", "edges.csv")
    assert described["tables"][0]["num_rows"] == 60
    graph = written(capsys, "convert", "edges:edges.csv", "graph")
    assert graph["node_types"][0]["num_vertices"] == 60 and graph["edge_types"][0]["num_edges"] == 60
    assert graph == written(capsys, "info", "graph") == written(capsys, "info", "graph", "--verify")
    part = written(capsys, "partition", "converted:graph", "d", "--parts", 2, "--method", "random")
    assert (part["num_vertices"], part["workload"]["num_neighbors"]) == (60, [15, 10, 5])
    assert part["root"] == str(folder / "d") and part["bytes"] > 1000 and "files" not in part
    assert written(capsys, "info", "d") == part
    assert written(capsys, "rewrite", "d", "e", "--topology", "parts")["topology"] == "parts"
    copy = written(capsys, "copy-to-disk", "d", "--to", "there", "--part", 1)
    assert copy["root"].endswith("there/d") and copy["parts"] == [1]
    assert written(capsys, "analyze", "d", "--predict-only")["parts"] == 2
    assert "predictions" in written(
        capsys, "plan", "synthetic:num_vertices=300", "--hosts", "1,2", "--machines", "10GbE"
    )
    assert "draw" in written(capsys, "calibrate", "d", "--between", "10GbE", "--seconds", "0.1")
    for name in set(SUBCOMMANDS) - {"slurm"}:
        with pytest.raises(SystemExit):
            run(capsys, name, "--help")
        assert "--json FILE" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, folder):
    assert "--json: " in mistake(capsys, "convert", "edges:edges.csv,skip=1", "graph", "--json", "no/such/place")
    assert not (folder / "graph").exists()


def test_a_header_with_given_names_needs_no_skip(capsys, folder):
    for source in ("edges:edges.csv,skip=1", "edges:edges.csv", "edges:e2.csv,source=a,target=b"):
        found = written(capsys, "convert", source, "graph", "--overwrite")
        assert found["edge_types"][0]["num_edges"] == 60


def test_info_describes_a_converted_graph(capsys, folder):
    assert run(capsys, "convert", "edges:edges.csv,skip=1", "graph")[0] == 0
    code, out, _ = run(capsys, "info", "graph")
    assert code == 0 and "use it as converted:graph" in out and "--verify reads all" in out
    assert run(capsys, "info", "converted:graph")[:2] == (code, out)
    assert "nowhere is not a dataset directory" in mistake(capsys, "info", "converted:nowhere")
    for words in (
        "copy-to-disk graph --to x",
        "rewrite graph y --topology parts",
        "rewrite converted:graph y --topology parts",
    ):
        said = mistake(capsys, *words.split())
        assert "graph is a converted graph and has no parts" in said
        assert "`salientpp partition converted:graph DIR --parts K`" in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("analyze edges.csv", f"must be converted first: salientpp convert edges:edges.csv graph{HINT}; then: salientpp analyze converted:graph"),
        ("partition edges.csv p --parts 2", f"first: salientpp convert edges:edges.csv graph{HINT}; then: salientpp partition converted:graph p --parts 2"),
        ("partition edges:edges.csv,skip=1 d --parts 2", f"convert edges:edges.csv,skip=1 graph{HINT}; then: salientpp partition converted:graph d"),
        ("partition edges:e*.csv d", f"convert 'edges:e*.csv' graph{HINT}; then: salientpp partition converted:graph d"),
        ("plan npy:folder --hosts 1", "salientpp convert npy:folder graph; then: salientpp plan converted:graph --hosts 1"),
        ("analyze ogbl-ppa --parts 2", "salientpp convert ogbl-ppa graph; then: salientpp analyze converted:graph --parts 2"),
        ("analyze nothere", "salientpp analyze: nothere: no such file, directory or dataset; `salientpp analyze --help` names the kinds"),
        ("analyze s3://b/graph", "s3://b/graph must be copied first: salientpp copy-to-disk s3://b/graph --to DIR; then: salientpp analyze DIR/graph"),
        ("plan sinthetic:num_vertices=9", "sinthetic:num_vertices=9: no such file, directory or dataset. Did you mean synthetic"),
        ("plan nothere.csv", "salientpp plan: nothere.csv: no such file"),
        ("partition edges:nofile.csv", "salientpp partition: nofile.csv: no such file"),
        ("partition edges:no*.csv,x=x.npy", "salientpp partition: no*.csv: no such file"),
        ("analyze igb:nothere,classes=19", "salientpp analyze: nothere: no such directory"),
        ("analyze npz:nothere.npz", "salientpp analyze: nothere.npz: no such file"),
        ("analyze converted:c2,verify=true", "salientpp analyze: c2: no such directory"),
        ("analyze g.npz --parts 2", "g.npz holds a graph; put npz: before its name; write: salientpp analyze npz:g.npz --parts 2"),
        ("analyze folder --parts 2", "folder is a directory, but not a dataset directory"),
        ("plan x.bin", "x.bin is not a file that holds a graph"),
        ("convert edges.csv graph", 'Did you mean "edges:edges.csv"?'),
        ("convert edges:names.csv graph", "as in skip=1 for a header, with source=NAME,target=NAME"),
        ("convert edges:names.csv graph", "Keys that are text need numbers, such as those of pandas.factorize"),
        ("convert edges:edges.csv,source=a,target=b graph", "edges.csv, line 1 must have one column 'a', got source, target"),
        ("convert edges:e2.csv graph", "line 1 looks like a header (a, b); write edges:e2.csv,source=a,target=b if the edges"),
        ("partition synthetic:num_vertices=10 d --parts 20", "num_parts must be at most the number of vertices, 10, got 20"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_do(capsys, folder, words, text):
    assert text in mistake(capsys, *words.split())


def test_commands_of_a_disk_say_how_to_copy_an_address(capsys):
    for command in ("info", "doctor"):
        with pytest.raises(SystemExit, match="2"):
            run(capsys, command, "s3://user:secret@b/graph")
        text = "expected a directory on a disk, got 's3://b/graph'; copy it first: salientpp copy-to-disk s3://b/graph --to DIR"
        err = capsys.readouterr().err
        assert text in err and "secret" not in err
    assert "secret" not in mistake(capsys, "analyze", "s3://user:secret@b/graph?secret_key=secret")


def test_a_converted_graph_without_its_kind_is_recognised(capsys, folder):
    assert run(capsys, "convert", "edges:edges.csv", "c1")[0] == 0
    for words in ("analyze c1 --parts 2", "partition c1 p --parts 2", "plan c1"):
        command = words.replace("c1", "converted:c1")
        assert mistake(capsys, *words.split()).endswith(f"put converted: before its name; write: salientpp {command}")


def test_kinds_of_datasets_are_those_that_are_loaded():
    assert dataset_name.KINDS == load.KINDS


@pytest.mark.parametrize("name", ["edges:nothere.csv", "nothere.tsv", "npy:nothere"])
def test_a_missing_file_is_missing_for_the_function_too(name):
    with pytest.raises(FileNotFoundError, match="nothere.*: no such "):
        load_dataset(name)


def test_only_lists_of_edges_are_told_of_edges_without_direction(folder):
    hint = r"`salientpp convert edges:edges.csv graph` \(add --undirected if your edges have no direction\); then pass"
    with pytest.raises(ValueError, match=hint):
        load_dataset("edges.csv")
    with pytest.raises(ValueError, match="`salientpp convert npy:folder graph`; then pass converted:graph"):
        load_dataset("npy:folder")


def test_an_analysis_says_what_the_graph_lacks(capsys, folder):
    assert run(capsys, "convert", "edges:edges.csv", "graph")[0] == 0
    few = "--parts", 2, "--method", "random", "--predict-only"
    said = " ".join(run(capsys, "analyze", "converted:graph", *few)[1].split())
    assert "Note: no training split, so all vertices are seeds; no features, so no bytes are counted" in said
    assert "give train= and x= to `salientpp convert`" in said and "120 edges" not in said
    for word in ("bytes per row", "–", "salientpp plan", "Try memory="):
        assert word not in said
    said = run(capsys, "analyze", "synthetic:num_vertices=300", *few)[1]
    assert "Note: " not in said and "bytes per row" in said


def test_an_analysis_prints_a_plan_that_works(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    options = "--predict-only", "--num-neighbors=-1,2", "--batch-size", 8
    assert run(capsys, "partition", "synthetic:num_vertices=300", "d e", "--parts", 2, "--seeds", "all")[0] == 0
    for words in (["synthetic:num_vertices=300", "--parts", 2, "--seeds", "val"], ["d e"]):
        out = run(capsys, "analyze", *words, *options)[1]
        (command,) = (line for line in out.splitlines() if line.startswith("  salientpp plan"))
        assert "--num-neighbors=-1,2 --batch-size 8" in command and "--memory" in command
        assert ("--hosts 2,4" in command) == (len(words) > 1)
        code, out, err = run(capsys, *shlex.split(command)[1:])
        assert (code, err) == (0, "") and "batch size 8" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "synthetic",
            "are required: --machines, --hosts. Example: salientpp plan synthetic --machines 10GbE --hosts 2,4",
        ),
        (
            "synthetic --hosts 3",
            "are required: --machines. Example: salientpp plan synthetic --machines 10GbE --hosts 2,4",
        ),
        ("d", "are required: --machines. Example: salientpp plan DIR --machines 10GbE"),
    ],
)
def test_a_plan_names_all_missing_options_at_once(capsys, folder, words, text):
    (folder / "d").mkdir()
    (folder / "d" / "manifest.json").touch()
    with pytest.raises(SystemExit):
        run(capsys, "plan", *words.split())
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_missing_arguments_are_named_with_an_example(capsys, command):
    """The example itself can be parsed."""
    with pytest.raises(SystemExit):
        run(capsys, command, *(["--help"] if command in ("demo", "doctor") else []))  # these need no argument
    captured = capsys.readouterr()
    (example,) = re.findall("Example: (.*)", captured.err + captured.out)
    words = example.removeprefix("srun ").split()
    assert words[:2] == ["salientpp", command]
    assert _parser().parse_args(words[1:]).command == command


def test_help_has_the_commands_in_groups(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "--help")
    out = capsys.readouterr().out
    places = [out.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)


def test_a_graph_without_splits_is_analyzed_from_all_vertices(capsys, folder):
    np.savez("g.npz", edge_index=np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    found = written(capsys, "analyze", "npz:g.npz", "--parts", 2, "--method", "random", "--predict-only")
    assert found["seeds"] == "all"


def test_a_word_that_stands_twice_is_not_replaced(capsys, folder):
    assert run(capsys, "convert", "edges:edges.csv", "analyze")[0] == 0
    assert mistake(capsys, "analyze", "analyze").endswith("put converted: before its name; write: converted:analyze")


def test_help_is_printed_beside_a_wrong_name(capsys, folder):
    with pytest.raises(SystemExit) as end:
        run(capsys, "analyze", "nowhere", "--help")
    assert end.value.code == 0 and "--replication-factors" in capsys.readouterr().out


def test_a_dataset_directory_may_have_the_name_of_a_kind(capsys, folder):
    assert run(capsys, "convert", "edges:edges.csv", "graph")[0] == 0
    assert run(capsys, "partition", "converted:graph", "npz:x", "--parts", "2", "--method", "random")[0] == 0
    assert run(capsys, "analyze", "npz:x", "--epochs", "1")[0] == 0


def test_a_job_may_read_a_dataset_that_is_not_here(capsys, folder):
    words = "slurm --parts 2 --time 5 --dataset npz:missing.npz --root parts -- train.py parts"
    code, out, err = run(capsys, *words.split())
    assert code == 0 and "npz:missing.npz" in out, err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--edge-weights equal --no-refine", "--edge-weights equal --no-refine"),
        ("--shared-draws batch", None),
        ("--ranks-per-part 2", None),
    ],
)
def test_a_printed_plan_is_for_the_same_parts_and_batches(capsys, folder, words, text):
    given = "analyze", "synthetic:num_vertices=300", "--parts", 2, "--predict-only", *words.split()
    code, out, err = run(capsys, *given)
    assert code == 0, err
    assert text in out if text else "  salientpp plan" not in out


def test_a_mistake_beside_a_directory_is_told_without_torch(folder):
    (folder / "d").mkdir()
    (folder / "d" / "manifest.json").write_text("{}")
    check = "import sys; from salientpp.cli.dataset_name import dataset_of; dataset_of('d'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_all_endings_of_text_that_convert_reads_are_known(capsys, folder):
    (folder / "graph.el").write_text("0 1\n1 2\n")
    assert "convert edges:graph.el graph" in mistake(capsys, "analyze", "graph.el")
