"""``salientpp analyze``: counts the rows that batches fetch, and what a cache would save."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_partitioning,
    add_seed,
    adder,
    files_of,
    format_of_attribute,
    num_neighbors_of,
    numbers_of,
    typed_seeds_of,
    values_of,
)
from salientpp.store.directory.kinds import has_manifest
from salientpp.vip.names import POLICY_NAMES

if TYPE_CHECKING:
    from salientpp.analysis.analyze import Ways
    from salientpp.analysis.batches import Batches
    from salientpp.analysis.result import Analysis

#: Groups of options. Options of AGREEING exclude those of the other two groups.
HOSTS = ("ranks_per_host", "ranks_per_part", "parts_per_rank")
AGREEING = ("lookahead", "shared_draws", "draw_block", "partial_aggregation")
WAYS_TO_DRAW = (
    "link",
    "neg_sampling",
    "time_attr",
    "edge_label_time",
    "temporal_strategy",
    "time_window",
    "weight_attr",
    "disjoint",
    "replace",
)

HELP = "count the rows that batches fetch, and what a cache would save"
EXAMPLE = "salientpp analyze synthetic:num_vertices=20000 --parts 4"


#: Line below the tables of a command without --details.
_HINT = "--details also shows forecasts, lookahead and the memory of devices."

#: Help of each argument.
TEXTS = {
    "dataset": f"a dataset directory, or {DATASETS}. The command needs the memory of the whole topology, also if the directory stores it in parts",
    "--parts": "number of machines (default: parts of the dataset directory)",
    "--num-neighbors": "neighbours per hop, -1 for all; a list that begins with -1 needs an equals sign: --num-neighbors=-1,10. May be given several times "
    "(default: those of the dataset directory, or 15,10,5)",
    "--batch-size": "seeds per batch and machine (default: that of the dataset directory, or 1024)",
    "--replication-factors": "cache sizes to try; 0 is no cache, K - 1 would hold everything (default: 0,.01,.05,.1,.2,.5,1)",
    "--policies": f"cache policies to compare: {', '.join(POLICY_NAMES)}; and oracle, a bound that no policy beats (default: all but vip-hop)",
    "--epochs": "epochs to count, at most 1,000,000 (default: 10)",
    "--seeds": "split that batches start from: train, val, test or all; with several vertex types TYPE:SPLIT; with --link a split of edges (default: that "
    "of the dataset directory, or train; with --link all)",
    "--send-as": "format in which rows of x travel and are cached, as send_as of the loaders; may be given several times. Rows that a "
    "directory stores in fewer bytes always travel as stored",
    "--predict-only": "forecast by VIP without sampling. On a graph that is not partitioned yet, METIS still takes its time",
    "--details": "show every table: forecasts, lookahead, and the memory of devices",
    "--json": "write all figures to this file",
    "--csv": "write the first table to this file, one line per cell",
    "--plot": "draw fetched rows over α, as .png or .svg (needs matplotlib)",
    "--html": "write a page with the answer, charts to point at and all tables (needs vl-convert-python)",
    "--ranks-per-host": "ranks on each host (default: 1)",
    "--ranks-per-part": "ranks that share a part and split its seeds (default: 1)",
    "--parts-per-rank": "largest number of parts that one rank serves (default: 1)",
    "--storage-hosts": "further hosts, which hold all rows and train nothing: ranks then hold only their caches, and fetch every other row "
    "(default: 0, the ranks hold the rows)",
    "--lookahead": "also count the rows that ranks fetch if they know their next W batches: a number or auto. Without it, the rows for auto are only forecast",
    "--shared-draws": "batch: the vertices of a batch agree on which neighbours to draw",
    "--partial-aggregation": "also count the rows and sums that ranks fetch if each rank adds up its rows of last-hop neighbours before it sends them",
    "--draw-block": "number of consecutive batches of a machine that share their random draws (default: 1)",
    "--link": "batches start from edges; with several edge types name one: --link=author,writes,paper",
    "--neg-sampling": "negative examples for --link: binary or triplet, and optionally an amount",
    "--time-attr": "attribute with the times of vertices or edges",
    "--edge-label-time": "with --link: edge attribute with the times of the seeds",
    "--temporal-strategy": "uniform, or last: the latest of the neighbours that a seed may see (default: uniform)",
    "--time-window": "with --time-attr: how much earlier than its seed a neighbour may be, in the units of the times (default: any)",
    "--weight-attr": "attribute with the weights of edges",
    "--disjoint": "sample a separate tree for every seed",
    "--replace": "draw neighbours with replacement",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A graph of N vertices is spread over K machines, and each batch fetches the feature rows that its machine lacks. This command counts "
        "these rows for every cache policy and every replication factor α (each machine caches α N / K rows of other machines). It also forecasts them by "
        "vertex inclusion probability (VIP). β is the fraction of its own rows that a machine keeps in "
        "GPU memory. The command runs on one machine without a GPU."
    )
    add = adder(parser, TEXTS)
    add("dataset")
    add("--parts", type=int, metavar="K")
    batches = parser.add_argument_group("batches")
    add_batch = adder(batches, TEXTS)
    add_batch("--num-neighbors", type=num_neighbors_of, action="append", metavar="F,F,...")
    add_batch("--batch-size", type=int, metavar="B")
    add_batch("--seeds", metavar="[TYPE:]SPLIT")
    add_batch("--epochs", type=int, default=10)
    add_seed(batches, "seed of batches and partition")
    caches = parser.add_argument_group("caches")
    add_cache = adder(caches, TEXTS)
    add_cache("--replication-factors", type=numbers_of, default=[0, 0.01, 0.05, 0.1, 0.2, 0.5, 1], metavar="α,α,...")
    add_cache("--policies", type=lambda text: text.split(","), metavar="P,P,...")
    add_cache("--send-as", type=format_of_attribute, action="append", metavar="[TYPE:]NAME=FORMAT")
    add_cache("--predict-only", action="store_true")
    output = parser.add_argument_group("output")
    add_output = adder(output, TEXTS)
    add_output("--details", action="store_true")
    for name in ("--json", "--csv", "--plot", "--html"):
        add_output(name, type=Path, metavar="FILE")
    how = parser.add_argument_group("assignment of vertices to parts", "No effect on a dataset directory.")
    add_partitioning(how)
    add_data(parser)
    hosts = parser.add_argument_group(
        "hosts with several ranks, ranks with several parts, storage hosts",
        "With one of the first three options, the rows from other hosts are counted, with a cache per rank and with a cache per host.",
    )
    add_host = adder(hosts, TEXTS)
    add_host("--ranks-per-host", type=int, metavar="R")
    add_host("--ranks-per-part", type=int, metavar="G")
    add_host("--parts-per-rank", type=int, metavar="M")
    add_host("--storage-hosts", type=int, default=0, metavar="S")
    ahead = parser.add_argument_group(
        "lookahead, shared draws and partial aggregation",
        "These options mean the same as the loader options of these names. They need uniform draws and a graph with one vertex type.",
    )
    add_ahead = adder(ahead, TEXTS)
    add_ahead("--lookahead", type=_lookahead, metavar="W")
    add_ahead("--shared-draws", metavar="HOW")
    add_ahead("--partial-aggregation", action="store_true", default=None)
    add_ahead("--draw-block", type=int, metavar="B")
    ways = parser.add_argument_group(
        "sampling, on a dataset directory",
        "These options mean the same as the loader arguments of these names. If one is given, or if the graph has several vertex types, rows are counted "
        "for each vertex type, under the policies vip, vip-hop, degree, random and oracle.",
    )
    add_draw = adder(ways, TEXTS)
    add_draw("--link", nargs="?", const="", metavar="EDGE_TYPE")
    add_draw("--neg-sampling", metavar="MODE[:AMOUNT]")
    add_draw("--time-attr", metavar="NAME")
    add_draw("--edge-label-time", metavar="NAME")
    add_draw("--temporal-strategy", choices=("uniform", "last"))
    add_draw("--time-window", type=float, metavar="T")
    add_draw("--weight-attr", metavar="NAME")
    add_draw("--disjoint", action="store_true")
    add_draw("--replace", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    from torch_geometric.data import HeteroData

    from salientpp.analysis import report
    from salientpp.analysis.analyze import analyze
    from salientpp.analysis.report import picture
    from salientpp.cli.given_graph import graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.report.analysis_page import analysis_page
    from salientpp.store.directory.load import load

    with warnings_in_lines("analyze"):
        # Check all arguments before the minutes of work.
        files = files_of(arguments, "json", "csv", "plot", "html")
        method = method_of(arguments.method, arguments.dataset)
        is_directory = has_manifest(arguments.dataset)
        if arguments.parts is None and not is_directory:
            raise ValueError(f"--parts is required, because {arguments.dataset} is not a dataset directory")
        batches, ways = _batches(arguments, is_directory), _ways(arguments)
        with shown_progress(lines=False) as progress:
            progress.begin("loading")
            graph: list[Any] = [load(arguments.dataset), "auto"] if is_directory else graph_of(arguments, method)
            if isinstance(graph[0], HeteroData):
                raise ValueError(
                    f"{arguments.dataset} has several vertex types, which are counted only on a dataset directory; write one with "
                    "`salientpp partition` first"
                )
            if is_directory and graph[0].is_hetero:
                _check_types(arguments)
                if arguments.link is None:  # --seeds is a type, a split, or both
                    seeds = typed_seeds_of(arguments.seeds or "", graph[0].description.seeds)
                    batches = [replace(each, seeds=seeds) for each in batches]
            placing = _placing(arguments, graph[0].num_parts if is_directory else arguments.parts)
            analysis = analyze(
                # Pass the graph without keeping a reference, so that the analysis can free it.
                graph.pop(0),
                batches,
                ways,
                method=graph.pop(),
                name=arguments.dataset,
                progress=progress,
                **values_of(arguments, "parts", "edge_weights", "refine", "predict_only", "storage_hosts"),
                **placing,
            )
        contents: dict[str, Callable[[], bytes]] = {
            "json": lambda: (json.dumps(analysis.to_dict(), indent=1) + "\n").encode(),
            "csv": lambda: analysis.to_csv().encode(),
            "plot": lambda: picture(partial(report.draw, analysis), arguments.plot),
            "html": lambda: analysis_page(analysis),
        }
        terminal.finish(
            files,
            contents,
            arguments.written,
            lambda: report.shown(
                analysis, arguments.details, _HINT, _plan_command(arguments, analysis, is_directory, method is None)
            ),
        )
        return 0


def _plan_command(arguments: argparse.Namespace, analysis: Analysis, is_directory: bool, is_assigned: bool) -> str:
    """Returns the `salientpp plan` command that the user may run next: for the same graph and batches, with the advised memory.

    The text is empty if `plan` has no options for such batches or parts. ``is_assigned`` is True if the dataset says which part each vertex belongs to.
    """
    from salientpp.analysis.verdict import advised_memory, static_caches
    from salientpp.partitioning.options import METHODS

    if arguments.send_as or _given(arguments, (*WAYS_TO_DRAW, "shared_draws", "draw_block")):
        return ""
    if not is_directory and _given(arguments, ("ranks_per_part", "parts_per_rank")):  # then `plan` makes other parts
        return ""
    words = ["salientpp", "plan", arguments.dataset, "--machines", "10GbE"]
    method = "auto" if is_assigned else arguments.method
    hosts = len(analysis.ranks_by_host)
    if not is_directory:
        # A file of part ids is for one number of parts.
        several = method in (None, *METHODS) and 2 * analysis.parts <= sum(analysis.num_vertices.values())
        words += ["--hosts", f"{hosts},{2 * hosts}" if several else str(hosts)]
    if analysis.ranks_by_host[0] > 1:
        words += ["--ranks-per-host", str(analysis.ranks_by_host[0])]
    if analysis.storage_hosts:
        words += ["--storage-hosts", str(analysis.storage_hosts)]
    memory = advised_memory(analysis, static_caches(analysis, analysis.num_neighbors[0]))
    words += ["--memory", memory] if memory else []
    if arguments.num_neighbors:
        words.append(f"--num-neighbors={','.join(map(str, arguments.num_neighbors[0]))}")
    words += ["--batch-size", str(arguments.batch_size)] if arguments.batch_size is not None else []
    words += ["--seeds", arguments.seeds] if arguments.seeds else []
    words += ["--seed", str(arguments.seed)] if arguments.seed else []
    if not is_directory:
        words += ["--method", method] if method is not None else []
        words += ["--edge-weights", arguments.edge_weights] if arguments.edge_weights != "vip" else []
        words += [] if arguments.refine is None else ["--refine" if arguments.refine else "--no-refine"]
        words += ["--data", str(arguments.data)] if arguments.data != Path("data") else []
    return shlex.join(words)


def _batches(arguments: argparse.Namespace, is_directory: bool) -> list[Batches]:
    """Returns the batches to count. It reads only the arguments, so that a wrong one is refused before the graph is loaded."""
    from torch_geometric.sampler import NegativeSampling

    from salientpp.analysis.batches import Batches

    draws, agreeing = _given(arguments, WAYS_TO_DRAW), _given(arguments, AGREEING)
    others = [*_given(arguments, HOSTS), *draws]
    if agreeing and others:
        raise ValueError(
            f"{', '.join(agreeing)} cannot be combined with {', '.join(others)}: the former needs uniform draws and one rank per machine; "
            "leave one of them out"
        )
    if draws and not is_directory:
        raise ValueError(
            f"{', '.join(draws)}: such batches are counted only on a dataset directory; write one with `salientpp partition` first"
        )
    is_link = arguments.link is not None
    if not is_link and (arguments.neg_sampling or arguments.edge_label_time):
        raise ValueError("--neg-sampling and --edge-label-time require --link; pass it too")
    negatives, seeds = None, arguments.seeds
    if arguments.neg_sampling:
        mode, _, amount = arguments.neg_sampling.partition(":")
        try:
            negatives = NegativeSampling(mode, float(amount) if amount else 1)
        except ValueError as error:
            raise ValueError(
                f"--neg-sampling must be binary or triplet, optionally with an amount after a colon, got {arguments.neg_sampling!r} ({error})"
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
        "time_window",
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
    """Raises ValueError if an option is given that `analyze` supports only for graphs with one vertex type."""
    agreeing = _given(arguments, AGREEING)
    if agreeing:
        raise ValueError(
            f"{', '.join(agreeing)} needs a graph with one vertex type, and {arguments.dataset} has several; leave it out. To count such rows, "
            "run a loader with it for an epoch and print loader.stats().by_type, on one rank per part, all on this machine if you like"
        )
    if arguments.plot is not None:
        raise ValueError("--plot needs a graph with one vertex type; leave it out, --json and --csv have all figures")


def _ways(arguments: argparse.Namespace) -> Ways:
    from salientpp.analysis.analyze import Ways
    from salientpp.analysis.caches import check_policies

    ways = Ways(
        arguments.policies, arguments.replication_factors, arguments.lookahead, bool(arguments.partial_aggregation), dict(arguments.send_as or ()) or None,
    )  # fmt: skip
    check_policies(ways.policies, arguments.predict_only, False)
    return ways.checked(arguments.predict_only)


def _placing(arguments: argparse.Namespace, num_parts: int) -> dict[str, Any]:
    """Returns the arguments ``ranks`` and ``ranks_per_host`` of ``analyze``. Empty if the user gave no option that places ranks."""
    given = _given(arguments, HOSTS)
    for option in given:
        value = getattr(arguments, option[2:].replace("-", "_"))
        if value < 1:
            raise ValueError(f"{option} must be >= 1, got {value}")
    per_part, per_rank = arguments.ranks_per_part or 1, arguments.parts_per_rank or 1
    if per_part > 1 and per_rank > 1:
        raise ValueError(
            f"--ranks-per-part and --parts-per-rank exclude each other if both are > 1, got {per_part} and {per_rank}; leave one of them out"
        )
    if not given:
        return {}
    ranks = num_parts * per_part if per_part > 1 else -(-num_parts // per_rank)
    return {"ranks": ranks, "ranks_per_host": arguments.ranks_per_host or 1}


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Returns those of the options ``names`` that the user gave, as written on the command line."""
    values = {name: getattr(arguments, name) for name in names}
    # 0 counts as given, although it equals False.
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None and value is not False]


def _lookahead(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of batches or auto, got {text!r}") from None
