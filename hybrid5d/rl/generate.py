"""Prompts to rollouts: the engine answers, the scorer rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hybrid5d.engine.engine import Engine
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.rl.prompts import Prompt, PromptFiles, response_length
from hybrid5d.rl.rewards import RewardOptions, Scorer
from hybrid5d.rl.rollouts import Rollout
from hybrid5d.rl.sampling import Sampling


class Player:
    """Answers prompts with the engine's weights and scores the answers. Rank 0 scores; every rank knows.

    Close it at the end: it holds the scoring processes.
    """

    def __init__(self, engine: Engine, files: PromptFiles):
        config = engine.plan.config
        self.engine, self.files, self.group_size = engine, files, config.algorithm.group_size
        asked = config.algorithm.sampling_params
        self.sampling = Sampling(
            asked.do_sample, asked.temperature, asked.top_k, asked.top_p, asked.repetition_penalty,
            response_length(config), asked.min_new_tokens, files.stop_ids, asked.stop, config.actor.seed,
        )  # fmt: skip
        reward = config.reward
        options = RewardOptions(
            reward.function, reward.reward_scale, config.data.answer_key, reward.timeout, reward.num_workers,
            None if reward.on_error == "stop" else float(reward.on_error),
        )  # fmt: skip
        self.first = engine.ctx.rank == 0
        self.scorer = together(world_axis(), lambda: Scorer(options) if self.first else None)
        self.errors: tuple[str, ...] = ()

    def close(self) -> None:
        """End the scoring processes."""
        if self.scorer is not None:
            self.scorer.close()

    def play(
        self, prompts: Sequence[Prompt], step: int, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]:
        """`group_size` answers to each prompt, prompt-major. Collective over the world."""
        return self._answers(prompts, self.sampling, self.group_size, step, progress)

    def validate(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Mean reward of the greedy answers to all validation prompts. Collective over the world."""
        rows = self._answers(self.files.validation, replace(self.sampling, do_sample=False), 1, 0, progress)
        return float(np.mean([row.reward for row in rows]))

    def _answers(
        self, prompts: Sequence[Prompt], sampling: Sampling, samples: int, step: int,
        progress: Callable[[int, int], None] | None,
    ) -> list[Rollout]:  # fmt: skip
        tokenizer = self.files.tokenizer
        made = self.engine.generate(
            [p.ids for p in prompts], sampling, samples=samples, step=step, decode=tokenizer.decode, progress=progress
        )
        asked = [p for p in prompts for _ in range(samples)]

        def score() -> tuple[list[float], tuple[str, ...]] | None:
            if self.scorer is None:
                return None
            texts = [tokenizer.decode(g.tokens.tolist()) for g in made]
            found = self.scorer.score([p.text for p in asked], texts, [p.row for p in asked])
            return found.values.tolist(), found.errors

        answer = gather_objects(together(world_axis(), score), world_axis())[0]
        assert answer is not None  # rank 0 scored
        rewards, self.errors = answer
        return [
            Rollout(
                p.ids, g.tokens, np.ones(len(g.tokens), bool), reward, i // samples, i, g.logprobs, None, g.finished
            )
            for i, (p, g, reward) in enumerate(zip(asked, made, rewards, strict=True))
        ]
