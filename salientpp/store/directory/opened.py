"""How is a partitioned graph on disk opened, and what does one part see of it?"""

from __future__ import annotations

import hashlib
import mmap
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from salientpp import ops
from salientpp.comm import group_rank
from salientpp.graph.csc import Graph
from salientpp.plan.cache import Workload
from salientpp.plan.partition_book import PartitionBook
from salientpp.plan.placement import Placement
from salientpp.processes import lazy
from salientpp.store.directory.files import DatasetError, open_array, verify_file
from salientpp.store.directory.manifest import check_is_there, part_folder, parts_there, read_manifest


class PartitionedGraph:
    """A partitioned graph on disk, seen from one part.

    Made by :func:`load`. Arrays are memory maps, opened when first used; a copy, or a pickle in another process, opens its own. Any process may look at
    any part by its number; a loader needs a rank for every part.

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
        self._maps: weakref.WeakKeyDictionary[mmap.mmap, str] = (
            weakref.WeakKeyDictionary()
        )  # those in use, and their files
        self._is_made = True

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there. PyG's names get words.
        text = f"a {type(self).__name__} has no {name!r}"
        if not name.startswith("_") and "manifest" in self.__dict__:
            split = name.removesuffix("_mask")
            if name in self.manifest["node_attributes"]:
                text += (
                    f": its rows lie in parts. part.node_rows(part_id)[{name!r}] has those of a part, part.take({name!r}, n_id) those of any "
                    "vertices, and batches of a NeighborLoader carry them"
                )
            elif split in self.manifest["splits"]:
                text += (
                    f": it became a split, part.split({split!r}, part_id), or input_nodes={split!r} of a NeighborLoader"
                )
            elif name == "edge_index":
                text += ": part.graph has the edges, as indptr and indices"
        raise AttributeError(text)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__ and name not in self.__dict__:
            raise AttributeError(
                f"{name!r} cannot be set on a {type(self).__name__}: batches carry what is on disk. Set it on the data and partition that again, or pass "
                f"rows={{{name!r}: ...}} to the NeighborLoader"
            )
        super().__setattr__(name, value)

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

    @lazy
    def graph(self) -> Graph:
        """The whole topology; validated when it was written, so not read again here."""
        return Graph.trusted(self._array("indptr.npy"), self._array("indices.npy"))

    @lazy
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

    def take(self, name: str, n_id: Tensor) -> Tensor:
        """Rows [n, ...] of a node attribute for global ids int64 [n] of whatever parts, read from their files: for a look, without ranks."""
        if name not in self.manifest["node_attributes"]:
            raise ValueError(
                f"{self.root} has the node attributes {', '.join(self.manifest['node_attributes'])}, got {name!r}"
            )
        n_id = n_id.cpu()
        owner = self.book.owner(n_id)
        rows: Tensor | None = None
        for part_id in owner.unique().tolist() or [0]:
            own, at = self.node_rows(part_id)[name], owner == part_id
            rows = own.new_empty((n_id.numel(), *own.shape[1:])) if rows is None else rows
            rows[at] = own[n_id[at] - self.book.range_of(part_id)[0]]
        assert rows is not None  # there is a part
        return rows

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

    def workload(
        self, part_id: int, seeds: Tensor, num_neighbors: Sequence[int], batch_size: int, replace: bool = False
    ) -> Workload:
        """What policies rank by for a part's batches of these seeds; it knows the stored :meth:`vip` where that is of this very workload.

        The loader and the analysis both plan by it, so that they cache the same rows.
        """
        stored = self.manifest["workload"]
        same = not replace and stored["num_neighbors"] == list(num_neighbors) and stored["batch_size"] == batch_size
        same = same and torch.equal(seeds.sort().values, self.split(stored["seeds"], part_id))
        return Workload(
            self.graph,
            self.book,
            part_id,
            seeds,
            num_neighbors,
            batch_size,
            replace,
            self.vip(part_id) if same else None,
        )

    def _part(self, part_id: int | None) -> int:
        part_id = self.part_id if part_id is None else part_id
        if part_id is None:
            raise ValueError(
                f"{self.root} has {self.num_parts} parts and this process serves none of them: to look at one, name it with part_id=; to train, "
                f"initialise torch.distributed before salientpp.load (torchrun --nproc-per-node {self.num_parts})"
            )
        self.book.range_of(part_id)
        check_is_there(self.root, part_id)
        return part_id

    def _array(self, name: str, dtype: str | None = None) -> Tensor:
        entry = self.manifest["files"][name]
        # Again, since the directory may have been overwritten after load: two of them must never be mixed.
        verify_file(self.root, name, entry, full=False)
        array, map_ = open_array(self.root, name, entry)
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
    root: str | Path,
    *,
    part_id: int | None = None,
    verify: str = "quick",
    process_group: dist.ProcessGroup | None = None,
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
        check_is_there(root, part_id)
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
        raise DatasetError(
            f"{part.root} holds no graph: {error}; copy indptr.npy and indices.npy again, or partition again"
        ) from None
    all_ids = torch.arange(part.num_vertices)
    expect(
        torch.equal(part._original_id.sort().values, all_ids),
        "original_id.npy",
        f"each of 0 to {part.num_vertices - 1} once",
    )
    for part_id in part_ids:
        begin, end = part.book.range_of(part_id)
        for split in part.manifest["splits"]:
            ids = part.split(split, part_id)
            inside = ids.numel() == 0 or (int(ids[0]) >= begin and int(ids[-1]) < end and bool((ids.diff() > 0).all()))
            expect(inside, f"{part_folder(part_id)}/split_{split}.npy", f"ascending ids in [{begin}, {end})")
        vip = part.vip(part_id)
        expect(bool(((vip >= 0) & (vip <= 1)).all()), f"{part_folder(part_id)}/vip.npy", "probabilities")
