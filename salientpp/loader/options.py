"""The package's own options of the loaders, each declared once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor

from salientpp.arguments import as_amount, as_integer
from salientpp.engine.option import Check, Option, amount, declared_in, flag, integer
from salientpp.engine.way import Way
from salientpp.loader.pyg_arguments import TorchArguments
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.sampling.neighbor_sampler import SharedDraws
from salientpp.sampling.schedule import UNEVEN
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.store.rows import RowSource
from salientpp.vip.policies import Policy, check_policy, check_replication_factor
from salientpp.ways.lookahead.shape import Window, check_lookahead
from salientpp.ways.sums.plan import REDUCTIONS, PartialAggregation

#: What happens where ranks have different numbers of batches, see :mod:`salientpp.sampling.schedule`; None: 'wrap' for seeds in a random order, which are
#: to be trained on, and 'exact' for others, so that an evaluation counts each once.
Uneven = Literal["wrap", "drop", "exact", "error"] | None

#: How batches are filled up to few sizes, see :mod:`salientpp.loader.padding`; None: not at all.
Pad = Literal["bucket"] | None


def _check_policy(name: str, value: Any) -> Policy:
    check_policy(value)
    return value


def _check_alpha(name: str, value: Any) -> float | int:
    if not isinstance(value, str):
        return check_replication_factor(value)
    num_bytes = as_amount(value)
    if num_bytes is None:
        raise ValueError(
            f"{name} must be >= 0 (α, cached rows per part over N / K), or bytes such as '2GiB', got {value!r}"
        )
    return num_bytes


def _check_cache(name: str, value: Any) -> FeatureCache | TypedFeatureCache | None:
    if value is not None and not isinstance(value, (FeatureCache, TypedFeatureCache)):
        raise TypeError(f"{name} must be the cache of another loader (loader.cache), got {type(value).__name__}")
    return value


def _check_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is not None and not isinstance(value, torch.dtype):
        raise ValueError(f"{name} must be a torch.dtype (of delivered x) or None, got {value!r}")
    return value


def _one_of(expected: str, *words: str) -> Check:
    """A check for one of these words, or None; ``expected`` is for the error."""

    def check(name: str, value: Any) -> Any:
        if value is not None and (not isinstance(value, str) or value not in words):
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        return value

    return check


def _check_seed(name: str, value: Any) -> int | None:
    if value is not None and as_integer(value) is None:
        raise ValueError(f"{name} must be an integer or None, got {value!r}")
    return None if value is None else as_integer(value)


def _check_ways(name: str, value: Any) -> Sequence[Way]:
    wrong = next((way for way in value if not isinstance(way, Way)), None)
    if wrong is not None:
        raise TypeError(f"{name} must be objects of salientpp.engine.way.Way, got {type(wrong).__name__}")
    return value


class Memory(TypedDict, total=False):
    """Where rows are kept."""

    replication_factor: Annotated[
        float | str,
        Option(
            default=0.0,
            check=_check_alpha,
            agree="hosts",
            help="α ≥ 0: each rank caches `floor(α N / K)` remote rows; text such as `'2GiB'` is [bytes](#amounts-of-memory) of them. With [several ranks on a "
            "host](concepts.md#hosts-with-several-ranks) it counts per host, and K is the number of hosts that differ in their parts. No effect on a `Data`",
        ),
    ]

    policy: Annotated[
        Policy,
        Option(
            default="vip",
            check=_check_policy,
            agree="hosts",
            plain=lambda policy: policy if isinstance(policy, str) else getattr(policy, "__qualname__", "a function"),
            help="how cached rows are chosen: `vip`, `vip-hop`, `degree`, `halo`, `wpr`, `paths`, `simulation`, `random`, or [a "
            "function](#a-cache-policy-of-your-own)",
        ),
    ]

    cache: Annotated[
        FeatureCache | TypedFeatureCache | None,
        Option(
            default=None,
            check=_check_cache,
            help="another loader's `cache`; `replication_factor` adds rows that it lacks",
        ),
    ]

    device_rows: Annotated[
        float | int | str,
        Option(
            default=0.0,
            check=amount("the part's rows"),
            help="the hottest rows of the part, of each type, that are kept on `device` too: β in [0, 1] as a fraction of them, or "
            "[bytes](#amounts-of-memory). No effect on stores; refused with a `neighbor_sampler` of another class",
        ),
    ]

    device_cache: Annotated[
        float | int | str,
        Option(
            default=0.0,
            check=amount("the cached rows"),
            help="the hottest of the rows that this loader caches itself that are kept on `device` too: a fraction of them, or "
            "[bytes](#amounts-of-memory)",
        ),
    ]

    zero_copy: Annotated[
        bool,
        Option(
            default=False,
            check=flag,
            help="on a CUDA device: keep the rows of the host in pinned memory and let the device read them there, see [cuda.md](cuda.md). No effect on "
            "the CPU",
        ),
    ]


class Columns(TypedDict, total=False):
    """What batches hold."""

    columns: Annotated[
        Iterable[Any] | Mapping[Any, Tensor | RowSource | None],
        Option(
            default=("x",),
            agree="yes",
            identifies=True,
            plain=None,
            help="on a partitioned graph, the node attributes that every sampled vertex gets, of all types that have them, or `(type, name)`. A mapping "
            "says also where their rows come from, see [rows from another storage](#rows-from-another-storage); `None`: from the data. A `Data` takes a "
            "mapping with sources alone, since all its attributes come; stores refuse one",
        ),
    ]

    dtype: Annotated[
        torch.dtype | None,
        Option(
            default=None,
            check=_check_dtype,
            agree="yes",
            plain=str,
            help="of delivered `x`, which may be stored narrower; a plain cast on `device`. `None`: as stored, or as it was before `store_as` or "
            "`send_as` made it [narrower](concepts.md#narrower-rows)",
        ),
    ]

    pad: Annotated[
        Pad,
        Option(
            default=None,
            check=_one_of("'bucket' or None", "bucket"),
            help="`'bucket'`: fill batches up to few sizes, for [compiled models](#compiled-models)",
        ),
    ]


class Sampling(TypedDict, total=False):
    """How batches are drawn."""

    seed: Annotated[
        int | None,
        Option(
            default=None,
            check=_check_seed,
            agree="yes",
            identifies=True,
            plain=None,
            help="of everything random. `None` draws one from `generator` or torch's global generator; rank 0's counts. `loader.seed` shows it",
        ),
    ]

    shared_draws: Annotated[
        SharedDraws,
        Option(
            default=None,
            agree="yes",
            identifies=True,
            plain=None,
            help="`'batch'`: the vertices of a batch agree on which neighbours to draw, so it has fewer vertices, see "
            "[concepts.md](concepts.md#draws-that-agree). `None`: each draws by itself. Refused with `replace` and `weight_attr`. `NeighborSampler` "
            "takes it too",
        ),
    ]

    draw_block: Annotated[
        int,
        Option(
            default=1,
            check=integer("batches that draw alike", 1),
            agree="yes",
            identifies=True,
            help="so many batches of a logical rank that follow one another draw alike, see [concepts.md](concepts.md#draws-that-agree). 1: each has draws of "
            "its own. Refused with a `neighbor_sampler` of another class",
        ),
    ]

    uneven: Annotated[
        Uneven,
        Option(
            default=None,
            check=_one_of(f"one of {', '.join(map(repr, UNEVEN))}", *UNEVEN),
            agree="yes",
            identifies=True,
            plain=None,
            help="`'wrap'`, `'drop'`, `'exact'` or `'error'`, see [concepts.md](concepts.md#ranks-with-different-numbers-of-batches). `None`: `'wrap'` "
            "with `shuffle=True`, else `'exact'`",
        ),
    ]

    share: Annotated[
        tuple[int, int] | None,
        Option(
            default=None,
            help="(rank, number of ranks): of a `Data` that every process holds, visit this process's share of the seeds, with the same `seed` on all "
            "(required with `shuffle`); `uneven` applies. No rank talks to another",
        ),
    ]


class Pipeline(TypedDict, total=False):
    """How batches are made ahead."""

    device: Annotated[
        torch.device | str | int | None,
        Option(default=None, help="where batches are delivered; `None` is the CPU"),
    ]

    depth: Annotated[
        int,
        Option(
            default=10,
            check=integer("batches in flight", 1),
            agree="yes",
            help="batches in flight, from 1 (pipeline off); more than 10 counts as 10; equal on all ranks. No effect on one process's data on the CPU, "
            "where a batch is made in one call",
        ),
    ]


class Ranks(TypedDict, total=False):
    """Which ranks make batches together."""

    process_group: Annotated[
        Any,
        Option(
            default=None,
            help="the ranks that serve the parts; `None` is the default group. See [below](#rules-on-several-ranks)",
        ),
    ]

    timeout: Annotated[
        float | timedelta,
        Option(
            default=DEFAULT_TIMEOUT,
            shown="300 s",
            help="longest wait for another rank, seconds or `timedelta` (not `DataLoader`'s `timeout`)",
        ),
    ]

    ranks_per_host: Annotated[
        int | Sequence[int] | None,
        Option(
            default=None,
            agree="yes",
            plain=None,
            help="on a partitioned graph, how many ranks each host has: a number, or a list with one for every host. They share rows and a cache, see "
            "[concepts.md](concepts.md#hosts-with-several-ranks). `None`: what torchrun (`LOCAL_WORLD_SIZE`) or SLURM says, 1 where neither speaks; "
            "1 shares nothing",
        ),
    ]

    logical_ranks: Annotated[
        int | None,
        Option(
            default=None,
            check=integer("that share an epoch's batches", 1, none=True),
            agree="yes",
            help="on a partitioned graph: how many share an epoch's batches, at most 16,384; any number of ranks up to that gives the same batches, see "
            "[concepts.md](concepts.md#logical-ranks-the-same-batches-on-any-number-of-ranks). `None`: as many as ranks",
        ),
    ]

    join_logical_ranks: Annotated[
        bool,
        Option(
            default=False,
            check=flag,
            agree="yes",
            help="give what a rank's logical ranks have in a round as one batch: their MFGs side by side, hop by hop; a remote row is fetched once",
        ),
    ]


class FewerBytes(TypedDict, total=False):
    """Ways to move fewer bytes."""

    send_as: Annotated[
        Mapping[Any, str] | None,
        Option(
            default=None,
            agree="yes",
            plain=lambda send_as: {str(key): str(format) for key, format in (send_as or {}).items()},
            help='on a partitioned graph, attribute → the format that its rows travel in and are cached in: `{"x": "int8"}`, see '
            "[concepts.md](concepts.md#narrower-rows). Of the attributes in `columns`; refused for those that the directory stores narrower already",
        ),
    ]

    lookahead: Annotated[
        Window,
        Option(
            default=0,
            check=lambda name, value: check_lookahead(value),
            agree="hosts",
            help="on a partitioned graph: how many of its next batches a rank knows, a number or `'auto'`. The cache follows them, so fewer rows travel, "
            "in the same memory; batches stay the same. See [concepts.md](concepts.md#a-cache-that-knows-the-next-batches). Every rank has a cache "
            "of its own; ranks that share a host share its memory equally. Without other ranks, or with α = 0, it does nothing. Refused with a `policy` "
            "other than `'vip'` and `'vip-hop'`, and with `transform_sampler_output`",
        ),
    ]

    ways: Annotated[
        Sequence[Way],
        Option(
            default=(),
            check=_check_ways,
            agree="yes",
            plain=lambda ways: [way.name for way in ways],
            help="further methods that move fewer bytes for the same batches, as objects of `salientpp.engine.way.Way`; the same on all ranks",
        ),
    ]


class Sums(TypedDict, total=False):
    """Ways to move fewer bytes, of `NeighborLoader` alone."""

    partial_aggregation: Annotated[
        PartialAggregation,
        Option(
            default=None,
            check=_one_of("'auto', 'sum', 'mean', 'max' or None", "auto", *REDUCTIONS),
            agree="yes",
            help="on a partitioned graph with one type of vertices: `'sum'`, `'mean'` or `'max'` of what other ranks have of a vertex's neighbours in the "
            "last hop come in place of their rows, where that is fewer bytes, and for a `device` also of what its host has; `'auto'`: `'mean'`, "
            "where it is worth it. Batches have `partial`, and the model's first layers add it after `salientpp.nn.merge_partial(model)`: see "
            "[concepts.md](concepts.md#sums-in-the-place-of-rows). `NeighborLoader` only. Refused with `disjoint`, `time_attr`, another "
            "`subgraph_type` than `'directional'`, several names in `columns`, rows that are not floats or travel narrower, `lookahead`, "
            "`pad` and `transform_sampler_output`",
        ),
    ]

    partial_weight: Annotated[
        str | None,
        Option(
            default=None,
            agree="yes",
            help="with `partial_aggregation`: the name of the edge attribute, one real number per edge, that the first layer is given as `edge_weight`. "
            "Rows are multiplied by it before they are summed; it [travels with the request](concepts.md#sums-in-the-place-of-rows)",
        ),
    ]


class LoaderOptions(Memory, Columns, Sampling, Pipeline, Ranks, FewerBytes, TorchArguments, total=False):
    """What both loaders take beside PyG's arguments, for editors and type checkers."""


class NeighborLoaderOptions(LoaderOptions, Sums, total=False):
    """What :class:`~salientpp.NeighborLoader` takes beside PyG's arguments."""


#: The groups of options; the first line of a group's docstring says what it is for. Those of ``Sums`` are NeighborLoader's alone.
GROUPS: list[type] = [Memory, Columns, Sampling, Pipeline, Ranks, FewerBytes, Sums]

#: Name -> declaration.
OPTIONS: dict[str, Option] = {name: option for group in GROUPS for name, (_, option) in declared_in(group).items()}
