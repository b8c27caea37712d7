"""Checks of versions, the compiled operators, the GPU, environment variables and optional libraries."""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from salientpp.cli.checks.finding import Finding, Machine
from salientpp.files import first_line
from salientpp.launch.environment import LaunchError, detect
from salientpp.versions import check_versions, own_version

#: Libraries that PyG or this package uses if they are installed. The first three are compiled for one version of torch.
COMPILED = {"pyg-lib": "WITH_PYG_LIB", "torch-sparse": "WITH_TORCH_SPARSE", "torch-scatter": "WITH_TORCH_SCATTER"}
OPTIONAL = (
    "ogb",
    "pyarrow",
    "kaminpar",
    "pytorch-frame",
    "lightning",
    "accelerate",
    "pytorch-ignite",
    "ray",
    "opentelemetry-api",
)

#: Environment variables that change what a job does. Values of others are never shown.
SHOWN = re.compile(
    r"(OMP|MKL)_NUM_THREADS|(MALLOC|NCCL|GLOO|SALIENTPP|KMP|GOMP)_\w+|THP_MEM_ALLOC_ENABLE|PYTORCH_(CUDA_)?ALLOC_CONF|CUDA_VISIBLE_DEVICES|"
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_(PROCID|LOCALID|NODEID|NTASKS|STEP_NUM_TASKS|STEP_TASKS_PER_NODE)"
)
#: Variables whose values are shown, of those with many names. A plugin may read a secret from another one.
_KNOWN = re.compile(
    r"(?!(MALLOC|NCCL|GLOO|SALIENTPP|KMP|GOMP)_).*|MALLOC_(ARENA_(MAX|TEST)|CONF|MMAP_(MAX|THRESHOLD)_|TOP_PAD_|TRIM_THRESHOLD_|PERTURB_|CHECK_)|"
    r"GLOO_(SOCKET_IFNAME|DEVICE_TRANSPORT)|KMP_(AFFINITY|BLOCKTIME|HW_SUBSET|SETTINGS|STACKSIZE)|GOMP_(CPU_AFFINITY|SPINCOUNT|STACKSIZE)|"
    r"NCCL_(ALGO|PROTO|DEBUG(_SUBSYS)?|BUFFSIZE|NTHREADS|(MIN|MAX)_(NCHANNELS|CTAS)|CUMEM_ENABLE|LAUNCH_MODE|CROSS_NIC|"
    r"SOCKET_(IFNAME|FAMILY|NTHREADS)|NSOCKS_PERTHREAD|(P2P|SHM|NVLS|COLLNET)_(DISABLE|ENABLE|LEVEL)|NET(_PLUGIN|_GDR_(LEVEL|READ))?|"
    r"IB_(DISABLE|HCA|GID_INDEX|TIMEOUT|RETRY_CNT|TC|SL|QPS_PER_CONNECTION)|TIMEOUT|BLOCKING_WAIT|ASYNC_ERROR_HANDLING)"
)


def check_installed(machine: Machine) -> Finding:
    """Compares the installed versions with the required ones."""
    versions = {"salientpp": own_version(), **versions_of("torch", "torch_geometric", "numpy")}
    system = {
        "Python": platform.python_version(),
        "glibc": platform.libc_ver()[1] or "none",
        "Linux": f"{platform.release()} {platform.machine()}",
    }
    values = {name: found or "missing" for name, found in {**versions, **system}.items()}
    try:
        check_versions()
    except ImportError as error:
        problem = str(error)
        return Finding(_list(values), values, problems=[f"{problem[:1].upper()}{problem[1:]}."])
    return Finding(_list(values), values)


def check_operators(machine: Machine) -> Finding:
    """Loads the compiled operators and checks the results of two of them."""
    try:
        import torch

        from salientpp import ops

        index, rows = torch.tensor([2, 0, 2], device="cpu"), torch.arange(12.0, device="cpu").view(3, 4)
        found = torch.empty_like(rows)
        ops.gather_rows(rows, index, found)
        lists, sources = ops.transpose_csc(
            torch.tensor([0, 2, 2, 3], device="cpu"), torch.tensor([1, 2, 0], device="cpu")
        )
        is_right = torch.equal(found, rows[index]) and lists.tolist() == [0, 1, 2, 3] and sources.tolist() == [2, 0, 0]
        reason = "they return wrong values"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        is_right, reason = False, f"{type(error).__name__}: {first_line(error)}"
    if is_right:
        return Finding("loaded, with right results")
    advice = (
        f"Build salientpp again for the installed torch (pip install --force-reinstall --no-deps salientpp): {reason}."
    )
    return Finding("do not work", {"reason": reason}, problems=[advice])


def check_gpu(machine: Machine) -> Finding:
    """Compares the GPUs that torch can use with those for which the kernel has a driver."""
    import torch

    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", machine.read("proc/driver/nvidia/version"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that torch cannot use, which is told below
        cuda = torch.cuda
        gpus = [
            cuda.get_device_properties(number) for number in range(cuda.device_count() if cuda.is_available() else 0)
        ]
    values = {
        "driver": driver[1] if driver else None,
        "runtime": torch.version.cuda or torch.version.hip,
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus],
    }
    if gpus:
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in gpus)
        return Finding(f"{names}; driver {values['driver'] or 'unknown'}, runtime {values['runtime']}", values)
    if not machine.has_gpu:
        of_host = len(machine.names("proc/driver/nvidia/gpus"))
        advice = f"To use the {of_host} GPU{'s' * (of_host > 1)} of the host, start the container with them (docker run --gpus all)."
        return Finding("none", values, notes=[advice] if of_host else [])
    if machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("hidden by CUDA_VISIBLE_DEVICES", values)
    if values["runtime"] is None:
        advice = (
            "Install a torch that can use the GPU (https://pytorch.org/get-started): this one was built for CPUs only."
        )
    else:
        needs = f"torch needs the driver of CUDA {values['runtime']}, and this one is {values['driver'] or 'unknown'}"
        advice = f"Ask the scheduler for a GPU, or install a newer driver, or a torch for an older one: {needs}."
    return Finding("torch cannot use the GPU of this machine", values, notes=[advice])


def check_environment(machine: Machine) -> Finding:
    """Lists the environment variables that change what a job does, and checks if torchrun's and SLURM's agree."""
    values = {name: _shown(name, value) for name, value in sorted(machine.environ.items()) if SHOWN.fullmatch(name)}
    text = ", ".join(f"{name}={value}" for name, value in values.items()) or "no variable that matters is set"
    try:
        detect(machine.environ)
    except LaunchError as error:
        return Finding(text, values, notes=[f"Correct the variables that number the ranks: {error}."])
    return Finding(text, values)


def check_libraries(machine: Machine) -> Finding:
    """Checks if PyG can import the compiled libraries that are installed, and lists other optional ones."""
    values = {name: found for name, found in versions_of(*COMPILED, *OPTIONAL).items() if found}
    notes = []
    if compiled := [name for name in COMPILED if name in values]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch_geometric.typing as flags
        broken = [name for name in compiled if not getattr(flags, COMPILED[name], True)]
        notes += [f"Install {name} again, for this torch: PyG cannot import it, and leaves it out." for name in broken]
    return Finding(_list(values) or "none", values, notes=notes)


def versions_of(*names: str) -> dict[str, str | None]:
    """Returns the installed versions of libraries; None for one that is missing."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _shown(name: str, value: str) -> str:
    """Returns what a report shows of an environment variable. It hides paths and values that may be secret, so that users can publish the report."""
    return "(a path)" if "/" in value else value[:80] if _KNOWN.fullmatch(name) else "(set)"


def _list(values: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
