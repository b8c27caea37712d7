"""The source of a loader's batches, made from the user's data and seeds.

A :class:`BatchSource` combines a kind of data (an object in memory, a pair of stores, a partitioned graph) with a kind of seeds (vertices or edges).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, NodeSamplerInput

from salientpp.batch.template import Column, DataTemplate, PartitionTemplate, StoreTemplate
from salientpp.engine.connected import Connected
from salientpp.engine.drawing.choose import method_of
from salientpp.engine.drawing.method import DrawingMethod
from salientpp.engine.seeds import Seeds
from salientpp.graph.from_pyg import count_vertices
from salientpp.processes import lazy
from salientpp.ranks.comm import Comm
from salientpp.ranks.partition_book import PartitionBook
from salientpp.ranks.placement import Placement
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import PartTopology
from salientpp.sampling.stored import is_remote
from salientpp.store.directory.attributes import OWN_NAMES
from salientpp.store.directory.description import EdgeColumn
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange
from salientpp.store.file_rows import UnmappedRows
from salientpp.store.frames import Frame, check_installed, formats_of_columns
from salientpp.store.narrow import EncodedRows, Narrow, NarrowRows
from salientpp.store.rows import RowSource, TensorRows, checked_rows, empty_rows
from salientpp.store.sent_formats import decoded, read_send_as
from salientpp.suggestions import did_you_mean

#: Per vertex type, the names and rows of its attributes.
RowsByType = Mapping["str | None", Mapping[str, RowSource]]


@dataclass(frozen=True, eq=False)
class BatchSource:
    """Holds what a loader's batches are made from: the method that draws them, the rows, and the template of their attributes.

    Attributes:
        drawing: draws the batches.
        books: per vertex type, the partition book of its rows. It has a single part if every rank has all rows.
        rows: per vertex type, the rows of this part by attribute name.
        template: builds a batch, in the class of the user's data, from a sample and its rows.
        exchanged: columns (vertex type, attribute name) that every sampled vertex gets.
        seed_columns: columns that only seeds get.
        fingerprint: fingerprint of the dataset.
        own: columns whose rows come from a user's source instead of the data.
        part: the opened directory of a partitioned graph, as seen by the part with this rank's seeds; None for a graph in memory.
        narrow: for columns in ``exchanged`` whose rows are encoded, their encoding.
        seed_rows_here: see :class:`~salientpp.store.fetch.Fetch`.
        frames: per vertex type and edge type, the attributes of a batch that are tables of PyTorch Frame, by name. ``rows`` and ``exchanged`` have the
            columns of these tables instead.
    """

    drawing: DrawingMethod
    books: Mapping[str | None, PartitionBook]
    rows: RowsByType
    template: DataTemplate | StoreTemplate | PartitionTemplate
    exchanged: Sequence[Column]
    seed_columns: Sequence[Column]
    fingerprint: str
    own: Collection[Column] = frozenset()
    part: PartitionedGraph | None = None
    narrow: Mapping[Column, Narrow] = field(default_factory=dict)
    seed_rows_here: Mapping[Column, tuple[int, RowSource]] = field(default_factory=dict)
    frames: Mapping[Any, Mapping[str, Frame]] = field(default_factory=dict)

    @property
    def seeds(self) -> Seeds:
        return self.drawing.seeds

    @property
    def sampler(self) -> BaseSampler:
        return self.drawing.sampler

    @property
    def exchange(self) -> Exchange:
        """Exchange with other ranks, which gets rows that this process does not hold."""
        return self.drawing.exchange

    def rows_of(self, column: Column) -> RowSource:
        """Returns a column's rows as tiers and messages hold them, maybe encoded."""
        return self.rows[column[0]][column[1]]

    def delivered(self, column: Column) -> RowSource:
        """Returns a column's rows as batches get them: decoded."""
        rows = self.rows_of(column)
        return NarrowRows(rows, self.narrow[column]) if column in self.narrow else rows

    def narrow_of(self, type_: str | None) -> dict[str, Narrow]:
        """Returns the encodings of one vertex type's rows, by attribute name, without attributes that are not encoded."""
        return {name: narrow for (owner, name), narrow in self.narrow.items() if owner == type_}

    @property
    def travelling(self) -> list[str | None]:
        """Vertex types whose rows may come from other ranks."""
        types = dict.fromkeys(type_ for type_, _ in self.exchanged)
        return [type_ for type_ in types if self.books[type_].num_parts > 1]

    @lazy
    def row_bytes(self) -> dict[str | None, int]:
        """Bytes on the wire of all columns that a sampled vertex gets, per vertex type."""
        return {
            type_: sum(empty_rows(self.rows_of(column), 1).nbytes for column in self.exchanged if column[0] == type_)
            for type_ in self.books
        }

    def columns_now(self) -> dict[Column, RowSource]:
        """Returns the columns that every sampled vertex gets from a ``Data``, with its current rows."""
        columns = {} if isinstance(self.template, PartitionTemplate) else self.template.columns()
        return _in_memory(columns) | {column: self.rows_of(column) for column in self.exchanged if column in self.own}


