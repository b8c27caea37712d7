"""Converts shares of a batch to bytes and back, because one rank draws a batch and the other ranks of its host read their shares."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from salientpp.sampling.divided_batch import BatchShare, steps
from salientpp.sampling.host_share import HostShare, WholeBatch
from salientpp.sampling.packets import pack, unpack


def pack_share(share: BatchShare) -> Tensor:
    """Packs one rank's share of a batch into bytes, uint8 [bytes].

    Raises:
        TypeError: the ids or the times of its seeds are not int64.
    """
    of_host, metadata = share.share, share.metadata
    assert of_host is not None
    given = [share.edge, *(metadata or ())]  # tensors that may be missing
    for value in given:
        if value is not None and value.dtype != torch.int64:
            raise TypeError(
                f"ids and times of seeds must be int64 to be sent to another rank of the host, got {value.dtype}"
            )
    rows = chain(of_host.own, of_host.edges, *of_host.sent, *of_host.received)
    whole = of_host.whole
    head = [
        of_host.num_vertices,
        whole.num_seeds,
        whole.digest,
        len(whole.first_seeds),
        *whole.first_seeds,
        len(of_host.own),
        -1 if metadata is None else len(metadata),
        *(value is not None for value in given),
    ]
    there = [value for value in given if value is not None]
    numbers = [torch.tensor([*list_], dtype=torch.int64, device="cpu") for list_ in (head, rows)]
    return pack([*numbers, share.node, share.row, share.col, of_host.send, *there])


def unpack_share(packet: Tensor) -> BatchShare:
    """Returns the share that :func:`pack_share` packed. Its tensors may be views of the packet."""
    head, rows, node, row, col, send, *there = unpack(packet)
    num_vertices, num_seeds, digest, listed, *others = head.tolist()
    whole = WholeBatch(num_seeds, tuple(others[:listed]), digest)
    length, num_metadata, *flags = others[listed:]
    own, edges, *of_ranks = map(tuple, rows.view(-1, length).tolist())
    left: list[Any] = there[::-1]
    edge, *metadata = [left.pop() if flag else None for flag in flags]
    ranks = len(of_ranks) // 2
    return BatchShare(
        node=node,
        row=row,
        col=col,
        edge=edge,
        num_sampled_nodes=steps(own),
        num_sampled_edges=steps(edges)[:-1],
        metadata=None if num_metadata < 0 else tuple(metadata),
        share=HostShare(num_vertices, own, edges, send, tuple(of_ranks[:ranks]), tuple(of_ranks[ranks:]), whole),
    )
