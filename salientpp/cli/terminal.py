"""Writes the results of commands to stdout and their errors to stderr.

Output for stdout is collected first and written at once, after the files. So a terminal that cannot show it, a closed pipe or a full disk does
not destroy results.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from salientpp.files import check_output, is_replaced, write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_whole(what: str | bytes) -> None:
    """Writes everything to stdout at once.

    Raises:
        OSError: stdout is closed or full.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise OSError("the result could not be printed: stdout is closed")
    try:
        if isinstance(what, str):
            sys.stdout.write(what)
        elif hasattr(sys.stdout, "buffer"):
            sys.stdout.flush()
            sys.stdout.buffer.write(what)
        else:
            sys.stdout.write(os.fsdecode(what))
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # otherwise Python retries at exit, with its own text and exit code
        raise OSError(
            f"the result could not be printed: stdout cannot be written ({error.strerror or error})"
        ) from None


def show(*what: RenderableType) -> None:
    """Prints lines and tables to stdout. Brackets and colons in users' paths are not taken as markup. A ``Text`` with ``no_wrap`` stays one line."""
    from rich.console import Console  # importing rich takes as long as the rest of help

    text = _Terminal()
    console = Console(file=text, markup=False, emoji=False, highlight=False)
    for renderable in what:
        console.print(renderable, soft_wrap=bool(getattr(renderable, "no_wrap", False)))
    print_whole(text.getvalue())


def finish(
    files: Mapping[str, Path],
    contents: Mapping[str, Callable[[], bytes]],
    written: list[Path],
    shown: Callable[[], Sequence[RenderableType]],
) -> None:
    """Writes the files of a subcommand, and then prints its tables. If one of these fails, the others are still made.

    Args:
        files: path by the name of its option.
        contents: for each option, a function that returns the bytes of its file.
        written: list to which the path of each written file is appended.
        shown: function that returns the texts and tables to print.

    Raises:
        OSError: something could not be written.
    """
    failed = []
    for option, path in files.items():
        try:
            write_whole(path, methodcaller("write", contents[option]()))
            written.append(path)
        except OSError as error:
            failed.append(f"--{option}: {error}")
    try:
        show(*shown())
    except OSError as error:
        failed.append(str(error))
    if failed:
        raise OSError("; ".join(failed))


class _Terminal(io.StringIO):
    """Buffer in which output is collected. It reports the encoding of stdout, and whether stdout is a terminal, so that rich renders for stdout."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # stdout may change
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def complain(text: str) -> None:
    """Prints one line on stderr. Line breaks and invalid bytes in file names are escaped; a closed stderr is ignored."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(printable(text), file=sys.stderr)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def check_outputs(paths: dict[str, Path]) -> None:
    """Raises ValueError unless each option's file can be written and no two options name the same file."""
    names: dict[str, str] = {}
    for option, path in paths.items():
        try:
            check_output(path)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
        other = names.setdefault(os.path.realpath(path), option)
        if other != option and is_replaced(path):
            raise ValueError(f"{other} and {option} name the same file, {path}; give them different names")
