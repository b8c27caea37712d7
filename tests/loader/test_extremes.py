"""Extreme arguments of the loaders are refused when a loader is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import random_data
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader


def graph() -> Data:
    data = random_data(60, 240, train_fraction=0.5)
    data.age, data.when = torch.arange(60), torch.arange(data.num_edges)
    return data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = graph()
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("extremes") / "parts", [2], 4).root


MEMORY = r"must be a number of bytes >= 0 and < 2\^63 of a host's memory, such as '8GiB', or None, got '?999"

#: Arguments of a loader of a partitioned graph -> words of the error.
OF_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "memory, text": ({"memory": "9" * 400 + "GiB"}, MEMORY),
    "memory, a number": ({"memory": int("9" * 400)}, MEMORY),
    "memory, 2^63": ({"memory": 2**63}, "must be a number of bytes >= 0 and < 2"),
    "memory, bytes as text": ({"memory": "1" + "0" * 30 + "B"}, "must be a number of bytes >= 0 and < 2"),
    "replication_factor": ({"replication_factor": "9" * 400 + "TiB"}, "replication_factor must be >= 0 .* or an amount of memory such as"),
    "read_ahead": ({"read_ahead": "9" * 400 + "B"}, "read_ahead must be"),
    "lookahead": ({"lookahead": "9" * 400 + "B"}, "lookahead must be"),
    "pad": ({"pad": {"sigma": 2**70}}, r"pad\['sigma'\] must be a number in \[0, 1000\] .*, got 1180591620717411303424"),
    "num_workers": ({"num_workers": None}, "num_workers must be an integer, got None"),
    "worker_init_fn": ({"worker_init_fn": 0, "num_workers": 1}, "worker_init_fn must be a function or None, got 0"),
    "device": ({"device": 2**70}, "device must be the CPU.*, got 1180591620717411303424"),
    "ways": ({"ways": [None]}, "ways must contain objects of salientpp.engine.way.Way, got NoneType"),
    "times of edges": ({"time_attr": "when"}, "the seeds need times, since edges have times; pass input_time"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PARTS)
def test_an_extreme_of_a_partitioned_graph_is_refused(root, name):
    options, words = OF_PARTS[name]
    with pytest.raises((ValueError, TypeError), match=words):
        NeighborLoader(salientpp.load(root), [2], "train", batch_size=4, **options)


AMOUNT = r"neg_sampling must draw a number of edges in \[0, 2,147,483,648\) for each edge of a batch, got "

#: Arguments of a loader of edges -> words of the error.
OF_EDGES: dict[str, tuple[dict[str, Any], str]] = {
    "an integer": ({"neg_sampling_ratio": 10**30}, AMOUNT + "10000"),
    "a number": ({"neg_sampling_ratio": 1e30}, AMOUNT + r"1e\+30"),
    "infinity": ({"neg_sampling_ratio": float("inf")}, AMOUNT + "inf"),
    "no number": ({"neg_sampling_ratio": float("nan")}, AMOUNT + "nan"),
    "400 digits": ({"neg_sampling_ratio": 10**400}, AMOUNT + "10000"),
    "triplets": ({"neg_sampling": NegativeSampling("triplet", 10**12)}, AMOUNT + "10000"),
    "no amount": ({"neg_sampling_ratio": "x"}, "neg_sampling_ratio must be a number >= 0, of edges for each edge of a batch, got 'x': "),
    "no kind": ({"neg_sampling": 2**70}, f"neg_sampling must be 'binary', 'triplet', a NegativeSampling .*, got {2**70}: {2**70} is not a valid"),
    "no mode": ({"neg_sampling": {}}, "neg_sampling must be 'binary', 'triplet', a NegativeSampling or the arguments of one, got {}: .*'mode'"),
    "time alone": (
        {"time_attr": "age"},
        "Received conflicting 'edge_label_time' and 'time_attr' arguments: 'edge_label_time' is not set while 'time_attr' is set. Both",
    ),
    "times of edges alone": ({"edge_label_time": torch.arange(240)}, "'edge_label_time' is set while 'time_attr' is not set"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_EDGES)
def test_an_extreme_of_edges_is_refused(name):
    options, words = OF_EDGES[name]
    with pytest.raises((ValueError, TypeError), match=words):
        LinkNeighborLoader(graph(), [2], batch_size=4, **options)


def test_times_of_edges_need_times_of_seeds():
    seeds = torch.arange(10)
    with pytest.raises(ValueError, match="the seeds need times, since edges have times; pass input_time"):
        NeighborLoader(graph(), [2], seeds, time_attr="when", batch_size=4)
    for options in ({"time_attr": "when", "input_time": seeds}, {"time_attr": "age"}):
        assert len(list(NeighborLoader(graph(), [2], seeds, batch_size=4, **options))) == 3


@pytest.mark.parametrize("epoch", [-1, -(10**400), 2**62, 10**400, 1.5, float("nan"), "1", None, True])
def test_an_epoch_that_no_state_can_have_is_refused(epoch):
    loader = NeighborLoader(graph(), [2], torch.arange(10), batch_size=4, shuffle=True, seed=0)
    loader.set_epoch(3)
    for set_epoch in (loader.set_epoch, loader.sampler.set_epoch):
        with pytest.raises(ValueError, match=r"epoch must be an integer in \[0, 2\^62\), got"):
            set_epoch(epoch)
    assert loader.state_dict()["epoch"] == 3


@pytest.mark.parametrize("epoch", [0, 7, 2**62 - 1, 4.0, torch.tensor(5)])
def test_a_state_of_an_epoch_can_be_loaded(epoch):
    loader, other = (NeighborLoader(graph(), [2], torch.arange(10), batch_size=4, shuffle=True, seed=0) for _ in "ab")
    loader.set_epoch(epoch)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict()["epoch"] == int(epoch)
    assert [batch.n_id.tolist() for batch in loader] == [batch.n_id.tolist() for batch in other]


def test_traces_may_be_nested(tmp_path):
    loader = NeighborLoader(graph(), [2], torch.arange(10), batch_size=5)

    def spans(name: str) -> list[str]:
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        return [event["name"] for event in events if event["ph"] == "X" and event["cat"] == "sample"]

    with loader.profile(tmp_path / "outer"):
        list(loader)
        with loader.profile(tmp_path / "inner"):
            list(loader)
        list(loader)
    list(loader)
    assert (len(spans("outer")), len(spans("inner"))) == (6, 2)


def test_relative_paths_stay_where_they_were(tmp_path, monkeypatch, root):
    monkeypatch.chdir(root.parent)
    part = salientpp.load(root.name)
    loader = NeighborLoader(part, [2], "train", batch_size=4)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(salientpp.load(root).split("all"), part.split("all"))
    rows = salientpp.load(root).node_rows()["x"]
    assert torch.equal(part.node_rows()["x"], rows) and part.root == root
    assert len(list(loader)) == len(loader)
    with loader.profile("trace.json"):
        list(loader)
        os.chdir(root.parent)
    assert (tmp_path / "trace.json").is_file()
