"""One YAML file to plain Python data: YAML 1.1 as OmegaConf reads it, nothing that could surprise later."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hybrid5d.errors import ConfigError, ConfigErrors

MAX_BYTES = 8 * 1024 * 1024
MAX_NODES = 400_000  # after anchors are expanded
MAX_DEPTH = 100
# YAML 1.1 wants a dot and a signed exponent; 1e-3, 2e-05 and 1e5 are numbers too.
_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |\.[0-9_]+(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_ODD = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+)$")  # octal by a leading 0, base 60 by a colon
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """SafeLoader with wider floats, no dates, and duplicate keys refused."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for name, _ in node.value:
                if name.tag == "tag:yaml.org,2002:merge" or not isinstance(name, yaml.ScalarNode):
                    continue
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {name.value!r} appears twice in one mapping", name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Remembers a text that people read otherwise than YAML 1.1."""
        number = int(super().construct_yaml_int(node))
        if _ODD.match(node.value) and (":" in node.value or int(node.value) != number):
            number = _Odd(number)
            number.text = node.value
        return number


class _Odd(int):
    text: str


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TIMESTAMP, "tag:yaml.org,2002:float")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _fail(where: str, rule: str, fix: str = "repair the file") -> ConfigErrors:
    return ConfigErrors([ConfigError("", None, f"{where}: {rule}", fix)])


class _Copier:
    """Copies loaded data with string keys; finds cycles, bombs and types that no config has."""

    def __init__(self, where: str):
        self.where, self.nodes = where, 0
        self.readings: list[str] = []

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _fail(self.where, f"more than {MAX_NODES} values after anchors are expanded")
        if depth > MAX_DEPTH:
            raise _fail(self.where, f"{path[:60]}... is nested deeper than {MAX_DEPTH} levels, or contains itself")
        if isinstance(value, dict):
            return {self._key(k, path): self.copy(v, f"{path}.{k}".lstrip("."), depth + 1) for k, v in value.items()}
        if isinstance(value, list):
            return [self.copy(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        if isinstance(value, _Odd):
            kind = "base 60" if ":" in value.text else "octal"
            shown = f"{self.where}: {path}: YAML 1.1 reads {value.text} as {int(value)} ({kind})"
            self.readings.append(f"{shown}; write {int(value)}, or quote it")
            return int(value)
        if value is None or isinstance(value, (str, int, float, bool)):
            return value
        raise _fail(self.where, f"{path}: a {type(value).__name__} is no configuration value", "write it as text")

    def _key(self, name: Any, path: str) -> str:
        if isinstance(name, (str, int, float, bool)) or name is None:
            return "null" if name is None else str(name)
        raise _fail(self.where, f"{path or 'top level'}: {name!r} cannot be a key", "use a plain name")


def parse_yaml(text: str, where: str, readings: list[str] | None = None) -> Any:
    """Plain data of a YAML document; `where` names it in errors. `readings` gets a notice of each number that is not
    what it looks like.

    Raises:
        ConfigErrors: not YAML, a duplicate key, a cycle, an anchor bomb, or a type that no config has.
    """
    try:
        loaded = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain data only
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        problem = " ".join(str(getattr(exc, "problem", None) or exc).split())
        raise _fail(place, f"not valid YAML: {problem}") from None
    except RecursionError:
        raise _fail(where, f"nested deeper than {MAX_DEPTH} levels") from None
    except (ValueError, TypeError, OverflowError, AttributeError) as exc:
        raise _fail(where, f"a value cannot be read: {exc}") from None
    copier = _Copier(where)
    data = copier.copy(loaded, "", 0)
    if readings is not None:
        readings += copier.readings
    return data


def read_text(path: Path) -> str:
    """Content of a UTF-8 file; its absence, size and encoding are reported as user errors."""
    try:
        if path.is_dir():
            raise _fail(str(path), "is a folder, not a YAML file", "give the file")
        if path.stat().st_size > MAX_BYTES:
            raise _fail(str(path), f"is larger than {MAX_BYTES // 2**20} MiB: no configuration is that long")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise _fail(str(path), "does not exist", "check the path") from None
    except UnicodeDecodeError as exc:
        raise _fail(str(path), f"is not UTF-8 (byte {exc.start})", "save it as UTF-8") from None
    except (OSError, ValueError) as exc:
        raise _fail(str(path), f"cannot be read: {getattr(exc, 'strerror', None) or exc}") from None


def read_mapping(path: Path, text: str | None = None, readings: list[str] | None = None) -> dict[str, Any]:
    """The mapping a YAML file holds ({} for an empty file)."""
    data = parse_yaml(read_text(path) if text is None else text, str(path), readings)
    if data is not None and not isinstance(data, dict):
        raise _fail(str(path), f"holds a {type(data).__name__}, not a mapping of keys")
    return data or {}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our loader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def dump_yaml(tree: dict[str, Any]) -> str:
    """Text that `parse_yaml` reads back equal; `${` is escaped so that nothing is resolved twice."""
    escaped = _each_text(tree, lambda text: text.replace("${", "\\${"))
    return yaml.dump(escaped, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def unescaped(value: Any) -> Any:
    """What `dump_yaml` was given, where its text was parsed and not resolved."""
    return _each_text(value, lambda text: text.replace("\\${", "${"))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {k: _each_text(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(v, change) for v in value]
    return change(value) if isinstance(value, str) else value
