"""The values of the package's options in one loader, and the checks that look at several of them.

Where and how long (:meth:`Options.checked_device`, :meth:`Options.checked_timeout`) is checked before ranks are connected, which cannot be done without.
Everything else (:meth:`Options.checked`) is checked after, so that a mistake on one rank reaches the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from salientpp.arguments import as_real
from salientpp.engine.option import Values
from salientpp.loader.options import OPTIONS
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.store.assembly import has_kernel
from salientpp.vip.policies import PROBABILITIES

#: (an option, one that it excludes) -> why.
EXCLUDED: Mapping[tuple[str, str], str] = {
    ("lookahead", "transform_sampler_output"): "it may change the vertices that a batch needs after they were foreseen",
    ("partial_aggregation", "lookahead"): "a cache that looks ahead decides after the sums which rows it has",
    ("partial_aggregation", "pad"): "its sums would be as many as before",
    ("partial_aggregation", "transform_sampler_output"): "it may change what was sampled, and sums are of that",
    ("partial_aggregation", "send_as"): "it sums rows as they are",
}


class Options(Values):
    """The values of the package's options of one loader, first as the user gave them, and PyG's ``transform`` and ``transform_sampler_output``."""

    declared = OPTIONS

    def __init__(self, **given: Any) -> None:
        super().__init__({"transform": None, "transform_sampler_output": None, **given})

    def checked(self, device: torch.device) -> Options:
        """These options with Python's numbers; ``device`` is the checked one.

        Raises:
            ValueError, TypeError: an argument is wrong, whatever the data is.
        """
        found = self.checked_alone()
        for one, other in EXCLUDED:
            value = getattr(found, one)
            if _is_given(value) and _is_given(getattr(found, other)):
                given = f"={value!r}" if isinstance(value, (int, float, str)) else "="
                raise ValueError(f"{one}{given} excludes {other}=: {EXCLUDED[one, other]}; leave one of them out")
        if found.zero_copy and device.type == "cuda" and not has_kernel():
            raise ValueError(
                "zero_copy needs Triton, which is not installed; `pip install triton`, or leave zero_copy out"
            )
        if found.lookahead and found.policy not in PROBABILITIES:
            raise ValueError(
                f"lookahead={found.lookahead!r} expects rows by their inclusion probabilities, so policy must be {' or '.join(map(repr, PROBABILITIES))}, "
                f"got {found.policy!r}; leave one of them out"
            )
        if found.partial_weight is not None and found.partial_aggregation is None:
            raise ValueError(
                f"partial_weight={found.partial_weight!r} is for sums of rows; pass partial_aggregation= too, or leave it out"
            )
        return found

    def checked_device(self) -> torch.device:
        """The CPU or a CUDA device that is there, with its number."""
        if self.device is None:
            return torch.device("cpu")
        number = torch.cuda.device_count()
        there = "the CPU" if number == 0 else f"the CPU or one of {number} CUDA device{'s' if number > 1 else ''}"
        try:
            found = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device must be {there}, got {self.device!r}") from error
        if found.type == "cuda" and found.index is None and number:
            found = torch.device("cuda", torch.cuda.current_device())
        if found.type != "cpu" and not (found.type == "cuda" and found.index is not None and found.index < number):
            why = (
                ""
                if number or found.type != "cuda"
                else "; this torch is built without CUDA, or sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"
            )
            raise ValueError(f"device must be {there}, got {str(found)!r}{why}")
        return found

    def checked_timeout(self) -> timedelta:
        """The longest wait for another rank."""
        if isinstance(self.timeout, timedelta):
            found = self.timeout
        else:
            seconds, found = as_real(self.timeout), timedelta(0)
            if seconds == 0:
                return DEFAULT_TIMEOUT  # 0 is how torch says that none was given
            if seconds is not None:
                with contextlib.suppress(OverflowError):  # too large a number
                    found = timedelta(seconds=seconds)
        if found <= timedelta(0):
            raise ValueError(
                f"timeout must be > 0 and finite, in seconds or a timedelta (the longest wait for another rank), got {self.timeout!r}"
            )
        return found

    def check_for_object(self) -> None:
        """Raise ValueError where an option is given that is for partitioned graphs, and the data is an object that one process holds."""
        if self.logical_ranks is not None or self.join_logical_ranks:
            name = "join_logical_ranks" if self.logical_ranks is None else "logical_ranks"
            raise ValueError(f"{name}= is for a partitioned graph, whose ranks share an epoch's batches; leave it out")
        if self.send_as is not None:
            raise ValueError(
                "send_as is for a partitioned graph, whose rows travel between ranks; rows of an object in memory do not, so leave it out"
            )

    def checked_share(self, partitioned: bool, orders_itself: bool, draws_seed: bool = False) -> tuple[int, int] | None:
        """Place and number of places of ``share``, or None without one.

        Args:
            orders_itself: the loader says in which order seeds come, and not a sampler of the user's.
            draws_seed: the order follows from a seed that each process draws for itself.
        """
        share: Any = self.share
        if share is None:
            return None
        if partitioned:
            raise ValueError(
                "share= is for a Data or HeteroData object: the ranks of a partitioned graph share its seeds by themselves"
            )
        if not orders_itself:
            raise ValueError(
                "share= excludes sampler= and batch_sampler=: let the sampler give this process its share. Lightning puts a sampler into loaders on ranks "
                "unless told Trainer(use_distributed_sampler=False)"
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
                f"share={share!r} with shuffle=True needs one order of the seeds in all {share[1]} processes, but each would draw a seed of its own; pass the "
                "same seed= (or a generator= in the same state) in all of them"
            )
        return share[0], share[1]


def _is_given(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float, str, Mapping)) else value is not None
