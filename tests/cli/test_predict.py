"""Laws of ``salientpp predict``: outputs of the user's model under the keys of the tables, in one process and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import mistake, run, wide_terminal
from graphs import random_data
from pyarrow import parquet
from script_ranks import run_script
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE

import salientpp

__all__ = ["wide_terminal"]

MODELS = """
import os
import torch
from torch_geometric.nn import GraphSAGE, SAGEConv

def sage():
    torch.manual_seed(1)
    return GraphSAGE(3, 4, 2, 2)

def layers():
    torch.manual_seed(1)
    return [SAGEConv(3, 2), torch.relu]

class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch):
        assert not self.training and not torch.is_grad_enabled()
        return self.factor * batch["user"].x[:, 0]

def scores():
    return Scores()

def named():
    return lambda batch: {"low": batch["user"].x[:, 0], "high": -batch["user"].x[: batch["user"].batch_size]}

def by_type():
    return lambda batch: {name: batch["user"].x[: batch["user"].batch_size, 0] for name in ("user", "item")}

class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module = sage()

    def forward(self, batch):
        return self.module(batch.x, batch.edge_index)

def wrapped():
    return Wrapped()

def short():
    return lambda batch: batch.x[:1]

def broken():
    return lambda batch: batch.no_such_attribute

def nothing():
    return None

def random():
    model = Scores()
    torch.nn.init.uniform_(model.factor, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    return model

def statistics():
    model = Scores()
    model.register_buffer("mean", torch.tensor(float(os.environ["RANK"])))
    return model

def lazy():
    return torch.nn.Sequential(Scores(), torch.nn.LazyLinear(1))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    data = random_data(num_vertices=60, num_edges=300, directed=True)
    data.x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    torch.save(data, "graph.pt")
    salientpp.partition(data, 2, "parts", [2], 8, split={"train": torch.arange(60)}, method="random")
    typed = HeteroData()
    typed["user"].x, typed["item"].x = torch.arange(40.0)[:, None], torch.ones(30, 1)
    typed["user"].train_mask = torch.arange(40) < 10
    ends = torch.stack([torch.arange(30), torch.arange(30)])
    typed["user", "buys", "item"].edge_index = ends
    typed["item", "rev_buys", "user"].edge_index = ends.flip(0)
    torch.save(typed, "shop.pt")
    salientpp.partition(typed, 2, "shop", [2], 8, seeds=("user", "all"), method="random")
    return tmp_path


@torch.no_grad()
def expected(checkpoint: bool = False) -> torch.Tensor:
    data = torch.load("graph.pt", weights_only=False)
    torch.manual_seed(2 if checkpoint else 1)
    return GraphSAGE(3, 4, 2, 2).eval()(data.x, data.edge_index)


def check_all(out: str, rows: torch.Tensor) -> None:
    table = parquet.read_table(out)
    ids = torch.tensor(table.column("id").to_pylist())
    assert sorted(ids.tolist()) == list(range(60))
    assert torch.allclose(torch.tensor(table.column("output").to_pylist()), rows[ids], atol=1e-5)


@pytest.mark.parametrize("dataset", ["parts", "pyg:graph.pt"])
def test_one_process_predicts_all_vertices(capsys, folder, dataset):
    code, out, err = run(capsys, "predict", "models:sage", dataset, "--out", "rows.parquet", "--json", "out.json")
    assert code == 0, err
    assert out == "60 rows are in rows.parquet\n"
    assert json.loads(Path("out.json").read_text()) == {"out": "rows.parquet", "rows": 60, "ranks": 1}
    check_all("rows.parquet", expected())


@pytest.mark.parametrize("form", ["plain", "module.", "model_state_dict"])
def test_parameters_come_from_a_checkpoint(capsys, folder, form):
    torch.manual_seed(2)
    state = GraphSAGE(3, 4, 2, 2).state_dict()
    if form == "module.":  # of DistributedDataParallel
        state = {f"module.{name}": value for name, value in state.items()}
    torch.save({form: state, "epoch": 3} if form == "model_state_dict" else state, "model.pt")
    assert run(capsys, "predict", "models:sage", "parts", "--out", "a.parquet", "--checkpoint", "model.pt")[0] == 0
    check_all("a.parquet", expected(checkpoint=True))


def test_a_model_may_have_a_part_called_module(capsys, folder):
    state = {f"module.{name}": value for name, value in GraphSAGE(3, 4, 2, 2).state_dict().items()}
    torch.save(state, "model.pt")
    words = "predict models:wrapped pyg:graph.pt --out a --num-neighbors=-1,-1 --checkpoint model.pt"
    code, _, err = run(capsys, *words.split())
    assert code == 0, err


def test_sampled_batches_predict_the_seeds(capsys, folder):
    for dataset in "shop", "pyg:shop.pt":
        words = ("predict", "models:scores", dataset, "--out", "scores", "--num-neighbors", "2", "--batch-size", "7")
        assert run(capsys, *words, "--seeds", "user:all")[:2] == (0, "40 rows are in scores\n")
        table = parquet.read_table("scores")
        assert sorted(table.column("id").to_pylist()) == list(range(40))
        assert table.column("output").to_pylist() == table.column("id").to_pylist()
    assert run(capsys, "predict", "models:named", *words[2:], "--seeds", "user:train")[0] == 0
    table = parquet.read_table("scores")
    assert table.schema.names == ["id", "low", "high"]
    assert sorted(table.column("low").to_pylist()) == list(range(10))


RANK = """
import sys
from salientpp import cli
sys.exit(cli.main({words!r}))
"""


def test_the_ranks_of_a_job_share_the_work(folder):
    words = ["predict", "models:sage", "parts", "--out", "rows.parquet"]
    (folder / "layerwise.py").write_text(RANK.format(words=words))
    run_script(folder / "layerwise.py", 2)
    check_all("rows.parquet", expected())
    words = ["predict", "models:scores", "shop", "--out", "scores", "--num-neighbors", "2", "--seeds", "user:"]
    (folder / "batches.py").write_text(RANK.format(words=words))
    run_script(folder / "batches.py", 2)
    table = parquet.read_table("scores")
    assert sorted(table.column("output").to_pylist()) == list(range(40))
    assert sorted(path.name for path in Path("scores").iterdir()) == ["part-00000.parquet", "part-00001.parquet"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("random", "all ranks must have the same parameters of the model (their digest), got "),
        ("statistics", "all ranks must have the same buffers of the model (their digest"),
        (
            "lazy",
            "the model has lazy parameters without values, which each rank would choose for itself; give --checkpoint",
        ),
    ],
)
def test_ranks_with_different_models_write_nothing(folder, model, text):
    words = ["predict", f"models:{model}", "shop", "--out", "scores", "--num-neighbors", "2", "--seeds", "user:all"]
    (folder / "batches.py").write_text(RANK.format(words=words))
    with pytest.raises(AssertionError) as raised:
        run_script(folder / "batches.py", 2)
    assert text in str(raised.value)
    assert not Path("scores").exists()


