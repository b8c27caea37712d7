"""Strategies for the arguments of random jobs: each option of the package, and each argument of PyG's and torch's loaders.

A strategy is a function of a :class:`Draft` that returns an argument as source text, or None to leave the argument out. The text may use the names that
``jobs.names`` lists. Most values are valid together. With a small probability, an argument is one of :data:`ODD`.

A new option needs a strategy in :data:`STRATEGIES`. ``test_strategies.py`` says so.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from random_cases.data import FORMATS, LACKING, RELATIONS, Graph, has_real_times

from salientpp.loader.options import OPTIONS
from salientpp.testing.loader import OF_PARTS, VALUES

#: Probability that an argument has an odd value, given or not.
CHANCE_OF_ODD = 0.0015

#: Values that few arguments take.
ODD = (
    "None", "True", "False", "-1", "0", "1", "2**70", "1.5", "float('nan')", "''", "'x'", "[]", "{}", "()", "object()", "torch.tensor([1])", "[None]", "'1GB'",
    "lambda *a: None", "{'x': None}",
)  # fmt: skip


@dataclass
class Draft:
    """A job while it is drawn.

    Attributes:
        link: True if the seeds are edges.
        chosen: the arguments so far, in the order of :data:`STRATEGIES`.
        odd: names of those with an odd value.
    """

    r: random.Random
    graph: Graph
    ranks: int
    link: bool
    chosen: dict[str, str] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Returns True if any of these arguments is given."""
        return any(name in self.chosen for name in names)

    def pick(self, *values: Any) -> str:
        return str(self.r.choice(values))

    @property
    def has_workers(self) -> bool:
        """True if every rank has threads that draw."""
        return self.chosen.get("num_workers") in ("1", "2", "3")

    @property
    def seed_type(self) -> str:
        """Type of the seeds of a typed graph."""
        return "a" if self.r.random() < 0.75 else self.r.choice("bcd")


@dataclass(frozen=True)
class Strategy:
    """Probability that an argument is given where it fits, and the function that returns its text."""

    chance: float
    draw: Callable[[Draft], str | None]


# --- arguments of PyG's and torch's loaders ------------------------------------------------------------------------


def num_neighbors(d: Draft) -> str:
    hops = d.r.choice((1, 2, 2, 2, 3)) if not d.link or d.r.random() < 0.9 else 0

    def numbers() -> list[int]:
        return [d.r.choice((1, 2, 3, 3, 5, 0, -1)) for _ in range(hops)]

    if not d.graph.is_typed or d.r.random() < 0.4:
        return str(numbers())
    by_type = {name: numbers() for name in RELATIONS}
    if d.graph.is_directory or d.r.random() < 0.7:
        return str(by_type)
    return f"NumNeighbors({by_type})"


def input_nodes(d: Draft) -> str | None:
    if d.graph.is_directory:
        seeds = d.r.choices(
            ("'train'", "'all'", "None", "whole.train_mask", "own_ids(1)", "own_ids(2)", "'val'"), (8, 2, 1, 2, 2, 2, 1)
        )[0]
    else:
        seeds = d.pick(
            "None", "whole.train_mask", "own_ids(1)", "own_ids(2)", "own_ids(1).tolist()", "own_ids(2).int()"
        )
    if not d.graph.is_typed:
        return None if seeds == "None" else seeds
    type_ = d.seed_type
    if not d.graph.is_directory and seeds == "None":
        return repr(type_)
    seeds = seeds.replace("whole.", f"whole[{type_!r}].").replace("own_ids(", f"own_ids({type_!r}, ")
    return f"({type_!r}, {seeds})"


def edge_label_index(d: Draft) -> str | None:
    if not d.link:
        return None
    seeds = (
        d.pick("None", "'all'")
        if d.graph.is_directory and d.r.random() < 0.7
        else d.pick("None", "own_pairs(1)", "own_pairs(2)")
    )
    if not d.graph.is_typed:
        return None if seeds == "None" else seeds
    name = d.r.choice(RELATIONS[:3])
    if seeds == "None":
        return repr(name)
    return f"({name}, {seeds.replace('own_pairs(', f'own_pairs({name}, ')})"


