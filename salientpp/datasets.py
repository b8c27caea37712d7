"""Where does a graph come from?

Everything behind this module (planning, storing, sampling, the command line) works on one kind of object:
a homogeneous PyG `Data` whose arrays have been looked at once. `load_dataset` makes it from

* a `Data` object in memory, which is checked and handed back as it is;
* ``"npz:FILE"``, one NumPy archive;
* ``"pyg:FILE"``, a `Data` object that `torch.save` wrote;
* ``"python:MODULE:FUNCTION"``, a function of the user's that returns one;
* ``"ogbn-arxiv"``, ``"ogbn-products"``, ``"ogbn-papers100M"``, ...: the Open Graph Benchmark's files;
* ``"synthetic"``: a generated graph (`synthetic`), for a first run without any download.

The arrays: `edge_index` int64 [2, E] (row 0 sources, row 1 targets; an undirected graph holds both
directions), `x` float [N, F] in the dtype it is stored in, `y` int64 [N] with -1 for "unlabelled",
`train_mask`, `val_mask`, `test_mask` bool [N], `num_nodes`. A vertex with a negative label is in no split:
its bit is cleared in all three masks, whatever the file's split says.

No file can run code: .npz files are read with ``allow_pickle=False``, PyG's with ``weights_only=True``, and OGB's
raw files are read directly rather than through the pickled cache that its dataset class writes.

Only numpy, torch and torch_geometric are imported with this module; `ogb` when an OGB name is asked for.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import importlib
import inspect
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from salientpp.ids import first_outside
from salientpp.plan.undirected import sorted_unique, split_keys, symmetric_closure

__all__ = ["load_dataset", "synthetic"]

# Only for suggestions; which names exist is read from the installed ogb (`_ogb_meta`).
_OGB_EXAMPLES = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "ogbn-proteins")

_SPLITS = ("train", "val", "test")


def load_dataset(dataset: str | Data, *, root: str | Path = "data", **parameters: Any) -> Data:
    """Return the graph that `dataset` names, checked, as a homogeneous PyG `Data`.

    Args:
        dataset: one of

            * a `Data` object with `edge_index` or `adj_t`: checked (shape [2, E] and integer dtype of
              `edge_index`, ids in [0, N), N rows and finite values in `x`, masks bool [N]) and returned as
              is, the same object;
            * ``"npz:FILE"`` with the keys `edge_index` [2, E], `x` [N, F], `y` [N], `train_idx`, `val_idx`,
              `test_idx` and, optionally, `num_nodes` and `directed` (default true; false means that each
              undirected edge is stored once). Other keys are ignored;
            * ``"pyg:FILE"``: what `torch.save` wrote of a `Data` object or of its `to_dict()`, or what
              `InMemoryDataset.save` wrote of a single graph. Read with ``weights_only=True``: a file that needs more than
              tensors and the classes that PyG registers is refused;
            * ``"python:MODULE:FUNCTION"``: what the function returns, called without arguments. The module is looked for
              in the current directory, then on `sys.path`. It runs as any code does; what it prints goes to stderr;
            * the name of a homogeneous OGB node-property dataset. Besides the usual arrays the result
              carries what OGB's own PyG loader sets (`edge_attr`, `node_year`, `node_species`, where there
              are any); `y` of the multi-label ogbn-proteins is int64 [N, 112]. The raw files are read anew
              each time (about a minute for ogbn-products, which are text files): a partitioned dataset
              directory is this package's cache;
            * ``"synthetic"``, see `synthetic`.

            A name may carry its parameters, for the command line: ``"synthetic:num_vertices=20000,seed=3"``,
            ``"ogbn-papers100M:undirected=true"``.
        root: the folder in which OGB datasets lie, each in its own folder (`root/ogbn_arxiv/raw/...`), as
            `ogb` lays them out. Used for OGB names only.
        parameters: of "synthetic": the keyword arguments of `synthetic`. Of "npz:FILE" and OGB names:
            `undirected`: None (default) takes the graph as the dataset defines it; True adds the inverse
            of each edge if the dataset does not (customary for ogbn-papers100M, a directed citation
            graph), merges duplicates and keeps a self-loop single; False takes the edges as they are
            stored, so an undirected graph has each edge once. Of OGB names also `download`: whether a
            missing dataset may be fetched (default False; nothing is ever asked on standard input).

    Raises:
        ValueError: `dataset` is none of these, a parameter is unknown, or the arrays are not as described.
        FileNotFoundError: the file, or the OGB dataset's raw files, are not there.
        ImportError: an OGB name was given and `ogb` is not installed.
    """
    if isinstance(dataset, Data):
        if parameters:
            raise ValueError(f"a Data object takes no parameters, got {', '.join(sorted(parameters))}")
        _check_data(dataset)
        return dataset
    if not isinstance(dataset, str):
        raise ValueError(_not_accepted(dataset))

    name, _, rest = dataset.partition(":")
    if name == "npz" and rest:
        return _call(_load_npz, dataset, parameters, file=Path(rest))
    if name == "pyg" and rest:
        return _call(_load_pyg, dataset, parameters, file=Path(rest))
    if name == "python" and rest:
        return _call(_load_python, dataset, parameters, where=dataset, source=rest)
    if name == "synthetic":
        return _call(synthetic, name, _with_spec(dataset, rest, parameters))
    if name.startswith("ogbn-"):
        return _call(_load_ogb, name, _with_spec(dataset, rest, parameters), name=name, root=Path(root))
    raise ValueError(_not_accepted(dataset))


# ---------------------------------------------------------------------------------------------------------
# Names and parameters


def _not_accepted(dataset: object) -> str:
    got = repr(dataset) if isinstance(dataset, (str, Path)) else f"an object of type {type(dataset).__name__}"
    message = (
        f'dataset must be a homogeneous torch_geometric Data object, "npz:FILE", "pyg:FILE", "python:MODULE:FUNCTION", "synthetic" or the name of '
        f"an OGB node-property dataset such as {', '.join(_OGB_EXAMPLES)}; got {got}"
    )
    if isinstance(dataset, Path) or (isinstance(dataset, str) and dataset.endswith(".npz")):
        return f'{message}. Did you mean "npz:{dataset}"?'
    if isinstance(dataset, str) and dataset.endswith((".pt", ".pth")) and ":" not in dataset:
        return f'{message}. Did you mean "pyg:{dataset}"?'
    if isinstance(dataset, str):
        return message + _did_you_mean(dataset.partition(":")[0], ("synthetic", "npz", "pyg", "python", *_OGB_EXAMPLES))
    return message


def _did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """A sentence with the names closest to `word`, or nothing."""
    lowered = {name.lower(): name for name in known}
    close = [lowered[match] for match in difflib.get_close_matches(word.lower(), lowered)]
    return f". Did you mean {' or '.join(close)}?" if close else ""


def _with_spec(dataset: str, spec: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """`parameters` joined by those that `spec`, "key=value,key=value", holds."""
    merged = dict(parameters)
    for item in filter(None, spec.split(",")):
        key, equals, text = (part.strip() for part in item.partition("="))
        if not (key and equals and text):
            raise ValueError(f"{dataset}: expected key=value after the colon, separated by commas, got {item!r}")
        if key in merged:
            raise ValueError(f"{dataset}: parameter {key} is given twice")
        merged[key] = _literal(dataset, key, text)
    return merged


def _literal(dataset: str, key: str, text: str) -> int | float | bool | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    raise ValueError(f"{dataset}: {key} must be a number, true, false or none, got {text!r}")


def _call(function: Callable[..., Data], dataset: str, parameters: dict[str, Any], **own: Any) -> Data:
    """`function(**own, **parameters)`, refusing unknown parameters with a list of the known."""
    known = [key for key in inspect.signature(function).parameters if key not in own]
    for key in parameters:
        if key not in known:
            raise ValueError(
                f"{dataset} has no parameter {key!r}; it has {', '.join(known) or 'none'}{_did_you_mean(key, known)}"
            )
    return function(**own, **parameters)


# ---------------------------------------------------------------------------------------------------------
# Checks: each names where (a file or an object), what was expected and what was found


def _check_data(data: Data, where: str = "Data object") -> None:
    edge_index, adj_t = data.get("edge_index"), data.get("adj_t")
    if edge_index is None and adj_t is None:
        raise ValueError(f"{where}: expected edge_index or adj_t, got only {', '.join(data.keys()) or 'nothing'}")
    if edge_index is not None:
        # Before num_nodes, which PyG may have to infer from it.
        _check_edge_index_form(edge_index, where)
    num_vertices = data.num_nodes
    if num_vertices is None:
        raise ValueError(f"{where}: the number of vertices is unknown; set data.num_nodes")
    if edge_index is not None:
        _check_id_range(edge_index, "edge_index", num_vertices, where)
    if adj_t is not None:
        if not (isinstance(adj_t, Tensor) or hasattr(adj_t, "sparse_sizes")):
            raise ValueError(f"{where}: adj_t must be a sparse matrix, got {_form(adj_t)}")
        # torch_sparse.SparseTensor and torch's own sparse tensors name their shape differently.
        shape = adj_t.sparse_sizes() if hasattr(adj_t, "sparse_sizes") else adj_t.size()
        if tuple(shape) != (num_vertices, num_vertices):
            raise ValueError(f"{where}: adj_t must have shape {[num_vertices] * 2}, got {list(shape)}")
    if isinstance(data.get("x"), Tensor):
        _check_features(data.x, num_vertices, where)
    for split in _SPLITS:
        mask = data.get(f"{split}_mask")
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (num_vertices,):
            raise ValueError(f"{where}: {split}_mask must be bool [{num_vertices}], got {_form(mask)}")


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _check_edge_index_form(edge_index: object, where: str) -> None:
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"{where}: edge_index must be a tensor, got {_form(edge_index)}")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"{where}: edge_index must have shape [2, E], got {list(edge_index.shape)}")
    if edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool:
        raise ValueError(f"{where}: edge_index must hold integers, got {_form(edge_index)}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: edge_index must be int64 or int32, got {_form(edge_index)}")
    if edge_index.layout != torch.strided or edge_index.is_meta:
        raise ValueError(f"{where}: edge_index must be dense and have values, got layout {edge_index.layout} on {edge_index.device}")


def _check_id_range(ids: Tensor, key: str, num_vertices: int, where: str) -> None:
    at = first_outside(ids, num_vertices)
    if at is not None:
        raise ValueError(f"{where}: {key} must hold vertex ids in [0, {num_vertices}), got {int(ids.flatten()[at])}")


def _check_fits_int64(array: np.ndarray, key: str, where: str) -> None:
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ValueError(f"{where}: {key} must hold numbers below 2^63, got {int(array.max())}")


def _check_features(x: Tensor, num_vertices: int, where: str) -> None:
    if x.dim() == 0 or x.size(0) != num_vertices:
        raise ValueError(f"{where}: x must have one row per vertex, expected {num_vertices} rows, got {list(x.shape)}")
    if not x.is_floating_point() or x.layout != torch.strided or x.is_meta:
        return
    # By blocks: the mask of a whole feature matrix would cost a quarter of its memory again.
    rows_per_block = max(1, (1 << 24) // max(1, x[:1].numel()))
    for start in range(0, num_vertices, rows_per_block):
        finite = torch.isfinite(x[start : start + rows_per_block]).reshape(-1, max(1, x[:1].numel())).all(dim=1)
        if not bool(finite.all()):
            row = start + int((~finite).nonzero()[0])
            raise ValueError(f"{where}: x must be finite, got nan or infinity in row {row}")


# ---------------------------------------------------------------------------------------------------------
# From stored arrays to Data


def _assemble(
    where: str,
    edge_index: np.ndarray,
    num_vertices: int,
    x: np.ndarray | None,
    y: np.ndarray,
    split_ids: dict[str, np.ndarray],
    symmetrise: bool,
) -> Data:
    """Check arrays that came from a file and join them.

    Args:
        where: the file or folder, for errors.
        edge_index: integer [2, E].
        x: floating [N, F], or None.
        y: integer [N] or [N, labels per vertex]; a negative number means "unlabelled".
        split_ids: for train, val and test the name of its array in the file and the array, vertex ids [*].
        symmetrise: whether to add the inverse of each edge.
    """
    data = Data(num_nodes=num_vertices)
    if x is not None:
        if x.dtype not in (np.float16, np.float32, np.float64):
            raise ValueError(f"{where}: x must hold float16, float32 or float64, got dtype {x.dtype}")
        if x.ndim != 2:
            raise ValueError(f"{where}: x must have shape [N, F], got {list(x.shape)}")
        data.x = torch.from_numpy(x).contiguous()
        _check_features(data.x, num_vertices, where)

    if y.dtype.kind not in "iu":
        raise ValueError(f"{where}: y must hold integers (-1 for an unlabelled vertex), got dtype {y.dtype}")
    _check_fits_int64(y, "y", where)
    if y.shape[:1] != (num_vertices,):
        raise ValueError(f"{where}: y must have shape [N] with N = {num_vertices}, got {list(y.shape)}")
    data.y = torch.from_numpy(np.maximum(y.astype(np.int64), -1))
    unlabelled = data.y < 0 if data.y.dim() == 1 else (data.y < 0).all(dim=1)

    if edge_index.dtype.kind not in "iu":
        raise ValueError(f"{where}: edge_index must hold integers, got dtype {edge_index.dtype}")
    _check_fits_int64(edge_index, "edge_index", where)
    edges = torch.from_numpy(np.ascontiguousarray(edge_index, dtype=np.int64))
    del edge_index
    _check_edge_index_form(edges, where)
    _check_id_range(edges, "edge_index", num_vertices, where)
    if symmetrise:
        edges = torch.from_numpy(symmetric_closure(*edges.numpy(), num_vertices))
    data.edge_index = edges

    for split, (key, ids) in split_ids.items():
        if ids.dtype.kind not in "iu" and ids.size:
            raise ValueError(f"{where}: {key} must hold integers, got dtype {ids.dtype}")
        if ids.ndim != 1:
            raise ValueError(f"{where}: {key} must be a list of vertex ids, shape [*], got {list(ids.shape)}")
        _check_fits_int64(ids, key, where)
        mask = torch.zeros(num_vertices, dtype=torch.bool)
        ids = torch.from_numpy(ids.astype(np.int64))
        _check_id_range(ids, key, num_vertices, where)
        mask[ids] = True
        mask[unlabelled] = False
        data[f"{split}_mask"] = mask
    return data


# ---------------------------------------------------------------------------------------------------------
# .npz


def _load_npz(file: Path, undirected: bool | None = None) -> Data:
    """See `load_dataset`."""
    _check_undirected(undirected, f"npz:{file}")
    _check_file(file)
    # What a damaged file makes numpy, zipfile and zlib raise is documented nowhere: nine types were counted.
    try:
        archive = np.load(file, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror or error})") from error
    except Exception as error:
        raise ValueError(f"{file}: not an .npz archive ({_first_line(error)})") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{file}: not an .npz archive but a single array; expected the output of numpy.savez")

    with archive:

        def read(key: str) -> np.ndarray:
            try:
                return archive[key]
            except Exception as error:
                raise ValueError(f"{file}: {key} cannot be read ({_first_line(error)})") from error

        split_keys = {split: f"{split}_idx" for split in _SPLITS}
        missing = [key for key in ("edge_index", "x", "y", *split_keys.values()) if key not in archive]
        if missing:
            raise ValueError(f"{file}: missing {', '.join(missing)}; it holds {', '.join(archive.files) or 'nothing'}")

        x, y = read("x"), read("y")
        directed = bool(_scalar(file, "directed", read("directed"), "biu")) if "directed" in archive else True
        num_vertices = x.shape[0] if x.ndim else 0
        if "num_nodes" in archive:
            num_vertices = int(_scalar(file, "num_nodes", read("num_nodes"), "iu"))
        if y.ndim != 1:
            raise ValueError(f"{file}: y must have shape [N], got {list(y.shape)}")
        return _assemble(
            str(file),
            read("edge_index"),
            num_vertices,
            x,
            y,
            {split: (key, read(key)) for split, key in split_keys.items()},
            symmetrise=not directed if undirected is None else undirected,
        )


def _check_file(file: Path) -> None:
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    if not file.is_file():  # a pipe would be waited for
        raise ValueError(f"{file}: {'a directory' if file.is_dir() else 'a device or a pipe'}; expected a file")


def _first_line(error: BaseException) -> str:
    """What an error of another library says, on one line; its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _scalar(file: Path, key: str, value: np.ndarray, kinds: str) -> Any:
    if value.size != 1 or value.dtype.kind not in kinds:
        expected = "one true or false" if "b" in kinds else "one integer"
        raise ValueError(f"{file}: {key} must be {expected}, got {value.dtype} {list(value.shape)}")
    return value.item()


