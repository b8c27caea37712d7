"""Where was a run when it stopped, and may this loader go on from there?

A **state** is a dict of plain values, so that ``torch.load(weights_only=True)`` and JSON give it back:

* ``version``: of this format, and of what a seed draws;
* ``epoch``, ``batches``: the epoch, and how many of its batches the user got (not those under way);
* ``seed``: with the epoch it fixes the order of the seeds and all draws;
* ``fingerprint``: what else decides which batches follow: data, seeds, sampling, batch size, ``shuffle``, ``drop_last``, ``uneven``,
  number of ranks and rank. What changes no batch (workers, depth, caches, devices) is not in it.

Nothing more is needed, since a batch is a pure function of (seed, epoch, rank, index). Ranks may have stopped at
different points; :func:`first_point` says where they start together.
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

#: Another number wherever the fields, the order of seeds or the draws change.
VERSION = 1

#: An attribute of a ``Data`` counts by dtype, shape and about this many of its entries: features may be larger than memory.
_ENTRIES = 4096


@dataclass
class Progress:
    """How far an epoch is: ``batches`` were given, and with ``ended`` the user was told that there are no more."""

    epoch: int
    batches: int
    ended: bool = False


@dataclass(frozen=True)
class Point:
    """Where a rank wants to start: before batch ``start`` of ``epoch``; ``resumed`` if a loaded state says so.

    ``seed_key`` stands for the seed. A rank without further batches in the epoch has the number of rounds as its ``start``.
    """

    epoch: int
    start: int
    resumed: bool
    seed_key: int


class Disagreement(RuntimeError):
    """The ranks cannot start an epoch together. Every rank raises it, with the same text."""


def make_state(epoch: int, batches: int, seed: int, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The state of these values; the fingerprint is copied."""
    return {"version": VERSION, "epoch": epoch, "batches": batches, "seed": seed, "fingerprint": dict(fingerprint)}


def check_state(state: Any, fingerprint: dict[str, Any], num_batches: int, seed: int | None) -> tuple[int, int, int]:
    """Epoch, batches and seed of a state that fits.

    Args:
        fingerprint: this loader's.
        num_batches: of this rank in an epoch.
        seed: this loader's, if the user gave one.

    Raises:
        ValueError: it is no state, or one of another loader; the text says what differs.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError(f"cannot load this state: expected what state_dict() returned, got {_shown(state)}")
    if state["version"] != VERSION:
        raise ValueError(
            f"cannot load this state: expected version {VERSION}, got {state['version']!r}; use the salientpp that wrote it"
        )
    for name in ("epoch", "batches", "seed"):
        if isinstance(state.get(name), bool) or not isinstance(state.get(name), int):
            raise ValueError(f"cannot load this state: {name} must be an integer, got {state.get(name)!r}")
    if not isinstance(state.get("fingerprint"), dict):
        raise ValueError(f"cannot load this state: fingerprint must be a dict, got {_shown(state.get('fingerprint'))}")
    expected, got = dict(fingerprint), dict(state["fingerprint"])
    if seed is not None:
        expected["seed"], got["seed"] = seed, state["seed"]
    names = list(dict.fromkeys([*expected, *got]))
    wrong = [
        f"{name}: expected {expected.get(name)!r}, got {got.get(name)!r}"
        for name in names
        if name not in expected or name not in got or expected[name] != got[name]
    ]
    if wrong:
        raise ValueError(
            f"cannot load this state: it is of a loader with other data, arguments or rank ({'; '.join(wrong)}); "
            "make the loader as it was made then"
        )
    if not 0 <= state["batches"] <= num_batches:
        raise ValueError(f"cannot load this state: batches must be in [0, {num_batches}], got {state['batches']}")
    return state["epoch"], state["batches"], state["seed"]


def _shown(value: Any) -> str:
    return (
        f"a dict with {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, dict) else type(value).__name__
    )


def first_point(points: Sequence[Point]) -> tuple[int, int]:
    """The epoch and round at which the ranks start together; a rank that is further answers the others up to its own point.

    Args:
        points: by rank.

    Raises:
        Disagreement: some ranks resume and others do not; seeds differ; or epochs are further apart than loops that started together
            can be: by one where all resume, else not at all.
    """
    resumed = [rank for rank, point in enumerate(points) if point.resumed]
    if resumed and len(resumed) < len(points):
        fresh = next(rank for rank in range(len(points)) if rank not in resumed)
        raise Disagreement(
            f"all ranks or none must resume, but rank {resumed[0]} has loaded a state and rank {fresh} has not "
            "(or left it with set_epoch); call load_state_dict on every rank, each with its own state"
        )
    epochs = [point.epoch for point in points]
    first = min(epochs)
    furthest = epochs.index(max(epochs))
    if epochs[furthest] - first > (1 if resumed else 0):
        words = (
            "load states that were saved together" if resumed else "call set_epoch with the same number on every rank"
        )
        raise Disagreement(
            f"all ranks must start the same epoch, got epoch {first} on rank {epochs.index(first)} and "
            f"epoch {epochs[furthest]} on rank {furthest}; {words}"
        )
    for rank, point in enumerate(points):
        if point.seed_key != points[0].seed_key:
            raise Disagreement(
                f"all ranks must have the same seed, but that of rank {rank} differs from rank 0's; load states of one run"
            )
    return first, min(point.start for point in points if point.epoch == first)


# --- fingerprints -----------------------------------------------------------------------------------------


def digest(*tensors: Tensor) -> str:
    """16 hexadecimal digits for the contents of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
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
                some = flat[
                    torch.linspace(0, flat.numel() - 1, min(flat.numel(), _ENTRIES), dtype=torch.float64).long()
                ]
                whole.update(f"{store._key}{name}{list(value.shape)}{digest(some)}".encode())
    return whole.hexdigest()[:16]


def inputs_digest(inputs: NodeSamplerInput | EdgeSamplerInput) -> str:
    """16 hexadecimal digits for the seeds, with their times and labels, after their type if they have one."""
    fields = [value for value in vars(inputs).values() if isinstance(value, Tensor)]
    return digest(*fields) if inputs.input_type is None else f"{inputs.input_type}: {digest(*fields)}"
