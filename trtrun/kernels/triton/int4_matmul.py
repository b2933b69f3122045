"""The product with weights of 4 bits on CUDA, whose rows have the same bits in any company.

A result has the bits of the product with the dense weight (matmul.py), whose numbers are one chain of sums over the
inputs, in their order. Few rows are multiplied as codes are read and widened, on compute capability 9.0 (int4_stream).
For more rows the weight becomes dense first, which takes as long as writing and reading it once, and is left to that
product.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.torch.int4 import GROUP, STEP, TILE, groups_of
from trtrun.kernels.triton import matmul
from trtrun.kernels.triton.collecting import is_collecting
from trtrun.kernels.triton.int4_stream.suitability import Streamed

_TILE, _GROUP, _GROUPS = tl.constexpr(TILE), tl.constexpr(GROUP), tl.constexpr(STEP // GROUP)
_WORDS = tl.constexpr(TILE * GROUP // 8)


@triton.jit
def _read_weights(words, scales, at, KIND: tl.constexpr, PARTS: tl.constexpr):
    """The weights of a tile for 128 inputs, which are the `at`-th of all, in PARTS groups: [64, 128]."""
    feature, pair = tl.arange(0, _TILE), tl.arange(0, _GROUP // 2)
    of_feature = (feature >> 3 & 1) * 512 + (feature >> 4) * 128 + (feature >> 1 & 3) * 32 + (feature & 1) * 16
    of_pair = (pair & 3) * 4 + (pair >> 2 & 1) * 2 + (pair >> 5)
    place = words + at.to(tl.int64) * _WORDS
    found = tl.load(place + of_feature[:, None] + of_pair[None, :], eviction_policy="evict_first")
    found = found >> ((pair >> 3 & 3) * 4)[None, :]
    place = scales + at.to(tl.int64) * (_TILE * PARTS)
    if PARTS == 1:
        both = tl.load(place + feature)[:, None]
    else:
        both = tl.load(place + (pair * PARTS // (_GROUP // 2) * _TILE)[None, :] + feature[:, None])
    scale = (both & 0xFFFF).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    base: tl.constexpr = 128 if tl.bfloat16 == KIND else 1024
    zero = (both >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32) - base
    even, odd = (found & 15).to(tl.float32) - zero, (found >> 16 & 15).to(tl.float32) - zero
    return tl.join((even * scale).to(KIND), (odd * scale).to(KIND)).reshape([_TILE, _GROUP])


@triton.jit
def _widen_kernel(words, scales, weight, inputs, steps, PARTS: tl.constexpr):
    """Writes 128 inputs of a tile of the weight [features, inputs]."""
    tile, group = tl.program_id(0), tl.program_id(1)
    made = _read_weights(words, scales, tile * steps * _GROUPS + group, weight.dtype.element_ty, PARTS)
    feature, number = tile * _TILE + tl.arange(0, _TILE), group * _GROUP + tl.arange(0, _GROUP)
    tl.store(weight + feature.to(tl.int64)[:, None] * inputs + number[None, :], made)


def widen(words: torch.Tensor, scales: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """As trtrun.kernels.torch.int4.dequantize; inputs are a multiple of 128."""
    tiles, steps = words.shape[:2]
    weight = torch.empty((tiles * TILE, inputs), dtype=dtype, device=words.device)
    _widen_kernel[(tiles, inputs // GROUP)](words, scales, weight, inputs, steps, PARTS=groups_of(scales))
    return weight


class TritonInt4Matmul:
    """The product with one weight of 4 bits on CUDA.

    Args:
        words, scales: see trtrun.kernels.torch.int4.
        bias: [out] or None. It is added to the rounded product.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._words, self._scales, self._bias = words, scales, bias
        self._streamed = Streamed(words, scales, bias, widen)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16 → [rows, out] in the same dtype."""
        if x.stride(1) != 1:
            x = x.contiguous()
        if self._streamed.takes(x):
            return self._streamed(x)
        weight = widen(self._words, self._scales, x.shape[1], x.dtype)
        if is_collecting():  # nothing can be learnt of the library then
            return matmul.chain_product(x, weight)
        return matmul.TritonMatmul(weight, self._bias)(x)
