"""Laws of the exchange: every requested attribute travels once, and no other attribute is sent or counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distributed
import numpy as np
import pytest
import torch
from batches import packed
from graphs import random_data, random_hetero

import salientpp
from salientpp import NeighborLoader

WAYS: dict[str, Callable[[], Any]] = {
    "x": lambda: "x",
    "numpy": lambda: np.str_("x"),
    "tuple": lambda: ("x",),
    "twice": lambda: ["x", "x"],
    "twice, of two kinds": lambda: ["x", np.str_("x")],
    "array": lambda: np.array(["x", "x"]),
    "generator": lambda: (name for name in ["x"]),
    "set": lambda: {"x"},
    "mapping": lambda: {"x": 1}.keys(),
}
BOTH = {
    "tuple": lambda: ("x", "z"),
    "twice": lambda: ["x", "z", "x", "z"],
    "set": lambda: {"x", "z"},
    "frozenset": lambda: frozenset(["z", "x"]),
    "generator": lambda: iter(["x", "z"]),
}


def _exchanged(rank: int, root: str) -> tuple[dict, dict, list, list[str]]:
    part = salientpp.load(root)

    def bytes_and_rows(gather: Any, is_packed: bool = False, **options) -> tuple:
        loader = NeighborLoader(part, [4, 2], "train", batch_size=16, seed=1, columns=gather, uneven="exact", **options)
        for batch in packed(loader, serves=True) if is_packed else loader:
            original = part.original_id(batch.n_id)
            assert batch.x.size(0) != batch.num_nodes or torch.equal(batch.x[:, 0].long(), original)
            assert batch.z.size(0) != batch.num_nodes or torch.equal(batch.z, original)
        return loader.stats(), loader.cache.nbytes

    def shown(gather: Any, **options) -> tuple:
        stats, cache_bytes = bytes_and_rows(gather, **options)
        return stats.bytes_sent, stats.bytes_received, stats.rows_remote, stats.rows_cache, stats.rows, cache_bytes

    one = {name: shown(gather(), replication_factor=0.1) for name, gather in WAYS.items()}
    both = {name: shown(gather(), replication_factor=0.1) for name, gather in BOTH.items()}
    none = [
        shown((), **options) for options in ({}, {"replication_factor": 0.3}, {"device_rows": 0.5}, {"is_packed": True})
    ]
    batches = [len(NeighborLoader(part, [4, 2], "train", batch_size=16, uneven="exact"))]
    return one, both, none, batches


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list:
    data = random_data(200, 900)
    data.z = torch.arange(200)
    root = tmp_path_factory.mktemp("gather") / "d"
    salientpp.partition(data, 2, root, [4, 2], 16)
    return distributed.run(_exchanged, 2, str(root), seconds=240)


def test_an_attribute_travels_once_even_if_it_is_named_repeatedly(results):
    for one, both, _, _ in results:
        assert len(set(one.values())) == 1 and len(set(both.values())) == 1, (one, both)
        assert one["x"][2] > 0 and both["tuple"][0] > one["x"][0]


def test_without_attributes_no_ids_or_rows_travel_or_are_counted(results):
    for (_, _, none, _), (_, _, _, others) in zip(results, results[::-1]):
        for sent, received, remote, cached, rows, cache_bytes in none:
            assert (remote, cached, rows, cache_bytes) == (0, 0, 0, 0)
            # The counts, 16 bytes per round to the other rank, still travel: by them ranks leave an epoch together.
            assert sent == received and sent % 16 == 0 and sent <= 16 * (max(results[0][3][0], others[0]) + 10)


def test_vertex_types_without_attributes_deliver_no_rows():
    data = random_hetero()
    data["author"].num_nodes = data["author"].num_nodes
    del data["author"].x, data["author"].time
    loader = NeighborLoader(data, [3, 3], "paper", batch_size=10, seed=0)
    rows = sum(batch["paper"].num_nodes + batch["venue"].num_nodes for batch in loader)
    assert loader.stats().rows == rows


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (b"x", "columns must name node attributes of .*, got b'x'"),
        ([b"x"], "columns must name node attributes of .*, got b'x'"),
        ([("x",)], r"columns must name node attributes of .*, got \('x',\)"),
        ([None], "columns must name node attributes of .*, got None"),
        ({"x", "w"}, "columns must name node attributes of .*, got 'w'"),
        (np.array(["w"]), "columns must name node attributes of .*, got .*'w'"),
        (None, "columns must be the names of node attributes of .*, got NoneType"),
    ],
)
def test_columns_that_name_no_attribute_are_refused(tmp_path, columns, text):
    part = salientpp.partition(random_data(60, 200), 1, tmp_path / "d", [2], 8)
    with pytest.raises((ValueError, TypeError), match=text):
        NeighborLoader(part, [2], "train", batch_size=8, columns=columns)
