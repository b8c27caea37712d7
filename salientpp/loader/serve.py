"""Storage ranks: they make the loaders of the ranks that train too, and answer their requests for rows and draws.

A loader of a graph with ``storage_ranks`` announces itself to the storage ranks, with the arguments on which the exchange depends, and announces each of its
epochs. The storage ranks then make the same loader and begin the same epochs, without seeds. From there on a storage rank is a rank that has no batches.
"""

from __future__ import annotations

import contextvars
import enum
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from salientpp.engine.state import Disagreement, Resume
from salientpp.loader.options import OPTIONS
from salientpp.loader.values import Options, is_given, named
from salientpp.ranks.comm import Comm
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.roles import Roles
from salientpp.ranks.roll import go_astray
from salientpp.store.directory.opened import PartitionedGraph

#: Arguments that change nothing on a storage rank, which has no batches, or whose value there is the default.
_OF_BATCHES = (
    "transform", "transform_sampler_output", "device", "cache", "custom_cls", "filter_per_worker", "directed", "is_sorted", "worker_init_fn",
    "generator", "pin_memory", "pin_memory_device", "persistent_workers", "prefetch_factor", "num_workers", "in_order", "dataset", "collate_fn",
    "multiprocessing_context", "device_rows_zero_copy",
)  # fmt: skip

#: Arguments that need rows or code on the rank that trains -> reason.
_REFUSED: Mapping[str, str] = {
    "neighbor_sampler": "storage ranks draw with the loader's own arguments; pass num_neighbors, time_attr and weight_attr instead",
    "ways": "a way has code on every rank, and storage ranks do not run the script that trains",
    "process_group": "a loader of a graph with storage ranks belongs to all ranks of the job",
    "cooperate": "the ranks of a host divide rows that they hold, and these ranks hold none",
    "partial_aggregation": "storage ranks would have to know the weights of your model's sums",
}

#: The loaders of this process, if it is a storage rank that follows messages.
_serving: contextvars.ContextVar[_Storage | None] = contextvars.ContextVar("serving", default=None)


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

    def begin_epoch(self, loader: Any) -> None:
        """Tells the storage ranks that an epoch begins, and where."""
        place, planning = loader._bookmark, loader._planning
        resume = None if place.resume is None else [place.resume.round, place.resume.by_round]
        plan = None if planning is None or planning.loaded is None else planning.loaded.values
        draws = place.epochs.draws(place.epoch)
        self.roles.post({
            "do": "epoch", "number": self.number, "epoch": draws.epoch, "seed": draws.seed, "logical_ranks": draws.logical_ranks, "resume": resume,
            "plan": plan,
        })  # fmt: skip


def announce(loader: Any, part: PartitionedGraph, options: Options, arguments: Mapping[str, Any]) -> Announced | None:
    """Tells the storage ranks that a loader is made. Returns None on a storage rank.

    Args:
        options: the package's options, as given.
        arguments: all other arguments, by name.

    Raises:
        ValueError: this rank stores.
    """
    storage = _serving.get()
    if storage is not None:
        storage.connects = True
        return None
    if part.stores:
        error = ValueError(
            "this rank only stores (storage_ranks of salientpp.load), so it makes no loader of its own; call salientpp.serve(part) where part.stores is True"
        )
        go_astray(error)
        raise error
    roles = Roles.of_job(part.num_storage_ranks)
    found = Announced(roles, roles.number_of_loader())
    message = {"do": "make", "number": found.number, "graph": part.fingerprint, "root": str(part.root)}
    try:
        kind = next(base.__name__ for base in type(loader).__mro__ if base.__module__.startswith("salientpp.loader."))
        roles.post({**message, "loader": kind, "arguments": _sent(options, arguments)})
    except ValueError as error:
        found.mistake = error
        roles.post({**message, "mistake": str(error)})
    weakref.finalize(loader, roles.drop, found.number).atexit = False
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
    if isinstance(wanted.get("columns"), Mapping):
        raise ValueError(
            "columns= with row sources does not work with storage_ranks: storage ranks do not run the script that trains; name stored attributes"
        )
    return {
        name: _to_json(name, value) for name, value in wanted.items() if name not in _OF_BATCHES and value is not None
    }


#: Arguments that are seeds, or have one value per seed.
_OF_SEEDS = ("input_nodes", "input_time", "input_id", "edge_label_index", "edge_label", "edge_label_time")


