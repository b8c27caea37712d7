"""Laws of decoding on a GPU: the kernel's values have the bits of the CPU. These tests skip without a GPU, unless FAIL_WITHOUT_CUDA=1 is set."""

from __future__ import annotations

import os

import pytest
import torch
from batches import assert_same_batches
from graphs import random_data
from narrow_rows import FORMATS, rows_with_infinities, same_bits

import salientpp
from salientpp import NeighborLoader
from salientpp.store.assembly import assemble_rows, decode_rows
from salientpp.store.narrow import WIDE, Narrow

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("FAIL_WITHOUT_CUDA") != "1", reason="needs a GPU"
)
CUDA = torch.device("cuda", 0)
CASES = [(torch.float32, shape) for shape in [(), (37,), (100,), (3, 5), (301,)]]
CASES += [(dtype, (128,)) for dtype in WIDE]


def on_gpu(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(CUDA)


@pytest.mark.parametrize("format", [*FORMATS, "int8/6", "int4/6"])
def test_rows_from_device_and_pinned_memory_have_the_bits_of_the_cpu(format):
    generator = torch.Generator().manual_seed(0)
    for number, (dtype, shape) in enumerate(CASES):
        narrow = Narrow(format, dtype, shape)
        encoded = narrow.encode(rows_with_infinities(shape, number, dtype))
        want = narrow.decode(encoded)
        # The first source is pinned, as the rows of the part are with zero_copy.
        moves = [torch.Tensor.pin_memory, on_gpu, on_gpu, torch.Tensor.pin_memory, on_gpu]
        sources = [move(rows) for move, rows in zip(moves, encoded.split([12, 0, 3, 24, 1]), strict=True)]
        index = torch.randint(40, (5000,), generator=generator, dtype=(torch.int32, torch.int64)[number % 2])
        decoded = decode_rows(narrow, sources, index.to(CUDA))
        assert decoded.device == CUDA and same_bits(decoded.cpu(), want[index.long()]), (dtype, shape)
        if dtype == torch.float32:
            assert same_bits(decode_rows(narrow, [encoded.to(CUDA)], None).cpu(), want), (dtype, shape)


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_every_16_bit_float_is_decoded_as_by_the_cpu(format):
    encoded = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(256, 256).view(torch.uint8)
    for dtype in WIDE:
        narrow = Narrow(format, dtype, (256,))
        assert same_bits(decode_rows(narrow, [encoded.to(CUDA)], None).cpu(), narrow.decode(encoded)), dtype


@pytest.mark.parametrize("format", FORMATS[2:])
def test_products_and_sums_are_rounded_separately(format):
    """Random scales and offsets. With a fused product and sum, every third value would have other bits."""
    narrow = Narrow(format, torch.float32, (128,))
    encoded = narrow.encode(torch.randn(20_000, 128, generator=torch.Generator().manual_seed(1)))
    assert same_bits(decode_rows(narrow, [encoded.to(CUDA)], None).cpu(), narrow.decode(encoded))
    assert same_bits(narrow.decode_by_torch(encoded.to(CUDA)).cpu(), narrow.decode(encoded))


def test_rows_beyond_two_gigabytes_are_found():
    narrow = Narrow("int8", torch.float32, (128,))
    num_rows = 2**31 // narrow.row_bytes + 1000
    encoded = torch.zeros((num_rows, narrow.row_bytes), dtype=torch.uint8, device=CUDA)
    rows = narrow.encode(rows_with_infinities((128,), 0, torch.float32))
    encoded[-40:] = rows.to(CUDA)
    index = torch.arange(num_rows - 40, num_rows, dtype=torch.int32, device=CUDA)
    assert same_bits(decode_rows(narrow, [encoded], index).cpu(), narrow.decode(rows))


@pytest.mark.parametrize("format", FORMATS)
def test_the_host_does_not_wait_for_decoding(format):
    narrow = Narrow(format, torch.float32, (100,))
    encoded = narrow.encode(torch.randn(500, 100)).to(CUDA)
    index = torch.arange(500, device=CUDA)
    want = decode_rows(narrow, [encoded], index)
    try:
        torch.cuda.set_sync_debug_mode("error")
        decoded = decode_rows(narrow, [encoded], index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(decoded, want)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_equals_assembling_and_then_decoding_with_torch(format):
    narrow = Narrow(format, torch.float32, (100,))
    encoded = narrow.encode(torch.randn(5000, 100, generator=torch.Generator().manual_seed(2))).to(CUDA)
    index = torch.randint(5000, (20_000,), device=CUDA)
    together = torch.empty(20_000, narrow.row_bytes, dtype=torch.uint8, device=CUDA)
    assemble_rows([encoded], index, together)
    assert same_bits(decode_rows(narrow, [encoded], index), narrow.decode_by_torch(together))


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_batches_with_narrow_rows_on_the_device_equal_those_on_the_cpu(tmp_path, dtype, sent):
    data = random_data(200, 1200)
    data.x, data.z = torch.randn(200, 100).to(dtype), torch.randn(200, 2, 9)
    formats = {"x": "int4/16", "z": "int8"}
    store_as = None if sent else formats
    part = salientpp.partition(data, 1, tmp_path / "d", [4, 3], 16, method="random", store_as=store_as)
    common = {"batch_size": 16, "shuffle": True, "seed": 3, "columns": ("x", "z")}
    if sent:
        common["send_as"] = formats
    want = list(NeighborLoader(part, [4, 3], "train", **common))
    for device_rows in (0, 0.3, 1.0):
        for zero_copy, num_workers, depth in [(False, 0, 1), (False, 2, 10), (True, 2, 10)]:
            options = {
                "device_rows": {"part": device_rows, "zero_copy": zero_copy},
                "num_workers": num_workers,
                "depth": depth,
            }
            loader = NeighborLoader(part, [4, 3], "train", device=CUDA, **options, **common)
            assert_same_batches([batch.to("cpu") for batch in loader], want)
