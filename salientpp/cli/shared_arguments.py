"""Arguments that several subcommands take, and parsers of their values."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from salientpp.addresses import without_password
from salientpp.cli import terminal

METHODS = (
    "assignment of vertices to parts: metis, kaminpar (in the extra salientpp[kaminpar]), random, "
    "or auto (kaminpar for more than 2^26 edges if it is installed, else metis). "
    "given takes the assignment of pyg-partition: or glt-partition:. A file also works: an .npy file of part ids, or the .json file of DGL's "
    "partition_graph, followed by ,original_id=FILE.npy if DGL renumbered the vertices of your data"
)
DEFAULT_METHOD = "(default: auto; given for pyg-partition: and glt-partition:)"
DATASETS = (
    "synthetic[:num_vertices=N,...], synthetic-mag[:num_papers=P,...] (several vertex types), npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save "
    "wrote), python:MODULE:FUNCTION (your function that returns one), converted:DIR (output of `salientpp convert`), pyg-partition:DIR or "
    "glt-partition:DIR[,y=FILE,train=FILE,...] (output of PyG's or GLT's partitioner), or a name of the Open Graph Benchmark"
)


def adder(parser: Any, texts: Mapping[str, str]) -> Callable[..., Any]:
    """Returns a function that adds an argument to ``parser``, or to a group of its arguments. ``texts`` has the help of each argument by its name."""
    return lambda name, *names, **options: parser.add_argument(name, *names, help=texts[name], **options)


def values_of(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the values of these arguments, by name."""
    return {name: getattr(arguments, name) for name in names}


def add_partitioning(parser: Any, more: str = "") -> None:
    """Adds the arguments that say how vertices are assigned to parts; ``more`` is appended to the help of the method."""
    parser.add_argument("--method", metavar="HOW", help=f"{METHODS}{more} {DEFAULT_METHOD}")
    parser.add_argument(
        "--edge-weights",
        choices=("vip", "equal"),
        default="vip",
        help="minimise the expected draws across the cut (vip), or the number of cut edges (equal); for metis and kaminpar (default: vip)",
    )
    parser.add_argument(
        "--refine",
        action=argparse.BooleanOptionalAction,
        help="move vertices between parts while the predicted number of fetched rows falls (default: yes for metis and kaminpar, one vertex type and at "
        "most 2^26 edges)",
    )


def add_json(parser: Any, what: str) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write {what} to this file")


def files_of(arguments: argparse.Namespace, *options: str) -> dict[str, Path]:
    """Returns the files of these options that were given, by the name of the option.

    Raises:
        ValueError: a file cannot be written.
        ImportError: a package that draws a plot or a page is missing.
    """
    files = {option: path for option in options if (path := getattr(arguments, option)) is not None}
    terminal.check_outputs({f"--{option}": path for option, path in files.items()})
    if "plot" in files:
        from salientpp.analysis.report import check_plot

        check_plot(files["plot"])
    if "html" in files:
        from salientpp.report.page import check_charts

        check_charts()
    return files


def directory_of(text: str) -> Path:
    """Returns ``text`` as the path of a directory. It may also be the name of a converted graph, ``converted:DIR``."""
    if "://" in text:
        shown = without_password(text)
        raise argparse.ArgumentTypeError(
            f"expected a directory on a disk, got {shown!r}; copy it first: salientpp copy-to-disk {shlex.quote(shown)} --to DIR"
        )
    kind, _, path = text.partition(":")
    return Path(path) if kind == "converted" and path and not Path(text).exists() else Path(text)


def add_data(parser: Any) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path("data"), metavar="DIR", help="directory of OGB datasets (default: data)"
    )


def add_seed(parser: Any, what: str) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"{what} (default: 0)")


def _list_of(kind: Callable[[str], Any], words: str, text: str) -> list[Any]:
    try:
        return [kind(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}") from None


num_neighbors_of = partial(_list_of, int, "integers separated by commas such as 15,10,5")
whole_numbers_of = partial(_list_of, int, "integers separated by commas such as 2,4,8")
numbers_of = partial(_list_of, float, "numbers separated by commas such as 0,.1,.5")


def format_of_attribute(text: str) -> tuple[str | tuple[str | tuple[str, ...], str], str]:
    """Parses the format to store or send an attribute in. Returns the attribute, or (type, attribute), and the format. Edge types: author,writes,paper."""
    name, equals, format = text.rpartition("=")
    if not equals or not name or not format:
        raise argparse.ArgumentTypeError(f"expected an attribute and a format such as x=int8, got {text!r}")
    type_, colon, attribute = name.rpartition(":")
    words = tuple(type_.split(","))
    return ((words if len(words) == 3 else type_, attribute) if colon else name), format


def typed_seeds_of(text: str, stored: tuple[Any, str]) -> tuple[Any, str]:
    """Returns the vertex type and the split that TYPE:SPLIT, SPLIT or ``TYPE:`` names. If the text lacks one of them, ``stored`` gives it."""
    type_, colon, split = text.rpartition(":")
    return type_ if colon else stored[0], split or stored[1]
