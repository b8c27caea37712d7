"""Law of refusals: a job is refused only for an odd argument, which the error names, or because arguments that strategies draw do not fit together."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Errors of arguments that do not fit together, or do not fit the graph, though strategies draw them.
_KNOWN = re.compile(
    "|".join(
        (
            # seeds
            r"has no seeds, so uneven='(wrap|drop)' cannot give it batches",
            r"uneven='error', but (logical ranks|ranks|hosts) \d+ to \d+ have \[.*\] batches",
            r"cooperate\['batches'\]=\d is more than the \d+ seeds of",
            r"hosts whose ranks cooperate need equally many ranks, got",
            r"your own seeds do not say which group they belong to; name a split",
            # things that the machine or the data lacks
            r"neighbor_sampler='device' needs a device other than the CPU",
            r"memory\['device'\]=\d+ is memory of an accelerator, but device is the CPU",
            r"read_ahead must hold the rows of several batches, expected about \d+ bytes or more",
            r"read_ahead=\d+ reads rows of memory-mapped files, but the rows of .* are in no such file",
            r"policy must be one of degree, random, vip, vip-hop for several vertex types",
            r"policy 'simulation' samples batches in one process, which needs the whole topology",
            r"a PPRSampler over a topology in parts finds the scores of its seeds beforehand, so they must be vertices",
            r"is_sorted=True, but .* not sorted by target",
            # pairs of arguments
            r"lookahead=\d+ needs \d+ bytes for ids, more than half of the \d+ that the replication factor gives",
            r"all ranks must have the same device_rows",
            r"has rows of its own in columns=, which the other ranks of its host cannot read",
            r"the given cache (has no rows of|must hold rows of this loader's dataset, encoded in the same way)",
            r"pad=\{'static': True\} excludes pin_memory",
            r"device_rows\['zero_copy'\] needs rows in memory, but the rows of x come from a custom row source",
            r"excludes a salientpp.PPRSampler",
            r"memory\['allow'\]=\('sums',\) (is for a NeighborLoader|permits a plan to send sums instead of rows)",
        )
    )
)

#: Errors of odd arguments that name its value and the choices (an attribute, a split), what differs between the ranks, or another argument that must fit.
_OF_VALUES = re.compile(
    r"The time attribute .* is neither|the weight of the edges must be|has the splits '|the edges have the attributes|"
    r"all ranks must have the same (topology|ppr|replace|disjoint|dataset|neg_sampling)|neg_sampling must|must have one entry per seed"
)


def is_right(words: str, odd: Iterable[str]) -> bool:
    """Returns True if a job with these odd arguments may be refused with these words."""
    odd = list(odd)
    names = any(re.search(rf"\b{name}\b", words) for name in odd)
    return names or bool(_KNOWN.search(words) or (odd and _OF_VALUES.search(words)))
