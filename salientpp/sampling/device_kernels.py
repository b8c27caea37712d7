"""Triton kernels of :mod:`salientpp.sampling.device_draw`. Only code that runs them imports this module, because it needs Triton.

A hop has numbered *slots*, one for each neighbour that a vertex may draw, vertex after vertex. A slot holds a position in the lists, or -1 if it is not
used. One kernel draws positions. The next one marks, in a table with an entry per vertex of the graph, the first slot that holds each source. From these marks
the last kernels number the new vertices in order of discovery, and write the edges.

The draws use the integer arithmetic of ``csrc/random.h`` and ``csrc/sampling/uniform_draw.h``, so they are the draws of the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.standard import _elementwise_max

#: Table entry of a vertex that the batch does not hold.
UNSEEN = 2**31 - 1
#: Added to the number of a slot that is written to the table. Smaller entries are local ids, so ids and slots must be smaller than this number.
FIRST_MARK = 2**30
#: Largest fanout. A program keeps the earlier draws of its vertices in registers.
MOST_DRAWS = 1024

#: Number of slots that one program handles.
_BLOCK = 1024
#: One program draws for at most this number of vertices, and has at most this number of slots. With up to 32 slots per vertex, a thread has all slots of a
#: vertex in its registers.
_VERTICES, _DRAWS = 128, 4096

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIELD = tl.constexpr(0xD1342543DE82EF95)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOW_HALF = tl.constexpr(0xFFFFFFFF)
_MARK = tl.constexpr(FIRST_MARK)


# --- draws ------------------------------------------------------------------------------------------------


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]  # Triton reads the signature
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _any(flags):  # type: ignore[no-untyped-def]
    return tl.reduce(flags.to(tl.int32), 0, _elementwise_max) > 0


@triton.jit
def _upper_half(value, bound):  # type: ignore[no-untyped-def]
    """Returns the upper 64 bits of ``value * bound``, from 32-bit factors: ``bound`` is below 2^32."""
    return ((value >> 32) * bound + (((value & _LOW_HALF) * bound) >> 32)) >> 32


@triton.jit
def _candidates_with_rejections(  # type: ignore[no-untyped-def]
    stream, first_bound, fanout, REPLACE: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    """Draws one after the other, because a rejected draw moves all later draws of its vertex."""
    row = tl.arange(0, PLACES)[:, None]
    candidate = tl.full([PLACES, BLOCK], 0, tl.int32)
    state, k = stream, 0
    while k < fanout:
        bound = (first_bound if REPLACE else first_bound + k).to(tl.uint32).to(tl.uint64)
        threshold = (0 - bound) % bound
        state += _GOLDEN
        value = _mix(state)
        rejected = value * bound < threshold
        while _any(rejected):
            state = tl.where(rejected, state + _GOLDEN, state)
            value = _mix(state)
            rejected = value * bound < threshold
        drawn = _upper_half(value, bound).to(tl.int32)
        candidate = tl.where(row == k, drawn[None, :], candidate)
        k += 1
    return candidate


@triton.jit(do_not_specialize=["size", "fanout", "key", "hop"])
def _draw(  # type: ignore[no-untyped-def]
    frontier, indptr, position, size, fanout, key: tl.int64, hop,
    REPLACE: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    vertex = tl.load(frontier + at, mask=inside, other=0)
    begin = tl.load(indptr + vertex, mask=inside, other=0)
    degree = (tl.load(indptr + vertex + 1, mask=inside, other=0) - begin).to(tl.int32)
    if REPLACE:
        count = tl.where(degree == 0, 0, fanout)
        first_bound = tl.maximum(degree, 1)
    else:
        count = tl.minimum(degree, fanout)
        first_bound = degree - count + 1
    hop_key = _mix(_mix(key.to(tl.uint64) + _GOLDEN) ^ (hop.to(tl.uint64) * _FIELD + _GOLDEN))
    stream = _mix(hop_key ^ (vertex.to(tl.uint64) * _GOLDEN))

    # All draws of a vertex at once, as if none were rejected.
    row = tl.arange(0, PLACES)[:, None]
    value = _mix(stream[None, :] + (row + 1).to(tl.uint64) * _GOLDEN)
    last = (first_bound - 1)[None, :] + row
    bound = (first_bound[None, :] if REPLACE else last + 1).to(tl.uint32).to(tl.uint64)
    candidate = _upper_half(value, bound).to(tl.int32)
    # Lemire's method rejects about one draw in 2^64 / degree, and never one whose lower half is at least the bound.
    if _any(_any(value * bound < bound)):
        candidate = _candidates_with_rejections(stream, first_bound, fanout, REPLACE, PLACES, BLOCK)

    if REPLACE:
        place = candidate
    else:
        # Floyd's algorithm: if an earlier draw of the vertex has the place, the draw takes the last place of its range.
        is_taken = tl.full([PLACES, BLOCK], 0, tl.int1)
        k = 0
        while k < fanout - 1:
            drawn = tl.reduce(tl.where(row == k, tl.where(is_taken, last, candidate), 0), 0, _elementwise_max)
            is_taken = is_taken | ((row > k) & (candidate == drawn[None, :]))
            k += 1
        place = tl.where(is_taken, last, candidate)
        # A vertex that takes all its neighbours takes them in order.
        place = tl.where((count == degree)[None, :], row, place)
    drawn = tl.where(row < count[None, :], begin[None, :] + place, -1).to(position.dtype.element_ty)
    tl.store(position + at[None, :] * fanout + row, drawn, mask=inside[None, :] & (row < fanout))


@triton.jit(do_not_specialize=["size"])
def _read_lists(frontier, indptr, begin, degree, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    vertex = tl.load(frontier + at, mask=inside, other=0)
    first = tl.load(indptr + vertex, mask=inside, other=0)
    last = tl.load(indptr + vertex + 1, mask=inside, other=0)
    tl.store(begin + at, first, mask=inside)
    tl.store(degree + at, last - first, mask=inside)


# --- new vertices, and edges ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_slots"])
def _mark(position, lists, source, table, num_slots, LINKED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(position + slot, mask=slot < num_slots, other=-1)
    used = at >= 0
    vertex = tl.load(lists + at, mask=used, other=0)
    if LINKED:
        vertex = vertex & _LOW_HALF
    tl.store(source + slot, vertex.to(source.dtype.element_ty), mask=used)
    # Local ids are smaller than marks, so vertices of earlier hops keep their ids.
    tl.atomic_min(table + vertex, slot + _MARK, mask=used, sem="relaxed")


@triton.jit(do_not_specialize=["num_slots"])
def _flag(position, source, table, flags, num_slots, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    used = tl.load(position + slot, mask=inside, other=-1) >= 0
    vertex = tl.load(source + slot, mask=used, other=0)
    is_first = tl.load(table + vertex, mask=used, other=0) == slot + _MARK
    tl.store(flags + slot, (used.to(tl.int64) << 32) + is_first.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "num_edges", "first_target", "fanout", "num_found"])
def _finish(  # type: ignore[no-untyped-def]
    position, source, table, sums, owner, ids, new, edges, num_slots, num_edges, first_target, fanout, num_found,
    HAS_OWNER: tl.constexpr, LINKED: tl.constexpr, HAS_ID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(position + slot, mask=slot < num_slots, other=-1).to(tl.int64)
    used = at >= 0
    vertex = tl.load(source + slot, mask=used, other=0).to(tl.int64)
    entry = tl.load(table + vertex, mask=used, other=0)
    # Another program may already have replaced a mark by the local id. Either gives the same local id.
    is_mark = used & (entry >= _MARK)
    first_slot = entry - _MARK
    rank = (tl.load(sums + first_slot, mask=is_mark, other=1) & _LOW_HALF).to(tl.int32) - 1
    local = tl.where(is_mark, num_found + rank, entry)
    is_first = is_mark & (first_slot == slot)
    tl.store(new + rank, vertex, mask=is_first)
    tl.store(table + vertex, local, mask=is_first)
    if HAS_OWNER:
        target = tl.load(owner + slot, mask=used, other=0)
    else:
        target = slot // fanout
    if LINKED:
        number = tl.load(ids + at, mask=used, other=0) >> 32
    elif HAS_ID:
        number = tl.load(ids + at, mask=used, other=0)
    else:
        number = at
    edge = edges + (tl.load(sums + slot, mask=used, other=0) >> 32) - 1
    size = num_edges.to(tl.int64)
    tl.store(edge, local.to(tl.int64), mask=used)
    tl.store(edge + size, (first_target + target).to(tl.int64), mask=used)
    tl.store(edge + 2 * size, number, mask=used)


# --- launches ---------------------------------------------------------------------------------------------


def draw(frontier: Tensor, indptr: Tensor, position: Tensor, fanout: int, key: int, hop: int, replace: bool) -> None:
    """Draws neighbours uniformly for all vertices of a hop, and writes the positions of the drawn edges.

    Args:
        frontier: int64 [n], the vertices that draw.
        indptr: int64 [N + 1].
        position: int32 or int64 [n * fanout], is written: positions of edges in the graph's lists, ``fanout`` slots per vertex, -1 in unused slots.
        fanout: 1 to ``MOST_DRAWS``.
        key: signed 64-bit key of the batch.
    """
    places = triton.next_power_of_2(fanout)
    block = min(_VERTICES, _DRAWS // places)
    _draw[(triton.cdiv(frontier.numel(), block),)](
        frontier, indptr, position, frontier.numel(), fanout, key, hop,
        REPLACE=replace, PLACES=places, BLOCK=block,
    )  # fmt: skip


def read_lists(frontier: Tensor, indptr: Tensor, begin: Tensor, degree: Tensor) -> None:
    """Writes the first positions (``begin``) and the lengths (``degree``) of the vertices' lists, int64 [n] each."""
    _read_lists[(triton.cdiv(frontier.numel(), _BLOCK),)](
        frontier, indptr, begin, degree, frontier.numel(), BLOCK=_BLOCK
    )


