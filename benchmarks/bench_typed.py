"""Measures draws with types, times, weights, trees and links, compared with PyG's sampler. Writes results/typed.json.

    python benchmarks/bench_typed.py [--vertices 500000] [--degree 39] [--cases "two types" weights ...]

Each case calls ``NeighborSampler`` as a loader calls it: seeds in, a PyG ``SamplerOutput`` out. Peers: PyG's NeighborSampler with pyg-lib and torch-sparse, if
they support the case. Figures are CPU seconds per edge of the batch; samplers take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import PYG, PyGSampler, generated, take_turns, write_results
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

import salientpp


def two_types(data: Data) -> HeteroData:
    """Makes even vertices of one type and odd ones of the other. The edges fall into four relations."""
    hetero = HeteroData()
    names = ("a", "b")
    for name in names:
        hetero[name].num_nodes = (data.num_nodes + 1) // 2
    parity = data.edge_index % 2
    for i, source in enumerate(names):
        for j, target in enumerate(names):
            hetero[source, "to", target].edge_index = data.edge_index[:, (parity[0] == i) & (parity[1] == j)] // 2
    return hetero


#: Case -> fanouts, options of the sampler, kind of seeds, peers that support it.
CASES: dict[str, tuple[list[int], dict[str, Any], str, tuple[str, ...]]] = {
    "one type, no options": ([15, 10, 5], {}, "vertices", ("pyg-lib",)),
    "two types": ([8, 5, 3], {}, "vertices of a type", ("pyg-lib", "torch-sparse")),
    "trees": ([15, 10, 5], {"disjoint": True}, "vertices", ("pyg-lib",)),
    "node times": ([15, 10, 5], {"time_attr": "time"}, "vertices", ("pyg-lib",)),
    "edge times, last": ([15, 10, 5], {"time_attr": "edge_time", "temporal_strategy": "last"}, "vertices", ("pyg-lib",)),
    "weights": ([10, 10], {"weight_attr": "weight"}, "vertices", ("pyg-lib",)),
    "bidirectional": ([15, 10, 5], {"subgraph_type": "bidirectional"}, "vertices", ("pyg-lib",)),
    "induced": ([10, 5], {"subgraph_type": "induced"}, "vertices", ("torch-sparse",)),
    "links, binary negatives": ([10, 10], {}, "links", ("pyg-lib",)),
}  # fmt: skip


def number_of_edges(out: Any) -> int:
    return sum(row.numel() for row in out.row.values()) if isinstance(out.row, dict) else out.row.numel()


def draw(sampler: Any, kind: str, seeds: list[Tensor], data: Data, timed: bool) -> int:
    """Draws a batch for each of ``seeds`` and returns the number of edges."""
    total = 0
    for batch in seeds:
        if kind == "links":
            ends = data.edge_index[:, batch]
            out = sampler.sample_from_edges(EdgeSamplerInput(None, ends[0], ends[1]), NegativeSampling("binary"))
        else:
            type_ = "a" if kind == "vertices of a type" else None
            out = sampler.sample_from_nodes(NodeSamplerInput(None, batch, data.time[batch] if timed else None, type_))
        total += number_of_edges(out)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=500_000)
    parser.add_argument("--degree", type=float, default=39, help="mean number of directed edges per vertex")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = generated(arguments.vertices, arguments.degree, num_features=1)
    del data.x
    data.time = torch.randint(1_000_000, (arguments.vertices,), generator=generator)
    data.edge_time = torch.randint(1_000_000, (data.num_edges,), generator=generator)
    data.weight = torch.rand(data.num_edges, generator=generator)
    vertices = data.train_mask.nonzero().flatten()
    rows = []
    for case in arguments.cases:
        fanouts, options, kind, backends = CASES[case]
        one_of = {"links": data.num_edges, "vertices of a type": arguments.vertices // 2}.get(kind, vertices.numel())
        places = [torch.randperm(one_of, generator=generator)[: arguments.batch_size] for _ in range(arguments.batches)]
        seeds = [vertices[place] for place in places] if kind == "vertices" else places
        given = two_types(data) if kind == "vertices of a type" else data
        samplers: dict[str, Any] = {"salientpp": salientpp.NeighborSampler(given, fanouts, **options)}
        for name in PYG:
            if name.removeprefix("PyG over ") in backends:
                samplers[name] = PyGSampler(name, given, fanouts, **options)
        candidates: dict[str, Callable[[], int]] = {
            name: lambda sampler=sampler: draw(sampler, kind, seeds, data, "time_attr" in options)
            for name, sampler in samplers.items()
        }
        for name, timing in take_turns(candidates, arguments.repeats).items():
            edges = timing.pop("last")
            nanoseconds = timing["cpu_seconds"]["median"] / edges * 1e9
            rows.append({"case": case, "fanouts": fanouts, "sampler": name, "edges": edges, "cpu_ns_per_edge": nanoseconds, **timing})  # fmt: skip
            print(f"{case:24} {name:22} {nanoseconds:8.1f} ns per edge of {edges:,}", flush=True)
        del samplers, candidates, given
    write_results(
        "typed", rows, vertices=arguments.vertices, graph_edges=data.num_edges, batch_size=arguments.batch_size
    )


if __name__ == "__main__":
    main()
