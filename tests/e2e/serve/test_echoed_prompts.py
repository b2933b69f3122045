"""Log probabilities of prompts over HTTP: `echo`, `prompt_logprobs`, `max_tokens: 0`, the requests of EleutherAI's
harness; and tokens of texts, texts of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from servers import PATIENCE, Server

from trtrun import LLM, SamplingParams
from trtrun.core.outputs import RequestOutput

pytestmark = pytest.mark.timeout(300)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["def main(", "import os\n\nclass Reader:\n    def read(self", "x"]
GREEDY: dict[str, Any] = {"model": "pair", "temperature": 0, "max_tokens": 5}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
        yield client


def expected(llm: LLM, prompts: Sequence[Any], **options: Any) -> list[RequestOutput]:
    return llm.generate(list(prompts), SamplingParams(max_tokens=5, **options))


def values_of(output: RequestOutput) -> list[float]:
    """Log probabilities of a prompt's tokens but the first."""
    return [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]


def check_echo(llm: LLM, prompt: str, text: str, logprobs: Any, output: RequestOutput, index: int = 0) -> None:
    """A choice's text and log probabilities, with those of its prompt in front."""
    assert llm.tokenizer is not None
    completion = output.completions[index]
    assert text == prompt + completion.text
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    assert logprobs["tokens"] == [llm.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    (first, *values), (no_top, *tops) = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert first is None and no_top is None
    own = [entry.logprob for entry in completion.logprobs or ()]
    assert values == pytest.approx(values_of(output) + own, abs=1e-4)
    assert all(1 <= len(top) <= 3 for top in tops) and len(tops) == len(values)
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], tops, strict=True)), "beside the likeliest"
    offsets = logprobs["text_offset"]
    assert len(offsets) == len(tokens) and offsets[0] == 0
    assert all(text[begin:].startswith(token) for begin, token in zip(offsets, logprobs["tokens"], strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_echo_puts_prompts_and_their_log_probabilities_in_front(client: openai.OpenAI, llm: LLM, n: int) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3} if n > 1 else {}
    answer = client.completions.create(prompt=PROMPTS, echo=True, logprobs=2, n=n, **GREEDY | options)
    outputs = expected(llm, PROMPTS, logprobs=2, prompt_logprobs=2, n=n, **options)
    assert [choice.index for choice in answer.choices] == list(range(n * len(PROMPTS)))
    for choice in answer.choices:
        prompt, index = divmod(choice.index, n)
        assert choice.logprobs is not None and choice.finish_reason == "length"
        check_echo(llm, PROMPTS[prompt], choice.text, choice.logprobs.to_dict(), outputs[prompt], index)
    assert answer.usage is not None and answer.usage.completion_tokens == 5 * n * len(PROMPTS)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_begins_each_choice_with_its_prompt(client: openai.OpenAI, llm: LLM, n: int) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3} if n > 1 else {}
    output = expected(llm, PROMPTS[1:2], logprobs=2, prompt_logprobs=2, n=n, **options)[0]
    texts: dict[int, str] = {}
    logprobs: dict[int, dict[str, list[Any]]] = {}
    stream = client.completions.create(prompt=PROMPTS[1], echo=True, logprobs=2, n=n, stream=True, **GREEDY | options)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            for name, found in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                logprobs.setdefault(choice.index, {}).setdefault(name, []).extend(found)  # type: ignore[call-overload]
    for index in range(n):
        check_echo(llm, PROMPTS[1], texts[index], logprobs[index], output, index)


def test_echo_alone_and_without_a_token(client: openai.OpenAI, llm: LLM) -> None:
    text = expected(llm, PROMPTS[:1])[0].completions[0].text
    whole = client.completions.create(prompt=PROMPTS[0], echo=True, **GREEDY).choices[0]
    assert (whole.text, whole.logprobs) == (PROMPTS[0] + text, None)
    nothing: dict[str, Any] = GREEDY | {"max_tokens": 0}
    answer = client.completions.create(prompt=PROMPTS, echo=True, logprobs=0, **nothing)
    for choice, output in zip(answer.choices, expected(llm, PROMPTS, prompt_logprobs=0), strict=True):
        assert (choice.text, choice.finish_reason) == (PROMPTS[choice.index], "length")
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(values_of(output), abs=1e-4)
        assert len(choice.logprobs.token_logprobs) == len(output.prompt_token_ids)
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    chunks = list(client.completions.create(prompt=PROMPTS[0], echo=True, stream=True, **nothing))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == PROMPTS[0] and choices[-1].finish_reason == "length"


def test_long_prompts_are_read_aside_and_echoed_the_same(server: Server, llm: LLM) -> None:
    prompt = "import os\n" * 500
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(prompt)[:810]
    text = llm.tokenizer.decode(tokens)
    body = GREEDY | {"prompt": tokens, "echo": True, "logprobs": 1}
    assert len(str(body)) > 4096
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    output = expected(llm, [tokens], prompt_logprobs=1, logprobs=1)[0]
    assert choice["text"] == text + output.completions[0].text
    assert choice["logprobs"]["token_logprobs"][1:810] == pytest.approx(values_of(output), abs=1e-4)


