"""Keeps copies of a part's most needed rows in device memory, so that batches need not copy them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from salientpp.engine.basis import Basis
from salientpp.engine.drawing.method import DrawingMethod
from salientpp.engine.way import TiersByType, Way
from salientpp.store.tiers import NO_IDS, IdSet, Tier, Tiers


class DeviceRows(Way):
    """Keeps the part's most needed rows on the device, so that batches need not copy them there.

    Args:
        amount: β in [0, 1], a fraction of the rows of each vertex type; or bytes, as an int. The bytes are divided among the types in proportion to the
            bytes of their rows.
    """

    name = "device"

    def __init__(self, amount: float | int) -> None:
        self._amount = amount

    def choose(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        found = dict(tiers)
        for type_, ids in self._hottest(basis, tiers).items():
            if ids.numel():
                of_type = tiers[type_]
                tier = Tier("device", IdSet.of(ids, of_type.book.size_of(of_type.part_id)), {}, True, "device")
                found[type_] = dataclasses.replace(of_type, near=[*of_type.near, tier])
        return found

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        hottest = self._hottest(basis, tiers)
        return {
            type_: of_type.with_near(hottest.get(type_, NO_IDS), basis.device, basis.seeds_only(type_))
            for type_, of_type in tiers.items()
        }

    def _hottest(self, basis: Basis, tiers: TiersByType) -> dict[str | None, Tensor]:
        """Returns the local ids of the rows to copy, ascending int64, by vertex type. Collective."""
        fraction, row_bytes = self._amount, basis.source.row_bytes
        if not isinstance(fraction, float):
            whole = sum(row_bytes[type_] * of_type.book.size_of(of_type.part_id) for type_, of_type in tiers.items())
            fraction = min(1.0, fraction / max(1, whole))
        number = {type_: int(fraction * of_type.book.size_of(of_type.part_id)) for type_, of_type in tiers.items()}
        wanted, chance = any(number.values()), basis.source.seeds.access_probability
        if chance is not None and basis.source.drawing.is_collective:  # the ranks compute it together
            wanted = any(flag for (flag,) in basis.comm.gather_numbers([int(wanted)]))
        if not wanted:
            return {}
        hottest = {type_: torch.arange(of_type, device="cpu") for type_, of_type in number.items()}
        chances: Mapping[str | None, Tensor] = {}
        if chance is not None:  # otherwise the rows are stored in this order
            chances = basis.once("access", lambda: chance(basis.batch_size))
        if basis.source.drawing.division is not None:
            chances, number = _own_chances(basis.source.drawing, tiers[None], chances, number)
        for type_, of_type in chances.items():
            if type_ in hottest:
                order = torch.sort(of_type, descending=True, stable=True).indices
                hottest[type_] = order[: number[type_]].sort().values
        return hottest


def _own_chances(
    drawing: DrawingMethod, tiers: Tiers, chances: Mapping[str | None, Tensor], number: Mapping[str | None, int]
) -> tuple[dict[str | None, Tensor], dict[str | None, int]]:
    """Excludes vertices that other ranks of the host compute. It sets their access probabilities to 0, and limits ``number`` to the rows that are left."""
    begin, end = tiers.book.range_of(tiers.part_id)
    chance = chances.get(None, torch.arange(end - begin, 0, -1, device="cpu"))
    own = drawing.own(chance, begin)
    return {None: own}, {None: min(number[None], int(own.count_nonzero()))}
