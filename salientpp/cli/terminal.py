"""How do commands say what they found, and what went wrong?

What goes to stdout is put together first and written at once, after the files: a terminal that cannot show it, a pipe that was closed or
a full disk must not take the results of the work along.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from salientpp.files import check_output, is_replaced

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_whole(what: str | bytes) -> None:
    """Write to stdout, all of it.

    Raises:
        OSError: stdout is closed or full.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise OSError("stdout is closed, so the result could not be printed")
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
            sys.stdout.close()  # else Python tries once more when it ends, with a text and an exit code of its own
        raise OSError(
            f"the result could not be printed: stdout cannot be written ({error.strerror or error})"
        ) from None


def show(*what: RenderableType) -> None:
    """Lines and tables on stdout; users' paths in them may have brackets and colons, which are no markup."""
    from rich.console import Console  # takes as long as all the rest of help

    text = _Terminal()
    console = Console(file=text, markup=False, emoji=False, highlight=False)
    for renderable in what:
        console.print(renderable)
    print_whole(text.getvalue())


class _Terminal(io.StringIO):
    """Collects what is meant for stdout, and passes for it: with its letters, and colours where it has them."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # that of stdout, which may change
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def complain(text: str) -> None:
    """One line on stderr. Names of files may have line breaks and bytes that are no text; a closed stderr is no reason to fail."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(printable(text), file=sys.stderr)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def check_outputs(paths: dict[str, Path]) -> None:
    """Raise ValueError unless each option's file can be written, and beside the others."""
    names: dict[str, str] = {}
    for option, path in paths.items():
        try:
            check_output(path)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
        other = names.setdefault(os.path.realpath(path), option)
        if other != option and is_replaced(path):
            raise ValueError(f"{other} and {option} name the same file, {path}; give them names of their own")
