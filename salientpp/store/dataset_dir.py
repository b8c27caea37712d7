"""What is a partitioned graph on disk, and how is it written and opened?

A dataset directory, format version 1:

* ``manifest.json``: format, version, N, E, K, the partition book's offsets, node and edge attributes with dtypes
  and shapes, the number of classes, splits with their sizes per part, the workload that the order was computed for, the partition's
  quality, and size, checksums, dtype and shape of every file. Written last.
* ``indptr.npy`` int64 [N + 1] and ``indices.npy`` int32 (int64 where N >= 2**31) [E]: the whole topology in CSC form.
* ``original_id.npy`` int64 [N]: the user's id of every vertex.
* ``edge_<name>.npy`` [E, ...]: edge attributes, in the order of ``indices``.
* ``part-<p>/node_<name>.npy`` [n_p, ...]: rows of the part's vertices; ``part-<p>/split_<name>.npy`` int64: global
  ids of the part's seeds, ascending; ``part-<p>/vip.npy`` float32 [N]: what the part's batches need, by global id.

Vertices are renumbered: part p owns ``[offsets[p], offsets[p + 1])``, and inside a part ids descend by the part's own
VIP (with seeds), so a prefix of a part is its hottest rows. Plain ``.npy`` files without pickles, opened as memory
maps: ranks of one host share the page cache. A directory is written under a temporary name and renamed, so half a
directory is never taken for a whole one.

A copy for one host (:mod:`salientpp.store.staging`) lacks the folders of parts that are not served there; its ``parts.json`` lists those that it has.

Checksums: SHA-256 of every file, and a quick CRC-32 of its size and of evenly spread blocks (all of it up to 4 MiB). Opening
checks the manifest (:mod:`salientpp.store.manifest`), sizes, headers and the quick sums; ``verify='full'`` reads everything.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import mmap
import os
import secrets
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from salientpp import ops
from salientpp.comm import group_rank
from salientpp.graph.csc import Graph
from salientpp.graph.from_pyg import positions_in
from salientpp.ids import read_ids
from salientpp.plan.cache import Workload
from salientpp.plan.layout import Layout, assign_for, lay_out, relabeled_edges
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.placement import Placement
from salientpp.plan.vip import check_batch_size, check_fanouts
from salientpp.store.manifest import check_manifest, part_folder

FORMAT = "salientpp-partitioned-graph"
VERSION = 1

#: In a copy for one host: {"parts": [...]}, the parts that are there.
STAGED = "parts.json"

_QUICK_BLOCK = 64 * 1024
_QUICK_BLOCKS = 64
_COPY_BYTES = 64 * 2**20

#: torch dtypes that numpy lacks are stored as integers of their width; the manifest names the real one.
_STORED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


#: What a batch calls its own: node and edge attributes cannot have these names beside them.
OWN_NAMES = frozenset(
    ["n_id", "e_id", "batch", "ptr", "batch_size", "input_id", "seed_time", "num_sampled_nodes", "num_sampled_edges", "num_nodes", "edge_index", "adj_t"]
)

#: By these names PyG knows what has an entry per vertex, and per edge.
_OF_VERTICES, _OF_EDGES = ("x", "pos"), ("edge_attr", "edge_weight", "edge_type")


class DatasetError(ValueError):
    """A dataset directory is missing, incomplete or altered; the text says which file and what to do."""


# --- opening ---------------------------------------------------------------------------------------------


class PartitionedGraph:
    """A partitioned graph on disk, seen from one part.

    Made by :func:`load`. Arrays are memory maps, opened when first used; a copy, or a pickle in another process, opens its own.

    Attributes:
        root: the directory.
        manifest: its description.
        book: which global ids each part owns.
        part_id: the part that this process serves, or None where that is not decided (no process group and K > 1).
    """

    def __init__(self, root: Path, manifest: dict[str, Any], part_id: int | None) -> None:
        self.root = root
        self.manifest = manifest
        self.book = PartitionBook(torch.tensor(manifest["offsets"]))
        self.part_id = part_id
        self._maps: weakref.WeakKeyDictionary[mmap.mmap, str] = weakref.WeakKeyDictionary()  # those in use, and their files

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionedGraph, (self.root, self.manifest, self.part_id)

    def check_sizes(self) -> None:
        """Look whether the files behind the open memory maps are still as long as the maps.

        Reading a map beyond the end of its file kills the process (SIGBUS). A file that was replaced by another, or deleted, is not cut short: the map
        keeps the one that it was made of.

        Raises:
            DatasetError: one was cut short.
        """
        for map_, name in list(self._maps.items()):
            size, expected = map_.size(), self.manifest["files"][name]["bytes"]
            if size < expected:
                raise DatasetError(
                    f"{self.root / name} was cut short while this process was reading it: it must have {expected} bytes, got {size}; copy it again, or "
                    "partition again, and start anew from the last state"
                )

    @property
    def num_parts(self) -> int:
        return self.book.num_parts

    @property
    def num_vertices(self) -> int:
        return self.book.num_vertices

    @property
    def num_features(self) -> int:
        """Columns of ``x``; 0 without it."""
        x = self.manifest["node_attributes"].get("x")
        return 0 if x is None else x["row_shape"][0] if x["row_shape"] else 1

    @property
    def num_classes(self) -> int:
        """One more than the largest label of an integer ``y`` [N]; 0 without one."""
        return self.manifest["num_classes"]

    @property
    def fingerprint(self) -> str:
        """Equal for equal contents: the checksum of all checksums."""
        sums = "".join(f"{name}{entry['sha256']}" for name, entry in sorted(self.manifest["files"].items()))
        return hashlib.sha256(sums.encode()).hexdigest()[:16]

    @cached_property
    def graph(self) -> Graph:
        """The whole topology; validated when it was written, so not read again here."""
        return Graph.trusted(self._array("indptr.npy"), self._array("indices.npy"))

    @cached_property
    def _original_id(self) -> Tensor:
        return self._array("original_id.npy")

    def original_id(self, n_id: Tensor) -> Tensor:
        """The ids that the user's data had, int64, for global ids of this graph (``batch.n_id``)."""
        return self._original_id[n_id.cpu()].to(n_id.device)

    def node_rows(self, part_id: int | None = None) -> dict[str, Tensor]:
        """Attribute name -> rows [n_p, ...] of a part's vertices."""
        part_id = self._part(part_id)
        return {
            name: self._array(f"{part_folder(part_id)}/node_{name}.npy", entry["dtype"])
            for name, entry in self.manifest["node_attributes"].items()
        }

    def edge_rows(self) -> dict[str, Tensor]:
        """Attribute name -> rows [E, ...] of all edges."""
        return {
            name: self._array(f"edge_{name}.npy", entry["dtype"])
            for name, entry in self.manifest["edge_attributes"].items()
        }

    def split(self, name: str, part_id: int | None = None) -> Tensor:
        """Global ids int64 of a part's seeds: a split of the data, or 'all'."""
        part_id = self._part(part_id)
        if name == "all":
            begin, end = self.book.range_of(part_id)
            return torch.arange(begin, end)
        if name not in self.manifest["splits"]:
            known = ", ".join(repr(split) for split in [*self.manifest["splits"], "all"])
            raise ValueError(f"{self.root} has the splits {known}, got {name!r}")
        return self._array(f"{part_folder(part_id)}/split_{name}.npy")

    def vip(self, part_id: int | None = None) -> Tensor:
        """float32 [N]: the inclusion probabilities that the directory was ordered by, without seeds."""
        return self._array(f"{part_folder(self._part(part_id))}/vip.npy")

    def workload(self, part_id: int, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False) -> Workload:
        """What policies rank by for a part's batches of these seeds; it knows the stored :meth:`vip` where that is of this very workload.

        The loader and the analysis both plan by it, so that they cache the same rows.
        """
        stored = self.manifest["workload"]
        same = not replace and stored["num_neighbors"] == list(num_neighbors) and stored["batch_size"] == batch_size
        same = same and torch.equal(seeds.sort().values, self.split(stored["seeds"], part_id))
        return Workload(self.graph, self.book, part_id, seeds, num_neighbors, batch_size, replace, self.vip(part_id) if same else None)

    def _part(self, part_id: int | None) -> int:
        part_id = self.part_id if part_id is None else part_id
        if part_id is None:
            raise ValueError(
                f"{self.root} has {self.num_parts} parts and this process serves none of them: initialise torch.distributed "
                f"before salientpp.load (torchrun --nproc-per-node {self.num_parts}), or name one with part_id="
            )
        self.book.range_of(part_id)
        _check_is_there(self.root, part_id)
        return part_id

    def _array(self, name: str, dtype: str | None = None) -> Tensor:
        entry = self.manifest["files"][name]
        # Again, since the directory may have been overwritten after load: two of them must never be mixed.
        verify_file(self.root, name, entry, full=False)
        array, map_ = _open_array(self.root, name, entry)
        if map_ is not None:
            self._maps[map_] = name
        tensor = torch.from_numpy(array)
        return tensor if dtype is None else tensor.view(getattr(torch, dtype))

    def __repr__(self) -> str:
        return (
            f"PartitionedGraph({str(self.root)!r}, num_parts={self.num_parts}, part_id={self.part_id}, "
            f"num_vertices={self.num_vertices}, num_edges={self.manifest['num_edges']})"
        )


