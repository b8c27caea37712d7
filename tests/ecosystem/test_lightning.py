"""Lightning's data modules behave as PyG's do, on one process and on ranks, and a stopped run resumes bit for bit."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import distributed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from communities import CLASSES, WIDTH, plain
from graphs import random_data
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE, HeteroConv, SAGEConv

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.lightning import FollowingLoader, LightningLinkData, LightningNodeData

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install salientpp[lightning]")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch_geometric.data.lightning import LightningLinkData as PygLinkData  # noqa: E402
from torch_geometric.data.lightning import LightningNodeData as PygNodeData  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]


def graph(num_vertices: int = 120) -> Data:
    data = random_data(num_vertices, 900)
    data.x = torch.randn(num_vertices, 8, generator=torch.Generator().manual_seed(1))
    data.y = torch.arange(num_vertices) % 3
    order = torch.randperm(num_vertices, generator=torch.Generator().manual_seed(2))
    for name, chosen in (("train", order[:50]), ("val", order[50:80]), ("test", order[80:100])):
        data[f"{name}_mask"] = torch.zeros(num_vertices, dtype=torch.bool).scatter(0, chosen, True)
    return data


def typed() -> HeteroData:
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(60, 8, generator=generator), torch.randn(40, 8, generator=generator)
    data["user"].y = torch.arange(60) % 3
    data["user"].train_mask = torch.arange(60) < 30
    data["user"].val_mask = torch.arange(60) >= 40
    edges = torch.stack(
        [torch.randint(60, (300,), generator=generator), torch.randint(40, (300,), generator=generator)]
    )
    data["user", "buys", "item"].edge_index, data["item", "bought", "user"].edge_index = edges, edges.flip(0)
    return data


class Homogeneous(lightning.LightningModule):
    """GraphSAGE of two layers that records its batches."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gnn = GraphSAGE(8, 8, 2, 3)
        self.seen: list[tuple] = []
        self.batches: list = []

    def loss(self, batch) -> torch.Tensor:
        return F.cross_entropy(self.gnn(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])

    def note(self, kind: str, index: int, batch) -> None:
        ids = (
            batch.n_id
            if isinstance(batch, Data)
            else torch.cat([store.n_id for store in batch.node_stores if "n_id" in store])
        )
        self.seen.append((kind, self.current_epoch, index, ids.tolist()))
        self.batches.append(batch)

    def training_step(self, batch, index):
        self.note("train", index, batch)
        return self.loss(batch)

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.note("val", index, batch)
        self.log("loss", self.loss(batch), batch_size=1)

    def test_step(self, batch, index):
        self.note("test", index, batch)

    def predict_step(self, batch, index):
        return batch.n_id[: batch.batch_size]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def of(self, kind: str) -> list[tuple]:
        return [entry[1:] for entry in self.seen if entry[0] == kind]


class Typed(Homogeneous):
    def __init__(self) -> None:
        super().__init__()
        kinds = (("user", "buys", "item"), ("item", "bought", "user"))
        self.conv = HeteroConv({kind: SAGEConv(8, 3) for kind in kinds})

    def loss(self, batch):
        out = self.conv(batch.x_dict, batch.edge_index_dict)["user"]
        return F.cross_entropy(out[: batch["user"].batch_size], batch["user"].y[: batch["user"].batch_size])


class Links(Homogeneous):
    def loss(self, batch):
        out = self.gnn(batch.x, batch.edge_index)
        score = (out[batch.edge_label_index[0]] * out[batch.edge_label_index[1]]).sum(-1)
        return F.binary_cross_entropy_with_logits(score, batch.edge_label.float())


def trainer(root, **options) -> lightning.Trainer:
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    return lightning.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=root, **options
    )


def shape_of(batch) -> list:
    """Names and types of all attributes of a batch, without their values."""
    return [
        (
            store._key,
            name,
            type(value).__name__,
            getattr(value, "dtype", None),
            value.dim() if isinstance(value, torch.Tensor) else 0,
        )
        for store in batch.stores
        for name, value in sorted(store.items())
    ]


# --- one process: the same as with PyG --------------------------------------------------------------------


@pytest.mark.parametrize("ours, theirs", [(LightningNodeData, PygNodeData), (LightningLinkData, PygLinkData)])
def test_data_modules_take_the_arguments_of_pygs(ours, theirs):
    of = [{p.name: p.default for p in inspect.signature(class_).parameters.values()} for class_ in (ours, theirs)]
    assert of[0] == of[1] and list(of[0]) == list(of[1])
    hooks = [name for name in vars(theirs) if name.endswith("dataloader")]
    assert hooks and all(callable(getattr(ours, name)) for name in hooks)


def run_of(module, model, root) -> tuple:
    runner = trainer(root)
    runner.fit(model, module)
    steps = runner.global_step
    runner.test(model, module, verbose=False)
    kinds = {
        kind: [len(entry[-1]) > 0 for entry in model.seen if entry[0] == kind] for kind in ("train", "val", "test")
    }
    return steps, {kind: len(found) for kind, found in kinds.items()}, [shape_of(batch) for batch in model.batches]


def test_training_on_data_is_the_same_as_with_pyg(tmp_path):
    pytest.importorskip("pyg_lib")
    runs = [
        run_of(
            class_(graph(), num_neighbors=[3, 2], batch_size=16, eval_loader_kwargs={"batch_size": 7}),
            Homogeneous(),
            tmp_path,
        )
        for class_ in (LightningNodeData, PygNodeData)
    ]
    assert runs[0] == runs[1]
    assert runs[0][:2] == (8, {"train": 8, "val": 10, "test": 3})


