"""Laws of benchmarks/score.py: wrong batches give no figures, and one command measures every loader."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import score
import score_worker
import torch
from drawing.score import draw_score
from torch_geometric.data import Data

from salientpp import NeighborLoader
from salientpp.datasets import synthetic

sys.path.insert(0, str(score.HERE / "loaders"))
import _pyg

OPTIONS = SimpleNamespace(fanouts=[4, 3], batch_size=32, workers=0)


@pytest.fixture(scope="module")
def graph() -> SimpleNamespace:
    data = synthetic(num_vertices=1000, num_features=4)
    seeds = data.train_mask.nonzero().flatten()
    return SimpleNamespace(edge_index=data.edge_index, x=data.x.float(), y=data.y, seeds=seeds)


def fault(graph: SimpleNamespace, change=lambda batch: None, **options) -> str:
    """The fault of our loader's batches after ``change``, which gets what ``describe`` returns."""

    def describe(batch) -> SimpleNamespace:
        found = _pyg.describe(batch)
        change(found)
        return found

    data = Data(x=graph.x, edge_index=graph.edge_index, y=graph.y)
    loader = NeighborLoader(data, **{"num_neighbors": [4, 3], "input_nodes": graph.seeds, "batch_size": 32, **options})
    return score_worker.fault(SimpleNamespace(describe=describe), loader, graph, OPTIONS)


def test_right_batches_have_no_fault(graph: SimpleNamespace) -> None:
    assert fault(graph) == ""
    assert fault(graph, lambda found: setattr(found, "hops", [tuple(map(torch.cat, zip(*found.hops)))])) == ""


@pytest.mark.parametrize(
    "words, change",
    [
        ("rows differ", lambda found: found.x.add_(1)),
        ("an edge twice", lambda found: found.hops.append(tuple(ends.repeat(2) for ends in found.hops.pop()))),
        (
            "edges that the graph does not have",
            lambda found: found.hops.append((found.hops[-1][1], found.hops.pop()[1])),
        ),
        ("other numbers of neighbours", lambda found: found.hops.append(tuple(ends[1:] for ends in found.hops.pop()))),
        ("every seed once", lambda found: setattr(found, "batch_size", found.batch_size - 1)),
    ],
)
def test_each_fault_is_found(graph: SimpleNamespace, words: str, change) -> None:
    assert words in fault(graph, change)


def test_another_fanout_is_a_fault(graph: SimpleNamespace) -> None:
    assert "other numbers of neighbours" in fault(graph, num_neighbors=[4, 2])
    assert "every seed once" in fault(graph, drop_last=True)


def test_one_command_measures_every_loader(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "half.py").write_text(
        "from types import SimpleNamespace\nimport salientpp_loader\nfrom _pyg import describe\nNAME, DISTRIBUTIONS = 'half', ()\n"
        "def make(graph, options):\n"
        "    return salientpp_loader.make(SimpleNamespace(**{**vars(graph), 'seeds': graph.seeds[::2]}), options)\n"
    )
    (tmp_path / "absent.py").write_text("import no_such_library\n")
    monkeypatch.setenv("PYTHONPATH", f"{score.HERE / 'loaders'}:{score.HERE.parent}")
    monkeypatch.setattr(score, "LOADERS", [score.HERE / "loaders" / "salientpp_loader.py"])
    monkeypatch.setattr("common.RESULTS", tmp_path)
    monkeypatch.setattr(score.write_results, "__defaults__", (tmp_path,))
    words = "score.py --graph synthetic:num_vertices=1000,num_features=4 --batch-size 16 --batches 2 --repeats 1 --workers 0"
    others = [f"--loader={tmp_path / name}.py" for name in ("half", "absent")]
    monkeypatch.setattr(sys, "argv", [*words.split(), *others])
    score.main()
    result = json.loads((tmp_path / "score.json").read_text())
    ours, half, absent = result["rows"]
    assert ours["batches_per_second"] > 0 and ours["memory_bytes"] > ours["memory_of_graph"] / 2 > 0
    assert ours["versions"]["torch"] == torch.__version__
    assert half["failed"] == "wrong batches: an epoch does not hold every seed once"
    assert not {"batches_per_second", "memory_bytes"} & set(half)
    assert absent["failed"].startswith("not installed here: ModuleNotFoundError")
    assert draw_score(result) in capsys.readouterr().out
