"""Where weights come from, as those who read them see it. It knows names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtrun.linear.quantization.base import FLOATS

if TYPE_CHECKING:
    import torch


class WeightFiles(Protocol):
    """What is used of a `Checkpoint`, or of what stands for one.

    Attributes:
        path: of the model directory.
        bytes_read: bytes that were handed out so far.
        is_made_up: whether there are no files: whatever is asked for is made up, of the shapes of plain weights.
    """

    path: Path
    bytes_read: int
    is_made_up: bool

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def check(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, *, ones_vary: bool = False
    ) -> int:
        """See Checkpoint."""
        ...

    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """See Checkpoint; pieces may be on the device that they are for."""
        ...

    def close(self) -> None:
        """See Checkpoint."""
        ...
