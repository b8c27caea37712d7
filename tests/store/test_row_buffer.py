"""Laws of rows in files and of the buffer that holds some of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pages_of_files import rows_in_file
from torch import Tensor

from salientpp.store.file_rows import FileRows
from salientpp.store.row_buffer import BufferedRows, RowBuffer
from salientpp.store.rows import JoinedRows, TensorRows
from salientpp.testing.row_source import RowSourceLaws

NUM_ROWS, WIDTH = 4000, 12


def mapped(folder: Path, rows: Tensor, name: str = "rows") -> Tensor:
    np.save(folder / f"{name}.npy", rows.numpy())
    return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))


def rows_by_hand(num_rows: int = NUM_ROWS) -> Tensor:
    return torch.arange(num_rows * WIDTH, dtype=torch.int32).view(num_rows, WIDTH)


def files_of(source: TensorRows | JoinedRows) -> FileRows:
    found = FileRows.of({"x": source}).get("x")
    assert found is not None
    return found


def buffer_of(folder: Path, num_slots: int) -> RowBuffer:
    return RowBuffer({"x": files_of(TensorRows(mapped(folder, rows_by_hand())))}, num_slots)


def taken(buffer: RowBuffer, index: Tensor) -> Tensor:
    out = torch.zeros((index.numel(), WIDTH), dtype=torch.int32)
    buffer.take("x", index, out.view(torch.uint8), None)
    return out


def read(buffer: RowBuffer, *batches: Tensor) -> int:
    """Admits batches, reads their rows together, and returns the bytes read."""
    before = buffer.columns["x"].bytes_read
    for rows in batches:
        assert buffer.admit(rows, [])
    buffer.read()
    return buffer.columns["x"].bytes_read - before


class TestBuffered(RowSourceLaws):
    """A source of which a third of the rows is in the buffer."""

    @pytest.fixture
    def source(self, expected, tmp_path):
        whole = TensorRows(rows_in_file(expected, tmp_path / "rows"))
        if not expected.numel():  # nothing to map
            return whole
        buffer = RowBuffer({"x": files_of(whole)}, 30)
        assert buffer.admit(torch.arange(0, len(expected), 3), [])
        buffer.read()
        return BufferedRows(buffer, "x", whole)


# --- files ------------------------------------------------------------------------------------------------


def test_rows_of_several_files_are_numbered_one_file_after_the_other(tmp_path):
    rows = rows_by_hand()
    pieces = [mapped(tmp_path, piece, str(number)) for number, piece in enumerate(rows.split([100, 2500, 1400]))]
    files = files_of(JoinedRows(pieces))
    index = torch.tensor([0, 99, 100, 100, 2599, 2600, 3999])
    for places in (None, torch.tensor([6, 0, 1, 5, 2, 4, 3])):
        out = torch.zeros((7, WIDTH), dtype=torch.int32)
        files.read(index, out.view(torch.uint8), places)
        assert torch.equal(out if places is None else out[places], rows[index])


def test_neighbouring_rows_are_read_in_one_block(tmp_path):
    files = files_of(TensorRows(mapped(tmp_path, rows_by_hand())))
    out = torch.zeros((2, WIDTH * 4), dtype=torch.uint8)
    files.read(torch.tensor([0, 1]), out)
    assert files.bytes_read == 4096
    files.read(torch.tensor([0, 200]), out)  # row 200 is in the third page
    assert files.bytes_read == 4096 + 3 * 4096


def test_rows_in_memory_or_written_to_are_no_rows_of_a_file(tmp_path):
    assert not FileRows.of({"x": TensorRows(rows_by_hand())})
    rows = mapped(tmp_path, rows_by_hand())
    rows[7] = 0
    assert not FileRows.of({"x": TensorRows(rows)})


def test_a_file_that_was_cut_short_is_named_with_the_byte(tmp_path):
    files = files_of(TensorRows(mapped(tmp_path, rows_by_hand())))
    os.truncate(tmp_path / "rows.npy", 10_000)
    out = torch.zeros((1, WIDTH * 4), dtype=torch.uint8)
    files.read(torch.tensor([5]), out)
    path, expected = re.escape(str(tmp_path / "rows.npy")), 128 + NUM_ROWS * WIDTH * 4
    with pytest.raises(
        OSError,
        match=f"{path} was cut short .* at least {expected} bytes, got 10000 .byte 118784 is missing.; copy",
    ):
        files.read(torch.tensor([2500]), out)


def test_numbers_of_rows_that_are_not_there_are_refused(tmp_path):
    files = files_of(TensorRows(mapped(tmp_path, rows_by_hand())))
    out = torch.zeros((2, WIDTH * 4), dtype=torch.uint8)
    for index, words in (([0, NUM_ROWS], r"in \[0, 4000\), got 4000"), ([3, 2], "must not decrease, got 2 after 3")):
        with pytest.raises(RuntimeError, match=words):
            files.read(torch.tensor(index), out)


# --- the buffer -------------------------------------------------------------------------------------------


def test_rows_are_the_same_whatever_was_read_before(tmp_path):
    draw, rows = torch.Generator().manual_seed(5), rows_by_hand()
    buffer, held = buffer_of(tmp_path, 300), []
    for _ in range(60):
        batch = torch.randperm(NUM_ROWS, generator=draw)[:80].sort().values
        if len(held) == 2:
            buffer.release(held.pop(0))
        read(buffer, batch)
        held.append(batch)
        index = torch.cat([batch, torch.randint(NUM_ROWS, (90,), generator=draw)])
        assert torch.equal(taken(buffer, index), rows[index])


def test_a_page_is_read_once_for_several_batches(tmp_path):
    together, apart = buffer_of(tmp_path, 1000), buffer_of(tmp_path, 1000)
    batches = [torch.arange(number, 800, 4) for number in range(4)]  # each has rows of every page
    pages = 10 * 4096
    assert read(together, *batches) == pages
    assert [read(apart, batch) for batch in batches] == [pages] * 4
    assert read(apart, *batches) == 0  # all are there


def test_rows_that_a_batch_holds_stay(tmp_path):
    buffer = buffer_of(tmp_path, 100)
    first = torch.arange(60)
    read(buffer, first)
    assert not buffer.admit(torch.arange(100, 160), [])
    assert buffer.num_held == 60
    assert buffer.admit(torch.arange(30, 100), [])
    buffer.read()
    before = buffer.columns["x"].bytes_read
    assert torch.equal(taken(buffer, first), rows_by_hand()[first]) and buffer.columns["x"].bytes_read == before


def test_rows_that_a_known_batch_needs_go_last(tmp_path):
    buffer = buffer_of(tmp_path, 100)
    old, new = torch.arange(50), torch.arange(50, 100)
    for batch in (old, new, new):  # the new rows are used more often and later
        read(buffer, batch)
        buffer.release(batch)
    assert buffer.admit(torch.arange(1000, 1040), [old])
    buffer.read()
    assert read(buffer, old) == 0


def test_of_rows_that_no_known_batch_needs_the_seldom_used_go_first(tmp_path):
    buffer = buffer_of(tmp_path, 100)
    often, once = torch.arange(50), torch.arange(50, 100)
    for batch in (often, often, once):
        read(buffer, batch)
        buffer.release(batch)
    read(buffer, torch.arange(1000, 1040))
    assert read(buffer, often) == 0


def test_after_a_failure_the_rows_are_missing_again(tmp_path):
    buffer = buffer_of(tmp_path, 100)
    rows, path = rows_by_hand(), tmp_path / "rows.npy"
    content, batch = path.read_bytes(), torch.arange(NUM_ROWS - 50, NUM_ROWS)
    os.truncate(path, 10_000)
    assert buffer.admit(batch, [])
    with pytest.raises(OSError, match="cut short"):
        buffer.read()
    buffer.release(batch)
    assert buffer.num_held == 0
    with path.open("r+b") as file:
        file.write(content)
    assert read(buffer, batch) > 0
    assert torch.equal(taken(buffer, batch), rows[batch])
