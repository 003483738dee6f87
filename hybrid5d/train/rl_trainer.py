"""The loop of an RL run: rollouts in, `n_minibatches` optimizer steps, and again. Steps of the run are RL steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybrid5d.engine.engine import Engine
from hybrid5d.engine.results import StepResult
from hybrid5d.rl.rollouts import RolloutFiles
from hybrid5d.rl.step import PolicyUpdate
from hybrid5d.train.metrics import JsonLines, open_trackers
from hybrid5d.train.requests import Requests
from hybrid5d.train.run_folder import EVALS, METRICS, RunFolder
from hybrid5d.train.trainer import RL_STEP, Trainer


class RLTrainer(Trainer):
    """Runs RL steps to the end; metrics.jsonl has a line an optimizer step, checkpoints are counted in RL steps.

    Args:
        start: RL steps done by the checkpoint that the engine was loaded from.
    """

    def __init__(
        self, engine: Engine, rollouts: RolloutFiles, folder: RunFolder, *, start: int = 0,
        note: Callable[[str], None] = lambda where: None, requests: Requests | None = None,
    ):  # fmt: skip
        super().__init__(engine, rollouts, folder, note=note, requests=requests)
        self.rollouts, self.update = rollouts, PolicyUpdate(engine)
        self.start_step = self._done = start
        self._saved_at = start or None

    @property
    def done(self) -> int:
        return self._done

    def _open(self) -> None:
        if not self.first:
            return
        self.folder.open_metrics(self.engine.global_step, self.start_step)
        self._metrics, self._evals = JsonLines(self.folder / METRICS), JsonLines(self.folder / EVALS)
        self._trackers = open_trackers(self.engine.plan.config, self.folder.path)

    def _train(self, step: int) -> StepResult:
        last: StepResult | None = None
        for result in self.update.run(self.rollouts.step(step), step):
            self._log(result)
            last = result
        assert last is not None  # n_minibatches is 1 or more
        self._done = step + 1
        seen = {"reward": "reward_mean", "length": "response_length", "ratio": "ratio", "kl": "kl"}
        words = [f"{word} {last.metrics[name]:.4g}" for word, name in seen.items() if name in last.metrics]
        self.console.step(replace(last, step=step + 1))
        self.console.say("  " + "  ".join([f"optimizer step {last.step}", *words]))
        return last

    def _state(self) -> dict[str, Any]:
        return {RL_STEP: self.done}

    def _last_loss(self, step: int) -> float | None:
        return self.folder.last_loss(self.engine.global_step)
