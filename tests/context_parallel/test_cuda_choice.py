"""Which kernel CUDA tensors get, by what the chip and the installed packages can do; shown with patched answers."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid5d.context_parallel import kernels
from hybrid5d.context_parallel.kernels import available_kernels, choose_kernel, kernel_notices
from hybrid5d.context_parallel.kernels.flash_attn import package_functions
from hybrid5d.engine import build
from hybrid5d.errors import ConfigErrors
from hybrid5d.plan.deepspeed_config import PrecisionPlan
from tests.context_parallel.test_kernels import fake_backward, fake_forward

CUDA, BF16, FP16 = torch.device("cuda", 0), torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    package_functions.cache_clear()
    yield
    package_functions.cache_clear()


def chip(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(kernels, "device_capability", lambda device: capability)
    monkeypatch.setattr(build, "device_capability", lambda device: capability)


def package(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    """A flash_attn whose interface has these members; without any there is no interface."""
    top, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    top.__spec__, top.__path__ = importlib.machinery.ModuleSpec("flash_attn", None), []
    monkeypatch.setitem(sys.modules, "flash_attn", top)
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface", raising=False)
    if members:
        vars(interface).update(members)
        top.flash_attn_interface = interface  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_chips_before_ampere_get_the_kernel_that_runs_there(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    chip(monkeypatch, capability)
    package(monkeypatch, _flash_attn_varlen_forward=fake_forward, _flash_attn_varlen_backward=fake_backward)
    assert available_kernels(CUDA, FP16, 64) == ("aten_efficient", "chunked")
    (notice,) = kernel_notices(CUDA, FP16, 64)
    assert "8.0, this device has 7." in notice and notice.endswith("aten_efficient is used")
    with pytest.raises(ValueError, match="aten_flash"):
        choose_kernel("aten_flash", CUDA, FP16)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_later_chips_get_flash_attention(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    chip(monkeypatch, capability)
    assert available_kernels(CUDA, BF16, 128) == ("aten_flash", "aten_efficient", "chunked")
    assert kernel_notices(CUDA, BF16, 128) == [], "no package of that name: nothing to say"
    package(monkeypatch, _flash_attn_varlen_forward=fake_forward, _flash_attn_varlen_backward=fake_backward)
    package_functions.cache_clear()
    assert available_kernels(CUDA, BF16, 128)[0] == choose_kernel("auto", CUDA, BF16, 128).name == "flash_attn"
    small = capability in ((8, 6), (12, 0))
    assert ("aten_flash" in available_kernels(CUDA, BF16, 200)) is not small
    assert available_kernels(CUDA, BF16, 256)[:1] == ("flash_attn",)


def old_forward(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, window_size: Any) -> None:
    """flash-attn 2.6's way to say a window."""


@pytest.mark.parametrize(
    "members, reason",
    [
        ({}, "No module named 'flash_attn.flash_attn_interface'|cannot import name"),
        ({"_flash_attn_varlen_forward": fake_forward}, "has no attribute '_flash_attn_varlen_backward'"),
        (
            {"_flash_attn_varlen_forward": old_forward, "_flash_attn_varlen_backward": fake_backward},
            "not 2.7 or later .no window_size_left",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_passed_over_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, Any], reason: str
) -> None:
    package(monkeypatch, **members)
    assert available_kernels(CUDA, BF16, 64) == ("aten_flash", "aten_efficient", "chunked")
    assert choose_kernel("auto", CUDA, BF16).name == "aten_flash"
    (notice,) = kernel_notices(CUDA, BF16, 64)
    assert notice.startswith("attention: the flash_attn package that is installed") and "aten_flash is used" in notice
    assert re.search(reason, notice), notice
    with pytest.raises(ValueError, match="cannot run bfloat16 on cuda"):
        choose_kernel("flash_attn", CUDA, BF16)


def test_a_wheel_for_another_torch_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at import with whatever its C++ part says."""
    package(monkeypatch)

    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name == "flash_attn.flash_attn_interface":
                raise OSError("undefined symbol: _ZN3c104impl")
            return None

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert available_kernels(CUDA, BF16, 64)[0] == "aten_flash"
    assert "undefined symbol" in kernel_notices(CUDA, BF16, 64)[0]


@pytest.mark.parametrize(
    "dtype, capability, refused", [("bf16", (7, 5), True), ("bf16", (8, 0), False), ("fp16", (7, 0), False)]
)
def test_bf16_on_a_chip_without_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: str, capability: tuple[int, int], refused: bool
) -> None:
    chip(monkeypatch, capability)
    model = SimpleNamespace(attention_kernel="auto")
    plan: Any = SimpleNamespace(
        precision=PrecisionPlan(dtype), config=SimpleNamespace(actor=SimpleNamespace(model=model))
    )
    spec: Any = SimpleNamespace(head_dim=64)
    if refused:
        with pytest.raises(ConfigErrors, match=r"bf16 needs compute capability 8.0, this device has 7.5"):
            build._refuse_at_run_time(plan, spec, CUDA)
    else:
        build._refuse_at_run_time(plan, spec, CUDA)
