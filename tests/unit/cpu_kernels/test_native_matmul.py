"""Products on the CPU, of bfloat16 and float32: right to the last rounding, and bit-equal in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from native import each_processor, leave_to_torch

from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, compile_kernels
from trtrun.kernels.cpu.matmul import BlockedMatmul
from trtrun.kernels.cpu.matmul_code import FLOAT32_STRETCH, FORMS, KERNEL, STRETCH, matmul_module, prefetch_for
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS

pytestmark = [each_processor, pytest.mark.usefixtures("each_number_of_threads", "processor")]

SHAPES = [
    (64, 2),  # one pair of input features
    (1, 8),  # one output feature: a block that is nearly empty
    (24, 60),
    (128, 1000),  # whole blocks
    (1000, 688),
    (70, 2 * STRETCH + 2),  # one pair more than tiles go through together
    (130, 6 * STRETCH + 10),
]
TILE_ROWS = FORMS[MULTIPLIES_BFLOAT16].rows
CASES = [
    *((features, inputs, torch.bfloat16) for features, inputs in SHAPES),
    *((features, inputs, torch.float32) for features, inputs in [(1, 1), (24, 61), (128, FLOAT32_STRETCH), (70, 1100)]),
]
ROWS = [1, 2, 3, 4, 5, TILE_ROWS, TILE_ROWS + 1, 13, 5 * TILE_ROWS, 100]


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers of the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> None:
    """`found` is `exact` (float64) rounded to its dtype, but for float32 sums of terms whose sizes add up to these."""
    rounding = {torch.bfloat16: 2**-8, torch.float32: 2**-23}[found.dtype]
    error = (found.double() - exact).abs()
    assert bool((error <= exact.abs() * rounding + sizes * 2**-20).all()), (error / (exact.abs() + sizes)).max()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs", "dtype"), CASES)
def test_products_are_right_and_rows_do_not_depend_on_their_number(
    features: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> None:
    weight, x = numbers(features, inputs, seed=1, dtype=dtype), numbers(max(ROWS), inputs, seed=2, dtype=dtype)
    bias = numbers(features, seed=3, dtype=dtype) * 8 if with_bias else None
    matmul = BlockedMatmul(weight.clone(), bias)
    whole = matmul(x)
    assert whole.dtype is dtype
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    assert_rounded(whole, exact, sizes)
    for rows in ROWS:
        assert torch.equal(matmul(x[:rows]), whole[:rows])
        assert torch.equal(matmul(x[-rows:]), whole[-rows:])


def test_rows_may_lie_apart() -> None:
    weight, wide = numbers(100, 64, seed=1), numbers(9, 200, seed=2)
    matmul = BlockedMatmul(weight, None)
    x = wide[:, 50:114]
    assert torch.equal(matmul(x), matmul(x.contiguous()))
    turned = numbers(64, 9, seed=3).T
    assert torch.equal(matmul(turned), matmul(turned.contiguous()))
    assert torch.equal(matmul(wide[:1, :64].expand(7, -1)), matmul(wide[:1, :64]).expand(7, -1))


def test_no_rows_give_no_rows() -> None:
    assert BlockedMatmul(numbers(100, 64, seed=1), None)(numbers(0, 64, seed=2)).shape == (0, 100)


def test_the_product_keeps_no_hold_of_the_weight_that_it_was_made_of() -> None:
    weight, x = numbers(100, 64, seed=1), numbers(3, 64, seed=2)
    matmul = BlockedMatmul(weight, None)
    expected = matmul(x)
    weight.zero_()
    assert torch.equal(matmul(x), expected)


def test_values_that_are_not_numbers_come_through() -> None:
    weight = numbers(70, 64, seed=1)
    x = numbers(2, 64, seed=2)
    x[1, 5] = float("nan")
    found = BlockedMatmul(weight, None)(x)
    assert bool(found[0].isfinite().all())
    assert bool(found[1].isnan().all())


@cache
def compiled_for(name: str, processor: str) -> Callable[..., None]:
    """The product with what a processor of that name gets to prefetch, compiled once for any number of threads."""
    return compile_kernels(matmul_module(prefetch_for(name), FORMS[processor]), KERNEL)[KERNEL]


@pytest.mark.parametrize("name", ["znver5", "sapphirerapids"])
def test_every_way_to_prefetch_gives_the_same(name: str, processor: str) -> None:
    """What other processors get runs here too."""
    weight, x = numbers(1000, 688, seed=1), numbers(8, 688, seed=2)
    own, other = BlockedMatmul(weight, None), BlockedMatmul(weight, None)
    other._kernel = compiled_for(name, processor)
    for rows in (1, 6, 8):
        assert torch.equal(other(x[:rows]), own(x[:rows]))


@pytest.mark.parametrize(
    ("inputs", "dtype"), [(64, torch.bfloat16), (65, torch.bfloat16), (65, torch.float32), (64, torch.float16)]
)
def test_linear_layers_agree_with_those_of_torch(
    inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd number of input features in bfloat16 is torch's in any case."""
    weight, x = numbers(70, inputs, seed=1, dtype=dtype), numbers(8, inputs, seed=3, dtype=dtype)
    bias, dense = numbers(70, seed=2, dtype=dtype), QUANTIZATIONS.get("none")
    own = Linear(weight.shape, dense, {"weight": weight.clone()}, bias)
    is_own = dtype is torch.float32 or (dtype is torch.bfloat16 and inputs % 2 == 0)
    assert isinstance(own.product, BlockedMatmul) is is_own
    leave_to_torch(monkeypatch)
    other = Linear(weight.shape, dense, {"weight": weight.clone()}, bias)
    assert not isinstance(other.product, BlockedMatmul)
    assert torch.allclose(own(x).float(), other(x).float(), rtol=2**-7, atol=2**-7)


def test_a_product_takes_no_more_memory_than_is_reckoned() -> None:
    """Beside its result, and what tiles leave for each other: activations as float32, where they have to be."""
    rows, features, inputs = 200, 70, 688
    matmul, x = BlockedMatmul(numbers(features, inputs, seed=1), None), numbers(rows, inputs, seed=2)
    with torch.profiler.profile(profile_memory=True) as profile:
        matmul(x)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    weight = SimpleNamespace(shape=(features, inputs))
    reckoned = QUANTIZATIONS.get("none").working_bytes(weight, rows, torch.bfloat16, "cpu")
    assert 2 * rows * features <= taken <= 2 * rows * features + reckoned
