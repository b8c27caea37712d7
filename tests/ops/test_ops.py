"""Laws of the compiled kernels: they agree with their schemas, and refuse bad input with a clear error.

The results of a kernel are tested beside the module that uses it. Only the results of `gather_rows` and `pack_id_set`
are tested here.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from operator_cases import BIG, CASES, INDICES, INDPTR, NONE, OUT_INDICES, OUT_INDPTR, ints, long, rows_of, same_bits

from salientpp import ops

LIBRARY = Path(__file__).parents[2] / "csrc" / "library.cpp"


# --- schemas ----------------------------------------------------------------------------------------------


#: Operators that write to an argument. Their schemas declare it.
WRITERS = {"gather_rows", "gather_joined_rows", "reduce_rows", "read_rows", "encode_rows", "decode_rows", "round_rows"}


def test_every_operator_is_checked_here():
    assert set(re.findall(r'm\.def\("(\w+)\(', LIBRARY.read_text())) == set(CASES)


@pytest.mark.parametrize(
    "name, arguments",
    [pytest.param(name, case, id=f"{name}{i}") for name, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_schema_agrees_with_the_kernel(name, arguments):
    torch.library.opcheck(getattr(torch.ops.salientpp, name).default, arguments(), test_utils="test_schema")


@pytest.mark.parametrize("name", sorted(set(CASES) - WRITERS))
def test_operators_do_not_change_their_inputs(name):
    for arguments in CASES[name]:
        given = arguments()
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
        operator = getattr(torch.ops.salientpp, name)
        operator(*given)
        written = [
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in operator.default._schema.arguments
        ]
        for a, b, is_written in zip(given, before, written):
            assert is_written or (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


@pytest.mark.parametrize("num_vertices", [0, 1, 5])
def test_indices_take_four_bytes_if_ids_fit(num_vertices):
    assert ops.csc_from_coo(NONE, NONE, num_vertices)[1].dtype == torch.int32


# --- gather_rows ------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
# 1, 2 and 128 of every dtype meet the row lengths that the kernel has a special case for: 4, 8, 256 and 512 bytes.
ROW_SHAPES = [(), (1,), (2,), (3,), (64,), (100,), (128,), (0,), (3, 5), (2, 0, 4)]


def _evicted(path: Path) -> torch.Tensor:
    """Maps the rows of a file; no page of it is in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        map_ = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    rows = torch.frombuffer(map_, dtype=torch.uint8).view(-1, 256)
    there = (ctypes.c_ubyte * (rows.nbytes // mmap.PAGESIZE))()
    asked = ctypes.CDLL(None).mincore(ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(rows.nbytes), there)
    if asked != 0 or sum(there) > len(there) // 50:
        pytest.skip("this file system keeps files in memory")
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux")
@pytest.mark.parametrize("how", ["gathered", "gathered from several", "decoded"])
def test_reading_rows_from_disk_reads_only_the_pages_that_hold_them(tmp_path, how):
    path, rng = tmp_path / "rows", np.random.default_rng(0)
    values = rng.integers(
        0, 120, (400_000, 256), dtype=np.uint8
    )  # 102 MB; no 16-bit float in it is NaN, because NaN differs from itself
    with path.open("wb") as file:
        values.tofile(file)
        file.flush()
        os.fdatasync(file.fileno())
    index = torch.from_numpy(rng.integers(0, len(values), 4000))

    def taken(piece: int) -> tuple[torch.Tensor, int]:
        """Gathers the rows; returns them and the number of bytes read from disk."""
        rows = _evicted(path)
        out = (
            torch.empty(index.numel(), 128, dtype=torch.float32)
            if how == "decoded"
            else torch.empty(index.numel(), 256, dtype=torch.uint8)
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        for part, to in zip(index.split(piece), out.split(piece)):
            if how == "decoded":
                ops.decode_rows(rows, part, to, None, 0, 0)
            elif how == "gathered from several":
                ops.gather_joined_rows([rows[:150_000], rows[150_000:]], part, to)
            else:
                ops.gather_rows(rows, part, to, None)
        return out, (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512

    one_by_one, _ = taken(100)  # too few rows for a look at the pages
    together, alone = taken(index.numel())
    expected = torch.from_numpy(values[index.numpy()])
    assert torch.equal(together, expected.view(torch.float16).float() if how == "decoded" else expected)
    assert torch.equal(one_by_one, together)
    pages = torch.unique(index * 256 // mmap.PAGESIZE).numel() * mmap.PAGESIZE
    assert alone < 1.2 * pages, "no neighbours"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_rows_equals_indexing_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(11)
    for shape in ROW_SHAPES:
        source = rows_of(dtype, (50, *shape), seed=5)
        for num_rows in (0, 1, 9, 200):
            index = torch.randint(50, (num_rows,), generator=generator)
            for index_dtype in (torch.int32, torch.int64):
                out = rows_of(dtype, (num_rows + 3, *shape), seed=6)
                want = out.clone()
                want[:num_rows] = source[index]
                ops.gather_rows(source, index.to(index_dtype), out)
                assert same_bits(out, want), (shape, num_rows, index_dtype)

                places = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
                out = rows_of(dtype, (num_rows + 3, *shape), seed=6)
                want = out.clone()
                for place, row in zip(
                    places, source[index], strict=True
                ):  # torch cannot write values of every dtype to several places at once
                    want[place] = row
                ops.gather_rows(source, index.to(index_dtype), out, places)
                assert same_bits(out, want), (shape, num_rows, index_dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bits8, torch.bits16, torch.bits2x4, torch.uint4, torch.int3, torch.float4_e2m1fn_x2], ids=str
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)], ids=str)
def test_gather_rows_copies_dtypes_that_torch_cannot_index(dtype, shape):
    source, out = (torch.randint(256, (6, *shape, dtype.itemsize), dtype=torch.uint8) for _ in range(2))
    want = out.clone()
    want[long(2, 0)] = source[long(5, 3)]
    as_dtype = lambda rows: rows.view(dtype).reshape(6, *shape)  # noqa: E731
    ops.gather_rows(as_dtype(source), long(5, 3), as_dtype(out), long(2, 0))
    assert torch.equal(out, want)


def test_gather_rows_refuses_bad_arguments_with_an_uncommon_dtype():
    for dtype in (torch.uint16, torch.float8_e5m2):
        with pytest.raises(RuntimeError, match="out must have the dtype of source"):
            ops.gather_rows(torch.zeros(4, dtype=dtype), long(1), torch.zeros(4, dtype=torch.int16))
        with pytest.raises(
            RuntimeError, match="out must have rows of the same shape as source, expected size 2 in dimension 1, got 3"
        ):
            ops.gather_rows(torch.zeros(4, 2, dtype=dtype), long(1), torch.zeros(4, 3, dtype=dtype))
        with pytest.raises(RuntimeError, match="contiguous"):
            ops.gather_rows(torch.zeros(2, 4, dtype=dtype).T, long(1), torch.zeros(4, 2, dtype=dtype))


@pytest.mark.parametrize("width", [1, 7, 128])
def test_gather_rows_is_right_when_threads_share_the_work(width):
    generator = torch.Generator().manual_seed(12)
    source = torch.rand(1000, width, generator=generator)
    index = torch.randint(1000, (700_000 // width,), generator=generator)
    places = torch.randperm(index.numel(), generator=generator)
    out = torch.empty(index.numel(), width)
    ops.gather_rows(source, index, out, places)
    assert torch.equal(out[places], source[index])


@pytest.mark.parametrize("row_bytes", [64, 256, 320, 512, 100])
@pytest.mark.parametrize("offset", [0, 64, 16])
def test_gather_rows_is_right_for_large_outputs_in_random_order(row_bytes, offset):
    """Rows of whole, aligned lines bypass the caches if the output has 4 MiB or more."""
    generator = torch.Generator().manual_seed(13)
    num_rows = -(-(5 * 2**20) // row_bytes)
    source = torch.randint(256, (1000, row_bytes), generator=generator, dtype=torch.uint8)
    index = torch.randint(1000, (num_rows - 7,), generator=generator)
    places = torch.randperm(num_rows, generator=generator)
    memory = torch.full((num_rows * row_bytes + 128,), 7, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + offset
    out = memory[begin : begin + num_rows * row_bytes].view(num_rows, row_bytes)
    ops.gather_rows(source, index, out, places[7:])
    assert torch.equal(out[places[7:]], source[index])
    assert bool((out[places[:7]] == 7).all()), "other rows are unchanged"
    assert bool((memory[:begin] == 7).all()) and bool((memory[begin + out.numel() :] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.uint16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("sizes", [(50,), (20, 30), (0, 50, 0), (1, 0, 30, 19), (1,) * 50], ids=str)
def test_rows_of_several_tensors_are_gathered_as_from_one(dtype, sizes):
    generator = torch.Generator().manual_seed(14)
    for shape in ((), (3,), (64,), (0,), (2, 0)):
        whole = rows_of(dtype, (50, *shape), seed=5)
        pieces = [whole[end - size : end].clone() for size, end in zip(sizes, itertools.accumulate(sizes))]
        for num_rows in (0, 1, 200):
            index = torch.randint(50, (num_rows,), generator=generator)
            for places in (None, torch.randperm(num_rows + 3, generator=generator)[:num_rows]):
                for index_dtype in (torch.int32, torch.int64):
                    out, want = (rows_of(dtype, (num_rows + 3, *shape), seed=6) for _ in range(2))
                    ops.gather_joined_rows(pieces, index.to(index_dtype), out, places)
                    ops.gather_rows(whole, index, want, places)
                    assert same_bits(out, want), (shape, num_rows, index_dtype)


@pytest.mark.parametrize(
    "sources, source_index, text",
    [
        ([], NONE, "sources must have at least one tensor, got none"),
        ([torch.zeros(2, 2), torch.zeros(2, 2)], long(0, 4), r"source_index\[1\] must be in \[0, 4\), got 4"),
        ([torch.zeros(2, 2), torch.zeros(2, 2)], long(-1), r"source_index\[0\] must be in \[0, 4\), got -1"),
        ([torch.zeros(2, 2), torch.zeros(2, 3)], long(0), "rows of the same shape as source, expected size 3"),
        ([torch.zeros(2, 2), torch.zeros(2, 2).double()], long(0), "out must have the dtype of source"),
        ([torch.zeros(2, 2), torch.zeros(2, 4)[:, ::2]], long(0), "contiguous"),
    ],
)
def test_tensors_that_do_not_match_are_refused_and_out_is_unchanged(sources, source_index, text):
    out = torch.full((5, 2), -1.0)
    with pytest.raises(RuntimeError, match=text):
        ops.gather_joined_rows(sources, source_index, out)
    assert torch.equal(out, torch.full((5, 2), -1.0))


def test_an_output_without_dimensions_is_refused():
    with pytest.raises(RuntimeError, match="source and out must have the same number of dimensions >= 1, got 2 and 0"):
        ops.gather_joined_rows([torch.zeros(4, 2)], long(0), torch.tensor(0.0))


def test_out_must_not_be_one_of_the_sources():
    memory = torch.zeros(8, 2)
    with pytest.raises(RuntimeError, match="out must not overlap source in memory"):
        ops.gather_joined_rows([torch.zeros(4, 2), memory[:4]], long(0), memory[3:])


def test_gather_rows_reads_memory_mapped_rows(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(30, dtype=np.float32).reshape(10, 3))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="c")
    out = torch.zeros(2, 3)
    ops.gather_rows(torch.from_numpy(rows), long(9, 1), out)
    assert out.tolist() == [[27, 28, 29], [3, 4, 5]]


@pytest.mark.parametrize(
    "source_index, out_index, text",
    [
        (long(0, 1, 4), None, r"source_index\[2\] must be in \[0, 4\), got 4"),
        (long(0, -1, 2), None, r"source_index\[1\] must be in \[0, 4\), got -1"),
        (ints(0, 1, -2), None, r"source_index\[2\] must be in \[0, 4\), got -2"),
        (long(0, 1, 2), long(0, 1, 5), r"out_index\[2\] must be in \[0, 5\), got 5"),
        (long(0, 1, 2), long(0, -1, 3), r"out_index\[1\] must be in \[0, 5\), got -1"),
    ],
)
def test_gather_rows_with_an_index_out_of_range_does_not_change_out(source_index, out_index, text):
    out = torch.full((5, 2), -1.0)
    with pytest.raises(RuntimeError, match=text):
        ops.gather_rows(torch.rand(4, 2), source_index, out, out_index)
    assert torch.equal(out, torch.full((5, 2), -1.0))


ROWS = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((ROWS, torch.zeros(1), ROWS), r"source_index must have dtype int32 or int64, got Float"),
        ((ROWS, long(0).view(1, 1), ROWS), r"source_index must have 1 dimension, got 2"),
        ((ROWS, long(0, 1, 2, 3)[::2], ROWS), r"source_index must be contiguous"),
        ((ROWS, long(0), torch.zeros(4)), r"source and out must have the same number of dimensions >= 1, got 2 and 1"),
        ((torch.zeros(()), long(0), torch.zeros(())), r"same number of dimensions >= 1, got 0 and 0"),
        ((ROWS, long(0), ROWS.double()), r"out must have the dtype of source, expected Float, got Double"),
        ((ROWS, long(0), torch.zeros(4, 3)), r"same shape as source, expected size 2 in dimension 1, got 3"),
        ((ROWS.t(), long(0), torch.zeros(4, 4)), r"source and out must be contiguous"),
        ((ROWS, long(0, 0), torch.zeros(1, 2)), r"out must have at least 2 rows, got 1"),
        ((ROWS, long(0, 0), ROWS, long(0)), r"out_index must have one entry per row, expected 2, got 1"),
        ((ROWS, long(0), ROWS, ints(0)), r"out_index must have dtype Long, got Int"),
        ((ROWS[:0], long(0), ROWS), r"source_index\[0\] must be in \[0, 0\), got 0"),
        ((ROWS, long(0), ROWS), r"out must not overlap source in memory"),
        ((ROWS[:3], long(0), ROWS[2:]), r"out must not overlap source in memory"),
    ],
)
def test_gather_rows_refuses_bad_arguments(arguments, text):
    with pytest.raises(RuntimeError, match=text):
        ops.gather_rows(*arguments)


# --- sets -------------------------------------------------------------------------------------------------


def members_of(words: torch.Tensor) -> list[int]:
    return [32 * w + b for w, word in enumerate(words.tolist()) for b in range(32) if word >> b & 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_packed_set_holds_its_ids_and_counts_those_before_each_word(seed):
    generator = torch.Generator().manual_seed(seed)
    num_ids = int(torch.randint(1, 500, (), generator=generator))
    ids = (torch.rand(num_ids, generator=generator) < 0.3).nonzero().flatten()
    words = ops.pack_id_set(ids, num_ids)
    assert members_of(words) == ids.tolist()
    assert [word >> 32 for word in words.tolist()] == [int((ids < 32 * w).sum()) for w in range(len(words))]
    assert len(words) == (-(-num_ids // 32) if len(ids) else 0)


def test_a_packed_set_may_be_full_or_empty():
    assert members_of(ops.pack_id_set(torch.arange(64), 64)) == list(range(64))
    assert ops.pack_id_set(NONE, 64).tolist() == []


@pytest.mark.parametrize(
    "ids, num_ids, text",
    [
        (long(3, 3), 40, r"ids must ascend without repeats, got 3 after 3"),
        (long(3, 2), 40, r"ids must ascend without repeats, got 2 after 3"),
        (long(33, 2), 40, r"ids must ascend and lie in \[0, 40\), got 2"),
        (long(1, 64), 40, r"ids must ascend and lie in \[0, 40\), got 64"),
        (long(-1, 4), 40, r"ids must ascend and lie in \[0, 40\), got -1"),
        (long(0), 0, r"ids must ascend and lie in \[0, 0\), got 0"),
        (long(0), -1, r"num_ids must be >= 0, got -1"),
        (long(0), 2**63 - 1, r"cannot allocate a vector of 288230376151711744 entries"),
        (ints(0), 1, r"ids must have dtype Long, got Int"),
    ],
)
def test_pack_id_set_refuses_bad_ids(ids, num_ids, text):
    with pytest.raises(RuntimeError, match=text):
        ops.pack_id_set(ids, num_ids)


@pytest.mark.parametrize("bad_id", [40, 41, 63])
def test_pack_id_set_refuses_ids_in_the_last_words_unused_bits(bad_id):
    with pytest.raises(RuntimeError, match=rf"\[0, 40\), got {bad_id}"):
        ops.pack_id_set(long(1, bad_id), 40)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(hash=ints(0)), "hash must have dtype Long, got Int"),
        (dict(cells=NONE), "cells must have at least 1 entry, got 0"),
        (dict(shift=64), r"shift must be in \[0, 64\), got 64"),
        (dict(num_keys=-1), "num_keys must be >= 0, got -1"),
        (dict(num_keys=2), "stored must have 2 values, got 3"),
        (dict(stored=[]), "stored must have offsets or None for each column, got 1 for 0 columns|same columns"),
        (dict(wanted_offsets=[long(0, 2)]), "wanted must have 2 values, got 1"),
        (dict(wanted=[torch.zeros(2, 1, dtype=torch.uint8)]), "wanted must have 1 dimensions, got 2"),
        (dict(stored=[long(1)]), "stored must be contiguous uint8"),
        *(
            (
                dict(change),
                "cells must ascend from 0 to num_keys, and stored_offsets and wanted_offsets to the number of bytes",
            )
            for change in (
                dict(cells=long(0, 4)),
                dict(cells=long(-1, 3)),
                dict(cells=long(2, 1)),
                dict(stored_offsets=[long(0, 9, 9, 9)]),
                dict(stored_offsets=[long(3, 1, 2, 3)]),
                dict(stored_offsets=[long(-1, 1, 2, 3)]),
                dict(wanted_offsets=[long(0, 1, 3)]),
            )
        ),
    ],
)
def test_find_keys_refuses_bad_arguments(change, text):
    stored, wanted = (torch.arange(size, dtype=torch.uint8) for size in (3, 2))
    arguments = dict(hash=long(5, 5), cells=long(0, 3), first=5, shift=0, num_keys=3)
    arguments |= dict(
        stored=[stored], stored_offsets=[long(0, 1, 2, 3)], wanted=[wanted], wanted_offsets=[long(0, 1, 2)]
    )
    assert ops.find_keys(**arguments).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match=text):
        ops.find_keys(**arguments | change)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(hit_place=long(1, 1)), r"hit_place must ascend in \[0, 3\), got 1 at 1"),
        (dict(hit_place=long(0, 3)), r"hit_place must ascend in \[0, 3\), got 3 at 1"),
        (dict(hit_place=long(-1)), r"hit_place must ascend in \[0, 3\), got -1 at 0"),
        (dict(remote_id=long(1, 10, 5)), r"remote_id\[1\] must be in \[0, 10\), got 10"),
        (dict(remote_position=long(1)), "remote_position must have one entry per id, expected 3, got 1"),
        (dict(offsets=long(10)), r"offsets must have num_parts \+ 1 >= 2 entries, got 1"),
    ],
)
def test_take_hits_refuses_bad_arguments(change, text):
    arguments = dict(
        remote_position=long(9, 0, 4), remote_id=long(1, 8, 5), offsets=long(0, 3, 6, 10), hit_place=long(0, 2)
    )
    if "remote_id" in change:
        arguments["hit_place"] = NONE
    with pytest.raises(RuntimeError, match=text):
        ops.take_hits(**arguments | change)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(n_id=long(0, 10)), r"n_id\[1\] must be in \[0, 10\), got 10"),
        (dict(n_id=long(-1)), r"n_id\[0\] must be in \[0, 10\), got -1"),
        (dict(n_id=long(-(2**63)), part_id=1), r"n_id\[0\] must be in \[0, 10\), got -9223372036854775808"),
        (dict(n_id=ints(0)), r"n_id must have dtype Long, got Int"),
        (dict(offsets=long(10)), r"offsets must have num_parts \+ 1 >= 2 entries, got 1"),
        (dict(part_id=3), r"part_id must be in \[0, 3\), got 3"),
        (dict(part_id=-1), r"part_id must be in \[0, 3\), got -1"),
        (
            dict(offsets=long(0, 3, 60, 100), part_id=1, local_sets=[NONE, long(1)]),
            r"local_sets\[1\] must cover the 57 rows of the part",
        ),
        (
            dict(offsets=long(0, 3, 60, 100), remote_sets=[long(1)]),
            r"remote_sets\[0\] must cover the 100 vertices of the graph",
        ),
        (dict(local_sets=[ints(1)]), r"local_sets must have dtype Long, got Int"),
    ],
)
def test_look_up_refuses_bad_arguments(change, text):
    arguments = dict(n_id=long(0), offsets=long(0, 3, 6, 10), part_id=0, local_sets=[], remote_sets=[]) | change
    with pytest.raises(RuntimeError, match=text):
        ops.look_up(**arguments)


