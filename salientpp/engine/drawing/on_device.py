"""The argument ``neighbor_sampler="device"``: checks that a device can draw a loader's batches, and lets it draw them."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.sampler import BaseSampler
from torch_geometric.sampler.base import SubgraphType

from salientpp.sampling.device_draw import can_draw_on, check_device_fanouts
from salientpp.sampling.device_topology import DeviceTopology
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.stored import is_remote
from salientpp.store.assembly import has_triton


def check_device(device: torch.device) -> None:
    """Raises ValueError if no kernel can draw on this device."""
    if can_draw_on(device):
        return
    if device.type == "cpu":
        raise ValueError(
            "neighbor_sampler='device' needs a device other than the CPU, got device='cpu'; pass device='cuda', or leave neighbor_sampler out"
        )
    if not has_triton():
        raise ValueError(
            "neighbor_sampler='device' needs Triton, which is not installed; `pip install triton`, or leave neighbor_sampler out"
        )
    raise ValueError(f"neighbor_sampler='device' needs a CUDA device, got {str(device)!r}; leave neighbor_sampler out")


def draw_on_device(sampler: BaseSampler, device: torch.device, data: Any) -> None:
    """Copies the sampler's topology to the device, where it draws from then on. Batches stay the same.

    Args:
        sampler: the loader's sampler.
        data: the loader's data.

    Raises:
        ValueError: a device cannot draw the sampler's batches.
    """
    excluded = _excluded(sampler, data)
    if excluded is not None:
        raise ValueError(f"neighbor_sampler='device' excludes {excluded}; leave one of them out")
    assert isinstance(sampler, NeighborSampler)  # the loader has made it
    check_device_fanouts(sampler.fanouts[0])
    sampler.topology = DeviceTopology(sampler.topology.graph, device)  # type: ignore[arg-type]  # a single type has a Graph


def _excluded(sampler: Any, data: Any) -> str | None:
    """Returns the argument that keeps this loader from drawing on a device, with the reason; None if nothing does."""
    if is_remote(data):
        return "a pair of FeatureStore and GraphStore: the kernels read one array of neighbours"
    if isinstance(sampler.topology, PartTopology):
        return "a dataset directory with topology='parts': the kernels need all neighbour lists, and a rank has those of its part"
    if sampler.is_hetero:
        return "data with several node types: the kernels draw from one list per vertex"
    if sampler.topology.has_weights:
        return "weight_attr=: the kernels draw uniformly"
    if sampler.is_temporal:
        return "time_attr=: the kernels do not compare times"
    if sampler.disjoint:
        return "disjoint=True: the kernels number the vertices of a whole batch, not of each tree"
    if sampler.subgraph_type == SubgraphType.induced:
        return "subgraph_type='induced': the kernels return the edges drawn, and do not search for others"
    if sampler.shared_draws is not None:
        return "shared_draws=: the kernels draw for each vertex independently"
    return None
