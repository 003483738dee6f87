"""From an installed wheel, without a checkout: every launcher trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.launch_kit import BIN, REPO, TP2, free_port, write_run

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]  # builds a wheel and starts each launcher: minutes


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a fresh environment that holds the wheel; its dependencies are those of the running environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (REPO / name).exists():
            shutil.copy(REPO / name, source)
    shutil.copytree(REPO / "hybrid5d", source / "hybrid5d", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, timeout=300, cwd=folder)
    (wheel,) = folder.glob("hybrid5d-*.whl")
    shutil.rmtree(source)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.check_output([python, "-c", query], text=True).strip())
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=300, cwd=folder)
    # Later in the path than the wheel; addsitedir would run the .pth of an editable install, this does not.
    (site / "running.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name in ("deepspeed", "accelerate", "torchrun"):
        script = (BIN / name).read_text().splitlines()
        (python.parent / name).write_text("\n".join([f"#!{python}", *script[1:]]) + "\n")
        (python.parent / name).chmod(0o755)
    (python.parent / "hybrid5d").write_text(f"#!{python}\nfrom hybrid5d.cli import main\nmain()\n")
    (python.parent / "hybrid5d").chmod(0o755)
    return python.parent


ENTRIES = {
    "hybrid5d": ["hybrid5d", "train", "RUN", "--num-procs", "2"],
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "PORT", "--module", "hybrid5d.worker"],
    "accelerate": [
        "accelerate", "launch", "--use_deepspeed", "--num_processes", "2", "--main_process_port", "PORT", "-m",
        "hybrid5d.worker",
    ],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "PORT", "-m", "hybrid5d.worker"],
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_every_launcher_trains_from_the_wheel(installed: Path, tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "a")
    command = [{"RUN": str(path), "PORT": str(free_port())}.get(word, word) for word in ENTRIES[name]]
    command += [] if name == "hybrid5d" else ["--config", str(path)]
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "DS_ACCELERATOR")
    environ = {k: v for k, v in os.environ.items() if k not in dropped} | {
        "PATH": f"{installed}:/usr/bin:/bin",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [str(installed / command[0]), *command[1:], TP2, "runner.max_steps=2"], cwd=tmp_path, env=environ,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]
    assert json.loads((tmp_path / "a" / "run" / "result.json").read_text())["steps"] == 2


def test_it_is_the_wheel_that_runs(installed: Path, tmp_path: Path) -> None:
    code = "import hybrid5d.worker, deepspeed; print(hybrid5d.__file__)"
    out = subprocess.check_output([installed / "python", "-c", code], cwd=tmp_path, text=True)
    assert str(installed.parent) in out.splitlines()[-1] and str(REPO) not in out.splitlines()[-1]
