"""What a step minimises, where it is not the cross entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid5d.tensor_parallel import CROSS_ENTROPY, TokenRule


@dataclass(frozen=True)
class Objective:
    """A loss of each token, and what it is the mean of.

    Attributes:
        rule: the loss of a token with a target; its columns travel with the documents.
        unit: the sum over all tokens (times `loss_weight`) is divided by the number of `tokens` with a target, or of
            `rows` (documents; one without a target counts and adds 0), over all dp ranks and micro-batches.
        factor: on loss and gradients.
        temperature: what the logits are divided by.
    """

    rule: TokenRule = CROSS_ENTROPY
    unit: Literal["tokens", "rows"] = "tokens"
    factor: float = 1.0
    temperature: float = 1.0


SUPERVISED = Objective()
