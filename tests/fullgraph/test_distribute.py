"""Laws of full-graph training: models, losses, words, states and failures on several ranks."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from fullgraph_training import CLASSES, WIDTH, classes, data_of, network, train, train_alone
from graphs import real_data
from layout_words import words_of_product
from rare import rare
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Data

import salientpp
from salientpp.datasets import synthetic
from salientpp.fullgraph import Constants, accuracy, distribute, local, loss_mean, measured_constants, plan_for
from salientpp.fullgraph.layouts import Layout

sys.path.append(str(Path(__file__).parents[2] / "examples"))


# --- training -----------------------------------------------------------------------------------------------


def curves(rank: int, root: str, names: list[str], epochs: int) -> dict[str, Any]:
    part = local(salientpp.load(root))
    found: dict[str, Any] = {}
    for name in names:
        model = distribute(network(name, part.x.size(1), part.num_classes), part)
        found[name] = train(model, part, epochs)
        with torch.no_grad():
            model.eval()
            out = model(part.x, part.edge_index)
        found[f"{name} accuracy"] = accuracy(out[part.val_mask], part.y[part.val_mask], part)
    return found


@pytest.mark.parametrize("kind", ["a column", "several labels", "reals"])
def test_classes_are_counted_over_all_ranks(tmp_path, kind):
    data = data_of()
    number = torch.arange(data.num_nodes)
    labels = {"a column": number.view(-1, 1), "several labels": torch.rand(data.num_nodes, 6), "reals": number / 2}
    data.y = labels[kind]
    salientpp.partition(data, 2, tmp_path / "parts", [5, 5], 16, split={"train": number})
    expected = 6 if kind == "several labels" else data.num_nodes
    assert distributed.run(classes, 2, str(tmp_path / "parts")) == [expected] * 2


@pytest.mark.parametrize("world_size", [1, 3, *rare(2, 4)])
def test_losses_and_scores_of_a_directory_equal_one_process(tmp_path, world_size):
    data, names = data_of(), ["sage", "gat", "gcn"]
    salientpp.partition(data, 4, tmp_path / "parts", [5, 5], 16)  # a rank joins several parts if there are fewer ranks
    found = distributed.run(curves, world_size, str(tmp_path / "parts"), names, 3)
    for name in names:
        model = network(name)
        expected = train_alone(model, data, 3)
        prediction = model.eval()(data.x, data.edge_index).argmax(1)
        right = (prediction == data.y)[data.val_mask].double().mean()
        for rank, each in enumerate(found):
            assert each[name] == pytest.approx(expected, abs=1e-9), (name, rank)
            assert each[f"{name} accuracy"] == pytest.approx(float(right)), (name, rank)


@pytest.mark.parametrize("name", ["facebook_pages", *rare("debian_full")])
def test_loss_curves_of_real_graphs_equal_one_process(tmp_path, name):
    data = real_data(name)
    draw = torch.Generator().manual_seed(0)
    data.x = torch.randn(data.num_nodes, 8, generator=draw).double()
    salientpp.partition(data, 2, tmp_path / "parts", [5, 5, 5], 256)
    found = distributed.run(curves, 2, str(tmp_path / "parts"), ["sage", "gat"], 2)
    for model in ("sage", "gat"):
        expected = train_alone(network(model, 8, int(data.y.max()) + 1), data, 2)
        for each in found:
            assert each[model] == pytest.approx(expected, abs=1e-6), model


def several_splits(rank: int) -> tuple[float, int]:
    """Trains on one of two graphs in a joined graph, and tests on the other."""
    data = data_of(60)
    both = Data(
        x=torch.cat([data.x, -data.x]),
        y=torch.cat([data.y, data.y]),
        edge_index=torch.cat([data.edge_index, data.edge_index + 60], 1),
        train_mask=torch.arange(120) < 60,
        test_mask=torch.arange(120) >= 60,
    )
    part = local(both)
    model = distribute(network("sage"), part)
    losses = train(model, part, 2)
    out = model.eval()(part.x, part.edge_index)
    return losses[-1], int(accuracy(out[part.test_mask], part.y[part.test_mask], part) * 60 + 0.5)


def test_training_and_test_vertices_may_be_on_different_graphs():
    assert len(set(distributed.run(several_splits, 2))) == 1


def accumulated(rank: int) -> list[float]:
    """Returns gradients of two losses that are added up, and of the sum of the losses."""
    part, norms = local(data_of()), []
    for together in (True, False):
        model = distribute(network("gcn"), part)
        shares = [
            loss_mean(F.cross_entropy(model(part.x, part.edge_index)[m], part.y[m], reduction="none"), part)
            for m in (part.train_mask, part.val_mask)
        ]
        if together:
            (shares[0] + shares[1]).backward()
        else:
            shares[1].backward()
            shares[0].backward()
        norms.append(sum(float(p.grad.norm()) for p in model.parameters()))
    return norms


def test_gradients_add_up_over_several_losses():
    for together, apart in distributed.run(accumulated, 2):
        assert together == pytest.approx(apart, abs=1e-10)


# --- layouts ------------------------------------------------------------------------------------------------


def with_layouts(rank: int, size: int, forms: list[tuple[str, list[str]]]) -> list[str]:
    data, wrong = data_of(50), []
    part = local(data, offsets={4: [0, 9, 9, 31, 50], 8: [0, 4, 4, 11, 20, 30, 39, 45, 50]}[size])
    begin, number = part.offsets[rank], part.n_id.numel()
    for name, layouts in forms:
        alone = network(name)
        expected = alone(data.x, data.edge_index)
        F.cross_entropy(expected[data.train_mask], data.y[data.train_mask]).backward()
        for layout in layouts:
            model = distribute(network(name), part, layout=layout)
            out = model(part.x, part.edge_index)
            mask = part.train_mask
            loss_mean(F.cross_entropy(out[mask], part.y[mask], reduction="none"), part).backward()
            pairs = [(expected[begin : begin + number], out[:number])]
            pairs += [(a.grad, b.grad) for a, b in zip(alone.parameters(), model.parameters())]
            off = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
            if off > 1e-10:
                wrong.append(f"{name} over {layout} is off by {off}")
    return wrong


ON_4 = ["halo", "cover", "1d", "1.5d", "2d", "grid:2x2", "auto"]
ON_8 = ["3d", "grid:2x4", "grid:4x2", "1.5d"]
NETWORKS = ["gcn", "gin", "sgc", "appnp", "sage"]
WITH_MAX = {4: ["halo", "1d", "1.5d", "grid:2x2", "auto"], 8: ["grid:2x4", "grid:4x2", "1.5d"]}  # no sums of products
#: The layouts of each network. 'auto' measures the ranks for seconds.
SOME = {
    4: [
        ("gcn", ON_4),
        ("gin", ["halo", "cover", "1.5d"]),
        ("sgc", ["1d", "2d"]),
        ("appnp", ["halo", "cover", "grid:2x2"]),
        ("sage", ON_4[:-1]),
        ("max", WITH_MAX[4][:-1]),
    ],
    8: [("gcn", ON_8), ("sage", ["3d", "grid:2x4"]), ("max", ["grid:4x2"])],
}


def words_of_form(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{sum(len(layouts) for _, layouts in value)} models"


EVERY = {
    size: [*((name, layouts) for name in NETWORKS), ("max", WITH_MAX[size])] for size, layouts in ((4, ON_4), (8, ON_8))
}


@pytest.mark.parametrize(("size", "forms"), [*SOME.items(), *rare(*EVERY.items())], ids=words_of_form)
def test_models_over_every_layout_equal_one_process(size, forms):
    assert sum(distributed.run(with_layouts, size, size, forms), []) == []


def words(rank: int) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    part = local(data_of(50))
    return [(layout, *words_over(rank, layout, part)) for layout in ("halo", "1d", "grid:2x2")]


def words_over(rank: int, layout: str, part: Any) -> tuple[dict[str, int], dict[str, int]]:
    model = distribute(pyg.GraphSAGE(WIDTH, 16, 3, CLASSES).double(), part, layout=layout)
    part.ranks.received.clear()
    out = model(part.x, part.edge_index)
    forward = dict(part.ranks.received)
    loss_mean(out.square(), part).backward()
    route = part.hops[0].route
    columns = WIDTH + 16 + 16
    size, weights = part.ranks.size, sum(p.numel() for p in model.parameters())
    if layout == "halo":
        expected = {
            "forward": columns * route.num_received,
            # The first layer's rows are given, so no gradient travels for them.
            "backward": (columns - WIDTH) * sum(route.send_counts),
        }
    else:
        expected = {
            "forward": sum(words_of_product(layout, part.offsets, f, rank) for f in (WIDTH, 16, 16)),
        }
    mine = (rank + 1) * weights // size - rank * weights // size
    expected["gradients"] = mine * (size - 1) + weights - mine
    return {key: forward.get(key, 0) if key == "forward" else part.ranks.received[key] for key in expected}, expected


def test_a_step_moves_the_words_of_its_closed_form():
    for of_rank in distributed.run(words, 4):
        for layout, found, expected in of_rank:
            assert found == expected, layout


def test_a_layout_that_a_layer_does_not_support_is_refused_by_name():
    part = local(data_of(50))
    with pytest.raises(ValueError, match=r"layout='1d' multiplies rows by a constant matrix, but GATConv \(convs.0\)"):
        distribute(network("gat"), part, layout="1d")
    with pytest.raises(ValueError, match=r"layout='2d' adds up products, but SAGEConv \(convs.0\) takes the maximum"):
        distribute(network("max"), part, layout="2d")
    with pytest.raises(ValueError, match="layout must be one of"):
        distribute(network("gcn"), part, layout="4d")
    assert Layout.of("1d", 4) == Layout("1d", "grid", 4, 1)


def with_other_weights(rank: int) -> list[float]:
    """Trains with weights that differ at each step, under a plan whose products get sums."""
    data = data_of(50)
    part, alone = local(data), network("gcn")
    plan = plan_for(network("gcn"), part, kind="sum", constants=Constants(1e-9, 1e-9, 1e-8))
    assert all(hop.has_sums for hop in plan.graph.hops)
    model = distribute(network("gcn"), part, plan)
    begin, end = part.offsets[rank : rank + 2]
    off = []
    for factor in (1.0, 2.0):
        expected = alone(data.x, data.edge_index, data.edge_weight.sqrt() * factor + data.edge_weight)
        out = model(part.x, part.edge_index, part.edge_weight.sqrt() * factor + part.edge_weight)
        off.append(float((out - expected[begin:end]).detach().abs().max()))
    return off


def test_a_plan_with_sums_allows_weights_that_change():
    for off in distributed.run(with_other_weights, 2):
        assert max(off) < 1e-10


# --- 16-bit floats ------------------------------------------------------------------------------------------

NARROW = {"autocast": torch.bfloat16, "bfloat16": torch.bfloat16, "half": torch.float16}


def step_in(
    mode: str, name: str, model: Any, whole: torch.nn.Module, g: Any, mean: Any
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Returns the output, the gradients and the loss of a step, in 16-bit floats unless ``mode`` is 'double'."""
    dtype = {"autocast": torch.float32, "double": torch.float64}.get(mode, NARROW.get(mode))
    whole.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        out = model(g.x.to(dtype), g.edge_index, *([g.edge_weight] if name == "weighted gcn" else []))
        loss = mean(F.cross_entropy(out[g.train_mask], g.y[g.train_mask], reduction="none"))
    loss.backward()
    return out.detach(), [parameter.grad for parameter in whole.parameters()], loss.detach()


