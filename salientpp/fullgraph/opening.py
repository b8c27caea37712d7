"""Opens one rank's part of a graph for full-graph training: from a directory, or from a ``Data`` that every rank has."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.fullgraph.exchange import Ranks
from salientpp.fullgraph.expansion import Preload
from salientpp.fullgraph.local import LocalGraph
from salientpp.fullgraph.preload import preloaded
from salientpp.graph.csc import Graph
from salientpp.ops import bytes_of
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.ranks.facts import check_same
from salientpp.ranks.hosts import sizes_of_hosts
from salientpp.ranks.placement import runs
from salientpp.store.directory.of_trainers import of_trainers
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.target_lists import TargetLists

#: Names of splits in a Data.
_SPLITS = ("train", "val", "test")


def local(
    data: PartitionedGraph | Data,
    *,
    offsets: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    process_group: Any = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    preload: Preload | None = None,
    ranks_per_host: int | Sequence[int] | None = None,
) -> LocalGraph:
    """Opens this rank's part of a graph for full-graph training. Collective: every rank calls it.

    Args:
        data: a :class:`~salientpp.PartitionedGraph` with one type, or a PyG ``Data`` that is equal on every rank. Checksums of its contents are compared.
        offsets: for a ``Data``: the first vertex of each rank, and N at the end; None: ranges of equal length. For a directory, they follow from its parts.
        device: device of the rows; None: the CPU.
        dtype: dtype that ``x`` is converted to; None: as stored.
        process_group, timeout: as in :class:`~salientpp.NeighborLoader`.
        preload: vertices of other hosts that each host loads beforehand, so that no rows travel between hosts in a step. The result is then a
            :class:`PreloadedGraph`, and the ranks of a host divide its vertices and the preloaded ones. None: each rank gets its own vertices only.
        ranks_per_host: for ``preload``: the number of ranks on each host, or a list with the number of every host. None: as torchrun or SLURM started them.

    Raises:
        ValueError, TypeError: an argument is wrong, there are more ranks than parts, or the ranks gave different arguments or data. Every rank raises it.
    """
    data, process_group = of_trainers(data, process_group)
    error: Exception | None = None
    seconds, at = DEFAULT_TIMEOUT, torch.device("cpu")
    try:
        seconds = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        at = torch.device("cpu" if device is None else device)
        torch.empty(0, device=at)  # raises if this process has no such device
    except Exception as raised:
        error = raised
    if not isinstance(data, (PartitionedGraph, Data)):
        error = TypeError(
            f"data must be a PartitionedGraph (salientpp.load) or a PyG Data, got {type(data).__name__}; full-graph training needs one type of vertices: "
            "convert a HeteroData with to_homogeneous()"
        )
    elif preload is not None and not isinstance(preload, Preload):
        error = TypeError(f"preload must be a salientpp.fullgraph.Preload or None, got {type(preload).__name__}")
    elif preload is None and ranks_per_host is not None:
        error = ValueError("ranks_per_host= is for preload=, got no preload; pass both, or neither")
    try:
        comm = Comm.create(process_group, seconds, at, error)
    finally:
        error = None  # otherwise this frame and the traceback would reference each other
    whole = _opened(data, comm, at, offsets, dtype, {"preload": repr(preload)})
    if preload is None:
        return whole
    sizes, _ = sizes_of_hosts(comm, ranks_per_host, {}, "open its part")
    return preloaded(whole, preload, sizes)


def _opened(
    data: PartitionedGraph | Data,
    comm: Comm,
    at: torch.device,
    offsets: Sequence[int] | None,
    dtype: torch.dtype | None,
    facts: dict[str, Any],
) -> LocalGraph:
    """Opens this rank's part of the whole graph. Collective. The other arguments are as in :func:`local`.

    Args:
        facts: further values that must be equal on all ranks.
    """
    with comm.together("open its part") as told:
        if isinstance(data, PartitionedGraph):
            lists, bounds, rows, splits, contents = _of_directory(data, comm)
        else:
            lists, bounds, rows, splits, contents = _of_data(data, comm, offsets)
        x = rows.get("x")
        told.mine = {
            **facts,
            "offsets": list(bounds),
            "number of edges": lists.num_edges,
            "x": "none" if x is None else f"rows of {dtype or x.dtype} {list(x.shape[1:])}",
            "names of rows": [*rows],
            "contents": dict(sorted(contents.items())),
        }
    check_same(told.everyone, comm.of, "open a graph with", by_entry="contents")
    with comm.reporting("open its part"):
        rows = {name: value.to(at) for name, value in rows.items()}
        if dtype is not None and "x" in rows:
            rows["x"] = rows["x"].to(dtype)
        return LocalGraph(Ranks(comm, at), lists, bounds, rows, splits)


def _checksum(*tensors: Tensor) -> int:
    """Returns a CRC-32 of the tensors' dtypes and entries. A gigabyte takes half a second."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(bytes_of(tensor.cpu()).numpy().data, zlib.crc32(str(tensor.dtype).encode(), checksum))
    return checksum


