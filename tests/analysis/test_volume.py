"""Laws of the analysis: its counts equal the loader's, its oracle is a lower bound, and its forecast equals the formula."""

from __future__ import annotations

import csv
import json
import sys

import distributed
import numpy as np
import pytest
import torch
from graphs import random_data, random_hetero, real_data
from rare import rare
from torch_geometric.sampler import NegativeSampling

import salientpp
from salientpp import NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.analysis.job import Job, placed
from salientpp.cli import given_graph, main
from salientpp.files import write_whole
from salientpp.ranks.partition_book import PartitionBook
from salientpp.vip.policies import POLICIES, Workload, plan_cache, score

FANOUTS, BATCH, ALPHAS = [5, 3, 2], 16, [0.0, 0.1, 0.3, 1.0, 9.0]


def _live(rank: int, root: str, policy: str) -> list[list[int]]:
    """Counts the remote rows of two epochs for each α, with a running loader."""
    rows = []
    for alpha in ALPHAS:
        loader = NeighborLoader(
            salientpp.load(root),
            FANOUTS,
            "train",
            batch_size=BATCH,
            shuffle=True,
            seed=5,
            replication_factor=alpha,
            policy=policy,
        )
        for _ in range(2):
            for _ in loader:
                pass
        rows.append(loader.stats().rows_remote)
    return rows


@pytest.mark.parametrize(
    ("num_parts", "policy"),
    [(2, "vip"), (4, "simulation"), *rare((2, "degree"), (4, "degree"), (4, "vip"), (2, "simulation"))],
)
def test_the_count_equals_a_live_run_with_the_same_seed(tmp_path, num_parts, policy):
    part = salientpp.partition(random_data(), num_parts, tmp_path / "parts", FANOUTS, BATCH)
    live = np.array(distributed.run(_live, num_parts, str(tmp_path / "parts"), policy))
    analysis = analyze(
        part,
        Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=2, seed=5),
        Ways(replication_factors=ALPHAS, policies=[policy]),
    )
    counted = analysis.of(way="cache", policy=policy)
    for volume, by_rank in zip(counted, live.T):
        assert list(np.array(volume.remote_rows_per_rank) * 2) == by_rank.tolist()
        assert volume.remote_rows_per_epoch * 2 == by_rank.sum()


@pytest.fixture(scope="module")
def small() -> tuple:
    data = random_data(num_vertices=600, num_edges=4000, seed=3)
    return data, analyze(
        data,
        [Batches(num_neighbors=own, batch_size=BATCH, epochs=4) for own in (FANOUTS, [2])],
        Ways(replication_factors=ALPHAS),
        parts=3,
    )


def test_no_static_cache_beats_the_oracle(small):
    _, analysis = small
    for volume in analysis.of(way="cache"):
        best = next(
            v
            for v in analysis.of(way="cache")
            if (v.num_neighbors, v.policy, v.replication_factor)
            == (volume.num_neighbors, "oracle", volume.replication_factor)
        )
        assert volume.remote_rows_per_epoch >= best.remote_rows_per_epoch
        assert volume.ratio_to_oracle is None or volume.ratio_to_oracle >= 1


def test_a_larger_cache_never_fetches_more_and_a_full_one_nothing(small):
    _, analysis = small
    for fanouts in ((5, 3, 2), (2,)):
        for policy in {volume.policy for volume in analysis.of(way="cache")}:
            rows = [
                v.remote_rows_per_epoch
                for v in analysis.of(way="cache")
                if (v.num_neighbors, v.policy) == (fanouts, policy)
            ]
            assert rows == sorted(rows, reverse=True)
            assert rows[0] == analysis.of(num_neighbors=fanouts)[0].rows_without_cache
            if policy in ("vip", "random", "oracle"):
                assert rows[-1] == 0


def expected_remote_rows(probability: torch.Tensor, book: PartitionBook, part_id: int, cached: torch.Tensor) -> float:
    """Returns the rows that a batch of a part fetches on average: the sum of the probabilities of remote, uncached vertices."""
    is_fetched = torch.ones_like(probability, dtype=torch.bool)
    is_fetched[slice(*book.range_of(part_id))] = False
    is_fetched[cached] = False
    return float(probability[is_fetched].sum(dtype=torch.float64))


