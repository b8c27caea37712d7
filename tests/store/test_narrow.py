"""Laws of encoded rows: from any source, decoding gives the values that the format defines, and errors stay within its promised bound."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import reference
import torch
from narrow_rows import FORMATS, rows_of, rows_with_infinities, same_bits

from salientpp import ops
from salientpp.store.narrow import WIDE, EncodedRows, Loss, Narrow, NarrowRows, read_formats
from salientpp.store.rows import JoinedRows, TensorRows, take_rows

WITH_SCALE = FORMATS[2:]
SHAPES = [(), (1,), (7,), (37,), (64,), (0,), (3, 5), (2, 0, 4)]


@pytest.mark.parametrize("format", FORMATS)
def test_encoding_and_decoding_match_the_reference(format):
    for number, shape in enumerate(SHAPES):
        narrow, rows = Narrow(format, torch.float32, shape), rows_of(shape, seed=number)
        encoded = narrow.encode(rows)
        flat = rows.reshape(40, -1).numpy()
        expected = [reference.narrow_row(row, format) for row in flat]
        assert [bytes(row) for row in encoded.numpy()] == expected, shape
        wide = np.stack([reference.wide_row(row, flat.shape[1], format) for row in expected])
        assert np.array_equal(narrow.decode(encoded).reshape(40, -1).numpy(), wide), shape


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_by_torch_matches_the_kernel_bit_for_bit(format):
    for dtype in WIDE:
        for number, shape in enumerate(SHAPES):
            narrow = Narrow(format, dtype, shape)
            encoded = narrow.encode(rows_with_infinities(shape, number, dtype))
            assert same_bits(narrow.decode(encoded), narrow.decode_by_torch(encoded)), (dtype, shape)
            assert narrow.decode_by_torch(encoded[:0]).shape == (0, *shape)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_by_torch_stays_on_the_device(format):
    """Tensors on the device 'meta' have no values. An operator that read a value, or made a tensor on another device, would fail."""
    for dtype in WIDE:
        for shape in SHAPES:
            narrow = Narrow(format, dtype, shape)
            decoded = narrow.decode(torch.empty((40, narrow.row_bytes), dtype=torch.uint8, device="meta"))
            assert (decoded.device.type, decoded.dtype, decoded.shape) == ("meta", dtype, (40, *shape))


def test_16_bit_floats_are_rounded_as_by_torch():
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    every = torch.arange(0, 2**32, 99_991).to(torch.uint32).view(torch.float32)
    for format, dtype, of in (("fp16", torch.float16, halves), ("bf16", torch.bfloat16, halves.view(torch.bfloat16))):
        narrow = Narrow(format, torch.float32, (2,))
        values = torch.cat([of.float(), every])
        values = values[: values.numel() // 2 * 2].view(-1, 2)
        assert same_bits(narrow.encode(values).view(dtype).float(), values.to(dtype).float())
        assert same_bits(narrow.decode(of.view(-1, 2).view(torch.uint8)), of.view(-1, 2).float())


def test_encoded_bytes_are_the_same_on_every_processor():
    numbers = torch.arange(50 * 37, dtype=torch.int64) * 2_654_435_761 % 2**32
    rows = (numbers.double() / 2**31 - 1).float().view(50, 37) * torch.arange(1, 51).view(50, 1)
    words = "".join(
        hashlib.sha256(Narrow(format, torch.float32, (37,)).encode(rows).numpy().tobytes()).hexdigest()[:8]
        for format in FORMATS
    )
    assert words == GOLDEN


GOLDEN = "25882f5ba91e9ab0d0dfb0483813ecfe6e7466eeefbc0082b68033d5"


@pytest.mark.parametrize("format", FORMATS)
def test_an_error_is_never_larger_than_the_format_promises(format):
    for seed in range(5):
        rows = rows_of((64,), seed=100 + seed)
        narrow = Narrow(format, torch.float32, (64,))
        error = (narrow.decode(narrow.encode(rows)) - rows).abs()
        kind, _, block = format.partition("/")
        tiny = rows.abs().amax(dim=1, keepdim=True) * 2.0**-22  # rounding of 32-bit floats
        if kind in ("fp16", "bf16"):
            bound = rows.abs() * (2.0**-11 if kind == "fp16" else 2.0**-8) + 2.0**-25
        else:
            blocks = rows.view(40, -1, int(block or 64))
            step = (blocks.amax(dim=2) - blocks.amin(dim=2)) / (255 if kind == "int8" else 15)
            bound = (step / 2 * 1.0001).repeat_interleave(int(block or 64), dim=1) + tiny
        assert (error <= bound).all(), (error - bound).max()
        assert (error > 0).any()


@pytest.mark.parametrize("format", WITH_SCALE)
def test_constant_rows_and_zeros_are_exact(format):
    rows = torch.tensor([0.0, -0.0, 1.0, -3.0, 1e-29, 3e38, -3e38]).repeat_interleave(9).view(7, 9)
    narrow = Narrow(format, torch.float32, (9,))
    decoded = narrow.decode(narrow.encode(rows))
    assert torch.equal(decoded, rows)
    zeros = torch.tensor([[0.0, 5.0, 0.0, 1.3, 0.7, 0.0, 0.0, 2.0, 0.0]])
    assert torch.equal(narrow.decode(narrow.encode(zeros)) == 0, zeros == 0)


def test_values_that_are_not_finite_are_never_decoded_as_numbers():
    for format in FORMATS:
        narrow = Narrow(format, torch.float32, (40,))
        rows = rows_of((40,), seed=1)
        clean = narrow.decode(narrow.encode(rows))
        for value in (torch.nan, torch.inf, -torch.inf):
            for column in (0, 5, 39):
                bad = rows.clone()
                bad[11, column] = value
                decoded = narrow.decode(narrow.encode(bad))
                rest = torch.arange(40) != 11
                assert torch.equal(decoded[rest], clean[rest])
                if format in ("fp16", "bf16"):
                    assert same_bits(decoded[11, column], torch.tensor(value))
                else:
                    block = int(format.partition("/")[2] or 40)
                    first = column // block * block
                    assert decoded[11, first : first + block].isnan().all()
                    assert decoded[11].isnan().sum() == min(block, 40 - first)
    whole_range = torch.tensor([[-3e38, 3e38]])
    assert Narrow("int8", torch.float32, (2,)).decode(Narrow("int8", torch.float32, (2,)).encode(whole_range)).isnan().all()  # fmt: skip
    assert Narrow("fp16", torch.float32, (2,)).decode(Narrow("fp16", torch.float32, (2,)).encode(whole_range)).isinf().all()  # fmt: skip


def test_denormal_values_decode_to_nearby_numbers():
    rows = torch.tensor([[1e-40, -3e-42, 0.0, 1e-45], [1e-38, 2e-38, -1e-38, 1e-40], [1.0, 1e-40, -1e-40, 0.5]])
    for format in FORMATS:
        narrow = Narrow(format, torch.float32, (4,))
        decoded = narrow.decode(narrow.encode(rows))
        scale = 0 if format in ("fp16", "bf16") else 0.1
        assert ((decoded - rows).abs() <= 1e-30 + scale * rows.abs().amax(dim=1, keepdim=True)).all(), format


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_rows_of_every_source_decode_to_the_same_values(format, dtype):
    class Elsewhere:
        """A custom source of rows."""

        def __init__(self, rows):
            self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

        def take(self, index, out, out_index=None):
            out[slice(index.numel()) if out_index is None else out_index] = self.rows[index]

    generator = torch.Generator().manual_seed(4)
    for shape in [(6,), (3, 5), ()]:
        rows = rows_of(shape, 8, dtype)
        narrow = Narrow(format, dtype, shape)
        encoded = narrow.encode(rows)
        decoded = narrow.decode(encoded)
        index, places = torch.randint(40, (25,), generator=generator), torch.randperm(30, generator=generator)[:25]
        for source in (
            TensorRows(encoded),
            JoinedRows([encoded[:7], encoded[7:7], encoded[7:]]),
            EncodedRows(TensorRows(rows), narrow),
            EncodedRows(JoinedRows([rows[:7], rows[7:]]), narrow),
            EncodedRows(Elsewhere(rows), narrow),
            Elsewhere(encoded),
        ):
            assert list(source.shape) == [40, narrow.row_bytes]
            assert torch.equal(take_rows(source, index), encoded[index])
            out = torch.full((30, *shape), -7.0, dtype=dtype)
            narrow.put(source, index, out, places)
            expected = torch.full((30, *shape), -7.0, dtype=dtype)
            expected[places] = decoded[index]
            assert torch.equal(out, expected)
            wide = NarrowRows(source, narrow)
            assert (wide.shape, wide.dtype) == (rows.shape, dtype)
            assert torch.equal(take_rows(wide, index), decoded[index])
            assert torch.equal(wide.whole(), decoded)


@pytest.mark.parametrize("width", [1, 7, 128])
def test_the_kernels_are_right_if_threads_share_the_work(width):
    generator = torch.Generator().manual_seed(12)
    rows = torch.rand(1000, width, generator=generator)
    narrow = Narrow("int4", torch.float32, (width,))
    index = torch.randint(1000, (700_000 // width,), generator=generator)
    places = torch.randperm(index.numel(), generator=generator)
    encoded = torch.empty(index.numel(), narrow.row_bytes, dtype=torch.uint8)
    EncodedRows(TensorRows(rows), narrow).take(index, encoded, places)
    assert torch.equal(encoded[places], narrow.encode(rows)[index])
    out = torch.empty(index.numel(), width)
    for source in (TensorRows(narrow.encode(rows)), EncodedRows(TensorRows(rows), narrow)):
        narrow.put(source, index, out, places)
        assert torch.equal(out[places], narrow.decode(narrow.encode(rows))[index])


def test_a_row_takes_the_documented_number_of_bytes():
    found = {format: Narrow(format, torch.float32, (128,)).row_bytes for format in FORMATS}
    assert found == {"fp16": 256, "bf16": 256, "int8": 136, "int8/16": 192, "int4": 72, "int4/2": 576, "int4/32": 96}  # fmt: skip
    assert Narrow("int4", torch.float32, (3, 3)).row_bytes == 8 + 5 + 3
    assert all(Narrow(format, torch.float32, (37,)).row_bytes % 4 == 0 for format in FORMATS)


def test_the_loss_matches_numpy():
    rows = rows_of((9,), seed=3)
    narrow = Narrow("int4", torch.float32, (9,))
    decoded, loss = narrow.decode(narrow.encode(rows)), Loss()
    for first in range(0, 40, 7):
        assert loss.add(rows[first : first + 7], decoded[first : first + 7]) is None
    wide, read = rows.double().numpy(), decoded.double().numpy()
    assert loss.largest == np.abs(wide - read).max()
    assert loss.relative_rms == pytest.approx(np.sqrt(((wide - read) ** 2).mean() / (wide**2).mean()), rel=1e-12)
    nan, inf = torch.nan, torch.inf
    was, now = torch.tensor([[nan, 1.0], [inf, 2.0], [1.0, inf]]), torch.tensor([[nan, 1.0], [inf, 2.0], [nan, nan]])
    assert loss.add(was, now) == 2
    assert loss.add(torch.tensor([[1e5, 1.0]]), torch.tensor([[inf, 1.0]])) == 0
    assert loss.add(was[:2], now[:2]) is None
    assert Loss().relative_rms == 0.0


# --- refusals ---------------------------------------------------------------------------------------------

ROWS, BYTES = torch.zeros(4, 6), torch.zeros(4, 16, dtype=torch.uint8)
ONE = torch.tensor([0])


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: ops.encode_rows(ROWS.int(), ONE, BYTES, None, 2, 0), "source must have dtype float32, float64, float16 or bfloat16, got Int"),
        (lambda: ops.encode_rows(ROWS, ONE, BYTES[:, :8].contiguous(), None, 2, 0), "out must have rows of 16 bytes, got 8"),
        (lambda: ops.encode_rows(ROWS, ONE, ROWS, None, 2, 0), "out must hold encoded rows, uint8 with 2 dimensions, got Float with 2"),
        (lambda: ops.encode_rows(ROWS, ONE + 4, BYTES, None, 2, 0), r"source_index\[0\] must be in \[0, 4\), got 4"),
        (lambda: ops.encode_rows(ROWS, ONE, BYTES, ONE - 1, 2, 0), r"out_index\[0\] must be in \[0, 4\), got -1"),
        (lambda: ops.encode_rows(ROWS, torch.zeros(5, dtype=torch.int64), BYTES, None, 2, 0), "out must have at least 5 rows, got 4"),
        (lambda: ops.encode_rows(ROWS, ONE, BYTES, None, 4, 0), r"format must be in \[0, 4\), got 4"),
        (lambda: ops.encode_rows(ROWS, ONE, BYTES, None, 2, 3), "block must be even and >= 0, got 3"),
        (lambda: ops.encode_rows(ROWS, ONE, BYTES, None, 0, 2), "block is only for integer formats, got 2 with format 0"),
        (lambda: ops.encode_rows(ROWS.T, ONE, BYTES, None, 3, 0), "out must have rows of 12 bytes, got 16"),
        (lambda: ops.decode_rows(BYTES, ONE, torch.zeros(4, 5), None, 3, 0), "source must have rows of 12 bytes, got 16"),
        (lambda: ops.decode_rows(BYTES, ONE, ROWS.long(), None, 2, 0), "out must have dtype float32, float64, float16 or bfloat16, got Long"),
        (lambda: ops.decode_rows(BYTES.T.contiguous().T, ONE, ROWS, None, 2, 0), "source and out must be contiguous"),
        (lambda: ops.round_rows(ROWS, ONE, ROWS.double(), None, 2, 0), "rows of the same size, expected Float of 6, got Double of 6"),
        (lambda: ops.round_rows(ROWS, ONE, ROWS, None, 2, 0), "out must not overlap source in memory"),
    ],
)  # fmt: skip
def test_the_kernels_refuse_wrong_arguments(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()
    assert not ROWS.any() and not BYTES.any()


KNOWN = {("a", "x"): (torch.float32, [128]), ("b", "x"): (torch.float16, [64]), ("b", "y"): (torch.int64, []), ("a", "w"): (torch.float32, [1])}  # fmt: skip


def test_formats_are_given_by_name_or_by_type_and_name():
    assert read_formats("store_as", None, KNOWN) == {}
    found = read_formats("store_as", {"x": "int8", ("b", "x"): "int4/32"}, KNOWN)
    assert found == {
        ("a", "x"): Narrow("int8", torch.float32, (128,)),
        ("b", "x"): Narrow("int4/32", torch.float16, (64,)),
    }


@pytest.mark.parametrize(
    "given, kind, text",
    [
        ("int8", TypeError, r"store_as must map node attribute names to formats, as in \{'x': 'int8'\}, got str"),
        ({"z": "int8"}, ValueError, r"store_as must name node attributes \(\('a', 'w'\), .*\), got 'z'"),
        ({"x": "int7"}, ValueError, r"store_as\['x'\]: a format must be one of 'fp16', .* got 'int7'"),
        ({"x": None}, ValueError, "got None"),
        ({"x": "int8/3"}, ValueError, "with an even block size as in 'int4/32', got 'int8/3'"),
        ({"x": "fp8"}, ValueError, "got 'fp8'"),
        ({"x": "int8/"}, ValueError, "got 'int8/'"),
        ({"x": "int8/99999999"}, ValueError, "got 'int8/99999999'"),
        ({"y": "int8"}, ValueError, r"store_as\['y'\]: rows of int64 cannot be stored as int8, which takes float32, float64, .*; leave them as they are"),
        ({("b", "x"): "bf16"}, ValueError, r"a row of 'x' takes 128 bytes as bf16, and 128 as it is; leave it out"),
        ({"w": "int8"}, ValueError, r"a row of 'w' takes 12 bytes as int8, and 4 as it is"),
    ],
)  # fmt: skip
def test_formats_that_do_not_fit_are_refused(given, kind, text):
    with pytest.raises(kind, match=text):
        read_formats("store_as", given, KNOWN)
