"""Copies of whole lists of other parts: their size, the choice of the vertices, and the packets in which the lists travel.

Lists of different vertices take different numbers of bytes. So the copies are those with the most expected reads per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from salientpp.graph.relation import Relation
from salientpp.ops import bytes_of
from salientpp.sampling.held_lists import COLUMNS, Lists
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.packets import as_rows, pack, unpack
from salientpp.sampling.part_topology import CopiedLists, PartTopology, whole_lists
from salientpp.store.exchange import row_bytes
from salientpp.store.rows import TensorRows, empty_rows
from salientpp.store.tiers import IdSet
from salientpp.vip.inclusion import Start, expansions, typed_inclusion_probability
from salientpp.vip.list_sums import ListSums
from salientpp.vip.policies import densest

#: Bytes per list for its beginning and for the number of its first edge, and per vertex for its id.
_LIST_BYTES, _ID_BYTES = 16, 8

#: Makes tensors of these shapes and dtypes, which are zeros or uninitialised.
Allocate = Callable[[Sequence[tuple[Sequence[int], torch.dtype]]], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class CopyFormat:
    """The columns of copies of one relation's lists: name -> dtype for columns of the relation, and empty rows for attributes."""

    columns: Mapping[str, torch.dtype]
    attributes: Mapping[str, Tensor]

    @property
    def edge_bytes(self) -> int:
        """Bytes of one edge."""
        of_columns = sum(dtype.itemsize for dtype in self.columns.values())
        return of_columns + sum(row_bytes(like) for like in self.attributes.values())


def columns_of(topology: PartTopology) -> list[dict[str, str]]:
    """Returns, for each relation, the columns that the lists of this host have, and their dtypes, as JSON values."""
    found: list[dict[str, str]] = []
    for pieces in topology.part.lists:
        found.append({})
        for name in COLUMNS:
            arrays = [getattr(piece.relation, name) for piece in pieces]
            dtypes = [array.dtype for array in arrays if array is not None]
            if dtypes:
                # Numbers of edges inside the copies may need more bits than those inside a part.
                widest = torch.int64 if name == "edge_id" else max(dtypes, key=lambda dtype: dtype.itemsize)
                found[-1][name] = str(widest).removeprefix("torch.")
    return found


def formats_of(topology: PartTopology, of_hosts: Sequence[Sequence[Mapping[str, str]]]) -> list[CopyFormat]:
    """Returns the format of the copies of each relation, which holds the lists of all hosts.

    Args:
        of_hosts: results of :func:`columns_of`.
    """
    formats = []
    for number, told in enumerate(zip(*of_hosts)):
        columns = {}
        for name in COLUMNS:
            dtypes: list[torch.dtype] = [getattr(torch, of_host[name]) for of_host in told if name in of_host]
            if dtypes:
                columns[name] = max(dtypes, key=lambda dtype: dtype.itemsize)
        attributes = {name: empty_rows(rows, 0) for name, rows in topology.attributes(number).items()}
        formats.append(CopyFormat(columns, attributes))
    return formats


# --- the choice ---------------------------------------------------------------------------------------------


def expected_reads(sums: ListSums, start: Start, sampler: NeighborSampler) -> dict[str | None, Tensor]:
    """Returns how often a batch is expected to read the lists of each vertex, per vertex type float [N].

    Args:
        start: as in :func:`salientpp.vip.inclusion.typed_inclusion_probability`.
    """
    found = expansions(sums, start, sampler.fanouts, replace=sampler.replace)
    if sampler.subgraph_type != SubgraphType.induced:
        return found
    # Edges between the vertices of a batch are searched in the lists of all of them.
    inside = typed_inclusion_probability(sums, start, sampler.fanouts, include_seeds=True, replace=sampler.replace)
    return {name: of_type + inside[name] for name, of_type in found.items()}


def degrees(sums: ListSums) -> list[Tensor]:
    """Returns the length of every list, per relation int64 [N of the target type]. Collective if ``sums`` is."""
    return [of_relation.to(torch.int64) for of_relation in sums.per_list(lambda piece: piece.degree)]


