"""Experts on CUDA of which a matrix or both are held in codes of 8 or 4 bits.

Both matrices are a product each of all pairs of a token and an expert that it chose, in tiles of rows
(expert_tiles.py); gates and factors are multiplied, and rounded where the second product takes rounded rows, between
them. A token's bits do not depend on its company, as those of each product do not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override

from trtrun.kernels.arguments import Activation, Activations, Rounding
from trtrun.kernels.torch.experts import Choice, ExpertCodes, ExpertWeights
from trtrun.kernels.triton.coded_experts import four_bits
from trtrun.kernels.triton.coded_experts.eight_bits import ByteProduct
from trtrun.kernels.triton.coded_experts.four_bits import general_product
from trtrun.kernels.triton.coded_experts.suitability import streams
from trtrun.kernels.triton.expert_tiles import ExpertTiles, lay_out
from trtrun.kernels.triton.experts import AddingExperts, PlainProduct
from trtrun.kernels.triton.fused import activate_and_multiply, activate_and_multiply_rounded, round_activations
from trtrun.kernels.triton.support import multiplies_fp8


class _Product(Protocol):
    """The product with one matrix of all experts; see ByteProduct."""

    rounding: Rounding | None

    def tile_rows(self, num_pairs: int, dtype: torch.dtype) -> int: ...

    def __call__(self, x: Activations, tiles: ExpertTiles, num_pairs: int, each: int) -> torch.Tensor: ...


class FourBitProduct:
    """The product with one matrix of all experts in 4 bits.

    Args:
        weight: with "words".
        bias: [experts, features] in the dtype of activations, or None.
        asks_ahead: as of PlainProduct.
    """

    rounding: Rounding | None = None

    def __init__(self, weight: ExpertCodes, bias: torch.Tensor | None, *, asks_ahead: bool = False) -> None:
        self._weight, self._bias, self._asks_ahead = weight, bias, asks_ahead

    def tile_rows(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Rows of a tile where there are so many pairs of a dtype."""
        rows = four_bits.tile_rows(num_pairs, len(self._weight.tensors["words"]))
        has_bias = self._bias is not None
        if rows > 32 and streams(self._weight, dtype, four_bits.MANY_ROWS, has_bias):
            return four_bits.MANY_ROWS  # of which half are left out where an expert has fewer
        return rows if streams(self._weight, dtype, rows, has_bias) else max(rows, four_bits.FEWEST_ROWS)

    def __call__(self, x: Activations, tiles: ExpertTiles, num_pairs: int, each: int) -> torch.Tensor:
        """x [rows, inputs] of half precision, contiguous, of which each has so many pairs → [pairs, features]."""
        assert isinstance(x, torch.Tensor)
        if not streams(self._weight, x.dtype, tiles.rows, self._bias is not None):
            return general_product(x, self._weight, self._bias, tiles, num_pairs, each)
        from trtrun.kernels.triton.coded_experts.four_bits_stream import streamed_product

        return streamed_product(x, self._weight, self._bias, tiles, num_pairs, each, asks_ahead=self._asks_ahead)

    def activated(
        self, x: torch.Tensor, tiles: ExpertTiles, num_pairs: int, each: int, gate: four_bits.Gate
    ) -> torch.Tensor:
        """The first half of the features of the product, activated, times the second: [pairs, features / 2]."""
        if not streams(self._weight, x.dtype, tiles.rows, self._bias is not None, gate):
            return activate_and_multiply(self(x, tiles, num_pairs, each), *gate)
        from trtrun.kernels.triton.coded_experts.four_bits_stream import streamed_product

        return streamed_product(x, self._weight, self._bias, tiles, num_pairs, each, gate)


def _product(weight: torch.Tensor | ExpertCodes, bias: torch.Tensor | None, before: _Product | None = None) -> _Product:
    """The product with a matrix, behind another one, which waits before it lets the next kernel begin."""
    asks_ahead = before is not None
    if not isinstance(weight, ExpertCodes):
        return PlainProduct(weight, bias, asks_ahead=asks_ahead)
    kind = FourBitProduct if "words" in weight.tensors else ByteProduct
    return kind(weight, bias, asks_ahead=asks_ahead)


def takes(weights: ExpertWeights) -> bool:
    """Whether the device multiplies such codes: E4M3 only where its matrix units take them."""
    coded = [it for it in (weights.gate_up, weights.down) if isinstance(it, ExpertCodes)]
    codes = [it.tensors["codes"] for it in coded if "codes" in it.tensors]
    return all(it.dtype is torch.int8 or multiplies_fp8(it.device) for it in codes)


class CodedExperts(AddingExperts):
    """Experts with weights in codes.

    Args:
        weights: of all experts; ranks may hold one matrix of both dense.
        activation: what gates go through.
        limit: of the activation, where it has one.
    """

    def __init__(self, weights: ExpertWeights, activation: Activation, limit: float) -> None:
        self._gate_up = _product(weights.gate_up, weights.gate_up_bias)
        self._down = _product(weights.down, weights.down_bias, self._gate_up)
        down = weights.down
        self._num_experts = len(next(iter(down.tensors.values())) if isinstance(down, ExpertCodes) else down)
        self._activation, self._limit = activation, limit
        products = (self._gate_up, self._down)
        self._few = four_bits.FEW_PAIRS if any(isinstance(it, FourBitProduct) for it in products) else None

    @override
    def make(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        x = x.contiguous()
        (tokens, num_chosen), num_pairs = choice.experts.shape, choice.experts.numel()
        if not tokens:
            return x.new_empty((tokens, num_chosen, x.shape[1]))
        # What of the pairs is this rank's, about.
        own = num_pairs // self.num_holders
        rows = [product.tile_rows(own, x.dtype) for product in (self._gate_up, self._down)]
        tiles = {it: lay_out(choice.experts, self._num_experts, it, self._few) for it in dict.fromkeys(rows)}
        rounding = self._gate_up.rounding
        values = x if rounding is None else round_activations(x, rounding)
        if isinstance(self._gate_up, FourBitProduct) and self._down.rounding is None:
            gate = four_bits.Gate(self._activation, self._limit)
            gated: Activations = self._gate_up.activated(x, tiles[rows[0]], num_pairs, num_chosen, gate)
        else:
            gated = self._activate(self._gate_up(values, tiles[rows[0]], num_pairs, num_chosen))
        return self._down(gated, tiles[rows[1]], num_pairs, 1).view(tokens, num_chosen, -1)

    def _activate(self, fused: torch.Tensor) -> Activations:
        """Gates times factors, as the second product takes them."""
        rounding = self._down.rounding
        if rounding is not None and self._activation != "clamped_swiglu":
            return activate_and_multiply_rounded(fused, rounding, self._activation)
        made = activate_and_multiply(fused, self._activation, self._limit)
        return made if rounding is None else round_activations(made, rounding)
