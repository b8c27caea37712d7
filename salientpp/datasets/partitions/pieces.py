"""Describes the pieces in which a partition lies on disk, and reads its files so that they cannot run code."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from salientpp.datasets.arrays import check_file, first_line, form, unreadable
from salientpp.datasets.torch_files import read_torch_file
from salientpp.ids import first_outside

#: What an error about files that do not fit each other advises.
COPY_AGAIN = "; the files are of different partitions, or damaged: copy them again, or partition again"

#: A type of vertices or of edges; None in a homogeneous graph.
Type: TypeAlias = "str | tuple[str, str, str] | None"


@dataclass(frozen=True)
class Book:
    """Which part each vertex or each edge of a type is in."""

    file: Path
    parts: Tensor  # int64 [number of vertices or edges of the type]


@dataclass(frozen=True)
class Piece:
    """Rows of some vertices or edges of a type, as one part has them."""

    kind: str  # "vertex" or "edge"
    type: Type
    file: Path
    ids: Tensor | None  # int64 [n], in the numbering of the type; None: this part has the rows of all
    values: Mapping[str, Tensor]  # name -> [n, ...]; the edges themselves are the values "row" and "col", int64 [n]


@dataclass(frozen=True)
class Files:
    """A partition on disk."""

    num_parts: int
    vertices: Mapping[str | None, Book]  # by type, in the order of the graph that was partitioned
    edges: Mapping[tuple[str, str, str] | None, Book]
    pieces: Callable[[int], Iterator[Piece]]  # all that the files of a part hold
    fills_with_nan: bool = False  # types without an attribute that others have were given rows of NaN for it


def named(kind: str, of: Type) -> str:
    """``vertex``, ``edge of type ('a', 'to', 'b')``."""
    return kind if of is None else f"{kind} of type {of!r}"


def check_folders(root: Path, prefix: str, num_parts: int, stated_by: str) -> None:
    """Raise ValueError unless the folders ``<prefix>0`` to ``<prefix><K - 1>`` are there, and no further one."""
    found = {int(match[1]) for path in root.iterdir() if (match := re.fullmatch(rf"{prefix}(\d+)", path.name))}
    for part in sorted(found ^ set(range(num_parts))):
        if part in found:
            raise ValueError(
                f"{root}: {stated_by} says {num_parts} parts, but there is a folder {prefix}{part}; "
                "it is of another partition: remove it, or partition again"
            )
        raise ValueError(
            f"{root}: expected the folders of {num_parts} parts, as {stated_by} says, got none named {prefix}{part}; "
            "bring the folders of all machines together in one directory"
        )


def read_json(file: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); copy it again, or partition again") from error


def read(file: Path) -> Any:
    """What `torch.save` wrote: tensors in plain containers. The tensors stay in the file."""
    with _dicts_for_defaultdicts():
        return read_torch_file(
            file,
            refused=lambda needed: (
                f"not read, since it holds more than tensors and plain containers ({needed}), which could run code. If you trust it, write it "
                f"anew once in Python, without that: torch.save(plain, FILE) of what torch.load({str(file)!r}, weights_only=False) gives"
            ),
            map_tensors=True,
        )


@contextlib.contextmanager
def _dicts_for_defaultdicts() -> Iterator[None]:
    """PyG's partitioner puts edge features into a defaultdict, and registers that class with torch, which then makes one and refuses to fill it."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # of a name, one alone can be registered
    others = [allowed for allowed in registered if allowed is not defaultdict]
    torch.serialization.add_safe_globals([*others, dict, (lambda *_: {}, "collections.defaultdict")])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def read_dict(file: Path) -> dict[Any, Any]:
    """See `read`."""
    stored = read(file)
    if not isinstance(stored, dict):
        raise ValueError(f"{file}: expected a dict, got {form(stored)}")
    return stored


def tensor(value: object, file: Path, name: str = "") -> Tensor:
    """`value`, if it is a dense tensor of at least one dimension."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0 or value.is_meta:
        raise ValueError(f"{file}: {name or 'it'} must be a dense tensor with a row per id, got {form(value)}")
    return value


def integers(value: object, file: Path, name: str = "") -> Tensor:
    """`value` as int64 [n]."""
    given = tensor(value, file, name)
    if given.dim() != 1 or given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
        raise ValueError(f"{file}: {name or 'it'} must hold integers, shape [n], got {form(given)}")
    return given.to(torch.int64)


def read_books(stem: Path, types: Sequence[Any], num_parts: int) -> dict[Any, Book]:
    """The books of all types, of which each has a file in the folder ``stem``; ``stem.pt`` is that of a homogeneous graph, whose type is None."""
    books = {}
    for of in types:
        name = "__".join(of) if isinstance(of, tuple) else of
        file = stem.with_suffix(".pt") if of is None else stem / f"{name}.pt"
        parts = integers(read(file), file)
        at = first_outside(parts, num_parts)
        if at is not None:
            raise ValueError(
                f"{file}: expected a part in [0, {num_parts}) for every id, got {int(parts[at])} for {at}{COPY_AGAIN}"
            )
        books[of] = Book(file, parts.clone())  # it outlives the file
    return books


# --- pickles ---------------------------------------------------------------------------------------------


def read_pickles(file: Path) -> Iterator[Any]:
    """What `pickle.dump` wrote, once or again and again into the same file: tensors and plain values; nothing else is taken, so nothing can run."""
    check_file(file)
    try:
        with file.open("rb") as stream:
            while stream.peek(1):
                yield _Unpickler(stream).load()
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except _Refused as error:
        raise ValueError(
            f"{file}: not read, since it holds more than tensors and plain values ({error}), which could run code"
        ) from error
    except Exception as error:  # what a damaged pickle raises is documented nowhere, and a length in it may be any
        raise ValueError(f"{file}: damaged, or not a pickle ({type(error).__name__}: {first_line(error)})") from error


class _Refused(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _IN_A_TENSOR[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def _storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage._untyped_storage, offset, size, stride)


#: What a pickled tensor asks for, and who answers.
_IN_A_TENSOR = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
}
