"""Describes what a dataset directory holds. All versions of the format share these classes, so that other modules need not check versions.

Version 1 has one vertex type and one edge type, both named None.
Its files have no prefix, and its manifest has the fields of these types at the top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from salientpp.graph.from_pyg import words_for
from salientpp.ranks.partition_book import PartitionBook
from salientpp.store.directory.files import ARROW, JSON, numpy_dtype
from salientpp.store.frames import Frame
from salientpp.store.narrow import Narrow

FORMAT = "salientpp-partitioned-graph"
VERSIONS = (1, 2, 3, 4, 5, 6)

#: Forms of the topology. WHOLE: one set of neighbour lists for all parts. PARTS: the lists, and the rows of their edges, lie in the folder of the part that
#: owns the target.
WHOLE, PARTS = "whole", "parts"

#: File with the tables that the graph was made of (:func:`~salientpp.store.directory.origin.table_origin`). It may be large, so it is not in the manifest.
ORIGIN = "tables.json"

#: Attribute -> {"dtype": torch's name, "row_shape": the shape without dimension 0}. For encoded rows, these describe the decoded rows. Their entry also has
#: "stored_as", a record of four fields. "format" is as in :mod:`salientpp.store.narrow`. "row_bytes" are the bytes of a stored row. "largest_error" is the
#: largest error of a value. "relative_rms_error" is the root mean square of the errors divided by the root mean square of the values.
Columns = Mapping[str, Mapping[str, Any]]

#: The name of an edge type; None in a homogeneous graph.
EdgeName = tuple[str, str, str] | None

#: An attribute of one edge type, as (type, name). The type is None in a homogeneous graph.
EdgeColumn = tuple[EdgeName, str]


@dataclass(frozen=True, kw_only=True)
class _Type:
    """Fields that vertex types and edge types share.

    Attributes:
        prefix: prefix of the type's file names.
        attributes: attributes with one row per vertex, or one per edge in list order.
        splits: name -> K numbers: for each part, how many of the split's vertices it owns, or how many of the split's edges lead into it.
        where: path of the type's fields in the manifest, such as ``node_types[0].``, for errors.
        frames: name of a table of PyTorch Frame -> :meth:`Frame.to_json`. ``attributes`` has the table's columns.
    """

    kind: ClassVar[str]
    prefix: str = ""
    attributes: Columns
    splits: Mapping[str, list[int]]
    where: str = ""
    frames: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, Frame]:
        """Descriptions of the type's tables (of PyTorch Frame), by attribute name."""
        return {name: Frame.of_json(said) for name, said in self.frames.items()}

    def narrow(self, attribute: str) -> Narrow | None:
        """Returns the encoding in which the rows of an attribute are stored, or None."""
        entry = self.attributes[attribute]
        if "stored_as" not in entry:
            return None
        return Narrow(entry["stored_as"]["format"], getattr(torch, entry["dtype"]), tuple(entry["row_shape"]))

    @property
    def is_narrow(self) -> bool:
        """True if the type has an attribute whose rows are stored encoded."""
        return any("stored_as" in entry for entry in self.attributes.values())

    def row_bytes(self, attribute: str) -> int:
        """Returns the bytes of a stored row, which are also its bytes on the wire. 0 if the attribute does not exist."""
        if attribute not in self.attributes:
            return 0
        entry = self.attributes[attribute]
        if "stored_as" in entry:
            return entry["stored_as"]["row_bytes"]
        return math.prod(entry["row_shape"]) * getattr(torch, entry["dtype"]).itemsize

    def stored_rows(self, attribute: str) -> tuple[str, list[int]]:
        """Returns the dtype (numpy's name) and the row shape that an attribute has in its files, encoded or not."""
        entry, narrow = self.attributes[attribute], self.narrow(attribute)
        dtype = stored_dtype(entry["dtype"], f"{self.attributes_field}[{attribute!r}]")
        return (dtype, entry["row_shape"]) if narrow is None else (stored_dtype("uint8"), [narrow.row_bytes])

    @property
    def attributes_field(self) -> str:
        return f"{self.where}attributes" if self.where else f"{self.kind}_attributes"

    def split_file(self, split: str, part_id: int) -> str:
        return f"{part_folder(part_id)}/{self.prefix}split_{split}.npy"


