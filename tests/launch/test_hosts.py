"""Hosts that hear each other: what ends a job on one of them ends it on all, with the cause, within a stated time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

from hybrid5d.launch.env import LaunchEnv
from hybrid5d.launch.hosts import HostError, Hosts
from tests.launch.test_runs import trains, wait
from tests.launch_kit import REPO, TP2, free_port, metrics, write_run

SECONDS = 3.0


class Store:
    """What torch's store does for two calls."""

    def __init__(self) -> None:
        self.values: Queue[str] = Queue()

    def set(self, key: str, value: str) -> None:
        for _ in range(8):
            self.values.put(value)

    def get(self, key: str) -> bytes:
        return self.values.get(timeout=10).encode()


class Host:
    """One of several with two ranks each."""

    def __init__(self, number: int, hosts: int, seconds: float = SECONDS):
        self.ended: Queue[str] = Queue()
        self.failure = ""
        env = LaunchEnv(2 * number, 2 * hosts, 0, 2)
        self.link = Hosts(env, seconds, self.ended.put, lambda: self.failure)

    def reason(self) -> str:
        return self.ended.get(timeout=4 * SECONDS)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Three hosts that have met."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, hosts = Store(), [Host(n, 3) for n in range(3)]
    meeting = [Thread(target=host.link.connect, args=(store,)) for host in hosts]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join(10)
    yield hosts
    for host in hosts:
        host.link.close()


def test_hosts_that_are_heard_go_on_and_part_without_a_word(three: list[Host]) -> None:
    time.sleep(1.5 * SECONDS)
    three[1].link.close()
    for peer in three[1].link._peers:
        peer.link.close()
    time.sleep(1.5)
    assert [host.ended.qsize() for host in three] == [0, 0, 0]


def test_a_failure_is_told_to_all_others_and_not_back(three: list[Host]) -> None:
    """It is what the file says that the failing rank of that host wrote."""
    three[1].failure = "[rank 3] step 2: ValueError: bad row"
    for host in (three[0], three[2]):
        assert host.reason() == f"host {socket.gethostname()} (ranks 2 to 3): {three[1].failure}"
    time.sleep(1.5)
    assert three[1].ended.empty()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_is_gone_is_named_on_the_others(three: list[Host], lost: int) -> None:
    three[lost].link._stop.set()
    for peer in list(three[lost].link._peers):
        peer.link.shutdown(socket.SHUT_RDWR)
    reasons = [host.reason() for host in three if host is not three[lost]]
    ranks = f"(ranks {2 * lost} to {2 * lost + 1})"
    assert all(ranks in reason and "gone without a word" in reason for reason in reasons), reasons


def test_a_host_that_is_silent_is_named_on_the_others_in_time(three: list[Host]) -> None:
    hours = {time.strftime("%H:")}
    begun = time.monotonic()
    three[2].link._stop.set()  # its thread says nothing more, its connection stays
    reasons = [three[0].reason(), three[1].reason()]
    assert time.monotonic() - begun > SECONDS - 1.5, "no sooner; reason() waits no longer than four times as long"
    hours.add(time.strftime("%H:"))
    assert reasons[0] == reasons[1] and any(f"(ranks 4 to 5) has not been heard since {h}" in reasons[0] for h in hours)


def test_a_stranger_is_no_host_and_one_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, hosts, errors = Store(), [Host(n, 3, 4.0) for n in range(2)], Queue[str]()

    def meet(host: Host) -> None:
        try:
            host.link.connect(store)
        except HostError as exc:
            errors.put(str(exc))

    first = Thread(target=meet, args=(hosts[0],))
    first.start()
    port, _ = json.loads(store.get(""))
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]  # the last one says nothing
    strangers[0].sendall(b'["guess", "host x"]\n')
    strangers[1].sendall(b"GET / HTTP/1.0\n")
    second = Thread(target=meet, args=(hosts[1],))
    second.start()
    first.join(10)
    text = errors.get(timeout=1)
    assert text.startswith("4 ranks of other hosts are to connect to host") and "(ranks 2 to 3)" in text
    assert "host x" not in text
    assert "Fix: start all hosts" in text
    second.join(10)
    for host in hosts:
        host.link.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("counts", [(4, 1, 2), (1, 2, 4)], ids=str)
def test_hosts_with_other_numbers_of_ranks_meet(
    counts: tuple[int, ...], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.setenv("MASTER_ADDR", address)
    store, ended = Store(), Queue[str]()
    links = [Hosts(LaunchEnv(sum(counts[:i]), 7, 0, n), SECONDS, ended.put) for i, n in enumerate(counts)]
    threads = [Thread(target=link.connect, args=(store,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    links[1].tell("it has enough")
    for _ in range(2):
        assert "(ranks" in (text := ended.get(timeout=4 * SECONDS)) or "(rank " in text
    for link in links:
        link.close()


def test_one_host_has_no_link() -> None:
    assert not Hosts(LaunchEnv(0, 4, 0, 4), 3, print).active
    assert not Hosts(LaunchEnv(3, 4, 1, 2), 3, print).active
    assert Hosts(LaunchEnv(2, 4, 0, 2), 3, print).active


# --- real ranks in network namespaces -------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, h5d-PID-0 (10.77.0.1) and -1 (10.77.0.2), with one link between them."""
    names = [f"h5d-{os.getpid()}-{n}" for n in (0, 1)]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "h5d0", "netns", names[0], "type", "veth", "peer", "name", "h5d1", "netns", names[1])
            for n, name in enumerate(names):
                _ip("-n", name, "address", "add", f"10.77.0.{n + 1}/24", "dev", f"h5d{n}")
                _ip("-n", name, "link", "set", f"h5d{n}", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"no network namespaces here: {exc.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("how", ["cut", "stopped"])
def test_two_hosts_end_when_one_is_lost(tmp_path: Path, namespaces: list[str], how: str) -> None:
    """The link between them is cut, or one stands still: both ends say so; gloo waits for ten minutes."""
    path, port, ranks = write_run(tmp_path / "a"), str(free_port()), []
    for rank, name in enumerate(namespaces):
        (own := tmp_path / str(rank)).mkdir()
        environ = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "TMPDIR": own, "GLOO_SOCKET_IFNAME": f"h5d{rank}",
        }  # fmt: skip
        words = ["ip", "netns", "exec", name, sys.executable, "-m", "hybrid5d.worker", "--config", str(path), TP2]
        words += ["runner.max_steps=1000000", "runner.cpu_backend=gloo", "runner.peer_timeout=5"]
        ranks.append(subprocess.Popen(
            words, env={"PATH": os.environ["PATH"], **{k: str(v) for k, v in environ.items()}}, text=True, cwd=REPO,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ))  # fmt: skip
    try:
        wait(lambda: trains(tmp_path / "a" / "run") or any(r.poll() is not None for r in ranks), 120)
        if how == "cut":
            _ip("-n", namespaces[0], "link", "set", "h5d0", "down")
        else:
            ranks[1].send_signal(signal.SIGSTOP)
        texts = [ranks[0].communicate(timeout=60)[1]]
        ranks[1].send_signal(signal.SIGCONT)
        texts.append(ranks[1].communicate(timeout=60)[1])
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], texts
    for rank, text in enumerate(texts):
        seen = [line for line in text.splitlines() if f"(rank {1 - rank}) has not been heard since" in line]
        assert (how == "stopped" and rank == 1) or (seen and "(runner.peer_timeout)" in seen[0]), text
    assert metrics(tmp_path / "a" / "run")
