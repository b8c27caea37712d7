"""The package's own options of the loaders, each declared once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor

from salientpp.engine.option import Option, amount, flag, integer, num_bytes, with_entries
from salientpp.engine.way import Way
from salientpp.loader.checks import (
    budget,
    check_allow,
    check_alpha,
    check_cache,
    check_dtype,
    check_machines,
    check_policy_option,
    check_seed,
    check_sigma,
    check_ways,
    one_of,
)
from salientpp.loader.pyg_arguments import TorchArguments
from salientpp.loader.vertex_options import Cooperating, SumOptions
from salientpp.ranks.comm import DEFAULT_TIMEOUT
from salientpp.sampling.neighbor_sampler import SharedDraws
from salientpp.sampling.schedule import UNEVEN
from salientpp.store.cache import FeatureCache, TypedFeatureCache
from salientpp.store.rows import RowSource
from salientpp.vip.names import POLICY_NAMES
from salientpp.vip.policies import Policy
from salientpp.ways.lookahead.shape import Window, check_lookahead
from salientpp.ways.planner.machines import Machines

#: Rule for ranks with different numbers of batches, see :mod:`salientpp.sampling.schedule`. None: 'wrap' for shuffled seeds (training), and 'exact'
#: otherwise, so that an evaluation counts each seed once.
Uneven = Literal["wrap", "drop", "exact", "error"] | None

#: How batches are padded to few sizes, see :mod:`salientpp.loader.padding`. None: no padding.
Pad = Literal["bucket", "fixed"] | None


class PadEntries(TypedDict, total=False):
    """Entries of `pad`."""

    sigma: Annotated[
        float,
        Option(
            default=3.0,
            check=check_sigma,
            help="The size of batches is the expected size plus this number of standard deviations",
        ),
    ]

    static: Annotated[
        bool,
        Option(
            default=False,
            check=flag,
            help="Every batch is delivered in the same tensors, as CUDA graphs need. The next batch overwrites them, see "
            "[static buffers](batch.md#static-buffers). Refused with `pin_memory`",
        ),
    ]


class MemoryEntries(TypedDict, total=False):
    """Entries of `memory`."""

    host: int | str | None

    device: Annotated[
        int | str | None,
        Option(
            default=None,
            check=budget("the device's memory"),
            agree="yes",
            help="[Bytes](#amounts-of-memory) of the rank's `device` for copies of rows. The loader then chooses `device_rows` itself. "
            "Needs a `device` other than the CPU",
        ),
    ]

    machines: Annotated[
        str | Path | Machines | None,
        Option(
            default=None,
            check=check_machines,
            agree="yes",
            plain=lambda machines: None if machines is None else machines.to_dict(),
            help="Constants of the machines, as the path of a file that [`salientpp calibrate`](cli.md#calibrate) wrote, or "
            "as a `Machines`. `None`: a few constants are measured when the loader is made",
        ),
    ]

    allow: Annotated[
        Sequence[str],
        Option(
            default=(),
            check=check_allow,
            agree="yes",
            plain=list,
            help="With `\"host\"`: ways that change batches, and that the loader may still choose. `'sums'`: `partial_aggregation='mean'`; the model then "
            "needs `salientpp.nn.merge_partial`",
        ),
    ]


class DeviceRowEntries(TypedDict, total=False):
    """Entries of `device_rows`."""

    part: float | int | str

    cache: Annotated[
        float | int | str,
        Option(
            default=0.0,
            check=amount("the cached rows"),
            help="Amount of this loader's own cache of which `device` keeps a copy, the rows with the highest scores first: a fraction in [0, 1], or "
            "[bytes](#amounts-of-memory)",
        ),
    ]

    zero_copy: Annotated[
        bool,
        Option(
            default=False,
            check=flag,
            help="On a CUDA device: keep the host's rows in pinned memory and let the device read them there, see [GPU](../how-to/gpu.md). No "
            "effect on the CPU",
        ),
    ]


class LogicalRankEntries(TypedDict, total=False):
    """Entries of `logical_ranks`."""

    number: int | None

    join: Annotated[
        bool,
        Option(
            default=False,
            check=flag,
            agree="yes",
            help="Join the batches that a rank has in a round into one batch: their message-flow graphs side by side, hop by hop. Each remote row "
            "is fetched once",
        ),
    ]


class DrawEntries(TypedDict, total=False):
    """Entries of `shared_draws`."""

    vertices: SharedDraws

    block: Annotated[
        int,
        Option(
            default=1,
            check=integer("consecutive batches that share draws", 1),
            agree="yes",
            identifies=True,
            help="Number of consecutive batches of a logical rank that share their random draws, see [shared "
            "draws](../explanation/traffic.md#draws-that-agree). 1: each batch draws independently. Refused with a "
            "`neighbor_sampler` other than `NeighborSampler`",
        ),
    ]


class Start(TypedDict, total=False):
    """Start here."""

    memory: Annotated[
        int | str | MemoryEntries | None,
        Option(
            default=None,
            check=budget("a host's memory"),
            entries=MemoryEntries,
            main="host",
            agree="yes",
            help="On a partitioned graph: [bytes](#amounts-of-memory) of a host's memory for copies of rows. The loader then chooses cache, "
            "lookahead and sums itself, so that an epoch takes the least time, see [memory "
            "budget](../how-to/plan.md#one-memory-budget). The ranks of a "
            "host share the bytes. The rank's own rows, the topology and the batches in flight are not part of them. Options that you give are not chosen. "
            'A mapping has more settings of the plan: `memory={"host": "8GiB", "device": "2GiB"}`. Its entry `"device"` also plans for a `Data`',
        ),
    ]

    device: Annotated[
        torch.device | str | int | None,
        Option(
            default=None,
            help="Device of the delivered batches; `None` is the CPU",
        ),
    ]

    seed: Annotated[
        int | None,
        Option(
            default=None,
            check=check_seed,
            agree="yes",
            identifies=True,
            plain=None,
            help="Seed of everything random. `None`: a seed drawn from `generator` or torch's global generator; rank 0's seed is used on all "
            "ranks. `loader.seed` shows it",
        ),
    ]

    columns: Annotated[
        Iterable[Any] | Mapping[Any, Tensor | RowSource | None],
        Option(
            default=("x",),
            agree="yes",
            identifies=True,
            plain=None,
            help="On a partitioned graph: the node attributes that every sampled vertex gets. A name applies to all types that have the attribute;"
            " `(type, name)` to one. `x` alone also selects a `TensorFrame` named `tf`. A mapping also says where rows come from, see [own "
            "storage](../how-to/own-storage.md#rows-from-another-storage); the value `None` stands for the data itself. On a `Data` only "
            "a mapping with sources is allowed, since its batches carry all attributes. Stores refuse `columns`",
        ),
    ]


class PlanOptions(TypedDict, total=False):
    """Chosen by the plan that `memory` makes, unless you give them."""

    replication_factor: Annotated[
        float | str,
        Option(
            default=0.0,
            check=check_alpha,
            agree="hosts",
            help="Size of the cache, α ≥ 0. Each rank caches `floor(α N / K)` remote rows. Text such as `'2GiB'` is a number of "
            "[bytes](#amounts-of-memory). If [several ranks share a host](../explanation/concepts.md#hosts-with-several-ranks), α counts per "
            "host, and K is the number of hosts, where hosts that hold the same parts count once. Refused on a `Data`",
        ),
    ]

    lookahead: Annotated[
        Window,
        Option(
            default=0,
            check=lambda name, value: check_lookahead(value),
            agree="hosts",
            help="On a partitioned graph: number of batches that a rank knows ahead, or `'auto'`. The cache keeps the rows that these batches "
            "need, so fewer rows travel with the same memory. Batches stay the same, see [lookahead](../explanation/traffic.md#lookahead). Every rank has its "
            "own cache; ranks on a host get equal shares of its memory. No effect without other ranks or with α = 0. Refused with a `policy` "
            "other than `'vip'` and `'vip-hop'`, and with `transform_sampler_output`",
        ),
    ]

    device_rows: Annotated[
        float | int | str | DeviceRowEntries,
        Option(
            default=0.0,
            check=amount("the part's rows"),
            entries=DeviceRowEntries,
            main="part",
            implied=0.0,
            help="Amount of the part's rows of which `device` keeps a copy, the most needed ones first: a fraction β in [0, 1] of each vertex type, or "
            "[bytes](#amounts-of-memory). No effect on stores. Refused with a `neighbor_sampler` other than `NeighborSampler`. Over a topology in parts, "
            'all ranks give it or none does. A mapping says more of the device\'s rows: `device_rows={"part": 0.3, "cache": "1GiB"}`',
        ),
    ]


class Tuning(TypedDict, total=False):
    """Settings of the cache."""

    policy: Annotated[
        Policy,
        Option(
            default="vip",
            check=check_policy_option,
            agree="hosts",
            plain=lambda policy: policy if isinstance(policy, str) else getattr(policy, "__qualname__", "a function"),
            help=f"On a partitioned graph: cache policy that scores the vertices: {', '.join(f'`{name!r}`' for name in POLICY_NAMES)} "
            "(see [VIP](../explanation/vip.md#policies)), or [a function](../how-to/own-storage.md#your-own-cache-policy)",
        ),
    ]

    cache: Annotated[
        FeatureCache | TypedFeatureCache | None,
        Option(
            default=None,
            check=check_cache,
            help="The `cache` of another loader, which this loader then shares. `replication_factor` adds rows that the given cache lacks",
        ),
    ]


class RankOptions(TypedDict, total=False):
    """Several ranks."""

    uneven: Annotated[
        Uneven,
        Option(
            default=None,
            check=one_of(f"one of {', '.join(map(repr, UNEVEN))}", *UNEVEN),
            agree="yes",
            identifies=True,
            plain=None,
            help="Rule for ranks with different numbers of batches: `'wrap'`, `'drop'`, `'exact'` or `'error'`, see [values](#values-of-uneven). "
            "`None`: `'wrap'` with `shuffle=True`, else `'exact'`",
        ),
    ]

    share: Annotated[
        tuple[int, int] | None,
        Option(
            default=None,
            help="`(rank, number of ranks)`: on a `Data` that every process holds, visit only this process's share of the seeds. `shuffle` then "
            "requires the same `seed` in all processes. `uneven` applies. The ranks do not communicate",
        ),
    ]

    logical_ranks: Annotated[
        int | LogicalRankEntries | None,
        Option(
            default=None,
            check=integer("number of logical ranks", 1, none=True),
            entries=LogicalRankEntries,
            main="number",
            agree="yes",
            help="On a partitioned graph: number of [logical ranks](#logical-ranks) that an epoch's batches belong to, at most 16,384. Any number "
            "of ranks up to this number gives the same batches. `None`: the number of ranks. A mapping also joins batches: "
            '`logical_ranks={"number": 8, "join": True}`',
        ),
    ]

    ranks_per_host: Annotated[
        int | Sequence[int] | None,
        Option(
            default=None,
            agree="yes",
            plain=None,
            help="On a partitioned graph: number of ranks on each host, as one number or as a list with an entry per host. Ranks on a host share "
            "rows and a cache, see [hosts](../explanation/concepts.md#hosts-with-several-ranks). `None`: the number that torchrun "
            "(`LOCAL_WORLD_SIZE`) or SLURM states, else 1. 1: nothing is shared",
        ),
    ]

    process_group: Annotated[
        Any,
        Option(
            default=None,
            help="Ranks that serve the parts; `None` is the default group. See [process groups](#process-groups)",
        ),
    ]

    timeout: Annotated[
        float | timedelta,
        Option(
            default=DEFAULT_TIMEOUT,
            shown="300 s",
            help="Longest wait for another rank, in seconds or as a `timedelta`. Its meaning differs from that of `timeout` in torch's `DataLoader`",
        ),
    ]


class RowOptions(TypedDict, total=False):
    """Times, formats and files."""

    time_window: Annotated[
        float | None,
        Option(
            default=None,
            agree="yes",
            identifies=True,
            plain=None,
            help="With `time_attr`: a number ≥ 0 in the units of the times. A seed of time t then draws only neighbours whose time is in [t − `time_window`, "
            "t], both ends included, see [times](../how-to/typed-graphs.md#times). `None`: all times up to t. `NeighborSampler` takes it too",
        ),
    ]

    dtype: Annotated[
        torch.dtype | None,
        Option(
            default=None,
            check=check_dtype,
            agree="yes",
            plain=str,
            help="Dtype of delivered `x`; a plain cast on `device`. `None`: the dtype of the data, also if `store_as` or `send_as` made "
            "rows [narrower](../explanation/traffic.md#narrower-rows)",
        ),
    ]

    send_as: Annotated[
        Mapping[Any, str] | None,
        Option(
            default=None,
            agree="yes",
            plain=lambda send_as: {str(key): str(format) for key, format in (send_as or {}).items()},
            help='On a partitioned graph: attribute → the format in which its rows travel and are cached, such as `{"x": "int8"}` (see '
            "[formats](../explanation/traffic.md#narrower-rows)). Only for attributes in `columns`, and over a topology in parts for "
            "edge attributes. Refused for attributes that the directory"
            " already stores narrower",
        ),
    ]

    read_ahead: Annotated[
        int | str,
        Option(
            default=0,
            check=num_bytes,
            agree="yes",
            help="[Bytes](#amounts-of-memory) of a buffer for rows that the next batches need, read from memory-mapped files for several batches at once, in "
            "file order, see [features larger than memory](../how-to/large-graphs.md#features-larger-than-memory). Each rank has its own buffer. Batches stay "
            'the same. 0: rows are read through the memory map. Refused if no rows are in mapped files, and with `device_rows={"zero_copy": True}`',
        ),
    ]


class Devices(TypedDict, total=False):
    """torch.compile and GPU."""

    pad: Annotated[
        Pad | PadEntries,
        Option(
            default=None,
            check=one_of("'bucket', 'fixed', a mapping with entries sigma and static, or None", "bucket", "fixed"),
            entries=PadEntries,
            implied="fixed",
            help="Pad batches, for [compiled models](../how-to/gpu.md#compile-a-model). `'bucket'`: to few sizes. `'fixed'`: to one size, "
            "which few batches exceed. A mapping means `'fixed'` and has further settings: `pad={\"static\": True}`. See [padding](batch.md#padding)",
        ),
    ]

    depth: Annotated[
        int,
        Option(
            default=10,
            check=integer("batches in flight", 1),
            agree="yes",
            help="Batches in flight. 1 turns the pipeline off; more than 10 counts as 10. No effect if one process has all rows and `device` is "
            "the CPU: a batch is then made in one call",
        ),
    ]


class Research(TypedDict, total=False):
    """Research."""

    shared_draws: Annotated[
        SharedDraws | DrawEntries,
        Option(
            default=None,
            entries=DrawEntries,
            main="vertices",
            agree="yes",
            identifies=True,
            plain=None,
            help="`'batch'`: the vertices of a batch agree on which neighbours to draw, so the batch has fewer vertices, see [shared "
            "draws](../explanation/traffic.md#draws-that-agree). `None`: each vertex draws independently. Refused with `replace` and "
            '`weight_attr`. A mapping also joins batches: `shared_draws={"vertices": "batch", "block": 16}`. `NeighborSampler` takes the plain form too',
        ),
    ]

    ways: Annotated[
        Sequence[Way],
        Option(
            default=(),
            check=check_ways,
            agree="yes",
            plain=lambda ways: [way.name for way in ways],
            help="Further methods that move fewer bytes for the same batches: objects of `salientpp.engine.way.Way`, the same on all ranks",
        ),
    ]


class LoaderOptions(
    Start, PlanOptions, Tuning, RankOptions, RowOptions, Devices, Research, TorchArguments, total=False
):
    """Options that both loaders have besides PyG's arguments, for editors and type checkers."""


class NeighborLoaderOptions(LoaderOptions, SumOptions, Cooperating, total=False):
    """Options that :class:`~salientpp.NeighborLoader` has besides PyG's arguments."""


#: Groups of options, by purpose. The first line of a group's docstring is the title of its table. Only NeighborLoader has Sums and Cooperating.
GROUPS: list[type] = [Start, PlanOptions, SumOptions, Tuning, RankOptions, RowOptions, Devices, Research, Cooperating]

#: Name -> declaration, with the entries of options that take a mapping.
OPTIONS: dict[str, Option] = {name: option for group in GROUPS for name, option in with_entries(group).items()}
