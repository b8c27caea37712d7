"""Laws of ``salientpp doctor``: it finds each problem, says what to change, and a failing check stops no other."""

from __future__ import annotations

import getpass
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import mistake, run, wide_terminal  # noqa: F401  the fixture is used by name
from distributed import HANG
from forked_python import python
from graphs import random_data

import salientpp
from salientpp import ops
from salientpp.cli import doctor
from salientpp.cli.checks import directory, limits, network, self_test, software
from salientpp.cli.checks.finding import Finding, Machine
from salientpp.datasets import convert


def machine(root: Path, files: dict[str, str] | None = None, **environ: str) -> Machine:
    """A machine whose /proc, /sys and /dev are in a folder."""
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Machine(root, environ)


def ranks_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks fork from a process that has imported torch."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(self_test, "COMMAND", (python(), *self_test.COMMAND[1:]))
    monkeypatch.setattr(doctor, "Machine", partial(Machine, seconds=HANG))


# --- the command ------------------------------------------------------------------------------------------


def test_json_has_what_the_text_says(capsys, monkeypatch, tmp_path):
    ranks_of(monkeypatch)
    code, out, err = run(capsys, "doctor", "--json", tmp_path / "doctor.json")
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert code == 0 and err == ""
    checks = found["checks"]
    assert list(checks) == [name for name in doctor.CHECKS if name not in ("locked memory", "directory")]
    for name, check in checks.items():
        assert f"{name} " in out and check["text"] in out
        assert check["status"] == ("problem" if check["problems"] else "note" if check["notes"] else "ok")
        assert f"{check['status']} " in out
    assert found["change"] == [text for check in checks.values() for text in check["notes"]]
    for number, text in enumerate(found["change"], 1):
        assert f"{number}. {text}" in out
    assert checks["two ranks"]["status"] == "ok" and checks["two ranks"]["values"]["bytes_per_second"] > 1e6
    assert checks["operators"]["status"] == "ok"


def test_a_problem_comes_first_and_ends_in_exit_code_2(capsys, monkeypatch, tmp_path):
    checks = {
        "one": lambda machine: Finding("one", notes=["Do this later."]),
        "two": lambda machine: Finding("two", {"a": 1}, problems=["Do this at once."]),
        "three": lambda machine: None,
    }
    monkeypatch.setattr(doctor, "CHECKS", checks)
    code, out, err = run(capsys, "doctor", "--json", tmp_path / "doctor.json")
    assert code == 2 and err == "salientpp doctor: found 1 problem (two); the end of the report says what to change\n"
    assert [line.split() for line in out.splitlines()[:2]] == [["one", "note", "one"], ["two", "problem", "two"]]
    assert [line.rstrip() for line in out.splitlines()[-2:]] == ["1. Do this at once.", "2. Do this later."]
    assert json.loads((tmp_path / "doctor.json").read_text())["checks"]["two"]["values"] == {"a": 1}


def test_without_findings_nothing_is_to_change(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda machine: Finding("all well")})
    assert run(capsys, "doctor")[1].splitlines()[-1] == "Nothing to change."


def test_a_failing_check_stops_no_other(capsys, monkeypatch):
    def broken(machine):
        raise KeyError("a bug")

    monkeypatch.setattr(doctor, "CHECKS", {"one": broken, "two": lambda machine: Finding("all well")})
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "this check failed (KeyError: 'a bug')" in out and "all well" in out
    assert "1. Report that the check of one failed" in out


