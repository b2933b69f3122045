"""Helpers of the tests with tritonclient: requests of both protocols, built and read the same way."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from servers import PATIENCE, Server
from tritonclient.utils import np_to_triton_dtype

from trtrun import LLM, SamplingParams
from trtrun.core.outputs import CompletionOutput

MODULES: dict[str, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}

GREEDY: dict[str, Any] = {"max_tokens": 12}
SEEDED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_p": 1.0, "random_seed": 7, "presence_penalty": 0.4}
AS_PARAMETERS: dict[int, SamplingParams] = {
    id(GREEDY): SamplingParams(max_tokens=12),
    id(SEEDED): SamplingParams(max_tokens=12, temperature=float(np.float32(0.9)), seed=7,
                               presence_penalty=float(np.float32(0.4))),
}  # fmt: skip

PROMPT = "def main("
LONG: dict[str, Any] = {"max_tokens": 900, "end_id": -1}
both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])
both_ways = pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seed"])
every_way = pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("http", GREEDY),
        ("grpc", SEEDED),
        ("http", SEEDED),
        ("grpc", GREEDY),
    ],
    ids=["http, greedy", "grpc, seed", "http, seed", "grpc, greedy"],
)

_TYPES = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_}
_UNSIGNED = ("random_seed",)
_OF_TOKENS = {
    "max_tokens": "request_output_len",
    "top_p": "runtime_top_p",
    "top_k": "runtime_top_k",
    "stream": "streaming",
}


@contextmanager
def connected(protocol: str, server: Server) -> Iterator[Any]:
    """A client of a protocol."""
    if protocol == "grpc":
        with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
            yield client
    else:
        address = server.url.partition("://")[2]
        with tritonclient.http.InferenceServerClient(
            address, concurrency=4, network_timeout=PATIENCE, connection_timeout=PATIENCE
        ) as client:
            yield client


def array_of(name: str, value: Any) -> np.ndarray[Any, Any]:
    """A value, or a row's values, as a batch of one; arrays are as they are."""
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    kind = np.uint64 if name in _UNSIGNED else _TYPES[type(values[0])] if values else np.object_
    return np.array([values], kind)


def inputs_of(protocol: str, values: Mapping[str, Any], binary: bool = True) -> list[Any]:
    """Inputs for `infer`."""
    found = []
    for name, value in values.items():
        array = array_of(name, value)
        item = MODULES[protocol].InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        if protocol == "http":
            item.set_data_from_numpy(array, binary_data=binary)
        else:
            item.set_data_from_numpy(array)
        found.append(item)
    return found


def of_text(prompt: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the models of text."""
    return {"text_input": prompt, **options}


def of_tokens(tokens: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the models of tokens."""
    given = {_OF_TOKENS.get(name, name): value for name, value in options.items()}
    return {"input_ids": list(tokens), "input_lengths": len(tokens), **given}


def expected(llm: LLM, prompt: Any, options: Mapping[str, Any], **changes: Any) -> list[CompletionOutput]:
    """What `trtrun run` writes with GREEDY or SEEDED."""
    base = AS_PARAMETERS[id(options)]
    values = {name: getattr(base, name) for name in ("max_tokens", "temperature", "seed", "presence_penalty")}
    return list(llm.generate([prompt], SamplingParams(**(values | changes)))[0].completions)


def tokens_of(llm: LLM, text: str) -> list[int]:
    """The tokens of a text."""
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


class StreamReader:
    """A gRPC stream whose responses are read one by one."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._found: queue.Queue[Any] = queue.Queue()
        client.start_stream(callback=lambda result, error: self._found.put(error or result))

    def send(self, model: str, values: Mapping[str, Any], request_id: str = "", **others: Any) -> None:
        """Send a request."""
        self.client.async_stream_infer(model, inputs_of("grpc", values), request_id=request_id, **others)

    def take(self) -> Any:
        """The next result; raises the next error."""
        found = self._found.get(timeout=PATIENCE)
        if isinstance(found, Exception):
            raise found
        return found

    def read(self) -> list[Any]:
        """All results of the one request, up to the one that says that it is the last."""
        results = [self.take()]
        while not is_final(results[-1]):
            results.append(self.take())
        return results


def is_final(result: Any) -> bool:
    """Whether a result of a stream says that no other follows."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def text_of(result: Any) -> str:
    """The one text of a result."""
    (text,) = result.as_numpy("text_output")
    return text.decode() if isinstance(text, bytes) else str(text)  # JSON has texts


def streamed_tokens(reader: StreamReader) -> list[int]:
    """All tokens of the one request of a stream."""
    return [token for result in reader.read() for token in result.as_numpy("output_ids")[0, 0].tolist()]
