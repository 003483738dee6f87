"""`hybrid5d trace` over hand-made files: every number is known beforehand. And one small run from YAML to page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.launch.run import measured_bubble
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.trace.files import axis_of, read_trace
from hybrid5d.trace.pieces import KINDS, pieces_of
from hybrid5d.trace.summary import summary
from hybrid5d.train.metrics import Console
from tests.cli_kit import hybrid5d
from tests.harness import run_ranks
from tests.launch_kit import PP2, metrics, write_run
from tests.plan.test_page import Reader
from tests.train.test_trainer import train

MS = 1_000_000
# gpipe of two stages and micro-batches, in ms. Rank 1 does not know rank 0's clock: 7,000 ms ahead.
RANK_0 = {
    "work": [
        ["F", 0, 0, 2, 10], ["send", 0, 0, 10, 11], ["F", 1, 0, 11, 20], ["send", 1, 0, 20, 21],
        ["recv", 1, 0, 21, 52], ["X", 1, 0, 52, 70], ["recv", 0, 0, 70, 80], ["X", 0, 0, 80, 90],
        ["update", -1, 0, 92, 97],
    ],
    "calls": [
        ["recv", 0, 64, 1, 1, 1, 21, 50],  # sent at 40: waits 19 ms, communicates 10
        ["send", 0, 64, 1, 10, 11, 91, 92],
        ["send", 0, 96, 1, 20, 21, -1, -1],
        ["recv", 0, 96, 1, 22, 22, 70, 79],  # sent at 65: communicates 9 ms
        ["all_reduce", 1, 8, -1, 93, 96, -1, -1],  # rank 1 comes at 95: waits 2 ms, communicates 1
    ],
}  # fmt: skip
RANK_1 = {
    "work": [
        ["recv", 0, 0, 0, 12], ["F", 0, 0, 12, 24], ["recv", 1, 0, 24, 25], ["F", 1, 0, 25, 37],
        ["X", 1, 0, 37, 40], ["send", 1, 0, 40, 42], ["X", 0, 0, 42, 64], ["send", 0, 0, 64, 66],
        ["update", -1, 0, 94, 98],
    ],
    "calls": [
        ["recv", 0, 64, 0, 0, 0, 0, 12],  # sent at 10
        ["recv", 0, 96, 0, 1, 1, 24, 25],
        ["send", 0, 64, 0, 40, 42, 66, 68],
        ["send", 0, 96, 0, 65, 66, 68, 69],
        ["all_reduce", 1, 8, -1, 95, 97, -1, -1],
    ],
}  # fmt: skip
AHEAD = 7000


def document(rank: int, found: dict[str, Any], ahead: int = 0, **changes: Any) -> dict[str, Any]:
    """A rank's file, in nanoseconds of its own clock."""

    def own(ms: float) -> int:
        return int((5 + ms + ahead) * MS)

    work = [[*about, own(a), own(b)] for *about, a, b in found["work"]]
    calls = [[*about, *(own(t) if t >= 0 else -1 for t in times)] for *about, a, b, c, d in found["calls"]
             for times in [(a, b, c, d)]]  # fmt: skip
    step = {"step": 4, "start": own(0), "end": own(100), "tokens": 50, "work": work, "calls": calls}
    return {
        "format": 1, "id": 17, "rank": rank, "layout": {"pp": 2, "dp": 1, "cp": 1, "tp": 1},
        "schedule": {"kind": "gpipe", "chunks": 1, "wide": False}, "decoder_layers": [3, 5], "device": "cpu",
        "transport": "gloo", "clock": "host", "offset_ns": ahead * MS, "offset_error_ns": rank * 2000,
        "groups": [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [0, 1]}], "steps": [step],
    } | changes  # fmt: skip


def write(folder: Path, *files: dict[str, Any]) -> Path:
    (folder / "trace").mkdir(parents=True)
    for file in files:
        (folder / "trace" / f"rank-{file['rank']}.json").write_text(json.dumps(file))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "a<b>", document(0, RANK_0), document(1, RANK_1, AHEAD))


