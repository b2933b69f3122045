"""Write a synthetic Llama pair for benchmarks: random weights, every layer computed, and a draft that is often right.

The draft is the target's first layers. The target's later layers are damped by `--damping`, so that they change the
residual stream little and both models agree most of the time, at the cost of a full target. Needs transformers (the
extra `test`). The text such a pair writes means nothing.

    python scripts/make_synthetic_pair.py build/pair-300m --preset 300m
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PRESETS = {
    "tiny": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 1003},
    "300m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 16384},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
SHARD_SIZE = "500MB"


def make_config(preset: str, layers: int | None = None) -> LlamaConfig:
    """The preset's configuration, with another number of layers for the draft."""
    sizes = dict(PRESETS[preset])
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    return LlamaConfig(
        **sizes,
        max_position_embeddings=4096,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )


@torch.no_grad()
def shape_weights(target: LlamaForCausalLM, draft_layers: int, damping: float) -> None:
    """Scale random weights so that the context matters, the first layers decide and the later ones add a little."""
    target.model.embed_tokens.weight.mul_(50.0)  # embeddings of unit scale
    target.lm_head.weight.mul_(4.0)
    for index, layer in enumerate(target.model.layers):
        layer.self_attn.q_proj.weight.mul_(2.0)
        layer.self_attn.k_proj.weight.mul_(2.0)
        factor = 4.0 if index < draft_layers else damping
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="directory; gets target/ and draft/")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="300m")
    parser.add_argument("--damping", type=float, default=0.05, help="of the target's later layers (default: 0.05)")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    target = LlamaForCausalLM(make_config(options.preset)).to(dtype)
    shape_weights(target, options.draft_layers, options.damping)
    draft = LlamaForCausalLM(make_config(options.preset, options.draft_layers)).to(dtype)
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    sizes = {}
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config.eos_token_id = None
        model.save_pretrained(options.out / name, max_shard_size=SHARD_SIZE)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": sizes, "out": str(options.out)}))


if __name__ == "__main__":
    main()
