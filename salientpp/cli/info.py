"""``salientpp info``: describes a dataset directory and checks its files."""

from __future__ import annotations

import argparse
from pathlib import Path

from salientpp.cli import terminal

HELP = "describe a dataset directory and check its files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Describe a dataset directory and check its files."
    parser.add_argument("root", type=Path, help="dataset directory that `salientpp partition` wrote")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every byte with its checksum, instead of sizes and sampled checksums",
    )


def run(arguments: argparse.Namespace) -> int:
    from salientpp.cli.description import describe
    from salientpp.store.directory.load import load

    part = load(arguments.root, verify="full" if arguments.verify else "quick")
    terminal.show(
        *describe(part),
        "every byte matches its checksum"
        if arguments.verify
        else "sizes and sampled checksums match; --verify reads all",
    )
    return 0