def test_the_forecast_is_the_sum_of_probabilities_of_uncached_remote_vertices(tmp_path):
    data = random_data(num_vertices=500, num_edges=3000, seed=4)
    part = salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH, seeds="all", split={})
    analysis = analyze(
        part,
        Batches(num_neighbors=FANOUTS, batch_size=BATCH, seeds="all"),
        Ways(replication_factors=ALPHAS, policies=["vip", "degree", "random"]),
        predict_only=True,
    )
    assert analysis.epochs == 0
    largest = max(part.book.size_of(0), part.book.size_of(1))
    for volume in analysis.of(way="cache"):
        assert volume.remote_rows_per_epoch is None and volume.calibrated_rows_per_epoch is None
        expected = 0.0
        for part_id in range(2):
            workload = Workload(part.graph, part.book, part_id, part.split("all", part_id), FANOUTS, BATCH)
            cached = plan_cache(score(volume.policy, workload), part.book, part_id, volume.replication_factor)
            full = expected_remote_rows(score("vip", workload), part.book, part_id, cached)
            last = salientpp.inclusion_probability(part.graph, workload.seeds, FANOUTS, largest % BATCH or BATCH)
            expected += full * (largest // BATCH)
            if largest % BATCH:
                expected += expected_remote_rows(last, part.book, part_id, cached)
        assert volume.predicted_rows_per_epoch == pytest.approx(expected, rel=1e-5)


def test_at_one_hop_the_forecast_is_right_and_the_calibration_agrees(small):
    _, analysis = small
    for volume in analysis.of(way="cache"):
        if volume.num_neighbors == (2,) and volume.policy == "vip" and volume.replication_factor < 1:
            spread = 6 * volume.remote_rows_std / 2 + 1  # 4 epochs
            assert abs(volume.predicted_rows_per_epoch - volume.remote_rows_per_epoch) < spread
            assert (
                abs(volume.calibrated_rows_per_epoch - volume.remote_rows_per_epoch)
                < 6 * volume.calibrated_error + spread
            )


def test_more_rows_on_the_device_leave_fewer_to_copy(small):
    _, analysis = small
    for numbers in analysis.num_neighbors:
        found = [row for row in analysis.device_rows if row.num_neighbors == numbers]
        rows = [row.rows_per_batch_vip_order for row in found]
        assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1] == 0
        assert [row.device_bytes for row in found] == sorted(row.device_bytes for row in found)
        assert all(row.rows_per_batch_vip_order <= row.rows_per_batch_original_order + 1e-6 for row in found)


def test_parts_without_seeds_are_analyzed():
    data = random_data()
    assignment = (~data.train_mask).long()  # part 0 has every training vertex
    analysis = analyze(data, Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=1), parts=2, method=assignment)
    volume = next(v for v in analysis.of(way="cache") if (v.policy, v.replication_factor) == ("vip", 0))
    assert volume.remote_rows_per_rank[0] > 0 and volume.remote_rows_per_rank[1] == 0


