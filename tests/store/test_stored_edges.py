"""Laws of edge attributes that are stored narrower: whatever reads a dataset directory gets the decoded rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from directories import edit_manifest
from graphs import random_data
from one_process import TYPED_FANOUTS, typed_data
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphConv

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.analysis.analyze import Ways, analyze
from salientpp.analysis.batches import Batches
from salientpp.cli import main
from salientpp.fullgraph import local
from salientpp.partitioning import numbering
from salientpp.store.directory.files import DatasetError
from salientpp.store.narrow import Narrow, NarrowRows

FANOUTS, BATCH = [4, 3], 16
STORED = {"edge_attr": "int8", "w": "fp16", "x": "bf16"}
WRITES = ("author", "writes", "paper")
FORMS = ["whole", "parts"]


def one_type() -> Data:
    data = random_data(120, 700, directed=True)
    generator = torch.Generator().manual_seed(5)
    data.edge_attr = torch.randn(data.num_edges, 3, 7, generator=generator)
    data.w = torch.rand(data.num_edges, generator=generator, dtype=torch.float64)
    data.number = torch.arange(data.num_edges)
    return data


def recoded(rows: torch.Tensor, format: str) -> torch.Tensor:
    """Encodes and decodes the rows."""
    narrow = Narrow(format, rows.dtype, tuple(rows.shape[1:]))
    return narrow.decode(narrow.encode(rows))


def of_edges(data: Any) -> dict[str, torch.Tensor]:
    return {name: recoded(data[name], STORED[name]) for name in ("edge_attr", "w")}


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    for form in FORMS:
        salientpp.partition(one_type(), 3, folder / form, FANOUTS, BATCH, topology=form, store_as=STORED)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_reader_of_a_directory_gets_the_decoded_rows(roots, form):
    part, data = salientpp.load(roots / form, verify="full"), one_type()
    number = part.edge_rows()["number"]
    for name, rows in of_edges(data).items():
        assert part.edge_rows()[name].dtype == rows.dtype
        assert torch.equal(part.edge_rows()[name], rows[number])
    for view, part_id in ((part, 1), (part.joined((0, 1, 3), None), 1)):
        own = view.part_edge_rows(part_id)[None]
        for name, rows in of_edges(data).items():
            mine = number[own.first_edge : own.first_edge + own.rows[name].shape[0]]
            assert torch.equal(own.rows[name].whole(), rows[mine]) and mine.numel()


@pytest.mark.parametrize("form", FORMS)
def test_the_manifest_has_version_5_the_formats_and_their_errors(roots, form, capsys):
    manifest, data = json.loads((roots / form / "manifest.json").read_text()), one_type()
    assert (manifest["version"], manifest["topology"]) == (5, form)
    attributes = manifest["edge_types"][0]["attributes"]
    for name, width in (("edge_attr", 8 + 21 + 3), ("w", 4)):
        entry, error = attributes[name], of_edges(data)[name].double() - data[name].double()
        assert (entry["dtype"], entry["row_shape"]) == (str(data[name].dtype)[6:], list(data[name].shape[1:]))
        assert entry["stored_as"]["format"] == STORED[name] and entry["stored_as"]["row_bytes"] == width
        assert entry["stored_as"]["largest_error"] == float(error.abs().max())
        sizes = [file.stat().st_size - 128 for file in (roots / form).rglob(f"e0.edge_{name}.npy")]
        assert sum(sizes) == 700 * width and len(sizes) == (1 if form == "whole" else 3)
    assert "stored_as" not in attributes["number"]
    assert main(["info", str(roots / form)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "format version 5" in said
    assert "edge_attr stored as int8: 32 bytes per row, not 84; largest error 0.0" in said


def test_directories_whose_edges_are_not_narrow_keep_their_version(tmp_path):
    versions = []
    for form, store_as in ((form, store_as) for form in FORMS for store_as in (None, {"x": "bf16"})):
        root = tmp_path / f"{form} {store_as is None}"
        part = salientpp.partition(one_type(), 1, root, FANOUTS, BATCH, topology=form, store_as=store_as)
        versions.append(part.manifest["version"])
    assert versions == [1, 3, 4, 4]


def test_rows_are_encoded_piece_by_piece(tmp_path, monkeypatch, roots):
    """A column of edges that does not fit into memory is never encoded at once."""
    monkeypatch.setattr(numbering, "_EDGES_AT_ONCE", 64)
    sizes, encode = [], Narrow.encode

    def recorded(narrow, rows):
        sizes.append(len(rows))
        return encode(narrow, rows)

    monkeypatch.setattr(Narrow, "encode", recorded)
    salientpp.partition(one_type(), 3, tmp_path / "d", FANOUTS, BATCH, topology="parts", store_as={"edge_attr": "int8"})
    assert sum(sizes) == 700 and max(sizes) <= 128
    for file in (roots / "parts").rglob("e0.edge_edge_attr.npy"):
        again = tmp_path / "d" / file.relative_to(roots / "parts")
        assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_loader_decodes_only_the_rows_of_its_batches(roots, form, monkeypatch):
    part = salientpp.load(roots / form).joined((0, 3), 0)
    number, expected = part.edge_rows()["number"], of_edges(one_type())["edge_attr"]

    def refused(rows):
        raise AssertionError("all rows were decoded")

    monkeypatch.setattr(NarrowRows, "whole", refused)
    for batch in NeighborLoader(part, FANOUTS, "train", batch_size=BATCH):
        assert torch.equal(batch.edge_attr, expected[number[batch.e_id]])


# --- clients ----------------------------------------------------------------------------------------------


def full_graph(rank: int, root: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    graph = local(salientpp.load(root))
    return graph.number, {name: getattr(graph, name) for name in ("edge_attr", "w")}


@pytest.mark.parametrize("form", FORMS)
def test_full_graph_training_reads_the_decoded_rows(roots, form):
    seen, expected = 0, of_edges(one_type())
    for number, found in distributed.run(full_graph, 3, roots / form):
        assert all(torch.equal(rows, expected[name][number]) for name, rows in found.items())
        seen += number.numel()
    assert seen == 700


def weighted() -> Data:
    """Returns data whose weights 16-bit floats round visibly."""
    data = one_type()
    data.weight, data.x = data.w + 3, data.x.double()
    del data.w, data.edge_attr
    return data


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [GraphConv(weighted().x.size(1), 6).double().eval(), GraphConv(6, 3).double().eval()]


def inferred(rank: int, root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    part = salientpp.load(root)
    return salientpp.inference(layers(), part, edge_weight="weight"), part.original_id(part.split("all"))


@pytest.mark.parametrize("form", FORMS)
def test_inference_uses_the_decoded_weights(tmp_path, form):
    data = weighted()
    salientpp.partition(data, 2, tmp_path / "d", FANOUTS, BATCH, topology=form, store_as={"weight": "bf16"})
    expected, exact = data.x, data.x
    with torch.no_grad():
        for layer in layers():
            expected = layer(expected, data.edge_index, recoded(data.weight, "bf16"))
            exact = layer(exact, data.edge_index, data.weight)
    for rows, ids in distributed.run(inferred, 2, tmp_path / "d"):
        assert torch.allclose(rows, expected[ids], rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
        assert not torch.allclose(rows, exact[ids], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def summed(rank: int, root: Path) -> int:
    """Compares weighted sums of remote rows with the same sums over a directory that stores the decoded weights exactly."""
    given = {
        "batch_size": BATCH,
        "seed": 2,
        "shuffle": True,
        "partial_aggregation": {"reduce": "sum", "weight": "weight"},
    }
    loaders = [NeighborLoader(salientpp.load(root / name), FANOUTS, "train", **given) for name in ("narrow", "wide")]
    number = 0
    for ours, want in zip(*loaders, strict=True):
        assert torch.equal(ours.partial.value, want.partial.value) and torch.equal(ours.weight, want.weight)
        number += want.partial.value.size(0)
    return number


@pytest.mark.parametrize("form", FORMS)
def test_sums_use_the_decoded_weights(tmp_path, form):
    data = weighted()
    salientpp.partition(data, 2, tmp_path / "narrow", FANOUTS, BATCH, topology=form, store_as={"weight": "fp16"})
    data.weight = recoded(data.weight, "fp16")
    salientpp.partition(data, 2, tmp_path / "wide", FANOUTS, BATCH, topology=form)
    assert all(distributed.run(summed, 2, tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_labels_of_edges_are_the_decoded_rows(roots, form):
    part, expected = salientpp.load(roots / form).joined((0, 3), 0), of_edges(one_type())["w"]
    loader = LinkNeighborLoader(part, FANOUTS, edge_label_index="all", edge_label="w", batch_size=100)
    found = torch.cat([batch.edge_label for batch in loader])
    assert torch.equal(found, expected[part.edge_rows()["number"]])


# --- types and the command ----------------------------------------------------------------------------------


def several_types() -> HeteroData:
    data, generator = typed_data(), torch.Generator().manual_seed(1)
    for name in (WRITES, ("paper", "cites", "paper")):
        data[name].far = torch.randn(data[name].num_edges, 16, generator=generator)
    data["author"].far = torch.randn(data["author"].num_nodes, 16, generator=generator)
    return data


def test_a_name_selects_vertices_and_edges_and_a_pair_one_type(tmp_path):
    chosen: dict[Any, list] = {
        "far": ["author", WRITES, ("paper", "cites", "paper")],
        (WRITES, "far"): [WRITES],
        ("author", "far"): ["author"],
    }
    for key, types in chosen.items():
        part = salientpp.partition(
            several_types(), 1, tmp_path / str(len(types)) / str(key[0][0]), TYPED_FANOUTS, 8, seeds=("paper", "train"), store_as={key: "int8"}
        )  # fmt: skip
        assert [each.name for each in part.description.types if each.is_narrow] == types


def test_the_command_stores_edge_attributes_narrower(tmp_path, capsys):
    torch.save(one_type(), tmp_path / "one.pt")
    torch.save(several_types(), tmp_path / "several.pt")
    common = ["--parts", "2", "--num-neighbors", "4,3", "--batch-size", "16", "--topology", "parts"]
    given = ["--store-as", "edge_attr=int8", "--store-as", "w=fp16", "--store-as", "x=bf16"]
    assert main(["partition", f"pyg:{tmp_path / 'one.pt'}", str(tmp_path / "one"), *common, *given]) == 0
    assert "edge_attr stored as int8: 32 bytes per row, not 84" in " ".join(capsys.readouterr().out.split())
    given = ["--seeds", "paper:train", "--store-as", "author,writes,paper:far=int8"]
    assert main(["partition", f"pyg:{tmp_path / 'several.pt'}", str(tmp_path / "several"), *common, *given]) == 0
    assert "author writes paper far stored as int8: 24 bytes per row, not 64" in " ".join(capsys.readouterr().out.split())  # fmt: skip
    described = salientpp.load(tmp_path / "several").description
    assert [each.name for each in described.types if each.is_narrow] == [WRITES]
    assert main(["analyze", str(tmp_path / "several"), "--send-as", "paper,cites,paper:far=int8"]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    known = "(('author', 'x'), ('paper', 'x'))"
    assert f"send_as must name node attributes {known}, got (('paper', 'cites', 'paper'), 'far')" in refused
    wrong = ["--seeds", "paper:train", "--store-as", "author,likes,paper:far=int8"]
    assert main(["partition", f"pyg:{tmp_path / 'several.pt'}", str(tmp_path / "wrong"), *common, *wrong]) == 2
    assert "got (('author', 'likes', 'paper'), 'far')" in capsys.readouterr().err


def test_the_analysis_reads_a_name_that_vertices_share_with_edges(tmp_path):
    data = several_types()
    data[WRITES].x = torch.rand(data[WRITES].num_edges, 16)
    given = {"topology": "parts", "seeds": ("paper", "train")}
    part = salientpp.partition(data, 2, tmp_path / "d", TYPED_FANOUTS, 8, **given)
    batches = Batches(num_neighbors=TYPED_FANOUTS, batch_size=8, seeds=("paper", "train"), epochs=1)
    wide, narrow = (
        analyze(part, batches, Ways(["vip"], [0], send_as=send_as)).row_bytes for send_as in (None, {"x": "fp16"})
    )
    assert {name: 2 * number for name, number in narrow.items()} == wide and any(wide.values())


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options, text",
    [
        ({"weight_attr": "w"}, r"weight_attr='w' decides how batches are drawn, but .* stores 'w' as fp16; partition again without 'w' in store_as"),
        ({"time_attr": "w"}, r"time_attr='w' decides how batches are drawn, but .* stores 'w' as fp16; partition again without 'w' in store_as"),
        ({"send_as": {"edge_attr": "int4"}}, r"send_as names the edge attribute 'edge_attr', which .* stores and sends as int8; leave it out of send_as"),
    ],
    ids=str,
)  # fmt: skip
def test_draws_need_exact_attributes_and_rows_are_encoded_once(roots, form, options, text):
    part = salientpp.load(roots / form).joined((0, 3), 0)
    with pytest.raises(ValueError, match=text):
        NeighborLoader(part, FANOUTS, "train", **options)


def test_times_of_vertices_that_are_not_exact_are_refused(tmp_path):
    data = one_type()
    data.when = torch.rand(120, dtype=torch.float64)
    for form in FORMS:
        part = salientpp.partition(data, 1, tmp_path / form, FANOUTS, BATCH, topology=form, store_as={"when": "fp16"})
        with pytest.raises(ValueError, match=r"time_attr='when' decides how batches are drawn, but .* stores 'when' as fp16"):  # fmt: skip
            NeighborLoader(part, FANOUTS, "train", time_attr="when")


def test_times_of_edges_are_stored_without_encoding(tmp_path):
    with pytest.raises(ValueError, match="'w' is time_attr, which decides how batches are drawn, so it is stored as it is"):  # fmt: skip
        salientpp.partition(one_type(), 1, tmp_path / "d", FANOUTS, BATCH, time_attr="w", store_as={"w": "fp16"})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"format": "int7"}, "a format must be one of"),
        ({"row_bytes": 33}, r"edge_types\[0\].attributes\['edge_attr'\].stored_as.row_bytes must be 32, got 33"),
        ({"relative_rms_error": None}, r"edge_types\[0\].attributes\['edge_attr'\].stored_as must be"),
        (None, r"files\['e0.edge_edge_attr.npy'\] must be <f4 \[700, 3, 7\], got '\|u1' \[700, 32\]"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, change, text):
    salientpp.partition(one_type(), 1, tmp_path / "d", FANOUTS, BATCH, store_as={"edge_attr": "int8"})

    def edit(manifest: dict) -> None:
        entry = manifest["edge_types"][0]["attributes"]["edge_attr"]
        if change is None:
            del entry["stored_as"]
        else:
            entry["stored_as"].update(change)

    edit_manifest(tmp_path / "d", edit, checksum=True)
    with pytest.raises(DatasetError, match=text):
        salientpp.load(tmp_path / "d")


def test_only_version_5_stores_edge_attributes_narrower(roots, tmp_path):
    root = salientpp.copy_to_disk(roots / "parts", tmp_path, parts=range(3))
    edit_manifest(root, lambda manifest: manifest.update(version=4), checksum=True)
    text = r"edge_types\[0\].attributes\['edge_attr'\].stored_as is valid only in version 5 or later, for attributes of edges"
    with pytest.raises(DatasetError, match=text):
        salientpp.load(root)