def test_pieces_fill_the_step_and_add_up(run: Path) -> None:
    trace = read_trace(run)
    for pieces in pieces_of(trace, 4):
        assert pieces[0].start == 0 and pieces[-1].end == 100 * MS
        assert [p.end for p in pieces[:-1]] == [p.start for p in pieces[1:]]
    found = summary(trace)
    ms = [{kind: round(s * 1e3, 6) for kind, s in rank.items()} for rank in found.by_rank]
    assert ms[0] == {
        "forward": 8 + 9, "backward": 18 + 10, "weight gradients": 0, "reduction": 0, "optimizer": 5 - 3,
        "communication": 10 + 9 + 1 + 1 + 1 + 1, "waiting": 19 + 2, "other": 1 + 1 + 2 + 1 + 1 + 3,
    }  # fmt: skip
    assert ms[1] == {
        "forward": 12 + 12, "backward": 3 + 22, "weight gradients": 0, "reduction": 0, "optimizer": 1 + 1,
        "communication": 2 + 1 + 2 + 1 + 2 + 1 + 2, "waiting": 10, "other": 1 + 25 + 2,
    }  # fmt: skip
    assert [sum(rank.values()) for rank in ms] == [100, 100]


def test_a_wait_across_instructions_counts_in_each(tmp_path: Path) -> None:
    """And the second receive waits for the second send."""
    calls = [["recv", 0, 64, 1, 0, 0, 8, 45], ["recv", 0, 96, 1, 0, 0, 50, 79]]  # sent at 40 and 65
    mine = {"work": [["F", 0, 0, 0, 10], ["X", 0, 0, 10, 90]], "calls": calls}
    run = write(tmp_path / "a", document(0, mine), document(1, RANK_1))
    found = [(p.start // MS, p.end // MS, p.kind) for p in pieces_of(read_trace(run), 4)[0]]
    assert found == [
        (0, 8, "forward"), (8, 10, "waiting"), (10, 40, "waiting"), (40, 45, "communication"), (45, 50, "backward"),
        (50, 65, "waiting"), (65, 79, "communication"), (79, 90, "backward"), (90, 100, "other"),
    ]  # fmt: skip


def test_numbers_of_a_run(run: Path) -> None:
    found = summary(read_trace(run))
    assert (found.step_seconds, found.tokens_per_second) == (0.1, 500)
    # passes from 2 to 90 ms: 45 + 49 of 176; gpipe, p 2, m 2: 1/3; F and X of the mean lengths the same
    assert found.bubble.measured == pytest.approx(1 - (45 + 49) / 176)
    assert found.bubble.planned == pytest.approx(1 / 3) == found.bubble.at_measured_costs
    assert [(s.stage, s.ranks, s.decoder_layers) for s in found.stages] == [(0, (0,), 3), (1, (1,), 5)]
    assert [s.seconds for s in found.stages] == pytest.approx([0.045, 0.049])
    assert found.slowest.stage == 1 and found.slowest.over_mean == pytest.approx(49 / 47)
    assert found.without("waiting") == pytest.approx(50 / (0.1 - 0.0155))
    rows = {(t.axis, t.op): (t.calls, t.bytes, t.communication * 1e3, t.waiting * 1e3) for t in found.traffic}
    assert rows["pp", "recv"] == pytest.approx((2, 160, (19 + 3) / 2, (19 + 10) / 2))
    assert rows["pp", "send"] == pytest.approx((2, 160, (3 + 6) / 2, 0))
    assert rows["pp", "all_reduce"] == pytest.approx((1, 8, (1 + 2) / 2, 1))


def test_a_stages_seconds_are_the_mean_of_its_ranks(tmp_path: Path) -> None:
    """tp 2 x pp 2, two equal pipelines."""
    layout = {"pp": 2, "dp": 1, "cp": 1, "tp": 2}

    def of(rank: int, found: dict[str, Any]) -> dict[str, Any]:
        groups = [{"name": name, "ranks": [rank % 2, rank % 2 + 2]} for name in "ab"]
        return document(rank, found, layout=layout, groups=groups)

    run = write(tmp_path / "a", of(0, RANK_0), of(1, RANK_0), of(2, RANK_1), of(3, RANK_1))
    found = summary(read_trace(run))
    assert [(s.stage, s.ranks) for s in found.stages] == [(0, (0, 1)), (1, (2, 3))]
    assert [s.seconds for s in found.stages] == pytest.approx([0.045, 0.049])


def test_terminal_json_and_perfetto(run: Path) -> None:
    done = hybrid5d("trace", run)
    assert done.returncode == 0, done.stderr
    for words in ("2 ranks (tp 1, cp 1, dp 1, pp 2), gpipe, 2 micro-batches, cpu", "aligned to 2 us",
                  "step 4: 100.0 ms a step, 500 tokens/s", "bubble 46.6% measured; the schedule's is 33.3%",
                  "slowest stage: 1 (rank 1; 5 decoder layers), 49.0 ms"):  # fmt: skip
        assert words in done.stdout
    told = json.loads(hybrid5d("trace", run, "--format", "json").stdout)[0]
    assert told["slowest_stage"] == 1 and told["steps"] == [4] and set(told["seconds"]) == set(KINDS)
    assert told["bubble"]["planned"] == pytest.approx(1 / 3)
    events = json.loads((run / "trace" / "trace.json").read_text())["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "rank 0 (pp 0, dp 0, cp 0, tp 0)"), (1, "rank 1 (pp 1, dp 0, cp 0, tp 0)")]
    passes = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in events if e.get("cat") == "instruction"}
    assert passes[1, "F0"] == (12_000, 12_000) and passes[0, "X0"] == (80_000, 10_000)
    flows = {kind: {e["id"]: e["ts"] for e in events if e["ph"] == kind} for kind in "sf"}
    assert len(flows["s"]) == 4 and flows["s"].keys() == flows["f"].keys()
    assert all(flows["f"][i] > at for i, at in flows["s"].items())
    begun = [e["id"] for e in events if e["ph"] == "b"]
    assert begun == [e["id"] for e in events if e["ph"] == "e"] and len(begun) == 10


def test_the_page(run: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b", document(0, RANK_0), document(1, RANK_1, AHEAD))
    page = tmp_path / "both.html"
    assert hybrid5d("trace", run, other, "--out", page).returncode == 0
    html = page.read_text()
    reader = Reader()
    reader.feed(html)
    assert not [tag for tag in reader.open if tag not in ("path", "line")] or reader.open == []
    assert "<b>" not in html and "a&lt;b&gt;" in html
    assert not re.search(r"https?:|src=|@import|url\(|<script", html) and "prefers-color-scheme: dark" in html
    pictures = [attrs for tag, attrs in reader.tags if tag == "svg"]
    assert len(pictures) == 2 and all(p["role"] == "img" and p["aria-label"] for p in pictures)
    assert all(attrs.get("tabindex") == "0" for _, attrs in reader.tags if attrs.get("class") == "scroll")
    assert all(attrs.get("scope") for tag, attrs in reader.tags if tag == "th")
    names = [tag for tag, _ in reader.tags]
    assert names.count("caption") == names.count("table") == 10 and names.count("h1") == 1
    # rank 0 waits from 21 to 40 ms: 100 ms are 1,020 pixels from 70 on
    found = re.search(
        r'<rect x="([\d.]+)" y="2" width="([\d.]+)"[^>]*fill="var\(--line\)"><title>rank 0: recv over pp, waiting,'
        r" 19.000 ms from 21.000 ms",
        html,
    )
    assert found is not None
    assert [float(x) for x in found.groups()] == pytest.approx([70 + 21 * 10.2, 19 * 10.2])
    text = " ".join(reader.text)
    for words in ("slowest stage: 1", "bubble 46.6% measured", "F0", "X1"):
        assert words in text


def test_axes_by_the_ranks_of_a_group() -> None:
    layout = ParallelLayout(pp=2, dp=2, cp=2, tp=2)
    for axes, name in ((("tp",), "tp"), (("pp",), "pp"), (("dp", "cp"), "cp+dp"), (("pp", "tp"), "tp+pp"),
                       (("pp", "dp", "cp", "tp"), "world")):  # fmt: skip
        assert {axis_of(layout, group) for group in layout.groups(*axes)} == {name}
    assert axis_of(ParallelLayout(tp=2), [0, 1]) == "tp"


def test_refusals(tmp_path: Path, run: Path) -> None:
    def changed(name: str, **changes: Any) -> Path:
        return write(tmp_path / name, document(0, RANK_0), document(1, RANK_1) | changes)

    half = write(tmp_path / "half", document(0, RANK_0), document(1, RANK_1))
    (half / "trace" / "rank-1.json").write_text('{"format": 1, "id": 17')
    twice = write(tmp_path / "twice", document(0, RANK_0), document(1, RANK_1))
    (twice / "trace" / "rank-1.json").write_bytes((twice / "trace" / "rank-0.json").read_bytes())
    strange = document(0, {"work": [], "calls": [["recv", 9, 1, 1, 1, 1, 1, 1]]})
    for words, said in (
        ((tmp_path / "none",), "no trace in it. Fix: train with runner.trace_steps"),
        ((write(tmp_path / "one", document(0, RANK_0)),), "the file of rank 1 of 2 is missing"),
        ((half,), "rank-1.json: not a whole trace"),
        ((changed("start", id=18),), "of another start of the run than rank 0's"),
        ((changed("place", layout={"pp": 1, "dp": 2, "cp": 1, "tp": 1}),), "of another start"),
        ((twice,), "rank-1.json: of another start"),
        ((changed("later", format=2),), "format 2, this version reads 1"),
        ((write(tmp_path / "odd", strange, document(1, RANK_1)),), "not as hybrid5d writes it"),
        ((run, "--out", tmp_path / "x.png"), "ends with .html"),
        ((run, "--out", tmp_path / "no" / "x.html"), "cannot be written"),
        ((run, "--format", "pdf"), "known formats"),
    ):
        done = hybrid5d("trace", *words)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, (words, done.stderr)


@pytest.mark.parametrize(
    ("value", "said"),
    [("[0,2]", "counted from 1"), ("[3,2]", "counted from 1"), ("[2,5]", "the run has 4 steps"), ("[2]", "trace_steps"),
     ("all", "trace_steps")],
)  # fmt: skip
def test_steps_out_of_range(tmp_path: Path, value: str, said: str) -> None:
    path = write_run(tmp_path / "a")
    done = hybrid5d("train", path, f"runner.trace_steps={value}", "--dry-run")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_data_may_decide_how_many_steps_there_are(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")  # 24 rows, 8 a step
    words = ("runner.max_steps=-1", "runner.max_epochs=1", "--dry-run")
    assert hybrid5d("train", path, "runner.trace_steps=[1,3]", *words).returncode == 0
    done = hybrid5d("train", path, "runner.trace_steps=[1,4]", *words)
    assert done.returncode == 2 and "runner.trace_steps=[1, 4]: the run has 3 steps" in done.stderr, done.stderr


def _train(rank: int, world: int, path: str, words: tuple[str, ...]) -> list[str]:
    """What the run says on this rank."""
    said: list[str] = []
    Console.say = lambda self, text: said.append(text)  # type: ignore[method-assign]  # this process serves one call
    train(rank, world, path, words)
    return said


def test_a_run_from_yaml_to_page(tmp_path: Path) -> None:
    """Traced steps train what untraced ones do; a resumed start says what it leaves out; a full disk ends nothing."""
    plain, path = write_run(tmp_path / "plain"), write_run(tmp_path / "traced")
    asked = "runner.trace_steps=[2,3]"
    (tmp_path / "plain" / "run").mkdir()
    (tmp_path / "plain" / "run" / "trace").write_text("")  # no folder can be made
    lost, _ = run_ranks(2, _train, 2, str(plain), (PP2, "runner.trace_steps=[1,1]"))
    assert [line for line in lost if "trace of steps 1 to 1 is lost" in line and "cannot be written" in line], lost
    said, _ = run_ranks(2, _train, 2, str(path), (PP2, asked, "runner.save_interval=4"))
    folder = tmp_path / "traced" / "run"
    assert [line for line in said if line.startswith("trace of steps 2 to 3: ")]
    numbers = [[(s["loss"], s["grad_norm"]) for s in metrics(tmp_path / n / "run")] for n in ("plain", "traced")]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4
    found = json.loads(hybrid5d("trace", folder, "--format", "json").stdout)[0]
    assert found["steps"] == [2, 3] and found["schedule"] == {"name": "1f1b", "chunks": 1, "micro_batches": 8}
    steps = metrics(folder)[1:3]
    assert found["step_seconds"] == pytest.approx(sum(s["step_time_s"] for s in steps) / 2, rel=0.05)
    assert found["bubble"]["planned"] == pytest.approx(1 / 9)
    assert f"bubble {found['bubble']['measured']:.1%} measured; the schedule's is 11.1%" in str(measured_bubble(folder))
    assert str(measured_bubble(tmp_path)).startswith("notice: the trace was not read: ")
    said, _ = run_ranks(2, _train, 2, str(path), (PP2, asked, "runner.max_steps=5", "runner.resume_dir=auto"))
    assert [line for line in said if "this start begins after step 4: nothing is traced" in line]
    assert read_trace(folder).tokens.keys() == {2, 3}
