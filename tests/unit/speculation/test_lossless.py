"""Lossless, greedy: the pipeline's output equals the target's own, token for token.

In float32 the target's own is transformers' greedy generate; in bfloat16 it is the same pipeline without a draft, bit
for bit. Whatever the architecture, draft_len, the draft's quality, plans sent ahead, the draft's context or the padding
of its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint, make_draft
from native import PATHS, compute_as, leave_to_torch, needs_bfloat16, needs_kernels
from pipelines import Reference, make_llm, noisy_copy, prompt_of, run_alone, tokens_of, useless_draft

from trtrun import SamplingParams
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16

COUNT = 40
LENGTHS = (1, 2, 17, 33, 64, 90)
SPECIAL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
}
DRAFTS = ("same", "graft", "noisy", "useless")
# Chunked prefill: most prompts are longer than a round's share of 48 tokens.
SCHEDULER = {"max_batch_size": 4, "max_num_tokens": 48}


@dataclass
class Family:
    """A target, drafts for it, and what transformers makes of it."""

    target: Path
    drafts: dict[str, Path]
    expected: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """One family for each architecture."""
    found = {}
    for architecture in ARCHITECTURES:
        folder = tmp_path_factory.mktemp(architecture)
        target = make_checkpoint(folder / "target", architecture, seed=1, num_hidden_layers=3, **SPECIAL[architecture])
        drafts = {
            "same": target,
            "graft": make_draft(folder / "graft", target, 2),
            "noisy": noisy_copy(folder / "noisy", target, 0.05),
            "useless": useless_draft(folder / "useless"),
        }
        reference = Reference(target)
        expected = [reference.greedy(prompt_of(length, seed=length), COUNT) for length in LENGTHS]
        found[architecture] = Family(target, drafts, expected)
    return found


def generate(llm: Any, lengths: tuple[int, ...] = LENGTHS, count: int = COUNT) -> list[tuple[int, ...]]:
    """Greedy tokens for the prompts of these lengths; nothing is left behind."""
    prompts = [prompt_of(length, seed=length) for length in lengths]
    outputs = tokens_of(llm.generate(prompts, SamplingParams(max_tokens=count)))
    llm.check_idle()
    return [tokens for (tokens,) in outputs]


def test_the_texts_are_worth_comparing(families: dict[str, Family]) -> None:
    for family in families.values():
        assert all(len(set(tokens)) > 10 for tokens in family.expected)
        assert len(set(family.expected)) == len(LENGTHS)


@pytest.mark.parametrize(
    ("architecture", "draft_len"),
    [(name, length) for place, name in enumerate(ARCHITECTURES) for length in (1 + place % 2, 5 + place)],
)
def test_lossless_greedy_equals_transformers(families: dict[str, Family], architecture: str, draft_len: int) -> None:
    family = families[architecture]
    # Every draft is met by two architectures, with and without a plan sent ahead.
    kind = DRAFTS[(draft_len // 2 + ARCHITECTURES.index(architecture)) % 4]
    plans_ahead = int(draft_len > 4)
    scheduler = {**SCHEDULER, "plans_ahead": plans_ahead}
    with make_llm(family.target, family.drafts[kind], speculation={"draft_len": draft_len}, scheduler=scheduler) as llm:
        assert generate(llm) == family.expected
        statistics = llm.statistics()
    drafted, accepted = statistics["num_draft_tokens"], statistics["num_accepted_draft_tokens"]
    assert drafted > COUNT
    if kind == "same":
        assert accepted == drafted
    elif kind == "useless":
        assert accepted < 0.05 * drafted
    else:
        assert 0.02 * drafted < accepted < 0.95 * drafted


@pytest.mark.parametrize(("architecture", "plans_ahead"), list(zip(ARCHITECTURES, (0, 1, 0, 1), strict=True)))
def test_lossless_greedy_without_a_draft(families: dict[str, Family], architecture: str, plans_ahead: int) -> None:
    family = families[architecture]
    with make_llm(family.target, scheduler={**SCHEDULER, "plans_ahead": plans_ahead}) as llm:
        assert generate(llm) == family.expected
        assert llm.statistics()["num_draft_tokens"] == 0


@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [
        pytest.param(name, kernels, marks=needs_kernels if kernels == "own" else ())
        for name, kernels in zip(ARCHITECTURES, ("own", "own", "torch", "own"), strict=True)
    ],
)
def test_lossless_greedy_with_a_quantized_draft(
    families: dict[str, Family], architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target's own weights, so that nothing but rounding comes between them."""
    family = families[architecture]
    if kernels == "torch":
        leave_to_torch(monkeypatch)
    with make_llm(family.target, family.drafts["same"], quantization="int8", scheduler=SCHEDULER) as llm:
        assert generate(llm) == family.expected
        statistics = llm.statistics()
    assert 0.7 < statistics["num_accepted_draft_tokens"] / statistics["num_draft_tokens"] < 1


