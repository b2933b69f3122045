"""Lossless, sampled: in token mode a seed gives the target's own output whatever the draft; with draft_probs the output
follows the target's distribution, which transformers' logits give exactly for a small vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import Reference, make_llm, noisy_copy, useless_draft
from sampling_reference import chi_square_p_value, reference_logits, softmax

from trtrun import LLM, SamplingParams
from trtrun.core.outputs import RequestOutput

PROMPTS: tuple[str | list[int], ...] = (
    "def main(",
    "The quick brown fox",
    [5, 9, 5, 9, 77],
    "aaaaaaaaaaaaaaaaaaaaaaaa",
)
COMBINATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 8},
    "top_k of 1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.1, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.9, "repetition_penalty": 1.4},
    "greedy repetition": {"repetition_penalty": 1.2},
    "presence": {"temperature": 0.7, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.7, "frequency_penalty": 1.0},
    "greedy penalties": {"presence_penalty": 0.7, "frequency_penalty": -0.4, "repetition_penalty": 0.9},
    "bias": {"temperature": 0.9, "logit_bias": {7: 5.0, 65: -100.0, 100: 2.5}},
    "greedy bias": {"logit_bias": {66: 3.0, 67: -4.0}},
    "bad words": {"temperature": 0.8, "bad_words": ("a", "th", "zz")},
    "greedy bad words": {"bad_words": ("e", "or", "x")},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": (20, 21, 22, 23, 24, 25, 26, 27, 28, 29)},
    "min tokens": {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": tuple(range(40, 70))},
    "greedy min tokens": {"min_tokens": 5, "stop_token_ids": tuple(range(100, 170))},
    "stop strings": {"temperature": 1.0, "stop": ("e", "1")},
    "three": {"temperature": 0.9, "n": 3},
    "logprobs": {"temperature": 0.9, "logprobs": 4, "top_k": 50},
    "greedy logprobs": {"logprobs": 2, "frequency_penalty": 0.3},
    "everything": {
        "temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1, "n": 3,
        "presence_penalty": 0.2, "frequency_penalty": 0.2, "logit_bias": {50: 1.0}, "bad_words": ("q",), "logprobs": 1,
        "min_tokens": 4, "stop_token_ids": (30, 31, 32, 33, 34, 35, 36, 37), "stop": ("zq",),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` with a tokenizer, and drafts `noisy` and `useless`."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_checkpoint(folder / "target", seed=1, tokenizer=True, num_hidden_layers=3, eos_token_id=0)
    noisy_copy(folder / "noisy", target, 0.03)
    useless_draft(folder / "useless", tokenizer=True)
    return folder


def everything(llm: LLM) -> list[RequestOutput]:
    """Every prompt with every combination, all in one batch."""
    prompts, sampling = [], []
    for number, values in enumerate(COMBINATIONS.values()):
        for index, prompt in enumerate(PROMPTS):
            prompts.append(prompt)
            sampling.append(SamplingParams.from_mapping({"seed": 100 * number + index, "max_tokens": 24, **values}))
    return llm.generate(prompts, sampling)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[RequestOutput]:
    """What the target gives alone."""
    with make_llm(folder / "target") as llm:
        return everything(llm)


def assert_identical(outputs: list[RequestOutput], plain: list[RequestOutput]) -> None:
    names = [name for name in COMBINATIONS for _ in PROMPTS]
    for name, output, expected in zip(names, outputs, plain, strict=True):
        assert output.error is None, name
        for completion, wanted in zip(output.completions, expected.completions, strict=True):
            assert completion.token_ids == wanted.token_ids, name
            assert completion.text == wanted.text, name
            assert completion.finish_reason == wanted.finish_reason, name
            assert (completion.logprobs is None) == (wanted.logprobs is None), name
            for entry, other in zip(completion.logprobs or [], wanted.logprobs or [], strict=True):
                assert entry.token_id == other.token_id, name
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4), name
                assert [token for token, _ in entry.alternatives] == [token for token, _ in other.alternatives], name


def test_the_parameters_do_something(plain: list[RequestOutput]) -> None:
    """Each combination changes the text, and the stops end it."""
    outputs = {
        name: plain[len(PROMPTS) * index : len(PROMPTS) * (index + 1)] for index, name in enumerate(COMBINATIONS)
    }
    texts = {name: [output.completions[0].token_ids for output in outputs[name]] for name in outputs}
    for name in COMBINATIONS:
        if name not in ("greedy", "greedy logprobs", "top_k of 1"):
            assert texts[name] != texts["greedy"], name
    assert texts["top_k of 1"] == texts["greedy"]
    for name in ("stop tokens", "min tokens", "greedy min tokens", "stop strings"):
        assert any(output.completions[0].finish_reason == "stop" for output in outputs[name]), name
    assert all(len(output.completions[0].token_ids) >= 10 for output in outputs["min tokens"])
    assert not any(65 in tokens for tokens in texts["bias"])
    for output in outputs["bad words"] + outputs["greedy bad words"]:
        words = ("a", "th", "zz") if output in outputs["bad words"] else ("e", "or", "x")
        assert not any(word in output.completions[0].text for word in words)
    assert all(len({completion.token_ids for completion in output.completions}) == 3 for output in outputs["three"])


@pytest.mark.parametrize(
    ("kind", "draft_len", "plans_ahead"),
    [
        ("noisy", 1, 0),
        ("noisy", 8, 1),
        # Drafts that are always right, or hardly ever.
        ("target", 3, 0),
        ("useless", 3, 1),
    ],
)
def test_with_a_seed_token_mode_is_identical_to_the_target_alone(
    folder: Path, plain: list[RequestOutput], kind: str, draft_len: int, plans_ahead: int
) -> None:
    with make_llm(
        folder / "target",
        folder / kind,
        speculation={"draft_len": draft_len},
        scheduler={"max_batch_size": 24, "max_num_tokens": 256, "plans_ahead": plans_ahead},
    ) as llm:
        assert_identical(everything(llm), plain)
        statistics = llm.statistics()
        share = statistics["num_accepted_draft_tokens"] / statistics["num_draft_tokens"]
        llm.check_idle()
    low, high = {"target": (0.999, 1.0), "noisy": (0.1, 0.95), "useless": (0.0, 0.2)}[kind]
    assert low <= share <= high


# Distribution, with draft_probs and without, of the whole pipeline.

VOCAB, P_VALUE = 12, 1e-4
# A wrong rule moves a table of two places by w = sqrt(sum((wrong - right)² / right)): 0.74 where all drafts are
# accepted, 0.28 where the recovered token is drawn from the target's whole distribution. With the 53 cells that are
# possible, a w of 0.2 is found in 99 of 100 runs with 98 / w² = 2,450 draws (noncentral chi-square).
DRAWS = 2_560
PROMPT = [3, 7, 1, 3]
SETTINGS: dict[str, Any] = {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "repetition_penalty": 1.15}
PLACES = 4  # output tokens looked at; with draft_len 2 the first is prefill's, then come drafted ones and a bonus


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `noisy` and `useless` with a vocabulary of 12."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_checkpoint(folder / "target", vocab_size=VOCAB, seed=4, scale=0.7, num_hidden_layers=1, **sizes)
    noisy_copy(folder / "noisy", target, 0.25)
    useless_draft(folder / "useless", vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def exact(small: Path) -> torch.Tensor:
    """[VOCAB] * PLACES float64: the joint probability of the first output tokens."""
    reference, params = Reference(small / "target"), SamplingParams.from_mapping(SETTINGS)
    joint = torch.ones((), dtype=torch.float64)
    contexts: list[list[int]] = [PROMPT]
    for _ in range(PLACES):
        logits = torch.cat(
            [
                reference.model(torch.tensor(contexts[start : start + 512]), use_cache=False).logits[:, -1]
                for start in range(0, len(contexts), 512)
            ]
        ).detach()
        rows = [
            softmax(reference_logits(row, tokens, params, len(PROMPT)))
            for row, tokens in zip(logits.tolist(), contexts, strict=True)
        ]
        joint = joint.reshape(-1, 1) * torch.tensor(rows, dtype=torch.float64)
        contexts = [[*tokens, token] for tokens in contexts for token in range(VOCAB)]
    return joint.reshape([VOCAB] * PLACES)


def draw(llm: LLM) -> torch.Tensor:
    """[DRAWS, PLACES] int64: the first tokens of DRAWS completions with seeds 0, 1, …"""
    sampling = SamplingParams.from_mapping({**SETTINGS, "n": 128, "max_tokens": PLACES, "ignore_eos": True})
    seeded = [replace(sampling, seed=first) for first in range(0, DRAWS, 128)]
    outputs = llm.generate([PROMPT] * len(seeded), seeded)
    rows = [completion.token_ids[:PLACES] for output in outputs for completion in output.completions]
    return torch.tensor(rows)


def assert_follows(draws: torch.Tensor, exact: torch.Tensor) -> None:
    """Joint distributions of neighbouring places, and of the first and the last."""
    counts = torch.zeros(VOCAB**PLACES, dtype=torch.float64)
    cell = torch.zeros(len(draws), dtype=torch.int64)
    for place in range(PLACES):
        cell = cell * VOCAB + draws[:, place]
    counts = torch.bincount(cell, minlength=VOCAB**PLACES).view([VOCAB] * PLACES)
    p_values = {}
    for kept in ((0, 1), (1, 2), (2, 3), (0, 3)):
        others = [place for place in range(PLACES) if place not in kept]
        p_values[kept] = chi_square_p_value(counts.sum(others), exact.sum(others))
    assert min(p_values.values()) > P_VALUE, p_values


def test_the_small_distribution_is_worth_testing(exact: torch.Tensor) -> None:
    assert float(exact.sum()) == pytest.approx(1.0)
    pairs = exact.sum((0, 3))
    assert int((pairs > 0.002).sum()) > 30
    assert int((pairs == 0).sum()) > 5


@pytest.mark.parametrize(
    ("kind", "use_logits", "draft_len", "quantization"),
    [("noisy", True, 2, "int8"), ("useless", True, 2, "none"), (None, False, 1, "none")],
)
def test_sampled_output_of_the_pipeline_follows_the_target(
    small: Path, exact: torch.Tensor, kind: str | None, use_logits: bool, draft_len: int, quantization: str
) -> None:
    with make_llm(
        small / "target",
        small / kind if kind else None,
        quantization=quantization,
        speculation={"draft_len": draft_len, "use_logits": use_logits},
        scheduler={"max_batch_size": 256, "max_num_tokens": 2048, "plans_ahead": int(draft_len == 1)},
        kv_cache={"max_tokens": 8192, "block_size": 4},
    ) as llm:
        draws = draw(llm)
        statistics = llm.statistics()
        llm.check_idle()
    assert draws.shape == (DRAWS, PLACES)
    assert_follows(draws, exact)
    if kind:
        share = statistics["num_accepted_draft_tokens"] / statistics["num_draft_tokens"]
        assert 0.05 < share < 0.95
