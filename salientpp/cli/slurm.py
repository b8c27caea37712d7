"""``salientpp slurm``: prints a batch script for SLURM."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from salientpp.cli import partition, terminal
from salientpp.cli.shared_arguments import adder, values_of
from salientpp.files import is_replaced, write_whole
from salientpp.launch import sbatch
from salientpp.launch.storage_script import Storage

NEEDS_TORCH = False
HELP = "print a batch script for SLURM"
EXAMPLE = "salientpp slurm --parts 4 --time 2:00:00 -- train.py"


#: Help of each argument.
TEXTS = {
    "script": "training script and its arguments, without python",
    "--parts": "number of parts of the dataset",
    "--time": "time limit of the training: minutes, H:MM:SS or D-HH:MM:SS",
    "--partition": "SLURM partition of the training (default: that of the cluster)",
    "--gpus-per-node": "GPUs per host (default: 0)",
    "--ranks-per-node": "ranks per host (default: one per GPU, or 1)",
    "--ranks-per-part": "ranks that share a part and split its seeds (default: 1)",
    "--cpus-per-task": "CPUs per rank (default: 4)",
    "--launcher": "program that starts the ranks of a host: srun, or a torchrun per host (default: srun)",
    "--job-name": "name of the job; the name of its log begins with it (default: salientpp)",
    "--sbatch": "further #SBATCH line, as in --sbatch=--account=physics; may be given several times",
    "--python": "Python interpreter on the hosts (default: %(default)s)",
    "--output": "file to write the script to. An existing file is never replaced (default: stdout)",
    "--dataset": "dataset to partition first, see `salientpp partition --help`; needs --root",
    "--root": "dataset directory that the first job writes. If it exists, that job is left out. With --storage-hosts: the directory that they serve",
    "--partition-options": "options for `salientpp partition`, as in '--num-neighbors 15,10,5 --batch-size 1024'",
    "--partition-cpus": "CPUs of the job that partitions (default: 4)",
    "--partition-time": "time limit of the job that partitions (default: that of the training)",
    "--partition-queue": "SLURM partition of the job that partitions (default: that of the training)",
    "--storage-hosts": "further hosts, which hold all rows and run `salientpp serve`; needs --root (default: 0)",
    "--storage-partition": "SLURM partition of the storage hosts (default: that of the training)",
    "--storage-cpus": "CPUs of each storage host (default: 4)",
    "--storage-memory": "memory of each storage host, as in 256G (default: that of the cluster)",
    "--storage-options": "options for `salientpp serve`, as in '--copy-to /scratch'",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "salientpp slurm --parts K --time T [options] -- train.py [arguments]"
    parser.description = (
        "Print a batch script for training with one rank per part. Read it, change it and keep it. The training script must call "
        "salientpp.init_process_group(). With --dataset and --root, `bash SCRIPT` on the login node submits a job that "
        "partitions and a second job that trains afterwards. With --storage-hosts, the job has a second component of hosts without GPUs, and the training "
        "script must call salientpp.load(os.environ['SALIENTPP_STORAGE'])."
    )
    add = adder(parser, TEXTS)
    add("script", nargs="+", metavar="-- train.py")
    add("--parts", type=int, required=True, metavar="K")
    add("--time", required=True, metavar="T")
    add("--partition", metavar="P")
    add("--gpus-per-node", type=int, default=0, metavar="G")
    add("--ranks-per-node", type=int, metavar="R")
    add("--ranks-per-part", type=int, default=1, metavar="R")
    add("--cpus-per-task", type=int, default=4, metavar="C")
    add("--launcher", choices=sbatch.LAUNCHERS, default="srun")
    add("--job-name", default="salientpp", metavar="NAME")
    add("--sbatch", action="append", default=[], metavar="OPTION")
    add("--python", default=sys.executable, metavar="FILE")
    add("--output", type=Path, metavar="FILE")
    add("--dataset", metavar="DATASET")
    add("--root", metavar="DIR")
    add("--partition-options", default="", metavar="TEXT")
    add("--partition-cpus", type=int, default=4, metavar="C")
    add("--partition-time", metavar="T")
    add("--partition-queue", metavar="P")
    add("--storage-hosts", type=int, default=0, metavar="S")
    add("--storage-partition", metavar="P")
    add("--storage-cpus", type=int, default=4, metavar="C")
    add("--storage-memory", metavar="SIZE")
    add("--storage-options", default="", metavar="TEXT")


def run(arguments: argparse.Namespace) -> int:
    has_storage = arguments.storage_hosts != 0
    if arguments.root is None and has_storage:
        raise ValueError("--storage-hosts requires --root: the dataset directory that the storage hosts serve")
    if (arguments.dataset is None) != (arguments.root is None) and not has_storage:
        raise ValueError(
            "--dataset and --root require each other: the dataset to partition, and the directory to write"
        )
    first = storage = None
    if has_storage:
        storage = Storage(
            arguments.storage_hosts,
            arguments.root,
            options=_split("storage", arguments.storage_options),
            cpus=arguments.storage_cpus,
            memory=arguments.storage_memory,
            partition=arguments.storage_partition,
        )
    if arguments.dataset is not None:
        options = _split("partition", arguments.partition_options)
        # Refuse now what the job that partitions would refuse.
        partition_parser = argparse.ArgumentParser(prog="salientpp partition")
        partition.add_arguments(partition_parser)
        first_job = partition_parser.parse_args(
            ["--parts", str(arguments.parts), *options, "--", arguments.dataset, arguments.root]
        )
        if first_job.parts != arguments.parts:
            raise ValueError(
                f"--partition-options must have the same --parts as the training, {arguments.parts}, got {first_job.parts}; leave --parts out there"
            )
        first = sbatch.Partitioning(
            arguments.dataset,
            arguments.root,
            options=options,
            cpus=arguments.partition_cpus,
            time=arguments.partition_time,
            partition=arguments.partition_queue,
        )
    ranks_per_node = arguments.ranks_per_node
    passed = (
        "parts",
        "time",
        "python",
        "ranks_per_part",
        "gpus_per_node",
        "cpus_per_task",
        "partition",
        "launcher",
        "job_name",
    )
    batch = sbatch.Batch(
        arguments.script,
        ranks_per_node=max(1, arguments.gpus_per_node) if ranks_per_node is None else ranks_per_node,
        options=arguments.sbatch,
        first=first,
        storage=storage,
        **values_of(arguments, *passed),
    )
    text = sbatch.script(batch, made_by=f"salientpp {shlex.join(arguments.words)}")
    data = os.fsencode(text)  # arguments may be bytes that are not valid text
    if arguments.output is None:
        terminal.print_whole(data)
    else:
        terminal.check_outputs({"--output": arguments.output})
        if arguments.output.exists() and is_replaced(arguments.output):
            raise ValueError(
                f"--output: {arguments.output} exists and is not replaced, since you may have changed it; remove it, or choose another name"
            )
        write_whole(arguments.output, lambda file: file.write(data))
    return 0


def _split(name: str, options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ValueError(f"--{name}-options must be arguments in shell syntax, got {options!r} ({error})") from None