def test_a_checkpoint_makes_different_models_equal(folder):
    torch.save({"factor": torch.tensor(1.0)}, "model.pt")
    words = [
        "predict",
        "models:random",
        "shop",
        "--out",
        "scores",
        "--num-neighbors",
        "2",
        "--seeds",
        "user:all",
        "--checkpoint",
        "model.pt",
    ]
    (folder / "batches.py").write_text(RANK.format(words=words))
    run_script(folder / "batches.py", 2)
    assert sorted(parquet.read_table("scores").column("output").to_pylist()) == list(range(40))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "models:sage parts --out rows",
            "--out must be an address, or a folder whose name ends in .parquet, got 'rows'",
        ),
        ("models:sage parts --out a.parquet --seeds train", "--seeds is for sampled batches; give --num-neighbors too"),
        ("models:sage parts --out a --num-neighbors 2 --scratch s", "--scratch is for layer-wise inference, but"),
        ("sage parts --out a.parquet", "sage: expected MODULE:FUNCTION such as my_graph:load"),
        ("models:sgae parts --out a.parquet", "has no function 'sgae'; it has"),
        (
            "models:nothing parts --out a.parquet",
            "expected a torch.nn.Module, a function or a list of layers, got NoneType",
        ),
        ("models:layers parts --out a.parquet --checkpoint graph.pt", "--checkpoint needs a torch.nn.Module, but"),
        (
            "models:layers parts --out a --num-neighbors 2",
            "--num-neighbors calls one model with each batch, but models:layers returned a list of layers; leave --num-neighbors out",
        ),
        ("models:sage parts --out a.parquet --checkpoint no.pt", "no.pt"),
        ("models:sage parts --out a.parquet --checkpoint other.pt", "other.pt: the parameters do not fit the model ("),
        ("models:sage parts --out a.parquet --checkpoint list.pt", "list.pt: expected a state_dict, got list"),
        ("models:broken parts --out a --num-neighbors 2", "models:broken: the model raised AttributeError: "),
        ("models:short parts --out a --num-neighbors 2 --batch-size 9", "a row for each of the 9 seeds of a batch"),
        (
            "models:by_type shop --out a --num-neighbors 2 --seeds user:all",
            "the model must return rows of the type 'user' of the seeds, but it also returned some of item",
        ),
        ("models:scores pyg:shop.pt --out a --num-neighbors 2 --seeds user:val", "--seeds val needs val_mask"),
        ("models:scores shop --out a --num-neighbors 2", "--seeds must name one of the vertex types user, item, as in"),
        ("models:scores shop --out a --num-neighbors 2 --seeds usr:all", "got usr. Did you mean user?"),
    ],
)
def test_mistakes_are_one_line(capsys, folder, words, text):
    torch.save({"weight": torch.ones(2)}, "other.pt")
    torch.save([torch.ones(2)], "list.pt")
    assert text in mistake(capsys, "predict", *words.split())
    assert not any(Path(name).exists() and list(Path(name).iterdir()) for name in ("a", "a.parquet"))
