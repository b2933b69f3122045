"""What clients of other servers send, to a server on the shipped pair: it is taken, and means what it means there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from servers import Server

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": "write a loop"}, {"role": "assistant", "content": "for i in "}]


def ask(server: Server, path: str, **fields: Any) -> Any:
    return server.post(path, fields).raise_for_status().json()


def chunks_of(server: Server, path: str, **fields: Any) -> list[Any]:
    answer = server.post(path, {**fields, "stream": True}).raise_for_status()
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(llm: LLM, prompt: Any) -> str:
    return llm.generate([prompt], SamplingParams(**GREEDY))[0].completions[0].text


def test_values_that_change_nothing_are_taken(server: Server) -> None:
    plain = ask(server, COMPLETIONS, prompt="def main(", **GREEDY)
    said = {
        "top_k": -1, "seed": -1, "stop": [""], "logprobs": False, "best_of": 1, "echo": False, "guided_json": None,
        "skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0, "priority": 0,
        "cache_prompt": True, "mirostat": 0, "lora_path": None, "no_such_thing": None, "min_tokens": 0.0,
    }  # fmt: skip
    told = ask(server, COMPLETIONS, prompt="def main(", **GREEDY, **said)
    assert told["choices"] == plain["choices"] and told["model"] == "pair"
    assert ask(server, COMPLETIONS, prompt="def main(", top_p=0, max_tokens=8.0)["choices"] == plain["choices"]
    long = ask(
        server, COMPLETIONS, prompt="x", temperature=0, max_tokens=-1, ignore_eos=True, truncate_prompt_tokens=-1
    )
    assert long["usage"]["total_tokens"] == 1024 and long["choices"][0]["finish_reason"] == "length"


def test_prompts_are_cut_and_encoded_as_asked(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("import os\nimport sys")
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        for prompt in ("import os\nimport sys", ids):
            asked = {"prompt": prompt, "truncate_prompt_tokens": 3, "truncation_side": side, **GREEDY}
            told = ask(server, COMPLETIONS, **asked)
            assert told["choices"][0]["text"] == text_of(llm, kept) and told["usage"]["prompt_tokens"] == 3
    plain = llm.tokenizer.encode("import os", add_special_tokens=False)
    told = ask(server, COMPLETIONS, prompt="import os", add_special_tokens=False, **GREEDY)
    assert told["choices"][0]["text"] == text_of(llm, plain) and told["usage"]["prompt_tokens"] == len(plain)
    most = ask(server, COMPLETIONS, prompt=[5] * 5000, truncate_prompt_tokens=-1, max_tokens=1)["usage"]
    assert most["prompt_tokens"] == 1023


def test_the_last_message_is_gone_on_with(server: Server, llm: LLM) -> None:
    told = ask(server, CHATS, messages=MESSAGES, continue_final_message=True, **GREEDY)
    assert told["choices"][0]["message"]["content"] == text_of(llm, "# user\nwrite a loop\n# assistant\nfor i in ")
    told = ask(server, CHATS, messages=MESSAGES, add_generation_prompt=False, **GREEDY)
    assert told["choices"][0]["message"]["content"] == text_of(llm, "# user\nwrite a loop\n# assistant\nfor i in \n")


def test_the_stop_string_is_left_where_that_is_asked_for(server: Server, llm: LLM) -> None:
    text = text_of(llm, "def main(")
    stop = text[3:5]
    for kept in (False, True):
        asked = {"prompt": "def main(", **GREEDY, "stop": stop, "include_stop_str_in_output": kept}
        (choice,) = ask(server, COMPLETIONS, **asked)["choices"]
        assert choice["text"] == text[: text.index(stop) + (len(stop) if kept else 0)]
        streamed = "".join(one["text"] for told in chunks_of(server, COMPLETIONS, **asked) for one in told["choices"])
        assert streamed == choice["text"] and choice["finish_reason"] == "stop"


def test_a_prediction_is_a_draft(server: Server) -> None:
    asked = {"messages": MESSAGES, "temperature": 1.2, "seed": 7, "max_tokens": 24}  # no easy text for the draft model
    plain = ask(server, CHATS, **asked)
    text = plain["choices"][0]["message"]["content"]
    steps = []
    for content in (text, [{"type": "text", "text": text}], "something else"):
        told = ask(server, CHATS, **asked, prediction={"type": "content", "content": content})
        assert told["choices"] == plain["choices"]
        steps.append(told["metrics"]["speculative_decoding"]["num_spec_steps"])
    # All of the first two drafts are accepted, 4 tokens and one more a round behind the first; of the last one nothing.
    assert steps[:2] == [5, 5] and steps[2] == plain["metrics"]["speculative_decoding"]["num_spec_steps"] > 5


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_usage_is_told_with_every_chunk(server: Server, path: str) -> None:
    prompt = {"prompt": "def main("} if path == COMPLETIONS else {"messages": MESSAGES}
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = chunks_of(server, path, **prompt, **GREEDY, n=2, stream_options=options, return_token_ids=True)
    total = 0
    for chunk in told[:-1]:
        total += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        usage = chunk["usage"]
        assert usage["completion_tokens"] == total == usage["total_tokens"] - usage["prompt_tokens"]
    assert not told[-1]["choices"] and told[-1]["usage"]["completion_tokens"] == total > 0
    assert told[-1]["usage"]["prompt_tokens"] == told[0]["usage"]["prompt_tokens"] > 0


def test_chunks_are_filled_up_where_that_is_asked_for(server: Server) -> None:
    told = chunks_of(server, CHATS, messages=MESSAGES, **GREEDY, stream_options={"include_obfuscation": True})
    lengths = {
        len(json.dumps(one["choices"][0], separators=(",", ":")).encode()) + len(one["obfuscation"]) for one in told
    }
    assert len(told) > 1 and all(length % 32 == 0 for length in lengths)
    assert all("obfuscation" not in one for one in chunks_of(server, CHATS, messages=MESSAGES, **GREEDY))


def test_ids_of_requests_and_names_of_tokens(server: Server) -> None:
    asked = {"prompt": "def main(", "logprobs": 1, "return_token_ids": True, **GREEDY}
    told = ask(server, COMPLETIONS, **asked, request_id="mine-7", return_tokens_as_token_ids=True)
    assert told["id"] == "cmpl-mine-7"
    (choice,) = told["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_how_long_a_prompt_may_be_is_told(server: Server) -> None:
    (model,) = server.get("/v1/models").raise_for_status().json()["data"]
    assert model["id"] == "pair" and model["max_model_len"] == 1024
    error = server.post(COMPLETIONS, {"prompt": [5] * 2000}).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert "this model's maximum context length is 1024" in error["message"]
    assert error["message"].endswith("; shorten it")  # it is the target's own
    error = server.post(CHATS, {"messages": [{"role": "user", "content": "a b " * 1500}]}).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
