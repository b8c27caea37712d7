"""Tests (laws) of a source of rows, a way or a form of topology in random loaders.

The test of such an object subclasses :class:`LoaderLaws` and says how a loader gets the object. A case is a function of an integer and the number of ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import random
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import HeteroData

import salientpp
from salientpp import PartitionedGraph
from salientpp.ranks.failure import RankFailure
from salientpp.store.rows import RowSource
from salientpp.testing.comparison import Outcome, Refused, compare, judge
from salientpp.testing.graphs import ROW_WORDS, TYPED_FANOUTS, random_rows, typed_data
from salientpp.testing.leftovers import Leftovers
from salientpp.testing.ranks import run_ranks
from salientpp.testing.topology import MakeSampler, fewer_edges, loader_over, one_type, with_note

FORMS = ("Data", "HeteroData", "directory", "typed directory")

#: Argument of the loaders -> values. A value that is listed twice is drawn more often.
VALUES: dict[str, tuple[Any, ...]] = {
    "batch_size": (1, 3, 4, 8, 8, 8, 100),
    "shuffle": (True, True, True, False),
    "drop_last": (True, False),
    "num_workers": (0, 1, 1, 2, 3),
    "prefetch_factor": (1, 2, 5),
    "persistent_workers": (True,),
    "replace": (True, True, False),
    "subgraph_type": ("directional", "bidirectional", "induced"),
    "directed": (False,),
    "disjoint": (True,),
    "weight_attr": ("weight",),
    "time_attr": ("time",),
    "temporal_strategy": ("last", "uniform"),
    "time_window": (0, 2, 1.5, 100, float("inf")),
    "transform": (with_note,),
    "transform_sampler_output": (fewer_edges,),
    "filter_per_worker": (True, False),
    "neg_sampling": ("binary", "triplet"),
    "device": ("cpu",),
    "device_rows": (0.3, 1.0, 100, "1kB"),
    "read_ahead": (1, 100, "20kB", "8MiB"),
    "dtype": (torch.float64, torch.float16),
    "uneven": ("wrap", "exact", "exact", "exact", "drop", "error"),
    "depth": (1, 1, 2, 3, 12),
    "pad": ("bucket", "fixed"),
    "shared_draws": ("batch", {"vertices": "batch", "block": 2}),
}  # fmt: skip

#: Further arguments of loaders over a directory.
OF_PARTS: dict[str, tuple[Any, ...]] = {
    "input_nodes": ("by rank",),
    "columns": (("x", "y"),),
    "memory": (0, 1000, "20kB"),
    "replication_factor": (0.2, 0.5, 1, 3.0, "100B", "1kB"),
    "lookahead": (1, 2, 5, "auto"),
    "policy": ("vip-hop", "degree", "halo", "wpr", "paths", "simulation", "random"),
    "logical_ranks": (4, {"number": 4, "join": True}, 12),
    "ranks_per_host": (1, 2),
    "send_as": ({"x": "fp16"},),
    "cooperate": ("host",),
}

FANOUTS: tuple[Any, ...] = ([3], [2, 2], [2, 2], [-1, 2], [-1, 2], [3, 0, 2], [3, 2, 2], [])

#: Arguments that loaders of vertices, of links, and of several types lack.
_NOT_OF = {
    "node": ("neg_sampling",),
    "link": ("input_nodes", "cooperate", "time_attr"),
    "typed": ("input_nodes", "cooperate", "transform_sampler_output"),
}

#: Argument -> another one, without which it has no effect or is refused.
_NEEDS = {
    "prefetch_factor": "num_workers", "persistent_workers": "num_workers", "temporal_strategy": "time_attr",
    "time_window": "time_attr", "lookahead": "replication_factor", "policy": "replication_factor", "cooperate": "ranks_per_host",
}  # fmt: skip

#: Ways of using a loader. ``N`` is a number of batches or of an epoch.
USES = ("epoch", "leave N", "set N", "rounds", "resume N")


@dataclass(frozen=True)
class LoaderCase:
    """Random loader, and how it is used.

    Attributes:
        seed: integer that the case is a function of, with the number of ranks.
        graph: form of the data, dtype and shape of its rows, shape of its edges; of a directory, its parts, their assignment and the form of topology.
        kind: 'node' or 'link', the seeds.
        uses: some of :data:`USES`.
    """

    seed: int
    graph: dict[str, Any]
    kind: str
    arguments: dict[str, Any]
    uses: tuple[str, ...]

    @property
    def of(self) -> str:
        return "typed" if self.graph["form"] in ("HeteroData", "typed directory") else "one"


class LoaderLaws:
    """Tests of an object in random loaders, which give the same batches as the loaders without it, or an error that names an argument.

    Subclass it and set ``make_source``, ``options``, or ``stored`` and ``sampler``. If every loader is refused, the test is skipped with the words.

    Attributes:
        make_source: returns a source of the given rows. It may write files to the given folder.
        options: options of a loader that uses a way.
        stored, sampler: as for :class:`~salientpp.testing.TopologyLaws`.
        forms: kinds of data that the object is made for, some of :data:`FORMS`.
        rows: dtypes and shapes of rows that it is made for, some of :data:`~salientpp.testing.graphs.ROW_WORDS`.
        without: arguments that random loaders lack, with which the object is known to change batches.
        cases: number of random cases on each number of ranks.
        first: integer of the first case.
    """

    make_source: ClassVar[Callable[[Tensor, Path], RowSource] | None] = None
    options: ClassVar[dict[str, Any]] = {}
    stored: ClassVar[str | None] = None
    sampler: ClassVar[MakeSampler] = None
    forms: ClassVar[Sequence[str]] = FORMS
    rows: ClassVar[Sequence[str]] = ROW_WORDS
    without: ClassVar[Sequence[str]] = ()
    cases: ClassVar[int] = 15
    first: ClassVar[int] = 0

    @classmethod
    def with_object(cls, data: Any, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Returns the options of a loader with the object under test. ``folder`` is for files."""
        found = {**options, **copy.deepcopy(cls.options)}
        if cls.make_source is not None:
            types = data.node_types if isinstance(data, HeteroData) or getattr(data, "is_hetero", False) else [None]
            rows = {type_: _rows_of(data, type_) for type_ in types}
            columns = {"x" if type_ is None else (type_, "x"): own for type_, own in rows.items() if own is not None}
            found["columns"] = {key: cls.make_source(own, folder) for key, own in columns.items()}
        return found

    @pytest.mark.parametrize("world", [1, 2, 3], ids="{} ranks".format)
    def test_random_loaders_give_the_same_batches(self, world: int, tmp_path: Path) -> None:
        cases = [case_of(type(self), world, seed) for seed in range(self.first, self.first + self.cases)]
        for case in cases:
            _write(type(self), case, tmp_path)
        judge([*zip(cases, *run_ranks(check, world, type(self), cases, tmp_path))])