def _to_json(name: str, value: Any, is_type: bool = False) -> Any:
    """Returns an argument as JSON. Of seeds, and of values of seeds, only the dtype and the shape are told."""
    if name in _OF_SEEDS and isinstance(value, (Tensor, np.ndarray)):
        like = torch.as_tensor(value)
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
    if isinstance(value, (list, set, frozenset)):
        return (
            [_to_json(name, each) for each in sorted(value, key=str)]
            if isinstance(value, (set, frozenset))
            else [_to_json(name, each) for each in value]
        )
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    raise ValueError(
        f"{named(name)} with storage_ranks must be made of numbers, text, lists and mappings, which the storage ranks are told, got {type(value).__name__}; "
        "leave it out"
    )


def _of_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_of_json(each) for each in value]
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
    if kind == "mapping":
        return {_of_json(key): _of_json(of) for key, of in content}
    return tuple(_of_json(each) for each in content)


@dataclass(eq=False)
class _Storage:
    """The graphs of a storage rank, by their fingerprint, and the loaders that it follows, by their number in messages."""

    parts: Mapping[str, PartitionedGraph]
    loaders: dict[int, Any] = field(default_factory=dict)
    connects: bool = False  # the other ranks hear of errors of the loader that is being made

    def follow(self, message: dict[str, Any]) -> None:
        number = message["number"]
        if message["do"] == "drop":
            self.loaders.pop(number, None)
            return
        try:
            if message["do"] == "make":
                self._make(message)
            elif number in self.loaders:  # otherwise it could not be made, on any rank
                self._begin(self.loaders[number], message)
        except RankFailure:
            raise
        except Exception as error:
            # The ranks that train have the same error, and their script may go on. A rank that waits for it would have raised RankFailure.
            if isinstance(error.__cause__, RankFailure):
                raise

    def _make(self, message: dict[str, Any]) -> None:
        from salientpp.loader import link_loader, node_loader  # they import this module

        kinds = {"NeighborLoader": node_loader.NeighborLoader, "LinkNeighborLoader": link_loader.LinkNeighborLoader}
        self.connects = False
        try:
            if "mistake" in message:
                raise ValueError(message["mistake"])
            part = self.parts.get(message["graph"])
            if part is None:
                raise ValueError(
                    f"a storage rank does not serve {message['root']}; load this graph there too, and pass all graphs to salientpp.serve"
                )
            arguments = {name: _of_json(value) for name, value in message["arguments"].items()}
            self.loaders[message["number"]] = kinds[message["loader"]](part, **arguments)
        except Exception as error:
            if self.connects:
                raise
            Comm.create(None, error=error)  # tells the ranks that train, and raises the error

    def _begin(self, loader: Any, message: dict[str, Any]) -> None:
        place, planning = loader._bookmark, loader._planning
        epochs = place.epochs
        if message["logical_ranks"] != epochs.placement.num_logical_ranks:
            placement, order = place.shares.with_logical_ranks(
                epochs.placement, message["logical_ranks"], message["seed"]
            )
            epochs.placement, epochs.order = placement, order
        epochs.seed, place.epoch = message["seed"], message["epoch"]
        place.resume = None if message["resume"] is None else Resume(0, *message["resume"])
        if planning is not None:
            planning.loaded = planning.read(message["plan"])
        iter(loader)

    def look(self) -> None:
        """Raises an error that a thread met which answers the ranks that train, or a failure that another rank has told."""
        for loader in self.loaders.values():
            engine = loader.engine
            failure = engine.counters.failure or engine.basis.comm.notes.failure()
            if failure is not None and not isinstance(failure, Disagreement):
                raise failure


def serve(*parts: PartitionedGraph) -> None:
    """Answers the ranks that train, on a rank that only stores. Returns when their scripts have ended.

    The rank needs to know nothing of the loaders: the ranks that train make and drop any number of them, in any order.

    Args:
        parts: results of :func:`load` with the same ``storage_ranks``, one for each graph of the job.

    Raises:
        ValueError: this rank trains, or there is no graph.
        RankFailure: a rank that trains failed or is gone.
    """
    if not parts or not all(isinstance(part, PartitionedGraph) and part.stores for part in parts):
        raise ValueError(
            "serve() is for a rank that only stores; load the graph with storage_ranks=, and call it where part.stores is True"
        )
    storage = _Storage({part.fingerprint: part for part in parts})
    token, roles = _serving.set(storage), Roles.of_job(parts[0].num_storage_ranks)
    try:
        for message in roles.messages(storage.look):
            storage.follow(message)
    finally:
        _serving.reset(token)
        roles.leave()
        storage.loaders.clear()
