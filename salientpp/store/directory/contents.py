"""What of a PyG ``Data`` or ``HeteroData`` goes to disk: which attributes, and which vertices and edges are in which split?"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import full_edge_type, positions_in, words_for
from salientpp.graph.mapped import releaser
from salientpp.graph.relation import Relation
from salientpp.graph.typed import TypedGraph
from salientpp.ids import as_tensor, read_ids
from salientpp.store.directory.description import EdgeName
from salientpp.store.directory.files import numpy_dtype
from salientpp.store.narrow import Column, EncodedRows, Loss, Narrow, read_formats
from salientpp.store.rows import TensorRows

#: What a batch calls its own: node and edge attributes cannot have these names beside them.
OWN_NAMES = frozenset(
    [
        "n_id",
        "e_id",
        "batch",
        "ptr",
        "batch_size",
        "input_id",
        "seed_time",
        "num_sampled_nodes",
        "num_sampled_edges",
        "num_nodes",
        "edge_index",
        "adj_t",
    ]
)

#: By these names PyG knows what has an entry per vertex, and per edge.
_OF_VERTICES, _OF_EDGES = ("x", "pos"), ("edge_attr", "edge_weight", "edge_type")

#: The splits of the data, and its attributes that say which vertices are in one; of several the first counts.
_SPLITS = {split: [f"{split}_{kind}" for kind in ("mask", "idx", "index")] for split in ("train", "val", "test")}

#: A type's rows are replicated by default if they take at most this many bytes, and this share of all types'.
_REPLICATED_BYTES, _REPLICATED_SHARE = 16 * 2**20, 0.01


#: Values are looked at in pieces of this many.
_PIECE = 2**20


@dataclass(frozen=True, eq=False, kw_only=True)
class Contents:
    """What of the user's data goes to disk, under the user's ids. The types of a homogeneous graph are named None.

    Attributes:
        is_hetero: the data is a ``HeteroData``.
        graph: the topology; lists ascend by the times that were asked for.
        node_columns, edge_columns: per type, attribute name -> rows [N, ...] or [E, ...].
        splits, edge_splits: per type, name -> ascending ids.
        seeds: the (type, split) that batches start from; (None, 'all') is all vertices.
        replicated: the types whose rows every part is to have.
        narrow: per type, attribute name -> the format that its rows are to be stored in, and what is lost by it.
    """

    is_hetero: bool
    graph: TypedGraph
    node_columns: dict[str | None, dict[str, Tensor]]
    edge_columns: dict[EdgeName, dict[str, Tensor]]
    splits: dict[str | None, dict[str, Tensor]]
    edge_splits: dict[EdgeName, dict[str, Tensor]]
    seeds: tuple[str | None, str]
    replicated: frozenset[str | None]
    narrow: dict[str | None, dict[str, tuple[Narrow, Loss]]]

    @property
    def starts(self) -> dict[str | None, Tensor]:
        """Per type, the int64 ids that batches start from."""
        type_, split = self.seeds
        return {
            name: torch.arange(size, device="cpu") if split == "all" else self.splits[name][split]
            for name, size in zip(self.graph.node_types, self.graph.num_vertices)
            if name == type_ or type_ is None
        }

    @property
    def row_bytes(self) -> dict[str | None, int]:
        """Per type what fetching a vertex's row costs, in bytes: of ``x``, which batches get for all their vertices; where no type has one, of
        all attributes. 0 of replicated types."""
        has_x = any("x" in columns for columns in self.node_columns.values())
        return {
            name: 0
            if name in self.replicated
            else sum(
                self.narrow[name][column][0].row_bytes if column in self.narrow[name] else _row_bytes(rows)
                for column, rows in columns.items()
                if column == "x" or not has_x
            )
            for name, columns in self.node_columns.items()
        }


def _row_bytes(rows: Tensor) -> int:
    return rows[:1].numel() * rows.element_size() if rows.size(0) else 0


def read_contents(
    data: Data | HeteroData,
    *,
    split: Mapping[str, Any] | None = None,
    edge_split: Mapping[Any, Any] | None = None,
    seeds: str | tuple[str, str] = "train",
    replicate: Iterable[str] | None = None,
    time_attr: str | None = None,
    store_as: Mapping[Any, str] | None = None,
) -> Contents:
    """Read and check what :func:`salientpp.partition` is given; arguments as there.

    Raises:
        ValueError, TypeError: something cannot be stored, or an argument is wrong.
    """
    is_hetero = isinstance(data, HeteroData)
    if is_hetero or time_attr is not None:
        graph = without_times(TypedGraph.from_data(data, time_attr=time_attr))
    else:
        graph = TypedGraph.of(Graph.from_data(data))
    node_columns, edge_columns = collect_attributes(data, graph)
    narrow = _read_narrow(store_as, node_columns, time_attr)
    if is_hetero and split is not None:
        split = _by_type(split, graph.node_types, "split", "node")
    splits = {}
    for (name, store), size in zip(node_stores(data).items(), graph.num_vertices):
        own = split if name is None or split is None else split.get(name, {})
        splits[name] = collect_splits(store, own, node_columns[name].get("y"), size, name)
    of_edges: Mapping[Any, Any] = {}
    if edge_split is not None:
        of_edges = _by_type(edge_split, graph.edge_types, "edge_split", "edge") if is_hetero else {None: edge_split}
    edge_splits = {
        name: read_splits(of_edges.get(name, {}), relation.indices.numel(), "edge_split", "edge", name)
        for name, relation in zip(graph.edge_types, graph.relations)
    }
    return Contents(
        is_hetero=is_hetero,
        graph=graph,
        node_columns=node_columns,
        edge_columns=edge_columns,
        splits=splits,
        edge_splits=edge_splits,
        seeds=_find_seeds(seeds, splits, is_hetero),
        replicated=_choose_replicated(replicate, node_columns, narrow, is_hetero),
        narrow=narrow,
    )


def _read_narrow(
    store_as: Any, columns: Mapping[str | None, Mapping[str, Tensor]], time_attr: str | None
) -> dict[str | None, dict[str, tuple[Narrow, Loss]]]:
    """Per type, what is to be stored narrower, and what is lost by it.

    Raises:
        ValueError: a format does not fit the attribute, or values would be lost altogether.
    """
    known = {(type_, name): rows for type_, named in columns.items() for name, rows in named.items()}
    found: dict[str | None, dict[str, tuple[Narrow, Loss]]] = {type_: {} for type_ in columns}
    shapes = {column: (rows.dtype, rows.shape[1:]) for column, rows in known.items()}
    for (type_, name), narrow in read_formats("store_as", store_as, shapes).items():
        if name == time_attr:
            raise ValueError(
                f"store_as: {name!r} is time_attr, by which batches are drawn, so it is stored as it is; leave it out"
            )
        found[type_][name] = narrow, _loss((type_, name), narrow, known[type_, name])
    return found


def _loss(column: Column, narrow: Narrow, rows: Tensor) -> Loss:
    loss, first = Loss(), 0
    for piece in rows.split(max(1, _PIECE // max(1, narrow.columns))):
        decoded = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
        index = torch.arange(len(piece), device="cpu")
        narrow.put(EncodedRows(TensorRows(piece.contiguous()), narrow), index, decoded)
        at = loss.add(piece, decoded)
        if at is not None:
            raise ValueError(
                f"{_where(column[0])}.{column[1]} cannot be stored as {narrow.format}: row {first + at} has a value that is not finite, or too large for the "
                "format; replace it, or store it as bf16"
            )
        first += len(piece)
    return loss


def without_times(graph: TypedGraph) -> TypedGraph:
    """The same lists, in their order, without the arrays that only sampling needs."""
    relations = tuple(Relation(r.source, r.target, r.indptr, r.indices, r.edge_id) for r in graph.relations)
    return TypedGraph(
        graph.node_types, graph.num_vertices, graph.edge_types, relations, (None,) * len(graph.node_types)
    )


def _by_type(given: Any, types: Sequence[Any], argument: str, kind: str) -> dict[Any, Any]:
    """The user's splits by type; TypeError or ValueError unless they are a mapping from types that there are."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} of a HeteroData must map {kind} types to splits by name, got {type(given).__name__}"
        )
    given = {full_edge_type(name, types) if kind == "edge" else name: of_type for name, of_type in given.items()}
    for name in given:
        if name not in types:
            raise ValueError(
                f"{argument} must be of {kind} types of the data ({', '.join(map(repr, types)) or 'none'}), got {name!r}"
            )
    return dict(given)


