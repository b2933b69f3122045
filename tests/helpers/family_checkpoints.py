"""Tiny checkpoints of families as transformers writes them, with weights that make texts depend on their context."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_DELTA_NET = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-3,  # else what heads read is scaled up from next to nothing, noise and all
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_LATENTS = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
_KINDS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "sliding_window": 7,
        "final_logit_softcapping": 20.0,
        "attn_logit_softcapping": 2.0,
    },
    "apertus": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "gemma3_text": {
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "sliding_window": 7,
        "final_logit_softcapping": 30.0,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "deepseek_v2": {
        **_LATENTS,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **_LATENTS,
        "q_lora_rank": 36,
        "attention_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.6,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma4_text": {
        "head_dim": 24,
        "global_head_dim": 40,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 7,
        "final_logit_softcapping": 30.0,
        "layer_types": [*_KINDS, "full_attention"],
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    "gemma4_small": {
        "head_dim": 16,
        "global_head_dim": 40,
        "sliding_window": 7,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 209,
        "layer_types": [*_KINDS[:3], *_KINDS[:2]],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "ernie4_5": {"head_dim": 24, "use_bias": True},
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "glm4_moe": {
        "num_hidden_layers": 3,
        "head_dim": 24,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "glm4_moe_lite": {
        **_LATENTS,
        "q_lora_rank": 36,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 5,
        "n_shared_experts": 2,
    },
    "gpt_oss": {
        "head_dim": 24,
        "sliding_window": 7,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "minimax_m2": {
        "head_dim": 24,
        "intermediate_size": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "hy_v3": {
        "num_hidden_layers": 3,
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 20,
        "router_scaling_factor": 1.7,
        "attention_bias": True,
    },
    "ernie4_5_moe": {
        "num_hidden_layers": 4,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 20,
        "moe_layer_interval": 2,
    },
    "ministral3": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral": {"head_dim": 24, "sliding_window": None},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen2_moe": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "olmo2": {"attention_bias": True},
    "olmoe": {"intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
    "olmo3": {
        "sliding_window": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default"},
        },
    },
    "phi3": {
        "sliding_window": 9,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
            "attention_factor": 1.2,
        },
    },
    "qwen3_next": {
        "head_dim": 24,
        **_DELTA_NET,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "qwen3_5_text": {
        "head_dim": 32,
        **_DELTA_NET,
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    "qwen3_5_moe_text": {
        "head_dim": 16,
        **_DELTA_NET,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "seed_oss": {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0, 0], "use_sliding_window": True, "sliding_window": 6},
}
"""By model_type, what of its config.json is not in COMMON."""

_MODEL_TYPES = {"gemma4_small": "gemma4_text"}
"""Model types of FAMILIES that have several shapes."""

NESTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"final_logit_softcapping": None},  # which transformers leaves out there
        {
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "boi_token_index": 200,
            "eoi_token_index": 201,
            "image_token_index": 202,
        },
    ),
    "gemma4": (
        "gemma4_small",
        {"pad_token_id": 0},
        {"vision_config": {**_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}},
    ),
    "qwen3_5": ("qwen3_5_text", {}, {"vision_config": _QWEN_VISION}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}, {"vision_config": _QWEN_VISION}),
}
"""By model_type of architectures of several models, the model_type of the one for text, what is different in it there,
and what stands beside it."""


def write_family(
    path: Path,
    model_type: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    old_names: bool = True,
    **values: Any,
) -> Path:
    """Write config.json and random weights to `path`; returns `path`.

    Args:
        path: a directory.
        model_type: of FAMILIES or NESTED.
        seed, dtype: of the weights.
        old_names: whether tensors are called as in files of transformers 4; else as they are in memory.
        values: of the text model's config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text_type, own, beside = NESTED.get(model_type, (model_type, {}, {}))
    text = {**COMMON, **FAMILIES[text_type], **own, **values}
    if model_type in NESTED:
        tied = text["tie_word_embeddings"]
        text["model_type"] = _MODEL_TYPES.get(text_type, text_type)
        config = AutoConfig.for_model(model_type, text_config=text, tie_word_embeddings=tied, **beside)
    else:
        config = AutoConfig.for_model(_MODEL_TYPES.get(model_type, model_type), **text)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = AutoModelForImageTextToText if model_type in NESTED else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                made = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(made * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.mul_(0.7 + 0.5 * torch.rand(1, generator=generator))
        if not config.tie_word_embeddings:
            embedding = model.get_input_embeddings().weight
            embedding.copy_(torch.randn(embedding.shape, generator=generator))
    model.to(dtype).save_pretrained(path, save_original_format=old_names)
    return path


if __name__ == "__main__":
    for name in (*FAMILIES, *NESTED):
        print(write_family(Path(sys.argv[1]) / name, name, seed=3, dtype=torch.bfloat16))
