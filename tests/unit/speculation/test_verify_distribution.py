"""Lossless: sampled output follows the target's processed distribution, in both acceptance modes, whatever the draft.

Each of 24,000 rows runs the cycle on a toy pair (logits depend on the last token) with its own seed, all of them as
one batch, with temperature, top_k, top_p, min_p and penalties on. The exact joint distribution of the first tokens
comes from the slow reference. Seeds are fixed, so each p-value is a constant of the code under test.
"""

from __future__ import annotations

import pytest
import torch
from sampling_reference import admission, chi_square_p_value, reference_logits, softmax

from trtrun.core.sampling_params import SamplingParams
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling
from trtrun.sampling.row_steps import TokenMasks
from trtrun.speculation.verify import Verification, verify

VOCAB, ROWS, TOKENS, P_VALUE = 8, 24_000, 3, 1e-4
PROMPT = (3, 5, 3)
SETTINGS = {
    "temperature": 1.3,
    "top_k": 7,
    "top_p": 0.93,
    "min_p": 0.03,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.25,
}
TARGET_LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 1.2
NOISE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(12))
DRAFTS = {
    "good": TARGET_LOGITS + 0.2 * NOISE,
    "mediocre": TARGET_LOGITS + 1.0 * NOISE,
    "useless": 2.0 * NOISE,
}


@pytest.fixture(scope="module")
def sampling() -> RowSampling:
    rows = RowSampling(ROWS, VOCAB, "cpu")
    for row in range(ROWS):
        rows.admit([admission(row, PROMPT, SamplingParams.from_mapping({"seed": row, **SETTINGS}))])
    return rows


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """[V, V, V] float64: the target's joint probability of the first three output tokens."""
    params = SamplingParams.from_mapping(SETTINGS)

    def after(output: tuple[int, ...]) -> list[float]:
        tokens = [*PROMPT, *output]
        return softmax(reference_logits(TARGET_LOGITS[tokens[-1]].tolist(), tokens, params, len(PROMPT)))

    joint = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for first, p_first in enumerate(after(())):
        for second, p_second in enumerate(after((first,))):
            joint[first, second] = p_first * p_second * torch.tensor(after((first, second)), dtype=torch.float64)
    return joint