def _of_directory(part: PartitionedGraph, comm: Comm) -> tuple[Any, ...]:
    """Reads a directory.

    Returns the arguments of :class:`LocalGraph` that follow ``ranks``, and checksums: name of the data -> checksum.
    """
    if part.is_hetero:
        raise ValueError(
            f"{part.root} has several types of vertices, but full-graph training needs one type; convert the HeteroData with to_homogeneous() and "
            "partition the result"
        )
    tables = [name for each in part.description.types for name in each.frames]
    if tables:
        raise ValueError(
            f"{part.root} has TensorFrame attributes ({', '.join(tables)}), but full-graph training takes tensors; encode them as a tensor x, or delete "
            "them, and partition again"
        )
    whole = part.whole
    if comm.size > whole.num_parts:
        raise ValueError(
            f"{part.root} has {whole.num_parts} parts, but full-graph training gives each of the {comm.size} ranks its own part; start at most "
            f"{whole.num_parts} ranks, or partition into {comm.size} parts"
        )
    view = whole.joined(runs(whole.num_parts, comm.size), comm.rank)
    begin, end = view.book.range_of(comm.rank)
    splits = {
        split: view.split(split, comm.rank) - begin for type_ in view.description.node_types for split in type_.splits
    }
    rows = {name: value.clone() for name, value in view.node_rows(comm.rank).items()}
    offsets = tuple(view.book.offsets.tolist())
    for value in rows.values():
        if value.size(0) != end - begin:
            raise ValueError(
                f"{part.root} must have {end - begin} rows in the part of rank {comm.rank}, got {value.size(0)}"
            )
    return TargetLists.of_part(view, comm.rank), offsets, rows, splits, {"the directory": part.fingerprint}


def _of_data(data: Data, comm: Comm, offsets: Sequence[int] | None) -> tuple[Any, ...]:
    """Reads a ``Data``. Returns what :func:`_of_directory` returns."""
    graph = Graph.from_data(data)
    number, size = graph.num_vertices, comm.size
    bounds = tuple(runs(number, size)) if offsets is None else tuple(int(each) for each in offsets)
    if len(bounds) != size + 1 or bounds[0] != 0 or bounds[-1] != number or list(bounds) != sorted(bounds):
        raise ValueError(
            f"offsets must ascend from 0 to {number}, the number of vertices, with one entry per rank ({size}) and one at the end, got {list(bounds)}"
        )
    begin, end = bounds[comm.rank : comm.rank + 2]
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    splits: dict[str, Tensor] = {}
    for name, value in data.to_dict().items():
        if not isinstance(value, Tensor) or not value.dim() or name in ("edge_index", "adj_t"):
            continue
        split = name.removesuffix("_mask")
        if split in _SPLITS and name != split and value.dtype == torch.bool and value.dim() == 1:
            splits[split] = value[begin:end].nonzero().flatten()
        elif data.is_node_attr(name):
            rows[name] = value[begin:end].detach().clone()
        elif data.is_edge_attr(name):
            columns[name] = value.detach().cpu().contiguous()
    contents: dict[str, int] = {}
    if size > 1:
        edges = [each for each in (graph.indptr, graph.indices, graph.edge_id) if each is not None]
        names = [*rows, *columns, *(f"{split}_mask" for split in splits)]
        contents = {"the edges": _checksum(*edges), **{name: _checksum(data[name]) for name in names}}
    # The ranks exchange splits in this order.
    return TargetLists.of_graph(graph, columns), bounds, rows, dict(sorted(splits.items())), contents
