"""Scenarios on two ranks, and a stand-in for NCCL on the simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graphs import identity_features, random_data
from torch import Tensor

import salientpp
from salientpp import NeighborLoader
from salientpp.ranks.comm import Comm
from tests.simulated_device import install, scheduler, seed
from tests.simulated_device.mutations import Guard, removed
from tests.simulated_device.scenarios import WIDTH, Comparison, N

#: Name -> options of a loader on two ranks, and whether rows travel between the devices.
RANK_SCENARIOS: dict[str, tuple[dict[str, Any], bool]] = {
    "cache": ({"replication_factor": 0.3, "device_rows": 0.3, "depth": 10}, False),
    "cache on the device, zero copy": (
        {"replication_factor": 0.3, "device_rows": {"cache": 0.1, "zero_copy": True}, "depth": 4}, False,
    ),
    "lookahead": ({"replication_factor": 0.3, "lookahead": 2, "depth": 4, "num_workers": 1}, False),
    "sums": ({"partial_aggregation": "sum", "device_rows": 0.3, "depth": 4}, False),
    "narrow rows": ({"send_as": {"x": "int8"}, "depth": 4}, False),
    "rows between devices": ({"device_rows": 0.3, "depth": 4}, True),
    "rows between devices, depth 1": ({"device_rows": 0.3, "replication_factor": 0.3, "depth": 1}, True),
}  # fmt: skip


def rank_directory(folder: Path) -> str:
    """Makes a graph in two parts, and returns its directory."""
    data = random_data(2 * N, 1400)
    data.x = identity_features(2 * N, WIDTH)
    salientpp.partition(data, 2, folder / "parts", [4, 3], 16, method="random")
    return str(folder / "parts")


def failing_seeds(rank: int, root: str, name: str, seeds: range, guard: Guard | None = None) -> list[str]:
    """Runs two epochs of a scenario in each order. Returns the first fault. The other rank may then report that it lost this one."""
    device = install()
    options, between_devices = RANK_SCENARIOS[name]
    part = salientpp.load(root)
    common = {"batch_size": 16, "shuffle": True, "seed": 3}
    with contextlib.ExitStack() as stack:
        if between_devices:
            stack.enter_context(device_collectives())
        seed(1)
        reference = {name: options[name] for name in ("send_as", "partial_aggregation") if name in options}
        if "partial_aggregation" in options:  # a loader on the CPU has other sums
            reference = {**options, "device": device}
        comparison = Comparison([*NeighborLoader(part, [4, 3], "train", **common, **reference)])
        if guard is not None:
            stack.enter_context(removed(guard))
        for number in seeds:
            try:
                seed(number)
                comparison.compare_epoch(NeighborLoader(part, [4, 3], "train", device=device, **common, **options))
            except (AssertionError, RuntimeError) as error:
                return [f"seed {number}: {error}"]
    return []


# --- a stand-in for NCCL ------------------------------------------------------------------------------------


@contextlib.contextmanager
def device_collectives() -> Iterator[None]:
    """Lets ranks exchange rows between devices, as over NCCL: on a stream of its own, which waits for the current stream.

    The data passes through the default process group. The host waits for that, so the two ranks must start collectives at the same points.
    """
    stream = torch.simulated.Stream()
    create, exchange = Comm.create.__func__, dist.all_to_all_single  # type: ignore[attr-defined]

    def with_devices(cls: type[Comm], *args: Any, **kwargs: Any) -> Comm:
        comm = create(cls, *args, **kwargs)
        if comm.groups is not None and comm._pins:  # its loader is for the device
            comm.groups.device, comm.device, comm._pins = dist.group.WORLD, install(), False
        return comm

    def all_to_all_single(
        received: Tensor, sent: Tensor, *sizes: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if received.device.type == "cpu":
            return exchange(received, sent, *sizes, group=group, async_op=async_op)
        stream.wait_stream(torch.simulated.current_stream())
        there = torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
        with torch.simulated.stream(stream):
            scheduler.synchronize(stream.queue, counts=False)
            there.copy_(sent.host)
            arrived = torch.empty(received.shape, dtype=received.dtype, device="cpu")
            exchange(arrived, there, *sizes)
            received.copy_(arrived, non_blocking=True)
        event = stream.record_event()
        return _Work(lambda: torch.simulated.current_stream().wait_event(event), (received, sent))

    Comm.create, dist.all_to_all_single = classmethod(with_devices), all_to_all_single  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Comm.create, dist.all_to_all_single = classmethod(create), exchange  # type: ignore[method-assign]


class _Work:
    """A collective. It refers to its tensors until the caller's stream waits for it, as NCCL's does."""

    def __init__(self, wait: Callable[[], None], tensors: tuple[Tensor, ...]) -> None:
        self._wait, self._tensors = wait, tensors

    def wait(self) -> None:
        self._wait()
        self._tensors = ()
