"""Announces loaders and their epochs to storage ranks, which then make the same loaders (:mod:`salientpp.loader.serve`).

A message has the arguments on which the exchange between ranks depends, as JSON. Arguments that only batches depend on stay on the ranks that train.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling, NumNeighbors

from salientpp.engine.epochs import Draws
from salientpp.engine.state import Resume
from salientpp.loader.options import OPTIONS
from salientpp.loader.values import Options, is_given, named
from salientpp.ranks.comm import Comm
from salientpp.ranks.roles import Roles
from salientpp.ranks.roll import go_astray
from salientpp.store.directory.opened import PartitionedGraph

#: Arguments that change nothing on a storage rank, which has no batches, or whose value there is the default.
_OF_BATCHES = (
    "transform", "transform_sampler_output", "device", "cache", "custom_cls", "filter_per_worker", "is_sorted", "worker_init_fn",
    "generator", "pin_memory", "pin_memory_device", "persistent_workers", "prefetch_factor", "num_workers", "in_order", "dataset", "collate_fn",
    "multiprocessing_context",
)  # fmt: skip

#: Arguments that need rows or code on the rank that trains -> reason.
_REFUSED: Mapping[str, str] = {
    "neighbor_sampler": "storage ranks draw with the loader's own arguments; pass num_neighbors, time_attr and weight_attr instead",
    "ways": "a way has code on every rank, and storage ranks do not run the script that trains",
    "process_group": "a loader of a graph with storage ranks belongs to all ranks of the job",
    "cooperate": "the ranks of a host divide rows that they hold, and these ranks hold none",
    "partial_aggregation": "storage ranks would have to know the weights of your model's sums",
}


@dataclass(eq=False)
class Following:
    """A storage rank makes a loader because a message says so.

    Attributes:
        connects: True if the ranks that train hear of an error from here on.
    """

    connects: bool = False


#: The loader that this storage rank is making; None: a script makes it.
following: contextvars.ContextVar[Following | None] = contextvars.ContextVar("following", default=None)


@dataclass(eq=False)
class Announced:
    """A loader that the storage ranks follow.

    Attributes:
        number: number by which messages name it.
        mistake: why the loader cannot work with storage ranks; None: no reason.
    """

    roles: Roles
    number: int
    mistake: ValueError | None = None

    def follow(self, comm: Comm) -> None:
        """Tells the storage ranks when the loader is gone, and with it the last of its epochs, which may live longer."""
        weakref.finalize(comm, self.roles.drop, self.number).atexit = False

    def load_plan(self, loader: Any) -> None:
        """Tells the storage ranks that a loader with a memory budget will begin an epoch, maybe with the plan of a loaded state."""
        place, loaded = loader._bookmark, loader._planning.loaded
        self._post(
            "plan", place.epochs.draws(place.epoch), place.resume, plan=None if loaded is None else loaded.values
        )

    def begin_epoch(self, draws: Draws, resume: Resume | None) -> None:
        """Tells the storage ranks that an epoch begins, and where.

        It is told when this rank asks for the first batch or leaves, because until then the epoch's number may change.
        """
        with contextlib.suppress(RuntimeError):  # without the store the storage ranks end, and this rank hears of it
            self._post("epoch", draws, resume)

    def _post(self, do: str, draws: Draws, resume: Resume | None, **more: Any) -> None:
        where = None if resume is None else [resume.round, resume.by_round]
        at = {"epoch": draws.epoch, "seed": draws.seed, "logical_ranks": draws.logical_ranks, "resume": where}
        self.roles.post({"do": do, "number": self.number, **at, **more})


def announce(loader: Any, part: Any, sampling: Any, options: Options, kwargs: Mapping[str, Any]) -> Announced | None:
    """Tells the storage ranks of a graph that this rank makes a loader.

    Returns None if there are no storage ranks, or if this is a storage rank that makes the loader because rank 0 told it to.

    Args:
        part: the loader's data.
        sampling, options, kwargs: the user's arguments, without those that name seeds, which ``loader._seeds_given()`` returns.

    Raises:
        ValueError: the script of a storage rank makes a loader itself.
    """
    if not isinstance(part, PartitionedGraph) or not part.num_storage_ranks:
        return None
    made_here = following.get()
    if made_here is not None:
        made_here.connects = True
        return None
    if part.only_stores:
        error = ValueError(
            "this rank only stores (storage_ranks of salientpp.load), so it makes no loader itself; call salientpp.serve(part) where part.only_stores is True"
        )
        go_astray(error, part.job)
        raise error
    part.check_session()  # before anything is told in the name of another process
    roles = part.roles
    found = Announced(roles, roles.number_of_loader())
    message = {"do": "make", "number": found.number, "graph": part.fingerprint, "root": str(part.root)}
    try:
        kind = next(base.__name__ for base in type(loader).__mro__ if base.__module__.startswith("salientpp.loader."))
        of_draws = {name: value for name, value in vars(sampling).items() if name not in OPTIONS}
        arguments = {**of_draws, **kwargs, **loader._seeds_given()}
        message = {**message, "loader": kind, "arguments": _sent(options, arguments)}
    except ValueError as error:
        found.mistake = error
        message = {**message, "mistake": str(error)}
    roles.post(message)
    return found


def _sent(options: Options, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the storage ranks are told, as JSON.

    Raises:
        ValueError: an argument does not work with storage ranks.
    """
    names = (name for name, option in OPTIONS.items() if option.label is None)  # others are entries of another option
    given = {name: options.mappings.get(name, getattr(options, name)) for name in names}
    wanted = {name: value for name, value in given.items() if value != OPTIONS[name].default} | dict(arguments)
    for name, why in _REFUSED.items():
        if is_given(wanted.get(name)):
            raise ValueError(f"{named(name)} does not work with storage_ranks: {why}; leave it out")
    if is_given(options.memory_device):
        raise ValueError(
            "memory['device'] does not work with storage_ranks: all ranks make the plan, and storage ranks need no accelerator; pass device_rows= instead"
        )
    if isinstance(wanted.get("columns"), Mapping):
        raise ValueError(
            "columns= with row sources does not work with storage_ranks: storage ranks do not run the script that trains; name stored attributes"
        )
    return {
        name: _to_json(name, value) for name, value in wanted.items() if name not in _OF_BATCHES and value is not None
    }


