"""A rank's pipeline program as the instructions that DeepSpeed's engine executes.

The buffer id of an instruction is the pair (chunk, micro-batch) that it works on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.runtime.pipe import schedule as ds

from hybrid5d.plan.pipeline import Instruction, Schedule, needs, sends

Key = tuple[int, int]


class InputGradient(ds.BufferOpInstruction):
    """The half of a backward pass that the stage before waits for; products for weights are put off."""


class WeightGradient(ds.BufferOpInstruction):
    """The products that `InputGradient` put off."""


_WORK = {"F": ds.ForwardPass, "X": ds.BackwardPass, "B": InputGradient, "W": WeightGradient}
# What instructions are called in traces
NAMES: dict[type[ds.PipeInstruction], str] = {kind: op for op, kind in _WORK.items()} | {
    ds.SendActivation: "send",
    ds.SendGrad: "send",
    ds.RecvActivation: "recv",
    ds.RecvGrad: "recv",
    ds.ReduceTiedGrads: "sum",
    ds.ReduceGrads: "reduce",
    ds.OptimizerStep: "update",
}


class Program(ds.PipeSchedule):
    """DeepSpeed's view of a program: each instruction between its receive and its send, then reduction and update."""

    def __init__(self, schedule: Schedule, rank: int, program: Sequence[Instruction], train: bool):
        super().__init__(micro_batches=1, stages=schedule.pp, stage_id=rank)
        self.schedule, self.rank, self.program, self.train = schedule, rank, program, train

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """One list per instruction, and the update."""
        for op in self.program:
            key, forward, step = (op.chunk, op.micro), op.op == "F", []
            if needs(self.schedule, self.rank, op) is not None:
                step.append((ds.RecvActivation if forward else ds.RecvGrad)(key))
            step.append(_WORK[op.op](key))
            if sends(self.schedule, self.rank, op) is not None:
                step.append((ds.SendActivation if forward else ds.SendGrad)(key))
            yield step
        if self.train:
            yield [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """None of DeepSpeed's: what is alive is kept by key."""
        return 0