def _check_undirected(undirected: object, dataset: str) -> None:
    if undirected is not None and not isinstance(undirected, bool):
        raise ValueError(f"{dataset}: undirected must be True, False or None, got {undirected!r}")


# ---------------------------------------------------------------------------------------------------------
# The user's own PyG object


def _load_pyg(file: Path) -> Data:
    """See `load_dataset`."""
    _check_file(file)
    try:
        # PyG registers its data classes with torch, but not the containers that a Data of its 2.7 and later holds.
        with torch.serialization.safe_globals([DataTensorAttr, DataEdgeAttr, BaseStorage, GlobalStorage, NodeStorage, EdgeStorage]):
            stored = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror or error})") from error
    except Exception as error:
        # torch's own text advises to read the file unsafely.
        needed = re.search(r"unsupported (?:global: )?(?:global|class|operand) ([\w.]+?)(?:\.?\s|\.?$)", str(error), re.IGNORECASE)
        if needed is None:
            raise ValueError(f"{file}: damaged, or not a file that torch.save wrote ({type(error).__name__})") from error
        raise ValueError(
            f"{file}: not read, since it holds more than tensors and PyG's own classes ({needed[1]}), which could run code. If you trust it, convert "
            f"it once in Python: data = torch.load({str(file)!r}, weights_only=False); torch.save({{name: value for name, value in "
            "data.to_dict().items() if isinstance(value, torch.Tensor)}, 'new.pt'). Or let a function of yours return it: python:MODULE:FUNCTION"
        ) from error
    try:
        data = _graph_in(stored, str(file))
        _check_data(data, str(file))
    except ValueError:
        raise
    except Exception as error:  # a damaged file can leave an object of PyG's half made
        raise ValueError(f"{file}: the object in it is damaged ({type(error).__name__}: {_first_line(error)})") from error
    return data


