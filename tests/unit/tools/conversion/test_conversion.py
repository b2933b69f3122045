"""From Hugging Face's layout to TensorRT-LLM's and back, and from any number of ranks to any other: no bit is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from paged import PagedModel
from quantized_checkpoints import edit_tensors, make_pair
from safetensors.torch import load_file
from tensorrt_llm_checkpoints import write_ranks as write_by_hand
from transformers import AutoModelForCausalLM

from parallel.errors import ParallelError
from trtrun.errors import TrtrunError
from trtrun.models.config import read_model_config
from trtrun.tools.conversion.source import open_source
from trtrun.tools.conversion.writers import write_hugging_face, write_ranks

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
SIZES = {"num_attention_heads": 4, "intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 32, "rope_theta": 500.0},
        "eos_token_id": 7,
    },
    "MistralForCausalLM": {"sliding_window": 3, "transformers_4": True},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True, "num_key_value_heads": None},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def to_ranks(source: Path, output: Path, tp_size: int, dtype: str | None = None) -> Path:
    output.mkdir()
    write_ranks(open_source(source, dtype), output, tp_size, lambda done, total: None)
    return output


def to_hugging_face(source: Path, output: Path, dtype: str | None = None) -> Path:
    output.mkdir()
    write_hugging_face(open_source(source, dtype), output, lambda done, total: None)
    return output


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {f"{file.stem if file.stem.startswith('rank') else ''}{name}": value
            for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}  # fmt: skip


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def logits_of_transformers(directory: Path) -> torch.Tensor:
    """What the library makes of a directory that is opened by its config.json alone."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        return model(torch.tensor([BATCH[0][0][2]])).logits


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("tp_size", [1, 4])
def test_there_and_back(tmp_path: Path, architecture: str, tp_size: int) -> None:
    source = make_checkpoint(tmp_path / "source", architecture, tokenizer=True, **{**SIZES, **MODELS[architecture]})
    ranks = to_ranks(source, tmp_path / "ranks", tp_size)
    assert torch.equal(PagedModel(ranks, tp_size=2).forward(BATCH), PagedModel(source, tp_size=2).forward(BATCH))
    again = to_hugging_face(ranks, tmp_path / "again")
    assert_equal(tensors_of(again), tensors_of(source))
    assert torch.equal(logits_of_transformers(again), logits_of_transformers(source))
    assert torch.equal(PagedModel(again).forward(BATCH), PagedModel(source).forward(BATCH))
    for path in (ranks, again):
        found, expected = read_model_config(path), read_model_config(source)
        assert found.eos_token_ids == expected.eos_token_ids and found.rope == expected.rope
        assert (path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert not list(path.glob("*.new"))


@pytest.mark.parametrize(("kind", "tp_size"), [("plain", 4), ("fp8", 4), ("awq", 2)])
def test_any_number_of_ranks_to_any_other(tmp_path: Path, kind: str, tp_size: int) -> None:
    """The same tensors, names and scales as those that are written from the format's description."""
    source = make_checkpoint(tmp_path / "source", "Qwen2ForCausalLM", **SIZES)
    for size in (1, tp_size):
        write_by_hand(source, tmp_path / f"hand{size}", size, kind)
    for start, end in ((1, tp_size), (tp_size, 1)):
        found = to_ranks(tmp_path / f"hand{start}", tmp_path / f"to{end}", end)
        assert_equal(tensors_of(found), tensors_of(tmp_path / f"hand{end}"))
        values, expected = (json.loads((path / "config.json").read_text()) for path in (found, tmp_path / f"hand{end}"))
        assert {key: values[key] for key in expected if key not in ("quantization", "mapping", "rotary_scaling")} == {
            key: value for key, value in expected.items() if key not in ("quantization", "mapping", "rotary_scaling")
        }
        for key in ("quant_algo", "kv_cache_quant_algo"):
            assert values["quantization"][key] == expected["quantization"][key]
        assert values["mapping"]["tp_size"] == values["mapping"]["world_size"] == end


@pytest.mark.parametrize("kind", ["fp8", "awq"])
def test_quantized_ranks_become_a_directory_in_modelopts_words(tmp_path: Path, kind: str) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    write_by_hand(source, tmp_path / "ranks", 2, kind)
    found = to_hugging_face(tmp_path / "ranks", tmp_path / "found")
    assert torch.equal(PagedModel(found).forward(BATCH), PagedModel(tmp_path / "ranks").forward(BATCH))
    section = json.loads((found / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "modelopt" and section["kv_cache_scheme"]["type"] == "float"
    tensors = tensors_of(found)
    assert tensors["model.layers.1.self_attn.k_scale"].tolist() == [1.5]
    back = to_ranks(found, tmp_path / "back", 2)
    assert_equal(tensors_of(back), tensors_of(tmp_path / "ranks"))


def test_scales_of_what_is_multiplied_as_one_become_one(tmp_path: Path) -> None:
    """ModelOpt's FP8 of queries, keys and values is rounded once more, to the largest of their scales."""
    stored, dense = make_pair(tmp_path, "modelopt FP8")
    names = [f"model.layers.1.self_attn.{name}_proj.weight_scale" for name in "qkv"]
    scales = load_file(stored / "model.safetensors")
    edit_tensors(stored, {names[1]: 5 * scales[names[1]]})
    largest = float(5 * scales[names[1]])
    ranks = to_ranks(stored, tmp_path / "ranks", 2)
    tensors, numbers = tensors_of(ranks), load_file(dense / "model.safetensors")
    rows = tensors["rank0transformer.layers.1.attention.qkv.weight"].float() * largest
    for index, (name, factor) in enumerate((("q", 1), ("k", 5), ("v", 1))):
        expected = factor * numbers[f"model.layers.1.self_attn.{name}_proj.weight"][:128]
        assert torch.allclose(rows[128 * index : 128 * index + 128], expected, rtol=1 / 16, atol=largest / 512)
    assert tensors["rank1transformer.layers.1.attention.qkv.weights_scaling_factor"].tolist() == [largest]
    assert tensors["rank0transformer.layers.0.mlp.fc.weight"].dtype == torch.float32  # that module is plain there


def test_the_dtype_may_change(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    ranks = to_ranks(source, tmp_path / "ranks", 2, "float16")
    assert {value.dtype for value in tensors_of(ranks).values()} == {torch.float16}
    assert read_model_config(ranks).checkpoint_dtype == "float16"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compressed-tensors W4A16", "compressed-tensors pack-quantized weights have no place in TensorRT-LLM's"),
        ("compressed-tensors FP8 dynamic", "compressed-tensors FP8 weights have no place"),
        ("fp8 block", "fp8 weights have no place"),
    ],
)
def test_what_there_is_no_word_for_is_refused(tmp_path: Path, name: str, message: str) -> None:
    stored, _ = make_pair(tmp_path, name)
    with pytest.raises(TrtrunError, match=message):
        to_ranks(stored, tmp_path / "ranks", 1)


def test_ranks_that_cannot_share_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises((TrtrunError, ParallelError), match="4 attention heads cannot be divided over 3 ranks"):
        to_ranks(make_checkpoint(tmp_path / "source", **SIZES), tmp_path / "ranks", 3)


def test_whole_numbers_stay_and_other_dtypes_are_refused(tmp_path: Path) -> None:
    """Of tensors that the model does not call for, such as positions in older files."""
    source = make_checkpoint(tmp_path / "source", **SIZES)
    places = {"model.positions": torch.arange(5), "model.one": torch.tensor(2**40), "model.few": torch.arange(3).int()}
    edit_tensors(source, places)
    found = tensors_of(to_hugging_face(source, tmp_path / "found", "float16"))
    assert found["model.norm.weight"].dtype == torch.float16
    for name, value in places.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    edit_tensors(source, {"model.mask": torch.tensor([True, False])})
    with pytest.raises(TrtrunError, match=r"tensor 'model.mask' has dtype BOOL, which is not converted; known: F32"):
        to_hugging_face(source, tmp_path / "refused")
