"""What clients of several servers mean by the fields that they send."""

from __future__ import annotations

from typing import Any

import pytest

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.calls import Encoding
from launch.serve.api.openai.types import COMPLETION_TOKENS, read_chat, read_completion
from trtrun.chats.chat import Rendering
from trtrun.core.sampling_params import LARGEST_COUNT, SamplingParams


def completion_of(**fields: Any) -> Any:
    return read_completion({"prompt": "x", **fields}, "m")


def chat_of(*messages: dict[str, Any], **fields: Any) -> Any:
    return read_chat({"messages": list(messages) or [{"role": "user", "content": "x"}], **fields}, "m")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"top_k": -1}, {}),
        ({"top_k": 40.0, "n": 2.0, "min_tokens": 1.0}, {"top_k": 40, "n": 2, "min_tokens": 1}),
        ({"seed": -1}, {}),
        ({"seed": -2}, {"seed": 2**63 - 2}),
        ({"seed": -(2**63)}, {"seed": 0}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"max_tokens": -1}, {"max_tokens": LARGEST_COUNT}),
        ({"max_tokens": 4.0}, {"max_tokens": 4}),
        ({"stop": ""}, {}),
        ({"stop": [""]}, {}),
        ({"stop": ["", "a"]}, {"stop": ("a",)}),
        ({"top_p": 0}, {"temperature": 0.0}),
        ({"top_p": 0.0, "temperature": 0.7}, {"temperature": 0.0}),
        ({"logprobs": False}, {}),
        ({"logprobs": 2.0}, {"logprobs": 2}),
        ({"temperature": None, "guided_json": None, "reasoning": None, "use_beam_search": False}, {}),
        ({"model": "m"}, {}),
    ],
)
def test_a_completion_has_what_its_client_means(given: dict[str, Any], meant: dict[str, Any]) -> None:
    defaults = {"temperature": 1.0, "max_tokens": COMPLETION_TOKENS}
    assert completion_of(**given).answering.sampling == SamplingParams(**(defaults | meant))


@pytest.mark.parametrize("fields", [{"model": "a"}, {"lora_name": "a"}, {"model": "a", "lora_name": "a"}])
def test_an_adapter_is_named_as_a_model_or_beside_it(fields: dict[str, Any]) -> None:
    call = read_completion({"prompt": "x", **fields}, "m", ["a", "b"])
    assert call.answering.sampling.lora_name == "a"


def test_models_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(Refusal, match='there is no model "c": this server has "m", "a"') as caught:
        read_completion({"prompt": "x", "model": "c"}, "m", ["a"])
    assert caught.value.kind is Kind.UNKNOWN_MODEL and caught.value.code == "model_not_found"
    with pytest.raises(Refusal, match='model is the adapter "a": leave lora_name out'):
        read_completion({"prompt": "x", "model": "a", "lora_name": "b"}, "m", ["a", "b"])


def test_the_newer_name_goes_first_and_no_logprobs_are_none() -> None:
    sampling = chat_of(max_tokens=5, max_completion_tokens=7, logprobs=False, top_logprobs=0).answering.sampling
    assert sampling.max_tokens == 7 and sampling.logprobs is None
    assert chat_of(max_completion_tokens=-1).answering.sampling.max_tokens == LARGEST_COUNT
    assert chat_of(logprobs=True, top_logprobs=3.0).answering.sampling.logprobs == 3


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs must be between 0 and 20, not 25"),
        ({"logprobs": True, "top_logprobs": ""}, 'top_logprobs must be a whole number, not ""'),
        ({"logprobs": True, "top_logprobs": []}, "top_logprobs must be a whole number, not []"),
        ({"logprobs": True, "top_logprobs": False}, "top_logprobs must be a whole number, not false"),
        *(({"top_logprobs": most}, "top_logprobs needs logprobs to be true") for most in ("", [], False, 3)),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1, not 0"),
        ({"max_completion_tokens": "max_tokens"}, 'max_completion_tokens must be a whole number, not "max_tokens"'),
        (
            {"max_completion_tokens": 3, "max_tokens": 9, "min_tokens": 5},
            "min_tokens is 5, more than max_completion_tokens, 3",
        ),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ],
)
def test_errors_name_the_field_that_was_sent(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(Refusal) as caught:
        chat_of(**fields)
    assert str(caught.value) == line and caught.value.field == line.split()[0]


def test_how_texts_become_tokens_is_read() -> None:
    assert completion_of().encoding == Encoding(True)
    assert chat_of().encoding == Encoding(False)
    given = {"add_special_tokens": False, "truncate_prompt_tokens": 3.0, "truncation_side": "right"}
    assert completion_of(**given).encoding == Encoding(False, 3, keeps_end=False)
    assert chat_of(add_special_tokens=True, truncate_prompt_tokens=-1).encoding == Encoding(True, -1)


def test_what_a_template_is_given_is_read() -> None:
    assert chat_of().rendering == Rendering()
    assert chat_of(continue_final_message=True).rendering == Rendering(False, True)
    assert chat_of(add_generation_prompt=False).rendering == Rendering(False)
    given = {
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"text": "x"}],
        "reasoning_effort": "low",
    }
    assert chat_of(**given).rendering == Rendering(True, False, [{"text": "x"}], "low", {"enable_thinking": False})


def test_answers_are_taken_back_as_they_came() -> None:
    answer = {
        "role": "assistant", "content": "4", "refusal": None, "annotations": [], "tool_calls": [], "audio": None,
        "reasoning_content": "2 + 2",
    }  # fmt: skip
    read = chat_of(answer, {"role": "assistant", "content": None, "reasoning": "so"}).messages
    assert read == [
        {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},
        {"role": "assistant", "content": "", "reasoning": "so"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user", "content": "x", "reasoning_content": "y"},
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
        {"role": "assistant", "content": "x", "reasoning_content": 5},
        {"role": "assistant", "content": "x", "reasoning_content": "\ud800"},
        {"role": "assistant", "content": "x", "thougths": "y"},
    ],
)
def test_messages_that_say_what_is_not_read_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"messages\[0\]"):
        chat_of(message)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True, False)),
        ({"include_usage": False, "continuous_usage_stats": True}, (False, False, False)),
        ({"include_usage": None, "include_obfuscation": True, "other": None}, (False, False, True)),
    ],
)
def test_stream_options_are_read(options: dict[str, Any], expected: tuple[bool, bool, bool]) -> None:
    answering = completion_of(stream=True, stream_options=options).answering
    assert (answering.include_usage, answering.continuous_usage, answering.obfuscates) == expected
    if not any(options.values()):
        completion_of(stream_options=options)
