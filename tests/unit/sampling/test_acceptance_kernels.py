"""Acceptance by kernels, of sampled drafts and of tokens: on a GPU where there is one, else in Triton's interpreter.
Against torch's operations, exact distributions and plain decoding."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_gpu
from sampling_reference import admission, chi_square_p_value, reference_logits, seeded, softmax
from sampling_rows import (
    COUNT,
    CUT,
    DEVICE,
    DRAFT_LOGITS,
    HAS_GPU,
    P_VALUE,
    TARGET_LOGITS,
    both_ways,
    many_rows,
    on_device,
)

from trtrun.core.sampling_params import SamplingParams
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.sampling import filters
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.random import Stream
from trtrun.speculation import verify as verification
from trtrun.speculation.verify import Verification, accept_by_probability, accept_by_token, verify

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = pytest.mark.usefixtures("sampling_kernels")


def test_acceptance_by_probability_follows_the_target() -> None:
    """First and second token together, whatever the draft; and as many are accepted as the distributions overlap."""
    settings = {"temperature": 0.9, **CUT}
    sampling, token_ids, lengths = many_rows(COUNT, **settings)
    rows = list(range(COUNT))
    found = distributions_of(sampling, DRAFT_LOGITS.to(DEVICE).expand(COUNT, 1, 6), rows, lengths, token_ids)
    drafts, probs = found.choose(Stream.DRAFT), found.probabilities(rows, 6)
    target = TARGET_LOGITS.to(DEVICE).expand(COUNT, 2, 6)
    verdict = verify(
        Verification(target, sampling, rows, lengths, token_ids), drafts, torch.ones_like(lengths), probs, rows
    )
    exact, drafted = (
        torch.tensor(softmax(reference_logits(line.tolist(), [1], seeded(**settings), 1)), dtype=torch.float64)
        for line in (TARGET_LOGITS, DRAFT_LOGITS)
    )
    tokens = verdict.tokens.cpu()
    assert chi_square_p_value(torch.bincount(tokens[:, 0], minlength=6), exact) > P_VALUE
    full = verdict.num_tokens.cpu() == 2
    assert chi_square_p_value(torch.bincount(tokens[full, 1], minlength=6), exact) > P_VALUE
    overlap = float(torch.minimum(exact, drafted).sum())
    assert abs(float(full.double().mean()) - overlap) < 4 * (overlap * (1 - overlap) / COUNT) ** 0.5


@pytest.mark.parametrize("draft_len", [1, 3])
def test_acceptance_by_probability_is_that_of_torch(draft_len: int) -> None:
    """The same tokens from the same noise; drafts of every length, ids that the target lacks, no distribution."""
    torch.manual_seed(draft_len)
    count, vocab = 400 if HAS_GPU else 5, 37
    rows = [admission(row, [1, 2], seeded(seed=row, temperature=0.8, min_p=0.01)) for row in range(count)]
    sampling, token_ids, lengths = on_device(rows, vocab)
    logits = torch.randn(count, draft_len + 1, vocab).to(DEVICE)
    probs = torch.softmax(logits[:, :-1] + torch.randn(count, draft_len, vocab).to(DEVICE) * 0.5, -1)
    drafts = torch.multinomial(probs.view(-1, vocab), 1).view(count, draft_len)
    drafts[0], probs[1] = vocab + 4, 0.0
    lens = (torch.arange(count, device=DEVICE) % (draft_len + 2)) - 1
    lens[:2] = draft_len
    lens = lens.repeat_interleave(3)[::3]  # a column of a packet
    _, plain = both_ways(sampling, logits, range(count), lengths, token_ids, drafts)
    arguments = (probs, drafts, lens, sampling.seeds(range(count)), lengths)
    expected = accept_by_probability(plain.probabilities(range(count), vocab), *arguments)
    verdict = verify(
        Verification(logits, sampling, range(count), lengths, token_ids), drafts, lens, probs, range(count)
    )
    assert torch.equal(verdict.num_tokens, expected[0]) and torch.equal(verdict.tokens, expected[1])
    assert draft_len == 1 or float(verdict.num_tokens.double().mean()) > 1


def test_equal_distributions_leave_no_residual() -> None:
    """A rejected token without a residual anywhere is rounding alone: the target's own distribution then."""
    sampling, token_ids, lengths = many_rows(4, temperature=1.0)
    sampling.numbers[:, 1] = 0.5  # the target keeps tokens 1 and 3
    target = torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0, 0.0], device=DEVICE).expand(4, 2, 6)
    probs = torch.tensor([[[0.5, 0.9, 0.5, 0.9, 0.5, 0.5]]], device=DEVICE).expand(4, 1, 6)
    drafts = torch.full((4, 1), 2, device=DEVICE)
    verdict = verify(
        Verification(target, sampling, range(4), lengths, token_ids), drafts, lengths * 0 + 1, probs, range(4)
    )
    assert verdict.num_tokens.tolist() == [1] * 4
    assert set(verdict.tokens[:, 0].tolist()) <= {1, 3}


