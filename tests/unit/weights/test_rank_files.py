"""TensorRT-LLM's checkpoints are read as they are, cut for any number of ranks, by any number of ranks; and what is
wrong with them is one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from paged import PagedModel
from safetensors.torch import load_file, save_file
from tensorrt_llm_checkpoints import write_dense, write_ranks

from trtrun.errors import CheckpointError
from trtrun.models.config import read_model_config
from trtrun.weights.model_files import hash_model_files
from trtrun.weights.rank_files import open_checkpoint

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
SIZES = {"num_attention_heads": 4, "intermediate_size": 128}
WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Of which four ranks can have whole groups of 32."""


@pytest.mark.parametrize(
    ("architecture", "cut", "kind", "more"),
    [
        ("LlamaForCausalLM", 1, "plain", {"attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", 4, "plain", {"attention_bias": True, "tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", 2, "plain", {}),
        ("Qwen3ForCausalLM", 4, "plain", {}),
        ("MistralForCausalLM", 2, "fp8", {}),
        ("LlamaForCausalLM", 4, "fp8", {}),
        ("Qwen2ForCausalLM", 2, "awq", WIDE),
        ("LlamaForCausalLM", 1, "awq", WIDE),
        ("LlamaForCausalLM", 4, "awq", WIDE),
    ],
)
def test_logits_are_those_of_the_numbers(
    tmp_path: Path, architecture: str, cut: int, kind: str, more: dict[str, Any]
) -> None:
    """With two heads of keys on four ranks, and a vocabulary that no number of ranks divides."""
    source = make_checkpoint(tmp_path / "source", architecture, **{**SIZES, **more})
    numbers = write_ranks(source, tmp_path / "ranks", cut, kind)
    dense = write_dense(source, numbers)
    for size in (1, 2, 4):
        found, expected = (
            PagedModel(path, tp_size=size, kv_format="plain").forward(BATCH) for path in (tmp_path / "ranks", dense)
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dimension", [0, 1])
def test_an_embedding_that_is_cut(tmp_path: Path, dimension: int) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    write_ranks(source, tmp_path / "ranks", 4, embedding=dimension)
    found, expected = (
        PagedModel(path, tp_size=2, kv_format="plain").forward(BATCH) for path in (tmp_path / "ranks", source)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("container", [torch.int8, torch.uint8])
def test_codes_in_a_container_are_codes(tmp_path: Path, container: torch.dtype) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    numbers = write_ranks(source, tmp_path / "ranks", 2, "fp8", container=container)
    found, expected = (
        PagedModel(path, kv_format="plain").forward(BATCH)
        for path in (tmp_path / "ranks", write_dense(source, numbers))
    )
    assert torch.equal(found, expected)


def test_any_slice_is_what_the_whole_has_there(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    numbers = write_ranks(source, tmp_path / "ranks", 4)
    files = open_checkpoint(tmp_path / "ranks")
    for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        whole = numbers[f"model.layers.1.{name}.weight"]
        for rows, columns in ((range(3, 30), range(5, 61)), (range(0, 1), range(63, 64)), (range(7, 32), range(0, 64))):
            read = [(at, it.clone()) for at, it in files.pieces(f"model.layers.1.{name}.weight", (rows, columns))]
            found = torch.cat([piece for _, piece in sorted(read, key=lambda it: it[0])])
            assert torch.equal(found, whole[rows.start : rows.stop, columns.start : columns.stop])
    for name in ("k_scale", "v_scale"):
        (_, scale), = files.pieces(f"model.layers.1.self_attn.{name}", (range(1),))  # fmt: skip
        assert scale.tolist() == [1.5]
    before = hash_model_files(tmp_path / "ranks")
    os.utime(tmp_path / "ranks" / "rank3.safetensors", ns=(0, 1))
    assert hash_model_files(tmp_path / "ranks") != before


def edit(path: Path, **changes: Any) -> None:
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": {"tp_size": 2, "pp_size": 2}}, "config.json: 'mapping' has pp_size 2: only checkpoints"),
        ({"mapping": {"tp_size": "two"}}, "config.json: 'mapping' must have a positive whole number"),
        (
            {"quantization": {"quant_algo": "W4A16_GPTQ"}},
            "config.json: TensorRT-LLM weights with quant_algo 'W4A16_GPTQ'",
        ),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "config.json: kv_cache_quant_algo 'NVFP4'"),
        ({"architecture": "GPTForCausalLM"}, "config.json: unknown"),
        ({"position_embedding_type": "alibi"}, "config.json: position_embedding_type 'alibi'"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_ranks(make_checkpoint(tmp_path / "source", **SIZES), tmp_path / "ranks", 2)
    edit(tmp_path / "ranks", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(tmp_path / "ranks")
    assert str(caught.value).count("config.json") == 1


def test_files_that_are_missing_or_of_another_model(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", **SIZES)
    ranks = tmp_path / "ranks"
    write_ranks(source, ranks, 2)
    edit(ranks, num_attention_heads=8)
    with pytest.raises(CheckpointError, match=r"'transformer.layers.0.attention.qkv.weight' has 64 rows, and"):
        PagedModel(ranks)
    edit(ranks, num_attention_heads=4)
    (ranks / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks rank1.safetensors \(its config.json has tp_size 2\)"):
        PagedModel(ranks)


@pytest.mark.parametrize(
    "inner", ["attention.qkv.weight", "mlp.gate.weight", "mlp.proj.weight", "post_layernorm.weight"]
)
@pytest.mark.parametrize("change", ["dtype", "rows", "columns", "dimensions"])
def test_a_rank_of_another_checkpoint_is_refused(tmp_path: Path, inner: str, change: str) -> None:
    """Longer and shorter ones alike, of which some could be read."""
    write_ranks(make_checkpoint(tmp_path / "source", **SIZES), tmp_path / "ranks", 2)
    file, name = tmp_path / "ranks" / "rank1.safetensors", f"transformer.layers.1.{inner}"
    tensors = load_file(file)
    value = tensors[name]
    last = value[..., : value.shape[-1] // 2]
    tensors[name] = {
        "dtype": value.bfloat16(),
        "rows": torch.cat([value, value]),
        "columns": last.contiguous(),
        "dimensions": value.flatten() if value.dim() > 1 else value[None].contiguous(),
    }[change]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"rank1.safetensors: tensor '{name}' is .* and in rank0.safetensors F32"):
        open_checkpoint(tmp_path / "ranks")


@pytest.mark.parametrize("embedding", [None, 0, 1])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path, embedding: int | None, is_tied: bool) -> None:
    """Rows that are cut off are padding, of which there are fewer than 64 a rank."""
    source = make_checkpoint(tmp_path / "source", tie_word_embeddings=is_tied, **SIZES)
    ranks = tmp_path / "ranks"
    write_ranks(source, ranks, 2, embedding=embedding)
    edit(ranks, vocab_size=199 - 126)
    assert open_checkpoint(ranks).shape("model.embed_tokens.weight") == (73, 64)
    edit(ranks, vocab_size=199 - 128)
    with pytest.raises(CheckpointError, match=r"has (199|200) rows on all ranks, and config.json has vocab_size 71"):
        open_checkpoint(ranks)
