"""The training loop: batches in, steps, evaluations, checkpoints, and at the end a Hugging Face folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybrid5d.checkpoint.manifest import CRITIC, Resume, resolve_resume
from hybrid5d.checkpoint.retention import prune
from hybrid5d.checkpoint.save import Save
from hybrid5d.config.schema import NO_CRITIC
from hybrid5d.data.loader import EvalLoader, Loader
from hybrid5d.engine.results import StepResult
from hybrid5d.errors import EXIT_FAILED, EXIT_STOPPED, CheckpointError, DamagedCheckpoint, HybridError
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.parallel.collectives import max_scalars
from hybrid5d.train.metrics import Console, JsonLines, Tracker, duration, open_trackers, step_record
from hybrid5d.train.requests import Request, Requests
from hybrid5d.train.run_folder import CHECKPOINTS, EVALS, HF, METRICS, RunFolder
from hybrid5d.train.tracing import Tracer

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine

MOST_SKIPPED = 10  # steps in a row that `runner.on_nonfinite: skip` takes for bad luck
DATA, RL_STEP = "data", "rl_step"  # of a checkpoint's state: the loader's identity, RL steps done


class Source(Protocol):
    """What a run's steps are made of: a loader, or the rollouts and prompts of an RL run."""

    @property
    def total_steps(self) -> int | None: ...
    def describe(self) -> str: ...
    def identity(self) -> dict[str, int | str | bool]: ...


def _finite(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)


class TrainingError(HybridError):
    """Training cannot go on: the numbers are no longer finite."""


@dataclass(frozen=True)
class Evaluation:
    """Token-mean loss over rows; None where no row has a label."""

    loss: float | None
    valid_tokens: int
    rows: int

    @property
    def perplexity(self) -> float | None:
        """exp(loss); infinite where that is too large for a float."""
        return None if self.loss is None else math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        if self.loss is None:
            return f"no label in {self.rows} rows"
        counts = f"{self.valid_tokens:,} tokens in {self.rows:,} rows"
        return f"loss {self.loss:.4f}  perplexity {self.perplexity:.3f}  {counts}"

    def since(self, before: Evaluation) -> str | None:
        """What changed since an earlier evaluation of the same rows."""
        if self.loss is None or before.loss is None:
            return None
        return (
            f"eval: loss {before.loss:.4f} -> {self.loss:.4f}, perplexity {before.perplexity:.1f} -> "
            f"{self.perplexity:.1f}, on {self.valid_tokens:,} tokens of data.val_data_paths"
        )

    def record(self, step: int) -> dict[str, Any]:
        """One line of eval.jsonl."""
        return {
            "step": step, "loss": self.loss, "perplexity": self.perplexity, "valid_tokens": self.valid_tokens,
            "rows": self.rows,
        }  # fmt: skip


