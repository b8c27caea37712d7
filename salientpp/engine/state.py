"""The saved state of a stopped run, and the check whether a loader can continue from it.

A **state** is a dict of plain values, so that ``torch.load(weights_only=True)`` and JSON can read it:

* ``version``: version of this format, and of the draws that a seed determines;
* ``epoch``, ``batches``: the epoch, and the number of its batches that this rank has delivered to the user (without batches in flight);
* ``round``: number of rounds of the epoch that this rank has delivered completely; a run with another number of ranks continues from it;
* ``seed``, ``logical_ranks``: determine, with the epoch, the order of the seeds and all draws;
* ``ranks``, ``rank``: number of ranks, and the rank that saved the state;
* ``joined``: True if a batch is a round, which is then the unit of ``batches``;
* ``fingerprint``: everything else that determines the following batches: data, seeds, sampling, batch size, ``shuffle``, ``drop_last``, ``uneven``. Options
  that change no batch are left out: workers, depth, caches, devices, the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

from salientpp.engine.epochs import Draws
from salientpp.ops import bytes_of, join_key

#: Increased whenever the fields, the order of seeds or the draws change.
VERSION = 3

#: Epochs travel between ranks as 64 bits.
MOST_EPOCHS = 2**62

#: Approximate number of entries of an attribute that enter the digest of a ``Data``. Not all enter, because features may be larger than memory.
_ENTRIES = 4096


@dataclass
class Reached:
    """Progress of an epoch: the number of ``batches`` delivered.

    ``ended``: the user's loop was told that the epoch has no more batches. ``rounds``: number of rounds delivered, if
    the user receives whole rounds. None: the number of batches gives it.
    """

    epoch: int
    batches: int
    ended: bool = False
    rounds: int | None = None

    def words(self, left: bool) -> str:
        """Returns text for an error: what a rank waits for. ``left``: the rank has left the epoch."""
        return f"for {'the end' if left else f'batch {self.batches}'} of epoch {self.epoch} of its loader"


@dataclass(frozen=True)
class Resume:
    """Point from which an epoch continues: before the batch with number ``batches`` of this rank, which belongs to round ``round``.

    ``by_round`` is True if ``batches`` was computed from the state's round, because the state is not this rank's own.
    """

    batches: int
    round: int
    by_round: bool = False


@dataclass(frozen=True)
class Point:
    """Point where a rank wants to start, which all ranks compare: before tick ``start`` of ``epoch``. ``resumed``: a loaded state has the point.

    ``seed_key`` represents the seed. If a rank has no more batches in the epoch, ``start`` is the number of ticks. ``by_round`` is True if the state belongs to
    another rank or another number of ranks; ``round`` then says where to continue.
    """

    epoch: int
    start: int
    resumed: bool
    seed_key: int
    round: int = 0
    by_round: bool = False
    logical_ranks: int = 0

    @classmethod
    def at(cls, start: int, draws: Draws, resume: Resume | None) -> Point:
        """Returns the point before tick ``start`` of the epoch of these draws. ``resume``: where a loaded state continues."""
        where = resume or Resume(0, 0)
        key = join_key(draws.seed)
        return cls(draws.epoch, start, resume is not None, key, where.round, where.by_round, draws.logical_ranks)

    def numbers(self) -> list[int]:
        """Returns this point as integers, for an exchange between ranks."""
        resumed = self.resumed + (self.resumed and self.by_round)
        return [self.epoch, self.start, resumed, self.round, self.logical_ranks, self.seed_key]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Point:
        """Makes a point from the integers that :meth:`numbers` returned on another rank."""
        epoch, start, resumed, number, logical_ranks, key = numbers
        return cls(epoch, start, resumed > 0, key, number, resumed == 2, logical_ranks)


class Disagreement(RuntimeError):
    """The ranks cannot start an epoch together. Every rank raises it, with the same text."""


@dataclass(frozen=True)
class Position:
    """Position of a loader: the fields of a saved state, without version and fingerprint."""

    epoch: int
    batches: int
    round: int
    seed: int
    logical_ranks: int
    ranks: int
    rank: int
    joined: bool


def make_state(position: Position, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Returns a state with these values and a copy of the fingerprint."""
    return {"version": VERSION, **vars(position), "fingerprint": dict(fingerprint)}


