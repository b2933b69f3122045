"""Directories that `trtrun quantize` writes: read as they are here, and by the compressed-tensors package to the same
numbers; with any number of devices."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, save_weights
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from custom_family import custom_family, make_custom_checkpoint
from family_checkpoints import write_family
from paged import PagedModel
from quantizing_runs import CPU, quantize, tensors_of, texts_of
from safetensors.torch import load_file

from trtrun.errors import CheckpointError, ConfigError
from trtrun.models.config import read_model_config
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.tools.conversion.source import open_source
from trtrun.tools.quantizing.plain_layer import known_plans
from trtrun.tools.quantizing.texts import CalibrationTexts

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("Qwen3ForCausalLM", {}),
    "fp8_block": ("LlamaForCausalLM", {"hidden_size": 160, "intermediate_size": 272}),
    "int4_awq": ("Qwen2ForCausalLM", {}),
    "int8_sq": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
}
"""An architecture for each, and sizes that blocks do not divide; 112 input features are no multiple of 32."""


def decompress(directory: Path) -> dict[str, torch.Tensor]:
    """All matrices and other tensors, by the package."""
    values = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate({**values, "quant_method": "compressed-tensors"})
    stored, found = tensors_of(directory), {}
    modules = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    for module in modules:
        (scheme,) = (
            group
            for group in config.config_groups.values()
            if any(target == "Linear" or re.match(target.removeprefix("re:"), module) for target in group.targets)
        )
        state = {
            name.removeprefix(f"{module}."): stored[name] for name in stored if name.startswith(f"{module}.weight")
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        found[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].float().contiguous()
    rest = {name: value for name, value in stored.items() if not any(name.startswith(f"{it}.weight") for it in modules)}
    return {**rest, **found}


@pytest.mark.parametrize("format_", FORMATS)
def test_the_package_reads_the_same_numbers(tmp_path: Path, format_: str) -> None:
    architecture, sizes = FORMATS[format_]
    source = make_checkpoint(tmp_path / "source", architecture, tokenizer=True, **sizes)
    output = tmp_path / "output"
    lines = quantize(source, output, format=format_)
    dense = make_checkpoint(tmp_path / "dense", architecture, tokenizer=True, **sizes)
    numbers = decompress(output)
    assert numbers.keys() == tensors_of(source).keys()
    save_weights(dense, numbers)
    found, expected = (PagedModel(path).forward(BATCH) for path in (output, dense))
    plain = PagedModel(source).forward(BATCH)
    assert torch.equal(found, expected)
    assert 0 < (found - plain).norm() < 0.35 * plain.norm()
    assert read_model_config(output).quant_method == "compressed-tensors"
    for name in ("tokenizer.json", "generation_config.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    assert not (output / "quantizing").exists() and not list(output.glob("*.new"))
    *layers, summary = lines[1:]
    assert [line["layer"] for line in layers] == [0, 1]
    assert all(0 < line["error"] < 0.35 and 0 < line["held_out_error"] < 0.35 for line in layers)
    assert summary["perplexity_before"] != summary["perplexity_after"]
    assert summary["bytes_after"] == sum(file.stat().st_size for file in output.glob("*.safetensors"))
    assert ("perplexity_with_rounded_activations" in summary) == (format_ != "int4_awq")


@pytest.mark.parametrize(
    ("family", "format_"),
    [("mixtral", "int8_sq"), ("mixtral", "fp8_block"), ("qwen2_moe", "int4_awq"), ("qwen3_moe", "fp8")],
)
def test_experts_are_rounded_and_routers_are_not(tmp_path: Path, family: str, format_: str) -> None:
    """To the numbers that the package reads. Of 47 tokens some experts see too few to be searched for, which is said:
    an expert of all tokens never does."""
    sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "num_hidden_layers": 2}
    source, output = write_family(tmp_path / "source", family, **sizes), tmp_path / "output"
    lines = quantize(source, output, texts_of(samples=2), format=format_)
    assert lines[-1]["perplexity_before"] != lines[-1]["perplexity_after"]
    assert 0 < lines[1]["error"] < 0.25
    few = [name for line in lines[1:-1] for name in line.get("rounded_to_nearest", ())]
    assert len(few) == lines[-1].get("rounded_to_nearest", 0)
    assert all(name.startswith("model.layers.1.mlp.experts.") for name in few) and (format_ == "int4_awq") == bool(few)
    values = json.loads((output / "config.json").read_text())["quantization_config"]
    plain = {name for name in tensors_of(output) if name.endswith((".gate.weight", ".shared_expert_gate.weight"))}
    assert plain and {name.removesuffix(".weight") for name in plain} == {*values["ignore"]} - {"lm_head"}
    dense, numbers = write_family(tmp_path / "dense", family, **sizes), decompress(output)
    assert numbers.keys() == tensors_of(source).keys()
    save_weights(dense, numbers)
    tp_size = 1 if format_ == "fp8_block" else 2
    found, expected = (PagedModel(path, tp_size=tp_size).forward(BATCH) for path in (output, dense))
    assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match="has experts, which --layout modelopt is not for"):
        quantize(source, tmp_path / "other", format="fp8", layout="modelopt")


def test_a_group_ends_where_a_dimension_or_a_rank_does(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    quantize(source, tmp_path / "whole", format="int4_awq", group_size=32)
    shapes = {name.split("layers.0.")[-1]: value.shape[1] for name, value in tensors_of(tmp_path / "whole").items()
              if name.endswith("weight_scale")}  # fmt: skip
    assert shapes["mlp.gate_proj.weight_scale"] == 64 / 32
    assert shapes["mlp.down_proj.weight_scale"] == 112 / 16
    with pytest.raises(CheckpointError, match=r"56 of 112 input features.*groups of 16"):
        PagedModel(tmp_path / "whole", tp_size=2)
    quantize(source, tmp_path / "halves", format="int4_awq", group_size=32, tp_size=2)
    found, split = (PagedModel(tmp_path / "halves", tp_size=size).forward(BATCH) for size in (1, 2))
    assert torch.allclose(found, split, atol=1e-3)
    with pytest.raises(ConfigError, match=r"o_proj.*64 input features, shared out over 16 ranks, are no multiple of 8"):
        quantize(make_checkpoint(tmp_path / "many", num_attention_heads=16, num_key_value_heads=16),
                 tmp_path / "never", format="int4_awq", tp_size=16)  # fmt: skip


@pytest.mark.parametrize("format_", ["fp8", "fp8_block", "int8_sq"])
def test_ranks_that_cannot_share_it_are_refused_before_anything_is_written(tmp_path: Path, format_: str) -> None:
    source, output = make_checkpoint(tmp_path / "source"), tmp_path / "never"
    size, message = (2, r"56 of 112 output .* groups of 128") if format_ == "fp8_block" else (3, "over 3 ranks")
    with pytest.raises(CheckpointError, match=message):
        quantize(source, output, format=format_, tp_size=size)
    assert not output.exists()


def test_devices_share_the_texts_and_come_to_the_same_numbers(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    for name, slots in (("one", [CPU]), ("three", [CPU, CPU, CPU])):
        quantize(source, tmp_path / name, slots=slots, format="int4_awq", kv_cache="fp8")
    one, three = (tensors_of(tmp_path / name) for name in ("one", "three"))
    for name, value in one.items():
        if "packed" in name:
            assert (value == three[name]).float().mean() > 0.99, name
        elif value.dtype.is_floating_point:
            assert torch.allclose(value, three[name], rtol=1e-3), name


@pytest.mark.parametrize("format_", ["fp8", "int4_awq"])
def test_tensorrt_llms_layout_has_the_numbers_of_modelopts(tmp_path: Path, format_: str) -> None:
    """Cut for two ranks: one scale for queries, keys and values in FP8, and one size of groups in W4A16_AWQ."""
    source = make_checkpoint(tmp_path / "source", tokenizer=True)
    more: dict[str, Any] = {"format": format_, "kv_cache": "fp8", "group_size": 32}
    lines = quantize(source, tmp_path / "ours", layout="modelopt", tp_size=2, **more)
    assert quantize(source, tmp_path / "ranks", layout="trtllm", tp_size=2, **more)[1]["error"] == lines[1]["error"]
    plain, *found = (
        PagedModel(tmp_path / name, tp_size=2, kv_format="plain").forward(BATCH) for name in ("source", "ours", "ranks")
    )
    assert torch.equal(*found)
    assert 0 < (found[0] - plain).norm() < 0.35 * plain.norm()
    names = {file.name for file in (tmp_path / "ranks").iterdir()}
    assert names == {"config.json", "generation_config.json", "quantization_report.jsonl", "rank0.safetensors",
                     "rank1.safetensors", "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    values, tensors = (
        json.loads((tmp_path / "ranks" / "config.json").read_text()),
        load_file(tmp_path / "ranks" / "rank1.safetensors"),
    )
    ours = tensors_of(tmp_path / "ours")
    assert values["quantization"]["kv_cache_quant_algo"] == "FP8"
    scales = [float(ours[f"model.layers.0.self_attn.{name}_scale"]) for name in "kv"]
    assert tensors["transformer.layers.0.attention.kv_cache_scaling_factor"].tolist() == [max(scales)]
    if format_ == "fp8":
        assert values["quantization"]["quant_algo"] == "FP8"
        inputs = [float(ours[f"model.layers.0.{name}_proj.input_scale"]) for name in ("self_attn.q", "mlp.down")]
        for name, scale in zip(("attention.qkv", "mlp.proj"), inputs, strict=True):
            assert float(tensors[f"transformer.layers.0.{name}.activation_scaling_factor"]) == scale
        assert lines[1]["error_with_rounded_activations"] > lines[1]["error"]
    else:
        assert values["quantization"] | {"exclude_modules": None} == {
            "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8", "exclude_modules": None, "group_size": 8,
            "has_zero_point": False, "pre_quant_scale": True,
        }  # fmt: skip
        assert tensors["transformer.layers.0.mlp.proj.weights_scaling_factor"].shape == (64, 112 / 2 / 8)


def test_scales_of_activations_are_the_largest_that_were_seen(tmp_path: Path) -> None:
    source, texts = make_checkpoint(tmp_path / "source"), texts_of()
    quantize(source, tmp_path / "ours", texts, format="fp8", layout="modelopt")
    from transformers import AutoModelForCausalLM

    model, seen = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().max()))
    with torch.no_grad():
        for text in texts.samples:
            model(torch.tensor([text]))
    scale = tensors_of(tmp_path / "ours")["model.layers.1.mlp.down_proj.input_scale"]
    assert float(scale) == pytest.approx(float(max(seen)) / 448, rel=1e-4)


@pytest.mark.parametrize(("kind", "most"), [("fp8", 448.0), ("int8", 127.0)])
def test_scales_of_keys_and_values_are_their_largest_numbers(tmp_path: Path, kind: str, most: float) -> None:
    """As they are cached: keys rotated, of the quantized weights."""
    source = make_checkpoint(tmp_path / "source", "Qwen3ForCausalLM")
    texts = texts_of()
    quantize(source, tmp_path / "output", texts, format="fp8", kv_cache=kind)
    tensors = tensors_of(tmp_path / "output")
    scheme = json.loads((tmp_path / "output" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["strategy"], scheme["dynamic"]) == (8, "tensor", False)
    assert scheme["type"] == ("float" if kind == "fp8" else "int")
    from transformers import AutoModelForCausalLM

    dense = make_checkpoint(tmp_path / "dense", "Qwen3ForCausalLM")
    kept = {name: value for name, value in decompress(tmp_path / "output").items() if "_scale" not in name}
    save_weights(dense, kept)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        first = [model(torch.tensor([text])).past_key_values.layers[0] for text in texts.samples]
    for name, largest in (
        ("k_scale", max(float(layer.keys.abs().max()) for layer in first)),
        ("v_scale", max(float(layer.values.abs().max()) for layer in first)),
    ):
        scale = tensors[f"model.layers.0.self_attn.{name}"]
        assert scale.shape == (1,) and scale.dtype == torch.float32
        assert float(scale) == pytest.approx(largest / most, rel=1e-4)
    PagedModel(tmp_path / "output").forward(BATCH)  # read, and left alone


def test_without_texts_weights_alone_are_rounded(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    quantize(source, tmp_path / "with", format="fp8")
    lines = quantize(source, tmp_path / "without", CalibrationTexts(), format="fp8")
    assert "perplexity_after" not in lines[-1] and "error" not in lines[1]
    one, other = tensors_of(tmp_path / "with"), tensors_of(tmp_path / "without")
    assert all(torch.equal(value.float(), other[name].float()) for name, value in one.items())


def test_the_plain_dtype_may_change(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    quantize(source, tmp_path / "output", format="fp8", dtype="bfloat16")
    tensors = tensors_of(tmp_path / "output")
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    assert read_model_config(tmp_path / "output").checkpoint_dtype == "bfloat16"


def test_layers_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Whatever a family has that the plain layer does not compute."""
    with custom_family():
        path = make_custom_checkpoint(tmp_path / "own")
        with pytest.raises(ConfigError, match=r"does not know layers of .* \(FourNormsPlan\)"):
            quantize(path, tmp_path / "output", format="fp8")
        with pytest.raises(ConfigError, match="trtrun convert does not know the layers of"):
            open_source(path, None)
    config = read_model_config(make_checkpoint(tmp_path / "source"))
    assert len(known_plans(config)) == 2
    first = config.layers[0]
    assert isinstance(first, DecoderPlan)
    own = replace(first, attention=replace(first.attention, input_size=7))
    with pytest.raises(ConfigError, match=r"does not know LlamaForCausalLM \(its input_size\):"):
        known_plans(replace(config, layers=(own, *config.layers[1:])))


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    quantize(source, tmp_path / "once", format="fp8")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(tmp_path / "once", tmp_path / "twice", format="fp8")


def test_what_is_missing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Of the last layer, too; the headers tell."""
    source = make_checkpoint(tmp_path / "source")
    tensors, name = tensors_of(source), "model.layers.1.mlp.down_proj.weight"
    shorter = tensors[name][:-1].contiguous()
    for kept, message in (({name: shorter}, r"has shape \[63, 112\]"), ({}, f"has no tensor '{name}'")):
        save_weights(source, {key: value for key, value in tensors.items() if key != name} | kept)
        with pytest.raises(CheckpointError, match=message):
            quantize(source, tmp_path / "output", format="fp8")
        assert not (tmp_path / "output").exists()