class Scored(Homogeneous):
    """Trains with dropout and batch normalisation; in validation and tests, logs the accuracy over all seeds."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        self.gnn = GraphSAGE(width, 32, 2, classes, dropout=0.5, norm=torch.nn.BatchNorm1d(32))
        self.right = torch.nn.ModuleDict(
            {kind: torchmetrics.Accuracy(task="multiclass", num_classes=classes) for kind in ("val", "test")}
        )

    def training_step(self, batch, index):
        return self.loss(batch)

    def score(self, kind: str, batch) -> None:
        size = batch.batch_size
        self.right[kind](self.gnn(batch.x, batch.edge_index)[:size], batch.y[:size])
        self.log(kind, self.right[kind], on_step=False, on_epoch=True, batch_size=size)

    def validation_step(self, batch, index):
        self.score("val", batch)

    def test_step(self, batch, index):
        self.score("test", batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_the_best_checkpoint_is_as_good_as_with_pyg(tmp_path):
    pytest.importorskip("pyg_lib")
    data, scores = plain(), {}
    for name, class_ in {"ours": LightningNodeData, "pyg": PygNodeData}.items():
        torch.manual_seed(3)
        best = ModelCheckpoint(tmp_path / name, monitor="val", mode="max")
        runner = trainer(tmp_path, max_epochs=3, callbacks=[best], enable_checkpointing=True)
        module = class_(data, num_neighbors=[10, 5], batch_size=128)
        runner.fit(Scored(WIDTH, CLASSES), module)
        (found,) = runner.test(ckpt_path="best", datamodule=module, verbose=False)
        scores[name] = found["test"]
    print(scores)
    assert min(scores.values()) > 0.8 and abs(scores["ours"] - scores["pyg"]) < 0.12


def test_training_on_hetero_data_is_the_same_as_with_pyg(tmp_path):
    pytest.importorskip("pyg_lib")
    made = [class_(typed(), num_neighbors=[3, 2], batch_size=16) for class_ in (LightningNodeData, PygNodeData)]
    assert all(module.test_dataloader is None for module in made), "the graph has no test seeds"
    runs = []
    for module in made:
        model, runner = Typed(), trainer(tmp_path)
        runner.fit(model, module)
        runs.append((runner.global_step, len(model.of("val")), [shape_of(batch) for batch in model.batches]))
    assert runs[0] == runs[1] and runs[0][0] == 4


def test_training_on_links_is_the_same_as_with_pyg(tmp_path):
    pytest.importorskip("pyg_lib")
    data = graph()
    runs = []
    for class_ in (LightningLinkData, PygLinkData):
        module = class_(
            data,
            input_train_edges=data.edge_index[:, :100],
            input_val_edges=data.edge_index[:, 100:140],
            num_neighbors=[3, 2],
            batch_size=16,
            neg_sampling="binary",
        )
        model, runner = Links(), trainer(tmp_path)
        runner.fit(model, module)
        runs.append((runner.global_step, len(model.of("val")), [shape_of(batch) for batch in model.batches]))
    assert runs[0] == runs[1] and runs[0][:2] == (14, 6)


def test_a_full_batch_is_the_graph(tmp_path):
    data = graph()
    for class_ in (LightningNodeData, PygNodeData):
        module = class_(data, loader="full")
        assert [next(iter(module.train_dataloader())) is data, len(list(module.val_dataloader()))] == [True, 1]
    with pytest.warns(UserWarning, match="batch_size=4 has no effect in 'LightningNodeData' for loader='full'"):
        LightningNodeData(data, loader="full", batch_size=4)
    with pytest.raises(ValueError, match="loader must be 'neighbor' or 'full', got 'half'"):
        LightningNodeData(data, loader="half")


def test_evaluation_may_have_its_own_sampling_options():
    data = graph()
    data.weight = torch.rand(data.num_edges)
    module = LightningNodeData(
        data,
        num_neighbors=[3, 2],
        batch_size=10,
        replace=True,
        eval_loader_kwargs={"num_neighbors": [-1], "batch_size": 100, "replace": False},
    )
    train, val = module.train_dataloader(), module.val_dataloader()
    assert isinstance(train, NeighborLoader) and isinstance(val, NeighborLoader), (
        "without a trainer, data modules make plain loaders"
    )
    assert len(train) == 5 and len(val) == 1
    assert next(iter(train)).num_sampled_nodes[0] == 10 and len(next(iter(train)).num_sampled_nodes) == 3
    whole = next(iter(val))
    assert len(whole.num_sampled_nodes) == 2 and torch.equal(whole.n_id[:30], data.val_mask.nonzero().flatten())
    into = torch.isin(data.edge_index[1], whole.n_id[:30])
    assert whole.num_edges == int(into.sum()), "expected all neighbours"
    assert train.engine.basis.source.sampler.topology.graph is val.engine.basis.source.sampler.topology.graph, (
        "the loaders must share one graph"
    )
    weighted = LightningNodeData(data, num_neighbors=[3], eval_loader_kwargs={"weight_attr": "weight"})
    assert not weighted.graph_sampler.topology.has_weights and weighted.eval_graph_sampler.topology.has_weights


def test_a_data_module_uses_a_custom_sampler():
    pytest.importorskip("pyg_lib")
    from torch_geometric.sampler import NeighborSampler

    data = graph()
    with pytest.warns(UserWarning, match="num_neighbors have no effect"):
        module = LightningNodeData(data, node_sampler=NeighborSampler(data, [4]), num_neighbors=[3, 3], batch_size=8)
    assert module.loader == "custom" and len(next(iter(module.train_dataloader())).num_sampled_nodes) == 2


def test_times_of_seeds_are_respected():
    data = graph()
    data.time = torch.arange(120)
    train = data.train_mask.nonzero().flatten()
    module = LightningNodeData(
        data, train, input_train_time=train // 2, time_attr="time", num_neighbors=[-1], batch_size=50
    )
    batch = next(iter(module.train_dataloader()))
    later = data.time[batch.n_id] > batch.seed_time[batch.batch]
    assert batch.num_nodes > 50 and not later[50:].any(), "a neighbour is later than its seed"
    edges = data.edge_index[:, :40]
    links = LightningLinkData(
        data, edges, input_train_time=torch.full((40,), 60), time_attr="time", num_neighbors=[-1], batch_size=40
    )
    batch = next(iter(links.train_dataloader()))
    assert batch.edge_label_time.tolist() == [60] * 40


def test_shuffle_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="The 'shuffle=False' option is ignored in 'LightningNodeData'"):
        module = LightningNodeData(graph(), num_neighbors=[2], shuffle=False)
    assert "shuffle" not in module.loader_kwargs and str(module) == repr(module)
    assert str(module).startswith("LightningNodeData(data=Data(") and "num_neighbors=[2]" in str(module)


def test_overfitting_repeats_the_same_batches(tmp_path):
    model = Homogeneous()
    trainer(tmp_path, overfit_batches=2, max_epochs=3).fit(
        model, LightningNodeData(graph(), num_neighbors=[-1], batch_size=8)
    )
    seeds = [ids[:8] for _, _, ids in model.of("train")]
    assert len(seeds) == 6 and seeds[:2] == seeds[2:4] == seeds[4:]


def test_predictions_come_in_the_order_of_the_seeds(tmp_path):
    wanted = torch.tensor([5, 3, 99, 7, 1])
    module = LightningNodeData(graph(), input_pred_nodes=wanted, num_neighbors=[2], batch_size=2)
    found = trainer(tmp_path).predict(Homogeneous(), module)
    assert torch.equal(torch.cat(found), wanted)


def test_a_second_pass_in_a_hook_is_complete(tmp_path):
    class Counts(Callback):
        def on_train_epoch_end(self, runner, model):
            counts.append(
                (sum(1 for _ in runner.train_dataloader), sum(1 for _ in runner.datamodule.train_dataloader()))
            )

    counts: list = []
    model = Homogeneous()
    trainer(tmp_path, callbacks=[Counts()]).fit(model, LightningNodeData(graph(), num_neighbors=[2], batch_size=16))
    assert counts == [(4, 4), (4, 4)] and len(model.of("train")) == 8


# --- resuming after a stop --------------------------------------------------------------------------------


class StopAt(Callback):
    """Stops the run before batch ``index`` of ``epoch`` is done."""

    def __init__(self, epoch: int, index: int) -> None:
        self.point = epoch, index

    def on_train_batch_start(self, runner, model, batch, index):
        if (runner.current_epoch, index) == self.point:
            raise KeyError("stop")


STOPS = {
    # checkpoint, point of the stop, Lightning's options
    "in mid-epoch": ({"every_n_train_steps": 3}, (1, 1), {}),
    "after the last batch": ({"every_n_train_steps": 4}, (1, 1), {}),
    "between epochs": ({}, (2, 1), {}),
    "in mid-epoch, with limited batches": ({"every_n_train_steps": 2}, (1, 2), {"limit_train_batches": 3}),
    "between epochs, with limited batches": ({}, (1, 2), {"limit_train_batches": 3}),
    "checkpoint on the exception": ("exception", (1, 2), {}),
    "with accumulated gradients": ({"every_n_train_steps": 1}, (1, 3), {"accumulate_grad_batches": 2}),
    "validation in mid-epoch": ({"every_n_train_steps": 3}, (1, 3), {"val_check_interval": 2}),
}


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, stop, seed):
    when, point, options = STOPS[stop]

    def make() -> LightningNodeData:
        return LightningNodeData(graph(), num_neighbors=[3, 2], batch_size=16, seed=seed)

    def fit(model, module, callbacks=(), **more):
        runner = trainer(
            tmp_path, max_epochs=3, callbacks=list(callbacks), num_sanity_val_steps=0, **{**options, **more}
        )
        runner.fit(model, module, ckpt_path=more.pop("ckpt", None))

    torch.manual_seed(11)
    whole = Homogeneous()
    torch.manual_seed(12)
    trainer(tmp_path, max_epochs=3, num_sanity_val_steps=0, **options).fit(whole, make())

    if when == "exception":
        from lightning.pytorch.callbacks import OnExceptionCheckpoint

        keep, file = OnExceptionCheckpoint(tmp_path, "stopped"), tmp_path / "stopped.ckpt"
    else:
        keep, file = (
            ModelCheckpoint(tmp_path, "stopped", save_top_k=1, enable_version_counter=False, **when),
            tmp_path / "stopped.ckpt",
        )
    torch.manual_seed(11)
    first = Homogeneous()
    torch.manual_seed(12)
    with pytest.raises(KeyError):
        trainer(
            tmp_path,
            max_epochs=3,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
            callbacks=[keep, StopAt(*point)],
            **options,
        ).fit(first, make())

    torch.manual_seed(99)  # the new process has another random state
    second = Homogeneous()
    trainer(tmp_path, max_epochs=3, num_sanity_val_steps=0, **options).fit(
        second, make(), ckpt_path=file, weights_only=False
    )

    rest = second.of("train")
    assert rest == whole.of("train")[-len(rest) :], "expected the remaining batches, in their epochs"
    assert (
        len(rest) >= 1 and first.of("train")[: len(whole.of("train")) - len(rest)] == whole.of("train")[: -len(rest)]
    ), "a batch is missing"
    assert second.of("val") == whole.of("val")[-len(second.of("val")) :]
    for name, value in whole.gnn.state_dict().items():
        assert torch.equal(value, second.gnn.state_dict()[name]), name


def test_a_run_does_not_resume_with_other_arguments(tmp_path):
    keep = ModelCheckpoint(tmp_path, "stopped", every_n_train_steps=3, enable_version_counter=False)
    with pytest.raises(KeyError):
        trainer(tmp_path, enable_checkpointing=True, callbacks=[keep, StopAt(0, 3)]).fit(
            Homogeneous(), LightningNodeData(graph(), num_neighbors=[3, 2], batch_size=16)
        )
    other = LightningNodeData(graph(), num_neighbors=[4, 2], batch_size=16)
    with pytest.raises(ValueError, match=r"num_neighbors: expected \[4, 2\], got \[3, 2\]"):
        trainer(tmp_path).fit(Homogeneous(), other, ckpt_path=tmp_path / "stopped.ckpt", weights_only=False)


# --- loaders without a data module ------------------------------------------------------------------------


def test_a_plain_loader_resumes_in_mid_epoch(tmp_path):
    def make():
        return NeighborLoader(graph(), [3, 2], graph().train_mask, batch_size=16, shuffle=True, seed=5)

    torch.manual_seed(11)
    whole = Homogeneous()
    trainer(tmp_path, max_epochs=1).fit(whole, make())
    keep = ModelCheckpoint(tmp_path, "stopped", every_n_train_steps=2, enable_version_counter=False)
    torch.manual_seed(11)
    with pytest.raises(KeyError):
        trainer(tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[keep, StopAt(0, 2)]).fit(
            Homogeneous(), make()
        )
    second = Homogeneous()
    trainer(tmp_path, max_epochs=1).fit(second, make(), ckpt_path=tmp_path / "stopped.ckpt", weights_only=False)
    assert second.of("train") == whole.of("train")[2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_loader_resumes_between_epochs(tmp_path, num_workers):
    def fit(max_epochs, **options):
        loaders = [
            NeighborLoader(
                graph(),
                [3, 2],
                graph()[mask],
                batch_size=16,
                shuffle=mask == "train_mask",
                seed=5,
                num_workers=num_workers,
            )
            for mask in ("train_mask", "val_mask")
        ]
        torch.manual_seed(11)
        model = Homogeneous()
        runner = trainer(tmp_path, max_epochs=max_epochs)
        runner.fit(model, *loaders, **options)
        return model, runner

    whole, *_ = fit(4)
    _, runner = fit(2)
    runner.save_checkpoint(tmp_path / "between.ckpt")
    second, *_ = fit(4, ckpt_path=tmp_path / "between.ckpt", weights_only=False)
    for kind in ("train", "val"):
        rest = second.of(kind)
        assert rest and rest == whole.of(kind)[-len(rest) :] and {epoch for epoch, *_ in rest} == {2, 3}


def test_the_sampler_of_a_loader_sets_its_epoch():
    """Lightning and scripts for several ranks set the epoch on the sampler; Lightning does so after ``iter``."""
    make = lambda: NeighborLoader(graph(), [3], graph().train_mask, batch_size=16, shuffle=True, seed=5)  # noqa: E731
    loader = make()
    epochs = [[batch.n_id.tolist() for batch in loader] for _ in range(4)]
    for copied in (lambda loader: loader, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))):
        loader = copied(make())
        loader.sampler.set_epoch(2)
        assert [batch.n_id.tolist() for batch in loader] == epochs[2]
        assert [batch.n_id.tolist() for batch in loader] == epochs[3]
        iterator = iter(loader)
        loader.sampler.set_epoch(1)
        assert [batch.n_id.tolist() for batch in iterator] == epochs[1], "before the first batch the epoch may change"
        iterator = iter(loader)
        first = next(iterator).n_id.tolist()
        loader.sampler.set_epoch(0)
        assert [first, *(batch.n_id.tolist() for batch in iterator)] == epochs[2], "an epoch under way must not change"
        assert [batch.n_id.tolist() for batch in loader] == epochs[0]
    loader = make()
    iterator = iter(loader)
    taken = [next(iterator).n_id.tolist() for _ in range(2)]
    other = make()
    other.load_state_dict(loader.state_dict())
    iterator = iter(other)
    other.sampler.set_epoch(0)
    assert [*taken, *(batch.n_id.tolist() for batch in iterator)] == epochs[0], (
        "the number of the resumed epoch must not restart it"
    )
    assert isinstance(loader.sampler, torch.utils.data.RandomSampler)
    assert isinstance(NeighborLoader(graph(), [3]).sampler, torch.utils.data.SequentialSampler)


def epochs_on_rank(rank, directory):
    loader = NeighborLoader(salientpp.load(directory), [3], "train", batch_size=8, shuffle=True, seed=5)
    give = lambda batches: [batch.n_id.tolist() for batch in batches]  # noqa: E731
    epochs = [give(loader) for _ in range(3)]
    loader.sampler.set_epoch(1)
    assert give(loader) == epochs[1]
    iterator = iter(loader)
    loader.sampler.set_epoch(0)
    assert give(iterator) == epochs[0], "before the first batch the epoch may change"
    assert give(loader) == epochs[1]
    iterator = iter(loader)
    first = next(iterator).n_id.tolist()
    loader.sampler.set_epoch(1)
    assert [first, *give(iterator)] == epochs[2], "an epoch under way must not change"
    return give(loader) == epochs[1]


def test_the_sampler_of_a_rank_sets_its_epoch(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3], 8)
    assert distributed.run(epochs_on_rank, 2, tmp_path / "parts") == [True, True]


def test_lightning_can_recreate_a_loader_with_all_its_arguments(tmp_path):
    """Lightning replaces a loader for predictions and on ranks.

    It makes the new one from the attributes of the old one, with its own sampler.
    """
    from lightning.pytorch.trainer.states import RunningStage
    from lightning.pytorch.utilities.data import _update_dataloader

    data = graph()
    data.time, data.weight = torch.arange(120), torch.rand(data.num_edges)
    node = NeighborLoader(
        data,
        [3],
        torch.arange(20),
        input_time=torch.full((20,), 50),
        time_attr="time",
        temporal_strategy="last",
        disjoint=True,
        batch_size=5,
        input_id=torch.arange(100, 120),
        seed=1,
        dtype=torch.float64,
    )
    again = _update_dataloader(node, node.sampler, mode=RunningStage.PREDICTING)
    for old, new in zip(node, again, strict=True):
        assert shape_of(old) == shape_of(new)
        for name in ("n_id", "edge_index", "input_id", "seed_time", "batch", "x"):
            assert torch.equal(old[name], new[name]), name
    link = LinkNeighborLoader(
        data,
        [3],
        data.edge_index[:, :20],
        edge_label=torch.arange(20),
        edge_label_time=torch.full((20,), 70),
        time_attr="time",
        neg_sampling="binary",
        batch_size=5,
        seed=1,
    )
    again = _update_dataloader(link, link.sampler, mode=RunningStage.PREDICTING)
    for old, new in zip(link, again, strict=True):
        for name in ("n_id", "edge_label", "edge_label_index", "edge_label_time"):
            assert torch.equal(old[name], new[name]), name
    weighted = NeighborLoader(
        data, [3], weight_attr="weight", subgraph_type="induced", replace=True, batch_size=60, seed=1
    )
    again = _update_dataloader(weighted, weighted.sampler)
    assert [batch.n_id.tolist() for batch in weighted] == [batch.n_id.tolist() for batch in again]


@pytest.mark.parametrize(
    "sampler",
    [torch.utils.data.SequentialSampler(range(50)), torch.utils.data.DistributedSampler(range(50), 2, 1, seed=3)],
)
def test_orders_of_torchs_samplers_have_a_state(sampler):
    def make(seed=4):
        return NeighborLoader(graph(), [3], graph().train_mask, batch_size=8, sampler=sampler, seed=seed)

    loader = make()
    getattr(sampler, "set_epoch", int)(6)
    whole = [batch.n_id.tolist() for batch in loader]
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    getattr(sampler, "set_epoch", int)(0)
    again = make(None)
    again.load_state_dict(state)
    assert [batch.n_id.tolist() for batch in again] == whole[2:]


# --- without Lightning ------------------------------------------------------------------------------------


def test_imports_do_not_need_lightning():
    program = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
import salientpp
assert "salientpp.lightning" not in sys.modules
from salientpp.lightning import LightningNodeData
try:
    LightningNodeData(salientpp.datasets.synthetic(num_vertices=50) if hasattr(salientpp, "datasets") else None)
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No module named 'pytorch_lightning'" in done.stdout


# --- ranks ------------------------------------------------------------------------------------------------


def as_torchrun_would(rank: int, world_size: int) -> None:
    """Sets the environment that tells Lightning that the ranks already run."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ.update(
        {name: str(value) for name, value in names.items()},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        TORCHELASTIC_RUN_ID="0",
    )
    warnings.simplefilter("ignore")


