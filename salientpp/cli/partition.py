"""``salientpp partition``: partitions a graph and writes a dataset directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_partitioning,
    add_seed,
    adder,
    format_of_attribute,
    num_neighbors_of,
    values_of,
)

HELP = "partition a graph and write a dataset directory"


#: What help says of each argument.
TEXTS = {
    "dataset": f"{DATASETS} such as ogbn-products",
    "root": "the directory to write",
    "--parts": "number of parts, one per rank or machine",
    "--order": "of the vertices of a part: by VIP, or as in the dataset (vip)",
    "--num-neighbors": "neighbours per hop, -1 for all, then with an equals sign: --num-neighbors=-1,10 (15,10,5)",
    "--batch-size": "seeds per batch and rank (1024)",
    "--seeds": "the split that the inclusion probabilities are computed for; with several types TYPE:SPLIT, if several have it (train)",
    "--replicate": "a type of vertices whose rows every part is to have; may be given several times (types with at most 1 %% of all rows' bytes and 16 MiB)",
    "--replicate-none": "every row in one part alone",
    "--time-attr": "node or edge times: lists are stored in their order, and node times whole, so that ranks with a copy of their part alone can draw by them",
    "--store-as": "store the rows of a node attribute in fewer bytes: fp16, bf16, fp8, int8, int4, or with a scale for every B values int8/B, int4/B, as in "
    "--store-as x=int8; may be given several times. What is lost is shown",
    "--tolerance": "allowed excess of a part over the mean (0.05)",
    "--overwrite": "replace an existing dataset directory, or the work of another command that was stopped",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Partition a graph, order each part by vertex inclusion probability (VIP), write a dataset directory. A run that was stopped goes on where "
        "it was when the same command is given again: the assignment, the order, and every file of edges and part that was done are kept."
    )
    add = adder(parser, TEXTS)
    add("dataset")
    add("root", type=Path)
    add("--parts", type=int, required=True, metavar="K")
    add_partitioning(parser)
    add("--order", choices=("vip", "original"), default="vip")
    add("--num-neighbors", type=num_neighbors_of, default=[15, 10, 5], metavar="F,F,...")
    add("--batch-size", type=int, default=1024, metavar="B")
    add("--seeds", type=_seeds, default="train", metavar="[TYPE:]SPLIT")
    add("--replicate", action="append", metavar="TYPE")
    add("--replicate-none", action="store_true")
    add("--time-attr", metavar="NAME")
    add("--store-as", type=format_of_attribute, action="append", metavar="[TYPE:]NAME=FORMAT")
    add("--tolerance", type=float, default=0.05)
    add_seed(parser, "METIS, KaMinPar or the random assignment")
    add_data(parser)
    add("--overwrite", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import describe
    from salientpp.cli.given_graph import graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.store.directory.writer import partition
    from salientpp.vip.inclusion import check_fanouts

    if arguments.root.exists() and not arguments.overwrite:
        raise ValueError(f"{arguments.root} exists; pass --overwrite to replace it, or choose another directory")
    check_fanouts(arguments.num_neighbors)
    if arguments.replicate and arguments.replicate_none:
        raise ValueError("--replicate and --replicate-none contradict each other; leave one out")
    passed = "edge_weights", "order", "refine", "seeds", "time_attr", "tolerance", "seed", "overwrite"
    method: Any = method_of(arguments.method, arguments.dataset)
    with warnings_in_lines("partition"), shown_progress() as progress:
        progress.begin(f"loading {arguments.dataset}")
        data, method = graph_of(arguments, method)
        part = partition(
            data,
            arguments.parts,
            arguments.root,
            arguments.num_neighbors,
            arguments.batch_size,
            method=method,
            replicate=() if arguments.replicate_none else arguments.replicate,
            store_as=dict(arguments.store_as or ()) or None,
            progress=progress,
            **values_of(arguments, *passed),
        )
        arguments.written.append(arguments.root)
        progress.begin("done")
    terminal.show(*describe(part))
    return 0


def _seeds(text: str) -> str | tuple[str, str]:
    type_, colon, split = text.rpartition(":")
    return (type_, split) if colon else text
