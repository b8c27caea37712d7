"""Layers of a model, and a trial that checks that each needs one hop only.

The trial (:func:`try_out`) finds layers that need several hops, normalise over all vertices of a batch, depend on the order of edges or draw at random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from salientpp.graph.csc import Graph
from salientpp.graph.quantiles import corrected
from salientpp.layerwise.normalisation import Kind, LayerEdges, Normalisation, kinds_of
from salientpp.layerwise.split import Split, can_add, forms_of, on_graph
from salientpp.nn.layers import GRAPH_NORMS, LAYERS, ORDERED_AGGREGATIONS, Replaced, uncached
from salientpp.ops import bytes_of
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import DrawOptions
from salientpp.store.target_lists import TargetLists

#: Function of rows [n, ...] that treats each row separately.
RowFunction = Callable[[Tensor], Tensor]

#: Size of the trial graph.
TRIED_ROWS, _TRIAL_EDGES = 24, 72

_SEVERAL_HOPS = "passes rows on over several hops"
_ALL_VERTICES = "normalises over all vertices of a graph"
_DEGREES = "divides by degrees of the sources, which it counts in the batch"
_FIRST_ROWS = "needs the rows of another layer too"

#: Classes that are normalised with the degrees of the whole graph if they are the ``conv`` of a :class:`Layer`, not inside another module.
_HANDLED = ("GCNConv", "LGConv")

#: Modules that fail the trial -> reason.
_REASONS = {
    **{name: _DEGREES for name, layer in LAYERS.items() if layer.degrees},
    "HypergraphConv": _DEGREES,
    **dict.fromkeys(["APPNP", "ChebConv", "SGConv", "SSGConv", "TAGConv", "MixHopConv", "ARMAConv"], _SEVERAL_HOPS),
    **dict.fromkeys(["GatedGraphConv", "SignedConv", "AntiSymmetricConv"], _SEVERAL_HOPS),
    **dict.fromkeys([*GRAPH_NORMS, "GPSConv"], _ALL_VERTICES),
    "LayerNorm": f"{_ALL_VERTICES} unless mode='node'",
    **dict.fromkeys(_HANDLED, f"{_DEGREES}, unless it is itself an item of the list"),
    **dict.fromkeys(["FAConv", "GCN2Conv", "DNAConv"], _FIRST_ROWS),
    **dict.fromkeys([*ORDERED_AGGREGATIONS, "MLPAggregation"], "depends on the order of edges"),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a model with the functions around it: a step from the rows of all vertices to their next rows.

    Attributes:
        conv: (rows, edge_index) -> rows.
        before, after: functions of single rows that run before and after ``conv``, in this order.
        takes: names of further arguments of ``conv``: ``edge_weight``, ``edge_attr``, both or none.
        pairs: if True, ``conv`` gets two tensors, the rows of all vertices and the rows of the targets. It then computes only the rows of the targets.
        split: the same layer in three steps, of which one is a sum (:mod:`salientpp.layerwise.split`); None if it cannot be split.
    """

    conv: Callable[..., Tensor]
    before: Sequence[RowFunction] = ()
    after: Sequence[RowFunction] = ()
    takes: frozenset[str] = frozenset()
    pairs: bool = False
    split: Split | None = None

    def __call__(self, x: Tensor, edges: LayerEdges, normalisation: Normalisation | None = None) -> Tensor:
        """Computes the next rows [num_targets, ...] of the targets from rows ``x`` [n, ...].

        Without ``normalisation``, the degrees are counted in ``edges``, which must then be all edges of the graph.
        """
        for function in self.before:
            x = function(x)
        conv = self.conv
        if normalisation is not None:
            conv, edges = normalisation.applied(conv, edges, x.dtype)
        named = {"edge_weight": edges.weight, "edge_attr": edges.attr}
        given = {name: value for name, value in named.items() if name in self.takes and value is not None}
        rows = conv((x, x[: edges.num_targets]) if self.pairs else x, edges.edge_index, **given)[: edges.num_targets]
        for function in self.after:
            rows = function(rows)
        return rows

    def __str__(self) -> str:
        return ", ".join(_name_of(function) for function in (*self.before, self.conv, *self.after))


