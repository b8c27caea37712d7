"""The ``salientpp`` command: a thin face over the package.

Every subcommand is a function from parsed arguments to an exit code: 0; 2 where something was refused or could not be read or written, with
one line on stderr that says what; 130 after Ctrl-C. Anything else is a bug and shows its traceback.

What goes to stdout is put together first and written at once, after the files: a terminal that cannot show it, a pipe that was closed or
a full disk must not take the results of the work along.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch_geometric.data import HeteroData

from salientpp import __version__
from salientpp.analysis import report
from salientpp.analysis.volume import DEFAULT_POLICIES, analyze, check_request
from salientpp.datasets import load_dataset
from salientpp.datasets.load import is_partition, load_given
from salientpp.files import check_output, is_replaced, write_whole
from salientpp.launch import sbatch
from salientpp.launch.environment import LaunchError, detect
from salientpp.plan.cache import POLICIES
from salientpp.plan.placement import parts_of
from salientpp.plan.vip import check_fanouts
from salientpp.store.directory.local_copy import stage
from salientpp.store.directory.manifest import parts_there
from salientpp.store.directory.opened import PartitionedGraph, load
from salientpp.store.directory.writer import partition


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(AttributeError, ValueError):  # no stdout, a closed one, or one that is no file
        # An α on a terminal that has none. Not every stdout is a TextIOWrapper: see above.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    command = ""
    written: list[Path] = []
    try:
        parser = _parser()
        _refuse_dashes_as_values(parser, words)
        try:
            parsed = parser.parse_args(words, argparse.Namespace(words=words, written=written))
        except SystemExit as end:
            if not end.code:  # help or the version was asked for
                _print("")
            raise
        command = f" {parsed.command}"
        return parsed.run(parsed)
    except (ValueError, OSError, ImportError, NotImplementedError, LaunchError) as error:
        _complain(f"salientpp{command}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # torch has no type for it
            raise
        _complain(
            f"salientpp{command}: not enough memory ({str(error).splitlines()[0] if str(error) else 'no more is known'})"
        )
        return 2
    except KeyboardInterrupt:
        done = f"{', '.join(map(str, written))} had been written" if written else "nothing was written"
        _complain(f"salientpp{command}: interrupted; {'the copy is not complete' if command == ' stage' else done}")
        return 130


def _refuse_dashes_as_values(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """argparse takes the dashes of ``--parts=--`` out, and then fails over the value that is missing."""
    for word in words:
        if word == "--":
            return
        if match := re.fullmatch(r"(--[^=]+)=--", word):
            parser.error(f"argument {match[1]}: expected a value, got '--'")


def _print(what: str | bytes) -> None:
    """Write to stdout, all of it.

    Raises:
        OSError: stdout is closed or full.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise OSError("stdout is closed, so the result could not be printed")
    try:
        if isinstance(what, str):
            sys.stdout.write(what)
        elif hasattr(sys.stdout, "buffer"):
            sys.stdout.flush()
            sys.stdout.buffer.write(what)
        else:
            sys.stdout.write(os.fsdecode(what))
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # else Python tries once more when it ends, with a text and an exit code of its own
        raise OSError(
            f"the result could not be printed: stdout cannot be written ({error.strerror or error})"
        ) from None


def _show(*what: RenderableType) -> None:
    """Lines and tables on stdout; users' paths in them may have brackets and colons, which are no markup."""
    text = _Terminal()
    console = Console(file=text, markup=False, emoji=False, highlight=False)
    for renderable in what:
        console.print(renderable)
    _print(text.getvalue())


class _Terminal(io.StringIO):
    """Collects what is meant for stdout, and passes for it: with its letters, and colours where it has them."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # that of stdout, which may change
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def _complain(text: str) -> None:
    """One line on stderr. Names of files may have line breaks and bytes that are no text; a closed stderr is no reason to fail."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(_printable(text), file=sys.stderr)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


