"""The largest numbers of a row: the same as a full sort's, by pieces too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trtrun.sampling.likeliest import _PIECE, _by_pieces, likeliest

Finder = Callable[[torch.Tensor, int], torch.Tensor]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
WIDTHS = [64 * _PIECE, 64 * _PIECE + 1, 80 * _PIECE - 1, 100 * _PIECE + 77]


def assert_largest(find: Finder, numbers: torch.Tensor, count: int) -> None:
    """Positions of the largest numbers, each once, the largest first."""
    found = find(numbers, count)
    assert found.dtype == torch.int64 and found.shape == (len(numbers), min(count, numbers.shape[1]))
    expected = numbers.sort(dim=-1, descending=True).values[:, :count]
    assert torch.equal(numbers.gather(1, found), expected)
    assert all(len(set(row)) == len(row) for row in found.tolist())


@pytest.mark.parametrize("find", [likeliest, _by_pieces])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 9, 64])
def test_they_are_those_of_a_sort(find: Finder, width: int, count: int) -> None:
    assert_largest(find, torch.randn(5, width, generator=torch.Generator().manual_seed(width + count)), count)


@pytest.mark.parametrize("find", [likeliest, _by_pieces])
def test_all_may_stand_in_one_piece_or_at_the_end_of_the_last(find: Finder) -> None:
    width = 70 * _PIECE + 5
    numbers = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    numbers[0, 3 * _PIECE : 4 * _PIECE] += 100
    numbers[1, -5:] += 100
    numbers[2, _PIECE - 1 :: _PIECE] += 100
    assert_largest(find, numbers, 9)
    assert find(numbers, 1)[1] >= width - 5


@pytest.mark.parametrize("find", [likeliest, _by_pieces])
def test_equal_numbers_and_forbidden_tokens(find: Finder) -> None:
    """Padding of the last piece is never found, even where little else is left."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(0, 3, (4, 66 * _PIECE + 3), generator=generator).float()
    assert_largest(find, numbers, 20)
    forbidden = torch.full((2, 66 * _PIECE + 3), float("-inf"))
    forbidden[0, [5, 66 * _PIECE + 2]] = torch.tensor([1.0, 2.0])
    forbidden[1, 17] = -4.0
    assert find(forbidden, 2)[0].tolist() == [66 * _PIECE + 2, 5]
    assert find(forbidden, 1)[1].tolist() == [17]
    assert int(find(forbidden, 9).max()) < forbidden.shape[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 3, 199, 20_000, 151_936])
def test_any_width_and_more_than_there_are(device: str, width: int) -> None:
    numbers = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to(device)
    assert_largest(likeliest, numbers, 9)
