"""How is a graph partitioned and written as a dataset directory?"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.graph.csc import Graph
from salientpp.graph.mapped import nothing, releaser
from salientpp.graph.relation import Relation
from salientpp.plan.layout import Layout, assign_for, lay_out, relabeled_edges
from salientpp.plan.partition import PartitionAssignment
from salientpp.plan.typed import Fanouts, assign_types, check_typed_fanouts, lay_out_types
from salientpp.plan.vip import check_batch_size
from salientpp.store.directory.contents import Contents, check_types, describe, num_classes_of, read_contents
from salientpp.store.directory.description import Description, EdgeType, VertexType
from salientpp.store.directory.files import STORED_AS, describe_file, numpy_dtype
from salientpp.store.directory.manifest import manifest_checksum, read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import Narrow
from salientpp.store.rows import put_rows

_COPY_BYTES = 64 * 2**20

#: Of a mapped file about as much is resident while its rows are copied.
_SPAN_BYTES = 256 * 2**20


def partition(
    data: Data | HeteroData,
    num_parts: int,
    root: str | Path,
    num_neighbors: Fanouts = (15, 10, 5),
    batch_size: int = 1024,
    *,
    method: str | Tensor | Mapping[str, Tensor] = "metis-vip",
    split: Mapping[str, Any] | None = None,
    edge_split: Mapping[Any, Any] | None = None,
    seeds: str | tuple[str, str] = "train",
    replicate: Iterable[str] | None = None,
    time_attr: str | None = None,
    store_as: Mapping[Any, str] | None = None,
    tolerance: float = 0.05,
    seed: int = 0,
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> PartitionedGraph:
    """Partition a graph, order each part by VIP, and write the dataset directory ``root``.

    Args:
        data: a ``Data`` or ``HeteroData`` with ``edge_index`` or ``adj_t``; its node and edge attributes that are tensors
            are stored with it. Vertices with a negative ``y`` are in no split.
        num_parts: K, the number of parts.
        root: the directory to write; its parent must exist or be creatable.
        num_neighbors, batch_size: the workload whose VIP orders the rows and is stored for the cache; of a ``HeteroData`` one list for all edge
            types, or a mapping. Training with other numbers is right as well, the loader then computes what it needs.
        method: 'metis-vip' (METIS with VIP edge weights), 'metis', 'kaminpar-vip' and 'kaminpar' (with KaMinPar, an extra), 'random'; each
            also with '-refined' behind it, where vertices then move while fewer rows are predicted to travel. Or the given assignment: an integer tensor [N]
            of parts in [0, K); of a ``HeteroData`` a mapping from node types to such tensors.
        split: name -> vertex ids or mask, of a ``HeteroData`` node type -> such a mapping; None takes ``train_mask``, ``train_idx`` or
            ``train_index`` of the data, and so for ``val`` and ``test``.
        edge_split: name -> edge ids or mask, of a ``HeteroData`` edge type -> such a mapping; ids are positions in ``edge_index``. An edge belongs
            to the part that owns its target.
        seeds: the split that the VIP is computed for; without such a split, all vertices of the part. If several types have it, ``(type, split)``.
        replicate: node types whose rows every part is to have; None: those whose rows take at most 1 % of the bytes of all rows and 16 MiB.
        time_attr: the name of node or edge times. Neighbour lists are then stored in their order, and node times whole, so that ranks draw by them
            from memory maps, and from copies without the other parts.
        store_as: name of a node attribute -> the format that its rows are stored in and travel in, ``{"x": "int8"}``: 'fp16', 'bf16', 'fp8', 'int8',
            'int4', or with blocks as 'int4/32', see :mod:`salientpp.store.narrow`. Batches have them as they were, but for what was lost, which ``salientpp
            info`` shows. With several types a name means this attribute of every type that has it, and (node type, name) that of one.
        tolerance: allowed excess of a part over the mean, per balanced quantity.
        seed: of METIS or of the random assignment.
        overwrite: replace an existing dataset directory (only once the new one is complete).
        on_step: called with a short description before each step.

    Returns:
        The directory, opened.

    Raises:
        ValueError: an argument or the data is wrong; ``root`` exists.
        OSError: ``root`` cannot be written. An existing directory is then left as it was.
    """
    root = Path(root)
    if isinstance(data, HeteroData):
        check_types(data)
    fanouts = check_typed_fanouts(num_neighbors, data.edge_types if isinstance(data, HeteroData) else [None])
    batch_size = check_batch_size(batch_size)
    _check_root_is_free(root, overwrite)
    with _temporary_beside(root) as temporary:
        on_step("reading the topology")
        contents = read_contents(
            data,
            split=split,
            edge_split=edge_split,
            seeds=seeds,
            replicate=replicate,
            time_attr=time_attr,
            store_as=store_as,
        )
        graph = contents.graph
        on_step(f"assigning {sum(graph.num_vertices)} vertices to {num_parts} parts")
        assigned = _assign(contents, num_parts, method, fanouts, batch_size, tolerance, seed)
        on_step("computing inclusion probabilities")
        layouts = _lay_out(contents, assigned, fanouts, batch_size)
        on_step("writing")
        described = _describe(contents, layouts, assigned, time_attr, fanouts, batch_size)
        writer = _Writer(temporary)
        for edges, relation in zip(described.edge_types, graph.relations):
            _write_edges(writer, edges, relation, layouts, contents)
            releaser(relation.indices)()
        for vertices in described.node_types:
            _write_vertices(writer, vertices, layouts[vertices.name], contents, time_attr)
        manifest = described.to_manifest(writer.files)
        manifest["checksum"] = manifest_checksum(manifest)
        with (temporary / "manifest.json").open("w") as file:
            file.write(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _check_root_is_free(root, overwrite)  # again: hours may have passed
        _move_into_place(temporary, root)
    return PartitionedGraph(root, read_manifest(root), 0 if num_parts == 1 else None)


# --- the plan ---------------------------------------------------------------------------------------------


def _assign(
    contents: Contents,
    num_parts: int,
    method: str | Tensor | Mapping[str, Tensor],
    fanouts: Sequence[Sequence[int]],
    batch_size: int,
    tolerance: float,
    seed: int,
) -> PartitionAssignment:
    """The parts of all vertices, those of one type after those of another."""
    if contents.is_hetero:
        return assign_types(
            contents.graph,
            num_parts,
            method=method,  # type: ignore[arg-type]  # checked there
            splits=contents.splits,
            seeds=contents.starts,
            fanouts=fanouts,
            batch_size=batch_size,
            row_bytes=contents.row_bytes,
            tolerance=tolerance,
            seed=seed,
        )
    (lists,) = contents.graph.relations
    return assign_for(
        Graph.trusted(lists.indptr, lists.indices),
        num_parts,
        method=method,  # type: ignore[arg-type]  # checked there
        splits=contents.splits[None],
        seeds=contents.starts[None],
        num_neighbors=fanouts[0],
        batch_size=batch_size,
        tolerance=tolerance,
        seed=seed,
    )


def _lay_out(
    contents: Contents, assigned: PartitionAssignment, fanouts: Sequence[Sequence[int]], batch_size: int
) -> dict[str | None, Layout]:
    """Per type, how its vertices are numbered."""
    if contents.is_hetero:
        return lay_out_types(contents.graph, assigned, contents.starts, fanouts, batch_size)
    (lists,) = contents.graph.relations
    graph = Graph.trusted(lists.indptr, lists.indices)
    return {None: lay_out(graph, assigned, contents.starts[None], fanouts[0], batch_size)}


def _describe(
    contents: Contents,
    layouts: Mapping[str | None, Layout],
    assigned: PartitionAssignment,
    time_attr: str | None,
    fanouts: list[list[int]],
    batch_size: int,
) -> Description:
    graph = contents.graph
    version = 2 if contents.is_hetero or any(contents.edge_splits.values()) or time_attr is not None else 1
    version = 3 if any(contents.narrow.values()) else version
    parts = {name: layout.part_of_old() for name, layout in layouts.items()}

    def counts(splits: Mapping[str, Tensor], part: Tensor) -> dict[str, list[int]]:
        return {name: torch.bincount(part[ids], minlength=assigned.num_parts).tolist() for name, ids in splits.items()}

    node_types = tuple(
        VertexType(
            name=name,
            prefix=f"n{number}." if version > 1 else "",
            num_vertices=size,
            offsets=layouts[name].book.offsets.tolist(),
            attributes={
                column: describe(rows, contents.narrow[name].get(column))
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
            attributes={column: describe(rows) for column, rows in contents.edge_columns[name].items()},
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
        num_neighbors=fanouts,
        batch_size=batch_size,
        seeds=contents.seeds,
        quality={
            "edge_cut": assigned.edge_cut,
            "edge_cut_fraction": assigned.edge_cut_fraction,
            "balance": dict(assigned.balance),
        },
    )


def _part_of_edges(relation: Relation, part: Tensor) -> Tensor:
    """int64 [E]: by the user's number of an edge, the part that owns its target."""
    in_lists = torch.repeat_interleave(part, relation.indptr.diff())
    if relation.edge_id is None:
        return in_lists
    of_user = torch.empty_like(in_lists)
    of_user[relation.edge_id] = in_lists
    return of_user


