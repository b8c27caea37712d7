"""Tables of docs/results/gpu.md: training, rows on the device, assembly, decoding, sampling and tests on one GPU."""

from __future__ import annotations

from .base import Drawn, Row, joined, shown, source, table

MODELS = ("plain", "trimmed")


def draw_epochs(result: Row) -> str:
    epochs = {(row["model"], row["name"]): row for row in result["rows"] if row["part"] == "epoch"}
    loads = {row["name"]: row["batches_per_second"] for row in result["rows"] if row["part"] == "loading"}
    lines = []
    for name in dict.fromkeys(name for _, name in epochs):
        line = [f"`{name}`" if name == "floor" else shown(name).replace("beta", "β")]
        for model in MODELS:
            row = epochs.get((model, name))
            line += ["–", "–"] if row is None else [f"{row['ms_per_batch']:.1f}", f"{row['over_floor']:.2f}×"]
        lines.append([*line, f"{loads[name]:,.0f}" if name in loads else "–"])
    title = (
        f"**Training on one GPU.** Milliseconds per batch of a {result['layers']}-layer GraphSAGE of width {result['hidden']}, and the ratio to the floor, "
        "for the plain model and for `nn.trim`. The floor trains on batches that are already on the device. The last column is loading alone, in batches per "
        f"second, with {result['workers']} workers. The generated graph has {result['vertices']:,} vertices; β is the share of rows on the device."
    )
    header = ["loader", "plain, ms", "of floor", "trimmed, ms", "of floor", "loads per s"]
    return joined(title, table(header, lines), source(result))


def draw_tiers(result: Row) -> str:
    found = {(row["order"], row["beta"]): row for row in result["rows"] if row["part"] == "tier"}
    if not found:
        return "The run was stopped before these cases were complete."
    orders = list(dict.fromkeys(order for order, _ in found))
    lines = []
    for beta in dict.fromkeys(beta for _, beta in found):
        line = [f"{beta:.2f}"]
        for order in orders:
            row = found.get((order, beta))
            line += ["", ""] if row is None else [f"{row['ms_per_batch']:.1f}", f"{row['share_of_rows_from_host']:.1%}"]
        lines.append(line)
    title = (
        "**Rows on the device.** Milliseconds per batch of the trimmed step, and the share of a batch's rows that come from the host. The rows on the device "
        f"are the most needed ones (VIP) or random ones. The generated graph has {result['sparse_vertices']:,} vertices."
    )
    header = ["β", *(name for order in orders for name in (f"{order}, ms", f"{order}, from host"))]
    return joined(title, table(header, lines, left=0), source(result))


def draw_assembly(result: Row) -> str:
    lines = [
        [
            row["dtype"].removeprefix("torch."),
            f"{row['fused_us']:.0f}",
            f"{row['in_torch_us']:.0f}",
            f"{row['in_torch_us'] / row['fused_us']:.1f}×",
            f"{2 * row['bytes'] / row['fused_us'] / 1e3:,.0f}",
        ]
        for row in result["rows"]
        if row["part"] == "assembly"
    ]
    title = (
        "**Assembly.** Microseconds to put a batch's rows in their places on the device, by the kernel and by torch's operators. GB/s count reading and "
        "writing."
    )
    return joined(title, table(["dtype", "kernel, µs", "torch, µs", "torch / kernel", "GB/s"], lines), source(result))


def draw_sampling(result: Row) -> str:
    found = {(row["name"], str(row["fanouts"])): row for row in result["rows"]}
    fanouts = list(dict.fromkeys(of for _, of in found))
    lines = [
        [name, *(f"{found[name, of]['batches_per_second']:,.0f}" if (name, of) in found else "–" for of in fanouts)]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    title = (
        f"**Sampling.** Batches of {result['batch_size']:,} seeds per second, by fanouts. The graph has {result['vertices']:,} vertices and "
        f'{result["edges"]:,} edges. `device` leaves samples on the device, `device to host` delivers them as `neighbor_sampler="device"` does, and `in place` '
        "reads the edges from pinned memory of the host. All samples are equal."
    )
    return joined(title, table(["sampler", *fanouts], lines), source(result))


def draw_decoding(result: Row) -> str:
    lines = [
        [
            row["format"],
            row["memory"],
            *(f"{row[way]['us']:,.0f}" if way in row else "–" for way in ("one pass", "two steps")),
            f"{row['two steps']['us'] / row['one pass']['us']:.1f}×" if "two steps" in row else "–",
        ]
        for row in result["rows"]
    ]
    title = (
        f"**Decoding.** Microseconds to assemble {result['rows_of_batch']:,} rows of {result['columns']} float32 values from encoded rows, in one pass, and in "
        "two steps: assembly, then torch's operators."
    )
    return joined(
        title, table(["format", "rows in", "one pass, µs", "two steps, µs", "two / one"], lines, left=2), source(result)
    )


def draw_tests(result: Row) -> str:
    lines = [
        [row["step"], "passed" if row["code"] == 0 else "failed", f"{row['seconds']:.0f}"]
        + [str(row["tests"][what]) if sum(row["tests"].values()) else "" for what in ("passed", "failed", "skipped")]
        for row in result["rows"]
    ]
    title = "**Checks.** The steps of `make gpu-check`, their seconds, and the numbers of their tests."
    header = ["step", "outcome", "seconds", "passed", "failed", "skipped"]
    return joined(title, table(header, lines, left=2), source(result))


DRAWN: Drawn = {
    "gpu_epochs": ("cuda", draw_epochs),
    "gpu_tiers": ("cuda", draw_tiers),
    "gpu_assembly": ("cuda", draw_assembly),
    "gpu_sampling": ("device_sampler", draw_sampling),
    "gpu_decoding": ("decode", draw_decoding),
    "gpu_tests": ("gpu_check", draw_tests),
}
