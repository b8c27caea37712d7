"""Builds `salientpp._C` from csrc/: one binary for every Python >= 3.10 and every torch >= 2.10."""

import os
import re
import sys
from pathlib import Path

import setuptools

AGAIN = "then repeat: pip install --no-build-isolation ."


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# Under --no-build-isolation pip checks neither setuptools nor torch. Without them the build fails with an unclear error.
if release(setuptools.__version__) < (77, 0):
    sys.exit(
        f"salientpp needs setuptools >= 77 to build, got {setuptools.__version__} in {sys.executable}: pip install --upgrade setuptools wheel ninja, {AGAIN}"
    )
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"salientpp is compiled against the torch of {sys.executable}, but torch cannot be imported there ({error}): pip install torch, {AGAIN}"
    )
if release(torch.__version__) < (2, 10):
    sys.exit(
        f"salientpp needs torch >= 2.10, got {torch.__version__} in {sys.executable}: pip install --upgrade torch, {AGAIN}"
    )

CSRC = Path("csrc")

#: Python's compiler flags keep symbols, which are 95 % of the binary. They are stripped unless CFLAGS has -g, as in tests/sanitizers.
DEBUG = "-g" in os.environ.get("CFLAGS", "").split()
STRIP = ["-Wl,--strip-all"] if sys.platform == "linux" and not DEBUG else []


def long_description() -> str:
    """Returns README.md for a package index, which has no source tree.

    Links to files of the tree become plain text. Pictures in the tree are left out.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!\w+:)[^)]*\)\n*", "", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)[^)\s]+\)", r"\1", text)


setuptools.setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[
        CppExtension(
            "salientpp._C",
            sources=sorted(str(path) for path in CSRC.rglob("*.cpp")),
            depends=sorted(str(path) for path in CSRC.rglob("*.h")),
            include_dirs=[str(CSRC.resolve())],
            extra_compile_args=[
                "-O3",
                *([] if DEBUG else ["-g0"]),
                "-std=c++20",
                "-Wall",
                "-Wextra",
                "-Wno-unused-parameter",
                # Fused multiply-adds would make the last bit depend on the CPU.
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-DTORCH_STABLE_ONLY",
                "-DTORCH_TARGET_VERSION=0x020a000000000000",
            ],
            # First of the libraries, before torch's: these carry copies of parts of libstdc++, which are torch's own matter.
            libraries=["stdc++"] if sys.platform == "linux" else [],
            extra_link_args=STRIP,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
