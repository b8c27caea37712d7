"""Opens a dataset directory and checks that it holds what its manifest says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from salientpp import ops
from salientpp.addresses import is_remote, local_path
from salientpp.ids import first_outside
from salientpp.ranks.members import group_rank
from salientpp.ranks.placement import Placement
from salientpp.ranks.roll import go_astray
from salientpp.sessions.opening import open_session
from salientpp.sessions.protocol import is_address
from salientpp.store.directory.description import PARTS, EdgeType, part_folder, words_of_type
from salientpp.store.directory.fetched import FetchedArrays
from salientpp.store.directory.files import DatasetError, verify_file
from salientpp.store.directory.kept_copies import copy_of_address
from salientpp.store.directory.manifest import check_is_there, check_part_id, parts_there, read_manifest
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.directory.roles import OpenedBy, checked_storage_ranks
from salientpp.suggestions import suggest_arguments


@suggest_arguments
def load(
    root: str | Path,
    *,
    part_id: int | None = None,
    verify: str = "quick",
    process_group: dist.ProcessGroup | None = None,
    storage_ranks: int = 0,
) -> PartitionedGraph:
    """Opens a dataset directory. Every rank calls it.

    Args:
        root: a directory that :func:`partition` wrote, or its address, such as ``s3://bucket/graph``. Files of an address that this rank reads are first
            copied to this host's folder of temporary files (``TMPDIR``); see :func:`copy_to_disk`. ``salientpp://host:port`` is the address of a storage
            host (``salientpp serve``). The ranks of this job then only train, and read rows from the storage hosts.
        part_id: the part to serve. None: in an initialised process group, rank r serves part ``r // ranks_per_part``. With fewer ranks than parts,
            a rank serves several parts as one (:mod:`salientpp.ranks.placement`). Without a process group, the process serves part 0 if it is the only
            part.
        verify: 'quick' checks the manifest, sizes, headers and sampled checksums. 'full' reads every byte, and also checks that topology, ids, seeds
            and probabilities are valid. If the topology is stored in parts, 'quick' leaves out the folders of parts that this process does not serve.
        process_group: the ranks that serve the parts, as given to the loaders. None: the default group.
        storage_ranks: number of ranks that only store, the last ones of the job. They hold all rows and call :func:`serve`. The other ranks train, and
            hold only copies that their caches chose. 0: every rank does both.

    Raises:
        DatasetError: the directory is missing, half-written, truncated, altered, of a newer format, or a host's copy without this part.
        ValueError: the number of ranks does not fit the number of parts, the part does not exist, or this rank is not in the group.
        StorageError: a storage host cannot be reached or refuses the session.
        OSError: an address cannot be read, or this host's disk cannot keep a file of an address or of a storage host.
        ImportError: a package that reads the address is missing.
        DifferentVersions: a storage host runs another version of this package.
    """
    if is_address(root):
        if part_id is not None or process_group is not None or storage_ranks:
            raise ValueError(
                f"{root} is the address of a storage host, which stores for all ranks of this job; leave part_id, process_group and storage_ranks out"
            )
        return _load_from_hosts(str(root))
    if verify not in ("quick", "full"):
        raise ValueError(f"verify must be 'quick' or 'full', got {verify!r}")
    if is_remote(root):
        root = copy_of_address(str(root), part_id, verify, process_group, storage_ranks)
    root = local_path(root)
    manifest = read_manifest(root)
    num_parts = manifest["num_parts"]
    if part_id is not None:
        check_part_id(part_id, num_parts)
    opened_by = OpenedBy(checked_storage_ranks(storage_ranks, part_id, process_group))
    rank, world_size = group_rank(process_group) if part_id is None else (0, 1)
    served: range | None
    if world_size > 1 or num_parts == 1:
        whole = PartitionedGraph(root, manifest, None, opened_by=opened_by)
        part, served = part_of_rank(whole, rank, world_size)
    else:
        part = PartitionedGraph(root, manifest, part_id)
        served = None if part_id is None else range(part_id, part_id + 1)
    check_files(part, served, verify)
    return part


def _load_from_hosts(address: str) -> PartitionedGraph:
    """Opens a session with storage hosts, and returns this rank's view of the graph that they serve."""
    session = open_session(address)
    try:
        arrays = FetchedArrays(session)
        opened_by = OpenedBy(len(session.hosts), session.job)
        whole = PartitionedGraph(arrays.root, read_manifest(arrays.root), None, opened_by=opened_by, arrays=arrays)
        part, _ = part_of_rank(whole, session.job.rank, session.job.size)
    except Exception as error:
        go_astray(error, session.job)  # the other ranks have opened the session, and wait for this one to make a loader
        raise
    return part


def part_of_rank(whole: PartitionedGraph, rank: int, world_size: int) -> tuple[PartitionedGraph, range]:
    """Returns the view of one of several ranks, and the parts on disk that this rank reads: those of its seeds, or those that it stores."""
    number = whole.num_storage_ranks
    try:
        placement = Placement(rank, world_size, whole.num_parts, num_storage_ranks=number)
    except ValueError as error:
        raise ValueError(f"{whole.root}: {error}") from None
    part = whole.joined(placement.own_offsets, placement.own_part)
    if number:
        _ = part.roles  # from here on the storage ranks learn how this rank's script ends
    if part.only_stores:
        return part, placement.row_parts[placement.part_id]
    return part, placement.own_parts


