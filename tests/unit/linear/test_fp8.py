"""Weights in E4M3 on the CPU: how weights and activations are rounded, and the products with them."""

from __future__ import annotations

import math

import pytest
import torch
from fp8_products import NAMES, assert_product, numbers, quantized
from native import leave_to_torch, needs_bfloat16

from trtrun.kernels.cpu.byte_matmul_code import fp8_matmul_module
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, compile_kernels
from trtrun.kernels.cpu.matmul import BlockedFp8Matmul, _with_scales
from trtrun.kernels.cpu.matmul_code import FORMS, KERNEL, STRETCH, prefetch_for
from trtrun.kernels.torch.fp8 import SMALLEST_SCALE, TorchFp8Matmul, quantize, round_activations, widen
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS

SHAPES = [(64, 2), (1, 8), (24, 60), (128, 1000), (1000, 688), (70, 2 * STRETCH + 2), (130, 6 * STRETCH + 10)]
TILE_ROWS = FORMS[MULTIPLIES_BFLOAT16].rows
ROWS = [1, 2, 3, 4, 5, TILE_ROWS, TILE_ROWS + 1, 13, 70]
EVERY_CODE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = EVERY_CODE[~EVERY_CODE.float().isnan()]


def test_rounding_is_to_nearest_of_each_rows_own_scale() -> None:
    weight = torch.tensor([[448.0, -225.0, 17.0, 0.3], [-1.75, 0.0625, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    held = quantize(weight)
    assert held["codes"].float().tolist() == [[448, -224, 16, 0.3125], [-448, 16, 256, 0], [0, 0, 0, 0]]
    assert held["scale"].tolist() == [1.0, 1 / 256, SMALLEST_SCALE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_in_pieces_is_rounding_of_the_whole_to_half_a_step(dtype: torch.dtype) -> None:
    weight = numbers(1030, 2048, seed=1).to(dtype)
    held = quantize(weight)
    scale = weight.float().abs().amax(dim=1) / 448
    assert torch.equal(held["scale"], scale)
    exact = weight.double() / scale.double().unsqueeze(1)
    # Three bits of mantissa, and steps of 2^-9 below 2^-6.
    step = torch.exp2(exact.abs().clamp_min(2**-6).log2().floor() - 3)
    assert bool(((held["codes"].double() - exact).abs() <= step * 0.500001).all())
    values, own = round_activations(weight)
    assert torch.equal(own, scale)
    assert torch.equal(values, held["codes"].float())


def test_activations_are_rounded_as_torch_converts() -> None:
    """Every code, what lies between, halves of steps, and below the least step."""
    codes = FINITE.float().sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    tiny = torch.linspace(-(2**-8), 2**-8, 999)
    x = torch.cat((codes, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), tiny)).unsqueeze(0)
    values, scale = round_activations(x)
    assert scale.item() == 1
    assert torch.equal(values, x.to(torch.float8_e4m3fn).float())
    assert torch.equal(widen(FINITE), FINITE.double())


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_huge_and_tiny_numbers(name: str) -> None:
    largest, least = torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny
    if name == "fp8_weight_only":
        largest /= 1024  # codes reach 448, and sums are float32
    x = numbers(5, 64, seed=1)
    x[1] = 0
    x[2], x[3] = x[2].sign() * largest, x[3].sign() * least
    weight = quantize(torch.eye(64).bfloat16() * 0.4375)  # whose scale is a power of two
    found = TorchFp8Matmul(weight["codes"], weight["scale"], None, rounds_activations=name == "fp8")(x)
    assert torch.equal(found[1:4], x[1:4] * 0.4375)
    assert torch.allclose(found.float(), x.float() * 0.4375, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(wrong: float) -> None:
    """So that a row whose logits are not finite ends with an error."""
    x, weight = numbers(3, 64, seed=1), quantized(70, 64)
    expected = TorchFp8Matmul(weight["codes"], weight["scale"], None, rounds_activations=True)(x)
    x[1, 5] = wrong
    found = TorchFp8Matmul(weight["codes"], weight["scale"], None, rounds_activations=True)(x)
    assert torch.equal(found[::2], expected[::2])
    assert bool(found[1].isnan().all())


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), [*SHAPES, (70, 65)])
def test_products_of_torch_are_right_and_rows_do_not_depend_on_their_number(
    features: int, inputs: int, with_bias: bool, rounds: bool
) -> None:
    weight, x = quantized(features, inputs), numbers(70, inputs, seed=2)
    bias = numbers(features, seed=3) * 8 if with_bias else None
    matmul = TorchFp8Matmul(weight["codes"], weight["scale"], bias, rounds_activations=rounds)
    whole = matmul(x)
    assert_product(whole, weight, bias, x, rounds)
    for rows in ROWS if inputs > 1000 else range(1, 71):
        assert torch.equal(matmul(x[:rows]), whole[:rows])
        assert torch.equal(matmul(x[-rows:]), whole[-rows:])
    assert matmul(x[:0]).shape == (0, features)


@needs_bfloat16
@pytest.mark.usefixtures("each_number_of_threads")
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
def test_products_of_the_kernel_are_right_and_rows_do_not_depend_on_their_number(
    features: int, inputs: int, with_bias: bool, rounds: bool
) -> None:
    weight, x = quantized(features, inputs), numbers(max(ROWS), inputs, seed=2)
    bias = numbers(features, seed=3) * 8 if with_bias else None
    matmul = BlockedFp8Matmul(weight["codes"], weight["scale"], bias, rounds_activations=rounds)
    whole = matmul(x)
    assert_product(whole, weight, bias, x, rounds)
    for rows in ROWS:
        assert torch.equal(matmul(x[:rows]), whole[:rows])
        assert torch.equal(matmul(x[-rows:]), whole[-rows:])
    assert matmul(x[:0]).shape == (0, features)


@needs_bfloat16
@pytest.mark.usefixtures("each_number_of_threads")
@pytest.mark.parametrize("inputs", [16, 60, 1376, 8192])
def test_the_kernel_rounds_activations_as_torch_does(inputs: int) -> None:
    wide = numbers(13, inputs + 3, seed=1) * (10.0 ** (torch.arange(13) % 9 - 5)).unsqueeze(1).bfloat16()
    wide[3], wide[4, 5], wide[5, 6], wide[6] = 0, math.inf, math.nan, wide[6].sign() * torch.finfo(wide.dtype).tiny
    for x in (wide[:, 1:-2], wide[:1, 1:-2], wide.T[1:-2].contiguous().T):
        values, scale = round_activations(x)
        found = _with_scales(x)
        own = found.view(torch.float32)[:, inputs // 2]
        assert torch.equal(own[:4], scale[:4]) and torch.equal(own[6:], scale[6:])
        assert torch.equal(found[:4, :inputs].float(), values[:4])
        assert torch.equal(found[6:, :inputs].float(), values[6:])
        assert torch.equal(found[:, :inputs].isnan().any(dim=1), values.isnan().any(dim=1))


@needs_bfloat16
def test_the_kernel_widens_every_code() -> None:
    bits = FINITE.view(torch.uint8)
    codes = torch.stack((bits, bits.flip(0)), dim=1).view(torch.float8_e4m3fn)
    matmul = BlockedFp8Matmul(codes, torch.ones(len(codes)), None, rounds_activations=False)
    found = matmul(torch.eye(2).bfloat16().repeat(4, 1))  # one row, and more than a tile takes
    assert torch.equal(found[0::2].float(), FINITE.float().expand(4, -1))
    assert torch.equal(matmul(torch.tensor([[0.0, 1.0]]).bfloat16()).float()[0], FINITE.float().flip(0))


@needs_bfloat16
@pytest.mark.parametrize("processor", ["znver5", "sapphirerapids"])
def test_every_way_to_prefetch_gives_the_same(processor: str) -> None:
    """What other processors get runs here too."""
    weight, x = quantized(1000, 688), numbers(8, 688, seed=2)
    own, other = (BlockedFp8Matmul(weight["codes"], weight["scale"], None, rounds_activations=True) for _ in range(2))
    other._kernel = compile_kernels(fp8_matmul_module(prefetch_for(processor), scales_rows=True), KERNEL)[KERNEL]
    for rows in (1, 6, 8):
        assert torch.equal(other(x[:rows]), own(x[:rows]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inputs", [64, 65])
def test_linear_layers_on_the_cpu_are_right_with_and_without_the_kernel(
    inputs: int, with_bias: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = quantized(70, inputs), numbers(70, seed=2) * 8 if with_bias else None
    for leave in (lambda: None, lambda: leave_to_torch(monkeypatch)):
        leave()
        linear = Linear((70, inputs), QUANTIZATIONS.get(name), weight, bias)
        for rows in (1, 4, 5, 40):
            wide = numbers(rows, inputs + 6, seed=rows)
            x = wide[:, 4:-2]
            assert_product(linear(x), weight, bias, x, name == "fp8")
    assert isinstance(linear.product, TorchFp8Matmul)


@pytest.mark.parametrize("name", NAMES)
def test_slices_by_output_features_are_slices_of_the_whole(name: str) -> None:
    """So that column-parallel layers do not depend on the number of ranks."""
    weight, x = numbers(70, 64, seed=1), numbers(5, 64, seed=2)
    linear = QUANTIZATIONS.get(name)
    whole, part = quantize(weight), quantize(weight[20:50])
    for key in whole:
        assert torch.equal(whole[key][20:50].view(torch.uint8), part[key].view(torch.uint8))
    found = linear.apply(whole, None, batch_invariant=True)(x)[:, 20:50]
    assert torch.equal(found, linear.apply(part, None, batch_invariant=True)(x))
