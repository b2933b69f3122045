"""Triton's models by the real `tritonclient`, over HTTP and gRPC: the tokens and texts of `trtrun run` from each,
and what their inputs and outputs mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from servers import Server
from triton_clients import (
    GREEDY,
    PROMPT,
    StreamReader,
    both_protocols,
    connected,
    every_way,
    expected,
    inputs_of,
    of_text,
    of_tokens,
    streamed_tokens,
    text_of,
    tokens_of,
)

from trtrun import LLM

pytestmark = pytest.mark.timeout(300)


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


def total(server: Server, name: str) -> float:
    return server.wait_idle()[f"vllm:spec_decode_{name}_total"]


def test_drafts_are_as_long_as_a_request_wants_them(server: Server) -> None:
    with connected("grpc", server) as client:
        for options, is_drafted in (({}, True), ({"num_draft_tokens": 0}, False), ({"num_draft_tokens": 9}, True)):
            before = total(server, "num_draft_tokens")
            client.infer("tensorrt_llm_bls", inputs_of("grpc", of_text(PROMPT, GREEDY | options)))
            assert (total(server, "num_draft_tokens") > before) == is_drafted, options


def test_a_drafts_tokens_of_the_clients_own_change_nothing_but_the_rounds(server: Server, llm: LLM) -> None:
    tokens = tokens_of(llm, PROMPT)
    (completion,) = expected(llm, PROMPT, GREEDY)
    right, wrong = list(completion.token_ids[:6]), [*completion.token_ids[:2], 5, 6, 7, 8]
    with connected("grpc", server) as client:
        for draft in (right, wrong, right[:1], []):
            values = of_tokens(tokens, GREEDY) | {"draft_input_ids": np.array([draft], np.int32)}
            result = client.infer("tensorrt_llm", inputs_of("grpc", values))
            assert result.as_numpy("output_ids")[0, 0].tolist() == [*tokens, *completion.token_ids]
        before = total(server, "num_drafts")
        values = of_tokens(tokens, GREEDY) | {"draft_input_ids": list(completion.token_ids)}
        client.infer("tensorrt_llm", inputs_of("grpc", values))
        # Behind the first token, each round accepts four tokens and adds one. Where one is left nothing is drafted.
        assert total(server, "num_drafts") - before == -(-(len(completion.token_ids) - 2) // 5)


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
