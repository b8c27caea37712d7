"""``salientpp convert``: converts a graph that is larger than memory into memory-mapped files."""

from __future__ import annotations

import argparse
from pathlib import Path

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_data, add_json, adder, files_of, values_of

HELP = "convert a graph that is larger than memory into memory-mapped files"
EXAMPLE = "salientpp convert edges:edges.csv converted --undirected"


#: Help of each argument.
TEXTS = {
    "source": "npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save wrote), a name of the Open Graph Benchmark (ogbn-... or ogbl-...), "
    "npy:DIR[,homogeneous=true] (folders of arrays by type), mag240m:DIR, igb:DIR[,classes=2983,homogeneous=true], or "
    "edges:FILES[,x=FILES,y=FILES,nodes=FILES,train=FILES,val=FILES,test=FILES,num_vertices=N,skip=LINES,source=COLUMN,target=COLUMN]: text, .npy or "
    ".parquet files, with wildcards; or tables:FILE.toml: tables whose rows have keys, as the file describes. Files may also be at addresses such as "
    "s3://bucket/edges-*.npy; they are fetched to a hidden folder beside the result first",
    "root": "directory to write",
    "--memory": "limit of resident memory, such as 512MiB (default: 4GB)",
    "--undirected": "store every edge in both directions, each pair once; or store edges as they are (default: as the dataset defines it)",
    "--deduplicate": "store each pair of vertices once",
    "--dtype": "store an attribute as fp64, fp32, fp16 or bf16, as in --dtype=x=fp16; may be given several times (default: as in the source)",
    "--finite": "refuse NaN and infinity in attributes",
    "--report": "write to this file, as JSON, the rows of tables that were kept and dropped, and what each column became; for tables:",
    "--encode-as": "encode columns with the categories, means, deviations and unit of time of an earlier graph in this directory; for tables:",
    "--overwrite": "replace a converted graph, or an unfinished conversion",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a graph in pieces, sort its edges outside memory, and write files that partition and analyze memory-map: converted:DIR. After "
        "an interruption, the same command goes on where it stopped."
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
    add_json(parser, "the description of the converted graph")
    add("--report", type=Path, metavar="FILE")
    add("--encode-as", type=Path, metavar="DIR")
    add("--overwrite", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import as_json, describe_converted
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.datasets import convert
    from salientpp.datasets.converted.directory import read_converted

    files = files_of(arguments, "json", "report")
    report = files.pop("report", None)
    if len(dict(arguments.dtype)) != len(arguments.dtype):
        raise ValueError("--dtype names an attribute twice; give each attribute one format")
    with warnings_in_lines("convert"), shown_progress() as progress:
        convert(
            arguments.source,
            arguments.root,
            dtype=dict(arguments.dtype),
            report=report,
            progress=progress,
            **values_of(arguments, "memory", "undirected", "deduplicate", "finite", "data", "encode_as", "overwrite"),
        )
    contents = {"json": lambda: as_json(arguments.root, read_converted(arguments.root))}
    terminal.finish(files, contents, arguments.written, lambda: [describe_converted(arguments.root)])
    return 0


def _format_of_name(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected an attribute and a format such as x=fp16, got {text!r}")
    return name, value
