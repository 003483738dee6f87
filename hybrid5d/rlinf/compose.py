"""Hydra's `defaults:` lists, composed statically (version_base 1.1: without `_self_` a file's own values win).

Understood: sibling files, config groups (`group: option`, lists of options, `null`), `@package` in the list and as a
header, `optional`, `override`, absolute `/group`, `_self_`, `hydra.searchpath`, and `group=option` on the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid5d.config.tree import merge, put
from hybrid5d.config.yaml_file import read_mapping, read_text
from hybrid5d.errors import ConfigError, ConfigErrors

_HEADER = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:,\s*([^}]*))?\}")
_REFERENCE = re.compile(r"^\$\{([\w/@.]+)\}$")
_SIMPLE = re.compile(r"^[\w./@:+-]+$")
MAX_FILES = 500


@dataclass(frozen=True)
class _Item:
    """One line of a defaults list."""

    group: str  # "" for a plain file name
    options: tuple[str, ...]
    package: str | None = None
    optional: bool = False
    override: bool = False

    @property
    def slot(self) -> str:
        return f"{self.group}@{self.package}" if self.package is not None else self.group


@dataclass
class Composer:
    """Composes one primary file; `choices` are `group=option` words of the command line."""

    primary: Path
    choices: dict[str, str | None] = field(default_factory=dict)
    errors: list[ConfigError] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)
    groups_seen: set[str] = field(default_factory=set)
    primary_defaults: Any = None
    _search: list[Path] = field(default_factory=list)
    _overrides: dict[str, str | None] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)  # choices of the primary file's groups

    def compose(self) -> dict[str, Any]:
        """The merged tree, `defaults` removed. Faults are collected in `errors`.

        Raises:
            ConfigErrors: the primary file itself cannot be read.
        """
        data, _ = self._read(self.primary)
        self.primary_defaults = data.get("defaults")
        self._search = [self.primary.parent, *self._searchpath(data)]
        self._collect_overrides(data.get("defaults"))
        return self._expand(data, self.primary, group="", package="", stack=(self.primary.resolve(),))

    def _read(self, path: Path) -> tuple[dict[str, Any], str | None]:
        text = read_text(path)
        data = read_mapping(path, text, self.readings)
        self.files.append(path)
        if len(self.files) > MAX_FILES:
            raise ConfigErrors([ConfigError("defaults", None, f"pulls in more than {MAX_FILES} files", "shorten it")])
        header = _HEADER.search(text.partition("\n\n")[0] if text.startswith("#") else "")
        return data, header.group(1) if header else None

    def _searchpath(self, data: dict[str, Any]) -> list[Path]:
        hydra = data.get("hydra")
        entries = hydra.get("searchpath") if isinstance(hydra, dict) else None
        result = []
        for entry in entries if isinstance(entries, list) else []:
            text = self._environment(str(entry))
            if text is None or text.startswith("pkg://"):
                continue
            folder = Path(text.removeprefix("file://")).expanduser()
            result.append(folder if folder.is_absolute() else self.primary.parent / folder)
        return result

    def _environment(self, text: str) -> str | None:
        missing = [m.group(1) for m in _ENV.finditer(text) if m.group(1) not in os.environ and m.group(2) is None]
        if missing:
            self.errors.append(
                ConfigError(
                    "hydra.searchpath",
                    text,
                    f"environment variable {missing[0]} is not set",
                    f"export {missing[0]} (RLinf's launch scripts do)",
                )
            )
            return None
        return _ENV.sub(lambda m: os.environ.get(m.group(1), m.group(2) or "").strip("'\""), text)

    def _collect_overrides(self, defaults: Any) -> None:
        for item in self._items(defaults, report=False):
            choice = item.options[0] if item.options else None
            if item.override:
                self._overrides[item.slot] = choice
            elif item.group and choice is not None:
                self._first[item.slot] = str(self.choices.get(item.slot) or choice)

    def _items(self, defaults: Any, report: bool = True) -> Iterable[_Item]:
        if defaults is None:
            return []
        if not isinstance(defaults, list):
            if report:
                self._fault(defaults, "must be a list")
            return []
        items = [self._item(entry, report) for entry in defaults]
        return [i for i in items if i is not None]

    def _item(self, entry: Any, report: bool) -> _Item | None:
        if isinstance(entry, str):
            name, _, package = entry.partition("@")
            return _Item("", (name,), package or None)
        if isinstance(entry, dict) and len(entry) == 1:
            ((words, value),) = entry.items()
            *flags, group = str(words).split() or [""]
            name, at, package = group.partition("@")
            package = package.rpartition(":")[2] if ":" in package else package
            options = value if isinstance(value, list) else [] if value is None else [value]
            texts = tuple(str(o) for o in options)
            if set(flags) <= {"override", "optional"} and name:
                return _Item(name, texts, package if at else None, "optional" in flags, "override" in flags)
        if report:
            self._fault(entry, "not a file name, nor `group: option`")
        return None

    def _fault(self, value: Any, rule: str, fix: str = "see Hydra's defaults list") -> None:
        self.errors.append(ConfigError("defaults", value, rule, fix))

    def _expand(
        self, data: dict[str, Any], path: Path, group: str, package: str, stack: tuple[Path, ...]
    ) -> dict[str, Any]:
        own = {k: v for k, v in data.items() if k != "defaults"}
        placed = _at(package, own)
        result: dict[str, Any] = {}
        self_seen = False
        for item in self._items(data.get("defaults")):
            if item.options == ("_self_",) and not item.group:
                result, self_seen = merge(result, placed), True
            elif not item.override and not item.group.lstrip("/").startswith("hydra/"):
                result = self._pull(item, result, group, package, stack)
        return result if self_seen else merge(result, placed)

    def _pull(
        self, item: _Item, result: dict[str, Any], group: str, package: str, stack: tuple[Path, ...]
    ) -> dict[str, Any]:
        absolute = (item.group or item.options[0]).startswith("/")
        base = "" if absolute else group
        if item.group:
            relative = item.group.lstrip("/")
            names = self._chosen(item, "/".join(p for p in (base, relative) if p))
        else:
            relative, _, name = item.options[0].lstrip("/").rpartition("/")
            names = [name]
        inside = "/".join(p for p in (base, relative) if p)
        for name in names:
            folder, _, leaf = f"{inside}/{name}".lstrip("/").rpartition("/")
            results = self._find(folder, leaf)
            if results is None:
                if not item.optional:
                    where = ", ".join(str(p) for p in self._search)
                    shown = f"{folder}/{leaf}".lstrip("/")
                    self._fault(
                        shown, f"{shown}.yaml does not exist under {where}", "put the file there or drop the line"
                    )
                continue
            if results.resolve() in stack:
                chain = " -> ".join(p.name for p in (*stack, results))
                self._fault(name, f"files include one another: {chain}", "break the circle")
                continue
            result = merge(result, self._load(results, (folder, inside, relative), item, package, stack))
        return result

    def _load(
        self, path: Path, place: tuple[str, str, str], item: _Item, parent: str, stack: tuple[Path, ...]
    ) -> dict[str, Any]:
        """`place`: folder of the file, its whole group, and the group relative to the file that names it."""
        folder, group, relative = place
        try:
            data, header = self._read(path)
        except ConfigErrors as exc:
            self.errors.extend(exc.errors)
            return {}
        group, relative = group.replace("/", "."), relative.replace("/", ".")
        if item.package is None and header is not None:
            package = _package(header, group, relative, "")  # a file's own header counts from the top
        else:
            package = _package(item.package, group, relative, parent)
        return self._expand(data, path, folder, package, (*stack, path.resolve()))

    def _chosen(self, item: _Item, inside: str) -> list[str]:
        slot = f"{inside}@{item.package}" if item.package is not None else inside
        self.groups_seen |= {slot, inside}
        for source in (self.choices, self._overrides):
            for name in (slot, item.slot, inside):
                if name in source:
                    choice = source[name]
                    return [] if choice is None else [choice]
        return [self._followed(option) for option in item.options]

    def _followed(self, option: str) -> str:
        """An option may repeat another group's choice: `env: ${mode}`."""
        match = _REFERENCE.match(option)
        return self._first.get(match.group(1), option) if match else option

    def _find(self, folder: str, name: str) -> Path | None:
        if not _SIMPLE.match(name):
            return None
        leaf = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
        for root in self._search:
            candidate = root / folder / leaf
            if candidate.is_file():
                return candidate
        return None


def _package(named: str | None, group: str, relative: str, parent: str) -> str:
    """Hydra's rule: relative to the package of the naming file, unless it says `_global_`."""
    if named is None:
        return _join(parent, relative)
    if named.startswith("_global_"):
        return named.removeprefix("_global_").lstrip(".")
    named = named.replace("_group_", group)
    return parent if named == "_here_" else _join(parent, named)


def _join(*parts: str) -> str:
    return ".".join(p for p in parts if p)


def _at(package: str, data: dict[str, Any]) -> dict[str, Any]:
    if not package:
        return data
    tree: dict[str, Any] = {}
    put(tree, package, data)
    return tree
