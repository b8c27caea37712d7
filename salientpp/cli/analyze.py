"""``salientpp analyze``: counts the rows that batches fetch, and what a cache would save."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_partitioning,
    add_seed,
    adder,
    format_of_attribute,
    num_neighbors_of,
    numbers_of,
    values_of,
)
from salientpp.files import write_whole

if TYPE_CHECKING:
    from salientpp.analysis.analyze import Ways
    from salientpp.analysis.batches import Batches

#: What --policies may name beside the oracle: the keys of salientpp.vip.policies.POLICIES, which takes seconds to import.
POLICY_NAMES = ("degree", "halo", "paths", "random", "simulation", "vip", "vip-hop", "wpr")

#: The options of a group exclude those of another, or choose what is counted.
HOSTS = ("ranks_per_host", "ranks_per_part", "parts_per_rank")
AGREEING = ("lookahead", "shared_draws", "draw_block", "partial_aggregation")
WAYS_TO_DRAW = (
    "link",
    "neg_sampling",
    "time_attr",
    "edge_label_time",
    "temporal_strategy",
    "weight_attr",
    "disjoint",
    "replace",
)

HELP = "what would a cache save on this graph?"


#: What help says of each argument.
TEXTS = {
    "dataset": f"a dataset directory, {DATASETS}",
    "--parts": "number of machines; a dataset directory knows its own",
    "--num-neighbors": "neighbours per hop, -1 for all, then with an equals sign: --num-neighbors=-1,10 (those of the dataset directory, or 15,10,5); may be "
    "given several times",
    "--batch-size": "seeds per batch and machine (that of the dataset directory, or 1024)",
    "--replication-factors": "sizes of the cache to try; 0 is none, K - 1 would hold everything (0,.01,.05,.1,.2,.5,1)",
    "--policies": f"among {', '.join(POLICY_NAMES)}, and oracle, which no policy beats (all but vip-hop)",
    "--epochs": "epochs to count (10)",
    "--seeds": "the split that batches start from: train, val, test or all (that of the dataset directory, or train); of several types of "
    "vertices TYPE:SPLIT, with --link the split of edges (all)",
    "--send-as": "count bytes and caches of rows that travel in this format, as the loaders' send_as (what a directory stores narrower travels so in any case)",
    "--predict-only": "no sampling: VIP's forecast alone; METIS still takes its minutes on a large graph that is not partitioned yet",
    "--json": "write all figures",
    "--csv": "write the first table, a line per cell",
    "--plot": "draw the rows over α, .png or .svg (needs matplotlib)",
    "--ranks-per-host": "ranks of a host (1)",
    "--ranks-per-part": "ranks that share a part and split its seeds (1)",
    "--parts-per-rank": "parts that a rank serves as one, at most (1)",
    "--lookahead": "count also the rows that ranks fetch which know their next W batches, a number or auto (auto is forecast in any case)",
    "--shared-draws": "batch: the vertices of a batch draw alike",
    "--partial-aggregation": "count also the rows and sums that machines fetch whose loaders have it: owners sum up neighbours of the last hop",
    "--draw-block": "so many batches of a machine draw alike (1)",
    "--link": "batches start from edges; of several types those of one, as in --link author,writes,paper",
    "--neg-sampling": "negative examples of --link: binary or triplet",
    "--time-attr": "times of vertices or edges",
    "--edge-label-time": "with --link, the edge attribute with the seeds' times",
    "--temporal-strategy": "last: of the neighbours that may be seen, the latest",
    "--weight-attr": "weights of edges",
    "--disjoint": "every seed grows a tree of its own",
    "--replace": "neighbours are drawn with replacement",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A graph of N vertices is spread over K machines; a batch fetches the feature rows that its machine lacks. Count "
        "them for every policy of choosing rows to cache and every replication factor α (each machine caches α N / K rows of others), "
        "forecast them by vertex inclusion probability (VIP), and advise on α and on the GPU fraction β (the share of its own rows "
        "that a machine keeps in GPU memory). One machine without a GPU is enough."
    )
    add = adder(parser, TEXTS)
    add("dataset")
    add("--parts", type=int, metavar="K")
    add_partitioning(parser, "; a dataset directory is partitioned already")
    add("--num-neighbors", type=num_neighbors_of, action="append", metavar="F,F,...")
    add("--batch-size", type=int, metavar="B")
    add("--replication-factors", type=numbers_of, default=[0, 0.01, 0.05, 0.1, 0.2, 0.5, 1], metavar="α,α,...")
    add("--policies", type=lambda text: text.split(","), metavar="P,P,...")
    add("--epochs", type=int, default=10)
    add("--seeds", metavar="[TYPE:]SPLIT")
    hosts = parser.add_argument_group(
        "hosts with several ranks, ranks with several parts",
        "With one of these, rows from other hosts are counted: with private caches and with one cache per host.",
    )
    add_host = adder(hosts, TEXTS)
    add_host("--ranks-per-host", type=int, metavar="R")
    add_host("--ranks-per-part", type=int, metavar="G")
    add_host("--parts-per-rank", type=int, metavar="M")
    ahead = parser.add_argument_group(
        "batches that are known, draws that agree, and sums in the place of rows",
        "As the loaders' arguments of these names; for uniform draws from one type of vertices.",
    )
    add_ahead = adder(ahead, TEXTS)
    add_ahead("--lookahead", type=_lookahead, metavar="W")
    add_ahead("--shared-draws", metavar="HOW")
    add_ahead("--partial-aggregation", action="store_true", default=None)
    add_ahead("--draw-block", type=int, metavar="B")
    add("--send-as", type=format_of_attribute, action="append", metavar="[TYPE:]x=FORMAT")
    ways = parser.add_argument_group(
        "ways to draw, on a dataset directory",
        "As the loaders' arguments of these names. With one of them, or with several types of vertices, rows are counted type by type, for the "
        "policies vip, vip-hop, degree, random and oracle.",
    )
    add_draw = adder(ways, TEXTS)
    add_draw("--link", nargs="?", const="", metavar="EDGE_TYPE")
    add_draw("--neg-sampling", metavar="MODE[:AMOUNT]")
    add_draw("--time-attr", metavar="NAME")
    add_draw("--edge-label-time", metavar="NAME")
    add_draw("--temporal-strategy", choices=("uniform", "last"))
    add_draw("--weight-attr", metavar="NAME")
    add_draw("--disjoint", action="store_true")
    add_draw("--replace", action="store_true")
    add("--predict-only", action="store_true")
    for name in ("--json", "--csv", "--plot"):
        add(name, type=Path, metavar="FILE")
    add_seed(parser, "batches and partition")
    add_data(parser)


def run(arguments: argparse.Namespace) -> int:
    from torch_geometric.data import HeteroData

    from salientpp.analysis import report
    from salientpp.analysis.analyze import analyze
    from salientpp.cli.given_graph import graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.store.directory.load import load

    with warnings_in_lines("analyze"):
        # Whatever can be wrong is said before the minutes of work.
        _check_files(arguments)
        method = method_of(arguments.method, arguments.dataset)
        is_directory = (Path(arguments.dataset) / "manifest.json").is_file()
        if arguments.parts is None and not is_directory:
            raise ValueError(f"--parts is needed: {arguments.dataset} is not a dataset directory, which knows its own")
        batches, ways = _batches(arguments, is_directory), _ways(arguments)
        with shown_progress(lines=False) as progress:
            progress.begin("loading")
            graph: list[Any] = [load(arguments.dataset), "auto"] if is_directory else graph_of(arguments, method)
            if isinstance(graph[0], HeteroData):
                raise ValueError(
                    f"{arguments.dataset} has several types of vertices, whose rows are counted on a dataset directory; write one with "
                    "`salientpp partition` first"
                )
            if is_directory and graph[0].is_hetero:
                _check_types(arguments)
                if arguments.link is None:  # --seeds is a type, a split, or both
                    type_, colon, split = (arguments.seeds or "").rpartition(":")
                    stored = graph[0].description.seeds
                    seeds = (type_ if colon else stored[0], split or stored[1])
                    batches = [replace(each, seeds=seeds) for each in batches]
            placing = _placing(arguments, graph[0].num_parts if is_directory else arguments.parts)
            analysis = analyze(
                # No name for it here: the analysis frees what it does not need.
                graph.pop(0),
                batches,
                ways,
                method=graph.pop(),
                name=arguments.dataset,
                progress=progress,
                **values_of(arguments, "parts", "edge_weights", "refine", "predict_only"),
                **placing,
            )
        contents: dict[str, Callable[[], bytes]] = {
            "json": lambda: (json.dumps(analysis.to_dict(), indent=1) + "\n").encode(),
            "csv": lambda: analysis.to_csv().encode(),
            "plot": lambda: report.plot(analysis, arguments.plot.suffix[1:].lower()),
        }
        failed = []  # what fails keeps nothing else from being written
        for option, path in _files(arguments).items():
            try:
                write_whole(path, methodcaller("write", contents[option]()))
                arguments.written.append(path)
            except OSError as error:
                failed.append(f"--{option}: {error}")
        try:
            terminal.show(*report.shown(analysis))
        except OSError as error:
            failed.append(str(error))
        if failed:
            raise OSError("; ".join(failed))
        return 0


def _batches(arguments: argparse.Namespace, is_directory: bool) -> list[Batches]:
    """What to count, as far as it can be said before the graph is there."""
    from torch_geometric.sampler import NegativeSampling

    from salientpp.analysis.batches import Batches

    draws, agreeing = _given(arguments, WAYS_TO_DRAW), _given(arguments, AGREEING)
    others = [*_given(arguments, HOSTS), *draws]
    if agreeing and others:
        raise ValueError(
            f"{', '.join(agreeing)}: counted for plain draws and a rank per machine; leave out {', '.join(others)}"
        )
    if draws and not is_directory:
        raise ValueError(
            f"{', '.join(draws)}: such batches are counted on a dataset directory; write one with `salientpp partition` first"
        )
    is_link = arguments.link is not None
    if not is_link and (arguments.neg_sampling or arguments.edge_label_time):
        raise ValueError("--neg-sampling and --edge-label-time belong to --link; pass it too")
    negatives, seeds = None, arguments.seeds
    if arguments.neg_sampling:
        mode, _, amount = arguments.neg_sampling.partition(":")
        try:
            negatives = NegativeSampling(mode, float(amount) if amount else 1)
        except ValueError as error:
            raise ValueError(
                f"--neg-sampling must be binary or triplet, and an amount after a colon ({error})"
            ) from None
    if is_link:
        split = (seeds or "").rpartition(":")[2]
        seeds = (tuple(arguments.link.split(",")), split or None) if arguments.link else split or "all"
    same = (
        "batch_size",
        "epochs",
        "seed",
        "shared_draws",
        "replace",
        "disjoint",
        "time_attr",
        "weight_attr",
        "edge_label_time",
    )
    batches = Batches(
        seeds=seeds,
        link=is_link,
        draw_block=1 if arguments.draw_block is None else arguments.draw_block,
        temporal_strategy=arguments.temporal_strategy or "uniform",
        neg_sampling=negatives,
        **values_of(arguments, *same),
    )
    several = [replace(batches, num_neighbors=fanouts) for fanouts in arguments.num_neighbors or [None]]
    for each in several:
        each.check()
    return several


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
        arguments.policies, arguments.replication_factors, arguments.lookahead, bool(arguments.partial_aggregation), dict(arguments.send_as or ()) or None
    )  # fmt: skip
    check_policies(ways.policies, arguments.predict_only, False)
    return ways.checked(arguments.predict_only)


def _placing(arguments: argparse.Namespace, num_parts: int) -> dict[str, Any]:
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
