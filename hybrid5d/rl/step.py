"""One RL step on rollouts: log-probs, advantages, then `n_minibatches` optimizer steps.

Every rank passes the same rows. Statistics are of all of them, computed once before they are cut into minibatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybrid5d.data.build import loader_options
from hybrid5d.data.loader import deal, dummy_document
from hybrid5d.data.order import epoch_order
from hybrid5d.data.types import Document, StepBatch
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.objective import Objective
from hybrid5d.engine.results import StepResult
from hybrid5d.rl.advantages import compute_advantages
from hybrid5d.rl.objective import nothing, policy_objective
from hybrid5d.rl.rollouts import Rollout

SAME = 1.001  # a ratio that rounding alone does not reach where old and current weights are the same


def needs_reference(algorithm: object) -> bool:
    """Whether an RL step compares with the start weights."""
    return bool(getattr(algorithm, "kl_beta", 0.0)) or bool(getattr(algorithm, "reinpp_kl_beta", 0.0))


class PolicyUpdate:
    """The actor's side of RL steps. `engine.keep_reference()` was called where the algorithm needs a reference."""

    def __init__(self, engine: Engine):
        self.engine, config = engine, engine.plan.config
        self.algorithm, self.seed = config.algorithm, config.actor.seed
        self.temperature = config.algorithm.sampling_params.temperature
        self.options = loader_options(engine.plan, engine.ctx.dp.rank)

    def run(self, rows: Sequence[Rollout], rl_step: int) -> Iterator[StepResult]:
        """The optimizer steps of one RL step (0-based), each done when it is yielded. Collective over the world."""
        documents = self.documents(rows)
        total = sum(int(row.mask.sum()) for row in rows)
        seen = {**_about(rows), "rl_step": float(rl_step + 1)}
        a = self.algorithm
        order = epoch_order(len(rows), seed=self.seed, epoch=rl_step, shuffle=a.shuffle_rollout)
        for i, places in enumerate(np.array_split(order, a.n_minibatches)):
            own = sum(int(rows[p].mask.sum()) for p in places)
            factor = own / max(total, 1) if a.use_valid_token_scale else 1.0
            objective = policy_objective(a, temperature=self.temperature, factor=factor)
            batch = self._batch([documents[p] for p in places], rl_step)
            result = self._update(batch, objective, first=i == 0)
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

    def documents(self, rows: Sequence[Rollout]) -> list[Document]:
        """The rows with the columns that the loss needs, in the order of `rows`. Collective over the world."""
        a, mask = self.algorithm, padded([row.mask for row in rows]).bool()
        ours = self._logprobs(rows, False) if a.recompute_logprobs else None
        theirs = [row.logprobs for row in rows]
        old = ours if ours is not None else [x for x in theirs if x is not None]
        ref = self._logprobs(rows, True) if needs_reference(a) else None
        advantages = self._advantages(rows, mask, old, ref)
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
        return documents

    def _logprobs(self, rows: Sequence[Rollout], reference: bool) -> list[np.ndarray]:
        plain = [row.document(i) for i, row in enumerate(rows)]
        size = self.algorithm.logprob_forward_micro_batch_size
        found = self.engine.compute_logprobs(plain, size, self.temperature, reference)
        return [x.logprobs[row.place] for x, row in zip(found, rows)]

    def _advantages(
        self, rows: Sequence[Rollout], mask: Tensor, old: list[np.ndarray], ref: list[np.ndarray] | None
    ) -> Tensor:
        given = [row.advantages for row in rows if row.advantages is not None]
        if given:
            return padded(given)
        advantages, _ = compute_advantages(
            self.algorithm,
            torch.tensor([row.reward for row in rows], dtype=torch.float64),
            mask,
            group_size=self.algorithm.group_size,
            logprobs=padded(old),
            ref_logprobs=None if ref is None else padded(ref),
            trajectory_ids=torch.tensor([row.trajectory for row in rows]),
        )
        return advantages

    def _batch(self, documents: Sequence[Document], rl_step: int) -> StepBatch:
        """This dp rank's share of a minibatch."""
        unit = self.options.micro_batch_size * self.options.dp
        size = -(-len(documents) // unit) * unit
        rows = [(i,) for i in range(len(documents))]
        dealt = deal(rows, lambda i: len(documents[i]), size, self.options)
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
