"""Laws of installation: setup.py names what is missing before it compiles, and the package names it on first use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric

from salientpp import ops, versions

ROOT = Path(__file__).parents[2]
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def run(*words: str | Path, path: Path | None = None, bare: bool = False) -> subprocess.CompletedProcess:
    """Runs a Python that looks for modules in ``path`` first, and has no site-packages if ``bare``."""
    before = [str(path)] if path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*before, str(ROOT)])}
    flags = ["-S"] if bare else []
    return subprocess.run(
        [sys.executable, *flags, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def module(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)


@pytest.mark.parametrize(
    "setuptools, torch_, text",
    [
        ("65.5.0", None, "salientpp needs setuptools >= 77 to build, got 65.5.0 in "),
        (
            "77.0.1",
            None,
            "salientpp is compiled against the torch of .*, but torch cannot be imported there .*: pip install torch, then repeat: ",
        ),
        (
            "80.1",
            "2.9.1+cpu",
            "salientpp needs torch >= 2.10, got 2.9.1\\+cpu in .*: pip install --upgrade torch, then repeat: ",
        ),
    ],
)
def test_setup_names_a_missing_requirement_before_it_compiles(tmp_path, setuptools, torch_, text):
    module(tmp_path, "setuptools", f"__version__ = {setuptools!r}\ndef setup(**_): raise SystemExit('went on')\n")
    if torch_ is not None:
        module(tmp_path, "torch", f"__version__ = {torch_!r}\n")
        module(tmp_path / "torch", "utils", "")
        (tmp_path / "torch" / "utils" / "cpp_extension.py").write_text("BuildExtension = CppExtension = None\n")
    done = run("setup.py", "build_ext", path=tmp_path, bare=True)
    assert done.returncode == 1 and re.match(text, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1, "one line and no traceback"


@pytest.mark.parametrize("flags, symbols", [("", False), ("-O2 -g -fno-omit-frame-pointer -fsanitize=address", True)])
def test_symbols_are_stripped_unless_cflags_ask_for_them(tmp_path, monkeypatch, flags, symbols):
    monkeypatch.setenv("CFLAGS", flags)
    module(tmp_path, "setuptools", "__version__ = '80.1'\ndef setup(ext_modules, **_): print(*ext_modules)\n")
    module(tmp_path, "torch", "__version__ = '2.10.0'\n")
    module(tmp_path / "torch", "utils", "")
    words = "BuildExtension = None\ndef CppExtension(name, extra_compile_args, extra_link_args, **_): return extra_compile_args, extra_link_args\n"
    (tmp_path / "torch" / "utils" / "cpp_extension.py").write_text(words)
    done = run("setup.py", "build_ext", path=tmp_path, bare=True)
    assert done.returncode == 0, done.stderr
    assert ("-g0" in done.stdout) == ("strip-all" in done.stdout) == (not symbols), done.stdout


@pytest.mark.parametrize(
    "code",
    ["from salientpp import NeighborLoader", "import salientpp; salientpp.load", "import salientpp; salientpp.vip"],
)
def test_the_first_use_of_a_name_reports_a_missing_torch(code):
    done = run("-c", code, bare=True)
    assert "ImportError: salientpp needs torch >= 2.10, which is not installed: pip install torch" in done.stderr


@pytest.mark.parametrize("name, version", [("torch", "2.9.1+cu128"), ("torch_geometric", "2.6.1")])
def test_a_library_that_is_too_old_is_named_with_both_versions(tmp_path, name, version):
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA.format(name=name, version=version))
    done = run("-c", "import salientpp; salientpp.NeighborLoader", path=tmp_path)
    least = ".".join(map(str, versions.NEEDED[name]))
    assert f"ImportError: salientpp needs {name} >= {least}, got {version}: pip install --upgrade {name}" in done.stderr
    command = run("-m", "salientpp", "info", tmp_path, path=tmp_path)
    assert command.returncode == 2 and command.stderr.startswith(f"salientpp info: salientpp needs {name} >= {least}")


def test_the_versions_that_the_code_checks_equal_those_of_the_metadata():
    text = (ROOT / "pyproject.toml").read_text()
    for name, least in versions.NEEDED.items():
        assert f'"{name}>={".".join(map(str, least))}"' in text
    assert torch.__version__ and torch_geometric.__version__
    versions.check_versions()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the dynamic linker of Linux")
def test_the_extension_uses_only_c_functions_of_torchs_libraries(tmp_path):
    """C++ names start with _Z. The extension takes those of libstdc++ from libstdc++, not from the copies in torch's libraries."""
    told = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_DEBUG": "bindings",
        "LD_DEBUG_OUTPUT": str(tmp_path / "bindings"),
    }
    subprocess.run([sys.executable, "-c", "from salientpp import ops"], env=told, check=True)
    line = re.compile(r"binding file \S*/_C\.\S* \[0\] to (\S+) \[0\]: normal symbol `(\w+)'")
    bound = [found.groups() for file in tmp_path.iterdir() for found in map(line.search, file.open()) if found]
    torchs = {symbol for file, symbol in bound if Path(file).name.startswith(("libtorch", "libc10"))}
    others = {symbol for file, symbol in bound if Path(file).name.startswith("libstdc++")}
    assert "torch_call_dispatcher" in torchs and any(symbol.startswith("_ZNSt") for symbol in others)
    assert sorted(symbol for symbol in torchs if symbol.startswith("_Z")) == []


def test_the_extension_carries_no_symbols_for_debugging():
    """Symbols would be 95 % of the extension. A build with CFLAGS="-g" has them."""
    assert ops  # it loads the extension
    (file,) = (ROOT / "salientpp").glob("_C*.so")
    if "-g" in os.environ.get("CFLAGS", "").split():
        pytest.skip("CFLAGS asks for symbols")
    assert b".debug_info" not in file.read_bytes()
    assert file.stat().st_size < 3_000_000
