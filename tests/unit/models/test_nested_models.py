"""Checkpoints of several models, of which the one for text is read: its values, its tensors by whichever prefix, and
what is quantized."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import make_llm, tokens_of
from quantized_checkpoints import make_pair
from safetensors.torch import load_file, save_file
from test_model_logits import check_logits, prompt_of

from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.models.config import read_model_config
from trtrun.models.families.dense import LLAMA
from trtrun.registry import MODEL_FAMILIES
from trtrun.weights.nested_models import with_text_names
from trtrun.weights.rank_files import open_checkpoint


def edit(path: Path, name: str = "config.json", **changes: Any) -> Path:
    """Change keys of a JSON file; a value of ... removes the key."""
    file = path / name
    values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    file.write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_family(tmp_path / "nested", "gemma3")


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_found_by_their_names_in_memory_too(tmp_path: Path, tied: bool) -> None:
    old = write_family(tmp_path / "old", "gemma3", tie_word_embeddings=tied)
    new = write_family(tmp_path / "new", "gemma3", tie_word_embeddings=tied, old_names=False)
    check_logits(new)
    tokens = prompt_of(20)
    assert torch.equal(*(PagedModel(path).forward([[(0, 0, tokens)]]) for path in (old, new)))


def test_tensors_of_other_models_are_passed_over(path: Path) -> None:
    names = open_checkpoint(path).names()
    assert {name.split(".")[0] for name in names} == {"model", "lm_head"}
    assert {part.name for weight in read_model_config(path).weights for part in weight.parts} == set(names)


def test_the_text_model_is_that_of_its_own_architecture(path: Path) -> None:
    """Which is what `trtrun build` and `convert` write, and what another process is told."""
    config = read_model_config(path)
    assert config.architecture == "Gemma3ForCausalLM" and not config.tie_word_embeddings
    assert type(config).from_values(json.loads(json.dumps(config.to_values()))) == config
    assert read_model_config(edit(path, tie_word_embeddings=...)) == config  # that of text_config then


def test_keys_that_text_config_leaves_out_get_the_defaults_of_transformers(path: Path) -> None:
    """As in gemma-3-4b-it: sizes alone, and the end of texts outside."""
    from transformers import AutoConfig

    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    edit(path, text_config=text, eos_token_id=[1, 106], dtype=..., torch_dtype="bfloat16")
    (path / "generation_config.json").unlink(missing_ok=True)
    config, reference = read_model_config(path), AutoConfig.from_pretrained(path).text_config
    assert config.num_heads == reference.num_attention_heads and config.num_kv_heads == reference.num_key_value_heads
    assert config.vocab_size == reference.vocab_size and config.head_dim == reference.head_dim
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.checkpoint_dtype == "bfloat16" and config.eos_token_ids == (1, 106)
    full = [kind == "full_attention" for kind in reference.layer_types]
    assert config.windows == tuple(None if is_full else 1024 for is_full in full)
    assert [rope.theta for rope in config.ropes] == [1e6 if is_full else 1e4 for is_full in full]
    assert [rope.factor for rope in config.ropes] == [8.0 if is_full else 1.0 for is_full in full]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "llama"}, "the text model of Gemma3ForConditionalGeneration is of model_type 'llama', which"),
        ({"model_type": 3}, "is of model_type 3, which is not supported; known: gemma3_text"),
        (..., "'text_config' must be an object with the text model's values, not None"),
        ([], r"'text_config' must be an object with the text model's values, not \[\]"),
    ],
)
def test_another_text_model_is_refused(path: Path, text: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"nested/config\.json: .*{message}"):
        read_model_config(edit(path, text_config=text))


def test_what_is_quantized_is_told_by_names_in_the_text_model() -> None:
    said = {
        "ignore": ["lm_head", "language_model.lm_head", "vision_tower.a", "re:vision_tower.*", 3],
        "model.language_model.layers.0.mlp.down_proj": {"bits": 8},
        "modules": ["language_model.model.layers.1.self_attn*", "model.language_model.layers.2"],
    }
    assert with_text_names(said) == {
        "ignore": ["lm_head", "lm_head", "vision_tower.a", "re:vision_tower.*", 3],
        "model.layers.0.mlp.down_proj": {"bits": 8},
        "modules": ["model.layers.1.self_attn*", "model.layers.2"],
    }


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["fp8 block", "modelopt FP8"])
def test_a_quantized_text_model_of_another_family(
    tmp_path: Path, name: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose plain modules stand by long names in config.json or beside it. All that a family of several models needs
    is the line that registers it."""
    whole = "OwnForConditionalGeneration"
    monkeypatch.setitem(MODEL_FAMILIES._items, whole, replace(LLAMA, text_models={"llama": "LlamaForCausalLM"}))
    flat, _ = make_pair(tmp_path, name)
    nested = tmp_path / "nested"
    shutil.copytree(flat, nested)
    tensors = load_file(flat / "model.safetensors")
    renamed = {key.replace("model.", prefix, 1): value for key, value in tensors.items()}
    save_file({**renamed, "vision_tower.weight": torch.zeros(2, 2)}, nested / "model.safetensors", {"format": "pt"})
    values = json.loads((flat / "config.json").read_text("utf-8"))
    section = values.pop("quantization_config", None)
    told = {} if section is None else {"quantization_config": with_long_names(section, prefix)}
    (nested / "config.json").write_text(json.dumps({"architectures": [whole], "text_config": values, **told}), "utf-8")
    if (beside := nested / "hf_quant_config.json").exists():
        beside.write_text(json.dumps(with_long_names(json.loads(beside.read_text("utf-8")), prefix)), "utf-8")
    config, tokens = read_model_config(nested), prompt_of(20)
    assert config.quant_method is not None and replace(config, stored=None) == replace(
        read_model_config(flat), stored=None
    )
    assert torch.equal(*(PagedModel(path).forward([[(0, 0, tokens)]]) for path in (flat, nested)))


