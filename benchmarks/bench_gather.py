"""Measures gathering rows by id, compared with torch. Writes results/gather.json.

    python benchmarks/bench_gather.py [--vertices 2400000] [--columns 128]

Rows are requested as for a sampled batch: distinct ids in random order. Figures are GB/s of payload per number of threads.
"""

from __future__ import annotations

import argparse

import torch
from common import take_turns, write_results

from salientpp import ops
from salientpp.store.buffers import BufferPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=2_400_000)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.float16):
        x = torch.zeros(arguments.vertices, arguments.columns, dtype=dtype)
        x += torch.arange(arguments.vertices).view(-1, 1).to(dtype)
        n_id = torch.randperm(arguments.vertices)[: arguments.rows]
        out, pool = x.new_empty(arguments.rows, arguments.columns), BufferPool()

        # Huge pages, as a loader uses for large rows. On a copy, so that the peers read ordinary memory.
        paged = x.clone()
        ops.use_huge_pages(paged)

        def ours(x=x, n_id=n_id, pool=pool) -> None:
            ops.gather_rows(x, n_id, pool.empty((n_id.numel(), x.size(1)), x.dtype))

        candidates = {
            "salientpp": lambda paged=paged, ours=ours: ours(paged),
            "salientpp, small pages": ours,
            "x[n_id]": lambda x=x, n_id=n_id: x[n_id],
            "index_select(out=)": lambda x=x, n_id=n_id, out=out: torch.index_select(x, 0, n_id, out=out),
        }
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, timing in take_turns(candidates, arguments.repeats).items():
                timing.pop("last")
                speed = out.nbytes / 1e9 / timing["seconds"]["median"]
                rows.append({"gather": name, "dtype": str(dtype), "threads": threads, "gb_per_second": speed, **timing})
                print(f"{dtype} {threads} threads  {name:26} {speed:6.2f} GB/s", flush=True)
    write_results("gather", rows, vertices=arguments.vertices, columns=arguments.columns, gathered=arguments.rows)


if __name__ == "__main__":
    main()
