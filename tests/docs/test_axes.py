"""The tables of docs/axes are what plan and the README say, and the counts are the closed forms of the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid5d.plan.traffic import layer_traffic
from tests.docs.axes import MEASURED, PAGES, fresh, job

HIDDEN = 8192 * 4096 * 2  # bytes of one row's hidden states in bf16


@pytest.mark.parametrize("page", MEASURED)
def test_the_page_is_current(page: str) -> None:
    assert (PAGES / f"{page}.md").read_text(encoding="utf-8") == fresh(page), "run make axes-doc"


def test_there_is_a_page_for_each_axis() -> None:
    assert {p.stem for p in PAGES.glob("*.md")} == set(MEASURED)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_of_a_layer_are_megatrons(n: int) -> None:
    """Korthikanti et al. 2022: 4 all-reduces a layer; with SP 4 gathers and 4 scatters, and 2 gathers again."""
    plain, cut = layer_traffic(job(tp=n)), layer_traffic(replace(job(tp=n), sp=True))
    part = (n - 1) / n * HIDDEN
    assert plain.tp_forward.sent == plain.tp_backward.sent == pytest.approx(2 * 2 * part)
    assert cut.tp_forward.sent == pytest.approx(4 * part) and cut.tp_backward.sent == pytest.approx(6 * part)
