"""Draws the page of examples, and records what its scripts print: ``python docs/gallery.py [SCRIPT ...]``.

The commands of an example are the indented lines of its docstring. The record holds their output, CPU seconds and peak memory, with machine, commit and date.
The page shows each example with its record, and a picture of numbers that it printed. A test fails when a script differs from the one that was recorded.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from drawing.svg import Picture  # noqa: E402

EXAMPLES = ROOT / "examples"
RECORD = ROOT / "benchmarks" / "results" / "examples.json"
PROGRAMS = {"python": [], "salientpp": ["-m", "salientpp"], "torchrun": ["-m", "torch.distributed.run"]}

_ACCURACY, _AUC, _FETCHED = r"accuracy ([\d.]+)", r": ([\d.]+)$", r"([\d,]+) (?:of|rows)"
#: What the picture of an example shows, and where the output has it: the number of the run and a pattern, by the name of the bars.
DRAWN: dict[str, tuple[str, dict[str, tuple[int, str]]]] = {
    "products.py": (
        "exact accuracy after each epoch",
        {name: (0, rf"exact: .*\b{name} ([\d.]+)") for name in ("train", "val", "test")},
    ),
    "train_sage.py": (
        "validation accuracy after each epoch",
        {"one process": (0, rf"validation {_ACCURACY}"), "two ranks": (2, rf"validation {_ACCURACY}")},
    ),
    "predictions.py": (
        "accuracy of the predictions",
        {name: (1, rf"\b{name} ([\d.]+)") for name in ("train", "val", "test")},
    ),
    "train_hetero.py": (
        "test accuracy",
        {"one process": (0, _ACCURACY), "two ranks": (2, _ACCURACY), "one process, with times": (3, _ACCURACY)},
    ),
    "train_links.py": ("AUC", {"one process": (0, _AUC), "four ranks": (2, _AUC)}),
    "relational.py": ("AUC", {"one process": (0, _AUC), "two ranks": (2, _AUC)}),
    "relbench_tasks.py": (
        "scores on the test split",
        {
            f"{task}, {what}": (2, rf"customer-{task}, test: \S+ {before}([\d.]+)")
            for task in ("active", "products")
            for what, before in (("model", ""), ("none", r"[\d.]+, without a model "))
        },
    ),
    "train_lightning.py": (
        "validation accuracy after each epoch",
        {"one process": (0, _ACCURACY), "two ranks": (2, _ACCURACY)},
    ),
    "from_dgl.py": ("loss after each epoch", {"two ranks": (1, r"loss ([\d.]+)")}),
    "papers100m.py": (
        "rows fetched",
        {
            "without copies": (1, rf"None: loss .*?, {_FETCHED}"),
            "memory of 1500 kB": (1, rf"1500kB: loss .*?, {_FETCHED}"),
        },
    ),
    "train_slurm.py": ("loss after each epoch", {"two ranks": (1, r"loss=([\d.]+)")}),
    "train_elastic.py": (
        "loss after each epoch",
        {"epoch 0, 4 ranks": (1, r"loss ([\d.]+)"), "epoch 1, 3 ranks": (2, r"loss ([\d.]+)")},
    ),
    "train_exact.py": (
        "loss after each epoch",
        {f"rank {rank}": (1, rf"rank {rank}: .*loss ([\d.]+)") for rank in (0, 1)},
    ),
    "train_full.py": (
        "vertices whose rows a rank computes",
        {f"rank {rank}": (0, rf"│ +{rank} │ +([\d,]+)") for rank in (0, 1)},
    ),
    "own_cache.py": (
        "rows fetched",
        {
            name: (1, rf"{name} +{_FETCHED}")
            for name in ("no copies", "memory of 256 kB", "own policy, α = 0.2", "own way")
        },
    ),
    "compiled.py": (
        "seconds of each epoch",
        {"inductor": (0, r"([\d.]+) s,"), "eager": (1, r"([\d.]+) s,")},
    ),
    "partition_to_plot.ipynb": (
        "share of the remote rows that batches need",
        {f"{rows} vertices": (0, rf"the {rows} most probable .*: (\d+%)") for rows in ("73", "737", "7,375")},
    ),
}


def titles() -> dict[str, str]:
    """Returns what a reader wants by script, in the order of the table in examples/README.md."""
    rows = re.findall(r"^\| (.+?) \| \[(\S+)\]\(\2\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return {script: want[0].upper() + want[1:] for want, script in rows}


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def source(script: str) -> str:
    """Returns the text of a script, or the cells of code of a notebook."""
    text = (EXAMPLES / script).read_text()
    if script.endswith(".py"):
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def digest(script: str) -> str:
    return hashlib.sha256(source(script).encode()).hexdigest()[:16]


def commands(script: str) -> list[str]:
    """Returns the commands of a docstring that run here: no pipe, no other host, no data of the reader."""
    if not script.endswith(".py"):
        return ["all cells"]
    text = (ast.get_docstring(ast.parse(source(script))) or "").replace("\\\n", "")
    lines = re.findall(rf"^ +((?:{'|'.join(PROGRAMS)}) .+?)(?: +#.*)?$", text, re.MULTILINE)
    return [" ".join(line.split()) for line in lines if not re.search(r"[|>]|\bHOST\b|\bogbn-|\bconverted:", line)]


def run(script: str, folder: Path) -> list[dict[str, Any]]:
    """Runs the commands of an example in a folder. Returns command, output, CPU seconds of all processes and MB of the largest."""
    here = folder / "examples"
    here.symlink_to(EXAMPLES)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"COLUMNS": "88", "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore", "DGLBACKEND": "pytorch"}
    found = []
    for command in commands(script):
        name, *words = shlex.split(command)
        arguments = PROGRAMS[name] + words if script.endswith(".py") else ["-c", source(script)]
        if name == "torchrun":
            arguments[2:2] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=folder, env=environment, stdout=out, stderr=errors
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
            out.seek(0), errors.seek(0)
            if process.returncode:
                raise RuntimeError(f"{command} ended with {process.returncode}:\n{out.read()}\n{errors.read()}")
            printed = out.read().strip("\n").replace(f"{folder}/", "")
            output = "\n".join(line.rstrip() for line in printed.splitlines())
        seconds, largest = round(usage.ru_utime + usage.ru_stime, 1), usage.ru_maxrss * 1024 // 10**6
        found.append({"command": command, "output": output, "cpu_seconds": seconds, "mb": largest})
    return found


def record(scripts: list[str]) -> None:
    """Runs examples and replaces their entries of the record."""
    # In a process of its own: Linux counts the memory of this process as the peak of a child that it starts.
    describe = "import json, common; print(json.dumps(common.describe_run()))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    described = subprocess.run([sys.executable, "-c", describe], env=environment, capture_output=True, check=True)
    facts = {key: value for key, value in json.loads(described.stdout).items() if key != "command"}
    for script in scripts:
        with tempfile.TemporaryDirectory() as folder:
            entry = {"script": script, "digest": digest(script), **facts, "runs": run(script, Path(folder))}
        print(script, *((each["cpu_seconds"], each["mb"]) for each in entry["runs"]), flush=True)
        entries = {**recorded(), script: entry}  # read again, because another call may have written
        lines = [json.dumps(entries[name], ensure_ascii=False) for name in titles() if name in entries]
        RECORD.write_text("[\n " + ",\n ".join(lines) + "\n]\n")


def recorded() -> dict[str, dict[str, Any]]:
    return {entry["script"]: entry for entry in json.loads(RECORD.read_text())} if RECORD.exists() else {}


def page() -> str:
    """Returns the Markdown of the gallery: examples/README.md, then each example."""
    text = (EXAMPLES / "README.md").read_text()
    for script, title in titles().items():
        text = text.replace(f"]({script})", f"](#{anchor(title)})")
    entries = recorded()
    return text + "".join(section(script, title, entries[script]) for script, title in titles().items())


def section(script: str, title: str, entry: dict[str, Any]) -> str:
    """Returns an example as Markdown: docstring, output, what it took, and the script."""
    machine, versions = entry["machine"], entry["versions"]
    shown = [
        f"$ {each['command']}  # {each['cpu_seconds']:.0f} s, {each['mb']} MB\n{each['output']}"
        for each in entry["runs"]
    ]
    took = (
        f"*CPU seconds of all processes, and memory of the largest, in one run on {machine['cores']} cores of {machine['cpu']}. "
        "Other jobs shared the cores, so seconds in the output are longer than on a free machine. "
        f"torch {versions['torch']}, Python {versions['python']}; {entry['date']}, commit {entry['commit']}.*"
    )
    if script.endswith(".ipynb"):
        said = "\n\n".join(_cells(script))
        shown = [each.split("\n")[0].removeprefix("$ ") for each in shown]
    else:
        said = ast.get_docstring(ast.parse(source(script))) or ""
    blocks = [f"## {title}", said, drawn(script, entry), "```console\n" + "\n".join(shown) + "\n```", took]
    if script.endswith(".py"):
        code = textwrap.indent(f"```python\n{source(script)}```", "    ")
        blocks.append(f'??? example "examples/{script}"\n\n{code}')
    return "\n" + "\n\n".join(blocks) + "\n"


def printed_values(script: str, entry: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the numbers of an example's picture as its runs printed them, by the name of the bars."""
    runs = entry["runs"]
    found = {
        name: re.findall(pattern, runs[run]["output"], re.MULTILINE)
        for name, (run, pattern) in DRAWN[script][1].items()
    }
    if not all(found.values()):
        raise ValueError(f"{script}: expected numbers for each of {list(found)} in its recorded output, got {found}")
    return found


