"""How chats and completions become tokens: what templates are given, and what is cut."""

from __future__ import annotations

from typing import Any

import pytest

from launch.serve.admission.refusals import Refusal, wrap_errors
from launch.serve.api.openai.calls import PromptMaker
from launch.serve.api.openai.types import read_chat, read_completion
from trtrun.chats.chat_template import ChatTemplate
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.sampling_params import MOST_TOKENS
from trtrun.errors import InvalidRequestError, PromptTooLongError
from trtrun.tokens.text import Tokenizer, read_tokenizer

SAYS = "{{ messages[-1].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|"
THINKS = "{{ messages[-1].content }}|{{ enable_thinking }}|"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = read_tokenizer(ASSETS / "target")
    assert found is not None
    return found


def prompt_of(tokenizer: Tokenizer, source: str, **fields: Any) -> str:
    maker = PromptMaker("m", tokenizer, ChatTemplate(source, {}))
    call = read_chat({"messages": [{"role": "user", "content": "x"}], **fields}, "m")
    return tokenizer.decode(maker.of_chat(call, 100)[0], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("source", "fields", "text"),
    [
        (SAYS, {}, "x|||"),
        (SAYS, {"chat_template_kwargs": {"enable_thinking": False}}, "x|False||"),
        (SAYS, {"reasoning_effort": "low"}, "x||low|"),
        (SAYS, {"reasoning_effort": "none"}, "x|False|none|"),
        (SAYS, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "x||high|"),
        (THINKS, {"reasoning_effort": "none"}, "x|False|"),
        (THINKS, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "x|True|"),
        ("plain", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "plain"),
    ],
)
def test_templates_are_given_what_requests_say(
    tokenizer: Tokenizer, source: str, fields: dict[str, Any], text: str
) -> None:
    assert prompt_of(tokenizer, source, **fields) == text


def test_an_effort_that_the_template_does_not_know_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(Refusal, match="reasoning_effort: the model's chat template has no such setting") as caught:
        prompt_of(tokenizer, THINKS, reasoning_effort="low")
    assert caught.value.field == "reasoning_effort" and caught.value.code == "unsupported_field"


def test_no_value_takes_the_place_of_a_function(tokenizer: Tokenizer) -> None:
    """Else a client would get past what the template refuses, as an empty text in place of `raise_exception`."""
    source = "{% if not system %}{{ raise_exception('no system here') }}{% endif %}{{ range(2) | list }}"
    for name in ("raise_exception", "range", "namespace", "strftime_now"):
        with pytest.raises(Refusal, match=f"chat_template_kwargs cannot hold {name}, which is a function") as caught:
            prompt_of(tokenizer, source, chat_template_kwargs={"system": False, name: ""})
        assert caught.value.field == "chat_template_kwargs"
    assert prompt_of(tokenizer, source, chat_template_kwargs={"system": True}) == "[0, 1]"


SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
BESIDE_SYSTEM = "{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}x"
OFFERED = {"tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("source", "is_shown"),
    [
        ("{{ messages[-1].content }}", False),
        ("{% if tools and verbose %}{{ tools }}{% endif %}x", False),
        ("{% set tools = none %}x", False),
        (SHOWN, True),
        (BESIDE_SYSTEM, True),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}x", True),  # which says so itself
    ],
)
def test_tools_that_the_model_would_not_see_are_refused_or_passed_over(
    tokenizer: Tokenizer, source: str, is_shown: bool
) -> None:
    assert ChatTemplate(source, {}).shows_tools == is_shown
    if is_shown:
        return
    with pytest.raises(Refusal, match="tools: the model's chat template shows no tools") as caught:
        prompt_of(tokenizer, source, **OFFERED)
    assert caught.value.field == "tools" and caught.value.code == "unseen_tools"
    # A call that is wanted is made all the same: the answer is guided to it.
    for fields in ({**OFFERED, "tool_choice": "required"}, {**OFFERED, "tool_choice": "none"}, {"tools": []}):
        assert prompt_of(tokenizer, source, **fields) == prompt_of(tokenizer, source)
    maker = PromptMaker("m", tokenizer, ChatTemplate(source, {}), refuses_unseen_tools=False)
    call = read_chat({"messages": [{"role": "user", "content": "x"}], **OFFERED}, "m")
    assert maker.of_chat(call, 100)[0]


def test_a_template_for_tools_shows_them(tokenizer: Tokenizer) -> None:
    assert ChatTemplate("x", {}, SHOWN).shows_tools


DETAILS = [{"type": "reasoning.text", "text": "so "}, {"type": "reasoning.summary", "summary": "it is"}]


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        ({"reasoning_details": [*DETAILS, {"type": "reasoning.encrypted", "data": "x"}]}, "so it is"),
        ({"reasoning_details": DETAILS, "reasoning": "why"}, "why"),
        ({"reasoning_details": DETAILS, "reasoning_content": "why", "reasoning": None}, "why"),
        ({"reasoning_details": []}, ""),
        ({"reasoning_details": None}, ""),
    ],
)
def test_thoughts_of_earlier_answers_are_taken_in_any_words(
    tokenizer: Tokenizer, fields: dict[str, Any], thoughts: str
) -> None:
    source = "{{ messages[0].reasoning_content or '' }}|"
    messages = [{"role": "assistant", "content": "x", **fields}, {"role": "user", "content": "y"}]
    assert prompt_of(tokenizer, source, messages=messages) == f"{thoughts}|"


