"""Optimizers, their schedule, and their state as tensors with names. It knows parameters, not what is learned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trtrun.tools.training.settings import TrainingSettings

LEAST_RATE = 0.1
"""Share of the learning rate that is left at the last step."""

MUON_FACTOR = 2.0
"""Muon's rate beside AdamW's, with updates scaled to AdamW's size."""


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """What the learning rate is multiplied by at a step, counted from 0: a linear rise, then a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Optimizers:
    """One or two optimizers over all parameters of a model that are trained.

    Args:
        model: with float32 parameters.
        settings: which optimizers, at which rates.
    """

    def __init__(self, model: nn.Module, settings: TrainingSettings) -> None:
        named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        is_matrix = {name: value.ndim == 2 and "embed" not in name and "lm_head" not in name for name, value in named}
        by_muon = [value for name, value in named if is_matrix[name] and settings.optimizer == "muon"]
        taken = {id(value) for value in by_muon}
        decayed = [value for name, value in named if is_matrix[name] and id(value) not in taken]
        others = [value for name, value in named if not is_matrix[name]]
        rate, decay = settings.learning_rate, settings.weight_decay
        groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._optimizers: list[torch.optim.Optimizer] = []
        if groups:
            self._optimizers.append(torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95)))
        if by_muon:
            muon = torch.optim.Muon(by_muon, lr=MUON_FACTOR * rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
        self._rates = [group["lr"] for group in self._groups()]

    def step(self, factor: float) -> None:
        """Update all parameters with this factor of the learning rates, and forget the gradients."""
        for group, rate in zip(self._groups(), self._rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """All state: `optimizer.parameter.name` → tensor."""
        return {
            f"{index}.{parameter}.{name}": torch.as_tensor(value)
            for index, optimizer in enumerate(self._optimizers)
            for parameter, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `state` gave."""
        for index, optimizer in enumerate(self._optimizers):
            values: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in state.items():
                owner, parameter, name = key.split(".", 2)
                if int(owner) == index:
                    values.setdefault(int(parameter), {})[name] = value
            optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)
