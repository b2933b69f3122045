"""The real `tritonclient`, over HTTP and gRPC, against a server on the shipped pair: the tokens and texts of
`trtrun run` from every model, in every way to ask for them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from servers import PATIENCE, Server
from triton_clients import (
    GREEDY,
    SEEDED,
    StreamReader,
    array_of,
    connected,
    expected,
    inputs_of,
    is_final,
    of_text,
    of_tokens,
    streamed_tokens,
    text_of,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from trtrun import LLM

pytestmark = pytest.mark.timeout(300)
PROMPT = "def main("
LONG: dict[str, Any] = {"max_tokens": 900, "end_id": -1}
both_protocols = pytest.mark.parametrize("protocol", [pytest.param("http", marks=pytest.mark.long), "grpc"])
both_ways = pytest.mark.parametrize(
    "options", [pytest.param(GREEDY, marks=pytest.mark.long), SEEDED], ids=["greedy", "seed"]
)
every_way = pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("http", GREEDY),
        ("grpc", SEEDED),
        pytest.param("http", SEEDED, marks=pytest.mark.long),
        pytest.param("grpc", GREEDY, marks=pytest.mark.long),
    ],
    ids=["http, greedy", "grpc, seed", "http, seed", "grpc, greedy"],
)


@pytest.fixture
def server(triton_server: Server) -> Server:
    return triton_server


def tokens_of(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


@every_way
def test_every_model_gives_the_tokens_of_the_python_api(
    server: Server, llm: LLM, protocol: str, options: dict[str, Any]
) -> None:
    tokens = tokens_of(llm, PROMPT)
    (completion,) = expected(llm, PROMPT, options)
    assert llm.tokenizer is not None
    with connected(protocol, server) as client:
        for model, more in (
            ("ensemble", {}),
            ("tensorrt_llm_bls", {"num_draft_tokens": 3, "use_draft_logits": True}),
            ("tensorrt_llm_bls", {"num_draft_tokens": 0, "stream": False}),
            ("tensorrt_llm_bls", {"num_draft_tokens": 10, "stream": True}),
        ):
            result = client.infer(model, inputs_of(protocol, of_text(PROMPT, options | more)), request_id="mine")
            assert text_of(result) == completion.text, (model, more)
            with_prompt = of_text(PROMPT, options | more | {"exclude_input_in_output": False})
            result = client.infer(model, inputs_of(protocol, with_prompt))
            assert text_of(result) == llm.tokenizer.decode([*tokens, *completion.token_ids])
        for model in ("tensorrt_llm", "tensorrt_llm_draft"):
            result = client.infer(model, inputs_of(protocol, of_tokens(tokens, options)))
            assert result.as_numpy("output_ids").tolist() == [[[*tokens, *completion.token_ids]]]
            assert result.as_numpy("sequence_length").tolist() == [[len(tokens) + len(completion.token_ids)]]
            values = of_tokens(tokens, options | {"exclude_input_in_output": True})
            result = client.infer(model, inputs_of(protocol, values))
            assert result.as_numpy("output_ids").tolist() == [[list(completion.token_ids)]]


def test_a_drafts_tokens_of_the_clients_own_change_nothing(server: Server, llm: LLM) -> None:
    tokens = tokens_of(llm, PROMPT)
    (completion,) = expected(llm, PROMPT, GREEDY)
    right, wrong = list(completion.token_ids[:6]), [*completion.token_ids[:2], 5, 6, 7, 8]
    with connected("grpc", server) as client:
        for draft in (right, wrong, right[:1], []):
            values = of_tokens(tokens, GREEDY) | {"draft_input_ids": np.array([draft], np.int32)}
            result = client.infer("tensorrt_llm", inputs_of("grpc", values))
            assert result.as_numpy("output_ids")[0, 0].tolist() == [*tokens, *completion.token_ids]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_preprocessing_and_postprocessing_are_the_tokenizer(server: Server, llm: LLM, protocol: str) -> None:
    assert llm.tokenizer is not None
    with connected(protocol, server) as client:
        values = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 7}
        result = client.infer("preprocessing", inputs_of(protocol, values))
        assert result.as_numpy("INPUT_ID").tolist() == [tokens_of(llm, PROMPT)]
        assert result.as_numpy("REQUEST_INPUT_LEN").tolist() == [[len(tokens_of(llm, PROMPT))]]
        assert result.as_numpy("REQUEST_OUTPUT_LEN").tolist() == [[7]]
        # The length 0 is what clients need that look for stop words in it themselves.
        assert result.as_numpy("STOP_WORDS_IDS").shape == result.as_numpy("BAD_WORDS_IDS").shape == (1, 2, 0)
        assert result.as_numpy("OUT_END_ID").tolist() == result.as_numpy("OUT_PAD_ID").tolist() == [[0]]
        words = {"STOP_WORDS_DICT": ["import", "", "os"], "BAD_WORDS_DICT": ["é"], "END_ID": 5, "PAD_ID": 6}
        bias = {"EMBEDDING_BIAS_WORDS": ["os"], "EMBEDDING_BIAS_WEIGHTS": [2.5]}
        result = client.infer("preprocessing", inputs_of(protocol, values | words | bias))
        spelled = [llm.tokenizer.encode(word, add_special_tokens=False) for word in ("import", "os")]
        flat, ends = result.as_numpy("STOP_WORDS_IDS")[0].tolist()
        assert flat[: len(spelled[0])] == spelled[0] and ends[:2] == [len(spelled[0]), len(spelled[0] + spelled[1])]
        assert result.as_numpy("OUT_END_ID").tolist() == [[5]] and result.as_numpy("OUT_PAD_ID").tolist() == [[6]]
        biases = result.as_numpy("EMBEDDING_BIAS")[0]
        assert [biases[token] for token in spelled[1]] == [2.5] * len(spelled[1])
        assert np.count_nonzero(biases) == len(set(spelled[1]))
        tokens = np.array([[tokens_of(llm, PROMPT)] * 2], np.int32)
        lengths = np.array([[tokens.shape[2], 2]], np.int32)
        result = client.infer(
            "postprocessing", inputs_of(protocol, {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths})
        )
        texts = [text.decode() for text in result.as_numpy("OUTPUT")]
        assert texts == [PROMPT, llm.tokenizer.decode(tokens[0, 0, :2].tolist())]


@both_protocols
def test_batches_have_a_prompt_and_parameters_a_row(server: Server, llm: LLM, protocol: str) -> None:
    prompts, lengths = ["def main(", "import os", "class A"], [20, 5, 11]
    seeds = np.array([[1], [2], [3]], np.uint64)
    rows: dict[str, Any] = {
        "max_tokens": np.array([[length] for length in lengths], np.int32),
        "temperature": np.full((3, 1), 0.5, np.float32),
        "top_p": np.ones((3, 1), np.float32),
        "random_seed": seeds,
        "num_return_sequences": np.full((3, 1), 2, np.int32),
        "return_log_probs": np.ones((3, 1), bool),
    }
    outputs = [
        completion
        for prompt, length, seed in zip(prompts, lengths, (1, 2, 3), strict=True)
        for completion in expected(llm, prompt, GREEDY, max_tokens=length, temperature=0.5, seed=seed, n=2, logprobs=0)
    ]
    with connected(protocol, server) as client:
        texts = np.array([[prompt] for prompt in prompts], np.object_)
        result = client.infer("tensorrt_llm_bls", inputs_of(protocol, {"text_input": texts, **rows}))
        assert [text.decode() for text in result.as_numpy("text_output")] == [output.text for output in outputs]
        assert result.as_numpy("batch_index").ravel().tolist() == [0, 0, 1, 1, 2, 2]
        assert result.as_numpy("sequence_index").ravel().tolist() == [0, 1] * 3
        for place, output in enumerate(outputs):
            logprobs = [entry.logprob for entry in output.logprobs or ()]
            found = result.as_numpy("output_log_probs")[place, 0]
            assert found[: len(logprobs)] == pytest.approx(logprobs, abs=1e-4) and not found[len(logprobs) :].any()
            assert result.as_numpy("cum_log_probs")[place, 0] == pytest.approx(sum(logprobs), abs=1e-3)
        ids = [tokens_of(llm, prompt) for prompt in prompts]
        padded = np.array([row + [0] * (9 - len(row)) for row in ids], np.int32)
        given = {
            {"max_tokens": "request_output_len", "top_p": "runtime_top_p"}.get(name, name): value
            for name, value in rows.items()
        }
        given |= {"input_ids": padded, "input_lengths": np.array([[len(row)] for row in ids], np.int32)}
        given |= {"pad_id": np.full((3, 1), 9, np.int32)}
        result = client.infer("tensorrt_llm", inputs_of(protocol, given))
        lengths_found = result.as_numpy("sequence_length").ravel().tolist()
        for place, output in enumerate(outputs):
            row = result.as_numpy("output_ids")[place, 0].tolist()
            assert row[: lengths_found[place]] == [*ids[place // 2], *output.token_ids]
            assert set(row[lengths_found[place] :]) <= {9}


@both_ways
def test_streams_add_up_and_say_which_response_is_the_last(server: Server, llm: LLM, options: dict[str, Any]) -> None:
    (completion,) = expected(llm, PROMPT, options)
    tokens = tokens_of(llm, PROMPT)
    with connected("grpc", server) as client:
        reader = StreamReader(client)
        reader.send("tensorrt_llm_bls", of_text(PROMPT, options | {"stream": True, "num_draft_tokens": 4}), "a")
        results = reader.read()
        assert len(results) > 2 and "".join(map(text_of, results)) == completion.text
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
        with pytest.raises(InferenceServerException, match="on that stream"):
            client.infer("tensorrt_llm", inputs_of("grpc", stop), request_id="mine")
    server.wait_idle()


def test_words_that_stop_stay_and_tokens_that_end_do_not(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    (completion,) = expected(llm, PROMPT, GREEDY)
    tokens, out = tokens_of(llm, PROMPT), list(completion.token_ids)
    place = next(place for place in range(4, len(out)) if out[place] not in out[:place])
    with connected("http", server) as client:

        def ask(model: str, values: dict[str, Any]) -> Any:
            return client.infer(model, inputs_of("http", values))

        ended = ask("tensorrt_llm", of_tokens(tokens, GREEDY | {"end_id": out[place]}))
        assert ended.as_numpy("output_ids")[0, 0].tolist() == tokens + out[:place]
        text = text_of(ask("ensemble", of_text(PROMPT, GREEDY | {"end_id": out[place]})))
        assert text == llm.tokenizer.decode(out[:place])
        # A word of two tokens, of which the first comes with others behind it, too.
        word = np.array([[[out[place - 1], out[place], 4000], [2, 3, -1]]], np.int32)
        stopped = ask("tensorrt_llm", of_tokens(tokens, GREEDY | {"stop_words_list": word}))
        assert stopped.as_numpy("output_ids")[0, 0].tolist() == tokens + out[: place + 1]
        word_text = llm.tokenizer.decode([out[place]])
        if llm.tokenizer.encode(word_text, add_special_tokens=False) == [out[place]]:
            result = ask("ensemble", of_text(PROMPT, GREEDY | {"stop_words": [word_text, "zzz"]}))
            assert text_of(result) == llm.tokenizer.decode(out[: place + 1])
        pieces = StreamReader(client_of_stream := grpcclient.InferenceServerClient(server.grpc_address))
        pieces.send("tensorrt_llm", of_tokens(tokens, GREEDY | {"stop_words_list": word, "stream": True}))
        assert streamed_tokens(pieces) == out[: place + 1]
        client_of_stream.close()
        banned = ask("ensemble", of_text(PROMPT, GREEDY | {"bad_words": [word_text, ""]}))
        assert text_of(banned) == expected(llm, PROMPT, GREEDY, bad_words=(word_text,))[0].text
        bias = {"embedding_bias_words": [word_text], "embedding_bias_weights": [-50.0]}
        spelled = llm.tokenizer.encode(word_text, add_special_tokens=False)
        lowered = expected(llm, PROMPT, GREEDY, logit_bias=dict.fromkeys(spelled, -50.0))[0].text
        assert text_of(ask("ensemble", of_text(PROMPT, GREEDY | bias))) == lowered
        dense = np.zeros((1, 4096), np.float32)
        dense[0, spelled] = -50.0
        values = of_tokens(tokens, GREEDY | {"embedding_bias": dense, "exclude_input_in_output": True})
        assert llm.tokenizer.decode(ask("tensorrt_llm", values).as_numpy("output_ids")[0, 0].tolist()) == lowered
    server.wait_idle()


def test_json_and_typed_contents_say_the_same_as_bytes(server: Server, llm: LLM) -> None:
    (completion,) = expected(llm, PROMPT, SEEDED)
    tokens = tokens_of(llm, PROMPT)
    with connected("http", server) as client:
        inputs = inputs_of("http", of_text(PROMPT, SEEDED), binary=False)
        wanted = [httpclient.InferRequestedOutput("text_output", binary_data=binary) for binary in (False, True)]
        for output in wanted:
            for compression in (None, "gzip", "deflate"):
                result = client.infer("ensemble", inputs, outputs=[output], request_compression_algorithm=compression)
                assert text_of(result) == completion.text
                assert [item["name"] for item in result.get_response()["outputs"]] == ["text_output"]
    message = service_pb2.ModelInferRequest(model_name="tensorrt_llm", id="typed")
    for name, value in of_tokens(tokens, SEEDED).items():
        array = array_of(name, value)
        field = {"i": "int_contents", "f": "fp32_contents", "u": "uint64_contents"}[array.dtype.kind]
        kind = {"i": "INT32", "f": "FP32", "u": "UINT64"}[array.dtype.kind]
        item = message.inputs.add(name=name, datatype=kind, shape=list(array.shape))
        getattr(item.contents, field).extend(array.ravel().tolist())
    with connected("grpc", server) as client:
        answer = client._client_stub.ModelInfer(message)
    result = grpcclient.InferResult(answer)
    assert result.as_numpy("output_ids")[0, 0].tolist() == [*tokens, *completion.token_ids]


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


def test_what_a_request_reused_of_the_kv_cache(server: Server, llm: LLM) -> None:
    prompt = "a prompt of its own, long enough for a block or two of the key-value cache " * 2
    values = of_text(prompt, GREEDY | {"return_kv_cache_reuse_stats": True})
    num_tokens = len(tokens_of(llm, prompt)) + GREEDY["max_tokens"]
    with connected("grpc", server) as client:
        for place in range(2):
            result = client.infer("ensemble", inputs_of("grpc", values))
            new, reused, total = (
                int(result.as_numpy(f"kv_cache_{name}_blocks")[0, 0]) for name in ("alloc_new", "reused", "alloc_total")
            )
            assert total == -(-num_tokens // 16) == new + reused
            assert (reused > 0) == (place > 0)
        result = client.infer("ensemble", inputs_of("grpc", of_text(prompt, GREEDY)))
        assert result.as_numpy("kv_cache_reused_blocks") is None and result.as_numpy("cum_log_probs") is None
        outputs = [grpcclient.InferRequestedOutput("cum_log_probs")]
        result = client.infer("ensemble", inputs_of("grpc", of_text(prompt, GREEDY)), outputs=outputs)
        assert result.as_numpy("cum_log_probs")[0, 0] < 0 and result.as_numpy("text_output") is None


def test_health_metadata_configuration_index_and_statistics(server: Server) -> None:
    names = {"ensemble", "tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft", "preprocessing", "postprocessing"}
    with connected("http", server) as http, connected("grpc", server) as grpc:
        for client in (http, grpc):
            assert client.is_server_live() and client.is_server_ready()
            assert all(client.is_model_ready(name) for name in names) and client.is_model_ready("ensemble", "1")
        assert http.get_server_metadata() == grpc.get_server_metadata(as_json=True)
        for name in names:
            assert http.get_model_metadata(name)["inputs"] == [
                item | {"shape": [int(size) for size in item["shape"]]}
                for item in grpc.get_model_metadata(name, as_json=True)["inputs"]
            ]
        (text,) = [item for item in http.get_model_metadata("ensemble")["inputs"] if item["name"] == "text_input"]
        assert text == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
        config = http.get_model_config("tensorrt_llm")
        assert config["max_batch_size"] == 8 and config["model_transaction_policy"] == {"decoupled": True}
        (words,) = [item for item in config["input"] if item["name"] == "stop_words_list"]
        assert words == {"name": "stop_words_list", "data_type": "TYPE_INT32", "dims": [2, -1], "optional": True}
        told = grpc.get_model_config("tensorrt_llm").config
        assert told.max_batch_size == 8 and told.model_transaction_policy.decoupled
        assert {item["name"] for item in http.get_model_repository_index()} == names
        assert {item.state for item in grpc.get_model_repository_index().models} == {"READY"}
        before = http.get_inference_statistics("preprocessing")["model_stats"][0]
        grpc.infer("preprocessing", inputs_of("grpc", {"QUERY": "x", "REQUEST_OUTPUT_LEN": 1}))
        after = http.get_inference_statistics("preprocessing")["model_stats"][0]
        assert after["inference_count"] == before["inference_count"] + 1
        assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
        assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
        told = grpc.get_inference_statistics("preprocessing").model_stats[0]
        assert told.inference_count == after["inference_count"] and told.last_inference == after["last_inference"]
        assert {item["name"] for item in http.get_inference_statistics()["model_stats"]} == names
        assert grpc.get_system_shared_memory_status(as_json=True) == {} and http.get_system_shared_memory_status() == []
        for client in (http, grpc):
            for call in (
                lambda client=client: client.load_model("ensemble"),
                lambda client=client: client.unload_model("ensemble"),
                lambda client=client: client.register_system_shared_memory("region", "/key", 16),
                lambda client=client: client.get_model_config("ensembel"),
                lambda client=client: client.get_model_metadata("ensemble", "2"),
            ):
                with pytest.raises(InferenceServerException) as caught:
                    call()
                assert "\n" not in str(caught.value)
        with pytest.raises(InferenceServerException, match="did you mean 'ensemble'"):
            grpc.get_model_config("ensembel")


CURLS = [
    # Seed 001, its last command; and seed 002's.
    ("tensorrt_llm_bls", {"text_input": "Continue writing the following story: James Best, best known for his",
                          "max_tokens": 128, "num_draft_tokens": 10, "use_draft_logits": True, "stream": False}),
    ("ensemble", {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": ""}),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("model", "body"), CURLS, ids=[model for model, _ in CURLS])
def test_the_seeds_curl_lines(server: Server, llm: LLM, model: str, body: dict[str, Any]) -> None:
    url = f"{server.url}/v2/models/{model}/generate"
    words = ["curl", "-sS", "-X", "POST", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
    (completion,) = expected(llm, body["text_input"], GREEDY, max_tokens=body["max_tokens"])
    answer = json.loads(done.stdout)
    assert answer["text_output"] == completion.text
    assert answer["model_name"] == model and answer["model_version"] == "1"


@both_ways
def test_generate_takes_parameters_and_ids_and_streams(server: Server, llm: LLM, options: dict[str, Any]) -> None:
    completions = expected(llm, PROMPT, options, n=2)
    body = {"id": "42", "text_input": PROMPT, "parameters": {**options, "num_return_sequences": 2, "top_k": None}}
    answer = server.post("/v2/models/ensemble/versions/1/generate", body).json()
    assert answer["id"] == "42" and answer["sequence_index"] == [0, 1]
    assert answer["text_output"] == [completion.text for completion in completions]
    texts = ["", ""]
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{server.url}/v2/models/tensorrt_llm_bls/generate_stream", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                event = json.loads(line.removeprefix("data: "))
                assert event["id"] == "42"
                texts[event["sequence_index"]] += event["text_output"]
    assert texts == answer["text_output"]
    tokens = tokens_of(llm, PROMPT)
    values = {"input_ids": tokens, "input_lengths": len(tokens), "request_output_len": 3, "stop_words_list": [[5], [1]]}
    answer = server.post("/v2/models/tensorrt_llm/generate", values).json()
    assert answer["output_ids"][:-3] == tokens and answer["sequence_length"] == len(tokens) + 3
