"""Law of batches with sums: each use gives the outputs of the whole batch at the seeds, or raises a clear error. No use is silently wrong."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import distributed
import pytest
import torch
import torch_geometric.transforms as transforms
from graphs import random_data
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, GraphConv, GraphSAGE, MessagePassing, SAGEConv
from torch_geometric.nn.models import GCN, GIN
from torch_geometric.utils import add_self_loops, degree, softmax, sort_edge_index

import salientpp
from salientpp import NeighborLoader
from salientpp.nn import merge_partial

WIDTH, HIDDEN, OUT = 12, 8, 6
Forward = Callable[[torch.nn.Module, Any], Tensor]
Conv = SAGEConv


class Layers(torch.nn.Module):
    """Layers in sequence, or in parallel on ``x``."""

    def __init__(self, *layers: torch.nn.Module, between: torch.nn.Module | None = None, branches: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.between, self.branches = between or torch.nn.Tanh(), branches

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = sum(layer(x, edge_index) for layer in self.layers[: self.branches])
        for layer in self.layers[self.branches :]:
            h = layer(self.between(h), edge_index)
        return h


class ByDegree(MessagePassing):
    """Layer that divides a sum by a count of edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        count = degree(edge_index[1], x.size(0), dtype=x.dtype).clamp(min=1)
        return self.propagate(edge_index, x=x) / count.view(-1, 1)


class ByEdges(MessagePassing):
    """Layer that reads the edges in its messages."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
        return x_j * degree(edge_index[1], int(edge_index.max()) + 1)[edge_index[0]].view(-1, 1)


class OtherWay(SAGEConv):
    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, flow="target_to_source")


class Attends(MessagePassing):
    """Layer with a softmax over the edges of each vertex, computed outside its messages."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_weight=softmax(x.sum(1)[edge_index[0]], edge_index[1]))


class Spread(torch.nn.Module):
    """Model that puts the rows of its layers along a second dimension, and takes their mean for each vertex."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(Conv(WIDTH, HIDDEN), Conv(HIDDEN, OUT))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.layers(x, edge_index)
        return (h + torch.zeros(h.size(0), 1, 1, dtype=h.dtype)).mean(1)


class Whole(torch.nn.Module):
    """Model with two layers and a mean over all vertices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(Conv(WIDTH, HIDDEN), Conv(HIDDEN, OUT))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.layers(x, edge_index)
        return h - h.mean(0)


