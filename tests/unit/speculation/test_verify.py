"""Acceptance by token: worked examples, trees, and the invariant that the draft cannot be seen in the output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import admission

from trtrun.core.nouns import RoundPlan, Verdict
from trtrun.core.sampling_params import SamplingParams
from trtrun.rounds.launched_round import VerdictCopy
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.verify import Verification, accept_by_probability, accept_by_token, verify
from trtrun.wire.reports import RoundReport, decode_report

VOCAB = 12


def test_accept_by_token_examples() -> None:
    target = torch.tensor([[5, 6, 7, 8]] * 6)
    draft = torch.tensor([[5, 6, 7], [5, 9, 7], [9, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    num_tokens, tokens = accept_by_token(target, draft, torch.tensor([3, 3, 3, 2, 0, -1]))
    assert num_tokens.tolist() == [4, 2, 1, 3, 1, 1]
    assert tokens.tolist() == [
        [5, 6, 7, 8],
        [5, 6, -1, -1],
        [5, -1, -1, -1],
        [5, 6, 7, -1],
        [5, -1, -1, -1],
        [5, -1, -1, -1],
    ]
    num_tokens, tokens = accept_by_token(target[:, :1], draft[:, :0], torch.zeros(6, dtype=torch.int64))
    assert num_tokens.tolist() == [1] * 6 and tokens.tolist() == [[5]] * 6


def test_accept_by_probability_certain_cases() -> None:
    """Equal certainty is accepted, impossible tokens never; a draft_len of 0 or -1 gives the target's token."""
    certain = torch.eye(5)
    target = torch.stack([certain[[1, 2, 3]]] * 6)
    draft = torch.stack(
        [certain[[1, 2]], certain[[1, 4]], certain[[0, 2]], certain[[1, 2]], certain[[1, 2]], certain[[1, 2]]]
    )
    tokens = torch.tensor([[1, 2], [1, 4], [0, 2], [1, -1], [7, 2], [1, 2]])
    lens = torch.tensor([2, 2, 2, 1, 2, -1])
    seeds = torch.arange(6)
    num_tokens, gained = accept_by_probability(target, draft, tokens, lens, seeds, seeds + 9)
    assert num_tokens.tolist() == [3, 2, 1, 2, 1, 1]
    assert gained.tolist() == [[1, 2, 3], [1, 2, -1], [1, -1, -1], [1, 2, -1], [1, -1, -1], [1, -1, -1]]
    empty = accept_by_probability(target[:, :1], draft[:, :0], tokens[:, :0], lens * 0, seeds, seeds)
    assert empty[1].tolist() == [[1]] * 6


