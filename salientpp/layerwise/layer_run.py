"""Runs one layer over all vertices of a part, together with the other ranks.

A layer that splits into sums runs as a :class:`~salientpp.layerwise.products.Product`. Any other layer runs in batches with all their in-neighbours, which an
:class:`~salientpp.engine.engine.Engine` makes. All ranks make the same choice for a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from salientpp.batch.template import PartitionTemplate
from salientpp.engine.agreement import Facts
from salientpp.engine.basis import Basis
from salientpp.engine.connected import connect_part, placement_of
from salientpp.engine.engine import Engine
from salientpp.engine.epochs import Epochs
from salientpp.engine.option import integer
from salientpp.engine.run import Epoch
from salientpp.engine.seeds import vertex_seeds
from salientpp.engine.source import BatchSource, open_data, open_partition
from salientpp.layerwise.call import Call
from salientpp.layerwise.parts import (
    ROWS,
    ArrayParts,
    Prepared,
    Ranges,
)
from salientpp.layerwise.products import Places, Product
from salientpp.layerwise.scratch import Reads, count_reads
from salientpp.layerwise.uses import CacheOfUses
from salientpp.loader.construction import connect, engine_together, facts_of, prepare_together
from salientpp.loader.values import Options
from salientpp.predictions.part_files import ParquetParts
from salientpp.sampling.neighbor_sampler import NeighborSampler
from salientpp.sampling.part_topology import topology_of_part
from salientpp.sampling.schedule import Turns
from salientpp.sampling.seeds import part_nodes
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.exchange import Exchange
from salientpp.store.rows import RowSource, empty_rows


class LayerRun:
    """Runs one layer over all vertices of a part, as a :class:`Product` or in batches.

    ``sampler`` is the sampler of a ``Data``; None for a partitioned graph.
    """

    def __init__(self, call: Call, sampler: NeighborSampler | None) -> None:
        self._call = call
        options = Options(
            seed=0, dtype=None if call.number else call.dtype, columns=call.rows or (ROWS[1],),
            **{name: value for name, value in call.options.items() if name not in ("batch_size", "num_workers")},
        )  # fmt: skip
        words = "a torch_geometric.data.Data, or the result of salientpp.load"
        self._comm, self._device = connect(call.data, (Data, PartitionedGraph), words, options)
        prepared, everyone = prepare_together(self._comm, partial(self._prepare, options, sampler), "run a layer")
        source, options = prepared.source, prepared.options
        if not call.number:
            with self._reporting():
                call.meet(source)
        self.engine: Engine | None = None
        self._num_rounds = max(facts.seeds[0][2] for facts in everyone)
        self._product, self._num_fetches = self._agree_on_product(source)
        if self._product is None:
            self.engine = self._engine(source, options, everyone)

    def _engine(self, source: BatchSource, options: Options, everyone: Sequence[Facts]) -> Engine:
        """Makes the engine of a layer that runs in batches. Collective."""
        call, rank, size = self._call, self._comm.rank, self._comm.size
        by_rank = {first: number for facts in everyone for first, _, number, _ in facts.seeds}
        schedule = Ranges(
            num_seeds=source.seeds.number, unit=rank, place=0, logical_ranks_per_unit=1, seeds_per_logical_rank=[by_rank[other] for other in range(size)],
            logical_rank=rank, batch_size=1, shuffle=False, drop_last=False, uneven="exact", seed=0, ranges=call.own_ranges,
        )  # fmt: skip
        order = Turns([schedule], [range(other, other + 1) for other in range(size)])
        basis = Basis(
            self._comm, source, Epochs(0, source.exchange.placement, order), self._device, call.options["batch_size"], depth=options.depth,
            num_workers=call.options["num_workers"], dtype=options.dtype,
        )  # fmt: skip
        fills_cache = any(facts.fills_cache for facts in everyone)
        ways = [CacheOfUses(options.replication_factor, call.count_uses)] if fills_cache else []
        return engine_together(basis, ways, "run a layer")

    def _agree_on_product(self, source: BatchSource) -> tuple[Product | None, int]:
        """Decides, equally on all ranks, whether the layer runs as a :class:`Product` or in batches. Collective.

        Returns the product, or None for batches; and the number of fetches of the rank with the most.
        """
        facts, product, call = [0, 0, 0, 0], None, self._call
        split = call.network.layers[call.number].split
        if split is not None:
            with self._reporting():
                if call.places is None:
                    call.places = Places.of(call.lists, call.own_ranges, call.num_vertices)
                rows = source.delivered(ROWS)
                dtype = call.like[call.number - 1].dtype if call.number else call.dtype or rows.dtype
                memory = None if call.scratch is None else call.most_memory
                roots = None if split.kind is None else call.normalisation.roots(split.kind, call.places.halo)
                fetch = partial(self._fetch, source)
                product = Product(split, call.places, rows, dtype, roots, call.own_ranges, memory, fetch, call.new_rows)
                reads = Reads(0, 0) if memory is None else count_reads(product)
                facts = [1, reads.pushed, reads.pulled, product.num_fetches()]
        everyone = self._comm.gather_numbers(facts) if self._comm.size > 1 else [facts]
        able, pushed, pulled, fetches = zip(*everyone)
        is_pushed = min(able) == 1 and sum(pushed) <= sum(pulled)
        return (product if is_pushed else None), max(fetches)

    def _fetch(self, source: BatchSource, home: RowSource, ids: Tensor) -> Tensor:
        """Fetches the rows ``ids`` of other parts from their owners. Collective."""
        rows = empty_rows(home, ids.numel())
        exchange = Exchange(source.exchange.comm, source.books, source.exchange.placement)
        exchange.fetch_rows(None, {ROWS[1]: home}, ids, {ROWS[1]: rows})
        return rows

    # --- construction, together with the other ranks --------------------------------------------------------

    def _prepare(self, options: Options, sampler: NeighborSampler | None) -> Prepared:
        options, call = options.checked(self._device), self._call
        integer("threads", 0)("num_workers", call.options["num_workers"])
        source, held = self._open(sampler, options)
        if not call.number:
            call.prepare(source, held)
        like = call.like[call.number]
        size = call.ranges[-1][1] if call.ranges else 0
        call.following = call.new_rows((size, *like.shape[1:]), like.dtype)
        source = dataclasses.replace(
            source,
            template=PartitionTemplate({None: call.lists.columns}, {None: call.lists.first_edge}),
            rows={None: {ROWS[1]: source.rows_of(ROWS)}},
            exchanged=[ROWS],
            seed_columns=[],
        )
        # The schedule counts batches instead of seeds, because batches differ in size.
        seeds = [[self._comm.rank, self._comm.rank + 1, len(call.own_ranges), ""]]
        facts = facts_of(source, seeds, options, {"batch_size": call.options["batch_size"]}, ())
        return Prepared(source, dataclasses.replace(facts, same={**facts.same, **call.same}), options)

    def _open(self, sampler: NeighborSampler | None, options: Options) -> tuple[BatchSource, PartitionedGraph | None]:
        """Opens the data that the layer reads. Every vertex of this rank's part is a seed.

        Also returns the view of a partitioned graph whose part has this rank's rows; None for a ``Data``.
        """
        data = self._call.data
        if sampler is not None:
            nodes = torch.arange(data.num_nodes, device="cpu")
            seeds = vertex_seeds(sampler, NodeSamplerInput(None, nodes, None, None))
            return open_data(data, self._comm, sampler, seeds, columns=options.columns), None
        connected = connect_part(data, self._comm, placement_of(data, self._comm))
        held = connected.held
        sampler = NeighborSampler(held.graph if held.topology == "whole" else topology_of_part(held, None, None), [-1])
        inputs, _ = part_nodes(connected.own, connected.own_part, "all", None, None)
        seeds = vertex_seeds(sampler, inputs)
        return open_partition(connected, sampler, seeds, columns=options.columns, custom_cls=None), held

    def _reporting(self) -> AbstractContextManager[object]:
        """Wraps a collective action, so that an error on this rank is reported to the others and they do not wait."""
        return self._comm.reporting("run a layer")

    # --- the layer ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Applies the layer to every vertex of the part."""
        call = self._call
        if self._product is not None:
            with self._reporting(), torch.no_grad():
                self._product.run(self._num_fetches, call.store)
        elif self.engine is not None:
            for _ in Epoch(self.engine.run(0, finish=call)):
                pass
            self.engine.close()  # answers the others, which may still need the current rows
        with self._ending():
            self._share_within_the_part()
        if call.is_last and call.out is not None:
            self._write(call.out)

    def _ending(self) -> AbstractContextManager[object]:
        return self._comm.together(f"end layer {self._call.number}", RuntimeError)

    def _share_within_the_part(self) -> None:
        """Exchanges rows, batch by batch, between the ranks of one part, each of which has computed some of the part's batches."""
        placement, ranges, rows = self._call.placement, self._call.ranges, self._call.following
        places = placement.ranks_per_part
        if places == 1:
            return
        first_rank = placement.rank - placement.place
        before, after = [0] * first_rank, [0] * (self._comm.size - first_rank - places)
        for index in range(self._num_rounds):
            batches = ranges[index * places : (index + 1) * places]
            lengths = [last - first for first, last in batches] + [0] * (places - len(batches))
            own = rows[slice(*batches[placement.place])] if placement.place < len(batches) else rows[:0]
            send = [*before, *[len(own)] * places, *after]
            arrived = self._comm.all_to_all(torch.cat([own] * places), send, [*before, *lengths, *after]).wait()
            for (first, last), piece in zip(batches, arrived.split(lengths)):
                rows[first:last] = piece

    def _write(self, out: ArrayParts | ParquetParts) -> None:
        """Writes the rows of each part. Files replace those of an earlier call after every rank has written its own."""
        call, rows = self._call, self._call.following
        with ExitStack() as stack:
            with self._ending():
                for part_id, (first, last) in call.files.items() if call.placement.place == 0 else ():
                    stack.enter_context(out.written(part_id, rows[first:last]))
            with self._ending():
                stack.close()
