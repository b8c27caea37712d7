"""Optional requirements of tests: PyG's sampling libraries, and real graphs.

``SALIENTPP_PEER_WHEELS`` names a folder with wheels of pyg-lib, torch_sparse and torch_scatter, which ``make test``
installs. ``SALIENTPP_TEST_DATA`` names a folder with real graphs. A test whose requirement is missing is skipped if the
variable is unset, and fails if it is set.
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

#: PyG's sampling backends, and the module that each needs.
BACKENDS = {"pyg-lib": "pyg_lib", "torch-sparse": "torch_sparse"}


def peer(name: str) -> ModuleType:
    """An optional module that tests compare with.

    If it is missing, the test is skipped, or fails if ``SALIENTPP_PEER_WHEELS`` is set.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("SALIENTPP_PEER_WHEELS"):
            pytest.fail(f"SALIENTPP_PEER_WHEELS is set, but {name} cannot be imported: {error}", pytrace=False)
        pytest.skip(f"{name} is not installed")


@contextlib.contextmanager
def sampling_with(backend: str) -> Iterator[None]:
    """Makes PyG's samplers use this library (a key of ``BACKENDS``), whatever else is installed."""
    peer(BACKENDS[backend])
    before = torch_geometric.typing.WITH_PYG_LIB
    torch_geometric.typing.WITH_PYG_LIB = backend == "pyg-lib"
    try:
        yield
    finally:
        torch_geometric.typing.WITH_PYG_LIB = before


def real_graph(name: str) -> Path:
    """File of a real graph; if it is missing, the test is skipped, or fails if ``SALIENTPP_TEST_DATA`` is set."""
    folder = os.environ.get("SALIENTPP_TEST_DATA")
    if not folder:
        pytest.skip("SALIENTPP_TEST_DATA does not name a folder with real graphs")
    file = Path(folder) / f"{name}.npz"
    if not file.is_file():
        pytest.fail(f"SALIENTPP_TEST_DATA is {folder}, but this folder has no {name}.npz", pytrace=False)
    return file
