"""Names of the cache policies. This file does not import torch, so that the command can list the names at once."""

from __future__ import annotations

from typing import Literal, get_args

#: Most useful first. The functions are in :data:`salientpp.vip.policies.POLICIES`.
PolicyName = Literal["vip", "vip-hop", "degree", "halo", "wpr", "paths", "simulation", "random"]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)