def test_checks_that_need_a_missing_library_are_told_once(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = {name: doctor.CHECKS[name] for name in ("operators", "GPU")} | {"other": software.check_gpu}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    code, out, _ = run(capsys, "doctor")
    assert code == 2 and out.count("not checked (import of torch halted") == 2
    assert re.findall(r"^\d\. (\w+)", out, re.MULTILINE) == ["Build", "Run"]


def test_the_report_names_no_user(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("NCCL_CONF_FILE", "/home/alice/nccl.conf")
    monkeypatch.setenv("SALIENTPP_API_KEY", "12345")
    monkeypatch.setenv("SLURM_JOB_USER", "alice")
    monkeypatch.setenv("MY_SECRET", "12345")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_PLUGIN_AUTH", "12345")
    monkeypatch.setenv("GLOO_PWD", "12345")
    assert getpass.getuser() == "alice"
    failing = {"one": lambda machine: Finding("no file /home/alice/x or /scratch/alice/y", {"/": ["/home/alice"]})}
    failing["two"] = lambda machine: Finding(
        "no /scratch/alice", notes=["Make /scratch/alice.", "Not /scratch/alice2."]
    )
    monkeypatch.setattr(doctor, "CHECKS", {**failing, "environment": software.check_environment})
    _, out, _ = run(capsys, "doctor", "--json", tmp_path / "doctor.json")
    for text in (out, (tmp_path / "doctor.json").read_text()):
        assert "alice" not in text.replace("alice2", "") and "12345" not in text
        assert "no file ~/x or /scratch/USER/y" in text and "no /scratch/USER" in text and "Make /scratch/USER." in text
    assert "NCCL_CONF_FILE=(a path)" in out and "NCCL_DEBUG=INFO" in out and "SALIENTPP_API_KEY=(set)" in out


def test_a_directory_that_cannot_be_written_is_refused_before_the_checks(capsys, tmp_path):
    assert "--json: the directory" in mistake(capsys, "doctor", "--json", tmp_path / "none" / "x.json")


# --- limits -----------------------------------------------------------------------------------------------

MEMORY = "MemTotal:       32000000 kB\nMemAvailable:   16000000 kB\n"


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
          "sys/fs/cgroup/job/step/cpu.max": "max 100000\n", "sys/fs/cgroup/job/memory.max": "4000000000\n",
          "sys/fs/cgroup/job/step/memory.max": "max\n"}, 1.5, 4e9),
        ({"proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n",
          "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
          "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "5000000000\n"}, 3.0, 5e9),
        ({"proc/self/cgroup": "5:cpu:/\n4:memory:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None, None),
        ({"proc/self/cgroup": "0::/\n"}, None, None),
        ({}, None, None),
    ],
)  # fmt: skip
def test_limits_of_both_versions_of_control_groups_are_read(monkeypatch, tmp_path, files, cores, memory):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    here = machine(tmp_path, {**files, "proc/meminfo": MEMORY})
    assert limits.check_cores(here).values["limit"] == cores
    assert limits.check_memory(here).values["limit"] == memory
    assert limits.check_memory(here).values["available"] == 16_000_000 * 1024


def test_threads_beyond_the_cores_are_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert limits.check_cores(machine(tmp_path)).status == "ok"
    assert limits.check_cores(machine(tmp_path, OMP_NUM_THREADS="8")).status == "ok"
    assert "at most 8: it is 9" in limits.check_cores(machine(tmp_path, OMP_NUM_THREADS="9")).notes[0]
    limited = limits.check_cores(machine(tmp_path, files))
    assert limited.notes == [
        "Set OMP_NUM_THREADS=2: torch would start 8 threads, but the control group allows 2 cores."
    ]
    assert limits.check_cores(machine(tmp_path, OMP_NUM_THREADS="2")).status == "ok"
    assert limits.check_cores(machine(tmp_path, OMP_NUM_THREADS="²")).status == "ok"


def test_little_free_memory_is_a_note(tmp_path):
    short = machine(tmp_path, {"proc/meminfo": MEMORY.replace("16000000", "1000000")})
    assert "1.0 GB are left" in limits.check_memory(short).notes[0]
    assert limits.check_memory(machine(tmp_path / "none")).text == "/proc/meminfo cannot be read"


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/job", {"job/memory.max": "8000000000", "job/memory.current": "7500000000", "job/memory.stat": "anon 7\ninactive_file 500000000\n"}),
        ("0::/job", {"job/memory.max": "8000000000", "memory.max": "9000000000", "memory.current": "8000000000"}),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "8000000000", "memory/job/memory.usage_in_bytes": "7500000000",
                           "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500000000\n"}),
    ],
)  # fmt: skip
def test_memory_that_is_left_in_the_control_group_counts(tmp_path, cgroup, files):
    files = {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    found = limits.check_memory(machine(tmp_path, {**files, "proc/meminfo": MEMORY}))
    assert (found.values["limit"], found.values["left"]) == (8e9, 1e9) and "1.0 GB are left" in found.notes[0]
    (tmp_path / "proc/meminfo").unlink()
    found = limits.check_memory(machine(tmp_path))
    assert "limited to 8.0 GB by the control group, of which 1.0 GB are left" in found.text
    assert found.status == "note"


def test_a_low_limit_of_open_files_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    found = limits.check_open_files(machine(tmp_path))
    assert found.text == "256, can be raised to unlimited" and "ulimit -n 1024" in found.notes[0]
    assert found.values == {"limit": 256, "most": None}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))
    assert limits.check_open_files(machine(tmp_path)).status == "ok"


