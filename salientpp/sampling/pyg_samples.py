"""Samples around edges as seeds. PyG's own function turns the edges and negative examples into seeds, and adds labels to the sample."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling
from torch_geometric.sampler.neighbor_sampler import edge_sample

from salientpp import ops
from salientpp.sampling.negatives import KeyedNegatives
from salientpp.sampling.topology import Mfg, Topology

#: Mixed into a batch's key to get the key of its negative examples.
_NEGATIVES = 0x6E6567

#: (seeds, their times) -> their sample.
Sample = Callable[[Any, Any], Mfg]


def sample_of_edges(
    topology: Topology,
    disjoint: bool,
    inputs: EdgeSamplerInput,
    negatives: NegativeSampling | None,
    key: int,
    sample: Sample,
    has_window: bool = False,
) -> Mfg:
    """Returns ``sample(seeds, times)`` of the end points of edges and of negative examples, with PyG's labels. The times are on the topology's clock.

    Args:
        disjoint: every seed grows a tree of its own.
        key: fixes the negative examples.
        has_window: each time is the end of a time window, and is checked by :meth:`Clock.check_ends`.
    """
    clock, times = topology.clock, inputs.time
    if times is not None and clock is not None:
        inputs = copy.copy(inputs)
        inputs.time = clock.read(times, "edge_label_time")
        if has_window:
            clock.check_ends(times, "edge_label_time")
    keyed: Any = None if negatives is None else KeyedNegatives(negatives, ops.join_key(_NEGATIVES, key))
    sizes, times_of = dict(topology.num_vertices), dict(topology.node_time)
    of_types = (sizes, times_of or None) if topology.is_hetero else (sizes[None], times_of.get(None))
    num_nodes, node_time = of_types
    # PyG creates labels and positions on the default device. Setting a device costs a tenth of a small batch, so do it only if needed.
    on_cpu = torch.get_default_device().type == "cpu"
    with contextlib.nullcontext() if on_cpu else torch.device("cpu"):
        out = edge_sample(inputs, sample, num_nodes, disjoint, node_time, keyed)
    if times is not None and clock is not None:
        # The user's times of the positive edges, repeated for the negative ones as PyG does.
        out.metadata = (*out.metadata[:-1], _repeated(times, out.metadata[-1].numel()))
    return out


def _repeated(times: Tensor, size: int) -> Tensor:
    return times.repeat(-(-size // max(1, times.numel())))[:size]