def test_an_all_zero_residual_falls_back_to_the_target() -> None:
    """A draft token that the target rules out, with no residual anywhere: only rounding can do that."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]).expand(64, 2, 3)
    draft = torch.tensor([[[0.5, 0.5, 0.5]]]).expand(64, 1, 3)
    seeds = torch.arange(64)
    num_tokens, tokens = accept_by_probability(
        target, draft, torch.full((64, 1), 2), torch.ones(64, dtype=torch.int64), seeds, seeds
    )
    assert bool((num_tokens == 1).all()) and set(tokens[:, 0].tolist()) == {0, 1}


def varied_rows() -> list:
    """Greedy and sampled rows, each with other parameters."""
    variants = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"temperature": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.1, "min_tokens": 6, "logit_bias": {3: 2.0}},
        {"temperature": 2.0},
    )
    return [
        admission(
            row,
            [row % VOCAB, 3, 5],
            SamplingParams.from_mapping({"seed": 1000 + row, **variants[row % 8]}),
            stop_ids=(2,),
            bad_word_ids=((4,), (1, 5), (3, 3)) if row % 3 == 0 else (),
        )
        for row in range(40)
    ]


class Toy:
    """Two 'models' whose logits depend on the last two tokens, and the state of a running batch."""

    def __init__(self, admissions: list, draft_noise: float) -> None:
        generator = torch.Generator().manual_seed(4)
        self.target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 2
        self.draft = self.target + draft_noise * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self.rows = list(range(len(admissions)))
        self.sampling = RowSampling(len(admissions), VOCAB, "cpu")
        self.token_ids = torch.zeros((len(admissions), 40), dtype=torch.int32)
        for one in admissions:
            self.sampling.admit([one])
            self.token_ids[one.row, : len(one.tokens)] = torch.from_numpy(one.tokens)
        self.lengths = torch.tensor([len(one.tokens) for one in admissions])

    def logits(
        self, table: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor, positions: int
    ) -> torch.Tensor:
        """[R, positions, V]: logits at lengths, lengths + 1, …, given the tokens in `token_ids`."""
        places = lengths[:, None] + torch.arange(positions)
        token_ids = token_ids.long()
        return table[token_ids.gather(1, places - 2), token_ids.gather(1, places - 1)]

    def propose(self, count: int, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft's tokens [R, count] and processed probabilities [R, count, V]."""
        token_ids, lengths, probabilities = self.token_ids.clone(), self.lengths.clone(), []
        for _ in range(count):
            processed = self.sampling.process(
                self.logits(self.draft, token_ids, lengths, 1), self.rows, lengths, token_ids
            )
            probabilities.append(self.sampling.probabilities(processed))
            tokens = self.sampling.choose(processed, self.rows, lengths, stream)
            token_ids.scatter_(1, lengths[:, None], tokens.int())
            lengths += 1
        width = self.lengths[:, None] + torch.arange(count)
        return token_ids.long().gather(1, width), torch.cat(probabilities, dim=1)

    def verify(
        self,
        drafts: torch.Tensor,
        lens: torch.Tensor,
        probabilities: torch.Tensor | None = None,
        probability_rows: tuple[int, ...] | list[int] = (),
    ) -> torch.Tensor:
        """One verification; appends what the rows gain. Returns num_tokens."""
        count = drafts.shape[1]
        places = self.lengths[:, None] + torch.arange(count)
        extended = self.token_ids.scatter(1, places, drafts.clamp(0, VOCAB - 1).int())
        logits = self.logits(self.target, extended, self.lengths, count + 1)
        # Behind its valid tokens a row's token_ids is anything.
        self.token_ids = torch.where(torch.arange(40) < self.lengths[:, None], self.token_ids, 3)
        verdict = verify(
            Verification(logits, self.sampling, self.rows, self.lengths, self.token_ids),
            drafts,
            lens,
            probabilities,
            probability_rows,
        )
        steps = torch.arange(count + 1)
        assert torch.equal(verdict.tokens >= 0, steps < verdict.num_tokens[:, None])
        self.token_ids.scatter_(1, self.lengths[:, None] + steps, verdict.tokens.clamp(min=0).int())
        self.lengths += verdict.num_tokens
        return verdict.num_tokens

    def outputs(self, count: int) -> torch.Tensor:
        """[R, count]: the first tokens behind the prompts of three."""
        return self.token_ids[:, 3 : 3 + count].long()


def target_only(count: int) -> torch.Tensor:
    toy = Toy(varied_rows(), 0.0)
    for _ in range(count):
        toy.verify(torch.empty(40, 0, dtype=torch.int64), torch.zeros(40, dtype=torch.int64))
    return toy.outputs(count)


@pytest.mark.parametrize("draft_len", [1, 3, 6])
@pytest.mark.parametrize("quality", [0.0, 0.5, 100.0, None])
def test_token_mode_with_a_seed_is_identical_to_target_only(draft_len: int, quality: float | None) -> None:
    """Greedy and sampled rows with every parameter, draft_lens that differ by row and round; None drafts garbage."""
    expected = target_only(20)
    toy = Toy(varied_rows(), quality or 0.0)
    generator = torch.Generator().manual_seed(draft_len)
    accepted = drafted = 0
    while int(toy.lengths.min()) < 23:
        toy.lengths.clamp_(max=26)  # rows that are done stay where they are; room for the drafts of the others
        if quality is None:
            drafts = torch.randint(-1, VOCAB + 3, (40, draft_len), generator=generator)
        else:
            drafts, _ = toy.propose(draft_len, Stream.TARGET)
        lens = torch.randint(-1, draft_len + 1, (40,), generator=generator)
        accepted += int((toy.verify(drafts, lens) - 1).sum())
        drafted += int(lens.clamp(min=0).sum())
    assert torch.equal(toy.outputs(20), expected)
    if quality == 0.0:
        assert accepted == drafted  # the same model with the same noise agrees always
    if quality == 0.5:
        assert drafted * 0.5 < accepted < drafted


def test_target_only_draws_differ_by_seed_and_position() -> None:
    """Else identity would be trivial."""
    sampled = [row for row in range(40) if row % 8 not in (0, 4)]
    outputs = target_only(20)[sampled]
    assert outputs.unique(dim=0).shape[0] == len(sampled)
    assert min(row.unique().numel() for row in outputs) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft_len", [0, 1, 3])
