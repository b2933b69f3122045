"""Dummy weights in place of a checkpoint's: for benchmarks of models whose weights are not at hand.

Each tensor is made on the device from its name alone, so that every rank of a tensor-parallel group gets slices of the
same model, and two models have the same tensors where names and shapes agree: a draft of a target's first layers. What
later layers add becomes smaller, so that such a draft often chooses the target's token. It knows names and shapes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trtrun.linear.quantization.base import FLOATS
from trtrun.models.config import ModelConfig

_DEVIATION = 0.02
"""Deviation of a matrix's numbers: what transformers initialises models with, unless their configuration says
otherwise."""

_FIRST_OUTPUT, _LEAST_OUTPUT = 4.0, 0.03
"""Factors of what the first layer adds, halved from layer to layer, and of what any layer adds."""

_BLOCK_NUMBERS = 1 << 24
"""About as many numbers of a matrix are made at a time, in whole rows."""


class DummyWeights:
    """Stands for a `Checkpoint`; see there.

    Attributes:
        path: of the model directory, which has a config.json.
        bytes_read: bytes that were made so far.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, config: ModelConfig, *, is_dummy: bool = True
    ) -> None:
        """Make weights of `dtype` on `device`, for the tensors of `config`.

        Args:
            path: of the model directory.
            dtype: of what is made.
            device: where it is made.
            config: of the model.
            is_dummy: see `WeightFiles`; not where files that are elsewhere are to be told by their sizes.
        """
        self.is_dummy = is_dummy
        self.path = path
        self.bytes_read = 0
        self._dtype = dtype
        self._device = device
        self._factors = _read_factors(config)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return True

    def check(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, *, ones_vary: bool = False
    ) -> int:
        """Whatever is asked for is there; returns bytes per element."""
        self._shapes[name] = shape
        return self._dtype.itemsize if dtypes == FLOATS else _item_bytes(dtypes[0])

    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Make the slice `ranges` (one range per dimension) of tensor `name`, some rows at a time.

        Yields:
            (offset, piece): first row of the piece within the slice; a tensor on the device.
        """
        rows = ranges[0]
        if not rows:  # what another rank has: nobody asked for its shape
            return
        if len(ranges) == 1:
            self.bytes_read += len(rows) * self._dtype.itemsize
            value = self._factors.get(name, 1.0)
            yield 0, torch.full((len(rows),), value, dtype=self._dtype, device=self._device)
            return
        height, *inner = self._shapes[name]
        width, columns = math.prod(inner), tuple(slice(item.start, item.stop) for item in ranges[1:])
        step = max(1, _BLOCK_NUMBERS // width)
        for block in range(rows.start // step, -(-rows.stop // step)):
            first = block * step
            made = self._make(name, block, (min(step, height - first), width)).view(-1, *inner)
            start, stop = max(rows.start, first), min(rows.stop, first + step)
            piece = made[(slice(start - first, stop - first), *columns)]
            self.bytes_read += piece.numel() * self._dtype.itemsize
            yield start - rows.start, piece

    def close(self) -> None:
        """Nothing is open."""

    def _make(self, name: str, block: int, shape: tuple[int, int]) -> torch.Tensor:
        digest = hashlib.blake2b(f"{name}/{block}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(0, _DEVIATION * self._factors.get(name, 1.0), generator=generator)


def _item_bytes(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def _read_factors(config: ModelConfig) -> dict[str, float]:
    """What `dummy_scale` says of each tensor, with what later layers add made smaller."""
    factors = {part.name: part.dummy_scale for weight in config.weights for part in weight.parts}
    for index, layer in enumerate(config.layers):
        output = max(math.ldexp(_FIRST_OUTPUT, -index), _LEAST_OUTPUT)
        factors |= {
            part.name: output * part.dummy_scale
            for weight in layer.weights()
            for part in weight.parts
            if part.is_output
        }
    return factors