@dataclass(frozen=True, eq=False)
class Network:
    """Model as a list of layers.

    Attributes:
        layers: the layers in order, at least one.
        join: function from a vertex's rows after each layer to its final rows (jumping knowledge); None: the last layer's rows.
        whole: the model, if it can be called with a whole graph.
        named: which of ``edge_weight`` and ``edge_attr`` the model ``whole`` accepts as arguments.
    """

    layers: Sequence[Layer]
    join: Callable[[list[Tensor]], Tensor] | None = None
    whole: Callable[..., Tensor] | None = None
    named: frozenset[str] = frozenset()

    @property
    def takes(self) -> frozenset[str]:
        return frozenset().union(*(layer.takes for layer in self.layers)) if self.whole is None else self.named

    def degrees(self, has_weights: bool) -> list[Kind]:
        """Returns the kinds of degrees that the layers divide by, each once. ``has_weights``: edges have weights."""
        return kinds_of((layer.conv for layer in self.layers), has_weights)


def network_of(model: Any) -> Network:
    """Returns the layers of a PyG basic model, or of a list of layers and functions of rows. Raises TypeError or ValueError for anything else."""
    model = _unwrapped(model)
    if isinstance(model, BasicGNN):
        return _of_basic_gnn(model)
    if isinstance(model, (list, tuple, torch.nn.ModuleList)):
        return Network(_joined([_unwrapped(item) for item in model]))
    if not callable(model):
        raise TypeError(
            f"model must be one of PyG's basic models (GraphSAGE, GCN, GAT, ...) or a list of layers, got {type(model).__name__}"
        )
    return Network(_joined([model]))


def _of_basic_gnn(model: BasicGNN) -> Network:
    takes = frozenset(name for name in ("edge_weight", "edge_attr") if getattr(model, f"supports_{name}"))
    parameters = _parameters_of(model)  # a subclass may have a forward of its own
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    named = takes if takes_any else takes & parameters.keys()
    jumps = model.jk_mode is not None
    layers = []
    for number, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
        functions: list[Any] = []
        if jumps or number < model.num_layers - 1:
            functions = [model.act, norm] if model.act_first else [norm, model.act]
        after = [each for each in functions if each is not None and not isinstance(each, torch.nn.Identity)]
        layers.append(Layer(_unwrapped(conv), (), after, takes))
    last = getattr(model, "lin", None)
    if hasattr(model, "jk"):
        join = lambda rows: last(model.jk(rows)) if last is not None else model.jk(rows)  # noqa: E731
        return Network(layers, join, model, named)
    if last is not None:
        layers[-1] = Layer(layers[-1].conv, (), [*layers[-1].after, last], takes)
    return Network(layers, whole=model, named=named)


def _joined(items: Sequence[Any]) -> list[Layer]:
    """Groups items into layers. Each item that takes edges begins a layer; other items belong to the layer before them, leading items to the first."""
    before: list[RowFunction] = []
    layers: list[Layer] = []
    for number, item in enumerate(items):
        if not callable(item):
            raise TypeError(f"layers must be modules or functions, got {type(item).__name__} at place {number}")
        parameters = _parameters_of(item)
        if _takes_edges(parameters):
            takes = frozenset({"edge_weight", "edge_attr"} & set(parameters))
            layers.append(Layer(item, before, [], takes))
            before = []
        elif layers:
            layers[-1].after.append(item)  # type: ignore[attr-defined]  # a list made above
        else:
            before.append(item)
    if not layers:
        raise ValueError(
            "model must have at least one layer that takes (x, edge_index), got none; functions of x alone need no graph"
        )
    return layers


def _parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    try:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        found = dict(inspect.signature(called).parameters)
    except (ValueError, TypeError):  # a builtin, such as torch.relu
        return {}
    for kind in type(function).__mro__ if isinstance(function, MessagePassing) else ():
        if kind is MessagePassing or all(each.kind is not each.VAR_KEYWORD for each in found.values()):
            break
        # The user has wrapped it, or it may pass further arguments on to that of a base class.
        if "forward" in vars(kind):
            named = inspect.signature(types.MethodType(vars(kind)["forward"], function)).parameters
            found = {**{name: each for name, each in found.items() if each.kind is not each.VAR_KEYWORD}, **named}
    return found


