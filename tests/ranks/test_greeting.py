"""Laws of greetings: if ranks run different versions of the package, every rank raises an error before any other communication."""

from __future__ import annotations

import re
import warnings

import distributed
import pytest
import torch
import torch.distributed as dist
import torch_geometric
from distributed import NEVER
from graphs import random_data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.engine.option import Values
from salientpp.fullgraph import local
from salientpp.ranks import greeting
from salientpp.ranks.greeting import DifferentVersions, check_names, describe_difference

OURS = "salientpp 0.4.0\nwire 3\nhost a\n"
WORDS = "all ranks must run the same version of salientpp, got different ones: "


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("greeting") / "parts"
    salientpp.partition(random_data(), 2, folder, [3, 2], 8)
    return str(folder)


# --- the format -------------------------------------------------------------------------------------------


def test_the_format_of_a_greeting_never_changes(monkeypatch):
    """Other versions read this text. The key and the lines must never change; new lines may follow."""
    monkeypatch.setattr(greeting, "own_version", lambda: "1.2.3")
    monkeypatch.setattr(greeting, "versions_of_libraries", lambda: {"torch": "2.13.0", "torch_geometric": "2.8.1"})
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    store = dist.HashStore()
    greeting.greet(store, 5)
    expected = f"salientpp 1.2.3\nwire {greeting.WIRE_FORMAT}\nhost node7\ntorch 2.13.0\ntorch_geometric 2.8.1\n"
    assert store.get("salientpp/greeting/5") == expected.encode()


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (OURS, None),
        ("host b\ncolour deep blue\nwire 3\n\nnothing\nsalientpp 0.4.0", None),
        ("salientpp 0.4.1\nwire 3\nhost b\n", "rank 1 on host b has version 0.4.1 with wire format 3"),
        ("salientpp 0.4.0\nwire 4\nhost b\n", "rank 1 on host b has version 0.4.0 with wire format 4"),
        ("salientpp 7\r\nhost b\r\nwire forty two\r\n", "rank 1 on host b has version 7 with wire format forty two"),
        ("", "rank 1 on host unknown has version unknown with wire format unknown"),
        ('{"salientpp": 9}', "rank 1 on host unknown has version unknown with wire format unknown"),
    ],
)
def test_greetings_of_any_version_can_be_read_and_unknown_lines_are_ignored(theirs, words):
    told = describe_difference({0: OURS, 1: theirs})
    if words is None:
        assert told is None
    else:
        assert told == (
            f"{WORDS}rank 0 on host a has version 0.4.0 with wire format 3; {words}; "
            "install the same version on every host, and start all ranks again"
        )


def test_an_error_names_only_a_few_of_many_ranks():
    told = describe_difference(
        {rank: OURS if rank % 2 else OURS.replace("0.4", "0.5") for rank in range(12)}, " of all"
    )
    listed = ", ".join(f"rank {rank} of all on host a" for rank in (0, 2, 4, 6))
    assert (
        told is not None and f"{listed} and 2 more ranks have version 0.5.0 with wire format 3; rank 1 of all" in told
    )


def test_facts_that_only_some_ranks_know_mean_different_sources():
    check_names([{"a": 1, "b": 2}, {"b": 3, "a": None}])
    with pytest.raises(
        DifferentVersions, match=r"rank 0 and rank 2 of all do not: only one of them knows a, c; install"
    ):
        check_names([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 3, "c": 4}], " of all")


# --- ranks ------------------------------------------------------------------------------------------------


def _make(what: str, root: str, group: dist.ProcessGroup | None = None) -> None:
    if what == "loader":
        NeighborLoader(salientpp.load(root), [3, 2], "train", batch_size=8, timeout=NEVER)
    elif what == "loader of a group":
        NeighborLoader(salientpp.load(root, process_group=group), [3, 2], "train", process_group=group, timeout=NEVER)
    elif what == "loader of shared hosts":
        NeighborLoader(salientpp.load(root), [3, 2], "train", ranks_per_host=2, timeout=NEVER)
    elif what == "loader of links":
        LinkNeighborLoader(salientpp.load(root), [3, 2], neg_sampling="binary", batch_size=8, timeout=NEVER)
    elif what == "full graph":
        local(salientpp.load(root), timeout=NEVER)
    else:
        local(random_data(), timeout=NEVER)


