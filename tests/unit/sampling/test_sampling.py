"""RowSampling against a slow reference and against transformers, its fast paths, ties, extremes and read-backs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from sampling_reference import VOCAB, admission, chi_square_p_value, random_case, reference_logits, seeded, softmax

from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import ThoughtBounds, TokenLists, TokenSequences
from trtrun.sampling import filters
from trtrun.sampling.filters import nucleus, top_k_top_p
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling

MAX_LEN = 40


def sampler_for(admissions: Sequence, vocab: int = VOCAB) -> tuple[RowSampling, torch.Tensor, torch.Tensor]:
    """A RowSampling with these rows, their token_ids (garbage behind their tokens) and lengths."""
    sampling = RowSampling(max(one.row for one in admissions) + 1, vocab, "cpu")
    token_ids = torch.full((len(admissions), MAX_LEN), vocab - 1, dtype=torch.int32)
    for one in admissions:
        sampling.admit([one])
        token_ids[one.row, : len(one.tokens)] = torch.from_numpy(one.tokens)
    return sampling, token_ids, torch.tensor([len(one.tokens) for one in admissions])


def process(
    params: SamplingParams, logits: torch.Tensor, tokens: Sequence[int] = (0,), **extra: object
) -> torch.Tensor:
    """[P, V] processed logits of one row."""
    drafts = extra.pop("drafts", None)
    one = admission(0, tokens, params, **extra)  # type: ignore[arg-type]
    sampling, token_ids, lengths = sampler_for([one], logits.shape[-1])
    return sampling.process(logits[None], [0], lengths, token_ids, drafts)[0]


def assert_same_choice(processed: torch.Tensor, expected: list[float], params: SamplingParams) -> None:
    """Greedy rows: the same logits. Sampled rows: the same tokens left, equally likely."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(torch.isinf(processed), torch.isinf(wanted))
    if params.is_greedy:
        torch.testing.assert_close(processed.double(), wanted, rtol=1e-5, atol=1e-5)
    else:
        probabilities = torch.softmax(processed.double(), -1)
        torch.testing.assert_close(probabilities, torch.softmax(wanted, -1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_mixed_rows_match_the_slow_reference(positions: int, ties: bool) -> None:
    """Every parameter in every combination, in batches of ten different rows, at 1 and at 4 positions."""
    generator = random.Random(positions * 2 + ties)
    torch.manual_seed(positions)
    for _ in range(20):
        cases = [random_case(generator) for _ in range(10)]
        admissions = [admission(row, case[1], case[0], case[2], case[3], case[4]) for row, case in enumerate(cases)]
        sampling, token_ids, lengths = sampler_for(admissions)
        rows = generator.sample(range(10), 10)
        logits = torch.randn(10, positions, VOCAB) * 3
        logits = (logits * 2).round() / 2 if ties else logits
        drafts = torch.randint(0, 6, (10, positions - 1)) if positions > 1 else None
        before = logits.clone()
        processed = sampling.process(logits, rows, lengths[rows], token_ids, drafts, max_context=21)
        assert torch.equal(logits, before)
        for index, row in enumerate(rows):
            params, tokens, prompt, stops, words = cases[row]
            for position in range(positions):
                sofar = tokens + (drafts[index, :position].tolist() if drafts is not None else [])
                expected = reference_logits(logits[index, position].tolist(), sofar, params, prompt, stops, words)
                assert_same_choice(processed[index, position], expected, params)


def test_a_row_comes_out_the_same_bits_in_any_company() -> None:
    """What other rows ask for, how many there are, and how many positions are processed change no bit of a row."""
    generator = random.Random(5)
    torch.manual_seed(5)
    cases = [random_case(generator) for _ in range(12)]
    admissions = [admission(row, case[1], case[0], case[2], case[3], case[4]) for row, case in enumerate(cases)]
    sampling, token_ids, lengths = sampler_for(admissions)
    logits, drafts = torch.randn(12, 4, VOCAB) * 3, torch.randint(0, 6, (12, 3))
    whole = sampling.process(logits, list(range(12)), lengths, token_ids, drafts)
    tokens = sampling.choose(whole, list(range(12)), lengths, Stream.TARGET)
    for row in range(12):
        one = slice(row, row + 1)
        for count in (1, 2, 4):
            alone = sampling.process(logits[one, :count], [row], lengths[one], token_ids, drafts[one, : count - 1])
            assert torch.equal(alone, whole[one, :count])
            chosen = sampling.choose(alone, [row], lengths[one], Stream.TARGET)
            assert torch.equal(chosen, tokens[one, :count])


def test_greedy_rows_pass_through_untouched() -> None:
    sampling, token_ids, lengths = sampler_for(
        [admission(0, [1], seeded()), admission(1, [2], seeded(top_k=3, top_p=0.5))]
    )
    logits = torch.randn(2, 3, VOCAB)
    assert sampling.process(logits, [0, 1], lengths, token_ids, torch.zeros(2, 2, dtype=torch.int64)) is logits


def transformers_case(name: str) -> tuple[dict, list]:
    transformers = pytest.importorskip("transformers")
    return {
        "temperature": ({"temperature": 0.7}, [transformers.TemperatureLogitsWarper(0.7)]),
        "top_k": (
            {"temperature": 1.0, "top_k": 5},
            [transformers.TopKLogitsWarper(5)],
        ),
        "top_p": ({"temperature": 1.0, "top_p": 0.8}, [transformers.TopPLogitsWarper(0.8)]),
        "min_p": ({"temperature": 1.0, "min_p": 0.1}, [transformers.MinPLogitsWarper(0.1)]),
        "repetition": ({"repetition_penalty": 1.4}, [transformers.RepetitionPenaltyLogitsProcessor(1.4)]),
        "bias": (
            {"logit_bias": {3: 2.5, 9: -100.0}},
            [transformers.SequenceBiasLogitsProcessor({(3,): 2.5, (9,): -100.0})],
        ),
        "all": (
            {"temperature": 0.6, "top_k": 12, "top_p": 0.85, "min_p": 0.05, "repetition_penalty": 1.3},
            [
                transformers.RepetitionPenaltyLogitsProcessor(1.3),
                transformers.TemperatureLogitsWarper(0.6),
                transformers.TopKLogitsWarper(12),
                transformers.TopPLogitsWarper(0.85),
                transformers.MinPLogitsWarper(0.05),
            ],
        ),
    }[name]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition", "bias", "all"])
def test_filters_match_transformers(name: str) -> None:
    values, processors = transformers_case(name)
    params = seeded(**values)
    torch.manual_seed(3)
    tokens = [4, 9, 4, 17, 2]
    for _ in range(20):
        logits = torch.randn(1, 200) * 2
        expected = logits.clone()
        for processor in processors:
            expected = processor(torch.tensor([tokens]), expected)
        assert_same_choice(process(params, logits, tokens)[0], expected[0].tolist(), params)


def test_bad_words_and_min_tokens_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    words = [[3], [1, 2], [2, 1, 4], [5, 5, 5]]
    tokens = [2, 1, 5, 5, 2, 1]
    logits = torch.randn(1, 8)
    for length in range(1, len(tokens) + 1):
        sofar = torch.tensor([tokens[:length]])
        expected = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=7)(sofar, logits)
        minimum = transformers.MinNewTokensLengthLogitsProcessor(2, 3, eos_token_id=torch.tensor([7]), device="cpu")
        expected = minimum(sofar, expected)
        got = process(
            seeded(min_tokens=3),
            logits,
            tokens[:length],
            num_prompt_tokens=min(2, length),
            stop_ids=(7,),
            bad_word_ids=tuple(map(tuple, words)),
        )
        if length >= 3:  # the prompt has two tokens, and some releases look at no word longer than the text
            assert torch.equal(got, expected)


def test_top_k_ties_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -0.0, 0.0, 2.0]])
    kept = process(seeded(temperature=1.0, top_k=3), logits)
    assert torch.isfinite(kept)[0].nonzero().flatten().tolist() == [1, 2, 3]
    kept = process(seeded(temperature=1.0, top_p=0.25), torch.zeros(1, 10))
    assert torch.isfinite(kept)[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_one_token_is_always_left() -> None:
    for values in ({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"top_k": 5, "top_p": 1e-9, "min_p": 1.0}):
        kept = process(seeded(temperature=1.0, **values), torch.tensor([[0.0, 5.0, 5.1, -3.0]]))
        assert torch.isfinite(kept)[0].tolist() == [False, False, True, False]


def test_extreme_values_give_no_nan() -> None:
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[nan, 1.0, 2.0], [inf, 1.0, 0.0], [-inf, 1.0, 2.0], [3e38, -3e38, 1.0], [-inf, -inf, -inf]])
    for values in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.4, "min_p": 0.2}):
        for temperature in (1e-30, 1e-6, 1.0, 1e30):
            out = process(seeded(temperature=temperature, **values), rows, drafts=torch.zeros(1, 4, dtype=torch.int64))
            assert not bool(torch.isnan(out).any())
            assert bool((out[:4] > -inf).any(-1).all())
            probabilities = RowSampling.probabilities(out)
            assert not bool(torch.isnan(probabilities).any())
            assert out[1].argmax() == 0 and out[2].argmax() == 2
    out = process(seeded(temperature=1e-6), rows, drafts=torch.zeros(1, 4, dtype=torch.int64))
    assert out[0].tolist() == [-inf, pytest.approx(-1e6, rel=1e-3), 0.0]