def narrow(rank: int, mode: str, forms: list[tuple[str, list[str]]]) -> list[str]:
    data, wrong = data_of(400), []
    data.edge_weight = data.edge_weight.float()
    part = local(data, offsets=[0, 90, 90, 310, 400])
    own = slice(*part.offsets[rank : rank + 2])
    eps = torch.finfo(NARROW[mode]).eps
    for name, layouts in forms:
        whole = network(name)
        exact = step_in("double", name, whole, whole, data, torch.mean)
        whole = network(name)
        alone = step_in(mode, name, whole, whole, data, torch.mean)
        for layout in layouts:
            module = network(name)
            model = distribute(module, part, layout=layout)
            out, gradients, loss = step_in(mode, name, model, module, part, lambda losses: loss_mean(losses, part))
            triples = [("output", exact[0][own], alone[0][own], out[: own.stop - own.start])]
            triples += [("loss", exact[2], alone[2], loss)]
            triples += [("gradient", *three) for three in zip(exact[1], alone[1], gradients, strict=True)]
            for what, reference, of_one, of_ranks in triples:
                if of_one.dtype != of_ranks.dtype:
                    wrong.append(f"{name} over {layout}: {what} is {of_ranks.dtype}, and {of_one.dtype} alone")
                if not reference.numel():
                    continue
                scale = float(max(each.abs().max() for each in (exact[1] if what == "gradient" else [reference])))
                off, off_alone = (float((each.double() - reference).abs().max()) for each in (of_ranks, of_one))
                if not off <= 2 * off_alone + 4 * eps * scale:
                    wrong.append(
                        f"{name} over {layout}: {what} is off by {off:.2g}, {off_alone:.2g} alone, of {scale:.2g}"
                    )
    return wrong


