"""The YAML's names of floating-point types."""

import torch

from hybrid5d.config.dtypes import PRECISIONS

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, row.hf) for name, row in PRECISIONS.items()}
