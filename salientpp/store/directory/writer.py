"""How is a graph partitioned and written as a dataset directory?

Steps, each noted in a journal (:mod:`salientpp.store.directory.journal`) once its files are on the disk: the assignment of vertices to parts; their order and
inclusion probabilities, and with them all that the manifest says but for files; every file of edges; every part's rows and splits. The manifest comes last.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.files import where_to_write
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import with_sizes
from salientpp.graph.mapped import nothing, releaser
from salientpp.graph.relation import Relation
from salientpp.partitioning.assign import PartitionAssignment
from salientpp.partitioning.numbering import Layout, Numbering, assign_for, choose_method, lay_out, relabeled_edges
from salientpp.partitioning.typed import Fanouts, assign_types, check_typed_fanouts, lay_out_types
from salientpp.progress import Progress
from salientpp.store.directory.attributes import check_types
from salientpp.store.directory.contents import Contents, describe, read_contents
from salientpp.store.directory.description import Description, EdgeType, VertexType
from salientpp.store.directory.files import STORED_AS, numpy_dtype
from salientpp.store.directory.identity import identify
from salientpp.store.directory.journal import JOURNAL, Journal, alone, has_steps, says_what_to_do
from salientpp.store.directory.labels import num_classes_of
from salientpp.store.directory.manifest import manifest_checksum, read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import Narrow
from salientpp.store.rows import put_rows
from salientpp.vip.inclusion import check_batch_size

_COPY_BYTES = 64 * 2**20

#: Of a mapped file about as much is resident while its rows are copied.
_SPAN_BYTES = 256 * 2**20

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

    A run that was stopped, however, goes on where it was when it is called again with the same arguments and data: what it had done lies in
    ``.<name>.writing`` beside ``root``. Data in memory is the same if its checksums are, arrays that are mapped from files if these have the same names,
    sizes and times.

    Args:
        data: a ``Data`` or ``HeteroData`` with ``edge_index`` or ``adj_t``; its node and edge attributes that are tensors
            are stored with it. Vertices with the label ``y`` -1 are left out of its masks where labels are classes: integers, none below -1, and 0 among them.
            A warning says how many.
        num_parts: K, the number of parts.
        root: the directory to write; its parent must exist or be creatable.
        num_neighbors, batch_size: the workload whose VIP orders the rows and is stored for the cache; of a ``HeteroData`` one list for all edge
            types, or a mapping. Training with other numbers is right as well, the loader then computes what it needs.
        method: 'metis-vip' (METIS with VIP edge weights), 'metis', 'kaminpar-vip' and 'kaminpar' (with KaMinPar, an extra), 'random'; 'auto' is
            'kaminpar-vip' for more than 2^26 edges where KaMinPar is installed, else 'metis-vip'. Each also with '-refined' behind it, where vertices then move
            while fewer rows are predicted to travel. Or the given assignment: an integer tensor [N]
            of parts in [0, K); of a ``HeteroData`` a mapping from node types to such tensors.
        split: name -> vertex ids or mask, of a ``HeteroData`` node type -> such a mapping. Every vertex that it names is kept, whatever its label.
            None takes ``train_mask``, ``train_idx`` or ``train_index`` of the data, and so for ``val`` and ``test``.
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
        overwrite: replace an existing dataset directory (only once the new one is complete), or the work of another call that was stopped.
        progress: told of every step that is not done.

    Returns:
        The directory, opened.

    Raises:
        ValueError: an argument or the data is wrong; ``root`` exists, or was begun with others.
        OSError: ``root`` cannot be written. An existing directory is then left as it was, and what was done stays for the next run.
    """
    root, progress = Path(root), progress or Progress()
    if isinstance(data, HeteroData):
        data = with_sizes(data)
        check_types(data)
    fanouts = check_typed_fanouts(num_neighbors, data.edge_types if isinstance(data, HeteroData) else [None])
    batch_size = check_batch_size(batch_size)
    _check_root_is_free(root, overwrite)
    with _folder_beside(root) as folder:
        progress.begin("reading the topology")
        contents = read_contents(
            data,
            split=split,
            edge_split=edge_split,
            seeds=seeds,
            replicate=replicate,
            time_attr=time_attr,
            store_as=store_as,
        )
        method = choose_method(method, sum(relation.indices.numel() for relation in contents.graph.relations))
        task = {
            "num_parts": num_parts,
            "method": _named(method),
            "num_neighbors": fanouts,
            "batch_size": batch_size,
            "seeds": contents.seeds,
            "replicate": sorted(map(str, contents.replicated)),
            "time_attr": time_attr,
            "store_as": [
                [type_, name, narrow.format]
                for type_, of in contents.narrow.items()
                for name, (narrow, _) in of.items()
            ],
            "tolerance": tolerance,
            "seed": seed,
            "data": _identify(contents),
        }
        journal = Journal.open(folder, "partition", task, overwrite=overwrite, name=root)
        for part in folder.glob("part-*") if not journal.steps else ():  # of a call that was given up
            shutil.rmtree(part)
        writer = _Writer(journal)

        def assign() -> PartitionAssignment:
            by = f" by {method}" if isinstance(method, str) else ""
            progress.begin(f"assigning {sum(contents.graph.num_vertices)} vertices to {num_parts} parts{by}")
            return _assign(contents, num_parts, method, fanouts, batch_size, tolerance, seed)

        def plan() -> dict[str, Any]:
            assigned = _assigned(writer, num_parts, assign)
            progress.begin("computing inclusion probabilities")
            layouts = _lay_out(contents, assigned, fanouts, batch_size, folder)
            described = _describe(contents, layouts, assigned, time_attr, fanouts, batch_size)
            for vertices in described.node_types:
                _write_layout(writer, vertices, layouts[vertices.name])
            return described.to_manifest({})

        manifest = dict(writer.step("layout", plan))
        journal.drop("assignment")
        progress.begin("writing")
        described = Description.of(manifest)
        numberings = {
            vertices.name: Numbering(torch.from_numpy(np.load(folder / vertices.original_id_file)), vertices.book)
            for vertices in described.node_types
        }
        for edges, relation in zip(described.edge_types, contents.graph.relations):
            _write_edges(writer, edges, relation, numberings, contents)
            releaser(relation.indices)()
        for vertices in described.node_types:
            _write_vertices(writer, vertices, numberings[vertices.name], contents, time_attr)
        manifest["files"] = journal.file_entries()
        manifest["checksum"] = manifest_checksum(manifest)
        journal.finish(json.dumps(manifest, indent=1, sort_keys=True))
        _check_root_is_free(root, overwrite)  # again: hours may have passed
        _move_into_place(folder, root)
        (root / JOURNAL).unlink()
    return PartitionedGraph(root, read_manifest(root), 0 if num_parts == 1 else None)


