"""Measures training on one GPU, and the time it waits for batches. Writes results/cuda.json.

Two generated graphs (Chung and Lu, power law) are drawn on the device, which takes seconds. One has the numbers of ogbn-products (2.4 M vertices, 105 M edges,
8 % training vertices, 100 features). The other has the shape of ogbn-papers100M (29 edges per vertex, 1 % training vertices, 128 features). The model is a
3-layer GraphSAGE with fanouts (15, 10, 5) and batches of 1024. Figures are medians over epochs, or over parts of them; the script waits for the device only at
their ends.

* ``floor``: the same model on batches that are already on the device.
* ``epoch``: whole epochs over β, pipeline on and off, rows packed and read in place; and PyG's loader if it can sample.
* ``tier``: time, and rows from the host, over β in VIP order and in random order (Figure 6 of the paper).
* ``assembly``: one pass over all sources, compared with concatenation and permutation in torch.

With ``--device cpu`` and small sizes it only shows that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from unittest import mock

import torch
from common import PYG, settle, write_results
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PyGLoader
from torch_geometric.nn import GraphSAGE

from salientpp import NeighborLoader
from salientpp.engine import seeds
from salientpp.store.assembly import assemble_rows

FANOUTS = [15, 10, 5]
CLASSES = 47


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=2_400_000, help="vertices of the first graph")
    parser.add_argument("--sparse-vertices", type=int, default=4_000_000, help="vertices of the second graph")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batches", type=int, default=150, help="largest number of batches per turn")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dense = chung_lu(arguments.vertices, 43.75, 100, 0.08, device)
    rows = [*time_epochs(dense, arguments, device), *time_assembly(dense, arguments, device)]
    del dense
    sparse = chung_lu(arguments.sparse_vertices, 29, 128, 0.01, device)
    rows += time_tiers(sparse, arguments, device)
    write_results(
        "cuda",
        rows,
        fanouts=FANOUTS,
        batch_size=arguments.batch_size,
        hidden=arguments.hidden,
        layers=3,
        workers=arguments.workers,
        vertices=arguments.vertices,
        sparse_vertices=arguments.sparse_vertices,
    )


def chung_lu(num_vertices: int, degree: float, num_features: int, train_fraction: float, device: torch.device) -> Data:
    """Returns an undirected graph whose edges choose both ends in proportion to expected degrees of a power law. Repeated edges stay."""
    generator = torch.Generator(device).manual_seed(0)
    weight = (
        (1 - torch.rand(num_vertices, generator=generator, device=device, dtype=torch.float64))
        .pow(-1 / 1.5)
        .clamp(max=num_vertices**0.5)
    )
    ends = weight.cumsum(0)
    num_pairs = int(num_vertices * degree / 2)
    pairs = torch.empty(2, num_pairs, dtype=torch.int32)
    for begin in range(0, num_pairs, 2**24):
        size = min(2**24, num_pairs - begin)
        drawn = torch.rand(2, size, generator=generator, device=device, dtype=torch.float64) * ends[-1]
        pairs[:, begin : begin + size] = torch.searchsorted(ends, drawn).clamp(max=num_vertices - 1).cpu()
    x = torch.randn(num_vertices, num_features, generator=generator, device=device).cpu()
    y = torch.randint(CLASSES, (num_vertices,), generator=generator, device=device).cpu()
    train = torch.rand(num_vertices, generator=generator, device=device).cpu() < train_fraction
    return Data(edge_index=torch.cat([pairs, pairs.flip(0)], dim=1).long(), x=x, y=y, train_mask=train)


class Training:
    """A model and its step."""

    def __init__(self, num_features: int, hidden: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GraphSAGE(num_features, hidden, num_layers=3, out_channels=CLASSES).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def seconds(self, batches: Iterable, most: int) -> float:
        """Returns the seconds per batch of loading and training."""
        return self._per_batch(batches, most, self._step)

    def only_load(self, batches: Iterable, most: int) -> float:
        """Returns the seconds per batch of loading alone."""
        return self._per_batch(batches, most, lambda batch: None)

    def _step(self, batch: Data) -> None:
        self.optimizer.zero_grad()
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        self.optimizer.step()

    def _per_batch(self, batches: Iterable, most: int, use: Callable[[Data], None]) -> float:
        """Averages without the first ten batches, which fill pipeline and pools."""
        given, started = 0, 0.0
        for batch in islice(batches, most + 10):
            if given == 10:
                self._wait()
                started = time.perf_counter()
            use(batch.to(self.device, non_blocking=True))
            given += 1
        if given <= 10:
            raise ValueError(
                f"an epoch must have more than 10 batches, got {given}; take a larger graph or smaller batches"
            )
        self._wait()
        return (time.perf_counter() - started) / (given - 10)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def time_epochs(data: Data, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    training = Training(data.num_features, arguments.hidden, device)

    def loader(kind: Callable = NeighborLoader, **options) -> Iterable:
        return kind(
            data,
            FANOUTS,
            data.train_mask,
            batch_size=arguments.batch_size,
            shuffle=True,
            num_workers=arguments.workers,
            **options,
        )

    ready = list(islice(loader(device=device), 16))
    candidates: dict[str, Callable[[], Iterable]] = {"floor": lambda: cycle(ready)}
    for name, options in {
        "beta 0": {},
        "beta 0, zero copy": {"zero_copy": True},
        "beta 0.1": {"device_rows": 0.1},
        "beta 0.1, zero copy": {"device_rows": 0.1, "zero_copy": True},
        "beta 0.1, depth 1": {"device_rows": 0.1, "depth": 1},
        "beta 1": {"device_rows": 1.0},
    }.items():
        made = loader(device=device, **options)
        candidates[name] = lambda made=made: made
    for name in PYG[:1]:
        pyg = loader(PyGLoader, pin_memory=device.type == "cuda", persistent_workers=arguments.workers > 0)
        candidates[name] = lambda pyg=pyg: pyg
    settle()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    loading: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(arguments.turns):
        for name, batches in candidates.items():
            if name not in PYG or turn == 0:
                seconds[name].append(training.seconds(batches(), arguments.batches if name not in PYG else 10))
            if name != "floor" and turn == 0:
                loading[name].append(training.only_load(batches(), arguments.batches if name not in PYG else 10))
    floor = statistics.median(seconds["floor"])
    rows = []
    for name, spent in seconds.items():
        median = statistics.median(spent)
        rows.append(
            {
                "part": "epoch",
                "name": name,
                "ms_per_batch": median * 1e3,
                "ms": [s * 1e3 for s in spent],
                "over_floor": median / floor,
                "share_waiting": max(0.0, 1 - floor / median),
                "batches_per_second_loading": [1 / s for s in loading[name]],
            }
        )
        print(
            f"{name:24} {median * 1e3:8.2f} ms per batch, {median / floor:5.2f} x the floor; loads {[round(1 / s, 1) for s in loading[name]]} per s",
            flush=True,
        )
    return rows


def time_tiers(data: Data, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    training = Training(data.num_features, arguments.hidden, device)
    rows = []
    for order in ("VIP", "random"):
        for beta in (0.0, 0.05, 0.1, 0.25, 0.5, 1.0):
            options = {
                "device_rows": beta,
                "device": device,
                "num_workers": arguments.workers,
                "batch_size": arguments.batch_size,
                "seed": 1,
            }
            chance = seeds._access_probability if order == "VIP" else random_probability
            with mock.patch.object(seeds, "_access_probability", chance):
                loader = NeighborLoader(data, FANOUTS, data.train_mask, shuffle=True, **options)
            settle()
            spent = [training.seconds(loader, arguments.batches) for _ in range(arguments.turns)]
            stats = loader.stats()
            rows.append(
                {
                    "part": "tier",
                    "order": order,
                    "beta": beta,
                    "ms_per_batch": statistics.median(spent) * 1e3,
                    "ms": [s * 1e3 for s in spent],
                    "share_of_rows_from_host": stats.rows_host / stats.rows,
                }
            )
            print(
                f"{order:8} beta {beta:4.2f}  {rows[-1]['ms_per_batch']:8.2f} ms per batch, {stats.rows_host / stats.rows:6.1%} of the rows from the host",
                flush=True,
            )
            del loader
    return rows


def random_probability(sampler, *_) -> dict[None, Tensor]:
    return {None: torch.rand(sampler.topology.num_vertices[None], generator=torch.Generator().manual_seed(0))}


def time_assembly(data: Data, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    """Times the assembly of a batch's rows: a tenth packed, a tenth received, the others on the device."""
    rows = []
    num_rows = min(500_000, data.num_nodes)
    for dtype in (torch.float32, torch.float16, torch.int8):
        x = data.x[: min(1_000_000, data.num_nodes)].to(dtype).to(device)
        packed, arrived = x[: num_rows // 10].clone(), x[: num_rows // 10].clone()
        index = torch.cat(
            [torch.randint(len(x), (num_rows - 2 * len(packed),)), len(x) + torch.arange(2 * len(packed))]
        )
        permutation = torch.randperm(num_rows)
        permuted = permutation.to(device)
        slots = index[: num_rows - 2 * len(packed)].to(device)
        mixed = index[permutation].int().to(device)
        out = torch.empty(num_rows, x.size(1), dtype=dtype, device=device)

        def fused() -> Tensor:
            assemble_rows([x, packed, arrived], mixed, out)
            return out

        def in_torch() -> Tensor:
            return torch.cat([x.index_select(0, slots), packed, arrived]).index_select(0, permuted)

        assert torch.equal(fused(), in_torch())
        times = {function.__name__: time_on_device(function, device) for function in (fused, in_torch)}
        rows.append(
            {
                "part": "assembly",
                "dtype": str(dtype),
                "rows": num_rows,
                "columns": x.size(1),
                "bytes": out.nbytes,
                **{f"{name}_us": seconds * 1e6 for name, seconds in times.items()},
            }
        )
        print(
            f"assembly {dtype}: {times['fused'] * 1e6:.0f} us, in torch {times['in_torch'] * 1e6:.0f} us, {2 * out.nbytes / times['fused'] / 1e9:.0f} GB/s",
            flush=True,
        )
    return rows


def time_on_device(function: Callable, device: torch.device, repeats: int = 20) -> float:
    for _ in range(3):
        function()
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    spent = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