@pytest.mark.parametrize(
    ("batches", "ways", "options", "text"),
    [
        ({}, {}, {"parts": None}, "parts must be given"),
        ({}, {}, {"parts": 0}, "num_parts must be an integer >= 1, got 0"),
        ({}, {"policies": ["vip", "lru"]}, {}, "policies must be among .*oracle, got 'lru'"),
        ({"epochs": 0}, {}, {}, "epochs must be >= 1, got 0"),
        ({"batch_size": 0}, {}, {}, "batch_size must be >= 1, got 0"),
        ({"num_neighbors": [3, -3]}, {}, {}, r"num_neighbors\[1\] must be an integer >= 0, or -1 for all neighbours, got -3"),
        ({}, {"replication_factors": [-1]}, {}, "replication_factor must be >= 0"),
        ({"seeds": "tests"}, {}, {}, "seeds must be 'all' or a split of the data"),
        ({"disjoint": True}, {}, {}, "are counted only on a dataset directory"),
        ({}, {"lookahead": 2}, {"ranks_per_host": 2}, "lookahead, .* are counted only for plain draws .* one rank per part and host"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(batches, ways, options, text):
    with pytest.raises(ValueError, match=text):
        analyze(random_data(), Batches(**batches), Ways(**ways), **{"parts": 2, **options})


@pytest.mark.parametrize("store_as", [None, {"x": "int8"}])
def test_sums_are_counted_only_for_rows_that_are_not_narrowed(tmp_path, store_as):
    data = random_data()
    data.num_nodes = data.train_mask.numel()
    data.x = None if store_as is None else torch.rand(data.num_nodes, 16)
    part = salientpp.partition(data, 2, tmp_path / "d", [3, 2], 8, store_as=store_as)
    if store_as is None:
        (volume,) = analyze(part, Batches(epochs=1), Ways(["vip"], [0], sums=True)).of(way="sums")
        assert volume.row_bytes == 0 and volume.summed.sums_per_epoch == 0
    else:
        with pytest.raises(
            ValueError, match=r"partial_aggregation: .* stores x as int8, and rows are summed in their own format"
        ):
            analyze(part, Batches(epochs=1), Ways(["vip"], [0], sums=True))


def test_batches_counted_together_may_differ_only_in_fanouts():
    with pytest.raises(ValueError, match="batches must hold at least one entry"):
        analyze(random_data(), [], parts=2)
    with pytest.raises(ValueError, match="batches may differ only in num_neighbors, but differ in seed"):
        analyze(random_data(), [Batches(), Batches(seed=1)], parts=2)


def test_the_command_writes_the_figures_that_it_shows(tmp_path, capsys):
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv")}
    command = [
        "analyze",
        "synthetic:num_vertices=2000",
        "--parts",
        "2",
        "--num-neighbors",
        "5,3",
        "--num-neighbors",
        "2,2",
        "--epochs",
        "2",
    ]
    command += [
        "--batch-size",
        "32",
        "--replication-factors",
        "0,.1,1",
        "--json",
        str(out["json"]),
        "--csv",
        str(out["csv"]),
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "num_neighbors [5, 3]" in text and "geometric mean" in text
    assert "`salientpp plan` chooses these sizes" in " ".join(text.split())
    result = json.loads(out["json"].read_text())
    assert (result["schema"], result["parts"], result["batch_size"], result["epochs"]) == (3, 2, 32, 2)
    wanted = {
        "num_neighbors",
        "policy",
        "replication_factor",
        "remote_rows_per_epoch",
        "remote_rows_std",
        "predicted_rows_per_epoch",
        "ratio_to_oracle",
        "reduction",
    }
    assert all(wanted <= set(entry) for entry in result["results"])
    assert {entry["policy"] for entry in result["results"]} == set(POLICIES) - {"vip-hop"} | {
        "oracle",
        "oracle-heldout",
    }
    lines = list(csv.DictReader(out["csv"].open()))
    assert [line["remote_rows_per_epoch"] for line in lines] == [
        "" if e["remote_rows_per_epoch"] is None else str(e["remote_rows_per_epoch"]) for e in result["results"]
    ]


def test_the_command_draws_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("plot.png", "plot.svg"):
        command = [
            "analyze",
            "synthetic:num_vertices=1000",
            "--parts",
            "2",
            "--num-neighbors",
            "3,2",
            "--batch-size",
            "32",
        ]
        few = ["--policies", "vip,degree", "--replication-factors", "0,.1,.5", "--epochs", "1"]
        assert main([*command, *few, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "plot.svg"]


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--plot", "x.pdf"], "--plot must end in .png or .svg, got x.pdf"),
        (["--json", "no/such/dir.json"], "--json: the directory no/such does not exist; create it, or choose another"),
        (["--csv", "no/such/dir.csv"], "--csv: the directory no/such does not exist"),
        (["--plot", "no/such/dir.png"], "--plot: the directory no/such does not exist"),
        (["--plot", "x"], "--plot must end in .png or .svg, got x"),
        (["--json", "."], "--json: . is a directory; give the name of a file"),
        (["--csv", "/proc/out.csv"], "--csv: the directory /proc cannot be written ("),
        (["--policies", "vip,lru"], "policies must be among"),
        (["--epochs", "0"], "epochs must be >= 1, got 0"),
        (["--replication-factors", "0,-1"], "replication_factor must be >= 0"),
        (
            ["--method", "nofile"],
            "--method must be auto, metis, kaminpar, random, given or an .npy file of part ids, got nofile",
        ),
    ],
)
def test_the_command_refuses_in_one_line_before_it_loads_anything(extra, text, capsys, monkeypatch):
    monkeypatch.setattr(given_graph, "load_dataset", None)
    assert main(["analyze", "synthetic:num_vertices=1000", "--parts", "2", *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith("salientpp analyze: ") and text in error and error.count("\n") == 1


def test_a_graph_that_is_not_partitioned_needs_a_number_of_parts(capsys, monkeypatch):
    monkeypatch.setattr(given_graph, "load_dataset", None)
    assert main(["analyze", "synthetic:num_vertices=1000"]) == 2
    assert (
        "--parts is required, because synthetic:num_vertices=1000 is not a dataset directory" in capsys.readouterr().err
    )


def test_a_plot_without_matplotlib_is_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(given_graph, "load_dataset", None)
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["analyze", "synthetic:num_vertices=1000", "--parts", "2", "--plot", str(tmp_path / "p.png")]) == 2
    error = capsys.readouterr().err
    assert "a plot needs matplotlib" in error and "pip install 'salientpp[plot]'" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_the_earlier_files(tmp_path, capsys, monkeypatch):
    (tmp_path / "out.json").write_text("old")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("salientpp.engine.engine.Engine.dry", interrupt)
    command = [
        "analyze",
        "synthetic:num_vertices=1000",
        "--parts",
        "2",
        "--num-neighbors",
        "3",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert main([*command, "--csv", str(tmp_path / "out.csv")]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"] and (tmp_path / "out.json").read_text() == "old"


def test_the_tables_show_the_memory_of_each_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = [
        "analyze",
        "synthetic:num_vertices=2000,num_features=25",
        "--parts",
        "2",
        "--num-neighbors",
        "3",
        "--predict-only",
    ]
    assert main([*command, "--replication-factors", "0,.1,1", "--json", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A row has 100 bytes. α = 0.1 means 100 rows of 2000 / 2, and β is a fraction of the largest part.
    assert next(line for line in lines if "cache per machine" in line).split()[3:] == [
        "0",
        "B",
        "10",
        "kB",
        "100",
        "kB",
    ]
    result = json.loads((tmp_path / "out.json").read_text())
    assert [entry["cache_bytes"] for entry in result["results"][:3]] == [0, 10_000, 100_000]
    largest = round(result["balance"]["vertices"] * 1000)
    assert [row["device_bytes"] for row in result["device_rows"]] == [
        int(row["device_fraction"] * largest) * 100 for row in result["device_rows"]
    ]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_vip_is_near_the_oracle_on_a_real_graph_and_beats_degree():
    data = real_data("debian_full")
    analysis = analyze(
        data,
        Batches(num_neighbors=[15, 10, 5], batch_size=256, epochs=20),
        Ways(replication_factors=[0.16], policies=["vip", "degree", "random", "oracle"]),
        parts=4,
    )
    rows = {volume.policy: volume.remote_rows_per_epoch for volume in analysis.of(way="cache")}
    assert rows["vip"] < rows["degree"] < rows["random"]
    assert rows["vip"] <= 1.05 * rows["oracle-heldout"]


def test_vip_edge_weights_lower_the_traffic_at_equal_balance():
    data = real_data("facebook_pages")
    rows = {}
    for edge_weights in ("equal", "vip"):
        analysis = analyze(
            data,
            Batches(num_neighbors=[15, 10, 5], batch_size=256, epochs=2),
            Ways(replication_factors=[0], policies=["vip"]),
            parts=4,
            edge_weights=edge_weights,
            refine=False,
        )
        assert max(analysis.balance.values()) < 1.06
        rows[edge_weights] = analysis.results[0].remote_rows_per_epoch
    assert rows["vip"] < rows["equal"]


def test_csv_has_a_line_for_every_result(small):
    _, analysis = small
    assert analysis.to_csv().count("\n") == 1 + len(analysis.results)


# --- several vertex types, times, weights, links -----------------------------------------------------------


@pytest.fixture(scope="module")
def typed_directory(tmp_path_factory) -> str:
    data = random_hetero()
    data["paper"].train_mask = torch.arange(data["paper"].num_nodes) % 2 == 0
    root = tmp_path_factory.mktemp("types") / "d"
    salientpp.partition(data, 2, root, [3, 2], 8, replicate=())
    return str(root)


@pytest.mark.parametrize(
    ("options", "seeds", "way"),
    [
        ([], ("paper", "train"), {}),
        (["--seeds", "author:all", "--weight-attr", "weight", "--replace"], ("author", "all"), {"weight_attr": "weight", "replace": True}),
        (["--time-attr", "time", "--temporal-strategy", "last"], ("paper", "train"), {"time_attr": "time", "temporal_strategy": "last"}),
        (
            ["--link", "author,writes,paper", "--neg-sampling", "triplet:2", "--disjoint"],
            (("author", "writes", "paper"), "all"),
            {"link": True, "neg_sampling": NegativeSampling("triplet", 2), "disjoint": True},
        ),
    ],
)  # fmt: skip
def test_the_command_counts_every_type_and_every_kind_of_draw(typed_directory, tmp_path, capsys, options, seeds, way):
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    few = ["--epochs", "1", "--replication-factors", "0,0.3", "--policies", "vip,oracle"]
    assert main(["analyze", typed_directory, *few, *options, *files]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "paper, " in shown and "author" in shown and "feature rows fetched per epoch by 2 machines" in shown
    expected = analyze(
        salientpp.load(typed_directory),
        Batches(num_neighbors=[3, 2], batch_size=8, epochs=1, seeds=seeds, **way),
        Ways(replication_factors=[0, 0.3], policies=["vip", "oracle"]),
        name=typed_directory,
    )
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["results"] == json.loads(json.dumps(expected.to_dict()))["results"]
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 6 * 3
    fetched = []
    for policy in ("vip", "oracle"):
        for alpha in (0, 0.3):
            volumes = expected.of(policy=policy, replication_factor=alpha)
            assert volumes[0].cache_bytes >= sum(volume.cached_rows * volume.row_bytes / 2 for volume in volumes)
            fetched.append(sum(volume.remote_bytes_per_epoch for volume in volumes))
    assert fetched[1] < fetched[0] == fetched[2] and fetched[3] <= fetched[1], (
        "no static cache is better than the oracle's"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--plot", "p.png"], "--plot needs a graph with one vertex type"),
        (["--neg-sampling", "binary"], "--neg-sampling and --edge-label-time require --link"),
        (["--link", "a,b,c"], "edge_label_index of a graph with several types must be an edge type"),
        (["--link", "author,writes,paper", "--neg-sampling", "few"], "--neg-sampling must be binary or triplet"),
        (["--policies", "halo"], "policies must be among degree, random, vip, vip-hop, oracle for such batches, got 'halo'"),
        (["--seeds", "nothing:all"], "input_nodes must be of a node type of the data (paper, author, venue), got"),
        (["--time-attr", "no"], "The time attribute 'no' is neither"),
    ],
)  # fmt: skip
def test_errors_in_draw_options_are_one_line(typed_directory, capsys, options, text):
    assert main(["analyze", typed_directory, "--epochs", "1", *options]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_draw_options_need_a_dataset_directory(capsys):
    assert main(["analyze", "synthetic:num_vertices=1000", "--parts", "2", "--disjoint"]) == 2
    assert "--disjoint: such batches are counted only on a dataset directory" in capsys.readouterr().err


@pytest.mark.parametrize("draws", [{}, {"disjoint": True}, {"time_attr": "time"}], ids=str)
def test_a_dry_batch_names_each_row_that_its_host_lacks_once(typed_directory, draws):
    part = salientpp.load(typed_directory)
    batches = Batches(epochs=1, **draws).filled(part)
    job = Job.of(part, dict.fromkeys(part.books, 4), placed(None, 2), batches)

    def same(batch):
        return batch

    for rank, engine in enumerate(job.engines):
        plain, whole = list(engine.dry(0, same, only_vertices=True)), list(engine.dry(0, same))
        assert len(plain) == len(whole) == engine.basis.epochs.order.num_batches > 1
        for type_, book in job.held.items():
            begin, end = book.range_of(rank)
            for one, other in zip(plain, whole):
                ids = one.places[type_].remote_id.tolist()
                expected = {v for v in other.mfg.node[type_].tolist() if not begin <= v < end}
                assert len(ids) == len(set(ids)) and set(ids) == expected
                assert set(other.places[type_].remote_id.tolist()) == expected
