"""`cluster.component_placement`: which GPUs the actor gets. RLinf's grammar, read without a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hybrid5d.errors import ConfigError

_KEY = "cluster.component_placement"
_GROUPS = "cluster.node_groups"
_RESERVED = ("cluster", "node")  # RLinf's own groups
_PART = re.compile(r"^(?P<a>[0-9]{1,9})(?:-(?P<b>[0-9]{1,9}))?$")


@dataclass(frozen=True)
class Placement:
    """The actor's processes. `everything`: written as `all` (of the cluster or a group), so any world size fits."""

    processes: int
    everything: bool = False
    node_group: str | None = None


class _Bad(Exception):
    def __init__(self, rule: str, fix: str = "see RLinf's placement grammar: all, 0-3, 0,2-4, 0-3:0-7"):
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def actor_placement(
    placement: dict[str, Any], num_nodes: int, gpus_per_node: int, node_groups: list[Any] | None = None
) -> tuple[Placement | None, list[ConfigError]]:
    """The actor's entry. Other components' entries are not ours and never refused."""
    entries = [(name, value) for name, value in placement.items() if "actor" in components(name)]
    available = num_nodes * gpus_per_node
    faults = _group_faults(node_groups or [], num_nodes)
    if faults:
        return None, faults
    if not placement:
        return Placement(available, everything=True), []
    if not entries:
        return None, [ConfigError(_KEY, None, "no entry names the actor", "add actor: all")]
    if len(entries) > 1:
        names = ", ".join(repr(n) for n, _ in entries)
        return None, [ConfigError(_KEY, None, f"the actor appears in {names}", "name it once")]
    name, value = entries[0]
    key = f"{_KEY}.{name}"
    try:
        group, spec = _group(value)
        if group is not None:
            available = _group_size(group, num_nodes, gpus_per_node, node_groups)
        return _parse(spec, available, group), []
    except _Bad as bad:
        return None, [ConfigError(key, value, bad.rule, bad.fix)]


def _group_faults(node_groups: list[Any], num_nodes: int) -> list[ConfigError]:
    """Labels are there, free and unique; node ranks exist, once each."""
    errors: list[ConfigError] = []
    labels: set[str] = set()
    for place, entry in enumerate(node_groups):
        key = f"{_GROUPS}[{place}]"
        label = entry.get("label") if isinstance(entry, dict) else None
        if isinstance(label, bool) or not isinstance(label, (str, int)):
            rule, fix = "a node group is a mapping with a label", "write {label: a100, node_ranks: 0-1}"
            errors.append(ConfigError(key, entry, rule, fix))
            continue
        if str(label) in _RESERVED or str(label) in labels:
            rule = "RLinf has a group of this name itself" if str(label) in _RESERVED else "two groups have this label"
            errors.append(ConfigError(f"{key}.label", label, rule, "choose another label"))
        labels.add(str(label))
        try:
            _nodes(entry, num_nodes)
        except _Bad as bad:
            errors.append(ConfigError(f"{key}.node_ranks", entry["node_ranks"], bad.rule, bad.fix))
    return errors


def _nodes(entry: dict[str, Any], num_nodes: int) -> int:
    """Nodes of a group."""
    spec = entry.get("node_ranks", "all")
    if isinstance(spec, bool) or not isinstance(spec, (str, int)):
        raise _Bad(f"a {type(spec).__name__} names no nodes", "write all, 0, 0-3 or 0,2-3")
    result = [n for ranks in _ranks(str(spec), num_nodes, "node") for n in ranks]
    if len(set(result)) < len(result):
        raise _Bad("a node appears twice", "name each node once")
    return len(result)


def components(name: str) -> list[str]:
    """The components that a key of the placement names."""
    return [part.strip() for part in str(name).split(",")]


def _group(value: Any) -> tuple[str | None, Any]:
    if not isinstance(value, dict):
        return None, value
    unknown = sorted(set(value) - {"node_group", "placement"})
    if unknown or "placement" not in value:
        raise _Bad(
            "a mapping needs `placement`, and may have `node_group`" + (f"; unknown: {unknown[0]}" if unknown else "")
        )
    group = value.get("node_group")
    if group is not None and not isinstance(group, str):
        raise _Bad("node_group must be a label", "write one label")
    if group is not None and "," in group:
        raise _Bad("the actor on several node groups has no static translation", "put it on one group")
    return group, value["placement"]


def _group_size(group: str, num_nodes: int, gpus_per_node: int, node_groups: list[Any] | None) -> int:
    if group == "cluster":
        return num_nodes * gpus_per_node
    for entry in node_groups or []:
        if str(entry["label"]) == group:
            hardware = entry.get("hardware")
            kind = hardware.get("type") if isinstance(hardware, dict) else None
            if kind is not None and str(kind).lower() not in ("gpu", "nvidia", "cuda", "amd", "rocm", "ascend", "npu"):
                raise _Bad(f"node group {group!r} counts {kind} devices, not accelerators", "place the actor on GPUs")
            return _nodes(entry, num_nodes) * gpus_per_node
    labels = ", ".join(str(e["label"]) for e in node_groups or []) or "none"
    raise _Bad(f"node group {group!r} is not defined (defined: {labels})", "define it in cluster.node_groups")


def _parse(spec: Any, available: int, group: str | None) -> Placement:
    text = _text(spec)
    if text == "all":
        return Placement(available, everything=True, node_group=group)
    last_gpu = -1
    processes = 0
    for part in text.split(","):
        resource, colon, process = part.strip().partition(":")
        (ranks,) = _ranks(resource, available, "GPU", hint=isinstance(spec, int))
        if ranks[0] <= last_gpu:
            raise _Bad(f"GPU {ranks[0]} after {last_gpu}: GPUs must ascend and appear once")
        last_gpu = ranks[-1]
        processes += _processes(process, len(ranks), processes) if colon else len(ranks)
    return Placement(processes, node_group=group)


def _text(spec: Any) -> str:
    if isinstance(spec, bool) or not isinstance(spec, (int, str)):
        raise _Bad("null is no placement" if spec is None else f"a {type(spec).__name__} is no placement")
    text = str(spec).strip()
    if not text:
        raise _Bad("the placement is empty")
    return text


def _ranks(text: str, available: int, what: str, hint: bool = False) -> list[range]:
    """The ranges of a comma list."""
    if text.strip() == "all":
        return [range(available)]
    result = []
    for part in text.split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise _Bad(f"{part!r} is neither a number nor a range a-b")
        first, last = int(match["a"]), int(match["b"] or match["a"])
        if last < first:
            raise _Bad(f"range {part} runs backwards", f"write {last}-{first}")
        if last >= available:
            more = "; YAML reads an unquoted a:b as one base-60 number, quote it" if hint else ""
            if what == "node":
                raise _Bad(f"node {last} is outside 0..{available - 1}", "use the nodes of cluster.num_nodes")
            raise _Bad(
                f"{what} {last} is outside 0..{available - 1} (nodes x GPUs per node = {available}){more}",
                "use the GPUs that exist, or set --gpus-per-node",
            )
        result.append(range(first, last + 1))
    return result


def _processes(text: str, resources: int, before: int) -> int:
    match = _PART.match(text.strip())
    if match is None:
        raise _Bad(f"process ranks {text!r} must be a number or a range a-b (not all)")
    first, last = int(match["a"]), int(match["b"] or match["a"])
    count = last - first + 1
    if first != before or count < 1:
        raise _Bad(f"process ranks {text} must go on from {before}")
    if count % resources and resources % count:
        raise _Bad(f"{count} processes and {resources} GPUs: one count must divide the other")
    return count