def mark(position: Tensor, lists: Tensor, is_linked: bool, source: Tensor, table: Tensor) -> None:
    """Writes the source of each used slot. In ``table`` int32 [N], it marks the first slot that holds each vertex that is new to the batch."""
    slots = position.numel()
    _mark[(triton.cdiv(slots, _BLOCK),)](position, lists, source, table, slots, LINKED=is_linked, BLOCK=_BLOCK)


def flag(position: Tensor, source: Tensor, table: Tensor, flags: Tensor) -> None:
    """Writes numbers whose running sums count edges and new vertices. Per slot, int64: 2**32 if it is used, plus 1 if it is the first of a new vertex."""
    slots = position.numel()
    _flag[(triton.cdiv(slots, _BLOCK),)](position, source, table, flags, slots, BLOCK=_BLOCK)


def finish(
    position: Tensor, source: Tensor, table: Tensor, sums: Tensor, owner: Tensor | None, ids: Tensor | None, is_linked: bool,
    new: Tensor, edges: Tensor, first_target: int, fanout: int, num_found: int,
) -> None:  # fmt: skip
    """Writes the new vertices and the edges of a hop, and replaces the marks in the table by local ids.

    Args:
        sums: int64 [slots], running sums of the numbers that :func:`flag` writes.
        owner: for each slot, the index of its vertex in the frontier; None if each vertex has ``fanout`` slots.
        ids: by position, int64 ids of the edges, or links. A link has the source in its lower 32 bits and the edge's id in the upper 32. None: positions are
            the ids.
        is_linked: True if ``ids`` are links.
        new: int64 [new vertices], is written.
        edges: int64 [3, edges], is written: local ids of sources and targets, and ids of edges.
        first_target: local id of the first vertex of the frontier.
        num_found: number of vertices found in earlier hops, with the seeds.
    """
    slots = position.numel()
    # An absent array is never read, but the kernel needs a valid pointer.
    _finish[(triton.cdiv(slots, _BLOCK),)](
        position, source, table, sums, sums if owner is None else owner, sums if ids is None else ids, new, edges,
        slots, edges.size(1), first_target, fanout, num_found,
        HAS_OWNER=owner is not None, LINKED=is_linked, HAS_ID=ids is not None, BLOCK=_BLOCK,
    )  # fmt: skip
