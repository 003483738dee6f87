# torch declares two spellings of most calls; only the one that torch.distributed uses is made here.
# mypy: disable-error-code="override, assignment"
"""The process group that torch talks to: torch's calls, checked and brought to contiguous 1-D memory."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid5d.shared_memory.channel import LARGE, Channel
from hybrid5d.shared_memory.endpoint import Endpoint
from hybrid5d.shared_memory.mailbox import SendWork
from hybrid5d.shared_memory.memory import Staged, as_bytes, plain, ready, same
from hybrid5d.shared_memory.progress import Steps, Work, activate, lock
from hybrid5d.shared_memory.reduce import check_reduction


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group whose ranks share memory. Made by `torch.distributed`, never directly."""

    def __init__(self, endpoint: Endpoint | None, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._n, self._me, self._end = size, rank, endpoint
        self._seconds = timeout.total_seconds()
        self._label, self._group_name = "shm", ""
        if endpoint is not None:
            self._finalizer = weakref.finalize(self, endpoint.leave)

    # --- what torch asks ----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "shm"

    def name(self) -> str:
        return "shm"

    @property
    def group_name(self) -> str:
        """torch's name of the group; the base class keeps it in a backend object, which a group in Python has not."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def __repr__(self) -> str:
        return f"SharedMemoryGroup(rank {self._me} of {self._n})"

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        if self._end is not None:
            self._finalizer()

    def abort(self) -> None:
        if self._end is not None:
            self._end.fail(dist.DistBackendError("the group was aborted"))

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self._end is None else self._end.channel.phase

    # --- running ------------------------------------------------------------------------------------------------------

    def _run(self, name: str, tensors: Any, steps: Steps, staged: Staged | None, opts: Any = None) -> Work:
        """Begin an operation. One that its caller waits for at once, and that is done at once, needs no work object."""
        end = self._end
        assert end is not None
        if end.error is not None:
            raise dist.DistBackendError(f"{name}: the group cannot be used any more: {end.error}")
        if staged:
            steps = _then(steps, staged.finish)
        if opts is not None and not opts.asyncOp and end.queue.at_once(steps):
            return None  # type: ignore[return-value]  # as torch.distributed allows for calls that are not asynchronous
        return end.queue.add(Work(end, name, tensors, self._limit(opts)), steps)

    def _limit(self, opts: Any) -> float:
        seconds = opts.timeout.total_seconds() if opts is not None else -1.0
        return seconds if seconds > 0 else self._seconds

    # --- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        x = tensors[0]
        kind = check_reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, x.dtype)
        if self._end is not None and len(tensors) == 1 and ready(x):
            flat = x if x.dim() == 1 else x.view(-1)
            return self._run("all_reduce", tensors, self._end.channel.all_reduce(flat, kind), None, opts)
        return self._all_reduce(tensors, kind, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        kind = check_reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors[0].dtype)
        return self._all_reduce(tensors, kind, opts)

    def _all_reduce(self, tensors: Sequence[Tensor], kind: Any, opts: Any) -> Work:
        staged = Staged()
        flat = [staged.write(x).view(-1) for x in tensors]
        if self._end is None:
            return Work(None, "all_reduce", tensors, 0.0)
        channel = self._end.channel
        if (
            len(flat) > 1
            and len({x.dtype for x in flat}) == 1
            and sum(x.numel() * x.itemsize for x in flat) <= LARGE[0]
        ):
            return self._run("all_reduce", tensors, _together(channel, flat, kind), staged, opts)
        steps = (
            _chain([channel.all_reduce(x, kind) for x in flat]) if len(flat) > 1 else channel.all_reduce(flat[0], kind)
        )
        return self._run("all_reduce", tensors, steps, staged, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Only the root's tensor changes."""
        root = 0 if opts is None else opts.rootRank
        kind = check_reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors[0].dtype)
        staged = Staged()
        write = staged.write if self._me == root else staged.read
        flat = [write(x).view(-1) for x in tensors]
        if self._end is None:
            return Work(None, "reduce", tensors, 0.0)
        channel = self._end.channel
        return self._run("reduce", tensors, _chain([channel.reduce(x, root, kind) for x in flat]), staged, opts)

    def _reduce_scatter(self, pairs: Sequence[tuple[Tensor, Sequence[Tensor]]], opts: Any, outs: Any) -> Work:
        staged, steps = Staged(), []
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for out, parts in pairs:
            kind = check_reduction(op, out.dtype)
            for part in parts:
                same("reduce_scatter", part, out)
            flat = [staged.read(p).view(-1) for p in parts]
            target = staged.write(out, keep=False).view(-1)
            if self._end is None:
                target.copy_(flat[0])
            else:
                steps.append(self._end.channel.reduce_scatter(target, flat, kind))
        if self._end is None:
            staged.finish()
            return Work(None, "reduce_scatter", outs, 0.0)
        return self._run("reduce_scatter", outs, _chain(steps), staged, opts)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        return self._reduce_scatter(list(zip(outs, ins)), opts, outs)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter([(out, self._split("reduce_scatter", x, out))], opts, [out])

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        pairs = [(out, self._split("reduce_scatter", x, out)) for out, x in zip(outs, ins)]
        return self._reduce_scatter(pairs, opts, outs)

    def _split(self, name: str, whole: Tensor, part: Tensor) -> list[Tensor]:
        """A rank's parts of `whole`, each as large as `part`."""
        if whole.numel() != self._n * part.numel():
            text = f"{name}: {whole.numel()} elements are not {self._n} times {part.numel()}"
            raise ValueError(text)
        if not whole.is_contiguous():
            whole = whole.contiguous()
        return list(whole.view(-1).view(self._n, -1).unbind(0)) if part.numel() else [whole.view(-1)] * self._n

    # --- copies -------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        root, staged = 0 if opts is None else opts.rootRank, Staged()
        write = staged.read if self._me == root else staged.write
        flat = [as_bytes(write(x)) for x in tensors]
        if self._end is None:
            return Work(None, "broadcast", tensors, 0.0)
        channel = self._end.channel
        steps = (
            channel.broadcast(flat[0], root) if len(flat) == 1 else _chain([channel.broadcast(x, root) for x in flat])
        )
        return self._run("broadcast", tensors, steps, staged, opts)

    def _all_gather(self, pairs: Sequence[tuple[Sequence[Tensor], Tensor]], opts: Any, outs: Any) -> Work:
        staged, steps = Staged(), []
        for targets, x in pairs:
            for out in targets:
                same("all_gather", out, x)
            flat = [as_bytes(staged.write(out, keep=False)) for out in targets]
            mine = as_bytes(staged.read(x))
            if self._end is None:
                flat[0].copy_(mine)
            else:
                steps.append(self._end.channel.gather(mine, flat))
        if self._end is None:
            staged.finish()
            return Work(None, "all_gather", outs, 0.0)
        return self._run("all_gather", outs, steps[0] if len(steps) == 1 else _chain(steps), staged, opts)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        return self._all_gather(list(zip(outs, ins)), opts, outs)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        """`outs[k]` are rank k's tensors."""
        return self._all_gather(list(zip(zip(*outs), ins)), opts, outs)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([out], [x], opts)

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        staged, pairs = Staged(), []
        for out, x in zip(outs, ins):
            whole = staged.write(out, keep=False)
            pairs.append((self._split("all_gather", whole, x), x))
        work = self._all_gather(pairs, opts, outs)
        return self._finishing(work, staged)

    def _finishing(self, work: Work, staged: Staged) -> Work:
        """Write staged results back when the work is done: a strided output of a single-tensor form is rare."""
        if staged:
            if work is not None:
                work.wait()
            staged.finish()
        return work

    def gather(self, outs: Any, ins: Any, opts: Any) -> Work:
        root, staged, steps = opts.rootRank, Staged(), []
        for i, x in enumerate(ins):
            targets = None
            if self._me == root:
                for out in outs[i]:
                    same("gather", out, x)
                targets = [as_bytes(staged.write(out, keep=False)) for out in outs[i]]
            mine = as_bytes(staged.read(x))
            if self._end is None:
                assert targets is not None
                targets[0].copy_(mine)
            else:
                steps.append(self._end.channel.gather(mine, targets, root))
        if self._end is None:
            staged.finish()
            return Work(None, "gather", outs, 0.0)
        return self._run("gather", outs, _chain(steps), staged, opts)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Work:
        root, staged, steps = opts.rootRank, Staged(), []
        for i, out in enumerate(outs):
            parts = None
            if self._me == root:
                for part in ins[i]:
                    same("scatter", part, out)
                parts = [as_bytes(staged.read(part)) for part in ins[i]]
            target = as_bytes(staged.write(out, keep=False))
            if self._end is None:
                assert parts is not None
                target.copy_(parts[0])
            else:
                steps.append(self._end.channel.scatter(target, parts, root))
        if self._end is None:
            staged.finish()
            return Work(None, "scatter", outs, 0.0)
        return self._run("scatter", outs, _chain(steps), staged, opts)

    def all_to_all_single(self, out: Tensor, x: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Work:
        staged = Staged()
        targets = self._rows(staged.write(out, keep=False), out_sizes)
        even = not out_sizes and not in_sizes
        return self._all_to_all(targets, self._rows(staged.read(x), in_sizes), staged, opts, [out], even)

    def _rows(self, x: Tensor, sizes: Any) -> list[Tensor]:
        """Cut along the first dim, evenly where no sizes are given."""
        rows = x.shape[0] if x.dim() else 1
        if not sizes:
            if rows % self._n:
                raise ValueError(f"all_to_all: {rows} rows are not a multiple of {self._n} ranks")
            sizes = [rows // self._n] * self._n
        if sum(sizes) != rows or len(sizes) != self._n:
            raise ValueError(f"all_to_all: splits {list(sizes)} do not add up to {rows} rows for {self._n} ranks")
        return list(x.split(list(sizes)))

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Work:
        staged = Staged()
        targets = [staged.write(out, keep=False) for out in outs]
        return self._all_to_all(targets, [staged.read(x) for x in ins], staged, opts, outs)

    def _all_to_all(self, targets: Any, parts: Any, staged: Staged, opts: Any, outs: Any, even: bool = False) -> Work:
        to, of = [as_bytes(t) for t in targets], [as_bytes(p) for p in parts]
        if self._end is None:
            to[0].copy_(of[0])
            staged.finish()
            return Work(None, "all_to_all", outs, 0.0)
        return self._run("all_to_all", outs, self._end.channel.all_to_all(to, of, even), staged, opts)

    def barrier(self, opts: Any = None) -> Work:
        if self._end is None:
            return Work(None, "barrier", [], 0.0)
        return self._run("barrier", [], self._end.channel.barrier(), None, opts)

    # --- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Buffered: the wait ends when the tensor may be overwritten, whether or not it is received."""
        end = self._usable("send")
        work = SendWork(end, f"send to group rank {dst}", tensors, self._seconds)
        work.data, work.tag, work.sent, work.started = as_bytes(Staged().read(tensors[0])), tag, 0, False
        work.need = ((dst,), -1)
        box = end.post.outboxes[dst]
        work.stalled = box.stalled
        with lock:
            box.post(work)
            if not work.done:
                end.talking = True
                activate(end)
        return work

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, source: int | None, tag: int) -> Work:
        end = self._usable("recv")
        what = "recv from any rank" if source is None else f"recv from group rank {source}"
        x = plain(tensors[0])
        work = _Receive(end, what, tensors, self._seconds)
        staged = torch.empty(x.shape, dtype=x.dtype) if not x.is_contiguous() else x
        work.back = None if staged is x else (x, staged)
        work.need = (end.channel.others if source is None else (source,), -1)
        with lock:
            end.post.receive(work, source, tag, as_bytes(staged))
            if not work.done:
                end.talking = True
                activate(end)
        return work

    def _usable(self, name: str) -> Endpoint:
        if self._end is None:
            raise ValueError(f"{name}: a group of one rank has no peers")
        if self._end.error is not None:
            raise dist.DistBackendError(f"{name}: the group cannot be used any more: {self._end.error}")
        return self._end

    # names of torch before 2.13, and of its own older callers
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Receive(Work):
    """A receive into memory that is not contiguous is copied there when it is waited for."""

    back: tuple[Tensor, Tensor] | None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        super().wait(timeout)
        if self.back is not None:
            self.back[0].copy_(self.back[1])
            self.back = None
        return True


def _then(steps: Steps, action: Callable[[], None]) -> Steps:
    yield from steps
    action()


def _chain(all_steps: Sequence[Steps]) -> Steps:
    for steps in all_steps:
        yield from steps


def _together(channel: Channel, flat: Sequence[Tensor], kind: Any) -> Steps:
    whole = torch.cat(list(flat))
    yield from channel.all_reduce(whole, kind)
    for x, piece in zip(flat, whole.split([x.numel() for x in flat])):
        x.copy_(piece)
