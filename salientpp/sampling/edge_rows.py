"""Reads the attributes of a batch's edges. If another rank drew an edge for this rank, its attributes arrived with the draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salientpp.sampling.held_lists import Drawn
from salientpp.store.narrow import NarrowRows
from salientpp.store.rows import RowSource, take_rows
from salientpp.store.tiers import NO_IDS

#: Received edge attributes, by edge type.
EdgeRowsByType = Mapping[Any, "EdgeRows"]


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """Attributes of edges of one relation, as other ranks sent them.

    Attributes:
        number: int64 [e], numbers of the edges, ascending and distinct.
        rows: attribute name -> rows [e, ...].
    """

    number: Tensor
    rows: Mapping[str, Tensor]

    @classmethod
    def of(cls, pieces: Sequence[Drawn | EdgeRows]) -> EdgeRows:
        """Joins the edges of several draws, and keeps each edge once."""
        numbers = torch.cat([piece.number for piece in pieces])
        number, place = torch.unique(numbers, return_inverse=True)
        first = torch.empty_like(number)
        first[place] = torch.arange(place.numel(), device="cpu")
        return cls(number, {name: torch.cat([piece.rows[name] for piece in pieces])[first] for name in pieces[0].rows})


def joined_rows(samples: Sequence[EdgeRowsByType]) -> dict[Any, EdgeRows]:
    """Joins, by edge type, the attributes of the edges of several samples."""
    types = dict.fromkeys(type_ for rows in samples for type_ in rows)
    return {type_: EdgeRows.of([rows[type_] for rows in samples if type_ in rows]) for type_ in types}


def take_edge_rows(
    name: str, held: Tensor | RowSource, first_edge: int, number: Tensor, arrived: EdgeRows | None
) -> Tensor:
    """Returns the rows [e, ...] of an attribute for edges of one relation, from this host's rows and those that arrived.

    Args:
        name: name of the attribute.
        held: rows of the edges ``first_edge``, ``first_edge + 1``, ..., which this host holds. If they are :class:`NarrowRows`, the others arrive encoded.
        number: int64 [e], numbers of the edges.
        arrived: rows of the other edges, or None.

    Raises:
        RuntimeError: an edge is neither held, nor did its row arrive.
    """
    if not first_edge and arrived is None:  # as for a whole topology
        return take_rows(held, number)
    row = number - first_edge
    is_held = (row >= 0) & (row < held.shape[0])
    if bool(is_held.all()):
        return take_rows(held, row)
    others = number[~is_held]
    known = NO_IDS if arrived is None else arrived.number
    place = torch.searchsorted(known, others)
    missing = torch.ones_like(others, dtype=torch.bool)
    if known.numel():
        missing = known[place.clamp(max=known.numel() - 1)] != others
    if arrived is None or bool(missing.any()):
        raise RuntimeError(
            f"the batch has edge {int(others[missing][0])}, which was not drawn for it, and another rank has its {name!r}; transform_sampler_output may drop "
            "edges, but not add some"
        )
    out = torch.empty((row.numel(), *held.shape[1:]), dtype=held.dtype, device="cpu")
    out[is_held] = take_rows(held, row[is_held])
    rows = arrived.rows[name][place]
    out[~is_held] = held.narrow.decode(rows) if isinstance(held, NarrowRows) else rows
    return out
