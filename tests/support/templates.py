"""Compiles PyG's templates once in a process. PyG compiles them again for each class of layers, which takes most of the time of making a layer."""

from __future__ import annotations

import functools

import jinja2
import torch_geometric.template


@functools.cache
def environment(folder: str) -> jinja2.Environment:
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder))


torch_geometric.template.FileSystemLoader = str
torch_geometric.template.Environment = environment
