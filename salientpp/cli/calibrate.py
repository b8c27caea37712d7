"""``salientpp calibrate``: measures the constants of the machines on the ranks of a job, and writes them to a file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import adder, num_neighbors_of, typed_seeds_of

if TYPE_CHECKING:  # importing torch takes seconds
    import torch

    from salientpp.engine.basis import Basis
    from salientpp.ranks.comm import Comm
    from salientpp.store.directory.opened import PartitionedGraph
    from salientpp.ways.planner.machines import Link, Machines

HELP = "measure the machines of a job, for plans of memory and time"
EXAMPLE = "srun salientpp calibrate DIR --step train.py:make_step"


#: Help of each argument.
TEXTS = {
    "root": "dataset directory that `salientpp partition` wrote",
    "--num-neighbors": "fanouts, nearest the seeds first, as in 15,10,5 (default: those of the directory)",
    "--batch-size": "seeds in a batch (default: that of the directory)",
    "--seeds": "split that batches start from, with several vertex types TYPE:SPLIT (default: that of the directory)",
    "--step": "your training step: FUNCTION(part) in FILE.py returns step(batch), or (step, module) if the ranks average the gradients of module "
    "(default: no step is measured)",
    "--device": "device of the batches, such as cpu or cuda (default: the GPU of the rank, or the CPU)",
    "--ranks-per-host": "ranks on each host (default: the number that torchrun or SLURM states)",
    "--between": "speed of the link of a host, which its ranks share, instead of a measurement: a name such as 10GbE, or BYTES_PER_SECOND[:DELAY], as in "
    "1.25e9:5e-5. Needed if all ranks are on one host",
    "--seconds": "approximate time of all measurements (default: 20)",
    "--json": "file to write (default: machines.json)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure cores, links, the costs of loading and your training step, on all ranks of a job at the same time. Start the command on every rank "
        "(srun, torchrun), as you start your training. Rank 0 writes the file, which `salientpp plan` reads, and a loader with "
        "`memory={'machines': FILE}`. A single process can measure everything except links."
    )
    add = adder(parser, TEXTS)
    add("root", type=Path)
    add("--num-neighbors", type=num_neighbors_of, metavar="F,F,...")
    add("--batch-size", type=int, metavar="B")
    add("--seeds", metavar="[TYPE:]SPLIT")
    add("--step", metavar="FILE.py:FUNCTION")
    add("--device", metavar="D")
    add("--ranks-per-host", type=int, metavar="R")
    add("--between", metavar="LINK")
    add("--seconds", type=float, default=20.0, metavar="S")
    add("--json", type=Path, default=Path("machines.json"), metavar="FILE")


def run(arguments: argparse.Namespace) -> int:
    import torch.distributed as dist

    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.launch.rendezvous import init_process_group
    from salientpp.progress import Progress
    from salientpp.ranks.comm import Comm
    from salientpp.ranks.failure import RankFailure

    with warnings_in_lines("calibrate"):
        launch = init_process_group("gloo" if arguments.device == "cpu" else None)
        comm = Comm.create()
        try:
            with shown_progress(lines=False) if comm.rank == 0 else contextlib.nullcontext(Progress()) as progress:
                progress.begin(f"measuring for about {arguments.seconds:g} s")
                machines = _measured(arguments, comm, launch.device)
        except RankFailure as failure:
            raise ValueError(str(failure)) from None
        if comm.rank == 0:
            machines.write(arguments.json)
            arguments.written.append(arguments.json)
            terminal.show(*_table(machines, arguments.json))
        if comm.size > 1:
            dist.destroy_process_group()
    return 0


def _measured(arguments: argparse.Namespace, comm: Comm, device: torch.device) -> Machines:
    from salientpp import __version__
    from salientpp.ways.planner.calibrate import calibrate
    from salientpp.ways.planner.machines import Link

    with comm.together("calibrate"):
        between, part, make_step = _checked(arguments, comm.rank)
    basis = _basis(arguments, part, device)
    ranks_by_host = basis.source.exchange.placement.ranks_by_host
    if between is not None:
        between = Link(between.bytes_per_second / max(ranks_by_host), between.delay)
    elif len(ranks_by_host) == 1:
        here = "this is a single process" if comm.size == 1 else f"all {comm.size} ranks are on one host"
        raise ValueError(
            f"--between is required, because {here}, which cannot measure the link between hosts; pass its name or rate, as in "
            "--between=10GbE or --between=1.25e9, or start ranks on at least two hosts (srun, torchrun)"
        )
    step, gradient_bytes = None, 0.0
    if make_step is not None:
        # A mistake is told at once: the function may have begun a collective with the other ranks.
        try:
            step, gradient_bytes = _step(arguments.step, make_step(part), comm.size)
        except BaseException as error:
            comm.report_failure(f"rank {comm.rank} could not make its step: {type(error).__name__}: {error}")
            raise
        comm.gather_numbers([0])
    return calibrate(
        basis,
        step,
        seconds=arguments.seconds,
        between=between,
        gradient_bytes=gradient_bytes,
        about={"salientpp": __version__},
    )


def _checked(
    arguments: argparse.Namespace, rank: int
) -> tuple[Link | None, PartitionedGraph, Callable[[Any], Any] | None]:
    """Checks the arguments. Returns the link of ``--between``, the opened graph, and the function of ``--step``; None for an option that is not given."""
    from salientpp.store.directory.load import load

    if rank == 0:
        terminal.check_outputs({"--json": arguments.json})
    between = None if arguments.between is None else link_of(arguments.between)
    make_step = None if arguments.step is None else _function(arguments.step)
    return between, load(arguments.root), make_step


def link_of(text: str, option: str = "--between") -> Link:
    """Returns the network link that ``text`` names, such as 10GbE, or a link with the rate and delay in ``text``.

    Raises:
        ValueError: ``text`` is anything else. The error names ``option``.
    """
    from salientpp.ways.planner.machines import LINKS, Link

    if text in LINKS:
        return LINKS[text]
    try:
        rate, _, delay = text.partition(":")
        found = Link(float(rate), float(delay or 0))
        if 0 < found.bytes_per_second < float("inf") and 0 <= found.delay < float("inf"):
            return found
    except ValueError:
        pass
    raise ValueError(
        f"{option} must be one of {', '.join(LINKS)}, or BYTES_PER_SECOND[:DELAY in seconds] such as 1.25e9:5e-5, got {text!r}"
    )


def _function(text: str) -> Callable[[Any], Any]:
    """Returns the function that FILE.py:NAME names."""
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name:
        raise ValueError(f"--step must be FILE.py:FUNCTION, such as train.py:make_step, got {text!r}")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--step: {file} does not exist; pass the path of a Python file that this rank can read")
    sys.path.insert(0, str(file.parent.absolute()))  # as for a script, so that it can import files beside it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    with _named(f"--step: {file}"):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--step: {file} must have a function {name}(part), and it has none")

    def make_step(part: PartitionedGraph) -> Any:
        with _named(f"--step: {text}"):
            return function(part)

    return make_step


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns an error of the user's code into a ValueError that names the code and the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        is_exit = isinstance(error, SystemExit)
        said = f"called sys.exit({error.code!r})" if is_exit else f"raised {type(error).__name__}: {error}"  # type: ignore[union-attr]
        frames = traceback.extract_tb(error.__traceback__)[1:]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ValueError(f"{what} {said}{at}; a step must return") from error


def _step(text: str, made: Any, num_ranks: int) -> tuple[Callable[[Any], Any], float]:
    """Returns the user's training step, and the bytes of gradients that a rank receives in each step."""
    import torch

    step, module = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(step) or not (module is None or isinstance(module, torch.nn.Module)):
        raise ValueError(f"--step: {text} must return step(batch), or (step, module), got {type(made).__name__}")
    num_bytes = 0 if module is None else sum(each.nbytes for each in module.parameters() if each.requires_grad)
    # A ring of ranks adds the gradients and then distributes the sums. Each rank receives (K - 1) / K of them in both.
    what = f"the step of --step={text}"

    def named(batch: Any) -> Any:
        with _named(what):
            return step(batch)

    return named, 2 * (num_ranks - 1) / num_ranks * num_bytes