def _find_seeds(
    seeds: Any, splits: Mapping[str | None, Mapping[str, Tensor]], is_hetero: bool
) -> tuple[str | None, str]:
    """The (type, split) that ``seeds`` names; (None, 'all') where no type has such a split.

    Raises:
        ValueError: several types have it, or there is no such type or split of the type.
    """
    if not is_hetero:
        if not isinstance(seeds, str):
            raise ValueError(f"seeds must be the name of a split of a homogeneous graph, got {seeds!r}")
        return None, seeds if seeds in splits[None] else "all"
    if isinstance(seeds, str):
        having = [name for name in splits if seeds in splits[name]]
        if len(having) > 1:
            raise ValueError(
                f"seeds={seeds!r} is a split of {', '.join(map(repr, having))}; say which: seeds=({having[0]!r}, {seeds!r})"
            )
        return (having[0], seeds) if having else (None, "all")
    if not (isinstance(seeds, (tuple, list)) and len(seeds) == 2 and all(isinstance(part, str) for part in seeds)):
        raise ValueError(f"seeds must be a split or (node type, split), got {seeds!r}")
    type_, split = seeds
    if type_ not in splits:
        raise ValueError(f"seeds must be of a node type of the data ({', '.join(map(repr, splits))}), got {type_!r}")
    if split != "all" and split not in splits[type_]:
        known = ", ".join(map(repr, [*splits[type_], "all"]))
        raise ValueError(f"seeds must be a split of {type_!r} ({known}), got {split!r}")
    return type_, split


