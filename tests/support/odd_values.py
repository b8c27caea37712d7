"""Values that a numeric option must reject or handle correctly."""

from __future__ import annotations

import math

ODD_VALUES = [
    None,
    True,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    1e308,
    -1e308,
    5e-324,
    "",
    "many",
]
