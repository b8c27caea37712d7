#!/usr/bin/env bash
# Build csrc with a sanitizer, beside the ordinary build, and run tests on it. Needs GCC with its sanitizer libraries.
#
#   tests/sanitizers/run.sh address [pytest arguments]   AddressSanitizer and UndefinedBehaviorSanitizer
#   tests/sanitizers/run.sh thread [pytest arguments]    ThreadSanitizer
#
# The first finding in csrc ends the run (address) or makes its exit code 66 (thread). Only csrc is instrumented: Python,
# numpy and torch run as they are, with the sanitizer's malloc, so overruns of their arrays by csrc are seen.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
kind=$1
shift
python=${PYTHON:-$root/.venv/bin/python}
build=$root/build/$kind
mkdir -p "$build"
# Compilers other than GCC keep their libraries elsewhere.
export CC=gcc CXX=g++
library() { g++ -print-file-name="lib$1.so"; }

case $kind in
  address)
    flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    # The C++ library comes with the sanitizer's, which looks for `throw` when it starts, before Python has loaded it.
    preload="$(library asan) $(library stdc++)"
    tests="ops graph/test_graph.py vip/test_inclusion.py partitioning store/test_narrow.py store/test_packed.py sampling/test_neighbor_sampler.py
           sampling/test_edge_lists.py nn/test_products.py sampling/test_typed_sampler.py sampling/test_shared_draws.py ways/lookahead/test_planner.py ways/sums/test_plan.py project/test_properties.py"
    ;;
  thread)
    flags="-fsanitize=thread"
    g++ -shared -fPIC -g -O1 -std=c++20 $flags tests/sanitizers/parallel_for.cpp -o "$build/parallel_for.so"
    preload="$(library tsan) $(library stdc++) $build/parallel_for.so"
    tests="ops/test_threads.py"
    ;;
  *)
    echo "expected address or thread, got $kind" >&2
    exit 2
    ;;
esac

CFLAGS="-g -fno-omit-frame-pointer $flags" LDFLAGS="$flags" \
  "$python" setup.py --quiet build --build-lib "$build/lib" --build-temp "$build/temp" > "$build.log" 2>&1 || { cat "$build.log"; exit 1; }

# Leaks are Python's own at exit. Memory that is refused is null, as without the sanitizer, so that tests of it can go on.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
# Ranks are forked from a server that may have threads.
export TSAN_OPTIONS=suppressions=$root/tests/sanitizers/thread.supp:exitcode=66:die_after_fork=0
# Address randomisation can take the addresses that ThreadSanitizer wants for itself.
fixed=$(setarch -R true 2> /dev/null && echo "setarch -R" || true)

[ $# -gt 0 ] || set -- $(printf "tests/%s " $tests)
for argument; do # files are named from the root, and pytest runs elsewhere
  shift
  [ -e "${argument%%::*}" ] && argument=$(realpath "${argument%%::*}")${argument#"${argument%%::*}"}
  set -- "$@" "$argument"
done
cd "$build/lib" # first in Python's path: this build is imported
export LD_PRELOAD=$preload
$fixed "$python" -c "import torch, salientpp._C as it; assert it.__file__.startswith('$build/'), it.__file__"
# Tests are imported from the source tree, which comes last in the path, so that the package is not. Captured by Python alone: sanitizers write to the file descriptor, and a process that they end shows nothing later.
$fixed "$python" -m pytest -q --capture=sys -p no:cacheprovider --import-mode=append "$@"
