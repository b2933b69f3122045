"""In which form a checkpoint's calls are, and what is said where its template does not tell."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Literal

import pytest

from launch.serve.api.openai.output import formats
from launch.serve.application.facts import describe_formats, told_formats
from launch.serve.application.parts import _say_unseen_tools
from trtrun.chats.chat_template import ChatTemplate
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError

UNKNOWN = "{{ tools | tojson }}{{ messages }}"


@pytest.mark.parametrize(
    ("template", "asked", "found", "is_told"),
    [
        (ChatTemplate(UNKNOWN, {}), None, "", True),
        (ChatTemplate("{{ messages }}", {}, "of tools"), None, "", True),
        (ChatTemplate(UNKNOWN, {}), "none", "", False),
        (ChatTemplate(UNKNOWN, {}), "qwen3_xml", "qwen3_coder", False),
        (ChatTemplate(UNKNOWN + "<tool_call>", {}), None, "hermes", False),
        (ChatTemplate("{{ messages }}", {}), None, "", False),
        (None, None, "", False),
    ],
)
def test_a_form_that_is_not_known_is_told_at_the_start(
    caplog: pytest.LogCaptureFixture, template: ChatTemplate | None, asked: str | None, found: str, is_told: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        assert told_formats(ServerSection(tool_parser=asked), template) == (found, "")
    assert ["server.tool_parser" in line for line in caplog.messages] == [True] * is_told


@pytest.mark.parametrize("unseen", ["refuse", "ignore"])
def test_a_template_that_shows_no_tools_is_told_at_the_start(
    caplog: pytest.LogCaptureFixture, unseen: Literal["refuse", "ignore"]
) -> None:
    with caplog.at_level(logging.WARNING):
        for template in (ChatTemplate(UNKNOWN, {}), None, ChatTemplate("{{ messages }}", {})):
            _say_unseen_tools(ServerSection(tools_unseen=unseen), template)
    (line,) = caplog.messages
    assert "shows no tools to the model" in line and ("refused" in line) == (unseen == "refuse")


def test_a_form_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server.tool_parser: there is no 'qwen3_code'.*qwen3_coder"):
        told_formats(ServerSection(tool_parser="qwen3_code"), None)


@pytest.mark.parametrize(
    ("template", "asked", "line"),
    [
        (
            "{{ tools }}<tool_call><arg_key></arg_key>\n<arg_value></arg_value></think>",
            None,
            "calls glm45, thoughts qwen3",
        ),
        (UNKNOWN, None, "calls of an unknown form (server.tool_parser), thoughts not told apart"),
        (UNKNOWN, "none", "calls not looked for, thoughts not told apart"),
        ("{{ messages }}", None, "calls not looked for, thoughts not told apart"),
    ],
)
def test_a_line_says_which_forms_there_are(template: str, asked: str | None, line: str) -> None:
    assert describe_formats(ServerSection(tool_parser=asked), ChatTemplate(template, {})) == f"chats: {line}"


@pytest.mark.parametrize(
    ("key", "known", "aliases"),
    [
        ("tool", formats.TOOL_FORMATS, formats._TOOL_ALIASES),
        ("reasoning", formats.REASONING_FORMATS, formats._REASONING_ALIASES),
    ],
)
def test_the_docs_table_and_the_key_name_every_form(
    key: str, known: dict[str, object], aliases: dict[str, str]
) -> None:
    docs = Path(__file__).parents[4] / "docs"
    table = (docs / "tools.md").read_text(encoding="utf-8").split(f"| `server.{key}_parser` |")[1].split("\n\n")[0]
    first = " ".join(line.split(" | ")[0] for line in table.splitlines()[2:])
    unnamed = {"qwen", "llama3", "deepseek-r1"}  # older names
    assert set(re.findall(r"`([^`]+)`", first)) == {*known, *aliases, formats.NONE} - unnamed
    of_key = (docs / "configuration.md").read_text(encoding="utf-8").split(f"`server.{key}_parser`")[1].split("\n")[0]
    assert all(re.search(rf"\b{name}\b", of_key) for name in known)