_DATASETS = (
    "synthetic[:num_vertices=N,...], npz:FILE, pyg:FILE (a PyG Data that torch.save wrote), python:MODULE:FUNCTION (a function of yours that "
    "returns a Data), pyg-partition:DIR or glt-partition:DIR[,y=FILE,train=FILE,...] (what PyG's or GLT's partitioner wrote), or a name of the Open "
    "Graph Benchmark"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="salientpp",
        description="Train graph neural networks on graphs that outgrow one machine: offline tools.",
        epilog="Exit status: 0; 2 where something was refused or could not be read or written, which one line on stderr says; 130 after Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"salientpp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cut = commands.add_parser(
        "partition",
        help="partition a graph and write a dataset directory",
        description="Partition a graph, order each part by vertex inclusion probability (VIP), write a dataset directory.",
    )
    cut.add_argument(
        "dataset",
        help=f"{_DATASETS} such as ogbn-products",
    )
    cut.add_argument("root", type=Path, help="the directory to write")
    cut.add_argument("--parts", type=int, required=True, metavar="K", help="number of parts, one per rank or machine")
    cut.add_argument(
        "--partition",
        metavar="HOW",
        help="metis-vip (default), metis, random, given (that of pyg-partition: or glt-partition:, their default), or an .npy file of part ids [N]",
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

    cost = commands.add_parser(
        "analyze",
        help="what would a cache save on this graph?",
        description="A graph of N vertices is spread over K machines; a batch fetches the feature rows that its machine lacks. Count "
        "them for every policy of choosing rows to cache and every replication factor α (each machine caches α N / K rows of others), "
        "forecast them by vertex inclusion probability (VIP), and advise on α and on the GPU fraction β (the share of its own rows "
        "that a machine keeps in GPU memory). One machine without a GPU is enough.",
    )
    cost.add_argument("dataset", help=f"a dataset directory, {_DATASETS}")
    cost.add_argument("--parts", type=int, metavar="K", help="number of machines; a dataset directory knows its own")
    cost.add_argument(
        "--partition",
        metavar="HOW",
        help="metis-vip (default), metis, random, given (that of pyg-partition: or glt-partition:, their default), or an .npy file of part ids; a dataset "
        "directory is partitioned already",
    )
    cost.add_argument(
        "--fanouts",
        type=_fanouts,
        action="append",
        metavar="F,F,...",
        help="neighbours per hop, -1 for all, then with an equals sign: --fanouts=-1,10 (15,10,5); may be given several times",
    )
    cost.add_argument("--batch-size", type=int, default=1024, metavar="B", help="seeds per batch and machine (1024)")
    cost.add_argument(
        "--replication-factors",
        type=_numbers,
        default=[0, 0.01, 0.05, 0.1, 0.2, 0.5, 1],
        metavar="α,α,...",
        help="sizes of the cache to try; 0 is none, K - 1 would hold everything (0,.01,.05,.1,.2,.5,1)",
    )
    cost.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=list(DEFAULT_POLICIES),
        metavar="P,P,...",
        help=f"among {', '.join(sorted(POLICIES))}, and oracle, which no policy beats (all but vip-hop)",
    )
    cost.add_argument("--epochs", type=int, default=10, help="epochs to count (10)")
    cost.add_argument(
        "--seeds", default="train", help="the split that batches start from: train, val, test or all (train)"
    )
    cost.add_argument(
        "--predict-only",
        action="store_true",
        help="no sampling: VIP's forecast alone; METIS still takes its minutes on a large graph that is not partitioned yet",
    )
    cost.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    cost.add_argument("--csv", type=Path, metavar="FILE", help="write the first table, a line per cell")
    cost.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows over α, .png or .svg (needs matplotlib)")
    cost.add_argument("--seed", type=int, default=0, help="of batches and partition (0)")
    cost.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="where OGB datasets are (data)")
    cost.set_defaults(run=_analyze)

    info = commands.add_parser(
        "info", help="describe a dataset directory", description="Describe a dataset directory and check its files."
    )
    info.add_argument("root", type=Path, help="a directory that `salientpp partition` wrote")
    info.add_argument("--verify", action="store_true", help="read every byte, not only sizes and sampled checksums")
    info.set_defaults(run=_info)

    copy = commands.add_parser(
        "stage",
        help="copy what this host needs of a dataset directory to its own disk",
        description="Copy what this rank needs of a dataset directory (the topology and its own part) to a disk of its host, and verify the copy. "
        "Started on every rank of a job (srun, torchrun) it copies the parts of that rank; several ranks of a host may share a copy. "
        "The path of the copy, for salientpp.load, is the one line on stdout.",
    )
    copy.add_argument("root", type=Path, help="a directory that `salientpp partition` wrote")
    copy.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="where to put the copy, as DIR/NAME; on a cluster often $TMPDIR",
    )
    copy.add_argument(
        "--part",
        type=int,
        action="append",
        metavar="P",
        help="a part to copy, rather than this rank's; may be given several times",
    )
    copy.set_defaults(run=_stage)

    batch = commands.add_parser(
        "slurm",
        help="print a batch script for SLURM",
        usage="salientpp slurm --parts K --time T [options] -- train.py [arguments]",
        description="Print a batch script that trains with a rank per part, to read, change and keep. The training script calls "
        "salientpp.init_process_group(). With --dataset and --root the script is a chain: `bash SCRIPT` on the login node submits a job that "
        "partitions, and the training to begin after it.",
    )
    batch.add_argument(
        "script", nargs="+", metavar="-- train.py", help="the training script and its arguments, without python"
    )
    batch.add_argument("--parts", type=int, required=True, metavar="K", help="number of parts of the dataset")
    batch.add_argument("--time", required=True, metavar="T", help="of the training: minutes, H:MM:SS or D-HH:MM:SS")
    batch.add_argument("--partition", metavar="P", help="SLURM's partition of the training (the cluster's default)")
    batch.add_argument("--gpus-per-node", type=int, default=0, metavar="G", help="GPUs of a host (0)")
    batch.add_argument("--ranks-per-node", type=int, metavar="R", help="ranks on a host (one per GPU, or 1)")
    batch.add_argument(
        "--ranks-per-part", type=int, default=1, metavar="R", help="ranks that share a part and split its seeds (1)"
    )
    batch.add_argument("--cpus-per-task", type=int, default=4, metavar="C", help="CPUs of a rank (4)")
    batch.add_argument(
        "--launcher", choices=sbatch.LAUNCHERS, default="srun", help="who starts the ranks of a host (srun)"
    )
    batch.add_argument(
        "--job-name", default="salientpp", metavar="NAME", help="also the beginning of the log's name (salientpp)"
    )
    batch.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further line #SBATCH OPTION, as in --sbatch=--account=physics",
    )
    batch.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="the interpreter on the hosts (%(default)s)"
    )
    batch.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the script there rather than to stdout; an existing file is kept",
    )
    batch.add_argument(
        "--dataset", metavar="DATASET", help="partition this first, see `salientpp partition --help`; needs --root"
    )
    batch.add_argument(
        "--root",
        metavar="DIR",
        help="the dataset directory that the first job writes; where it exists, that job is left out",
    )
    batch.add_argument(
        "--partition-options",
        default="",
        metavar="TEXT",
        help="for `salientpp partition`, as in '--fanouts 15,10,5 --batch-size 1024'",
    )
    batch.add_argument("--partition-cpus", type=int, default=4, metavar="C", help="CPUs of the job that partitions (4)")
    batch.add_argument("--partition-time", metavar="T", help="its time (that of the training)")
    batch.add_argument("--partition-queue", metavar="P", help="SLURM's partition of it (that of the training)")
    batch.set_defaults(run=_slurm)
    return parser


