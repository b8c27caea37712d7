"""``salientpp rewrite``: writes a dataset directory again, with its topology whole instead of in parts, or the reverse."""

from __future__ import annotations

import argparse
from pathlib import Path

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json, adder, files_of

HELP = "write a dataset directory again with its topology whole or in parts"
EXAMPLE = "salientpp rewrite DIR OTHER --topology parts"


#: Help of each argument.
TEXTS = {
    "root": "dataset directory that `salientpp partition` wrote; it stays unchanged",
    "to": "dataset directory to write",
    "--topology": "whole: one set of neighbour lists, which every rank opens. parts: each part stores the lists and edge attributes of its own vertices",
    "--overwrite": "replace an existing dataset directory, or the unfinished work of another command",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a dataset directory again with its topology in parts instead of whole, or whole instead of in parts, "
        "without partitioning again. Parts, ids, numbers of edges and rows stay the "
        "same. After an interruption, the same command goes on where it stopped."
    )
    add = adder(parser, TEXTS)
    add("root", type=Path)
    add("to", type=Path)
    add("--topology", choices=("whole", "parts"), required=True)
    add_json(parser, "the description of the directory")
    add("--overwrite", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import as_json, describe
    from salientpp.cli.progress import shown_progress
    from salientpp.store.directory.rewrite import rewrite_topology

    files = files_of(arguments, "json")
    if arguments.to.exists() and not arguments.overwrite:
        raise ValueError(f"{arguments.to} exists; pass --overwrite to replace it, or choose another directory")
    with shown_progress() as progress:
        part = rewrite_topology(
            arguments.root, arguments.to, arguments.topology, overwrite=arguments.overwrite, progress=progress
        )
        arguments.written.append(arguments.to)
        progress.begin("done")
    contents = {"json": lambda: as_json(part.root, part.manifest)}
    terminal.finish(files, contents, arguments.written, lambda: describe(part))
    return 0
