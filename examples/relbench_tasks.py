"""Trains the four kinds of tasks of a database in the layout of RelBench 3, on ranks, and writes predictions under the keys of its tables.

    python examples/relbench_tasks.py make shop
    python examples/relbench_tasks.py partition shop --parts 2
    torchrun --nproc-per-node 2 examples/relbench_tasks.py train shop

`make` generates a shop. A database of RelBench has the same files, so `partition` and `train` take it too. A vertex is a row, and an edge a foreign key.
A batch draws only rows that are not newer than its seeds. order-rating predicts a column of the seeds' own table. The column is hidden from the seeds, and
earlier orders keep it.

The example needs pip install 'salientpp[tables]' relbench, or only pandas and PyYAML of the latter's requirements.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import HeteroConv, SAGEConv

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.datasets import convert, load_dataset

FANOUTS = [16, 8]
DAY = 86_400  # seconds
#: Columns of texts with more different values are left out.
MOST_CATEGORIES = 1000
#: Rows of the embedding of a column of texts.
BUCKETS = 64
#: Key of a table without a primary key: the number of the row, as in RelBench.
ROW = "primary_key"

# --- the database as a graph ----------------------------------------------------------------------------------


def read_yaml(*path: Any) -> dict[str, Any]:
    return yaml.safe_load(Path(*path).read_text())


@dataclass(frozen=True)
class Task:
    """A task, as its manifest describes it.

    Attributes:
        kind: "binary_classification", "regression" or "recommendation".
        entity, key: table of the seeds, and the column of the task's tables that holds their keys.
        time, target: columns of the task's tables with the times of the seeds and with the labels. A label of a recommendation is a list of keys.
        completes: whether the target is a column of the seeds' own table.
        to, k: table of the rows to recommend, and their number for each seed.
        removed: (table, column) pairs that models must not see.
    """

    root: Path
    name: str
    kind: str
    entity: str
    key: str
    time: str
    target: str
    completes: bool
    to: str | None
    k: int
    removed: set[tuple[str, str]]

    @classmethod
    def read(cls, root: Path, name: str) -> Task:
        facts, tables = read_yaml(root, "tasks", name, "manifest.yaml"), read_yaml(root, "manifest.yaml")["tables"]
        kind, completes, to = facts["task_type"], facts["kind"] == "autocomplete", facts.get("dst_entity_table")
        prefix = "src_" if to else ""
        entity, key, time = (facts.get(each) for each in (f"{prefix}entity_table", f"{prefix}entity_col", "time_col"))
        target = facts.get("dst_entity_col" if to else "target_col")
        if completes:
            key, time = tables[entity]["pkey"] or ROW, tables[entity]["time_col"]
        removed = {(of, column) for of, column in facts.get("remove_columns", [])}
        return cls(root, name, kind, entity, key, time, target, completes, to, facts.get("eval_k", 10), removed)

    def examples(self, split: str) -> pd.DataFrame:
        """Returns a table of the task, with the times also as ``seconds``."""
        table = pd.read_parquet(self.root / "tasks" / self.name / f"{split}.parquet")
        return table.assign(seconds=table[self.time].astype("datetime64[s]").astype("int64"))


def tasks_of(root: Path) -> list[Task]:
    return [Task.read(root, path.parent.name) for path in sorted(root.glob("tasks/*/manifest.yaml"))]


def completed(root: Path, entity: str) -> list[str]:
    """Returns the columns of a table that tasks complete. They come first in ``x``."""
    return sorted({task.target for task in tasks_of(root) if task.completes and task.entity == entity})


def described(root: Path) -> dict[str, Any]:
    """Returns the description of the database, for :func:`salientpp.datasets.convert`."""
    manifest = read_yaml(root, "manifest.yaml")
    removed = {pair for task in tasks_of(root) for pair in task.removed}
    nodes: dict[str, Any] = {}
    edges: dict[Any, Any] = {}
    for name, spec in manifest["tables"].items():
        table = pq.read_table(root / "db" / f"{name}.parquet")
        table = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
        key, time, foreign = spec["pkey"] or ROW, spec["time_col"], spec["fkeys"]
        if time is not None:
            table = table.filter(pc.is_valid(table[time]))  # RelBench leaves out rows without a time too
        others = {key, time, ROW, *foreign, *(column for of, column in removed if of == name)}
        read = table.select([column for column in table.column_names if column not in others])
        columns = {key: table[key], **features(read, completed(root, name))}
        nodes[name] = {"key": key, "x": [each for each in columns if each.startswith("x_")]}
        if time is not None:
            # Columns are standardised, and categories numbered, by the rows until the first evaluation.
            until = pa.scalar(pd.Timestamp(manifest["val_timestamp"]), pa.timestamp("s"))
            # Rounded up, because seeds are rounded down: a row never comes earlier than it did.
            rounded = pc.ceil_temporal(table[time].cast(pa.timestamp("us"), safe=False), unit="second")
            columns["time"] = rounded.cast(pa.timestamp("s"))
            columns["split"] = pc.if_else(pc.less_equal(columns["time"], until), "train", "test")
            nodes[name] |= {"time": "time", "split": "split"}
        nodes[name]["table"] = pa.table(columns)
        for column, to in foreign.items():
            ends = pa.table({key: table[key], column: table[column].cast(pa.int64())})
            edges[name, column, to] = dict(table=ends, source=key, target=column, null_keys="drop", dangling="drop")
    return {"nodes": nodes, "edges": edges}


def features(table: pa.Table, first: list[str]) -> dict[str, Any]:
    """Returns the columns that a model reads: numbers as ``x_NAME``, at least one and those in ``first`` first, and texts as ``text_NAME``."""
    columns = {}
    for name in sorted(table.column_names, key=lambda name: (name not in first, name)):
        type_ = str(table.schema.field(name).type)
        if type_.startswith(("int", "uint", "float", "double", "bool", "decimal")):
            columns[f"x_{name}"] = table[name]
        elif type_ in ("string", "large_string") and len(table[name].unique()) <= MOST_CATEGORIES:
            columns[f"text_{name}"] = table[name]
        if name in first and f"x_{name}" not in columns:
            raise SystemExit(f"{name} of {type_} is no number, so this script cannot complete it")
    return columns | {"x_": pa.array(np.ones(table.num_rows))}


def partition(root: Path, num_parts: int) -> None:
    """Writes the graph of the database to root/graph, and its parts to root/parts."""
    convert(described(root), root / "graph")
    seeds = tasks_of(root)[0].entity, "all"
    data = load_dataset(f"converted:{root / 'graph'}")
    salientpp.partition(data, num_parts, root / "parts", FANOUTS, 128, seeds=seeds, time_attr="time")


# --- the model ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Encodes the columns of each row and its age at the time of the seed, and applies two layers of GraphSAGE.

    Args:
        batch: any batch, which has all types, relations and columns.
        heads: number of outputs by vertex type.
    """

    def __init__(self, batch: Any, heads: dict[str, int], width: int = 32) -> None:
        super().__init__()
        types = batch.node_types
        self.numbers = nn.ModuleDict({name: nn.Linear(batch[name].x.size(1) + 3, width) for name in types})
        texts = {name: [each for each in batch[name].to_dict() if each.startswith("text_")] for name in types}
        self.texts = nn.ModuleDict(
            {name: nn.ModuleDict({each: nn.Embedding(BUCKETS, width) for each in texts[name]}) for name in types}
        )
        self.layers = nn.ModuleList(
            HeteroConv({each: SAGEConv((width, width), width, aggr="sum") for each in batch.edge_index_dict})
            for _ in FANOUTS
        )
        self.norms = nn.ModuleList(nn.ModuleDict({name: nn.LayerNorm(width) for name in types}) for _ in FANOUTS)
        self.heads = nn.ModuleDict({name: nn.Linear(width, number) for name, number in heads.items()})

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Returns the outputs [n, number] of the types that have a head."""
        times = next(batch[name].seed_time for name in batch.node_types if "seed_time" in batch[name])
        x = {}
        for name, linear in self.numbers.items():
            rows = batch[name]
            age = (times[rows.batch] - rows.time).float() / DAY if "time" in rows else torch.zeros(len(rows.x))
            ages = torch.stack([age / 100, (-age / 30).exp(), (-age / 120).exp()], 1)
            x[name] = linear(torch.cat([rows.x, ages], 1))
            for column, embedding in self.texts[name].items():
                x[name] = x[name] + embedding((rows[column] + 1) % BUCKETS)
        for layer, norms in zip(self.layers, self.norms):
            found = layer(x, batch.edge_index_dict)
            x = {name: value + norms[name](found[name]).relu() if name in found else value for name, value in x.items()}
        return {name: head(x[name]) for name, head in self.heads.items()}


# --- training and predictions ---------------------------------------------------------------------------------


class Job:
    """A task on this rank's part of the graph. All ranks call its methods together.

    Attributes:
        mean, std: of the labels of the training examples, if they are no classes.
        hidden: column of ``x`` that is hidden from the seeds, or None.
    """

    def __init__(self, task: Task, seed: int = 0, batch_size: int = 64, memory: str = "8GiB") -> None:
        self.task, self.part, self.memory = task, salientpp.load(task.root / "parts"), memory
        stores = load_dataset(f"converted:{task.root / 'graph'}").node_stores
        columns = {"x", "time"} | {name for store in stores for name in store.to_dict() if name.startswith("text_")}
        self.options: dict[str, Any] = dict(
            time_attr="time", columns=columns, batch_size=batch_size, seed=seed, num_workers=1
        )
        self.hidden = completed(task.root, task.entity).index(task.target) if task.completes else None
        labels = task.examples("train")[task.target]
        self.mean, self.std = (labels.mean(), labels.std()) if task.kind == "regression" else (0.0, 1.0)
        if task.to is None:
            self.labels = torch.tensor(((labels - self.mean) / self.std).to_numpy("float32"))
        torch.manual_seed(seed)
        heads = {task.entity: 1} if task.to is None else {task.entity: 32, task.to: 32}
        # Trimmed, the model computes only the rows that the seeds need.
        anyone = self.part.split("all", type_=task.entity)[:1]  # a rank may have no training examples
        batch = next(iter(self.loader_of(task.entity, anyone, torch.zeros_like(anyone))))
        self.model = salientpp.nn.trim(Model(batch, heads))

    def own(self, split: str) -> tuple[pd.DataFrame, Tensor, Tensor]:
        """Returns the table of a split, the numbers of its rows whose seeds this rank's part owns, and the ids of these seeds."""
        examples = self.task.examples(split)
        ids = self.part.ids_of(examples[self.task.key].to_numpy(), self.task.entity)
        rows = torch.isin(ids, self.part.split("all", type_=self.task.entity)).nonzero().flatten()
        return examples, rows, ids[rows]

    def batches(self, split: str, **options: Any) -> NeighborLoader:
        """Returns a loader of the seeds of a split. ``input_id`` is the row of the table."""
        examples, rows, ids = self.own(split)
        times = torch.tensor(examples["seconds"].to_numpy())[rows]
        return self.loader_of(self.task.entity, ids, times, input_id=rows, transform=self.hide, **options)

    def loader_of(self, type_: str, ids: Tensor, times: Tensor, **options: Any) -> NeighborLoader:
        return NeighborLoader(self.part, FANOUTS, (type_, ids), times, **{**self.options, **options})

    def hide(self, batch: Any) -> Any:
        """Hides the target from the seeds. They are the first rows, and a vertex comes only once in the tree of a seed."""
        if self.hidden is not None:
            rows = batch[self.task.entity]
            rows.x[: rows.batch_size, self.hidden] = 0  # the mean
        return batch

    def links(self) -> LinkNeighborLoader:
        """Returns a loader of the pairs of the training examples, with a random target for each."""
        task, (examples, rows, ids) = self.task, self.own("train")
        assert task.to is not None
        pairs = examples.iloc[rows.numpy()].assign(id=ids.numpy()).explode(task.target)
        pairs["to"] = self.part.ids_of(pairs[task.target].to_numpy("int64"), task.to).numpy()
        pairs = pairs[pairs["to"] >= 0]  # the graph lacks rows without a time
        ends = torch.tensor(pairs[["id", "to"]].to_numpy("int64").T)
        return LinkNeighborLoader(
            self.part, FANOUTS, ((task.entity, "needs", task.to), ends), edge_label_time=torch.tensor(pairs["seconds"].to_numpy()),
            neg_sampling="triplet", shuffle=True, memory=self.memory, **self.options,
        )  # fmt: skip

    def loss(self, out: dict[str, Tensor], batch: Any) -> Tensor:
        task = self.task
        if task.to is not None:
            source = out[task.entity][batch[task.entity].src_index]
            better, worse = (out[task.to][batch[task.to][name]] for name in ("dst_pos_index", "dst_neg_index"))
            return F.softplus((source * (worse - better)).sum(1)).mean()
        seeds = batch[task.entity]
        found, label = out[task.entity][: seeds.batch_size, 0], self.labels[seeds.input_id]
        loss = F.l1_loss if task.kind == "regression" else F.binary_cross_entropy_with_logits
        return loss(found, label)

    def train(self, epochs: int) -> None:
        is_link = self.task.to is not None
        loader = self.links() if is_link else self.batches("train", shuffle=True, memory=self.memory)
        model: nn.Module = self.model
        if dist.is_initialized() and dist.get_world_size() > 1:
            model = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                self.loss(model(batch), batch).backward()
                optimizer.step()

    @torch.no_grad()
    def rows(self, loader: NeighborLoader, type_: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids, times and outputs of the seeds of a loader, [n], [n] and [n, number]."""
        found = []
        for batch in loader:
            seeds = batch[type_]
            first = slice(seeds.batch_size)
            found.append((seeds.n_id[first], seeds.seed_time, self.model(batch)[type_][first]))
        width = self.model.heads[type_].out_features
        none = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0, width)
        ids, times, outputs = (torch.cat(each) for each in zip(none, *found))
        return ids, times, outputs

    def predict(self, split: str, out: Path) -> None:
        """Writes the predictions of a split to a folder of Parquet files, under the keys of the tables."""
        task, part = self.task, self.part
        ids, times, outputs = self.rows(self.batches(split), task.entity)
        if task.to is None:
            with salientpp.PredictionWriter(out, part, task.entity) as writer:
                writer.write(ids, {"seconds": times, "prediction": outputs[:, 0] * self.std + self.mean})
            return
        targets = part.split("all", type_=task.to)
        at = torch.full_like(targets, int(task.examples(split)["seconds"].max()))
        to_ids, _, to_outputs = self.rows(self.loader_of(task.to, targets, at), task.to)
        salientpp.link_scores(part, (ids, outputs), (to_ids, to_outputs), task.k, types=(task.entity, task.to), out=out)


# --- scores, from the files -----------------------------------------------------------------------------------


def auroc(label: Any, score: Any) -> float:
    """Returns the probability that a random true example scores higher than a random false one."""
    label, rank = np.asarray(label) > 0, pd.Series(score).rank().to_numpy()
    number = label.sum()
    return float((rank[label].sum() - number * (number + 1) / 2) / (number * (~label).sum()))


def average_precision(found: Any, wanted: Any, k: int) -> float:
    """Returns RelBench's average precision of the k best keys ``found`` among the keys ``wanted``."""
    hits = np.isin(found, wanted)
    return float((hits.cumsum() / np.arange(1, len(hits) + 1) * hits).sum() / min(len(wanted), k))


def scores(task: Task, split: str, out: Path) -> tuple[str, float, float]:
    """Returns the measure of RelBench for the task, its value for the predictions in ``out``, and its value for predictions that are equal for all seeds."""
    examples, train, predictions = task.examples(split), task.examples("train"), pq.read_table(out)
    if task.to is None:
        key = predictions.column_names[0]  # the table's primary key, which the task may call otherwise
        joined = examples.merge(
            predictions.to_pandas(), left_on=[task.key, "seconds"], right_on=[key, "seconds"], validate="one_to_one"
        )
        label, found = joined[task.target].to_numpy("float64"), joined["prediction"].to_numpy()
        if task.kind == "regression":
            labels = train[task.target]
            errors = (abs(label - each).mean() / labels.std() for each in (found, labels.median()))
            return "NMAE", *map(float, errors)
        return "AUROC", auroc(label, found), 0.5
    source, to = predictions.column_names[:2]
    best = predictions.sort_by([("score", "descending")]).to_pandas().groupby(source)[to].agg(list)
    popular = train[task.target].explode().value_counts().index[: task.k]
    values = [
        [average_precision(best.get(key, []), wanted, task.k), average_precision(popular, wanted, task.k)]
        for key, wanted in zip(examples[task.key], examples[task.target])
    ]
    found, constant = np.mean(values, 0)
    return f"MAP@{task.k}", float(found), float(constant)


def run(root: Path, name: str, epochs: int = 5, **options: Any) -> dict[str, tuple[str, float, float]]:
    """Trains a task, and returns its scores on the splits ``val`` and ``test``. All ranks call it."""
    task = Task.read(root, name)
    if task.kind not in ("binary_classification", "regression", "recommendation"):
        raise SystemExit(f"{name}: this script has no loss for {task.kind}")
    job = Job(task, **options)
    job.train(epochs)
    found = {}
    for split in ("val", "test"):
        out = root / "predictions" / name / split
        job.predict(split, out)
        found[split] = scores(task, split, out)
    return found


# --- a generated database ---------------------------------------------------------------------------------------

START, DAYS, HORIZON, VAL, TEST = pd.Timestamp("2025-01-01"), 365, 60, 235, 300
MANIFEST = """
val_timestamp: '2025-08-24'
test_timestamp: '2025-10-28'
tables:
  customers: {pkey: customer_id, time_col: joined, fkeys: {}}
  products: {pkey: product_id, time_col: null, fkeys: {}}
  orders: {pkey: order_id, time_col: placed, fkeys: {customer_id: customers, product_id: products}}
"""
FORECAST = "kind: forecast, time_col: timestamp, timedelta: 60 days"
ENTITY = "entity_table: customers, entity_col: customer_id"
LATER = "orders o ON o.customer_id = c.customer_id AND o.placed > t.timestamp AND o.placed <= t.timestamp + INTERVAL '{timedelta}' GROUP BY ALL"
FROM = "FROM timestamps t JOIN customers c ON c.joined <= t.timestamp"
#: The manifests of the tasks. With `sql`, RelBench computes the same labels.
TASKS = {
    "customer-active": f"""{{{FORECAST}, task_type: binary_classification, {ENTITY}, target_col: active,
        sql: "SELECT t.timestamp, c.customer_id, CAST(COUNT(o.order_id) > 0 AS INT) AS active {FROM} LEFT JOIN {LATER}"}}""",
    "customer-spent": f"""{{{FORECAST}, task_type: regression, {ENTITY}, target_col: spent,
        sql: "SELECT t.timestamp, c.customer_id, COALESCE(SUM(o.paid), 0) AS spent {FROM} LEFT JOIN {LATER}"}}""",
    "customer-products": f"""{{{FORECAST}, task_type: recommendation, eval_k: 10, src_entity_table: customers, src_entity_col: customer_id,
        dst_entity_table: products, dst_entity_col: product_id,
        sql: "SELECT t.timestamp, c.customer_id, LIST(DISTINCT o.product_id) AS product_id {FROM} JOIN {LATER}"}}""",
    "order-rating": "{kind: autocomplete, task_type: regression, entity_table: orders, target_col: rating}",
}


def days_after(days: Any) -> Any:
    return START + pd.to_timedelta(days, unit="D")


def shop(num_customers: int, num_products: int, seed: int) -> dict[str, pd.DataFrame]:
    """Generates tables. A customer orders at a rate of its own until it leaves, mostly products of one of six kinds, and is harder or easier to please."""
    draw = np.random.default_rng(seed)
    joined = np.sort(draw.integers(0, 200, num_customers))
    until = np.minimum(joined + draw.exponential(400, num_customers), DAYS)
    buyer = np.repeat(
        np.arange(num_customers), draw.poisson(draw.choice([0.01, 0.2], num_customers) * (until - joined))
    )
    placed = joined[buyer] + draw.random(buyer.size) * (until - joined)[buyer]
    buyer, placed = buyer[np.argsort(placed)], np.sort(placed)
    taste, price = draw.integers(0, 6, num_customers), draw.lognormal(3, 0.3, num_products).round(2)
    liked = taste[buyer] + 6 * draw.integers(0, num_products // 6, buyer.size)  # product i is of kind i mod 6
    product = np.where(draw.random(buyer.size) < 0.85, liked, draw.integers(0, num_products, buyer.size))
    mild, good = draw.normal(0, 1, num_customers), draw.normal(0, 0.5, num_products)
    customers = {"age": np.where(draw.random(num_customers) < 0.1, np.nan, draw.normal(45, 15, num_customers).round())}
    orders = {
        "paid": price[product],
        "rating": (3 + mild[buyer] + good[product] + draw.normal(0, 0.3, buyer.size)).round(2),
    }
    return {
        "customers": pd.DataFrame({"customer_id": np.arange(num_customers), "joined": days_after(joined), **customers}),
        "products": pd.DataFrame({"product_id": np.arange(num_products), "kind": [f"kind {i % 6}" for i in range(num_products)], "price": price}),
        "orders": pd.DataFrame(
            {"order_id": np.arange(buyer.size), "customer_id": buyer, "product_id": product, "placed": days_after(placed), **orders}
        ),
    }  # fmt: skip


def labels(tables: dict[str, pd.DataFrame], days: list[int]) -> dict[str, pd.DataFrame]:
    """Returns the examples of each forecast after each of these days, in the order of ``TASKS``."""
    customers, orders, found = tables["customers"], tables["orders"], []
    for at in map(days_after, days):
        later = orders[(orders.placed > at) & (orders.placed <= at + pd.Timedelta(days=HORIZON))].groupby("customer_id")
        known = customers.loc[customers.joined <= at, ["customer_id"]]
        known.insert(0, "timestamp", at)
        products = known.customer_id.map(later.product_id.agg(lambda each: sorted(set(each))))
        spent = known.customer_id.map(later.paid.sum())
        found.append(
            [
                known.assign(active=spent.notna().astype("int64")),
                known.assign(spent=spent.fillna(0)),
                known.assign(product_id=products).dropna(),
            ]
        )
    return dict(zip(TASKS, (pd.concat(each, ignore_index=True) for each in zip(*found))))


def make(root: Path, num_customers: int = 600, num_products: int = 60, seed: int = 0) -> None:
    """Writes a shop as RelBench stores a dataset: manifest.yaml, db/TABLE.parquet, tasks/TASK/manifest.yaml and tasks/TASK/SPLIT.parquet."""
    tables = shop(num_customers, num_products, seed)
    for folder in ("db", *(f"tasks/{name}" for name in TASKS)):
        (root / folder).mkdir(parents=True)
    (root / "manifest.yaml").write_text(f"name: {root.name}\n{MANIFEST}")
    for name, table in tables.items():
        table.to_parquet(root / "db" / f"{name}.parquet", index=False)
    for name, text in TASKS.items():
        (root / "tasks" / name / "manifest.yaml").write_text(
            yaml.safe_dump({"name": name, **yaml.safe_load(text)}, sort_keys=False)
        )
    orders = tables["orders"][["placed", "order_id", "rating"]]
    for split, days, (after, until) in (
        ("train", [55, 115, 175], (0, VAL)),
        ("val", [VAL], (VAL, TEST)),
        ("test", [TEST], (TEST, DAYS)),
    ):
        here = orders[(orders.placed > days_after(after)) & (orders.placed <= days_after(until))]
        for name, table in {**labels(tables, days), "order-rating": here}.items():
            table.to_parquet(root / "tasks" / name / f"{split}.parquet", index=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "partition", "train"])
    parser.add_argument("root", type=Path, help="folder of the database")
    parser.add_argument("tasks", nargs="*", help="names of tasks to train; without one, all")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if args.step == "make":
        make(args.root)
    elif args.step == "partition":
        partition(args.root, args.parts)
    else:
        salientpp.init_process_group()
        for name in args.tasks or [task.name for task in tasks_of(args.root)]:
            for split, (measure, found, constant) in run(args.root, name, args.epochs).items():
                if not dist.is_initialized() or dist.get_rank() == 0:
                    print(f"{name}, {split}: {measure} {found:.3f}, without a model {constant:.3f}")


if __name__ == "__main__":
    main()
