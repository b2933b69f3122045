"""The operations of a round on GPUs where Triton works. To be imported there alone. It does not know who asks."""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from parallel.communicator import Communicator
from trtrun.kernels.arguments import Activation, Delta, ExpertSums, RankSum, RoundedRows, Rounding
from trtrun.kernels.cuda.delta_net import CudaRecurrence
from trtrun.kernels.torch.delta_net import DeltaNet, DeltaNetWeights
from trtrun.kernels.torch.experts import ExpertCodes, Experts, ExpertWeights
from trtrun.kernels.torch.low_rank import LowRank, LowRankShape
from trtrun.kernels.torch.operations import HeadProducts, Product, TorchOperations
from trtrun.kernels.triton import expert_choice, expert_sums, rank_sums, row_functions, row_tokens, support
from trtrun.kernels.triton import experts as expert_kernels
from trtrun.kernels.triton import fused as fused_kernels
from trtrun.kernels.triton.attention import paged_store
from trtrun.kernels.triton.attention.latent_attention import PagedLatents
from trtrun.kernels.triton.attention.paged_attention import PagedAttention
from trtrun.kernels.triton.coded_experts import coded_experts as expert_codes
from trtrun.kernels.triton.delta_net.net import TritonDeltaNet
from trtrun.kernels.triton.matmul.dense import TritonMatmul
from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul
from trtrun.kernels.triton.matmul.fp8_matmul import TritonFp8Matmul
from trtrun.kernels.triton.matmul.heads import multiply_heads
from trtrun.kernels.triton.matmul.int_matmul import TritonInt4Matmul, TritonInt8Matmul
from trtrun.kernels.triton.matmul.low_rank import TritonLowRank
from trtrun.kernels.triton.row_states import TritonStates
from trtrun.kernels.triton.sampling import acceptance, penalties, token_choice
from trtrun.kvcache.formats import PLAIN, KVFormat