@dataclass(frozen=True, kw_only=True)
class VertexType(_Type):
    """Describes one type of vertices: its size, the ids that each part owns, and its files.

    Attributes:
        name: None in a homogeneous graph.
        offsets: K + 1 numbers; part p owns the ids from ``offsets[p]`` to ``offsets[p + 1] - 1``. If the type is replicated, every part has
            all rows, and takes only its own ids as seeds.
        num_classes: number of classes of ``y``, counted as in PyG's datasets; 0 without ``y``.
        replicated: True if all rows are stored once, instead of per part.
        keys: name and Arrow type of each key column, by which the user's tables name the vertices: records of ``name`` and ``type``. None: no keys.
    """

    kind: ClassVar[str] = "node"
    name: str | None
    num_vertices: int
    offsets: list[int]
    num_classes: int = 0
    replicated: bool = False
    keys: Sequence[Mapping[str, str]] | None = None

    @property
    def book(self) -> PartitionBook:
        """Partition book that maps vertices to owners."""
        return PartitionBook(torch.tensor(self.offsets, device="cpu"))

    @property
    def row_book(self) -> PartitionBook:
        """Partition book that maps rows to the parts whose files hold them. A replicated type has a single part."""
        return PartitionBook.trivial(self.num_vertices) if self.replicated else self.book

    def rows_file(self, attribute: str, part_id: int) -> str:
        """Returns the name of the file with the part's rows."""
        name = f"{self.prefix}node_{attribute}.npy"
        return name if self.replicated else f"{part_folder(part_id)}/{name}"

    def vip_file(self, part_id: int) -> str:
        return f"{part_folder(part_id)}/{self.prefix}vip.npy"

    @property
    def original_id_file(self) -> str:
        return f"{self.prefix}original_id.npy"

    def keys_file(self, part_id: int) -> str:
        """Returns the name of the Arrow file with the keys of the part's vertices, or of all vertices if the type is replicated."""
        name = f"{self.prefix}keys.arrow"
        return name if self.replicated else f"{part_folder(part_id)}/{name}"

    @property
    def key_schema_file(self) -> str:
        """Arrow file without rows, which has names and types of the key columns. So every host knows them, whatever parts it has."""
        return f"{self.prefix}key_schema.arrow"

    @property
    def key_hashes_file(self) -> str:
        """File with the hashes of all keys, ascending."""
        return f"{self.prefix}key_hashes.npy"

    @property
    def key_ids_file(self) -> str:
        """File with the vertex of each hash."""
        return f"{self.prefix}key_ids.npy"

    def time_file(self, attribute: str) -> str:
        """Returns the name of the file with the times of all vertices, which every rank needs for sampling."""
        return f"{self.prefix}time_{attribute}.npy"