# --- checks of the other kernels (the checks in Python are tested with their modules) ----------------------

VIP = dict(
    indptr=INDPTR,
    out_indptr=OUT_INDPTR,
    out_indices=OUT_INDICES,
    seeds=long(0),
    seed_offsets=long(0, 1),
    fanouts=[2],
    batch_size=1,
    frontier=True,
    include_seeds=False,
    replace=False,
)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(seeds=long(3)), r"seeds\[0\] must be in \[0, 3\), got 3"),
        (dict(seeds=long(-1)), r"seeds\[0\] must be in \[0, 3\), got -1"),
        (dict(seed_offsets=long(0, 2)), r"seed_offsets must run from 0 to the number of seeds, 1"),
        (dict(seed_offsets=long(0, 2, 1)), r"seed_offsets must not decrease"),
        (dict(seed_offsets=NONE), r"seed_offsets must have K \+ 1 >= 1 entries, got 0"),
        (dict(fanouts=[-2]), r"fanouts\[0\] must be >= 0, or -1 for all neighbours, got -2"),
        (dict(batch_size=0), r"batch_size must be >= 1, got 0"),
        (dict(out_indptr=long(0, 1)), r"indptr and out_indptr must have the same N \+ 1 entries, got 4 and 2"),
        (dict(out_indices=torch.zeros(3)), r"out_indices must have dtype int32 or int64, got Float"),
    ],
)
def test_inclusion_probability_refuses_bad_arguments(change, text):
    with pytest.raises(RuntimeError, match=text):
        ops.inclusion_probability(**(VIP | change))