def open_data(
    data: Any, comm: Comm, sampler: BaseSampler, seeds: Seeds, *, columns: Any = ("x",), custom_cls: type | None = None
) -> BatchSource:
    """Returns the source of a ``Data``, a ``HeteroData`` or a pair of stores, for seeds of any kind.

    The arguments are as in :class:`~salientpp.NeighborLoader`.

    Raises:
        ValueError, TypeError: the arguments do not fit the data.
    """
    if custom_cls is not None and not is_remote(data):
        raise ValueError(
            "custom_cls is for a pair of FeatureStore and GraphStore; batches of a Data have the class of the Data"
        )
    if isinstance(custom_cls, type):
        makes_batches = issubclass(custom_cls, (Data, HeteroData))
    else:  # as in PyG, it may be a function. A batch can be called too, but makes none
        makes_batches = callable(custom_cls) and not isinstance(custom_cls, (Data, HeteroData))
    if custom_cls is not None and not makes_batches:
        raise ValueError(
            f"custom_cls must be Data, HeteroData, a class that derives from one of them, or a function that makes one, got {custom_cls!r}; leave it out for "
            "Data or HeteroData"
        )
    books = {type_: PartitionBook.trivial(size) for type_, size in count_vertices(data).items()}
    left = columns
    if isinstance(columns, Mapping):
        left = [key for key, source in columns.items() if source is None] or "x"
    if left not in ("x", ["x"], ("x",)):
        raise ValueError(
            "columns can choose attributes only of partitioned graphs: with a Data object, every sampled vertex gets every attribute"
        )
    own = _own_rows(columns, {type_: book.num_vertices for type_, book in books.items()})
    if own and is_remote(data):
        raise ValueError(
            "columns cannot have row sources if the data is a (FeatureStore, GraphStore) pair, because its rows come "
            "from the FeatureStore; leave them out"
        )
    template = StoreTemplate(data[0], data[1], custom_cls) if is_remote(data) else DataTemplate(data, own)
    exchange = Exchange(comm, books, Placement(comm.rank, comm.size, 1))
    columns = {**_in_memory(template.columns()), **own}
    return BatchSource(
        drawing=method_of(seeds, sampler, exchange),
        books=books,
        rows=by_type(books, columns),
        template=template,
        exchanged=list(columns),
        seed_columns=[],
        fingerprint="",
        own=frozenset(own),
    )