def _choose_replicated(
    replicate: Iterable[str] | None,
    columns: Mapping[str | None, Mapping[str, Tensor]],
    narrow: Mapping[str | None, Mapping[str, tuple[Narrow, Loss]]],
    is_hetero: bool,
) -> frozenset[str | None]:
    """The types whose rows every part has: those asked for, or those whose rows are few bytes."""
    if replicate is not None:
        chosen = [replicate] if isinstance(replicate, str) else list(replicate)
        if chosen and not is_hetero:
            raise ValueError(
                f"replicate names types of a HeteroData, got {chosen[0]!r}; rows of a homogeneous graph are cached by a loader's replication_factor"
            )
        for name in chosen:
            if name not in columns:
                raise ValueError(
                    f"replicate must name node types of the data ({', '.join(map(repr, columns))}), got {name!r}"
                )
        return frozenset(chosen)
    nbytes = {
        name: sum(
            len(rows) * narrow[name][column][0].row_bytes if column in narrow[name] else rows.nbytes
            for column, rows in own.items()
        )
        for name, own in columns.items()
    }
    most = min(_REPLICATED_BYTES, _REPLICATED_SHARE * sum(nbytes.values()))
    return frozenset(name for name, size in nbytes.items() if is_hetero and 0 < size <= most)


def node_stores(data: Data | HeteroData) -> dict[str | None, Any]:
    """PyG's storage of each node type."""
    return {name: data[name] for name in data.node_types} if isinstance(data, HeteroData) else {None: data._store}


def edge_stores(data: Data | HeteroData) -> dict[EdgeName, Any]:
    """PyG's storage of each edge type."""
    return {name: data[name] for name in data.edge_types} if isinstance(data, HeteroData) else {None: data._store}


