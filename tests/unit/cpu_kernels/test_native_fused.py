"""The small operations on the CPU: in bfloat16 they give the very bits of torch's, for any number of rows and threads;
in float32 a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch
from native import each_processor
from torch.nn import functional

from trtrun.kernels.cpu.fused import activate_and_multiply, fuses, normalise, rotate_by_kernel, square_sums, xielu
from trtrun.kernels.torch.operations import TorchOperations

pytestmark = [each_processor, pytest.mark.usefixtures("each_number_of_threads", "processor")]

ROWS = [0, 1, 2, 7, 300]
XIELU = (0.75, 1.25, 0.5, -1e-6)
"""Numbers of an activation."""


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
@pytest.mark.parametrize(
    ("size", "dtype"), [(48, torch.bfloat16), (1024, torch.bfloat16), (37, torch.float32)], ids=str
)
def test_square_sums(rows: int, size: int, dtype: torch.dtype) -> None:
    """Of the first numbers of wider rows, by the kernel and by torch; a row has the same bits in any company."""
    wide = numbers(rows, size + 16, seed=4, scale=3).to(dtype)
    wide[:, size:] = torch.nan
    x = wide[:, :size]
    for sums in (square_sums, TorchOperations().square_sums):
        found = sums(x)
        assert found.dtype is torch.float32
        assert torch.allclose(found.double(), x.double().square().sum(1), rtol=1e-6)
        for row in range(min(rows, 7)):
            assert torch.equal(sums(x[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "dtype"), [(48, torch.bfloat16), (1024, torch.bfloat16), (37, torch.float32)])
def test_xielu(rows: int, size: int, dtype: torch.dtype) -> None:
    """By the kernel and by torch, of small numbers and large; a row has the same bits in any company."""
    wide = numbers(rows, size + 16, seed=5, scale=3).to(dtype)
    x, factors = wide[:, :size] * 2.0 ** torch.arange(-18, size - 18).clamp(max=5).to(dtype), torch.tensor(XIELU)
    expected = xielu_of(x.double())
    for compute in (xielu, TorchOperations().xielu):
        found = compute(x, factors)
        bound = 2e-6 if dtype is torch.float32 else 5e-3
        assert found.dtype is dtype
        assert bool(((found - expected).abs() <= bound * (expected.abs() + x.abs())).all())
        for row in range(min(rows, 7)):
            assert torch.equal(compute(x[row : row + 1], factors), found[row : row + 1])
        moved = compute(torch.cat((x[:, 3:], x[:, :3]), dim=1), factors)
        assert torch.equal(torch.cat((moved[:, -3:], moved[:, :-3]), dim=1), found)


def xielu_of(x: torch.Tensor) -> torch.Tensor:
    """As arXiv:2411.13010 has it."""
    positive, negative, slope, least = XIELU
    below = (torch.expm1(x.clamp(max=least)) - x) * negative + slope * x
    return torch.where(x > 0, positive * x * x + slope * x, below)


@pytest.mark.parametrize("rows", ROWS)
def test_silu(rows: int) -> None:
    fused = numbers(rows, 2 * 688, seed=1, scale=4)
    expected = functional.silu(fused[:, :688]) * fused[:, 688:]
    found = activate_and_multiply(fused)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("size", "dtype"), [(48, torch.bfloat16), (37, torch.float32)])
def test_sigmoid(size: int, dtype: torch.dtype) -> None:
    """By the kernel and by torch; in half precision it is rounded before it is multiplied with."""
    fused = numbers(5, 2 * size, seed=7, scale=6).to(dtype)
    gate, factor = fused.double().chunk(2, dim=1)
    expected = torch.sigmoid(gate).to(dtype).double() * factor
    for compute in (activate_and_multiply, TorchOperations().activate_and_multiply):
        found = compute(fused, "sigmoid")
        assert found.dtype is dtype
        assert torch.allclose(found.double(), expected, rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-7)
    rows = [activate_and_multiply(fused[row : row + 1], "sigmoid") for row in range(5)]
    assert torch.equal(torch.cat(rows), activate_and_multiply(fused, "sigmoid"))


def test_silu_of_every_value() -> None:
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    values = functional.pad(values, (0, -len(values) % 16)).view(1, -1)
    found = activate_and_multiply(torch.cat((values, torch.ones_like(values)), dim=1))
    expected = functional.silu(values)
    # Where exp(x) is less than 1e-37 torch may still give the smallest of numbers.
    tiny = expected.abs() < 1e-34
    assert torch.equal(found[~tiny], expected[~tiny])
    assert bool((found[tiny].abs() < 1e-34).all())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "dtype"), [(48, torch.bfloat16), (1024, torch.bfloat16), (37, torch.float32)])
def test_the_activation_with_a_limit(rows: int, size: int, dtype: torch.dtype) -> None:
    """By the kernel and by torch, beyond the limit on both sides; a row has the same bits in any company."""
    fused = numbers(rows, 2 * size, seed=6, scale=4).to(dtype)
    gate, factor = fused.double().chunk(2, dim=1)
    gate, factor = gate.clamp(max=2.5), factor.clamp(-2.5, 2.5)
    expected = (factor + 1) * gate * torch.sigmoid(1.702 * gate)
    for compute in (activate_and_multiply, TorchOperations().activate_and_multiply):
        found = compute(fused, "clamped_swiglu", 2.5)
        assert found.dtype is dtype
        assert torch.allclose(found.double(), expected, rtol=1e-6 if dtype is torch.float32 else 2**-8, atol=1e-7)
        if compute is activate_and_multiply:
            for row in range(min(rows, 7)):
                assert torch.equal(compute(fused[row : row + 1], "clamped_swiglu", 2.5), found[row : row + 1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [32, 64, 160])
def test_rotation(rows: int, size: int) -> None:
    heads = numbers(rows, 9, size, seed=1)[:, 1:7]
    cosine, sine = numbers(rows, 1, size, seed=2), numbers(rows, 1, size, seed=3)
    expected = heads * cosine + torch.roll(heads, size // 2, 2) * sine
    assert torch.equal(rotate_by_kernel(heads, cosine, sine), expected)


def test_what_is_left_to_torch() -> None:
    host = torch.device("cpu")
    assert fuses(torch.bfloat16, host, 64)
    assert not fuses(torch.bfloat16, host, 40)
    assert fuses(torch.float32, host, 40)
    assert not fuses(torch.float16, host, 64)
    assert not fuses(torch.bfloat16, torch.device("cuda"), 64)


@pytest.mark.parametrize("size", [1, 15, 40, 688])
def test_in_float32_a_row_does_not_depend_on_the_others(size: int) -> None:
    """Sizes that are no whole registers, too; and no number beside the rows is read or written."""
    generator = torch.Generator().manual_seed(size)
    fused, weight = torch.randn(19, 2 * size, generator=generator) * 4, torch.randn(size, generator=generator)
    x, delta = torch.randn(2, 19, size, generator=generator).unbind()
    wide, added = fused.double(), (x + delta).double()
    exact = functional.silu(wide[:, :size]) * wide[:, size:]
    found = activate_and_multiply(fused)
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-7)
    scaled = added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    kept = x.clone()
    normed = normalise(kept, weight, 1e-5, delta)
    assert torch.allclose(normed.double(), scaled, rtol=1e-5, atol=1e-6)
    assert torch.equal(kept, x + delta)
    for row in range(19):
        one = slice(row, row + 1)
        assert torch.equal(activate_and_multiply(fused[one]), found[one])
        assert torch.equal(normalise(x[one].clone(), weight, 1e-5, delta[one]), normed[one])
    room = torch.full((3, size + 16), torch.nan)
    room[:, :size] = x[:3]
    normalise(room[:, :size], weight, 1e-5, delta[:3].contiguous())
    assert torch.equal(room[:, :size], kept[:3])
    assert bool(room[:, size:].isnan().all())
