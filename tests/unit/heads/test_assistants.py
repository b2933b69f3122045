"""Assistants of Gemma 4, which draft from the target's own keys and values: what they propose is what the modules of
transformers say, and no text depends on it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_heads import Assistant
from decoder_heads import check_drafts
from family_checkpoints import write_family
from medusa_heads import Proposals
from pipelines import Reference, configuration, make_llm, prompt_of, run_alone, tokens_of
from safetensors.torch import load_file, save_file

from launch.jobs.check.preflight import check_models
from launch.jobs.placement.memory import JobMemory
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.errors import TrtrunError
from trtrun.heads.assistants.assistant_layouts import AssistantPlan
from trtrun.heads.head_reading import find_heads
from trtrun.speculation.drafters.assistant import AssistantDrafter
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
    """The section of the method, as users of other servers write it."""
    return {"method": "mtp", **options}


def unified(target: Path) -> Path:
    """The target as one of Gemma 4's unified models."""
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    own = {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    (target / "config.json").write_text(json.dumps({**values, **own}), encoding="utf-8")
    return target


@pytest.mark.parametrize(
    ("family", "changes", "options", "plays_graphs"),
    [
        ("gemma4_small", {}, {}, False),
        ("gemma4", {}, {"ordered": True}, True),
        ("gemma4_text", {}, {"ordered": True, "layers": ("full_attention", "full_attention")}, False),
        ("gemma4_text", {"enable_moe_block": False}, {"tie_word_embeddings": False}, True),
        ("gemma4_text", {"enable_moe_block": False}, {"kind": "gemma4_unified_assistant"}, False),
    ],
    ids=["E2B", "E2B, ordered", "26B-A4B", "31B", "unified"],
)
def test_drafts_are_what_the_modules_of_transformers_say(
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    plays_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of greedy rows and sampled ones, behind prompts longer than the window, drafts that were right, and prefixes that
    were there before."""
    target = write_family(tmp_path / "target", family, seed=1, **changes)
    if "kind" in options:
        unified(target)
    head = Assistant(target, **options)
    head.learn(target, [[*PROMPTS[0], *Reference(target).greedy(PROMPTS[0], 8)]])
    head.write(tmp_path / "assistant")
    seen = Proposals(monkeypatch, AssistantDrafter)
    if plays_graphs:
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    longer = [[*PROMPTS[2][:24], *prompt_of(5, seed=9)], [*PROMPTS[2], 7]]
    short = [SamplingParams(max_tokens=7, temperature=0.9 * (row % 2), seed=row) for row in range(3)]
    with make_llm(target, heads=tmp_path / "assistant", speculation=mtp(draft_len=3), **TIGHT) as llm:
        found = [*llm.generate(PROMPTS, short), *llm.generate(longer, short[:2])]
        assert llm.statistics()["num_accepted_draft_tokens"] > 0
    assert sum(one.statistics.num_cached_prompt_tokens for output in found for one in output.completions) >= 16
    assert check_drafts(seen, target, head.draft) > 15


@pytest.mark.parametrize("family", ["gemma4_small", "gemma4_text"])
def test_transformers_feeds_them_so(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its assisted generation drafts behind a prompt within the window, where it has read no draft before."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    seen, original = list[list[int]](), Generator.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        found = original(self, input_ids=input_ids, **others)
        seen.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(Generator, "get_candidates", get_candidates)
    target = write_family(tmp_path, family, seed=1)
    head, reference, prompt = Assistant(target), Reference(target), PROMPTS[0]
    head.model.generation_config.num_assistant_tokens = 4
    settings = {"assistant_model": head.model, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    text = reference.model.generate(torch.tensor([prompt]), **settings)[0].tolist()
    assert next(found for found in seen if found) == head.draft(reference, text[: len(prompt) + 1], 4, 0.0, 0)


@pytest.mark.parametrize(
    ("family", "ordered", "draft_len", "kv_dtype"),
    [("gemma4_small", False, 3, "auto"), ("gemma4_text", False, 5, "auto"), ("gemma4_small", True, 1, "int8")],
)
def test_texts_are_plain_decodings(tmp_path: Path, family: str, ordered: bool, draft_len: int, kv_dtype: str) -> None:
    """In bfloat16, with an assistant that knows two of three texts by heart, among rows that are preempted."""
    target = write_family(tmp_path / "target", family, seed=1, dtype=torch.bfloat16)
    with make_llm(target, dtype="bfloat16", kv_cache={"block_size": 4, "dtype": kv_dtype}) as llm:
        alone = run_alone(llm, PROMPTS, SAMPLING)
    head = Assistant(target, ordered=ordered, centroid_intermediate_top_k=20)
    head.learn(target, [[*prompt, *texts[0]] for prompt, texts in zip(PROMPTS[:2], alone[:2], strict=True)])
    head.write(tmp_path / "assistant", torch.bfloat16)
    settings = {**TIGHT, "kv_cache": {**TIGHT["kv_cache"], "dtype": kv_dtype}, "dtype": "bfloat16"}
    speculation = {"method": "gemma4_mtp", "draft_len": draft_len}
    with make_llm(target, heads=tmp_path / "assistant", speculation=speculation, **settings) as llm:
        found = llm.generate(PROMPTS, SAMPLING)
        assert tokens_of(found) == alone
        assert sum(one.statistics.num_preemptions for output in found for one in output.completions) > 0
        assert llm.statistics()["num_accepted_draft_tokens"] > 15


def test_it_goes_by_texts_where_these_say_more(tmp_path: Path) -> None:
    """Rows whose last tokens stood before get what followed there; penalties see what is drafted."""
    target = write_family(tmp_path / "target", "gemma4_small", seed=1)
    Assistant(target).write(tmp_path / "assistant")
    prompts = [PROMPTS[1] * 2, PROMPTS[2]]
    sampling = SamplingParams(max_tokens=20, repetition_penalty=1.2)
    with make_llm(target) as llm:
        alone = run_alone(llm, prompts, [sampling] * 2)
    section = mtp(draft_len=3, enable_suffix_decoding=True, suffix_decoding_min_match_len=1)
    with make_llm(target, heads=tmp_path / "assistant", speculation=section) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == alone
        assert llm.statistics()["num_draft_tokens"] > 30


def test_keys_are_read_with_the_targets_own_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its files have scales of layers for keys and values of 8 bits."""
    target = write_family(tmp_path / "target", "gemma4_small", seed=1, dtype=torch.bfloat16)
    path = Assistant(target).write(tmp_path / "assistant", torch.bfloat16)
    weights = load_file(target / "model.safetensors")
    for index in range(5):
        weights |= {
            f"model.layers.{index}.self_attn.{kind}_scale": torch.tensor([0.02 + 0.01 * index]) for kind in "kv"
        }
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (target / "config.json").write_text(json.dumps({**values, "quantization_config": section}), encoding="utf-8")
    built, original = list[Any](), AssistantPlan.build

    def build(self: Any, reader: Any, model: Any, communicator: Any) -> Any:
        built.append((original(self, reader, model, communicator), model))
        return built[0][0]

    monkeypatch.setattr(AssistantPlan, "build", build)
    with make_llm(target) as llm:
        alone = run_alone(llm, PROMPTS, SAMPLING)
    with make_llm(target, heads=path, speculation=mtp()) as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == alone
    ((head, model),) = built
    for one in head._layers:
        of_target = model.attention_of(one.read)
        assert one.layer.attention.kv_scales is of_target.kv_scales is not None
        assert one.layer.attention.backend is of_target.backend


def test_it_is_counted_and_told_of(tmp_path: Path) -> None:
    """In bytes as plans say, without a store of its own; by its directory alone, too."""
    target = write_family(tmp_path / "target", "gemma4_small")
    path = Assistant(target, ordered=True).write(tmp_path / "assistant")
    assert find_heads(path) == "gemma4_mtp"
    of_target = {"model": str(target), "devices": ["cpu:0"]}
    sections = {"kv_cache": {"max_tokens": 512}, "threads": 1, "target": of_target}
    plain = make_config({**sections, "speculation": {"method": "none"}})
    config = make_config({**sections, "speculation": mtp(pacing="fixed"), "draft": {"model": str(path)}})
    memory, without = JobMemory.read(JobSpec(config)), JobMemory.read(JobSpec(plain))
    assert JobSpec(config).heads.describe() == (  # type: ignore[union-attr]
        "Gemma 4 assistant of 3 layers and 203 of 203 tokens, reading keys and values of the target's layers 2 and 1"
    )
    with LLM(config=config) as llm:
        (rank,) = llm.report.ranks
        llm.generate(PROMPTS, SamplingParams(max_tokens=9))
        assert llm.statistics()["num_draft_tokens"] > 20
    drafted, whole = memory.shard_bytes(0)
    assert rank.shard_bytes == drafted + whole and drafted > 0
    assert rank.kv_bytes == without.demand(0).bytes_per_block * (rank.kv_bytes // memory.demand(0).bytes_per_block)
    assert rank.working_bytes == memory.working_bytes(0)


def test_wrong_pairs_are_refused(tmp_path: Path) -> None:
    """In a line that says what to do."""
    target = write_family(tmp_path / "target", "gemma4_small")
    head, other = Assistant(target), write_family(tmp_path / "other", "seed_oss")
    names = count()

    def pair(target: Path, changes: dict[str, Any], **options: Any) -> Path:
        return Assistant(target, **options).write(tmp_path / str(next(names)), **changes)

    good = head.write(tmp_path / "good")
    wider, more = (
        write_family(tmp_path / str(size), "gemma4_small", **{size: 96}) for size in ("hidden_size", "head_dim")
    )
    longer = write_family(tmp_path / "longer", "gemma4_small", vocab_size=207)
    turned = json.loads((good / "config.json").read_text(encoding="utf-8"))["text_config"]
    turned["rope_parameters"]["sliding_attention"]["rope_theta"] = 500.0
    zeros = pair(target, {}, ordered=True)
    weights = load_file(zeros / "model.safetensors")
    weights["masked_embedding.token_ordering"].zero_()
    save_file(weights, zeros / "model.safetensors", {"format": "pt"})
    for path, heads, said in (
        (wider, good, "its backbone_hidden_size is 64, but the target's is 96: the assistant is for another target"),
        (longer, good, "its vocab_size is 203, but the target's is 207: the assistant is for another target"),
        (more, good, "layer 0 attends in the target's layer 2 with a head_dim of 16, but that has 96"),
        (other, good, "which attends in keys and values of that, but the target is a SeedOssForCausalLM"),
        (target, other, "its model_type is 'seed_oss', but method gemma4_mtp drafts with assistants of Gemma 4"),
        (target, pair(target, {"text_config": turned}), "layer 0 attends in the target's layer 2 with a rotation of"),
        (target, pair(target, {"use_ordered_embeddings": True}), "there is no masked_embedding.token_ordering"),
        (target, pair(target, {"use_ordered_embeddings": False}, ordered=True), "goes with nothing in its config.json"),
        (target, pair(target, {"num_centroids": 30}, ordered=True), "'num_centroids' is 30, which must divide the 203"),
        (target, zeros, "token_ordering must name each of the 203 tokens once"),
        (target, pair(target, {"quantization_config": {"quant_method": "fp8"}}), "quantized assistants are not supp"),
        (target, pair(target, {"text_config": None}), "'text_config' must describe its layers"),
    ):
        with pytest.raises(TrtrunError, match=r"^heads: ") as refused:
            make_llm(path, heads=heads, speculation=mtp())
        assert said in str(refused.value) and "\n" not in str(refused.value), str(refused.value)


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    """As a model, on a device of its own, and with options of others."""
    target = write_family(tmp_path / "target", "gemma4_small")
    path = Assistant(target).write(tmp_path / "assistant")
    with pytest.raises(TrtrunError, match="whose keys and values they read: leave it out or null"):
        configuration(target, None, heads=path, heads_apart=True, speculation=mtp())
    with pytest.raises(TrtrunError, match=r"eagle_topk is an option of method .*, but the method is gemma4_mtp"):
        configuration(target, None, heads=path, speculation=mtp(eagle_topk=2))
    with pytest.raises(TrtrunError, match=r"heads that draft by method gemma4_mtp: set speculation\.method"):
        make_llm(target, heads=path, speculation={"method": "eagle3"})
    for model, draft, said in (
        (path, None, "it has heads, which only draft: name the model that they were trained for"),
        (target, path, "it has heads that draft by method gemma4_mtp: set speculation.method to that"),
    ):
        with pytest.raises(TrtrunError, match=said):
            check_models(JobSpec(configuration(model, draft)))
