"""Law of random models over ranks: outputs and all gradients equal those of one process, or all ranks raise an error that says why.

Each case draws a layout or a plan, the number of ranks, ``recompute`` and preloading; or batches that the ranks of a host compute together. With fewer
preloaded hops than the model needs, outputs and gradients equal those of one process for each host, on the vertices that the host keeps.
"""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from host_batches import batch_of, filled, loader_of, share_batch
from random_cases.choices import Choice
from random_cases.drawn import BY_ROW, Taste, drawn, one_of
from random_cases.models import (
    Case,
    Failure,
    Invalid,
    Outcome,
    Refused,
    cleared,
    graph_of_cases,
    made_of,
    run_step,
)
from random_cases.pool import Failed, Place, shared_pool
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import salientpp
from salientpp.fullgraph import Constants, Preload, distribute, local, plan_for
from salientpp.ranks.comm import Comm
from salientpp.ranks.placement import runs
from salientpp.testing.steps import Rows, difference, is_in_words

_PRODUCTS = one_of(("SAGEConv", "GINConv", "GraphConv", "GCNConv", "LGConv", "SGConv", "TAGConv", "APPNP", "LEConv", "SimpleConv", "ClusterGCNConv", "GatedGraphConv"), aggr=())  # fmt: skip
_ANY = one_of(("SAGEConv", "GINConv", "GraphConv", "GCNConv", "GATConv", "GATv2Conv", "TransformerConv", "RGCNConv", "FiLMConv", "CGConv", "EdgeConv", "GENConv", "PNAConv", "NNConv", "GMMConv", "ResGatedGraphConv", "GeneralConv", "GINEConv", "AGNNConv", "FAConv", "GCN2Conv", "DNAConv", "PointNetConv", "PPFConv", "PointTransformerConv", "MFConv", "EGConv", "FeaStConv", "MixHopConv", "ARMAConv", "APPNP", "SGConv", "TAGConv", "RGATConv", "HEATConv", "PDNConv"))  # fmt: skip
#: First vertices of the ranks. Some ranks have no vertices, or few.
_OFFSETS = {1: [[0, 120]], 2: [[0, 60, 120], [0, 1, 120], [0, 0, 120]], 3: [[0, 0, 70, 120], [0, 40, 80, 120]], 4: [[0, 3, 3, 70, 120], [0, 30, 60, 90, 120]]}  # fmt: skip
_LAYOUTS = ("cover", "1d", "1.5d", "2d", "grid:1x{}", "grid:{}x1")
_PLANS = ("fetch", "cache", "recompute", "sum", "cut")
#: Numbers of preloaded hops, compared with the hops that a model needs -> how many more.
_HOPS = {"as needed": 0, "more": 6, "fewer": -1}
#: Layers, norms (also inside PyG's models) and questions that use degrees, statistics or sizes of the whole graph, as the documentation says. With fewer
#: hops, such results equal neither graph.
_OF_WHOLE_GRAPH = r"model|GCN|SGConv|SSGConv|TAGConv|APPNP|ARMAConv|FAConv|DNAConv|LGConv|EGConv|MixHopConv|PDNConv|atch|size\(|shape|any\(|all\(|max\(\)|unique"
ARGUMENTS = ("layout", "recompute", "preload", "plan", "kind", "model.module")


