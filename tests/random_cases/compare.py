"""Comparison of a job's batches with those of the plainest loader, after what the job's options are documented to change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from random_cases.data import same_bits
from torch import Tensor
from torch_geometric.data import Data, HeteroData

#: Attributes of edges, and those that a batch has besides the data's.
EDGES = ("edge_index", "e_id", "edge_attr", "edge_wide", "edge_time", "weight")
NODES = ("x", "y", "z", "time", "tf")
MASKS = ("train_mask", "val_mask")


@dataclass(frozen=True)
class Changes:
    """Differences that a job's options make.

    Attributes:
        of_parts: whether the data is a directory, whose batches have some attributes only.
        seed_type: type whose seeds have the other attributes. ``link``: the seeds are edges, so no vertex is a seed.
        columns: (type, name) of attributes of all sampled vertices.
        dtype: dtype of ``x``.
        turned: whether a function of the user's turns the order of the edges.
    """

    of_parts: bool
    link: bool
    seed_type: Any
    columns: frozenset[Any]
    dtype: torch.dtype | None
    turned: bool

    @classmethod
    def of(cls, job: Any, seed_type: Any, part: Any) -> Changes:
        given = job.arguments.get("columns", "('x',)")
        if "own_rows" in given and job.graph.is_typed:
            columns = {("a", "x")}
        else:
            names = ["x"] if "own_rows" in given else list(eval(given))
            names += ["tf"] if names == ["x"] else []  # x alone also selects tf
            columns = {(type_, name) for type_ in job.graph.types for name in names}
        turned = job.arguments.get("transform_sampler_output") == "reversed_edges"
        return cls(part is not None, job.link, seed_type, frozenset(columns), job.value("dtype"), turned)


def expected_form(batch: Data | HeteroData, changes: Changes) -> Data | HeteroData:
    """Returns a batch of the plainest loader as the job's loader gives it."""
    found = copy.copy(batch)
    for type_, store in _nodes(found):
        if changes.of_parts:
            seeds = store.get("batch_size", 0) if not changes.link and type_ == changes.seed_type else 0
            for name in [*NODES, *MASKS]:
                if name not in store or (type_, name) in changes.columns:
                    continue
                if seeds and name not in MASKS:
                    store[name] = store[name][:seeds]
                else:
                    del store[name]
            if "n_id" in store:
                store.num_nodes = store.n_id.numel()
        if changes.dtype is not None and isinstance(store.get("x"), Tensor):
            store.x = store.x.to(changes.dtype)
    for _, store in _edges(found) if changes.turned else ():
        for name in EDGES:
            if isinstance(store.get(name), Tensor):
                store[name] = store[name].flip(1 if name == "edge_index" else 0)
    return found


def _nodes(batch: Any) -> list[tuple[Any, Any]]:
    return (
        [(type_, batch[type_]) for type_ in batch.node_types]
        if isinstance(batch, HeteroData)
        else [(None, batch._store)]
    )


def _edges(batch: Any) -> list[tuple[Any, Any]]:
    return (
        [(name, batch[name]) for name in batch.edge_types] if isinstance(batch, HeteroData) else [(None, batch._store)]
    )


def _attributes(batch: Any) -> dict[Any, Any]:
    return {(store._key, name): value for store in batch.stores for name, value in store.items()}


