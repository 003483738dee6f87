"""The tables of docs/axes/*.md: `python -m tests.docs.axes [--write | --check]`.

Counts and bytes are `plan`'s (held against counted ones by tests/plan/test_measured.py and
tests/context_parallel/test_wire.py), bubbles are the programs', ratios are the README's measured ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybrid5d.hf.spec import parse_hf_config
from hybrid5d.plan.job import Job, played
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.plan.traffic import Volume, layer_traffic, stage_traffic

REPO = Path(__file__).resolve().parents[2]
PAGES = REPO / "docs" / "axes"
BEGIN, END = "<!-- axis: written by `make axes-doc` -->", "<!-- /axis -->"
LAYERS, MICRO_BATCHES, DEGREES = 32, 32, (2, 4, 8)
LLAMA = parse_hf_config({
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "rope_theta": 500000.0,
})  # fmt: skip
SHAPE = "Llama 3 8B's sizes, bf16, micro-batches of one row of 8,192 tokens"
# pages -> columns of the README's table of costs
MEASURED = {
    "tensor": ("TP",), "sequence": ("TP + SP",), "context": ("CP ring", "CP Ulysses"), "pipeline": ("PP",),
    "data": ("DP, ZeRO 1",),
}  # fmt: skip


def job(tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1) -> Job:
    """The model on a layout."""
    layout, schedule = ParallelLayout(pp=pp, dp=dp, cp=cp, tp=tp), Schedule(pp=pp)
    return Job(LLAMA, layout, (LAYERS // pp,) * pp, schedule, MICRO_BATCHES, 1, 8192)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}" if size >= 2**20 or not size else f"{size / 2**20:.2f}"


def _count(calls: float) -> str:
    return f"{calls:g}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|" + "--:|" * len(head), *lines[1:]]


def _both(forward: Volume, backward: Volume) -> tuple[str, ...]:
    calls = (_count(forward.calls), _count(backward.calls))
    return (*calls, _mib(forward.payload), _mib(backward.payload), _mib(forward.sent), _mib(backward.sent))


LAYER = (
    "operations, forward",
    "backward",
    "payload, MiB, forward",
    "backward",
    "sent by a rank, MiB, forward",
    "backward",
)


def _per_layer(sp: bool) -> list[str]:
    found = [(n, layer_traffic(replace(job(tp=n), sp=sp))) for n in DEGREES]
    rows = [(str(n), *_both(each.tp_forward, each.tp_backward)) for n, each in found]
    return [f"Per decoder layer and micro-batch, {SHAPE}:", "", *_table(("n", *LAYER), rows)]


def _context() -> list[str]:
    rows = []
    for method, ulysses in (("p2p", 1), ("all_gather", 1), ("a2a", 1), ("a2a+p2p", 2)):
        for n in DEGREES:
            found = layer_traffic(replace(job(cp=n), cp_method=method, ulysses=ulysses))
            if method != "a2a+p2p" or n > 2:
                rows.append((method, str(n), *_both(found.cp_forward, found.cp_backward)))
    text = f"Per decoder layer and micro-batch, {SHAPE} (`a2a+p2p` with Ulysses 2):"
    return [text, "", *_table(("method", "n", *LAYER), rows)]


def _pipeline() -> list[str]:
    sent = [(n, stage_traffic(job(pp=n), 1 if n > 2 else 0)["pp"]) for n in DEGREES]
    rows = [(str(n), _count(v.calls / MICRO_BATCHES), _mib(v.sent / MICRO_BATCHES)) for n, v in sent]
    head = ("n", "messages sent and received by a rank", "sent, MiB")
    lines = [f"Per micro-batch, a stage in the middle (n = 2: an end), {SHAPE}:", "", *_table(head, rows), ""]
    kinds = [
        Schedule("gpipe", 4),
        Schedule("1f1b", 4),
        Schedule("interleaved", 4, 2),
        Schedule("zb-h1", 4),
        Schedule("zbv", 4, 2),
    ]
    cells = []
    for m in (4, 8, 32):
        for schedule in kinds:
            times = played(schedule, m)
            cells.append((schedule.kind, str(m), f"{100 * times.bubble:.1f} %", str(max(times.live))))
    return [*lines, "4 stages, by the programs:", "", *_table(("schedule", "micro-batches", "bubble", "live"), cells)]


def _data() -> list[str]:
    rows = []
    for zero in (1, 2, 3):
        for n in DEGREES:
            found = stage_traffic(replace(job(dp=n), zero=zero), 0)["dp"]
            rows.append((str(zero), str(n), _mib(found.payload), _mib(found.sent)))
    text = f"Per optimizer step of {MICRO_BATCHES} micro-batches a replica, whole model on each rank, {SHAPE}:"
    return [text, "", *_table(("ZeRO", "n", "payload, MiB", "sent by a rank, MiB"), rows)]


def _measured(page: str) -> Iterator[str]:
    """Rows of the README's table of what an axis costs."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| | TP | TP + SP |") :].partition("\n\n")[0].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table]
    columns = [cells[0].index(name) for name in MEASURED[page]]
    yield "Measured on 2 CPU ranks beside one process, as the [README](../../README.md#what-is-tested) describes:"
    yield ""
    yield f"| | {' | '.join(MEASURED[page])} |"
    yield "|---|" + "--:|" * len(columns)
    for row in cells[2:]:
        yield f"| {row[0]} | {' | '.join(row[c] for c in columns)} |"


def block(page: str) -> str:
    """What stands between the marks of a page."""
    counted = {
        "tensor": lambda: _per_layer(False), "sequence": lambda: _per_layer(True), "context": _context,
        "pipeline": _pipeline, "data": _data,
    }[page]()  # fmt: skip
    return "\n".join([BEGIN, *counted, "", *_measured(page), END])


def fresh(page: str) -> str:
    """A page with its tables written anew."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return before + block(page) + after


def main() -> int:
    """Print, write or compare."""
    stale = [p for p in MEASURED if (PAGES / f"{p}.md").read_text(encoding="utf-8") != fresh(p)]
    for page in MEASURED:
        if "--write" in sys.argv[1:]:
            (PAGES / f"{page}.md").write_text(fresh(page), encoding="utf-8")
        elif "--check" not in sys.argv[1:]:
            print(block(page), end="\n\n")
    print(
        "\n".join(
            f"docs/axes/{p}.md: written" if "--write" in sys.argv[1:] else f"{p}: run make axes-doc" for p in stale
        )
    )
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
