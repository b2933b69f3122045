"""The product with weights of 8 bits (E4M3) on CUDA, whose rows have the same bits in any company.

Activations are rounded to E4M3, each row by its own largest number (fused.py), and the matrix units multiply
codes by codes; or they stay as they are, and weights are widened on the way. Each number of a result is one chain of
sums over the inputs, in their order, in one kernel for any number of rows: nothing is split over programs, so neither
the tile nor the number of rows can be seen in it. For few rows on compute capability 9.0 another kernel reads weights
faster (fp8_stream), with the same bits. For many rows torch's product of scaled matrices, without its fast
accumulation, is the faster one and has the same bits: where a check finds that, it takes them.

Matrix units of compute capability 9.0 add up products of E4M3 with fewer bits than float32 has (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2). They do so for `_GROUP` inputs at a time here; groups are added up in float32.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import Activations, RoundedRows, Rounding
from trtrun.kernels.triton.early_launch import begin, early, fetch, lines_of
from trtrun.kernels.triton.fp8_stream.suitability import Streamed
from trtrun.kernels.triton.fused import round_activations
from trtrun.kernels.triton.support import multiprocessors, shared_bytes

_GROUP = 128
"""Inputs that are added up in the matrix units. Every tile has a multiple of them, so that all tiles group alike."""

_FEWEST_ROWS, _FEW_ROWS, _SOME_ROWS, _MANY_ROWS = 16, 32, 64, 256
_STAGES_ALONE = {_FEWEST_ROWS: 12, _FEW_ROWS: 10, _SOME_ROWS: 8}
"""By rows of a tile: 120 KiB and more."""

_UNEVEN, _STAGES_UNEVEN = 1.5, 6
"""With some more programs than multiprocessors fewer stages are faster: 24.7 µs instead of 29.7 for one row of a
10240 x 8192 weight."""

_LIBRARY_ROWS = 512
"""From so many rows on torch's product is faster, on an H200 by a quarter at 1,024."""

_CHECKED_ROWS = (_LIBRARY_ROWS, 1000, 1024, 1500, 2048)
"""Numbers of rows with which its bits are compared. It takes as many together as agreed, with all fewer ones: a prompt
in one product takes the host half as long as in two."""


class Tile(NamedTuple):
    """What one program computes at a time, and how: rows x features of the result, by so many inputs."""

    rows: int
    features: int
    inputs: int
    num_stages: int
    num_warps: int = 4


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, x_scale, codes, scale, bias, y, rows, features, inputs, x_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr, ROUNDS: tl.constexpr, ADDS: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The weight is the side of the matrix units that is 64 wide, so few rows waste nothing. Programs that share its
    features follow each other, so that it comes out of memory once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_feature, is_row = feature < features, row < rows
    # The last tile computes some features again instead of reading behind the weight.
    start = tl.where(is_feature, feature, 0).to(tl.int64) * inputs
    fetch(codes, start, inputs, LINES, EARLY)
    begin(EARLY)
    row_start = row.to(tl.int64) * x_stride
    total = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        number = first + tl.arange(0, INPUTS)
        if IS_EVEN:
            weights = tl.load(codes + start[:, None] + number[None, :], eviction_policy="evict_first")
            values = tl.load(x + row_start[None, :] + number[:, None], mask=is_row[None, :], other=0.0)
        else:
            known = number < inputs
            weights = tl.load(
                codes + start[:, None] + number[None, :], mask=known[None, :], other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(x + row_start[None, :] + number[:, None], mask=is_row[None, :] & known[:, None], other=0.0)
        if ROUNDS:
            total = tl.dot(weights, values, total, max_num_imprecise_acc=GROUP)
        else:
            total = tl.dot(weights.to(x.dtype.element_ty), values, total)
    factor = tl.load(scale + feature, mask=is_feature, other=0.0)[:, None]
    if ROUNDS:
        total *= factor
        factor = tl.load(x_scale + row, mask=is_row, other=0.0)[None, :]
    if ADDS:
        # Said out loud: a compiler may or may not make one of a product and a sum.
        added = tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        total = tl.fma(total, tl.broadcast_to(factor, (FEATURES, ROWS)), tl.broadcast_to(added, (FEATURES, ROWS)))
    else:
        total *= factor
    place = y + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


def chain_product(
    x: Activations, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None
) -> torch.Tensor:
    """x @ (codes * scale).T + bias → [rows, out] in x's dtype.

    Args:
        x: [rows, in] of half precision, whose rows have no gaps; or rounded rows.
        codes: [out, in] E4M3, contiguous.
        scale: [out] float32.
        bias: [out] or None.
        tile: None takes what is fast for so many rows.
    """
    values, x_scale = (x.codes, x.scale) if isinstance(x, RoundedRows) else (x, None)
    rows = values.shape[0]
    features, inputs = codes.shape
    y = torch.empty((rows, features), dtype=x.dtype, device=codes.device)
    if rows:
        tile = tile or choose_tile(rows, features, x_scale is not None, codes.device)
        _product_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features))](
            values, scale if x_scale is None else x_scale, codes, scale, scale if bias is None else bias, y,
            rows, features, inputs, values.stride(0),
            ROWS=tile.rows, FEATURES=tile.features, INPUTS=tile.inputs, GROUP=_GROUP, IS_EVEN=inputs % tile.inputs == 0,
            ROUNDS=x_scale is not None, ADDS=bias is not None, LINES=lines_of(codes, tile.features),
            num_warps=tile.num_warps, num_stages=tile.num_stages, **early(codes),
        )  # fmt: skip
    return y