def _named(method: Any) -> Any:
    """What tells methods apart, as JSON."""
    if isinstance(method, Mapping):
        return {str(name): _named(parts) for name, parts in method.items()}
    return identify(method.detach().cpu()) if isinstance(method, Tensor) else str(method)


def _identify(contents: Contents) -> list[list[Any]]:
    """What tells the data apart from other data: the name of every array and what identifies it."""
    graph, found = contents.graph, []
    for edge_type, relation in zip(graph.edge_types, graph.relations):
        of = "" if edge_type is None else f" of {edge_type}"
        lists = {"edges": relation.indices, "ends of edges": relation.indptr, "order of edges": relation.edge_id}
        found += [(f"{name}{of}", array) for name, array in lists.items() if array is not None]
        found += [(f"{name}{of}", array) for name, array in contents.edge_columns[edge_type].items()]
        found += [(f"split {name}{of}", array) for name, array in contents.edge_splits[edge_type].items()]
    for node_type in graph.node_types:
        of = "" if node_type is None else f" of {node_type!r}"
        found += [(f"{name}{of}", array) for name, array in contents.node_columns[node_type].items()]
        found += [(f"split {name}{of}", array) for name, array in contents.splits[node_type].items()]
    sizes = [[f"number of {name or 'vertices'}", n] for name, n in zip(graph.node_types, graph.num_vertices)]
    return [*sizes, *sorted([name, identify(array)] for name, array in found)]


# --- the plan ---------------------------------------------------------------------------------------------


