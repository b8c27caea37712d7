"""Laws of the generated graph of papers, authors and institutions."""

from __future__ import annotations

import inspect

import pytest
import torch
from odd_values import ODD_VALUES
from torch import Tensor
from torch_geometric.data import HeteroData

from salientpp.datasets import load_dataset, synthetic_mag

RELATIONS = [("author", "writes", "paper"), ("author", "affiliated_with", "institution"), ("paper", "cites", "paper")]
SMALL = {
    "num_papers": 60,
    "citations_per_paper": 4,
    "num_features": 2,
    "community_size": 20,
    "papers_per_institution": 20,
}


@pytest.fixture(scope="module")
def generated() -> HeteroData:
    return synthetic_mag(num_papers=10_000, num_classes=8, num_features=32, seed=1)


def keys_of(data: HeteroData, name: tuple[str, str, str]) -> Tensor:
    source, target = data[name].edge_index
    return source * data[name[2]].num_nodes + target


def assert_looks_as_promised(data: HeteroData) -> None:
    paper = data["paper"]
    assert set(data.node_types) == {"paper", "author", "institution"}
    assert set(paper.keys()) == {"x", "y", "year", "train_mask", "val_mask", "test_mask", "num_nodes"}
    assert set(data["author"].keys()) == set(data["institution"].keys()) == {"num_nodes"}
    assert paper.x.dtype == torch.float16 and bool(paper.x.isfinite().all())
    assert paper.y.dtype == paper.year.dtype == torch.int64 and int(paper.y.min()) >= -1
    masks = torch.stack([paper.train_mask, paper.val_mask, paper.test_mask])
    assert torch.equal(masks.sum(0), (paper.y >= 0).long()), "labelled papers are in exactly one split, others in none"
    assert bool((paper.year[paper.val_mask] == 2019).all()) and bool((paper.year[paper.test_mask] == 2020).all())
    for source, relation, target in RELATIONS:
        ends = data[source, relation, target].edge_index
        keys = keys_of(data, (source, relation, target))
        assert keys.unique().numel() == keys.numel(), "no edge occurs twice"
        back = data[target, f"rev_{relation}", source].edge_index.flip(0)
        assert torch.equal((back[0] * data[target].num_nodes + back[1]).sort().values, keys.sort().values)
        for row, end in enumerate((source, target)):
            assert not ends.numel() or 0 <= int(ends[row].min()) <= int(ends[row].max()) < data[end].num_nodes
    citing, cited = data["paper", "cites", "paper"].edge_index
    assert bool((paper.year[citing] >= paper.year[cited]).all()), "no paper cites a newer one"
    assert bool((citing != cited).all())


def test_the_schema_equals_mag240m_and_sizes_are_as_requested(generated):
    assert_looks_as_promised(generated)
    assert {name: generated[name].num_nodes for name in generated.node_types} == {
        "paper": 10_000,
        "author": 10_000,
        "institution": 20,
    }
    sizes = [generated[name].edge_index.size(1) for name in RELATIONS]
    assert sizes == [30_000, 4_000, 100_000]
    assert int(generated["paper"].y.max()) == 7
    labelled = float((generated["paper"].y >= 0).double().mean())
    assert labelled == pytest.approx(0.4, abs=0.02)
    assert 0.5 < float(generated["paper"].train_mask.sum()) / (labelled * 10_000) < 0.95


def test_the_same_seed_gives_the_same_arrays_and_another_seed_another_graph():
    a, b, c = (synthetic_mag(**SMALL, seed=seed) for seed in (3, 3, 4))
    for name in a.edge_types:
        assert torch.equal(a[name].edge_index, b[name].edge_index)
    for key in ("x", "y", "year", "train_mask"):
        assert torch.equal(a["paper"][key], b["paper"][key])
    assert any(not torch.equal(a[name].edge_index, c[name].edge_index) for name in a.edge_types)
    wide = synthetic_mag(**{**SMALL, "num_features": 5}, seed=3)
    assert torch.equal(wide["paper", "cites", "paper"].edge_index, a["paper", "cites", "paper"].edge_index)
    assert torch.equal(wide["paper"].y, a["paper"].y)


def test_neighbours_tell_the_label_better_than_a_paper_alone(generated):
    """Compares nearest class means by the features of a paper with means over its neighbours."""
    paper, num_papers = generated["paper"], 10_000
    x = paper.x.float()

    def mean_over(rows: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
        total = torch.zeros(size, rows.size(1)).index_add_(0, target, rows[source])
        return total / torch.bincount(target, minlength=size).clamp(min=1).view(-1, 1)

    def accuracy(rows: Tensor) -> float:
        centre = torch.stack([rows[paper.train_mask & (paper.y == label)].mean(0) for label in range(8)])
        guess = torch.cdist(rows, centre).argmin(1)
        return float((guess == paper.y)[paper.test_mask].double().mean())

    citing, cited = generated["paper", "cites", "paper"].edge_index
    author, written = generated["author", "writes", "paper"].edge_index
    by_citation = mean_over(
        torch.cat([x, x]), torch.cat([citing, cited + num_papers]), torch.cat([cited, citing]), num_papers
    )
    by_author = mean_over(mean_over(x, written, author, num_papers), author, written, num_papers)
    alone, cites, writes = accuracy(x), accuracy(by_citation), accuracy(by_author)
    assert cites > alone + 0.2 and writes > alone + 0.1, (alone, cites, writes)
    assert alone > 0.125 + 0.1 and cites < 0.95, "features help to tell the class, and label noise limits the accuracy"


def test_institutions_and_authors_stay_near_their_communities(generated):
    """Two papers of one author share the class far more often than two papers at random."""
    y = generated["paper"].y
    author, paper = generated["author", "writes", "paper"].edge_index
    order = author.argsort(stable=True)
    first, second = order[:-1], order[1:]
    known = (author[first] == author[second]) & (y[paper[first]] >= 0) & (y[paper[second]] >= 0)
    same = (y[paper[first]] == y[paper[second]])[known].double().mean()
    assert float(same) > 0.4 and int(known.sum()) > 1000
    home = torch.zeros(10_000, 8).index_put_((author, y[paper].clamp(min=0)), (y[paper] >= 0).float(), accumulate=True)
    person, institution = generated["author", "affiliated_with", "institution"].edge_index
    of_place = torch.zeros(20, 8).index_add_(0, institution, home[person])
    assert float((of_place.max(1).values / of_place.sum(1)).mean()) > 0.3, "by chance 0.125"


def test_a_name_with_parameters_loads_the_graph():
    data = load_dataset("synthetic-mag:num_papers=60,citations_per_paper=4,seed=2")
    assert_looks_as_promised(data)
    assert data["paper"].num_nodes == 60
    with pytest.raises(ValueError, match="synthetic-mag has no parameter 'num_paper'.*Did you mean num_papers"):
        load_dataset("synthetic-mag:num_paper=60")


@pytest.mark.parametrize("key", list(inspect.signature(synthetic_mag).parameters))
def test_an_odd_parameter_gives_a_graph_or_an_error_that_names_it(key):
    refused = 0
    for value in ODD_VALUES:
        try:
            assert_looks_as_promised(synthetic_mag(**{**SMALL, key: value}))
        except ValueError as error:
            assert key in str(error) or "GB of memory" in str(error) or "distinct edges" in str(error), (value, error)
            refused += 1
    assert refused >= 5


def test_a_tiny_graph_is_valid():
    for seed in range(20):
        data = synthetic_mag(
            num_papers=5, citations_per_paper=1, authors_per_paper=1, papers_per_author=1, num_classes=2, seed=seed
        )
        assert_looks_as_promised(data)