def _basis(arguments: argparse.Namespace, part: PartitionedGraph, device: torch.device) -> Basis:
    """Makes a loader to measure with, and returns its basis. The loader can send sums instead of rows, if its batches allow them. Collective."""
    from salientpp.analysis.batches import Batches
    from salientpp.loader.node_loader import NeighborLoader

    batches = Batches(arguments.num_neighbors, arguments.batch_size)
    filled, seeds = batches.filled(part), typed_seeds_of(arguments.seeds or "", part.description.seeds)
    options: dict[str, Any] = {
        "batch_size": filled.batch_size,
        "shuffle": True,
        "seed": 0,
        "device": arguments.device or device,
        "ranks_per_host": arguments.ranks_per_host,
    }
    try:
        loader = NeighborLoader(
            part, filled.num_neighbors, seeds if part.is_hetero else seeds[1], partial_aggregation="mean", **options
        )
    except ValueError:  # on all ranks; if sums are not the reason, the error comes again
        loader = NeighborLoader(part, filled.num_neighbors, seeds if part.is_hetero else seeds[1], **options)
    return loader.engine.basis


def _table(machines: Machines, path: Path) -> list[Any]:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    about, step = machines.about, machines.step
    num_ranks, num_hosts = about["ranks"], about["hosts"]
    hosts = f"{num_ranks} rank{'s' * (num_ranks > 1)} on {num_hosts} host{'s' * (num_hosts > 1)}"
    rows = [
        ("measured on", f"{hosts}, in {about['seconds']:g} s"),
        ("cores of a rank", f"{machines.cores:.2f}"),
        ("link between hosts", _link(machines.between)),
        ("link within a host", _link(machines.within) + _default(machines, "within")),
    ]
    if machines.to_device:
        rows.append(("copies to the device", f"{machines.to_device / 1e9:.1f} GB/s"))
    rows += [
        ("draw", f"{machines.draw * 1e9:.1f} ns per edge"),
        ("gather", f"{machines.row * 1e9:.1f} ns per row and {machines.byte * 1e12:.0f} ns per 1000 bytes"),
        ("send or receive", f"{machines.wire * 1e12:.0f} ns per 1000 bytes" + _default(machines, "wire")),
        ("batch", f"{machines.batch * 1e3:.3f} ms"),
        ("lookahead", f"{machines.look_ahead * 1e9:.0f} ns per vertex" + _default(machines, "look_ahead")),
        ("sums", f"{machines.sum * 1e9:.0f} ns per edge of the last hop" + _default(machines, "sum")),
    ]
    if step is None:
        rows.append(("training step", "not measured; pass --step"))
    else:
        gradients = f", {step.gradient_bytes / 1e6:.2f} MB of gradients" if step.gradient_bytes else ""
        words = f"{step.seconds * 1e3:.2f} ms with {step.edges:,.0f} edges{gradients}"
        rows.append(("training step", words))
    for row in rows:
        grid.add_row(*map(terminal.printable, row))
    return [grid, f"written to {terminal.printable(str(path))}"]


def _link(link: Link) -> str:
    return f"{link.bytes_per_second / 1e6:,.1f} MB/s, {link.delay * 1e3:.3f} ms per exchange"


def _default(machines: Machines, name: str) -> str:
    """Returns " (not measured)" if a constant has its default value, else an empty text."""
    return " (not measured)" if getattr(machines, name) == getattr(type(machines), name) else ""
