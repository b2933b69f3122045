"""E4M3 in blocks and groups in Triton's interpreter, where there is no GPU: right results, and the same bits in any
company. What the hardware does is seen on a GPU alone (test_fp8_blocks_on_gpu.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from native import leave_to_torch
from norms import difference
from paged import PagedModel

from trtrun.kernels import chooser
from trtrun.kernels.torch.fp8 import TorchFp8BlockMatmul, quantize_blocks, round_in_groups
from trtrun.kernels.triton import support
from trtrun.layers import decoder_layer
from trtrun.linear.quantization import quantizations

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
    pytest.mark.usefixtures("sums_without_order"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("inputs", [2000, 300, 64, 1])
def test_activations_are_rounded_in_groups_as_on_other_devices(inputs: int, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.fused import round_activations

    x = torch.randn(20, 2000, generator=torch.Generator().manual_seed(1))
    x *= (10.0 ** (torch.arange(2000) // 50 % 7 - 4)) * 3.0 ** (torch.arange(20) % 5).unsqueeze(1)
    x[3], x[4, 128:256] = 0, 0
    wide = x.to(dtype)[:, :inputs]
    codes, scale, kind = round_activations(wide, "group")
    assert kind is dtype
    expected, own = round_in_groups(wide)
    assert scale.shape == own.shape == (20, -(-inputs // 128))
    assert torch.equal(scale, own)
    assert torch.equal(codes[:, :inputs].float(), expected)
    assert (scale.stride(0), scale.stride(1) % 16) == (1, 0) and scale.stride(1) >= 20, "as kernels read them"


@DTYPES
@pytest.mark.parametrize("size", [160, 300])
def test_what_is_rounded_in_groups_in_the_kernel_that_makes_it(size: int, dtype: torch.dtype) -> None:
    """Is what that kernel makes, rounded."""
    from trtrun.kernels.triton import fused
    from trtrun.kernels.triton.fused import round_activations

    torch.manual_seed(0)
    hidden, delta, weight = (torch.randn(shape).to(dtype) for shape in ((3, size), (3, size), (size,)))
    pairs = []
    for added in (None, delta):
        own, other = hidden.clone(), hidden.clone()
        expected = round_activations(fused.add_and_normalise(own, added, weight, 1e-5), "group")
        pairs.append((expected, fused.add_and_normalise_rounded(other, added, weight, 1e-5, "group"), size))
        assert torch.equal(own, other)
    gates = torch.randn(3, 2 * 1100).to(dtype)
    expected = round_activations(fused.activate_and_multiply(gates), "group")
    pairs.append((expected, fused.activate_and_multiply_rounded(gates, "group"), 1100))
    for one, another, numbers in pairs:
        assert torch.equal(one.scale, another.scale) and one.scale.shape == (3, -(-numbers // 128))
        assert torch.equal(one.codes[:, :numbers].float(), another.codes[:, :numbers].float())


@pytest.mark.parametrize(("features", "inputs", "with_bias"), [(70, 130, True), (3, 64, False), (300, 400, True)])
def test_the_product_in_blocks(features: int, inputs: int, with_bias: bool) -> None:
    from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul

    torch.manual_seed(features)
    sizes = 3.0 ** (torch.arange(features) // 128 - 1).unsqueeze(1) * 5.0 ** (torch.arange(inputs) // 128)
    held, x = quantize_blocks(torch.randn(features, inputs) * sizes), torch.randn(70, inputs).half()
    bias = torch.randn(features).half() if with_bias else None
    product = TritonFp8BlockMatmul(**held, bias=bias)
    found = product(x)
    assert difference(found, TorchFp8BlockMatmul(**held, bias=bias)(x)) < 1e-4
    for rows in (0, 1, 17, 40, 65):
        assert torch.equal(product(x[:rows]), found[:rows])
        assert torch.equal(product(x[70 - rows :]), found[70 - rows :])


def test_tiles_of_a_product_in_blocks_cannot_be_seen_in_it() -> None:
    from trtrun.kernels.triton.fused import round_activations
    from trtrun.kernels.triton.matmul.fp8_block_matmul import chain_block_product
    from trtrun.kernels.triton.matmul.fp8_matmul import Tile

    torch.manual_seed(1)
    held, x = quantize_blocks(torch.randn(300, 384)), round_activations(torch.randn(20, 384).half(), "group")
    tiles = [Tile(16, 64, 128, 1), Tile(64, 128, 128, 1), Tile(128, 64, 128, 1)]
    found = [chain_block_product(x, held["codes"], held["block_scale"], None, tile) for tile in tiles]
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_model_whose_norms_and_activations_round_in_groups_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only what attention gathered is rounded by a kernel of its own."""
    from trtrun.kernels.triton.matmul import fp8_block_matmul
    from trtrun.kernels.triton.operations import TritonOperations

    path = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=320)
    batch = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 3, 4, 100])]]
    # The interpreter has float16 and no bfloat16, in which alone the CPU's own kernels compute.
    monkeypatch.setattr(quantizations, "_DTYPES", {"cpu": ("float16",)})
    leave_to_torch(monkeypatch)
    expected = PagedModel(path, torch.float16, quantization="fp8_block").forward(batch)
    for module in (decoder_layer, chooser):
        monkeypatch.setattr(module, "operations_of", lambda device_type: TritonOperations())
    monkeypatch.setattr(support, "multiplies_fp8", lambda device: True)
    rounded, round_activations = [], fp8_block_matmul.round_activations
    monkeypatch.setattr(
        fp8_block_matmul, "round_activations", lambda x, how: (rounded.append(len(x)), round_activations(x, how))[1]
    )
    model = PagedModel(path, torch.float16, quantization="fp8_block")
    assert difference(model.forward(batch), expected) < 2e-3
    assert rounded == [8] * model.models[0].config.num_layers
