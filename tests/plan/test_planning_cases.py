"""The 13 cases of what planners elsewhere forgot; inputs and right values are closed forms, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid5d.hf.rope import RopeSpec
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan import papers
from hybrid5d.plan.flops import flops, per_token
from hybrid5d.plan.forecast import price
from hybrid5d.plan.hardware import load_hardware
from hybrid5d.plan.job import Job, played
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.memory import (
    activations,
    groups_of,
    head_bytes,
    host_at_load,
    kept_by_layer,
    of_micro_batch,
    shape_of,
    stage_memory,
    states,
)
from hybrid5d.plan.pipeline import UNIT, Schedule, timeline
from hybrid5d.plan.run import RecomputePlan
from hybrid5d.plan.stages import split_layers
from hybrid5d.plan.timing import across, inside, of_measured
from hybrid5d.plan.traffic import layer_traffic, stage_traffic

H100 = load_hardware("h100")


def model(hidden: int, inner: int, heads: int, kv: int, layers: int, vocab: int, **other: Any) -> ModelSpec:
    return ModelSpec(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=other.pop("head_dim", hidden // heads),
        rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=other.pop("tied", False),
        rope=RopeSpec(), **other,
    )  # fmt: skip


def job(
    spec: ModelSpec, m: int = 1, b: int = 1, seq: int = 1024, kind: str = "1f1b", chunks: int = 1, **other: Any
) -> Job:
    axes = {a: other.pop(a, 1) for a in ("pp", "dp", "cp", "tp")}
    pp = axes["pp"] * chunks
    stages = other.pop("stages", None) or split_layers(spec.num_layers, pp)
    return Job(
        spec, ParallelLayout(**axes), tuple(stages), Schedule(kind, axes["pp"], chunks), m, b, seq, **other  # type: ignore[arg-type]
    )  # fmt: skip


LLAMA8 = model(4096, 14336, 32, 8, 32, 128256)
LLAMA405 = model(16384, 53248, 128, 8, 126, 128256)


def test_1_bytes_a_parameter() -> None:
    million = 1_000_000
    by = {c: papers.model_states(million, 4, c, 100_000) for c in ("none", "megatron", "deepspeed2", "deepspeed3")}  # type: ignore[arg-type]
    assert by == {"none": 18_000_000, "megatron": 9_000_000, "deepspeed2": 8_000_000, "deepspeed3": 4_900_000}
    assert papers.model_states(million, 4, "autotuner") == 20_000_000
    # ours: the run's own dtypes, each number by its name
    run = job(model(64, 192, 2, 1, 4, 1000), dp=4)
    p, found = run.elements(0), states(run, 0)
    assert (found.weights, found.gradients) == (2 * p, 4 * p)
    assert found.master == pytest.approx(p, abs=4) and found.moments == pytest.approx(2 * p, abs=8)
    assert found.sharded == "gradients: fp32, not sharded"
    fp32 = states(replace(run, precision="fp32", moments=0), 0)
    assert (fp32.weights, fp32.moments) == (4 * p, 0)


@pytest.mark.parametrize(
    ("kind", "chunks", "m", "loads"),
    [
        ("1f1b", 1, 8, (4, 3, 2, 1)),
        ("1f1b", 1, 2, (2, 2, 2, 1)),
        ("gpipe", 1, 8, (8, 8, 8, 8)),
        ("gpipe", 1, 64, (64, 64, 64, 64)),
        ("1f1b", 1, 64, (4, 3, 2, 1)),
        ("interleaved", 2, 8, (5.5, None, None, None)),
    ],
)
def test_2_in_flight_by_stage(kind: str, chunks: int, m: int, loads: tuple[float | None, ...]) -> None:
    stage = papers.layer(1024, 1, 512, 8, flash=True) * 2
    assert stage == 35_651_584
    run = job(model(512, 1024, 8, 8, 8, 1000), m=m, pp=4, kind=kind, chunks=chunks)
    found = [stage_memory(run, rank, H100) for rank in range(4)]
    for memory, load in zip(found, loads):
        if load is not None:
            assert memory.in_flight == load
            assert memory.activations == pytest.approx(load * of_micro_batch(run, memory.stage).kept)
    if kind == "interleaved":
        assert papers.interleaved(4, 2) * 4 * stage == found[0].in_flight * stage == 196_083_712


@pytest.mark.parametrize("tied", [False, True])
def test_3_vocabulary_on_the_end_stages(tied: bool) -> None:
    run = job(model(64, 192, 2, 1, 4, 1000, head_dim=32, tied=tied), pp=4, dp=2, stages=(1, 1, 1, 1))
    found = [states(run, r) for r in range(4)]
    assert [s.weights + s.gradients + s.master + s.moments for s in found] == [1_359_360, 591_360, 591_360, 1_360_128]


def test_4_logits_of_the_loss_that_runs() -> None:
    whole = papers.logits(8192, 128256)
    assert whole == {"bf16": 2_101_346_304, "fp32": 4_202_692_608, "gradient": 4_202_692_608}
    assert sum(whole.values()) == 10_506_731_520
    assert sum(papers.logits(8192, 128256, 8).values()) == 10_506_731_520 / 8
    chunked = papers.logits(8192, 128256, chunk=1024)
    assert chunked["fp32"] + chunked["gradient"] == 1_050_673_152
    # ours: one chunk in fp32, overwritten by its gradient, one 16-bit copy, on the last stage under pp too
    run = job(LLAMA8, seq=8192, pp=4)
    kept, alive = head_bytes(run)
    assert alive == chunked["fp32"] + chunked["bf16"] + 128256 * 4096 * 4
    assert kept == 8192 * 4096 * 2
    assert head_bytes(job(LLAMA8, seq=8192, zero=2))[0] == kept + 128256 * 4096 * 4
    assert [stage_memory(run, r, H100).logits for r in range(4)] == [0, 0, 0, kept + alive]


def test_5_what_sequence_parallelism_divides() -> None:
    """Gathered again in backward: all of a layer is divided, and two more all-gathers a layer go over the wire."""
    spec = model(2048, 4096, 16, 16, 24, 50257)
    one, eight = (job(spec, tp=t, sp=t > 1) for t in (1, 8))
    whole, part = (sum(kept_by_layer(shape_of(j)).values()) for j in (one, eight))
    assert part == whole / 8
    plain = job(spec, tp=8)
    inputs = sum(v for k, v in kept_by_layer(shape_of(plain)).items() if "inputs" in k or "norms'" in k)
    assert sum(kept_by_layer(shape_of(plain)).values()) == inputs + (whole - inputs) / 8
    both = layer_traffic(eight)
    assert (both.tp_forward.calls, both.tp_backward.calls) == (4, 6)
    assert both.tp_backward.payload - both.tp_forward.payload == 2 * 1024 * 2048 * 2


def test_6_a_llama_layer_is_not_34sbh() -> None:
    assert papers.layer(2048, 4, 4096, 32, flash=True) == 1_140_850_688
    spec, tokens = model(4096, 10880, 32, 8, 32, 32000), 4 * 2048
    found = kept_by_layer(shape_of(job(spec, b=4, seq=2048)))
    by_hand = tokens * (
        2 * 2 * 4096 + 2 * 2 * 4096 + 8  # normalised inputs, what the two column layers read, statistics
        + 2 * (4096 + 2 * 1024) + 2 * (4096 + 1024)  # the projection that v is part of; rotated q and k
        + 2 * 4096 + 4 * 32  # attention output and its statistics
        + 3 * 2 * 10880
    )  # fmt: skip
    assert sum(found.values()) == by_hand


def test_7_working_set_of_recomputation() -> None:
    run = job(LLAMA8, seq=8192, recompute=RecomputePlan("full", "uniform", 1))
    found = activations(shape_of(run), 32, "full", "uniform", 1)
    assert found.kept == 2_147_483_648
    others = (12 * 4096 + 4 * 1024 + 6 * 14336 + 4 * 32) * 8192  # what the case's implementation keeps
    assert others == 1_141_899_264
    # ours keeps the norms' input normalised and the projection that v is a view of: 4 h + 2 (h + 2 kv) + 8 bytes more
    # for the layer's own input and residual (4 h), 2 h + 2 kv a token in all
    assert found.working_set == others + (2 * 4096 + 2 * 1024 + 8) * 8192 == sum(kept_by_layer(shape_of(run)).values())
    assert stage_memory(run, 0, H100).recompute == found.working_set
    groups = activations(shape_of(run), 32, "full", "uniform", 4)
    assert (groups.kept, groups.working_set) == (2_147_483_648 // 4, 4 * found.working_set)


def test_8_buckets_of_the_engine() -> None:
    run = job(LLAMA8, dp=4, zero=3, offload=1.0, buckets=(("stage3_prefetch_bucket_size", 10**7),))
    m = stage_memory(run, 0, H100)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
    assert m.buffers["reduce bucket"] == 4 * 500_000_000
    assert m.buffers["gathered parameters"] == 2 * min(2 * max(layer, 128256 * 4096) + 10**7, 1_000_000_000)
    assert m.master_weights == m.moments == 0 and host_at_load(run) > 12 * run.elements(0)
    small = stage_memory(replace(run, buckets=(("reduce_bucket_size", 10**6),)), 0, H100)
    assert small.buffers["reduce bucket"] == 4 * 10**6
    same = [stage_memory(replace(run, layout=ParallelLayout(dp=d)), 0, H100).buffers["reduce bucket"] for d in (2, 64)]
    assert same[0] == same[1]  # fixed size, whatever the ranks


def test_9_communicators_and_context_outside_the_allocator() -> None:
    run = job(model(64, 192, 2, 1, 4, 1000, tied=True), tp=2, pp=2, dp=2, m=2)
    assert groups_of(run) == {"world": 8, "tp": 2, "pp": 2, "dp": 2, "embedding": 2}
    m = stage_memory(run, 0, H100)
    assert m.outside == {"context": H100.context_bytes, "communicators": 5 * H100.communicator_bytes}
    assert m.driver == m.reserved + sum(m.outside.values()) and m.allocated < H100.communicator_bytes
    tight = replace(H100, memory_gib=(m.driver + 1) / 2**30)
    assert not stage_memory(run, 0, tight).fits and stage_memory(run, 0, replace(tight, headroom=0.0)).fits


def test_10_which_reading() -> None:
    m = stage_memory(job(LLAMA8, dp=8), 0, H100)
    assert m.allocated == m.peaks[m.peak_at] == max(m.peaks.values())
    assert m.allocated < m.reserved < m.driver
    assert {"load", "optimizer_creation", "step", "optimizer_step"} == set(m.peaks)


def test_11_bubble_and_conventions() -> None:
    assert papers.bubble_over_ideal(16, 16) == 15 / 16
    assert papers.bubble_over_ideal(16, 16, 8) == 15 / 128
    spec = model(64, 192, 2, 1, 128, 1000)
    for chunks, kind in ((1, "1f1b"), (8, "interleaved")):
        times = job(spec, m=16, pp=16, kind=kind, chunks=chunks).times
        assert times.bubble / (1 - times.bubble) == pytest.approx(15 / (16 * chunks))
    for seq, ratio in ((8192, 1.04), (131072, 1.40)):
        assert per_token(LLAMA405, seq, "full") / per_token(LLAMA405, seq, "causal") == pytest.approx(ratio, abs=0.005)
    found = flops(job(LLAMA8, seq=8192))
    assert found.attention == "causal" and set(found.per_token) == {"causal", "full", "counter", "hardware"}
    wide = per_token(LLAMA405, 8192, "causal")
    doubled = per_token(replace(LLAMA405, num_key_value_heads=16), 8192, "causal")
    assert 100 * (doubled / wide - 1) == pytest.approx(0.97, abs=0.2)


KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)]


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_a_long_step_is_played_as_its_program(kind: str, chunks: int) -> None:
    """The short form that is played through and continued equals the whole program."""
    for pp in (2, 3, 4):
        schedule = Schedule(kind, pp, chunks)  # type: ignore[arg-type]
        for m in (4 * pp + 1, 5 * pp, 7 * pp + pp - 1):
            if kind == "interleaved" and m % pp:
                continue
            whole, found = timeline(schedule, m, UNIT), played(schedule, m)
            assert (found.makespan, found.live) == (whole.makespan, tuple(whole.live)), (pp, m)
            assert found.bubble == pytest.approx(whole.bubble), (pp, m)
            assert found.idle_inside == tuple(whole.idle_inside), (pp, m)


def test_12_too_good_to_be_true() -> None:
    """GPT 6.7B on 8 A100 at 32,768 tokens, 16 sequences in 10.05 s: above the card's peak."""
    a100 = load_hardware("a100")
    gpt = model(4096, 4 * 4096 * 2 // 3, 32, 32, 32, 50304)
    assert of_measured(job(gpt, m=2, b=1, seq=32768, dp=8), a100, 10.05) > 1
    assert of_measured(job(gpt, m=2, b=1, seq=4096, dp=8), a100, 10.05) < 1


def test_13_uneven_stages() -> None:
    spec = model(2048, 4096, 16, 16, 24, 50257, tied=True)
    run = job(spec, pp=8, stages=(4, 3, 3, 3, 3, 3, 3, 2))
    assert run.elements(0) == 4 * 41_947_136 + 102_926_336
    found = states(run, 0)
    total = found.weights + found.gradients + found.master + found.moments
    assert total == 4_872_867_840
    assert 4_946_437_079 / total == pytest.approx(1.015, abs=0.001)


def test_both_ends_of_a_tied_model_on_one_rank_are_one_matrix() -> None:
    spec = model(64, 192, 2, 1, 4, 1000, head_dim=32, tied=True)
    run = job(spec, m=4, pp=2, kind="zbv", chunks=2, stages=(1, 1, 1, 1))
    layer = 12 * 64**2 + 2 * 64
    assert [run.elements(r) for r in range(2)] == [2 * layer + 64 * 1000 + 64, 2 * layer]


def test_members_on_a_node_share_its_cards() -> None:
    """A tp group of 16 on two nodes: each byte leaves its node through one of 8 cards; dp beside tp 8: of one."""
    run = replace(job(model(2048, 4096, 16, 16, 24, 50257), tp=16, dp=2), node=8)
    assert (across(run, "tp"), inside(run, "tp"), inside(replace(run, layout=ParallelLayout(tp=8, dp=4)), "dp")) == (
        True,
        8,
        1,
    )
    network, link = 50e9 * 0.9, 450e9 * 0.65
    assert H100.wire_seconds(1e9, 0, True, 1) == pytest.approx(1e9 / network)
    assert H100.wire_seconds(1e9, 0, True, 4) == pytest.approx(1e9 / 4 / network)
    assert H100.wire_seconds(1e9, 0, True, 8) == pytest.approx(1e9 / link)  # the links are the narrower ones then
    assert H100.wire_seconds(1e9, 0, False) == pytest.approx(1e9 / link)


def test_megatron_pull_482_traffic() -> None:
    """32 layers, h 4096, s 2048, b 4, 32 micro-batches, tp 2, pp 2, dp 4, no SP: operations and sums of the example."""
    run = job(model(4096, 10880, 32, 32, 32, 50304), m=32, b=4, seq=2048, tp=2, pp=2, dp=4)
    layers = layer_traffic(run).tp_forward + layer_traffic(run).tp_backward
    each = layers.times(16 * 32)
    assert each.calls == 2048 and each.payload == 2048 * 64 * 2**20 and each.sent == each.payload  # 2(t-1)/t = 1
    found = stage_traffic(run, 0)
    assert found["pp"].calls == 2 * 32 and found["pp"].payload == 2 * 32 * 64 * 2**20
    assert 2 * found["pp"].calls == 128  # the example counts each transfer as a send and as a receive
    assert 16 * each.calls == 32_768


def test_price_is_whole_and_quick() -> None:
    found = price(job(LLAMA405, m=16, seq=8192, tp=8, pp=16, dp=128, sp=True), H100)
    assert set(found.traffic[0]) == {"tp", "cp", "pp", "dp"} and found.time.total > 0
