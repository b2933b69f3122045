"""In which forms a model writes calls and thoughts, as the configuration names them or its chat template shows: for
`trtrun serve`, and `trtrun check`, which needs no server.
"""

from __future__ import annotations

import logging

from launch.serve.api.openai.output.formats import find_reasoning_format, find_tool_format
from trtrun.chats.chat_template import ChatTemplate
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError

logger = logging.getLogger(__name__)


def find_formats(section: ServerSection, template: ChatTemplate | None) -> tuple[str, str]:
    """Formats of calls and of thoughts, by their names; empty for none.

    Raises:
        ConfigError: there is none of that name.
    """
    source = None if template is None else template.tool_source or template.source
    found = []
    for key, asked, find in (
        ("tool_parser", section.tool_parser, find_tool_format),
        ("reasoning_parser", section.reasoning_parser, find_reasoning_format),
    ):
        try:
            found.append(find(asked, source))
        except ValueError as error:
            raise ConfigError(f"server.{key}: {error}") from None
    return found[0], found[1]


def told_formats(section: ServerSection, template: ChatTemplate | None) -> tuple[str, str]:
    """The same, with a warning where it is not known how calls are written.

    Raises:
        ConfigError: there is none of that name.
    """
    tools, reasoning = find_formats(section, template)
    if _is_unknown(section, template, tools):
        logger.warning(
            "the chat template shows tools, but how the model writes calls is not known by it: those that it makes by "
            "itself stay text; name their form in server.tool_parser, or none to be spared this line"
        )
    return tools, reasoning


def describe_formats(section: ServerSection, template: ChatTemplate) -> str:
    """A line that says which they are.

    Raises:
        ConfigError: there is none of that name.
    """
    tools, reasoning = find_formats(section, template)
    if _is_unknown(section, template, tools):
        tools = "of an unknown form (server.tool_parser)"
    return f"chats: calls {tools or 'not looked for'}, thoughts {reasoning or 'not told apart'}"


def _is_unknown(section: ServerSection, template: ChatTemplate | None, tools: str) -> bool:
    """Whether a template shows tools, and not how they are called."""
    return section.tool_parser is None and not tools and template is not None and template.looks_at_tools
