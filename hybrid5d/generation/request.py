"""What is asked of a generator, checked before anything is generated."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid5d.data.types import outside_vocabulary
from hybrid5d.errors import DataError
from hybrid5d.generation.sampling import Sampling
from hybrid5d.parallel.agree import world_axis
from hybrid5d.parallel.collectives import max_scalars

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Request:
    """What is generated; every rank has the same.

    Attributes:
        prompts: int64 [n] each, at least one token; samples: responses to each.
        step: number of the RL step, for the noise.
        decode: text of token ids, for `sampling.stop`.
        batch_size: rows that a replica decodes at a time; None = all of its share.
        progress: called with (responses done, responses) of this rank's replica, whenever some end.
    """

    prompts: Sequence[np.ndarray]
    sampling: Sampling
    samples: int = 1
    step: int = 0
    decode: Decode | None = None
    batch_size: int | None = None
    progress: Callable[[int, int], None] | None = None

    def check(self, vocab_size: int) -> None:
        """Refuse what cannot be generated. Collective over the world.

        Raises:
            DataError: an empty prompt, an id that the model lacks, or ranks with different requests.
            ValueError: a number out of range, or stop texts without `decode`.
        """
        if self.samples < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise ValueError(f"samples={self.samples}, batch_size={self.batch_size}: each is 1 or more")
        if self.sampling.stop and self.decode is None:
            raise ValueError("sampling_params.stop needs the tokenizer: pass decode")
        value = zlib.crc32(repr((self.sampling, self.samples, self.step, self.batch_size)).encode())
        for i, prompt in enumerate(self.prompts):
            fault = "empty" if not len(prompt) else outside_vocabulary("prompt", np.asarray(prompt), vocab_size)
            if fault:
                raise DataError(f"prompt {i}: {fault}")
            value = zlib.crc32(np.ascontiguousarray(prompt, dtype=np.int64).tobytes(), value)
        high, low = max_scalars([value, -value], world_axis())
        if high != -low:
            raise DataError("data: ranks were given different prompts or sampling options")
