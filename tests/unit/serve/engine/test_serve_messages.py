"""What front and engine say to each other: messages come back as they were sent, and what is no message is refused."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import pytest
from engine_messages import LIMITS, SAMPLING, delta_of, reader_of, run

from launch.serve.engine import messages
from launch.serve.engine.messages import (
    Abort,
    Begin,
    Deltas,
    Ended,
    Generate,
    Message,
    MessageError,
    MessageStream,
    Ready,
    encode,
)


def test_messages_come_back_as_they_were_sent() -> None:
    async def check() -> None:
        generate = Generate.of("request 0", (1, 2), SAMPLING, {1: (7, 8)})
        others: list[Message] = [
            Deltas(deltas=(delta_of((3, 4), "stop"), delta_of((), index=1))),
            Ended(request_id="a", error="b"),
            Abort(request_id="c"),
            Ready(version="1", config_hash="h", limits=asdict(LIMITS)),
        ]
        stream = MessageStream(reader_of(b"".join(map(encode, [Begin(requests=(generate,)), *others]))))
        begin = await stream.read()
        assert isinstance(begin, Begin)
        (read,) = begin.requests
        assert read.sampling_params() == SAMPLING
        assert (read.request_id, read.prompt_token_ids, read.generated) == ("request 0", (1, 2), {1: (7, 8)})
        for message in others:
            assert await stream.read() == message
        assert await stream.read() is None
        assert Ready.scheduler_limits(others[-1]) == LIMITS  # type: ignore[arg-type]

    run(check())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80\x04\x95",
        *map(
            msgspec.msgpack.encode,
            [
                {},
                [],
                {"kind": "abort"},
                {"kind": "abort", "request_id": 5},
                {"kind": "os.system"},
                {"kind": "abort", "request_id": "a", "more": 1},
            ],
        ),
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    async def check() -> None:
        with pytest.raises(MessageError):
            await MessageStream(reader_of(len(body).to_bytes(4, "big") + body)).read()

    run(check())


def test_messages_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_BYTES", 100)
    with pytest.raises(MessageError, match="larger than 100"):
        encode(Abort(request_id="a" * 100))

    async def check() -> None:
        with pytest.raises(MessageError, match="announces a message of 101 bytes"):
            await MessageStream(reader_of((101).to_bytes(4, "big"))).read()
        assert await MessageStream(reader_of((50).to_bytes(4, "big") + b"{")).read() is None

    run(check())