@dataclass(frozen=True, kw_only=True)
class EdgeType(_Type):
    """Describes one relation, a type of edges. Its name is (source type, relation, target type), or None in a homogeneous graph.

    Attributes:
        edge_offsets: K + 1 numbers; the lists of part p hold the edges ``edge_offsets[p]`` to ``edge_offsets[p + 1] - 1``. None if the lists of all parts
            lie in one file.
    """

    kind: ClassVar[str] = "edge"
    name: EdgeName
    num_edges: int
    edge_offsets: list[int] | None = None

    @property
    def source(self) -> str | None:
        return None if self.name is None else self.name[0]

    @property
    def target(self) -> str | None:
        return None if self.name is None else self.name[2]

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Ranges of edges, one (first, end) for each ``indices`` file, which holds the edges ``first`` to ``end - 1``."""
        return [(0, self.num_edges)] if self.edge_offsets is None else list(pairwise(self.edge_offsets))

    def indptr_file(self, piece: int) -> str:
        return self._file("indptr", piece)

    def indices_file(self, piece: int) -> str:
        return self._file("indices", piece)

    def rows_file(self, attribute: str, piece: int) -> str:
        return self._file(f"edge_{attribute}", piece)

    def _file(self, name: str, piece: int) -> str:
        file = f"{self.prefix}{name}.npy"
        return file if self.edge_offsets is None else f"{part_folder(piece)}/{file}"


@dataclass(frozen=True, kw_only=True)
class Description:
    """Describes the contents of a dataset directory, as its manifest does.

    Attributes:
        node_types, edge_types: types in the order of their numbers.
        topology: :data:`WHOLE` or :data:`PARTS`.
        time_attr: name of the node or edge times that lists ascend by. None: lists are in the user's order.
        num_neighbors, batch_size, seeds: the workload for which vertex order and inclusion probabilities (VIP) were computed. It has fanouts per edge type,
            the number of seeds per batch, and the (type, split) of the seeds; (None, 'all') means all vertices of all types.
        partitioning: result of :meth:`~salientpp.partitioning.options.PartitionOptions.to_json`. None: the writer did not record it.
        has_origin: True if the graph was made of tables, which the file :data:`ORIGIN` describes.
    """

    version: int
    num_parts: int
    node_types: tuple[VertexType, ...]
    edge_types: tuple[EdgeType, ...]
    topology: str = WHOLE
    time_attr: str | None = None
    num_neighbors: list[list[int]]
    batch_size: int
    seeds: tuple[str | None, str]
    quality: Mapping[str, Any]
    partitioning: Mapping[str, Any] | None = None
    has_origin: bool = False

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Description:
        """Reads a manifest of any version. Its fields must have the types that the format requires."""
        workload, version = manifest["workload"], manifest["version"]
        if version == 1:
            nodes = [{**manifest, "name": None, "attributes": manifest["node_attributes"], "replicated": False}]
            edges = [{**manifest, "name": None, "attributes": manifest["edge_attributes"], "splits": {}}]
            num_neighbors, seeds, time_attr = [workload["num_neighbors"]], (None, workload["seeds"]), None
        else:
            nodes, edges, time_attr = manifest["node_types"], manifest["edge_types"], manifest["time_attr"]
            num_neighbors, seeds = workload["num_neighbors"], tuple(workload["seeds"])

        return cls(
            version=version,
            num_parts=manifest["num_parts"],
            node_types=tuple(
                VertexType(
                    **placed(version, "node_types", number),
                    **{name: entry[name] for name in _fields_of_vertices(version)},
                )
                for number, entry in enumerate(nodes)
            ),
            edge_types=tuple(
                EdgeType(
                    **placed(version, "edge_types", number),
                    **{name: entry[name] for name in _fields_of_edges(version) if name != "name"},
                    name=None if entry["name"] is None else tuple(entry["name"]),
                )
                for number, entry in enumerate(edges)
            ),
            topology=manifest["topology"] if version >= 4 else WHOLE,
            time_attr=time_attr,
            num_neighbors=num_neighbors,
            batch_size=workload["batch_size"],
            seeds=seeds,
            quality=manifest["quality"],
            partitioning=manifest.get("partitioning"),
            has_origin=version >= 6 and "origin" in manifest,
        )

    def to_manifest(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the manifest of a directory with these files, without its checksum."""
        shared = {
            "format": FORMAT,
            "version": self.version,
            "num_parts": self.num_parts,
            "quality": self.quality,
            "files": files,
            **({} if self.partitioning is None else {"partitioning": self.partitioning}),
            **({"origin": ORIGIN} if self.has_origin else {}),
        }
        workload = {"num_neighbors": self.num_neighbors, "batch_size": self.batch_size, "seeds": list(self.seeds)}
        if self.version == 1:
            (vertices,), (edges,) = self.node_types, self.edge_types
            return {
                **shared,
                "num_vertices": vertices.num_vertices,
                "num_edges": edges.num_edges,
                "offsets": vertices.offsets,
                "num_classes": vertices.num_classes,
                "node_attributes": vertices.attributes,
                "edge_attributes": edges.attributes,
                "splits": vertices.splits,
                "workload": {**workload, "num_neighbors": self.num_neighbors[0], "seeds": self.seeds[1]},
            }
        return {
            **shared,
            **({"topology": self.topology} if self.version >= 4 else {}),
            "node_types": [
                {name: getattr(type_, name) for name in _fields_of_vertices(self.version)} for type_ in self.node_types
            ],
            "edge_types": [
                {name: getattr(type_, name) for name in _fields_of_edges(self.version)} for type_ in self.edge_types
            ],
            "time_attr": self.time_attr,
            "workload": workload,
        }

    def rewritten(self, edge_offsets: Mapping[EdgeName, list[int]] | None) -> Description:
        """Returns the description of the same graph with its topology stored in parts, or stored whole if ``edge_offsets`` is None."""
        topology = WHOLE if edge_offsets is None else PARTS
        version = version_of(
            topology,
            is_typed=self.node_types[0].name is not None
            or any(edges.splits for edges in self.edge_types)
            or self.time_attr is not None,
            is_narrow=any(vertices.is_narrow for vertices in self.node_types),
            has_frames=any(each.frames for each in self.types),
            has_narrow_edges=any(edges.is_narrow for edges in self.edge_types),
            has_keys=any(vertices.keys for vertices in self.node_types),
        )
        return replace(
            self,
            version=version,
            topology=topology,
            node_types=tuple(
                replace(vertices, **placed(version, "node_types", number))
                for number, vertices in enumerate(self.node_types)
            ),
            edge_types=tuple(
                replace(
                    edges,
                    **placed(version, "edge_types", number),
                    edge_offsets=None if edge_offsets is None else edge_offsets[edges.name],
                )
                for number, edges in enumerate(self.edge_types)
            ),
        )

    def dtypes_of_edges(self, name: str) -> dict[EdgeName, torch.dtype]:
        """Returns the dtype of an attribute, for every edge type that has it."""
        return {
            edges.name: getattr(torch, edges.attributes[name]["dtype"])
            for edges in self.edge_types
            if name in edges.attributes
        }

    @property
    def types(self) -> list[VertexType | EdgeType]:
        """All types: vertex types, then edge types."""
        return [*self.node_types, *self.edge_types]

    def vertices(self, name: str | None) -> VertexType:
        return next(type_ for type_ in self.node_types if type_.name == name)

    def edges(self, name: EdgeName) -> EdgeType:
        return next(type_ for type_ in self.edge_types if type_.name == name)

    @property
    def timed_vertices(self) -> Iterator[VertexType]:
        """Vertex types that have ``time_attr``. For each, one file holds the times of all vertices."""
        return (type_ for type_ in self.node_types if self.time_attr is not None and self.time_attr in type_.attributes)

    def targets_of_pieces(self, edges: EdgeType) -> list[int]:
        """Returns the number of neighbour lists in each ``indptr`` file: one list for each target vertex."""
        targets = self.vertices(edges.target)
        if edges.edge_offsets is None:
            return [targets.num_vertices]
        return [end - begin for begin, end in pairwise(targets.offsets)]

    def files(self) -> dict[str, tuple[tuple[str, ...], list[int]]]:
        """Returns the files that the directory must have: name -> (allowed dtypes, as numpy names them; shape)."""
        int32, int64, float32 = (stored_dtype(name) for name in ("int32", "int64", "float32"))
        expected: dict[str, tuple[tuple[str, ...], list[int]]] = {}
        sizes = {type_.name: type_.num_vertices for type_ in self.node_types}
        for type_ in self.edge_types:
            dtypes = (int32, int64) if sizes[type_.source] < 2**31 else (int64,)
            for piece, ((begin, end), num_targets) in enumerate(zip(type_.pieces, self.targets_of_pieces(type_))):
                expected[type_.indptr_file(piece)] = (int64,), [num_targets + 1]
                expected[type_.indices_file(piece)] = dtypes, [end - begin]
                for name in type_.attributes:
                    dtype, row_shape = type_.stored_rows(name)
                    expected[type_.rows_file(name, piece)] = (dtype,), [end - begin, *row_shape]
        for each in self.types:
            for name, counts in each.splits.items():
                for part_id, count in enumerate(counts):
                    expected[each.split_file(name, part_id)] = (int64,), [count]
        for vertices in self.node_types:
            size = vertices.num_vertices
            expected[vertices.original_id_file] = (int64,), [size]
            for name in vertices.attributes:
                dtype, row_shape = vertices.stored_rows(name)
                for part_id, (begin, end) in enumerate(pairwise(vertices.offsets)):
                    rows = size if vertices.replicated else end - begin
                    expected[vertices.rows_file(name, part_id)] = (dtype,), [rows, *row_shape]
            for part_id in range(self.num_parts):
                expected[vertices.vip_file(part_id)] = (float32,), [size]
            if vertices.keys is not None:
                expected[vertices.key_schema_file] = (ARROW,), [0]
                expected[vertices.key_hashes_file] = (stored_dtype("uint64"),), [size]
                expected[vertices.key_ids_file] = (int64,), [size]
                for part_id, (begin, end) in enumerate(pairwise(vertices.offsets)):
                    expected[vertices.keys_file(part_id)] = (ARROW,), [size if vertices.replicated else end - begin]
        for vertices in self.timed_vertices:
            name = str(self.time_attr)
            dtype = stored_dtype(vertices.attributes[name]["dtype"])
            expected[vertices.time_file(name)] = (dtype,), [vertices.num_vertices]
        if self.has_origin:
            expected[ORIGIN] = (JSON,), [1]
        return expected