def test_a_row_to_which_every_token_is_forbidden_ends_there(draft_len: int, temperature: float) -> None:
    """Behind the token 4 all are bad words, behind the row beside it none; token 4 comes after two others."""
    words = tuple((3, 4, token) for token in range(VOCAB))
    row = admission(0, [1, 2], SamplingParams(seed=1, temperature=temperature), bad_word_ids=words)
    beside = admission(1, [1, 2], SamplingParams(seed=1, temperature=temperature))
    toy = Toy([row, beside], 0.0)
    toy.target[:] = -40.0
    for before, token in ((2, 5), (5, 3), (3, 4), (4, 0), (0, 7), (7, 0)):
        toy.target[:, before, token] = 40.0
    right = torch.tensor([5, 3, 4, 0, 7, 0, 7, 0, 7, 0])
    text = torch.cat((torch.tensor([1, 2]), right)).int().expand(2, -1)
    gained: list[int] = []
    for _ in range(9):
        begin = int(toy.lengths[0]) - 2
        drafts = right[begin : begin + draft_len].expand(2, draft_len).contiguous()
        verdict = verify(
            Verification(
                toy.logits(toy.target, text, toy.lengths, draft_len + 1),
                toy.sampling,
                toy.rows,
                toy.lengths,
                toy.token_ids,
            ),
            drafts,
            torch.full((2,), draft_len),
        )
        assert verdict.chosen_logits is not None
        count = int(verdict.num_tokens[0])
        tokens, fine = verdict.tokens[0, :count].tolist(), torch.isfinite(verdict.chosen_logits[:, :count])
        assert verdict.tokens[0, count:].tolist() == [-1] * (draft_len + 1 - count)
        assert bool(fine[1].all()), "nothing is forbidden to the row beside it"
        if not fine[0].all():
            assert count == 1
            break
        gained += tokens
        toy.token_ids[:, begin + 2 : begin + 2 + count] = verdict.tokens[0, :count].int()
        toy.lengths += count
    assert gained == [5, 3, 4]


def test_verify_mixes_modes_and_reports_logprobs_in_order() -> None:
    """Rows by probability between rows by token: each as if alone; logprobs as wide as the widest asked."""
    admissions = [
        admission(0, [1, 2, 3], SamplingParams(seed=5, logprobs=1)),
        admission(1, [4, 2, 3], SamplingParams(seed=6, temperature=0.9)),
        admission(2, [5, 2, 3], SamplingParams(seed=7, temperature=0.9, logprobs=3, top_k=4)),
        admission(3, [6, 2, 3], SamplingParams(seed=8)),
    ]
    toy = Toy(admissions, 0.5)
    drafts, probabilities = toy.propose(3, Stream.DRAFT)
    lens = torch.tensor([3, 2, 3, -1])
    raw = torch.randn(4, 4, VOCAB)
    both = verify(
        Verification(raw, toy.sampling, toy.rows, toy.lengths, toy.token_ids), drafts, lens, probabilities[1:3], [1, 2]
    )
    for row in range(4):
        one = slice(row, row + 1)
        by_probability = row in (1, 2)
        alone = verify(
            Verification(raw[one], toy.sampling, [row], toy.lengths[one], toy.token_ids),
            drafts[one],
            lens[one],
            probabilities[one] if by_probability else None,
            [0] if by_probability else [],
        )
        assert torch.equal(alone.tokens, both.tokens[one]) and torch.equal(alone.num_tokens, both.num_tokens[one])
    assert both.logprobs is not None
    assert both.logprobs.token_ids.shape == (2, 4, 4)
    assert torch.equal(both.logprobs.token_ids[..., 0], both.tokens[[0, 2]])
    expected = torch.log_softmax(raw[2, 0], -1)
    assert float(both.logprobs.values[1, 0, 0]) == pytest.approx(float(expected[both.tokens[2, 0]]))
    assert both.logprobs.token_ids[1, 0, 1:].tolist() == expected.topk(3).indices.tolist()
    quiet = verify(Verification(raw[1:2], toy.sampling, [1], toy.lengths[1:2], toy.token_ids), drafts[1:2], lens[1:2])
    assert quiet.logprobs is None
    with pytest.raises(ValueError, match="draft_probs must be"):
        verify(
            Verification(raw, toy.sampling, toy.rows, toy.lengths, toy.token_ids), drafts, lens, probabilities, [1, 2]
        )


def report_of(verdict: Verdict) -> RoundReport:
    """What the orchestrator is told."""
    nothing = np.zeros(0, dtype=np.int32)
    plan = RoundPlan(0, (), (), np.zeros((0, 3), dtype=np.int32), (), nothing, nothing, nothing, 0)
    return decode_report(VerdictCopy(plan, verdict).wait().encode())