def chosen_members(
    topology: PartTopology,
    reads: Mapping[str | None, Tensor],
    degree: Sequence[Tensor],
    formats: Sequence[CopyFormat],
    num_bytes: int,
) -> list[Tensor]:
    """Selects the vertices of other parts whose lists a host copies: per vertex type ascending ids, int64.

    The copies and their index take at most ``num_bytes``. Among equal numbers of reads per byte, the first type wins, then the lower id.
    """
    names, sizes = topology.part.node_types, topology.part.num_vertices
    width, targets = _widths(topology, degree, formats), {target for _, target in topology.ends}
    left = num_bytes - _index_bytes(topology)
    scores = {}
    for type_, (name, book) in enumerate(zip(names, topology.books)):
        of_type = reads[name].to(torch.float64)
        begin, end = book.range_of(topology.part_id) if book.num_parts > 1 else (0, sizes[type_])
        fits = (of_type > 0) & (width[type_] <= left) & (type_ in targets)
        fits[begin:end] = False
        scores[name] = torch.where(fits, of_type, -1.0)
    return list(densest(scores, dict(zip(names, width)), left).values())


def bytes_of_copies(
    topology: PartTopology, members: Sequence[Tensor] | None, degree: Sequence[Tensor], formats: Sequence[CopyFormat]
) -> int:
    """Returns the bytes of copies of the lists of ``members``, with their index. None: of all lists of other parts."""
    total = _index_bytes(topology)
    for type_, (of_type, book) in enumerate(zip(_widths(topology, degree, formats), topology.books)):
        if members is not None:
            total += int(of_type[members[type_]].sum())
        elif book.num_parts > 1:
            total += int(of_type.sum()) - int(of_type[slice(*book.range_of(topology.part_id))].sum())
    return total


def _widths(topology: PartTopology, degree: Sequence[Tensor], formats: Sequence[CopyFormat]) -> list[Tensor]:
    """Returns the bytes of a copy of each vertex's lists, per vertex type int64 [N]."""
    width = [torch.full((size,), _ID_BYTES, dtype=torch.int64, device="cpu") for size in topology.part.num_vertices]
    for (_, target), of_relation, format in zip(topology.ends, degree, formats):
        width[target] += _LIST_BYTES + of_relation * format.edge_bytes
    return width


def _index_bytes(topology: PartTopology) -> int:
    """Returns the bytes that copies take beside those of the lists: a word for 32 ids of a type, and one more beginning for each relation."""
    targets = {target for _, target in topology.ends}
    return 8 * len(topology.ends) + sum(8 * -(-topology.part.num_vertices[target] // 32) for target in targets)


# --- the copies ---------------------------------------------------------------------------------------------


def pack_lists(topology: PartTopology, type_: int, row: Tensor, formats: Sequence[CopyFormat]) -> Tensor:
    """Returns the packet with the lists of these vertices; see :func:`~salientpp.sampling.part_topology.whole_lists`."""
    sections: list[Tensor] = []
    for number, pieces in whole_lists(topology, type_, row).items():
        format = formats[number]
        sections.append(_joined([piece.first for piece in pieces], torch.int64))
        for name, dtype in format.columns.items():
            column = _joined([piece.columns[name] for piece in pieces], dtype)
            sections.append(bytes_of(column) if dtype.is_floating_point else column.to(torch.int64))
        for name, like in format.attributes.items():
            sections.append(bytes_of(torch.cat([like, *(piece.rows[name] for piece in pieces)])))
    return pack(sections)


def _joined(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype, device="cpu"), *(piece.to(dtype) for piece in pieces)])


