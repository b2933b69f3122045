"""Choosing tokens by kernels: on a GPU where there is one, else in Triton's interpreter. Against torch's operations, a
slow reference and exact distributions; and the same bits in any company."""

from __future__ import annotations

import importlib
import math
import random as python_random
from collections.abc import Callable

import pytest
import torch
from sampling_reference import VOCAB, admission, chi_square_p_value, random_case, reference_logits, seeded, softmax
from sampling_rows import (
    COUNT,
    CUT,
    DEVICE,
    HAS_GPU,
    P_VALUE,
    TARGET_LOGITS,
    both_ways,
    many_rows,
    on_device,
)

from trtrun.engine import graphs as graphs_module
from trtrun.engine.capture import capture_for
from trtrun.engine.graph_shapes import GraphShapes
from trtrun.engine.graphs import ForwardGraphs
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.keyed_ranks import KeyedRanks
from trtrun.sampling.random import Stream, gumbel, uniforms

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
tl = triton.language
noise = importlib.import_module("trtrun.kernels.triton.sampling.noise")

pytestmark = pytest.mark.usefixtures("sampling_kernels")


@triton.jit
def draw(seeds, positions, stream, uniform, negative, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    key = noise.key_of(tl.load(seeds + row), tl.load(positions + row), stream)
    tl.store(uniform + row, noise.to_uniform(key))
    token = tl.arange(0, WIDTH)
    tl.store(negative + row * WIDTH + token, noise.log_exponentials(key, token))


def test_noise_is_that_of_sampling_random() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, 12345, 77], device=DEVICE)
    positions = torch.tensor([0, 7, 131071, 5, 6], device=DEVICE)
    for stream in Stream:
        uniform = torch.empty(5, device=DEVICE)
        negative = torch.empty((5, 4096), device=DEVICE)
        draw[(5,)](seeds, positions, int(stream), uniform, negative, WIDTH=4096)
        assert torch.equal(uniform, uniforms(seeds, positions, stream))
        exact = gumbel(seeds.cpu(), positions.cpu(), stream, 4096).to(DEVICE)
        torch.testing.assert_close(-negative, exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("positions", "ties"), [(1, True), (2, False)])
def test_mixed_rows_match_the_slow_reference(positions: int, ties: bool) -> None:
    """Every parameter in every combination, rows in any order: the same tokens are left, equally likely."""
    generator = python_random.Random(positions * 2 + ties)
    torch.manual_seed(positions)
    count = 10 if HAS_GPU else 6
    for _ in range(20 if HAS_GPU else 1):
        cases = [random_case(generator) for _ in range(count)]
        admissions = [admission(row, case[1], case[0], case[2], case[3], case[4]) for row, case in enumerate(cases)]
        sampling, token_ids, lengths = on_device(admissions, VOCAB)
        rows = generator.sample(range(count), count)
        logits = torch.randn(count, positions, VOCAB) * 3
        logits = ((logits * 2).round() / 2 if ties else logits).to(DEVICE)
        drafts = torch.randint(0, 6, (count, positions - 1)).to(DEVICE) if positions > 1 else None
        before = logits.clone()
        found, plain = both_ways(sampling, logits, rows, lengths[rows], token_ids, drafts, 21)
        tokens = found.choose(Stream.TARGET)
        assert torch.equal(logits, before)
        assert torch.equal(tokens, plain.choose(Stream.TARGET))
        sampled = sampling.sampled_indices(rows)
        probabilities = found.probabilities(sampled, VOCAB + 3)
        assert not probabilities[..., VOCAB:].any()
        for index, row in enumerate(rows):
            params, sofar, prompt, stops, words = cases[row]
            for position in range(positions):
                drafted = drafts[index, :position].tolist() if drafts is not None else []
                line = logits[index, position].tolist()
                expected = reference_logits(line, sofar + drafted, params, prompt, stops, words)
                if params.is_greedy:
                    assert expected[int(tokens[index, position])] == pytest.approx(max(expected), abs=1e-5)
                else:
                    line = probabilities[sampled.index(index), position, :VOCAB].double().cpu()
                    wanted = torch.tensor(softmax(expected), dtype=torch.float64)
                    assert torch.equal(line > 0, wanted > 0)
                    torch.testing.assert_close(line, wanted, rtol=1e-4, atol=1e-6)


