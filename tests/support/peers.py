"""What do some tests need that a machine need not have? PyG's sampling libraries, and real graphs: such tests skip, or fail where these are promised.

``SALIENTPP_PEER_WHEELS`` names a folder with wheels of pyg-lib, torch_sparse and torch_scatter, which ``make test`` installs;
``SALIENTPP_TEST_DATA`` one with real graphs. Where a variable is set, what it promises and is not there is a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch_geometric.typing

#: What PyG can sample with, and the module that it needs for that.
BACKENDS = {"pyg-lib": "pyg_lib", "torch-sparse": "torch_sparse"}


def peer(name: str) -> ModuleType:
    """An optional module that tests compare with; without it the test skips, or fails where ``SALIENTPP_PEER_WHEELS`` promises it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("SALIENTPP_PEER_WHEELS"):
            pytest.fail(f"SALIENTPP_PEER_WHEELS is set, but {name} cannot be imported: {error}", pytrace=False)
        pytest.skip(f"{name} is not installed")


@contextlib.contextmanager
def sampling_with(backend: str) -> Iterator[None]:
    """PyG's samplers draw with this library (a key of ``BACKENDS``), whatever else is installed."""
    peer(BACKENDS[backend])
    before = torch_geometric.typing.WITH_PYG_LIB
    torch_geometric.typing.WITH_PYG_LIB = backend == "pyg-lib"
    try:
        yield
    finally:
        torch_geometric.typing.WITH_PYG_LIB = before


def real_graph(name: str) -> Path:
    """The file of a real graph; without it the test skips, or fails where ``SALIENTPP_TEST_DATA`` is set."""
    folder = os.environ.get("SALIENTPP_TEST_DATA")
    if not folder:
        pytest.skip("SALIENTPP_TEST_DATA does not name a folder of real graphs")
    file = Path(folder) / f"{name}.npz"
    if not file.is_file():
        pytest.fail(f"SALIENTPP_TEST_DATA is {folder}, which has no {name}.npz", pytrace=False)
    return file
