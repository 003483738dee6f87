"""The decoder's head weighs each token's cross entropy by the column `loss_weight`; log-probabilities stay."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.decoder import head_forward
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.sequence import SequencePlan
from hybrid5d.tensor_parallel import IGNORE_INDEX, VocabShard


def test_loss_weights_act_on_the_loss_alone() -> None:
    torch.manual_seed(0)
    ctx, x, weight = ParallelContext.single(), torch.randn(2, 6, 8), torch.randn(11, 8)
    vocab, labels = VocabShard.of(11, ctx.tp), torch.randint(0, 11, (2, 6))
    labels[0, :3] = IGNORE_INDEX
    factor = torch.rand(2, 6)
    plan = SequencePlan.build(((6,), (6,)), 1, "p2p")
    plain = LocalBatch(labels, labels, torch.arange(6).expand(2, 6), plan, (2, 6, 8))
    weighted = replace(plain, columns={"loss_weight": factor, "advantages": torch.full((2, 6), float("nan"))})
    each = F.cross_entropy(x.matmul(weight.t()).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(head_forward(weight, vocab, x, plain, ctx), each.sum())
    torch.testing.assert_close(head_forward(weight, vocab, x, weighted, ctx), (each * factor).sum())
    logprobs, _ = head_forward(weight, vocab, x, replace(weighted, head="logprobs"), ctx)
    torch.testing.assert_close(logprobs, -each)
