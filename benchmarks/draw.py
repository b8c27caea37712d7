"""Draw the tables of README.md and docs from the JSON under benchmarks/results: python benchmarks/draw.py

A table stands between ``<!-- name -->`` and ``<!-- /name -->``; what is between is replaced.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(result: dict) -> str:
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']:.0f} GB, {machine['gpu'] or 'no GPU'}; torch "
        f"{result['versions']['torch']}; {result['date']}; `{result['command']}`."
    )


def draw_demo(result: dict) -> str:
    runs = result["rows"]
    rows = [
        [quantity, *(f"{run[quantity]:,.1f}" if "MB" in quantity else f"{run[quantity]:,.0f}" for run in runs)]
        for quantity in list(runs[0])[1:]
    ]
    rows += [[f"test accuracy, {who}", f"{value:.3f}", ""] for who, value in result["test accuracy"].items()]
    title = (
        f"**The demo**: {result['ranks']} ranks on one machine, fanouts {result['fanouts']}, batch size {result['batch_size']} per rank, "
        f"generated graph of 100,000 vertices; figures per epoch, sum of ranks; {result['seconds']:.0f} s in all."
    )
    return "\n\n".join([title, table(["", *(run["name"] for run in runs)], rows), source(result)])


POLICIES = ["vip", "vip-hop", "simulation", "wpr", "halo", "degree", "paths", "random"]


def by_case(result: dict) -> dict[tuple, dict[str, float]]:
    """(graph, workload, K, fanouts, α) -> policy -> rows per epoch."""
    cases: dict[tuple, dict[str, float]] = {}
    for row in result["rows"]:
        key = (row["dataset"], row["workload"], row["parts"], tuple(row["fanouts"]), row["replication_factor"])
        cases.setdefault(key, {})[row["policy"]] = row["remote_rows_per_epoch"]
    return cases


def named(workload: str) -> str:
    return {"train": "all training seeds", "concentrated": "1 % seeds"}[workload]


def draw_volume(result: dict) -> str:
    """Share of rows left at α = 0.16, fanouts (15, 10, 5), per graph, workload and K."""
    policies = [policy for policy in POLICIES if policy != "vip-hop"]
    batch_sizes = {row["workload"]: row["batch_size"] for row in result["rows"]}
    rows = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        if (fanouts, alpha) == ((15, 10, 5), 0.16):
            best = counts["oracle-heldout"]
            shares = [f"{counts[policy] / best:.3f}" for policy in policies]
            rows.append([f"{dataset}, {named(workload)}, B = {batch_sizes[workload]}, K = {parts}", f"{best:,.0f}", *shares])
    title = (
        "**Rows fetched per epoch with a cache of α = 0.16**, fanouts (15, 10, 5), relative to an oracle that ranks vertices by the "
        f"accesses of {result['epochs']} other epochs (first column: its rows); less is better. Real graphs: packages of Debian 12 and their "
        "dependencies (101,291 vertices), Facebook pages (22,470) and Toloka workers (11,758)."
    )
    return "\n\n".join([title, table(["graph and workload", "oracle", *policies], rows), source(result)])


def draw_volume_summary(result: dict) -> str:
    cases = [counts for key, counts in by_case(result).items() if key[-1] > 0 and counts["oracle-heldout"] > 0]
    lines = []
    for policy in POLICIES:
        ratios = [counts[policy] / counts["oracle-heldout"] for counts in cases]
        others = [counts["vip"] / counts[policy] for counts in cases if counts[policy] > 0]
        lines.append([policy, f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{max(others):.3f}"])
    text = f"{len(cases)} cases: {len({key[:2] for key in by_case(result)})} graphs and workloads, K, fanouts and α > 0."
    return "\n\n".join([text, table(["policy", "geometric mean over held-out oracle", "worst", "VIP over it, worst"], lines), source(result)])


def draw_volume_exceptions(result: dict) -> str:
    lines = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        best = min(counts["oracle"], counts["oracle-heldout"])
        if fanouts != (5, 5, 5) and alpha <= 0.5 and best > 0 and counts["vip"] > 1.03 * best:
            ratios = [f"{counts['vip'] / counts[oracle]:.3f}" for oracle in ("oracle", "oracle-heldout")]
            lines.append([f"{dataset}, {named(workload)}", str(parts), str(list(fanouts)), f"{alpha:g}", f"{counts['vip']:,.0f}", *ratios])
    if not lines:
        return "None."
    return table(["graph", "K", "fanouts", "α", "VIP, rows per epoch", "over the oracle", "over the held-out oracle"], lines)


def draw_oracle(result: dict) -> str:
    cases: dict[tuple, dict[int, str]] = {}
    for row in result["rows"]:
        ratios = [row["ratio_to_oracle"], row["ratio_to_heldout"]]
        if None not in ratios:
            key = (row["dataset"], str(row["fanouts"]), f"{row['replication_factor']:g}")
            cases.setdefault(key, {})[row["epochs"]] = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    epochs = sorted({row["epochs"] for row in result["rows"]})
    lines = [[", ".join([key[0], f"fanouts {key[1]}", f"α = {key[2]}"]), *(cells.get(e, "–") for e in epochs)] for key, cells in cases.items()]
    title = f"VIP over the oracle / over the held-out oracle, 1 % seeds, K = {result['parts']}, by the number of counted epochs:"
    return "\n\n".join([title, table(["", *(f"{e} epochs" for e in epochs)], lines), source(result)])


def draw_partitions(result: dict) -> str:
    found: dict[tuple, dict[str, dict]] = {}
    for entry in result["partitions"]:
        found.setdefault((entry["dataset"], entry["workload"], entry["parts"]), {})[entry["method"]] = entry
    lines = []
    for (dataset, workload, parts), methods in found.items():
        rows = {method: entry["rows_without_cache"] for method, entry in methods.items()}
        ratios = [f"{rows['metis-vip'][fanouts] / rows['metis'][fanouts]:.3f}" for fanouts in rows["metis"]]
        lines.append([f"{dataset}, {named(workload)}, K = {parts}", *ratios])
    return table(["", *(f"fanouts {fanouts}" for fanouts in result["partitions"][0]["rows_without_cache"])], lines)


def draw_volume_all(result: dict) -> str:
    parts = []
    cases = by_case(result)
    for dataset, workload in dict.fromkeys(key[:2] for key in cases):
        lines = []
        for (_, _, k, fanouts, alpha), counts in ((key, value) for key, value in cases.items() if key[:2] == (dataset, workload)):
            best = counts["oracle-heldout"]
            ratios = [f"{counts[policy] / best:.3f}" if best else f"({counts[policy]:,.0f})" for policy in [*POLICIES, "oracle"]]
            lines.append([f"{k}, {list(fanouts)}, {alpha:g}", f"{best:,.0f}", *ratios])
        parts += [f"### {dataset}, {named(workload)}", table(["K, fanouts, α", "held-out oracle, rows", *POLICIES, "oracle"], lines)]
    return "\n\n".join([*parts, source(result)])


def draw_sampler(result: dict) -> str:
    names = list(dict.fromkeys(row["sampler"] for row in result["rows"]))
    sizes = list(dict.fromkeys((row["vertices"], row["edges"]) for row in result["rows"]))
    lines = []
    for size in sizes:
        of_size = {row["sampler"]: row["cpu_ns_per_edge"] for row in result["rows"] if (row["vertices"], row["edges"]) == size}
        peers = [of_size[name] / of_size["salientpp"] for name in names if not name.startswith("salientpp")]
        cells = [f"{of_size[name]:,.1f}" for name in names]
        lines.append([f"{size[0]:,} vertices, {size[1] / 1e6:.1f} M edges", *cells, *(f"{ratio:.0f}×" for ratio in peers)])
    peers = [f"{name} / salientpp" for name in names if not name.startswith("salientpp")]
    title = f"**Sampling**, CPU nanoseconds per sampled edge on one core, fanouts {result['fanouts']}, batches of {result['batch_size']}, generated graphs:"
    return "\n\n".join([title, table(["", *names, *peers], lines), source(result)])


def draw_loader(result: dict) -> str:
    lines = [
        [row["loader"], str(row["workers"]), f"{row['batches_per_second']:.2f}", f"{row['cpu_seconds_per_batch']:.3f}"]
        for row in sorted(result["rows"], key=lambda row: (row["workers"], row["loader"] != "salientpp"))
    ]
    title = (
        f"**Whole batches** (features, labels, ids), {result['vertices']:,} vertices, {result['edges'] / 1e6:.0f} M edges, "
        f"{result['features']} float32 features; workers are threads here and processes in PyG:"
    )
    return "\n\n".join([title, table(["loader", "workers", "batches per second", "CPU seconds per batch"], lines), source(result)])


#: Marker -> the result file and how to draw it.
DRAWN = {
    "demo": ("demo", draw_demo),
    "sampler": ("sampler", draw_sampler),
    "loader": ("loader", draw_loader),
    "volume": ("volume", draw_volume),
    "volume_summary": ("volume", draw_volume_summary),
    "volume_exceptions": ("volume", draw_volume_exceptions),
    "volume_all": ("volume", draw_volume_all),
    "partitions": ("volume", draw_partitions),
    "oracle": ("oracle", draw_oracle),
}


def main() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        for name, (file, draw) in DRAWN.items():
            result = load(file)
            if result is not None and f"<!-- {name} -->" in text:
                body = f"<!-- {name} -->\n\n{draw(result)}\n\n<!-- /{name} -->"
                text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.S)
        page.write_text(text)


if __name__ == "__main__":
    main()