SAMPLE = dict(indptr=INDPTR, indices=INDICES, edge_id=None, seeds=long(0), fanouts=[2], batch_key=1)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(seeds=long(0, 3)), r"seeds\[1\] must be in \[0, 3\), got 3"),
        (dict(seeds=long(0, -1)), r"seeds\[1\] must be in \[0, 3\), got -1"),
        (dict(seeds=ints(0)), r"seeds must have dtype Long, got Int"),
        (dict(seeds=long(0, 1, 0, 1)[::2]), r"seeds must be contiguous"),
        (dict(fanouts=[-2]), r"fanouts\[0\] must be >= 0, or -1 for all neighbours, got -2"),
        (dict(fanouts=[2**31]), r"fanouts\[0\] must be < 2\^31, got 2147483648"),
        (dict(edge_id=long(1, 2)), r"edge_id must have one entry per edge, expected 3, got 2"),
        (dict(edge_id=ints(1, 2, 3)), r"edge_id must have dtype Long, got Int"),
        (dict(links=long(1, 2)), r"links must have one entry per edge, expected 3, got 2"),
        (dict(links=ints(1, 2, 3)), r"links must have dtype Long, got Int"),
        (dict(links=long(0, 1, 2), edge_id=long(0, 1, 2)), r"edge_id must be None if links are given"),
        (dict(links=long(3, 3, 3)), r"indices is corrupt: it holds 3, expected ids in \[0, 3\)"),
        (dict(indptr=NONE), r"indptr must have N \+ 1 >= 1 entries, got 0"),
        (dict(indptr=INDPTR.int()), r"indptr must have dtype Long, got Int"),
        (dict(indices=torch.zeros(3)), r"indices must have dtype int32 or int64, got Float"),
    ],
)
@pytest.mark.parametrize("budget", [ops.MAP_BUDGET_BYTES, 0], ids=["stamp_map", "hash_map"])
def test_sample_neighbors_refuses_bad_arguments(change, text, budget):
    given = SAMPLE | change
    with pytest.raises(RuntimeError, match=text):
        ops.sample_neighbors(**given, map_budget_bytes=budget)
    if given.pop("edge_id") is None and given.pop("links", None) is None:
        with pytest.raises(RuntimeError, match=text):
            ops.sample_vertices(**given, map_budget_bytes=budget)


