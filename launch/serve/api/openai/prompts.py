"""Prompts of the OpenAI API's requests: chats go through the template, others are encoded or cut if they ask it.

Other prompts go on as they are: the front makes tokens of texts, together with those of other requests. It knows
templates and tokenizers, and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.serve.admission.limits import check_text
from launch.serve.admission.refusals import Kind, Refusal, refusing
from launch.serve.api.openai.calls import ChatCall, CompletionCall, Encoding
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import encode_text
from trtrun.chats.chat_template import ChatTemplate
from trtrun.chats.tools import Choice, ToolUse
from trtrun.core.sampling_params import MOST_TOKENS
from trtrun.errors import InvalidRequestError
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
        with refusing():
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
        with refusing():
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
