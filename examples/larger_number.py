"""The task of `make rl`: which of two numbers is larger? Writes its data, and scores answers.

    python examples/larger_number.py [--seed N] FOLDER

`37?52=` is answered by `52`. Demonstrations for the supervised run answer with one of the two numbers, whichever comes
to hand, so that it teaches the form of an answer and not the comparison; that is left to the reward.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

BOS, EOS = 256, 257  # of the byte tokenizer
DEMONSTRATIONS, PROMPTS, HELD_OUT = 4096, 4096, 128


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1 for the larger number and nothing else, else 0 (`reward.function`)."""
    return float(response == row["answer"])


def demonstration(a: int, b: int, answer: int) -> dict[str, list[int]]:
    """A row of `data.type: tokens`; the loss is on answer and eos alone."""
    prompt, response = [BOS, *f"{a}?{b}=".encode()], [*str(answer).encode(), EOS]
    return {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + [1] * len(response)}


def main() -> None:
    """Write demonstrations.jsonl, prompts.jsonl and validation.jsonl; no pair of the last is in the others."""
    parser = argparse.ArgumentParser(description="Data of the RL example.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a != b]
    rng.shuffle(pairs)
    held_out, seen = pairs[:HELD_OUT], pairs[HELD_OUT:]
    shown, asked = rng.sample(seen, DEMONSTRATIONS), rng.sample(seen, PROMPTS)
    files: dict[str, list[dict[str, Any]]] = {
        "demonstrations": [demonstration(a, b, rng.choice((a, b))) for a, b in shown],
        "prompts": [{"prompt": f"{a}?{b}=", "answer": str(max(a, b))} for a, b in asked],
        "validation": [{"prompt": f"{a}?{b}=", "answer": str(max(a, b))} for a, b in held_out],
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
