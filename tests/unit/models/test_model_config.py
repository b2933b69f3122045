"""config.json as transformers 4 and 5 write it, the registry of architectures, and each refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint

from trtrun.errors import CheckpointError
from trtrun.layers.rope import RopeConfig
from trtrun.models.config import MOST_POSITIONS, ModelConfig, read_model_config
from trtrun.registry import MODEL_FAMILIES, Registry


def edit(path: Path, name: str = "config.json", **changes: Any) -> Path:
    """Change keys of a JSON file; a value of ... removes the key."""
    values = json.loads((path / name).read_text(encoding="utf-8"))
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    (path / name).write_text(json.dumps(values), encoding="utf-8")
    return path


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Of the attention of each layer."""
    return tuple(layer.attention.window for layer in config.layers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_dialects_say_the_same(tmp_path: Path, architecture: str) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 77.0}
    old = make_checkpoint(tmp_path / "4", architecture, dtype=torch.bfloat16, transformers_4=True, rope=rope)
    new = make_checkpoint(tmp_path / "5", architecture, dtype=torch.bfloat16, rope=rope)
    config = read_model_config(new)
    assert read_model_config(old) == config
    assert config.checkpoint_dtype == "bfloat16" and config.rope.theta == 77.0 and config.rope.factor == 2.0
    has_bias = any(part.name.endswith("q_proj.bias") for weight in config.weights for part in weight.parts)
    assert config.architecture == architecture and has_bias == (architecture == "Qwen2ForCausalLM")
    nested = {"full_attention": rope, "sliding_attention": rope}
    assert read_model_config(edit(new, rope_parameters=nested)) == config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_left_out_get_the_defaults_of_transformers(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    path = make_checkpoint(tmp_path, architecture, num_attention_heads=32, hidden_size=256)
    optional = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "sliding_window", "head_dim")
    edit(path, **dict.fromkeys((*optional, "rope_parameters", "max_window_layers", "tie_word_embeddings"), ...))
    config, reference = read_model_config(path), AutoConfig.from_pretrained(path)
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or 8)
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope == RopeConfig(theta=reference.rope_parameters["rope_theta"])
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    windowed = architecture == "MistralForCausalLM"
    assert windows(config) == ((reference.sliding_window if windowed else None),) * 2


def test_sliding_windows_by_layer(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=4, max_window_layers=3)
    assert windows(read_model_config(path)) == (None,) * 4
    assert windows(read_model_config(edit(path, use_sliding_window=True))) == (None, None, None, 32)
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(read_model_config(edit(path, layer_types=types))) == (32, None, 32, None)
    with pytest.raises(CheckpointError, match="unknown layer type 'linear_attention'"):
        read_model_config(edit(path, layer_types=["linear_attention"] * 4))
    with pytest.raises(CheckpointError, match="3 layer_types for 4 layers"):
        read_model_config(edit(path, layer_types=["full_attention"] * 3))


def test_end_of_sequence_tokens(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, eos_token_id=5)
    assert read_model_config(path).eos_token_ids == (5,)
    edit(path, "generation_config.json", eos_token_id=[7, 9])
    assert read_model_config(path).eos_token_ids == (7, 9)
    edit(path, "generation_config.json", eos_token_id=...)
    assert read_model_config(path).eos_token_ids == ()
    (path / "generation_config.json").unlink()
    assert read_model_config(path).eos_token_ids == (5,)
    assert read_model_config(edit(path, eos_token_id=None)).eos_token_ids == ()


