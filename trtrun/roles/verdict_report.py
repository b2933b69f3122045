"""A verdict from the device to the host, as the report of the target leader: the one copy of a round.

It knows the verdict's tensors and the report's layout. It does not know who reads it.
"""

from __future__ import annotations

import numpy as np
import torch

from trtrun.core import RoundPlan, Verdict
from trtrun.wire.reports import ReportArrays, RoundTimes


def read_verdict(plan: RoundPlan, verdict: Verdict | None) -> ReportArrays:
    """Wait for the verdict and make the report of it, without times.

    Counts, lengths, tokens and the bits of their logits travel in one tensor. A row with a logit that is not finite
    gains no token: looking for that here costs the device nothing.

    Args:
        plan: the round's.
        verdict: the leader's own; None where the round samples nothing.
    """
    if verdict is None:
        tokens = np.empty((0, 1), dtype=np.int64)
        return ReportArrays(plan.round_index, RoundTimes(), tokens[:, 0], tokens[:, 0], tokens)
    assert verdict.draft_lens is not None and verdict.chosen_logits is not None  # the leader's own
    bits = verdict.chosen_logits.view(torch.int32).to(torch.int64)
    columns = (verdict.num_tokens.unsqueeze(1), verdict.draft_lens.unsqueeze(1), verdict.tokens, bits)
    packed = torch.cat(columns, dim=1).cpu().numpy()
    width = verdict.tokens.shape[1]
    num_tokens, tokens = packed[:, 0], packed[:, 2 : 2 + width]
    chosen = np.isfinite(packed[:, 2 + width :].astype(np.int32).view(np.float32))
    if not chosen.all():
        num_tokens = np.where((chosen | (tokens < 0)).all(axis=1), num_tokens, 0)
    report = (plan.round_index, RoundTimes(), num_tokens, np.maximum(packed[:, 1], 0), tokens)
    if verdict.logprobs is None:
        return ReportArrays(*report)
    return ReportArrays(*report, verdict.logprobs.token_ids.cpu().numpy(), verdict.logprobs.values.cpu().numpy())
