"""The real `openai` client against a server on the shipped pair: the tokens and texts of `trtrun run`, in every way to
ask for them; and cancels."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from servers import PATIENCE, ROOT, Server, wait_until

from trtrun import LLM, SamplingParams
from trtrun.core.outputs import RequestOutput

pytestmark = pytest.mark.timeout(300)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24, "presence_penalty": 0.4}
ABORTED = "trtrun:requests_aborted_total"
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
PROMPT = "def main("
MESSAGES: list[Any] = [
    {"role": "user", "content": "write a loop"},
    {"role": "assistant", "content": [{"type": "text", "text": "for"}, {"type": "text", "text": "while"}]},
]
CHAT_PROMPT = "# user\nwrite a loop\n# assistant\nfor\nwhile\n# answer\n"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
        yield client


def expected(llm: LLM, prompt: Any, options: dict[str, Any]) -> RequestOutput:
    options = {name: value for name, value in options.items() if name != "extra_body"} | options.get("extra_body", {})
    return llm.generate([prompt], SamplingParams(**options))[0]


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seed"])
def test_completions_are_those_of_the_python_api(client: openai.OpenAI, llm: LLM, options: dict[str, Any]) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("import os")
    options = {**options, "n": 2, "logprobs": 3}
    prompts: Any = [PROMPT, ids]
    answer = client.completions.create(model="pair", prompt=prompts, **options, extra_body={"return_token_ids": True})
    outputs = [expected(llm, prompt, options) for prompt in prompts]
    completions = [completion for output in outputs for completion in output.completions]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, completion in zip(answer.choices, completions, strict=True):
        assert choice.text == completion.text and choice.finish_reason == completion.finish_reason
        assert tuple(choice.token_ids) == completion.token_ids  # type: ignore[attr-defined]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(
            [entry.logprob for entry in completion.logprobs or ()], abs=1e-5
        )
        offsets, tokens = choice.logprobs.text_offset or (), choice.logprobs.tokens or ()
        tops = choice.logprobs.top_logprobs or ()
        assert all(token in top and len(top) <= 4 for token, top in zip(tokens, tops, strict=True))
        assert len(offsets) == len(tokens) == len(completion.token_ids)
        assert all(choice.text[begin:].startswith(token) for begin, token in zip(offsets, tokens, strict=True))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert answer.usage.completion_tokens == sum(len(completion.token_ids) for completion in completions)


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seed"])
def test_streams_add_up_to_the_same(client: openai.OpenAI, llm: LLM, options: dict[str, Any]) -> None:
    options = {**options, "n": 2, "stop": ["\n\n", "zzz"]}
    chunks = list(
        client.completions.create(
            model="pair", prompt=PROMPT, **options, stream=True, stream_options={"include_usage": True}
        )
    )
    completions = expected(llm, PROMPT, options).completions
    for completion in completions:
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == completion.index]
        assert "".join(choice.text for choice in own) == completion.text
        assert [choice.finish_reason for choice in own][-1] == completion.finish_reason
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == sum(len(completion.token_ids) for completion in completions)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    speculation = last.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    assert speculation["num_spec_tokens"] == 4 and len(speculation["acceptance_histogram"]) == 5
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"] > 0
    accepted = sum(place * count for place, count in enumerate(speculation["acceptance_histogram"]))
    assert accepted == speculation["num_accepted_draft_tokens"] <= speculation["num_draft_tokens"]
    assert speculation["mean_acceptance_length"] == pytest.approx(
        1 + accepted / speculation["num_spec_steps"], abs=1e-4
    )


def test_what_was_cached_and_what_was_drafted_add_up(client: openai.OpenAI) -> None:
    for is_drafted in (True, False):
        answer = client.completions.create(
            model="pair",
            prompt=PROMPT * 20,
            n=2,
            **GREEDY,
            extra_body={} if is_drafted else {"draft_len": 0},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached is not None and cached <= answer.usage.prompt_tokens
        speculation = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
        assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
        assert (speculation["num_spec_steps"] > 0) == is_drafted
    assert cached > answer.usage.prompt_tokens / 2  # it was there from the first time


@pytest.mark.parametrize(("draft_len", "letters"), [(None, "arbp"), (1, "arbp"), (0, "p")])
def test_how_tokens_came_is_told_and_a_draft_len_changes_no_text(
    client: openai.OpenAI, llm: LLM, draft_len: int | None, letters: str
) -> None:
    body: dict[str, Any] = {"draft_len": draft_len, "return_token_origins": True}
    (completion,) = expected(llm, PROMPT, {**GREEDY, "draft_len": draft_len}).completions
    answer = client.completions.create(model="pair", prompt=PROMPT, **GREEDY, extra_body=body)
    origins = answer.choices[0].token_origins  # type: ignore[attr-defined]
    assert answer.choices[0].text == completion.text == expected(llm, PROMPT, GREEDY).completions[0].text
    assert len(origins) == len(completion.token_ids) and set(origins) <= set(letters)
    assert origins[0] == "p"  # whether others are depends on what rounds take: pacing is measured
    chunks = list(
        client.chat.completions.create(model="pair", messages=MESSAGES, stream=True, **GREEDY, extra_body=body)
    )
    streamed = [choice.token_origins for chunk in chunks for choice in chunk.choices]  # type: ignore[attr-defined]
    (completion,) = expected(llm, CHAT_PROMPT, GREEDY).completions
    assert len("".join(streamed)) == len(completion.token_ids)
    given = {**body, "draft_token_ids": completion.token_ids} if draft_len != 0 else body
    answer = client.chat.completions.create(model="pair", messages=MESSAGES, **GREEDY, extra_body=given)
    assert answer.choices[0].message.content == completion.text
    if draft_len != 0:  # all but the first token, and a bonus a round, are the draft's
        per_round = (draft_len or 4) + 1
        assert answer.choices[0].token_origins.count("a") >= 23 - -(-23 // per_round) - 1  # type: ignore[attr-defined]
    assert not hasattr(client.completions.create(model="pair", prompt="x", **GREEDY).choices[0], "token_origins")


def test_the_texts_of_tokens_add_up_to_the_text(client: openai.OpenAI) -> None:
    # Hot enough for bytes that are no characters.
    options: dict[str, Any] = {
        "model": "pair",
        "prompt": PROMPT,
        "n": 2,
        "temperature": 1.8,
        "seed": 3,
        "max_tokens": 40,
    }
    asked = {"return_token_texts": True, "return_token_ids": True}
    answer = client.completions.create(**options, extra_body=asked)
    chunks = list(client.completions.create(**options, stream=True, extra_body=asked))
    for choice in answer.choices:
        texts = choice.token_texts  # type: ignore[attr-defined]
        assert "".join(texts) == choice.text and len(texts) == len(choice.token_ids)  # type: ignore[attr-defined]
        own = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert [text for piece in own for text in piece.token_texts] == texts  # type: ignore[attr-defined]


def test_status_tells_who_sits_where_and_how_full_it_is(client: openai.OpenAI, server: Server) -> None:
    stream = client.completions.create(model="pair", prompt=PROMPT, stream=True, **LONG)
    next(stream)
    busy = server.get("/status").raise_for_status().json()
    stream.close()
    server.wait_idle()
    assert busy["model"] == "pair" and busy["state"] == "serving" and busy["chat"] is True
    assert busy["ranks"] == [
        {"rank": 0, "roles": ["orchestrator", "draft", "target"], "host": None, "device": "cpu:0", "state": "up"}
    ]
    assert busy["speculation"]["method"] == "draft_target" and busy["speculation"]["draft_len"] == 4
    assert busy["queue"]["running"] == 1 and busy["queue"]["max_running"] == 8 and busy["queue"]["max_waiting"] == 24
    assert 0 < busy["kv_cache"]["usage"] < 1 and busy["kv_cache"]["free_blocks"] < busy["kv_cache"]["blocks"]
    wait_until(lambda: True if status_of(server)["queue"]["running"] == 0 else None, "an idle status")
    totals, metrics = status_of(server)["totals"], server.metrics()
    assert totals["tokens"] == metrics["vllm:generation_tokens_total"] > 0
    assert totals["accepted_draft_tokens"] == metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert 1 < totals["mean_acceptance_length"] <= 5
    assert metrics["trtrun:captures_total"] == metrics["trtrun:compilations_total"] == 0, "the start made them"
    before = metrics['nv_inference_request_failure{model="pair",reason="CANCELED",version="1"}']
    successes = metrics['nv_inference_request_success{model="pair",version="1"}']
    client.completions.create(model="pair", prompt=PROMPT, **GREEDY)
    list(client.completions.create(model="pair", prompt=PROMPT, stream=True, **GREEDY))
    metrics = server.metrics()
    assert before >= 1 and metrics['nv_inference_request_success{model="pair",version="1"}'] == successes + 2
    assert metrics['nv_inference_compute_infer_duration_us{model="pair",version="1"}'] > 0
    assert metrics['nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"}'] > 0


def status_of(server: Server) -> Any:
    return server.get("/status").raise_for_status().json()


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seed"])
def test_a_chat_is_the_completion_of_its_templates_text(
    client: openai.OpenAI, llm: LLM, options: dict[str, Any]
) -> None:
    options = {**options, "extra_body": {"ignore_eos": True, "min_tokens": 5, "top_k": 50}}
    (completion,) = expected(llm, CHAT_PROMPT, options).completions
    answer = client.chat.completions.create(model="pair", messages=MESSAGES, logprobs=True, top_logprobs=2, **options)
    (choice,) = answer.choices
    assert choice.message.content == completion.text and choice.message.role == "assistant"
    assert choice.finish_reason == completion.finish_reason
    assert choice.logprobs is not None and len(choice.logprobs.content or ()) == len(completion.token_ids)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content or ())
    chunks = list(client.chat.completions.create(model="pair", messages=MESSAGES, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == completion.text
    assert chunks[-1].choices[0].finish_reason == completion.finish_reason


def test_models_health_version_and_request_ids(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["pair"]
    assert client.models.retrieve("pair").owned_by == "trtrun"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    health = server.get("/health").json()
    assert health["status"] == "ok" and [one["rank"] for one in health["phases"]] == [0]
    assert server.get("/version").json()["version"]
    answers = [server.get("/health", headers={"x-request-id": sent}) for sent in ("mine", "x" * 200)]
    assert answers[0].headers["x-request-id"] == "mine"
    assert len(answers[1].headers["x-request-id"]) == 32
    assert "access-control-allow-origin" not in answers[0].headers


async def use_and_leave(server: Server, llm_texts: dict[int, str]) -> None:
    """Clients at once that read to the end, or go away behind the first piece; then some that go without a word."""

    def are_at_work() -> bool | None:
        return server.metrics()["vllm:num_requests_running"] == 4 or None

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:

        async def read(number: int) -> None:
            prompt = f"def f{number}("
            stays = number % 2 == 0
            options = GREEDY if stays else LONG
            stream = await client.completions.create(model="pair", prompt=prompt, stream=True, **options)
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].text
                if not stays:
                    await stream.close()
                    return
            assert text == llm_texts[number]

        await asyncio.gather(*(read(number) for number in range(16) if number % 4 != 3))
        await asyncio.to_thread(server.wait_idle)
        leaving = [
            asyncio.ensure_future(client.completions.create(model="pair", prompt=f"def f{number}(", **LONG))
            for number in range(3, 16, 4)  # without a stream
        ]
        await asyncio.to_thread(wait_until, are_at_work, "four requests at work")
        for request in leaving:
            assert request.cancel()
        await asyncio.wait(leaving)


def test_clients_come_and_go_and_all_blocks_are_free_afterwards(server: Server, llm: LLM) -> None:
    before = server.wait_idle()
    texts = {number: expected(llm, f"def f{number}(", GREEDY).completions[0].text for number in range(0, 16, 2)}
    asyncio.run(use_and_leave(server, texts))
    metrics = server.wait_idle()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert metrics[ABORTED] - before[ABORTED] == 8
    name = 'vllm:request_success_total{finished_reason="length"}'
    assert metrics[name] - before.get(name, 0) == sum(1 for text in texts.values() if text)
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert metrics["vllm:time_to_first_token_seconds_count"] > 0


def test_a_full_queue_is_429_and_nobody_else_is_hurt(client: openai.OpenAI, server: Server) -> None:
    before = server.wait_idle()["trtrun:rounds_total"]
    stream = client.completions.create(model="pair", prompt=PROMPT, n=30, stream=True, **LONG)
    assert next(stream).choices
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="pair", prompt=PROMPT, n=5, **GREEDY)
    assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
    stream.close()
    # 30 completions of 900 tokens, in 8 rows of at most 5 tokens a round, would take 675 rounds.
    assert server.wait_idle()["trtrun:rounds_total"] - before < 600
    assert client.completions.create(model="pair", prompt=PROMPT, n=5, **{**GREEDY, "max_tokens": 1}).choices


def test_a_small_request_does_not_wait_behind_many_streams_of_another_client(server: Server) -> None:
    """By address, where there are no keys. The streams are read by nobody, and have all rows; none has ended when the
    small one has its answer."""
    before = server.wait_idle()
    name, limits = 'vllm:request_success_total{finished_reason="length"}', httpx.Limits(max_connections=30)
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE, limits=limits) as many,
        httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=PATIENCE) as other,
        ExitStack() as streams,
    ):
        for _ in range(24):
            streams.enter_context(many.stream("POST", "/v1/completions", json=body))
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 8 or None, "all rows are taken")
        for _ in range(2):
            answer = other.post(server.url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert answer.status_code == 200
        assert server.metrics()[name] - before.get(name, 0) == 2
    server.wait_idle()


def test_the_example_of_the_client_runs(server: Server) -> None:
    words = [sys.executable, str(ROOT / "examples" / "openai_client.py"), server.url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.rindex("{") :])["size"] in ("small", "large")
