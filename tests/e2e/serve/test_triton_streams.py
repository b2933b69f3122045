"""Streams of Triton's models by the real `tritonclient`, and many requests at once."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio as grpcaio
import tritonclient.http.aio as httpaio
from servers import PATIENCE, Server, wait_until
from triton_clients import (
    GREEDY,
    LONG,
    PROMPT,
    StreamReader,
    both_ways,
    connected,
    expected,
    inputs_of,
    is_final,
    of_text,
    of_tokens,
    streamed_tokens,
    text_of,
    tokens_of,
)
from tritonclient.utils import InferenceServerException

from trtrun import LLM

pytestmark = pytest.mark.timeout(300)


@both_ways
def test_streams_add_up_and_say_which_response_is_the_last(server: Server, llm: LLM, options: dict[str, Any]) -> None:
    (completion,) = expected(llm, PROMPT, options)
    tokens = tokens_of(llm, PROMPT)
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send("tensorrt_llm_bls", of_text(PROMPT, options | {"stream": True, "num_draft_tokens": 4}), "a")
        results = reader.read()
        # A reader that is late gets pieces together.
        assert len(results) > 1 and "".join(map(text_of, results)) == completion.text
        assert {result.get_response().id for result in results} == {"a"}
        assert [is_final(result) for result in results] == [False] * (len(results) - 1) + [True]
        reader.send("ensemble", of_text(PROMPT, options), "b", enable_empty_final_response=True)
        whole, last = reader.read()
        assert text_of(whole) == completion.text and not is_final(whole)
        assert not last.get_response().outputs and last.get_response().id == "b"
        reader.send("tensorrt_llm", of_tokens(tokens, options | {"stream": True}), "c")
        assert streamed_tokens(reader) == list(completion.token_ids)


def test_a_stream_has_many_requests_at_work_and_an_error_ends_its_own_alone(server: Server, llm: LLM) -> None:
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        names = [f"def f{number}(" for number in range(4)]
        for name in names:
            reader.send("tensorrt_llm_bls", of_text(name, GREEDY | {"stream": True}), name)
        reader.send("ensemble", of_text("x", {"max_tokens": 0}), "wrong")
        texts = dict.fromkeys(names, "")
        num_ended = num_errors = 0
        while num_ended < len(names):
            try:
                result = reader.take()
            except InferenceServerException as error:
                assert "max_tokens: must be at least 1" in str(error)
                num_errors += 1
                continue
            texts[result.get_response().id] += text_of(result)
            num_ended += is_final(result)
        assert num_errors == 1
        assert texts == {name: expected(llm, name, GREEDY)[0].text for name in names}
        rows = np.array([[name] for name in names], np.object_)
        reader.send("ensemble", {"text_input": rows, "max_tokens": np.full((4, 1), GREEDY["max_tokens"], np.int32)})
        found = {int(result.as_numpy("batch_index")[0, 0]): text_of(result) for result in reader.read()}
        assert found == dict(enumerate(texts.values()))


def test_a_request_is_stopped_on_its_stream_by_its_id(server: Server, llm: LLM) -> None:
    tokens = tokens_of(llm, PROMPT)
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send("tensorrt_llm", of_tokens(tokens, LONG | {"stream": True}), "mine")
        found = reader.take().as_numpy("output_ids")[0, 0].tolist()
        reader.send("tensorrt_llm", stop, "other")
        reader.send("tensorrt_llm", stop, "mine")
        num_empty = num_final = 0
        while num_final < 3:
            result = reader.take()
            num_final += is_final(result)
            piece = result.as_numpy("output_ids")
            num_empty += piece is None
            found += [] if piece is None else piece[0, 0].tolist()
        assert num_empty == 2 and len(found) < 900
        (completion,) = expected(llm, PROMPT, GREEDY, max_tokens=len(found), ignore_eos=True)
        assert tuple(found) == completion.token_ids
    with connected("http", server) as client, pytest.raises(InferenceServerException, match="send it there"):
        client.infer("tensorrt_llm", inputs_of("http", stop), request_id="mine")
    server.wait_idle()


def test_a_call_is_stopped_on_its_connection_by_its_id(server: Server, llm: LLM) -> None:
    """`--stop-after-ms` of the backend's own client, without `--streaming`."""
    tokens = tokens_of(llm, PROMPT)
    stop = inputs_of("grpc", {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True})
    found: queue.Queue[Any] = queue.Queue()
    with connected("grpc", server) as client:
        # More completions than rows: however fast the machine, it is at work when the others have spoken.
        asked = inputs_of("grpc", of_tokens(tokens, LONG | {"num_return_sequences": 24}))
        client.async_infer("tensorrt_llm", asked, lambda result, error: found.put(error or result), request_id="mine")
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] or None, "the request is at work")
        # Clients of one process share their connections, unless they are told not to.
        own = [("grpc.use_local_subchannel_pool", 1)]
        with tritonclient.grpc.InferenceServerClient(server.grpc_address, channel_args=own) as stranger:
            assert stranger.infer("tensorrt_llm", stop, request_id="mine").as_numpy("output_ids") is None
        with pytest.raises(queue.Empty):
            found.get_nowait()
        assert client.infer("tensorrt_llm", stop, request_id="mine").as_numpy("output_ids") is None
        result = found.get(timeout=PATIENCE)
    length = result.as_numpy("sequence_length")[0, 0]
    written = result.as_numpy("output_ids")[0, 0, len(tokens) : length].tolist()
    assert result.as_numpy("output_ids").shape[0] == 24
    (completion,) = expected(llm, PROMPT, GREEDY, max_tokens=900, ignore_eos=True)
    assert tuple(written) == completion.token_ids[: len(written)]
    assert result.as_numpy("sequence_length")[-1, 0] == len(tokens), "what had no row yet has nothing"
    server.wait_idle()


async def ask_async(server: Server, count: int) -> tuple[list[str], list[str]]:
    """Texts by the asyncio clients of both protocols, all at once."""
    async with (
        httpaio.InferenceServerClient(server.url.partition("://")[2], conn_timeout=PATIENCE) as http,
        grpcaio.InferenceServerClient(server.grpc_address) as grpc,
    ):

        async def ask(protocol: str, client: Any, number: int) -> str:
            values = of_text(f"def f{number}(", GREEDY)
            return text_of(await client.infer("ensemble", inputs_of(protocol, values)))

        work = [ask(*of, number) for of in (("http", http), ("grpc", grpc)) for number in range(count)]
        texts = await asyncio.gather(*work)
        streamed = []

        async def requests() -> Any:
            values = of_text("def f0(", GREEDY | {"stream": True})
            yield {"model_name": "ensemble", "inputs": inputs_of("grpc", values)}

        async for result, error in grpc.stream_infer(requests()):
            assert error is None
            streamed.append(text_of(result))
        return texts, streamed


def test_asyncio_clients_and_futures(server: Server, llm: LLM) -> None:
    texts = [expected(llm, f"def f{number}(", GREEDY)[0].text for number in range(4)]
    found, streamed = asyncio.run(ask_async(server, 4))
    assert found == texts * 2 and "".join(streamed) == texts[0]
    with connected("http", server) as client:
        inputs = [inputs_of("http", of_text(f"def f{number}(", GREEDY)) for number in range(4)]
        futures = [client.async_infer("ensemble", item) for item in inputs]
        assert [text_of(future.get_result()) for future in futures] == texts
