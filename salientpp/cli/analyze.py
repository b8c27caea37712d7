"""``salientpp analyze``: counts the rows that batches fetch, and what a cache would save."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_partitioning,
    add_seed,
    fanouts_of,
    format_of_attribute,
    numbers_of,
)
from salientpp.files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

    from salientpp.analysis.analyze import Ways
    from salientpp.analysis.batches import Batches
    from salientpp.store.directory.opened import PartitionedGraph

#: What --policies may name beside the oracle: the keys of salientpp.vip.policies.POLICIES, which takes seconds to import.
POLICY_NAMES = ("degree", "halo", "paths", "random", "simulation", "vip", "vip-hop", "wpr")

#: The options of a group exclude those of another, or choose what is counted.
HOSTS = ("ranks_per_host", "ranks_per_part", "parts_per_rank")
AGREEING = ("lookahead", "shared_draws", "draw_block", "partial")
WAYS_TO_DRAW = ("link", "negatives", "time_attr", "edge_label_time", "last", "weight_attr", "disjoint", "replace")

HELP = "what would a cache save on this graph?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A graph of N vertices is spread over K machines; a batch fetches the feature rows that its machine lacks. Count "
        "them for every policy of choosing rows to cache and every replication factor α (each machine caches α N / K rows of others), "
        "forecast them by vertex inclusion probability (VIP), and advise on α and on the GPU fraction β (the share of its own rows "
        "that a machine keeps in GPU memory). One machine without a GPU is enough."
    )
    parser.add_argument("dataset", help=f"a dataset directory, {DATASETS}")
    parser.add_argument("--parts", type=int, metavar="K", help="number of machines; a dataset directory knows its own")
    add_partitioning(parser, "; a dataset directory is partitioned already")
    parser.add_argument(
        "--fanouts",
        type=fanouts_of,
        action="append",
        metavar="F,F,...",
        help="neighbours per hop, -1 for all, then with an equals sign: --fanouts=-1,10 (those of the dataset directory, or 15,10,5); may be given "
        "several times",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="seeds per batch and machine (that of the dataset directory, or 1024)",
    )
    parser.add_argument(
        "--replication-factors",
        type=numbers_of,
        default=[0, 0.01, 0.05, 0.1, 0.2, 0.5, 1],
        metavar="α,α,...",
        help="sizes of the cache to try; 0 is none, K - 1 would hold everything (0,.01,.05,.1,.2,.5,1)",
    )
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        metavar="P,P,...",
        help=f"among {', '.join(POLICY_NAMES)}, and oracle, which no policy beats (all but vip-hop)",
    )
    parser.add_argument("--epochs", type=int, default=10, help="epochs to count (10)")
    parser.add_argument(
        "--seeds",
        metavar="[TYPE:]SPLIT",
        help="the split that batches start from: train, val, test or all (that of the dataset directory, or train); of several types of "
        "vertices TYPE:SPLIT, with --link the split of edges (all)",
    )
    _add_hosts(parser)
    _add_known_batches(parser)
    parser.add_argument(
        "--send-as",
        type=format_of_attribute,
        action="append",
        metavar="[TYPE:]x=FORMAT",
        help="count bytes and caches of rows that travel in this format, as the loaders' send_as (what a directory stores narrower travels so in any case)",
    )
    _add_ways_to_draw(parser)
    parser.add_argument(
        "--predict-only",
        action="store_true",
        help="no sampling: VIP's forecast alone; METIS still takes its minutes on a large graph that is not partitioned yet",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the first table, a line per cell")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the rows over α, .png or .svg (needs matplotlib)"
    )
    add_seed(parser, "batches and partition")
    add_data(parser)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group(
        "hosts with several ranks, ranks with several parts",
        "With one of these, rows from other hosts are counted: with private caches and with one cache per host.",
    )
    hosts.add_argument("--ranks-per-host", type=int, metavar="R", help="ranks of a host (1)")
    hosts.add_argument(
        "--ranks-per-part", type=int, metavar="G", help="ranks that share a part and split its seeds (1)"
    )
    hosts.add_argument("--parts-per-rank", type=int, metavar="M", help="parts that a rank serves as one, at most (1)")


def _add_known_batches(parser: argparse.ArgumentParser) -> None:
    ahead = parser.add_argument_group(
        "batches that are known, draws that agree, and sums in the place of rows",
        "As the loaders' arguments of these names; for uniform draws from one type of vertices.",
    )
    ahead.add_argument(
        "--lookahead",
        type=_lookahead,
        metavar="W",
        help="count also the rows that ranks fetch which know their next W batches, a number or auto (auto is forecast in any case)",
    )
    ahead.add_argument("--shared-draws", metavar="HOW", help="batch: the vertices of a batch draw alike")
    ahead.add_argument(
        "--partial",
        action="store_true",
        default=None,
        help="count also the rows and sums that machines fetch whose loaders have partial_aggregation: owners sum up neighbours of the last hop",
    )
    ahead.add_argument("--draw-block", type=int, metavar="B", help="so many batches of a machine draw alike (1)")


def _add_ways_to_draw(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_argument_group(
        "ways to draw, on a dataset directory",
        "As the loaders' arguments of these names. With one of them, or with several types of vertices, rows are counted type by type, for the "
        "policies vip, vip-hop, degree, random and oracle.",
    )
    ways.add_argument(
        "--link",
        nargs="?",
        const="",
        metavar="EDGE_TYPE",
        help="batches start from edges; of several types those of one, as in --link author,writes,paper",
    )
    ways.add_argument("--negatives", metavar="MODE[:AMOUNT]", help="negative examples of --link: binary or triplet")
    ways.add_argument("--time-attr", metavar="NAME", help="times of vertices or edges")
    ways.add_argument("--edge-label-time", metavar="NAME", help="with --link, the edge attribute with the seeds' times")
    ways.add_argument("--last", action="store_true", help="of the neighbours that may be seen, the latest")
    ways.add_argument("--weight-attr", metavar="NAME", help="weights of edges")
    ways.add_argument("--disjoint", action="store_true", help="every seed grows a tree of its own")
    ways.add_argument("--replace", action="store_true", help="neighbours are drawn with replacement")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.analysis import report
    from salientpp.analysis.analyze import analyze
    from salientpp.cli.given_graph import homogeneous_graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.store.directory.load import load

    with warnings_in_lines("analyze"):
        # Whatever can be wrong is said before the minutes of work.
        _check_files(arguments)
        method = method_of(arguments.method, arguments.dataset)
        is_directory = (Path(arguments.dataset) / "manifest.json").is_file()
        if arguments.parts is None and not is_directory:
            raise ValueError(f"--parts is needed: {arguments.dataset} is not a dataset directory, which knows its own")
        batches, ways = _batches(arguments), _ways(arguments)
        with shown_progress(lines=False) as progress:
            progress.begin("loading")
            graph: list[Any] = (
                [load(arguments.dataset), "auto"] if is_directory else homogeneous_graph_of(arguments, method)
            )
            if is_directory and graph[0].is_hetero:
                _check_types(arguments)
                if arguments.link is None:
                    batches = [replace(each, seeds=_typed_seeds(arguments.seeds, graph[0])) for each in batches]
            placing = _placing(arguments, graph[0].num_parts if is_directory else arguments.parts)
            analysis = analyze(
                # No name for it here: the analysis frees what it does not need.
                graph.pop(0),
                batches,
                ways,
                parts=arguments.parts,
                method=graph.pop(),
                edge_weights=arguments.edge_weights,
                refine=arguments.refine,
                predict_only=arguments.predict_only,
                name=arguments.dataset,
                progress=progress,
                **placing,
            )
        write = {
            "json": lambda path: _write_json(path, analysis.to_dict()),
            "csv": lambda path: write_whole(path, lambda file: file.write(analysis.to_csv().encode())),
            "plot": lambda path: report.plot(analysis, path),
        }
        return _show_analysis(arguments, write, report.shown(analysis))


def _batches(arguments: argparse.Namespace) -> list[Batches]:
    """What to count, as far as it can be said before the graph is there."""
    from torch_geometric.sampler import NegativeSampling

    from salientpp.analysis.batches import Batches

    draws, agreeing = _given(arguments, WAYS_TO_DRAW), _given(arguments, AGREEING)
    others = [*_given(arguments, HOSTS), *draws]
    if agreeing and others:
        raise ValueError(
            f"{', '.join(agreeing)}: counted for plain draws and a rank per machine; leave out {', '.join(others)}"
        )
    is_directory = (Path(arguments.dataset) / "manifest.json").is_file()
    if draws and not is_directory:
        raise ValueError(
            f"{', '.join(draws)}: such batches are counted on a dataset directory; write one with `salientpp partition` first"
        )
    is_link = arguments.link is not None
    if not is_link and (arguments.negatives or arguments.edge_label_time):
        raise ValueError("--negatives and --edge-label-time belong to --link; pass it too")
    negatives, seeds = None, arguments.seeds
    if arguments.negatives:
        mode, _, amount = arguments.negatives.partition(":")
        try:
            negatives = NegativeSampling(mode, float(amount) if amount else 1)
        except ValueError as error:
            raise ValueError(f"--negatives must be binary or triplet, and an amount after a colon ({error})") from None
    if is_link:
        split = (seeds or "").rpartition(":")[2]
        seeds = (tuple(arguments.link.split(",")), split or None) if arguments.link else split or "all"
    batches = Batches(
        batch_size=arguments.batch_size,
        seeds=seeds,
        epochs=arguments.epochs,
        seed=arguments.seed,
        link=is_link,
        shared_draws=arguments.shared_draws,
        draw_block=1 if arguments.draw_block is None else arguments.draw_block,
        replace=arguments.replace,
        disjoint=arguments.disjoint,
        time_attr=arguments.time_attr,
        temporal_strategy="last" if arguments.last else "uniform",
        weight_attr=arguments.weight_attr,
        neg_sampling=negatives,
        edge_label_time=arguments.edge_label_time,
    )
    several = [replace(batches, num_neighbors=fanouts) for fanouts in arguments.fanouts or [None]]
    for each in several:
        each.check()
    return several


def _typed_seeds(given: str | None, part: PartitionedGraph) -> tuple[Any, str]:
    """--seeds of several types of vertices: a type, a split, or both."""
    type_, colon, split = (given or "").rpartition(":")
    stored = part.description.seeds
    return (type_ if colon else stored[0], split or stored[1])


def _check_types(arguments: argparse.Namespace) -> None:
    """Refuse what is counted for one type of vertices alone."""
    agreeing = _given(arguments, AGREEING)
    if agreeing:
        raise ValueError(
            f"{', '.join(agreeing)}: counted for one type of vertices, and {arguments.dataset} has several; leave it out, and see what a loader with it "
            "fetches: loader.stats().by_type after an epoch, on as many ranks as there are parts, which may all be on this machine"
        )
    if arguments.plot is not None:
        raise ValueError(
            "--plot draws the rows of one type of vertices; leave it out, --json and --csv have all figures"
        )


def _ways(arguments: argparse.Namespace) -> Ways:
    from salientpp.analysis.analyze import Ways
    from salientpp.analysis.caches import check_policies

    ways = Ways(
        arguments.policies, arguments.replication_factors, arguments.lookahead, bool(arguments.partial), dict(arguments.send_as or ()) or None
    )  # fmt: skip
    check_policies(ways.policies, arguments.predict_only, False)
    return ways.checked(arguments.predict_only)


def _placing(arguments: argparse.Namespace, num_parts: int) -> dict[str, int]:
    """How many ranks there are, and how many of them each host has."""
    given = _given(arguments, HOSTS)
    for option in given:
        value = getattr(arguments, option[2:].replace("-", "_"))
        if value < 1:
            raise ValueError(f"{option} must be >= 1, got {value}")
    per_part, per_rank = arguments.ranks_per_part or 1, arguments.parts_per_rank or 1
    if per_part > 1 and per_rank > 1:
        raise ValueError(
            f"either several ranks share a part or a rank has several, got --ranks-per-part {per_part} and --parts-per-rank {per_rank}"
        )
    if not given:
        return {}
    ranks = num_parts * per_part if per_part > 1 else -(-num_parts // per_rank)
    return {"ranks": ranks, "ranks_per_host": arguments.ranks_per_host or 1}


def _files(arguments: argparse.Namespace) -> dict[str, Path]:
    """The files to write, by the name of their option."""
    return {option: path for option in ("json", "csv", "plot") if (path := getattr(arguments, option)) is not None}


def _check_files(arguments: argparse.Namespace) -> None:
    terminal.check_outputs({f"--{option}": path for option, path in _files(arguments).items()})
    if arguments.plot is not None:
        from salientpp.analysis.report import check_matplotlib

        if arguments.plot.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"--plot must end in .png or .svg, got {arguments.plot}")
        check_matplotlib()


def _write_json(path: Path, figures: dict[str, Any]) -> None:
    write_whole(path, lambda file: file.write((json.dumps(figures, indent=1) + "\n").encode()))


def _show_analysis(
    arguments: argparse.Namespace,
    write: Mapping[str, Callable[[Path], None]],
    lines: Sequence[RenderableType],
) -> int:
    """Write what was asked for, and show the rest; what fails keeps nothing else from being written."""
    failed = []
    for option, path in _files(arguments).items():
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


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The options of these names that were given."""
    values = {name: getattr(arguments, name) for name in names}
    # A 0 was given, and equals False.
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None and value is not False]


def _lookahead(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of batches or auto, got {text!r}") from None
