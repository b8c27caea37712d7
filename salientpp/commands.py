"""The subcommands of ``salientpp`` that work on graphs, behind :mod:`salientpp.cli`, which parses their arguments.

Each is a function of the name of the subcommand, from parsed arguments to an exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

from salientpp import terminal
from salientpp.analysis import report
from salientpp.analysis.host_volume import HostAnalysis, analyze_hosts
from salientpp.analysis.typed_volume import TypedAnalysis, analyze_typed, typed_csv, typed_table
from salientpp.analysis.volume import DEFAULT_POLICIES, Track, check_request
from salientpp.analysis.volume import Draws as DrawsThatAgree
from salientpp.analysis.volume import analyze as analyze_graph
from salientpp.datasets import convert as convert_graph
from salientpp.datasets import generate as generate_graph
from salientpp.datasets import load_dataset, load_dgl_assignment
from salientpp.datasets.converted.convert import Track as StepTrack
from salientpp.datasets.converted.directory import read_converted
from salientpp.datasets.load import is_partition, load_given
from salientpp.files import write_whole
from salientpp.launch.environment import detect
from salientpp.partitioning.options import METHODS
from salientpp.ranks.placement import parts_of
from salientpp.store.directory.description import VertexType
from salientpp.store.directory.local_copy import stage as copy_parts
from salientpp.store.directory.manifest import parts_there
from salientpp.store.directory.opened import PartitionedGraph, load
from salientpp.store.directory.writer import partition as partition_graph
from salientpp.vip.inclusion import check_fanouts


def partition(arguments: argparse.Namespace) -> int:
    """``salientpp partition``."""
    console = Console(stderr=True)
    if arguments.root.exists() and not arguments.overwrite:
        raise ValueError(f"{arguments.root} exists; pass --overwrite to replace it, or choose another directory")
    check_fanouts(arguments.fanouts)
    if arguments.replicate and arguments.replicate_none:
        raise ValueError("--replicate and --replicate-none contradict each other; leave one out")
    method: Any = _method(arguments.method, arguments.dataset)
    started = time.perf_counter()
    with _warnings_in_lines("partition"), console.status("") as status:

        def on_step(step: str) -> None:
            terminal.complain(f"{time.perf_counter() - started:7.1f} s  {step}")
            status.update(Text(terminal.printable(step)))

        on_step(f"loading {arguments.dataset}")
        data, method = _graph(arguments, method)
        part = partition_graph(
            data,
            arguments.parts,
            arguments.root,
            arguments.fanouts,
            arguments.batch_size,
            method=method,
            edge_weights=arguments.edge_weights,
            order=arguments.order,
            refine=arguments.refine,
            seeds=arguments.seeds,
            replicate=() if arguments.replicate_none else arguments.replicate,
            time_attr=arguments.time_attr,
            store_as=_formats(arguments.store_as),
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
    with _warnings_in_lines("analyze"):
        return _analyze(arguments)


def _analyze(arguments: argparse.Namespace) -> int:
    # Whatever can be wrong is said before the minutes of work.
    files = {option: path for option in ("json", "csv", "plot") if (path := getattr(arguments, option)) is not None}
    terminal.check_outputs({f"--{option}": path for option, path in files.items()})
    if arguments.plot is not None:
        if arguments.plot.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"--plot must end in .png or .svg, got {arguments.plot}")
        report.check_matplotlib()
    method: Any = _method(arguments.method, arguments.dataset)
    is_directory = (Path(arguments.dataset) / "manifest.json").is_file()
    if arguments.parts is None and not is_directory:
        raise ValueError(f"--parts is needed: {arguments.dataset} is not a dataset directory, which knows its own")
    draws = DrawsThatAgree(
        arguments.shared_draws, 1 if arguments.draw_block is None else arguments.draw_block, arguments.lookahead
    ).checked()
    agreeing = _agreeing(arguments)
    if agreeing and (_hosts(arguments) or _draws(arguments)):
        raise ValueError(
            f"{', '.join(agreeing)}: counted for plain draws and a rank per machine; leave out {', '.join([*_hosts(arguments), *_draws(arguments)])}"
        )
    track_on = _progress()
    if _hosts(arguments):
        with track_on as track:
            counted_hosts = _analyze_hosts(arguments, method, is_directory, track)
        return _show_analysis(
            arguments,
            files,
            {
                "json": lambda path: _write_json(path, counted_hosts.to_dict()),
                "csv": lambda path: write_whole(path, lambda file: file.write(counted_hosts.to_csv().encode())),
            },
            [report.host_table(counted_hosts)],
        )
    if is_directory:
        part = load(arguments.dataset)
        if part.is_hetero and agreeing:
            raise ValueError(
                f"{', '.join(agreeing)}: counted for one type of vertices, and {arguments.dataset} has several; leave it out, and see what a loader with it "
                "fetches: loader.stats().by_type after an epoch, on as many ranks as there are parts, which may all be on this machine"
            )
        if part.is_hetero or _draws(arguments):
            with track_on as track:
                counted = _analyze_typed(arguments, part, track)
            return _show_analysis(
                arguments,
                files,
                {
                    "json": lambda path: _write_json(path, counted.to_dict()),
                    "csv": lambda path: write_whole(path, lambda file: file.write(typed_csv(counted).encode())),
                },
                [typed_table(counted)],
            )
    elif _draws(arguments):
        raise ValueError(
            f"{', '.join(_draws(arguments))}: such batches are counted on a dataset directory; write one with `salientpp partition` first"
        )
    policies = list(DEFAULT_POLICIES) if arguments.policies is None else arguments.policies
    check_request(
        arguments.fanouts or [[1]],
        1 if arguments.batch_size is None else arguments.batch_size,
        arguments.replication_factors,
        policies,
        arguments.epochs,
        arguments.predict_only,
    )
    with track_on as track:
        graph: list[Any] = [load(arguments.dataset), "auto"] if is_directory else _homogeneous(arguments, method)
        analysis = analyze_graph(
            # No name for it here: the analysis frees what it does not need.
            graph.pop(0),
            arguments.parts,
            name=arguments.dataset,
            method=graph.pop(),
            edge_weights=arguments.edge_weights,
            refine=arguments.refine,
            fanouts=arguments.fanouts,
            batch_size=arguments.batch_size,
            replication_factors=arguments.replication_factors,
            policies=policies,
            epochs=arguments.epochs,
            seeds=arguments.seeds,
            seed=arguments.seed,
            predict_only=arguments.predict_only,
            shared_draws=draws.shared_draws,
            draw_block=draws.draw_block,
            lookahead=draws.lookahead,
            send_as=_formats(arguments.send_as),
            partial=bool(arguments.partial),
            track=track,
        )
    lines: list[RenderableType] = [
        f"{analysis.num_vertices:,} vertices, {analysis.num_edges:,} edges, edge cut {analysis.edge_cut_fraction:.1%}, "
        f"{analysis.row_bytes:,} bytes per row" + (f" sent as {analysis.send_as}" if analysis.send_as else "")
    ]
    for fanouts in dict.fromkeys(volume.fanouts for volume in analysis.results):
        lines += [
            report.volume_table(analysis, fanouts),
            report.lookahead_table(analysis, fanouts),
            *([report.partial_table(analysis, fanouts)] if analysis.partial else []),
            report.device_table(analysis, fanouts),
            *([report.partial_copies_table(analysis, fanouts)] if analysis.partial else []),
        ]
    if len(analysis.recommendations) > 1:
        lines.append(report.mean_table(analysis))
    lines += map(str, analysis.recommendations)
    lines += report.lookahead_advice(analysis)
    lines += report.partial_advice(analysis)
    write = {
        "json": lambda path: _write_json(path, analysis.to_dict()),
        "csv": lambda path: write_whole(path, lambda file: file.write(report.csv_text(analysis).encode())),
        "plot": lambda path: report.plot(analysis, path),
    }
    return _show_analysis(arguments, files, write, lines)


@contextlib.contextmanager
def _warnings_in_lines(command: str) -> Iterator[None]:
    """Show each warning as one line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: terminal.complain(f"salientpp {command}: {message}")
        yield


