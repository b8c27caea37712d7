"""Measures training on one GPU, and the time it waits for batches. Writes results/cuda.json after each part.

Two generated graphs (Chung and Lu, power law) are drawn on the device, which takes seconds. One has the numbers of ogbn-products (2.4 M vertices, 105 M edges,
8 % training vertices, 100 features). The other has the shape of ogbn-papers100M (29 edges per vertex, 1 % training vertices, 128 features). The model is a
3-layer GraphSAGE with fanouts (15, 10, 5) and batches of 1024. It is measured plain, and as ``salientpp.nn.trim`` makes it. The trimmed step is shorter, so it
hides less of the loading. Figures are medians over turns; the script waits for the device only at their ends.

* ``floor``: the same model on batches that are already on the device.
* ``epoch``: training over β, pipeline on and off, rows packed and read in place; and PyG's loader if it can sample. Also loading alone.
* ``assembly``: one pass over all sources, compared with concatenation and permutation in torch.
* ``tier``: time of the trimmed step, and rows from the host, over β in VIP order and in random order (Figure 6 of the paper).

With ``--device cpu`` and small sizes it only shows that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from unittest import mock

import torch
from common import PYG, RESULTS, pyg_loader, seconds_on_device, settle, write_results
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import salientpp
from salientpp import NeighborLoader
from salientpp.engine import seeds
from salientpp.store.assembly import assemble_rows, has_kernel

FANOUTS = [15, 10, 5]
CLASSES = 47
#: Batches at the start of each turn that are not timed. They fill the pipeline and the pools.
WARM_UP = 10
#: Loaders of the first graph: name -> options.
LOADERS = {
    "beta 0": {},
    "beta 0, zero copy": {"device_rows": {"zero_copy": True}},
    "beta 0.1": {"device_rows": 0.1},
    "beta 0.1, zero copy": {"device_rows": {"part": 0.1, "zero_copy": True}},
    "beta 0.1, depth 1": {"device_rows": 0.1, "depth": 1},
    "beta 1": {"device_rows": 1.0},
}
#: Cases of the second graph: order of the rows, and β. At the ends the order does not matter.
TIERS = [
    *[("VIP", beta) for beta in (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)],
    *[("random", beta) for beta in (0.05, 0.1, 0.25, 0.5)],
]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=2_400_000, help="vertices of the first graph")
    parser.add_argument("--sparse-vertices", type=int, default=4_000_000, help="vertices of the second graph")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40, help="largest number of timed batches per turn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args(given)
    device = torch.device(arguments.device)
    rows: list[dict] = []
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    for part, found in measure(arguments, device):
        rows += found
        seconds[part], started = time.perf_counter() - started, time.perf_counter()
        write_results(
            "cuda",
            rows,
            arguments.results,
            fanouts=FANOUTS,
            batch_size=arguments.batch_size,
            hidden=arguments.hidden,
            layers=3,
            workers=arguments.workers,
            turns=arguments.turns,
            vertices=arguments.vertices,
            sparse_vertices=arguments.sparse_vertices,
            seconds=seconds,
        )


def measure(arguments: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, list[dict]]]:
    """Yields the name and the rows of each part when it is measured."""
    data = chung_lu(arguments.vertices, 43.75, 100, 0.08, device)
    yield "first graph", []
    yield "assembly", time_assembly(data, device)
    loaders = make_loaders(data, arguments, device)
    yield "loaders", time_loading(loaders, arguments, device)
    # Trimming a model changes the batches of the process, so the plain model comes first.
    yield "plain", time_epochs(data, loaders, arguments, device, trims=False)
    yield "trimmed", time_epochs(data, loaders, arguments, device, trims=True)
    del data, loaders
    data = chung_lu(arguments.sparse_vertices, 29, 128, 0.01, device)
    yield "second graph", []
    yield "tiers", time_tiers(data, arguments, device)


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
    """A model and its step.

    Args:
        trims: True for the model that ``salientpp.nn.trim`` makes.
    """

    def __init__(self, num_features: int, hidden: int, device: torch.device, trims: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GraphSAGE(num_features, hidden, num_layers=3, out_channels=CLASSES).to(device)
        if trims:
            self.model = salientpp.nn.trim(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, batch: Data) -> None:
        self.optimizer.zero_grad()
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        self.optimizer.step()


def seconds_per_batch(batches: Iterable, most: int, device: torch.device, use: Callable[[Data], None]) -> float:
    """Returns the mean seconds of loading and using a batch, over at most ``most`` batches after the warm-up."""
    given, started = 0, 0.0
    for batch in islice(batches, WARM_UP + most):
        if given == WARM_UP:
            synchronize(device)
            started = time.perf_counter()
        use(batch.to(device, non_blocking=True))
        given += 1
    if given <= WARM_UP:
        raise ValueError(
            f"an epoch must have more than {WARM_UP} batches, got {given}; take a larger graph or smaller batches"
        )
    synchronize(device)
    return (time.perf_counter() - started) / (given - WARM_UP)


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)


def make_loaders(data: Data, arguments: argparse.Namespace, device: torch.device) -> dict[str, Iterable]:
    """Returns our loaders and PyG's, if PyG can sample here."""
    common = {"batch_size": arguments.batch_size, "shuffle": True, "num_workers": arguments.workers}
    loaders: dict[str, Iterable] = {
        name: NeighborLoader(data, FANOUTS, data.train_mask, device=device, **common, **options)
        for name, options in LOADERS.items()
        if has_kernel(device) or "zero copy" not in name
    }
    for name in PYG[:1]:
        keeps = {"persistent_workers": arguments.workers > 0, "pin_memory": device.type != "cpu"}
        loaders[name] = pyg_loader(name, data, FANOUTS, data.train_mask, **common, **keeps)
    if not PYG:
        print("PyG's loader is left out: neither pyg-lib nor torch-sparse is installed", flush=True)
    settle()
    return loaders