def fit_on_rank(rank, root, directory, stop, options, make=None):
    as_torchrun_would(rank, 2)
    data = graph() if directory is None else salientpp.load(directory)
    torch.manual_seed(11 if stop != "resume" else 50)
    model = Homogeneous()
    torch.manual_seed(rank)  # each rank would draw another seed
    module = LightningNodeData(
        data, num_neighbors=[3, 2], batch_size=8, input_pred_nodes="test" if directory else torch.arange(31), **options
    )
    keep = ModelCheckpoint(root, "stopped", every_n_train_steps=2, enable_version_counter=False)
    callbacks = {"stop": [keep, StopAt(1, 1)]}.get(stop, [])
    runner = trainer(root, strategy="ddp", devices=2, callbacks=callbacks, enable_checkpointing=bool(callbacks))
    if stop == "stop":
        with contextlib.suppress(KeyError):
            runner.fit(model, module)
        return model.of("train"), None, None, None
    more = {"ckpt_path": Path(root) / "stopped.ckpt", "weights_only": False} if stop == "resume" else {}
    runner.fit(model, module, **more)
    assert isinstance(runner.train_dataloader, FollowingLoader)
    runner.test(model, module, verbose=False)
    predicted = torch.cat(runner.predict(model, module)).tolist()
    if directory is not None:
        predicted = data.original_id(torch.tensor(predicted)).tolist()
    weights = [value.tolist() for value in model.gnn.state_dict().values()]
    dist.barrier()
    return model.of("train"), predicted, weights, getattr(module, "_cache", None) is not None