class Copies:
    """Copies of the lists of some vertices while they are filled.

    Args:
        members: per vertex type ascending ids, int64; the result of :func:`chosen_members`.
        degree: the result of :func:`degrees`.
        allocate: makes the arrays. None: with torch.
    """

    def __init__(
        self,
        topology: PartTopology,
        members: Sequence[Tensor],
        degree: Sequence[Tensor],
        formats: Sequence[CopyFormat],
        allocate: Allocate | None = None,
    ) -> None:
        self._topology, self._formats = topology, formats
        ends = topology.ends
        self._begins = [
            torch.cat([members[0].new_zeros(1), of_relation[members[target]].cumsum(0)])
            for (_, target), of_relation in zip(ends, degree)
        ]
        sets = [IdSet.of(ids, size) for ids, size in zip(members, topology.part.num_vertices)]
        shapes: list[tuple[Sequence[int], torch.dtype]] = []
        for own in sets:
            shapes += [(own.ids.shape, torch.int64), (own.words.shape, torch.int64)]
        for begins, format in zip(self._begins, formats):
            edges = int(begins[-1])
            shapes += [(begins.shape, torch.int64), ((begins.numel() - 1,), torch.int64)]
            shapes += [((edges,), dtype) for dtype in format.columns.values()]
            shapes += [((edges, *like.shape[1:]), like.dtype) for like in format.attributes.values()]
        arrays = iter((allocate or _allocate)(shapes))
        self._index = [(next(arrays).copy_(own.ids), next(arrays).copy_(own.words)) for own in sets]
        self._arrays: list[dict[str, Any]] = [
            {
                "begins": next(arrays).copy_(begins),
                "first": next(arrays),
                "columns": {name: next(arrays) for name in format.columns},
                "rows": {name: next(arrays) for name in format.attributes},
            }
            for begins, format in zip(self._begins, formats)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the lists, without their index."""
        return sum(int(begins[-1]) * format.edge_bytes for begins, format in zip(self._begins, self._formats))

    def chunks(self, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yields (type, first, last): ranges of members whose lists have about ``num_bytes`` bytes together, and at least one member."""
        for type_, (ids, _) in enumerate(self._index):
            size = torch.zeros(ids.numel() + 1, dtype=torch.int64, device="cpu")
            for (_, target), begins, format in zip(self._topology.ends, self._begins, self._formats):
                if target == type_:
                    size += begins * format.edge_bytes
            size += _ID_BYTES * torch.arange(size.numel(), device="cpu")
            bounds = torch.unique_consecutive(size[:-1] // num_bytes, return_counts=True)[1].cumsum(0).tolist()
            for first, last in pairwise([0, *bounds]):
                yield type_, first, last

    def wanted(self, type_: int, first: int, last: int) -> list[tuple[int, Tensor]]:
        """Returns the parts that own these members, ascending, each with the members' numbers in the part, int64 [m]."""
        ids, book = self._index[type_][0][first:last], self._topology.books[type_]
        counts = torch.bincount(book.owner(ids), minlength=book.num_parts).tolist()
        pieces = ids.split(counts)
        return [(part, own - book.range_of(part)[0]) for part, own in enumerate(pieces) if own.numel()]

    def put(self, type_: int, first: int, last: int, packet: Tensor) -> None:
        """Writes the lists of these members, which are of one part, from the result of :func:`pack_lists`."""
        sections = iter(unpack(packet))
        for (_, target), begins, arrays in zip(self._topology.ends, self._begins, self._arrays):
            if target != type_:
                continue
            edges = slice(int(begins[first]), int(begins[last]))
            arrays["first"][first:last] = next(sections)
            for name, out in arrays["columns"].items():
                column = next(sections)
                if name == "edge_id":
                    column = column + begins[first:last].repeat_interleave(begins[first : last + 1].diff())
                out[edges] = column.view(out.dtype) if out.is_floating_point() else column
            for out in arrays["rows"].values():
                out[edges] = as_rows(next(sections), out.dtype, out.shape[1:], edges.stop - edges.start)

    def finished(self) -> CopiedLists:
        """Returns the copies, after all of them have been written."""
        lists = []
        for number, ((source, target), arrays) in enumerate(zip(self._topology.ends, self._arrays)):
            relation = Relation(source, target, arrays["begins"], **arrays["columns"])
            rows = {name: TensorRows(values) for name, values in arrays["rows"].items()}
            lists.append(Lists(relation, number, 0, arrays["first"], rows))
        return CopiedLists([IdSet(ids, words) for ids, words in self._index], lists)


def _allocate(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    return [torch.empty(tuple(shape), dtype=dtype, device="cpu") for shape, dtype in shapes]
