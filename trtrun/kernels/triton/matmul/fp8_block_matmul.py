"""The product of rows that are rounded in groups with a weight of 8 bits in blocks, on CUDA: E4M3 both, with a scale
for each 128 inputs of a row and one for each 128 by 128 weights. Rows have the same bits in any company.

The matrix units sum up 128 inputs; that, times the product of both scales, is added up in float32, in the order of the
inputs. So it is in one kernel for any number of rows, and neither the tile nor the number of rows can be seen in a
result. For few rows on compute capability 9.0 another kernel reads weights faster (fp8_stream), with the
same bits. Sums of 128 inputs at a time are what keeps the matrix units' own rounding small, too (fp8_matmul.py).

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import GROUP, Activations, RoundedRows, Rounding
from trtrun.kernels.triton.early_launch import begin, early, fetch, lines_of
from trtrun.kernels.triton.fp8_stream.suitability import Streamed
from trtrun.kernels.triton.fused import round_activations
from trtrun.kernels.triton.matmul.fp8_matmul import Tile, choose_tile

_GROUP = tl.constexpr(GROUP)
_MANY_ROWS = 256

_LINE = 32
"""Scales that memory is asked for at a time."""


@triton.jit(do_not_specialize=["rows"])
def _block_product_kernel(
    x, x_scale, codes, scale, bias, y, rows, features, inputs, groups, x_stride, scale_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, IS_EVEN: tl.constexpr, ADDS: tl.constexpr, LINES: tl.constexpr,
    SCALE_LINES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply as fp8_matmul's kernel does; FEATURES is 64 or 128, so that a tile has one scale for a group of
    inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_feature, is_row = feature < features, row < rows
    # The last tile computes some features again instead of reading behind the weight.
    start = tl.where(is_feature, feature, 0).to(tl.int64) * inputs
    fetch(codes, start, inputs, LINES, EARLY)
    first_scale = (tl.program_id(1) * FEATURES // _GROUP).to(tl.int64) * groups
    fetch(scale, tl.zeros((1,), tl.int64) + first_scale, groups, SCALE_LINES, EARLY)
    begin(EARLY)
    row_start, of_tile = row.to(tl.int64) * x_stride, scale + first_scale
    # Scales of rows have room behind the last one: what is read there is of rows that are not written.
    has_scale = row < scale_stride
    of_weight = tl.load(of_tile)
    total = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
    for group in tl.range(0, groups, num_stages=STAGES):
        number = group * _GROUP + tl.arange(0, _GROUP)
        if IS_EVEN:
            weights = tl.load(codes + start[:, None] + number[None, :], eviction_policy="evict_first")
            values = tl.load(x + row_start[None, :] + number[:, None], mask=is_row[None, :], other=0.0)
        else:
            known = number < inputs
            weights = tl.load(
                codes + start[:, None] + number[None, :], mask=known[None, :], other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(x + row_start[None, :] + number[:, None], mask=is_row[None, :] & known[:, None], other=0.0)
        # It is there when the matrix units are done; what is read of rows comes with them.
        weight_ahead = tl.load(of_tile + tl.minimum(group + 1, groups - 1))
        of_rows = tl.load(x_scale + group * scale_stride + row, mask=has_scale, other=0.0)
        sums = tl.dot(weights, values)
        # Said out loud: a compiler may or may not make one of a product and a sum.
        total = tl.fma(sums, tl.broadcast_to((of_weight * of_rows)[None, :], (FEATURES, ROWS)), total)
        of_weight = weight_ahead
    if ADDS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    place = y + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


def chain_block_product(
    x: RoundedRows, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None
) -> torch.Tensor:
    """x @ (codes * scales of blocks).T + bias → [rows, out] in x's dtype.

    Args:
        x: rows of `in` numbers, rounded in groups.
        codes: [out, in] E4M3, contiguous.
        scale: [ceil(out / 128), ceil(in / 128)] float32, contiguous.
        bias: [out] or None.
        tile: of 64 or 128 features by 128 inputs; None takes what is fast for so many rows.
    """
    rows, (features, inputs) = x.codes.shape[0], codes.shape
    y = torch.empty((rows, features), dtype=x.dtype, device=codes.device)
    if rows:
        tile = tile or _tile(rows, features, codes.device)
        _block_product_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features))](
            x.codes, x.scale, codes, scale, scale if bias is None else bias, y,
            rows, features, inputs, scale.shape[1], x.codes.stride(0), x.scale.stride(1),
            ROWS=tile.rows, FEATURES=tile.features, IS_EVEN=inputs % GROUP == 0,
            ADDS=bias is not None, LINES=lines_of(codes, tile.features),
            SCALE_LINES=triton.next_power_of_2(triton.cdiv(scale.shape[1], _LINE)),
            STAGES=tile.num_stages, num_warps=tile.num_warps, num_stages=tile.num_stages, **early(codes),
        )  # fmt: skip
    return y


def _tile(rows: int, features: int, device: torch.device) -> Tile:
    """Choose the tile as where there are no blocks, but for inputs: one group at a time; and for many rows, where sums
    are scaled group by group: 411 instead of 482 µs for 2,000 rows of 14336 → 4096."""
    tile = choose_tile(rows, features, True, device)
    if rows > _MANY_ROWS:
        tile = tile._replace(features=64, num_warps=4)
    return tile._replace(inputs=GROUP, num_stages=tile.num_stages * tile.inputs // GROUP)


class TritonFp8BlockMatmul:
    """The product with one weight of 8 bits in blocks on CUDA.

    Args:
        codes: [out, in] E4M3, contiguous, none of them NaN.
        block_scale: [ceil(out / 128), ceil(in / 128)] float32, contiguous.
        bias: [out] or None.

    Attributes:
        takes_rounded_rows: how RoundedRows are rounded that x may be.
    """

    takes_rounded_rows: Rounding = "group"

    def __init__(self, codes: torch.Tensor, block_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = codes, block_scale, bias
        self._streamed = Streamed(codes, block_scale, bias, chain_block_product)

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16, or rows of such that are rounded in groups → [rows, out] in the same
        dtype."""
        if not isinstance(x, RoundedRows):
            x = round_activations(x if x.stride(1) == 1 else x.contiguous(), "group")
        return self._streamed(x) if self._streamed.takes(x) else chain_block_product(x, *self._weight)
