"""``salientpp convert``: turns a graph that outgrows memory into files that are mapped."""

from __future__ import annotations

import argparse
from pathlib import Path

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_data, add_memory

HELP = "turn a graph that outgrows memory into files that are mapped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a graph in pieces, sort its edges outside memory, and write it as files that partition and analyze map: converted:DIR. A run "
        "that was stopped goes on where it was when the same command is given again."
    )
    parser.add_argument(
        "source",
        help="npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save wrote), a name of the Open Graph Benchmark, or "
        "edges:FILES[,x=FILES,y=FILES,train=FILES,val=FILES,test=FILES,num_vertices=N,skip=LINES]: text, .npy or .parquet, with wildcards",
    )
    parser.add_argument("root", type=Path, help="the directory to write")
    add_memory(parser)
    parser.add_argument(
        "--undirected",
        action=argparse.BooleanOptionalAction,
        help="every edge in both directions, each pair once; or edges as they are stored (as the dataset defines it)",
    )
    parser.add_argument("--deduplicate", action="store_true", help="each pair once")
    parser.add_argument(
        "--dtype",
        type=_format_of_name,
        action="append",
        default=[],
        metavar="NAME=FORMAT",
        help="store an attribute as fp64, fp32, fp16, bf16 or fp8, as in --dtype x=fp16; may be given several times (as it comes)",
    )
    parser.add_argument("--finite", action="store_true", help="refuse NaN and infinity in attributes")
    add_data(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a converted graph, or a conversion that was begun"
    )


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import describe_converted
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.datasets import convert

    if len(dict(arguments.dtype)) != len(arguments.dtype):
        raise ValueError("--dtype names an attribute twice")
    with warnings_in_lines("convert"), shown_progress() as progress:
        convert(
            arguments.source,
            arguments.root,
            memory=arguments.memory,
            undirected=arguments.undirected,
            deduplicate=arguments.deduplicate,
            dtype=dict(arguments.dtype),
            finite=arguments.finite,
            data=arguments.data,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    terminal.show(describe_converted(arguments.root))
    return 0


def _format_of_name(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected a name and a value such as x=fp16, got {text!r}")
    return name, value
