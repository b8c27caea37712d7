"""Laws of names that torch and PyG keep private: each one that the project uses is in a table, and exists.

Such a name may change with any version. If one is missing, the test names the files that use it. The names are read from the source:
dotted names whose root is imported, texts, and attributes of objects. An attribute is private to another library if it starts with one underscore and
no file of the project defines it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ClusterData, NeighborLoader

ROOT = Path(__file__).parents[2]
FOLDERS = ("salientpp", "tests", "benchmarks", "examples", "docs")
LIBRARIES = ("torch", "torch_geometric")

CONV = torch_geometric.nn.GCNConv(1, 1)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def _identity() -> torch.Tensor:
    return _Identity.apply(torch.ones(1, requires_grad=True))


def _loader() -> NeighborLoader:
    loader = NeighborLoader(Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=1), [1], num_workers=1)
    with loader.enable_cpu_affinity([0]):
        return loader


#: Private attributes of objects of torch, PyG and Python, with an object that has them.
ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "_Options": lambda: torch.distributed.ProcessGroupGloo,
    "_at_fork_reinit": threading.RLock,
    "_backward_hooks": lambda: torch.empty(0),
    "_cdata": lambda: torch.empty(0),
    "_check_input_dim": lambda: torch.nn.BatchNorm1d(1),
    "_compiled_call_impl": lambda: CONV,
    "_copy_from": lambda: torch.ops.aten,
    "_edge_user_args": lambda: torch_geometric.nn.EdgeConv(torch.nn.Identity()),
    "_forward_cls": lambda: type(_identity().grad_fn),
    "_forward_hooks": lambda: CONV,
    "_forward_pre_hooks": lambda: CONV,
    "_get_backend": lambda: torch.distributed.ProcessGroup,
    "_index_put_impl_": lambda: torch.ops.aten,
    "_indices": lambda: torch.empty(0),
    "_key": lambda: HeteroData(a={"x": torch.empty(0)})["a"],
    "_local_scalar_dense": lambda: torch.ops.aten,
    "_mapping": lambda: Data()._store,
    "_metis": lambda: ClusterData,
    "_modules": lambda: CONV,
    "_old_worker_init_fn": _loader,
    "_orig_mod": lambda: torch.compile(torch.nn.Identity()),
    "_parameters": lambda: CONV,
    "_parent": lambda: Data()._store,
    "_propagate_forward_pre_hooks": lambda: CONV,
    "_schema": lambda: torch.ops.aten.clone.default,
    "_set_default_timeout": lambda: torch.distributed.ProcessGroupGloo,
    "_to_canonical": lambda: HeteroData(),
    "_to_copy": lambda: torch.ops.aten,
    "_untyped_storage": lambda: torch.storage.TypedStorage(dtype=torch.float32),
    "_user_args": lambda: CONV,
    "_values": lambda: torch.empty(0),
    "_version": lambda: torch.empty(0),
}

#: Private attributes of other libraries' objects.
OTHERS = {
    "argparse": "_HelpAction _SubParsersAction _action_groups _actions _group_actions",
    "concurrent.futures": "_processes",
    "named tuples": "_asdict _replace _fields",
    "numpy": "_mmap",
    "os": "_exit",
    "shutil": "_ntuple_diskusage",
    "sys": "_current_frames _getframe",
    "torch_sparse": "_col _row",
}

#: The names. An attribute starts with a dot.
USED = {
    "._Options",
    "._at_fork_reinit",
    "._backward_hooks",
    "._cdata",
    "._check_input_dim",
    "._compiled_call_impl",
    "._copy_from",
    "._edge_user_args",
    "._forward_cls",
    "._forward_hooks",
    "._forward_pre_hooks",
    "._get_backend",
    "._index_put_impl_",
    "._indices",
    "._key",
    "._local_scalar_dense",
    "._mapping",
    "._metis",
    "._modules",
    "._old_worker_init_fn",
    "._orig_mod",
    "._parameters",
    "._parent",
    "._propagate_forward_pre_hooks",
    "._schema",
    "._set_default_timeout",
    "._to_canonical",
    "._to_copy",
    "._untyped_storage",
    "._user_args",
    "._values",
    "._version",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._are_functorch_transforms_active",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._get_dispatch_stack_at",
    "torch._C._get_function_stack_at",
    "torch._C._is_torch_function_enabled",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._pop_torch_function_stack",
    "torch._C._push_on_torch_dispatch_stack",
    "torch._C._push_on_torch_function_stack",
    "torch._C._set_grad_enabled",
    "torch._dynamo.config.nontraceable_tensor_subclasses.add",
    "torch._dynamo.config.patch",
    "torch._dynamo.eval_frame",
    "torch._dynamo.mark_static_address",
    "torch._dynamo.maybe_mark_dynamic",
    "torch._utils",
    "torch.autograd._profiler_enabled",
    "torch.autograd.forward_ad._current_level",
    "torch.cuda._sanitizer.ArgumentHandler._handle_argument",
    "torch.cuda._sleep",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode",
    "torch.overrides._push_mode",
    "torch.jit._builtins._register_builtin",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.module._has_any_global_hook",
    "torch.utils._device.DeviceContext",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._pop_mode",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch_geometric.data.Dataset._infer_num_classes",
    "torch_geometric.data.lightning.datamodule._pl_is_available",
}


# --- names in the source ----------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return bool(re.match(r"_(?!_)\w", name))


Nodes = list[ast.AST]


def nodes_of(source: str) -> Nodes:
    return list(ast.walk(ast.parse(source)))


def sources() -> dict[str, Nodes]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): nodes_of(path.read_text()) for path in paths if path != Path(__file__)}


def defined(nodes: Nodes, functions: bool = False) -> Iterator[str]:
    """Names that a file gives to attributes, methods, fields and variables of modules; with ``functions``, also to functions and classes."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for statement in node.body:
                if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    yield from (
                        inner.id
                        for inner in ast.walk(statement)
                        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                    )
                if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and (
                    functions or isinstance(node, ast.ClassDef)
                ):
                    yield statement.name


