"""A loader over an engine that pads its batches, if the option ``pad`` is given."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch_geometric.data import Data

from salientpp.engine.run import Run
from salientpp.loader.construction import reported
from salientpp.loader.engine_loader import EngineLoader
from salientpp.loader.padding import Padding, padded_bytes, padding_of
from salientpp.loader.statistics import LoaderStats
from salientpp.loader.values import Options
from salientpp.processes import lazy


class PaddedLoader(EngineLoader):
    """Loader that pads its batches and calls the user's ``transform`` on them. ``pad`` and its entries are its options."""

    _given_options: Options
    transform: Callable[[Any], Any] | None

    @property
    def _finishing(self) -> Callable[[Any], Any] | None:
        """Function that the loader calls on each complete batch. It pads the batch, if ``pad`` is given, and calls the user's ``transform``. It may be None."""
        return self.transform if self._given_options.pad is None else self._fill_up

    def _fill_up(self, batch: Data) -> Data:
        batch = self._padding(batch)
        return batch if self.transform is None else self.transform(batch)

    @lazy
    def _padding(self) -> Padding:
        return self._new_padding()

    def _new_padding(self) -> Padding:
        epochs, shares, options = self._bookmark.epochs, self._bookmark.shares, self._given_options
        if options.pad == "fixed":
            # A sampler of the user is taken to shuffle.
            shares = dataclasses.replace(shares, shuffle=shares.shuffle or not self._orders_itself)
        return padding_of(
            options.pad, self.data, self.engine.basis, shares.order(epochs.placement, epochs.seed),
            shuffled=shares.shuffle, sigmas=options.pad_sigma, static=options.pad_static,
        )  # fmt: skip

    def memory_used(self) -> dict[str, int]:
        if self._given_options.pad != "fixed":
            return super().memory_used()
        return self.engine.producer.drive(self._memory_of_fixed)

    def _memory_of_fixed(self) -> dict[str, int]:
        of_batch, on_the_way = self._bytes_of_fixed
        memory = self.engine.memory(on_the_way)
        return {**memory, "batches": memory["batches"] + of_batch}

    @lazy
    def _bytes_of_fixed(self) -> tuple[int, int]:
        """Bytes of a padded batch, and bytes of the batch together with the tensors from which it is made."""
        epochs = self._bookmark.epochs
        turns = self._bookmark.shares.order(epochs.placement, epochs.seed).of_epoch(0)
        return padded_bytes(self._padding, self.engine.producer, turns[0] if turns else None)

    @property
    def _draws_together(self) -> bool:
        """True if all ranks must draw a batch together, because they hold neighbour lists for each other."""
        return self.engine.basis.source.drawing.is_collective

    def _pad_together(self) -> None:
        """Draws the trial batches for padding now, if all ranks must draw them together. Otherwise the loader draws them just before its first batch."""
        if self._given_options.pad is not None and self._draws_together:
            self._padding  # noqa: B018 (made on first use)
            if self._given_options.pad == "fixed":
                self._bytes_of_fixed  # noqa: B018

    def _begin_epoch(self) -> Run:
        if self._given_options.pad is not None and self._draws_together:
            self.engine.close()
            if self._continues():
                reported(self.engine.basis.comm, self._choose_sizes_again, "choose the sizes of its batches")
        return super()._begin_epoch()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self._draws_together:  # otherwise the next epoch begins with it
            self.engine.producer.drive(self._choose_sizes_again)

    def _choose_sizes_again(self) -> None:
        """Chooses the sizes of batches again if a loaded state has another seed than the one they were chosen with."""
        padding = self.__dict__.get("_padding")
        if padding is not None and padding.draws != self._bookmark.epochs.draws(0):
            new = self._new_padding()
            padding.classes, padding.draws = new.classes, new.draws
            self.__dict__.pop("_bytes_of_fixed", None)
            self._pad_together()

    def stats(self) -> LoaderStats:
        padding = self.__dict__.get("_padding")  # made with the first batch
        if padding is None:
            return super().stats()
        return dataclasses.replace(
            super().stats(), padded_batches=padding.num_padded, padding_overflows=padding.num_overflows
        )

    def reset_stats(self) -> None:
        super().reset_stats()
        if "_padding" in self.__dict__:
            self._padding.reset_counts()

    def rounds(self) -> Iterator[list[Data]]:
        if self._given_options.pad_static:
            raise ValueError(
                "rounds() gives several batches at once, but with pad={'static': True} every batch is in the same tensors; leave static out"
            )
        return super().rounds()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if "_padding" in state:
            state["_padding"] = copy.copy(state["_padding"])  # a copy has statistics and buffers of its own
        return state
