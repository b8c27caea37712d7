"""Reads a dataset's name with parameters, ``NAME:key=value,key=value``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from salientpp.suggestions import did_you_mean

Made = TypeVar("Made")


def with_spec(dataset: str, spec: str, parameters: dict[str, Any], as_text: bool = False) -> dict[str, Any]:
    """Merges `parameters` with the ones in `spec`, "key=value,key=value". Values become numbers, booleans or None, or stay text if `as_text`."""
    merged = dict(parameters)
    for item in filter(None, spec.split(",")):
        key, _, text = (part.strip() for part in item.partition("="))
        if not (key and text):
            raise ValueError(f"{dataset}: expected key=value after the colon, separated by commas, got {item!r}")
        if key in merged:
            raise ValueError(f"{dataset}: parameter {key} is given twice")
        merged[key] = text if as_text else _literal(dataset, key, text)
    return merged


def _literal(dataset: str, key: str, text: str) -> int | float | bool | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    raise ValueError(f"{dataset}: {key} must be a number, true, false or none, got {text!r}")


def call_with(function: Callable[..., Made], dataset: str, parameters: dict[str, Any], **own: Any) -> Made:
    """Calls `function(**own, **parameters)`. Raises ValueError for an unknown parameter, with the names of the known ones."""
    known = [key for key in inspect.signature(function).parameters if key not in own]
    for key in parameters:
        if key not in known:
            raise ValueError(
                f"{dataset} has no parameter {key!r}; it has {', '.join(known) or 'none'}{did_you_mean(key, known)}"
            )
    return function(**own, **parameters)
