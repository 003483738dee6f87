"""Memory that the processes of one host share: files of /dev/shm without a name.

A segment is created with O_TMPFILE: it never has a name, so nothing can be guessed, linked to or left behind, whenever
its processes are killed. Peers open it through the creator's file descriptor (/proc/PID/fd/N) and take it only where
inode, owner, size and a random token are those that the creator announced. Pages are reserved when it is created
(posix_fallocate): a full /dev/shm is an error here and not SIGBUS at the first write.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat

import torch

FOLDER = "/dev/shm"
PAGE = 4096
WORD = 8
_MARGIN = 1 << 20  # bytes of /dev/shm that are left to others


class NoRoom(OSError):
    """/dev/shm has no room for a segment."""


class Segment:
    """A mapped segment. `data` is a uint8 tensor over it, `words` a view of 64-bit integers. Word 0 is the token."""

    def __init__(self, fd: int, size: int):
        self.size, self._fd = size, fd
        self._map = mmap.mmap(fd, size)
        self.words = memoryview(self._map).cast("q")
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> tuple[Segment, tuple[int, ...]]:
        """A zeroed segment of at least `size` bytes and its address, five integers that `open` takes.

        Raises:
            NoRoom: /dev/shm is too small.
            OSError: no segment can be made here at all.
        """
        size = -(-size // PAGE) * PAGE
        room = os.statvfs(FOLDER)
        if room.f_bavail * room.f_frsize < size + _MARGIN:
            raise NoRoom(f"{FOLDER} has {room.f_bavail * room.f_frsize >> 10} KiB free, {size >> 10} KiB are needed")
        fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            segment = cls(fd, size)
        except OSError as exc:
            os.close(fd)
            raise NoRoom(f"{FOLDER}: {size >> 10} KiB cannot be reserved: {exc.strerror}") from exc
        token = secrets.randbits(62)
        segment.words[0] = token
        return segment, (os.getpid(), fd, os.fstat(fd).st_ino, size, token)

    @classmethod
    def open(cls, address: tuple[int, ...]) -> Segment:
        """Map a peer's segment.

        Raises:
            OSError: it cannot be reached, or it is not the announced one.
        """
        pid, number, inode, size, token = address
        if not (0 < pid < 1 << 32 and 0 <= number < 1 << 31 and 0 < size < 1 << 48):
            raise OSError(f"no address of a segment: {address}")
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            result = os.fstat(fd)
            same = stat.S_ISREG(result.st_mode) and result.st_uid == os.geteuid()
            if not same or (result.st_ino, result.st_size) != (inode, size):
                raise OSError(f"file {number} of process {pid} is not the announced segment")
            segment = cls(fd, size)
        except BaseException:
            os.close(fd)
            raise
        segment.close_file()
        if segment.words[0] != token:
            raise OSError(f"file {number} of process {pid} does not carry the announced token")
        return segment

    def close_file(self) -> None:
        """Close the descriptor once all peers have mapped the segment; the mapping stays."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close_file()
