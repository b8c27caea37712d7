"""Measures jobs in which some hosts only store: time, traffic and memory. Writes results/storage.json. Needs root and iproute2.

    python benchmarks/bench_storage.py [--links 20:1 100:1] [--turns 3] [--large 10000000] [--folder DIR] [--only links memory slow]

**Links** (rows of the file). Hosts of one rank each are emulated by network namespaces (benchmarks/cluster.py), with links of a rate and a delay. Jobs load
the same batches of one partition into four parts, and train a trimmed GraphSAGE on them:

* ``joined``: four hosts train and store. Each holds its part of the rows, and a cache with the replication factor ``--alpha``.
* ``storage``: two hosts train, and two store. A host that trains has a cache as large as all rows that a host of ``joined`` holds.
* ``storage, lookahead`` and ``joined, lookahead``: the same memory, used by ``lookahead="auto"``.
* ``storage, no cache``: as ``storage`` without a cache, as in the server-client modes of GLT and GiGL.
* ``joined, 2 hosts``: two hosts train and store. Each holds half of the rows, and a cache with the same replication factor.
* ``storage, larger cache``: as ``storage``, but a host that trains has a cache as large as all rows that a host of ``joined, 2 hosts`` holds.

Ratios are to ``joined``, and to ``joined, 2 hosts``. The first has the same number of hosts as ``storage``, and as many bytes of rows on each host that
trains. Its batches fetch rows over four links, those of ``storage`` over two. The second has as many links and hosts that train as ``storage``, but each must
hold half of the graph. ``logical_ranks=4`` makes the batches of all jobs equal, which sums over them check.

Each turn starts every job again. Its first epoch is warm-up. A ratio is the median over turns of the ratio in one turn. All hosts share the cores of one
machine: the network is delayed, computation is not. So every job has all cores.

Bytes on links of hosts that train are counted by the interface, with headers, in an epoch of loading. They are compared with the bytes that loaders
count. Headers take 66 bytes of each packet (Ethernet, IPv4, TCP with timestamps). ``idle`` are bytes that cross the links in the same time while nothing is
loaded: storage ranks look for messages in the job's store. Other bytes are headers of gloo's messages, and the barriers at both ends of the epoch.

**Memory** (``memory`` and ``slow`` of the file): see ``storage_memory.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import storage_memory
import torch
import torch.distributed as dist
from cluster import Cluster, link_counts, unavailable
from common import spread, train, write_results
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.datasets import synthetic

TRAINERS, STORAGE, PARTS = 2, 2, 4
FANOUTS, FEATURES = [15, 10, 5], 128
WORKS = ("loading", "training")
HEADER_BYTES = 14 + 20 + 32
IDLE_SECONDS = 3.0
SECTIONS = ("links", "memory", "slow")


@dataclass(frozen=True)
class Form:
    """A job. ``cached`` is the number of rows in the cache of a rank that trains, as a share of all rows."""

    trainers: int
    storage_ranks: int
    cached: float
    lookahead: str | int = 0


def forms_of(alpha: float) -> dict[str, Form]:
    return {
        "joined": Form(PARTS, 0, alpha / PARTS),
        "storage": Form(TRAINERS, STORAGE, (1 + alpha) / PARTS),
        "storage, lookahead": Form(TRAINERS, STORAGE, (1 + alpha) / PARTS, "auto"),
        "joined, lookahead": Form(PARTS, 0, alpha / PARTS, "auto"),
        "storage, no cache": Form(TRAINERS, STORAGE, 0.0),
        "joined, 2 hosts": Form(TRAINERS, 0, alpha / TRAINERS),
        "storage, larger cache": Form(TRAINERS, STORAGE, (1 + alpha) / TRAINERS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--links", nargs="+", default=["20:1", "100:1"], help="MB/s, and milliseconds to a host")
    parser.add_argument("--topologies", nargs="+", choices=("whole", "parts"), default=["whole", "parts"])
    parser.add_argument("--vertices", type=int, default=200_000)
    parser.add_argument("--degree", type=float, default=20.0)
    parser.add_argument("--train-fraction", type=float, default=0.04)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1, help="measured epochs of each work in a turn")
    parser.add_argument("--large", type=int, default=10_000_000, help="vertices of the graph for the memory")
    parser.add_argument("--large-root", type=Path, help="its dataset directory in 4 parts, instead of a new one")
    parser.add_argument("--budget-megabytes", type=float, default=256, help="memory= on that graph")
    parser.add_argument("--large-batches", type=int, default=100, help="batches of a rank on that graph")
    parser.add_argument("--slow-batches", type=int, default=24)
    parser.add_argument("--slow-seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="where files are written and removed (a temporary folder)")
    parser.add_argument("--results", default="storage", help="name of the result file")
    arguments = parser.parse_args()
    missing = unavailable()
    if missing and "links" in arguments.only:
        raise SystemExit(missing)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # ranks that store lose the job's store at the end of a cluster
    rows: list[dict[str, Any]] = []
    more: dict[str, Any] = {"load_averages": [os.getloadavg()[0]]}
    folder = Path(tempfile.mkdtemp(prefix="salientpp-storage-", dir=arguments.folder))
    try:
        data = synthetic(
            num_vertices=arguments.vertices, average_degree=arguments.degree, num_features=FEATURES, train_fraction=arguments.train_fraction
        )  # fmt: skip
        whole = folder / "whole"
        salientpp.partition(data, PARTS, whole, FANOUTS, arguments.batch_size, refine=False)
        salientpp.rewrite_topology(whole, folder / "parts", "parts")
        for section in arguments.only:
            if section == "links":
                for of_link in measure_links(folder, arguments):
                    rows += of_link
                    save(rows, more, arguments)
            elif section == "memory":
                more["memory"] = storage_memory.of_trainers(folder, arguments)
            else:
                more["slow"] = storage_memory.of_slow_trainer(whole, arguments)
            save(rows, more, arguments)
    finally:
        shutil.rmtree(folder)


def save(rows: list[dict[str, Any]], more: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Writes what has been measured so far."""
    more["load_averages"].append(os.getloadavg()[0])
    given = {name: value for name, value in vars(arguments).items() if name not in ("folder", "results", "large_root")}
    write_results(arguments.results, rows, **more, parts=PARTS, fanouts=FANOUTS, features=FEATURES, **given)


