"""Pipeline programs against closed forms, torch's own lists of operations, and small programs written by hand."""

from __future__ import annotations

import pytest

from hybrid5d.plan.pipeline import (
    KINDS,
    Deadlock,
    Instruction,
    Schedule,
    check,
    rendezvous_deadlock,
    timeline,
)

MICRO_BATCHES = (*range(1, 26), 32)


def schedules(pp: range = range(2, 9)) -> list[Schedule]:
    found = []
    for p in pp:
        found += [Schedule(kind, p) for kind in ("gpipe", "1f1b", "zb-h1")]
        found += [Schedule("interleaved", p, v) for v in (1, 2, 3, 4)] + [Schedule("zbv", p, 2)]
    return found


def expected_makespan(s: Schedule, m: int) -> int:
    p, v = s.pp, s.chunks
    if s.kind in ("gpipe", "1f1b"):
        return 3 * (m + p - 1)
    if s.kind == "interleaved":
        return 3 * (m * v + p - 1) if m >= p else 3 * (p * v + m - 1)
    if s.kind == "zb-h1":
        return max(3 * m + p - 1, 2 * m + 2 * p - 1)
    return max(6 * m + p - 1, 4 * m + 4 * p - 2)


def expected_live(s: Schedule, m: int, rank: int) -> int | None:
    """None where there is no closed form (zbv with few micro-batches)."""
    p, v = s.pp, s.chunks
    if s.kind == "gpipe":
        return m
    if s.kind == "1f1b":
        return min(p - rank, m)
    if s.kind == "interleaved":
        first_run = p + m % p if m >= p else m
        return min(2 * (p - 1 - rank) + (v - 1) * first_run + 1, m * v)
    if s.kind == "zb-h1":
        return min(p, m)
    return 2 * p if m >= 2 * p - 1 else None


@pytest.mark.parametrize("s", schedules(), ids=lambda s: f"{s.kind}-p{s.pp}-v{s.chunks}")
def test_makespan_and_live_chunks_are_the_closed_forms(s: Schedule) -> None:
    for m in MICRO_BATCHES:
        check(s, m)
        t = timeline(s, m)
        assert t.makespan == expected_makespan(s, m), m
        for rank in range(s.pp):
            live = expected_live(s, m, rank)
            assert live is None or t.live[rank] == live, (m, rank)
        work = 3 * m * s.chunks
        assert t.bubble == pytest.approx(1 - work / expected_makespan(s, m), abs=1e-12)


TABLE = [
    # kind, p, m, v, makespan, idle inside each rank's first and last instruction, live chunks
    ("gpipe", 2, 4, 1, 15, (3, 0), (4, 4)),
    ("1f1b", 2, 4, 1, 15, (3, 0), (2, 1)),
    ("zb-h1", 2, 4, 1, 13, (1, 0), (2, 2)),
    ("interleaved", 2, 4, 2, 27, (3, 0), (5, 3)),
    ("zbv", 2, 4, 2, 25, (0, 0), (4, 4)),
    ("interleaved", 2, 8, 4, 99, (3, 0), (9, 7)),
    ("gpipe", 4, 8, 1, 33, (9, 6, 3, 0), (8, 8, 8, 8)),
    ("1f1b", 4, 8, 1, 33, (9, 6, 3, 0), (4, 3, 2, 1)),
    ("zb-h1", 4, 8, 1, 27, (3, 2, 1, 0), (4, 4, 4, 4)),
    ("interleaved", 4, 8, 2, 57, (9, 6, 3, 0), (11, 9, 7, 5)),
    ("zbv", 4, 8, 2, 51, (0, 0, 0, 0), (8, 8, 8, 8)),
    ("zbv", 4, 4, 2, 30, (6, 4, 2, 0), (5, 6, 7, 8)),
    ("zb-h1", 4, 2, 1, 11, (5, 4, 2, 0), (2, 2, 2, 2)),
]


@pytest.mark.parametrize(("kind", "p", "m", "v", "makespan", "idle", "live"), TABLE)
def test_worked_examples(kind: str, p: int, m: int, v: int, makespan: int, idle: tuple, live: tuple) -> None:
    t = timeline(Schedule(kind, p, v), m)  # type: ignore[arg-type]
    assert (t.makespan, t.idle_inside, t.live) == (makespan, idle, live)


def words(s: Schedule, rank: int, m: int) -> str:
    return " ".join(f"{i.op}{i.micro}" for i in s.program(rank, m))


def test_two_ranks_and_four_micro_batches_written_out() -> None:
    assert words(Schedule("1f1b", 2), 0, 4) == "F0 F1 X0 F2 X1 F3 X2 X3"
    assert words(Schedule("1f1b", 2), 1, 4) == "F0 X0 F1 X1 F2 X2 F3 X3"
    assert words(Schedule("zb-h1", 2), 0, 4) == "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3"
    assert words(Schedule("zb-h1", 2), 1, 4) == "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"
    assert words(Schedule("gpipe", 2), 0, 4) == "F0 F1 F2 F3 X3 X2 X1 X0"