@pytest.mark.parametrize(
    "source, target, num_vertices, text",
    [
        (long(0), long(0, 1), 2, r"target must have one entry per edge, expected 1, got 2"),
        (long(0), ints(0), 2, r"target must have dtype Long, got Int"),
        (torch.zeros(1), torch.zeros(1), 2, r"source must have dtype int32 or int64, got Float"),
        (long(0).view(1, 1), long(0), 2, r"source must have 1 dimension, got 2"),
        (long(0), long(0), -1, r"num_vertices must be >= 0, got -1"),
    ],
)
def test_csc_from_coo_refuses_bad_arguments(source, target, num_vertices, text):
    with pytest.raises(RuntimeError, match=text):
        ops.csc_from_coo(source, target, num_vertices)


def test_sums_over_lists_are_products_with_the_adjacency_matrix():
    value = torch.rand(80, dtype=torch.float64)
    dense = torch.zeros(80, 80, dtype=torch.float64)
    target = torch.arange(80).repeat_interleave(BIG.in_degree())
    dense.index_put_((target, BIG.indices.long()), torch.ones((), dtype=torch.float64), accumulate=True)
    assert torch.allclose(ops.sum_over_lists(BIG.indptr, BIG.indices, value), dense @ value, rtol=1e-12)
    for width in range(1, 9):
        rows = torch.rand(80, width, dtype=torch.float64)
        assert torch.allclose(ops.sum_over_lists(BIG.indptr, BIG.indices, rows), dense @ rows, rtol=1e-12)
        assert torch.allclose(
            ops.sum_over_lists(BIG.indptr, BIG.indices, rows.float()), (dense @ rows).float(), rtol=1e-5
        )


