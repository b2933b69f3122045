"""What the host knows of a row's sampling: which steps it takes, and the tables of its own that some of them use.

Made once, when a request gets its row, so that choosing tokens later never asks the device which path to take. This
module knows no logits and no randomness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trtrun.core import RowAdmission
from trtrun.sampling.penalties import bad_word_table
from trtrun.tensors import device_integers


@dataclass(frozen=True)
class RowSteps:
    """The steps from one row's logits to its token.

    Attributes:
        greedy: whether the row takes the most likely token.
        logprobs: alternatives to report, or None.
        top_k: 0 where it would keep the whole vocabulary.
        top_p, min_p, repetition, output_penalties: whether the row has it.
        bias: token ids [b] int64 and values [b] float32.
        stop_ids: [b] int64, where min_tokens masks them.
        bad_words: prefixes [b, m] int64 and last tokens [b] int64, as penalties.bad_word_table makes them.
    """

    greedy: bool
    logprobs: int | None
    top_k: int
    top_p: bool
    min_p: bool
    repetition: bool
    output_penalties: bool
    bias: tuple[Tensor, Tensor] | None
    stop_ids: Tensor | None
    bad_words: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, admission: RowAdmission, vocab_size: int, device: torch.device) -> RowSteps:
        """The steps of the request that got a row; its token ids outside [0, vocab_size) are left out."""
        sampling = admission.sampling
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        stops = sorted({token for token in admission.stop_ids if 0 <= token < vocab_size})
        prefixes, last_tokens = bad_word_table(admission.bad_word_ids, vocab_size)
        bad_words = (device_integers(prefixes, device), device_integers(last_tokens, device)) if last_tokens else None
        return cls(
            greedy=sampling.is_greedy,
            logprobs=sampling.logprobs,
            top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
            top_p=sampling.top_p < 1.0,
            min_p=sampling.min_p > 0.0,
            repetition=sampling.repetition_penalty != 1.0,
            output_penalties=sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0,
            bias=_bias_tables(bias, device) if bias else None,
            stop_ids=device_integers(stops, device) if stops and sampling.min_tokens > 0 else None,
            bad_words=bad_words,
        )

    @property
    def penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return self.repetition or self.output_penalties

    @property
    def own_tables(self) -> bool:
        """Whether a step works on this row alone, with the row's own tables."""
        return self.bias is not None or self.stop_ids is not None or self.bad_words is not None


def _bias_tables(bias: Mapping[int, float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and values of a bias."""
    values = torch.tensor(list(bias.values()), dtype=torch.float32)
    return device_integers(list(bias), device), values.to(device, non_blocking=True)
