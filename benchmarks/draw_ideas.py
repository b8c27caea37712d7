"""Draws the pictures of ideas under docs/explanation: inclusion probabilities, tiers, stages over time, and parts on hosts.

python benchmarks/draw_ideas.py
"""

from __future__ import annotations

import torch
from drawing.base import ROOT
from drawing.svg import Picture

from salientpp import Graph, inclusion_probability
from salientpp.engine.stages import STEPS
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.policies import plan_cache

FOLDER = ROOT / "docs" / "explanation"

#: Ten vertices of part 0, then ten of part 1: their places in a picture of 100 by 50.
PLACES = [(8, 12), (8, 36), (18, 24), (20, 8), (20, 42), (30, 16), (30, 33), (40, 8), (41, 25), (40, 42)]
PLACES += [(100 - x, y) for x, y in reversed(PLACES)]
#: Pairs of neighbours. The last ones join the parts.
PAIRS = [(0, 2), (0, 3), (1, 2), (1, 4), (2, 5), (2, 6), (3, 5), (4, 6), (5, 7), (5, 8), (6, 8), (6, 9), (7, 8), (8, 9)]
PAIRS += [(19 - a, 19 - b) for a, b in PAIRS]
PAIRS += [(7, 12), (8, 11), (8, 12), (8, 10), (9, 10), (9, 11)]
SEEDS, FANOUTS = [2, 5, 6, 8], [2, 2]


def draw_vip() -> None:
    """The probability that a batch of part 0 needs each vertex, computed by the package, and the rows that part 0 caches."""
    edges = torch.tensor(PAIRS + [(b, a) for a, b in PAIRS]).T
    graph = Graph.from_edge_index(edges, 20)
    vip = inclusion_probability(graph, torch.tensor(SEEDS), FANOUTS, 1)
    cached = set(plan_cache(vip, PartitionBook([0, 10, 20]), 0, 0.3).tolist())
    picture = Picture(560, 330, "Two parts of a graph. Vertices that batches of part 0 need more often are larger.")
    at = [(20 + 5.2 * x, 40 + 4.6 * y) for x, y in PLACES]
    for a, b in PAIRS:
        picture.line(*at[a], *at[b])
    for vertex, (x, y) in enumerate(at):
        radius = 3 + 16 * float(vip[vertex])
        outlined = ("ink", 3.5) if vertex in cached else ("page", 1.5)
        picture.circle(x, y, radius, "one" if vertex < 10 else "two", *outlined)
        if vertex in SEEDS:
            picture.text(x, y + 4.5, "s", "page", "middle")
    picture.text(20, 22, "part 0, on this machine", "one")
    picture.text(540, 22, "part 1, on another machine", "two", "end")
    picture.text(20, 290, f"s: seeds of part 0. Size: probability that a batch needs the row, fanouts {FANOUTS}.")
    picture.text(20, 312, f"Outlined: the {len(cached)} rows of part 1 that part 0 caches.")
    picture.save(FOLDER / "idea-vip.svg")


def draw_tiers() -> None:
    """Places in which the rows of a batch are found, from the nearest place to the farthest."""
    tiers = [
        ("device", "rows that the device keeps", "three"),
        ("host", "other rows of the own part", "one"),
        ("cache", "copies of the remote rows needed most", "soft"),
        ("remote", "all other rows: asked from their owners", "two"),
    ]
    picture = Picture(
        560, 180, "A batch looks for a row on the device, in the own part, in the cache, and then at its owner."
    )
    for number, (name, words, color) in enumerate(tiers):
        y = 12 + 42 * number
        picture.box(20, y, 110, 30, color)
        picture.text(75, y + 20, name, "ink" if color == "soft" else "page", "middle")
        picture.text(148, y + 20, words)
        if number:
            picture.line(75, y - 11, 75, y - 1, "pale", arrow=True)
    picture.save(FOLDER / "idea-tiers.svg")


def draw_stages() -> None:
    """Batches in flight, one under the other, with the stages that each tick carries them through."""
    names = (
        "sample",
        "send counts",
        "read counts, send ids",
        "read ids, gather rows",
        "copy to device",
        "send rows",
        "batch",
    )
    #: The step of the pipeline in which each name happens; steps without a stage wait for the network.
    steps = [step for step, number in enumerate(STEPS) if number]
    assert len(steps) == len(names), STEPS
    colors = "one", "soft", "soft", "three", "three", "soft", "one"
    picture = Picture(640, 250, "Six batches in the pipeline. Each begins one tick after the one before it.")
    cell = 38.0
    for batch in range(6):
        y = 40 + 24 * batch
        picture.text(10, y + 14, f"batch {batch}")
        for step in range(len(STEPS)):
            x = 66 + cell * (batch + step)
            number = steps.index(step) if step in steps else None
            color = "page" if number is None else colors[number]
            picture.box(x, y, cell - 3, 19, color, "grid" if number is None else "")
            if number is not None:
                ink = "ink" if color == "soft" else "page"
                picture.text(x + cell / 2 - 1.5, y + 14, str(number + 1), ink, "middle", 11)
    picture.text(66, 28, "time, in ticks →", "pale")
    for number, name in enumerate(names):
        picture.text(10 + 160 * (number % 4), 210 + 22 * (number // 4), f"{number + 1} {name}", size=12)
    picture.text(490, 232, "empty: on the network", "pale", size=12)
    picture.save(FOLDER / "idea-stages.svg")


def draw_ranks() -> None:
    """Two hosts with two ranks each, the parts that they hold, and what travels."""
    picture = Picture(560, 220, "Two hosts. Each holds two parts, a cache and the topology, and runs two ranks.")
    for host in range(2):
        x = 20 + 290 * host
        picture.box(x, 20, 230, 180, "page", "pale")
        picture.text(x + 10, 40, f"host {host}")
        for rank in range(2):
            picture.box(x + 10 + 108 * rank, 52, 102, 26, "three")
            picture.text(x + 61 + 108 * rank, 70, f"rank {2 * host + rank}", "page", "middle")
            picture.box(x + 10 + 108 * rank, 92, 102, 26, "one" if host == 0 else "two")
            picture.text(x + 61 + 108 * rank, 110, f"part {2 * host + rank}", "page", "middle")
        picture.box(x + 10, 128, 210, 26, "soft")
        picture.text(x + 115, 146, f"cache of rows of host {1 - host}", "ink", "middle")
        picture.box(x + 10, 164, 210, 26, "page", "grid")
        picture.text(x + 115, 182, "topology of the whole graph", "ink", "middle")
    picture.line(252, 100, 306, 100, "pale", arrow=True)
    picture.line(306, 112, 252, 112, "pale", arrow=True)
    picture.text(280, 90, "rows", "pale", "middle", 12)
    picture.save(FOLDER / "idea-ranks.svg")


if __name__ == "__main__":
    draw_vip()
    draw_tiers()
    draw_stages()
    draw_ranks()
