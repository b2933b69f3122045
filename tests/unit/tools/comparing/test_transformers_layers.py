"""A model's layers beside transformers': what is the same is said to be, and of what is not the first place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from click.testing import CliRunner
from family_checkpoints import write_family

from launch.cli import cli
from trtrun.errors import CheckpointError
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.tools.comparing.transformers_layers import compare

TOKENS = [5, 9, 77, 3, 8, 120, 33, 4, 2, 9, 11, 150]


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "gemma3_text", "gemma4", "gemma4_text", "gpt_oss", "mixtral", "olmo3", "phi3", "qwen3_5_moe"],
)
def test_families_are_what_transformers_has(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, seed=1) if family == "llama" else write_family(tmp_path, family)
    found = compare(path, read_model_config(path), 3, TOKENS)
    layers = {"llama": 2, "gemma4": 5}.get(family, 3)
    assert found.differs is None and len(found.apart) == layers + 2
    assert found.verdict.startswith(f"{layers} layers are transformers'")


def of_layer(index: int, change: Callable[[Any], Any]) -> Callable[[ModelConfig], ModelConfig]:
    def changed(config: ModelConfig) -> ModelConfig:
        layers = list(config.layers)
        layers[index] = change(layers[index])
        return replace(config, layers=tuple(layers))

    return changed


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (
            of_layer(2, lambda plan: replace(plan, attention=replace(plan.attention, scale=0.9))),
            r"layer 2 is the first that differs, in its attention \(model\.layers\.2\.self_attn\)",
        ),
        (
            of_layer(1, lambda plan: replace(plan, mlp=replace(plan.mlp, activation="gelu_tanh"))),
            r"layer 1 is the first that differs, in its feed-forward layer \(model\.layers\.1\.mlp\)",
        ),
        (
            of_layer(0, lambda plan: replace(plan, residual_factor=0.3)),
            r"layer 0 is the first that differs.*: behind it",
        ),
        (lambda config: replace(config, ends=replace(config.ends, embedding_factor=2.0)), "embedded tokens are apart"),
        (lambda config: replace(config, ends=replace(config.ends, norm_adds_one=True)), "behind the last norm tokens"),
    ],
)
def test_the_first_place_that_differs_is_named(
    tmp_path: Path, change: Callable[[ModelConfig], ModelConfig], verdict: str
) -> None:
    path = write_family(tmp_path, "granite")
    found = compare(path, change(read_model_config(path)), 4, TOKENS)
    assert re.match(verdict, found.verdict), found


def test_what_transformers_cannot_load_is_said_in_a_line(tmp_path: Path) -> None:
    path = write_family(tmp_path, "granite")
    config = read_model_config(path)
    (path / "config.json").write_text('{"model_type": "there_is_none"}')
    with pytest.raises(CheckpointError, match="transformers cannot load it: ") as caught:
        compare(path, config, 2, TOKENS)
    assert "\n" not in str(caught.value)


def test_the_command_tells_it(tmp_path: Path) -> None:
    path, file = make_checkpoint(tmp_path / "model", tokenizer=True), tmp_path / "job.yaml"
    target = {"model": str(path), "devices": ["cpu:0"]}
    file.write_text(json.dumps({"target": target, "speculation": {"method": "ngram"}}))
    words = ["check", "--config", str(file), "--against", "transformers"]
    for more in ([], ["--prompt", "some text", "--layers", "1"]):
        told = CliRunner().invoke(cli, [*words, *more, "--json"], catch_exceptions=False)
        assert told.exit_code == 0 and json.loads(told.stdout)["differs"] is None
    told = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert told.stdout.splitlines()[-1].startswith("2 layers are transformers'")