def _fanouts(text: str) -> list[int]:
    try:
        return [int(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas such as 15,10,5, got {text!r}"
        ) from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas such as 0,.1,.5, got {text!r}"
        ) from None


def _method(text: str | None, dataset: str) -> str | torch.Tensor | None:
    """--partition: a method's name, or the assignment in a file; None: that of the dataset itself."""
    if text is None:
        text = "given" if is_partition(dataset) else "metis-vip"
    if text == "given":
        if not is_partition(dataset):
            raise ValueError(
                f"--partition given is for datasets that are partitioned, pyg-partition:DIR and glt-partition:DIR, got {dataset}"
            )
        return None
    if text in ("metis", "metis-vip", "random"):
        return text
    try:
        if Path(text).exists() and not Path(text).is_file():
            raise ValueError("not a file")  # a pipe would be waited for
        array = np.load(text, allow_pickle=False)
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except Exception as error:  # what a damaged file makes numpy raise is not documented
        raise ValueError(
            f"--partition must be metis, metis-vip, given, random or an .npy file of part ids, got {text} ({error})"
        ) from None


def _graph(arguments: argparse.Namespace, method: Any) -> list[Any]:
    """The graph, and the method or the assignment."""
    if method is None:
        return [*load_given(arguments.dataset, arguments.parts)]
    return [load_dataset(arguments.dataset, root=arguments.data), method]


def _partition(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True)
    if arguments.root.exists() and not arguments.overwrite:
        raise ValueError(f"{arguments.root} exists; pass --overwrite to replace it, or choose another directory")
    check_fanouts(arguments.fanouts)
    method: Any = _method(arguments.partition, arguments.dataset)
    started = time.perf_counter()
    with console.status("") as status:

        def on_step(step: str) -> None:
            _complain(f"{time.perf_counter() - started:7.1f} s  {step}")
            status.update(Text(_printable(step)))

        on_step(f"loading {arguments.dataset}")
        data, method = _graph(arguments, method)
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
        arguments.written.append(arguments.root)
        on_step("done")
    _show(*_description(part))
    return 0


