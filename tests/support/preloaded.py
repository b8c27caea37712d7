"""Slow imports of the servers from which tests fork ranks and scripts: torch, PyG, the package, and imports of tests.

A fork inherits the modules. They are also frozen, so that the garbage collector does not visit them: this visit takes
longer than the work of most ranks and scripts. The servers pause it while they import this module, see ``uncollected``.
Their memory is in huge pages, because most of the cost of a rank that does little is the copy of page tables, and its end.
"""

# ruff: noqa: F401
import gc
import os

import huge_pages
import numpy
import pyg_layers
import pytest
import rich.console
import templates
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
import torch.distributed.launcher.api
import torch_geometric.loader
import torch_geometric.nn

import salientpp.analysis.analyze
import salientpp.cli.description
import salientpp.cli.given_graph
import salientpp.cli.progress
import salientpp.cli.serve
import salientpp.datasets
import salientpp.fullgraph
import salientpp.layerwise.inference
import salientpp.loader.link_loader
import salientpp.loader.node_loader
import salientpp.serving.server
import salientpp.serving.session
import salientpp.store.directory.writer

os.fsync = os.fstat  # as in tests/conftest.py
for name in salientpp.__all__:
    getattr(salientpp, name)  # the package imports names on first use
with torch.random.fork_rng():
    for case in pyg_layers.CASES.values():
        case.make(6, 12)  # PyG writes code for a class when a process makes its first layer
gc.collect()
gc.freeze()
gc.enable()
huge_pages.collapse()