def check_state(state: Any, fingerprint: dict[str, Any], same: dict[str, Any]) -> Position:
    """Checks that a state fits this loader, and returns its position. The fingerprint and the fields in ``same``, named as in :class:`Position`, must match.

    Raises:
        ValueError: this is not a state, or belongs to another loader. The text says what differs.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError(f"cannot load this state: expected a result of state_dict(), got {_shown(state)}")
    if state["version"] != VERSION:
        raise ValueError(
            f"cannot load this state: expected version {VERSION}, got {state['version']!r}; use the version of salientpp that wrote the state"
        )
    for name in Position.__annotations__:
        value, kind = state.get(name), bool if name == "joined" else int
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            words = "an integer" if kind is int else "True or False"
            raise ValueError(f"cannot load this state: {name} must be {words}, got {value!r}")
    if not isinstance(state.get("fingerprint"), dict):
        raise ValueError(f"cannot load this state: fingerprint must be a dict, got {_shown(state.get('fingerprint'))}")
    expected, got = {**fingerprint, **same}, {**state["fingerprint"], **{name: state[name] for name in same}}
    wrong = [
        f"{name}: expected {expected.get(name)!r}, got {got.get(name)!r}"
        for name in {**expected, **got}
        if name not in expected or name not in got or expected[name] != got[name]
    ]
    if wrong:
        raise ValueError(
            f"cannot load this state: it belongs to a loader with other data or arguments ({'; '.join(wrong)}); "
            "make the loader with the same data and arguments"
        )
    ranges = {"epoch": (0, MOST_EPOCHS), "ranks": (1, state["logical_ranks"] + 1), "rank": (0, state["ranks"])}
    for name, (begin, end) in ranges.items():
        if not begin <= state[name] < end:
            raise ValueError(
                f"cannot load this state: {name} must be in [{begin}, {end}), got {state[name]}; the state was altered or is damaged"
            )
    return Position(**{name: state[name] for name in Position.__annotations__})


def _shown(value: Any) -> str:
    return (
        f"a dict with {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, dict) else type(value).__name__
    )


def first_point(points: Sequence[Point]) -> tuple[int, int]:
    """Returns the epoch and tick at which all ranks start together, given their points by rank. A rank with a later point answers the others up to it.

    Raises:
        Disagreement: only some ranks resume, or ranks differ in the seed, the number of logical ranks or the round to continue from. Their epochs
            may differ by one if all ranks resume, and must be equal if none does.
    """
    resumed = [rank for rank, point in enumerate(points) if point.resumed]
    if resumed and len(resumed) < len(points):
        fresh = next(rank for rank in range(len(points)) if rank not in resumed)
        raise Disagreement(
            f"all ranks or none must resume, but rank {resumed[0]} has loaded a state and rank {fresh} has not "
            "(or set_epoch discarded it); call load_state_dict on every rank, each with its own state or all with one rank's"
        )
    for rank, point in enumerate(points):
        if point.logical_ranks != points[0].logical_ranks:
            raise Disagreement(
                f"all ranks must have the same number of logical ranks, got {points[0].logical_ranks} on rank 0 and {point.logical_ranks} on rank {rank}; "
                "load states of one run"
            )
    epochs = [point.epoch for point in points]
    first = min(epochs)
    furthest = epochs.index(max(epochs))
    if epochs[furthest] - first > (1 if resumed else 0):
        words = "call set_epoch with the same number on every rank"
        if resumed:
            words = "load states that were saved together"
        raise Disagreement(
            f"all ranks must start the same epoch, got epoch {first} on rank {epochs.index(first)} and "
            f"epoch {epochs[furthest]} on rank {furthest}; {words}"
        )
    for rank, point in enumerate(points):
        if point.seed_key != points[0].seed_key:
            raise Disagreement(
                f"all ranks must have the same seed, but rank {rank}'s differs from rank 0's; load states of one run"
            )
    by_round = next((rank for rank, point in enumerate(points) if point.by_round), None)
    for rank, point in enumerate(points):
        ours = points[by_round] if by_round is not None else point
        if (point.epoch, point.round) != (ours.epoch, ours.round):
            raise Disagreement(
                f"rank {by_round} has loaded the state of another rank, or of another number of ranks, and continues with step {ours.round} of epoch "
                f"{ours.epoch}; rank {rank} continues with step {point.round} of epoch {point.epoch}; load the state of the same rank on every rank"
            )
    return first, min(point.start for point in points if point.epoch == first)


# --- fingerprints -----------------------------------------------------------------------------------------


def digest(*tensors: Tensor) -> str:
    """Returns 16 hexadecimal digits for the contents of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        whole.update(bytes_of(tensor.cpu()).numpy().data)
    return whole.hexdigest()[:16]


def data_digest(data: Data | HeteroData | tuple[FeatureStore, GraphStore], topology: Sequence[Tensor]) -> str:
    """Returns 16 hexadecimal digits for a data object. They cover the whole topology, and of every other tensor the dtype, the shape and some entries.

    Of learnable tensors, they cover only dtype and shape. Of a feature store, they cover only names and shapes, because its entries may be remote.
    """
    whole = hashlib.sha256(digest(*topology).encode())
    if not isinstance(data, (Data, HeteroData)):
        held = [
            f"{attr.group_name}{attr.attr_name}{list(data[0].get_tensor_size(attr))}"
            for attr in data[0].get_all_tensor_attrs()
        ]
        whole.update("".join(sorted(held)).encode())
        return whole.hexdigest()[:16]
    for store in data.stores:
        for name, value in sorted(store.items()):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                if value.requires_grad:  # its values change during training
                    whole.update(f"{store._key}{name}{value.dtype}{list(value.shape)}".encode())
                    continue
                flat = value.detach().as_subclass(Tensor).flatten()
                number = min(flat.numel(), _ENTRIES)
                some = flat[torch.linspace(0, flat.numel() - 1, number, dtype=torch.float64, device="cpu").long()]
                whole.update(f"{store._key}{name}{list(value.shape)}{digest(some)}".encode())
    return whole.hexdigest()[:16]


def inputs_digest(inputs: NodeSamplerInput | EdgeSamplerInput, some: Tensor | None = None) -> str:
    """Returns 16 hexadecimal digits for the seeds (all, or those at ``some`` positions), their times and labels. The type precedes them, if seeds have one."""
    fields = [value if some is None else value[some] for value in vars(inputs).values() if isinstance(value, Tensor)]
    return digest(*fields) if inputs.input_type is None else f"{inputs.input_type}: {digest(*fields)}"
