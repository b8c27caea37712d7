"""Tables of docs/results/communication.md about cache policies and partitions."""

from __future__ import annotations

import statistics

from .base import Drawn, Row, as_file, joined, source, table

POLICIES = ["vip", "vip-hop", "simulation", "wpr", "halo", "degree", "paths", "random"]
WORKLOADS = {"train": "all training seeds", "concentrated": "1 % seeds"}


def by_case(result: Row) -> dict[tuple, dict[str, float]]:
    """Maps (graph, workload, parts, fanouts, α) to the rows per epoch of every policy."""
    cases: dict[tuple, dict[str, float]] = {}
    for row in result["rows"]:
        key = (row["dataset"], row["workload"], row["parts"], tuple(row["fanouts"]), row["replication_factor"])
        cases.setdefault(key, {})[row["policy"]] = row["remote_rows_per_epoch"]
    return cases


def draw_volume(result: Row) -> str:
    """Draws the rows that are left at α = 0.16 with fanouts (15, 10, 5), for each graph, workload and number of parts."""
    policies = [policy for policy in POLICIES if policy != "vip-hop"]
    sizes = {row["workload"]: row["batch_size"] for row in result["rows"]}
    lines = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        if (fanouts, alpha) == ((15, 10, 5), 0.16):
            best = counts["oracle-heldout"]
            shares = [f"{counts[policy] / best:.3f}" for policy in policies]
            workload = f"{WORKLOADS[workload]}, B = {sizes[workload]}"
            lines.append([dataset, workload, str(parts), f"{best:,.0f}", *shares])
    title = (
        "**Cache policies at α = 0.16.** Rows fetched per epoch, divided by the rows of the held-out oracle. This oracle ranks vertices by the accesses of "
        f"{result['epochs']} other epochs. The column *held-out oracle* has its number of rows. Less is better. Fanouts (15, 10, 5), K parts, batches of B."
    )
    header = ["graph", "workload", "K", "held-out oracle", *policies]
    return joined(title, table(header, lines, left=2), source(result))


