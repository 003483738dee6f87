"""Pipeline schedules as pure programs: what each rank does, by micro-batch and chunk, in order.

A chunk is one contiguous run of layers; a rank holds one (gpipe, 1f1b, zb-h1), two (zbv) or `chunks` of them
(interleaved). Stages number the chunks of all ranks in model order. The engine executes these programs, `plan` reads
bubble and memory off them, and the checks below prove them: every forward before its backward, no deadlock.

Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019); interleaved 1F1B (Narayanan et al. 2021, Megatron-LM);
ZB-H1 (Qi et al. 2023); ZBV (Qi et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"]
Op = Literal["F", "X", "B", "W"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Instruction:
    """One piece of work of one rank.

    Attributes:
        op: F forward; X whole backward; B gradient of the input only; W gradients of the weights that B left out.
        micro: micro-batch, from 0.
        chunk: which of the rank's chunks, from 0.
    """

    op: Op
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op}{self.micro}" + ("abcdefgh"[self.chunk] if self.chunk < 8 else f".{self.chunk}")


@dataclass(frozen=True)
class Schedule:
    """A kind of schedule on `pp` ranks.

    Attributes:
        chunks: chunks of each rank; above 1 for interleaved, 2 for zbv, else 1.
        wide: 1f1b runs 2 (p - 1 - r) forwards ahead instead of p - 1 - r: hides the round trip of the messages, and
            keeps up to 2 (p - 1 - r) + 1 micro-batches alive on rank r.

    Raises:
        ValueError: an unknown kind, or chunks that it cannot have.
    """

    kind: Kind = "1f1b"
    pp: int = 1
    chunks: int = 1
    wide: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown schedule {self.kind!r}; known are {', '.join(KINDS)}")
        if self.kind == "zbv":
            legal, rule = self.chunks == 2, "zbv has 2 chunks a rank"
        elif self.kind == "interleaved":
            legal, rule = self.chunks >= 1, "interleaved has at least 1 chunk a rank"
        else:
            legal, rule = self.chunks == 1, f"{self.kind} has 1 chunk a rank"
        if not legal:
            raise ValueError(f"{rule}, not {self.chunks}")

    @property
    def stages(self) -> int:
        """Stages of all ranks together."""
        return self.pp * self.chunks

    @property
    def splits_backward(self) -> bool:
        """True where gradients of inputs and of weights are instructions of their own."""
        return self.kind in ("zb-h1", "zbv")

    def stage(self, rank: int, chunk: int) -> int:
        """Stage that a rank's chunk is, in model order. zbv lays them out as a V: first and last stage on rank 0."""
        if self.kind == "zbv" and chunk == 1:
            return self.stages - 1 - rank
        return chunk * self.pp + rank

    def held(self, rank: int) -> list[int]:
        """The stages of a rank, by chunk."""
        return [self.stage(rank, chunk) for chunk in range(self.chunks)]

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        if self.kind == "zbv" and stage >= self.pp:
            return self.stages - 1 - stage, 1
        return stage % self.pp, stage // self.pp

    def program(self, rank: int, micro_batches: int) -> tuple[Instruction, ...]:
        """What `rank` does in a training step, in order. Any number of micro-batches from 1 on."""
        if self.kind == "gpipe":
            return _gpipe(micro_batches)
        if self.kind == "1f1b":
            ahead = self.pp - 1 - rank
            return _one_forward_one_backward(micro_batches, 2 * ahead if self.wide else ahead)
        if self.kind == "zb-h1":
            return _zb_h1(self.pp, rank, micro_batches)
        if self.kind == "zbv":
            return _zbv(self.pp, rank, micro_batches)
        return _interleaved(self.pp, self.chunks, rank, micro_batches)

    def programs(self, micro_batches: int) -> list[tuple[Instruction, ...]]:
        """The programs of all ranks."""
        return [self.program(rank, micro_batches) for rank in range(self.pp)]

    def forwards(self, rank: int, micro_batches: int) -> tuple[Instruction, ...]:
        """What `rank` does where nothing is learnt (evaluation, log-probs), in order."""
        if self.kind == "zbv":
            return tuple(i for i in self.program(rank, micro_batches) if i.op == "F")
        return tuple(Instruction("F", m, c) for m, c in _chunk_order(self.pp, self.chunks, micro_batches))


