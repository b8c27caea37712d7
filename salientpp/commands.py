"""The subcommands of ``salientpp`` that work on graphs, behind :mod:`salientpp.cli`, which parses their arguments.

Each is a function of the name of the subcommand, from parsed arguments to an exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from salientpp import terminal
from salientpp.analysis import report
from salientpp.analysis.volume import DEFAULT_POLICIES, check_request
from salientpp.analysis.volume import analyze as analyze_graph
from salientpp.datasets import load_dataset
from salientpp.files import write_whole
from salientpp.launch.environment import detect
from salientpp.plan.placement import parts_of
from salientpp.plan.vip import check_fanouts
from salientpp.store.directory.local_copy import stage as copy_parts
from salientpp.store.directory.manifest import parts_there
from salientpp.store.directory.opened import PartitionedGraph, load
from salientpp.store.directory.writer import partition as partition_graph


def partition(arguments: argparse.Namespace) -> int:
    """``salientpp partition``."""
    console = Console(stderr=True)
    if arguments.root.exists() and not arguments.overwrite:
        raise ValueError(f"{arguments.root} exists; pass --overwrite to replace it, or choose another directory")
    check_fanouts(arguments.fanouts)
    method = _method(arguments.partition)
    started = time.perf_counter()
    with console.status("") as status:

        def on_step(step: str) -> None:
            terminal.complain(f"{time.perf_counter() - started:7.1f} s  {step}")
            status.update(Text(terminal.printable(step)))

        on_step(f"loading {arguments.dataset}")
        data = load_dataset(arguments.dataset, root=arguments.data)
        part = partition_graph(
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
        arguments.written.append(arguments.root)
        on_step("done")
    terminal.show(*_description(part))
    return 0


def analyze(arguments: argparse.Namespace) -> int:
    """``salientpp analyze``."""
    # Whatever can be wrong is said before the minutes of work.
    files = {option: path for option in ("json", "csv", "plot") if (path := getattr(arguments, option)) is not None}
    terminal.check_outputs({f"--{option}": path for option, path in files.items()})
    if arguments.plot is not None:
        if arguments.plot.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"--plot must end in .png or .svg, got {arguments.plot}")
        report.check_matplotlib()
    method = _method(arguments.partition)
    is_directory = (Path(arguments.dataset) / "manifest.json").is_file()
    if arguments.parts is None and not is_directory:
        raise ValueError(f"--parts is needed: {arguments.dataset} is not a dataset directory, which knows its own")
    policies = list(DEFAULT_POLICIES) if arguments.policies is None else arguments.policies
    check_request(
        arguments.fanouts or [[1]],
        1 if arguments.batch_size is None else arguments.batch_size,
        arguments.replication_factors,
        policies,
        arguments.epochs,
        arguments.predict_only,
    )
    screen = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as progress:
        bar = progress.add_task("")

        def track(what: str, total: int) -> Callable[[], None]:
            progress.reset(bar, description=what, total=max(1, total))
            return lambda: progress.advance(bar)

        track("loading", 1)
        analysis = analyze_graph(
            # No name for it here: the analysis frees what it does not need.
            load(arguments.dataset) if is_directory else load_dataset(arguments.dataset, root=arguments.data),
            arguments.parts,
            name=arguments.dataset,
            method=method,
            fanouts=arguments.fanouts,
            batch_size=arguments.batch_size,
            replication_factors=arguments.replication_factors,
            policies=policies,
            epochs=arguments.epochs,
            seeds=arguments.seeds,
            seed=arguments.seed,
            predict_only=arguments.predict_only,
            track=track,
        )
    write = {
        "json": lambda path: write_whole(
            path, lambda file: file.write((json.dumps(analysis.to_dict(), indent=1) + "\n").encode())
        ),
        "csv": lambda path: write_whole(path, lambda file: file.write(report.csv_text(analysis).encode())),
        "plot": lambda path: report.plot(analysis, path),
    }
    failed = []
    for option, path in files.items():
        try:
            write[option](path)
            arguments.written.append(path)
        except OSError as error:
            failed.append(f"--{option}: {error}")
    lines: list[RenderableType] = [
        f"{analysis.num_vertices:,} vertices, {analysis.num_edges:,} edges, edge cut {analysis.edge_cut_fraction:.1%}, "
        f"{analysis.row_bytes:,} bytes per row"
    ]
    for fanouts in dict.fromkeys(volume.fanouts for volume in analysis.results):
        lines += [report.volume_table(analysis, fanouts), report.device_table(analysis, fanouts)]
    if len(analysis.recommendations) > 1:
        lines.append(report.mean_table(analysis))
    lines += map(str, analysis.recommendations)
    try:
        terminal.show(*lines)
    except OSError as error:
        failed.append(str(error))
    if failed:
        raise OSError("; ".join(failed))
    return 0


def info(arguments: argparse.Namespace) -> int:
    """``salientpp info``."""
    part = load(arguments.root, verify="full" if arguments.verify else "quick")
    terminal.show(
        *_description(part),
        "every byte matches its checksum"
        if arguments.verify
        else "sizes and sampled checksums match; --verify reads all",
    )
    return 0


def stage(arguments: argparse.Namespace) -> int:
    """``salientpp stage``."""
    root, parts = arguments.root, arguments.part
    if parts is None:
        launch, num_parts = detect(), load(root).num_parts
        if launch.launcher == "none" and num_parts > 1:
            raise ValueError(
                f"{root} has {num_parts} parts, and this process is no rank of a job, which would say which of them to copy; "
                "start it with `srun salientpp stage ...`, or name them with --part"
            )
        parts = parts_of(launch.rank, launch.world_size, num_parts)
    copy = copy_parts(root, arguments.to, parts=parts, on_step=lambda step: terminal.complain(f"copying {step}"))
    terminal.print_whole(os.fsencode(f"{copy}\n"))  # as it is on disk, for a script that reads it
    return 0


def _method(text: str) -> str | torch.Tensor:
    """--partition: a method's name, or the assignment in a file."""
    if text in ("metis", "metis-vip", "random"):
        return text
    try:
        if Path(text).exists() and not Path(text).is_file():
            raise ValueError("not a file")  # a pipe would be waited for
        array = np.load(text, allow_pickle=False)
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except Exception as error:  # what a damaged file makes numpy raise is not documented
        raise ValueError(
            f"--partition must be metis, metis-vip, random or an .npy file of part ids, got {text} ({error})"
        ) from None


