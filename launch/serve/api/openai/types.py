"""Requests of the OpenAI API: what their fields mean here.

Which fields there are is the table in `fields`: those with an effect are taken, others passed over, or refused by name;
what nobody here knows is refused with the nearest name. Messages and tools are read by `trtrun.chats`. The rest become
SamplingParams, which checks their values, once they are what clients of several servers mean by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from launch.serve.admission.refusals import Kind, Refusal, wrap_errors
from launch.serve.api.openai.calls import Answering, ChatCall, CompletionCall, Encoding
from launch.serve.api.openai.fields import Endpoint, fields_of
from launch.serve.api.openai.guided import read_guided
from launch.serve.api.openai.taking import read_prediction, read_text, take_fields
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import read_rendering
from trtrun.chats.messages import read_messages
from trtrun.chats.tools import read_tools
from trtrun.core.sampling_params import LARGEST_COUNT, LOGITS_FIELDS, SamplingParams
from trtrun.core.values import read_flag, read_integer, show_value
from trtrun.errors import InvalidRequestError, nearest


class ModelNames(NamedTuple):
    """What clients may ask for: the model, and its adapters; and sampling where they do not say it."""

    model: str
    adapters: Collection[str] = ()
    defaults: Mapping[str, Any] = {}


SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams)) - {
    "logprobs",
    "stop_sequences",
    "guided",
    "stop_in_thoughts",
    "thinking_marks",
    *LOGITS_FIELDS,
}
"""Fields of the API that are SamplingParams' own."""

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say it, as OpenAI has it. A chat then goes on to the end of the context."""

_COUNTS = (
    "n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "logprobs", "top_logprobs", "draft_len",
    "truncate_prompt_tokens", "prompt_logprobs", "thinking_token_budget", "thinking_budget",
)  # fmt: skip
"""Whole numbers. JSON has one kind of numbers, and some clients write 4.0."""

_UNSET: Mapping[str, int] = {"top_k": -1, "seed": -1, "thinking_token_budget": -1, "thinking_budget": -1}
"""What means "none" in other servers."""

_NO_DEFAULTS: Mapping[str, Any] = {}

_MOST_NAMED = 20
"""Adapters that a message names."""

_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


def read_completion(
    values: object, model_name: str, adapters: Collection[str] = (), defaults: Mapping[str, Any] = _NO_DEFAULTS
) -> CompletionCall:
    """What a body of /v1/completions asks for, of a model or one of its adapters; `defaults` is sampling that it does
    not say.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    given = _read_fields(values, Endpoint.COMPLETIONS, model_name, adapters)
    if "prompt" not in given:
        raise _wrong("prompt", "prompt is missing: a text, a list of token ids, or a list of these")
    prompts = _read_prompts(given["prompt"])
    logprobs = given.get("logprobs")
    if logprobs is True:
        raise _wrong("logprobs", "logprobs must be a whole number, not true")
    defaults = {**defaults, "max_tokens": COMPLETION_TOKENS}
    answering = _read_answering(given, None if logprobs is False else logprobs, defaults)
    return CompletionCall(prompts, _read_encoding(given, adds_special_tokens=True), answering)


