"""Measures how much of VIP's distance to the oracle is the oracle's overfitting. Writes results/oracle.json.

    python benchmarks/bench_oracle.py npz:GRAPH.npz ...

The oracle ranks vertices by the very accesses that are counted, so with few epochs it learns their noise. More epochs leave less of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench_volume import first_seeds
from common import write_results
from tqdm import tqdm

from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.datasets import load_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 20, 80, 320])
    arguments = parser.parse_args()
    rows = []
    for dataset, epochs in tqdm([(dataset, epochs) for dataset in arguments.datasets for epochs in arguments.epochs]):
        data = load_dataset(dataset, undirected=True)
        data.train_mask = first_seeds(data.train_mask, data.num_nodes // 100)
        analysis = analyze(
            data,
            [Batches(fanouts, 32, epochs=epochs) for fanouts in ([15, 10, 5], [5, 5, 5])],
            Ways(["vip", "oracle"], [0.5, 1]),
            parts=4,
        )
        for result in analysis.to_dict()["results"]:
            if (result["way"], result["policy"]) == ("cache", "vip"):
                rows.append({"dataset": Path(dataset.partition(":")[2]).stem, "epochs": epochs, **result})
    write_results("oracle", rows, parts=4, batch_size=32)


if __name__ == "__main__":
    main()
