"""Sets the attributes that PyG's loaders add to a batch: ids, trees, counts and seeds."""

from __future__ import annotations

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.sampler import HeteroSamplerOutput

from salientpp.batch.attributes import storage_of
from salientpp.sampling.topology import Mfg


def _set_attributes(batch: Data | BaseStorage, /, **values: object) -> None:
    """Sets attributes, and removes those that are None.

    PyG's setters do the same, but each setter takes 2 µs, as much as this function takes for all attributes.
    """
    if isinstance(batch, Data) and type(batch) is not Data:  # a subclass may have its own setters
        for name, value in values.items():
            setattr(batch, name, value)
        return
    to = batch._store._mapping if isinstance(batch, Data) else batch._mapping
    for name, value in values.items():
        if value is not None:
            to[name] = value
        else:
            to.pop(name, None)


def add_batch_attributes(batch: Data | HeteroData, mfg: Mfg) -> None:
    """Sets the attributes that all of PyG's loaders add: ids, trees and counts. Removes those that are None, as PyG does."""
    if isinstance(mfg, HeteroSamplerOutput):
        for name, n_id in mfg.node.items():
            store = storage_of(batch, name)  # created if missing: a pair of stores may have no attributes of this type
            if "n_id" not in store:
                store.n_id = n_id
        for name, e_id in (mfg.edge or {}).items():
            if e_id is not None and "e_id" not in batch[name]:
                batch[name].e_id = e_id
        batch.set_value_dict("batch", mfg.batch)
        batch.set_value_dict("num_sampled_nodes", mfg.num_sampled_nodes)
        batch.set_value_dict("num_sampled_edges", mfg.num_sampled_edges)
        if mfg.orig_row is not None:
            for name in mfg.orig_row:
                batch[name]._orig_edge_index = torch.stack([mfg.orig_row[name], mfg.orig_col[name]])
        return
    _set_attributes(batch, **getattr(mfg, "per_seed", {}))
    _set_attributes(
        batch,
        n_id=batch._store._mapping.get("n_id", mfg.node),
        e_id=batch._store._mapping.get("e_id", mfg.edge),
        batch=mfg.batch,
        num_sampled_nodes=mfg.num_sampled_nodes,
        num_sampled_edges=mfg.num_sampled_edges,
    )
    if mfg.orig_row is not None:
        batch._orig_edge_index = torch.stack([mfg.orig_row, mfg.orig_col])


def add_node_attributes(batch: Data | HeteroData, mfg: Mfg, input_type: str | None) -> None:
    """Sets the attributes that ``NeighborLoader`` adds for its seeds, from ``mfg.metadata``: (input ids, times or None)."""
    add_batch_attributes(batch, mfg)
    input_id, seed_time = mfg.metadata[:2]
    seeds = batch if input_type is None else batch[input_type]
    _set_attributes(seeds, input_id=input_id, seed_time=seed_time, batch_size=input_id.numel())


def add_link_attributes(
    batch: Data | HeteroData,
    mfg: Mfg,
    input_type: tuple[str, str, str] | None,
    triplet: bool,
) -> None:
    """Sets the attributes that ``LinkNeighborLoader`` adds for its edges, from ``mfg.metadata`` as PyG's ``edge_sample`` leaves it."""
    add_batch_attributes(batch, mfg)
    edges = batch if input_type is None else batch[input_type]
    edges.input_id = mfg.metadata[0]
    if not triplet:
        edges.edge_label_index, edges.edge_label, edges.edge_label_time = mfg.metadata[1:4]
        return
    source, target = (batch, batch) if input_type is None else (batch[input_type[0]], batch[input_type[-1]])
    source.src_index, target.dst_pos_index, target.dst_neg_index = mfg.metadata[1:4]
    source.seed_time = target.seed_time = mfg.metadata[4]
    # If these attributes exist, they belong to the whole graph.
    for name in ("edge_label_index", "edge_label_time"):
        if name in edges:
            del edges[name]
