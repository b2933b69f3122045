"""How many words a request may bring: strings that stop it, words that must not come, words with a bias.

All of them are gone through when a request comes, and some become tokens, while others wait. One list is held to what
`trtrun.core.values` says; a request has one for each of its prompts. It knows how many there may be, and not what they
are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from launch.serve.door.refusals import Kind, Refusal
from trtrun.core import values
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError

MOST_OF_ALL_PROMPTS = 1 << 20
"""Of one request, over its prompts: characters of words, and tokens that parameters name. Each prompt goes to the
engine with its own."""


def check_words(name: str, words: Sequence[Sized], unit: str = "characters") -> None:
    """Hold a list to the limits, which are those of `trtrun.core.values.check_words`.

    Args:
        name: of the field or input, for the message.
        words: texts, or token ids of each.
        unit: what words are made of, for the message.

    Raises:
        Refusal: there are too many, or they are too long.
    """
    try:
        values.check_words(name, words, unit)
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error), name) from None


def check_all_prompts(sampling: Iterable[SamplingParams]) -> None:
    """Hold what the parameters of all prompts name to MOST_OF_ALL_PROMPTS.

    Args:
        sampling: of each prompt; several may have the same object.

    Raises:
        Refusal: it is more.
    """
    lengths: dict[int, int] = {}
    total = 0
    for parameters in sampling:
        length = lengths.get(id(parameters))
        if length is None:
            length = lengths[id(parameters)] = named_length(parameters)
        total += length
    if total > MOST_OF_ALL_PROMPTS:
        raise Refusal(
            Kind.INVALID,
            f"stop, stop_sequences, bad_words, logit_bias, stop_token_ids and draft_token_ids hold {total} characters "
            f"and tokens over all prompts; {MOST_OF_ALL_PROMPTS} are the most: send fewer prompts in a request",
        )


def named_length(sampling: SamplingParams) -> int:
    """Characters of the words, and tokens, that parameters name."""
    words = (*sampling.stop, *sampling.stop_sequences, *sampling.bad_words)
    tokens = (sampling.logit_bias, sampling.stop_token_ids, sampling.draft_token_ids)
    return sum(map(len, words)) + sum(map(len, tokens))
