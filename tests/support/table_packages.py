"""Packages that tests of tables need. Without one, a test skips, or fails if FAIL_WITHOUT_TABLES is set."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def package(name: str) -> ModuleType:
    if os.environ.get("FAIL_WITHOUT_TABLES"):
        return importlib.import_module(name)
    return pytest.importorskip(name)
