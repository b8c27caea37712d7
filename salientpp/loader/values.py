"""Values of the package's options in one loader, and the checks that involve several of them.

The device and the time-out (:meth:`Options.checked_device`, :meth:`Options.checked_timeout`) are checked before the ranks connect, because connecting
needs them. Everything else (:meth:`Options.checked`) is checked afterwards, so that a mistake on one rank reaches the others.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from salientpp.arguments import as_real
from salientpp.engine.drawing.method import DrawingMethod
from salientpp.engine.option import Values
from salientpp.loader.options import OPTIONS
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.store.assembly import has_kernel
from salientpp.suggestions import did_you_mean
from salientpp.vip.policies import PROBABILITIES
from salientpp.ways.planner.choices import Choice

#: (an option, an option that it excludes) -> reason.
EXCLUDED: Mapping[tuple[str, str], str] = {
    ("lookahead", "transform_sampler_output"): "a batch's vertices may change after the cache was planned",
    ("partial_aggregation", "lookahead"): "a cache that looks ahead chooses its rows after the sums are planned",
    ("partial_aggregation", "pad"): "padding would not make the number of sums constant",
    ("partial_aggregation", "transform_sampler_output"): "sampled edges may change after their sums are planned",
    ("read_ahead", "device_rows_zero_copy"): "the device would read all rows from pinned memory",
    ("partial_aggregation", "send_as"): "sums are computed from rows as they are stored",
    ("cooperate", "partial_aggregation"): "the ranks of a host load each row once, and compute with it themselves",
    ("cooperate", "pad"): "the vertices of other ranks are numbered directly after a rank's own",
    ("cooperate", "transform_sampler_output"): "sampled edges may change after they were divided among the ranks",
    (
        "cooperate",
        "logical_ranks_join",
    ): "a vertex of several joined batches would be loaded and computed several times",
}

_NO_CACHE = "whose ranks cache rows of each other; an object in memory has all its rows here"

#: Options that apply only to a partitioned graph -> reason.
_OF_PARTS: Mapping[str, str] = {
    "logical_ranks": "whose ranks share an epoch's batches",
    "logical_ranks_join": "whose ranks share an epoch's batches",
    "ranks_per_host": "whose ranks share the rows of a host",
    **dict.fromkeys(("replication_factor", "lookahead", "device_rows_cache"), _NO_CACHE),
    "policy": _NO_CACHE,
    "send_as": "whose rows travel between ranks; rows of an object in memory do not travel",
}

#: Kinds of devices that the error for a mistyped one may mean.
_KINDS = ("cpu", "cuda", "xpu", "mps")

#: Names in torch's module for a device that the pipeline uses.
_STREAMS = ("Event", "Stream", "stream", "current_stream", "default_stream")


class Options(Values):
    """Options of one loader as the user gave them, with PyG's ``transform`` and ``transform_sampler_output``."""

    declared = OPTIONS

    def __init__(self, **given: Any) -> None:
        super().__init__({"transform": None, "transform_sampler_output": None, **given})

    def checked(self, device: torch.device) -> Options:
        """Returns a copy of these options, checked, with numbers converted to Python's. ``device`` is the result of :meth:`checked_device`.

        Raises:
            ValueError, TypeError: an argument is wrong, whatever the data is.
        """
        found = self.checked_alone()
        for one, other in EXCLUDED:
            value = getattr(found, one)
            if is_given(value) and is_given(getattr(found, other)):
                given = f"{one}={value!r}" if isinstance(value, (int, float, str)) else named(one)
                raise ValueError(f"{given} excludes {named(other)}: {EXCLUDED[one, other]}; leave one of them out")
        for name in ("transform", "transform_sampler_output"):
            value = getattr(found, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function or None, got {value!r}")
        if found.device_rows_zero_copy and device.type != "cpu" and not has_kernel(device):
            raise ValueError(
                f"device_rows['zero_copy'] on {device} needs a Triton that compiles for this device; install it (on CUDA `pip install triton`), or leave "
                "'zero_copy' out"
            )
        if found.lookahead and found.policy not in PROBABILITIES:
            raise ValueError(
                f"lookahead={found.lookahead!r} plans by inclusion probabilities, so policy must be {' or '.join(map(repr, PROBABILITIES))}, "
                f"got {found.policy!r}; leave one of them out"
            )
        if found.memory_device is not None and device.type == "cpu":
            raise ValueError(
                f"memory['device']={found.memory_device} is memory of an accelerator, but device is the CPU; pass device= too, or leave 'device' out"
            )
        for key, has_use in (("machines", found.is_planned), ("allow", found.memory is not None)):
            if getattr(found, f"memory_{key}") != OPTIONS[f"memory_{key}"].default and not has_use:
                raise ValueError(
                    f"memory[{key!r}] applies only to a plan within a memory budget; give bytes as memory['host'] too, or leave {key!r} out"
                )
        weight, sums_may_come = found.partial_aggregation_weight, "sums" in found.memory_allow
        if weight is not None and found.partial_aggregation is None and not sums_may_come:
            raise ValueError(
                f"partial_aggregation['weight']={weight!r} applies only to sums of rows; give a reduction as partial_aggregation['reduce'] too, or leave "
                "'weight' out"
            )
        return found

    @property
    def is_planned(self) -> bool:
        """True if the loader chooses its caches and other methods within a memory budget."""
        return self.memory is not None or self.memory_device is not None

    @property
    def given_choice(self) -> dict[str, Any]:
        """Values that the user fixed and a plan must keep, by the names of :class:`~salientpp.ways.planner.choices.Choice`."""
        values = {name: getattr(self, option) for name, option in Choice.OPTIONS.items()}
        fixed = set() if self.memory is not None else {"cache", "lookahead", "sums"}
        fixed |= set() if self.memory_device is not None else {"device_rows", "device_cache"}
        return {
            name: value
            for name, value in values.items()
            if name in fixed or value != OPTIONS[Choice.OPTIONS[name]].default
        }

    def with_choice(self, choice: Choice) -> Options:
        """Returns a copy of these options with the values that a plan has chosen."""
        found = copy.copy(self)
        found.__dict__.update(choice.values)
        return found

    def checked_device(self) -> torch.device:
        """Returns the CPU, or a device of this machine's accelerator, such as a CUDA device, with its index."""
        if self.device is None:
            return torch.device("cpu")
        accelerator, number = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        there = "the CPU"
        if accelerator is not None and number:
            there += f" or one of {number} {accelerator.type.upper()} device{'s' if number > 1 else ''}"
        try:
            found = torch.device(self.device)
        except (RuntimeError, TypeError, ValueError) as error:
            kind = self.device.partition(":")[0] if isinstance(self.device, str) else None
            meant = "" if kind in _KINDS else did_you_mean("cuda" if kind == "gpu" else kind, _KINDS)
            raise ValueError(f"device must be {there}, got {self.device!r}{meant}") from error
        if found.type == "cpu":
            return found
        is_accelerator = accelerator is not None and found.type == accelerator.type and number > 0
        if is_accelerator and found.index is None:
            found = torch.device(found.type, torch.accelerator.current_device_index())
        if not is_accelerator or found.index >= number:
            why = (
                ""
                if number or found.type != "cuda"
                else "; this torch is built without CUDA, or finds no GPU (check nvidia-smi and CUDA_VISIBLE_DEVICES)"
            )
            raise ValueError(f"device must be {there}, got {str(found)!r}{why}")
        lacks = next((name for name in _STREAMS if not hasattr(torch.get_device_module(found), name)), None)
        if lacks is not None:
            raise ValueError(
                f"device must have torch's streams and events, got {str(found)!r}, and torch.{found.type} has no {lacks}; upgrade torch, or use the CPU"
            )
        return found

    def checked_timeout(self) -> timedelta:
        """Returns the longest time to wait for another rank."""
        if isinstance(self.timeout, timedelta):
            found = self.timeout
        else:
            seconds, found = as_real(self.timeout), timedelta(0)
            if seconds == 0:
                return DEFAULT_TIMEOUT  # torch's default of 0 means that no time-out was given
            if seconds is not None:
                with contextlib.suppress(OverflowError):  # too large a number
                    found = timedelta(seconds=seconds)
        if found <= timedelta(0):
            raise ValueError(
                f"timeout must be > 0 and finite, in seconds or a timedelta (the longest wait for another rank), got {self.timeout!r}"
            )
        return found

    def check_for_object(self) -> None:
        """Raises ValueError if the data is an object in memory, and an option applies only to partitioned graphs."""
        for name, why in _OF_PARTS.items():
            if self._differs(name):
                raise ValueError(f"{named(name)} applies only to a partitioned graph, {why}; leave it out")
        if self.cooperate is not None:
            raise ValueError(
                f"cooperate={self.cooperate!r} applies only to a partitioned graph, whose ranks know which of them share a host; leave it out"
            )
        if self.memory is not None:
            raise ValueError(
                f"memory={self.memory} is for copies of other ranks' rows, but an object in memory has all rows here; leave it out "
                "(memory={'device': ...} is for copies on the device)"
            )

    def check_drawing(self, drawing: DrawingMethod) -> None:
        """Raises ValueError if an option does not fit ``drawing``, the method that draws the batches."""
        for name, why in drawing.excludes().items():
            if self._differs(name):
                kind, label = type(drawing.sampler), OPTIONS[name].label or name
                words = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
                raise ValueError(f"{label}={getattr(self, name)!r} excludes a {words}: {why}; leave it out")

    def _differs(self, name: str) -> bool:
        """Returns True if an option has another value than its default."""
        value = getattr(self, name)
        return is_given(value) and value != OPTIONS[name].default

    def checked_share(self, partitioned: bool, orders_itself: bool, draws_seed: bool = False) -> tuple[int, int] | None:
        """Returns ``share`` as (rank, number of ranks), or None if it is not given.

        Args:
            orders_itself: True if the loader orders its seeds, False if a user's sampler does.
            draws_seed: True if each process draws its own random seed, on which the order depends.
        """
        share: Any = self.share
        if share is None:
            return None
        if partitioned:
            raise ValueError(
                "share= is for a Data or HeteroData object; the ranks of a partitioned graph divide its seeds without it; leave it out"
            )
        if not orders_itself:
            raise ValueError(
                "share= excludes sampler= and batch_sampler=; let the sampler select this process's seeds. Lightning puts a sampler into the loaders of every "
                "rank; Trainer(use_distributed_sampler=False) prevents this"
            )
        whole = (
            isinstance(share, (tuple, list))
            and len(share) == 2
            and all(isinstance(i, int) and not isinstance(i, bool) for i in share)
        )
        if not whole or not 0 <= share[0] < share[1]:
            raise ValueError(f"share must be (rank, number of ranks), with 0 <= rank < number of ranks, got {share!r}")
        if draws_seed and share[1] > 1:
            raise ValueError(
                f"share={share!r} with shuffle=True needs the same order of seeds in all {share[1]} processes, but each would draw its own random seed; pass "
                "the same seed= (or a generator= in the same state) in all of them"
            )
        return share[0], share[1]


def named(name: str) -> str:
    """Returns an option or an argument of PyG's as users write it, for errors, such as ``pad=``."""
    return OPTIONS[name].named(name) if name in OPTIONS else f"{name}="


def is_given(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float, str, Mapping)) else value is not None