def edge_label(d: Draft) -> str | None:
    if not d.link:
        return None
    return d.pick("arange(seeds) % 3", "(arange(seeds) % 4 + 1).double()", "arange(seeds).view(-1, 1) % 2 + 1")


def edge_label_time(d: Draft) -> str | None:
    return "times_of(seeds)" if d.link and d.has("time_attr") else None


def input_time(d: Draft) -> str | None:
    if d.link or not d.has("time_attr"):
        return None
    needed = d.chosen["time_attr"] == "'edge_time'"
    return "times_of(seeds)" if needed or d.r.random() < 0.4 else None


def time_attr(d: Draft) -> str | None:
    if d.graph.sorted_by is not None and d.r.random() < 0.8:
        return repr(d.graph.sorted_by)
    there = [name for name in ("time", "edge_time") if name in d.graph.attributes]
    return repr(d.r.choice(there)) if there else None


def time_window(d: Draft) -> str | None:
    if not d.has("time_attr"):
        return None
    if has_real_times(d.graph) and d.r.random() < 0.7:
        return d.pick("0.5", "4.5", "5.5")  # differences between some of these times
    return d.pick("0", "2", "1.5", "100", "float('inf')") if d.r.random() < 0.5 else None


def weight_attr(d: Draft) -> str | None:
    return "'weight'" if "weight" in d.graph.attributes and not d.graph.is_stores else None


def neighbor_sampler(d: Draft) -> str | None:
    if d.r.random() < 0.1:
        return "'device'"  # refused: random jobs have no device
    if "num_neighbors" in d.odd:  # the user could not make such a sampler
        return None
    if d.graph.sorted_by or d.has("replace", "disjoint", "time_attr", "weight_attr", "subgraph_type", "directed"):
        return None
    numbers = d.chosen["num_neighbors"]
    if d.graph.is_typed or d.r.random() < 0.5:
        return f"NeighborSampler({'whole' if d.graph.is_directory else 'data'}, {numbers}{d.pick('', ', replace=True', ', disjoint=True')})"
    if d.graph.is_stores:
        return None
    return f"PPRSampler({'data' if d.graph.is_directory else 'whole'}, {d.pick(2, 5)})"


def sampler(d: Draft) -> str | None:
    if d.graph.is_directory or d.has("shuffle", "batch_sampler"):
        return None
    return d.pick(
        "SequentialSampler(range(num_seeds))",
        "Positions([0, 0] * (num_seeds > 0))",
        "Positions(range(num_seeds)[::-1])",
    )


def batch_sampler(d: Draft) -> str | None:
    if d.graph.is_directory or d.has("shuffle", "sampler", "drop_last", "batch_size"):
        return None
    return d.pick(
        "Endless() if num_seeds else Positions([])",
        "Positions([[0], [0, 0]] * (num_seeds > 0))",
        "BatchSampler(SequentialSampler(range(num_seeds)), 3, False)",
    )


def batch_size(d: Draft) -> str | None:
    if d.has("batch_sampler"):
        return None
    # At most 40 batches an epoch, and 25 of edges: the cost of a job grows with them, and no pipeline is deeper than that.
    least = d.graph.edges / 25 if d.link else d.graph.vertices / 40
    return d.pick(*(size for size in VALUES["batch_size"] if size >= least))


def neg_sampling(d: Draft) -> str | None:
    if not d.link or d.has("neg_sampling_ratio"):
        return None
    kinds = ["'binary'", "NegativeSampling('binary', 2)", "dict(mode='binary', amount=0.5)"]
    if not d.has("edge_label"):
        kinds += ["'triplet'", "NegativeSampling('triplet', 2)"]
    return d.r.choice(kinds)


def only_if(name: str, *values: str) -> Callable[[Draft], str | None]:
    return lambda d: d.pick(*values) if d.has(name) else None


def unless(names: tuple[str, ...], *values: str) -> Callable[[Draft], str | None]:
    return lambda d: None if d.has(*names) else d.pick(*values)


def of(*values: str) -> Callable[[Draft], str | None]:
    return lambda d: d.pick(*values)


