"""Laws of requests for neighbour lists of other parts: what statistics count, and attributes of every width in the answers."""

from __future__ import annotations

from collections import Counter

import distributed
import torch
from batches import differences
from graphs import random_data
from one_process import TYPED_FANOUTS, homogeneous, store_of, typed_data
from two_forms import in_both_forms

import salientpp
from salientpp import NeighborLoader


def _counted(rank: int, root: str, seeds: object, fanouts: object) -> tuple[Counter[str], Counter[str]]:
    """Returns what statistics count in an epoch, and what the batches show."""
    part = salientpp.load(root)
    loader = NeighborLoader(part, fanouts, seeds, batch_size=8, shuffle=True, seed=3, num_workers=1)
    targets = {target for _, _, target in part.edge_types} if part.is_hetero else {None}
    found: Counter[str] = Counter()
    for batch in loader:
        for type_ in targets:
            of_type = store_of(batch, type_)
            expanded = of_type.n_id[: sum(of_type.num_sampled_nodes[:-1])]
            begin, end = part.books[type_].range_of(rank)
            own = int(((expanded >= begin) & (expanded < end)).sum())
            found += Counter(own=own, remote=expanded.numel() - own)
    stats = loader.stats()
    assert stats.list_rounds > 0
    counted = {"own": stats.expansions_own, "remote": stats.expansions_remote}
    return Counter(counted, sent=stats.list_bytes_sent, received=stats.list_bytes_received), found


def test_statistics_count_the_lists_of_the_own_part_and_of_others(tmp_path):
    cases = (
        (homogeneous(), "train", [4, 3, 2], {"num_neighbors": [4, 3, 2]}),
        (
            typed_data(),
            ("paper", "train"),
            TYPED_FANOUTS,
            {"num_neighbors": TYPED_FANOUTS, "seeds": ("paper", "train")},
        ),
    )
    for number, (data, seeds, fanouts, order) in enumerate(cases):
        root = tmp_path / str(number)
        salientpp.partition(data, 2, root, batch_size=8, topology="parts", **order)
        ranks = distributed.run(_counted, 2, str(root), seeds, fanouts)
        for counted, found in ranks:
            assert found["remote"] > 0 and (counted["own"], counted["remote"]) == (found["own"], found["remote"])
        total = ranks[0][0] + ranks[1][0]
        assert total["sent"] == total["received"] > 0


def _of_every_width(rank: int, root: str) -> list[list[str]]:
    given = {"num_neighbors": [4, 3], "input_nodes": "all", "batch_size": 16, "seed": 3, "uneven": "exact"}
    want = list(NeighborLoader(salientpp.load(f"{root}/whole"), **given))
    loader = NeighborLoader(salientpp.load(f"{root}/parts"), **given)
    return [names for ours, theirs in zip(loader, want, strict=True) if (names := differences(ours, theirs))]


def test_edges_have_attributes_of_every_width_and_alignment(tmp_path):
    """A width of 0, and dtypes that need an alignment of 16 bytes, beside others."""
    data = random_data(200, 1200, directed=True)
    number = data.num_edges
    data.edge_none = torch.zeros(number, 0)
    data.edge_small = torch.arange(number).to(torch.uint8)
    data.edge_complex = torch.randn(number, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    data.edge_nothing = torch.zeros(number, 2, 0, dtype=torch.complex128)
    data.edge_odd = torch.arange(number * 3).view(number, 3).to(torch.int16)
    data.edge_last = torch.randn(number, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    in_both_forms(tmp_path, data, 2, [4, 3], 16, method=torch.arange(200) % 2)
    assert distributed.run(_of_every_width, 2, str(tmp_path)) == [[]] * 2
