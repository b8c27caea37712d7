"""Measures the assembly of a batch's narrow rows on one GPU. Writes results/decode.json.

    python benchmarks/bench_decode.py [--rows 500000] [--columns 128] [--device cuda]

The rows of a batch are delivered as float32. A tenth of them is packed and a tenth received; the others are drawn at random from the rows on the device. With
``pinned``, all of them are drawn from pinned host memory, as with ``zero_copy``. Each format is assembled in two ways, whose results must be equal:

* ``one pass``: a kernel reads encoded rows at their sources and writes decoded rows (:mod:`salientpp.store.decoding_kernel`).
* ``two steps``: a kernel puts the encoded rows in their places, and torch's operators decode them.

The format ``float32`` is the assembly of rows that are not encoded. Bytes per second count the encoded rows, the index and the decoded rows once each.
Memory is the peak above the rows and the index. With ``--device cpu`` and small sizes the script only shows that it works.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, seconds_on_device, write_results
from torch import Tensor

from salientpp.store.assembly import assemble_rows, decode_rows
from salientpp.store.narrow import Narrow

FORMATS = ["fp16", "bf16", "int8", "int8/32", "int4", "int4/32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000, help="rows of the batch")
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    x = torch.randn(2 * arguments.rows, arguments.columns, generator=torch.Generator().manual_seed(0))
    rows = []
    for memory in ("device", "pinned"):
        for format in ["float32", *FORMATS]:
            rows.append(time_format(format, x, memory, device, arguments.repeats))
            print(in_words(rows[-1]), flush=True)
    write_results("decode", rows, arguments.results, rows_of_batch=arguments.rows, columns=arguments.columns)


def time_format(format: str, x: Tensor, memory: str, device: torch.device, repeats: int) -> dict[str, Any]:
    narrow = None if format == "float32" else Narrow(format, x.dtype, tuple(x.shape[1:]))
    stored = x if narrow is None else narrow.encode(x)
    num_rows = len(x) // 2
    sources, index = as_in_a_batch(stored, num_rows, memory, device)

    def one_pass() -> Tensor:
        if narrow is not None:
            return decode_rows(narrow, sources, index)
        return together()

    def two_steps() -> Tensor:
        assert narrow is not None
        return narrow.decode_by_torch(together())

    def together() -> Tensor:
        out = torch.empty(num_rows, stored.size(1), dtype=stored.dtype, device=device)
        assemble_rows(sources, index, out)
        return out

    candidates: dict[str, Callable[[], Tensor]] = {"one pass": one_pass}
    if narrow is not None:
        candidates["two steps"] = two_steps
        if not torch.equal(one_pass().view(torch.int32), two_steps().view(torch.int32)):
            raise RuntimeError(f"the kernel and torch decode rows of {format} to different bits")
    moved = num_rows * (stored[:1].nbytes + x[:1].nbytes) + index.nbytes
    row: dict[str, Any] = {"format": format, "memory": memory, "row_bytes": stored[:1].nbytes, "bytes": moved}
    for name, candidate in candidates.items():
        spent = [seconds_on_device(candidate, device) for _ in range(repeats + 3)][3:]
        row[name] = {
            "us": statistics.median(spent) * 1e6,
            "lowest_us": min(spent) * 1e6,
            "gb_per_second": moved / statistics.median(spent) / 1e9,
            "peak_bytes": peak_bytes(candidate, device),
        }
    return row


def in_words(row: dict[str, Any]) -> str:
    times = [
        f"{name} {row[name]['us']:.0f} us, {row[name]['gb_per_second']:.0f} GB/s"
        for name in ("one pass", "two steps")
        if name in row
    ]
    return f"{row['format']:8} from {row['memory']} memory: {'; '.join(times)}"


def as_in_a_batch(stored: Tensor, num_rows: int, memory: str, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Returns the tensors that hold a batch's rows, and int32 [num_rows], the number of each row in the concatenated tensors."""
    generator = torch.Generator().manual_seed(1)
    if memory == "pinned":
        index = torch.randint(len(stored), (num_rows,), generator=generator)
        return [stored.pin_memory() if device.type == "cuda" else stored], index.int().to(device)
    few = num_rows // 10
    drawn = torch.randint(len(stored), (num_rows - 2 * few,), generator=generator)
    index = torch.cat([drawn, len(stored) + torch.arange(2 * few)])[torch.randperm(num_rows, generator=generator)]
    there = stored.to(device)
    return [there, there[:few].clone(), there[few : 2 * few].clone()], index.int().to(device)


def peak_bytes(function: Callable[[], Tensor], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