def test_a_row_gets_the_same_tokens_in_any_company() -> None:
    generator = python_random.Random(5)
    torch.manual_seed(5)
    count = 12 if HAS_GPU else 3
    cases = [random_case(generator) for _ in range(count)]
    cases = [case if not case[0].is_greedy else (seeded(temperature=1.5), *case[1:]) for case in cases]
    admissions = [admission(row, case[1], case[0], case[2], case[3], case[4]) for row, case in enumerate(cases)]
    sampling, token_ids, lengths = on_device(admissions, VOCAB)
    logits, drafts = (torch.randn(count, 3, VOCAB) * 3).to(DEVICE), torch.randint(0, 6, (count, 2)).to(DEVICE)
    whole = distributions_of(sampling, logits, list(range(count)), lengths, token_ids, drafts)
    tokens, probabilities = whole.choose(Stream.TARGET), whole.probabilities(range(count), VOCAB)
    for row in range(count):
        one = slice(row, row + 1)
        for positions in (1, 2):
            alone = distributions_of(
                sampling, logits[one, :positions], [row], lengths[one], token_ids, drafts[one, : positions - 1]
            )
            assert torch.equal(alone.choose(Stream.TARGET), tokens[one, :positions])
            assert torch.equal(alone.probabilities([0], VOCAB), probabilities[one, :positions])


def cut_like_torch(logits: torch.Tensor, top_k: int, top_p: float, temperature: float = 1.0) -> int:
    """Assert that one line is cut as torch's operations cut it; returns how many tokens are left."""
    params = seeded(temperature=temperature, top_k=top_k, top_p=top_p)
    sampling, token_ids, lengths = on_device([admission(0, [1], params)], logits.numel())
    found, plain = both_ways(sampling, logits.view(1, 1, -1).to(DEVICE), [0], lengths, token_ids)
    kept = found.probabilities([0], logits.numel())[0, 0]
    wanted = plain.probabilities([0], logits.numel())[0, 0]
    shares = torch.isfinite(plain.processed[0, 0]).cpu(), plain.processed[0, 0].exp().cpu()
    differs = (kept.cpu() > 0) != (shares[0] & (shares[1] >= 1e-12))
    # What the kernels weigh in units of 2**-40 has no probability below half of that.
    assert not differs[shares[1] > 1e-11].any(), differs.nonzero().flatten().tolist()[:9]
    torch.testing.assert_close(kept, wanted, rtol=2e-5, atol=1e-9)
    return int(shares[0].sum())