def draw_summary(result: Row) -> str:
    cases = [counts for key, counts in by_case(result).items() if key[-1] > 0 and counts["oracle-heldout"] > 0]
    lines = []
    for policy in POLICIES:
        ratios = [counts[policy] / counts["oracle-heldout"] for counts in cases]
        others = [counts["vip"] / counts[policy] for counts in cases if counts[policy] > 0]
        lines.append([policy, f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{max(others):.3f}"])
    title = (
        f"**All {len(cases)} cases with a cache.** Rows of a policy divided by rows of the held-out oracle. "
        "The last column divides the rows of VIP by the rows of the policy."
    )
    header = ["policy", "geometric mean", "worst case", "VIP / policy, worst case"]
    return joined(title, table(header, lines), source(result))


def draw_exceptions(result: Row) -> str:
    lines = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        best = min(counts["oracle"], counts["oracle-heldout"])
        if fanouts != (5, 5, 5) and alpha <= 0.5 and best > 0 and counts["vip"] > 1.03 * best:
            ratios = [f"{counts['vip'] / counts[oracle]:.3f}" for oracle in ("oracle", "oracle-heldout")]
            case = [f"{dataset}, {WORKLOADS[workload]}", str(parts), str(list(fanouts)), f"{alpha:g}"]
            lines.append([*case, f"{counts['vip']:,.0f}", *ratios])
    if not lines:
        return "None."
    header = ["case", "K", "fanouts", "α", "VIP, rows per epoch", "VIP / oracle", "VIP / held-out oracle"]
    title = (
        "**Exceptions.** Cases with α ≤ 0.5 in which VIP fetches over 3 % more rows than the better of the two oracles."
    )
    return joined(title, table(header, lines), source(result))


def draw_oracle(result: Row) -> str:
    cases: dict[tuple, dict[int, str]] = {}
    for row in result["rows"]:
        ratios = [row["ratio_to_oracle"], row["ratio_to_heldout"]]
        if None not in ratios:
            key = (row["dataset"], str(row["fanouts"]), f"{row['replication_factor']:g}")
            cases.setdefault(key, {})[row["epochs"]] = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    epochs = sorted({row["epochs"] for row in result["rows"]})
    lines = [[*key, *(cells.get(e, "–") for e in epochs)] for key, cells in cases.items()]
    title = f"**Number of counted epochs.** VIP / oracle, and VIP / held-out oracle. 1 % seeds, K = {result['parts']}."
    return joined(
        title, table(["graph", "fanouts", "α", *(f"{e} epochs" for e in epochs)], lines, left=2), source(result)
    )


def draw_partitions(result: Row) -> str:
    found: dict[tuple, dict[str, Row]] = {}
    for entry in result["partitions"]:
        found.setdefault((entry["dataset"], entry["workload"], entry["parts"]), {})[entry["edge_weights"]] = entry
    lines = []
    for (dataset, workload, parts), weights in found.items():
        rows = {name: entry["rows_without_cache"] for name, entry in weights.items()}
        ratios = [f"{rows['vip'][fanouts] / rows['equal'][fanouts]:.3f}" for fanouts in rows["equal"]]
        lines.append([dataset, WORKLOADS[workload], str(parts), *ratios])
    title = (
        '**VIP edge weights.** Rows per epoch without a cache: METIS with `edge_weights="vip"` (the default) divided by METIS with `"equal"`, '
        "without refinement. Every load is at most 5 % above the mean."
    )
    fanouts = [f"fanouts {fanouts}" for fanouts in result["partitions"][0]["rows_without_cache"]]
    return joined(title, table(["graph", "workload", "K", *fanouts], lines, left=2), source(result))


def draw_refine(result: Row) -> str:
    lines = []
    for plain, refined in zip(result["rows"][::2], result["rows"][1::2]):
        ratios = [
            f"{new / old:.3f} · {counted / old_counted:.3f}"
            for old, new, old_counted, counted in zip(
                plain["predicted_rows"], refined["predicted_rows"], plain["counted_rows"], refined["counted_rows"]
            )
        ]
        lines.append(
            [
                f"{plain['dataset']}, {plain['method']}",
                str(plain["parts"]),
                *ratios,
                f"{plain['edge_cut_fraction']:.1%} → {refined['edge_cut_fraction']:.1%}",
                f"{plain['largest_load']:.3f} → {refined['largest_load']:.3f}",
                f"{plain['cpu_seconds']:.1f} → {refined['cpu_seconds']:.1f}",
            ]
        )
    alphas = ["no cache" if alpha == 0 else f"α = {alpha:g}" for alpha in result["alphas"]]
    title = (
        f"**Refinement.** Rows of an epoch after refinement divided by rows before it: predicted · counted over {result['epochs']} epochs. "
        f"All training seeds, batches of {result['batch_size']}, fanouts (15, 10, 5)."
    )
    header = ["graph, partitioner", "K", *alphas, "edges cut", "largest load / mean", "CPU s"]
    more = as_file("refinement", "**KaMinPar too.**", header, lines)
    return joined(title, table(header, [line for line in lines if "metis" in line[0]]), more, source(result))


def draw_types(result: Row) -> str:
    cases = list(dict.fromkeys((row["graph"], tuple(row["fanouts"])) for row in result["rows"]))
    found = {(row["graph"], tuple(row["fanouts"]), row["method"]): row for row in result["rows"]}
    lines = []
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        rows = [found[(*case, method)] for case in cases]
        counts = [f"{row['predicted_rows']:,.0f} ({row['fetched_rows']:,.0f})" for row in rows]
        fullest = {row["graph"]: 0.0 for row in rows}
        for row in rows:  # the worse of two fanouts on one graph
            fullest[row["graph"]] = max(fullest[row["graph"]], row["rows_balance"])
        lines.append([method, *counts, " · ".join(f"{ratio:.2f}" for ratio in fullest.values())])
    title = (
        f"**Several types.** Rows that a step of all {result['parts']} ranks fetches without a cache: predicted by typed VIP, and in brackets "
        f"counted over {result['steps']} steps. Batches of {result['batch_size']}. *Fullest part* divides the rows of the fullest part by the mean, "
        "for the worst type of each graph."
    )
    header = ["partition", *(f"{graph}, {list(fanouts)}" for graph, fanouts in cases), "fullest part"]
    return joined(title, table(header, lines), source(result))


def draw_all(result: Row) -> str:
    """Writes the counts of every case, also of those without a cache, to a file."""
    names = [*POLICIES, "oracle"]
    lines = []
    for (dataset, workload, parts, fanouts, alpha), counts in by_case(result).items():
        best = counts["oracle-heldout"]
        ratios = [f"{counts[policy] / best:.3f}" if best else f"({counts[policy]:.0f})" for policy in names]
        case = [dataset, WORKLOADS[workload], str(parts), " ".join(map(str, fanouts)), f"{alpha:g}"]
        lines.append([*case, f"{best:.0f}", *ratios])
    title = "**All counts.** Rows per epoch of the held-out oracle, and the ratio of each policy to them. In brackets: rows, where the oracle has none."
    return as_file("all-counts", title, ["graph", "workload", "K", "fanouts", "α", "held-out oracle", *names], lines)


DRAWN: Drawn = {
    "volume": ("volume", draw_volume),
    "volume_summary": ("volume", draw_summary),
    "volume_exceptions": ("volume", draw_exceptions),
    "volume_all": ("volume", draw_all),
    "oracle": ("oracle", draw_oracle),
    "partitions": ("volume", draw_partitions),
    "refine": ("refine", draw_refine),
    "types": ("types", draw_types),
}
