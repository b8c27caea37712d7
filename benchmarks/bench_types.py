"""Compares ways to partition a graph with several types of vertices. Writes results/types.json.

    python benchmarks/bench_types.py [--debian FILE] [--parts 4]

It partitions the joint graph of all relations, with and without the weights of typed VIP; every type by itself; and ``to_homogeneous()`` by homogeneous METIS.
The criteria are the rows with features that a step of all ranks fetches without a cache, and the balance of the parts in rows and in seeds. Rows are predicted
(the sum of typed VIP over remote vertices) and counted on sampled steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from common import write_results
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NodeSamplerInput

from salientpp import NeighborSampler
from salientpp.datasets import synthetic_mag
from salientpp.graph.csc import Graph
from salientpp.partitioning import typed
from salientpp.partitioning.assign import assign_parts
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.workload import assign_for
from salientpp.store.directory.contents import Contents, read_contents
from salientpp.vip.inclusion import typed_inclusion_probabilities, uniform_starts

#: Relations of debian_full, by their numbers in the file.
_DEBIAN = ["depends", "recommends", "suggests", "enhances", "build_depends", "builds", "maintains", "uploads"]
_TYPES = ["binary", "source", "maintainer"]


def debian(file: Path) -> HeteroData:
    """Returns the archive of Debian 12 as a graph of binary packages, source packages and maintainers, with each relation and its reverse."""
    with np.load(file, allow_pickle=False) as arrays:
        of_node, of_edge = (torch.from_numpy(arrays[name]).long() for name in ("node_type", "edge_type"))
        edge_index, x = torch.from_numpy(arrays["edge_index"]).long(), torch.from_numpy(arrays["x"])
        train = torch.zeros(of_node.numel(), dtype=torch.bool)
        train[torch.from_numpy(arrays["train_idx"])] = True
    data = HeteroData()
    place = torch.empty_like(of_node)
    for number, name in enumerate(_TYPES):
        ids = (of_node == number).nonzero().flatten()
        place[ids] = torch.arange(ids.numel())
        data[name].num_nodes = ids.numel()
        if name != "maintainer":  # maintainers have rows of zeros in the file
            data[name].x = x[ids]
        if name == "binary":
            data[name].train_mask = train[ids]
    for number, relation in enumerate(_DEBIAN):
        ends = edge_index[:, of_edge == number]
        for source, a in enumerate(_TYPES):
            for target, b in enumerate(_TYPES):
                some = place[ends[:, (of_node[ends[0]] == source) & (of_node[ends[1]] == target)]]
                if some.numel():
                    data[a, relation, b].edge_index = some
                    data[b, f"rev_{relation}", a].edge_index = some.flip(0)
    return data


def by_type_alone(contents: Contents, num_parts: int) -> Tensor:
    """Partitions each type by METIS on the relations inside it, and a type without any evenly at random."""
    graph, pieces = contents.graph, []
    for number, (name, size) in enumerate(zip(graph.node_types, graph.num_vertices)):
        inside = [r for r in graph.relations if r.source == r.target == number]
        target = [torch.repeat_interleave(torch.arange(size), r.indptr.diff()) for r in inside]
        ends = torch.cat([torch.stack([r.indices.long(), t]) for r, t in zip(inside, target)], 1) if inside else None
        own = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64) if ends is None else ends, size)
        method = "random" if ends is None else "metis"
        pieces.append(assign_parts(own, num_parts, method=method, seed_sets=contents.splits[name]).assignment)
    return torch.cat(pieces)


def homogeneous(contents: Contents, num_parts: int, edge_weights: str, fanouts: list[int], batch_size: int) -> Tensor:
    """Partitions ``to_homogeneous()`` by METIS. Vertices, edges and splits are balanced; types are unknown."""
    joint = typed.JointGraph.of(contents.graph)
    first = dict(zip(contents.graph.node_types, joint.first))
    splits = {name: ids + first[type_] for type_, own in contents.splits.items() for name, ids in own.items()}
    return assign_for(
        joint.graph,
        num_parts,
        PartitionOptions("metis", edge_weights, refine=False),
        splits=splits,
        seeds=splits["train"],
        num_neighbors=fanouts,
        batch_size=batch_size,
    ).assignment


def candidates(contents: Contents, num_parts: int, fanouts: list[int], batch_size: int) -> dict[str, Tensor]:
    per_relation = [fanouts] * len(contents.graph.relations)

    def joint(options: PartitionOptions) -> Tensor:
        return typed.assign_types(
            contents.graph,
            num_parts,
            options,
            splits=contents.splits,
            seeds=contents.starts,
            fanouts=per_relation,
            batch_size=batch_size,
            row_bytes=contents.row_bytes,
        ).assignment

    return {
        "joint graph, typed VIP weights": joint(PartitionOptions("metis")),
        "joint graph": joint(PartitionOptions("metis", "equal")),
        "each type by itself": by_type_alone(contents, num_parts),
        "to_homogeneous()": homogeneous(contents, num_parts, "equal", fanouts, batch_size),
        "to_homogeneous(), VIP weights": homogeneous(contents, num_parts, "vip", fanouts, batch_size),
        "random": joint(PartitionOptions("random")),
    }


def judge(
    data: HeteroData,
    contents: Contents,
    assignment: Tensor,
    num_parts: int,
    fanouts: list[int],
    batch_size: int,
    steps: int,
) -> dict[str, float]:
    """Returns predicted and fetched rows with features per step, and the fullest part relative to the mean."""
    graph = contents.graph
    parts = dict(zip(graph.node_types, assignment.split(list(graph.num_vertices))))
    (seed_type, seeds), *_ = contents.starts.items()
    own_seeds = [seeds[parts[seed_type][seeds] == part_id] for part_id in range(num_parts)]
    starts = [uniform_starts({seed_type: own}, batch_size) for own in own_seeds]
    vip = typed_inclusion_probabilities(graph, starts, [fanouts] * len(graph.relations))
    with_rows = [name for name, size in contents.row_bytes.items() if size]
    predicted = sum(
        float(vip[part_id][name][parts[name] != part_id].sum()) for part_id in range(num_parts) for name in with_rows
    )
    sampler = NeighborSampler(data, fanouts)
    fetched = 0
    generator = torch.Generator().manual_seed(0)
    for part_id, own in enumerate(own_seeds):
        for step in range(steps):
            chosen = own[torch.randperm(own.numel(), generator=generator)[:batch_size]]
            batch = sampler.sample_from_nodes(NodeSamplerInput(None, chosen, input_type=seed_type), step).node
            fetched += sum(int((parts[name][batch[name]] != part_id).sum()) for name in with_rows)
    rows = torch.stack([torch.bincount(parts[name], minlength=num_parts) for name in with_rows]).double()
    sizes = torch.tensor([len(own) for own in own_seeds]).double()
    return {
        "predicted_rows": predicted,
        "fetched_rows": fetched / steps,
        "rows_balance": float((rows.max(1).values / rows.mean(1)).max()),
        "seeds_balance": float(sizes.max() / sizes.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--papers", type=int, default=100_000)
    parser.add_argument("--debian", type=Path, help="debian_full.npz")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="sampled batches per part")
    arguments = parser.parse_args()
    graphs = {"synthetic-mag": synthetic_mag(num_papers=arguments.papers, labelled_fraction=0.05)}
    if arguments.debian is not None:
        graphs["debian_full"] = debian(arguments.debian)
    rows = []
    for name, data in graphs.items():
        contents = read_contents(data)
        for fanouts in ([10, 5], [5, 5, 5]):
            for method, assignment in candidates(contents, arguments.parts, fanouts, arguments.batch_size).items():
                row = judge(data, contents, assignment, arguments.parts, fanouts, arguments.batch_size, arguments.steps)
                rows.append({"graph": name, "fanouts": fanouts, "method": method, **row})
                print(rows[-1], flush=True)
    write_results(
        "types",
        rows,
        parts=arguments.parts,
        batch_size=arguments.batch_size,
        papers=arguments.papers,
        steps=arguments.steps,
    )


if __name__ == "__main__":
    main()
