"""Does a run directory hold what a short quickstart run must leave? `python -m tests.smoke results/smoke`"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def faults(folder: Path) -> list[str]:
    """What is missing or wrong, one line each."""
    wanted = ["resolved.yaml", "ds_config.json", "layout.json", "env.json", "metrics.jsonl", "result.json"]
    wanted += ["checkpoints/latest", "hf/config.json"]
    found = [f"{folder / name} is missing" for name in wanted if not (folder / name).is_file()]
    if not list((folder / "hf").glob("*.safetensors")):
        found.append(f"{folder}/hf has no weights")
    if found:
        return found
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if [s["step"] for s in steps] != list(range(1, 21)):
        found.append(f"steps are {[s['step'] for s in steps]}, not 1 to 20")
    if not steps[-1]["loss"] < steps[0]["loss"] - 1.5:
        found.append(f"loss went from {steps[0]['loss']} to {steps[-1]['loss']} in 20 steps; it should fall by 2")
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) if lines else "smoke: ok")
    sys.exit(1 if lines else 0)
