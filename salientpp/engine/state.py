"""The state of a run that stopped, and whether a loader may go on from it.

A **state** is a dict of plain values, so that ``torch.load(weights_only=True)`` and JSON give it back:

* ``version``: of this format, and of what a seed draws;
* ``epoch``, ``batches``: the epoch, and how many of its batches the user got from this rank (not those under way);
* ``round``: how many rounds of the epoch this rank has given whole: what a run with another number of ranks goes on from;
* ``seed``, ``logical_ranks``: fix with the epoch the order of the seeds and all draws;
* ``ranks``, ``rank``, ``joined``: whose the state is, and whether its batches are rounds: what ``batches`` counts;
* ``fingerprint``: what else decides which batches follow (data, seeds, sampling, batch size, ``shuffle``, ``drop_last``, ``uneven``), and nothing that
  changes no batch (workers, depth, caches, devices, the number of ranks).
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

from salientpp.ops import bytes_of

#: Another number wherever the fields, the order of seeds or the draws change.
VERSION = 3

#: An attribute of a ``Data`` counts by dtype, shape and about this many of its entries: features may be larger than memory.
_ENTRIES = 4096


@dataclass
class Reached:
    """How far an epoch is: ``batches`` were given, and with ``ended`` the user was told that there are no more.

    Who gets rounds has got so many ``rounds``; None: batches tell how many.
    """

    epoch: int
    batches: int
    ended: bool = False
    rounds: int | None = None


@dataclass(frozen=True)
class Resume:
    """Where an epoch goes on: before the batch with number ``batches`` of this rank, in a round.

    ``by_round``: because the state says so of the round, and not of this rank's batches.
    """

    batches: int
    round: int
    by_round: bool = False


@dataclass(frozen=True)
class Point:
    """Where a rank wants to start: before tick ``start`` of ``epoch``; ``resumed`` if a loaded state says so.

    ``seed_key`` stands for the seed. A rank without further batches in the epoch has the number of ticks as its ``start``. ``by_round``: it has the state
    of another rank, or of another number of ranks, which says in which ``round`` to go on.
    """

    epoch: int
    start: int
    resumed: bool
    seed_key: int
    round: int = 0
    by_round: bool = False
    logical_ranks: int = 0

    def numbers(self) -> list[int]:
        """As ranks tell each other."""
        resumed = self.resumed + (self.resumed and self.by_round)
        return [self.epoch, self.start, resumed, self.round, self.logical_ranks, self.seed_key]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Point:
        """The reverse of :meth:`numbers`."""
        epoch, start, resumed, number, logical_ranks, key = numbers
        return cls(epoch, start, resumed > 0, key, number, resumed == 2, logical_ranks)


class Disagreement(RuntimeError):
    """The ranks cannot start an epoch together. Every rank raises it, with the same text."""


@dataclass(frozen=True)
class Position:
    """What a state says beside its version and its fingerprint."""

    epoch: int
    batches: int
    round: int
    seed: int
    logical_ranks: int
    ranks: int
    rank: int
    joined: bool


def make_state(position: Position, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The state of these values; the fingerprint is copied."""
    return {"version": VERSION, **vars(position), "fingerprint": dict(fingerprint)}


