"""Hosts of one job that hear each other: a lost link, a stopped or dead host ends the job on all sides, by name.

The first rank of each host holds one connection to rank 0's and says a word every second, from a thread that needs
neither torch nor the main thread. Collectives of the others would wait for their own timeout, minutes, without a word.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hybrid5d.console import ranks_text
from hybrid5d.errors import HybridError
from hybrid5d.launch.env import LaunchEnv

BEAT_SECONDS = 1.0
HELLO_SECONDS = 1.0  # that who has connected gets to say who it is: a port scanner says nothing
_BEAT, _BYE, _LOST = "beat", "bye", "lost"
_KEY = "hybrid5d/hosts"


class Store(Protocol):
    """torch's, as far as it is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class HostError(HybridError):
    """A host that cannot be reached."""


@dataclass
class _Peer:
    """The first rank of another host."""

    name: str
    link: socket.socket
    heard: float = field(default_factory=time.monotonic)
    text: bytes = b""

    def lines(self) -> list[str] | None:
        """What it said since the last call; None: its end is closed."""
        try:
            found = self.link.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not found:
            return None
        self.heard = time.monotonic()
        *whole, self.text = (self.text + found).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def line(self) -> str:
        """The next line, waited for as long as the socket's timeout says; nothing beyond it is read."""
        text = b""
        while not text.endswith(b"\n") and len(text) < 4096:
            byte = self.link.recv(1)
            if not byte:
                raise ConnectionError("closed")
            text += byte
        return text.decode(errors="replace")

    def say(self, *words: str) -> None:
        """One line; what a connection does not take is not waited for: its silence will tell."""
        try:
            self.link.send(json.dumps(words).encode() + b"\n")
        except OSError:
            return


def _server(backlog: int) -> socket.socket:
    """Listens on any port, for IPv6 and IPv4 where there are both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


class Hosts:
    """This host's link to the others. On ranks that are not the first of their host it does nothing.

    Args:
        seconds: a host that is not heard for so long is lost.
        ended: called once, from the thread, with the reason why the job cannot go on.
        failure: what this host has to tell the others of a failure of its own; "" while there is none.
    """

    def __init__(
        self, env: LaunchEnv, seconds: float, ended: Callable[[str], None], failure: Callable[[], str] = lambda: ""
    ):
        self.env, self.seconds, self.ended, self.failure = env, seconds, ended, failure
        ranks = ranks_text(range(env.rank, env.rank + env.local_world_size))
        self.name = f"host {socket.gethostname()} ({ranks})"
        self.active = env.local_rank == 0 and env.several_hosts
        self._peers: list[_Peer] = []
        self._lock, self._stop, self._told = threading.Lock(), threading.Event(), False

    def connect(self, store: Store) -> None:
        """Meet the other hosts. The first ranks of all hosts call it together.

        Raises:
            HostError: rank 0's host does not answer, or another one did not come.
        """
        if not self.active:
            return
        if self.env.rank == 0:
            self._accept(store)
        else:
            self._join(store)
        for peer in self._peers:
            peer.link.setblocking(False)
        threading.Thread(target=self._listen, name="hybrid5d-hosts", daemon=True).start()

    def close(self) -> None:
        """The job is over: from now on silence is no failure."""
        self._stop.set()
        with self._lock:
            for peer in self._peers:
                peer.say(_BYE)

    def tell(self, text: str) -> None:
        """Tell the other hosts why this one ends. Once; nothing where this rank holds no link."""
        self._lost(f"{self.name}: {text}")

    def _lost(self, reason: str) -> bool:
        """Tell all why the job ends, unless that was done; True where it was now."""
        with self._lock:
            if self._told or self._stop.is_set():
                return False
            self._told = True
            for peer in self._peers:
                peer.say(_LOST, reason)
        return True

    # --- meeting ----------------------------------------------------------------------------------------------------

    def _accept(self, store: Store) -> None:
        token = secrets.token_hex(8)
        others = missing = self.env.world_size - self.env.local_world_size
        with _server(others + 8) as server:
            store.set(_KEY, json.dumps([server.getsockname()[1], token]))
            deadline = time.monotonic() + self.seconds
            while missing > 0:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    peer = _Peer("", server.accept()[0])
                except TimeoutError:
                    here = ", ".join(peer.name for peer in self._peers) or "none"
                    raise HostError(
                        f"{others} ranks of other hosts are to connect to {self.name} within {self.seconds:g} s "
                        f"(runner.peer_timeout); those that did: {here}. Fix: start all hosts, let them reach each "
                        "other on any port, or raise runner.peer_timeout"
                    ) from None
                peer.link.settimeout(HELLO_SECONDS)
                try:
                    said, peer.name, ranks = json.loads(peer.line())
                except (OSError, ValueError, TypeError):
                    continue  # none of ours
                if said == token:
                    peer.say(self.name)
                    self._peers.append(peer)
                    missing -= int(ranks)

    def _join(self, store: Store) -> None:
        port, token = json.loads(store.get(_KEY))
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        try:
            peer = _Peer("", socket.create_connection((address, port), timeout=self.seconds))
            peer.say(token, self.name, str(self.env.local_world_size))
            (peer.name,) = json.loads(peer.line())
        except (OSError, ValueError) as exc:
            raise HostError(
                f"{self.name} cannot reach rank 0 at {address} (MASTER_ADDR), port {port}, within {self.seconds:g} s: "
                f"{exc}. Fix: let hosts reach each other on any port, or name the right address in MASTER_ADDR"
            ) from None
        self._peers.append(peer)

    # --- listening --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        beat = 0.0
        while not self._stop.is_set() and self._peers:
            ready, _, _ = select.select([p.link for p in self._peers], [], [], BEAT_SECONDS)
            reason = next(filter(None, [self._hear(p) for p in list(self._peers) if p.link in ready]), "")
            reason = reason or next(filter(None, map(self._silent, self._peers)), "")
            if self._stop.is_set():
                return
            if reason and self._lost(reason):  # what we told ourselves comes back from rank 0's host
                self.ended(reason)
                return
            if failure := self.failure():
                self.tell(failure)
            if time.monotonic() - beat > BEAT_SECONDS * 0.9:
                beat = time.monotonic()
                with self._lock:
                    for peer in self._peers:
                        peer.say(_BEAT)

    def _silent(self, peer: _Peer) -> str:
        seconds = time.monotonic() - peer.heard
        if seconds <= self.seconds:
            return ""
        since = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - seconds))
        why = "the link is cut, or it stands still"
        return f"{peer.name} has not been heard since {since}, {self.seconds:g} s (runner.peer_timeout): {why}"

    def _hear(self, peer: _Peer) -> str:
        """Why the job is over by what a peer says; "" where it goes on."""
        lines = peer.lines()
        if lines is None:
            self._leave(peer)
            return f"{peer.name}: its processes are gone without a word"
        for line in lines:
            try:
                kind, *rest = json.loads(line)
            except (ValueError, TypeError):
                continue
            if kind == _BYE:
                self._leave(peer)
                return ""
            if kind == _LOST:
                return " ".join(map(str, rest))
        return ""

    def _leave(self, peer: _Peer) -> None:
        with self._lock:  # the main thread may be telling them something
            self._peers.remove(peer)