# --- the package's options -----------------------------------------------------------------------------------------


def known(name: str) -> Callable[[Draft], str | None]:
    """Values that suites of the package draw too."""
    return of(*map(repr, {**VALUES, **OF_PARTS}[name]))


def on_parts(*values: str, but: tuple[str, ...] = ()) -> Callable[[Draft], str | None]:
    """Values for a partitioned graph only."""
    return lambda d: d.pick(*values) if d.graph.is_directory and not d.has(*but) else None


def _has_x(d: Draft) -> bool:
    return d.graph.rows != "none"


def policy(d: Draft) -> str | None:
    if not d.graph.is_directory:
        return None
    known = ["'vip'", "'vip-hop'"]
    if not d.has("lookahead"):
        known += ["'degree'", "'halo'", "'wpr'", "'paths'", "'simulation'", "'random'", "low_ids"]
    return d.pick(*known)


def columns(d: Draft) -> str | None:
    there = ["x"] * _has_x(d) + [name for name in ("y", "z", "tf") if name in d.graph.attributes]
    if d.graph.is_stores:
        return None
    if not d.graph.is_directory or d.r.random() < 0.25:
        if d.graph.store_as is not None:
            return None
        column = "('a', 'x')" if d.graph.is_typed else "'x'"
        return f"{{{column}: {d.pick('own_rows(6)', 'SlowRows(own_rows(6))')}}}"
    names = sorted({name for name in there if d.r.random() < 0.6})
    return f"({', '.join(map(repr, names))}{',' * (len(names) == 1)})"


def dtype(d: Draft) -> str | None:
    kind = d.graph.rows.split()[0]
    return d.pick("torch.float64", "torch.float16") if kind.startswith(("float", "bfloat", "int")) else None


def send_as(d: Draft) -> str | None:
    if not d.graph.is_directory or d.graph.rows != "float32 16" or d.graph.store_as is not None or d.has("columns"):
        return None
    return f"{{'x': {d.r.choice(FORMATS)!r}}}"


def lookahead(d: Draft) -> str | None:
    if not d.graph.is_directory or d.has("transform_sampler_output"):
        return None
    # Without a replication factor it has no memory, and no effect.
    return known("lookahead")(d) if d.has("replication_factor") or d.r.random() < 0.1 else None


def given_cache(d: Draft) -> str | None:
    """A cache that another loader has filled, mostly beside a cache of the loader's own."""
    if not d.graph.is_directory or d.has("lookahead") or (not d.has("replication_factor") and d.r.random() < 0.85):
        return None
    return "cache_of(0.4)"


def read_ahead(d: Draft) -> str | None:
    if not (d.graph.is_directory or d.graph.mapped) or d.has("device_rows_zero_copy"):
        return None
    # Small buffers drop rows. Whether a budget suffices depends on the seed, so it must be the same in every loader of the job.
    return d.pick("100", "'20kB'", "'8MiB'", *(["'1500B'", "'2kB'", "'3kB'", "'5kB'"] if d.has("seed") else []))


def logical_ranks(d: Draft) -> str | None:
    if not d.graph.is_directory:
        return None
    parts, ranks = d.graph.parts, d.ranks
    fits = [s for s in range(ranks, 13) if (s <= parts or s % parts == 0) and (ranks <= parts or s % ranks == 0)]
    # Ranks with different numbers of logical ranks have empty ticks.
    uneven = [s for s in fits if min(s, parts) % ranks and ranks <= parts]
    if uneven and d.r.random() < 0.6:
        return str(d.r.choice(uneven))
    return str(d.r.choice(fits)) if fits else None


def ranks_per_host(d: Draft) -> str | None:
    if not d.graph.is_directory:
        return None
    fits = [str(n) for n in range(1, d.ranks + 1) if d.ranks % n == 0]
    return d.pick(*fits, *(["[1, 2]", "[2, 1]"] if d.ranks == 3 else []))


def uneven(d: Draft) -> str | None:
    # Parts without seeds are refused with other values.
    if d.graph.is_directory and d.graph.assignment in LACKING and d.r.random() < 0.8:
        return "'exact'"
    return known("uneven")(d)