COST = torch.zeros(2, 3)
REASSIGN = dict(
    cost=COST, assignment=long(0, 1, 1), weights=torch.ones(3, 1, dtype=torch.int64), limits=long(2), most_moves=3
)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(cost=COST.double()), "cost must be a contiguous tensor of dtype Float and 2 dimensions"),
        (dict(cost=torch.zeros(3)), "cost must be a contiguous tensor of dtype Float and 2 dimensions"),
        (dict(cost=torch.zeros(3, 2).t()), "cost must be a contiguous tensor of dtype Float and 2 dimensions"),
        (dict(cost=torch.zeros(0, 3)), r"cost must have 1 to 2\^31 - 1 rows, got 0"),
        (dict(cost=torch.full((2, 3), float("nan"))), r"cost\[0, 0\] must be finite, got nan"),
        (dict(assignment=long(0, 1)), "assignment must have one entry per column of cost, expected 3, got 2"),
        (dict(assignment=long(0, 1, 2)), r"assignment\[2\] must be in \[0, 2\), got 2"),
        (dict(assignment=long(0, -1, 1)), r"assignment\[1\] must be in \[0, 2\), got -1"),
        (
            dict(weights=torch.ones(3, 2, dtype=torch.int64)),
            r"weights must have one row per vertex .* expected \[3, 1\]",
        ),
        (dict(weights=torch.ones(3, 1)), "weights must have dtype Long, got Float"),
        (dict(weights=-torch.ones(3, 1, dtype=torch.int64)), r"weights\[0, 0\] must be >= 0, got -1"),
        (dict(weights=torch.full((3, 1), 2**62)), r"weights\[:, 0\] sum to more than 2\^63 - 1; scale them down"),
        (dict(limits=long(-1)), r"limits\[0\] must be >= 0, got -1"),
        (dict(most_moves=-1), "most_moves must be >= 0, got -1"),
    ],
)
def test_reassign_parts_refuses_bad_arguments(change, text):
    with pytest.raises(RuntimeError, match=text):
        ops.reassign_parts(**(REASSIGN | change))


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(indices=ints(1, 2, 3)), r"indices must be in \[0, 3\), the number of values; one is not"),
        (dict(indices=ints(1, 2, -1)), r"indices must be in \[0, 3\), the number of values; one is not"),
        (dict(indptr=long(0, 2, 1, 3)), "indptr must not decrease, got 1 after 2"),
        (dict(indptr=long(0, 2, 3, 4)), "indptr must run from 0 to the number of indices, 3, got 0 to 4"),
        (dict(value=torch.zeros(3, dtype=torch.int64)), "value must have dtype Double or Float, got Long"),
        (dict(value=torch.zeros(3, 9)), "value must have 1 to 8 columns, got 9"),
        (dict(value=torch.zeros(3, 1, 1)), "value must have 1 or 2 dimensions, got 3"),
        (dict(value=torch.zeros(2, 3).t()), "value must be contiguous"),
        # Far from the current vertex, where lists are read ahead.
        (dict(indptr=torch.arange(61), indices=torch.full((60,), 2**62)), "indices must be in"),
        (
            dict(indptr=torch.arange(61), indices=torch.cat([torch.zeros(59, dtype=torch.int64), long(2**62)])),
            "indices must be in",
        ),
        (
            dict(indptr=torch.arange(61), indices=torch.cat([torch.zeros(59, dtype=torch.int64), long(-(2**63))])),
            "indices must be in",
        ),
        (
            dict(indptr=torch.arange(61), indices=torch.cat([torch.zeros(59), torch.tensor([-(2.0**31)])]).int()),
            "indices must be in",
        ),
    ],
)
def test_sum_over_lists_refuses_bad_arguments(change, text):
    with pytest.raises(RuntimeError, match=text):
        ops.sum_over_lists(**(dict(indptr=INDPTR, indices=INDICES, value=torch.zeros(3, dtype=torch.float64)) | change))


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(indptr=long(0, 2, 1, 3)), "indptr must not decrease, got 1 after 2"),
        (dict(indptr=long()), "indptr must have N . 1 >= 1 entries, got 0"),
        (dict(indptr=long(0, 2, 3, 4)), "indptr must run from 0 to the number of indices, 3, got 0 to 4"),
        (dict(indices=torch.zeros(3)), "indices must have dtype int32 or int64, got Float"),
    ],
)
def test_is_symmetric_refuses_bad_arguments(change, text):
    with pytest.raises(RuntimeError, match=text):
        ops.is_symmetric(**(dict(indptr=INDPTR, indices=INDICES) | change))


