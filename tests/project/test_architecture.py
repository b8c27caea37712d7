"""Laws of the package's structure: allowed imports, the effects of importing it, sizes, names and docstrings.

Imports are read from the source, also those inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

import salientpp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "salientpp"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# docs/design/architecture.md describes the rooms. A part is a module or folder directly inside salientpp/; it may always
# import from itself. `ranks.greeting`, `nn.layers` and `nn.unchanged` allow only that module of their rooms.
BOTTOM = {
    "addresses",
    "ids",
    "arguments",
    "containers",
    "display",
    "files",
    "processes",
    "progress",
    "suggestions",
    "tables",
    "ops",
    "graph",
}
PLANNING = BOTTOM | {"ranks", "vip"}
ROWS = PLANNING | {"store"}
ENGINE = ROWS | {"sampling", "batch", "engine"}
LOADERS = ENGINE | {"ways", "loader"}
MAY_IMPORT = {
    "ids": set(),
    "arguments": {"display"},
    "containers": set(),
    "display": set(),
    "files": set(),
    "addresses": {"files", "suggestions"},
    "processes": set(),
    "progress": set(),
    "suggestions": set(),
    "tables": set(),
    "versions": set(),
    "ops": set(),
    "graph": {"ids", "ops", "processes", "suggestions"},
    "ranks": {"arguments", "ids", "ops", "processes", "versions"},
    "sessions": {"ranks", "versions"},
    "launch": {"files", "ranks.greeting", "suggestions"},
    "vip": BOTTOM | {"ranks.partition_book", "ranks.comm"},
    "partitioning": BOTTOM | {"ranks.partition_book", "vip"},
    "store": PLANNING | {"partitioning", "sessions"},
    "sampling": ROWS,
    "batch": ROWS | {"sampling"},
    "engine": ROWS | {"partitioning", "sampling", "batch"},
    "ways": ENGINE | {"partitioning"},
    "loader": ENGINE | {"ways", "versions"},
    "serving": LOADERS | {"sessions"},
    "nn": {"batch", "containers", "ops", "sampling", "suggestions", "ways.sums.marked"},
    "lightning": LOADERS,
    "analysis": (LOADERS - {"loader"}) | {"partitioning"},
    "metrics": {"arguments", "files", "lightning", "loader.engine_loader", "loader.metrics", "processes", "versions"},
    "report": {"analysis", "display"},
    "predictions": LOADERS,
    "layerwise": LOADERS | {"nn.layers", "nn.unchanged", "predictions"},
    "fullgraph": ROWS | {"partitioning", "batch", "nn", "sampling", "ways.planner"},
    "datasets": ROWS | {"partitioning", "sampling"},
}
MAY_IMPORT_ANYTHING = {"__init__", "__main__", "cli", "testing"}
COMPILED = "_C"  # the compiled extension; only ops.library loads it


def part_of(module: str) -> str:
    return module.split(".")[0]


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """Dotted name without `salientpp.`; a folder's __init__ has the name of the folder."""
    parts = list(path.relative_to(package).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def nodes_of(source: str) -> list[ast.AST]:
    """All nodes, of which the first is the module."""
    return list(ast.walk(ast.parse(source)))


def imports_of(nodes: Iterable[ast.AST], module: str, is_package: bool, modules: set[str]) -> list[tuple[int, str]]:
    """(line, module of salientpp) for every import.

    `from salientpp.sampling import topology` imports sampling.topology.
    """
    found = []
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["salientpp", *module.split(".")]
                parents = here[: len(here) - node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in names:
            if name != "salientpp" and not name.startswith("salientpp."):
                continue
            inner = name.removeprefix("salientpp").removeprefix(".")
            # Takes the longest prefix that is a module; a name of the package itself belongs to its __init__.
            while inner and inner not in modules:
                inner = inner.rpartition(".")[0]
            found.append((node.lineno, inner or "__init__"))
    return found


def wrong_arrows(imports: Iterable[tuple[int, str]], module: str) -> list[str]:
    part = part_of(module)
    if part in MAY_IMPORT_ANYTHING:
        return []
    if part not in MAY_IMPORT:
        return [f"{module}: {part!r} is not in the table of imports; add it here and to docs/design/architecture.md"]
    allowed = MAY_IMPORT[part] | {part} | ({COMPILED} if module == "ops.library" else set())
    return [
        f"salientpp.{module}:{line} imports {target}; {part} may import {', '.join(sorted(MAY_IMPORT[part])) or 'nothing'}"
        for line, target in imports
        if not any(target == a or target.startswith(f"{a}.") for a in allowed)
    ]


MODULES = {module_name(path) for path in SOURCES} | {COMPILED}


@dataclass(frozen=True)
class Facts:
    """Properties of a file of the package. Its tree is not kept.

    Attributes:
        imports: from :func:`imports_of`.
        imported_first: packages that the module imports when it is loaded, with their lines.
        is_described: the file has a docstring, or nothing else either.
        writes_environment, too_large: from the functions of these names.
    """

    imports: list[tuple[int, str]]
    imported_first: list[tuple[str, int]]
    is_described: bool
    writes_environment: list[int]
    too_large: dict[str, int]


@functools.cache
def facts(path: Path) -> Facts:
    source = path.read_text()
    nodes = nodes_of(source)
    first = [
        (name.partition(".")[0], node.lineno)
        for node in nodes[0].body
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
        )
    ]
    return Facts(
        imports_of(nodes, module_name(path), path.name == "__init__.py", MODULES),
        first,
        not source.strip() or bool(ast.get_docstring(nodes[0])),
        writes_environment(nodes),
        too_large(source, nodes[0]),
    )


# --- imports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path):
    wrong = wrong_arrows(facts(path).imports, module_name(path))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module, source",
    [
        ("ops", "from salientpp.graph.csc import Graph"),
        ("pipeline", "import salientpp.ranks.comm"),
        ("launch.sbatch", "from salientpp.store.directory.load import load"),
        ("loader.batch_loader", "from salientpp.launch.environment import detect"),
        ("graph", "from salientpp import pipeline"),
        ("vip.inclusion", "def f():\n    from salientpp.store import tiers"),
        (
            "vip.inclusion",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from salientpp.ranks.groups import Groups",
        ),
        ("vip.inclusion", "from ..store.tiers import Tiers"),
        ("store.tiers", "from salientpp.sampling.topology import Topology"),
        ("store.tiers", "from .. import pipeline"),
        ("loader.batch_loader", "from salientpp import NeighborLoader"),
        ("loader.batch_loader", "from salientpp.lightning import LightningNodeData"),
        ("loader.batch_loader", "from salientpp.layerwise.layers import network_of"),
        ("loader.batch_loader", "import salientpp"),
        ("loader.batch_loader", "from salientpp.datasets import load_dataset"),
        ("analysis", "from salientpp.loader.batch_loader import NeighborLoader"),
        ("analysis", "from salientpp.loader import batch_loader"),
        ("datasets", "import importlib\nimportlib.import_module('salientpp.cli')"),
        ("graph", "from salientpp import _C"),
        ("ops.graph", "from salientpp import _C"),
        ("brand_new", "import os"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    imports = imports_of(nodes_of(source), module, False, MODULES | {"analysis"})
    assert len(wrong_arrows(imports, module)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("ops.library", "from salientpp import _C"),
        (
            "vip.policies",
            "from salientpp.vip.inclusion import inclusion_probability\nfrom . import partition_book\nfrom ..graph.csc import Graph",
        ),
        (
            "loader.batch_loader",
            "from salientpp import ops\nfrom salientpp.engine.pipeline import Stage\nimport salientpp.store.tiers",
        ),
        ("analysis", "from salientpp.sampling import topology\nfrom salientpp.sampling.topology import Topology"),
        ("cli", "import salientpp\nfrom salientpp.loader.batch_loader import NeighborLoader"),
        ("__init__", "from salientpp.loader.batch_loader import NeighborLoader"),
        ("ops", "import torch\nimport salientppish"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert wrong_arrows(imports_of(nodes_of(source), module, False, MODULES), module) == []


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """A cycle of files that import each other, from one file back to itself; [] if none exists."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in sorted(imports.get(path[-1], set()) - done):
            if target in path:
                return [*path[path.index(target) :], target]
            found = search([*path, target])
            if found:
                return found
        done.add(path[-1])
        return []

    return next((found for module in sorted(imports) if (found := search([module]))), [])


def test_no_files_import_each_other():
    imports = {}
    for path in SOURCES:
        module = module_name(path)
        # A folder's __init__ may import its own files: it is loaded before them in any case.
        targets = {target for _, target in facts(path).imports}
        imports[module] = {target for target in targets if not module.startswith(f"{target}.")} - {module}
    assert circle_in(imports) == []


def test_an_import_cycle_is_found():
    assert circle_in({"a": {"b", "c"}, "b": set(), "c": {"d"}, "d": {"c"}}) == ["c", "d", "c"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_package_was_read():
    assert {
        "ops",
        "graph.csc",
        "ranks.comm",
        "engine.pipeline",
        "vip.inclusion",
        "store.tiers",
        "sampling.topology",
        "__init__",
    } <= MODULES


# --- names ------------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_have_docstrings():
    assert salientpp.__all__ == sorted(set(salientpp.__all__))
    for name in salientpp.__all__:
        doc = getattr(salientpp, name).__doc__
        assert doc and doc.strip(), f"salientpp.{name} has no docstring"
        # @dataclass generates a docstring, which does not count.
        assert not doc.startswith(f"{name}("), f"salientpp.{name} has no docstring of its own"


def test_public_names_include_the_promised_ones():
    assert {"NeighborLoader", "inclusion_probability", "load", "partition"} <= set(salientpp.__all__)


def test_init_only_lists_names_and_their_modules():
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_table = isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] in (
            ["__all__"],
            ["_MODULES"],
        )
        is_typing = isinstance(node, ast.If) and getattr(node.test, "id", "") == "_TYPE_CHECKING"
        is_lookup = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        is_known = is_docstring or is_table or is_typing or is_lookup or isinstance(node, ast.ImportFrom)
        assert is_known, f"__init__.py:{node.lineno} has a statement that is neither a table, an import nor a look-up"


def test_type_checkers_see_the_names_that_are_imported():
    (typing,) = (node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    read = {
        alias.name: node.module.removeprefix("salientpp.")
        for node in typing.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert read == salientpp._MODULES and sorted(read) == salientpp.__all__


@pytest.fixture(scope="module")
def fresh() -> dict:
    """Observations in a fresh interpreter. One serves all tests of imports."""
    program = """
import json, os, sys
first = set(sys.modules), dict(os.environ)
import salientpp
assert not {"torch", "torch_geometric", "numpy"} & sys.modules.keys()
assert "NeighborLoader" in dir(salientpp) and salientpp.__version__
for wrong in ("no_such_name", "__wrapped__"):
    try:
        getattr(salientpp, wrong)
    except AttributeError as error:
        assert str(error) == "module 'salientpp' has no attribute " + repr(wrong), error
    else:
        raise SystemExit(wrong)
light = set(sys.modules) - first[0]
assert dict(os.environ) == first[1]

# torch and PyG are imported now, so that their modules and settings do not count.
import inspect
import torch, torch_geometric.data, torch_geometric.loader, torch_geometric.sampler, torch_geometric.typing
inspect.modulesbyfile.clear()  # of what torch and PyG have searched
modules, environment, threads = set(sys.modules), dict(os.environ), torch.get_num_threads()
before = torch.random.get_rng_state()
from salientpp import *
print(json.dumps({
    "modules": sorted(light | set(sys.modules) - modules),
    "searched": len(inspect.modulesbyfile),
    "environment": dict(os.environ) == environment,
    "threads": torch.get_num_threads() == threads,
    "random": torch.equal(before, torch.random.get_rng_state()),
    "distributed": torch.distributed.is_initialized(),
    "same": NeighborLoader is salientpp.NeighborLoader is salientpp.loader.node_loader.NeighborLoader
    and partition is salientpp.partition is salientpp.store.directory.writer.partition,
}))

import importlib, signal, rich.console
for name in [name for name in sys.modules if name == "salientpp" or name.startswith("salientpp.")]:
    if name not in ("salientpp.ops.library", "salientpp._C"):  # operators are registered once
        del sys.modules[name]
del signal.SIGUSR1
sys.modules["fcntl"] = None
for name in sys.argv[1:]:
    importlib.import_module("salientpp." + name)
"""
    names = sorted(MODULES - {"__init__", "__main__", COMPILED})
    done = subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True)
    return {"code": done.returncode, "said": done.stderr, **json.loads(done.stdout or "{}")}


def test_names_are_imported_on_first_use(fresh):
    assert fresh.get("same"), fresh["said"]


def test_every_module_imports_without_unix_only_modules(fresh):
    assert fresh["code"] == 0, fresh["said"]


def test_every_module_opens_with_a_docstring():
    for path in SOURCES:
        assert facts(path).is_described, f"{path.relative_to(ROOT)} has no docstring"


def test_no_file_is_named_utils_or_common():
    forbidden = {"utils", "util", "common", "base", "helpers", "misc"}
    names = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts]
    assert [
        str(name)
        for name in names
        if name.stem in forbidden or "internal" in name.parts or name.stem.startswith("dist_")
    ] == []


# --- importing has no side effects ------------------------------------------------------------------------

HEAVY = {
    "ogb",
    "pymetis",
    "matplotlib",
    "torch_sparse",
    "pandas",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "opentelemetry",
}


def test_importing_salientpp_changes_no_environment_and_loads_no_heavy_package(fresh):
    seen = fresh
    assert seen.keys() >= {"modules", "searched"}, seen["said"]
    assert not (HEAVY | {"rich", "scipy", "IPython"}) & {name.partition(".")[0] for name in seen["modules"]}
    assert "salientpp.loader.node_loader" in seen["modules"]
    rare = ("salientpp.analysis", "salientpp.cli", "salientpp.datasets", "salientpp.lightning")
    assert [name for name in seen["modules"] if name.startswith(rare)] == []
    assert seen["searched"] < 20, (
        "inspect resolved the file of every loaded module, which takes longer than the rest of the import"
    )
    assert seen["environment"] and seen["threads"] and seen["random"] and not seen["distributed"]


def writes_environment(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines that set, delete or update entries of os.environ."""
    is_environ = lambda node: "environ" in (getattr(node, "attr", None), getattr(node, "id", None))  # noqa: E731
    lines = []
    for node in nodes:
        if isinstance(node, ast.Subscript) and is_environ(node.value) and not isinstance(node.ctx, ast.Load):
            lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on_environ = is_environ(node.func.value) and node.func.attr in (
                "update",
                "setdefault",
                "pop",
                "clear",
                "popitem",
            )
            if on_environ or node.func.attr in ("putenv", "unsetenv"):
                lines.append(node.lineno)
    return lines


def test_no_module_writes_the_environment():
    sources = [path for path in SOURCES if module_name(path) != "testing.ranks"]  # sets that of the processes it starts
    assert {str(p.relative_to(ROOT)): lines for p in sources if (lines := facts(p).writes_environment)} == {}
    for source in (
        "os.environ['A'] = '1'",
        "environ.setdefault('A', '1')",
        "del os.environ['A']",
        "os.putenv('A', '1')",
    ):
        assert writes_environment(nodes_of(source)) == [1]
    assert writes_environment(nodes_of("os.environ.get('A', os.environ['B'])")) == []


def test_heavy_packages_are_imported_where_they_are_used():
    for path in SOURCES:
        if part_of(module_name(path)) in MAY_IMPORT_ANYTHING - {"__init__"}:
            continue
        for name, line in facts(path).imported_first:
            assert name not in HEAVY, f"{path.relative_to(ROOT)}:{line}"


# --- sizes ------------------------------------------------------------------------------------------------

MOST_LINES = {ast.Module: 500, ast.ClassDef: 300, ast.FunctionDef: 80, ast.AsyncFunctionDef: 80}


def too_large(source: str, tree: ast.Module) -> dict[str, int]:
    """Number of lines of each file, class and function over its limit; '' is the file itself, others have dotted names."""
    found = {"": lines} if (lines := source.count("\n")) > MOST_LINES[ast.Module] else {}

    def visit(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.expr):
                continue  # holds no class and no function
            name = prefix
            if isinstance(inner, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}.{inner.name}" if prefix else inner.name
                if (lines := inner.end_lineno - inner.lineno + 1) > MOST_LINES[type(inner)]:
                    found[name] = lines
            visit(inner, name)

    visit(tree, "")
    return found


def test_no_file_class_or_function_is_too_large():
    found = {
        f"{path.relative_to(PACKAGE)} {name}".strip(): lines
        for path in SOURCES
        for name, lines in facts(path).too_large.items()
    }
    assert found == {}


def test_a_large_file_class_or_function_is_found():
    def found(source: str) -> dict[str, int]:
        return too_large(source, ast.parse(source))

    body = "    pass\n" * 80
    assert found(f"def small():\n{body[:-9]}") == {}
    assert found(f"class Some:\n  def large(self):\n{body}") == {"Some.large": 81}
    assert found(f"if x:\n while y:\n  def large(self):\n{body}") == {"large": 81}
    assert found(f"class Large:\n{body * 4}") == {"Large": 321}
    assert found(f"\n{body * 7}".replace("    ", "")) == {"": 561}


# --- tests ------------------------------------------------------------------------------------------------


LAWS = (ROOT / "docs" / "design" / "laws.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "design" / "architecture.md").read_text()


def test_files_that_the_design_names_exist():
    for name in re.findall(r"`((?:tests|salientpp)/[\w/]+\.py)`", LAWS + ARCHITECTURE):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"`([\w]+/[\w/]+\.py)`", ARCHITECTURE.replace("`tests/", "`../tests/")):
        assert (PACKAGE / name).is_file(), name


def test_the_design_describes_every_room():
    rooms = re.findall(r"^\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/__init__.py")}
    assert folders | {"ops", "cli"} == set(rooms), (
        "the rooms of docs/design/architecture.md are not those of the package"
    )


def test_laws_that_tests_cite_exist():
    known = {int(number) for number in re.findall(r"^## Law (\d+):", LAWS, re.MULTILINE)}
    assert known == set(range(1, len(known) + 1))
    for path in (ROOT / "tests").rglob("*.py"):
        cited = re.findall(r"\blaws? (\d+)(?:(?: and | to |, )(\d+))*", path.read_text(), re.IGNORECASE)
        assert {int(number) for numbers in cited for number in numbers if number} <= known, path


def test_no_test_module_imports_another():
    """Shared code of tests belongs in tests/support/."""
    assert facts_of_tests()["imports of tests"] == []


def imports_of_tests(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines that import a test module."""
    found = []
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(part.startswith("test_") for name in names for part in name.split(".")):
            found.append(node.lineno)
    return found


@functools.cache
def facts_of_tests() -> dict[str, list[str]]:
    """Places in tests that a test forbids. Each file is parsed once."""
    found: dict[str, list[str]] = {"imports of tests": [], "private state": []}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes, name = nodes_of(path.read_text()), path.relative_to(ROOT)
        found["imports of tests"] += [f"{name}:{line}" for line in imports_of_tests(nodes)]
        found["private state"] += [f"{name}: {text}" for text in sorted(private_state(nodes))]
    return found


def private_state(nodes: Iterable[ast.AST]) -> set[str]:
    """Private attributes in the source that are reached through a loader, its engine or an iterator."""
    written = {
        ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
    }
    return {text for text in written if re.search(r"\b(loaders?|iterator)\b.*\._[a-z]|\.engine\..*\._[a-z]", text)}


def test_tests_use_no_private_state_of_loaders():
    assert facts_of_tests()["private state"] == []


def test_private_state_is_found():
    assert private_state(nodes_of("loader._fetch.own = 1; loaders[0]._run; other.engine.basis._comm")) == {
        "loader._fetch",
        "loaders[0]._run",
        "other.engine.basis._comm",
    }
    assert private_state(nodes_of("loader.engine.basis; store._key; loader.__class__")) == set()


# --- operators --------------------------------------------------------------------------------------------


ROOMS = re.findall(r"^  // (\w+)\n((?:  m\.def.*\n)+)", (ROOT / "csrc" / "library.cpp").read_text(), re.MULTILINE)
SCHEMAS = [(room, *schema) for room, lines in ROOMS for schema in re.findall(r'm\.def\("(\w+)\((.*?)\) ->', lines)]


def operators_called(function: ast.FunctionDef) -> set[str]:
    """Names used as ``operators.<name>``."""
    return {
        n.attr
        for n in ast.walk(function)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "operators"
    }


def test_each_operator_has_one_schema_and_one_function_of_its_name():
    names = [name for _, name, _ in SCHEMAS]
    assert len(set(names)) == len(names) == (ROOT / "csrc" / "library.cpp").read_text().count("m.def(") > 0
    for room, _ in ROOMS:
        tree = ast.parse((PACKAGE / "ops" / f"{room}.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and operators_called(node)]
        expected = [(name, arguments) for where, name, arguments in SCHEMAS if where == room]
        assert [function.name for function in functions] == [name for name, _ in expected], f"wrong order in {room}"
        for function, (name, arguments) in zip(functions, expected):
            assert operators_called(function) == {name}
            assert ast.get_docstring(function), f"ops.{name} has no docstring"
            given = function.args.args + function.args.kwonlyargs
            assert all(argument.annotation for argument in given) and function.returns, f"ops.{name} has no types"
            names = [re.split(r"[ =]", argument.strip())[1] for argument in arguments.split(",")]
            assert [argument.arg for argument in given] == names, name
            assert hasattr(salientpp.ops, name), f"salientpp.ops does not import {name}"


def test_operators_are_called_only_through_ops():
    naming = [path for path in SOURCES if "torch.ops" in path.read_text()]
    assert naming == [PACKAGE / "ops" / "library.py"], "files other than ops/library.py use torch.ops"


def test_every_kernel_is_registered_in_the_folder_of_its_heading():
    kernels = [
        (path.parent.name, name)
        for path in (ROOT / "csrc").rglob("*.cpp")
        for name in re.findall(r'm\.impl\("(\w+)"', path.read_text())
    ]
    assert sorted(kernels) == sorted((room, name) for room, name, _ in SCHEMAS)


def test_every_module_can_be_imported():
    for name in sorted(MODULES - {"__init__", "__main__", COMPILED}):
        importlib.import_module(f"salientpp.{name}")
