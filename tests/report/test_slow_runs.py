"""A run with one slow part, on two ranks: the first sentences of its report name this part, its rank and its seconds."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import cluster
import distributed
import pytest
import torch
from cluster import Cluster
from distributed import HANG
from graphs import random_data
from torch import Tensor

import salientpp
from salientpp import NeighborLoader
from salientpp.engine.spans import VARIABLE
from salientpp.report.read import read_run
from salientpp.report.run_page import numbers_of, words
from salientpp.store.rows import TensorRows

FANOUTS, BATCH, SLOW = [4, 3], 16, 0.12


class SlowRows(TensorRows):
    """Rows of a slow disk: each request takes a while."""

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        time.sleep(SLOW)
        super().take(index, out, out_index)

    def is_little(self, num_rows: int) -> bool:
        return False


def _train(rank: int, root: str, folder: str, slow: str, **options: Any) -> None:
    """Trains two epochs, of which ``slow`` says what is slow on rank 1, or on both ranks."""
    os.environ[VARIABLE] = folder
    torch.manual_seed(0)

    def transform(batch: Any) -> Any:
        time.sleep(SLOW if slow == "transform" and rank == 1 else 0)
        return batch

    part = salientpp.load(root)
    if slow == "rows" and rank == 1:
        options["columns"] = {"x": SlowRows(part.node_rows(part.part_id)["x"])}
    elif slow == "rows":
        options["columns"] = {"x": part.node_rows(part.part_id)["x"]}
    loader = NeighborLoader(
        part, FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=0, ranks_per_host=1, num_workers=1, transform=transform, **options,
    )  # fmt: skip
    model = torch.nn.Linear(part.num_features, 4)
    for _ in range(2):
        for batch in loader:
            model(batch.x).sum().backward()
            time.sleep(SLOW if slow == "step" else 0)


def _train_with_wide_rows(rank: int, root: str, folder: str) -> None:
    _train(rank, root, folder, "network")


def partitioned(root: Path, num_parts: int, width: int) -> str:
    data = random_data(1000, 6000, train_fraction=0.5)
    data.x = torch.randn(1000, width, generator=torch.Generator().manual_seed(0))
    salientpp.partition(data, num_parts, root, FANOUTS, BATCH)
    return str(root)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    return partitioned(tmp_path_factory.mktemp("narrow") / "parts", 2, 8)


def answer(folder: Path) -> tuple[str, dict[str, Any]]:
    """The first sentences of the report on the second epoch, and its numbers."""
    numbers = numbers_of(read_run(folder, None), 1, None)
    print(numbers["verdict"])
    return " ".join(map(str, words(numbers))), numbers["verdict"]["findings"][0]


def seconds_in(text: str, pattern: str) -> float:
    found = re.search(pattern.replace("TIME", r"([\d.]+) (s|ms)"), text)
    assert found is not None, (pattern, text)
    return float(found[1]) * {"s": 1, "ms": 1e-3}[found[2]]


def test_a_slow_transform_of_one_rank(narrow: str, tmp_path: Path):
    distributed.run(_train, 2, narrow, str(tmp_path), "transform")
    text, finding = answer(tmp_path)
    assert finding["cause"] == "transform" and finding["rank"] == 1
    assert seconds_in(text, r"Rank 1 is the slowest: its `transform` takes TIME of .* a batch") >= SLOW
    assert finding["saved"] >= 0.5 * 16 * SLOW


def test_a_slow_row_source_of_one_rank(narrow: str, tmp_path: Path):
    distributed.run(_train, 2, narrow, str(tmp_path), "rows")
    text, finding = answer(tmp_path)
    assert finding["cause"] == "rows" and finding["rank"] == 1
    assert seconds_in(text, r"Rank 1 is the slowest: taking feature rows takes TIME of") >= 0.9 * SLOW
    assert "`read_ahead" in text and "copy-to-disk" in text, "the rows lie in a file of the directory"


def test_a_slow_training_step(narrow: str, tmp_path: Path):
    distributed.run(_train, 2, narrow, str(tmp_path), "step")
    text, finding = answer(tmp_path)
    assert finding["cause"] == "training_step" and finding["rank"] is None
    assert seconds_in(text, r"The loader is not the bottleneck: the training step takes TIME a batch") >= 0.9 * SLOW
    assert "salientpp.nn.trim(model)" in text


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Any:
    reason = cluster.unavailable()
    if reason is not None:
        pytest.skip(reason)
    distributed.forks()
    with Cluster(request.param, bytes_per_second=200e6) as found:
        yield found


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_rank_whose_network_sends_slowly(hosts: Cluster, tmp_path: Path):
    hosts.set_rate(4e6, host=1, receives=False)
    hosts.run(_train_with_wide_rows, partitioned(tmp_path / "parts", 2, 2000), str(tmp_path / "traces"), seconds=HANG)
    text, finding = answer(tmp_path / "traces")
    assert finding["cause"] == "slow_link" and finding["rank"] == 1
    assert "The network from rank 1 to rank 0 is slow" in text and "salientpp doctor" in text


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_slow_network_of_one_rank(hosts: Cluster, tmp_path: Path):
    hosts.set_rate(4e6, host=1)
    hosts.run(_train_with_wide_rows, partitioned(tmp_path / "parts", 3, 2000), str(tmp_path / "traces"), seconds=HANG)
    text, finding = answer(tmp_path / "traces")
    assert finding["cause"] == "slow_link" and finding["rank"] == 1
    assert "The network of rank 1 is slow" in text


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_too_small_a_cache(hosts: Cluster, tmp_path: Path):
    hosts.set_rate(10e6)
    hosts.run(_train_with_wide_rows, partitioned(tmp_path / "parts", 2, 2000), str(tmp_path / "traces"), seconds=HANG)
    text, finding = answer(tmp_path / "traces")
    assert finding["cause"] == "small_cache"
    assert "of the rows come from other ranks" in text and "replication_factor=" in text and "`memory=" in text
