"""Logits over Triton's protocol, by the real `tritonclient`: those of the Python API, to the bit, within a bound."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import numpy as np
import pytest
from servers import PATIENCE, PLAIN, Server, wait_until
from triton_clients import (
    GREEDY,
    LONG,
    MODULES,
    PROMPT,
    SEEDED,
    StreamReader,
    both_protocols,
    connected,
    inputs_of,
    of_text,
    of_tokens,
    text_of,
    tokens_of,
)
from tritonclient.utils import InferenceServerException

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)

WANTED = {"return_context_logits": True, "return_generation_logits": True}
ASKED = SamplingParams(max_tokens=12, return_context_logits=True, return_generation_logits=True)
GENERATE = "/v2/models/ensemble/generate"
MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")


def logits(llm: LLM, prompt: Any, sampling: SamplingParams = ASKED) -> tuple[np.ndarray, np.ndarray]:
    """Those of the Python API: [prompt, vocab] and [tokens, vocab]."""
    output = llm.generate([prompt], sampling)[0]
    assert output.context_logits is not None and output.completions[0].generation_logits is not None
    return output.context_logits, output.completions[0].generation_logits


def inputs_for(llm: LLM, model: str, options: dict[str, Any]) -> dict[str, Any]:
    return of_tokens(tokens_of(llm, PROMPT), options) if model == "tensorrt_llm" else of_text(PROMPT, options)


def same(result: Any, context: np.ndarray, generation: np.ndarray) -> None:
    """A result has these, behind its dimensions of the batch and of the beam."""
    found = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert [one.dtype for one in found] == [np.float32] * 2
    assert np.array_equal(found[0], context[None]) and np.array_equal(found[1], generation[None, None])


@both_protocols
@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seed"])
def test_they_are_those_of_the_python_api(server: Server, llm: LLM, protocol: str, options: dict[str, Any]) -> None:
    seeded = {"temperature": float(np.float32(0.9)), "seed": 7, "presence_penalty": float(np.float32(0.4))}
    sampling = SamplingParams(**(vars(ASKED) | (seeded if options is SEEDED else {})))
    whole = logits(llm, PROMPT, sampling)
    with connected(protocol, server) as client:
        for model in MODELS:
            inputs = inputs_of(protocol, inputs_for(llm, model, options | WANTED))
            result = client.infer(model, inputs)
            same(result, *whole)
            if model == "tensorrt_llm":
                assert result.as_numpy("output_ids").shape[-1] == len(whole[1]) + len(tokens_of(llm, PROMPT))
            plain = client.infer(model, inputs_of(protocol, inputs_for(llm, model, options)))
            for name in ("context_logits", "generation_logits"):
                assert plain.as_numpy(name) is None
            # Naming an output asks for it.
            outputs = [MODULES[protocol].InferRequestedOutput("generation_logits")]
            named = client.infer(model, inputs_of(protocol, inputs_for(llm, model, options)), outputs=outputs)
            assert np.array_equal(named.as_numpy("generation_logits")[0, 0], whole[1])
            assert named.as_numpy("context_logits") is None


def test_they_are_there_as_json_and_in_generate(server: Server, llm: LLM) -> None:
    context, generation = logits(llm, PROMPT)
    with connected("http", server) as client:
        inputs = inputs_of("http", of_text(PROMPT, GREEDY | WANTED), binary=False)
        names = ("context_logits", "generation_logits")
        outputs = [MODULES["http"].InferRequestedOutput(name, binary_data=False) for name in names]
        same(client.infer("ensemble", inputs, outputs=outputs), context, generation)
    body = {"text_input": PROMPT, **GREEDY, **WANTED}
    answer = httpx.post(f"{server.url}/v2/models/ensemble/generate", json=body, timeout=PATIENCE, verify=PLAIN).json()
    assert np.array_equal(np.array(answer["context_logits"], np.float32), context.ravel())
    assert np.array_equal(np.array(answer["generation_logits"], np.float32), generation.ravel())
    parts = []
    with httpx.stream(
        "POST", f"{server.url}/v2/models/ensemble/generate_stream", json=body | {"stream": True}, timeout=PATIENCE,
        verify=PLAIN,
    ) as stream:  # fmt: skip
        parts = [json.loads(line.removeprefix("data:")) for line in stream.iter_lines() if line]
    assert np.array_equal(np.array(parts[0]["context_logits"], np.float32), context.ravel())
    pieces = np.concatenate([part["generation_logits"] for part in parts if part["generation_logits"]])
    assert np.array_equal(pieces.astype(np.float32), generation.ravel())


@pytest.mark.parametrize("model", MODELS)
def test_streams_have_the_prompts_first_and_those_of_the_new_tokens(server: Server, llm: LLM, model: str) -> None:
    context, generation = logits(llm, PROMPT)
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send(model, inputs_for(llm, model, GREEDY | WANTED | {"stream": True}))
        first, *others = reader.read()
        assert len(others) > 1 and np.array_equal(first.as_numpy("context_logits")[0], context)
        assert all(result.as_numpy("context_logits") is None for result in others)
        pieces = [result.as_numpy("generation_logits") for result in (first, *others)]
        assert np.array_equal(np.concatenate([piece[0, 0] for piece in pieces if piece.size]), generation)
        if model == "tensorrt_llm":
            assert [piece.shape[2] for piece in pieces] == [
                result.as_numpy("output_ids").shape[2] for result in (first, *others)
            ]


@both_protocols
def test_rows_of_a_batch_are_filled_up_and_a_long_request_is_read_apart(
    server: Server, llm: LLM, protocol: str
) -> None:
    prompts, lengths = ["def main(", "#" * 4200 + "\nimport os"], [9, 4]
    rows = {
        "text_input": np.array([[prompt] for prompt in prompts], np.object_),
        "max_tokens": np.array([[length] for length in lengths], np.int32),
        **{name: np.full((2, 1), True) for name in WANTED},
    }
    with connected(protocol, server) as client:
        result = client.infer("ensemble", inputs_of(protocol, rows))
    context, generation = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert generation.shape[:3] == (2, 1, 9)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = SamplingParams(max_tokens=length, return_context_logits=True, return_generation_logits=True)
        of_prompt, of_tokens_ = logits(llm, prompt, sampling)
        assert np.array_equal(context[row, : len(of_prompt)], of_prompt) and not context[row, len(of_prompt) :].any()
        assert np.array_equal(generation[row, 0, : len(of_tokens_)], of_tokens_)
        assert not generation[row, 0, len(of_tokens_) :].any()


@both_protocols
def test_what_is_too_large_is_refused_with_the_bytes_and_the_option(server: Server, llm: LLM, protocol: str) -> None:
    eight = {"text_input": np.array([[PROMPT]] * 8, np.object_), "max_tokens": np.full((8, 1), 4000, np.int32)}
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"max_tokens": 900, "num_return_sequences": 8, "return_generation_logits": True},
            "return_generation_logits: logits of 900 tokens, 4096 each, for each of 8 completions take "
            f"{7200 * 4096 * 4} bytes, and a request may have {1 << 25} (server.max_logits_bytes)",
        ),
        (
            eight | {name: np.full((8, 1), True) for name in WANTED},
            "return_context_logits and return_generation_logits: logits of 1024 tokens, 4096 each, for each of 8",
        ),
        (GREEDY | WANTED | {"num_return_sequences": 2}, "num_return_sequences: must be 1 with return_context_logits"),
        (GREEDY | WANTED | {"beam_width": 2}, "beam_width: there is no beam search here"),
    ]
    with connected(protocol, server) as client:
        for options, line in cases:
            with pytest.raises(InferenceServerException) as caught:
                client.infer("tensorrt_llm_bls", inputs_of(protocol, {"text_input": PROMPT, **options}))
            assert line in str(caught.value)
            assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
        several = {"max_tokens": 12, "num_return_sequences": 2, "return_generation_logits": True}
        found = client.infer("tensorrt_llm_bls", inputs_of(protocol, of_text(PROMPT, several)))
        assert found.as_numpy("generation_logits").shape[:2] == (2, 1)


TWICE = {"text_input": "\n", "max_tokens": 900, "num_return_sequences": 2, "return_generation_logits": True}
ENDED = TWICE | {"stop_words": ["\n", " ", "e"]}
"""Of which 29 MB are counted, with and without an early end: more than half of what all may have."""


def fit(server: Server) -> bool | None:
    """Whether there is room for logits of another request."""
    answer = server.post(GENERATE, ENDED)
    assert answer.status_code in (200, 429), answer.text
    return answer.status_code == 200 or None


def refuse(server: Server) -> None:
    """A request that asks for more is turned away, as where the queue is full."""
    answer = server.post(GENERATE, TWICE)
    assert answer.status_code == 429 and answer.headers["retry-after"]
    assert "server.max_total_logits_bytes" in answer.json()["error"]
    with connected("grpc", server) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("ensemble", inputs_of("grpc", TWICE | {"text_input": PROMPT}))
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    assert server.post(GENERATE, {"text_input": PROMPT, **GREEDY}).status_code == 200, "others ask for none"


def test_logits_of_all_requests_have_one_bound(server: Server) -> None:
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send("ensemble", of_text(PROMPT, LONG | WANTED | {"stream": True}))
        reader.take()
        refuse(server)
        client.stop_stream(cancel_requests=True)
        wait_until(lambda: fit(server), "room for logits")
        for _ in range(2):  # each lets go of what it has
            wait_until(lambda: fit(server), "room for logits")
            client.infer("ensemble", inputs_of("grpc", of_text(PROMPT, GREEDY | WANTED | {"max_tokens": 900})))
    url = f"{server.url}/v2/models/ensemble/generate_stream"
    for _ in range(2):
        with httpx.stream("POST", url, json=ENDED | {"stream": True}, timeout=PATIENCE) as stream:
            assert stream.status_code == 200 and stream.read()
        wait_until(lambda: fit(server), "room for logits")


def test_logits_count_until_their_client_has_read_them(server: Server) -> None:
    """The rows have ended long before."""
    names = ("max_tokens", "return_generation_logits")
    with connected("http", server) as client:
        body, length = client.generate_request_body(
            inputs_of("http", {"text_input": PROMPT, **{name: TWICE[name] for name in names}}),
            outputs=[MODULES["http"].InferRequestedOutput("generation_logits")],
        )
    head = f"POST /v2/models/ensemble/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
        sized = f"Inference-Header-Content-Length: {length}\r\n" if length is not None else ""
        connection.sendall((head + sized + "\r\n").encode() + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        server.wait_idle()
        refuse(server)
        size = sum(iter(lambda: len(connection.recv(1 << 20)), 0))
        assert size > 900 * 4096 * 4
    wait_until(lambda: fit(server), "room for logits")


def test_a_stream_with_logits_is_stopped_in_the_middle(server: Server, llm: LLM) -> None:
    tokens = tokens_of(llm, PROMPT)
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send("tensorrt_llm", of_tokens(tokens, LONG | WANTED | {"stream": True}), "mine")
        found = [reader.take()]
        reader.send(
            "tensorrt_llm", {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}, "mine"
        )
        found += reader.read()
        assert (
            sum(result.as_numpy("output_ids").shape[2] for result in found if result.as_numpy("output_ids") is not None)
            < 900
        )
    server.wait_idle()
    with connected("grpc", server) as client:
        assert text_of(client.infer("ensemble", inputs_of("grpc", of_text(PROMPT, GREEDY)))), "the server goes on"


def test_a_client_that_goes_away_frees_its_row(server: Server) -> None:
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send("ensemble", of_text(PROMPT, LONG | WANTED | {"stream": True}))
        reader.take()
        client.stop_stream(cancel_requests=True)
    server.wait_idle()
