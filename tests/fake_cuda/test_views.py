"""Every one-rank view on CUDA tensors without data stays within the bounds that docs/gpu.md writes down."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.fake_cuda.load import build
from tests.launch_kit import REPO

pytestmark = pytest.mark.full  # 40 s of one core
ROW = re.compile(r"^\| `([^`]+)` \| (\d+) \| (\d+) \| (.*) \|$", re.MULTILINE)
NAMES = {"allreduce_": "all-reduce", "_reduce_scatter_base_": "reduce-scatter", "_allgather_base_": "all-gather",
         "send": "send"}  # fmt: skip
BOUNDS = {
    view: (int(launches), int(copies), words)
    for view, launches, copies, words in ROW.findall((REPO / "docs/gpu.md").read_text(encoding="utf-8"))
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    shim = build(tmp_path_factory.mktemp("shim") / "shim.so")
    if shim is None:
        pytest.skip("no C++ compiler")
    words = [sys.executable, "-W", "ignore", "-m", "tests.fake_cuda.views", str(shim)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPO, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_table_is_about_these_views(counted: dict[str, Any]) -> None:
    assert set(counted) == set(BOUNDS) and len(BOUNDS) >= 24


@pytest.mark.parametrize("view", BOUNDS)
def test_view(counted: dict[str, Any], view: str) -> None:
    """No mixture of devices, no value read, no factor in 16 bits; copies and launches within the table's bounds."""
    found, (launches, copies, words) = counted[view], BOUNDS[view]
    assert "error" not in found, found.get("error", "")[-2000:]
    assert found["reads"] == 0
    assert found["scalars"] == [], "CUDA would round the scalar to 16 bits"
    assert found["copies"] <= copies <= 1
    assert found["launches_per_layer"] <= launches <= found["launches_per_layer"] + 1, "the bound is what was counted"
    sent = {NAMES[k]: v // 2 for k, v in found["collectives"].items() if k in NAMES}
    assert ", ".join(f"{n} {name}" for name, n in sorted(sent.items())) == words.replace("-", "", words == "-")


def test_launches_do_not_grow_with_documents(counted: dict[str, Any]) -> None:
    """64 documents against one: at most 1.1 times, with windows, on rings, with and without flash-attn's package."""
    packed = [v for v in BOUNDS if "documents=" in v]
    assert len(packed) >= 10
    for view in packed:
        plain = re.sub(r" ?documents=\d+ ?", " ", view).strip() or "one"
        for word in ("rl=True", "dtype=fp16"):
            plain = plain if plain in counted else plain.replace(word, "").strip() or "one"
        if plain in counted:  # else no view of one document is like it
            assert counted[view]["launches_per_layer"] <= 1.1 * counted[plain]["launches_per_layer"], view
