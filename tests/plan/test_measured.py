"""The forecast beside what a training step on CPU really allocates, sends and computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid5d.config.schema import RunConfig
from hybrid5d.plan.flops import per_token
from hybrid5d.plan.hardware import load_hardware
from hybrid5d.plan.job import Job, job_of
from hybrid5d.plan.memory import stage_memory
from hybrid5d.plan.run import build_plan
from hybrid5d.plan.traffic import stage_traffic
from tests.engine_kit import Layout, build_engine, config_dict
from tests.harness import run_ranks
from tests.kit import COMMON, Recipe, hf_model, make_rows, save_model, step_batch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory import tensor_bytes

LENGTH, VOCABULARY = 512, 1001
SIZES = {
    "model_type": "llama", **COMMON, "tie_word_embeddings": False, "hidden_size": 128, "intermediate_size": 320,
    "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
}  # fmt: skip
ADAMW = Recipe("adamw", lr=1e-3, weight_decay=0.1, clip=1.0)
FULL: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
SPLIT = [
    Layout(pp=2, model={"pipeline_schedule": "zb-h1"}),
    Layout(pp=2, model={"pipeline_schedule": "zbv"}, precision="bf16"),
    Layout(pp=2, model={"virtual_pipeline_model_parallel_size": 2}),
]  # fmt: skip
QUICK = [Layout(precision="bf16"), Layout(tp=2, sp=True), SPLIT[2]]
REST = [
    Layout(pp=2), *SPLIT[:2], Layout(pp=2, model={"pipeline_schedule": "gpipe"}),
    Layout(), Layout(dp=2, precision="bf16"), Layout(model=FULL), Layout(dp=2, zero=2), Layout(dp=2, zero=3),
    Layout(cp=2, model={"cp_comm_type": "p2p"}), Layout(cp=2, model={"cp_comm_type": "a2a"}), Layout(tp=2),
    Layout(model={"recompute_granularity": "selective"}), Layout(tp=2, pp=2, sp=True, precision="bf16"),
    Layout(tp=2, cp=2, sp=True, model={"cp_comm_type": "all_gather"}), Layout(pp=4, precision="bf16"),
]  # fmt: skip


# Weights, not activations, are most of it: wide layers, short rows.
WIDE, SHORT = SIZES | {"hidden_size": 256, "intermediate_size": 640}, 16
STATES = [
    Layout(dp=2), Layout(precision="bf16"), Layout(dp=2, precision="bf16"), Layout(dp=2, zero=2), Layout(dp=2, zero=3),
    Layout(dp=2, zero=2, precision="bf16"), Layout(dp=2, zero=3, precision="bf16"),
    Layout(tp=2, dp=2, sp=True, zero=2), Layout(pp=2),
]  # fmt: skip


def cases(quick: list[Layout], rest: list[Layout]) -> list[Any]:
    return [*quick, *(pytest.param(layout, marks=pytest.mark.full) for layout in rest)]


def priced(layout: Layout, folder: str, rows: int, length: int = LENGTH) -> Job:
    tree = config_dict(layout, ADAMW, folder, rows)
    tree["runner"]["seq_length"] = length
    job = job_of(build_plan(RunConfig.model_validate(tree), layout.world, "translate"), 8)
    assert job is not None
    return job


def _allocate(rank: int, layout: Layout, folder: str, rows: int, length: int = LENGTH) -> int:
    """The most bytes of tensors alive in the second step, counted from before the model is built."""
    batch = make_rows(rows, length, VOCABULARY, ragged=False)
    with torch.profiler.profile(profile_memory=True) as first:
        engine = build_engine(layout, ADAMW, folder, rows)
        mine = step_batch(batch, layout.dp, engine.ctx.dp.rank, layout.micro)
        engine.train_batch(mine)
    with torch.profiler.profile(profile_memory=True) as second:
        engine.train_batch(mine)
    return tensor_bytes(first)[0] + tensor_bytes(second)[1]


@pytest.mark.parametrize("layout", cases(QUICK, REST), ids=str)
def test_peak_of_allocated_tensors_within_7_percent(layout: Layout, tmp_path: Path) -> None:
    rows, folder = 4 * layout.dp, str(save_model(SIZES, tmp_path / "model"))
    measured = run_ranks(layout.world, _allocate, layout, folder, rows, timeout=240)
    job = priced(layout, folder, rows)
    for stage in range(layout.pp):
        planned = stage_memory(job, stage, load_hardware("cpu")).allocated
        real = measured[stage * layout.world // layout.pp]
        print(f"{layout} stage {stage}: planned {planned:,}, measured {real:,}, ratio {planned / real:.3f}")
        assert planned == pytest.approx(real, rel=0.07)


@pytest.mark.parametrize("length", [SHORT, pytest.param(LENGTH, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", cases(STATES[:1], STATES[1:]), ids=str)
def test_peak_where_weights_are_most_of_it_within_4_percent(layout: Layout, length: int, tmp_path: Path) -> None:
    rows, folder = 4 * layout.dp, str(save_model(WIDE, tmp_path / "model"))
    measured = run_ranks(layout.world, _allocate, layout, folder, rows, length, timeout=240)
    for stage in range(layout.pp):
        planned = stage_memory(priced(layout, folder, rows, length), stage, load_hardware("cpu")).allocated
        real = measured[stage * layout.world // layout.pp]
        print(f"{layout} stage {stage}: planned {planned:,}, measured {real:,}, ratio {planned / real:.3f}")
        assert planned == pytest.approx(real, rel=0.04)


def _watch(counts: dict[tuple[int, ...], int]) -> None:
    """Add up the tensors that go into each collective and message, by the ranks of its group."""

    def add(group: Any, *tensors: Any) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > 256:  # counts, norms and flags of a step
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            counts[ranks] = counts.get(ranks, 0) + size

    def wrap(name: str, position: int, keyword: str) -> None:
        real = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[2] if name in ("isend", "irecv") else None)
            add(group, args[position] if len(args) > position else kwargs[keyword])
            return real(*args, **kwargs)

        setattr(dist, name, counted)

    wrap("all_reduce", 0, "tensor")
    wrap("all_gather_into_tensor", 0, "output_tensor")
    wrap("reduce_scatter_tensor", 1, "input")
    wrap("reduce", 0, "tensor")
    wrap("isend", 0, "tensor")
    wrap("irecv", 0, "tensor")


def _send(rank: int, layout: Layout, folder: str, rows: int) -> dict[str, int]:
    counts: dict[tuple[int, ...], int] = {}
    _watch(counts)  # before DeepSpeed looks its functions up
    engine = build_engine(layout, ADAMW, folder, rows)
    mine = step_batch(make_rows(rows, LENGTH, VOCABULARY, ragged=False), layout.dp, engine.ctx.dp.rank, layout.micro)
    engine.train_batch(mine)
    counts.clear()
    engine.train_batch(mine)
    ctx = engine.ctx
    axes = {"tp": ctx.tp, "pp": ctx.pp, "cp": ctx.cp, "dp": ctx.dp_cp}
    return {name: counts.get(tuple(axis.ranks), 0) for name, axis in axes.items() if axis.size > 1}


@pytest.mark.parametrize(
    "layout",
    cases(
        [Layout(tp=2, sp=True), SPLIT[0], Layout(dp=2)],
        [
            Layout(tp=2),
            Layout(tp=2, model=FULL),
            Layout(pp=2),
            *SPLIT[1:],
            Layout(dp=2, precision="bf16"),
            Layout(tp=2, pp=2, sp=True),
        ],
    ),
    ids=str,
)
def test_bytes_by_axis_are_those_sent(layout: Layout, tmp_path: Path) -> None:
    rows, folder = 4 * layout.dp, str(save_model(SIZES, tmp_path / "model"))
    counted = run_ranks(layout.world, _send, layout, folder, rows, timeout=240, backend="shm")
    job = priced(layout, folder, rows)
    for stage in range(layout.pp):
        planned = stage_traffic(job, stage)
        for axis, real in counted[stage * layout.world // layout.pp].items():
            print(f"{layout} stage {stage} {axis}: planned {planned[axis].payload:,.0f}, counted {real:,}")
            assert round(planned[axis].payload) == real, axis


def _attend(rank: int, layout: Layout, folder: str, rows: int) -> int:
    """Bytes that the attention of all layers sent in a step."""
    from hybrid5d.context_parallel import ContextParallelAttention

    engine = build_engine(layout, ADAMW, folder, rows)
    engine.train_batch(
        step_batch(make_rows(rows, LENGTH, VOCABULARY, ragged=False), layout.dp, engine.ctx.dp.rank, layout.micro)
    )
    cores = [m for m in engine.module.modules() if isinstance(m, ContextParallelAttention)]
    return sum(sum(core.traffic.bytes.values()) for core in cores)


OTHER_METHODS = [("a2a", 2, {}), ("p2p", 3, FULL), ("all_gather", 2, {})]


@pytest.mark.parametrize(
    ("method", "cp", "recompute"),
    [("p2p", 2, {}), *(pytest.param(*case, marks=pytest.mark.full) for case in OTHER_METHODS)],
)
def test_bytes_of_context_parallelism(method: str, cp: int, recompute: dict[str, Any], tmp_path: Path) -> None:
    layout, folder = (
        Layout(cp=cp, model={"cp_comm_type": method, **recompute}),
        str(save_model(SIZES, tmp_path / "model")),
    )
    counted = run_ranks(layout.world, _attend, layout, folder, 4, timeout=240)
    planned = stage_traffic(priced(layout, folder, 4), 0)["cp"]
    print(f"{layout} cp: planned {planned.sent:,.0f}, counted {counted}")
    assert counted == [round(planned.sent)] * layout.world


def test_flops_in_torchs_convention() -> None:
    """FlopCounterMode over transformers' model, forward and backward.

    It does not know the CPU's fused attention, so that is added by torch's own formulas for the fused kernels it knows.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    from hybrid5d.hf.spec import parse_hf_config

    hf = hf_model(SIZES)
    ids = torch.randint(0, VOCABULARY, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        hf(ids, labels=ids, use_cache=False).loss.backward()
    counted, spec = counter.get_total_flops(), parse_hf_config(hf.config.to_dict())
    if not any("attention" in str(kernel) for kernel in counter.get_flop_counts()["Global"]):
        x = (1, spec.num_attention_heads, LENGTH, spec.head_dim)
        counted += spec.num_layers * (sdpa_flop_count(x, x, x) + sdpa_backward_flop_count(x, x, x, x))
    assert counted == pytest.approx(LENGTH * per_token(spec, LENGTH, "counter"), rel=0.01)