def test_lossless_greedy_after_switching_speculation_off_and_on(families: dict[str, Family]) -> None:
    family = families["LlamaForCausalLM"]
    with make_llm(family.target, family.drafts["noisy"], scheduler=SCHEDULER) as llm:
        for enabled in (True, False, True):
            llm.set_speculation(enabled)
            llm.reset_statistics()
            assert generate(llm) == family.expected
            assert (llm.statistics()["num_draft_tokens"] > 0) == enabled


@pytest.mark.parametrize(("kind", "plans_ahead"), [("same", 0), ("noisy", 1)])
def test_lossless_greedy_beyond_the_drafts_context(
    families: dict[str, Family], tmp_path: Path, kind: str, plans_ahead: int
) -> None:
    """Prompts of 64 and 90 are beyond it from the start; the others reach its end while they run or stay within."""
    family = families["LlamaForCausalLM"]
    target = family.target
    maker = noisy_copy if kind == "noisy" else lambda path, source, _: make_draft(path, source, 3)
    draft = maker(tmp_path / "draft", target, 0.05)
    config = (draft / "config.json").read_text(encoding="utf-8")
    assert '"max_position_embeddings": 256' in config
    config = config.replace('"max_position_embeddings": 256', '"max_position_embeddings": 61')
    (draft / "config.json").write_text(config, encoding="utf-8")
    with make_llm(target, draft, scheduler={**SCHEDULER, "plans_ahead": plans_ahead}) as llm:
        prompts = [prompt_of(length, seed=length) for length in LENGTHS]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=COUNT))
        llm.check_idle()
    assert [tokens for (tokens,) in tokens_of(outputs)] == family.expected
    drafted = [output.completions[0].statistics.num_draft_tokens for output in outputs]
    assert drafted[-2:] == [0, 0]
    assert 0 < drafted[3] < drafted[0]


@pytest.mark.parametrize(("draft_vocabulary", "plans_ahead"), [(150, 1), (208, 0)])
def test_lossless_greedy_with_a_vocabulary_padded_differently(
    tmp_path: Path, draft_vocabulary: int, plans_ahead: int
) -> None:
    """A draft that is cut or padded; prompts and texts hold tokens beyond the narrower one."""
    from safetensors.torch import load_file, save_file

    target = make_checkpoint(tmp_path / "target", num_hidden_layers=3)
    draft = noisy_copy(tmp_path / "draft", target, 0.02)
    weights = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = torch.full((max(0, draft_vocabulary - 199), 64), 3.0)
        weights[name] = torch.cat([weights[name][:draft_vocabulary], padding]).contiguous()
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    config = (draft / "config.json").read_text(encoding="utf-8")
    (draft / "config.json").write_text(
        config.replace('"vocab_size": 199', f'"vocab_size": {draft_vocabulary}'), encoding="utf-8"
    )
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    assert max(map(max, prompts)) == 198
    sampling = [
        SamplingParams(max_tokens=COUNT, temperature=temperature, seed=index, repetition_penalty=1.1)
        for index, temperature in enumerate((0.0, 0.0, 0.0, 0.9, 0.9, 0.9))
    ]
    for use_logits in (False, True):
        speculation = {"draft_len": 3, "use_logits": use_logits}
        with make_llm(target, draft, speculation=speculation, scheduler={"plans_ahead": plans_ahead}) as llm:
            outputs = tokens_of(llm.generate(prompts, sampling))
            share = llm.statistics()["mean_acceptance_length"]
            llm.set_speculation(False)
            expected = tokens_of(llm.generate(prompts, sampling))
            llm.check_idle()
        assert share > 1.1
        same = len(prompts) if not use_logits else 3  # sampled rows draw other random numbers with draft_probs
        assert outputs[:same] == expected[:same]
        assert all(len(tokens) == COUNT for (tokens,) in outputs)


@dataclass
class Bfloat16Pair:
    """A wider target, whose products are sums of several blocks, a draft that agrees in part, and the plain texts."""

    target: Path
    draft: Path
    prompts: list[list[int]]
    expected: list[list[tuple[int, ...]]]
    kv_cache: dict[str, Any]


BFLOAT16_SAMPLING = SamplingParams(max_tokens=36)
# (block_size, kernels): blocks of 8 tokens are left to torch's attention.
WAYS: dict[str, tuple[tuple[int, str], Any]] = {
    **{kind: ((16, kind), needed) for kind, needed in PATHS.items()},
    "own products, torch's attention": ((8, MULTIPLIES_BFLOAT16), needs_bfloat16),
    "torch": ((8, "torch"), ()),
}


def by_ways(cases: dict[str, list[tuple[Any, ...]]]) -> list[Any]:
    """Cases with the pair that each is for, by the names of `WAYS`."""
    return [
        pytest.param(WAYS[name][0], *case, id="-".join(map(str, (name, *case))), marks=WAYS[name][1])
        for name, of_way in cases.items()
        for case in of_way
    ]


