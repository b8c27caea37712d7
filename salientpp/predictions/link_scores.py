"""The best links of two embeddings over all ranks, and their Parquet files under the keys of both ends.

A rank keeps its sources. The targets of all ranks pass by in blocks, and each rank keeps the k best for each of its sources
(:mod:`salientpp.predictions.best_links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.arguments import as_amount, as_integer
from salientpp.predictions.best_links import NONE, Excluded, LinkScores, add_candidates
from salientpp.predictions.outputs import free_name
from salientpp.predictions.parquet_writer import GROUP_ROWS
from salientpp.predictions.rank_files import RankFile, comm_of
from salientpp.predictions.table_keys import VertexKeys, keys_of
from salientpp.ranks.comm import DEFAULT_TIMEOUT, Comm
from salientpp.ranks.facts import check_same
from salientpp.ranks.roll import before_roll_call
from salientpp.store.directory.of_trainers import of_trainers
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.suggestions import suggest_arguments

if TYPE_CHECKING:
    import pyarrow as pa

#: Most sources of a block. More make the product no faster.
_BLOCK = 1024

#: Bytes of each score of a block: the score, and its share of the copies of rows with equal scores.
_SCORE_BYTES = 8

#: Bytes of each place of a source among the best while candidates are added: ids and scores, twice, and the orders in which they are sorted.
_PLACE_BYTES = 96


@suggest_arguments
def link_scores(
    data: PartitionedGraph | Data | HeteroData,
    sources: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
    k: int,
    *,
    types: tuple[str | None, str | None] = (None, None),
    exclude: Tensor | None = None,
    out: str | PathLike[str] | None = None,
    memory: int | str = "1GiB",
    device: torch.device | str = "cpu",
    process_group: Any = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
) -> LinkScores:
    """Finds the k targets with the largest scores for each source, among the targets of all ranks.

    The score is the inner product of the two rows, in float32. Normalise the rows first for cosine similarity. The result is exact: every pair is
    scored, in blocks. Among equal scores, the target with the smaller id comes first. On several ranks the call is collective.

    Args:
        data: the graph: the result of :func:`salientpp.load`, a ``Data`` or a ``HeteroData``.
        sources: ids of this rank's sources, integers [n], and their rows [n, d].
        targets: ids of this rank's targets, integers [m], and their rows [m, d]. Each target is given on one rank.
        k: number of targets for each source, at least 1.
        types: vertex types of sources and targets, if types have names. If they are equal, a vertex is no target of itself.
        exclude: source and target ids of pairs that are no candidates, such as known links, integers [2, p]. A rank needs the pairs of its own sources.
        out: a folder or an address, as for :class:`~salientpp.PredictionWriter`. Its files have a row for each link: the key columns of the source and of
            the target, and ``score``. If both types have a key column of the same name, the prefixes ``source_`` and ``target_`` tell them apart. None:
            nothing is written.
        memory: most bytes of blocks, a number or text such as ``"2GiB"``. The result comes on top.
        device: device of the products.
        process_group, timeout: as in :class:`~salientpp.PredictionWriter`.

    Returns:
        an object with ``source`` int64 [n], ``target`` int64 [n, k] and ``score`` float32 [n, k], the best target first. A target is -1, and its score
        -inf, if fewer than k remain. ``links`` has source, target and score of each link, [m] each.

    Raises:
        ValueError, TypeError: an argument is wrong. Every rank raises it.
        OSError: a file cannot be written.
        RuntimeError: another rank has failed.
    """
    with before_roll_call():
        data, process_group = of_trainers(data, process_group)
        if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != 2:
            raise TypeError(
                f"types must be the vertex types of sources and targets, such as ('user', 'item'), got {types!r}"
            )
        keys = (keys_of(data, types[0]), keys_of(data, types[1]))
    comm = comm_of(data, process_group, timeout)
    with comm.together("score links") as told:
        problem = _Problem.of(sources, targets, k, keys, exclude, memory, torch.device(device))
        told.mine = {
            "k": problem.k, "width": problem.width, "types": list(types), "writes": out is not None,
            "targets": len(problem.target_ids), "largest": [_largest(problem.sources), _largest(problem.targets)],
        }  # fmt: skip
    check_same(
        [{name: facts[name] for name in ("k", "width", "types", "writes")} for facts in told.everyone],
        comm.of,
        "score links with",
        advice="pass the same k, the same types, out= or none, and rows of one width, on every rank",
    )
    _check_range([facts["largest"] for facts in told.everyone], problem.width)
    _check_distinct(problem.target_ids, keys[1].num_vertices, comm)
    file = None if out is None else RankFile(out, comm)
    try:
        with comm.reporting("score links"):
            best = _best(problem, comm, [facts["targets"] for facts in told.everyone])
    except BaseException:
        if file is not None:
            file.discard()
        raise
    if file is not None:
        _write(file, best, keys)
    return best


@dataclass(frozen=True, eq=False)
class _Problem:
    """Checked arguments of one rank.

    Attributes:
        source_ids, target_ids: int64 [n] and [m]; the targets ascend.
        sources, targets: their rows, [n, d] and [m, d], float32 on the CPU.
        k: number of targets for each source.
        excluded: pairs that are no candidates.
        bytes: most bytes of blocks.
        device: device of the products.
    """

    source_ids: Tensor
    sources: Tensor
    target_ids: Tensor
    targets: Tensor
    k: int
    excluded: Excluded
    bytes: int
    device: torch.device

    @property
    def width(self) -> int:
        return self.sources.size(1)

    @classmethod
    def of(
        cls, sources: Any, targets: Any, k: Any, keys: tuple[VertexKeys, VertexKeys], exclude: Any, memory: Any, device: torch.device
    ) -> _Problem:  # fmt: skip
        """Checks the arguments of :func:`link_scores`. Raises ValueError or TypeError."""
        source_ids, rows = _end(sources, "sources", keys[0])
        target_ids, target_rows = _end(targets, "targets", keys[1])
        if rows.size(1) != target_rows.size(1):
            raise ValueError(
                f"rows of sources and targets must have equally many columns, got {rows.size(1)} and {target_rows.size(1)}"
            )
        number, most = as_integer(k), as_amount(memory)
        if number is None or number < 1:
            raise ValueError(f"k must be an integer >= 1, got {k!r}")
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"memory must be a number of bytes or text such as '2GiB', got {memory!r}")
        target_ids, order = torch.sort(target_ids)
        pairs = _pairs(exclude, source_ids, keys)
        return cls(
            source_ids, rows, target_ids, target_rows[order], number, Excluded.of(pairs, source_ids), most, device
        )


def _end(given: Any, name: str, keys: VertexKeys) -> tuple[Tensor, Tensor]:
    """Returns the ids and rows of sources or targets: int64 [n], and float32 [n, d] on the CPU."""
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(each, Tensor) for each in given)
    if not is_pair:
        raise TypeError(f"{name} must be a pair (ids, rows) of tensors, got {type(given).__name__}")
    ids, rows = (each.detach().cpu() for each in given)
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids of {name} must be integers [n], got {ids.dtype} {list(ids.shape)}")
    if rows.dim() != 2 or len(rows) != len(ids) or not rows.is_floating_point():
        raise ValueError(
            f"rows of {name} must be floating-point numbers [{len(ids)}, d], got {rows.dtype} {list(rows.shape)}"
        )
    rows = rows.to(torch.float32)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"rows of {name} must be finite, but some have NaN, or infinity in float32")
    ids = ids.to(torch.int64)
    keys.check(ids, f"{name}", f"pass ids of {keys.in_words}")
    if twice := _repeated(torch.sort(ids).values):
        raise ValueError(f"{name} must have each id once, but {twice[0]} comes twice; leave one out")
    return ids, rows


def _largest(rows: Tensor) -> float:
    """Returns the largest absolute value of finite rows."""
    return max(abs(float(each)) for each in rows.aminmax()) if rows.numel() else 0.0


def _check_range(largest: Sequence[Sequence[float]], width: int) -> None:
    """Raises ValueError if a score may be too large for float32. ``largest`` has the largest values of sources and of targets of each rank."""
    source, target = (max(values) for values in zip(*largest))
    if source * target * width > torch.finfo(torch.float32).max:
        raise ValueError(
            f"scores must be finite in float32, but rows of sources reach {source:g}, and rows of targets {target:g}; scale or normalise the rows"
        )


def _check_distinct(target_ids: Tensor, num_vertices: int, comm: Comm) -> None:
    """Raises ValueError if a target is given on two ranks. Collective. Each rank looks at a range of ids. ``target_ids`` [m] ascend."""
    bounds = torch.arange(1, comm.size, device="cpu") * num_vertices // comm.size
    ends = [0, *torch.searchsorted(target_ids, bounds).tolist(), len(target_ids)]
    sent = [last - first for first, last in pairwise(ends)]
    arriving = [numbers[comm.rank] for numbers in comm.gather_numbers(sent)]
    twice = _repeated(torch.sort(comm.all_to_all(target_ids, sent, arriving).wait()).values) or [NONE]
    for (id_,) in comm.gather_numbers(twice):
        if id_ != NONE:
            raise ValueError(
                f"each target must be given on one rank, but {id_} is given on two; pass the targets of this rank's part"
            )


def _pairs(exclude: Any, source_ids: Tensor, keys: tuple[VertexKeys, VertexKeys]) -> Tensor:
    """Returns the pairs that are no candidates, int64 [2, p]: the given ones, and each vertex with itself if both types are the same."""
    none = torch.empty((2, 0), dtype=torch.int64, device="cpu")
    if exclude is None:
        exclude = none
    is_pairs = isinstance(exclude, Tensor) and exclude.dim() == 2 and len(exclude) == 2
    if not is_pairs or exclude.is_floating_point() or exclude.dtype == torch.bool:
        form = f"{exclude.dtype} {list(exclude.shape)}" if isinstance(exclude, Tensor) else type(exclude).__name__
        raise TypeError(f"exclude must be integers [2, p] with ids of sources and targets, got {form}")
    given = exclude.detach().to("cpu", torch.int64)
    for ids, of in zip(given, keys):
        of.check(ids, "exclude", "pass ids of sources, then ids of targets")
    own = source_ids.expand(2, -1) if keys[0].type_ == keys[1].type_ else none
    return torch.cat([given, own], dim=1)


def _best(problem: _Problem, comm: Comm, numbers: Sequence[int]) -> LinkScores:
    """Finds the best targets of this rank's sources. Collective. ``numbers``: number of targets of each rank."""
    n, k, d = len(problem.source_ids), problem.k, problem.width
    best = LinkScores(
        problem.source_ids,
        torch.full((n, k), NONE, dtype=torch.int64, device="cpu"),
        torch.full((n, k), -torch.inf, dtype=torch.float32, device="cpu"),
    )
    # All ranks need blocks of the same size.
    least = min(each for (each,) in comm.gather_numbers([problem.bytes]))
    # A target's row is held as sent to each rank, as received, and in order.
    row_bytes = (8 + 4 * d) * 3 + _SCORE_BYTES * min(_BLOCK, 64)
    each = max(1, least // 2 // row_bytes // comm.size)
    source_bytes = _SCORE_BYTES * each * comm.size + 4 * d + _PLACE_BYTES * k
    rows_of_block = max(1, min(_BLOCK, least // 2 // source_bytes))
    for begin in range(0, max(numbers), each):
        counts = [max(0, min(each, number - begin)) for number in numbers]
        ids, rows = _gathered(problem, comm, begin, counts)
        for first in range(0, n, rows_of_block):
            here = problem.sources[first : first + rows_of_block].to(problem.device)
            scores = here @ rows.T
            problem.excluded.mark(scores, first, ids)
            add_candidates(best, first, scores, ids)
    return best


def _gathered(problem: _Problem, comm: Comm, begin: int, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Gathers a block of targets from each rank: ids [t], ascending, and rows [t, d] on the device. Collective."""
    here = slice(begin, begin + counts[comm.rank])
    found = []
    for own in problem.target_ids[here], problem.targets[here]:
        sent = own.repeat(comm.size, *[1] * (own.dim() - 1))
        found.append(comm.all_to_all(sent, [len(own)] * comm.size, counts).wait())
    ids, order = torch.sort(found[0])
    return ids, found[1][order].to(problem.device)


def _repeated(ascending: Tensor) -> list[int]:
    """Returns the first id that comes twice among ids in ascending order, or an empty list."""
    return ascending[1:][ascending[1:] == ascending[:-1]][:1].tolist()


def _write(file: RankFile, best: LinkScores, keys: tuple[VertexKeys, VertexKeys]) -> None:
    """Writes the links of this rank, in row groups of bounded size. Collective."""
    links = best.links

    def write_rest() -> None:
        for first in range(0, len(links[0]), GROUP_ROWS):
            file.append(_table(keys, *(each[first : first + GROUP_ROWS] for each in links)))

    file.end(_table(keys, *(each[:0] for each in links)).schema, write_rest)


def _table(keys: tuple[VertexKeys, VertexKeys], source: Tensor, target: Tensor, score: Tensor) -> pa.Table:
    """Returns links as a table: the key columns of both ends, and the scores."""
    import pyarrow as pa

    ends = [keys[0].read(source), keys[1].read(target)]
    if set(ends[0].column_names) & set(ends[1].column_names):
        ends = [
            end.rename_columns([f"{prefix}_{name}" for name in end.column_names])
            for prefix, end in zip(("source", "target"), ends)
        ]
    names = [name for end in ends for name in end.column_names]
    columns = [column for end in ends for column in end.columns]
    return pa.table([*columns, pa.array(score.numpy())], names=[*names, free_name("score", names)])