# --- the place --------------------------------------------------------------------------------------------


def _check_root_is_free(root: Path, overwrite: bool) -> None:
    if root.exists() and not overwrite:
        raise ValueError(f"{root} exists; pass overwrite=True to replace it, or choose another root")
    if root.exists() and not (root / "manifest.json").is_file():
        raise ValueError(f"{root} exists and is not a dataset directory, so it is not replaced; choose another root")


def _beside(root: Path, purpose: str) -> Path:
    """A new name in the directory of ``root`` (of its target, if it is a link), for a rename within one file system."""
    root = Path(os.path.realpath(root))
    # Not the process id alone: in a container it is often the same in every run, and a killed run leaves its files.
    return root.parent / f".{root.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _temporary_beside(root: Path) -> Iterator[Path]:
    """A new directory to write; on failure it is removed, with the parents that were made for it."""
    temporary, made = _beside(root, "writing"), []
    try:
        try:
            made = [parent for parent in temporary.parents if not parent.exists()]  # nearest first
            temporary.mkdir(parents=True)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"{root} cannot be written ({error.strerror}); choose a root in a directory that you may write to",
            ) from None
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # another process may have put something there
                parent.rmdir()
        raise


def _move_into_place(temporary: Path, root: Path) -> None:
    place = Path(os.path.realpath(root))
    if not place.exists():
        temporary.rename(place)
        return
    old = _beside(root, "replaced")
    place.rename(old)
    try:
        temporary.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old)