@pytest.mark.parametrize("draft_len", [1, 4, 7])
def test_acceptance_by_token_is_that_of_torch(draft_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(draft_len)
    target = torch.randint(0, 2, (9, draft_len + 1), device=DEVICE)
    drafts = torch.randint(0, 2, (9, draft_len + 3), device=DEVICE)[:, :draft_len]
    lens = (torch.arange(9, device=DEVICE) % (draft_len + 2) - 1).repeat_interleave(2)[::2]  # a column of a packet
    found = accept_by_token(target, drafts, lens)
    monkeypatch.setattr(verification, "operations_of", lambda device_type: TorchOperations())
    expected = accept_by_token(target, drafts, lens)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_speculative_tokens_are_plain_ones_by_seed() -> None:
    """Logits depend on the last two tokens. Every parameter; drafts right, wrong, and beyond the vocabulary."""
    count, steps, vocab = (40, 20, 40) if HAS_GPU else (4, 3, 20)
    table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 2
    variants = (
        {"temperature": 1.0},
        {"temperature": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05, "min_tokens": 6, "logit_bias": {3: 2.0}},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
    )
    rows = list(range(count))
    admissions = [
        admission(
            row,
            [row % vocab, 3, 5],
            SamplingParams.from_mapping({"seed": row, **variants[row % 4]}),
            stop_ids=(2,),
            bad_word_ids=((4,), (1, 5)) if row % 3 == 0 else (),
        )
        for row in rows
    ]

    def text(draft_len: int) -> torch.Tensor:
        sampling, token_ids, lengths = on_device(admissions, vocab)
        generator = torch.Generator().manual_seed(draft_len)
        while int(lengths.min()) < 3 + steps:
            lengths = lengths.clamp(max=3 + steps)
            drafts = torch.randint(0, vocab + 2, (count, draft_len), generator=generator).to(DEVICE)
            if draft_len and plain is not None:  # right up to a place of each row's own
                places = (lengths[:, None] - 3 + torch.arange(draft_len, device=DEVICE)).clamp(max=steps - 1)
                right = plain.gather(1, places)
                upto = torch.randint(0, draft_len + 1, (count, 1), generator=generator).to(DEVICE)
                drafts = torch.where(torch.arange(draft_len, device=DEVICE) < upto, right, drafts)
            context = token_ids.long().scatter(
                1, lengths[:, None] + torch.arange(draft_len, device=DEVICE), drafts.clamp(max=vocab - 1)
            )
            where = lengths[:, None] + torch.arange(draft_len + 1, device=DEVICE)
            logits = table[context.gather(1, where - 2), context.gather(1, where - 1)]
            lens = torch.full_like(lengths, draft_len)
            verdict = verify(Verification(logits, sampling, rows, lengths, token_ids), drafts, lens)
            token_ids = token_ids.scatter(1, where, verdict.tokens.clamp(min=0).int())
            lengths = lengths + verdict.num_tokens
        return token_ids[:, 3 : 3 + steps].long()

    plain = None
    plain = text(0)
    assert plain.unique(dim=0).shape[0] > count // 2
    for draft_len in (1, 3) if HAS_GPU else (2,):
        assert torch.equal(text(draft_len), plain)


@needs_gpu
@pytest.mark.parametrize("values", [{"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95, "top_k": 200}])
def test_a_round_of_sampling_can_be_captured(values: dict[str, object]) -> None:
    """Drawing, and acceptance by token and by probability, replayed with other logits."""
    rows, vocab = list(range(5)), 9001
    sampling, token_ids, lengths = on_device([admission(row, [1], seeded(seed=row, **values)) for row in rows], vocab)
    logits = torch.randn(5, 4, vocab, device=DEVICE)
    drafts = torch.randint(0, vocab, (5, 3), device=DEVICE)
    lens = torch.full_like(lengths, 3)
    probs = torch.softmax(torch.randn(5, 3, vocab, device=DEVICE), -1)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        by_token = verify(Verification(logits, sampling, rows, lengths, token_ids), drafts, lens)
        by_probability = verify(Verification(logits, sampling, rows, lengths, token_ids), drafts, lens, probs, rows)
        return by_token.tokens, by_probability.tokens

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for seed in range(3):
        torch.manual_seed(seed)
        logits.copy_(torch.randn_like(logits) * 3)
        drafts.copy_(filters.apply_temperature(logits, torch.ones(5, device=DEVICE)).argmax(-1)[:, :3])
        graph.replay()
        expected = work()
        assert torch.equal(captured[0], expected[0]) and torch.equal(captured[1], expected[1])
