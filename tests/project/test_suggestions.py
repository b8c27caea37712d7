"""Laws of mistyped names: wherever a user writes a name, the error has the closest known one."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from distributed import run as run_ranks
from forked_python import python

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader, cli, datasets
from salientpp.loader.options import OPTIONS
from salientpp.suggestions import did_you_mean

MAG = {"num_papers": 120, "num_features": 2, "community_size": 30, "papers_per_institution": 60}


@pytest.fixture(scope="module")
def data():
    found = datasets.synthetic(num_vertices=200, num_features=4, community_size=20)
    found.year = torch.arange(200)
    found.edge_weight = torch.ones(found.num_edges)
    return found


@pytest.fixture(scope="module")
def part(data, tmp_path_factory):
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("names") / "d", [2, 2], 8, method="random")


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    data = datasets.synthetic_mag(**MAG)
    return salientpp.partition(data, 1, tmp_path_factory.mktemp("names") / "typed", [2, 2], 8, method="random")


def node(data, seeds=None, **options):
    return NeighborLoader(data, [2, 2], seeds, **options)


#: What a user writes -> the name that the error suggests.
MISTYPED = {
    "an option": (lambda data, part, typed: node(part, "train", replication_facter=0.1), "replication_factor"),
    "an option, on a Data": (lambda data, part, typed: node(data, memroy="1GB"), "memory"),
    "an argument of PyG": (lambda data, part, typed: node(part, "train", time_atr="year"), "time_attr"),
    "an argument of torch": (lambda data, part, typed: node(part, "train", batchsize=4), "batch_size"),
    "an option of links": (lambda data, part, typed: LinkNeighborLoader(part, [2], lookahed=1), "lookahead"),
    "a value": (lambda data, part, typed: node(part, "train", uneven="exat"), "exact"),
    "a split": (lambda data, part, typed: node(part, "trian"), "train"),
    "a split of a type": (lambda data, part, typed: node(typed, ("paper", "vall")), "val"),
    "a column": (lambda data, part, typed: node(part, "train", columns=["yaer"]), "year"),
    "times": (lambda data, part, typed: node(part, "train", time_attr="yaer"), "year"),
    "times of a Data": (lambda data, part, typed: node(data, time_attr="yaer"), "year"),
    "weights": (lambda data, part, typed: node(part, "train", weight_attr="edge_wieght"), "edge_weight"),
    "weights of a Data": (lambda data, part, typed: node(data, weight_attr="edge_wieght"), "edge_weight"),
    "an attribute of a part": (lambda data, part, typed: part.num_part, "num_parts"),
    "a mask of a part": (lambda data, part, typed: part.train_maks, "train_mask"),
    "an argument of partition": (lambda data, part, typed: salientpp.partition(data, 2, "new", topolgy="parts"), "topology"),
    "seeds of partition": (lambda data, part, typed: salientpp.partition(data, 2, "new", seeds="trian"), "train"),
    "a policy": (lambda data, part, typed: node(part, "train", policy="vipp"), "vip"),
    "a policy for types": (lambda data, part, typed: node(typed, ("paper", "train"), policy="degre"), "degree"),
    "a lookahead": (lambda data, part, typed: node(part, "train", lookahead="atuo"), "auto"),
    "a device": (lambda data, part, typed: node(part, "train", device="cdua:0"), "cuda"),
    "a format": (lambda data, part, typed: node(part, "train", send_as={"x": "int9"}), "int8"),
    "a method": (lambda data, part, typed: salientpp.partition(data, 2, "new", method="metiss"), "metis"),
    "an order": (lambda data, part, typed: salientpp.partition(data, 2, "new", order="orignal"), "original"),
    "an argument of inference": (lambda data, part, typed: salientpp.inference(None, None, batch_sise=1), "batch_size"),
    "an argument of distribute": (lambda data, part, typed: salientpp.distribute(None, part, layuot="halo"), "layout"),
    "an argument of trim": (lambda data, part, typed: salientpp.nn.trim(None, nroms="all rows"), "norms"),
    "an argument of merge_partial": (lambda data, part, typed: salientpp.nn.merge_partial(None, chek=True), "check"),
    "an argument of init_process_group": (lambda data, part, typed: salientpp.init_process_group(timout=1), "timeout"),
    "an argument of copy_to_disk": (lambda data, part, typed: salientpp.copy_to_disk(part.root, "to", prats=1), "parts"),
    "an argument of a sampler": (lambda data, part, typed: salientpp.NeighborSampler(data, [2], repalce=True), "replace"),
    "an argument of PPR": (lambda data, part, typed: salientpp.PPRSampler(data, 2, aplha=0.1), "alpha"),
    "an argument of both ways": (
        lambda data, part, typed: salientpp.BidirectionalNeighborSampler(data, [2], disjont=True), "disjoint",
    ),
    "a name of the package": (lambda data, part, typed: salientpp.NeighbourLoader, "NeighborLoader"),
    "a name of nn": (lambda data, part, typed: salientpp.nn.trimm, "trim"),
    "an argument of load": (lambda data, part, typed: salientpp.load(part.root, verfy="full"), "verify"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTYPED)
def test_an_error_suggests_a_name(data, part, typed, monkeypatch, tmp_path, what):
    monkeypatch.chdir(tmp_path)
    mistake, meant = MISTYPED[what]
    with pytest.raises((TypeError, ValueError, AttributeError), match=rf"\. Did you mean {meant}( or [\w-]+)?\?$"):
        mistake(data, part, typed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("analize d", "analyze"),
        ("copy_to_disk d --to e", "copy-to-disk"),
        ("--verison", "--version"),
        ("partition synthetic d --prats 2", "--parts"),
        ("analyze d --replicaton-factors=0,1", "--replication-factors"),
        ("plan d --machine-file m.json", "--machines"),
        ("analyze synthetic --parts 2 --seeds trian --predict-only", "train"),
        ("analyze synthetic --parts 2 --split trian", "--seeds?"),
        ("analyze synthetic --parts 2 --policies vpi", "vip"),
        ("analyze syntetic --parts 2", "synthetic"),
    ],
)
def test_the_command_suggests_a_name(capsys, words, meant):
    try:
        code = cli.main(words.split())
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and f". Did you mean {meant}" in said, said


def test_arguments_after_two_dashes_belong_to_the_script(capsys):
    assert cli.main(["slurm", "--parts=2", "--time=1:00", "--", "train.py", "--prats", "3", "--parts=--"]) == 0
    assert "--prats 3" in capsys.readouterr().out


def test_nothing_is_suggested_for_a_strange_word():
    assert did_you_mean("xyz", ["train", "val"]) == did_you_mean(3, ["train"]) == ""
    assert did_you_mean("Trian", ["train", None]) == ". Did you mean train?"


#: Options of a job's ranks -> a value that asks for something.
OF_PARTS = {
    "replication_factor": 0.1, "lookahead": 2, "ranks_per_host": 1, "device_rows_cache": 0.5, "send_as": {"x": "int8"},
    "logical_ranks": 2, "logical_ranks_join": True, "memory": "1MB", "cooperate": "host", "policy": "degree",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PARTS)
def test_options_of_parts_are_refused_on_a_data(data, name):
    lead = next(lead for lead in OPTIONS if name in (lead, *(f"{lead}_{key}" for key in OPTIONS[lead].keys)))
    given = OF_PARTS[name] if name == lead else {name.removeprefix(f"{lead}_"): OF_PARTS[name]}
    with pytest.raises(ValueError, match=f"^{re.escape(OPTIONS[name].named(name))}.*; leave it out"):
        node(data, **{lead: given})
    NeighborLoader(data, [2, 2], **{lead: OPTIONS[lead].default})


def test_a_module_says_once_what_was_meant():
    script = "import salientpp, sys; getattr(salientpp.nn if sys.argv[1] == 'nn' else salientpp, sys.argv[2])"
    for words, meant in ((("nn", "trimm"), "trim"), (("top", "NeighbourLoader"), "NeighborLoader")):
        said = subprocess.run([python(), "-c", script, *words], capture_output=True, text=True).stderr
        assert said.count("Did you mean") == 1 and f"Did you mean {meant}" in said, said
    assert not hasattr(salientpp.nn, "__wrapped__") and not hasattr(salientpp.nn, "_trim")


def mistyped_on_one_rank(rank, root):
    part = salientpp.load(root)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        NeighborLoader(part, [2], "train", **({"memroy": "1MB"} if rank == 1 else {}))
    return str(caught.value)


def test_a_name_that_one_rank_mistypes_raises_on_all_ranks(data, tmp_path):
    salientpp.partition(data, 2, tmp_path / "d", [2], 8, method="random")
    for said in run_ranks(mistyped_on_one_rank, 2, tmp_path / "d"):
        assert "'memroy'. Did you mean memory" in said
