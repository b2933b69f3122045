"""The worst that a client may send: of each kind of request the one that costs a server most, let in or refused.

Bodies are made when they are asked for. It knows protocols, and no server's limits but those that are set unless told
otherwise.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tritonclient.grpc import service_pb2

MOST_BYTES = (1 << 24) - 1024
"""Of a body."""

INFER = "/v2/models/{}/infer"


@dataclass(frozen=True)
class Worst:
    """A request.

    Attributes:
        name: for people.
        path: of HTTP; empty for one over gRPC, and for bytes that are sent as they are.
        make: the body, given the model's name.
        headers: of HTTP.
        is_raw: the bytes are the whole request.
    """

    name: str
    path: str
    make: Callable[[str], bytes]
    headers: dict[str, str] = field(default_factory=dict)
    is_raw: bool = False

    @property
    def is_grpc(self) -> bool:
        """Whether it is a message of gRPC's ModelInfer."""
        return not self.path and not self.is_raw

    def body(self, model: str) -> bytes:
        """Its bytes, made once."""
        return _body(self, model)

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def _body(worst: Worst, model: str) -> bytes:
    return worst.make(model)


def worst_requests(num_completions: int) -> list[Worst]:
    """One of each kind.

    Args:
        num_completions: that one request may ask for.
    """
    n = min(128, num_completions)
    words = [f"{number:04d}" + "x" * 60 for number in range(1000)]
    many = {"max_tokens": 40, "ignore_eos": True, "temperature": 1}
    completions: dict[str, dict[str, Any]] = {
        "whole with all logprobs": {"prompt": "def main(", "n": n, "logprobs": 20, "return_token_texts": True, **many},
        "stream of all with logprobs": {"prompt": "def main(", "n": n, "logprobs": 20, "stream": True, **many},
        "many prompts": {"prompt": ["x"] * num_completions, "max_tokens": 1},
        "many long prompts": {"prompt": [[5] * 1000] * num_completions, "max_tokens": 1},
        "bias of all tokens": {"prompt": "x", "logit_bias": {str(token): 1 for token in range(4096)}, "n": n, **many},
        "stop at all tokens": {"prompt": "x", "stop_token_ids": list(range(4096)), "max_tokens": 1},
        "stop token 100,000 times": {"prompt": "x", "stop_token_ids": [5] * 100_000, "max_tokens": 1},
        "stop words": {"prompt": "x", "stop": words, "n": n, **many},
        "bad words": {"prompt": "x", "bad_words": [word[:60] for word in words], "max_tokens": 4},
        "short bad words": {"prompt": "x", "bad_words": [f"{number:x}" for number in range(500)], "max_tokens": 1},
        "guide of 3,900 properties": {
            "prompt": "x",
            "n": n,
            "temperature": 1,
            "guided": _properties(),
            "max_tokens": 60,
        },
        "guide of 1,560 levels": {"prompt": "x", "max_tokens": 9, "guided": _levels(312, 5)},
        "guide that is dear": {"prompt": "x", "n": n, "max_tokens": 60, "guided": {"regex": "(.{0,40}x){20}.*y"}},
        "text of 16 MB": {"prompt": "def main(x): # " * (MOST_BYTES // 15 - 10)},
        "word of 16 MB": {"prompt": "x" * (MOST_BYTES - 100)},
        "spaces of 16 MB": {"prompt": " " * (MOST_BYTES - 100)},
        "field of 60 kB": {"p" * 60_000: 1},
        "prompts of other kinds": {"prompt": [["x"]] * 500_000},
    }
    found = [
        Worst(name, "/v1/completions", lambda model, fields=fields: _json({"model": model, **fields}))  # type: ignore[misc]
        for name, fields in completions.items()
    ]
    found += [
        Worst("tokens of 16 MB", "/v1/completions", lambda model: _prompt_of(b"1")),
        Worst("keys of 64 kB, one twice", "/v1/completions", lambda model: _keys(7_700)),
        Worst("keys of 16 MB, one twice", "/v1/completions", lambda model: _keys(1_400_000)),
        Worst("lists of 16 MB", "/v1/completions", lambda model: _prompt_of(b"[]")),
        Worst("nested lists", "/v1/completions", lambda model: b'{"prompt":' + b"[" * 200_000),
        Worst("digits of 16 MB", "/v1/completions", lambda model: b'{"n":' + b"9" * (MOST_BYTES - 50) + b"}"),
        Worst("chat of a short message", "/v1/chat/completions", lambda model: _chat(model, 1, 1)),
        Worst("chat of 16 MB", "/v1/chat/completions", lambda model: _chat(model, 1, MOST_BYTES - 1000)),
        Worst("chat of many messages", "/v1/chat/completions", lambda model: _chat(model, 400_000, 1)),
        Worst("chat answers", "/v1/chat/completions", lambda model: _json({
            "messages": [{"role": "user", "content": "x"}], "n": n, "logprobs": True, "top_logprobs": 20, **many,
        })),
        Worst(
            "gzip of zeros", "/v1/completions", lambda model: gzip.compress(b" " * (MOST_BYTES - 1)),
            {"content-encoding": "gzip"},
        ),
    ]  # fmt: skip
    return found + _of_kserve(num_completions) + _raw()


def _of_kserve(num_completions: int) -> list[Worst]:
    n = min(128, num_completions)
    tokens = (MOST_BYTES - 4096) // 2
    asked = [_tensor("text_input", "BYTES", [1, 1], ["x"]), _tensor("max_tokens", "INT32", [1, 1], [40])]
    counts = [_tensor("request_output_len", "INT32", [1, 1], [1]), _tensor("input_lengths", "INT32", [1, 1], [1000])]
    many = _tensor("num_return_sequences", "INT32", [1, 1], [n])
    long_row = _tensor("input_ids", "INT32", [1, 1000], [5] * 1000)
    word = {"QUERY": ["x"], "EMBEDDING_BIAS_WORDS": ["x"], "EMBEDDING_BIAS_WEIGHTS": [1.0], "REQUEST_OUTPUT_LEN": [1]}
    kinds = {"EMBEDDING_BIAS_WEIGHTS": "FP32", "REQUEST_OUTPUT_LEN": "INT32"}
    bodies: list[tuple[str, str, Callable[[str], bytes]]] = [
        ("ensemble of many", "ensemble", lambda model: _infer([*asked, many])),
        ("tokens echoed many times", "tensorrt_llm", lambda model: _infer([long_row, *counts, many])),
        (
            "tensor of 16 MB as JSON", "tensorrt_llm",
            lambda model: _infer_with("input_ids", "INT32", [1, tokens], b"1," * (tokens - 1) + b"1"),
        ),
        (
            "texts of 16 MB as JSON", "ensemble",
            lambda model: _infer_with("stop_words", "BYTES", [1, tokens // 2], b'"",' * (tokens // 2 - 1) + b'""'),
        ),
        (
            "words of a whole vocabulary", "preprocessing",
            lambda model: _infer([
                _tensor(name, kinds.get(name, "BYTES"), [8, 1], values * 8) for name, values in word.items()
            ]),
        ),
        (
            "many empty texts", "postprocessing",
            lambda model: _infer([
                _tensor("TOKENS_BATCH", "INT32", [1, 500_000, 1], [1] * 500_000),
                _tensor("SEQUENCE_LENGTH", "INT32", [1, 500_000], [1] * 500_000),
            ]),
        ),
    ]  # fmt: skip
    found = [Worst(name, INFER.format(model), make) for name, model, make in bodies]
    found.append(Worst("generate of 16 MB", "/v2/models/tensorrt_llm/generate", lambda model: _generate(tokens)))
    found.append(Worst("texts of 16 MB in bytes", INFER.format("ensemble"), lambda model: _binary()[0], _binary()[1]))
    found.append(Worst("gRPC: inputs of 16 MB", "", lambda model: _call() + b"\x2a\x00" * tokens))
    found.append(Worst("gRPC: raw contents of 16 MB", "", lambda model: _call() + b"\x3a\x00" * tokens))
    found.append(Worst("gRPC: tokens of 16 MB", "", lambda model: _call_of_tokens(2 * tokens)))
    found.append(Worst("gRPC: many sequences", "", lambda model: _call_of_many(n)))
    return found


def _raw() -> list[Worst]:
    """Bytes of HTTP that no library sends."""
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return [
        Worst("pipelined requests", "", lambda model: get * 20_000, is_raw=True),
        Worst("pipelined posts", "", lambda model: (post + b"content-length: 2\r\n\r\n{}") * 10_000, is_raw=True),
        Worst(
            "chunks of a byte", "",
            lambda model: post + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 300_000, is_raw=True,
        ),
        Worst("headers of 64 kB", "", lambda model: get[:-2] + b"a:\r\n" * 15_000 + b"\r\n", is_raw=True),
        Worst("empty lines", "", lambda model: b"\r\n" * 1_000_000, is_raw=True),
        Worst("path of 60 kB", "", lambda model: get.replace(b"health", b"%41/" * 15_000), is_raw=True),
    ]  # fmt: skip


def _properties() -> dict[str, Any]:
    """A schema of about 120 kB, whose matchers pass a bound while texts are written."""
    integer = {"type": "integer"}
    return {"json": {"type": "object", "properties": {f"k{number}": integer for number in range(10, 3910)}}}


def _levels(references: int, each: int) -> dict[str, Any]:
    """A schema nested so deep along its references."""
    names = {}
    for number in range(references):
        inner: dict[str, Any] = {"$ref": f"#/$defs/d{number + 1}"} if number + 1 < references else {"const": "end"}
        for _ in range(each):
            inner = {"anyOf": [inner, {"const": number}]}
        names[f"d{number}"] = inner
    return {"json": {"$ref": "#/$defs/d0", "$defs": names}}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _prompt_of(item: bytes) -> bytes:
    """As many items as fit into a body."""
    return b'{"prompt":[' + (item + b",") * (MOST_BYTES // (len(item) + 1) - 50) + item + b"]}"


def _keys(count: int) -> bytes:
    return b"{" + ",".join(f'"{number:x}":0' for number in (*range(count), count - 1)).encode() + b"}"


def _chat(model: str, count: int, length: int) -> bytes:
    messages = [{"role": "user", "content": "x " * (length // 2) + "x"}] * count
    return _json({"model": model, "messages": messages, "max_tokens": 1})


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _infer(tensors: list[dict[str, Any]]) -> bytes:
    return _json({"inputs": tensors})


def _infer_with(name: str, datatype: str, shape: list[int], data: bytes) -> bytes:
    head = _json({"name": name, "datatype": datatype, "shape": shape})[:-1]
    return b'{"inputs":[' + head + b',"data":[' + data + b"]}]}"


def _generate(count: int) -> bytes:
    return b'{"request_output_len":1,"input_ids":[' + b"1," * (count - 40) + b"1]}"


@cache
def _binary() -> tuple[bytes, dict[str, str]]:
    count = (MOST_BYTES - 4096) // 4
    size = {"binary_data_size": 4 * count}
    text = _json({"inputs": [{"name": "stop_words", "datatype": "BYTES", "shape": [1, count], "parameters": size}]})
    return text + struct.pack("<I", 0) * count, {"inference-header-content-length": str(len(text))}


def _call() -> bytes:
    raw: bytes = service_pb2.ModelInferRequest(model_name="ensemble", id="1").SerializeToString()
    return raw


def _call_of_tokens(count: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    given = message.inputs.add(name="input_ids", datatype="INT32", shape=[1, count])
    given.contents.int_contents.extend([5] * count)
    raw: bytes = message.SerializeToString()
    return raw


def _call_of_many(n: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    for name, values in (
        ("input_ids", [5] * 1000), ("input_lengths", [1000]), ("request_output_len", [1]),
        ("num_return_sequences", [n]),
    ):  # fmt: skip
        given = message.inputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        given.contents.int_contents.extend(values)
    raw: bytes = message.SerializeToString()
    return raw
