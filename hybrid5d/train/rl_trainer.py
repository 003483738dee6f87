"""The loop of an RL run: rollouts in, `n_minibatches` optimizer steps, and again. Steps of the run are RL steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.results import StepResult
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.hf.folder import weights_fingerprint
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.rl.generate import Player
from hybrid5d.rl.prompts import PromptFiles
from hybrid5d.rl.rollouts import Rollout, RolloutFiles
from hybrid5d.rl.step import PolicyUpdate, needs_reference
from hybrid5d.train.metrics import JsonLines, open_trackers
from hybrid5d.train.requests import Requests
from hybrid5d.train.resuming import RL_STEP, Resumed
from hybrid5d.train.run_folder import EVALS, METRICS, RunFolder
from hybrid5d.train.trainer import Trainer

PROGRESS_SECONDS = 15.0
REFERENCE = "reference"  # of a checkpoint's state: which weights the KL compares with


def _reference(config: RunConfig, resumed: Resumed) -> str | None:
    """What tells the weights of the KL's reference from others; None where nothing compares with them.

    Collective over the world: rank 0 reads.
    """
    folder = config.actor.model.model_path
    if not needs_reference(config.algorithm) or folder is None:
        return None
    axis = world_axis()
    mine = together(axis, lambda: weights_fingerprint(folder) if axis.rank == 0 else None)
    now, then = gather_objects(mine, axis)[0], resumed.state.get(REFERENCE)
    if then is not None and then != now:
        rule = "the KL's reference is the model that the run began with, and this folder holds other weights now"
        raise ConfigErrors([ConfigError("actor.model.model_path", folder, rule, "put them back")])
    return now


class RLTrainer(Trainer):
    """Runs RL steps to the end; metrics.jsonl has a line an optimizer step, checkpoints are counted in RL steps.

    Args:
        resumed: the checkpoint that the engine was loaded from.

    Raises:
        ConfigErrors: a KL is asked for, and model_path holds other weights than when the run began.
    """

    def __init__(
        self, engine: Engine, rollouts: RolloutFiles | PromptFiles, folder: RunFolder, *, resumed: Resumed,
        note: Callable[[str], None] = lambda where: None, requests: Requests | None = None,
    ):  # fmt: skip
        super().__init__(engine, rollouts, folder, note=note, requests=requests)
        self.rollouts, self.update = rollouts, PolicyUpdate(engine)
        self.player = Player(engine, rollouts) if isinstance(rollouts, PromptFiles) else None
        self.start_step = self._done = resumed.step
        self._reference = _reference(engine.plan.config, resumed)
        self.validation: list[float] = []
        self._spoke = time.perf_counter()
        self.saver.saved_at = resumed.step or None

    @property
    def done(self) -> int:
        return self._done

    @property
    def _optimizer_steps(self) -> int:
        """What metrics.jsonl counts: a critic's steps, as the actor's stand still in its warm-up; else the actor's."""
        return (self.engine.critic or self.engine).global_step

    def _open(self) -> None:
        if not self.first:
            return
        self.folder.open_metrics(self._optimizer_steps, self.start_step)
        self._metrics, self._evals = JsonLines(self.folder / METRICS), JsonLines(self.folder / EVALS)
        self._trackers = open_trackers(self.engine.plan.config, self.folder.path)

    def _train(self, step: int) -> StepResult:
        last, rows = None, self._rows(step)
        self.note(f"step {step + 1}")  # rollouts are a phase of their own, with a limit of its own
        for result in self.update.run(rows, step):
            self._log(result)
            last = result
        assert last is not None  # n_minibatches is 1 or more
        self._done = step + 1
        seen = {"reward": "reward_mean", "length": "response_length", "ratio": "ratio", "kl": "kl",
                "critic loss": "critic_loss"}  # fmt: skip
        words = [f"{word} {last.metrics[name]:.4g}" for word, name in seen.items() if name in last.metrics]
        self.console.step(replace(last, step=step + 1))
        self.console.say("  " + "  ".join([f"optimizer step {last.step}", *words]))
        return last

    def _rows(self, step: int) -> list[Rollout]:
        if self.player is None:
            assert isinstance(self.rollouts, RolloutFiles)
            return self.rollouts.step(step)
        assert isinstance(self.rollouts, PromptFiles)
        self.note(f"rollouts of RL step {step + 1}")
        rows = self.player.play(self.rollouts.step(step), step, self._progress)
        if self.player.errors:
            self.console.say(f"  {len(self.player.errors)} rows without a score: {self.player.errors[0]}")
        return rows

    def _progress(self, done: int, total: int) -> None:
        """A word every few seconds of a long phase."""
        self.note(f"generation after RL step {self.done}")  # every response is progress
        now = time.perf_counter()
        if now - self._spoke > PROGRESS_SECONDS:
            self._spoke = now
            self.console.say(f"  generating: {done} of {total} responses of the first replica")

    @property
    def _evaluates(self) -> bool:
        return isinstance(self.rollouts, PromptFiles) and bool(self.rollouts.validation)

    def evaluate(self) -> None:
        """Mean reward of the greedy answers to the validation prompts."""
        assert self.player is not None  # `_evaluates`
        self.note(f"validation after RL step {self.done}")
        reward = self.player.validate(self._progress)
        record = {"step": self.done, "reward": reward, "prompts": len(self.player.files.validation)}
        if self._evals is not None:
            self._evals.write(record)
        self._track(self.done, "eval", {"reward": reward})
        self.validation.append(reward)
        self.console.say(f"validation after RL step {self.done}: mean reward {reward:.4f}")

    def _close(self) -> None:
        super()._close()
        if self.player is not None:
            self.player.close()

    def _end(self, last: StepResult | None, seconds: float) -> dict[str, Any]:
        result = super()._end(last, seconds)
        if self.validation:
            result["eval_reward"] = self.validation[-1]
        return result

    def _state(self) -> dict[str, Any]:
        return {RL_STEP: self.done, **({REFERENCE: self._reference} if self._reference is not None else {})}

    def _last_loss(self, step: int) -> float | None:
        return self.folder.last_loss(self._optimizer_steps)