def stored_dtype(dtype: str, whose: str = "") -> str:
    """Returns numpy's name of the dtype in which files store a torch dtype. ValueError if files cannot hold it."""
    try:
        return numpy_dtype(getattr(torch, dtype)).str
    except (TypeError, RuntimeError):
        raise ValueError(f"{whose} must have a dtype that files can hold, got {dtype!r}") from None


def _fields_of_vertices(version: int) -> tuple[str, ...]:
    names = ("name", "num_vertices", "offsets", "attributes", "splits", "num_classes", "replicated")
    return (*names, *(("frames",) if version >= 5 else ()), *(("keys",) if version >= 6 else ()))


def _fields_of_edges(version: int) -> tuple[str, ...]:
    added = (("edge_offsets",) if version >= 4 else ()) + (("frames",) if version >= 5 else ())
    return ("name", "num_edges", "attributes", "splits", *added)


def version_of(
    topology: str, *, is_typed: bool, is_narrow: bool, has_frames: bool, has_narrow_edges: bool, has_keys: bool
) -> int:
    """Returns the least version of the format that can hold a directory.

    Args:
        is_typed: True if types have names, neighbour lists ascend by time, or edges have splits.
        is_narrow: True if rows of an attribute of vertices are encoded.
        has_frames: True if an attribute is a table.
        has_narrow_edges: True if rows of an attribute of edges are encoded.
        has_keys: True if a vertex type has keys.
    """
    if has_keys:
        return 6
    if has_frames or has_narrow_edges:
        return 5
    if topology == PARTS:
        return 4
    return 3 if is_narrow else 2 if is_typed else 1


