"""Imported once by the fork server, so that every test rank starts warm."""

import contextlib
import io
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
    import deepspeed
    import deepspeed.runtime.zero.muon.original_muon
    import torch
    import torch._dynamo
    import torch.distributed.tensor

    deepspeed.utils.logger.setLevel("WARNING")
    torch.set_num_threads(1)