def fit_and_stop_on_rank(rank, root, directory, options):
    """A whole run, and one that stops."""
    return [fit_on_rank(rank, root, directory, stop, options) for stop in (None, "stop")]


@pytest.mark.parametrize("partitioned", [False, True], ids=["data", "parts"])
def test_two_ranks_share_the_seeds_and_resume_after_a_stop(tmp_path, partitioned):
    directory, options = None, {}
    if partitioned:
        directory, options = tmp_path / "parts", {"replication_factor": 0.2}
        salientpp.partition(graph(), 2, directory, [3, 2], 8)
    whole, first = zip(*distributed.run(fit_and_stop_on_rank, 2, tmp_path, directory, options, seconds=240))
    steps = [len(train) for train, *_ in whole]
    assert steps[0] == steps[1] and steps[0] > 4, "DDP needs the same number of steps on every rank"
    train = graph().train_mask.nonzero().flatten().tolist()
    seen = [ids[:8] for train_batches, *_ in whole for epoch, _, ids in train_batches if epoch == 0]
    assert len(seen) == 2 * steps[0] // 2 and (partitioned or set(train) <= set(sum(seen, []))), (
        "every seed belongs to some rank"
    )
    predicted = sorted(whole[0][1] + whole[1][1])
    wanted = graph().test_mask.nonzero().flatten().tolist() if partitioned else list(range(31))
    assert predicted == wanted, "every seed must be predicted once"
    assert whole[0][2] == whole[1][2], "the ranks must have the same model"
    assert whole[0][3] == partitioned, "the loaders of a partitioned graph must share one cache"

    second = distributed.run(fit_on_rank, 2, tmp_path, directory, "resume", options, seconds=240)
    for rank in range(2):
        rest = second[rank][0]
        assert 0 < len(rest) < steps[rank] and rest == whole[rank][0][-len(rest) :]
        assert first[rank][0][: steps[rank] - len(rest)] == whole[rank][0][: -len(rest)]
    assert second[0][2] == second[1][2] == whole[0][2], "the model must be the same as without the stop"


