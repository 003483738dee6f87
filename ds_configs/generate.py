"""Writes the translation of every YAML in examples/ to ds_configs/, or compares it.

Run as `python ds_configs/generate.py [--check]`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hybrid5d.plan.convert import translate
from hybrid5d.plan.outputs import ACCELERATE, DS_CONFIG, LAYOUT, plan_files, write_files

REPO = Path(__file__).resolve().parent.parent
TARGET = REPO / "ds_configs"
KEPT = (DS_CONFIG, ACCELERATE, LAYOUT)


def sources() -> list[Path]:
    """Runs in examples/, relative to the repository; base_*.yaml are parents, not runs."""
    found = [*REPO.glob("examples/*.yaml"), *REPO.glob("examples/rlinf/*.yaml")]
    return sorted(p.relative_to(REPO) for p in found if not p.name.startswith("base_"))


def translations() -> dict[Path, dict[str, str]]:
    """Folder under ds_configs/ -> file name -> content."""
    os.chdir(REPO)  # model folders in examples are relative to the repository
    result = {}
    for source in sources():
        translation = translate(source)
        if [e.key for e in translation.errors] == ["world_size"] and translation.plan is not None:
            layout = translation.plan.layout  # `actor: all` on fewer than a node's 8 GPUs: as many as fit
            unit = layout.tp * layout.pp * layout.cp
            translation = translate(source, world_size=8 // unit * unit or unit)
        if translation.errors or translation.plan is None:
            raise SystemExit("\n".join(f"{source}: {e}" for e in translation.errors))
        folder = source.relative_to("examples").with_suffix("")
        files = plan_files(translation.plan, Path("ds_configs") / folder)
        result[folder] = {name: files[name] for name in KEPT}
    return result


def differences() -> list[str]:
    """What is out of date, one line each."""
    lines = []
    wanted = translations()
    for folder, files in wanted.items():
        for name, text in files.items():
            path = TARGET / folder / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                lines.append(f"{path.relative_to(REPO)} is out of date: run make ds-configs")
    kept = {TARGET / folder / name for folder, files in wanted.items() for name in files}
    stale = [p for name in KEPT for p in TARGET.rglob(name) if p not in kept]
    return lines + [f"{p.relative_to(REPO)} belongs to no example: remove it" for p in sorted(stale)]


def main() -> int:
    """Write, or with --check compare."""
    if "--check" in sys.argv[1:]:
        lines = differences()
        print("\n".join(lines) if lines else "ds_configs/ is up to date")
        return 1 if lines else 0
    for folder, files in translations().items():
        write_files(TARGET / folder, files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
