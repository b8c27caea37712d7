"""``salientpp plan``: predicts epoch time, traffic, memory and cost for several numbers of hosts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import reprlib
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.dataset_name import KINDS
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_partitioning,
    add_seed,
    adder,
    files_of,
    num_neighbors_of,
    typed_seeds_of,
    values_of,
    whole_numbers_of,
)
from salientpp.store.directory.kinds import has_manifest

if TYPE_CHECKING:
    from salientpp.analysis.batches import Batches
    from salientpp.analysis.plan import Question
    from salientpp.ways.planner.machines import Machines

#: Names that --allow accepts. They are the keys of salientpp.analysis.plan_result.ALLOWED, a module whose import takes seconds.
ALLOWED_NAMES = ("sums", "int8", "shared_draws")

HELP = "predict epoch time, traffic, memory and cost for several numbers of hosts"
EXAMPLE = "salientpp plan DIR --machines 10GbE"

#: Help of each argument.
TEXTS = {
    "dataset": f"a dataset directory, or {DATASETS}. A graph that is not partitioned yet is partitioned in memory for each number of hosts",
    "--machines": "JSON file of `salientpp calibrate`; or for a first look the name of a link, such as 10GbE, with defaults for everything else",
    "--set": "replace a constant of the machines, such as `--set step.seconds=0.05`. May be given several times",
    "--hosts": "numbers of hosts to compare (default: for a dataset directory the number of parts, and the powers of two below it whose ranks fit the parts)",
    "--ranks-per-host": "ranks on each host (default: 1)",
    "--memory": "bytes of a host for copies of rows, to compare, such as `--memory 0B,8GiB,16GiB` "
    "(default: 0, 5, 20 and 100 per cent of the bytes of all rows)",
    "--device-memory": "bytes of each rank's device for copies of rows, to compare (default: 0)",
    "--num-neighbors": "neighbours per hop, -1 for all; a list that begins with -1 needs an equals sign: --num-neighbors=-1,10 (default: those of the "
    "dataset directory, or 15,10,5)",
    "--batch-size": "seeds per batch and rank (default: that of the dataset directory, or 1024)",
    "--seeds": "split that batches start from: train, val, test or all; with several vertex types TYPE:SPLIT "
    "(default: that of the dataset directory, or train)",
    "--allow": f"methods that change batches and that the plan may use: {', '.join(ALLOWED_NAMES)} (default: none)",
    "--storage-hosts": "numbers of further hosts to compare, which hold all rows and train nothing. 0: the hosts that train hold the rows (default: 0)",
    "--storage-link": "link of a storage host: a name such as 25GbE, or BYTES_PER_SECOND (default: that of a host that trains)",
    "--price": "price of a host per hour, in any currency (default: that of the file of --machines, if it has one)",
    "--storage-price": "price of a storage host per hour, in the currency of --price",
    "--epochs": "number of epochs to pay for (default: 1)",
    "--json": "write all figures to this file",
    "--plot": "draw the seconds of an epoch over hosts and memory, as .png or .svg (needs matplotlib)",
    "--html": "write a page with the recommendation, charts to point at and all tables (needs vl-convert-python)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts an epoch of a training job, before machines are rented. For each number of hosts and amount of memory, the command compares "
        "combinations of caches and other methods that move fewer bytes, as a loader with `memory=` does. "
        "It predicts the seconds of an epoch, the bytes that travel, "
        "the memory of a host and, with a price, the cost. It runs on one machine without a GPU, and trains nothing."
    )
    add = adder(parser, TEXTS)
    add("dataset")
    add("--machines", required=True, metavar="FILE")
    add("--set", action="append", default=[], type=_constant, metavar="NAME=VALUE")
    add("--hosts", type=whole_numbers_of, default=[], metavar="H,H,...")
    add("--ranks-per-host", type=int, default=1, metavar="R")
    add("--memory", type=_words, metavar="BYTES,...")
    add("--device-memory", type=_words, metavar="BYTES,...")
    add_partitioning(parser, ". No effect on a dataset directory, like the next two options")
    add("--num-neighbors", type=num_neighbors_of, metavar="F,F,...")
    add("--batch-size", type=int, metavar="B")
    add("--seeds", metavar="[TYPE:]SPLIT")
    add("--allow", type=_words, default=[], metavar="NAME,...")
    add("--storage-hosts", type=whole_numbers_of, default=[0], metavar="S,S,...")
    add("--storage-link", metavar="LINK")
    add("--price", type=float, metavar="PER_HOUR")
    add("--storage-price", type=float, metavar="PER_HOUR")
    add("--epochs", type=int, default=1)
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE")
    add("--html", type=Path, metavar="FILE")
    add_seed(parser, "seed of batches and partition")
    add_data(parser)


def incomplete(words: Sequence[str]) -> tuple[str, str]:
    """Returns texts for the error about missing options: further options that the user's graph needs, and an example command for this graph."""
    graph = next((word for word in words if word.startswith("ogbn-") or word.partition(":")[0] in KINDS), "")
    if not graph:
        return "", EXAMPLE
    has_hosts = any(word.partition("=")[0] == "--hosts" for word in words)
    return "" if has_hosts else ", --hosts", f"salientpp plan {shlex.quote(graph)} --machines 10GbE --hosts 2,4"


