"""``salientpp partition``: partitions a graph and writes a dataset directory."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from salientpp.cli import terminal
from salientpp.cli.dataset_name import dataset_or_tables
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_json,
    add_partitioning,
    add_seed,
    adder,
    files_of,
    format_of_attribute,
    num_neighbors_of,
    values_of,
)

HELP = "partition a graph and write a dataset directory"
EXAMPLE = "salientpp partition synthetic:num_vertices=20000 parts-2 --parts 2"


#: Checks the name of the dataset.
DATASET = dataset_or_tables

#: Help of each argument.
TEXTS = {
    "dataset": f"{DATASETS}, such as ogbn-products; or tables:FILE.toml: tables whose rows have keys, as the file describes",
    "root": "dataset directory to write",
    "--parts": "number of parts, one per rank or machine",
    "--order": "order of the vertices inside a part: by VIP, or as in the dataset (default: vip)",
    "--num-neighbors": "neighbours per hop, -1 for all; a list that begins with -1 needs an equals sign: --num-neighbors=-1,10 (default: 15,10,5)",
    "--batch-size": "seeds per batch and rank (default: 1024)",
    "--seeds": "split that the inclusion probabilities are computed for; TYPE:SPLIT if several vertex types have it (default: train)",
    "--replicate": "vertex type whose rows every part gets; may be given several times (default: types "
    "with at most 1 %% of all rows' bytes, and at most 16 MiB)",
    "--replicate-none": "replicate no type: each row is in one part only",
    "--time-attr": "attribute with the times of vertices or edges. Neighbour lists are sorted by these times, and vertex times are stored for all parts. So a "
    "rank that has only its own part can draw by time",
    "--topology": "whole: one set of neighbour lists, which every rank opens. parts: each part stores the lists and edge attributes of its own vertices, and a "
    "rank opens only its part's (default: whole)",
    "--store-as": "store rows of a node or edge attribute in fewer bytes, as in --store-as=x=int8: fp16, bf16, int8, int4, or int8/B and int4/B with "
    "a scale for every B values. TYPE of an edge attribute is written as author,writes,paper. May be given several times. The largest error is printed",
    "--tolerance": "how far the load of a part may exceed the mean load, as a fraction (default: 0.05)",
    "--memory": "for tables: limit of resident memory while they are converted, such as 512MiB (default: 4GB)",
    "--report": "for tables: write to this file, as JSON, the rows that were kept and dropped, and what each column became",
    "--overwrite": "replace an existing dataset directory, or the unfinished work of another command",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Partition a graph, order each part by vertex inclusion probability (VIP), and write a dataset directory. After an interruption, the same "
        "command goes on where it stopped: it keeps the assignment, the order, and every finished file of edges and parts. Tables are first converted to a "
        "hidden folder beside the directory. If they have not changed since the directory was written, the command does nothing."
    )
    add = adder(parser, TEXTS)
    add("dataset")
    add("root", type=Path)
    add("--parts", type=int, required=True, metavar="K")
    how = parser.add_argument_group("assignment of vertices to parts")
    add_partitioning(how)
    adder(how, TEXTS)("--tolerance", type=float, default=0.05)
    add_seed(how, "seed of METIS, KaMinPar or the random assignment")
    batches = parser.add_argument_group("batches", "Vertices are assigned and ordered for batches like these.")
    add_batch = adder(batches, TEXTS)
    add_batch("--num-neighbors", type=num_neighbors_of, default=[15, 10, 5], metavar="F,F,...")
    add_batch("--batch-size", type=int, default=1024, metavar="B")
    add_batch("--seeds", type=_seeds, default="train", metavar="[TYPE:]SPLIT")
    add_batch("--order", choices=("vip", "original"), default="vip")
    stored = parser.add_argument_group("storage")
    add_stored = adder(stored, TEXTS)
    add_stored("--topology", choices=("whole", "parts"), default="whole")
    add_stored("--store-as", type=format_of_attribute, action="append", metavar="[TYPE:]NAME=FORMAT")
    add_stored("--replicate", action="append", metavar="TYPE")
    add_stored("--replicate-none", action="store_true")
    add_stored("--time-attr", metavar="NAME")
    files = parser.add_argument_group("files")
    add_data(files)
    add_json(files, "the description of the directory")
    add_file = adder(files, TEXTS)
    add_file("--memory", metavar="BYTES")
    add_file("--report", type=Path, metavar="FILE")
    add_file("--overwrite", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import as_json, describe
    from salientpp.cli.given_graph import graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.datasets import partition_tables
    from salientpp.store.directory.kinds import has_manifest, is_converted
    from salientpp.store.directory.writer import partition
    from salientpp.vip.inclusion import check_fanouts

    files = files_of(arguments, "json", "report")
    files.pop("report", None)
    is_of_tables = arguments.dataset.startswith("tables:")
    of_tables = {name: value for name, value in values_of(arguments, "memory", "report").items() if value is not None}
    for name in () if is_of_tables else of_tables:
        raise ValueError(f"--{name} is only for tables:FILE.toml, got {arguments.dataset}; leave it out")
    is_directory = has_manifest(arguments.root) and not is_converted(arguments.root)
    if arguments.root.exists() and not arguments.overwrite and not (is_of_tables and is_directory):
        raise ValueError(f"{arguments.root} exists; pass --overwrite to replace it, or choose another directory")
    check_fanouts(arguments.num_neighbors)
    if arguments.replicate and arguments.replicate_none:
        raise ValueError("--replicate and --replicate-none exclude each other; leave one of them out")
    passed = "edge_weights", "order", "refine", "seeds", "time_attr", "topology", "tolerance", "seed", "overwrite"
    method: Any = method_of(arguments.method, arguments.dataset)
    with warnings_in_lines("partition"), shown_progress() as progress:
        if is_of_tables:
            write: Any = partial(partition_tables, arguments.dataset, **of_tables)
        else:
            progress.begin(f"loading {arguments.dataset}")
            data, method = graph_of(arguments, method)
            write = partial(partition, data)
        part = write(
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
    contents = {"json": lambda: as_json(part.root, part.manifest)}
    terminal.finish(files, contents, arguments.written, lambda: describe(part))
    return 0


def _seeds(text: str) -> str | tuple[str, str]:
    type_, colon, split = text.rpartition(":")
    return (type_, split) if colon else text