def test_without_a_dtype_the_weights_decide(tmp_path: Path) -> None:
    path = edit(make_checkpoint(tmp_path, dtype=torch.float16), dtype=...)
    assert read_model_config(path).checkpoint_dtype == "float16"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLn"]}, r"unknown architecture 'LlamaForCausalLn' \(did you mean 'LlamaFor"),
    ({"architectures": ["T5"]}, "known: .*LlamaForCausalLM"),
    ({"architectures": [[]]}, r"unknown architecture '\[\]'"),
    ({"architectures": ...}, "'architectures' must name one of .*LlamaForCausalLM"),
    ({"hidden_size": ...}, "'hidden_size' must be a positive whole number, not None"),
    ({"num_hidden_layers": "two"}, "'num_hidden_layers' must be a positive whole number"),
    ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a positive number"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; known: float32, float16, bfloat16"),
    ({"quantization_config": {"quant_method": "hqq"}}, r"quantized weights \('hqq'\) are not supported"),
    ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id or a list"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ({"rope_parameters": {"rope_type": "longropes"}}, "rope type 'longropes' is not supported; known: default, linear"),
    ({"rope_parameters": {"rope_type": "linear"}}, "'factor' must be a positive number, not None"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' must be a positive number"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ({"quantization_config": "gptq"}, r"config\.json: 'quantization_config' must be an object, not 'gptq'"),
    ({"quantization_config": []}, r"config\.json: 'quantization_config' must be an object, not \[\]"),
    (
        {"hidden_size": 10**30},
        "'hidden_size' is 1000000000000000000000000000000, more than any model has: at most 10485",
    ),
    ({"num_hidden_layers": 10**8}, "'num_hidden_layers' is 100000000, more than any model has: at most 4096 are taken"),
    (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9},
        "'num_local_experts' is 1000000000, more than any model has: at most 4096 are taken",
    ),
    ({"rope_parameters": {"rope_theta": 10**400}}, "is not valid JSON: it holds a whole number of 401 digits"),
    ({"rope_parameters": {"rope_theta": float("inf")}}, "'rope_theta' must be a positive number, not inf"),
    ({"attention_bias": "false"}, "'attention_bias' must be true or false, not 'false'"),
    (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": 5},
        "'layer_types' must be a list with the type of each la",
    ),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [[]] * 2}, "'layer_types' must be a list with the type"),
    (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "x"},
        "'max_window_layers' must be a whole number, not 'x'",
    ),
    (
        {"architectures": ["MistralForCausalLM"], "sliding_window": "x"},
        "'sliding_window' must be a positive whole number",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
        "'original_max_position_embeddings' must be a positive whole number, not 0",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
        "'beta_fast' must be a positive number, not 'x'",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
        "the numbers of rope type 'yarn' give no angles",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-320}},
        "the numbers of rope type 'linear' give no angles",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
        "differ between layer types",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals_are_one_line_that_names_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = edit(make_checkpoint(tmp_path), **changes)
    (path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(path)
    assert str(path / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_context_beyond_any_is_cut_to_what_tables_can_be_as_long_as(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, max_position_embeddings=10**12)
    assert read_model_config(path).max_position_embeddings == MOST_POSITIONS
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 10**9}
    assert read_model_config(edit(path, rope_parameters=rope)).rope.factor == 1000


def test_eos_tokens_that_no_model_writes_end_nothing_and_wrong_ones_are_their_files(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    edit(path, "generation_config.json", eos_token_id=[-1, 5, 10**30])
    assert read_model_config(path).eos_token_ids == (5,)
    edit(path, "generation_config.json", eos_token_id="x")
    with pytest.raises(CheckpointError, match=r"/generation_config\.json: 'eos_token_id' must be a token id or a list"):
        read_model_config(path)


def test_what_nobody_thought_of_is_one_line_with_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise AttributeError("a defect\nin two lines")

    monkeypatch.setattr("trtrun.models.config.parse_rope", fail)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used: AttributeError: a defect in two lines$"):
        read_model_config(path)


def test_directory_and_file_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist; give a Hugging Face model directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON") as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, not a list"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json: what stands in it is nested too deeply"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read: File name too long"):
        read_model_config(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="is a file"):
        read_model_config(tmp_path / "config.json")


def test_registry_refuses_twice_and_unknown() -> None:
    assert set(ARCHITECTURES) < set(MODEL_FAMILIES)
    registry: Registry[int] = Registry("thing")
    assert registry.register("one")(1) == 1 and "one" in registry and registry.get("one") == 1
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("one")(2)
    with pytest.raises(Exception, match=r"unknown thing 'onne' \(did you mean 'one'\?\); known: one"):
        registry.get("onne")
