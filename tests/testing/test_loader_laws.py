"""Laws of the suite of random loaders: right objects pass, and an object with a fault fails within a few cases, which are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from random_cases.scene import SlowRows
from torch import Tensor

import salientpp
from salientpp import NeighborLoader, NeighborSampler, PartitionedGraph
from salientpp.engine.way import Way
from salientpp.loader.options import OPTIONS
from salientpp.loader.pyg_arguments import TorchArguments
from salientpp.store.rows import RowSource, TensorRows
from salientpp.store.tiers import IdSet, Tier
from salientpp.testing import LoaderLaws, leftovers
from salientpp.testing.graphs import random_data
from salientpp.testing.loader import OF_PARTS, VALUES
from salientpp.testing.topology import in_memory

#: Arguments that random loaders lack, with the reason.
WITHOUT = {
    "seed, timeout": "every loader has them",
    "cache": "it is an object of another loader",
    "process_group, share, generator, sampler, batch_sampler, dataset, collate_fn": "random jobs have them, without the object of a user",
    "ways": "it is how a way is given",
    "partial_aggregation, partial_aggregation_weight": "sums depend on which rows a rank has, so that a way changes them",
    "pad_static": "the batches of a list would be the same tensors",
    "pin_memory, pin_memory_device, device_rows_zero_copy, memory_device": "they need a device",
    "multiprocessing_context, in_order, worker_init_fn": "they change nothing",
    "memory_machines, memory_allow, pad_sigma, device_rows_cache, logical_ranks_join, shared_draws_block": "entries of mappings",
    "cooperate_batches, cooperate_split_by": "entries of mappings",
}


class SwappedRows(SlowRows):
    """Swaps two rows of a large request."""

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        index = torch.cat([index[:8], index[8:10].flip(0), index[10:]])
        super().take(index, out, out_index)


class EveryThird(Way):
    """Copies of every third row of ``x``."""

    name = "every third"

    def place(self, basis: Any, tiers: Any) -> Any:
        part, size = basis.source.part, basis.source.part.num_vertices
        rows = torch.cat([part.node_rows(number)["x"] for number in range(part.num_parts)])
        tier = Tier(
            "cache", IdSet.of(torch.arange(0, size, 3), size), {"x": TensorRows(self.chosen(rows))}, False, "cache"
        )
        return {None: dataclasses.replace(tiers[None], copies=[*tiers[None].copies, tier])}

    def chosen(self, rows: Tensor) -> Tensor:
        return rows[::3].contiguous()


class DroppedRow(EveryThird):
    """Drops the second row, so that the next ones have wrong numbers."""

    def chosen(self, rows: Tensor) -> Tensor:
        found = super().chosen(rows)
        return torch.cat([found[:1], found[2:], found[:1]])


def without_replacement(part: PartitionedGraph, num_neighbors: Any, options: dict[str, Any]) -> NeighborSampler:
    """Forgets an argument."""
    return in_memory(part, num_neighbors, {**options, "subgraph_type": "directional"})


class OfRows(LoaderLaws):
    @staticmethod
    def make_source(rows: Tensor, folder: Path) -> RowSource:
        return SlowRows(rows)


class TestRows(OfRows):
    cases = 6


class TestWay(LoaderLaws):
    options: ClassVar[dict[str, Any]] = {"ways": [EveryThird()]}
    forms = ("directory",)
    cases = 6


class TestTopology(LoaderLaws):
    stored = "parts"
    sampler = staticmethod(in_memory)
    cases = 6


class OfSwappedRows(LoaderLaws):
    @staticmethod
    def make_source(rows: Tensor, folder: Path) -> RowSource:
        return SwappedRows(rows)


class OfDroppedRow(LoaderLaws):
    options: ClassVar[dict[str, Any]] = {"ways": [DroppedRow()]}
    forms = ("directory",)


class OfForgottenArgument(LoaderLaws):
    stored = "parts"
    sampler = staticmethod(without_replacement)


@pytest.mark.parametrize(
    ("laws", "world", "wrong"),
    [
        (OfSwappedRows, 1, "batch .*x"),
        (OfSwappedRows, 2, "batch .*x"),
        (OfDroppedRow, 2, "batch .*: x"),
        (OfForgottenArgument, 2, "batch .*edge"),
    ],
)
def test_a_fault_fails_within_a_few_cases_which_the_failure_names(
    laws: type[LoaderLaws], world: int, wrong: str, tmp_path: Path
) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"(?s)set first = \d+ .*arguments=.*rank \d: {wrong}"):
        laws().test_random_loaders_give_the_same_batches(world, tmp_path)


def test_everything_that_a_loader_leaves_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "_SECONDS", 0.1)
    before = leftovers.Leftovers()
    assert not before.found()
    with open(tmp_path / "rows", "w"):
        assert f"open {tmp_path / 'rows'}" in before.found()[0]
    assert not before.found()


def test_every_argument_is_drawn_or_left_out_for_a_reason() -> None:
    there = {*OPTIONS, *TorchArguments.__annotations__}
    left_out = {name for names in WITHOUT for name in names.split(", ")}
    assert not there - {*VALUES, *OF_PARTS} - left_out, (
        "add the argument to VALUES or OF_PARTS of salientpp/testing/loader.py"
    )
    assert left_out <= there and not left_out & {*VALUES, *OF_PARTS}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": ["x", "y"]}, r"the tiers of 'every third' must have the rows of 'y' .* got None; give a tier the rows of all columns"),
        ({"send_as": {"x": "fp16"}}, r"the rows of 'x' as the part has them, each \(torch.uint8, \[8\]\), got \(torch.float32, \[3\]\)"),
    ],
)  # fmt: skip
def test_a_way_whose_tier_lacks_rows_of_a_column_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    """Otherwise the batches that need such a row would fail."""
    part = salientpp.partition(random_data(60, 200), 2, tmp_path / "parts", [2, 2], 8, refine=False)
    with pytest.raises(ValueError, match=words):
        NeighborLoader(part, [2, 2], "train", ways=[EveryThird()], **options)