def check_state(state: Any, fingerprint: dict[str, Any], same: dict[str, Any]) -> Position:
    """What a state says, if it fits this loader: its fingerprint, and in what is to be the ``same``, by the names of :class:`Position`.

    Raises:
        ValueError: it is no state, or one of another loader; the text says what differs.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError(f"cannot load this state: expected what state_dict() returned, got {_shown(state)}")
    if state["version"] != VERSION:
        raise ValueError(
            f"cannot load this state: expected version {VERSION}, got {state['version']!r}; use the salientpp that wrote it"
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
            f"cannot load this state: it is of a loader with other data or arguments ({'; '.join(wrong)}); "
            "make the loader as it was made then"
        )
    # Epochs travel between ranks as 64 bits.
    ranges = {"epoch": (0, 2**62), "ranks": (1, state["logical_ranks"] + 1), "rank": (0, state["ranks"])}
    for name, (begin, end) in ranges.items():
        if not begin <= state[name] < end:
            raise ValueError(
                f"cannot load this state: {name} must be in [{begin}, {end}), got {state[name]}; it was altered or is damaged"
            )
    return Position(**{name: state[name] for name in Position.__annotations__})


def _shown(value: Any) -> str:
    return (
        f"a dict with {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, dict) else type(value).__name__
    )


def first_point(points: Sequence[Point]) -> tuple[int, int]:
    """The epoch and tick at which the ranks start together, of their points by rank; a rank that is further answers the others up to its own point.

    Raises:
        Disagreement: some ranks resume and others do not; seeds or numbers of logical ranks differ; epochs are further apart than loops that started together
            can be: by one where all resume, else not at all; or a rank goes on from a round, and another from another one.
    """
    resumed = [rank for rank, point in enumerate(points) if point.resumed]
    if resumed and len(resumed) < len(points):
        fresh = next(rank for rank in range(len(points)) if rank not in resumed)
        raise Disagreement(
            f"all ranks or none must resume, but rank {resumed[0]} has loaded a state and rank {fresh} has not "
            "(or left it with set_epoch); call load_state_dict on every rank, each with its own state or all with one rank's"
        )
    for rank, point in enumerate(points):
        if point.logical_ranks != points[0].logical_ranks:
            raise Disagreement(
                f"all ranks must have the same logical ranks, got {points[0].logical_ranks} on rank 0 and {point.logical_ranks} on rank {rank}; "
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
                f"all ranks must have the same seed, but that of rank {rank} differs from rank 0's; load states of one run"
            )
    by_round = next((rank for rank, point in enumerate(points) if point.by_round), None)
    for rank, point in enumerate(points):
        ours = points[by_round] if by_round is not None else point
        if (point.epoch, point.round) != (ours.epoch, ours.round):
            raise Disagreement(
                f"rank {by_round} has loaded the state of another rank, or of another number of ranks, and goes on with round {ours.round} of epoch "
                f"{ours.epoch}, but rank {rank} with round {point.round} of epoch {point.epoch}; load the state of one and the same rank on every rank"
            )
    return first, min(point.start for point in points if point.epoch == first)


# --- fingerprints -----------------------------------------------------------------------------------------


def digest(*tensors: Tensor) -> str:
    """16 hexadecimal digits for the contents of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        whole.update(bytes_of(tensor.cpu()).numpy().data)
    return whole.hexdigest()[:16]


def data_digest(data: Data | HeteroData | tuple[FeatureStore, GraphStore], topology: Sequence[Tensor]) -> str:
    """16 hexadecimal digits for an object: the topology in full, of every other tensor the dtype, the shape and some entries.

    Of what is learnable, the dtype and the shape. Of what a feature store holds, the name and the shape: its entries may be far away.
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
                if value.requires_grad:  # it changes as it learns
                    whole.update(f"{store._key}{name}{value.dtype}{list(value.shape)}".encode())
                    continue
                flat = value.detach().as_subclass(Tensor).flatten()
                number = min(flat.numel(), _ENTRIES)
                some = flat[torch.linspace(0, flat.numel() - 1, number, dtype=torch.float64, device="cpu").long()]
                whole.update(f"{store._key}{name}{list(value.shape)}{digest(some)}".encode())
    return whole.hexdigest()[:16]


def inputs_digest(inputs: NodeSamplerInput | EdgeSamplerInput, some: Tensor | None = None) -> str:
    """16 hexadecimal digits for the seeds, or those at ``some`` positions, with their times and labels, after their type if they have one."""
    fields = [value if some is None else value[some] for value in vars(inputs).values() if isinstance(value, Tensor)]
    return digest(*fields) if inputs.input_type is None else f"{inputs.input_type}: {digest(*fields)}"
