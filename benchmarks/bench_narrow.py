"""Measures error, cost and accuracy of narrow rows. Writes results/narrow.json.

    python benchmarks/bench_narrow.py [--graphs facebook_pages debian_full] [--data FOLDER] [--seeds 3] [--epochs 5]

The file has three kinds of rows:

* ``error``, for each real graph and format: bytes of a row of `x` relative to float32, the largest error, and the relative error. The relative error is the
  root mean square of the errors divided by that of the values.
* ``cost``: nanoseconds for a row of 128 values at random places, on one thread. It times a plain gather of float32, a gather that decodes, one that encodes
  (rows that a rank sends with `send_as`), and one that does both (its own rows).
* ``accuracy``: test accuracy of a 2-layer GraphSAGE, trained from a dataset directory that stores `x` in the format, over seeds.

Real graphs lie in the folder of `SALIENTPP_TEST_DATA`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import take_turns, write_results
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader, ops
from salientpp.datasets.load import load_dataset
from salientpp.store.narrow import EncodedRows, Loss, Narrow
from salientpp.store.rows import TensorRows

FORMATS = ["fp16", "bf16", "int8", "int8/32", "int4", "int4/32", "int4/16"]
TRAINED = [None, "bf16", "int8", "int4", "int4/32"]
FANOUTS, BATCH = [10, 5], 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["facebook_pages", "debian_full"])
    parser.add_argument("--data", default=os.environ.get("SALIENTPP_TEST_DATA", "."))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=400_000, help="rows of the matrix that is gathered from")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = costs(arguments.rows, arguments.repeats)
    print(f"load {os.getloadavg()[0]:.1f}")
    for name in arguments.graphs:
        data = load_dataset(f"npz:{Path(arguments.data) / name}.npz")
        data.x = data.x.float()
        rows += [error(name, data.x, format) for format in FORMATS]
        rows += accuracies(name, data, arguments.seeds, arguments.epochs)
    write_results("narrow", rows)


def error(name: str, x: torch.Tensor, format: str) -> dict[str, Any]:
    narrow, loss = Narrow(format, x.dtype, tuple(x.shape[1:])), Loss()
    loss.add(x, narrow.decode(narrow.encode(x)))
    row = {
        "kind": "error", "graph": name, "format": format, "columns": x.size(1), "row_bytes": narrow.row_bytes,
        "of_float32": narrow.row_bytes / (4 * x.size(1)), "largest_error": loss.largest, "relative_rms_error": loss.relative_rms,
    }  # fmt: skip
    print(row)
    return row


def costs(num_rows: int, repeats: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 128, generator=generator)
    index = torch.randint(num_rows, (num_rows // 2,), generator=generator)
    out = torch.empty(index.numel(), 128)
    candidates: dict[str, Any] = {"gather": lambda: ops.gather_rows(x, index, out)}
    for format in FORMATS:
        narrow = Narrow(format, torch.float32, (128,))
        encoded, sent = narrow.encode(x), torch.empty(index.numel(), narrow.row_bytes, dtype=torch.uint8)
        wide = EncodedRows(TensorRows(x), narrow)
        candidates |= {
            f"decode {format}": lambda n=narrow, e=encoded: n.put(TensorRows(e), index, out),
            f"encode {format}": lambda w=wide, s=sent: w.take(index, s),
            f"both {format}": lambda n=narrow, w=wide: n.put(w, index, out),
        }
    timed = take_turns(candidates, repeats)
    per_row = {name: of["cpu_seconds"]["median"] / index.numel() * 1e9 for name, of in timed.items()}
    rows = []
    for name, nanoseconds in per_row.items():
        what, _, format = name.partition(" ")
        rows.append(
            {"kind": "cost", "what": what, "format": format, "ns_per_row": nanoseconds, "of_gather": nanoseconds / per_row["gather"]}
        )  # fmt: skip
        print(rows[-1])
    return rows


def accuracies(name: str, data: Data, num_seeds: int, epochs: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, format in enumerate(TRAINED):
            store_as = None if format is None else {"x": format}
            part = salientpp.partition(data, 1, Path(folder) / str(number), FANOUTS, BATCH, store_as=store_as)
            found = [accuracy(part, seed, epochs) for seed in range(num_seeds)]
            rows.append(
                {
                    "kind": "accuracy", "graph": name, "format": format or "float32", "epochs": epochs, "accuracy": found,
                    "mean": statistics.mean(found), "spread": statistics.stdev(found) if num_seeds > 1 else 0.0,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def accuracy(part: salientpp.PartitionedGraph, seed: int, epochs: int, batch_size: int = BATCH, **draws: Any) -> float:
    """Returns the test accuracy; ``draws`` are options of drawing batches in training."""
    torch.manual_seed(seed)
    model = GraphSAGE(part.num_features, 64, 2, part.num_classes, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    train = NeighborLoader(part, FANOUTS, "train", batch_size=batch_size, shuffle=True, seed=seed, **draws)
    for _ in range(epochs):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in NeighborLoader(part, FANOUTS, "test", batch_size=1024, seed=seed):
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            right += int((out.argmax(dim=1) == batch.y[: batch.batch_size]).sum())
            total += batch.batch_size
    return right / total


if __name__ == "__main__":
    main()
