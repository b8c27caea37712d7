"""Partitions a graph and writes it as a dataset directory.

The work is divided into steps. A journal (:mod:`salientpp.store.directory.journal`) records each step once its files are on disk:

* the assignment of vertices to parts;
* their numbering and inclusion probabilities, with all fields of the manifest except the files;
* one step per file of edges;
* one step for each part's rows and splits.

The manifest is written last.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import with_sizes
from salientpp.graph.mapped import releaser
from salientpp.graph.relation import Relation
from salientpp.partitioning.assign import PartitionAssignment, check_num_parts
from salientpp.partitioning.numbering import Numbering, VipNumbering, number_vertices
from salientpp.partitioning.options import PartitionOptions
from salientpp.partitioning.typed import Fanouts, assign_types, check_typed_fanouts, number_types
from salientpp.partitioning.workload import assign_for
from salientpp.progress import Progress
from salientpp.store.directory.attributes import check_types
from salientpp.store.directory.contents import Contents, read_contents
from salientpp.store.directory.description import (
    ORIGIN,
    PARTS,
    WHOLE,
    Description,
    EdgeType,
    VertexType,
    check_times_of_edges,
    check_topology,
    placed,
    version_of,
)
from salientpp.store.directory.journal import Journal, says_what_to_do
from salientpp.store.directory.labels import num_classes_of
from salientpp.store.directory.manifest import read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.origin import origin_of
from salientpp.store.directory.step_writer import StepWriter
from salientpp.store.directory.task import Job, as_given
from salientpp.store.directory.type_files import write_edges, write_numbering, write_vertices
from salientpp.store.directory.unfinished import begin, check_root_is_free, complete, folder_beside
from salientpp.store.narrow import Loss, Narrow
from salientpp.suggestions import suggest_arguments
from salientpp.vip.inclusion import check_batch_size

#: File with the part of every vertex. It exists only until the vertices are numbered.
_ASSIGNMENT = "assignment.npy"


@suggest_arguments
def partition(
    data: Data | HeteroData,
    num_parts: int,
    root: str | Path,
    num_neighbors: Fanouts = (15, 10, 5),
    batch_size: int = 1024,
    *,
    method: str | Tensor | Mapping[str, Tensor] = "auto",
    edge_weights: str = "vip",
    order: str = "vip",
    refine: bool | None = None,
    split: Mapping[str, Any] | None = None,
    edge_split: Mapping[Any, Any] | None = None,
    seeds: str | tuple[str, str] = "train",
    replicate: Iterable[str] | None = None,
    time_attr: str | None = None,
    store_as: Mapping[Any, str] | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
    topology: str = WHOLE,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartitionedGraph:
    """Partitions a graph, orders each part by VIP (the probability that a batch contains a vertex), and writes the dataset directory ``root``.

    A stopped run continues if it is called again with the same arguments and data; ``.<name>.writing`` beside ``root`` holds the finished steps.

    Args:
        data: a ``Data`` or ``HeteroData`` with ``edge_index`` or ``adj_t``. Its node and edge attributes that are tensors are stored too. If labels ``y`` are
            classes (integers, none below -1, and 0 among them), vertices with the label -1 are left out of the data's splits. A warning gives their number.
        num_parts: K, the number of parts.
        root: the directory to write. Its parent must exist or be creatable.
        num_neighbors, batch_size: the workload that VIP is computed for. VIP weighs edges, moves and orders vertices, and plans caches. ``num_neighbors`` of a
            ``HeteroData`` is one list for all edge types, or a mapping. Training may use other values; the loader then computes the VIP that it needs.
        method: 'metis', 'kaminpar' (of the extra ``kaminpar``) or 'random'. 'auto' is 'kaminpar' for more than 2^26 edges if KaMinPar is installed, else
            'metis'. Or the assignment itself: an integer tensor [N] of parts in [0, K), or for a ``HeteroData`` a mapping from node types to such tensors.
        edge_weights: what METIS and KaMinPar minimise: 'vip', the draws across the cut, or 'equal', the number of edges cut.
        order: order of vertices inside a part: 'vip', the most probable first, or 'original', as in ``data``. ``device_rows`` takes the first rows.
        refine: if True, vertices then move between parts as long as the predicted number of remote rows falls. A ``HeteroData`` cannot be refined. None:
            refine if METIS or KaMinPar assigned the vertices of a ``Data`` with at most 2^26 edges. True also refines a given or random assignment.
        split: name -> vertex ids or mask; for a ``HeteroData``, node type -> such a mapping. Vertices named here are kept, whatever their label.
            None takes ``train_mask``, ``train_idx`` or ``train_index`` of the data, and in the same way for ``val`` and ``test``.
        edge_split: name -> edge ids (positions in ``edge_index``) or mask; for a ``HeteroData``, edge type -> such a mapping. An edge is in its target's part.
        seeds: the split that VIP is computed for, or ``(type, split)`` if several types have it. 'all' means all vertices; so does 'train' if no type has it.
        replicate: node types whose rows every part gets. None: types whose rows take at most 1 % of the bytes of all rows, and at most 16 MiB.
        time_attr: the name of node or edge times. Neighbour lists are sorted by it, and every part gets all node times, so that ranks sample from memory maps.
        store_as: name of a node or edge attribute -> the format in which its rows are stored and sent: 'fp16', 'bf16', 'int8', 'int4', or with
            blocks as 'int4/32', see :mod:`salientpp.store.narrow`. A name selects an attribute in all types that have it, a pair (type, name) in one type.
        topology: 'whole' stores one set of neighbour lists for all ranks. 'parts' stores lists and edge attributes with the part that owns the target.
        tolerance: how far a part may exceed the mean of each balanced quantity, as a fraction.
        seed: random seed of METIS, KaMinPar or the random assignment. KaMinPar with several threads gives other parts for the same seed.
        overwrite: if True, replace an existing directory once the new one is complete, or a stopped call's work. The call fails if other files lie in it.
        progress: a :class:`~salientpp.Progress`, which is told the start of each step, except steps that a stopped run finished.

    Returns:
        The opened directory.

    Raises:
        ValueError: an argument or the data is invalid; or ``root`` exists, or was begun with other arguments or data.
        OSError: ``root`` cannot be written. It stays unchanged, and the finished steps stay for the next run.
    """
    asked, progress = dict(locals()), progress or Progress()
    options, root = PartitionOptions(method, edge_weights, order, refine, tolerance, seed), Path(root)
    if isinstance(data, HeteroData):
        data = with_sizes(data)
        check_types(data)
    fanouts = check_typed_fanouts(num_neighbors, data.edge_types if isinstance(data, HeteroData) else [None])
    batch_size = check_batch_size(batch_size)
    _check_form(num_parts, topology)
    check_root_is_free(root, overwrite)
    with folder_beside(root) as folder:
        progress.begin("reading the topology")
        # Called here, so that its warnings name the line that called this function.
        contents = read_contents(
            data, split=split, edge_split=edge_split, seeds=seeds, replicate=replicate, time_attr=time_attr, store_as=store_as
        )  # fmt: skip
        how = _decided(options, contents, num_parts)
        job = Job(contents, num_parts, *how, fanouts, batch_size, time_attr, topology, progress)
        _write_directory(replace(job, origin=_origin(contents, asked)), folder, root, overwrite)
    return PartitionedGraph(root, read_manifest(root), 0 if num_parts == 1 else None)


def _check_form(num_parts: int, topology: str) -> None:
    check_num_parts(num_parts)
    check_topology(topology)


def _decided(options: PartitionOptions, contents: Contents, num_parts: int) -> tuple[PartitionOptions, str | None]:
    """Replaces 'auto' and None in the options by choices. Also returns why vertices will not move, or None."""
    num_edges = sum(relation.indices.numel() for relation in contents.graph.relations)
    num_seeds = sum(ids.numel() for ids in contents.starts.values())
    return options.decided(num_parts, num_edges, num_seeds, contents.is_hetero)


def _origin(contents: Contents, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the tables that the data was made of, and the arguments of :func:`partition`. None: the data was made of something else."""
    origin = origin_of(contents.keys.values())
    return None if origin is None else {**origin, "partition": as_given(asked)}


