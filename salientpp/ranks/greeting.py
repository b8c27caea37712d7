"""Tells the ranks of a job which versions of this package they run, before they tell each other anything else.

Each rank writes a greeting into the job's key-value store when it first meets others. The key is ``salientpp/greeting/RANK``, with the
rank's number in the default process group. Ranks with different versions then stop with an error that names rank, host and version.

**This format never changes**, so that any version can read the greeting of any other. A greeting is UTF-8 text. Each line is a name, a
space and a value::

    salientpp 0.1.0
    wire 1
    host node7
    torch 2.13.0
    torch_geometric 2.8.1

The order of the lines is free. A reader ignores names that it does not know; later versions may add some. If a name has no line, its
value is ``unknown``. Two ranks can work together if their values of ``salientpp`` and ``wire`` are equal. Old versions of the
package write no greeting, so their values are ``unknown``. Ranks with different versions of torch or PyG get a warning.

``wire`` is the number of the wire format. It tells versions under development apart, which have the same value of ``salientpp``.
"""

from __future__ import annotations

import contextlib
import socket
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from salientpp.versions import NEEDED, UNKNOWN, own_version, versions_of_libraries

if TYPE_CHECKING:
    import torch.distributed as dist

#: Number of the wire format. Raise it with every change of what ranks send each other: keys, texts, numbers, their order and their count.
WIRE_FORMAT = 15

#: Seconds that the process which hosts the store waits, after an error, until the others have read the greetings.
_STAY_SECONDS = 2.0
_PAUSE = 0.05

#: An error names at most this many ranks of a version.
_MAX_NAMED = 4


class DifferentVersions(RuntimeError):
    """Ranks of one job run different versions of this package. The text names ranks, hosts and versions."""


def key_of(rank: int) -> str:
    """Returns the store's key of a rank's greeting; ``rank`` is its number in the default process group."""
    return f"salientpp/greeting/{rank}"


def greet(store: dist.Store, rank: int) -> None:
    """Writes this rank's greeting."""
    values = {"salientpp": own_version(), "wire": WIRE_FORMAT, "host": socket.gethostname(), **versions_of_libraries()}
    store.set(key_of(rank), "".join(f"{name} {value}\n" for name, value in values.items()))


def have_greeted(store: dist.Store, ranks: Sequence[int]) -> bool:
    """True if all these ranks have written their greetings. ``ranks`` are numbers of the default group."""
    return store.check([key_of(rank) for rank in ranks])


def compare_greetings(store: dist.Store, ranks: Sequence[int], rank: int, of: str = "", all_came: bool = True) -> None:
    """Reads the greetings of some ranks, and raises DifferentVersions unless all have the same versions.

    Args:
        ranks: the ranks' numbers in the default group. Errors call them 0, 1, ... in this order.
        rank: this process's number in the default group.
        of: text that errors append to a rank's number, such as the name of its group.
        all_came: if True, a rank without a greeting runs a version that writes none. If False, ranks without a greeting are left out.
    """
    greeted = [each for each in ranks if have_greeted(store, [each])] if not have_greeted(store, ranks) else [*ranks]
    texts = dict(zip(greeted, store.multi_get([key_of(each) for each in greeted]), strict=True))
    greetings = {
        number: texts.get(each, b"").decode(errors="replace")
        for number, each in enumerate(ranks)
        if all_came or each in texts
    }
    text = describe_difference(greetings, of)
    if text is not None:
        with contextlib.suppress(RuntimeError):  # the store and its process are gone, so no rank can read any more
            _let_others_read(store, rank, greeted)
        raise DifferentVersions(text)
    # Warned on every rank, so that all stop in the same way if warnings are errors.
    for name in NEEDED:
        if (text := describe_library(name, greetings, of)) is not None:
            warnings.warn(text, UserWarning, stacklevel=2)


def describe_difference(greetings: dict[int, str], of: str = "") -> str | None:
    """Returns the error text for ranks with different versions of this package, or None. ``greetings`` are by rank; '' if a rank wrote none."""
    ranks = _ranks_by(("salientpp", "wire"), greetings, of)
    if len(ranks) <= 1:
        return None
    versions = "; ".join(
        f"{_have(named)} version {each[0]} with wire format {each[1]}" for each, named in ranks.items()
    )
    return (
        f"all ranks must run the same version of salientpp, got different ones: {versions}; install the same version on every "
        "host, and start all ranks again"
    )


def describe_library(name: str, greetings: dict[int, str], of: str = "") -> str | None:
    """Returns the warning text for ranks with different versions of a library, or None if all known versions are the same."""
    ranks = {each[0]: named for each, named in _ranks_by((name,), greetings, of).items() if each[0] != UNKNOWN}
    if len(ranks) <= 1:
        return None
    versions = "; ".join(f"{_have(named)} {each}" for each, named in ranks.items())
    return f"the ranks run different versions of {name}: {versions}; their results may differ, so install the same version on every host"


def _ranks_by(names: Sequence[str], greetings: dict[int, str], of: str) -> dict[tuple[str, ...], list[str]]:
    """Groups the ranks by their values of these names. Returns (values) -> descriptions of the ranks with these values."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, text in greetings.items():
        values = dict(line.strip().partition(" ")[::2] for line in text.splitlines())
        key = tuple(values.get(name, UNKNOWN) for name in names)
        ranks.setdefault(key, []).append(f"rank {rank}{of} on host {values.get('host', UNKNOWN)}")
    return ranks


def _have(named: list[str]) -> str:
    more = len(named) - _MAX_NAMED
    listed = ", ".join(named[:_MAX_NAMED]) + (f" and {more} more ranks" if more > 0 else "")
    return f"{listed} {'has' if len(named) == 1 else 'have'}"


def check_names(everyone: Sequence[dict[str, Any]], of: str = "") -> None:
    """Raises DifferentVersions unless all ranks sent facts with the same names. ``everyone`` holds name -> fact, by rank.

    Ranks with equal versions send the same names, unless their sources were changed without a change of the version.
    """
    for rank, theirs in enumerate(everyone):
        if odd := sorted(theirs.keys() ^ everyone[0].keys()):
            raise DifferentVersions(
                f"all ranks must run the same sources of salientpp, but rank 0 and rank {rank}{of} do not: only one of them knows "
                f"{', '.join(odd)}; install the same sources on every host, and start all ranks again"
            )


def _let_others_read(store: dist.Store, rank: int, others: Iterable[int]) -> None:
    """Records that this rank has read the greetings. If this process hosts the store, waits until the others have read them too."""
    store.set(f"{key_of(rank)}/read", "")
    keys = [f"{key_of(each)}/read" for each in others]
    until = time.monotonic() + _STAY_SECONDS
    while is_hosted_here(store) and not store.check(keys) and time.monotonic() < until:
        time.sleep(_PAUSE)


def is_hosted_here(store: dist.Store) -> bool:
    """True if this process hosts the store. torch tells it only in the text that describes the store."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return "server=TCPServer(" in repr(inner)