def test_min_tokens_counts_draft_tokens_and_ends() -> None:
    logits = torch.zeros(1, VOCAB).expand(5, VOCAB).contiguous()
    drafts = torch.zeros(1, 4, dtype=torch.int64)
    out = process(seeded(min_tokens=4), logits, [1, 2, 3], num_prompt_tokens=2, stop_ids=(5, 99), drafts=drafts)
    assert out[:, 5].tolist() == [-math.inf, -math.inf, -math.inf, 0.0, 0.0]  # outputs before: 1, 2, 3, 4, 5


def test_rows_that_a_round_does_not_name_leave_out_what_depends_on_their_length() -> None:
    """And nothing else; a guess has what its row has. Where nothing is decided there are no budgets for thoughts."""
    budget = TokenLists.of(thoughts=ThoughtBounds(0, TokenSequences.of([]), TokenSequences.of([[5]])))
    rows = [
        admission(0, [1, 2], seeded(min_tokens=4), stop_ids=(5,)),
        replace(admission(1, [1, 2], seeded()), lists=budget),
        admission(2, [1, 2], seeded(min_tokens=4, logit_bias={3: 9.0}), stop_ids=(5,)),
    ]
    tokens, logits = torch.ones((4, 9), dtype=torch.int32), torch.zeros(3, 1, VOCAB)
    lengths = torch.full((3,), 2)

    def changed(sampling: RowSampling, rows: list[int]) -> list[tuple[bool, bool]]:
        """Of some rows, whether the logits of token 5 and of others change."""
        differs = (sampling.process(logits, rows, lengths, tokens) != logits)[:, 0]
        found = list(zip(differs[:, 5].tolist(), differs[:, torch.arange(VOCAB) != 5].any(1).tolist(), strict=True))
        assert [sampling.needs_history([row]) for row in rows] == [any(one) for one in found]
        return found

    for ends_thoughts in (True, False):
        sampling = RowSampling(4, VOCAB, "cpu", ends_thoughts=ends_thoughts)
        sampling.admit(rows)
        begun = [(True, False), (False, ends_thoughts), (True, True)]
        assert changed(sampling, [0, 1, 2]) == begun, "until a round begins"
        sampling.begin_round((1,))
        sampling.share([0], [3])
        assert changed(sampling, [3, 1, 2]) == changed(sampling, [0, 1, 2]) == [(False, False), begun[1], (False, True)]
        assert not sampling.may_forbid_all([0, 2, 3])
        sampling.begin_round((0, 2))
        sampling.share([0], [3])
        assert changed(sampling, [3, 1, 2]) == [begun[0], (False, False), begun[2]] and sampling.may_forbid_all([0])


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    """The draft's vocabulary may be narrower than the target's: its token_ids holds ids that it does not know."""
    params = seeded(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={40: 5.0, 1: 1.0}, min_tokens=5)
    words = ((40,), (40, 2), (3, 41))
    logits = torch.ones(2, 10)
    drafts = torch.tensor([[41]])
    out = process(params, logits, [3, 40], num_prompt_tokens=1, stop_ids=(50,), bad_word_ids=words, drafts=drafts)
    expected = torch.ones(2, 10)
    expected[:, 1], expected[:, 3], expected[0, 2] = 2.0, 0.5, -math.inf
    assert torch.equal(out, expected)


