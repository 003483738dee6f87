"""benchmarks/results.json as a picture: throughput of every side beside the plain loop, axis by axis.

python benchmarks/chart.py RESULTS.json CHART.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from axes import LAYOUTS, PLAIN, label

COLOURS = {"ours": "#1f5fa8", "gloo": "#b0b0b0", "shm": "#d9a441"}
TITLES = {"tp": "TP", "sp": "TP + SP", "pp": "PP", "cp": "CP", "dp": "DP, ZeRO 1", "one": "one process"}


def draw(results: dict[str, Any], path: Path, shape: dict[str, int]) -> None:
    """One panel an axis of that shape: bars of throughput, whiskers over the rounds, CPU-seconds as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    usual = [r for r in results["runs"] if r["shape"] == shape]
    axes = list(dict.fromkeys(r["axis"] for r in usual))
    panels = {axis: bars([r for r in usual if r["axis"] == axis]) for axis in axes}
    heights = [len(panel) + 1 for panel in panels.values()]
    figure, grid = plt.subplots(
        len(axes), 1, figsize=(9, 0.26 * sum(heights) + 1.4), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for ax, axis in zip(grid[:, 0], axes):
        panel = panels[axis]
        at = range(len(panel))
        speeds = [r["speed"] for _, r, _ in panel]
        spread = [[s - r["speed_range"][0] for s, (_, r, _) in zip(speeds, panel)],
                  [r["speed_range"][1] - s for s, (_, r, _) in zip(speeds, panel)]]  # fmt: skip
        ax.barh(at, speeds, xerr=spread, color=[COLOURS[kind] for _, _, kind in panel], height=0.7, ecolor="#404040")
        ax.plot([r["cpu"] for _, r, _ in panel], at, "k.", markersize=5)
        ax.set_yticks(at, [name for name, _, _ in panel], fontsize=8)
        ax.invert_yaxis()
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set_title(TITLES[axis], loc="left", fontsize=9, fontweight="bold")
        ax.set_xlim(left=0.4)
    grid[-1, 0].set_xlabel(
        "throughput, ratio to the plain loop (bars, range over rounds); CPU-seconds likewise (dots).\n"
        "blue: hybrid5d on shared memory; grey: peers on gloo; yellow: peers on hybrid5d's shared memory", fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=110)


def bars(runs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    """(name, figures, kind): ours from the first run, then peers of every run."""
    found = []
    for i, run in enumerate(runs):
        for name, r in run["sides"].items():
            if name == PLAIN or "error" in r or (name in LAYOUTS and i):
                continue
            kind = "ours" if name in LAYOUTS else run["peers_on"]
            found.append((label(name) + ("" if kind == "ours" else f" ({kind})"), r, kind))
    return found


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), {"rows": 8, "length": 512})
