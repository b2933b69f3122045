"""The distributions of a round's positions after every row's own parameters, and what is drawn from them.

Two ways to the same: torch's operations, which make a table of processed logits, and on CUDA kernels that look at the
logits alone (kernels/triton/sampling). On one device all tokens of a text come from the same way.

Where rows choose in several steps that are one piece of work, a CUDA graph, kernels choose from tables on the device:
for rows without penalties, biases and bans, whose choices look at nothing but the logits, the row's parameters and the
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.kernels.chooser import operations_of
from trtrun.sampling.penalties import add_logit_bias_
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling
from trtrun.tensors import cached_tensor

if TYPE_CHECKING:
    from trtrun.kernels.triton.sampling.lines import Lines


class Distributions(Protocol):
    """Distributions of R rows at P positions each."""

    def choose(self, stream: Stream) -> Tensor:
        """[R, P] int64: a token of each, as `RowSampling.choose` describes it."""
        ...

    def rank(self, count: int) -> Tensor:
        """[R, count] int64 for P of 1, as `RowSampling.rank` describes it."""
        ...

    def scores(self) -> Tensor:
        """[R, V] float32 for P of 1: what `rank` puts in order, as `RowSampling.scores` describes it."""
        ...

    def probabilities(self, indices: Sequence[int], width: int) -> Tensor:
        """[S, P, width] float32 for sampled rows: `indices` into the R rows; zeros beyond the vocabulary."""
        ...

    def forbids(self, tokens: Tensor) -> Tensor:
        """[R, P] bool: which of `tokens` [R, P] int64 in [0, V) are impossible; what was chosen is so where all are."""
        ...


def _forbids(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) == -torch.inf


class TorchDistributions(Distributions):
    """Distributions by torch's operations."""

    def __init__(self, sampling: RowSampling, processed: Tensor, rows: Sequence[int], lengths: Tensor) -> None:
        """Draw from `processed` [R, P, V] float32 of RowSampling.process; the rest as there."""
        self._sampling = sampling
        self.processed = processed
        self._rows = rows
        self._lengths = lengths

    @override
    def choose(self, stream: Stream) -> Tensor:
        return self._sampling.choose(self.processed, self._rows, self._lengths, stream)

    @override
    def rank(self, count: int) -> Tensor:
        return self._sampling.rank(self.processed[:, 0], self._rows, self._lengths, count)

    @override
    def scores(self) -> Tensor:
        return self._sampling.scores(self.processed[:, 0], self._rows, self._lengths)

    @override
    def probabilities(self, indices: Sequence[int], width: int) -> Tensor:
        picked = self.processed[cached_tensor(indices, self.processed.device)]
        return torch.nn.functional.pad(self._sampling.probabilities(picked), (0, width - picked.shape[-1]))

    @override
    def forbids(self, tokens: Tensor) -> Tensor:
        return _forbids(self.processed, tokens)


class KernelDistributions(Distributions):
    """Distributions by kernels on CUDA, for rows of which at least one is sampled or changes its logits."""

    def __init__(self, lines: Lines) -> None:
        """Draw from lines that are cut."""
        self.lines = lines

    @override
    def choose(self, stream: Stream) -> Tensor:
        from trtrun.kernels.triton.sampling.token_choice import choose

        return choose(self.lines, int(stream))

    @override
    def rank(self, count: int) -> Tensor:
        from trtrun.kernels.triton.sampling.token_choice import rank

        return rank(self.lines, int(Stream.TARGET), count)

    @override
    def scores(self) -> Tensor:
        from trtrun.kernels.triton.sampling.token_choice import scores

        return scores(self.lines, int(Stream.TARGET))

    @override
    def probabilities(self, indices: Sequence[int], width: int) -> Tensor:
        from trtrun.kernels.triton.sampling.token_choice import write_probabilities

        logits = self.lines.logits
        output = torch.empty((len(indices), logits.shape[1], width), dtype=torch.float32, device=logits.device)
        write_probabilities(self.lines, cached_tensor(indices, logits.device), output)
        return output

    @override
    def forbids(self, tokens: Tensor) -> Tensor:
        return _forbids(self.lines.logits, tokens)


