"""Thoughts in chats, through OpenAI's own client: calls that end them, a budget for them, stop strings behind them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import templates
from chat_server import MARKS, ChatServer
from tool_chats import MESSAGES, NAMED, STRICT, TOOLS, ask, joined, stream, whole

from launch.serve.api.openai.output.parsing import ChatText, Parsing

pytestmark = pytest.mark.timeout(240)
THINK, END, CALL = (str(1 + MARKS.index(mark)) for mark in ("<think>", "</think>", "<tool_call>"))
# What begins thoughts in the prompt, with calls in Hermes's form.
THINKING = templates.HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"


def test_a_call_ends_thoughts_that_the_model_does_not_end(server: ChatServer) -> None:
    """The mark of a call is allowed in thoughts: a model that prefers it calls, and is told to have called."""
    bias = {CALL: 100.0}
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": STRICT}):
        asked: dict[str, Any] = {"tools": TOOLS, "logit_bias": bias, "parallel_tool_calls": False, "max_tokens": 300}
        asked |= fields
        answer = ask(server, THINKING, **asked)
        content, thoughts, calls, reason = whole(answer)
        assert thoughts == "" and len(calls) == 1
        # A model that calls by itself may write text behind it.
        assert "tools" in fields or (content, reason) == ("", "tool_calls")
        assert joined(stream(server, THINKING, **asked)) == whole(answer)


def test_thoughts_end_at_their_budget(server: ChatServer) -> None:
    """With drafts and without, in a stream, of each choice by itself; and the answer goes on."""
    asked: dict[str, Any] = {"max_tokens": 40, "n": 2, "logprobs": True, "extra_body": {"thinking_token_budget": 9}}
    answer = ask(server, THINKING, **asked)
    free = ask(server, THINKING, **{**asked, "extra_body": {}})
    for place in range(2):
        tokens = [entry.token for entry in answer.choices[place].logprobs.content]
        assert tokens[:9] == [entry.token for entry in free.choices[place].logprobs.content][:9]
        assert tokens[9] == "</think>" and "</think>" not in tokens[:9]
        assert whole(answer, place)[0] and whole(free, place)[0] == ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == pytest.approx(18, abs=10)
    asked["stream_options"] = {"include_usage": True}
    chunks = stream(server, THINKING, **asked)
    assert [joined(chunks, place) for place in range(2)] == [whole(answer, place) for place in range(2)]
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0
    for body in (
        {"thinking_token_budget": 9, "draft_len": 0},
        {"thinking_budget": 9},
        {"chat_template_kwargs": {"thinking_budget": 9}},
    ):
        again = ask(server, THINKING, **{**asked, "stream_options": openai.omit, "extra_body": body})
        assert [whole(again, place) for place in range(2)] == [whole(answer, place) for place in range(2)], body


def test_thoughts_of_several_rounds_in_one_part_are_counted_by_their_text() -> None:
    """As of a reader that waits: thoughts, their end and the answer come together."""
    for part, share in (("so it is </think>", 8 / 17), ("a" * 30 + "</think>" + "b" * 62, 0.3), ("no end", 1.0)):
        text = ChatText(Parsing("", "qwen3", is_thinking=True))
        text.keep(part, False)
        assert text.thoughts == pytest.approx(share, abs=0.07)
        streamed = ChatText(Parsing("", "qwen3", is_thinking=True))
        streamed.deltas(part, False)
        assert streamed.thoughts == text.thoughts


def test_a_model_that_begins_thoughts_itself_has_a_budget_behind_their_mark(server: ChatServer) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "logit_bias": {THINK: 3.0}, "logprobs": True}
    asked["extra_body"] = {"thinking_token_budget": 4, "guided_regex": "yes|no"}
    answer = ask(server, templates.QWEN3, **{**asked, "logit_bias": {THINK: 100.0, END: -100.0}})
    tokens = [entry.token for entry in answer.choices[0].logprobs.content]
    assert (tokens[0], tokens[5]) == ("<think>", "</think>") and whole(answer)[0] in ("yes", "no")
    none = ask(server, templates.QWEN3, **{**asked, "logit_bias": {THINK: -100.0}})
    assert whole(none)[:2] in (("yes", ""), ("no", ""))


def test_a_budget_stands_beside_calls(server: ChatServer) -> None:
    """It ends thoughts in front of a call that is wanted, and nothing within a call that has ended them."""
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 300}
    asked["extra_body"] = {"thinking_token_budget": 5}
    ended = ask(server, THINKING, **asked, logit_bias={END: -100.0})
    assert whole(ended)[1] and len(whole(ended)[2]) == 1 and whole(ended)[3] == "tool_calls"
    cut = ask(server, THINKING, **asked, logit_bias={CALL: 100.0})
    assert len(whole(cut)[2]) == 1 and whole(cut)[1] == ""


def test_a_budget_is_refused_where_thoughts_cannot_be_ended(server: ChatServer) -> None:
    for template in (templates.PLAIN, templates.HARMONY):
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget: this model's thoughts"):
            ask(server, template, extra_body={"thinking_token_budget": 5})
    with pytest.raises(openai.BadRequestError, match="thinking_budget must be 0 or more"):
        ask(server, THINKING, extra_body={"thinking_budget": -2})
    assert ask(server, THINKING, max_tokens=5, extra_body={"thinking_token_budget": -1})


def test_stop_strings_count_behind_thoughts(server: ChatServer) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "extra_body": {"thinking_token_budget": 12}}
    content, thoughts, _, _ = whole(ask(server, THINKING, **asked))
    stops = [letter for letter in dict.fromkeys(thoughts) if letter.isalnum() and letter in content][:4]
    assert stops
    cut = content[: min(map(content.index, stops))]
    stopped = ask(server, THINKING, **asked, stop=stops)
    assert whole(stopped) == (cut, thoughts, [], "stop")
    assert joined(stream(server, THINKING, **asked, stop=stops)) == whole(stopped)
    everywhere = {**asked["extra_body"], "stop_in_thoughts": True}
    assert whole(ask(server, THINKING, **{**asked, "extra_body": everywhere}, stop=stops))[0] == ""
    body: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_tokens": 60, "temperature": 1.0, "seed": 3}
    body |= {"stop_sequences": stops, "thinking": {"type": "enabled", "budget_tokens": 12}}
    told: Any = server.ask(THINKING, lambda client: client.post("/messages", body=body, cast_to=object))
    assert told["stop_reason"] == "stop_sequence" and told["content"][0]["thinking"] == thoughts
