"""Topology whose samples are drawn on an accelerator, and delivered on the host."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import SamplerOutput

from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import NO_EDGES
from salientpp.processes import Lock
from salientpp.sampling.device_draw import DeviceGraph, sample_neighbors
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import ByType, DrawOptions, Mfg
from salientpp.store.tiers import NO_IDS

#: Triton's interpreter runs one kernel at a time.
_interpreter = Lock()


class DeviceTopology(GraphTopology):
    """Topology of a :class:`~salientpp.Graph` that draws on a device. Its samples equal those of :class:`GraphTopology`.

    Each thread draws in a stream of its own, with a table of 4 bytes per vertex on the device. Only the thread that samples waits for the device.
    """

    def __init__(self, graph: Graph, device: torch.device) -> None:
        super().__init__(graph)
        self.device = device
        self._held = DeviceGraph.of(graph, device)
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceTopology, (self.graph, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the graph in this process and of its copy for the device."""
        return super().nbytes + self._held.nbytes

    def sample(
        self,
        seeds: ByType,
        key: int,
        options: DrawOptions,
        seed_time: ByType | None = None,
        only_vertices: bool = False,
    ) -> Mfg:
        """Samples as :meth:`Topology.sample` says.

        Raises:
            ValueError: a device cannot draw as the options ask, or a fanout is too large.
        """
        wrong = next((name for name in ("disjoint", "induced", "shared") if getattr(options, name)), None)
        if wrong is not None:
            raise ValueError(f"a device does not draw with {wrong}=True; sample on the host")
        ids, (fanouts,), own = seeds.get(None, NO_IDS), options.fanouts, self._of_thread.__dict__
        stream = own.get("stream")
        if stream is None:
            stream = own["stream"] = _new_stream(self.device)
        turn = _interpreter if self.device.type == "cpu" else contextlib.nullcontext()
        with turn, torch.get_device_module(self.device).stream(stream):
            try:
                # An error leaves the table in an unknown state, so it is kept only after success.
                table = own.pop("table", None)
                table = self._held.new_table() if table is None else table
                n_id, edges, num_nodes, num_edges = sample_neighbors(
                    self._held, table, ids, fanouts, key, options.replace
                )
                own["table"] = table
                n_id = _on_host(n_id)
                # Sources and targets are one tensor on the host, so that a batch gets them without a copy.
                (row, col), edge = (NO_EDGES, None) if only_vertices else (_on_host(edges[:2]), _on_host(edges[2]))
            finally:  # also after an error: the kernels read arrays that may be freed next
                if self.device.type != "cpu":
                    stream.synchronize()
        if only_vertices:
            return SamplerOutput(n_id, row, col, edge)
        return SamplerOutput(
            node=n_id, row=row, col=col, edge=edge, num_sampled_nodes=num_nodes, num_sampled_edges=num_edges
        )


def _new_stream(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module.Stream() if device.type == "cpu" else module.Stream(device=device)


def _on_host(values: Tensor) -> Tensor:
    """Returns a copy in pinned memory. It is complete once the current stream has finished."""
    if values.device.type == "cpu":
        return values
    out = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    return out.copy_(values, non_blocking=True)
