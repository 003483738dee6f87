"""One RL step on rollouts: log-probs, values, advantages, then `n_minibatches` optimizer steps of actor and critic.

Every rank passes the same rows. Statistics are of all of them, computed once before they are cut into minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybrid5d.data.build import loader_options
from hybrid5d.data.loader import deal, dummy_document
from hybrid5d.data.options import LoaderOptions
from hybrid5d.data.order import epoch_order
from hybrid5d.data.types import IGNORE_INDEX, Document, StepBatch
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.objective import Objective
from hybrid5d.engine.results import BatchResult, StepResult
from hybrid5d.engine.step import MEMORY
from hybrid5d.rl.advantages import compute_advantages
from hybrid5d.rl.losses import explained_variance
from hybrid5d.rl.objective import nothing, policy_objective, value_objective
from hybrid5d.rl.rollouts import Rollout

SAME = 1.001  # a ratio that rounding alone does not reach where old and current weights are the same


def needs_reference(algorithm: object) -> bool:
    """Whether an RL step compares with the start weights."""
    return bool(getattr(algorithm, "kl_beta", 0.0)) or bool(getattr(algorithm, "reinpp_kl_beta", 0.0))


class PolicyUpdate:
    """The optimizer steps of RL steps, of the actor and of `engine.critic` where there is one.

    `engine.keep_reference()` was called where the algorithm needs a reference.
    """

    def __init__(self, engine: Engine):
        self.engine, config = engine, engine.plan.config
        self.algorithm, self.seed = config.algorithm, config.actor.seed
        self.temperature = config.algorithm.sampling_params.temperature
        self.options = loader_options(engine.plan, engine.ctx.dp.rank)
        self.critic = Critic(engine.critic) if engine.critic is not None else None

    def run(self, rows: Sequence[Rollout], rl_step: int) -> Iterator[StepResult]:
        """The optimizer steps of one RL step (0-based), each done when it is yielded. Collective over the world."""
        documents, valued = self.documents(rows)
        total = sum(int(row.mask.sum()) for row in rows)
        seen = {**_about(rows), "rl_step": float(rl_step + 1)}
        a = self.algorithm
        waits = self.critic is not None and rl_step < a.critic_warmup_steps
        order = epoch_order(len(rows), seed=self.seed, epoch=rl_step, shuffle=a.shuffle_rollout)
        for i, places in enumerate(np.array_split(order, a.n_minibatches)):
            own = sum(int(rows[p].mask.sum()) for p in places)
            factor = own / max(total, 1) if a.use_valid_token_scale else 1.0
            objective = policy_objective(a, temperature=self.temperature, factor=factor)
            batch = minibatch([documents[p] for p in places], rl_step, self.options)
            if waits:  # nothing of the actor moves
                result = StepResult(**vars(self.engine.eval_batch(batch, objective)), grad_norm=0.0, lr=0.0)
            else:
                result = self._update(batch, objective, first=i == 0)
            if self.critic is not None:
                result = self.critic.update([valued[p] for p in places], rl_step, result)
            yield replace(result, metrics={**result.metrics, **seen})

    def _update(self, batch: StepBatch, objective: Objective, first: bool) -> StepResult:
        """One optimizer step; its gradient is 0 where the mean ratio of all its tokens is too large (R14)."""
        stop = self.algorithm.early_stop_imp_ratio
        ceiling = self.algorithm.clip_log_ratio_max
        current = first and self.algorithm.recompute_logprobs
        impossible = stop is None or (current and stop > SAME) or (ceiling is not None and np.exp(ceiling) <= stop)
        if impossible or stop is None:
            return self.engine.train_batch(batch, objective)
        asked = self.engine.eval_batch(batch, objective)
        stopped = not asked.metrics["ratio"] <= stop
        result = self.engine.train_batch(batch, nothing(objective) if stopped else objective)
        return replace(result, metrics={**asked.metrics, **result.metrics, "early_stopped": float(stopped)})

    def documents(self, rows: Sequence[Rollout]) -> tuple[list[Document], list[Document]]:
        """The rows with the columns that the actor's loss needs, and with those of the critic's ([] without one).

        Both in the order of `rows`. Collective over the world.
        """
        a, mask = self.algorithm, padded([row.mask for row in rows]).bool()
        ours = self._logprobs(rows, False) if a.recompute_logprobs else None
        theirs = [row.logprobs for row in rows]
        old = ours if ours is not None else [x for x in theirs if x is not None]
        ref = self._logprobs(rows, True) if needs_reference(a) else None
        values = None if self.critic is None else self.critic.values(rows)
        advantages, returns = self._advantages(rows, mask, old, ref, values)
        documents = []
        for i, row in enumerate(rows):
            columns = {"advantages": advantages[i, : len(row.response_ids)].numpy(), "old_logprobs": old[i]}
            if ref is not None and a.kl_beta:
                columns["ref_logprobs"] = ref[i]
            rollout = theirs[i]
            if a.importance_sampling_fix and rollout is not None:
                columns["rollout_logprobs"] = rollout
            if a.loss_agg_func == "seq-mean-token-mean":
                columns["loss_weight"] = np.full(len(row.mask), 1 / max(int(row.mask.sum()), 1), np.float32)
            documents.append(row.document(i, **columns))
        if values is None or returns is None:
            return documents, []
        goals = [x[: len(row.response_ids)].numpy() for x, row in zip(returns, rows)]
        return documents, [row.document(i, returns=goals[i], old_values=values[i]) for i, row in enumerate(rows)]

    def _logprobs(self, rows: Sequence[Rollout], reference: bool) -> list[np.ndarray]:
        plain = [row.document(i) for i, row in enumerate(rows)]
        size = self.algorithm.logprob_forward_micro_batch_size
        found = self.engine.compute_logprobs(plain, size, self.temperature, reference)
        return [x.logprobs[row.place] for x, row in zip(found, rows)]

    def _advantages(
        self, rows: Sequence[Rollout], mask: Tensor, old: list[np.ndarray], ref: list[np.ndarray] | None,
        values: list[np.ndarray] | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        given = [row.advantages for row in rows if row.advantages is not None]
        if given:
            return padded(given), None
        return compute_advantages(
            self.algorithm,
            torch.tensor([row.reward for row in rows], dtype=torch.float64),
            mask,
            group_size=self.algorithm.group_size,
            values=None if values is None else padded(values),
            logprobs=padded(old),
            ref_logprobs=None if ref is None else padded(ref),
            trajectory_ids=torch.tensor([row.trajectory for row in rows]),
        )


class Critic:
    """PPO's value model in RL steps: values of rows before the update, and its own optimizer steps."""

    def __init__(self, engine: Engine):
        self.engine, self.algorithm = engine, engine.plan.config.algorithm
        self.options = loader_options(engine.plan, engine.ctx.dp.rank)
        self.objective = value_objective(self.algorithm.value_cliprange)

    def values(self, rows: Sequence[Rollout]) -> list[np.ndarray]:
        """The value of each response token, fp32 [t], read where its log-probability is. Collective over the world."""
        plain = [row.document(i) for i, row in enumerate(rows)]
        found = self.engine.compute_values(plain, self.algorithm.logprob_forward_micro_batch_size)
        return [x[row.place] for x, row in zip(found, rows)]

    def update(self, documents: Sequence[Document], rl_step: int, actor: StepResult) -> StepResult:
        """One optimizer step; the actor's result with what is to be said of it. Collective over the world."""
        own = self.engine.train_batch(minibatch(documents, rl_step, self.options), self.objective)
        about = {"critic_loss": own.loss, "critic_grad_norm": own.grad_norm, "critic_lr": own.lr}
        if own.loss_scale is not None:
            about |= {"critic_loss_scale": own.loss_scale}
        if own.skipped or own.loss_scale is not None:
            about |= {"critic_skipped": float(own.skipped)}
        return replace(
            actor,
            critic=own,
            step=own.step,  # the actor's steps stand still while it waits
            step_time_s=actor.step_time_s + own.step_time_s,
            peak_memory_bytes=max(actor.peak_memory_bytes, own.peak_memory_bytes),
            metrics={**actor.metrics, **about, **own.metrics, **_memory(actor, own), **_explained(documents)},
        )


