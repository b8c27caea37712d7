"""Results of an inference as a folder of Parquet files, one for each part of the directory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from salientpp.addresses import is_address
from salientpp.predictions.destination import Folder, folder_at
from salientpp.predictions.outputs import check_column, named_outputs
from salientpp.predictions.parquet_writer import new_parquet, rows_of_group, table_of
from salientpp.predictions.table_keys import keys_of
from salientpp.store.directory.opened import PartitionedGraph


def is_parquet(out: str | os.PathLike[str]) -> bool:
    """Returns True if results go to Parquet files: ``out`` is an address, or ends in ``.parquet``."""
    return is_address(out) or os.fspath(out).rstrip("/").endswith(".parquet")


class ParquetParts:
    """Parquet files of the parts of a graph. A ``Data`` has one part.

    Raises:
        ImportError: pyarrow, or the package that reaches an address, is missing.
        ValueError: no package knows the address.
    """

    def __init__(self, out: str | os.PathLike[str], data: Any) -> None:
        self._folder, self._keys = folder_at(out), keys_of(data)
        self._book = data.whole.book if isinstance(data, PartitionedGraph) else None

    def check(self, part_ids: Collection[int], num_parts: int, like: Tensor) -> None:
        """Prepares the folder before the long work whose results, rows as ``like`` [0, ...], go there.

        Raises:
            ValueError: the rows cannot be a column, the folder cannot be written, or it has files of other parts.
            DatasetError: keys of a part are not on this host.
        """
        check_column(like)
        named_outputs(like, self._keys.schema.names)
        for part_id in part_ids:
            first, last = self._range(part_id)
            self._keys.read(torch.arange(first, min(first + 1, last), device="cpu"))
        self._folder.prepare()
        check_others(self._folder, "part-*.parquet", num_parts, f"of other parts than the {num_parts} of this graph")

    @contextlib.contextmanager
    def written(self, part_id: int, rows: Tensor) -> Iterator[None]:
        """Writes the rows of a part [n, ...]. The file appears when the ``with`` block ends, unless the block raises."""
        first, last = self._range(part_id) if self._book is not None else (0, len(rows))
        outputs = named_outputs(rows, self._keys.schema.names)
        most = rows_of_group(outputs)
        with new_parquet(self._folder, f"part-{part_id:05d}.parquet") as file:
            for begin in range(first, max(last, first + 1), most):
                end = min(begin + most, last)
                named = {name: values[begin - first : end - first] for name, values in outputs.items()}
                table = table_of(self._keys, torch.arange(begin, end, device="cpu"), named)
                file.append(table)
            file.finish(table.schema)
            yield

    def _range(self, part_id: int) -> tuple[int, int]:
        """Returns the range of the part's global ids."""
        return (0, self._keys.num_vertices) if self._book is None else self._book.range_of(part_id)


def check_others(folder: Folder, name: str, number: int, others: str) -> None:
    """Raises ValueError if the folder has files with k >= ``number`` in place of the star of ``name``. ``others``: a description of these files."""
    pattern = re.escape(name).replace(re.escape("*"), r"(\d{5,})")
    found = [(each, re.fullmatch(pattern, each)) for each in folder.file_names()]
    left = sorted(each for each, match in found if match is not None and int(match[1]) >= number)
    if left:
        # They may be results that somebody needs. Readers of the folder would take them for results of this run.
        more = f" and {len(left) - 1} more" if left[1:] else ""
        raise ValueError(
            f"the folder {folder.name} must have no files {others}, but it has {left[0]}{more}; remove them, or choose another folder as out="
        )