class TritonOperations(TorchOperations):
    """`TorchOperations` with what Triton does faster."""

    cuts_lines = True
    states = TritonStates()

    lay_out_trees = staticmethod(row_tokens.lay_out)
    accept_paths = staticmethod(row_tokens.accept_paths)
    select_angles = staticmethod(row_functions.select_angles)

    @override
    def name(self, dtype: torch.dtype) -> str:
        return "triton"

    @override
    def attention(self, dtype: torch.dtype, head_dim: int, kv_format: KVFormat = PLAIN) -> Any | None:
        return PagedAttention(kv_format)

    @override
    def latent_attention(self, dtype: torch.dtype, kv_format: KVFormat = PLAIN) -> Any | None:
        return PagedLatents(kv_format)

    @override
    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: Delta | None = None
    ) -> torch.Tensor:
        if weight.dim() > 1:
            return row_functions.normalise_heads(x, weight, epsilon)
        if isinstance(delta, RankSum):
            return rank_sums.sum_and_normalise(x, delta, weight, epsilon)
        return fused_kernels.add_and_normalise(x.reshape(-1, x.shape[-1]), delta, weight, epsilon).view(x.shape)

    @override
    def normalise_rounded(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: Delta | None, rounding: Rounding
    ) -> RoundedRows:
        if isinstance(delta, RankSum):
            return rank_sums.sum_and_normalise_rounded(x, delta, weight, epsilon, rounding)
        return fused_kernels.add_and_normalise_rounded(x, delta, weight, epsilon, rounding)

    @override
    def sums_ranks(self, part: torch.Tensor, communicator: Communicator) -> bool:
        return rank_sums.takes(part, communicator.peer_rows)

    @override
    def added_up(self, delta: Delta) -> torch.Tensor:
        return expert_sums.add_up(delta) if isinstance(delta, ExpertSums) else super().added_up(delta)

    @override
    def square_sums(self, x: torch.Tensor) -> torch.Tensor:
        return row_functions.square_sums(x)

    @override
    def activate_and_multiply(
        self, fused: torch.Tensor, activation: Activation = "silu", limit: float = math.inf
    ) -> torch.Tensor:
        return fused_kernels.activate_and_multiply(fused, activation, limit)

    @override
    def activate_and_multiply_rounded(
        self, fused: torch.Tensor, rounding: Rounding, activation: Activation = "silu"
    ) -> RoundedRows:
        return fused_kernels.activate_and_multiply_rounded(fused, rounding, activation)

    @override
    def gate_heads(self, gates: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return row_functions.gate_heads(gates, attended)

    @override
    def xielu(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return row_functions.xielu(x, numbers)

    @override
    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        if weight.dtype in (torch.bfloat16, torch.float16):
            return TritonMatmul(weight, bias)
        return super().product(weight, bias, batch_invariant=batch_invariant)

    @override
    def wide_product(self, weight: torch.Tensor) -> Product:
        if weight.dtype not in (torch.bfloat16, torch.float16):
            return super().wide_product(weight)
        of_one_head = weight.contiguous().unsqueeze(0)
        return lambda x: multiply_heads(x.unsqueeze(1), of_one_head, torch.float32)[:, 0]

    @override
    def head_products(self, weight: torch.Tensor) -> HeadProducts:
        weight = weight.contiguous()
        return lambda x: multiply_heads(x, weight, x.dtype)

    choose_experts = staticmethod(expert_choice.choose_experts)

    @override
    def experts(self, weights: ExpertWeights, activation: Activation, limit: float) -> Experts:
        gate_up, down, *_ = weights
        if isinstance(gate_up, ExpertCodes) or isinstance(down, ExpertCodes):
            if expert_codes.takes(weights):
                return expert_codes.CodedExperts(weights, activation, limit)
        elif gate_up.dtype in (torch.bfloat16, torch.float16):
            biases = weights.gate_up_bias, weights.down_bias
            return expert_kernels.TritonExperts((gate_up, down), biases, activation, limit)
        return super().experts(weights, activation, limit)

    @override
    def add_gated(self, output: torch.Tensor, result: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return row_functions.add_gated(output, result, logits)

    @override
    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet:
        return TritonDeltaNet(weights, CudaRecurrence(weights))

    @override
    def fp8_product(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> Product:
        if support.multiplies_fp8(codes.device):
            return TritonFp8Matmul(codes, scale, bias, rounds_activations=rounds_activations)
        return super().fp8_product(codes, scale, bias, rounds_activations=rounds_activations)

    @override
    def fp8_block_product(self, codes: torch.Tensor, block_scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        if support.multiplies_fp8(codes.device):
            return TritonFp8BlockMatmul(codes, block_scale, bias)
        return super().fp8_block_product(codes, block_scale, bias)

    @override
    def int8_product(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return TritonInt8Matmul(codes, scale, bias)

    @override
    def int4_product(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return TritonInt4Matmul(words, scales, bias)

    @override
    def low_rank(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> LowRank:
        return TritonLowRank(shape, dtype, device)

    @override
    def advance(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        row_tokens.advance(token_ids, lengths, rows, num_tokens, tokens)

    @override
    def with_drafts(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return row_tokens.with_drafts(token_ids, lengths, rows, draft_tokens, draft_lens)

    @override
    def copy_blocks(self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        if paged_store.takes_blocks(store):
            paged_store.copy_blocks(store, source, target)
        else:
            super().copy_blocks(store, source, target)

    @override
    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        paged_store.copy_tokens(store, source, target, offset)

    @override
    def mask_tokens(self, logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        return penalties.mask_tokens(logits, places, bits)

    @override
    def argmax(self, numbers: torch.Tensor) -> torch.Tensor:
        """The place of each row's largest number; one that is not finite, but for -inf, counts as the largest."""
        return token_choice.likeliest(numbers.reshape(-1, numbers.shape[-1]), 1).view(numbers.shape[:-1])

    @override
    def likeliest(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        return token_choice.likeliest(numbers, count)

    @override
    def likeliest_in_order(self, numbers: torch.Tensor, count: int) -> torch.Tensor | None:
        # Compiled anew for each count: for few of them, which are powers of two.
        ranked = min(numbers.shape[1], 1 << (count - 1).bit_length())
        return token_choice.likeliest(numbers, ranked)[:, :count]

    @override
    def accept_by_token(
        self, target_tokens: torch.Tensor, draft_tokens: torch.Tensor, draft_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not draft_tokens.shape[1]:
            return super().accept_by_token(target_tokens, draft_tokens, draft_lens)
        return acceptance.accept_by_token(target_tokens, draft_tokens, draft_lens)

    @override
    def pack_verdict(
        self,
        num_tokens: torch.Tensor,
        draft_lens: torch.Tensor,
        tokens: torch.Tensor,
        chosen_logits: torch.Tensor,
        found: torch.Tensor | None,
    ) -> torch.Tensor:
        return acceptance.pack_verdict(num_tokens, draft_lens, tokens, chosen_logits, found)
