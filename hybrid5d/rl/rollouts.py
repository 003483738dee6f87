"""Responses with their rewards, and the files of them (`data.type: rollouts`). Needs numpy, not torch.

A row: prompt_ids, response_ids, reward, group; where wanted response_mask (0 = not the model's own token), trajectory,
rollout_logprobs, advantages. Any generator may write them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hybrid5d.config.schema import RunConfig
from hybrid5d.data.faults import Faults
from hybrid5d.data.fields import BadRecord, FieldReport, given, keys_of, object_of
from hybrid5d.data.sources import read_records, resolve_sources
from hybrid5d.data.types import IGNORE_INDEX, Document, outside_vocabulary
from hybrid5d.errors import DataError

FIELDS = ("prompt_ids", "response_ids", "reward", "group", "response_mask", "trajectory", "rollout_logprobs",
          "advantages")  # fmt: skip


@dataclass(frozen=True)
class Rollout:
    """One response.

    Attributes:
        prompt_ids [p], response_ids [t]: int64.
        mask: bool [t], the model's own tokens.
        reward: of its trajectory.
        group, trajectory: numbers that change where another one begins.
        logprobs: fp32 [t] of the generator; None where it gave none.
        advantages: fp32 [t] given instead of computed.
        finished: False: cut at the longest response.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    mask: np.ndarray
    reward: float
    group: int = 0
    trajectory: int = 0
    logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    finished: bool = True

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def place(self) -> slice:
        """Where a document's columns hold the response's tokens: each is read where it is predicted."""
        first = len(self.prompt_ids) - 1
        return slice(first, first + len(self.response_ids))

    def document(self, row_id: int, **columns: np.ndarray) -> Document:
        """The row with its own tokens as targets; `columns` [t] of the response, 0 under the mask."""
        ids = np.concatenate([self.prompt_ids, self.response_ids]).astype(np.int64)
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        labels[self.place] = np.where(self.mask, self.response_ids, IGNORE_INDEX)
        placed = {}
        for name, values in columns.items():
            placed[name] = np.zeros(len(ids), np.float32)
            placed[name][self.place] = np.where(self.mask, values, 0.0)
        return Document(ids, labels, row_id, columns=placed)


class RolloutFiles:
    """The RL steps of files: groups in file order, `rollout_batch_size` a step; what is left over waits for nobody.

    Raises:
        DataError: every broken row with file and line; fewer groups than an RL step takes.
    """

    def __init__(self, config: RunConfig, vocab_size: int):
        self.config = config
        faults, self.notices = Faults(), list[str]()
        rows = [*self._read(faults, vocab_size)]
        groups = [*_groups(rows, config, faults)] if not faults else []
        faults.raise_if_any()
        size = config.data.rollout_batch_size or 1
        self.steps_per_epoch, left = divmod(len(groups), size)
        if not self.steps_per_epoch:
            raise DataError(f"data: {len(groups)} groups are fewer than data.rollout_batch_size={size}")
        self.groups = groups
        if left:
            self.notices.append(f"the last {left} of {len(groups)} groups fill no RL step and are left out")
        self.total_steps = bounded_steps(config, self.steps_per_epoch)

    def describe(self) -> str:
        """For the start of a run."""
        rows = sum(map(len, self.groups))
        text = f"{rows} rollouts in {len(self.groups)} groups, {self.steps_per_epoch} RL steps an epoch, in file order"
        return "\n".join([text, *(f"notice: {n}" for n in self.notices)])

    def identity(self) -> dict[str, int | str | bool]:
        """What decides which rows RL step k has."""
        digest = 0
        for row in (row for group in self.groups for row in group):
            digest = zlib.crc32(row.response_ids.tobytes(), zlib.crc32(row.prompt_ids.tobytes(), digest))
        return {
            "groups": len(self.groups), "hash of the rows": digest,
            "data.rollout_batch_size": self.config.data.rollout_batch_size or 1,
        }  # fmt: skip

    def step(self, step: int) -> list[Rollout]:
        """The rows of an RL step (0-based)."""
        size, place = self.config.data.rollout_batch_size or 1, step % self.steps_per_epoch
        return [row for group in self.groups[place * size : (place + 1) * size] for row in group]

    def _read(self, faults: Faults, vocab_size: int) -> Iterator[tuple[Path, int, Any, Any, Rollout]]:
        for source in resolve_sources(self.config.data.train_data_paths or (), "tokens", faults):
            report = FieldReport()
            for line, record in read_records(source, faults):
                try:
                    row = _parse(object_of(record), self.config, vocab_size)
                    report.unread(line, [n for n in record if n not in FIELDS and given(record, n)])
                    yield source.path, line, record.get("group"), record.get("trajectory"), row
                except BadRecord as e:
                    faults.add(source.path, line, str(e))
            self.notices += [f"{source.path}: {text}" for text in report.notices()]