@pytest.mark.parametrize("mode", ["autocast", "half", *rare("bfloat16")])
def test_16_bit_floats_equal_one_process(mode):
    layouts = ["halo", "cover", "1d", "1.5d", "grid:2x2", "2d"]
    forms = [("gcn", layouts), ("gin", layouts[::2]), ("sage", ["halo", *layouts[1::2]])]
    forms += [(name, ["halo"]) for name in ("gat", "max", "appnp")]
    if mode == "autocast":  # in other modes a layer would get weighted rows, which are wider than its parameters
        forms.append(("weighted gcn", layouts[::2]))
    wrong = distributed.run(narrow, 4, mode, forms)
    assert sum(wrong, []) == []


def test_means_and_measurements_of_16_bit_floats_do_not_overflow():
    part = local(data_of(50), dtype=torch.float16)
    assert float(loss_mean(torch.full((40_000,), 4.0, dtype=torch.float16), part)) == 4
    weight = torch.full((40_000,), 2.0, dtype=torch.float16)
    assert float(loss_mean(torch.full((40_000,), 4.0, dtype=torch.float16), part, weight)) == 4
    assert measured_constants(part).edge > 0


# --- states -------------------------------------------------------------------------------------------------


def resumed(rank: int, folder: str, first: int, more: int) -> list[float]:
    part = local(data_of(50))
    model = distribute(network("sage"), part)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    path = Path(folder) / "state.pt"
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = train(model, part, first, optimizer)
    if rank == 0 and not path.exists():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return losses + train(model, part, more, optimizer)


