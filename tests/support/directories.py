"""Helpers for tests of dataset directories: contents, edits of the manifest, and the check that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

import salientpp
from salientpp.store.directory import files
from salientpp.store.directory.manifest import manifest_checksum

FANOUTS, BATCH_SIZE = [3, 2], 8
SPLITS = ("train", "val", "test")


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def all_original_ids(part: salientpp.PartitionedGraph) -> Tensor:
    return part.original_id(torch.arange(part.num_vertices))


def in_user_order(part: salientpp.PartitionedGraph, name: str) -> Tensor:
    """The rows of all parts, in the user's order of vertices."""
    rows = torch.cat([part.node_rows(p)[name] for p in range(part.num_parts)])
    restored = torch.empty_like(rows)
    restored[all_original_ids(part)] = rows
    return restored


def assert_nothing_is_lost(data: Data, part: salientpp.PartitionedGraph, splits: Mapping[str, Tensor]) -> None:
    """Checks that a directory holds all of ``data``; ``splits`` maps a name to ascending original ids."""
    N, E, K = data.num_nodes, data.num_edges, part.num_parts
    assert part.num_vertices == N
    original = all_original_ids(part)
    assert torch.equal(original.sort().values, torch.arange(N)), "every vertex occurs once"
    # The parts' ranges are consecutive and cover all vertices.
    ranges = [part.book.range_of(p) for p in range(K)]
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges)][:-1] and ranges[-1][1] == N

    for name, value in data.to_dict().items():
        if name not in ("edge_index", "num_nodes", "edge_attr", *(f"{split}_mask" for split in SPLITS)):
            assert torch.equal(in_user_order(part, name), torch.as_tensor(value)), name

    graph = part.graph
    assert graph.num_edges == E
    target = torch.arange(N).repeat_interleave(graph.in_degree())
    pairs = torch.stack([original[graph.indices.long()], original[target]])
    as_keys = pairs[0] * N + pairs[1]
    assert torch.equal(as_keys.sort().values, (data.edge_index[0] * N + data.edge_index[1]).sort().values)
    if "edge_attr" in data:
        number = part.edge_rows()["edge_attr"].view(-1)
        assert torch.equal(number.sort().values, torch.arange(E)), "every edge occurs once"
        assert torch.equal(pairs, data.edge_index[:, number]), "an edge keeps its attributes"

    assert set(part.manifest["splits"]) == set(splits)
    for name, ids in splits.items():
        pieces = [part.split(name, p) for p in range(K)]
        for piece, (begin, end) in zip(pieces, ranges):
            assert piece.dtype == torch.int64 and bool((piece.diff() > 0).all())
            assert bool(((piece >= begin) & (piece < end)).all()), "a part's seeds are its own"
        assert torch.equal(original[torch.cat(pieces)].sort().values, ids), name
        assert part.manifest["splits"][name] == [piece.numel() for piece in pieces]


def ids_of(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()


def mask_splits(data: Data) -> dict[str, Tensor]:
    return {name: ids_of(data[f"{name}_mask"]) for name in SPLITS}


def edit_manifest(root: Path, change, *, checksum: bool) -> None:
    """Applies ``change`` to the parsed manifest; with ``checksum``, also updates the manifest's own checksum."""
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if checksum:
        del manifest["checksum"]
        manifest["checksum"] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))


def forge_checksums(root: Path, name: str) -> None:
    """Makes the manifest describe the current bytes of file ``name``; dtype and shape stay."""
    path = root / name
    change = {"bytes": path.stat().st_size, "sha256": files.sha256_of(path), "quick": files.quick_checksum(path)}
    edit_manifest(root, lambda manifest: manifest["files"][name].update(change), checksum=True)