def bounded_steps(config: RunConfig, steps_per_epoch: int) -> int | None:
    """RL steps that `max_steps` and `max_epochs` allow; None: neither is set."""
    bounds = [config.runner.max_steps] if config.runner.max_steps >= 0 else []
    bounds += [config.runner.max_epochs * steps_per_epoch] if config.runner.max_epochs >= 0 else []
    return min(bounds) if bounds else None


def _parse(record: dict[str, Any], config: RunConfig, vocab_size: int) -> Rollout:
    """One row; group and trajectory are numbered later. Raises BadRecord."""
    prompt, response = (_ids(record, name, vocab_size) for name in ("prompt_ids", "response_ids"))
    size, longest = len(response), config.row_length
    if longest is not None and len(prompt) + size > longest:
        raise BadRecord(f"{len(prompt)} prompt_ids and {size} response_ids exceed seq_length={longest}")
    reward = record.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise BadRecord(f"reward={reward!r} is no finite number")
    mask = np.ones(size, bool)
    if given(record, "response_mask"):
        values = record["response_mask"]
        if not isinstance(values, list) or len(values) != size or any(v not in (0, 1) for v in values):
            raise BadRecord(f"response_mask must be {size} numbers of 0 or 1, as many as response_ids")
        mask = np.array(values, bool)
    logprobs = _numbers(record, "rollout_logprobs", mask)
    a = config.algorithm
    if logprobs is None and (a.importance_sampling_fix or not a.recompute_logprobs):
        key = "importance_sampling_fix: true" if a.importance_sampling_fix else "recompute_logprobs: false"
        raise BadRecord(f"no rollout_logprobs, which algorithm.{key} needs")
    if "group" not in record and a.group_size > 1:
        raise BadRecord(f"no key 'group'; its keys: {keys_of(record)}")
    advantages = _numbers(record, "advantages", mask)
    if advantages is not None and config.has_critic:
        raise BadRecord("advantages are given, which the critic's values make (adv_type gae)")
    return Rollout(prompt, response, mask, float(reward), logprobs=logprobs, advantages=advantages)


def _ids(record: dict[str, Any], name: str, vocab_size: int) -> np.ndarray:
    values = record.get(name)
    if not isinstance(values, list) or any(type(v) is not int for v in values):
        raise BadRecord(f"{name} must be a list of integers")
    if not values:
        raise BadRecord(f"{name} is empty" + (": nothing predicts the first token" if name == "prompt_ids" else ""))
    ids = np.array(values, np.int64)
    fault = outside_vocabulary(name, ids, vocab_size)
    if fault:
        raise BadRecord(fault)
    return ids


def _numbers(record: dict[str, Any], name: str, mask: np.ndarray) -> np.ndarray | None:
    """fp32 [t], 0 under the mask whatever stands there."""
    if not given(record, name):
        return None
    values = record[name]
    if not isinstance(values, list):
        values = [values] * len(mask) if name == "advantages" else None
    if values is None or len(values) != len(mask):
        raise BadRecord(f"{name} must be {len(mask)} numbers, as many as response_ids")
    out = np.zeros(len(mask), np.float32)
    for place in np.flatnonzero(mask):
        value = values[place]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadRecord(f"{name}[{place}]={value!r} is no finite number, and the token is trained on")
        out[place] = value
    return out


def _groups(rows: Sequence[Any], config: RunConfig, faults: Faults) -> Iterator[list[Rollout]]:
    """Runs of adjacent rows with one id; each must be `group_size` trajectories (runs inside it)."""
    size, turns = config.algorithm.group_size, config.algorithm.adv_type == "grpo_dynamic"
    given_advantages = {row.advantages is not None for *_, row in rows}
    if len(given_advantages) > 1:
        path, line, *_ = next(r for r in rows if r[4].advantages is None)
        faults.add(path, line, "no advantages, which other rows have")
    trajectory = 0
    key = (lambda i: (rows[i][2],)) if size > 1 else (lambda i: (i, rows[i][2]) if rows[i][3] is None else rows[i][2:4])
    for number, (_, places) in enumerate(groupby(range(len(rows)), key)):
        run = [rows[i] for i in places]
        found: list[Rollout] = []
        count = 0
        for t, (id_, members) in enumerate(
            (k, [*m]) for k, m in groupby(enumerate(run), lambda x: x[0] if x[1][3] is None else ("t", x[1][3]))
        ):
            rewards = {row.reward for _, (*_, row) in members}
            path, line = members[0][1][:2]
            if len(members) > 1 and not turns:
                faults.add(path, line, f"trajectory {id_[1]!r} has {len(members)} rows: adv_type grpo_dynamic takes it")
            if len(rewards) > 1:
                faults.add(path, line, f"rows of trajectory {id_[1]!r} have different rewards")
            found += [replace(row, group=number, trajectory=trajectory) for _, (*_, row) in members]
            trajectory, count = trajectory + 1, t + 1
        if count != size:
            path, line, group = run[0][:3]
            what = "trajectories" if turns else "rows"
            faults.add(path, line, f"group {group!r} has {count} adjacent {what}, algorithm.group_size is {size}")
        yield found
