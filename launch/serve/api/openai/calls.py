"""What requests of the OpenAI API ask for, once they are read: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from launch.serve.api.openai.output.parsing import Parsing
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import Rendering
from trtrun.chats.tools import ToolUse
from trtrun.core.sampling_params import SamplingParams


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
