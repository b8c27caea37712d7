"""Laws of the loader on 1, 2 and 4 real ranks."""
from __future__ import annotations

import distributed
import torch
from graphs import random_data

import salientpp
from salientpp import NeighborLoader


def _epoch(rank, root, options, epochs=1):
    part = salientpp.load(root)
    loader = NeighborLoader(part, [5, 3, 2], "train", batch_size=16, shuffle=True, seed=7, **options)
    digest = []
    for _ in range(epochs):
        for batch in loader:
            original = part.original_id(batch.n_id)
            assert torch.equal(batch.x[:, 0].long(), original), "x is not the row of n_id"
            assert torch.equal(batch.y, original[: batch.batch_size] % 7)
            digest.append((batch.n_id.tolist(), batch.edge_index.tolist(), batch.input_id.tolist()))
    stats = loader.stats()
    return digest, stats, len(loader)

def test_basic(tmp_path):
    data = random_data()
    salientpp.partition(data, 2, tmp_path / "d", [5, 3, 2], 16)
    import time
    t=time.time()
    out = distributed.run(_epoch, 2, str(tmp_path / "d"), {})
    print(time.time()-t)
    t=time.time()
    out2 = distributed.run(_epoch, 2, str(tmp_path / "d"), {'replication_factor':0.3,'num_workers':2,'depth':4})
    print(time.time()-t)
    assert [o[0] for o in out]==[o[0] for o in out2]
    print(out[0][1], out2[0][1])
