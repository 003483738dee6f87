"""The ranks of one launch on this node, watching each other: the first failure is told first, and ends the job.

Launchers leave gaps: a rank that exits 0 early stops nobody, a killed `deepspeed` leaves its ranks running, and every
survivor prints a network error of its own. Each rank therefore writes its process id into a folder of this launch; a
thread looks after the others, and whoever fails first claims the right to speak.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import threading
import time
import traceback
import zlib
from pathlib import Path

import psutil

from hybrid5d.console import say
from hybrid5d.errors import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, HybridError
from hybrid5d.launch.env import LaunchEnv
from hybrid5d.launch.hosts import Hosts, Store
from hybrid5d.launch.progress import (
    STACK,
    Progress,
    describe,
    end_processes,
    leave_stack,
    main_stack,
    pid_file_alive,
    same_process,
    started_at,
)
from hybrid5d.train.requests import Request, Requests

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # stop and save, end at once, save
GRACE_SECONDS = 8.0  # for the cause to be told, and for the launcher to end this rank
_POLL_SECONDS = 1.0
STACK_SECONDS = 5.0  # for ranks that can to say where they stand
REPEAT_SECONDS = 2.0  # a scheduler signals all processes and launchers pass it on: SIGTERMs this close are one
CAUSE_SECONDS = 3.0  # two beats between hosts
_PREFIX, FAILED, HANG = "hybrid5d-", "failed", "hang"


class Job:
    """This rank among the ranks of its node.

    Attributes:
        progress: what the rank is doing, since when, and for how long it may.
        requests: what signals ask; the training loop answers them.
        grace_seconds: how long it may take to.
    """

    def __init__(self, env: LaunchEnv, root: Path | None = None, *, started: bool = False):
        """`started`: by `hybrid5d train`, whose end ends a single process too (a shell's does not)."""
        self.env = env
        self.progress = Progress(None)
        self.requests, self.grace_seconds = Requests(), 30.0
        self._deadline: float | None = None
        parent = psutil.Process().ppid()
        self.ancestors = _launch_processes(parent) if env.world_size > 1 or started else []
        name = f"{_PREFIX}{os.getuid()}-{parent}-{started_at(parent)}"
        self.folder = (root or Path(tempfile.gettempdir())) / name
        self.joined = False
        self._stop = threading.Event()
        self._hosts: Hosts | None = None

    @property
    def where(self) -> str:
        """What the rank is doing, for messages ("step 2")."""
        return self.progress.where

    @where.setter
    def where(self, text: str) -> None:
        self.progress.where = text

    # --- life -------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Make this rank known to the others, start to watch them, and answer signals from here on."""
        self.joined = True
        if self.env.world_size > 1 or self.ancestors:
            self._make_folder()
            (self.folder / f"{self.env.rank}.pid").write_text(f"{os.getpid()} {started_at(os.getpid())}")
            self.progress.path = self.folder / f"{self.env.rank}.note"
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:  # the thread answers, also while the main one waits in gloo
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)  # a child's signal is not this rank's
        threading.Thread(target=self._watch, args=(reader,), name="hybrid5d-watch", daemon=True).start()

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.env.local_rank == 0:
            _sweep(self.folder)

    def finish(self) -> None:
        """This rank did its work: from now on its absence is no failure."""
        self._stop.set()
        if self._hosts is not None:
            self._hosts.close()
        _forget_signals()
        if self.env.world_size == 1:
            return
        (self.folder / f"{self.env.rank}.done").touch()

    def fail(self, exc: BaseException) -> int:
        """Tell the failure of this rank unless another one was first; returns the exit code.

        A refusal (HybridError) is told by rank 0, once; another rank tells it only when rank 0 has nothing to say.
        """
        if isinstance(exc, HybridError):
            self._refuse(str(exc))
            return EXIT_FAILED if self.requests.answered else EXIT_REFUSED  # a run that trained failed
        code = exc.code if isinstance(exc, SystemExit) else None
        reason = f"left early with exit code {code or 0}" if isinstance(exc, SystemExit) else _one_line(exc)
        if isinstance(exc, KeyboardInterrupt):
            reason = "interrupted"
        elif self.env.world_size > 1 and isinstance(exc, RuntimeError):
            time.sleep(0.5)  # a lost connection is seen before the lost process is
            self._wait_for_a_cause()
        gone = self.gone()
        if gone:
            self._tell(f"{self._gone_text(gone)}\n{self._prefix()}{self.where}: {reason}")
        else:
            trace = "" if isinstance(exc, SystemExit | KeyboardInterrupt) else "".join(traceback.format_exception(exc))
            self._tell(f"{self._prefix()}{self.where}: {reason}\n{trace}")
        if self.env.world_size > 1:
            end_processes(self.folder, only_stopped=True)  # no launcher's SIGTERM reaches them
        return code if isinstance(code, int) and code else EXIT_FAILED

    def _refuse(self, text: str) -> None:
        if self.env.rank == 0:
            self._tell(text)
            return
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._failed():
                return
            time.sleep(0.1)
        self._tell("\n".join(f"{self._prefix()}{line}" for line in text.splitlines()))

    def _wait_for_a_cause(self) -> None:
        """A connection that broke may be another host's failure: it is told first, and comes within a moment."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while self.env.several_hosts and time.monotonic() < deadline and not self._failed() and not self.gone():
            time.sleep(0.1)

    # --- the others -------------------------------------------------------------------------------------------------

    def gone(self) -> list[int]:
        """Ranks of this node whose process ended without having finished."""
        missing = []
        for path in self.folder.glob("*.pid") if self.env.world_size > 1 else ():
            rank = int(path.stem)
            if rank != self.env.rank and not path.with_suffix(".done").exists() and not pid_file_alive(path):
                missing.append(rank)
        return sorted(missing)

    def _watch(self, reader: int) -> None:
        failed_since: float | None = None
        while not self._stop.is_set():
            ready, _, _ = select.select([reader], [], [], _POLL_SECONDS)
            for number in os.read(reader, 64) if ready else b"":
                if number in SIGNALS:
                    self._signalled(signal.Signals(number))
            if self._stop.is_set():
                return
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end(f"not done {self.grace_seconds:g} s after SIGTERM (runner.grace_seconds)", EXIT_FAILED)
            if (seconds := self.progress.overdue) is not None and not self._failed():
                self._stands_still(seconds)
            if (self.folder / HANG).exists():
                leave_stack(self.folder / f"{self.env.rank}.{STACK}")
            if any(not same_process(pid, started) for pid, started in self.ancestors):
                self._orphaned()
            if self._failed():
                failed_since = failed_since or time.monotonic()
                if time.monotonic() - failed_since > GRACE_SECONDS:
                    os._exit(EXIT_FAILED)
            elif self._tell_gone():
                os._exit(EXIT_FAILED)

    def _stands_still(self, seconds: float) -> None:
        """Nothing moves: the first rank of the node to see it tells what all of them do, and ends them."""
        text = f"no progress for {seconds:.0f} s (runner.hang_timeout), in {self.where}"
        if self.env.world_size == 1:
            self._tell(f"{text}\n{main_stack()}")
            os._exit(EXIT_FAILED)
        try:
            os.close(os.open(self.folder / HANG, os.O_CREAT | os.O_EXCL))
        except OSError:
            return  # another one tells
        leave_stack(self.folder / f"{self.env.rank}.{STACK}")
        ranks = sorted(int(path.stem) for path in self.folder.glob("*.pid"))
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all((self.folder / f"{r}.{STACK}").exists() for r in ranks):
            time.sleep(0.1)
        self._tell(f"{text}:\n{describe(self.folder, ranks)}")
        if self.env.several_hosts:
            time.sleep(CAUSE_SECONDS)  # the other hosts hear of it by the first rank of this one
        end_processes(self.folder)
        os._exit(EXIT_FAILED)

    def _signalled(self, number: signal.Signals) -> None:
        """SIGUSR1 asks for a save, a first SIGTERM for a save and the end; else the end comes at once.

        A launcher that ends the ranks of a failed one sends SIGTERM as well: it is no request then.
        """
        if number == signal.SIGUSR1:
            self.requests.ask(Request.SAVE)
        elif number == signal.SIGTERM and self._stopping_since(REPEAT_SECONDS):
            return
        elif number == signal.SIGTERM and not self._failed() and not self.gone() and self._will_answer():
            self._ask_to_end(Request.STOP)
        elif number == signal.SIGTERM and not self.requests.answered and not self._failed():
            self._end(f"stopped by {number.name}; there was nothing to save yet", EXIT_STOPPED)
        else:
            self._end(f"stopped by {number.name}", 128 + number)

    def _orphaned(self) -> None:
        """A launcher that is gone (killed, or `deepspeed` on SIGTERM) asks for a save and the end; no success."""
        self.ancestors = []
        if self._stopping_since(self.grace_seconds):  # the launcher died of the signal that asked for it
            return
        if not self._will_answer():
            self._end("the launcher is gone; stopping", EXIT_FAILED)
        self.warn("the launcher is gone: saving and stopping after this step")
        self._ask_to_end(Request.LEAVE)

    def _ask_to_end(self, request: Request) -> None:
        self.requests.ask(request)
        self._deadline = time.monotonic() + self.grace_seconds

    def _stopping_since(self, seconds: float) -> bool:
        """A stop was asked for, at most so long ago."""
        return self._deadline is not None and time.monotonic() <= self._deadline - self.grace_seconds + seconds

    def _will_answer(self) -> bool:
        return self.requests.answered and self.requests.asked < Request.STOP

    def _end(self, text: str, code: int) -> None:
        """End at once, with the reason told once."""
        if not self._failed() and not self._tell_gone():
            self._tell(f"{self._prefix()}{self.where}: {text}")
        os._exit(code)

    def _tell_gone(self) -> bool:
        gone = [] if self._failed() else self.gone()
        return bool(gone) and self._tell(self._gone_text(gone))

    def _gone_text(self, gone: list[int]) -> str:
        text = "the process is gone without a word: killed (out of memory?), or it left before the end"
        return "\n".join(f"[rank {rank}] {self.where}: {text} (seen by rank {self.env.rank})" for rank in gone)

    def _tell(self, text: str) -> bool:
        """Say why the job ends, here and to the other hosts, unless a rank of this node did; True where it was us."""
        if self.env.world_size > 1:
            try:
                self._make_folder()
                handle = os.open(self.folder / FAILED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                os.write(handle, text.splitlines()[0].encode())
                os.close(handle)
            except FileExistsError:
                return False
            except OSError:
                pass  # no folder to agree in: better told twice than not at all
        say(text)
        if self._hosts is not None:
            self._hosts.tell(text.splitlines()[0])
        return True

    # --- other hosts ------------------------------------------------------------------------------------------------

    def connect(self, store: Store, seconds: float) -> None:
        """Hear the other hosts from here on: one that is silent for so long, gone or failed ends the job here too.

        Raises:
            HostError: one of them cannot be reached.
        """
        self._hosts = Hosts(self.env, seconds, self._host_ended, self._failure)
        self._hosts.connect(store)

    def _host_ended(self, reason: str) -> None:
        self._tell(f"{self._prefix()}{self.where}: {reason}")
        os._exit(EXIT_FAILED)

    def _failure(self) -> str:
        try:
            return (self.folder / FAILED).read_text(errors="replace")
        except OSError:
            return ""

    def warn(self, text: str) -> None:
        """Print a warning with this rank's number, unless a rank of this node printed the same one."""
        mark = self.folder / f"told-{zlib.crc32(text.encode()):08x}"
        try:
            if self.env.world_size > 1:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            pass
        say(f"{self._prefix()}warning: {text}")

    def _failed(self) -> bool:
        """Another rank of this launch failed; what is left of an earlier one by the same parent is none of ours."""
        return self.env.world_size > 1 and (self.folder / FAILED).exists()

    def _prefix(self) -> str:
        return f"[rank {self.env.rank}] " if self.env.world_size > 1 else ""


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def rank_processes(launcher: int) -> list[int]:
    """Process ids of the ranks on this node below a launcher of ours that watch for signals by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(launcher)
        parents = [process.ppid(), launcher, *(child.pid for child in process.children(recursive=True))]
        root = Path(tempfile.gettempdir())
        files = [f for p in parents for f in root.glob(f"{_PREFIX}{os.getuid()}-{p}-{started_at(p)}/*.pid")]
        return [int(f.read_text().split()[0]) for f in files if pid_file_alive(f)]
    return []


def _one_line(exc: BaseException) -> str:
    first = next((line for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {first}" if first else type(exc).__name__


def _launch_processes(parent: int) -> list[tuple[int, int]]:
    """Processes whose end must end the ranks: the parent, and `deepspeed`'s runner above its launch.py."""
    found = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(parent)
        found.append((parent, started_at(parent)))
        above = process.parent()
        if above is not None and "deepspeed.launcher.launch" in process.cmdline():
            words = " ".join(above.cmdline()[:4])
            if "deepspeed" in words and above.pid > 1:
                found.append((above.pid, started_at(above.pid)))
    return found


def _sweep(own: Path) -> None:
    """Remove folders of launches that are over, and what an earlier launch by the same parent left in this one's."""
    for path in own.iterdir():
        with contextlib.suppress(OSError):
            ours = path.suffix == ".pid" and pid_file_alive(path)  # a rank that started long before this one
            if not ours and path.stat().st_mtime < psutil.Process().create_time() - 0.5:
                path.unlink()
    for folder in own.parent.glob(f"{_PREFIX}{os.getuid()}-*-*"):
        _, pid, started = folder.name.rsplit("-", 2)
        if folder != own and pid.isdigit() and started.isdigit() and not same_process(int(pid), int(started)):
            shutil.rmtree(folder, ignore_errors=True)
