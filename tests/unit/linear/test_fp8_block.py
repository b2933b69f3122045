"""Weights in E4M3 in blocks of 128 by 128: how they and activations are rounded, and torch's product of both."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fp8_products import numbers
from paged import PagedModel
from pipelines import make_llm, noisy_copy, prompt_of, run_alone, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from trtrun import SamplingParams
from trtrun.errors import ConfigError
from trtrun.kernels.torch import fp8
from trtrun.kernels.torch.fp8 import (
    SMALLEST_SCALE,
    TorchFp8BlockMatmul,
    quantize_blocks,
    round_activations,
    round_in_groups,
)
from trtrun.linear.quantization import QUANTIZATIONS, find_quantization
from trtrun.linear.quantization.base import Tensors
from trtrun.loading.loading import shard_bytes
from trtrun.models.config import read_model_config

SHAPES = [(64, 2), (1, 8), (24, 60), (128, 1000), (300, 256), (1000, 688), (70, 65)]


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[blocks, blocks] → [rows, columns] float64."""
    return scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def quantized(features: int, inputs: int) -> Tensors:
    """A random weight whose blocks differ in size by powers of ten."""
    sizes = 10.0 ** ((torch.arange(features) // 128 % 4).unsqueeze(1) - torch.arange(inputs) // 128 % 3)
    return quantize_blocks((numbers(features, inputs, seed=1) * sizes).bfloat16())


@pytest.mark.parametrize("at_once", [1 << 20, 1])
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
def test_the_largest_weight_of_a_block_is_the_largest_code(
    features: int, inputs: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "numbers_at_a_time", lambda device: at_once)
    weight = numbers(features, inputs, seed=1) * 3
    weight[:1, :128] = 0
    held = quantize_blocks(weight)
    scale, codes = held["block_scale"], held["codes"].float()
    assert codes.shape == weight.shape and scale.shape == (-(-features // 128), -(-inputs // 128))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            inside = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            largest = weight[inside].float().abs().max() / 448
            assert scale[row, column] == max(float(largest), SMALLEST_SCALE)
            expected = round_activations(weight[inside].reshape(1, -1))[0]
            assert torch.equal(codes[inside].flatten(), expected[0])


def test_activations_are_rounded_128_at_a_time() -> None:
    x = numbers(5, 300, seed=1) * (10.0 ** (torch.arange(300) // 128 * 3 - 3)).bfloat16()
    x[2, :128], x[3, 200] = 0, math.inf
    values, scale = round_in_groups(x)
    for group in range(3):
        inside = slice(group * 128, group * 128 + 128)
        expected, own = round_activations(x[:, inside])
        assert torch.equal(scale[:, group], own)
        assert torch.equal(values[:, inside].nan_to_num(999), expected.nan_to_num(999))
    assert bool(values[3, 128:256].isnan().any()) and bool(values[3, 256:].isfinite().all())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
def test_products_are_right_and_rows_do_not_depend_on_their_number(
    features: int, inputs: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_NUMBERS_AT_A_TIME", 100_000)
    held, x = quantized(features, inputs), numbers(70, inputs, seed=2)
    bias = numbers(features, seed=3) * 8 if with_bias else None
    matmul = TorchFp8BlockMatmul(**held, bias=bias)
    found = matmul(x)
    values, own = round_in_groups(x)
    dense = held["codes"].double() * spread(held["block_scale"], features, inputs)
    exact = values.double() * own.double().repeat_interleave(128, 1)[:, :inputs] @ dense.T
    exact += 0 if bias is None else bias.double()
    assert found.dtype is torch.bfloat16
    # What bfloat16 rounds, and float32 of sums and biases that cancel each other.
    assert bool(((found.double() - exact).abs() <= exact.abs() * 2**-7 + exact.abs().max() * 2**-22).all())
    for rows in (1, 2, 5, 13, 33):
        assert torch.equal(matmul(x[:rows]), found[:rows])
        assert torch.equal(matmul(x[-rows:]), found[-rows:])
    assert matmul(x[:0]).shape == (0, features)


class PeakMemory(TorchDispatchMode):
    """Bytes of all that operations make within, and the most that there were at a time."""

    def __init__(self, *there: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in there}
        self.bytes = self.most = 0

    def _forget(self, storage: int, num_bytes: int) -> None:
        self._known.discard(storage)
        self.bytes -= num_bytes

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        storage = result.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result


@pytest.mark.parametrize(("rows", "features", "inputs"), [(1, 300, 200), (1, 2000, 128), (70, 300, 200), (500, 3, 64)])
def test_a_product_takes_no_more_memory_than_is_reckoned(
    rows: int, features: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are widened in pieces are there one piece at a time."""
    monkeypatch.setattr(fp8, "_NUMBERS_AT_A_TIME", 20_000)
    held, x, bias = quantized(features, inputs), numbers(rows, inputs, seed=2), numbers(features, seed=3)
    matmul = TorchFp8BlockMatmul(**held, bias=bias)
    with PeakMemory(*held.values(), x, bias) as peak:
        found = matmul(x)
    assert found.nbytes < peak.most <= found.nbytes + matmul.working_bytes(rows, features, inputs)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(wrong: float) -> None:
    held, x = quantized(70, 200), numbers(3, 200, seed=1)
    matmul = TorchFp8BlockMatmul(**held, bias=None)
    expected = matmul(x)
    x[1, 5] = wrong
    found = matmul(x)
    assert torch.equal(found[::2], expected[::2]) and bool(found[1].isnan().all())


def test_slices_at_whole_blocks_are_slices_of_the_whole() -> None:
    """So that layers do not depend on the number of ranks that share their output features."""
    weight, x = numbers(512, 256, seed=1), numbers(5, 256, seed=2)
    whole, part = quantize_blocks(weight), quantize_blocks(weight[128:384])
    assert torch.equal(whole["block_scale"][1:3], part["block_scale"])
    found = TorchFp8BlockMatmul(**whole, bias=None)(x)[:, 128:384]
    assert torch.equal(found, TorchFp8BlockMatmul(**part, bias=None)(x))


def test_models_are_near_the_dense_ones_and_counted_as_they_are_held(tmp_path: Path) -> None:
    """A byte a weight and four a block, in the linear layers of the decoder's layers alone."""
    path, batch = make_checkpoint(tmp_path), [[(0, 0, [5, 9, 77, 3])]]
    for load_format in ("auto", "dummy"):
        exact = PagedModel(path, torch.bfloat16, load_format=load_format).forward(batch)
        for tp_size in (1, 2) if load_format == "auto" else (1,):
            model = PagedModel(path, torch.bfloat16, tp_size=tp_size, quantization="fp8_block", load_format=load_format)
            assert 0.001 < float((model.forward(batch) - exact).norm() / exact.norm()) < 0.15
    config = read_model_config(path)
    dense, held = (
        shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cuda", 0), name) for name in ("none", "fp8_block")
    )
    sizes = [(128, 64), (64, 64), (224, 64), (64, 112)] * config.num_layers
    assert dense - held == sum(one * other - 4 * -(-one // 128) for one, other in sizes)


def test_texts_of_a_target_in_blocks_are_plain_decodings(tmp_path: Path) -> None:
    """Which are not those of the dense weights."""
    target = make_checkpoint(tmp_path / "target", hidden_size=192, intermediate_size=320, dtype=torch.bfloat16)
    draft = noisy_copy(tmp_path / "draft", target, 0.05)
    prompts = [prompt_of(3 + 7 * (row % 5), row) for row in range(8)]
    sampling = [
        SamplingParams(max_tokens=24, temperature=0.8 * (row % 2), seed=row, ignore_eos=True) for row in range(8)
    ]
    settings: dict[str, Any] = {"dtype": "bfloat16", "scheduler": {"max_batch_size": 8, "max_num_tokens": 40}}
    with make_llm(target, **settings) as llm:
        dense = tokens_of(llm.generate(prompts, sampling))
    settings["target_quantization"] = "fp8_block"
    with make_llm(target, **settings) as llm:
        plain = run_alone(llm, prompts, sampling)
    with make_llm(target, draft, quantization="fp8_block", **settings) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == plain != dense
        assert llm.statistics()["num_accepted_draft_tokens"] > 20


def test_it_is_for_targets_in_half_precision() -> None:
    quantization = find_quantization("fp8_block", for_target=True)
    assert quantization is QUANTIZATIONS.get("fp8_block")
    quantization.check("float16", "cuda")
    with pytest.raises(ConfigError, match=r"quantization fp8_block computes in bfloat16, not in float16: set dtype to"):
        quantization.check("float16", "cpu")
