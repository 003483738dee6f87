"""Responses to prompts in any layout: who generates what, in which order, and how the results come together.

Replicas (the ranks of dp x cp) share the responses. Inside a replica tp ranks hold heads and vocabulary and agree on
each token; pipeline stages work on as many groups as there are stages, in turns, so that none waits while there is
work. Every rank of a replica takes the same turns: the last stage says which tokens were chosen and which rows ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid5d.generation.chooser import Chooser
from hybrid5d.generation.group import Group, Task
from hybrid5d.generation.request import Request
from hybrid5d.generation.stage import Stage, as_they_are
from hybrid5d.parallel.agree import gather_objects
from hybrid5d.parallel.collectives import max_scalars
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.parallel.messages import Pending, exchange


@dataclass(frozen=True)
class Generated:
    """One response.

    Attributes:
        tokens: int64 [n], n >= 1; the token that ended it belongs to it.
        logprobs: fp32 [n], each token's log-probability at the temperature over the whole vocabulary, before top_k,
            top_p, penalties and min_new_tokens.
        finished: it ended by a stop id or text; False: it was cut at max_new_tokens.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finished: bool


class _Flight:
    """A group under way: its passes over prompts that are left; on the last stage, its tokens of the last pass."""

    def __init__(self, group: Group, chooser: Chooser | None):
        self.group, self.chooser = group, chooser
        self.prompts = deque(group.prompt_passes())
        self.awaiting = False  # a token was asked for and is not known here yet
        self.choices: Tensor | None = None


