"""Laws of `salientpp.graph.mapped`: a process releases only pages that it has read and not written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from salientpp.graph.mapped import _unwritten_of, nothing, releaser

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def write(folder: Path) -> Path:
    np.save(folder / "a.npy", np.arange(2**18))
    return folder / "a.npy"


def resident_kb(array: Tensor) -> int:
    """Returns the resident size of the mapping that the array lies in, in kB."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(head[1], 16) <= array.data_ptr() < int(head[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("it is in no map")


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_pages_that_were_read_are_released_and_read_again(tmp_path, mode):
    array = torch.from_numpy(np.load(write(tmp_path), mmap_mode=mode))
    total = int(array.sum())
    release = releaser(array)
    assert resident_kb(array) >= 2000
    release()
    assert resident_kb(array) <= 8, "only pages shared with the header or the end remain"
    assert int(array.sum()) == total
    release()
    assert resident_kb(array) <= 8


def test_values_written_to_a_copy_stay(tmp_path):
    array = torch.from_numpy(np.load(write(tmp_path), mmap_mode="c"))
    array[100_000] = -5
    releaser(array)()
    assert int(array[100_000]) == -5


@pytest.mark.parametrize("array", [torch.arange(2**18), torch.arange(3), torch.empty(0), torch.ones(2**16, 9)[:, ::2]])
def test_arrays_in_memory_stay(array):
    expected = array.clone()
    assert releaser(array) is nothing
    nothing()
    assert torch.equal(array, expected)


@pytest.mark.parametrize("has_swap", [True, False])
def test_written_pages_count_also_when_they_are_swapped_out(has_swap):
    """Lines as Linux writes them. A system without swap may leave out the last one."""
    pages = {"1-2": (0, 0), "3-4": (8, 0), "5-6": (0, 8 * has_swap), "7-8": (0, 0), "9-a": (8, 8)}
    lines = []
    for name, (anonymous, swap) in pages.items():
        lines += [f"{name} rw-p 00000000 08:01 7 /file\n", "Rss: 8 kB\n", f"Anonymous: {anonymous} kB\n"]
        lines += [f"Swap: {swap} kB\n"] * has_swap + ["VmFlags: rd wr\n"]
    for wanted in ({"1-2"}, {"3-4", "5-6"}, {"3-4", "5-6", "7-8"}, set(pages), {"9-a"}):
        expected = {name for name in wanted if pages[name] == (0, 0)}
        assert _unwritten_of(wanted, lines) == expected
