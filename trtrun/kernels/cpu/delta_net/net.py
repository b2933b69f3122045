"""The recurrence of a gated delta net on the CPU: all tokens of a row go through some columns of a head's matrix, one
after the other, while these lie in a cache; in memory a matrix is read once and written once.

A column's sums add its rows one by one, with fused multiply-add, in prompts and in rounds alike; what a token reads and
what the next one's key makes of the matrix are summed as it changes. So a token's bits depend neither on the cut of a
prompt, nor on drafts, other rows or threads. What is in front of it, and the norm behind, is plain torch's
(trtrun.kernels.torch.delta_net), for all tokens together.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from typing_extensions import override

from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.delta_net.net_code import CARRY_ON, Arguments, Form, delta_net_module
from trtrun.kernels.cpu.emitter import LANES, REGISTER_BYTES
from trtrun.kernels.cpu.machine import Kernel, load_kernels
from trtrun.kernels.torch.delta_net import TorchDeltaNet
from trtrun.kernels.torch.recurrence import leading_rows
from trtrun.kvcache.row_states import LayerStates, SegmentStates

_NUMBER_NS = 0.06
"""Nanoseconds that a token takes for each number of a matrix, about."""

_TOKENS_AT_ONCE = 32
"""That are convolved together, so that what is between the steps stays in caches: a third of the time at 256 tokens."""

_Brought = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _form(value_dim: int, dtype: torch.dtype) -> Form | None:
    """How matrices of a dtype with so many columns are gone through; None where the kernel does not take them."""
    kind, name = machine.processor_kind(), str(dtype).removeprefix("torch.")
    is_whole = value_dim % LANES == 0
    if kind is None or (name != "float32" and (not is_whole or (name == "float16" and kind == "avx2"))):
        return None
    most = {"avx2": 2, machine.NEON: 1}.get(kind, 4)
    registers = next((count for count in (most, 2, 1) if value_dim % (count * LANES) == 0), 1)
    return Form(registers, is_whole, name, kind)


@functools.cache
def _kernel(form: Form) -> Kernel:
    return load_kernels(delta_net_module, form, names=(CARRY_ON,))[CARRY_ON]


def _lines(rows: SegmentStates) -> torch.Tensor:
    """int64 [rows, 5], as the kernel takes its `Line`s."""
    saved = rows.saved_at - rows.kept
    saved = torch.where((saved >= 0) & (rows.saved_at <= rows.end), saved, -1)
    return torch.stack((rows.slots, rows.end - rows.kept, rows.settled - rows.kept, rows.snapshots, saved), dim=1)


class NativeDeltaNet(TorchDeltaNet):
    """A `DeltaNet` whose matrices are gone through by a kernel."""

    @override
    def _carry_on(
        self,
        brought: _Brought,
        states: LayerStates,
        segments: Sequence[SegmentStates],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        weights = self.weights
        form = _form(weights.value_dim, states.states[1].dtype)
        if form is None:
            return super()._carry_on(brought, states, segments, dtype)
        found = brought[0].new_zeros((len(brought[0]), weights.values, weights.value_dim))
        for rows in map(leading_rows, segments):
            if len(rows.slots):
                lines = _lines(rows)
                window, factors = self._gather(brought, states, rows, lines)
                read = self._read(form, self._convolve_all(window, dtype), factors, states, lines)
                parts = (rows.first - rows.kept, rows.places + rows.first, rows.places + rows.end)
                for of_row, refed, start, stop in zip(read, *(part.tolist() for part in parts), strict=True):
                    found[start:stop] = of_row[refed : refed + stop - start]
        return found.flatten(1)

    def _gather(
        self, brought: _Brought, states: LayerStates, rows: SegmentStates, lines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens bring that go through rows' states, in their order, and remember what is fed; the
        convolution's part of states is moved up.

        Returns:
            [rows, kernel - 1 + most, channels], those in front that the convolution still sees, and [rows, most,
            values, 2], what heads keep, and how much they correct; both float32.
        """
        before, capacity = len(self.weights.convolution) - 1, states.inputs[0].shape[1]
        most = max(1, int(lines[:, 1].max()))
        of_window, of_snapshots = states.states[0], states.snapshots[0]
        window = brought[0].new_zeros((len(lines), before + most, self.weights.channels))
        factors = brought[1].new_zeros((len(lines), most, self.weights.values, 2))
        targets = window[:, before:], factors[..., 1], factors[..., 0]
        positions = torch.stack((rows.kept, rows.first, rows.places), dim=1).tolist()
        for row, (slot, tokens, settled, snapshot, saved) in enumerate(lines.tolist()):
            kept, first, place = positions[row]
            end = kept + tokens
            remembered = max(first, end - capacity)
            again, turns = torch.arange(kept, first) % capacity, torch.arange(remembered, end) % capacity
            window[row, :before] = of_window[slot]
            for given, stored, target in zip(brought, states.inputs, targets, strict=True):
                target[row, : first - kept] = stored[slot].index_select(0, again)
                target[row, first - kept : tokens] = given[place + first : place + end]
                stored[slot].index_copy_(0, turns, given[place + remembered : place + end])
            if saved >= 0:
                of_snapshots[snapshot] = window[row, saved : saved + before]
            of_window[slot] = window[row, settled : settled + before]
        return window, factors

    def _read(
        self, form: Form, vectors: _Brought, factors: torch.Tensor, states: LayerStates, lines: torch.Tensor
    ) -> torch.Tensor:
        """What the tokens read that go through rows' matrices, [rows, most, values, value_dim] float32; `vectors` are
        their queries, keys and values."""
        weights, (count, most) = self.weights, factors.shape[:2]
        read = torch.empty_like(vectors[2])
        units = count * weights.values * -(-weights.value_dim // (form.registers * LANES))
        numbers = (int(lines[:, 1].sum()) + count) * weights.values * weights.key_dim * weights.value_dim
        threads = machine.team(numbers * _NUMBER_NS, units)
        scratch = torch.empty(threads * weights.key_dim * form.registers * REGISTER_BYTES, dtype=torch.uint8)
        of_states = weights.key_of_value, states.states[1], states.snapshots[1]
        tensors = lines, *vectors, factors, read, *of_states, scratch
        sizes = count, most, weights.keys, weights.values, weights.key_dim, weights.value_dim
        arguments = Arguments(*(tensor.data_ptr() for tensor in tensors), *sizes)
        _kernel(form)(ctypes.addressof(arguments), threads)
        return read

    def _convolve_all(self, window: torch.Tensor, dtype: torch.dtype) -> _Brought:
        """`convolve` of each row's tokens behind those in front, [rows, most, heads, size] each."""
        weights, count = self.weights, len(window)
        most = window.shape[1] - len(weights.convolution) + 1
        shapes = (weights.keys, weights.key_dim), (weights.keys, weights.key_dim), (weights.values, weights.value_dim)
        found = tuple(window.new_empty((count, most, *shape)) for shape in shapes)
        step = max(1, _TOKENS_AT_ONCE // count)
        for start in range(0, most, step):
            stop = min(start + step, most)
            seen = [window[:, start + place : stop + place].flatten(0, 1) for place in range(len(weights.convolution))]
            for target, part in zip(found, self.convolve(seen, dtype), strict=True):
                target[:, start:stop] = part.view(count, stop - start, *part.shape[1:])
        return found[0], found[1], found[2]