def _graph_in(stored: object, where: str) -> Data:
    """The homogeneous graph that a file or a function gave, in one of the forms that PyG itself writes."""
    if isinstance(stored, tuple) and len(stored) in (2, 3):  # InMemoryDataset.save: the graphs as one, where each begins, their class
        stored, slices, *_ = stored
        if slices:
            raise ValueError(f"{where}: expected one graph, got a dataset of several; save the one that is meant, torch.save(dataset[0], FILE)")
    if isinstance(stored, dict):
        if not all(isinstance(key, str) for key in stored):
            raise ValueError(f"{where}: expected the attributes of a Data by name, got a dict with other keys")
        return Data.from_dict(stored)
    if isinstance(stored, Data):
        return stored
    advice = "; data.to_homogeneous() makes one" if type(stored).__name__ == "HeteroData" else ""
    raise ValueError(f"{where}: expected a homogeneous torch_geometric Data, got {_form(stored)}{advice}")


def _load_python(where: str, source: str) -> Data:
    """See `load_dataset`."""
    name, colon, function_name = source.partition(":")
    if not (colon and all(part.isidentifier() for part in name.split(".")) and function_name.isidentifier()):
        raise ValueError(f"{where}: expected python:MODULE:FUNCTION such as python:my_graph:load, where MODULE is my_graph.py without .py")
    sys.path.insert(0, os.getcwd())
    try:
        # What it prints is no result of a command.
        with contextlib.redirect_stdout(sys.stderr):
            module = _run_users(where, f"importing {name}", lambda: importlib.import_module(name))
            function = getattr(module, function_name, None)
            if not callable(function):
                known = sorted(key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", None) == name)
                raise ValueError(
                    f"{where}: {getattr(module, '__file__', name)} has no function {function_name!r}; it has {', '.join(known) or 'none'}"
                    f"{_did_you_mean(function_name, known)}"
                )
            stored = _run_users(where, f"{function_name}()", function)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(os.getcwd())
    data = _graph_in(stored, where)
    _check_data(data, where)
    return data


def _run_users(where: str, what: str, call: Callable[[], Any]) -> Any:
    """``call()``, which is the user's code: whatever it raises is an error that says where, innermost first."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        here = {__file__, importlib.__file__}
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in here and "<frozen" not in f.filename]
        at = ", called from ".join(f"{f.filename}, line {f.lineno}, in {f.name}" for f in reversed(frames))
        raise ValueError(f"{where}: {what} raised {type(error).__name__}: {_first_line(error)}{f' ({at})' if at else ''}") from error


# ---------------------------------------------------------------------------------------------------------
# Open Graph Benchmark


def _load_ogb(name: str, root: Path, undirected: bool | None = None, download: bool = False) -> Data:
    """See `load_dataset`.

    The raw files are read by ogb's own readers, but not by `ogb.nodeproppred.NodePropPredDataset` around
    them. That class (ogb 1.3.6) asks on standard input before a large download and when a version file is
    missing, and it keeps a copy of the dataset, pickled with protocol 4, that its next run opens by
    `torch.load`, which since torch 2.6 refuses such a file ("Unsupported operand 149").
    """
    _check_undirected(undirected, name)
    if not isinstance(download, bool):
        raise ValueError(f"{name}: download must be True or False, got {download!r}")
    meta = _ogb_meta(name)
    folder = root / name.replace("-", "_")
    _provide_ogb_files(name, meta, folder, download)

    raw = folder / "raw"
    # The stored definition: ogbn-products and ogbn-proteins are stored with each edge once.
    add_inverse_edge = meta["add_inverse_edge"] == "True" and undirected is not False
    try:
        graph, labels = _read_ogb_files(raw, meta, add_inverse_edge)
        split_ids = {
            split: (ogb_split, _read_ogb_split(folder, meta, ogb_split))
            for split, ogb_split in zip(_SPLITS, ("train", "valid", "test"))
        }
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # what ogb, pandas, numpy and gzip raise for a damaged file is documented nowhere
        raise ValueError(
            f"{name}: a file in {folder} is damaged or not in its format ({type(error).__name__}: {_first_line(error)}). Remove the folder, "
            f"and fetch it again from {meta['url']}"
        ) from error

    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f":
        labels = np.nan_to_num(labels, nan=-1.0).astype(np.int64)

    symmetrise = bool(undirected) and not add_inverse_edge
    if symmetrise and graph["edge_feat"] is not None:
        raise ValueError(f"{name}: undirected=True would merge edges, but this dataset has edge features")
    node_feat = graph["node_feat"]
    # The arrays are taken out of `graph`, so that the edges as stored can go while they are being doubled.
    data = _assemble(
        str(folder),
        graph.pop("edge_index"),
        int(graph["num_nodes"]),
        None if node_feat is None else _writable(node_feat),
        labels,
        split_ids,
        symmetrise,
    )
    if graph["edge_feat"] is not None:
        data.edge_attr = torch.from_numpy(_writable(graph["edge_feat"]))
    for key, value in graph.items():
        if key.startswith("node_") and value is not None and key != "node_feat":
            data[key] = torch.from_numpy(_writable(value))
    return data


def _read_ogb_files(raw: Path, meta: dict[str, str], add_inverse_edge: bool) -> tuple[dict[str, Any], np.ndarray]:
    """ogb's description of the graph, and the labels."""
    from ogb.io.read_graph_raw import read_binary_graph_raw, read_csv_graph_raw

    with contextlib.redirect_stdout(sys.stderr):  # the readers print, and stdout is for results
        if meta["binary"] == "True":
            graph = read_binary_graph_raw(str(raw), add_inverse_edge=add_inverse_edge)[0]
            with np.load(raw / "node-label.npz", allow_pickle=False) as labels_file:
                return graph, labels_file["node_label"]
        graph = read_csv_graph_raw(
            str(raw),
            add_inverse_edge=add_inverse_edge,
            additional_node_files=_listed(meta["additional node files"]),
            additional_edge_files=_listed(meta["additional edge files"]),
        )[0]
        return graph, np.loadtxt(raw / "node-label.csv.gz", delimiter=",", ndmin=2)


def _ogb_meta(name: str) -> dict[str, str]:
    """OGB's description of the dataset `name`: version, url, split, whether stored as text or binary, ..."""
    try:
        import ogb
    except ImportError as error:
        raise ImportError(f'{name} is read with the "ogb" package, which is not installed: pip install ogb') from error
    # The table that ogb's own dataset class reads: one row per property, one column per dataset.
    with open(Path(ogb.__file__).parent / "nodeproppred" / "master.csv", newline="") as table:
        header, *rows = csv.reader(table)
    datasets = {column: {row[0]: row[i] for row in rows} for i, column in enumerate(header) if column}
    if name not in datasets:
        known = [key for key, meta in datasets.items() if meta["is hetero"] != "True"]
        raise ValueError(
            f"{name} is not a node-property dataset of the installed ogb {ogb.__version__}, which has "
            f"{', '.join(known)}{_did_you_mean(name, known)}"
        )
    if datasets[name]["is hetero"] == "True":
        raise ValueError(f"{name} has several types of vertices; only homogeneous graphs can be loaded")
    return datasets[name]


def _listed(names: str) -> list[str]:
    return [] if names == "None" else names.split(",")


def _writable(array: np.ndarray) -> np.ndarray:
    """`array` as torch wants it; pandas hands out read-only arrays. Copies only if it must."""
    return np.require(array, requirements=["C", "W"])


def _provide_ogb_files(name: str, meta: dict[str, str], folder: Path, download: bool) -> None:
    """See to it that the raw files lie in `folder`, by a download if that is allowed and `folder` is new."""
    url = meta["url"]
    if download and not folder.exists():
        from ogb.utils.url import download_url, extract_zip

        with contextlib.redirect_stdout(sys.stderr):
            archive = download_url(url, str(folder.parent))
            extract_zip(archive, str(folder.parent))
        Path(archive).unlink()
        shutil.move(folder.parent / meta["download_name"], folder)

    if meta["binary"] == "True":
        needed = ["raw/data.npz", "raw/node-label.npz"]
    else:
        needed = [f"raw/{part}.csv.gz" for part in ("edge", "num-node-list", "num-edge-list", "node-label")]
        needed += ["raw/node-feat.csv.gz"] if meta["has_node_attr"] == "True" else []
        needed += ["raw/edge-feat.csv.gz"] if meta["has_edge_attr"] == "True" else []
    needed += [f"split/{meta['split']}/{part}.csv.gz" for part in ("train", "valid", "test")]
    missing = [part for part in needed if not (folder / part).exists()]
    if missing and folder.exists():
        raise FileNotFoundError(
            f"{name}: {folder} lacks {', '.join(missing)}. Complete it from {url}, or remove the folder and "
            f"pass download=True"
        )
    if missing:
        raise FileNotFoundError(
            f"{name} is not in {folder}. Pass download=True to fetch it from {url}, or unpack that archive "
            f"and rename its folder {meta['download_name']} to {folder}"
        )
    releases = sorted(path.name for path in folder.glob("RELEASE_v*.txt"))
    expected = f"RELEASE_v{meta['version']}.txt"
    if releases and expected not in releases:
        raise ValueError(
            f"{name}: {folder} is of another version: expected {expected}, got {', '.join(releases)}. Remove "
            f"the folder and pass download=True"
        )


def _read_ogb_split(folder: Path, meta: dict[str, str], ogb_split: str) -> np.ndarray:
    return np.loadtxt(folder / "split" / meta["split"] / f"{ogb_split}.csv.gz", dtype=np.int64, ndmin=1)


# ---------------------------------------------------------------------------------------------------------
# Generated graphs


def synthetic(
    *,
    num_vertices: int = 100_000,
    average_degree: float = 20.0,
    num_classes: int = 12,
    num_features: int = 64,
    community_size: int = 1000,
    homophily: float = 0.8,
    locality: float = 0.7,
    exponent: float = 2.5,
    degree_cap: float | None = None,
    signal: float = 1.0,
    label_noise: float = 0.1,
    train_fraction: float = 0.08,
    val_fraction: float = 0.04,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Data:
    """Generate an undirected graph with hubs, communities and labels that a GNN can learn.

    A degree-corrected stochastic block model (Karrer and Newman, Phys. Rev. E 83, 016107, 2011) with two
    nested levels. Each vertex v has an expected degree w(v) from a power law; vertices form communities,
    communities form classes. An edge takes its first end in proportion to w among all vertices, and its
    second in proportion to w among the first one's community, class, or everything, by fixed shares; so
    the expected degree of v is w(v) whatever the shares. Pairs that come up again and self-loops are
    discarded and drawn anew until exactly `num_vertices * average_degree / 2` distinct pairs are there.

    The label is the class, with noise. Features are a point of the class in Gaussian noise, too much noise
    to tell the class from one vertex; averaging over neighbours, most of whom share the class, takes the
    noise away. Ids are shuffled: they say nothing about community or class.

    The default sizes are meant to let a 3-layer GraphSAGE with fanouts (15, 10, 5) train on two CPU
    processes in minutes. `synthetic(num_vertices=2_400_000, average_degree=44, num_features=100)` comes
    close to the size of ogbn-products.

    Args:
        num_vertices: N.
        average_degree: directed edges per vertex, that is E / N with both directions counted.
        num_classes: number of classes; each has at least one community.
        num_features: F.
        community_size: average number of vertices in a community (sizes vary, log-normally).
        homophily: share of edges drawn within a class; the others go anywhere (by chance also within).
        locality: share of those that is drawn within the community. A partition can keep these local.
        exponent: of the power law of degrees, P(w) ~ w^-exponent; above 2, so that the mean exists.
        degree_cap: largest expected degree. Default sqrt(N * average_degree), up to which a random graph
            with given expected degrees has few repeated pairs (Chung and Lu, PNAS 99, 15879, 2002).
        signal: distance of a class's point from the origin, in standard deviations of the noise.
        label_noise: share of vertices whose label is drawn at random instead.
        train_fraction: share of the vertices in the training split; the 8 % of ogbn-products.
        val_fraction: as above. With 4000 vertices an accuracy has a standard error below 0.8 %.
        test_fraction: as above. A fifth rather than the rest, so that a sampled evaluation costs about
            as much as two epochs, not eleven.
        seed: same seed, same arrays (with the same NumPy: NEP 19 lets a release change a stream). Graph,
            features, labels and splits have streams of their own: other features leave the graph as it is.

    Returns:
        `Data` with edge_index int64 [2, N * average_degree] (symmetric, sorted, no duplicates, no
        self-loops), x float32 [N, F], y int64 [N], the three masks and num_nodes.

    Raises:
        ValueError: an argument is out of range, the graph has no room for so many distinct edges, or this machine has none for the graph.
    """
    for name, value, least, most in (
        ("num_vertices", num_vertices, 2, _MOST_VERTICES),
        ("num_classes", num_classes, 1, _MOST_VERTICES),
        ("num_features", num_features, 1, 2**31 - 1),
        ("community_size", community_size, 1, 2**63 - 1),
        ("seed", seed, 0, math.inf),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    for name, value in (
        ("homophily", homophily),
        ("locality", locality),
        ("label_noise", label_noise),
        ("train_fraction", train_fraction),
        ("val_fraction", val_fraction),
        ("test_fraction", test_fraction),
        ("average_degree", average_degree),
        ("exponent", exponent),
        ("signal", signal),
        *([] if degree_cap is None else [("degree_cap", degree_cap)]),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} must be a number below 2^63, got {value}")
    for name, value in (
        ("homophily", homophily),
        ("locality", locality),
        ("label_noise", label_noise),
        ("train_fraction", train_fraction),
        ("val_fraction", val_fraction),
        ("test_fraction", test_fraction),
    ):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    if train_fraction + val_fraction + test_fraction > 1 + 1e-9:
        total = train_fraction + val_fraction + test_fraction
        raise ValueError(f"train_fraction + val_fraction + test_fraction must be <= 1, got {total:g}")
    if num_classes > num_vertices:
        raise ValueError(f"num_classes must be <= num_vertices = {num_vertices}, got {num_classes}")
    if not 2 < exponent < math.inf:
        raise ValueError(f"exponent must be > 2{' and finite' if exponent == math.inf else ''}, got {exponent}")
    if not 0 < average_degree <= num_vertices - 1:
        raise ValueError(f"average_degree must be in (0, num_vertices - 1 = {num_vertices - 1}], got {average_degree}")
    if not 0 <= signal < math.inf:
        raise ValueError(f"signal must be finite and >= 0, got {signal}")
    if signal > 1e30:
        raise ValueError(f"signal must be at most 1e30, since features are float32, got {signal}")
    if degree_cap is None:
        degree_cap = math.sqrt(num_vertices * average_degree)
    elif not degree_cap > average_degree:
        raise ValueError(f"degree_cap must be > average_degree = {average_degree}, got {degree_cap}")

    num_vertices = int(num_vertices)
    # The arrays that are returned and the keys they come from, at the least.
    needed = 4 * num_features * (num_vertices + num_classes) + 32 * int(num_vertices * average_degree)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"{num_vertices} vertices of average degree {average_degree} with {num_features} features and {num_classes} classes need at least "
            f"{needed / 1e9:,.0f} GB of memory, and this machine has {memory / 1e9:,.0f} GB; ask for a smaller graph"
        )

    graph_rng, feature_rng, label_rng, split_rng = (
        np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(seed).spawn(4)
    )

    # "Position" below is a vertex's place before the ids are shuffled. By position, a community is a
    # contiguous range, and so is a class.
    community_start, class_of_community = _nested_groups(graph_rng, num_vertices, num_classes, community_size)
    weights = _power_law_weights(graph_rng, num_vertices, average_degree, exponent, degree_cap)
    id_of_position = graph_rng.permutation(num_vertices)
    pairs = _draw_distinct_pairs(
        graph_rng,
        num_pairs=round(num_vertices * average_degree / 2),
        weights=weights,
        community_start=community_start,
        class_of_community=class_of_community,
        shares=(homophily * locality, homophily * (1 - locality)),
        id_of_position=id_of_position,
    )
    ends = np.empty((2, pairs.size), dtype=np.int64)
    split_keys(pairs, num_vertices, *ends)
    del pairs
    edge_index = symmetric_closure(*ends, num_vertices)
    del ends

    classes = np.empty(num_vertices, dtype=np.int64)
    classes[id_of_position] = np.repeat(class_of_community, np.diff(community_start))

    centres = feature_rng.standard_normal((num_classes, num_features), dtype=np.float32)
    centres *= signal / np.linalg.norm(centres, axis=1, keepdims=True)
    x = feature_rng.standard_normal((num_vertices, num_features), dtype=np.float32)
    for start in range(0, num_vertices, _CHUNK):  # in chunks: centres[classes] is as large as x
        x[start : start + _CHUNK] += centres[classes[start : start + _CHUNK]]

    random_labels = label_rng.integers(num_classes, size=num_vertices)
    y = np.where(label_rng.random(num_vertices) < label_noise, random_labels, classes)

    data = Data(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(y),
        num_nodes=num_vertices,
    )
    order = torch.from_numpy(split_rng.permutation(num_vertices))
    # Cumulative, so that fractions that add up to one use every vertex despite the rounding.
    bounds = [
        round(num_vertices * fraction)
        for fraction in (0, train_fraction, train_fraction + val_fraction, train_fraction + val_fraction + test_fraction)
    ]
    for split, start, end in zip(_SPLITS, bounds, bounds[1:]):
        mask = torch.zeros(num_vertices, dtype=torch.bool)
        mask[order[start:end]] = True
        data[f"{split}_mask"] = mask
    return data


# Edges drawn (or rows written) at a time: large enough for NumPy, small enough to bound the temporaries.
_CHUNK = 1 << 20
# Pairs are coded as `source * N + target` in int64.
_MOST_VERTICES = math.isqrt(2**63 - 1)
# A graph with room for its edges needs 3 or 4 rounds; this many say that there is none.
_MAX_ROUNDS = 50


def _nested_groups(
    rng: np.random.Generator, num_vertices: int, num_classes: int, community_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Communities as ranges of positions, int64 [C + 1], and the class of each, int64 [C], ascending."""
    num_communities = max(num_classes, round(num_vertices / community_size))
    # One vertex each, and the rest in proportion: no community is empty, so no class is.
    sizes = rng.lognormal(sigma=0.5, size=num_communities)
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * (num_vertices - num_communities)).astype(np.int64)
    start = np.concatenate([[0], ends + np.arange(1, num_communities + 1)])
    others = rng.integers(num_classes, size=num_communities - num_classes)
    return start, np.sort(np.concatenate([np.arange(num_classes), others]))


def _power_law_weights(
    rng: np.random.Generator, num_vertices: int, mean: float, exponent: float, cap: float
) -> np.ndarray:
    """Expected degrees, float64 [N]: density ~ w^-exponent, at most `cap`, average `mean`."""
    pareto = (1.0 - rng.random(num_vertices)) ** (-1.0 / (exponent - 1.0))
    scale = mean / pareto.mean()
    # What the cap cuts off goes to all others; each step closes most of the gap, as few are at the cap.
    for _ in range(50):
        weights = np.minimum(pareto * scale, cap)
        scale *= mean / weights.mean()
    return weights


def _draw_distinct_pairs(
    rng: np.random.Generator,
    num_pairs: int,
    weights: np.ndarray,
    community_start: np.ndarray,
    class_of_community: np.ndarray,
    shares: tuple[float, float],
    id_of_position: np.ndarray,
) -> np.ndarray:
    """Exactly `num_pairs` distinct pairs of two different vertices, as keys `smaller id * N + larger id`.

    Args:
        weights: float64 [N] by position.
        community_start: int64 [C + 1], positions.
        class_of_community: int64 [C], ascending.
        shares: of pairs within a community, and of pairs within a class; the rest lies anywhere.
        id_of_position: int64 [N].

    Returns:
        int64 [num_pairs], ascending.
    """
    num_vertices = weights.size
    cumulative = np.concatenate([[0.0], np.cumsum(weights)])
    # Each community's own interval of the cumulative weight, and that of its class.
    community_ends = cumulative[community_start]
    class_range = np.searchsorted(class_of_community, np.arange(class_of_community[-1] + 2))
    class_ends = community_ends[class_range]
    low = np.stack([community_ends[:-1], class_ends[class_of_community]])
    width = np.stack([np.diff(community_ends), np.diff(class_ends)[class_of_community]])
    total = cumulative[-1]
    community_of_position = np.repeat(np.arange(class_of_community.size), np.diff(community_start))

    def position_at(weight: np.ndarray) -> np.ndarray:
        # Rounding can put a number at the very end of the last interval.
        return np.minimum(np.searchsorted(cumulative, weight, side="right") - 1, num_vertices - 1)

    def draw(start: int, end: int, num_draws: int) -> np.ndarray:
        # First ends are stratified, one in each of num_draws equal intervals of weight: ascending numbers
        # make the search run through the table instead of jumping about in it.
        count = end - start
        first = position_at((np.arange(start, end) + rng.random(count)) * (total / num_draws))
        community = community_of_position[first]
        level = rng.random(count)
        at = rng.random(count)
        near = level < shares[0]
        within_class = ~near & (level < shares[0] + shares[1])
        at = np.where(
            near,
            low[0][community] + at * width[0][community],
            np.where(within_class, low[1][community] + at * width[1][community], at * total),
        )
        a, b = id_of_position[first], id_of_position[position_at(at)]
        return (np.minimum(a, b) * num_vertices + np.maximum(a, b))[a != b]

    keys = np.empty(0, dtype=np.int64)
    yield_of_a_draw = 1.0
    for _ in range(_MAX_ROUNDS):
        missing = num_pairs - keys.size
        if missing <= 0:
            break
        num_draws = int(1.05 * missing / max(yield_of_a_draw, 0.05)) + 16
        drawn = [draw(start, min(start + _CHUNK, num_draws), num_draws) for start in range(0, num_draws, _CHUNK)]
        before = keys.size
        keys = sorted_unique(np.concatenate([keys, *drawn]))
        yield_of_a_draw = (keys.size - before) / num_draws
    else:
        raise ValueError(
            f"could place only {keys.size} of {num_pairs} distinct edges among {num_vertices} vertices: lower "
            f"average_degree, or raise community_size or degree_cap"
        )
    surplus = keys.size - num_pairs
    if surplus:
        keep = np.ones(keys.size, dtype=bool)
        keep[rng.choice(keys.size, surplus, replace=False, shuffle=False)] = False
        keys = keys[keep]
    return keys