def test_training_resumes_from_a_state_on_any_number_of_ranks(tmp_path):
    straight = distributed.run(resumed, 2, str(tmp_path), 2, 2)[0]
    assert distributed.run(resumed, 3, str(tmp_path), 0, 2)[0] == pytest.approx(straight[2:], abs=1e-9)
    model = network("sage")
    model.load_state_dict(torch.load(tmp_path / "state.pt")["model"])
    data = data_of(50)
    out = model(data.x, data.edge_index)
    assert float(F.cross_entropy(out[data.train_mask], data.y[data.train_mask])) == pytest.approx(straight[2], abs=1e-9)


def averaged_alone(epochs: int) -> tuple[list[float], Tensor, Tensor]:
    """Returns losses of a trained copy, and outputs of two averages of its parameters, the second exponential."""
    data, model = data_of(50), copy.deepcopy(network("sage"))
    averages = averages_of(model)
    losses = []
    for _ in range(epochs):
        losses += train_alone(model, data, 1)
        for average in averages:
            average.update_parameters(model)
    return losses, *(average.eval()(data.x, data.edge_index).detach() for average in averages)


def averages_of(model: Any) -> list[Any]:
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)
    return [AveragedModel(model, use_buffers=True), AveragedModel(model, multi_avg_fn=ema, use_buffers=True)]


def averaged(rank: int, epochs: int) -> tuple[list[float], bool, list[Tensor]]:
    part = local(data_of(50))
    first = distribute(network("sage"), part)
    train(first, part, 1)  # so that it stores products and gradients
    before = copy.deepcopy(first.state_dict())
    first.module.load_state_dict(network("sage").state_dict())
    model = copy.deepcopy(first)
    assert model.graph is first.graph and model.module is not first.module
    first.module.load_state_dict(before)
    averages, losses = averages_of(model), []
    for _ in range(epochs):
        losses += train(model, part, 1)
        for average in averages:
            average.update_parameters(model)
    same = all(torch.equal(value, before[name]) for name, value in first.state_dict().items())
    # The state equals that of an average of the plain model, and an average of a distributed model loads it.
    state = averages[1].state_dict()
    AveragedModel(network("sage"), use_buffers=True).load_state_dict(state)
    averages[1] = AveragedModel(first, use_buffers=True)
    averages[1].load_state_dict(state)
    return losses, same, [average.eval()(part.x, part.edge_index).detach() for average in averages]


