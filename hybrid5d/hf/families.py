"""The model families we train, one row each: what transformers' own class does with a config.json. Pure.

Source: transformers 5.24, `models/{llama,mistral,qwen2,qwen3}/{configuration,modeling}_*.py`; tests/hf/test_families.py
compares every row with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LAYER_TYPES = {"full_attention": False, "sliding_attention": True, "attention": False}  # the last: an older name
MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TEXT_PARTS = ("text_config", "llm_config", "language_config")  # names of the language model in a multimodal config
DROPOUTS = (
    "attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout",
    "residual_dropout_prob", "embedding_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip
# Keys of other architectures: with another value than these, the network is not the one that its model_type names.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "logit_softcap", "per_layer_config", "no_rope_layers",
         "attention_chunk_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
         "qk_norm", "use_qk_norm", "qk_layernorm", "query_pre_attn_scalar", "alibi", "use_alibi", "rope_interleaved",
         "clip_qkv", "cross_attention_layers", "mlp_layer_types", "add_cross_attention", "is_encoder_decoder",
         "parallel_attn", "use_parallel_residual", "num_nextn_predict_layers", "attention_sinks",
         "block_sparse", "mamba_d_state", "ssm_cfg", "num_kv_shared_layers", "hidden_size_per_layer_input"),
        (None, False, 0, [], {}),
    ),
    **dict.fromkeys(
        ("logit_scale", "logits_scaling", "attention_multiplier", "residual_multiplier", "embedding_multiplier",
         "scale_emb", "scale_depth", "partial_rotary_factor", "rotary_pct", "rope_percentage", "embedding_scale"),
        (None, 1),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How one `model_type` reads its config.json.

    Attributes:
        architecture: class of its causal language model in transformers.
        max_positions, kv_heads, head_dim, window: values where the key is absent; kv_heads None = as many as query
            heads, head_dim None = hidden_size // heads.
        windows: who sees a sliding window: `none`; `all` layers, where sliding_window is not null; `layers` from
            max_window_layers on, and only with use_sliding_window. layer_types, where it is there, names them instead
            (for mistral because AutoConfig then takes the Ministral class).
        qkv_bias, out_bias: bias of the projections; None = as attention_bias says.
        mlp_bias: whether the key mlp_bias is read.
        qk_norm: per-head norms of queries and keys.
        even_heads: hidden_size must be a multiple of the number of heads, head_dim given or not.
        bos, eos: special tokens where the keys are absent.
    """

    name: str
    architecture: str
    max_positions: int
    windows: Literal["none", "all", "layers"] = "none"
    window: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    even_heads: bool = False
    bos: int | None = None
    eos: int | None = None
    reads: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        windows = {"none": (), "all": ("sliding_window", "layer_types"), "layers": LAYER_KEYS}[self.windows]
        biases = ("attention_bias",) * (self.qkv_bias is None) + ("mlp_bias",) * self.mlp_bias
        object.__setattr__(self, "reads", frozenset((*windows, *biases)))

    def unread(self, text: Mapping[str, Any]) -> Iterator[str]:
        """Keys of a config that mean something in other families and nothing in this one."""
        for name in (*LAYER_KEYS, "attention_bias", "mlp_bias"):
            if name not in self.reads and text.get(name):
                yield name

    def sliding(self, text: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """(window, per layer whether it has it); an empty tuple = all layers. `text` has valid values."""
        window = text.get("sliding_window", self.window)
        off = self.windows == "layers" and not text.get("use_sliding_window")
        if self.windows == "none" or window is None or off:
            return None, ()
        if text.get("layer_types") is not None:
            return window, tuple(LAYER_TYPES[t] for t in text["layer_types"])
        if self.windows == "all":
            return window, ()
        first = text.get("max_window_layers", 28)
        return window, tuple(i >= first for i in range(layers))


LAYER_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", 2048, mlp_bias=True, even_heads=True, bos=1, eos=2),
        Family(
            "mistral", "MistralForCausalLM", 131072, "all", 4096, kv_heads=8, qkv_bias=False, out_bias=False,
            bos=1, eos=2,
        ),
        Family("qwen2", "Qwen2ForCausalLM", 32768, "layers", 4096, kv_heads=32, qkv_bias=True, out_bias=False),
        Family("qwen3", "Qwen3ForCausalLM", 32768, "layers", 4096, kv_heads=32, head_dim=128, qk_norm=True),
    )
}  # fmt: skip


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config, with the outer keys that it leaves out; else the config."""
    inner: dict[str, Any] = next((config[name] for name in TEXT_PARTS if isinstance(config.get(name), dict)), {})
    return {**config, **inner}


def is_moe(config: Mapping[str, Any]) -> bool:
    """True where an HF config describes a mixture of experts."""
    text = text_part(config)
    many = (text.get(name) for name in MOE_KEYS)
    return "moe" in str(config.get("model_type", "")) or any(isinstance(n, int) and n > 1 for n in many)


def is_vision(config: Mapping[str, Any]) -> bool:
    """True for the HF config of a vision-language model."""
    words = str(config.get("model_type", "")).lower().replace("-", "_").split("_")
    return "vision_config" in config or "vl" in words
