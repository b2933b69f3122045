"""Gemma 4: what config.json says of its layers, as released and as transformers saves it; what layers share; and what
is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from paged import PagedModel
from safetensors.torch import load_file
from test_model_logits import check_logits, prompt_of

from trtrun.configuration.drafting.head_methods import AssistantSection
from trtrun.errors import CheckpointError
from trtrun.heads.heads import read_heads
from trtrun.kvcache.specs import PagedKeysAndValues, SharedKeysAndValues
from trtrun.kvcache.store import KVStore
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.weights.weight import Share

RELEASED: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    },
    "31B": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
    },
    "26B-A4B": {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "unified": {
        "model_type": "gemma4_unified_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    },
}  # fmt: skip
"""Sizes of them and of a like one; what is not here is what both leave out."""


def read(path: Path, text: dict[str, Any]) -> ModelConfig:
    path.mkdir(exist_ok=True)
    kind = "Gemma4Unified" if "unified" in text.get("model_type", "") else "Gemma4"
    values = {"architectures": [f"{kind}ForConditionalGeneration"], "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps({**values, "text_config": text}), encoding="utf-8")
    return read_model_config(path)


@pytest.mark.parametrize("name", RELEASED)
def test_layers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """By what is released, and by what transformers saves of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = read(tmp_path / "released", RELEASED[name])
    reference = AutoConfig.for_model(**{"model_type": "gemma4_text", **RELEASED[name]})
    assert read(tmp_path / "saved", json.loads(reference.to_json_string(use_diff=False))).layers == config.layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    expected = {key for key in shapes if ".experts." not in key and key != "lm_head.weight"}
    found = {part.name: part.shape for weight in config.weights for part in weight.parts}
    assert {key for key in found if ".experts." not in key} == expected
    assert all(found[key] == shapes[key] for key in expected)
    shared = reference.num_hidden_layers - reference.num_kv_shared_layers
    for index, (layer, kind) in enumerate(zip(config.layers, reference.layer_types, strict=True)):
        own, kept = reference.per_layer_config[index], layer.keeps(Share(0, 1))[0]
        window = reference.sliding_window if kind == "sliding_attention" else None
        if index < shared:
            assert kept == PagedKeysAndValues(own.num_key_value_heads, own.head_dim, window)
        else:
            last = max(before for before in range(shared) if reference.layer_types[before] == kind)
            assert kept == SharedKeysAndValues(last)


def test_layers_that_share_take_no_memory(tmp_path: Path) -> None:
    config = read_model_config(write_family(tmp_path, "gemma4_small"))
    kept = config.keeps(Share(0, 1))
    size = KVStore.bytes_per_block(kept, 16, torch.float32)
    assert size == 2 * 16 * 4 * (2 * 2 * 16 + 2 * 40) == KVStore.bytes_per_block(kept[:3], 16, torch.float32)
    store = KVStore(kept, 3, 16, torch.float32, torch.device("cpu"))
    assert store.num_bytes == 3 * size
    assert [store.layer(index).data_ptr() for index in (3, 4)] == [store.layer(index).data_ptr() for index in (2, 1)]


def test_tokens_are_copied_in_layers_of_each_size(tmp_path: Path) -> None:
    """One of which a kernel attends in, that lays tiles out in its own way, and one for which there is none."""
    paged, tokens = PagedModel(write_family(tmp_path, "gemma4_small"), block_size=16), prompt_of(7)
    paged.forward([[(0, 0, tokens[:6])]])
    expected = paged.forward([[(0, 6, tokens[6:])]])
    source, target = (torch.full((6,), paged._table(row, 7)[0]) for row in (0, 1))
    paged.models[0].copy_tokens(paged.stores[0], source, target, torch.arange(6))
    assert torch.equal(paged.forward([[(1, 6, tokens[6:])]]), expected)