def drawn(script: str, entry: dict[str, Any]) -> str:
    """Returns the picture of an example as HTML: a bar for each number, in groups by epoch if a name has several."""
    what, series = DRAWN[script][0], printed_values(script, entry)
    groups = [f"epoch {number}" for number in range(max(map(len, series.values())))]
    if len(groups) == 1:
        groups, series = list(series), {what: [value for (value,) in series.values()]}
    words = f"{what}: " + "; ".join(f"{name} {', '.join(values)}" for name, values in series.items())
    picture, most = Picture(560, 220, words), max(_number(each) for values in series.values() for each in values)
    picture.text(10, 18, what[0].upper() + what[1:])
    step, low, high = 540 / len(groups), 170.0, 115.0
    width = min(60.0, (step - 16) / len(series))
    for number, group in enumerate(groups):
        left = 10 + step * number + (step - width * len(series)) / 2
        for place, (values, color) in enumerate(zip(series.values(), ("one", "two", "three"), strict=False)):
            at, tall = left + width * place, high * _number(values[number]) / most
            picture.box(at, low - tall, width - 2, tall, color)
            picture.text(at + width / 2 - 1, low - tall - 5, values[number], "ink", "middle", 11)
        picture.text(10 + step * (number + 0.5), low + 17, group, "ink", "middle", 12)
    picture.line(10, low, 550, low, "pale")
    for place, (name, color) in enumerate(
        zip(series if len(series) > 1 else (), ("one", "two", "three"), strict=False)
    ):
        picture.box(10 + 130 * place, 200, 11, 11, color)
        picture.text(26 + 130 * place, 210, name, size=12)
    return f'<img alt="{words}" src="data:image/svg+xml;base64,{base64.b64encode(picture.svg().encode()).decode()}">'


