"""What a client of Anthropic's makes of a stream of events."""

from __future__ import annotations

import json
from typing import Any


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events tell of, in order."""
    assert events[0]["type"] == "message_start" and [event["type"] for event in events[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    content, num_whole, written = message["content"], 0, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content) == num_whole
            content.append(event["content_block"])
            written = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == num_whole == len(content) - 1
            block, delta = content[-1], event["delta"]
            if delta["type"] == "input_json_delta":
                assert block["type"] == "tool_use" and block["input"] == {}
                written += delta["partial_json"]
            else:
                assert delta["type"] == f"{block['type']}_delta"
                block[block["type"]] += delta[block["type"]]
        else:
            assert event["type"] == "content_block_stop" and event["index"] == num_whole
            num_whole += 1
            if written:
                content[-1]["input"] = json.loads(written)
    assert num_whole == len(content)
    last = events[-2]
    message |= last["delta"]
    message["usage"] |= last["usage"]
    return message
