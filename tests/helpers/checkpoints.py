"""Makes tiny random checkpoints of every architecture, in Hugging Face layout, without transformers.

Tests of all layers use it: `make_checkpoint(tmp_path / "target", "LlamaForCausalLM", num_hidden_layers=3)`. Weights are
scaled so that greedy texts depend on the context and top logits lie well apart; equal seeds give equal files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_MODEL_TYPES = dict(zip(ARCHITECTURES, ("llama", "mistral", "qwen2", "qwen3"), strict=True))
_COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"sliding_window": None},
    "Qwen2ForCausalLM": {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
    "Qwen3ForCausalLM": {
        "use_sliding_window": False,
        "sliding_window": 32,
        "max_window_layers": 1,
        "head_dim": 24,
        "attention_bias": False,
    },
}


def make_checkpoint(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_shards: int = 1,
    transformers_4: bool = False,
    scale: float = 1.0,
    rope: dict[str, Any] | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json and random weights to `path`; returns `path`.

    Args:
        path: directory, made if it is not there.
        architecture: one of ARCHITECTURES.
        dtype: of the weights and in config.json.
        seed: of the weights.
        num_shards: files; more than one come with an index.
        transformers_4: write torch_dtype, rope_theta and rope_scaling as transformers 4 did, not as 5 does.
        scale: multiplies the output head, so that sampling at temperature 1 is less or more random.
        rope: rope parameters such as {"rope_type": "linear", "factor": 2.0}; rope_theta is 10000 unless given.
        tokenizer: also write a byte-level tokenizer (see `make_tokenizer`); vocab_size is then at least 260.
        overrides: values of config.json; None stays null.
    """
    config = {**_COMMON, **_SPECIAL[architecture], **overrides}
    if tokenizer and "vocab_size" not in overrides:
        config["vocab_size"] = 260
    config |= {"architectures": [architecture], "model_type": _MODEL_TYPES[architecture]}
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
    dtype_name = str(dtype).removeprefix("torch.")
    if transformers_4:
        theta = parameters.pop("rope_theta")
        scaling = None if parameters["rope_type"] == "default" else parameters
        config |= {"torch_dtype": dtype_name, "rope_theta": theta, "rope_scaling": scaling}
    else:
        config |= {"dtype": dtype_name, "rope_parameters": parameters}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False, **generation}), encoding="utf-8")
    save_weights(path, random_weights(config, dtype, seed, scale), num_shards)
    if tokenizer:
        make_tokenizer(path)
    return path


def random_weights(config: dict[str, Any], dtype: torch.dtype, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Random weights by checkpoint name, drawn in float32 and rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    hidden, features, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"] or config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    architecture = config["architectures"][0]
    qkv_bias = architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias"))
    weights: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, deviation: float) -> None:
        weights[name] = (torch.randn(shape, generator=generator) * deviation).to(dtype)

    def norm(name: str, size: int) -> None:
        weights[name] = (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        normal(f"{name}.weight", rows, columns, deviation=1.5 * columns**-0.5)
        if bias:
            normal(f"{name}.bias", rows, deviation=0.2)

    # A tied embedding of unit scale would drown the layers and repeat the last token for ever.
    deviation = 2.0 * hidden**-0.5 if config["tie_word_embeddings"] else 1.0
    normal("model.embed_tokens.weight", config["vocab_size"], hidden, deviation=deviation)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        norm(f"{prefix}input_layernorm.weight", hidden)
        linear(f"{prefix}self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
        linear(f"{prefix}self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{prefix}self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{prefix}self_attn.o_proj", hidden, heads * head_dim, bool(config.get("attention_bias")))
        if architecture == "Qwen3ForCausalLM":
            norm(f"{prefix}self_attn.q_norm.weight", head_dim)
            norm(f"{prefix}self_attn.k_norm.weight", head_dim)
        norm(f"{prefix}post_attention_layernorm.weight", hidden)
        mlp_bias = bool(config.get("mlp_bias"))
        linear(f"{prefix}mlp.gate_proj", features, hidden, mlp_bias)
        linear(f"{prefix}mlp.up_proj", features, hidden, mlp_bias)
        linear(f"{prefix}mlp.down_proj", hidden, features, mlp_bias)
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        normal("lm_head.weight", config["vocab_size"], hidden, deviation=scale * 2.0 * hidden**-0.5)
    return weights


def save_weights(path: Path, weights: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Write `weights` as model.safetensors, or spread over `num_shards` files with an index."""
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(weights, path / "model.safetensors", metadata)
        return
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {
            key: value for at, (key, value) in enumerate(weights.items()) if at * num_shards // len(weights) == shard
        }
        save_file(part, path / name, metadata)
        weight_map |= dict.fromkeys(part, name)
    size = sum(value.numel() * value.element_size() for value in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def make_draft(path: Path, target: Path, num_layers: int) -> Path:
    """Write a draft made of the first `num_layers` layers of the checkpoint `target`, which agrees with it at times."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        weights |= load_file(file)
    kept = {
        name: value
        for name, value in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_weights(path, kept)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (target / name).is_file():
            (path / name).write_bytes((target / name).read_bytes())
    return path


def overflow_on(path: Path, poison: int) -> None:
    """Have a checkpoint's keys and values of the first layer be infinite for one token: two hidden dimensions that only
    it has, and projections that overflow on them."""
    from safetensors.torch import load_file

    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][:, :2] = 0
    weights["model.embed_tokens.weight"][poison, :2] = 1
    for name, weight in weights.items():
        if name.endswith(("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight")):
            weight[:, :2] = 3e38
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:2] = 0
    save_weights(path, weights)


def make_tokenizer(path: Path, *, merges: int = 0, add_bos: bool = False, special: tuple[str, ...] = ()) -> None:
    """Write a byte-level BPE tokenizer.json and tokenizer_config.json that can spell any text.

    Token 0 is "<|endoftext|>", then `special`, then the 256 bytes, then `merges` pairs of letters.

    Args:
        path: the checkpoint directory.
        merges: how many merged tokens, such as "ab"; at most 26.
        add_bos: the post-processor puts "<|endoftext|>" in front of each text.
        special: more special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    names = ["<|endoftext|>", *special]
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(first, second) for first, second in zip(letters, letters[1:] + "a", strict=True)][:merges]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*names, *alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{names[0]} $A", special_tokens=[(names[0], 0)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[0], "model_max_length": 1024}
    if add_bos:
        settings["bos_token"] = names[0]
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
