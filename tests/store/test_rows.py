"""Laws of `salientpp.store.rows`: the source of rows makes no difference to batches, even if it is a class that the package does not know."""

from __future__ import annotations

import dataclasses
import importlib
import zlib
from pathlib import Path
from threading import Lock

import distributed
import numpy as np
import pytest
import torch
from batches import assert_same_batches, packed
from graphs import RELATIONS, identity_features, random_data, random_hetero
from pages_of_files import rows_in_file
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.engine.basis import Basis
from salientpp.engine.pipeline import StageError
from salientpp.engine.way import TiersByType, Way
from salientpp.store import cache as caches
from salientpp.store.cache import FeatureCache
from salientpp.store.rows import TensorRows
from salientpp.store.tiers import IdSet, Tier
from salientpp.testing.row_source import RowSourceLaws

# --- sources ----------------------------------------------------------------------------------------------


class TestTensor(RowSourceLaws):
    @pytest.fixture
    def source(self, expected):
        return TensorRows(expected)


class TestMemoryMap(RowSourceLaws):
    @pytest.fixture
    def source(self, expected, tmp_path):
        return TensorRows(rows_in_file(expected, tmp_path / "rows"))


@pytest.mark.parametrize("kept", ["host", "device"])
class TestCache(RowSourceLaws):
    @pytest.fixture
    def source(self, expected, kept):
        ids = torch.arange(0, 3 * len(expected), 3)
        cache = FeatureCache(IdSet.of(ids, 3 * len(expected)), {"x": expected})
        cache = caches.on_device({None: cache}, {None: torch.ones(3 * len(expected))}, 2**30, torch.device("cpu"))[None]
        return cache.tiers(False)[["device", "host"].index(kept)].rows["x"]


class CompressedRows:
    """Rows in a file, compressed in small chunks. Neither this class nor the package knows the other."""

    def __init__(self, path: Path, rows: Tensor, rows_per_chunk: int = 6) -> None:
        self.shape, self.dtype, self.taken = tuple(rows.shape), rows.dtype, 0
        self._path, self._rows_per_chunk, self._ends = path, rows_per_chunk, [0]
        with path.open("wb") as file:
            for chunk in rows.split(rows_per_chunk):
                self._ends.append(
                    self._ends[-1] + file.write(zlib.compress(bytes(chunk.contiguous().view(torch.uint8).numpy())))
                )

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        out_index = torch.arange(len(index)) if out_index is None else out_index
        self.taken += len(index)
        chunk_of = index // self._rows_per_chunk
        with self._path.open("rb") as file:
            for chunk in chunk_of.unique().tolist():
                file.seek(self._ends[chunk])
                packed = zlib.decompress(file.read(self._ends[chunk + 1] - self._ends[chunk]))
                here = chunk_of == chunk
                num_rows = min(self._rows_per_chunk, self.shape[0] - chunk * self._rows_per_chunk)
                rows = (
                    torch.frombuffer(bytearray(packed), dtype=self.dtype)
                    if packed
                    else torch.empty(0, dtype=self.dtype)
                )
                out[out_index[here]] = rows.view(num_rows, *self.shape[1:])[index[here] - chunk * self._rows_per_chunk]


class TestCompressedFile(RowSourceLaws):
    @pytest.fixture
    def source(self, expected, tmp_path):
        return CompressedRows(tmp_path / "rows", expected)


class ParquetRows:
    """A column of fixed-size lists in a memory-mapped Parquet file."""

    def __init__(self, path: Path) -> None:
        self._file = importlib.import_module("pyarrow.parquet").ParquetFile(path, memory_map=True)
        self._lock = Lock()  # a ParquetFile is not thread-safe
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = torch.tensor([0, *groups]).cumsum(0)
        self.shape, self.dtype = (sum(groups), self._file.schema_arrow.field("x").type.list_size), torch.float32

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        out_index = torch.arange(len(index)) if out_index is None else out_index
        group_of = torch.searchsorted(self._starts, index, right=True) - 1
        for group in group_of.unique().tolist():
            with self._lock:
                column = self._file.read_row_group(group, columns=["x"]).column("x").combine_chunks()
            rows = torch.from_numpy(column.flatten().to_numpy().copy()).view(-1, self.shape[1])
            here = group_of == group
            out[out_index[here]] = rows[index[here] - self._starts[group]]


class TestParquet(RowSourceLaws):
    @pytest.fixture
    def expected(self):
        return identity_features(60, 5)

    @pytest.fixture
    def source(self, expected, tmp_path):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(expected.flatten().numpy()), 5)
        parquet.write_table(pyarrow.table({"x": column}), tmp_path / "x.parquet", row_group_size=13)
        return ParquetRows(tmp_path / "x.parquet")


# --- a custom source in each kind of loader ------------------------------------------------------------------