def share(d: Draft) -> str | None:
    if d.graph.is_directory or d.has("sampler", "batch_sampler") or (d.has("shuffle") and not d.has("seed")):
        return None
    return d.pick("(0, 1)", "(1, 2)", "(0, 3)", "(2, 3)")


def pad(d: Draft) -> str | None:
    bad = ("disjoint", "time_attr", "neighbor_sampler", "custom_cls", "cooperate", "partial_aggregation")
    if d.graph.is_stores or d.has(*bad) or {"tf", "names", "adj_t"} & set(d.graph.attributes):
        return None
    return known("pad")(d)


def partial_aggregation(d: Draft) -> str | None:
    bad = ("disjoint", "time_attr", "subgraph_type", "directed", "lookahead", "pad", "send_as", "columns", "cooperate")
    others = ("transform_sampler_output", "neighbor_sampler")
    wide = d.graph.is_directory and not d.graph.store_as and d.graph.rows.startswith("float")
    if d.link or d.graph.is_typed or not wide or "tf" in d.graph.attributes or d.has(*bad, *others):
        return None
    return d.pick("'auto'", "'sum'", "'mean'", "'max'")


def cooperate(d: Draft) -> str | None:
    bad = (
        "disjoint",
        "time_attr",
        "subgraph_type",
        "directed",
        "transform_sampler_output",
        "logical_ranks_join",
        "neighbor_sampler",
    )
    if d.link or not d.graph.is_directory or d.graph.is_typed or d.graph.topology == "parts" or d.has(*bad):
        return None
    return "'host'"


def memory(d: Draft) -> str | None:
    return d.pick("0", "1000", "'20kB'", "'1MB'") if d.graph.is_directory and not d.has("neighbor_sampler") else None


def logical_ranks_join(d: Draft) -> str | None:
    if not d.graph.is_directory or d.has("neighbor_sampler"):
        return None
    return "True" if d.has("logical_ranks") or d.r.random() < 0.15 else None  # otherwise each batch has one piece


def ways(d: Draft) -> str | None:
    if d.graph.is_directory and d.r.random() < 0.85:
        return None
    # Over data in memory, only a way that needs the stages lets batches go through them.
    return d.pick("[NoWay()]", "[StagedWay()]", "[StagedWay()]", "()")


NEVER = of("None")

#: Arguments that only one of the loaders has.
_OF_VERTICES = ("input_nodes", "input_time")
_OF_EDGES = ("edge_label_index", "edge_label", "edge_label_time", "neg_sampling", "neg_sampling_ratio")

