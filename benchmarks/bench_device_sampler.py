"""Measures sampling on a GPU and on the CPU. Writes results/device_sampler.json.

The graph has the numbers of vertices and edges of ogbn-products (2.4 M and 105 M) and a power law of degrees; ``bench_cuda.py`` generates it. Batches have
1024 seeds and fanouts (15, 10, 5) or (10, 10, 10, 10). All candidates draw the same batches. Figures are batches per second, medians over turns:

* ``host, 1 thread`` and ``host, 8 threads``: ``ops.sample_neighbors``.
* ``device``: the same samples drawn on the device, where they stay; 1 and 4 threads, each with a stream of its own.
* ``device to host``: what a loader with ``neighbor_sampler="device"`` does; the sample is copied to pinned memory.
* ``device, in place``: the lists are in pinned memory of the host, and the device reads them there.

With ``--device cpu`` and a small graph, kernels run in Triton's interpreter (``TRITON_INTERPRET=1``). That only shows that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch
from bench_cuda import chung_lu
from common import RESULTS, write_results
from torch import Tensor

from salientpp import Graph, ops
from salientpp.sampling import device_draw
from salientpp.sampling.device_draw import DeviceGraph, sample_neighbors
from salientpp.sampling.device_topology import DeviceTopology
from salientpp.sampling.topology import DrawOptions

FANOUTS = ([15, 10, 5], [10, 10, 10, 10])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=2_400_000)
    parser.add_argument("--degree", type=float, default=43.75)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=64, help="batches per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    data = chung_lu(arguments.vertices, arguments.degree, 1, 0.08, device)
    graph = Graph.from_edge_index(data.edge_index, data.num_nodes, linked=True)
    print(f"{graph}", flush=True)
    seeds = data.train_mask.nonzero().flatten()
    order = torch.randperm(seeds.numel(), generator=torch.Generator().manual_seed(0))
    batches = [seeds[part] for part in order.split(arguments.batch_size)[: arguments.batches]]
    rows = [row for fanouts in FANOUTS for row in time_fanouts(graph, fanouts, batches, arguments.turns, device)]
    write_results(
        "device_sampler",
        rows,
        arguments.results,
        vertices=graph.num_vertices,
        edges=graph.num_edges,
        batch_size=arguments.batch_size,
        batches=len(batches),
    )


def time_fanouts(graph: Graph, fanouts: list[int], batches: list[Tensor], turns: int, device: torch.device) -> list:
    held = DeviceGraph.of(graph, device)
    with mock.patch.object(device_draw, "SHARE_OF_FREE_MEMORY", 0.0):
        in_place = DeviceTopology(graph, device)
    topology, options = DeviceTopology(graph, device), DrawOptions([fanouts])
    module, tables, streams = torch.get_device_module(device), {}, {}

    def on_host(key: int) -> Tensor:
        return ops.sample_neighbors(graph.indptr, graph.indices, None, batches[key], fanouts, key, links=graph.links)[0]

    def on_device(key: int, thread: int = 0) -> Tensor:
        if thread not in tables:
            tables[thread], streams[thread] = held.new_table(), module.Stream()
        with module.stream(streams[thread]):
            return sample_neighbors(held, tables[thread], batches[key], fanouts, key)[0]

    def from_topology(topology: DeviceTopology) -> Callable[[int], Tensor]:
        return lambda key: topology.sample({None: batches[key]}, key, options).node

    for key in range(2):
        want = on_host(key)
        for candidate in (on_device, from_topology(topology), from_topology(in_place)):
            drawn = candidate(key)
            module.synchronize()  # the draws ran in a stream of their own
            assert torch.equal(drawn.cpu(), want)
    candidates: dict[str, tuple[Callable, int]] = {
        "host, 1 thread": (on_host, 1),
        "host, 8 threads": (on_host, 8),
        "device, 1 thread": (on_device, 1),
        "device to host, 1 thread": (from_topology(topology), 1),
        "device to host, 4 threads": (from_topology(topology), 4),
        "device, in place, 1 thread": (from_topology(in_place), 1),
    }
    spent: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):  # the first turn is warm-up
        for name, (candidate, num_threads) in candidates.items():
            # One thread of the host is slow, so it draws fewer batches.
            keys = range(len(batches) // 4 or 1) if name == "host, 1 thread" else range(len(batches))
            seconds = seconds_of(candidate, keys, num_threads, device)
            if turn:
                spent[name].append(seconds / len(keys))
    rows = []
    for name, seconds in spent.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "name": name,
                "fanouts": fanouts,
                "batches_per_second": 1 / median,
                "ms_per_batch": median * 1e3,
                "ms": [s * 1e3 for s in seconds],
            }
        )
        print(f"{fanouts} {name:28} {1 / median:9.1f} batches per s, {median * 1e3:8.2f} ms", flush=True)
    return rows


def seconds_of(candidate: Callable[[int], Tensor], keys: range, num_threads: int, device: torch.device) -> float:
    """Returns the seconds that threads take for batches. The threads start before the clock does."""
    module = torch.get_device_module(device)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(candidate, keys[:num_threads]))
        module.synchronize()
        started = time.perf_counter()
        list(threads.map(candidate, keys))
        module.synchronize()
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
