"""Callback of Lightning that logs the numbers of the training loader. This module can be imported without Lightning; the constructor then raises."""

from __future__ import annotations

import fnmatch
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from salientpp.lightning import FollowingLoader
from salientpp.loader.engine_loader import EngineLoader

#: Packages that have Lightning's callbacks.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> Any:
    """Returns the class ``Callback`` of the Lightning package that the program uses, or ``object`` if none is installed."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
    return object


Callback: Any = _callback()


class LightningCallback(Callback):
    """Logs ``loader.metrics()`` of the training loader to all loggers of a Lightning ``Trainer``: ``Trainer(callbacks=[LightningCallback()])``.

    It works with :class:`~salientpp.lightning.LightningNodeData` and with loaders that are passed to ``fit``. Rank 0 logs its own numbers, every ``every``
    batches and at the end of each epoch, under ``loader/`` and the name of the number. Several loaders have their key or position in the name.
    Loaders of other packages are ignored.

    Args:
        every: number of batches between two records.
        names: patterns of the numbers to log, such as ``["recent.*", "stage.*.share"]``.
        all_ranks: compare the ranks at the end of each epoch, and log the slowest one (``loader/ranks.slowest``).

    Raises:
        ModuleNotFoundError: Lightning is not installed.
        ValueError: ``every`` is not positive.
    """

    def __init__(self, every: int = 50, names: Sequence[str] = ("*",), all_ranks: bool = False) -> None:
        if Callback is object:
            raise ModuleNotFoundError("LightningCallback needs Lightning: pip install 'salientpp[lightning]'")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every!r}")
        super().__init__()
        self.every, self.names, self.all_ranks = every, tuple(names), all_ranks

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the numbers after every ``every`` batches."""
        if trainer.is_global_zero and (batch_idx + 1) % self.every == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs the numbers at the end of an epoch."""
        if self.all_ranks or trainer.is_global_zero:
            self._log(trainer, all_ranks=self.all_ranks)

    def _log(self, trainer: Any, all_ranks: bool = False) -> None:
        found = {
            f"{where}{name}": number
            for where, loader in _loaders(trainer.train_dataloader)
            for name, number in loader.metrics(all_ranks=all_ranks, max_age=0.0).items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)
        }
        for logger in trainer.loggers if found and trainer.is_global_zero else ():
            prefix = f"loader{logger.group_separator}"
            logger.log_metrics({f"{prefix}{name}": number for name, number in found.items()}, step=trainer.global_step)


def _loaders(loaders: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (prefix, loader) for each loader of this package in a loader or a container of loaders. The prefix is its key or position, and a dot."""
    loaders = getattr(loaders, "iterables", loaders)  # of Lightning's CombinedLoader
    if isinstance(loaders, Mapping):
        entries = list(loaders.items())
    elif isinstance(loaders, (list, tuple)):
        entries = list(enumerate(loaders))
    else:
        if isinstance(loaders, (EngineLoader, FollowingLoader)):
            yield where, loaders
        return
    for key, entry in entries:
        yield from _loaders(entry, f"{where}{key}.")
