"""What a killed training run leaves behind: one safetensors file that is replaced by a rename, and lines of metrics.

It knows tensors with names, settings and steps. It does not know what they are for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trtrun.errors import CheckpointError, RustLibrary, reading

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
        replace(temporary, self.path)

    def load(self) -> SavedState | None:
        """What was saved last; None where nothing was.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.path.exists():
            return None
        with reading(self.path, CheckpointError), _LIBRARY, safe_open(self.path, "pt") as file:
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
            replace(temporary, path)
        self.path.unlink(missing_ok=True)

    def finished_settings(self) -> dict[str, Any] | None:
        """What `finish` kept of a run that is done; None where there is none, or it is not known.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.result_path.exists() or not self._finished_path.exists():
            return None
        with reading(self._finished_path, CheckpointError):
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
        replace(temporary, self.metrics_path)
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


def replace(temporary: Path, path: Path) -> None:
    """Put a file that is written in the place of another, and on the disk before that."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
