"""Writes a LoRA adapter of a shape, as PEFT saves them, with random numbers that change texts a little.

python write_adapter.py SHAPE DIRECTORY RANK SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.gpu_bench.models import SHAPES

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Entry of the program."""
    shape, directory, rank, seed = SHAPES[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors().items():
        module = name.removesuffix(".weight")
        if module.endswith(MODULES):
            height, width = size
            down, up = torch.randn(rank, width) * width**-0.5, torch.randn(height, rank) * 0.02
            tensors[f"base_model.model.{module}.lora_A.weight"] = down.bfloat16()
            tensors[f"base_model.model.{module}.lora_B.weight"] = up.bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main()
