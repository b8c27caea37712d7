#!/usr/bin/env bash
# Builds csrc with a sanitizer, beside the ordinary build, and runs tests on it. Needs GCC with its sanitizer libraries.
#
#   tests/sanitizers/run.sh address [pytest arguments]   AddressSanitizer and UndefinedBehaviorSanitizer
#   tests/sanitizers/run.sh thread [pytest arguments]    ThreadSanitizer
#
# With address, the first finding in csrc ends the run. With thread, a finding makes the exit code 66. Only csrc is
# instrumented. Python, numpy and torch use the sanitizer's malloc, so an overrun of their arrays by csrc is detected.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
kind=$1
shift
python=${PYTHON:-$root/.venv/bin/python}
build=$root/build/$kind
mkdir -p "$build"
# Other compilers have their sanitizer libraries elsewhere.
export CC=gcc CXX=g++
library() { g++ -print-file-name="lib$1.so"; }

case $kind in
  address)
    flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    # The C++ library is preloaded too: the sanitizer looks for `throw` at its start, before Python has loaded that library.
    preload="$(library asan) $(library stdc++)"
    tests="ops graph/test_graph.py vip/test_inclusion.py partitioning store/test_narrow.py store/test_packed.py sampling/test_neighbor_sampler.py
           sampling/test_edge_lists.py sampling/test_drawn_hops.py sampling/test_divided_batch.py nn/test_products.py sampling/test_typed_sampler.py sampling/test_shared_draws.py ways/lookahead/test_planner.py ways/sums/test_plan.py project/test_properties.py"
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

# Python itself leaks at exit. A failed allocation returns null, as without the sanitizer, because tests rely on it.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
# Ranks are forked from a server that may have threads.
export TSAN_OPTIONS=suppressions=$root/tests/sanitizers/thread.supp:exitcode=66:die_after_fork=0
# Address randomisation can occupy addresses that ThreadSanitizer needs.
fixed=$(setarch -R true 2> /dev/null && echo "setarch -R" || true)

[ $# -gt 0 ] || set -- $(printf "tests/%s " $tests)
for argument; do # paths are relative to the root, but pytest runs in another folder
  shift
  [ -e "${argument%%::*}" ] && argument=$(realpath "${argument%%::*}")${argument#"${argument%%::*}"}
  set -- "$@" "$argument"
done
cd "$build/lib" # first in Python's path: this build is imported
export LD_PRELOAD=$preload
$fixed "$python" -c "import torch, salientpp._C as it; assert it.__file__.startswith('$build/'), it.__file__"
# Tests are imported from the source tree. It comes last in the path, so that the package is imported from this build.
# Output is captured by Python alone: sanitizers write to the file descriptor and then end the
# process, so capturing the descriptor would lose their report.
$fixed "$python" -m pytest -q --capture=sys -p no:cacheprovider --import-mode=append "$@"
