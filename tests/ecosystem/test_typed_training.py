"""Laws of typed training: two ranks learn what one process learns with the same global batch.

The graphs have several vertex types, times, and links with times.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import distributed
import pytest
import torch
from graphs import real_packages
from rare import rare

import salientpp
from salientpp.datasets import load_dataset

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_on_a_rank(rank: int, name: str, root: str, options: dict) -> float:
    return example(name).train(salientpp.load(root), seed=0, **options)


@pytest.mark.parametrize("time_attr", ["year", *rare(None)])
def test_two_ranks_learn_classes_of_papers_like_one_process(tmp_path, time_attr):
    made = load_dataset("synthetic-mag", num_papers=2000)
    module = example("train_hetero")
    salientpp.partition(made, 2, tmp_path / "mag", module.FANOUTS, 64, time_attr=time_attr)
    alone = module.train(made, 3, 0, batch_size=128, time_attr=time_attr)
    both = distributed.run(
        train_on_a_rank,
        2,
        "train_hetero",
        str(tmp_path / "mag"),
        {"epochs": 3, "batch_size": 64, "time_attr": time_attr},
    )
    assert both[0] == both[1]
    assert min(alone, both[0]) > 0.3, "accuracy over 12 classes is too low"
    assert abs(alone - both[0]) < 0.12


@pytest.mark.rare
def test_two_ranks_learn_sections_of_packages_like_one_process(tmp_path):
    data = real_packages()
    few = torch.zeros_like(data["binary"].train_mask)
    few[data["binary"].train_mask.nonzero().flatten()[::5]] = True
    data["binary"].train_mask = few
    for split in ("val", "test"):
        some = data["binary"][f"{split}_mask"].nonzero().flatten()[::5]
        data["binary"][f"{split}_mask"] = torch.zeros_like(few).index_fill_(0, some, True)
    module = example("train_hetero")
    salientpp.partition(data, 2, tmp_path / "debian", module.FANOUTS, 128)
    options = {"epochs": 2, "target": "binary", "batch_size": 128}
    alone = module.train(data, seed=0, **{**options, "batch_size": 256})
    both = distributed.run(train_on_a_rank, 2, "train_hetero", str(tmp_path / "debian"), options)
    assert both[0] == both[1]
    assert min(alone, both[0]) > 0.4, "accuracy over 50 sections is too low"
    assert abs(alone - both[0]) < 0.08


def test_two_ranks_learn_links_with_times_like_one_process(tmp_path):
    module = example("train_links")
    made = module.shop(1500, 800, 12_000)
    module.partition(made, 2, tmp_path / "shop")
    alone = module.train(made, 3, 0, batch_size=256)
    both = distributed.run(train_on_a_rank, 2, "train_links", str(tmp_path / "shop"), {"epochs": 3, "batch_size": 128})
    assert both[0] == both[1]
    assert min(alone, both[0]) > 0.6, "a random order has 0.5"
    assert abs(alone - both[0]) < 0.1


def test_two_ranks_learn_from_tables_with_times_like_one_process(tmp_path):
    pytest.importorskip("torch_frame", reason="PyTorch Frame is not installed")
    module, sizes = example("relational"), {"num_customers": 800, "num_products": 100}
    made = module.shop(**sizes)
    module.partition(made, 2, tmp_path / "tables")
    alone = module.train(made.data, 3, 0, batch_size=128, made=made)
    options = {"epochs": 3, "batch_size": 64, "sizes": sizes}
    both = distributed.run(train_on_a_rank, 2, "relational", str(tmp_path / "tables"), options)
    assert both[0] == both[1]
    assert min(alone, both[0]) > 0.85, "a random order has 0.5"
    assert abs(alone - both[0]) < 0.04
