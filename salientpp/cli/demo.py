"""``salientpp demo``: shows on this machine, in less than a minute, what a VIP cache saves."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import add_json, adder, files_of

if TYPE_CHECKING:
    from rich.table import Table

    from salientpp.analysis.result import Analysis
    from salientpp.progress import Progress

HELP = "train on two ranks of this machine, and show what a cache saves"
EXAMPLE = "salientpp demo"
FANOUTS, BATCH_SIZE, EPOCHS, PARTS, SEED = (10, 5), 64, 3, 2, 0
#: Cache sizes that are counted, and the one that the second training run has.
ALPHAS, ALPHA = (0.0, 0.05, 0.1, 0.2, 0.4), 0.2

TEXTS = {
    "--vertices": "number of vertices of the generated graph (default: 50,000)",
    "--plot": "draw the fetched rows over the size of the cache, as .png or .svg (default: salientpp-demo.png, unless matplotlib is missing)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Generates a graph and partitions it in two. Counts the rows that two ranks will fetch from each other, for several caches. Then "
        "two ranks train a GraphSAGE without a cache and with one. The rows that they fetch are those that were counted."
    )
    add = adder(parser, TEXTS)
    add("--vertices", type=int, default=50_000, metavar="N")
    add("--plot", type=Path, metavar="FILE")
    add_json(parser, "all counted and fetched rows")


def run(arguments: argparse.Namespace) -> int:
    from salientpp.analysis.report import check_plot, draw, picture
    from salientpp.cli.progress import shown_progress

    started = time.perf_counter()
    files = files_of(arguments, "json")
    drawn = {"plot": arguments.plot or Path("salientpp-demo.png")}
    try:
        check_plot(drawn["plot"])
    except ImportError as error:
        if arguments.plot:
            raise
        terminal.complain(f"salientpp demo: {error}")
        drawn.clear()
    terminal.check_outputs({f"--{name}": path for name, path in drawn.items()})
    with tempfile.TemporaryDirectory(prefix="salientpp-demo-") as folder:
        with shown_progress(lines=False) as progress:
            analysis, words = _counted(arguments.vertices, Path(folder, "parts"), progress)
        terminal.show(words, "", _table_of_counts(analysis), "")
        with shown_progress(lines=False) as progress:
            progress.begin(f"training on {PARTS} ranks without and with a cache")
            trained = _trained(Path(folder))
    terminal.finish(
        drawn | files,
        {
            "plot": lambda: picture(partial(draw, analysis), drawn["plot"]),
            "json": lambda: (json.dumps({"analysis": analysis.to_dict(), "ranks": trained}, indent=1) + "\n").encode(),
        },
        arguments.written,
        lambda: [
            _table_of_runs(analysis, trained),
            "",
            _words_of_batches(trained),
            *(f"The plot is in {path}." for path in drawn.values()),
            'In your script: salientpp.nn.trim(model), and memory="8GiB" for the loader.',
            f"{time.perf_counter() - started:.0f} s",
        ],
    )
    return 0


def _counted(num_vertices: int, root: Path, progress: Progress) -> tuple[Analysis, str]:
    """Generates and partitions a graph. Returns the analysis of the rows that its batches will fetch, and a line that describes the graph."""
    from salientpp.analysis.analyze import Ways, analyze
    from salientpp.analysis.batches import Batches
    from salientpp.datasets import synthetic
    from salientpp.store.directory.writer import partition

    progress.begin("generating a graph")
    data = synthetic(num_vertices=num_vertices, num_features=64, seed=SEED)
    part = partition(data, PARTS, root, list(FANOUTS), BATCH_SIZE, seed=SEED, progress=progress)
    batches = Batches(list(FANOUTS), BATCH_SIZE, "train", epochs=EPOCHS, seed=SEED)
    analysis = analyze(part, batches, Ways(["vip", "degree", "random"], ALPHAS), progress=progress)
    words = f"{data.num_nodes:,} vertices, {data.num_edges:,} edges, in {PARTS} parts. Each rank keeps one part's feature rows."
    return analysis, words


def _trained(folder: Path) -> list[list[dict[str, Any]]]:
    """Trains on two ranks, and returns the reports of each, without and with the cache.

    Raises:
        OSError: a rank failed; its own error is on stderr.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PARTS}"]
    command += ["-m", "salientpp.cli.demo_rank", str(folder)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode != 0:
        raise OSError(
            f"the training on {PARTS} ranks failed (exit status {done.returncode}); the error of the rank is above"
        )
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PARTS)]


def _table_of_counts(analysis: Analysis) -> Table:
    """Returns a table: one line for each size of the cache, with a bar for the rows that are fetched with VIP."""
    from rich.bar import Bar

    table = _table("Rows that the two ranks will fetch per epoch (counted)", "cache", "VIP", "degree", "random")
    table.add_column("", width=24)
    volumes = {
        (each.policy, each.replication_factor): each.remote_rows_per_epoch or 0.0 for each in analysis.of(way="cache")
    }
    most = volumes["vip", 0.0]
    for alpha in ALPHAS:
        counts = [volumes[policy, alpha] for policy in ("vip", "degree", "random")]
        table.add_row(_cache(alpha), *(f"{count:,.0f}" for count in counts), Bar(most, 0, counts[0], width=24))
    return table


def _table_of_runs(analysis: Analysis, trained: list[list[dict[str, Any]]]) -> Table:
    """Returns a table: one line for each training run, with counted and fetched rows, and what the model learnt."""
    titles = ("cache", "rows counted", "rows fetched", "MB", "last loss", "accuracy")
    table = _table("Training without and with a cache (VIP), rows per epoch", *titles)
    for index, alpha in enumerate((0.0, ALPHA)):
        counted = analysis.of(way="cache", policy="vip", replication_factor=alpha)[0].remote_rows_per_epoch or 0.0
        of_ranks = [report[index] for report in trained]
        table.add_row(
            _cache(alpha),
            f"{counted:,.0f}",
            f"{sum(each['rows'] for each in of_ranks) / EPOCHS:,.0f}",
            f"{sum(each['bytes'] for each in of_ranks) / EPOCHS / 1e6:.1f}",
            f"{of_ranks[0]['losses'][-1]:.3f}",
            f"{of_ranks[0]['accuracy']:.3f}",
        )
    return table


def _words_of_batches(trained: list[list[dict[str, Any]]]) -> str:
    same = all(without["losses"] == cached["losses"] for without, cached in trained)
    if not same:
        raise RuntimeError("the losses of the two runs differ, but a cache must not change batches; please report this")
    return "All losses of the two runs are equal to the last bit: a cache changes no batch."


def _cache(alpha: float) -> str:
    """Returns the size of a cache as text, such as "10% of a part"."""
    return f"{alpha:.0%} of a part" if alpha else "none"


def _table(title: str, *columns: str) -> Table:
    from rich import box

    from salientpp.tables import FittedTable

    table = FittedTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
