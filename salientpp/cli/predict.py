"""``salientpp predict``: computes a model's outputs and writes them under the keys of the user's tables, in one process or on every rank of a job."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salientpp.cli import terminal
from salientpp.cli.shared_arguments import (
    DATASETS,
    add_data,
    add_json,
    adder,
    files_of,
    num_neighbors_of,
    typed_seeds_of,
    values_of,
)
from salientpp.store.directory.kinds import has_manifest, is_converted
from salientpp.suggestions import did_you_mean

if TYPE_CHECKING:
    from salientpp.progress import Progress

HELP = "compute a model's outputs, and write them under the keys of your tables"
EXAMPLE = "salientpp predict my_model:load DIR --out predictions.parquet"

#: Seeds of a batch, unless the user says otherwise. Layer-wise inference has the same number of vertices.
_BATCH_SIZE = 1024

#: Names under which checkpoints of training scripts hold the parameters.
_PARAMETERS = ("model", "state_dict", "model_state_dict")

#: Help of each argument.
TEXTS = {
    "model": "MODULE:FUNCTION, a function of yours without arguments that returns the model. MODULE is searched in the current directory first",
    "dataset": f"a dataset directory, or {DATASETS}",
    "--out": "folder or address, such as s3://bucket/folder, for a Parquet file of each part or rank",
    "--checkpoint": "file in which torch.save wrote the model's state_dict, alone or under the name model, state_dict or model_state_dict",
    "--num-neighbors": "neighbours per hop of sampled batches, -1 for all; a list that begins with -1 needs an equals sign: --num-neighbors=-1,10 "
    "(default: all neighbours, layer by layer)",
    "--seeds": "with --num-neighbors: vertices to predict, as the split train, val, test or all; with several vertex types TYPE:SPLIT (default: all)",
    "--batch-size": f"vertices per batch (default: {_BATCH_SIZE})",
    "--edge-weight": "edge attribute that layers get as edge_weight; without --num-neighbors",
    "--edge-attr": "edge attribute that layers get as edge_attr; without --num-neighbors",
    "--scratch": "folder for the rows of layers, which are then not in memory; without --num-neighbors",
    "--device": "device of the model (default: that of this rank, or cpu)",
}

#: Options of layer-wise inference only.
_LAYERWISE = ("edge_weight", "edge_attr", "scratch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Computes the outputs of a model and writes them as Parquet files, whose rows have the keys of your tables; vertices without keys have the column id. "
        "Without --num-neighbors, all layers are applied to every vertex from all neighbours, as salientpp.inference does. With --num-neighbors, the model is "
        "called with each batch of a NeighborLoader, and returns a row for each seed or for each vertex of the seeds' type. "
        "Start the command on every rank of a job (srun, torchrun), or in one process."
    )
    add = adder(parser, TEXTS)
    add("model", metavar="MODULE:FUNCTION")
    add("dataset")
    add("--out", required=True, metavar="ADDRESS")
    add("--checkpoint", type=Path, metavar="FILE")
    add("--num-neighbors", type=num_neighbors_of, metavar="F,F,...")
    add("--seeds", metavar="[TYPE:]SPLIT")
    add("--batch-size", type=int, default=_BATCH_SIZE, metavar="B")
    add("--edge-weight", metavar="NAME")
    add("--edge-attr", metavar="NAME")
    add("--scratch", type=Path, metavar="DIR")
    add("--device", metavar="DEVICE")
    add_json(parser, "the number of rows and the place of the files")
    add_data(parser)


def run(arguments: argparse.Namespace) -> int:
    _check_together(arguments)
    from salientpp.addresses import without_password

    files = files_of(arguments, "json")
    with _job() as launch:
        device = arguments.device or launch.device
        data = _graph(arguments, launch.world_size)
        model = _model(arguments, device)
        with _progress(launch.rank == 0) as progress:
            if arguments.num_neighbors is None:
                number = _layer_by_layer(arguments, model, data, device, progress)
            else:
                number = _in_batches(arguments, model, data, device, progress)
    if launch.rank == 0:
        out = without_password(arguments.out)
        found = {"out": out, "rows": number, "ranks": launch.world_size}
        contents = {"json": lambda: (json.dumps(found, indent=1) + "\n").encode()}
        terminal.finish(files, contents, arguments.written, lambda: [f"{number:,} rows are in {out}"])
    return 0


def _check_together(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    is_sampled = arguments.num_neighbors is not None
    if not is_sampled and arguments.seeds is not None:
        raise ValueError("--seeds is for sampled batches; give --num-neighbors too, or leave --seeds out")
    for name in _LAYERWISE if is_sampled else ():
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is for layer-wise inference, but --num-neighbors samples batches; leave one out"
            )
    out = arguments.out
    if not is_sampled and "://" not in out and not out.rstrip("/").endswith(".parquet"):
        raise ValueError(
            f"--out must be an address, or a folder whose name ends in .parquet, got {out!r}; write {out.rstrip('/')}.parquet"
        )


@contextlib.contextmanager
def _job() -> Iterator[Any]:
    """Joins the ranks of a job, and yields the launch of this process. A single process has no process group."""
    import torch.distributed as dist

    from salientpp.launch.rendezvous import init_process_group

    launch = init_process_group()
    try:
        yield launch
        if launch.launcher != "none":
            dist.barrier()
    finally:
        if launch.launcher != "none":
            dist.destroy_process_group()


def _graph(arguments: argparse.Namespace, world_size: int) -> Any:
    """Returns the graph: a dataset directory, or an object in memory."""
    from salientpp.datasets import load_dataset
    from salientpp.store.directory.load import load

    if has_manifest(arguments.dataset) and not is_converted(arguments.dataset):
        return load(arguments.dataset)
    if world_size > 1:
        raise ValueError(
            f"{arguments.dataset} is not a dataset directory, so {world_size} ranks cannot share the work; write one with `salientpp partition` first"
        )
    return load_dataset(arguments.dataset, root=arguments.data)


def _model(arguments: argparse.Namespace, device: Any) -> Any:
    """Calls the user's function, loads the checkpoint, and moves the model to the device.

    Raises:
        ValueError: the function or the file is wrong.
    """
    import torch

    from salientpp.datasets.own_objects import call_named

    form = "MODULE:FUNCTION such as my_graph:load"
    model = call_named(arguments.model, arguments.model, form)
    is_module = isinstance(model, torch.nn.Module)
    if not is_module and not (callable(model) or isinstance(model, (list, tuple))):
        raise ValueError(
            f"{arguments.model}: expected a torch.nn.Module, a function or a list of layers, got {type(model).__name__}; return the model"
        )
    if arguments.num_neighbors is not None and not callable(model):
        raise ValueError(
            f"--num-neighbors calls one model with each batch, but {arguments.model} returned a {type(model).__name__} of layers; leave --num-neighbors out, "
            "or return a torch.nn.Module or a function of batches"
        )
    if arguments.checkpoint is not None:
        if not is_module:
            raise ValueError(
                f"--checkpoint needs a torch.nn.Module, but {arguments.model} returned a {type(model).__name__}; load the parameters in that function"
            )
        _load_parameters(model, arguments.checkpoint)
    for module in model if isinstance(model, (list, tuple)) else [model]:
        if isinstance(module, torch.nn.Module):
            module.to(device).eval()
    return model


def _load_parameters(model: Any, file: Path) -> None:
    """Loads the parameters and buffers of a model from a file that ``torch.save`` wrote."""
    from torch import Tensor

    from salientpp.datasets.torch_files import read_torch_file

    stored = read_torch_file(
        file,
        refused=lambda needed: f"not read, since it holds more than tensors ({needed}); save model.state_dict() alone",
    )
    for name in _PARAMETERS:
        if isinstance(stored, dict) and isinstance(stored.get(name), dict):
            stored = stored[name]
            break
    if (
        not isinstance(stored, dict)
        or not all(isinstance(key, str) for key in stored)
        or not any(isinstance(value, Tensor) for value in stored.values())
    ):
        raise ValueError(
            f"{file}: expected a state_dict, got {type(stored).__name__}; write torch.save(model.state_dict(), FILE)"
        )
    own = model.state_dict()
    if stored and all(key.startswith("module.") and key not in own for key in stored):  # of DistributedDataParallel
        stored = {key.removeprefix("module."): value for key, value in stored.items()}
    try:
        model.load_state_dict(stored)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"{file}: the parameters do not fit the model ({text}); make the model as it was made for training"
        ) from error


@contextlib.contextmanager
def _progress(is_first: bool) -> Iterator[Progress]:
    """Yields an object that shows the progress of rank 0."""
    from salientpp.cli.progress import shown_progress, warnings_in_lines
    from salientpp.progress import Progress

    with warnings_in_lines("predict"):
        if not is_first:
            yield Progress()
            return
        with shown_progress(lines=False) as progress:
            yield progress


def _layer_by_layer(arguments: argparse.Namespace, model: Any, data: Any, device: Any, progress: Progress) -> int:
    """Writes the outputs of all vertices. Returns their number."""
    from salientpp.layerwise.inference import inference

    options = values_of(arguments, *_LAYERWISE)
    inference(
        model, data, batch_size=arguments.batch_size, device=device, out=arguments.out, progress=progress, **options
    )
    return int(data.num_nodes)


def _in_batches(arguments: argparse.Namespace, model: Any, data: Any, device: Any, progress: Progress) -> int:
    """Writes the outputs of the seeds of sampled batches. Returns their number over all ranks."""
    import torch

    from salientpp.datasets.own_objects import run_users
    from salientpp.loader.node_loader import NeighborLoader
    from salientpp.predictions.writer import PredictionWriter

    _compare_models(model, data)
    type_, split = typed_seeds_of(arguments.seeds or "all", (None, "all"))
    loader = NeighborLoader(
        data, arguments.num_neighbors, _seeds(data, type_, split), batch_size=arguments.batch_size, shuffle=False, uneven="exact", device=device
    )  # fmt: skip
    progress.begin("predicting", len(loader), "batches")
    with PredictionWriter(arguments.out, data, type_) as writer, torch.no_grad():
        for batch in loader:
            store = batch if type_ is None else batch[type_]
            outputs = run_users(arguments.model, "the model", partial(model, batch))
            outputs = _of_seeds(
                outputs, store.batch_size, store.num_nodes, type_, [] if type_ is None else data.node_types
            )
            writer.write(store.n_id[: store.batch_size], outputs)
            progress.advance()
    return _total(writer.num_rows)


def _compare_models(model: Any, data: Any) -> None:
    """Raises ValueError on every rank if ranks have different parameters or buffers. Collective."""
    from torch.nn.parameter import is_lazy

    from salientpp.layerwise.layers import digests_of, modules_of
    from salientpp.predictions.rank_files import comm_of
    from salientpp.ranks.comm import DEFAULT_TIMEOUT
    from salientpp.ranks.facts import check_same

    comm = comm_of(data, None, DEFAULT_TIMEOUT)
    if comm.size == 1:
        return
    with comm.together("compare its model") as told:
        if any(is_lazy(value) for module in modules_of(model) for value in (*module.parameters(), *module.buffers())):
            raise ValueError(
                "the model has lazy parameters without values, which each rank would choose for itself; give --checkpoint, or call the model once before the "
                "function returns it"
            )
        told.mine = digests_of(model)
    check_same(
        told.everyone, comm.of, advice="give --checkpoint, or load the same parameters in the function on every rank"
    )


def _seeds(data: Any, type_: str | None, split: str) -> Any:
    """Returns the seeds as the argument ``input_nodes`` of a loader. Raises ValueError if the graph has no such split."""
    from torch_geometric.data import Data, HeteroData

    is_typed = isinstance(data, HeteroData) if isinstance(data, (Data, HeteroData)) else data.is_hetero
    if is_typed and type_ not in data.node_types:
        raise ValueError(
            f"--seeds must name one of the vertex types {', '.join(data.node_types)}, as in {data.node_types[0]}:all, got {split if type_ is None else type_}"
            f"{did_you_mean(type_, data.node_types)}"
        )
    nodes: Any = split
    if isinstance(data, (Data, HeteroData)):
        store: Any = data if type_ is None else data[type_]
        nodes = None if split == "all" else store.get(f"{split}_mask")
        if nodes is None and split != "all":
            raise ValueError(f"--seeds {split} needs {split}_mask, which the graph does not have; give --seeds all")
    return nodes if type_ is None else (type_, nodes)


def _of_seeds(outputs: Any, num_seeds: int, num_vertices: int, type_: str | None, types: Sequence[str]) -> Any:
    """Returns the rows of the seeds, the first ones, of what the model returned for a batch.

    Raises:
        ValueError: it has another number of rows, or rows of other vertex types.
    """
    from torch import Tensor

    others = [name for name in outputs if name in types and name != type_] if isinstance(outputs, dict) else []
    if others:
        raise ValueError(
            f"the model must return rows of the type {type_!r} of the seeds, but it also returned some of {', '.join(others)}; return those of {type_!r} alone"
        )
    named = outputs if isinstance(outputs, dict) else {"": outputs}
    for rows in named.values():
        if not isinstance(rows, Tensor) or rows.dim() == 0 or len(rows) not in (num_seeds, num_vertices):
            form = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"the model must return a row for each of the {num_seeds} seeds of a batch, or for each of its {num_vertices} vertices, got {form}; "
                "the model is called with the batch: return the rows of the seeds"
            )
    found = {name: rows[:num_seeds] for name, rows in named.items()}
    return found if isinstance(outputs, dict) else found[""]


def _total(number: int) -> int:
    """Returns the sum over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(number, device="cpu")
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)