def test_little_shared_memory_is_a_note(monkeypatch, tmp_path):
    assert "--shm-size" in limits.check_shared_memory(machine(tmp_path)).notes[0]
    size = namedtuple("size", "f_frsize f_blocks f_bavail")
    for blocks, status in ((16384, "note"), (2**20, "ok")):
        monkeypatch.setattr(os, "statvfs", lambda path, blocks=blocks: size(4096, blocks, blocks))
        assert limits.check_shared_memory(machine(tmp_path)).status == status


@pytest.mark.parametrize(
    ("enabled", "variable", "texts"),
    [
        ("always [madvise] never", "1", []),
        ("always [madvise] never", None, ["THP_MEM_ALLOC_ENABLE=1"]),
        ("always madvise [never]", "1", ["echo madvise"]),
        ("", None, []),
    ],
)
def test_huge_pages_that_are_off_are_a_note(tmp_path, enabled, variable, texts):
    files = {"sys/kernel/mm/transparent_hugepage/enabled": enabled}
    here = machine(tmp_path, files, **({"THP_MEM_ALLOC_ENABLE": variable} if variable else {}))
    notes = limits.check_huge_pages(here).notes
    assert len(notes) == len(texts) and all(text in note for text, note in zip(texts, notes))


def test_locked_memory_counts_with_a_gpu_and_infiniband(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert limits.check_locked_memory(machine(tmp_path)) is None
    gpu = machine(tmp_path, {"dev/nvidiactl": ""})
    assert limits.check_locked_memory(gpu).status == "ok"
    both = machine(tmp_path, {"sys/class/infiniband/mlx5_0": ""})
    assert "ulimit -l unlimited" in limits.check_locked_memory(both).notes[0]


# --- the network ------------------------------------------------------------------------------------------

TWO_HOSTS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # fmt: skip
INTERFACES = {
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/eth7/operstate": "up\n",
    "sys/class/net/eth7/speed": "25000\n",
    "sys/class/net/eth8/operstate": "down\n",
}


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def found(name, port, **options):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["127.0.0.1"], "the host name resolves to 127.0.0.1"),
        ([], "the host name does not resolve to an address"),
        (["203.0.113.77"], "the host name resolves to addresses of other machines only"),
        (["203.0.113.77", "127.0.0.2"], "the host name resolves to 127.0.0.2"),
    ],
)
def test_a_host_name_on_loopback_is_a_note_and_in_a_job_on_two_hosts_a_problem(
    monkeypatch, tmp_path, addresses, reason
):
    resolving(monkeypatch, *addresses)
    found = network.check_network(machine(tmp_path, INTERFACES))
    assert found.status == "note" and reason in found.text and "connected: eth7 (25 Gbit/s)" in found.text
    assert (
        found.notes[0].startswith("Before a job on several hosts, set GLOO_SOCKET_IFNAME=eth7 ")
        and reason in found.notes[0]
    )
    assert found.values["interfaces"]["eth7"] == {"state": "up", "megabits": 25000, "address": None}
    there = network.check_network(machine(tmp_path, **TWO_HOSTS))
    assert there.problems[0].startswith("Set GLOO_SOCKET_IFNAME=eth7 ") and not there.notes


