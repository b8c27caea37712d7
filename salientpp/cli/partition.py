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
    fanouts_of,
    format_of_attribute,
)

HELP = "partition a graph and write a dataset directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Partition a graph, order each part by vertex inclusion probability (VIP), write a dataset directory. A run that was stopped goes on where "
        "it was when the same command is given again: the assignment, the order, and every file of edges and part that was done are kept."
    )
    parser.add_argument(
        "dataset",
        help=f"{DATASETS} such as ogbn-products",
    )
    parser.add_argument("root", type=Path, help="the directory to write")
    parser.add_argument(
        "--parts", type=int, required=True, metavar="K", help="number of parts, one per rank or machine"
    )
    add_partitioning(parser)
    parser.add_argument(
        "--order",
        choices=("vip", "original"),
        default="vip",
        help="of the vertices of a part: by VIP, or as in the dataset (vip)",
    )
    parser.add_argument(
        "--fanouts",
        type=fanouts_of,
        default=[15, 10, 5],
        metavar="F,F,...",
        help="neighbours per hop, -1 for all, then with an equals sign: --fanouts=-1,10 (15,10,5)",
    )
    parser.add_argument("--batch-size", type=int, default=1024, metavar="B", help="seeds per batch and rank (1024)")
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default="train",
        metavar="[TYPE:]SPLIT",
        help="the split that the inclusion probabilities are computed for; with several types TYPE:SPLIT, if several have it (train)",
    )
    parser.add_argument(
        "--replicate",
        action="append",
        metavar="TYPE",
        help="a type of vertices whose rows every part is to have; may be given several times (types with at most 1 %% of all rows' bytes and 16 MiB)",
    )
    parser.add_argument("--replicate-none", action="store_true", help="every row in one part alone")
    parser.add_argument(
        "--time-attr",
        metavar="NAME",
        help="node or edge times: lists are stored in their order, and node times whole, so that ranks with a copy of their part alone can draw by them",
    )
    parser.add_argument(
        "--store-as",
        type=format_of_attribute,
        action="append",
        metavar="[TYPE:]NAME=FORMAT",
        help="store the rows of a node attribute in fewer bytes: fp16, bf16, fp8, int8, int4, or with a scale for every B values int8/B, int4/B, as in "
        "--store-as x=int8; may be given several times. What is lost is shown",
    )
    parser.add_argument("--tolerance", type=float, default=0.05, help="allowed excess of a part over the mean (0.05)")
    add_seed(parser, "METIS, KaMinPar or the random assignment")
    add_data(parser)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing dataset directory, or the work of another command that was stopped",
    )


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import describe
    from salientpp.cli.given_graph import graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.store.directory.writer import partition
    from salientpp.vip.inclusion import check_fanouts

    if arguments.root.exists() and not arguments.overwrite:
        raise ValueError(f"{arguments.root} exists; pass --overwrite to replace it, or choose another directory")
    check_fanouts(arguments.fanouts)
    if arguments.replicate and arguments.replicate_none:
        raise ValueError("--replicate and --replicate-none contradict each other; leave one out")
    method: Any = method_of(arguments.method, arguments.dataset)
    with warnings_in_lines("partition"), shown_progress() as progress:
        progress.begin(f"loading {arguments.dataset}")
        data, method = graph_of(arguments, method)
        part = partition(
            data,
            arguments.parts,
            arguments.root,
            arguments.fanouts,
            arguments.batch_size,
            method=method,
            edge_weights=arguments.edge_weights,
            order=arguments.order,
            refine=arguments.refine,
            seeds=arguments.seeds,
            replicate=() if arguments.replicate_none else arguments.replicate,
            time_attr=arguments.time_attr,
            store_as=dict(arguments.store_as or ()) or None,
            tolerance=arguments.tolerance,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
            progress=progress,
        )
        arguments.written.append(arguments.root)
        progress.begin("done")
    terminal.show(*describe(part))
    return 0


def _seeds(text: str) -> str | tuple[str, str]:
    type_, colon, split = text.rpartition(":")
    return (type_, split) if colon else text
