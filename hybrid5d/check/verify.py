"""Prove a layout: the same small training in it and in one process of transformers; where they differ, which axis."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from typing import Any

from hybrid5d.check.compare import Comparison, Trace, compare
from hybrid5d.check.cuts import Degrees
from hybrid5d.check.observe import RankRun, joined, train
from hybrid5d.check.ranks import RankFailure, run_ranks
from hybrid5d.check.reference import Recipe, hf_model, reference, save_model
from hybrid5d.check.rows import write_rows
from hybrid5d.check.shrink import STEPS, Small, alone
from hybrid5d.config.schema import RunConfig
from hybrid5d.data.build import loader_from_plan
from hybrid5d.engine.build import initialize
from hybrid5d.files import write_whole
from hybrid5d.plan.run import build_plan

SEED = 0
TIMEOUT = 600.0  # seconds that one layout may take
Prepare = Callable[[], None]  # runs in each rank before its engine is built


@dataclass(frozen=True)
class Trial:
    """One layout's training beside one process. It may not get as far as a comparison: `failure` says why."""

    cut: Degrees
    comparison: Comparison | None = None
    failure: str = ""

    @property
    def faults(self) -> list[str]:
        """What is different; empty where nothing is."""
        return [self.failure] if self.comparison is None else self.comparison.faults


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        trials: one for each layout.
        guilty: the smallest layout that still differs; None where all are equal.
        data: where the rows come from.
    """

    trials: Sequence[Trial]
    guilty: Trial | None = None
    data: str = ""

    @property
    def equal(self) -> bool:
        return self.guilty is None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes without which the difference goes away; none where one rank differs too. sp implies tp."""
        axes = () if self.guilty is None else self.guilty.cut.axes
        return tuple(a for a in axes if a != "tp" or "sp" not in axes)

    @property
    def tensor(self) -> str | None:
        """The tensor to look at first."""
        return None if self.guilty is None or self.guilty.comparison is None else self.guilty.comparison.tensor


@dataclass
class Bench:
    """The small run's folder, its model and what one process makes of it."""

    small: Small
    folder: str
    prepare: Prepare | None = None
    progress: Callable[[str], None] = lambda _: None
    done: dict[Degrees, Trial] = field(default_factory=dict)
    token_mean: Trace | None = None

    def trial(self, cut: Degrees) -> Trial:
        """Train one layout, once."""
        if cut not in self.done:
            self.progress(f"training {cut} on {cut.world} rank{'s' if cut.world > 1 else ''}")
            self.done[cut] = self._train(cut)
        return self.done[cut]

    def _train(self, cut: Degrees) -> Trial:
        tree = self.small.tree(cut, self.folder)
        try:
            got = joined(run_ranks(cut.world, train_rank, tree, cut.world, self.prepare, timeout=TIMEOUT))
            return Trial(cut, compare(got, self.wanted(tree, cut), self.small.plan.precision.dtype))
        except (RankFailure, ValueError) as exc:
            return Trial(cut, failure=str(exc))

    def wanted(self, tree: dict[str, Any], cut: Degrees) -> Trace:
        """What one process does with the same rows; with a mean over micro-batches, the layout's micro-batches."""
        if self.small.plan.config.actor.loss_normalization == "micro_batch":
            return self._reference(micro_batches(tree, cut), "micro_batch")
        if self.token_mean is None:
            self.progress("training in one process of transformers")
            self.token_mean = self._reference(rows(alone(self.small, self.folder)), "token")
        return self.token_mean

    def _reference(self, steps: Sequence[Sequence[Any]], mean: Any) -> Trace:
        optim = RunConfig.model_validate(alone(self.small, self.folder)).actor.optim
        recipe = Recipe(
            "sgd" if optim.optimizer == "sgd" else "adamw", optim.lr, optim.clip_grad, optim.weight_decay,
            optim.adam_eps, STEPS, (optim.adam_beta1, optim.adam_beta2), optim.sgd_momentum,
        )  # fmt: skip
        model = hf_model(self.small.model, SEED)
        for name, parameter in model.named_parameters():
            globs = self.small.plan.config.actor.freeze_parameters
            parameter.requires_grad_(not any(fnmatchcase(name, glob) for glob in globs))
        return reference(model, steps, recipe, mean)


def train_rank(rank: int, tree: dict[str, Any], world: int, prepare: Prepare | None) -> RankRun:
    """What each rank of a trial does."""
    if prepare is not None:
        prepare()
    plan = build_plan(RunConfig.model_validate(tree), world)
    loader = loader_from_plan(plan, plan.layout.coordinate(rank).dp)
    warnings.simplefilter("ignore", FutureWarning)  # of libraries among themselves
    with redirect_stdout(StringIO()):  # DeepSpeed prints its topology and memory
        return train(initialize(plan), loader)


def rows(tree: dict[str, Any]) -> list[list[Any]]:
    """The rows of each step, as one rank reads them."""
    plan = build_plan(RunConfig.model_validate(tree), 1)
    return [[row for micro in batch.micro_batches for row in micro] for batch in loader_from_plan(plan, 0)]


def micro_batches(tree: dict[str, Any], cut: Degrees) -> list[list[Any]]:
    """The micro-batches of each step on all dp ranks, the documents of each as one tuple."""
    plan = build_plan(RunConfig.model_validate(tree), cut.world)
    ranks = [loader_from_plan(plan, dp) for dp in range(cut.layout.dp)]
    return [
        [tuple(d for row in micro for d in row) for batch in batches for micro in batch.micro_batches]
        for batches in zip(*ranks)
    ]


def verify(
    small: Small,
    cuts: Sequence[Degrees],
    prepare: Prepare | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Train each layout; of the first that differs, find the axes that it takes.

    Args:
        prepare: module-level function that each rank calls first (tests plant faults by it).
        progress: called with a line whenever something starts.

    Raises:
        ConfigErrors: the small run itself is refused.
    """
    with tempfile.TemporaryDirectory(prefix="h5d-check-") as folder:
        model = Path(folder) / "model"
        save_model(small.model, model, SEED)
        write_whole(model / "config.json", json.dumps(small.model))  # as the user's says it, not as transformers would
        data = write_rows(small, Path(folder))
        bench = Bench(small, folder, prepare, progress)
        for cut in cuts:
            build_plan(RunConfig.model_validate(small.tree(cut, folder)), cut.world)
        trials = [bench.trial(cut) for cut in cuts]
        wrong = next((t for t in trials if t.faults), None)
        return Verdict(trials, None if wrong is None else smallest(bench, wrong), data)


def smallest(bench: Bench, wrong: Trial) -> Trial:
    """Take axes away, one after another, as long as the difference stays."""
    for axis in wrong.cut.axes:
        without = bench.trial(wrong.cut.without([axis]))
        if without.faults:
            wrong = without
    return wrong
