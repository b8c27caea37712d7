"""Uses of loaders on the simulated device.

A scenario compares every batch with the one on the CPU. The host never waits for the device inside a loop. A scenario is a function of a folder. It makes the
graph and the expected batches, and returns a function of a seed. This function runs the loop in that order of operations. It raises AssertionError
for a wrong value.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from batches import make
from graphs import RELATIONS, identity_features, random_data, random_hetero
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE

import salientpp
from salientpp import Graph, LinkNeighborLoader, NeighborLoader
from salientpp.sampling.device_topology import DeviceTopology
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import DrawOptions
from tests.simulated_device import install, seed
from tests.simulated_device.kernels import sampling_kernels

Scenario = Callable[[Path], Callable[[int], None]]
N, WIDTH = 120, 16


class Comparison:
    """Compares batches on the device with expected ones. The comparisons are queued on the current stream, so the host does not wait.

    Args:
        expected: batches on the CPU.
    """

    def __init__(self, expected: Iterable[Any]) -> None:
        self._expected = [[part.to(install()) for part in _tensors(batch)] for batch in expected]
        self._wrong: list[tuple[str, Tensor]] = []

    def add(self, index: int, batch: Any) -> None:
        parts = list(_tensors(batch))
        assert [part.shape for part in parts] == [part.shape for part in self._expected[index]], f"batch {index}"
        for number, (part, expected) in enumerate(zip(parts, self._expected[index])):
            self._wrong.append((f"batch {index}, tensor {number}", (part != expected).any()))

    def compare_epoch(self, loader: Iterable[Any]) -> None:
        """Compares the batches of an epoch, and frees each of them at once."""
        for index, batch in enumerate(loader):
            self.add(index, batch)
            del batch
        self.check()

    def check(self) -> None:
        """Waits for the comparisons, and raises AssertionError if a value was wrong."""
        wrong = [name for name, value in self._wrong if bool(value)]
        self._wrong.clear()
        assert not wrong, f"wrong values: {', '.join(wrong)}"


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch, without the package's help."""
    for store in batch.stores:
        for value in store._mapping.values():
            if isinstance(value, Tensor):
                with torch._C.DisableTorchFunctionSubclass():  # a marked tensor refuses comparisons
                    yield value.as_subclass(Tensor)
            elif isinstance(value, tuple):
                yield from (part for part in value if isinstance(part, Tensor))
            elif hasattr(value, "feat_dict"):  # a TensorFrame
                yield from value.feat_dict.values()
            elif hasattr(value, "storage"):  # a SparseTensor
                yield from (value.storage._row, value.storage._col)


def _graph() -> Data:
    data = random_data(N, 700, seed=1)
    data.x = identity_features(N, WIDTH)
    return data


def _part(folder: Path, **options: Any) -> salientpp.PartitionedGraph:
    return salientpp.partition(_graph(), 1, folder / "d", [4, 3], 16, method="random", **options)


def _loader(part: Any, **options: Any) -> NeighborLoader:
    return make(part, input_nodes="train", **{"batch_size": 8, **options})


# --- loaders with options -----------------------------------------------------------------------------------


def with_options(store_as: dict[str, str] | None = None, pad: str | None = None, **options: Any) -> Scenario:
    """Returns a scenario with one epoch of a loader. The expected batches are padded too."""

    def prepare(folder: Path) -> Callable[[int], None]:
        part = _part(folder, **({} if store_as is None else {"store_as": store_as}))
        comparison = Comparison(_loader(part, pad=pad))

        def run(number: int) -> None:
            seed(number)
            comparison.compare_epoch(_loader(part, pad=pad, device=install(), **options))

        return run

    return prepare


def typed(folder: Path) -> Callable[[int], None]:
    graph = random_hetero(paper=60, author=40, venue=5)
    options = {"num_neighbors": dict.fromkeys(RELATIONS, [3, 2]), "input_nodes": "paper", "batch_size": 24, "seed": 1}
    comparison = Comparison(NeighborLoader(graph, **options))

    def run(number: int) -> None:
        seed(number)
        comparison.compare_epoch(NeighborLoader(graph, device=install(), device_rows=0.4, depth=4, **options))

    return run