def open_partition(
    connected: Connected,
    sampler: NeighborSampler,
    seeds: Seeds,
    *,
    columns: Any,
    custom_cls: type | None,
    send_as: Mapping[Any, str] | None = None,
) -> BatchSource:
    """Returns the source of a partitioned graph. The arguments are as in :class:`~salientpp.NeighborLoader`.

    Raises:
        ValueError, TypeError: the arguments do not fit the graph.
    """
    if custom_cls is not None:
        raise ValueError("custom_cls is for a pair of FeatureStore and GraphStore; leave it out")
    part, exchange = connected.held, connected.exchange
    template = _template(part, sampler)
    of_part = {(type_, name): rows for type_, named in part.sources().items() for name, rows in named.items()}
    taken = sorted(OWN_NAMES & {name for _, name in of_part}.union(*template.edge_rows.values()))
    if taken:
        raise ValueError(
            f"{part.root} has attributes with names that batches use themselves ({', '.join(taken)}); rename them and partition again"
        )
    frames, books = _frames(part), part.row_books
    own = _own_rows(columns, {type_: book.size_of(exchange.part_of(type_)) for type_, book in books.items()})
    tables = {(each.name, name): frame for each in part.description.node_types for name, frame in each.tables.items()}
    for column in own.keys() & tables.keys():  # a source of the user's replaces a table
        del frames[column[0]][column[1]]
        for name in tables.pop(column).columns:
            del of_part[column[0], name]
    known: dict[Column, RowSource] = {**of_part, **own}
    gathered = _checked_columns(columns, list(known), tables, part)
    encoded, narrow, sent_edges = _encoded(known, gathered, send_as, tables, part)
    if sent_edges:
        template = _sent(template, sampler, sent_edges)
    seed_type = getattr(seeds.inputs, "input_type", None)
    of_seeds = isinstance(seeds.inputs, NodeSamplerInput)  # the ends of an edge may belong to any part
    # The contents of the user's rows are not known, but all ranks must agree on their names, dtypes and shapes.
    words = {column: "".join(f"{word} " for word in column if word is not None) for column in own}
    fingerprint = part.fingerprint
    if part.offsets != part.whole.offsets:
        fingerprint += f", parts from {', '.join(map(str, part.offsets[:-1]))} on joined"
    for column in sorted(own, key=words.__getitem__):
        fingerprint += f", {words[column]}{own[column].dtype} {list(own[column].shape[1:])}"
    of_seeds_only = [column for column in known if of_seeds and column[0] == seed_type and column not in gathered]
    return BatchSource(
        drawing=method_of(seeds, sampler, exchange),
        books=books,
        rows=by_type(books, {**known, **encoded}),
        narrow=narrow,
        template=template,
        exchanged=gathered,
        seed_columns=of_seeds_only,
        seed_rows_here=_seed_rows(connected, of_seeds_only) if exchange.placement.num_storage_ranks else {},
        part=connected.own,
        fingerprint=fingerprint,
        frames=frames,
    )


def _seed_rows(connected: Connected, columns: Sequence[Column]) -> dict[Column, tuple[int, RowSource]]:
    """Returns the rows of this rank's seeds out of the directory, because with storage ranks its own part has no rows.

    They are not read through memory maps: an epoch would touch most pages of these files, which count as memory of this rank.
    """
    part, named = connected.own, connected.own.sources()
    found = UnmappedRows.of({(type_, name): named[type_][name] for type_, name in columns})
    first = {
        type_: book.range_of(connected.own_part if book.num_parts == part.num_parts else 0)[0]
        for type_, book in part.row_books.items()
    }
    return {(type_, name): (first[type_], rows) for (type_, name), rows in found.items()}


def _frames(part: PartitionedGraph) -> dict[Any, dict[str, Frame]]:
    """Returns the tables of a graph: type -> attribute name -> table. Vertices and edges may share the type None."""
    frames: dict[Any, dict[str, Frame]] = {}
    for each in part.description.types:
        frames[each.name] = {**frames.get(each.name, {}), **each.tables}
    found = [frame for named in frames.values() for frame in named.values()]
    if found:
        check_installed(str(part.root), found)
    return frames


def _template(part: PartitionedGraph, sampler: BaseSampler) -> PartitionTemplate:
    """Makes the template by which batches get edge attributes, of all edges or of those whose lists this host has."""
    if not isinstance(getattr(sampler, "topology", None), PartTopology):
        return PartitionTemplate(part.edge_sources())
    held = part.part_edge_rows()
    return PartitionTemplate(
        {name: of_type.rows for name, of_type in held.items()},
        {name: of_type.first_edge for name, of_type in held.items()},
    )


