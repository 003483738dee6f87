"""The independent reference: a plain training loop in one process on the class of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hybrid5d.check.compare import Trace
from hybrid5d.data.types import IGNORE_INDEX, Document


@dataclass(frozen=True)
class Recipe:
    """Optimizer of a run; the learning rate is constant."""

    optimizer: str = "sgd"
    lr: float = 0.5
    clip: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-8
    steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.0


def hf_model(config: Mapping[str, Any], seed: int = 0) -> Any:
    """The fp32 model of a config: norm weights from U(0.5, 1.5), biases from N(0, 0.1), matrices from N(0, 0.08)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    alternating = config["model_type"] == "mistral" and "layer_types" in config  # as AutoConfig reads a folder
    read = AutoConfig.for_model(**{**config, **({"model_type": "ministral"} if alternating else {})})
    model = AutoModelForCausalLM.from_config(read, attn_implementation="sdpa")
    model = model.float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p.normal_(0, 0.1)
            elif p.dim() == 1:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(0, 0.08)
    return model


def save_model(config: Mapping[str, Any], folder: Path, seed: int = 0) -> Path:
    """Write that model as a Hugging Face folder; the folder."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    hf_model(config, seed).save_pretrained(folder)
    return folder


def _optimizer(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    rest = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


def documents_of(rows: Sequence[Any]) -> list[Document]:
    """All documents of rows; a row is a document or a tuple of them."""
    return [d for row in rows for d in (row if isinstance(row, tuple) else (row,))]


def document_loss_sum(model: Any, d: Document) -> torch.Tensor:
    """Sum of the cross entropy over one document's labels."""
    positions = None if d.position_ids is None else torch.from_numpy(d.position_ids)[None]
    logits = model(torch.from_numpy(d.input_ids)[None], position_ids=positions).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, torch.from_numpy(d.labels), ignore_index=IGNORE_INDEX, reduction="sum")


def _mean(model: Any, rows: Sequence[Any]) -> Any:
    """Sum of the cross entropy over all valid labels of rows / their count; 0 where there are none."""
    documents = documents_of(rows)
    valid = sum(int((d.labels != IGNORE_INDEX).sum()) for d in documents)
    return sum(document_loss_sum(model, d) for d in documents) / max(valid, 1)


def reference(
    model: Any, steps: Sequence[Sequence[Any]], recipe: Recipe, mean: Literal["token", "micro_batch"] = "token"
) -> Trace:
    """Train in a plain loop. The rows of a step (documents, or tuples of them) are its global batch.

    `mean`: over all valid tokens of the batch, or of the means of its rows, which then stand for micro-batches.
    """
    optimizer, trace = _optimizer(model, recipe), Trace()
    for rows in steps:
        optimizer.zero_grad()
        loss = _mean(model, rows) if mean == "token" else sum(_mean(model, [row]) for row in rows) / len(rows)
        loss.backward()
        params = [p for p in model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(params, float("inf"))
        if not trace.grads:
            trace.grads = {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(params, recipe.clip)
        optimizer.step()
        trace.losses.append(loss.item())
        trace.norms.append(float(norm))
    trace.weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return trace
