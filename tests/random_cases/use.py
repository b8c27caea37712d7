"""Uses the loader of a random job step by step on one rank, and compares everything that it gives with what it must give."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from random_cases.compare import (
    Changes,
    expected_form,
    share_of,
    sizes_of,
    unlike,
    unlike_shares,
    unlike_sums,
    without_padding,
)
from random_cases.counts import wrong_counts
from random_cases.plain import Plain
from random_cases.scene import Scene

from salientpp import LinkNeighborLoader, PPRSampler
from salientpp.engine.state import Disagreement
from salientpp.ways.lookahead.way import Lookahead


@dataclass
class Report:
    """Observations of a rank.

    Attributes:
        refused: text of the error with which the loader was refused.
        kind: type of this error.
        faults: descriptions of everything that is wrong.
        checked: number of batches that were compared.
        traffic: number of batches, bytes sent and received, and messages of both kinds, if the job is of whole epochs.
    """

    refused: str | None = None
    kind: str = ""
    faults: list[str] = field(default_factory=list)
    checked: int = 0
    traffic: tuple[int, ...] | None = None


class Use:
    """Uses a loader step by step, and compares its batches with the expected ones."""

    def __init__(self, scene: Scene, loader: Any, plain: Plain, report: Report) -> None:
        self.scene, self.loader, self.plain, self.report, self.job = scene, loader, plain, report, scene.job
        self.epoch, self.is_changed = 0, False
        self.changes = Changes.of(scene.job, scene.seed_type, scene.data if scene.job.graph.is_directory else None)
        self.whole_epochs: list[int] = []

    def run(self) -> None:
        orders_itself = not {"sampler", "batch_sampler"} & self.job.arguments.keys()
        if orders_itself and len(self.loader) != len(self.plain.turns(0)):
            self.report.faults.append(f"len(loader) is {len(self.loader)}, expected {len(self.plain.turns(0))}")
            return
        only_epochs = True
        for step in self.job.steps:
            words, _, number = step.rpartition(" ") if step[-1].isdigit() else (step, "", "0")
            only_epochs &= words in _WHOLE
            getattr(self, f"_{words.replace(' ', '_')}")(int(number))
            if self.report.faults:
                self.report.faults[-1] = f"step {step!r}: {self.report.faults[-1]}"
                return
        self._check_memory()
        if only_epochs:
            if not self.job.is_odd:
                turns = [pieces for epoch in self.whole_epochs for pieces in self.plain.turns(epoch)]
                batches = [batch for epoch in self.whole_epochs for batch in self._expected(epoch)]
                num_seeds = sum(len(positions) for pieces in turns for _, _, positions in pieces)
                self.report.faults += wrong_counts(self.scene, self.loader, num_seeds, batches)
            stats = self.loader.stats()
            self.report.traffic = (
                stats.batches,
                stats.bytes_sent,
                stats.bytes_received,
                stats.control_messages,
                stats.row_messages,
            )

    # --- comparison ---------------------------------------------------------------------------------------

    def _expected(self, epoch: int) -> list[Any]:
        return self.plain.batches(epoch)

    def _compare(self, got: list[Any], expected: list[Any], whole: bool = True, first: int = 0) -> None:
        if self.job.value("cooperate") is not None:
            self._compare_shares(got, expected, whole)
            return
        if whole and len(got) != len(expected):
            self.report.faults.append(f"{len(got)} batches, expected {len(expected)}")
            return
        for number, (batch, want) in enumerate(zip(got, expected)):
            wrong = self._unlike(batch, want)
            self.report.checked += 1
            if wrong:
                self.report.faults.append(f"batch {first + number} of rank {self.scene.rank}: {'; '.join(wrong[:4])}")
                return

    def _compare_shares(self, got: list[Any], expected: list[Any], whole: bool) -> None:
        """Compares the shares of a host together with the batch of one rank."""
        everyone: list[Any] = [[share_of(batch) for batch in got]]
        if self.job.ranks > 1:
            (mine,) = everyone
            everyone = [None] * self.job.ranks
            dist.all_gather_object(everyone, mine, self.scene.place.group)
        host_of = self.scene.layout.host_of
        of_host = [shares for host, shares in zip(host_of, everyone) if host == host_of[self.scene.rank]]
        if whole and {len(shares) for shares in of_host} != {len(expected)}:
            self.report.faults.append(f"{[len(shares) for shares in of_host]} shares, expected {len(expected)}")
        for number, (shares, want) in enumerate(zip(zip(*of_host), expected)):
            wrong = unlike_shares(shares, expected_form(want, self.changes))
            self.report.checked += 1
            if wrong:
                self.report.faults.append(f"shares of batch {number}: {'; '.join(wrong[:4])}")
                return

    def _unlike(self, batch: Any, want: Any) -> list[str]:
        job = self.job
        want = expected_form(want, self.changes)
        if "partial" in batch and batch.partial is not None:
            return unlike_sums(batch, want, self.scene.whole.x.dtype)
        if job.value("pad") is not None:
            if job.graph.is_directory and (wrong := self._unlike_original(batch)):
                return wrong
            batch, wrong = without_padding(batch)
            if wrong:
                return wrong
        if job.arguments.get("transform") == "marked":
            if "mark" not in batch:
                return ["transform was not applied"]
            del batch.mark
        return unlike(batch, want)

    def _unlike_original(self, batch: Any) -> list[str]:
        """Compares the original ids of padding with -1."""
        for type_ in self.job.graph.types:
            store = batch if type_ is None else batch[type_]
            if "n_id" in store and "node_mask" in store:
                ids = self.scene.data.original_id(store.n_id, type_)
                if bool(((ids == -1) == store.node_mask).any()):
                    return [f"original_id of padding of type {type_} is {ids[~store.node_mask].tolist()}"]
        return []

    def _taken(self, batches: Iterator[Any], number: int | None = None) -> list[Any]:
        """Takes batches. Static buffers are copied."""
        found = []
        while number is None or len(found) < number:
            try:
                batch = next(batches)
            except StopIteration:
                break
            found.append(batch.clone() if self.job.value("pad_static") is True else batch)
        return found

    # --- steps --------------------------------------------------------------------------------------------

    def _epoch(self, _: int) -> None:
        self._compare(self._taken(iter(self.loader)), self._expected(self.epoch))
        self.whole_epochs.append(self.epoch)
        self.epoch += 1

    def _leave(self, number: int) -> None:
        batches = iter(self.loader)
        taken = self._taken(batches, number + self.scene.rank % 2)
        del batches  # ends the epoch of this rank. Comparisons may wait for ranks that take more batches.
        self._compare(taken, self._expected(self.epoch), whole=False)
        self.epoch += 1

    def _again(self, number: int) -> None:
        self._leave(number)
        self._epoch(0)

    def _set(self, number: int) -> None:
        self.loader.set_epoch(number)
        self.epoch = number
        self._epoch(0)

    def _rounds(self, _: int) -> None:
        if self.job.value("pad_static") is True:
            return
        batches = []
        for of_round in self.loader.rounds():
            batches += of_round
            if self.job.ranks > 1:  # as ranks that exchange gradients after each round
                dist.barrier(self.scene.place.group)
        self._compare(batches, self._expected(self.epoch))
        self.whole_epochs.append(self.epoch)
        self.epoch += 1

    def _meet(self, _: int) -> None:
        """Ranks meet after each batch until none has more, as ranks that exchange gradients. A rank that has no more batches meets the others, too."""
        if self.job.ranks == 1 or not self._has_even_rounds:
            return self._epoch(0)
        expected = self._expected(self.epoch)
        numbers: list[Any] = [None] * self.job.ranks
        dist.all_gather_object(numbers, len(expected), self.scene.place.group)
        batches, found = iter(self.loader), []
        for _ in range(max(numbers)):
            found += self._taken(batches, 1)
            dist.barrier(self.scene.place.group)
        self._taken(batches, 1)
        self._compare(found, expected)
        self.whole_epochs.append(self.epoch)
        self.epoch += 1

    def _change(self, number: int) -> None:
        """The user writes to the data between two batches. The batches from then on have the new contents."""
        if self.job.graph.is_stores or self.job.value("pad_static"):
            return self._epoch(0)
        batches, expected = iter(self.loader), self._expected(self.epoch)
        first = self._taken(batches, number % max(1, len(expected)))
        self._compare(first, expected, whole=False)
        self.scene.change(number)
        self.is_changed = True
        self.plain = self.scene.plain(self.loader.seed)
        self._compare(self._taken(batches), self._expected(self.epoch)[len(first) :], first=len(first))
        self.epoch += 1

    def _reset(self, _: int) -> None:
        self.loader.reset_stats()
        if self.loader.stats().rows or self.loader.stats().batches:
            self.report.faults.append("reset_stats() leaves counts")
        self.whole_epochs.clear()
        self._epoch(0)

    def _memory(self, _: int) -> None:
        self._check_memory()
        self._epoch(0)

    def _call(self, _: int) -> None:
        """Asks for the batch of one seed, twice. Call i draws with the keys of epoch -i."""
        static = self.job.value("pad_static") is True
        if self.job.ranks > 1 or static or not len(self.scene.seeds(self.scene.layout.parts_of(self.scene.rank)).T):
            return
        loader = self.scene.loader(seed=self.loader.seed)
        first = self.scene.layout.logical_ranks_of(self.scene.rank)[0]
        for call in (1, 2):
            self._compare([loader(torch.tensor([0]))], self.plain.drawn(-call, [[(first, 0, [0])]]))
        self._epoch(0)

    def _has_state(self) -> bool:
        """True if another loader can take up a state of this one. A state belongs to the data that a loader was made with."""
        return self.loader.has_state and "neighbor_sampler" not in self.job.arguments and not self.is_changed

    def _resume(self, number: int) -> None:
        expected = self._expected(self.epoch)
        batches = iter(self.loader)
        first = self._taken(batches, number)
        state = json.loads(json.dumps(self.loader.state_dict())) if self._has_state() else None
        del batches
        self._compare(first, expected, whole=False)
        if state is None:
            self.epoch += 1
            return
        ended = len(first) < number  # then the state is the start of the next epoch
        self.loader = self.scene.loader()
        if number % 2:
            self._taken(iter(self.loader), 1)
        self.loader.load_state_dict(state)
        if ended and state["epoch"] == self.epoch + 1:
            self.epoch += 1
            expected, first = self._expected(self.epoch), []
        if self.job.ranks > 1:
            epochs: list[Any] = [None] * self.job.ranks
            dist.all_gather_object(epochs, state["epoch"], self.scene.place.group)
            if (
                len(set(epochs)) > 1
            ):  # a rank that had finished answers the others first, so that every rank must iterate again
                return self._resume_apart(state["epoch"], expected, len(first), max(epochs))
        rest = self._taken(iter(self.loader))
        self._compare(rest, expected[len(first) :], first=len(first))
        self.epoch = state["epoch"] + 1
        if self.job.value("pad") is not None:
            fresh = self.scene.loader(seed=state["seed"])
            fresh.set_epoch(state["epoch"])
            wanted = [sizes_of(batch) for batch in self._taken(iter(fresh))][len(first) :]
            if [sizes_of(batch) for batch in rest] != wanted:
                self.report.faults.append(
                    f"padded sizes of a resumed epoch are {[sizes_of(batch) for batch in rest]}, expected {wanted}"
                )

    def _resume_apart(self, epoch: int, expected: list[Any], done: int, last: int) -> None:
        """Resumes if some ranks had finished the epoch. These first answer the others, and then begin the next epoch, so that the others iterate again."""
        if epoch < last:
            rest = self._taken(iter(self.loader))
            if self.job.value("cooperate") is None:  # shares are compared on all ranks together
                self._compare(rest, expected[done:], first=done)
        self.epoch = last
        self._epoch(0)

    def _share_state(self, number: int) -> None:
        """All ranks load the state of rank 0."""
        if not self._has_state() or not self.job.graph.is_directory:
            return
        batches = iter(self.loader)
        first = self._taken(batches, number)
        states = [self.loader.state_dict()]
        del batches
        self._compare(first, self._expected(self.epoch), whole=False)
        if self.job.ranks > 1:
            dist.broadcast_object_list(states, 0, self.scene.place.group)
        (state,) = states
        self.loader = self.scene.loader()
        self.loader.load_state_dict(state)
        epoch, round_ = state["epoch"], state["round"]
        turns = self.plain.turns(epoch)
        expected = [batch for batch, pieces in zip(self._expected(epoch), turns) if pieces[0][1] >= round_]
        if self.job.ranks == 1:  # its own state counts batches
            expected = self._expected(epoch)[state["batches"] :]
        self._compare(self._taken(iter(self.loader)), expected)
        self.epoch = epoch + 1

    def _copy(self, _: int) -> None:
        self._copied(copy.copy(self.loader))

    def _pickle(self, _: int) -> None:
        if not self.job.arguments.keys() & _NOT_PICKLED:
            self._copied(pickle.loads(pickle.dumps(self.loader)))
        elif "adj_t" not in self.job.graph.attributes:  # torch has no deep copies of CSR tensors
            self._copied(copy.deepcopy(self.loader))

    def _copied(self, other: Any) -> None:
        before = self.loader.stats().batches
        self._compare(self._taken(iter(other)), self._expected(self.epoch))
        if self.loader.stats().batches != before:
            self.report.faults.append("a copy counts in the statistics of the loader")
        other.set_epoch(self.epoch + 5)
        if "batch_sampler" not in self.job.arguments and hasattr(other.sampler, "set_epoch"):  # Lightning calls it
            other.sampler.set_epoch(self.epoch + 6)
        del other
        gc.collect()
        self._epoch(0)
        if "Endless" not in self.job.arguments.get("batch_sampler", ""):
            list(self.loader.batch_sampler)

    def _fork(self, _: int) -> None:
        expected = [expected_form(want, self.changes) for want in self._expected(self.epoch)]  # not in the child
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                self._compare(self._taken(iter(self.loader)), self._expected(self.epoch))
                os.write(writing, json.dumps(self.report.faults).encode()[:4000])
                code = 0
            except BaseException as error:
                os.write(writing, json.dumps([f"in a fork: {type(error).__name__}: {error}"]).encode()[:4000])
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        del expected
        self.report.faults += [f"in a fork: {words}" for words in json.loads(text or b'["no answer"]')]
        if not self.report.faults:
            self._epoch(0)

    def _lend(self, _: int) -> None:
        """Another loader draws with the sampler of this one."""
        sampler = self.loader.engine.basis.source.sampler
        # With another seed, a budget that just suffices may not do so.
        other = self.scene.loader(
            neighbor_sampler=sampler, seed=self.loader.seed if "read_ahead" in self.job.arguments else 4
        )
        self._compare(self._taken(iter(other)), self.scene.plain(other.seed).batches(0))
        if (
            not self.job.link
            and not self.job.graph.is_stores
            and "time_attr" not in self.job.arguments
            and not isinstance(sampler, PPRSampler)
        ):
            edges = ("a", "to", "b") if self.job.graph.is_typed else None
            names = {"process_group", "ranks_per_host", "logical_ranks"}  # the sampler is for these hosts and parts
            group = {name: value for name, value in self.scene.arguments().items() if name in names}
            for _ in LinkNeighborLoader(
                self.scene.data, [], edges, neighbor_sampler=sampler, batch_size=50, uneven="exact", **group
            ):
                pass
        self._epoch(0)

    def _disagree(self, _: int) -> None:
        """Ranks begin different epochs, and agree afterwards."""
        if self.job.ranks > 1:
            self.loader.set_epoch(self.scene.rank)
            try:
                for _ in self.loader:
                    pass
                if not len(self.loader):  # a rank without batches is told when it begins the next epoch
                    self._told()
                else:
                    self.report.faults.append("ranks with different epochs go on")
                    return
            except Disagreement:
                pass
        self._set(7)

    def _told(self) -> None:
        """Waits for the error that this rank's thread has found."""
        with contextlib.suppress(Disagreement):
            self.loader.reset_stats()

    def _two(self, _: int) -> None:
        """Two loaders in turn."""
        if self.job.value("pad_static") and not self._has_even_rounds:
            return self._epoch(0)
        changes = {"seed": 11} if "seed" not in self.job.arguments else {}
        other = self.scene.loader(**changes)
        plain = self.scene.plain(other.seed)
        mine, theirs, first, second = self._in_turn(self.loader), self._in_turn(other), [], []
        got: Any = []
        found: Any = []
        while got is not None or found is not None:
            got, found = next(mine, None), next(theirs, None)
            first += got or []
            second += found or []
        self._compare(first, self._expected(self.epoch))
        self._compare(second, plain.batches(0))
        self.epoch += 1

    def _in_turn(self, loader: Any) -> Iterator[list[Any]]:
        """Yields the batches one by one; those of a round together if a rank has more of them than another, which waits for the end of the round."""
        if self._has_even_rounds:
            batches = iter(loader)
            return iter(lambda: self._taken(batches, 1), [])
        return iter(loader.rounds())

    @functools.cached_property
    def _has_even_rounds(self) -> bool:
        """True if ranks that have batches in a round have equally many. A rank with fewer gives them at the end of the round, and waits for the others."""
        order, joined = self.plain.order, self.plain.joined
        of_ranks = [order.turns(0, rank, joined) for rank in range(self.scene.layout.ranks)]
        batches = [collections.Counter(pieces[0][1] for pieces in turns) for turns in of_ranks]
        return all(len({of_rank[number] for of_rank in batches} - {0}) <= 1 for number in set().union(*batches))

    # --- counts and memory ----------------------------------------------------------------------------------

    def _check_memory(self) -> None:
        used = self.loader.memory_used()
        if any(value < 0 for value in used.values()):
            self.report.faults.append(f"memory_used() is negative: {used}")
        way = self.loader.engine.way(Lookahead)
        for planner in () if way is None else way.planners.values():
            known = sum(each.nbytes for each in list(planner._lists))
            if known > planner.shape.list_bytes:
                self.report.faults.append(
                    f"{known} bytes of known batches, more than the {planner.shape.list_bytes} planned for them"
                )
        for name, tiers in (
            ("read_ahead", ("read_ahead",)),
            ("memory", ("cache", "lookahead")),
        ):
            budget = self.job.value(name)
            if (
                name not in self.job.arguments
                or isinstance(budget, bool)
                or budget is None
                or (name == "memory" and self._gives_ways)
            ):
                continue
            budget = _bytes(budget)
            taken = sum(used.get(tier, 0) for tier in tiers)
            if budget is not None and taken > budget:
                self.report.faults.append(f"memory_used() is {used}, more than {name}={budget}")

    @property
    def _gives_ways(self) -> bool:
        return bool({"replication_factor", "lookahead", "cache"} & self.job.arguments.keys())


#: Steps that are whole epochs.
_WHOLE = ("epoch", "set", "rounds", "meet", "reset", "memory")

_NOT_PICKLED = {"collate_fn", "policy", "generator"}


def _bytes(given: Any) -> int | None:
    if type(given) is int:
        return given
    units = {"kB": 10**3, "MB": 10**6, "MiB": 2**20, "B": 1}
    return next(
        (
            int(given.removesuffix(unit)) * factor
            for unit, factor in units.items()
            if given.endswith(unit) and given.removesuffix(unit).isdigit()
        ),
        None,
    )