def load(
    root: str | Path, *, part_id: int | None = None, verify: str = "quick", process_group: dist.ProcessGroup | None = None
) -> PartitionedGraph:
    """Open a dataset directory; every rank calls it.

    Args:
        root: a directory that :func:`partition` wrote.
        part_id: the part to serve. None: rank r of an initialised process group serves part
            ``r // ranks_per_part``; without a group, part 0 if it is the only one.
        verify: 'quick' checks the manifest, sizes, headers and sampled checksums; 'full' reads every byte, and checks that topology, ids, seeds
            and probabilities are such.
        process_group: the ranks that serve the parts, as given to the loaders; None: the default group.

    Raises:
        DatasetError: missing, half-written, truncated, altered, of a newer format, or a copy for one host without this part.
        ValueError: the number of ranks does not fit the number of parts, or no such part; or this rank is not in the group.
    """
    if verify not in ("quick", "full"):
        raise ValueError(f"verify must be 'quick' or 'full', got {verify!r}")
    root = Path(root)
    manifest = read_manifest(root)
    there = parts_there(root)
    folders = None if there is None else {part_folder(part) for part in there}
    for name, entry in manifest["files"].items():
        folder, slash, _ = name.partition("/")
        if folders is None or not slash or folder in folders:
            verify_file(root, name, entry, full=verify == "full")
    num_parts = len(manifest["offsets"]) - 1
    if part_id is None:
        rank, world_size = group_rank(process_group)
        if world_size % num_parts == 0:
            part_id = Placement(rank, world_size, num_parts).part_id
        elif world_size > 1:
            raise ValueError(
                f"world size {world_size} does not fit {num_parts} parts of {root}: start {num_parts} ranks or a multiple "
                f"of that, or partition into {world_size} parts"
            )
    elif not 0 <= part_id < num_parts:
        raise ValueError(f"part_id must be in [0, {num_parts}), got {part_id}")
    if part_id is not None:
        _check_is_there(root, part_id)
    part = PartitionedGraph(root, manifest, part_id)
    if verify == "full":
        _check_contents(part, range(num_parts) if there is None else sorted(there & set(range(num_parts))))
    return part


