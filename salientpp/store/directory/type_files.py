"""Writes the files of one type of vertices or edges: ids, inclusion probabilities, neighbour lists, rows and splits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from salientpp.graph.relation import Relation
from salientpp.partitioning.numbering import Numbering, VipNumbering, relabeled_edges
from salientpp.store.directory.contents import Contents
from salientpp.store.directory.description import EdgeType, VertexType
from salientpp.store.directory.step_writer import StepWriter, take_rows
from salientpp.store.key_table import KeyTable, write_key_file
from salientpp.store.keys import key_hash

if TYPE_CHECKING:
    import pyarrow as pa

#: Number of keys that are in memory at a time.
_KEYS_AT_ONCE = 2**20


def write_numbering(writer: StepWriter, vertices: VertexType, numbering: VipNumbering) -> None:
    """Writes original ids and probabilities of one vertex type."""
    writer.write_tensor(vertices.original_id_file, numbering.order)
    for part_id, probability in enumerate(numbering.vip):
        writer.write_tensor(vertices.vip_file(part_id), probability)


def write_edges(
    writer: StepWriter,
    edges: EdgeType,
    num_targets: list[int],
    relation: Relation,
    numberings: Mapping[str | None, Numbering],
    contents: Contents,
) -> None:
    """Writes topology, attributes and splits of an edge type. ``num_targets``: number of lists per ``indptr`` file."""
    targets, sources, narrow = numberings[edges.target], numberings[edges.source], contents.edge_narrow[edges.name]
    indptr, _ = relabeled_edges(relation, targets, sources)
    sizes = [end - begin for begin, end in edges.pieces]

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pieces of all edges in their new order: their numbers in the user's data, and their sources."""
        for position, source in relabeled_edges(relation, targets, sources)[1]:
            yield position if relation.edge_id is None else relation.edge_id[position], source

    def write_lists() -> None:
        first = 0
        for piece, ((begin, _), size) in enumerate(zip(edges.pieces, num_targets)):
            writer.write_tensor(edges.indptr_file(piece), indptr[first : first + size + 1] - begin)
            first += size
        sources_of_all = (source for _, source in pieces())
        for piece, (size, own) in enumerate(zip(sizes, divided(sources_of_all, sizes))):
            writer.write(edges.indices_file(piece), relation.indices.dtype, [size], own)

    def write_rows(name: str, rows: Tensor) -> None:
        rows_of_all: Iterator[Tensor] = (rows[number] for number, _ in pieces())
        dtype, row_shape = rows.dtype, list(rows.shape[1:])
        if name in narrow:
            stored, _ = narrow[name]
            dtype, row_shape, rows_of_all = torch.uint8, [stored.row_bytes], map(stored.encode, rows_of_all)
        for piece, (size, own) in enumerate(zip(sizes, divided(rows_of_all, sizes))):
            writer.write(edges.rows_file(name, piece), dtype, [size, *row_shape], own)

    def write_split(name: str, ids: Tensor) -> None:
        chosen = torch.zeros(edges.num_edges, dtype=torch.bool, device="cpu")
        chosen[ids] = True
        position = torch.cat([chosen[:0], *(chosen[number] for number, _ in pieces())]).nonzero().flatten()
        first = torch.searchsorted(position, indptr[targets.book.offsets]).tolist()
        for part_id, (begin, end) in enumerate(pairwise(first)):
            writer.write_tensor(edges.split_file(name, part_id), position[begin:end])

    # A step has the name of the file that holds its result if the topology is stored whole.
    writer.step(f"{edges.prefix}indices.npy", write_lists)
    for name, rows in contents.edge_columns[edges.name].items():
        writer.step(f"{edges.prefix}edge_{name}.npy", partial(write_rows, name, rows))
    for name, ids in contents.edge_splits[edges.name].items():
        writer.step(f"{edges.prefix}split {name}", partial(write_split, name, ids))


