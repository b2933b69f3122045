"""Agents that write code, as they come from npm: each is given tasks, which the chat model of chat_model.py solves.

A file is written, it is run, and what it printed is told; what an agent did is read from what it tells programs. They
run without a network but the server's port, with a home of their own. It starts nothing.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.clients.real_clients.calls import Call, Client, Place
from scripts.clients.real_clients.task import (
    ASKED,
    CONTEXT,
    FOUND,
    LINE,
    NOT_RUN,
    PICTURE,
    PRINTED,
    RUN,
    SEARCHED,
    TOLD,
)

WORDS = Path(__file__).resolve().parent / "words_mcp.py"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mNQcPiAFTEMLQkAnqhUAW34RRsAAAAASUVORK5CYII="
"""Eight blue dots by eight."""

ROOM = ("--set", f"scheduler.max_seq_len={CONTEXT}")

LOOPBACK = {
    "HTTP_PROXY": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1",
    "NO_PROXY": "127.0.0.1,localhost",
}  # fmt: skip
"""Nothing answers there: whatever goes to another machine fails at once."""


def _program(place: Place, name: str) -> Path:
    return Path(place.python).parents[1] / "node_modules" / ".bin" / name


def _codex(name: str, model: str, steps: Sequence[str], mcp: bool = False) -> Call:
    """Codex with a model of a name that it does not know, or of one that it gives other tools."""

    def words(place: Place) -> Sequence[object]:
        home = place.folder / ".codex"
        home.mkdir()
        lines = [
            f'model = "{place.model}"',
            'model_provider = "trtrun"',
            "check_for_update_on_startup = false",
            "analytics.enabled = false",
            'model_verbosity = "low"',
            'model_reasoning_effort = "low"',
            "[model_providers.trtrun]",
            'name = "trtrun"',
            f'base_url = "{place.url}/v1"',
            'wire_api = "responses"',
            "request_max_retries = 0",
        ]
        if mcp:
            lines += [
                "[mcp_servers.words]",
                f"command = {json.dumps(sys.executable)}",
                f"args = {json.dumps([str(WORDS)])}",
            ]
        (home / "config.toml").write_text("\n".join([*lines, ""]), encoding="utf-8")
        options = ("--json", "--skip-git-repo-check", "--sandbox", "danger-full-access")
        return (_program(place, "codex"), "exec", *options, ASKED)

    def check(said: str, place: Place) -> str:
        items = [event["item"] for event in _events(said) if event.get("type") == "item.completed"]
        done = [item for item in items if item["type"] not in ("agent_message", "error")]
        kinds = [item["type"] for item in done]
        if kinds != [*steps]:
            return f"it did {kinds}, and not {[*steps]}"
        if PRINTED not in done[-1]["aggregated_output"] or RUN not in done[-1]["command"]:
            return f"it ran {done[-1]['command']!r}, which said {done[-1]['aggregated_output']!r}"
        if mcp and "A greeting." not in json.dumps(done[0]):
            return f"the tool of an MCP server told {done[0]}"
        return _written(place) or _told([item["text"] for item in items if item["type"] == "agent_message"], TOLD)

    options = (*ROOM, "--set", f"server.model_name={model}")
    return Call(name, words, check, options, _codex_variables)


def _codex_variables(place: Place) -> dict[str, str]:
    return {**LOOPBACK, "HOME": str(place.folder), "CODEX_HOME": str(place.folder / ".codex")}


def _claude_code(name: str, asked: str, rights: Sequence[str], tools: Sequence[str], last: str, told: str) -> Call:
    """Claude Code with a task: what it may do unasked, which tools the model calls, what the last one's result has in
    it, and what is told in the end."""

    def words(place: Place) -> Sequence[object]:
        (place.folder / PICTURE).write_bytes(base64.b64decode(PNG))
        output = ("--output-format", "stream-json", "--verbose")
        return (_program(place, "claude"), "--print", asked, *output, *rights)

    def check(said: str, place: Place) -> str:
        events = _events(said)
        blocks = [
            block
            for event in events
            if event.get("type") in ("assistant", "user")
            for block in event["message"]["content"]
            if isinstance(block, dict)
        ]
        called = [block["name"] for block in blocks if block["type"] == "tool_use"]
        found = [json.dumps(block["content"]) for block in blocks if block["type"] == "tool_result"]
        if called != [*tools]:
            return f"it called {called}"
        if last not in found[-1]:
            return f"what it called last said {found[-1]}"
        texts = [event["result"] for event in events if event.get("type") == "result"]
        return (_written(place) if "Write" in tools else "") or _told(texts, told)

    return Call(name, words, check, ROOM, _claude_variables)


def _claude_variables(place: Place) -> dict[str, str]:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    return {
        **LOOPBACK,
        "HOME": str(place.folder),
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "-",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        **dict.fromkeys(models, place.model),
    }


def _events(said: str) -> list[dict[str, Any]]:
    """Lines that are JSON."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def _written(place: Place) -> str:
    text = (place.folder / "hello.py").read_text(encoding="utf-8")
    return "" if text == f"{LINE}\n" else f"hello.py has {text!r}"


def _told(texts: Sequence[str], wanted: str) -> str:
    return "" if texts == [wanted] else f"it told {texts}"


COMMAND, PATCH, MCP = "command_execution", "file_change", "mcp_tool_call"
AGENTS = (
    Client(
        "Codex",
        "0.171.0",
        [
            _codex("exec: a file is written, run, told of", "chat", [COMMAND, COMMAND]),
            _codex("exec: the same by apply_patch", "gpt-5.5", [PATCH, COMMAND]),
            _codex("exec: the same behind a tool of an MCP server", "chat", [MCP, COMMAND, COMMAND], mcp=True),
        ],
        packages=["@openai/codex@0.171.0"],
        calls_tools=True,
    ),
    Client(
        "Claude Code",
        "2.1.197",
        [
            _claude_code(
                "a file is written, run, told of",
                ASKED,
                ("--permission-mode", "acceptEdits", "--allowedTools", f"Bash({RUN})"),
                ("Write", "Bash"),
                PRINTED,
                TOLD,
            ),
            _claude_code(
                "a picture is read, the web is searched, it goes on",
                SEARCHED,
                ("--allowedTools", "Read", "WebSearch"),
                ("Read", "WebSearch"),
                NOT_RUN,
                FOUND,
            ),
        ],
        packages=["@anthropic-ai/claude-code@2.1.197"],
        calls_tools=True,
    ),
)
