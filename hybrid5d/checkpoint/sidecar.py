"""Files beside the weights of a Hugging Face folder: configuration, tokenizer, chat template, licence."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hybrid5d.config.dtypes import PRECISIONS
from hybrid5d.data.build import tokenizer_name
from hybrid5d.data.tokenizer import BYTES
from hybrid5d.errors import CheckpointError
from hybrid5d.hf.families import FAMILIES
from hybrid5d.plan.run import RunPlan

OF_MODEL = ("config.json", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
OF_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "chat_template*", "additional_chat_templates",
)  # fmt: skip
LEFT_OUT = (".py", ".safetensors", ".bin")


def write_sidecar(plan: RunPlan, target: Path) -> None:
    """What the run used beside its weights, into `target` (made here): the model's configuration and generation
    settings, the run's tokenizer and its chat template.
    """
    target.mkdir(parents=True, exist_ok=True)
    config = plan.config
    folder, tokenizer = config.actor.model.model_path, tokenizer_name(plan)
    if folder is not None:
        copy_sidecar(Path(folder), target, OF_MODEL)
    if config.actor.tokenizer.tokenizer_model is None and config.data.type == "tokens":
        tokenizer = str(folder)  # the data came as ids: whichever files the model has, they are its tokenizer
    if tokenizer != BYTES:
        copy_sidecar(Path(tokenizer), target, OF_TOKENIZER)
    if config.data.chat_template is not None:
        _replace_template(Path(config.data.chat_template), target)
    if plan.model is not None:
        (target / "config.json").write_text(json.dumps(plan.model.raw, indent=2) + "\n", encoding="utf-8")


def copy_sidecar(source: Path, target: Path, patterns: tuple[str, ...] = (*OF_MODEL, *OF_TOKENIZER)) -> None:
    """Copy a folder's files of these names, without weights, their index and code."""
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if path.suffix in LEFT_OUT or not any(fnmatchcase(path.name, pattern) for pattern in patterns):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)


def _replace_template(template: Path, target: Path) -> None:
    """Make `template` the only one of a tokenizer's files."""
    shutil.rmtree(target / "additional_chat_templates", ignore_errors=True)
    for path in target.glob("chat_template*"):
        path.unlink()
    shutil.copyfile(template, target / "chat_template.jinja")
    settings = target / "tokenizer_config.json"
    if settings.is_file():
        kept = {k: v for k, v in json.loads(settings.read_text(encoding="utf-8")).items() if k != "chat_template"}
        settings.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def exported_config(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of an export: the source's, with the dtype that was written and the keys that loaders need."""
    config = {k: v for k, v in raw.items() if k not in ("_name_or_path", "transformers_version")}
    for key in {"dtype", "torch_dtype"} & set(config) or {"dtype"}:
        config[key] = PRECISIONS[dtype].hf
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