def _check_contents(part: PartitionedGraph, part_ids: Iterable[int]) -> None:
    """Raise DatasetError unless the arrays hold what every step relies on: a graph, a renumbering, seeds of the parts, probabilities."""

    def expect(holds: bool, name: str, words: str) -> None:
        if not holds:
            raise DatasetError(f"{part.root / name} must hold {words}; copy it again, or partition again")

    try:
        ops.check_csc(part.graph.indptr, part.graph.indices)
    except RuntimeError as error:
        raise DatasetError(f"{part.root} holds no graph: {error}; copy indptr.npy and indices.npy again, or partition again") from None
    all_ids = torch.arange(part.num_vertices)
    expect(torch.equal(part._original_id.sort().values, all_ids), "original_id.npy", f"each of 0 to {part.num_vertices - 1} once")
    for part_id in part_ids:
        begin, end = part.book.range_of(part_id)
        for split in part.manifest["splits"]:
            ids = part.split(split, part_id)
            inside = ids.numel() == 0 or (int(ids[0]) >= begin and int(ids[-1]) < end and bool((ids.diff() > 0).all()))
            expect(inside, f"{part_folder(part_id)}/split_{split}.npy", f"ascending ids in [{begin}, {end})")
        vip = part.vip(part_id)
        expect(bool(((vip >= 0) & (vip <= 1)).all()), f"{part_folder(part_id)}/vip.npy", "probabilities")


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        aside = sorted(root.parent.glob(f".{glob.escape(root.name)}.replaced-*"))
        raise DatasetError(
            f"{root} is not a dataset directory: it has no manifest.json; write one with salientpp.partition(...) or "
            f"`salientpp partition`{f', or rename back {aside[-1]}, which a killed run was replacing' if aside else ''}"
        ) from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}); copy it again, or partition again") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid JSON ({error}); partition again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DatasetError(f"{path} does not describe a dataset directory: expected format {FORMAT!r}; partition again")
    if manifest.get("version") != VERSION:
        raise DatasetError(
            f"{path} has format version {manifest.get('version')}, this salientpp reads version {VERSION}; "
            "upgrade salientpp, or partition again"
        )
    stated = manifest.pop("checksum", None)
    try:
        if stated != _manifest_checksum(manifest):
            raise DatasetError(f"{path} was altered: its checksum does not match its contents; partition again")
        check_manifest(manifest, lambda dtype: _numpy_dtype(dtype).str)
    except RecursionError:
        raise DatasetError(f"{path} is nested too deeply; partition again") from None
    except DatasetError:
        raise
    except ValueError as error:
        raise DatasetError(f"{path} does not describe a dataset directory: {error}; partition again") from None
    return manifest


