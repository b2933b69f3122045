"""Model directories for benchmarks: the shapes of known models, as a config.json and a tokenizer.

That is enough for `load_format: dummy`; write_weights.py adds files with the same numbers, for programs that read
weights. It knows shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers

from scripts.bench.gpu_bench.family_configs import (
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    LATENTS,
    NEXT,
    NEXT_DENSE,
    STATES,
    STATES_AND_EXPERTS,
    TINY_GEMMA3,
    TINY_GEMMA4,
    TINY_GPT_OSS,
    TINY_LATENTS,
    TINY_STATES,
    TINY_STATES_AND_EXPERTS,
)

MOST_POSITIONS = 32768


class Experts(NamedTuple):
    """Of each layer: how many, how many of them a token chooses, and features of the gate of one."""

    count: int
    chosen: int
    features: int


@dataclass(frozen=True)
class Shape:
    """Of a Llama without biases and with an output head of its own, or of a Qwen3-MoE where it has `experts`; with
    `drafts_in_parallel` its last token is a mask token. Where it `repeats`, weights in files make texts of one token
    (write_weights.py): a draft is always right. Where it is `quantized`, its config.json says that its matrices are
    stored in 4 bits, in groups of 128. Of another family it `says` what its config.json has beside, or in place of what
    stands there; it has dummy weights alone."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 128256
    dtype: str = "bfloat16"
    drafts_in_parallel: bool = False
    repeats: bool = False
    quantized: bool = False
    experts: Experts | None = None
    head_size: int = 0
    says: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.head_size or self.hidden // self.heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, the layers in order; of experts those that a token of one row reads."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        if self.experts is not None:
            layer = {name: size for name, size in layer.items() if not name.startswith("mlp.")}
            layer["mlp.gate"] = (self.experts.count, self.hidden)
            for number in range(self.experts.chosen):
                wide = (self.experts.features, self.hidden)
                layer |= {f"mlp.experts.{number}.{name}_proj": wide for name in ("gate", "up")}
                layer[f"mlp.experts.{number}.down_proj"] = wide[::-1]
        ends: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "lm_head.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        return ends | {
            f"model.layers.{index}.{name}.weight": size for index in range(self.layers) for name, size in layer.items()
        }

    @property
    def read_numbers(self) -> int:
        """Numbers that a token of one row reads: all of the matrices but the embedding."""
        sizes = self.tensors()
        embedding = sizes.pop("model.embed_tokens.weight")
        assert len(embedding) == 2
        return sum(height * width for height, width in (size for size in sizes.values() if len(size) == 2))


