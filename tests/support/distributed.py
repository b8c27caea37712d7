"""Several ranks in a test, by ``salientpp.testing``. The server from which they are forked has imported more of what tests need."""

from __future__ import annotations

from salientpp.testing.ranks import HANG, NEVER, PRELOADED, Failed, forks
from salientpp.testing.ranks import run_ranks as run

__all__ = ["HANG", "NEVER", "Failed", "forks", "run"]

#: Lightning comes before `preloaded`, so that its objects are frozen. Without it, the server leaves it out.
PRELOADED[:] = ["uncollected", "lightning.pytorch", "preloaded", "graphs", "distributed"]
