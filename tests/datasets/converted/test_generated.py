"""Laws of the graphs that benchmarks generate on disk: memory does not change them, and they have the requested shape."""

from __future__ import annotations

import json
from pathlib import Path

import large_graph
import numpy as np
import pytest
import torch
from large_graph import Model, generate

from salientpp.datasets import load_dataset
from salientpp.datasets.converted.budget import Budget
from salientpp.datasets.converted.convert import Options, write_converted

N = 20_000


def model(**more) -> Model:
    given = {
        "seed": 3,
        "num_vertices": N,
        "num_pairs": 10 * N,
        "num_classes": 5,
        "num_communities": 20,
        "near": 0.56,
        "within_class": 0.24,
        "exponent": 2.5,
        "num_features": 4,
        "signal": 1.0,
        "label_noise": 0.1,
        "fractions": (0.01, 0.001, 0.002),
    }
    return Model(**{**given, **more})


def write(root: Path, working: int, **more) -> dict[str, str]:
    write_converted(model(**more).source(), root, Budget(0, working), Options(False, {"x": "fp16"}, False))
    return {name: entry["sha256"] for name, entry in json.loads((root / "manifest.json").read_text())["files"].items()}


def test_memory_does_not_change_the_files_of_a_seed(tmp_path):
    files = [write(tmp_path / str(working), working) for working in (200_000, 1_000_003, 10**9)]
    assert files[0] == files[1] == files[2]
    other = write(tmp_path / "other", 10**9, seed=4)
    assert all(other[name] != checksum for name, checksum in files[0].items())


@pytest.mark.parametrize("num_vertices", [2, 3, 1000, 4096, 4097, 65_537])
def test_ids_are_an_invertible_permutation(num_vertices):
    made = model(num_vertices=num_vertices)
    ranks = np.arange(num_vertices)
    ids = made.ids(ranks)
    assert np.array_equal(np.sort(ids), ranks) and np.array_equal(made.ranks_of(ids), ranks)
    if num_vertices >= 1000:
        assert abs(np.corrcoef(ranks, ids)[0, 1]) < 0.2, "ids say little about ranks"


def test_a_generated_graph_has_a_power_law_and_communities(tmp_path):
    write(tmp_path / "g", 10**9)
    data = load_dataset(f"converted:{tmp_path / 'g'}")
    indptr, indices = data.adj_t.crow_indices(), data.adj_t.col_indices().long()
    degree = indptr.diff()
    assert 0.85 * 20 < float(degree.float().mean()) <= 20
    # The k-th largest degree of a power law falls as k^(-1 / (exponent - 1)). A factor of 100 in k is a factor of 100^(2/3) = 21.5 in degree.
    largest = degree.sort(descending=True).values.float()
    assert 10 < float(largest[50] / largest[5000]) < 40
    made = model()
    community = torch.from_numpy(made.ranks_of(np.arange(N)) % made.num_communities)
    target = torch.repeat_interleave(torch.arange(N), degree)
    is_near = community[target] == community[indices]
    is_within = community[target] % 5 == community[indices] % 5
    # Bounds: the shares that are drawn, plus other edges that are near by chance, minus merged repeats, most of which are near.
    assert 0.58 < float(is_near.float().mean()) < 0.56 + 0.24 / 4 + 0.2 / 20 + 0.01
    assert 0.80 < float(is_within.float().mean()) < 0.8 + 0.2 / 5 + 0.01
    agreed = float((data.y == community % 5).float().mean())
    assert abs(agreed - (0.9 + 0.1 / 5)) < 0.01
    assert abs(int(data.train_mask.sum()) - 0.01 * N) < 5 * (0.01 * N) ** 0.5
    assert not bool((data.train_mask & data.test_mask).any())
    # The graph is symmetric, without loops and repeats.
    key, turned = target * N + indices, indices * N + target
    assert torch.equal(key, turned.sort().values) and int(key.unique().numel()) == key.numel()
    assert not bool((target == indices).any())


def test_class_means_of_features_have_the_norm_of_the_signal(tmp_path):
    made = model(num_features=64, signal=3.0)
    x = torch.cat([made.rows("x", 0, block) for block in range(-(-N // large_graph._BLOCK))])
    classes = torch.from_numpy(made.classes(np.arange(N)))
    centres = torch.stack([x[classes == label].mean(dim=0) for label in range(5)])
    assert torch.allclose(centres.norm(dim=1), torch.full((5,), 3.0), atol=0.3)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"num_vertices": 1}, "num_vertices must be an integer >= 2"),
        ({"num_vertices": 2**33}, "num_vertices must be at most"),
        ({"average_degree": 0}, r"average_degree must be in \(0, "),
        ({"exponent": 2}, "exponent must be > 2"),
        ({"homophily": 1.5}, r"homophily must be in \[0, 1\]"),
        ({"train_fraction": 0.999, "val_fraction": 0.5}, "must be <= 1"),
        ({"dtype": "int8"}, "dtype must be one of fp64"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"memory": "1MB"}, "memory=1MB is too little"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path, wrong, words):
    with pytest.raises(ValueError, match=words):
        generate(tmp_path / "g", **{"num_vertices": 1000, **wrong})
    assert not (tmp_path / "g").exists()


def test_the_script_and_the_function_write_the_same_graph(tmp_path, monkeypatch):
    options = ["--num-vertices", "3000", "--average-degree", "6", "--num-features", "4"]
    monkeypatch.setattr("sys.argv", ["large_graph.py", str(tmp_path / "a"), *options])
    large_graph.main()
    generate(tmp_path / "b", num_vertices=3000, average_degree=6, num_features=4, memory="16GB")
    one, other = (load_dataset(f"converted:{tmp_path / name}") for name in ("a", "b"))
    assert torch.equal(one.x, other.x) and torch.equal(one.adj_t.col_indices(), other.adj_t.col_indices())