def unlike(batch: Any, want: Any) -> list[str]:
    """Describes the differences between two batches."""
    if isinstance(batch, HeteroData) != isinstance(want, HeteroData):
        return [f"a {type(batch).__name__}, expected a {type(want).__name__}"]
    ours, theirs = _attributes(batch), _attributes(want)
    found = []
    for name in sorted({*ours, *theirs}, key=str):
        if name not in ours or name not in theirs:
            value = ours.get(name, theirs.get(name))
            if value is None or (isinstance(value, Tensor) and not value.numel()):
                continue  # an empty type may lack its attributes
            found.append(f"{name} {'is missing' if name not in ours else 'should not be there'}")
        elif not _same(ours[name], theirs[name]):
            found.append(f"{name} is {_shown(ours[name])}, expected {_shown(theirs[name])}")
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if type(one) is not type(other):
        return False
    if hasattr(one, "feat_dict"):
        from tables import kinds, parts

        return kinds(one) == kinds(other) and all(map(same_bits, parts(one), parts(other)))
    if hasattr(one, "tolist"):
        return bool((one == other).all())
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value if value.layout == torch.strided else value.to_dense()
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {value.flatten()[:12].tolist()}"
    return str(value)[:120]


# --- padded batches ------------------------------------------------------------------------------------------------


def sizes_of(batch: Any) -> list[int]:
    """Returns the numbers of vertices of a padded batch."""
    return [len(store.node_mask) for _, store in _nodes(batch) if "node_mask" in store]


def without_padding(batch: Any) -> tuple[Any, list[str]]:
    """Returns a padded batch without its padding, and what is wrong with the padding."""
    found, wrong = copy.copy(batch), []
    rest_of = {}
    for type_, store in _nodes(found):
        mask = store.get("node_mask")
        if mask is None:
            return found, [f"type {type_} has no node_mask"]
        number, size = int(mask.sum()), len(mask)
        rest_of[type_] = range(number, size)
        if not mask[:number].all() or number >= size:
            wrong.append(f"the padding of type {type_} is not at the end")
        for name in ("n_id", *NODES):
            value = store.get(name)
            if isinstance(value, Tensor) and len(value) == size:
                rest = value[number:]
                if not bool((rest == (-1 if name == "n_id" else 0)).all()):
                    wrong.append(f"padding of {name} is {rest.flatten()[:5].tolist()}")
                store[name] = value[:number]
        for name in MASKS:
            if name in store and len(store[name]) == size:
                store[name] = store[name][:number]
        if "num_nodes" in store:
            store.num_nodes = number
        del store.node_mask
    for name, store in _edges(found):
        mask = store.get("edge_mask")
        if mask is None:
            continue
        number = int(mask.sum())
        if "edge_index" in store:
            ends = (None, None) if name is None else (name[0], name[2])
            for row, end in zip(store.edge_index[:, number:], ends):
                if not {*row.tolist()} <= {*rest_of[end]}:
                    wrong.append(f"padding of {name} joins other places than the padding of {end}")
        for attr in EDGES:
            value = store.get(attr)
            if isinstance(value, Tensor):
                store[attr] = value[:, :number] if attr == "edge_index" else value[:number]
        del store.edge_mask
    return found, wrong


# --- sums ----------------------------------------------------------------------------------------------------------


def unlike_sums(batch: Any, want: Any, dtype: torch.dtype) -> list[str]:
    """Compares, for each vertex, the reduction over its neighbours: of rows and sums in ``batch``, of rows alone in ``want``.

    Sums are computed in ``dtype``, that of the rows as they are stored. Then they get the dtype of the batch.
    """
    partial = batch.partial
    x, edge_index = batch.x.plain().double(), batch.edge_index.plain()
    if not torch.equal(batch.n_id[: batch.batch_size], want.n_id[: want.batch_size]):
        return ["other seeds"]
    rows = {int(v): row for v, row in zip(want.n_id, want.x)}
    if any(not same_bits(row, rows[int(v)]) for v, row in zip(batch.n_id, batch.x.plain())):
        return ["rows of other vertices"]
    weight = "weight" if partial.weight else None
    mine = {
        v: each[:2]
        for v, each in _reduced(x, edge_index, _weights(batch, weight), batch.n_id, partial.reduction).items()
    }
    for target, value, count in zip(partial.target.tolist(), partial.value.double(), partial.count.tolist()):
        number, own = mine.get(int(batch.n_id[target]), (0, None))
        value = value * count if partial.reduction == "mean" else value
        own = value if own is None else torch.maximum(own, value) if partial.reduction == "max" else own + value
        mine[int(batch.n_id[target])] = number + count, own
    theirs = _reduced(want.x.double(), want.edge_index, _weights(want, weight), want.n_id, partial.reduction)
    if mine.keys() != theirs.keys():
        return ["sums of other vertices"]
    near = max(_NEAR[each.itemsize] for each in (dtype, want.x.dtype))
    for v, (number, value, size) in theirs.items():
        if mine[v][0] != number or not bool(((mine[v][1] - value).abs() <= near * size).all()):
            return [f"vertex {v} has {mine[v]}, expected {(number, value)}"]
    return []


