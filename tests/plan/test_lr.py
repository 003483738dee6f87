"""Learning-rate and weight-decay lists against closed forms and Megatron's measured tables."""

from __future__ import annotations

import math

import pytest

from hybrid5d.plan.lr import LRSchedule, build_schedule
from tests.config_kit import config_of

TABLES = [
    ({"style": "constant", "max_lr": 20, "warmup_steps": 0.1, "decay_steps": 10}, [0, 20, 20, 20]),
    (
        {"style": "cosine", "max_lr": 10, "warmup_steps": 3, "decay_steps": 10},
        [0, 3.33, 6.67, 10, 9.50, 8.12, 6.11, 3.89, 1.88, 0.50, 0],
    ),
    ({"style": "linear", "max_lr": 10, "decay_steps": 10}, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]),
    ({"style": "linear", "max_lr": 10, "warmup_steps": 3, "decay_steps": 10}, [0, 3.33, 6.67, 10, 8.57]),
]


@pytest.mark.parametrize(("arguments", "wanted"), TABLES)
def test_measured_tables(arguments: dict, wanted: list[float]) -> None:
    schedule = LRSchedule(**arguments)
    assert [schedule.lr(k) for k in range(len(wanted))] == pytest.approx(wanted, abs=6e-3)


def warm(k: int) -> float:
    return 1e-5 + (1e-3 - 1e-5) * k / 4


CLOSED = {
    "constant": lambda k: 1e-3,
    "linear": lambda k: 1e-4 + 9e-4 * (1 - (k - 4) / 12),
    "cosine": lambda k: 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (k - 4) / 12)),
    "inverse-square-root": lambda k: max(1e-4, 1e-3 * math.sqrt(4 / k)),
}


@pytest.mark.parametrize("style", CLOSED)
def test_twenty_steps_of_each_style(style: str) -> None:
    config = config_of(
        actor__lr_sched={
            "lr_decay_style": style, "lr_warmup_iters": 4, "lr_decay_iters": 16, "min_lr": 1e-4, "lr_warmup_init": 1e-5,
        }
    )  # fmt: skip
    schedule = build_schedule(config, 8)
    floor = 1e-3 if style == "constant" else 1e-4
    wanted = [warm(k) if k <= 4 else CLOSED[style](k) if k <= 16 else floor for k in range(20)]
    assert [schedule.lr(k) for k in range(20)] == pytest.approx(wanted, rel=1e-12)


TAILS = {
    "exponential": lambda r: 2 * 0.5**r - 1,
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (1 + math.cos(math.pi * r)),
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@pytest.mark.parametrize("tail", TAILS)
def test_twenty_steps_of_wsd(tail: str) -> None:
    schedule = LRSchedule(
        style="WSD", max_lr=1.0, min_lr=0.1, warmup_steps=2, decay_steps=18, wsd_decay_steps=8, wsd_decay_style=tail
    )
    wanted = [k / 2 if k <= 2 else 1.0 if k <= 10 else 0.1 + 0.9 * TAILS[tail]((k - 10) / 8) for k in range(19)] + [0.1]
    assert [schedule.lr(k) for k in range(20)] == pytest.approx(wanted, rel=1e-12)


def test_warmup_fraction_wins_and_may_be_fractional() -> None:
    config = config_of(actor__lr_sched={"lr_warmup_fraction": 0.285, "lr_warmup_iters": 7, "lr_decay_iters": 662})
    assert build_schedule(config, 1).warmup_steps == pytest.approx(188.67)
    zero = config_of(actor__lr_sched={"lr_warmup_fraction": 0.0, "lr_warmup_iters": 7})
    assert build_schedule(zero, 1).warmup_steps == 0.0


def test_inverse_square_root_without_warmup_counts_samples() -> None:
    schedule = LRSchedule(style="inverse-square-root", max_lr=1.0, samples_per_step=64)
    assert [schedule.lr(k) for k in range(3)] == pytest.approx([1.0, 1 / 8, 1 / math.sqrt(128)])


def test_weight_decay_ramp() -> None:
    linear = LRSchedule(start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_style="linear", weight_decay_steps=4)
    assert [linear.weight_decay(k) for k in range(7)] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1])
    cosine = LRSchedule(start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_style="cosine", weight_decay_steps=4)
    wanted = [0.5 * (math.cos(math.pi * (1 - k / 4)) + 1) for k in range(5)]
    assert [cosine.weight_decay(k) for k in range(5)] == pytest.approx(wanted)


def test_constant_style_takes_the_optimizers_decay() -> None:
    config = config_of(actor__optim={"weight_decay": 0.3}, actor__lr_sched={"lr_decay_style": "constant"})
    assert build_schedule(config, 1).weight_decay(0) == 0.3
    ramp = {
        "lr_decay_style": "linear",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.2,
        "weight_decay_incr_style": "linear",
    }
    schedule = build_schedule(config_of(actor__optim={"weight_decay": 0.3}, actor__lr_sched=ramp), 1)
    assert schedule.weight_decay(0) == pytest.approx(0.1) and schedule.weight_decay(50_000) == pytest.approx(0.15)
