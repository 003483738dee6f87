"""The last stage's part of a step: tokens from logits, and which rows end with them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybrid5d.generation.group import Group
from hybrid5d.generation.noise import id_words, position_words, sequence_keys
from hybrid5d.generation.request import Request
from hybrid5d.generation.sampling import Draw, choose
from hybrid5d.tensor_parallel import VocabShard


class Chooser:
    """Chooses the tokens of one group."""

    def __init__(self, group: Group, request: Request, vocab: VocabShard):
        self.group, self.request, self.vocab = group, request, vocab
        sampling, device = request.sampling, group.device
        self.keys = sequence_keys(sampling.seed, request.step, [(t.place, t.sample) for t in group.tasks])
        self.id_words = id_words(vocab.start, vocab.real).to(device) if sampling.do_sample else None
        self.seen = self._seen() if sampling.repetition_penalty != 1 else None
        local = [i - vocab.start for i in sampling.stop_ids if vocab.start <= i < vocab.start + vocab.real]
        self.barred = torch.tensor(local, device=device) if local else None
        # a text that ends in the last token has no more tokens than bytes, but for tokens without a byte
        self.reach = max((len(s.encode()) for s in sampling.stop), default=0) + 8
        self.tails: list[list[int]] = [[] for _ in group.tasks]
        self._collected: list[Tensor] = []

    def _seen(self) -> Tensor:
        seen = torch.zeros(self.group.rows, self.vocab.real, dtype=torch.bool)
        for row, task in zip(seen, self.group.tasks):
            columns, here = self.vocab.columns(torch.from_numpy(np.asarray(task.prompt, dtype=np.int64)))
            row[columns[here]] = True
        return seen.to(self.group.device)

    def collect(self, x: Tensor) -> Tensor:
        """Hidden states at the end of each row's prompt, of the passes so far."""
        self._collected.append(x)
        return torch.cat(self._collected)

    def choose(self, logits: Tensor) -> Tensor:
        """fp64 [3, B] from logits [B, V/n]: ids, log-probabilities, 1 where the row ends; the same on every tp rank.

        fp64 holds the ids and fp32 exactly, so that one message says it all.
        """
        sampling, group = self.request.sampling, self.group
        draw = Draw(
            position_words(self.keys, group.generated).to(group.device) if sampling.do_sample else None,
            self.id_words,
            self.seen,
            self.barred if group.generated < sampling.min_new_tokens else None,
        )
        ids, logprobs = choose(logits, self.vocab, sampling, draw)
        self._collected = []
        if self.seen is not None and self.vocab.real:
            columns, here = self.vocab.columns(ids)
            self.seen.scatter_(1, columns[:, None], self.seen.gather(1, columns[:, None]) | here[:, None])
        ended = self._ended(ids.cpu().numpy())
        return torch.stack((ids.double(), logprobs.double(), torch.from_numpy(ended).to(ids.device).double()))

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        """Which rows a stop id or a stop text ends."""
        stop, decode = self.request.sampling.stop, self.request.decode
        ended = np.isin(ids, self.request.sampling.stop_ids)
        if stop and decode is not None:
            for i, (tail, token) in enumerate(zip(self.tails, ids.tolist())):
                tail.append(token)
                del tail[: -self.reach]
                text = decode(tail)
                ended[i] |= any(s in text for s in stop)
        return ended

    def keep(self, order: np.ndarray) -> None:
        """Rows as `Group.keep` ordered them."""
        self.keys, self.tails = self.keys[order], [self.tails[i] for i in order]
        if self.seen is not None:
            self.seen = self.seen[torch.from_numpy(order).to(self.seen.device)]
