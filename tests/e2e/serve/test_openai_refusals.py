"""What the OpenAI API refuses, and how: in one line, with the nearest known name, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest
from servers import Server

pytestmark = pytest.mark.timeout(300)


def body(**changes: Any) -> dict[str, Any]:
    values = {"model": "pair", "prompt": "x", "max_tokens": 2, **changes}
    return {name: value for name, value in values.items() if value != "absent"}


def chat(**changes: Any) -> dict[str, Any]:
    return body(**{"prompt": "absent", "messages": [{"role": "user", "content": "x"}], **changes})


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BAD: list[tuple[str, Any, int, str]] = [
    (COMPLETIONS, b"{", 400, "not valid JSON: Expecting property name"),
    (COMPLETIONS, b"\xff", 400, "byte 1 is not valid UTF-8"),
    (COMPLETIONS, b"[" * 10000, 400, "nested too deeply"),
    (COMPLETIONS, b'{"model": "pair", "model": "pair"}', 400, "stands twice"),
    (COMPLETIONS, b'{"seed": ' + b"9" * 5000 + b"}", 400, "digits"),
    (COMPLETIONS, [], 400, "must be a JSON object"),
    (COMPLETIONS, b"x" * 20001, 413, "larger than 20000 bytes"),
    (COMPLETIONS, body(model="other"), 404, 'no model "other"'),
    (COMPLETIONS, body(model=5), 404, "no model 5"),
    (COMPLETIONS, body(prompt="absent"), 400, "prompt is missing"),
    (COMPLETIONS, body(prompt=""), 400, "prompt is empty"),
    (COMPLETIONS, body(prompt=[]), 400, "prompt must be"),
    (COMPLETIONS, body(prompt={}), 400, "prompt must be"),
    (COMPLETIONS, body(prompt=[1, "x"]), 400, "prompt must be"),
    (COMPLETIONS, body(prompt=["x", [1.5]]), 400, "prompt must be"),
    (COMPLETIONS, body(prompt=[[4096]]), 400, "between 0 and 4095"),
    (COMPLETIONS, body(prompt=[-1]), 400, "between 0 and 4095"),
    (COMPLETIONS, body(prompt="\ud800"), 400, "surrogate"),
    (COMPLETIONS, body(prompt=[5] * 2000), 400, "max_seq_len 1024"),
    (COMPLETIONS, body(prompt=["x"] * 1025), 400, "1 to 1024 prompts"),
    (COMPLETIONS, body(promt="x"), 400, "did you mean 'prompt'?"),
    (COMPLETIONS, body(**{"\ud800": 1}), 400, "unknown field"),
    (COMPLETIONS, body(temprature=1), 400, "did you mean 'temperature'?"),
    (COMPLETIONS, body(temperature="hot"), 400, "temperature must be a finite number"),
    (COMPLETIONS, body(temperature=-1), 400, "temperature must be 0 or"),
    (COMPLETIONS, b'{"model": "pair", "prompt": "x", "temperature": NaN}', 400, "finite"),
    (COMPLETIONS, body(max_tokens=0), 400, "max_tokens must be at least 1"),
    (COMPLETIONS, body(max_tokens=True), 400, "whole number"),
    (COMPLETIONS, body(n=0), 400, "n must be between 1 and 128"),
    (COMPLETIONS, body(n=100), 400, "more than the 32"),
    (COMPLETIONS, body(seed=2**63), 400, "seed must be between"),
    (COMPLETIONS, body(logprobs=21), 400, "logprobs must be between 0 and 20"),
    (COMPLETIONS, body(logprobs=True), 400, "logprobs must be a whole number"),
    (COMPLETIONS, body(max_tokens=1.5), 400, "max_tokens must be a whole number"),
    (COMPLETIONS, body(max_tokens=-2), 400, "max_tokens must be at least 1"),
    (COMPLETIONS, body(top_p=False), 400, "top_p must be a finite number"),
    (COMPLETIONS, body(stop=5), 400, "stop must be"),
    (COMPLETIONS, body(stop=["a"] * 1025), 400, "stop has 1025 entries; 1024 are the most"),
    (CHATS, chat(bad_words=["a"] * 1025), 400, "bad_words has 1025 entries"),
    (COMPLETIONS, body(stop_token_ids=[4096]), 400, "stop_token_ids: 4096"),
    (COMPLETIONS, body(logit_bias={"a": 1}), 400, "is not a token id"),
    (COMPLETIONS, body(logit_bias={"5": 101}), 400, "between -100 and 100"),
    (COMPLETIONS, body(min_tokens=5), 400, "min_tokens is 5, more than max_tokens"),
    (COMPLETIONS, body(draft_len=5), 400, "more than speculation.draft_len, which is 4"),
    (COMPLETIONS, body(draft_len=-1), 400, "draft_len must be 0"),
    (COMPLETIONS, body(return_token_origins=1), 400, "return_token_origins must be true or false"),
    (COMPLETIONS, body(stream="yes"), 400, "stream must be true or false"),
    (COMPLETIONS, body(stream_options={"include_usage": True}), 400, "needs stream"),
    (COMPLETIONS, body(stream=True, stream_options={"usage": True}), 400, "include_usage"),
    (COMPLETIONS, body(best_of=3), 400, "best_of is not supported"),
    (COMPLETIONS, body(suffix="y"), 400, "suffix is not supported"),
    (COMPLETIONS, body(lookahead_config=[3, 3, 3]), 400, "lookahead_config is for speculation.method lookahead"),
    (CHATS, chat(draft_len=10**30), 400, "draft_len must be 0 (plain decoding) to 2**31 - 1, not 1000"),
    (CHATS, chat(lookahead_config=[3]), 400, "lookahead_config must be a list of three whole numbers, not [3]"),
    (COMPLETIONS, body(messages=[]), 400, 'unknown field "messages" of completions: chats have it'),
    (COMPLETIONS, body(xyzzyq=1), 400, 'unknown field "xyzzyq": leave it out'),
    (
        COMPLETIONS,
        body(use_beam_search=True),
        400,
        "not supported here: leave it out, or give false",
    ),
    (COMPLETIONS, body(priority=True), 400, "not supported here: leave it out, or give 0"),
    (COMPLETIONS, body(n_predict=5), 400, "n_predict is not supported here: give max_tokens"),
    (COMPLETIONS, body(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens must be 1 or more, or -1"),
    (COMPLETIONS, body(truncation_side="up"), 400, "truncation_side must be left or right"),
    (COMPLETIONS, body(request_id="x" * 129), 400, "128 are the most"),
    (COMPLETIONS, body(request_id="\n"), 400, "printable ASCII"),
    (CHATS, chat(enable_thinking=False), 400, "give chat_template_kwargs"),
    (CHATS, chat(chat_template_kwargs=[]), 400, "chat_template_kwargs must be an object"),
    (CHATS, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs cannot hold messages"),
    (CHATS, chat(reasoning_effort="low"), 400, "no such setting"),
    (CHATS, chat(prediction="x"), 400, "prediction must be"),
    (CHATS, chat(prediction={"type": "content", "content": [{"type": "text"}]}), 400, "prediction must be"),
    (CHATS, chat(documents=["x"]), 400, "documents must be a list of objects"),
    (CHATS, chat(continue_final_message=True, add_generation_prompt=True), 400, "cannot both be true"),
    (CHATS, chat(tools=[{"type": "function"}], tool_choice="auto"), 400, "tools[0].function must be an object"),
    (CHATS, chat(messages="absent"), 400, "messages is missing"),
    (CHATS, chat(messages=[]), 400, "one message at least"),
    (CHATS, chat(messages=["x"]), 400, "messages[0] must be an object"),
    (CHATS, chat(messages=[{"role": "tools", "content": "x"}]), 400, "role must be one of"),
    (CHATS, chat(messages=[{"role": "user", "content": 5}]), 400, "content must be"),
    (CHATS, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "reads text alone"),
    (CHATS, chat(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]), 400, "not supported"),
    (CHATS, chat(messages=[{"role": "system", "content": "x"}]), 400, "no system here"),
    (CHATS, chat(top_logprobs=2), 400, "needs logprobs"),
    (CHATS, chat(logprobs=True, top_logprobs=21), 400, "between 0 and 20"),
    (CHATS, chat(functions=[{"name": "f"}]), 400, "functions is not supported here: give tools"),
    (CHATS, chat(response_format={"type": "json"}), 400, "response_format.type must be"),
    (CHATS, chat(prompt="x"), 400, "unknown field"),
    ("/v1/embeddings", body(), 404, "embeddings are not made here"),
    ("/completions", body(), 404, "Not Found (did you mean /v1/completions?)"),
    ("/v1/v1/completions", body(), 404, "Not Found (did you mean /v1/completions?)"),
    ("/metrics", body(), 405, "POST /metrics: Method Not Allowed (use GET or HEAD)"),
    ("/v1/models", body(), 405, "POST /v1/models: Method Not Allowed (use GET or HEAD)"),
    (COMPLETIONS, b"", 400, "the body is empty: send a JSON object"),
]


def test_bad_requests_are_one_line_that_says_what_is_wrong(server: Server) -> None:
    for path, values, status, text in BAD:
        answer = server.post(path, values)
        assert answer.status_code == status, (path, values if len(str(values)) < 200 else "", answer.text)
        error = answer.json()["error"]
        assert text in error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000, error
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert "Traceback" not in answer.text
    assert server.get(COMPLETIONS).status_code == 405
    server.wait_idle()
    assert not [line for line in server.lines if "Traceback" in line]


def test_what_is_openais_and_changes_nothing_is_accepted(server: Server) -> None:
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": None}
    harmless = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert server.post(COMPLETIONS, body(**ignored, echo=False, best_of=1, suffix=None)).status_code == 200
    assert server.post(CHATS, chat(**ignored, **harmless)).status_code == 200