def choose_tile(rows: int, features: int, rounds: bool, device: torch.device) -> Tile:
    """What is fast for so many rows, with as many stages as the multiprocessors have shared memory for.

    Long runs of memory for few rows, and programs enough to keep every multiprocessor reading; squares for many,
    where arithmetic counts. Where there is a program for each multiprocessor or fewer, each takes more than half of the
    shared memory, so that no two of them read at one while others stand idle: 97 µs became 63 so, for 48 rows of an
    8192 x 28672 weight on an H200. Tiles are 64 features wide at least, what the matrix units take from four warps:
    narrower ones would be computed by other instructions, which may add up in another order."""
    programs, units = triton.cdiv(features, 64), multiprocessors(device)
    if rounds and rows <= _SOME_ROWS and programs <= units * _UNEVEN:
        width = next(width for width in (_FEWEST_ROWS, _FEW_ROWS, _SOME_ROWS) if rows <= width)
        tile = Tile(width, 64, 128, _STAGES_ALONE[width] if programs <= units else _STAGES_UNEVEN)
    elif rows <= _FEWEST_ROWS:
        tile = Tile(_FEWEST_ROWS, 64, 128, 8 if rounds else 4)
    elif rows <= _FEW_ROWS:
        tile = Tile(_FEW_ROWS, 64, 256, 4) if rounds else Tile(_FEW_ROWS, 64, 128, 4)
    elif rows <= _SOME_ROWS:
        tile = Tile(_SOME_ROWS, 64, 128, 6 if rounds else 4)
    elif rounds and rows > _MANY_ROWS:
        tile = Tile(128, 128, 128, 4, 8)
    else:
        tile = Tile(_SOME_ROWS, 128, 128, 4 if rounds else 3, 8)
    stage = (tile.features + tile.rows * (1 if rounds else 2)) * tile.inputs
    return tile._replace(num_stages=max(1, min(tile.num_stages, shared_bytes(device) // stage)))


class TritonFp8Matmul:
    """The product with one weight of 8 bits on CUDA.

    Args:
        codes: [out, in] E4M3, contiguous, none of them NaN.
        scale: [out] float32.
        bias: [out] or None.
        rounds_activations: whether each row of x is rounded to E4M3, too.

    Attributes:
        takes_rounded_rows: how RoundedRows are rounded that x may be; None where it must be as it is.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        self.takes_rounded_rows: Rounding | None = "row" if rounds_activations else None
        self._streamed = Streamed(codes, scale, bias, chain_product)
        self._library_rows = _agreeing_rows(codes, scale) if rounds_activations and bias is None else 0

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16, or rounded rows of such → [rows, out] in the same dtype."""
        if not isinstance(x, RoundedRows):
            if x.stride(1) != 1:
                x = x.contiguous()
            if self.takes_rounded_rows:
                x = round_activations(x)
        if isinstance(x, RoundedRows):
            if self._library_rows and len(x.codes) >= _LIBRARY_ROWS and x.dtype is torch.bfloat16:
                return self._multiply_many(x)
            if self._streamed.takes(x):
                return self._streamed(x)
        return chain_product(x, self._codes, self._scale, self._bias)

    def _multiply_many(self, x: RoundedRows) -> torch.Tensor:
        """Multiply by torch, as many rows at a time as were tried; what is left by the kernel."""
        made = []
        for first in range(0, len(x.codes), self._library_rows):
            rows = slice(first, first + self._library_rows)
            part = RoundedRows(x.codes[rows], x.scale[rows], x.dtype)
            if len(part.codes) >= _LIBRARY_ROWS:
                made.append(_library_product(part, self._codes, self._scale))
            else:
                made.append(chain_product(part, self._codes, self._scale, None))
        return made[0] if len(made) == 1 else torch.cat(made)


_agreeing: dict[tuple[torch.Size, torch.device], int] = {}


def _agreeing_rows(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """Up to how many rows torch's product has the chain's bits for weights of that shape; 0 where it has not. Tried
    once, with random rows."""
    key = (codes.shape, codes.device)
    if key not in _agreeing:
        _agreeing[key] = _try_library(codes, scale) if codes.is_cuda else 0
    return _agreeing[key]


def _try_library(codes: torch.Tensor, scale: torch.Tensor) -> int:
    generator, agreed = torch.Generator(codes.device).manual_seed(0), 0
    for rows in _CHECKED_ROWS:
        values = torch.randn((rows, codes.shape[1]), generator=generator, device=codes.device)
        rounded = round_activations(values.to(torch.bfloat16))
        try:
            found = _library_product(rounded, codes, scale)
        except RuntimeError:  # shapes, cards and versions that it does not take
            break
        if not torch.equal(found, chain_product(rounded, codes, scale, None)):
            break
        agreed = rows
    return agreed


def _library_product(x: RoundedRows, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`chain_product` by torch, to bfloat16."""
    values, factors = x.codes[:, : codes.shape[1]], (x.scale.unsqueeze(1), scale.unsqueeze(0))
    return torch._scaled_mm(values, codes.t(), *factors, out_dtype=torch.bfloat16, use_fast_accum=False)
