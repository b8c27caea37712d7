"""Partitions a graph and writes it as a dataset directory.

Steps, each noted in a journal (:mod:`salientpp.store.directory.journal`) once its files are on the disk: the assignment of vertices to parts; their numbering
and inclusion probabilities, and with them all that the manifest says but for files; every file of edges; every part's rows and splits. The manifest comes last.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
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
from salientpp.store.directory.contents import read_contents
from salientpp.store.directory.description import Description, EdgeType, VertexType
from salientpp.store.directory.journal import JOURNAL, Journal, says_what_to_do
from salientpp.store.directory.labels import num_classes_of
from salientpp.store.directory.manifest import manifest_checksum, read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.step_writer import StepWriter
from salientpp.store.directory.task import Job
from salientpp.store.directory.type_files import write_edges, write_numbering, write_vertices
from salientpp.store.directory.unfinished import check_root_is_free, folder_beside, move_into_place
from salientpp.store.narrow import Loss, Narrow
from salientpp.vip.inclusion import check_batch_size

#: The parts of all vertices, until it is known in what order they are written.
_ASSIGNMENT = "assignment.npy"


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
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartitionedGraph:
    """Partition a graph, order each part by VIP, and write the dataset directory ``root``.

    A run that was stopped goes on where it was when it is called again with the same arguments and data; ``.<name>.writing`` beside ``root`` has what it did.

    Args:
        data: a ``Data`` or ``HeteroData`` with ``edge_index`` or ``adj_t``; its node and edge attributes that are tensors are stored with it. Vertices with
            the label ``y`` -1 are left out of its masks where labels are classes: integers, none below -1, and 0 among them. A warning says how many.
        num_parts: K, the number of parts.
        root: the directory to write; its parent must exist or be creatable.
        num_neighbors, batch_size: the workload whose VIP weighs edges, moves and orders vertices, and is stored for the cache; of a ``HeteroData`` one list
            for all edge types, or a mapping. Training with other numbers is right as well, the loader then computes what it needs.
        method: what assigns vertices to parts: 'metis', 'kaminpar' (an extra), 'random'; 'auto' is 'kaminpar' for more than 2^26 edges where KaMinPar is
            installed, else 'metis'. Or the given assignment: an integer tensor [N] of parts in [0, K); of a ``HeteroData`` a mapping from node types to these.
        edge_weights: what METIS and KaMinPar minimise: 'vip', the draws across the cut, or 'equal', the number of edges cut.
        order: how vertices are numbered inside a part: 'vip', the most probable first, or 'original', as in ``data``. ``device_rows`` takes the first rows.
        refine: whether vertices then move between parts while fewer rows are predicted to travel; there is no such refinement of a ``HeteroData``. None:
            where METIS or KaMinPar assigned the vertices of a ``Data`` with at most 2^26 edges. True refines a given or random assignment too.
        split: name -> vertex ids or mask, of a ``HeteroData`` node type -> such a mapping. Every vertex that it names is kept, whatever its label.
            None takes ``train_mask``, ``train_idx`` or ``train_index`` of the data, and so for ``val`` and ``test``.
        edge_split: name -> edge ids (positions in ``edge_index``) or mask, of a ``HeteroData`` edge type -> such a mapping. An edge is in its target's part.
        seeds: the split that the VIP is computed for; without such a split, all vertices of the part. If several types have it, ``(type, split)``.
        replicate: node types whose rows every part is to have; None: those whose rows take at most 1 % of the bytes of all rows and 16 MiB.
        time_attr: the name of node or edge times. Neighbour lists are stored in their order, and node times whole, so that ranks draw from memory maps.
        store_as: name of a node attribute -> the format that its rows are stored in and travel in: 'fp16', 'bf16', 'fp8', 'int8', 'int4', or with blocks as
            'int4/32', see :mod:`salientpp.store.narrow`. With several types a name means this attribute of all that have it, and (type, name) that of one.
        tolerance: allowed excess of a part over the mean, per balanced quantity.
        seed: of METIS, KaMinPar or the random assignment.
        overwrite: replace an existing dataset directory (only once the new one is complete), or the work of another call that was stopped.
        progress: told of every step that is not done.

    Returns:
        The directory, opened.

    Raises:
        ValueError: an argument or the data is wrong; ``root`` exists, or was begun with others.
        OSError: ``root`` cannot be written. It is then left as it was, and what was done stays for the next run.
    """
    progress = progress or Progress()
    options, root = PartitionOptions(method, edge_weights, order, refine, tolerance, seed), Path(root)
    if isinstance(data, HeteroData):
        data = with_sizes(data)
        check_types(data)
    fanouts = check_typed_fanouts(num_neighbors, data.edge_types if isinstance(data, HeteroData) else [None])
    check_num_parts(num_parts)
    batch_size = check_batch_size(batch_size)
    check_root_is_free(root, overwrite)
    with folder_beside(root) as folder:
        progress.begin("reading the topology")
        # Called from here: its warnings name the line that called this function.
        contents = read_contents(
            data, split=split, edge_split=edge_split, seeds=seeds, replicate=replicate, time_attr=time_attr, store_as=store_as
        )  # fmt: skip
        num_edges = sum(relation.indices.numel() for relation in contents.graph.relations)
        num_seeds = sum(ids.numel() for ids in contents.starts.values())
        options, why = options.decided(num_parts, num_edges, num_seeds, contents.is_hetero)
        job = Job(contents, num_parts, options, why, fanouts, batch_size, time_attr, progress)
        _write_directory(job, folder, root, overwrite)
    return PartitionedGraph(root, read_manifest(root), 0 if num_parts == 1 else None)


def _write_directory(job: Job, folder: Path, root: Path, overwrite: bool) -> None:
    """Do every step that is not done in ``folder``, and move it to ``root``."""
    journal = Journal.open(folder, "partition", job.task(), overwrite=overwrite, name=root)
    for part in folder.glob("part-*") if not journal.steps else ():  # of a call that was given up
        shutil.rmtree(part)
    manifest = _write_files(job, StepWriter(journal), journal)
    manifest["files"] = journal.file_entries()
    manifest["checksum"] = manifest_checksum(manifest)
    journal.finish(json.dumps(manifest, indent=1, sort_keys=True))
    check_root_is_free(root, overwrite)  # again: hours may have passed
    move_into_place(folder, root)
    (root / JOURNAL).unlink()


def _write_files(job: Job, writer: StepWriter, journal: Journal) -> dict[str, Any]:
    """Do every step that is not done, and return the manifest but for the files."""
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
        write_edges(writer, edges, relation, numberings, contents)
        releaser(relation.indices)()
    for vertices in described.node_types:
        write_vertices(writer, vertices, numberings[vertices.name], contents, job.time_attr)
    return manifest


def _assigned(job: Job, writer: StepWriter) -> PartitionAssignment:
    """The parts of all vertices, as they were noted, or else computed and noted now."""

    def write() -> dict[str, Any]:
        num_vertices, options = sum(job.contents.graph.num_vertices), job.options
        refined = ", refined" if options.refine else ""
        if job.why_not_refined:
            refined = f", not refined ({job.why_not_refined})"
        job.progress.begin(f"assigning {num_vertices} vertices to {job.num_parts} parts{options.words}{refined}")
        assigned = _assign(job)
        writer.write_tensor(_ASSIGNMENT, assigned.assignment.to(torch.int32))
        return {"num_edges": assigned.num_edges, "edge_cut": assigned.edge_cut, "loads": assigned.loads}

    noted = writer.step("assignment", write)
    parts = torch.from_numpy(np.load(writer.root / _ASSIGNMENT)).long()
    return PartitionAssignment(assignment=parts, num_parts=job.num_parts, **noted)


def _assign(job: Job) -> PartitionAssignment:
    """The parts of all vertices, those of one type after those of another."""
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
    """Per type, how its vertices are numbered."""
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
    """float32 of that shape, mapped from a file that nobody sees: what is in it gives way where memory is short."""
    with says_what_to_do(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))  # a disk that is full later ends the process
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))


def _described(job: Job, numberings: Mapping[str | None, VipNumbering], assigned: PartitionAssignment) -> Description:
    """The description, without the files; ``numberings`` are per type of vertices."""
    contents, graph, time_attr = job.contents, job.contents.graph, job.time_attr
    version = 2 if contents.is_hetero or any(contents.edge_splits.values()) or time_attr is not None else 1
    version = 3 if any(contents.narrow.values()) else version
    parts = dict(zip(graph.node_types, assigned.assignment.split(list(graph.num_vertices))))

    def counts(splits: Mapping[str, Tensor], part: Tensor) -> dict[str, list[int]]:
        return {name: torch.bincount(part[ids], minlength=assigned.num_parts).tolist() for name, ids in splits.items()}

    node_types = tuple(
        VertexType(
            name=name,
            prefix=f"n{number}." if version > 1 else "",
            num_vertices=size,
            offsets=numberings[name].book.offsets.tolist(),
            attributes={
                column: _describe(rows, contents.narrow[name].get(column))
                for column, rows in contents.node_columns[name].items()
            },
            splits=counts(contents.splits[name], parts[name]),
            num_classes=num_classes_of(contents.node_columns[name].get("y")),
            replicated=name in contents.replicated,
        )
        for number, (name, size) in enumerate(zip(graph.node_types, graph.num_vertices))
    )
    edge_types = tuple(
        EdgeType(
            name=name,
            prefix=f"e{number}." if version > 1 else "",
            num_edges=relation.indices.numel(),
            attributes={column: _describe(rows) for column, rows in contents.edge_columns[name].items()},
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
        time_attr=time_attr,
        num_neighbors=job.fanouts,
        batch_size=job.batch_size,
        seeds=contents.seeds,
        quality={name: getattr(assigned, name) for name in ("edge_cut", "edge_cut_fraction", "balance")},
        partitioning=job.options.to_json(),
    )


def _part_of_edges(relation: Relation, part: Tensor) -> Tensor:
    """int64 [E]: by the user's number of an edge, the part that owns its target."""
    in_lists = torch.repeat_interleave(part, relation.indptr.diff())
    if relation.edge_id is None:
        return in_lists
    of_user = torch.empty_like(in_lists)
    of_user[relation.edge_id] = in_lists
    return of_user


def _describe(rows: Tensor, stored: tuple[Narrow, Loss] | None = None) -> dict[str, Any]:
    """What the manifest says of an attribute, and of how it is ``stored`` narrower."""
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
