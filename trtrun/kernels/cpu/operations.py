"""The operations of a round on the CPU: trtrun's own kernels in bfloat16 and float32 where there are any for the
processor and they take the shape, oneDNN's products, and torch's operations for the rest.

Products with adapters go through products of linear layers, those of each adapter for themselves, so that a line has
the same bits in any company.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from trtrun.kernels.arguments import Activation, Delta, LineSlots
from trtrun.kernels.cpu import fused as kernels
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.attention import NativeAttention, takes_head, whole_head
from trtrun.kernels.cpu.delta_net.net import NativeDeltaNet
from trtrun.kernels.cpu.experts import NativeExperts, takes
from trtrun.kernels.cpu.matmul import BlockedFp8Matmul, BlockedInt8Matmul, BlockedMatmul, can_block
from trtrun.kernels.cpu.onednn_matmul import OneDnnMatmul, can_pack
from trtrun.kernels.torch.delta_net import DeltaNet, DeltaNetWeights
from trtrun.kernels.torch.experts import Experts
from trtrun.kernels.torch.low_rank import Factors, Install, LowRank, LowRankShape
from trtrun.kernels.torch.operations import GatheredAttention, HeadProducts, Product, TorchOperations
from trtrun.kvcache.formats import PLAIN, KVFormat

_RANKS = 8
"""Ranks are filled up with zeros to a multiple of it: kernels take pairs of input features."""


class CpuLowRank(LowRank):
    """The `LowRank` of a CPU. Slots are empty until they are filled.

    Args:
        shape: of the layer.
        product: of a weight [out, in].
    """

    def __init__(self, shape: LowRankShape, product: Callable[[torch.Tensor], Product]) -> None:
        self._shape = shape
        self._product = product
        self._slots: dict[int, tuple[Product, list[tuple[slice, slice, Product]]]] = {}

    @override
    def prepare(self, factors: Sequence[Factors | None]) -> Install:
        downs, ups, start, rank = [], [], 0, 0
        for outputs, of_matrix in zip(self._shape.outputs, factors, strict=True):
            if of_matrix is not None:
                missing = -of_matrix.down.shape[0] % _RANKS
                downs.append(functional.pad(of_matrix.down, (0, 0, 0, missing)))
                up = functional.pad(of_matrix.up, (0, missing))
                end = rank + up.shape[1]
                ups.append((slice(start, start + outputs), slice(rank, end), self._product(up)))
                rank = end
            start += outputs
        filled = (self._product(torch.cat(downs)), ups) if downs else None

        def install(slot: int) -> None:
            self._slots.pop(slot, None)
            if filled is not None:
                self._slots[slot] = filled

        return install

    @override
    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        for slot, of_slot in lines.groups:
            if slot not in self._slots:
                continue
            down, ups = self._slots[slot]
            low = down(x if of_slot is None else x.index_select(0, of_slot))
            for columns, ranks, up in ups:
                part, added = y[:, columns], up(low[:, ranks].contiguous())
                if of_slot is None:
                    part.add_(added)
                else:
                    part[of_slot] = part.index_select(0, of_slot) + added


_OWN = (torch.bfloat16, torch.float32)
"""What the kernels compute in."""


class CpuOperations(TorchOperations):
    """`TorchOperations` with what the CPU does faster."""

    @override
    def name(self, dtype: torch.dtype) -> str:
        kind = machine.processor_kind() if dtype in _OWN else None
        return kind or super().name(dtype)

    @override
    def attention(self, dtype: torch.dtype, head_dim: int, kv_format: KVFormat = PLAIN) -> Any | None:
        is_taken = dtype in _OWN and takes_head(head_dim) and machine.processor_kind() is not None
        return NativeAttention(head_dim, dtype) if is_taken else None

    def attention_over_gathered(self, dtype: torch.dtype, head_dim: int) -> GatheredAttention | None:
        """Attention over gathered contexts, in float32: of bfloat16 torch has the same bits in any company."""
        is_taken = dtype is torch.float32 and machine.processor_kind() is not None
        return NativeAttention(whole_head(head_dim), dtype).attend_gathered if is_taken else None

    @override
    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: Delta | None = None
    ) -> torch.Tensor:
        delta = None if delta is None else self.added_up(delta)
        if not kernels.fuses(weight.dtype, weight.device, weight.shape[-1]):
            return super().normalise(x, weight, epsilon, delta)
        if weight.dtype == x.dtype:
            return kernels.normalise(x, weight, epsilon, delta)
        if delta is not None:
            x += delta
        return kernels.normalise(x.float(), weight, epsilon).to(x.dtype)

    @override
    def square_sums(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.square_sums(x) if kernels.fuses(x.dtype, x.device, x.shape[1]) else super().square_sums(x)

    @override
    def activate_and_multiply(
        self, fused: torch.Tensor, activation: Activation = "silu", limit: float = math.inf
    ) -> torch.Tensor:
        if kernels.fuses(fused.dtype, fused.device, fused.shape[1] // 2):
            return kernels.activate_and_multiply(fused, activation, limit)
        return super().activate_and_multiply(fused, activation, limit)

    @override
    def xielu(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        is_taken = kernels.fuses(x.dtype, x.device, x.shape[1])
        return kernels.xielu(x, numbers) if is_taken else super().xielu(x, numbers)

    @override
    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        if can_block(weight) and machine.processor_kind() is not None:
            return BlockedMatmul(weight, bias)
        if can_pack(weight.device, weight.dtype):
            return OneDnnMatmul(weight, bias, batch_invariant=batch_invariant)
        return super().product(weight, bias, batch_invariant=batch_invariant)

    @override
    def wide_product(self, weight: torch.Tensor) -> Product:
        if machine.processor_kind() is None and weight.dtype is torch.bfloat16:
            product = self.product(weight, None, batch_invariant=True)  # oneDNN's rows of float32 know their company
            return lambda x: product(x).float()
        product = self.product(weight.float(), None, batch_invariant=True)
        return lambda x: product(x.float())

    @override
    def head_products(self, weight: torch.Tensor) -> HeadProducts:
        products = [self.product(of_head.contiguous(), None, batch_invariant=True) for of_head in weight]
        outputs = weight.shape[1]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            made = x.new_empty((*x.shape[:2], outputs))
            for head, product in enumerate(products):
                made[:, head] = product(x[:, head])
            return made

        return multiply

    @override
    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet:
        if machine.processor_kind() is not None:
            return NativeDeltaNet(weights, self)
        return super().delta_net(weights)

    @override
    def host_experts(self, gate_up: Sequence[Product], down: Sequence[Product], activate: Product) -> Experts:
        if takes(gate_up) and takes(down):
            return NativeExperts(gate_up, down, activate)
        return super().host_experts(gate_up, down, activate)

    def packs_weights(self, dtype: torch.dtype) -> bool:
        """Whether products keep weights in a layout of their own."""
        return (dtype in _OWN and machine.processor_kind() is not None) or can_pack(torch.device("cpu"), dtype)

    @override
    def fp8_product(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> Product:
        if codes.shape[1] % 2 == 0 and machine.processor_kind() == machine.MULTIPLIES_BFLOAT16:
            return BlockedFp8Matmul(codes, scale, bias, rounds_activations=rounds_activations)
        return super().fp8_product(codes, scale, bias, rounds_activations=rounds_activations)

    @override
    def int8_product(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
        if codes.shape[1] % 2 == 0 and machine.processor_kind() == machine.MULTIPLIES_BFLOAT16:
            return BlockedInt8Matmul(codes, scale, bias)
        return super().int8_product(codes, scale, bias)

    @override
    def low_rank(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> LowRank:
        return CpuLowRank(shape, lambda weight: self.product(weight, None, batch_invariant=True))
