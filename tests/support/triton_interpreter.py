"""Runs the package's Triton kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Makes the package's kernels take tensors on the CPU. Triton decides this when it reads a kernel, so their modules are loaded again."""
    names = ("store.assembly_kernel", "store.decoding_kernel", "sampling.device_kernels")
    modules = [importlib.import_module(f"salientpp.{name}") for name in names]
    try:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            for module in modules:
                importlib.reload(module)
            yield
    finally:
        for module in modules:
            importlib.reload(module)