def test_parameters_follow_the_row_and_are_dropped_with_it() -> None:
    sampling, token_ids, lengths = sampler_for(
        [admission(0, [1], seeded(temperature=1.0, logprobs=3, top_k=2, seed=9))]
    )
    assert sampling.wanted_logprobs([0]) == [(0, 3)] and sampling.seeds([0]).tolist() == [9]
    assert sampling.sampled_indices([0]) == [0] and not sampling.passes([0]) and not sampling.needs_history([0])
    sampling.drop(0)
    with pytest.raises(KeyError):
        sampling.steps([0])
    sampling.admit([admission(0, [1], seeded(presence_penalty=1.0))])
    assert sampling.sampled_indices([0]) == [] and not sampling.passes([0]) and sampling.needs_history([0])
    sampling.admit([admission(0, [1], seeded(seed=2**63 - 1))])
    assert sampling.passes([0]) and not sampling.needs_history([0]) and sampling.seeds([0]).tolist() == [2**63 - 1]
    assert sampling.sampled_indices([0]) == [] and sampling.wanted_logprobs([0]) == []
    logits = torch.randn(1, 1, VOCAB)
    assert sampling.process(logits, [0], lengths, token_ids) is logits
    with pytest.raises(ValueError, match="no seed"):
        sampling.admit([admission(0, [1], SamplingParams())])


