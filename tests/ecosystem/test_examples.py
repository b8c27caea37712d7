"""Training code written for PyG's loaders runs with salientpp's after a change of the import, and learns as much.

Each example is one idiom of PyG's examples and tutorials on a generated graph, run with either pair of loaders. Both runs must
take the same number of steps and reach about the same quality. Results that do not depend on draws must be equal. The second
half passes salientpp's loaders to PyG's tools for loaders.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.loader
import torch_geometric.transforms as T
from communities import CLASSES, WIDTH, plain
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import (
    GAT,
    GCN,
    DeepGraphInfomax,
    FastRGCNConv,
    GraphSAGE,
    HeteroConv,
    HGTConv,
    Linear,
    SAGEConv,
    to_hetero,
)
from torch_geometric.utils import trim_to_layer

import salientpp

PYG = SimpleNamespace(
    NeighborLoader=torch_geometric.loader.NeighborLoader, LinkNeighborLoader=torch_geometric.loader.LinkNeighborLoader
)

pytestmark = pytest.mark.filterwarnings("ignore")


def typed(half: bool = False) -> HeteroData:
    """Papers with the communities above, their authors, and institutions; with ``half`` only papers have features."""
    base, generator = plain(), torch.Generator().manual_seed(1)
    data = HeteroData()
    for name in ("x", "y", "train_mask", "val_mask"):
        data["paper"][name] = base[name]
    data["paper", "cites", "paper"].edge_index = base.edge_index
    papers = torch.arange(base.num_nodes)
    author = (papers % CLASSES) * 50 + torch.randint(50, papers.shape, generator=generator)
    data["author", "writes", "paper"].edge_index = torch.stack([author, papers])
    data["author", "in", "institution"].edge_index = torch.stack(
        [torch.arange(200), torch.randint(10, (200,), generator=generator)]
    )
    if half:
        data["paper"].x = data["paper"].x.half()
        data["author"].num_nodes, data["institution"].num_nodes = 200, 10
    else:
        data["author"].x, data["institution"].x = (torch.randn(size, WIDTH, generator=generator) for size in (200, 10))
    return T.ToUndirected()(data)


def ratings() -> HeteroData:
    """Users who rate items of their own taste, with times."""
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    data["user"].x, data["item"].x = F.one_hot(torch.arange(120) % 6).float(), F.one_hot(torch.arange(90) % 6).float()
    user = torch.randint(120, (2500,), generator=generator)
    item = (user + 6 * torch.randint(15, (2500,), generator=generator)) % 6 + 6 * torch.randint(
        15, (2500,), generator=generator
    )
    data["user", "rates", "item"].edge_index = torch.stack([user, item])
    data["user", "rates", "item"].time = torch.randperm(2500, generator=generator)
    data["user", "rates", "item"].edge_label = 1.0 + (user % 2)
    data = T.ToUndirected()(data)
    del data["item", "rev_rates", "user"].edge_label
    return data


def fit(model: torch.nn.Module, loader: Any, loss_of: Callable, epochs: int = 3, lr: float = 0.01) -> dict[str, Any]:
    """Number of steps, and the mean loss of the first and of the last epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    means, steps = [], 0
    for _ in range(epochs):
        model.train()
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            total += float(loss)
            steps += 1
        means.append(total / len(loader))
    return {"steps": steps, "first": means[0], "last": means[-1]}


