"""Imported once by the fork server of `check.ranks`, so that every rank starts warm.

Each rank of each call would import these anew (and compile them where bytecode is not written).
"""

import contextlib
import gc
import importlib
import io

MODULES = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.utils",
    "hybrid5d.data.build",
    "hybrid5d.engine.build",
    "hybrid5d.checkpoint.load",
    "hybrid5d.checkpoint.export",
    "hybrid5d.check.observe",
)
with contextlib.redirect_stdout(io.StringIO()):
    for name in MODULES:
        importlib.import_module(name)
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]  # the first look probes every op: half a second
    deepspeed.utils.logger.setLevel("WARNING")
    torch.set_num_threads(1)
gc.collect()
gc.freeze()  # a collection in a rank would walk, and so copy, the whole image