@contextlib.contextmanager
def _progress() -> Iterator[Track]:
    """A bar on the screen, and what starts it anew for every step."""
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
        yield track


def _write_json(path: Path, figures: dict[str, Any]) -> None:
    write_whole(path, lambda file: file.write((json.dumps(figures, indent=1) + "\n").encode()))


def _show_analysis(
    arguments: argparse.Namespace,
    files: Mapping[str, Path],
    write: Mapping[str, Callable[[Path], None]],
    lines: Sequence[RenderableType],
) -> int:
    """Write what was asked for, and show the rest; what fails keeps nothing else from being written."""
    failed = []
    for option, path in files.items():
        try:
            write[option](path)
            arguments.written.append(path)
        except OSError as error:
            failed.append(f"--{option}: {error}")
    try:
        terminal.show(*lines)
    except OSError as error:
        failed.append(str(error))
    if failed:
        raise OSError("; ".join(failed))
    return 0


def _graph(arguments: argparse.Namespace, method: Any) -> list[Any]:
    """The graph, and the method or the assignment."""
    if method is None:
        return [*load_given(arguments.dataset, arguments.parts)]
    return [load_dataset(arguments.dataset, root=arguments.data), method]


def _homogeneous(arguments: argparse.Namespace, method: Any) -> list[Any]:
    graph = _graph(arguments, method)
    if isinstance(graph[0], HeteroData):
        raise ValueError(
            f"{arguments.dataset} has several types of vertices, whose rows are counted on a dataset directory; write one with "
            "`salientpp partition` first"
        )
    return graph


