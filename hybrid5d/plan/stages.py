"""How decoder layers are spread over pipeline stages."""

from __future__ import annotations

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.plan.pipeline import Schedule

_LAYERS = "actor.model.pipeline_model_parallel_size"
_FIRST = "actor.model.decoder_first_pipeline_num_layers"
_LAST = "actor.model.decoder_last_pipeline_num_layers"


def split_layers(
    num_layers: int, pp: int, first: int | None = None, last: int | None = None, runs: int = 1
) -> tuple[int, ...]:
    """Decoder layers per stage. The first stage holds the embedding too, the last one the final norm and the head.

    Counts differ by at most one. Stages in the middle take the surplus first, then the first stage: the head is the
    heaviest extra. Stages at the ends may hold no decoder layer, stages in between need one.

    Args:
        pp: stages: pipeline ranks times `runs`, the runs of layers that each holds.

    Raises:
        ConfigErrors: more stages than there is work for, or `first` and `last` that do not add up.
    """
    if pp == 1:
        _check_single(num_layers, first, last)
        return (num_layers,)
    fixed = {0: first, pp - 1: last}
    taken = sum(n for n in fixed.values() if n is not None)
    free = [stage for stage in range(pp) if fixed.get(stage) is None]
    rest = num_layers - taken
    _check(num_layers, pp, first, last, free, rest, runs)
    counts = [fixed.get(stage) or 0 for stage in range(pp)]
    base, surplus = divmod(rest, len(free)) if free else (0, 0)
    order = [s for s in free if 0 < s < pp - 1] + [s for s in (0, pp - 1) if s in free]
    for place, stage in enumerate(order):
        counts[stage] = base + (1 if place < surplus else 0)
    return tuple(counts)


def split_by_cost(num_layers: int, schedule: Schedule, head: float) -> tuple[int, ...]:
    """Decoder layers per stage, so that the busiest rank has as little work as whole layers allow.

    `head`: work of the last stage's norm, head and loss, in decoder layers.

    Each layer goes to the rank with the least work so far; then each rank's layers to its chunks in the same way.
    Stages between the ends hold at least one. `split_layers` says first whether there are enough layers.
    """
    last = schedule.stages - 1
    extra = [head if s == last else 0.0 for s in range(schedule.stages)]
    counts = [int(0 < s < last) for s in range(schedule.stages)]
    ranks = [schedule.held(rank) for rank in range(schedule.pp)]
    for _ in range(num_layers - sum(counts)):
        held = min(ranks, key=lambda held: sum(counts[s] + extra[s] for s in held))
        counts[min(held, key=lambda s: counts[s] + extra[s])] += 1
    return tuple(counts)


def _check_single(num_layers: int, first: int | None, last: int | None) -> None:
    for key, value in ((_FIRST, first), (_LAST, last)):
        if value is not None and value != num_layers:
            rule = f"with pipeline_model_parallel_size=1 the one stage holds all {num_layers} layers"
            raise ConfigErrors([ConfigError(key, value, rule, "set it to null")])


def _check(
    num_layers: int, pp: int, first: int | None, last: int | None, free: list[int], rest: int, runs: int
) -> None:
    middle = [s for s in free if 0 < s < pp - 1]
    if rest < len(middle):
        if first is None and last is None:
            most = (num_layers + 2) // runs
            made = f"; {runs} runs of layers a rank make {pp}" if runs > 1 else ""
            fill = f"{num_layers} decoder layers fill at most {num_layers + 2} stages"
            rule = f"{fill} (embedding and head may stand alone){made}"
            raise ConfigErrors([ConfigError(_LAYERS, pp // runs, rule, f"use {most} or less")])
        key, value = (_FIRST, first) if first is not None else (_LAST, last)
        rule = f"leaves {rest} of {num_layers} layers for the other {len(free)} stages"
        raise ConfigErrors([ConfigError(key, value, rule, "give the end stages fewer layers")])
    if not free and rest:
        rule = f"{first} + {last} layers are not the model's {num_layers}"
        raise ConfigErrors([ConfigError(_FIRST, first, rule, f"use {max(num_layers - (last or 0), 0)}, or null")])
