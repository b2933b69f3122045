"""Counter-based randomness: known answers, independence of the batch, uniformity, extremes."""

from __future__ import annotations

import pytest
import torch
from sampling_reference import chi_square_p_value

from trtrun.sampling import random
from trtrun.sampling.random import Stream, gumbel, gumbel_argmax, gumbel_of, uniforms

P_VALUE = 1e-4
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def key(seed: int, position: int, stream: int) -> int:
    return mix64((mix64((seed + (stream + 1) * GAMMA) & MASK) + (position + 1) * GAMMA) & MASK)


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    """The first outputs of java.util.SplittableRandom's and Vigna's splitmix64 with seed 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    counters = random._counters(5, torch.device("cpu"))
    state = counters + 1234567
    mixed = random._mix_(state, torch.empty_like(state))
    assert [value & MASK for value in mixed.tolist()] == published


def test_uniforms_and_gumbel_match_big_integers() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, 12345, 12345])
    positions = torch.tensor([0, 7, 131071, 5, 6])
    for stream in Stream:
        keys = [key(s, p, stream) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
        expected = [((k & (2**63 - 1)) | 1) / 2**63 for k in keys]
        torch.testing.assert_close(uniforms(seeds, positions, stream), torch.tensor(expected))
        values = gumbel(seeds, positions, stream, 37)
        mixed = [[mix64((k + (token + 1) * GAMMA) & MASK) for token in range(37)] for k in keys]
        unit = torch.tensor([[((m & (2**63 - 1)) | 1) / 2**63 for m in row] for row in mixed], dtype=torch.float64)
        torch.testing.assert_close(values.double(), -torch.log(-torch.log1p(-unit)), rtol=1e-5, atol=1e-5)


def test_extreme_bits_stay_inside_the_open_interval() -> None:
    bits = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**62, 2**63 - 2**38, 2**63 - 2**39])
    numbers = random._to_unit_interval(bits.clone())
    assert bool((numbers > 0).all()) and bool((numbers < 1).all())
    assert bool(torch.isfinite((-numbers).log1p().neg().log()).all())


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 100, 32768, 40001])
def test_numbers_do_not_depend_on_the_batch(vocabulary: int) -> None:
    """Order, company, vocabulary width, how the work is cut into chunks and the number of threads change no bit."""
    seeds, positions = torch.arange(7) * 31, torch.arange(7) + 1000
    whole = gumbel(seeds, positions, Stream.TARGET, vocabulary)
    order = torch.tensor([6, 2, 0, 5, 1, 3, 4])
    assert torch.equal(gumbel(seeds[order], positions[order], Stream.TARGET, vocabulary), whole[order])
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(gumbel(seeds[one], positions[one], Stream.TARGET, vocabulary), whole[one])
        assert torch.equal(
            uniforms(seeds[one], positions[one], Stream.ACCEPT), uniforms(seeds, positions, Stream.ACCEPT)[one]
        )
    assert torch.equal(gumbel(seeds, positions, Stream.TARGET, vocabulary + 9)[:, :vocabulary], whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(gumbel(seeds, positions, Stream.TARGET, vocabulary), whole)
    finally:
        torch.set_num_threads(threads)


def test_numbers_of_some_tokens_are_those_of_all() -> None:
    seeds, positions = torch.arange(5) * 77, torch.arange(5) + 40
    tokens = torch.tensor([[3, 0, 999], [1, 1, 2], [500, 4, 3], [999, 998, 0], [7, 8, 9]])
    kept = tokens.clone()
    found = gumbel_of(seeds, positions, Stream.TARGET, tokens)
    assert torch.equal(tokens, kept)
    expected = gumbel(seeds, positions, Stream.TARGET, 1000).gather(1, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_stream_for_each_row_equals_one_stream() -> None:
    seeds, positions = torch.arange(8) + 5, torch.arange(8) * 3
    streams = torch.arange(8) % 4
    mixed = gumbel(seeds, positions, streams, 11)
    for stream in Stream:
        mine = streams == int(stream)
        assert torch.equal(mixed[mine], gumbel(seeds[mine], positions[mine], stream, 11))


def test_gumbel_argmax_is_the_argmax_of_logits_plus_gumbel() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 20001)
    before = logits.clone()
    seeds, positions = torch.arange(9), torch.full((9,), 44)
    expected = (logits + gumbel(seeds, positions, Stream.DRAFT, 20001)).argmax(-1)
    assert torch.equal(gumbel_argmax(logits, seeds, positions, Stream.DRAFT), expected)
    assert torch.equal(logits, before)
    nothing = torch.full((2, 5), -torch.inf)
    assert gumbel_argmax(nothing, seeds[:2], positions[:2], Stream.DRAFT).tolist() == [0, 0]
    assert gumbel_argmax(torch.empty(0, 5), seeds[:0], positions[:0], Stream.DRAFT).shape == (0,)
    assert gumbel(seeds[:0], positions[:0], Stream.DRAFT, 5).shape == (0, 5)


def cells(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return (numbers * count).long().clamp(max=count - 1)


def numbers_along(axis: str) -> torch.Tensor:
    """[200, 500] uniforms: neighbours along dimension 1 differ by one in `axis` alone."""
    outer, inner = torch.arange(200)[:, None], torch.arange(500)
    if axis == "token":
        values = gumbel(torch.arange(200), torch.full((200,), 3), Stream.TARGET, 500)
        return torch.exp(-torch.exp(-values))
    seeds, positions = (outer, inner) if axis == "position" else (inner, outer)
    grid = torch.broadcast_tensors(seeds, positions)
    return uniforms(grid[0].flatten(), grid[1].flatten(), Stream.ACCEPT).view(200, 500)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_numbers_are_uniform_and_neighbours_independent(axis: str, lag: int) -> None:
    numbers = numbers_along(axis)
    for part in (numbers, (numbers * 2**12) % 1):  # high bits, and the bits below the twelfth
        counts = torch.bincount(cells(part, 256).flatten(), minlength=256)
        assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > P_VALUE
        pairs = cells(part[:, :-lag], 16) * 16 + cells(part[:, lag:], 16)
        # Overlapping pairs are not independent of each other; every other block of `lag` is.
        pairs = pairs[:, (torch.arange(pairs.shape[1]) // lag) % 2 == 0]
        counts = torch.bincount(pairs.flatten(), minlength=256)
        assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > P_VALUE


def test_streams_are_independent() -> None:
    seeds, positions = torch.arange(100_000) // 100, torch.arange(100_000) % 100
    numbers = {stream: uniforms(seeds, positions, stream) for stream in Stream}
    for first in Stream:
        for second in Stream:
            if first < second:
                pairs = cells(numbers[first], 16) * 16 + cells(numbers[second], 16)
                counts = torch.bincount(pairs, minlength=256)
                assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > P_VALUE


def test_the_tail_of_gumbel_numbers_is_fine() -> None:
    """The largest of 2**22 numbers, which decide an argmax, do not tie; and there are as many as there should be."""
    values = gumbel(torch.arange(64), torch.arange(64), Stream.TARGET, 65536).flatten()
    top = values.topk(1000).values
    assert top.unique().numel() > 990
    above = (values > 8.0).sum().double()
    expected = values.numel() * (1 - torch.exp(-torch.exp(torch.tensor(-8.0, dtype=torch.float64))))
    assert abs(float(above - expected)) < 4 * float(expected) ** 0.5
    assert bool(torch.isfinite(values).all())