def _draws(arguments: argparse.Namespace) -> list[str]:
    """The options that were given of those that say how to draw."""
    names = ("link", "negatives", "time_attr", "edge_label_time", "last", "weight_attr", "disjoint", "replace")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) not in (None, False)]


def _agreeing(arguments: argparse.Namespace) -> list[str]:
    """The options that were given of those about batches that are known, draws that agree, and sums."""
    names = ("lookahead", "shared_draws", "draw_block", "partial")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


def _formats(given: Sequence[tuple[Any, str]] | None) -> dict[Any, str] | None:
    """Attributes to the formats that --store-as or --send-as name."""
    return dict(given) if given else None


def _hosts(arguments: argparse.Namespace) -> list[str]:
    """The options that were given of those about hosts."""
    names = ("ranks_per_host", "ranks_per_part", "parts_per_rank")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


def _analyze_hosts(arguments: argparse.Namespace, method: Any, is_directory: bool, track: Track) -> HostAnalysis:
    given = " and ".join(_hosts(arguments))
    if _draws(arguments):
        raise ValueError(
            f"{given}: counted for plain draws from one type of vertices; leave out {', '.join(_draws(arguments))}"
        )
    if arguments.plot is not None:
        raise ValueError(f"{given}: there is no --plot of this; --json and --csv have all figures")
    if arguments.policies not in (None, ["vip"]):
        raise ValueError(f"{given}: counted for --policies vip alone, got {','.join(arguments.policies)}")
    if len(arguments.fanouts or ()) > 1:
        raise ValueError(f"{given}: --fanouts must be given once, got {len(arguments.fanouts)} lists")
    for option in _hosts(arguments):
        value = getattr(arguments, option[2:].replace("-", "_"))
        if value < 1:
            raise ValueError(f"{option} must be >= 1, got {value}")
    per_part, per_rank = arguments.ranks_per_part or 1, arguments.parts_per_rank or 1
    if per_part > 1 and per_rank > 1:
        raise ValueError(
            f"either several ranks share a part or a rank has several, got --ranks-per-part {per_part} and --parts-per-rank {per_rank}"
        )
    graph: list[Any] = [load(arguments.dataset), "auto"] if is_directory else _homogeneous(arguments, method)
    num_parts = graph[0].num_parts if is_directory else arguments.parts
    return analyze_hosts(
        graph.pop(0),
        arguments.parts,
        ranks=num_parts * per_part if per_part > 1 else -(-num_parts // per_rank),
        ranks_per_host=arguments.ranks_per_host or 1,
        name=arguments.dataset,
        method=graph.pop(),
        edge_weights=arguments.edge_weights,
        refine=arguments.refine,
        fanouts=arguments.fanouts[0] if arguments.fanouts else None,
        batch_size=arguments.batch_size,
        replication_factors=arguments.replication_factors,
        epochs=arguments.epochs,
        seeds=arguments.seeds,
        seed=arguments.seed,
        predict_only=arguments.predict_only,
        send_as=_formats(arguments.send_as),
        track=track,
    )


def _analyze_typed(arguments: argparse.Namespace, part: PartitionedGraph, track: Track) -> TypedAnalysis:
    if arguments.plot is not None:
        raise ValueError(
            "--plot draws uniform draws from one type of vertices; leave it out, --json and --csv have all figures"
        )
    if len(arguments.fanouts or ()) > 1:
        raise ValueError(f"--fanouts must be given once for such batches, got {len(arguments.fanouts)} lists")
    is_link = arguments.link is not None
    if not is_link and (arguments.negatives or arguments.edge_label_time):
        raise ValueError("--negatives and --edge-label-time belong to --link; pass it too")
    stored = part.description
    type_, colon, split = (arguments.seeds or "").rpartition(":")
    seeds: Any
    if is_link:
        edge_type = tuple(arguments.link.split(",")) if arguments.link else None
        seeds = split or "all" if edge_type is None else (edge_type, split or None)
    elif part.is_hetero:
        seeds = (type_ if colon else stored.seeds[0], split or stored.seeds[1])
    else:
        seeds = split or stored.seeds[1]
    fanouts: Any = arguments.fanouts[0] if arguments.fanouts else dict(zip(part.edge_types, stored.num_neighbors))
    negatives = None
    if arguments.negatives:
        mode, _, amount = arguments.negatives.partition(":")
        try:
            negatives = NegativeSampling(mode, float(amount) if amount else 1)
        except ValueError as error:
            raise ValueError(f"--negatives must be binary or triplet, and an amount after a colon ({error})") from None
    return analyze_typed(
        part,
        fanouts if part.is_hetero or arguments.fanouts else stored.num_neighbors[0],
        name=arguments.dataset,
        batch_size=stored.batch_size if arguments.batch_size is None else arguments.batch_size,
        replication_factors=arguments.replication_factors,
        policies=["vip", "degree", "random", "oracle"] if arguments.policies is None else arguments.policies,
        epochs=arguments.epochs,
        seeds=seeds,
        link=is_link,
        neg_sampling=negatives,
        seed=arguments.seed,
        predict_only=arguments.predict_only,
        send_as=_formats(arguments.send_as),
        track=track,
        time_attr=arguments.time_attr,
        weight_attr=arguments.weight_attr,
        disjoint=arguments.disjoint,
        replace=arguments.replace,
        temporal_strategy="last" if arguments.last else "uniform",
        edge_label_time=arguments.edge_label_time,
    )


def convert(arguments: argparse.Namespace) -> int:
    """``salientpp convert``."""
    if len(dict(arguments.dtype)) != len(arguments.dtype):
        raise ValueError("--dtype names an attribute twice")
    with _warnings_in_lines("convert"), _progress_of_steps() as track:
        convert_graph(
            arguments.source,
            arguments.root,
            memory=arguments.memory,
            undirected=arguments.undirected,
            deduplicate=arguments.deduplicate,
            dtype=dict(arguments.dtype),
            finite=arguments.finite,
            data=arguments.data,
            overwrite=arguments.overwrite,
            track=track,
        )
    _show_converted(arguments.root)
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """``salientpp generate``."""
    names = ("num_vertices", "average_degree", "num_features", "num_classes", "community_size", "homophily", "locality")
    more = ("exponent", "train_fraction", "dtype", "seed", "memory", "overwrite")
    with _progress_of_steps() as track:
        generate_graph(arguments.root, track=track, **{name: getattr(arguments, name) for name in (*names, *more)})
    _show_converted(arguments.root)
    return 0


@contextlib.contextmanager
def _progress_of_steps() -> Iterator[StepTrack]:
    """A bar for every step, with rate and time left, and a line when it begins where stderr is no terminal."""
    screen = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as progress:
        bar = progress.add_task("", rate="")
        started = time.perf_counter()

        def track(step: str, total: int, unit: str) -> Callable[[int], None]:
            begun = time.perf_counter()
            terminal.complain(f"{begun - started:7.1f} s  {step}")
            progress.reset(bar, description=terminal.printable(step), total=max(1, total), rate="")

            def on_done(done: int) -> None:
                seconds = max(1e-9, time.perf_counter() - begun)
                progress.update(bar, completed=done, rate=f"{done / seconds / 1e6:.1f} M {unit}/s")

            return on_done

        yield track


def _show_converted(root: Path) -> None:
    manifest = read_converted(root)
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    grid = Table.grid(padding=(0, 2))
    facts = [("converted graph", f"{root}, {total / 1e6:,.1f} MB; its name as a dataset is converted:{root}")]
    for number, vertices in enumerate(manifest["node_types"]):
        columns = []
        for name in vertices["columns"]:
            entry = manifest["files"][f"n{number}.{name}.npy"]
            shape = entry["shape"][1:]
            columns.append(f"{name} {entry['torch_dtype']}{f' {shape}' if shape else ''}")
        facts.append(
            (
                "vertices" if vertices["name"] is None else f"vertices {vertices['name']}",
                f"{vertices['num_vertices']:,}; {', '.join(columns) or 'no attributes'}",
            )
        )
    for edges in manifest["edge_types"]:
        name = "edges" if edges["name"] is None else f"edges {' '.join(edges['name'])}"
        facts.append((name, f"{edges['num_edges']:,}"))
    for name, value in facts:
        grid.add_row(terminal.printable(name), terminal.printable(value))
    terminal.show(grid)


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


def _method(text: str | None, dataset: str) -> str | torch.Tensor | dict[str, torch.Tensor] | None:
    """--method: a method's name, or the assignment in a file; None: that of the dataset itself."""
    if text is None:
        text = "given" if is_partition(dataset) else "auto"
    if text == "given":
        if not is_partition(dataset):
            raise ValueError(
                f"--method given is for datasets that are partitioned, pyg-partition:DIR and glt-partition:DIR, got {dataset}"
            )
        return None
    if text in METHODS:
        return text
    of_dgl, comma, ids = text.partition(",original_id=")
    if comma or text.endswith(".json"):
        try:
            original_id = _integers(ids) if comma else None
        except Exception as error:
            raise ValueError(f"original_id must be an .npy file of ids, got {ids} ({error})") from None
        return load_dgl_assignment(of_dgl, original_id)[0]
    try:
        return _integers(text)
    except Exception as error:  # what a damaged file makes numpy raise is not documented
        raise ValueError(
            f"--method must be {', '.join(METHODS)}, given or an .npy file of part ids, got {text} ({error})"
        ) from None


def _integers(path: str) -> torch.Tensor:
    """Of an .npy file."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("not a file")  # a pipe would be waited for
    array = np.load(path, allow_pickle=False)
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def _description(part: PartitionedGraph) -> list[RenderableType]:
    described = part.description
    total = sum(entry["bytes"] for entry in part.manifest["files"].values())
    there = parts_there(part.root)
    facts = [("directory", f"{part.root}, {total / 1e6:,.1f} MB, format version {described.version}")]
    if there is not None:
        parts = ", ".join(map(str, sorted(there)))
        facts.append(("copy with", f"part {parts} of {part.num_parts}; the figures are of the whole"))
    facts.append(("graph", f"{part.num_vertices:,} vertices, {part.num_edges:,} edges"))
    if not part.is_hetero:
        columns = [*described.node_types[0].attributes.items(), *described.edge_types[0].attributes.items()]
        facts.append(("attributes", _columns(columns)))
    facts += [
        (f"{'' if type_.name is None else f'{type_.name} '}{name}", _narrower(type_, name))
        for type_ in described.node_types
        for name, entry in type_.attributes.items()
        if "stored_as" in entry
    ]
    if described.time_attr is not None:
        facts.append(("lists ascend by", repr(described.time_attr)))
    facts += [
        ("ordered for", _workload(part)),
        *([] if described.partitioning is None else [("assigned by", _partitioned(described.partitioning))]),
        ("edge cut", f"{described.quality['edge_cut']:,} edges, {described.quality['edge_cut_fraction']:.1%}"),
        (
            "largest part / mean",
            ", ".join(f"{name} {ratio:.3f}" for name, ratio in described.quality["balance"].items()),
        ),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(name, terminal.printable(value))
    if not part.is_hetero:
        return [grid, _table_of_parts(part)]
    vertices = Table("vertices", "number", "rows", "attributes")
    for type_ in described.node_types:
        rows = "none" if not type_.attributes else "in every part" if type_.replicated else "by part"
        columns = list(type_.attributes.items())
        vertices.add_row(
            terminal.printable(str(type_.name)), f"{type_.num_vertices:,}", rows, terminal.printable(_columns(columns))
        )
    edges = Table("edges", "number", "attributes", "splits")
    for relation in described.edge_types:
        splits = ", ".join(f"{name} {sum(counts):,}" for name, counts in relation.splits.items())
        name = " ".join(relation.name or ())
        columns = list(relation.attributes.items())
        edges.add_row(
            terminal.printable(name), f"{relation.num_edges:,}", terminal.printable(_columns(columns)), splits or "none"
        )
    return [grid, vertices, edges, _table_of_parts(part)]


def _partitioned(how: Mapping[str, Any]) -> str:
    weights = f", {how['edge_weights']} edge weights" if how["edge_weights"] else ""
    order = "" if how["order"] == "vip" else "; ids in the user's order"
    return f"{how['method']}{weights}{', refined' if how['refine'] else ', not refined'}{order}"


def _narrower(type_: VertexType, name: str) -> str:
    """How the rows of an attribute are stored narrower."""
    narrow, stored = type_.narrow(name), type_.attributes[name]["stored_as"]
    assert narrow is not None  # the manifest says so
    return (
        f"stored as {narrow.format}: {narrow.row_bytes:,} bytes a row, not {narrow.wide_bytes:,}; largest error {stored['largest_error']:.3g}, "
        f"root mean square {stored['relative_rms_error']:.2%} of the values'"
    )


def _columns(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    shown = [
        f"{name} {entry['dtype']} {entry['row_shape']}" if entry["row_shape"] else f"{name} {entry['dtype']}"
        for name, entry in columns
    ]
    return ", ".join(shown) or "none"


def _workload(part: PartitionedGraph) -> str:
    described = part.description
    type_, split = described.seeds
    alike = [fanouts for fanouts in described.num_neighbors if fanouts == described.num_neighbors[0]]
    if len(alike) == len(described.num_neighbors):
        fanouts = f"{alike[0] if alike else 'none'}"
    else:
        names = [" ".join(relation.name or ()) for relation in described.edge_types]
        fanouts = ", ".join(f"{per_hop} of {name}" for name, per_hop in zip(names, described.num_neighbors))
    of = f" of {type_!r}" if type_ is not None else ""
    return f"fanouts {fanouts}, batch size {described.batch_size}, seeds {split!r}{of}"


def _table_of_parts(part: PartitionedGraph) -> Table:
    """What each part owns of every type, and of every split of it."""
    columns: dict[str, list[int]] = {}
    for type_ in part.description.node_types:
        name = "" if type_.name is None else f"{terminal.printable(type_.name)} "
        columns[name.strip() or "vertices"] = [type_.book.size_of(part_id) for part_id in range(part.num_parts)]
        columns |= {f"{name}{split}": counts for split, counts in type_.splits.items()}
    table = Table("part", *columns)
    for column in table.columns:
        column.justify = "right"
    for part_id in range(part.num_parts):
        table.add_row(str(part_id), *(f"{counts[part_id]:,}" for counts in columns.values()))
    return table