def _assigned(writer: _Writer, num_parts: int, assign: Callable[[], PartitionAssignment]) -> PartitionAssignment:
    """The parts of all vertices, as they were noted, or else computed and noted now."""

    def write() -> dict[str, Any]:
        assigned = assign()
        writer.write_tensor(_ASSIGNMENT, assigned.assignment.to(torch.int32))
        return {"num_edges": assigned.num_edges, "edge_cut": assigned.edge_cut, "loads": assigned.loads}

    noted = writer.step("assignment", write)
    parts = torch.from_numpy(np.load(writer.root / _ASSIGNMENT)).long()
    return PartitionAssignment(assignment=parts, num_parts=num_parts, **noted)


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
    contents: Contents,
    assigned: PartitionAssignment,
    fanouts: Sequence[Sequence[int]],
    batch_size: int,
    folder: Path,
) -> dict[str | None, Layout]:
    """Per type, how its vertices are numbered."""
    if contents.is_hetero:
        return lay_out_types(contents.graph, assigned, contents.starts, fanouts, batch_size)
    (lists,) = contents.graph.relations
    graph = Graph.trusted(lists.indptr, lists.indices)
    vip = _unnamed_table(folder, assigned.num_parts, graph.num_vertices)
    return {None: lay_out(graph, assigned, contents.starts[None], fanouts[0], batch_size, vip)}


def _unnamed_table(folder: Path, *shape: int) -> Tensor:
    """float32 of that shape, mapped from a file that nobody sees: what is in it gives way where memory is short."""
    with says_what_to_do(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))  # a disk that is full later ends the process
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))


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


@contextlib.contextmanager
def _folder_beside(root: Path) -> Iterator[Path]:
    """The directory that becomes ``root``, held alone. On failure it stays if the next run can go on with it; else it goes, with the parents made for it."""
    place = Path(os.path.realpath(root))
    folder = place.parent / f".{place.name}.writing"
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # nearest first

    def leave() -> None:
        for path in made[1:]:
            with contextlib.suppress(OSError):  # another process may have put something there
                path.rmdir()

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        leave()
        raise type(error)(
            error.errno,
            f"{root} cannot be written ({error.strerror}); {where_to_write(error, 'choose a root in a directory that you may write to')}",
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or (not made and found.st_uid != os.geteuid()):
        raise ValueError(f"{folder} is no directory of yours; remove it, or choose another root")
    with alone(folder, root):
        try:
            yield folder
        except BaseException:
            if (made or (folder / JOURNAL).is_file()) and not has_steps(folder):
                shutil.rmtree(folder, ignore_errors=True)
                leave()
            raise


def _move_into_place(temporary: Path, root: Path) -> None:
    place = Path(os.path.realpath(root))  # a link stays
    if not place.exists():
        temporary.rename(place)
        return
    # Not the process id alone: in a container it is often the same in every run, and a killed run leaves its files.
    old = place.parent / f".{place.name}.replaced-{os.getpid()}-{secrets.token_hex(4)}"
    place.rename(old)
    try:
        temporary.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old)