def parts_there(root: Path) -> set[int] | None:
    """The parts that a copy for one host has; None: all, it is no such copy."""
    path = root / STAGED
    try:
        parts = json.loads(path.read_text())["parts"]
        if not isinstance(parts, list) or not all(type(part) is int and part >= 0 for part in parts):
            raise ValueError(f"parts must be a list of integers >= 0, got {ascii(parts)[:200]}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{path} does not list parts ({error}); delete the directory and stage it again") from None
    return set(parts)


def _check_is_there(root: Path, part_id: int) -> None:
    there = parts_there(root)
    if there is not None and part_id not in there:
        raise DatasetError(
            f"{root} is a copy without part {part_id}, its parts are {', '.join(map(str, sorted(there))) or 'none'}; stage that part too, "
            "or open the directory that it was copied from"
        )


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify_file(root: Path, name: str, entry: dict[str, Any], *, full: bool) -> None:
    path = root / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DatasetError(f"{path} must have {entry['bytes']} bytes, got {size}; copy it again, or partition again")
        same = _sha256(path) == entry["sha256"] if full else _quick_checksum(path) == entry["quick"]
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}); copy it again, or partition again") from None
    if not same:
        raise DatasetError(f"{path} was altered: its checksum does not match the manifest; copy it again, or partition again")


