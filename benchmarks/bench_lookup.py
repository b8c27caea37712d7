"""Measures the look-up of a row's tier, compared with other ways. Writes results/lookup.json.

    python benchmarks/bench_lookup.py [--vertices 111000000] [--parts 8] [--alpha 0.32]

The first peer is a hash map of the cached ids with linear probing (benchmarks/peers/linear_probing.cpp), in ordinary memory and in huge pages. It
does everything that ``ops.look_up`` does. The second is binary search in the sorted ids (``torch.searchsorted``), which only says whether an id is cached, and
in which slot. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse

import torch
from common import take_turns, write_results
from peers import LinearProbing, compiled

from salientpp import ops
from salientpp.ranks.partition_book import PartitionBook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=111_000_000)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=0.32)
    parser.add_argument("--ids", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    n, k = arguments.vertices, arguments.parts
    book = PartitionBook(torch.arange(k + 1) * n // k)
    begin, _ = book.range_of(1)
    cached = torch.randint(n, (int(arguments.alpha * n / k),), generator=generator).unique()
    cached = cached[book.owner(cached) != 1]
    words = ops.pack_id_set(cached, n)
    # a third of the ids local, a third cached, a third remote
    third = arguments.ids // 3
    ids = torch.cat(
        [
            torch.randint(begin, begin + n // k, (third,), generator=generator),
            cached[torch.randint(cached.numel(), (third,), generator=generator)],
            torch.randint(n, (third,), generator=generator),
        ]
    )
    ids = ids[torch.randperm(ids.numel(), generator=generator)]

    def binary_search() -> torch.Tensor:
        at = torch.searchsorted(cached, ids).clamp(max=cached.numel() - 1)
        return torch.where(cached[at] == ids, at, -1)

    candidates = {
        "salientpp, all of look_up": lambda: ops.look_up(ids, book.offsets, 1, [], [words]),
        "searchsorted, cache only": binary_search,
    }
    nbytes = {"salientpp, all of look_up": words.nbytes, "searchsorted, cache only": cached.nbytes}
    library = compiled("linear_probing")
    for name, huge in (
        (("hash map, linear probing", False), ("hash map, huge pages", True)) if library is not None else ()
    ):
        peer = LinearProbing(library, cached)
        if huge:
            ops.use_huge_pages(peer.table)
        position, slot, counts = ops.look_up(ids, book.offsets, 1, [], [words])
        ours = [*(tensor for group in zip(position, slot) for tensor in group), counts]
        if not all(torch.equal(a, b) for a, b in zip(ours, peer.look_up(ids, book.offsets, 1), strict=True)):
            raise RuntimeError("ops.look_up and the hash map disagree on the tiers or places of rows")
        candidates[name] = lambda peer=peer: peer.look_up(ids, book.offsets, 1)
        nbytes[name] = peer.table.nbytes
    rows = []
    for name, timing in take_turns(candidates, arguments.repeats).items():
        timing.pop("last")
        ns = timing["cpu_seconds"]["median"] / ids.numel() * 1e9
        rows.append({"look_up": name, "ns_per_id": ns, "bytes_per_vertex": nbytes[name] / n, **timing})
        print(f"{name:28} {ns:7.1f} ns per id  {nbytes[name] / n:.3f} bytes per vertex", flush=True)
    write_results("lookup", rows, vertices=n, parts=k, alpha=arguments.alpha, ids=ids.numel())


if __name__ == "__main__":
    main()
