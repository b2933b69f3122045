"""KServe's protocol by the real `tritonclient`, curl and plain HTTP: what travels in which form, `generate`, and what
is told of models."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from published_commands import Document
from servers import PATIENCE, PLAIN, Server
from triton_clients import (
    GREEDY,
    PROMPT,
    SEEDED,
    array_of,
    both_ways,
    connected,
    expected,
    inputs_of,
    of_text,
    of_tokens,
    text_of,
    tokens_of,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from trtrun import LLM

pytestmark = pytest.mark.timeout(300)


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


@pytest.mark.parametrize("name", ["draft_target_model.txt", "llama_3_with_triton.txt"])
def test_the_published_curl_lines(server: Server, llm: LLM, name: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl: install the package curl")
    variables = dict.fromkeys(("DRAFT_MODEL_PATH", "TARGET_MODEL_PATH"), "llama")
    *_, words = Document(name, variables, {"http://localhost:8000": server.url}).commands()
    assert words[0] == "curl"
    done = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    body, answer = json.loads(words[-1]), json.loads(done.stdout)
    (completion,) = expected(llm, body["text_input"], GREEDY, max_tokens=body["max_tokens"])
    assert answer["text_output"] == completion.text
    assert f"/v2/models/{answer['model_name']}/generate" in words[3] and answer["model_version"] == "1"


@both_ways
def test_generate_takes_parameters_and_ids_and_streams(server: Server, llm: LLM, options: dict[str, Any]) -> None:
    completions = expected(llm, PROMPT, options, n=2)
    body = {"id": "42", "text_input": PROMPT, "parameters": {**options, "num_return_sequences": 2, "top_k": None}}
    answer = server.post("/v2/models/ensemble/versions/1/generate", body).json()
    assert answer["id"] == "42" and answer["sequence_index"] == [0, 1]
    assert answer["text_output"] == [completion.text for completion in completions]
    texts = ["", ""]
    body = {**body, "stream": True}
    url = f"{server.url}/v2/models/tensorrt_llm_bls/generate_stream"
    with httpx.stream("POST", url, json=body, verify=PLAIN) as response:
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