def _open_array(root: Path, name: str, entry: dict[str, Any]) -> tuple[np.ndarray, mmap.mmap | None]:
    """The array, and the memory map that it lies in; an empty one has none."""
    path = root / name
    try:
        # Copy-on-write: shared and never written back, and a stray in-place write by the user's code is private to
        # it, where a read-only map would be a segmentation fault.
        array = np.lib.format.open_memmap(path, mode="c")
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise DatasetError(f"{path} cannot be opened as an array ({error}); copy it again, or partition again") from None
    if [array.dtype.str, list(array.shape)] != [entry["dtype"], entry["shape"]]:
        raise DatasetError(
            f"{path} must hold {entry['dtype']} {entry['shape']}, got {array.dtype.str} {list(array.shape)}; "
            "copy it again, or partition again"
        )
    # No copy, unless another tool wrote columns first.
    return np.ascontiguousarray(array), getattr(array, "_mmap", None)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _quick_checksum(path: Path) -> int:
    size = path.stat().st_size
    checksum = zlib.crc32(str(size).encode())
    with path.open("rb") as file:
        if size <= _QUICK_BLOCK * _QUICK_BLOCKS:
            return zlib.crc32(file.read(), checksum)
        for block in range(_QUICK_BLOCKS):
            file.seek((size - _QUICK_BLOCK) * block // (_QUICK_BLOCKS - 1))
            checksum = zlib.crc32(file.read(_QUICK_BLOCK), checksum)
    return checksum


# --- writing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attributes:
    """The attributes of a ``Data`` that go to disk."""

    node: dict[str, Tensor]
    edge: dict[str, Tensor]


def partition(
    data: Data,
    num_parts: int,
    root: str | Path,
    num_neighbors: Sequence[int] = (15, 10, 5),
    batch_size: int = 1024,
    *,
    method: str | Tensor = "metis-vip",
    split: Mapping[str, Tensor] | None = None,
    seeds: str = "train",
    tolerance: float = 0.05,
    seed: int = 0,
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> PartitionedGraph:
    """Partition a graph, order each part by VIP, and write the dataset directory ``root``.

    Args:
        data: a homogeneous ``Data`` with ``edge_index`` or ``adj_t``; its node and edge attributes that are tensors
            are stored with it. Vertices with a negative ``y`` are in no split.
        num_parts: K, the number of parts.
        root: the directory to write; its parent must exist or be creatable.
        num_neighbors, batch_size: the workload whose VIP orders the rows and is stored for the cache. Training
            with other numbers is right as well, the loader then computes what it needs.
        method: 'metis-vip' (METIS with VIP edge weights), 'metis', 'random', or the given assignment: an integer tensor [N] of parts in [0, K).
        split: name -> vertex ids or mask; None takes ``train_mask``, ``val_mask`` and ``test_mask`` of the data.
        seeds: the split that the VIP is computed for; without such a split, all vertices of the part.
        tolerance: allowed excess of a part over the mean, per balanced quantity.
        seed: of METIS or of the random assignment.
        overwrite: replace an existing dataset directory (only once the new one is complete).
        on_step: called with a short description before each step.

    Returns:
        The directory, opened.

    Raises:
        ValueError: an argument or the data is wrong; ``root`` exists.
        OSError: ``root`` cannot be written. An existing directory is then left as it was.
    """
    root = Path(root)
    fanouts = check_fanouts(num_neighbors)
    batch_size = check_batch_size(batch_size)
    _check_root_is_free(root, overwrite)
    with _temporary_beside(root) as temporary:
        on_step("reading the topology")
        graph = Graph.from_data(data)
        attributes = _collect_attributes(data, graph)
        splits = collect_splits(data, split, attributes.node.get("y"), graph.num_vertices)
        on_step(f"assigning {graph.num_vertices} vertices to {num_parts} parts")
        assigned = assign_for(
            graph,
            num_parts,
            method=method,
            splits=splits,
            seeds=splits.get(seeds),
            num_neighbors=fanouts,
            batch_size=batch_size,
            tolerance=tolerance,
            seed=seed,
        )
        on_step("computing inclusion probabilities")
        layout = lay_out(graph, assigned, splits.get(seeds), fanouts, batch_size)
        on_step("writing")
        writer = _Writer(temporary)
        _write_topology(writer, graph, layout, attributes.edge)
        _write_parts(writer, layout, attributes.node, splits)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "num_vertices": graph.num_vertices,
            "num_edges": graph.num_edges,
            "num_parts": num_parts,
            "offsets": layout.book.offsets.tolist(),
            "num_classes": _num_classes(attributes.node.get("y")),
            "node_attributes": {name: _describe(rows) for name, rows in attributes.node.items()},
            "edge_attributes": {name: _describe(rows) for name, rows in attributes.edge.items()},
            "splits": {
                name: torch.bincount(assigned.assignment[ids].long(), minlength=num_parts).tolist()
                for name, ids in splits.items()
            },
            "workload": {"num_neighbors": fanouts, "batch_size": batch_size, "seeds": seeds if seeds in splits else "all"},
            "quality": {
                "edge_cut": assigned.edge_cut,
                "edge_cut_fraction": assigned.edge_cut_fraction,
                "balance": dict(assigned.balance),
            },
            "files": writer.files,
        }
        manifest["checksum"] = _manifest_checksum(manifest)
        with (temporary / "manifest.json").open("w") as file:
            file.write(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _check_root_is_free(root, overwrite)  # again: hours may have passed
        _move_into_place(temporary, root)
    return PartitionedGraph(root, read_manifest(root), 0 if num_parts == 1 else None)


def _check_root_is_free(root: Path, overwrite: bool) -> None:
    if root.exists() and not overwrite:
        raise ValueError(f"{root} exists; pass overwrite=True to replace it, or choose another root")
    if root.exists() and not (root / "manifest.json").is_file():
        raise ValueError(f"{root} exists and is not a dataset directory, so it is not replaced; choose another root")


def _beside(root: Path, purpose: str) -> Path:
    """A new name in the directory of ``root`` (of its target, if it is a link), for a rename within one file system."""
    root = Path(os.path.realpath(root))
    # Not the process id alone: in a container it is often the same in every run, and a killed run leaves its files.
    return root.parent / f".{root.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _temporary_beside(root: Path) -> Iterator[Path]:
    """A new directory to write; on failure it is removed, with the parents that were made for it."""
    temporary, made = _beside(root, "writing"), []
    try:
        try:
            made = [parent for parent in temporary.parents if not parent.exists()]  # nearest first
            temporary.mkdir(parents=True)
        except OSError as error:
            raise type(error)(
                error.errno, f"{root} cannot be written ({error.strerror}); choose a root in a directory that you may write to"
            ) from None
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # another process may have put something there
                parent.rmdir()
        raise


def _move_into_place(temporary: Path, root: Path) -> None:
    place = Path(os.path.realpath(root))
    if not place.exists():
        temporary.rename(place)
        return
    old = _beside(root, "replaced")
    place.rename(old)
    try:
        temporary.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old)


def _collect_attributes(data: Data, graph: Graph) -> _Attributes:
    """Node and edge attributes of a ``Data``; what cannot be stored is refused rather than lost."""
    node, edge = {}, {}
    if data.get("edge_index") is not None and data.get("adj_t") is not None:
        positions_in(data.adj_t, data.edge_index, "the edges")  # only one of them is stored
    if data.get("adj_t") is not None and _has_weights(data.adj_t):
        raise ValueError(
            "data.adj_t has values other than 1, and only its topology is stored; give the graph as edge_index alone, and the "
            "values as edge_attr or edge_weight"
        )
    for name, value in data.to_dict().items():
        if name in ("edge_index", "adj_t", "num_nodes", "train_mask", "val_mask", "test_mask"):
            continue
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        is_node, is_edge = data.is_node_attr(name), data.is_edge_attr(name)
        if not (is_node or is_edge):
            if name in _OF_VERTICES + _OF_EDGES:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                of, size = ("vertex", graph.num_vertices) if name in _OF_VERTICES else ("edge", graph.num_edges)
                raise ValueError(f"data.{name} must be a tensor with one row per {of}, expected {size} rows, got {got}")
            continue  # a value of the whole graph belongs to no vertex and no batch
        if name in OWN_NAMES:
            raise ValueError(
                f"data.{name} cannot be stored under its name, by which a batch has something of its own; rename it: "
                f"data.my_{name} = data.{name}; del data.{name}"
            )
        if not isinstance(value, Tensor):
            raise ValueError(f"data.{name} must be a tensor to be stored, got {type(value).__name__}; convert or delete it")
        if value.size(0) != (graph.num_vertices if is_node else graph.num_edges):
            raise ValueError(
                f"data.{name} must have one row per {'vertex' if is_node else 'edge'} in dimension 0, expected "
                f"{graph.num_vertices if is_node else graph.num_edges}, got {value.size(0)}"
            )
        if value.is_meta:
            raise ValueError(f"data.{name} is on the device meta, without values; give it some, or delete it")
        if value.layout != torch.strided:
            raise ValueError(f"data.{name} must be dense to be stored, got layout {value.layout}; call .to_dense()")
        if "/" in name:
            raise ValueError(f"data[{name!r}] cannot be stored under its name, which has to be a file name; rename it")
        try:
            _numpy_dtype(value.dtype)
        except TypeError:
            raise ValueError(f"data.{name} has dtype {value.dtype}, which .npy files cannot hold; convert or delete it") from None
        (node if is_node else edge)[name] = value.detach().cpu().resolve_conj().resolve_neg()
    return _Attributes(node, edge)


def _has_weights(adj_t: Any) -> bool:
    values = adj_t.values() if isinstance(adj_t, Tensor) else adj_t.storage.value()
    return values is not None and bool((values != 1).any())


def collect_splits(
    data: Data, split: Mapping[str, Tensor] | None, labels: Tensor | None, num_vertices: int
) -> dict[str, Tensor]:
    """Split name -> ascending vertex ids, without the vertices whose label (or every one of several) is negative."""
    if split is None:
        split = {name: data[f"{name}_mask"] for name in ("train", "val", "test") if f"{name}_mask" in data}
        for name, mask in split.items():
            dtype = torch.as_tensor(mask).dtype
            if dtype != torch.bool:
                raise ValueError(f"data.{name}_mask must be bool, got {dtype}; use .bool(), or pass split={{{name!r}: ids}}")
    if not isinstance(split, Mapping):
        raise TypeError(f"split must be a mapping of names to vertex ids or masks, got {type(split).__name__}")
    splits = {}
    for name, chosen in split.items():
        if name == "all" or not str(name).isidentifier():
            raise ValueError(f"a split's name must be an identifier other than 'all', got {name!r}")
        try:
            chosen = torch.as_tensor(chosen).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"split {name!r} must be a bool mask or integer ids, got {type(chosen).__name__} ({error})") from None
        ids, is_mask = read_ids(chosen, num_vertices, f"split {name!r}", "a bool mask or integer ids", "must hold ids")
        ids = ids if is_mask else ids.unique()
        if labels is not None and labels.dtype.is_signed and not (labels.dtype.is_floating_point or labels.dtype.is_complex):
            known = labels[ids] >= 0
            ids = ids[known if known.dim() == 1 else known.flatten(1).any(dim=1)]
        splits[str(name)] = ids
    return splits


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype that a torch dtype is stored as; TypeError where there is none."""
    return torch.empty(0, dtype=_STORED_AS.get(dtype, dtype)).numpy().dtype


class _Writer:
    """Writes arrays piece by piece and remembers sizes and checksums."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}

    def write(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
        """Write tensors that follow one another along dimension 0."""
        stored, numpy_dtype = _STORED_AS.get(dtype, dtype), _numpy_dtype(dtype)
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        header = {"descr": np.lib.format.dtype_to_descr(numpy_dtype), "fortran_order": False, "shape": tuple(shape)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(memoryview(piece.to(dtype).contiguous().view(stored).numpy()).cast("B") if piece.numel() else b"")
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
            "quick": _quick_checksum(path),
            "dtype": numpy_dtype.str,
            "shape": list(shape),
        }

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        self.write(name, tensor.dtype, tensor.shape, [tensor])


def _write_topology(writer: _Writer, graph: Graph, layout: Layout, edge_attributes: Mapping[str, Tensor]) -> None:
    indptr, _ = relabeled_edges(graph, layout)
    writer.write_tensor("indptr.npy", indptr)
    writer.write_tensor("original_id.npy", layout.order)

    def write_edges(name: str, like: Tensor, rows_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        pieces = (rows_of(position, sources) for position, sources in relabeled_edges(graph, layout)[1])
        writer.write(name, like.dtype, like.shape, pieces)

    write_edges("indices.npy", graph.indices, lambda position, sources: sources)
    for name, rows in edge_attributes.items():
        def rows_of(position: Tensor, sources: Tensor, rows: Tensor = rows) -> Tensor:
            return rows[position if graph.edge_id is None else graph.edge_id[position]]

        write_edges(f"edge_{name}.npy", rows, rows_of)


def _write_parts(writer: _Writer, layout: Layout, node_attributes: Mapping[str, Tensor], splits: Mapping[str, Tensor]) -> None:
    in_split = {name: torch.zeros(layout.order.numel(), dtype=torch.bool) for name in splits}
    for name, ids in splits.items():
        in_split[name][ids] = True
    for part_id in range(layout.book.num_parts):
        begin, end = layout.book.range_of(part_id)
        own = layout.order[begin:end]
        for name, rows in node_attributes.items():
            chunk = max(1, _COPY_BYTES // max(1, rows.nbytes // max(1, rows.size(0))))
            writer.write(
                f"{part_folder(part_id)}/node_{name}.npy",
                rows.dtype,
                (end - begin, *rows.shape[1:]),
                (rows[ids] for ids in own.split(chunk)),
            )
        for name, mask in in_split.items():
            writer.write_tensor(f"{part_folder(part_id)}/split_{name}.npy", mask[own].nonzero().flatten() + begin)
        writer.write_tensor(f"{part_folder(part_id)}/vip.npy", layout.vip[part_id])


def _num_classes(labels: Tensor | None) -> int:
    if labels is None or labels.dim() != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex or labels.numel() == 0:
        return 0
    return max(0, int(labels.to(torch.int64).max()) + 1)  # not all integer types have a largest entry


def _describe(rows: Tensor) -> dict[str, Any]:
    return {"dtype": str(rows.dtype).removeprefix("torch."), "row_shape": list(rows.shape[1:])}
