"""A gated delta net's part between its linear layers, on GPUs: the convolution, the recurrence, what is remembered of
tokens, and the gated norm. It does not know how the recurrence is computed (trtrun.kernels.cuda.delta_net)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from trtrun.kernels.cuda.delta_net import Tokens
from trtrun.kernels.torch.delta_net import LEAST_SQUARES, DeltaNetWeights
from trtrun.kernels.triton.delta_net.inputs import CHANNELS, FEW_TOKENS, TOKENS, convolve_kernel, remember_kernel
from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kvcache.row_states import LayerStates, SegmentStates

Recurrence = Callable[[Tokens, LayerStates, SegmentStates, torch.Tensor], None]
"""Carries the states of a segment's rows on, and fills in what its tokens read, [tokens, values * value_dim]. The
kernel in front waits before it lets this one begin: states are read before that one has ended."""

_HEADS = 4
"""Whose norms one program makes."""


@triton.jit
def _gate_kernel(
    read, made, weight, output, stride, channels, epsilon,
    VALUES: tl.constexpr, VALUE_DIM: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The norm of what some heads of a token read, times what comes of their gates."""
    begin(EARLY)
    token, number = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < VALUES)[:, None] & (number < VALUE_DIM)[None, :]
    at = head[:, None] * VALUE_DIM + number[None, :]
    place = token * (VALUES * VALUE_DIM) + at
    x = tl.load(read + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(made + token * stride + channels + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + number, mask=number < VALUE_DIM, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / VALUE_DIM + epsilon)[:, None]
    if weight.dtype.element_ty == output.dtype.element_ty:
        x = x.to(output.dtype.element_ty).to(tl.float32)
    x = (x * factor.to(tl.float32)[None, :]).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + place, (gate / (1 + tl.exp(-gate)) * x).to(output.dtype.element_ty), mask=inside)


class TritonDeltaNet:
    """A `DeltaNet` on GPUs.

    Args:
        weights: of the rank's heads.
        recurrence: for these.
    """

    def __init__(self, weights: DeltaNetWeights, recurrence: Recurrence) -> None:
        self._weights, self._recurrence = weights, recurrence
        self._taps = triton.next_power_of_2(len(weights.convolution) - 1)

    def __call__(
        self, made: torch.Tensor, rates: torch.Tensor, states: LayerStates, segments: Sequence[SegmentStates]
    ) -> torch.Tensor:
        weights = self._weights
        read = made.new_empty((len(made), weights.values * weights.value_dim))
        for segment in segments:
            queries = segment.segment.queries
            tokens = states.inputs[0].shape[1] + queries
            # Where rows may be tiles of one, all of it has been read before anything is written.
            remembers = tokens <= TOKENS and queries < weights.tile
            brought = self._convolve(made, rates, states, segment, remembers)
            self._recurrence(brought, states, segment, read)
            if not remembers:
                self._remember(made, brought, states, segment)
        output = torch.empty_like(read)
        if len(made):
            _gate_kernel[(len(made), triton.cdiv(weights.values, _HEADS))](
                read, made, weights.norm, output, made.stride(0), weights.channels, weights.epsilon,
                VALUES=weights.values, VALUE_DIM=weights.value_dim, SIZE=triton.next_power_of_2(weights.value_dim),
                HEADS=_HEADS, num_warps=4, **early(made),
            )  # fmt: skip
        return output

    def _convolve(
        self,
        made: torch.Tensor,
        rates: torch.Tensor,
        states: LayerStates,
        segment_states: SegmentStates,
        remembers: bool,
    ) -> Tokens:
        """What the tokens of a segment's rows bring, which are remembered on the way where that is asked for."""
        weights, rows = self._weights, segment_states.segment.rows
        tokens = states.inputs[0].shape[1] + segment_states.segment.queries
        brought = Tokens(
            made.new_empty((rows * tokens, 2 * weights.keys, weights.key_dim), dtype=torch.float32),
            made.new_empty((rows * tokens, weights.values, weights.value_dim)),
            made.new_empty((rows * tokens, weights.values, 2), dtype=torch.float32),
        )
        at_once = FEW_TOKENS if remembers and segment_states.segment.queries == 1 else TOKENS
        parts = 1 if remembers else triton.cdiv(tokens, at_once)
        convolve_kernel[(parts, 2 * weights.keys + weights.values, rows)](
            made, rates, *states.inputs, states.states[0], states.snapshots[0], weights.convolution, weights.fading,
            weights.fading_bias, segment_states.numbers, *brought, rows, tokens, states.inputs[0].shape[1],
            made.stride(0), rates.stride(0), weights.key_dim**-0.5, LEAST_SQUARES,
            KEYS=weights.keys, VALUES=weights.values, KEY_DIM=weights.key_dim, VALUE_DIM=weights.value_dim,
            SIZE=triton.next_power_of_2(max(weights.key_dim, weights.value_dim)), KERNEL=len(weights.convolution),
            TAPS=self._taps, TOKENS=at_once, REMEMBERS=remembers, num_warps=at_once // 2, **early(made),
        )  # fmt: skip
        return brought

    def _remember(
        self, made: torch.Tensor, brought: Tokens, states: LayerStates, segment_states: SegmentStates
    ) -> None:
        rows, channels = segment_states.segment.rows, self._weights.channels
        remember_kernel[(triton.cdiv(channels, CHANNELS), rows)](
            made, *states.inputs, states.states[0], states.snapshots[0], brought.factors, segment_states.numbers,
            rows, len(brought.value) // rows, states.inputs[0].shape[1], made.stride(0),
            VALUES=self._weights.values, SIZE=channels, KERNEL=len(self._weights.convolution), TAPS=self._taps,
            BLOCK=CHANNELS, num_warps=1, **early(made),
        )  # fmt: skip
