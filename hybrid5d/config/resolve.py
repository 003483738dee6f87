"""`${...}` resolved lazily: a reference that dangles spoils only the key that holds it."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid5d.config.tree import MISSING, get, leaves

_PLAIN_REFERENCE = re.compile(r"^\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}$")


def multiply(a: Any, b: Any) -> Any:
    """Product."""
    return a * b


def int_div(a: Any, b: Any) -> Any:
    """Floor division."""
    return a // b


def subtract(a: Any, b: Any) -> Any:
    """Difference."""
    return a - b


def negate(value: Any) -> bool:
    """Negation of Python truthiness: any non-empty text counts as true."""
    return not value


def dtype_name(name: Any) -> str:
    """RLinf turns the name into torch's dtype; a name is enough here."""
    return str(name)


# RLinf's own resolvers (rlinf/utils/omega_resolver.py).
RESOLVERS: dict[str, Any] = {
    "multiply": multiply,
    "int_div": int_div,
    "subtract": subtract,
    "not": negate,
    "torch.dtype": dtype_name,
}


def _register() -> None:
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)


def _references(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value or value == "???"
    if isinstance(value, list):
        return any(_references(v) for v in value)
    return isinstance(value, dict) and any(_references(v) for v in value.values())


def _reason(exc: BaseException) -> str:
    if isinstance(exc, RecursionError):
        return "the reference goes round in a circle"
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0] if lines else type(exc).__name__


def resolve(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Resolve every interpolation.

    Returns:
        the resolved tree (a dangling leaf keeps its text) and {path of each dangling leaf: what is wrong}.
    """
    pending = [(path, value) for path, value in leaves(tree) if _references(value)]
    if not pending:
        return tree, {}
    dangling: dict[str, str] = {}
    result = _copy(tree)
    pending = [(path, value) for path, value in pending if not _resolve_simple(tree, result, path, value, dangling)]
    if not pending:
        return result, dangling
    _register()
    safe = _copy(tree)
    for path, value in pending:
        try:
            OmegaConf.create({"x": value})
        except (OmegaConfBaseException, ValueError, RecursionError) as exc:
            dangling[path] = _reason(exc)
            _put_exact(safe, _parts(tree, path), None)
    try:
        config = OmegaConf.create(safe)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as exc:
        return result, dangling | {path: _reason(exc) for path, _ in pending}
    for path, value in pending:
        if path in dangling:
            continue
        try:
            parts = _parts(tree, path)
            _put_exact(result, parts, _value(config, parts))
        except Exception as exc:  # a resolver may raise anything; it becomes the user's error, by key
            dangling[path] = f"{value!r}: {_reason(exc)}" if not isinstance(value, str) else _reason(exc)
    return result, dangling


def _resolve_simple(
    tree: dict[str, Any], result: dict[str, Any], path: str, value: Any, dangling: dict[str, str]
) -> bool:
    """`${a.b}` that refers to a plain value, or to nothing: most references, without OmegaConf's parser."""
    match = _PLAIN_REFERENCE.match(value) if isinstance(value, str) else None
    if match is None:
        return False
    target = get(tree, match.group(1), MISSING)
    if target is MISSING:
        dangling[path] = f"{match.group(1)!r} does not exist"
        return True
    if isinstance(target, dict) or _references(target):
        return False
    _put_exact(result, _parts(tree, path), _copy(target))
    return True


def _value(config: Any, parts: list[str]) -> Any:
    node = config
    for part in parts[:-1]:
        node = node[part]
    found = node[parts[-1]]
    if OmegaConf.is_config(found):
        return OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    if found is None or isinstance(found, (str, int, float, bool)):
        return found
    raise TypeError(f"resolves to a {type(found).__name__}, which no configuration holds")


def _parts(tree: Any, path: str) -> list[str]:
    """Split a dotted path along the real keys (keys themselves may hold dots)."""
    if path in tree:
        return [path]
    plain = path.split(".")
    if get(tree, path, MISSING) is not MISSING:
        return plain
    for name, inner in tree.items():
        if isinstance(inner, dict) and path.startswith(f"{name}."):
            rest = path[len(name) + 1 :]
            found = _try_parts(inner, rest)
            if found is not None:
                return [name, *found]
    raise KeyError(path)


def _try_parts(tree: Any, path: str) -> list[str] | None:
    try:
        return _parts(tree, path)
    except KeyError:
        return None


def _put_exact(target: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        target = target[part]
    target[parts[-1]] = value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value
