"""In which form a checkpoint's calls are, and what is said where its template does not tell."""

from __future__ import annotations

import logging

import pytest

from launch.serve.application.parts import _formats
from trtrun.chats.chat_template import ChatTemplate
from trtrun.configuration.server_config import ServerSection
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
        assert _formats(ServerSection(tool_parser=asked), template) == (found, "")
    assert ["server.tool_parser" in line for line in caplog.messages] == [True] * is_told


def test_a_form_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server.tool_parser: there is no 'qwen3_code'.*qwen3_coder"):
        _formats(ServerSection(tool_parser="qwen3_code"), None)
