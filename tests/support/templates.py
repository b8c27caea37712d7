"""Compiles PyG's templates once in a process. PyG compiles them again for each class of layers, which takes most of the time of making a layer."""

from __future__ import annotations

import functools

import jinja2
import torch_geometric.template


@functools.cache
def environment(loader: str) -> jinja2.Environment:
    """Returns the environment of a folder. PyG passes ``loader`` by name, and hides an error."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(loader))


torch_geometric.template.FileSystemLoader = str
torch_geometric.template.Environment = environment
