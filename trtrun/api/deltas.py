"""What a round gave one completion, as the delta that its caller gets: text, log probabilities, why it ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtrun.core.nouns import FinishReason, TokenLogprobs
from trtrun.core.outputs import GUIDE_ENDED, NONE_ALLOWED, CompletionDelta, Logits, PromptLogprobs, RequestId
from trtrun.scheduling.completions import Completion, RowResult

NOT_FINITE = (
    "the target's logits are not finite (NaN or infinite): the checkpoint may be damaged, or need another dtype"
)

LOST = "lost when another call to the same engine ended with an error"


def make_delta(
    request_id: RequestId,
    index: int,
    result: RowResult,
    logprobs: Sequence[TokenLogprobs] | None,
    vocab_size: int,
    logits: np.ndarray | None = None,
    text: str = "",
) -> CompletionDelta:
    """The delta of one row's result.

    Args:
        request_id, index: of the completion, as the caller knows it.
        result: what the round gave it.
        logprobs: of the row's verdict; None where it asked for none.
        vocab_size: tokens that the target may choose from.
        logits: [tokens, vocab] float32 of the row's verdict; None where it asked for none.
        text: that the round added, from `new_text`.
    """
    completion, gained = result.completion, result.new_token_ids
    reason = completion.finish_reason
    return CompletionDelta(
        request_id,
        index,
        tuple(gained),
        text,
        completion.statistics,
        _asked_logprobs(completion, logprobs, len(gained)) if logprobs is not None else None,
        None if reason is None else str(reason),
        _why_failed(completion, vocab_size) if reason is FinishReason.ERROR else None,
        result.token_origins,
        _prompt_logprobs(completion),
        None if completion.logits is None else completion.logits.take_new(),
        None if logits is None else Logits(logits.shape[1], (logits[: len(gained)].tobytes(),)),
    )


def make_lost_delta(request_id: RequestId, index: int, completion: Completion) -> CompletionDelta:
    """The last delta of a completion that the engine has lost."""
    return CompletionDelta(request_id, index, (), "", completion.statistics, None, str(FinishReason.ERROR), LOST)


def new_text(completion: Completion, gained: Sequence[int]) -> str:
    """The text that a round added. With stop strings the stop rules have made it, token by token."""
    growing = completion.text
    if growing is None:
        return ""
    text = growing.take() if completion.request.sampling.stop else growing.extend(gained)
    return text if completion.finish_reason is None else text + growing.finish()


def _prompt_logprobs(completion: Completion) -> PromptLogprobs | None:
    """Log probabilities of the prompt, once, as soon as it is read."""
    scores = completion.scores
    if scores is None or not scores.is_whole or completion.statistics.first_token is None:
        return None
    completion.scores = None
    return scores.whole()


def _why_failed(completion: Completion, vocab_size: int) -> str:
    """What is known of a row whose text cannot be made, or for which the target had no token: what it lists forbids a
    token each, at most."""
    if completion.text is not None and completion.text.failure is not None:
        return completion.text.failure
    if completion.request.sampling.guided is not None:
        return GUIDE_ENDED
    lists = completion.request.lists
    return NONE_ALLOWED if len(lists.stop_ids) + len(lists.bad_words) >= vocab_size else NOT_FINITE


def _asked_logprobs(
    completion: Completion, logprobs: Sequence[TokenLogprobs], count: int
) -> tuple[TokenLogprobs, ...] | None:
    """Log probabilities with as many alternatives as the request asked for: the verdict is as wide as the widest of its
    rows."""
    wanted = completion.request.sampling.logprobs
    if wanted is None:
        return None
    return tuple(
        TokenLogprobs(entry.token_id, entry.logprob, entry.alternatives[:wanted]) for entry in logprobs[:count]
    )