def shared_loader_on_rank(rank, root):
    as_torchrun_would(rank, 2)
    make = lambda: NeighborLoader(graph(), [3], graph().train_mask, batch_size=8, share=(rank, 2), shuffle=True, seed=3)  # noqa: E731
    with pytest.raises(ValueError, match="Trainer\\(use_distributed_sampler=False\\) prevents this"):
        trainer(root, strategy="ddp", devices=2).fit(Homogeneous(), make())
    model = Homogeneous()
    trainer(root, strategy="ddp", devices=2, use_distributed_sampler=False).fit(model, make())
    expected = make()
    return [ids for *_, ids in model.of("train")] == [batch.n_id.tolist() for _ in range(2) for batch in expected]


def test_a_loader_that_already_shares_its_seeds_is_refused_with_advice(tmp_path):
    assert distributed.run(shared_loader_on_rank, 2, tmp_path, seconds=240) == [True, True]


def predict_on_rank(rank, root, directory):
    as_torchrun_would(rank, 2)
    loader = NeighborLoader(salientpp.load(directory), [3, 2], "test", batch_size=8)
    with pytest.raises(ValueError, match="use salientpp.lightning.LightningNodeData"):
        trainer(root, strategy="ddp", devices=2).predict(Homogeneous(), loader)
    return True