#: Name -> strategy, in the order in which arguments are drawn. Arguments that others depend on come first.
STRATEGIES: dict[str, Strategy] = {
    # PyG's
    "data": Strategy(0, NEVER),  # of the job itself
    "num_neighbors": Strategy(1, num_neighbors),
    "time_attr": Strategy(0.4, time_attr),
    "weight_attr": Strategy(0.4, weight_attr),
    "input_nodes": Strategy(1, input_nodes),
    "edge_label_index": Strategy(1, edge_label_index),
    "edge_label": Strategy(0.3, edge_label),
    "edge_label_time": Strategy(1, edge_label_time),
    "input_time": Strategy(1, input_time),
    "input_id": Strategy(0.2, of("arange(seeds) * 3 + 5")),
    "replace": Strategy(0.1, known("replace")),
    "subgraph_type": Strategy(0.15, of("'directional'", "'bidirectional'", "'induced'", "SubgraphType.bidirectional")),
    "directed": Strategy(0.03, unless(("subgraph_type",), "False")),
    "disjoint": Strategy(0.15, known("disjoint")),
    "temporal_strategy": Strategy(0.3, only_if("time_attr", *map(repr, VALUES["temporal_strategy"]))),
    "is_sorted": Strategy(0.02, of("False", "True")),
    "filter_per_worker": Strategy(0.05, known("filter_per_worker")),
    "transform": Strategy(0.1, of("marked")),
    "transform_sampler_output": Strategy(0.1, of("same_sample", "reversed_edges", "reversed_edges")),
    "neighbor_sampler": Strategy(0.1, neighbor_sampler),
    "custom_cls": Strategy(
        0.3, lambda d: ("OwnHetero" if d.graph.is_typed else "OwnData") if d.graph.is_stores else None
    ),
    "neg_sampling": Strategy(0.5, neg_sampling),
    "neg_sampling_ratio": Strategy(
        0.1, lambda d: d.pick("0.0", "1.0", "0.5") if d.link and not d.has("neg_sampling") else None
    ),
    # torch's
    "shuffle": Strategy(0.6, known("shuffle")),
    "drop_last": Strategy(0.12, known("drop_last")),
    "sampler": Strategy(0.1, sampler),
    "batch_sampler": Strategy(0.1, batch_sampler),
    "batch_size": Strategy(1, batch_size),
    "num_workers": Strategy(0.35, of("0", "1", "1", "2", "3", "rank % 3")),
    "prefetch_factor": Strategy(0.3, lambda d: d.pick(1, 2, 5) if d.has_workers else None),
    "persistent_workers": Strategy(0.2, lambda d: "True" if d.has_workers else None),
    "worker_init_fn": Strategy(0.1, of("noted")),
    "pin_memory": Strategy(0.03, of("True", "False")),
    "pin_memory_device": Strategy(0.02, of("''")),
    "multiprocessing_context": Strategy(0.03, lambda d: "'fork'" if d.has_workers else None),
    "generator": Strategy(0.1, of("torch.Generator().manual_seed(3)")),
    "in_order": Strategy(0.02, of("True", "False")),
    "dataset": Strategy(0.02, of("[1, 2]")),
    "collate_fn": Strategy(0.02, of("print")),
    "timeout": Strategy(0.03, of("0", "100", "timedelta(seconds=100)")),
    # the package's
    "seed": Strategy(0.8, of("0", "1", "7", "-3", "2**62", "2**64 + 5")),
    "replication_factor": Strategy(0.35, on_parts(*map(repr, OF_PARTS["replication_factor"]))),
    "lookahead": Strategy(0.5, lookahead),
    "policy": Strategy(0.25, policy),
    "cache": Strategy(0.3, given_cache),
    "device_rows": Strategy(0.12, of("0.3", "1.0", "100", "'1kB'", "0.5 * (rank % 2)")),
    "device_rows_cache": Strategy(0.08, on_parts("0.5", "1.0", "64")),
    "device_rows_zero_copy": Strategy(0.04, of("True", "False")),
    "read_ahead": Strategy(0.15, read_ahead),
    "columns": Strategy(0.2, columns),
    "dtype": Strategy(0.08, dtype),
    "send_as": Strategy(0.8, send_as),
    "shared_draws": Strategy(0.08, unless(("replace", "weight_attr"), "'batch'")),
    "time_window": Strategy(0.8, time_window),
    "shared_draws_block": Strategy(0.1, unless(("neighbor_sampler",), "1", "2", "3")),
    "uneven": Strategy(0.6, uneven),
    "share": Strategy(0.25, share),
    "device": Strategy(0.04, of("'cpu'", "torch.device('cpu')", "None")),
    "depth": Strategy(0.3, known("depth")),
    "process_group": Strategy(0, NEVER),  # of the pool
    "ranks_per_host": Strategy(0.25, ranks_per_host),
    "logical_ranks": Strategy(0.3, logical_ranks),
    "logical_ranks_join": Strategy(0.2, logical_ranks_join),
    "cooperate": Strategy(0.4, cooperate),
    "cooperate_batches": Strategy(0.5, lambda d: d.pick(1, 2, 3) if d.has("cooperate") else None),
    "cooperate_split_by": Strategy(0.4, only_if("cooperate", "'rows'", "'vip'")),
    "partial_aggregation": Strategy(0.8, partial_aggregation),
    "partial_aggregation_weight": Strategy(
        0.7, lambda d: "'weight'" if d.has("partial_aggregation") and "weight" in d.graph.attributes else None
    ),
    "pad": Strategy(0.12, pad),
    "pad_sigma": Strategy(0.3, lambda d: d.pick("0", "1", "5.0") if d.chosen.get("pad") == "'fixed'" else None),
    "pad_static": Strategy(0.5, lambda d: "True" if d.chosen.get("pad") == "'fixed'" else None),
    "ways": Strategy(0.35, ways),
    "memory": Strategy(0.06, memory),
    "memory_device": Strategy(0.005, of("'1MB'")),
    "memory_machines": Strategy(0.8, only_if("memory", "machines()")),
    "memory_allow": Strategy(0.3, only_if("memory", "()", "('sums',)")),
}