class _Writer:
    """Writes arrays piece by piece and remembers sizes and checksums."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}

    def write(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
        """Write tensors that follow one another along dimension 0."""
        stored, on_disk = STORED_AS.get(dtype, dtype), numpy_dtype(dtype)
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        header = {"descr": np.lib.format.dtype_to_descr(on_disk), "fortran_order": False, "shape": tuple(shape)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(piece.to(dtype).contiguous().view(stored).numpy().data.cast("B") if piece.numel() else b"")
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = {
            **describe_file(path),
            "dtype": on_disk.str,
            "shape": list(shape),
        }

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        self.write(name, tensor.dtype, tensor.shape, [tensor])


def _write_edges(
    writer: _Writer, edges: EdgeType, relation: Relation, layouts: Mapping[str | None, Layout], contents: Contents
) -> None:
    """Topology, attributes and splits of one edge type."""
    targets, sources = layouts[edges.target], layouts[edges.source]

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        """The user's numbers of edges in new order, and their sources."""
        for position, source in relabeled_edges(relation, targets, sources)[1]:
            yield position if relation.edge_id is None else relation.edge_id[position], source

    indptr, _ = relabeled_edges(relation, targets, sources)
    writer.write_tensor(edges.indptr_file, indptr)
    writer.write(edges.indices_file, relation.indices.dtype, relation.indices.shape, (source for _, source in pieces()))
    for name, rows in contents.edge_columns[edges.name].items():
        writer.write(edges.rows_file(name), rows.dtype, rows.shape, (rows[number] for number, _ in pieces()))
    for name, ids in contents.edge_splits[edges.name].items():
        chosen = torch.zeros(edges.num_edges, dtype=torch.bool)
        chosen[ids] = True
        position = torch.cat([chosen[:0], *(chosen[number] for number, _ in pieces())]).nonzero().flatten()
        first = torch.searchsorted(position, indptr[targets.book.offsets]).tolist()
        for part_id, (begin, end) in enumerate(pairwise(first)):
            writer.write_tensor(edges.split_file(name, part_id), position[begin:end])


def _take(rows: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """``rows[ids]`` in pieces. A mapped file is read from its beginning to its end for each, and not held."""
    release = releaser(rows)
    num_runs = 1 if release is nothing else -(-rows.nbytes // _SPAN_BYTES)
    for some in ids.split(max(1, _COPY_BYTES // max(1, rows.nbytes // max(1, rows.size(0))))):
        if num_runs <= 1:
            yield rows[some]
            continue
        piece = torch.empty((some.numel(), *rows.shape[1:]), dtype=rows.dtype)
        ascending = some.argsort()
        for run in ascending.split(-(-some.numel() // num_runs)):
            put_rows(rows, some[run], piece, run)
            release()
        yield piece


def _write_vertices(
    writer: _Writer, vertices: VertexType, layout: Layout, contents: Contents, time_attr: str | None
) -> None:
    """Ids, rows, splits and probabilities of one type of vertices."""
    columns, narrow = contents.node_columns[vertices.name], contents.narrow[vertices.name]

    def write_rows(file: str, rows: Tensor, ids: Tensor, stored: Narrow | None = None) -> None:
        pieces = _take(rows, ids)
        if stored is None:
            writer.write(file, rows.dtype, (ids.numel(), *rows.shape[1:]), pieces)
        else:
            writer.write(file, torch.uint8, (ids.numel(), stored.row_bytes), map(stored.encode, pieces))

    def write_column(name: str, rows: Tensor, part_id: int, ids: Tensor) -> None:
        write_rows(vertices.rows_file(name, part_id), rows, ids, narrow[name][0] if name in narrow else None)

    writer.write_tensor(vertices.original_id_file, layout.order)
    if time_attr in columns:
        write_rows(vertices.time_file(time_attr), columns[time_attr], layout.order)
    for name, rows in columns.items() if vertices.replicated else ():
        write_column(name, rows, 0, layout.order)
    in_split = {name: torch.zeros(vertices.num_vertices, dtype=torch.bool) for name in vertices.splits}
    for name, ids in contents.splits[vertices.name].items():
        in_split[name][ids] = True
    for part_id in range(layout.book.num_parts):
        begin, end = layout.book.range_of(part_id)
        own = layout.order[begin:end]
        for name, rows in columns.items() if not vertices.replicated else ():
            write_column(name, rows, part_id, own)
        for name, mask in in_split.items():
            writer.write_tensor(vertices.split_file(name, part_id), mask[own].nonzero().flatten() + begin)
        writer.write_tensor(vertices.vip_file(part_id), layout.vip[part_id])
