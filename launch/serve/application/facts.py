"""What reading requests takes of a model and its configuration: for a server's parsers, and for rows without one."""

from __future__ import annotations

from launch.serve.application.chat_formats import told_formats
from launch.serve.parsing.messages import Facts
from trtrun.chats.chat_template import ChatTemplate
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.model_paths import name_of_model
from trtrun.loading.model_settings import sampling_defaults
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import Tokenizer


def model_name(config: RuntimeConfig) -> str:
    """What clients call the model."""
    return config.server.model_name or name_of_model(config.target.model)


def make_facts(
    spec: JobSpec, name: str, tokenizer: Tokenizer | None, template: ChatTemplate | None, tokenizer_hash: str = ""
) -> Facts:
    """What reading requests takes of a model.

    Args:
        spec: of the model.
        name: what clients call it.
        tokenizer: None where there is none.
        template: of chats; None where there is none.
        tokenizer_hash: see Facts.

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
        model_name=name,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        draft_len=config.draft_len,
        excludes_prompt=section.exclude_input_in_output,
        max_batch_size=config.scheduler.max_batch_size,
        lora_tasks=tuple(config.adapters),
        sampling_defaults=sampling_defaults(config),
        refuses_unseen_tools=section.tools_unseen == "refuse",
    )
