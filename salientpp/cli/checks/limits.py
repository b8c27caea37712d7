"""Checks of cores, memory and the limits of a process."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator

from salientpp.cli.checks.finding import Finding, Machine

_GB = 1e9
#: Less than this, and a note says so: bytes of free memory, bytes of /dev/shm, open files.
LEAST_FREE, LEAST_SHARED, LEAST_FILES = 2e9, 256e6, 1024


def check_cores(machine: Machine) -> Finding:
    """Compares the cores that this process sees with the CPU time that its control group allows."""
    seen, quota = len(os.sched_getaffinity(0)), cores_of_group(machine)
    model = re.search(r"^model name\s*: (.*)$", machine.read("proc/cpuinfo"), re.MULTILINE)
    threads = machine.environ.get("OMP_NUM_THREADS", "")
    usable = max(1, min(seen, int(quota or seen)))
    notes = []
    if threads.isdecimal() and int(threads) > usable:
        notes.append(
            f"Set OMP_NUM_THREADS to at most {usable}: it is {threads}, and this process may use {usable} cores."
        )
    elif usable < seen and not threads:
        notes.append(
            f"Set OMP_NUM_THREADS={usable}: torch would start {seen} threads, but the control group allows {quota:g} cores."
        )
    limit = "" if quota is None else f", limited to {quota:g} by the control group"
    text = f"{seen} of {os.cpu_count()} cores{limit}" + (f", {model[1]}" if model else "")
    values = {"cores": os.cpu_count(), "seen": seen, "limit": quota, "model": model[1] if model else None}
    return Finding(text, values, notes=notes)


def check_memory(machine: Machine) -> Finding:
    """Compares the memory of the machine, the memory that is available, and the limit of the control group."""
    table = dict(re.findall(r"^(\w+): +(\d+) kB", machine.read("proc/meminfo"), re.MULTILINE))
    total, available = (int(table[name]) * 1024 if name in table else None for name in ("MemTotal", "MemAvailable"))
    limit, left = memory_of_group(machine)
    if limit is not None and total is not None and limit >= total:
        limit = left = None
    free = min((number for number in (available, left) if number is not None), default=None)
    notes = []
    if free is not None and free < LEAST_FREE:
        notes.append(
            f"Free memory or raise the limit: {free / _GB:.1f} GB are left, and torch alone takes about 0.5 GB a rank."
        )
    if total is None or available is None:
        text = "/proc/meminfo cannot be read"
    else:
        text = f"{total / _GB:.1f} GB, {available / _GB:.1f} GB available"
    if limit is not None and left is not None:
        text += f", limited to {limit / _GB:.1f} GB by the control group, of which {left / _GB:.1f} GB are left"
    values = {"total": total, "available": available, "limit": limit, "left": left}
    return Finding(text, values, notes=notes)


def check_open_files(machine: Machine) -> Finding:
    """Checks the limit of open files. It must be high in large jobs, since each rank has connections to all other ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"limit": _number(soft), "most": _number(hard)}
    notes = []
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        notes.append(
            f"Raise the limit of open files (ulimit -n {LEAST_FILES}): it is {soft}, and each rank connects to all others."
        )
    return Finding(f"{_words(soft)}, can be raised to {_words(hard)}", values, notes=notes)


def check_shared_memory(machine: Machine) -> Finding:
    """Checks the size of /dev/shm. NCCL and the workers of torch's DataLoader use it; loaders of this package do not."""
    advice = "Give the container more shared memory (docker run --shm-size=1g): NCCL and the workers of torch's DataLoader use /dev/shm"
    try:
        found = os.statvfs(machine.root / "dev/shm")
    except OSError:
        return Finding("/dev/shm is missing", {"size": None, "free": None}, notes=[f"{advice}, which is missing."])
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    notes = [f"{advice}, which has {free / 1e6:.0f} MB free."] if free < LEAST_SHARED else []
    return Finding(f"{size / _GB:.1f} GB, {free / _GB:.1f} GB free", {"size": size, "free": free}, notes=notes)


def check_huge_pages(machine: Machine) -> Finding:
    """Checks if torch can take transparent huge pages for its tensors, which makes training steps on a CPU faster."""
    words = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", words)
    variable = machine.environ.get("THP_MEM_ALLOC_ENABLE")
    values = {"enabled": chosen[1] if chosen else None, "THP_MEM_ALLOC_ENABLE": variable}
    if chosen is None:
        return Finding("this kernel has none", values)
    notes = []
    if chosen[1] == "never":
        notes.append(
            "Turn on huge pages (as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled): random reads are faster."
        )
    if variable != "1" and not machine.has_gpu:
        notes.append(
            "Set THP_MEM_ALLOC_ENABLE=1: training steps on a CPU are faster, in one measurement 229 ms instead of 348 ms."
        )
    return Finding(f"{chosen[1]}, THP_MEM_ALLOC_ENABLE is {variable or 'unset'}", values, notes=notes)


def check_locked_memory(machine: Machine) -> Finding | None:
    """Checks the limit of locked memory. InfiniBand locks the memory that it sends from."""
    if not machine.has_gpu:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_infiniband = bool(machine.names("sys/class/infiniband"))
    notes = []
    if has_infiniband and soft != resource.RLIM_INFINITY:
        notes.append(
            f"Lift the limit of locked memory (ulimit -l unlimited): it is {soft:,} bytes, and NCCL locks memory for InfiniBand."
        )
    values = {"limit": _number(soft), "most": _number(hard), "infiniband": has_infiniband}
    return Finding(f"{_words(soft)} bytes{', InfiniBand' * has_infiniband}", values, notes=notes)


def cores_of_group(machine: Machine) -> float | None:
    """Returns the number of cores that the control group allows, of version 1 or 2; None if it sets no limit."""
    limits = []
    for folder in _folders_of_group(machine, "cpu"):
        quota, _, period = machine.read(f"{folder}/cpu.max").partition(" ")
        if not quota:
            quota, period = (machine.read(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_of_group(machine: Machine) -> tuple[int | None, int | None]:
    """Returns the bytes that the control group allows, of version 1 or 2, and how many of them are left. None for both if it sets no limit.

    Cached pages of files count as left, because the kernel takes them back when memory is short.
    """
    limits, left = [], []
    for folder in _folders_of_group(machine, "memory"):
        for most, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            limit, current = (machine.read(f"{folder}/memory.{name}") for name in (most, used))
            if not limit.isdecimal():
                continue
            limits.append(int(limit))
            # Version 1 has a sum of the groups below, too.
            words = dict(re.findall(r"^(\w+) (\d+)$", machine.read(f"{folder}/memory.stat"), re.MULTILINE))
            cached = int(words.get("total_inactive_file") or words.get("inactive_file") or 0)
            spent = max(0, int(current) - cached) if current.isdecimal() else 0
            left.append(max(0, int(limit) - spent))
    return min(limits, default=None), min(left, default=None)


def _folders_of_group(machine: Machine, controller: str) -> Iterator[str]:
    """Yields the folders of the control group of this process and of the groups above it. A container may see only the topmost."""
    for line in machine.read("proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"] if not controllers else [f"sys/fs/cgroup/{controllers}"]
        if controllers and controller not in controllers.split(","):
            continue
        if controllers:
            mounts.append(f"sys/fs/cgroup/{controller}")
        words = path.strip("/").split("/")
        for mount in mounts:
            yield from ("/".join([mount, *words[:number]]) for number in range(len(words), -1, -1))


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _words(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