@pytest.mark.parametrize(
    ("family", "architecture", "kind", "layers"),
    [
        ("deepseek_v3", "KimiK25ForConditionalGeneration", "kimi_k2", "language_model.model."),
        ("deepseek_v3", "KimiK25ForConditionalGeneration", "deepseek_v3", "language_model."),
        ("mistral", "Mistral3ForConditionalGeneration", "mistral", "language_model.model."),
        ("ministral3", "Mistral3ForConditionalGeneration", "ministral3", "language_model.model."),
    ],
)
def test_text_models_beside_others(tmp_path: Path, family: str, architecture: str, kind: str, layers: str) -> None:
    """The layers of Kimi-K2.5 have a shorter prefix in early NVFP4 checkpoints."""
    flat, nested = write_family(tmp_path / "flat", family), tmp_path / "nested"
    nested.mkdir()
    renamed = {"vision_tower.weight": torch.zeros(2, 2)}
    for name, tensor in load_file(flat / "model.safetensors").items():
        own = f"{layers}{name.removeprefix('model.')}" if name.startswith("model.layers") else f"language_model.{name}"
        renamed[own] = tensor
    save_file(renamed, nested / "model.safetensors", {"format": "pt"})
    text = {**json.loads((flat / "config.json").read_text("utf-8")), "model_type": kind}
    values = {"architectures": [architecture], "text_config": text}
    (nested / "config.json").write_text(json.dumps(values), encoding="utf-8")
    tokens = prompt_of(20)
    assert torch.equal(*(PagedModel(path).forward([[(0, 0, tokens)]]) for path in (flat, nested)))


def with_long_names(said: Any, prefix: str) -> Any:
    """What a configuration says, with modules by the names that they have beside other models."""
    text = json.dumps(said).replace('"model.', f'"{prefix}').replace('"lm_head"', '"language_model.lm_head"')
    return json.loads(text)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_adapters_name_modules_as_the_base_does_or_as_in_the_text_model(path: Path, prefix: str) -> None:
    given = make_adapter(path.parent / "given", path, modules=("o_proj", "gate_proj", "down_proj"))
    tensors = load_file(given / "adapter_model.safetensors")
    texts = []
    for name, own in (("short", "model."), ("long", prefix)):
        adapter = path.parent / name
        shutil.copytree(given, adapter)
        renamed = {key.replace("language_model.model.", own): value for key, value in tensors.items()}
        save_file(renamed, adapter / "adapter_model.safetensors", {"format": "pt"})
        with make_llm(path, adapters={"one": str(adapter)}) as llm:
            for lora_name in ("one", None):
                sampling = SamplingParams(max_tokens=20, lora_name=lora_name)
                texts.append(tokens_of(llm.generate([prompt_of(13)], sampling)))
    assert texts[0] == texts[2] and texts[1] == texts[3] and texts[0] != texts[1]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gemma3_text"])
def test_any_of_several_tokens_ends_a_text(tmp_path: Path, family: str) -> None:
    """As <end_of_turn> behind <eos>, which generation_config.json of Gemma's chat models has."""
    path = write_family(tmp_path, family, seed=3)
    prompt, greedy = prompt_of(13, seed=3), SamplingParams(max_tokens=30)
    with make_llm(path) as llm:
        ((whole,),) = tokens_of(llm.generate([prompt], greedy))
    assert len(whole) == 30
    end = next(token for token in whole[5:] if token not in whole[:5])
    unused = next(token for token in range(203) if token not in whole)
    edit(path, "generation_config.json", eos_token_id=[unused, end])
    with make_llm(path) as llm:
        (output,) = llm.generate([prompt], greedy)
    found = output.completions[0]
    assert found.finish_reason == "stop" and found.token_ids == whole[: whole.index(end) + 1]
