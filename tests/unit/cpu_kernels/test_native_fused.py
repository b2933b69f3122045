"""The small bfloat16 operations on the CPU give the very bits of torch's, for any number of rows and threads."""

from __future__ import annotations

import pytest
import torch
from native import each_processor
from torch.nn import functional

from trtrun.kernels.cpu.fused import fuses, normalise, rotate, silu_and_multiply

pytestmark = [each_processor, pytest.mark.usefixtures("each_number_of_threads", "processor")]

ROWS = [0, 1, 2, 7, 300]


def numbers(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random bfloat16 of the shape."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def norm_of(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As the models' own code has it: statistics in float32, rounded, times the weight."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).float().bfloat16() * weight


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [16, 48, 1024])
def test_norm(rows: int, size: int) -> None:
    x, weight = numbers(rows, size, seed=1, scale=3), numbers(size, seed=2)
    kept = x.clone()
    found = normalise(x, weight, 1e-5)
    assert torch.equal(x, kept)
    assert torch.equal(found, norm_of(x, weight, 1e-5))
    for row in range(min(rows, 7)):
        assert torch.equal(normalise(x[row : row + 1], weight, 1e-5), found[row : row + 1])


def test_the_norm_of_zeros_is_zeros() -> None:
    assert torch.equal(
        normalise(torch.zeros(2, 32).bfloat16(), numbers(32, seed=1), 1e-5), torch.zeros(2, 32).bfloat16()
    )


@pytest.mark.parametrize("rows", ROWS)
def test_norm_of_a_sum_that_stays(rows: int) -> None:
    hidden, delta, weight = numbers(rows, 512, seed=1), numbers(rows, 512, seed=2), numbers(512, seed=3)
    total = hidden + delta
    found = normalise(hidden, weight, 1e-6, delta)
    assert torch.equal(hidden, total)
    assert torch.equal(found, norm_of(total, weight, 1e-6))


@pytest.mark.parametrize("rows", ROWS)
def test_norm_with_a_weight_for_each_head_of_a_wider_row(rows: int) -> None:
    wide, weight = numbers(rows, 12, 32, seed=1), numbers(9, 32, seed=2)
    heads = wide[:, :9]
    assert torch.equal(normalise(heads, weight, 1e-6), norm_of(heads, weight, 1e-6))


@pytest.mark.parametrize("rows", ROWS)
def test_silu(rows: int) -> None:
    fused = numbers(rows, 2 * 688, seed=1, scale=4)
    expected = functional.silu(fused[:, :688]) * fused[:, 688:]
    found = silu_and_multiply(fused)
    assert torch.equal(found, expected)


def test_silu_of_every_value() -> None:
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    values = functional.pad(values, (0, -len(values) % 16)).view(1, -1)
    found = silu_and_multiply(torch.cat((values, torch.ones_like(values)), dim=1))
    expected = functional.silu(values)
    # Where exp(x) is less than 1e-37 torch may still give the smallest of numbers.
    tiny = expected.abs() < 1e-34
    assert torch.equal(found[~tiny], expected[~tiny])
    assert bool((found[tiny].abs() < 1e-34).all())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [32, 64, 160])
def test_rotation(rows: int, size: int) -> None:
    heads = numbers(rows, 9, size, seed=1)[:, 1:7]
    cosine, sine = numbers(rows, 1, size, seed=2), numbers(rows, 1, size, seed=3)
    expected = heads * cosine + torch.roll(heads, size // 2, 2) * sine
    assert torch.equal(rotate(heads, cosine, sine), expected)


def test_what_is_left_to_torch() -> None:
    host = torch.device("cpu")
    assert fuses(torch.bfloat16, host, 64)
    assert not fuses(torch.bfloat16, host, 40)
    assert not fuses(torch.float32, host, 64)
    assert not fuses(torch.bfloat16, torch.device("cuda"), 64)
