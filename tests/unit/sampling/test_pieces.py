"""Some rows at a time: the same bits as all rows at once, and temporaries that do not grow with the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import DEVICES
from sampling_reference import admission

from trtrun.core.sampling_params import SamplingParams
from trtrun.sampling import filters
from trtrun.sampling import filters as pieces_module
from trtrun.sampling.filters import pieces
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.verify import Verification, verify

VOCAB, ROWS, DRAFT_LEN = 700, 24, 3
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.7, "logprobs": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
    {"temperature": 0.7, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.5, "logit_bias": {3: 2.0}, "min_tokens": 4},
)


def test_pieces_are_whole_rows_and_cover_them_all() -> None:
    assert pieces(10, 4, 12) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert pieces(3, 100, 12) == [slice(0, 1), slice(1, 2), slice(2, 3)], "a row at least"
    assert pieces(3, 4, 12) == [slice(0, 3)] and pieces(0, 4, 12) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_probability", [False, True])
def test_a_verdict_does_not_depend_on_how_many_rows_are_worked_on_at_a_time(
    monkeypatch: pytest.MonkeyPatch, device: str, by_probability: bool
) -> None:
    generator = torch.Generator().manual_seed(8)
    sampling = RowSampling(ROWS, VOCAB, device)
    for row in range(ROWS):
        parameters = SamplingParams.from_mapping({"seed": row, **VARIANTS[row % len(VARIANTS)]})
        sampling.admit([admission(row, [row, 5, 9], parameters, stop_ids=(2,))])
    rows = list(range(ROWS))
    logits = (torch.randn(ROWS, DRAFT_LEN + 1, VOCAB, generator=generator) * 3).to(device)
    logits[0, 0, :40] = logits[0, 0, 40]  # ties
    drafts = torch.randint(VOCAB, (ROWS, DRAFT_LEN), generator=generator).to(device)
    token_ids = torch.randint(VOCAB, (ROWS, 20), generator=generator).int().to(device)
    lengths = torch.full((ROWS,), 6, device=device)
    sampled = sampling.sampled_indices(rows) if by_probability else []
    probabilities = torch.rand(len(sampled), DRAFT_LEN, VOCAB, generator=generator).softmax(-1).to(device)

    def decide(most: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(pieces_module, "MOST_ELEMENTS", most)
        monkeypatch.setattr(filters, "_CPU_CHUNK", most)
        monkeypatch.setattr(filters, "_DEVICE_CHUNK", most)
        processed = sampling.process(logits, rows, lengths, token_ids, drafts)
        verdict = verify(
            Verification(logits, sampling, rows, lengths, token_ids),
            drafts,
            torch.full_like(lengths, DRAFT_LEN),
            probabilities if by_probability else None,
            sampled,
        )
        assert verdict.logprobs is not None
        return processed, verdict.num_tokens, verdict.tokens, verdict.logprobs.token_ids, verdict.logprobs.values

    at_once = decide(1 << 40)
    for most in (1, 3 * (DRAFT_LEN + 1) * VOCAB, 7 * (DRAFT_LEN + 1) * VOCAB):
        for found, expected in zip(decide(most), at_once, strict=True):
            assert torch.equal(found, expected), most


def test_ranking_holds_no_more_than_its_share_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters get slices: with 64 rows of 6 x 128k, ranking all at once took over 3 GB."""
    seen: list[int] = []
    largest = filters.largest

    def spy(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(scaled.numel())
        return largest(scaled, count)

    monkeypatch.setattr(filters, "largest", spy)
    sampling = RowSampling(64, 1000, "meta")  # as on a GPU: nothing can be read back
    for row in range(64):
        sampling.admit([admission(row, [1], SamplingParams(seed=1, temperature=1.0, top_p=0.9))])
    monkeypatch.setattr(filters, "_DEVICE_CHUNK", 20_000)
    lengths = torch.empty(64, dtype=torch.int64, device="meta")
    token_ids = torch.empty((64, 9), dtype=torch.int32, device="meta")
    drafts = torch.empty((64, 5), dtype=torch.int64, device="meta")
    logits = torch.empty((64, 6, 1000), device="meta")
    processed = sampling.process(logits, list(range(64)), lengths, token_ids, drafts)
    assert processed.shape == (64, 6, 1000)
    assert max(seen) <= 20_000 and sum(seen) == 64 * 6000
    assert sampling.choose(processed, list(range(64)), lengths, Stream.TARGET).shape == (64, 6)
