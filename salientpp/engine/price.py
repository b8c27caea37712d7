"""Predicts the cost of a batch from some batches that were drawn for a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from salientpp.engine.producer import Drawn
from salientpp.engine.way import Price, TiersByType, Way


def price_of(
    tried: Sequence[Drawn],
    tiers: TiersByType,
    row_bytes: Mapping[str | None, int],
    id_bytes: int,
    ways: Sequence[Way],
    seconds: float,
) -> Price:
    """Returns the expected cost of a batch: the mean over the trial batches ``tried``, which each method in ``ways`` then changes by its forecast.

    Args:
        row_bytes: by vertex type, bytes of a row on the wire.
        id_bytes: bytes of the request for a row.
        seconds: see :class:`Price`, before the ways change it.
    """
    fetched, copied, requests = dict.fromkeys(tiers, 0.0), dict.fromkeys(tiers, 0.0), 0.0
    for drawn in tried:
        for type_, places in drawn.places.items():
            width = row_bytes[type_] / len(tried)
            fetched[type_] += places.remote_id.numel() * width
            requests += places.remote_id.numel() * id_bytes / len(tried)
            found = tiers[type_].groups(places)
            copied[type_] += sum(slot.numel() for tier, _, slot in found if not tier.on_device) * width
    lists = sum(drawn.list_bytes for drawn in tried) / max(1, len(tried))
    price = Price(fetched, copied, seconds, requests, lists)
    for way, notes in zip(ways, zip(*(drawn.notes for drawn in tried))):
        price = way.price(price, notes)
    return price
