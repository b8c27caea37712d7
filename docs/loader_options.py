"""Extension of griffe that gives the loaders on the site the signature and docstring that they have at run time.

``with_options`` of salientpp/loader/signature.py completes both when the package is imported. The site is built without torch, so this file reads
the declarations of the options from their sources. A test compares the result with the imported loaders.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import griffe

LOADER = Path(__file__).parent.parent / "salientpp" / "loader"
POLICIES = runpy.run_path(str(LOADER.parent / "vip" / "names.py"))
FILES = ("options.py", "vertex_options.py")


def declared() -> dict[str, tuple[str, dict[str, tuple[str, str, str]]]]:
    """Returns the groups in order: class -> (title, name of option -> (type, default, help))."""
    trees = [ast.parse((LOADER / name).read_text()) for name in FILES]
    classes = {each.name: each for tree in trees for each in tree.body if isinstance(each, ast.ClassDef)}
    order = next(
        each.value for each in trees[0].body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "GROUPS"
    )
    return {name: _group(classes[name]) for name in ast.unparse(order).strip("[]").split(", ")}


def _group(found: ast.ClassDef) -> tuple[str, dict[str, tuple[str, str, str]]]:
    options = {}
    for entry in found.body:
        if isinstance(entry, ast.AnnAssign):
            type_, option = entry.annotation.slice.elts
            given = {each.arg: each.value for each in option.keywords}
            # A help text may be an f-string over the names of the policies.
            help_ = eval(compile(ast.Expression(given["help"]), "help", "eval"), POLICIES.copy())
            options[entry.target.id] = (ast.unparse(type_), ast.unparse(given["default"]), help_)
    return ast.get_docstring(found).splitlines()[0].rstrip("."), options


class LoaderOptions(griffe.Extension):
    """Completes each class that is decorated with ``with_options``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not isinstance(obj, griffe.Class) or obj.docstring is None:
            return
        called = next((str(each.value) for each in obj.decorators if str(each.value).startswith("with_options(")), None)
        if called is None:
            return
        groups = {
            name: of for name, of in declared().items() if "OF_VERTICES" not in called or name not in of_vertices()
        }
        (_, first), *others = groups.values()
        options = {name: of for _, group in groups.values() for name, of in group.items()}
        rest = "".join(f"* {title}: {_names(group)}\n" for title, group in others)
        described = "".join(f"    {name}: {_plain(help_)}.\n" for name, (_, _, help_) in options.items())
        text = obj.docstring.value.replace("<start>", _names(first))
        obj.docstring.value = re.sub(r"^ *<groups>\n", lambda _: rest, text, flags=re.MULTILINE).replace(
            "    <options>\n", described
        )
        taken = obj.members["__init__"].parameters
        last = taken[-1]
        del taken[last.name]
        for name, (type_, default, _) in options.items():
            kind = griffe.ParameterKind.keyword_only
            taken.add(griffe.Parameter(name, annotation=type_, kind=kind, default=default))
        taken.add(griffe.Parameter("kwargs", annotation="Any", kind=griffe.ParameterKind.var_keyword))


def of_vertices() -> set[str]:
    """Returns the names of the groups that only loaders of vertices have."""
    tree = ast.parse((LOADER / "vertex_options.py").read_text())
    found = next(each.value for each in tree.body if "OF_VERTICES" in ast.unparse(each).split("=")[0])
    return {each.id for each in ast.walk(found) if isinstance(each, ast.Name)}


def _names(group: dict[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in group)


def _plain(text: str) -> str:
    """Returns the first sentence of a help text without links, which lead from another page."""
    first = re.sub(r"(, see | \(see )\[[^\]]*\]\([^)]*\)\)?", "", text.split(". ")[0])
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