def evaluate(engine: Engine, loader: EvalLoader, left: Callable[[], bool] = lambda: False) -> Evaluation | None:
    """Token-mean loss over every row of `loader`, each once. Nothing is changed. Collective over the world.

    `left`: asked before each batch, the same answer on every rank; True ends the evaluation without a result.
    """
    total, valid, rows = 0.0, 0, 0
    for batch in loader:
        if left():
            return None
        result = engine.eval_batch(batch)
        total, valid = total + result.loss * result.valid_tokens, valid + result.valid_tokens
        rows += len(batch.row_ids)
    return Evaluation(total / valid if valid else None, valid, rows)


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run went on from (None: it starts), and what the user should know of it."""

    source: Path | None = None
    notices: tuple[str, ...] = ()
    step: int = 0  # what the checkpoint's folder counts: optimizer steps, RL steps of an RL run
    state: Mapping[str, Any] = field(default_factory=dict)


def resume(engine: Engine, folder: RunFolder, loader: Source | None = None) -> Resumed:
    """Load the checkpoint that `runner.resume_dir` names; `auto` is the newest whole one of this run, if it has any.

    Collective over the world. Checkpoints of this folder that are newer than the one loaded go aside where `loader` is
    given (a run that trains on), so that the next `auto` cannot take up what this run left behind.

    Raises:
        CheckpointError: a path that is not a whole checkpoint, none of the run's is whole, or it does not fit.
    """
    axis, asked, damaged = world_axis(), engine.plan.config.runner.resume_dir, list[Path]()
    while True:
        # Decided once: a shared file system may show another host another state of the folder.
        mine = together(axis, lambda: resolve_resume(asked, folder / CHECKPOINTS, damaged) if axis.rank == 0 else None)
        found: Resume = gather_objects(mine, axis)[0]
        if found.source is None:
            return Resumed()
        try:
            state = engine.load_checkpoint(found.source)
            break
        except DamagedCheckpoint:
            if asked != "auto":
                raise
            damaged.append(found.source)
    notices = list(found.passed_over)
    step = int(state.get(RL_STEP, engine.global_step))
    if loader is not None:
        notices += together(axis, lambda: folder.keep_later(step) if axis.rank == 0 else [])
        notices += _differing_rows(loader, state.get(DATA), step)
        if engine.critic is None and (critic := found.source.parent / CRITIC).is_dir():
            notices.append(f"{critic} is not loaded, and no later checkpoint holds it: {NO_CRITIC}")
    return Resumed(found.source, tuple(notices), step, state)


def _differing_rows(loader: Source, saved: Any, step: int) -> list[str]:
    if not isinstance(saved, dict):  # a loop that is not ours may have saved something else
        return []
    now = loader.identity()
    changes = [f"{n}={now[n]} (was {old})" for n, old in saved.items() if n in now and now[n] != old]
    if not changes:
        return []
    text = f"rows differ from those that the checkpoint was made with: {', '.join(changes)}"
    return [f"{text}; step {step + 1} takes its place in the new order"]


@dataclass(frozen=True)
class Saving:
    """A save that is on its way, of a step.

    Attributes:
        begun, blocked: when, and for how many seconds training stood still.
    """

    save: Save
    step: int
    begun: float
    blocked: float


class Trainer:
    """Runs one training to its end. Every rank has one; rank 0 writes and prints.

    Args:
        note: told what happens now ("step 3"), for messages of failures.
        requests: what signals ask; answered between steps, and between the batches of an evaluation.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Source,
        folder: RunFolder,
        *,
        eval_loader: EvalLoader | None = None,
        note: Callable[[str], None] = lambda where: None,
        requests: Requests | None = None,
    ):
        self.engine, self.loader, self.eval_loader, self.folder, self.note = engine, loader, eval_loader, folder, note
        self.requests = requests or Requests()
        self.first = engine.ctx.rank == 0
        self.runner = engine.plan.config.runner
        self.console = Console(self.first, loader.total_steps)
        self.start_step = engine.global_step
        self.tracer = Tracer(engine, folder, self.console)
        self._saved_at: int | None = self.start_step or None
        self._saving: Saving | None = None
        self._skipped = 0  # steps in a row that were not finite
        self._evaluations: list[Evaluation] = []
        self._metrics: JsonLines | None = None
        self._evals: JsonLines | None = None
        self._trackers: list[Tracker] = []

    def run(self) -> dict[str, Any]:
        """Train until `max_steps` or `max_epochs`, or till a stop is asked; returns what result.json says.

        Raises:
            TrainingError: loss or norm is not finite. DataError, CheckpointError: as they occur.
        """
        started, last = time.perf_counter(), None
        self._open()
        try:
            step, total = self.start_step, self.loader.total_steps
            self.requests.answered = True
            if self.runner.check_replicas_every > 0:
                self._check_replicas()
            self.tracer.begin(step)
            if step == 0 and total != 0 and self._evaluates:
                self.evaluate()
            request = self._answer()
            while request < Request.STOP and (total is None or step < total):
                last = self._step(step)
                step += 1
                request = self._answer()
            self.tracer.finish()
            ended = total is not None and step >= total
            result = self._end(last, time.perf_counter() - started) if ended else self._stopped(request, last)
        except Exception as exc:
            self._settle_after(exc)
            raise
        finally:
            self._close()
        return result

    def _open(self) -> None:
        if not self.first:
            return
        self.folder.open_metrics(self.start_step)
        self._metrics, self._evals = JsonLines(self.folder / METRICS), JsonLines(self.folder / EVALS)
        self._trackers = open_trackers(self.engine.plan.config, self.folder.path)

    def _close(self) -> None:
        for sink in (self._metrics, self._evals, *self._trackers):
            if sink is not None:
                sink.close()

    def _step(self, step: int) -> StepResult:
        result = self._train(step)
        done, every = self.done, self.runner.check_replicas_every
        saves = self.runner.save_interval > 0 and done % self.runner.save_interval == 0
        if every > 0 and (saves or done % every == 0):
            self._check_replicas()
        if self._evaluates and done % self.runner.val_check_interval == 0:
            self.evaluate()
        if saves:
            self._save()
        return result

    def _check_replicas(self) -> None:
        self.note(f"comparison of copies after step {self.done}")
        if found := self.engine.replica_faults():
            lines = "\n".join(f"  {line}" for line in found)
            raise TrainingError(
                f"after step {self.done} copies that must be equal differ (runner.check_replicas_every):\n{lines}\n"
                f"The last good state is {self._last_good()}. Fix: resume from it (runner.resume_dir), on other "
                "machines where this comes again"
            )

    def _train(self, step: int) -> StepResult:
        assert isinstance(self.loader, Loader)
        self.note(f"step {step + 1}")
        batch = self.loader.step(step)
        result = self.tracer.train_batch(step + 1, batch)
        self._log(result)
        self.console.step(result)
        return result

    def _log(self, result: StepResult) -> None:
        """A line of metrics.jsonl; numbers that are not finite end the run, or are said: `runner.on_nonfinite`."""
        record = step_record(result)
        if self._metrics is not None:
            self._metrics.write(record)
        self._track(result.step, "train", record)
        models = [("actor", result, self.engine.plan.precision)]
        if result.critic is not None and self.engine.critic is not None:
            models.append(("critic", result.critic, self.engine.critic.plan.precision))
        lost = [
            (name, of) for name, of, precision in models
            if not (_finite(of) or (of.skipped and precision.adapts(of.loss_scale)))
        ]  # fmt: skip
        if not lost:
            self._skipped = 0
            return
        numbers = "; ".join(
            f"{name}: loss {of.loss}, gradient norm {of.grad_norm}{f', {of.origin}' if of.origin else ''}"
            for name, of in lost
        )
        self._skipped += 1
        if self.runner.on_nonfinite == "skip" and all(of.skipped for _, of in lost) and self._skipped < MOST_SKIPPED:
            self.console.say(f"notice: step {result.step} is skipped, nothing of the model changed: {numbers}")
            return
        rates = " and ".join(f"{name}.optim.lr" for name, _ in lost)
        again = f", the {self._skipped}th such step in a row" if self._skipped > 1 else ""
        raise TrainingError(
            f"step {result.step}{again}: {numbers}; the last good state is {self._last_good()}. "
            f"Fix: a lower {rates}, a longer warm-up, or other data"
        )

    @property
    def done(self) -> int:
        """Steps done."""
        return self.engine.global_step

    def _agree(self, mine: Request) -> tuple[Request, bool]:
        """The most that any rank was asked, and whether one still writes a save. Collective (one maximum)."""
        busy = self._saving is not None and self._saving.save.busy
        asked, writing = max_scalars([float(mine), float(busy)], world_axis(), self.engine.device)
        return Request(int(asked)), bool(writing)

    def _answer(self) -> Request:
        """Agree on what signals ask, and save; take note of a save that was written. Collective over the world."""
        mine = self.requests.asked
        request, writing = self._agree(mine)
        self.requests.take(mine)
        if request >= Request.STOP:
            self._settle()
        elif self._saving is not None and not writing:
            self._advance(self._saving)
        step = self.done
        if request is not Request.NOTHING and step and step not in (self._saved_at, self._saving and self._saving.step):
            self._save(last=request >= Request.STOP)
        return request

    def _stopped(self, request: Request, last: StepResult | None) -> dict[str, Any]:
        """A run that ends before its end: what result.json says of it. Everything is saved."""
        step = self.done
        where = self._checkpoint_of(step)
        why, code = ("as asked", EXIT_STOPPED) if request is Request.STOP else ("without its launcher", EXIT_FAILED)
        saved = f"{step}; all of it is in {where}: runner.resume_dir=auto goes on" if where else "0; nothing to save"
        self.console.say(f"stopped {why} after step {saved}")
        return {"exit_code": code, "steps": step, "loss": last.loss if last else None, "checkpoint": where}

    def _checkpoint_of(self, step: int) -> str | None:
        return str(self.folder / CHECKPOINTS / f"global_step_{step}") if self._saved_at == step else None

    @property
    def _evaluates(self) -> bool:
        return self.eval_loader is not None and self.runner.val_check_interval > 0

    def evaluate(self) -> Evaluation | None:
        """Loss over `data.val_data_paths`, if there are any."""
        if self.eval_loader is None:
            return None
        step = self.done

        def left() -> bool:
            self.note(f"evaluation after step {step}")  # each batch is progress
            return self._agree(self.requests.asked)[0] >= Request.STOP

        found = evaluate(self.engine, self.eval_loader, left)
        if found is None:
            return None
        if self._evals is not None:
            self._evals.write(found.record(step))
        self._track(step, "eval", {"loss": found.loss, "perplexity": found.perplexity})
        self._evaluations.append(found)
        self.console.say(f"eval {f'after step {step}' if step else 'before training'}: {found}")
        return found

    def _track(self, step: int, group: str, record: dict[str, Any]) -> None:
        values = {f"{group}/{k}": float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        for tracker in self._trackers:
            tracker.log(step, values)

    def _save(self, last: bool = False) -> None:
        """Save, or begin to where `runner.async_save` says so; one that is still written is waited for.

        Raises:
            CheckpointError: it cannot be written, on every rank; with `runner.on_save_error: continue` only where
                nothing comes after it.
        """
        self._settle()
        step, begun, background = self.done, time.perf_counter(), self.runner.async_save and not last
        self.note(f"checkpoint after step {step}")
        state = {DATA: self.loader.identity(), **self._state()}
        try:
            save = self.engine.begin_save(self.folder / CHECKPOINTS, state, step, background)
        except CheckpointError as exc:
            self._not_saved(step, exc, last)
            return
        self._saving = Saving(save, step, begun, time.perf_counter() - begun)
        if not background:
            self._settle(last)

    def _settle(self, last: bool = False) -> None:
        """Wait until a save that was begun is whole. Collective over the world; raises as `_save` does."""
        saving, begun, waited = self._saving, time.perf_counter(), False
        while self._saving is not None:
            self.note(f"checkpoint after step {self._saving.step}")
            waited |= self._saving.save.busy
            self._advance(self._saving, last)
        if saving is not None and waited:
            seconds = time.perf_counter() - begun
            self.console.say(f"waited {seconds:.1f} s for the checkpoint of step {saving.step} to be written")

    def _settle_after(self, exc: Exception) -> None:
        """What all ranks raise together leaves time for a save that was begun; another rank is not waited for."""
        if isinstance(exc, TrainingError | CheckpointError) or world_axis().size == 1:
            try:
                self._settle()
            except CheckpointError as failure:
                self.console.say(f"notice: {failure}")

    def _advance(self, saving: Saving, last: bool = False) -> None:
        """Go on with a save of which no rank writes anything now, or wait till then. Collective over the world."""
        try:
            saved = saving.save.advance()
        except CheckpointError as exc:
            self._saving = None
            self._not_saved(saving.step, exc, last)
            return
        if saved is None:
            return
        self._saving, self._saved_at = None, saving.step
        self.console.say(f"checkpoint: {saved.path}")
        seconds = {"seconds": time.perf_counter() - saving.begun, "blocked_seconds": saving.blocked}
        self._track(saving.step, "save", {**seconds, "bytes": saved.bytes})
        if self.first and self.runner.keep_last is not None:
            try:
                prune(saved.path, self.runner.keep_last, self.runner.keep_every)
            except (OSError, CheckpointError) as exc:  # the save is whole: one rank must not end the run for the rest
                self.console.say(f"notice: older checkpoints stay: {exc}")

    def _not_saved(self, step: int, exc: CheckpointError, last: bool) -> None:
        if last or self.runner.on_save_error == "stop":
            raise exc
        self.console.say(f"notice: step {step} is not saved, training goes on from {self._last_good()}: {exc}")

    def _last_loss(self, step: int) -> float | None:
        return self.folder.last_loss(step)

    def _state(self) -> dict[str, Any]:
        """More of a checkpoint's state."""
        return {}

    def _last_good(self) -> str:
        return f"the checkpoint of step {self._saved_at}" if self._saved_at is not None else "the start"

    def _end(self, last: StepResult | None, seconds: float) -> dict[str, Any]:
        step, axis = self.done, world_axis()
        if last is None:
            self.console.say(f"nothing to do: the run is at step {step} of {self.loader.total_steps}")
            earlier = gather_objects(self.folder.earlier_result(step) if self.first else None, axis)[0]
            if earlier is not None or step == 0:
                return earlier or {"exit_code": 0, "steps": 0, "loss": None, "seconds": 0.0}
        loss = last.loss if last else gather_objects(self._last_loss(step) if self.first else None, axis)[0]
        result: dict[str, Any] = {"exit_code": 0, "steps": step, "loss": loss, "seconds": round(seconds, 3)}
        if self._evaluates and (last is None or step % self.runner.val_check_interval):
            self.evaluate()
        if self._evaluations:
            result["eval_loss"] = self._evaluations[-1].loss
        self._settle()
        if self.runner.save_interval > 0:
            if self._saved_at != step:
                self._save(last=True)
            self.note("export")
            result["hf"] = str(self.engine.export_hf(self.folder / HF, force=True))
            self.console.say(f"Hugging Face folder: {result['hf']}")
        if last is not None:
            self.console.say(self._summary(step, last.loss, seconds))
        return result

    def _summary(self, step: int, loss: float, seconds: float) -> str:
        rate = f" ({(step - self.start_step) / seconds:.2f} steps/s)" if seconds > 0 else ""
        line = f"done: {step} steps, loss {loss:.4f}, {duration(seconds)}{rate}"
        if len(self._evaluations) > 1 and (change := self._evaluations[-1].since(self._evaluations[0])):
            line += f"\n{change}"
        return line
