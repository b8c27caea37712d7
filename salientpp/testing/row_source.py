"""Tests (laws) that every source of feature rows must pass.

The test of a source subclasses :class:`RowSourceLaws` and overrides the fixture ``source``, which returns a source with the rows of ``expected``. The
fixture ``expected`` returns these rows as a tensor. It has defaults, and may be overridden too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp import NeighborLoader
from salientpp.store.fetch import InPlace, Packed
from salientpp.store.rows import RowSource, checked_rows, empty_rows, take_rows


class RowSourceLaws:
    """Tests of a source of rows. Subclass it and override the fixture ``source``."""

    @pytest.fixture(
        params=[((40,), torch.int64), ((41, 3), torch.float32), ((64, 2, 2), torch.bfloat16), ((40, 0), torch.int8)],
        ids=str,
    )
    def expected(self, request: pytest.FixtureRequest) -> Tensor:
        shape, dtype = request.param
        return torch.randint(100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    @pytest.fixture
    def source(self, expected: Tensor) -> RowSource:
        raise NotImplementedError(
            "the test class must override `source` with a fixture that returns a row source with the rows of `expected`"
        )

    def test_shape_and_dtype_describe_the_rows(self, source: RowSource, expected: Tensor) -> None:
        assert list(source.shape) == list(expected.shape) and source.dtype == expected.dtype
        assert checked_rows(source, "rows['x']", len(expected)) is source
        empty = empty_rows(source, 7)
        assert empty.shape == (7, *expected.shape[1:]) and empty.dtype == expected.dtype

    @pytest.mark.parametrize("pick", ["all", "backwards", "repeats", "one", "none"])
    def test_rows_come_in_the_order_of_their_numbers(self, source: RowSource, expected: Tensor, pick: str) -> None:
        size = len(expected)
        index = {
            "all": torch.arange(size),
            "backwards": torch.arange(size).flip(0),
            "repeats": torch.randint(size, (3 * size,), generator=torch.Generator().manual_seed(2)),
            "one": torch.tensor([size - 1]),
            "none": torch.empty(0, dtype=torch.int64),
        }[pick]
        before = index.clone()
        assert torch.equal(take_rows(source, index), expected[index])
        assert torch.equal(index, before), "the numbers stay as they are"

    def test_only_the_given_places_are_written(self, source: RowSource, expected: Tensor) -> None:
        generator = torch.Generator().manual_seed(3)
        index, places = (
            torch.randint(len(expected), (9,), generator=generator),
            torch.randperm(25, generator=generator)[:9],
        )
        out = torch.full((25, *expected.shape[1:]), 101).to(expected.dtype)
        want = out.clone()
        want[places] = expected[index]
        source.take(index, out, places)
        assert torch.equal(out, want)

    def test_a_piece_of_a_larger_tensor_may_be_filled(self, source: RowSource, expected: Tensor) -> None:
        whole = torch.full((12, *expected.shape[1:]), 101).to(expected.dtype)
        want = whole.clone()
        want[3:8] = expected[:5]
        source.take(torch.arange(5), whole[3:8])
        assert torch.equal(whole, want)

    def test_threads_may_take_rows_at_the_same_time(self, source: RowSource, expected: Tensor) -> None:
        def take(key: int) -> bool:
            index = torch.randint(len(expected), (50,), generator=torch.Generator().manual_seed(key))
            return torch.equal(take_rows(source, index), expected[index])

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(take, range(40)))

    @pytest.mark.parametrize("device_rows", [0, 0.4])
    @pytest.mark.parametrize("way", ["in place", "packed"])
    def test_batches_have_rows_of_the_source(
        self, source: RowSource, expected: Tensor, way: str, device_rows: float
    ) -> None:
        size = len(expected)
        ring = torch.arange(size)
        data = Data(edge_index=torch.stack([ring, ring.roll(3)]), num_nodes=size)
        loader = NeighborLoader(
            data, [1, 1], batch_size=7, num_workers=2, seed=0, columns={"x": source}, device_rows=device_rows
        )
        loader.engine.producer.fetch.own = InPlace() if way == "in place" else Packed(loader.device)
        batches = list(loader)
        assert len(batches) == -(-size // 7)
        for batch in batches:
            assert batch.x.dtype == expected.dtype and torch.equal(batch.x, expected[batch.n_id])
