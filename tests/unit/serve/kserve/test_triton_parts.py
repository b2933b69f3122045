"""The parts of Triton's front, without a server: tensors and their bytes, word lists, what rows ask for, and where
completions end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.grpc_messages import WANTS_FINAL, read_head
from launch.serve.api.kserve.http_bodies import read_generate
from launch.serve.api.kserve.models import MODELS
from launch.serve.api.kserve.requests import check_request, find_model, read_word_list, write_word_lists
from launch.serve.api.kserve.row_requests import UNSUPPORTED, ModelFacts, RowRequest, read_row_requests
from launch.serve.api.kserve.runs import RowUpdate, _Completion
from launch.serve.api.kserve.tensors import DATATYPES, read_bytes, read_shape, read_values, write_bytes, write_values
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.nouns import Request, TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.results import append_tokens
from trtrun.scheduling.scheduler import Scheduler
from trtrun.tokens.detokenizer import AhoCorasick
from trtrun.tokens.text import read_tokenizer

LIMITS = SchedulerLimits(4, 64, 256, 256, 4, 16, 32)
FACTS = ModelFacts(read_tokenizer(ASSETS / "target"), 4096, (0,), 4)
VALUES: dict[str, Any] = {
    "BOOL": st.booleans(),
    "UINT8": st.integers(0, 255),
    "UINT64": st.integers(0, 2**64 - 1),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FP16": st.floats(width=16, allow_nan=False, allow_infinity=False),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "BYTES": st.text(alphabet=st.characters(exclude_categories=["Cs"])),
}


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data())
def test_tensors_survive_bytes_and_json(datatype: str, data: Any) -> None:
    values = data.draw(st.lists(VALUES[datatype], max_size=6))
    shape = (1, len(values))
    tensor = read_values("x", datatype, shape, values)
    assert tensor.values.dtype == DATATYPES[datatype] and tensor.values.shape == shape
    again = read_bytes("x", datatype, shape, write_bytes(tensor))
    assert again.values.tolist() == tensor.values.tolist() and write_values(again) == values


@given(st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(0, 4), max_size=3), st.binary(max_size=40))
def test_any_bytes_are_a_tensor_or_refused(datatype: str, shape: list[int], raw: bytes) -> None:
    try:
        tensor = read_bytes("x", datatype, tuple(shape), raw)
    except Refusal as refusal:
        assert refusal.kind is Kind.INVALID and "\n" not in str(refusal)
    else:
        assert tensor.values.shape == tuple(shape)
        if datatype != "BOOL":  # of which any byte but 0 is true
            assert write_bytes(tensor) == raw


@pytest.mark.parametrize("shape", [(2**39, 2**39), (0, 2**39, 2**39), (2**39, 2**39, 0), (0, 2**41), (2**64,)])
def test_shapes_beyond_what_arrays_have_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Refusal, match="larger than any tensor"):
        read_shape("x", shape)
    assert read_bytes("x", "INT32", read_shape("x", (0, 2**39)), b"").values.shape == (0, 2**39)


@given(st.lists(st.lists(st.lists(st.integers(0, 4095), min_size=1, max_size=4), max_size=4), min_size=1, max_size=3))
def test_word_lists_are_read_as_they_are_written(rows: list[list[list[int]]]) -> None:
    written = write_word_lists(rows)
    assert written.shape[1] == 2 and written.dtype == np.int32
    assert [read_word_list("x", row) for row in written] == [tuple(map(tuple, words)) for words in rows]


def test_word_lists_of_other_clients() -> None:
    assert read_word_list("x", None) == ()
    assert read_word_list("x", np.zeros((2, 0), np.int32)) == ()
    assert read_word_list("x", np.array([[0], [-1]], np.int32)) == ()
    assert read_word_list("x", np.array([[0], [0]], np.int32)) == ()
    for ends in ([3, 2, -1], [4, -1, -1], [2, 2, -1], [-2, 1, 1]):
        with pytest.raises(Refusal, match="ends at"):
            read_word_list("x", np.array([[1, 2, 3], ends], np.int32))


@pytest.mark.parametrize("name", ["bad_words_list", "stop_words_list"])
def test_words_of_numbers_that_are_no_tokens_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match=f"{name}.*-5 is no token id") as caught:
        ask("tensorrt_llm", **{name: [[7, -5], [2, -1]]})
    assert caught.value.kind is Kind.INVALID
    read_word_list(name, np.array([[7, -1], [1, -1]], np.int32))  # behind the words they are filled up with anything


def test_gains_add_up_and_what_came_before_is_not_copied_for_each() -> None:
    class Watched(str):
        def __add__(self, other: str) -> str:
            raise AssertionError("copied")

    whole = RowUpdate(0, 0, [1], [Watched("a")], [-0.5], -0.5, 3, 2)
    for number in range(3):
        whole.add(RowUpdate(0, 0, [number], [Watched("b")], [-1.0], -float(number), 4 + number, 2, number == 2))
    assert (whole.tokens, whole.text, whole.log_probs) == ([1, 0, 1, 2], "abbb", [-0.5, -1.0, -1.0, -1.0])
    assert (whole.sum_log_probs, whole.num_tokens, whole.is_last) == (-2.0, 6, True)


def test_word_lists_have_limits_in_tokens() -> None:
    length = 1 << 16
    assert len(read_word_list("x", np.array([[1] * length, [length] + [-1] * (length - 1)], np.int32))) == 1
    with pytest.raises(Refusal, match="x is 65537 tokens long in all; 65536 are the most"):
        read_word_list("x", np.array([[1] * (length + 1), [1, length + 1] + [-1] * (length - 1)], np.int32))
    with pytest.raises(Refusal, match="x has 1025 entries"):
        read_word_list("x", np.array([[1] * 1025, range(1, 1026)], np.int32))
    with pytest.raises(Refusal, match="stop_words is 65537 characters long in all"):
        ask("ensemble", stop_words=["x", "y" * length])


def ask(model: str, facts: ModelFacts = FACTS, **values: Any) -> RowRequest:
    """What a request of one row asks for."""
    given = {"text_input": "x", "max_tokens": 7} if MODELS[model].has_text else {}
    given = given or {"input_ids": [5, 6, 7], "input_lengths": 2, "request_output_len": 7}
    body = read_generate(find_model(model), given | values)
    (found,) = read_row_requests(check_request(find_model(model), "", body.tensors, (), 8), facts)
    return found


@pytest.mark.parametrize(
    ("values", "temperature", "top_k", "top_p"),
    [
        ({}, 0.0, 0, 1.0),
        ({"temperature": 0.5}, 0.0, 0, 1.0),
        ({"temperature": 0.5, "top_k": 1}, 0.0, 0, 1.0),
        ({"temperature": 0.5, "top_k": 1, "top_p": 0.5}, 0.0, 0, 1.0),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, 0.0, 0, 1.0),
        ({"temperature": 0.5, "top_k": 5}, 0.5, 5, 1.0),
        ({"top_k": 5, "top_p": 0.5}, 1.0, 5, 0.5),
        ({"top_p": 0.5}, 1.0, 0, 0.5),
        ({"top_p": 1.0}, 1.0, 0, 1.0),
    ],
)
def test_tokens_are_chosen_by_tensorrt_llms_rules(
    values: dict[str, Any], temperature: float, top_k: int, top_p: float
) -> None:
    for model, prefix in (("ensemble", ""), ("tensorrt_llm", "runtime_")):
        renamed = {prefix + name if name.startswith("top") else name: value for name, value in values.items()}
        sampling = ask(model, **renamed).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (temperature, top_k, top_p)
        assert sampling.seed == 0 and sampling.draft_len is None


def test_benchmarks_name_parameters_and_an_end_that_never_comes() -> None:
    """What those of SGLang, vLLM and TensorRT-LLM send."""
    asked = ask(
        "ensemble",
        accumulate_tokens=True,
        end_id=1048576,
        min_length=6,
        stream=True,
        timeout=5,
        parameters={"tag": "x"},
    )
    assert not asked.end_tokens and not asked.sampling.stop_token_ids and asked.sampling.ignore_eos
    assert asked.pad_token == 0 and asked.stream and asked.sampling.min_tokens == 6
    assert ask("ensemble", end_id=4095).sampling.stop_token_ids == (4095,)
    for name, said in (
        ("temprature", "did you mean 'temperature'"),
        ("num_draft_tokens", "has no input 'num_draft_tokens'"),
        ("tag", "a parameter of a request is"),
    ):
        with pytest.raises(Refusal, match=said):
            ask("ensemble", **{name: [1]})


def test_what_inputs_become() -> None:
    bls = ask("tensorrt_llm_bls", num_draft_tokens=10, min_length=99, random_seed=2**63 + 5, stop_words=["os", ""])
    assert bls.sampling.draft_len == 4 and bls.sampling.min_tokens == 7 and bls.sampling.seed == 5
    assert FACTS.tokenizer is not None
    assert bls.sampling.stop_sequences == (tuple(FACTS.tokenizer.encode("os", add_special_tokens=False)),)
    assert not bls.has_prompt and bls.end_tokens == {0} and not bls.sampling.ignore_eos
    assert ask("tensorrt_llm_bls", num_draft_tokens=0).sampling.draft_len == 0
    target = ask("tensorrt_llm", draft_input_ids=[1, 2], end_id=9, stop_words_list=[[1, 2], [2, -1]])
    assert target.prompt == (5, 6) and target.sampling.draft_token_ids == (1, 2) and target.has_prompt
    assert target.end_tokens == {9} and target.sampling.stop_token_ids == (9,) and target.sampling.ignore_eos
    assert target.sampling.stop_sequences == ((1, 2),) and target.pad_token == 9
    sizes = {"lookahead_window_size": 5, "lookahead_ngram_size": 4, "lookahead_verification_set_size": 3}
    assert ask("tensorrt_llm", **sizes).sampling.lookahead_config == (5, 4, 3)
    with pytest.raises(Refusal, match="lookahead_ngram_size"):
        ask("ensemble", lookahead_window_size=5, lookahead_verification_set_size=3)
    with pytest.raises(Refusal, match="lora_task_id: no adapters are named in the configuration"):
        ask("ensemble", lora_task_id=1)
    endless = ask("tensorrt_llm", end_id=-1)
    assert endless.end_tokens == frozenset() and endless.sampling.ignore_eos and not endless.sampling.stop_token_ids


@pytest.mark.parametrize(
    ("configured", "of_text", "of_tokens"), [(None, False, True), (True, False, False), (False, True, True)]
)
def test_where_outputs_begin(configured: bool | None, of_text: bool, of_tokens: bool) -> None:
    facts = ModelFacts(FACTS.tokenizer, 4096, (0,), 4, configured)
    assert ask("ensemble", facts).has_prompt == ask("tensorrt_llm_bls", facts).has_prompt == of_text
    assert ask("tensorrt_llm", facts).has_prompt == ask("tensorrt_llm_draft", facts).has_prompt == of_tokens
    # Preprocessing's outputs, handed on by hand as the ensemble does.
    assert ask("tensorrt_llm", facts, decoder_input_ids=[0]).has_prompt == of_text
    for model in ("ensemble", "tensorrt_llm"):
        assert [ask(model, facts, exclude_input_in_output=value).has_prompt for value in (True, False)] == [False, True]


def test_the_head_of_a_long_message_is_read_without_its_inputs() -> None:
    message = service_pb2.ModelInferRequest(model_name="ensemble", model_version="1", id="7")
    message.parameters[WANTS_FINAL].bool_param = True
    whole = message.SerializeToString()
    message.inputs.add(name="text_input")
    message.raw_input_contents.append(b"x" * 10_000)
    head = read_head(message.SerializeToString(), 4096)
    assert head.SerializeToString() == whole  # and a short one as a whole
    assert read_head(whole + b"\x2a\x00", 4096).inputs[0].name == ""
    for raw in (b"\x0a\xff\xff\x7f" + b"x" * 5000, b"\x08\x01" * 5000, b"\x0a" + b"\xff" * 5000, b"\x0a\x90"):
        with pytest.raises(Refusal, match=r"no message|4096 bytes at most"):
            read_head(raw, 4096)


def test_every_input_that_is_not_supported_is_known_to_a_model() -> None:
    known = {name for model in MODELS.values() for name in model.inputs}
    assert known >= UNSUPPORTED.keys()


def delta(tokens: list[int], finish_reason: str | None = None) -> CompletionDelta:
    logprobs = tuple(TokenLogprobs(token, -float(token), ()) for token in tokens)
    return CompletionDelta("r", 0, tuple(tokens), "", RequestStatistics(), logprobs, finish_reason)


@pytest.mark.parametrize(
    ("pieces", "finish_reason", "found", "has_ended"),
    [
        ([[1, 2], [3]], None, [1, 2, 3], False),
        ([[1, 2], [3]], "length", [1, 2, 3], True),
        ([[1, 2], [9]], "stop", [1, 2], True),
        ([[1, 9]], "length", [1, 9], True),
        ([[5], [6, 7]], None, [5, 6], True),  # a stop word over two pieces, and a token behind it
        ([[5, 5, 6]], "length", [5, 5, 6], True),
        ([[5], [7, 5], [6]], "stop", [5, 7, 5, 6], True),
        ([[8, 1]], "length", [8], True),
        ([[5, 6, 9]], "stop", [5, 6], True),
    ],
)
def test_where_a_completion_ends(
    pieces: list[list[int]], finish_reason: str | None, found: list[int], has_ended: bool
) -> None:
    """The engine ends it; what ends it is left out or stays."""
    sampling = SamplingParams(stop_sequences=((5, 6), (8,)), stop_token_ids=(9,))
    completion = _Completion(RowRequest("x", sampling, frozenset({9}), 0, True, False, True, False), 0, 0, [1, 1], None)
    in_engine = Scheduler(LIMITS).add(
        Request(0, (1, 1), SamplingParams(stop_sequences=sampling.stop_sequences)), stops=AhoCorasick(((5, 6), (8,)))
    )
    tokens: list[int] = []
    for place, piece in enumerate(pieces):
        gained, reason = append_tokens(in_engine, piece, LIMITS)
        if reason is None and place == len(pieces) - 1:
            reason = finish_reason
        update = completion.take(delta(gained, reason))
        tokens += update.tokens
        assert update.log_probs == [-float(token) for token in update.tokens]
        if reason is not None:
            break
    assert tokens == found and update.is_last == completion.is_over == has_ended
    assert update.sum_log_probs == -sum(found) and update.num_tokens == 2 + len(found)


def test_a_stop_sequence_stays_though_its_last_token_is_one_that_ends() -> None:
    sampling = SamplingParams(stop_sequences=((5, 9),), stop_token_ids=(9,))
    asked = RowRequest("x", sampling, frozenset({9}), 0, True, False, True, False)
    for before, found in ((5, [5, 9]), (6, [6])):
        completion = _Completion(asked, 0, 0, [1, 1], None)
        assert completion.take(delta([before])).tokens + completion.take(delta([9], "stop")).tokens == found


def test_no_model_has_two_lists_of_stop_words() -> None:
    # Each list has limits of its own.
    for model in MODELS.values():
        assert not {"stop_words", "stop_words_list"} <= model.inputs.keys()


def test_configurations_name_datatypes_as_triton_does() -> None:
    from google.protobuf.json_format import ParseDict
    from tritonclient.grpc import model_config_pb2

    for model in MODELS.values():
        config = ParseDict(model.config(8), model_config_pb2.ModelConfig())
        assert {item.name for item in config.input} == set(model.inputs)
        assert {item.name for item in config.output} == set(model.outputs)
