"""The largest numbers of a row: the same as a full sort's, on the CPU and by the kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpus import DEVICES

from trtrun.sampling.filters import argmax, likeliest, likeliest_in_order

PIECE = 2048
"""Numbers that one program of the kernel reads."""

pytestmark = pytest.mark.parametrize("device", DEVICES)


def assert_largest(numbers: torch.Tensor, count: int) -> None:
    """Positions of the largest numbers, each once, the largest first."""
    found = likeliest(numbers, count)
    assert found.dtype == torch.int64 and found.shape == (len(numbers), min(count, numbers.shape[1]))
    expected = numbers.sort(dim=-1, descending=True).values[:, :count]
    assert torch.equal(numbers.gather(1, found), expected)
    assert all(len(set(row)) == len(row) for row in found.tolist())


def random_rows(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("width", [1, 3, 199, PIECE, PIECE + 1, 8 * PIECE - 1, 20_000, 151_936])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_they_are_those_of_a_sort(device: str, width: int, count: int) -> None:
    assert_largest(random_rows(5, width).to(device), count)


def test_the_first_columns_of_wider_rows(device: str) -> None:
    """A draft's padding is never chosen."""
    numbers = random_rows(3, 3 * PIECE).to(device)
    numbers[:, 5000:] += 100
    assert_largest(numbers[:, :5000], 9)


def test_of_equal_largest_numbers_the_first_comes_first(device: str) -> None:
    numbers = random_rows(4, 3 * PIECE).to(device)
    for row, places in enumerate(([7, 2 * PIECE], [PIECE + 1, PIECE + 2], [5, PIECE, 2 * PIECE, 2 * PIECE + 1], [9])):
        numbers[row, places] = 100.0
    assert likeliest(numbers, 9)[:, 0].tolist() == [7, PIECE + 1, 5, 9]
    assert_largest(numbers, 9)
    numbers[:] = 1.0
    assert likeliest(numbers, 2)[:, 0].tolist() == [0] * 4


def test_all_may_stand_in_one_piece_or_at_the_end_of_the_last(device: str) -> None:
    width = 7 * PIECE + 5
    numbers = random_rows(3, width).to(device)
    numbers[0, 3 * PIECE : 4 * PIECE] += 100
    numbers[1, -5:] += 100
    numbers[2, PIECE - 1 :: PIECE] += 100
    assert_largest(numbers, 9)
    assert likeliest(numbers, 1)[1] >= width - 5


def test_equal_numbers_and_forbidden_tokens(device: str) -> None:
    """Nothing beyond a row's end is found, even where little is left."""
    width = 6 * PIECE + 3
    numbers = torch.randint(0, 3, (4, width), generator=torch.Generator().manual_seed(2)).float().to(device)
    assert_largest(numbers, 20)
    forbidden = torch.full((2, width), float("-inf"), device=device)
    forbidden[0, [5, width - 1]] = torch.tensor([1.0, 2.0], device=device)
    forbidden[1, 17] = -4.0
    assert likeliest(forbidden, 2)[0].tolist() == [width - 1, 5]
    assert likeliest(forbidden, 1)[1].tolist() == [17]
    assert int(likeliest(forbidden, 9).max()) < width


@pytest.mark.parametrize("width", [7, PIECE + 1, 20_001])
def test_of_equal_numbers_the_first_come_first_whatever_the_count(device: str, width: int) -> None:
    numbers = torch.randint(0, 9, (2, 3, width), generator=torch.Generator().manual_seed(3)).float().to(device)
    expected = numbers.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 2, 3, 5, 20):
        found = likeliest_in_order(numbers, count)
        assert torch.equal(found, expected[..., : min(count, width)])


@pytest.mark.parametrize("width", [1, PIECE, 20_001, 128_256])
def test_the_largest_alone(device: str, width: int) -> None:
    """The first where several are, over rows and positions; what is not finite wins, and of nothing the first."""
    numbers = random_rows(6 * 3, width + 64).view(6, 3, -1).to(device)[..., :width]
    numbers[1, 0, [width // 2, width - 1]] = 50.0
    numbers[2, 1, width - 1] = float("inf")
    numbers[3, 2, width // 3] = float("nan")
    numbers[4] = float("-inf")
    found = argmax(numbers)
    assert torch.equal(found, numbers.nan_to_num(float("inf"), float("inf"), float("-inf")).argmax(dim=-1))
    assert found.shape == (6, 3) and not found[4].any()