def _analyze(arguments: argparse.Namespace) -> int:
    # Whatever can be wrong is said before the minutes of work.
    files = {option: path for option in ("json", "csv", "plot") if (path := getattr(arguments, option)) is not None}
    _check_outputs({f"--{option}": path for option, path in files.items()})
    if arguments.plot is not None:
        if arguments.plot.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"--plot must end in .png or .svg, got {arguments.plot}")
        report.check_matplotlib()
    method: Any = _method(arguments.partition, arguments.dataset)
    is_directory = (Path(arguments.dataset) / "manifest.json").is_file()
    if arguments.parts is None and not is_directory:
        raise ValueError(f"--parts is needed: {arguments.dataset} is not a dataset directory, which knows its own")
    fanouts = arguments.fanouts or [[15, 10, 5]]
    check_request(
        fanouts,
        arguments.batch_size,
        arguments.replication_factors,
        arguments.policies,
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
        graph: list[Any] = [load(arguments.dataset), "metis-vip"] if is_directory else _graph(arguments, method)
        if isinstance(graph[0], HeteroData):
            raise ValueError(
                f"{arguments.dataset} has several types of vertices, and only homogeneous graphs are analyzed"
            )
        analysis = analyze(
            # No name for it here: the analysis frees what it does not need.
            graph.pop(0),
            arguments.parts,
            name=arguments.dataset,
            method=graph.pop(),
            fanouts=fanouts,
            batch_size=arguments.batch_size,
            replication_factors=arguments.replication_factors,
            policies=arguments.policies,
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
        _show(*lines)
    except OSError as error:
        failed.append(str(error))
    if failed:
        raise OSError("; ".join(failed))
    return 0


def _check_outputs(paths: dict[str, Path]) -> None:
    """Raise ValueError unless each option's file can be written, and beside the others."""
    names: dict[str, str] = {}
    for option, path in paths.items():
        try:
            check_output(path)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
        other = names.setdefault(os.path.realpath(path), option)
        if other != option and is_replaced(path):
            raise ValueError(f"{other} and {option} name the same file, {path}; give them names of their own")


def _info(arguments: argparse.Namespace) -> int:
    part = load(arguments.root, verify="full" if arguments.verify else "quick")
    _show(
        *_description(part),
        "every byte matches its checksum"
        if arguments.verify
        else "sizes and sampled checksums match; --verify reads all",
    )
    return 0


def _stage(arguments: argparse.Namespace) -> int:
    root, parts = arguments.root, arguments.part
    if parts is None:
        launch, num_parts = detect(), load(root).num_parts
        if launch.launcher == "none" and num_parts > 1:
            raise ValueError(
                f"{root} has {num_parts} parts, and this process is no rank of a job, which would say which of them to copy; "
                "start it with `srun salientpp stage ...`, or name them with --part"
            )
        parts = parts_of(launch.rank, launch.world_size, num_parts)
    copy = stage(root, arguments.to, parts=parts, on_step=lambda step: _complain(f"copying {step}"))
    _print(os.fsencode(f"{copy}\n"))  # as it is on disk, for a script that reads it
    return 0


def _slurm(arguments: argparse.Namespace) -> int:
    if (arguments.dataset is None) != (arguments.root is None):
        raise ValueError("--dataset and --root go together: what to partition, and the directory to write")
    first = None
    if arguments.dataset is not None:
        options = _split(arguments.partition_options)
        # What that job would refuse is refused now.
        _parser().parse_args(
            ["partition", "--parts", str(arguments.parts), *options, "--", arguments.dataset, arguments.root]
        )
        first = sbatch.Partitioning(
            arguments.dataset,
            arguments.root,
            options=options,
            cpus=arguments.partition_cpus,
            time=arguments.partition_time,
            partition=arguments.partition_queue,
        )
    batch = sbatch.Batch(
        arguments.script,
        parts=arguments.parts,
        time=arguments.time,
        python=arguments.python,
        ranks_per_part=arguments.ranks_per_part,
        ranks_per_node=max(1, arguments.gpus_per_node)
        if arguments.ranks_per_node is None
        else arguments.ranks_per_node,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_task=arguments.cpus_per_task,
        partition=arguments.partition,
        launcher=arguments.launcher,
        job_name=arguments.job_name,
        options=arguments.sbatch,
        first=first,
    )
    text = sbatch.script(batch, made_by=f"salientpp {shlex.join(arguments.words)}")
    data = os.fsencode(text)  # arguments as they came, also those that are no text
    if arguments.output is None:
        _print(data)
    else:
        _check_outputs({"--output": arguments.output})
        if arguments.output.exists() and is_replaced(arguments.output):
            raise ValueError(
                f"--output: {arguments.output} exists, and you may have changed it; remove it, or choose another name"
            )
        write_whole(arguments.output, lambda file: file.write(data))
    return 0


def _split(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ValueError(f"--partition-options must be arguments as in a shell, got {options!r} ({error})") from None


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
        grid.add_row(name, _printable(value))
    table = Table("part", "vertices", *manifest["splits"])
    for column in table.columns:
        column.justify = "right"
    for part_id in range(part.num_parts):
        counts = [counts[part_id] for counts in manifest["splits"].values()]
        table.add_row(str(part_id), *(f"{count:,}" for count in [part.book.size_of(part_id), *counts]))
    return [grid, table]


if __name__ == "__main__":
    sys.exit(main())
