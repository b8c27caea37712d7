"""``salientpp copy-to-disk``: copies the files that this host needs of a dataset directory to a local disk, or a whole directory to an address."""

from __future__ import annotations

import argparse
import os

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json, adder, files_of
from salientpp.launch.environment import detect

HELP = "copy the files that this host needs of a dataset directory to a local disk, or a directory to an address"
EXAMPLE = "srun salientpp copy-to-disk DIR --to $TMPDIR"


#: Help of each argument.
TEXTS = {
    "root": "dataset directory that `salientpp partition` wrote, or its address, such as s3://bucket/graph",
    "--to": "directory in which the copy is made, as DIR/NAME; on a cluster often $TMPDIR. Or an address such as s3://bucket/graphs, to which the whole "
    "directory is copied",
    "--verify": "check of files that the copy has already: sizes and sampled checksums (quick), or every byte (full) (default: quick)",
    "--part": "part to copy to a disk; may be given several times (default: the parts of this rank)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy the topology and this rank's part of a dataset directory to a local disk, and verify the copy. Start the command on every rank of a job "
        "(srun, torchrun); each rank copies its own parts, and ranks of a host may share a copy. The command prints one line on stdout: the path of "
        "the copy, for salientpp.load. Or copy a whole directory to an address; start that on one host. After an interruption, the same command goes on."
    )
    add = adder(parser, TEXTS)
    add("root")  # not a path, which would shorten the slashes of an address
    add("--to", required=True, metavar="DIR")
    add("--part", type=int, action="append", metavar="P")
    add_json(parser, "the description of the copy")
    add("--verify", choices=("quick", "full"), default="quick")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.addresses import is_remote, without_password
    from salientpp.cli.progress import shown_progress
    from salientpp.ranks.placement import parts_of
    from salientpp.store.directory.copy_source import copy_source_of
    from salientpp.store.directory.local_copy import copy_to_disk

    root, parts, files = arguments.root, arguments.part, files_of(arguments, "json")
    if is_remote(arguments.to):
        return _upload(arguments)
    if parts is None:
        launch, num_parts = detect(), copy_source_of(root).manifest()[0]["num_parts"]
        if launch.launcher == "none" and num_parts > 1:
            raise ValueError(
                f"{without_password(root)} has {num_parts} parts, and this process is not a rank of a job, so the part to copy is unknown; "
                "start it with `srun salientpp copy-to-disk ...`, or name parts with --part"
            )
        parts = parts_of(launch.rank, launch.world_size, num_parts)
    with shown_progress() as progress:
        copy = copy_to_disk(root, arguments.to, parts=parts, verify=arguments.verify, progress=progress)
    if files:
        from salientpp.cli.description import as_json
        from salientpp.store.directory.manifest import read_manifest

        contents = {"json": lambda: as_json(copy, read_manifest(copy), parts=[*parts])}
        terminal.finish(files, contents, arguments.written, list)
    terminal.print_whole(os.fsencode(f"{copy}\n"))  # bytes as on disk, for scripts that read the path
    return 0


def _upload(arguments: argparse.Namespace) -> int:
    from salientpp.addresses import without_password
    from salientpp.cli.progress import shown_progress
    from salientpp.store.directory.upload import upload

    if given := [name for name in ("part", "json") if getattr(arguments, name) is not None]:
        raise ValueError(f"--{given[0]} is not for a copy at an address, which is always whole; leave it out")
    with shown_progress() as progress:
        copy = upload(arguments.root, arguments.to, verify=arguments.verify, progress=progress)
    terminal.print_whole(os.fsencode(f"{without_password(copy)}\n"))
    return 0
