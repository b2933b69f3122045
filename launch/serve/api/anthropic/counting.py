"""How many tokens a request to /v1/messages would read: what /v1/messages/count_tokens answers.

It knows JSON values and the chat template. It does not know HTTP or engines.
"""

from __future__ import annotations

from launch.serve.admission.refusals import Refusal
from launch.serve.api.anthropic.requests import in_words_of_messages, read_message
from launch.serve.api.openai.prompts import PromptMaker
from launch.serve.api.openai.types import ModelNames


def count_tokens(values: object, names: ModelNames, prompts: PromptMaker, most_tokens: int) -> dict[str, int]:
    """The number of a conversation's tokens, by the model's template.

    Args:
        values: the body: that of a message, whose `max_tokens` may be left out.
        names: that clients may call the model.
        prompts: makes the tokens.
        most_tokens: that a prompt has room for.

    Raises:
        Refusal: it is wrong, or cannot become tokens.
    """
    call = read_message(values, *names, is_counted=True)
    try:
        tokens, _ = prompts.of_chat(call, most_tokens)
    except Refusal as refusal:
        raise in_words_of_messages(refusal) from None
    return {"input_tokens": len(tokens)}
