"""Generates graphs of any size as converted graphs, for benchmarks that outgrow memory.

    python benchmarks/large_graph.py DIR --num-vertices N [--average-degree 20] [--num-features 128] [--memory 4GB]

Every edge and vertex follows from the seed and its own number, in blocks of a fixed size with random streams of their own. No table over vertices is kept:

* A vertex has a **rank** r in [0, N) and the weight ``(r + r0) ** (-1 / (exponent - 1))``. The sums of weights have a closed form, so one power draws a rank by
  its weight. An invertible permutation turns ranks into ids.
* With C communities, rank r is in community ``r % C``, which is in class ``r % Q`` of Q classes, because Q divides C. A partner from the same community is
  drawn like any rank, and moved to the nearest lower rank with the same remainder. So each community has hubs and other vertices like the whole graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from salientpp.datasets.arrays import SPLITS
from salientpp.datasets.converted.buckets import MOST_VERTICES
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.columns import DTYPES
from salientpp.datasets.converted.convert import Options, write_converted
from salientpp.datasets.converted.pieces import EdgePiece, EdgeSource, RowPiece, Rows, Source, Split, Vertices, counted
from salientpp.datasets.generated import check_parameters
from salientpp.progress import Progress

#: Number of edges, and of vertices, that share a random stream.
_EDGE_BLOCK, _BLOCK = 2**16, 2**12

#: Offset of ranks in the weights. It limits the largest hubs, so that pairs can be drawn without too many repeats.
_FIRST = 16.0

_EDGES, _ROWS, _LABELS, _SPLITS, _CENTRES, _ORDER = range(6)


def generate(
    root: str | Path,
    *,
    num_vertices: int,
    average_degree: float = 20.0,
    num_classes: int = 16,
    num_features: int = 128,
    community_size: int = 1000,
    homophily: float = 0.8,
    locality: float = 0.7,
    exponent: float = 2.5,
    signal: float = 1.0,
    label_noise: float = 0.1,
    train_fraction: float = 0.01,
    val_fraction: float = 0.001,
    test_fraction: float = 0.002,
    dtype: str = "fp16",
    seed: int = 0,
    memory: int | str = "4GB",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Generates an undirected graph of any size as a converted graph: a power law, communities, and labels that a GNN can learn.

    Like :func:`salientpp.datasets.synthetic`, which keeps everything in memory, but without tables over vertices. The same arguments give the same files with
    any ``memory``. A run that was stopped continues when it is called again.

    Args:
        root: the directory to write.
        num_vertices: N.
        average_degree: directed edges per vertex that are drawn; repeated pairs are merged, so the graph has slightly fewer.
        num_classes, num_features: as for ``synthetic``.
        community_size: approximate number of vertices in a community.
        homophily: share of edges drawn within a class.
        locality: share of the edges within a class that are drawn within a community.
        exponent: exponent of the power law of degrees, above 2.
        signal, label_noise: as for ``synthetic``.
        train_fraction, val_fraction, test_fraction: the chance of a vertex to be in the split.
        dtype: dtype of the features: fp64, fp32, fp16 or bf16.
        seed: >= 0.
        memory, overwrite, progress: as for :func:`salientpp.datasets.convert`.

    Returns:
        ``root``.

    Raises:
        ValueError: an argument is out of range, or more memory is needed.
        OSError: the directory cannot be written; finished steps are kept for the next run.
    """
    check_parameters(
        num_vertices=num_vertices,
        num_classes=num_classes,
        num_features=num_features,
        average_degree=average_degree,
        exponent=exponent,
        homophily=homophily,
        locality=locality,
        community_size=community_size,
        signal=signal,
        label_noise=label_noise,
        train_fraction=train_fraction,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        seed=seed,
    )
    if num_vertices > MOST_VERTICES:
        raise ValueError(f"num_vertices must be at most 2^32, got {num_vertices}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    model = Model(
        seed=seed,
        num_vertices=num_vertices,
        num_pairs=round(num_vertices * average_degree / 2),
        num_classes=num_classes,
        num_communities=num_classes * max(1, round(num_vertices / community_size / num_classes)),
        near=homophily * locality,
        within_class=homophily * (1 - locality),
        exponent=float(exponent),
        num_features=num_features,
        signal=float(signal),
        label_noise=float(label_noise),
        fractions=(float(train_fraction), float(val_fraction), float(test_fraction)),
    )
    return write_converted(
        model.source(),
        Path(root),
        Budget.of(memory),
        Options(False, {"x": dtype}, False),
        overwrite=overwrite,
        progress=progress,
    )


