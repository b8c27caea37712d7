"""Compares the sizes that pad='fixed' predicts with the sizes of many batches. Writes results/fixed_shapes.json.

    python benchmarks/bench_fixed_shapes.py [--graphs generated facebook_pages debian_full tolokers] [--data FOLDER] [--batches 20000]

Each row is one size (vertices or edges) of one loader. It has the prediction, the counted batches, and the numbers of batches that were more than 2, 3 and
5 standard deviations above the mean. Overflows are batches that exceed the fixed size of vertices or of edges. Sizes do not depend on rows, so no rows
are gathered. The padding is the mean size of padded batches over the mean size of batches.
"""

from __future__ import annotations

import argparse
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from common import generated, write_results
from scipy.stats import pearson3
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from salientpp import NeighborLoader
from salientpp.datasets import load_dataset
from salientpp.loader.batch_sizes import EDGES, sizes_of
from salientpp.loader.forecast import forecast_sizes
from salientpp.processes import in_order
from salientpp.vip.sizes import expected_sizes

GRAPHS = ["generated", "facebook_pages", "debian_full", "tolokers"]
LOADERS = [([15, 10, 5], 32), ([15, 10, 5], 256), ([10, 5], 64), ([5, 5, 5], 1024)]
SIGMAS = [2, 3, 5]
NAMES = {None: "vertices", EDGES: "edges"}


def graph(name: str, folder: Path) -> Data:
    """Returns a graph with a training mask."""
    if name == "generated":
        return generated(100_000, 15.0, 1)
    return load_dataset(f"npz:{folder / name}.npz", undirected=name == "debian_full")


def counted_sizes(loader: NeighborLoader, number: int) -> list[dict[Any, int]]:
    """Returns the sizes of this number of batches of the loader's epochs, without the last batch of each epoch."""
    basis = loader.engine.basis
    turns = []
    for epoch in count():
        turns += [basis.epochs.pieces(epoch, turn) for turn in basis.epochs.order.of_epoch(epoch)[:-1]]
        if len(turns) >= number:
            break
    return list(in_order(lambda pieces: sizes_of(basis.source.drawing.draw(pieces)), turns[:number], "sizes"))


def mean_by_vip(loader: NeighborLoader) -> Tensor:
    """Returns the sums of the inclusion probabilities, and of the expected draws: float64 [2]."""
    source, sampler = loader.engine.basis.source, loader.engine.basis.source.sampler
    return expected_sizes(sampler.topology.as_typed(), source.seeds.start(loader.batch_size), sampler.fanouts).mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--data", type=Path, default=Path("."))
    parser.add_argument("--batches", type=int, default=20_000)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.graphs:
        data = graph(name, arguments.data)
        for fanouts, batch_size in tqdm(LOADERS, desc=name):
            options: dict[str, Any] = {
                "input_nodes": data.train_mask,
                "batch_size": batch_size,
                "shuffle": True,
                "seed": 0,
            }
            if int(data.train_mask.sum()) < 2 * batch_size:
                continue
            loaders = {pad: NeighborLoader(data, fanouts, pad=pad, **options) for pad in ("bucket", "fixed")}
            basis = loaders["fixed"].engine.basis
            started = time.perf_counter()
            found = forecast_sizes(basis, basis.epochs.order, list(NAMES), True)
            seconds = time.perf_counter() - started
            sizes = counted_sizes(loaders["fixed"], arguments.batches)
            by_vip = mean_by_vip(loaders["fixed"])
            classes = {pad: loader._padding.classes for pad, loader in loaders.items()}
            shapes = {pad: len({tuple(of.fitting(each).values()) for each in sizes}) for pad, of in classes.items()}
            overflows = sum(classes["fixed"].fitting(each) not in classes["fixed"].sizes for each in sizes)
            for i, (type_, forecast) in enumerate(found.items()):
                seen = torch.tensor([each[type_] for each in sizes], dtype=torch.float64)
                shares = {
                    str(sigmas): [
                        float(pearson3.sf(sigmas, forecast.skewness)) * (forecast.deviation > 0),
                        int((seen > forecast.above(sigmas)).sum()),
                    ]
                    for sigmas in SIGMAS
                }
                padded = {pad: [of.fitting(each)[type_] for each in sizes] for pad, of in classes.items()}
                rows.append({
                    "graph": name, "fanouts": fanouts, "batch_size": batch_size, "size": NAMES[type_],
                    "predicted_mean": forecast.mean, "predicted_deviation": forecast.deviation, "predicted_skewness": forecast.skewness,
                    "counted_mean": float(seen.mean()), "counted_deviation": float(seen.std()), "mean_by_vip": float(by_vip[i]),
                    "batches": len(sizes), "shares_and_counts": shares, "seconds": seconds, "overflows": overflows,
                    "padding": {pad: sum(of) / float(seen.sum()) for pad, of in padded.items()}, "shapes": shapes,
                })  # fmt: skip
    write_results("fixed_shapes", rows)


if __name__ == "__main__":
    main()
