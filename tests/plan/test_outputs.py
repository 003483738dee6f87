"""The settings that a launcher hands to the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid5d.errors import ConfigErrors
from hybrid5d.plan.outputs import RESOLVED, read_settings, write_settings
from tests.config_kit import config_of


def test_settings_come_back_equal_and_are_not_resolved_again(tmp_path: Path) -> None:
    config = config_of(
        runner__experiment_name="${data.type}", actor__optim__lr=2e-5, actor__deepspeed={"comet": {"project": "${x}"}}
    )
    digest = write_settings(tmp_path, config)
    assert read_settings(tmp_path, digest) == config == read_settings(tmp_path)


def test_settings_of_another_run_are_refused(tmp_path: Path) -> None:
    mine = write_settings(tmp_path, config_of(actor__optim__lr=1e-3))
    other = write_settings(tmp_path, config_of(actor__optim__lr=3e-3))
    assert mine != other
    with pytest.raises(ConfigErrors, match="another run uses this folder"):
        read_settings(tmp_path, mine)


@pytest.mark.parametrize("text", ["actor: {optim: {lr: fast}}\n", "actor: [\n", "[1]\n", None])
def test_settings_that_cannot_be_used_are_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / RESOLVED).write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        read_settings(tmp_path)
    assert RESOLVED in str(caught.value) and len(caught.value.errors) == 1
