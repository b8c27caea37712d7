"""Laws of the page of examples: what it shows was printed by the scripts as they are, and API pages name the scripts that use a name."""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import distributed
import numpy as np
import pytest
import torch
from distributed import HANG

import salientpp
from salientpp.datasets import synthetic

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
assert spec is not None and spec.loader is not None
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)


@pytest.mark.parametrize("script", gallery.titles())
def test_the_record_of_an_example_belongs_to_its_script(script):
    entry = gallery.recorded().get(script, {"digest": None, "runs": []})
    told = f"{script} has changed since its output was recorded: python docs/gallery.py {script}"
    assert entry["digest"] == gallery.digest(script), told
    assert [each["command"] for each in entry["runs"]] == gallery.commands(script), told
    page, title = gallery.page(), gallery.titles()[script]
    assert f"\n## {title}\n" in page and f"](#{gallery.anchor(title)})" in page
    if script.endswith(".py"):
        for each in entry["runs"]:
            assert f"$ {each['command']}  # " in page and each["output"] in page


@pytest.mark.parametrize("script", gallery.titles())
def test_an_example_has_a_picture_of_numbers_that_it_printed(script):
    entry, title = gallery.recorded()[script], gallery.titles()[script]
    section = gallery.section(script, title, entry)
    (coded,) = re.findall(r'<img alt="[^"]+" src="data:image/svg\+xml;base64,([^"]+)">', section)
    svg = base64.b64decode(coded).decode()
    shown = re.findall(r'font-size="11"[^>]*>([^<]+)</text>', svg)
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)][: len(shown)]
    assert len(shown) == len(heights) >= 2
    printed = re.findall(r"[\d,.]*\d%?", "\n".join(each["output"] for each in entry["runs"]))
    assert set(shown) <= set(printed), script
    values = [gallery._number(each) for each in shown]
    assert all(abs(tall - 115 * each / max(values)) < 0.06 for tall, each in zip(heights, values, strict=True))
    expected = [value for values in gallery.printed_values(script, entry).values() for value in values]
    assert sorted(shown) == sorted(expected)


def test_a_picture_without_its_numbers_is_refused():
    entry = gallery.recorded()["own_cache.py"]
    silent = {**entry, "runs": [{**each, "output": ""} for each in entry["runs"]]}
    with pytest.raises(ValueError, match="own_cache.py: expected numbers"):
        gallery.drawn("own_cache.py", silent)


def test_commands_that_need_another_host_or_other_data_do_not_run():
    assert all("HOST" not in each and "sbatch" not in each for each in gallery.commands("train_elastic.py"))
    assert [each.split()[0] for each in gallery.commands("papers100m.py")] == ["python", "torchrun", "salientpp"]


def test_an_api_page_names_the_examples_that_use_a_name():
    text = gallery.with_examples("::: salientpp.nn.trim.trim\n\nText.\n\n::: salientpp.no_such_name\n")
    trims, rest = text.split("\n\nText.\n\n")
    assert "[train_sage.py](../../examples.md#train-a-pyg-model-on-one-graph-then-over-parts)" in trims
    assert "[train_full.py]" not in trims and rest == "::: salientpp.no_such_name\n"
    assert "train_full.py" in gallery.uses("salientpp.distribute")  # imported from its module


def example(name: str) -> ModuleType:
    sys.path.append(str(gallery.EXAMPLES))  # papers100m.py imports train_sage.py
    return importlib.import_module(name)


def on_a_rank(rank: int, calls: list[tuple[str, str, tuple]], root: str) -> list[tuple[Any, str]]:
    """Calls functions of examples, with the part in place of ``"part"``. Returns their results, and what they printed."""
    found = []
    for script, function, arguments in calls:
        given = [salientpp.load(root) if each == "part" else each for each in arguments]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = getattr(example(script), function)(*given)
        found.append((result, printed.getvalue()))
    return found


def test_examples_on_ranks_save_what_they_score_and_copies_change_no_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, root, file = synthetic(num_vertices=3000, num_features=16), str(tmp_path / "parts"), str(tmp_path / "y.npy")
    salientpp.partition(data, 2, root, [10, 5], 64)
    choices = example("own_cache").CHOICES
    calls = [("predictions", "main", (root, file, 2))]
    calls += [("own_cache", "train", ("part", options, 1)) for options in choices.values()]
    calls += [("papers100m", "train", ("part", memory, 32, 1)) for memory in (None, "1MB")]
    calls += [("from_dgl", "train", (root, 1))]
    (_, said), *trained, bare, copied, converted = distributed.run(on_a_rank, 2, calls, root, seconds=HANG)[0]
    # The file is in the order of the data, so the accuracy of its rows is the one that the ranks measured over their parts.
    right = torch.from_numpy(np.load(file)) == data.y
    for name in ("train", "val", "test"):
        assert f"{name} {float(right[data[f'{name}_mask']].float().mean()):.3f}" in said
    rows, losses = zip(*(result for result, _ in trained))
    assert len(set(losses)) == 1 and all(each < rows[0] for each in rows[1:]), (rows, losses)
    (loss, fetched), (same, fewer) = (
        re.search(r"loss ([\d.]+), ([\d,]+) of", out).groups() for _, out in (bare, copied)
    )
    assert loss == same and int(fewer.replace(",", "")) < int(fetched.replace(",", "")) / 2
    assert re.fullmatch(r"epoch 0: loss \d\.\d+\n", converted[1])


def test_a_graph_of_dgl_keeps_its_edges_and_attributes():
    columns = {"feat": torch.rand(3, 2), "label": torch.arange(3), "train_mask": torch.ones(3, dtype=torch.bool)}
    edges = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    graph = SimpleNamespace(edges=lambda: edges, num_nodes=lambda: 3, ndata=columns, edata={"w": torch.rand(2)})
    data = example("from_dgl").from_dgl(graph)
    assert data.edge_index.tolist() == [[0, 1], [1, 2]] and data.num_nodes == 3
    assert (
        data.x is columns["feat"]
        and data.y is columns["label"]
        and data.w is graph.edata["w"]
        and data.train_mask.all()
    )


def test_products_prints_exact_accuracies_that_rise(capsys, monkeypatch):
    small = "synthetic:num_vertices=3000,num_features=16"
    monkeypatch.setattr(sys, "argv", ["products.py", "--dataset", small, "--epochs", "3"])
    example("products").main()
    scores = [float(score) for score in re.findall(r"exact: .* test ([\d.]+)", capsys.readouterr().out)]
    assert len(scores) == 3 and scores[-1] > scores[0]


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_lightning_learns(capsys):
    pytest.importorskip("lightning")
    example("train_lightning").main()
    scores = [float(score) for score in re.findall(r"validation accuracy ([\d.]+)", capsys.readouterr().out)]
    assert len(scores) == 3 and scores[-1] > scores[0]
