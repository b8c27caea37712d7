"""Laws of releases: what `make check-wheel` refuses, the notes of a release, the recipe for conda-forge, and the workflows' commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def script(name: str) -> ModuleType:
    """Loads a script of packaging/. That folder is no package, because one of PyPI has its name."""
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "packaging" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = script("check")
notes = script("release_notes")

# --- what is released ---------------------------------------------------------------------------------------

CONTENTS = ("salientpp/_C.abi3.so", "salientpp/py.typed", "salientpp/_C.pyi")
NAMES = frozenset({"PyModule_Create2", "aoti_torch_empty_strided"})


def write_release(
    folder: Path,
    version: str = "1.2.0",
    tags: tuple[str, ...] = ("manylinux_2_34_x86_64", "manylinux_2_34_aarch64"),
    contents: tuple[str, ...] = CONTENTS,
    sources: str = "salientpp-1.2.0.tar.gz",
    noise: int = 0,
) -> Path:
    """Writes wheels and a source release whose files hold only the architecture."""
    (folder / sources).touch()
    for tag in tags:
        with zipfile.ZipFile(folder / f"salientpp-{version}-cp310-abi3-{tag}.whl", "w") as wheel:
            for name in contents:
                wheel.writestr(name, re.search(r"x86_64|aarch64|ppc64le", tag)[0] + " " * noise)
    return folder


@pytest.fixture(autouse=True)
def extensions(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Returns the properties of each architecture's extension, as a dict that tests change."""
    table = {
        "x86_64": dict(libraries=check.NEEDED | {"ld-linux-x86-64.so.2"}, names=NAMES, alignment=1 << 12),
        "aarch64": dict(libraries=check.NEEDED, names=NAMES, alignment=1 << 16),
    }

    def read(content: bytes) -> Any:
        machine = content.decode().strip()
        return check.Extension(machine=machine, **table[machine])

    monkeypatch.setattr(check, "read_extension", read)
    return table


def test_a_complete_release_passes(tmp_path):
    found = [path.name for path in check.check_folder(write_release(tmp_path))]
    assert found[0] == "salientpp-1.2.0.tar.gz" and len(found) == 3


def test_a_wheel_with_two_tags_passes(tmp_path):
    write_release(tmp_path, tags=("manylinux_2_27_x86_64.manylinux_2_28_x86_64",))
    assert len(check.check_folder(tmp_path, "1.2.0")) == 2


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(tags=("linux_x86_64",)), "expected salientpp-VERSION-cp310-abi3-manylinux_2_N_ARCHITECTURE.whl; build it with `make wheel`"),
        (dict(tags=("manylinux_2_39_x86_64",)), "expected glibc 2.34 or older, got 2.39; build it on an older system"),
        (dict(noise=2_500_000), "expected at most 2,500,000 bytes, got "),
        (dict(noise=1_000_000, contents=CONTENTS[:2]), "expected at most 1,000,000 compressed bytes of salientpp/_C.abi3.so, got "),
        (dict(contents=CONTENTS[:2]), "expected salientpp/_C.pyi, which is missing; see package-data in pyproject.toml"),
        (dict(contents=(*CONTENTS, "salientpp.libs/libgomp.so.1")), "expected one binary, salientpp/_C.abi3.so, got "),
        (dict(sources="salientpp-1.1.0.tar.gz"), "salientpp-1.1.0.tar.gz: expected salientpp-1.2.0.tar.gz; `make sdist` builds it"),
        (dict(tags=()), "expected one source release and one wheel or more, got 1 and 0; `make wheel` builds both"),
        (dict(tags=("manylinux_2_34_x86_64", "manylinux_2_28_x86_64")), "expected one wheel for x86_64, got a second; remove one"),
    ],
)  # fmt: skip
def test_an_incomplete_release_is_refused(tmp_path, options, text):
    with pytest.raises(check.Fault, match=re.escape(text)):
        check.check_folder(write_release(tmp_path, **options))


def test_a_release_of_another_version_than_its_tag_is_refused(tmp_path):
    with pytest.raises(
        check.Fault, match=r"expected version 1\.3\.0; remove files of other versions, or correct pyproject\.toml"
    ):
        check.check_folder(write_release(tmp_path), "1.3.0")


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(alignment=1 << 12), "expected segments aligned to 65536 bytes, got 4096; link with -z max-page-size"),
        (dict(libraries=check.NEEDED - {"libtorch_cpu.so"}), "expected the libraries .*; see `libraries` in setup.py"),
        (dict(libraries=check.NEEDED | {"libpython3.11.so"}), "got .*'libpython3.11.so'"),
        (dict(names=NAMES | {"aoti_torch_new"}), r"same functions, got differences in \['aoti_torch_new'\]; build all from one source"),
    ],
)  # fmt: skip
def test_an_extension_that_would_not_load_is_refused(tmp_path, extensions, change, text):
    extensions["aarch64"].update(change)
    with pytest.raises(check.Fault, match=text):
        check.check_folder(write_release(tmp_path))


def test_a_binary_of_another_architecture_is_refused(tmp_path, extensions, monkeypatch):
    monkeypatch.setattr(check, "read_extension", lambda content: check.Extension("x86_64", **extensions["x86_64"]))
    with pytest.raises(
        check.Fault, match="expected a binary for aarch64, got one for x86_64; remove build/ and build again"
    ):
        check.check_folder(write_release(tmp_path))


# --- notes --------------------------------------------------------------------------------------------------

CHANGELOG = """# Changelog

## [Unreleased]

* Not yet.

## [1.2.0] - 2026-01-31

* A [page](docs/page.md#part), [PyPI](https://pypi.org) and [below](#here).

### Fixed

* A fault.

## 1.1.0

* The first.

## 1.0.0
"""


