"""Laws of edge attributes that travel or are stored narrower: every row of a batch equals its decoded bytes, whichever rank holds the edge."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from rare import rare
from torch_geometric.data import Data, HeteroData

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.store.narrow import Narrow
from salientpp.testing.comparison import compare

FANOUTS, BATCH = [4, 3], 8
SENT = {"edge_attr": "int8", "many": "fp16"}
WRITES = ("author", "writes", "paper")


def with_attributes(store: Any, num_edges: int) -> None:
    generator = torch.Generator().manual_seed(5)
    store.edge_attr = torch.randn(num_edges, 20, generator=generator) * 3
    store.many = torch.randn(num_edges, 2, 3, generator=generator).double()
    store.exact = torch.randn(num_edges, 4, generator=generator)


def one_type() -> Data:
    data = random_data(240, 1500, seed=3, directed=True)
    with_attributes(data, data.num_edges)
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(2))
    return data


def several_types() -> HeteroData:
    data = typed_data()
    with_attributes(data[WRITES], data[WRITES].num_edges)
    return data


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "trees": {"disjoint": True, "num_workers": 1},
    "weights": {"weight_attr": "weight", "depth": 1},
    "induced": {"subgraph_type": "induced"},
    "three hops": {"num_neighbors": [3, 2, 2]},
    "joined logical ranks": {"logical_ranks": {"number": 4, "join": True}},
    "rows too": {"send_as": {**SENT, "x": "bf16"}, "replication_factor": 0.2},
}


def rounded(batch: Any, names: dict[str, str]) -> Any:
    """Encodes and decodes the attributes of a batch's edges."""
    for name, format in names.items():
        rows = batch[name]
        narrow = Narrow(format, rows.dtype, tuple(rows.shape[1:]))
        batch[name] = narrow.decode(narrow.encode(rows))
    return batch


def epochs(rank: int, root: Path, names: list[str]) -> dict[str, list[str]]:
    """Compares batches over parts whose attributes travel narrower with rounded batches over whole lists."""
    found = {}
    for name in names:
        given = {
            "num_neighbors": FANOUTS,
            "input_nodes": "train",
            "batch_size": BATCH,
            "shuffle": True,
            "seed": 5,
            "send_as": SENT,
        }
        given |= CASES[name]
        rows = {key: value for key, value in given["send_as"].items() if key == "x"} or None
        ours = NeighborLoader(salientpp.load(root / "parts"), **given)
        want = NeighborLoader(salientpp.load(root / "whole"), **{**given, "send_as": rows})
        exact = NeighborLoader(salientpp.load(root / "parts"), **{**given, "send_as": rows})
        expected = [rounded(batch, SENT) for batch in want]
        found[name] = compare(ours, expected)
        for _ in exact:
            pass
        sent = ours.stats().list_bytes_sent, exact.stats().list_bytes_sent
        if salientpp.load(root / "parts").part_id is not None and sent[1] and not sent[0] < sent[1] * 0.6:
            found[name].append(f"{sent[0]} bytes of lists instead of {sent[1]}")
        for form in ("whole", "parts"):
            stored = NeighborLoader(salientpp.load(root / f"stored {form}"), **{**given, "send_as": rows})
            found[name] += [f"stored, {form}: {each}" for each in compare(stored, expected)]
            if form == "parts" and stored.stats().list_bytes_sent != sent[0]:
                found[name].append(f"{stored.stats().list_bytes_sent} bytes of stored lists instead of {sent[0]}")
    return found


@pytest.mark.parametrize("num_parts, world", [(2, 1), (2, 2), (4, 2), *rare((4, 4))])
def test_edge_attributes_are_rounded_alike_on_every_rank_and_fewer_bytes_travel(tmp_path, num_parts, world):
    for form, store_as in itertools.product(("whole", "parts"), (None, SENT)):
        root = tmp_path / (f"stored {form}" if store_as else form)
        salientpp.partition(one_type(), num_parts, root, FANOUTS, BATCH, topology=form, refine=False, store_as=store_as)
    names = list(CASES) if num_parts == world == 2 else ["plain", "induced"]
    found = distributed.run(epochs, world, tmp_path, names)
    assert found == [dict.fromkeys(names, [])] * world


FOR_ONE_TYPE: dict[Any, str] = {(WRITES, "edge_attr"): "int8", "many": "fp16"}


def typed_epoch(rank: int, root: Path) -> list[str]:
    given = {"batch_size": BATCH * 8, "seed": 1, "shuffle": True}
    ours = LinkNeighborLoader(salientpp.load(root / "parts"), TYPED_FANOUTS, WRITES, **given, send_as=FOR_ONE_TYPE)
    want = LinkNeighborLoader(salientpp.load(root / "whole"), TYPED_FANOUTS, WRITES, **given)
    batches = list(want)
    for batch in batches:
        rounded(batch[WRITES], SENT)
    wrong = compare(ours, batches)
    for form in ("whole", "parts"):
        stored = LinkNeighborLoader(salientpp.load(root / f"stored {form}"), TYPED_FANOUTS, WRITES, **given)
        wrong += [f"stored, {form}: {each}" for each in compare(stored, batches)]
    return wrong


def test_a_format_may_be_for_one_edge_type(tmp_path):
    for form, store_as in itertools.product(("whole", "parts"), (None, FOR_ONE_TYPE)):
        root = tmp_path / (f"stored {form}" if store_as else form)
        salientpp.partition(
            several_types(), 2, root, TYPED_FANOUTS, BATCH, seeds=("paper", "train"), topology=form, store_as=store_as
        )
    assert distributed.run(typed_epoch, 2, tmp_path) == [[]] * 2


@pytest.mark.parametrize(
    "form, send_as, text",
    [
        ("whole", {"edge_attr": "int8"}, "send_as names the edge attribute 'edge_attr', but every rank has the edge attributes of"),
        ("parts", {"weight": "fp16"}, "send_as['weight']: a row of 'weight' takes 4 bytes as fp16, and 4 as it is; leave it out"),
        ("parts", {"q": "fp16"}, "send_as must name node or edge attributes (edge_attr, exact, many, weight, who, x, y), got 'q'"),
    ],
)  # fmt: skip
def test_send_as_formats_that_save_nothing_are_refused(tmp_path, form, send_as, text):
    data = one_type()
    data.who = torch.arange(240)
    salientpp.partition(data, 1, tmp_path / "d", FANOUTS, BATCH, topology=form)
    with pytest.raises(ValueError) as caught:
        NeighborLoader(salientpp.load(tmp_path / "d"), FANOUTS, "train", send_as=send_as)
    assert text in str(caught.value)