def placed(version: int, kind: str, number: int) -> dict[str, Any]:
    """Returns the arguments ``prefix`` and ``where`` for :class:`_Type`. ``kind`` is 'node_types' or 'edge_types'."""
    return (
        {"prefix": "", "where": ""}
        if version == 1
        else {"prefix": f"{kind[0]}{number}.", "where": f"{kind}[{number}]."}
    )


def check_times_of_edges(dtypes: Mapping[EdgeName, torch.dtype], time_attr: str) -> None:
    """Raises ValueError if edge times are integers in some types and floats in others. A part alone could not compare these."""
    if len({dtype.is_floating_point for dtype in dtypes.values()}) > 1:
        shown = ", ".join(f"{str(dtype).removeprefix('torch.')}{words_of_type(name)}" for name, dtype in dtypes.items())
        raise ValueError(
            f"times of edges in parts must be integers in all edge types, or floating-point numbers in all, but {time_attr!r} is {shown}; "
            "convert the times to one dtype, or use topology='whole' and typed_graph()"
        )


def check_topology(topology: object) -> None:
    if topology not in (WHOLE, PARTS):
        raise ValueError(f"topology must be {WHOLE!r} or {PARTS!r}, got {topology!r}")


def part_folder(part_id: int) -> str:
    return f"part-{part_id:05d}"


def words_of_type(name: str | EdgeName) -> str:
    """Returns words that name a type in an error text, such as ``" of 'paper'"``, or '' for the type of a homogeneous graph."""
    return "" if name is None else f" of {words_for(name)}"
