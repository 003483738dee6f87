"""Starting a job on this machine: one check, one run directory, then the launcher of choice; and its end."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from hybrid5d.console import say
from hybrid5d.devices import accelerator_faults, too_few_devices, visible_devices, wants_cpu
from hybrid5d.errors import EXIT_FAILED, ConfigError, ConfigErrors
from hybrid5d.launch.env import LaunchEnv, usable_cores
from hybrid5d.launch.preflight import Argv, plan_run
from hybrid5d.launch.watch import rank_processes
from hybrid5d.plan.draft import Purpose
from hybrid5d.plan.outputs import write_settings
from hybrid5d.plan.run import RunPlan
from hybrid5d.train.lock import take
from hybrid5d.train.run_folder import RunFolder

LAUNCHERS = ("deepspeed", "accelerate", "torchrun", "python")
WORKER = "hybrid5d.worker"
_PATIENCE_SECONDS = 5.0  # beyond the time that the ranks have to save and end
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


def launch(
    argv: Argv, num_procs: int | None, launcher: str | None, purpose: Purpose = "train",
    stopped: threading.Event | None = None,
) -> int:  # fmt: skip
    """Check, write the run directory, start `num_procs` ranks of the worker and wait; returns the exit code.

    The run folder is held from the checks to the end. 0 means that rank 0 reported the end of the run, not only that
    the launcher returned 0: `deepspeed` does so too when its inner process is killed. `stopped` is set by a SIGTERM,
    whatever the code is then: a save may miss the grace.

    Raises:
        ConfigErrors: everything that is wrong, before anything is started.
    """
    plan, notices, chosen = checked(argv, num_procs, launcher, purpose)
    count, evaluate = plan.layout.world_size, purpose == "eval"
    folder = _folder(plan, purpose)
    lock = take(folder.path, "launcher")
    try:
        notices = (*notices, *(folder.prepare_evaluation(plan) if evaluate else folder.prepare(plan)))
        digest = write_settings(folder.path, plan.config)
        lines = [f"run directory: {folder.path}", *(f"notice: {n}" for n in notices)]
        say("\n".join(lines), sys.stdout)
        options = ["--run-dir", str(folder.path), "--digest", digest, *(["--eval"] if evaluate else [])]
        words, grace = [*command(chosen, count), *options], plan.config.runner.grace_seconds
        code = _run(words, count, grace, stopped or threading.Event())
    finally:
        lock.release()
    ended = folder.exit_code()
    if ended:  # torchrun and accelerate turn every code other than 0 into 1
        return ended
    if code == 0 and ended is None:
        say(f"{chosen} returned 0, but the run did not reach its end: {folder.path} has no result.json")
        return EXIT_FAILED
    return code


def _folder(plan: RunPlan, purpose: Purpose) -> RunFolder:
    folder = RunFolder.of(plan)
    return RunFolder(folder / "eval") if purpose == "eval" else folder


def dry_run(argv: Argv, num_procs: int | None, launcher: str | None, purpose: Purpose = "train") -> str:
    """What `launch` would start, with everything checked that is before ranks exist, the data read; nothing is written
    but the cache of tokens.

    Raises:
        HybridError: what `launch` would raise.
    """
    plan, notices, chosen = checked(argv, num_procs, launcher, purpose)
    folder, count = _folder(plan, purpose), plan.layout.world_size
    if fault := folder.unwritable():
        raise ConfigErrors([fault])
    RunFolder.of(plan).source(plan)
    from hybrid5d.launch.run import introduction, sources  # numpy, and torch for RL

    training, held_out = sources(plan, LaunchEnv(world_size=count, local_world_size=count), purpose)
    shown = held_out if training is None else training
    lines = [f"run directory: {folder.path}", *introduction(plan, count, shown, notices)]
    if training is not None and held_out is not None:
        lines.append(f"evaluation data: {held_out.describe()}")
    return "\n".join([*lines, f"dry run: {chosen} would start {count} process{'es' if count > 1 else ''}"])


def checked(
    argv: Argv, num_procs: int | None, launcher: str | None, purpose: Purpose
) -> tuple[RunPlan, Sequence[str], str]:
    """The plan, what the user should know, and the launcher: all that a start can be refused for by its settings.

    Raises:
        ConfigErrors: everything that is wrong.
    """
    faults = _launcher_faults(launcher, num_procs)
    try:
        plan, notices = plan_run(argv, num_procs, purpose)
    except ConfigErrors as exc:
        raise ConfigErrors([*faults, *exc.errors]) from None
    count = plan.layout.world_size
    if faults := faults or _launcher_faults(launcher, count):
        raise ConfigErrors(faults)
    return plan, notices, launcher or ("python" if count == 1 else "deepspeed")


def _launcher_faults(launcher: str | None, count: int | None) -> list[ConfigError]:
    if launcher is not None and launcher not in LAUNCHERS:
        return [ConfigError("--launcher", launcher, "unknown launcher", f"use one of {', '.join(LAUNCHERS)}")]
    if launcher == "python" and count is not None and count > 1:
        rule = f"plain python starts one process, --num-procs is {count}"
        return [ConfigError("--launcher", launcher, rule, "use deepspeed, accelerate or torchrun")]
    faults = accelerator_faults(os.environ, _gpu_is_here())
    return faults if faults or count is None else too_few_devices(os.environ, count)


def _gpu_is_here() -> bool:
    return any(Path(device).exists() for device in _GPU_DEVICES)


def command(launcher: str, count: int, port: int | None = None) -> list[str]:
    """The launcher's command line up to the worker's own words."""
    port = port or _free_port()
    python = sys.executable
    visible = visible_devices(os.environ)
    if launcher == "deepspeed" and visible is not None:
        # `--num_gpus` replaces the variable by 0..N-1, `--include` takes no UUIDs (launcher/runner.py): the part of
        # the launcher that starts the ranks is told directly. -1 hides all devices, as an empty variable does.
        devices = [*visible[:count], *[-1] * (count - len(visible))]
        world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
        start = ["-m", "deepspeed.launcher.launch", "--quiet", "--world_info", world]
        start += ["--master_port", str(port), "--module"]
    elif launcher == "deepspeed":
        start = ["-m", "deepspeed.launcher.runner", "--quiet", "--num_gpus", str(count)]
        start += ["--master_port", str(port), "--module"]
    elif launcher == "accelerate":
        start = ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", str(count)]
        # accelerate warns of each of these that is left to its default
        start += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        start += ["--main_process_port", str(port), "--module"]
    elif launcher == "torchrun":
        start = ["-m", "torch.distributed.run", "--nproc_per_node", str(count), "--master_port", str(port), "-m"]
    else:
        start = ["-m"]
    return [python, *start, WORKER]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run(words: list[str], count: int, grace_seconds: float, stopped: threading.Event) -> int:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_root()), *_inherited_path()])}
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.setdefault("DS_LOG_LEVEL", "error")  # DeepSpeed's launcher logs what it starts; ours has said it
    if wants_cpu(environ) or not _gpu_is_here():
        environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed says at each import that it found no GPU
    if len(words) > 3 and words[2] != WORKER:
        # torchrun and accelerate warn at length where it is unset
        environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    process = subprocess.Popen(words, env=environ, start_new_session=True)
    with _forwarded(process, grace_seconds, stopped):
        code = process.wait()
        if code <= 0:  # killed, or `deepspeed` whose inner process was: ranks that still run save what they have
            _wait_for_group(process.pid, grace_seconds + _PATIENCE_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever the launcher left behind
    return code if code >= 0 else 128 - code


def _wait_for_group(group: int, seconds: float) -> None:
    """Until no process of the group runs any more (there is nobody to reap those that ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_runs_in(p, group) for p in psutil.process_iter()):
        time.sleep(0.2)


