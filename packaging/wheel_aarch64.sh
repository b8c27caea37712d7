#!/usr/bin/env bash
# Cross-compiles the wheel for aarch64: packaging/wheel_aarch64.sh PYTHON FOLDER SDIST, where PYTHON has torch and the tools to build.
# It needs Debian's g++-aarch64-linux-gnu. A warning of the compiler is an error. The wheel has the tag linux_aarch64; auditwheel gives it a manylinux tag.
set -euo pipefail
python=$1 folder=$2 sources=$3
target=aarch64-linux-gnu
hash $target-g++ 2>/dev/null || { echo "expected $target-g++, which is not installed: apt-get install g++-$target" >&2; exit 1; }

# The headers of Python and torch are the same on both architectures: the types that they declare have equal sizes. Their libraries are not. The linker
# needs only names from them, so it gets a library of names: the C functions that the installed libtorch exports.
names=$(mktemp --directory)
trap 'rm -rf "$names"' EXIT
torch=$("$python" -c "import torch; print(torch.__path__[0])")
nm --dynamic --defined-only "$torch/lib/libtorch_cpu.so" | awk '$2 == "T" && $3 ~ /^(aoti_)?torch_/ {print ".globl " $3 "\n" $3 ":"}' > "$names/libtorch_cpu.s"
for library in libc10 libtorch libtorch_cpu; do
    touch "$names/$library.s"
    $target-gcc -shared -nostdlib -Wl,-soname,$library.so -o "$names/$library.so" "$names/$library.s"
done

export CC=$target-gcc CXX=$target-g++ LDSHARED="$target-gcc -shared" LDCXXSHARED="$target-g++ -shared"
export CFLAGS="${CFLAGS:-} -Werror" LDFLAGS="-L$names" _PYTHON_HOST_PLATFORM=linux-aarch64
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$folder" "$sources"
