"""Quantized checkpoints that are refused, each in one line, before a weight is read; and files that lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedModel
from pipelines import make_llm
from quantized_checkpoints import (
    awq_config,
    compressed,
    edit_config,
    edit_quantization,
    edit_tensors,
    float_args,
    gptq_config,
    int_args,
    make_pair,
)
from safetensors.torch import load_file

from trtrun.errors import CheckpointError, ConfigError
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.stored import layout
from trtrun.linear.stored.byte_layouts import Fp8Layout, Int8Layout
from trtrun.linear.stored.layout import StoredLinear
from trtrun.linear.stored.settings import ModuleNames
from trtrun.loading.weight_check import check_model_weights, check_split
from trtrun.models.config import read_model_config
from trtrun.weights.weight import Share

DOWN = "model.layers.1.mlp.down_proj"

GROUP = compressed(float_args("tensor"), None, "float-quantized")["config_groups"]["group_0"]

REFUSED: list[tuple[Mapping[str, Any], str]] = [
    (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": "128"},
        "'group_size' .* must be a positive whole number or -1, not '128'",
    ),
    (compressed(int_args("channel"), None, "int-quantized"), "int-quantized weights with num_bits 4 are not supported"),
    (compressed(int_args("group", num_bits=8), None, "int-quantized"), "with strategy 'group' are not supported"),
    (
        compressed(int_args("channel", num_bits=8, symmetric=False), None, "int-quantized"),
        "with symmetric False are not supported; known: True",
    ),
    *((gptq_config(128, bits=bits), f"gptq weights with bits {bits} are not supp") for bits in (2, 3, 5, 6)),
    (
        gptq_config(128, checkpoint_format="gptq_p"),
        "gptq weights with format 'gptq_p' are not supported; known: gptq, g",
    ),
    (gptq_config(128, checkpoint_format="marlin"), "gptq weights with format 'marlin' are not supported"),
    (gptq_config(128, is_marlin_format=True), "gptq weights with is_marlin_format True are not supported"),
    (gptq_config(128, pack_dtype="int16"), "gptq weights with pack_dtype 'int16' are not supported; known: int32"),
    (gptq_config(128, desc_act="yes"), "gptq weights with desc_act 'yes' are not supported; known: True, False"),
    (gptq_config(128, dynamic={"+:.*down": {"bits": 8}}), r"dynamic: '\+:\.\*down': {'bits': 8}\) are not supported"),
    (gptq_config(128, dynamic={"-:(": {}}), "is no expression"),
    (
        gptq_config(128, modules_in_block_to_quantize=[["q_proj"]]),
        "with modules_in_block_to_quantize .* are not suppor",
    ),
    *(
        (compressed({**int_args("group"), "num_bits": bits}, None, "pack-quantized"), f"num_bits {bits} are not supp")
        for bits in (2, 3, 5, 6, 7)
    ),
    (
        compressed(int_args("tensor"), None, "pack-quantized"),
        "with strategy 'tensor' are not supported; known: group, ",
    ),
    (compressed(int_args("group"), None, "pack-quantized"), "'group_size' .* must be a positive .*, not None"),
    (
        compressed(int_args("group", group_size=128, actorder="other"), None, "pack-quantized"),
        "with actorder 'other' are not supported; known: null, weight",
    ),
    (compressed({**int_args("group"), "type": "float"}, None, "pack-quantized"), "with type 'float' are not supported"),
    (awq_config(128, version="gemv"), "awq weights with version 'gemv' are not supported; known: gemm"),
    (awq_config(128, version="GEMV_FAST"), "awq weights with version 'gemv_fast' are not supported; known: gemm"),
    (awq_config(128, version="marlin"), "awq weights with version 'marlin' are not supported"),
    (awq_config(128, backend="llm-awq"), "awq weights with backend 'llm-awq' are not supported; known: autoawq"),
    (awq_config(128, bits=3), "awq weights with bits 3 are not supported; known: 4"),
    (awq_config(128, zero_point=False), "awq weights with zero_point False are not supported; known: True"),
    (awq_config(0), "'group_size' of quantization_config must be a positive whole number or -1, not 0"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        r"quantized weights \('bitsandbytes'\) are not supported; kn",
    ),
    ({"load_in_4bit": True}, r"quantized weights \('unknown'\) are not supported"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 weights with fmt 'e5m2' are not supported; known: e4m3"),
    ({"quant_method": "fp8", "activation_scheme": "block"}, "fp8 weights with activation_scheme 'block' are not suppo"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"must be two sizes such as \[128, 128\], not \[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"must be two sizes such as \[128, 128\], not \[128, 0\]"),
    ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' .* must be a list of mod"),
    ({"quant_method": "fp8", "ignored_layers": ["re:(" * 2]}, "is no expression"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        "modelopt weights with quant_algo 'NVFP4_AWQ' are not supported;",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "x"}}},
        "modelopt weights of a.b with quant_algo 'x' are not supported; known: FP8,",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": 4}},
        "'a.b' of quantization_config must be an object, not 4",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "modelopt NVFP4 weights with group_size 32 are not supported; known: 16",
    ),
    ({"quant_method": "modelopt"}, "modelopt weights with quant_algo None are not supported; known: FP8, FP8_PER"),
    ({"quant_method": "modelopt", "quantization": 4}, "'quantization' of quantization_config must be an object, not 4"),
    (compressed({}, None, "float-quantized", config_groups={}), "'config_groups' .* must name groups of modules"),
    (compressed({}, None, "float-quantized", config_groups={"a": 1}), "'config_groups' .* must name groups of modules"),
    (compressed(float_args("tensor"), None, "mxfp6-pack-quantized"), "in format 'mxfp6-pack-quantized' are not suppor"),
    (compressed(float_args("tensor"), None, "marlin-24"), "compressed-tensors weights in format 'marlin-24' are not s"),
    (compressed(float_args("tensor"), None, "dense"), "compressed-tensors weights in format 'dense' are not supported"),
    (
        compressed(
            float_args("tensor"), None, "mixed-precision", config_groups={"a": {**GROUP, "format": "sparse-24"}}
        ),
        "compressed-tensors weights in format 'sparse-24' are not supported",
    ),
    (
        compressed(float_args("tensor"), None, "float-quantized", sparsity_config={"format": "sparse-24-bitmask"}),
        "compressed-tensors weights with sparsity 'sparse-24-bitmask' are not supported; known: dense",
    ),
    (
        compressed(float_args("tensor"), None, "float-quantized", transform_config={"config_groups": {"a": 1}}),
        "with a transform_config",
    ),
    (
        compressed(float_args("token"), None, "float-quantized"),
        "with strategy 'token' are not supported; known: tensor",
    ),
    (
        compressed({**float_args("tensor"), "num_bits": 4}, None, "float-quantized"),
        "float weights with num_bits 4 are not supported; known: 8",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, config: Mapping[str, Any], message: str) -> None:
    """From config.json alone, with the file's name; and from the file that ModelOpt writes."""
    path = make_pair(tmp_path, "fp8")[0]
    edit_config(path, quantization_config=config)
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(path)
    assert "\n" not in str(caught.value) and str(path / "config.json") in str(caught.value)