def case_of(seed: int) -> Case:
    """Returns the random case of an integer."""
    r = random.Random(f"distributed {seed}")
    ranks = r.choice((1, 1, 2, 2, 2, 3, 4))
    way = r.choice(("halo", "halo", "layout", "layout", "plan", "plan", "preload", "batches", "batches"))
    options: dict[str, Any] = {"ranks": ranks, "recompute": None}
    layers = _ANY
    if way == "layout":
        options["layout"] = r.choice(_LAYOUTS).format(ranks)
        layers = _PRODUCTS if r.random() < 0.9 else _ANY
    elif way == "plan":
        options["plan"] = r.choice(_PLANS)
        layers = _PRODUCTS if options["plan"] == "sum" else _ANY
    elif way == "preload":
        options["preload"] = r.choice((*_HOPS, "as needed"))
        options["per_host"] = r.choice([each for each in (1, 2) if ranks % each == 0])
    elif way == "batches":
        options["batches"] = True
        options["per_host"] = r.choice([each for each in (1, 2, 4) if ranks % each == 0])
        options["trim"] = r.random() < 0.5
    if not options.get("trim") and r.random() < 0.3:
        options["recompute"] = "layers"
    if way != "batches":
        options["offsets"] = r.choice(_OFFSETS[ranks])
    ops = [each for each in BY_ROW if not each[1].startswith("nn.Transformer")]
    chosen = drawn(r, Taste(layers, layers, ops))
    if options.get("batches") and any("atch" in each.init for each in chosen):
        options["per_host"] = ranks  # norms use the vertices of all hosts, which no process has
    gone = [each.number for each in chosen if _is_left_out(each, options)]
    chosen = tuple(each for each in chosen if each.number not in gone and each.needs not in gone) or (layers(r, 0),)
    if options.get("preload") == "fewer" and any(
        re.search(_OF_WHOLE_GRAPH, each.kind + each.init + each.forward) for each in chosen
    ):
        options["preload"] = "as needed"
    modes = r.choice((("train", "train"), ("train", "eval"), ("eval", "train"), ("no_grad", "train")))
    if any(each.mode == "evaluation" for each in chosen):
        modes = ("eval", "eval")
    penalty = r.choice(("none",) * 29 + ("hessian",))
    return Case(
        seed, chosen, modes=modes, given="stored" if way in ("layout", "plan") else r.choice(("leaf", "constant", "stored")), penalty=penalty, output=r.choice(("h", "h", "self.head(h)", "h.log_softmax(1)", "h, hs[-1]")),
        target="distributed", options=tuple(options.items()),
    )  # fmt: skip


def _is_left_out(choice: Choice, options: dict[str, Any]) -> bool:
    """Returns True for choices about which the documentation promises nothing."""
    if "edges of the batch" in choice.kind:  # a rank has other numbers of edges
        return True
    # A trimmed model is checked in the call that finds its plan, and not later.
    if options.get("trim") and choice.kind.startswith("moment") and re.search(r"size\(0\)|mean\(0\)", choice.forward):
        return True
    # The backward computes a layer again from its rows, so torch refuses writes to them.
    return options["recompute"] is not None and choice.mode == "written"


def options_of(case: Case) -> dict[str, Any]:
    """Returns the options of a case, with the plainest values for those that are missing."""
    found = {
        "ranks": 1,
        "recompute": None,
        "layout": "halo",
        "plan": None,
        "preload": None,
        "per_host": 1,
        "batches": False,
        "trim": False,
        "offsets": None,
        **dict(case.options),
    }
    found["per_host"] = found["per_host"] if found["ranks"] % found["per_host"] == 0 else 1
    if found["offsets"] is not None and len(found["offsets"]) != found["ranks"] + 1:
        found["offsets"] = None
    return found


# --- batches of hosts ----------------------------------------------------------------------------------------------

_FANOUTS = [3, 2, 2]


def _sampled(host: int, step: int) -> Any:
    """Returns a host's batch as sampled. Hosts have different numbers of seeds."""
    return batch_of(graph_of_cases(), torch.arange(3 + host) * 17 + 5 * host + step, _FANOUTS, step)


def _owners(mfg: Any, ranks: int) -> torch.Tensor:
    """Returns the places of a batch's vertices. The last of four ranks has none."""
    return (mfg.node * 7 + 1) % max(1, ranks - (ranks == 4))


# --- on a rank -----------------------------------------------------------------------------------------------------

#: For each step, the results of a rank, and the ids of its vertices and edges; or the text of an error that says why.
Answer = list[tuple[dict[str, torch.Tensor], torch.Tensor, Any]] | str


def steps_on_rank(place: Place, case: Case) -> Answer:
    """Runs the steps of a case on one rank. Raises errors without such words."""
    plain: Any = torch.nn.Module()
    try:
        with cleared():
            space, plain, model = made_of(case)
            return [*_steps(place, case, space["begin"], model)]
    except Exception as error:
        if type(error).__name__ in ("RankFailure", "RanksDiffer") or is_in_words(error, plain, ARGUMENTS):
            return str(error)
        raise