#: Bytes of a value -> largest error of a sum, as a share of the sum of magnitudes.
_NEAR = {2: 2e-2, 4: 1e-5, 8: 1e-12}


def _weights(batch: Any, name: str | None) -> Tensor | None:
    if name is None:
        return None
    value = batch[name]
    return (value.plain() if hasattr(value, "plain") else value).double()


def _reduced(
    x: Tensor, edge_index: Tensor, weight: Tensor | None, n_id: Tensor, reduction: str
) -> dict[int, tuple[int, Tensor, Tensor]]:
    """Returns for each vertex the number of its edges, the reduction of their rows, and the sum of the rows' magnitudes."""
    found: dict[int, tuple[int, Tensor, Tensor]] = {}
    for e, (source, target) in enumerate(edge_index.T.tolist()):
        row = x[source] if weight is None else x[source] * weight[e]
        number, value, size = found.get(v := int(n_id[target]), (0, row, torch.zeros_like(row)))
        if number:
            value = torch.maximum(value, row) if reduction == "max" else value + row
        found[v] = number + 1, value, size + row.abs()
    return found


# --- shares of a host ----------------------------------------------------------------------------------------------


def share_of(batch: Any) -> dict[str, Any]:
    """Returns the share of a batch that the ranks of a host compute together, as tensors and numbers."""
    share = getattr(getattr(batch.edge_index, "hops", None), "share", None)
    found = {name: batch[name] for name in ("n_id", "x", "e_id", "batch_size") if name in batch}
    found["edge_index"] = batch.edge_index.clone().as_subclass(Tensor)
    found["send"] = [] if share is None else [ids.tolist() for ids in share.send.split(share.send_counts)]
    return found


def unlike_shares(shares: Any, want: Any) -> list[str]:
    """Describes the differences between the shares of a host together, and the batch of one rank."""
    place_of = {int(v): place for place, v in enumerate(want.n_id)}
    if len(place_of) < want.n_id.numel():
        return []  # a repeated seed has several places
    seen, edges = [], []
    for place, mine in enumerate(shares):
        if any(int(v) not in place_of for v in mine["n_id"]):
            return ["a share has other vertices"]
        at = torch.tensor([place_of[int(v)] for v in mine["n_id"]], dtype=torch.int64)
        seen += at.tolist()
        number = len(at) if len(want.get("x", at)) == len(want.n_id) else mine["batch_size"]  # rows of the seeds alone
        if "x" in want and not same_bits(mine["x"], want.x[at[:number]]):
            return ["x of a share"]
        ids = torch.cat(
            [
                mine["n_id"],
                *(
                    other["n_id"][torch.tensor(other["send"][place], dtype=torch.int64)]
                    for other in shares
                    if other["send"]
                ),
            ]
        )
        edges += zip(mine["e_id"].tolist(), *ids[mine["edge_index"]].tolist())
    if sorted(seen) != list(range(len(place_of))):
        return ["the shares do not have every vertex once"]
    if sum(mine["batch_size"] for mine in shares) != want.batch_size:
        return ["the shares have other seeds"]
    if sorted(edges) != sorted(zip(want.e_id.tolist(), *want.n_id[want.edge_index].tolist())):
        return ["the shares do not have every edge once"]
    return []
