"""Divides an epoch of each rank into parts: training, the transform, and the causes of waiting for batches.

The parts of a rank add up to its seconds. Ranks move together, so a rank that waits for another seems as slow as the other. The parts
therefore tell waiting for the network from waiting for slower ranks:

* Messages of a rank need at least ``transfer`` seconds: its bytes, divided by the measured speeds of its links.
* The rank that waits least for messages waits for the network only. The others wait at least as long for the network.
* A rank's training step may take longer than the shortest one, while no other rank waits for it in the loader. Such a step waits for the
  gradients of a slower rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

#: Parts of an epoch, and what pages call them.
PARTS = {
    "train": "training step",
    "step_wait": "longer step: waits for other ranks",
    "transform": "transform",
    "seeds": "getting seeds",
    "sample": "sampling",
    "rows": "taking rows",
    "network": "network",
    "others": "waiting for slower ranks",
    "assemble": "assembling batches",
    "rest": "rest of next()",
}
#: Colours of the parts of an epoch, as in the timeline.
PART_COLOURS = {
    "train": "#7a8aa0",
    "step_wait": "#b9c3d0",
    "transform": "#e08214",
    "seeds": "#6b8e23",
    "sample": "#8e6bbf",
    "rows": "#c7a500",
    "network": "#d1495b",
    "others": "#3aa6a6",
    "assemble": "#4c78a8",
    "rest": "#a3a3a3",
}
_ROWS = ("gather_host_rows", "copy_to_device", "gather_device_rows")
#: Stages of drawing from lists of other ranks.
_ROUNDS = ("ask_sizes", "ask_lists", "draw_for_others", "answer_sizes", "answer_lists", "join_lists", "begin_to_wait")
#: Stages of a process that has all rows.
_ALONE = {"sample", "gather_host_rows", "assemble"}


def batches_listed(about: Mapping[str, Any], rank: int) -> int | None:
    """Returns the number of batches that a whole epoch has on a rank, or None if the description of its loader lacks it."""
    listed = about.get("batches_by_rank") or []
    if len(listed) == 1:  # of this process
        return int(listed[0])
    return int(listed[rank]) if rank < len(listed) else None


@dataclass(frozen=True)
class Rank:
    """Measured numbers of one rank in one epoch.

    Attributes:
        numbers: numbers of the epoch, as ``loader.metrics()`` names them.
        about: description of the loader.
        host: name of the rank's host; empty if unknown.
    """

    number: int
    numbers: Mapping[str, float]
    about: Mapping[str, Any]
    host: str = ""

    def of(self, name: str) -> float:
        return float(self.numbers.get(name, 0.0))

    @property
    def batches(self) -> int:
        return int(self.of("batches"))

    @property
    def listed(self) -> int | None:
        """Number of batches that a whole epoch has on this rank, if it is known."""
        return batches_listed(self.about, self.number)

    @property
    def is_alone(self) -> bool:
        """True if this process has all rows, so that it exchanges none. Its threads then make whole batches."""
        return bool(self.stages) and set(self.stages) <= _ALONE

    @cached_property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage."""
        names = [name for name in self.numbers if name.startswith("stage.") and name.endswith(".seconds")]
        return {name.split(".")[1]: self.of(name) for name in names}


@dataclass(frozen=True)
class Job:
    """All ranks in one epoch, with the parts of each in seconds.

    Attributes:
        links: measured bytes per second, by the ranks that send and receive.
        parts: parts by rank, in the order of ``ranks``.
    """

    ranks: Sequence[Rank]
    links: Mapping[tuple[int, int], float]
    parts: Sequence[Mapping[str, float]]

    @classmethod
    def of(cls, ranks: Sequence[Rank]) -> Job:
        links: dict[tuple[int, int], float] = {}
        for rank in ranks:
            measured = [link for link in rank.about.get("links") or () if len(link) == 3 and 0 < link[2] < math.inf]
            links |= {(int(source), int(to)): float(speed) for source, to, speed in measured}
        return cls(ranks, links, _parts_of(ranks, links))

    @cached_property
    def seconds(self) -> float:
        """Duration of the epoch."""
        return max(rank.of("seconds") for rank in self.ranks)

    @cached_property
    def own(self) -> list[float]:
        """Seconds that each rank needs for its own work: the epoch without waiting for slower ranks."""
        return [sum(parts.values()) - parts["others"] - parts["step_wait"] for parts in self.parts]

    @cached_property
    def slowest(self) -> int:
        """Index in ``ranks`` of the rank whose own work takes longest. It determines how long the epoch takes."""
        return max(range(len(self.ranks)), key=lambda place: self.own[place])

    def cores_of(self, place: int) -> float | None:
        """Returns how many cores ``ranks[place]`` has, or None if unknown. The cores of a host are divided among its ranks."""
        cores, host = self.ranks[place].about.get("cores"), self.ranks[place].host
        if not cores:
            return None
        return float(cores) / (sum(rank.host == host for rank in self.ranks) if host else 1)

    @cached_property
    def least(self) -> float:
        """Seconds that the epoch needs at least on its cores, however many threads work; 0 if no cores are known.

        Counts each loop and each thread as the work of one core.
        """
        work: dict[str, float] = {}
        for place, (rank, parts) in enumerate(zip(self.ranks, self.parts)):
            if (cores := self.cores_of(place)) is not None:
                busy = parts["train"] + parts["transform"] + parts["seeds"] + parts["assemble"]
                busy += rank.of("work.draw.seconds") or parts["sample"]
                busy += rank.of("work.gather.seconds") or parts["rows"]
                host = rank.host or str(place)
                sharing = sum(each.host == rank.host for each in self.ranks) if rank.host else 1
                work[host] = work.get(host, 0.0) + busy / (cores * sharing)
        return max(work.values(), default=0.0)

    def on_others(self, part: str, place: int) -> float:
        """Median seconds of a part over all ranks except ``ranks[place]``; 0 if there are no others."""
        return median([each[part] for at, each in enumerate(self.parts) if at != place] or [0.0])

    def expected(self, **changed: Sequence[float]) -> float:
        """Predicts the duration of the epoch if some parts took other times. ``changed``: name of a part -> its seconds, by rank as in ``ranks``.

        The rank with the most own work decides: the duration changes as much as the largest value of ``own``.
        """
        after = [
            own + sum(seconds[place] - self.parts[place][part] for part, seconds in changed.items())
            for place, own in enumerate(self.own)
        ]
        return max(0.0, self.seconds - (max(self.own) - max(after)))

    def with_links(self, links: Mapping[tuple[int, int], float]) -> Job:
        """Returns the job with other speeds of links. Waiting for the network becomes shorter or longer in proportion."""
        parts = []
        for rank, each in zip(self.ranks, self.parts):
            before, after = transfer_of(rank, self.links), transfer_of(rank, links)
            parts.append({**each, "network": each["network"] * after / before if before else each["network"]})
        return replace(self, links=links, parts=parts)


