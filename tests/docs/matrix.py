"""The README's support matrix, counted from the tests: `python -m tests.docs.matrix [--write | --check]`.

A number is how many different layouts some test of the suite trains and compares with one process.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine_kit import Layout
from tests.layouts import Case

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- matrix: written by `make matrix` -->", "<!-- /matrix -->"
AXES: dict[str, Callable[[Layout], bool]] = {
    "TP": lambda x: x.tp > 1, "SP": lambda x: x.sp, "CP": lambda x: x.cp > 1, "PP": lambda x: x.pp > 1,
    "DP": lambda x: x.dp > 1,
}  # fmt: skip


def _method(name: str) -> Callable[[Layout], bool]:
    return lambda x: x.cp > 1 and x.model.get("cp_comm_type", "p2p") == name


def _zero(stage: int) -> Callable[[Layout], bool]:
    return lambda x: x.zero == stage


ROWS: dict[str, Callable[[Layout], bool]] = {
    **AXES,
    "CP by ring (`p2p`)": _method("p2p"),
    "CP by Ulysses (`a2a`)": _method("a2a"),
    "CP by both (`a2a+p2p`)": _method("a2a+p2p"),
    "CP by gathering (`all_gather`)": _method("all_gather"),
    "ZeRO 0": _zero(0), "ZeRO 1": _zero(1), "ZeRO 2": _zero(2), "ZeRO 3": _zero(3),
    "micro-batch size above 1": lambda x: x.micro > 1,
    "bf16": lambda x: x.precision == "bf16",
}  # fmt: skip


TRAINED = ("engine", "train", "checkpoint", "context_parallel", "tensor_parallel", "parallel", "launch")  # start ranks


class _Collector:
    """A pytest plugin that keeps the layouts of the collected tests."""

    def __init__(self) -> None:
        self.layouts: dict[str, Layout] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            layout = _layout(getattr(getattr(item, "callspec", None), "params", {}))
            if layout is not None:
                self.layouts[str(layout)] = layout


def _layout(params: dict[str, Any]) -> Layout | None:
    case = params.get("case")
    found = case.layout if isinstance(case, Case) else params.get("layout")
    if isinstance(found, Layout):
        return found
    axes = params.get("axes")
    if isinstance(axes, dict):
        model = {"cp_comm_type": params["method"]} if "method" in params else {}
        return Layout(**axes, model=model, precision=params.get("precision", "fp32"), zero=params.get("zero", 1))
    return None


def collected() -> list[Layout]:
    """Every layout that is a parameter of a test."""
    plugin = _Collector()
    with contextlib.redirect_stdout(io.StringIO()):
        folders = [str(README.parent / "tests" / name) for name in TRAINED]
        words = ["--collect-only", "-q", "-p", "no:cacheprovider", *folders]
        code = pytest.main(words, [plugin])
    if code != 0:
        raise SystemExit("tests cannot be collected")
    return list(plugin.layouts.values())


def table() -> str:
    """The matrix as Markdown."""
    layouts = collected()
    lines = [f"| layouts tested | alone | {' | '.join(f'with {a}' for a in AXES)} |", "|---|--:|" + "--:|" * len(AXES)]
    for name, has in ROWS.items():
        mine = [x for x in layouts if has(x)]
        own = name if name in AXES else ("CP" if name.startswith("CP") else None)
        alone = sum(not any(test(x) for axis, test in AXES.items() if axis != own) for x in mine)
        cells = ["" if axis == own else str(sum(map(test, mine)) or "-") for axis, test in AXES.items()]
        lines.append(f"| {name} | {'' if name == 'SP' else alone or '-'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print, write or compare."""
    text, wanted = README.read_text(encoding="utf-8"), table()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}\n{wanted}\n{END}{after}"
    if "--write" in sys.argv[1:]:
        README.write_text(fresh, encoding="utf-8")
    elif "--check" in sys.argv[1:]:
        print("the support matrix is up to date" if fresh == text else "README.md: run make matrix")
        return int(fresh != text)
    else:
        print(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
