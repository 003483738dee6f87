"""What is recorded of a step on real ranks, against the programs and closed forms; nothing where none is asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid5d.parallel.watch import Call, clock_offset, watched
from hybrid5d.plan.pipeline import sends
from hybrid5d.trace.files import PASSES, RankStep, Trace, read_trace
from hybrid5d.trace.pieces import name_of, pieces_of
from hybrid5d.trace.summary import summary
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import MODELS, make_rows, step_batch
from tests.layouts import RECIPES, SCHEDULES

HIDDEN, LAYERS, VOCABULARY = (MODELS["llama"][n] for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
M = 5  # micro-batches: no multiple of the stages
ROWS = make_rows(M, 16, VOCABULARY, seed=3)


def _stamps(rank: int, world: int, layout: Layout, model: str, folder: str, rows: list[Any]) -> dict[str, Any]:
    """Three steps, the second traced; counts readings of the clock."""
    from hybrid5d.engine.recorder import HostClock
    from hybrid5d.shared_memory import SharedMemoryGroup
    from hybrid5d.train.metrics import Console
    from hybrid5d.train.run_folder import RunFolder
    from hybrid5d.train.tracing import Tracer

    count = 0

    def now() -> int:
        nonlocal count
        count += 1
        return time.monotonic_ns()

    HostClock.now = staticmethod(now)  # type: ignore[assignment]  # this process serves one call
    engine = build_engine(layout, RECIPES["sgd"], model, len(rows))
    tracer = Tracer(engine, RunFolder(folder), Console(False, None))
    tracer.steps = range(2, 3)
    plain = {k: dict(k.__dict__) for k in (dist.ProcessGroup, SharedMemoryGroup)}
    readings, losses = [], []
    for step in (1, 2, 3):
        batch = step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)
        losses.append(tracer.train_batch(step, batch).loss)
        readings.append(count)
        count = 0
        assert all(dict(k.__dict__) == before for k, before in plain.items())
        own = ("_INSTRUCTION_MAP", "_forward_pass", "backward", "_update")
        assert not [name for name in own if name in engine.ds.__dict__]
    flats = getattr(getattr(engine.ds, "gradients", None), "flats", [])
    return {"readings": readings, "losses": losses, "flat_bytes": sum(f.numel() * 4 for f in flats)}


def traced(layout: Layout, folders: dict[str, Path], place: Path, rows: list[Any] = ROWS) -> tuple[Trace, list[Any]]:
    """A trace of one step in a layout, and what its ranks said."""
    found = run_ranks(layout.world, _stamps, layout.world, layout, str(folders["llama"]), str(place), rows)
    trace = read_trace(place)
    assert list(trace.steps) == [2] and trace.tokens == {2: sum(len(r) for r in rows)}
    for rank, (step, said) in enumerate(zip(trace.steps[2], found)):
        waits = sum(call.wait is not None for call in step.calls)
        lone = said["readings"][1] - 2 * (1 + len(step.work) + len(step.calls) + waits)
        assert said["readings"][::2] == [0, 0] and 0 <= lone <= 8, (rank, lone)  # groups of one rank are not kept
        whole(step, pieces_of(trace, 2)[rank])
    return trace, found


def whole(step: RankStep, pieces: list[Any]) -> None:
    """Instructions follow one another inside the step; pieces fill it."""
    times = [t for work in step.work for t in (work.start, work.end)]
    assert times == sorted(times) and step.start <= times[0] and times[-1] <= step.end
    assert [p.start for p in pieces] == [step.start, *(p.end for p in pieces[:-1])] and pieces[-1].end == step.end
    for call in step.calls:
        stamps = [*call.post, *(call.wait or ())]
        assert stamps == sorted(stamps) and step.start <= stamps[0] and stamps[-1] <= step.end


def passes(step: RankStep) -> list[str]:
    return [name_of(work, 2) for work in step.work if work.op in PASSES]


QUICK = {"1f1b", "zbv"}


@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=() if s in QUICK else pytest.mark.full) for s in SCHEDULES]
)
def test_a_pipeline_runs_its_program_and_sends_what_it_must(
    schedule: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    trace, _ = traced(Layout(pp=2, model=SCHEDULES[schedule]), folders, tmp_path)
    sizes = [len(row) * HIDDEN * 4 for row in ROWS]
    for rank, step in enumerate(trace.steps[2]):
        program = trace.schedule.program(rank, M)
        assert passes(step) == [str(i) for i in program]
        posts = [post for i in program if (post := sends(trace.schedule, rank, i)) is not None and post[0] != rank]
        out = [(c.peer, c.bytes) for c in step.calls if c.op == "send"]
        assert out == [(to, sizes[message[2]]) for to, message in posts]
        coming = [c for c in trace.steps[2][1 - rank].calls if c.op == "recv"]
        assert [c.bytes for c in coming] == [size for _, size in out] and {c.peer for c in coming} <= {rank}
        assert {c.axis for c in step.calls} == {"pp"}
        assert [w.op for w in step.work][-3:] == ["sum", "reduce", "update"]
    found = summary(trace)
    assert found.micro_batches == M and 0 < found.bubble.measured < 1
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=0.2)


def test_tensor_parallel_all_reduces(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two a layer and pass (Shoeybi et al. 2019), one more behind the embedding and before the head."""
    trace, _ = traced(Layout(tp=2), folders, tmp_path)
    sizes = {len(row) * HIDDEN * 4 for row in ROWS}
    for step in trace.steps[2]:
        assert {c.axis for c in step.calls} == {"tp"}
        for work in (w for w in step.work if w.op in PASSES):
            inside = [c for c in step.calls if work.start <= c.post[0] <= work.end and c.bytes in sizes]
            assert [c.op for c in inside] == ["all_reduce"] * (2 * LAYERS + 1), work
            assert {c.bytes for c in inside} == {len(ROWS[work.micro]) * HIDDEN * 4}