def test_notes_are_the_section_of_the_version_with_links_to_its_tag():
    found = notes.release_notes(CHANGELOG, "1.2.0", "https://host/us/it")
    page = "[page](https://host/us/it/blob/v1.2.0/docs/page.md#part)"
    assert found == f"* A {page}, [PyPI](https://pypi.org) and [below](#here).\n\n### Fixed\n\n* A fault.\n"
    assert notes.release_notes(CHANGELOG, "1.1.0", "") == "* The first.\n"


@pytest.mark.parametrize(
    "version, text",
    [
        ("1.3.0", r"expected a version of CHANGELOG.md \(1.2.0, 1.1.0, 1.0.0\), got '1.3.0'; for a new version, put the heading"),
        ("1.2", r"got '1.2'"),
        ("1.0.0", "says nothing on version 1.0.0; write what changed below its heading"),
    ],
)  # fmt: skip
def test_notes_of_an_unknown_or_empty_version_are_refused(version, text):
    with pytest.raises(ValueError, match=text):
        notes.release_notes(CHANGELOG, version, "")


@pytest.mark.parametrize("version, code", [("0.1.0", 0), ("77.0", 1), ("", 1)])
def test_the_command_prints_the_notes_or_fails_in_one_line(version, code):
    done = subprocess.run(
        [sys.executable, ROOT / "packaging" / "release_notes.py", version], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert done.stdout if code == 0 else done.stderr.count("\n") == 1


# --- conda-forge --------------------------------------------------------------------------------------------

#: Names of PyPI -> names of conda-forge, where they differ.
CONDA = {"torch": "pytorch", "torch_geometric": "pytorch_geometric"}


def requirements(name: str) -> set[str]:
    """The requirements in a list of pyproject.toml, under conda-forge's names: `pytorch >=2.10`."""
    text = re.search(rf"^{name} = \[(.*?)\]$", PYPROJECT, re.MULTILINE | re.DOTALL)[1]
    pairs = re.findall(r'"([\w-]+)((?:>=[\d.]+)?)"', text)
    assert len(pairs) == text.count('"') // 2, f"a requirement with an unknown form: {text}"
    return {f"{CONDA.get(package, package)} {least}".strip() for package, least in pairs}


def test_the_recipe_has_the_requirements_and_the_version_of_the_package():
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    assert set(recipe["requirements"]["run"]) == requirements("dependencies") | {"python"}
    assert set(recipe["requirements"]["host"]) == requirements("requires") | {"python", "pip"}
    assert recipe["context"]["version"] == re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)[1]
    assert recipe["about"]["summary"] == re.search(r'^description = "(.*)"$', PYPROJECT, re.MULTILINE)[1]
    assert recipe["about"]["homepage"] == re.search(r'^Repository = "(.*)"$', PYPROJECT, re.MULTILINE)[1]


# --- workflows ----------------------------------------------------------------------------------------------


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["jobs"]


def commands(path: Path) -> list[str]:
    """The commands of a workflow's jobs, one for each target of a matrix."""
    found = []
    for job in jobs(path).values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        found += [
            step["run"].replace("${{ matrix.target }}", target)
            for step in job.get("steps", [])
            if "run" in step
            for target in targets
        ]
    return found


def targets_of(command: str) -> list[str]:
    return re.findall(r"\bmake ([\w-]+)", command)


def test_workflows_run_only_targets_of_the_makefile():
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rest = []
    for path in WORKFLOWS:
        for command in commands(path):
            assert set(targets_of(command)) <= known, (path.name, command)
            if not re.fullmatch(
                r"(sudo --preserve-env env \"PATH=\$PATH\" )?make [\w-]+( > notes\.md)?|\.ci/install [\w ]+", command
            ):
                rest.append(command.split()[0])
    assert rest == ["echo", "gh"], "the version of a tag, and the release on GitHub"


def test_workflows_run_every_target_of_continuous_integration():
    ours = set(targets_of((ROOT / ".ci" / "run").read_text()))
    theirs = {target for path in WORKFLOWS for command in commands(path) for target in targets_of(command)}
    assert len(ours) >= 8 and ours <= theirs, ours - theirs


def test_only_the_jobs_that_publish_may_write():
    may_write = {}
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
        for name, job in jobs(path).items():
            for right, level in job.get("permissions", {}).items():
                if level == "write":
                    may_write[name] = right
    assert may_write == {"pypi": "id-token", "github": "contents", "deploy": "contents", "docs": "contents"}
    assert (
        jobs(ROOT / ".github" / "workflows" / "release.yml")["pypi"]["if"]
        == "github.repository == 'salientpp/salientpp'"
    )


def test_groups_of_system_packages_exist():
    known = set(re.findall(r"^    (\w+)\) commands=", (ROOT / ".ci" / "install").read_text(), re.MULTILINE))
    texts = [command for path in WORKFLOWS for command in commands(path)] + (
        ROOT / ".ci" / "run"
    ).read_text().splitlines()
    asked = {
        group for text in texts for groups in re.findall(r"^\.ci/install ([\w ]+)", text) for group in groups.split()
    }
    assert asked and asked <= known
    done = subprocess.run([ROOT / ".ci" / "install", "nothing"], capture_output=True, text=True)
    assert (
        done.returncode == 1
        and "expected a group of slurm, network, aarch64, browser and emulation, got 'nothing'" in done.stderr
    )


def test_a_bug_report_asks_for_versions_and_a_way_to_reproduce():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    required = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
    assert required == {"happened", "reproduce", "versions"}
    assert (
        "salientpp --version"
        in next(field for field in form["body"] if field.get("id") == "versions")["attributes"]["description"]
    )