def _check_times(job: Job) -> None:
    """Raises ValueError if the topology is to be stored in parts, but a part alone could not compare its edges' times."""
    if job.topology == PARTS and job.time_attr is not None:
        of_edges = {name: columns.get(job.time_attr) for name, columns in job.contents.edge_columns.items()}
        check_times_of_edges({name: time.dtype for name, time in of_edges.items() if time is not None}, job.time_attr)


def _write_directory(job: Job, folder: Path, root: Path, overwrite: bool) -> None:
    """Runs the unfinished steps in ``folder``, and moves it to ``root``."""
    _check_times(job)
    journal = begin(folder, "partition", job.task(), root, overwrite)
    complete(journal, _write_files(job, StepWriter(journal), journal), folder, root, overwrite)


def _write_files(job: Job, writer: StepWriter, journal: Journal) -> dict[str, Any]:
    """Runs the unfinished steps, and returns the manifest without its files."""
    contents = job.contents

    def number_and_describe() -> dict[str, Any]:
        assigned = _assigned(job, writer)
        job.progress.begin("computing inclusion probabilities")
        numberings = _number(job, assigned, writer.root)
        described = _described(job, numberings, assigned)
        for vertices in described.node_types:
            write_numbering(writer, vertices, numberings[vertices.name])
        return described.to_manifest({})

    manifest = dict(writer.step("numbering", number_and_describe))
    journal.drop("assignment")
    job.progress.begin("writing")
    described = Description.of(manifest)
    numberings = {
        vertices.name: Numbering(torch.from_numpy(np.load(writer.root / vertices.original_id_file)), vertices.book)
        for vertices in described.node_types
    }
    for edges, relation in zip(described.edge_types, contents.graph.relations):
        write_edges(writer, edges, described.targets_of_pieces(edges), relation, numberings, contents)
        releaser(relation.indices)()
    for vertices in described.node_types:
        write_vertices(writer, vertices, numberings[vertices.name], contents, job.time_attr)
    if job.origin is not None:
        writer.step("origin", partial(writer.write_json, ORIGIN, job.origin))
    return manifest


