"""Fixtures of the tests of models."""

from __future__ import annotations

import pytest
import torch_geometric


@pytest.fixture(scope="module", autouse=True)
def _no_segment_matmul():
    before = torch_geometric.backend.use_segment_matmul
    torch_geometric.backend.use_segment_matmul = False  # some builds of pyg-lib lack it
    yield
    torch_geometric.backend.use_segment_matmul = before
