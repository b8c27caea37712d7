"""Laws of storage ranks: ranks that only store change no batch, and ranks that train hold no rows but those of their caches."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from forked_python import python
from pages_of_files import resident_bytes_of
from rare import some_of
from storage_laws import BY_PART, OTHERS, PARTS, epoch_of, epochs_of, planned, resumed, together, uses

import salientpp
from salientpp import NeighborLoader
from salientpp.testing.topology import CASES, SOME, directories, make

#: Numbers of ranks that train and of ranks that store.
LAYOUTS = some_of([(1, 1), (2, 3), (4, 2)], itertools.product((1, 2, 4), (1, 2, 3)))


def on_ranks(
    rank: int, num_storage_ranks: int, of_trainer: Callable[..., Any], root: Path, form: str, *args: Any
) -> Any:
    """Serves on a storage rank; on any other calls ``of_trainer``."""
    parts = [salientpp.load(root / graph / form, storage_ranks=num_storage_ranks) for graph in ("one", "typed")]
    if parts[0].only_stores:
        salientpp.serve(*parts)
        return "stored"
    return of_trainer(rank, root, form, num_storage_ranks, *args)


def run(of_trainer: Callable[..., Any], trainers: int, storage: int, *args: Any, **how: Any) -> list[Any]:
    """Returns the results of the ranks that train."""
    found = distributed.run(on_ranks, trainers + storage, storage, of_trainer, *args, **how)
    assert found[trainers:] == ["stored"] * storage, found[trainers:]
    return found[:trainers]


@pytest.fixture(scope="module", params=["whole", "parts"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return directories(tmp_path_factory.mktemp("stored"), PARTS, request.param), request.param


# --- batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainers", "storage"), LAYOUTS)
def test_batches_do_not_depend_on_who_stores(stored: tuple[Path, str], trainers: int, storage: int) -> None:
    left_out = OTHERS | (BY_PART if trainers == 1 else set())
    names = [name for name in (CASES if trainers == 2 else SOME) if name not in left_out]
    expected, found = (run(epochs_of, trainers, number, *stored, names) for number in (0, storage))
    for name, rank in itertools.product(names, range(trainers)):
        assert found[rank][name] == expected[rank][name], (name, rank)


def test_a_planned_cache_is_the_only_copy_of_rows(stored: tuple[Path, str]) -> None:
    assert run(planned, 2, 2, *stored) == run(planned, 2, 0, *stored)


def test_storage_ranks_follow_any_use_of_loaders(stored: tuple[Path, str]) -> None:
    for rank, (found, expected) in enumerate(zip(run(uses, 2, 2, *stored), run(uses, 2, 0, *stored))):
        assert found[0] == expected[0], rank
        assert {**found[1], "fingerprint": None} == {**expected[1], "fingerprint": None}


def test_a_run_continues_with_other_numbers_of_ranks(stored: tuple[Path, str]) -> None:
    """A state of two ranks that train continues on one and on four, with other storage ranks or none."""
    (_, state), _ = run(uses, 2, 1, *stored)

    expected = together(run(resumed, 1, 0, *stored, state))
    assert expected
    for trainers, storage in ((1, 2), (4, 1), (2, 0)):
        assert together(run(resumed, trainers, storage, *stored, state)) == expected, (trainers, storage)


def mapped_labels(rank: int, root: Path, form: str, storage: int) -> list[int]:
    """Returns the resident bytes of the mapped files with labels, after an epoch whose batches have labels."""
    loader = make(root, CASES["three hops"], form, storage_ranks=storage)
    assert all("y" in batch for batch in loader)
    paths = sorted(loader.data.root.glob("part-*/*_y.npy"))
    assert paths
    return [resident_bytes_of(path) for path in paths]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_labels_of_seeds_are_no_memory_of_a_rank_that_trains(stored: tuple[Path, str]) -> None:
    for found in run(mapped_labels, 2, 1, *stored):
        assert not any(found)


# --- errors -------------------------------------------------------------------------------------------------


def _refused(rank: int, root: Path, form: str, storage: int) -> list[str]:
    def error(**options: Any) -> str:
        with pytest.raises((ValueError, TypeError)) as raised:
            make(root, CASES["plain"], form, storage_ranks=storage, **options)
        return str(raised.value)

    part = salientpp.load(root / "one" / form, storage_ranks=storage)
    with pytest.raises(ValueError, match=r"serve\(\) is for a rank that only stores"):
        salientpp.serve(part)
    found = [
        error(ways=[salientpp.ways.cache.Cache(0.1, "vip")]),
        error(partial_aggregation="mean"),
        error(columns={"x": torch.zeros(3, 2)}),
        error(cooperate="host"),
        error(batch_size=0),
        error(input_nodes="trian"),
        error(batch_size=4 + rank),
        error(depht=3),
    ]
    assert epoch_of(make(root, CASES["plain"], form, storage_ranks=storage)), "the storage ranks go on after mistakes"
    return found


def test_mistakes_are_refused_and_the_storage_goes_on(stored: tuple[Path, str]) -> None:
    expected = [
        "ways= does not work with storage_ranks",
        "partial_aggregation= does not work with storage_ranks",
        "columns= with row sources does not work with storage_ranks",
        "cooperate= does not work with storage_ranks",
        "batch_size should be",
        "splits",
        "batch_size",
        "depht",
    ]
    for found in run(_refused, 2, 1, *stored):
        for text, words in zip(found, expected, strict=True):
            assert words in text


def _loads(rank: int, root: Path) -> list[str]:
    found = []
    for options in (
        {"storage_ranks": 3},
        {"storage_ranks": -1},
        {"storage_ranks": "2"},
        {"storage_ranks": 1, "part_id": 0},
        {"storage_ranks": 1, "process_group": dist.group.WORLD},
    ):
        with pytest.raises(ValueError) as raised:
            salientpp.load(root, **options)
        found.append(str(raised.value))
    part = salientpp.load(root, storage_ranks=1)
    if part.only_stores:
        with pytest.raises(ValueError, match="this rank only stores"):
            NeighborLoader(part, [2], "train")
    return found


def test_wrong_numbers_of_storage_ranks_are_refused(stored: tuple[Path, str]) -> None:
    words = ["at least one of the 3 ranks to train", ">= 0", ">= 0", "leave part_id out", "leave process_group out"]
    for found in distributed.run(_loads, 3, stored[0] / "one" / stored[1]):
        for text, expected in zip(found, words, strict=True):
            assert expected in text
    with pytest.raises(ValueError, match="needs a job of at least 2 ranks, got one process"):
        salientpp.load(stored[0] / "one" / stored[1], storage_ranks=1)


# --- faults -------------------------------------------------------------------------------------------------


def _is_killed(rank: int, root: Path, form: str, storage: int) -> None:
    loader = make(root, CASES["plain"], form, storage_ranks=storage)
    for _ in itertools.islice(iter(loader), 1):
        pass
    iterator = iter(loader)
    next(iterator)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        next(iterator)


def test_a_killed_rank_that_trains_is_named_by_the_storage(stored: tuple[Path, str]) -> None:
    found = distributed.run(on_ranks, 4, 2, _is_killed, *stored, may_fail=True)
    for rank in (2, 3):
        assert found[rank].kind in ("RankFailure", "StageError"), found
        assert "rank 1" in found[rank].text, found


def _is_unknown(rank: int, root: Path, form: str) -> str:
    parts = [salientpp.load(root / graph / form, storage_ranks=1) for graph in ("one", "typed")]
    if parts[0].only_stores:
        salientpp.serve(parts[1])
        return ""
    with pytest.raises(ValueError) as raised:
        NeighborLoader(parts[0], [2], "train")
    return str(raised.value)


def test_a_graph_that_the_storage_does_not_serve_is_named(stored: tuple[Path, str]) -> None:
    for text in distributed.run(_is_unknown, 3, *stored)[:2]:
        assert f"does not serve {stored[0] / 'one' / stored[1]}" in text


SCRIPT = """
import sys, salientpp
salientpp.init_process_group("gloo")
part = salientpp.load(sys.argv[1], storage_ranks=1)
if part.only_stores:
    salientpp.serve(part)
else:
    loader = salientpp.NeighborLoader(part, [2], "train", batch_size=8)
    print("batches", sum(1 for _ in loader))
    if len(sys.argv) > 2:
        raise KeyError("a mistake in the step")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_ends_with_its_storage(stored: tuple[Path, str], tmp_path: Path, fails: bool) -> None:
    """Rank 0 hosts the store, and stays until the storage rank has read how the script ended."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(stored[0] / "one" / stored[1])
    ranks = [
        subprocess.Popen(
            [python(), str(script), root, *["fails"] * fails],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=distributed.HANG)[0] for rank in ranks]
    assert "batches" in texts[0], texts
    assert [rank.returncode for rank in ranks] == [int(fails)] * 2, texts
    if fails:
        assert "RankFailure: rank 0 ended early: KeyError: 'a mistake in the step'" in texts[1]
