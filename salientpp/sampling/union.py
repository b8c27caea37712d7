"""The disjoint union of MFGs: one batch with the draws of several, in PyG's order, hop by hop.

A vertex that is in several MFGs stays in the union once for each of them, because each MFG has drawn neighbours for it. The first ``batch_size`` rows are
the seeds' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from salientpp.sampling.topology import Mfg, TypedSample
from salientpp.store.tiers import NO_IDS


def disjoint_union(mfgs: Sequence[Mfg], input_type: str | tuple[str, str, str] | None, of_edges: bool) -> Mfg:
    """Joins several MFGs of the same kind to one.

    Args:
        mfgs: MFGs with the metadata that PyG's loaders read: ids and times of the seeds. If seeds are edges, also the places of their ends in the MFG.
        input_type: type of the seeds; None without types.
        of_edges: True if the seeds are edges.

    Returns:
        The union with the metadata of all MFGs, one after another; ``batch`` numbers trees consecutively across them.
    """
    kind = type(mfgs[0])
    is_typed = issubclass(kind, HeteroSamplerOutput)

    def by_key(name: str, key: Any) -> list[Any]:
        """Returns a field of every MFG by type. Without types, the vertex type is None and the edge type is (None,)."""
        values = [getattr(mfg, name) for mfg in mfgs]
        return values if is_typed else [value if value is None else {key: value} for value in values]

    node, batch, nodes_per_hop = (by_key(name, None) for name in ("node", "batch", "num_sampled_nodes"))
    row, col, edge, edges_per_hop, orig_row, orig_col = (
        by_key(name, (None,)) for name in ("row", "col", "edge", "num_sampled_edges", "orig_row", "orig_col")
    )
    given = [mfg.metadata[0].numel() for mfg in mfgs]
    seeds = [0] * len(mfgs) if of_edges else given  # the ends of an edge may be at any place
    of_type = {
        type_: _Layout(
            [
                # An MFG without counts per hop is split into its seeds and the rest.
                (hops or {}).get(type_) or [own := number if type_ == input_type else 0, _of(ids, type_).numel() - own]
                for hops, ids, number in zip(nodes_per_hop, node, seeds, strict=True)
            ]
        )
        for type_ in _keys(node)
    }
    relations = {
        name: _Layout(
            [(hops or {}).get(name) or [_of(ends, name).numel()] for hops, ends in zip(edges_per_hop, row, strict=True)]
        )
        for name in _keys(row)
    }

    def moved(ends: Sequence[Any], name: Any, end: int) -> list[Tensor]:
        return [of_type[name[end]].moved(at, _of(index, name)) for at, index in enumerate(ends)]

    trees = [
        {} if of is None else {key: value + at for key, value in of.items() if value is not None}
        for of, at in zip(batch, [0, *accumulate(given)])
    ]
    found: dict[str, Any] = {
        "node": {type_: layout.joined([_of(ids, type_) for ids in node]) for type_, layout in of_type.items()},
        "row": {name: layout.joined(moved(row, name, 0)) for name, layout in relations.items()},
        "col": {name: layout.joined(moved(col, name, -1)) for name, layout in relations.items()},
        "edge": {
            name: _all(layout.joined, [(ids or {}).get(name) for ids in edge]) for name, layout in relations.items()
        },
        "batch": {type_: _all(layout.joined, [of.get(type_) for of in trees]) for type_, layout in of_type.items()},
        "num_sampled_nodes": _added(nodes_per_hop),
        "num_sampled_edges": _added(edges_per_hop),
        "orig_row": {name: torch.cat(moved(orig_row, name, 0)) for name in relations if orig_row[0] is not None},
        "orig_col": {name: torch.cat(moved(orig_col, name, -1)) for name in relations if orig_col[0] is not None},
    }
    found = {name: value if getattr(mfgs[0], name) is not None else None for name, value in found.items()}
    if not is_typed:
        found = {name: None if value is None else next(iter(value.values())) for name, value in found.items()}
    ends = input_type if isinstance(input_type, tuple) else (input_type,)
    out = kind(**found, metadata=_metadata(mfgs, of_type[ends[0]], of_type[ends[-1]]))
    if isinstance(out, TypedSample) and out.batch is not None:
        # The trees of negative examples have the numbers of the positive ones.
        out.tree_seed = torch.cat([mfg.tree_seed[:number] for mfg, number in zip(mfgs, given, strict=True)])
    elif isinstance(out, SamplerOutput) and out.batch is not None:
        out.seed_node = of_type[None].joined([mfg.seed_node for mfg in mfgs])
    return out


class _Layout:
    """Tells where each MFG's vertices (or edges) lie in the union, which orders them hop by hop."""

    def __init__(self, hops: Sequence[Sequence[int]]) -> None:
        self._hops = hops
        begins, at = [[0] * len(hops) for _ in range(max(map(len, hops)))], 0
        for hop, sizes in enumerate(zip_longest(*hops, fillvalue=0)):
            for mfg, size in enumerate(sizes):
                begins[hop][mfg], at = at, at + size
        # The distance by which each entry moves.
        shifts = [
            [begins[hop][mfg] - before for hop, before in enumerate(accumulate(sizes[:-1], initial=0))]
            for mfg, sizes in enumerate(hops)
        ]
        self._shifts = [
            torch.tensor(shift, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
            for shift, sizes in zip(shifts, hops, strict=True)
        ]

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Joins tensors [n_i], one from each MFG, to [n_1 + n_2 + ...] in the order of the union."""
        pieces = [value.split(list(sizes)) for value, sizes in zip(values, self._hops, strict=True)]
        return torch.cat([piece for of_hop in zip_longest(*pieces) for piece in of_hop if piece is not None])

    def moved(self, mfg: int, index: Tensor) -> Tensor:
        """Returns the positions in the union of the entries ``index`` of an MFG."""
        index = index.to(torch.int64)
        return index + self._shifts[mfg][index]


def _metadata(mfgs: Sequence[Any], source: _Layout, target: _Layout) -> tuple[Tensor | None, ...]:
    """Returns the metadata of the seeds: their ids and times, and for edges also their labels and the places of their ends."""
    columns = list(zip(*(mfg.metadata for mfg in mfgs), strict=True))
    if len(columns) == 4:  # edges, and perhaps negative ones: ids, both ends, labels, times
        both = [
            torch.stack([source.moved(at, ends[0]), target.moved(at, ends[1])]) for at, ends in enumerate(columns[1])
        ]
        return (_all(torch.cat, columns[0]), torch.cat(both, 1), *(_all(torch.cat, column) for column in columns[2:]))
    if len(columns) == 5:  # triplets: ids, sources, targets, negative targets, times
        placed = [
            torch.cat([ends.moved(at, index) for at, index in enumerate(column)])
            for ends, column in zip((source, target, target), columns[1:4], strict=True)
        ]
        return (_all(torch.cat, columns[0]), *placed, _all(torch.cat, columns[4]))
    return tuple(_all(torch.cat, column) for column in columns)


def _all(join: Callable[[list[Tensor]], Tensor], values: Sequence[Tensor | None]) -> Tensor | None:
    """Returns ``join(values)``, or None if one of the values is None."""
    there = [value for value in values if value is not None]
    return join(there) if len(there) == len(values) else None


def _of(by_key: dict[Any, Tensor | None], key: Any) -> Tensor:
    value = by_key.get(key)
    return NO_IDS if value is None else value


def _keys(dicts: Sequence[dict[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(key for one in dicts for key in one))


def _added(numbers: Sequence[dict[Any, list[int]] | None]) -> dict[Any, list[int]] | None:
    there = [one for one in numbers if one is not None]
    if len(there) < len(numbers):
        return None
    return {
        key: [sum(of_hop) for of_hop in zip_longest(*(one.get(key, []) for one in there), fillvalue=0)]
        for key in _keys(there)
    }
