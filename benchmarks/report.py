"""benchmarks/results.json as a picture and as tables: every side beside the plain loop, axis by axis.

python benchmarks/report.py [RESULTS.json [CHART.png [PAGE.md]]]
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


# Axis -> layouts of ours and what they should reach: throughput beside the best peer of the same run, CPU-seconds
# beside the plain loop.
AIMS: dict[str, dict[str, tuple[float, float]]] = {
    "tp": {"tp2": (1.18, 1.02)},
    "sp": {"tp2+sp": (1.25, 1.06)},
    "pp": {"pp2": (1.02, 0.95), "pp2-zbv": (1.02, 0.95)},
    "cp": {"cp2": (1.08, 1.03), "cp2-a2a": (1.04, 1.03)},
    "dp": {"dp2": (1.00, 0.96)},
}
BEGIN, END = "<!-- axes: written by `make benchmarks` -->", "<!-- /axes -->"


def tables(results: dict[str, Any]) -> str:
    """One table of aims, then one for each run."""
    lines = [BEGIN, *_aims(results["runs"])]
    for run in results["runs"]:
        shape, machine = run["shape"], run["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "cores")
        lines += [
            "",
            f"{TITLES[run['axis']]}, {shape['rows']} rows of {shape['length']} tokens, peers on {run['peers_on']}, "
            f"{run['rounds']} rounds, {machine['cores']} cores, load average {run['load'][0]:.1f} before and "
            f"{run['load'][1]:.1f} after ({versions}):",
            "",
            "| side | transport | throughput | range | CPU-seconds | range | MB | page faults |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        for name, r in run["sides"].items():
            if "error" in r:
                lines.append(f"| {label(name)} | | did not run: {r['error']} | | | | | |")
                continue
            (low, high), (least, most) = r["speed_range"], r["cpu_range"]
            lines.append(
                f"| {label(name)} | {r['transport']} | {r['speed']:.3f} | {low:.2f} to {high:.2f} | {r['cpu']:.3f} "
                f"| {least:.2f} to {most:.2f} | {r['peak_mb']:,} | {r['faults']:,} |"
            )
    return "\n".join([*lines, END])


def _aims(runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| axis | hybrid5d | throughput | best peer, on gloo | ratio | aim | CPU-seconds | aim | MB | best peer's |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        sides = {name: r for name, r in run["sides"].items() if "error" not in r}
        peers = [name for name in sides if name not in LAYOUTS and name != PLAIN]
        if run["peers_on"] != "gloo" or run["shape"] != {"rows": 8, "length": 512} or not peers:
            continue
        best = max(peers, key=lambda name: sides[name]["speed"])
        for name, (speed, cpu) in AIMS[run["axis"]].items():
            r, peer = sides[name], sides[best]
            lines.append(
                f"| {TITLES[run['axis']]} | {name} | {r['speed']:.3f} | {label(best)} {peer['speed']:.3f} "
                f"| {r['speed'] / peer['speed']:.2f} | {speed:.2f} | {r['cpu']:.2f} | {cpu:.2f} "
                f"| {r['peak_mb']:,} | {min(sides[p]['peak_mb'] for p in peers):,} |"
            )
    return lines


def write(results: dict[str, Any], page: Path) -> None:
    """Put the tables into a page, between their marks."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(before + tables(results) + rest.split(END, 1)[1])


def main(words: list[str]) -> None:
    """Draw and write."""
    root = Path(__file__).parents[1]
    usual = ("benchmarks/results.json", "docs/axes.png", "docs/performance.md")
    source, chart, page = [*map(Path, words), *(root / name for name in usual[len(words) :])]
    results = json.loads(source.read_text())
    draw(results, chart, {"rows": 8, "length": 512})
    write(results, page)


if __name__ == "__main__":
    main(sys.argv[1:])