def _rows_of(data: Any, type_: str | None) -> Tensor | None:
    """Returns ``x`` of a type: of all vertices, or of the part that this rank serves; None if there is none."""
    if not isinstance(data, PartitionedGraph):
        return (data if type_ is None else data[type_]).get("x")
    parts = range(data.num_parts) if data.part_id is None else [data.part_id]
    pieces: list[Any] = [data.rows(part)[type_].get("x") for part in parts]
    return pieces[0] if pieces[0] is None or type_ in data.replicated else torch.cat(pieces)


# --- cases ------------------------------------------------------------------------------------------------


def case_of(laws: type[LoaderLaws], world: int, seed: int) -> LoaderCase:
    """Returns the random case of an integer."""
    r = random.Random(f"{world} {seed}")
    is_in_memory = world == 1 and laws.stored is None
    form = r.choice([each for each in laws.forms if is_in_memory or each.endswith("directory")])
    # A part for each rank, so that a source has the rows of one part.
    parts = r.choice((1, 2, 4)) if world == 1 else world * (1 if laws.make_source else r.choice((1, 2)))
    graph = {
        "form": form, "parts": parts, "rows": r.choice(laws.rows), "edges": r.choice(("skewed", "skewed", "hub", "repeated", "isolated")),
        "assignment": r.choice(("random", "random", "random", "random", "empty parts", "one part")), "topology": laws.stored or r.choice(("whole", "parts")),
    }  # fmt: skip
    case = LoaderCase(seed, graph, r.choice(("node", "node", "node", "link")), {}, ())
    lacks = {*laws.without, *_NOT_OF[case.kind], *_NOT_OF.get(case.of, ()), *(("columns",) if laws.make_source else ())}
    values = {**VALUES, **(OF_PARTS if form.endswith("directory") else {})}
    values = {name: of_name for name, of_name in values.items() if name not in lacks}
    names = r.sample([*values], r.choice((1, 2, 3, 5)))
    names = [name for name in names if _NEEDS.get(name, name) in values]
    arguments = {
        "num_neighbors": r.choice((*FANOUTS, TYPED_FANOUTS) if case.of == "typed" else FANOUTS),
        "batch_size": 8, "seed": r.randrange(100), "timeout": 100.0,
        **{name: r.choice(values[name]) for name in dict.fromkeys([*(_NEEDS[each] for each in names if each in _NEEDS), *names])},
    }  # fmt: skip
    uses = [r.choice(USES).replace("N", str(r.randrange(5))) for _ in range(r.choice((1, 1, 2, 3)))]
    return dataclasses.replace(case, arguments=arguments, uses=tuple(uses))