def test_prompt_logprobs_are_as_vllm_has_them(server: Server, llm: LLM) -> None:
    body = GREEDY | {"prompt": PROMPTS, "prompt_logprobs": 2, "logprobs": 1}
    for choice, output in zip(
        server.post(COMPLETIONS, body).json()["choices"], expected(llm, PROMPTS, prompt_logprobs=2), strict=True
    ):
        first, *entries = choice["prompt_logprobs"]
        assert first is None and choice["text"] == output.completions[0].text
        assert len(choice["logprobs"]["tokens"]) == 5
        for token, entry, given in zip(output.prompt_token_ids[1:], entries, values_of(output), strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(given, abs=1e-4)
            assert {1, 2} <= {one["rank"] for one in entry.values()} <= {1, 2, None}
            assert 2 <= len(entry) <= 3 and all(isinstance(one["decoded_token"], str) for one in entry.values())
    message = [{"role": "user", "content": "write a loop"}]
    chat = server.post(CHATS, GREEDY | {"messages": message, "prompt_logprobs": 0}).json()
    told = server.post("/tokenize", {"messages": message}).json()
    assert [entry and [*entry] for entry in chat["prompt_logprobs"]] == [None, *([str(t)] for t in told["tokens"][1:])]
    assert chat["usage"]["prompt_tokens"] == told["count"]


def score(choice: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """What EleutherAI's harness makes of a choice: its continuation's log probability, the generated token left out,
    and whether each of its tokens is the likeliest."""
    values = choice["logprobs"]["token_logprobs"][context_length:-1]
    tops = choice["logprobs"]["top_logprobs"][context_length:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def test_the_harness_scores_continuations_alike_with_and_without_speculation(server: Server, llm: LLM) -> None:
    """Its request, field by field, several at a time beside texts that are generated."""
    assert llm.tokenizer is not None
    contexts = [llm.tokenizer.encode(text) for text in ("import ", "def read(self", "class A:\n    ")]
    likeliest = [list(output.completions[0].token_ids[:3]) for output in expected(llm, contexts)]
    cases = [(context, continuation) for context in contexts for continuation in ([9, 300, 41], *likeliest)]
    bodies = [
        {
            "model": "pair",
            "prompt": [context + continuation],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        for context, continuation in cases
    ]

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = server.post(COMPLETIONS, body).json()["choices"][0]
        return choice

    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(ask, {**GREEDY, "prompt": "import os", "max_tokens": 300})
        scores = [score(choice, len(case[0])) for choice, case in zip(pool.map(ask, bodies), cases, strict=True)]
        beside.result()
        plain = [{**body, "draft_len": 0} for body in bodies]
        again = [score(choice, len(case[0])) for choice, case in zip(map(ask, plain), cases, strict=True)]
    assert scores == again
    assert [greedy for _, greedy in scores] == [
        continuation == likeliest[contexts.index(context)] for context, continuation in cases
    ]
    outputs = expected(llm, [context + continuation for context, continuation in cases], prompt_logprobs=0)
    assert [value for value, _ in scores] == pytest.approx([sum(values_of(one)[-3:]) for one in outputs], abs=1e-3)


def test_texts_become_tokens_and_tokens_texts(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    for text in (*PROMPTS, "", "\u2192\U0001f600" * 300):
        told = server.post("/tokenize", {"model": "pair", "prompt": text, "add_special_tokens": False}).json()
        assert told["tokens"] == llm.tokenizer.encode(text, add_special_tokens=False)
        assert (told["count"], told["max_model_len"], told["token_strs"]) == (len(told["tokens"]), 1024, None)
        assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    named = server.post("/tokenize", {"prompt": "def main(", "return_token_strs": True}).json()
    names = llm.tokenizer.vocabulary()
    assert [names[name] for name in named["token_strs"]] == named["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        (COMPLETIONS, {"prompt": "x", "echo": "yes"}, "echo must be true or false"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs must be between 0 and 20"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs must be between 0 and 20"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": True}, "prompt_logprobs must be a whole number"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not in streams"),
        (CHATS, {"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo is of completions"),
        ("/tokenize", {}, "prompt must be a text"),
        ("/tokenize", [], "must be a JSON object"),
        ("/tokenize", {"prompt": ["x"]}, "prompt must be a text"),
        ("/tokenize", {"promt": "x"}, "prompt must be a text"),
        ("/tokenize", {"prompt": "x", "temprature": 1}, "did you mean 'temperature'"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs must be true or false"),
        ("/detokenize", {}, "tokens must be a list"),
        ("/detokenize", {"token": [1]}, "did you mean 'tokens'"),
        ("/detokenize", {"tokens": [4096]}, "between 0 and 4095"),
        ("/detokenize", {"tokens": ["x"]}, "tokens must be a list of whole numbers"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "no model"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(server: Server, path: str, body: Any, line: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code in (400, 404)
    message = answer.json()["error"]["message"]
    assert line in message and "\n" not in message