def transfer_of(rank: Rank, links: Mapping[tuple[int, int], float]) -> float:
    """Returns the seconds that a rank's bytes need on its links, if every other rank sends and gets an equal share of them."""
    coming = [speed for (_, to), speed in links.items() if to == rank.number and speed > 0]
    going = [speed for (source, _), speed in links.items() if source == rank.number and speed > 0]
    received = rank.of("bytes.received") * mean(1 / speed for speed in coming) if coming else 0.0
    sent = rank.of("bytes.sent") * mean(1 / speed for speed in going) if going else 0.0
    return max(received, sent)


def _parts_of(ranks: Sequence[Rank], links: Mapping[tuple[int, int], float]) -> list[dict[str, float]]:
    busy = [rank for rank in ranks if rank.batches] or ranks  # a rank without seeds only answers the others
    least = min(rank.of("peers.seconds") / max(1, rank.batches) for rank in busy)
    step = min(rank.of("step.seconds") / max(1, rank.batches) for rank in busy)
    found = [_of_rank(rank, least * rank.batches, transfer_of(rank, links)) for rank in ranks]
    # A step that is longer than the shortest waits for a slower rank, unless other ranks wait for this one.
    for place, (rank, parts) in enumerate(zip(ranks, found)):
        longer = parts["train"] - step * rank.batches
        waited = max((each["others"] for at, each in enumerate(found) if at != place), default=0.0)
        if waited < longer / 2:
            parts["train"], parts["step_wait"] = parts["train"] - longer, longer
    return [{name: max(0.0, round(seconds, 9)) for name, seconds in parts.items()} for parts in found]


def _of_rank(rank: Rank, least: float, transfer: float) -> dict[str, float]:
    """Returns the parts of one rank. ``least``: seconds that every rank waits for messages; ``transfer``: seconds that its bytes need."""
    wait, transform, peers = rank.of("wait.seconds"), rank.of("transform.seconds"), rank.of("peers.seconds")
    stages = rank.stages
    parts = dict.fromkeys(PARTS, 0.0) | {"train": rank.of("step.seconds"), "transform": min(transform, wait)}
    parts["seeds"] = min(rank.of("work.seeds.seconds"), max(0.0, wait - transform))
    inside = max(0.0, wait - transform - parts["seeds"])
    if rank.is_alone:
        # Threads may make whole batches ahead. The loop then waits for a part of their work.
        works = {"sample": rank.of("work.draw.seconds") or stages.get("sample", 0.0)}
        works["rows"] = rank.of("work.gather.seconds") or stages.get("gather_host_rows", 0.0)
        works["assemble"] = max(0.0, stages.get("assemble", 0.0) - transform)
    else:
        network = min(peers, max(least, transfer))
        works = {"sample": stages.get("sample", 0.0), "rows": sum(stages.get(name, 0.0) for name in _ROWS)}
        rounds = sum(stages.get(name, 0.0) for name in _ROUNDS)
        exchange = sum(stages.values()) - sum(works.values()) - rounds - transform
        works |= {"network": network, "others": peers - network, "assemble": max(0.0, exchange - peers)}
        works["sample"] += max(0.0, rounds - max(0.0, peers - exchange))
    total = sum(works.values())
    scale = inside / total if total > inside else 1.0
    parts |= {name: seconds * scale for name, seconds in works.items()}
    parts["rest"] = max(0.0, rank.of("seconds") - sum(parts.values()))
    return parts
