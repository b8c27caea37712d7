"""Random graphs of random jobs: every kind of data that loaders take, each a function of a few plain values.

A new kind of data, form of topology or source of rows needs a line in the tables here. ``test_strategies.py`` says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch
from one_process import whole
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import salientpp
from salientpp.testing.graphs import ROW_WORDS, random_rows

#: Kinds of data, and their chance.
FORMS = {"directory": 8, "typed directory": 6, "Data": 3, "HeteroData": 2, "stores": 1, "typed stores": 1}

#: Form -> name of the loaders' kind of data.
KINDS = {
    "directory": "PartitionedGraph", "typed directory": "PartitionedGraph", "Data": "Data", "HeteroData": "HeteroData", "stores": "stores",
    "typed stores": "stores",
}  # fmt: skip

#: Class of a topology -> the form that makes it occur.
TOPOLOGY_CLASSES = {
    "GraphTopology": "Data", "TypedTopology": "HeteroData", "PartTopology": "a directory with topology 'parts'",
    "DeviceTopology": "of neighbor_sampler='device', which needs a device",
}  # fmt: skip

#: Class of a row source -> what makes it occur.
ROW_SOURCES = {
    "TensorRows": "Data", "JoinedRows": "a rank that serves several parts", "NarrowRows": "store_as", "EncodedRows": "send_as", "BufferedRows": "read_ahead",
    "UnmappedRows": "storage ranks, which jobs do not have; its laws are in tests/store/test_unmapped_rows.py and tests/loader/test_storage_ranks.py",
}  # fmt: skip

#: Forms of a directory's topology.
TOPOLOGIES = ("whole", "parts")

#: Shapes of the edges.
SHAPES = ("skewed", "skewed", "skewed", "hub", "isolated", "none", "dense")

#: Dtypes and shapes of a row of ``x``. 'none': there is no ``x``.
ROWS = (*ROW_WORDS, "none")

#: Rows of some directories. Next to them, the ids that a lookahead cache keeps are small.
WIDE = "float32 24"

#: Attributes beside ``x``.
ATTRIBUTES = ("y", "z", "time", "edge_attr", "edge_time", "weight", "wide_edges", "tf", "names", "adj_t")

#: Attributes of data in memory only.
_IN_MEMORY = ("names", "adj_t")

#: How the vertices of a directory are assigned to parts.
ASSIGNMENTS = ("random", "random", "random", "metis", "empty parts", "types on some parts", "one part")

#: Assignments that leave parts without vertices of a type.
LACKING = ("empty parts", "types on some parts", "one part")

#: Formats of :mod:`salientpp.store.narrow` that rows may be stored or sent in.
FORMATS = ("fp16", "bf16", "int8", "int4", "int8/8", "int4/4")

TYPES = ("a", "b", "c", "d")
RELATIONS = (
    ("a", "to", "b"),
    ("b", "from", "a"),
    ("a", "cites", "a"),
    ("c", "in", "a"),
    ("a", "no", "c"),
    ("b", "is", "d"),
)


@dataclass(frozen=True)
class Graph:
    """Random graph.

    Attributes:
        number: number of the random contents.
        form, shape, rows, topology, assignment: words of the tables in this module.
        vertices: of type a, or of all types. Type b has half as many, c has three rows without ``x``, and d has none or one.
        attributes: some of :data:`ATTRIBUTES`.
        parts: of a directory.
        store_as: format of ``x`` in a directory.
        sorted_by: ``time_attr`` of a directory.
        replicate: whether every part of a directory gets the rows of type b. None: the package decides.
        mapped: whether ``x`` of a ``Data`` lies in a mapped file.
    """

    number: int = 0
    form: str = "Data"
    vertices: int = 40
    edges: int = 150
    shape: str = "skewed"
    rows: str = "float32 3"
    attributes: tuple[str, ...] = ()
    parts: int = 1
    assignment: str = "random"
    topology: str = "whole"
    store_as: str | None = None
    sorted_by: str | None = None
    replicate: bool | None = None
    mapped: bool = False

    @property
    def is_typed(self) -> bool:
        return self.form.startswith("typed") or self.form == "HeteroData"

    @property
    def is_directory(self) -> bool:
        return self.form.endswith("directory")

    @property
    def is_stores(self) -> bool:
        return self.form.endswith("stores")

    @property
    def types(self) -> tuple[str | None, ...]:
        return TYPES if self.is_typed else (None,)

    @property
    def relations(self) -> tuple[Any, ...]:
        return RELATIONS if self.is_typed else (None,)

    def size(self, type_: str | None) -> int:
        return {None: self.vertices, "a": self.vertices, "b": max(1, self.vertices // 2), "c": 3, "d": self.number % 2}[
            type_
        ]


#: Attribute -> probability that a graph has it.
_CHANCES = {"tf": 0.06, "names": 0.06, "adj_t": 0.3}


def graph_of(r: random.Random) -> Graph:
    """Returns a random graph."""
    form = r.choices(list(FORMS), list(FORMS.values()))[0]
    rows = r.choice(ROWS)
    found = Graph(
        # Few numbers, so that long runs partition few graphs.
        number=r.randrange(8),
        form=form,
        vertices=r.choice((40, 40, 40, 17, 90)),
        edges=r.choice((150, 150, 150, 20, 400)),
        shape=r.choice(SHAPES),
        rows=rows,
        attributes=tuple(name for name in ATTRIBUTES if r.random() < _CHANCES.get(name, 0.35)),
        mapped=form == "Data" and r.random() < 0.3 and rows.startswith("float32"),
    )
    if not found.is_directory:
        return found
    floats = rows.split()[0] in ("float32", "float64", "float16", "bfloat16") and rows.split()[1] not in ("-", "0")
    narrow = floats and r.random() < 0.15
    times = [name for name in ("time", "edge_time") if name in found.attributes]
    return dataclasses.replace(
        found,
        rows="float32 16" if narrow else WIDE if r.random() < 0.4 else found.rows,
        attributes=tuple(name for name in found.attributes if name not in _IN_MEMORY),
        parts=r.choice((1, 2, 2, 3, 4, 4, 4, 5, 6, 8)),
        assignment=r.choice(ASSIGNMENTS),
        topology=r.choice(TOPOLOGIES),
        store_as=r.choice(FORMATS) if narrow else None,
        sorted_by=r.choice(times) if times and r.random() < 0.4 else None,
        replicate=r.choice((None, True, False)) if found.is_typed else None,
    )


def simpler(graph: Graph) -> list[Graph]:
    """Returns simpler graphs, for shrinking."""
    plain = Graph(form=graph.form, parts=graph.parts)
    found = [
        dataclasses.replace(graph, **{name: getattr(plain, name)})
        for name in (
            "store_as",
            "sorted_by",
            "replicate",
            "mapped",
            "topology",
            "assignment",
            "shape",
            "number",
            "rows",
        )
        if getattr(graph, name) != getattr(plain, name)
    ]
    found += [
        dataclasses.replace(graph, attributes=tuple(each for each in graph.attributes if each != name))
        for name in graph.attributes
    ]
    found += [
        dataclasses.replace(graph, vertices=n, edges=e)
        for n, e in ((6, 10), (17, 40))
        if n < graph.vertices and e <= graph.edges
    ]
    if graph.is_directory and graph.parts > 1:
        found += [dataclasses.replace(graph, parts=parts) for parts in (1, 2, graph.parts - 1) if parts < graph.parts]
    return found


# --- contents ------------------------------------------------------------------------------------------------------


def build(graph: Graph, folder: str | Path | None = None) -> Any:
    """Returns the graph in memory, as a ``Data`` or ``HeteroData``. ``folder`` holds mapped files."""
    r = np.random.default_rng(graph.number)
    data: Any = HeteroData() if graph.is_typed else Data()
    for type_ in graph.types:
        store, size = (data if type_ is None else data[type_]), graph.size(type_)
        if graph.rows != "none" and type_ != "c":
            store.x = random_rows(r, size, graph.rows, more=type_ == "b")
            if graph.mapped and folder is not None:
                store.x = _mapped(store.x, Path(folder) / f"{_name(graph)}.npy")
        store.num_nodes = size
        if "y" in graph.attributes:
            store.y = torch.from_numpy(r.integers(0, 5, size))
        if "z" in graph.attributes and type_ in (None, "a", "b"):
            store.z = torch.from_numpy(r.random((size, 2)))
        if "time" in graph.attributes:
            store.time = _times(r, size, graph.number)
        if "tf" in graph.attributes and type_ in (None, "a") and not graph.is_stores:
            from tables import table

            store.tf = table(size)
        if "names" in graph.attributes and not graph.is_stores:
            store.names = r.random(size)  # a NumPy array
        chosen = r.random(size)
        store.train_mask = torch.from_numpy(chosen < (0.5, 0.1, 0.9)[graph.number % 3])
        store.val_mask = torch.from_numpy(chosen > 0.97)
    for name in graph.relations:
        store = data if name is None else data[name]
        sizes = [graph.size(type_) for type_ in ((None, None) if name is None else (name[0], name[2]))]
        ends = _ends(r, graph, sizes, name)
        count = ends.size(1)
        store.edge_index = ends
        if "adj_t" in graph.attributes and not graph.is_stores:
            store.adj_t = _csr(ends, sizes)
        if "edge_attr" in graph.attributes:
            store.edge_attr = torch.from_numpy(r.random((count, 2)).astype(np.float32))
        if "wide_edges" in graph.attributes:
            shape = ((count,), (count, 0), (count, 2, 2))[graph.number % 3]
            store.edge_wide = torch.from_numpy(r.integers(-9, 9, shape))
        if "edge_time" in graph.attributes:
            store.edge_time = _times(r, count, graph.number)
        if "weight" in graph.attributes:
            weight = r.random(count) ** 3
            weight[r.random(count) < 0.2] = 0
            weight[r.random(count) < 0.05] = 1e30
            store.weight = torch.from_numpy(weight.astype((np.float64, np.float32)[graph.number % 2]))
    return data


def has_real_times(graph: Graph) -> bool:
    """Returns True if the times of a graph are floating-point numbers."""
    return graph.number % 4 == 2


def _times(r: np.random.Generator, size: int, number: int) -> Tensor:
    """Times with ties; some graphs have times at the ends of the dtype."""
    found = r.integers(0, 6, size)
    match number % 4:
        case 1:
            return torch.from_numpy(np.array([-(2**62), 0, 2**62, 2**62 - 1, 5, 6])[found])
        case 2:
            return torch.from_numpy(np.array([-1e300, 0, 0.5, 1e300, 5, 6])[found])
        case 3:
            return torch.from_numpy(found.astype(np.int32))
    return torch.from_numpy(found)


def _ends(r: np.random.Generator, graph: Graph, sizes: list[int], name: Any) -> Tensor:
    count = 0 if graph.shape == "none" or 0 in sizes or (name is not None and name[1] == "no") else graph.edges
    if name is not None and name[0] == "c":
        count = min(count, 12)
    skew = r.random((2, count))
    if graph.shape != "dense":
        skew[0] = skew[0] ** 2  # low ids are popular sources
    ends = np.stack([(skew[i] * sizes[i]).astype(np.int64) for i in (0, 1)])
    if graph.shape == "hub":
        ends[1, : count // 2] = 0  # one target of half of the edges
    if graph.shape == "isolated":
        ends = ends // 2  # the upper half of the vertices has no edges
    if count > 10:
        ends[:, :3] = ends[:, 3:6]  # repeated edges
        if name is None or name[0] == name[2]:
            ends[0, 6:8] = ends[1, 6:8]  # self-loops
    return torch.from_numpy(ends)


def _csr(ends: Tensor, sizes: list[int]) -> Tensor:
    """Returns the edges as a CSR tensor of targets by sources. Its values are whole numbers, whose sums are exact."""
    sources, targets = sizes
    order = torch.sort(ends[1] * sources + ends[0], stable=True).indices
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ends[1], minlength=targets).cumsum(0)])
    values = (torch.arange(ends.size(1)) * 7 % 50 + 1).double()
    return torch.sparse_csr_tensor(indptr, ends[0, order], values, (targets, sources))


def _mapped(rows: Tensor, path: Path) -> Tensor:
    if not path.exists():
        new = path.with_name(f"{path.name}.{random.getrandbits(32)}")
        with open(new, "wb") as file:
            np.save(file, rows.numpy())
        new.rename(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about arrays that cannot be written
        return torch.from_numpy(np.load(path, mmap_mode="r"))


def stores(data: Any) -> tuple[Any, Any]:
    """Returns the same graph as a pair of PyG's feature store and graph store."""
    features, edges = MyFeatureStore(), MyGraphStore()
    typed = isinstance(data, HeteroData)
    for type_ in data.node_types if typed else [None]:
        store = data[type_] if typed else data
        names = [name for name in ("x", "y", "z", "time") if name in store]
        for name in names:
            features.put_tensor(store[name], group_name=type_, attr_name=name, index=None)
        if not names:  # otherwise the number of vertices is unknown
            features.put_tensor(torch.arange(store.num_nodes), group_name=type_, attr_name="number", index=None)
    for name in data.edge_types if typed else [None]:
        store = data[name] if typed else data
        size = (data[name[0]].num_nodes, data[name[2]].num_nodes) if typed else (data.num_nodes, data.num_nodes)
        edges.put_edge_index(store.edge_index, edge_type=name, layout="coo", is_sorted=False, size=size)
        for attr in ("edge_time",):
            if attr in store:
                features.put_tensor(store[attr], group_name=name, attr_name=attr, index=None)
    return features, edges


