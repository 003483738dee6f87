"""A worker that says what its launcher shows it, into a file a rank: no rank's line is cut by another's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hybrid5d.devices import device_index, scheduler_variables, started_by, visible_devices, wants_cpu

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")

if __name__ == "__main__":
    environ = {**os.environ, **scheduler_variables(os.environ)}
    visible = visible_devices(environ)
    seen = {
        **{name: environ.get(name) for name in NAMES},
        "launcher": started_by(environ),
        "cpu": wants_cpu(environ),
        "index": None if visible is None else str(device_index(environ, len(visible))),
    }
    Path(sys.argv[-1], f"{environ['RANK']}.json").write_text(json.dumps(seen))
