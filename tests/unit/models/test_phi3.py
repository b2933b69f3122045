"""Phi-3 and Phi-4: factors for short and long contexts, heads that are rotated in part, tensors that hold several."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from engines import build_engine
from family_checkpoints import FAMILIES, write_family
from paged import PagedModel
from pipelines import configuration, make_llm, tokens_of
from quantized_checkpoints import FORMATS, store_in_format
from safetensors import safe_open
from test_model_logits import check_logits, prompt_of, reference_greedy

from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.lora.lora_files import LoraFiles
from trtrun.models.config import read_model_config
from trtrun.start.job_spec import JobSpec

ROPE: dict[str, Any] = FAMILIES["phi3"]["rope_parameters"]
LONG: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {name: value for name, value in ROPE.items() if name != "attention_factor"},
}
"""Contexts of 256 tokens, of which the pretraining had 32."""


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, {"partial_rotary_factor": 1.0}], ids=["part", "whole"])
def test_beyond_the_pretrainings_context_long_factors_count(
    tmp_path: Path, tp_size: int, changes: dict[str, Any]
) -> None:
    rope = {**LONG["rope_parameters"], **changes}
    if changes:
        rope |= {name: [*rope[name], 20.0, 24.0] for name in ("short_factor", "long_factor")}
    path = write_family(tmp_path, "phi3", **{**LONG, "rope_parameters": rope})
    check_logits(path, tp_size)
    found = read_model_config(path).rope
    assert found.is_long and found.attention_factor == pytest.approx((1 + 3 / 5) ** 0.5)


def test_the_context_of_a_job_decides_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, prompt = write_family(tmp_path, "phi3", seed=4, **LONG), prompt_of(8, seed=1)

    def text(**scheduler: int) -> list[int]:
        with caplog.at_level(logging.INFO), make_llm(path, None, scheduler=scheduler) as llm:
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            return list(tokens_of(llm.generate([prompt], [sampling]))[0][0])

    short = text(max_seq_len=32)
    assert "target: longrope: short factors, for texts of 32 tokens at most" in caplog.text
    assert "long factors" not in caplog.text
    assert short == reference_greedy(path, prompt, 24)
    long = text()
    assert "target: longrope: long factors, also for short texts; with scheduler.max_seq_len up to 32" in caplog.text
    assert long != short


@pytest.mark.parametrize(("target_context", "wanted"), [(32, False), (33, True)])
def test_texts_of_a_draft_are_no_longer_than_its_targets(tmp_path: Path, target_context: int, wanted: bool) -> None:
    target = write_family(tmp_path / "target", "granite", max_position_embeddings=target_context)
    spec = JobSpec(configuration(target, write_family(tmp_path / "draft", "phi3", **LONG)))
    assert spec.model_of("draft").rope.is_long is wanted
    assert JobSpec(spec.config).with_models(spec.encode_models()).model_of("draft").rope.is_long is wanted


def test_older_files_say_the_same(tmp_path: Path) -> None:
    path = write_family(tmp_path, "phi3", **LONG)
    rope, file = read_model_config(path).rope, path / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    scaling = values.pop("rope_parameters")
    older = {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    del scaling["rope_type"], scaling["original_max_position_embeddings"]
    for kind in ("longrope", "su", "yarn"):
        said = {**values, **older, "rope_scaling": {**scaling, "type": kind}}
        file.write_text(json.dumps(said), encoding="utf-8")
        assert read_model_config(path).rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 5}, r"'short_factor' must be a list of 6 numbers, not"),
        ({"long_factor": None}, r"'long_factor' must be a list of 6 numbers, not None"),
        ({"long_factor": [1.0] * 5 + [0]}, r"'long_factor' must be a positive number, not 0"),
        ({"partial_rotary_factor": 0.7}, r"partial_rotary_factor 0.7 of heads of 16 numbers rotates 11: not an even"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1.5 of heads of 16 numbers rotates 24: not an even"),
        ({"rope_type": "dynamic"}, r"rope type 'dynamic' is not supported"),
    ],
)
def test_what_gives_no_rotation_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_family(tmp_path, "phi3")
    file = path / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, "rope_parameters": {**ROPE, **changes}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_model_config(path)


SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "vocab_size": 224}


@pytest.mark.parametrize(
    ("name", "rotated"),
    [("compressed-tensors FP8 dynamic", 1.0), ("fp8 block", 0.75), ("awq", 0.75), ("gptq with act-order", 1.0)],
)
def test_quantized_tensors_that_hold_several_are_cut(tmp_path: Path, name: str, rotated: float) -> None:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": rotated}
    dense = write_family(tmp_path / "dense", "phi3", rope_parameters=rope, **SIZES)
    stored = tmp_path / "stored"
    shutil.copytree(dense, stored)
    store_in_format(dense, stored, FORMATS[name])
    batch = [[(0, 0, prompt_of(12))]]
    for tp_size in (1, 2):
        found, expected = (PagedModel(path, tp_size=tp_size).forward(batch) for path in (stored, dense))
        assert torch.equal(found, expected)


def test_adapters_are_refused_where_heads_are_rotated_in_part(tmp_path: Path) -> None:
    dense = write_family(tmp_path / "dense", "phi3", head_dim=64, rope_parameters=WIDE, **SIZES)
    adapter = make_adapter(tmp_path / "adapter", dense, modules=["qkv_proj"])
    with pytest.raises(CheckpointError, match="adapters of Phi3ForCausalLM are not supported where heads are rotated"):
        LoraFiles(adapter, read_model_config(dense), 8)
    with pytest.raises(CheckpointError, match="adapters of Phi3ForCausalLM are not supported where heads are rotated"):
        make_llm(dense, None, adapters={"own": str(adapter)})
    with pytest.raises(CheckpointError, match="adapters of Phi3ForCausalLM are not supported where heads are rotated"):
        make_llm(dense, None, adapter_slots={"max_loaded": 2})


WIDE: dict[str, Any] = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_an_engine_holds_permuted_heads(tmp_path: Path, quantization: str) -> None:
    source = write_family(tmp_path / "source", "phi3", dtype=torch.bfloat16)
    engine = build_engine(source, tmp_path / "engine", 2, quantization)
    model, expected = (
        PagedModel(path, torch.bfloat16, tp_size=2, quantization=quantization) for path in (engine, source)
    )
    batch = [[(0, 0, prompt_of(12))]]
    assert torch.equal(model.forward(batch), expected.forward(batch))
    with safe_open(engine / "rank1.safetensors", "pt") as file:
        held = "weight" if quantization == "none" else "codes"
        assert f"model.layers.0.self_attn.qkv_proj.{held}" in file.keys()  # noqa: SIM118 (not a dict)


def test_made_up_weights_are_one_model_on_every_rank(tmp_path: Path) -> None:
    path = write_family(tmp_path, "phi3")
    (path / "model.safetensors").unlink()
    batch = [[(0, 0, prompt_of(20))]]
    one, two = (PagedModel(path, tp_size=size, load_format="dummy") for size in (1, 2))
    torch.testing.assert_close(one.forward(batch), two.forward(batch), rtol=1e-4, atol=1e-5)