OPTIONS = {"batch_size": 16, "shuffle": True, "seed": 3}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_rows_of_a_data_can_come_from_a_custom_source(tmp_path, kept, on_device):
    data = random_data()
    want = list(NeighborLoader(data, [4, 3], data.train_mask, **OPTIONS))
    source = CompressedRows(tmp_path / "x", data.x)
    data.x = -data.x
    if not kept:
        data = Data(**{name: value for name, value in data.to_dict().items() if name != "x"}, num_nodes=data.num_nodes)
        for batch in want:
            batch.num_nodes = batch.n_id.numel()
    loader = NeighborLoader(data, [4, 3], data.train_mask, columns={"x": source}, **OPTIONS)
    assert_same_batches(list(packed(loader) if on_device else loader), want)
    assert source.taken == loader.stats().rows_host > 0
    assert loader.memory_used()["host"] == sum(data[name].nbytes for name in data.node_attrs() if name != "x")


def test_rows_of_one_type_can_come_from_a_custom_source(tmp_path):
    data = random_hetero()
    options = {"num_neighbors": dict.fromkeys(RELATIONS, [3, 2]), "input_nodes": "paper", "batch_size": 8, "seed": 1}
    want = list(NeighborLoader(data, **options))
    rows = {("author", "x"): CompressedRows(tmp_path / "x", data["author"].x), ("paper", "more"): torch.arange(60)}
    del data["author"].x
    data["author"].num_nodes = 35
    for batch, expected in zip(NeighborLoader(data, columns=rows, **options), want, strict=True):
        assert torch.equal(batch["author"].x, expected["author"].x) and torch.equal(
            batch["paper"].x, expected["paper"].x
        )
        assert torch.equal(batch["paper"].more, batch["paper"].n_id)


def test_rows_of_links_can_come_from_a_custom_source(tmp_path):
    data = random_data()
    options = {"num_neighbors": [3, 2], "batch_size": 64, "neg_sampling": "binary", "seed": 2}
    want = list(LinkNeighborLoader(data, **options))
    assert_same_batches(
        list(LinkNeighborLoader(data, columns={"x": CompressedRows(tmp_path / "x", data.x)}, **options)), want
    )


class SharedCache(Way):
    """A way from outside the package: copies of every third row, in a file."""

    name = "shared cache"

    def __init__(self, part: salientpp.PartitionedGraph, folder: Path) -> None:
        self._part, self._folder = part, folder

    def place(self, basis: Basis, tiers: TiersByType) -> TiersByType:
        part, size = self._part, self._part.num_vertices
        members = IdSet.of(torch.arange(0, size, 3), size)
        rows = torch.cat([part.node_rows(number)["x"] for number in range(part.num_parts)])[members.ids]
        source = CompressedRows(self._folder / f"shared-{basis.comm.rank}", rows)
        shared = Tier("cache", members, {"x": source}, False, "cache")
        return {None: dataclasses.replace(tiers[None], copies=[*tiers[None].copies, shared])}


def _compare_on_ranks(rank: int, folder: str) -> tuple[int, int]:
    folder = Path(folder)
    part = salientpp.load(folder / "d")
    want = list(NeighborLoader(part, [4, 3], "train", **OPTIONS))
    own = part.node_rows()
    rows = {"x": CompressedRows(folder / f"x-{rank}", own["x"]), "y": CompressedRows(folder / f"y-{rank}", own["y"])}
    rows["new"] = own["y"] + 1
    for options in (
        {},
        {"replication_factor": 0.3, "device_rows": 0.3},
        {"replication_factor": 0.1, "num_workers": 2},
    ):
        for on_device in (False, True):
            loader = NeighborLoader(part, [4, 3], "train", columns=rows, **options, **OPTIONS)
            for batch, expected in zip(packed(loader, on_device) if on_device else loader, want, strict=True):
                assert torch.equal(batch.x, expected.x) and torch.equal(batch.y[: batch.batch_size], expected.y)
                assert len(batch.new) == batch.num_nodes and torch.equal(batch.new, batch.y + 1)
    loader, again = (
        NeighborLoader(part, [4, 3], "train", replication_factor=0.1, ways=[SharedCache(part, folder)], **OPTIONS)
        for _ in range(2)
    )
    assert_same_batches(list(loader), want)
    assert_same_batches(list(packed(again)), want)
    plain = NeighborLoader(part, [4, 3], "train", replication_factor=0.1, **OPTIONS)
    list(plain)
    return loader.stats().rows_remote, plain.stats().rows_remote


def test_rows_and_tiers_of_ranks_can_come_from_custom_classes(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16)
    for with_shared, without in distributed.run(_compare_on_ranks, 2, str(tmp_path), seconds=240):
        assert 0 < with_shared < without, "the tier serves rows that would otherwise be fetched"


# --- a custom policy --------------------------------------------------------------------------------------


