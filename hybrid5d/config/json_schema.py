"""JSON Schema (2020-12) of our YAML, for editors: completion, descriptions, and what a key may be.

It takes whatever `load` takes of types and ranges; rules between keys are `hybrid5d.plan.rules`'s.
"""

from __future__ import annotations

from typing import Any

from hybrid5d.config.schema import RunConfig

_REFERENCE = {"type": "string", "pattern": r"\$\{", "description": "a reference to another key, ${block.key}"}
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_OURS = ("title", "unit", "to", "unread", "only", *_LIMITS)  # of `key`, or of pydantic: nothing to an editor


def json_schema() -> dict[str, Any]:
    """The schema of a whole run."""
    root = RunConfig.model_json_schema()
    defs = {name: _block(block) for name, block in root.pop("$defs").items()}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "hybrid5d run"}
    return {**head, **_block(root), "$defs": defs}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    properties = {name: _key(value) for name, value in block["properties"].items()}
    return {
        "type": "object", "description": block["description"], "properties": properties, "additionalProperties": False,
    }  # fmt: skip


def _key(value: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in value:
        return {"$ref": value["$ref"], "description": value["description"]}
    unit = f" ({value['unit']})" if value.get("unit") not in (None, "path", "paths") else ""
    kept = {"description": f"{value['description']}{unit}", "default": value["default"]} if "default" in value else {}
    kept.setdefault("description", f"{value['description']}{unit}")
    given = value.get("anyOf", [{k: v for k, v in value.items() if k not in kept}])
    kinds = [_kind(k) for k in given]
    if not any(isinstance(k.get("type"), list) for k in kinds):  # free text holds references anyway
        kinds = [*kinds, _REFERENCE]
    return {**kept, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}


def _kind(value: dict[str, Any]) -> dict[str, Any]:
    """One type: limits under JSON Schema's names, the tighter where there are two; numbers are fine for text."""
    out = {k: v for k, v in value.items() if k not in _OURS}
    for ours, theirs in _LIMITS.items():
        if ours in value:
            tighter = max if ours in ("ge", "gt") else min
            out[theirs] = tighter(value[ours], value.get(theirs, value[ours]))
    if out == {"type": "string"}:
        return {"type": ["string", "number"]}
    for name in ("items", "additionalProperties"):
        if isinstance(out.get(name), dict):
            out[name] = _kind(out[name])
    if "prefixItems" in out:
        out["prefixItems"] = [_kind(item) for item in out["prefixItems"]]
    return out
