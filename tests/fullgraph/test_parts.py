"""Laws of full-graph training over a topology in parts: results equal those of the whole form, and no list of another part is read."""

from __future__ import annotations

from typing import Any

import distributed
import pytest
import torch
from fullgraph_training import data_of, network, train
from rare import rare
from torch import Tensor
from torch_geometric.data import Data
from two_forms import in_both_forms, own_copy

import salientpp
from salientpp.fullgraph import Constants, Preload, distribute, local, plan_for
from salientpp.fullgraph.local import LocalGraph

PARTS = 4


def graph() -> Data:
    data = data_of(90)
    data.edge_attr = torch.arange(data.num_edges).view(-1, 1).double()
    return data


def opened(root: str, is_copy: bool) -> LocalGraph:
    return local(own_copy(root, PARTS) if is_copy else salientpp.load(root))


def steps(rank: int, root: str, is_copy: bool) -> dict[str, Any]:
    """Trains with each kind of layout and plan, and returns the losses."""
    part = opened(root, is_copy)
    found: dict[str, Any] = {name: plain(getattr(part, name)) for name in ("edge_index", "e_id", "edge_attr")}
    found["edges of all"] = part.lists.num_edges
    for name in ("sage", "gcn", "gat"):
        found[name] = train(distribute(network(name), part), part, 2)
    weighted = distribute(network("weighted gcn"), part)
    found["weights"] = weighted(part.x, part.edge_index, part.edge_weight).tolist()
    for layout in ("cover", "1d"):
        found[layout] = train(distribute(network("gcn"), part, layout), part, 2)
    constants = Constants(1e-9, 1e-10, 1e-8)
    for kind in ("fetch", "cache", "recompute", "sum", "cut"):
        plan = plan_for(network("sage"), part, kind=kind, constants=constants)
        model = distribute(network("sage"), part, plan)
        found[kind] = train(model, part, 2), plan.summary(), plain(model.graph.edge_attr)
    return found


def plain(tensor: Tensor) -> tuple[str, list[Any]]:
    return str(tensor.dtype), tensor.tolist()


@pytest.mark.parametrize(
    ("world_size", "copies"),
    [(1, [False]), (2, [True]), *rare(*((size, [False, True]) for size in (1, 2, 4)))],
    ids=str,
)
def test_both_forms_train_alike_and_a_rank_needs_no_list_of_another_part(tmp_path, world_size, copies):
    whole, parts = in_both_forms(tmp_path, graph(), PARTS)
    expected = distributed.run(steps, world_size, whole, False)
    for is_copy in copies:
        for rank, (a, b) in enumerate(zip(expected, distributed.run(steps, world_size, parts, is_copy), strict=True)):
            for name, value in a.items():
                assert value == b[name], f"{name} on rank {rank}, copy: {is_copy}"


def timed(rank: int, root: str) -> float:
    """Returns the difference between the rows of one process's model and those under a plan for which steps were timed."""
    part = opened(root, True)
    model = distribute(network("gat"), part)
    before = model(part.x, part.edge_index).detach()
    after = distribute(model.module, part, "auto")(part.x, part.edge_index).detach()
    return float((after - before).abs().max())


def test_steps_are_timed_with_lists_from_their_owners(tmp_path):
    _, parts = in_both_forms(tmp_path, graph(), PARTS)
    assert max(distributed.run(timed, 2, parts)) < 1e-10


def lists_of_all(rank: int, root: str) -> list[Any]:
    """Returns the edges into every vertex of other ranks, in descending order, from their owners."""
    part = opened(root, True)
    begin, end = part.offsets[rank : rank + 2]
    ids = torch.cat([torch.arange(begin), torch.arange(end, part.num_vertices)]).flip(0)
    edges = part.others.into(ids, with_rows=True)
    degrees = part.others.degrees(ids.flip(0)).flip(0)
    found = [ids, edges.source, edges.target, edges.e_id, edges.rows("edge_attr"), edges.rows("edge_weight"), degrees]
    return [each.numpy() for each in found]


def test_lists_from_their_owners_equal_those_of_the_whole_graph(tmp_path):
    whole, parts = in_both_forms(tmp_path, graph(), PARTS)
    part = salientpp.load(whole)
    lists, rows = part.graph, part.edge_rows()
    for found in distributed.run(lists_of_all, PARTS, parts):
        ids, source, target, e_id, attr, weight, degrees = map(torch.from_numpy, found)
        expected = torch.cat([torch.arange(lists.indptr[v], lists.indptr[v + 1]) for v in ids])
        assert torch.equal(e_id, expected)
        assert torch.equal(source, lists.indices[expected].long())
        assert torch.equal(target, torch.repeat_interleave(torch.arange(ids.numel()), lists.in_degree()[ids]))
        assert torch.equal(attr, rows["edge_attr"][expected]) and torch.equal(weight, rows["edge_weight"][expected])
        assert torch.equal(degrees, lists.in_degree()[ids])


def one_owner(rank: int, root: str) -> list[float]:
    part = opened(root, True)
    plan = plan_for(network("sage"), part, kind="recompute", constants=Constants(1e-9, 1e-10, 1e-8))
    return train(distribute(network("sage"), part, plan), part, 1)


def test_a_rank_may_own_all_vertices(tmp_path):
    data = graph()
    _, parts = in_both_forms(tmp_path, data, PARTS, method=torch.full((data.num_nodes,), 1))
    assert len(set(map(tuple, distributed.run(one_owner, PARTS, parts)))) == 1


def masks(rank: int, offsets: list[int], preload: Preload | None) -> list[Any]:
    data = masked()
    part = local(data, offsets=offsets, preload=preload, ranks_per_host=None if preload is None else 1)
    columns = [part.my_mask, *part.train_mask.t()]
    return [part.num_classes, [part.n_id[mask.nonzero().flatten()].tolist() for mask in columns]]


def masked() -> Data:
    data = data_of(30)
    data.my_mask = torch.arange(30) % 3 == 0
    data.train_mask = torch.stack([torch.arange(30) % 4 == 0, torch.arange(30) % 5 == 0], 1)
    data.y = torch.arange(30).double() % 2 * 3  # two classes, none of which is the 1 of a rank without vertices
    return data


@pytest.mark.parametrize("preload", [None, Preload(1)], ids=str)
@pytest.mark.parametrize("offsets", [[0, 12, 30], [0, 30, 30]], ids=str)
def test_each_vertex_of_any_mask_counts_on_one_rank(offsets, preload):
    data = masked()
    expected = [mask.nonzero().flatten().tolist() for mask in (data.my_mask, *data.train_mask.t())]
    found = distributed.run(masks, 2, offsets, preload)
    assert [classes for classes, _ in found] == [2, 2]
    assert [sorted(sum(ids, [])) for ids in zip(*(ids for _, ids in found), strict=True)] == expected