def check_types(data: HeteroData) -> None:
    """Raise ValueError unless the names of types can be written and read back, and every vertex type says how many there are."""
    if not data.node_types:
        raise ValueError("data has no node types; a HeteroData to be partitioned needs at least one")
    for name in (*data.node_types, *(part for edge_type in data.edge_types for part in edge_type)):
        if not isinstance(name, str) or name.encode(errors="replace").decode() != name:
            raise ValueError(f"the names of types must be text, got {name!a}; rename it")


def collect_attributes(
    data: Data | HeteroData, graph: TypedGraph
) -> tuple[dict[str | None, dict[str, Tensor]], dict[EdgeName, dict[str, Tensor]]]:
    """Node and edge attributes per type; what cannot be stored is refused rather than lost."""
    node: dict[str | None, dict[str, Tensor]] = {}
    edge: dict[EdgeName, dict[str, Tensor]] = {}
    stores = edge_stores(data)
    for name, relation in zip(graph.edge_types, graph.relations):
        store, where = stores[name], _where(name)
        if store.get("edge_index") is not None and store.get("adj_t") is not None:
            positions_in(
                store["adj_t"], store["edge_index"], words_for(name, "the edges")
            )  # only one of them is stored
        if store.get("adj_t") is not None and _has_weights(store["adj_t"]):
            raise ValueError(
                f"{where}.adj_t has values other than 1, and only its topology is stored; give the graph as edge_index alone, and the "
                "values as edge_attr or edge_weight"
            )
        edge[name] = _columns(store, where, num_edges=relation.indices.numel())
    for type_, (store, size) in zip(graph.node_types, zip(node_stores(data).values(), graph.num_vertices)):
        node[type_] = _columns(store, _where(type_), num_vertices=size)
    return node, edge


def _where(name: str | EdgeName) -> str:
    return "data" if name is None else f"data[{name!r}]"


def _columns(
    store: Any, where: str, *, num_vertices: int | None = None, num_edges: int | None = None
) -> dict[str, Tensor]:
    """The attributes of the vertices of one storage, or of its edges, whichever number is given."""
    wants_nodes = num_vertices is not None
    of, size = ("vertex", num_vertices) if wants_nodes else ("edge", num_edges)
    columns, left_out = {}, []
    for name, value in store.items():
        if name in ("edge_index", "adj_t", "num_nodes") or any(name in names for names in _SPLITS.values()):
            continue
        if isinstance(value, np.ndarray):
            with contextlib.suppress(ValueError):  # it may be of the whole graph, which is left out
                value = as_tensor(value, "")
        # A storage of vertices has no edges, and one of a homogeneous graph has both.
        is_node = isinstance(store, NodeStorage) and store.is_node_attr(name)
        is_edge = isinstance(store, EdgeStorage) and store.is_edge_attr(name)
        if not (is_node or is_edge):
            if name in (_OF_VERTICES if wants_nodes else _OF_EDGES):
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{where}.{name} must be a tensor with one row per {of}, expected {size} rows, got {got}"
                )
            if isinstance(value, Tensor) and value.numel() > 1 and wants_nodes == isinstance(store, NodeStorage):
                left_out.append(f"{where}.{name} ({str(value.dtype).removeprefix('torch.')} {list(value.shape)})")
            continue  # a value of the whole graph belongs to no vertex and no batch
        if is_node != wants_nodes:
            continue
        if name == "edge_label_index":
            raise ValueError(
                f"{where}.edge_label_index holds seeds of a LinkNeighborLoader, which are not stored; take it out before: "
                f"pairs = {where}.edge_label_index; del {where}.edge_label_index. If the pairs are the graph's own edges, a LinkNeighborLoader of the "
                "directory has them without being told, and their labels with edge_label='edge_label'; others are its edge_label_index as "
                "part.directory_id(pairs)"
            )
        if name in OWN_NAMES:
            raise ValueError(
                f"{where}.{name} cannot be stored under its name, by which a batch has something of its own; rename it: "
                f"{where}.my_{name} = {where}.{name}; del {where}.{name}"
            )
        if not isinstance(value, Tensor):
            kind = f"a NumPy array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ValueError(f"{where}.{name} must be a tensor to be stored, got {kind}; convert or delete it")
        if value.size(0) != size:
            raise ValueError(
                f"{where}.{name} must have one row per {of} in dimension 0, expected {size}, got {value.size(0)}"
            )
        if value.is_meta:
            raise ValueError(f"{where}.{name} is on the device meta, without values; give it some, or delete it")
        if value.layout != torch.strided:
            raise ValueError(f"{where}.{name} must be dense to be stored, got layout {value.layout}; call .to_dense()")
        if "/" in name or "\0" in name or name.encode(errors="replace").decode() != name:
            raise ValueError(
                f"{where}[{name!r}] cannot be stored under its name, which has to be a file name; rename it"
            )
        try:
            numpy_dtype(value.dtype)
        except TypeError:
            raise ValueError(
                f"{where}.{name} has dtype {value.dtype}, which .npy files cannot hold; convert or delete it"
            ) from None
        columns[name] = value.detach().cpu().resolve_conj().resolve_neg()
    if left_out:
        or_edge = " or per edge" if wants_nodes and isinstance(store, EdgeStorage) else ""
        warnings.warn(
            f"{', '.join(left_out)} left out: only what has a row per {of} ({size}){or_edge} is stored, and splits (train_mask, train_idx or "
            "train_index and so on, or split=)",
            UserWarning,
            stacklevel=5,
        )
    return columns