def test_predictions_on_a_partitioned_graph_need_the_data_module(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3, 2], 8)
    assert distributed.run(predict_on_rank, 2, tmp_path, tmp_path / "parts", seconds=240) == [True, True]


def looking_ahead_on_rank(rank, directory):
    module = LightningNodeData(
        salientpp.load(directory), num_neighbors=[3, 2], batch_size=8, replication_factor=0.2, lookahead=3
    )
    return [sum(batch.batch_size for batch in made()) for made in (module.train_dataloader, module.val_dataloader)]


def test_loaders_of_a_data_module_can_use_lookahead(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3, 2], 8)
    for train, val in distributed.run(looking_ahead_on_rank, 2, tmp_path / "parts", seconds=240):
        assert train > val > 0


def with_a_budget_on_rank(rank, directory, rate):
    from salientpp.ways.planner.machines import Link, Machines

    machines = Machines(between=Link(rate), look_ahead=1e-5)
    module = LightningNodeData(
        salientpp.load(directory), num_neighbors=[3, 2], batch_size=8, memory={"host": 300, "machines": machines}
    )
    loaders = [module.train_dataloader(), module.val_dataloader(), module.test_dataloader()]
    assert all(sum(batch.batch_size for batch in loader) > 0 for loader in loaders)
    held = [loader.memory_used() for loader in loaders]
    return [(used["cache"], used.get("lookahead", 0)) for used in held], bool(loaders[0].plan().chosen.choice.lookahead)


