"""Five kinds of parallelism for training Transformers on DeepSpeed, driven by RLinf/Megatron-style YAML.

`load_config(path, overrides)` reads a YAML; `initialize(config)` builds this rank's part of the model and returns an
`Engine` with `train_batch`, `eval_batch`, `compute_logprobs`, `generate`, `save_checkpoint`, `load_checkpoint`,
`export_hf`, `hf_tensors`. Your own rows are `Document`s in a `StepBatch`. The layer libraries
`hybrid5d.tensor_parallel` and `hybrid5d.context_parallel` work alone. Importing this imports no torch; the first use
of `Engine` or `initialize` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.data.types import Document, StepBatch
    from hybrid5d.engine.build import LayerFactory
    from hybrid5d.engine.engine import Engine
    from hybrid5d.engine.results import StepResult
    from hybrid5d.plan.run import RunPlan

__version__ = "0.1.0"
__all__ = ["Document", "Engine", "StepBatch", "StepResult", "__version__", "initialize", "load_config"]

_HOMES = {
    "Document": "hybrid5d.data.types",
    "Engine": "hybrid5d.engine.engine",
    "StepBatch": "hybrid5d.data.types",
    "StepResult": "hybrid5d.engine.results",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a YAML; `overrides` are `key=value`, `+key=value`, `~key`.

    Raises:
        ConfigErrors: everything that is wrong, one line each.
    """
    from hybrid5d.load import load_config as load

    return load(path, overrides)


def initialize(config: RunConfig | RunPlan, *, layers: LayerFactory | None = None) -> Engine:
    """This rank's engine. A config is planned for the world the launcher started (WORLD_SIZE; one process without).

    Args:
        layers: makes the pipeline's layers in place of the decoder that the model folder describes: called with the
            model's sizes, this rank's axes and a maker of attention cores (examples/custom_model.py).

    Raises:
        ConfigErrors: a layout that does not fit the world, the model or the batch; before any process group exists.
    """
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.devices import scheduler_variables
    from hybrid5d.plan.run import build_plan

    os.environ.update(scheduler_variables(os.environ))  # under srun and mpirun
    plan = build_plan(config, int(os.environ.get("WORLD_SIZE", "1"))) if isinstance(config, RunConfig) else config
    from hybrid5d.engine.build import initialize as build

    return build(plan, layers)
