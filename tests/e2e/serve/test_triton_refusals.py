"""What Triton's front refuses, and how: in one line, with the nearest known name, in the shape of each protocol; and
clients that go away."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import grpc
import httpx
import pytest
from servers import PATIENCE, PLAIN, Server
from triton_clients import LONG, StreamReader, connected, inputs_of, of_text
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.timeout(300)
JSON_LENGTH = "Inference-Header-Content-Length"


def tensor(name: str, datatype: str, shape: Any, data: Any = None, **others: Any) -> dict[str, Any]:
    found = {"name": name, "datatype": datatype, "shape": shape, **others}
    return found if data is None else found | {"data": data}


TEXT, LENGTH = tensor("text_input", "BYTES", [1, 1], ["x"]), tensor("max_tokens", "INT32", [1, 1], [2])


def infer(*more: Any, **changes: Any) -> dict[str, Any]:
    return {"inputs": [TEXT, LENGTH, *more], **changes}


def generate(**changes: Any) -> dict[str, Any]:
    values = {"text_input": "x", "max_tokens": 2, **changes}
    return {name: value for name, value in values.items() if value != "absent"}


def tokens(**changes: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 2, **changes}


INFER, GENERATE = "/v2/models/ensemble/infer", "/v2/models/ensemble/generate"
BLS, TOKENS = "/v2/models/tensorrt_llm_bls/generate", "/v2/models/tensorrt_llm/generate"
BAD: list[tuple[str, Any, int, str]] = [
    (INFER, b"{", 400, "not valid JSON"),
    (INFER, [], 400, "must be a JSON object"),
    (INFER, {}, 400, "inputs is missing"),
    (INFER, infer(input=[]), 400, "did you mean 'inputs'?"),
    (INFER, infer(id=5), 400, "id must be a text"),
    (INFER, infer("x"), 400, "an input must be a JSON object"),
    (INFER, infer({"name": 5}), 400, "name must be a text"),
    (INFER, infer({"name": "top_k"}), 400, "needs datatype"),
    (INFER, {"inputs": [TEXT]}, 400, "needs the input max_tokens"),
    (INFER, infer(TEXT), 400, "stands twice"),
    (INFER, infer(tensor("temprature", "FP32", [1, 1], [1.0])), 400, "did you mean 'temperature'?"),
    (INFER, infer(tensor("temperature", "FP64", [1, 1], [1.0])), 400, "no datatype 'FP64' here (did you mean"),
    (INFER, infer(tensor("temperature", "INT32", [1, 1], [1])), 400, "ensemble wants FP32"),
    (INFER, infer(tensor("temperature", "FP32", [1], [1.0])), 400, "shape [1]; ensemble wants [-1, 1]"),
    (INFER, infer(tensor("temperature", "FP32", [1, 2], [1.0, 1.0])), 400, "wants [-1, 1]"),
    (INFER, infer(tensor("temperature", "FP32", [2, 1], [1.0, 1.0])), 400, "a batch of 2, where text_input has"),
    (INFER, infer(tensor("temperature", "FP32", [1, 1], [])), 400, "0 values for a shape of 1"),
    (INFER, infer(tensor("temperature", "FP32", [1, 1], ["hot"])), 400, "'hot' is no FP32"),
    (INFER, infer(tensor("temperature", "FP32", [1, 1], [1e300])), 400, "is no FP32"),
    (INFER, infer(tensor("temperature", "FP32", [1, 1], 1.0)), 400, "data must be a list"),
    (INFER, infer(tensor("temperature", "FP32", [-1, 1], [1.0])), 400, "whole numbers from 0"),
    (INFER, infer(tensor("temperature", "FP32", [2**39, 2**39], [1.0])), 400, "larger than any tensor"),
    (INFER, infer(tensor("lora_weights", "FP16", [0, 2**39, 2**39], [])), 400, "larger than any tensor"),
    (INFER, infer(tensor("temperature", "FP32", [1, 1], [10**400])), 400, "is no FP32"),
    (INFER, infer(tensor("temperature", "FP32", [1] * 9, [1.0])), 400, "9 dimensions"),
    (INFER, infer(tensor("top_k", "INT32", [1, 1], [2**31])), 400, "is no INT32"),
    (INFER, infer(tensor("top_k", "INT32", [1, 1], [True])), 400, "is no INT32"),
    (INFER, infer(tensor("stream", "BOOL", [1, 1], [1])), 400, "is no BOOL"),
    (INFER, infer(tensor("bad_words", "BYTES", [1, 2], ["a", ["b"]])), 400, "mixes lists and values"),
    (INFER, infer(tensor("top_k", "INT32", [1, 1], parameters={"binary_data_size": 4})), 400, "0 bytes are left"),
    (INFER, infer(tensor("top_k", "INT32", [1, 1], parameters={"shared_memory_region": "a"})), 400, "shared memory"),
    (INFER, infer(outputs=[{"name": "text"}]), 400, "did you mean 'text_output'?"),
    (INFER, infer(outputs=[{"name": "text_output", "parameters": {"classification": 2}}]), 400, "classification"),
    (INFER, {"inputs": [tensor("text_input", "BYTES", [0, 1], []), tensor("max_tokens", "INT32", [0, 1], [])]}, 400,
     "a batch of 0; ensemble takes 1 to 8"),
    (INFER, b"x" * 20001, 413, "larger than 20000 bytes"),
    (GENERATE, [], 400, "must be a JSON object"),
    (GENERATE, generate(text_input="absent"), 400, "needs the input text_input"),
    (GENERATE, generate(text_inputs="x"), 400, "did you mean 'text_input'?"),
    (GENERATE, generate(parameters=5), 400, "parameters must be an object"),
    (GENERATE, generate(parameters={"max_tokens": 5}), 400, "give it once"),
    (GENERATE, generate(text_input=""), 400, "prompt is empty"),
    (GENERATE, generate(text_input=["x", "y"]), 400, "shape [1, 2]"),
    (GENERATE, generate(text_input="\ud800"), 400, "surrogate"),
    (GENERATE, generate(max_tokens=0), 400, "max_tokens: must be at least 1"),
    (GENERATE, generate(max_tokens="2"), 400, "'2' is no INT32"),
    (GENERATE, generate(text_input="x " * 3000), 400, "max_seq_len 1024"),
    (GENERATE, generate(top_k=-1), 400, "top_k: must be 0 (off) or more"),
    (GENERATE, generate(top_p=1.5), 400, "top_p: must be between 0 and 1"),
    (GENERATE, generate(temperature=-1.0, top_k=5), 400, "temperature must be 0 or"),
    (GENERATE, generate(repetition_penalty=0.0), 400, "repetition_penalty must be"),
    (GENERATE, generate(num_return_sequences=0), 400, "n must be between 1 and 128"),
    (GENERATE, generate(num_return_sequences=100), 400, "more than the 32"),
    (GENERATE, generate(end_id=-2), 400, "end_id: must be a token id, or -1"),
    (GENERATE, generate(max_new_tokens=5), 400, "ensemble has no input 'max_new_tokens' (did you mean 'max_tokens'?)"),
    (GENERATE, generate(accumulate=[1]), 400, "a parameter of a request is a text, a number, true or false"),
    (GENERATE, generate(**{f"name {n}": n for n in range(65)}), 400, "more than 64 names that are no inputs"),
    (GENERATE, generate(num_draft_tokens=3), 400, "ensemble has no input 'num_draft_tokens'"),
    (GENERATE, generate(stop_words=["a"] * 1025), 400, "stop_words has 1025 entries; 1024 are the most"),
    (GENERATE, generate(bad_words=["a"] * 1025), 400, "bad_words has 1025 entries"),
    (GENERATE, generate(embedding_bias_words=["a"] * 1025), 400, "embedding_bias_words has 1025 entries"),
    (TOKENS, tokens(stop_words_list=[[5] * 1025, list(range(1, 1026))]), 400, "stop_words_list has 1025 entries"),
    (GENERATE, generate(embedding_bias_words=["a"]), 400, "0 weights for 1 words"),
    (GENERATE, generate(embedding_bias_words=["a"], embedding_bias_weights=[500.0]), 400, "between -100 and 100"),
    (BLS, generate(num_draft_tokens=-1), 400, "num_draft_tokens: must be 0 (plain decoding) or more"),
    (BLS, generate(beam_width=2), 400, "beam_width: there is no beam search here: leave the input out"),
    (BLS, generate(lora_task_id=3), 400, "lora_task_id: no adapters are named in the configuration: leave the input"),
    (BLS, generate(return_context_logits=True, num_return_sequences=2), 400, "num_return_sequences: must be 1 with"),
    (BLS, generate(return_generation_logits=True, max_tokens=900, num_return_sequences=8), 400, "server.max_logits"),
    (BLS, generate(prompt_vocab_size=7), 400, "prompt_vocab_size: this is not supported"),
    (BLS, generate(image_url_input="http://x"), 400, "image_url_input: this is not supported"),
    (BLS, generate(decoder_text_input="x"), 400, "decoder_text_input: this is not supported"),
    (TOKENS, tokens(input_lengths=3), 400, "input_lengths: 3 of the 2 tokens"),
    (TOKENS, tokens(input_lengths=0), 400, "prompt is empty"),
    (TOKENS, tokens(input_ids=[5, 4096]), 400, "between 0 and 4095"),
    (TOKENS, tokens(request_output_len=0), 400, "request_output_len: must be at least 1"),
    (TOKENS, tokens(max_tokens=2), 400, "tensorrt_llm has no input 'max_tokens'"),
    (TOKENS, tokens(stop_words_list=[[5], [2]]), 400, "stop_words_list: word 0 ends at 2"),
    (TOKENS, tokens(stop_words_list=[5, 1]), 400, "shape [1, 2]"),
    (TOKENS, tokens(draft_logits=[[0.5]]), 400, "draft_logits: drafts are compared"),
    (TOKENS, tokens(draft_acceptance_threshold=0.5), 400, "accepted without loss alone"),
    (TOKENS, tokens(decoder_input_ids=[1, 2]), 400, "decoder_input_ids: this is not supported"),
    (TOKENS, tokens(stop=True), 400, "send it there, with its id"),
    ("/v2/models/preprocessing/generate", {"QUERY": "x", "REQUEST_OUTPUT_LEN": 1, "IMAGE_URL": "a"}, 400, "IMAGE_URL"),
    ("/v2/models/preprocessing/generate",
     {"QUERY": "x", "REQUEST_OUTPUT_LEN": 1, "BAD_WORDS_DICT": ["a"] * 1025}, 400, "BAD_WORDS_DICT has 1025 entries"),
    ("/v2/models/postprocessing/generate", {"TOKENS_BATCH": [[5]], "SEQUENCE_LENGTH": [2]}, 400, "between 0 and 1"),
    ("/v2/models/postprocessing/generate", {"TOKENS_BATCH": [[-5]], "SEQUENCE_LENGTH": [1]}, 400, "is no token id"),
    ("/v2/models/nothing/infer", infer(), 404, 'no model "nothing"'),
    ("/v2/models/ensemble/versions/2/infer", infer(), 404, 'no version "2"'),
    ("/v2/models/ensemble/nothing", {}, 404, "Not Found"),
    ("/v2/repository/models/ensemble/load", {}, 400, "not loaded or unloaded"),
    ("/v2/systemsharedmemory/region/a/register", {}, 400, "no shared memory"),
]  # fmt: skip


def encoded(values: Any) -> bytes:
    return values if isinstance(values, bytes) else json.dumps(values).encode()


def test_bad_requests_are_one_line_that_says_what_is_wrong(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE, verify=PLAIN) as client:
        answers = [client.post(path, content=encoded(values)) for path, values, _, _ in BAD]
    for (path, values, status, text), answer in zip(BAD, answers, strict=True):
        assert answer.status_code == status, (path, str(values)[:200], answer.text)
        assert set(answer.json()) == {"error"}
        line = answer.json()["error"]
        assert text in line and "\n" not in line and len(line) < 1000, (values, line)
    assert server.get(INFER).status_code == 405
    stream = server.post("/v2/models/ensemble/generate_stream", generate(top_p=-1.0))
    assert stream.status_code == 400 and "top_p" in stream.json()["error"]
    server.wait_idle()
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]


def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    nothing = {"beam_width": 1, "return_context_logits": False, "lora_task_id": 0, "decoder_text_input": "",
               "image_url_input": "", "length_penalty": 2.0, "use_draft_logits": False, "stream": None, "pad_id": 2,
               "prompt_vocab_size": 0, "embedding_bias_words": [], "min_length": 1, "priority": 1,
               "parameters": {"timeout": 1000, "sequence_id": 5, "sequence_start": True}}  # fmt: skip
    for more in ({}, {"num_draft_tokens": 0}, {"num_draft_tokens": 100, "use_draft_logits": True}):
        answer = server.post(BLS, generate(**(nothing | more)))
        assert answer.status_code == 200, answer.text


def binary_body(values: dict[str, Any], *parts: bytes) -> tuple[bytes, dict[str, str]]:
    text = json.dumps(values).encode()
    return text + b"".join(parts), {JSON_LENGTH: str(len(text))}


def test_bad_binary_bodies(server: Server) -> None:
    sized = {"binary_data_size": 5}
    text = tensor("text_input", "BYTES", [1, 1], parameters=sized)
    good = struct.pack("<I", 1) + b"x"
    for raw, line in (
        (good, None),
        (good[:4], "binary_data_size 5, where 4 bytes are left"),
        (good + b"y", "1 bytes are left behind the tensors"),
        (struct.pack("<I", 9) + b"x", "longer than the bytes that came"),
        (struct.pack("<I", 0) + b"x", "1 bytes are left behind 1 values"),
        (struct.pack("<I", 1) + b"\xff", "not valid UTF-8"),
    ):
        body, headers = binary_body({"inputs": [text, LENGTH]}, raw)
        answer = server.post(INFER, body, headers=headers)
        assert answer.status_code == (400 if line else 200), answer.text
        assert line is None or line in answer.json()["error"]
    number = tensor("max_tokens", "INT32", [1, 1], parameters={"binary_data_size": 5})
    body, headers = binary_body({"inputs": [TEXT, number]}, b"12345")
    assert "5 bytes for 1 values of INT32" in server.post(INFER, body, headers=headers).json()["error"]
    whole = json.dumps(infer()).encode()
    for header in ("0", "-1", "x", "99999", "9" * 5000):
        answer = server.post(INFER, whole, headers={JSON_LENGTH: header})
        assert answer.status_code == 400, header
    for encoding, content, status in (
        ("gzip", whole, 400),
        ("br", whole, 400),
        ("deflate", zlib.compress(whole)[:-3], 400),
        ("deflate", zlib.compress(whole + b" " * 10_000_000), 413),
        ("deflate", zlib.compress(whole), 200),
    ):
        assert server.post(INFER, content, headers={"content-encoding": encoding}).status_code == status


def test_grpc_refuses_with_a_status_and_the_same_lines(server: Server) -> None:
    code = grpc.StatusCode
    cases: list[tuple[dict[str, Any], str, Any, str]] = [
        (of_text("x", {"max_tokens": 0}), "ensemble", code.INVALID_ARGUMENT, "must be at least 1"),
        (of_text("x", {"max_tokens": 1, "top_kk": 1}), "ensemble", code.INVALID_ARGUMENT, "did you mean 'top_k'?"),
        (of_text("x", {"max_tokens": 1}), "ensembel", code.NOT_FOUND, "did you mean 'ensemble'?"),
        (of_text("x" * 30000, {"max_tokens": 1}), "ensemble", code.RESOURCE_EXHAUSTED, "larger"),
        (of_text("x", {"max_tokens": 1, "num_return_sequences": 33}), "ensemble", code.INVALID_ARGUMENT, "the 32"),
        ({}, "ensemble", code.INVALID_ARGUMENT, "inputs is missing"),
    ]
    with connected("grpc", server) as client:
        for values, model, status, line in cases:
            with pytest.raises(InferenceServerException) as caught:
                client.infer(model, inputs_of("grpc", values))
            assert caught.value.status() == str(status) and line in caught.value.message(), caught.value
        message = service_pb2.ModelInferRequest(model_name="ensemble")
        for shape, raws, line in (
            ([1, 1], [b""], "1 raw_input_contents for 2 inputs"),
            ([1, 1], [], "0 values in bytes_contents"),
            ([2**32, 2**32], [], "larger than any tensor"),  # 0 where numbers have 64 bits
            ([-1, 1], [], "whole numbers from 0"),
        ):
            del message.inputs[:], message.raw_input_contents[:]
            message.inputs.add(name="text_input", datatype="BYTES", shape=shape)
            message.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
            message.raw_input_contents.extend(raws)
            with pytest.raises(grpc.RpcError, match=line):
                client._client_stub.ModelInfer(message)
        reader = StreamReader(client)
        reader.send("nothing", of_text("x", {"max_tokens": 1}), "a")
        with pytest.raises(InferenceServerException, match='no model "nothing"'):
            reader.take()
        reader.send("preprocessing", {"QUERY": "x", "REQUEST_OUTPUT_LEN": 1}, "b")
        assert reader.read()[0].get_response().id == "b"
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]


def test_clients_that_go_away_free_their_rows(server: Server) -> None:
    before = server.wait_idle()
    with connected("grpc", server) as client:
        with server.engine_stopped(), pytest.raises(InferenceServerException) as caught:
            client.infer("ensemble", inputs_of("grpc", of_text("x", LONG)), client_timeout=1.0)
        assert caught.value.status() == str(grpc.StatusCode.DEADLINE_EXCEEDED)
        reader = StreamReader(client)
        waiting = {"0", "1", "2"}
        for number in sorted(waiting):
            reader.send("ensemble", of_text(f"def f{number}(", LONG | {"stream": True}), request_id=number)
        while waiting:  # what the engine has not seen yet is not aborted there
            waiting.discard(reader.take().get_response().id)
        client.stop_stream(cancel_requests=True)
    url = f"{server.url}/v2/models/ensemble/generate"
    with httpx.stream("POST", url + "_stream", json=of_text("y", LONG | {"stream": True}), verify=PLAIN) as response:
        next(response.iter_lines())
    with server.engine_stopped(), pytest.raises(httpx.TimeoutException):
        httpx.post(url, json=of_text("z", LONG), timeout=1.0, verify=PLAIN)
    metrics = server.wait_idle()
    assert metrics["trtrun:requests_aborted_total"] - before["trtrun:requests_aborted_total"] == 6
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    failures = server.get("/v2/models/ensemble/stats").json()["model_stats"][0]["inference_stats"]["fail"]
    assert failures["count"] >= 6


def test_a_full_queue_is_429_and_resource_exhausted(server: Server) -> None:
    server.wait_idle()
    with connected("grpc", server) as client, connected("grpc", server) as other:
        reader = StreamReader(client)
        values = LONG | {"stream": True, "num_return_sequences": 30}
        reader.send("ensemble", of_text("def main(", values))
        reader.take()
        more = of_text("x", {"max_tokens": 1, "num_return_sequences": 5})
        answer = server.post("/v2/models/ensemble/generate", more)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert "server.max_queue" in answer.json()["error"]
        with pytest.raises(InferenceServerException) as caught:
            other.infer("ensemble", inputs_of("grpc", more))
        assert caught.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)
        message = service_pb2.ModelInferRequest(model_name="ensemble")
        for name, datatype, field, value in (
            ("text_input", "BYTES", "bytes_contents", b"x"),
            ("max_tokens", "INT32", "int_contents", 1),
            ("num_return_sequences", "INT32", "int_contents", 5),
        ):
            item = message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
            getattr(item.contents, field).append(value)
        with pytest.raises(grpc.RpcError) as refused:
            other._client_stub.ModelInfer(message)
        assert dict(refused.value.trailing_metadata())["retry-after"] == "1"
        client.stop_stream(cancel_requests=True)
    server.wait_idle()
