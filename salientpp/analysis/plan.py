"""Predicts a job's epochs before machines are rented: for numbers of hosts, amounts of memory, and combinations of methods.

The planner of the loaders (:mod:`salientpp.ways.planner`) estimates the time of each combination, for each rank of a
:class:`~salientpp.analysis.job.Job`. The ranks run in this process, one after the other, and no rows move. The slowest rank
determines the time of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from salientpp.analysis.batches import MOST_EPOCHS, Batches
from salientpp.analysis.graph import open_graph, with_storage
from salientpp.analysis.job import MOST_RANKS, Job, placed, pooled
from salientpp.analysis.plan_result import ALLOWED, Prediction
from salientpp.analysis.result import word_of_type
from salientpp.analysis.shown import ShownPlan
from salientpp.analysis.storage_hosts import StorageHosts, check_storage, notes_of
from salientpp.display import round_up
from salientpp.engine.basis import Basis
from salientpp.partitioning.options import PartitionOptions
from salientpp.progress import Progress
from salientpp.store.directory.opened import PartitionedGraph
from salientpp.store.narrow import WIDE, Narrow
from salientpp.store.rows import TensorRows
from salientpp.ways.planner.choices import Beside, Budget, Choice, index_bytes
from salientpp.ways.planner.machines import LINKS, Link, Machines
from salientpp.ways.planner.plan import best_of, lines_of, slowest
from salientpp.ways.planner.result import Line
from salientpp.ways.planner.trials import Batch

#: Amounts of memory that are compared if none is given, as fractions of the bytes of all rows.
SHARES = (0.0, 0.05, 0.2, 1.0)


@dataclass(frozen=True)
class Question:
    """The jobs and methods that a plan compares.

    Attributes:
        hosts: numbers of hosts. Empty: for a dataset directory, the number of parts, and the powers of two below it whose ranks fit the parts.
        ranks_per_host: ranks on each host.
        memory: bytes of a host for copies of rows. Empty: :data:`SHARES` of the bytes of all rows.
        device_memory: bytes of each rank's device for copies of rows.
        allow: methods that may change batches, by their names in :data:`ALLOWED`.
        epochs: number of epochs to pay for.
        storage_hosts: numbers of further hosts that hold all rows and train nothing. 0: the hosts that train hold the rows.
        storage_link: link of a storage host. None: like that of a host that trains.
        storage_price: price of a storage host per hour; needed if ``machines`` have a price.
    """

    hosts: Sequence[int] = ()
    ranks_per_host: int = 1
    memory: Sequence[int] = ()
    device_memory: Sequence[int] = (0,)
    allow: Sequence[str] = ()
    epochs: int = 1
    storage_hosts: Sequence[int] = (0,)
    storage_link: Link | None = None
    storage_price: float | None = None

    def check(self, machines: Machines) -> None:
        """Raises ValueError for values that are wrong for every graph."""
        for name, values in (("hosts", self.hosts), ("ranks_per_host", [self.ranks_per_host])):
            if wrong := [value for value in values if value < 1]:
                raise ValueError(f"{name} must be integers >= 1, got {wrong[0]}")
        for name, values in (("memory", self.memory), ("device_memory", self.device_memory)):
            if wrong := [value for value in values if value < 0]:
                raise ValueError(f"{name} must be numbers of bytes >= 0, got {wrong[0]}")
        if unknown := [name for name in self.allow if name not in ALLOWED]:
            raise ValueError(f"allow must hold names of {', '.join(ALLOWED)}, got {unknown[0]!r}")
        if self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}")
        if self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs must be at most {MOST_EPOCHS:,}, got {self.epochs}")
        if any(self.device_memory) and not machines.to_device:
            raise ValueError(
                "device_memory needs constants of machines with a device, and to_device (bytes per second from host to device) is 0; "
                "measure the machines with their devices, set to_device, or leave device_memory out"
            )
        check_storage(self.storage_hosts, self.storage_price, machines, self.allow, self.device_memory)

    def link_of_storage(self, machines: Machines) -> Link:
        """Returns the link of a storage host. If it is not given, it is the link of a host that trains, which the ranks there share."""
        between = machines.between
        return self.storage_link or Link(between.bytes_per_second * self.ranks_per_host, between.delay)


@dataclass(frozen=True)
class _Kind:
    """Variant of the job to predict, such as one that sends int8 rows. ``name`` is its name in tables; ``options`` are the loader arguments that choose it."""

    name: str
    options: dict[str, Any]
    job: Job
    widths: Mapping[str | None, int]
    sums: str | None


def named_link(name: str, ranks_per_host: int) -> Machines:
    """Returns machine constants for the link ``name`` of :data:`LINKS`, divided among the ranks of a host. All other constants have defaults.

    Raises:
        ValueError: no link has this name, or the number of ranks is too large.
    """
    if name not in LINKS:
        raise ValueError(
            f"machines must be a JSON file of salientpp calibrate, or a link ({', '.join(LINKS)}), got {name!r}"
        )
    if ranks_per_host > MOST_RANKS:
        raise ValueError(f"ranks_per_host must be at most {MOST_RANKS:,}, got {ranks_per_host:,}")
    link = LINKS[name]
    return Machines(Link(link.bytes_per_second / max(1, ranks_per_host), link.delay), about={"link": name})


def plan(
    data: Data | PartitionedGraph,
    machines: Machines,
    question: Question | None = None,
    batches: Batches | None = None,
    *,
    method: str | Tensor = "auto",
    edge_weights: str = "vip",
    refine: bool | None = None,
    name: str = "graph",
    progress: Progress | None = None,
) -> ShownPlan:
    """Predicts the epochs of a job for each number of hosts, each amount of memory and each combination of methods.

    Args:
        data: an opened dataset directory, or a ``Data``. The parts of a directory are joined if there are fewer ranks. A ``Data`` is partitioned in memory for
            each number of hosts, into one part for each rank.
        machines: constants of the machines. With ``machines.price``, costs are predicted too.
        question: what to compare.
        batches: the batches of the loaders. ``epochs``, ``shared_draws`` and ``draw_block`` are not used.
        method, edge_weights, refine: options for partitioning a ``Data``, as in ``partition``.
        name: name of the dataset, for the report.
        progress: object that is told of each step.

    Raises:
        ValueError: an argument is wrong. It is raised before anything is computed.
    """
    question, progress = question or Question(), progress or Progress()
    question.check(machines)
    batches = (batches or Batches()).filled(data)
    batches = dataclasses.replace(batches, shared_draws=None, draw_block=1)
    hosts = _numbers_of_hosts(data, question)
    options = PartitionOptions(method, edge_weights, refine=refine, seed=batches.seed)
    per_host = question.ranks_per_host
    # Open the graph for all numbers of hosts before any work, so that wrong arguments are refused at once.
    graphs = []
    for number in hosts:
        parts = None if isinstance(data, PartitionedGraph) else number * per_host
        graph, widths = open_graph(data, parts, batches)
        for stores in question.storage_hosts:
            if isinstance(graph, PartitionedGraph):
                placed(number * per_host, graph.num_parts, per_host, stores)
            else:  # the graph can have as many parts as the storage hosts need
                placed(number * per_host, number * per_host, per_host)
        graphs.append((number, graph))
    if not any(widths.values()):
        raise ValueError(f"{name} has no rows of x, so nothing travels and there is nothing to plan; add features x")
    narrow = _narrow_widths(data, widths) if "int8" in question.allow else None
    _check_sums(data, batches, question)
    predictions: list[Prediction] = []
    for number, graph in graphs:
        part: Any = graph if isinstance(graph, PartitionedGraph) else graph(options, progress)
        for storing in (False, True):
            storage = sorted({each for each in question.storage_hosts if (each > 0) == storing})
            if storage:  # what a rank fetches does not depend on the number of storage hosts
                placements = placed(number * per_host, part.num_parts, per_host, int(storing))
                kinds = _kinds(with_storage(part, int(storing)), batches, placements, widths, narrow, question.allow)
                predictions += _predictions(number, storage, kinds, machines, question, progress)
    return ShownPlan(
        dataset=name,
        num_vertices={word_of_type(type_): book.num_vertices for type_, book in part.books.items()},
        num_edges=part.num_edges,
        batch_size=batches.batch_size or 0,
        num_neighbors=batches.numbers,
        seeds=batches.words_of_seeds(),
        row_bytes={word_of_type(type_): width for type_, width in widths.items()},
        epochs=question.epochs,
        machines=machines.to_dict(),
        notes=(
            *_notes(part, machines),
            *notes_of(
                any(question.storage_hosts), question.link_of_storage(machines), question.storage_link is not None
            ),
        ),
        predictions=tuple(predictions),
    )


def _numbers_of_hosts(data: Data | PartitionedGraph, question: Question) -> list[int]:
    """Returns the numbers of hosts, ascending. Raises ValueError if a directory has too few parts."""
    if not isinstance(data, PartitionedGraph):
        if not question.hosts:
            raise ValueError("hosts must be given for a graph that is not partitioned yet, such as hosts=[2, 4, 8]")
        return sorted(set(question.hosts))
    parts = data.num_parts
    if not question.hosts:
        powers = (2**power for power in range(parts.bit_length()))
        return sorted({parts, *(number for number in powers if _fits(number, parts, question.ranks_per_host))})
    if max(question.hosts) > parts:
        raise ValueError(
            f"hosts must be at most the number of parts of {data.root}, which is {parts}, got {max(question.hosts)}; "
            "partition again into more parts, or plan for the graph itself"
        )
    return sorted(set(question.hosts))


def _fits(hosts: int, parts: int, ranks_per_host: int) -> bool:
    """Returns True if this number of ranks can be placed on this number of parts."""
    try:
        placed(hosts * ranks_per_host, parts, ranks_per_host)
    except ValueError:
        return False
    return True


def _narrow_widths(data: Data | PartitionedGraph, widths: Mapping[str | None, int]) -> dict[str | None, int]:
    """Returns the bytes of a row that travels as int8. Rows that would not get shorter stay as they are."""
    shapes: dict[str | None, tuple[torch.dtype, Sequence[int]]] = {}
    if isinstance(data, PartitionedGraph):
        for type_ in data.description.node_types:
            entry = type_.attributes.get("x")
            if entry is not None and not type_.replicated and type_.narrow("x") is None:
                shapes[type_.name] = getattr(torch, entry["dtype"]), entry["row_shape"]
    else:
        shapes[None] = data.x.dtype, data.x.shape[1:]
    found = dict(widths)
    for name, (dtype, shape) in shapes.items():
        if dtype in WIDE:
            narrow = Narrow("int8", dtype, tuple(shape))
            found[name] -= max(0, narrow.wide_bytes - narrow.row_bytes)
    if found == widths:
        raise ValueError(
            "allow int8: no rows of x would travel in fewer bytes, because they are short, stored in a narrow format or not floating-point numbers; "
            "leave int8 out"
        )
    return found


def _check_sums(data: Data | PartitionedGraph, batches: Batches, question: Question) -> None:
    """Raises ValueError if sums are allowed, but no loader could use them."""
    if "sums" not in question.allow:
        return
    why = None
    if not batches.is_plain:
        why = "the batches are not plain draws from vertices"
    elif isinstance(data, PartitionedGraph) and data.is_hetero:
        why = f"{data.root} has several vertex types"
    elif isinstance(data, PartitionedGraph) and data.description.vertices(None).narrow("x") is not None:
        why = f"{data.root} stores x in a narrow format, and rows are summed in their own format"
    if why is not None:
        raise ValueError(f"allow sums: {why}; leave sums out")


def _kinds(
    part: Any,
    batches: Batches,
    placements: Sequence[Any],
    widths: Mapping[str | None, int],
    narrow: Mapping[str | None, int] | None,
    allow: Sequence[str],
) -> Iterator[_Kind]:
    """Yields the variants of the job that ``allow`` permits. The first one has the batches and rows as they are."""
    sums = ALLOWED["sums"]["partial_aggregation"] if "sums" in allow else None
    for draws in ({}, ALLOWED["shared_draws"]) if "shared_draws" in allow else ({},):
        if draws:
            agree = draws["shared_draws"]
            batches = dataclasses.replace(batches, shared_draws=agree["vertices"], draw_block=agree["block"])
        job = Job.of(part, widths, placements, batches)
        words = ["shared draws"] if draws else []
        yield _Kind("".join(words), {**draws}, job, widths, sums)
        if narrow is not None:
            yield _Kind(" + ".join(["int8", *words]), {**ALLOWED["int8"], **draws}, job, narrow, None)


def _predictions(
    hosts: int,
    storage: Sequence[int],
    kinds: Iterable[_Kind],
    machines: Machines,
    question: Question,
    progress: Progress,
) -> list[Prediction]:
    """Returns the predictions for one number of hosts that train, and for each number in ``storage`` of storage hosts."""
    found: dict[tuple[int, int, int], list[list[tuple[Prediction, Line]]]] = {}
    scores: Sequence[Mapping[str | None, Tensor]] = ()
    budgets = question.memory
    for kind in kinds:
        progress.begin(f"{hosts} hosts: inclusion probabilities")
        scores = scores or kind.job.vip  # draws that agree have the same probabilities
        whole = sum(book.num_vertices * kind.widths[type_] for type_, book in kind.job.held.items())
        budgets = budgets or sorted({round_up(share * whole) for share in SHARES})  # of the first kind
        if all(book.num_parts == 1 for book in kind.job.held.values()):
            budgets = budgets[:1]  # the host has all rows
        beside = Beside.largest(Beside.of(_basis(kind, engine.basis, machines)) for engine in kind.job.engines)
        choices = {
            (memory, on_device): _choices(kind, memory, on_device, beside)
            for memory in budgets
            for on_device in question.device_memory
        }
        every = [*dict.fromkeys(choice for of_budget in choices.values() for choice in of_budget)]
        number = len(kind.job.engines)
        progress.begin(f"{hosts} hosts: {kind.name or 'batches as they are'}", number, "ranks")
        by_rank, sizes = [], []
        for rank in range(number):
            lines, batch = _lines(kind, rank, scores, every, machines)
            by_rank.append(lines)
            sizes.append(batch)
            progress.advance()
        arriving = [sum(line.cost.bytes_in for line in of_choice) for of_choice in zip(*by_rank)]
        lines_by_choice = dict(zip(every, zip(slowest(by_rank), arriving)))
        fixed = _fixed_memory(kind.job, hosts, sizes)
        for stores, (budget, of_budget) in product(_storage(storage, kind, machines, question), choices.items()):
            compared = [lines_by_choice[choice] for choice in of_budget]
            lines = [stores.beside(line, moved, machines) for line, moved in compared]
            shown = [
                _prediction(hosts, stores, budget, kind, line, moved, sizes, fixed, machines, question)
                for line, (_, moved) in zip(lines, compared)
            ]
            found.setdefault((stores.number, *budget), []).append([*zip(shown, lines)])
    chosen: list[Prediction] = []
    for by_kind in found.values():
        # A kind that changes batches is chosen only if it saves enough beside the kinds before it.
        bests = [best_of([line for _, line in of_kind]) for of_kind in by_kind]
        best = reduce(lambda one, other: best_of([one, other]), bests)
        chosen += [dataclasses.replace(each, chosen=line is best) for of_kind in by_kind for each, line in of_kind]
    return chosen


def _storage(numbers: Sequence[int], kind: _Kind, machines: Machines, question: Question) -> Iterator[StorageHosts]:
    link, divides = question.link_of_storage(machines), isinstance(kind.job.part, PartitionedGraph)
    for number in numbers:
        yield StorageHosts.of(number, kind.job, kind.widths, link, question.storage_price, divides)


def _choices(kind: _Kind, memory: int, device_memory: int, beside: Beside) -> list[Choice]:
    """Returns the combinations of caches and other methods that fit these bytes. The first is one static cache in all of them; no cache is among them."""
    held = kind.job.held
    smallest = {type_: min(map(book.size_of, range(book.num_parts))) for type_, book in held.items()}
    remote = sum((book.num_vertices - smallest[type_]) * kind.widths[type_] for type_, book in held.items())
    index = index_bytes(held.values())
    budget = Budget(memory, device_memory, all_rows=remote, index=index, beside=beside, sums=kind.sums)
    return [*dict.fromkeys([*budget.choices(), Choice()])]


def _lines(
    kind: _Kind,
    rank: int,
    scores: Sequence[Mapping[str | None, Tensor]],
    choices: Sequence[Choice],
    machines: Machines,
) -> tuple[list[Line], Batch]:
    """Returns the expected cost of each combination for one rank, and the mean size of its batches."""
    of_ranks = [scores[engine.basis.epochs.placement.own_part] for engine in kind.job.engines]
    basis = _basis(kind, kind.job.engines[rank].basis, machines)
    with basis.remembering():
        basis.once(("scores", "vip"), lambda: of_ranks[rank])
        if basis.ranks_by_host:
            host = [of_ranks[other] for other in basis.epochs.placement.ranks_of_host]
            basis.once(("pooled scores", "vip"), lambda: pooled("vip", host))
        return lines_of(basis, choices, machines)


def _basis(kind: _Kind, basis: Basis, machines: Machines) -> Basis:
    """Returns a rank's basis for the planner: with rows of this kind's width but no contents, and with the host and the device that the rank will have."""
    source, placement = basis.source, basis.epochs.placement
    rows: dict[str | None, Any] = {type_: {} for type_ in source.books}
    for type_, name in source.exchanged:
        size = source.books[type_].size_of(source.exchange.part_of(type_))
        # A plan counts rows, so they have a width, but no contents.
        rows[type_] = {name: TensorRows(torch.empty(size, kind.widths[type_], dtype=torch.uint8, device="meta"))}
    shared = placement.ranks_by_host if max(placement.ranks_by_host) > 1 else ()
    found = dataclasses.replace(
        basis,
        source=dataclasses.replace(source, rows=rows),
        device=torch.device("cuda" if machines.to_device else "cpu"),
        ranks_by_host=shared,
    )
    found.__dict__["host"] = basis.comm  # the scores of the host's ranks are pooled without communication
    return found


def _fixed_memory(job: Job, hosts: int, batches: Sequence[Batch]) -> dict[str, int]:
    """Returns bytes of a host that do not depend on caches and other methods: its own rows, the topology, and the batches in flight."""
    part, basis = job.part, job.engines[0].basis
    books = basis.source.books
    own = sum(
        max(map(books[type_].size_of, range(books[type_].num_parts))) * width for type_, width in job.widths.items()
    )
    topology = basis.source.sampler.nbytes
    # A batch has int64 ids of its vertices and of the ends of its edges.
    largest = max(batch.row_bytes + 8 * batch.vertices + 16 * batch.edges for batch in batches)
    if job.has_storage:
        own, topology = 0, 0 if part.topology == "parts" else topology
    return {
        "host": own,
        "graph": topology // hosts if part.topology == "parts" else topology,
        "batches": int(basis.depth * largest * len(job.hosts[0])),
    }


def _prediction(
    hosts: int,
    storage: StorageHosts,
    budget: tuple[int, int],
    kind: _Kind,
    line: Line,
    moved: float,
    batches: Sequence[Batch],
    fixed: Mapping[str, int],
    machines: Machines,
    question: Question,
) -> Prediction:
    cost = line.cost
    copies = {name: number for name, number in line.memory.items() if name != "device"}
    paid = None
    if machines.price is not None:
        paid = (hosts * machines.price + storage.number * storage.price) * cost.seconds * question.epochs / 3600
    return Prediction(
        hosts=hosts,
        ranks=len(kind.job.engines),
        budget=budget[0],
        device_budget=budget[1],
        ways=" + ".join(filter(None, [line.choice.words, kind.name])),
        options={**line.choice.options, **kind.options},
        **{name: getattr(cost, name) for name in ("seconds", "training", "loading", "waiting", "link", "cpu")},
        steps=max(batch.number for batch in batches),
        network_bytes=moved,
        memory={**fixed, **copies},
        device_bytes=line.memory.get("device", 0),
        cost=paid,
        storage_hosts=storage.number,
        storage_seconds=storage.seconds(moved, machines),
        storage_bytes=storage.memory,
    )


def _notes(part: Any, machines: Machines) -> Iterator[str]:
    """Yields sentences about what the prediction leaves out or assumes."""
    if "link" in machines.about:
        yield (
            f"constants were not measured: the link is {machines.about['link']}, and the rest are defaults. Run salientpp calibrate on your "
            "machines, and pass its file to --machines."
        )
    if machines.step is None:
        yield "no training step is known, so times are those of loading alone. Measure a step, or pass --set step.seconds=S."
    if part.topology == "parts":
        yield "requests for neighbour lists of the topology in parts are not counted."