def speculate(
    sampling: RowSampling, draft: torch.Tensor, use_logits: bool, draft_lens: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """First TOKENS output tokens [ROWS, TOKENS] of the cycle, and the share of draft tokens accepted in round 1."""
    rows, draft_len = list(range(ROWS)), int(draft_lens.max())
    width = len(PROMPT) + TOKENS + draft_len + 1
    token_ids = torch.zeros((ROWS, width), dtype=torch.int32)
    token_ids[:, : len(PROMPT)] = torch.tensor(PROMPT)
    lengths = torch.full((ROWS,), len(PROMPT))
    share = 0.0
    while int(lengths.min()) < len(PROMPT) + TOKENS:
        lengths = lengths.clamp(max=len(PROMPT) + TOKENS)
        drafted, places = [], lengths.clone()
        probabilities = []
        for _ in range(draft_len):
            last = token_ids.gather(1, places[:, None] - 1).long()
            processed = sampling.process(draft[last], rows, places, token_ids)
            probabilities.append(sampling.probabilities(processed))
            drafted.append(sampling.choose(processed, rows, places, Stream.DRAFT if use_logits else Stream.TARGET))
            token_ids.scatter_(1, places[:, None], drafted[-1].int())
            places += 1
        tokens = torch.cat(drafted, dim=1)
        before = torch.cat([token_ids.gather(1, lengths[:, None] - 1).long(), tokens], dim=1)
        probs = torch.cat(probabilities, dim=1) if use_logits else None
        verdict = verify(
            Verification(TARGET_LOGITS[before], sampling, rows, lengths, token_ids),
            tokens,
            draft_lens,
            probs,
            rows if use_logits else (),
        )
        share = share or float((verdict.num_tokens - 1).sum() / draft_lens.clamp(min=0).sum())
        token_ids.scatter_(1, lengths[:, None] + torch.arange(draft_len + 1), verdict.tokens.clamp(min=0).int())
        lengths = lengths + verdict.num_tokens
    return token_ids[:, len(PROMPT) : len(PROMPT) + TOKENS].long(), share


def assert_follows(outputs: torch.Tensor, exact: torch.Tensor) -> None:
    """Joint distribution of tokens 1 and 2, of 2 and 3, and of all three."""
    cell = (outputs[:, 0] * VOCAB + outputs[:, 1]) * VOCAB + outputs[:, 2]
    counts = torch.bincount(cell, minlength=VOCAB**3).view(VOCAB, VOCAB, VOCAB)
    p_values = [
        chi_square_p_value(counts.sum(2), exact.sum(2)),
        chi_square_p_value(counts.sum(0), exact.sum(0)),
        chi_square_p_value(counts, exact),
    ]
    assert min(p_values) > P_VALUE, p_values


def lens_of(kind: str) -> torch.Tensor:
    if kind == "full":
        return torch.full((ROWS,), TOKENS - 1)  # the last token looked at is then the bonus of a whole draft
    return torch.arange(ROWS) * 7919 % 5 - 1  # -1 to 3, row by row


def test_the_reference_is_a_distribution_that_the_filters_shape(exact: torch.Tensor) -> None:
    assert float(exact.sum()) == pytest.approx(1.0)
    assert int((exact.sum((1, 2)) == 0).sum()) >= 1, "the filters remove nothing: the settings test too little"
    assert int((exact.sum((1, 2)) > 0.01).sum()) >= 4, "one token takes all: the settings test too little"


@pytest.mark.parametrize("lens", ["full", "mixed"])
@pytest.mark.parametrize("quality", list(DRAFTS))
@pytest.mark.parametrize("use_logits", [True, False], ids=["by_probability", "by_token"])
def test_sampled_output_follows_the_target(
    sampling: RowSampling, exact: torch.Tensor, use_logits: bool, quality: str, lens: str
) -> None:
    outputs, share = speculate(sampling, DRAFTS[quality], use_logits, lens_of(lens))
    assert_follows(outputs, exact)
    low, high = {"good": (0.6, 1.0), "mediocre": (0.2, 0.8), "useless": (0.0, 0.45)}[quality]
    assert low < share < high, share


def test_target_only_follows_its_own_distribution(sampling: RowSampling, exact: torch.Tensor) -> None:
    rows = list(range(ROWS))
    token_ids = torch.zeros((ROWS, 8), dtype=torch.int32)
    token_ids[:, :3] = torch.tensor(PROMPT)
    for length in range(3, 3 + TOKENS):
        lengths = torch.full((ROWS,), length)
        processed = sampling.process(TARGET_LOGITS[token_ids[:, length - 1].long()][:, None], rows, lengths, token_ids)
        token_ids[:, length] = sampling.choose(processed, rows, lengths, Stream.TARGET)[:, 0].int()
    assert_follows(token_ids[:, 3:6].long(), exact)


def test_acceptance_rate_is_the_overlap_of_the_distributions(sampling: RowSampling) -> None:
    """P(accept) = sum of min(target_probs, draft_probs) (Leviathan et al. 2023, theorem 3.5)."""
    params = SamplingParams.from_mapping(SETTINGS)
    probs = [
        torch.tensor(softmax(reference_logits(table[PROMPT[-1]].tolist(), PROMPT, params, 3)), dtype=torch.float64)
        for table in (TARGET_LOGITS, DRAFTS["mediocre"])
    ]
    overlap = float(torch.minimum(*probs).sum())
    _, share = speculate(sampling, DRAFTS["mediocre"], True, torch.ones(ROWS, dtype=torch.int64))
    assert abs(share - overlap) < 4 * (overlap * (1 - overlap) / ROWS) ** 0.5


def test_chi_square_p_value_knows_right_from_wrong() -> None:
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    draws = torch.multinomial(probabilities, 20_000, replacement=True, generator=generator)
    counts = torch.bincount(draws, minlength=5)
    assert chi_square_p_value(counts, probabilities) > 0.01
    assert chi_square_p_value(counts, torch.tensor([0.48, 0.32, 0.15, 0.05, 0.0])) < 1e-6
    assert chi_square_p_value(counts, torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0])) == 0.0
    # 3.841 is the 95 % quantile with one degree of freedom.
    exact = 500 + (3.841 * 250) ** 0.5
    assert chi_square_p_value(torch.tensor([exact, 1000 - exact]), torch.tensor([0.5, 0.5])) == pytest.approx(
        0.05, abs=1e-4
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("use_logits", [False, True])
def test_masked_tokens_are_drawn_from_what_is_left(sampling: RowSampling, draft: str, use_logits: bool) -> None:
    """Whether the draft knows the masks or not; the first token, and the one behind an accepted draft."""
    rows, allowed = list(range(ROWS)), torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 0, 1, 1, 0]]) == 1
    bits = (allowed.to(torch.int32) << torch.arange(VOCAB, dtype=torch.int32)).sum(dim=1, dtype=torch.int32)
    masks = TokenMasks(torch.arange(2, dtype=torch.int32).expand(ROWS, -1), bits.view(2, 1))
    lengths, token_ids = torch.full((ROWS,), len(PROMPT)), torch.zeros((ROWS, 8), dtype=torch.int32)
    token_ids[:, : len(PROMPT)] = torch.tensor(PROMPT)
    raw = DRAFTS[draft][PROMPT[-1]].expand(ROWS, 1, -1)
    processed = sampling.process(raw, rows, lengths, token_ids)
    drafted = sampling.choose(processed, rows, lengths, Stream.DRAFT if use_logits else Stream.TARGET)
    logits = torch.stack((TARGET_LOGITS[PROMPT[-1]].expand(ROWS, -1), TARGET_LOGITS[drafted[:, 0]]), dim=1)
    found = verify(
        Verification(logits, sampling, rows, lengths, token_ids, masks=masks),
        drafted,
        torch.ones_like(lengths),
        sampling.probabilities(processed) if use_logits else None,
        rows if use_logits else (),
    )
    params = SamplingParams.from_mapping(SETTINGS)

    def left(tokens: tuple[int, ...], mask: torch.Tensor) -> list[float]:
        kept = TARGET_LOGITS[tokens[-1]].masked_fill(~mask, -torch.inf).tolist()
        return softmax(reference_logits(kept, [*tokens], params, len(PROMPT)))

    first = left(PROMPT, allowed[0])
    counts = found.tokens[:, 0].bincount(minlength=VOCAB)
    assert chi_square_p_value(counts, torch.tensor(first, dtype=torch.float64)) > P_VALUE
    kept = found.num_tokens == 2
    usual = int(found.tokens[kept, 0].mode().values)
    behind = found.tokens[kept & (found.tokens[:, 0] == usual), 1].bincount(minlength=VOCAB)
    second = torch.tensor(left((*PROMPT, usual), allowed[1]), dtype=torch.float64)
    assert int(behind.sum()) > 500 and chi_square_p_value(behind, second) > P_VALUE
