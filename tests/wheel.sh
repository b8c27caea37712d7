#!/usr/bin/env bash
# Tests that a wheel is complete: tests/wheel.sh PYTHON WHEEL, where PYTHON has the requirements.
# The wheel is installed into an empty environment that sees only the requirements. There, away from the source tree, it must serve batches, the
# demo must print what README shows, and every command of the quickstart must work.
set -euo pipefail
python=$(realpath --no-symlinks "$1") wheel=$(realpath "$2")
quickstart=$(realpath docs/quickstart.md)
readme=$(realpath README.md)
support=$(realpath tests/support)
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
here=$work/venv/bin/python
"$here" -m pip install --quiet --no-deps --no-index "$wheel"

# The requirements, without the editable install of the source tree.
"$python" - "$work/requirements" <<'END'
import importlib.metadata, os, sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir()
for site in {importlib.metadata.distribution("torch").locate_file(""), importlib.metadata.distribution("numpy").locate_file("")}:
    for entry in os.scandir(site):
        if "salientpp" not in entry.name and not entry.name.endswith(".pth"):
            (folder / entry.name).symlink_to(entry.path)
END
"$here" -c "import site; print(site.getsitepackages()[0])" | while read -r site; do echo "$work/requirements" > "$site/requirements.pth"; done

cd "$work"
"$here" - "$work/venv" <<'END'
import importlib.metadata
import re
import sys
from pathlib import Path

import torch

import salientpp
from salientpp.datasets import load_dataset

assert Path(salientpp.__file__).is_relative_to(sys.argv[1]), salientpp.__file__
assert (Path(salientpp.__file__).parent / "py.typed").is_file(), "no py.typed in the wheel"
about = importlib.metadata.metadata("salientpp")
text = about["Description"] or about.get_payload()
assert about["Description-Content-Type"] == "text/markdown" and text.startswith("# salientpp") and "SALIENT++" in text, text[:200]
lost = [link for link in re.findall(r"\]\(([^)]*)\)", text) if not re.match(r"https?://", link)]
assert not lost, f"links that lead nowhere on a package index: {lost}"
data = load_dataset("synthetic:num_vertices=2000,num_features=8")
salientpp.partition(data, num_parts=1, root="parts", num_neighbors=[5, 3], batch_size=32)
for graph, seeds in ((data, data.train_mask), (salientpp.load("parts"), "train")):
    batches = list(salientpp.NeighborLoader(graph, [5, 3], seeds, batch_size=32, num_workers=1))
    assert batches and all(batch.x.shape == (batch.num_nodes, 8) for batch in batches)
batch = next(iter(salientpp.NeighborLoader(data, [-1], torch.arange(10), batch_size=10)))
assert torch.equal(batch.x, data.x[batch.n_id])
END
"$work/venv/bin/salientpp" --help >/dev/null
"$work/venv/bin/salientpp" partition synthetic:num_vertices=2000 parts-2 --parts 2 --num-neighbors 5,3 --batch-size 32 >/dev/null
"$work/venv/bin/salientpp" info parts-2 >/dev/null

# The demo prints what README shows.
"$work/venv/bin/salientpp" demo --plot demo.png >demo.txt
test -s demo.png
"$here" - "$readme" demo.txt <<'END'
import re
import sys
from pathlib import Path

page, printed = (Path(path).read_text() for path in sys.argv[1:])
shown = re.search("salientpp demo.*?```text\n(.*?)```", page, re.DOTALL)[1]
lines = [[line.rstrip() for line in text.splitlines() if line.strip()] for text in (shown, printed)]
missing = [line for line in lines[0] if line not in lines[1]]
assert lines[0] and not missing, f"README shows lines that the demo does not print: {missing}; it printed {lines[1]}"
END

# The quickstart, as a reader follows it: scripts are saved under their names, and commands run in a shell. The commands that install are left out.
mkdir "$work/quickstart"
PYTHONPATH=$support "$here" - "$quickstart" "$work/quickstart" <<'END'
import sys
from pathlib import Path

from pages import blocks_of

folder = Path(sys.argv[2])
blocks = list(blocks_of(Path(sys.argv[1]).read_text()))
for block in blocks:
    for name in block.said("is"):
        (folder / name).write_text(block.code)
commands = [block.code for block in blocks if block.language == "bash" and not block.said("not run:")]
assert len(commands) >= 5, commands
(folder / "commands.sh").write_text("".join(commands))
END
printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$here" > "$work/venv/bin/torchrun"
chmod +x "$work/venv/bin/torchrun"
(cd "$work/quickstart" && PATH="$work/venv/bin:$PATH" bash -euo pipefail commands.sh >output 2>errors) || { cat "$work"/quickstart/{output,errors}; exit 1; }
grep --quiet "fetched" "$work/quickstart/output"
echo "$(basename "$wheel"): installed, imported, partitioned, loaded batches, showed the demo and followed the quickstart away from its sources"