def _gpipe(micro_batches: int) -> tuple[Instruction, ...]:
    forward = [Instruction("F", m) for m in range(micro_batches)]
    return (*forward, *(Instruction("X", m) for m in reversed(range(micro_batches))))


def _one_forward_one_backward(micro_batches: int, ahead: int) -> tuple[Instruction, ...]:
    ahead = min(ahead, micro_batches)
    ops = [Instruction("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            ops.append(Instruction("F", ahead + m))
        ops.append(Instruction("X", m))
    return tuple(ops)


def _runs(pp: int, micro_batches: int) -> list[range]:
    """Runs of pp micro-batches; what is left over joins the first one.

    A short last run, Megatron's order before it refused remainders, loses time and deadlocks at some sizes (p 4, v 3,
    m 5); a longer last run deadlocks sooner.
    """
    first = min(micro_batches, pp + micro_batches % pp)
    return [range(first), *(range(start, start + pp) for start in range(first, micro_batches, pp))]


def _chunk_order(pp: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of a rank's forwards: each run goes through all chunks before the next run starts."""
    return [(m, c) for run in _runs(pp, micro_batches) for c in range(chunks) for m in run]


def _interleaved(pp: int, chunks: int, rank: int, micro_batches: int) -> tuple[Instruction, ...]:
    runs = _runs(pp, micro_batches)
    forward = [Instruction("F", m, c) for m, c in _chunk_order(pp, chunks, micro_batches)]
    backward = [Instruction("X", m, c) for run in runs for c in reversed(range(chunks)) for m in run]
    ahead = min(2 * (pp - 1 - rank) + (chunks - 1) * len(runs[0]), len(forward))
    ops = forward[:ahead]
    for i, back in enumerate(backward):
        ops += forward[ahead + i : ahead + i + 1]
        ops.append(back)
    return tuple(ops)


def _zb_h1(pp: int, rank: int, micro_batches: int) -> tuple[Instruction, ...]:
    """1F1B whose weight gradients lag `rank` micro-batches behind: as many alive everywhere as on rank 0."""
    ahead = min(pp - 1 - rank, micro_batches)
    ops = [Instruction("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            ops.append(Instruction("F", ahead + m))
        ops.append(Instruction("B", m))
        if m >= rank:
            ops.append(Instruction("W", m - rank))
    ops += [Instruction("W", m) for m in range(max(micro_batches - rank, 0), micro_batches)]
    return tuple(ops)


@dataclass
class _Counter:
    """Writes instructions of one rank, each kind's micro-batches in order; those beyond the step's are left out."""

    micro_batches: int
    ops: list[Instruction] = field(default_factory=list)
    next: dict[tuple[Op, int], int] = field(default_factory=dict)

    def add(self, op: Op, chunk: int) -> None:
        micro = self.next.get((op, chunk), 0)
        self.next[op, chunk] = micro + 1
        if micro < self.micro_batches:
            self.ops.append(Instruction(op, micro, chunk))

    def whole(self, chunk: int) -> None:
        """Forward and both halves of the backward of the chunk's next micro-batch."""
        self.add("F", chunk)
        self.add("B", chunk)
        self.add("W", chunk)

    def done(self, op: Op, chunk: int) -> int:
        return self.next.get((op, chunk), 0)


def _zbv(pp: int, rank: int, micro_batches: int) -> tuple[Instruction, ...]:
    """Steps are planned for at least 2p - 1 micro-batches and the missing ones left out, so that any number runs."""
    planned = max(micro_batches, 2 * pp - 1)
    c = _Counter(micro_batches)
    for _ in range(2 * (pp - rank) - 1):
        c.add("F", 0)
    for _ in range(rank):
        c.add("F", 1)
        c.add("F", 0)
    for _ in range(pp - rank):
        c.whole(1)
    while c.done("F", 1) < planned:
        if c.done("F", 0) < planned:
            c.add("F", 0)
        c.add("B", 0)
        c.add("W", 0)
        c.whole(1)
    for _ in range(rank):
        c.add("B", 0)
        c.add("B", 1)
    for _ in range(pp - rank):
        c.add("B", 0)
        c.add("W", 0)
    for chunk in (1, 0):
        while c.done("W", chunk) < planned:
            c.add("W", chunk)
    return tuple(c.ops)


# --- what a program costs -------------------------------------------------------------------------------------------

UNIT: Mapping[str, float] = {"F": 1.0, "X": 2.0, "B": 1.0, "W": 1.0}


@dataclass(frozen=True)
class Timeline:
    """When every instruction runs, with unlimited room for messages.

    Attributes:
        start, end: by rank, one number per instruction of its program, in the units of the costs.
        live: most chunks of activations alive at once, by rank: from the start of F to the end of X, or of W.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    live: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(ends[-1] for ends in self.end)

    @property
    def bubble(self) -> float:
        """Part of ranks x makespan in which no instruction runs; what a step with one barrier at its end loses."""
        work = sum(e - s for starts, ends in zip(self.start, self.end) for s, e in zip(starts, ends))
        return 1 - work / (len(self.end) * self.makespan)

    @property
    def idle_inside(self) -> tuple[float, ...]:
        """Idle time between each rank's own first and last instruction: what the papers call zero."""
        return tuple(
            ends[-1] - starts[0] - sum(e - s for s, e in zip(starts, ends))
            for starts, ends in zip(self.start, self.end)
        )


class Deadlock(ValueError):
    """No rank can go on; the message names what each waits for."""


def timeline(
    schedule: Schedule,
    micro_batches: int,
    cost: Mapping[str, float] = UNIT,
    message: float = 0.0,
    programs: Sequence[Sequence[Instruction]] | None = None,
) -> Timeline:
    """Run the programs against a clock.

    Args:
        cost: time of each op, of one chunk.
        message: time that a tensor takes between two ranks; the sender goes on meanwhile.
        programs: these instead of the schedule's own (to try another order).

    Raises:
        Deadlock: an instruction waits for one that never comes.
    """
    programs = schedule.programs(micro_batches) if programs is None else programs
    done: dict[tuple[str, int, int], float] = {}  # (F or B, stage, micro) -> end
    at, clock = [0] * schedule.pp, [0.0] * schedule.pp
    start: list[list[float]] = [[] for _ in programs]
    end: list[list[float]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                ready = _ready(schedule, rank, program[at[rank]], done, message)
                if ready is None:
                    break
                op = program[at[rank]]
                start[rank].append(max(ready, clock[rank]))
                clock[rank] = start[rank][-1] + cost[op.op]
                end[rank].append(clock[rank])
                done[_result(op), schedule.stage(rank, op.chunk), op.micro] = clock[rank]
                at[rank] += 1
                moved = True
    stuck = [f"rank {r} at {p[at[r]]}" for r, p in enumerate(programs) if at[r] < len(p)]
    if stuck:
        raise Deadlock(f"{schedule.kind}, {schedule.pp} ranks, {micro_batches} micro-batches: {', '.join(stuck)}")
    live = tuple(_live(program, starts, ends) for program, starts, ends in zip(programs, start, end))
    return Timeline(tuple(map(tuple, start)), tuple(map(tuple, end)), live)


def _result(op: Instruction) -> str:
    return "B" if op.op in "XB" else op.op


def needs(schedule: Schedule, rank: int, op: Instruction) -> tuple[str, int, int] | None:
    """What an instruction receives, as ("F" or "B", stage that made it, micro-batch); None where it needs no message.

    F needs the stage before; B and X need the gradient of the stage after; the last stage makes its own.
    """
    stage = schedule.stage(rank, op.chunk)
    if op.op == "F":
        return None if stage == 0 else ("F", stage - 1, op.micro)
    if op.op == "W" or stage == schedule.stages - 1:
        return None
    return "B", stage + 1, op.micro


def _ready(
    schedule: Schedule, rank: int, op: Instruction, done: Mapping[tuple[str, int, int], float], message: float
) -> float | None:
    """When everything that the instruction needs is on its rank; None where that is not known yet."""
    stage, ready = schedule.stage(rank, op.chunk), 0.0
    if op.op != "F" and ("F" if op.op != "W" else "B", stage, op.micro) not in done:
        return None
    source = needs(schedule, rank, op)
    if source is None:
        return ready
    if source not in done:
        return None
    return done[source] + (message if schedule.place(source[1])[0] != rank else 0.0)


def _live(program: Sequence[Instruction], starts: Sequence[float], ends: Sequence[float]) -> int:
    """Most chunks alive at once. Ends come before starts of the same moment: one's room is the next one's."""
    split = any(op.op == "W" for op in program)
    changes = []
    for op, start, end in zip(program, starts, ends):
        if op.op == "F":
            changes.append((start, 1))
        elif op.op == ("W" if split else "X"):
            changes.append((end, -1))
    most = alive = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def check(schedule: Schedule, micro_batches: int) -> None:
    """Prove a schedule's programs: each chunk's instructions once and in order, and no deadlock.

    Sends never block (the engine posts them and goes on), so a program that the clock can finish cannot deadlock.

    Raises:
        ValueError: an instruction is missing, comes twice, or before what it needs. Deadlock: it cannot end.
    """
    backward = ("B", "W") if schedule.splits_backward else ("X",)
    for rank, program in enumerate(schedule.programs(micro_batches)):
        place = {(op.op, op.micro, op.chunk): i for i, op in enumerate(program)}
        expected = {(op, m, c) for op in ("F", *backward) for m in range(micro_batches) for c in range(schedule.chunks)}
        if len(place) != len(program) or place.keys() != expected:
            raise ValueError(f"{schedule.kind}: rank {rank} does not hold each instruction once")
        for m in range(micro_batches):
            for c in range(schedule.chunks):
                order = [place[op, m, c] for op in ("F", *backward)]
                if order != sorted(order):
                    raise ValueError(f"{schedule.kind}: rank {rank} runs micro-batch {m} of chunk {c} out of order")
    timeline(schedule, micro_batches)


def rendezvous_deadlock(schedule: Schedule, micro_batches: int) -> list[str]:
    """Where a naive execution stops whose sends wait for their receive: what each stuck rank waits for; [] if none.

    Naive: receive right before the instruction that needs the tensor, send right after the one that made it, one
    message at a time. gloo's blocking send is of this kind whatever the size. Only gpipe survives it in general, which
    is why the engine posts its sends and keeps the tensors.
    """
    queues = [_messages(schedule, rank, schedule.program(rank, micro_batches)) for rank in range(schedule.pp)]
    at = [0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            if at[rank] == len(queue):
                continue
            way, peer, what = queue[at[rank]]
            theirs = queues[peer][at[peer]] if at[peer] < len(queues[peer]) else None
            if theirs == ("recv" if way == "send" else "send", rank, what):
                at[rank] += 1
                at[peer] += 1
                moved = True
    return [f"rank {r}: {q[at[r]][0]} {q[at[r]][2]}" for r, q in enumerate(queues) if at[r] < len(q)]


Message = tuple[str, int, int]  # what `needs` gives: ("F" or "B", stage that made it, micro-batch)


def sends(schedule: Schedule, rank: int, op: Instruction) -> tuple[int, Message] | None:
    """(rank that an instruction's result goes to, the message); None where nobody needs it. May be `rank` itself."""
    stage = schedule.stage(rank, op.chunk)
    to = stage + 1 if op.op == "F" else stage - 1
    if op.op == "W" or not 0 <= to < schedule.stages:
        return None
    return schedule.place(to)[0], (_result(op), stage, op.micro)


def arrivals(schedule: Schedule, rank: int, programs: Sequence[Sequence[Instruction]]) -> dict[int, list[Message]]:
    """What `rank` gets from each other rank, in the order in which they send it."""
    result: dict[int, list[Message]] = {}
    for source, program in enumerate(programs):
        posts = [sends(schedule, source, op) for op in program]
        mine = [post[1] for post in posts if post is not None and post[0] == rank != source]
        if mine:
            result[source] = mine
    return result


def _messages(schedule: Schedule, rank: int, program: Sequence[Instruction]) -> list[tuple[str, int, Message]]:
    """(send or recv, other rank, message) of a rank, in program order."""
    queue: list[tuple[str, int, Message]] = []
    for op in program:
        source = needs(schedule, rank, op)
        if source is not None and schedule.place(source[1])[0] != rank:
            queue.append(("recv", schedule.place(source[1])[0], source))
        post = sends(schedule, rank, op)
        if post is not None and post[0] != rank:
            queue.append(("send", *post))
    return queue