def test_a_usable_address_of_the_host_name_is_fine(monkeypatch, tmp_path):
    resolving(monkeypatch, "192.0.2.1")
    monkeypatch.setattr(socket.socket, "bind", lambda probe, place: None)
    monkeypatch.setattr(network, "address_of", lambda name: "192.0.2.1" if name == "eth7" else "")
    found = network.check_network(machine(tmp_path, INTERFACES))
    assert found.status == "ok" and found.text == "gloo uses eth7 at 192.0.2.1; connected: eth7 (25 Gbit/s)"


def test_the_interface_of_gloo_must_exist(tmp_path):
    missing = network.check_network(machine(tmp_path, INTERFACES, GLOO_SOCKET_IFNAME="eth9"))
    assert missing.problems == ["Set GLOO_SOCKET_IFNAME to one of eth7, eth8, lo: this machine has no eth9."]
    assert network.check_network(machine(tmp_path, GLOO_SOCKET_IFNAME="eth7")).status == "ok"
    assert "GLOO_SOCKET_IFNAME is lo" in network.check_network(machine(tmp_path, GLOO_SOCKET_IFNAME="lo")).notes[0]


def test_interfaces_of_containers_are_advised_last(monkeypatch, tmp_path):
    resolving(monkeypatch, "127.0.0.1")
    names = ["br-1f", "cni0", "docker0", "dummy0", "eth7", "tun0", "veth1", "virbr0"]
    files = {f"sys/class/net/{name}/operstate": "up\n" for name in names}
    found = network.check_network(machine(tmp_path, {**files, "sys/class/net/eth7/device/vendor": "0x1"}))
    assert found.notes[0].startswith("Before a job on several hosts, set GLOO_SOCKET_IFNAME=eth7 ")
    assert "connected: eth7, dummy0, br-1f, cni0" in found.text
    monkeypatch.setattr(network, "address_of", lambda name: "192.0.2.1" if name in ("docker0", "dummy0") else "")
    assert "connected: dummy0, eth7, docker0" in network.check_network(machine(tmp_path)).text  # as a bond of eth7


def test_an_address_of_no_interface_has_words(monkeypatch, tmp_path):
    monkeypatch.setattr(socket.socket, "bind", lambda probe, place: None)
    resolving(monkeypatch, "127.0.1.1")
    assert network.check_network(machine(tmp_path, INTERFACES)).text.startswith("gloo uses lo at 127.0.1.1, because ")
    resolving(monkeypatch, "192.0.2.9")
    found = network.check_network(machine(tmp_path, INTERFACES))
    assert found.text == "gloo uses an interface at 192.0.2.9; connected: eth7 (25 Gbit/s)"


def test_without_sys_the_system_names_the_interfaces(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7"), (3, "eth8")])
    monkeypatch.setattr(network, "address_of", lambda name: {"eth7": "192.0.2.1", "lo": "127.0.0.1"}.get(name, ""))
    assert network.check_network(machine(tmp_path, GLOO_SOCKET_IFNAME="eth9")).status == "problem"
    found = network.check_network(machine(tmp_path, GLOO_SOCKET_IFNAME="eth7"))
    assert found.status == "ok" and found.text == "gloo uses eth7 at 192.0.2.1; connected: eth7"

    def none():
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "if_nameindex", none)
    found = network.check_network(machine(tmp_path, GLOO_SOCKET_IFNAME="eth9"))
    assert found.status == "ok" and found.text == "gloo uses eth9"


