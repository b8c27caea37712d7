"""Entry point of the ``salientpp`` command: the subcommands, their errors and exit codes.

A subcommand is a module of this folder with ``HELP``, ``add_arguments(parser)`` and ``run(arguments)``, named in ``SUBCOMMANDS``.
``run`` returns exit code 0. Errors that users can cause end in exit code 2 and one line on stderr; Ctrl-C ends in 130. Any other exception is
a bug and shows its traceback. ``run`` imports torch and PyG itself, so that help appears at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from salientpp import __version__
from salientpp.cli import terminal
from salientpp.cli.dataset_name import WrongName, dataset_of
from salientpp.files import first_line, what_to_do
from salientpp.launch.environment import LaunchError
from salientpp.partitioning.errors import PartitionerError, is_out_of_memory
from salientpp.suggestions import did_you_mean
from salientpp.versions import check_versions

#: Subcommands by their purpose, in the order of the help.
GROUPS = {
    "start": ("demo", "doctor"),
    "prepare a graph": ("describe", "convert", "partition", "info", "rewrite", "copy-to-disk"),
    "before you rent machines": ("analyze", "plan", "calibrate"),
    "run on a cluster": ("slurm", "serve"),
    "after training": ("predict", "report"),
}
#: Options of other libraries, and words of this package's functions -> the option of the command.
MEANT = {
    "--split": "--seeds",
    "--fanouts": "--num-neighbors",
    "--fanout": "--num-neighbors",
    "--num-parts": "--parts",
    "--alpha": "--replication-factors",
    "--policy": "--policies",
    "--dtype": "--store-as",
}

SUBCOMMANDS = tuple(name for names in GROUPS.values() for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(AttributeError, ValueError):  # stdout is missing, closed or not a file
        # Replaces letters that the terminal lacks, such as α.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    command = ""
    written: list[Path] = []
    try:
        asks_for_help = not {"-h", "--help"}.isdisjoint(words)
        parser = _parser(checks_datasets=not asks_for_help)
        try:
            parsed = parser.parse_args(words, argparse.Namespace(words=words, written=written))
        except SystemExit as end:
            if not end.code:  # help or the version was asked for
                terminal.print_whole("")
            raise
        command = f" {parsed.command}"
        subcommand = _subcommand(parsed.command)
        if getattr(subcommand, "NEEDS_TORCH", True):
            check_versions()
        return subcommand.run(parsed)
    except WrongName as error:
        terminal.complain(f"salientpp {words[0]}: {error.in_words(words)}")
        return 2
    except (ValueError, OSError, ImportError, NotImplementedError, LaunchError, PartitionerError) as error:
        terminal.complain(f"salientpp{command}: {_in_words(error)}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        terminal.complain(f"salientpp{command}: not enough memory ({first_line(error)})")
        return 2
    except KeyboardInterrupt:
        done = f"{', '.join(map(str, written))} was written before" if written else "nothing was written"
        left = {
            " copy-to-disk": "the copy is not complete, and the same command goes on",
            " serve": "the storage server was stopped",
        }
        goes_on = (" convert", *([] if written else [" partition", " rewrite"]))
        left |= dict.fromkeys(goes_on, "the same command goes on after the last finished step")
        terminal.complain(f"salientpp{command}: interrupted; {left.get(command, done)}")
        return 130


def _in_words(error: Exception) -> str:
    """Returns the text of an error for stderr. An error of the operating system gets the file's name and advice."""
    if not isinstance(error, OSError) or error.errno is None or not str(error).startswith("[Errno "):
        return str(error)
    if error.filename is None and error.strerror != os.strerror(error.errno):  # words of this package
        return str(error.strerror)
    where = "a file" if error.filename is None else reprlib.repr(str(error.filename))
    return f"{where} cannot be used ({error.strerror}); {what_to_do(error, 'check the path and its permissions')}"


class _Parser(argparse.ArgumentParser):
    """Parser that names the closest command or option if one is mistyped, before it reports missing ones."""

    commands: Sequence[str] = ()
    #: Words that are parsed, and a function that returns from them what is missing besides the required arguments, and an example.
    words: Sequence[str] = ()
    incomplete: Callable[[Sequence[str]], tuple[str, str]] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = words = sys.argv[1:] if args is None else list(args)
        known = [option for action in self._actions for option in action.option_strings]
        for word in words:
            name, equals, value = word.partition("=")
            if word == "--" or (self.commands and not word.startswith("-")):
                break
            if re.fullmatch(r"--\w[\w-]*", name) and not any(option.startswith(name) for option in known):
                other = MEANT.get(name)
                meant = f". Did you mean {other}?" if other in known else did_you_mean(name, known)
                self.error(f"unrecognized argument {name}{meant}")
            # argparse drops these dashes and then fails, because the value is missing.
            if name.startswith("--") and equals and value == "--":
                self.error(f"argument {name}: expected a value, got '--'")
        command = next((word for word in words if not word.startswith("-")), None)
        if self.commands and command is not None and command not in self.commands:
            choices = ", ".join(map(repr, self.commands))
            self.error(
                f"argument COMMAND: invalid choice: {command!r} (choose from {choices}){did_you_mean(command, self.commands)}"
            )
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        is_incomplete = "arguments are required" in message and self.epilog and not self.commands
        if is_incomplete and self.incomplete is not None:
            more, example = self.incomplete(self.words)
            super().error(f"{message}{more}. Example: {example}")
        super().error(f"{message}. {self.epilog}" if is_incomplete else message)


def _subcommand(name: str) -> ModuleType:
    return importlib.import_module(f"salientpp.cli.{name.replace('-', '_')}")


def _parser(checks_datasets: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of all commands. It may check the names of datasets, before argparse reports missing options."""
    lines = ["Offline tools of salientpp, which trains graph neural networks on graphs that outgrow one machine."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"    {name:<14}{_subcommand(name).HELP}" for name in names)]
    lines += ["", "`salientpp COMMAND --help` lists the options of a command."]
    parser = _Parser(
        prog="salientpp",
        usage="salientpp [-h] [--version] COMMAND ...",
        description="\n".join(lines),
        epilog="Exit status: 0 on success; 2 after an error, with one line on stderr; 130 after Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.commands = SUBCOMMANDS
    parser.add_argument("--version", action="version", version=f"salientpp {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="salientpp", help=argparse.SUPPRESS
    )
    for name in SUBCOMMANDS:
        subcommand = _subcommand(name)
        added = subparsers.add_parser(name, epilog=f"Example: {subcommand.EXAMPLE}")
        added.incomplete = getattr(subcommand, "incomplete", None)
        subcommand.add_arguments(added)
        for action in added._actions:
            # The jobs of `slurm --dataset` may see other files than this machine.
            if action.dest == "dataset" and not action.option_strings:
                action.type = getattr(subcommand, "DATASET", dataset_of) if checks_datasets else str
    return parser
