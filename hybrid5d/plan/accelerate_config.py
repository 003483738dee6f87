"""The file for `accelerate launch --config_file`."""

from __future__ import annotations

from typing import Any


def accelerate_config(world_size: int, num_nodes: int, ds_config_file: str) -> dict[str, Any]:
    """`accelerate` only starts the processes; precision, batch and ZeRO come from the ds_config it points to."""
    nodes = max(num_nodes, 1)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": ds_config_file,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": False,
        },
        "distributed_type": "DEEPSPEED",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": False,
    }
    return config
