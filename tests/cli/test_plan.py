"""Laws of ``salientpp plan``: tables that fit a terminal, files, and one line for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name

import salientpp
from salientpp.analysis.plan_result import ALLOWED
from salientpp.arguments import as_amount
from salientpp.cli.plan import ALLOWED_NAMES
from salientpp.datasets import synthetic
from salientpp.display import exact_bytes
from salientpp.ways.planner.machines import Link, Machines, Step

DATASET = "synthetic:num_vertices=2000,num_features=8"
BATCHES = "--num-neighbors", "5,3", "--batch-size", 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    data = synthetic(num_vertices=2000, num_features=16)
    return salientpp.partition(data, 4, tmp_path_factory.mktemp("plan") / "d", [5, 3], 32).root


@pytest.fixture
def constants(tmp_path) -> Path:
    machines = Machines(Link(1e7, 1e-4), step=Step(0.001), price=2.5)
    machines.write(tmp_path / "constants.json")
    return tmp_path / "constants.json"


def test_tables_fit_a_terminal(capsys, monkeypatch, directory, constants):
    monkeypatch.setenv("COLUMNS", "80")
    options = "--hosts", "1,2", "--memory", "0B,5kB,1GiB", "--allow", "sums,int8,shared-draws", "--epochs", 50
    code, out, err = run(capsys, "plan", directory, "--machines", constants, *options)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out  # no cell is cut
    words = " ".join(out.split())
    assert "cost: a run of 50 epochs" in words and "Recommended: " in words and "Cheapest: " in words
    assert 'Options of the loader: memory="' in words and "Memory of a host: own rows " in words
    assert "Note: " not in words


def test_each_block_of_a_narrow_table_says_which_lines_it_has(capsys, monkeypatch, directory, constants):
    monkeypatch.setenv("COLUMNS", "40")
    options = "--hosts", "2,4", "--memory", "0B,123456B", "--price", "12345.678"
    out = run(capsys, "plan", directory, "--machines", constants, *options)[1]
    blocks = re.split(r"\n(?= ?hosts +copies)", out)[1:]
    assert len(blocks) >= 2 and "cost" in blocks[-1].splitlines()[0]
    for block in blocks:
        rows = re.findall(r"(?m)^ *(\d) +(0B|123456B) ", block)
        assert rows == [("2", "0B"), ("2", "123456B"), ("4", "0B"), ("4", "123456B")], block


def test_a_recommendation_agrees_with_its_table(capsys, directory, constants):
    out = run(capsys, "plan", directory, "--machines", constants, "--hosts", 4, "--memory", "0B,1GB,2GB")[1]
    said = " ".join(out.split())
    recommended = re.search(r"Recommended: 4 hosts, .*? An epoch takes about ([\d.]+) s", said)
    shortest = re.search(r"The shortest epoch takes ([\d.]+) s. Of all within 3 % of it", said)
    seconds = [float(text) for text in re.findall(r"(?m)^ *4 +\d+G?B .*?(0\.\d+)", out)]
    assert recommended and float(recommended[1]) in seconds
    assert min(seconds) == float(shortest[1] if shortest else recommended[1])


def test_the_json_has_every_prediction_and_the_plot_is_a_picture(capsys, tmp_path, directory, constants):
    for picture, begin in (("p.png", b"\x89PNG"), ("p.SVG", b"<?xml")):
        files = "--json", tmp_path / "plan.json", "--plot", tmp_path / picture
        assert run(capsys, "plan", directory, "--machines", constants, "--hosts", "2,4", *files)[0] == 0
        assert (tmp_path / picture).read_bytes().startswith(begin)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["dataset"] == str(directory) and values["machines"]["price"] == 2.5
    assert {each["hosts"] for each in values["predictions"]} == {2, 4}
    assert sum(each["chosen"] for each in values["predictions"]) == 2 * 4  # four amounts of memory


def test_a_link_and_single_constants_serve_for_a_first_look(capsys, tmp_path):
    file = tmp_path / "plan.json"
    options = "--hosts", "1,2", "--ranks-per-host", 2, "--set", "step.seconds=0.02", "--set", "cores=8", "--price", 3
    code, out, _ = run(capsys, "plan", DATASET, "--machines", "10GbE", *BATCHES, *options, "--json", file)
    assert code == 0 and "constants were not measured: the link is 10GbE" in out
    values = json.loads(file.read_text())
    machines = values["machines"]
    assert machines["between"]["bytes_per_second"] == 10e9 / 8 / 2
    assert (machines["step"]["seconds"], machines["cores"], machines["price"]) == (0.02, 8, 3)
    code, out, _ = run(capsys, "plan", DATASET, "--machines", "1GbE", *BATCHES, "--hosts", 2, "--set", "between=100GbE")
    assert code == 0 and "no training step is known" in out


def test_a_topology_in_parts_is_planned_with_a_note(capsys, tmp_path):
    data = synthetic(num_vertices=2000, num_features=8)
    root = salientpp.partition(data, 2, tmp_path / "d", [5, 3], 32, topology="parts").root
    code, out, _ = run(capsys, "plan", root, "--machines", "10GbE")
    assert code == 0 and "requests for neighbour lists of the topology in parts are not counted" in out


@pytest.mark.parametrize(
    "number", [0, 1, 999, 2000, 2**20, 8 * 2**30, 1_100_000, 260_000, 123_456_789, 123_456_700, 5 * 2**40]
)
def test_amounts_are_printed_as_options_take_them(number):
    assert as_amount(exact_bytes(number)) == number


def test_the_command_knows_every_method():
    assert tuple(ALLOWED) == ALLOWED_NAMES


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--machines", "10GB"], "machines must be a JSON file of salientpp calibrate, or a link (1GbE, 10GbE,"),
        (["--machines", "none.json"], "none.json"),
        (["--hosts", "8"], "hosts must be at most the number of parts of"),
        (["--hosts", "0"], "hosts must be integers >= 1, got 0"),
        (["--hosts", "3", "--ranks-per-host", "2"], "world size 6 does not fit 4 parts"),
        (["--ranks-per-host", "0"], "ranks_per_host must be integers >= 1, got 0"),
        (["--memory", "1" + 90 * "0"], "--memory must be fewer than 2^63 bytes"),
        (["--epochs", "1" + 400 * "0"], "epochs must be at most 1,000,000, got 1"),
        (["--machines", "10GbE", "--ranks-per-host", "1" + 400 * "0"], "ranks_per_host must be at most 1,024"),
        (
            ["--memory", "8Gi"],
            "--memory must be a number of bytes >= 0, such as 2_000_000 or '2GiB', got '8Gi'",
        ),
        (["--device-memory", "many"], "--device-memory must be a number of bytes >= 0"),
        (["--device-memory", "1GiB"], "device_memory needs constants of machines with a device"),
        (["--allow", "sums,magic"], "allow must hold names of sums, int8, shared_draws, got 'magic'"),
        (["--price", "-1"], "--price must be a number >= 0, got -1.0"),
        (["--price", "nan"], "--price must be a number >= 0, got nan"),
        (["--epochs", "0"], "epochs must be >= 1, got 0"),
        (["--set", "speed=3"], "10GbE with --set has an unknown entry 'speed'"),
        (["--set", "step.seconds=fast"], "seconds of step in 10GbE with --set must be a number >= 0, got 'fast'"),
        (["--batch-size", "0"], "batch_size"),
        (["--plot", "plan.pdf"], "--plot must end in .png or .svg, got plan.pdf"),
        (["--json", "same.svg", "--plot", "same.svg"], "name the same file"),
    ],
)
def test_a_mistake_is_told_in_one_line(capsys, directory, options, text):
    machines = [] if "--machines" in options else ["--machines", "10GbE"]
    assert text in mistake(capsys, "plan", directory, *machines, *options)


def test_wrong_datasets_are_told_in_one_line(capsys, tmp_path):
    line = mistake(capsys, "plan", DATASET, "--machines", "10GbE")
    assert f"--hosts is required, because {DATASET} is not a dataset directory" in line
    line = mistake(capsys, "plan", f"pyg-partition:{tmp_path}", "--machines", "10GbE", "--hosts", 2)
    assert "has an assignment for one number of parts; write a dataset directory" in line
    line = mistake(capsys, "plan", "synthetic-mag:num_papers=300", "--machines", "10GbE", "--hosts", 2)
    assert "has several vertex types, which are planned only on a dataset directory" in line


@pytest.mark.parametrize(
    "options", [["--hosts", "two"], ["--set", "cores"], ["--num-neighbors", "a"], ["--price", "much"]]
)
def test_words_that_are_no_values_are_refused(capsys, directory, options):
    with pytest.raises(SystemExit) as end:
        run(capsys, "plan", directory, "--machines", "10GbE", *options)
    assert end.value.code == 2
    assert f"argument {options[0]}: " in capsys.readouterr().err
