"""A look at what a trained model writes."""

from __future__ import annotations

from pathlib import Path

from hybrid5d.data.build import tokenizer_name
from hybrid5d.data.loader import Loader
from hybrid5d.plan.run import RunPlan


def sample(folder: Path, plan: RunPlan, loader: Loader, *, prompt: int = 48, length: int = 160) -> str | None:
    """Text that an exported model writes after `prompt` tokens from the middle of the data, those included.

    One process, tokens drawn at temperature 0.8 with a fixed seed. None where transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        return None
    import torch

    from hybrid5d.data.tokenizer import load_tokenizer

    assert plan.model is not None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = load_tokenizer(tokenizer_name(plan), model_vocab_size=plan.model.vocab_size)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = torch.from_numpy(loader.dataset.document(len(loader.dataset) // 2).input_ids[:prompt].copy())[None]
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=length, do_sample=True, temperature=0.8,
            top_k=50, pad_token_id=tokenizer.pad_id,
        )  # fmt: skip
    return tokenizer.decode(out[0].tolist())