def distributions_of(
    sampling: RowSampling,
    logits: Tensor,
    rows: Sequence[int],
    lengths: Tensor,
    token_ids: Tensor,
    draft_tokens: Tensor | None = None,
    max_context: int | None = None,
) -> TorchDistributions | KernelDistributions:
    """The distributions of positions; arguments as in `RowSampling.process`."""
    if sampling.passes(rows) or not operations_of(logits.device.type).cuts_lines:
        processed = sampling.process(logits, rows, lengths, token_ids, draft_tokens, max_context)
        return TorchDistributions(sampling, processed, rows, lengths)
    width = token_ids.shape[1] if max_context is None else min(max_context, token_ids.shape[1])
    return KernelDistributions(_lines(sampling, logits, rows, lengths, token_ids, draft_tokens, width))


def _lines(
    sampling: RowSampling,
    logits: Tensor,
    rows: Sequence[int],
    lengths: Tensor,
    token_ids: Tensor,
    draft_tokens: Tensor | None,
    width: int,
) -> Lines:
    """Lines that are cut; `width` columns of `token_ids` may be valid."""
    steps, index = sampling.steps(rows), cached_tensor(rows, logits.device)
    if any(of_row.penalties or of_row.own_tables for of_row in steps):
        logits = _changed(sampling, logits, rows, lengths, token_ids, draft_tokens, width)
    sampled = [of_row for of_row in steps if not of_row.greedy]
    by_count, by_share = any(of_row.top_k for of_row in sampled), any(of_row.top_p for of_row in sampled)
    return cut_lines(sampling, logits, index, lengths, by_count=by_count, by_share=by_share)


def cut_lines(
    sampling: RowSampling, logits: Tensor, rows: Tensor, lengths: Tensor, *, by_count: bool, by_share: bool
) -> Lines:
    """Lines of logits [R, P, V] after the filters of their rows; on CUDA, without a look at the host.

    Args:
        sampling: the rows' parameters.
        logits: float32, after biases, penalties and bans.
        rows, lengths: [R] int64 on the device.
        by_count, by_share: whether any row may have top_k, or top_p.
    """
    from trtrun.kernels.triton.sampling.lines import make_lines
    from trtrun.kernels.triton.sampling.threshold import cut

    lines = make_lines(logits, rows, lengths, sampling.numbers, sampling.integers)
    if by_count:
        cut(lines, by_count=True)
    if by_share:
        cut(lines, by_count=False)
    return lines


def _changed(
    sampling: RowSampling,
    logits: Tensor,
    rows: Sequence[int],
    lengths: Tensor,
    token_ids: Tensor,
    draft_tokens: Tensor | None,
    width: int,
) -> Tensor:
    """A copy of the logits with biases, penalties and bans."""
    from trtrun.kernels.triton.sampling.penalties import penalise_

    steps, device = sampling.steps(rows), logits.device
    logits = logits.clone(memory_format=torch.contiguous_format)
    for index, of_row in enumerate(steps):
        if of_row.tables.bias is not None:
            add_logit_bias_(logits[index], *of_row.tables.bias)
    penalised = [index for index, of_row in enumerate(steps) if of_row.penalties]
    if penalised:
        members, places = cached_tensor(penalised, device), cached_tensor(rows, device)
        tables = (sampling.numbers, sampling.integers)
        penalise_(logits, members, places, lengths, token_ids, width, draft_tokens, *tables)
    for index, of_row in enumerate(steps):
        if of_row.own_tables:
            drafts = None if draft_tokens is None else draft_tokens[index]
            sampling.ban_(logits[index], rows[index], lengths[index], token_ids, drafts)
    sampling.end_thoughts_(logits, rows, lengths, token_ids, draft_tokens)
    return logits


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
        return cls(sampling, cached_tensor(rows, lengths.device), lengths, stream, cuts)

    @classmethod
    def kinds(cls, sampling: RowSampling, rows: Sequence[int], lengths: Tensor, stream: Stream) -> list[KeyedRanks]:
        """One of each kind for `rows`, whatever their parameters: what a start makes ready. None without kernels."""
        if not operations_of(lengths.device.type).cuts_lines:
            return []
        places = cached_tensor(rows, lengths.device)
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
