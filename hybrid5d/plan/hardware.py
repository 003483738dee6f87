"""Machines: data sheet and efficiencies, from `hardware.yaml` or a file of the user's. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hybrid5d.config.dtypes import PRECISIONS
from hybrid5d.config.tree import nearest
from hybrid5d.config.yaml_file import parse_yaml, read_text
from hybrid5d.errors import ConfigError, ConfigErrors

FILE = Path(__file__).with_name("hardware.yaml")
_SEE = f"see {FILE}"
_NAMES = ", ".join(PRECISIONS)
_AT_LEAST_0 = (
    "link_latency", "network_latency", "context_bytes", "communicator_bytes", "fragmentation",
)  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """One machine; hardware.yaml says units and sources."""

    name: str
    peak_tflops: dict[str, float]
    best_matmul: float
    memory_gib: float
    memory_tbps: float
    link_gbps: float
    network_gbps: float
    matmul_efficiency: tuple[tuple[float, float], ...]
    attention_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    network_efficiency: float
    link_latency: float
    network_latency: float
    overlap_dp: float
    software: float
    context_bytes: int
    communicator_bytes: int
    fragmentation: float
    headroom: float

    @property
    def memory_bytes(self) -> int:
        """Of a card."""
        return round(self.memory_gib * 2**30)

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet.

        Raises:
            ConfigErrors: the machine's file has none for this precision.
        """
        if precision not in self.peak_tflops:
            rule = f"has no figure for {precision}, the run's precision"
            raise ConfigErrors([ConfigError(f"--gpu {self.name}: peak_tflops", self.peak_tflops, rule, "add it")])
        return self.peak_tflops[precision] * 1e12

    def matmul_seconds(self, flops: float, precision: str) -> float:
        """One product's time: large ones reach more of the peak."""
        part = next(e for least, e in self.matmul_efficiency if flops >= least)
        return flops / (self.peak(precision) * self.best_matmul * part) if flops else 0.0

    def memory_seconds(self, count: float) -> float:
        """Reading or writing so many bytes."""
        return count / (self.memory_tbps * 1e12 * self.memory_efficiency)

    def wire_seconds(self, sent: float, calls: float, across_nodes: bool, inside: int = 1) -> float:
        """Sending so many bytes in so many operations.

        Across nodes the members of a group that share a node share its cards: each byte leaves the node once, through
        one of `inside` of them, and passes the others over the links.
        """
        links = sent / (self.link_gbps * 1e9 * self.link_efficiency)
        if not across_nodes:
            return links + calls * self.link_latency
        network = sent / inside / (self.network_gbps * 1e9 * self.network_efficiency)
        return max(network, links if inside > 1 else 0.0) + calls * self.network_latency


def load_hardware(name: str) -> Hardware:
    """A machine of hardware.yaml by its name, or a YAML file of the user's.

    Raises:
        ConfigErrors: neither; a key that is unknown, missing or no number.
    """
    table = parse_yaml(read_text(FILE), str(FILE))
    defaults, machines = table["defaults"], table["machines"]
    if name in machines:
        return _hardware(name, {**defaults, **machines[name]})
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        rule = f"neither a machine of {FILE.name} ({', '.join(machines)}) nor a YAML file"
        raise ConfigErrors([ConfigError("--gpu", name, rule, f"copy {FILE} and edit it")])
    entry = parse_yaml(read_text(path), str(path))
    known = {f.name for f in fields(Hardware)} - {"name"}
    if not isinstance(entry, dict):
        raise ConfigErrors([ConfigError(f"--gpu {path.name}", entry, "must be a mapping of a machine's keys", _SEE)])
    errors = []
    for key in entry:
        if key not in known:
            near = nearest(key, known)
            fix = f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"
            errors.append(ConfigError(f"--gpu {path.name}: {key}", entry[key], "unknown key", fix))
    whole = {**defaults, **entry}
    for key in sorted(known - set(whole)):
        errors.append(ConfigError(f"--gpu {path.name}: {key}", None, "is missing", _SEE))
    for key, value in whole.items():
        if key in known and (wrong := _fault(key, value)):
            errors.append(ConfigError(f"--gpu {path.name}: {key}", value, wrong, _SEE))
    if errors:
        raise ConfigErrors(errors)
    return _hardware(path.stem, whole)


def hardware_of(device: str) -> Hardware | None:
    """The machine of hardware.yaml that a card's name holds ("NVIDIA H100 80GB HBM3"); None where none does."""
    words = device.lower().replace("-", " ").split()
    name = next((name for name in parse_yaml(read_text(FILE), str(FILE))["machines"] if name in words), None)
    return None if name is None else load_hardware(name)


def _fault(key: str, value: Any) -> str | None:
    """Why a machine cannot have this value; everything that times are divided by must be above 0."""
    if key == "peak_tflops":
        named = isinstance(value, dict) and bool(value) and set(value) <= set(PRECISIONS)
        return None if named and all(map(_positive, value.values())) else f"must be TFLOP/s above 0 by {_NAMES}"
    if key == "matmul_efficiency":
        pairs = isinstance(value, list) and bool(value) and all(isinstance(x, list) and len(x) == 2 for x in value)
        if pairs and all(_number(least) and _positive(part) for least, part in value):
            steps = [least for least, _ in value]
            if steps == sorted(steps, reverse=True) and steps[-1] == 0:
                return None
        return "must be pairs [from so many FLOP on, efficiency above 0], falling, the last from 0"
    if key == "overlap_dp":
        return None if _number(value) and value <= 1 else "must be a part from 0 to 1"
    if key == "headroom":
        return None if _number(value) and value < 1 else "must be a part from 0 to below 1"
    if key in _AT_LEAST_0:
        return None if _number(value) else "must be a number of 0 or more"
    return None if _positive(value) else "must be a number above 0"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _hardware(name: str, entry: dict[str, Any]) -> Hardware:
    steps = tuple((float(least), float(part)) for least, part in entry["matmul_efficiency"])
    return Hardware(name=name, **{**entry, "matmul_efficiency": steps})
