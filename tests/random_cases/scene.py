"""A random job on one rank: its data, the arguments of its loader, and the batches that it must give."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from random_cases.data import build, directory, narrowed, stores, whole_of
from random_cases.plain import Layout, Order, Plain, shift_of_labels
from random_cases.pool import Place
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, NeighborSampler, PPRSampler
from salientpp.engine.way import Way
from salientpp.vip.policies import Workload
from salientpp.ways.planner.machines import Link, Machines

if TYPE_CHECKING:
    from random_cases.jobs import Job

# --- names that texts of arguments may use -------------------------------------------------------------------------


class OwnData(Data):
    pass


class OwnHetero(HeteroData):
    pass


class Positions(list):
    """A user's sampler."""


class Endless:
    """A user's sampler of batches that never ends."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0]


class SlowRows:
    """A user's source of rows."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def take(self, index: Tensor, out: Tensor, out_index: Tensor | None = None) -> None:
        if out_index is None:
            out.copy_(self._rows[index])
        else:
            out[out_index] = self._rows[index]


class NoWay(Way):
    name = "a way without effect"


class StagedWay(NoWay):
    needs_stages = True


def marked(batch: Any) -> Any:
    batch.mark = torch.tensor([3.0])
    return batch


def same_sample(sample: Any) -> Any:
    return sample


def reversed_edges(sample: Any) -> Any:
    """Returns a sample with its edges in the opposite order."""
    for name in ("row", "col", "edge"):
        value = getattr(sample, name)
        if isinstance(value, dict):
            turned: Any = {type_: None if ids is None else ids.flip(0) for type_, ids in value.items()}
        else:
            turned = None if value is None else value.flip(0)
        setattr(sample, name, turned)
    return sample


def noted(worker: int) -> None:
    pass


def low_ids(workload: Any) -> Any:
    """A user's cache policy."""
    if isinstance(workload, Workload):
        return 1 / (1 + torch.arange(workload.num_vertices).float())
    graph = workload.graph
    return {type_: 1 / (1 + torch.arange(size).float()) for type_, size in zip(graph.node_types, graph.num_vertices)}


def machines() -> Machines:
    return Machines(between=Link(1e8, 1e-5))


def arange(seeds: Tensor) -> Tensor:
    return torch.arange(len(seeds) if seeds.dim() == 1 else seeds.size(1))


def times_of(seeds: Tensor) -> Tensor:
    """Times of vertices or edges that are seeds."""
    return (seeds if seeds.dim() == 1 else seeds.sum(0)).long() * 7 % 6


_FUNCTIONS = (
    OwnData,
    OwnHetero,
    Positions,
    Endless,
    SlowRows,
    NoWay,
    StagedWay,
    marked,
    same_sample,
    reversed_edges,
    noted,
    low_ids,
    machines,
    arange,
    times_of,
)
_CLASSES = (
    NeighborSampler,
    PPRSampler,
    NegativeSampling,
    NumNeighbors,
    SubgraphType,
    BatchSampler,
    SequentialSampler,
    timedelta,
)
CONSTANTS = {"torch": torch, **{each.__name__: each for each in (*_FUNCTIONS, *_CLASSES)}}


@lru_cache(maxsize=8)
def _whole(root: Path) -> Any:
    return whole_of(root)


