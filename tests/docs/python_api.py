"""docs/python.md, written from signatures and docstrings: `python -m tests.docs.python_api [--write | --check]`.

What is public: the names that the packages below export, and the methods of their classes that have a docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.docs.generated import write_or_compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
# module -> names; empty: what it exports
MODULES: dict[str, tuple[str, ...]] = {
    "hybrid5d": (),
    "hybrid5d.data.build": ("loader_from_plan",),
    "hybrid5d.plan.run": ("build_plan",),
    "hybrid5d.generation": (),
    "hybrid5d.rl": (),
    "hybrid5d.tensor_parallel": (),
    "hybrid5d.context_parallel": (),
    "hybrid5d.shared_memory": (),
    "hybrid5d.errors": ("ConfigErrors", "ConfigError", "DataError", "CheckpointError", "DamagedCheckpoint"),
}
OPAQUE = ("SharedMemoryGroup",)  # used through torch.distributed
HEAD = """# Python reference

Written by `make python-doc` from the signatures and docstrings; a test fails where they differ. Everything that is not
named here is internal. Shapes: `b` rows of a micro-batch, `S` tokens of a row, `H` hidden size, `V` vocabulary, `tp`
and `cp` the degrees they are divided by. A process group may be an `Axis`, a `torch.distributed` group, or None for the
default one. [README](../README.md#as-a-library) has an example, `examples/` more.
"""


def _annotation(value: Any) -> str:
    if value is inspect.Parameter.empty or isinstance(value, str):
        return value if isinstance(value, str) else ""
    return str(getattr(value, "__forward_arg__", None) or inspect.formatannotation(value))


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind, default = _annotation(parameter.annotation), parameter.default
    shown = repr(default) if "<" not in repr(default) else "..."  # an object that only code can name
    value = "" if default is parameter.empty else f" = {shown}" if kind else f"={shown}"
    return f"{stars}{parameter.name}{f': {kind}' if kind else ''}{value}"


def _signature(name: str, thing: Any) -> str:
    """As it is called; one parameter a line where that is longer than 110 characters."""
    if inspect.isclass(thing) and issubclass(thing, Exception) and "__init__" not in vars(thing):
        return f"{name}(text: str)"
    found, parts, named = inspect.signature(thing), [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named = named or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(_parameter(parameter))
    result = "" if inspect.isclass(thing) else _annotation(found.return_annotation)
    end = f") -> {result}" if result else ")"
    line = f"{name}({', '.join(parts)}{end}"
    return line if len(line) <= 110 else "\n".join([f"{name}(", *(f"    {p}," for p in parts), end])


def _prose(text: str | None) -> list[str]:
    """A docstring as Markdown: its sections as lists under a bold word."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(text or "").splitlines():
        name, colon, rest = line.strip().partition(":")
        if line.strip() and not line.startswith(" "):
            section = ""
        if re.fullmatch(r"(Args|Raises|Attributes|Returns):", line):
            section = line[:-1]
            lines += ["", f"**{line[:-1]}**", ""]
        elif section not in ("", "Returns") and colon and re.match(r"    \S", line):
            lines.append(f"- `{name}`:{rest}" if re.fullmatch(r"[\w, ]+", name) else f"- {line.strip()}")
        else:
            lines.append(f"  {line.strip()}" if section and line.strip() else line)
    return [line.replace("<", "&lt;") for line in lines]


def _entry(name: str, thing: Any, level: str) -> list[str]:
    if not callable(thing):
        shown = repr(thing) if "<" not in repr(thing) else f"a {type(thing).__name__}"
        return [f"{level} {name}", "", f"`{name}`: {shown}", ""]
    code = ["```python", _signature(name, thing), "```"]
    lines = [f"{level} {name.rpartition('.')[2]}", "", *code, "", *_prose(thing.__doc__), ""]
    for method, value in vars(thing).items() if inspect.isclass(thing) and name not in OPAQUE else ():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if method.startswith("_") or not getattr(plain, "__doc__", None):
            continue
        if isinstance(plain, property):
            lines += [f"**`{name}.{method}`** {' '.join(_prose(plain.__doc__)).strip()}", ""]
        elif inspect.isfunction(plain):
            lines += _entry(f"{name}.{method}", plain, level + "#")
    return lines


def page() -> str:
    """The document."""
    lines = HEAD.splitlines()
    for path, names in MODULES.items():
        module = import_module(path)
        lines += ["", f"## `{path}`", "", *(_prose(module.__doc__) if not names else []), ""]
        for name in sorted(names or (n for n in module.__all__ if not n.startswith("_")), key=str.lower):
            lines += _entry(name, getattr(module, name), "###")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page(), "python-doc"))