def _cache_on_ranks(rank: int, root: str) -> None:
    part = salientpp.load(root)
    begin, end = part.book.range_of(part.part_id)

    def favours_multiples_of_five(workload) -> Tensor:
        assert workload.part_id == rank and list(workload.num_neighbors) == [4, 3] and workload.batch_size == 16
        return (torch.arange(workload.graph.num_vertices) % 5 == 0).half()

    loader = NeighborLoader(part, [4, 3], "train", policy=favours_multiples_of_five, replication_factor=0.1, **OPTIONS)
    fifths = [v for v in range(0, part.num_vertices, 5) if not begin <= v < end]
    assert loader.cache.members.ids.tolist() == fifths[: part.num_vertices // 20]
    assert_same_batches(list(loader), list(NeighborLoader(part, [4, 3], "train", **OPTIONS)))
    for policy, text in [
        (lambda workload: [0.0] * 400, r"policy must return a tensor of scores \[400\], got list"),
        (lambda workload: torch.zeros(399), r"policy must return scores of shape \[400\], got \[399\]"),
        (
            lambda workload: torch.zeros(400, dtype=torch.complex64),
            r"policy must return real scores, got torch.complex64",
        ),
        (lambda workload: torch.full((400,), torch.nan), r"scores must be numbers, got nan at vertex 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            NeighborLoader(part, [4, 3], "train", policy=policy, replication_factor=0.1, **OPTIONS)


def test_a_function_can_choose_the_cached_rows(tmp_path):
    salientpp.partition(random_data(), 2, tmp_path / "d", [4, 3], 16)
    distributed.run(_cache_on_ranks, 2, str(tmp_path / "d"))


# --- mistakes ---------------------------------------------------------------------------------------------


class Wrong:
    def __init__(self, shape=(400, 3), dtype=torch.float32) -> None:
        self.shape, self.dtype = shape, dtype

    def take(self, index, out, out_index=None):
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "rows, kind, text",
    [
        ([1], ValueError, "columns can choose attributes only of partitioned graphs"),
        ({"x": np.zeros((400, 3))}, TypeError, r"columns\['x'\].dtype must be a torch.dtype, got dtype\('float64'\)"),
        (
            {"x": "file"},
            TypeError,
            r"columns\['x'\] must be a tensor, or an object with shape, dtype and take\(index, out, out_index\), got str",
        ),
        ({"x": Wrong(dtype="float32")}, TypeError, r"columns\['x'\].dtype must be a torch.dtype, got 'float32'"),
        (
            {"x": Wrong(shape=400)},
            TypeError,
            r"columns\['x'\].shape must be \[number of rows, ...\], whole numbers >= 0, got 400",
        ),
        ({"x": Wrong(shape=())}, TypeError, r"columns\['x'\].shape must be .* got \(\)"),
        ({"x": Wrong(shape=(400, 3.0))}, TypeError, r"columns\['x'\].shape must be .* got \(400, 3.0\)"),
        (
            {"x": Wrong(shape=(399, 3))},
            ValueError,
            r"columns\['x'\] must have one row per vertex, expected 400, got 399",
        ),
        ({"x": torch.zeros(401, 3)}, ValueError, r"columns\['x'\] must have one row per vertex, expected 400, got 401"),
        (
            {"x": torch.zeros(3, 400).t()},
            ValueError,
            r"columns\['x'\] must be a contiguous tensor on the CPU, got .* strides \[1, 400\]",
        ),
        (
            {"x": torch.zeros(400, 3, device="meta")},
            ValueError,
            r"columns\['x'\] must be a contiguous tensor on the CPU, got .* on meta",
        ),
        (
            {("paper", "x"): Wrong()},
            ValueError,
            r"the keys of columns must be names of attributes, got \('paper', 'x'\)",
        ),
        ({5: Wrong()}, ValueError, r"the keys of columns must be names of attributes, got 5"),
    ],
)
def test_invalid_row_sources_are_refused(rows, kind, text):
    with pytest.raises(kind, match=text):
        NeighborLoader(random_data(), [4, 3], columns=rows, **OPTIONS)


def test_rows_of_an_unknown_type_are_refused():
    for key in ["x", ("book", "x")]:
        with pytest.raises(
            ValueError,
            match=r"the keys of columns must be \(node type, name\) with a node type of the data \(paper, author, venue\), got ",
        ):
            NeighborLoader(random_hetero(), dict.fromkeys(RELATIONS, [3]), "paper", columns={key: torch.zeros(60)})


def test_zero_copy_needs_rows_in_memory():
    with pytest.raises(
        ValueError,
        match=r"device_rows\['zero_copy'\] needs rows in memory, but the rows of x come from a custom row source; leave 'zero_copy' out",
    ):
        NeighborLoader(random_data(), [4, 3], columns={"x": Wrong()}, device_rows={"zero_copy": True}, **OPTIONS)


def test_an_error_of_a_source_names_the_stage():
    loader = NeighborLoader(random_data(), [4, 3], columns={"x": Wrong()}, **OPTIONS)
    with pytest.raises(StageError, match=r"rank 0, batch 0, stage gather_host_rows: the disk is gone"):
        list(loader)


def test_a_state_needs_rows_of_the_same_shape():
    data = random_data()
    make = lambda **options: NeighborLoader(data, [4, 3], **options, **OPTIONS)  # noqa: E731
    state = make(columns={"x": torch.zeros(400, 5)}).state_dict()
    make(columns={"x": torch.ones(400, 5)}).load_state_dict(state)
    for rows in ({"x": torch.zeros(400, 4)}, "x"):
        with pytest.raises(ValueError, match="cannot load this state.*columns"):
            make(columns=rows).load_state_dict(state)