def _runs_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _root() -> Path:
    return Path(__file__).resolve().parent.parent.parent


def _inherited_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


@contextlib.contextmanager
def _forwarded(process: subprocess.Popen[bytes], grace_seconds: float, stopped: threading.Event) -> Iterator[None]:
    """Signals go to the ranks, not to the launcher between: none passes SIGUSR1 on, and `deepspeed` no SIGTERM.

    A first SIGTERM asks for a save and the end, within the grace; SIGINT and a second SIGTERM end everything at once,
    with exit code 130 and 143.
    """
    limit: threading.Timer | None = None

    def kill() -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    def forward(number: int, _: object) -> None:
        nonlocal limit
        if number == signal.SIGTERM:
            stopped.set()
        ranks = rank_processes(process.pid)
        for pid in ranks if number != signal.SIGINT else ():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if number == signal.SIGUSR1:
            say("SIGUSR1: saving after this step" if ranks else "SIGUSR1: the ranks are not there yet")
        elif number == signal.SIGTERM and ranks and limit is None:
            say(f"SIGTERM: saving and stopping after this step, within {grace_seconds:g} s")
            limit = threading.Timer(grace_seconds + _PATIENCE_SECONDS, kill)
            limit.daemon = True
            limit.start()
        else:
            say(f"{signal.Signals(number).name}: ending the run")
            kill()
            raise SystemExit(128 + number)

    before = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        if limit is not None:
            limit.cancel()
        for s, handler in before.items():
            signal.signal(s, handler)
