"""Model folders shared by the distributed tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import MODELS, save_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One HF folder per tiny model."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name) for name, config in MODELS.items()}