def test_a_host_name_that_no_address_can_have_does_not_resolve(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: f"{'a' * 64}.example")
    assert "does not resolve to an address" in network.check_network(machine(tmp_path, INTERFACES)).text


# --- software ---------------------------------------------------------------------------------------------


def test_an_old_library_is_a_problem(monkeypatch, tmp_path):
    def missing():
        raise ImportError("salientpp needs torch >= 2.10, got 2.4: pip install --upgrade torch")

    assert software.check_installed(machine(tmp_path)).status == "ok"
    monkeypatch.setattr(software, "check_versions", missing)
    problems = software.check_installed(machine(tmp_path)).problems
    assert problems == ["Salientpp needs torch >= 2.10, got 2.4: pip install --upgrade torch."]


def wrong_rows(source, index, out):
    out.zero_()


def undefined(source, index, out):
    raise OSError("_C.abi3.so: undefined symbol: aoti_torch_x\nmore")


@pytest.mark.parametrize(
    ("operator", "text"),
    [(wrong_rows, "wrong values"), (undefined, "OSError: _C.abi3.so: undefined symbol: aoti_torch_x.")],
)
def test_a_broken_operator_is_a_problem(monkeypatch, tmp_path, operator, text):
    assert software.check_operators(machine(tmp_path)).status == "ok"
    monkeypatch.setattr(ops, "gather_rows", operator)
    found = software.check_operators(machine(tmp_path))
    assert (
        found.status == "problem" and text in found.problems[0] and "pip install --force-reinstall" in found.problems[0]
    )


def test_a_gpu_that_torch_does_not_see_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert software.check_gpu(machine(tmp_path)).text == "none"
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    files = {"proc/driver/nvidia/gpus/0000/information": "", "proc/driver/nvidia/version": version}
    inside = software.check_gpu(machine(tmp_path, files))
    assert inside.text == "none" and "To use the 1 GPU of the host" in inside.notes[0]
    files |= {"dev/nvidiactl": ""}
    for runtime, text in ((None, "built for CPUs only"), ("13.0", "CUDA 13.0, and this one is 570.86.15")):
        monkeypatch.setattr(torch.version, "cuda", runtime)
        found = software.check_gpu(machine(tmp_path, files))
        assert found.status == "note" and text in found.notes[0]
        assert found.values["driver"] == "570.86.15"
    assert software.check_gpu(machine(tmp_path, CUDA_VISIBLE_DEVICES="")).status == "ok"


def test_gpus_are_listed(monkeypatch, tmp_path):
    gpu = SimpleNamespace(name="H200", total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = software.check_gpu(machine(tmp_path))
    assert found.text == "H200 (150 GB), H200 (150 GB); driver unknown, runtime 13.0" and found.status == "ok"


def test_variables_that_contradict_each_other_are_a_note(tmp_path):
    assert software.check_environment(machine(tmp_path, **TWO_HOSTS)).status == "ok"
    found = software.check_environment(machine(tmp_path, RANK="0", PATH="/bin"))
    assert found.values == {"RANK": "0"} and "WORLD_SIZE" in found.notes[0]


def test_a_compiled_library_that_pyg_cannot_import_is_a_note(monkeypatch, tmp_path):
    versions = {"pyg-lib": "0.9", "torch-sparse": "0.6", "torch-scatter": None}
    monkeypatch.setattr(software, "versions_of", lambda *names: versions)
    monkeypatch.setattr("torch_geometric.typing.WITH_PYG_LIB", True)
    monkeypatch.setattr("torch_geometric.typing.WITH_TORCH_SPARSE", False)
    found = software.check_libraries(machine(tmp_path))
    assert found.text == "pyg-lib 0.9, torch-sparse 0.6"
    assert found.notes == ["Install torch-sparse again, for this torch: PyG cannot import it, and leaves it out."]


# --- the directory ----------------------------------------------------------------------------------------


def test_a_damaged_directory_is_a_problem(tmp_path):
    root = salientpp.partition(random_data(), 2, tmp_path / "d", [3, 2], 16, method="random").root
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 0]]), x=np.ones((2, 3), np.float32))
    convert(f"npz:{tmp_path / 'g.npz'}", tmp_path / "c")
    assert directory.check_directory(Machine()) is None
    for name, kind in (("d", "dataset directory of 2 parts"), ("c", "converted graph")):
        found = directory.check_directory(Machine(directory=tmp_path / name))
        assert found.status == "ok" and found.text.startswith(f"{kind}, ") and found.values["bytes"] > 0
    file = root / "indices.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = directory.check_directory(Machine(directory=root))
    assert found.status == "problem" and "indices.npy" in found.problems[0]
    assert directory.check_directory(Machine(directory=tmp_path / "none")).status == "problem"


