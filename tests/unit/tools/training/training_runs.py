"""What the tests of training share: a small pair, data that its target really made, and a run on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, make_draft
from transformers import LlamaForCausalLM

from parallel.transports import open_communicator
from parallel.watchdog.activity import Activity
from trtrun.tools.training.data import DataRow, read_data
from trtrun.tools.training.loop import TrainingLoop
from trtrun.tools.training.methods.pard import PardMethod
from trtrun.tools.training.methods.table import DraftTraining, MethodContext, find_method
from trtrun.tools.training.models import Target
from trtrun.tools.training.settings import TrainingSettings
from trtrun.tools.training.state import StateFile

VOCABULARY = 199
MASK = 198
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "num_tokens": 3,
    "steps": 12,
    "batch_size": 6,
    "micro_batch_size": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "max_length": 40,
    "heldout_rows": 4,
    "evaluation_steps": 5,
    "checkpoint_steps": 4,
    "pard_token": MASK,
}


def small_settings(**changes: Any) -> TrainingSettings:
    """SMALL with changes."""
    return TrainingSettings(**{**SMALL, **changes})


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A target, and a draft of its first layer in bfloat16."""
    target = make_checkpoint(folder / "target", seed=1, num_hidden_layers=3, vocab_size=VOCABULARY)
    draft = make_draft(folder / "draft", target, num_layers=1)
    LlamaForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).save_pretrained(draft)
    return target, draft


def make_data(path: Path, target: Path, num_rows: int = 24, length: int = 18) -> Path:
    """Write the target's greedy answers to random prompts of different lengths."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    lines = []
    for index in range(num_rows):
        size = 2 + index % 5
        prompt = torch.randint(VOCABULARY - 1, (1, size), generator=torch.Generator().manual_seed(index))
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length + index % 3, do_sample=False
        )[0].tolist()
        row = {"prompt_token_ids": tokens[:size], "token_ids": tokens[size:], "temperature": 0.0, "error": None}
        if MASK not in tokens:
            lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def rows_of(data: Path) -> Sequence[DataRow]:
    """All rows of a file."""
    return read_data([data], 40, 0, VOCABULARY, 0).rows


def make_method(target: Path, draft: Path, **changes: Any) -> PardMethod:
    """The method with its drafter."""
    settings = small_settings(**changes)
    teacher = Target(target, CPU) if settings.divergence else None
    return PardMethod(MethodContext(settings, CPU, teacher, target, VOCABULARY, draft, ()))


def make_loop(
    target: Path, draft: Path, data: Path, output: Path, activity: Activity | None = None, **changes: Any
) -> tuple[PardMethod, TrainingLoop]:
    """A run on one rank."""
    settings = small_settings(**changes)
    method = make_method(target, draft, **changes)
    rows = read_data([data], settings.max_length, settings.heldout_rows, VOCABULARY, settings.seed)
    communicator = open_communicator(CPU, None, "training")
    identity = {"data": rows.digest}
    return method, TrainingLoop(method, rows, settings, communicator, StateFile(output), identity, activity)


def make_heads(name: str, target: Path, rows: Sequence[DataRow] = (), **changes: Any) -> DraftTraining:
    """A method that makes a drafter for the target alone."""
    method = find_method(name)
    settings = small_settings(method=name, **changes)
    assert method.needs_target(settings) and not method.starts_from_draft
    return method.make(MethodContext(settings, CPU, Target(target, CPU), target, VOCABULARY, None, rows))


def make_heads_loop(
    name: str, target: Path, data: Path, output: Path, **changes: Any
) -> tuple[DraftTraining, TrainingLoop]:
    """A run of such a method on one rank."""
    settings = small_settings(method=name, **changes)
    rows = read_data([data], settings.max_length, settings.heldout_rows, VOCABULARY, settings.seed)
    method = make_heads(name, target, rows.rows, **changes)
    method.check(rows.rows)
    communicator = open_communicator(CPU, None, "training")
    return method, TrainingLoop(method, rows, settings, communicator, StateFile(output), {"data": rows.digest})


def run(loop: TrainingLoop, should_stop: Callable[[], bool] = lambda: False) -> list[dict[str, Any]]:
    """Run to the end, or until it stops; returns the metrics of its steps."""
    lines: list[dict[str, Any]] = []
    loop.run(lines.append, should_stop)
    return lines
