"""What of a PEFT directory is read, and what is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import PREFIX, edit_adapter, make_adapter
from checkpoints import make_checkpoint

from trtrun.errors import CheckpointError
from trtrun.lora.lora_config import read_lora_config
from trtrun.lora.lora_files import LoraFiles, adaptable_modules
from trtrun.models.config import read_model_config

Q = "model.layers.0.self_attn.q_proj"
BOTH = ["0.self_attn.q_proj", "1.self_attn.q_proj"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "target")


def files_of(path: Path, target: Path, max_rank: int = 16) -> LoraFiles:
    return LoraFiles(path, read_model_config(target), max_rank)


@pytest.mark.parametrize(
    ("modules", "config", "names"),
    [
        (("q_proj",), {}, BOTH),
        (("self_attn.q_proj",), {}, BOTH),
        (("q_proj",), {"target_modules": r".*layers\.\d\.self_attn\.q_proj"}, BOTH),
        (("q_proj",), {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}, BOTH),
        (("o_proj", "up_proj"), {"layers_to_transform": [1]}, ["1.self_attn.o_proj", "1.mlp.up_proj"]),
        (("o_proj",), {"layers_to_transform": 1, "layers_pattern": "layers"}, ["1.self_attn.o_proj"]),
    ],
)  # fmt: skip
def test_which_modules_are_targets(
    tmp_path: Path, target: Path, modules: tuple[str, ...], config: dict[str, Any], names: list[str]
) -> None:
    layers = [1] if "layers_to_transform" in config else None
    path = make_adapter(tmp_path / "a", target, modules=modules, layers=layers, **config)
    files_of(path, target)
    found = read_lora_config(path)
    known = adaptable_modules(read_model_config(target))
    assert [module for module in known if found.is_target(module)] == [f"model.layers.{name}" for name in names]


def test_all_linear_is_every_matrix_of_the_layers(tmp_path: Path, target: Path) -> None:
    files_of(make_adapter(tmp_path / "a", target, target_modules="all-linear"), target)
    with pytest.raises(CheckpointError, match=r"target_modules names model\.layers\.0\..*, of which there are no"):
        files_of(make_adapter(tmp_path / "b", target, modules=["q_proj"], target_modules="all-linear"), target)


def test_ranks_and_scales_of_modules(tmp_path: Path, target: Path) -> None:
    """As PEFT matches patterns: the ends of names, whole parts of them, or from the begin behind "^"."""
    path = make_adapter(
        tmp_path / "a", target, rank=4, alpha=8, modules=["q_proj", "down_proj"],
        ranks=lambda module: 2 if module == Q else 4,
        rank_pattern={"layers.0.self_attn.q_proj": 2, "own_proj": 9}, alpha_pattern={"^model.layers.1": 3},
    )  # fmt: skip
    files_of(path, target)
    found = read_lora_config(path)
    down = "model.layers.1.mlp.down_proj"
    assert [found.rank_of(module) for module in (Q, down)] == [2, 4]
    assert [found.scale_of(module) for module in (Q, down)] == [4, 0.75]
    assert read_lora_config(edit_adapter(path, use_rslora=True)).scale_of(down) == 1.5


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; LORA is supported"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_rslora": "no"}, "use_rslora must be true or false, not 'no'"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"something_new": {"x": 1}}, "something_new is {'x': 1}, which is not supported"),
        ({"some\nthing": 1}, r"'some\nthing' is 1, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base model"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA', which changes the base model, too: save it"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq', which changes the base model, too: train with"),
        ({"r": 0}, "r must be a rank between 1 and 256, not 0"),
        ({"r": True}, "r must be a rank"),
        ({"lora_alpha": "much"}, "lora_alpha must be a finite number, not 'much'"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern: '(' is no regular expression"),
        ({"rank_pattern": {"q_proj": 999}}, "rank_pattern must be a rank between 1 and 256, not 999"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": [3]}, "target_modules must be a list of names or a regular expression, not [3]"),
        ({"target_modules": ["up_proj"]}, f"tensors of {Q}, which target_modules does not name"),
        ({"target_modules": ["q_proj", "up_proj"]}, "target_modules names model.layers.0.mlp.up_proj, of"),
        ({"layers_to_transform": "1"}, "layers_to_transform must be a number of a layer or a list of them, not '1'"),
        ({"exclude_modules": 3}, "exclude_modules must be a list of names or a regular expression, not 3"),
        ({"layers_pattern": "blocks"}, "layers_pattern is 'blocks'; leave it out"),
        ({"r": 8}, "has shape [4, 64], but the base model and a rank of 8 call for [8, 64]"),
        ({"r": 32}, "q_proj has rank 32, more than adapter_slots.max_rank, which is 16: set that to 32 or more"),
    ],
)  # fmt: skip
def test_what_configurations_may_not_say(tmp_path: Path, target: Path, config: dict[str, Any], line: str) -> None:
    path = edit_adapter(make_adapter(tmp_path / "a", target, modules=["q_proj"]), **config)
    with pytest.raises(CheckpointError, match=re.escape(line)):
        files_of(path, target)


A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda tensors: tensors.pop(B), f"has no tensor '{B}'"),
        (lambda tensors: tensors.update({A: tensors[A][:, :3].clone()}), "has shape [4, 3]"),
        (lambda tensors: tensors.update({A: tensors[A].int()}), "has dtype I32"),
        (lambda tensors: tensors.update({f"{PREFIX}lm_head.lora_A.weight": tensors[A] + 1}), "lm_head.lora_A"),
        (
            lambda tensors: tensors.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": tensors[A] + 1}),
            "lora_embedding_A' is not supported",
        ),
        (lambda tensors: tensors.update({f"{Q}.lora_A.weight": tensors[A] + 1}), "is not supported"),
    ],
)  # fmt: skip
def test_what_tensors_may_not_be(
    tmp_path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None], line: str
) -> None:
    path = edit_adapter(make_adapter(tmp_path / "a", target, modules=["q_proj"]), change)
    with pytest.raises(CheckpointError, match=re.escape(line)):
        files_of(path, target)


def test_a_header_that_takes_long_is_not_read(tmp_path: Path, target: Path) -> None:
    path = make_adapter(tmp_path / "a", target, modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"has a header of \d+ bytes; 4194304 are the most"):
        files_of(edit_adapter(path, lambda tensors: tensors.update({"x" * (1 << 22): torch.ones(1)})), target)


def test_what_is_no_adapter(tmp_path: Path, target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        files_of(tmp_path / "nowhere", target)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        files_of(target, target)
    path = make_adapter(tmp_path / "a", target)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        files_of(path, target)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "adapter_x.safetensors"}}')
    make_adapter(tmp_path / "b", target)
    (tmp_path / "b" / file.name).rename(path / "adapter_x.safetensors")
    file.rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"a has no adapter_model\.safetensors with tensors"):
        files_of(path, target)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"pickle \(adapter_model\.bin\), which may run code.*save the adapter as"
    ):
        files_of(path, target)
