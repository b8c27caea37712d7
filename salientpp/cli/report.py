"""``salientpp report``: explains a run, from the records of all ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json

NEEDS_TORCH = False
HELP = "say what made an epoch slow, and what would change it"
EXAMPLE = "salientpp report DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads the records that loaders wrote under SALIENTPP_TRACE_DIR=DIR. Names the rank and the part of an epoch that made it "
        "slow, the option that would change it, and the expected gain. Writes a page with all numbers, which works offline."
    )
    parser.add_argument("folder", type=Path, help="directory with the records of all ranks")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="page to write (default: report.html)"
    )
    parser.add_argument(
        "--epoch", type=int, metavar="N", help="epoch to explain (default: the last that all ranks have finished)"
    )
    parser.add_argument(
        "--loader",
        type=int,
        metavar="N",
        help="number of the loader in its process (default: the one that took most time)",
    )
    parser.add_argument(
        "--batches", type=_range, metavar="A:B", help="batches of the timeline (default: as many around the median batch as a page can hold)"
    )  # fmt: skip
    add_json(parser, "the numbers of the page")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.report.page import check_charts
    from salientpp.report.read import read_run
    from salientpp.report.run_page import numbers_of, run_page, words

    files = {"out": arguments.out} | ({} if arguments.json is None else {"json": arguments.json})
    terminal.check_outputs({f"--{name}": path for name, path in files.items()})
    check_charts()
    numbers = numbers_of(read_run(arguments.folder, arguments.loader), arguments.epoch, arguments.batches)
    contents: dict[str, Callable[[], bytes]] = {
        "out": lambda: run_page(numbers),
        "json": lambda: (json.dumps(numbers, indent=1) + "\n").encode(),
    }

    def shown() -> list[Any]:
        return [*words(numbers), f"{arguments.out} shows all numbers."]

    terminal.finish(files, contents, arguments.written, shown)
    return 0


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return int(first), int(last)
    raise argparse.ArgumentTypeError(f"expected the first and the last batch such as 100:110, got {text!r}")
