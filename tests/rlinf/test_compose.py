"""Composition equals Hydra's: `hydra_cases.json` holds what Hydra 1.3 (version_base 1.1) made of each set of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.rlinf.compose import Composer

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "hydra_cases.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_composition_equals_hydras(name: str, tmp_path: Path) -> None:
    for file, text in CASES[name]["files"].items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    composer = Composer(tmp_path / "main.yaml")
    assert composer.compose() == CASES[name]["wanted"]
    assert not composer.errors
