"""Laws of `salientpp.store.assembly` and of the recipes of `salientpp.store.fetch`: rows of all tiers end up in the batch's order, with and without the kernel.

Without a GPU, the kernel runs in Triton's interpreter. It is also compiled for GPUs that this machine lacks.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
import triton_interpreter
from graphs import identity_features
from tier_rows import FRACTIONS, random_case, random_rows, sources

from salientpp.ranks.partition_book import PartitionBook
from salientpp.store import cache as caches
from salientpp.store import fetch
from salientpp.store.assembly import NUM_TENSORS, assemble_rows, run_kernel
from salientpp.store.cache import FeatureCache
from salientpp.store.fetch import Packed
from salientpp.store.tiers import IdSet, Places, Tier, Tiers

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
SHAPES = [(), (3,), (100,), (7, 5), (301,), (0,)]


@pytest.fixture
def interpreted():
    with triton_interpreter.interpreted():
        yield


# --- the kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_from_the_concatenated_sources(interpreted, dtype, shape):
    generator = np.random.default_rng(0)
    for number, sizes in enumerate([(5, 3, 4, 0, 9), (0, 0, 7), (6,), (1, 0, 0, 0, 1)], DTYPES.index(dtype)):
        sources = [random_rows(generator, size, shape, dtype) for size in sizes]
        index_dtype = (torch.int32, torch.int64)[number % 2]
        index = torch.from_numpy(generator.integers(0, sum(sizes), size=57)).to(index_dtype)
        want = torch.cat(sources)[index.long()]
        for function in (assemble_rows, run_kernel) if want.numel() else (assemble_rows,):
            out = random_rows(generator, 57, shape, dtype)
            function(sources, index, out)
            assert torch.equal(out, want), (function.__name__, index_dtype)


def test_more_tensors_than_the_kernel_takes_are_refused():
    with pytest.raises(ValueError, match=r"at most 5 tensors, got 6"):
        run_kernel([torch.ones(1)] * 6, torch.tensor([0]), torch.empty(1))


def test_the_kernel_writes_only_the_output(interpreted):
    whole = torch.full((20, 3), -1.0)
    run_kernel([identity_features(10)], torch.arange(10, dtype=torch.int32), whole[5:15])
    assert whole[5:15, 0].tolist() == list(range(10)) and (whole[:5] == -1).all() and (whole[15:] == -1).all()


@pytest.mark.parametrize("words, widest", [(25, "b64"), (50, "v2.b64")])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_gpus_and_moves_16_bytes_where_rows_allow(capability, words, widest):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from salientpp.store import assembly_kernel

    pointers = ["out", "index", *(f"source_{i}" for i in range(NUM_TENSORS))]
    sizes = [*(f"end_{i}" for i in range(NUM_TENSORS - 1)), "num_rows"]
    columns = min(triton.next_power_of_2(words), 128)
    constants = {"WORDS": words, "ROWS": 1024 // columns, "COLUMNS": columns}
    signature = {
        **dict.fromkeys(pointers, "*i64"),
        "index": "*i32",
        **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(assembly_kernel._assemble, signature, constants, aligned)
    assembly = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    loads = set(re.findall(r"ld\.global\.(\w+(?:\.\w+)?)", assembly)) - {"b32"}
    stores = set(re.findall(r"st\.global\.(\w+(?:\.\w+)?)", assembly))
    assert loads == stores == {widest}


# --- recipes ----------------------------------------------------------------------------------------------


def random_tiers(
    seed: int, gpu_fraction: float, cache_fraction: float, zero_copy: bool, cache_share: float
) -> tuple[Tiers, torch.Tensor]:
    book, part_id, device_ids, cache_ids, n_id = random_case(seed, gpu_fraction, cache_fraction)
    begin, end = book.range_of(part_id)
    x = identity_features(book.num_vertices, 2)
    tiers = Tiers.of(
        book, part_id, sources(x=x[begin:end].clone()), device_ids=device_ids, device=CPU, zero_copy=zero_copy
    )
    if len(cache_ids):
        cache = FeatureCache(IdSet.of(cache_ids, book.num_vertices), {"x": x[cache_ids]})
        scores = torch.from_numpy(np.random.default_rng(seed).random(book.num_vertices))
        num_bytes = int(cache_share * len(cache_ids)) * x[0].nbytes
        cache = caches.on_device({None: cache}, {None: scores}, num_bytes, CPU)[None]
        tiers = dataclasses.replace(tiers, copies=cache.tiers(zero_copy))
    return tiers, n_id


@pytest.mark.parametrize("zero_copy", [False, True])
@FRACTIONS
def test_a_recipe_puts_every_row_in_its_place(interpreted, monkeypatch, gpu_fraction, cache_fraction, zero_copy):
    by_torch = fetch.assemble_rows

    def by_kernel(tensors, index, out):
        return run_kernel(tensors, index, out) if out.numel() else None

    way = Packed(CPU)
    for cache_share, seed in itertools.product([0, 0.4, 1] if cache_fraction else [0], range(4)):
        monkeypatch.setattr(fetch, "assemble_rows", (by_kernel, by_torch)[seed % 2])
        tiers, n_id = random_tiers(seed, gpu_fraction, cache_fraction, zero_copy, cache_share)
        places = tiers.look_up(n_id)
        recipe = way.plan(tiers, places)
        packed = way.take(tiers, "x", recipe)
        arrived = places.remote_id.float().view(-1, 1).repeat(1, 2)
        out = way.put_together(tiers, "x", recipe, packed, arrived)
        assert torch.equal(out[:, 0].long(), n_id) and torch.equal(out[:, 1], out[:, 0])
        if zero_copy:
            assert packed.numel() == 0
        else:
            on_device = sum(slot.numel() for tier, _, slot in tiers.groups(places) if tier.memory == "device")
            assert len(packed) == len(n_id) - len(arrived) - on_device, "only rows that the device lacks are packed"


def test_the_highest_scores_go_to_the_device_until_it_is_full():
    ids = torch.arange(3, 13)
    rows = {"x": identity_features(20, 2)[ids], "y": ids.clone()}  # 16 bytes a row
    cache = FeatureCache(IdSet.of(ids, 20), rows)
    scores = torch.zeros(20)
    scores[[4, 8, 11]] = torch.tensor([3.0, 1.0, 2.0])
    for num_bytes, kept in [(0, []), (15, []), (16, [4]), (47, [4, 11]), (48, [4, 8, 11])]:
        tiered = caches.on_device({None: cache}, {None: scores}, num_bytes, CPU)[None]
        assert len(tiered.device_members) == len(kept)
        if kept:
            assert tiered.device_rows["y"].tolist() == tiered.device_rows["x"][:, 0].tolist() == kept
            assert tiered.device_members.ids.tolist() == kept
            assert [tier.members for tier in tiered.tiers(False)] == [tiered.device_members, cache.members], (
                "the device's tier comes first"
            )
        assert tiered.rows is cache.rows
    assert caches.on_device({None: cache}, {None: scores}, 10**6, CPU)[None].device_rows["y"].tolist() == ids.tolist()


def test_one_part_without_device_rows_is_packed_in_order():
    tiers = Tiers.of(PartitionBook.trivial(10), 0, sources(x=identity_features(10)), device=CPU)
    recipe = Packed(CPU).plan(tiers, tiers.look_up(torch.tensor([3, 3, 9])))
    assert recipe.index is None and [slot.tolist() for slot in recipe.packed] == [[3, 3, 9]]


@pytest.mark.parametrize("sizes, dtype", [((2**31 - 3, 2), torch.int32), ((2**31 - 2, 2), torch.int64)])
def test_more_than_two_billion_rows_get_an_int64_index(sizes, dtype):
    # Rows without columns: they have numbers, but take no memory.
    book = PartitionBook(torch.tensor([0, sizes[0], sum(sizes)]))
    tiers = Tiers(book, 0, Tier("host", None, sources(x=torch.empty(sizes[0], 0)), True, "host"))
    last = torch.tensor([sizes[0] - 1])
    places = Places([torch.tensor([0])], [last], torch.tensor([1, 2]), torch.tensor([5, 6]), torch.tensor([0, 2]))
    index = Packed(CPU).plan(tiers, places).index
    assert index.dtype == dtype and index.tolist() == [sizes[0] - 1, sizes[0], sizes[0] + 1]