def test_modelopts_own_file_is_read_where_config_json_says_nothing(tmp_path: Path) -> None:
    path = make_pair(tmp_path, "modelopt FP8")[0]
    assert read_model_config(path).quant_method == "modelopt"
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: modelopt weights with quant_algo 'W4A8_AWQ'"):
        read_model_config(path)
    edit_config(path, quantization_config={"quant_method": "fp8"})
    assert read_model_config(path).quant_method == "fp8"


@pytest.mark.parametrize(
    ("name", "sizes", "tp_size", "message"),
    [
        (
            "fp8 block",
            {"intermediate_size": 384},
            2,
            r"192 of 384 output features of model\.layers\.0\.mlp\.gate_proj\.weight would lie on a device, but groups "
            "of 128 share a scale: use fewer devices",
        ),
        (
            "fp8 block",
            {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4},
            4,
            "96 of 384 output f",
        ),
        (
            "awq",
            {"intermediate_size": 320},
            2,
            r"160 of 320 input features of .*down_proj\.weight .* groups of 64",
        ),
        (
            "awq of whole rows",
            {"intermediate_size": 264},
            2,
            r"132 of 264 output features .* but 8 lie in one word",
        ),
    ],
)
def test_groups_that_cannot_be_cut_are_refused_with_the_numbers(
    tmp_path: Path, name: str, sizes: dict[str, int], tp_size: int, message: str
) -> None:
    """Before a weight is read, by every rank, and by those who only look."""
    path = make_pair(tmp_path, name, **sizes)[0]
    config = read_model_config(path)
    for rank in range(tp_size):
        with pytest.raises(CheckpointError, match=message):
            check_split(config, Share(rank, tp_size), "float32", "cpu", QUANTIZATIONS.get("none"))
    with pytest.raises(CheckpointError, match=message):
        PagedModel(path, tp_size=tp_size)
    PagedModel(path)


