"""Partitions a graph with KaMinPar, in a separate process, from a file.

The algorithm is TeraPart (Salwasser, Seemaier, Gottesbüren and Sanders, arXiv 2410.19119), from the package ``kaminpar`` (an extra). Its binding reads
graphs only from files. KaMinPar runs in a separate process because it does not return all its memory. KaMinPar's preset 'terapart-largek' takes the least
memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from salientpp.graph.csc import Graph
from salientpp.graph.mapped import releaser
from salientpp.partitioning.balance import VertexLoads, rebalanced, weight_of_vertices
from salientpp.partitioning.coarsen import coarsen
from salientpp.partitioning.errors import PartitionerError, names_memory
from salientpp.partitioning.parhip import write_undirected

#: Program of the separate process. That process ends with this one, and searches packages in the same folders.
_PROGRAM = """
import array, ctypes, json, sys
getattr(ctypes.CDLL(None), "prctl", lambda *_: None)(1, 9)
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
import kaminpar
graph = kaminpar.load_graph(given["graph"], kaminpar.GraphFileFormat.PARHIP, compress=True)
kaminpar.reseed(given["seed"])
solver = kaminpar.KaMinPar(given["threads"], kaminpar.terapart_largek_context())
with open(given["parts"], "wb") as file:
    array.array("i", solver.compute_partition(graph, given["num_parts"], given["tolerance"])).tofile(file)
"""


def has_kaminpar() -> bool:
    return importlib.util.find_spec("kaminpar") is not None


def partition_with_kaminpar(
    graph: Graph,
    num_parts: int,
    loads: VertexLoads,
    edge_weights: Tensor | None,
    weight_of_each: Tensor | None,
    tolerance: float,
    seed: int,
) -> Tensor:
    """Assigns vertices to parts with KaMinPar, then moves vertices until all loads are within their limits. Returns the parts, int64 [N].

    Raises the errors of :func:`~salientpp.partitioning.assign.assign_parts`.
    """
    if not has_kaminpar():
        raise ImportError(
            "method='kaminpar' needs the package kaminpar, which is not installed; `pip install salientpp[kaminpar]`, or use method='metis'"
        )
    num_ends = 2 * graph.num_edges
    what = f"{graph.num_vertices} vertices and up to {num_ends} edge ends"
    with (
        names_memory("KaMinPar", what, 50 * num_ends, "method='random', which needs a few numbers for each vertex"),
        tempfile.TemporaryDirectory(prefix="salientpp-") as folder,
    ):
        path = Path(folder) / "graph.parhip"
        vertex_weights = weight_of_vertices(graph)
        symmetric = write_undirected(path, graph, edge_weights, weight_of_each, vertex_weights)
        releaser(graph.indices)()  # not needed until KaMinPar is done
        cluster = None
        if symmetric[1].dtype == torch.int32:
            cluster, path = coarsen(path, symmetric, vertex_weights, num_parts, seed)
        del vertex_weights
        # Give KaMinPar half of the tolerance, as for METIS. The other half leaves room for the other loads.
        assignment = _run_kaminpar(path, num_parts, tolerance / 2, seed)
        if cluster is not None:
            assignment = assignment.index_select(0, cluster)
        return rebalanced(assignment, symmetric, loads, num_parts, tolerance)


def _run_kaminpar(path: Path, num_parts: int, tolerance: float, seed: int) -> Tensor:
    """Partitions the graph in a file, in a separate process. Returns the parts of its vertices, int64 [N].

    With one torch thread, the same file and arguments give the same parts; with several they vary.
    """
    parts = path.with_suffix(".parts")
    given = {
        "path": [os.path.abspath(folder) for folder in sys.path],
        "graph": str(path),
        "parts": str(parts),
        "threads": torch.get_num_threads(),
        "num_parts": num_parts,
        "tolerance": max(1e-3, tolerance),
        "seed": seed % (2**31 - 1),
    }
    done = subprocess.run([sys.executable, "-c", _PROGRAM, json.dumps(given)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"failed ({said})"
        raise PartitionerError(
            f"KaMinPar {how}, most often for lack of memory: in measurements it took 10 to 50 bytes for each end of an edge, least with edge_weights='vip'; "
            "use method='random', a machine with more memory, or give an assignment"
        )
    return torch.from_numpy(np.fromfile(parts, dtype=np.int32)).long()
