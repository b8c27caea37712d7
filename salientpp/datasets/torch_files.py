"""Reads files that `torch.save` wrote, without running code from them."""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from salientpp.datasets.arrays import check_file, unreadable


def is_archive(file: Path) -> bool:
    """True if a file is a zip archive that can be read. An archive that spans several disks cannot be read."""
    try:
        return zipfile.is_zipfile(file)
    except (zipfile.BadZipFile, struct.error):
        return False


def read_torch_file(
    file: Path, *, more: Sequence[Any] = (), refused: Callable[[str], str], map_tensors: bool = False
) -> Any:
    """Returns the contents of `file`: tensors, plain values, and objects of the classes that torch knows and of ``more``.

    The file is read with ``weights_only=True``. If it needs another class, ``refused`` gets the name of that class and returns the text of the error.
    With ``map_tensors`` the tensors stay in the file, and only the pages that are used come into memory. Such a file must not be written to while
    the tensors live.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file cannot be read, is damaged, or needs another class.
    """
    check_file(file)
    try:
        with torch.serialization.safe_globals(list(more)):
            # Files of torch before 1.6 are not zip archives, and cannot be mapped.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=map_tensors and is_archive(file))
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except Exception as error:
        # torch's own text is not shown, since it advises reading the file unsafely.
        needed = re.search(
            r"unsupported (?:global: )?(?:global|class|operand) ([\w.]+?)(?:\.?\s|\.?$)", str(error), re.IGNORECASE
        )
        if needed is None:
            raise ValueError(
                f"{file}: damaged, or not a file that torch.save wrote ({type(error).__name__})"
            ) from error
        raise ValueError(f"{file}: {refused(needed[1])}") from error
