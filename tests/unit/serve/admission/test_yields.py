"""Work in parts: rests where it has gone on for long, and whole answers that are made and sent in parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from launch.serve.admission.event_loop_stalls import MOST_SECONDS, YieldTimer
from launch.serve.api.openai.answers import ChatAnswer, CompletionAnswer
from launch.serve.api.openai.calls import Answering
from launch.serve.frontend.frontend import Usage
from launch.serve.http.answers import JOINED_BYTES, answer_in_parts, make_parts
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.tokens.text import read_tokenizer

TOKENIZER = read_tokenizer(ASSETS / "target")


def test_others_have_a_turn_once_the_work_has_gone_on_for_long() -> None:
    now, turns = 0.0, list[int]()

    async def work() -> None:
        nonlocal now
        yield_timer = YieldTimer(lambda: now)
        for place in range(8):
            now += 0.4 * MOST_SECONDS
            asyncio.get_running_loop().call_soon(turns.append, place)
            await yield_timer.yield_if_due()
        assert turns == [0, 1, 2, 3, 4, 5]  # behind the third part and behind the sixth
        yield_timer.restart()
        await yield_timer.yield_if_due()
        assert len(turns) == 6

    asyncio.run(work())


async def sent_of(response: Response) -> tuple[dict[str, str], list[bytes]]:
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        raise AssertionError

    await response({"type": "http"}, receive, send)
    headers = {name.decode(): value.decode() for name, value in told[0]["headers"]}
    return headers, [message["body"] for message in told[1:]]


def test_an_answer_goes_out_in_parts_where_it_is_long() -> None:
    async def work() -> None:
        for size, count in ((10, 1), (JOINED_BYTES, 4)):
            parts = await make_parts(iter([b"x" * size] * 3))
            headers, sent = await sent_of(answer_in_parts(parts, headers={"a": "b"}))
            assert (headers["content-length"], headers["a"]) == (str(3 * size), "b")
            assert headers["content-type"] == "application/json"
            assert len(sent) == count and b"".join(sent) == b"x" * 3 * size

    asyncio.run(work())


def pieces() -> Iterator[CompletionDelta]:
    """Of two choices, the second of which begins late."""
    for number in range(6):
        choice = int(number in (3, 5))
        tokens = (40 + number, 60)
        logprobs = tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (7, -2.0))) for token in tokens)
        reason = "length" if number > 3 else None
        delta = CompletionDelta(
            "r", choice, tokens, f"<{number}>", RequestStatistics(), logprobs, reason, token_origins="pa"
        )
        yield delta


def test_a_whole_answer_is_what_its_pieces_say() -> None:
    sampling = SamplingParams(n=2, logprobs=2)
    answering = Answering(sampling, False, False, True, return_token_origins=True, return_token_texts=True)
    for kind in (CompletionAnswer, ChatAnswer):
        answer = kind("m", TOKENIZER, answering, [[5]])
        for piece in pieces():
            answer.keep(piece)
        told = json.loads(b"".join(answer.whole(Usage(1, 2), 4)))
        first, second = told["choices"]
        assert (first["index"], second["index"], told["model"]) == (0, 1, "m") and "usage" in told
        assert first["token_ids"] == [40, 60, 41, 60, 42, 60, 44, 60] and second["token_ids"] == [43, 60, 45, 60]
        assert first["token_origins"] == "pa" * 4 and len(first["token_texts"]) == 8
        assert first["finish_reason"] == second["finish_reason"] == "length"
        text = first["text"] if kind is CompletionAnswer else first["message"]["content"]
        assert text == "<0><1><2><4>"
        if kind is CompletionAnswer:
            assert [len(values) for values in first["logprobs"].values()] == [8] * 4
            assert first["logprobs"]["token_logprobs"] == [-0.5] * 8
        else:
            assert len(first["logprobs"]["content"]) == 8 and first["logprobs"]["refusal"] is None
            assert first["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -2.0