def divided(pieces: Iterable[Tensor], sizes: Iterable[int]) -> Iterator[Iterator[Tensor]]:
    """Divides a stream of tensors into consecutive streams: one for each size, with this number of rows in all.

    The caller must read each stream to its end before it asks for the next one.
    """
    stream, rest = iter(pieces), None

    def rows(size: int) -> Iterator[Tensor]:
        nonlocal rest
        while size:
            if rest is None or not rest.size(0):
                rest = next(stream)
            taken, rest = rest[:size], rest[size:]
            size -= taken.size(0)
            yield taken

    return map(rows, sizes)


def write_vertices(
    writer: StepWriter, vertices: VertexType, numbering: Numbering, contents: Contents, time_attr: str | None
) -> None:
    """Writes rows and splits of one vertex type."""
    columns, narrow = contents.node_columns[vertices.name], contents.narrow[vertices.name]
    order = numbering.order

    def write_rows(file: str, name: str, ids: Tensor) -> None:
        rows, pieces = columns[name], take_rows(columns[name], ids)
        if name not in narrow:
            writer.write(file, rows.dtype, (ids.numel(), *rows.shape[1:]), pieces)
        else:
            stored, _ = narrow[name]
            writer.write(file, torch.uint8, (ids.numel(), stored.row_bytes), map(stored.encode, pieces))

    whole = {vertices.rows_file(name, 0): name for name in columns if vertices.replicated}
    if time_attr in columns:
        whole = {vertices.time_file(time_attr): time_attr, **whole}
    for file, name in whole.items():
        writer.step(file, partial(write_rows, file, name, order))
    in_split = {name: torch.zeros(vertices.num_vertices, dtype=torch.bool, device="cpu") for name in vertices.splits}
    for name, ids in contents.splits[vertices.name].items():
        in_split[name][ids] = True

    def write_part(part_id: int) -> None:
        begin, end = numbering.book.range_of(part_id)
        own = order[begin:end]
        for name in columns if not vertices.replicated else ():
            write_rows(vertices.rows_file(name, part_id), name, own)
        for name, mask in in_split.items():
            writer.write_tensor(vertices.split_file(name, part_id), mask[own].nonzero().flatten() + begin)

    for part_id in range(numbering.book.num_parts):
        writer.step(f"{vertices.prefix}part {part_id}", partial(write_part, part_id))
    if vertices.name in contents.keys:
        write_keys(writer, vertices, numbering, contents.keys[vertices.name])


def write_keys(writer: StepWriter, vertices: VertexType, numbering: Numbering, keys: KeyTable) -> None:
    """Writes the keys of each part in the order of the ids, and the index of their hashes."""

    def write_part(file: str, ids: Tensor) -> None:
        def batches() -> Iterator[pa.RecordBatch]:
            for some in ids.split(_KEYS_AT_ONCE):
                yield from keys.rows(some).to_batches()
                keys.release()

        writer.write_file(file, lambda opened: write_key_file(opened, keys.schema, batches()))

    def write_index() -> None:
        writer.write_file(vertices.key_schema_file, lambda opened: write_key_file(opened, keys.schema, ()))
        hashes = np.empty(keys.num_rows, dtype=np.uint64)
        first = 0
        for batch in keys.batches(_KEYS_AT_ONCE):
            hashes[first : first + batch.num_rows] = key_hash(batch.columns)
            first += batch.num_rows
        keys.release()
        order = np.argsort(hashes, kind="stable")  # fast if the hashes ascend already, as those of converted graphs do
        ids = torch.empty(keys.num_rows, dtype=torch.int64, device="cpu")
        ids[numbering.order] = torch.arange(keys.num_rows, device="cpu")
        writer.write_tensor(vertices.key_hashes_file, torch.from_numpy(hashes[order]))
        writer.write_tensor(vertices.key_ids_file, ids[torch.from_numpy(order)])

    writer.step(f"{vertices.prefix}keys", write_index)
    sizes = vertices.row_book.offsets.diff().tolist()
    for part_id, own in enumerate(numbering.order.split(sizes)):
        writer.step(f"{vertices.prefix}keys {part_id}", partial(write_part, vertices.keys_file(part_id), own))
