"""The training loop: batches in, steps, evaluations, checkpoints, and at the end a Hugging Face folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid5d.checkpoint.export import Stopped
from hybrid5d.data.loader import EvalLoader, Loader
from hybrid5d.engine.results import StepResult
from hybrid5d.errors import EXIT_FAILED, EXIT_STOPPED
from hybrid5d.parallel.agree import gather_objects, world_axis
from hybrid5d.parallel.collectives import max_scalars
from hybrid5d.train.metrics import Console, JsonLines, Tracker, duration, open_trackers, step_record
from hybrid5d.train.requests import Request, Requests
from hybrid5d.train.resuming import DATA, Source
from hybrid5d.train.run_folder import CHECKPOINTS, EVALS, HF, METRICS, RunFolder
from hybrid5d.train.saver import Saver, TrainingError
from hybrid5d.train.tracing import Tracer
from hybrid5d.train.utilization import Utilization, device_hardware, memory_line

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine

MOST_SKIPPED = 10  # steps in a row that `runner.on_nonfinite: skip` takes for bad luck


def _finite(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)


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
        self.utilization = Utilization(engine.plan, device_hardware(engine.device))
        self._most_memory = 0
        self.start_step = engine.global_step
        self.tracer = Tracer(engine, folder, self.console)
        self.saver = Saver(engine, folder / CHECKPOINTS, self.console, note, self._track)
        self.saver.saved_at = self.start_step or None
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
            self.saver.settle_after(exc)
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
        self._most_memory = max(self._most_memory, result.peak_memory_bytes)
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
                f"The last good state is {self.saver.last_good}. Fix: resume from it (runner.resume_dir), on other "
                "machines where this comes again"
            )

    def _train(self, step: int) -> StepResult:
        assert isinstance(self.loader, Loader)
        self.note(f"step {step + 1}")
        batch = self.loader.step(step)
        result = self.tracer.train_batch(step + 1, batch)
        mfu = self.utilization.mfu(result)
        self._log(result, mfu)
        self.console.step(result, mfu)
        return result

    def _log(self, result: StepResult, mfu: float | None = None) -> None:
        """A line of metrics.jsonl; numbers that are not finite end the run, or are said: `runner.on_nonfinite`."""
        record = step_record(result, mfu)
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
            f"step {result.step}{again}: {numbers}; the last good state is {self.saver.last_good}. "
            f"Fix: a lower {rates}, a longer warm-up, or other data"
        )

    @property
    def done(self) -> int:
        """Steps done."""
        return self.engine.global_step

    def _agree(self, mine: Request) -> tuple[Request, bool]:
        """The most that any rank was asked, and whether one still writes a save. Collective (one maximum)."""
        asked, writing = max_scalars([float(mine), float(self.saver.busy)], world_axis(), self.engine.device)
        return Request(int(asked)), bool(writing)

    def _answer(self) -> Request:
        """Agree on what signals ask, and save; take note of a save that was written. Collective over the world."""
        mine = self.requests.asked
        request, writing = self._agree(mine)
        self.requests.take(mine)
        if request >= Request.STOP:
            self.saver.settle()
        elif not writing:
            self.saver.take_note()
        step = self.done
        if request is not Request.NOTHING and step and not self.saver.has(step):
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

    def _stops_export(self) -> bool:
        self.note("export")  # each bucket of tensors is progress
        return self._agree(self.requests.asked)[0] >= Request.STOP

    def _checkpoint_of(self, step: int) -> str | None:
        return str(self.folder / CHECKPOINTS / f"global_step_{step}") if self.saver.has(step) else None

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
        self.saver.save(self.done, {DATA: self.loader.identity(), **self._state()}, last)

    def _last_loss(self, step: int) -> float | None:
        return self.folder.last_loss(step)

    def _state(self) -> dict[str, Any]:
        """More of a checkpoint's state."""
        return {}

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
        self.saver.settle()
        if self.runner.save_interval > 0:
            if not self.saver.has(step):
                self._save(last=True)
            try:
                result["hf"] = str(self.engine.export_hf(self.folder / HF, force=True, stop=self._stops_export))
            except Stopped:
                return self._stopped(self._agree(self.requests.asked)[0], last)
            self.console.say(f"Hugging Face folder: {result['hf']}")
        if last is not None:
            self.console.say(self._summary(step, last.loss, seconds))
        return result

    def _summary(self, step: int, loss: float, seconds: float) -> str:
        rate = f" ({(step - self.start_step) / seconds:.2f} steps/s)" if seconds > 0 else ""
        line = f"done: {step} steps, loss {loss:.4f}, {duration(seconds)}{rate}"
        if len(self._evaluations) > 1 and (change := self._evaluations[-1].since(self._evaluations[0])):
            line += f"\n{change}"
        return f"{line}\n{memory_line(self.engine.plan, self._most_memory, self.engine.device)}"