def sampling_on_the_device(folder: Path) -> Callable[[int], None]:
    """The device draws the neighbours, in three threads."""
    part = _part(folder)
    comparison = Comparison(_loader(part))
    options = {"neighbor_sampler": "device", "num_workers": 3, "depth": 4, "device_rows": 0.3}

    def run(number: int) -> None:
        seed(number)
        with sampling_kernels(free_memory=2**40):
            comparison.compare_epoch(_loader(part, device=install(), **options))

    return run


def samples(free_memory: int) -> Scenario:
    """Returns a scenario with samples that are compared on the host. ``free_memory`` decides where the lists of neighbours are."""

    def prepare(folder: Path) -> Callable[[int], None]:
        graph, options = Graph.from_data(_graph()), DrawOptions([[4, 3]])
        seeds: dict[str | None, Tensor] = {None: torch.arange(0, N, 9)}
        expected = [GraphTopology(graph).sample(seeds, key, options) for key in range(4)]
        kept = []  # without the wait, kernels would read freed memory, which may crash the process instead of failing here

        def run(number: int) -> None:
            seed(number)
            with sampling_kernels(free_memory):
                topology = DeviceTopology(graph, install())
                kept.append(topology)
                for key, other in enumerate(expected):
                    sample = topology.sample(seeds, key, options)
                    for name in ("node", "row", "col", "edge"):
                        assert torch.equal(getattr(sample, name), getattr(other, name)), f"sample {key}: {name}"

        return run

    return prepare


def links(folder: Path) -> Callable[[int], None]:
    data = _graph()
    options = {"num_neighbors": [3, 2], "batch_size": 512, "neg_sampling": "binary", "seed": 2}
    comparison = Comparison(LinkNeighborLoader(data, **options))

    def run(number: int) -> None:
        seed(number)
        comparison.compare_epoch(LinkNeighborLoader(data, device=install(), device_rows=0.2, **options))

    return run


def sparse_adjacency(folder: Path) -> Callable[[int], None]:
    """Batches with torch-sparse's ``SparseTensor``. Without torch-sparse, batches with ``edge_index``."""
    data = _graph()
    if _has_torch_sparse():
        from torch_geometric.transforms import ToSparseTensor

        data = ToSparseTensor()(data)
    comparison = Comparison(make(data, input_nodes=data.train_mask, batch_size=8))

    def run(number: int) -> None:
        seed(number)
        comparison.compare_epoch(make(data, input_nodes=data.train_mask, batch_size=8, depth=4, device=install()))

    return run


def tables(folder: Path) -> Callable[[int], None]:
    """Batches with a table of PyTorch Frame, from a directory."""
    from torch_frame import TensorFrame, stype

    data, rows = _graph(), torch.arange(N)
    features = {stype.numerical: torch.rand(N, WIDTH), stype.categorical: rows[:, None].repeat(1, WIDTH)}
    names = {each: [f"{each} {number}" for number in range(WIDTH)] for each in features}
    data.tf = TensorFrame(features, names)
    part = salientpp.partition(data, 1, folder / "d", [4, 3], 16, method="random")
    comparison = Comparison(_loader(part))

    def run(number: int) -> None:
        seed(number)
        comparison.compare_epoch(_loader(part, depth=4, device_rows=0.3, device=install()))

    return run


def _has_torch_sparse() -> bool:
    import torch_geometric.typing

    return bool(torch_geometric.typing.WITH_TORCH_SPARSE)


# --- the user's loop ----------------------------------------------------------------------------------------


def side_stream(folder: Path) -> Callable[[int], None]:
    """The user's loop runs on a stream of its own."""
    part = _part(folder)
    comparison = Comparison(_loader(part))

    def run(number: int) -> None:
        seed(number)
        with torch.simulated.stream(torch.simulated.Stream()):
            comparison.compare_epoch(_loader(part, device=install(), device_rows=0.3, depth=4))

    return run