def _assigned(job: Job, writer: StepWriter) -> PartitionAssignment:
    """Returns the part of every vertex: read from a finished step, or computed and recorded as a step now."""

    def write() -> dict[str, Any]:
        num_vertices, options = sum(job.contents.graph.num_vertices), job.options
        refined = ", refined" if options.refine else ""
        if job.why_not_refined:
            refined = f", not refined ({job.why_not_refined})"
        silent = " (METIS shows no progress)" if options.method == "metis" else ""
        job.progress.begin(
            f"assigning {num_vertices} vertices to {job.num_parts} parts{options.words}{refined}{silent}"
        )
        assigned = _assign(job)
        writer.write_tensor(_ASSIGNMENT, assigned.assignment.to(torch.int32))
        return {"num_edges": assigned.num_edges, "edge_cut": assigned.edge_cut, "loads": assigned.loads}

    noted = writer.step("assignment", write)
    parts = torch.from_numpy(np.load(writer.root / _ASSIGNMENT)).long()
    return PartitionAssignment(assignment=parts, num_parts=job.num_parts, **noted)


def _assign(job: Job) -> PartitionAssignment:
    """Assigns all vertices to parts. The result is ordered by vertex type."""
    contents = job.contents
    if contents.is_hetero:
        return assign_types(
            contents.graph,
            job.num_parts,
            job.options,
            splits=contents.splits,
            seeds=contents.starts,
            fanouts=job.fanouts,
            batch_size=job.batch_size,
            row_bytes=contents.row_bytes,
        )
    (lists,) = contents.graph.relations
    return assign_for(
        Graph.trusted(lists.indptr, lists.indices),
        job.num_parts,
        job.options,
        splits=contents.splits[None],
        seeds=contents.starts[None],
        num_neighbors=job.fanouts[0],
        batch_size=job.batch_size,
    )


def _number(job: Job, assigned: PartitionAssignment, folder: Path) -> dict[str | None, VipNumbering]:
    contents, order = job.contents, job.options.order
    if contents.is_hetero:
        return number_types(contents.graph, assigned, contents.starts, job.fanouts, job.batch_size, order)
    (lists,) = contents.graph.relations
    graph = Graph.trusted(lists.indptr, lists.indices)
    vip = _unnamed_table(folder, assigned.num_parts, graph.num_vertices)
    numbering = number_vertices(
        graph, assigned, contents.starts[None], job.fanouts[0], job.batch_size, order=order, vip=vip
    )
    return {None: numbering}


def _unnamed_table(folder: Path, *shape: int) -> Tensor:
    """Returns a float32 table in a mapped temporary file. The system can move its pages to disk if memory is short."""
    with says_what_to_do(folder), tempfile.TemporaryFile(dir=folder) as file:
        # Space is reserved now, because a disk that fills up later would kill the process.
        os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))


