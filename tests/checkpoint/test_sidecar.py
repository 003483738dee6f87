"""What lies beside exported weights: the tokenizer, template and settings that the run used, not the model folder's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.checkpoint.sidecar import write_sidecar
from hybrid5d.data.tokenizer import load_tokenizer
from hybrid5d.plan.run import build_plan
from tests.config_kit import config_of, write_model

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
OTHER = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


def write_tokenizer(folder: Path, first: str, template: str | dict[str, str]) -> Path:
    """A tokenizer of single characters whose token 0 is `first`."""
    vocabulary = {c: i for i, c in enumerate([first, *(chr(i) for i in range(32, 127) if chr(i) != first)])}
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=first))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="|")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def sidecar(tmp_path: Path, kind: str = "chat", **changes: Any) -> Path:
    """The sidecar of a run on a model with a tokenizer of its own (token 0 is `a`, template OTHER)."""
    model = write_tokenizer(write_model(tmp_path / "model"), "a", OTHER)
    (model / "generation_config.json").write_text('{"temperature": 0.3}')
    (tmp_path / "rows.jsonl").write_text("{}\n")
    data = {"data__type": kind, "data__train_data_paths": [str(tmp_path / "rows.jsonl")]}
    plan = build_plan(config_of(actor__model__model_path=str(model), **data, **changes), 1)
    write_sidecar(plan, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.3}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == plan.model.raw  # type: ignore[union-attr]
    return tmp_path / "out"


def prompt(folder: Path) -> tuple[str, list[int]]:
    """What transformers makes of a chat with an exported folder."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    text = loaded.apply_chat_template(CHAT, tokenize=False)
    return text, loaded(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("named", [False, True])  # the model's templates: one, or several by name
def test_a_chat_with_the_export_has_the_prompt_of_the_training(tmp_path: Path, named: bool) -> None:
    own = write_tokenizer(tmp_path / "own", "b", {"default": OTHER, "tool_use": OTHER} if named else OTHER)
    settings = own / "tokenizer_config.json"  # where transformers 4 kept the template
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": OTHER}))
    (tmp_path / "t.jinja").write_text(OWN)
    out = sidecar(
        tmp_path, data__chat_template=str(tmp_path / "t.jinja"), actor__tokenizer={"tokenizer_model": str(own)}
    )
    trained = load_tokenizer(str(own), model_vocab_size=259, chat_template=OWN)
    text = trained.render(CHAT)  # type: ignore[union-attr]
    assert prompt(out) == (text, trained.encode_batch([text])[0].tolist()) and text == "<user>ab|<assistant>c|"
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert prompt(out)[1] != prompt(tmp_path / "model")[1]
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == OWN  # no template by another name is left


def test_without_keys_of_its_own_the_model_folder_counts(tmp_path: Path) -> None:
    assert prompt(sidecar(tmp_path)) == prompt(tmp_path / "model") and prompt(tmp_path / "out")[0] == "[ab][c]"


def test_a_run_on_bytes_exports_no_other_tokenizer(tmp_path: Path) -> None:
    out = sidecar(tmp_path, "text", actor__tokenizer={"tokenizer_model": "byte"})
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "generation_config.json"]


def test_a_run_on_ids_exports_the_models_tokenizer(tmp_path: Path) -> None:
    assert prompt(sidecar(tmp_path, "tokens"))[0] == "[ab][c]"
