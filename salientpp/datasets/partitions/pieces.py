"""Describes a partition that another library wrote to disk, and reads its files without running code from them."""

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

from salientpp.datasets.arrays import check_file, form, unreadable
from salientpp.datasets.torch_files import read_torch_file
from salientpp.files import first_line
from salientpp.ids import first_outside

#: Advice at the end of errors about files that do not fit each other.
COPY_AGAIN = "; the files are of different partitions, or damaged: copy them again, or partition again"

#: A type of vertices or of edges; None in a homogeneous graph.
Type: TypeAlias = "str | tuple[str, str, str] | None"


@dataclass(frozen=True)
class Book:
    """Partition book of another library, which assigns each vertex or edge of a type to a part."""

    file: Path
    parts: Tensor  # int64 [number of vertices or edges of the type]


@dataclass(frozen=True)
class PartRows:
    """Attributes of some vertices or edges of a type, as the file of one part holds them."""

    kind: str  # "vertex" or "edge"
    type: Type
    file: Path
    ids: Tensor | None  # int64 [n], in the numbering of the type; None: this part has the rows of all ids
    values: Mapping[str, Tensor]  # name -> [n, ...]; the edges themselves are the values "row" and "col", int64 [n]


@dataclass(frozen=True)
class Files:
    """Partition on disk: the parts that vertices and edges are assigned to, and a function that reads the rows of one part."""

    num_parts: int
    vertices: Mapping[str | None, Book]  # by type, in the order of the graph that was partitioned
    edges: Mapping[tuple[str, str, str] | None, Book]
    pieces: Callable[[int], Iterator[PartRows]]  # yields all pieces of a part
    fills_with_nan: bool = False  # if True, a type that lacks an attribute of another type has rows of NaN for it


def named(kind: str, of: Type) -> str:
    """Returns a name for errors such as ``vertex`` or ``edge of type ('a', 'to', 'b')``."""
    return kind if of is None else f"{kind} of type {of!r}"


def check_folders(root: Path, prefix: str, num_parts: int, stated_by: str) -> None:
    """Raises ValueError unless the folders ``<prefix>0`` to ``<prefix><K - 1>`` exist, and no others."""
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
    """Returns the contents of a JSON file."""
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); copy it again, or partition again") from error


def read(file: Path) -> Any:
    """Reads a file of `torch.save`: tensors in plain containers. The tensors stay in the file."""
    with _dicts_for_defaultdicts():
        return read_torch_file(
            file,
            refused=lambda needed: (
                f"not read, since it holds more than tensors and plain containers ({needed}), and reading it could run code. If you trust it, load it "
                f"once in Python with torch.load({str(file)!r}, weights_only=False), and save only tensors and plain containers with torch.save"
            ),
            map_tensors=True,
        )


@contextlib.contextmanager
def _dicts_for_defaultdicts() -> Iterator[None]:
    """Makes torch read a defaultdict as a dict inside the block.

    PyG's partitioner puts edge features into a defaultdict, and registers that class with torch. torch then creates one but refuses to fill it.
    """
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # only one object can be registered under a name
    others = [allowed for allowed in registered if allowed is not defaultdict]
    torch.serialization.add_safe_globals([*others, dict, (lambda *_: {}, "collections.defaultdict")])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def read_dict(file: Path) -> dict[Any, Any]:
    """Reads a file that holds a dict, see `read`."""
    stored = read(file)
    if not isinstance(stored, dict):
        raise ValueError(f"{file}: expected a dict, got {form(stored)}")
    return stored


def tensor(value: object, file: Path, name: str = "") -> Tensor:
    """Returns `value` if it is a dense tensor of at least one dimension, else raises ValueError."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0 or value.is_meta:
        raise ValueError(f"{file}: {name or 'it'} must be a dense tensor with a row per id, got {form(value)}")
    return value


def integers(value: object, file: Path, name: str = "") -> Tensor:
    """Returns `value` as int64 [n], or raises ValueError."""
    given = tensor(value, file, name)
    if given.dim() != 1 or given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
        raise ValueError(f"{file}: {name or 'it'} must hold integers, shape [n], got {form(given)}")
    return given.to(torch.int64)


def read_books(stem: Path, types: Sequence[Any], num_parts: int) -> dict[Any, Book]:
    """Reads the books of all types, each from a file in the folder ``stem``.

    A homogeneous graph has the only type None, whose book is in the file ``stem.pt``.
    """
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
        books[of] = Book(file, parts.clone())  # the book outlives the mapped file
    return books


# --- pickles ---------------------------------------------------------------------------------------------


def read_pickles(file: Path) -> Iterator[Any]:
    """Yields the objects that `pickle.dump` wrote into a file, one or several. Only tensors and plain values are accepted, so no code can run."""
    check_file(file)
    try:
        with file.open("rb") as stream:
            while stream.peek(1):
                yield _Unpickler(stream).load()
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except _Refused as error:
        raise ValueError(
            f"{file}: not read, since it holds more than tensors and plain values ({error}), and reading it could run code"
        ) from error
    except (
        Exception
    ) as error:  # errors of damaged pickles are not documented; a damaged length may even raise MemoryError
        raise ValueError(f"{file}: damaged, or not a pickle ({type(error).__name__}: {first_line(error)})") from error


class _Refused(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _IN_A_TENSOR[module, name]
        except KeyError:
            raise _Refused(repr(f"{module}.{name}")[1:-1]) from None  # a damaged name may hold the end of a line


def _storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage._untyped_storage, offset, size, stride)


#: Maps the names in a pickled tensor to the functions that are called for them.
_IN_A_TENSOR = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
}