def test_transpose_csc_checks_its_arguments():
    with pytest.raises(RuntimeError, match=r"indices\[2\] must be in \[0, 3\), got 3"):
        ops.transpose_csc(INDPTR, ints(0, 1, 3))


def test_a_permutation_needs_a_size_of_at_least_zero():
    with pytest.raises(RuntimeError, match=r"size must be >= 0, got -1"):
        ops.permutation(-1, 0)


# --- checks that prevent memory corruption ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "text"), [([5, 10], r"offsets\[0\] must be 0, got 5"), ([0, 9, 4, 10], "must not decrease")]
)
def test_look_up_refuses_an_invalid_partition_book(offsets, text):
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=text):
        ops.look_up(torch.tensor([0, 1, 7]), torch.tensor(offsets), 0, [empty], [empty])


@pytest.mark.parametrize(
    ("indptr", "text"),
    [
        ([0, 7, 2, 3], "indptr must not decrease, got 2 after 7"),
        ([0, 1, 2, 9], "indptr must run from 0 to the number of edges, 3"),
    ],
)
def test_inclusion_probability_refuses_invalid_degrees(indptr, text):
    with pytest.raises(RuntimeError, match=text):
        ops.inclusion_probability(**(VIP | dict(indptr=torch.tensor(indptr))))