def _described(job: Job, numberings: Mapping[str | None, VipNumbering], assigned: PartitionAssignment) -> Description:
    """Returns what the manifest says of the directory, apart from its files. ``numberings`` are per vertex type."""
    contents, graph, time_attr = job.contents, job.contents.graph, job.time_attr
    is_typed = contents.is_hetero or any(contents.edge_splits.values()) or time_attr is not None
    has_frames = any(contents.node_frames.values()) or any(contents.edge_frames.values())
    version = version_of(
        job.topology,
        is_typed=is_typed,
        is_narrow=any(contents.narrow.values()),
        has_frames=has_frames,
        has_narrow_edges=any(contents.edge_narrow.values()),
        has_keys=bool(contents.keys),
    )
    parts = dict(zip(graph.node_types, assigned.assignment.split(list(graph.num_vertices))))

    def counts(splits: Mapping[str, Tensor], part: Tensor) -> dict[str, list[int]]:
        return {name: torch.bincount(part[ids], minlength=assigned.num_parts).tolist() for name, ids in splits.items()}

    node_types = tuple(
        VertexType(
            name=name,
            prefix=placed(version, "node_types", number)["prefix"],
            num_vertices=size,
            offsets=numberings[name].book.offsets.tolist(),
            attributes={
                column: _describe(rows, contents.narrow[name].get(column))
                for column, rows in contents.node_columns[name].items()
            },
            splits=counts(contents.splits[name], parts[name]),
            num_classes=num_classes_of(contents.node_columns[name].get("y")),
            replicated=name in contents.replicated,
            frames={each: frame.to_json() for each, frame in contents.node_frames[name].items()},
            keys=contents.keys[name].described() if name in contents.keys else None,
        )
        for number, (name, size) in enumerate(zip(graph.node_types, graph.num_vertices))
    )
    edge_types = tuple(
        EdgeType(
            name=name,
            prefix=placed(version, "edge_types", number)["prefix"],
            num_edges=relation.indices.numel(),
            edge_offsets=_edge_offsets(relation, parts[graph.node_types[relation.target]], assigned.num_parts)
            if job.topology == PARTS
            else None,
            attributes={
                column: _describe(rows, contents.edge_narrow[name].get(column))
                for column, rows in contents.edge_columns[name].items()
            },
            frames={each: frame.to_json() for each, frame in contents.edge_frames[name].items()},
            splits=counts(
                contents.edge_splits[name], _part_of_edges(relation, parts[graph.node_types[relation.target]])
            )
            if contents.edge_splits[name]
            else {},
        )
        for number, (name, relation) in enumerate(zip(graph.edge_types, graph.relations))
    )
    return Description(
        version=version,
        num_parts=assigned.num_parts,
        node_types=node_types,
        edge_types=edge_types,
        topology=job.topology,
        time_attr=time_attr,
        num_neighbors=job.fanouts,
        batch_size=job.batch_size,
        seeds=contents.seeds,
        quality={name: getattr(assigned, name) for name in ("edge_cut", "edge_cut_fraction", "balance")},
        partitioning=job.options.to_json(),
        has_origin=job.origin is not None,
    )


def _edge_offsets(relation: Relation, part: Tensor, num_parts: int) -> list[int]:
    """Returns K + 1 numbers: the first edge into each part, then the number of all edges."""
    sizes = torch.zeros(num_parts + 1, dtype=torch.int64, device="cpu")
    sizes.index_add_(0, part + 1, relation.indptr.diff())
    return sizes.cumsum(0).tolist()


def _part_of_edges(relation: Relation, part: Tensor) -> Tensor:
    """Returns int64 [E]: for each edge, in the user's order, the part that owns its target."""
    in_lists = torch.repeat_interleave(part, relation.indptr.diff())
    if relation.edge_id is None:
        return in_lists
    of_user = torch.empty_like(in_lists)
    of_user[relation.edge_id] = in_lists
    return of_user


def _describe(rows: Tensor, stored: tuple[Narrow, Loss] | None = None) -> dict[str, Any]:
    """Returns the manifest's entry of an attribute. It has the encoding and its error if ``stored`` gives them."""
    entry: dict[str, Any] = {"dtype": str(rows.dtype).removeprefix("torch."), "row_shape": list(rows.shape[1:])}
    if stored is not None:
        narrow, loss = stored
        entry["stored_as"] = {
            "format": narrow.format,
            "row_bytes": narrow.row_bytes,
            "largest_error": loss.largest,
            "relative_rms_error": loss.relative_rms,
        }
    return entry
