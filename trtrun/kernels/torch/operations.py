"""The operations of a round that have kernels, in torch's own: right on any device, for any dtype and shape.

What is faster somewhere is a class that changes some of them: cpu/operations.py, triton/operations.py. Which one a
device gets is chosen in chooser.py. It knows tensors. It does not know layers, rows or drafters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from parallel.communicator import Communicator
from trtrun.kernels.arguments import (
    SWIGLU_SLOPE,
    Activation,
    AttentionCall,
    Delta,
    ExpertSums,
    RankSum,
    RoundedRows,
    Rounding,
)
from trtrun.kernels.torch import draft_trees
from trtrun.kernels.torch.delta_net import DeltaNet, DeltaNetWeights, TorchDeltaNet
from trtrun.kernels.torch.experts import (
    ExpertCodes,
    Experts,
    ExpertWeights,
    HostExperts,
    MaskedExperts,
    add_up,
    choose_experts,
)
from trtrun.kernels.torch.fp4 import TorchExpertMatmul
from trtrun.kernels.torch.fp8 import TorchFp8BlockMatmul, TorchFp8Matmul
from trtrun.kernels.torch.integers import TorchInt4Matmul, TorchInt8Matmul
from trtrun.kernels.torch.low_rank import LowRank, LowRankShape, TorchLowRank
from trtrun.kvcache.formats import PLAIN, KVFormat
from trtrun.tensors import cached_range, cached_tensor

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in] → x @ weight.T + bias [rows, out]."""