@dataclass(frozen=True)
class Model:
    """Parameters of a generated graph, and the way its edges and vertices are drawn."""

    seed: int
    num_vertices: int
    num_pairs: int
    num_classes: int
    num_communities: int
    near: float
    within_class: float
    exponent: float
    num_features: int
    signal: float
    label_noise: float
    fractions: tuple[float, float, float]

    def source(self) -> Source:
        splits = {split: Split(_blocks(self, "split", number), is_mask=True) for number, split in enumerate(SPLITS)}
        return Source(
            "generated",
            {None: Vertices(self.num_vertices, {"x": _blocks(self, "x"), "y": _blocks(self, "y")}, splits)},
            {None: _pairs(self)},
            undirected=True,
            made_of=asdict(self),
        )

    def random(self, stream: int, block: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(stream, block))))

    def pairs(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the edges of a block, int64, without loops."""
        rng = self.random(_EDGES, block)
        count = min(_EDGE_BLOCK, self.num_pairs - block * _EDGE_BLOCK)
        first, level, other = self._ranks(rng.random(count)), rng.random(count), self._ranks(rng.random(count))
        for below, groups in ((self.near, self.num_communities), (self.near + self.within_class, self.num_classes)):
            chosen = level < below
            moved = other[chosen] // groups * groups + first[chosen] % groups
            other[chosen] = np.where(moved < self.num_vertices, moved, moved - groups)
            level[chosen] = 2.0  # at most for one of the two
        keep = first != other
        return self.ids(first[keep]), self.ids(other[keep])

    def _ranks(self, uniform: np.ndarray) -> np.ndarray:
        """Ranks by weight, int64, for numbers in [0, 1): the inverse of the sum of weights, which is an integral."""
        power = 1.0 - 1.0 / (self.exponent - 1.0)
        low, high = _FIRST**power, (self.num_vertices + _FIRST) ** power
        rank = (low + uniform * (high - low)) ** (1.0 / power) - _FIRST
        return np.clip(rank.astype(np.int64), 0, self.num_vertices - 1)

    def classes(self, ids: np.ndarray) -> np.ndarray:
        return self.ranks_of(ids) % self.num_classes

    @cached_property
    def _centres(self) -> np.ndarray:
        """Centres of the classes, float32 [classes, F]."""
        centres = self.random(_CENTRES).standard_normal((self.num_classes, self.num_features), dtype=np.float32)
        return centres * (self.signal / np.linalg.norm(centres, axis=1, keepdims=True))

    # --- the order of ids ---------------------------------------------------------------------------------
    # Multiplying by odd numbers, and folding the upper half of the bits into the lower half, permute 2^bits numbers. A number that lands at N or above is
    # permuted again until it is below N. This is a permutation of N numbers, because it only removes the larger numbers from each cycle.

    @property
    def _bits(self) -> int:
        return max(2, (self.num_vertices - 1).bit_length())

    @cached_property
    def _factors(self) -> list[int]:
        return [int(factor) | 1 for factor in self.random(_ORDER).integers(1, 2**63, 3)]

    def ids(self, rank: np.ndarray) -> np.ndarray:
        """Ids of the vertices with the given ranks, int64."""
        return self._walk(rank, self._factors, 0)

    def ranks_of(self, ids: np.ndarray) -> np.ndarray:
        inverse = [pow(factor, -1, 2**64) for factor in reversed(self._factors)]
        return self._walk(ids, inverse, 1)

    def _walk(self, numbers: np.ndarray, factors: list[int], backwards: int) -> np.ndarray:
        at = self._step(numbers.astype(np.uint64), factors, backwards)
        beyond = np.flatnonzero(at >= self.num_vertices)
        while beyond.size:
            at[beyond] = self._step(at[beyond], factors, backwards)
            beyond = beyond[at[beyond] >= self.num_vertices]
        return at.astype(np.int64)

    def _step(self, at: np.ndarray, factors: list[int], backwards: int) -> np.ndarray:
        mask, half = np.uint64(2**self._bits - 1), np.uint64((self._bits + 1) // 2)
        for factor in factors:
            if backwards:  # a fold by half of the bits or more undoes itself
                at = at ^ (at >> half)
            at = at * np.uint64(factor) & mask
            if not backwards:
                at = at ^ (at >> half)
        return at

    # --- vertices -----------------------------------------------------------------------------------------

    def rows(self, kind: str, number: int, block: int) -> torch.Tensor:
        """Features, labels or one split of a block of vertices."""
        begin = block * _BLOCK
        ids = np.arange(begin, min(begin + _BLOCK, self.num_vertices))
        if kind == "split":
            chance = self.random(_SPLITS, block).random(ids.size)
            low = sum(self.fractions[:number])
            return torch.from_numpy((chance >= low) & (chance < low + self.fractions[number]))
        classes = self.classes(ids)
        if kind == "y":
            rng = self.random(_LABELS, block)
            others = rng.integers(self.num_classes, size=ids.size)
            return torch.from_numpy(np.where(rng.random(ids.size) < self.label_noise, others, classes))
        x = self.random(_ROWS, block).standard_normal((ids.size, self.num_features), dtype=np.float32)
        x += self._centres[classes]
        return torch.from_numpy(x)


def _pairs(model: Model) -> EdgeSource:
    """Pairs of a model as edges."""
    total = model.num_pairs

    def pieces(most: int) -> Iterator[EdgePiece]:
        for block in range(-(-total // _EDGE_BLOCK)):
            source, target = model.pairs(block)
            for first in range(0, source.size, most):
                yield EdgePiece(
                    source[first : first + most],
                    target[first : first + most],
                    counted("generated edge ", block * _EDGE_BLOCK + first),
                    min(total, block * _EDGE_BLOCK + first + most),
                )

    return EdgeSource(pieces, total, total)


def _blocks(model: Model, kind: str, number: int = 0) -> Rows:
    """An attribute of a model's vertices, block by block."""
    total = model.num_vertices

    def pieces(most_bytes: int) -> Iterator[RowPiece]:
        for block in range(-(-total // _BLOCK)):
            rows = model.rows(kind, number, block)
            most = max(1, most_bytes // max(1, rows.nbytes // len(rows)))
            for first in range(0, len(rows), most):
                piece = rows[first : first + most]
                at = block * _BLOCK + first
                yield RowPiece(piece, counted("generated row ", at), at + len(piece))

    return Rows(pieces, total, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the directory to write")
    parser.add_argument("--num-vertices", type=int, required=True)
    parser.add_argument("--average-degree", type=float, default=20.0)
    parser.add_argument("--num-features", type=int, default=128)
    parser.add_argument("--memory", default="4GB")
    generate(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
