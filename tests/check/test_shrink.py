"""The small run: what is kept of the user's, and that every layout of it is a legal run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.check.cuts import Degrees, parts, project
from hybrid5d.check.reference import hf_model
from hybrid5d.check.shrink import Small, cut_of, differences, shrink
from hybrid5d.config.schema import RunConfig
from hybrid5d.engine.build import sequence_options
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.run import build_plan
from tests.config_kit import config_of, write_model

LLAMA = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256,
         "num_hidden_layers": 80, "head_dim": 128, "tie_word_embeddings": False}  # fmt: skip


def small_run(folder: Path, world: int, model: dict[str, Any], ranks: int = 16, **keys: Any) -> Small:
    changes = {f"actor__model__{k}": v for k, v in keys.items()}
    path = str(write_model(folder / "m", **model))
    config = config_of(actor__model__model_path=path, actor__global_batch_size=64 * world, **changes)
    plan = build_plan(config, world, "translate")
    own = cut_of(plan)
    return shrink(plan, own if own.world <= ranks else project(own))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world", "keys", "small_heads"),
    [
        # tp 8 cuts 8 kv heads to one a rank; so does tp 2 of 2
        (64, 8, 8 * 4, {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}, (16, 2)),
        # fewer kv heads than tp: shared in the small run too
        (32, 2, 8 * 4, {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}, (16, 1)),
        # Ulysses over 4 with 2 kv heads a rank: the exchange repeats them
        (16, 4, 8, {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "cp_comm_type": "a2a"}, (8, 2)),
        (8, 8, 4, {"context_parallel_size": 4, "cp_comm_type": "a2a"}, (4, 4)),
    ],
)
def test_heads_keep_their_ratio_and_how_they_are_cut(
    tmp_path: Path, heads: int, kv_heads: int, world: int, keys: dict[str, Any], small_heads: tuple[int, int]
) -> None:
    model = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 128}
    spec = small_run(tmp_path, world, model, **keys).spec
    assert (spec.num_attention_heads, spec.num_key_value_heads) == small_heads
    assert spec.hidden_size == spec.num_attention_heads * spec.head_dim


def test_windows_ties_and_rope_are_kept(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
    model = {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4,
             "rope_scaling": rope, "pad_token_id": 258, "head_dim": None}  # fmt: skip
    small = small_run(tmp_path, 2, model, pipeline_model_parallel_size=2)
    spec, own = small.spec, small.plan.model
    assert own is not None
    assert [spec.window(i) for i in range(spec.num_layers)] == [None, None, 7, 7]
    assert spec.tie_word_embeddings and spec.rope == own.rope and spec.pad_token_id is not None
    assert spec.attention_bias and spec.vocab_size % 2


def test_uneven_stages_stay_uneven(tmp_path: Path) -> None:
    ends = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    small = small_run(tmp_path, 4, {"num_hidden_layers": 8}, pipeline_model_parallel_size=4, **ends)
    plan = build_plan(RunConfig.model_validate(small.tree(small.cut, "x")), 4, "translate")
    assert small.spec.num_layers == 8 and plan.config.actor.model.decoder_last_pipeline_num_layers == 3


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("method", ["p2p", "a2a", "all_gather"])
def test_every_part_is_a_legal_run_of_the_same_batch(tmp_path: Path, method: str, ranks: int) -> None:
    keys = {"tensor_model_parallel_size": 8, "context_parallel_size": 2, "pipeline_model_parallel_size": 4,
            "sequence_parallel": True, "cp_comm_type": method, "recompute_granularity": "full",
            "recompute_method": "block", "recompute_num_layers": 20}  # fmt: skip
    model = {**LLAMA, "num_attention_heads": 64, "num_key_value_heads": 8}
    small = small_run(tmp_path, 8 * 2 * 4 * 16, model, ranks, **keys)
    cuts = parts(small.cut, ranks)
    assert {a for cut in cuts for a in cut.axes} == {"tp", "sp", "cp", "pp", "dp"}
    assert all(cut.world <= ranks for cut in cuts)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(small.model))
    for cut in [*cuts, Degrees(ParallelLayout())]:
        plan = build_plan(RunConfig.model_validate(small.tree(cut, str(tmp_path))), cut.world, "translate")
        assert plan.layout == cut.layout and plan.batch.global_batch_size == small.rows
        assert plan.sequence_parallel == cut.sp


def test_a_hybrid_has_the_degrees_that_the_run_has_on_its_nodes(tmp_path: Path) -> None:
    """16 ranks on 4 nodes: the exchange stays inside a node of 4, as the engine's own default says."""
    path = str(write_model(tmp_path / "m", num_attention_heads=8, num_key_value_heads=8))
    config = config_of(
        actor__model__model_path=path, actor__model__context_parallel_size=8, actor__model__cp_comm_type="a2a+p2p",
        actor__global_batch_size=64, cluster__num_nodes=4,
    )  # fmt: skip
    plan = build_plan(config, 16, "translate")
    assert cut_of(plan).ulysses == sequence_options(plan).ulysses == 4


def test_what_is_smaller_is_said(tmp_path: Path) -> None:
    model = {"model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 8, "intermediate_size": 640}
    keys = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 6,
            "decoder_first_pipeline_num_layers": 2, "pipeline_model_parallel_size": 2}  # fmt: skip
    said = "\n".join(differences(small_run(tmp_path, 2, model, **keys)))
    for words in ("MLP 40 of 640", "window: 7 of 4096", "recompute_num_layers: 2 of 6",
                  "decoder_first_pipeline_num_layers: 1 of 2"):  # fmt: skip
        assert words in said, said
    assert "micro-batches" not in said


def test_a_hybrid_stays_one() -> None:
    wide = Degrees(ParallelLayout(cp=16, tp=8, dp=64), True, 4)
    assert project(wide) == Degrees(ParallelLayout(cp=4, tp=2, dp=2), True, 2)
    found = [str(cut) for cut in parts(project(wide), 8)]
    assert found == ["cp 4 x dp 2", "tp 2 + sp x dp 2", "tp 2 + sp x cp 4"]
    with pytest.raises(ValueError, match="cp needs 4 ranks"):
        parts(project(wide), 2)


def test_alternating_windows_of_mistral_are_read_as_transformers_reads_the_folder(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    model = {**LLAMA, "model_type": "mistral", "num_hidden_layers": 8, "num_attention_heads": 32, "layer_types": kinds,
             "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096}  # fmt: skip
    small = small_run(tmp_path, 2, model, pipeline_model_parallel_size=2)
    assert [small.spec.window(i) for i in range(4)] == [7, None, 7, None]
    config = hf_model(small.model).config
    assert config.model_type == "ministral" and config.layer_types == kinds[:4] and config.sliding_window == 7