def _encoded(
    known: Mapping[Column, RowSource],
    gathered: Sequence[Column],
    send_as: Any,
    tables: Mapping[Column, Frame],
    part: PartitionedGraph,
) -> tuple[dict[Column, RowSource], dict[Column, Narrow], dict[EdgeColumn, Narrow]]:
    """Finds the columns whose rows travel encoded: stored so, or named by ``send_as``. Returns their rows, their encodings, and encodings of edges.

    Rows of a replicated type never travel, so ``send_as`` does not encode them.
    """
    encoded: dict[Column, RowSource] = {}
    narrow: dict[Column, Narrow] = {}
    for column in gathered:
        rows = known[column]
        if isinstance(rows, NarrowRows):
            encoded[column], narrow[column] = rows.encoded, rows.narrow
    shapes = {column: (rows.dtype, rows.shape[1:]) for column, rows in known.items()}
    given = formats_of_columns("send_as", send_as, tables, shapes)
    of_vertices, of_edges = read_send_as(part, given, shapes)
    for column, format in of_vertices.items():
        words = column[1] if column[0] is None else str(column)
        if column not in gathered:
            raise ValueError(
                f"send_as is for attributes that every sampled vertex gets (columns={[name for _, name in gathered]}), got {words!r}"
            )
        if column in narrow:
            raise ValueError(
                f"send_as names {words!r}, which {part.root} stores and sends as {narrow[column].format}; leave it out of send_as"
            )
        if column[0] not in part.replicated:
            encoded[column], narrow[column] = EncodedRows(known[column], format), format
    return encoded, narrow, of_edges


def _sent(template: PartitionTemplate, sampler: BaseSampler, sent: Mapping[EdgeColumn, Narrow]) -> PartitionTemplate:
    """Sets the formats in which edge attributes travel. Returns a template that rounds rows as these formats do."""
    topology = getattr(sampler, "topology", None)
    if isinstance(topology, PartTopology):
        topology.send_edges_as(sent)
    rows = {type_: decoded(named, type_, sent) for type_, named in template.edge_rows.items()}
    return replace(template, edge_rows=rows)


def by_type(books: Mapping[str | None, PartitionBook], columns: Mapping[Column, RowSource]) -> RowsByType:
    return {type_: {name: rows for (owner, name), rows in columns.items() if owner == type_} for type_ in books}


def _in_memory(columns: Mapping[Column, Tensor]) -> dict[Column, RowSource]:
    return {column: TensorRows(rows) for column, rows in columns.items()}


def sources_in(columns: Any) -> dict[Any, Any]:
    """Returns the row sources that the user gave in ``columns``: the user's key -> source."""
    given = columns if isinstance(columns, Mapping) else {}
    return {key: source for key, source in given.items() if source is not None}


def _own_rows(columns: Any, sizes: Mapping[Any, int]) -> dict[Column, RowSource]:
    """Checks and returns the user's row sources. ``sizes`` is the number of rows that each vertex type needs."""
    own = {}
    for key, value in sources_in(columns).items():
        type_, name = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
        if type_ not in sizes or not isinstance(name, str):
            known = "names of attributes"
            if None not in sizes:
                known = f"(node type, name) with a node type of the data ({', '.join(sizes)})"
            raise ValueError(f"the keys of columns must be {known}, got {key!r}")
        own[type_, name] = checked_rows(value, f"columns[{key!r}]", sizes[type_])
    return own


def _checked_columns(
    given: Any, known: list[Column], tables: Mapping[Column, Frame], part: PartitionedGraph
) -> list[Column]:
    """Returns the columns that the user's ``columns`` select, each once. A set is sorted, because its order is random.

    Args:
        given: the user's names. 'x' alone, the default, also selects tables 'tf', which are features too.
        tables: the tables, whose names stand for their columns.
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"columns must be the names of node attributes of {part.root}, got {type(given).__name__}")
    names: list[Any] = [given] if isinstance(given, (str, bytes)) else list(given)
    if isinstance(given, Set):
        names.sort(key=str)
    columns: dict[Column, None] = {}
    of_tables = {(type_, column) for (type_, _), frame in tables.items() for column in frame.columns}
    known = [*(column for column in known if column not in of_tables), *tables]
    for name in names:
        # A name alone selects the attribute of every type that has it. `str` converts numpy's strings.
        named = tuple(map(str, name)) if isinstance(name, tuple) and len(name) == 2 else None
        found = [column for column in known if column == named or (isinstance(name, str) and column[1] == name)]
        if not found and names != ["x"]:
            there = sorted(name if type_ is None else f"({type_!r}, {name!r})" for type_, name in known)
            close = did_you_mean(name, [name for _, name in known])
            raise ValueError(
                f"columns must name node attributes of {part.root} ({', '.join(there)}), got {name!r}{close}"
            )
        columns |= dict.fromkeys(found)
    if names == ["x"]:
        columns |= dict.fromkeys(column for column in tables if column[1] == "tf")
    return [
        each
        for column in columns
        for each in ([(column[0], of) for of in tables[column].columns] if column in tables else [column])
    ]
