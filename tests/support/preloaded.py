"""What have the servers imported from which tests fork ranks and scripts? All that takes long: torch, PyG, the package, and what test files import.

A fork inherits it. What is there by then is also taken out of what the garbage collector looks at, which costs a rank or a script more than its own work.
"""

# ruff: noqa: F401
import gc

import numpy
import pytest
import rich.console
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
import torch.distributed.launcher.api
import torch.profiler._cupti_monitor
import torch_geometric.loader
import torch_geometric.nn

import salientpp.analysis.analyze
import salientpp.cli.description
import salientpp.cli.given_graph
import salientpp.cli.progress
import salientpp.datasets
import salientpp.fullgraph
import salientpp.layerwise.inference
import salientpp.loader.link_loader
import salientpp.loader.node_loader
import salientpp.store.directory.writer

for name in salientpp.__all__:
    getattr(salientpp, name)  # imported when they are asked for
gc.collect()
gc.freeze()
