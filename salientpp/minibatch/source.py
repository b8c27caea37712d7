"""What does a loader draw from, and how does it come from what the user gave?

A :class:`BatchSource` joins the two things that loaders differ in: the kind of data (an object in memory, a pair of stores, a partitioned graph; opened by
:func:`open_data` and :func:`open_partition`) and the kind of seeds (:class:`Seeds`: vertices or edges).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from salientpp.comm import Comm
from salientpp.graph.from_pyg import count_vertices
from salientpp.minibatch.batch import Column, DataTemplate, PartitionTemplate, StoreTemplate
from salientpp.minibatch.neighbor_sampler import NeighborSampler, is_remote
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.vip import inclusion_probability, typed_inclusion_probability
from salientpp.store.directory.contents import OWN_NAMES
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange
from salientpp.store.rows import RowSource, TensorRows, checked_rows

#: Per vertex type, the names and rows of its attributes.
RowsByType = Mapping["str | None", Mapping[str, RowSource]]

#: Per vertex type, float [N].
Probability = Mapping["str | None", Tensor]


@dataclass(frozen=True, eq=False)
class Seeds:
    """All seeds of a loader, and what follows from their being vertices or edges.

    Attributes:
        inputs: in PyG's type; ``inputs[positions]`` is a batch of them.
        number: how many.
        draw: the sampler's method for such inputs; makes an MFG of a batch of them.
        add_batch_attributes: sets what PyG's loader sets on a batch beside the attributes of the data.
        access_probability: of the batch size: how probably a batch needs each row; called if rows are to be kept on the device. None: rows
            are in that order.
        split: the name of the seeds, if they have one that means the same on every rank.
    """

    inputs: NodeSamplerInput | EdgeSamplerInput
    number: int
    draw: Callable[..., SamplerOutput | HeteroSamplerOutput]
    add_batch_attributes: Callable[[Data | HeteroData, SamplerOutput | HeteroSamplerOutput], None]
    access_probability: Callable[[int], Probability] | None
    split: str | None = None


@dataclass(frozen=True, eq=False)
class BatchSource:
    """What batches are made of.

    Attributes:
        seeds: all of them.
        sampler: knows the graph and how to draw from it.
        exchange: gets rows of other parts.
        books: per vertex type, who owns which vertex. Only a graph of one type has several parts.
        rows: per vertex type, the rows of this part by name.
        template: makes a batch of an MFG and rows.
        exchanged: columns that every sampled vertex gets.
        seed_columns: columns that only seeds get.
        fingerprint: of the dataset.
        own: columns whose rows come from an object of the user's, and not from the data.
    """

    seeds: Seeds
    sampler: BaseSampler
    exchange: Exchange
    books: Mapping[str | None, PartitionBook]
    rows: RowsByType
    template: DataTemplate | StoreTemplate | PartitionTemplate
    exchanged: Sequence[Column]
    seed_columns: Sequence[Column]
    fingerprint: str
    own: Collection[Column] = frozenset()

    @property
    def book(self) -> PartitionBook:
        return next(iter(self.books.values()))

    def rows_of(self, column: Column) -> RowSource:
        return self.rows[column[0]][column[1]]

    def columns_now(self) -> dict[Column, RowSource]:
        """The columns that every sampled vertex gets from a ``Data``, as that is now."""
        columns = {} if isinstance(self.template, PartitionTemplate) else self.template.columns()
        return {
            **_in_memory(columns),
            **{column: self.rows_of(column) for column in self.exchanged if column in self.own},
        }


def open_data(
    data: Any,
    comm: Comm,
    sampler: BaseSampler,
    seeds: Seeds,
    *,
    rows: Mapping[Any, Any] | None,
    custom_cls: type | None = None,
) -> BatchSource:
    """The source of an object that one process holds, whatever its seeds are.

    Args:
        data: a ``Data``, a ``HeteroData`` or a pair of stores.
        rows, custom_cls: as in :class:`~salientpp.NeighborLoader`.

    Raises:
        ValueError, TypeError: these do not fit the data.
    """
    if custom_cls is not None and not is_remote(data):
        raise ValueError(
            "custom_cls is for a pair of FeatureStore and GraphStore; batches of a Data are what the Data is"
        )
    books = {type_: PartitionBook.trivial(size) for type_, size in count_vertices(data).items()}
    own = _own_rows(rows, {type_: book.num_vertices for type_, book in books.items()})
    if own and is_remote(data):
        raise ValueError(
            "rows is for a Data, a HeteroData or a partitioned graph: rows of a FeatureStore come from that store"
        )
    template = StoreTemplate(data[0], data[1], custom_cls) if is_remote(data) else DataTemplate(data, own)
    exchange = Exchange(comm, next(iter(books.values())))
    columns = {**_in_memory(template.columns()), **own}
    return BatchSource(
        seeds=seeds,
        sampler=sampler,
        exchange=exchange,
        books=books,
        rows=by_type(books, columns),
        template=template,
        exchanged=list(columns),
        seed_columns=[],
        fingerprint="",
        own=frozenset(own),
    )


def connect_part(part: PartitionedGraph, comm: Comm) -> Exchange:
    """What gets rows of the other parts; it says which part this rank serves.

    Raises:
        ValueError: the ranks do not fit the parts, or this rank loaded another part.
    """
    if comm.size == 1 and part.num_parts > 1:
        raise ValueError(
            f"{part.root} has {part.num_parts} parts, and a loader needs a rank for each: start torchrun --nproc-per-node {part.num_parts} and call "
            f"dist.init_process_group() before salientpp.load (ranks may share a host). One process may look at any part: part.node_rows(part_id), "
            "part.split(name, part_id), part.take(name, n_id)"
        )
    exchange = Exchange(comm, part.book)
    if part.part_id is not None and part.part_id != exchange.part_id:
        raise ValueError(
            f"rank {comm.rank} serves part {exchange.part_id} of {part.num_parts}, but its graph was loaded with "
            f"part_id={part.part_id}; leave part_id out of salientpp.load, and give it the loader's process_group"
        )
    return exchange


def open_partition(
    part: PartitionedGraph,
    exchange: Exchange,
    sampler: NeighborSampler,
    seeds: Seeds,
    *,
    gather: Iterable[str],
    rows: Mapping[Any, Any] | None,
) -> BatchSource:
    """The source of a partitioned graph.

    Args:
        exchange: from :func:`connect_part`.
        gather, rows: as in :class:`~salientpp.NeighborLoader`.

    Raises:
        ValueError, TypeError: these do not fit the graph.
    """
    part_id = exchange.part_id
    taken = sorted(OWN_NAMES & {*part.manifest["node_attributes"], *part.manifest["edge_attributes"]})
    if taken:
        raise ValueError(
            f"{part.root} has attributes by names that batches use themselves ({', '.join(taken)}); rename them and partition again"
        )
    known: dict[str, RowSource] = {name: TensorRows(tensor) for name, tensor in part.node_rows(part_id).items()}
    own = {name: source for (_, name), source in _own_rows(rows, {None: part.book.size_of(part_id)}).items()}
    known |= own
    gathered = _checked_gather(gather, list(known), part)
    return BatchSource(
        seeds=seeds,
        sampler=sampler,
        exchange=exchange,
        books={None: part.book},
        rows={None: known},
        template=PartitionTemplate(part.edge_rows()),
        exchanged=[(None, name) for name in gathered],
        seed_columns=[(None, name) for name in known if name not in gathered],
        # Contents of rows that come from elsewhere are not known; which these are must agree.
        fingerprint=part.fingerprint
        + "".join(f", {name} {own[name].dtype} {list(own[name].shape[1:])}" for name in sorted(own)),
    )


def by_type(books: Mapping[str | None, PartitionBook], columns: Mapping[Column, RowSource]) -> RowsByType:
    return {type_: {name: rows for (owner, name), rows in columns.items() if owner == type_} for type_ in books}


def _in_memory(columns: Mapping[Column, Tensor]) -> dict[Column, RowSource]:
    return {column: TensorRows(rows) for column, rows in columns.items()}


def _own_rows(rows: Any, sizes: Mapping[Any, int]) -> dict[Column, RowSource]:
    """The user's ``rows``, checked; ``sizes`` says how many each vertex type must have."""
    if rows is not None and not isinstance(rows, Mapping):
        raise TypeError(f"rows must map names of attributes to tensors or sources of rows, got {type(rows).__name__}")
    own = {}
    for key, value in (rows or {}).items():
        type_, name = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
        if type_ not in sizes or not isinstance(name, str):
            known = (
                "names of attributes"
                if None in sizes
                else f"(node type, name) with a node type of the data ({', '.join(sizes)})"
            )
            raise ValueError(f"the keys of rows must be {known}, got {key!r}")
        own[type_, name] = checked_rows(value, f"rows[{key!r}]", sizes[type_])
    return own