class Running(torch.nn.Module):
    """Module for DistributedDataParallel that calls ``run`` on a batch; ``run`` uses the modules in ``parts``."""

    def __init__(self, parts: torch.nn.Module, run: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.parts, self.run = parts, run

    def forward(self, batch: Any) -> Tensor:
        return self.run(batch)


@dataclass(frozen=True)
class Ranks:
    """Processes that run an example together; one by default.

    Attributes:
        rank, size: number of this process, and number of processes.
        num_workers: ``num_workers`` of each loader.
    """

    rank: int = 0
    size: int = 1
    num_workers: int = 2

    def share(self, ids: Tensor) -> Tensor:
        """Share of the ids for this rank; all ranks have equally many."""
        return ids.split(ids.size(-1) // self.size, -1)[self.rank].clone()

    def averaged(self, parts: torch.nn.Module, run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """``run``, with gradients of ``parts`` averaged over all ranks."""
        if self.size == 1:
            return run
        return DistributedDataParallel(Running(parts, run), find_unused_parameters=True)


ALONE = Ranks()


@torch.no_grad()
def accuracy(loader: Any, predict: Callable[[Any], tuple[Tensor, Tensor]]) -> float:
    right = total = 0
    for batch in loader:
        out, y = predict(batch)
        right, total = right + int((out.argmax(-1) == y).sum()), total + y.numel()
    return right / total


# --- examples ---------------------------------------------------------------------------------------------


def nodes_with_inference_by_layers(loaders: Any, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Trains on samples, then evaluates layer by layer on the first rank while the others wait.

    The loader of the evaluation loses the features of its data after it was made.
    """
    data = plain()
    train = loaders.NeighborLoader(
        data,
        input_nodes=ranks.share(data.train_mask.nonzero().view(-1)),
        num_neighbors=[10, 5],
        batch_size=128 // ranks.size,
        shuffle=True,
        num_workers=min(1, ranks.num_workers),
        persistent_workers=ranks.num_workers > 0,
    )
    if ranks.rank == 0:
        whole = loaders.NeighborLoader(
            copy.copy(data), input_nodes=None, num_neighbors=[-1], shuffle=False, batch_size=256
        )
        del whole.data.x, whole.data.y
        whole.data.num_nodes = data.num_nodes
        whole.data.n_id = torch.arange(data.num_nodes)
    convs = torch.nn.ModuleList([SAGEConv(WIDTH, 32), SAGEConv(32, CLASSES)])

    def at_once(batch: Data) -> Tensor:
        return convs[1](convs[0](batch.x, batch.edge_index).relu(), batch.edge_index)

    averaged = ranks.averaged(convs, at_once)
    found = fit(
        convs, train, lambda b: F.cross_entropy(averaged(b)[: b.batch_size], b.y[: b.batch_size]), epochs=2 + ranks.size
    )
    score = torch.zeros(())
    if ranks.rank == 0:
        with torch.no_grad():
            x_all = data.x
            for i, conv in enumerate(convs):
                outs = []
                for batch in whole:
                    out = conv(x_all[batch.n_id], batch.edge_index)
                    outs.append((out.relu() if i == 0 else out)[: batch.batch_size])
                x_all = torch.cat(outs)
            assert torch.allclose(x_all, at_once(data), atol=1e-4), (
                "with all neighbours, the result is the whole graph's"
            )
        score = (x_all.argmax(1) == data.y)[data.test_mask].float().mean()
    if ranks.size > 1:
        dist.broadcast(score, 0)
    return {**found, "score": float(score)}


def labels_as_numbers_and_accuracy_over_ranks(loaders: Any, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Labels are floats [N, 1], edges have one direction, and torchmetrics counts accuracy over the batches of all ranks."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics, which comes with Lightning")
    data = plain()
    data.edge_index = data.edge_index[:, ::2].contiguous()
    data.y = data.y.float().view(-1, 1)
    split = {name: ranks.share(data[f"{name}_mask"].nonzero().view(-1)) for name in ("train", "test")}
    make = functools.partial(
        loaders.NeighborLoader,
        data=data,
        num_neighbors=[10, 10],
        batch_size=128 // ranks.size,
        num_workers=ranks.num_workers,
    )
    model = GCN(WIDTH, 32, 2, CLASSES)
    averaged = ranks.averaged(model, lambda batch: model(batch.x, batch.edge_index))

    def predict(batch: Data) -> tuple[Tensor, Tensor]:
        size = batch.num_sampled_nodes[0]
        return averaged(batch)[:size], batch.y[:size].reshape(-1).to(torch.long)

    found = fit(
        model,
        make(input_nodes=split["train"], shuffle=True, drop_last=True),
        lambda batch: F.cross_entropy(*predict(batch)),
        epochs=6,
    )
    counted = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
    with torch.no_grad():
        for batch in make(input_nodes=split["test"]):
            counted.update(*predict(batch))
    assert int(counted.tp + counted.fn) == split["test"].numel(), "each test seed must be counted once"
    return {**found, "score": float(counted.compute())}


def attention_with_labels_in_a_column(loaders: Any) -> dict[str, Any]:
    """Labels are [N, 1] and splits are ids, as in OGB; num_sampled_nodes gives the number of seeds."""
    data = plain()
    data.y = data.y.view(-1, 1)
    split = {name: data[f"{name}_mask"].nonzero().flatten() for name in ("train", "test")}
    make = functools.partial(loaders.NeighborLoader, data, num_neighbors=[5, 5], batch_size=128, shuffle=True)
    model = GAT(WIDTH, 8, 2, CLASSES, heads=2)
    found = fit(
        model,
        make(input_nodes=split["train"]),
        lambda b: F.cross_entropy(
            model(b.x, b.edge_index)[: b.batch_size], b.y[: b.batch_size].squeeze().to(torch.long)
        ),
    )
    model.eval()

    def predict(batch: Data) -> tuple[Tensor, Tensor]:
        size = batch.num_sampled_nodes[0]
        return model(batch.x, batch.edge_index)[:size], batch.y[:size].view(-1)

    return {**found, "score": accuracy(make(input_nodes=split["test"]), predict)}


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.lin = SAGEConv((-1, -1), 32), SAGEConv((-1, -1), 32), Linear(-1, CLASSES)

    def forward(self, x, edge_index):
        return self.lin(self.conv2(self.conv1(x, edge_index).relu(), edge_index).relu())


def on_papers(
    loaders: Any, data: HeteroData, model: torch.nn.Module, run: Callable[[HeteroData], Tensor], **options: Any
) -> dict[str, Any]:
    make = functools.partial(loaders.NeighborLoader, data, num_neighbors=[8, 4], batch_size=128, **options)
    train = make(input_nodes=("paper", data["paper"].train_mask), shuffle=True)
    with torch.no_grad():
        run(next(iter(train)).to("cpu", "edge_index"))  # initialises lazy parameters

    def predict(batch: HeteroData) -> tuple[Tensor, Tensor]:
        size = batch["paper"].batch_size
        return run(batch)[:size], batch["paper"].y[:size]

    found = fit(model, train, lambda batch: F.cross_entropy(*predict(batch)))
    return {**found, "score": accuracy(make(input_nodes=("paper", data["paper"].val_mask)), predict)}


def a_model_for_each_type(loaders: Any) -> dict[str, Any]:
    data = typed()
    model = to_hetero(Layers(), data.metadata(), aggr="sum")
    return on_papers(
        loaders,
        data,
        model,
        lambda batch: model(batch.x_dict, batch.edge_index_dict)["paper"],
        num_workers=2,
        persistent_workers=True,
    )


def transformer_of_types(loaders: Any) -> dict[str, Any]:
    data = typed()
    model = torch.nn.ModuleList(
        [HGTConv(WIDTH, 32, data.metadata(), heads=2), HGTConv(32, 32, data.metadata(), heads=2), Linear(32, CLASSES)]
    )

    def run(batch: HeteroData) -> Tensor:
        return model[2](model[1](model[0](batch.x_dict, batch.edge_index_dict), batch.edge_index_dict)["paper"])

    return on_papers(loaders, data, model, run)


def layers_that_shrink(loaders: Any, sparse: bool = False) -> dict[str, Any]:
    """Each layer drops the vertices and edges that were sampled last."""
    data = T.ToSparseTensor()(typed()) if sparse else typed()
    model = torch.nn.ModuleList(
        [HeteroConv({kind: SAGEConv((-1, -1), 32) for kind in data.edge_types}, aggr="sum") for _ in range(2)]
        + [Linear(32, CLASSES)]
    )

    def run(batch: HeteroData) -> Tensor:
        x, edges = batch.x_dict, batch.adj_t_dict if sparse else batch.edge_index_dict
        for i in range(2):
            x, edges, _ = trim_to_layer(i, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
            x = {name: value.relu() for name, value in model[i](x, edges).items()}
        return model[2](x["paper"])

    return on_papers(loaders, data, model, run)


def layers_that_shrink_sparse(loaders: Any) -> dict[str, Any]:
    pytest.importorskip("torch_sparse")
    return layers_that_shrink(loaders, sparse=True)


def half_precision_and_types_without_features(loaders: Any, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Features are float16 and training uses 32 bits; masks and years are deleted before the loaders are made."""
    data = typed(half=True)
    masks = {name: data["paper"].pop(name) for name in ("train_mask", "val_mask")}
    from_papers = {kind: SAGEConv(WIDTH, WIDTH) for kind in data.edge_types if kind[0] == "paper"}
    model = torch.nn.ModuleList(
        [
            HeteroConv(from_papers),
            HeteroConv({kind: SAGEConv(WIDTH, CLASSES) for kind in data.edge_types if kind[0] != "institution"}),
        ]
    )
    make = functools.partial(
        loaders.NeighborLoader,
        data,
        num_neighbors=[8, 4],
        batch_size=100 // ranks.size,
        drop_last=True,
        num_workers=ranks.num_workers,
        persistent_workers=ranks.num_workers > 0,
    )

    def run(batch: HeteroData) -> Tensor:
        edges = batch.collect("edge_index")
        out = model[1]({name: value.relu() for name, value in model[0](batch.collect("x"), edges).items()}, edges)
        return out["paper"][: batch["paper"].batch_size]

    averaged = ranks.averaged(model, run)

    def predict(batch: HeteroData) -> tuple[Tensor, Tensor]:
        assert batch["paper"].x.dtype == torch.float16
        batch = batch.to("cpu", "x", "y", "edge_index")
        batch["paper"].x = batch["paper"].x.to(torch.float32)
        return averaged(batch), batch["paper"].y[: batch["paper"].batch_size]

    seeds = {name: ("paper", ranks.share(mask.nonzero().view(-1))) for name, mask in masks.items()}
    found = fit(
        model, make(input_nodes=seeds["train_mask"], shuffle=True), lambda batch: F.cross_entropy(*predict(batch))
    )
    return {**found, "score": accuracy(make(input_nodes=seeds["val_mask"]), predict)}


def mixed_precision(loaders: Any) -> dict[str, Any]:
    data = plain()
    model = GraphSAGE(WIDTH, 32, 2, CLASSES)
    make = functools.partial(loaders.NeighborLoader, data, [10, 5], batch_size=128)

    def predict(batch: Data) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]

    found = fit(model, make(input_nodes=data.train_mask, shuffle=True), lambda batch: F.cross_entropy(*predict(batch)))
    return {**found, "score": accuracy(make(input_nodes=data.test_mask), predict)}


def unsupervised(loaders: Any) -> dict[str, Any]:
    """Edges are trained against random pairs; the nearest class mean then classifies the embeddings."""
    data = plain()
    loader = loaders.LinkNeighborLoader(
        data, batch_size=512, shuffle=True, neg_sampling_ratio=1.0, num_neighbors=[10, 10]
    )
    model = GraphSAGE(WIDTH, 32, 2)

    def loss_of(batch: Data) -> Tensor:
        h = model(batch.x, batch.edge_index)
        score = (h[batch.edge_label_index[0]] * h[batch.edge_label_index[1]]).sum(dim=-1)
        return F.binary_cross_entropy_with_logits(score, batch.edge_label)

    found = fit(model, loader, loss_of)
    with torch.no_grad():
        z = F.normalize(model(data.x, data.edge_index))
    means = torch.stack([z[data.train_mask & (data.y == c)].mean(0) for c in range(CLASSES)])
    return {**found, "score": float(((z @ F.normalize(means).t()).argmax(1) == data.y)[data.test_mask].float().mean())}


def triplets(loaders: Any) -> dict[str, Any]:
    data = plain()
    loader = loaders.LinkNeighborLoader(
        data, [10, 5], data.edge_index[:, :4000], batch_size=512, shuffle=True, neg_sampling="triplet"
    )
    model = GraphSAGE(WIDTH, 32, 2)

    def loss_of(batch: Data) -> Tensor:
        h = model(batch.x, batch.edge_index)
        nearer, further = (
            (h[batch.src_index] * h[other]).sum(-1) for other in (batch.dst_pos_index, batch.dst_neg_index)
        )
        return F.softplus(further - nearer).mean()

    found = fit(model, loader, loss_of)
    return {**found, "score": 1.0 - found["last"]}


def recommender(loaders: Any) -> dict[str, Any]:
    """Links between types, split by a transform; validation has given negatives with labels."""
    data = ratings()
    for kind in (("user", "rates", "item"), ("item", "rev_rates", "user")):
        del data[kind].time
    del data["user", "rates", "item"].edge_label
    torch.manual_seed(1)
    split = T.RandomLinkSplit(
        0.1,
        0.1,
        neg_sampling_ratio=1.0,
        add_negative_train_samples=False,
        edge_types=[("user", "rates", "item")],
        rev_edge_types=[("item", "rev_rates", "user")],
    )
    train_data, val_data, _ = split(data)
    kind = ("user", "rates", "item")
    train = loaders.LinkNeighborLoader(
        train_data, [8, 4], kind, neg_sampling="binary", batch_size=256, shuffle=True, num_workers=2, drop_last=True
    )
    val = loaders.LinkNeighborLoader(
        val_data, [8, 4], (kind, val_data[kind].edge_label_index), edge_label=val_data[kind].edge_label, batch_size=256
    )
    model = torch.nn.ModuleList(
        [
            to_hetero(Layers(), data.metadata()),
            torch.nn.Sequential(torch.nn.Linear(2 * CLASSES, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)),
        ]
    )

    def score_of(batch: HeteroData) -> Tensor:
        z = model[0](batch.x_dict, batch.edge_index_dict)
        row, col = batch[kind].edge_label_index
        return model[1](torch.cat([z["user"][row], z["item"][col]], dim=-1)).view(-1)

    with torch.no_grad():
        score_of(next(iter(train)))
    found = fit(
        model,
        train,
        lambda batch: F.binary_cross_entropy_with_logits(score_of(batch), batch[kind].edge_label),
        epochs=5,
        lr=0.02,
    )
    return {
        **found,
        "score": accuracy(
            val, lambda batch: (torch.stack([-score_of(batch), score_of(batch)], 1), batch[kind].edge_label.long())
        ),
    }


def links_in_time(loaders: Any) -> dict[str, Any]:
    """Ratings are predicted from earlier ones."""
    data = ratings()
    kind = ("user", "rates", "item")
    order = data[kind].time.argsort()
    parts = {"train": order[:2000], "test": order[2000:]}
    make = functools.partial(
        loaders.LinkNeighborLoader,
        data=data,
        num_neighbors=[5, 5],
        batch_size=100,
        time_attr="time",
        temporal_strategy="last",
    )
    made = {
        name: make(
            edge_label_index=(kind, data[kind].edge_index[:, ids]),
            edge_label=data[kind].edge_label[ids],
            edge_label_time=data[kind].time[ids] - 1,
            shuffle=name == "train",
        )
        for name, ids in parts.items()
    }
    model = torch.nn.ModuleList([to_hetero(Layers(), data.metadata()), torch.nn.Linear(2 * CLASSES, 1)])

    def rating(batch: HeteroData) -> Tensor:
        times = batch[kind].time
        assert (times <= batch[kind].edge_label_time.max()).all()
        z = model[0](batch.x_dict, batch.edge_index_dict)
        row, col = batch[kind].edge_label_index
        return model[1](torch.cat([z["user"][row], z["item"][col]], dim=-1)).view(-1)

    with torch.no_grad():
        rating(next(iter(made["train"])))
    found = fit(model, made["train"], lambda batch: F.mse_loss(rating(batch), batch[kind].edge_label), epochs=6)
    return {
        **found,
        "score": accuracy(
            made["test"],
            lambda batch: (
                torch.stack([1.5 - rating(batch), rating(batch) - 1.5], 1),
                (batch[kind].edge_label > 1.5).long(),
            ),
        ),
    }


def relations_as_an_edge_attribute(loaders: Any) -> dict[str, Any]:
    data = plain()
    data.edge_type = (data.y[data.edge_index[0]] == data.y[data.edge_index[1]]).long()
    make = functools.partial(loaders.NeighborLoader, data, [10, 5], batch_size=128)
    model = torch.nn.ModuleList([FastRGCNConv(WIDTH, 32, 2), FastRGCNConv(32, CLASSES, 2)])

    def predict(batch: Data) -> tuple[Tensor, Tensor]:
        assert torch.equal(batch.edge_type, data.edge_type[batch.e_id])
        out = model[1](model[0](batch.x, batch.edge_index, batch.edge_type).relu(), batch.edge_index, batch.edge_type)
        return out[: batch.batch_size], batch.y[: batch.batch_size]

    found = fit(model, make(input_nodes=data.train_mask, shuffle=True), lambda batch: F.cross_entropy(*predict(batch)))
    return {**found, "score": accuracy(make(input_nodes=data.test_mask), predict)}


def zeros_where_a_type_has_no_features(loaders: Any) -> dict[str, Any]:
    """Papers have float16 rows; a vertex type without features gets zeros, one row per id of the batch.

    The training loop leaves each epoch after five steps, and the evaluation is shuffled.
    """
    data = typed(half=True)
    convs = to_hetero(Layers(), data.metadata(), aggr="sum")
    make = functools.partial(
        loaders.NeighborLoader,
        data,
        num_neighbors=[8, 4],
        batch_size=64,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
    )
    train = make(input_nodes=("paper", data["paper"].train_mask.nonzero(as_tuple=False).view(-1)))
    test = make(input_nodes=("paper", data["paper"].val_mask.nonzero(as_tuple=False).view(-1)))

    def predict(batch: HeteroData) -> tuple[Tensor, Tensor]:
        batch = batch.to("cpu", "x", "y", "edge_index")
        for kind in batch.node_types:
            if kind not in batch.x_dict:
                like = batch["paper"].x
                batch[kind].x = torch.zeros(batch[kind].n_id.numel(), like.size(-1), dtype=like.dtype)
        size = batch["paper"].batch_size
        x = {kind: value.float() for kind, value in batch.x_dict.items()}
        return convs(x, batch.edge_index_dict)["paper"][:size], batch["paper"].y[:size].to(torch.long)

    with torch.no_grad():
        predict(next(iter(train)))
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        for step, batch in enumerate(train):
            if step >= 5:
                break
            optimizer.zero_grad()
            losses.append(F.cross_entropy(*predict(batch)))
            losses[-1].backward()
            optimizer.step()
    return {
        "steps": len(losses),
        "first": float(losses[0]),
        "last": float(losses[-1]),
        "score": accuracy(test, predict),
    }


def types_made_one(loaders: Any) -> dict[str, Any]:
    """Types and relations become columns of one graph, in which the seeds of a type are a range of ids."""
    data = typed()
    graph = data.to_homogeneous(add_node_type=True, add_edge_type=True)
    papers = graph.node_type == data.node_types.index("paper")
    assert torch.equal(graph.x[papers], data["paper"].x)
    model = torch.nn.ModuleList(
        [FastRGCNConv(WIDTH, 32, len(data.edge_types)), FastRGCNConv(32, CLASSES, len(data.edge_types))]
    )

    def predict(batch: Data) -> tuple[Tensor, Tensor]:
        assert (batch.node_type[: batch.batch_size] == data.node_types.index("paper")).all()
        out = model[1](model[0](batch.x, batch.edge_index, batch.edge_type).relu(), batch.edge_index, batch.edge_type)
        return out[: batch.batch_size], batch.y[: batch.batch_size]

    make = functools.partial(loaders.NeighborLoader, graph, [10, 5], batch_size=128)
    ids = papers.nonzero().view(-1)
    found = fit(
        model,
        make(input_nodes=ids[data["paper"].train_mask], shuffle=True),
        lambda batch: F.cross_entropy(*predict(batch)),
    )
    return {**found, "score": accuracy(make(input_nodes=ids[data["paper"].val_mask]), predict)}


def types_layer_by_layer(loaders: Any) -> dict[str, Any]:
    """Trains with fanouts per relation, then computes features of all types layer by layer from all neighbours."""
    data = typed()
    convs = torch.nn.ModuleList(
        [HeteroConv({kind: SAGEConv((-1, -1), 32) for kind in data.edge_types}, aggr="sum") for _ in range(2)]
        + [Linear(32, CLASSES)]
    )

    def layer(i: int, x: dict[str, Tensor], edges: dict) -> dict[str, Tensor]:
        return {kind: out.relu() for kind, out in convs[i](x, edges).items()}

    def whole(x: dict[str, Tensor], edges: dict) -> Tensor:
        return convs[2](layer(1, layer(0, x, edges), edges)["paper"])

    with torch.no_grad():
        whole(data.x_dict, data.edge_index_dict)
    train = loaders.NeighborLoader(
        data,
        num_neighbors={kind: [6, 3] if kind[0] == "paper" else [3, 2] for kind in data.edge_types},
        input_nodes=("paper", data["paper"].train_mask),
        batch_size=128,
        shuffle=True,
    )

    def loss_of(batch: HeteroData) -> Tensor:
        size = batch["paper"].batch_size
        return F.cross_entropy(whole(batch.x_dict, batch.edge_index_dict)[:size], batch["paper"].y[:size])

    found = fit(convs, train, loss_of)
    x = data.x_dict
    with torch.no_grad():
        for i in range(2):
            outs = {}
            for kind in data.node_types:
                loader = loaders.NeighborLoader(data, num_neighbors=[-1], input_nodes=kind, batch_size=200)
                outs[kind] = torch.cat(
                    [
                        layer(i, {name: x[name][batch[name].n_id] for name in batch.node_types}, batch.edge_index_dict)[
                            kind
                        ][: batch[kind].batch_size]
                        for batch in loader
                    ]
                )
            x = outs
        out = convs[2](x["paper"])
        assert torch.allclose(out, whole(data.x_dict, data.edge_index_dict), atol=1e-4), (
            "the result differs from that on the whole graph"
        )
    return {**found, "score": float((out.argmax(1) == data["paper"].y)[data["paper"].val_mask].float().mean())}


def a_model_that_skips_unneeded_rows(loaders: Any) -> dict[str, Any]:
    """PyG's models use the sizes of the hops to skip rows, which changes no seed's result."""
    data = plain()
    model = GraphSAGE(WIDTH, 32, 2, CLASSES)
    make = functools.partial(loaders.NeighborLoader, data, [10, 5], batch_size=128)

    def predict(batch: Data) -> tuple[Tensor, Tensor]:
        sizes = {
            "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges,
        }
        out = model(batch.x, batch.edge_index, **sizes)[: batch.batch_size]
        assert torch.allclose(out, model(batch.x, batch.edge_index)[: batch.batch_size], atol=1e-5)
        return out, batch.y[: batch.batch_size]

    found = fit(model, make(input_nodes=data.train_mask, shuffle=True), lambda batch: F.cross_entropy(*predict(batch)))
    return {**found, "score": accuracy(make(input_nodes=data.test_mask), predict)}


def unsupervised_on_several_graphs(loaders: Any) -> dict[str, Any]:
    """Edges of a `Batch` of graphs: positive edges stay within one graph, random negatives may join two."""
    graphs = [plain().subgraph(torch.arange(begin, begin + 400)) for begin in (0, 400, 800)]
    whole = Batch.from_data_list(graphs)
    loader = loaders.LinkNeighborLoader(
        whole, batch_size=256, shuffle=True, neg_sampling_ratio=1.0, num_neighbors=[10, 10], num_workers=2
    )
    model = GraphSAGE(WIDTH, 32, 2)

    def loss_of(batch: Data) -> Tensor:
        h = model(batch.x, batch.edge_index)
        first, second = batch.edge_label_index
        of = whole.batch[batch.n_id]
        assert (of[first] == of[second])[batch.edge_label == 1].all() and isinstance(batch, Batch)
        return F.binary_cross_entropy_with_logits((h[first] * h[second]).sum(dim=-1), batch.edge_label)

    found = fit(model, loader, loss_of)
    with torch.no_grad():
        z = F.normalize(model(whole.x, whole.edge_index))
    means = torch.stack([z[whole.train_mask & (whole.y == c)].mean(0) for c in range(CLASSES)])
    right = (z @ F.normalize(means).t()).argmax(1) == whole.y
    return {**found, "score": float(right[whole.test_mask].float().mean())}


def infomax(loaders: Any) -> dict[str, Any]:
    """Contrasts seeds with seeds whose features are shuffled, using a summary of the batch."""
    data = plain()

    class Seeds(GraphSAGE):
        def forward(self, x: Tensor, edge_index: Tensor, size: int) -> Tensor:
            return super().forward(x, edge_index)[:size]

    model = DeepGraphInfomax(
        32,
        Seeds(WIDTH, 32, 2),
        summary=lambda z, *args, **kwargs: torch.sigmoid(z.mean(dim=0)),
        corruption=lambda x, edge_index, size: (x[torch.randperm(x.size(0))], edge_index, size),
    )
    train = loaders.NeighborLoader(data, num_neighbors=[10, 5], batch_size=256, shuffle=True, num_workers=1)
    found = fit(model, train, lambda batch: model.loss(*model(batch.x, batch.edge_index, batch.batch_size)), epochs=6)
    test = loaders.NeighborLoader(data, num_neighbors=[10, 5], batch_size=256)
    with torch.no_grad():
        z = torch.cat([model.encoder(batch.x, batch.edge_index, batch.batch_size) for batch in test])
    score = model.test(z[data.train_mask], data.y[data.train_mask], z[data.test_mask], data.y[data.test_mask])
    return {**found, "score": score}


def embeddings_of_users_and_items(loaders: Any, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Ids serve as features, and `n_id` of the user's data is kept; a relation between items is added after the split."""
    data = ratings()
    there, back = ("user", "rates", "item"), ("item", "rev_rates", "user")
    for kind in (there, back):
        del data[kind].time
    del data[there].edge_label
    for kind in data.node_types:
        data[kind].n_id = data[kind].x = torch.arange(data[kind].num_nodes)
    torch.manual_seed(1)
    split = T.RandomLinkSplit(
        0.1, 0.1, neg_sampling_ratio=1.0, add_negative_train_samples=False, edge_types=[there], rev_edge_types=[back]
    )
    train_data, val_data, _ = split(data)
    user, item = train_data[there].edge_index
    seen = torch.zeros(120, 90)
    seen[user, item] = 1
    together = ((seen.t() @ seen).fill_diagonal_(0) >= 3).nonzero().t().contiguous()
    for part in (train_data, val_data):
        part["item", "item"].edge_index = together
    train = loaders.LinkNeighborLoader(
        data=train_data,
        num_neighbors=[8, 4],
        edge_label_index=(there, ranks.share(train_data[there].edge_label_index)),
        neg_sampling="binary",
        batch_size=256 // ranks.size,
        shuffle=True,
        num_workers=ranks.num_workers,
        drop_last=True,
    )
    val = loaders.LinkNeighborLoader(
        data=val_data,
        num_neighbors=[8, 4],
        edge_label_index=(there, val_data[there].edge_label_index),
        edge_label=val_data[there].edge_label,
        batch_size=256,
        shuffle=False,
    )
    model = torch.nn.ModuleDict(
        {
            "user": torch.nn.Embedding(120, 16),
            "item": torch.nn.Embedding(90, 16),
            "of_item": SAGEConv(16, 16),
            "of_user": SAGEConv((16, 16), 16),
            "last": torch.nn.Linear(32, 1),
        }
    )

    def score_of(batch: HeteroData) -> Tensor:
        for kind in ("user", "item"):
            assert torch.equal(batch[kind].x, batch[kind].n_id) and batch[kind].x.dtype == torch.int64
        users, items = model["user"](batch["user"].n_id), model["item"](batch["item"].x)
        edges = batch.edge_index_dict
        users = model["of_user"]((items, users), edges[back]).relu()
        items = model["of_item"](items, edges["item", "to", "item"]).relu()
        row, col = batch["user", "item"].edge_label_index
        return model["last"](torch.cat([users[row] * items[col], users[row]], dim=-1)).view(-1)

    averaged = ranks.averaged(model, score_of)
    found = fit(
        model,
        train,
        lambda batch: F.binary_cross_entropy_with_logits(averaged(batch), batch["user", "item"].edge_label),
        epochs=12,
        lr=0.02,
    )
    return {
        **found,
        "score": accuracy(
            val, lambda batch: (torch.stack([-score_of(batch), score_of(batch)], 1), batch[there].edge_label.long())
        ),
    }


#: Examples, each with the least score that it must reach.
EXAMPLES = {
    nodes_with_inference_by_layers: 0.8,
    labels_as_numbers_and_accuracy_over_ranks: 0.8,
    attention_with_labels_in_a_column: 0.7,
    a_model_for_each_type: 0.8,
    transformer_of_types: 0.8,
    layers_that_shrink: 0.8,
    layers_that_shrink_sparse: 0.8,
    half_precision_and_types_without_features: 0.6,
    mixed_precision: 0.8,
    unsupervised: 0.6,
    triplets: 0.3,
    recommender: 0.7,
    links_in_time: 0.7,
    relations_as_an_edge_attribute: 0.8,
    zeros_where_a_type_has_no_features: 0.6,
    types_made_one: 0.8,
    types_layer_by_layer: 0.8,
    a_model_that_skips_unneeded_rows: 0.8,
    unsupervised_on_several_graphs: 0.6,
    infomax: 0.6,
    embeddings_of_users_and_items: 0.7,
}


#: Examples that take long. Others use the same loaders in a similar way, or the same example runs on two ranks below.
LONG = {
    transformer_of_types,
    mixed_precision,
    links_in_time,
    types_layer_by_layer,
    layers_that_shrink_sparse,
    unsupervised,
    infomax,
    labels_as_numbers_and_accuracy_over_ranks,
    embeddings_of_users_and_items,
}


@pytest.mark.parametrize(
    "example",
    [pytest.param(example, marks=[pytest.mark.rare] * (example in LONG)) for example in EXAMPLES],
    ids=lambda example: example.__name__,
)
def test_an_example_runs_with_another_import_and_learns_as_much(example, monkeypatch):
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)  # some builds of pyg-lib lack it
    found = {}
    for name, loaders in {"ours": salientpp, "pyg": PYG}.items():
        if name == "pyg":
            pytest.importorskip("pyg_lib")
        torch.manual_seed(3)
        found[name] = example(loaders)
        print(example.__name__, name, found[name])
        assert found[name]["last"] < found[name]["first"], f"{name} did not learn"
        assert found[name]["score"] > EXAMPLES[example], name
    ours, theirs = found["ours"], found["pyg"]
    assert ours["steps"] == theirs["steps"]
    assert abs(ours["score"] - theirs["score"]) < 0.12


def ddp_on_rank(rank: int, ours: bool) -> tuple[int, float, list[float]]:
    data = plain()
    loaders = salientpp if ours else PYG
    train = data.train_mask.nonzero().view(-1)
    train = train.split(train.size(0) // 2)[rank]
    loader = loaders.NeighborLoader(
        data, input_nodes=train, num_neighbors=[10, 5], batch_size=64, shuffle=True, drop_last=True
    )
    torch.manual_seed(12345)
    model = DistributedDataParallel(GraphSAGE(WIDTH, 32, 2, CLASSES))
    found = fit(model, loader, lambda b: F.cross_entropy(model(b.x, b.edge_index)[: b.batch_size], b.y[: b.batch_size]))
    test = loaders.NeighborLoader(data, input_nodes=data.test_mask, num_neighbors=[10, 5], batch_size=64)
    score = torch.tensor(
        accuracy(test, lambda b: (model.module(b.x, b.edge_index)[: b.batch_size], b.y[: b.batch_size]))
    )
    dist.all_reduce(score)
    return found["steps"], float(score) / 2, model.module.convs[0].lin_l.weight[0].tolist()


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "pyg"])
def test_ranks_that_split_the_ids_themselves_train_together(ours):
    if not ours:
        pytest.importorskip("pyg_lib")
    first, second = distributed.run(ddp_on_rank, 2, ours, seconds=180)
    assert first == second and first[0] == 3 * 4 and first[1] > 0.8


def example_on_rank(rank: int, example: Callable) -> dict[str, dict[str, Any]]:
    found = {}
    for name, loaders in {"ours": salientpp, "pyg": PYG}.items():
        torch.manual_seed(3)
        found[name] = example(loaders, Ranks(rank, 2, num_workers=0))
        score = torch.tensor(found[name]["score"])
        dist.all_reduce(score)
        found[name]["score"] = float(score) / 2
    return found


@pytest.mark.parametrize(
    "example",
    [
        nodes_with_inference_by_layers,
        labels_as_numbers_and_accuracy_over_ranks,
        embeddings_of_users_and_items,
        half_precision_and_types_without_features,
    ],
)
def test_ranks_that_share_the_seeds_of_an_example_learn_as_much(example):
    pytest.importorskip("pyg_lib")
    for found in distributed.run(example_on_rank, 2, example, seconds=240):
        print(example.__name__, found)
        assert all(each["last"] < each["first"] and each["score"] > EXAMPLES[example] for each in found.values())
        assert found["ours"]["steps"] == found["pyg"]["steps"]
        assert abs(found["ours"]["score"] - found["pyg"]["score"]) < 0.12


# --- PyG's tools for loaders ------------------------------------------------------------------------------


def test_loaders_are_instances_of_pygs_loaders():
    data = plain()
    assert isinstance(salientpp.NeighborLoader(data, [2]), torch_geometric.loader.NeighborLoader)
    assert isinstance(salientpp.LinkNeighborLoader(data, [2]), torch_geometric.loader.LinkNeighborLoader)


@pytest.mark.parametrize("cache", [False, True])
def test_layerwise_inference_of_pygs_models_is_exact(cache):
    data = plain()
    model = GraphSAGE(WIDTH, 32, 3, CLASSES).eval()
    loader = salientpp.NeighborLoader(data, [-1], batch_size=256, num_workers=1)
    assert torch.allclose(model.inference(loader, cache=cache), model(data.x, data.edge_index), atol=1e-4)


def test_loaders_work_in_prefetching_and_caching_loaders():
    loader = salientpp.NeighborLoader(plain(), [3], batch_size=300, seed=1)
    expected = [batch.n_id.tolist() for batch in loader]
    loader.set_epoch(0)
    prefetching = torch_geometric.loader.PrefetchLoader(loader)
    assert len(prefetching) == 4 and [batch.n_id.tolist() for batch in prefetching] == expected
    cached = torch_geometric.loader.CachedLoader(loader)
    passes = [[batch.n_id.tolist() for batch in cached] for _ in range(2)]
    assert len(passes[0]) == 4 and passes[0] == passes[1], "the second pass must repeat the first"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_can_be_zipped(num_workers):
    data = plain()
    pair = [
        salientpp.NeighborLoader(data, [3], torch.arange(400, 500)),
        salientpp.NeighborLoader(data, [2, 2], torch.arange(500, 700)),
    ]
    seen = []
    for first, second in torch_geometric.loader.ZipLoader(pair, batch_size=40, num_workers=num_workers):
        assert torch.equal(first.x, data.x[first.n_id]) and torch.equal(second.x, data.x[second.n_id])
        assert len(second.num_sampled_nodes) == 3
        seen += (first.n_id[: first.batch_size] - 400).tolist()
        assert torch.equal(first.n_id[: first.batch_size] + 100, second.n_id[: second.batch_size])
    assert seen == list(range(100))


def test_explainers_work_on_a_batch():
    data = plain()
    model = GraphSAGE(WIDTH, 16, 2, CLASSES).eval()
    how = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        model,
        GNNExplainer(epochs=5),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config=how,
    )
    batch = next(iter(salientpp.NeighborLoader(data, [-1, -1], torch.tensor([7]))))
    explanation = explainer(batch.x, batch.edge_index, index=0)
    assert explanation.edge_mask.numel() == batch.num_edges and explanation.node_mask.shape == batch.x.shape
    whole = model(data.x, data.edge_index)[7]
    assert torch.allclose(explainer.get_prediction(batch.x, batch.edge_index)[0], whole, atol=1e-5), (
        "the prediction differs from that on the whole graph"
    )
