"""The forms that weights of quantized checkpoints have in memory, whatever their files are called and look like.

A linear layer is y = x @ W.T with W [out, in]; each form says what W is (`dequantize`), in plain torch, right on any
device: kernels are held to it. It knows numbers. It does not know files, configurations or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from trtrun.linear.stored.settings import Activations

Rows = slice | torch.Tensor
"""Output features: one behind the other, or the numbers of any, int64 [rows]."""

ALL_ROWS = slice(None)
_WORD_BITS = 32
_E2M1 = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""By code: the highest bit is the sign."""


class StoredForm(Protocol):
    """A weight, or a rank's slice of it."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        ...

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        """The numbers of some output features: float32 [rows, in] on the weight's device."""
        ...


@dataclass(frozen=True)
class PlainWeight:
    """W as it is.

    Attributes:
        values: [out, in] of any float dtype.
    """

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        return self.values[rows].float()


@dataclass(frozen=True)
class SomeColumns:
    """Some columns of a weight whose groups end elsewhere.

    Attributes:
        form: the weight.
        columns: of it.
    """

    form: StoredForm
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return self.form.shape[0], len(self.columns)

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        return self.form.dequantize(rows)[:, self.columns.start : self.columns.stop]


@dataclass(frozen=True)
class Fp8Weight:
    """W = codes * scale, of 8 bits with an exponent.

    Attributes:
        codes: [out, in] E4M3.
        scale: float32, by its dimensions: [] of the whole tensor, [out] of each output feature, or of each block
            [ceil(out / block[0]), ceil(in / block[1])].
        activations: see `Activations`.
        block: rows and columns of a block.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    activations: Activations = "none"
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def channel_scale(self) -> torch.Tensor:
        """The scale of each output feature, float32 [out]; only where there are no blocks."""
        return self.scale.expand(self.codes.shape[0])

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        codes = self.codes[rows].float()
        if self.scale.dim() < 2:
            return codes * self.channel_scale()[rows].unsqueeze(1)
        features, inputs = (torch.arange(size, device=codes.device) for size in self.codes.shape)
        return codes * self.scale[features[rows] // self.block[0]][:, inputs // self.block[1]]


@dataclass(frozen=True)
class Int8Weight:
    """W = codes * scale, whole numbers of 8 bits.

    Attributes:
        codes: [out, in] int8.
        scale: [out] float32.
        activations: see `Activations`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    activations: Activations = "none"

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        return self.codes[rows].float() * self.scale[rows].unsqueeze(1)


@dataclass(frozen=True)
class Fp4Weight:
    """W[n, k] = number of code[n, k] * scale[n, k // group_size], of 4 bits with an exponent (E2M1).

    Attributes:
        codes: [out, in / 2] uint8, the even column in the lower bits.
        scale: [out, groups] float32.
        group_size: columns of a group, one behind the other.
        blocks: [out, groups]: what `scale` is made of: exponents plus 127 in uint8, or E4M3.
        whole: [] float32, which E4M3 scales are multiplied by besides; None without.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    group_size: int
    blocks: torch.Tensor
    whole: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        codes = self.unpacked(rows)
        numbers = torch.tensor(_E2M1, device=codes.device)[codes.long()]
        scale = self.scale[rows].unsqueeze(-1).expand(*codes.shape[:1], self.scale.shape[1], self.group_size)
        return numbers.mul_(scale.flatten(1)[:, : numbers.shape[1]])

    def unpacked(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        """Codes of some output features, uint8 [rows, in]."""
        pairs = self.codes[rows]
        return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


@dataclass(frozen=True)
class PackedWeight:
    """W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] * input_scale[k], where g is the group of column k.

    Attributes:
        packed: [out, in * bits / 32] int32: codes without sign along `in`, the first in the lowest bits.
        scale: [out, groups] of any float dtype.
        bits: of a code: 4 or 8.
        group_size: columns of a group, one behind the other, where there are no `groups`.
        zero: [out, groups] int16; None where it is half of the codes' range everywhere.
        groups: [in] int64, the group of each column, where they do not lie in order (act-order); else None.
        input_scale: [in] of any float dtype, which activations were to be multiplied by; None without.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    bits: int
    group_size: int
    zero: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * _WORD_BITS // self.bits

    def dequantize(self, rows: Rows = ALL_ROWS) -> torch.Tensor:
        codes = unpack(self.packed[rows], self.bits)
        codes -= 1 << (self.bits - 1) if self.zero is None else self._by_column(self.zero[rows])
        values = codes.float().mul_(self._by_column(self.scale[rows].float()))
        return values if self.input_scale is None else values.mul_(self.input_scale.float())

    def grouped(self, rows: Rows, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
        """Codes of some output features [rows, in] and scales and zero points for each `size` columns [rows, in /
        size], where groups lie in order and `size` cuts none: zero points may be one number."""
        first = torch.arange(0, self.shape[1], size, device=self.scale.device) // self.group_size
        zero = 1 << (self.bits - 1) if self.zero is None else self.zero[rows][:, first]
        return unpack(self.packed[rows], self.bits), self.scale[rows][:, first], zero

    def _by_column(self, of_groups: torch.Tensor) -> torch.Tensor:
        """[rows, groups] → [rows, in]."""
        if self.groups is not None:
            return of_groups[:, self.groups]
        spread = of_groups.unsqueeze(-1).expand(*of_groups.shape, self.group_size).flatten(1)
        return spread[:, : self.shape[1]]


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words [rows, n] int32 → codes [rows, n * 32 / bits] int32 without sign, the lowest bits first."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    codes = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    return codes.flatten(-2)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [rows, n] without sign, of any integer dtype → words [rows, n * bits / 32] int32; see `unpack`."""
    places = _WORD_BITS // bits
    words = codes.new_zeros((codes.shape[0], codes.shape[1] // places), dtype=torch.int32)
    for place in range(places):
        words |= codes[:, place::places].int() << (bits * place)
    return words
