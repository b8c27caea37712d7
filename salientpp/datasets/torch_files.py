"""Reads files that `torch.save` wrote so that they cannot run code."""

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
    """Whether a file is a zip archive that can be read; one that spans several disks cannot."""
    try:
        return zipfile.is_zipfile(file)
    except (zipfile.BadZipFile, struct.error):
        return False


def read_torch_file(
    file: Path, *, more: Sequence[Any] = (), refused: Callable[[str], str], map_tensors: bool = False
) -> Any:
    """What `file` holds: tensors, plain values and the classes that torch knows and ``more``; by ``weights_only=True``.

    ``refused`` says what to do with a file that needs something else, given its name. With ``map_tensors`` the tensors stay in the file, of which
    only what is used comes into memory. Such a file must not be written to while they live.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it cannot be read, is damaged, or holds more.
    """
    check_file(file)
    try:
        with torch.serialization.safe_globals(list(more)):
            # Files of torch before 1.6 are no zip archives, and cannot be mapped.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=map_tensors and is_archive(file))
    except OSError as error:
        raise unreadable(f"{file}:", error) from error
    except Exception as error:
        # torch's own text advises to read the file unsafely.
        needed = re.search(
            r"unsupported (?:global: )?(?:global|class|operand) ([\w.]+?)(?:\.?\s|\.?$)", str(error), re.IGNORECASE
        )
        if needed is None:
            raise ValueError(
                f"{file}: damaged, or not a file that torch.save wrote ({type(error).__name__})"
            ) from error
        raise ValueError(f"{file}: {refused(needed[1])}") from error