def _takes_edges(parameters: dict[str, inspect.Parameter]) -> bool:
    kinds = [each.kind for each in parameters.values() if each.default is inspect.Parameter.empty]
    needed = [kind for kind in kinds if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return len(needed) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds


def _unwrapped(model: Any) -> Any:
    """Removes the wrappers of DDP, which would start collectives of its own, and of ``torch.compile``, which would compile for every shape."""
    while isinstance(model, torch.nn.Module):
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        else:
            break
    return model


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


# --- modules ----------------------------------------------------------------------------------------------


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Returns the modules of a model or of a list of layers. Modules inside functions of the list are not found."""
    if isinstance(model, torch.nn.Module):
        return [model]
    return [item for item in model if isinstance(item, torch.nn.Module)] if isinstance(model, (list, tuple)) else []


def device_of(model: Any) -> torch.device:
    """Returns the device of the model's first parameter, or the CPU."""
    parameters = (parameter for module in modules_of(model) for parameter in module.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Sets the model to evaluation mode, and restores it at the end of the context.

    Inside, layers with ``cached=True`` do not use their caches, and quantile aggregations of PyG also handle targets without edges.
    """
    with Replaced(_in_evaluation(model)):
        yield


def _in_evaluation(model: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for part in dict.fromkeys(part for module in modules_of(model) for part in module.modules()):
        own = vars(part)
        yield own, "training", False
        yield from uncached(own)
        if "forward" not in own and (forward := corrected(part)) is not None:
            yield own, "forward", forward


def digests_of(model: Any) -> dict[str, str]:
    """Computes digests of the parameters and of the buffers, by names for errors. Digests of two models are equal if the values are equal bit by bit."""
    digests = {}
    names = {
        "parameters": "parameters of the model (their digest)",
        "buffers": "buffers of the model (their digest; under DDP the statistics of BatchNorm differ: broadcast them from one rank)",
    }
    for kind, name in names.items():
        digest = hashlib.sha256()
        for module in modules_of(model):
            for value in getattr(module, kind)():
                digest.update(bytes_of(value.cpu()).numpy().data)
        digests[name] = digest.hexdigest()[:16]
    return digests


# --- the trial --------------------------------------------------------------------------------------------


def try_out(
    network: Network, x: Tensor, weight: Tensor | None, attr: Tensor | None, device: torch.device
) -> tuple[Network, list[Tensor]]:
    """Applies the layers to a small random graph as a whole and in batches of one hop, and compares the results.

    The layers get random rows, and also rows of the data. An activation may be 0 for all random rows, and then hide the functions after it.

    Args:
        x: rows of the data [m, ...] with the dtype that the first layer gets; m may be 0.
        weight, attr: empty tensors [0, ...] with the shape and dtype of edge attributes; None without weights or attributes.

    Returns:
        The network, with ``pairs`` set for the layers that support it; and, for each layer, an empty tensor [0, ...] with the shape and dtype of its rows.
        The last tensor is the result of ``join``.
    """
    trial = _Trial.of(weight, attr, device, network.degrees(weight is not None))
    rows = [_random_rows(TRIED_ROWS, x, trial.generator)]
    if x.size(0):
        rows.append(x[torch.arange(TRIED_ROWS, device="cpu") % x.size(0)])
    first = present = [each.to(device) for each in rows]
    given: list[list[Tensor]] = []
    layers: list[Layer] = []
    for number, layer in enumerate(network.layers):
        what = f"layer {number} ({layer})"
        following = [trial.whole_and_in_batches(layer, each, what, number == 0) for each in present]
        with contextlib.suppress(Exception):  # some layers take no pair
            faster = dataclasses.replace(layer, pairs=True)
            if all(_are_close(after, trial.in_batches(faster, before)) for before, after in zip(present, following)):
                layer = faster
        layers.append(dataclasses.replace(layer, split=trial.split_of(layer, present, following)))
        given.append(following)
        present = following
    if network.join is not None:
        given[-1] = [network.join([of_layer[each] for of_layer in given]) for each in range(len(first))]
    if network.whole is not None:
        named = {"edge_weight": trial.edges.weight, "edge_attr": trial.edges.attr}
        named = {name: named[name] for name in network.takes}
        for before, after in zip(first, given[-1]):
            try:
                whole = network.whole(before.clone(), trial.edges.edge_index, **named)
            except Exception as error:
                raise ValueError(
                    f"{_name_of(network.whole)}.forward cannot be called with {', '.join(['x', 'edge_index', *named])}: {type(error).__name__}: {error}; pass "
                    "a list of its steps instead"
                ) from error
            if not _are_close(whole, after):
                raise ValueError(
                    f"{_name_of(network.whole)}.forward {_NOT_ONE_HOP}. This forward does not just apply its layers in order; pass a list of its steps instead"
                )
    return dataclasses.replace(network, layers=layers), [of_layer[0][:0] for of_layer in given]


@dataclass(frozen=True, eq=False)
class _Trial:
    """Small random graph with self-loops, repeated edges and vertices without edges, and batches that together have all its vertices as seeds."""

    edges: LayerEdges
    normalisation: Normalisation
    batches: Sequence[tuple[Tensor, LayerEdges]]
    generator: torch.Generator
    graph: Graph

    @classmethod
    def of(cls, weight: Tensor | None, attr: Tensor | None, device: torch.device, kinds: Sequence[Kind]) -> _Trial:
        generator = torch.Generator().manual_seed(0)
        edge_index = torch.randint(TRIED_ROWS, (2, _TRIAL_EDGES), generator=generator, device="cpu")
        edge_index[:, :4] = edge_index[:1, :4]
        edge_index[:, 4:8] = edge_index[:, 8:12]
        graph = Graph.from_edge_index(edge_index, TRIED_ROWS)
        edges = LayerEdges(
            edge_index.to(device),
            torch.arange(TRIED_ROWS, device=device),
            TRIED_ROWS,
            # Absolute values, so that degrees are positive.
            None if weight is None else _random_rows(_TRIAL_EDGES, weight, generator).abs().to(device),
            None if attr is None else _random_rows(_TRIAL_EDGES, attr, generator).to(device),
        )
        batches = []
        # Small batches, so that a row which a function picks for all others, such as the largest, is missing in some of them.
        for seeds in torch.randperm(TRIED_ROWS, generator=generator, device="cpu").split(TRIED_ROWS // 8):
            mfg = GraphTopology(graph).sample({None: seeds}, 0, DrawOptions([[-1]]))
            edge = mfg.edge.to(device)
            batch = LayerEdges(
                torch.stack([mfg.row, mfg.col]).to(device),
                mfg.node.to(device),
                seeds.numel(),
                None if edges.weight is None else edges.weight[edge],
                None if edges.attr is None else edges.attr[edge],
            )
            batches.append((seeds.to(device), batch))
        lists = TargetLists.of_graph(graph, {} if edges.weight is None else {"edge_weight": edges.weight.cpu()})
        normalisation = Normalisation(lists, kinds)
        return cls(edges, normalisation, batches, generator, graph)

    def whole_and_in_batches(self, layer: Layer, present: Tensor, what: str, is_first: bool) -> Tensor:
        """Returns the next rows of all vertices. Raises ValueError, which begins with ``what``, if the layer gives other rows in batches."""
        try:
            following = layer(present.clone(), self.edges)  # functions may work in place
            if (number := following.size(0)) != TRIED_ROWS:
                raise ValueError(f"it must return one row per vertex, expected {TRIED_ROWS}, got {number}")
            in_batches = self.in_batches(layer, present)
        except Exception as error:
            hint = " (dtype= converts x)" if is_first else ""
            if self.edges.attr is not None and "edge_attr" in layer.takes:
                hint += ", with edge_attr (a function of (x, edge_index) in place of a layer gets none)"
            raise ValueError(
                f"{what} cannot be applied to rows of {present.dtype} {list(present.shape[1:])}{hint}: {type(error).__name__}: {error}"
            ) from error
        if not _are_close(following, in_batches):
            raise ValueError(f"{what} {_NOT_ONE_HOP}. It {_reasons(layer)}")
        return following

    def split_of(self, layer: Layer, present: Sequence[Tensor], following: Sequence[Tensor]) -> Split | None:
        """Finds a form of the layer in three steps that computes the rows ``following`` from ``present``. None if no form does."""
        has_weights = (self.edges.weight is not None and "edge_weight" in layer.takes) or (
            self.edges.attr is not None and "edge_attr" in layer.takes
        )
        if not can_add(present[0]):
            return None
        for split in forms_of(layer, present[0][0].numel(), has_weights):
            with contextlib.suppress(Exception):  # some layers need more than rows and sums
                if all(self._is_split(split, *each) for each in zip(present, following)):
                    return split
        return None

    def _is_split(self, split: Split, present: Tensor, following: Tensor) -> bool:
        rows = on_graph(split, present, self.graph.indptr, self.graph.indices, self.normalisation)
        return can_add(rows) and _are_close(following, rows)

    def in_batches(self, layer: Layer, present: Tensor) -> Tensor:
        """Computes the next rows of all vertices in batches."""
        rows = [layer(present[batch.n_id], batch, self.normalisation) for _, batch in self.batches]
        return torch.cat(rows)[torch.cat([seeds for seeds, _ in self.batches]).argsort()]


def _random_rows(size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn((size, *like.shape[1:]), generator=generator, dtype=torch.float64, device="cpu")
    if not (like.dtype.is_floating_point or like.dtype.is_complex):
        values = values > 0  # integers may be ids, and only 0 and 1 are likely to be valid
    return values.to(like.dtype)


_NOT_ONE_HOP = "cannot be computed from the in-neighbours of each vertex only: on a trial graph it gives other rows in batches than on the whole graph"


def _are_close(expected: Tensor, got: Tensor) -> bool:
    """Returns True if two tensors [n, ...] are equal up to rounding.

    The tolerance has two terms; ε is the dtype's precision. The first is √ε of half the spread of a column, because a layer that takes the root of a difference
    rounds as coarsely. The second is ε^¾ of the largest value, because a column may be the small difference of large values. A fixed tolerance would accept any
    error in small rows. A tolerance by the size of a column would accept any error in a column of small differences from a large constant.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if expected.dtype.is_complex:
        expected, got = torch.view_as_real(expected), torch.view_as_real(got)
    if not expected.numel() or not expected.dtype.is_floating_point:
        return torch.equal(expected, got)
    known, info = expected.isfinite(), torch.finfo(expected.dtype)
    if not torch.equal(known, got.isfinite()) or not torch.allclose(expected[~known], got[~known], equal_nan=True):
        return False
    expected, got = (each.where(known, 0).to(torch.float64).flatten(1) for each in (expected, got))
    known = known.flatten(1)
    largest = max(float(expected.abs().max()), info.tiny)
    expected, got = expected / largest, got / largest
    most = expected.where(known, -torch.inf).amax(0)
    least = expected.where(known, torch.inf).amin(0)
    tolerance = (most - least).clamp_(min=0) / 2 * info.eps**0.5 + info.eps**0.75
    return bool(((expected - got).abs() <= tolerance).all())


def _reasons(layer: Layer) -> str:
    """Returns the reasons why a layer may have failed the trial, as the predicate of a sentence."""
    names = [
        type(part).__name__
        for function in (*layer.before, layer.conv, *layer.after)
        if isinstance(function, torch.nn.Module)
        for part in function.modules()
        if type(part).__module__.startswith("torch_geometric.")
        and getattr(part, "mode", None) != "node"
        and not (part is layer.conv and type(part).__name__ in _HANDLED)
    ]
    known = [f"holds {name}, which {_REASONS[name]}" for name in dict.fromkeys(names) if name in _REASONS]
    if known:
        return "; it ".join(known)
    return (
        "may need several hops (then pass a list of its layers), normalise over the vertices or degrees of a batch, depend on the order of edges, "
        "or draw at random (then call eval() first)"
    )