class Twice(torch.nn.Module):
    """Model with one layer, used as the first and the second."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.conv(x, edge_index).relu(), edge_index)


class Dense(torch.nn.Module):
    """Model whose second layer gets the outputs of the first one concatenated with x. Normalisations and a linear map follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Conv(WIDTH, HIDDEN), Conv(WIDTH + HIDDEN, OUT)
        self.root, self.norm = torch.nn.Linear(WIDTH, OUT), torch.nn.LayerNorm(OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = torch.cat([x, self.first(x, edge_index).relu()], dim=-1)
        return self.norm(torch.nn.functional.normalize(self.second(h, edge_index)) + self.root(x))


def two() -> Layers:
    return Layers(Conv(WIDTH, HIDDEN), Conv(HIDDEN, OUT))


def plainly(model: torch.nn.Module, batch: Any) -> Tensor:
    return model(batch.x, batch.edge_index)[: batch.batch_size]


def merged(model: torch.nn.Module, batch: Any) -> Tensor:
    return plainly(merge_partial(model), batch)


def again(model: torch.nn.Module, batch: Any) -> Tensor:
    merge_partial(model.layers[0])
    return merged(merge_partial(model), batch)


def on(change: Callable[[Any], Any]) -> Forward:
    """Makes a forward on a changed batch. A change that returns None was made in place."""

    def forward(model: torch.nn.Module, batch: Any) -> Tensor:
        changed = change(batch)
        return merged(model, batch if changed is None else changed)

    return forward


def with_x(change: Callable[[Tensor], Tensor]) -> Forward:
    return lambda model, batch: merge_partial(model)(change(batch.x), batch.edge_index)[: batch.batch_size]


def with_edges(change: Callable[[Tensor], Any]) -> Forward:
    return lambda model, batch: merge_partial(model)(batch.x, change(batch.edge_index))[: batch.batch_size]


def of_copy(copied: Callable[[Any], Any]) -> Forward:
    return lambda model, batch: plainly(copied(merge_partial(merge_partial(model))), batch)


def hooked(kind: str, layer: int = 0, before: bool = True) -> Forward:
    """Makes a forward with a PyG hook that doubles its input, or only reads it."""

    def forward(model: torch.nn.Module, batch: Any) -> Tensor:
        if not before:
            merge_partial(model)
        register = getattr(model.layers[layer], f"register_{kind}_hook")
        register(lambda *given: given[2] * 2 if len(given) > 2 else None)
        return merged(model, batch)

    return forward


def explained(model: torch.nn.Module, batch: Any) -> Tensor:
    model.layers[0].explain = True
    return merged(model, batch)


def half_merged(model: torch.nn.Module, batch: Any) -> Tensor:
    merge_partial(model.layers[0])
    return plainly(model, batch)


def torch_hooked(model: torch.nn.Module, batch: Any) -> Tensor:
    model.layers[0].register_forward_hook(lambda layer, given, out: None)
    return merged(model, batch)


def centred(model: torch.nn.Module, batch: Any) -> Tensor:
    model.layers[0].register_forward_hook(lambda layer, given, out: out - out.mean(dim=0))
    return merged(model, batch)


def checkpointed(model: torch.nn.Module, batch: Any) -> Tensor:
    merge_partial(model)
    h = checkpoint(model.layers[0], batch.x, batch.edge_index, use_reentrant=False).tanh()
    return checkpoint(model.layers[1], h, batch.edge_index, use_reentrant=False)[: batch.batch_size]


def trimmed(model: torch.nn.Module, batch: Any) -> Tensor:
    out = merge_partial(model)(
        batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes, num_sampled_edges_per_hop=batch.num_sampled_edges
    )  # fmt: skip
    return out[: batch.batch_size]


def compiled(*parts: str, later: bool = False, **options: Any) -> Forward:
    """Makes a forward of a model that torch.compile has compiled: all of it, or parts of it. ``later``: it is compiled before it is merged."""

    def forward(model: torch.nn.Module, batch: Any) -> Tensor:
        torch.compiler.reset()
        if not later:
            merge_partial(model)
        for part in parts:
            model.get_submodule(part).compile(backend="eager", **options)
        called = model if parts else torch.compile(model, backend="eager", **options)
        return merged(called, batch) if later else plainly(called, batch)

    return forward


def compiled_step(model: torch.nn.Module, batch: Any) -> Tensor:
    torch.compiler.reset()
    return torch.compile(merged, backend="eager")(merge_partial(model), batch)


def compiled_unmerged(model: torch.nn.Module, batch: Any) -> Tensor:
    torch.compiler.reset()
    return plainly(torch.compile(model, backend="eager"), batch)


def compiled_elsewhere(model: torch.nn.Module, batch: Any) -> Tensor:
    with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(compiled(), model, batch).result()


def of_other_rows(model: torch.nn.Module, batch: Any) -> Tensor:
    x = torch.ones(batch.num_nodes, WIDTH, dtype=torch.float64)
    return merge_partial(model)(x, batch.edge_index)[: batch.batch_size]


def as_pair(model: torch.nn.Module, batch: Any) -> Tensor:
    merge_partial(model)
    return model.layers[1](model.layers[0]((batch.x, batch.x), batch.edge_index).tanh(), batch.edge_index)[
        : batch.batch_size
    ]


def weighted(model: torch.nn.Module, batch: Any) -> Tensor:
    return merge_partial(model).layers[0](batch.x, batch.edge_index, batch.w)[: batch.batch_size]


def in_place_of_view(model: torch.nn.Module, batch: Any) -> Tensor:
    batch.x.detach().view(-1, WIDTH).mul_(2)
    return merged(model, batch)


def doubled(batch: Any) -> None:
    batch.x.data.mul_(2)


def looped(batch: Any) -> None:
    batch.edge_index = add_self_loops(batch.edge_index)[0]


def masked(batch: Any) -> None:
    batch.edge_index = batch.edge_index[:, torch.ones(batch.num_edges, dtype=torch.bool)]


def all_rows(model: torch.nn.Module, batch: Any) -> Tensor:
    return merge_partial(model)(batch.x, batch.edge_index).square().mean().view(1)


NEVER_MERGED = "call salientpp.nn.merge_partial.model. on the whole model"
ANOTHER_X = "was given another x"
IN_PLACE = "x of a batch with sums .* in place"
A_HOOK = "has a PyG hook"
NOT_BY_ROW = "is not known to work on each row separately"
EDGES_USED = "was called on the edge_index of a batch with sums"

#: Name, model, use, and the expected error; None: seeds get the outputs of the whole batch.
ROWS: list[tuple[str, Callable[[], torch.nn.Module], Forward, str | None]] = [
    ("merged", two, merged, None),
    ("never merged, SAGE", two, plainly, NEVER_MERGED),
    ("never merged, GAT", lambda: Layers(GATConv(WIDTH, HIDDEN), GATConv(HIDDEN, OUT)), plainly, NEVER_MERGED),
    ("never merged, PyG's model", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT), plainly, NEVER_MERGED),
    ("GAT first", lambda: Layers(GATConv(WIDTH, HIDDEN), Conv(HIDDEN, OUT)), merged, "weights its messages by attention"),
    ("GAT second", lambda: Layers(Conv(WIDTH, HIDDEN), GATConv(HIDDEN, OUT)), merged, None),
    ("GCN second", lambda: Layers(Conv(WIDTH, HIDDEN), GCNConv(HIDDEN, OUT)), merged, EDGES_USED),
    ("GCN without norms", lambda: Layers(GCNConv(WIDTH, HIDDEN, normalize=False, aggr="mean"), GCNConv(HIDDEN, OUT, normalize=False)), merged, None),
    ("merged again", two, again, None),
    ("copied", two, of_copy(copy.deepcopy), None),
    ("copied, merged again", two, of_copy(lambda model: merge_partial(copy.deepcopy(model))), None),
    ("pickled", two, of_copy(lambda model: merge_partial(pickle.loads(pickle.dumps(model)))), None),
    ("two first layers", lambda: Layers(Conv(WIDTH, HIDDEN), GraphConv(WIDTH, HIDDEN, aggr="mean"), Conv(HIDDEN, OUT), branches=2), merged, None),
    ("one of two first layers", lambda: Layers(Conv(WIDTH, HIDDEN), Conv(WIDTH, HIDDEN), Conv(HIDDEN, OUT), branches=2), half_merged, NEVER_MERGED),
    ("one of two layers", two, half_merged, NEVER_MERGED),
    ("a first layer by degree", lambda: Layers(ByDegree(), Conv(WIDTH, OUT)), merged, EDGES_USED),
    ("a second layer by degree", lambda: Layers(Conv(WIDTH, OUT), ByDegree()), merged, EDGES_USED),
    ("a second layer's messages by degree", lambda: Layers(Conv(WIDTH, OUT), ByEdges()), merged, "ByEdges reads edge_index"),
    ("a first layer's softmax", lambda: Layers(Attends(), Conv(WIDTH, OUT)), merged, EDGES_USED),
    ("a second layer's other flow", lambda: Layers(Conv(WIDTH, HIDDEN), OtherWay(HIDDEN, OUT)), merged, "flow='source_to_target'"),
    ("three layers", lambda: Layers(Conv(WIDTH, HIDDEN), Conv(HIDDEN, HIDDEN), Conv(HIDDEN, OUT)), merged, "is layer 3 .* sums of 2 hops"),
    ("three layers and jumps", lambda: GraphSAGE(WIDTH, HIDDEN, 3, OUT, jk="cat"), merged, "is layer 3 .* sums of 2 hops"),
    ("two layers and jumps", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT, jk="max"), merged, None),
    ("one layer", lambda: Layers(Conv(WIDTH, OUT)), merged, None),
    ("a layer twice", Twice, merged, None),
    ("x beside the first layer", Dense, merged, None),
    ("a mean of all vertices", Whole, merged, NOT_BY_ROW),
    ("a mean of rows along a second dimension", Spread, merged, NOT_BY_ROW),
    ("a loss of all vertices", two, all_rows, NOT_BY_ROW),
    ("batch norm", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT, norm="batch_norm"), merged, "batch_norm .* while training"),
    ("batch norm in GIN", lambda: GIN(WIDTH, HIDDEN, 2, OUT, norm="batch_norm"), merged, "batch_norm .* while training"),
    ("batch norm in evaluation", lambda: GIN(WIDTH, HIDDEN, 2, OUT, norm="batch_norm").eval(), merged, None),
    ("graph norm", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT, norm="graph_norm"), merged, "of a batch with sums"),
    ("layer norm by row", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT, norm="layer_norm", norm_kwargs={"mode": "node"}), merged, None),
    ("GCN of PyG's", lambda: GCN(WIDTH, HIDDEN, 2, OUT, normalize=False), merged, None),
    ("trimmed", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT), trimmed, None),
    ("compiled", two, compiled(), None),
    ("compiled, PyG's model", lambda: GraphSAGE(WIDTH, HIDDEN, 2, OUT, jk="cat"), compiled(), None),
    ("compiled for all sizes", Dense, compiled(dynamic=True), None),
    ("compiled, GAT second", lambda: Layers(Conv(WIDTH, HIDDEN), GATConv(HIDDEN, OUT)), compiled(), None),
    ("compiled, GCN", lambda: Layers(GCNConv(WIDTH, HIDDEN, normalize=False), Conv(HIDDEN, OUT)), compiled(), None),
    ("compiled, a mean of all vertices", Whole, compiled(), NOT_BY_ROW),
    ("compiled, a second layer by degree", lambda: Layers(Conv(WIDTH, OUT), ByDegree()), compiled(), EDGES_USED),
    ("compiled, then merged", two, compiled(later=True), None),
    ("compiled in place", two, compiled(""), None),
    ("compiled in place, then merged", two, compiled("", later=True), None),
    ("compiled layers", two, compiled("layers.0", "layers.1"), None),
    ("compiled layers, then merged", two, compiled("layers.0", "layers.1", later=True), None),
    ("compiled between layers", two, compiled("between"), None),
    ("compiled step", two, compiled_step, None),
    ("compiled in another thread", two, compiled_elsewhere, None),
    ("compiled, never merged", two, compiled_unmerged, NEVER_MERGED),
    ("compiled as one graph", two, compiled(fullgraph=True), "a batch with sums is computed outside compiled code; leave fullgraph"),
    ("a pair", two, as_pair, None),
    ("checkpointed", two, checkpointed, None),
    ("moved", two, on(lambda batch: batch.to("cpu")), None),
    ("cloned", two, on(lambda batch: batch.clone()), None),
    ("copied batch", two, on(copy.copy), None),
    ("deeply copied batch", two, on(copy.deepcopy), None),
    ("pickled batch", two, on(lambda batch: pickle.loads(pickle.dumps(batch))), None),
    ("a copied batch, never merged", two, lambda model, batch: plainly(model, pickle.loads(pickle.dumps(batch.clone()))), NEVER_MERGED),
    ("edges masked", two, on(masked), EDGES_USED),
    ("edges sorted", two, with_edges(sort_edge_index), EDGES_USED),
    ("loops added", two, on(looped), EDGES_USED),
    ("edges as data", two, with_edges(lambda edges: edges.data), EDGES_USED),
    ("some edges", two, with_edges(lambda edges: edges[:, :3]), EDGES_USED),
    ("undirected", two, on(transforms.ToUndirected()), EDGES_USED),
    ("normalised rows", two, on(transforms.NormalizeFeatures()), "of a batch with sums"),
    ("scaled rows", two, with_x(lambda x: x * 2), ANOTHER_X),
    ("dropout before", two, with_x(lambda x: torch.nn.functional.dropout(x, 0.5)), ANOTHER_X),
    ("no dropout before", two, with_x(lambda x: torch.nn.functional.dropout(x, 0.5, training=False)), None),
    ("rows in the same dtype", two, with_x(lambda x: x.double()), None),
    ("narrowed rows", two, with_x(lambda x: x.float().double()), ANOTHER_X),
    ("other rows", two, of_other_rows, "rows that are neither the batch's x"),
    ("rows doubled in place", two, on(lambda batch: batch.x.mul_(2)), IN_PLACE),
    ("rows doubled as data", two, on(doubled), "of a batch with sums"),
    ("rows doubled by a view", two, in_place_of_view, ANOTHER_X),
    ("rows as an array", two, with_x(lambda x: torch.from_numpy(x.numpy() * 2)), "of a batch with sums"),
    ("weights that are not in sums", lambda: Layers(GraphConv(WIDTH, OUT)), weighted, "was given edge_weight, but the partial sums have no weights"),
    ("gradients of x", two, with_x(lambda x: x.requires_grad_()), "x that requires a gradient"),
    *((f"hook {kind}", two, hooked(kind), A_HOOK) for kind in (
        "message_forward", "message_forward_pre", "aggregate_forward", "aggregate_forward_pre", "propagate_forward", "propagate_forward_pre",
        "message_and_aggregate_forward", "message_and_aggregate_forward_pre", "edge_update_forward", "edge_update_forward_pre",
    )),
    ("a later hook", two, hooked("message_forward", before=False), A_HOOK),
    ("a hook of the second layer", two, hooked("message_forward", layer=1), A_HOOK),
    ("explained", two, explained, "has explain=True"),
    ("torch's hook", two, torch_hooked, None),
    ("torch's hook over all vertices", two, centred, NOT_BY_ROW),
]  # fmt: skip


