"""Laws of the example for RelBench: two ranks learn each kind of task, and predictions have the keys of the tables. RelBench has the same labels and scores."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import distributed
import numpy as np
import pytest
import torch
from table_packages import package

from salientpp.datasets import convert, load_dataset

pd, pq, yaml = (package(name) for name in ("pandas", "pyarrow.parquet", "yaml"))

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = str(Path(__file__).parents[2] / "examples")
#: Task -> the least and the largest score that the example may reach on both splits.
SCORES = {
    "customer-active": (0.65, 1.0),
    "customer-spent": (0.2, 0.65),
    "customer-products": (0.25, 1.0),
    "order-rating": (0.15, 0.6),  # less: the seeds saw their own rating
}


def tasks() -> ModuleType:
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    return importlib.import_module("relbench_tasks")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("relbench") / "shop"
    tasks().make(root, 400)
    tasks().partition(root, 2)
    return root


def run_on_a_rank(rank: int, root: str, name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return tasks().run(Path(root), name, epochs=4)


@pytest.mark.parametrize("name", SCORES)
def test_two_ranks_learn_each_task_and_write_predictions_under_the_keys(root, name):
    both = distributed.run(run_on_a_rank, 2, str(root), name)
    assert both[0] == both[1] and both[0].keys() == {"val", "test"}
    task, (least, most) = tasks().Task.read(root, name), SCORES[name]
    for split, (measure, found, constant) in both[0].items():
        assert least < found < most, f"{split}: {measure} {found}"
        assert found < 0.8 * constant if measure == "NMAE" else found > 1.25 * constant, (
            f"{split}: {measure} {found}, {constant}"
        )
        folder = root / "predictions" / name / split
        assert sorted(path.name for path in folder.iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
        predictions, examples = pq.read_table(folder).to_pandas(), task.examples(split)
        assert sorted(predictions[predictions.columns[0]].unique()) == sorted(examples[task.key].unique())
        assert len(predictions) == len(examples) * (1 if task.to is None else task.k)


def orders_seen_on_a_rank(rank: int, root: str, name: str) -> list[tuple[int, int]]:
    """Returns the numbers of orders in each batch, and of those that were placed after the time of their seed, by the tables themselves."""
    job, placed = (
        tasks().Job(tasks().Task.read(Path(root), name)),
        pd.read_parquet(f"{root}/db/orders.parquet")["placed"],
    )
    seen = []
    for batch in job.batches("test"):
        orders, seeds = batch["orders"], batch[job.task.entity]
        drawn = orders.n_id[seeds.batch_size :] if seeds is orders else orders.n_id
        seconds = seeds.seed_time[orders.batch[-len(drawn) :]].numpy()
        keys = job.part.keys_of(drawn, "orders")["order_id"].to_numpy()
        seen.append((len(drawn), int((placed[keys].to_numpy() > seconds.astype("datetime64[s]")).sum())))
    return seen


@pytest.mark.parametrize("name", ["customer-active", "order-rating"])
def test_no_seed_sees_an_order_that_was_placed_later(root, name):
    for seen in distributed.run(orders_seen_on_a_rank, 2, str(root), name):
        drawn, late = map(sum, zip(*seen))
        assert drawn > 1000 and late == 0


def test_relbench_computes_the_same_labels_and_scores(root, tmp_path):
    dataset = package("relbench").load_dataset(root)
    assert dataset.get_task_names() == sorted(SCORES)
    for name in SCORES:
        hosted, computed = dataset.load_task(name), dataset.load_task(name, regenerate=True)
        task = tasks().Task.read(root, name)
        for split in ("train", "val", "test"):
            found, expected = (
                each.get_table(split, mask_input_cols=False)
                .df.sort_values([task.time, task.key])
                .reset_index(drop=True)
                for each in (hosted, computed)
            )
            if task.to is not None:
                found, expected = (
                    each.assign(**{task.target: each[task.target].map(sorted)}) for each in (found, expected)
                )
            pd.testing.assert_frame_equal(found[expected.columns], expected, check_dtype=False)
            if split != "train":
                measure, score = random_score(task, split, tmp_path / f"{name}-{split}.parquet", hosted)
                assert score == pytest.approx(measure)


def random_score(task: Any, split: str, path: Path, of_relbench: Any) -> tuple[float, float]:
    """Returns the score of random predictions by RelBench, and by the example, which reads them from the file ``path``."""
    draw, examples = np.random.default_rng(0), task.examples(split)
    table = of_relbench.get_table(split, mask_input_cols=False)
    if task.to is None:
        predictions = draw.random(len(examples))
        written = examples[[task.key, "seconds"]].assign(prediction=predictions)
    else:
        predictions = np.stack([draw.permutation(60)[: task.k] for _ in range(len(examples))])
        written = pd.DataFrame({task.key: examples[task.key].repeat(task.k), task.target: predictions.ravel()})
        written["score"] = np.tile(-np.arange(task.k), len(examples))
    written.sample(frac=1, random_state=0).to_parquet(path, index=False)
    (measure,) = of_relbench.evaluate(predictions, table).values()
    return measure, tasks().scores(task, split, path)[1]


def test_a_database_may_lack_keys_times_and_numbers_and_have_fractions_of_seconds(tmp_path):
    root, shop = tmp_path / "odd", tasks()
    shop.make(root, 100)
    manifest = yaml.safe_load((root / "manifest.yaml").read_text())
    manifest["tables"]["orders"]["pkey"] = None
    (root / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    orders = pd.read_parquet(root / "db" / "orders.parquet").drop(columns="order_id")
    orders.loc[0, "placed"] = pd.Timestamp("2025-02-01 00:00:00.25")
    orders.loc[3, "placed"] = pd.NaT
    orders["product_id"] = orders["product_id"].astype("float64")
    orders.loc[5, "product_id"] = np.nan
    orders.loc[7, "customer_id"] = 10**6
    orders.to_parquet(root / "db" / "orders.parquet", index=False)
    products = pd.read_parquet(root / "db" / "products.parquet").drop(columns="price")
    products["name"] = [f"unique {i}" * 10 for i in range(len(products))]
    products.to_parquet(root / "db" / "products.parquet", index=False)
    data = load_dataset(f"converted:{convert(shop.described(root), root / 'graph')}")
    assert data["orders"].num_nodes == len(orders) - 1  # without the row that has no time
    assert data["orders", "product_id", "products"].num_edges == len(orders) - 2
    assert data["orders", "customer_id", "customers"].num_edges == len(orders) - 2
    assert data["products"].x.tolist() == [[0]] * len(products)
    keys = data["orders"].key_table.rows(range(len(orders) - 1))["primary_key"].to_pylist()
    assert sorted(keys) == [row for row in range(len(orders)) if row != 3]
    # A row must not come earlier than it did.
    assert data["orders"].time[keys.index(0)] == pd.Timestamp("2025-02-01 00:00:01").timestamp()


def pairs_of_a_rank(rank: int, root: str) -> set[tuple[int, int]]:
    pairs = set()
    for batch in tasks().Job(tasks().Task.read(Path(root), "customer-products")).links():
        customers, products = batch["customers"], batch["products"]
        ends = customers.n_id[customers.src_index], products.n_id[products.dst_pos_index]
        pairs |= {*zip(*(each.tolist() for each in ends))}
    return pairs


def test_examples_whose_rows_the_graph_lacks_are_left_out(root, tmp_path):
    shutil.copytree(root, tmp_path / "shop")
    path = tmp_path / "shop/tasks/customer-products/train.parquet"
    train = pd.read_parquet(path)
    known = train[1:].explode("product_id")[["customer_id", "product_id"]].drop_duplicates()
    train.at[0, "customer_id"] = 10**6
    train.at[1, "product_id"] = [*train.at[1, "product_id"], 10**6]
    train.to_parquet(path, index=False)
    first, second = distributed.run(pairs_of_a_rank, 2, str(tmp_path / "shop"))
    assert len(first | second) == len(known)


def build_without_examples(rank: int, root: str) -> int:
    return len(tasks().Job(tasks().Task.read(Path(root), "customer-active")).batches("train"))


def test_a_rank_may_have_no_training_examples_while_the_model_is_made(root, tmp_path):
    shutil.copytree(root, tmp_path / "shop")
    path = tmp_path / "shop/tasks/customer-active/train.parquet"
    train = pd.read_parquet(path)
    train[train["customer_id"] == train["customer_id"][0]].to_parquet(path, index=False)
    assert sorted(distributed.run(build_without_examples, 2, str(tmp_path / "shop"))) == [0, 1]
