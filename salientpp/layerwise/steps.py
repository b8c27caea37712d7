"""The layers on one rank, and the rows that they have made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.layerwise.layers import Network, RowShape
from salientpp.layerwise.normalisation import Edges, Normalisation
from salientpp.progress import Progress
from salientpp.ranks.placement import Placement

#: How engines call the rows that go through the layers.
ROWS = (None, "x")

NO_ROWS = torch.empty(0, device="cpu")


@dataclass(eq=False)
class Steps:
    """The layers on one rank, and how far it is. Called with a batch, it computes the next rows of the batch's targets.

    Attributes:
        network: all layers.
        shapes: of the rows that each layer gives.
        edge_rows: ``edge_weight`` and ``edge_attr``, if given: [E, ...].
        normalisation: of the graph.
        begin: the first global id of the part.
        ranges: the batches of the part, as ranges of its vertices. The ranks of a part take them in turn.
        placement: of this rank.
        same: what all ranks must have the same.
        number: the present layer's.
        present: rows of the part, made by the layer before; none before the first.
        following: rows of the part, by this layer.
        kept: of the part, by all layers that are done, where they are joined.
        progress: told of each batch.
        uses: see :meth:`Inference.count_uses`.
    """

    network: Network
    shapes: Sequence[RowShape]
    edge_rows: Mapping[str, Tensor]
    normalisation: Normalisation
    begin: int
    ranges: Sequence[tuple[int, int]]
    placement: Placement
    same: Mapping[str, Any]
    number: int = 0
    present: Tensor = NO_ROWS
    following: Tensor = NO_ROWS
    kept: list[Tensor] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    uses: Tensor | None = None

    @property
    def own_ranges(self) -> Sequence[tuple[int, int]]:
        """The batches of this rank."""
        return self.ranges[self.placement.place :: self.placement.ranks_per_part]

    @property
    def are_done(self) -> bool:
        return self.number == len(self.network.layers)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self.network.layers)

    def begin_layer(self) -> None:
        """Make room for the next rows."""
        size = self.ranges[-1][1] if self.ranges else 0
        shape = self.shapes[self.number]
        self.following = torch.empty((size, *shape.shape), dtype=shape.dtype, device="cpu")

    def end_layer(self) -> None:
        if self.network.join is not None:
            self.kept.append(self.following)
        self.present, self.following = self.following, NO_ROWS
        self.number += 1

    @torch.no_grad()
    def __call__(self, batch: Data) -> None:
        edges = Edges(batch.edge_index, batch.n_id, batch.batch_size, batch.get("edge_weight"), batch.get("edge_attr"))
        rows = self.network.layers[self.number](batch.x, edges, self.normalisation)
        first = int(batch.n_id[0]) - self.begin
        here = slice(first, first + batch.batch_size)
        if self.is_last and self.network.join is not None:
            rows = self.network.join([*(kept[here].to(rows.device) for kept in self.kept), rows])
        if rows.dtype != self.following.dtype or rows.shape != self.following[here].shape:
            raise ValueError(
                f"layer {self.number} ({self.network.layers[self.number]}) must give rows as it did on trial, expected {self.following.dtype} "
                f"{list(self.following[here].shape)}, got {rows.dtype} {list(rows.shape)}"
            )
        self.following[here] = rows.to("cpu")
        self.progress.advance()
