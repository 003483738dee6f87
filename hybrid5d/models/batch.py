"""One micro-batch as one rank sees it: padded, cut over the context-parallel axis, on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from hybrid5d.plan.sequence import SequencePlan
from hybrid5d.tensor_parallel import CROSS_ENTROPY, TokenRule


@dataclass
class LocalBatch:
    """What every layer of every stage is given beside the hidden state.

    All ranks of one dp replica build it from the same rows by index arithmetic, so nothing but hidden states and their
    gradients crosses stages.

    Attributes:
        input_ids, labels, position_ids: [b, S/cp] in the rank's order (zigzag, …); labels already shifted.
        upstream: what backward will call the loss with, where that is known (`HeadOptions.upstream`).
        columns: by name [b, S/cp] fp32, in the order of labels: weights, advantages, ... (`data.types.COLUMNS`).
        sequence: how the rows were cut; attention follows it.
        hidden_shape: shape of the residual stream on this rank: (b, S/cp, H), or (b, S/(cp*tp), H) with SP.
        head: what the last layer computes: the loss, or each label's log-probability and the entropy.
        rule, temperature: of which loss; what the logits are divided by.
        means, parts: what the rule reports, summed; the last layer fills them in where the loss is computed.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    sequence: SequencePlan
    hidden_shape: tuple[int, int, int]
    head: Literal["loss", "logprobs"] = "loss"
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    rule: TokenRule = CROSS_ENTROPY
    temperature: float = 1.0
    means: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    upstream: float | None = None
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that all layers of a stage use, made once a micro-batch (rotary tables)."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]
