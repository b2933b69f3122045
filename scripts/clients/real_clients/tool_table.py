"""Clients that call tools and ask for typed answers: what is installed for each, and which program drives it.

Each program runs a list of cases against a server that has the chat model of chat_model.py. It starts nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from scripts.clients.real_clients.calls import Call, Client, Place, says

FOLDER = Path(__file__).resolve().parent
NODE = shutil.which("node") or "node"
ALL_CASES = r"(?m)^(\d+) of \1 cases$"


def _client(name: str, version: str, program: str, call: str, *needs: str) -> Client:
    def words(place: Place) -> Sequence[object]:
        return (FOLDER / program, place.url, place.model)

    return Client(name, version, [Call(call, words, says(ALL_CASES))], needs, calls_tools=True)


def _node_client(name: str, version: str, program: str, call: str, *packages: str) -> Client:
    def words(place: Place) -> Sequence[object]:
        return (NODE, FOLDER / program, place.url, place.model)

    return Client(name, version, [Call(call, words, says(ALL_CASES))], packages=packages, calls_tools=True)


TOOL_CLIENTS = (
    _client("openai-python", "3.57.0", "openai_tools.py", "parse, stream, responses", "openai==3.57.0"),
    _node_client(
        "openai-node", "6.49.0", "openai_node.mjs", "zod, stream, runTools, responses", "openai@6.49.0", "zod@4.6.7"
    ),
    _client(
        "LangChain",
        "1.5.2, langchain-openai 1.7.4",
        "langchain_client.py",
        "with_structured_output, bind_tools, agents",
        "langchain==1.5.2",
        "langchain-openai==1.7.4",
    ),
    _client(
        "instructor",
        "1.17.0",
        "instructor_client.py",
        "modes, retries, partials",
        "instructor==1.17.0",
        "anthropic==2.14.0",
    ),
    _client("openai-agents", "0.24.0", "agents_client.py", "tools, handoffs, typed", "openai-agents==0.24.0"),
    _client(
        "Pydantic AI", "2.68.0", "pydantic_ai_client.py", "tools, typed", "pydantic-ai-slim[openai,anthropic]==2.68.0"
    ),
    _client("anthropic", "2.14.0", "anthropic_client.py", "messages, tool_runner, parse", "anthropic==2.14.0"),
)
