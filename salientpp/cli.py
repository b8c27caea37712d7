"""The ``salientpp`` command: a thin face over the package.

What needs torch is in :mod:`salientpp.commands`, which is imported when one of these runs: help is there at once.

Every subcommand is a function from parsed arguments to an exit code: 0; 2 where something was refused or could not be read or written, with
one line on stderr that says what; 130 after Ctrl-C. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from salientpp import __version__, terminal
from salientpp.files import is_replaced, write_whole
from salientpp.launch import sbatch
from salientpp.launch.environment import LaunchError
from salientpp.partitioning.errors import PartitionerError, is_out_of_memory

#: What --policies may name beside the oracle: the keys of salientpp.vip.policies.POLICIES, which takes seconds to import.
POLICY_NAMES = ("degree", "halo", "paths", "random", "simulation", "vip", "vip-hop", "wpr")


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
                terminal.print_whole("")
            raise
        command = f" {parsed.command}"
        return parsed.run(parsed)
    except (ValueError, OSError, ImportError, NotImplementedError, LaunchError, PartitionerError) as error:
        terminal.complain(f"salientpp{command}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        terminal.complain(
            f"salientpp{command}: not enough memory ({str(error).splitlines()[0] if str(error) else 'no more is known'})"
        )
        return 2
    except KeyboardInterrupt:
        done = f"{', '.join(map(str, written))} had been written" if written else "nothing was written"
        left = {" stage": "the copy is not complete"}
        goes_on = (" convert", " generate", *([] if written else [" partition"]))
        left |= dict.fromkeys(goes_on, "the same command goes on after the last step that was done")
        terminal.complain(f"salientpp{command}: interrupted; {left.get(command, done)}")
        return 130


def _refuse_dashes_as_values(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """argparse takes the dashes of ``--parts=--`` out, and then fails over the value that is missing."""
    for word in words:
        if word == "--":
            return
        if match := re.fullmatch(r"(--[^=]+)=--", word):
            parser.error(f"argument {match[1]}: expected a value, got '--'")


_METHODS = (
    "what assigns vertices to parts: metis, kaminpar (an extra), random, or auto (default): kaminpar for more than 2^26 edges where it is installed, else "
    "metis; given (the assignment of pyg-partition: or glt-partition:, their default); an .npy file of part ids; or the .json of DGL's partition_graph, with "
    ",original_id=FILE.npy where DGL has numbered the vertices of your data anew"
)
_DATASETS = (
    "synthetic[:num_vertices=N,...], synthetic-mag[:num_papers=P,...] (several types), npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save "
    "wrote), python:MODULE:FUNCTION (a function of yours that returns one), converted:DIR (what `salientpp convert` wrote), pyg-partition:DIR or "
    "glt-partition:DIR[,y=FILE,train=FILE,...] (what PyG's or GLT's partitioner wrote), or a name of the Open Graph Benchmark"
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
        description="Partition a graph, order each part by vertex inclusion probability (VIP), write a dataset directory. A run that was stopped goes on where "
        "it was when the same command is given again: the assignment, the order, and every file of edges and part that was done are kept.",
    )
    cut.add_argument(
        "dataset",
        help=f"{_DATASETS} such as ogbn-products",
    )
    cut.add_argument("root", type=Path, help="the directory to write")
    cut.add_argument("--parts", type=int, required=True, metavar="K", help="number of parts, one per rank or machine")
    _add_partitioning(cut, "")
    cut.add_argument(
        "--order",
        choices=("vip", "original"),
        default="vip",
        help="of the vertices of a part: by VIP, or as in the dataset (vip)",
    )
    cut.add_argument(
        "--fanouts",
        type=_fanouts,
        default=[15, 10, 5],
        metavar="F,F,...",
        help="neighbours per hop, -1 for all, then with an equals sign: --fanouts=-1,10 (15,10,5)",
    )
    cut.add_argument("--batch-size", type=int, default=1024, metavar="B", help="seeds per batch and rank (1024)")
    cut.add_argument(
        "--seeds",
        type=_seeds,
        default="train",
        metavar="[TYPE:]SPLIT",
        help="the split that the inclusion probabilities are computed for; with several types TYPE:SPLIT, if several have it (train)",
    )
    cut.add_argument(
        "--replicate",
        action="append",
        metavar="TYPE",
        help="a type of vertices whose rows every part is to have; may be given several times (types with at most 1 %% of all rows' bytes and 16 MiB)",
    )
    cut.add_argument("--replicate-none", action="store_true", help="every row in one part alone")
    cut.add_argument(
        "--time-attr",
        metavar="NAME",
        help="node or edge times: lists are stored in their order, and node times whole, so that ranks with a copy of their part alone can draw by them",
    )
    cut.add_argument(
        "--store-as",
        type=_store_as,
        action="append",
        metavar="[TYPE:]NAME=FORMAT",
        help="store the rows of a node attribute in fewer bytes: fp16, bf16, fp8, int8, int4, or with a scale for every B values int8/B, int4/B, as in "
        "--store-as x=int8; may be given several times. What is lost is shown",
    )
    cut.add_argument("--tolerance", type=float, default=0.05, help="allowed excess of a part over the mean (0.05)")
    cut.add_argument("--seed", type=int, default=0, help="of METIS, KaMinPar or the random assignment (0)")
    cut.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="where OGB datasets are (data)")
    cut.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing dataset directory, or the work of another command that was stopped",
    )
    cut.set_defaults(run=_heavy("partition"))

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
    _add_partitioning(cost, "; a dataset directory is partitioned already")
    cost.add_argument(
        "--fanouts",
        type=_fanouts,
        action="append",
        metavar="F,F,...",
        help="neighbours per hop, -1 for all, then with an equals sign: --fanouts=-1,10 (those of the dataset directory, or 15,10,5); may be given "
        "several times",
    )
    cost.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="seeds per batch and machine (that of the dataset directory, or 1024)",
    )
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
        metavar="P,P,...",
        help=f"among {', '.join(POLICY_NAMES)}, and oracle, which no policy beats (all but vip-hop)",
    )
    cost.add_argument("--epochs", type=int, default=10, help="epochs to count (10)")
    cost.add_argument(
        "--seeds",
        metavar="[TYPE:]SPLIT",
        help="the split that batches start from: train, val, test or all (that of the dataset directory, or train); of several types of "
        "vertices TYPE:SPLIT, with --link the split of edges (all)",
    )
    hosts = cost.add_argument_group(
        "hosts with several ranks, ranks with several parts",
        "With one of these, rows from other hosts are counted for the policy vip: with private caches, with one cache per host, and with each row fetched "
        "once per host and step.",
    )
    hosts.add_argument("--ranks-per-host", type=int, metavar="R", help="ranks of a host (1)")
    hosts.add_argument(
        "--ranks-per-part", type=int, metavar="G", help="ranks that share a part and split its seeds (1)"
    )
    hosts.add_argument("--parts-per-rank", type=int, metavar="M", help="parts that a rank serves as one, at most (1)")
    ahead = cost.add_argument_group(
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
    cost.add_argument(
        "--send-as",
        type=_store_as,
        action="append",
        metavar="[TYPE:]x=FORMAT",
        help="count bytes and caches of rows that travel in this format, as the loaders' send_as (what a directory stores narrower travels so in any case)",
    )
    ways = cost.add_argument_group(
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
    cost.set_defaults(run=_heavy("analyze"))

    turn = commands.add_parser(
        "convert",
        help="turn a graph that outgrows memory into files that are mapped",
        description="Read a graph in pieces, sort its edges outside memory, and write it as files that partition and analyze map: converted:DIR. A run "
        "that was stopped goes on where it was when the same command is given again.",
    )
    turn.add_argument(
        "source",
        help="npz:FILE, pyg:FILE (a PyG Data or HeteroData that torch.save wrote), a name of the Open Graph Benchmark, or "
        "edges:FILES[,x=FILES,y=FILES,train=FILES,val=FILES,test=FILES,num_vertices=N,skip=LINES]: text, .npy or .parquet, with wildcards",
    )
    turn.add_argument("root", type=Path, help="the directory to write")
    turn.add_argument("--memory", default="4GB", metavar="BYTES", help="to have resident at most, as in 512MiB (4GB)")
    turn.add_argument(
        "--undirected",
        action=argparse.BooleanOptionalAction,
        help="every edge in both directions, each pair once; or edges as they are stored (as the dataset defines it)",
    )
    turn.add_argument("--deduplicate", action="store_true", help="each pair once")
    turn.add_argument(
        "--dtype",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=FORMAT",
        help="store an attribute as fp64, fp32, fp16, bf16 or fp8, as in --dtype x=fp16; may be given several times (as it comes)",
    )
    turn.add_argument("--finite", action="store_true", help="refuse NaN and infinity in attributes")
    turn.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="where OGB datasets are (data)")
    turn.add_argument(
        "--overwrite", action="store_true", help="replace a converted graph, or a conversion that was begun"
    )
    turn.set_defaults(run=_heavy("convert"))

    make = commands.add_parser(
        "generate",
        help="generate a graph of any size as files that are mapped",
        description="Generate an undirected graph with a power law of degrees, communities and labels that a GNN can learn, and write it as "
        "`salientpp convert` does: converted:DIR. The same arguments give the same files, whatever memory there is.",
    )
    make.add_argument("root", type=Path, help="the directory to write")
    make.add_argument("--num-vertices", type=int, required=True, metavar="N", help="number of vertices")
    make.add_argument("--average-degree", type=float, default=20.0, metavar="D", help="directed edges per vertex (20)")
    make.add_argument("--num-features", type=int, default=128, metavar="F", help="columns of x (128)")
    make.add_argument("--num-classes", type=int, default=16, metavar="Q", help="labels (16)")
    make.add_argument("--community-size", type=int, default=1000, metavar="S", help="vertices in a community (1000)")
    make.add_argument("--homophily", type=float, default=0.8, help="share of edges within a class (0.8)")
    make.add_argument("--locality", type=float, default=0.7, help="share of these within a community (0.7)")
    make.add_argument("--exponent", type=float, default=2.5, help="of the power law (2.5)")
    make.add_argument("--train-fraction", type=float, default=0.01, help="of the vertices (0.01)")
    make.add_argument(
        "--dtype", default="fp16", metavar="FORMAT", help="of the features: fp64, fp32, fp16, bf16 or fp8 (fp16)"
    )
    make.add_argument("--seed", type=int, default=0, help="of all that is drawn (0)")
    make.add_argument("--memory", default="4GB", metavar="BYTES", help="to have resident at most, as in 512MiB (4GB)")
    make.add_argument("--overwrite", action="store_true", help="replace a converted graph, or one that was begun")
    make.set_defaults(run=_heavy("generate"))

    info = commands.add_parser(
        "info", help="describe a dataset directory", description="Describe a dataset directory and check its files."
    )
    info.add_argument("root", type=Path, help="a directory that `salientpp partition` wrote")
    info.add_argument("--verify", action="store_true", help="read every byte, not only sizes and sampled checksums")
    info.set_defaults(run=_heavy("info"))

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
    copy.set_defaults(run=_heavy("stage"))

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


def _add_partitioning(parser: argparse.ArgumentParser, more: str) -> None:
    """The options that `partition` and `analyze` share."""
    parser.add_argument("--method", metavar="HOW", help=f"{_METHODS}{more}")
    parser.add_argument(
        "--edge-weights",
        choices=("vip", "equal"),
        default="vip",
        help="what metis and kaminpar minimise: the draws across the cut, or the number of edges cut (vip)",
    )
    parser.add_argument(
        "--refine",
        action=argparse.BooleanOptionalAction,
        help="move vertices while fewer rows are predicted to travel (done for parts of metis and kaminpar, of one type of vertices and at most 2^26 edges)",
    )


def _heavy(command: str) -> Callable[[argparse.Namespace], int]:
    """The command of this name, which is imported when it runs."""

    def run(arguments: argparse.Namespace) -> int:
        from salientpp.versions import check_versions

        check_versions()
        from salientpp import commands

        return getattr(commands, command)(arguments)

    return run


def _lookahead(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of batches or auto, got {text!r}") from None


def _fanouts(text: str) -> list[int]:
    try:
        return [int(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas such as 15,10,5, got {text!r}"
        ) from None


def _seeds(text: str) -> str | tuple[str, str]:
    type_, colon, split = text.rpartition(":")
    return (type_, split) if colon else text


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected a name and a value such as x=fp16, got {text!r}")
    return name, value


def _store_as(text: str) -> tuple[str | tuple[str, str], str]:
    """An attribute, or (type, attribute), and a format."""
    name, equals, format = text.rpartition("=")
    if not equals or not name or not format:
        raise argparse.ArgumentTypeError(f"expected an attribute and a format such as x=int8, got {text!r}")
    type_, colon, attribute = name.rpartition(":")
    return ((type_, attribute) if colon else name), format


def _numbers(text: str) -> list[float]:
    try:
        return [float(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas such as 0,.1,.5, got {text!r}"
        ) from None


def _slurm(arguments: argparse.Namespace) -> int:
    if (arguments.dataset is None) != (arguments.root is None):
        raise ValueError("--dataset and --root go together: what to partition, and the directory to write")
    first = None
    if arguments.dataset is not None:
        options = _split(arguments.partition_options)
        # What that job would refuse is refused now.
        partition = _parser().parse_args(
            ["partition", "--parts", str(arguments.parts), *options, "--", arguments.dataset, arguments.root]
        )
        if partition.parts != arguments.parts:
            raise ValueError(
                f"--partition-options must not have other --parts than the training, got {partition.parts} and {arguments.parts}; leave them out there"
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
        terminal.print_whole(data)
    else:
        terminal.check_outputs({"--output": arguments.output})
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


if __name__ == "__main__":
    sys.exit(main())