@pytest.fixture(scope="module")
def bfloat16_pairs() -> dict[tuple[int, str], Bfloat16Pair]:
    """Those that tests have asked for so far."""
    return {}


@pytest.fixture
def bfloat16_pair(
    bfloat16_pairs: dict[tuple[int, str], Bfloat16Pair],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Bfloat16Pair:
    """The pair for one of `WAYS`, by which models are loaded from now on."""
    block_size, kernels = request.param
    if kernels == "torch":
        leave_to_torch(monkeypatch)
    else:
        compute_as(kernels, monkeypatch)
    if request.param not in bfloat16_pairs:
        folder = tmp_path_factory.mktemp("bfloat16")
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 300}
        target = make_checkpoint(folder / "target", dtype=torch.bfloat16, seed=1, num_hidden_layers=2, **sizes)
        prompts = [prompt_of(3 + 7 * index % 83, seed=index, vocab_size=300) for index in range(12)]
        kv_cache = {"block_size": block_size}
        with make_llm(target, kv_cache=kv_cache) as llm:
            expected = run_alone(llm, prompts, [BFLOAT16_SAMPLING] * len(prompts))
        draft = noisy_copy(folder / "draft", target, 0.05)
        bfloat16_pairs[request.param] = Bfloat16Pair(target, draft, prompts, expected, kv_cache)
    return bfloat16_pairs[request.param]


@pytest.mark.parametrize(
    ("bfloat16_pair", "target_quantization", "quantization", "draft_len", "max_tokens"),
    by_ways(
        {
            "avx2": [("fp8", "fp8", 5, 360), ("fp8", "none", 7, 8192)],
            MULTIPLIES_BFLOAT16: [("fp8", "fp8", 5, 360), ("fp8_weight_only", "fp8_weight_only", 4, 8192)],
            "own products, torch's attention": [("none", "fp8", 3, 8192)],
            "torch": [("fp8_weight_only", "fp8_weight_only", 4, 8192)],
        }
    ),
    indirect=["bfloat16_pair"],
)
def test_lossless_greedy_of_a_rounded_target_is_bit_equal_to_the_same_target_alone(
    bfloat16_pair: Bfloat16Pair, target_quantization: str, quantization: str, draft_len: int, max_tokens: int
) -> None:
    """The rounded target is another model than the one of the files, and its plain text is what counts."""
    prompts = bfloat16_pair.prompts[:8]
    with make_llm(
        bfloat16_pair.target,
        bfloat16_pair.draft,
        target_quantization=target_quantization,
        quantization=quantization,
        dtype="bfloat16",
        speculation={"draft_len": draft_len},
        scheduler={"max_batch_size": 8, "max_num_tokens": 80},
        kv_cache={"max_tokens": max_tokens, **bfloat16_pair.kv_cache},
    ) as llm:
        outputs = llm.generate(prompts, BFLOAT16_SAMPLING)
        assert 1.2 < llm.statistics()["mean_acceptance_length"] < draft_len + 1
        llm.set_speculation(False)
        alone = run_alone(llm, prompts, [BFLOAT16_SAMPLING] * len(prompts))
        llm.check_idle()
    assert tokens_of(outputs) == alone
    assert (alone == bfloat16_pair.expected[:8]) == (target_quantization == "none")


@pytest.mark.parametrize(
    ("bfloat16_pair", "plans_ahead", "draft_len", "max_tokens", "quantization"),
    by_ways(
        {
            "avx2": [(0, 1, 8192, "none"), (1, 5, 8192, "none"), (0, 7, 360, "none"), (1, 3, 360, "int8")],
            MULTIPLIES_BFLOAT16: [(1, 3, 360, "none"), (0, 4, 8192, "int8")],
            "own products, torch's attention": [(1, 3, 360, "none")],
            "torch": [(0, 4, 8192, "int8")],
        }
    ),
    indirect=["bfloat16_pair"],
)
def test_lossless_greedy_in_bfloat16_is_bit_equal_to_the_target_alone(
    bfloat16_pair: Bfloat16Pair, plans_ahead: int, draft_len: int, max_tokens: int, quantization: str
) -> None:
    """Also where rows are preempted, which recomputes in one prefill what was computed token by token."""
    with make_llm(
        bfloat16_pair.target,
        bfloat16_pair.draft,
        quantization=quantization,
        speculation={"draft_len": draft_len},
        scheduler={"max_batch_size": 8, "max_num_tokens": 80, "plans_ahead": plans_ahead},
        kv_cache={"max_tokens": max_tokens, **bfloat16_pair.kv_cache},
    ) as llm:
        outputs = llm.generate(bfloat16_pair.prompts, BFLOAT16_SAMPLING)
        llm.check_idle()
        assert 1.2 < llm.statistics()["mean_acceptance_length"] < draft_len + 1
    assert tokens_of(outputs) == bfloat16_pair.expected
    preempted = sum(output.completions[0].statistics.num_preemptions for output in outputs)
    assert (preempted > 0) == (max_tokens == 360)