@pytest.mark.parametrize(
    ("details", "line"),
    [
        ("so", "must be a list of objects"),
        ([5], "list of objects"),
        ([{"text": 5}], r"reasoning_details\[0\]\.text must"),
    ],
)
def test_details_that_are_none_are_refused(tokenizer: Tokenizer, details: Any, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        prompt_of(tokenizer, "x", messages=[{"role": "assistant", "content": "x", "reasoning_details": details}])


def test_a_text_that_is_none_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(Refusal, match="half of a surrogate pair"):
        prompt_of(tokenizer, SAYS, chat_template_kwargs={"reasoning_effort": "\ud800"})


def test_a_prediction_is_what_follows_the_prompt(tokenizer: Tokenizer) -> None:
    maker = PromptMaker("m", tokenizer, ChatTemplate("{{ messages[-1].content }}", {}))
    asked = {"messages": [{"role": "user", "content": "def main(self"}]}
    call = read_chat({**asked, "prediction": {"type": "content", "content": ", other):"}}, "m")
    prompt, draft = maker.of_chat(call, 100)
    assert tokenizer.decode([*prompt, *draft]) == "def main(self, other):" and draft
    # What would have made other tokens of the prompt is no draft.
    asked = {"messages": [{"role": "user", "content": "def ma"}]}
    call = read_chat({**asked, "prediction": {"type": "content", "content": "in(self, x):"}}, "m")
    prompt, draft = maker.of_chat(call, 100)
    joined = tokenizer.encode("def main(self, x):", add_special_tokens=False)
    assert joined[: len(prompt)] != list(prompt) and len(joined) > len(prompt)
    assert draft == ()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prediction_follows_the_whole_prompt_however_much_of_it_is_kept(tokenizer: Tokenizer, side: str) -> None:
    maker = PromptMaker("m", tokenizer, ChatTemplate("{{ messages[-1].content }}", {}))
    prediction = {"type": "content", "content": ", other):"}
    asked = {"messages": [{"role": "user", "content": "def main(self"}], "prediction": prediction}
    whole, expected = maker.of_chat(read_chat(asked, "m"), 100)
    cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
    prompt, draft = maker.of_chat(read_chat({**asked, **cut}, "m"), 100)
    assert len(whole) > 2 and prompt == (whole[-2:] if side == "left" else whole[:2])
    assert draft == expected and len(draft) > 2


def test_a_prediction_is_cut_to_what_there_is_room_for_and_to_what_parameters_may_hold() -> None:
    class Letters:
        """A token for each letter."""

        most_bytes_of_a_token = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(map(ord, text))

    maker = PromptMaker("m", Letters(), ChatTemplate("{{ messages[-1].content }}", {}))  # type: ignore[arg-type]
    prediction = {"type": "content", "content": "abc" * MOST_TOKENS}
    call = read_chat({"messages": [{"role": "user", "content": "x"}], "prediction": prediction}, "m")
    assert maker.of_chat(call, 4) == ((120,), (97, 98, 99, 97))
    draft = maker.of_chat(call, 1 << 30)[1]
    assert call.answering.with_draft(draft).sampling.draft_token_ids == draft and len(draft) == MOST_TOKENS


def test_too_little_memory_is_no_fault_of_a_request() -> None:
    class Greedy:
        most_bytes_of_a_token = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            raise MemoryError

    call = read_chat({"messages": [{"role": "user", "content": "x"}]}, "m")
    with pytest.raises(MemoryError):
        PromptMaker("m", Greedy(), ChatTemplate("x", {})).of_chat(call, 4)  # type: ignore[arg-type]


def test_what_is_too_long_is_told_as_such_whoever_finds_it() -> None:
    for error, field, code in (
        (PromptTooLongError("the prompt is long"), "prompt", "context_length_exceeded"),
        (InvalidRequestError("messages: no"), "messages", None),
        (InvalidRequestError("the prompt is empty: no"), None, None),
    ):
        with pytest.raises(Refusal) as caught, wrap_errors():
            raise error
        assert (caught.value.field, caught.value.code, str(caught.value)) == (field, code, str(error))


@pytest.mark.parametrize(("most", "side", "kept"), [(-1, "left", 2), (-1, "right", 2), (3, "left", 3), (99, "left", 5)])
def test_prompts_keep_as_many_tokens_as_they_may(tokenizer: Tokenizer, most: int, side: str, kept: int) -> None:
    maker = PromptMaker("m", tokenizer, None)
    values = {"prompt": [1, 2, 3, 4, 5], "truncate_prompt_tokens": most, "truncation_side": side}
    (prompt,) = maker.of_completion(read_completion(values, "m"), 2)
    assert list(prompt) == ([1, 2, 3, 4, 5][-kept:] if side == "left" else [1, 2, 3, 4, 5][:kept])


def test_templates_see_calls_with_arguments_as_objects_and_the_tools() -> None:
    def call(number: str, arguments: object) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": "f", "arguments": arguments}}

    told = [call("1", '{"a": 1}'), call("2", "{broken"), call("3", "[1]"), call("4", ""), call("5", {"b": 2})]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": told, "parsed": None, "refusal": None},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text", "text": "a"}]},
    ]
    function = {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}
    read = read_chat({"messages": messages, "tools": [{"type": "function", "function": function}]}, "m")
    assert [item["function"]["arguments"] for item in read.messages[1]["tool_calls"]] == [
        {"a": 1}, "{broken", "[1]", {}, {"b": 2},
    ]  # fmt: skip
    assert read.messages[1]["content"] == "" and "parsed" not in read.messages[1]
    assert read.messages[2] == {"role": "tool", "content": "a", "name": "f", "tool_call_id": "1"}
    assert read.tools is not None
    assert read.tools.shown == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