@pytest.mark.parametrize(
    ("kind", "p", "m", "v", "message", "makespan"),
    [
        ("1f1b", 2, 8, 1, 0.5, 31), ("zb-h1", 2, 8, 1, 0.5, 27), ("interleaved", 2, 8, 2, 0.5, 54),
        ("zbv", 2, 8, 2, 0.5, 50.5), ("1f1b", 4, 8, 1, 0.5, 41), ("interleaved", 4, 8, 2, 0.5, 64),
        ("zbv", 4, 8, 2, 0.5, 57.5),
    ],
)  # fmt: skip
def test_messages_take_time(kind: str, p: int, m: int, v: int, message: float, makespan: float) -> None:
    assert timeline(Schedule(kind, p, v), m, message=message).makespan == makespan  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("p", "message", "makespan", "live"),
    [(2, 0, 27, (3, 1)), (2, 0.25, 27.5, (3, 1)), (2, 0.5, 28, (3, 1)), (2, 1, 29, (3, 1)), (4, 0.5, 36, (7, 5, 3, 1))],
)
def test_a_wide_warm_up_hides_the_round_trip(p: int, message: float, makespan: float, live: tuple) -> None:
    t = timeline(Schedule("1f1b", p, wide=True), 8, message=message)
    assert (t.makespan, t.live) == (makespan, live)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_zbv_and_interleaved_do_what_torch_schedules(p: int, m: int) -> None:
    if m >= 2 * p - 1:  # torch plans for at least as many
        ours = [[(i.op, i.micro, Schedule("zbv", p, 2).stage(r, i.chunk)) for i in prog]
                for r, prog in enumerate(Schedule("zbv", p, 2).programs(m))]  # fmt: skip
        assert ours == torch_ops("ZBVZeroBubble", p, m)
    if m % p == 0:
        s = Schedule("interleaved", p, 2)
        ours = [[(i.op, i.micro, s.stage(r, i.chunk)) for i in prog] for r, prog in enumerate(s.programs(m))]
        assert ours == torch_ops("Interleaved1F1B", p, m)


def torch_ops(name: str, p: int, m: int) -> list[list[tuple[str, int, int]]]:
    """torch's list of each rank as (op, micro-batch, stage); waiting slots left out."""
    letters = {"FORWARD": "F", "FULL_BACKWARD": "X", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    listed = get_schedule_ops(name, p, m, num_stages_per_rank=2)
    return [
        [(letters[a.computation_type.name], a.microbatch_index, a.stage_index) for a in rank if a is not None]
        for rank in listed
    ]


def test_every_stage_is_on_one_place() -> None:
    for s in schedules(range(1, 6)):
        assert [s.place(s.stage(r, c)) for r in range(s.pp) for c in range(s.chunks)] == [
            (r, c) for r in range(s.pp) for c in range(s.chunks)
        ]
    assert [Schedule("zbv", 3, 2).stage(r, 1) for r in range(3)] == [5, 4, 3]


def test_a_single_rank_runs_every_kind() -> None:
    for s in (Schedule(k, 1, 2 if k == "zbv" else 1) for k in KINDS):  # type: ignore[arg-type]
        for m in (1, 2, 5):
            check(s, m)
            assert timeline(s, m).bubble == 0


@pytest.mark.parametrize("s", schedules(range(1, 5)), ids=lambda s: f"{s.kind}-p{s.pp}-v{s.chunks}")
def test_evaluation_runs_each_chunk_of_each_micro_batch_once(s: Schedule) -> None:
    for m in (1, 2, 3, 5, 8):
        programs = [s.forwards(rank, m) for rank in range(s.pp)]
        for program in programs:
            assert sorted((i.micro, i.chunk) for i in program) == [(i, c) for i in range(m) for c in range(s.chunks)]
            assert {i.op for i in program} == {"F"}
        timeline(s, m, programs=programs)  # ends


def test_blocking_sends_stop_all_but_gpipe() -> None:
    """Seen with gloo: 1f1b of two ranks and two micro-batches stops with both ranks sending."""
    assert rendezvous_deadlock(Schedule("gpipe", 2), 4) == []
    assert rendezvous_deadlock(Schedule("1f1b", 2), 1) == []
    stuck = rendezvous_deadlock(Schedule("1f1b", 2), 2)
    assert stuck == ["rank 0: send ('F', 0, 1)", "rank 1: send ('B', 1, 0)"]
    for s in (Schedule("zb-h1", 2), Schedule("interleaved", 2, 2), Schedule("zbv", 2, 2)):
        assert rendezvous_deadlock(s, 4), s
    assert rendezvous_deadlock(Schedule("1f1b", 4), 8)


def test_a_program_that_cannot_end_is_named() -> None:
    s = Schedule("1f1b", 2)
    first, second = s.programs(2)
    swapped = (Instruction("X", 0), *(i for i in first if i != Instruction("X", 0)))
    with pytest.raises(Deadlock, match=r"rank 0 at X0a, rank 1 at F0a"):
        timeline(s, 2, programs=[swapped, second])


@pytest.mark.parametrize(
    ("kind", "chunks", "message"),
    [("zbv", 1, "zbv has 2 chunks"), ("1f1b", 2, "1f1b has 1 chunk"), ("dualpipe", 1, "unknown schedule 'dualpipe'")],
)
def test_impossible_schedules_are_refused(kind: str, chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(kind, 4, chunks)  # type: ignore[arg-type]
