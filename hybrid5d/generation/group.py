"""Sequences that are decoded together: their caches, masks and positions.

All rows of a group have as many response tokens. A row's prompt is in the cache's columns from 0 on, its response in
those from `width` on, the same columns for all rows; what is between is masked. So a step writes one column, and
prompts of any lengths stand beside each other.

Legend: B rows, C columns, T columns in use, u prompts of a pass, S their padded length; q, kv, g, d as in `stage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid5d.generation.stage import Stage

_PREFILL_TOKENS = 8192  # of one pass, but for a prompt that is longer by itself
_FIRST_COLUMNS = 128  # room for this many response tokens at first, doubled when full


@dataclass(frozen=True)
class Task:
    """One response that is wanted.

    Attributes:
        number: its place among all of the call.
        prompt: int64 [n]; place: the prompt's number in the call; sample: which of its responses.
    """

    number: int
    prompt: np.ndarray
    place: int
    sample: int


class Group:
    """Rows in flight on this stage.

    Attributes:
        tasks: what each row answers; numbers: their numbers, int64 [B].
        generated: response tokens so far, of every row.
        rows: B.
    """

    def __init__(self, tasks: Sequence[Task], stage: Stage, room: int, dtype: torch.dtype, device: torch.device):
        self.tasks, self.stage, self.room, self.dtype, self.device = list(tasks), stage, room, dtype, device
        self.generated = 0
        lengths = [len(t.prompt) for t in tasks]
        self.lengths = torch.tensor(lengths, device=device)
        self.width = max(lengths)
        self.even = min(lengths) == self.width
        self.columns = self.width + min(room, _FIRST_COLUMNS)
        self.last = torch.zeros(len(tasks), dtype=torch.int64, device=device)
        self.caches = [self._empty() for _ in stage.blocks]
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def rows(self) -> int:
        return len(self.tasks)

    @property
    def numbers(self) -> np.ndarray:
        return np.array([t.number for t in self.tasks], dtype=np.int64)

    def _empty(self) -> Tensor:
        # zeros: what is masked must be finite
        return torch.zeros(self.stage.cache_shape(self.rows, self.columns), dtype=self.dtype, device=self.device)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def prompt_passes(self) -> list[PromptPass]:
        """Each prompt once, however many rows answer it; passes of a bounded number of tokens."""
        starts = [i for i, t in enumerate(self.tasks) if i == 0 or t.place != self.tasks[i - 1].place]
        runs = list(pairwise([*starts, self.rows]))
        passes: list[PromptPass] = []
        chunk: list[tuple[int, int]] = []
        longest = 0
        for a, b in runs:
            size = max(longest, len(self.tasks[a].prompt))
            if chunk and size * (len(chunk) + 1) > _PREFILL_TOKENS:
                passes.append(PromptPass(self, chunk))
                chunk, size = [], len(self.tasks[a].prompt)
            chunk.append((a, b))
            longest = size
        return [*passes, PromptPass(self, chunk)]

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Room and masks for the next column."""
        end = self.width + self.generated
        if end > self.columns:
            self._grow()
        self._masks = {}

    def _grow(self) -> None:
        used = self.columns
        self.columns = self.width + min(self.room, 2 * (used - self.width))
        for i, old in enumerate(self.caches):
            self.caches[i] = self._empty()
            self.caches[i][:, :, :, :used] = old[: self.rows, :, :, :used]

    def positions(self) -> Tensor:
        """[B] of the tokens that a step reads, those generated last."""
        return self.lengths + (self.generated - 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """`stage.Attend` of a step: one token a row; the query heads of a kv head are its g queries."""
        at = self.width + self.generated - 1
        cache = self.caches[layer]
        cache[:, 0, :, at] = k
        cache[:, 1, :, at] = v
        first = 0
        if window is not None and at + 1 - window >= self.width:
            first, window = at + 1 - window, None  # prompts are out of sight, all columns of the window are full
            mask = None
        else:
            mask = self._mask(window)
        keys, values = cache[:, 0, :, first : at + 1], cache[:, 1, :, first : at + 1]
        grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape[0], -1)

    def _mask(self, window: int | None) -> Tensor | None:
        """[B, 1, 1, T], 0 or -inf; None where every row sees every column."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        end = self.width + self.generated
        if self.even and (window is None or window >= end):
            return None
        column, length = torch.arange(end, device=self.device), self.lengths.unsqueeze(1)
        hidden = (column >= length) & (column < self.width)
        if window is not None:
            position = torch.where(column < self.width, column, column - self.width + length)
            hidden |= position <= self.positions().unsqueeze(1) - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)
        return mask[:, None, None]

    # --- rows leave -------------------------------------------------------------------------------------------------

    def keep(self, alive: np.ndarray) -> np.ndarray:
        """Drop rows (bool [B]); returns the new order of the old ones. Rows from the end fill the holes."""
        count = int(alive.sum())
        order = np.arange(self.rows)
        order[np.flatnonzero(~alive[:count])] = np.flatnonzero(alive[count:]) + count
        order = order[:count]
        used = self.width + self.generated
        for hole in np.flatnonzero(order != np.arange(count)):
            for cache in self.caches:
                cache[hole, :, :, :used] = cache[order[hole], :, :, :used]
        self.caches = [cache[:count] for cache in self.caches]
        self.tasks = [self.tasks[i] for i in order]
        index = torch.from_numpy(order).to(self.device)
        self.lengths, self.last = self.lengths[index], self.last[index]
        return order


class PromptPass:
    """Some prompts of a group, right-padded, and the rows that answer each: runs [a, b) of the group's rows."""

    def __init__(self, group: Group, runs: Sequence[tuple[int, int]]):
        self.group, self.rows = group, slice(runs[0][0], runs[-1][1])
        prompts = [group.tasks[a].prompt for a, _ in runs]
        self.length = max(map(len, prompts))
        self.count = len(prompts)
        ids = np.zeros((self.count, self.length), dtype=np.int64)
        for row, prompt in zip(ids, prompts):
            row[: len(prompt)] = prompt
        self.ids = torch.from_numpy(ids).to(group.device)
        self.ends = torch.tensor([i * self.length + len(p) - 1 for i, p in enumerate(prompts)], device=group.device)
        repeats = torch.tensor([b - a for a, b in runs], device=group.device)
        self.of_row = torch.repeat_interleave(torch.arange(self.count, device=group.device), repeats)

    @property
    def tokens(self) -> int:
        return self.count * self.length

    def positions(self) -> Tensor:
        """[u * S]"""
        return torch.arange(self.length, device=self.group.device).repeat(self.count)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """`stage.Attend` of the prompts; padding at the end is seen by no token that counts."""
        q, k, v = (x.view(self.count, self.length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        cache = self.group.caches[layer]
        cache[self.rows, 0, :, : self.length] = k if self.count == len(self.of_row) else k[self.of_row]
        cache[self.rows, 1, :, : self.length] = v if self.count == len(self.of_row) else v[self.of_row]
        grouped = q.shape[1] != k.shape[1]
        if window is None or window >= self.length:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            at = torch.arange(self.length, device=q.device)
            mask = (at <= at.unsqueeze(1)) & (at > at.unsqueeze(1) - window)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(self.tokens, -1)