def test_a_copy_and_averages_of_a_model_equal_one_process():
    losses, *expected = averaged_alone(3)
    found = distributed.run(averaged, 2, 3)
    for each, same, _ in found:
        assert each == pytest.approx(losses, abs=1e-9)
        assert same, "the copied model is unchanged"
    for number, rows in enumerate(expected):
        assert torch.allclose(torch.cat([outs[number] for _, _, outs in found]), rows, atol=1e-9)


def test_a_model_is_not_saved_with_its_connections():
    part = local(data_of(50))
    model = distribute(network("gcn"), part)
    for each in (model, part):
        with pytest.raises(TypeError, match="save model.state_dict\\(\\) or model.module"):
            pickle.dumps(each)
        with pytest.raises(TypeError, match="hold connections to other ranks"):
            torch.save(each, io.BytesIO())
    assert copy.copy(model).module is model.module
    copied = copy.deepcopy(part)
    assert copied.ranks is part.ranks and copied.x is not part.x and torch.equal(copied.x, part.x)
    pickle.loads(pickle.dumps(model.module))


def test_a_model_inside_another_module_loads_what_it_saved():
    outer = torch.nn.ModuleDict({"first": distribute(network("gcn"), local(data_of(50)))})
    state = copy.deepcopy(outer.state_dict())
    assert state.keys() == torch.nn.ModuleDict({"first": network("gcn")}).state_dict().keys()
    with torch.no_grad():
        for parameter in outer.parameters():
            parameter.zero_()
    outer.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in outer.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*other"):
        outer.load_state_dict({**state, "first.other": torch.zeros(1)})


def example(rank: int, root: str, state: str, epochs: int) -> tuple[list[float], float]:
    import train_full

    return train_full.train(root, state, epochs, every=2)


def test_the_example_learns_and_resumes_from_its_checkpoint(tmp_path):
    salientpp.partition(synthetic(num_vertices=600, num_features=8), 2, tmp_path / "parts", [5, 5], 16)
    paths = str(tmp_path / "parts"), str(tmp_path / "state.pt")
    (losses, _), _ = distributed.run(example, 2, *paths, 4)
    (more, score), _ = distributed.run(example, 2, *paths, 6)
    assert len(losses) == 4 and len(more) == 2
    assert more[-1] < losses[0] and 0 <= score <= 1


def test_the_model_is_unchanged():
    data = data_of(50)
    part, model = local(data), network("gat")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    expected = model(data.x, data.edge_index)
    wrapped = distribute(model, part)
    assert torch.allclose(wrapped(part.x, part.edge_index), expected)
    with pytest.raises(ValueError, match="must have a row for each of this rank's 50 vertices"):
        wrapped(part.x[:3], part.edge_index)
    with pytest.raises(TypeError):
        wrapped(part.x, part.edge_index, no_such_argument=1)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
        assert all(isinstance(p, torch.nn.Parameter) for p in module._parameters.values() if p is not None)
    assert torch.equal(copy.deepcopy(model)(data.x, data.edge_index), model(data.x, data.edge_index))
    assert list(wrapped.state_dict()) == list(model.state_dict())


# --- failures -----------------------------------------------------------------------------------------------


class Fails(torch.nn.Module):
    def __init__(self, rank: int, kill: bool) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(WIDTH, WIDTH)
        self.rank, self.kill, self.calls = rank, kill, 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls += 1
        x = self.conv(x, edge_index)
        if self.rank == 1 and self.calls == 2:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("the user's mistake")
        return self.conv(x, edge_index)


def failing(rank: int, kill: bool) -> None:
    part = local(data_of(50), timeout=distributed.NEVER)
    model = distribute(Fails(rank, kill).double(), part)
    for _ in range(3):
        loss_mean(model(part.x, part.edge_index).square(), part).backward()


def test_a_failure_on_one_rank_ends_the_others_with_its_text():
    first, second, third = distributed.run(failing, 3, False, may_fail=True)
    assert second.kind == "LookupError"
    for other in (first, third):
        assert other.kind == "RankFailure"
        assert "rank 1 failed in the model's forward: LookupError: the user's mistake" in other.text


def test_a_killed_rank_is_named():
    first, second, third = distributed.run(failing, 3, True, may_fail=True)
    assert second.kind == "Died"
    assert all(other.kind == "RankFailure" and "rank 1" in other.text for other in (first, third))