@pytest.mark.parametrize("name", ["fp8", "int8", "fp8_weight_only"])
def test_a_quantization_in_the_yaml_file_does_not_go_with_a_quantized_checkpoint(tmp_path: Path, name: str) -> None:
    path, dense = make_pair(tmp_path, "fp8 block")
    with pytest.raises(
        (ConfigError, CheckpointError), match=rf"quantization {name} is for plain weights, .* \(fp8\): le"
    ):
        make_llm(dense, path, quantization=name)
    make_llm(dense, path).close()


def test_tensors_are_checked_before_the_first_is_read(tmp_path: Path) -> None:
    path = make_pair(tmp_path, "fp8 block")[0]
    kept = load_file(path / "model.safetensors")
    name = f"{DOWN}.weight_scale_inv"
    for changes, message in (
        ({name: None}, f"has no tensor '{name}'"),
        ({name: torch.ones(4, 2)}, rf"tensor '{name}' has shape \[4, 2\], but config.json calls for \[2, 4\]"),
        (
            {name: torch.ones(2, 4, dtype=torch.int32)},
            f"tensor '{name}' has dtype I32, which is not supported; known: F32",
        ),
        ({f"{DOWN}.weight": torch.ones(256, 512)}, "has dtype F32, which is not supported; known: F8_E4M3"),
        (
            {"lm_head.weight": kept[f"{DOWN}.weight"][:224, :256].clone()},
            "'lm_head.weight' has dtype F8_E4M3, which is no",
        ),
        ({f"{DOWN}.weight": torch.zeros(256, 510).to(torch.float8_e4m3fn)}, r"has shape \[256, 510\]"),
    ):
        edit_tensors(path, {**kept, **changes})
        with pytest.raises(CheckpointError, match=message):
            check_model_weights(path, read_model_config(path), 1)
        with pytest.raises(CheckpointError, match=message):
            PagedModel(path)


@pytest.mark.parametrize(
    ("end", "value"),
    [
        ("weight_scale_inv", torch.full((2, 4), torch.nan)),
        ("weight", torch.full((256, 512), torch.nan).to(torch.float8_e4m3fn)),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, end: str, value: torch.Tensor) -> None:
    path = make_pair(tmp_path, "fp8 block")[0]
    edit_tensors(path, {f"{DOWN}.{end}": value})
    with pytest.raises(CheckpointError, match=rf"tensor '{DOWN}\.{end}' holds NaN"):
        PagedModel(path)


@pytest.mark.parametrize("value", [-1, 4])
def test_groups_that_are_not_there_are_refused(tmp_path: Path, value: int) -> None:
    path = make_pair(tmp_path, "compressed-tensors W4A16 with act-order")[0]
    order = load_file(path / "model.safetensors")[f"{DOWN}.weight_g_idx"]
    order[7] = 2 * value
    edit_tensors(path, {f"{DOWN}.weight_g_idx": order})
    message = rf"{DOWN}\.weight: its features are of groups .*, and there are 8 groups"
    with pytest.raises(CheckpointError, match=message):
        PagedModel(path)


def test_scales_that_are_kept_must_be_finite_in_the_dtype_of_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredLinear, "can_keep", lambda self, dtype, device_type: True)
    monkeypatch.setattr(layout, "has_int4_products", lambda device_type: True)
    path = make_pair(tmp_path, "compressed-tensors W4A16")[0]
    scale = load_file(path / "model.safetensors")[f"{DOWN}.weight_scale"].float()
    scale[200, 1] = 1e5
    edit_tensors(path, {f"{DOWN}.weight_scale": scale})
    PagedModel(path, torch.bfloat16)
    with pytest.raises(CheckpointError, match=rf"'{DOWN}\.weight' holds NaN or infinite values in float16"):
        PagedModel(path, torch.float16)


def test_codes_that_are_kept_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredLinear, "can_keep", lambda self, dtype, device_type: True)
    path = make_pair(tmp_path, "fp8")[0]
    codes = load_file(path / "model.safetensors")[f"{DOWN}.weight"].float()
    codes[200, 500] = torch.nan
    edit_tensors(path, {f"{DOWN}.weight": codes.to(torch.float8_e4m3fn)})
    with pytest.raises(
        CheckpointError, match=rf"tensor '{DOWN}\.weight' holds NaN or infinite values in float8_e4m3fn"
    ):
        PagedModel(path, torch.bfloat16)