@dataclass(frozen=True)
class Pair:
    """A target and its draft, by the names of their shapes, the draft_len that fits, and the pair that stands for it on
    CPU slots."""

    target: str
    draft: str
    draft_len: int
    tiny: str = "tiny"


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8),
    "8b-draft": Shape(4096, 14336, 4, 32, 8),
    "3b": Shape(3072, 8192, 28, 24, 8),
    "3b-draft": Shape(3072, 8192, 4, 24, 8),
    "8b-int4": Shape(4096, 14336, 32, 32, 8, quantized=True),
    "70b": Shape(8192, 28672, 80, 64, 8),
    "70b-int4": Shape(8192, 28672, 80, 64, 8, quantized=True),
    "1b": Shape(2048, 8192, 16, 32, 8),
    "1b-parallel": Shape(2048, 8192, 16, 32, 8, drafts_in_parallel=True),
    "30b-a3b": Shape(2048, 6144, 48, 32, 4, 151936, experts=Experts(128, 8, 768), head_size=128),
    "30b-a3b-draft": Shape(2048, 6144, 4, 32, 4, 151936, experts=Experts(128, 8, 768), head_size=128),
    "27b-states": Shape(5120, 17408, 64, 24, 4, 248320, head_size=256, says=STATES),
    "27b-states-draft": Shape(5120, 17408, 4, 24, 4, 248320, head_size=256, says=STATES),
    "27b-states-long": Shape(
        5120, 17408, 64, 24, 4, 248320, head_size=256, says=STATES | {"max_position_embeddings": 131072}
    ),
    "35b-a3b": Shape(2048, 512, 40, 16, 2, 248320, head_size=256, says=STATES_AND_EXPERTS),
    "35b-a3b-draft": Shape(2048, 512, 4, 16, 2, 248320, head_size=256, says=STATES_AND_EXPERTS),
    "27b-next": Shape(5120, 17408, 64, 48, 8, 248320, head_size=128, says=NEXT_DENSE),
    "35b-next": Shape(2048, 512, 40, 32, 4, 248320, head_size=128, says=NEXT),
    "gpt-oss-120b": Shape(2880, 2880, 36, 64, 8, 201088, head_size=64, says=GPT_OSS),
    "gpt-oss-120b-draft": Shape(2880, 2880, 4, 64, 8, 201088, head_size=64, says=GPT_OSS),
    "gpt-oss-20b": Shape(2880, 2880, 24, 64, 8, 201088, head_size=64, says=GPT_OSS | {"num_local_experts": 32}),
    "v2-lite": Shape(2048, 10944, 27, 16, 16, 102400, says=LATENTS),
    "v2-lite-draft": Shape(2048, 10944, 4, 16, 16, 102400, says=LATENTS),
    "gpt-oss-20b-draft": Shape(2880, 2880, 4, 64, 8, 201088, head_size=64, says=GPT_OSS | {"num_local_experts": 32}),
    "gemma3": Shape(3840, 15360, 12, 16, 8, 262144, head_size=256, says=GEMMA3),
    "gemma4": Shape(2816, 2112, 12, 16, 8, 262144, head_size=256, says=GEMMA4),
    "tiny-experts": Shape(128, 256, 4, 8, 4, 1003, "float32", experts=Experts(8, 2, 64)),
    "8b-repeating": Shape(4096, 14336, 32, 32, 8, repeats=True),
    "1b-repeating": Shape(2048, 8192, 16, 32, 8, drafts_in_parallel=True, repeats=True),
    "tiny-repeating": Shape(128, 256, 4, 8, 8, 1003, "float32", repeats=True),
    "tiny-draft-repeating": Shape(128, 256, 2, 8, 8, 1003, "float32", drafts_in_parallel=True, repeats=True),
    "tiny": Shape(128, 256, 4, 8, 8, 1003, "float32"),
    "tiny-int4": Shape(128, 256, 4, 8, 8, 1003, "float32", quantized=True),
    "tiny-draft": Shape(128, 256, 2, 8, 8, 1003, "float32"),
    "tiny-parallel": Shape(128, 256, 2, 8, 8, 1003, "float32", drafts_in_parallel=True),
    "tiny-states": Shape(128, 256, 4, 4, 2, 1003, "float32", head_size=32, says=TINY_STATES),
    "tiny-states-experts": Shape(128, 64, 4, 4, 2, 1003, "float32", head_size=32, says=TINY_STATES_AND_EXPERTS),
    "tiny-gpt-oss": Shape(128, 128, 4, 4, 2, 1003, head_size=32, says=TINY_GPT_OSS),
    "tiny-latents": Shape(128, 256, 4, 4, 4, 1003, "float32", says=TINY_LATENTS),
    "tiny-gemma3": Shape(128, 256, 4, 4, 2, 1003, "float32", head_size=16, says=TINY_GEMMA3),
    "tiny-gemma4": Shape(128, 256, 8, 4, 2, 1003, "float32", head_size=16, says=TINY_GEMMA4),
}
SHAPES |= {
    f"{name}-few": replace(SHAPES[name], layers=layers) for name, layers in (("27b-states", 12), ("35b-a3b", 12))
}
"""Of few layers, for comparisons of texts."""
SHAPES |= {
    f"{name}-draft": replace(SHAPES[name], layers=layers)
    for name, layers in (
        ("gemma3", 6), ("gemma4", 6), ("tiny-experts", 2), ("tiny-states", 2), ("tiny-states-experts", 2),
        ("tiny-gpt-oss", 2), ("tiny-latents", 2), ("tiny-gemma3", 2), ("tiny-gemma4", 6),
    )
}  # fmt: skip
PAIRS = {
    "8b": Pair("8b", "8b-draft", 5),
    "8b-int4": Pair("8b-int4", "8b-draft", 5, "tiny-int4"),
    "3b": Pair("3b", "3b-draft", 5),
    "30b-a3b": Pair("30b-a3b", "30b-a3b-draft", 5, "tiny-experts"),
    "27b-states": Pair("27b-states", "27b-states-draft", 3, "tiny-states"),
    "27b-states-long": Pair("27b-states-long", "27b-states-draft", 3, "tiny-states"),
    "35b-a3b": Pair("35b-a3b", "35b-a3b-draft", 3, "tiny-states-experts"),
    "27b-next": Pair("27b-next", "27b-states-draft", 3, "tiny-states"),
    "35b-next": Pair("35b-next", "35b-a3b-draft", 3, "tiny-states-experts"),
    "v2-lite": Pair("v2-lite", "v2-lite-draft", 5, "tiny-latents"),
    "gpt-oss-120b": Pair("gpt-oss-120b", "gpt-oss-120b-draft", 5, "tiny-gpt-oss"),
    "gpt-oss-20b": Pair("gpt-oss-20b", "gpt-oss-20b-draft", 5, "tiny-gpt-oss"),
    "27b-states-few": Pair("27b-states-few", "27b-states-draft", 3, "tiny-states"),
    "35b-a3b-few": Pair("35b-a3b-few", "35b-a3b-draft", 3, "tiny-states-experts"),
    "gemma3": Pair("gemma3", "gemma3-draft", 5, "tiny-gemma3"),
    "gemma4": Pair("gemma4", "gemma4-draft", 5, "tiny-gemma4"),
    "8b-1b": Pair("8b", "1b", 8),
    "8b-parallel": Pair("8b", "1b-parallel", 8, "tiny-parallel"),
    "8b-repeating": Pair("8b-repeating", "1b-repeating", 8, "tiny-repeating"),
    "70b": Pair("70b", "1b", 10),
    "70b-3b": Pair("70b", "3b", 10),
    "70b-8b": Pair("70b", "8b", 10),
    "large-int4": Pair("70b-int4", "1b", 10, "tiny-int4"),
    "70b-parallel": Pair("70b", "1b-parallel", 10, "tiny-parallel"),
    "1b": Pair("1b", "1b", 5),
    "tiny-parallel": Pair("tiny", "tiny-parallel", 4),
}
PAIRS |= {
    name: Pair(name, f"{name}-draft", 4)
    for name in (
        "tiny", "tiny-experts", "tiny-states", "tiny-states-experts", "tiny-gpt-oss", "tiny-latents", "tiny-gemma3",
        "tiny-gemma4",
    )
} | {
    "tiny-int4": Pair("tiny-int4", "tiny-draft", 4),
    "tiny-repeating": Pair("tiny-repeating", "tiny-draft-repeating", 4),
}  # fmt: skip
"""A draft of the target's first layers often agrees with it; the 1B-shaped one never does."""


def write_model(folder: Path, name: str) -> Path:
    """The directory of a shape in `folder`, made unless it is there: config.json, and a tokenizer of a word a token."""
    shape, path = SHAPES[name], folder / name
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    words = {f"t{index}": index for index in range(shape.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    write_config(path, shape, MOST_POSITIONS)
    return path


def write_config(path: Path, shape: Shape, max_positions: int) -> None:
    """The config.json of a shape, into its directory."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": max_positions,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": shape.dtype,
    }
    if shape.experts is not None:
        values |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
            "num_experts": shape.experts.count, "num_experts_per_tok": shape.experts.chosen,
            "moe_intermediate_size": shape.experts.features,
        }  # fmt: skip
    if shape.drafts_in_parallel:
        values |= {"pard_token": shape.vocabulary - 1, "spd_type": "pard"}
    if shape.quantized:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        values["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": groups,
        }  # fmt: skip
    (path / "config.json").write_text(json.dumps(values | shape.says), encoding="utf-8")