# --- directories ---------------------------------------------------------------------------------------------------


def _name(graph: Graph) -> str:
    return hashlib.sha256(repr(graph).encode()).hexdigest()[:16]


def directory(graph: Graph, folder: str | Path) -> Path:
    """Returns the directory of a graph, which is written if no earlier call has done so. The folder ``whole`` beside it has its content in one object.

    Raises:
        AssertionError: the content of the directory differs from that of the graph.
    """
    root = Path(folder) / _name(graph)
    if (root / "whole.pt").exists():
        return root / "parts"
    shutil.rmtree(root, ignore_errors=True)
    data = build(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = salientpp.partition(
            data,
            graph.parts,
            root / "parts",
            [3, 2],
            8,
            method=_assignment(graph),
            seeds=("a", "train") if graph.is_typed else "train",
            topology=graph.topology,
            store_as=None if graph.store_as is None else {"x": graph.store_as},
            time_attr=graph.sorted_by,
            replicate=None if graph.replicate is None else (["b"] if graph.replicate else []),
            refine=None if graph.assignment == "metis" else False,
        )
    found = whole(part)
    for type_ in graph.types:
        store, given = (found, data) if type_ is None else (found[type_], data[type_])
        ids = torch.arange(graph.size(type_))
        old = part.original_id(ids) if type_ is None else part.original_id({type_: ids})[type_]
        store.train_mask, store.val_mask = given.train_mask[old], given.val_mask[old]
        if graph.store_as is not None and "x" in given:
            store.x = narrowed(given.x[old], graph.store_as)
    if graph.store_as is None:
        _check_content(graph, data, part, found)
    torch.save(found, root / "new.pt")
    (root / "new.pt").rename(root / "whole.pt")
    return root / "parts"


def whole_of(root: Path) -> Any:
    """Returns the whole content of a directory, with the directory's ids."""
    return torch.load(root.parent / "whole.pt", weights_only=False)


def narrowed(rows: Tensor, format: str) -> Tensor:
    """Returns rows as they are after they were stored or sent in a format."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).float().numpy()
    found = [reference.wide_row(reference.narrow_row(row, format), flat.shape[1], format) for row in flat]
    return torch.from_numpy(np.array(found, np.float32).reshape(rows.shape)).to(rows.dtype)


def _assignment(graph: Graph) -> Any:
    """Returns the argument ``method`` of :func:`salientpp.partition`."""
    if graph.assignment == "metis" and graph.parts <= graph.vertices and not graph.is_typed:
        return "metis"
    r, parts = np.random.default_rng(graph.number + 1), graph.parts
    found = {}
    for type_ in graph.types:
        some = r.integers(0, parts, graph.size(type_))
        match graph.assignment:
            case "empty parts":
                some = np.where(some % 2 == 0, some, parts - 1)  # every other part is empty
            case "types on some parts" if type_ == "b":
                some = np.maximum(some, min(1, parts - 1))  # none in part 0
            case "types on some parts" if type_ == "a":
                some = np.minimum(some, max(0, parts - 2)) if graph.number % 2 else some
            case "one part":
                some = np.full_like(some, parts - 1)
        found[type_] = torch.from_numpy(some)
    return found if graph.is_typed else found[None]


def _check_content(graph: Graph, data: Any, part: Any, found: Any) -> None:
    """Checks that a directory has the rows and the edges of the graph."""
    old = {}
    for type_ in graph.types:
        given, got = (data, found) if type_ is None else (data[type_], found[type_])
        size = graph.size(type_)
        ids = torch.arange(size)
        old[type_] = part.original_id(ids) if type_ is None else part.original_id({type_: ids})[type_]
        assert torch.equal(old[type_].sort().values, ids)
        for name in ("x", "y", "z"):
            if name in given:
                assert same_bits(got[name], given[name][old[type_]]), (type_, name)
    for name in graph.relations:
        given, got = (data, found) if name is None else (data[name], found[name])
        source, target = (None, None) if name is None else (name[0], name[2])
        ends = torch.stack([old[source][got.edge_index[0]], old[target][got.edge_index[1]]])
        rows = [attr for attr in ("edge_attr", "edge_time", "weight") if attr in given]
        mine, theirs = (
            sorted(
                zip(
                    *pairs.tolist(),
                    *(store[attr].reshape(pairs.size(1), math.prod(store[attr].shape[1:])).tolist() for attr in rows),
                )
            )
            for pairs, store in ((ends, got), (given.edge_index, given))
        )
        assert mine == theirs, name


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        return bool(torch.equal(one.to_dense(), other.to_dense()))
    ours, theirs = (
        torch.empty(each.numel(), dtype=each.dtype).copy_(each.detach().flatten()).view(torch.uint8)
        for each in (one, other)
    )
    return bool(torch.equal(ours, theirs))
