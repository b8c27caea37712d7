"""Reads the user's own PyG object, from a file or from a function."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from salientpp.datasets.arrays import check_data, form
from salientpp.datasets.torch_files import read_torch_file
from salientpp.files import first_line
from salientpp.suggestions import did_you_mean


def read_pyg(file: Path, map_tensors: bool = False) -> Data | HeteroData:
    """Reads a graph that `torch.save` wrote. With `map_tensors` its tensors stay in the file and are not checked."""
    stored = read_torch_file(
        file,
        map_tensors=map_tensors,
        # PyG registers its data classes with torch, but not the containers inside a Data of PyG 2.7 and later.
        more=[
            DataTensorAttr,
            DataEdgeAttr,
            BaseStorage,
            GlobalStorage,
            NodeStorage,
            EdgeStorage,
            *_classes_of_tables(),
        ],
        refused=lambda needed: (
            f"not read, since it holds more than tensors and PyG's own classes ({needed}), and reading it could run code. If you trust it, convert "
            f"it once in Python: data = torch.load({str(file)!r}, weights_only=False); torch.save({{name: value for name, value in "
            "data.to_dict().items() if isinstance(value, torch.Tensor)}, 'new.pt'). Or let a function of yours return it: python:MODULE:FUNCTION"
        ),
    )
    with says_damaged(file):
        data = _graph_in(stored, str(file))
        if not map_tensors:
            check_data(data, str(file))
    return data


def _classes_of_tables() -> list[type]:
    """Returns the classes of a ``TensorFrame``, if PyTorch Frame is installed. They hold tensors and names."""
    try:
        import torch_frame
        from torch_frame.data import MultiEmbeddingTensor, MultiNestedTensor
    except ImportError:
        return []
    return [torch_frame.TensorFrame, torch_frame.stype, MultiEmbeddingTensor, MultiNestedTensor]


@contextlib.contextmanager
def says_damaged(file: Path) -> Iterator[None]:
    """Turns any error that the block's use of a PyG object raises into a ValueError. A damaged file can leave the object incomplete."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(
            f"{file}: the object in it is damaged ({type(error).__name__}: {first_line(error)})"
        ) from error


def _graph_in(stored: object, where: str) -> Data | HeteroData:
    """Returns the graph in an object from a file or a function: a Data or HeteroData, its ``to_dict()``, or the tuple of ``InMemoryDataset.save``."""
    # InMemoryDataset.save writes the graphs joined into one, the offset of each, and their class.
    if isinstance(stored, tuple) and len(stored) in (2, 3):
        stored, slices, *_ = stored
        if slices:
            raise ValueError(
                f"{where}: expected one graph, got a dataset of several; save one of them: torch.save(dataset[0], FILE)"
            )
    if isinstance(stored, dict):
        if "_global_store" in stored:  # HeteroData.to_dict()
            for key, store in stored.items():
                type_ = key if isinstance(key, tuple) and len(key) == 3 else (key,)
                names = store if isinstance(store, dict) else [None]
                if not all(isinstance(name, str) for name in (*type_, *names)):
                    raise ValueError(
                        f"{where}: expected the attributes of a HeteroData by type and name, got a dict with other keys"
                    )
            return HeteroData.from_dict(stored)
        if not all(isinstance(key, str) for key in stored):
            raise ValueError(f"{where}: expected the attributes of a Data by name, got a dict with other keys")
        return Data.from_dict(stored)
    if isinstance(stored, (Data, HeteroData)):
        return stored
    raise ValueError(f"{where}: expected a torch_geometric Data or HeteroData, got {form(stored)}")


def load_python(where: str, source: str) -> Data | HeteroData:
    """Loads ``python:MODULE:FUNCTION``, see `load_dataset`."""
    data = _graph_in(call_named(where, source, "python:MODULE:FUNCTION such as python:my_graph:load"), where)
    check_data(data, where)
    return data


def call_named(where: str, source: str, form: str) -> Any:
    """Returns the result of ``MODULE:FUNCTION``, a function of the user's that takes no arguments.

    The module is searched in the current directory, then on `sys.path`. The standard output of the module and the function goes to stderr.

    Args:
        where: the text with the name that the user gave, for errors.
        source: ``MODULE:FUNCTION``.
        form: the expected form of ``where``, and an example with the module ``my_graph``.

    Raises:
        ValueError: the name has another form, there is no such function, or the user's code raised an exception.
    """
    name, colon, function_name = source.partition(":")
    if not (colon and all(part.isidentifier() for part in name.split(".")) and function_name.isidentifier()):
        raise ValueError(f"{where}: expected {form}, where MODULE is my_graph.py without .py")
    sys.path.insert(0, os.getcwd())
    try:
        # Standard output is for the results of commands.
        with contextlib.redirect_stdout(sys.stderr):
            module = run_users(where, f"importing {name}", lambda: importlib.import_module(name))
            function = getattr(module, function_name, None)
            if not callable(function):
                functions = [key for key, value in vars(module).items() if callable(value)]
                known = sorted(key for key in functions if getattr(vars(module)[key], "__module__", None) == name)
                raise ValueError(
                    f"{where}: {getattr(module, '__file__', name)} has no function {function_name!r}; it has {', '.join(known) or 'none'}"
                    f"{did_you_mean(function_name, known)}"
                )
            return run_users(where, f"{function_name}()", function)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(os.getcwd())


def run_users(where: str, what: str, call: Callable[[], Any]) -> Any:
    """Calls the user's code. Raises ValueError for any exception in it; the text lists the lines of that code, the innermost first."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        theirs = [f for f in frames if f.filename not in (__file__, importlib.__file__) and "<frozen" not in f.filename]
        at = ", called from ".join(f"{f.filename}, line {f.lineno}, in {f.name}" for f in theirs)
        raise ValueError(
            f"{where}: {what} raised {type(error).__name__}: {first_line(error)}{f' ({at})' if at else ''}"
        ) from error
