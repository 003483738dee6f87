"""The account of every key: where it went, or why it has no place."""

from __future__ import annotations

from typing import Any

from hybrid5d.plan.run import RunPlan


def build_report(plan: RunPlan) -> list[dict[str, Any]]:
    """One entry per input key."""
    return []
