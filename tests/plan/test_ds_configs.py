"""ds_configs/ equals the translation of examples/."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

from tests.config_kit import REPO


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ds_configs_generate", REPO / "ds_configs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ds_configs_are_up_to_date() -> None:
    here = os.getcwd()
    try:
        assert generator().differences() == []
    finally:
        os.chdir(here)


def test_the_typical_handful_is_there() -> None:
    names = {p.stem for p in generator().sources()}
    assert {
        "qwen2.5-1.5b-tp2", "qwen2.5-7b-tp4", "qwen2.5-32b-tp8-sp", "qwen2.5-7b-cp2", "qwen2.5-14b-pp2",
        "qwen2.5-1.5b-dynamic-batch",
    } <= names  # fmt: skip