def test_norms_of_heads_round_once(tmp_path: Path) -> None:
    """In half precision; of values, too, in a layer whose values are its keys."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    path = write_family(tmp_path, "gemma4_text", dtype=torch.bfloat16)
    attention = PagedModel(path, torch.bfloat16).models[0]._layers[1].layer.attention  # type: ignore[attr-defined]
    weights = load_file(path / "model.safetensors")
    heads = torch.randn(30, 5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [*attention.head_norm(heads).split([4, 1], dim=1), attention.value_norm(heads[:, 4:])]
    for name, part, given in zip("qkv", found, (heads[:, :4], heads[:, 4:], heads[:, 4:]), strict=True):
        expected = Gemma4RMSNorm(40, eps=1e-6, with_scale=name != "v")
        if name != "v":
            expected.weight.data = weights[f"model.layers.1.self_attn.{name}_norm.weight"]
        assert torch.equal(part, expected(given)), name


def test_the_last_layer_sees_all(tmp_path: Path) -> None:
    """Whatever config.json says."""
    path = write_family(tmp_path, "gemma4_small", num_kv_shared_layers=0)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    values["layer_types"][-1] = "sliding_attention"
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert read_model_config(path).windows == (7, None, 7, 7, None)
    check_logits(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported; known: gelu_pytorch_tanh"),
        ({"num_kv_shared_layers": 30}, "'num_kv_shared_layers' must be fewer than 30 layers, not 30"),
        ({"num_kv_shared_layers": 25}, "'num_kv_shared_layers' is 25, but no full_attention layer is before these"),
        ({"vocab_size_per_layer_input": 100}, "'vocab_size_per_layer_input' is 100, fewer than there are tokens"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "'top_k_experts' is 3, more than there"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "must be a multiple of the 3 heads of keys"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "'per_layer_config' must name head_dim and num_key"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "has other heads in layers of the same type"),
    ],
)
def test_what_layers_cannot_be_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, values)


@pytest.mark.parametrize(
    ("name", "hidden_size", "num_heads", "ordered"),
    [("E2B", 256, 4, True), ("26B-A4B", 1024, 16, False), ("31B", 1024, 32, False), ("unified", 1024, 16, False)],
)
def test_assistants_of_such_sizes_are_read(
    tmp_path: Path, name: str, hidden_size: int, num_heads: int, ordered: bool
) -> None:
    """Tensors are those of transformers' model, on one rank and on four."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target, text = read(tmp_path / "target", RELEASED[name]), dict(RELEASED[name])
    for key in ("enable_moe_block", "use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size"):
        text.pop(key, None)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    text |= {"num_hidden_layers": 4, "layer_types": kinds, "hidden_size": hidden_size, "intermediate_size": 2048}
    text |= {"num_attention_heads": num_heads, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0}
    text |= {"vocab_size_per_layer_input": 0}
    kind = "gemma4_unified_assistant" if name == "unified" else "gemma4_assistant"
    config = AutoConfig.for_model(
        kind, backbone_hidden_size=target.hidden_size, text_config=text, use_ordered_embeddings=ordered
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {key: value.shape for key, value in model.state_dict().items() if key != "lm_head.weight"}
    write_headers(tmp_path / "assistant", shapes)
    config.save_pretrained(tmp_path / "assistant")
    plan = read_heads(tmp_path / "assistant", target, AssistantSection(method="gemma4_mtp"), 4)
    found = {part.name: part.shape for weight in plan.weights for part in weight.parts}
    assert found == {key: tuple(shape) for key, shape in shapes.items() if not key.endswith("token_ordering")}
    last = {kind: index for index, kind in enumerate(target_kinds(target)) if kind in kinds}
    assert plan.describe().endswith(f"layers {last['sliding_attention']} and {last['full_attention']}")


def write_headers(path: Path, shapes: dict[str, Any]) -> None:
    """A file with tensors of these shapes, which take no room: nothing is written behind its header."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        kind, size = ("I64", 8) if name.endswith("token_ordering") else ("BF16", 2)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size * shape.numel()]}
        end += size * shape.numel()
    told = json.dumps(header).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.truncate(8 + len(told) + end)


def target_kinds(target: ModelConfig) -> list[str]:
    """Types of the target's layers that have keys and values of their own."""
    kept = [layer.keeps(Share(0, 1))[0] for layer in target.layers]
    own = [one for one in kept if isinstance(one, PagedKeysAndValues)]
    return ["full_attention" if one.window is None else "sliding_attention" for one in own]
