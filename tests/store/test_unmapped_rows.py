"""Laws of rows that are read from files through the page cache, instead of memory maps."""

from __future__ import annotations

import copy
import os
import resource

import numpy as np
import pytest
import torch
from pages_of_files import resident_bytes_of, rows_in_file

from salientpp.store.file_rows import UnmappedRows
from salientpp.store.rows import JoinedRows, TensorRows, take_rows
from salientpp.testing.row_source import RowSourceLaws


class TestUnmapped(RowSourceLaws):
    @pytest.fixture
    def source(self, expected, tmp_path):
        whole = TensorRows(rows_in_file(expected, tmp_path / "rows"))
        return UnmappedRows.of({"x": whole})["x"]


def test_reading_rows_adds_no_pages_of_their_files_to_the_process(tmp_path):
    rows, paths = torch.arange(100_000), [tmp_path / f"{number}.npy" for number in range(2)]
    for path, piece in zip(paths, rows.split(50_000)):
        np.save(path, piece.numpy())
    mapped = JoinedRows([torch.from_numpy(np.load(path, mmap_mode="c")) for path in paths])
    source, index = UnmappedRows.of({"y": mapped})["y"], torch.arange(0, 100_000, 700).flip(0)
    for some in (source, copy.deepcopy(source)):
        assert torch.equal(take_rows(some, index), rows[index])
    assert isinstance(source, UnmappedRows) and [resident_bytes_of(path) for path in paths] == [0, 0]
    take_rows(mapped, index)
    assert min(map(resident_bytes_of, paths)) > 0, "this is what the law is about"


def test_rows_in_memory_stay_as_they_are():
    rows = TensorRows(torch.arange(10))
    assert UnmappedRows.of({"y": rows}) == {"y": rows}


def test_rows_of_more_files_than_the_process_may_open_stay_mapped(tmp_path):
    rows = torch.arange(100)
    for number, piece in enumerate(rows.split(20)):
        np.save(tmp_path / f"{number}.npy", piece.numpy())
    mapped = JoinedRows([torch.from_numpy(np.load(path, mmap_mode="c")) for path in sorted(tmp_path.iterdir())])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.open(tmp_path, os.O_RDONLY)
    os.close(next_one)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one + 3, hard))
        found = UnmappedRows.of({"y": mapped})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == {"y": mapped}
    assert isinstance(UnmappedRows.of({"y": mapped})["y"], UnmappedRows)