#: Class of a way -> the argument that makes it occur.
WAYS = {
    "ReadAhead": "read_ahead", "DeviceRows": "device_rows", "Cache": "replication_factor", "GivenCache": "cache",
    "Lookahead": "lookahead", "SumsOfRows": "partial_aggregation",
    "CacheOfUses": "of layer-wise inference, which makes no loader of the user",
}  # fmt: skip


#: Options that take a mapping. STRATEGIES has each entry, such as ``pad_static``.
MAPPED = {name: option for name, option in OPTIONS.items() if option.keys}


def fold(draft: Draft, lead: str) -> None:
    """Puts entries that were drawn into a mapping, which takes the place of the option's value unless that is odd. Some mappings have the value only."""
    main, names = MAPPED[lead].main, {key: f"{lead}_{key}" for key in MAPPED[lead].keys}
    drawn = {key: draft.chosen.pop(name) for key, name in names.items() if name in draft.chosen}
    odd = [name for name in names.values() if name in draft.odd]
    draft.odd[:] = [name for name in draft.odd if name not in odd]
    if lead in draft.odd:
        return
    if main is not None and lead in draft.chosen and (drawn or draft.r.random() < 0.2):
        drawn = {main: draft.chosen[lead], **drawn}
    if drawn:
        draft.chosen[lead] = f"{{{', '.join(f'{key!r}: {text}' for key, text in drawn.items())}}}"
        draft.odd += [lead] if odd else []


def unfolded(name: str, text: str) -> dict[str, str]:
    """Returns an argument, and the entries of its mapping under the names of STRATEGIES."""
    node = ast.parse(text.strip(), mode="eval").body
    if name not in MAPPED or not isinstance(node, ast.Dict):
        return {name: text}
    main = MAPPED[name].main
    entries = {ast.literal_eval(key): ast.unparse(value) for key, value in zip(node.keys, node.values)}
    whole = {} if main is not None else {name: text}
    return {**whole, **{name if key == main else f"{name}_{key}": of for key, of in entries.items()}}


def apart(r: random.Random, graph: Graph, ranks: int, link: bool, arguments: dict[str, str]) -> str | None:
    """Gives ranks different values of a random argument. Returns its name."""
    name = r.choice([name for name in arguments if name not in ("input_nodes", "edge_label_index")])
    draft = Draft(r, graph, ranks, link, {other: text for other, text in arguments.items() if other != name})
    other = STRATEGIES[name].draw(draft)
    if other is None or other == arguments[name]:
        return None
    arguments[name] = f"({arguments[name]}, {other})[rank % 2]"
    return name


def arguments_of(r: random.Random, graph: Graph, ranks: int, link: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns random arguments, as source texts, and the names of those with an odd value."""
    draft = Draft(r, graph, ranks, link)
    more = r.choice((0.3, 0.7, 1.0, 1.0, 1.5))
    for name, strategy in STRATEGIES.items():
        if strategy.chance == 0:
            continue
        if name in (_OF_VERTICES if link else _OF_EDGES):
            continue
        if r.random() < CHANCE_OF_ODD:
            draft.chosen[name] = r.choice(ODD)
            draft.odd.append(name)
        elif strategy.chance == 1 or r.random() < strategy.chance * more:
            text = strategy.draw(draft)
            if text is not None:
                draft.chosen[name] = text
    for lead in MAPPED:
        fold(draft, lead)
    if "'batches'" in draft.chosen.get("cooperate", ""):  # they exclude a size of batches
        draft.chosen = {name: text for name, text in draft.chosen.items() if name not in ("batch_size", "drop_last")}
    return draft.chosen, tuple(draft.odd)
