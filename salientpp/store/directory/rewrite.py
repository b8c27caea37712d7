"""Rewrites a dataset directory so that its topology is stored in parts instead of whole, or the reverse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from salientpp.graph.mapped import releaser
from salientpp.progress import Progress
from salientpp.store.directory.description import (
    ORIGIN,
    PARTS,
    Description,
    EdgeName,
    EdgeType,
    VertexType,
    check_times_of_edges,
    check_topology,
)
from salientpp.store.directory.files import ARROW, Arrays, verify_file
from salientpp.store.directory.manifest import check_is_there, manifest_checksum, read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.origin import table_origin
from salientpp.store.directory.step_writer import StepWriter
from salientpp.store.directory.type_files import divided
from salientpp.store.directory.unfinished import begin, check_root_is_free, complete, folder_beside
from salientpp.suggestions import suggest_arguments

_PIECE_BYTES = 64 * 2**20


@suggest_arguments
def rewrite_topology(
    root: str | Path,
    to: str | Path,
    topology: str,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartitionedGraph:
    """Writes a copy of a dataset directory that stores the topology whole or in parts. Parts, ids, numbers of edges and rows stay the same.

    A stopped run continues if it is called again; ``.<name>.writing`` beside ``to`` holds the finished steps. Memory is bounded by some pieces of 64 MiB.

    Args:
        root: a directory that :func:`salientpp.partition` wrote. It stays unchanged.
        to: the directory to write. Its parent must exist or be creatable.
        topology: 'whole' or 'parts', as for :func:`salientpp.partition`.
        overwrite: if True, replace an existing dataset directory ``to``, or the work of another call that was stopped.
        progress: a :class:`~salientpp.Progress`, which is told the start of each step.

    Returns:
        The opened directory ``to``.

    Raises:
        DatasetError: ``root`` is incomplete or altered, or is a copy without some part.
        ValueError: ``root`` has this topology already, ``to`` exists, or edges have times that cannot be read in parts.
        OSError: ``to`` cannot be written. The finished steps stay for the next run.
    """
    root, to = Path(root), Path(to)
    check_topology(topology)
    manifest = read_manifest(root)
    old = Description.of(manifest)
    if to.resolve() == root.resolve():
        raise ValueError(f"{root} cannot be rewritten onto itself; choose another directory to write")
    if old.topology == topology:
        raise ValueError(f"{root} has topology={topology!r} already; copy the directory if you need it twice")
    for part_id in range(old.num_parts):
        check_is_there(root, part_id)
    if topology == PARTS and old.time_attr is not None:
        check_times_of_edges(old.dtypes_of_edges(old.time_attr), old.time_attr)
    check_root_is_free(to, overwrite)
    with folder_beside(to) as folder:
        task = {"topology": topology, "contents": manifest_checksum(manifest)}
        journal = begin(folder, "rewrite", task, to, overwrite)
        rewriter = _Rewriter(root, old, topology, StepWriter(journal), progress or Progress())
        complete(journal, rewriter.write(), folder, to, overwrite)
    return PartitionedGraph(to, read_manifest(to), 0 if old.num_parts == 1 else None)


class _Rewriter:
    """Writes the files of the new directory from the files of the directory ``root``, which ``old`` describes."""

    def __init__(self, root: Path, old: Description, topology: str, writer: StepWriter, progress: Progress) -> None:
        self._arrays, self._old, self._writer = Arrays(root, read_manifest(root)["files"]), old, writer
        self._progress = progress
        self._new = old.rewritten(self._edge_offsets() if topology == PARTS else None)

    def write(self) -> dict:
        """Runs the steps that the journal does not list as finished. Returns the manifest, without ``files`` so far."""
        for old, new in zip(self._old.edge_types, self._new.edge_types):
            self._step(f"{new.prefix}indices.npy", partial(self._write_lists, old, new))
            for name in new.attributes:
                self._step(f"{new.prefix}edge_{name}.npy", partial(self._write_rows, old, new, name))
        for step, names in self._copied():
            self._step(step, partial(self._copy, names))
        if (origin := table_origin(self._arrays.root)) is not None:
            origin["partition"]["topology"] = self._new.topology
            self._step(ORIGIN, partial(self._writer.write_json, ORIGIN, origin))
        return self._new.to_manifest({})

    def _step(self, name: str, write: partial[None]) -> None:
        self._progress.begin(f"writing {name}")
        self._writer.step(name, write)

    def _edge_offsets(self) -> dict[EdgeName, list[int]]:
        """Returns, for every relation of a topology that is stored whole, K + 1 numbers: the first edge into each part, then the number of edges."""
        offsets = {}
        for edges in self._old.edge_types:
            indptr = self._open(edges.indptr_file(0))
            offsets[edges.name] = indptr[self._old.vertices(edges.target).offsets].tolist()
        return offsets

    def _copied(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yields the steps that copy files unchanged. Each is (name of the step, pairs of an old and a new file)."""
        parts, time = range(self._old.num_parts), self._old.time_attr
        for old, new in zip(self._old.node_types, self._new.node_types):
            names = [(old.original_id_file, new.original_id_file)]
            names += [(old.time_file(time), new.time_file(time))] if time is not None and time in old.attributes else []
            names += [(old.rows_file(name, 0), new.rows_file(name, 0)) for name in old.attributes if old.replicated]
            yield from ((pair[1], [pair]) for pair in names)
            yield from self._copied_keys(old, new)
            own = () if old.replicated else old.attributes
            for part_id in parts:
                names = [(old.vip_file(part_id), new.vip_file(part_id))]
                names += [(old.rows_file(name, part_id), new.rows_file(name, part_id)) for name in own]
                names += [(old.split_file(name, part_id), new.split_file(name, part_id)) for name in old.splits]
                yield f"{new.prefix}part {part_id}", names
        for edges, others in zip(self._old.edge_types, self._new.edge_types):
            for name in edges.splits:
                pairs = [(edges.split_file(name, part_id), others.split_file(name, part_id)) for part_id in parts]
                yield f"{others.prefix}split {name}", pairs

    def _copied_keys(self, old: VertexType, new: VertexType) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        if old.keys is None:
            return
        index = ("key_schema_file", "key_hashes_file", "key_ids_file")
        yield f"{new.prefix}keys", [(getattr(old, file), getattr(new, file)) for file in index]
        for part_id in range(1 if old.replicated else self._old.num_parts):
            yield f"{new.prefix}keys {part_id}", [(old.keys_file(part_id), new.keys_file(part_id))]

    def _copy(self, names: list[tuple[str, str]]) -> None:
        for old, new in names:
            if self._arrays.files[old]["dtype"] == ARROW:
                self._copy_file(old, new)
                continue
            array = self._open(old)
            self._writer.write(new, array.dtype, array.shape, _in_pieces(array))

    def _copy_file(self, old: str, new: str) -> None:
        entry = self._arrays.files[old]
        verify_file(self._arrays.root, old, entry, full=True)

        def copy(file: BinaryIO) -> int:
            with (self._arrays.root / old).open("rb") as source:
                shutil.copyfileobj(source, file, _PIECE_BYTES)
            return entry["shape"][0]

        self._writer.write_file(new, copy)

    def _write_lists(self, old: EdgeType, new: EdgeType) -> None:
        def starts() -> Iterator[Tensor]:
            """Yields, in pieces, the number of the first edge of every list, counted over all parts."""
            for piece, (first, _) in enumerate(old.pieces):
                for some in _in_pieces(self._open(old.indptr_file(piece))[:-1]):
                    yield some + first

        sizes = self._new.targets_of_pieces(new)
        for piece, (size, (first, end), own) in enumerate(zip(sizes, new.pieces, divided(starts(), sizes))):
            from_zero = chain((some - first for some in own), [torch.tensor([end - first], device="cpu")])
            self._writer.write(new.indptr_file(piece), torch.int64, [size + 1], from_zero)
        self._divide(
            [old.indices_file(piece) for piece in range(len(old.pieces))],
            [new.indices_file(piece) for piece in range(len(new.pieces))],
            new,
        )

    def _write_rows(self, old: EdgeType, new: EdgeType, name: str) -> None:
        self._divide(
            [old.rows_file(name, piece) for piece in range(len(old.pieces))],
            [new.rows_file(name, piece) for piece in range(len(new.pieces))],
            new,
        )

    def _divide(self, old_files: list[str], new_files: list[str], new: EdgeType) -> None:
        """Copies an array of the edges from ``old_files`` to ``new_files``. The new files hold other ranges of the edges."""
        first = self._arrays.open(old_files[0])
        rows = chain.from_iterable(_in_pieces(self._open(name)) for name in old_files)
        sizes = [end - begin for begin, end in new.pieces]
        for file, size, own in zip(new_files, sizes, divided(rows, sizes)):
            self._writer.write(file, first.dtype, [size, *first.shape[1:]], own)

    def _open(self, name: str) -> Tensor:
        """Returns the array of an old file, after a check of the file's full checksum."""
        verify_file(self._arrays.root, name, self._arrays.files[name], full=True)
        return self._arrays.open(name)


def _in_pieces(array: Tensor) -> Iterator[Tensor]:
    """Yields a memory-mapped array in pieces along dimension 0, and releases the pages of each piece after use."""
    release = releaser(array)
    for piece in array.split(max(1, _PIECE_BYTES // max(1, array.nbytes // max(1, array.size(0))))):
        yield piece
        release()