def _memory(a: BatchResult, b: BatchResult) -> dict[str, float]:
    """Both engines are in one process: the larger of what each saw of it."""
    return {name: max(x, a.metrics[name]) for name, x in b.metrics.items() if name.startswith(MEMORY)}


def _explained(documents: Sequence[Document]) -> dict[str, float]:
    """How well the values foretold the returns of the documents' own tokens; nothing where the returns do not vary."""
    values, returns = (
        torch.from_numpy(np.concatenate([d.columns[name][d.labels != IGNORE_INDEX] for d in documents]))
        for name in ("old_values", "returns")
    )
    found = explained_variance(values, returns)
    return {} if math.isnan(found) else {"explained_variance": found}


def minibatch(documents: Sequence[Document], rl_step: int, options: LoaderOptions) -> StepBatch:
    """A dp rank's share of the documents of an optimizer step."""
    unit = options.micro_batch_size * options.dp
    size = -(-len(documents) // unit) * unit
    rows = [(i,) for i in range(len(documents))]
    dealt = deal(rows, lambda i: len(documents[i]), size, options)
    micro_batches = tuple(
        tuple(tuple(documents[i] for i in row) if row else (dummy_document(),) for row in mb) for mb in dealt
    )
    return StepBatch(micro_batches, tuple(d.row_id for d in documents), rl_step)


def padded(rows: Sequence[np.ndarray]) -> Tensor:
    """[B, T] of ragged rows, 0 where they end."""
    width = max(map(len, rows), default=0)
    return torch.from_numpy(np.stack([np.pad(row.astype(np.float32), (0, width - len(row))) for row in rows]))


def _about(rows: Sequence[Rollout]) -> dict[str, float]:
    """What a line of metrics says of the RL step's rows."""
    rewards = np.array([row.reward for row in rows])
    lengths = np.array([len(row.response_ids) for row in rows])
    return {
        "reward_mean": float(rewards.mean()), "reward_std": float(rewards.std()),
        "response_length": float(lengths.mean()), "response_length_max": float(lengths.max()),
        "cut_responses": float(sum(not row.finished for row in rows)),
    }  # fmt: skip
