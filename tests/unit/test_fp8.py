"""Weights in E4M3: how weights and activations are rounded, and the products with them on every device there is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from native import leave_to_torch, needs_kernels
from paged import PagedModel
from safetensors.torch import load_file, save_file

from trtrun.errors import CheckpointError, ConfigError
from trtrun.kernels.cpu.fp8_matmul import BlockedFp8Matmul, _with_scales
from trtrun.kernels.cpu.fp8_matmul_code import fp8_matmul_module
from trtrun.kernels.cpu.machine import compile_kernels
from trtrun.kernels.cpu.matmul_code import KERNEL, STRETCH, TILE_ROWS, prefetch_for
from trtrun.kernels.torch_fp8 import SMALLEST_SCALE, TorchFp8Matmul, round_activations, round_rows, widen
from trtrun.kernels.triton.support import multiplies_fp8, triton_works
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS, find_quantization
from trtrun.linear.quantization.base import Product, Tensors
from trtrun.linear.quantization.fp8 import quantize
from trtrun.models.config import read_model_config
from trtrun.models.loading import shard_bytes

NAMES = ["fp8", "fp8_weight_only"]
SHAPES = [(64, 2), (1, 8), (24, 60), (128, 1000), (1000, 688), (70, 2 * STRETCH + 2), (130, 6 * STRETCH + 10)]
ROWS = [1, 2, 3, 4, 5, TILE_ROWS, TILE_ROWS + 1, 13, 70]
EVERY_CODE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
FINITE = EVERY_CODE[~EVERY_CODE.float().isnan()]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Random bfloat16 of the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(features: int, inputs: int) -> Tensors:
    """A random weight whose output features differ in size by powers of ten."""
    sizes = 10.0 ** (torch.arange(features) % 5 - 2)
    return quantize((numbers(features, inputs, seed=1) * sizes.unsqueeze(1)).bfloat16())


def assert_product(
    found: torch.Tensor,
    weight: Tensors,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    rounds: bool,
    exponent: int = -20,
) -> None:
    """`found` is what float64 makes of codes, scales and bias, but for float32 sums, rounded to x's dtype.

    Sums may be wrong by 2**exponent of the sum of sizes.
    """
    dense = weight["codes"].double() * weight["scale"].double().unsqueeze(1)
    values = x.double()
    if rounds:
        codes, scale = round_rows(x)
        values = codes.double() * scale.double().unsqueeze(1)
    exact, sizes = values @ dense.T, values.abs() @ dense.abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    assert found.dtype is x.dtype
    half_step = torch.finfo(x.dtype).eps / 2
    error = (found.double() - exact).abs()
    assert bool((error <= exact.abs() * 2 * half_step + sizes * 2.0**exponent).all()), (error / sizes).max()


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


@needs_kernels
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


@needs_kernels
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


@needs_kernels
def test_the_kernel_widens_every_code() -> None:
    bits = FINITE.view(torch.uint8)
    codes = torch.stack((bits, bits.flip(0)), dim=1).view(torch.float8_e4m3fn)
    matmul = BlockedFp8Matmul(codes, torch.ones(len(codes)), None, rounds_activations=False)
    found = matmul(torch.eye(2).bfloat16().repeat(4, 1))  # one row, and more than a tile takes
    assert torch.equal(found[0::2].float(), FINITE.float().expand(4, -1))
    assert torch.equal(matmul(torch.tensor([[0.0, 1.0]]).bfloat16()).float()[0], FINITE.float().flip(0))


@needs_kernels
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
    assert isinstance(linear._product, TorchFp8Matmul)


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


def test_a_head_of_codes_is_counted_and_multiplies_rounded(tmp_path: Path) -> None:
    """The layers are those of `fp8`; logits are near the dense ones, and a tied embedding stays as it is beside it."""
    config, hidden = read_model_config(make_checkpoint(tmp_path, tie_word_embeddings=True)), numbers(3, 64, seed=1)
    fp8, with_head = (
        shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cuda", 0), name) for name in ("fp8", "fp8_with_head")
    )
    assert with_head == fp8 + 199 * 64 + 4 * 199
    dense, rounded = (PagedModel(tmp_path, torch.bfloat16, quantization=name) for name in ("fp8", "fp8_with_head"))
    expected, found = (model.models[0].logits(hidden).float() for model in (dense, rounded))
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_they_are_held_and_the_head_stays_dense(tmp_path: Path, tied: bool, name: str) -> None:
    """A byte a weight and four an output feature, in the linear layers of the decoder's layers alone."""
    config = read_model_config(make_checkpoint(tmp_path, tie_word_embeddings=tied))
    layers = config.num_layers
    features, inputs = [2 * 64, 64, 2 * 112, 64] * layers, [64, 64, 64, 112] * layers
    held = sum(one * other + 4 * one for one, other in zip(features, inputs, strict=True))
    plain, head = (199 * 64 + (2 * layers + 1) * 64) * 2, 199 * 64 * 2
    on_cpu = shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cpu"), name)
    on_gpu = shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cuda", 0), name)
    is_shared = tied and QUANTIZATIONS.get("none").keeps_dense(torch.bfloat16, torch.device("cpu"))
    assert on_cpu == plain + (0 if is_shared else head) + held
    assert on_gpu == plain + (0 if tied else head) + held
    model = PagedModel(tmp_path, torch.bfloat16, quantization=name)
    assert model.reports[0].shard_bytes == on_cpu
    dense = PagedModel(tmp_path, torch.bfloat16)
    hidden = numbers(3, 64, seed=1)
    assert torch.equal(model.models[0].logits(hidden), dense.models[0].logits(hidden))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_models_are_near_the_dense_ones_whatever_the_files_hold(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    path = make_checkpoint(tmp_path, dtype=stored)
    batch = [[(0, 0, [5, 9, 77, 3])]]
    exact = PagedModel(path, torch.bfloat16).forward(batch)
    for tp_size in (1, 2):
        found = PagedModel(path, torch.bfloat16, tp_size=tp_size, quantization=name).forward(batch)
        difference = float((found - exact).norm() / exact.norm())
        assert 0.001 < difference < 0.15


def test_dummy_weights_are_rounded_like_any(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    batch = [[(0, 0, [5, 9, 77, 3])]]
    exact, found = (
        PagedModel(path, torch.bfloat16, quantization=name, load_format="dummy").forward(batch)
        for name in ("none", "fp8")
    )
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.15


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = math.nan
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.1.mlp.down_proj.weight' holds NaN"):
        PagedModel(tmp_path, torch.bfloat16, quantization="fp8")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), [(24, 60), (1000, 688), (5000, 64), (70, 2050), (2048, 2048)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", ["best", "torch"])
def test_products_on_a_gpu_are_right(
    features: int, inputs: int, with_bias: bool, dtype: torch.dtype, name: str, make: str
) -> None:
    held = quantize(numbers(features, inputs, seed=1).to("cuda", dtype))
    bias = numbers(features, seed=3).to("cuda", dtype) if with_bias else None
    rounds = name == "fp8"
    product: Product = TorchFp8Matmul(held["codes"], held["scale"], bias, rounds_activations=rounds)
    if make == "best":
        product = QUANTIZATIONS.get(name).apply(held, bias, batch_invariant=True)
    for rows in (0, 1, 5, 16, 17, 64, 65, 200):
        x = numbers(rows, inputs + 8, seed=4).to("cuda", dtype)[:, 8:]
        found = product(x)
        assert found.shape == (rows, features)
        # Matrix units add up some products with fewer bits than float32 has.
        assert_product(found, held, bias, x, rounds, exponent=-20 if make == "torch" else -12)


@on_gpu
def test_a_gpu_rounds_activations_as_the_cpu_does() -> None:
    x = numbers(300, 3000, seed=1) * (10.0 ** (torch.arange(300) % 9 - 5)).unsqueeze(1).bfloat16()
    values, scale = round_activations(x)
    found, own = round_activations(x.cuda())
    assert torch.equal(found.cpu(), values) and torch.equal(own.cpu(), scale)
    if triton_works("cuda") and multiplies_fp8(torch.device("cuda", 0)):
        from trtrun.kernels.triton.fp8_rounding import round_activations as round_in_triton

        codes, own, _ = round_in_triton(x.cuda())
        assert torch.equal(codes[:, :3000].float().cpu(), values) and torch.equal(own.cpu(), scale)


@on_gpu
def test_what_is_not_finite_spoils_its_own_row_alone_on_a_gpu() -> None:
    held = quantize(numbers(70, 64, seed=1).cuda())
    product = QUANTIZATIONS.get("fp8").apply(held, None, batch_invariant=True)
    x = numbers(4, 64, seed=2).cuda()
    expected = product(x)
    x[1, 5], x[2, 5] = math.nan, math.inf
    found = product(x)
    assert torch.equal(found[::3], expected[::3])
    assert bool(found[1:3].isnan().all())


@on_gpu
def test_products_are_captured_in_graphs() -> None:
    held = quantize(numbers(300, 256, seed=1).cuda())
    x = numbers(6, 256, seed=2).cuda()
    product = QUANTIZATIONS.get("fp8").apply(held, None, batch_invariant=True)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x)
    x.copy_(numbers(6, 256, seed=3))
    graph.replay()
    assert torch.equal(found, product(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "device", "fits"), [
    (torch.bfloat16, "cpu", True), (torch.float16, "cpu", False), (torch.float32, "cpu", False),
    (torch.bfloat16, "cuda", True), (torch.float16, "cuda", True), (torch.float32, "cuda", False),
])  # fmt: skip
def test_dtypes_that_would_be_slower_are_refused(name: str, dtype: torch.dtype, device: str, fits: bool) -> None:
    if fits:
        QUANTIZATIONS.get(name).check(dtype, torch.device(device))
        return
    with pytest.raises(ConfigError, match=rf"quantization {name} computes in bfloat16.*, not in float.*: set dtype to"):
        QUANTIZATIONS.get(name).check(dtype, torch.device(device))


def test_targets_are_refused_what_is_for_drafts_alone() -> None:
    for name in ("none", "fp8_with_head", *NAMES):
        assert find_quantization(name, for_target=True) is QUANTIZATIONS.get(name)
    assert find_quantization("int8", for_target=False) is QUANTIZATIONS.get("int8")
    allowed = "use one of fp8, fp8_weight_only, fp8_with_head, none"
    with pytest.raises(ConfigError, match=rf"int8 is for drafts alone, .*: {allowed}"):
        find_quantization("int8", for_target=True)