@pytest.mark.parametrize("rate", [1e3, 1e12], ids=["slow link", "free link"])
def test_loaders_of_a_data_module_have_one_budget(tmp_path, rate):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3, 2], 8)
    for held, looks_ahead in distributed.run(with_a_budget_on_rank, 2, tmp_path / "parts", rate, seconds=240):
        train, *others = held
        assert 0 < sum(train) <= 300
        # A static cache is shared. A cache that looks ahead belongs to the batches of one loader.
        assert others == ([(0, 0)] * 2 if looks_ahead else [train] * 2)


def test_a_data_module_takes_blocks_of_shared_draws_and_no_second_sampler():
    data, options = graph(), {"batch_size": 8, "seed": 4, "shared_draws": {"vertices": "batch", "block": 3}}
    loader = LightningNodeData(data, num_neighbors=[3, 2], **options).train_dataloader()
    same = NeighborLoader(data, [3, 2], data.train_mask, shuffle=True, uneven="wrap", **options)
    assert all(torch.equal(ours.n_id, want.n_id) for ours, want in zip(loader, same, strict=True))
    with pytest.raises(ValueError, match="shared_draws may be a mapping .* got the entry 'blok'. Did you mean block?"):
        LightningNodeData(data, num_neighbors=[3, 2], shared_draws={"blok": 3}).train_dataloader()
    with pytest.raises(ValueError, match="neighbor_sampler='device' would replace the sampler that the loaders share"):
        LightningNodeData(data, num_neighbors=[3, 2], neighbor_sampler="device").train_dataloader()


@pytest.mark.parametrize("draws", [None, "batch", {}, {"vertices": "batch"}])
def test_an_evaluation_with_draws_of_its_own_has_no_blocks_of_the_training(draws):
    options = {"num_neighbors": [3, 2], "batch_size": 8, "shared_draws": {"vertices": "batch", "block": 3}}
    module = LightningNodeData(graph(), **options, eval_loader_kwargs={"shared_draws": draws})
    assert [
        each._given_options.shared_draws_block for each in (module.train_dataloader(), module.val_dataloader())
    ] == [3, 1]