def loader_ends_first(**options: Any) -> Scenario:
    """Returns a scenario in which the loader is deleted while its last batch is being made. The loop runs on a stream of its own."""

    def prepare(folder: Path) -> Callable[[int], None]:
        part = _part(folder)
        comparison = Comparison(_loader(part))

        def run(number: int) -> None:
            seed(number)
            loader = _loader(part, device=install(), **options)
            side = torch.simulated.Stream()
            with torch.simulated.stream(side):
                batches = list(loader)
                del loader
                gc.collect()
            torch.zeros(1, device=install()).item()  # the default stream uses the memory that is free now
            torch.simulated.current_stream().wait_stream(side)
            for index, batch in enumerate(batches):
                comparison.add(index, batch)
            comparison.check()

        return run

    return prepare


def early_exit(folder: Path) -> Callable[[int], None]:
    """An epoch ends after two batches. Another continues in the middle, and a third is complete."""
    part = _part(folder)
    comparison = Comparison(_loader(part))
    second = Comparison(itertools.islice(_second_epoch(part), 100))

    def run(number: int) -> None:
        seed(number)
        loader = _loader(part, device=install(), device_rows=0.3, depth=4)
        epoch = iter(loader)
        for index in range(2):
            comparison.add(index, next(epoch))
        state = loader.state_dict()
        del epoch
        resumed = _loader(part, device=install(), device_rows=0.3)
        resumed.load_state_dict(state)
        for index, batch in enumerate(resumed, start=2):
            comparison.add(index, batch)
        second.compare_epoch(resumed)
        comparison.check()

    return run


def _second_epoch(part: Any) -> Iterable[Any]:
    loader = _loader(part)
    for _ in loader:
        pass
    return loader


def transform(folder: Path) -> Callable[[int], None]:
    """The user's transform computes on the device, and replaces ``x``."""
    part = _part(folder)

    def doubled(batch: Data) -> Data:
        batch.x = batch.x * 2
        return batch

    comparison = Comparison(_loader(part, transform=doubled))

    def run(number: int) -> None:
        seed(number)
        comparison.compare_epoch(_loader(part, device=install(), transform=doubled, dtype=torch.float32))

    return run


def training(trims: bool) -> Scenario:
    """Returns a scenario in which a model learns from the batches. Its weights are compared with those of the same model on the CPU.

    A trimmed model also computes with lists of the edges. In its second epoch, the device has all lists before the host asks for them.
    """

    def prepare(folder: Path) -> Callable[[int], None]:
        part = _part(folder)

        def weights(device: Any, depth: int) -> list[Tensor]:
            torch.manual_seed(0)
            plain = GAT(WIDTH, 8, 2, 7, heads=2) if trims else GraphSAGE(WIDTH, 8, num_layers=2, out_channels=7)
            model = salientpp.nn.trim(plain.to(device)) if trims else plain.to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
            loader = _loader(part, device=device, depth=depth, device_rows=0.3)
            for epoch in range(2):
                for batch in loader:
                    with _without_waits() if trims and epoch else contextlib.nullcontext():
                        out = model(batch.x, batch.edge_index)[: batch.batch_size]
                        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
                        optimizer.zero_grad()
                        loss.backward()
                    optimizer.step()
                    del batch
            return [parameter.detach() for parameter in model.parameters()]

        expected = weights("cpu", 1)

        def run(number: int) -> None:
            seed(number)
            for ours, want in zip(weights(install(), 4), expected, strict=True):
                torch.testing.assert_close(ours.cpu(), want)

        return run

    return prepare


@contextlib.contextmanager
def _without_waits() -> Iterator[None]:
    """Makes it an error if the host waits for the device."""
    torch.simulated.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.simulated.set_sync_debug_mode("default")


# --- the user's own tensors on the device -------------------------------------------------------------------