# --- links ----------------------------------------------------------------------------------------------------


def measure_links(folder: Path, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yields a row for each job, for each link and topology."""
    forms = forms_of(arguments.alpha)
    for link in arguments.links:
        rate, delay = (float(number) for number in link.split(":"))
        for topology in arguments.topologies:
            turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in forms}
            for turn in range(arguments.turns):
                for name in forms if turn % 2 else reversed(forms):
                    form = forms[name]
                    with Cluster(form.trainers + form.storage_ranks, rate * 1e6, delay=delay / 1e3) as cluster:
                        # Ranks that store end with the cluster, so they are not waited for.
                        ranks = cluster.start(be_host, str(folder / topology), form, arguments, seconds=1200)
                        turns[name].append([rank.result(1200) for rank in ranks[: form.trainers]])
            sums = {sum(of_rank["sum"] for of_rank in of_turn) for found in turns.values() for of_turn in found}
            if len(sums) != 1:
                raise RuntimeError(f"all jobs must give the same batches, but the sums over ids are {sorted(sums)}")
            of_link = {"megabytes_per_second": rate, "delay_ms": delay, "topology": topology}
            rows = [
                {**of_link, "form": name, **asdict(form), **together(turns[name], turns)}
                for name, form in forms.items()
            ]
            for row in rows:
                tell(row)
            yield rows


def be_host(rank: int, root: str, form: Form, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Runs a rank of a job. Returns the figures of a rank that trains."""
    part = salientpp.load(root, storage_ranks=form.storage_ranks)
    if part.only_stores:
        salientpp.serve(part)
        return None
    loader = NeighborLoader(
        part, FANOUTS, "train", batch_size=arguments.batch_size, shuffle=True, seed=0, num_workers=1, logical_ranks=PARTS,
        replication_factor=form.cached * form.trainers, lookahead=form.lookahead,
    )  # fmt: skip
    torch.manual_seed(0)
    model = salientpp.nn.trim(
        GraphSAGE(FEATURES, arguments.hidden, num_layers=len(FANOUTS), out_channels=part.num_classes)
    )
    parallel = DistributedDataParallel(model, process_group=part.trainers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    figures: dict[str, Any] = {work: [] for work in WORKS}
    for epoch in range(arguments.epochs + 1):
        for work in WORKS if epoch else WORKS[:1]:  # the first epoch is warm-up
            loader.set_epoch(0)
            loader.reset_stats()
            dist.barrier(part.trainers)
            started, before = time.perf_counter(), link_counts()
            if work == "loading":
                figures["sum"] = sum(int(batch.n_id.sum()) + int(batch.edge_index.sum()) for batch in loader)
            else:
                train(parallel, optimizer, loader)
            dist.barrier(part.trainers)
            seconds = time.perf_counter() - started
            if epoch:
                figures[work].append(seconds)
            if work == "loading":
                figures |= {"link": link_counts().since(before), "link_seconds": seconds}
                figures["stats"] = loader.stats()
    before = link_counts()
    time.sleep(IDLE_SECONDS)
    figures["idle"] = link_counts().since(before)
    figures["row_bytes"] = sum(loader.stats().row_bytes.values())
    figures["memory"] = loader.memory_used()
    dist.barrier(part.trainers)
    return figures


#: Forms that others are compared with -> end of a ratio's name.
COMPARED = {"joined": "ratio", "joined, 2 hosts": "ratio_to_2_hosts"}


def together(turns: list[list[dict[str, Any]]], all_turns: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Returns the figures of a job: seconds of rank 0, which waits for all, and sums of counts over the ranks that train in the last turn."""
    row: dict[str, Any] = {}
    for work in WORKS:
        own = [spread(of_turn[0][work])["median"] for of_turn in turns]
        row[f"{work}_seconds"] = spread(own)
        for form, name in COMPARED.items():
            other = [spread(of_turn[0][work])["median"] for of_turn in all_turns[form]]
            row[f"{work}_{name}"] = spread([ours / theirs for ours, theirs in zip(own, other, strict=True)])
    ranks = turns[-1]
    row["batches"] = sum(of_rank["stats"].batches for of_rank in ranks)
    row["rows_remote"] = sum(of_rank["stats"].rows_remote for of_rank in ranks)
    row["rows_cache"] = sum(of_rank["stats"].rows_cache for of_rank in ranks)
    row["list_bytes_received"] = sum(of_rank["stats"].list_bytes_received for of_rank in ranks)
    row["resident_rows_bytes"] = max(of_rank["memory"]["cache"] + of_rank["memory"]["host"] for of_rank in ranks)
    for way in ("received", "sent"):
        on_link = sum(getattr(of_rank["link"], f"{way}_bytes") for of_rank in ranks)
        packets = sum(getattr(of_rank["link"], f"{way}_packets") for of_rank in ranks)
        # Packets of idle time are among those whose headers are counted, so only the rest of their bytes is.
        idle = sum(
            (getattr(of_rank["idle"], f"{way}_bytes") - HEADER_BYTES * getattr(of_rank["idle"], f"{way}_packets"))
            * of_rank["link_seconds"] / IDLE_SECONDS
            for of_rank in ranks
        )  # fmt: skip
        counted = sum(getattr(of_rank["stats"], f"bytes_{way}") for of_rank in ranks)
        headers = HEADER_BYTES * packets
        row[way] = {
            "counted_bytes": counted, "link_bytes": on_link, "packets": packets, "header_bytes": headers, "idle_bytes": round(idle),
            "link_over_counted": on_link / counted, "other_over_counted": (on_link - headers - idle) / counted - 1,
        }  # fmt: skip
    return row


def tell(row: dict[str, Any]) -> None:
    loading, training, received = row["loading_ratio"], row["training_ratio"], row["received"]
    print(
        f"{row['megabytes_per_second']:g} MB/s, {row['delay_ms']:g} ms, {row['topology']:5} {row['form']:17}: loading "
        f"{row['loading_seconds']['median']:.2f} s, ratio {loading['median']:.2f} ({loading['low']:.2f} to {loading['high']:.2f}), training "
        f"{row['training_seconds']['median']:.2f} s, ratio {training['median']:.2f}, to 2 joined hosts {row['loading_ratio_to_2_hosts']['median']:.2f} and "
        f"{row['training_ratio_to_2_hosts']['median']:.2f}, {row['rows_remote']:,} rows, {received['link_bytes'] / 1e6:.1f} MB, "
        f"{received['link_over_counted']:.4f} of counted, other {received['other_over_counted']:.4%}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
