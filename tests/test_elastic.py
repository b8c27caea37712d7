"""Laws of a job that changes its size: killed at any moment, it goes on with fewer or more ranks, and takes the steps that it would have taken."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data

import salientpp

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))

SLOTS, EPOCHS, ROUNDS = 6, 3, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    data = random_data(400, 2400)
    data.x = data.x / 400
    assignment = torch.arange(400) % SLOTS
    train = torch.cat([(assignment == part).nonzero().flatten()[: 15 + part] for part in range(SLOTS)])
    path = tmp_path_factory.mktemp("elastic") / "parts"
    test = torch.arange(350, 400)
    salientpp.partition(data, SLOTS, path, [4, 3], 4, method=assignment, split={"train": train, "test": test})
    return str(path)


def arguments(root: str, checkpoint: Path) -> list[str]:
    words = f"{root} --checkpoint {checkpoint} --every 2 --epochs {EPOCHS} --fanouts 4,3 --batch-size 4 --hidden 8 --alpha 0.1"
    return words.split()


def watch(log: Path, rank: int, die_at: int | None) -> None:
    """Have the example note each batch that it trains on, and end like a lost machine at one of them."""
    import train_elastic

    forward, count = train_elastic.forward, 0

    def noted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal count
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        if model.training:
            with log.open("a") as out:
                out.write(json.dumps([rank, batch.n_id.tolist(), batch.e_id.tolist(), batch.y.tolist()]) + "\n")
        return forward(model, batch)

    train_elastic.forward = noted


def _train(rank: int, root: str, folder: str, attempt: str, victim: int, die_at: int | None) -> float:
    import train_elastic

    where = Path(folder)
    watch(where / f"{attempt}-{rank}.jsonl", rank, die_at if rank == victim else None)
    return train_elastic.train(
        train_elastic.parse_arguments(arguments(root, where / "checkpoint.pt")), torch.device("cpu")
    )


def noted(folder: Path, attempt: str) -> list[str]:
    """Everything that the ranks of an attempt trained on, without who did."""
    files = sorted(folder.glob(f"{attempt}-*.jsonl"))
    return [json.dumps(json.loads(line)[1:]) for file in files for line in file.read_text().splitlines()]


def whole_run(root: str, folder: Path) -> tuple[list[str], dict[str, torch.Tensor], float]:
    """What a run that nothing stops trains on, in order, the parameters that it ends with, and its accuracy."""
    folder.mkdir()
    (found,) = distributed.run(_train, 1, root, str(folder), "whole", 0, None)
    return noted(folder, "whole"), torch.load(folder / "checkpoint.pt", weights_only=True)["model"], found


@pytest.mark.parametrize("sizes", [(3, 2), (2, 1), (4, 3, 2), pytest.param((2, 6), marks=pytest.mark.faults)], ids=str)
def test_a_job_that_loses_a_rank_goes_on_without_it(root, tmp_path, sizes):
    batches, parameters, right = whole_run(root, tmp_path / "whole")
    assert len(batches) == EPOCHS * ROUNDS * SLOTS
    rng = random.Random(str(sizes))
    for attempt, size in enumerate(sizes):
        checkpoint, done = tmp_path / "checkpoint.pt", 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)["loader"]
            done = state["epoch"] * ROUNDS + state["round"]
        is_last = attempt == len(sizes) - 1
        # The killed rank has at least one slot, and the job has some rounds before it.
        die_at = None if is_last else rng.randint(3, 6)
        victim = rng.randrange(size)
        print(f"attempt {attempt}: {size} ranks from round {done}, rank {victim} dies at its batch {die_at}")
        ends = distributed.run(
            _train, size, root, str(tmp_path), str(attempt), victim, die_at, may_fail=not is_last, group_seconds=60.0
        )
        found, expected = Counter(noted(tmp_path, str(attempt))), batches[done * SLOTS :]
        if is_last:
            assert found == Counter(expected)
            assert ends == pytest.approx([right] * size)
        else:
            assert not any(ends), "every rank ends"
            assert found <= Counter(expected)
    ended = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    for name, value in parameters.items():
        torch.testing.assert_close(ended[name], value, rtol=1e-4, atol=1e-5)
