"""Reads attributes and splits from a Parquet table of vertices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.converted.labels import labels_of
from salientpp.datasets.converted.parquet import ParquetFiles, id_column, parquet_rows
from salientpp.datasets.converted.pieces import Rows, Split


def parquet_table(paths: Sequence[Path]) -> tuple[dict[str, Rows], dict[str, Split]]:
    """Returns attributes and splits of a table with a row per vertex.

    A column of numbers is an attribute [N], and a column of lists is an attribute [N, width]. Columns ``NAME_0``, ``NAME_1``, ... ``NAME_k`` are one attribute
    ``NAME`` [N, k + 1]. A bool column ``train``, ``val`` or ``test``, also with ``_mask``, is a split. The attribute ``y`` has labels. A column ``id`` or
    ``node_id``, also with capitals, has the vertex of each row. Without it, row v belongs to vertex v.

    Raises:
        ValueError: the files are damaged, or two columns stand for the same attribute.
    """
    names = ParquetFiles(paths).names
    ids = id_column(names, paths[0])
    columns: dict[str, Rows] = {}
    splits: dict[str, Split] = {}
    for name, of in _grouped([name for name in names if name != ids]).items():
        rows = parquet_rows(paths, of, ids)
        split = name.removesuffix("_mask")
        if split in SPLITS:
            given, splits[split] = split in splits, Split(rows, is_mask=True)
        else:
            given, columns[name] = name in columns, labels_of(rows) if name == "y" else rows
        if given:
            raise ValueError(f"{paths[0]} has two columns for {name!r}; leave out one of {', '.join(names)}")
    return columns, splits


def _grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the columns of each attribute. ValueError if a numbered attribute has the name of another column."""
    numbered: dict[str, dict[int, str]] = {}
    for name in names:
        if match := re.fullmatch(r"(.+)_(0|[1-9]\d*)", name):
            numbered.setdefault(match[1], {})[int(match[2])] = name
    whole = {name: of for name, of in numbered.items() if sorted(of) == list(range(len(of))) and len(of) > 1}
    grouped: dict[str, list[str]] = {}
    for name in names:
        group = name.rpartition("_")[0]
        if group in whole and name in whole[group].values():
            if group in names:
                raise ValueError(f"columns {group} and {name} stand for the same attribute {group!r}; rename one")
            grouped.setdefault(group, [whole[group][number] for number in range(len(whole[group]))])
        else:
            grouped[name] = [name]
    return grouped
