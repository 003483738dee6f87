"""A run folder belongs to one run: who holds it is written in `run.lock`, and the kernel says whether they still do.

The file holds pid, host and start time of the holder; POSIX record locks on two of its bytes say whether it lives. They
end with the process, however it ends, are not inherited by its children, and work over NFS and Lustre. The launcher
holds the first byte from its checks to the end of the run, rank 0 the second, so that ranks that outlive a killed
launcher still own the folder. The file is never removed: removing it would race with the next to lock it.

Some mounts keep locks local to each host, or have none. A record of another host that was not cleared is therefore
watched: a holder rewrites its beat every few seconds, and one that beats is refused as if its lock had been seen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybrid5d.console import say
from hybrid5d.errors import ConfigError, ConfigErrors

LOCK = "run.lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 4 * BEAT_SECONDS  # caches of network file systems included
_BYTE = {"launcher": 1 << 20, "rank 0": (1 << 20) + 1}  # beyond the text
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


@dataclass
class RunLock:
    """A held run folder. `release` gives it back; the end of the process does so, too."""

    handle: int
    stop: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """Rewrite the record's counter until the folder is given back. A launcher leaves that to rank 0."""
        beat = 0
        while not self.stop.wait(BEAT_SECONDS):
            record, beat = _read(self.handle), beat + 1
            if record.get("pid") == os.getpid():
                with contextlib.suppress(OSError):
                    os.pwrite(self.handle, json.dumps({**record, "beat": beat}).encode() + b"\n", 0)

    def release(self) -> None:
        """Give the folder back."""
        self.stop.set()
        if self.handle >= 0:
            os.ftruncate(self.handle, 0)
            os.close(self.handle)
            self.handle = -1


def take(folder: Path, role: Literal["launcher", "rank 0"], *, under_launcher: bool = False) -> RunLock:
    """Take a run folder (made where it is missing) for this process.

    Args:
        under_launcher: the launcher of this run holds the folder already; only its ranks' byte is taken.

    Raises:
        ConfigErrors: another run holds it (pid, host and start time are named), or it cannot be made or written.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        rule = f"cannot be written: {exc.strerror}"
        raise ConfigErrors([ConfigError("runner.output_dir", str(folder), rule, "choose another folder")]) from None
    try:
        holder = _read(handle)
        free = _locked(handle, _BYTE[role])
        if free and not under_launcher:  # the other byte must be free as well
            free = all(_free(handle, byte) for name, byte in _BYTE.items() if name != role)
        if not free or (holder and not under_launcher and _beats(handle, holder, folder)):
            raise ConfigErrors([_in_use(folder, holder)])
        if holder and not under_launcher:
            say(f"notice: {folder} was left locked by pid {holder.get('pid')} on {holder.get('host')}, which is gone")
        _write(handle, role)
    except BaseException:
        os.close(handle)
        raise
    lock = RunLock(handle)
    threading.Thread(target=lock.beat, name="hybrid5d-lock", daemon=True).start()
    return lock


def _in_use(folder: Path, holder: dict[str, Any]) -> ConfigError:
    who = f"pid {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('started', '?')}"
    fix = "wait for it or stop it, or give this run a runner.experiment_name of its own"
    return ConfigError("runner.output_dir", str(folder), f"is in use by another run: {who}", fix)


def _locked(handle: int, byte: int) -> bool:
    """Lock one byte; False where another process holds it. True, too, where the file system knows no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as exc:
        return exc.errno in _NO_LOCKS
    return True


def _free(handle: int, byte: int) -> bool:
    if not _locked(handle, byte):
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, byte)
    except OSError as exc:
        return exc.errno in _NO_LOCKS
    return True


def _read(handle: int) -> dict[str, Any]:
    """The record of whoever holds or held the folder; {} where it was given back."""
    try:
        record = json.loads(os.pread(handle, 4096, 0) or b"{}")
    except (OSError, ValueError):
        return {"host": "?", "pid": "?"}  # being written
    return record if isinstance(record, dict) else {}


def _write(handle: int, role: str) -> None:
    record = {
        "pid": os.getpid(), "host": socket.gethostname(), "role": role,
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), "beat": 0,
    }  # fmt: skip
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(record).encode() + b"\n", 0)


def _beats(handle: int, holder: dict[str, Any], folder: Path) -> bool:
    """A holder on another host, whose lock is not seen here, still writes. On this host the kernel has answered."""
    if holder.get("host") == socket.gethostname():
        return False
    say(f"notice: {folder} was last held by pid {holder.get('pid')} on {holder.get('host')}; watching it for "
        f"{WATCH_SECONDS:.0f} s")  # fmt: skip
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(BEAT_SECONDS / 5)
        if _read(handle) != holder:
            return True
    return False