def _steps(
    place: Place, case: Case, begin: Any, model: Any
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, Any]]:
    options, data = options_of(case), graph_of_cases().clone()
    given, layout = [], options["layout"]
    if options["batches"]:
        part: Any = loader_of(options["per_host"], Comm.create(place.group))
        trims, ranks = options["trim"], options["per_host"]
        for step in range(len(case.modes)):
            mfg = _sampled(place.rank // ranks, step)
            mine = share_batch(data, mfg, _owners(mfg, ranks), ranks, part.cooperation.place)
            given.append(Rows(mine, mine.n_id, int(mine.batch_size) if trims else mine.n_id.numel()))
    else:
        preload = None if options["preload"] is None else Preload(options["hops"])
        part = local(
            data,
            offsets=options["offsets"],
            process_group=place.group,
            preload=preload,
            ranks_per_host=preload and options["per_host"],
        )
        given = [Rows(part, part.n_id, part.num_counted)] * len(case.modes)
        if options["plan"] is not None:
            begin(model, 0)
            model.train(case.modes[0] == "train")
            names = ("edge_weight", "edge_attr", "edge_type", "node_type", "pos", "normal")
            arguments = [part.x, part.edge_index, *(getattr(part, name) for name in names), 0]
            layout = plan_for(model, part, *arguments, kind=options["plan"], constants=Constants(1e-9, 1e-9, 1e-9))
    converted = distribute(
        salientpp.nn.trim(model) if options["trim"] else model, part, layout, recompute=options["recompute"]
    )
    for step, (rows, mode) in enumerate(zip(given, case.modes, strict=True)):
        found = run_step(converted, lambda _, step: begin(model, step), rows, step, mode, case.given, case.penalty)
        named = {name.replace(" module.", " "): value for name, value in found.items() if not name.startswith("input")}
        yield named, rows.n_id, getattr(part, "e_id", None)


# --- the law -------------------------------------------------------------------------------------------------------


def outcome_of(case: Case) -> Outcome:
    """Runs a case."""
    options = options_of(case)
    if options["preload"] is not None:
        options["hops"] = max(0, _hops_of(case) + _HOPS[options["preload"]])
        case = replace(case, options=tuple(options.items()))
    has_hosts = options["batches"] or options["preload"] == "fewer"
    expected = [_plain_steps(case, host) for host in range(options["ranks"] // options["per_host"] if has_hosts else 1)]
    answers = _answers(case, options["ranks"])
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            return Failure(0, f"rank {rank}: {answer.kind}", answer.text[:300])
    words = [answer for answer in answers if isinstance(answer, str)]
    if words:
        alone = f"only {len(words)} of {len(answers)} ranks refuse: {words[0]}"
        return Refused(words[0]) if len(words) == len(answers) else Failure(0, "refusal", alone)
    for step in range(len(case.modes)):
        hosts = (
            [0] * len(answers) if len(expected) == 1 else [rank // options["per_host"] for rank in range(len(answers))]
        )
        got = [(host, *answer[step]) for host, answer in zip(hosts, answers)]
        plain = [(host, *steps[step]) for host, steps in enumerate(expected)]
        whole = _joined(plain, 1)
        found = difference(
            {**whole, **_of_parameters(plain, len(answers), True)}, {**_joined(got, 1), **_of_parameters(got, 1, False)}
        )
        if found is not None:
            return Failure(step, *found)
    return None


def _answers(case: Case, ranks: int) -> list[Any]:
    if ranks > 1:
        return shared_pool().run(steps_on_rank, ranks, case)
    try:
        return [steps_on_rank(Place(0, 1), case)]
    except Exception as error:
        return [Failed(type(error).__name__, f"{error}\n{traceback.format_exc()[-1500:]}")]


def _hops_of(case: Case) -> int:
    """Returns how often the layers of a case's model pass messages in a call, at most. Sums of edges outside of layers count as one more. Raises Invalid."""
    data, counts = graph_of_cases().clone(), []
    rows = Rows(data, torch.arange(120), 120)
    with cleared():
        space, plain, _ = made_of(case)

        def begin(model: Any, step: int) -> None:
            space["begin"](model, step)
            counts.append(int(any("edge_index[1]" in each.forward for each in case.choices)))
            for module in model.modules():
                if isinstance(module, MessagePassing) and not getattr(module.propagate, "counts", False):
                    module.propagate = counted(module.propagate)

        def counted(propagate: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                counts[-1] += 1
                return propagate(*args, **kwargs)

            run.counts = True
            return run

        for step, mode in enumerate(case.modes):
            try:
                run_step(plain, begin, rows, step, mode, case.given, case.penalty)
            except Exception as error:
                raise Invalid(f"{type(error).__name__}: {error}") from error
    return max(counts)


def _kept_by(host: int, options: dict[str, Any]) -> Data:
    """Returns the graph of a host that preloads: its inner vertices come first, and then those that it picks in ``hops`` rounds."""
    data = graph_of_cases()
    bounds, ranks = options["offsets"] or runs(120, options["ranks"]), options["per_host"]
    inner = torch.arange(bounds[host * ranks], bounds[(host + 1) * ranks])
    is_kept = torch.zeros(120, dtype=torch.bool)
    is_kept[inner] = True
    for _ in range(options["hops"]):
        is_kept[data.edge_index[0, is_kept[data.edge_index[1]]]] = True
    is_kept[inner] = False
    n_id = torch.cat([inner, is_kept.nonzero().view(-1)])
    e_id = torch.isin(data.edge_index, n_id).all(0).nonzero().view(-1)
    place = torch.empty(120, dtype=torch.long)
    place[n_id] = torch.arange(n_id.numel())
    rows = {name: value[n_id if data.is_node_attr(name) else e_id] for name, value in data if name != "edge_index"}
    return Data(**rows, edge_index=place[data.edge_index[:, e_id]], n_id=n_id, e_id=e_id, num_inner=inner.numel())


def _plain_steps(case: Case, host: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor, Any]]:
    """Returns the results of the plain model on the whole graph, or on the batches of a host."""
    options, data, found = options_of(case), graph_of_cases().clone(), []
    with cleared():
        space, plain, _ = made_of(case)
        for step, mode in enumerate(case.modes):
            rows, e_id = Rows(data, torch.arange(120), 120), torch.arange(300)
            if options["batches"]:
                mfg = _sampled(host, step)
                batch = filled(data, mfg)
                rows, e_id = Rows(batch, mfg.node, batch.batch_size if options["trim"] else mfg.node.numel()), None
            elif options["preload"] == "fewer":
                kept = _kept_by(host, options)
                rows, e_id = Rows(kept, kept.n_id, kept.num_inner), kept.e_id
            try:
                if options["plan"] is not None and step == 0:
                    space["begin"](plain, 0)
                results = run_step(plain, space["begin"], rows, step, mode, case.given, case.penalty)
            except Exception as error:
                raise Invalid(f"{type(error).__name__}: {error}") from error
            found.append((results, rows.n_id, e_id))
    return found


def _joined(answers: Any, _: int) -> dict[str, torch.Tensor]:
    """Returns the outputs and the gradients of inputs of all vertices and edges, by host. Gradients of copies of a row add up."""
    found: dict[str, torch.Tensor] = {}
    for host, results, n_id, e_id in answers:
        for name, value in results.items():
            is_edges = name.startswith("gradient of edge")
            if name.startswith("output"):
                ids, size = n_id[: len(value)], 120
            elif name in ("gradient of x", "gradient of pos"):
                ids, size = n_id, 120
            elif is_edges and e_id is not None:
                ids, size = e_id, 300
            else:
                continue
            key = f"{name} of host {host}"
            found.setdefault(key, value.new_zeros((size, *value.shape[1:]))).index_add_(0, ids, value[: len(ids)])
    return found


def _of_parameters(answers: Any, copies: int, adds: bool) -> dict[str, torch.Tensor]:
    """Returns the gradients of parameters, and with one host buffers, by rank. The plain models' are summed (``adds``) and expected on each of ``copies`` ranks."""
    found: dict[str, torch.Tensor] = {}
    hosts = {host for host, *_ in answers}
    for number, (_, results, _, _) in enumerate(answers):
        for name, value in results.items():
            if (name.startswith("gradient of ") and name[12:] not in _INPUTS) or (
                name.startswith("buffer") and len(hosts) == 1
            ):
                for rank in range(copies) if adds else [number]:
                    key = f"{name} on rank {rank}"
                    found[key] = found[key] + value if key in found and name.startswith("gradient") else value
    return found


_INPUTS = ("x", "pos", "edge_weight", "edge_attr")
