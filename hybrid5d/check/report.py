"""What a check found, for people and for scripts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hybrid5d.check.compare import Comparison, outside
from hybrid5d.check.cuts import Degrees


def trial_facts(cut: Degrees, comparison: Comparison | None, faults: Sequence[str]) -> dict[str, Any]:
    """One layout's numbers beside those of one process."""
    facts: dict[str, Any] = {"layout": str(cut), "ranks": cut.world, "equal": not faults, "faults": list(faults)}
    if comparison is None:
        return facts
    got, want, bounds = comparison.got, comparison.want, comparison.bounds
    steps = zip(got.losses, want.losses, comparison.loss_errors, got.norms, want.norms, comparison.norm_errors)
    names = ("loss", "loss_one_process", "loss_error", "grad_norm", "grad_norm_one_process", "grad_norm_error")
    facts["steps"] = [dict(zip(names, step)) for step in steps]
    facts["bounds"] = {"loss": bounds.loss, "grad_norm": bounds.norm, "gradient": bounds.grad, "weight": bounds.weight}
    facts["why"] = bounds.why
    facts["worst_gradient"], facts["worst_weight"] = map(_worst, (comparison.gradients, comparison.weights))
    facts["gradients"], facts["weights"] = len(comparison.gradients), len(comparison.weights)
    return facts


def _worst(errors: Any) -> dict[str, Any] | None:
    order = outside(errors, -1.0)  # the largest first, NaN among them
    return next(({"name": name, "error": error} for name, error in order.items()), None)


def lines(facts: dict[str, Any]) -> Iterable[str]:
    """A trial as lines of a narrow table."""
    yield f"{facts['layout']} ({facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''})"
    if "steps" not in facts:
        return
    names = ("loss", "one process", "off by", "grad norm", "one process", "off by")
    yield f"  {'step':<5}" + "".join(f"{name:>{size}}" for name, size in zip(names, (12, 13, 10) * 2))
    for i, s in enumerate(facts["steps"], 1):
        yield (
            f"  {i:<5}{s['loss']:>12.6f}{s['loss_one_process']:>13.6f}{s['loss_error']:>10.1e}"
            f"{s['grad_norm']:>12.6f}{s['grad_norm_one_process']:>13.6f}{s['grad_norm_error']:>10.1e}"
        )
    bounds = facts["bounds"]
    yield f"  {'bound':<30}{bounds['loss']:>10.0e}{bounds['grad_norm']:>35.0e}"
    for what, count, key in (("gradient", "gradients", "gradient"), ("weight", "weights", "weight")):
        if worst := facts[f"worst_{what}"]:
            yield (
                f"  worst {what} of {facts[count]}: {worst['name']}, off by {worst['error']:.1e} "
                f"(bound {bounds[key]:.0e}{', relative' if what == 'gradient' else ''})"
            )
    yield f"  {facts['why']}"
