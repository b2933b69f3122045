"""The operations of a round on GPUs where Triton works. To be imported there alone. It does not know who asks."""

from __future__ import annotations

from typing import Any

import torch

from trtrun.kernels.arguments import RoundedRows, Rounding
from trtrun.kernels.torch.low_rank import LowRank, LowRankShape
from trtrun.kernels.torch.operations import Product, TorchOperations
from trtrun.kernels.triton import fused as fused_kernels
from trtrun.kernels.triton import row_tokens, support
from trtrun.kernels.triton.attention import paged_store
from trtrun.kernels.triton.attention.paged_attention import PagedAttention
from trtrun.kernels.triton.matmul.dense import TritonMatmul
from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul
from trtrun.kernels.triton.matmul.fp8_matmul import TritonFp8Matmul
from trtrun.kernels.triton.matmul.int_matmul import TritonInt4Matmul, TritonInt8Matmul
from trtrun.kernels.triton.matmul.low_rank import TritonLowRank
from trtrun.kernels.triton.sampling import acceptance, penalties, token_choice
from trtrun.kvcache.formats import PLAIN, KVFormat


class TritonOperations(TorchOperations):
    """See TorchOperations."""

    cuts_lines = True

    lay_out_trees = staticmethod(row_tokens.lay_out)
    accept_paths = staticmethod(row_tokens.accept_paths)

    def name(self, dtype: torch.dtype) -> str:
        """See TorchOperations."""
        return "triton"

    def attention(self, dtype: torch.dtype, head_dim: int, kv_format: KVFormat = PLAIN) -> Any | None:
        """See TorchOperations."""
        return PagedAttention(kv_format)

    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See TorchOperations."""
        if weight.dim() > 1:
            return super().normalise(x, weight, epsilon, delta)
        return fused_kernels.add_and_normalise(x.reshape(-1, x.shape[-1]), delta, weight, epsilon).view(x.shape)

    def normalise_rounded(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: torch.Tensor | None, rounding: Rounding
    ) -> RoundedRows:
        """See TorchOperations."""
        return fused_kernels.add_and_normalise_rounded(x, delta, weight, epsilon, rounding)

    def silu_and_multiply(self, fused: torch.Tensor) -> torch.Tensor:
        """See TorchOperations."""
        return fused_kernels.silu_and_multiply(fused)

    def silu_and_multiply_rounded(self, fused: torch.Tensor, rounding: Rounding) -> RoundedRows:
        """See TorchOperations."""
        return fused_kernels.silu_and_multiply_rounded(fused, rounding)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See TorchOperations."""
        if weight.dtype in (torch.bfloat16, torch.float16):
            return TritonMatmul(weight, bias)
        return super().product(weight, bias, batch_invariant=batch_invariant)

    def fp8_product(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> Product:
        """See TorchOperations."""
        if support.multiplies_fp8(codes.device):
            return TritonFp8Matmul(codes, scale, bias, rounds_activations=rounds_activations)
        return super().fp8_product(codes, scale, bias, rounds_activations=rounds_activations)

    def fp8_block_product(self, codes: torch.Tensor, block_scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """See TorchOperations."""
        if support.multiplies_fp8(codes.device):
            return TritonFp8BlockMatmul(codes, block_scale, bias)
        return super().fp8_block_product(codes, block_scale, bias)

    def int8_product(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """See TorchOperations."""
        return TritonInt8Matmul(codes, scale, bias)

    def int4_product(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """See TorchOperations."""
        return TritonInt4Matmul(words, scales, bias)

    def low_rank(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> LowRank:
        """See TorchOperations."""
        return TritonLowRank(shape, dtype, device)

    def advance(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """See TorchOperations."""
        row_tokens.advance(token_ids, lengths, rows, num_tokens, tokens)

    def with_drafts(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TorchOperations."""
        return row_tokens.with_drafts(token_ids, lengths, rows, draft_tokens, draft_lens)

    def copy_blocks(self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See TorchOperations."""
        if paged_store.takes_blocks(store):
            paged_store.copy_blocks(store, source, target)
        else:
            super().copy_blocks(store, source, target)

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """See TorchOperations."""
        paged_store.copy_tokens(store, source, target, offset)

    def mask_tokens(self, logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """See TorchOperations."""
        return penalties.mask_tokens(logits, places, bits)

    def argmax(self, numbers: torch.Tensor) -> torch.Tensor:
        """See TorchOperations. A number that is not finite, but for -inf, is the largest."""
        return token_choice.likeliest(numbers.reshape(-1, numbers.shape[-1]), 1).view(numbers.shape[:-1])

    def likeliest(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """See TorchOperations."""
        return token_choice.likeliest(numbers, count)

    def likeliest_in_order(self, numbers: torch.Tensor, count: int) -> torch.Tensor | None:
        """See TorchOperations."""
        # Compiled anew for each count: for few of them, which are powers of two.
        ranked = min(numbers.shape[1], 1 << (count - 1).bit_length())
        return token_choice.likeliest(numbers, ranked)[:, :count]

    def accept_by_token(
        self, target_tokens: torch.Tensor, draft_tokens: torch.Tensor, draft_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TorchOperations."""
        if not draft_tokens.shape[1]:
            return super().accept_by_token(target_tokens, draft_tokens, draft_lens)
        return acceptance.accept_by_token(target_tokens, draft_tokens, draft_lens)
