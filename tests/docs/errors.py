"""docs/errors.md, written from the sources: `python -m tests.docs.errors [--write | --check]`.

A message without a place (a class of exception or a room that the tables below do not name) is an error here.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from pathlib import Path

from hybrid5d.rlinf.keys import FOREIGN, MUST_BE_OFF
from tests.docs.generated import write_or_compare
from tests.docs.messages import Message, messages

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
KINDS = {
    "ConfigError": "settings", "_Bad": "settings", "DataError": "data", "BadRecord": "data", "TemplateError": "data",
    "CheckpointError": "weights", "DamagedCheckpoint": "weights", "HeaderError": "weights", "TrainingError": "run",
    "HostError": "run", "HybridError": "run", "RankFailure": "run", "said": "run", "refused": "command",
    "Stopped": "library", "notice": "notices",
}  # fmt: skip
OURS = ("Deadlock", "NoRoom", "DistBackendError")  # beside Python's own: what a caller of the library meets
ROOMS = {
    "cli": "Command line", "config": "The YAML file, its keys and values", "rlinf": "RLinf's YAMLs",
    "plan": "Layout, batch and keys that need one another", "hf": "Model folders", "devices": "Devices",
    "launch": "Starting a run", "train": "The run's folder, and training", "engine": "The engine",
    "generation": "Generation", "check": "`hybrid5d check`", "checkpoint": "Checkpoints, start weights and export",
    "parallel": "Ranks that must agree", "rl": "RL: rollouts, prompts, rewards", "data": "Data files",
    "errors": "Any", "shared_memory": "Shared memory", "context_parallel": "Attention and context parallelism",
    "tensor_parallel": "Tensor parallelism", "models": "Models", "__init__": "The package", "files": "Files",
    "load": "Loading", "console": "Console", "html": "Pages", "trace": "`hybrid5d trace`", "worker": "Starting a run",
}  # fmt: skip
PARTS = {
    "settings": (
        "Settings",
        "`ConfigError`: all that one start meets are printed together, each as `key=value: rule. Fix: fix`. Exit code "
        "2, before a process group exists. In Python: `ConfigErrors`; its `errors` have `key`, `value`, `rule`, `fix`.",
    ),
    "command": ("Options of a command", "Printed by the verb, exit code 2."),
    "data": (
        "Data",
        "`DataError`. The line starts with `file:line:` where a line is known; the first 20 of a file set are printed, "
        "the rest is counted.",
    ),
    "weights": ("Weights and checkpoints", "`CheckpointError`. Nothing is overwritten when one of these is printed."),
    "run": ("While a run is going on", "`TrainingError`, `HostError` and others with exit code 1, without a trace."),
    "notices": (
        "Notices",
        "Nothing is refused: what the run does otherwise than its file may suggest. Printed at the start (by `convert` "
        "and `plan` too), or as a warning when it happens.",
    ),
    "library": (
        "Exceptions of the library",
        "What `hybrid5d.tensor_parallel`, `context_parallel`, `rl`, `shared_memory` and others raise where Python code "
        "calls them wrongly, or where ranks do. A few are caught on the way and shown in one of the forms above.",
    ),
}  # fmt: skip
HEAD = """# Errors and notices

Every refusal and notice, read from the sources: written by `make errors-doc`; a test fails where this page and the
sources differ. `{name}` stands for what only the run knows, ` / ` separates alternatives. Exit codes of `hybrid5d
train`: 0 the end was reached, 1 failed, 2 refused, 3 stopped by SIGTERM with everything saved.

A value of the wrong type or outside its range is refused in the words of its type (`should be greater than or equal to
1`), with the key's description and default as the fix; `hybrid5d config schema` lists every key's type and range. A
wrong option of a command ends in argparse's usage line, exit code 2.
"""


def part_of(message: Message) -> str:
    """Which part of the page a message stands in."""
    if message.kind in KINDS:
        return KINDS[message.kind]
    if message.kind in OURS or hasattr(builtins, message.kind):
        return "library"
    raise KeyError(f"{message.module}: {message.kind} has no place in {PAGE.name}: name it in {__name__}.KINDS")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").strip()


def _code(text: str) -> str:
    return " / ".join(f"`{t}`" for t in text.split(" / ")) if text else ""


def _row(part: str, message: Message) -> tuple[str, ...]:
    text, split, fix = message.text.partition(". Fix: ")
    fix = message.fix or (fix if split else "")
    if part == "settings":
        key = "cluster.component_placement" if message.kind == "_Bad" else message.key
        return _code(key), _cell(text), _cell(fix)
    if part == "library":
        return message.kind, _cell(message.text)
    return (_cell(message.text),) if part == "notices" else (_cell(text), _cell(fix))


HEADS = {"settings": ("key", "rule", "fix"), "library": ("class", "text"), "notices": ("text",)}


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in sorted(set(rows))]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines, ""]


def _off() -> list[str]:
    rows = [
        (_code(k), _cell(rule), _cell(fix)) for k, (_, rule, fix) in MUST_BE_OFF.items() if not k.startswith("critic")
    ]
    return [
        "### Keys of RLinf and Megatron that must be off (`critic.` as `actor.`)",
        "",
        *_table(HEADS["settings"], rows),
    ]


def _dropped() -> list[str]:
    why: dict[str, list[str]] = {}
    for key, entry in FOREIGN.items():
        if entry.notice and not key.startswith("critic."):
            why.setdefault(entry.why, []).append(key)
    rows = [(_cell(reason), _code(" / ".join(keys))) for reason, keys in why.items()]
    head = "### Keys of RLinf and Megatron that are dropped with a notice (`critic.` as `actor.`)"
    return [head, "", *_table(("why", "keys"), rows)]


def page() -> str:
    """The document."""
    lines, found = HEAD.splitlines(), messages()
    handed = sorted({(m.module, m.text) for m in found if not m.says})
    seen: set[tuple[str, ...]] = set()
    for part, (title, words) in PARTS.items():
        lines += ["", f"## {title}", "", words, ""]
        rooms: dict[str, list[tuple[str, ...]]] = {}
        for message in found:
            row = _row(part, message) if message.says and part_of(message) == part else ()
            if row and (part, *row) not in seen:
                seen.add((part, *row))
                rooms.setdefault(message.module.split("/")[0], []).append(row)
        for room in sorted(rooms, key=list(ROOMS).index):
            lines += [f"### {ROOMS[room]}", "", *_table(HEADS.get(part, ("text", "fix")), rooms[room])]
        lines += _off() if part == "settings" else _dropped() if part == "notices" else []
    lines += ["", "## Handed on", "", "Texts of the system, of a library or of a message above, in these places:", ""]
    lines += _table(("module", "text"), [(f"`{module}`", _cell(text)) for module, text in handed])
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page(), "errors-doc"))
