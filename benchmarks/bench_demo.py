"""Runs the demo and records its report. Writes results/demo.json: python benchmarks/bench_demo.py"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from common import write_results

ROOT = Path(__file__).parent.parent


def main() -> None:
    subprocess.run([sys.executable, str(ROOT / "examples" / "demo.py")], check=True, cwd=ROOT)
    summary = json.loads((ROOT / "demo-data" / "report.json").read_text())
    write_results("demo", summary.pop("runs"), **summary)


if __name__ == "__main__":
    main()
