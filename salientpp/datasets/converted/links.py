"""Loads the link splits of a converted graph: the edges of each split with their negative examples and other columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from salientpp.datasets.converted.directory import open_arrays, read_converted


@dataclass(frozen=True)
class LinkSplit:
    """The edges of one split, as memory maps. Ids are the user's.

    Attributes:
        edge_label_index: int64 [2, M]; row 0 has the sources. A `LinkNeighborLoader` takes it under the same name.
        negatives: int64 [2, K], negative examples of the dataset: pairs that are not edges. None: it has none.
        columns: other columns with a row per edge, such as ``weight`` [M], ``year`` [M], ``relation`` [M], and ``target_node_neg`` int64 [M, C]: C targets to
            rank against the true one.
    """

    edge_label_index: Tensor
    negatives: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def labelled(self) -> tuple[Tensor, Tensor]:
        """Returns the edges, then the dataset's negatives, int64 [2, M + K], and their labels float32 [M + K]: 1 for an edge, 0 for a negative.

        Both are copies in memory. A `LinkNeighborLoader` takes them as ``edge_label_index`` and ``edge_label``.

        Raises:
            ValueError: the dataset gives no negatives for this split.
        """
        if self.negatives is None:
            raise ValueError(
                "the split has no given negative edges; use edge_label_index, and let the loader draw negatives: neg_sampling='binary'"
            )
        both = torch.cat([self.edge_label_index, self.negatives], 1)
        label = torch.zeros(both.size(1), device="cpu")
        label[: self.edge_label_index.size(1)] = 1.0
        return both, label


def load_link_splits(dataset: str | Path, *, verify: bool = False) -> dict[str, LinkSplit]:
    """Returns the splits of a link-prediction dataset that :func:`convert` wrote, by their names ``train``, ``val`` and ``test``.

    Args:
        dataset: ``"converted:DIR"``, or the directory.
        verify: check every byte, not only sizes and sampled checksums.

    Raises:
        ValueError: the directory is not a converted graph, was altered, or has no link splits.
    """
    root = Path(str(dataset).removeprefix("converted:"))
    manifest = read_converted(root)
    found = {split["name"]: split["columns"] for split in manifest.get("link_splits", ())}
    if not found:
        raise ValueError(
            f"{root} has no link splits; expected the conversion of a link-prediction dataset such as ogbl-collab, got {manifest['source']}"
        )
    names = [f"l.{split}.{name}.npy" for split, columns in found.items() for name in columns]
    arrays = open_arrays(root, {name: manifest["files"][name] for name in names}, verify)
    splits = {}
    for split, columns in found.items():
        of = {name: arrays[f"l.{split}.{name}.npy"] for name in columns}
        edges, negatives = of.pop("edge"), of.pop("edge_neg", None)
        splits[split] = LinkSplit(edges.t(), None if negatives is None else negatives.t(), of)
    return splits
