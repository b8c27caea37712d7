"""Values of options: devices of any accelerator that torch finds, functions, and names of attributes."""

from __future__ import annotations

import re

import pytest
import torch
from graphs import random_data
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import salientpp
from salientpp import LinkNeighborLoader, NeighborLoader
from salientpp.loader.values import Options


@pytest.fixture
def accelerator(monkeypatch) -> None:
    """Lets torch report two devices of type XPU, of which the second is current."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.xpu, "default_stream", None, raising=False)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "cpu"), ("cpu", "cpu"), ("xpu", "xpu:1"), ("xpu:0", "xpu:0"), ("xpu:1", "xpu:1")]
)
def test_a_device_of_any_accelerator_is_accepted_and_has_an_index(accelerator, given, expected):
    assert Options(device=given).checked_device() == torch.device(expected)


@pytest.mark.parametrize("given", ["xpu:2", "cuda:0", "cuda", "meta"])
def test_the_error_of_a_missing_device_names_those_that_exist(accelerator, given):
    text = re.escape(f"device must be the CPU or one of 2 XPU devices, got {given!r}")
    with pytest.raises(ValueError, match=f"^{text}$"):
        Options(device=given).checked_device()


def test_a_device_without_streams_is_refused(accelerator, monkeypatch):
    monkeypatch.delattr(torch.xpu, "default_stream")
    text = "device must have torch's streams and events, got 'xpu:0', and torch.xpu has no default_stream; upgrade torch, or use the CPU"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Options(device="xpu:0").checked_device()


def test_zero_copy_is_refused_on_a_device_for_which_triton_does_not_compile():
    Options(device_rows={"zero_copy": True}).checked(torch.device("cpu"))
    with pytest.raises(
        ValueError,
        match=r"device_rows\['zero_copy'\] on xpu:0 needs a Triton that compiles for this device; install it",
    ):
        Options(device_rows={"zero_copy": True}).checked(torch.device("xpu", 0))


@pytest.mark.parametrize("name", ["transform", "transform_sampler_output"])
def test_a_transform_that_cannot_be_called_is_refused_when_the_loader_is_made(name):
    with pytest.raises(TypeError, match=f"^{name} must be a function or None, got True$"):
        NeighborLoader(random_data(20, 40), [2], **{name: True})


@pytest.mark.parametrize("given", [print, iter([]), {"a"}, 3])
def test_ways_are_a_list(given):
    with pytest.raises(TypeError, match=r"^ways must be a list of objects of salientpp\.engine\.way\.Way, got "):
        NeighborLoader(random_data(20, 40), [2], ways=given)


@pytest.mark.parametrize("name", ["time_attr", "weight_attr"])
def test_the_name_of_an_attribute_is_a_text(tmp_path, name):
    part = salientpp.partition(random_data(20, 40), 1, tmp_path / "d", [2], 4)
    for data in (random_data(20, 40), part):
        with pytest.raises(TypeError, match=rf"^{name} must be the name of an attribute or None, got \[None\]$"):
            NeighborLoader(data, [2], **{name: [None]})


def test_edges_of_stores_are_a_tensor():
    features, edges = MyFeatureStore(), MyGraphStore()
    features.put_tensor(torch.zeros(3, 1), group_name=None, attr_name="x", index=None)
    edges.put_edge_index(torch.tensor([[0, 1], [1, 2]]), edge_type=None, layout="coo", size=(3, 3))
    with pytest.raises(ValueError, match=r"^edge_label_index must be int64 \[2, M\] or None, got 0$"):
        LinkNeighborLoader((features, edges), [2], 0)