def test_two_halves_of_one_array_do_not_overlap():
    rows = torch.arange(8.0).view(4, 2)
    ops.gather_rows(rows[:2], long(1, 0), rows[2:])
    assert rows.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("out_indptr", "out_indices", "text"),
    [
        ([0, 1, 2, 3], [10**9, 0, 0], r"out_indices must be in \[0, 3\), got 1000000000"),
        ([0, 1, 2, 3], [-1, 0, 0], "out_indices must be in"),
        ([0, 1, 2, 9], [1, 0, 0], "out_indptr must run from 0 to the number of out_indices, 3"),
        ([0, 7, 2, 3], [1, 0, 0], "out_indptr must not decrease"),
    ],
)
def test_inclusion_probability_refuses_a_corrupt_transpose(out_indptr, out_indices, text):
    with pytest.raises(RuntimeError, match=text):
        ops.inclusion_probability(
            torch.tensor([0, 1, 2, 3]),
            torch.tensor(out_indptr),
            torch.tensor(out_indices),
            torch.tensor([0]),
            torch.tensor([0, 1]),
            [2],
            1,
            frontier=True,
            include_seeds=False,
            replace=False,
        )


# --- huge pages -------------------------------------------------------------------------------------------


def test_huge_pages_change_no_value_and_no_address():
    rows = torch.arange(3 * 2**20, dtype=torch.float32)
    address, before = rows.data_ptr(), rows.clone()
    ops.use_huge_pages(rows)
    assert rows.data_ptr() == address and torch.equal(rows, before)


def test_huge_pages_leave_a_file_unread(tmp_path):
    rows = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(3 * 2**20,))
    del rows
    rows = torch.from_numpy(np.memmap(tmp_path / "rows", dtype=np.float32, mode="c"))
    ops.use_huge_pages(rows)
    smaps = Path("/proc/self/smaps").read_text().split(str(tmp_path / "rows"))[1]
    assert re.search(r"Rss: +0 kB", smaps.split("VmFlags")[0])
