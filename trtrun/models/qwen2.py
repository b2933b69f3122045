"""Qwen2ForCausalLM (Qwen2, Qwen2.5): biases on queries, keys and values; a sliding window on the later layers."""

from __future__ import annotations

from trtrun.models.config import ModelFamily, windows_by_layer_type
from trtrun.registry import MODEL_FAMILIES

QWEN2 = MODEL_FAMILIES.register("Qwen2ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qkv_bias=lambda values: True,
        o_bias=lambda values: False,
        sliding_windows=windows_by_layer_type,
    )
)
