"""``salientpp copy-to-disk``: copies what this host needs of a dataset directory to its own disk."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import adder
from salientpp.launch.environment import detect

HELP = "copy what this host needs of a dataset directory to its own disk"


#: What help says of each argument.
TEXTS = {
    "root": "a directory that `salientpp partition` wrote",
    "--to": "where to put the copy, as DIR/NAME; on a cluster often $TMPDIR",
    "--part": "a part to copy, rather than this rank's; may be given several times",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy what this rank needs of a dataset directory (the topology and its own part) to a disk of its host, and verify the copy. "
        "Started on every rank of a job (srun, torchrun) it copies the parts of that rank; several ranks of a host may share a copy. "
        "The path of the copy, for salientpp.load, is the one line on stdout."
    )
    add = adder(parser, TEXTS)
    add("root", type=Path)
    add("--to", type=Path, required=True, metavar="DIR")
    add("--part", type=int, action="append", metavar="P")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.progress import shown_progress
    from salientpp.ranks.placement import parts_of
    from salientpp.store.directory.load import load
    from salientpp.store.directory.local_copy import copy_to_disk

    root, parts = arguments.root, arguments.part
    if parts is None:
        launch, num_parts = detect(), load(root).num_parts
        if launch.launcher == "none" and num_parts > 1:
            raise ValueError(
                f"{root} has {num_parts} parts, and this process is no rank of a job, which would say which of them to copy; "
                "start it with `srun salientpp copy-to-disk ...`, or name them with --part"
            )
        parts = parts_of(launch.rank, launch.world_size, num_parts)
    with shown_progress() as progress:
        copy = copy_to_disk(root, arguments.to, parts=parts, progress=progress)
    terminal.print_whole(os.fsencode(f"{copy}\n"))  # as it is on disk, for a script that reads it
    return 0
