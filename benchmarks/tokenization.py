"""Tokenising: hybrid5d beside `datasets.map`, same tokenizer, rows and process count, from files to tokens on disk.

    python benchmarks/tokenization.py [--samples 20000] [--repeat 3] [--workers 0]

The tokenizer is a byte-level BPE trained on the standard library's sources, so nothing is downloaded. `datasets` is
optional (pip install datasets); without it only our side is timed. hybrid5d's chat side also computes the mask of the
assistant's turns, which the `datasets.map` side, as usually written, does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sources() -> list[str]:
    """Texts of the standard library's top-level modules."""
    return [p.read_text(encoding="utf-8") for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]


def make_tokenizer(folder: Path) -> None:
    """Trains and saves an HF folder with a fast tokenizer and a chat template."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=16000, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(sources(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_chat(path: Path, samples: int) -> None:
    """Conversations of one to three questions, cut from the sources, lengths log-normal."""
    draw, text = random.Random(0), "\n".join(sources())
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(samples):
            messages = []
            for _ in range(draw.randint(1, 3)):
                for role, mean in (("user", 4.5), ("assistant", 6.0)):
                    start = draw.randrange(len(text) - 20000)
                    size = min(20000, int(draw.lognormvariate(mean, 0.8)) + 2)
                    messages.append({"role": role, "content": text[start : start + size]})
            f.write(json.dumps({"messages": messages}) + "\n")


def write_text(path: Path, samples: int) -> None:
    """Documents of about 4 kB under the key `text`."""
    draw, text = random.Random(1), "\n".join(sources())
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(samples):
            start = draw.randrange(len(text) - 40000)
            f.write(json.dumps({"text": text[start : start + min(40000, int(draw.lognormvariate(8, 0.7)))]}) + "\n")


def ours(data_type: str, path: Path, tokenizer: Path, cache: Path, workers: int) -> int:
    from hybrid5d.config.schema import DataConfig
    from hybrid5d.data.dataset import open_dataset
    from hybrid5d.data.options import DataOptions

    config = DataConfig(type=data_type, cache_dir=str(cache), num_workers=workers)
    options = DataOptions(config, (str(path),), 1 << 20, 1 << 16, tokenizer=str(tokenizer))
    return open_dataset(options).report.tokens


def theirs(data_type: str, path: Path, tokenizer: Path, cache: Path, workers: int) -> int:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    hf = AutoTokenizer.from_pretrained(tokenizer)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        texts = batch["text"] if data_type == "text" else hf.apply_chat_template(batch["messages"], tokenize=False)
        return {"input_ids": hf(texts, add_special_tokens=False)["input_ids"]}

    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    rows = rows.map(encode, batched=True, num_proc=workers or None, remove_columns=rows.column_names)
    return len(rows)


def seconds(run: Callable[[Path], int]) -> float:
    """Of one run with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        run(Path(cache))
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, default=0, help="processes; 0: in the caller, with the tokenizer's threads"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import datasets

        other = f"datasets {datasets.__version__}"
    except ImportError:
        other = ""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_tokenizer(root / "tokenizer")
        for data_type, write in (("text", write_text), ("chat", write_chat)):
            path = root / f"{data_type}.jsonl"
            write(path, arguments.samples)
            call = (data_type, path, root / "tokenizer")
            sides = [partial(ours, *call, workers=arguments.workers)]
            if other:
                sides.append(partial(theirs, *call, workers=arguments.workers))
            tokens, *_ = (side(root / f"warm-{data_type}-{i}") for i, side in enumerate(sides))
            rounds = [[seconds(side) for side in sides] for _ in range(arguments.repeat)]  # turn by turn
            mine = statistics.median(r[0] for r in rounds)
            line = f"{data_type}: {arguments.samples} samples, {tokens} tokens, {path.stat().st_size / 1e6:.0f} MB,"
            line += f" {arguments.workers} workers: hybrid5d {mine:.2f} s ({tokens / mine / 1e6:.2f} M tokens/s)"
            if other:
                line += f", {other} map {statistics.median(r[1] for r in rounds):.2f} s;"
                line += f" ratio {statistics.median(r[1] / r[0] for r in rounds):.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
