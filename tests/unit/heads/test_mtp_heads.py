"""Heads for multi-token prediction in the target's own files: what they propose is what the layer of transformers says,
and no text depends on it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import check_proposals, check_trees
from family_checkpoints import write_family
from medusa_heads import Proposals
from mtp_heads import FAMILIES, MTPHead
from pipelines import make_llm, prompt_of, run_alone, tokens_of
from quantized_checkpoints import FORMATS, RATES, leave_plain, store_in_format
from safetensors.torch import load_file, save_file

from launch.jobs.placement.memory import JobMemory
from launch.jobs.plan.proposal import has_own_heads
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.errors import TrtrunError
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.start import engine_maker
from trtrun.start.job_spec import JobSpec

PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33)]
SAMPLING = [SamplingParams(max_tokens=30, temperature=0.8 * (row == 1), seed=row) for row in range(3)]
TIGHT: dict[str, Any] = {
    "scheduler": {"max_batch_size": 3, "max_num_tokens": 40},
    "kv_cache": {"max_tokens": 96, "block_size": 4},
}
"""Prompts come in chunks, and rows are preempted."""


def mtp(**options: Any) -> dict[str, Any]:
    """The section of the method."""
    return {"method": "mtp", **options}


def nested(source: Path, path: Path) -> Path:
    """The target as files of a model that sees, too, have it."""
    shutil.copytree(source, path)
    weights = load_file(path / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    save_file(moved, path / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text(encoding="utf-8"))
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_the_layer_of_transformers_says(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy rows and sampled ones, more tokens than there are layers, behind prefixes that were there before."""
    target = write_family(tmp_path / "target", family, seed=1)
    head = MTPHead(target)
    assert not has_own_heads(target)
    head.write(target)
    assert has_own_heads(target)
    seen, run = Proposals(monkeypatch, EagleDrafter), target
    if family == "qwen3_5_text":
        run = nested(target, tmp_path / "nested")
    if family == "glm4_moe":  # graphs are played
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    longer = [[*PROMPTS[2][:24], *prompt_of(5, seed=9)], [*PROMPTS[2], 7]]
    short = [SamplingParams(max_tokens=7, temperature=0.9 * (row % 2), seed=row) for row in range(3)]
    with make_llm(run, speculation=mtp(draft_len=3), **TIGHT) as llm:
        found = [*llm.generate(PROMPTS, short), *llm.generate(longer, short[:2])]
    assert sum(one.statistics.num_cached_prompt_tokens for output in found for one in output.completions) >= 16
    assert check_proposals(seen, target, head) > 15