def _has_weights(adj_t: Any) -> bool:
    values = adj_t.values() if isinstance(adj_t, Tensor) else adj_t.storage.value()
    if values is not None and values.stride() == (0,):  # one number for all of more edges than fit into memory
        values = values[:1]
    return values is not None and bool((values != 1).any())


def collect_splits(
    store: Any, split: Mapping[str, Tensor] | None, labels: Tensor | None, num_vertices: int, type_: str | None = None
) -> dict[str, Tensor]:
    """Split name -> ascending vertex ids of one type.

    Unlabelled vertices are left out of the storage's own splits, and a warning says how many. A ``split`` that is given keeps every vertex.

    Args:
        store: the ``Data``, or PyG's storage of the type.
        split: name -> ids or mask; None: the storage's masks or ids.
        labels: [N] or [N, labels per vertex]; None: there are none.
    """
    if split is not None:
        return read_splits(split, num_vertices, "split", "vertex", type_)
    splits = read_splits(_own_splits(store, type_), num_vertices, "split", "vertex", type_)
    if labels is None or not marks_unlabelled(_pieces(labels)):
        return splits
    for name, ids in splits.items():
        unlabelled = is_unlabelled(labels[ids])
        splits[name] = ids[~unlabelled]
        warn_of_unlabelled(
            int(unlabelled.sum()),
            ids.numel(),
            f"the split {name!r} of {_where(type_)}",
            "To keep them, name them in split= of salientpp.partition.",
            stacklevel=5,
        )
    return splits


def _own_splits(store: Any, type_: str | None) -> dict[str, Any]:
    """The splits that a storage has, as masks or ids."""
    split = {}
    for name, attributes in _SPLITS.items():
        present = [attribute for attribute in attributes if store.get(attribute) is not None]
        if not present:
            continue
        split[name] = store[present[0]]
        dtype = as_tensor(split[name], f"{_where(type_)}.{present[0]} must be a bool mask or integer ids").dtype
        if present[0].endswith("_mask") and dtype != torch.bool:
            raise ValueError(
                f"{_where(type_)}.{name}_mask must be bool, got {dtype}; use .bool(), or pass split={{{name!r}: ids}}"
            )
        if len(present) > 1:
            warnings.warn(
                f"the split {name!r} is that of {_where(type_)}.{present[0]}; "
                f"{', '.join(f'{_where(type_)}.{other}' for other in present[1:])} left out",
                UserWarning,
                stacklevel=5,
            )
    return split


