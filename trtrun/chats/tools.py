"""Tools of a request: which there are, and whether one must be called; read, checked, and as chat templates see
them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from trtrun.core.guide import OPTIONS_KEY, check_schema_options
from trtrun.core.values import check_characters, read_flag, show_value
from trtrun.errors import InvalidFieldError, InvalidRequestError, nearest

MOST_NAME_CHARACTERS = 256

_PLACE = re.compile(r"(?<![.\w])tools\[(\d+)\]")

_OF_TOOL = ("type", "function")
_OF_FUNCTION = ("name", "description", "parameters", "strict")
_NO_PARAMETERS: Mapping[str, Any] = {
    OPTIONS_KEY: {"whitespace_flexible": False},
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Choice(Enum):
    """What a request wants of its tools."""

    NONE = "none"
    """None is called."""

    AUTO = "auto"
    """The model calls what it wants to."""

    REQUIRED = "required"
    """At least one is called."""


@dataclass(frozen=True)
class Tool:
    """A function that may be called.

    Attributes:
        name: of it.
        parameters: the JSON schema of its arguments.
        is_strict: its arguments must be as the schema says.
        shown: as templates see it.
        place: in the request, for messages.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    shown: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: all of them; the model sees these.
        callable: those that may be called.
        choice: what is wanted.
        in_parallel: several may be called in one answer.
    """

    tools: Sequence[Tool]
    callable: Sequence[Tool]
    choice: Choice
    in_parallel: bool = True

    @property
    def shown(self) -> list[Mapping[str, Any]]:
        """The tools as templates see them."""
        return [tool.shown for tool in self.tools]


def at_places(use: ToolUse, places: Sequence[str]) -> ToolUse:
    """The tools with other places for messages: their places in the request that they were made from."""
    tools = [replace(tool, place=place) for tool, place in zip(use.tools, places, strict=True)]
    by_name = {tool.name: tool for tool in tools}
    return replace(use, tools=tools, callable=[by_name[tool.name] for tool in use.callable])


def words_at_places(line: str, places: Sequence[str]) -> str:
    """What is said of tools, said of the places in the request that they were made of."""
    return _PLACE.sub(lambda found: places[int(found[1])] if int(found[1]) < len(places) else found[0], line)


def read_tools(given: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a body; None where it has none.

    Raises:
        InvalidFieldError: one is wrong, or what is chosen is not among them.
    """
    value = given.get("tools", [])
    if not isinstance(value, list):
        raise _wrong("tools", f"tools must be a list of objects, not {show_value(value)}")
    tools = [_read_tool(f"tools[{place}]", item) for place, item in enumerate(value)]
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise _wrong("tools", f"{tool.place}: there are two tools named {show_value(tool.name)}: give each its own")
        names.add(tool.name)
    in_parallel = given.get("parallel_tool_calls", True)
    try:
        in_parallel = read_flag("parallel_tool_calls", in_parallel)
    except InvalidRequestError as error:
        raise _wrong("parallel_tool_calls", str(error)) from None
    wanted = given.get("tool_choice", "auto")
    choice, chosen = _read_choice(wanted, tools)
    # A function that is named is called once.
    in_parallel = in_parallel and not (isinstance(wanted, dict) and wanted.get("type") == "function")
    return ToolUse(tools, chosen, choice, in_parallel) if tools else None


def _read_tool(where: str, value: Any) -> Tool:
    if not isinstance(value, dict):
        raise _wrong("tools", f"{where} must be an object, not {show_value(value)}")
    if value.get("type", "function") != "function":
        raise _wrong("tools", f"{where}.type must be function, not {show_value(value['type'])}: no others are run here")
    _check_names(where, value, _OF_TOOL)
    function = value.get("function")
    if not isinstance(function, dict):
        raise _wrong("tools", f"{where}.function must be an object with a name, not {show_value(function)}")
    _check_names(f"{where}.function", function, _OF_FUNCTION)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_NAME_CHARACTERS:
        raise _wrong(
            "tools",
            f"{where}.function.name must be a text of 1 to {MOST_NAME_CHARACTERS} characters, not {show_value(name)}",
        )
    if description is not None and not isinstance(description, str):
        raise _wrong("tools", f"{where}.function.description must be a text, not {show_value(description)}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong("tools", f"{where}.function.parameters must be a JSON schema, not {show_value(parameters)}")
    of_type = (parameters or {}).get("type", "object")
    if of_type != "object" and not (isinstance(of_type, list) and "object" in of_type):
        line = f'its type must be "object", as arguments are one, not {show_value(of_type)}'
        raise _wrong("tools", f"{where}.function.parameters: {line}")
    try:
        check_schema_options(f"{where}.function.parameters", parameters or {})
        check_characters(f"{where}.function.name", name)
        is_strict = read_flag(f"{where}.function.strict", function.get("strict") or False)
    except InvalidRequestError as error:
        raise _wrong("tools", str(error)) from None
    # Models have not seen `strict` in training, nor keys without a value.
    shown = {key: item for key, item in function.items() if item is not None and key != "strict"}
    return Tool(name, parameters or _NO_PARAMETERS, is_strict, {"type": "function", "function": shown}, where)


def _read_choice(value: Any, tools: Sequence[Tool]) -> tuple[Choice, Sequence[Tool]]:
    """What is wanted, and which tools may be called."""
    if isinstance(value, str) and value in [choice.value for choice in Choice]:
        choice, chosen = Choice(value), tools
    elif isinstance(value, dict) and value.get("type") == "function":
        choice, chosen = Choice.REQUIRED, [_find(value, "tool_choice", tools)]
    elif isinstance(value, dict) and value.get("type") == "allowed_tools":
        choice, chosen = _read_allowed(value.get("allowed_tools"), tools)
    else:
        raise _wrong(
            "tool_choice",
            'tool_choice must be none, auto, required, or an object such as {"type": "function", "function": {"name": '
            f'"…"}}}}, not {show_value(value)}',
        )
    if choice is Choice.REQUIRED and not chosen:
        raise _wrong("tool_choice", "tool_choice wants a tool to be called, and there are no tools: give tools")
    return choice, chosen


def _read_allowed(value: Any, tools: Sequence[Tool]) -> tuple[Choice, Sequence[Tool]]:
    listed = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(listed, list) or value.get("mode") not in ("auto", "required"):
        raise _wrong(
            "tool_choice",
            "tool_choice.allowed_tools must be an object with mode, auto or required, and tools, not "
            f"{show_value(value)}",
        )
    names = {_find(item, f"tool_choice.allowed_tools.tools[{place}]", tools).name for place, item in enumerate(listed)}
    if not names and value["mode"] == "auto":
        return Choice.NONE, []
    return Choice(value["mode"]), [tool for tool in tools if tool.name in names]


def _find(value: Any, where: str, tools: Sequence[Tool]) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": "…"}}'
        raise _wrong("tool_choice", f"{where} must name a function, as {form}, not {show_value(value)}")
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        known = nearest(name, [tool.name for tool in tools])
        raise _wrong("tool_choice", f"{where} names {show_value(name)}, which is not among the tools{known}")
    return found


def _check_names(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, item in value.items():
        if name not in known and item is not None:
            raise _wrong("tools", f"unknown field {show_value(name)} of {where}{nearest(name, known)}")


def _wrong(field: str, line: str) -> InvalidFieldError:
    return InvalidFieldError(field, line)
