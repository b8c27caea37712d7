"""Describes the job of a :func:`salientpp.partition` call as JSON, so that a later call knows whether it continues the same job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from salientpp.graph.mapped import mapped_from
from salientpp.ops import bytes_of
from salientpp.partitioning.options import PartitionOptions
from salientpp.progress import Progress
from salientpp.store.directory.contents import Contents
from salientpp.store.key_table import KeyTable

_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Job:
    """Data and options of one :func:`salientpp.partition` call. 'auto' has been replaced by a choice. ``fanouts`` has a list per relation.

    ``origin`` says from which tables the data was made, and has the arguments of the call under ``partition``. None: it was made of something else.
    """

    contents: Contents
    num_parts: int
    options: PartitionOptions
    why_not_refined: str | None
    fanouts: list[list[int]]
    batch_size: int
    time_attr: str | None
    topology: str
    progress: Progress
    origin: Mapping[str, Any] | None = None

    def task(self) -> dict[str, Any]:
        """Returns JSON that is equal for calls with equal data and arguments, and differs for others."""
        contents, options = self.contents, self.options
        tables = [
            [type_, name, frame.to_json()]
            for frames in (contents.node_frames, contents.edge_frames)
            for type_, of_type in frames.items()
            for name, frame in of_type.items()
        ]
        return {
            "num_parts": self.num_parts,
            "method": _named(options.method),
            "edge_weights": options.edge_weights,
            "order": options.order,
            "refine": options.refine,
            "num_neighbors": self.fanouts,
            "batch_size": self.batch_size,
            "seeds": contents.seeds,
            "replicate": sorted(map(str, contents.replicated)),
            "time_attr": self.time_attr,
            "topology": self.topology,
            "store_as": [
                [type_, name, narrow.format]
                for type_, of in [*contents.narrow.items(), *contents.edge_narrow.items()]
                for name, (narrow, _) in of.items()
            ],
            "tolerance": options.tolerance,
            "seed": options.seed,
            "data": _identify(contents),
            **({"frames": tables} if tables else {}),
            **(
                {"keys": [[type_, *_identify_keys(keys)] for type_, keys in contents.keys.items()]}
                if contents.keys
                else {}
            ),
        }


def as_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a :func:`salientpp.partition` call as JSON, as they were given, without those that do not change the result.

    Of ``split`` and ``edge_split``, the result only says if they were given.
    """
    left_out = ("data", "root", "overwrite", "progress")
    return {
        name: value is not None if name in ("split", "edge_split") else _plain(value)
        for name, value in arguments.items()
        if name not in left_out
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(each)] for key, each in value.items()), key=str)
    if isinstance(value, Tensor):
        return identify(value.detach().cpu())
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=str)  # sets of texts have another order in each process
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _named(method: Any) -> Any:
    """Returns JSON that identifies the argument ``method``, which may be a name or given parts."""
    if isinstance(method, Mapping):
        return {str(name): _named(parts) for name, parts in method.items()}
    return identify(method.detach().cpu()) if isinstance(method, Tensor) else str(method)


def _identify(contents: Contents) -> list[list[Any]]:
    """Returns JSON that identifies the data: the size of each vertex type, and name and identity of each array."""
    graph, found = contents.graph, []
    for edge_type, relation in zip(graph.edge_types, graph.relations):
        of = "" if edge_type is None else f" of {edge_type}"
        lists = {"edges": relation.indices, "ends of edges": relation.indptr, "order of edges": relation.edge_id}
        found += [(f"{name}{of}", array) for name, array in lists.items() if array is not None]
        found += [(f"{name}{of}", array) for name, array in contents.edge_columns[edge_type].items()]
        found += [(f"split {name}{of}", array) for name, array in contents.edge_splits[edge_type].items()]
    for node_type in graph.node_types:
        of = "" if node_type is None else f" of {node_type!r}"
        found += [(f"{name}{of}", array) for name, array in contents.node_columns[node_type].items()]
        found += [(f"split {name}{of}", array) for name, array in contents.splits[node_type].items()]
    sizes = [[f"number of {name or 'vertices'}", n] for name, n in zip(graph.node_types, graph.num_vertices)]
    return [*sizes, *sorted([name, identify(array)] for name, array in found)]


def _identify_keys(keys: KeyTable) -> list[Any]:
    file = keys.path.stat()
    return [keys.path.name, file.st_size, file.st_mtime_ns]


def identify(array: Tensor) -> list[Any]:
    """Returns JSON that is equal only for equal arrays, as far as checksums can tell.

    Args:
        array: [n, ...] of any dtype that files can hold. An array that is mapped from a file is identified by the file's name, size and time, so nothing
            is read. Other arrays are read once, at 2 GB/s on a processor with SHA-256 instructions.
    """
    said = [str(array.dtype).removeprefix("torch."), list(array.shape)]
    found = mapped_from(array)
    if found is not None:
        path, offset = found
        file = path.stat()
        return [*said, path.name, file.st_size, file.st_mtime_ns, offset]
    digest = hashlib.sha256()
    for piece in array.split(max(1, _PIECE_BYTES // max(1, array.nbytes // max(1, len(array))))):
        if piece.numel():
            digest.update(bytes_of(piece).numpy().data)
    return [*said, digest.hexdigest()]