LINES = {
    "normal": lambda count: torch.randn(count),
    "wide": lambda count: torch.randn(count) * 5,
    "bfloat16": lambda count: (torch.randn(count) * 2).bfloat16().float(),
    "equal": lambda count: torch.zeros(count),
    "one": lambda count: torch.full((count,), -math.inf).index_fill_(0, torch.tensor([count // 2]), 3.0),
    "peak": lambda count: torch.randn(count).index_fill_(0, torch.tensor([5]), 40.0),
    "masked": lambda count: torch.randn(count).masked_fill_(torch.rand(count) < 0.6, -math.inf),
    "very low": lambda count: torch.randn(count).masked_fill_(torch.rand(count) < 0.6, -1e9),
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("count", [128256, 5001] if HAS_GPU else [80])
def test_lines_of_every_shape_are_cut_as_torch_cuts_them(kind: str, count: int) -> None:
    """More candidates than the last search holds, fewer tokens than top_k, ties, and all but a few impossible."""
    torch.manual_seed(len(kind))
    logits = LINES[kind](count)
    settings = [(0, 0.9, 0.7), (50, 0.6, 1.3), (7, 1.0, 0.8), (count - 9, 1.0, 1.0), (0, 1e-9, 1.0), (0, 0.999, 1.0)]
    settings += [(200, 0.95, 50.0)]
    left = [cut_like_torch(logits, *values) for values in settings[: len(settings) if HAS_GPU else 2]]
    assert max(left) > 1 or kind in ("one", "peak", "wide")


@pytest.mark.parametrize("candidates", [16, 4096])
def test_the_search_finds_the_same_wherever_it_looks(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    """Few candidates in registers, or the vocabulary itself."""
    from trtrun.kernels.triton.sampling import threshold

    monkeypatch.setattr(threshold, "CANDIDATES", candidates)
    torch.manual_seed(3)
    logits = (torch.randn(30) * 1.2).round()
    for top_k, top_p in ((20, 1.0), (0, 0.8), (20, 0.7)) if HAS_GPU else ((20, 0.7),):
        assert cut_like_torch(logits, top_k, top_p) > 2


def test_extreme_values() -> None:
    inf, nan = math.inf, math.nan
    lines = [[nan, 1.0, 2.0], [inf, 1.0, 0.0], [-inf, 1.0, 2.0], [3e38, -3e38, 1.0], [-inf, -inf, -inf], [nan] * 3]
    logits = torch.tensor(lines, device=DEVICE).unsqueeze(0)
    drafts = torch.zeros((1, 5), dtype=torch.int64, device=DEVICE)
    filters_of = [{"top_k": 2, "top_p": 0.4, "min_p": 0.2}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}]
    for values in filters_of if HAS_GPU else filters_of[:1]:
        for temperature in (1e-30, 1.0, 1e30) if HAS_GPU else (1e-30,):
            params = seeded(temperature=temperature, **values)
            sampling, token_ids, lengths = on_device([admission(0, [1], params)], 3)
            found, plain = both_ways(sampling, logits, [0], lengths, token_ids, drafts)
            torch.testing.assert_close(found.probabilities([0], 3), plain.probabilities([0], 3), rtol=1e-5, atol=1e-9)
            assert torch.equal(found.choose(Stream.TARGET), plain.choose(Stream.TARGET))
    # Greedy beside a sampled row: what is not a number is seen.
    rows = [admission(0, [1], seeded()), admission(1, [1], seeded(temperature=1.0))]
    sampling, token_ids, lengths = on_device(rows, 3)
    tokens = distributions_of(sampling, logits.expand(2, -1, -1), [0, 1], lengths, token_ids, drafts.expand(2, -1))
    assert tokens.choose(Stream.TARGET)[0].tolist() == [0, 0, 2, 0, 0, 0]


def test_ranks_are_those_of_torch() -> None:
    torch.manual_seed(1)
    params = [{"temperature": 1.1}, {}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3}]
    rows = [admission(row, [1, 2], seeded(**one, seed=row)) for row, one in enumerate(params)]
    sampling, token_ids, lengths = on_device(rows, 100)
    logits = torch.randn(4, 1, 100).to(DEVICE)
    found, plain = both_ways(sampling, logits, range(4), lengths, token_ids)
    assert torch.equal(found.rank(5), plain.rank(5))
    assert torch.equal(found.rank(5)[:, 0], found.choose(Stream.TARGET)[:, 0])
    scores = [one.scores().log_softmax(dim=1) for one in (found, plain)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores[0].argmax(dim=1), found.rank(1)[:, 0])


def test_choices_follow_the_distribution() -> None:
    sampling, token_ids, lengths = many_rows(COUNT, temperature=0.9, **CUT)
    logits = TARGET_LOGITS.to(DEVICE).expand(COUNT, 1, 6)
    found = distributions_of(sampling, logits, range(COUNT), lengths, token_ids)
    tokens = found.choose(Stream.TARGET)[:, 0].cpu()
    exact = torch.tensor(softmax(reference_logits(TARGET_LOGITS.tolist(), [1], seeded(temperature=0.9, **CUT), 1)))
    assert chi_square_p_value(torch.bincount(tokens, minlength=6), exact) > P_VALUE


@pytest.mark.parametrize(("count", "steps"), [(4, 2), (1, 5)])
def test_a_chain_of_sampled_steps_is_its_steps_one_by_one(
    count: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is replayed for other rows, in a bucket that is larger than they are many; and one that is longer
    than what runs between two looks of the host."""
    monkeypatch.setattr(graphs_module, "MOST_STEPS", 4)
    vocab = 20
    table = torch.randn((vocab, vocab), generator=torch.Generator().manual_seed(1)).to(DEVICE) * 2
    params = ({"temperature": 1.2}, {"temperature": 0.9, "top_p": 0.9}, {}, {"temperature": 1.5, "min_p": 0.01})
    admissions = [admission(row, [1, 2], seeded(**params[row % 4], seed=row)) for row in range(8)]
    sampling, token_ids, _ = on_device(admissions, vocab)
    replays = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        replay = (capture_for(DEVICE) or (lambda work: work))(work)
        return lambda: (replays.append(1), replay())[-1]

    graphs = ForwardGraphs(
        lambda tokens, positions, tables, num_last: table[tokens[:, -1]],
        capture, GraphShapes(8, 1, 4, 64), most_logits=8, table_numbers=32, vocab_size=vocab, device=DEVICE,
    )  # fmt: skip
    for rows in ([3, 1, 2], [7, 5, 6]):
        lengths = torch.tensor([row + 5 for row in rows], device=DEVICE)
        keyed = KeyedRanks.of(sampling, rows, lengths, Stream.TARGET)
        assert keyed is not None
        first = torch.tensor(rows, device=DEVICE)
        positions = lengths.unsqueeze(1) - 1 + torch.arange(steps, device=DEVICE)
        tables = torch.ones((3, 4), dtype=torch.int64, device=DEVICE)
        found = graphs.run_chain(first, positions, tables, vocab, count, keyed).clone()
        token = first
        for step in range(steps):
            alone = distributions_of(sampling, table[token].unsqueeze(1), rows, lengths + step, token_ids)
            token = alone.choose(Stream.TARGET)[:, 0]
            assert torch.equal(found[:, step, 0], token)
            assert torch.equal(found[:, step], alone.rank(count))
    assert len(replays) == 2 * steps
    assert KeyedRanks.of(sampling, [2, 6], lengths, Stream.TARGET) is not None
    sampling.admit([admission(2, [1], seeded(repetition_penalty=1.1))])
    assert KeyedRanks.of(sampling, [2, 3], lengths, Stream.TARGET) is None