def _number(printed: str) -> float:
    return float(printed.replace(",", "").rstrip("%"))


def _cells(script: str) -> list[str]:
    """Returns the cells of a notebook with their text output and pictures."""
    blocks = []
    for cell in json.loads((EXAMPLES / script).read_text())["cells"]:
        text = "".join(cell["source"])
        blocks.append(re.sub("^# .*\n", "", text) if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            plain = "".join(data.get("text/plain", "")).strip("\n")
            picture = data.get("image/png")
            blocks.append(
                f'<img alt="{plain}" src="data:image/png;base64,{"".join(picture).strip()}">'
                if picture
                else f"```text\n{plain}\n```"
            )
    return blocks


def uses(name: str) -> list[str]:
    """Returns the examples that use a public name of the package, such as ``salientpp.nn.trim``."""
    return [script for script in titles() if name.split(".")[-1] in _names(source(script))]


def _names(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "salientpp":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"salientpp(\.nn)?\.\w+", ast.unparse(node)):
            found.add(node.attr)
    return found


def with_examples(text: str) -> str:
    """Returns a page of the API with the examples that use each name."""

    def line(found: re.Match[str]) -> str:
        links = [f"[{script}](../../examples.md#{anchor(titles()[script])})" for script in uses(found[1])]
        return found[0] + (f"\n\nExamples that use it: {', '.join(links)}." if links else "")

    return re.sub(r"^::: (\S+)$", line, text, flags=re.MULTILINE)


if __name__ == "__main__":
    record(sys.argv[1:] or list(titles()))
