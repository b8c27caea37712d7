"""Outputs of sampled batches under the keys of their seeds: one Parquet file for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from salientpp.predictions.outputs import check_column, named_outputs
from salientpp.predictions.parquet_writer import rows_of_group, table_of
from salientpp.predictions.rank_files import RankFile, comm_of
from salientpp.predictions.table_keys import keys_of
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.ranks.roll import before_roll_call
from salientpp.store.directory.of_trainers import of_trainers
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.suggestions import suggest_arguments

#: Dtype of each output and shape of its rows, by name.
Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class PredictionWriter:
    """Writes outputs of a model under the keys of the user's tables, in any order and on any rank.

    Rank r writes ``part-<r in five digits>.parquet``, with the key columns and the columns of outputs. Vertices without keys have the column ``id`` with their
    ids in the user's data. Use it in a ``with`` block::

        with salientpp.PredictionWriter("churn.parquet", part, "customer") as writer:
            for batch in loader:
                customers = batch["customer"]
                writer.write(customers.n_id[: customers.batch_size], model(batch))

    The files appear at the end of the block, after every rank has written its own. If the block raises on one rank, no file appears on any rank, and files of
    an earlier run stay. Construction and the end of the block are collective, in the same order relative to loaders. :meth:`write` is not.

    Args:
        out: a folder, created if needed, or an address such as ``s3://bucket/folder``. A folder with files of further ranks is refused.
        data: the graph that the batches come from: the result of :func:`salientpp.load`, a ``Data`` or a ``HeteroData``.
        type_: vertex type of the predictions, if types have names.
        process_group: ranks that write, as in :class:`~salientpp.NeighborLoader`.
        timeout: longest wait for another rank at construction, in seconds. At the end a rank waits for the others as long as they live.

    Attributes:
        num_rows: number of rows that this rank was given, without padding.

    Raises:
        ValueError, TypeError: an argument is wrong, or the folder cannot be written. Every rank raises it.
        ImportError: pyarrow, or the package that reaches the address, is missing.
    """

    @suggest_arguments
    def __init__(
        self,
        out: str | PathLike[str],
        data: PartitionedGraph | Data | HeteroData,
        type_: str | None = None,
        *,
        process_group: Any = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.num_rows = 0
        self._pieces: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._held = 0
        self._forms: Forms | None = None
        with before_roll_call():
            data, process_group = of_trainers(data, process_group)
            self._keys = keys_of(data, type_)
            self._key_columns = self._keys.schema
        self._file = RankFile(out, comm_of(data, process_group, timeout))

    def write(self, n_id: Tensor, outputs: Tensor | Mapping[str, Tensor]) -> None:
        """Adds rows. They are held in memory until they fill a row group of the file, of at most 32 MiB.

        Args:
            n_id: ids of the vertices, integers [n], such as ``batch.n_id[: batch.batch_size]``. Rows of the id -1, which is padding, are left out.
            outputs: [n, ...] on any device, which become the column ``output``; or a dict from names of columns to such tensors. A row of
                one number becomes a number, any other row a list. All calls on all ranks have the same columns.

        Raises:
            ValueError, TypeError: ids or outputs are wrong.
            OSError: the file cannot be written.
            RuntimeError: the writer is closed.
        """
        if not self._file.is_open:
            raise RuntimeError("the PredictionWriter is closed; write inside its with block, or make another writer")
        n_id, named = self._checked(n_id, outputs)
        self.num_rows += len(n_id)
        first, most = 0, rows_of_group(named)
        while first < len(n_id):
            last = min(len(n_id), first + most - self._held)
            # Cloned, because a slice would keep the whole batch alive, and because a loader or a model may use the memory again.
            piece = {name: rows[first:last].clone() for name, rows in named.items()}
            self._pieces.append((n_id[first:last].clone(), piece))
            self._held += last - first
            first = last
            if self._held == most:
                self._write_group()

    def close(self) -> None:
        """Completes the files of all ranks. Collective. Later calls do nothing.

        Raises:
            OSError: this rank's file cannot be completed. No file appears.
            ValueError: the ranks have different columns. No file appears.
            RuntimeError: another rank has failed. No file appears.
        """
        self._file.end(self._key_columns, self._write_group)

    def __enter__(self) -> PredictionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.end(self._key_columns, self._write_group, error)

    def _checked(self, n_id: Tensor, outputs: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns ids and outputs on the CPU, without padding."""
        if not isinstance(n_id, Tensor) or n_id.dim() != 1 or n_id.is_floating_point() or n_id.dtype == torch.bool:
            form = f"{n_id.dtype} {list(n_id.shape)}" if isinstance(n_id, Tensor) else type(n_id).__name__
            raise TypeError(f"n_id must be integers [n], got {form}; pass batch.n_id[: batch.batch_size]")
        named = named_outputs(outputs, self._key_columns.names)
        for name, rows in named.items():
            check_column(rows, name)
            if len(rows) != len(n_id):
                raise ValueError(
                    f"outputs must have a row for each of the {len(n_id)} ids, got {len(rows)} rows of {name!r}; take the rows of the seeds, which are the "
                    "first batch_size rows"
                )
        forms: Forms = {name: (rows.dtype, tuple(rows.shape[1:])) for name, rows in named.items()}
        if self._forms not in (None, forms):
            raise ValueError(f"all calls must write the same columns, expected {self._forms}, got {forms}")
        n_id = n_id.detach().to("cpu", torch.int64)
        is_real = n_id != -1
        if not bool(is_real.all()):
            n_id, named = n_id[is_real], {name: rows[is_real] for name, rows in named.items()}
        self._keys.check(n_id)
        self._forms = forms
        return n_id, named

    def _write_group(self) -> None:
        """Writes the rows in memory as one row group. Without rows, the file still gets the columns of the outputs."""
        if self._forms is None:
            return
        empty = {
            name: torch.empty((0, *shape), dtype=dtype, device="cpu") for name, (dtype, shape) in self._forms.items()
        }
        n_id = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(ids for ids, _ in self._pieces)])
        outputs = {name: torch.cat([none, *(rows[name] for _, rows in self._pieces)]) for name, none in empty.items()}
        self._file.append(table_of(self._keys, n_id, outputs))
        self._pieces, self._held = [], 0
