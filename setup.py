"""Build `salientpp._C` from csrc/: one binary for every Python >= 3.10 and every torch >= 2.10."""

import re
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

CSRC = Path("csrc")


def long_description() -> str:
    """README.md for who reads it on a package index, without the source tree beside it.

    Of links to files of the tree the text remains; pictures in the tree are left out.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!\w+:)[^)]*\)\n*", "", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)[^)\s]+\)", r"\1", text)


setup(
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
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
