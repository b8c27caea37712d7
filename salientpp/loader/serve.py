"""Storage ranks: they follow the ranks that train, and answer their requests for rows and draws.

A loader of a graph with ``storage_ranks`` announces itself and each of its epochs (:mod:`salientpp.loader.announcement`). The storage ranks then make the same
loader and begin the same epochs, without seeds. From there on a storage rank is a rank that has no batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from salientpp.engine.run import Epoch
from salientpp.engine.state import Disagreement, Resume
from salientpp.loader.announcement import Following, following, of_json
from salientpp.loader.engine_loader import EngineLoader
from salientpp.loader.link_loader import LinkNeighborLoader
from salientpp.loader.node_loader import NeighborLoader
from salientpp.ranks.comm import Comm
from salientpp.ranks.failure import RankFailure
from salientpp.ranks.job import Job
from salientpp.ranks.roles import Roles
from salientpp.ranks.roll import go_astray, words_of
from salientpp.store.directory.opened import PartitionedGraph

#: The classes of loaders, by the name that messages give them.
_LOADERS = {each.__name__: each for each in (NeighborLoader, LinkNeighborLoader)}


@dataclass(eq=False)
class Storage:
    """Follows the messages of the ranks that train, on a storage rank.

    Attributes:
        parts: its graphs, by their fingerprint.
        job, roles: the ranks, and their messages.
        loaders: the loaders that it follows, by their number in messages.
    """

    parts: Mapping[str, PartitionedGraph]
    job: Job
    roles: Roles
    loaders: dict[int, Any] = field(default_factory=dict)
    _sent: list[int] = field(default_factory=lambda: [0, 0])  # rows and bytes of loaders that are gone

    def serve(self) -> None:
        """Serves until the scripts of all ranks that train have ended.

        Raises:
            RankFailure: another rank failed or is gone.
        """
        try:
            for message in self.roles.messages(self.look):
                self.follow(message)
        except RankFailure as error:
            ended = (
                "; it has ended this session with storage hosts, so call salientpp.load again" if self.job.name else ""
            )
            # Ranks that train may have caught their own error, and then make another loader.
            go_astray(RankFailure(f"{error}{ended}"), self.job)
            self.roles.leave(stay=False)  # another storage rank may be the reason
            raise
        except BaseException as error:
            if not self.job.name:  # in a session, the server tells them
                self.job.tell_lost(f"rank {self.job.rank} ended early: {words_of(error)}")
            self.roles.leave(stay=False)
            raise
        self.roles.leave()

    @property
    def sent(self) -> tuple[int, int]:
        """Numbers of rows and of bytes that this rank has sent."""
        traffic = [loader.engine.basis.source.exchange.traffic for loader in [*self.loaders.values()]]
        rows, bytes_ = (sum(getattr(each, name) for each in traffic) for name in ("rows_sent", "bytes_sent"))
        return self._sent[0] + rows, self._sent[1] + bytes_

    def follow(self, message: dict[str, Any]) -> None:
        number = message["number"]
        if message["do"] == "drop":
            self._drop(number)
            return
        try:
            if message["do"] == "make":
                self._make(message)
            elif number in self.loaders:  # otherwise it could not be made, on any rank
                loader = self.loaders[number]
                with contextlib.suppress(
                    Disagreement
                ):  # the ranks that train raised it too, and have mended the reason
                    loader.engine.close()
                _set_bookmark(loader, message)
                if message["do"] == "plan":
                    loader._planning.loaded = loader._planning.read(message["plan"])
                    loader._follow_loaded_plan()
                else:
                    Epoch(EngineLoader._begin_epoch(loader)).close()  # the plan, if any, was followed before
        except Exception as error:
            # The ranks that train have the same error, and their script may go on. A rank that waits for it would have raised RankFailure.
            is_failure = isinstance(error, RankFailure) or isinstance(error.__cause__, RankFailure)
            # A rank that could not make its loader may go on too. In a session, the server tells if it is gone.
            if is_failure and not (self.job.name and message["do"] == "make"):
                raise

    def _drop(self, number: int) -> None:
        loader = self.loaders.pop(number, None)
        if loader is not None:
            traffic = loader.engine.basis.source.exchange.traffic
            self._sent = [self._sent[0] + traffic.rows_sent, self._sent[1] + traffic.bytes_sent]

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
            Comm.create(None, error=error, job=self.job)  # tells the ranks that train, and raises the error
        finally:
            following.reset(token)

    def look(self) -> None:
        """Raises an error that a thread met which answers the ranks that train, or RankFailure if another rank failed or is gone."""
        for loader in self.loaders.values():
            engine = loader.engine
            failure = engine.counters.failure or engine.basis.comm.notes.failure()
            if failure is not None and not isinstance(failure, Disagreement):
                raise failure
        if (lost := self.job.lost()) is not None:
            raise RankFailure(lost)


def _set_bookmark(loader: Any, message: dict[str, Any]) -> None:
    """Makes the next epoch of a loader begin where rank 0 begins."""
    place, epochs = loader._bookmark, loader._bookmark.epochs
    if message["logical_ranks"] != epochs.placement.num_logical_ranks:
        placement, order = place.shares.with_logical_ranks(epochs.placement, message["logical_ranks"], message["seed"])
        epochs.placement, epochs.order = placement, order
    epochs.seed, place.epoch = message["seed"], message["epoch"]
    place.resume = None if message["resume"] is None else Resume(0, *message["resume"])


def serve(*parts: PartitionedGraph) -> None:
    """Answers the ranks that train, on a rank that only stores. Returns when their scripts have ended.

    The rank needs to know nothing of the loaders: the ranks that train make and drop any number of them, in any order.

    Args:
        parts: results of :func:`load` with the same ``storage_ranks``, one for each graph of the job.

    Raises:
        ValueError: this rank trains, or there is no graph.
        RankFailure: a rank that trains failed or is gone.
    """
    are_stored = parts and all(isinstance(part, PartitionedGraph) and part.only_stores for part in parts)
    job = parts[0].job if are_stored else None
    if job is None:
        raise ValueError(
            "serve() is for a rank that only stores; load the graph with storage_ranks=, and call it where part.only_stores is True"
        )
    storage = Storage({part.fingerprint: part for part in parts}, job, parts[0].roles)
    try:
        storage.serve()
    finally:
        storage.loaders.clear()