def test_sequence_parallel_gathers_and_scatters(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = make_rows(M, 16, VOCABULARY, seed=3)
    trace, _ = traced(Layout(tp=2, sp=True), folders, tmp_path, rows)
    for step in trace.steps[2]:
        for work in (w for w in step.work if w.op == "F"):
            whole_row = -(-len(rows[work.micro]) // 2) * 2 * HIDDEN * 4
            found = [(c.op, c.bytes) for c in step.calls if work.start <= c.post[0] <= work.end]
            assert found.count(("all_gather", whole_row // 2)) == 2 * LAYERS + 1
            assert found.count(("reduce_scatter", whole_row)) == 2 * LAYERS + 1


def test_data_parallel_reduces_every_gradient_once(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = ROWS[:4]
    trace, said = traced(Layout(dp=2), folders, tmp_path, rows)
    for step, about in zip(trace.steps[2], said):
        assert passes(step) == ["F0a", "X0a", "F1a", "X1a"]
        reduce = next(w for w in step.work if w.op == "reduce")
        inside = [c for c in step.calls if reduce.start <= c.post[0] <= reduce.end]
        assert {(c.axis, c.op) for c in inside} == {("dp", "reduce")}
        assert sum(c.bytes for c in inside) == about["flat_bytes"] > 0
    assert summary(trace).bubble.measured < 0.5


@pytest.mark.parametrize("zero", [2, 3])
def test_the_plain_engine(zero: int, folders: dict[str, Path], tmp_path: Path) -> None:
    trace, _ = traced(Layout(dp=2, zero=zero), folders, tmp_path, ROWS[:4])
    for step in trace.steps[2]:
        assert [(w.op, w.micro) for w in step.work] == [("F", 0), ("X", 0), ("F", 1), ("X", 1), ("update", 0)]
        assert {c.axis for c in step.calls} == {"dp"}


def test_axes_are_told_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    trace, _ = traced(Layout(tp=2, pp=2, sp=True, model=SCHEDULES["zbv"]), folders, tmp_path)
    for rank, step in enumerate(trace.steps[2]):
        assert passes(step) == [str(i) for i in trace.schedule.program(rank // 2, M)]
        kinds = {(c.axis, c.op) for c in step.calls}
        assert {("pp", "send"), ("pp", "recv"), ("tp", "all_gather"), ("tp", "reduce_scatter")} <= kinds
        assert {axis for axis, _ in kinds} <= {"tp", "pp", "world"}
    assert [s.ranks for s in summary(trace).stages] == [(0, 1), (2, 3), (2, 3), (0, 1)]  # a V
    ring, _ = traced(Layout(cp=2), folders, tmp_path / "ring")
    for step in ring.steps[2]:
        assert {c.axis for c in step.calls if c.op in ("send", "recv")} == {"cp"}


def _nested(rank: int) -> list[tuple[Any, ...]]:
    calls: list[Call] = []
    ticks = iter(range(1000))
    with watched(calls, lambda: next(ticks)):
        x = torch.ones(6)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        work.wait()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, "a")
        dist.barrier()
    dist.all_reduce(x)
    return [(c.op, c.bytes, c.post, c.wait) for c in calls]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_each_operation_once_with_its_first_wait(backend: str) -> None:
    for calls in run_ranks(2, _nested, backend=backend):
        assert [c[0] for c in calls] == ["all_reduce", "all_reduce", "all_gather", "all_gather", "barrier"]
        assert [c[1] for c in calls[:2]] == [24, 24]
        posts = [c[2] for c in calls]
        assert all(end == begin + 1 for begin, end in posts)  # nothing inside is counted again
        begin, end = calls[1][3]
        assert (begin, end) == (posts[1][1] + 1, posts[1][1] + 2)  # the second wait is none


class _Batch:
    """A group that sends several messages as one, as NCCL does."""

    def _start_coalescing(self, device: str) -> None: ...
    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None: ...
    def _end_coalescing(self, device: str) -> Any:
        return self

    def wait(self) -> None: ...
    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        self.broadcast(tensors)

    def broadcast(self, tensors: list[torch.Tensor]) -> None: ...


def test_an_operation_made_of_another_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid5d.parallel.watch._CLASSES", (_Batch,))
    calls: list[Call] = []
    with watched(calls, lambda: 0):
        _Batch().allreduce([torch.ones(3)])
        _Batch().broadcast([torch.ones(2)])
    assert [(c.op, c.bytes) for c in calls] == [("all_reduce", 12), ("broadcast", 8)]


def test_messages_sent_as_one_are_waited_for_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid5d.parallel.watch._CLASSES", (_Batch,))
    calls: list[Call] = []
    ticks = iter(range(100))
    group = _Batch()
    with watched(calls, lambda: next(ticks)):
        group._start_coalescing("x")
        group.send([torch.ones(2)], 1, 0)
        group.send([torch.ones(3, 2)], 0, 0)
        group._end_coalescing("x").wait()
    assert [(c.bytes, c.peer, c.post, c.wait) for c in calls] == [(8, 1, (0, 1), (4, 5)), (24, 0, (2, 3), (4, 5))]


AHEAD = (0, 5_000_000_000, 5_000_000_000, -3_000_000_000)


def _offset(rank: int, same: bool) -> tuple[int, int]:
    from hybrid5d.parallel.agree import world_axis

    return clock_offset(world_axis(), "a" if same else "abbc"[rank], lambda: time.monotonic_ns() + AHEAD[rank])


def test_clocks_of_hosts_are_aligned() -> None:
    """Four ranks, three clocks: what was put in comes out, within the error that is given."""
    assert run_ranks(4, _offset, True) == [(0, 0)] * 4
    found = run_ranks(4, _offset, False)
    assert found[0] == (0, 0)
    for (offset, error), ahead in list(zip(found, AHEAD))[1:]:
        assert abs(offset - ahead) <= error < 50_000_000
