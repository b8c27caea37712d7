"""Requests to the owner of neighbour lists to draw from them, and the owner's answers, as packets.

A request holds the vertices of a batch whose lists the owner has. In a request with **members**, the owner finds all edges of these lists
between vertices of the batch instead. Both sides derive the order of the sections from the graph's types and relations.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from salientpp.ops import bytes_of
from salientpp.sampling.held_lists import Drawn, HopDraw, Vertices
from salientpp.sampling.packets import as_rows, pack, unpack, unpack_narrow
from salientpp.store.rows import RowSource

#: The ends of a relation: positions of its source type and its target type among the vertex types.
Ends = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ListRequest:
    """Request of a rank to the owner of neighbour lists, about one batch.

    Attributes:
        hop: the numbers that fix the draws.
        vertices: for each vertex type, the vertices whose lists are asked for. Their ids count from the first vertex of the owner's part.
        keeps_edges: False: only the sources are wanted.
        members: for each vertex type, all vertices of the batch, without times. The owner then finds the edges between them. Empty: the owner draws.
        num_trees: number of trees of the batch.
    """

    hop: HopDraw
    vertices: Sequence[Vertices]
    keeps_edges: bool
    members: Sequence[Vertices] = ()
    num_trees: int = 0

    def relations(self, ends: Sequence[Ends]) -> list[int]:
        """Returns the numbers of the relations that the answer covers: their targets are among the vertices, and their fanout is not 0."""
        some = [bool(of_type.ids.numel()) for of_type in self.vertices]
        return [
            number
            for number, (_, target) in enumerate(ends)
            if some[target] and (self.members or self.hop.fanouts[number] != 0)
        ]

    def packed(self) -> Tensor:
        hop, first = self.hop, self.vertices[0]
        head = [
            hop.key, hop.hop, hop.replace, hop.last, hop.shared, self.keeps_edges, bool(self.members), self.num_trees,
            first.tree is not None, first.now is not None, *_window_in_words(hop.window), *hop.fanouts,
        ]  # fmt: skip
        columns = [column for of_type in (*self.vertices, *self.members) for column in of_type.columns]
        return pack([torch.tensor(head, dtype=torch.int64, device="cpu"), *columns])

    @classmethod
    def unpacked(cls, packet: Tensor, num_types: int) -> ListRequest:
        sections = iter(unpack(packet))
        key, number, replace, last, shared, keeps_edges, of_members, num_trees, trees, times, *more = next(
            sections
        ).tolist()
        (kind, length), fanouts = more[:2], tuple(more[2:])
        window = _window_of_words(kind, length)
        hop = HopDraw(key, number, fanouts, bool(replace), bool(last), bool(shared), window)

        def read(has_time: bool) -> Vertices:
            return Vertices(next(sections), next(sections) if trees else None, next(sections) if has_time else None)

        vertices = [read(bool(times)) for _ in range(num_types)]
        members = [read(False) for _ in range(num_types)] if of_members else []
        return cls(hop, vertices, bool(keeps_edges), members, num_trees)


def _window_in_words(window: int | float | None) -> tuple[int, int]:
    """Returns the length of a time window as two int64: its kind (0: None, 1: integer, 2: float) and its bits."""
    if window is None:
        return 0, 0
    return (1, window) if isinstance(window, int) else (2, struct.unpack("<q", struct.pack("<d", window))[0])


def _window_of_words(kind: int, bits: int) -> int | float | None:
    """Reverses :func:`_window_in_words`."""
    if kind == 0:
        return None
    return bits if kind == 1 else struct.unpack("<d", struct.pack("<q", bits))[0]


def pack_answer(answer: Sequence[Drawn], keeps_edges: bool) -> Tensor:
    """Returns the packet that answers a request, with the draws of each relation that it is about."""
    sections: list[Tensor] = []
    lists: dict[int, tuple[Tensor, Tensor]] = {}
    for drawn in answer:
        sections += [drawn.count, drawn.source]
        if keeps_edges:
            assert drawn.offset is not None and drawn.base is not None and drawn.first is not None  # as asked for
            # An edge's number minus that of its list's first edge is a small number.
            lists[len(sections) + 1] = drawn.count, drawn.first - drawn.base
            sections += [drawn.first, drawn.offset, *(bytes_of(rows) for rows in drawn.rows.values())]
    return pack(sections, lists)


def unpack_answer(packet: Tensor, attributes: Sequence[Mapping[str, RowSource]], keeps_edges: bool) -> list[Drawn]:
    """Reverses :func:`pack_answer`.

    Args:
        attributes: for each relation of the answer, rows of the same dtypes and shapes as those that arrive.
    """
    sections, answer = iter(unpack_narrow(packet)), []
    for of_relation in attributes:
        count, source = next(sections).to(torch.int64), next(sections)
        if not keeps_edges:
            answer.append(Drawn(count, source))
            continue
        first, offset = next(sections).to(torch.int64), next(sections)
        rows = {
            name: as_rows(next(sections), like.dtype, like.shape[1:], offset.numel())
            for name, like in of_relation.items()
        }
        answer.append(Drawn(count, source, offset, first, first, rows))
    return answer
