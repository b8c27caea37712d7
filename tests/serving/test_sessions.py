"""Laws of sessions: storage that outlives jobs changes no batch, and jobs on it know nothing of each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import pytest
from rare import rare
from storage_hosts import TOKEN, Hosts, serving
from storage_laws import BY_PART, NUM_HOSTS, OTHERS, PARTS, epochs_of, planned, resumed, together, uses
from storage_server import until

from salientpp.testing.topology import CASES, SOME, directories


@pytest.fixture(scope="module", params=["parts", *rare("whole")])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return directories(tmp_path_factory.mktemp("stored"), PARTS, request.param), request.param


@pytest.fixture(scope="module")
def hosts(stored: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    root, form = stored
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(root / "one" / form, NUM_HOSTS, tmp_path_factory.mktemp("hosts")) as started,
    ):
        patch.setenv("SALIENTPP_TOKEN", TOKEN)
        yield started


def on_rank(rank: int, of_trainer: Any, *args: Any) -> Any:
    import os

    os.environ["SALIENTPP_TOKEN"] = TOKEN  # ranks are forked from a server that started before the test
    return of_trainer(rank, *args)


def run(of_trainer: Any, trainers: int, *args: Any, **how: Any) -> list[Any]:
    return distributed.run(on_rank, trainers, of_trainer, *args, **how)


@pytest.mark.parametrize("trainers", [1, 2, 4])
def test_batches_do_not_depend_on_who_stores(stored: tuple[Path, str], hosts: Hosts, trainers: int) -> None:
    left_out = OTHERS | (BY_PART if trainers == 1 else set())
    every = [name for name in (CASES if trainers == 2 else SOME) if name not in left_out]
    names = [name for name in every if CASES[name][0] == "one"]
    expected = run(epochs_of, trainers, *stored, 0, names)
    found = run(epochs_of, trainers, *stored, {"one": hosts.address}, names)
    for name, rank in itertools.product(names, range(trainers)):
        assert found[rank][name] == expected[rank][name], (name, rank)
    until(lambda: not hosts.sessions())


@pytest.mark.parametrize("law", [planned, uses])
def test_a_session_serves_any_use_of_loaders(stored: tuple[Path, str], hosts: Hosts, law: Any) -> None:
    found, expected = (run(law, 2, *stored, where) for where in ({"one": hosts.address}, 0))
    for rank in range(2):
        if law is uses:
            assert found[rank][0] == expected[rank][0], rank
            assert {**found[rank][1], "fingerprint": None} == {**expected[rank][1], "fingerprint": None}
        else:
            assert found[rank] == expected[rank], rank
    until(lambda: not hosts.sessions())


def test_a_run_continues_on_storage_hosts(stored: tuple[Path, str], hosts: Hosts) -> None:
    """A state of two ranks with storage hosts continues on one rank, and on four without storage hosts."""
    where = {"one": hosts.address}
    (_, state), _ = run(uses, 2, *stored, where)
    expected = together(run(resumed, 1, *stored, 0, state))
    assert expected
    for trainers, storage in ((1, where), (4, where), (2, 0)):
        assert together(run(resumed, trainers, *stored, storage, state)) == expected, (trainers, storage)


@pytest.mark.rare
@pytest.mark.parametrize("number", [1, 3])
def test_the_number_of_storage_hosts_changes_no_batch(stored: tuple[Path, str], tmp_path: Path, number: int) -> None:
    root, form = stored
    (tmp_path / "one").mkdir()
    (tmp_path / "typed").mkdir()
    with (
        serving(root / "one" / form, number, tmp_path / "one") as one,
        serving(root / "typed" / form, number, tmp_path / "typed") as typed,
    ):
        where = {"one": one.address, "typed": typed.address}
        for trainers in (1, 2, 4):
            names = [name for name in CASES if name not in OTHERS | (BY_PART if trainers == 1 else set())]
            names = names if trainers == 2 else [name for name in names if name in SOME]
            expected = run(epochs_of, trainers, *stored, 0, names)
            found = run(epochs_of, trainers, *stored, where, names)
            for name, rank in itertools.product(names, range(trainers)):
                assert found[rank][name] == expected[rank][name], (name, rank)