#: Arguments that are seeds, or have one value per seed.
_OF_SEEDS = ("input_nodes", "input_time", "input_id", "edge_label_index", "edge_label", "edge_label_time")


def _to_json(name: str, value: Any) -> Any:
    """Returns an argument as JSON. Of seeds, and of values of seeds, only the dtype and the shape are told."""
    if name in _OF_SEEDS and isinstance(value, (Tensor, np.ndarray)):
        like = value if isinstance(value, Tensor) else torch.from_numpy(value)
        if name == "edge_label_index":
            return {"empty": ["int64", [2, 0]]}
        dtype = "int64" if like.dtype == torch.bool else str(like.dtype).removeprefix("torch.")
        return {"empty": [dtype, [0, *like.shape[1:]]]}
    if name == "input_nodes" and isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) == 2 and isinstance(value[0], str):
            return {"tuple": [value[0], _to_json(name, value[1])]}
        return {"empty": ["int64", [0]]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, NegativeSampling):
        return {"negatives": [value.mode.value, value.amount]}
    if isinstance(value, Mapping):
        return {"mapping": [[_to_json(name, key), _to_json(name, of)] for key, of in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(name, each) for each in value]}
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, list):
        return [_to_json(name, each) for each in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, NumNeighbors):
        return {"fanouts": [_to_json(name, value.values), _to_json(name, value.default)]}
    raise ValueError(
        f"{named(name)} with storage_ranks must be made of numbers, text, lists and mappings, which the storage ranks are told, got {type(value).__name__}; "
        "leave it out"
    )


def of_json(value: Any) -> Any:
    if isinstance(value, list):
        return [of_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "empty":
        return torch.empty(content[1], dtype=getattr(torch, content[0]), device="cpu")
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "seconds":
        return timedelta(seconds=content)
    if kind == "negatives":
        return NegativeSampling(*content)
    if kind == "fanouts":
        return NumNeighbors(*map(of_json, content))
    if kind == "mapping":
        return {of_json(key): of_json(of) for key, of in content}
    return tuple(of_json(each) for each in content)
