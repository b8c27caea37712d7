"""How do the devices of a host hold more rows together than each could alone?

The hottest rows are on every device. The next hottest are split: each rank has a share of them on its device, and the others read it there, over peer
access. On the CPU the shares are shared memory of the host (:mod:`salientpp.ranks.shared_memory`); all else is the same.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from salientpp.ranks.comm import Comm
from salientpp.ranks.shared_memory import shared_tensors
from salientpp.store.rows import RowSource, TensorRows, take_rows
from salientpp.store.tiers import IdSet, Tier
from salientpp.ways.host import pooled


def split_rows(
    host: Comm,
    chance: Mapping[str | None, Tensor],
    alone: Mapping[str | None, Tensor],
    num_split: Mapping[str | None, int],
) -> dict[str | None, list[Tensor]]:
    """Which rows of a host are on each device for all its ranks: those that any needs most beside what it has on its device for itself.

    Collective among the ranks of the host.

    Args:
        chance: by vertex type float [n], how probably a batch of this rank needs each of the host's rows.
        alone: by type int64, the rows that this rank's device has for it alone.
        num_split: by type, how many a device has for all.

    Returns:
        By type and rank ascending rows, int64; none twice.
    """
    left = {type_: of_type.to(torch.float64).index_fill(0, alone[type_], 0.0) for type_, of_type in chance.items()}
    shares = {}
    for type_, pool in pooled(host, "vip", left).items():
        order = torch.sort(pool, descending=True, stable=True).indices[: host.size * num_split[type_]]
        order = order[pool[order] > 0]
        shares[type_] = [order[rank :: host.size].sort().values for rank in range(host.size)]
    return shares


def split_tiers(
    host: Comm, device: torch.device, home: Mapping[str, RowSource], shares: Sequence[Tensor], num_rows: int
) -> list[Tier]:
    """A tier for each rank of the host, with the rows that its device has for all. Collective among these ranks.

    Args:
        home: attribute name -> the host's rows.
        shares: by rank ascending rows, int64.
        num_rows: that the host has.

    Raises:
        RuntimeError: this device cannot read another's memory, see :func:`reachable`.
    """
    own = {name: take_rows(source, shares[host.rank]) for name, source in home.items()}
    if device.type == "cpu":
        shapes = [((share.numel(), *rows.shape[1:]), rows.dtype) for share in shares for rows in own.values()]
        tensors = iter(shared_tensors(host, shapes))
        of_ranks = [{name: next(tensors) for name in own} for _ in shares]
        for name, rows in own.items():
            of_ranks[host.rank][name].copy_(rows)
    else:
        on_device = {name: rows.to(device) for name, rows in own.items()}
        of_ranks = _peers(host, device, on_device, shares)
    host.gather_numbers([0])  # all have written theirs
    return [
        Tier(
            "gpu",
            IdSet.of(share, num_rows),
            {name: TensorRows(tensor) for name, tensor in rows.items()},
            on_device=True,
            memory="gpu" if rank == host.rank else "",
            apart=True,
        )
        for rank, (share, rows) in enumerate(zip(shares, of_ranks))
        if share.numel()
    ]


def reachable(host: Comm, device: torch.device) -> str | None:
    """Why a device of this host cannot read the memory of another; None if each can. Collective among the ranks of the host."""
    if device.type == "cpu":
        return None
    everyone = [facts["device"] for facts in host.gather_facts({"device": _name_of(device)})]
    trouble = None
    for name in everyone:
        other = _numbers().get(name)
        if other is None:
            trouble = f"{device} does not see the device {name} of its host (CUDA_VISIBLE_DEVICES?)"
        elif other != device.index and not torch.cuda.can_device_access_peer(device, other):
            trouble = f"{device} has no peer access to cuda:{other}"
    return next((facts["trouble"] for facts in host.gather_facts({"trouble": trouble}) if facts["trouble"]), None)


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _numbers() -> dict[str, int]:
    return {_name_of(torch.device("cuda", number)): number for number in range(torch.cuda.device_count())}


def _peers(
    host: Comm, device: torch.device, own: Mapping[str, Tensor], shares: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """The rows of every rank on its device: this rank's, and the others' opened over CUDA's handles for other processes."""
    torch.cuda.synchronize(device)
    told = host.gather_facts(
        {"device": _name_of(device), "rows": {name: _handle(rows) for name, rows in own.items() if rows.numel()}}
    )
    of_ranks = []
    for rank, facts in enumerate(told):
        number = _numbers()[facts["device"]]
        of_rank = {}
        for name, rows in own.items():
            shape = (shares[rank].numel(), *rows.shape[1:])
            if rank == host.rank or name not in facts["rows"]:
                of_rank[name] = rows if rank == host.rank else rows.new_empty(shape)
                continue
            of_rank[name] = _opened(facts["rows"][name], number, rows.dtype, shape)
            of_rank[name][:1].to(device)  # torch turns peer access on when it copies
        of_ranks.append(of_rank)
    return of_ranks


def _handle(rows: Tensor) -> list[Any]:
    """Of the memory of a tensor, for another process; JSON values."""
    _, *entries = rows.untyped_storage()._share_cuda_()
    encoded = [base64.b64encode(entry).decode() if isinstance(entry, bytes) else entry for entry in entries]
    return [rows.storage_offset(), [isinstance(entry, bytes) for entry in entries], encoded]


def _opened(handle: Sequence[Any], number: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    offset, are_bytes, encoded = handle
    entries = [base64.b64decode(entry) if is_bytes else entry for entry, is_bytes in zip(encoded, are_bytes)]
    storage = torch.UntypedStorage._new_shared_cuda(number, *entries)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return torch.empty(0, dtype=dtype, device=torch.device("cuda", number)).set_(storage, offset, tuple(shape), stride)