def _pretend(rank: int, what: str, other: str, root: str) -> str:
    """Returns the error of this rank if rank 1 runs another version."""
    group = dist.new_group([0, 1])
    if rank == 1 and other in ("version", "wire format"):
        setattr(greeting, *(("own_version", lambda: "9.0") if other == "version" else ("WIRE_FORMAT", 77)))
    elif rank == 1:
        store = dist.distributed_c10d._get_default_store()
        if other == "of the future":  # behaves in a way that this version does not know
            store.set("salientpp/greeting/1", "host far\nsalientpp 9.0\nwire 77\ncolour blue\n")
        else:  # "of the past": answers without a greeting
            store.set("salientpp/all/1/before/1", '["gloo", []]')
        return ""
    try:
        _make(what, root, group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


_MAKERS = [
    "loader",
    "loader of a group",
    "loader of shared hosts",
    "loader of links",
    "full graph",
    "full graph of Data",
]


@pytest.mark.parametrize("what", _MAKERS)
@pytest.mark.parametrize("other", ["version", "wire format"])
def test_all_ranks_get_an_error_if_their_versions_differ(root, what, other):
    first, second = distributed.run(_pretend, 2, what, other, root)
    version, wire = ("9.0", greeting.WIRE_FORMAT) if other == "version" else (salientpp.__version__, 77)
    assert first == second
    assert re.fullmatch(
        rf"DifferentVersions: {WORDS}rank 0 on host \S+ has version {salientpp.__version__} with wire format {greeting.WIRE_FORMAT}; "
        rf"rank 1 on host \S+ has version {version} with wire format {wire}; install the same .*",
        first,
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("of the future", "rank 1 on host far has version 9.0 with wire format 77"),
        ("of the past", "rank 1 on host unknown has version unknown with wire format unknown"),
    ],
)
def test_ranks_do_not_wait_for_a_rank_of_an_unknown_version(root, other, words):
    told, _ = distributed.run(_pretend, 2, "loader", other, root)
    assert told.startswith(f"DifferentVersions: {WORDS}rank 0") and words in told


def test_the_host_of_the_store_stays_until_ranks_know_of_different_versions(root):
    told = distributed.run(_pretend, 2, "loader", "version", root, rank_0_hosts=True)
    assert told[0] == told[1] and told[0].startswith(f"DifferentVersions: {WORDS}")


def _know_more(rank: int, root: str) -> str:
    if rank == 1:
        facts_of = Values.facts
        Values.facts = lambda self, of_host: {**facts_of(self, of_host), "new_option": True}
    try:
        _make("loader", root)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_an_error_on_all_ranks_names_an_option_that_only_some_know(root):
    for told in distributed.run(_know_more, 2, root):
        assert told == (
            "DifferentVersions: all ranks must run the same sources of salientpp, but rank 0 and rank 1 do not: only one of them knows "
            "new_option; install the same sources on every host, and start all ranks again"
        )


def _with_another_pyg(rank: int, root: str) -> list[str]:
    own = greeting.versions_of_libraries()
    assert own == {"torch": torch.__version__.partition("+")[0], "torch_geometric": torch_geometric.__version__}
    if rank == 1:
        greeting.versions_of_libraries = lambda: {**own, "torch": "unknown", "torch_geometric": "2.7.9"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _make("loader", root)
    return [str(warning.message) for warning in caught if "versions" in str(warning.message)]


def test_ranks_with_different_versions_of_a_library_get_one_warning(root):
    first, second = distributed.run(_with_another_pyg, 2, root)
    assert first == second
    assert len(first) == 1 and re.fullmatch(
        rf"the ranks run different versions of torch_geometric: rank 0 on host \S+ has {torch_geometric.__version__}; "
        r"rank 1 on host \S+ has 2.7.9; their results may differ, so install the same version on every host",
        first[0],
    )


def _agree_and_go_on(rank: int, root: str) -> int:
    for _ in range(2):
        _make("loader", root)
    words = torch.tensor([1])
    dist.all_reduce(words)
    return int(words)


def test_ranks_of_one_version_continue(root):
    assert distributed.run(_agree_and_go_on, 2, root) == [2, 2]
