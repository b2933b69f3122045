"""An MCP server over standard input and output with one tool, `look_up`, for an agent to call: what it must answer, and
no more (https://modelcontextprotocol.io/specification). It knows no agent."""

from __future__ import annotations

import json
import sys
from typing import Any

WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS = [{"name": "look_up", "description": "Looks up what a word means.", "inputSchema": WORD}]


def answer(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The result of a request."""
    if method == "initialize":
        about = {"serverInfo": {"name": "words", "version": "1"}, "capabilities": {"tools": {}}}
        return {"protocolVersion": given["protocolVersion"], **about}
    if method == "tools/list":
        return {"tools": TOOLS}
    return {"content": [{"type": "text", "text": "A greeting."}]} if method == "tools/call" else {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            told = {"jsonrpc": "2.0", "id": asked["id"], "result": answer(asked["method"], asked.get("params") or {})}
            print(json.dumps(told), flush=True)