def run(arguments: argparse.Namespace) -> int:
    from torch_geometric.data import HeteroData

    from salientpp.analysis import plan_report
    from salientpp.analysis.plan import plan
    from salientpp.analysis.report import picture
    from salientpp.cli.given_graph import graph_of, method_of
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.report.plan_page import plan_page
    from salientpp.store.directory.load import load

    with warnings_in_lines("plan"):
        # Check all arguments before the minutes of work.
        files = files_of(arguments, "json", "plot", "html")
        machines, question = _machines(arguments), _question(arguments)
        question.check(machines)
        is_directory = has_manifest(arguments.dataset)
        method: Any = "auto"
        if not is_directory:
            method = method_of(arguments.method, arguments.dataset)
            if method is None:
                raise ValueError(
                    f"{arguments.dataset} has an assignment for one number of parts; write a dataset directory with `salientpp partition` first, "
                    "or pass another --method"
                )
            if not question.hosts:
                raise ValueError(
                    f"--hosts is required, because {arguments.dataset} is not a dataset directory; write, for example, --hosts 2,4"
                )
        with shown_progress(lines=False) as progress:
            progress.begin("loading")
            graph: Any = load(arguments.dataset) if is_directory else graph_of(arguments, method)[0]
            if isinstance(graph, HeteroData):
                raise ValueError(
                    f"{arguments.dataset} has several vertex types, which are planned only on a dataset directory; write one with "
                    "`salientpp partition` first"
                )
            planned = plan(
                graph,
                machines,
                question,
                _batches(arguments, graph if is_directory else None),
                method=method,
                name=arguments.dataset,
                progress=progress,
                **values_of(arguments, "edge_weights", "refine"),
            )
        contents: dict[str, Callable[[], bytes]] = {
            "json": lambda: (json.dumps(planned.to_dict(), indent=1) + "\n").encode(),
            "plot": lambda: picture(partial(plan_report.draw, planned), arguments.plot),
            "html": lambda: plan_page(planned),
        }
        terminal.finish(files, contents, arguments.written, lambda: plan_report.shown(planned))
        return 0


def _machines(arguments: argparse.Namespace) -> Machines:
    """Returns the constants of the machines, as changed by --set and --price."""
    from salientpp.analysis.plan import named_link
    from salientpp.ways.planner.machines import Machines

    is_file = Path(arguments.machines).suffix == ".json" or Path(arguments.machines).is_file()
    machines = (
        Machines.read(arguments.machines) if is_file else named_link(arguments.machines, arguments.ranks_per_host)
    )
    if arguments.set:
        values = machines.to_dict()
        for names, value in arguments.set:
            inner = values
            for name in names[:-1]:
                if not isinstance(inner.get(name), dict):
                    inner[name] = {}
                inner = inner[name]
            inner[names[-1]] = value
        machines = Machines.of(values, f"{arguments.machines} with --set")
    if arguments.price is not None:
        if not 0 <= arguments.price < float("inf"):
            raise ValueError(f"--price must be a number >= 0, got {arguments.price}")
        machines = dataclasses.replace(machines, price=arguments.price)
    return machines


def _question(arguments: argparse.Namespace) -> Question:
    from salientpp.analysis.plan import Question
    from salientpp.cli.calibrate import link_of
    from salientpp.engine.option import num_bytes

    def amounts(name: str) -> list[int]:
        words: Sequence[str] = getattr(arguments, name) or ()
        option = f"--{name.replace('_', '-')}"
        return sorted({num_bytes(option, int(word) if word.isdecimal() else word) for word in words})

    return Question(
        hosts=arguments.hosts,
        ranks_per_host=arguments.ranks_per_host,
        memory=amounts("memory"),
        device_memory=amounts("device_memory") or [0],
        allow=[name.replace("-", "_") for name in arguments.allow],
        epochs=arguments.epochs,
        storage_hosts=arguments.storage_hosts,
        storage_link=None if arguments.storage_link is None else link_of(arguments.storage_link, "--storage-link"),
        storage_price=arguments.storage_price,
    )


def _batches(arguments: argparse.Namespace, part: Any) -> Batches:
    """Returns the batches to plan for; ``part`` is the dataset directory, or None."""
    from salientpp.analysis.batches import Batches

    seeds: Any = arguments.seeds
    if seeds is not None and part is not None and part.is_hetero:  # a type, a split, or both
        seeds = typed_seeds_of(seeds, part.description.seeds)
    return Batches(seeds=seeds, **values_of(arguments, "num_neighbors", "batch_size", "seed"))


def _words(text: str) -> list[str]:
    return text.split(",")


def _constant(text: str) -> tuple[list[str], Any]:
    """Parses a value of ``--set``, such as ``step.seconds=0.05``.

    Returns the names before the equals sign, split at the dot, and the value: a float, or the text itself, such as a
    link's name.
    """
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"expected a constant and its value such as step.seconds=0.05, got {text!r}")
    if name.count(".") > 1:
        raise argparse.ArgumentTypeError(
            f"expected a constant, or one of a link or a step, such as step.seconds=0.05, got {reprlib.repr(text)}"
        )
    try:
        return name.split("."), float(value)
    except ValueError:
        return name.split("."), value
