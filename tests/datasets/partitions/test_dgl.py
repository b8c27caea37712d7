"""Laws of DGL's assignments: every vertex gets the part that DGL gave it.

The tests write files in the format that DGL documents, since DGL is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import random_data, random_hetero

import salientpp
from salientpp.cli import main
from salientpp.datasets import load_dgl_assignment


def written(folder: Path, node_map: object, num_parts: object = 2) -> Path:
    """Writes the config of `partition_graph`, with entries that are read and some that are not."""
    path = folder / "g.json"
    meta = {
        "graph_name": "g",
        "num_parts": num_parts,
        "node_map": node_map,
        "halo_hops": 1,
        "part-0": {"part_graph": "part0/graph.dgl"},
    }
    path.write_text(json.dumps(meta))
    return path


def test_original_id_maps_numbers_of_dgl_to_ids_of_the_data(tmp_path):
    """Random parts; DGL numbers the vertices part by part."""
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        parts = torch.randint(4, (50,), generator=rng)
        new_order = torch.argsort(parts, stable=True)  # the vertices with numbers 0, 1, ...
        ends = torch.bincount(parts, minlength=4).cumsum(0).tolist()
        path = written(tmp_path, {"_N": [list(each) for each in zip([0, *ends[:-1]], ends)]}, 4)
        assignment, num_parts = load_dgl_assignment(path, new_order)
        assert num_parts == 4 and assignment.dtype == torch.int64
        assert torch.equal(assignment, parts)
        assert torch.equal(load_dgl_assignment(path)[0], parts.sort().values)  # data in DGL's order


def test_types_may_interleave_their_numbers(tmp_path):
    # Part 0 has authors 0 to 2 and papers 3 to 7, part 1 authors 8 and 9 and papers 10 to 13.
    path = written(tmp_path, {"author": [[0, 3], [8, 10]], "paper": [[3, 8], [10, 14]]})
    assignment, _ = load_dgl_assignment(path)
    assert {name: parts.tolist() for name, parts in assignment.items()} == {
        "author": [0, 0, 0, 1, 1],
        "paper": [0, 0, 0, 0, 0, 1, 1, 1, 1],
    }
    order = {"author": torch.tensor([4, 0, 1, 2, 3]), "paper": torch.arange(9).flip(0)}
    assignment, _ = load_dgl_assignment(path, order)
    assert assignment["author"].tolist() == [0, 0, 1, 1, 0]
    assert assignment["paper"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("where", ["as it was written", "beside"])
def test_a_file_of_part_ids_is_read_if_numbers_were_kept(tmp_path, where):
    parts = np.array([1, 0, 1, 1, 0], dtype=np.int32)
    np.save(tmp_path / "node_map.npy", parts)
    named = tmp_path / "node_map.npy" if where == "as it was written" else "/data/elsewhere/node_map.npy"
    assignment, num_parts = load_dgl_assignment(written(tmp_path, str(named)))
    assert assignment.tolist() == parts.tolist() and num_parts == 2


@pytest.mark.parametrize("reordered", [False, True])
def test_the_command_uses_the_parts_of_dgl(tmp_path, capsys, reordered):
    data = random_data()
    parts = torch.randint(3, (data.num_nodes,), generator=torch.Generator().manual_seed(1))
    order = torch.argsort(parts, stable=True)
    ends = torch.bincount(parts, minlength=3).cumsum(0).tolist()
    path = str(written(tmp_path, {"_N": [list(each) for each in zip([0, *ends[:-1]], ends)]}, 3))
    if reordered:
        np.save(tmp_path / "orig_nids.npy", order.numpy())
        path += f",original_id={tmp_path / 'orig_nids.npy'}"
    torch.save(data, tmp_path / "graph.pt")
    words = ["partition", f"pyg:{tmp_path / 'graph.pt'}", str(tmp_path / "d"), "--parts", "3", "--method", path]
    assert main(words) == 0, capsys.readouterr().err
    made = salientpp.load(tmp_path / "d")
    wanted = parts if reordered else parts.sort().values
    for part_id in range(3):
        begin, end = made.book.range_of(part_id)
        assert (wanted[made.original_id(torch.arange(begin, end))] == part_id).all()


def test_a_typed_graph_gets_the_parts_of_dgl(tmp_path):
    data = random_hetero()
    halves = {
        name: [[0, data[name].num_nodes // 2], [data[name].num_nodes // 2, data[name].num_nodes]]
        for name in data.node_types
    }
    assignment, num_parts = load_dgl_assignment(written(tmp_path, halves))
    made = salientpp.partition(data, num_parts, tmp_path / "d", [3, 2], 8, seeds=("paper", "all"), method=assignment)
    for name in data.node_types:
        begin, end = made.books[name].range_of(1)
        assert (assignment[name][made.original_id(torch.arange(begin, end), name)] == 1).all()
        assert end - begin == int(assignment[name].sum())
    assert made.num_parts == 2


@pytest.mark.parametrize(
    "node_map, num_parts, words",
    [
        ({"_N": [[0, 3], [3, 5]]}, 0, "expected num_parts, an integer above 0, as DGL writes it, got 0"),
        ({"_N": [[0, 3], [3, 5]]}, "2", "expected num_parts"),
        ({"_N": [[0, 3], [3, 5]]}, True, "expected num_parts"),
        ({"_N": [[0, 3], [3, 5]]}, 3, "expected node_map to have 3 pairs"),
        ({"paper": [[0, 3], [3]]}, 2, "expected node_map of 'paper' to have 2 pairs"),
        ({"_N": [[0, 3], [2, 5]]}, 2, "expected the ranges of node_map to ascend"),
        ({"_N": [[3, 0], [3, 5]]}, 2, "expected node_map to have 2 pairs"),
        ({"_N": [[0, 3.0], [3, 5]]}, 2, "expected node_map to have 2 pairs"),
        ({}, 2, "node_map must be ranges by node type, or the path of a file"),
        (None, 2, "node_map must be ranges"),
        ("nowhere.npy", 2, "nowhere.npy: not an .npy file of part ids"),
    ],
)
def test_a_config_with_wrong_entries_is_refused(tmp_path, node_map, num_parts, words):
    with pytest.raises(ValueError, match=f"g.json.*{words}|{words}"):
        load_dgl_assignment(written(tmp_path, node_map, num_parts))


@pytest.mark.parametrize("text, words", [("{", "not JSON"), ("[]", "expected an object"), (None, "cannot be read")])
def test_a_file_that_is_not_a_config_is_refused(tmp_path, text, words):
    path = tmp_path / "g.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_dgl_assignment(path)


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.arange(4), r"original_id must be integers of shape \[5\]"),
        (torch.rand(5), r"original_id must be integers of shape \[5\]"),
        ([0, 1, 2, 3, 4], "original_id must be integers"),
        (torch.tensor([0, 1, 2, 3, 5]), r"original_id\[4\] must be in \[0, 5\), got 5"),
        (torch.tensor([0, 1, 2, 2, 4]), "must have every id once, but lacks 3"),
    ],
)
def test_an_original_id_that_is_not_a_permutation_is_refused(tmp_path, ids, words):
    with pytest.raises(ValueError, match=words):
        load_dgl_assignment(written(tmp_path, {"_N": [[0, 3], [3, 5]]}), ids)


def test_original_ids_must_name_every_type(tmp_path):
    path = written(tmp_path, {"a": [[0, 1], [1, 2]], "b": [[2, 3], [3, 4]]})
    with pytest.raises(ValueError, match=r"must be a mapping from \['a', 'b'\] to tensors, got \['a'\]"):
        load_dgl_assignment(path, {"a": torch.arange(2)})
    with pytest.raises(ValueError, match=r"must be a mapping from \['a', 'b'\] to tensors, got Tensor"):
        load_dgl_assignment(path, torch.arange(2))


def test_part_ids_out_of_range_or_with_original_ids_are_refused(tmp_path):
    np.save(tmp_path / "node_map.npy", np.array([0, 2]))
    path = written(tmp_path, "node_map.npy")
    with pytest.raises(ValueError, match=r"entry 1 must be in \[0, 2\), got 2"):
        load_dgl_assignment(path)
    with pytest.raises(ValueError, match="kept the numbers of the data; leave out original_id"):
        load_dgl_assignment(path, torch.arange(2))


def test_the_command_names_an_original_id_file_that_is_missing(tmp_path, capsys):
    torch.save(random_data(), tmp_path / "graph.pt")
    path = written(tmp_path, {"_N": [[0, 3], [3, 5]]})
    words = ["partition", f"pyg:{tmp_path / 'graph.pt'}", str(tmp_path / "d"), "--parts", "2", "--method"]
    assert main([*words, f"{path},original_id=nowhere.npy"]) == 2
    assert "original_id must be an .npy file of ids, got nowhere.npy" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
