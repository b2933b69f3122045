"""How rows choose in several steps that are one piece of work, a CUDA graph: by kernels, from tables on the device.

For rows without penalties, biases and bans, whose choices look at nothing but the logits, the row's parameters and the
position. It knows RowSampling and kernels. It does not know what runs the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trtrun.kernels.chooser import operations_of
from trtrun.sampling.distributions import cut_lines
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling
from trtrun.tensors import kept_integers

_KINDS = (True, False)
"""With filters and without."""

NUM_KINDS = len(_KINDS)
"""Kinds of choices of sampled rows, each of which is work of its own."""


@dataclass(frozen=True)
class KeyedRanks:
    """The choices of R rows, some of them sampled.

    Attributes:
        sampling: their parameters.
        rows: [R] int64 on the device.
        lengths: [R] int64 on the device: the position that the first step chooses.
        stream: what the tokens are for.
        cuts: whether any of the rows has top_k or top_p. Both filters run then: where a row has none it costs little,
            and work of fewer kinds has fewer graphs.
    """

    sampling: RowSampling
    rows: Tensor
    lengths: Tensor
    stream: Stream
    cuts: bool

    @classmethod
    def of(cls, sampling: RowSampling, rows: Sequence[int], lengths: Tensor, stream: Stream) -> KeyedRanks | None:
        """The choices of `rows`; None where kernels do not run or a choice looks at a row's tokens."""
        if not operations_of(lengths.device.type).cuts_lines or sampling.needs_history(rows):
            return None
        cuts = any(of_row.top_k or of_row.top_p for of_row in sampling.steps(rows) if not of_row.greedy)
        return cls(sampling, kept_integers(rows, lengths.device), lengths, stream, cuts)

    @classmethod
    def kinds(cls, sampling: RowSampling, rows: Sequence[int], lengths: Tensor, stream: Stream) -> list[KeyedRanks]:
        """One of each kind for `rows`, whatever their parameters: what a start makes ready. None without kernels."""
        if not operations_of(lengths.device.type).cuts_lines:
            return []
        places = kept_integers(rows, lengths.device)
        return [cls(sampling, places, lengths, stream, cuts) for cuts in _KINDS]

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        """What `rank` reads beside logits: rows and lengths."""
        return self.rows, self.lengths

    @property
    def kind(self) -> tuple[Stream, bool]:
        """Choices of one kind are the same work."""
        return self.stream, self.cuts

    def rank(self, logits: Tensor, step: int, count: int, rows: Tensor, lengths: Tensor) -> Tensor:
        """[R, count] int64: what follows a step, best first.

        Args:
            logits: [R, V] float32.
            step: from 0 on.
            count: how many.
            rows, lengths: tensors like the own ones, which a graph reads from another place.
        """
        from trtrun.kernels.triton.sampling.token_choice import choose, rank

        cuts = self.cuts
        lines = cut_lines(self.sampling, logits.unsqueeze(1), rows, lengths + step, by_count=cuts, by_share=cuts)
        return choose(lines, int(self.stream)) if count == 1 else rank(lines, int(self.stream), count)
