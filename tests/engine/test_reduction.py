"""ZeRO 1's reduction: after the last write of every parameter, once a step, in as few messages as its buckets allow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import Recipe, make_rows, step_batch
from tests.layouts import SCHEDULES

ADAMW = Recipe()
MICRO = 4


def _steps(engine: Any, layout: Layout, sizes: list[int]) -> None:
    for i, micro in enumerate(sizes):
        rows = make_rows(micro * layout.dp, 16, 101, seed=i)  # unlike rows on the replicas
        engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro))


def _writes(rank: int, layout: Layout, folder: str) -> tuple[dict[str, int], dict[str, int]]:
    """Of one step, by parameter: writes when the reduction begins, and at the step's end."""
    engine = build_engine(layout, ADAMW, folder, MICRO * layout.dp)
    counts: Counter[str] = Counter()
    names = {p: name for name, p in engine.module.named_parameters()}
    products, buffers = engine.ds.weight_gradients, engine.ds.gradients
    place, reduce = products._place, buffers.reduce
    at_reduction: list[dict[str, int]] = []

    def placed(param: Any) -> Any:
        counts[names[param]] += 1
        return place(param)

    def reduced() -> None:
        at_reduction.append(dict(counts))
        reduce()

    products._place, buffers.reduce = placed, reduced
    for param, name in names.items():
        if param.dim() < 2:  # autograd adds to it
            param.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    _steps(engine, layout, [MICRO])
    (first,) = at_reduction
    assert first.keys() == set(names.values())
    return first, dict(counts)


def test_reduction_follows_the_last_write(folders: dict[str, Path]) -> None:
    """P07: it began at B, before W; or after a number of calls that whole and split backwards reach differently."""
    for schedule in ("zbv", "zb-h1", "interleaved"):
        layout = Layout(pp=2, dp=2, model=SCHEDULES[schedule])
        for first, last in run_ranks(4, _writes, layout, str(folders["llama_bias"])):
            assert first == last, schedule
            assert min(first.values()) == MICRO, (schedule, first)
            assert all(n % MICRO == 0 for n in first.values()), (schedule, first)  # the head: once a run of tokens


def _collectives(rank: int, layout: Layout, folder: str, sizes: list[int]) -> list[dict[str, int]]:
    """Of each step: calls over dp, and bytes, by name. Numbers and flags are left out."""
    found: list[Counter[str]] = []

    def wrap(name: str, position: int, keyword: str) -> None:
        real = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position] if len(args) > position else kwargs[keyword]
            size = tensor.numel() * tensor.element_size()
            if size > 256 and found:
                found[-1].update({name: 1, f"{name} bytes": size})
            return real(*args, **kwargs)

        setattr(dist, name, counted)

    for name, position, keyword in (
        ("reduce", 0, "tensor"), ("all_reduce", 0, "tensor"), ("broadcast", 0, "tensor"), ("all_gather", 1, "tensor"),
        ("all_gather_into_tensor", 0, "output_tensor"), ("reduce_scatter_tensor", 1, "input"),
        ("all_to_all_single", 1, "input"),
    ):  # fmt: skip
        wrap(name, position, keyword)  # before DeepSpeed looks its functions up
    engine = build_engine(layout, ADAMW, folder, max(sizes) * layout.dp)
    for micro in sizes:
        found.append(Counter())
        _steps(engine, layout, [micro])
    weights = sum(p.numel() for p in engine.module.parameters())
    return [dict(x) for x in found] + [{"weights": weights}]


def test_collectives_of_data_parallelism(folders: dict[str, Path]) -> None:
    """Each rank's part of each group's gradients once, each group's weights once; no more for more micro-batches.

    Megatron's distributed optimizer moves the same: a reduce-scatter of the gradients and an all-gather of the weights.
    """
    layout, sizes = Layout(dp=2), [4, 1, 7]
    *steps, sizes_of = run_ranks(2, _collectives, layout, str(folders["llama_bias"]), sizes)[0]
    groups, weights = 2, 4 * sizes_of["weights"]  # matrices decay, vectors do not
    for step in steps:
        assert step == steps[0]
        assert (step["reduce"], step["all_gather_into_tensor"]) == (groups * layout.dp, groups), step
        for name in ("reduce bytes", "all_gather_into_tensor bytes"):
            assert weights <= step[name] < weights + 4 * 64, (name, step)  # groups are padded
        assert step.keys() == {"reduce", "reduce bytes", "all_gather_into_tensor", "all_gather_into_tensor bytes"}