def differing(rank: int, what: str) -> str:
    try:
        data = data_of(50)
        if what == "graph" and rank == 1:
            data = data_of(51)
        part = local(data, offsets=[0, 9] if what == "offsets" and rank == 1 else None)
        model: Any = pyg.GCN(WIDTH, 8 + (what == "model") * rank, 2, CLASSES)
        if what == "layer" and rank == 1:
            model = pyg.ChebConv(WIDTH, CLASSES, 2)
        distribute(model, part, layout="1d" if what == "layout" and rank else "halo")
    except ValueError as error:
        return str(error)
    return "none"


def other(data: Data, what: str) -> Data:
    """Returns data of the same sizes that differ in one thing."""
    if what == "edges":
        data.edge_index[0, 0] = (data.edge_index[0, 0] + 1) % 50
    elif what == "order of edges":
        data.edge_index = data.edge_index.flip(1)
    elif what == "mask":
        data.val_mask = data.train_mask
    elif what == "dtype":
        data.y = data.y.int()
    else:
        data[what][-1] += 1
    return data


#: What differs -> its name in the error.
DIFFERENCES = {
    "edges": "the edges",
    "order of edges": "the edges",
    "x": "x",
    "y": "y",
    "dtype": "y",
    "edge_weight": "edge_weight",
    "mask": "val_mask",
}


def opening_other_data(rank: int) -> dict[str, str]:
    found = {}
    for what in DIFFERENCES:
        with pytest.raises(ValueError) as error:
            local(other(data_of(50), what) if rank == 1 else data_of(50))
        found[what] = str(error.value)
    return found


def test_ranks_whose_data_differ_all_name_the_difference():
    words = "all ranks must open a graph with the same contents, but rank 0 and rank 1 differ in"
    expected = {what: f"{words} {name}" for what, name in DIFFERENCES.items()}
    assert distributed.run(opening_other_data, 3) == [expected] * 3


def opening_another_directory(rank: int, roots: list[str]) -> str:
    with pytest.raises(ValueError) as error:
        local(salientpp.load(roots[rank]))
    return str(error.value)


def test_ranks_that_open_different_directories_of_the_same_sizes_all_raise(tmp_path):
    roots = [str(tmp_path / name) for name in ("a", "b")]
    for root, what in zip(roots, ("x", "y")):
        salientpp.partition(other(data_of(50), what), 2, root, [5, 5], 16)
    words = "all ranks must open a graph with the same contents, but rank 0 and rank 1 differ in the directory"
    assert distributed.run(opening_another_directory, 2, roots) == [words] * 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "graph",
            "all ranks must open a graph with the same offsets, got [0, 25, 50] on rank 0 and [0, 25, 51] on rank 1",
        ),
        ("offsets", "offsets must ascend from 0 to 50, the number of vertices"),
        ("model", "all ranks must have the same model, but rank 0 and rank 1 differ in"),
        ("layer", "ChebConv rescales by the largest weight"),
        ("layout", "all ranks must have the same layout, got 'halo' on rank 0 and '1d' on rank 1"),
    ],
)
def test_ranks_that_differ_all_raise(what, words):
    for said in distributed.run(differing, 2, what):
        assert words in said, said


def too_many(rank: int, root: str) -> str:
    try:
        local(salientpp.load(root))
    except ValueError as error:
        return str(error)
    return "none"


def test_each_rank_needs_its_own_part(tmp_path):
    salientpp.partition(data_of(50), 2, tmp_path / "parts", [5, 5], 16)
    for said in distributed.run(too_many, 4, str(tmp_path / "parts")):
        assert (
            "has 2 parts, but full-graph training gives each of the 4 ranks its own part; start at most 2 ranks" in said
        )


def test_a_loss_that_is_already_a_mean_is_refused():
    part = local(data_of(50))
    with pytest.raises(ValueError, match="losses must be a tensor"):
        loss_mean(torch.tensor(1.0), part)
    with pytest.raises(AttributeError, match="this graph has no 'weights'; it has edge_index, n_id, x, y, edge_weight"):
        _ = part.weights
    with pytest.raises(TypeError, match="data must be a PartitionedGraph"):
        local(data_of(50).edge_index)
    with pytest.raises(TypeError, match="part must come from salientpp.fullgraph.local or salientpp.load"):
        distribute(network("gcn"), data_of(50))