def test_an_order_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    path = make_pair(tmp_path, "gptq with act-order")[0]
    edit_quantization(path, desc_act=False)
    with pytest.raises(
        CheckpointError, match=r"proj\.g_idx has groups in another order, and desc_act of quan.* is false"
    ):
        PagedModel(path)
    ordered = make_pair(tmp_path / "ordered", "gptq")[0]
    edit_tensors(ordered, {f"{DOWN}.g_idx": None})
    PagedModel(ordered)
    edit_quantization(ordered, desc_act=True)
    with pytest.raises(CheckpointError, match=rf"has no tensor '{DOWN}\.g_idx'"):
        PagedModel(ordered)


def test_numbers_that_overflow_the_dtype_are_refused(tmp_path: Path) -> None:
    path = make_pair(tmp_path, "fp8 block")[0]
    edit_tensors(path, {f"{DOWN}.weight_scale_inv": torch.full((2, 4), 1e4)})
    PagedModel(path, torch.bfloat16)
    with pytest.raises(CheckpointError, match=rf"tensor '{DOWN}\.weight' holds NaN or infinite values in float16"):
        PagedModel(path, torch.float16)


def test_parts_of_one_product_are_quantized_alike(tmp_path: Path) -> None:
    path = make_pair(tmp_path, "fp8 block")[0]
    edit_quantization(path, modules_to_not_convert=["model.layers.0.self_attn.q_proj"])
    with pytest.raises(CheckpointError, match=r"q_proj\.weight, .*k_proj\.weight, .* are multiplied with as one, but"):
        PagedModel(path)


NAMES = ("lm_head", "model.layers.1.mlp.gate_proj", "model.layers.10.mlp.gate_proj", "model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("lm_head", {0}),
        ("model.layers.1", {1, 3}),
        ("model.layers.1.", {1, 3}),
        ("mlp.gate", set()),
        ("gate_proj", {1, 2}),
        ("re:.*gate_proj$", {1, 2}),
        ("re:gate_proj", set()),
        ("re:model.layers.1[.]", {1, 3}),
        ("Linear", {0, 1, 2, 3}),
        ("LlamaMLP", set()),
        ("model.layers.1.*", set()),
    ],
)
def test_lists_of_modules(entry: str, found: set[int]) -> None:
    assert {at for at, name in enumerate(NAMES) if name in ModuleNames([entry])} == found


def test_an_expression_that_takes_too_long_is_refused() -> None:
    """Python's `re` would take longer than anybody waits for the name that does not match."""
    assert NAMES[1] not in ModuleNames([r"re:(\w+\.?)+!"])
    nested = f"re:{'(?:' * 40}.{'{1,2})' * 40}!"
    with pytest.raises(CheckpointError, match=r"in quantization_config is no expression .* more than 1048576 steps"):
        assert NAMES[1] in ModuleNames([nested])


def test_lists_of_globs() -> None:
    globs = ModuleNames(["model.layers.1.*", "lm_hea?"], are_globs=True)
    assert [name in globs for name in NAMES] == [True, True, False, True]


def test_the_most_specific_group_counts(tmp_path: Path) -> None:
    """A name, then an expression, then a class; a group without weights leaves them plain."""
    path = make_pair(tmp_path, "compressed-tensors FP8")[0]
    plain = {"targets": [DOWN], "weights": None}
    channel = {**GROUP, "targets": ["re:.*(gate|up|down)_proj"], "weights": float_args("channel")}
    edit_quantization(path, config_groups={"a": GROUP, "b": channel, "c": plain})
    stored = read_model_config(path).stored
    assert stored is not None and stored("lm_head.weight") is None and stored(f"{DOWN}.weight") is None
    found = {
        key: stored(f"model.layers.0.{key}.weight") for key in ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj")
    }
    strategies = [getattr(getattr(held, "layout", None), "strategy", None) for held in found.values()]
    assert strategies == ["channel", "channel", "tensor"]


def test_what_activations_were_to_be_rounded_by_is_known(tmp_path: Path) -> None:
    """For products to come that round them, too."""
    expected = {
        "fp8 block": "group",
        "fp8": "static",
        "modelopt FP8": "static",
        "modelopt FP8 per channel": "token",
        "compressed-tensors FP8": "static",
        "compressed-tensors FP8 dynamic": "token",
        "compressed-tensors FP8 block": "group",
        "compressed-tensors W8A8": "token",
        "compressed-tensors W8A8 of old files": "static",
    }
    for name, activations in expected.items():
        config = read_model_config(make_pair(tmp_path / name, name)[0])
        weight = config.layers[0].weights()[2]
        held = config.quantization_of(weight, QUANTIZATIONS.get("none"))
        assert isinstance(held, StoredLinear) and isinstance(held.layout, Fp8Layout | Int8Layout)
        assert held.layout.activations == activations, name
