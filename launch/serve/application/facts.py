"""What reading requests takes of a model and its configuration, among it the forms in which the model writes calls and
thoughts: for a server's parsers, for rows without one, and for `trtrun check`.
"""

from __future__ import annotations

import logging

from launch.serve.api.openai.output.formats import find_reasoning_format, find_tool_format
from launch.serve.parsing.messages import Facts
from trtrun.chats.chat_template import ChatTemplate
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.model_paths import name_of_model
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError
from trtrun.loading.model_settings import sampling_defaults
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import Tokenizer

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


def model_name(config: RuntimeConfig) -> str:
    """What clients call the model."""
    return config.server.model_name or name_of_model(config.target.model)


def make_facts(
    spec: JobSpec, tokenizer: Tokenizer | None, template: ChatTemplate | None, tokenizer_hash: str = ""
) -> Facts:
    """What reading requests takes of a model.

    Args:
        spec: of the model.
        tokenizer: None where there is none.
        template: of chats; None where there is none.
        tokenizer_hash: of its files, which a parser worker compares with what it reads; empty where there is none.

    Raises:
        TrtrunError: what the model says of sampling is wrong, or there is no parser of a name that the section has.
    """
    config, model, section = spec.config, spec.target, spec.config.server
    tool_format, reasoning_format = told_formats(section, template)
    return Facts(
        tokenizer=None if tokenizer is None else str(config.tokenizer or config.target.model),
        tokenizer_hash=tokenizer_hash,
        template=None if template is None else template.source,
        template_tokens={} if template is None else template.tokens,
        tool_template=None if template is None else template.tool_source,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        model_name=model_name(config),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        draft_len=config.draft_len,
        excludes_prompt=section.exclude_input_in_output,
        max_batch_size=config.scheduler.max_batch_size,
        lora_tasks=tuple(config.adapters),
        sampling_defaults=sampling_defaults(config),
        refuses_unseen_tools=section.tools_unseen == "refuse",
    )
