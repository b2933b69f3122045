"""Prompts of the OpenAI API's requests: chats go through the template, others are encoded or cut if a request says so;
and what /tokenize and /detokenize answer, in vLLM's fields.

Other prompts go on as they are: the frontend encodes them together with those of other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.serve.admission.limits import check_text
from launch.serve.admission.refusals import Kind, Refusal, wrap_errors
from launch.serve.api.openai.calls import ChatCall, CompletionCall, Encoding
from launch.serve.api.openai.types import ModelNames, read_chat, read_completion, unknown_model
from trtrun.api.prompts import Prompt, PromptReader
from trtrun.chats.chat import encode_text
from trtrun.chats.chat_template import ChatTemplate
from trtrun.chats.tools import Choice, ToolUse
from trtrun.core.sampling_params import MOST_TOKENS
from trtrun.core.values import read_flag, read_token_ids, show_value
from trtrun.errors import InvalidRequestError, nearest
from trtrun.tokens.text import Tokenizer

Tokens = tuple[int, ...]


class PromptMaker:
    """Makes the prompts of requests."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        *,
        refuses_unseen_tools: bool = True,
    ) -> None:
        """Make them.

        Args:
            model_name: what clients call the model.
            tokenizer, template: of it; None where it has none.
            refuses_unseen_tools: tools that the template does not show are refused, unless one has to be called, which
                the answer is guided to, or none may be.
        """
        self._refuses_unseen_tools = refuses_unseen_tools
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._template = template

    def of_completion(self, call: CompletionCall, most_tokens: int) -> Sequence[Prompt]:
        """The prompts of a completion.

        Args:
            call: that asks for it.
            most_tokens: that a prompt has room for.

        Raises:
            Refusal: a text cannot become tokens.
        """
        encoding = call.encoding
        if not encoding.is_needed:
            return call.prompts
        with wrap_errors():
            return [
                _cut(
                    self._encode(prompt, encoding) if isinstance(prompt, str) else tuple(prompt), encoding, most_tokens
                )
                for prompt in call.prompts
            ]

    def of_text(self, text: str, encoding: Encoding, most_tokens: int) -> Tokens:
        """The tokens of a text, none where it is empty.

        Raises:
            InvalidRequestError: it cannot become tokens.
        """
        return _cut(self._encode(text, encoding), encoding, most_tokens)

    def of_chat(self, call: ChatCall, most_tokens: int) -> tuple[Tokens, Tokens]:
        """The tokens of a conversation, and of the draft that came with it; `most_tokens` is as of `of_completion`.

        Raises:
            Refusal: there is no template, or it cannot use the messages.
        """
        if self._template is None or self._tokenizer is None:
            raise Refusal(
                Kind.INVALID,
                f"the model {self._model_name!r} has no chat template: use /v1/completions, or add "
                "chat_template.jinja to its tokenizer's directory",
                code="no_chat_template",
            )
        self._check_tools(call.tools, self._template)
        asked = call.rendering
        with wrap_errors():
            text = self._template.render(
                call.messages,
                asked.add_generation_prompt,
                asked.continue_final_message,
                asked.documents,
                asked.values_for(self._template),
                tools=None if call.tools is None else call.tools.shown,
            )
            if call.encoding.most_tokens is None:
                check_text(text, self._tokenizer, most_tokens)
            prompt = self._encode(text, call.encoding)
            # In the words of what stands before: a first word may have another token of its own.
            joined = self._encode(text + call.prediction, call.encoding) if call.prediction else ()
        draft = joined[len(prompt) :] if joined[: len(prompt)] == prompt else ()
        # No longer than a text can become, or than parameters may be.
        return _cut(prompt, call.encoding, most_tokens), draft[: min(most_tokens, MOST_TOKENS)]

    def _check_tools(self, tools: ToolUse | None, template: ChatTemplate) -> None:
        """Refuse tools that nobody would see."""
        if tools is None or tools.choice is not Choice.AUTO or not self._refuses_unseen_tools or template.shows_tools:
            return
        raise Refusal(
            Kind.INVALID,
            "tools: the model's chat template shows no tools, so the model would not see them: leave them out, have "
            "one called by tool_choice, or start the server with server.tools_unseen: ignore",
            "tools",
            "unseen_tools",
        )

    def _encode(self, text: str, encoding: Encoding) -> Tokens:
        """All tokens of a text."""
        if self._tokenizer is None:
            raise InvalidRequestError("the target has no tokenizer: give token ids instead of text")
        return encode_text(self._tokenizer, text, encoding.adds_special_tokens)


def _cut(tokens: Tokens, encoding: Encoding, most_tokens: int) -> Tokens:
    most = most_tokens if encoding.most_tokens == -1 else encoding.most_tokens
    if most is None or len(tokens) <= most:
        return tokens
    return tokens[-most:] if encoding.keeps_end else tokens[:most]


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
