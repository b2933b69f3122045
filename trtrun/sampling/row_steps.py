"""What the host knows of a row's sampling: which steps it takes, and the tables that some of them use; and which tokens
a guide allows, as bits on the device.

Made once, when a request gets its row, so that choosing tokens later never asks the device which path to take. Rows of
the same lists, such as the completions of one prompt, share their tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from trtrun.core.nouns import RowAdmission
from trtrun.core.token_lists import NO_LISTS, TokenLists
from trtrun.kernels.chooser import operations_of
from trtrun.sampling.penalties import BadWords
from trtrun.sampling.thoughts import ThinkingBudget


class RowTables:
    """A request's lists of tokens as one engine's sampling uses them: without ids outside its vocabulary.

    Attributes:
        bias: token ids [b] int64 and values [b] float32; None without any.
        stop_ids: [b] int64, or None.
        bad_words: None without any.
        thinking: what bounds thoughts, or None.
    """

    def __init__(self, lists: TokenLists, vocab_size: int, device: torch.device, *, ends_thoughts: bool = True) -> None:
        biased = lists.bias_ids < vocab_size
        bias_ids = _to_device(lists.bias_ids[biased], torch.int64, device)
        bias_values = _to_device(lists.bias_values[biased], torch.float32, device)
        stop_ids = _to_device(lists.stop_ids[lists.stop_ids < vocab_size], torch.int64, device)
        bad_words = BadWords(lists.bad_words, vocab_size, device)
        self.bias = (bias_ids, bias_values) if bias_ids.numel() else None
        self.stop_ids = stop_ids if stop_ids.numel() else None
        self.bad_words = bad_words or None
        self.thinking = ThinkingBudget(lists.thoughts) if lists.thoughts is not None and ends_thoughts else None


class SharedTables:
    """The tables of the requests that have rows: one for all rows of the same lists."""

    def __init__(self, vocab_size: int, device: torch.device, *, ends_thoughts: bool = True) -> None:
        """Make tables for logits [vocab_size] on `device`; whether budgets for thoughts are among them."""
        self._vocab_size = vocab_size
        self._ends_thoughts = ends_thoughts
        self._device = device
        self._none = RowTables(NO_LISTS, vocab_size, device)
        self._kept: WeakValueDictionary[bytes, RowTables] = WeakValueDictionary()

    def of(self, lists: TokenLists) -> RowTables:
        """The tables of such lists."""
        if lists.is_empty:
            return self._none
        tables = self._kept.get(lists.digest)
        if tables is None:
            tables = RowTables(lists, self._vocab_size, self._device, ends_thoughts=self._ends_thoughts)
            self._kept[lists.digest] = tables
        return tables


def _to_device(numbers: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy, made without waiting for the device."""
    return torch.from_numpy(numbers).to(dtype).to(device, non_blocking=True)


@dataclass(frozen=True)
class RowSteps:
    """The steps from one row's logits to its token.

    Attributes:
        greedy: whether the row takes the most likely token.
        logprobs: alternatives to report, or None.
        reports_logits: whether the logits of its tokens are reported.
        top_k: 0 where it would keep the whole vocabulary.
        top_p, min_p, repetition, output_penalties: whether the row has it.
        tables: its lists of tokens.
        holds_stops: whether min_tokens mask the stop ids of `tables`.
    """

    greedy: bool
    logprobs: int | None
    reports_logits: bool
    top_k: int
    top_p: bool
    min_p: bool
    repetition: bool
    output_penalties: bool
    tables: RowTables
    holds_stops: bool

    @classmethod
    def of(cls, admission: RowAdmission, vocab_size: int, shared: SharedTables) -> RowSteps:
        """The steps of the request that got a row."""
        sampling, tables = admission.sampling, shared.of(admission.lists)
        return cls(
            greedy=sampling.is_greedy,
            logprobs=sampling.logprobs,
            reports_logits=sampling.return_generation_logits,
            top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
            top_p=sampling.top_p < 1.0,
            min_p=sampling.min_p > 0.0,
            repetition=sampling.repetition_penalty != 1.0,
            output_penalties=sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0,
            tables=tables,
            holds_stops=tables.stop_ids is not None and sampling.min_tokens > 0,
        )

    @property
    def penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return self.repetition or self.output_penalties

    @property
    def is_timed(self) -> bool:
        """Whether the row has steps that depend on how long its output is, and change nothing in most rounds."""
        return self.holds_stops or self.tables.thinking is not None

    @property
    def own_tables(self) -> bool:
        """Whether a step works on this row alone, with its tables."""
        return self.is_timed or self.tables.bias is not None or self.tables.bad_words is not None


@dataclass(frozen=True)
class TokenMasks:
    """What R rows may take at P positions each.

    Attributes:
        places: [R, P] int32 on the device: of each position the line of `bits` that it has, or -1 where any token may
            be taken.
        bits: [n, W] int32 on the device: token t may be taken where bit t % 32 of word t // 32 is set; 32 * W is at
            least the vocabulary's size.
    """

    places: Tensor
    bits: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [R, P, V] float32 with -inf where a token may not be taken: a new tensor."""
        return operations_of(logits.device.type).mask_tokens(logits, self.places, self.bits)

    def picked(self, columns: Tensor) -> TokenMasks:
        """Keep the positions `columns` [R, n] int64 of each row."""
        return TokenMasks(self.places.gather(1, columns), self.bits)
