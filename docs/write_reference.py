"""Writes the tables of options and subcommands in docs/reference/options.md and cli.md: ``python docs/write_reference.py``."""

import argparse
import re
import textwrap
from pathlib import Path

from salientpp.cli.main import SUBCOMMANDS, _parser
from salientpp.cli.shared_arguments import DATASETS
from salientpp.engine.option import with_entries
from salientpp.loader.options import GROUPS
from salientpp.loader.signature import title_of


def tables_of_options() -> str:
    """Returns Markdown: a table for each group of options with defaults, whether ranks must agree, and help."""
    agree = {"yes": "same", "no": "", "hosts": "same on a host"}
    blocks = []
    for group in GROUPS:
        lines = [f"### {title_of(group)}\n", "| argument | default | ranks | meaning |", "|---|---|---|---|"]
        for name, option in with_entries(group).items():
            default = f"`{option.default!r}`" if option.shown is None else option.shown
            lines.append(f"| `{option.label or name}` | {default} | {agree[option.agree]} | {option.help} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def tables_of_subcommands() -> str:
    """Returns Markdown: for each subcommand its description, its usage, and tables of its arguments."""
    subparsers = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return "\n\n".join(_section(name, subparsers.choices[name]) for name in SUBCOMMANDS) + "\n"


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    blocks = [f"## {name}", _paragraph(parser.description)]
    # argparse keeps positional arguments and options without a group of their own in the first two groups.
    positional, options, *groups = parser._action_groups
    blocks.append(_table([*positional._group_actions, *options._group_actions]))
    for group in groups:
        blocks += [f"### {name}: {group.title}", _paragraph(group.description), _table(group._group_actions)]
    return "\n\n".join(blocks)


def _paragraph(text: str | None) -> str:
    return textwrap.fill(_with_code(text or ""), 100, break_long_words=False, break_on_hyphens=False)


def _table(actions: list[argparse.Action]) -> str:
    lines = ["| argument | default | meaning |", "|---|---|---|"]
    for action in actions:
        if isinstance(action, argparse._HelpAction):
            continue
        # The default of --python is a path of this machine.
        text = (action.help or "").replace("%(default)s", "this interpreter").replace("%%", "%")
        text = (
            text.replace(DATASETS, "[a dataset](#datasets)")
            .replace("or [a", "or [another")
            .replace("#SBATCH", "`#SBATCH`")
        )
        meaning, default = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", text).groups()
        if action.required and action.option_strings:
            default = "required"
        lines.append(
            f"| {_names(action)} | {_with_code(default or '')} | {_with_code(meaning)} |".replace("|  |", "| |")
        )
    return "\n".join(lines)


def _with_code(text: str) -> str:
    """Marks options and examples of them as code, outside existing code."""
    pieces = text.split("`")
    pieces[::2] = [
        re.sub(r"'(--[^']*)'|(--[a-z][\w,.=-]*\w)", lambda found: f"`{found[1] or found[2]}`", piece)
        for piece in pieces[::2]
    ]
    return "`".join(pieces)


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    if action.nargs == "?":
        value = f" [{value.strip()}]"
    if action.choices:
        value = " {" + ",".join(map(str, action.choices)) + "}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _write(name: str, tables: str) -> None:
    """Replaces the marked part of docs/reference/<name>.md."""
    page = Path(__file__).parent / "reference" / f"{name}.md"
    pattern = re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n<!-- /{name} -->)", re.DOTALL)
    page.write_text(pattern.sub(lambda _: tables, page.read_text()))


if __name__ == "__main__":
    _write("options", tables_of_options())
    _write("cli", tables_of_subcommands())
