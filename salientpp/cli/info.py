"""``salientpp info``: describes a dataset directory and checks its files."""

from __future__ import annotations

import argparse
from typing import Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json, directory_of, files_of

HELP = "describe a dataset directory or a converted graph, and check its files"
EXAMPLE = "salientpp info DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Describe a dataset directory or a converted graph, and check its files."
    parser.add_argument(
        "root",
        type=directory_of,
        help="dataset directory that `salientpp partition` wrote, or output of `salientpp convert`",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every byte with its checksum, instead of sizes and sampled checksums",
    )
    add_json(parser, "the description")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import as_json, describe, describe_converted
    from salientpp.cli.progress import shown_progress
    from salientpp.datasets.converted.directory import load_converted, read_converted
    from salientpp.store.directory.kinds import is_converted
    from salientpp.store.directory.load import load

    files, shown = files_of(arguments, "json"), list[Any]()
    with shown_progress(lines=False) as progress:
        progress.begin("checking files")
        if is_converted(arguments.root):
            load_converted(arguments.root, verify=arguments.verify)
            manifest = read_converted(arguments.root)
            shown.append(describe_converted(arguments.root))
        else:
            part = load(arguments.root, verify="full" if arguments.verify else "quick")
            manifest, shown = part.manifest, describe(part)
    read = "every byte matches its checksum"
    shown.append(read if arguments.verify else "sizes and sampled checksums match; --verify reads all")
    terminal.finish(files, {"json": lambda: as_json(arguments.root, manifest)}, arguments.written, lambda: shown)
    return 0