def read_chat(
    values: object, model_name: str, adapters: Collection[str] = (), defaults: Mapping[str, Any] = _NO_DEFAULTS
) -> ChatCall:
    """What a body of /v1/chat/completions asks for, of a model or one of its adapters; `defaults` is sampling that it
    does not say.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    given = _read_fields(values, Endpoint.CHATS, model_name, adapters)
    if "messages" not in given:
        raise _wrong("messages", 'messages is missing: a list such as [{"role": "user", "content": "…"}]')
    with wrap_errors():
        messages = read_messages(given["messages"])
    if _flag(given, "echo"):
        raise _wrong("echo", "echo is of completions: the prompt of a chat is made of its messages")
    wants, most = _flag(given, "logprobs"), given.get("top_logprobs")
    # 0 asks for nothing; so would false, which is 0 to Python and no number of alternatives.
    if not wants and most is not None and (type(most) is not int or most != 0):
        raise _wrong("top_logprobs", "top_logprobs needs logprobs to be true")
    sent_as = {"logprobs": "top_logprobs"}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
        sent_as["max_tokens"] = "max_completion_tokens"
    if "thinking_budget" in given:
        given["thinking_token_budget"] = given["thinking_budget"]
        sent_as["thinking_token_budget"] = "thinking_budget"
    # A template writes special tokens itself, that of the beginning, too.
    encoding = _read_encoding(given, adds_special_tokens=False)
    logprobs = (0 if most is None else most) if wants else None
    answering = _read_answering(given, logprobs, {"max_tokens": LARGEST_COUNT, **defaults}, sent_as)
    prediction = read_prediction(given.get("prediction"))
    with wrap_errors():
        rendering, tools = read_rendering(given), read_tools(given)
    return ChatCall(
        messages,
        prediction,
        rendering,
        encoding,
        answering,
        tools,
        tells_thoughts=_flag(given, "include_reasoning", True),
        parts_thoughts=_flag(given, "separate_reasoning", True),
        stops_in_thoughts=_flag(given, "stop_in_thoughts"),
    )


def _read_fields(values: object, endpoint: Endpoint, model_name: str, adapters: Collection[str]) -> dict[str, Any]:
    """The fields that have an effect, as SamplingParams has them."""
    given = take_fields(values, fields_of(endpoint), endpoint.value)
    model = given.get("model", model_name)
    if model != model_name:
        if not isinstance(model, str) or model not in adapters:
            raise unknown_model(model, model_name, adapters)
        if given.setdefault("lora_name", model) != model:
            raise _wrong("lora_name", f"model is the adapter {show_value(model)}: leave lora_name out, or give that")
    for name in given.keys() & set(_COUNTS):
        value = given[name]
        if type(value) is float and value.is_integer():
            given[name] = int(value)
        if given[name] == _UNSET.get(name):
            del given[name]
    seed = given.get("seed")
    if type(seed) is int and -(2**63) <= seed < 0:  # OpenAI's seeds are any integers of 64 bits
        given["seed"] = seed % 2**63
    for name in ("max_tokens", "max_completion_tokens"):
        if given.get(name) == -1:
            given[name] = LARGEST_COUNT
    if given.get("top_p") == 0 and given["top_p"] is not False:
        given |= {"top_p": 1.0, "temperature": 0.0}
    if isinstance(given.get("stop"), str | list):
        texts = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        given["stop"] = [text for text in texts if text != ""]
    return given


def unknown_model(model: object, model_name: str, adapters: Collection[str]) -> Refusal:
    """What is told whoever asks for a model that there is not."""
    known = ", ".join(map(show_value, [model_name, *list(adapters)[:_MOST_NAMED]]))
    line = f"there is no model {show_value(model)}: this server has {known}"
    return Refusal(Kind.UNKNOWN_MODEL, line, "model", "model_not_found")


def _read_answering(
    given: Mapping[str, Any],
    logprobs: object,
    defaults: Mapping[str, Any],
    sent_as: Mapping[str, str] | None = None,
) -> Answering:
    """How a request wants its answer; `defaults` is sampling that it does not say, and `sent_as` has fields' own names,
    by those that SamplingParams has for them."""
    stream = _flag(given, "stream")
    options = _read_stream_options(given, stream)
    # OpenAI's defaults, where trtrun's are greedy.
    sampling: dict[str, object] = {"temperature": 1.0, **defaults, "logprobs": logprobs}
    sampling |= {name: given[name] for name in SAMPLING_FIELDS & given.keys()}
    asked = read_guided(given)
    if asked is not None:
        sampling["guided"] = asked.guided()
    echo = _flag(given, "echo")
    if echo and sampling["max_tokens"] == 0:
        sampling.setdefault("prompt_logprobs", 0)  # the prompt is read, and that is all
    try:
        parameters = SamplingParams.from_mapping(sampling)
    except InvalidRequestError as error:
        line = str(error)
        if asked is not None and line.startswith("guided"):
            raise _wrong(asked.field, asked.in_its_words(line)) from None
        raise _wrong_sampling(line, sent_as or {}) from None
    if stream and given.get("prompt_logprobs") is not None:
        raise _wrong(
            "prompt_logprobs", "prompt_logprobs is not in streams: leave stream out, or take echo and logprobs"
        )
    if echo and parameters.logprobs is not None:
        most = max(parameters.logprobs, parameters.prompt_logprobs or 0)
        parameters = replace(parameters, prompt_logprobs=most)
    request_id = given.get("request_id")
    if request_id is not None:
        if not isinstance(request_id, str) or not request_id.isascii() or not request_id.isprintable():
            raise _wrong(
                "request_id", f"request_id must be a text of printable ASCII characters, not {show_value(request_id)}"
            )
        if len(request_id) > 128:
            raise _wrong("request_id", f"request_id has {len(request_id)} characters; 128 are the most")
    return Answering(
        parameters,
        stream,
        include_usage=options["include_usage"],
        continuous_usage=options["include_usage"] and options["continuous_usage_stats"],
        obfuscates=options["include_obfuscation"],
        return_token_ids=_flag(given, "return_token_ids"),
        return_token_origins=_flag(given, "return_token_origins"),
        return_token_texts=_flag(given, "return_token_texts"),
        tokens_as_ids=_flag(given, "return_tokens_as_token_ids"),
        request_id=request_id or None,
        echo=echo,
        prompt_logprobs=given.get("prompt_logprobs"),
    )


def _read_stream_options(given: Mapping[str, Any], stream: bool) -> dict[str, bool]:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", f"stream_options must be an object, not {show_value(options)}")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS and value is not None:
            raise _wrong(
                "stream_options",
                f"unknown field {show_value(name)} of stream_options{nearest(name, _STREAM_OPTIONS)}",
                "unknown_field",
            )
    told = {name: _flag(options, name) for name in _STREAM_OPTIONS}
    if any(told.values()) and not stream:
        raise _wrong("stream_options", "stream_options needs stream to be true")
    return told


def _read_encoding(given: Mapping[str, Any], adds_special_tokens: bool) -> Encoding:
    most, side = given.get("truncate_prompt_tokens"), given.get("truncation_side", "left")
    if most is not None:
        try:
            most = read_integer("truncate_prompt_tokens", most)
        except InvalidRequestError as error:
            raise _wrong("truncate_prompt_tokens", str(error)) from None
        if most < 1 and most != -1:
            raise _wrong("truncate_prompt_tokens", f"truncate_prompt_tokens must be 1 or more, or -1, not {most}")
    if side not in ("left", "right"):
        raise _wrong("truncation_side", f"truncation_side must be left or right, not {show_value(side)}")
    return Encoding(_flag(given, "add_special_tokens", adds_special_tokens), most, keeps_end=side == "left")


def _read_prompts(value: object) -> list[Prompt]:
    """A text, token ids, or a list of texts and lists of token ids."""
    if isinstance(value, str):
        return [read_text("prompt", "prompt", value)]
    if not isinstance(value, list) or not value:
        raise _wrong(
            "prompt", f"prompt must be a text, a list of token ids, or a list of these, not {show_value(value)}"
        )
    if type(value[0]) is int:
        return [_read_tokens(value)]
    return [read_text("prompt", "prompt", item) if isinstance(item, str) else _read_tokens(item) for item in value]


def _read_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise _wrong(
            "prompt", f"prompt must be a text, a list of token ids, or a list of these, not {show_value(value)}"
        )
    return tuple(value)


def _flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = values.get(name)
    try:
        return default if value is None else read_flag(name, value)
    except InvalidRequestError as error:
        raise _wrong(name, str(error)) from None


def _wrong_sampling(line: str, sent_as: Mapping[str, str]) -> Refusal:
    """A message about sampling parameters, with the names that the client has sent them under."""
    name = line.split(maxsplit=1)[0].rstrip(":")
    field = sent_as.get(name, name if name in SAMPLING_FIELDS or name == "logprobs" else None)
    for meant, sent in sent_as.items():
        line = re.sub(rf"^{meant}\b|(?<=, more than ){meant}\b", sent, line)
    return _wrong(field, line)


def _wrong(name: str | None, line: str, code: str | None = None) -> Refusal:
    return Refusal(Kind.INVALID, line, name, code)
