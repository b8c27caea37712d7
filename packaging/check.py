"""Checks the files of a release: ``python packaging/check.py FOLDER [VERSION]`` prints a line for each file, or the first fault.

The folder must have one source release and wheels for one or more architectures, all of the same version. A wheel must use only Python's limited API,
call the same functions of libtorch and Python on every architecture, run on every Linux that its tag promises, and be small. ``requirements.txt``
of this folder has the tools.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: Compressed bytes of the binary, and of a whole wheel. A binary with its symbols takes 20 times as much.
MOST_BYTES_OF_BINARY, MOST_BYTES = 1_000_000, 2_500_000
MOST_GLIBC = 34  # of 2.x: Debian 12, Ubuntu 22.04, RHEL 9 and later
NEEDED = {"libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}  # and the loader on x86-64
#: Systems for aarch64 may have pages of 64 KiB. A segment that is aligned to less cannot be loaded there.
ALIGNMENT = {"x86_64": 1 << 12, "aarch64": 1 << 16}
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
EXTENSION = "salientpp/_C.abi3.so"
WHEEL = re.compile(
    r"salientpp-(?P<version>[^-]+)-cp310-abi3-(?:manylinux_2_(?P<glibc>\d+)_(?P<machine>x86_64|aarch64)\.?)+\.whl"
)


class Fault(Exception):
    """What was expected of a file, what was found, and what to do."""


@dataclass(frozen=True)
class Extension:
    """What the compiled part of a wheel needs: libraries, names of functions, and the alignment of its segments in bytes."""

    machine: str
    libraries: frozenset[str]
    names: frozenset[str]
    alignment: int


def read_extension(content: bytes) -> Extension:
    """Reads an ELF file. ``names`` are the undefined symbols of libtorch and Python; all others belong to the system's libraries."""
    from elftools.elf.elffile import ELFFile  # from the environment of the tools; the tests of this file run without it

    file = ELFFile(io.BytesIO(content))
    symbols = file.get_section_by_name(".dynsym").iter_symbols()
    undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
    return Extension(
        machine=MACHINES.get(file["e_machine"], file["e_machine"]),
        libraries=frozenset(tag.needed for tag in file.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")),
        names=frozenset(name for name in undefined if re.match(r"_?Py|(aoti_)?torch_", name)),
        alignment=min(segment["p_align"] for segment in file.iter_segments("PT_LOAD")),
    )


def check_wheel(path: Path) -> tuple[str, Extension]:
    """Returns the version and the extension of a wheel.

    Raises:
        Fault: the name, the size, the contents or the extension is not as expected.
    """
    tag = WHEEL.fullmatch(path.name)
    if not tag:
        raise Fault(
            f"{path.name}: expected salientpp-VERSION-cp310-abi3-manylinux_2_N_ARCHITECTURE.whl; build it with `make wheel`"
        )
    if int(tag["glibc"]) > MOST_GLIBC:
        raise Fault(
            f"{path.name}: expected glibc 2.{MOST_GLIBC} or older, got 2.{tag['glibc']}; build it on an older system"
        )
    if path.stat().st_size > MOST_BYTES:
        raise Fault(
            f"{path.name}: expected at most {MOST_BYTES:,} bytes, got {path.stat().st_size:,}; does it carry data or a library?"
        )
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        binaries = {name for name in names if re.search(r"\.so(\.|$)", name)}
        if binaries != {EXTENSION}:
            raise Fault(
                f"{path.name}: expected one binary, {EXTENSION}, got {sorted(binaries)}; exclude libraries of other packages"
            )
        if (size := wheel.getinfo(EXTENSION).compress_size) > MOST_BYTES_OF_BINARY:
            raise Fault(
                f"{path.name}: expected at most {MOST_BYTES_OF_BINARY:,} compressed bytes of {EXTENSION}, got {size:,}; does it carry symbols?"
            )
        for name in ("salientpp/py.typed", "salientpp/_C.pyi"):
            if name not in names:
                raise Fault(f"{path.name}: expected {name}, which is missing; see package-data in pyproject.toml")
        extension = read_extension(wheel.read(EXTENSION))
    if extension.machine != tag["machine"]:
        raise Fault(
            f"{path.name}: expected a binary for {tag['machine']}, got one for {extension.machine}; remove build/ and build again"
        )
    libraries = {name for name in extension.libraries if not name.startswith("ld-linux")}
    if libraries != NEEDED:
        raise Fault(
            f"{path.name}: expected the libraries {sorted(NEEDED)}, got {sorted(libraries)}; see `libraries` in setup.py"
        )
    if extension.alignment < ALIGNMENT[extension.machine]:
        raise Fault(
            f"{path.name}: expected segments aligned to {ALIGNMENT[extension.machine]} bytes, got {extension.alignment}; link with -z max-page-size"
        )
    return tag["version"], extension


def check_folder(folder: Path, version: str | None = None) -> list[Path]:
    """Returns the source release and the wheels of ``folder``.

    Raises:
        Fault: a file is missing or not as expected, or files differ in version or in the functions that they call.
    """
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(sources) != 1 or not wheels:
        raise Fault(
            f"{folder}: expected one source release and one wheel or more, got {len(sources)} and {len(wheels)}; `make wheel` builds both"
        )
    extensions: dict[str, Extension] = {}
    for wheel in wheels:
        found, extension = check_wheel(wheel)
        version = version or found
        if found != version:
            raise Fault(
                f"{wheel.name}: expected version {version}; remove files of other versions, or correct pyproject.toml"
            )
        if extension.machine in extensions:
            raise Fault(f"{wheel.name}: expected one wheel for {extension.machine}, got a second; remove one")
        extensions[extension.machine] = extension
    if sources[0].name != f"salientpp-{version}.tar.gz":
        raise Fault(f"{sources[0].name}: expected salientpp-{version}.tar.gz; `make sdist` builds it")
    names = [extension.names for extension in extensions.values()]
    different = frozenset.union(*names) - frozenset.intersection(*names)
    if different:
        raise Fault(
            f"{folder}: expected that all wheels call the same functions, got differences in {sorted(different)}; build all from one source"
        )
    return [*sources, *wheels]


def run_tool(name: str, *words: str | Path) -> str:
    """Returns what a tool of this environment prints.

    Raises:
        Fault: the tool found a fault.
    """
    done = subprocess.run([Path(sys.executable).parent / name, *words], capture_output=True, text=True)
    if done.returncode:
        raise Fault(f"{name} {' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("expected a folder, and optionally a version: python packaging/check.py dist 0.1.0")
    try:
        files = check_folder(Path(sys.argv[1]), *sys.argv[2:])
        run_tool("twine", "check", "--strict", *files)
        for wheel in files[1:]:
            run_tool("abi3audit", "--strict", wheel)
            promised = re.search(r'"(manylinux_2_\d+_\w+)"', run_tool("auditwheel", "show", wheel))
            if not promised or promised[1] not in wheel.name:
                raise Fault(
                    f"{wheel.name}: expected the tag {promised and promised[1]}, which auditwheel finds; `make wheel` sets it"
                )
    except Fault as fault:
        sys.exit(str(fault))
    for path in files:
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, as expected")


if __name__ == "__main__":
    main()
