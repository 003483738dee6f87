"""Llama in plain PyTorch, or a run of its layers: what the peers that bring no model of their own train.

Written for speed where it costs nothing: torch's fused RMSNorm and attention, rope tables made once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0
Step = Callable[[], tuple[float, float]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rope_tables(config: dict[str, Any], length: int) -> Tensor:
    """[2, length, head_dim]: cosines and sines."""
    dim = config["head_dim"]
    frequencies = 1.0 / config["rope_parameters"]["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [b, heads, S, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [b, heads, S, head_dim] with fewer heads in k and v."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Heads are counted in what the projections return, so that sharded ones work too."""

    def __init__(self, config: dict[str, Any], attend: Attend):
        super().__init__()
        hidden, self.dim, self.attend = config["hidden_size"], config["head_dim"], attend
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = self.attend(rotate(q, *rope), rotate(k, *rope), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], attend: Attend):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Layers `span` of a Hugging Face folder's model, with its weights; `first` embeds, `last` has norm and head.

    [b, S] ids or [b, S, H] -> [b, S, H] or [b, S, V] logits. `positions` are those of the S tokens.
    """

    def __init__(
        self,
        folder: str,
        positions: Tensor,
        span: range | None = None,
        first: bool = True,
        last: bool = True,
        attend: Attend = causal,
    ):
        super().__init__()
        config = json.loads(Path(folder, "config.json").read_text())
        span = range(config["num_hidden_layers"]) if span is None else span
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = nn.Embedding(vocabulary, hidden) if first else None
        self.layers = nn.ModuleDict({str(i): Layer(config, attend) for i in span})
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"]) if last else None
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False) if last else None
        # No buffer: DistributedDataParallel would give every rank the positions of the first.
        self.rope = rope_tables(config, int(positions.max()) + 1)[:, positions]
        with safe_open(Path(folder, "model.safetensors"), "pt") as stored, torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(stored.get_tensor(name if name.startswith("lm_head") else f"model.{name}"))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, self.rope)
        return x if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x))


def shifted(rows: Tensor) -> Tensor:
    """Labels [rows, length] of ids; the last one of a row has none."""
    return torch.cat((rows[:, 1:], torch.full_like(rows[:, :1], -100)), dim=1)


def labelled(rows: Tensor) -> int:
    """Tokens of the global batch that have a label."""
    return rows.shape[0] * (rows.shape[1] - 1)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy of [b, S, V] logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = [p for _, p in named]
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    both = ({"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0})
    return [group for group in both if group["params"]]


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """torch's AdamW in its fastest form for a CPU."""
    return torch.optim.AdamW(groups(module.named_parameters()), lr=LEARNING_RATE, fused=True)


def summed(value: float) -> float:
    """Over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def clip(cut: list[Tensor], whole: list[Tensor] | None = None) -> float:
    """Clip gradients at MAX_NORM; returns the norm before. `cut` lie on one rank each, `whole` are equal on all."""
    square = float(torch.stack(torch._foreach_norm(cut)).square().sum()) if cut else 0.0
    square = summed(square)
    if whole:
        square += float(torch.stack(torch._foreach_norm(whole)).square().sum())
    norm = square**0.5
    torch._foreach_mul_([*cut, *(whole or [])], min(1.0, MAX_NORM / (norm + 1e-6)))
    return norm