def _pieces(labels: Tensor) -> Iterator[Tensor]:
    """Labels in pieces. A mapped file is not held."""
    release = releaser(labels)
    for piece in labels.split(max(1, _PIECE // max(1, labels[:1].numel()))):
        yield piece
        release()


def marks_unlabelled(labels: Iterable[Tensor]) -> bool:
    """Whether the label -1 marks an unlabelled vertex.

    This holds where labels are classes: integers, none below -1, and 0 among them. Labels of -1 and 1, temperatures and other numbers are values.

    Args:
        labels: the labels of all vertices, in pieces of any shape.
    """
    has_minus_one = has_zero = False
    for piece in labels:
        if not piece.dtype.is_signed or piece.dtype.is_floating_point or piece.dtype.is_complex:
            return False
        if not piece.numel():
            continue
        least = int(piece.min())
        if least < -1:
            return False
        has_minus_one |= least == -1
        has_zero |= least == 0 or bool((piece == 0).any())
    return has_minus_one and has_zero


def is_unlabelled(labels: Tensor) -> Tensor:
    """bool [n]: the label is -1, or every one of several is. For labels of which :func:`marks_unlabelled` is true."""
    unlabelled = labels == -1
    return unlabelled if unlabelled.dim() == 1 else unlabelled.flatten(1).all(dim=1)


def warn_of_unlabelled(number: int, total: int, split: str, remedy: str, stacklevel: int) -> None:
    """Warn that so many vertices of a split are left out, if there are any."""
    if number:
        warnings.warn(
            f"{split}: {number} of {total} vertices are left out, since their label y is -1, which means unlabelled. {remedy}",
            UserWarning,
            stacklevel=stacklevel,
        )


def read_splits(
    split: Mapping[str, Tensor], size: int, argument: str, of: str, type_: str | EdgeName = None
) -> dict[str, Tensor]:
    """Split name -> ascending ids, from ids in any order or masks.

    Args:
        size: ids are in ``[0, size)``.
        argument, of: for errors: what the user calls the splits, and 'vertex' or 'edge'.
        type_: whose splits these are, if types have names.
    """
    owner = "" if type_ is None else f" of {type_!r}"
    if not isinstance(split, Mapping):
        raise TypeError(
            f"{argument}{owner} must be a mapping of names to {of} ids or masks, got {type(split).__name__}"
        )
    splits = {}
    for name, chosen in split.items():
        if name == "all" or not str(name).isidentifier():
            raise ValueError(f"a split's name must be an identifier other than 'all', got {name!r}{owner}")
        words = f"{argument} {name!r}{owner}"
        chosen = as_tensor(chosen, f"{words} must be a bool mask or integer ids")
        if chosen.is_meta:
            raise ValueError(f"{words} must be a bool mask or integer ids, got Tensor without values")
        ids, is_mask = read_ids(chosen, size, words, "a bool mask or integer ids", "must hold ids")
        splits[str(name)] = ids if is_mask else ids.unique()
    return splits


def num_classes_of(labels: Tensor | None) -> int:
    """The number of classes of labels [N, ...], as ``num_classes`` of PyG's datasets.

    One label per vertex: one more than the largest integer, or the number of different reals. Several: their number. 0 without labels. NaN is no class.
    """
    if labels is None or labels.dtype.is_complex or labels.dim() == 0:
        return 0
    if labels.shape[1:].numel() != 1:
        return labels.size(-1)
    if labels.dtype.is_floating_point:
        values = labels.flatten().to(torch.float64)
        return values[~values.isnan()].unique().numel()
    if labels.numel() == 0:
        return 0
    return max(0, int(labels.to(torch.int64).max()) + 1)  # not all integer types have a largest entry


def describe(rows: Tensor, stored: tuple[Narrow, Loss] | None = None) -> dict[str, Any]:
    """What the manifest says of an attribute, and of how it is ``stored`` narrower."""
    entry: dict[str, Any] = {"dtype": str(rows.dtype).removeprefix("torch."), "row_shape": list(rows.shape[1:])}
    if stored is not None:
        narrow, loss = stored
        entry["stored_as"] = {
            "format": narrow.format,
            "row_bytes": narrow.row_bytes,
            "largest_error": loss.largest,
            "relative_rms_error": loss.relative_rms,
        }
    return entry