def own_tensors(writes: Callable[[int], bool], num_workers: int, depth: int) -> Scenario:
    """Returns a scenario in which the data has a tensor on the device. The loop writes to it after some batches; a batch must have the values before that."""

    def prepare(folder: Path) -> Callable[[int], None]:
        data = _graph()
        ids = torch.arange(N).pin_memory()

        def run(number: int) -> None:
            seed(number)
            data.there = ids.to(install(), non_blocking=True) * 3
            factor, wrong = 3, []
            options = {"num_workers": num_workers, "depth": depth, "batch_size": 16, "device": install()}
            for index, batch in enumerate(make(data, input_nodes=None, **options)):
                wrong.append((batch.there != batch.n_id * factor).any() | (batch.x[:, 0] != batch.n_id).any())
                del batch
                if writes(index):
                    data.there += ids.to(install(), non_blocking=True)
                    factor += 1
            assert not any(map(bool, wrong)), (
                f"batches with wrong values: {[i for i, each in enumerate(wrong) if each]}"
            )

        return run

    return prepare


def own_tensors_on_a_side_stream(folder: Path) -> Callable[[int], None]:
    """The data has a tensor on the device, and the loop runs on another stream than the default stream."""
    data = _graph()

    def run(number: int) -> None:
        seed(number)
        data.there, wrong = torch.arange(N).to(install()), []
        with torch.simulated.stream(torch.simulated.Stream()):
            for batch in make(data, batch_size=16, depth=4, device=install()):
                wrong.append((batch.there != batch.n_id).any())
                del batch
            assert not any(map(bool, wrong)), (
                f"batches with wrong values: {[i for i, each in enumerate(wrong) if each]}"
            )

    return run


def replaced_rows(folder: Path) -> Callable[[int], None]:
    """The loop replaces ``x`` by a tensor on the device once. Later batches are built again, and converted to another dtype."""
    data = _graph()
    x = data.x

    def run(number: int) -> None:
        seed(number)
        data.x = x
        wrong = []
        for index, batch in enumerate(make(data, batch_size=8, depth=10, device=install(), dtype=torch.float64)):
            factor = 1 if index <= 2 else 2
            wrong.append((batch.x[:, 0] != batch.n_id * factor).any())
            del batch
            if index == 2:
                data.x = x.pin_memory().to(install(), non_blocking=True) * 2
        assert not any(map(bool, wrong)), f"batches with wrong values: {[i for i, each in enumerate(wrong) if each]}"

    return run


def sums(folder: Path) -> Callable[[int], None]:
    """The host sums rows for the device. The order in which every stream is eager gives the expected batches."""
    part = _part(folder)
    options = {"device": install(), "device_rows": 0.3, "depth": 4, "partial_aggregation": "sum"}
    seed(1)
    comparison = Comparison(_loader(part, **options))

    def run(number: int) -> None:
        seed(number)
        comparison.compare_epoch(_loader(part, **options))

    return run


#: Name -> scenario in one process.
SCENARIOS: dict[str, Scenario] = {
    "depth 10": with_options(depth=10, device_rows=0.3),
    "depth 4 with workers": with_options(depth=4, device_rows=0.3, num_workers=3),
    "depth 1": with_options(depth=1, device_rows=0.3),
    "all rows on the device": with_options(device_rows=1.0),
    "no rows on the device": with_options(depth=4),
    "zero copy": with_options(device_rows={"zero_copy": True}),
    "narrow rows": with_options(depth=4, device_rows=0.3, store_as={"x": "int8"}),
    "static buffers": with_options(depth=4, device_rows=0.3, pad={"static": True}),
    "samples": samples(free_memory=2**40),
    "samples from pinned memory": samples(free_memory=0),
    "sampling on the device": sampling_on_the_device,
    "typed": typed,
    "links": links,
    "sparse adjacency": sparse_adjacency,
    "tables": tables,
    "side stream": side_stream,
    "the loader ends first": loader_ends_first(device_rows=1.0, depth=1),
    "the loader ends first, zero copy": loader_ends_first(device_rows={"zero_copy": True}, depth=1),
    "early exit": early_exit,
    "transform": transform,
    "training": training(trims=False),
    "training of a trimmed model": training(trims=True),
    "own tensors": own_tensors(lambda index: False, num_workers=0, depth=4),
    "own tensors, written after each batch": own_tensors(lambda index: True, num_workers=1, depth=4),
    "own tensors, written once": own_tensors(lambda index: index == 2, num_workers=0, depth=10),
    "own tensors on a side stream": own_tensors_on_a_side_stream,
    "replaced rows": replaced_rows,
    "sums": sums,
}
