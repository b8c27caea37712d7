"""Train graph neural networks on graphs that outgrow one machine, by changing one import.

The public names are imported when one of them is first used: importing torch and PyG takes seconds, and `salientpp --help` needs neither.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from salientpp.fullgraph.distribute import distribute
    from salientpp.graph.csc import Graph
    from salientpp.launch.preemption import Preemption
    from salientpp.launch.rendezvous import init_process_group
    from salientpp.layerwise.inference import inference
    from salientpp.loader.link_loader import LinkNeighborLoader
    from salientpp.loader.node_loader import NeighborLoader
    from salientpp.loader.serve import serve
    from salientpp.loader.statistics import LoaderStats
    from salientpp.predictions.link_scores import link_scores
    from salientpp.predictions.writer import PredictionWriter
    from salientpp.progress import Progress, ProgressBar
    from salientpp.sampling.bidirectional_sampler import BidirectionalNeighborSampler
    from salientpp.sampling.neighbor_sampler import NeighborSampler
    from salientpp.sampling.ppr import PPRSampler
    from salientpp.store.directory.load import load
    from salientpp.store.directory.local_copy import copy_to_disk
    from salientpp.store.directory.opened import PartitionedGraph
    from salientpp.store.directory.rewrite import rewrite_topology
    from salientpp.store.directory.upload import upload
    from salientpp.store.directory.writer import partition
    from salientpp.vip.inclusion import inclusion_probability

    #: Version of the installed package; "unknown" for a source tree that was not installed.
    __version__: str

_MODULES = {
    "BidirectionalNeighborSampler": "sampling.bidirectional_sampler",
    "Graph": "graph.csc",
    "LinkNeighborLoader": "loader.link_loader",
    "LoaderStats": "loader.statistics",
    "NeighborLoader": "loader.node_loader",
    "NeighborSampler": "sampling.neighbor_sampler",
    "PPRSampler": "sampling.ppr",
    "PartitionedGraph": "store.directory.opened",
    "PredictionWriter": "predictions.writer",
    "Preemption": "launch.preemption",
    "Progress": "progress",
    "ProgressBar": "progress",
    "copy_to_disk": "store.directory.local_copy",
    "distribute": "fullgraph.distribute",
    "inclusion_probability": "vip.inclusion",
    "inference": "layerwise.inference",
    "init_process_group": "launch.rendezvous",
    "link_scores": "predictions.link_scores",
    "load": "store.directory.load",
    "partition": "store.directory.writer",
    "rewrite_topology": "store.directory.rewrite",
    "serve": "loader.serve",
    "upload": "store.directory.upload",
}

__all__ = [
    "BidirectionalNeighborSampler",
    "Graph",
    "LinkNeighborLoader",
    "LoaderStats",
    "NeighborLoader",
    "NeighborSampler",
    "PPRSampler",
    "PartitionedGraph",
    "PredictionWriter",
    "Preemption",
    "Progress",
    "ProgressBar",
    "copy_to_disk",
    "distribute",
    "inclusion_probability",
    "inference",
    "init_process_group",
    "link_scores",
    "load",
    "partition",
    "rewrite_topology",
    "serve",
    "upload",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _import_module(f"{__name__}.versions").own_version()
    if name not in _MODULES:
        try:
            module = None if name.startswith("_") else _import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            module = None
        if module is None:
            raise _import_module(f"{__name__}.suggestions").no_attribute(__name__, name, __all__)
        # The package's own files import its other files, and the folder of operators, through this function. The command's help does not need torch.
        if not hasattr(module, "__path__") or name in ("cli", "ops"):
            return module
    _import_module(f"{__name__}.versions").check_versions()
    # All names are imported at once, so that the modules in the package's folders can be reached from here, whichever name was used first.
    for public, where in _MODULES.items():
        globals()[public] = getattr(_import_module(f"{__name__}.{where}"), public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
