"""Tools of /v1/responses as functions, which are all that models know: of each kind, what the model sees, and the item
that a call comes back as.

A custom tool is a function with one text. A tool of a namespace has the namespace in its name. What clients offer by
themselves and OpenAI's servers would run is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.calls import CallItem
from launch.serve.api.openai.taking import check_names
from trtrun.core.values import show_value

INPUT = "input"
"""The one argument of a custom tool."""

LOCAL_SHELL = "local_shell"
TOOL_SEARCH = "tool_search"

_LEFT_OUT = re.compile(r"(web_search(_preview)?|image_generation)(_\d{4}_\d{2}_\d{2})?")
"""Types that agents offer whatever the server is, perhaps with a date; no model here can call them."""

_FUNCTION = ("type", "name", "description", "parameters", "strict", "output_schema", "defer_loading")
_CUSTOM = ("type", "name", "description", "format", "defer_loading")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"allowed_callers": (["direct"],), "async": (False,)}
"""Fields of both, at the values that say what is so here anyway. All tools are shown to the model, deferred ones,
too."""

_SHELL_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class Offered(NamedTuple):
    """The tools of a request.

    Attributes:
        tools: as they were given, without those that are left out.
        functions: as chats have them.
        places: of each in the request, for messages.
        items: what calls come back as, by the function's name, where that is not a plain function.
    """

    tools: list[Any]
    functions: list[dict[str, Any]]
    places: list[str]
    items: dict[str, CallItem]


_Function = tuple[str, dict[str, Any], CallItem | None]
"""One of a request's: its place, as chats have it, and what its calls come back as; None where that is a function's
call."""


def read_tools(value: object, found: Sequence[tuple[str, Any]] = ()) -> Offered:
    """The tools that a request offers, and those that were found in its conversation, each with its place there.

    Raises:
        Refusal: one is wrong, or none is left of those that there are.
    """
    if not isinstance(value, list):
        raise _wrong(f"tools must be a list of objects, not {show_value(value)}")
    offered, names = Offered([], [], [], {}), set[str]()
    given = [(f"tools[{place}]", tool) for place, tool in enumerate(value)]
    for number, (where, tool) in enumerate([*given, *found]):
        is_given = number < len(given)
        for place, function, item in _read_tool(where, tool):
            name = str(function["name"])
            if name in names and not is_given:
                continue  # it was found before
            names.add(name)
            offered.functions.append({"type": "function", "function": function})
            offered.places.append(place)
            if item is not None:
                offered.items[name] = item
        if is_given and not _is_left_out(tool):
            offered.tools.append(tool)
    left_out = [(where, tool) for where, tool in given if _is_left_out(tool)]
    if left_out and not offered.functions:
        raise _wrong(f"{_no_function(*left_out[0])}: no others are run here")
    _add_plain_names(offered.items, names)
    return offered


def shown_name(name: object, namespace: object) -> object:
    """The name by which the model knows a tool, of a namespace or of none."""
    if not isinstance(name, str) or not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _add_plain_names(items: dict[str, CallItem], names: set[str]) -> None:
    """Calls of a namespace's tools by their own names, as descriptions have them, where no other tool has that name."""
    plain: dict[str, list[CallItem]] = {}
    for item in items.values():
        if item.namespace is not None:
            plain.setdefault(item.name, []).append(item)
    items.update({name: found[0] for name, found in plain.items() if len(found) == 1 and name not in names})


def _is_left_out(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == TOOL_SEARCH:
        return bool(value.get("execution") != "client")
    return isinstance(kind, str) and _LEFT_OUT.fullmatch(kind) is not None


def _read_tool(where: str, value: Any, namespace: str | None = None) -> Iterator[_Function]:
    """The functions of a tool; none where it is left out."""
    if not isinstance(value, dict):
        raise _wrong(f"{where} must be an object, not {show_value(value)}")
    kind = value.get("type")
    if _is_left_out(value):
        return
    if kind == "function":
        _check(where, value, _FUNCTION)
        function = {key: value[key] for key in ("name", "description", "parameters", "strict") if key in value}
        item = None if namespace is None else CallItem("function", str(value.get("name")), namespace)
    elif kind == "custom":
        _check(where, value, _CUSTOM)
        function = _custom_function(where, value)
        item = CallItem("custom", str(value.get("name")), namespace)
    elif namespace is not None:
        raise _wrong(f"{where}.type must be function or custom, not {show_value(kind)}")
    elif kind == "namespace":
        yield from _read_namespace(where, value)
        return
    elif kind == TOOL_SEARCH:
        check_names("tools", where, value, ("type", "execution", "description", "parameters"))
        function = {key: value[key] for key in ("description", "parameters") if key in value} | {"name": TOOL_SEARCH}
        item = CallItem(TOOL_SEARCH, TOOL_SEARCH, None)
    elif kind == LOCAL_SHELL:
        check_names("tools", where, value, ("type",))
        function = {"name": LOCAL_SHELL, "description": "Runs a command.", "parameters": _SHELL_PARAMETERS}
        item = CallItem(LOCAL_SHELL, LOCAL_SHELL, None)
    else:
        raise _wrong(f"{_no_function(where, value)}: no others are run here")
    yield where, {**function, "name": shown_name(function.get("name"), namespace)}, item


def _read_namespace(where: str, value: Mapping[str, Any]) -> Iterator[_Function]:
    check_names("tools", where, value, ("type", "name", "description", "tools"))
    name, tools = value.get("name"), value.get("tools")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.name must be a text, not {show_value(name)}")
    if not isinstance(tools, list):
        raise _wrong(f"{where}.tools must be a list of tools, not {show_value(tools)}")
    for place, tool in enumerate(tools):
        yield from _read_tool(f"{where}.tools[{place}]", tool, name)


def _custom_function(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A function with one text. Of a format the model is told: what it writes is JSON, in which a grammar of the text
    cannot be followed, and a regular expression can where calls are guided."""
    form = value.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "grammar"):
        raise _wrong(f'{where}.format must be {{"type": "text"}} or a grammar, not {show_value(form)}')
    text: dict[str, Any] = {"type": "string"}
    description = value.get("description")
    told = [description] if isinstance(description, str) else []
    told.append(f"The argument `{INPUT}` has the whole text, as it is.")
    if kind == "grammar":
        check_names("tools", f"{where}.format", form, ("type", "syntax", "definition"))
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise _wrong(f"{where}.format must have a syntax, lark or regex, and a definition, not {show_value(form)}")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        told.append(f"It follows this {'Lark grammar' if syntax == 'lark' else 'regular expression'}:\n{definition}")
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": value.get("name"), "description": "\n\n".join(told), "parameters": schema}


def _check(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    check_names("tools", where, value, (*known, *_NEUTRAL))
    for name, neutral in _NEUTRAL.items():
        if value.get(name) is not None and value[name] not in neutral:
            raise _wrong(f"{where}.{name} is not supported here: leave it out")


def _no_function(where: str, value: Any) -> str:
    return f"{where}.type must be function, custom or namespace, not {show_value(value.get('type'))}"


def read_choice(value: Any) -> Any:
    """`tool_choice` in the words of chats."""
    if not isinstance(value, dict):
        return value
    if value.get("type") == "allowed_tools":
        listed = value.get("tools")
        tools = [_named(item) for item in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    return _named(value)


def _named(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": shown_name(value.get("name"), value.get("namespace"))}}
    if kind in (TOOL_SEARCH, LOCAL_SHELL):
        return {"type": "function", "function": {"name": kind}}
    return value


def _wrong(line: str) -> Refusal:
    return Refusal(Kind.INVALID, line, "tools")
