"""Loader that follows the counts of a Lightning ``Trainer``. Lightning itself is not needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch_geometric.data import Data, HeteroData

from salientpp.loader.batch_loader import BatchLoader


class FollowingLoader:
    """Loader whose epochs and batches follow the counts of a ``Trainer``. It is not a torch ``DataLoader``, so that Lightning does not replace it.

    It has all attributes of ``loader``. If other code than the trainer iterates over this object, it gives the loader's own epochs.

    Args:
        loader: the loader that gives the batches.
        trainer: Lightning's ``Trainer``, which counts epochs and batches.

    Attributes:
        is_in_epoch: True between the first and the last batch of an epoch on this rank.
    """

    def __init__(self, loader: BatchLoader, trainer: Any) -> None:
        self.loader = loader
        self._trainer = trainer
        self.is_in_epoch = False

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_trainer"):  # missing while the object is unpickled
            raise AttributeError(name)
        if name == "sampler" and self._trainer.overfit_batches > 0:
            # Lightning replaces any sampler that it does not know, with a new loader. The data module has turned shuffling off itself.
            raise AttributeError("a loader of Trainer(overfit_batches=...) has no sampler")
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        # A generator, because Lightning asks for an iterator before it restores its counts, and for a batch afterwards.
        epoch, batches = self._position()
        if epoch is not None:
            self.loader.set_epoch(epoch)
        if batches and not self.loader.has_state:
            warnings.warn(
                f"epoch {epoch} should continue after {batches} batches, but your sampler has no state, so it starts from the beginning",
                UserWarning,
                stacklevel=2,
            )
        elif batches:
            self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "batches": batches})
        self.is_in_epoch = True
        try:
            yield from self.loader
        finally:
            self.is_in_epoch = False

    def _position(self) -> tuple[int | None, int]:
        """Returns the epoch, and the number of its batches that are done; None and 0 if other code than the trainer iterates."""
        trainer = self._trainer
        fit = trainer.fit_loop
        if self is trainer.train_dataloader:
            done = fit.epoch_loop.batch_progress.current.ready
        elif self is trainer.val_dataloaders:
            done = fit.epoch_loop.val_loop.batch_progress.current.ready if trainer.state.fn == "fit" else 0
        else:
            return None, 0
        # A hook at the end of an epoch may iterate again; this pass then covers the whole epoch.
        return fit.epoch_progress.current.processed, done if done < len(self.loader) else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that Lightning stores for a loader. A resumed run compares it with its own. Empty if the user gave a sampler."""
        return self.loader.state_dict() if self.loader.has_state else {}

    def report_failure(self, error: BaseException) -> None:
        """Tells the other ranks that this rank's trainer has ended with an error between two epochs. They would wait for this rank's next epoch."""
        comm = self.loader.engine.basis.comm
        comm.report_failure(
            f"rank {comm.rank}{comm.of} left its Trainer before the next epoch of this loader: {type(error).__name__}: {error}"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks that this loader can continue where the loader that saved ``state`` stopped, and takes the random seed from that state.

        Raises:
            ValueError: the data or an argument differs; the text says which.
        """
        if state and self.loader.has_state:
            own = self.loader.state_dict()
            if state.get("ranks", own["ranks"]) != own["ranks"] and not (state.get("joined") and own["joined"]):
                raise ValueError(
                    f"this checkpoint comes from {state['ranks']} ranks, but this run has {own['ranks']}; a Trainer counts the batches of one rank, "
                    "whose number depends on the number of ranks unless join_logical_ranks=True"
                )
            self.loader.load_state_dict({**state, "rank": own["rank"]})  # Lightning keeps rank 0's state for all ranks