def check_same_drafts(dense: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens are drafted from both."""
    made = []
    for path in (dense, stored):
        with monkeypatch.context() as patch:
            seen = Proposals(patch, EagleDrafter)
            with make_llm(path, dtype="bfloat16", speculation=mtp(draft_len=3)) as llm:
                llm.generate(PROMPTS[:1], SAMPLING[:1])
        made.append(seen.seen)
    assert made[0] == made[1] and len(made[0]) > 20


def test_a_layer_is_read_as_files_have_quantized_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are those of the same numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4}
    dense = write_family(tmp_path / "dense", "qwen3_5_text", dtype=torch.bfloat16, num_hidden_layers=2, **sizes)
    MTPHead(dense).write(dense)
    stored = tmp_path / "stored"
    shutil.copytree(dense, stored)
    store_in_format(dense, stored, leave_plain(FORMATS["compressed-tensors FP8 dynamic"], *RATES))
    assert "mtp.layers.0.self_attn.q_proj.weight_scale" in load_file(stored / "model.safetensors")
    check_same_drafts(dense, stored, monkeypatch)


@pytest.mark.parametrize("left", [("eh_proj",), ("layers.2.",)])
def test_what_quantized_files_have_plainly_is_read_so(
    tmp_path: Path, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block FP8 without a word of what is plain, as DeepSeek-V3 is published: all of the layer, or what joins."""
    sizes = {"kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    dense = write_family(tmp_path / "dense", "deepseek_v3", dtype=torch.bfloat16, num_hidden_layers=2, **sizes)
    MTPHead(dense).write(dense)
    stored = tmp_path / "stored"
    shutil.copytree(dense, stored)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    store_in_format(dense, stored, replace(FORMATS["fp8 block"], config=config, plain=("head", *left)))
    assert not any("eh_proj.weight_scale_inv" in name for name in load_file(stored / "model.safetensors"))
    check_same_drafts(dense, stored, monkeypatch)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_trees_are_what_the_layer_says(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, options = write_family(tmp_path, family, seed=1), {"eagle_topk": 2, "draft_len": 3}
    head = MTPHead(target)
    head.write(target)
    seen = Proposals(monkeypatch, EagleDrafter)
    with make_llm(target, speculation=mtp(**options), **TIGHT) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=7))
    assert check_trees(seen, target, head, options) > 10


@pytest.mark.parametrize(("family", "draft_len"), list(zip(FAMILIES, (3, 5, 1, 3, 4), strict=True)))
def test_texts_are_plain_decodings(tmp_path: Path, family: str, draft_len: int) -> None:
    """In bfloat16, with a layer that knows two of three texts by heart, among rows that are preempted."""
    target = write_family(tmp_path, family, seed=1, dtype=torch.bfloat16)
    with make_llm(target, dtype="bfloat16", kv_cache={"block_size": 4}) as llm:
        alone = run_alone(llm, PROMPTS, SAMPLING)
    head = MTPHead(target)
    head.learn(target, [[*prompt, *texts[0]] for prompt, texts in zip(PROMPTS[:2], alone[:2], strict=True)])
    head.write(target)
    with make_llm(target, speculation=mtp(draft_len=draft_len), dtype="bfloat16", **TIGHT) as llm:
        found = llm.generate(PROMPTS, SAMPLING)
        assert tokens_of(found) == alone
        assert sum(one.statistics.num_preemptions for output in found for one in output.completions) > 0
        assert llm.statistics()["num_accepted_draft_tokens"] > 15


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "deepseek_v3", "glm4_moe"])
def test_made_up_weights_draft_and_are_counted(tmp_path: Path, family: str) -> None:
    """From config.json alone, and in bytes as plans say."""
    target = write_family(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    section = {"model": str(target), "devices": ["cpu:0"], "load_format": "dummy"}
    config = make_config(
        {"target": section, "speculation": mtp(pacing="fixed"), "kv_cache": {"max_tokens": 512}, "threads": 1}
    )
    memory = JobMemory.read(JobSpec(config))
    with LLM(config=config) as llm:
        (rank,) = llm.report.ranks
        llm.generate(PROMPTS, SamplingParams(max_tokens=9))
        assert llm.statistics()["num_draft_tokens"] > 20
    drafted, whole = memory.shard_bytes(0)
    assert rank.shard_bytes == drafted + whole and drafted > 0
    assert rank.kv_bytes % memory.demand(0).bytes_per_block == 0
    assert rank.working_bytes == memory.working_bytes(0)


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    """In a line that says what to do."""
    paths = {family: write_family(tmp_path / family, family) for family in ("qwen3_5_text", "glm4_moe", "seed_oss")}
    none = write_family(tmp_path / "none", "glm4_moe", num_mtp_layers=0)
    head = MTPHead(paths["glm4_moe"])
    head.layer.eh_proj.weight.data = head.layer.eh_proj.weight.data[:, :64]
    head.write(paths["glm4_moe"])
    for path, options, said in (
        (paths["qwen3_5_text"], mtp(), "^heads: .*qwen3_5_text holds no layer that drafts"),
        (paths["glm4_moe"], mtp(), r"^heads: .*'model.layers.3.eh_proj.weight' has shape \[64, 64\]"),
        (paths["seed_oss"], mtp(), "SeedOssForCausalLM has no layers that draft"),
        (none, mtp(), "Glm4MoeForCausalLM has no layers that draft"),
        (paths["qwen3_5_text"], mtp(eagle_topk=2), "cannot verify draft trees, .*: leave speculation.eagle_topk out$"),
        (
            paths["qwen3_5_text"],
            mtp(eagle_topk=2, max_total_draft_tokens=8),
            ": leave speculation.eagle_topk and max_total_draft_tokens out$",
        ),
    ):
        with pytest.raises(TrtrunError, match=said):
            make_llm(path, speculation=options)
    with pytest.raises(TrtrunError, match=r"leave it out .* mtp for heads in the target's own files"):
        make_llm(paths["glm4_moe"], heads=paths["seed_oss"], speculation=mtp())
