"""Compile and load the stand-in for a CUDA device. Imports no torch: it must come first."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def build(target: Path) -> Path | None:
    """The compiled shim; None where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    torch, source = _torch_folder(), Path(__file__).with_name("shim.cpp")
    words = [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", str(source), "-o", str(target)]
    words += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    words += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(words, check=True, capture_output=True, timeout=240)
    return target


def load(shim: Path) -> None:
    """Make autograd take CUDA tensors without data, in this process."""
    assert "torch" not in sys.modules, "torch has asked for CUDA already"
    for library in (f"{_torch_folder()}/lib/libc10.so", f"{_torch_folder()}/lib/libtorch_cpu.so", str(shim)):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
