"""Arguments that several subcommands take, and the forms of values that they accept."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

METHODS = (
    "what assigns vertices to parts: metis, kaminpar (an extra), random, or auto (default): kaminpar for more than 2^26 edges where it is installed, else "
    "metis; given (the assignment of pyg-partition: or glt-partition:, their default); an .npy file of part ids; or the .json of DGL's partition_graph, with "
    ",original_id=FILE.npy where DGL has numbered the vertices of your data anew"
)
DATASETS = (
    "synthetic[:num_vertices=N,...], synthetic-mag[:num_papers=P,...] (several types), npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save "
    "wrote), python:MODULE:FUNCTION (a function of yours that returns one), converted:DIR (what `salientpp convert` wrote), pyg-partition:DIR or "
    "glt-partition:DIR[,y=FILE,train=FILE,...] (what PyG's or GLT's partitioner wrote), or a name of the Open Graph Benchmark"
)


def adder(parser: Any, texts: Mapping[str, str]) -> Callable[..., Any]:
    """``add_argument`` of a parser or a group of it, with the help of each argument from ``texts``."""
    return lambda name, **options: parser.add_argument(name, help=texts[name], **options)


def values_of(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Values that are passed on by the names of their arguments."""
    return {name: getattr(arguments, name) for name in names}


def add_partitioning(parser: argparse.ArgumentParser, more: str = "") -> None:
    """How vertices get their parts."""
    parser.add_argument("--method", metavar="HOW", help=f"{METHODS}{more}")
    parser.add_argument(
        "--edge-weights",
        choices=("vip", "equal"),
        default="vip",
        help="what metis and kaminpar minimise: the draws across the cut, or the number of edges cut (vip)",
    )
    parser.add_argument(
        "--refine",
        action=argparse.BooleanOptionalAction,
        help="move vertices while fewer rows are predicted to travel (done for parts of metis and kaminpar, of one type of vertices and at most 2^26 edges)",
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="where OGB datasets are (data)")


def add_seed(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"of {what} (0)")


def _list_of(kind: Callable[[str], Any], words: str, text: str) -> list[Any]:
    try:
        return [kind(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}") from None


num_neighbors_of = partial(_list_of, int, "integers separated by commas such as 15,10,5")
numbers_of = partial(_list_of, float, "numbers separated by commas such as 0,.1,.5")


def format_of_attribute(text: str) -> tuple[str | tuple[str, str], str]:
    """An attribute, or (type, attribute), and a format."""
    name, equals, format = text.rpartition("=")
    if not equals or not name or not format:
        raise argparse.ArgumentTypeError(f"expected an attribute and a format such as x=int8, got {text!r}")
    type_, colon, attribute = name.rpartition(":")
    return ((type_, attribute) if colon else name), format