HeadProducts = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, heads, in] → the product of each head with its own matrix [out, in], [rows, heads, out]."""

GatheredAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor]
"""Queries [rows, queries, heads, head], contexts [2, rows, kv_heads, tokens, head] of keys and values, positions [rows,
queries] int64, and the call, of which what scores become and meet counts → outputs like the queries."""


def _clamped_swiglu(gate: torch.Tensor, factor: torch.Tensor, limit: float) -> torch.Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    upper, size = gate.to(wide).clamp(max=limit), factor.to(wide).clamp(-limit, limit)
    return upper.mul(SWIGLU_SLOPE).sigmoid_().mul_(upper).mul_(size.add_(1)).to(gate.dtype)


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda gate, factor, _: functional.silu(gate).mul_(factor),
    "gelu_tanh": lambda gate, factor, _: functional.gelu(gate, approximate="tanh").mul_(factor),
    "clamped_swiglu": _clamped_swiglu,
    "sigmoid": lambda gate, factor, _: gate.sigmoid().mul_(factor),
}
"""Gates, factors of the same shape, and the limit → what comes of them."""

_NUMBERS_AT_ONCE = 1 << 20
"""Of a large tensor that is computed with by many small operations."""

_MOST_BITS = 1 << 20
"""Bits of masks that are spread out at once."""


class TorchOperations:
    """Operations that have kernels somewhere.

    Attributes:
        cuts_lines: whether tokens are chosen by the kernels of triton/sampling.
    """

    cuts_lines = False

    lay_out_trees = staticmethod(draft_trees.lay_out)
    accept_paths = staticmethod(draft_trees.accept_paths)

    def name(self, dtype: torch.dtype) -> str:
        """What models of `dtype` compute with, in one word for reports."""
        return "torch"

    def attention(self, dtype: torch.dtype, head_dim: int, kv_format: KVFormat = PLAIN) -> Any | None:
        """An `AttentionBackend` (trtrun.attention) for heads of `head_dim` and a store of a format that the device's
        kernels know; None where plain torch attends."""
        return None

    def latent_attention(self, dtype: torch.dtype, kv_format: KVFormat = PLAIN) -> Any | None:
        """A `LatentBackend` (trtrun.attention) for a store of a format that the device's kernels know; None where
        gathered contexts are attended over."""
        return None

    def attention_over_gathered(self, dtype: torch.dtype, head_dim: int) -> GatheredAttention | None:
        """What attends over contexts that were gathered from a store; None where torch's own operations do."""
        return None

    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: Delta | None = None
    ) -> torch.Tensor:
        """RMSNorm of x [rows, size] with weight [size], or of x [rows, parts, size] with weight [parts, size]; where
        `delta` is given, of [rows, size], x [rows, size] becomes x + delta first, in place. A weight in float32 beside
        x in half precision is multiplied with before the result is rounded, others behind that."""
        if delta is not None:
            x += self.added_up(delta)
        # F.rms_norm computes in float32 and rounds to x's dtype; the weight comes after the rounding, as in the
        # models' own code, so it is not handed to F.rms_norm.
        if weight.dtype == x.dtype:
            return functional.rms_norm(x, weight.shape[-1:], None, epsilon).mul_(weight)
        return functional.rms_norm(x.float(), weight.shape[-1:], None, epsilon).mul_(weight).to(x.dtype)

    def normalise_rounded(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: Delta | None, rounding: Rounding
    ) -> RoundedRows:
        """Normalise as `normalise`, rounded for products that take such rows; only where there are some."""
        raise NotImplementedError

    def sums_ranks(self, part: torch.Tensor, communicator: Communicator) -> bool:
        """Whether `normalise` makes the sum of the ranks' parts [rows, size] faster than they do: the same on all."""
        return False

    def added_up(self, delta: Delta) -> torch.Tensor:
        """[rows, size]: what is added to the residual stream, for who cannot add it up on the way."""
        if isinstance(delta, RankSum):
            return delta.communicator.all_reduce(delta.part)
        return add_up(delta) if isinstance(delta, ExpertSums) else delta

    def square_sums(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each row of x [rows, size], whose numbers lie one behind the other, [rows] float32; a
        row has the same bits in any company."""
        sums = x.float().square()
        while sums.shape[1] > 1:  # halves on halves: sums of a row by torch depend on how many rows there are
            half = sums.shape[1] // 2
            rest, sums = sums[:, 2 * half :], sums[:, :half] + sums[:, half : 2 * half]
            sums[:, : rest.shape[1]] += rest
        return sums[:, 0]

    def activate_and_multiply(
        self, fused: torch.Tensor, activation: Activation = "silu", limit: float = math.inf
    ) -> torch.Tensor:
        """fused [rows, 2 * size], gates before factors → [rows, size]: activation(gate) * factor. The limit is that of
        "clamped_swiglu"."""
        size = fused.shape[1] // 2
        return _ACTIVATIONS[activation](fused[:, :size], fused[:, size:], limit)

    def activate_and_multiply_rounded(
        self, fused: torch.Tensor, rounding: Rounding, activation: Activation = "silu"
    ) -> RoundedRows:
        """Compute `activate_and_multiply`, rounded for products that take such rows; only where there are some."""
        raise NotImplementedError

    def xielu(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """xIELU (arXiv:2411.13010) of x [rows, size]: p * x² + b * x where x is positive, else
        n * (exp(min(x, e)) - 1 - x) + b * x, in float32 and rounded once. `numbers` is float32 [4]: p, n, b and e."""
        result = torch.empty_like(x)
        for start in range(0, len(x), step := max(1, _NUMBERS_AT_ONCE // max(1, x.shape[1]))):
            wide = x[start : start + step].float()
            positive, negative, slope, least = numbers.unbind()
            below = (torch.expm1(torch.minimum(wide, least)) - wide).mul_(negative)
            bent = torch.where(wide > 0, positive * wide * wide, below)
            result[start : start + step] = bent.add_(wide * slope)
        return result

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """x @ weight.T + bias with weight [out, in]; a row has the same bits in any company where `batch_invariant`."""
        return lambda x: functional.linear(x, weight, bias)

    def wide_product(self, weight: torch.Tensor) -> Product:
        """The product with weight [out, in] in float32, of x in the weight's dtype; rows as of `product`."""
        wide = weight.float()
        return lambda x: functional.linear(x.float(), wide)

    def head_products(self, weight: torch.Tensor) -> HeadProducts:
        """The product of each head with its matrix of weight [heads, out, in]; rows as of `product`."""
        turned = weight.transpose(1, 2)
        return lambda x: torch.bmm(x.transpose(0, 1), turned).transpose(0, 1)

    choose_experts = staticmethod(choose_experts)

    def experts(self, weights: ExpertWeights, activation: Activation, limit: float) -> Experts:
        """What experts make of the tokens that chose them; the limit as in `activate_and_multiply`."""
        activate = partial(self.activate_and_multiply, activation=activation, limit=limit)
        gate_up = self._expert_products(weights.gate_up, weights.gate_up_bias)
        return MaskedExperts(gate_up, self._expert_products(weights.down, weights.down_bias), activate)

    def _expert_products(self, weight: torch.Tensor | ExpertCodes, bias: torch.Tensor | None) -> list[Product]:
        """The product of each expert."""
        tensors = weight.tensors if isinstance(weight, ExpertCodes) else {"weight": weight}
        products: list[Product] = []
        for expert in range(len(next(iter(tensors.values())))):
            own, added = {name: it[expert] for name, it in tensors.items()}, None if bias is None else bias[expert]
            if not isinstance(weight, ExpertCodes):
                products.append(partial(functional.linear, weight=own["weight"], bias=added))
            elif own.get("codes") is not None and own["codes"].dtype is torch.int8:
                products.append(self.int8_product(own["codes"], own["scale"], added))
            elif "scale" in own:
                rounds = weight.rounds_activations
                products.append(self.fp8_product(own["codes"], own["scale"], added, rounds_activations=rounds))
            elif "block_scale" in own:
                products.append(self.fp8_block_product(own["codes"], own["block_scale"], added))
            else:
                products.append(TorchExpertMatmul(own, weight.features, weight.inputs, added))
        return products

    def add_gated(self, output: torch.Tensor, result: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """output [tokens, size], to which `result` of the same shape is added, times the sigmoids of `logits` [tokens,
        1], in place; sigmoids and products are rounded."""
        # The sigmoid as a softmax beside 0, whose rows have the same bits in any company.
        both = torch.cat((logits.float(), torch.zeros_like(logits, dtype=torch.float32)), dim=1)
        return output.add_(result.mul_(torch.softmax(both, dim=1)[:, :1].to(result.dtype)))

    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet:
        """What carries the states of rows on in a gated delta net."""
        return TorchDeltaNet(weights, self)

    def host_experts(self, gate_up: Sequence[Product], down: Sequence[Product], activate: Product) -> Experts:
        """Experts on the CPU; the products of each, and `activate`, are as in `ProductExperts`."""
        return HostExperts(gate_up, down, activate)

    def packs_weights(self, dtype: torch.dtype) -> bool:
        """Whether `product` copies weights of `dtype` into an order of its own, of whatever shape most of them are."""
        return False

    def fp8_product(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> Product:
        """The product with a weight in E4M3, codes [out, in] and float32 scale [out]."""
        return TorchFp8Matmul(codes, scale, bias, rounds_activations=rounds_activations)

    def fp8_block_product(self, codes: torch.Tensor, block_scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """The product with a weight in E4M3 in blocks of 128 by 128, codes [out, in] and float32 block_scale
        [ceil(out / 128), ceil(in / 128)], which rounds 128 numbers of a row at a time."""
        return TorchFp8BlockMatmul(codes, block_scale, bias)

    def int8_product(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """The product with a weight in int8, codes [out, in] and float32 scale [out]."""
        return TorchInt8Matmul(codes, scale, bias)

    def int4_product(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """The product with a weight of 4 bits, as trtrun.kernels.torch.integers has it."""
        return TorchInt4Matmul(words, scales, bias)

    def low_rank(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> LowRank:
        """What adapters add to a linear layer, with all slots empty."""
        return TorchLowRank(shape, dtype, device)

    def advance(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Append tokens [R, width] int64 to `rows` [R] int64 of token_ids [max_rows, columns] int32, in place, and have
        them grow by num_tokens [R] int64; lengths is [max_rows] int64."""
        of_rows = lengths.index_select(0, rows)
        columns = of_rows.unsqueeze(1) + cached_range(0, tokens.shape[1], rows.device)
        token_ids[rows.unsqueeze(1), columns] = tokens.to(torch.int32)
        lengths[rows] = of_rows + num_tokens

    def with_drafts(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest token of each of `rows` [R] int64 and its draft [R, K] int64 behind it: tokens and positions, both
        [R, K + 1] int64; positions behind a row's draft_lens [R] int64 are -1."""
        newest = lengths.index_select(0, rows) - 1
        tokens, positions = token_ids[rows, newest].to(torch.int64).unsqueeze(1), newest.unsqueeze(1)
        if not draft_tokens.shape[1]:
            return tokens, positions
        steps = cached_range(0, draft_tokens.shape[1] + 1, rows.device)
        positions = torch.where(steps <= draft_lens.clamp(min=0).unsqueeze(1), positions + steps, -1)
        return torch.cat((tokens, draft_tokens), dim=1), positions

    def copy_blocks(self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all layers' keys and values of whole blocks.

        Args:
            store: [layers, 2, blocks, kv_heads, block, width].
            source: [n] int64 blocks.
            target: [n] int64 blocks, none twice; one that is a source, too, is its own.
        """
        store.index_copy_(2, target, store.index_select(2, source))

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Copy all layers' keys and values of single tokens, where a tile has one token behind the other.

        Args:
            store: as in `copy_blocks`.
            source: [n] int64 blocks.
            target: [n] int64 blocks, each with its offset at most once; one that is a source with it, too, is its own.
            offset: [n] int64: places in a block, the same in both.
        """
        store[:, :, target, :, offset] = store[:, :, source, :, offset]

    def mask_tokens(self, logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """A copy of logits [R, P, V] float32 with -inf where a token may not be taken; `places` and `bits` as in
        sampling/row_steps.py."""
        output, vocabulary = logits.clone(memory_format=torch.contiguous_format), logits.shape[-1]
        lines, flat = output.view(-1, vocabulary), places.flatten()
        steps, most = cached_range(0, 32, logits.device).to(torch.int32), max(1, _MOST_BITS // vocabulary)
        for start in range(0, len(lines), most):
            part = flat[start : start + most]
            words = bits.index_select(0, part.clamp(min=0))
            is_forbidden = ((words.unsqueeze(2) >> steps) & 1).flatten(1)[:, :vocabulary] == 0
            lines[start : start + most].masked_fill_(is_forbidden & (part >= 0).unsqueeze(1), -torch.inf)
        return output

    def argmax(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where the largest number of each row [..., width] float32 stands, the first one where several are: [...]."""
        return numbers.argmax(dim=-1)

    def likeliest(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """Where the `count` largest numbers of each row [rows, width] float32 stand, the first of the largest first:
        [rows, count] int64. Elsewhere equal numbers have no order here."""
        found = numbers.topk(count, dim=-1).indices
        first = numbers.argmax(dim=-1, keepdim=True)
        found = torch.where(found == first, found[:, :1], found)
        found[:, :1] = first
        return found

    def likeliest_in_order(self, numbers: torch.Tensor, count: int) -> torch.Tensor | None:
        """Find what `likeliest` does, of equal numbers the first ones first; None where nothing does it at once."""
        return None

    def accept_by_token(
        self, target_tokens: torch.Tensor, draft_tokens: torch.Tensor, draft_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not draft_tokens.shape[1]:  # a plain round: a dozen operations less to launch
            return cached_tensor([1] * len(draft_lens), draft_lens.device), target_tokens
        num_accepted = count_accepted(draft_tokens == target_tokens[:, :-1], draft_lens)
        last = target_tokens.gather(1, num_accepted[:, None])[:, 0]
        return gained(draft_tokens, num_accepted, last)


def count_accepted(accepted: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
    """[R] int64: how many of the leading draft tokens are accepted, from [R, K] bool of each one by itself."""
    steps = torch.arange(accepted.shape[1], device=accepted.device)
    return (accepted & (steps < draft_lens[:, None])).to(torch.int64).cumprod(dim=1).sum(dim=1)


def gained(
    draft_tokens: torch.Tensor, num_accepted: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_tokens [R], tokens [R, K + 1]): the accepted draft tokens, then `last` [R], then -1."""
    steps = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    padded = torch.cat([draft_tokens, last[:, None]], dim=1)
    count = num_accepted[:, None]
    tokens = torch.where(steps < count, padded, torch.where(steps == count, last[:, None], -1))
    return num_accepted + 1, tokens
