"""Small inputs that the config, plan and convert tests share."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid5d.config.schema import RunConfig
from hybrid5d.config.tree import put
from hybrid5d.errors import ConfigErrors

REPO = Path(__file__).resolve().parents[1]
CORPUS = REPO.parent / "shared" / "corpus" / "rlinf"
OWN_RLINF = REPO / "tests" / "rlinf" / "yamls"  # files of RLinf's shape of our own
EXAMPLES = REPO / "examples" / "rlinf"
needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason=f"the corpus of real RLinf files is not at {CORPUS}")

TINY_MODEL = {
    "model_type": "qwen3", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip

NATIVE: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor": "all"}},
    "runner": {"task_type": "sft", "seq_length": 512, "max_steps": 200, "save_interval": 100},
    "data": {"type": "tokens", "train_data_paths": ["rows.jsonl"]},
    "actor": {
        "training_backend": "deepspeed",
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "model": {"model_path": "model", "tensor_model_parallel_size": 1, "sequence_parallel": False},
        "optim": {"optimizer": "adam", "lr": 1e-3, "adam_beta2": 0.95},
        "lr_sched": {"lr_decay_style": "cosine", "lr_warmup_iters": 10, "lr_decay_iters": 200, "min_lr": 1e-4},
    },
}  # fmt: skip


def native(**changes: Any) -> dict[str, Any]:
    """The native YAML with dotted keys changed (`__` stands for the dot)."""
    tree = copy.deepcopy(NATIVE)
    for path, value in changes.items():
        put(tree, path.replace("__", "."), copy.deepcopy(value))
    return tree


def config_of(**changes: Any) -> RunConfig:
    """A validated config without a file."""
    return RunConfig.model_validate(native(**changes))


def write_model(folder: Path, **changes: Any) -> Path:
    """A model folder that holds a config.json only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_MODEL, **changes}))
    return folder


def write_yaml(path: Path, tree: Any) -> Path:
    """Write a tree as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
    return path


def error_lines(call: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
    """key -> text of the ConfigErrors that a call raises; every line must name key, rule and fix."""
    with pytest.raises(ConfigErrors) as caught:
        call(*args, **kwargs)
    for error in caught.value.errors:
        assert "\n" not in str(error) and error.rule and error.fix, error
    return {e.key: str(e) for e in caught.value.errors}


def rlinf_files() -> list[Path]:
    """Every YAML of RLinf's shape: our own, and the corpus where it is there."""
    return [*sorted(OWN_RLINF.glob("*.yaml")), *(sorted(CORPUS.rglob("*.yaml")) if CORPUS.is_dir() else [])]