class _Writer:
    """Writes arrays piece by piece, in steps that the journal notes."""

    def __init__(self, journal: Journal) -> None:
        self.root = journal.root
        self._journal = journal
        self._written: dict[str, dict[str, Any]] = {}

    def step(self, name: str, write: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any]:
        """What a step finds: of the journal if it is done, else of ``write``, whose files get their names now."""
        facts = self._journal.facts(name)
        if facts is None:
            found = write()
            facts = self._journal.note(name, self._written, found or {})
            self._written = {}
        return facts

    def write(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
        """Write tensors that follow one another along dimension 0."""
        stored, on_disk = STORED_AS.get(dtype, dtype), numpy_dtype(dtype)
        path = self._journal.work / name
        header = {"descr": np.lib.format.dtype_to_descr(on_disk), "fortran_order": False, "shape": tuple(shape)}
        with says_what_to_do(self.root / name):
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for piece in pieces:
                    file.write(
                        piece.to(dtype).contiguous().view(stored).numpy().data.cast("B") if piece.numel() else b""
                    )
                file.flush()
                os.fsync(file.fileno())
        self._written[name] = {"dtype": on_disk.str, "shape": list(shape)}

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        self.write(name, tensor.dtype, tensor.shape, [tensor])


def _write_layout(writer: _Writer, vertices: VertexType, layout: Layout) -> None:
    """Original ids and probabilities of one type of vertices."""
    writer.write_tensor(vertices.original_id_file, layout.order)
    for part_id, probability in enumerate(layout.vip):
        writer.write_tensor(vertices.vip_file(part_id), probability)


def _write_edges(
    writer: _Writer, edges: EdgeType, relation: Relation, numberings: Mapping[str | None, Numbering], contents: Contents
) -> None:
    """Topology, attributes and splits of one edge type."""
    targets, sources = numberings[edges.target], numberings[edges.source]
    indptr, _ = relabeled_edges(relation, targets, sources)

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        """The user's numbers of edges in new order, and their sources."""
        for position, source in relabeled_edges(relation, targets, sources)[1]:
            yield position if relation.edge_id is None else relation.edge_id[position], source

    def write_lists() -> None:
        writer.write_tensor(edges.indptr_file, indptr)
        sources_of_all = (source for _, source in pieces())
        writer.write(edges.indices_file, relation.indices.dtype, relation.indices.shape, sources_of_all)

    def write_rows(name: str, rows: Tensor) -> None:
        writer.write(edges.rows_file(name), rows.dtype, rows.shape, (rows[number] for number, _ in pieces()))

    def write_split(name: str, ids: Tensor) -> None:
        chosen = torch.zeros(edges.num_edges, dtype=torch.bool, device="cpu")
        chosen[ids] = True
        position = torch.cat([chosen[:0], *(chosen[number] for number, _ in pieces())]).nonzero().flatten()
        first = torch.searchsorted(position, indptr[targets.book.offsets]).tolist()
        for part_id, (begin, end) in enumerate(pairwise(first)):
            writer.write_tensor(edges.split_file(name, part_id), position[begin:end])

    writer.step(edges.indices_file, write_lists)
    for name, rows in contents.edge_columns[edges.name].items():
        writer.step(edges.rows_file(name), partial(write_rows, name, rows))
    for name, ids in contents.edge_splits[edges.name].items():
        writer.step(f"{edges.prefix}split {name}", partial(write_split, name, ids))


def _take(rows: Tensor, ids: Tensor) -> Iterator[Tensor]:
    """``rows[ids]`` in pieces. A mapped file is read from its beginning to its end for each, and not held."""
    release = releaser(rows)
    num_runs = 1 if release is nothing else -(-rows.nbytes // _SPAN_BYTES)
    for some in ids.split(max(1, _COPY_BYTES // max(1, rows.nbytes // max(1, rows.size(0))))):
        if num_runs <= 1:
            yield rows[some]
            continue
        piece = torch.empty((some.numel(), *rows.shape[1:]), dtype=rows.dtype, device="cpu")
        ascending = some.argsort()
        for run in ascending.split(-(-some.numel() // num_runs)):
            put_rows(rows, some[run], piece, run)
            release()
        yield piece


def _write_vertices(
    writer: _Writer, vertices: VertexType, numbering: Numbering, contents: Contents, time_attr: str | None
) -> None:
    """Rows and splits of one type of vertices."""
    columns, narrow = contents.node_columns[vertices.name], contents.narrow[vertices.name]
    order = numbering.order

    def write_rows(file: str, rows: Tensor, ids: Tensor, stored: Narrow | None = None) -> None:
        pieces = _take(rows, ids)
        if stored is None:
            writer.write(file, rows.dtype, (ids.numel(), *rows.shape[1:]), pieces)
        else:
            writer.write(file, torch.uint8, (ids.numel(), stored.row_bytes), map(stored.encode, pieces))

    def write_column(name: str, rows: Tensor, part_id: int, ids: Tensor) -> None:
        write_rows(vertices.rows_file(name, part_id), rows, ids, narrow[name][0] if name in narrow else None)

    if time_attr in columns:
        file = vertices.time_file(time_attr)
        writer.step(file, partial(write_rows, file, columns[time_attr], order))
    for name, rows in columns.items() if vertices.replicated else ():
        writer.step(vertices.rows_file(name, 0), partial(write_column, name, rows, 0, order))
    in_split = {name: torch.zeros(vertices.num_vertices, dtype=torch.bool, device="cpu") for name in vertices.splits}
    for name, ids in contents.splits[vertices.name].items():
        in_split[name][ids] = True

    def write_part(part_id: int) -> None:
        begin, end = numbering.book.range_of(part_id)
        own = order[begin:end]
        for name, rows in columns.items() if not vertices.replicated else ():
            write_column(name, rows, part_id, own)
        for name, mask in in_split.items():
            writer.write_tensor(vertices.split_file(name, part_id), mask[own].nonzero().flatten() + begin)

    for part_id in range(numbering.book.num_parts):
        writer.step(f"{vertices.prefix}part {part_id}", partial(write_part, part_id))