def _description(part: PartitionedGraph) -> list[RenderableType]:
    manifest = part.manifest
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    workload, quality = manifest["workload"], manifest["quality"]
    attributes = [
        f"{name} {entry['dtype']} {entry['row_shape']}" if entry["row_shape"] else f"{name} {entry['dtype']}"
        for kind in ("node_attributes", "edge_attributes")
        for name, entry in manifest[kind].items()
    ]
    there = parts_there(part.root)
    facts = [
        ("directory", f"{part.root}, {total / 1e6:,.1f} MB, format version {manifest['version']}"),
        *(
            []
            if there is None
            else [
                (
                    "copy with",
                    f"part {', '.join(map(str, sorted(there)))} of {part.num_parts}; the figures are of the whole",
                )
            ]
        ),
        ("graph", f"{manifest['num_vertices']:,} vertices, {manifest['num_edges']:,} edges"),
        ("attributes", ", ".join(attributes) or "none"),
        (
            "ordered for",
            f"fanouts {workload['num_neighbors']}, batch size {workload['batch_size']}, seeds {workload['seeds']!r}",
        ),
        ("edge cut", f"{quality['edge_cut']:,} edges, {quality['edge_cut_fraction']:.1%}"),
        ("largest part / mean", ", ".join(f"{name} {ratio:.3f}" for name, ratio in quality["balance"].items())),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(name, terminal.printable(value))
    table = Table("part", "vertices", *manifest["splits"])
    for column in table.columns:
        column.justify = "right"
    for part_id in range(part.num_parts):
        counts = [counts[part_id] for counts in manifest["splits"].values()]
        table.add_row(str(part_id), *(f"{count:,}" for count in [part.book.size_of(part_id), *counts]))
    return [grid, table]
