"""One thread for the references, GPUs hidden from tests that mean the CPU, and model folders shared by tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.kit import MODELS, save_model

torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, where there are any, before CUDA is asked for them; `-m gpu` shows them."""
    if "gpu" not in config.option.markexpr.split() and Path("/dev/nvidiactl").exists():
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`, a file's tests share a worker, for its fixtures and ports; the cases of the big matrix stand alone."""
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        if item.path.stem != "test_equivalence":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One HF folder per tiny model."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name) for name, config in MODELS.items()}
