"""The ``salientpp`` command: a thin face over the package.

Every subcommand is a function from parsed arguments to an exit code. Users' mistakes end in one line on stderr and exit
code 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from salientpp.datasets import load_dataset
from salientpp.store.dataset_dir import PartitionedGraph, load, partition


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"salientpp {parsed.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="salientpp", description="Train graph neural networks on graphs that outgrow one machine: offline tools."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cut = commands.add_parser(
        "partition",
        help="partition a graph and write a dataset directory",
        description="Partition a graph, order each part by vertex inclusion probability (VIP), write a dataset directory.",
    )
    cut.add_argument(
        "dataset",
        help="synthetic[:num_vertices=N,...], npz:FILE, or a name of the Open Graph Benchmark such as ogbn-products",
    )
    cut.add_argument("root", type=Path, help="the directory to write")
    cut.add_argument("--parts", type=int, required=True, metavar="K", help="number of parts, one per rank or machine")
    cut.add_argument(
        "--partition", default="metis", metavar="HOW", help="metis (default), random, or an .npy file of part ids [N]"
    )
    cut.add_argument(
        "--fanouts",
        type=_fanouts,
        default=[15, 10, 5],
        metavar="F,F,...",
        help="neighbours per hop, -1 for all, then with an equals sign: --fanouts=-1,10 (15,10,5)",
    )
    cut.add_argument("--batch-size", type=int, default=1024, metavar="B", help="seeds per batch and rank (1024)")
    cut.add_argument("--tolerance", type=float, default=0.05, help="allowed excess of a part over the mean (0.05)")
    cut.add_argument("--seed", type=int, default=0, help="of METIS or of the random assignment (0)")
    cut.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="where OGB datasets are (data)")
    cut.add_argument("--overwrite", action="store_true", help="replace an existing dataset directory")
    cut.set_defaults(run=_partition)

    info = commands.add_parser(
        "info", help="describe a dataset directory", description="Describe a dataset directory and check its files."
    )
    info.add_argument("root", type=Path, help="a directory that `salientpp partition` wrote")
    info.add_argument("--verify", action="store_true", help="read every byte, not only sizes and sampled checksums")
    info.set_defaults(run=_info)
    return parser


def _fanouts(text: str) -> list[int]:
    try:
        return [int(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas such as 15,10,5, got {text!r}") from None


def _partition(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True, markup=False, emoji=False)  # users' paths may have brackets and colons
    method: str | torch.Tensor = arguments.partition
    if method not in ("metis", "random"):
        try:
            method = torch.from_numpy(np.load(arguments.partition, allow_pickle=False))
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"--partition must be metis, random or an .npy file of part ids, got {arguments.partition} ({error})") from None
    started = time.perf_counter()
    with console.status("") as status:

        def on_step(step: str) -> None:
            console.print(f"{time.perf_counter() - started:7.1f} s  {step}", highlight=False)
            status.update(Text(step))

        on_step(f"loading {arguments.dataset}")
        data = load_dataset(arguments.dataset, root=arguments.data)
        part = partition(
            data,
            arguments.parts,
            arguments.root,
            arguments.fanouts,
            arguments.batch_size,
            method=method,
            tolerance=arguments.tolerance,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
            on_step=on_step,
        )
        on_step("done")
    _print_description(part)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    part = load(arguments.root, verify="full" if arguments.verify else "quick")
    _print_description(part)
    print("every byte matches its checksum" if arguments.verify else "sizes and sampled checksums match; --verify reads all")
    return 0


def _print_description(part: PartitionedGraph) -> None:
    console = Console(markup=False, emoji=False)
    manifest = part.manifest
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    workload, quality = manifest["workload"], manifest["quality"]
    attributes = [
        f"{name} {entry['dtype']} {entry['row_shape']}" if entry["row_shape"] else f"{name} {entry['dtype']}"
        for kind in ("node_attributes", "edge_attributes")
        for name, entry in manifest[kind].items()
    ]
    facts = [
        ("directory", f"{part.root}, {total / 1e6:,.1f} MB, format version {manifest['version']}"),
        ("graph", f"{manifest['num_vertices']:,} vertices, {manifest['num_edges']:,} edges"),
        ("attributes", ", ".join(attributes) or "none"),
        ("ordered for", f"fanouts {workload['num_neighbors']}, batch size {workload['batch_size']}, seeds {workload['seeds']!r}"),
        ("edge cut", f"{quality['edge_cut']:,} edges, {quality['edge_cut_fraction']:.1%}"),
        ("largest part / mean", ", ".join(f"{name} {ratio:.3f}" for name, ratio in quality["balance"].items())),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(name, value)
    console.print(grid, highlight=False)
    table = Table("part", "vertices", *manifest["splits"])
    for column in table.columns:
        column.justify = "right"
    for part_id in range(part.num_parts):
        counts = [counts[part_id] for counts in manifest["splits"].values()]
        table.add_row(str(part_id), *(f"{count:,}" for count in [part.book.size_of(part_id), *counts]))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
