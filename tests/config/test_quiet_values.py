"""Values that are legal and not what they look like: heard, not silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid5d.load import load_config, load_yaml
from hybrid5d.plan.convert import translate
from tests.cli_kit import hybrid5d
from tests.config_kit import error_lines, native, write_yaml


def notices(tmp_path: Path, *words: str, **changes: Any) -> str:
    return "\n".join(translate(write_yaml(tmp_path / "run.yaml", native(**changes)), words, world_size=8).notices)


@pytest.mark.parametrize(
    ("sched", "steps", "heard"),
    [
        ({"lr_decay_style": "cosine"}, 10, "lr_decay_style cosine counts 100000 steps"),
        ({"lr_decay_style": "constant", "lr_warmup_fraction": 0.1}, 10, "lr_warmup_fraction counts 100000 steps"),
        ({"lr_decay_style": "linear"}, -1, "whatever the length of the run"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 10}, 10, ""),
        ({"lr_decay_style": "constant"}, 10, ""),
        ({"lr_decay_style": "cosine"}, 100_000, ""),
    ],
)
def test_a_schedule_that_counts_a_hundred_thousand_steps(
    tmp_path: Path, sched: dict[str, Any], steps: int, heard: str
) -> None:
    text = notices(tmp_path, actor__lr_sched=sched, runner__max_steps=steps)
    assert heard in text if heard else "100000" not in text
    if heard and steps > 0:
        assert f"ends after {steps} (runner.max_steps)" in text


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [("010", 8, "octal"), ("-017", -15, "octal"), ("1:30", 90, "base 60"), ("2:0:0", 7200, "base 60")],
)
def test_numbers_that_yaml_1_1_reads_otherwise(tmp_path: Path, text: str, value: int, kind: str) -> None:
    path = write_yaml(tmp_path / "a.yaml", f"actor: {{seed: 1}}\nrunner: {{save_interval: {text}}}\n")
    loaded = load_yaml(path)
    assert loaded.config is not None and loaded.config.runner.save_interval == value
    (notice,) = loaded.keys.notices
    assert f"runner.save_interval: YAML 1.1 reads {text} as {value} ({kind})" in notice and "a.yaml" in notice
    assert text in "".join(load_yaml(write_yaml(tmp_path / "b.yaml", "actor: {seed: 1}\n"),
                                     [f"runner.save_interval={text}"]).keys.notices)  # fmt: skip


@pytest.mark.parametrize("text", ["0", "7", "07", "0x10", "'010'", "1_000", "10"])
def test_numbers_that_are_what_they_look_like(tmp_path: Path, text: str) -> None:
    path = write_yaml(tmp_path / "a.yaml", f"actor: {{seed: {text}}}\n")
    assert not load_yaml(path).keys.notices


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout"])
@pytest.mark.parametrize(("value", "heard"), [(0.1, True), (0.0, False), (None, False)])
def test_dropout_of_the_yaml_is_heard(tmp_path: Path, name: str, value: float | None, heard: bool) -> None:
    text = notices(tmp_path, **{f"actor__model__{name}": value})
    assert (f"actor.model.{name}={value}" in text and "without dropout" in text) == heard


def test_home_is_expanded_in_every_key_that_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    keys = {
        "runner__output_dir": "~/o", "runner__resume_dir": "~/c", "runner__logger__log_path": "~/l",
        "data__train_data_paths": ["~/a.jsonl", "b~"], "data__val_data_paths": "~/v.jsonl",
        "data__chat_template": "~/t", "data__cache_dir": "~", "actor__model__model_path": "~/m",
        "actor__tokenizer__tokenizer_model": "~/m", "reward__function": "~/own.py:score",
    }  # fmt: skip
    config = load_config(write_yaml(tmp_path / "run.yaml", native(**keys)))
    for key, written in keys.items():
        value: Any = config
        for part in key.split("__"):
            value = getattr(value, part)
        wanted = [w.replace("~", "/home/someone") if w.startswith("~") else w for w in [written, *written][-2:]] if (
            isinstance(written, list)
        ) else written.replace("~", "/home/someone")  # fmt: skip
        assert value == tuple(wanted) or value == wanted or value == (wanted,), key


def test_home_is_expanded_in_words_that_a_shell_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_yaml(tmp_path / "run.yaml", native(actor__optim__lr=1e-3))
    done = hybrid5d("convert", "~/run.yaml", "~actor.optim.lr", "--out=~/out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "ds_config.json").is_file()


@pytest.mark.parametrize(
    ("changes", "key", "word"),
    [
        ({"actor__tokenizer": "gpt2"}, "actor.tokenizer", "not a str. Fix: known keys: tokenizer_model"),
        ({"actor__optim": [1]}, "actor.optim", "a block of keys is needed, not a list"),
        ({"data__train_data_paths": [{"path": "a"}]}, "data.train_data_paths.0", "string"),
        ({"runner__logger__logger_backends": {"a": 1}}, "runner.logger.logger_backends", "tuple"),
    ],
)  # fmt: skip
def test_structure_that_no_key_has_is_named(tmp_path: Path, changes: dict[str, Any], key: str, word: str) -> None:
    lines = error_lines(load_config, write_yaml(tmp_path / "run.yaml", native(**changes)))
    assert word in lines[key]
