"""What requests of the OpenAI API ask for, once they are read, and the prompts that are made of that: chats go through
the template, others are encoded or cut if a request says so.

Other prompts go on as they are: the frontend encodes them together with those of other requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from launch.serve.admission.limits import check_text
from launch.serve.admission.refusals import Kind, Refusal, wrap_errors
from launch.serve.api.openai.output.parsing import Parsing
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import Rendering, encode_text
from trtrun.chats.chat_template import ChatTemplate
from trtrun.chats.tools import Choice, ToolUse
from trtrun.core.sampling_params import MOST_TOKENS, SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.tokens.text import Tokenizer


class CallItem(NamedTuple):
    """What the call of a tool comes back as in /v1/responses.

    Attributes:
        kind: function, custom, tool_search or local_shell.
        name: of the tool, within its namespace.
        namespace: None for none.
    """

    kind: str
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class Answering:
    """How a request wants its answer.

    Attributes:
        sampling: of all its choices.
        stream: piece by piece.
        include_usage: a last piece says what the request took.
        continuous_usage: and each piece says what it took so far.
        obfuscates: pieces hide by their length how long their text is.
        return_token_ids: choices have their tokens beside their text.
        return_token_origins: choices say how each token came.
        return_token_texts: and what each token's part of the text is.
        tokens_as_ids: log probabilities name tokens by their ids.
        request_id: that the answer's own ends with; None for a new one.
        echo: choices begin with their prompt.
        prompt_logprobs: alternatives of each token of the prompt, in the field of that name; None for no such field.
        parsing: how a chat's texts are read.
        echoed: what a response or a message says of its request, each field as JSON.
        call_items: what calls come back as in a response, by the tool's name; of others a function's call.
    """

    sampling: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_token_origins: bool = False
    return_token_texts: bool = False
    continuous_usage: bool = False
    obfuscates: bool = False
    tokens_as_ids: bool = False
    request_id: str | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    parsing: Parsing = field(default_factory=Parsing)
    echoed: Mapping[str, str] = field(default_factory=dict)
    call_items: Mapping[str, CallItem] = field(default_factory=dict)

    def with_draft(self, token_ids: Sequence[int]) -> Answering:
        """Return it with a draft for its choices, if it has none of its own and may have one."""
        sampling = self.sampling
        if not token_ids or sampling.draft_token_ids or sampling.draft_len == 0:
            return self
        return replace(self, sampling=replace(sampling, draft_token_ids=tuple(token_ids)))

    @property
    def shows_tokens(self) -> bool:
        """Whether a piece without text says something all the same."""
        return self.return_token_ids or self.return_token_origins or self.return_token_texts


@dataclass(frozen=True)
class Encoding:
    """How a text becomes tokens, and how many of a prompt are kept.

    Attributes:
        adds_special_tokens: whether those are added that the tokenizer adds.
        most_tokens: that are kept; -1 for as many as there is room for, None for all.
        keeps_end: whether the last ones are.
    """

    adds_special_tokens: bool
    most_tokens: int | None = None
    keeps_end: bool = True

    @property
    def is_needed(self) -> bool:
        """Whether the prompts of a completion do not go on as they are."""
        return self.most_tokens is not None or not self.adds_special_tokens


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions."""

    prompts: Sequence[Prompt]
    encoding: Encoding
    answering: Answering


@dataclass(frozen=True)
class ChatCall:
    """A request to /v1/chat/completions.

    Attributes:
        messages: each has `role`, `content` as text, and perhaps `name`, what the assistant thought and called, and
            which call a tool answers.
        prediction: a draft for the answer; empty where there is none.
        rendering, encoding, answering: how it becomes a prompt, and what is wanted of the answer.
        tools: that may be called; None where there are none.
        tells_thoughts, parts_thoughts: what is thought is told, and told apart from text.
        stops_in_thoughts: stop strings count in what is thought, too.
        thinking_budget: most tokens of it, where the model's thoughts can be told; else it means nothing.
    """

    messages: Sequence[Mapping[str, Any]]
    prediction: str
    rendering: Rendering
    encoding: Encoding
    answering: Answering
    tools: ToolUse | None = None
    tells_thoughts: bool = True
    parts_thoughts: bool = True
    stops_in_thoughts: bool = False
    thinking_budget: int | None = None


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
