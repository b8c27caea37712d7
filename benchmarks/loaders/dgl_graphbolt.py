"""DGL's GraphBolt: ``ItemSampler``, ``sample_neighbor``, ``fetch_feature`` and ``DataLoader``. DGL 2.1.0, the last release on PyPI, needs torch 2.0 to 2.2."""

from types import SimpleNamespace

import dgl.graphbolt as gb
import torch

NAME, DISTRIBUTIONS = "DGL GraphBolt", ("dgl",)


def make(graph: SimpleNamespace, options: SimpleNamespace) -> gb.DataLoader:
    source, target = graph.edge_index
    order = torch.sort(target, stable=True).indices
    indptr = torch.zeros(len(graph.x) + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(target, minlength=len(graph.x)).cumsum(0)
    lists = gb.fused_csc_sampling_graph(indptr, source[order].contiguous())
    features = gb.BasicFeatureStore({("node", None, "feat"): gb.TorchBasedFeature(graph.x)})
    seeds = gb.ItemSet((graph.seeds, graph.y[graph.seeds]), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(seeds, batch_size=options.batch_size, shuffle=True)
    pipe = pipe.sample_neighbor(lists, options.fanouts[::-1])  # GraphBolt begins with the hop furthest from the seeds
    pipe = pipe.fetch_feature(features, node_feature_keys=["feat"])
    return gb.DataLoader(pipe, num_workers=options.workers)


def describe(batch: gb.MiniBatch) -> SimpleNamespace:
    n_id, hops = batch.input_nodes, []
    position = torch.full((int(n_id.max()) + 1,), -1)
    position[n_id] = torch.arange(len(n_id))
    for block in reversed(batch.sampled_subgraphs):
        # Ids of edges refer to the vertices of their own hop.
        target_counts = block.sampled_csc.indptr.diff()
        target = position[block.original_column_node_ids].repeat_interleave(target_counts)
        hops.append((position[block.original_row_node_ids][block.sampled_csc.indices], target))
    return SimpleNamespace(n_id=n_id, batch_size=len(batch.seed_nodes), x=batch.node_features["feat"], hops=hops)
