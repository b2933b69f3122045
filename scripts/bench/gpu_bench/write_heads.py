"""Writes made-up heads for a target's directory: `write_heads.py TARGET KIND=DIRECTORY…`.

Kinds are medusa (three heads with a matrix each), medusa-shared (three that the target's own matrix serves), eagle (the
reference's layout) and eagle3 (the reference's, for a quarter of the target's tokens). A program of its own, as
write_weights.py is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NUM_MEDUSA_HEADS = 3
Tensors = dict[str, torch.Tensor]


class Maker:
    """Makes tensors of random numbers, in the target's dtype, and says what its config.json says."""

    def __init__(self, target: Path) -> None:
        self.config: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
        self._dtype = getattr(torch, self.config["torch_dtype"])
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._generator = torch.Generator(self._device).manual_seed(7)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] for which outputs are about as large as inputs."""
        numbers = torch.randn((rows, columns), generator=self._generator, device=self._device)
        return (numbers * columns**-0.5).to(self._dtype).cpu()

    def ones(self, count: int) -> torch.Tensor:
        """The weight of a norm [count]."""
        return torch.ones(count, dtype=self._dtype)


def make_medusa(maker: Maker, *, has_matrices: bool) -> tuple[Tensors, dict[str, Any]]:
    """As FasterDecoding's trainer writes them."""
    hidden, vocabulary = maker.config["hidden_size"], maker.config["vocab_size"]
    tensors: Tensors = {}
    for head in range(NUM_MEDUSA_HEADS):
        tensors[f"{head}.0.linear.weight"] = maker.matrix(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros_like(tensors[f"{head}.0.linear.weight"][0])
        if has_matrices:
            tensors[f"{head}.1.weight"] = maker.matrix(vocabulary, hidden)
    # What stands behind the first two is for vLLM, which reads these files, too.
    sizes = {"hidden_size": hidden, "vocab_size": vocabulary, "torch_dtype": maker.config["torch_dtype"]}
    for_vllm = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
    return tensors, {"medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1, **sizes, **for_vllm}


def make_layer(maker: Maker, name: str, inputs: int) -> Tensors:
    """A decoder layer of the target's sizes whose attention reads so many numbers, without norms in front of it."""
    config = maker.config
    hidden, features = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"q_proj": (queries, inputs), "k_proj": (keys, inputs), "v_proj": (keys, inputs),
              "o_proj": (hidden, queries)}  # fmt: skip
    tensors = {f"{name}.self_attn.{matrix}.weight": maker.matrix(*shape) for matrix, shape in shapes.items()}
    for matrix in ("gate_proj", "up_proj"):
        tensors[f"{name}.mlp.{matrix}.weight"] = maker.matrix(features, hidden)
    tensors[f"{name}.mlp.down_proj.weight"] = maker.matrix(hidden, features)
    tensors[f"{name}.post_attention_layernorm.weight"] = maker.ones(hidden)
    return tensors


def make_eagle(maker: Maker) -> tuple[Tensors, dict[str, Any]]:
    """As EAGLE-1's trainer writes it."""
    hidden = maker.config["hidden_size"]
    tensors: Tensors = {"fc.weight": maker.matrix(hidden, 2 * hidden), **make_layer(maker, "layers.0", hidden)}
    return tensors, {**maker.config, "num_hidden_layers": 1, "bias": False}


def make_eagle3(maker: Maker) -> tuple[Tensors, dict[str, Any]]:
    """As the reference's trainer writes it."""
    hidden, vocabulary = maker.config["hidden_size"], maker.config["vocab_size"]
    num_tokens = vocabulary // 4
    tensors: Tensors = {
        "fc.weight": maker.matrix(hidden, 3 * hidden),
        "norm.weight": maker.ones(hidden),
        "lm_head.weight": maker.matrix(num_tokens, hidden),
        # Every fourth of the target's tokens.
        "d2t": 3 * torch.arange(num_tokens),
        "t2d": (torch.arange(vocabulary) % 4 == 0) & (torch.arange(vocabulary) < 4 * num_tokens),
        **make_layer(maker, "midlayer", 2 * hidden),
        "midlayer.input_layernorm.weight": maker.ones(hidden),
        "midlayer.hidden_norm.weight": maker.ones(hidden),
    }
    values = {**maker.config, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return tensors, {**values, "draft_vocab_size": num_tokens}


KINDS: dict[str, Callable[[Maker], tuple[Tensors, dict[str, Any]]]] = {
    "medusa": lambda maker: make_medusa(maker, has_matrices=True),
    "medusa-shared": lambda maker: make_medusa(maker, has_matrices=False),
    "eagle": make_eagle,
    "eagle3": make_eagle3,
}


def main() -> None:
    """Entry of the program."""
    maker = Maker(Path(sys.argv[1]))
    for word in sys.argv[2:]:
        kind, _, name = word.partition("=")
        folder = Path(name)
        tensors, values = KINDS[kind](maker)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main()