class Scene:
    """A job on one rank: its data, the arguments of its loader, and the expected batches."""

    def __init__(self, job: Job, place: Place, folder: Path) -> None:
        self.job, self.place, graph = job, place, job.graph
        if graph.is_directory:
            root = directory(graph, folder)
            self.whole = _whole(root)
            self.data = salientpp.load(root, process_group=place.group)
        else:
            self.whole = build(graph, folder)
            self.data = stores(self.whole) if graph.is_stores else self.whole
        given = job.value("share") if not graph.is_directory else None
        self.shares = given if isinstance(given, tuple) and len(given) == 2 else None
        parts, ranks = (graph.parts, job.ranks) if graph.is_directory else (1, self.shares[1] if self.shares else 1)
        self.rank = place.rank if graph.is_directory else (self.shares or (0, 1))[0]
        self.layout = Layout(parts, ranks, *self._options_of_layout())
        self.given_cache: Any = None  # the value of ``cache=``

    def _options_of_layout(self) -> tuple[int, tuple[int, ...], bool]:
        job = self.job
        if not job.graph.is_directory:
            return 0, (), False
        hosts = job.value("ranks_per_host")
        hosts = (hosts,) * (job.ranks // hosts) if type(hosts) is int and hosts > 0 else tuple(hosts or ())
        return job.value("logical_ranks") or 0, hosts or (1,) * job.ranks, job.value("cooperate") is not None

    # --- seeds --------------------------------------------------------------------------------------------

    @property
    def seed_type(self) -> Any:
        """Type of the vertices or edges that are seeds."""
        if not self.job.graph.is_typed:
            return None
        given = eval(self.job.text("edge_label_index" if self.job.link else "input_nodes"), self._names(range(0)))
        if given is None:  # odd
            return ("a", "to", "b") if self.job.link else "a"
        return given[0] if isinstance(given, tuple) and not (self.job.link and isinstance(given[0], str)) else given

    def _range(self, parts: range, type_: Any) -> tuple[int, int]:
        """First and last id of some parts."""
        if not self.job.graph.is_directory:
            return 0, self.job.graph.size(type_)
        book = self.data.whole.books[type_]
        return book.range_of(parts.start)[0] if len(parts) else 0, book.range_of(parts.stop - 1)[1] if len(parts) else 0

    def _names(self, parts: range) -> dict[str, Any]:
        """Names of texts about the seeds of some parts."""

        def own_ids(*given: Any) -> Tensor:
            type_, number = given if len(given) == 2 else (None, *given)
            found = []
            for part in parts:
                begin, end = self._range(range(part, part + 1), type_)
                draw = torch.Generator().manual_seed(number + 10 * part)
                chosen = torch.randperm(end - begin, generator=draw)[: (end - begin + number) // 2] + begin
                found.append(torch.cat([chosen, chosen[:1]]) if number == 2 else chosen)
            return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

        def own_pairs(*given: Any) -> Tensor:
            name, number = given if len(given) == 2 else (None, *given)
            ends = (None, None) if name is None else (name[0], name[2])
            draw = torch.Generator().manual_seed(number + 10 * (parts.start if len(parts) else 0))
            return torch.stack(
                [torch.randint(self.job.graph.size(type_), (number * 9,), generator=draw) for type_ in ends]
            )

        return {**CONSTANTS, "own_ids": own_ids, "own_pairs": own_pairs, "whole": self.whole}

    def seeds(self, parts: range) -> Tensor:
        """Ids [n], or ends [2, n], of the seeds of some parts, in order."""
        if self.job.link:
            return self._edges(parts)[0]
        given = eval(self.job.text("input_nodes"), self._names(parts))
        type_, nodes = self.seed_type, given
        if self.job.graph.is_typed:
            nodes = given[1] if isinstance(given, tuple) else None
        begin, end = self._range(parts, type_)
        if nodes is None or isinstance(nodes, str):
            store = self.whole if type_ is None else self.whole[type_]
            if nodes in ("train", "val"):
                return store[f"{nodes}_mask"][begin:end].nonzero().flatten() + begin
            return torch.arange(begin, end)
        nodes = torch.as_tensor(nodes)
        if nodes.dtype == torch.bool:
            nodes = nodes.nonzero().flatten()
            nodes = nodes[(nodes >= begin) & (nodes < end)]
        return nodes.long()

    def _edges(self, parts: range) -> tuple[Tensor, Tensor | None]:
        """Ends and ids of the seeds of some parts. The ids are None for pairs that the user gave."""
        given = eval(self.job.text("edge_label_index"), self._names(parts))
        edges = given
        if self.job.graph.is_typed:
            edges = None if given is None or isinstance(given[0], str) else given[1]
        if isinstance(edges, Tensor):
            return edges, None
        name = self.seed_type
        store = self.whole if name is None else self.whole[name]
        begin, end = self._range(parts, None if name is None else name[2])
        own = ((store.edge_index[1] >= begin) & (store.edge_index[1] < end)).nonzero().flatten()
        return store.edge_index[:, own], own

    # --- the loader ---------------------------------------------------------------------------------------

    def arguments(self) -> dict[str, Any]:
        """Returns the values of the arguments."""
        own = self.layout.parts_of(self.rank)
        seeds = self.seeds(own)
        names = {
            **self._names(own), "data": self.data, "seeds": seeds, "num_seeds": len(arange(seeds)), "rank": self.place.rank, "own_rows": self._own_rows,
            "cache_of": self._cache_of,
        }  # fmt: skip
        found = {name: eval(text, names) for name, text in self.job.arguments.items()}
        if self.job.graph.is_directory:
            found["process_group"] = self.place.group
        return found

    def loader(self, given: dict[str, Any] | None = None, **changes: Any) -> Any:
        given = {**(self.arguments() if given is None else given), **changes}
        kind = LinkNeighborLoader if self.job.link else NeighborLoader
        return kind(self.data, given.pop("num_neighbors"), **given)

    def _own_rows(self, width: int) -> Tensor:
        """Rows of a user's source: of all vertices, or of those of this rank's part."""
        type_ = "a" if self.job.graph.is_typed else None
        rows = _source_rows(self.job.graph.size(type_), width)
        if not self.job.graph.is_directory:
            return rows
        if self.data.row_books[type_].num_parts == 1:  # every part has all rows
            return rows
        return rows[slice(*self._range(self.layout.parts_of(self.rank), type_))]

    def _cache_of(self, alpha: float) -> Any:
        if self.given_cache is not None:  # all loaders of the job get the same cache
            return self.given_cache
        same = {
            name: value for name, value in (("ranks_per_host", self.job.value("ranks_per_host")),) if value is not None
        }
        nodes = ("a", "all") if self.job.graph.is_typed else "all"
        self.given_cache = NeighborLoader(
            self.data,
            [2, 2],
            nodes,
            batch_size=4,
            replication_factor=alpha,
            uneven="exact",
            process_group=self.place.group,
            **same,
        ).cache
        return self.given_cache

    def change(self, number: int) -> None:
        """Writes to the user's data in memory: another attribute, other rows, or other values in the same tensor."""
        is_counted = self.job.mode != "inference_mode"  # torch counts no writes to tensors that were made in this mode
        for type_ in self.job.graph.types:
            store = self.data if type_ is None else self.data[type_]
            if number % 3 == 0:
                store.y = torch.arange(store.num_nodes) + number
            elif number % 3 == 1 and "x" in store:
                store.x = store.x.flip(0)
            elif is_counted:
                store.val_mask.logical_not_()

    # --- expected batches ---------------------------------------------------------------------------------

    def plain(self, seed: int) -> Plain:
        """Returns the plainest loader for the seed of the job's loader."""
        job, layout = self.job, self.layout
        own = layout.parts_of(self.rank)
        seeds = self.seeds(own)
        data = self._changed(copy.copy(self.whole))
        given = job.value("num_neighbors")
        source = stores(data) if job.graph.is_stores else data
        names = {
            **self._names(own),
            "data": source,
            "seeds": seeds,
            "num_seeds": len(arange(seeds)),
            "rank": self.place.rank,
        }
        texts = {name: eval(job.unfolded[name], names) for name in _OF_SAMPLES if name in job.unfolded}
        draws = {name: texts[name] for name in _OF_DRAWS if name in texts}
        if job.graph.is_directory:
            draws.pop("is_sorted", None)  # a directory sorts its lists itself
        sampler = texts.get("neighbor_sampler") or NeighborSampler(source, given, **draws)
        sizes = [self.seeds(parts) for parts in layout.units]
        sizes = [len(arange(of_unit)) for of_unit in sizes]
        order = self._order(seed, sizes, names, len(arange(seeds)))
        units = layout.units_of(self.rank)
        offsets = {unit: sum(sizes[units.start : unit]) for unit in units}
        return Plain(
            source, sampler, order, self.rank, offsets, job.value("shared_draws_block", 1), bool(job.value("logical_ranks_join", False)), job.link,
            self._plain_arguments(seeds, own, texts),
        )  # fmt: skip

    def _order(self, seed: int, sizes: list[int], names: dict[str, Any], num_seeds: int) -> Order:
        job = self.job
        # Any value counts, as in PyG.
        shuffle, drop_last = (
            bool(eval(job.arguments.get(name, "False"), CONSTANTS)) for name in ("shuffle", "drop_last")
        )
        batch_size = job.value("batch_size", 1)
        given = None
        if "batch_sampler" in job.arguments:
            given = [*itertools.islice(eval(job.arguments["batch_sampler"], names), 200)]
        elif "sampler" in job.arguments:
            given = list(BatchSampler(eval(job.arguments["sampler"], names), batch_size, drop_last))
        together = (self.layout.hosts or (1,))[0] if self.layout.cooperates else 1
        uneven = job.value("uneven") or ("wrap" if shuffle else "exact")
        return Order(
            self.layout,
            sizes,
            seed,
            shuffle,
            batch_size * together,
            drop_last,
            uneven,
            job.value("cooperate_batches"),
            given,
        )

    def _changed(self, data: Any) -> Any:
        """Applies the options that change rows."""
        job = self.job
        if "send_as" in job.arguments:
            format = job.value("send_as")["x"]
            for type_ in job.graph.types:
                store = data if type_ is None else data[type_]
                if "x" in store and type_ not in self.data.replicated:  # whose rows never travel
                    store.x = narrowed(store.x, format)
        if "own_rows" in job.arguments.get("columns", ""):
            type_ = "a" if job.graph.is_typed else None
            store = data if type_ is None else data[type_]
            store.x = _source_rows(job.graph.size(type_), 6)
        return data

    def _plain_arguments(self, seeds: Tensor, own: range, texts: dict[str, Any]) -> dict[str, Any]:
        job, type_ = self.job, self.seed_type
        found = {
            name: texts[name]
            for name in ("time_attr", "input_time", "edge_label_time", "input_id", "custom_cls")
            if name in texts
        }
        if not job.link:
            found["input_nodes"] = seeds if type_ is None else (type_, seeds)
            if found.get("input_id") is None and self._ids_are_seeds:
                found["input_id"] = seeds
            return found
        found["edge_label_index"] = seeds if type_ is None else (type_, seeds)
        _, ids = self._edges(own)
        if found.get("input_id") is None and job.graph.is_directory and ids is not None:
            found["input_id"] = ids
        found |= {name: texts[name] for name in ("neg_sampling", "neg_sampling_ratio") if name in texts}
        if "edge_label" in texts:
            kind = NegativeSampling.cast(texts.get("neg_sampling"))
            binary = (kind is not None and kind.is_binary()) or bool(texts.get("neg_sampling_ratio"))
            everyone = [self.seeds(self.layout.parts_of(rank)) for rank in range(self.layout.ranks)]
            labels = [eval(job.arguments["edge_label"], {**CONSTANTS, "seeds": of_rank}) for of_rank in everyone]
            found["edge_label"] = texts["edge_label"] + (shift_of_labels(labels) if binary else 0)
        return found

    @property
    def _ids_are_seeds(self) -> bool:
        """True if ``input_id`` has the ids of vertices."""
        text = self.job.text("input_nodes")
        return "mask" in text or (self.job.graph.is_directory and "own_ids" not in text)


#: Arguments that the sampler takes, and those of the seeds.
_OF_DRAWS = (
    "replace", "subgraph_type", "disjoint", "temporal_strategy", "time_attr", "weight_attr", "is_sorted", "directed", "shared_draws", "time_window",
)  # fmt: skip
_OF_SAMPLES = (
    *_OF_DRAWS, "neighbor_sampler", "input_time", "edge_label_time", "input_id", "custom_cls", "neg_sampling", "neg_sampling_ratio", "edge_label",
)  # fmt: skip


#: Arguments that decide which seeds a rank has.
OF_SEEDS = {"input_nodes", "edge_label_index", "share", "logical_ranks", "ranks_per_host", "cooperate"}


def _source_rows(size: int, width: int) -> Tensor:
    return (torch.arange(size).view(-1, 1) * 5 + torch.arange(width)).float() / 3