def build(case: LoaderCase) -> Any:
    """Makes the graph of a case in memory."""
    r, draw = random.Random(case.seed), np.random.default_rng(case.seed)
    sizes = r.choice(((17, 40), (240, 600), (240, 1300)))
    data: Any = typed_data(case.seed) if case.of == "typed" else one_type(*sizes, case.seed)
    for number, store in enumerate(data.node_stores):
        if "x" in store:
            store.x = random_rows(draw, store.num_nodes, case.graph["rows"], more=number > 0)
    for store in data.edge_stores:
        match case.graph["edges"]:
            case "hub":
                store.edge_index[1, ::2] = 0
            case "repeated":
                store.edge_index[:, ::3] = store.edge_index[:, :1]
            case "isolated":
                store.edge_index //= 2
    return data


def _write(laws: type[LoaderLaws], case: LoaderCase, folder: Path) -> None:
    """Writes the directory of a case, and one whose topology is whole if the object is a form of topology."""
    if not case.graph["form"].endswith("directory"):
        return
    data, parts, draw = build(case), case.graph["parts"], torch.Generator().manual_seed(case.seed)
    # A step of 2 leaves every other part empty, and a step of all parts leaves all but the last one empty.
    step = {"random": 1, "empty parts": 2, "one part": parts}[case.graph["assignment"]]
    sizes = (
        {type_: data[type_].num_nodes for type_ in data.node_types} if case.of == "typed" else {None: data.num_nodes}
    )
    method = {
        type_: parts - 1 - torch.randint(parts, (size,), generator=draw) // step * step for type_, size in sizes.items()
    }
    more = {"seeds": ("paper", "train"), "replicate": ["author"]} if case.of == "typed" else {"method": method[None]}
    for topology in {case.graph["topology"], *(["whole"] if laws.stored else [])}:
        salientpp.partition(
            data, parts, folder / f"{case.seed} {topology}", [3, 2], 8, topology=topology, refine=False, **{"method": method, **more}
        )  # fmt: skip


# --- on ranks ---------------------------------------------------------------------------------------------


def check(rank: int, laws: type[LoaderLaws], cases: Sequence[LoaderCase], folder: Path) -> list[Outcome]:
    """Runs cases on this rank, up to the first fault on any rank."""
    found: list[Outcome] = []
    for case in cases:
        left, own = Leftovers(), folder / f"{case.seed} rows of rank {rank}"
        own.mkdir()
        try:
            outcome = _outcome(laws, case, folder, own)
        except Exception as error:
            outcome = "".join(traceback.format_exception(error)[-4:])
        gc.collect()
        dist.barrier()
        found.append(outcome if isinstance(outcome, str) else "; ".join(left.found()) or outcome)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, isinstance(found[-1], str))
        if any(everyone):
            break
    return found


def _outcome(laws: type[LoaderLaws], case: LoaderCase, folder: Path, own: Path) -> Outcome:
    def make(has_object: bool) -> Any:
        options, data = {**case.arguments}, build(case)
        if case.graph["form"].endswith("directory"):
            topology = "whole" if laws.stored and not has_object else case.graph["topology"]
            data = salientpp.load(folder / f"{case.seed} {topology}")
        elif case.kind == "node":
            options["input_nodes"] = data.train_mask if case.of == "one" else ("paper", data["paper"].train_mask)
        if has_object:
            options = laws.with_object(data, options, own)
        return loader_over(data, case.of, case.kind, options, laws.sampler if has_object else None)

    try:
        plain, ours = make(False), make(True)
    except (ValueError, TypeError, NotImplementedError, RankFailure) as error:
        names = (*case.arguments, *VALUES, *OF_PARTS, "ways", "neighbor_sampler", "data")
        if re.search(rf"\b({'|'.join(names)})\b", str(error)):
            return Refused(str(error))
        raise
    got, want = (batches_of(loader, functools.partial(make, loader is ours), case.uses) for loader in (ours, plain))
    return "; ".join(compare(got, want)[:5]) or None


def batches_of(loader: Any, make: Callable[[], Any], uses: Sequence[str]) -> list[Any]:
    """Uses a loader in several ways, and returns its batches. ``make`` makes another one, which continues from a saved state."""
    found: list[Any] = []
    for use in uses:
        kind, _, number = use.partition(" ")
        if kind == "set":
            loader.set_epoch(int(number))
        elif kind == "rounds":
            found += [batch for batches in loader.rounds() for batch in batches]
        elif kind in ("leave", "resume"):
            found += itertools.islice(loader, int(number))
        if kind == "resume":
            state = loader.state_dict()
            loader = make()
            loader.load_state_dict(state)
            epochs = [state["epoch"]] * dist.get_world_size()
            dist.all_gather_object(epochs, state["epoch"])
            # A rank that had finished answers the others first, so that every rank must iterate again.
            found += loader if state["epoch"] < max(epochs) else ()
        if kind in ("epoch", "set", "resume"):
            found += loader
    return found
