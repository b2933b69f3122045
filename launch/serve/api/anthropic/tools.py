"""Tools of /v1/messages as functions, which are all that models know. Those that Anthropic's servers would run are left
out. It knows JSON values, and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from launch.serve.api.anthropic.contents import wrong
from launch.serve.api.openai.taking import check_names
from trtrun.core.values import show_value

_ON_SERVERS = re.compile(r"(web_search|web_fetch|code_execution|advisor|tool_search_tool_(bm25|regex))(_\d{8})?")
"""Types of tools that Anthropic's servers run. Agents offer them beside their own, whatever the server is."""

_TOOL = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "defer_loading",
    "allowed_callers", "input_examples",
)  # fmt: skip
"""All tools are shown to the model, deferred ones, too."""


class Offered(NamedTuple):
    """The tools of a request.

    Attributes:
        functions: as chats have them.
        places: of each in the request, for messages.
        left_out: names of the others.
    """

    functions: list[dict[str, Any]]
    places: list[str]
    left_out: list[str]


def read_tools(value: object, is_counted: bool) -> Offered:
    """The tools that a request offers.

    With nothing but tools that are left out a request is refused, unless its tokens are only counted: Claude Code asks
    so for a search, and would take whatever the model says for what was found.

    Raises:
        Refusal: one is wrong, or none is left.
    """
    if not isinstance(value, list):
        raise wrong(f"tools must be a list of objects, not {show_value(value)}", "tools")
    offered = Offered([], [], [])
    for place, tool in enumerate(value):
        where = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise wrong(f"{where} must be an object, not {show_value(tool)}", "tools")
        kind = tool.get("type")
        if isinstance(kind, str) and _ON_SERVERS.fullmatch(kind):
            offered.left_out.append(str(tool.get("name")))
            continue
        offered.functions.append({"type": "function", "function": _read_tool(where, tool)})
        offered.places.append(where)
    if offered.left_out and not offered.functions and not is_counted:
        raise _not_run("tools[0]", value[0]["type"])
    return offered


def _read_tool(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if value.get("type", "custom") not in ("custom", None):
        raise _not_run(where, value["type"])
    check_names("tools", where, value, _TOOL)
    callers = value.get("allowed_callers")
    if callers is not None and not (isinstance(callers, list) and "direct" in callers):
        raise wrong(f"{where}.allowed_callers is not supported here: leave it out", "tools")
    schema, examples = value.get("input_schema"), value.get("input_examples")
    if not isinstance(schema, dict):
        raise wrong(f"{where}.input_schema must be a JSON schema, not {show_value(schema)}", "tools")
    if examples is not None and not (isinstance(examples, list) and all(isinstance(item, dict) for item in examples)):
        raise wrong(f"{where}.input_examples must be a list of objects, not {show_value(examples)}", "tools")
    function = {name: value[name] for name in ("name", "description", "strict") if value.get(name) is not None}
    # A schema's own word for examples, which templates show as they show the schema.
    return function | {"parameters": {**schema, "examples": examples} if examples else schema}


def _not_run(where: str, kind: object) -> Exception:
    return wrong(
        f"{where}.type: {show_value(kind)} is not run here: give tools of your own, with an input_schema", "tools"
    )
