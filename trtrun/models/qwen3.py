"""Qwen3ForCausalLM: queries and keys normalised per head, and a head size of its own."""

from __future__ import annotations

from trtrun.models.config import ModelFamily, attention_bias, windows_by_layer_type
from trtrun.registry import MODEL_FAMILIES

QWEN3 = MODEL_FAMILIES.register("Qwen3ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        sliding_windows=windows_by_layer_type,
    )
)
