"""What /tokenize and /detokenize answer, in vLLM's fields: the tokens that a text or a chat becomes, and the text of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal, wrap_errors
from launch.serve.api.openai.calls import PromptMaker
from launch.serve.api.openai.types import ModelNames, read_chat, read_completion, unknown_model
from trtrun.api.prompts import PromptReader
from trtrun.core.values import read_flag, read_token_ids, show_value
from trtrun.errors import InvalidRequestError, nearest
from trtrun.tokens.text import Tokenizer

_NAMES = ("model", "tokens")


def tokenize(
    values: object,
    names: ModelNames,
    tokenizer: Tokenizer | None,
    prompts: PromptMaker,
    most_tokens: int,
) -> dict[str, Any]:
    """The tokens of a text, or of a chat by its template, as completions and chats would have them.

    Args:
        values: the body: `prompt` or `messages`, `return_token_strs`, and fields of completions or chats.
        names: that clients may call the model.
        tokenizer: None where there is none.
        prompts: makes the tokens.
        most_tokens: that a prompt has room for.

    Raises:
        Refusal: it is wrong, or cannot become tokens.
    """
    if not isinstance(values, dict):
        raise Refusal(Kind.INVALID, f"the body must be a JSON object, not {show_value(values)}")
    given = {name: value for name, value in values.items() if name != "return_token_strs"}
    with wrap_errors():
        names_tokens = read_flag("return_token_strs", values.get("return_token_strs") or False)
    tokens: Sequence[int]
    if given.get("messages") is not None:
        tokens, _ = prompts.of_chat(read_chat(given, *names), most_tokens)
    else:
        if not isinstance(given.get("prompt"), str):
            raise Refusal(Kind.INVALID, "prompt must be a text; give that, or messages", "prompt")
        call = read_completion(given, *names)
        with wrap_errors():
            tokens = prompts.of_text(given["prompt"], call.encoding, most_tokens)
    told: dict[str, Any] = {"count": len(tokens), "tokens": list(tokens), "token_strs": None}
    if names_tokens and tokenizer is not None:
        spelled = {token: name for name, token in tokenizer.vocabulary().items()}
        told["token_strs"] = [spelled.get(token, "") for token in tokens]
    return told


def detokenize(values: object, names: ModelNames, tokenizer: Tokenizer | None, reader: PromptReader) -> dict[str, Any]:
    """The text of tokens, special ones as they are written.

    Args:
        values: the body: `tokens`.
        names: that clients may call the model.
        tokenizer: None where there is none.
        reader: knows which tokens the model has.

    Raises:
        Refusal: it is wrong.
    """
    if not isinstance(values, dict):
        raise Refusal(Kind.INVALID, f"the body must be a JSON object, not {show_value(values)}")
    for name in values:
        if name not in _NAMES:
            raise Refusal(
                Kind.INVALID, f"unknown field {show_value(name)}{nearest(name, _NAMES)}", code="unknown_field"
            )
    if values.get("model") not in (None, names.model, *names.adapters):
        raise unknown_model(values["model"], names.model, names.adapters)
    if tokenizer is None:
        raise Refusal(Kind.INVALID, "the target has no tokenizer: its tokens have no text")
    try:
        tokens = read_token_ids("tokens", values.get("tokens"))
        if tokens:
            reader.encode(tokens)
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error), "tokens") from None
    return {"prompt": tokenizer.decode(list(tokens), skip_special_tokens=False)}
