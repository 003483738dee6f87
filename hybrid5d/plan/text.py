"""A forecast as plain lines."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid5d.plan.forecast import Forecast, Prices
from hybrid5d.plan.memory import StageMemory, groups_of, host_at_load


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


def forecast_text(result: Forecast) -> str:
    """What `hybrid5d plan` prints."""
    lines = [*_layout(result), *_stages(result)]
    if result.prices is not None:
        lines += [*_memory(result.prices), *_traffic(result.prices), *_time(result.prices, result.hardware.name)]
    if result.measured and "mfu" in result.measured:
        m = result.measured
        lines.append(f"measured  {m['seconds']:g} s: {m['mfu']:.1%} causal, {m['over_planned']:.2f} x the planned time")
    return "\n".join([*lines, *(f"warning   {text}" for text in result.warnings)]) + "\n"


def _layout(result: Forecast) -> Iterator[str]:
    layout, batch = result.plan.layout, result.plan.batch
    yield f"layout    {layout.world_size} ranks: tp {layout.tp}, cp {layout.cp}, dp {layout.dp}, pp {layout.pp}"
    for axis, g in result.groups.items():
        yield f"  {axis}      {g.count} groups of {g.size}, {g.across_nodes} across nodes of {result.gpus_per_node}"
    yield (
        f"batch     {batch.global_batch_size} rows a step: {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size} on each of {layout.dp} dp ranks"
    )
    ds = result.to_dict()["batch"]["deepspeed"]
    yield f"          DeepSpeed: {', '.join(f'{name} {value}' for name, value in ds.items())}"


def _stages(result: Forecast) -> Iterator[str]:
    schedule = result.schedule
    for s in result.stages:
        live = schedule.live_chunks[s.stage]
        runs = f" in runs of {', '.join(map(str, s.runs))}" if len(s.runs) > 1 else ""
        count = "unknown" if s.parameters is None else f"{s.parameters:,}"
        layers = f"{s.decoder_layers} decoder layers{runs}"
        yield f"stage {s.stage:<3} {layers}, {count} parameters a rank, {live} chunks alive"
    yield (
        f"schedule  {schedule.name}: {schedule.makespan_units:g} units, {schedule.chunks} chunks a rank, "
        f"bubble {schedule.bubble:.1%}"
    )


def _memory(prices: Prices) -> Iterator[str]:
    yield "memory    of one rank, allocated (what torch.cuda.max_memory_allocated reads)"
    for m in prices.memory:
        yield f"  stage {m.stage:<3} {size(m.allocated)} at {m.peak_at.replace('_', ' ')}: {', '.join(_kinds(m))}"
        yield f"            {m.states}; peaks: {', '.join(f'{n} {size(v)}' for n, v in m.peaks.items())}"
    worst = max(prices.memory, key=lambda m: m.driver)
    groups = ", ".join(f"{name} {n}" for name, n in groups_of(prices.job).items()) or "none"
    outside = ", ".join(f"{name} {size(value)}" for name, value in worst.outside.items())
    yield f"  outside   {outside}: {groups}"
    yield f"  estimates reserved {size(worst.reserved)}, driver's reading {size(worst.driver)} on stage {worst.stage}"
    yield f"  host      {size(host_at_load(prices.job))} a node at load"


def _kinds(m: StageMemory) -> Iterator[str]:
    kinds = {name: value for name, value in m.kinds().items() if name != "buffers"} | m.buffers
    return (f"{name} {size(value)}" for name, value in kinds.items() if value)


def _traffic(prices: Prices) -> Iterator[str]:
    yield "traffic   sent by one rank in a step"
    for i, stage in enumerate(prices.traffic):
        parts = [f"{axis} {size(v['sent'])} in {v['calls']:,}" for axis, v in stage.items() if v["calls"]]
        yield f"  stage {i:<3} {', '.join(parts) or 'nothing'}"


def _time(prices: Prices, name: str) -> Iterator[str]:
    time, result = prices.time, prices.flops
    each = ", ".join(f"{c} {result.per_token[c] / 1e9:.4g}" for c in ("causal", "full", "counter", "hardware"))
    yield f"flops     GFLOP a token: {each}"
    yield f"time      {time.total:.4g} s a step on {name}, {time.tokens_per_second:,.0f} tokens/s"
    yield f"          {', '.join(f'{part} {seconds:.3g}' for part, seconds in time.parts.items() if seconds)}"
    yield f"mfu       {', '.join(f'{value:.1%} {name}' for name, value in time.mfu.items())} (convention of attention)"
