"""What all ranks must have in common before anything is built: settings, versions, data. Compared through the store.

Hosts started with different files would train on, each with its own numbers: nothing of a collective says so.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hybrid5d.console import package_version, ranks_text
from hybrid5d.errors import ConfigError, ConfigErrors

_PACKAGES = ("hybrid5d", "torch", "deepspeed", "numpy", "tokenizers")
# Which job a process belongs to, where its launcher says so; then what libraries read and decides numbers.
_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "DS_ACCELERATOR", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
_LINES = 8
_LEAVE_SECONDS = 10.0
Facts = Mapping[str, Any]


def of_this_process() -> dict[str, str]:
    """Job and versions: of Python and of the packages that decide numbers; by the names that a refusal gives them."""
    result = {f"environment: {name}": os.environ[name] for name in _VARIABLES if name in os.environ}
    result["version of python"] = platform.python_version()
    for package in _PACKAGES:
        result[f"version of {package}"] = package_version(package) or "none"
    return result


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differences(reports: Sequence[tuple[str, Facts]]) -> list[ConfigError]:
    """Facts in which a rank differs from rank 0: `reports` are (host, facts) by rank."""
    errors: list[ConfigError] = []
    for key in dict.fromkeys(k for _, facts in reports for k in facts):
        holders: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(reports):
            holders.setdefault(json.dumps(facts.get(key), sort_keys=True), []).append(rank)
        if len(holders) == 1:
            continue
        first = json.dumps(reports[0][1].get(key), sort_keys=True)
        others = [f"{value} on {_places(ranks, reports)}" for value, ranks in holders.items() if value != first]
        rule = f"differs between ranks: {first} on {_places(holders[first], reports)}, {', '.join(others)}"
        errors.append(ConfigError(key, reports[0][1].get(key), rule, "start all hosts with the same"))
    if len(errors) > _LINES:
        rest = ", ".join(e.key for e in errors[_LINES:][:_LINES])
        errors[_LINES:] = [ConfigError("", None, f"and {len(errors) - _LINES} more that differ: {rest}")]
    return errors


def _places(ranks: Sequence[int], reports: Sequence[tuple[str, Facts]]) -> str:
    """`host (ranks 4 to 7)` of each host."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(reports[rank][0], []).append(rank)
    return " and ".join(f"{host} ({ranks_text(mine)})" for host, mine in hosts.items())


def compare(store: dist.Store, rank: int, world: int, facts: Facts, host: str | None = None) -> None:
    """Refuse ranks that were started with different facts. Every rank of the job calls it once.

    Raises:
        ConfigErrors: the same on every rank, one line for each fact that differs.
    """
    store = dist.PrefixStore("hybrid5d/same", store)
    store.set(f"facts/{rank}", json.dumps([host or socket.gethostname(), facts], sort_keys=True))
    if rank == 0:
        reports = [json.loads(store.get(f"facts/{r}")) for r in range(world)]
        errors = differences([(name, result) for name, result in reports])
        store.set("verdict", json.dumps([e.to_dict() for e in errors]))
        _stay(store, world, _LEAVE_SECONDS if errors else 0.0)
    else:
        errors = [ConfigError(**e) for e in json.loads(store.get("verdict"))]
        store.add("seen", 1)
    if errors:
        raise ConfigErrors(errors)


def _stay(store: dist.Store, world: int, seconds: float) -> None:
    """Rank 0's process may hold the store: it does not leave before the others have read why."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and store.add("seen", 0) < world - 1:
        time.sleep(0.02)
