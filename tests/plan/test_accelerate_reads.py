"""accelerate.yaml is a file that `accelerate launch --config_file` understands."""

from __future__ import annotations

from pathlib import Path

from tests.config_kit import REPO


def test_every_generated_file_is_read_as_written() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((REPO / "ds_configs").rglob("accelerate.yaml"))
    assert files
    for file in files:
        config = load_config_from_file(str(file))
        assert str(config.distributed_type).endswith("DEEPSPEED") and not config.use_cpu
        assert config.num_processes % config.num_machines == 0
        pointed = Path(config.deepspeed_config["deepspeed_config_file"])
        assert (REPO / pointed) == file.parent / "ds_config.json" and (REPO / pointed).is_file()
