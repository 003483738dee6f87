"""One thread for the references, and model folders shared by the tests that start ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kit import MODELS, save_model

torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One HF folder per tiny model."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name) for name, config in MODELS.items()}
