"""Makes LoRA adapters as PEFT saves them, and checkpoints that they are merged into: W + scale * B @ A, by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def make_adapter(
    path: Path,
    target: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    modules: Sequence[str] = ALL,
    layers: Collection[int] | None = None,
    ranks: Callable[[str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; returns `path`.

    Args:
        path: directory, made if it is not there.
        target: checkpoint of the base.
        rank, alpha: lora_alpha and r.
        seed: of the weights, which are random.
        modules: names of modules that it changes.
        layers: that it changes; None for all.
        ranks: of a module, where they differ.
        dtype: of the tensors.
        strength: deviation of B.
        config: further keys of adapter_config.json, or others in the place of what these say; None leaves one out.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    base = {name: weight for file in sorted(target.glob("*.safetensors")) for name, weight in load_file(file).items()}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)) or (layers is not None and int(module.split(".")[2]) not in layers):
            continue
        own = rank if ranks is None else ranks(module)
        down = torch.randn(own, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        up = torch.randn(weight.shape[0], own, generator=generator) * strength
        tensors |= {f"{PREFIX}{module}.lora_A.weight": down.to(dtype), f"{PREFIX}{module}.lora_B.weight": up.to(dtype)}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somebody/base", "r": rank,
        "lora_alpha": alpha, "target_modules": list(modules), "lora_dropout": 0.05, "bias": "none",
        "inference_mode": True, "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "layers_to_transform": None if layers is None else sorted(layers), **config,
    }  # fmt: skip
    kept = {key: value for key, value in values.items() if value is not None}
    (path / "adapter_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return path


def merge_adapter(path: Path, target: Path, adapter: Path, scale: float | Callable[[str], float] | None = None) -> Path:
    """Write the checkpoint that `adapter` makes of `target`; returns `path`. `scale` is None for alpha / r, or what a
    module's product is multiplied by."""
    shutil.copytree(target, path)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    usual = config["lora_alpha"] / config["r"] if scale is None else scale
    weights, tensors = load_file(target / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        product = tensors[f"{PREFIX}{module}.lora_B.weight"].double() @ tensors[name].double()
        factor = usual(module) if callable(usual) else usual
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + factor * product).to(weight.dtype)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def rank_stabilized(rank: int, alpha: float) -> float:
    """The scale of rsLoRA."""
    return alpha / math.sqrt(rank)


def edit_adapter(path: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: Any) -> Path:
    """Change tensors, or keys of the configuration, where None takes one away; returns `path`."""
    if change is not None:
        tensors = load_file(path / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    values = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (path / "adapter_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return path