def _checked_gather(gather: Any, known: list[str], part: PartitionedGraph) -> list[str]:
    """The attributes to gather, each once. Sets have an order of their own in every process, so theirs becomes the alphabet's."""
    if not isinstance(gather, Iterable):
        raise TypeError(f"gather must be the names of node attributes of {part.root}, got {type(gather).__name__}")
    names = [gather] if isinstance(gather, (str, bytes)) else list(gather)
    for name in names:
        if not isinstance(name, str) or (name not in known and names != ["x"]):
            raise ValueError(
                f"gather must name node attributes of {part.root} ({', '.join(sorted(known))}), got {name!r}"
            )
    names = list(dict.fromkeys(map(str, names)))  # numpy has strings of its own
    if isinstance(gather, Set):
        names.sort()
    return [name for name in names if name in known]


def access_probability(
    sampler: BaseSampler, start: Mapping[str | None, Callable[[int], Tensor]], seeds: Tensor | None, batch_size: int
) -> Probability:
    """Per vertex type, how probably a batch needs each row.

    Args:
        start: per vertex type, the probability that a batch has the vertex as a seed: of the number of vertices, float [N]; other types
            have no seeds.
        seeds: what ``start`` comes from, if that is drawing ``batch_size`` of these.

    Raises:
        ValueError: the sampler is none of this package's.
    """
    if not isinstance(sampler, NeighborSampler):
        raise ValueError(
            f"gpu_fraction needs to know how batches are drawn, which a {type(sampler).__name__} does not tell; "
            "pass a salientpp.NeighborSampler, or gpu_fraction=0"
        )
    if sampler.graph is not None and seeds is not None and sampler.fanouts[0]:
        return {
            None: inclusion_probability(
                sampler.graph, seeds, sampler.fanouts[0], batch_size, include_seeds=True, replace=sampler.replace
            )
        }
    return typed_inclusion_probability(
        sampler.as_typed(), start, sampler.fanouts, include_seeds=True, replace=sampler.replace
    )
