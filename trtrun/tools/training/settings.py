"""What a training run was asked for. Plain data: it travels into checkpoints, and --resume compares it.

It knows no model and no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trtrun.errors import ConfigError, nearest

OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("float32", "bfloat16")
NOT_COMPARED = {"checkpoint_steps", "evaluation_steps", "micro_batch_size"}
"""Settings that change when something is done, and not what comes out but for rounding."""


@dataclass(frozen=True)
class TrainingSettings:
    """How a drafter is trained.

    Attributes:
        method: a name of the table in `trtrun.tools.training.methods`.
        num_tokens: tokens that the drafter is to propose in a round (K).
        steps: optimizer steps; 0 takes `epochs`.
        epochs: passes over the data, where `steps` and `minutes` are 0.
        minutes: time for the steps, measurements between them included; 0 counts steps. How many there are then depends
            on the machine, and so do the weights.
        batch_size: rows of a step, over all ranks.
        micro_batch_size: rows that a rank computes at once, at most.
        max_length: tokens of a row, at most; what is longer is cut off.
        learning_rate: after the warm-up; falls to a tenth by a cosine.
        warmup_steps: steps over which the learning rate rises.
        weight_decay: of matrices.
        clip_norm: most that the norm of all gradients may be.
        optimizer: `adamw`, or `muon` for the layers' matrices and AdamW for the rest.
        precision: of the arithmetic under autocast. Weights and optimizer states are float32.
        divergence: weight of the KL divergence from the target's distribution to the drafter's. With 0 the target is
            not run, unless the method reads its hidden states: the data holds its choices.
        cross_entropy: weight of the cross-entropy with the tokens of the data.
        depth_decay: each depth's loss counts by this factor less than that of the depth before.
        retention: share of a depth's places that the next depth keeps (PARD's r).
        least_retention: share of all places that every depth keeps at least (PARD's r_min).
        pard_token: the id that stands for tokens to be guessed; None takes that of the draft's config.json, or an id
            that its tokenizer leaves free.
        medusa_layers: residual blocks of each head (Medusa).
        draft_vocab_size: tokens that the drafter can propose, the commonest of the data (EAGLE-3); None takes all.
        eagle3_layers_to_capture: layers of the target whose output an EAGLE-3 head reads, from 0, and -1 for the
            embedding; None takes the usual ones.
        heldout_rows: rows of the data that are kept out of training, to measure acceptance.
        evaluation_steps: steps between two measurements.
        checkpoint_steps: steps between two checkpoints.
        seed: of the order of rows and of what is dropped.
    """

    method: str = "pard"
    num_tokens: int = 8
    steps: int = 0
    epochs: float = 2.0
    minutes: float = 0.0
    batch_size: int = 32
    micro_batch_size: int = 8
    max_length: int = 2048
    learning_rate: float = 3e-4
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    optimizer: str = "adamw"
    precision: str = "float32"
    divergence: float = 1.0
    cross_entropy: float = 0.25
    depth_decay: float = 1.0
    retention: float = 0.7
    least_retention: float = 0.2
    pard_token: int | None = None
    medusa_layers: int = 1
    draft_vocab_size: int | None = None
    eagle3_layers_to_capture: tuple[int, ...] | None = None
    heldout_rows: int = 64
    evaluation_steps: int = 200
    checkpoint_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value outside its range."""
        for name in ("num_tokens", "batch_size", "micro_batch_size", "medusa_layers"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        self._check("max_length", self.max_length >= 2, "2 or more")
        for name in ("steps", "warmup_steps", "heldout_rows", "seed"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("evaluation_steps", "checkpoint_steps"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("learning_rate", "clip_norm"):
            self._check(name, getattr(self, name) > 0, "above 0")
        for name in ("weight_decay", "cross_entropy", "divergence", "minutes"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("retention", "least_retention", "depth_decay"):
            self._check(name, 0 < getattr(self, name) <= 1, "above 0, and 1 at most")
        size = self.draft_vocab_size
        self._check("draft_vocab_size", size is None or size >= 1, "1 or more")
        if not self.divergence and not self.cross_entropy:
            raise ConfigError("--divergence and --cross-entropy are both 0: nothing would be learned")
        self._check("epochs", self.steps > 0 or self.minutes > 0 or self.epochs > 0, "above 0")
        if self.steps and self.minutes:
            raise ConfigError(f"--steps {self.steps} and --minutes {self.minutes:g}: give one of them")
        for name, known in (("optimizer", OPTIMIZERS), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{option(name)}: unknown {name} '{value}'{nearest(value, known)}")

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise ConfigError(f"{option(name)} is {getattr(self, name)}: it must be {wanted}")

    def to_json(self) -> str:
        """All settings, in the order of their names."""
        return json.dumps(asdict(self), sort_keys=True)

    def find_difference(self, others: Mapping[str, Any]) -> str | None:
        """Name the first setting that differs from an earlier run's and would change what comes out."""
        own = json.loads(self.to_json())  # a tuple is a list there
        for item in fields(self):
            if item.name not in NOT_COMPARED and others.get(item.name) != own[item.name]:
                return item.name
        return None


def option(name: str) -> str:
    """A setting as the command line calls it."""
    return f"--{name.replace('_', '-')}"