def outcome(model: torch.nn.Module, use: Forward, batch: Any, whole: Any) -> float | str:
    """Returns the largest error relative to the largest value, or the text of the exception."""
    want = plainly(copy.deepcopy(model), whole)
    try:
        got = use(model, batch)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if got.shape != want.shape:
        return float("inf")
    return float((got - want).abs().max() / want.abs().max())


def use_some(rank: int, root: str) -> tuple[int, list[float | str]]:
    """Tries every second use, beginning with that of the rank's number. Most of the time is spent in compilations."""
    options: dict[str, Any] = {"batch_size": 32, "shuffle": True, "seed": 3, "ranks_per_host": 1}
    part = salientpp.load(root)
    with_sums = NeighborLoader(part, [8, 8], "train", partial_aggregation="mean", **options)
    loaders = zip(with_sums, NeighborLoader(part, [8, 8], "train", **options), strict=True)
    ((batch, whole),) = itertools.islice(loaders, 1)
    found = []
    for _, make, use, _ in ROWS[rank::2]:
        torch.manual_seed(5)
        found.append(outcome(make().double(), use, copy.deepcopy(batch), whole))
    return batch.partial.target.numel(), found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[float | str]]]:
    data = random_data(2000, 14000, directed=True, dtype=torch.float64)
    data.x = torch.randn(2000, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data.w = torch.rand(data.num_edges, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    root = str(tmp_path_factory.mktemp("misuse") / "parts")
    salientpp.partition(data, 2, root, [8, 8], 32)
    return distributed.run(use_some, 2, root)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=[name for name, *_ in ROWS])
def test_a_use_of_sums_is_right_or_raises_a_clear_error(outcomes, row):
    expected, (sums, of_rank) = ROWS[row][3], outcomes[row % 2]
    found = of_rank[row // 2]
    assert sums > 30
    if expected is None:
        assert isinstance(found, float) and found < 1e-6, found
    else:
        assert isinstance(found, str) and re.search(expected, found), found


def test_a_merged_model_is_compiled_as_one_graph_for_other_batches():
    torch.compiler.reset()
    x, edges = torch.randn(20, WIDTH), torch.randint(20, (2, 60))
    model = two()
    want = model(x, edges)
    assert torch.equal(torch.compile(merge_partial(model), backend="eager", fullgraph=True)(x, edges), want)
