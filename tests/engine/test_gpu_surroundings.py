"""What the engine asks of CUDA beside kernels: shown with patched answers."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from hybrid5d.engine.deepspeed.pipeline_module import _draws
from hybrid5d.engine.step import device_memory, start_memory_peak
from hybrid5d.launch.env import LaunchEnv, environment
from hybrid5d.parallel import agree
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.copies import to_device
from tests.engine_kit import Layout, config_dict
from tests.harness import run_ranks
from tests.kit import Recipe, make_rows, step_batch


def _objects(rank: int) -> tuple[list[Any], str, datetime.timedelta, bool]:
    """gather_objects over a group that says it is NCCL's."""
    world, used = dist.group.WORLD, []
    real_backend, real_gather = dist.get_backend, dist.all_gather_object
    agree.dist.get_backend = lambda group=None: "nccl" if group in (None, world) else real_backend(group)

    def spy(found: list[Any], value: Any, group: Any) -> None:
        used.append(group)
        real_gather(found, value, group=group)

    agree.dist.all_gather_object = spy
    axis = Axis.from_group(None)
    found = [agree.gather_objects({"rank": rank}, axis) for _ in range(2)][1]
    timeout = used[0]._get_backend(torch.device("cpu")).options._timeout
    return found, real_backend(used[0]), timeout, used[0] is used[1]


def test_objects_do_not_go_over_nccl() -> None:
    """A waiting rank is patient for hours, as reading weights may take; the group is made once."""
    for found, backend, timeout, once in run_ranks(2, _objects):
        assert found == [{"rank": 0}, {"rank": 1}] and backend == "gloo" and once
        assert timeout == agree.HOST_TIMEOUT == datetime.timedelta(hours=2)


@pytest.mark.parametrize(
    "module, draws",
    [
        (nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.Linear(2, 2), False),
        (nn.MultiheadAttention(4, 2, dropout=0.2), True), (nn.MultiheadAttention(4, 2), False),
    ],
)  # fmt: skip
def test_what_draws_random_numbers(module: nn.Module, draws: bool) -> None:
    assert any(_draws(m) for m in module.modules()) is draws


class _Dropping(nn.Module):
    """A layer that drops half of what it makes."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.5)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        return self.drop(self.layer(x, batch))


def _with_dropout(rank: int, folder: str, recompute: dict[str, Any]) -> tuple[float, float]:
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.engine.build import initialize
    from hybrid5d.models.decoder import LayerDef, decoder_layers
    from hybrid5d.plan.run import build_plan

    def layers(spec: Any, ctx: Any, attention: Any) -> list[LayerDef]:
        def dropping(d: LayerDef) -> LayerDef:
            return replace(d, build=lambda: _Dropping(d.build())) if d.kind == "decoder" else d

        return [dropping(d) for d in decoder_layers(spec, ctx, attention)]

    recipe = Recipe(lr=0.1)
    config = RunConfig.model_validate(config_dict(Layout(model=recompute), recipe, folder, 4))
    engine = initialize(build_plan(config, 1, "translate"), layers)
    torch.manual_seed(11)
    result = engine.train_batch(step_batch(make_rows(4, 16, 101), 1, 0, 1))
    return result.loss, result.grad_norm


def test_recomputation_drops_the_same_again(folders: dict[str, Path]) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kept, again = (run_ranks(1, _with_dropout, str(folders["qwen3"]), model)[0] for model in ({}, full))
    assert again == pytest.approx(kept, rel=1e-5)


def test_memory_says_allocated_reserved_and_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20, 80))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    cuda, cpu = torch.device("cuda", 1), torch.device("cpu")
    start_memory_peak(cpu)
    start_memory_peak(cuda)
    assert reset == [cuda] and device_memory(cpu) == {}
    assert list(device_memory(cuda).values()) == [30.0, 40.0, 60.0]


def test_env_json_names_the_gpu_and_what_drives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = environment(LaunchEnv(), "cuda:1")
    assert found["gpu"] == {"name": "H100", "memory_gib": 80.0, "capability": "9.0"}
    assert (found["cuda"], found["nccl"]) == ("13.0", "2.28.3") and "driver" in found
    assert "gpu" not in environment(LaunchEnv(), "cpu")


def test_a_fused_optimizers_step_lies_beside_its_moments() -> None:
    """torch's fused AdamW takes no step count of another device; a resumed run makes it anew."""
    flat = torch.empty(4, device="meta")
    for fused, device in ((True, "meta"), (False, "cpu")):
        base = torch.optim.AdamW([flat.requires_grad_()], foreach=False)
        base.param_groups[0]["fused"] = fused
        zero = SimpleNamespace(optimizer=base, fp32_partitioned_groups_flat=[flat])
        OptimizerState(zero, SimpleNamespace()).reset(("exp_avg", "exp_avg_sq"), 7)  # type: ignore[arg-type]
        step = base.state[flat]["step"]
        assert (step.device.type, step.dtype) == (device, torch.float32)


def test_tensors_of_all_kinds_go_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is not the CPU: one buffer; values, types and shapes are what they were."""
    given = [
        torch.arange(15).view(3, 5), torch.randn(2, 3), torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.empty(0, dtype=torch.int64), torch.arange(20).view(4, 5)[:, ::2],
    ]  # fmt: skip
    copies: list[torch.Size] = []
    real = Tensor.to

    def to(self: Tensor, device: Any, **options: Any) -> Tensor:
        copies.append(self.shape)
        assert options == {"non_blocking": True}
        return real(self, "cpu")

    monkeypatch.setattr(Tensor, "to", to)
    got = to_device(given, torch.device("cuda"))
    assert len(copies) == 1
    for a, b in zip(got, given, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert all(a is b for a, b in zip(to_device(given, torch.device("cpu")), given))


def test_checkpoints_hold_the_devices_random_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hybrid5d.checkpoint.shards import CUDA_RNG, RNG, random_state

    assert set(random_state()) == {RNG}
    state = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    assert random_state()[CUDA_RNG] is state
