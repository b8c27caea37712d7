"""Takes connections that are free on every rank, or makes new ones."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from salientpp.processes import connecting
from salientpp.ranks.failure import RankFailure, in_words
from salientpp.ranks.groups import Circle, Groups
from salientpp.ranks.job_store import job_store
from salientpp.ranks.roll import Roll

#: How much longer than a Comm's own wait the backend's is.
_GRACE = timedelta(seconds=5)

#: How long a rank whose group could not be made waits to hear from the others that could not make it either.
_ROLL_SECONDS = 2.0


def lease(roll: Roll, circle: Circle, over: str, timeout: timedelta) -> Groups:
    """Connections that are free on every rank of the roll, or new ones."""
    number = roll.agree(over, circle.free(over), timeout)
    groups = circle.groups.get(number)
    if groups is None:
        with connecting():
            groups = circle.groups[number] = _connect(roll, number, over, timeout)
    groups.free = False
    # The backend's own time-out comes a little later, so that ours, whose text says more, is the one met.
    groups.host._set_default_timeout(timeout + _GRACE)
    return groups


def _connect(roll: Roll, number: int, over: str, timeout: timedelta) -> Groups:
    """New connections; all ranks are here already."""
    store = dist.PrefixStore(f"{roll.prefix}/gloo", job_store())
    try:
        # A backend alone, not dist.new_group's: that would want every rank of the job, find a name that ranks with other groups may
        # not find, and be wrapped by torch's debugging, which keeps the time-out from it. gloo tries to connect five times, each
        # for as long as it would wait in a collective.
        host = dist.ProcessGroupGloo(store, roll.rank, len(roll.ranks), max(timeout / 5, timedelta(seconds=2)))
    except RuntimeError as error:
        missing = roll.missing("after", _ROLL_SECONDS)
        raise RankFailure(f"{in_words(missing) or 'a rank'}{roll.of} went away while a loader was made") from error
    roll.missing("after", 0)
    device = None
    if over == "nccl":
        # Its kernels are few and small, and the pipeline waits for them: they go before the model's.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        device = dist.new_group(timeout=timeout + _GRACE, backend="nccl", pg_options=options)
    return Groups(host, device, number)
