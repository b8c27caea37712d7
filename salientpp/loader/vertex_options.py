"""The package's own options of loaders whose seeds are vertices, each declared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from salientpp.engine.drawing.owners import SplitBy
from salientpp.engine.option import Option, declared_in, integer
from salientpp.loader.checks import one_of
from salientpp.ways.sums.plan import REDUCTIONS, PartialAggregation


def _check_split(name: str, value: Any) -> SplitBy:
    if value is None:
        raise ValueError(f"{name} must be 'rows' or 'vip', got None")
    return one_of("'rows' or 'vip'", "rows", "vip")(name, value)


class SumEntries(TypedDict, total=False):
    """Entries of `partial_aggregation`."""

    reduce: PartialAggregation

    weight: Annotated[
        str | None,
        Option(
            default=None,
            agree="yes",
            help="Name of the edge attribute (one real number per edge) that the first layer gets as `edge_weight`. "
            "Rows are multiplied by their weights before they are summed. The weights travel with the request, see "
            "[sums](../explanation/traffic.md#sums-instead-of-rows)",
        ),
    ]


class SumOptions(TypedDict, total=False):
    """Sums instead of rows, `NeighborLoader` only."""

    partial_aggregation: Annotated[
        PartialAggregation | SumEntries,
        Option(
            default=None,
            check=one_of("'auto', 'sum', 'mean', 'max' or None", "auto", *REDUCTIONS),
            entries=SumEntries,
            main="reduce",
            agree="yes",
            help="On a partitioned graph with one vertex type: `'sum'`, `'mean'` or `'max'` of a vertex's remote neighbours in the last hop "
            "replaces their rows, where that takes fewer bytes. With an accelerator as `device`, sums also replace rows that the host would copy to it. "
            "`'auto'`: `'mean'`, if it saves enough bytes. Batches carry `partial`, and `salientpp.nn.merge_partial(model)` makes the model's first "
            "layers add these sums, see [sums](../explanation/traffic.md#sums-instead-of-rows). Refused with `disjoint`, `time_attr`, a "
            "`subgraph_type` other than `'directional'`, several names in `columns`, rows that are not floats, rows in a narrower format, "
            "`lookahead`, `pad` and `transform_sampler_output`. A mapping also names weights: "
            '`partial_aggregation={"reduce": "sum", "weight": "w"}`',
        ),
    ]


class CooperateEntries(TypedDict, total=False):
    """Entries of `cooperate`."""

    batches: Annotated[
        int | None,
        Option(
            default=None,
            check=integer("batches of a host in an epoch", 1, none=True),
            agree="yes",
            identifies=True,
            help="Number of batches of each host in an epoch, instead of `batch_size`. Their numbers of seeds differ by at most 1. With "
            "`logical_ranks`: of each logical rank. Refused with `drop_last`",
        ),
    ]

    split_by: Annotated[
        SplitBy,
        Option(
            default="vip",
            check=_check_split,
            agree="yes",
            help="Which rank of a host owns which vertex. `'vip'`: a partition of the graph, which balances the expected vertices and edges "
            "of a batch and cuts few edges. `'rows'`: the rank that serves the part of the vertex. If several ranks serve each part, as `'vip'`",
        ),
    ]


class Cooperating(TypedDict, total=False):
    """Batches that a host computes together, `NeighborLoader` only."""

    cooperate: Annotated[
        Literal["host"] | CooperateEntries | None,
        Option(
            default=None,
            check=one_of("'host', a mapping with entries batches and split_by, or None", "host"),
            entries=CooperateEntries,
            implied="host",
            agree="yes",
            identifies=True,
            help="On a partitioned graph with one vertex type: `'host'` joins the seeds of a host's ranks to one batch of `batch_size` times the number of "
            "these ranks. Each rank gets its share: the vertices that it owns, and the edges into them. A host then loads and computes no vertex twice, see "
            "[cooperative batches](../how-to/cooperative-batches.md). Every host needs the same number of ranks. A mapping means `'host'` "
            'and has further settings: `cooperate={"batches": 20}`',
        ),
    ]


#: Groups whose options only a loader with vertices as seeds has.
OF_VERTICES: tuple[type, ...] = (SumOptions, Cooperating)


def check_of_edges(loader: str, allow: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raises ValueError if a loader of edges gets an option that only loaders of vertices have.

    Args:
        loader: name of the class.
        allow: the entry 'allow' of the option ``memory``.
        given: arguments that are not options of this loader.
    """
    why = {
        **dict.fromkeys(declared_in(SumOptions), "which have no sums"),
        **dict.fromkeys(declared_in(Cooperating), "and each rank computes those alone"),
    }
    wrong = next((name for name in why if name in given), None)
    words = f"{wrong}="
    if wrong is None and "sums" in allow:
        wrong, words = "partial_aggregation", "memory['allow']=('sums',)"
    if wrong is not None:
        raise ValueError(
            f"{words} is for a NeighborLoader; {loader} makes batches of edges, {why[wrong]}; leave it out"
        )
