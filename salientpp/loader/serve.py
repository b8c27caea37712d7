"""Storage ranks: they follow the ranks that train, and answer their requests for rows and draws.

A loader of a graph with ``storage_ranks`` announces itself and each of its epochs (:mod:`salientpp.loader.announcement`). The storage ranks then make the same
loader and begin the same epochs, without seeds. From there on a storage rank is a rank that has no batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from salientpp.engine.state import Disagreement, Resume
from salientpp.loader.announcement import Following, following, of_json
from salientpp.loader.link_loader import LinkNeighborLoader
from salientpp.loader.node_loader import NeighborLoader
from salientpp.ranks.comm import Comm
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.roles import Roles
from salientpp.store.directory.opened import PartitionedGraph

#: The classes of loaders, by the name that messages give them.
_LOADERS = {each.__name__: each for each in (NeighborLoader, LinkNeighborLoader)}


@dataclass(eq=False)
class _Storage:
    """The graphs of a storage rank, by their fingerprint, and the loaders that it follows, by their number in messages."""

    parts: Mapping[str, PartitionedGraph]
    loaders: dict[int, Any] = field(default_factory=dict)

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
        made_here = Following()
        token = following.set(made_here)
        try:
            if "mistake" in message:
                raise ValueError(message["mistake"])
            part = self.parts.get(message["graph"])
            if part is None:
                raise ValueError(
                    f"a storage rank does not serve {message['root']}; load this graph there too, and pass all graphs to salientpp.serve"
                )
            arguments = {name: of_json(value) for name, value in message["arguments"].items()}
            self.loaders[message["number"]] = _LOADERS[message["loader"]](part, **arguments)
        except Exception as error:
            if made_here.connects:
                raise
            Comm.create(None, error=error)  # tells the ranks that train, and raises the error
        finally:
            following.reset(token)

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
    roles = Roles.of_job(parts[0].num_storage_ranks)
    try:
        for message in roles.messages(storage.look):
            storage.follow(message)
    finally:
        roles.leave()
        storage.loaders.clear()