def test_choose_takes_the_first_of_equal_logits_for_greedy_rows_and_samples_the_others() -> None:
    admissions = [
        admission(0, [1], seeded()),
        *(admission(r, [1], seeded(temperature=0.9, seed=r)) for r in range(1, 20001)),
    ]
    sampling, token_ids, lengths = sampler_for(admissions, vocab=6)
    logits = torch.tensor([0.3, 2.0, -1.0, 2.0, 0.0, 1.0]).expand(20001, 2, 6)
    processed = sampling.process(logits, range(20001), lengths, token_ids, torch.zeros(20001, 1, dtype=torch.int64))
    tokens = sampling.choose(processed, range(20001), lengths, Stream.TARGET)
    assert tokens[0].tolist() == [1, 1]
    probabilities = torch.tensor(softmax([value / 0.9 for value in logits[0, 0].tolist()]))
    pairs = torch.bincount(tokens[1:, 0] * 6 + tokens[1:, 1], minlength=36)
    assert chi_square_p_value(pairs, torch.outer(probabilities, probabilities)) > 1e-4
    other = sampling.choose(processed, range(20001), lengths, Stream.DRAFT)
    assert not torch.equal(other[1:], tokens[1:]) and other[0].tolist() == [1, 1]


def test_top_logprobs_are_of_the_raw_distribution() -> None:
    torch.manual_seed(1)
    raw = torch.randn(2, 3, 9)
    tokens = torch.tensor([[4, 0, -1], [8, -1, -1]])
    result = RowSampling.top_logprobs(raw, tokens, 2)
    logprobs = torch.log_softmax(raw, -1)
    assert result.token_ids.shape == result.values.shape == (2, 3, 3)
    assert result.token_ids[0, 0, 0] == 4 and float(result.values[0, 0, 0]) == pytest.approx(float(logprobs[0, 0, 4]))
    best = logprobs.sort(-1, descending=True)
    assert torch.equal(result.token_ids[..., 1:], best.indices[..., :2])
    assert RowSampling.top_logprobs(raw, tokens, 0).values.shape == (2, 3, 1)


def test_equally_likely_alternatives_do_not_depend_on_how_many_are_ranked() -> None:
    """A verdict is as wide as its widest row asked for."""
    raw = torch.randint(0, 4, (6, 2, 300), generator=torch.Generator().manual_seed(1)).float()
    tokens = torch.zeros((6, 2), dtype=torch.int64)
    widest = RowSampling.top_logprobs(raw, tokens, 20)
    for count in (1, 2, 3, 10):
        alone = RowSampling.top_logprobs(raw, tokens, count)
        assert torch.equal(alone.token_ids, widest.token_ids[..., : 1 + count])
        assert torch.equal(alone.values, widest.values[..., : 1 + count])
    ranked = raw.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(widest.token_ids[..., 1:], ranked[..., :20])


def test_large_vocabulary_nucleus_matches_a_full_sort() -> None:
    """The nucleus is searched among fewer candidates on a CPU: peaked, flat and heavy-tailed rows in one batch."""
    torch.manual_seed(2)
    logits = torch.stack([torch.randn(5000) * scale for scale in (0.01, 1.0, 4.0, 30.0)])
    admissions = [admission(row, [1], seeded(temperature=1.0, top_p=0.9)) for row in range(4)]
    sampling, token_ids, lengths = sampler_for(admissions, vocab=5000)
    out = sampling.process(logits[:, None], range(4), lengths, token_ids)[:, 0]
    ordered = logits.double().softmax(-1).sort(-1, descending=True)
    keep = ordered.values.cumsum(-1) - ordered.values < 0.9
    expected = torch.zeros(4, 5000, dtype=torch.bool).scatter(-1, ordered.indices, keep)
    assert torch.equal(torch.isfinite(out), expected)


def test_ranking_rows_in_parts_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches are ranked some rows at a time on a CPU."""
    torch.manual_seed(3)
    variants = ({"top_p": 0.9}, {"top_k": 7}, {"top_k": 30, "top_p": 0.5}, {"top_p": 0.4, "min_p": 0.1})
    admissions = [admission(row, [1], seeded(temperature=1.0, **variants[row % 4])) for row in range(11)]
    sampling, token_ids, lengths = sampler_for(admissions, vocab=300)
    logits, drafts = torch.randn(11, 2, 300) * 2, torch.zeros(11, 1, dtype=torch.int64)
    whole = sampling.process(logits, range(11), lengths, token_ids, drafts)
    monkeypatch.setattr(filters, "_CPU_CHUNK", 1900)  # three rows of 2 x 300
    assert torch.equal(sampling.process(logits, range(11), lengths, token_ids, drafts), whole)


def test_a_nucleus_that_is_reached_exactly_has_no_token_more() -> None:
    """Four tokens that are equally likely, of which two are half of all."""
    scaled, share = torch.zeros(1, 1, 4), torch.tensor([0.5])
    for kept in (nucleus(scaled, share), top_k_top_p(scaled, torch.tensor([4]), 4, share)):
        assert int(kept.isfinite().sum()) == 2