def imported(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """Local names of imported modules and objects, with their full names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
                yield "", alias.name  # the import itself is a use
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
                yield "", f"{node.module}.{alias.name}"


def without_parents(names: Iterable[str]) -> set[str]:
    """Leaves out modules of which the names themselves are given."""
    given = set(names)
    return {name for name in given if not any(other.startswith(f"{name}.") for other in given)}


def dotted(node: ast.Attribute) -> tuple[str, str]:
    """Root and rest of a dotted name, such as 'torch' and 'nn.Linear'; '' and '' if the root is no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, ".".join(reversed(parts))) if isinstance(node, ast.Name) else ("", "")


def used(nodes: Nodes, own: set[str], functions: Set[str] = frozenset()) -> Iterator[str]:
    """Private names that a file uses: full names of torch and PyG, and attributes of objects as ``.name``."""
    found = list(imported(nodes))
    roots = dict(found)
    names = [name for local, name in found if not local]
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, rest = dotted(node)
            if root and root in roots:
                names.append(f"{roots[root]}.{rest}")
            elif is_private(node.attr) and node.attr not in own:
                names.append(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^(?:torch|torch_geometric)(?:\.\w+)*$", node.value)
        elif isinstance(node, ast.Call) and str(getattr(node.func, "attr", getattr(node.func, "id", ""))).endswith(
            ("getattr", "setattr")
        ):
            given = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names += [f".{name}" for name in given if is_private(name) and name not in own | functions]
    for name in names:
        parts = name.split(".")
        private = [number for number, part in enumerate(parts) if is_private(part)]
        if private and parts[-1] in ATTRIBUTES:
            yield f".{parts[-1]}"
        elif private and parts[0] in ("", *LIBRARIES):
            yield name


def found() -> dict[str, list[str]]:
    """Returns the names that the source uses, with the files that use them."""
    files: dict[str, list[str]] = {}
    read = sources()
    own = {name for nodes in read.values() for name in defined(nodes)}
    functions = {name for nodes in read.values() for name in defined(nodes, functions=True)}
    for path, nodes in read.items():
        for name in without_parents(used(nodes, own, functions)):
            files.setdefault(name, []).append(path)
    others = {f".{name}" for names in OTHERS.values() for name in names.split()}
    return {name: files[name] for name in sorted(files) if name not in others}


# --- the laws ---------------------------------------------------------------------------------------------


def gone(name: str) -> str:
    return f"{name} is gone; it is used by {', '.join(found().get(name, ['no file']))}"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", sorted(USED))
def test_every_private_name_exists(name):
    if name[0] == ".":
        assert hasattr(ATTRIBUTES[name[1:]](), name[1:]), gone(name)
        return
    first, *parts = name.split(".")
    value = importlib.import_module(first)
    for part in parts:
        first = f"{first}.{part}"
        if not hasattr(value, part):
            assert importlib.util.find_spec(first) is not None, gone(name)
            importlib.import_module(first)
        value = getattr(value, part)


@pytest.mark.skipif(not (ROOT / "salientpp").is_dir(), reason="the sources are elsewhere")
def test_the_table_has_every_private_name_of_the_source():
    assert set(found()) == USED


@pytest.mark.parametrize(
    "source, names",
    [
        ("import torch\ntorch._C._f()", {"torch._C._f"}),
        ("import torch.a._b", {"torch.a._b"}),
        ("from torch.a import _b as c\nc.d", {"torch.a._b.d"}),
        ("import torch.distributed as dist\ndist.c._d", {"torch.distributed.c._d"}),
        ("def f(x): return x._gone", {"._gone"}),
        ("def f(x): return x._ours, x.__dict__, x.public", set()),
        ("def f(x): return x._version", {"._version"}),
        ("getattr(x, '_gone', None)", {"._gone"}),
        ("names = ['torch._dynamo']", {"torch._dynamo"}),
    ],
)
def test_every_form_of_a_use_is_found(source, names):
    assert without_parents(used(nodes_of(source), {"_ours"})) == names