def time_loading(loaders: dict[str, Iterable], arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    rows = []
    for name, loader in loaders.items():
        seconds = seconds_per_batch(loader, _most(name, arguments), device, lambda batch: None)
        rows.append({"part": "loading", "name": name, "batches_per_second": 1 / seconds})
        print(f"{name:24} loads {1 / seconds:8.1f} batches per second", flush=True)
    return rows


def _most(name: str, arguments: argparse.Namespace) -> int:
    """Returns the number of batches to time. PyG's are few, because they may take a second each."""
    return min(10, arguments.batches) if name in PYG else arguments.batches


def time_epochs(
    data: Data, loaders: dict[str, Iterable], arguments: argparse.Namespace, device: torch.device, trims: bool
) -> list[dict]:
    training = Training(data.num_features, arguments.hidden, device, trims)
    some = next(loader for name, loader in loaders.items() if name not in PYG)
    for batch in islice(some, 2):  # the lists that a trimmed model uses are then part of the batches
        training.step(batch)
    ready = list(islice(some, WARM_UP))
    names = ["floor", *(name for name in loaders if not (trims and name in PYG))]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.turns):
        for name in names:
            if name not in PYG or turn == 0:
                batches = cycle(ready) if name == "floor" else loaders[name]
                seconds[name].append(seconds_per_batch(batches, _most(name, arguments), device, training.step))
    floor, rows = statistics.median(seconds["floor"]), []
    for name, spent in seconds.items():
        median = statistics.median(spent)
        rows.append(
            {
                "part": "epoch",
                "model": "trimmed" if trims else "plain",
                "name": name,
                "ms_per_batch": median * 1e3,
                "ms": [s * 1e3 for s in spent],
                "over_floor": median / floor,
                "share_waiting": max(0.0, 1 - floor / median),
            }
        )
        print(
            f"{rows[-1]['model']:8} {name:24} {median * 1e3:8.2f} ms per batch, {median / floor:5.2f} x the floor",
            flush=True,
        )
    return rows


def time_tiers(data: Data, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    training = Training(data.num_features, arguments.hidden, device, trims=True)
    rows = []
    for order, beta in TIERS:
        options = {"device_rows": beta, "device": device, "num_workers": arguments.workers, "seed": 1}
        chance = seeds._access_probability if order == "VIP" else random_probability
        with mock.patch.object(seeds, "_access_probability", chance):
            loader = NeighborLoader(
                data, FANOUTS, data.train_mask, shuffle=True, batch_size=arguments.batch_size, **options
            )
        settle()
        spent = [seconds_per_batch(loader, arguments.batches, device, training.step) for _ in range(arguments.turns)]
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


def time_assembly(data: Data, device: torch.device) -> list[dict]:
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
    return statistics.median(seconds_on_device(function, device) for _ in range(repeats))


if __name__ == "__main__":
    main()
