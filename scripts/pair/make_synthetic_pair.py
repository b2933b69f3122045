"""Write a synthetic Llama pair for benchmarks: random weights, every layer computed, and a draft that is often right.

The draft is the target's first layers. The target's later layers are damped by `--damping`, so that they change the
residual stream little and both models agree most of the time, at the cost of a full target. Both have a made-up
tokenizer (synthetic_tokenizer.py). The text such a pair writes means nothing.

    python scripts/pair/make_synthetic_pair.py build/pair-300m --preset 300m
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.gpu_bench.models import Shape, write_config
from scripts.pair.synthetic_tokenizer import make_tokenizer

PRESETS = {
    "tiny": Shape(128, 344, 6, 8, 4, 1003),
    "300m": Shape(1024, 4096, 16, 16, 8, 16384),
    "1b": Shape(2048, 8192, 16, 32, 8, 32000),
}
MAX_POSITIONS = 4096
SHARD_BYTES = 500_000_000
DEVIATION = 0.02
"""Of random weights; what Llama begins its training with."""

FACTORS = {"embed_tokens": 50.0, "lm_head": 4.0, "q_proj": 2.0, "k_proj": 2.0}
"""So that embeddings have unit scale, and the context matters."""

FIRST_LAYERS_FACTOR = 4.0
"""Of what the layers that the draft has, too, add to the residual stream: they decide."""


def make_weight(name: str, size: tuple[int, ...], draft_layers: int, damping: float) -> torch.Tensor:
    """One tensor, float32."""
    if len(size) == 1:  # of a norm
        return torch.ones(size)
    *_, kind, _ = name.split(".")
    factor = FACTORS.get(kind, 1.0)
    if kind in ("o_proj", "down_proj"):
        factor = FIRST_LAYERS_FACTOR if int(name.split(".")[2]) < draft_layers else damping
    return torch.randn(size) * (DEVIATION * factor)


def write_model(path: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
    """A model directory: config.json, tokenizer.json, and what of `weights` the shape has, some 500 MB a file."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(path, shape, MAX_POSITIONS)
    # Random text would end at random: no token ends it.
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}), encoding="utf-8")
    make_tokenizer(shape.vocabulary).save(str(path / "tokenizer.json"))
    shards = list(_shards((name, weights[name]) for name in shape.tensors()))
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    size = sum(weights[name].nbytes for name in places)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(item.nbytes for item in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


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
    target = replace(PRESETS[options.preset], dtype=options.dtype)
    draft = replace(target, layers=options.draft_layers)
    weights = {
        name: make_weight(name, size, options.draft_layers, options.damping).to(getattr(torch, options.dtype))
        for name, size in target.tensors().items()
    }
    sizes = {}
    for name, shape in (("target", target), ("draft", draft)):
        write_model(options.out / name, shape, weights)
        sizes[name] = sum(weights[tensor].numel() for tensor in shape.tensors())
    print(json.dumps({"parameters": sizes, "out": str(options.out)}))


if __name__ == "__main__":
    main()
