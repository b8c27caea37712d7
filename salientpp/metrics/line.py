"""One line about a loader, for a progress bar."""

from __future__ import annotations

from salientpp.loader.metrics import RECENT
from salientpp.metrics.series import HasMetrics


def progress(loader: HasMetrics) -> str:
    """Returns a line about the last batches, such as "12.3 batches/s · waiting 4 % · 12.3 MB/s · slowest: exchange_rows".

    MB/s are the bytes that this rank received from others in the epoch. The slowest stage is the one in which the thread of the pipeline spent most time.
    The line suits ``set_postfix_str`` of tqdm and a task of rich. It takes microseconds, so every step may ask for it.

    Args:
        loader: a loader of this package.
    """
    found = loader.metrics()

    def number(name: str) -> float:
        return found.get(f"{RECENT}{name}", found.get(name, 0.0))

    rate, seconds = number("batches_per_second"), found.get("seconds", 0.0)
    if not rate:
        return "no batch yet"
    words = [
        f"{rate:,.0f} batches/s" if rate >= 100 else f"{rate:.3g} batches/s",
        f"waiting {number('wait.share'):.0%}".replace("%", " %"),
    ]
    received = found.get("bytes.received", 0.0)
    if received and seconds:
        words.append(f"{received / seconds / 1e6:,.1f} MB/s")
    stages = {
        key.split(".")[1]: spent
        for key, spent in found.items()
        if key.startswith("stage.") and key.endswith(".seconds")
    }
    if any(stages.values()):
        words.append(f"slowest: {max(stages, key=lambda name: stages[name])}")
    return " · ".join(words)
