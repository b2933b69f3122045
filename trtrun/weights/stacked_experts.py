"""Checkpoints whose experts may lie in one tensor for all of a layer, as transformers 5 has them in memory and some are
released: gate_up_proj [experts, 2 * features, hidden], with gates first, and down_proj [experts, hidden, features]; in
block FP8 with gate_up_proj_scale_inv and down_proj_scale_inv [experts, blocks, blocks] beside them.

They are there under the names of single experts, too, so that nobody else need know how files have them. It knows
names and shapes. It does not know models; those of gpt-oss lie otherwise, and have a layout of their own
(trtrun/linear/stored/expert_layouts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from trtrun.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

_MATRICES = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
_OF_BLOCKS = "_scale_inv"
_PARTS = {
    end + beside: [f"{matrix}.weight{beside}" for matrix in matrices]
    for end, matrices in _MATRICES.items()
    for beside in ("", _OF_BLOCKS)
}
"""The end of a tensor's name → those of an expert's own tensors that lie there, one behind the other."""

_BLOCK = 128
"""Rows that may share a scale."""


class _Place(NamedTuple):
    """Where a matrix of an expert lies.

    Attributes:
        name: of the tensor of all experts.
        expert: which one it is.
        first: its first row, of those of the expert.
    """

    name: str
    expert: int
    first: int


class StackedExpertsCheckpoint(Checkpoint):
    """A `Checkpoint`, with each expert under names of its own; arguments and errors as there."""

    def __init__(self, path: Path, own_name: Callable[[str], str | None] = lambda stored: stored) -> None:
        super().__init__(path, own_name=own_name)
        self._places: dict[str, _Place] = {}
        for name in self.names():
            end = next((end for end in _PARTS if name.endswith(end)), None)
            if end is not None and len(self.shape(name)) == 3 and self._has_whole_blocks(name):
                self._add_experts(name, _PARTS[end])

    def _has_whole_blocks(self, name: str) -> bool:
        """Whether gates share no scale with the factors behind them, where these are scales of both."""
        both = name.removesuffix(_OF_BLOCKS)
        is_cut = name != both and both.endswith("gate_up_proj") and both in self
        return not is_cut or self.shape(both)[1] % (2 * _BLOCK) == 0

    def _add_experts(self, name: str, parts: Sequence[str]) -> None:
        experts, rows, columns = self.shape(name)
        size, stem = rows // len(parts), name.rpartition(".")[0]
        for expert in range(experts):
            for index, part in enumerate(parts):
                own = f"{stem}.{expert}.{part}"
                if own not in self:
                    self._places[own] = _Place(name, expert, index * size)
                    self._file_of[own], self._dtypes[own] = self._file_of[name], self._dtypes[name]
                    self._shapes[own] = (size, columns)

    @override
    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        place = self._places.get(name)
        if place is None:
            yield from super().pieces(name, ranges)
            return
        rows, columns = ranges
        moved = range(place.first + rows.start, place.first + rows.stop)
        for _, piece in super().pieces(place.name, (range(place.expert, place.expert + 1), moved, columns)):
            yield 0, piece[0]
