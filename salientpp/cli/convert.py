"""``salientpp convert``: turns a graph that outgrows memory into files that are mapped."""

from __future__ import annotations

import argparse
from pathlib import Path

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_data, adder, values_of

HELP = "turn a graph that outgrows memory into files that are mapped"


#: What help says of each argument.
TEXTS = {
    "source": "npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save wrote), a name of the Open Graph Benchmark, or "
    "edges:FILES[,x=FILES,y=FILES,train=FILES,val=FILES,test=FILES,num_vertices=N,skip=LINES]: text, .npy or .parquet, with wildcards",
    "root": "the directory to write",
    "--memory": "to have resident at most, as in 512MiB (4GB)",
    "--undirected": "every edge in both directions, each pair once; or edges as they are stored (as the dataset defines it)",
    "--deduplicate": "each pair once",
    "--dtype": "store an attribute as fp64, fp32, fp16, bf16 or fp8, as in --dtype x=fp16; may be given several times (as it comes)",
    "--finite": "refuse NaN and infinity in attributes",
    "--overwrite": "replace a converted graph, or a conversion that was begun",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a graph in pieces, sort its edges outside memory, and write it as files that partition and analyze map: converted:DIR. A run "
        "that was stopped goes on where it was when the same command is given again."
    )
    add = adder(parser, TEXTS)
    add("source")
    add("root", type=Path)
    add("--memory", default="4GB", metavar="BYTES")
    add("--undirected", action=argparse.BooleanOptionalAction)
    add("--deduplicate", action="store_true")
    add("--dtype", type=_format_of_name, action="append", default=[], metavar="NAME=FORMAT")
    add("--finite", action="store_true")
    add_data(parser)
    add("--overwrite", action="store_true")


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
            dtype=dict(arguments.dtype),
            progress=progress,
            **values_of(arguments, "memory", "undirected", "deduplicate", "finite", "data", "overwrite"),
        )
    terminal.show(describe_converted(arguments.root))
    return 0


def _format_of_name(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected a name and a value such as x=fp16, got {text!r}")
    return name, value
