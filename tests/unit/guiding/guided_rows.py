"""What tests of guides share: the shipped tokenizer's numbers, an empty plan, and what a matcher allows."""

from __future__ import annotations

import numpy as np
import torch
from llguidance import LLMatcher

from trtrun import SamplingParams
from trtrun.core.guide import Guide
from trtrun.core.nouns import RoundPlan

VOCABULARY, EOS = 4096, 0
_NONE = np.zeros(0, dtype=np.int32)
PLAN = RoundPlan(0, (), (), np.zeros((0, 3), dtype=np.int32), (), _NONE, _NONE, _NONE, max_context=1)


def guide_of(value: object) -> Guide:
    guide = SamplingParams(guided=value).guided  # type: ignore[arg-type]
    assert guide is not None
    return guide


def allowed(matcher: LLMatcher) -> list[int]:
    """The tokens that may come next."""
    bits = torch.zeros((1, VOCABULARY // 32), dtype=torch.int32)
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), VOCABULARY // 8)
    return tokens_of(bits[0])


def tokens_of(bits: torch.Tensor) -> list[int]:
    return ((bits.unsqueeze(1) >> torch.arange(32)) & 1).flatten().nonzero().flatten().tolist()
