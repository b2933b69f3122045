"""Rotary position embedding (RoFormer, arXiv:2104.09864) in the half-split layout of Hugging Face checkpoints.

Tables of cosines and sines are computed in float32 on the host and grown in whole chunks when the host learns of a
longer context; a forward only indexes them by positions on the device, so nothing waits for the device and the lookup
can be captured in a CUDA graph (after `reserve`). This module knows neither queries' shapes nor any config.json.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from trtrun.kernels.chooser import operations_of
from trtrun.layers.rope import RopeConfig

# Tables grow by whole chunks of this many positions and each chunk is computed alone: the bits of an angle must not
# depend on how far the table had grown before.
_CHUNK = 2048


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair.

    Returns:
        [head_dim // 2] float32 on the host.
    Raises:
        ValueError: a rope_type that is not in RopeConfig's list (read_model_config refuses it before).
    """
    if rope.rotated is not None:
        own = inverse_frequencies(replace(rope, rotated=None), rope.rotated)
        return torch.cat((own, torch.zeros((head_dim - rope.rotated) // 2)))
    if rope.rope_type == "none":
        return torch.zeros(head_dim // 2)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    base = rope.theta**exponents
    plain = 1.0 / base
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "proportional":
        plain[int(rope.proportion * head_dim // 2) :] = 0
        return plain / rope.factor
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, base, head_dim)
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.long_factors if rope.is_long else rope.short_factors) * base)
    raise ValueError(f"unknown rope_type '{rope.rope_type}'")


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    longest = rope.original_max_position_embeddings / rope.low_freq_factor
    shortest = rope.original_max_position_embeddings / rope.high_freq_factor
    share = (rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * plain / rope.factor + share * plain
    result = torch.where(wavelengths > longest, plain / rope.factor, blended)
    return torch.where(wavelengths < shortest, plain, result)


def _yarn_frequencies(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """NTK-by-parts: a linear ramp over the dimensions from kept frequencies to stretched ones (YaRN, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero; the ramp is then a step
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * base) * (1 - kept) + 1.0 / base * kept


class RotaryEmbedding:
    """Tables of cosine and sine by position.

    The second table holds -sin in its first half: rotate_half(x) * sin is then swap_halves(x) * table, one copy less.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._attention_factor: float | torch.Tensor = rope.attention_factor
        if rope.rotated is not None:
            self._attention_factor = torch.full((head_dim // 2,), rope.attention_factor)
            self._attention_factor[rope.rotated // 2 :] = 1
        self._cosines = torch.empty(0, head_dim, dtype=dtype, device=device)
        self._sines = torch.empty(0, head_dim, dtype=dtype, device=device)

    @staticmethod
    def most_bytes(positions: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of tables that cover so many positions, and of the chunks that they are copied from when they grow."""
        made = -(-positions // _CHUNK) * _CHUNK
        return 3 * 2 * made * head_dim * dtype.itemsize

    def reserve(self, positions: int) -> None:
        """Make the tables cover positions [0, positions). Host work only; call before capturing a graph."""
        if positions <= self._cosines.shape[0]:
            return
        cosines, sines = [self._cosines], [self._sines]
        for start in range(self._cosines.shape[0], positions, _CHUNK):
            angles = torch.outer(torch.arange(start, start + _CHUNK, dtype=torch.float32), self._frequencies)
            cosine, sine = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
            cosines.append(torch.cat((cosine, cosine), dim=1).to(self._cosines))
            sines.append(torch.cat((-sine, sine), dim=1).to(self._sines))
        self._cosines, self._sines = torch.cat(cosines), torch.cat(sines)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of `positions` ([tokens] int64, on the device, inside what `reserve` covers; -1,
        padding, counts as 0).

        Returns:
            Two tensors [tokens, 1, head_dim] of the model's dtype, for `AttentionBackend.forward`.
        """
        select = operations_of(positions.device.type).select_angles
        cosine, sine = select(self._cosines, self._sines, positions)
        return cosine.unsqueeze(1), sine.unsqueeze(1)