@pytest.mark.parametrize("mode", ["greedy", "sampled", "probability"])
@pytest.mark.parametrize(
    ("damage", "position"),
    [("nan", 0), ("all nan", 0), ("all nan", 1), ("inf", 1), ("all -inf", 0), ("all inf", 1)],
)
def test_a_row_whose_logits_are_not_finite_gains_nothing(mode: str, damage: str, position: int) -> None:
    """Row 1 would choose a token without a finite logit; the rows beside it are as without it."""
    parameters = {"seed": 3, "logprobs": 2} | ({} if mode == "greedy" else {"temperature": 0.8, "top_p": 0.9})
    admissions = [admission(row, [row, 2, 3], SamplingParams.from_mapping(parameters)) for row in range(3)]
    toy = Toy(admissions, 0.0)
    by_probability = mode == "probability"
    drafts, probabilities = toy.propose(2, Stream.DRAFT if by_probability else Stream.TARGET)
    extended = toy.token_ids.scatter(1, toy.lengths[:, None] + torch.arange(2), drafts.int())
    logits = toy.logits(toy.target, extended, toy.lengths, 3)
    lens = torch.full((3,), 2)
    verification = Verification(logits, toy.sampling, toy.rows, toy.lengths, toy.token_ids)
    arguments = (drafts, lens)
    arguments += (probabilities, [0, 1, 2]) if by_probability else (None, ())
    whole = verify(verification, *arguments)
    assert int(whole.num_tokens.min()) == 3, "the draft is the target, so that every position is reached"
    token = int(whole.tokens[1, position])
    damages = {"nan": (token, "nan"), "inf": (token, "inf")}
    place, value = damages.get(damage, (slice(None), damage.removeprefix("all ")))
    logits[1, position, place] = float(value)
    verdict = verify(verification, *arguments)
    report = report_of(verdict)
    if damage == "nan" and mode != "greedy":
        # A sampled row does not choose it: NaN counts as impossible.
        assert token not in verdict.tokens[1, position : position + 1].tolist()
    else:
        assert report.num_tokens[1] == 0 and report.tokens[1] == []
    for row in (0, 2):
        assert report.num_tokens[row] == 3 and report.tokens[row] == whole.tokens[row].tolist()
    assert verdict.logprobs is not None and bool(verdict.logprobs.values[[0, 2]].isfinite().all())


def test_infinite_logits_of_tokens_that_nobody_chooses_do_no_harm() -> None:
    """Models mask entries of their vocabulary with -inf."""
    toy = Toy([admission(0, [1, 2, 3], SamplingParams(seed=1))], 0.0)
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, 4] = 1.0
    logits[0, 0, 5:] = -torch.inf
    none = torch.empty(1, 0, dtype=torch.int64)
    verdict = verify(
        Verification(logits, toy.sampling, [0], toy.lengths, toy.token_ids), none, torch.zeros(1, dtype=torch.int64)
    )
    assert verdict.num_tokens.tolist() == [1] and verdict.tokens.tolist() == [[4]]
    assert report_of(verdict).tokens == [[4]]


def test_a_draft_without_a_distribution_cannot_be_seen_in_the_output() -> None:
    """Where the draft's logits are NaN its probabilities are 0: its token 0 must not be taken for certain."""
    admissions = [admission(row, [1, 2, 3], SamplingParams(seed=row, temperature=1.0)) for row in range(4000)]
    sampling = RowSampling(4000, 4, "cpu")
    for one in admissions:
        sampling.admit([one])
    rows, lengths = list(range(4000)), torch.full((4000,), 3)
    token_ids = torch.zeros((4000, 9), dtype=torch.int32)
    broken = sampling.process(torch.full((4000, 1, 4), torch.nan), rows, lengths, token_ids)
    drafts = sampling.choose(broken, rows, lengths, Stream.DRAFT)
    probabilities = sampling.probabilities(broken)
    assert not probabilities.any()
    target = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, 2, 4)
    verdict = verify(
        Verification(target, sampling, rows, lengths, token_ids), drafts, torch.ones_like(lengths), probabilities, rows
    )
    counts = torch.bincount(verdict.tokens[:, 0], minlength=4) / 4000
    assert bool((verdict.num_tokens == 1).all())
    assert torch.allclose(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.03)


def test_nothing_is_read_back_from_the_device() -> None:
    """The decode path runs on torch's meta device, which holds no values: any read-back raises there."""
    sampling = RowSampling(40, VOCAB, "meta")
    for one in varied_rows():
        sampling.admit([one])
    rows = list(range(40))

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    token_ids, logits = integers(40, 50).int(), torch.empty(40, 4, VOCAB, device="meta")
    sampled = sampling.sampled_indices(rows)
    probabilities = torch.empty(len(sampled), 3, VOCAB, device="meta")
    verdict = verify(
        Verification(logits, sampling, rows, integers(40), token_ids),
        integers(40, 3),
        integers(40),
        probabilities,
        sampled,
    )
    assert verdict.tokens.shape == (40, 4) and verdict.tokens.device.type == "meta"
    verdict = verify(Verification(logits, sampling, rows, integers(40), token_ids), integers(40, 3), integers(40))
    assert verdict.num_tokens.shape == (40,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((verdict.tokens > 0).any())
