"""How is a graph partitioned and written as a dataset directory?"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.graph.csc import Graph
from salientpp.plan.layout import Layout, assign_for, lay_out, relabeled_edges
from salientpp.plan.vip import check_batch_size, check_fanouts
from salientpp.store.directory.contents import collect_attributes, collect_splits, describe, num_classes_of
from salientpp.store.directory.files import STORED_AS, numpy_dtype, quick_checksum, sha256_of
from salientpp.store.directory.manifest import FORMAT, VERSION, manifest_checksum, part_folder, read_manifest
from salientpp.store.directory.opened import PartitionedGraph

_COPY_BYTES = 64 * 2**20


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
        split: name -> vertex ids or mask; None takes ``train_mask``, ``train_idx`` or ``train_index`` of the data, and so
            for ``val`` and ``test``.
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
        attributes = collect_attributes(data, graph)
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
            "num_classes": num_classes_of(attributes.node.get("y")),
            "node_attributes": {name: describe(rows) for name, rows in attributes.node.items()},
            "edge_attributes": {name: describe(rows) for name, rows in attributes.edge.items()},
            "splits": {
                name: torch.bincount(assigned.assignment[ids].long(), minlength=num_parts).tolist()
                for name, ids in splits.items()
            },
            "workload": {
                "num_neighbors": fanouts,
                "batch_size": batch_size,
                "seeds": seeds if seeds in splits else "all",
            },
            "quality": {
                "edge_cut": assigned.edge_cut,
                "edge_cut_fraction": assigned.edge_cut_fraction,
                "balance": dict(assigned.balance),
            },
            "files": writer.files,
        }
        manifest["checksum"] = manifest_checksum(manifest)
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
                error.errno,
                f"{root} cannot be written ({error.strerror}); choose a root in a directory that you may write to",
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


class _Writer:
    """Writes arrays piece by piece and remembers sizes and checksums."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}

    def write(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
        """Write tensors that follow one another along dimension 0."""
        stored, on_disk = STORED_AS.get(dtype, dtype), numpy_dtype(dtype)
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        header = {"descr": np.lib.format.dtype_to_descr(on_disk), "fortran_order": False, "shape": tuple(shape)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(piece.to(dtype).contiguous().view(stored).numpy().data.cast("B") if piece.numel() else b"")
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
            "quick": quick_checksum(path),
            "dtype": on_disk.str,
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


def _write_parts(
    writer: _Writer, layout: Layout, node_attributes: Mapping[str, Tensor], splits: Mapping[str, Tensor]
) -> None:
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
