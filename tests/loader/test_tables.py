"""Laws of tables of PyTorch Frame in loaders: the table of a batch is the table of its vertices, bit for bit.

It does not matter whether the graph is in memory, in a directory or on ranks, and what caches and encodings do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from graphs import random_data, random_hetero
from peers import peer
from rare import rare
from tables import TensorFrame, parts, same, stype, table
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.nn import SAGEConv

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, cli
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.engine.pipeline import tensors_in
from salientpp.store.directory.local_copy import copy_to_disk
from salientpp.store.directory.rewrite import rewrite_topology

FANOUTS, BATCH = [4, 3], 8
CITES = ("paper", "cites", "paper")


def typed() -> HeteroData:
    """Papers with ``x`` and a table, authors and venues with a table, citations with a table and their numbers, and seeds of all types."""
    data = random_hetero()
    for name in data.node_types:
        data[name].tf = table(data[name].num_nodes, with_y=name == "paper")
        data[name].train_mask = torch.arange(data[name].num_nodes) % 2 == 0
    del data["author"].x, data["venue"].x
    data[CITES].table = table(data[CITES].num_edges)
    return data


def plain() -> Data:
    data = random_data(200, 900, edge_attributes=True)
    data.tf, data.edge_table = table(data.num_nodes), table(data.num_edges)
    data.time = torch.arange(200) % 20
    return data


def by_type(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {None: value}


def store_of(data: Any, type_: Any) -> Any:
    return data if type_ is None else data[type_]


def check_batch(batch: Any, data: Any, part: Any = None, types: Any = None) -> None:
    """Compares the tables of a batch with those of the whole ``data``; ``part`` knows its ids if the batch is of a directory."""
    for type_ in [None] if isinstance(batch, Data) else types or batch.node_types:
        ids = store_of(batch, type_).n_id
        if part is not None:
            ids = part.original_id(ids, type_)
        assert same(store_of(batch, type_).tf, store_of(data, type_).tf[ids]), type_
    edges, whole = (batch, data.edge_table) if isinstance(batch, Data) else (batch[CITES], data[CITES].table)
    number = edges.edge_attr[:, -1].long()  # of the edge in the data
    assert same(edges.edge_table if isinstance(batch, Data) else edges.table, whole[number])


# --- one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [typed, plain])
def test_batches_in_memory_hold_the_tables_of_their_vertices(make, num_workers):
    data = make()
    seeds = ("paper", data["paper"].train_mask) if isinstance(data, HeteroData) else data.train_mask
    loader = NeighborLoader(data, FANOUTS, seeds, batch_size=BATCH, num_workers=num_workers, seed=0)
    for batch in loader:
        check_batch(batch, data)


@pytest.mark.parametrize("make", [typed, plain])
def test_with_all_neighbours_tables_equal_those_of_pyg(make):
    peer("pyg_lib")  # PyG's loader samples with it
    data = make()
    seeds = ("paper", data["paper"].train_mask) if isinstance(data, HeteroData) else data.train_mask
    ours = NeighborLoader(data, [-1, -1], seeds, batch_size=BATCH)
    for batch, expected in zip(ours, PygNeighborLoader(data, [-1, -1], seeds, batch_size=BATCH), strict=True):
        for type_ in [None] if isinstance(data, Data) else data.node_types:
            mine, other = store_of(batch, type_), store_of(expected, type_)
            order, pyg_order = mine.n_id.argsort(), other.n_id.argsort()
            assert torch.equal(mine.n_id[order], other.n_id[pyg_order])
            assert same(mine.tf[order], other.tf[pyg_order])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_write_into_a_table_is_seen_by_the_next_batch(num_workers):
    data = plain()
    loader = NeighborLoader(data, FANOUTS, batch_size=BATCH, num_workers=num_workers, seed=0)
    for number, batch in enumerate(loader):
        check_batch(batch, data)
        data.tf.feat_dict[stype.numerical][:, 0] = number
        data.tf.feat_dict[stype.embedding].values.neg_()


def test_the_pipeline_keeps_the_memory_of_every_tensor_of_a_table():
    """Streams of a device keep memory only of tensors that they know."""
    whole = table(8)
    known = {tensor.data_ptr() for tensor in tensors_in(Data(tf=whole))}
    assert {tensor.data_ptr() for tensor in parts(whole)} == known


# --- directories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["whole", "parts"])
@pytest.mark.parametrize("make", [typed, plain])
def test_one_process_reads_the_tables_of_a_directory(tmp_path, make, topology):
    data = make()
    part = salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH, seeds="all", topology=topology)
    part = salientpp.load(tmp_path / "parts", verify="full")
    seeds = ("paper", "all") if part.is_hetero else "all"
    for batch in NeighborLoader(part, FANOUTS, seeds, batch_size=BATCH, num_workers=1):
        check_batch(batch, data, part)
    for part_id in range(2):
        for type_, rows in part.rows(part_id).items():
            begin, end = (0, len(rows["tf"])) if type_ in part.replicated else part.books[type_].range_of(part_id)
            ids = torch.arange(begin, end)
            assert same(rows["tf"], store_of(data, type_).tf[part.original_id(ids, type_)])
            assert same(part.take("tf", ids.flip(0), type_), rows["tf"][ids.flip(0) - begin])
    assert part.num_features == ({"paper": 2, "author": 16, "venue": 16} if part.is_hetero else 3)


def test_rewritten_and_copied_directories_keep_tables(tmp_path):
    data = typed()
    salientpp.partition(data, 2, tmp_path / "whole", FANOUTS, BATCH, seeds=("paper", "train"))
    rewrite_topology(tmp_path / "whole", tmp_path / "parts", "parts")
    rewrite_topology(tmp_path / "parts", tmp_path / "again", "whole")
    first, again = ((tmp_path / name / "manifest.json").read_text() for name in ("whole", "again"))
    assert first == again
    copy_to_disk(tmp_path / "parts", tmp_path / "copy", parts=[1])
    rows = salientpp.load(tmp_path / "copy" / "parts", part_id=1).rows()["author"]["tf"]
    part = salientpp.load(tmp_path / "whole", part_id=1)
    assert same(rows, data["author"].tf[part.original_id(part.split("all", type_="author"), "author")])


def test_a_stopped_partition_is_not_continued_for_other_names(tmp_path, monkeypatch):
    from salientpp.store.directory import writer

    data, monkey = plain(), pytest.MonkeyPatch()
    monkey.setattr(writer, "write_vertices", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH)
    monkey.undo()
    data.tf.col_names_dict[stype.numerical] = ["other", "names"]
    with pytest.raises(ValueError, match="begun with other arguments or data|frames"):
        salientpp.partition(data, 2, tmp_path / "parts", FANOUTS, BATCH)


def test_only_chosen_columns_reach_all_vertices(tmp_path):
    data = plain()
    part = salientpp.partition(data, 1, tmp_path / "parts", FANOUTS, BATCH)
    batch = next(iter(NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, columns=())))
    assert "x" in batch and len(batch.x) == len(batch.tf) == batch.batch_size, "only seeds get the others"
    assert same(batch.tf, data.tf[part.original_id(batch.n_id[: batch.batch_size])])
    batch = next(iter(NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, columns=["tf", "y"])))
    check_batch(batch, data, part)
    assert len(batch.y) == batch.num_nodes and len(batch.x) == batch.batch_size
    with pytest.raises(
        ValueError, match=r"columns must name node attributes of .* \(tf, time, x, y\), got 'tf.numerical'"
    ):
        NeighborLoader(part, FANOUTS, "train", columns=["tf.numerical"])


def test_rows_of_the_user_replace_a_table(tmp_path):
    part = salientpp.partition(plain(), 1, tmp_path / "parts", FANOUTS, BATCH)
    own = part.original_id(torch.arange(200)).float().view(-1, 1)
    batch = next(iter(NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, columns={"tf": own})))
    assert torch.equal(batch.tf, own[batch.n_id])


# --- ranks -------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"replication_factor": 0.3},
    {"replication_factor": 0.2, "lookahead": 2},
    {"time_attr": "time"},
]


def check_ranks(rank: int, root: str, is_typed: bool) -> list[tuple[int, int]]:
    """Compares the batches of this rank with the whole data. Returns the remote rows and the received bytes of each run."""
    data = typed() if is_typed else plain()
    part, found, first = salientpp.load(root), [], None
    for options in OPTIONS:
        if is_typed and "lookahead" in options:
            continue
        seeds = ("paper", "train") if is_typed else "train"
        loader = NeighborLoader(part, FANOUTS, seeds, batch_size=BATCH, shuffle=True, seed=3, num_workers=1, **options)
        batches = list(loader)
        for batch in batches:
            check_batch(batch, data, part)
        stats = loader.stats()
        for type_, row_bytes in loader.engine.basis.source.row_bytes.items():
            assert stats.by_type[type_]["bytes_received"] == stats.by_type[type_]["remote"] * row_bytes
        found.append((stats.rows_remote, sum(each["bytes_received"] for each in stats.by_type.values())))
        if "time_attr" in options:
            continue
        first = first or batches
        for batch, expected in zip(batches, first, strict=True):
            for type_, n_id in by_type(expected.n_id if not is_typed else expected.n_id_dict).items():
                assert torch.equal(store_of(batch, type_).n_id, n_id), "a cache changes bytes, never batches"
    links = LinkNeighborLoader(part, FANOUTS, CITES if is_typed else None, batch_size=BATCH, seed=1)
    for batch, _ in zip(links, range(3)):
        check_batch(batch, data, part)
    return found


@pytest.mark.parametrize(
    ("num_parts", "world", "topology"), [(2, 2, "parts"), (5, 2, "whole"), *rare((2, 2, "whole"), (4, 4, "whole"))]
)
@pytest.mark.parametrize("make", [typed, plain])
def test_ranks_get_the_tables_of_one_process(tmp_path, make, num_parts, world, topology):
    data, is_typed = make(), make is typed
    root = tmp_path / "parts"
    salientpp.partition(
        data, num_parts, root, FANOUTS, BATCH, seeds=("paper", "train") if is_typed else "train", topology=topology
    )
    for found in distributed.run(check_ranks, world, str(root), is_typed):
        assert found[0][0] > found[1][0] > 0 and found[0][1] > found[1][1], "a cache saves rows of tables"


def rows_fetched_with_each(rank: int, root: str, alphas: list[float], send_as: Any) -> list[tuple[int, int]]:
    return [rows_fetched(rank, root, alpha, send_as) for alpha in alphas]


def rows_fetched(rank: int, root: str, alpha: float, send_as: Any) -> tuple[int, int]:
    options = {"replication_factor": alpha, "send_as": send_as}
    loader = NeighborLoader(salientpp.load(root), FANOUTS, "train", batch_size=BATCH, shuffle=True, seed=5, **options)
    for _ in loader:
        pass
    return loader.stats().rows_remote, loader.stats().by_type[None]["bytes_received"]


@pytest.mark.parametrize("send_as", [None, {"tf": "bf16", "x": "fp16"}])
def test_the_analysis_counts_the_bytes_that_a_run_receives(tmp_path, send_as):
    root = tmp_path / "parts"
    salientpp.partition(plain(), 2, root, FANOUTS, BATCH)
    batches = Batches(num_neighbors=FANOUTS, batch_size=BATCH, epochs=1, seed=5)
    given = {} if send_as is None else {"send_as": send_as}
    alphas = [0.0, 0.3]
    of_ranks = distributed.run(rows_fetched_with_each, 2, str(root), alphas, send_as)
    for alpha, runs in zip(alphas, zip(*of_ranks), strict=True):
        analysis = analyze(salientpp.load(root), batches, Ways(replication_factors=[alpha], policies=["vip"], **given))
        (volume,) = analysis.of(way="cache", policy="vip")
        assert volume.remote_rows_per_epoch == sum(rows for rows, _ in runs) > 0
        assert volume.remote_bytes_per_epoch == sum(received for _, received in runs)
    data = plain()
    in_memory = analyze(data, batches, Ways(replication_factors=[0.3], policies=["vip"], **given), parts=2)
    assert in_memory.of(way="cache", policy="vip")[0].row_bytes == volume.row_bytes


# --- fewer bytes -------------------------------------------------------------------------------------------


def round_numbers(table: Any) -> None:
    """Rounds the floating-point numbers of a table to bfloat16."""
    for name in (
        stype.numerical,
        stype.sequence_numerical,
        stype.embedding,
        stype.text_embedded,
        stype.image_embedded,
    ):
        value = table.feat_dict[name]
        rounded = value if isinstance(value, torch.Tensor) else value.values
        rounded.copy_(rounded.bfloat16())


def check_rounded(rank: int, root: str, send_as: Any) -> int:
    """Checks that numbers are rounded to bfloat16 and everything else is exact. Returns the received bytes."""
    data, part = plain(), salientpp.load(root)
    loader = NeighborLoader(part, FANOUTS, "train", batch_size=BATCH, seed=3, send_as=send_as)
    for batch in loader:
        expected = data.tf[part.original_id(batch.n_id)]
        round_numbers(expected)
        assert same(batch.tf, expected)
    return loader.stats().by_type[None]["bytes_received"]


@pytest.mark.parametrize("where", ["store_as", "send_as"])
def test_numbers_of_a_table_are_rounded_and_other_cells_are_exact(tmp_path, where):
    stored = {"store_as": {"tf": "bf16"}} if where == "store_as" else {}
    salientpp.partition(plain(), 2, tmp_path / "parts", FANOUTS, BATCH, **stored)
    salientpp.partition(plain(), 2, tmp_path / "wide", FANOUTS, BATCH)
    sent = distributed.run(check_rounded, 2, str(tmp_path / "parts"), None if stored else {"tf": "bf16"})
    wide = distributed.run(rows_fetched, 2, str(tmp_path / "wide"), 0.0, None)
    assert 0 < sum(sent) < sum(received for _, received in wide)


def check_edges(rank: int, root: str) -> int:
    """Checks that tables of edges are rounded to bfloat16. Returns the number of edges."""
    data, number = plain(), 0
    for batch in NeighborLoader(salientpp.load(root), FANOUTS, "train", batch_size=BATCH, seed=3):
        expected = data.edge_table[batch.edge_attr.view(-1).long()]
        round_numbers(expected)
        assert same(batch.edge_table, expected)
        number += batch.num_edges
    return number


@pytest.mark.parametrize("topology", ["whole", "parts"])
def test_tables_of_edges_may_be_stored_narrower(tmp_path, topology):
    root, store_as = tmp_path / "parts", {"edge_table": "bf16"}
    part = salientpp.partition(plain(), 2, root, FANOUTS, BATCH, topology=topology, store_as=store_as)
    assert part.manifest["version"] == 5 and part.description.edge_types[0].is_narrow
    assert not part.description.node_types[0].is_narrow
    assert all(distributed.run(check_edges, 2, str(root)))


def test_a_format_that_has_no_missing_values_is_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError,
        match="data.tf.sequence_numerical cannot be stored as int8: a value in row 1 is not finite.* store the attribute as bf16",
    ):
        salientpp.partition(plain(), 1, tmp_path / "parts", FANOUTS, BATCH, store_as={"tf": "int8"})


# --- what does not take tables -----------------------------------------------------------------------------


def test_padding_full_graph_training_and_inference_refuse_tables_by_name(tmp_path):
    data = plain()
    part = salientpp.partition(data, 1, tmp_path / "parts", FANOUTS, BATCH)
    with pytest.raises(
        NotImplementedError,
        match=r"pad='bucket' fills up tensors, but the data has TensorFrame attributes \(edge_table, tf\); leave pad out",
    ):
        NeighborLoader(part, FANOUTS, "train", pad="bucket")
    with pytest.raises(ValueError, match="has TensorFrame attributes .*tf.*, but full-graph training takes tensors"):
        salientpp.distribute(torch.nn.Linear(3, 2), part)
    layers = [SAGEConv(3, 2)]
    expected = salientpp.inference(layers, data)[part.original_id(part.split("all"))]
    torch.testing.assert_close(salientpp.inference(layers, part), expected)  # x beside a table
    del data.x
    part = salientpp.partition(data, 1, tmp_path / "tables", FANOUTS, BATCH)
    with pytest.raises(ValueError, match="x"):
        salientpp.inference(layers, part)


def test_names_that_collide_with_columns_of_a_table_are_refused(tmp_path):
    data = plain()
    data["tf.numerical"] = torch.ones(200)
    with pytest.raises(
        ValueError, match="data.tf.numerical has the name of a column of the TensorFrame data.tf; rename it"
    ):
        salientpp.partition(data, 1, tmp_path / "parts", FANOUTS, BATCH)


def test_a_table_of_another_length_is_left_out_with_a_warning(tmp_path):
    data = plain()
    data.other = table(3)
    with pytest.warns(
        UserWarning, match=r"data.other \(TensorFrame of 3 rows\) left out: only attributes with one row per vertex"
    ):
        part = salientpp.partition(data, 1, tmp_path / "parts", FANOUTS, BATCH)
    assert "other" not in part.node_rows()


def test_without_torch_frame_the_error_says_what_to_install(tmp_path, monkeypatch):
    import sys

    part = salientpp.partition(plain(), 1, tmp_path / "parts", FANOUTS, BATCH)
    monkeypatch.setitem(sys.modules, "torch_frame", None)
    with pytest.raises(
        ImportError,
        match=r"has TensorFrame attributes, which need PyTorch Frame; run `pip install 'salientpp\[relational\]'`",
    ):
        NeighborLoader(part, FANOUTS, "train")


def test_the_command_partitions_a_file_with_tables_and_shows_them(tmp_path, capsys):
    data = plain()
    data.tf = TensorFrame(
        {stype.categorical: torch.arange(400).view(200, 2)}, {stype.categorical: ["a", "b"]}, torch.ones(200)
    )
    torch.save(data, tmp_path / "graph.pt")
    to = str(tmp_path / "parts")
    assert (
        cli.main(
            [
                "partition",
                f"pyg:{tmp_path / 'graph.pt'}",
                to,
                "--parts",
                "2",
                "--num-neighbors",
                "4,3",
                "--batch-size",
                "8",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert cli.main(["info", to]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tf table (2 categorical, y; 8 bytes per row)" in shown and "format version 5" in shown
    part = salientpp.load(Path(to), part_id=0)
    assert same(part.node_rows()["tf"], data.tf[part.original_id(part.split("all"))])