def check_files(part: PartitionedGraph, served: range | None, verify: str) -> None:
    """Raises DatasetError unless the directory holds the files that a process needs which reads the parts ``served``; see :func:`load`."""
    root, manifest, num_parts = part.root, part.manifest, part.manifest["num_parts"]
    there = parts_there(root)
    checked = set(range(num_parts)) if there is None else there & set(range(num_parts))
    if part.topology == PARTS and verify == "quick" and served is not None:
        checked &= set(served)
    folders = {part_folder(part_id) for part_id in checked}
    for name, entry in manifest["files"].items():
        folder, slash, _ = name.partition("/")
        if not slash or folder in folders:
            verify_file(root, name, entry, full=verify == "full")
    for part_id in served or ():
        check_is_there(root, part_id)
    if verify == "full":
        _check_contents(part.whole, sorted(checked))


def _check_contents(part: PartitionedGraph, part_ids: Sequence[int]) -> None:
    """Raises DatasetError unless the arrays are valid.

    Each topology must be a graph, and the ids must be a permutation. Seeds must belong to their parts, and VIP values must lie in [0, 1].
    """

    def expect(holds: bool, name: str, words: str) -> None:
        if not holds:
            raise DatasetError(f"{part.root / name} must hold {words}; copy it again, or partition again")

    def expect_inside(own: Tensor, name: str, ids: Tensor) -> None:
        begin, end = (int(own[0]), int(own[-1]) + 1) if own.numel() else (0, 0)
        inside = not ids.numel() or bool((ids[0] >= begin) & (ids[-1] < end) & (ids[1:] > ids[:-1]).all())
        expect(inside, name, f"ascending ids in [{begin}, {end})")

    described = part.description
    for edges in described.edge_types:
        for piece in part_ids if described.topology == PARTS else range(1):
            _check_piece(part, edges, piece)
        for part_id in part_ids:
            own = part.edge_split("all", part_id, edges.name)
            for split in edges.splits:
                expect_inside(own, edges.split_file(split, part_id), part.edge_split(split, part_id, edges.name))
    for vertices in described.node_types:
        name, size = vertices.name, vertices.num_vertices
        ids = torch.arange(size, device="cpu")
        is_renumbering = torch.equal(part.original_id(ids, name).sort().values, ids)
        expect(is_renumbering, vertices.original_id_file, f"each of 0 to {size - 1} once" if size else "nothing")
        for part_id in part_ids:
            own = part.split("all", part_id, name)
            for split in vertices.splits:
                expect_inside(own, vertices.split_file(split, part_id), part.split(split, part_id, name))
            vip = part.vip(part_id, name)
            expect(bool(((vip >= 0) & (vip <= 1)).all()), vertices.vip_file(part_id), "probabilities")
        if vertices.keys is not None:
            expect(part.keys_are_valid(name, part_ids), vertices.key_hashes_file, "the hashes of the keys")
    if described.time_attr is not None:
        for vertices in described.timed_vertices:
            whole = part.arrays.open(vertices.time_file(described.time_attr))
            for part_id in part_ids:
                begin, end = vertices.row_book.range_of(0 if vertices.replicated else part_id)
                file = vertices.rows_file(described.time_attr, part_id)
                same = torch.equal(whole[begin:end], part.arrays.open(file))
                expect(same, vertices.time_file(described.time_attr), f"what {file} holds")
        try:
            if described.topology == PARTS:
                for part_id in part_ids:
                    part.part_graph(described.time_attr, part_id=part_id)
            else:
                part.typed_graph(described.time_attr)
        except ValueError as error:
            raise DatasetError(f"{error}; copy it again, or partition again") from None


def _check_piece(part: PartitionedGraph, edges: EdgeType, piece: int) -> None:
    """Raises DatasetError unless the files ``piece`` of an edge type hold valid neighbour lists."""
    indptr, indices = (edges.indptr_file(piece), edges.indices_file(piece))
    num_sources = part.description.vertices(edges.source).num_vertices
    try:
        _check_lists(part.arrays.open(indptr), part.arrays.open(indices), num_sources)
    except RuntimeError as error:
        raise DatasetError(
            f"{part.root} holds no graph{words_of_type(edges.name)}: {error}; copy {indptr} and {indices} again, or partition again"
        ) from None


def _check_lists(indptr: Tensor, indices: Tensor, num_sources: int) -> None:
    """Raises RuntimeError unless ``indptr`` and ``indices`` are valid neighbour lists, with ids in ``[0, num_sources)``."""
    num_targets = indptr.numel() - 1
    # The kernel takes a single number of vertices, so empty lists are added up to the larger of both numbers.
    more = indptr[-1:].expand(max(0, num_sources - num_targets))
    ops.check_csc(torch.cat([indptr, more]), indices)
    at = first_outside(indices, num_sources)
    if at is not None:
        raise RuntimeError(f"indices[{at}] must be in [0, {num_sources}), got {int(indices[at])}")
