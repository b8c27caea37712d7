"""What is one batch that holds what several have drawn?

The **disjoint union** of MFGs: their vertices stay apart, also where two have the same one, since each has drawn its own neighbours; edges lead where
they led. It is in PyG's order, hop by hop: the seeds of all, then what all drew in the first hop, and so on. So what a model does with
``num_sampled_nodes`` and ``num_sampled_edges`` holds for it, and the first ``batch_size`` rows are those of the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

#: Of a type that nothing was drawn of.
_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


def disjoint_union(
    mfgs: Sequence[SamplerOutput | HeteroSamplerOutput], input_type: str | tuple[str, str, str] | None, of_edges: bool
) -> SamplerOutput | HeteroSamplerOutput:
    """One MFG of several that were drawn alike.

    Args:
        mfgs: with the metadata that PyG's loaders read: of vertices their ids and times, of edges also where their ends are.
        input_type: of the seeds; None without types.
        of_edges: the seeds are edges.

    Returns:
        With the metadata of all, one after another; ``batch`` counts on from one MFG to the next.
    """
    given = [mfg.metadata[0].numel() for mfg in mfgs]
    trees = [0, *accumulate(given)]
    # The ends of an edge may be anywhere.
    seeds = [0] * len(mfgs) if of_edges else given
    if not isinstance(mfgs[0], HeteroSamplerOutput):
        hops = [mfg.num_sampled_nodes or _two_hops(mfg.node, number) for mfg, number in zip(mfgs, seeds, strict=True)]
        layout = _Layout(hops)
        return SamplerOutput(
            node=layout.joined([mfg.node for mfg in mfgs]),
            **_edges(mfgs, lambda whole: whole, layout, layout),
            batch=_trees([mfg.batch for mfg in mfgs], trees, layout),
            num_sampled_nodes=_added([mfg.num_sampled_nodes for mfg in mfgs]),
            num_sampled_edges=_added([mfg.num_sampled_edges for mfg in mfgs]),
            metadata=_metadata(mfgs, layout, layout),
        )
    of_type = {
        type_: _Layout(
            [
                (mfg.num_sampled_nodes or {}).get(type_) or _two_hops(ids, number if type_ == input_type else 0)
                for mfg, number in zip(mfgs, seeds, strict=True)
                for ids in [mfg.node.get(type_, _NOTHING)]
            ]
        )
        for type_ in _keys([mfg.node for mfg in mfgs])
    }
    ends = input_type if isinstance(input_type, tuple) else (input_type,)
    by_relation = {
        name: _edges(mfgs, _pick(name), of_type[name[0]], of_type[name[-1]])
        for name in _keys([mfg.row for mfg in mfgs])
    }
    fields = {
        field: {name: found[field] for name, found in by_relation.items()}
        for field in ("row", "col", "edge", "orig_row", "orig_col")
    }
    for field in ("edge", "orig_row", "orig_col"):
        if getattr(mfgs[0], field) is None:
            fields[field] = None  # type: ignore[assignment]
    return HeteroSamplerOutput(
        node={
            type_: layout.joined([mfg.node.get(type_, _NOTHING) for mfg in mfgs]) for type_, layout in of_type.items()
        },
        **fields,
        batch=None
        if mfgs[0].batch is None
        else {type_: _trees([mfg.batch.get(type_) for mfg in mfgs], trees, of_type[type_]) for type_ in of_type},
        num_sampled_nodes=_added_by_key([mfg.num_sampled_nodes for mfg in mfgs]),
        num_sampled_edges=_added_by_key([mfg.num_sampled_edges for mfg in mfgs]),
        metadata=_metadata(mfgs, of_type[ends[0]], of_type[ends[-1]]),
    )


class _Layout:
    """Where things of several MFGs come to lie that are put together hop by hop.

    Args:
        hops: of each MFG, how many it has in each hop.
    """

    def __init__(self, hops: Sequence[Sequence[int]]) -> None:
        self._hops = hops
        begins, at = [[0] * len(hops) for _ in range(max(map(len, hops)))], 0
        for hop, sizes in enumerate(zip_longest(*hops, fillvalue=0)):
            for mfg, size in enumerate(sizes):
                begins[hop][mfg], at = at, at + size
        # By how much each thing moves.
        shifts = [
            [begins[hop][mfg] - before for hop, before in enumerate(accumulate(sizes[:-1], initial=0))]
            for mfg, sizes in enumerate(hops)
        ]
        self._shifts = [
            torch.tensor(shift, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
            for shift, sizes in zip(shifts, hops, strict=True)
        ]

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """[n_1 + n_2 + ...] of [n_i] from each MFG, in the order of the union."""
        pieces = [value.split(list(sizes)) for value, sizes in zip(values, self._hops, strict=True)]
        return torch.cat([piece for of_hop in zip_longest(*pieces) for piece in of_hop if piece is not None])

    def moved(self, mfg: int, index: Tensor) -> Tensor:
        """Where the union has what an MFG has at ``index``."""
        index = index.to(torch.int64)
        return index + self._shifts[mfg][index]


def _edges(
    mfgs: Sequence[Any], pick: Callable[[Any], Any], source: _Layout, target: _Layout
) -> dict[str, Tensor | None]:
    """The edges of one relation; ``pick`` gives what an MFG has of it."""
    rows = [_or_nothing(pick(mfg.row)) for mfg in mfgs]
    counts = [None if mfg.num_sampled_edges is None else pick(mfg.num_sampled_edges) for mfg in mfgs]
    layout = _Layout([count or [row.numel()] for count, row in zip(counts, rows, strict=True)])
    cols = [_or_nothing(pick(mfg.col)) for mfg in mfgs]
    ids = [of_mfg for mfg in mfgs if mfg.edge is not None and (of_mfg := pick(mfg.edge)) is not None]
    found: dict[str, Tensor | None] = {
        "row": layout.joined([source.moved(at, row) for at, row in enumerate(rows)]),
        "col": layout.joined([target.moved(at, col) for at, col in enumerate(cols)]),
        "edge": layout.joined(ids) if len(ids) == len(mfgs) else None,
        "orig_row": None,
        "orig_col": None,
    }
    for field, ends in (("orig_row", source), ("orig_col", target)):
        if getattr(mfgs[0], field) is not None:
            given = [_or_nothing(pick(getattr(mfg, field))) for mfg in mfgs]
            found[field] = torch.cat([ends.moved(at, index) for at, index in enumerate(given)])
    return found


def _metadata(mfgs: Sequence[Any], source: _Layout, target: _Layout) -> tuple[Tensor | None, ...]:
    """What tells of the seeds: their ids and times; of edges also their labels, and in which rows their ends are."""
    columns = list(zip(*(mfg.metadata for mfg in mfgs), strict=True))
    if len(columns) == 4:  # edges, and perhaps negative ones: ids, both ends, labels, times
        both = [
            torch.stack([source.moved(at, ends[0]), target.moved(at, ends[1])]) for at, ends in enumerate(columns[1])
        ]
        return (_end_to_end(columns[0]), torch.cat(both, 1), _end_to_end(columns[2]), _end_to_end(columns[3]))
    if len(columns) == 5:  # triplets: ids, sources, targets, negative targets, times
        placed = [
            torch.cat([ends.moved(at, index) for at, index in enumerate(column)])
            for ends, column in zip((source, target, target), columns[1:4], strict=True)
        ]
        return (_end_to_end(columns[0]), *placed, _end_to_end(columns[4]))
    return tuple(map(_end_to_end, columns))


def _end_to_end(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [value for value in values if value is not None]
    return torch.cat(there) if len(there) == len(values) else None


def _pick(name: Any) -> Callable[[Any], Any]:
    return lambda by_key: by_key.get(name)


def _or_nothing(value: Tensor | None) -> Tensor:
    return _NOTHING if value is None else value


def _two_hops(node: Tensor, seeds: int) -> list[int]:
    """Of an MFG that does not tell its hops: its seeds, and the rest."""
    return [seeds, node.numel() - seeds]


def _trees(batch: Sequence[Tensor | None], first: Sequence[int], layout: _Layout) -> Tensor | None:
    """The seed whose tree each vertex is in."""
    there = [trees + number for trees, number in zip(batch, first, strict=False) if trees is not None]
    return layout.joined(there) if len(there) == len(batch) else None


def _keys(dicts: Sequence[dict[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(key for one in dicts for key in one))


def _added(numbers: Sequence[list[int] | None]) -> list[int] | None:
    there = [one for one in numbers if one is not None]
    return [sum(of_hop) for of_hop in zip_longest(*there, fillvalue=0)] if len(there) == len(numbers) else None


def _added_by_key(numbers: Sequence[dict[Any, list[int]] | None]) -> dict[Any, list[int]] | None:
    there = [one for one in numbers if one is not None]
    if len(there) < len(numbers):
        return None
    found = {key: _added([one.get(key, []) for one in there]) for key in _keys(there)}
    return {key: of_key for key, of_key in found.items() if of_key is not None}
