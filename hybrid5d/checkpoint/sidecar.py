"""Files beside the weights of a Hugging Face folder: configuration, tokenizer, chat template, licence."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hybrid5d.errors import CheckpointError
from hybrid5d.hf.families import FAMILIES
from hybrid5d.hf.spec import ModelSpec

CARRIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "spiece.model", "chat_template*", "additional_chat_templates", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def copy_sidecar(source: str | Path | None, spec: ModelSpec | None, target: Path) -> None:
    """Copy what an export needs from the model folder into `target` (made here); config.json comes from `spec`.

    Weights, their index and code are left out.
    """
    target.mkdir(parents=True, exist_ok=True)
    folder = Path(source) if source is not None else None
    for path in sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ():
        if not any(fnmatchcase(path.name, pattern) for pattern in CARRIED) or path.suffix in (
            ".py",
            ".safetensors",
            ".bin",
        ):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)
    if spec is not None:
        (target / "config.json").write_text(json.dumps(spec.raw, indent=2) + "\n", encoding="utf-8")


def exported_config(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of an export: the source's, with the dtype that was written and the keys that loaders need."""
    config = {k: v for k, v in raw.items() if k not in ("_name_or_path", "transformers_version")}
    for key in {"dtype", "torch_dtype"} & set(config) or {"dtype"}:
        config[key] = HF_DTYPES[dtype]
    config.setdefault("tie_word_embeddings", False)
    family = str(config.get("model_type"))
    if family in FAMILIES:
        config.setdefault("architectures", [FAMILIES[family].architecture])
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint's sidecar.

    Raises:
        CheckpointError: missing or unreadable.
    """
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is no JSON") from None
