"""What a training run changes and saves: optimizers with their schedule, and one safetensors file that is replaced by a
rename, with lines of metrics beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trtrun.errors import CheckpointError, RustLibrary, wrap_errors
from trtrun.files import put_in_place
from trtrun.tools.training.settings import TrainingSettings

_LIBRARY = RustLibrary("safetensors")

FOLDER = "training"
"""Below the output directory: runtimes read only what lies in that itself."""


@dataclass(frozen=True)
class SavedState:
    """A run at the end of a step.

    Attributes:
        step: steps that are done.
        settings: of the run, with what else must not change.
        model: parameters by name.
        optimizers: their state by name.
    """

    step: int
    settings: dict[str, Any]
    model: dict[str, torch.Tensor]
    optimizers: dict[str, torch.Tensor]


class StateFile:
    """The checkpoint of a run and its metrics.

    Args:
        output: the run's output directory.
    """

    def __init__(self, output: Path) -> None:
        self.folder = output / FOLDER
        self.path = self.folder / "state.safetensors"
        self.metrics_path = self.folder / "metrics.jsonl"
        self.result_path = self.folder / "result.json"
        self._finished_path = self.folder / "settings.json"

    def save(self, state: SavedState) -> None:
        """Replace the file in one step: at any moment it is the old one or the new one, as a whole."""
        tensors = {f"model.{name}": value for name, value in state.model.items()}
        tensors |= {f"optimizers.{name}": value for name, value in state.optimizers.items()}
        whole = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        settings = json.dumps(state.settings, sort_keys=True)
        with _LIBRARY:
            save_file(whole, temporary, {"step": str(state.step), "settings": settings})
        put_in_place(temporary, self.path)

    def load(self) -> SavedState | None:
        """What was saved last; None where nothing was.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.path.exists():
            return None
        with wrap_errors(self.path, CheckpointError), _LIBRARY, safe_open(self.path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            parts = {
                part: {name[len(part) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{part}.")}
                for part in ("model", "optimizers")
            }
            return SavedState(
                int(metadata["step"]), json.loads(metadata["settings"]), parts["model"], parts["optimizers"]
            )

    def finish(self, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep the result of a run that is done, and what it was a run of, in place of the checkpoint."""
        for path, values in ((self._finished_path, settings), (self.result_path, result)):
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
            put_in_place(temporary, path)
        self.path.unlink(missing_ok=True)

    def finished_settings(self) -> dict[str, Any] | None:
        """What `finish` kept of a run that is done; None where there is none, or it is not known.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.result_path.exists() or not self._finished_path.exists():
            return None
        with wrap_errors(self._finished_path, CheckpointError):
            found = dict(json.loads(self._finished_path.read_text(encoding="utf-8")))
            if not isinstance(json.loads(found.get("settings", "null")), dict):
                raise ValueError("it says nothing of the settings")
            return found

    def keep_metrics(self, step: int) -> list[dict[str, Any]]:
        """Forget metrics of steps behind `step`, which are to come again; returns the others."""
        lines = self.read_metrics()
        kept = [line for line in lines if line["step"] <= step]
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.metrics_path.with_suffix(".new")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        put_in_place(temporary, self.metrics_path)
        return kept

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Write one line."""
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines that were written whole."""
        if not self.metrics_path.exists():
            return []
        found = []
        for text in self.metrics_path.read_text(encoding="utf-8").split("\n"):
            try:
                found.append(dict(json.loads(text)))
            except ValueError:  # of a run that was killed while it wrote, and the end of the file
                continue
        return found


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
