"""``salientpp slurm``: prints a batch script for SLURM."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from salientpp.cli import partition, terminal
from salientpp.files import is_replaced, write_whole
from salientpp.launch import sbatch

NEEDS_TORCH = False
HELP = "print a batch script for SLURM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "salientpp slurm --parts K --time T [options] -- train.py [arguments]"
    parser.description = (
        "Print a batch script that trains with a rank per part, to read, change and keep. The training script calls "
        "salientpp.init_process_group(). With --dataset and --root the script is a chain: `bash SCRIPT` on the login node submits a job that "
        "partitions, and the training to begin after it."
    )
    parser.add_argument(
        "script", nargs="+", metavar="-- train.py", help="the training script and its arguments, without python"
    )
    parser.add_argument("--parts", type=int, required=True, metavar="K", help="number of parts of the dataset")
    parser.add_argument("--time", required=True, metavar="T", help="of the training: minutes, H:MM:SS or D-HH:MM:SS")
    parser.add_argument("--partition", metavar="P", help="SLURM's partition of the training (the cluster's default)")
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="G", help="GPUs of a host (0)")
    parser.add_argument("--ranks-per-node", type=int, metavar="R", help="ranks on a host (one per GPU, or 1)")
    parser.add_argument(
        "--ranks-per-part", type=int, default=1, metavar="R", help="ranks that share a part and split its seeds (1)"
    )
    parser.add_argument("--cpus-per-task", type=int, default=4, metavar="C", help="CPUs of a rank (4)")
    parser.add_argument(
        "--launcher", choices=sbatch.LAUNCHERS, default="srun", help="who starts the ranks of a host (srun)"
    )
    parser.add_argument(
        "--job-name", default="salientpp", metavar="NAME", help="also the beginning of the log's name (salientpp)"
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further line #SBATCH OPTION, as in --sbatch=--account=physics",
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="the interpreter on the hosts (%(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the script there rather than to stdout; an existing file is kept",
    )
    parser.add_argument(
        "--dataset", metavar="DATASET", help="partition this first, see `salientpp partition --help`; needs --root"
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        help="the dataset directory that the first job writes; where it exists, that job is left out",
    )
    parser.add_argument(
        "--partition-options",
        default="",
        metavar="TEXT",
        help="for `salientpp partition`, as in '--fanouts 15,10,5 --batch-size 1024'",
    )
    parser.add_argument(
        "--partition-cpus", type=int, default=4, metavar="C", help="CPUs of the job that partitions (4)"
    )
    parser.add_argument("--partition-time", metavar="T", help="its time (that of the training)")
    parser.add_argument("--partition-queue", metavar="P", help="SLURM's partition of it (that of the training)")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.dataset is None) != (arguments.root is None):
        raise ValueError("--dataset and --root go together: what to partition, and the directory to write")
    first = None
    if arguments.dataset is not None:
        options = _split(arguments.partition_options)
        # What that job would refuse is refused now.
        partition_parser = argparse.ArgumentParser(prog="salientpp partition")
        partition.add_arguments(partition_parser)
        first_job = partition_parser.parse_args(
            ["--parts", str(arguments.parts), *options, "--", arguments.dataset, arguments.root]
        )
        if first_job.parts != arguments.parts:
            raise ValueError(
                f"--partition-options must not have other --parts than the training, got {first_job.parts} and {arguments.parts}; leave them out there"
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
