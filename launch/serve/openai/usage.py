"""What a request took, and what speculation did for it, as clients and benchmarks of the OpenAI API read that.

It knows counts, and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.serve.front.front import Usage
from trtrun.core.request_statistics import RequestStatistics


def tell_usage(usage: Usage, draft_len: int) -> dict[str, Any]:
    """What a request took, and what speculation did for it, as aiperf reads that."""
    cached = {"prompt_tokens_details": {"cached_tokens": usage.num_cached_prompt_tokens}}
    told: dict[str, Any] = {"usage": tell_tokens(usage) | cached}
    if draft_len:
        told["metrics"] = {"speculative_decoding": _speculation(list(usage.statistics.values()), draft_len)}
    return told


def tell_tokens(usage: Usage) -> dict[str, Any]:
    """Tokens of prompts and completions, so far."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _speculation(statistics: Sequence[RequestStatistics], draft_len: int) -> dict[str, Any]:
    """Sums over all choices, of the rounds that verified a draft: so read aiperf and vLLM's dashboards them.

    Args:
        statistics: of each choice.
        draft_len: tokens drafted in a round, at most.
    """
    histogram = [0] * (draft_len + 1)
    for of_choice in statistics:
        for accepted, number in enumerate(of_choice.acceptance_histogram):
            histogram[accepted] += number
    drafts = sum(of_choice.num_drafts for of_choice in statistics)
    histogram[0] -= sum(of_choice.num_rounds for of_choice in statistics) - drafts  # those without one kept none
    drafted = sum(of_choice.num_draft_tokens for of_choice in statistics)
    accepted = sum(of_choice.num_accepted_draft_tokens for of_choice in statistics)
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": draft_len,
        "mean_acceptance_length": round(1 + accepted / drafts, 4) if drafts else 0.0,
        "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
    }
