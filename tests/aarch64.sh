#!/usr/bin/env bash
# Tests a wheel for aarch64 under emulation: tests/aarch64.sh PYTHON WHEEL [TEST ...], where PYTHON has pip. Runs on Debian with qemu-user.
# Debian's Python for aarch64 gets the wheel, torch and the other requirements as wheels for aarch64. Batches must have the digests
# that the tests state for x86-64, and kernels must agree with their references. The first run downloads 250 MB into build/aarch64.
set -euo pipefail
python=$(realpath --no-symlinks "$1") wheel=$(realpath "$2")
tests=("${@:3}")
((${#tests[@]})) || tests=(tests/engine/test_same_batches.py tests/ops)
hash qemu-aarch64 2>/dev/null || { echo "expected qemu-aarch64, which is not installed: apt-get install qemu-user" >&2; exit 1; }
# PyPI's later wheels of torch for aarch64 need CUDA. This one is also the oldest that the package accepts.
torch=2.10.0
place=$(realpath -m build/aarch64)
system=$place/system site=$place/python/lib/python3.11/site-packages here=$place/python/bin/python

if [[ ! -e $place/installed ]]; then
    rm -rf "$place"
    mkdir -p "$system" "$site" "$(dirname "$here")" "$place"/apt/{state/lists,cache/archives}/partial
    # apt resolves Debian's Python in a state of its own, so this machine's list of packages and architectures stays as it is.
    : >"$place/apt/installed-packages"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" >"$place/apt/sources"
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o "Dir::State=$place/apt/state" -o "Dir::Cache=$place/apt/cache"
        -o "Dir::State::status=$place/apt/installed-packages" -o "Dir::Etc::sourcelist=$place/apt/sources" -o Dir::Etc::sourceparts=/dev/null
        -o APT::Sandbox::User=root)
    "${apt[@]}" update
    "${apt[@]}" install --yes --download-only --no-install-recommends python3.11 libstdc++6
    for package in "$place"/apt/cache/archives/*.deb; do dpkg --extract "$package" "$system"; done

    # A script takes the place of the interpreter, so that the processes that it starts are emulated too.
    printf '#!/bin/sh\nexec qemu-aarch64 -0 %q -L %q %q "$@"\n' "$here" "$system" "$system/usr/bin/python3.11" >"$here"
    chmod +x "$here"
    printf 'home = %s\ninclude-system-site-packages = false\n' "$system/usr/bin" >"$place/python/pyvenv.cfg"

    # pip reads the conditions of requirements for this machine, not for aarch64. So the packages are listed: torch, torch_geometric and what they
    # import, and what the tests import. pymetis has no wheel for aarch64, and these tests partition without it.
    names='aiohappyeyeballs|aiohttp|aiosignal|attrs|certifi|charset-normalizer|filelock|frozenlist|fsspec|hypothesis|idna|iniconfig|Jinja2|markdown-it-py'
    names+='|MarkupSafe|mdurl|mpmath|multidict|networkx|numpy|packaging|pluggy|propcache|psutil|Pygments|pyparsing|pytest|requests|rich|scipy|sortedcontainers'
    names+='|sympy|torch-geometric|tqdm|typing_extensions|urllib3|xxhash|yarl'
    grep -E "^($names)==" requirements.txt >"$place/requirements"
    platforms=()
    for minor in $(seq 17 39); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    "$python" -m pip install --quiet --no-deps --target "$site" --only-binary :all: --python-version 3.11 --platform manylinux2014_aarch64 \
        "${platforms[@]}" --requirement "$place/requirements" "torch==$torch"
    touch "$place/installed"
fi

rm -rf "$site"/salientpp*
"$python" -m zipfile --extract "$wheel" "$site"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
cp -r tests csrc pyproject.toml "$work"  # not the package: the tests must see the wheel
cd "$work"
unset PYTHONPATH SALIENTPP_PEER_WHEELS SALIENTPP_TEST_DATA
"$here" - "$site" "$torch" <<'END'
import platform
import sys

import salientpp
import torch
from salientpp.datasets import synthetic

assert platform.machine() == "aarch64" and salientpp.__file__.startswith(sys.argv[1]), (platform.machine(), salientpp.__file__)
assert torch.__version__.partition("+")[0] == sys.argv[2], torch.__version__
data = synthetic(num_vertices=2000, num_features=8)
for batch in salientpp.NeighborLoader(data, [5, 3], data.train_mask, batch_size=256):
    assert torch.equal(batch.x, data.x[batch.n_id])
END
# qemu does not tell which pages of a file are in memory, and one test of threads partitions with pymetis.
"$here" -m pytest -p no:cacheprovider -q "${tests[@]}" -k "not reads_only_the_pages and not share_one_epoch"
echo "$(basename "$wheel"): imported, loaded batches and passed its tests under emulation of aarch64 with torch $torch"
