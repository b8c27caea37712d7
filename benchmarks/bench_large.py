"""Estimates an epoch over the largest public graphs, and the bytes that they take. Writes results/large.json.

    python benchmarks/bench_large.py [--vertices 125000 250000 ...] [--parts 8 16] [--folder DIR]

None of these graphs is loaded. Their shape is imitated by growing graphs of ``large_graph.py`` with the same average degree and the same share of training
vertices, drawn at random. Batches are smaller than 1024 in proportion to the graph, so that they cover the same share of the graph and of the seeds.
KaMinPar partitions the graphs without weights. VIP for fanouts 15,10,5 ranks the rows to cache. Some batches of every part are sampled, and rows that are
remote and not cached are counted. A directory for each number of parts is also written, to compare its bytes with the formula in ``drawing/scale.py``. CPU
seconds are measured for sampling batches of 1024, and for gathering rows of several widths, on one thread.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import write_results
from large_graph import generate
from torch import Tensor

from salientpp import ops, partition
from salientpp.datasets import load_dataset
from salientpp.graph.csc import Graph
from salientpp.partitioning.assign import assign_parts
from salientpp.vip.accesses import shuffled_batches
from salientpp.vip.inclusion import inclusion_probability

FANOUTS, BATCH_SIZE, ALPHAS = [15, 10, 5], 1024, [0, 0.08, 0.16, 0.32]

#: Name -> number of vertices, average degree of the graph that batches are drawn from, share of its vertices that are training seeds.
SHAPES = {
    "papers100M": (111_059_956, 29.1, 0.0109),
    "MAG240M": (244_160_499, 14.2, 0.00456),
    "IGB-full": (269_346_174, 14.8, 0.506),
}

#: Rows of 128, 768 and 1024 columns as float16, and the last also as float32.
ROW_BYTES = [256, 1536, 2048, 4096]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, nargs="+", default=[125_000, 250_000, 500_000, 1_000_000])
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of each part, in the batches that are counted")
    parser.add_argument("--folder", type=Path, help="where files are written and removed (a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    more: dict[str, Any] = {"disk": [], "gather": gathered()}
    rows: list[dict[str, Any]] = []
    for vertices in arguments.vertices:
        for degree in sorted({round(degree, -1) for _, degree, _ in SHAPES.values()}):
            folder = Path(tempfile.mkdtemp(prefix="salientpp-large-", dir=arguments.folder))
            try:
                shapes = {name: shape for name, shape in SHAPES.items() if round(shape[1], -1) == degree}
                average = sum(shape[1] for shape in shapes.values()) / len(shapes)
                generate(folder / "g", num_vertices=vertices, average_degree=average, num_features=16, memory="1GB")
                data = load_dataset(f"converted:{folder / 'g'}")
                graph = Graph.from_data(data)
                for parts in arguments.parts:
                    found = assign_parts(graph, parts, method="kaminpar")
                    for name, (full_size, _, share) in shapes.items():
                        for row in fetched(
                            graph,
                            found.assignment,
                            parts,
                            share,
                            max(1, round(BATCH_SIZE * vertices / full_size)),
                            arguments.seeds,
                        ):
                            size = {"vertices": vertices, "edges": graph.num_edges, "parts": parts}
                            rows.append({"shape": name, **size, "edge_cut_fraction": found.edge_cut_fraction, **row})
                            print(rows[-1], flush=True)
                    if vertices == arguments.vertices[0]:
                        more["disk"].append(on_disk(data, graph, found.assignment, parts, folder / "parts"))
            finally:
                shutil.rmtree(folder)
            write_results(
                "large",
                rows,
                **more,
                alphas=ALPHAS,
                batch_size=BATCH_SIZE,
                fanouts=FANOUTS,
                counted_seeds=arguments.seeds,
            )


def fetched(
    graph: Graph, assignment: Tensor, parts: int, share: float, batch_size: int, counted_seeds: int
) -> Iterator[dict[str, Any]]:
    """Yields the rows per seed that a batch fetches at every replication factor (mean over the parts' batches), and the CPU time of sampling it."""
    generator = torch.Generator().manual_seed(1)
    seeds = (torch.rand(graph.num_vertices, generator=generator) < share).nonzero().flatten()
    own = [seeds[assignment[seeds] == part] for part in range(parts)]
    vip = inclusion_probability(graph, own, FANOUTS, batch_size)
    rows, seed_count, vertices = [0.0] * len(ALPHAS), 0, 0
    for part, ids in enumerate(own):
        remote = assignment != part
        ranked = torch.where(remote, vip[part], -1.0).argsort(descending=True)
        place = torch.full((graph.num_vertices,), -1)  # place in the order of caching; -1: local
        place[ranked] = torch.arange(graph.num_vertices)
        place[~remote] = -1
        sizes = [int(alpha * graph.num_vertices / parts) for alpha in ALPHAS]
        batches = shuffled_batches(ids, batch_size, part, counted_seeds)
        whole = ((batch, key) for batch, key in batches if batch.numel() == min(batch_size, ids.numel()))
        for batch, key in islice(whole, -(-counted_seeds // batch_size)):
            n_id = ops.sample_neighbors(graph.indptr, graph.indices, None, batch, FANOUTS, key, False)[0]
            needed = place[n_id]
            for i, size in enumerate(sizes):
                rows[i] += int((needed >= size).sum())
            seed_count, vertices = seed_count + batch.numel(), vertices + n_id.numel()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started, timed, sampled = time.thread_time(), 0, 0
    for batch, key in islice(shuffled_batches(seeds, BATCH_SIZE, 0, 1), 4):
        sampled += ops.sample_neighbors(graph.indptr, graph.indices, None, batch, FANOUTS, key, False)[0].numel()
        timed += batch.numel()
    seconds = time.thread_time() - started
    torch.set_num_threads(threads)
    yield {
        "batch_size": batch_size,
        "seeds": seeds.numel(),
        "counted_seeds": seed_count,
        "rows_per_seed": [count / seed_count for count in rows],
        "vertices_per_seed": vertices / seed_count,
        "sampling_cpu_seconds_per_vertex": seconds / sampled,
    }


def on_disk(data: Any, graph: Graph, assignment: Tensor, parts: int, root: Path) -> dict[str, Any]:
    """Returns the bytes of a dataset directory, and the sizes that they depend on."""
    partition(data, parts, root, FANOUTS, BATCH_SIZE, method=assignment)
    splits = sum(int(data[name].sum()) for name in ("train_mask", "val_mask", "test_mask"))
    found = {
        "parts": parts,
        "vertices": graph.num_vertices,
        "edges": graph.num_edges,
        "split_ids": splits,
        "row_bytes": data.x[:1].nbytes,
        "label_bytes": data.y[:1].nbytes,
        "bytes": sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
    }
    shutil.rmtree(root)
    print(found, flush=True)
    return found


def gathered() -> list[dict[str, Any]]:
    """Returns the CPU seconds to gather a random row from 512 MiB in memory, by the width of rows, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for row_bytes in ROW_BYTES:
        rows = torch.ones(2**29 // row_bytes, row_bytes, dtype=torch.uint8)
        ops.use_huge_pages(rows)
        index = torch.randint(rows.size(0), (2**26 // row_bytes,), generator=torch.Generator().manual_seed(0))
        out = torch.zeros(index.numel(), row_bytes, dtype=torch.uint8)
        started = time.thread_time()
        for _ in range(3):
            ops.gather_rows(rows, index, out)
        found.append(
            {"row_bytes": row_bytes, "cpu_seconds_per_row": (time.thread_time() - started) / 3 / index.numel()}
        )
        print(found[-1], flush=True)
    torch.set_num_threads(threads)
    return found


if __name__ == "__main__":
    main()