class Reduced(Homogeneous):
    """Evaluates with its own collectives, as metrics over several ranks do."""

    def count(self, batch, kind: str) -> None:
        self.log(f"{kind}_seeds", float(batch.batch_size), batch_size=1, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.number = getattr(self, "number", 0) + batch.batch_size

    def validation_step(self, batch, index):
        self.count(batch, "val")

    def test_step(self, batch, index):
        self.count(batch, "test")

    def predict_step(self, batch, index):
        self.number = getattr(self, "number", 0) + batch.batch_size
        return batch.n_id[: batch.batch_size]

    def end(self) -> None:
        total = torch.tensor(float(self.__dict__.pop("number")))
        dist.all_reduce(total)
        self.totals = [*getattr(self, "totals", []), total.item()]

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = end


def evaluate_on_rank(rank, root, directory, with_module):
    as_torchrun_would(rank, 2)
    part = salientpp.load(directory)
    options = {"num_neighbors": [3, 2], "batch_size": 4}
    model = Reduced()
    run = {"strategy": "ddp", "devices": 2, "num_sanity_val_steps": 2, "val_check_interval": 3}
    if with_module:
        module = LightningNodeData(part, **options, eval_loader_kwargs={"uneven": "exact"}, input_pred_nodes="test")
        trainer(root, **run).fit(model, module)
        found = trainer(root, **run).test(model, module, verbose=False)
        trainer(root, **run).predict(model, module)
    else:
        training = NeighborLoader(part, input_nodes="train", shuffle=True, **options)
        trainer(root, **run).fit(model, training, NeighborLoader(part, input_nodes="val", **options))
        found = trainer(root, **run).test(model, NeighborLoader(part, input_nodes="test", **options), verbose=False)
    dist.barrier()
    return found[0]["test_seeds"], model.totals


@pytest.mark.parametrize("with_module", [True, False])
def test_evaluation_on_uneven_ranks_may_use_collectives(tmp_path, with_module):
    """Lightning takes ``len(loader)`` batches of each rank, also when it evaluates in the middle of a training epoch."""
    data = graph()
    assignment = torch.zeros(data.num_nodes, dtype=torch.int64)
    for mask, number in ((data.train_mask, 25), (data.val_mask, 4), (data.test_mask, 1)):
        assignment[mask.nonzero().flatten()[:number]] = 1
    salientpp.partition(data, 2, tmp_path / "parts", [3, 2], 4, method=assignment)
    found = distributed.run(evaluate_on_rank, 2, tmp_path, tmp_path / "parts", with_module, seconds=240)
    assert found[0] == found[1]
    tested, totals = found[0]
    sanity = 2 * 4 + 4
    # Each of the two epochs of 7 batches has two validations. A test and a prediction follow.
    assert tested == 20 and totals == [sanity, *[30.0] * 4, *([20.0] * (1 + with_module))]


def evaluate_nothing_on_rank(rank, root, directory):
    as_torchrun_would(rank, 2)
    module = LightningNodeData(salientpp.load(directory), num_neighbors=[3, 2], batch_size=4, input_pred_nodes="test")
    with pytest.raises(ValueError, match="rank 1 has no batches, so Lightning skips its loop there"):
        trainer(root, strategy="ddp", devices=2).predict(Homogeneous(), module)
    return True


def test_a_rank_without_batches_is_refused_where_lightning_would_skip_it(tmp_path):
    data = graph()
    assignment = 1 - data.test_mask.long()
    salientpp.partition(data, 2, tmp_path / "parts", [3, 2], 4, method=assignment)
    assert distributed.run(evaluate_nothing_on_rank, 2, tmp_path, tmp_path / "parts", seconds=240) == [True, True]


class LinksById(Links):
    def note(self, kind: str, index: int, batch) -> None:
        store = batch["user", "buys", "item"] if isinstance(batch, HeteroData) else batch
        self.seen.append((kind, self.current_epoch, index, store.input_id.tolist()))

    def loss(self, batch):
        if isinstance(batch, Data):
            return super().loss(batch)
        out = self.gnn(batch["user"].x, batch["user", "buys", "item"].edge_index.new_zeros(2, 0))
        return out.square().mean()

    def predict_step(self, batch, index):
        self.note("predict", index, batch)


def links_on_rank(rank, root, directory):
    as_torchrun_would(rank, 2)
    part = salientpp.load(directory)
    options = {"num_neighbors": [3, 2], "batch_size": 8, "neg_sampling": "binary", "seed": 3, "replication_factor": 0.1}
    module = LightningLinkData(part, **options)
    model = LinksById()
    runner = trainer(root, strategy="ddp", devices=2, num_sanity_val_steps=0)
    runner.fit(model, module)
    runner.predict(model, module)
    split = "train" if not part.is_hetero else (("user", "buys", "item"), "train")
    own = LinkNeighborLoader(part, edge_label_index=split, shuffle=True, **options)
    as_own = [model.note("own", index, batch) for _ in range(2) for index, batch in enumerate(own)]
    dist.barrier()
    trained, again = ([ids for *_, ids in model.of(kind)] for kind in ("train", "own"))
    return trained == again and len(as_own) == len(trained) > 0, *(
        sum([ids for epoch, _, ids in model.of(kind) if epoch != 1], []) for kind in ("train", "val", "predict")
    )


@pytest.mark.parametrize("make", [graph, typed])
def test_links_of_a_partitioned_graph_are_seeds(tmp_path, make):
    """A partitioned graph has edge splits, which are named in the same way as vertex splits."""
    sizes = {"train": 60, "val": 21, "pred": 33}
    bounds = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
    splits = {name: torch.arange(*bounds[i : i + 2]) for i, name in enumerate(sizes)}
    typed_splits = {("user", "buys", "item"): splits}
    salientpp.partition(make(), 2, tmp_path / "parts", [3, 2], 8, edge_split=splits if make is graph else typed_splits)
    (same, *found), (same_there, *others) = distributed.run(links_on_rank, 2, tmp_path, tmp_path / "parts", seconds=240)
    assert same and same_there, "batches differ from those of LinkNeighborLoader"
    for name, one, other in zip(sizes, found, others):
        assert len({*one, *other}) == sizes[name]
    assert len(found[2]) + len(others[2]) == sizes["pred"], "every edge must be predicted once"


def spawned(model, loader, root):
    # The fork server of the ranks has imported what a spawned process would import. It receives the same pickles.
    how = "spawn" if torch.cuda.is_available() else distributed.forks().get_start_method()
    trainer(root, strategy=DDPStrategy(start_method=how), devices=2).fit(model, loader)


def test_a_loader_can_be_sent_to_spawned_processes(tmp_path):
    """Lightning pickles the loader into each process and gives it a sampler with the rank's share there."""
    loader = NeighborLoader(graph(), [3, 2], graph().train_mask, batch_size=8, shuffle=True, seed=3)
    model = Homogeneous()
    before = [value.clone() for value in model.gnn.parameters()]
    spawned(model, loader, tmp_path)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.gnn.parameters())), (
        "the processes trained no model, or did not return it"
    )


def plain_loader_on_rank(rank, root, directory):
    as_torchrun_would(rank, 2)
    data = graph() if directory is None else salientpp.load(directory)
    loader = NeighborLoader(data, [3, 2], "train" if directory else data.train_mask, batch_size=8, shuffle=True, seed=3)
    model = Homogeneous()
    keep = ModelCheckpoint(root, "last", every_n_train_steps=1, enable_version_counter=False)
    runner = trainer(root, strategy="ddp", devices=2, callbacks=[keep], enable_checkpointing=True)
    runner.fit(model, loader)
    given = runner.train_dataloader
    dist.barrier()
    return given is loader, type(given.sampler).__name__, len(given), [ids for *_, ids in model.of("train")]


def test_lightning_leaves_a_loader_of_a_partitioned_graph_alone(tmp_path):
    salientpp.partition(graph(), 2, tmp_path / "parts", [3, 2], 8)
    for same, sampler, length, seen in distributed.run(
        plain_loader_on_rank, 2, tmp_path, tmp_path / "parts", seconds=240
    ):
        assert same and sampler == "RanksSampler" and len(seen) == 2 * length


def test_lightning_shares_the_seeds_of_a_plain_loader_and_keeps_its_state(tmp_path):
    found = distributed.run(plain_loader_on_rank, 2, tmp_path, None, seconds=240)
    assert [(same, sampler) for same, sampler, *_ in found] == [(False, "DistributedSampler")] * 2
    assert all(length == 4 and len(seen) == 8 for _, _, length, seen in found)
