"""Names the differences between the tables that a graph was made of and the tables of a command that would write the graph again.

Both are described as :func:`~salientpp.store.directory.origin.table_origin` does. A file is the same if its address, size and etag are, or without an etag
its time. No file is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from salientpp.datasets.converted.directory import open_arrays, read_converted
from salientpp.datasets.tabular.description import TableGraph
from salientpp.datasets.tabular.doors import facts_of
from salientpp.datasets.tabular.staging import task_of
from salientpp.datasets.tabular.steps import discard_staged, staged_beside
from salientpp.progress import Progress
from salientpp.store.directory.journal import difference
from salientpp.store.directory.origin import table_origin

#: Number of differences that an error names.
_NAMED = 8


def asked_origin(graph: TableGraph, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what the origin of a graph would say of its description, tables and options, if the graph was made now.

    Returns None if a table is an object that gives its rows once. Then nothing can be compared.

    Raises:
        ValueError: an address cannot be read.
        OSError: a table is missing or out of reach.
    """
    tables = {}
    for entry in graph.entries:
        facts = facts_of(entry.tables, graph.base, entry.title)
        if facts is None:
            return None
        tables[entry.title] = {"from": facts}
    asked = {"description": graph.recorded, "folder": graph.folder, "options": dict(options), "tables": tables}
    return json.loads(json.dumps(asked))


def is_made_of(root: Path, graph: TableGraph, options: Mapping[str, Any], progress: Progress) -> bool:
    """Returns if the complete directory ``root`` is a converted graph of these tables. Staged work that a killed run left is removed then.

    Raises:
        ValueError: the description, the tables or the options differ; the text says how. Or a file of ``root`` is missing or was altered.
    """
    made, asked = table_origin(root), asked_origin(graph, options)
    if made is None or asked is None:
        return False
    check_same(root, differences(made, asked), made, progress)
    open_arrays(root, read_converted(root)["files"], verify=False)
    discard_rest(root, graph, asked)
    return True


def discard_rest(root: Path, graph: TableGraph, asked: Mapping[str, Any]) -> None:
    """Removes staged work of these tables, which a run left that was killed after it had written ``root``. ``asked`` is as in :func:`asked_origin`."""
    facts = [each["from"] for each in asked["tables"].values()]
    discard_staged(staged_beside(root), root, task_of(graph, facts, asked["options"].get("encode_as")))


def check_same(root: Path, found: Sequence[str], made: Mapping[str, Any], progress: Progress) -> None:
    """Tells ``progress`` that there is nothing to do for ``root``. Raises ValueError if differences were found."""
    if found:
        raise ValueError(
            f"{root} exists, and this command differs from the one that wrote it: {in_words(found)}. Pass overwrite (--overwrite) to replace it, or choose "
            "another directory"
        )
    facts = [fact for table in made["tables"].values() for fact in table["from"]]
    names = {"size": "size", "etag": "etag", "version": "version", "snapshot": "snapshot", "digest": "rows"}
    compared = [word for name, word in names.items() if any(name in fact for fact in facts)]
    if any("modified" in fact and "etag" not in fact for fact in facts):
        compared.append("time")
    progress.begin(
        f"nothing to do: {root} is complete, and the description, the options and the {' and '.join(compared)} of all tables are the same; --overwrite "
        "replaces it"
    )


def in_words(found: Sequence[str]) -> str:
    """Returns the first differences as text for an error."""
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def check_report(report: str | Path | None, root: Path) -> None:
    """Raises ValueError if a report is asked for that no run has left, but the tables of ``root`` were read by an earlier run."""
    if report is not None and not Path(report).is_file():
        raise ValueError(
            f"{report} is not written, because an earlier run has read the tables of {root}, and only reading them makes one; leave --report out, or "
            "pass --overwrite"
        )


def differences(made: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Returns texts that name the differences between two origins: of the description, of files, and of options."""
    found = _of_descriptions(made["description"], asked["description"])
    if made.get("folder") != asked["folder"]:
        found.append(difference("folder of relative addresses", made.get("folder"), asked["folder"]))
    for title, table in asked["tables"].items():
        if title in made["tables"]:
            found += _of_files(title, made["tables"][title]["from"], table["from"])
    return found + option_differences(made.get("options", {}), asked["options"])


def _of_fields(where: str, made: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    return [
        difference(f"{where}{name}", made.get(name), asked.get(name))
        for name in {**made, **asked}
        if made.get(name) != asked.get(name)
    ]


def option_differences(made: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Returns texts that name the differences between the options of two commands."""
    return _of_fields("", made, asked)


def _of_descriptions(made: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    found = []
    for part in ("nodes", "edges"):
        before, now = ({_named(entry): entry for entry in each[part]} for each in (made, asked))
        for name in {**before, **now}:
            if name not in before or name not in now:
                found.append(f"[{part}.{name}] is {'new' if name in now else 'gone'}")
            else:
                found += _of_fields(f"[{part}.{name}] ", _lines(before[name]), _lines(now[name]))
        if not found and list(before) != list(now):
            found.append(f"the order of {part} was {', '.join(before)}, is {', '.join(now)}")
    return found


def _named(entry: Mapping[str, Any]) -> str:
    return entry["name"] if isinstance(entry["name"], str) else ",".join(entry["name"])


def _lines(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lines of an entry of a description by the names that a TOML file gives them."""
    return {"table" if name == "tables" else name: value for name, value in entry.items() if name != "name"}


def _of_files(title: str, made: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]]) -> list[str]:
    before, now = _by_address(made), _by_address(asked)
    found = []
    for address in {**before, **now}:
        if address not in before or address not in now:
            found.append(f"{title}: {address} is {'new' if address in now else 'gone'}")
        elif words := _of_facts(before[address], now[address]):
            found.append(f"{title}: {address}: {', '.join(words)}")
    return found


def _by_address(facts: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns facts by address. Objects in memory may share one, and get numbers."""
    found: dict[str, Mapping[str, Any]] = {}
    for fact in facts:
        name, number = fact["address"], 1
        while name in found:
            number += 1
            name = f"{fact['address']} {number}"
        found[name] = fact
    return found


def _of_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differ = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if before.get("etag") and before.get("etag") == now.get(
        "etag"
    ):  # it names the contents, whenever they were written
        differ = [name for name in differ if name != "modified"]
    words = []
    for name in sorted(differ, key=lambda name: name == "modified"):
        if name == "digest":
            words.append("its rows, their order or their division into batches differ")
        elif name == "modified":
            only = " (only its time differs; its rows may be the same)" if len(differ) == 1 else ""
            words.append(f"it was last changed at {_moment(before.get(name))}, now at {_moment(now.get(name))}{only}")
        else:
            words.append(difference(name, before.get(name), now.get(name)))
    return words


def _moment(nanoseconds: int | None) -> str:
    if nanoseconds is None:
        return "an unknown time"
    whole, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(whole, timezone.utc):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"