@pytest.mark.parametrize("error", [KeyError("files"), TypeError("wrong"), RuntimeError("wrong"), AssertionError()])
def test_any_error_of_reading_a_directory_is_a_problem(monkeypatch, tmp_path, error):
    def broken(root, verify):
        raise error

    monkeypatch.setattr("salientpp.store.directory.load.load", broken)
    found = directory.check_directory(Machine(directory=tmp_path))
    assert found.status == "problem" and type(error).__name__ in found.problems[0]


# --- the self-test ----------------------------------------------------------------------------------------


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import time; time.sleep(1000)", "they had not ended after 3 s"),
        ("import os, time; os.fork(); time.sleep(1000)", "they had not ended after 3 s"),
        ("import sys, time; time.sleep(1000 * (sys.argv[2] == '0')); sys.exit('no route')", "rank 1 ended with exit status 1; rank 1 said: no route"),
        ("import sys, time; sys.exit('no route' if sys.argv[2] == '0' else None)", "rank 0 ended with exit status 1; rank 0 said: no route"),
        ("import os, sys, time; time.sleep(1000 * (sys.argv[2] == '0')); os.kill(os.getpid(), 11)", "rank 1 was killed by signal 11"),
    ],
)  # fmt: skip
def test_ranks_that_fail_are_a_problem_and_none_is_left(monkeypatch, program, text):
    monkeypatch.setattr(self_test, "COMMAND", (sys.executable, "-c", program))
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **options: started.append(popen(*given, **options)) or started[-1]
    )
    before = children()
    found = self_test.check_ranks(Machine(seconds=3 if text.endswith(" 3 s") else HANG))
    assert found.status == "problem" and text in found.problems[0]
    assert children() == before and len(started) == 2
    deadline = time.monotonic() + 60  # grandchildren are reaped by another process
    while any(group_exists(process.pid) for process in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("way", ["messages", "shared"])
def test_other_batches_of_two_ranks_are_a_problem(monkeypatch, way):
    digests = ["a", "b", "c", "d"]
    monkeypatch.setattr(self_test, "digests_of", lambda part, **options: digests)
    reports = [{"messages": digests[rank::2], "shared": digests[rank::2], "bytes_per_second": 1e9} for rank in range(2)]
    monkeypatch.setattr(self_test, "COMMAND", (sys.executable, "-c", ""))
    monkeypatch.setattr(self_test, "_reports", lambda codes, folder: reports)
    assert self_test.check_ranks(Machine()).status == "ok"
    reports[1][way] = ["b", "x"]
    assert f"two ranks ({way}) differ" in self_test.check_ranks(Machine()).problems[0]


def test_variables_of_a_job_do_not_reach_the_ranks(monkeypatch):
    ranks_of(monkeypatch)
    environ = {**os.environ, **TWO_HOSTS, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}
    assert self_test.check_ranks(Machine(environ=environ, seconds=HANG)).status == "ok"
