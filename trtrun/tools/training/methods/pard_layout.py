"""Where PARD's mask tokens stand in a training sequence, and what each position may see. Pure index arithmetic.

PARD (An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", arXiv 2504.18583)
trains all depths of all places of a text in one forward. The sequence is the text, and behind it for each place i and
each depth j from 1 on a mask token at position i + j, which sees the text up to i, the masks of i before it, and
itself. With conditional drop only some places keep a depth: a share of `retention` of those that keep the one before,
and `least_retention` of all at least. A place that keeps a depth keeps all before it: its mask sees theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from trtrun.tools.training.data import DataRow


@dataclass(frozen=True)
class Layout:
    """The sequences of some rows, of one length by padding.

    Attributes:
        tokens: [rows, length] int64; masks hold the mask token, padding too.
        positions: [rows, length] int64.
        starts: [rows, length] int64: the place in the text up to which each entry sees it; -1 for padding.
        depths: [rows, length] int64: 0 for the text, j for a mask of depth j; -1 for padding.
        predicts: [rows, length] bool: whether the entry's logits count.
        text: [rows, longest] int64: the rows alone, padded with 0: what the target reads.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    depths: torch.Tensor
    predicts: torch.Tensor
    text: torch.Tensor

    def visible(self) -> torch.Tensor:
        """[rows, 1, length, length] bool: which entry (third axis) sees which (fourth)."""
        start, depth = self.starts[:, :, None], self.depths[:, :, None]
        other_start, other_depth = self.starts[:, None, :], self.depths[:, None, :]
        text = (other_depth == 0) & (other_start <= start)
        own = (other_start == start) & (other_depth <= depth)
        return (text | own)[:, None]

    def predicted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and place in the text of each entry that predicts, one row after the other: the token behind that place
        is what it is to guess."""
        rows, entries = self.predicts.nonzero(as_tuple=True)
        return rows, self.positions[rows, entries]

    def to(self, device: torch.device) -> Layout:
        """The same on another device."""
        return Layout(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def kept_places(num_places: int, num_masks: int, retention: float, least: float) -> list[int]:
    """How many of a row's places keep depth 1, 2, … num_masks."""
    counts: list[int] = []
    for depth in range(1, num_masks + 1):
        share = max(retention**depth, least)
        counts.append(min(num_places, math.ceil(share * num_places)))
    return counts


def lay_out(
    rows: Sequence[DataRow],
    mask_token: int,
    num_tokens: int,
    generators: Sequence[numpy.random.Generator] | None = None,
    retention: float = 1.0,
    least: float = 1.0,
) -> Layout:
    """Put rows and masks one behind the other.

    Args:
        rows: their prompts are seen and not learned.
        mask_token: its id.
        num_tokens: tokens that one forward proposes: depths 0 to num_tokens - 1.
        generators: of each row's drops; None keeps everything.
        retention: see the module.
        least: see the module.
    """
    parts = [
        _lay_out_row(row, num_tokens, generators[index] if generators else None, retention, least)
        for index, row in enumerate(rows)
    ]
    longest = max(len(row.tokens) for row in rows)
    most_masks = max(len(starts) for starts, _ in parts)
    shape = (len(rows), longest + most_masks)
    tokens = numpy.full(shape, mask_token, dtype=numpy.int64)
    positions = numpy.zeros(shape, dtype=numpy.int64)
    starts = numpy.full(shape, -1, dtype=numpy.int64)
    depths = numpy.full(shape, -1, dtype=numpy.int64)
    predicts = numpy.zeros(shape, dtype=bool)
    text = numpy.zeros((len(rows), longest), dtype=numpy.int64)
    for index, (row, (mask_starts, mask_depths)) in enumerate(zip(rows, parts, strict=True)):
        length, masks = len(row.tokens), slice(longest, longest + len(mask_starts))
        text[index, :length] = tokens[index, :length] = row.tokens
        positions[index, :length] = starts[index, :length] = numpy.arange(length)
        depths[index, :length] = 0
        predicts[index, row.prompt_length - 1 : length - 1] = True
        starts[index, masks], depths[index, masks] = mask_starts, mask_depths
        positions[index, masks] = mask_starts + mask_depths
        predicts[index, masks] = True
    return Layout(*map(torch.from_numpy, (tokens, positions, starts, depths, predicts, text)))


def _lay_out_row(
    row: DataRow, num_tokens: int, generator: numpy.random.Generator | None, retention: float, least: float
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Starts and depths of a row's masks. A mask at position p predicts p + 1, which must be in the row."""
    first, num_places = row.prompt_length - 1, len(row.tokens) - row.prompt_length
    counts = kept_places(num_places, num_tokens - 1, retention, least)
    order = numpy.arange(num_places) if generator is None else generator.permutation(num_places)
    starts, depths = [], []
    for depth, count in enumerate(counts, start=1):
        kept = numpy.sort(order[:count]) + first
        kept = kept[kept + depth + 1 < len(row.tokens)]
        starts.append(kept)
        depths.append(numpy.full(len(kept), depth))
    if not starts:
        return numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0, dtype=numpy.int64)
    return numpy.concatenate(starts), numpy.concatenate(depths)