class _Replica:
    """One call on this rank."""

    def __init__(self, generator: Generator, request: Request):
        self.ctx, self.stage, self.request = generator.ctx, generator.stage, request
        self.dtype, self.device, self.hidden = generator.dtype, generator.device, generator.hidden_size
        sampling, prompts, samples = request.sampling, request.prompts, request.samples
        axis, total = self.ctx.dp_cp, len(prompts) * samples
        mine = range(axis.rank * total // axis.size, (axis.rank + 1) * total // axis.size)
        tasks = [Task(i, prompts[i // samples], i // samples, i % samples) for i in mine]
        self.tasks = sorted(tasks, key=lambda t: (len(t.prompt), t.number))
        longest = max((len(p) for p in prompts), default=0) + sampling.max_new_tokens
        self.cos, self.sin = self.stage.rope(longest, self.dtype, self.device)
        self.sends: list[Pending[None]] = []
        self.found: list[tuple[np.ndarray, np.ndarray]] = []  # numbers of a step's rows, and what was chosen [3, B]
        self.done = 0

    def _groups(self) -> deque[list[Task]]:
        """The share in equal groups, as many in flight as there are stages."""
        stages, count = self.ctx.pp.size, len(self.tasks)
        size = -(-min(count, self.request.batch_size or count) // stages)
        number = -(-count // size) if count else 0
        return deque(self.tasks[i * count // number : (i + 1) * count // number] for i in range(number))

    def turns(self) -> Iterator[None]:
        """Yields before each pass of this stage."""
        waiting, flying = self._groups(), deque[_Flight]()
        while True:
            while waiting and len(flying) < self.ctx.pp.size:
                flying.append(self._take_off(waiting.popleft()))
            if not flying:
                break
            flight = flying.popleft()
            if flight.awaiting:
                self._settle(flight)
            if flight.group.rows:
                yield
                self._pass(flight)
                flying.append(flight)
        for send in self.sends:
            send.wait()

    def _take_off(self, tasks: list[Task]) -> _Flight:
        group = Group(tasks, self.stage, self.request.sampling.max_new_tokens, self.dtype, self.device)
        last = self.ctx.pp.rank == self.ctx.pp.size - 1
        return _Flight(group, Chooser(group, self.request, self.stage.vocab) if last else None)

    # --- passes -----------------------------------------------------------------------------------------------------

    def _pass(self, flight: _Flight) -> None:
        group, prompts = flight.group, flight.prompts.popleft() if flight.prompts else None
        if prompts is None:
            group.begin_step()
            at, ids, attend = group.positions(), group.last, group.attend
        else:
            at, ids, attend = prompts.positions(), prompts.ids.view(-1), prompts.attend
        x = self.stage.run(self._enter(ids), self.cos[at], self.sin[at], attend)
        flight.awaiting = not flight.prompts
        if flight.chooser is None:
            self._send(x, [self.ctx.pp.rank + 1])
            return
        if prompts is not None:
            x = flight.chooser.collect(x[prompts.ends][prompts.of_row])
        if flight.awaiting:
            flight.choices = flight.chooser.choose(self.stage.logits(x))
            if self.ctx.pp.size > 1:
                self._send(flight.choices, range(self.ctx.pp.size - 1))
        else:
            self.stage.accompany(head_only=True)

    def _enter(self, ids: Tensor) -> Tensor:
        """Hidden states [N, H] of a pass: of the tokens, or from the stage before."""
        pp = self.ctx.pp
        if pp.rank == 0:
            return self.stage.embed(ids)
        x = torch.empty(len(ids), self.hidden, dtype=self.dtype, device=self.device)
        exchange(pp, [], [(pp.rank - 1, x)]).wait()
        return x

    def _send(self, x: Tensor, stages: Sequence[int]) -> None:
        self.sends = [send for send in self.sends if not send.is_completed()]
        self.sends.append(exchange(self.ctx.pp, [(stage, x.contiguous()) for stage in stages], []))

    def _settle(self, flight: _Flight) -> None:
        """Take in the tokens of the group's last pass; rows that ended leave."""
        pp, group, choices = self.ctx.pp, flight.group, flight.choices
        if choices is None:
            choices = torch.empty(3, group.rows, dtype=torch.float64, device=self.device)
            exchange(pp, [], [(pp.size - 1, choices)]).wait()
        group.last = choices[0].long()
        chosen = choices.cpu().numpy()
        self.found.append((group.numbers, chosen))
        group.generated += 1
        flight.awaiting, flight.choices = False, None
        gone = (chosen[2] > 0) | (group.generated == group.room)
        if gone.any():
            order = group.keep(~gone)
            if flight.chooser is not None:
                flight.chooser.keep(order)
            self.done += int(gone.sum())
            if self.request.progress is not None:
                self.request.progress(self.done, len(self.tasks))

    def results(self) -> list[Generated]:
        """All responses of the call, in order. Collective over dp x cp."""
        empty = (np.zeros(0, np.int64), np.zeros((3, 0)))
        numbers, chosen = (np.concatenate(c, -1) for c in zip(empty, *self.found))
        order = np.argsort(numbers, kind="stable")
        everyone = gather_objects((numbers[order], chosen[:, order]), self.ctx.dp_cp)
        numbers, (ids, logprobs, ended) = (np.concatenate(c, -1) for c in zip(*everyone))
        ends = np.flatnonzero(np.diff(numbers, append=-1)) + 1
        return [
            Generated(ids[a:b].astype(np.int64), logprobs[a:b].astype(np.float32), bool(ended[b - 1]))
            for a, b in pairwise([0, *ends])
        ]


class Generator:
    """Generates with the layers of this rank's stage, whatever their weights are at the time.

    Args:
        layers: of the stage, in order; gather: makes parameters whole that are not (ZeRO 3).

    Raises:
        ConfigErrors: layers that are not this package's decoder.
    """

    def __init__(self, stage: Stage, ctx: ParallelContext, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.stage, self.ctx, self.hidden_size, self.dtype, self.device = stage, ctx, hidden_size, dtype, device

    def run(self, request: Request) -> list[Generated]:
        """Prompt-major, sample-minor. Every rank passes the same request and gets all. Collective over the world."""
        replica = _Replica(self, request)
        turns: Any = replica.turns()
        if self.stage.gather is as_they_are:
            for _ in turns:
                pass
        else:
            self._in_step(turns)
        return replica.results()

    def _in_step(self, turns: Iterator[None]) -> None:
        """Passes gather weights over dp x cp: replicas make equally many, those without work only the gathers."""
        busy = next(turns, turns) is None
        while max_scalars([int(busy)], self.ctx.dp_cp, self.device)[0]:
            if busy:
                busy = next(turns, turns) is None
            else:
                self.stage.accompany()
