"""Makes the printed text of a model say that it is trimmed."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch.nn import Module

#: Attribute of a model that holds its :class:`~salientpp.nn.trim.Trimming`.
TRIMMING = "_salientpp_trimmed"

#: Words in the text of a trimmed model.
_WORDS = "trimmed by salientpp.nn.trim"

#: Attribute that marks a ``__repr__`` which adds these words.
_ADDS = "_salientpp_prints_trimmed"


def print_trimmed(model: Module) -> None:
    """Makes a model print that it is trimmed."""
    if type(model).__repr__ is Module.__repr__:
        vars(model).setdefault("extra_repr", functools.partial(_extra_repr, model))


def print_plain(model: Module) -> None:
    """Undoes :func:`print_trimmed`."""
    if getattr(vars(model).get("extra_repr"), "func", None) is _extra_repr:
        del vars(model)["extra_repr"]


def _extra_repr(model: Module) -> str:
    return ", ".join(filter(None, [type(model).extra_repr(model), _WORDS]))


def print_trimmed_of(kind: type[Module]) -> type[Module]:
    """Makes trimmed models of a class print that they are trimmed, if the class has a ``__repr__`` without ``extra_repr``, as PyG's models have.

    It replaces the ``__repr__`` of the class, because Python does not look ``__repr__`` up in the object. The class's
    other models print as before.

    Returns:
        The class that defines this ``__repr__``. It can be pickled where ``kind`` cannot, such as the classes that ``torch.fx`` makes.
    """
    own, base = kind.__repr__, next(base for base in kind.__mro__ if "__repr__" in vars(base))
    if own is Module.__repr__ or hasattr(own, _ADDS):
        return base

    @functools.wraps(own)
    def printed(model: Module) -> str:
        is_outermost = type(model).__repr__ is printed  # a subclass may print the text of its base class
        is_trimmed = is_outermost and getattr(model, TRIMMING, None) is not None
        return f"{own(model)}, {_WORDS}" if is_trimmed else own(model)

    setattr(printed, _ADDS, True)
    cast(Any, base).__repr__ = printed
    return base
