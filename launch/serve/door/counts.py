"""How many prompts and words one request may bring, whatever its protocol.

It knows sampling parameters. It does not know what prompts are.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from launch.serve.door.refusals import Kind, Refusal
from launch.serve.door.word_limits import check_all_prompts
from trtrun.core.sampling_params import SamplingParams
from trtrun.tokens.text import Tokenizer

MOST_PROMPTS = 1024
"""Of one request."""


def check_counts(prompts: Sized, sampling: Sequence[SamplingParams]) -> None:
    """Hold a request to the limits.

    Args:
        prompts: of the request.
        sampling: of each prompt; several may have the same object.

    Raises:
        Refusal: there are too many prompts, or their parameters name too much.
    """
    if not 0 < len(prompts) <= MOST_PROMPTS:
        raise Refusal(Kind.INVALID, f"a request has 1 to {MOST_PROMPTS} prompts, not {len(prompts)}", "prompt")
    check_all_prompts(sampling)


def check_text(text: str, tokenizer: Tokenizer | None, most_tokens: int) -> None:
    """Refuse a text of which it is known, before it becomes tokens, that these are too many.

    Args:
        text: of a prompt.
        tokenizer: of the model; None where there is none.
        most_tokens: that a prompt may have.

    Raises:
        Refusal: it is too long.
    """
    most = None if tokenizer is None else tokenizer.most_bytes_of_a_token
    if most is None or len(text) <= most * most_tokens:
        return
    raise Refusal(
        Kind.INVALID,
        f"the prompt has {len(text)} characters, more than the {most_tokens} tokens that there is room for can spell: "
        "shorten it",
        "prompt",
        "context_length_exceeded",
    )


def distinct(sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Each object once: the prompts of a request share theirs."""
    return list({id(parameters): parameters for parameters in sampling}.values())
