"""Loads the compiled extension, which registers the operators."""

import torch

try:
    from salientpp import _C  # noqa: F401
except ImportError as error:
    raise ImportError(
        "salientpp's compiled extension salientpp._C could not be loaded "
        f"({error}); build it for this Python and torch with "
        "`pip install --no-build-isolation .`, or `make build` in a checkout"
    ) from error

#: All operators, as :file:`csrc/library.cpp` declares them. The other files of this folder have one typed function per operator.
operators = torch.ops.salientpp
